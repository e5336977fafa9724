"What a step does: one pass, no waiting for the device, steady shapes"
import functools, inspect

import pytest, torch
from fastai.callback.core import Callback
from fastai.callback.mixup import CutMix
from fastai.callback.training import GradientAccumulation
from helpers import *
from selback.core.batches import ItemPool, Items, join, take
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
    assert {BatchLossFilterCallback,SelectiveBackpropCallback,StaleLossCallback,TopLossCallback,RandomSubsetCallback}<=set(ONE_PASS)

MIXES = dict(plain=lambda: [], mixup=lambda: [MixUp(.4)], amp=lambda: [CPUMixedPrecision()], accumulation=lambda: [GradientAccumulation(24)], amp_mixup=lambda: [CPUMixedPrecision(), MixUp(.4)])

def trained(mix, *cbs):
    learn = quiet_fit(table_learner(cbs=[*MIXES[mix](), *cbs]), 2)
    return weights(learn),[v[:2] for v in learn.recorder.values],[float(o) for o in learn.recorder.losses]

@functools.cache
def plainly_trained(mix): return trained(mix)

@pytest.mark.law(1)
@pytest.mark.parametrize('cls,kwargs,mix', [(c,k,mix) for c in ONE_PASS for i,k in enumerate(c.keeps_all) for mix in (MIXES if not i else ['amp_mixup'])], ids=name_of)
def test_keeping_all_in_one_pass_is_plain_training(cls, kwargs, mix):
    ours,plain = trained(mix, cls(warmup=0, passes=1, **kwargs)),plainly_trained(mix)
    assert same(ours[0], plain[0]) and ours[1:]==plain[1:]

@pytest.mark.parametrize('cls', ONE_PASS, ids=name_of)
def test_gradients_in_one_pass_are_those_of_the_chosen_items(cls):
    "As if these alone had trained, for a model without BatchNorm; with the weights of the method"
    class Watch(cls):
        def choose_from(self, *args):
            self.choice = args[1],super().choose_from(*args)
            return self.choice[1]
    class Grads(Callback):
        order,run_valid = 60,False
        def __init__(self): self.seen,self.shares = 0,[]
        def before_batch(self): self.whole,self.learn.selection.choice = (self.x.clone(),self.y.clone()),None
        def after_backward(self):
            cb = self.learn.selection
            if cb.choice is None: return # an epoch that scores nothing
            batch,chosen = cb.choice
            x,y = batch.xb[0][chosen.rows],batch.yb[0][chosen.rows]
            assert torch.equal(batch.xb[0], self.whole[0]) and torch.equal(self.y, y) and len(self.pred)==len(self.y)==len(self.x)
            w = torch.ones(len(y)) if chosen.weight is None else chosen.weight
            loss = (F.cross_entropy(self.model(x), y, reduction='none')*w).mean()
            for p,wanted in zip(self.model.parameters(), torch.autograd.grad(loss, list(self.model.parameters()))): torch.testing.assert_close(p.grad, wanted)
            self.shares.append(len(y)/len(self.whole[1]))
    learn = table_learner(n=32+96, cbs=[Watch(passes=1, warmup=0, seed=0), Grads()])
    learn.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    quiet_fit(learn, 2)
    assert len(learn.grads.shares)>=6 and min(learn.grads.shares)<1 and (learn.selection.stats.query('step>=0').trained>0).all()

@pytest.mark.parametrize('mix', ['plain', 'mixup', 'cutmix'])
def test_one_pass_trains_the_hardest_of_the_training_forward(mix):
    looks = []
    class Ahead(Callback):
        order,run_valid = SelectionCallback.order-1,False
        def after_pred(self):
            pred,y,mixer = self.pred.detach(),self.y.as_subclass(torch.Tensor),next((cb for cb in self.learn.cbs if isinstance(cb, (MixUp,CutMix))), None)
            losses = F.cross_entropy(pred, y, reduction='none')
            if mixer: losses = mixer.lam*losses+(1-mixer.lam)*F.cross_entropy(pred, mixer.yb1[0].as_subclass(torch.Tensor), reduction='none')
            looks.append(losses)
    class Behind(Callback):
        order,run_valid = 60,False
        def after_loss(self):
            hardest = looks[-1].sort(descending=True).values[:len(looks[-1])//2]
            assert len(self.y)==len(self.x)==len(self.pred)==len(hardest)
            torch.testing.assert_close(self.loss.as_subclass(torch.Tensor).detach(), hardest.mean())
    mixer = dict(plain=[], mixup=[MixUp(.4)], cutmix=[CutMix(1.)])[mix]
    quiet_fit(image_learner(n=16+80, cbs=[*mixer, TopLossCallback(.5, passes=1, warmup=0), Ahead(), Behind()]), 2)
    assert len(looks)==20

def test_one_pass_looks_no_second_time_and_enters_no_autocast_again():
    class Counts(CPUMixedPrecision):
        def before_fit(self):
            super().before_fit()
            enter,self.n = self.autocast.__enter__,0
            class Once(type(self.autocast)):
                def __enter__(s): self.n += 1; assert not torch.is_autocast_enabled('cpu'); return super().__enter__()
            self.autocast = Once('cpu', dtype=torch.bfloat16)
    learn = table_learner(cbs=[Counts(), TopLossCallback(.5, passes=1, warmup=0)])
    forwards = []
    learn.model.register_forward_pre_hook(lambda m,args: forwards.append(m.training))
    quiet_fit(learn, 2)
    steps = len(learn.selection.stats)
    assert forwards.count(True)==steps and not torch.is_autocast_enabled('cpu') and (learn.selection.stats.trained%8==0)[learn.selection.stats.seen==16].all()

def test_nothing_chosen_in_one_pass_is_a_step_without_weight():
    class Nothing(SelectionCallback):
        def choose(self, scores): return Chosen(torch.arange(0 if self.iter%2 else 4))
    class Grads(Callback):
        order,run_valid = 60,False
        def after_backward(self): self.learn.norms = [*getattr(self.learn, 'norms', []), sum(float(p.grad.abs().sum()) for p in self.model.parameters())]
    learn = quiet_fit(table_learner(cbs=[Nothing(passes=1, warmup=0), Grads(), CPUMixedPrecision()]), 1)
    assert [n==0 for n in learn.norms]==[bool(i%2) for i in range(len(learn.norms))] and not torch.is_autocast_enabled('cpu')
    assert learn.selection.stats.kept.tolist()[:4]==[4,0,4,0]

# no waiting
class NoWaiting(TorchDispatchMode):
    "Counts what makes the host wait for the device, or copies between them"
    def __init__(self): super().__init__(); self.seen = []
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket._qualified_op_name
        elsewhere = 'device' in (kwargs or {}) and kwargs['device'] is not None and name in ('aten::_to_copy',) and torch.device(kwargs['device'])!=args[0].device
        masks = name.startswith(('aten::index', 'aten::masked_select')) and any(isinstance(o, torch.Tensor) and o.dtype==torch.bool for a in args[1:2] for o in (a if isinstance(a, (tuple,list)) else [a]))
        if masks or name in ('aten::_local_scalar_dense', 'aten::nonzero', 'aten::is_nonzero', 'aten::equal') or elsewhere: self.seen.append(name)
        return func(*args, **(kwargs or {}))

FIXED = dict(top_loss=lambda: TopLossCallback(.4, warmup=0), tails=lambda: TopLossCallback(.3, also_bottom=.2, warmup=0), random=lambda: RandomSubsetCallback(.4, warmup=0),
    composer=lambda: SelectiveBackpropCallback(keep=.4, gather=False, warmup=0), one_pass=lambda: TopLossCallback(.4, warmup=0, passes=1), entropy=lambda: TopLossCallback(.4, score='entropy', warmup=0),
    bound=lambda: TopLossCallback(.4, score='grad_bound', warmup=0), gathered=lambda: TopLossCallback(.4, gather=True, warmup=0), copy=lambda: TopLossCallback(.4, scorer=ModelCopy(), warmup=0),
    pooled=lambda: TopLossCallback(.4, gather=True, presample=2, warmup=0), info_batch=lambda: InfoBatchCallback(warmup=0), before=lambda: RandomSubsetCallback(.4, before_loading=True, warmup=0))
COUNTED = dict(batch_loss_filter=lambda: BatchLossFilterCallback(warmup=0), selective_backprop=lambda: SelectiveBackpropCallback(warmup=0), importance=lambda: ImportanceSamplingCallback(warmup=0, tau=.01))
NEW = {one_liner(c): functools.partial(c, warmup=0) for c in methods() if c not in {type(make()) for make in (FIXED | COUNTED).values()}}

class Around(Callback):
    "Enters a context around each event of the selection within a step"
    events = 'before_batch','after_pred','after_loss','before_step','after_step','after_batch'
    def __init__(self, context, monkeypatch):
        self.context,self.steps,call = context,[],Selection.__call__
        def watched(cb, event):
            if event=='before_batch' and cb.learn.training: self.steps.append(dict(found=[], read=0, epoch=cb.epoch))
            first = len(self.steps)<3 # there something is tried out
            if first or event not in self.events or not cb.learn.training: return call(cb, event)
            read = cb.feed.position if event=='before_batch' else None
            with self.context() as mode:
                try: return call(cb, event)
                finally:
                    self.steps[-1]['found'] += getattr(mode, 'seen', [])
                    if read is not None: self.steps[-1]['read'] = cb.feed.position-read+cb.feed.is_new
        monkeypatch.setattr(Selection, '__call__', watched)

@pytest.mark.parametrize('name', FIXED | COUNTED | NEW)
def test_a_step_does_not_wait_for_the_device(name, monkeypatch):
    steps = Around(NoWaiting, monkeypatch).steps
    learn = quiet_fit(table_learner(cbs=(FIXED | COUNTED | NEW)[name](), n=32+160), 3)
    stats = learn.selection.stats
    assert len(steps)>=6 and (stats.trained.sum()<stats.seen.sum())==leaves_out(type(learn.selection)) and sum(s['read'] for s in steps)>=10
    for s,after in zip(steps, [*steps[1:], dict(epoch=None)]):
        ends = s['epoch']!=after['epoch'] and gathers(learn.selection) # a last batch is filled up with as many as there are
        assert len(s['found'])<=ends+(0 if name in FIXED else s['read']) and set(s['found'])<={'aten::_local_scalar_dense'} # the one number that the count is

class SyncDebug:
    def __enter__(self): torch.cuda.set_sync_debug_mode('error')
    def __exit__(self, *args): torch.cuda.set_sync_debug_mode('default')

@pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU')
@pytest.mark.parametrize('name', [name for name in FIXED if name not in ('gathered','pooled')])
def test_a_step_does_not_synchronize_a_gpu(name, monkeypatch):
    Around(SyncDebug, monkeypatch)
    learn = table_learner(cbs=FIXED[name](), n=32+160)
    learn.dls.to(torch.device('cuda'))
    stats = quiet_fit(learn, 3).selection.stats
    assert stats.trained.sum()<stats.seen.sum() and next(learn.model.parameters()).is_cuda

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
    pool = ItemPool()
    for _ in range(3): pool.add(Items((kept,), (idx,)))
    assert is_last(kept) and is_last(join(kept, kept)) and is_last(pool.pop(8).xb[0]) and is_last(take(x, slice(2, 4)))

def test_batch_sizes_are_few_in_mixed_precision():
    sizes = {}
    for name,cb in dict(gathered=SelectiveBackpropCallback(warmup=0, seed=0), bucketed=BatchLossFilterCallback(.6, warmup=0, multiple_of=32), rounded=BatchLossFilterCallback(.6, warmup=0)).items():
        learn = quiet_fit(table_learner(bs=64, n=32+640, drop_last=True, cbs=[CPUMixedPrecision(), cb]), 2)
        sizes[name] = [rows.trained[rows.trained>0].tolist() for _,rows in learn.selection.stats.groupby('epoch')]
    assert all(set(epoch[:-1])=={64} and 32<epoch[-1]<=64 for epoch in sizes['gathered']) # shorter only where nothing is left to fill it up
    assert set(sum(sizes['bucketed'], []))<={32,64} and all(n%8==0 for n in sum(sizes['rounded'], []))

def test_a_compiled_model_meets_few_sizes():
    from torch._dynamo.testing import CompileCounter
    compiled = {}
    for name,cb in dict(gathered=TopLossCallback(.3, warmup=0, gather=True), any_size=BatchLossFilterCallback(.6, warmup=0)).items():
        torch._dynamo.reset()
        counter = CompileCounter()
        learn = table_learner(bs=32, n=32+640, drop_last=True, cbs=cb)
        learn.model = torch.compile(learn.model, backend=counter, dynamic=False)
        learn._do_epoch_validate = lambda *args: None
        quiet_fit(learn, 2)
        compiled[name] = counter.frame_count
    torch._dynamo.reset()
    assert compiled['gathered']<=2<compiled['any_size'] # in training and in evaluation mode

# attached at any time
@pytest.mark.parametrize('event', ['before_train','before_batch','after_loss','after_batch','before_epoch','after_train'])
def test_a_selection_may_be_attached_within_an_epoch(event):
    class Attaches(Callback):
        order,run_valid = 60,False
        def __call__(self, name):
            if name==event and not self.learn.selection: self.learn.top_loss(keep=.5, warmup=0)
            super().__call__(name)
    learn = quiet_fit(table_learner(n=32+160, cbs=Attaches()), 2)
    assert (learn.selection.stats.query('epoch==1').kept==8).all()
