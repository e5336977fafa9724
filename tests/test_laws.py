"The laws: nothing is added, lost, left behind or changed"
import contextlib, functools, gc, runpy, sys, warnings
from pathlib import Path

import pytest, torch
from fastai.callback.schedule import LRFinder
from fastai.callback.core import (Callback, CancelBatchException, CancelEpochException, CancelFitException,
    CancelTrainException)
from fastai.callback.training import BnFreeze, GradientAccumulation
from fastai.interpret import Interpretation
from fastai.learner import Learner
from helpers import *
from selback.core.batches import Items
from selback.callback.report import SelectionColumns
from selback.callback.learner import base_loss

def law_cases():
    "Every method with each of its settings that keep all"
    return [(cls,kwargs) for cls in methods() for kwargs in cls.keeps_all]
cases = law_cases()
def case_id(v): return v.__name__.removesuffix('Callback') if isinstance(v, type) else ','.join(f'{k}={o}' for k,o in v.items()) if isinstance(v, dict) else v

def test_every_method_has_a_setting_that_keeps_all(): assert all(c.keeps_all for c in methods())

# law 1
SMALL = LEARNERS | dict(table=partial(table_learner, n=84), image=partial(image_learner, n=36)) # a last batch of 4 items, as ever

@pytest.mark.law(1)
@pytest.mark.parametrize('kind', SMALL)
@pytest.mark.parametrize('cls,kwargs', cases, ids=case_id)
def test_selecting_everything_is_plain_training(cls, kwargs, kind):
    learn = quiet_fit(SMALL[kind]().add_cb(cls(**kwargs, warmup=0)))
    assert learn.selection.stats.kept.sum()==learn.selection.stats.seen.sum()>0
    trained,recorded = plain_training(kind)
    assert same(trained, weights(learn)) and recorded==recording(learn)

def recording(learn):
    rec = learn.recorder
    return [float(o) for o in rec.losses],[v[:2] for v in rec.values],list(rec.lrs),list(rec.iters)

@functools.cache
def plain_training(kind, **kwargs):
    learn = quiet_fit(SMALL[kind](**kwargs))
    return weights(learn),recording(learn)

@pytest.mark.law(1)
@pytest.mark.parametrize('cls,kwargs', cases, ids=case_id)
def test_selecting_everything_is_plain_training_with_drop_last(cls, kwargs):
    learn = quiet_fit(SMALL['table'](drop_last=True, cbs=cls(**kwargs, warmup=0)))
    trained,recorded = plain_training('table', drop_last=True)
    assert same(trained, weights(learn)) and recorded==recording(learn)

def test_a_new_method_takes_part_by_itself(monkeypatch):
    class NewcomerCallback(SelectionCallback):
        "A method as a notebook of its own would have it"
        __module__,keeps_all = 'selback.methods.newcomer',(dict(),)
        def choose(self, scores): return Chosen(torch.arange(len(scores)))
    assert 'newcomer' not in known_methods() # it has no one-liner yet
    monkeypatch.setattr(Learner, 'newcomer', lambda learn: learn.add_cb(NewcomerCallback()), raising=False)
    assert known_methods()['newcomer'] is NewcomerCallback in methods()
    here,loaded = Path(__file__).parent,set(sys.modules)
    test_selecting_everything_is_plain_training(NewcomerCallback, {}, 'table')
    found = {f.stem: runpy.run_path(str(f)) for f in (here/'matrix.py',*here.glob('test_*.py')) if 'methods()' in f.read_text(encoding='utf-8')} # as when tests are collected
    assert (NewcomerCallback,{}) in found['test_laws']['cases'] and NewcomerCallback not in [cls for cls,_ in cases] and 'newcomer' in found['matrix']['METHODS']
    for name in {f.stem for f in here.glob('*.py')} & (set(sys.modules)-loaded): del sys.modules[name] # what these have loaded knows it, too
    NewcomerCallback.__module__ = 'no module'
    assert NewcomerCallback not in methods()

# law 2 lives in test_policies.py; here: the chosen items are the ones that reach the model
class ScoreSpy(TopLossCallback):
    "Notes what it is given and what it chooses"
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = []
    def choose(self, scores):
        chosen = super().choose(scores)
        self.seen.append((numbers(self.x), scores.clone(), chosen.rows.tolist()))
        return chosen

@pytest.mark.law(2)
def test_exactly_the_hardest_items_train():
    learn = quiet_fit(numbered_learner(n=128+32, cbs=[ScoreSpy(keep=.25, warmup=0), Spy()]), 2)
    assert len(learn.spy.batches)==len(learn.selection.seen)==16
    for trained,(items,scores,rows) in zip(learn.spy.batches, learn.selection.seen):
        hardest = scores.argsort(descending=True)[:len(items)//4].sort().values.tolist()
        assert rows==hardest and trained==[items[i] for i in hardest]

def test_scores_are_the_losses_of_the_model_in_evaluation_mode():
    learn = numbered_learner(cbs=ScoreSpy(keep=.5, warmup=0))
    x,y = learn.dls.train.one_batch()
    learn.model.eval()
    wanted = torch.nn.functional.cross_entropy(learn.model(x), y, reduction='none').detach()
    learn.model.train()
    for got in learn.selection.score(Items((x,), (y,))): torch.testing.assert_close(got, wanted) # scores and losses

# law 4: here what all methods share; test_pull.py has the steps, one by one
@pytest.mark.law(4)
@pytest.mark.parametrize('drop_last', [True, False])
@pytest.mark.parametrize('cls', [c for c in methods() if issubclass(c, SelectionCallback)], ids=case_id)
def test_every_method_gathers_full_batches(cls, drop_last):
    "An epoch's steps have 16 items each, but for the last where no other item is left to fill it up"
    own = {ImportanceSamplingCallback: dict(tau=0, presample=2)}.get(cls, dict(gather=True))
    learn = quiet_fit(numbered_learner(n=212, drop_last=drop_last, cbs=cls(seed=0, **own)), 4)
    cb,n_gathered = learn.selection,0
    for _,epoch in cb.stats.query('epoch>0 and step>=0').groupby('epoch'):
        batches,sizes = epoch[epoch.seen>0],epoch.trained[epoch.trained>0].tolist()
        if cb.scored and not batches.scored.all(): # chosen before loading
            assert (epoch.trained==epoch.seen).all()
            continue
        n_gathered,waited,last = n_gathered+1,batches.kept.sum()-sum(sizes[:-1]),batches.iloc[-1]
        assert batches.seen.tolist()==[16]*11+[4]*(not drop_last) and sizes[:-1]==[16]*(len(sizes)-1) and 0<=waited<=16
        assert sizes[-1]==(16 if cls is ImportanceSamplingCallback else min(16, waited+last.seen-last.kept)) # weighted ones are drawn, not filled up
    assert n_gathered and cb.report.left==len(cb.delivery)==0

# law 5
class Nosy(nn.Module):
    "Draws random numbers of all kinds in its forward pass, and may fail"
    def __init__(self): super().__init__(); self.net,self.fail = mlp(),False
    def forward(self, x):
        import numpy as np, random
        random.random(); np.random.rand(); torch.rand(1)
        if self.fail: raise RuntimeError('model failed')
        return self.net(x)

@pytest.mark.law(5)
@pytest.mark.parametrize('fail', [False, True])
def test_scoring_leaves_no_trace(fail):
    model = Nosy()
    model.net[1].eval()
    model.fail,x = fail,torch.randn(8,4)
    autocast = torch.autocast('cpu', dtype=torch.bfloat16)
    def state(): return [m.training for m in model.modules()],random_states(),torch.is_grad_enabled(),torch.is_autocast_enabled('cpu')
    weights,before = {k: v.clone() for k,v in model.state_dict().items()},state()
    with pytest.raises(RuntimeError, match='model failed') if fail else contextlib.nullcontext():
        pred = ScoringPass()(model, (x,), (), autocast)
        assert pred.dtype==torch.float32 and not pred.requires_grad
    assert state()==before and same(weights, model.state_dict())

SETTINGS = dict(plain=lambda: [], mixup=lambda: [MixUp(.4)], amp=lambda: [CPUMixedPrecision()], frozen_bn=lambda: [BnFreeze()])

@pytest.mark.law(5)
@pytest.mark.parametrize('setting', SETTINGS)
@pytest.mark.parametrize('cls', methods(), ids=case_id)
def test_a_batch_is_chosen_without_side_effects(cls, setting):
    def state(learn):
        return dict(flags=[m.training for m in learn.model.modules()], random=random_states(), reduction=base_loss(learn).reduction, loss=learn.loss_func, grad=torch.is_grad_enabled(),
            autocast=(torch.is_autocast_enabled('cpu'), torch.get_autocast_dtype('cpu')), dls=learn.dls, loaders=list(learn.dls.loaders), metrics=list(learn.metrics), opt=learn.opt,
            requires_grad=[p.requires_grad for p in learn.model.parameters()], grads=[p.grad is None for p in learn.model.parameters()])
    class Before(Callback):
        order,run_valid = SelectionCallback.order-1,False
        def before_batch(self): self.kept,self.state = weights(self.learn),state(self.learn)
    class After(Callback):
        order,run_valid,n = SelectionCallback.order+1,False,0
        def before_batch(self):
            assert same(self.before.kept, weights(self.learn)) and self.before.state==state(self.learn)
            self.n += 1
    learn = table_learner(n=84, cbs=[lively(cls), Before(), After(), *SETTINGS[setting]()], metrics=accuracy_of)
    learn.model[3].eval() # a flag that is not the model's
    quiet_fit(learn, 3)
    assert learn.after.n>3

# law 6
def state_of(learn):
    return dict(loss=learn.loss_func, dls=learn.dls, train=learn.dls.train, reduction=base_loss(learn).reduction, metrics=list(learn.metrics),
        cbs=[type(cb) for cb in learn.cbs], flags=[m.training for m in learn.model.modules()], logger=learn.logger,
        grad=torch.is_grad_enabled(), autocast=torch.is_autocast_enabled('cpu'), run=[cb.run for cb in learn.cbs])

class Raiser(Callback):
    "Raises in the `at`-th call of an event: the first ones find a training that has begun"
    def __init__(self, event, ex, at=1): self.event,self.ex,self.at,self.n = event,ex,at,0
    def __call__(self, event_name):
        if event_name==self.event:
            self.n += 1
            if self.n==self.at: raise self.ex
        return super().__call__(event_name)

BATCH_EVENTS = ['before_batch','after_pred','after_loss','before_backward','after_backward','before_step','after_step','after_batch']
EVENTS = ['before_fit','before_epoch','before_train',*BATCH_EVENTS,'after_train','before_validate','after_validate','after_epoch','after_fit']
EXCEPTIONS = [CancelFitException, KeyboardInterrupt, ZeroDivisionError]
OTHERS = [CancelEpochException, CancelTrainException, CancelBatchException]

def left_behind(make, cbs, interrupts):
    "What interrupted fits raise and leave behind, and the fit after each that was cut short; what fastai itself leaves broken is mended in between"
    learn = make()
    learn.add_cbs(cbs)
    loss_func,found = learn.loss_func,[]
    for event,ex in interrupts:
        for more in [[Raiser(event, ex, 2 if event in BATCH_EVENTS else 1)]]+[[]]*(ex not in OTHERS or (event, ex)==interrupts[-1]):
            before,raised = state_of(learn),None
            with learn.no_bar(),learn.no_logging(),warnings.catch_warnings():
                warnings.simplefilter('ignore')
                try: learn.fit(2 if more and ex not in EXCEPTIONS else 1, cbs=more) # the others go on with the next epoch
                except (Exception,KeyboardInterrupt) as e: raised = type(e)
            after = state_of(learn)
            left = {k: after[k] if k in ('flags','grad','autocast','reduction','run') else after[k] is before[k] for k in ('loss','dls','train','flags','grad','autocast','reduction','logger')}
            found.append((event, ex, bool(more), raised, left, [type(cb) for cb in learn.cbs if not isinstance(cb, (Selection,SelectionColumns))]))
            if learn.selection and not more and raised is None: assert_whole(learn)
            while torch.is_autocast_enabled('cpu'): # mixed precision leaves it on after an exception
                torch.set_autocast_enabled('cpu', False)
                torch.autocast_decrement_nesting()
        learn.loss_func = loss_func # MixUp leaves its own
    return found

def assert_whole(learn):
    "A fit went through, each column is there once, and nothing waits"
    assert all(cb.run for cb in learn.cbs) and len(learn.recorder.values)==1 and len(learn.recorder.values[-1])==6 and not len(learn.selection.delivery)
    assert list(learn.recorder.metric_names)==['epoch','train_loss','valid_loss','samp_perc','loss_perc','full_loss','saved_secs','time']

def small_learner(): return table_learner(n=64, n_valid=16) # three batches, and one of validation

@functools.cache
def left_by_fastai(other, interrupts): return left_behind(small_learner, [OTHER_CALLBACKS[other]()] if other else [], interrupts)

OTHER_CALLBACKS = dict(mixup=lambda: MixUp(.4), amp=CPUMixedPrecision, accumulation=lambda: GradientAccumulation(8))
INTERRUPTS = {ex: tuple((event, ex) for event in (EVENTS if ex in EXCEPTIONS else BATCH_EVENTS)) for ex in EXCEPTIONS+OTHERS}
LIVELY = {SelectiveBackpropCallback: dict(beta=.5), StaleLossCallback: dict(beta=.5), ImportanceSamplingCallback: dict(tau=0, presample=2), InfoBatchCallback: dict(delta=1.)}
def lively(cls): return cls(warmup=0, seed=0, **LIVELY.get(cls, {})) # selects in a fit of one epoch, in two steps at least

@pytest.mark.law(6)
@pytest.mark.parametrize('ex', INTERRUPTS, ids=case_id)
@pytest.mark.parametrize('cls', methods(), ids=case_id)
def test_interrupted_fits_leave_what_fastai_leaves(cls, ex):
    assert left_behind(small_learner, [lively(cls)], INTERRUPTS[ex])==left_by_fastai(None, INTERRUPTS[ex])

@pytest.mark.law(6)
@pytest.mark.parametrize('other', OTHER_CALLBACKS)
@pytest.mark.parametrize('ex', EXCEPTIONS, ids=case_id)
@pytest.mark.parametrize('cls', methods(), ids=case_id)
def test_interrupted_fits_with_other_callbacks_leave_what_fastai_leaves(cls, ex, other):
    interrupts = tuple((event, ex) for event in ('before_batch','after_pred','after_step','after_train'))
    cbs = [OTHER_CALLBACKS[other](), lively(cls)][::-1 if ex is KeyboardInterrupt else 1] # attached in either order
    assert left_behind(small_learner, cbs, interrupts)==left_by_fastai(other, interrupts)

class Fails(nn.Module):
    "Fails in one of its batches of training, or when it is looked through"
    def __init__(self, in_training, at): super().__init__(); self.net,self.in_training,self.at,self.calls = mlp(),in_training,at,[] # a look puts a number back
    def forward(self, x):
        if self.training==self.in_training:
            self.calls.append(1)
            if len(self.calls)==self.at: raise ZeroDivisionError('model failed')
        return self.net(x)

@pytest.mark.law(6)
@pytest.mark.parametrize('amp', [False, True])
@pytest.mark.parametrize('cls', methods(), ids=case_id)
def test_an_exception_in_the_model_leaves_what_fastai_leaves(cls, amp):
    def run(cbs):
        def make():
            learn = table_learner(n=84)
            learn.model = Fails(True, 3)
            return learn
        return left_behind(make, ([CPUMixedPrecision()] if amp else [])+cbs, [(None, None)])
    plain = run([])
    assert plain==run([cls(warmup=0)]) and plain[0][3] is ZeroDivisionError
    learn = table_learner(cbs=[cls(warmup=0)]) # and one in the scoring pass leaves the flags, the gradients and autocast
    if not learn.selection.scored: return
    learn.model = Fails(False, 1 if cls is ImportanceSamplingCallback else 3)
    before = state_of(learn)
    learn._do_epoch_validate = lambda *args: None
    with pytest.raises(ZeroDivisionError),learn.no_bar(),learn.no_logging(): learn.fit(3)
    after = state_of(learn)
    assert {k: after[k] for k in ('flags','grad','autocast','reduction')}=={k: before[k] for k in ('flags','grad','autocast','reduction')} and after['loss'] is before['loss']

@pytest.mark.law(6)
def test_columns_once_and_gone():
    learn = table_learner(metrics=[accuracy_of]).selective_backprop()
    for _ in range(3): quiet_fit(learn, 2)
    assert list(learn.recorder.metric_names)==['epoch','train_loss','valid_loss','accuracy_of','samp_perc','loss_perc','full_loss','saved_secs','time']
    assert len(learn.metrics)==1
    quiet_fit(learn.full_batches())
    assert list(learn.recorder.metric_names)==['epoch','train_loss','valid_loss','accuracy_of','time'] and len(learn.recorder.values[-1])==3
    assert not hasattr(learn, 'selection_columns') and not learn.selection

def accuracy_of(pred, y): return (pred.argmax(1)==y).float().mean()

# law 7
def evaluated(cls, path):
    learn = table_learner(n=84, metrics=accuracy_of, path=path)
    if cls: learn.add_cb(cls(warmup=0))
    set_seed(3)
    with learn.no_bar(),learn.no_logging():
        found = learn.lr_find(num_it=12, show_plot=False)
        losses = [float(o) for o in learn.recorder.losses]
        preds = [o.tolist() for o in learn.get_preds(with_loss=True)]
        train_preds = [o.tolist() for o in learn.get_preds(ds_idx=0)]
        values,state = list(learn.validate()),{k: v.tolist() for k,v in weights(learn).items()}
        learn.fit(2)
        last = list(learn.recorder.values[-1][1:3])
        assert list(learn.validate())==last # no columns of a fit
    return found,losses,preds,train_preds,values,state

def evaluated_images(cls):
    learn = image_learner(n=36)
    if cls: learn.add_cb(cls(warmup=0))
    with learn.no_bar(),learn.no_logging():
        learn.fit(1)
        learn.model.load_state_dict(image_learner(n=36).model.state_dict())
        set_seed(3)
        tta = [o.tolist() for o in learn.tta(n=2)]
        interp = Interpretation.from_learner(learn)
        losses,idxs = interp.top_losses(5)
        learn.fit(1)
    return tta,losses.tolist(),idxs.tolist(),len(learn.recorder.values)

plainly = functools.cache(lambda f, *args: f(None, *args))

@pytest.mark.law(7)
@pytest.mark.parametrize('cls', methods(), ids=case_id)
def test_evaluation_is_unchanged(cls, tmp_path_factory):
    path = tmp_path_factory.getbasetemp()
    assert plainly(evaluated, path)==evaluated(cls, path)

@pytest.mark.parametrize('cls', methods(), ids=case_id)
def test_evaluation_of_images_is_unchanged(cls): assert plainly(evaluated_images)==evaluated_images(cls)

@pytest.mark.law(7)
def test_show_results_is_unchanged():
    def shown(cb):
        learn,calls = image_learner(),[]
        if cb: learn.add_cb(cb)
        learn.dls.valid.new = lambda **kwargs: learn.dls.valid # its own copy would not have the spy below
        learn.dls.valid.show_results = lambda b,out,**kwargs: calls.append((b[0].tolist(), [str(o) for o in out]))
        set_seed(1)
        with learn.no_bar(): learn.show_results()
        return calls
    assert shown(None)==shown(TopLossCallback(warmup=0))!=[]

@pytest.mark.parametrize('event', ['after_train', 'before_validate', 'after_batch'])
def test_validate_after_an_interrupted_validation(event):
    class Stop(Callback):
        def __call__(self, name):
            if name==event and self.epoch==1 and (name!='after_batch' or not self.training): raise KeyboardInterrupt
    learn = table_learner(metrics=accuracy_of).top_loss(warmup=0)
    with pytest.raises(KeyboardInterrupt),learn.no_bar(),learn.no_logging(): learn.fit(2, cbs=Stop())
    with learn.no_bar(): assert len(learn.validate())==2

def test_fit_after_an_interrupted_lr_find_selects():
    learn = table_learner(cbs=TopLossCallback(keep=.25, warmup=0))
    class Stop(Callback):
        def after_batch(self): raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt),learn.no_bar(),learn.no_logging(): learn.fit(1, cbs=[LRFinder(num_it=6), Stop()])
    learn.remove_cbs([cb for cb in learn.cbs if isinstance(cb, (LRFinder, Stop))])
    quiet_fit(learn, 1)
    assert (learn.selection.stats.query('seen==16').kept==4).all() and len(learn.selection.stats)

def test_nothing_keeps_a_learner_alive():
    import weakref
    learn = quiet_fit(table_learner().selective_backprop(warmup=0))
    learn.full_batches()
    ref = weakref.ref(learn.model)
    del learn
    gc.collect()
    assert ref() is None
