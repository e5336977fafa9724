"Until a batch is full the loader is read further: every batch that fastai announces trains"
import contextlib, functools, itertools, multiprocessing
from collections import Counter

import pytest, torch
from fastai.callback.core import (Callback, CancelBatchException, CancelEpochException, CancelFitException,
    CancelTrainException)
from fastai.callback.data import CollectDataCallback
from fastai.callback.hook import ActivationStats, HookCallback
from helpers import *
from torch.nn import functional as F

GATHERING = dict(
    selective=lambda **k: SelectiveBackpropCallback(beta=2, track_items=True, **k),
    few=lambda **k: SelectiveBackpropCallback(beta=9, **k),
    most=lambda **k: TopLossCallback(.8, gather=True, **k),
    share=lambda **k: BatchLossFilterCallback(.7, gather=True, **k),
    random=lambda **k: RandomSubsetCallback(.4, gather=True, **k),
    in_threes=lambda **k: pooled(3, TopLossCallback(.3, gather=True, **k)),
    window=lambda **k: TopLossCallback(.3, gather=True, interrupt=5, start=.2, end=.9, **k))

gathering = pytest.mark.parametrize('make', GATHERING.values(), ids=GATHERING)
some_gathering = pytest.mark.parametrize('make', [GATHERING[k] for k in ('selective','most','window')])

def share_trained(cb, i): # of the fit, when batch `i` of its epoch begins
    return pytest.approx((cb.epoch+i/cb.n_iter)/cb.n_epoch)

class Arrivals(LoaderBatches):
    "Notes each batch of the loader, and what is chosen"
    is_watching = False
    def before_fit(self):
        self.epochs = []
        if not self.is_watching: watch_choices(self.learn.selection, self.chose)
        self.is_watching = True
    def chose(self, batch, scores, losses, chosen): self.choices.append((scores.tolist(), chosen.rows.tolist()))
    def before_train(self):
        super().before_train()
        self.batches,self.choices = [],[]
        self.epochs.append((self.batches, self.choices))
    def note(self, i, xb, yb):
        assert self.learn.selection.loader.n_read==i # it is about to be read
        self.batches.append((i, numbers(xb[0])))

class Steps(Callback):
    "Behind the selection: the items of each step, and the clocks"
    order,run_valid = 20,False
    is_cancelled = False
    def before_fit(self): self.epochs = []
    def before_train(self): self.epochs.append([])
    def after_cancel_train(self): self.is_cancelled = True
    def before_batch(self):
        i = self.learn.selection.loader.n_read-1 # of the batch that was read last
        assert self.iter==i
        assert self.pct_train==share_trained(self, i)
    def after_loss(self):
        items,idx = numbers(self.x),self.learn.selection.item_idx
        assert idx is None or idx.tolist()==items
        self.epochs[-1].append((items, self.iter, self.opt.hypers[0]['lr']))
    def after_train(self): assert self.is_cancelled or self.pct_train==share_trained(self, self.n_iter)

class Rules:
    "Batch after batch is read until enough items wait; the last step is filled up with the hardest of the others"
    def __init__(self, choices, presample, bs):
        self.choices = iter(choices)
        self.presample,self.bs = presample,bs
        self.pool = [] # batches that will be chosen from together
        self.waiting,self.others = [],[] # items that are chosen, and those of the last choice that are not
        self.steps,self.is_due = [],False # a batch that was read makes a step due

    def read(self, items, is_chosen_from, is_last):
        self.batch,self.is_due = items,True
        if is_chosen_from: self.pool.append(items)
        is_full = len(self.pool)==self.presample or is_last
        if self.pool and (is_full or not is_chosen_from): self.choose()

        if not is_chosen_from:
            self.step(items)
            self.others = []
        while len(self.waiting)>=self.bs and not self.pool: self.step([self.waiting.pop(0) for _ in range(self.bs)])

    def choose(self):
        items = sum(self.pool, [])
        self.pool.clear()
        scores,rows = next(self.choices)
        assert len(scores)==len(items)
        self.waiting += [items[r] for r in rows]
        hardest_first = sorted(range(len(items)), key=lambda r: -scores[r])
        self.others = [items[r] for r in hardest_first if r not in rows]

    def step(self, items):
        self.steps.append(items)
        self.is_due = False

    def end(self):
        if not self.waiting and not self.is_due: return
        more = self.others[:self.bs-len(self.waiting)]
        self.step(self.waiting+sorted(more, key=self.batch.index if self.presample==1 else None))

def steps_by_the_rules(batches, choices, selects, presample=1, bs=16):
    "The items of each step"
    rules = Rules(choices, presample, bs)
    for i,items in batches: rules.read(items, selects(i), is_last=i==batches[-1][0])
    rules.end()
    return rules.steps

def assert_same_steps(got, wanted):
    "In the last one, order is free"
    assert got[:-1]==wanted[:-1]
    assert sorted(sum(got[-1:], []))==sorted(sum(wanted[-1:], []))

@functools.cache
def one_cycle(n_epoch, **kwargs):
    "The learning rates of plain training"
    return list(quiet_fit(numbered_learner(**kwargs), n_epoch, 'fit_one_cycle').recorder.lrs)

@pytest.mark.law(4)
@pytest.mark.parametrize('drop_last', [True, False])
@gathering
def test_steps_by_the_rules(make, drop_last):
    cb,data = make(warmup=0, seed=0),dict(n=32+180, drop_last=drop_last)
    learn = quiet_fit(numbered_learner(cbs=[cb, Arrivals(), Steps()], **data), 3, 'fit_one_cycle')
    n_iter,rates = 11+(not drop_last),one_cycle(3, **data)

    for epoch,((batches,choices),steps) in enumerate(zip(learn.arrivals.epochs, learn.steps.epochs)):
        def selects(i): return cb.window.is_on((epoch+i/n_iter)/3, 0, i)
        got = [items for items,_,_ in steps]
        assert_same_steps(got, steps_by_the_rules(batches, choices, selects, cb.method.presample))
        assert [i for i,_ in batches]==list(range(n_iter))
        assert set(Counter(sum(got, [])).values())=={1} # each trains once

        of_batch_read_last = [rates[epoch*n_iter+i] for _,i,_ in steps]
        assert [rate for _,_,rate in steps]==pytest.approx(of_batch_read_last, rel=1e-6)
        rows = cb.stats[cb.stats.epoch==epoch]
        assert rows.trained[rows.trained>0].tolist()==[*map(len, got)]
        assert rows.seen[rows.seen>0].tolist()==[len(items) for _,items in batches]
        assert rows.kept[rows.scored].sum()==sum(len(chosen) for _,chosen in choices) or not cb.is_scored

    assert len(learn.recorder.losses)==learn.train_iter==(cb.stats.trained>0).sum()
    assert learn.recorder.hps['lr']==learn.recorder.lrs

# one event sequence a step
BATCH_EVENTS = ['before_batch','after_pred','after_loss','before_backward','after_backward','before_step','after_step',
    'after_batch']

class Witness(Callback):
    "Notes the events of training, and looks at the batch after each step"
    order = 70
    def before_fit(self): self.events,self.batches = [],[]
    def __call__(self, name):
        super().__call__(name)
        if not self.training: return
        if name in BATCH_EVENTS: self.events.append(name)
        if name=='after_batch': self.look()
    def look(self):
        assert len(self.pred)==len(self.y)==len(self.x)<=16
        pred,loss = self.pred.detach().clone(),self.loss.detach().clone()
        torch.testing.assert_close(loss, F.cross_entropy(pred, self.y)) # all of one step
        self.batches.append((self.x.clone(), self.y.clone(), pred, loss))

@pytest.mark.law(7)
@gathering
def test_other_callbacks_see_real_steps(make):
    calls = []
    class Count(HookCallback):
        def hook(self, m, i, o): calls.append(m.training)
    collect = CollectDataCallback()
    collect.run_valid = False
    cbs = [make(warmup=0, seed=0), Witness(), collect, ActivationStats(with_hist=False), Count()]
    learn = quiet_fit(numbered_learner(n=32+180, cbs=cbs), 2, 'fit_one_cycle')

    n_steps,n_layers = (learn.selection.stats.trained>0).sum(),len(learn.count.modules)
    assert learn.witness.events==BATCH_EVENTS*n_steps
    assert len(learn.activation_stats.stats)==n_steps
    assert len(learn.recorder.losses)==len(learn.recorder.hps['lr'])==n_steps
    assert sum(calls)==n_layers*n_steps
    assert len(calls)==n_layers*(n_steps+2*2) # training, and two epochs' two batches of validation
    assert len(collect.data)==n_steps
    for (xb,yb,pred,loss),seen in zip(collect.data, learn.witness.batches):
        assert all(map(torch.equal, (*xb,*yb,pred,loss), seen))

# callbacks that change a batch
class Changes(Callback):
    "Marks each item, in a new tensor or in place"
    order,run_valid = -8,False
    def __init__(self, in_place):
        self.in_place = in_place
        self.n = 0
    def before_batch(self):
        self.n += 1
        if self.in_place: self.learn.xb[0][:,0] += 1000
        else: self.learn.xb = (self.x+torch.tensor([1000,0,0,0,0]),)

@pytest.mark.parametrize('in_place', [False, True])
@pytest.mark.parametrize('make', [
    GATHERING['selective'],
    GATHERING['window'],
    lambda **k: TopLossCallback(.5, **k),
    lambda **k: StaleLossCallback(**k)], ids=['gathers','window','at_once','stale'])
@pytest.mark.parametrize('warmup', [0, 1])
def test_a_callback_that_changes_what_was_scored_is_refused(make, in_place, warmup):
    "In the first batch of a fit, before a step"
    learn = numbered_learner(n=32+192, cbs=[make(warmup=warmup, seed=0), Changes(in_place)])
    before = weights(learn)
    with pytest.raises(ValueError, match='a callback of a lower order has changed.*in a batch transform'):
        quiet_fit(learn, 2)
    assert same(weights(learn), before)
    assert learn.changes.n==1

@pytest.mark.parametrize('in_place', [False, True])
@pytest.mark.parametrize('make', [
    GATHERING['random'],
    lambda **k: TopLossCallback(.5, passes=1, **k),
    lambda **k: FavorHardCallback(**k)], ids=['random','one_pass','before_loading'])
def test_where_no_pass_scores_a_callback_may_change_each_step_once(make, in_place):
    cbs = [make(warmup=0, seed=0), Changes(in_place), Witness()]
    learn = quiet_fit(numbered_learner(n=32+192, cbs=cbs), 1)
    trained = torch.cat([x for x,_,_,_ in learn.witness.batches])
    assert (trained[:,0]-1000).abs().max()<10 # not 0, not 2000

class Refuses(Callback):
    "Ahead of the selection: cancels some steps"
    order,run_valid = -8,False
    def __init__(self, when):
        self.when = when
        self.met = [] # pairs: items, and are they refused?
    def before_batch(self):
        is_refused = self.when(self.learn.selection.loader.n_handed-1)
        self.met.append((numbers(self.x), is_refused))
        if is_refused: raise CancelBatchException

@pytest.mark.parametrize('when', [lambda n: n==0, lambda n: n in (1,4), lambda n: True], ids=['first','some','all'])
@some_gathering
def test_a_cancelled_step_is_dropped_alone(make, when):
    cb = make(warmup=0, seed=0)
    learn = quiet_fit(numbered_learner(n=32+180, cbs=[cb, Refuses(when), Arrivals(), Steps()]), 1)
    (batches,choices),steps = learn.arrivals.epochs[0],learn.steps.epochs[0]
    trained = [items for items,_,_ in steps]

    wanted = steps_by_the_rules(batches, choices, lambda i: cb.window.is_on(i/12, 0, i), cb.method.presample)
    assert_same_steps([items for items,_ in learn.refuses.met], wanted)
    assert trained==[items for items,is_refused in learn.refuses.met if not is_refused]
    assert learn.pct_train==pytest.approx(1)
    assert cb.stats.trained.sum()==sum(map(len, trained))

class BreaksOff(Arrivals):
    "Raises when a batch is read"
    name = 'arrivals'
    def __init__(self, ex, when): self.ex,self.when = ex,when
    def note(self, i, xb, yb):
        if self.when(self.epoch, i): raise self.ex
        super().note(i, xb, yb)

@pytest.mark.parametrize('ex,trains_again,n_rows', [
    (CancelTrainException, True, 2),
    (CancelEpochException, True, 1),
    (CancelFitException, False, 0),
    (KeyboardInterrupt, False, 0)])
def test_what_else_is_raised_passes_through_and_what_waited_is_dropped(ex, trains_again, n_rows):
    cb = SelectiveBackpropCallback(beta=9, warmup=0, seed=0)
    breaks = BreaksOff(ex, lambda epoch, i: (epoch,i)==(0, 6))
    learn = numbered_learner(n=32+180, cbs=[cb, breaks, Steps()])
    with pytest.raises(ex) if ex is KeyboardInterrupt else contextlib.nullcontext(): quiet_fit(learn, 2)

    batches,choices = learn.arrivals.epochs[0]
    waited = sum(len(rows) for _,rows in choices)
    assert len(batches)==6
    assert 0<waited<16
    assert not learn.steps.epochs[0] # it was still reading
    assert len(learn.steps.epochs)==1+trains_again
    assert len([v for v in learn.recorder.values if len(v)])==n_rows
    assert not [t for t in tensors_of(cb.state_dict()) if t.ndim>1] # no items in it

    breaks.when = lambda epoch, i: False
    quiet_fit(learn, 1)
    for (batches,choices),steps in zip(learn.arrivals.epochs, learn.steps.epochs):
        wanted = steps_by_the_rules(batches, choices, lambda i: True) # nothing of the first epoch is in a later one
        assert [items for items,_,_ in steps][:-1]==wanted[:-1]

def tensors_of(o):
    if isinstance(o, torch.Tensor): return [o]
    if isinstance(o, dict): o = o.values()
    elif not isinstance(o, (tuple,list)): return []
    return sum(map(tensors_of, o), [])

@pytest.mark.slow
@pytest.mark.parametrize('is_persistent', [False,True])
@pytest.mark.parametrize('track_items', [False,True])
def test_workers_change_nothing_and_are_gone_after_a_fit(track_items, is_persistent):
    def trained(n):
        cb = SelectiveBackpropCallback(beta=2, warmup=0, seed=0, track_items=track_items)
        workers = dict(num_workers=n, persistent_workers=n>0 and is_persistent)
        learn = quiet_fit(numbered_learner(n=32+84, cbs=[cb, Spy()], **workers), 2)
        return learn.spy.batches,weights(learn)
    (items,model),(plain_items,plain_model) = trained(2),trained(0)
    assert items==plain_items and same(model, plain_model)
    assert not multiprocessing.active_children()

def test_a_fit_within_an_epoch_is_refused():
    class Inner(Callback):
        order,run_valid = 90,False
        def after_batch(self):
            if self.iter==4: self.learn.fit(1)
    cb = SelectiveBackpropCallback(beta=1, warmup=0, seed=0)
    with pytest.raises(ValueError, match='or a fit within it'):
        quiet_fit(numbered_learner(n=32+180, cbs=[cb, Inner()]), 2)

# which items fill up the last step
class Weighted(BatchMethod):
    "The hardest `k` of each batch, with weights; of some batches none"
    weighs = True
    def __init__(self, k, which):
        super().__init__(gather=True)
        self.k,self.which = k,which
    def begin_epoch(self): self.turns = itertools.count()
    def choose(self, scores, now):
        k = self.k if next(self.turns) in self.which else 0
        return Chosen(scores.topk(k).indices.sort().values, torch.full((k,), 1.5))

@pytest.mark.parametrize('k,which,sizes,weights', [
    (6, range(11), [16,16,16,16,2], [1.5,1.5]),
    (1, [3], [2], [3.,0.]),
    (2, [0,10], [4], [1.5]*4),
    (8, [2,10], [16], [1.5]*16),
    (8, [2,5], [16,2], [0.,0.]),
    (0, [], [2], [0.,0.])])
def test_weighted_items_are_not_filled_up(k, which, sizes, weights):
    "But one item has company, of weight 0, and an epoch makes a step"
    cb = BatchSelection(Weighted(k, which), warmup=0)
    learn = quiet_fit(numbered_learner(n=32+180, drop_last=True, cbs=[cb, Spy()]), 1)
    assert list(map(len, learn.spy.batches))==sizes
    assert cb.stats.trained[cb.stats.trained>0].tolist()==sizes
    assert cb.item_weight.tolist()==weights

@pytest.mark.parametrize('cls,kwargs', [
    (SelectiveBackpropCallback, dict(beta=1)),
    (ImportanceSamplingCallback, dict(tau=0))])
@pytest.mark.parametrize('interrupt,pools', [(0, [48,48,48,36]), (5, [48,16,48,16,20])])
def test_batches_that_are_scored_together(cls, kwargs, interrupt, pools):
    "As many as `presample` says; fewer at an epoch's end, and before a batch that trains whole"
    cb = cls(**kwargs, warmup=0, interrupt=interrupt, seed=0)
    cb.method.presample = 3
    if cls is ImportanceSamplingCallback: cb.method.tau_now = 1.
    learn = quiet_fit(numbered_learner(n=32+180, cbs=[cb, Arrivals(), Steps()]), 1)
    batches,choices = learn.arrivals.epochs[0]
    n_chosen = [len(rows) for _,rows in choices]
    assert [len(scores) for scores,_ in choices]==pools
    scored = cb.stats[cb.stats.scored]
    assert scored.seen.sum()==sum(pools)
    assert [kept for kept in scored.kept if kept]==[n for n in n_chosen if n]

    if cls is ImportanceSamplingCallback: assert n_chosen==[16]*len(pools)
    else:
        wanted = steps_by_the_rules(batches, choices, lambda i: cb.window.is_on(0, 0, i), 3)
        assert [items for items,_,_ in learn.steps.epochs[0]][:-1]==wanted[:-1]

class TargetFirst(Learner):
    "Has batches whose first part is the target"
    def _split(self, b): self.xb,self.yb = tuple(b[1:]),tuple(b[:1])

@pytest.mark.parametrize('make', [TopLossCallback, SelectiveBackpropCallback])
def test_a_learner_that_splits_batches_in_its_own_way_is_refused(make):
    "It would be scored by other inputs than those that train; what is not scored trains as ever"
    def learner(cb):
        x,y = class_data(64)
        return TargetFirst(dls_of(y, x, n_valid=16), mlp(), CrossEntropyLossFlat(), cbs=cb)
    before = weights(learn := learner(make(warmup=0)))
    with pytest.raises(ValueError): quiet_fit(learn, 1)
    assert same(before, weights(learn))
    assert quiet_fit(learner(FavorHardCallback(warmup=0)), 2).selection.stats.kept.sum()>0
