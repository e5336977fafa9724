"Every method with every task, loss and callback: the scores, the chosen items, and plain training on the same batches"
import contextlib, io, os, zlib
from collections import Counter
from itertools import islice

import pytest
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
    "Ahead of the selection: notes each batch of the loader, and scores it by hand"
    order,run_valid = SelectionCallback.order-1,False
    def __init__(self, by_hand): self.by_hand,self.epochs,self.fit = by_hand,[],0
    def before_fit(self): self.fit += 1
    def before_train(self): self.epochs.append(dict(batches=[], steps=[], fit=self.fit, number=self.epoch, n_epoch=self.n_epoch))
    def before_batch(self):
        batches,items = self.epochs[-1]['batches'],keys(self.xb)
        if batches and batches[-1]['keys']==items: return # a step more than there are batches
        flags,rng = [m.training for m in self.model.modules()],torch.get_rng_state()
        autocast = torch.autocast('cpu', dtype=torch.bfloat16) if hasattr(self.learn, 'mixed_precision') else contextlib.nullcontext()
        self.model.eval()
        with torch.no_grad(),autocast: pred = main_output(self.learn, self.model(*as_tensors(self.xb)))
        for m,training in zip(self.model.modules(), flags): m.training = training
        torch.set_rng_state(rng)
        batches.append(dict(keys=items, losses=self.by_hand(pred.float(), *as_tensors(self.yb)).tolist(), seen=None,
            multiple=8 if hasattr(self.learn, 'mixed_precision') else 1, gen=torch.Generator().set_state(self.learn.selection.generator.get_state())))

class After(Callback):
    "Behind the selection: notes each step, and what the items' losses are in training"
    order,run_valid = SelectionCallback.order+1,False
    def before_batch(self):
        epoch,weight = self.before.epochs[-1],self.learn.selection.item_weight
        epoch['steps'].append(dict(keys=keys(self.xb), xb=copy_of(self.xb), yb=copy_of(self.yb), weight=None if weight is None else weight.clone(),
            rng=torch.get_rng_state(), read=len(epoch['batches']), pct=self.pct_train))

class Losses(Callback):
    order,run_valid = 70,False
    def after_loss(self):
        step,pred = self.before.epochs[-1]['steps'][-1],self.pred.detach().float()
        mixer = next((cb for cb in self.learn.cbs if isinstance(cb, (MixUp,CutMix)) and cb.stack_y), None)
        losses = self.before.by_hand(pred, *as_tensors(self.yb))
        if mixer: losses = mixer.lam*losses+(1-mixer.lam)*self.before.by_hand(pred, *as_tensors(mixer.yb1))
        step['losses'] = losses.tolist()

class Replay(Callback):
    "Feeds plain training the batches that a selection handed over, at the same times"
    order,run_valid = SelectionCallback.order,False
    def __init__(self, epochs): self.epochs = iter(epochs)
    def before_train(self):
        self.steps = next(self.epochs)['steps']
        if len(self.steps)!=len(self.learn.dl): self.learn.dl = [self.dls.train.one_batch()]*len(self.steps)
    def before_batch(self):
        self.now = self.steps[self.iter]
        self.learn.xb,self.learn.yb,self.learn.pct_train = self.now['xb'],self.now['yb'],self.now['pct']
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
    choose_items,score = cb.choose_items,getattr(cb, 'score', None)
    def noting(batch):
        scores,losses = score(batch)
        rest = scores.tolist()
        for b in cb.learn.before.epochs[-1]['batches'][::-1]: # they may have been scored together
            if not rest: break
            b['seen'],rest = rest[-len(b['keys']):],rest[:-len(b['keys'])]
        return scores,losses
    def noting_items(idxs):
        gen,losses = torch.Generator().set_state(cb.generator.get_state()),cb.memory.loss.tolist()
        if (chosen := choose_items(idxs)) is not None: loads[len(cb.learn.before.epochs)-1] = idxs.tolist(),losses,gen
        return chosen
    cb.choose_items = noting_items
    if score: cb.score = noting

def close(got, wanted, tol=2e-5): torch.testing.assert_close(torch.tensor(got).double(), torch.tensor(wanted).double(), rtol=tol, atol=tol)

def item_keys(learn):
    "The key of each item of the training set, by its index"
    dl = learn.dls.train.new(shuffle=False, drop_last=False)
    dl.get_idxs = lambda: list(range(N))
    return sum([keys(b[:dl.n_inp]) for b in dl], [])

class Names(list): lengths = None

def loaded(oracle, load, known, names):
    "The batches that a method should load in an epoch, with the weight of each item"
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

def wanted_steps(oracle, epoch, load, known, names):
    "What a method should train in an epoch: items with weights, and the batches read by then"
    if load is None: return oracle.steps(epoch['batches'])
    batches = loaded(oracle, load, known, names)
    assert [b['keys'] for b in epoch['batches']]==[[k for k,_ in b] for b in batches]
    return [(b,i) for i,b in enumerate(batches, 1)]

def check_items(epochs, loads, oracle, scored, names):
    "Follow a training and compare each step with what the method should have handed over"
    known = {}
    for e,epoch in enumerate(epochs):
        for i,b in enumerate(epoch['batches']):
            assert not scored or b['seen'] or e in loads or isinstance(oracle, Importance) and not e and not i # the first one switches it on
            if not scored or not b['seen']: continue
            close(b['seen'], b['losses'], 2e-4 if b['multiple']==8 else 2e-5)
        wanted = wanted_steps(oracle, epoch, loads.get(e), known, names)
        assert [(s['keys'],s['read']) for s in epoch['steps']]==[([k for k,_ in items],n) for items,n in wanted]
        for s,(items,_) in zip(epoch['steps'], wanted): close([1.]*len(items) if s['weight'] is None else s['weight'].tolist(), [w for _,w in items])
        batches = iter(epoch['batches'])
        for n,s in zip([0,*(s['read'] for s in epoch['steps'])], epoch['steps']): # as time goes: an item may come twice
            for b in islice(batches, s['read']-n): known.update(zip(b['keys'], b['seen'] or []) if scored else ())
            known.update(zip(s['keys'], s['losses']))

def check_laws(epochs, cb):
    "What every method keeps to: chosen items train once, in their own epoch, others only to fill up its last batch"
    stats = cb.stats.query('step>=0')
    for (_,rows),epoch in zip(stats.groupby(['fit','epoch']), epochs, strict=True):
        trained,steps = rows.trained[rows.trained>0].tolist(),epoch['steps']
        assert trained==[len(s['keys']) for s in steps] and rows.seen.sum()==sum(len(b['keys']) for b in epoch['batches'])
        handed_out,drawn = (Counter(k for o in part for k in o['keys']) for part in (epoch['batches'], [s for s in steps if s['weight'] is None]))
        assert drawn<=handed_out # a loader may hand out an item twice
        extra = rows.trained.sum()-rows.kept.sum()
        if cb.gathers: assert trained[:-1]==[BS]*(len(steps)-1) and 0<=extra<=BS
        else: assert ((rows.trained==rows.kept) | (rows.kept<2) & (rows.trained<=2)).all()
    assert cb.report.left==0

def check_case(make, oracle, task, other, tmp_path):
    cb,loads = make(warmup=0, seed=1, **(dict(item_loss=of_item) if task=='item_loss' else {})),{}
    witness = Before(TASKS[task][1])
    if oracle: watch(cb, loads)
    learn = run(task, other, cb, [witness, After(), Losses()], tmp_path)
    epochs = witness.epochs
    if oracle:
        names = Names(item_keys(learn))
        if task=='text': names.lengths = [len(t) for t in TEXTS]
        assert len(names)==len(set(names))==N
        check_items(epochs, loads, in_batches(oracle()) if task=='text' else oracle(), cb.scored, names)
    check_laws(epochs, cb)
    for epoch in epochs: # schedules follow the loader
        n = len(epoch['batches'])
        close([s['pct'] for s in epoch['steps']], [(epoch['number']+(s['read']-1)/n)/epoch['n_epoch'] for s in epoch['steps']], 1e-9)
    losses = [float(o) for o in learn.recorder.losses]
    assert all(map(math.isfinite, losses)) and len(losses)==sum(len(epoch['steps']) for epoch in epochs if epoch['fit']==witness.fit)>=4
    plain = run(task, other, Replay(epochs), tmp_path=tmp_path)
    assert same(weights(learn), weights(plain))
    assert losses==[float(o) for o in plain.recorder.losses]
    assert [v[:2] for v in learn.recorder.values]==[v[:2] for v in plain.recorder.values]
    assert learn.recorder.lrs==plain.recorder.lrs and learn.opt.hypers[-1]['lr']==plain.opt.hypers[-1]['lr']

ALL = list(cases())

APART = 'early_stopping','save_model','reduce_lr','csv_logger','tensorboard','one_cycle','fine_tune','start_epoch' # they look at no batch: need not meet each task

def pairs_of(case):
    method,task,other = case
    return [(method,task), (method,other), *([] if other in APART else [(task,other)])]

def chosen_cases():
    "All cases, or by default so many that each two of a method, a task and a callback meet, where they have to do with each other"
    if os.environ.get('SELBACK_MATRIX')=='full': return ALL
    open_pairs,chosen = {p for case in ALL for p in pairs_of(case)},[]
    mixed = sorted(ALL, key=lambda case: zlib.crc32('-'.join(case).encode()))
    for gain in (3, 2, 1): # cases that bring many new pairs first
        for case in mixed:
            new = open_pairs & {*pairs_of(case)}
            if len(new)<gain: continue
            chosen.append(case)
            open_pairs -= new
    return chosen

CASES = chosen_cases()

@pytest.mark.law(2)
@pytest.mark.parametrize('method,task,other', [pytest.param(*case, id='-'.join(case)) for case in CASES])
def test_case(method, task, other, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path) # for what callbacks write
    check_case(*METHODS[method], task, other, tmp_path)

def test_a_new_method_enters_by_itself(monkeypatch, tmp_path):
    class EveryThirdCallback(SelectionCallback):
        "A method of one's own, as CONTRIBUTING says"
        def choose(self, scores): return Chosen(torch.arange(0, len(scores), 3))
    monkeypatch.setattr(Learner, 'every_third', lambda self, **kwargs: set_selection(self, EveryThirdCallback(**kwargs)), raising=False)
    cases = with_all(METHODS, [*methods(), EveryThirdCallback])
    assert METHODS.keys()==cases.keys()-{'every_third'} and {type(make()) for make,_ in METHODS.values()}==set(methods())
    make,oracle = cases['every_third']
    for gather in (False, True): check_case(lambda **k: make(gather=gather, **k), oracle, 'cross_entropy', 'one_cycle', tmp_path)
