"What a look would leave behind is put back, or refused; methods that look at nothing train as without them"
import itertools
from collections import deque
from functools import partial

import numpy as np, pandas as pd, pytest, torch
from helpers import *
from torch.nn import functional as F

FOUND = [] # what models of this file have computed
N_CALLS = 0

class Base(nn.Module):
    "Features of each pass wait somewhere, until a training step takes them for its loss"
    def __init__(self):
        super().__init__()
        self.body,self.head = nn.Linear(4, 8),nn.Linear(8, 3)
        self.begin()
    def begin(self): self.found = []
    def keep(self, h): self.found.append(h)
    def take(self): return [self.found.pop() for _ in range(len(self.found))]
    def forward(self, x):
        h = self.body(x).relu()
        self.keep(h)
        return self.head(h)

class Holds(Base):
    "What it holds is changed by each pass"
    def __init__(self, make, change):
        self.make,self.change = make,change
        super().__init__()
    def begin(self): self.held = self.make()
    def keep(self, h): self.change(self.held, h.detach())

class Store:
    "Somebody's object"
    n = 0

class Slotted:
    __slots__ = 'n',
    def __init__(self): self.n = 0

def append(held, h): held.append(h)
def count(held, h): held.n += 1
def count_last(held, h): held[-1,-1] += 1
def average(held, h): held.mul_(.5).add_(h.mean(0))
def max_norm(held, h): held((9*h[:,0].sigmoid()).long().clamp(max=8)) # shortens rows where they are looked up
def longer(held, h): held.loc[len(held)] = [1]
def count_in_list(held, h): held[-1] += 1

HELD = dict(
    list=(list, append),
    deque=(lambda: deque(maxlen=4), append),
    dict=(dict, lambda held, h: held.setdefault('all', []).append(h)),
    tuple=(lambda: ([],), lambda held, h: held[0].append(h)),
    nested=(lambda: [[]], lambda held, h: held[0].append(h)),
    long_list=(lambda: [0]*5000, count_in_list),
    bytes=(bytearray, lambda held, h: held.extend(b'1')),
    object=(Store, count),
    slots=(Slotted, count),
    iterator=(itertools.count, lambda held, h: next(held)),
    hidden_model=(lambda: [nn.BatchNorm1d(8)], lambda held, h: held[0](h)),
    tensor=(lambda: torch.zeros(8), average),
    large_tensor=(lambda: torch.zeros(1000, 100), count_last),
    untrained_parameter=(lambda: nn.Parameter(torch.zeros(8), requires_grad=False), average),
    max_norm=(lambda: nn.Embedding(9, 8, max_norm=.1), max_norm),
    large_array=(lambda: np.zeros((200, 500), dtype=np.float32), count_last),
    table=(lambda: pd.DataFrame(dict(n=[0])), longer),
    numpy=(lambda: np.random.default_rng(0), lambda held, h: held.random()),
    old_numpy=(lambda: np.random.RandomState(0), lambda held, h: held.rand()))

class Draws(Base):
    "Random numbers of its own"
    def begin(self): self.found,self.generator = [],torch.Generator().manual_seed(0)
    def keep(self, h): pass
    def forward(self, x): return super().forward(x)+torch.rand(3, generator=self.generator)

class InGlobal(Base):
    def begin(self): FOUND.clear()
    def keep(self, h): FOUND.append(h)

class InClass(Base):
    shared = []
    def keep(self, h): self.shared.append(h)

class Counts(Base):
    "A counter that functions share"
    def keep(self, h):
        global N_CALLS
        N_CALLS += 1

class ThroughData(Base):
    def keep(self, h): self.head.bias.data.add_(.01)

class ByHook(Base):
    "A hook appends to a list that it closes over"
    def begin(self):
        kept = []
        self.body.register_forward_hook(lambda module, inputs, output: kept.append(output))
    def keep(self, h): pass

class OnLayer(ByHook):
    "A hook appends to a list that a layer of PyTorch was given"
    def begin(self):
        self.body.kept = []
        self.body.register_forward_hook(lambda module, inputs, output: module.kept.append(output))

class ByNonlocal(ByHook):
    "A hook counts in a variable of the function that made it"
    def begin(self):
        n = 0
        def hook(module, inputs, output):
            nonlocal n
            n += 1
        self.body.register_forward_hook(hook)

class ByPartial(ByHook):
    def begin(self):
        def hook(found, module, inputs, output): found.append(output)
        self.body.register_forward_hook(partial(hook, []))

class LosesHook(ByHook):
    "A hook that takes itself off at its first call"
    def begin(self): self.handle = self.body.register_forward_hook(lambda *args: self.handle.remove())

OTHERS = Base,Draws,InGlobal,InClass,Counts,ThroughData,ByHook,OnLayer,ByNonlocal,ByPartial,LosesHook
LEAVE = {name: partial(Holds, *kind) for name,kind in HELD.items()} | {cls.__name__: cls for cls in OTHERS}

class Last(Base):
    "What was computed last, and how often"
    def begin(self): self.last,self.n = None,0
    def keep(self, h): self.last,self.n = h,self.n+1
    def take(self): return [self.last*(1+self.n%3)]

class Averages(Base):
    "A buffer that moves in evaluation, too"
    def begin(self): self.register_buffer('mean', torch.zeros(8))
    def keep(self, h): self.mean.mul_(.5).add_(h.detach().mean(0))
    def take(self): return [self.mean[None].clone()]

class HookCounts(Base):
    "A hook that counts on a layer of PyTorch, and moves a buffer of it"
    def begin(self):
        self.body.n = 0
        self.body.register_buffer('mean', torch.zeros(8))
        def hook(m, inputs, output):
            m.n += 1
            m.mean.lerp_(output.detach().mean(0), .5)
        self.body.register_forward_hook(hook)
    def keep(self, h): pass
    def take(self): return [self.body.mean[None]*self.body.n]

class OtherForward(Base):
    "A layer of PyTorch with a forward of its own"
    def begin(self):
        self.body.n = 0
        def forward(x):
            self.body.n += 1
            return F.linear(x, self.body.weight)*(1+self.body.n%3)
        self.body.forward = forward
    def keep(self, h): pass
    def take(self): return []

PUT_BACK = [Last, Averages, HookCounts, OtherForward]

class ExtraLoss(Callback):
    "Adds to the loss what the model's features amount to"
    order = 60
    def after_loss(self):
        found = self.learn.model.take()
        if not (found and self.training): return
        self.learn.loss_grad = self.loss_grad+.1*sum(h.square().mean() for h in found)
        self.learn.loss = self.learn.loss_grad.clone()

def learner(make, *cbs):
    set_seed(0)
    x,y = class_data(80)
    dls = DataLoaders(*[TfmdDL([*zip(x, y)], bs=16, num_workers=0) for _ in range(2)])
    return learner_on(dls, make(), cbs=cbs, lr=1e-2)

def with_extra(make, *cbs): return learner(make, *cbs, ExtraLoss())

LOOK = dict(
    top_loss=lambda **options: TopLossCallback(1., warmup=0, **options),
    selective_backprop=lambda **options: SelectiveBackpropCallback(keep=1., gather=False, warmup=0, **options),
    batch_loss_filter=lambda **options: BatchLossFilterCallback(1., warmup=0, **options),
    stale_loss=lambda **options: StaleLossCallback(beta=0, n=2, warmup=0, **options))
LOOK_AT_NOTHING = dict(
    favor_hard=lambda **options: FavorHardCallback(beta=0, warmup=0, **options),
    watch_items=lambda **options: WatchItemsCallback(**options),
    random_subset=lambda **options: RandomSubsetCallback(1., warmup=0, **options))
METHODS = LOOK | LOOK_AT_NOTHING

def check_plain(make_learner, cb):
    "Training is as without a selection"
    plain,ours = (weights(quiet_fit(make_learner(*cbs), 2)) for cbs in ([], [cb]))
    assert same(ours, plain)

@pytest.mark.parametrize('method', mostly_slow(LOOK, 'top_loss'))
@pytest.mark.parametrize('make', LEAVE.values(), ids=LEAVE)
def test_what_a_look_would_leave_behind_is_refused(make, method):
    learn = learner(make, LOOK[method]())
    with pytest.raises(ValueError, match='a second look at one batch: got a change of .*such as favor_hard'):
        quiet_fit(learn, 1)
    assert not learn.opt.state_dict()['state'] or not learn.train_iter

@pytest.mark.parametrize('make,method', [
    *[(make, method) for make in (Base, *PUT_BACK) for method in LOOK_AT_NOTHING],
    *[(make, 'top_loss') for make in PUT_BACK],
    *[slow(make, method) for make in PUT_BACK for method in LOOK if method!='top_loss']])
def test_training_is_plain_by_methods_that_look_at_nothing_and_where_all_is_put_back(make, method):
    check_plain(partial(with_extra, make), METHODS[method]())

# Losses
class ByExpert(nn.Module):
    "A loss that keeps a list of losses, which it weighs by how they went"
    def __init__(self):
        super().__init__()
        self.history = [1.]
    def forward(self, pred, y):
        loss = F.cross_entropy(pred, y)
        self.history.append(float(loss.detach()))
        return loss*sum(self.history[-4:-1])/3

class OfObject:
    "A loss that is a method, and counts"
    def __init__(self): self.n = 0
    def loss(self, pred, y):
        self.n += 1
        return F.cross_entropy(pred, y)*(1+self.n%3)

def learner_by(make_loss, *cbs):
    FOUND.clear()
    learn = learner(mlp, *cbs)
    learn.loss_func = make_loss()
    return learn

@pytest.mark.parametrize('method', ['top_loss',*LOOK_AT_NOTHING])
@pytest.mark.parametrize('make_loss', [ByExpert, lambda: OfObject().loss], ids=['module','method'])
def test_keeping_all_is_plain_training_with_a_loss_that_remembers(make_loss, method):
    check_plain(partial(learner_by, make_loss), METHODS[method]())

def by_global(pred, y):
    FOUND.append(1)
    return F.cross_entropy(pred, y)*(1+len(FOUND)%3)

def by_closure():
    n = 0
    def loss(pred, y):
        nonlocal n
        n += 1
        return F.cross_entropy(pred, y)
    return loss

class Deep(nn.Module):
    "Lists in a list"
    def __init__(self):
        super().__init__()
        self.lists = [[]]
    def forward(self, pred, y):
        self.lists[0].append(1)
        return F.cross_entropy(pred, y)

class Draw(nn.Module):
    "Random numbers of its own"
    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(0)
    def forward(self, pred, y): return F.cross_entropy(pred, y)*float(self.rng.random())

LOSSES = dict(by_global=lambda: by_global, by_closure=by_closure, deep=Deep, draw=Draw)

@pytest.mark.parametrize('method', ['top_loss','favor_hard','watch_items'])
@pytest.mark.parametrize('name', LOSSES)
def test_a_loss_that_leaves_more_behind_is_refused_and_the_remedy_trains_as_plain(name, method):
    made,make = partial(learner_by, LOSSES[name]),METHODS[method]
    with pytest.raises(ValueError, match='a second look at one batch.*Pass item_loss='): quiet_fit(made(make()), 1)
    check_plain(made, make(item_loss=partial(F.cross_entropy, reduction='none')))
