"Every method with every task, loss and callback: the scores, the chosen items, and plain training on the same batches"
import contextlib, io, os, zlib
from itertools import combinations

import pytest
from fastai.callback.core import CancelBatchException
from matrix import *

def leaves(o):
    if isinstance(o, torch.Tensor): return [o]
    return sum(map(leaves, o.values() if isinstance(o, dict) else o if isinstance(o, (tuple,list)) else []), [])

def keys(xb):
    "What tells the items of a batch apart; padding does not"
    def bytes_of(row): return (row[row!=1] if row.dtype==torch.int64 and row.ndim else row).contiguous().numpy().tobytes()
    ts = [t.as_subclass(torch.Tensor) for t in leaves(xb)]
    return [b'|'.join(bytes_of(t[i]) for t in ts) for i in range(len(ts[0]))]

def copy_of(o): return map_tensors(lambda t: t.clone(), o)
def main_output(learn, pred): return pred[0] if hasattr(learn, 'rnn') else pred

class Before(Callback):
    "Ahead of the selection: scores the batch by hand"
    order,run_valid = SelectionCallback.order-1,False
    def __init__(self, by_hand): self.by_hand,self.records = by_hand,[]
    def before_train(self): self.records.append([])
    def before_batch(self):
        cb = self.learn.selection
        flags,rng = [m.training for m in self.model.modules()],torch.get_rng_state()
        autocast = torch.autocast('cpu', dtype=torch.bfloat16) if hasattr(self.learn, 'mixed_precision') else contextlib.nullcontext()
        self.model.eval()
        with torch.no_grad(),autocast: pred = main_output(self.learn, self.model(*plain(self.xb)))
        for m,training in zip(self.model.modules(), flags): m.training = training
        torch.set_rng_state(rng)
        self.records[-1].append(dict(keys=keys(self.xb), losses=self.by_hand(pred.float(), *plain(self.yb)).tolist(), seen=None, last=self.iter==self.n_iter-1,
            multiple=8 if hasattr(self.learn, 'mixed_precision') else 1, gen=torch.Generator().set_state(cb.generator.get_state()), trained=None))

class After(Callback):
    "Behind the selection: notes what it hands over, and what the items' losses are in training"
    order,run_valid = SelectionCallback.order+1,False
    def before_batch(self):
        record,cb = self.before.records[-1][-1],self.learn.selection
        weight = None if cb.item_weight is None else cb.item_weight.clone()
        record.update(xb=copy_of(self.xb), yb=copy_of(self.yb), weight=weight, rng=torch.get_rng_state(), trained=keys(self.xb))

class Losses(Callback):
    order,run_valid = 70,False
    def after_loss(self):
        record,pred = self.before.records[-1][-1],self.pred.detach().float()
        mixer = next((cb for cb in self.learn.cbs if isinstance(cb, (MixUp,CutMix)) and cb.stack_y), None)
        losses = self.before.by_hand(pred, *plain(self.yb))
        if mixer: losses = mixer.lam*losses+(1-mixer.lam)*self.before.by_hand(pred, *plain(mixer.yb1))
        record['training_losses'] = losses.tolist()

class Replay(Callback):
    "Feeds plain training the batches that a selection handed over"
    order,run_valid = SelectionCallback.order,False
    def __init__(self, records): self.epochs = iter(records)
    def before_train(self):
        self.batches = next(self.epochs)
        self.learn.dl = [self.dls.train.one_batch()]*len(self.batches) if len(self.batches)!=len(self.learn.dl) else self.learn.dl
    def before_batch(self):
        self.now = self.batches[self.iter]
        if self.now['trained'] is None:
            self.learn.yb = ()
            raise CancelBatchException
        self.learn.xb,self.learn.yb = self.now['xb'],self.now['yb']
        torch.set_rng_state(self.now['rng'])
    def after_pred(self):
        if (w := self.now['weight']) is None: return
        out = main_output(self.learn, self.pred)
        out.register_hook(lambda g: g*w.view(-1, *[1]*(g.ndim-1)).to(g.dtype))

def run(task, other, first, witnesses=(), tmp_path=None):
    "A learner that has trained"
    make,_ = TASKS[task]
    before,after,fit,*_ = OTHERS[other]
    learn = make(path=tmp_path)
    learn.add_cbs([f() for f in before])
    learn.add_cb(first)
    learn.add_cbs([f() for f in after])
    learn.add_cbs(witnesses)
    set_seed(5)
    with learn.no_bar(),learn.no_logging(),contextlib.redirect_stdout(io.StringIO()),warnings.catch_warnings():
        warnings.simplefilter('ignore')
        fit(learn)
    return learn

def watch(cb, loads):
    "Note the scores that a method computes, and what it goes by when it chooses before loading"
    score_items,choose_items = cb.score_items,cb.choose_items
    def noting():
        scores,losses = score_items()
        cb.learn.before.records[-1][-1]['seen'] = scores.tolist()
        return scores,losses
    def noting_items(idxs):
        gen,losses = torch.Generator().set_state(cb.generator.get_state()),cb.memory.loss.tolist()
        if (chosen := choose_items(idxs)) is not None: loads[len(cb.learn.before.records)-1] = idxs.tolist(),losses,gen
        return chosen
    cb.score_items,cb.choose_items = noting,noting_items

def close(got, wanted, tol=2e-5): torch.testing.assert_close(torch.tensor(got).double(), torch.tensor(wanted).double(), rtol=tol, atol=tol)

def item_keys(learn):
    "The key of each item of the training set, by its index"
    dl = learn.dls.train.new(shuffle=False, drop_last=False)
    dl.get_idxs = lambda: list(range(N))
    return sum([keys(b[:dl.n_inp]) for b in dl], [])

def loaded(oracle, load, known, names):
    "The batches that a method should load in an epoch, and the weight of each item"
    idxs,stored,gen = load
    for i in idxs:
        if isinstance(oracle, HalfBefore): continue # it goes by nothing
        if names[i] in known: close(stored[i], known[names[i]])
        else: assert math.isnan(stored[i])
    stored = [None if math.isnan(l) else l for l in stored]
    rows,weights = oracle.load([stored[i] for i in idxs], stored, gen)
    if len(rows)%BS==1 and len(rows)<len(idxs): rows = rows[:-1] # never one item alone
    batches = [[idxs[r] for r in rows[i:i+BS]] for i in range(0, len(rows), BS)]
    if names.lengths: batches = [sorted(b, key=lambda i: -names.lengths[i]) for b in batches]
    weight = {idxs[r]: w for r,w in zip(rows, weights)}
    return [[(names[i],weight[i]) for i in b] for b in batches]

class Names(list): lengths = None

def check_items(records, loads, oracle, scored, names):
    "Follow a training and compare each batch with what the method should have handed over"
    known = {}
    for e,epoch in enumerate(records):
        batches = loaded(oracle, loads[e], known, names) if e in loads else None
        if batches is None and isinstance(oracle, Stale): oracle.history = []
        if batches is not None: assert [[k for k,_ in b] for b in batches]==[o['keys'] for o in epoch]
        for i,o in enumerate(epoch):
            if batches is None and scored and not isinstance(oracle, Stale) and (oracle.began or not oracle.gather): assert o['seen'] # it was scored
            if batches is None: wanted = oracle.hand_over(o['keys'], o['seen'] or [0.]*len(o['keys']), o['gen'], o['last'], o['multiple'])
            else: wanted = oracle.from_pool(batches[i], o['last'], o['multiple']) if oracle.pool and oracle.began else batches[i]
            if batches is None and scored and o['seen']:
                close(o['seen'], o['losses'], 2e-4 if o['multiple']==8 else 2e-5)
                known.update(zip(o['keys'], o['seen']))
            assert (o['trained'] is None)==(wanted is None)
            if wanted is None: continue
            assert o['trained']==[k for k,_ in wanted]
            close([1.]*len(wanted) if o['weight'] is None else o['weight'].tolist(), [w for _,w in wanted])
            oracle.began = True
            known.update(zip(o['trained'], o.get('training_losses', [])))

ALL = list(cases())

def chosen_cases():
    "All cases, or by default so many that each two of a method, a task and a callback meet, or can't"
    if os.environ.get('SELBACK_MATRIX')=='full': return ALL
    pairs,chosen = {p: None for case in ALL for p in combinations(enumerate(case), 2)},[]
    mixed = sorted(ALL, key=lambda case: zlib.crc32('-'.join(case).encode()))
    for gain in (3, 2, 1): # cases that bring many new pairs first
        for case in mixed:
            new = [p for p in combinations(enumerate(case), 2) if p in pairs]
            if len(new)<gain: continue
            chosen.append(case)
            for p in new: del pairs[p]
    return chosen

CASES = chosen_cases()

@pytest.mark.parametrize('method,task,other', [pytest.param(*case, id='-'.join(case)) for case in CASES])
def test_case(method, task, other, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path) # for what callbacks write
    make,oracle = METHODS[method]
    cb,loads,oracle = make(warmup=0, seed=1, **(dict(item_loss=of_item) if task=='item_loss' else {})),{},oracle()
    if task=='text': oracle = in_batches(oracle)
    witness = Before(TASKS[task][1])
    watch(cb, loads)
    learn = run(task, other, cb, [witness, After(), Losses()], tmp_path)
    names = Names(item_keys(learn))
    if task=='text': names.lengths = [len(t) for t in TEXTS]
    check_items(witness.records, loads, oracle, cb.scored, names)
    assert sum(o['trained'] is not None for epoch in witness.records for o in epoch)>=4 and len(names)==len(set(names))==N
    plain = run(task, other, Replay(witness.records), tmp_path=tmp_path)
    assert same(weights(learn), weights(plain))
    assert [float(o) for o in learn.recorder.losses]==[float(o) for o in plain.recorder.losses]
    assert [v[:2] for v in learn.recorder.values]==[v[:2] for v in plain.recorder.values]
    assert learn.recorder.lrs==plain.recorder.lrs and learn.opt.hypers[-1]['lr']==plain.opt.hypers[-1]['lr']

def test_every_method_is_in_the_matrix():
    assert {type(make()) for make,_ in METHODS.values()}==set(methods())
