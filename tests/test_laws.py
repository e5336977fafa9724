"The laws: nothing is added, lost, left behind or changed"
import functools, gc, warnings, weakref

import pytest, torch
from fastai.callback.schedule import LRFinder
from fastai.callback.core import (Callback, CancelBatchException, CancelEpochException, CancelFitException,
    CancelTrainException)
from fastai.callback.training import BnFreeze, GradientAccumulation
from helpers import *
from selback.callback.learner import base_loss
from selback.callback.watching import WatchItemsCallback

cases = [(cls,kwargs) for cls in methods() for kwargs in cls.keeps_all] # settings of each method that keep all

def case_id(v):
    if isinstance(v, type): return v.__name__.removesuffix('Callback')
    if isinstance(v, dict): return ','.join(f'{k}={o}' for k,o in v.items())
    return v

ATTACHED = [*methods(), WatchItemsCallback] # which selects nothing, and keeps to the same laws

def at_once(cls, **kwargs): return cls() if cls is WatchItemsCallback else cls(warmup=0, **kwargs)

# law 1
def lone_learner():
    "The last batch of an epoch is one item"
    learn = table_learner(n=49, n_valid=16)
    learn.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)) # BatchNorm takes more than one
    return learn

SMALL = dict( # a last batch of 4 items, as ever
    table=short_learner,
    mixup=lambda: short_learner(cbs=MixUp(.4)),
    regression=regression_learner,
    drop_last=partial(short_learner, drop_last=True),
    image=partial(image_learner, n=36),
    mixed_precision=lambda: short_learner(cbs=CPUMixedPrecision()), # which rounds counts to 8
    lone=lone_learner)

@pytest.mark.law(1)
@pytest.mark.parametrize('kind', SMALL)
@pytest.mark.parametrize('cls,kwargs', by_path(cases), ids=case_id)
def test_selecting_everything_is_plain_training(cls, kwargs, kind):
    learn = quiet_fit(SMALL[kind]().add_cb(cls(**kwargs, warmup=0)))
    stats = learn.selection.stats
    assert stats.kept.sum()==stats.seen.sum()>0
    trained,recorded = plain_training(kind)
    assert same(trained, weights(learn))
    assert recorded==recording(learn)

def recording(learn):
    "The losses of each step and epoch, learning rates, and the numbers of steps"
    rec = learn.recorder
    losses = [float(o) for o in rec.losses]
    values = [v[:2] for v in rec.values]
    return losses,values,list(rec.lrs),list(rec.iters)

@functools.cache
def plain_training(kind):
    learn = quiet_fit(SMALL[kind]())
    return weights(learn),recording(learn)

# law 2 lives in test_policies.py; here: the chosen items are the ones that reach the model
def spied(**kwargs):
    "Notes what it is given and what it chooses"
    cb = TopLossCallback(**kwargs)
    cb.seen = []
    def note(batch, scores, losses, chosen):
        cb.seen.append((numbers(batch.xb[0]), scores.clone(), chosen.rows.tolist()))
    return watch_choices(cb, note)

@pytest.mark.law(2)
def test_exactly_the_hardest_items_train():
    learn = quiet_fit(numbered_learner(n=128+32, cbs=[spied(keep=.25, warmup=0), Spy()]), 2)
    assert len(learn.spy.batches)==len(learn.selection.seen)==16

    for trained,(items,scores,rows) in zip(learn.spy.batches, learn.selection.seen):
        hardest = scores.argsort(descending=True)[:len(items)//4].sort().values.tolist()
        assert rows==hardest
        assert trained==[items[i] for i in hardest]

# law 4: here what all methods share; test_pull.py has the steps, one by one
@pytest.mark.law(4)
@pytest.mark.parametrize('drop_last', [True, False])
@pytest.mark.parametrize('cls', by_path(c for c in methods() if issubclass(c, BatchSelection)), ids=case_id)
def test_every_method_gathers_full_batches(cls, drop_last):
    "An epoch's steps have 16 items each, but for the last where no other item is left to fill it up"
    is_drawn = cls is ImportanceSamplingCallback # with weights, and not filled up
    own = dict(tau=0, presample=2) if is_drawn else dict(gather=True)
    learn = quiet_fit(numbered_learner(n=212, drop_last=drop_last, cbs=cls(seed=0, **own)), 4)
    cb = learn.selection
    n_gathered = 0

    for _,epoch in cb.stats.query('epoch>0 and step>=0').groupby('epoch'):
        batches = epoch[epoch.seen>0]
        if cb.is_scored and not batches.scored.all(): # chosen before loading
            assert (epoch.trained==epoch.seen).all()
            continue
        n_gathered += 1
        assert batches.seen.tolist()==[16]*11+[4]*(not drop_last)

        *full,last = epoch.trained[epoch.trained>0].tolist()
        assert full==[16]*len(full)
        waited = batches.kept.sum()-sum(full)
        assert 0<=waited<=16
        others = batches.iloc[-1].seen-batches.iloc[-1].kept
        assert last==(16 if is_drawn else min(16, waited+others))

    assert n_gathered

# law 5

SETTINGS = dict(
    plain=lambda: [],
    mixup=lambda: [MixUp(.4)],
    amp=lambda: [CPUMixedPrecision()],
    frozen_bn=lambda: [BnFreeze()])

def state_within_a_step(learn):
    params = list(learn.model.parameters())
    return dict(flags=[m.training for m in learn.model.modules()], random=random_states(),
        loss=learn.loss_func, reduction=base_loss(learn).reduction, metrics=list(learn.metrics),
        dls=learn.dls, loaders=list(learn.dls.loaders), opt=learn.opt,
        grad=torch.is_grad_enabled(), requires_grad=[p.requires_grad for p in params],
        grads=[p.grad is None for p in params],
        autocast=(torch.is_autocast_enabled('cpu'), torch.get_autocast_dtype('cpu')))

@pytest.mark.law(5)
@pytest.mark.parametrize('setting', SETTINGS)
@pytest.mark.parametrize('cls', by_path(ATTACHED), ids=case_id)
def test_a_batch_is_chosen_without_side_effects(cls, setting):
    class Before(LoaderBatches):
        kept = None
        def note(self, i, xb, yb):
            self.kept = weights(self.learn)
            self.state = state_within_a_step(self.learn)
    class After(Callback):
        order,run_valid,n = BatchSelection.order+1,False,0
        def before_batch(self):
            if self.before.kept is None: return # a step of what waited, for which nothing was read
            assert same(self.before.kept, weights(self.learn))
            assert self.before.state==state_within_a_step(self.learn)
            self.before.kept = None
            self.n += 1

    cbs = [lively(cls), Before(), After(), *SETTINGS[setting]()]
    learn = table_learner(n=84, cbs=cbs, metrics=accuracy_of)
    learn.model[3].eval() # a flag that is not the model's
    quiet_fit(learn, 3)
    assert learn.after.n>3

# law 6
def state_of(learn):
    return dict(loss=learn.loss_func, reduction=base_loss(learn).reduction, metrics=list(learn.metrics),
        dls=learn.dls, train=learn.dls.train, logger=learn.logger,
        cbs=[type(cb) for cb in learn.cbs], run=[cb.run for cb in learn.cbs],
        flags=[m.training for m in learn.model.modules()],
        grad=torch.is_grad_enabled(), autocast=torch.is_autocast_enabled('cpu'))

class Raiser(Callback):
    "Raises in the `at`-th call of an event: the first ones find a training that has begun"
    def __init__(self, event, ex, at=1):
        self.event,self.ex,self.at = event,ex,at
        self.n = 0
    def __call__(self, event_name):
        if event_name==self.event:
            self.n += 1
            if self.n==self.at: raise self.ex
        return super().__call__(event_name)

BATCH_EVENTS = ['before_batch','after_pred','after_loss','before_backward','after_backward','before_step','after_step',
    'after_batch']
EVENTS = ['before_fit','before_epoch','before_train',*BATCH_EVENTS,'after_train','before_validate','after_validate',
    'after_epoch','after_fit']
EXCEPTIONS = [CancelFitException, KeyboardInterrupt, ZeroDivisionError]
OTHERS = [CancelEpochException, CancelTrainException, CancelBatchException]

def left_behind(make, cbs, interrupts):
    "What interrupted fits raise and leave behind, and the fit after each that was cut short"
    learn = make()
    learn.add_cbs(cbs)
    loss_func = learn.loss_func
    found = []
    for event,ex in interrupts:
        raiser = Raiser(event, ex, 2 if event in BATCH_EVENTS else 1)
        n_epoch = 1 if ex in EXCEPTIONS else 2 # the others go on with the next epoch
        found.append((event, ex, True, *left_by_a_fit(learn, n_epoch, [raiser])))

        is_last = (event, ex)==interrupts[-1]
        if ex not in OTHERS or is_last: found.append((event, ex, False, *left_by_the_next_fit(learn)))
        learn.loss_func = loss_func # MixUp leaves its own
    return found

def left_by_the_next_fit(learn):
    raised,*left = left_by_a_fit(learn, 1, [])
    if learn.selection and raised is None: assert_whole(learn)
    return raised,*left

def left_by_a_fit(learn, n_epoch, cbs):
    "What it raises, what is in place after it, and which callbacks; what fastai itself leaves broken is mended"
    before = state_of(learn)
    raised = raised_by_a_fit(learn, n_epoch, cbs)
    after = state_of(learn)
    leave_autocast()

    in_place = {k: after[k] is before[k] for k in ('loss','dls','train','logger')}
    modes = {k: after[k] for k in ('flags','grad','autocast','reduction')}
    others = [type(cb) for cb in learn.cbs if type(cb).__module__.partition('.')[0]!='selback']
    return raised,in_place,modes,others

def raised_by_a_fit(learn, n_epoch, cbs):
    with learn.no_bar(),learn.no_logging(),warnings.catch_warnings():
        warnings.simplefilter('ignore')
        try: learn.fit(n_epoch, cbs=cbs)
        except (Exception,KeyboardInterrupt) as e: return type(e)

def leave_autocast():
    "Mixed precision leaves it on after an exception"
    while torch.is_autocast_enabled('cpu'):
        torch.set_autocast_enabled('cpu', False)
        torch.autocast_decrement_nesting()

COLUMNS = ['samp_perc','loss_perc','full_loss']

def assert_whole(learn):
    "A fit went through, each column is there once, and nothing waits"
    assert all(cb.run for cb in learn.cbs)
    assert len(learn.recorder.values)==1
    columns = [] if learn.selection.is_watching else COLUMNS
    assert len(learn.recorder.values[-1])==2+len(columns)
    assert list(learn.recorder.metric_names)==['epoch','train_loss','valid_loss',*columns,'time']

def small_learner(): return table_learner(n=64, n_valid=16) # three batches, and one of validation

@functools.cache
def left_by_fastai(other, interrupts):
    return left_behind(small_learner, [OTHER_CALLBACKS[other]()] if other else [], interrupts)

OTHER_CALLBACKS = dict(mixup=lambda: MixUp(.4), amp=CPUMixedPrecision, accumulation=lambda: GradientAccumulation(8))
INTERRUPTS = {ex: tuple((event, ex) for event in EVENTS) for ex in EXCEPTIONS}
INTERRUPTS |= {ex: tuple((event, ex) for event in BATCH_EVENTS) for ex in OTHERS}

LIVELY = {SelectiveBackpropCallback: dict(beta=.5), StaleLossCallback: dict(beta=.5), InfoBatchCallback: dict(delta=1.),
    ImportanceSamplingCallback: dict(tau=0, presample=2)}
def lively(cls):
    "Selects in a fit of one epoch, in two steps at least"
    return at_once(cls, seed=0, **LIVELY.get(cls, {}))

SUDDEN = KeyboardInterrupt,CancelFitException,*OTHERS # all but an error, which ends as an interrupt does

@pytest.mark.law(6)
@pytest.mark.parametrize('ex', mostly_slow(INTERRUPTS, *SUDDEN), ids=case_id)
@pytest.mark.parametrize('cls', by_path(ATTACHED), ids=case_id)
def test_interrupted_fits_leave_what_fastai_leaves(cls, ex):
    assert left_behind(small_learner, [lively(cls)], INTERRUPTS[ex])==left_by_fastai(None, INTERRUPTS[ex])

@pytest.mark.law(6)
@pytest.mark.parametrize('other', OTHER_CALLBACKS)
@pytest.mark.parametrize('ex', mostly_slow(EXCEPTIONS, KeyboardInterrupt), ids=case_id)
@pytest.mark.parametrize('cls', by_path(ATTACHED), ids=case_id)
def test_interrupted_fits_with_other_callbacks_leave_what_fastai_leaves(cls, ex, other):
    interrupts = tuple((event, ex) for event in ('before_batch','after_pred','after_step','after_train'))
    cbs = [OTHER_CALLBACKS[other](), lively(cls)]
    if ex is KeyboardInterrupt: cbs.reverse() # attached in either order
    assert left_behind(small_learner, cbs, interrupts)==left_by_fastai(other, interrupts)

class FailsInEvaluation(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()
    def forward(self, x):
        if not self.training: raise ZeroDivisionError('model failed')
        return self.net(x)

@pytest.mark.law(6)
@pytest.mark.parametrize('cls', by_path(filter(does_score, methods())), ids=case_id)
def test_a_look_that_fails_leaves_no_trace(cls):
    learn = table_learner(cbs=[at_once(cls)])
    learn.model = FailsInEvaluation()
    learn._do_epoch_validate = lambda *args: None
    before = state_of(learn)
    with pytest.raises(ZeroDivisionError),learn.no_bar(),learn.no_logging(): learn.fit(3)
    after = state_of(learn)
    for k in ('flags','grad','autocast','reduction'): assert after[k]==before[k]
    assert after['loss'] is before['loss']

@pytest.mark.law(6)
def test_columns_once_and_gone():
    learn = table_learner(metrics=[accuracy_of]).selective_backprop()
    for _ in range(3): quiet_fit(learn, 2)
    assert list(learn.recorder.metric_names)==['epoch','train_loss','valid_loss','accuracy_of',*COLUMNS,'time']
    assert len(learn.metrics)==1

    quiet_fit(learn.full_batches())
    assert list(learn.recorder.metric_names)==['epoch','train_loss','valid_loss','accuracy_of','time']
    assert len(learn.recorder.values[-1])==3
    assert not learn.selection

def accuracy_of(pred, y): return (pred.argmax(1)==y).float().mean()

# law 7
def evaluated(cls, path):
    learn = table_learner(n=84, metrics=accuracy_of, path=path)
    if cls: learn.add_cb(at_once(cls))
    set_seed(3)
    with learn.no_bar(),learn.no_logging():
        found = learn.lr_find(num_it=12, show_plot=False)
        losses = [float(o) for o in learn.recorder.losses]
        preds = [o.tolist() for o in learn.get_preds(with_loss=True)]
        train_preds = [o.tolist() for o in learn.get_preds(ds_idx=0)]
        values = list(learn.validate())
        state = {k: v.tolist() for k,v in weights(learn).items()}

        learn.fit(2)
        last = list(learn.recorder.values[-1][1:3])
        assert list(learn.validate())==last # no columns of a fit
    return found,losses,preds,train_preds,values,state

plainly = functools.cache(lambda f, *args: f(None, *args))

@pytest.mark.law(7)
@pytest.mark.parametrize('cls', by_path(ATTACHED), ids=case_id)
def test_evaluation_is_unchanged(cls, tmp_path_factory):
    path = tmp_path_factory.getbasetemp()
    assert plainly(evaluated, path)==evaluated(cls, path)

@pytest.mark.law(7)
def test_show_results_is_unchanged():
    def shown(cb):
        learn,calls = image_learner(),[]
        def note(b, out, **kwargs): calls.append((b[0].tolist(), [str(o) for o in out]))
        if cb: learn.add_cb(cb)
        learn.dls.valid.new = lambda **kwargs: learn.dls.valid # its own copy would not have the spy below
        learn.dls.valid.show_results = note
        set_seed(1)
        with learn.no_bar(): learn.show_results()
        return calls
    assert shown(None)==shown(TopLossCallback(warmup=0))!=[]

@pytest.mark.parametrize('event', ['after_train', 'before_validate', 'after_batch'])
def test_validate_after_an_interrupted_validation(event):
    class Stop(Callback):
        def __call__(self, name):
            if name!=event or self.epoch!=1: return
            if name!='after_batch' or not self.training: raise KeyboardInterrupt
    learn = table_learner(metrics=accuracy_of).top_loss(warmup=0)
    with pytest.raises(KeyboardInterrupt),learn.no_bar(),learn.no_logging(): learn.fit(2, cbs=Stop())
    with learn.no_bar(): assert len(learn.validate())==2

def test_fit_after_an_interrupted_lr_find_selects():
    learn = table_learner(cbs=TopLossCallback(keep=.25, warmup=0))
    class Stop(Callback):
        def after_batch(self): raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt),learn.no_bar(),learn.no_logging():
        learn.fit(1, cbs=[LRFinder(num_it=6), Stop()])
    learn.remove_cbs([cb for cb in learn.cbs if isinstance(cb, (LRFinder, Stop))])
    quiet_fit(learn, 1)
    assert len(learn.selection.stats)
    assert (learn.selection.stats.query('seen==16').kept==4).all()

WAYS = [dict(gather=True, scorer=mlp()), dict(passes=1), {}] # what makes all parts of a selection

def with_all_parts(cls):
    "A method's callbacks that take what they can"
    if cls is WatchItemsCallback: return [cls(valid=True)]
    found = []
    for way in WAYS:
        try: found.append(at_once(cls, track_items=True, interrupt=3, start=.01, **way))
        except (TypeError,ValueError): pass # that way is none of its own
    return found

@pytest.mark.law(6)
@pytest.mark.parametrize('cls', by_path(ATTACHED), ids=case_id)
def test_a_selection_that_was_taken_off_keeps_no_learner_alive(cls):
    for cb in with_all_parts(cls):
        learn = quiet_fit(table_learner(n=84, cbs=cb))
        learn.full_batches()
        learner,model = weakref.ref(learn),weakref.ref(learn.model)
        del learn
        gc.collect()
        assert learner() is None and model() is None
        assert cb.memory is not None
