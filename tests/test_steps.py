"What a step does: one pass, no waiting for the device, steady shapes"
import itertools
import functools, inspect

import pytest, torch
from fastai.callback.core import Callback
from fastai.callback.mixup import CutMix
from fastai.callback.training import GradientAccumulation
from helpers import *
from selback.callback.loaders import ChosenBefore, ChosenWithin
from selback.core.batches import Batch as Items, UntilFull, join, take
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

def name_of(v): return v.__name__.removesuffix('Callback') if isinstance(v, type) else str(v)

def in_one_pass(cls):
    "Can a method choose in the training pass?"
    try: return 'passes' in inspect.signature(cls).parameters and bool(cls(passes=1))
    except ValueError: return False

ONE_PASS = [cls for cls in methods() if in_one_pass(cls)]

# one pass
def test_most_methods_can_choose_in_one_pass():
    assert {BatchLossFilterCallback,SelectiveBackpropCallback,StaleLossCallback}<=set(ONE_PASS)
    assert {TopLossCallback,RandomSubsetCallback}<=set(ONE_PASS)

MIXES = dict(
    plain=lambda: [],
    mixup=lambda: [MixUp(.4)],
    amp=lambda: [CPUMixedPrecision()],
    accumulation=lambda: [GradientAccumulation(24)],
    amp_mixup=lambda: [CPUMixedPrecision(), MixUp(.4)])

def trained(mix, *cbs):
    learn = quiet_fit(table_learner(cbs=[*MIXES[mix](), *cbs]), 2)
    return weights(learn),[v[:2] for v in learn.recorder.values],[float(o) for o in learn.recorder.losses]

@functools.cache
def plainly_trained(mix): return trained(mix)

def cases_that_keep_all():
    "A method's first setting with each mix, its others with one"
    for cls in ONE_PASS:
        first,*others = cls.keeps_all
        for mix in MIXES: yield cls,first,mix
        for kwargs in others: yield cls,kwargs,'amp_mixup'

@pytest.mark.law(1)
@pytest.mark.parametrize('cls,kwargs,mix', by_path(cases_that_keep_all()), ids=name_of)
def test_keeping_all_in_one_pass_is_plain_training(cls, kwargs, mix):
    ours,*recorded = trained(mix, cls(warmup=0, passes=1, **kwargs))
    plain,*plainly_recorded = plainly_trained(mix)
    assert same(ours, plain)
    assert recorded==plainly_recorded

class ChosenOnes(Callback):
    "Behind the selection: are the gradients those of the items that the training pass chose, as if these were alone?"
    order,run_valid = 60,False
    def __init__(self, reduction): self.reduction = reduction

    def before_fit(self): self.shares = []

    def before_batch(self):
        self.whole = self.x.clone(),self.y.clone()
        self.learn.selection.choice = None

    def after_backward(self):
        if self.learn.selection.choice is None: return # an epoch that scores nothing
        batch,chosen = self.learn.selection.choice
        x,y = self.whole
        for whole in (self.x, batch.xb[0]): assert torch.equal(whole, x)
        for whole in (self.y, batch.yb[0]): assert torch.equal(whole, y)
        assert len(self.pred)==len(x)
        self.check_gradients(x[chosen.rows], y[chosen.rows], chosen.weight)
        self.check_weights(len(x), *chosen)
        self.shares.append(len(chosen.rows)/len(x))

    def check_gradients(self, x, y, weight):
        losses = F.cross_entropy(self.model(x), y, reduction='none')
        loss = getattr(losses if weight is None else losses*weight, self.reduction)()
        params = list(self.model.parameters())
        for p,wanted in zip(params, torch.autograd.grad(loss, params)): torch.testing.assert_close(p.grad, wanted)

    def check_weights(self, n, rows, weight):
        "n/chosen for a mean over all of the batch, 1 for a sum; 0 for the others"
        share = n/len(rows) if self.reduction=='mean' else 1.
        wanted = torch.zeros(n)
        wanted[rows] = share if weight is None else share*weight
        got = self.learn.selection.item_weight
        torch.testing.assert_close(torch.ones(n) if got is None else got, wanted)

@pytest.mark.parametrize('reduction', ['mean','sum'])
@pytest.mark.parametrize('cls', by_path(ONE_PASS), ids=name_of)
def test_gradients_in_one_pass_are_those_of_the_chosen_items(cls, reduction):
    "For a model without BatchNorm, with the weights of the method; the batch itself stays whole"
    class Watch(cls):
        def note(self, batch, reads, losses, chosen):
            self.choice = batch,chosen
            return super().note(batch, reads, losses, chosen)

    cbs = [Watch(passes=1, warmup=0, seed=0), ChosenOnes(reduction)]
    learn = table_learner(n=32+96, cbs=cbs, loss_func=CrossEntropyLossFlat(reduction=reduction))
    learn.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    quiet_fit(learn, 2)
    assert len(learn.chosen_ones.shares)>=6
    assert min(learn.chosen_ones.shares)<1
    assert (learn.selection.stats.query('step>=0').trained>0).all()

def losses_of_mix(pred, y, mixer):
    "Of each item, where MixUp or CutMix may have mixed others in"
    def losses_of(y): return F.cross_entropy(pred, y.as_subclass(torch.Tensor), reduction='none')
    losses = losses_of(y)
    return mixer.lam*losses+(1-mixer.lam)*losses_of(mixer.yb1[0]) if mixer else losses

@pytest.mark.parametrize('mix', ['plain', 'mixup', 'cutmix'])
def test_one_pass_trains_the_hardest_of_the_training_forward(mix):
    mixer = dict(plain=None, mixup=MixUp(.4), cutmix=CutMix(1.))[mix]
    class Ahead(Callback):
        "Takes the gradients of the hardest half, of the pass that trains"
        order,run_valid,n = BatchSelection.order-1,False,0
        def after_pred(self):
            losses = losses_of_mix(self.pred, self.y, mixer)
            hardest,self.params = losses.topk(len(losses)//2).values,list(self.model.parameters())
            self.wanted = torch.autograd.grad(hardest.mean(), self.params, retain_graph=True)
            self.mean,self.xb = losses.detach().mean(),self.learn.xb
    class Behind(Callback):
        order,run_valid = 60,False
        def after_loss(self):
            ahead = self.learn.ahead
            assert self.learn.xb is ahead.xb # whole
            assert len(self.y)==len(self.x)==len(self.pred)
            torch.testing.assert_close(self.loss.as_subclass(torch.Tensor).detach(), ahead.mean)
        def after_backward(self):
            ahead = self.learn.ahead
            ahead.n += 1
            for p,wanted in zip(ahead.params, ahead.wanted): torch.testing.assert_close(p.grad, wanted)

    cbs = [*([mixer] if mixer else []), TopLossCallback(.5, passes=1, warmup=0), Ahead(), Behind()]
    learn = quiet_fit(image_learner(n=16+80, cbs=cbs), 2)
    assert learn.ahead.n==20

def test_one_pass_looks_no_second_time_and_enters_no_autocast_again():
    class Once(torch.autocast):
        def __enter__(self):
            assert not torch.is_autocast_enabled('cpu')
            return super().__enter__()
    class EntersOnce(CPUMixedPrecision):
        def before_fit(self):
            super().before_fit()
            self.autocast = Once('cpu', dtype=torch.bfloat16)

    learn = table_learner(cbs=[EntersOnce(), TopLossCallback(.5, passes=1, warmup=0)])
    forwards = []
    learn.model.register_forward_pre_hook(lambda m,args: forwards.append(m.training))
    quiet_fit(learn, 2)

    stats = learn.selection.stats
    assert forwards.count(True)==len(stats)
    assert not torch.is_autocast_enabled('cpu')
    assert (stats.trained%8==0)[stats.seen==16].all()

def test_nothing_chosen_in_one_pass_is_a_step_without_weight():
    turns = itertools.count()
    def now_and_then(scores): return Chosen(torch.arange(0 if next(turns)%2 else 4))
    class Grads(Callback):
        order,run_valid = 60,False
        def before_fit(self): self.norms = []
        def after_backward(self): self.norms.append(sum(float(p.grad.abs().sum()) for p in self.model.parameters()))

    cb = BatchSelection(now_and_then, passes=1, warmup=0)
    learn = quiet_fit(table_learner(cbs=[cb, Grads(), CPUMixedPrecision()]), 1)
    norms = learn.grads.norms
    assert [n==0 for n in norms]==[bool(i%2) for i in range(len(norms))]
    assert not torch.is_autocast_enabled('cpu')
    assert learn.selection.stats.kept.tolist()[:4]==[4,0,4,0]

# no waiting
class NoWaiting(TorchDispatchMode):
    "Counts what makes the host wait for the device, or copies between them"
    def __init__(self):
        super().__init__()
        self.seen = []
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket._qualified_op_name
        if name in WAITS or is_masked(name, args) or is_copied_elsewhere(name, args, kwargs): self.seen.append(name)
        return func(*args, **kwargs)

WAITS = {'aten::_local_scalar_dense','aten::nonzero','aten::is_nonzero','aten::equal'}

def is_masked(name, args):
    "Whether rows are taken by a mask, whose count the host must know"
    if not name.startswith(('aten::index', 'aten::masked_select')): return False
    indices = args[1] if len(args)>1 else []
    if not isinstance(indices, (tuple,list)): indices = [indices]
    return any(isinstance(o, torch.Tensor) and o.dtype==torch.bool for o in indices)

def is_copied_elsewhere(name, args, kwargs):
    "Whether a tensor goes from one device to another"
    device = kwargs.get('device')
    if name!='aten::_to_copy' or device is None: return False
    return torch.device(device)!=args[0].device

FIXED = dict(
    top_loss=lambda: TopLossCallback(.4, warmup=0),
    tails=lambda: TopLossCallback(.3, also_bottom=.2, warmup=0),
    random=lambda: RandomSubsetCallback(.4, warmup=0),
    composer=lambda: SelectiveBackpropCallback(keep=.4, gather=False, warmup=0),
    one_pass=lambda: TopLossCallback(.4, warmup=0, passes=1),
    entropy=lambda: TopLossCallback(.4, score='entropy', warmup=0),
    bound=lambda: TopLossCallback(.4, score='grad_bound', warmup=0),
    gathered=lambda: TopLossCallback(.4, gather=True, warmup=0),
    pooled=lambda: pooled(2, TopLossCallback(.4, gather=True, warmup=0)),
    info_batch=lambda: InfoBatchCallback(warmup=0),
    before=lambda: RandomSubsetCallback(.4, before_loading=True, warmup=0))
COUNTED = dict(
    batch_loss_filter=lambda: BatchLossFilterCallback(warmup=0),
    selective_backprop=lambda: SelectiveBackpropCallback(warmup=0),
    importance=lambda: ImportanceSamplingCallback(warmup=0, tau=.01))
KNOWN = {type(make()) for make in (FIXED | COUNTED).values()}
NEW = {one_liner(c): functools.partial(c, warmup=0) for c in methods() if c not in KNOWN}

class Around:
    """Enters a context around all that the selection does for a step: when its loader makes it, and at each event.
    It is left while the user's own loader reads a batch"""
    events = 'before_batch','after_pred','after_loss','before_step','after_step','after_batch'
    def __init__(self, context, monkeypatch):
        self.context = context
        self.mode = None # the context that was entered
        self.n_made = 0 # steps
        self.steps = []
        call,make,read = Callback.__call__,ChosenWithin.handed_out,BatchSelection.reads
        def watched(cb, event):
            selection = cb.learn.selection
            if cb is selection and event=='before_batch' and cb.learn.training: self.step_of(cb)
            is_ours = cb is selection or cb in selection.companions
            is_watched = is_ours and cb.learn.training and event in self.events and len(self.steps)>=3
            return self.watch(call, cb, event) if is_watched else call(cb, event)
        def watched_loader(loader):
            made = make(loader)
            while True:
                n_read,self.n_made = loader.n_read,self.n_made+1
                self.made = dict(found=[])
                step = self.watch(next, made, None) if self.n_made>=3 else next(made, None) # others are tried out
                self.made['read'] = loader.n_read-n_read
                if step is None: break
                yield step
            self.steps[-1]['found'] += self.made['found']
        monkeypatch.setattr(Callback, '__call__', watched)
        def unwatched_reads(selection, loader):
            batches = read(selection, loader)
            while (batch := self.unwatched(next, batches, None)) is not None: yield batch
        monkeypatch.setattr(ChosenWithin, 'handed_out', watched_loader)
        monkeypatch.setattr(BatchSelection, 'reads', unwatched_reads)

    def step_of(self, cb):
        "Another step begins, which its loader may have been watched to make"
        is_read_before = type(cb.loader) is ChosenBefore
        self.made = dict(found=[], read=1) if is_read_before else self.made
        self.steps.append(self.made | dict(epoch=cb.epoch))

    def watch(self, call, *args):
        with self.context() as self.mode:
            try: return call(*args)
            finally:
                self.made['found'] += getattr(self.mode, 'seen', [])
                self.mode = None

    def unwatched(self, call, *args):
        mode,self.mode = self.mode,None
        if mode: mode.__exit__(None, None, None)
        try: return call(*args)
        finally:
            if mode: mode.__enter__()
            self.mode = mode

AT_EACH_STEP = FIXED | COUNTED

@pytest.mark.parametrize('name', mostly_slow(AT_EACH_STEP | NEW, *AT_EACH_STEP))
def test_a_step_does_not_wait_for_the_device(name, monkeypatch):
    steps = Around(NoWaiting, monkeypatch).steps
    learn = quiet_fit(table_learner(cbs=(FIXED | COUNTED | NEW)[name](), n=32+160), 3)
    stats = learn.selection.stats
    assert len(steps)>=6
    assert (stats.trained.sum()<stats.seen.sum())==leaves_out(type(learn.selection))
    assert sum(step['read'] for step in steps)>=10

    surplus = 0
    for step,after in zip(steps, [*steps[1:], dict(epoch=None)]):
        is_filled_up = step['epoch']!=after['epoch'] and gathers(learn.selection) # with as many as there are
        choices = 0 if name in FIXED else step['read'] # each counts how many items it chose
        surplus += max(0, len(step['found'])-is_filled_up-choices)
        assert set(step['found'])<={'aten::_local_scalar_dense'}
    assert surplus<=learn.selection.method.weighs # a fit's first weighed step asks whether losses go by rows

class SyncDebug:
    def __enter__(self):
        torch.cuda.set_sync_debug_mode('error')
        return self
    def __exit__(self, *args): torch.cuda.set_sync_debug_mode('default')

@on_a_gpu
@pytest.mark.parametrize('name', [name for name in FIXED | NEW if name not in ('gathered','pooled','stale_loss')])
def test_a_step_does_not_synchronize_a_gpu(name, monkeypatch):
    Around(SyncDebug, monkeypatch)
    learn = table_learner(cbs=(FIXED | NEW)[name](), n=32+160)
    learn.dls.to(torch.device('cuda'))
    stats = quiet_fit(learn, 3).selection.stats
    assert (stats.trained.sum()<stats.seen.sum())==leaves_out(type(learn.selection))
    assert next(learn.model.parameters()).is_cuda

def test_the_counting_of_waits_finds_them():
    with NoWaiting() as mode:
        torch.arange(3).sum().item()
        torch.arange(3)[torch.arange(3)>1]
    assert mode.seen==['aten::_local_scalar_dense', 'aten::index']

# steady shapes
def test_channels_last_stays():
    x = torch.randn(8, 3, 5, 5).contiguous(memory_format=torch.channels_last)
    def is_last(t): return t.is_contiguous(memory_format=torch.channels_last)
    idx = torch.tensor([0,3,7])
    kept = take((x, torch.arange(8)), idx)[0]
    torch.testing.assert_close(kept, x[idx])
    assert is_last(kept)
    assert is_last(join(kept, kept))
    assert is_last(take(x, slice(2, 4)))

    waiting = UntilFull(8)
    for _ in range(3): waiting.add(Items((kept,), (idx,)), Chosen(torch.arange(len(idx))))
    assert is_last(waiting.pop().xb[0])

@pytest.mark.slow
def test_a_compiled_model_meets_few_sizes():
    from torch._dynamo.testing import CompileCounter
    def compiled(cb):
        torch._dynamo.reset()
        counter = CompileCounter()
        learn = table_learner(bs=32, n=32+640, drop_last=True, cbs=cb)
        learn.model = torch.compile(learn.model, backend=counter, dynamic=False)
        learn._do_epoch_validate = lambda *args: None
        quiet_fit(learn, 2)
        torch._dynamo.reset()
        return counter.frame_count

    # in training and in evaluation mode, and the half batch that the door looks at
    assert compiled(TopLossCallback(.3, warmup=0, gather=True))<=3
    assert compiled(BatchLossFilterCallback(.6, warmup=0))>2 # of any size

# attached at any time
def attached_at(event):
    class Attaches(Callback):
        order,run_valid = 60,False
        def __call__(self, name):
            if name==event and not self.learn.selection: self.learn.top_loss(keep=.5, warmup=0)
            super().__call__(name)
    return quiet_fit(table_learner(n=32+160, cbs=Attaches()), 2)

@pytest.mark.parametrize('event', ['before_epoch','after_train'])
def test_a_selection_may_be_attached_between_epochs(event):
    assert (attached_at(event).selection.stats.query('epoch==1').kept==8).all()

@pytest.mark.parametrize('event', ['before_train','before_batch','after_loss','after_batch'])
def test_a_selection_that_is_attached_within_an_epoch_is_refused(event):
    with pytest.raises(ValueError, match='came or went within an epoch'): attached_at(event)
