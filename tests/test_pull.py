"Pull until full: every batch that fastai announces trains, and the loader is read further for it"
import functools, multiprocessing
from collections import Counter

import pandas as pd, pytest, torch
from fastai.callback.core import (Callback, CancelBatchException, CancelEpochException, CancelFitException,
    CancelTrainException)
from fastai.callback.data import CollectDataCallback
from fastai.callback.hook import ActivationStats, HookCallback
from fastai.callback.schedule import ParamScheduler
from fastai.data.load import DataLoader
from helpers import *
from selback.core.batches import Gather, Items, Replace
from selback.core.untouched import fixed_random
from selback.callback.loader import Feed, is_distributed, own_loader
from test_loader import OnCpu
from torch.nn import functional as F

GATHERING = dict(selective=lambda **k: SelectiveBackpropCallback(beta=2, **k), few=lambda **k: SelectiveBackpropCallback(beta=9, **k), most=lambda **k: TopLossCallback(.8, gather=True, **k),
    share=lambda **k: BatchLossFilterCallback(.7, gather=True, **k), random=lambda **k: RandomSubsetCallback(.4, gather=True, **k),
    in_threes=lambda **k: TopLossCallback(.3, gather=True, presample=3, **k), window=lambda **k: TopLossCallback(.3, gather=True, interrupt=5, start=.2, end=.9, **k))
gathering = pytest.mark.parametrize('make', GATHERING.values(), ids=GATHERING)
some_gathering = pytest.mark.parametrize('make', [GATHERING[k] for k in ('selective','most','window')])

class Arrivals(Callback):
    "Ahead of the selection: notes each batch of the loader, and what is chosen"
    order,run_valid = SelectionCallback.order-1,False
    def before_fit(self):
        self.epochs,choose = [],type(self.learn.selection).choose.__get__(self.learn.selection)
        def noted(scores):
            chosen = choose(scores)
            self.choices.append((scores.tolist(), chosen.rows.tolist()))
            return chosen
        self.learn.selection.choose = noted
    def before_train(self):
        self.batches,self.choices,self.is_announced = [],[],True
        self.epochs.append((self.batches, self.choices))
    def before_batch(self):
        if not self.learn.selection.feed.is_new: return # one that was there before, for a step after the last batch
        i,announced,self.is_announced = self.learn.selection.feed.position-1,self.is_announced,False
        assert self.pct_train==pytest.approx((self.epoch+i/self.n_iter)/self.n_epoch) and (announced or self.iter==i)
        self.batches.append((i, numbers(self.x)))

class Steps(Callback):
    "Behind the selection: the items of each step, and the clocks"
    order,run_valid = 20,False
    is_cancelled = False
    def before_fit(self): self.epochs = []
    def before_train(self): self.epochs.append([])
    def after_cancel_train(self): self.is_cancelled = True
    def before_batch(self):
        self.learn.arrivals.is_announced = True
        i = self.learn.selection.feed.position-1 # of the batch that was read last
        assert self.iter==i and self.pct_train==pytest.approx((self.epoch+i/self.n_iter)/self.n_epoch)
    def after_loss(self): self.epochs[-1].append((numbers(self.x), self.iter, self.opt.hypers[0]['lr']))
    def after_train(self): assert self.is_cancelled or self.pct_train==pytest.approx((self.epoch+1)/self.n_epoch)

def steps_by_the_rules(batches, choices, selects, presample=1, bs=16):
    "The items of each step: batch after batch is read until enough wait; the last step is filled up with the hardest of the others"
    waiting,steps,pool,others,is_due,choices = [],[],[],[],False,iter(choices)
    def choose():
        nonlocal others
        items,(scores,rows) = sum(pool, []),next(choices)
        pool.clear()
        assert len(scores)==len(items)
        waiting.extend(items[r] for r in rows)
        others = [items[r] for r in sorted(range(len(items)), key=lambda r: -scores[r]) if r not in rows]
    def step(items):
        nonlocal is_due
        steps.append(items)
        is_due = False
    for i,items in batches:
        is_due = True
        if selects(i): pool.append(items)
        if pool and (len(pool)==presample or not selects(i) or i==batches[-1][0]): choose()
        if not selects(i):
            step(items)
            others = []
        while len(waiting)>=bs and not pool: step([waiting.pop(0) for _ in range(bs)])
    if waiting or is_due: step(waiting+sorted(others[:bs-len(waiting)], key=items.index if presample==1 else None))
    return steps

@functools.cache
def one_cycle(n_epoch, **kwargs): return list(quiet_fit(numbered_learner(**kwargs), n_epoch, 'fit_one_cycle').recorder.lrs)

@pytest.mark.law(4)
@pytest.mark.parametrize('drop_last', [True, False])
@gathering
def test_steps_by_the_rules(make, drop_last):
    cb,data = make(warmup=0, seed=0),dict(n=32+180, drop_last=drop_last)
    learn = quiet_fit(numbered_learner(cbs=[cb, Arrivals(), Steps()], **data), 3, 'fit_one_cycle')
    n_iter,stats,rates = 11+(not drop_last),cb.stats,one_cycle(3, **data)
    for epoch,((batches,choices),steps) in enumerate(zip(learn.arrivals.epochs, learn.steps.epochs)):
        def selects(i): return cb.window.is_on((epoch+i/n_iter)/3, 0, i)
        wanted,got = steps_by_the_rules(batches, choices, selects, cb.presample),[items for items,_,_ in steps]
        assert got[:-1]==wanted[:-1] and sorted(got[-1])==sorted(wanted[-1]) and [i for i,_ in batches]==list(range(n_iter))
        assert set(Counter(sum(got, [])).values())=={1} # each trains once
        assert [rate for _,_,rate in steps]==pytest.approx([rates[epoch*n_iter+i] for _,i,_ in steps], rel=1e-6) # that of the batch read last
        rows = stats[stats.epoch==epoch]
        assert rows.trained[rows.trained>0].tolist()==list(map(len, got)) and rows.seen[rows.seen>0].tolist()==[len(items) for _,items in batches]
        assert rows.kept[rows.scored].sum()==sum(len(chosen) for _,chosen in choices) or not cb.scored
        if cb.presample==1: assert rows.step.tolist()==list(range(len(rows))) and not rows.kept[rows.step>=n_iter].any()
    assert cb.report.left==len(cb.delivery)==0 and len(learn.recorder.losses)==learn.train_iter==(stats.trained>0).sum()
    assert learn.recorder.hps['lr']==learn.recorder.lrs

# one event sequence a step
BATCH_EVENTS = ['before_batch','after_pred','after_loss','before_backward','after_backward','before_step','after_step','after_batch']

class Witness(Callback):
    "Notes the events of training, and looks at the batch after each step"
    order = 70
    def before_fit(self): self.events,self.batches = [],[]
    def __call__(self, name):
        super().__call__(name)
        if not self.training: return
        if name in BATCH_EVENTS: self.events.append(name)
        if name!='after_batch': return
        assert len(self.pred)==len(self.y)==len(self.x)<=16
        torch.testing.assert_close(self.loss.detach(), F.cross_entropy(self.pred.detach(), self.y)) # all of one step
        self.batches.append((self.x.clone(), self.y.clone(), self.pred.detach().clone(), self.loss.detach().clone()))

@pytest.mark.law(7)
@gathering
def test_other_callbacks_see_real_steps(make):
    calls = []
    class Count(HookCallback):
        def hook(self, m, i, o): calls.append(m.training)
    collect = CollectDataCallback()
    collect.run_valid = False
    learn = quiet_fit(numbered_learner(n=32+180, cbs=[make(warmup=0, seed=0), Witness(), collect, ActivationStats(with_hist=False), Count()]), 2, 'fit_one_cycle')
    n_steps,n_layers = (learn.selection.stats.trained>0).sum(),len(learn.count.modules)
    assert learn.witness.events==BATCH_EVENTS*n_steps and len(learn.activation_stats.stats)==len(learn.recorder.losses)==len(learn.recorder.hps['lr'])==n_steps
    assert sum(calls)==n_layers*n_steps and len(calls)==n_layers*(n_steps+2*2) # training, and two epochs' two batches of validation
    assert len(collect.data)==n_steps
    for (xb,yb,pred,loss),seen in zip(collect.data, learn.witness.batches): assert all(map(torch.equal, (*xb,*yb,pred,loss), seen))

@pytest.mark.law(7)
@pytest.mark.parametrize('every', [None, 2])
@pytest.mark.parametrize('cls,kwargs', [(TopLossCallback, dict(keep=1.)), (TopLossCallback, dict(keep=1., gather=True)), (SelectiveBackpropCallback, dict(beta=0))])
def test_hooks_of_callbacks_fire_as_often_as_in_plain_training(cls, kwargs, every):
    def calls(*cbs):
        seen = []
        class Count(HookCallback):
            order = -20 # as `ActivationStats`, ahead of the selection
            def hook(self, m, i, o): seen.append((type(m), m.training, len(o)))
        quiet_fit(table_learner(cbs=[Count(every=every), *cbs]), 2)
        return seen
    assert calls()==calls(cls(**kwargs, warmup=0))!=[]

# callbacks that prepare a batch
class Prepares(Callback):
    "Marks each item once, in a new tensor or in place"
    order,run_valid = -8,False
    def __init__(self, in_place): self.in_place,self.n = in_place,0
    def before_batch(self):
        self.n += 1
        if self.in_place: self.learn.xb[0][:,0] += 1000
        else: self.learn.xb = (self.x+torch.tensor([1000,0,0,0,0]),)

@pytest.mark.parametrize('in_place', [False, True])
@pytest.mark.parametrize('make', [GATHERING['selective'], GATHERING['window'], lambda **k: TopLossCallback(.95, gather=True, **k)])
def test_each_item_is_prepared_once(make, in_place):
    "Also those of a batch that is handed out again, for a last step that it fills up"
    learn = quiet_fit(numbered_learner(n=32+192, cbs=[make(warmup=0, seed=0), Prepares(in_place), Witness()]), 1)
    trained = torch.cat([x for x,_,_,_ in learn.witness.batches])
    assert len(trained)==learn.selection.stats.trained.sum() and (trained[:,0]-1000).abs().max()<10 # not 0, not 2000
    assert learn.prepares.n>=12

class Refuses(Callback):
    "Raises for some batches of the loader"
    order,run_valid = -8,False
    def __init__(self, ex, when): self.ex,self.when,self.refused = ex,when,[]
    def before_batch(self):
        if self.learn.selection.feed.is_new and self.when(self):
            self.refused += numbers(self.x)
            raise self.ex

@pytest.mark.parametrize('when', [lambda cb: cb.n_read in (1,4), lambda cb: cb.n_read in (0,3,9), lambda cb: len(cb.y)<16, lambda cb: True], ids=['pulled','announced','last','all'])
@some_gathering
def test_a_cancelled_batch_is_dropped_alone(make, when):
    class Refusing(Refuses):
        n_read = property(lambda self: self.learn.selection.feed.position-1)
    cbs = [make(warmup=0, seed=0), Refusing(CancelBatchException, when), Arrivals(), Steps()]
    learn = quiet_fit(numbered_learner(n=32+180, cbs=cbs), 1)
    (batches,choices),cb,refused = learn.arrivals.epochs[0],learn.selection,learn.refusing.refused
    wanted,got = steps_by_the_rules(batches, choices, lambda i: cb.window.is_on(i/12, 0, i), cb.presample),[items for items,_,_ in learn.steps.epochs[0]]
    assert got[:-1]==wanted[:-1] and sorted(sum(got[-1:], []))==sorted(sum(wanted[-1:], [])) and len(refused)>=4
    assert sorted(sum((items for _,items in batches), refused))==list(range(180))
    assert learn.pct_train==pytest.approx(1) and cb.report.left==0 and cb.stats.seen.sum()==sum(len(items) for _,items in batches)

@pytest.mark.parametrize('ex,trains_again,n_rows', [(CancelTrainException, True, 2), (CancelEpochException, True, 1), (CancelFitException, False, 0), (KeyboardInterrupt, False, 0)])
def test_what_else_is_raised_passes_through_and_what_waited_is_dropped(ex, trains_again, n_rows):
    cb = SelectiveBackpropCallback(beta=9, warmup=0, seed=0)
    refuses = Refuses(ex, lambda o: o.epoch==0 and o.learn.selection.feed.position==7)
    learn,raised = numbered_learner(n=32+180, cbs=[cb, refuses, Arrivals(), Steps()]),False
    try: quiet_fit(learn, 2)
    except KeyboardInterrupt: raised = True
    (batches,choices),waited = learn.arrivals.epochs[0],sum(len(rows) for _,rows in learn.arrivals.epochs[0][1])
    assert raised==(ex is KeyboardInterrupt) and len(batches)==6 and 0<waited<16 and not learn.steps.epochs[0] # it was still reading
    assert len(learn.steps.epochs)==1+trains_again and len([v for v in learn.recorder.values if len(v)])==n_rows
    assert not [t for t in tensors_of(cb.state_dict()) if t.ndim>1] and not len(cb.__getstate__()['delivery']) # no items in them
    refuses.when = lambda o: False
    quiet_fit(learn, 1)
    assert cb.report.left==waited and len(cb.delivery)==0
    for (batches,choices),steps in zip(learn.arrivals.epochs, learn.steps.epochs): # nothing of the first epoch is in a later one
        assert [items for items,_,_ in steps][:-1]==steps_by_the_rules(batches, choices, lambda i: True)[:-1]

def tensors_of(o):
    if isinstance(o, torch.Tensor): return [o]
    return sum(map(tensors_of, o.values() if isinstance(o, dict) else o if isinstance(o, (tuple,list)) else []), [])

# who goes and comes while items wait
@pytest.mark.parametrize('event', ['before_batch','after_pred','after_batch'])
@pytest.mark.parametrize('order', [-15, 20])
@pytest.mark.parametrize('go', [lambda learn: learn.full_batches(), lambda learn: learn.top_loss(), lambda learn: learn.add_cb(TopLossCallback())], ids=['off','replaced','other'])
def test_a_selection_that_goes_while_items_wait_lets_the_rest_train(go, event, order):
    class Goes(Callback):
        run_valid,done = False,False
        def __call__(self, name):
            if name!=event or not self.training or self.done or self.learn.selection.feed.position<5: return
            self.done = True
            go(self.learn)
    Goes.order = order
    cb = SelectiveBackpropCallback(beta=4, warmup=0, seed=0)
    learn = numbered_learner(n=32+180, cbs=[cb, Goes(), Spy()])
    quiet_fit(learn, 1)
    trained = Counter(sum(learn.spy.batches, []))
    assert set(trained.values())=={1} and learn.goes.done and len(cb.delivery)==0<cb.report.left
    assert 180-16*5-4<=len(trained)<180 # the batches that were read later train whole
    assert learn.pct_train==pytest.approx(1)

# workers, exceptions
WORKERS = dict(none=dict(), two=dict(num_workers=2), persistent=dict(num_workers=2, persistent_workers=True))

class Breaks(nn.Module):
    "Raises in one of its forward passes of training"
    def __init__(self, ex, at): super().__init__(); self.net,self.ex,self.at,self.n = mlp(),ex,at,0
    def forward(self, x):
        self.n += self.training
        if self.training and self.n==self.at: raise self.ex('model')
        return self.net(x)

class Raises(Callback):
    "Raises in its second step"
    order,run_valid = 20,False
    def __init__(self, ex): self.ex = ex
    def after_loss(self):
        if self.train_iter==1: raise self.ex('callback')

def children(): return multiprocessing.active_children()

@pytest.mark.parametrize('workers', ['two','persistent'])
@pytest.mark.parametrize('track_items', [False, True])
def test_workers_change_nothing_and_are_gone_after_a_fit(track_items, workers):
    def trained(workers):
        cb = SelectiveBackpropCallback(beta=2, warmup=0, seed=0, track_items=track_items)
        learn = quiet_fit(numbered_learner(n=32+84, cbs=[cb, Spy()], **WORKERS[workers]), 2)
        return learn.spy.batches,weights(learn)
    (items,model),(wanted,plain) = trained(workers),trained('none')
    assert items==wanted and same(model, plain) and not children()

@pytest.mark.parametrize('workers', ['two','persistent'])
@pytest.mark.parametrize('in_model', [False, True])
@pytest.mark.parametrize('ex', [KeyboardInterrupt, ZeroDivisionError, CancelFitException])
def test_no_worker_is_left_after_an_exception(ex, in_model, workers):
    cb = TopLossCallback(.5, gather=True, warmup=0, track_items=workers=='persistent') # then its loader is a copy of the user's
    learn = numbered_learner(n=32+132, drop_last=in_model, cbs=[cb]+([] if in_model else [Raises(ex)]), net=Breaks(ex, 2) if in_model else None, **WORKERS[workers])
    seen = []
    class Look(Callback):
        order,run_valid = 19,False
        def before_batch(self): seen.append(len(children()))
    try: quiet_fit(learn, 1, cbs=Look())
    except (KeyboardInterrupt,ZeroDivisionError): raised = True
    else: raised = False
    assert raised==(ex is not CancelFitException) and seen==[2,2] and not children()

# other uses of the learner within an epoch
def validates(learn):
    learn._do_epoch_validate()
    learn.training = True
    learn.model.train()

@pytest.mark.parametrize('use', [validates, lambda learn: learn.get_preds(dl=learn.dls.valid, inner=True)], ids=['validate','predict'])
@pytest.mark.parametrize('cls', [SelectiveBackpropCallback, StaleLossCallback])
def test_other_uses_within_an_epoch_change_nothing(cls, use):
    class Uses(Callback):
        order,run_valid = 90,False
        def __init__(self, on): self.on,self.busy = on,False
        def after_batch(self):
            if not self.on or self.train_iter%2 or self.busy: return
            self.busy,kept = True,(self.learn.iter,self.learn.n_iter,self.learn.pct_train)
            with fixed_random(): use(self.learn)
            self.learn.iter,self.learn.n_iter,self.learn.pct_train = kept
            learn,self.busy = self.learn,False
            learn.training = True
            learn.model.train()
    def trained(on):
        learn = numbered_learner(n=32+180, cbs=[cls(beta=1, warmup=0, seed=0), Spy(), Uses(on)])
        set_seed(1)
        return quiet_fit(learn, 3)
    learn,plain = trained(True),trained(False)
    assert learn.spy.batches==plain.spy.batches and same(weights(learn), weights(plain))
    pd.testing.assert_frame_equal(learn.selection.stats, plain.selection.stats)

@pytest.mark.parametrize('event', ['after_epoch','after_batch'])
def test_a_fit_within_a_fit(event):
    class Inner(Callback):
        order,busy,run_valid = 90,False,False
        def __call__(self, name):
            if name!=event or self.busy or self.epoch!=0 or name=='after_batch' and self.iter<4: return
            self.busy = True
            self.learn.fit(1)
    learn = numbered_learner(n=32+180, cbs=[SelectiveBackpropCallback(beta=1, warmup=0, seed=0), Spy(), Inner()])
    quiet_fit(learn, 2)
    stats = learn.selection.stats
    assert learn.inner.busy and len(learn.selection.delivery)==0 and (stats.trained<=16).all()
    assert stats.groupby(['fit','epoch']).seen.sum().max()==180

# the Feed by itself
def loaders(): return dls_of(torch.arange(82.)[:,None], torch.arange(82), bs=8, n_valid=32, shuffle=False)

@pytest.mark.parametrize('make', [lambda: loaders().train, lambda: OnCpu(loaders().train, 0, 2), lambda: torch.utils.data.DataLoader(list(range(50)), batch_size=8)], ids=['fastai','distributed','pytorch'])
def test_the_feed_passes_for_its_loader(make):
    dl = make()
    feed = Feed(dl)
    assert isinstance(feed, type(dl)) and isinstance(feed, DataLoader)==isinstance(dl, DataLoader) and len(feed)==len(dl) and feed.dataset is dl.dataset
    assert is_distributed(feed)==is_distributed(dl) and own_loader(feed) is own_loader(dl) and Feed(feed).dl is dl
    def rows(dl): return [(b[0] if isinstance(b, (tuple,list)) else b).flatten().tolist() for b in dl]
    assert feed.pull() is None and rows(feed)==rows(dl)==rows(feed) and feed.pull() is None and feed.position==len(rows(dl)) and feed.is_new

def test_the_feed_is_read_further_and_owes_steps():
    dl,owed = loaders().train,[]
    feed,wanted,got = Feed(dl, lambda exhausted: exhausted and len(owed)>0),[b[1].tolist() for b in dl],[]
    for i,(x,y) in enumerate(feed):
        batch = [y.tolist()]
        if feed.is_new: batch += [feed.pull()[1].tolist() for _ in range(i) if feed.position<len(dl)]
        feed.accept()
        got.append((feed.is_new, batch))
        if feed.position==7:
            if feed.is_new: owed += [1,2]
            else: owed.pop()
    assert sum((batch for new,batch in got if new), [])==wanted and [new for new,_ in got]==[True]*(len(got)-2)+[False]*2 and feed.pull() is None

def test_an_iteration_that_is_left_is_closed():
    class Closes:
        closed = 0
        def __iter__(self):
            try: yield from range(5)
            finally: self.closed += 1
    dl = Closes()
    for leave in (lambda it: it.close(), lambda it: it.throw(KeyboardInterrupt), lambda it: list(it)):
        feed = Feed(dl)
        it = iter(feed)
        assert next(it)==0 and feed.pull()==1
        try: leave(it)
        except KeyboardInterrupt: pass
        assert feed.pull() is None
    assert dl.closed==3

# which items fill up the last step
def test_suspects_fill_up_nothing():
    cb = TopLossCallback(.3, gather=True, noise_quantile=.95, warmup=0)
    learn = numbered_learner(n=32+180, cbs=[cb, Arrivals(), Steps()])
    ds,suspects = learn.dls.train.dataset,set(range(0, 180, 3))
    class Suspects(Callback):
        order = -50
        def before_train(self): self.learn.selection.tracker.meet(180, id(ds)); self.learn.selection.memory.streak[sorted(suspects)] = 9
    quiet_fit(learn.add_cb(Suspects()), 2)
    for (batches,choices),steps in zip(learn.arrivals.epochs, learn.steps.epochs):
        items = [items for items,_,_ in steps]
        last,chosen = batches[-1][1],sum(([items[r] for r in rows] for (_,items),(_,rows) in zip(batches, choices)), [])
        chosen = [i for i in chosen if i not in suspects]
        left = [last[r] for r in sorted(range(len(last)), key=lambda r: -choices[-1][0][r]) if last[r] not in suspects|set(chosen)]
        n = 16-len(chosen)%16
        assert sum(items, [])[:len(chosen)]==chosen and sorted(sum(items, [])[len(chosen):])==sorted(left[:n]) and len(left)>0

class Weighted(SelectionCallback):
    "The hardest `k` of each batch, with weights; of some batches none"
    def __init__(self, k, which): super().__init__(gather=True, warmup=0); self.k,self.which = k,which
    def choose(self, scores):
        k = self.k if self.iter in self.which else 0
        return Chosen(scores.topk(k).indices.sort().values, torch.full((k,), 1.5))

@pytest.mark.parametrize('k,which,sizes,weights', [(6, range(11), [16,16,16,16,2], [1.5,1.5]), (1, [3], [2], [3.,0.]), (2, [0,10], [4], [1.5]*4),
    (8, [2,10], [16], [1.5]*16), (8, [2,5], [16,2], [0.,0.]), (0, [], [2], [0.,0.])])
def test_weighted_items_are_not_filled_up(k, which, sizes, weights):
    "But one item has company, of weight 0, and an epoch makes a step"
    cb = Weighted(k, which)
    learn = quiet_fit(numbered_learner(n=32+180, drop_last=True, cbs=[cb, Spy()]), 1)
    assert list(map(len, learn.spy.batches))==cb.stats.trained[cb.stats.trained>0].tolist()==sizes and cb.item_weight.tolist()==weights

@pytest.mark.parametrize('cls,kwargs', [(SelectiveBackpropCallback, dict(beta=1)), (ImportanceSamplingCallback, dict(tau=0))])
@pytest.mark.parametrize('interrupt,pools', [(0, [48,48,48,36]), (5, [48,16,48,16,20])])
def test_batches_that_are_scored_together(cls, kwargs, interrupt, pools):
    "As many as `presample` says; fewer at an epoch's end, and before a batch that trains whole"
    cb = cls(**kwargs, presample=3, warmup=0, interrupt=interrupt, seed=0)
    cb.tau_now = 1.
    learn = quiet_fit(numbered_learner(n=32+180, cbs=[cb, Arrivals(), Steps()]), 1)
    choices = learn.arrivals.epochs[0][1]
    assert [len(scores) for scores,_ in choices]==pools
    if cls is ImportanceSamplingCallback: assert [len(rows) for _,rows in choices]==[16]*len(pools)
    rows = cb.stats[cb.stats.scored]
    assert rows.seen.sum()==sum(pools) and [kept for kept in rows.kept if kept]==[len(rows) for _,rows in choices if rows]
    if cls is SelectiveBackpropCallback:
        wanted = steps_by_the_rules(*learn.arrivals.epochs[0], lambda i: cb.window.is_on(0, 0, i), 3)
        assert [items for items,_,_ in learn.steps.epochs[0]][:-1]==wanted[:-1]

@pytest.mark.parametrize('drop_last', [True, False])
def test_empty_choices_pull_on_without_gathering(drop_last):
    class Some(SelectionCallback):
        def choose(self, scores): return Chosen(torch.arange(3 if self.iter in (2,3,7) else 0))
    learn = quiet_fit(numbered_learner(n=32+180, drop_last=drop_last, cbs=[Some(warmup=0), Arrivals(), Steps()]), 1)
    batches,steps = learn.arrivals.epochs[0][0],learn.steps.epochs[0]
    assert [i for _,i,_ in steps]==[2,3,7,10+(not drop_last)] and len(batches)==11+(not drop_last)
    for items,i,_ in steps[:3]: assert items==batches[i][1][:3]
    assert learn.selection.item_weight.tolist()==[0,0] and learn.selection.stats.trained.tolist()==[{2:3,3:3,7:3,10+(not drop_last):2}.get(i, 0) for i in range(len(batches))]
