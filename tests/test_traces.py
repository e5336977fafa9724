"What a look would leave behind is put back, or refused; methods that look at nothing train as without them"
import itertools
from collections import Counter, deque
from functools import partial
from types import SimpleNamespace

import numpy as np, pandas as pd, pytest, torch
from helpers import *
from torch.nn import functional as F

FOUND = [] # what models of this file have computed
N_CALLS = 0

def emptied(found):
    "What a list held"
    held = [*found]
    found.clear()
    return held

class Base(nn.Module):
    "Features of each pass wait somewhere, until a training step takes them for its loss"
    def __init__(self):
        super().__init__()
        self.body,self.head = nn.Linear(4, 8),nn.Linear(8, 3)
        self.begin()
    def begin(self): self.found = []
    def keep(self, h): self.found.append(h)
    def take(self):
        return emptied(self.found)
    def forward(self, x):
        h = self.body(x).relu()
        self.keep(h)
        return self.head(h)

class InDict(Base):
    def begin(self): self.found = {}
    def keep(self, h): self.found.setdefault('all', []).append(h)
    def take(self): return self.found.pop('all', [])

class InDeque(Base):
    def begin(self): self.found = deque(maxlen=4)

class InTuple(Base):
    def begin(self): self.held = ([],)
    def keep(self, h): self.held[0].append(h)
    def take(self):
        return emptied(self.held[0])

class Store:
    "Somebody's object"
    n = 0
    def __init__(self): self.found = []

class InObject(Base):
    def begin(self): self.store = Store()
    def keep(self, h):
        self.store.n += 1
        self.store.found.append(h*self.store.n)
    def take(self):
        found,self.store.found = self.store.found,[]
        return found

class InGlobal(Base):
    def begin(self): FOUND.clear()
    def keep(self, h): FOUND.append(h)
    def take(self):
        return emptied(FOUND)

class InClass(Base):
    shared = []
    def begin(self): self.shared.clear()
    def keep(self, h): self.shared.append(h)
    def take(self):
        return emptied(self.shared)

class Counts(Base):
    "A counter that functions share"
    def keep(self, h):
        global N_CALLS
        N_CALLS += 1
        self.found.append(h*(1+N_CALLS%3))

class ByHook(Base):
    "A hook appends to a list that it closes over"
    def begin(self):
        kept = []
        def hook(module, inputs, output): kept.append(output)
        self.body.register_forward_hook(hook)
        self.kept_by_hook = lambda: kept
    def keep(self, h): pass
    def take(self):
        return emptied(self.kept_by_hook())

class OnLayer(Base):
    "A hook appends to a list that a layer of PyTorch was given"
    def begin(self):
        self.body.kept = []
        self.body.register_forward_hook(lambda m, inputs, output: m.kept.append(output))
    def keep(self, h): pass
    def take(self):
        return emptied(self.body.kept)

class ByNonlocal(Base):
    "A hook counts in a variable of the function that made it"
    def begin(self):
        n = 0
        def hook(module, inputs, output):
            nonlocal n
            n += 1
            return output*(1+n%3)
        self.body.register_forward_hook(hook)
    def keep(self, h): pass
    def take(self): return []

class ByPartial(Base):
    def begin(self):
        def hook(found, module, inputs, output): found.append(output)
        self.kept = []
        self.body.register_forward_hook(partial(hook, self.kept))
    def keep(self, h): pass
    def take(self):
        return emptied(self.kept)

class Hidden(Base):
    "A model that is held in a list, and has statistics of its own"
    def begin(self): self.others = [nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8))]
    def keep(self, h): self.now = self.others[0](h)
    def take(self): return [self.now, self.others[0][0].running_mean.clone()[None]]

class InPlace(Base):
    "A tensor that is no buffer, and an array"
    def begin(self): self.mean,self.n = torch.zeros(8),np.zeros(1)
    def keep(self, h):
        self.mean.mul_(.5).add_(h.detach().mean(0))
        self.n += 1
    def take(self): return [self.mean[None]*float(self.n[0])]

class Draws(Base):
    "Random numbers of its own"
    def begin(self): self.generator,self.rng = torch.Generator().manual_seed(0),np.random.default_rng(0)
    def forward(self, x):
        return super().forward(x)+torch.rand(3, generator=self.generator)+float(self.rng.random())
    def keep(self, h): pass
    def take(self): return []

class LosesHook(Base):
    "A hook that takes itself off at its first call"
    def begin(self):
        def hook(module, inputs, output):
            self.handle.remove()
            return output*3
        self.handle = self.body.register_forward_hook(hook)
    def keep(self, h): pass
    def take(self): return []

class Large(Base):
    "A table that is written into"
    def begin(self): self.bank = torch.zeros(1000, 100)
    def keep(self, h): self.bank[:h.shape[0],:8] += h.detach()
    def take(self): return [self.bank[:16,:8].clone()]

class Moves(Base):
    "Centres that are no buffer, a generator of the old kind, and a name space"
    def begin(self):
        self.centres = nn.Parameter(torch.zeros(8), requires_grad=False)
        self.rng,self.told = np.random.RandomState(0),SimpleNamespace(n=0)
    def keep(self, h):
        self.centres.lerp_(h.detach().mean(0), .5)
        self.told.n += 1
        self.drawn = float(self.rng.rand())
    def take(self): return [self.centres[None]*self.told.n*self.drawn]

class Nested(Base):
    "A list in a list, and bytes"
    def begin(self): self.lists,self.bytes = [[]],bytearray()
    def keep(self, h):
        self.lists[0].append(h)
        self.bytes += b'1'
    def take(self): return emptied(self.lists[0])

class Table(Base):
    "A table of pandas, a long list and a large array"
    def begin(self):
        self.table,self.long = pd.DataFrame(dict(n=[0])),[0]*5000
        self.array = np.zeros((200, 500), dtype=np.float32)
    def keep(self, h):
        self.table.loc[0, 'n'] += 1
        self.long[-1] += 1
        self.array[-1,-1] += 1
        self.found = h*float(1+(self.table.n.iloc[0]+self.long[-1]+self.array[-1,-1])%7)
    def take(self): return [self.found]

class OnlyTable(Table):
    "A table of pandas that becomes longer"
    def keep(self, h):
        self.table.loc[len(self.table)] = [1]
        self.found = h*float(1+len(self.table)%7)

class OnlyLong(Table):
    "The last of a long list"
    def keep(self, h):
        self.long[-1] += 1
        self.found = h*float(1+self.long[-1]%7)

class OnlyArray(Table):
    "The last number of a large array"
    def keep(self, h):
        self.array[-1,-1] += 1
        self.found = h*float(1+self.array[-1,-1]%7)

class Slotted:
    __slots__ = 'n',
    def __init__(self): self.n = 0

class InSlots(Base):
    def begin(self): self.slotted,self.turns = Slotted(),itertools.count(1)
    def keep(self, h):
        self.slotted.n += next(self.turns)
        self.found = h*(1+self.slotted.n%5)
    def take(self): return [self.found]

class MaxNorm(Base):
    "An embedding whose rows are shortened where they are looked up"
    def begin(self): self.table = nn.Embedding(9, 8, max_norm=.1)
    def keep(self, h): self.found = h*self.table((9*h[:,0].detach().sigmoid()).long().clamp(max=8))
    def take(self): return [self.found]

class ThroughData(Base):
    def keep(self, h): self.head.bias.data.add_(.01)
    def take(self): return []

LEAVE = [Base, InDict, InDeque, InTuple, InObject, InGlobal, InClass, Counts, ByHook, OnLayer, ByNonlocal, ByPartial,
    Hidden, InPlace, Draws, LosesHook, Large, Moves, Nested, Table, OnlyTable, OnlyLong, OnlyArray,
    InSlots, MaxNorm, ThroughData]

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
        extra = sum(h.square().mean() for h in found)
        self.learn.loss_grad = self.loss_grad+.1*extra
        self.learn.loss = self.learn.loss_grad.clone()

def learner(make, *cbs):
    set_seed(0)
    x,y = class_data(80)
    dls = DataLoaders(*[TfmdDL([*zip(x, y)], bs=16, num_workers=0) for _ in range(2)])
    global N_CALLS
    N_CALLS = 0
    return Learner(dls, make(), loss_func=CrossEntropyLossFlat(), cbs=[*cbs, ExtraLoss()], lr=1e-2)

def weights(learn): return [p.detach() for p in learn.model.parameters()]

LOOK = dict(
    top_loss=lambda **options: TopLossCallback(1., warmup=0, **options),
    selective_backprop=lambda **options: SelectiveBackpropCallback(keep=1., gather=False, warmup=0, **options),
    batch_loss_filter=lambda **options: BatchLossFilterCallback(1., warmup=0, **options),
    stale_loss=lambda **options: StaleLossCallback(beta=0, n=2, warmup=0, **options))
LOOK_AT_NOTHING = dict(
    favor_hard=lambda **options: FavorHardCallback(beta=0, warmup=0, **options),
    watch_items=lambda **options: WatchItemsCallback(**options),
    random_subset=lambda **options: RandomSubsetCallback(1., warmup=0, **options))

def check_plain(make_learner, cb):
    "Training is as without a selection"
    plain,ours = weights(quiet_fit(make_learner(), 2)),weights(quiet_fit(make_learner(cb), 2))
    for a,b in zip(ours, plain): assert torch.equal(a, b)

@pytest.mark.parametrize('method', mostly_slow(LOOK, 'top_loss'))
@pytest.mark.parametrize('make', LEAVE)
def test_what_a_look_would_leave_behind_is_refused(make, method):
    learn = learner(make, LOOK[method]())
    with pytest.raises(ValueError, match='a second look at one batch: got a change of .*such as favor_hard'):
        quiet_fit(learn, 1)
    assert not learn.opt.state_dict()['state'] or not learn.train_iter

@pytest.mark.parametrize('method', LOOK_AT_NOTHING)
@pytest.mark.parametrize('make', LEAVE)
def test_methods_that_look_at_nothing_leave_all_as_it_is(make, method):
    check_plain(partial(learner, make), LOOK_AT_NOTHING[method]())

@pytest.mark.parametrize('method', mostly_slow(LOOK, 'top_loss'))
@pytest.mark.parametrize('make', PUT_BACK)
def test_attributes_and_buffers_are_put_back(make, method):
    check_plain(partial(learner, make), LOOK[method]())

# Losses
class ByExpert(nn.Module):
    "A loss that keeps a list of losses, which it weighs by how they went"
    def __init__(self):
        super().__init__()
        self.history,self.seen = [1.],Counter()
    def forward(self, pred, y):
        weight = sum(self.history[-3:])/3*(1+self.seen['calls']%2)
        loss = F.cross_entropy(pred, y)
        self.history.append(float(loss.detach()))
        self.seen['calls'] += 1
        return loss*weight

class OfObject:
    "A loss that is a method, and counts"
    def __init__(self): self.n = 0
    def loss(self, pred, y):
        self.n += 1
        return F.cross_entropy(pred, y)*(1+self.n%3)

def learner_by(make_loss, *cbs):
    learn = learner(Last, *cbs)
    learn.loss_func = make_loss()
    return learn.remove_cbs([cb for cb in learn.cbs if isinstance(cb, ExtraLoss)])

@pytest.mark.parametrize('method', ['top_loss',*LOOK_AT_NOTHING])
@pytest.mark.parametrize('make_loss', [ByExpert, lambda: OfObject().loss], ids=['module','method'])
def test_keeping_all_is_plain_training_with_a_loss_that_remembers(make_loss, method):
    check_plain(partial(learner_by, make_loss), (LOOK | LOOK_AT_NOTHING)[method]())

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
    make = (LOOK | LOOK_AT_NOTHING)[method]
    def made(*cbs):
        FOUND.clear()
        return learner_by(LOSSES[name], *cbs)
    with pytest.raises(ValueError, match='a second look at one batch.*Pass item_loss='): quiet_fit(made(make()), 1)
    check_plain(made, make(item_loss=partial(F.cross_entropy, reduction='none')))
