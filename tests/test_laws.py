"The laws: nothing is added, lost, left behind or changed"
import contextlib, functools, gc, warnings

import pytest, torch
from fastai.callback.schedule import LRFinder
from fastai.callback.core import Callback, CancelBatchException, CancelEpochException, CancelFitException, CancelTrainException
from fastai.callback.training import BnFreeze, GradientAccumulation
from fastai.interpret import Interpretation
from fastai.learner import Learner
from helpers import *
from selback.learner import base_loss

cases = [(cls,kwargs) for cls in methods() for kwargs in KEEP_ALL[cls.__name__]]
def case_id(v): return v.__name__.removesuffix('Callback') if isinstance(v, type) else ','.join(f'{k}={o}' for k,o in v.items()) if isinstance(v, dict) else v

def test_every_method_has_a_setting_that_keeps_all(): assert set(KEEP_ALL)=={c.__name__ for c in methods()}

# law 1
@pytest.mark.parametrize('kind', LEARNERS)
@pytest.mark.parametrize('cls,kwargs', cases, ids=case_id)
def test_selecting_everything_is_plain_training(cls, kwargs, kind):
    plain = quiet_fit(LEARNERS[kind]())
    learn = LEARNERS[kind]().add_cb(cls(**kwargs, warmup=0))
    quiet_fit(learn)
    assert learn.selection.stats.kept.sum()==learn.selection.stats.seen.sum()>0
    assert same(weights(plain), weights(learn))
    assert [float(o) for o in plain.recorder.losses]==[float(o) for o in learn.recorder.losses]
    assert [v[:2] for v in plain.recorder.values]==[v[:2] for v in learn.recorder.values]
    assert plain.recorder.lrs==learn.recorder.lrs and plain.recorder.iters==learn.recorder.iters

@pytest.mark.parametrize('cls,kwargs', cases, ids=case_id)
def test_selecting_everything_is_plain_training_with_drop_last(cls, kwargs):
    plain,learn = quiet_fit(table_learner(drop_last=True)),quiet_fit(table_learner(drop_last=True, cbs=cls(**kwargs, warmup=0)))
    assert same(weights(plain), weights(learn))

# law 2 lives in test_policies.py; here: the chosen items are the ones that reach the model
class Spy(Callback):
    "Notes, behind the selection, which items train"
    order,run_valid = 20,False
    def before_fit(self): self.batches = []
    def after_loss(self): self.batches.append((self.x[:,-1].long().tolist() if self.x.ndim==2 else None, len(self.x)))

class ScoreSpy(TopLossCallback):
    "Notes what it is given and what it chooses"
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = []
    def choose(self, scores):
        chosen = super().choose(scores)
        self.seen.append((self.x[:,-1].long().tolist(), scores.clone(), chosen.idx.tolist()))
        return chosen

def numbered_learner(seed=0, n=132, bs=16, drop_last=False, cbs=None):
    "The last input column is the item's number, which the model does not look at"
    set_seed(seed)
    x,y = class_data(n)
    x = torch.cat([x, torch.arange(n)[:,None].float()], 1)
    class Head(nn.Module):
        def __init__(self): super().__init__(); self.net = mlp()
        def forward(self, x): return self.net(x[:,:4])
    return Learner(dls_of(x, y, bs=bs, drop_last=drop_last), Head(), loss_func=CrossEntropyLossFlat(), cbs=cbs, lr=1e-2)

def test_exactly_the_hardest_items_train():
    learn = quiet_fit(numbered_learner(n=128+32, cbs=[ScoreSpy(keep=.25, warmup=0), Spy()]), 2)
    assert len(learn.spy.batches)==len(learn.selection.seen)==16
    for (trained,_),(numbers,scores,idx) in zip(learn.spy.batches, learn.selection.seen):
        hardest = scores.argsort(descending=True)[:len(numbers)//4].sort().values.tolist()
        assert idx==hardest and trained==[numbers[i] for i in hardest]

def test_scores_are_the_losses_of_the_model_in_evaluation_mode():
    learn = numbered_learner(cbs=ScoreSpy(keep=.5, warmup=0))
    x,y = learn.dls.train.one_batch()
    learn.model.eval()
    wanted = F.cross_entropy(learn.model(x), y, reduction='none') if (F := torch.nn.functional) else None
    learn.model.train()
    learn.xb,learn.yb = (x,),(y,)
    learn.selection.before_fit()
    torch.testing.assert_close(learn.selection.score_items()[0], wanted.detach())

# law 4
@pytest.mark.parametrize('drop_last', [True, False])
@pytest.mark.parametrize('make', [lambda: SelectiveBackpropCallback(beta=2, seed=1), lambda: SelectiveBackpropCallback(beta=.3, seed=2),
    lambda: SelectiveBackpropCallback(beta=9, seed=3), lambda: BatchLossFilterCallback(.7, gather=True), lambda: RandomSubsetCallback(.4, gather=True, seed=4)])
def test_gathered_batches_are_full_and_nothing_is_lost(make, drop_last):
    cb = make()
    chosen,n_epoch = [],6
    choose = cb.choose
    def note(scores):
        picked = choose(scores)
        chosen.extend((cb.epoch, number) for number in cb.x[:,-1].long()[picked.idx].tolist())
        return picked
    cb.choose = note
    spy = Spy()
    learn = quiet_fit(numbered_learner(n=400, drop_last=drop_last, cbs=[cb, spy]), n_epoch)
    warm = len(learn.dls.train)
    trained = [i for numbers,_ in spy.batches[warm:] for i in numbers]
    waiting = cb.waiting.items[0][0][:,-1].long().tolist() if len(cb.waiting) else []
    assert trained+waiting==[number for _,number in chosen] and cb.report.left==len(waiting)<16
    steps = cb.stats.query('trained>0 and epoch>0')
    full = steps if drop_last else steps[steps.step<warm-1]
    assert (full.trained==16).all() and (steps.trained>=2).all() and (steps.trained<=16).all() and len(full)>0
    assert cb.stats.query('epoch>0').kept.sum()==len(chosen) and steps.trained.sum()==len(trained)
    if not drop_last: assert len(waiting)<=1 or cb.stats.trained.iloc[-1]==16 # a full batch went first, its surplus waits on

@pytest.mark.parametrize('drop_last', [True, False])
@pytest.mark.parametrize('cls', [c for c in methods() if c is not ImportanceSamplingCallback], ids=case_id) # it pools batches by itself
def test_every_method_gathers_full_batches(cls, drop_last):
    learn = quiet_fit(numbered_learner(n=400, drop_last=drop_last, cbs=cls(gather=True, seed=0)), 8)
    stats,report = learn.selection.stats,learn.selection.report
    ends = stats.groupby('epoch').step.transform('max')
    emitted = stats[(stats.trained>0) & (stats.epoch>0)]
    assert stats.kept.sum()==stats.trained.sum()+report.left and report.left<16 and len(emitted)
    assert (emitted[drop_last | (emitted.step<ends[emitted.index])].trained==16).all() and emitted.trained.between(2, 16).all()

def test_one_item_left_over_waits_on():
    class OneOfLast(SelectionCallback):
        def choose(self, scores): return Chosen(torch.arange(1 if self.iter==self.n_iter-1 else 0))
    learn = quiet_fit(numbered_learner(cbs=OneOfLast(warmup=1, gather=True)), 4)
    assert learn.selection.stats.query('trained>0 and epoch>0').trained.tolist()==[2] and len(learn.selection.waiting)==1

def test_waiting_items_go_on_into_the_next_fit_but_not_to_another_loader(capsys):
    learn = quiet_fit(numbered_learner(drop_last=True, cbs=SelectiveBackpropCallback(warmup=0, seed=0)), 3)
    left = len(learn.selection.waiting)
    assert left>0
    quiet_fit(learn, 1)
    assert 'waited' not in capsys.readouterr().out
    learn.dls = dls_of(torch.randn(64, 5), torch.randint(0, 3, (64,)))
    left = len(learn.selection.waiting)
    quiet_fit(learn, 1)
    assert f'{left} items that waited come from another loader' in capsys.readouterr().out

# law 5
class Nosy(nn.Module):
    "Draws random numbers of all kinds in its forward pass, and may fail"
    def __init__(self): super().__init__(); self.net,self.fail = mlp(),False
    def forward(self, x):
        import numpy as np, random
        random.random(); np.random.rand(); torch.rand(1)
        if self.fail: raise RuntimeError('model failed')
        return self.net(x)

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

SETTINGS = dict(plain=lambda: [], mixup=lambda: [MixUp(.4)], amp=lambda: [CpuAmp()], frozen_bn=lambda: [BnFreeze()])

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
    learn = table_learner(cbs=[cls(warmup=0), Before(), After(), *SETTINGS[setting]()], metrics=accuracy_of)
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

def fit_twice(make, cbs, event, ex):
    "What a fit raises and leaves behind that is interrupted, and the next one"
    learn = make()
    learn.add_cbs(cbs)
    raised = []
    try:
        for more in ([Raiser(event, ex, 2 if event in BATCH_EVENTS else 1)], []):
            before = state_of(learn)
            with learn.no_bar(),learn.no_logging(),warnings.catch_warnings():
                warnings.simplefilter('ignore')
                try: learn.fit(2, cbs=more)
                except (Exception,KeyboardInterrupt) as e: raised.append(type(e))
                else: raised.append(None)
            after = state_of(learn)
            raised.append({k: after[k] if k in ('flags','grad','autocast','reduction','run') else after[k] is before[k] for k in ('loss','dls','train','flags','grad','autocast','reduction','logger')})
            raised.append([type(cb) for cb in learn.cbs if not isinstance(cb, (SelectionCallback,SelectionReport))])
        return learn,raised
    finally: # what fastai's mixed precision leaves on after an exception
        while torch.is_autocast_enabled('cpu'):
            torch.set_autocast_enabled('cpu', False)
            torch.autocast_decrement_nesting()

def small_learner(): return table_learner(n=80) # three batches

@functools.cache
def left_by_fastai(other, event, ex): return fit_twice(small_learner, [OTHER_CALLBACKS[other]()] if other else [], event, ex)[1]

OTHER_CALLBACKS = dict(mixup=lambda: MixUp(.4), amp=CpuAmp, accumulation=lambda: GradientAccumulation(8))
INTERRUPTS = [(event, ex) for event in EVENTS for ex in EXCEPTIONS]+[(event, ex) for event in BATCH_EVENTS for ex in OTHERS]

@pytest.mark.parametrize('event,ex', INTERRUPTS, ids=case_id)
@pytest.mark.parametrize('cls', methods(), ids=case_id)
def test_interrupted_fits_leave_what_fastai_leaves(cls, event, ex):
    learn,got = fit_twice(small_learner, [cls(warmup=0)], event, ex)
    assert got==left_by_fastai(None, event, ex)
    if got[3] is not None: return # the next fit fails without us, too
    assert all(cb.run for cb in learn.cbs) and len(learn.recorder.values)==2 and len(learn.recorder.values[-1])==6
    assert list(learn.recorder.metric_names)==['epoch','train_loss','valid_loss','samp_perc','loss_perc','full_loss','saved_secs','time']

@pytest.mark.parametrize('other', OTHER_CALLBACKS)
@pytest.mark.parametrize('event,ex', [(e,x) for e in ('before_batch','after_pred','after_step','after_train') for x in EXCEPTIONS], ids=case_id)
@pytest.mark.parametrize('cls', methods(), ids=case_id)
def test_interrupted_fits_with_other_callbacks_leave_what_fastai_leaves(cls, event, ex, other):
    cbs = [OTHER_CALLBACKS[other](), cls(warmup=0)]
    for ours in (cbs, cbs[::-1])[:1 if other=='amp' else 2]: assert fit_twice(small_learner, ours, event, ex)[1]==left_by_fastai(other, event, ex)

class Fails(nn.Module):
    "Fails in one of its batches of training, or when it is looked through"
    def __init__(self, in_training, at): super().__init__(); self.net,self.in_training,self.at,self.n = mlp(),in_training,at,0
    def forward(self, x):
        if self.training==self.in_training:
            self.n += 1
            if self.n==self.at: raise ZeroDivisionError('model failed')
        return self.net(x)

@pytest.mark.parametrize('amp', [False, True])
@pytest.mark.parametrize('cls', methods(), ids=case_id)
def test_an_exception_in_the_model_leaves_what_fastai_leaves(cls, amp):
    def run(cbs):
        def make():
            learn = table_learner()
            learn.model = Fails(True, 3)
            return learn
        return fit_twice(make, ([CpuAmp()] if amp else [])+cbs, 'none', None)[1]
    assert run([])==run([cls(warmup=0)]) and run([])[0] is ZeroDivisionError
    learn = table_learner(cbs=[cls(warmup=0)]) # and one in the scoring pass leaves the flags, the gradients and autocast
    learn.model = Fails(False, 1 if cls is ImportanceSamplingCallback else 3)
    before = state_of(learn)
    learn._do_epoch_validate = lambda *args: None
    if not learn.selection.scored: return
    with pytest.raises(ZeroDivisionError),learn.no_bar(),learn.no_logging(): learn.fit(3)
    after = state_of(learn)
    assert {k: after[k] for k in ('flags','grad','autocast','reduction')}=={k: before[k] for k in ('flags','grad','autocast','reduction')} and after['loss'] is before['loss']

def test_columns_once_and_gone():
    learn = table_learner(metrics=[accuracy_of]).selective_backprop()
    for _ in range(3): quiet_fit(learn, 2)
    assert list(learn.recorder.metric_names)==['epoch','train_loss','valid_loss','accuracy_of','samp_perc','loss_perc','full_loss','saved_secs','time']
    assert len(learn.metrics)==1
    quiet_fit(learn.full_batches())
    assert list(learn.recorder.metric_names)==['epoch','train_loss','valid_loss','accuracy_of','time'] and len(learn.recorder.values[-1])==3
    assert not hasattr(learn, 'selection_report') and learn.selection is None

def accuracy_of(pred, y): return (pred.argmax(1)==y).float().mean()

# law 7
@pytest.mark.parametrize('cls', methods(), ids=case_id)
def test_evaluation_is_unchanged(cls, tmp_path):
    def results(cb):
        learn = table_learner(metrics=accuracy_of, path=tmp_path)
        if cb: learn.add_cb(cb)
        set_seed(3)
        with learn.no_bar(),learn.no_logging():
            found = learn.lr_find(num_it=12, show_plot=False)
            losses = [float(o) for o in learn.recorder.losses]
            preds = [o.tolist() for o in learn.get_preds(with_loss=True)]
            train_preds = [o.tolist() for o in learn.get_preds(ds_idx=0)]
            values,state = list(learn.validate()),weights(learn)
            learn.fit(2)
            last = list(learn.recorder.values[-1][1:3])
            assert list(learn.validate())==last # no columns of a fit
        return found,losses,preds,train_preds,values,state
    plain,ours = results(None),results(cls(warmup=0))
    assert plain[:5]==ours[:5] and same(plain[5], ours[5])

@pytest.mark.parametrize('cls', methods(), ids=case_id)
def test_evaluation_of_images_is_unchanged(cls, monkeypatch):
    @contextlib.contextmanager
    def set_split_idx(self, i): # test-time augmentation asks for it
        old,self.split_idx = self.split_idx,i
        yield self
        self.split_idx = old
    monkeypatch.setattr(TensorItems, 'set_split_idx', set_split_idx, raising=False)
    def results(cb):
        learn = image_learner()
        if cb: learn.add_cb(cb)
        with learn.no_bar(),learn.no_logging():
            learn.fit(1)
            learn.model.load_state_dict(image_learner().model.state_dict())
            set_seed(3)
            tta = [o.tolist() for o in learn.tta(n=2)]
            interp = Interpretation.from_learner(learn)
            losses,idxs = interp.top_losses(5)
            learn.fit(1)
        return tta,losses.tolist(),idxs.tolist(),len(learn.recorder.values)
    assert results(None)==results(cls(warmup=0))

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
