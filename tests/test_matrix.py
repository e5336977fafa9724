"Every method with every task, loss and callback: the scores, the chosen items, and plain training on the same batches"
import contextlib, io, os, zlib
from collections import Counter
from functools import cache
from itertools import islice

import pytest
from matrix import *
from selback.callback.watching import WatchItemsCallback

def keys(xb):
    "What tells the items of a batch apart; padding does not"
    def bytes_of(row):
        is_text = row.dtype==torch.int64 and row.ndim
        return (row[row!=1] if is_text else row).contiguous().numpy().tobytes()
    tensors = [t.as_subclass(torch.Tensor) for t in leaves(xb)]
    return [b'|'.join(bytes_of(t[i]) for t in tensors) for i in range(len(tensors[0]))]

def copy_of(o): return map_tensors(lambda t: t.clone(), o)

def main_output(learn, pred): return pred[0] if hasattr(learn, 'rnn') else pred

def is_mixed_precision(learn): return hasattr(learn, 'mixed_precision')

# What watches a training
def pred_by_hand(cb, xb):
    "What the model says in evaluation mode, as if it had not been asked"
    model = cb.model
    flags,rng = [m.training for m in model.modules()],torch.get_rng_state()
    precision = torch.autocast('cpu', dtype=torch.bfloat16, enabled=is_mixed_precision(cb.learn))
    model.eval()
    with torch.no_grad(),precision: pred = main_output(cb.learn, model(*as_tensors(xb)))

    for m,training in zip(model.modules(), flags): m.training = training
    torch.set_rng_state(rng)
    return pred.float()

class Before(LoaderBatches):
    "Notes each batch of the loader, and scores it by hand"
    def __init__(self, by_hand):
        self.by_hand = by_hand
        self.epochs,self.fit = [],0

    def before_fit(self): self.fit += 1

    def before_train(self):
        super().before_train()
        self.epochs.append(dict(batches=[], steps=[], fit=self.fit, number=self.epoch, n_epoch=self.n_epoch))

    def note(self, i, xb, yb):
        batches,items = self.epochs[-1]['batches'],keys(xb)
        losses = self.by_hand(pred_by_hand(self, xb), *as_tensors(yb)).tolist()
        multiple = 8 if is_mixed_precision(self.learn) else 1
        gen = torch.Generator().set_state(self.learn.selection.generator.get_state())
        batches.append(dict(keys=items, losses=losses, seen=None, multiple=multiple, gen=gen))

class After(Callback):
    "Behind the selection: notes each step, and what the items' losses are in training"
    order,run_valid = BatchSelection.order+1,False

    def before_batch(self):
        epoch,weight = self.before.epochs[-1],self.learn.selection.item_weight
        batch = dict(keys=keys(self.xb), xb=copy_of(self.xb), yb=copy_of(self.yb))
        weight = None if weight is None else weight.clone()
        rng,read = torch.get_rng_state(),len(epoch['batches'])
        epoch['steps'].append(dict(batch, weight=weight, rng=rng, read=read, pct=self.pct_train))

class Losses(Callback):
    order,run_valid = 70,False

    def after_loss(self):
        step,pred = self.before.epochs[-1]['steps'][-1],self.pred.detach().float()
        losses = self.before.by_hand(pred, *as_tensors(self.yb))
        mixer = next((cb for cb in self.learn.cbs if isinstance(cb, (MixUp,CutMix)) and cb.stack_y), None)
        if mixer:
            others = self.before.by_hand(pred, *as_tensors(mixer.yb1))
            losses = mixer.lam*losses+(1-mixer.lam)*others
        step['losses'] = losses.tolist()

class Replay(Callback):
    "Feeds plain training the batches that a selection handed over, at the same times"
    order,run_valid = BatchSelection.order,False

    def __init__(self, epochs): self.epochs = iter(epochs)

    def before_train(self):
        self.steps = next(self.epochs)['steps']
        if len(self.steps)!=len(self.learn.dl): self.learn.dl = [self.dls.train.one_batch()]*len(self.steps)

    def before_batch(self):
        self.now = self.steps[self.iter]
        self.learn.xb,self.learn.yb = self.now['xb'],self.now['yb']
        self.learn.pct_train = self.now['pct']
        torch.set_rng_state(self.now['rng'])

    def after_pred(self):
        if (weight := self.now['weight']) is None: return
        def weighted(grad): return grad*weight.view(-1, *[1]*(grad.ndim-1)).to(grad.dtype)
        main_output(self.learn, self.pred).register_hook(weighted)

# A training
def run(task, other, first, witnesses=(), tmp_path=None):
    "A learner that has trained"
    make,_ = TASKS[task]
    company = OTHERS[other]
    learn = make(path=tmp_path)
    learn.add_cbs([f() for f in company.before])
    learn.add_cb(first)
    learn.add_cbs([f() for f in company.after])
    learn.add_cbs(witnesses)

    set_seed(5)
    silence = contextlib.redirect_stdout(io.StringIO())
    with learn.no_bar(),learn.no_logging(),silence,warnings.catch_warnings():
        warnings.simplefilter('ignore')
        company.fit(learn)
    return learn

def note_scores(cb):
    "Have the scores that a method computes noted, batch by batch"
    def noting(batch, scores, losses, chosen):
        rest = scores.tolist()
        for noted in cb.learn.before.epochs[-1]['batches'][::-1]: # they may have been scored together
            if not rest: break
            n = len(noted['keys'])
            noted['seen'],rest = rest[-n:],rest[:-n]
    watch_choices(cb, noting)

def note_loads(cb):
    "By epoch, what a method goes by when it chooses before loading: indices, losses, and its random numbers"
    loads = {}
    choose = cb.method.choose
    def noting(scores, now):
        if not isinstance(cb, EpochSelection) and not cb.method.before_loading: return choose(scores, now)
        gen,losses = torch.Generator().set_state(cb.generator.get_state()),cb.memory.loss.tolist()
        chosen = choose(scores, now)
        epoch = len(cb.learn.before.epochs)-1
        if chosen is not None: loads[epoch] = now.idx.tolist(),losses,gen
        return chosen
    cb.method.choose = noting
    return loads

def close(got, wanted, tol=2e-5):
    torch.testing.assert_close(torch.tensor(got).double(), torch.tensor(wanted).double(), rtol=tol, atol=tol)

# What it should have been
class Names(list):
    "The key of each item of the training set, by its index; of texts also the lengths"
    lengths = None

def names_of(learn, task):
    dl = learn.dls.train.new(shuffle=False, drop_last=False)
    dl.get_idxs = lambda: list(range(N))
    names = Names(key for b in dl for key in keys(b[:dl.n_inp]))
    if task=='text': names.lengths = [len(t) for t in TEXTS]
    assert len(names)==len(set(names))==N
    return names

def check_stored(idxs, stored, known, names):
    "A memory holds the last loss of each item, and nothing of others"
    for i in idxs:
        if names[i] in known: close(stored[i], known[names[i]])
        else: assert math.isnan(stored[i])

def loaded(oracle, load, known, names):
    "The batches that a method should load in an epoch, with the weight of each item"
    idxs,stored,gen = load
    if not isinstance(oracle, HalfBefore): check_stored(idxs, stored, known, names) # which goes by nothing
    stored = [None if math.isnan(loss) else loss for loss in stored]
    rows,weights = oracle.load([stored[i] for i in idxs], stored, gen)
    if len(rows)%BS==1 and len(rows)<len(idxs): rows = rows[:-1] # never one item alone

    batches = [[idxs[r] for r in rows[i:i+BS]] for i in range(0, len(rows), BS)]
    if names.lengths: batches = [sorted(batch, key=lambda i: -names.lengths[i]) for batch in batches]
    weight = {idxs[r]: w for r,w in zip(rows, weights)}
    return [[(names[i],weight[i]) for i in batch] for batch in batches]

def wanted_steps(oracle, epoch, load, known, names):
    "What a method should train in an epoch: items with weights, and the batches read by then"
    if load is None: return oracle.steps(epoch['batches'])
    batches = loaded(oracle, load, known, names)
    assert [batch['keys'] for batch in epoch['batches']]==[[key for key,_ in batch] for batch in batches]
    return [(batch,n) for n,batch in enumerate(batches, 1)]

def check_scores(batches):
    "What was scored has the losses by hand"
    for batch in batches:
        tol = 2e-4 if batch['multiple']==8 else 2e-5
        if batch['seen']: close(batch['seen'], batch['losses'], tol)

def check_steps(steps, wanted):
    "The items of each step, the batches that were read for it, and the weights"
    assert [step['keys'] for step in steps]==[[key for key,_ in items] for items,_ in wanted]
    assert [step['read'] for step in steps]==[n for _,n in wanted]
    for step,(items,_) in zip(steps, wanted):
        weight = [1.]*len(items) if step['weight'] is None else step['weight'].tolist()
        close(weight, [w for _,w in items])

def note_known(known, epoch, scored):
    "What a memory learns in an epoch, as time goes: an item may come twice"
    batches,before = iter(epoch['batches']),0
    for step in epoch['steps']:
        for batch in islice(batches, step['read']-before):
            if scored: known.update(zip(batch['keys'], batch['seen'] or []))
        known.update(zip(step['keys'], step['losses']))
        before = step['read']

def check_items(epochs, loads, oracle, scored, names):
    "Follow a training and compare each step with what the method should have handed over"
    known = {}
    for n,epoch in enumerate(epochs):
        batches = epoch['batches']
        if scored: check_scores(batches)
        to_score = batches[1:] if isinstance(oracle, Importance) and not n else batches # the first one switches it on
        if scored and n not in loads: assert all(batch['seen'] for batch in to_score)
        check_steps(epoch['steps'], wanted_steps(oracle, epoch, loads.get(n), known, names))
        note_known(known, epoch, scored)

def check_drawn_once(epoch):
    "But for what a method draws by weights, and where a loader hands out an item twice"
    handed_out = Counter(key for batch in epoch['batches'] for key in batch['keys'])
    drawn = Counter(key for step in epoch['steps'] if step['weight'] is None for key in step['keys'])
    assert drawn<=handed_out

def check_laws(epochs, cb):
    "What every method keeps to: chosen items train once, in their own epoch, others only to fill up its last batch"
    stats = cb.stats.query('step>=0')
    for (_,rows),epoch in zip(stats.groupby(['fit','epoch']), epochs, strict=True):
        trained = rows.trained[rows.trained>0].tolist()
        assert trained==[len(step['keys']) for step in epoch['steps']]
        assert rows.seen.sum()==sum(len(batch['keys']) for batch in epoch['batches'])
        check_drawn_once(epoch)

        extra = rows.trained.sum()-rows.kept.sum()
        never_alone = (rows.kept<2) & (rows.trained<=2)
        if gathers(cb):
            assert trained[:-1]==[BS]*(len(trained)-1)
            assert 0<=extra<=BS
        else: assert ((rows.trained==rows.kept) | never_alone).all()

def check_schedule(epoch):
    "Schedules follow the loader"
    n = len(epoch['batches'])
    wanted = [(epoch['number']+(step['read']-1)/n)/epoch['n_epoch'] for step in epoch['steps']]
    close([step['pct'] for step in epoch['steps']], wanted, 1e-9)

def check_same_training(learn, plain):
    losses = [float(loss) for loss in learn.recorder.losses]
    assert same(weights(learn), weights(plain))
    assert losses==[float(loss) for loss in plain.recorder.losses]
    assert [v[:2] for v in learn.recorder.values]==[v[:2] for v in plain.recorder.values]
    assert learn.recorder.lrs==plain.recorder.lrs
    assert learn.opt.hypers[-1]['lr']==plain.opt.hypers[-1]['lr']

def check_case(make, oracle, task, other, tmp_path):
    options = dict(item_loss=of_item) if task=='item_loss' else {}
    begins = full_epochs(getattr(make, 'func', make), 0)
    cb,witness = make(**begins, seed=1, **options),Before(TASKS[task][1])
    loads = note_loads(cb) if oracle else None
    if oracle and isinstance(cb, BatchSelection): note_scores(cb)
    learn = run(task, other, cb, [witness, After(), Losses()], tmp_path)
    epochs = witness.epochs

    if oracle:
        wanted = in_batches(oracle()) if task=='text' else oracle()
        check_items(epochs, loads, wanted, cb.is_scored, names_of(learn, task))
    check_laws(epochs, cb)
    for epoch in epochs: check_schedule(epoch)

    steps = [step for epoch in epochs if epoch['fit']==witness.fit for step in epoch['steps']]
    assert len(learn.recorder.losses)==len(steps)>=4
    assert all(math.isfinite(loss) for loss in learn.recorder.losses)
    check_same_training(learn, run(task, other, Replay(epochs), tmp_path=tmp_path))

# Cases
ALL = list(cases())

APART = 'early_stopping','save_model','reduce_lr','csv_logger','tensorboard','one_cycle','fine_tune','start_epoch'

def meets(first, task, other):
    "What meets in a case; callbacks that look at no batch need not meet each task"
    pairs = [(first,task), (first,other)]
    return pairs if other in APART else [*pairs, (task,other)]

def pairs_of(case): return meets(*case)

def paths_of(case):
    "The same where one method stands for all that go its way"
    method,task,other = case
    return meets(PATH_OF.get(method, method), task, other)

def covering(pairs, chosen=()):
    "So many cases, after some that are there, that each pair of them all is in one"
    met = {pair for case in chosen for pair in pairs(case)}
    missing,chosen = {pair for case in ALL for pair in pairs(case)}-met,[*chosen]
    mixed = sorted(ALL, key=lambda case: zlib.crc32('-'.join(case).encode()))
    for gain in (3, 2, 1): # cases that bring many new pairs first
        for case in mixed:
            new = missing & {*pairs(case)}
            if len(new)<gain: continue
            chosen.append(case)
            missing -= new
    return chosen

def with_each_method(chosen, n=2):
    "Cases, with more where a method is in fewer than `n`"
    count = Counter(method for method,*_ in chosen)
    for method in METHODS:
        others = [case for case in ALL if case[0]==method and case not in chosen]
        chosen = [*chosen, *others[:max(0, n-count[method])]]
    return chosen

FAST = with_each_method(covering(paths_of))
CASES = ALL if os.environ.get('SELBACK_MATRIX')=='full' else covering(pairs_of, FAST)

def test_each_two_that_have_to_do_with_each_other_meet():
    assert PATH_OF.keys()<=METHODS.keys() and OF_PATH.keys()<=PATHS.keys()
    for cases,pairs in ((FAST, paths_of), (CASES, pairs_of)):
        assert {pair for case in cases for pair in pairs(case)}=={pair for case in ALL for pair in pairs(case)}
    assert min(Counter(method for method,*_ in FAST).values())>=2

@cache
def runs_lstm_in_bf16():
    "Has PyTorch an LSTM in bf16 for this CPU?"
    try:
        with torch.autocast('cpu', dtype=torch.bfloat16): nn.LSTM(4, 4)(torch.randn(2, 3, 4))[0].sum().backward()
    except RuntimeError: return False
    return True

@pytest.mark.law(2)
@pytest.mark.parametrize('method,task,other', [
    (slow if case not in FAST else pytest.param)(*case, id='-'.join(case)) for case in CASES])
def test_case(method, task, other, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path) # for what callbacks write
    if task=='text' and 'mixed_precision' in other and not runs_lstm_in_bf16():
        pytest.skip('this CPU has no LSTM in bf16, which fastai alone would fail on as well')
    check_case(*METHODS[method], task, other, tmp_path)

# Watching
def watched_cases():
    "Each task and each callback, or all pairs of them"
    if os.environ.get('SELBACK_MATRIX')=='full':
        return [(task,other) for task in TASKS for other in OTHERS if OTHERS[other].takes(task)]
    left,cases = [*OTHERS],[]
    for task in (*OF_CLASSES, *TASKS): # callbacks that mix want classes, and come first
        other = next((other for other in left[1:] if OTHERS[other].takes(task)), 'none')
        left = [o for o in left if o!=other] if other!='none' else left
        if (task,other) not in cases: cases.append((task,other))
    assert {other for _,other in cases}=={*OTHERS}
    return cases

def left_by(learn):
    "All that a training leaves, but for what was watched"
    state = [copy_of(dict(s)) for s in learn.opt.state_dict()['state']]
    moments = [t.tolist() for t in leaves(state)]
    losses = [float(loss) for loss in learn.recorder.losses]
    values = [str(v) for v in learn.recorder.values] # NaN is itself
    return moments,losses,values,learn.recorder.lrs,learn.recorder.iters,learn.recorder.metric_names,random_states()

NO_CLASSES = 'regression','absolute','points','item_loss','segmentation','weighted_pixels','dice' # of a whole item

@pytest.mark.law(1)
@pytest.mark.parametrize('task,other', watched_cases())
def test_watching_is_plain_training(task, other, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if task=='text' and 'mixed_precision' in other and not runs_lstm_in_bf16(): pytest.skip('no LSTM in bf16 here')
    options = dict(item_loss=of_item) if task=='item_loss' else {}
    plain = run(task, other, Callback(), tmp_path=tmp_path)
    wanted = left_by(plain)
    learn = run(task, other, WatchItemsCallback(**options), tmp_path=tmp_path)
    assert left_by(learn)==wanted
    assert same(weights(learn), weights(plain))

    items,labels = learn.selection.items(),learn.selection.labels
    is_drawn = task=='tabular' # by fastai, with replacement
    assert is_drawn or items.seen.min()>0 and items.loss.notna().all()
    mixed = other.startswith(('mixup','cutmix'))
    assert (labels is None)==(mixed or task in NO_CLASSES)
    if labels is None: return
    assert labels.looks.tolist()==[n for n in items.seen for _ in range(labels.n_labels)]

def test_a_new_method_enters_by_itself(monkeypatch, tmp_path):
    class EveryThird(BatchMethod):
        "A method of one's own, as CONTRIBUTING says"
        def choose(self, scores, now): return Chosen(torch.arange(0, len(scores), 3))

    monkeypatch.setattr(Learner, 'every_third', None, raising=False)
    @with_one_liner
    class EveryThirdCallback(BatchSelection): of = EveryThird
    cases = with_all(METHODS, [*methods(), EveryThirdCallback])
    assert METHODS.keys()==cases.keys()-{'every_third'}
    assert {type(make()) for make,_ in METHODS.values()}==set(methods())

    make,oracle = cases['every_third']
    for gather in (False, True):
        check_case(partial(make, gather=gather), oracle, 'cross_entropy', 'one_cycle', tmp_path)
