"A pass that scores leaves no trace in what a model and a loss hold, or what their functions share"
import functools, operator
from collections import Counter, deque
from functools import partial
from types import SimpleNamespace

import numpy as np, pytest, torch
from helpers import *
from selback.core.losses import state_kept
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

MODELS = [Base, InDict, InDeque, InTuple, InObject, InGlobal, InClass, Counts, ByHook, OnLayer, ByNonlocal, ByPartial,
    Hidden, InPlace, Draws, LosesHook]

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

KEEPS_ALL = dict(
    top_loss=lambda: TopLossCallback(1., warmup=0),
    selective_backprop=lambda: SelectiveBackpropCallback(keep=1., gather=False, warmup=0),
    batch_loss_filter=lambda: BatchLossFilterCallback(1., warmup=0),
    stale_loss=lambda: StaleLossCallback(beta=0, n=2, warmup=0),
    favor_hard=lambda: FavorHardCallback(beta=0, warmup=0))

@pytest.mark.parametrize('method', mostly_slow(KEEPS_ALL, 'top_loss', 'favor_hard'))
@pytest.mark.parametrize('make', MODELS)
def test_keeping_all_is_plain_training_with_models_that_collect(make, method):
    plain = weights(quiet_fit(learner(make), 2))
    ours = weights(quiet_fit(learner(make, KEEPS_ALL[method]()), 2))
    for a,b in zip(ours, plain): assert torch.equal(a, b)

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

@pytest.mark.parametrize('method', ['top_loss','favor_hard'])
def test_keeping_all_is_plain_training_with_a_loss_that_remembers(method):
    def trained(*cbs):
        learn = learner(Base, *cbs)
        learn.loss_func = ByExpert()
        learn.remove_cbs([cb for cb in learn.cbs if isinstance(cb, ExtraLoss)])
        return weights(quiet_fit(learn, 2))
    for a,b in zip(trained(KEEPS_ALL[method]()), trained()): assert torch.equal(a, b)

def test_a_large_tensor_that_changes_in_place_is_refused():
    class Large(Base):
        def begin(self): self.bank = torch.zeros(1000, 100)
        def keep(self, h): self.bank[:h.shape[0],:8] = h.detach()
        def take(self): return []
    learn = learner(Large, TopLossCallback(.5, warmup=0))
    with pytest.raises(ValueError, match='make it a buffer of the model, or use a method that scores nothing'):
        quiet_fit(learn, 1)
    quiet_fit(learner(Large, FavorHardCallback()), 2)

@pytest.mark.parametrize('make', [InGlobal, InClass, Counts])
def test_scoring_ahead_is_refused_where_a_copy_shares_what_it_changes(make):
    learn = learner(make, TopLossCallback(.5, ahead=2, warmup=0))
    with pytest.raises(ValueError, match='changes what both share'): quiet_fit(learn, 1)

@pytest.mark.parametrize('make', [Base, InDict, InObject])
def test_scoring_ahead_goes_where_a_copy_has_its_own(make):
    quiet_fit(learner(make, TopLossCallback(.5, ahead=2, warmup=0)), 1)

def test_what_was_not_changed_is_not_written():
    class Watched(dict):
        n_cleared = 0
        def clear(self):
            Watched.n_cleared += 1
            super().clear()
    model = Base()
    model.table = Watched(a=1)
    with state_kept([model]) as kept: model.eval()
    assert not Watched.n_cleared
    with state_kept([model]) as kept:
        assert not kept.is_changed
        model.table['b'] = 2
        assert kept.is_changed
    assert model.table==dict(a=1)
    assert Watched.n_cleared==1

def test_classes_stay_as_they_are():
    "What wraps a function of a class, and is not a function itself"
    class Wrapped(Base):
        n = 0
        @property
        @functools.lru_cache(None)
        def scale(self): return 2.
        @staticmethod
        @functools.lru_cache(None)
        def twice(x): return 2*x
        of = property(operator.attrgetter('body'))
        def keep(self, h): type(self).n += self.scale+self.twice(1)
    before = dict(vars(Wrapped))
    with state_kept([model := Wrapped()]): model(torch.ones(2, 4))
    assert {name: o for name,o in vars(Wrapped).items() if o is not before[name]}=={}
    assert (model.scale,model.twice(3),model.of)==(2.,6,model.body)

def test_arrays_that_cannot_be_written_are_left_alone():
    model = Base()
    model.table = np.frombuffer(b'12345678', dtype=np.uint8)
    model.seen = np.zeros(2)
    with state_kept([model]): model.seen += 1
    assert model.seen.tolist()==[0,0]

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

def test_frozen_parameters_old_generators_and_name_spaces_are_put_back():
    plain = weights(quiet_fit(learner(Moves), 2))
    ours = weights(quiet_fit(learner(Moves, KEEPS_ALL['top_loss']()), 2))
    for a,b in zip(ours, plain): assert torch.equal(a, b)

def test_endless_references_end():
    model = Base()
    model.me,model.loop = [model],[]
    model.loop.append(model.loop)
    with state_kept([model]): model.loop.append(1)
    assert model.loop==[model.loop] or len(model.loop)==1
