"A scoring pass leaves no trace, whatever the model, the loss and the score do; and it keeps no more than that takes"
import contextlib, gc, inspect, math, random, warnings, weakref
from functools import partial

import numpy as np, pytest, torch
from fastai.losses import CrossEntropyLossFlat, FocalLossFlat
from helpers import Trail
from selback.core.first_batch import separable_losses
from selback.core.losses import has_side_effects, item_losses
from selback.core.untouched import fixed_random, untouched
from selback.core.scoring import ScoringPass, batch_scores
from selback.functional import TopLoss, chosen
from torch import nn
from torch.nn import functional as F

def random_states():
    numpy = [o.tolist() if isinstance(o, np.ndarray) else o for o in np.random.get_state()]
    return random.getstate(),numpy,torch.get_rng_state().tolist()

def batch(n=8): return torch.randn(n, 4),torch.randint(0, 3, (n,))
def inputs(): return batch()[:1]

def look(model, loss, x, y, score='loss'):
    "The scores of a batch, by a pass of their own"
    return batch_scores(score, loss, ScoringPass()(model, (x,), (y,)), (y,))

class Failed(Exception): pass

# random states
DRAWS = dict(
    nothing=lambda: None,
    python=random.random,
    gauss=lambda: random.gauss(0, 1),
    numpy=np.random.rand,
    normal=np.random.randn,
    seed=lambda: np.random.seed(7),
    torch=lambda: torch.rand(3))

@pytest.mark.parametrize('stored', [False, True])
@pytest.mark.parametrize('fails', [False, True])
@pytest.mark.parametrize('draw', DRAWS)
def test_the_random_states_are_put_back(draw, fails, stored):
    "Also the second of two normal numbers that a generator holds in store"
    if stored:
        random.gauss(0, 1)
        np.random.randn()
    before = random_states()
    with contextlib.suppress(Failed),fixed_random():
        DRAWS[draw]()
        if fails: raise Failed
    assert random_states()==before

    np.random.rand(5) # and after a step of training
    np.random.seed(3)
    np.random.randn()
    before = random_states()
    with fixed_random(): DRAWS[draw]()
    assert random_states()==before

def test_another_generator_of_numpy_is_put_back():
    old = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        before = np.random.get_state(legacy=False)
        with warnings.catch_warnings(),fixed_random():
            warnings.simplefilter('error')
            np.random.rand(4)
        assert np.random.get_state(legacy=False)==before
    finally: np.random.set_bit_generator(old)

def entries(monkeypatch):
    "Counts how often random states are kept"
    n,getstate = [0],random.getstate
    def counted():
        n[0] += 1
        return getstate()
    monkeypatch.setattr(random, 'getstate', counted)
    return n

def own_loss(pred, y, reduction='mean'): return F.cross_entropy(pred, y, reduction=reduction)

@pytest.mark.parametrize('loss,kwargs,may_draw', [
    (nn.CrossEntropyLoss(), {}, False),
    (F.cross_entropy, dict(score='grad_bound'), False),
    (CrossEntropyLossFlat(), dict(score='entropy'), False),
    (partial(F.cross_entropy, label_smoothing=.1), dict(score='entropy'), False),
    (own_loss, {}, True),
    (own_loss, dict(score='entropy'), False),
    (own_loss, dict(score='grad_bound'), True),
    (nn.CrossEntropyLoss(), dict(score=lambda pred,y: own_loss(pred, y, 'none')), True),
    (own_loss, dict(score=partial(F.cross_entropy, reduction='none')), False)])
def test_random_states_are_kept_for_a_pass_and_for_what_may_draw(loss, kwargs, may_draw, monkeypatch):
    class Own(nn.Linear): pass
    n,(x,y) = entries(monkeypatch),batch()
    for model in nn.Linear(4, 3),Own(4, 3):
        n[0] = 0
        look(model, loss, x, y, **kwargs)
        assert n[0]>1 if may_draw else n==[1]

def drawing(pred, y, reduction='mean'):
    random.random()
    np.random.rand()
    torch.rand(1)
    return F.cross_entropy(pred, y, reduction=reduction)

@pytest.mark.parametrize('loss,score', [
    (drawing,'loss'),
    (drawing,'grad_bound'),
    (F.cross_entropy,partial(drawing, reduction='none')),
    (partial(drawing),'loss'),
    (drawing,'entropy')])
def test_losses_and_scores_that_draw_leave_no_trace(loss, score):
    model,(x,y) = nn.Linear(4, 3),batch()
    before = random_states()
    look(model, loss, x, y, score)
    assert random_states()==before
    if score!='entropy': batch_scores(score, loss, model(x).detach(), (y,))
    assert random_states()==before

class Hooked(nn.CrossEntropyLoss): pass
class OwnFunc(nn.CrossEntropyLoss):
    def forward(self, pred, y): return super().forward(pred, y)+0*torch.rand(1)

def test_losses_that_are_trusted():
    wrapped = CrossEntropyLossFlat()
    trusted = [nn.CrossEntropyLoss(), F.mse_loss, FocalLossFlat(), partial(partial(F.cross_entropy), reduction='sum'),
        wrapped, partial(wrapped)]
    assert not any(map(has_side_effects, trusted))

    hooked,patched = nn.CrossEntropyLoss(),nn.CrossEntropyLoss()
    hooked.register_forward_hook(lambda m,args,out: torch.rand(1)*0+out)
    patched.forward = drawing
    wrapped.func = OwnFunc()
    own = [hooked, patched, wrapped, Hooked(), OwnFunc(), drawing, partial(drawing), lambda p,y: 0, F.dropout]
    assert all(map(has_side_effects, own))
    assert has_side_effects(nn.Linear(2, 2))
    assert has_side_effects(nn.CrossEntropyLoss().forward)

# buffers
class Moving(nn.Module):
    "Changes a buffer in evaluation mode, too; `way` says how"
    def __init__(self, way='write'):
        super().__init__()
        self.way,self.fail = way,False
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.register_buffer('mean', torch.full((4,), math.nan if way=='nan' else 0.))
        self.register_buffer('none', None)
    def forward(self, x):
        if self.way=='write': self.mean.mul_(.9).add_(.1*x.mean(0))
        if self.way=='data': self.mean.data.add_(1)
        if self.way=='replace': self.mean = .9*self.mean+.1*x.mean(0)
        if self.way=='make': self.none = x.mean(0)
        if self.way=='register': self.register_buffer('cache', x.mean(0), persistent=False)
        if self.way=='drop' and hasattr(self, 'mean'): del self.mean
        if self.fail: raise Failed
        return self.net(x)

def buffers(model):
    "Which they are and their values, their names in each module, and those in its state"
    found = {k: (id(b), b.clone()) for k,b in model.named_buffers()}
    return found,[list(m._buffers) for m in model.modules()],list(model.state_dict())

def alike(a, b):
    def same(p, q): return p[0]==q[0] and p[1].nan_to_num(9.).equal(q[1].nan_to_num(9.))
    (found,*names),(others,*other_names) = a,b
    if names!=other_names or found.keys()!=others.keys(): return False
    return all(same(found[k], others[k]) for k in found)

@pytest.mark.parametrize('fails', [(), (0,), (1,), (0,1,2)])
@pytest.mark.parametrize('way', ['write', 'data', 'replace', 'make', 'register', 'drop', 'nan', 'none'])
def test_a_model_that_changes_its_buffers_gets_them_back(way, fails):
    "In the first look, in later ones, and where one fails"
    model = nn.Sequential(Moving(way), nn.Identity())
    before,scoring = buffers(model),ScoringPass()
    for i in range(4):
        model[0].fail = i in fails
        with contextlib.suppress(Failed): scoring(model, inputs())
        assert alike(buffers(model), before)

    model[0].fail = False
    with torch.no_grad(): model.train()(*inputs())
    assert not alike(buffers(model), before) # training moves on

    before = buffers(model)
    def assert_as_before():
        assert alike(buffers(model), before)
        assert all(m.training for m in model.modules())
    for _ in range(2):
        ScoringPass()(model.train(), inputs())
        assert_as_before()
        with untouched(model): model(*inputs())
        assert_as_before()

def test_a_module_that_comes_later_is_looked_at_anew():
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity())
    ScoringPass()(model, inputs())
    def one_more(): model.append(Moving())
    def one_in_the_place_of_another(): model[1] = Moving()
    for change in one_more,one_in_the_place_of_another:
        change()
        before = buffers(model)
        for _ in range(2):
            ScoringPass()(model, inputs())
            assert alike(buffers(model), before)

def test_layers_of_pytorch_are_not_copied_and_other_models_once_a_pass(monkeypatch):
    copied,clone = [],torch.Tensor.clone
    def noting(t, *args, **kwargs):
        copied.append(t.data_ptr())
        return clone(t, *args, **kwargs)
    monkeypatch.setattr(torch.Tensor, 'clone', noting)
    still,moving = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)),Moving()
    for model,buffers in (still,[]),(moving,[*moving.buffers(recurse=False)]):
        x,*_ = inputs()
        for _ in range(3):
            copied.clear()
            with untouched(model): pass
            assert copied==[b.data_ptr() for b in buffers]

class Adapts(nn.Module):
    "Moves statistics while it is scored"
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(4)
    def forward(self, x):
        self.bn.train()
        return self.bn(x)

@pytest.mark.parametrize('spoil', ['forward', 'hook', 'child', 'adapts'])
def test_a_model_that_changes_layers_of_pytorch_while_it_is_scored_is_refused(spoil):
    model = Adapts() if spoil=='adapts' else nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    def move(*args): model[1].running_mean.add_(1)
    class Child(nn.Module):
        def forward(self, x):
            move()
            return x
    if spoil=='forward': model[0].forward = lambda x, own=model[0].forward: (own(x), move())[0]
    if spoil=='hook': model[0].register_forward_hook(move)
    if spoil=='child': model.append(Child())
    steps = chosen([batch()], model, F.cross_entropy, TopLoss())
    with pytest.raises(ValueError, match='a second look at one batch: got a change of (running_mean|num_batches)'):
        next(steps)

def test_a_model_is_forgotten_with_its_last_reference():
    model = Moving()
    ScoringPass()(model, inputs())
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None

# flags
def test_each_module_gets_its_own_flag_back():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()) for _ in range(3)])
    model.append(model[0]) # twice
    model[1].eval()
    model[2][1].eval()
    model[1][2].training = True
    flags = [m.training for m in model.modules()]
    seen = Trail()
    for m in model.modules(): m.register_forward_hook(lambda m,args,out: seen.append(m.training))

    ScoringPass()(model, inputs())
    assert [m.training for m in model.modules()]==flags
    model.append(nn.Linear(5, 5)) # it takes other inputs
    with pytest.raises(ValueError, match='the model failed in the scoring pass'): ScoringPass()(model, inputs())
    assert [m.training for m in model.modules()][:len(flags)]==flags

    assert seen.seen
    assert not any(seen.seen)
    assert all('training' in vars(m) for m in model.modules())

@pytest.mark.filterwarnings('ignore')
@pytest.mark.slow
def test_scripted_and_compiled_models_too():
    def net(): return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    xb = inputs()
    for model in torch.jit.script(net()),torch.compile(net(), backend='eager'):
        before = {k: v.clone() for k,v in model.state_dict().items()}
        a,b = (ScoringPass()(model, xb) for _ in range(2))
        assert torch.equal(a, b)
        assert all(m.training for m in model.modules())
        assert all(torch.equal(v, before[k]) for k,v in model.state_dict().items())

# inputs
class Writes(nn.Linear):
    "Changes its inputs, in one of several ways"
    def __init__(self, way):
        super().__init__(4, 3)
        self.way = way
    def forward(self, x):
        if self.way=='write': x.mul_(2)
        if self.way=='clamp': x.clamp_(-9, 9) # changes nothing as long as values are small
        if self.way=='data': x.data.mul_(2)
        if self.way=='view': x[:,0].add_(1)
        if self.way=='shape': x.unsqueeze_(1).squeeze_(1)
        if self.way=='grad': x.requires_grad_()
        if self.way=='returns': return x
        return super().forward(x)

@pytest.mark.parametrize('way', ['write', 'clamp', 'data', 'view', 'shape', 'grad', 'returns', 'none'])
def test_the_inputs_stay_as_they_are(way):
    model = Writes(way)
    for scale in 1,1,10,10:
        x = torch.randn(8, 4)*scale
        was,address = x.clone(),x.data_ptr()
        pred = ScoringPass()(model, (x,))
        if way!='returns': torch.testing.assert_close(pred, model(was.clone()).detach())
        pred.add_(1)
        assert torch.equal(x, was)
        assert x.data_ptr()==address
        assert not x.requires_grad

def test_containers_stay_as_they_are():
    class Pops(nn.Linear):
        def forward(self, batch, more):
            more.append(3)
            return super().forward(batch.pop('x'))
    for _ in range(3):
        xb = {'x': torch.randn(8, 4)},[torch.ones(8)]
        ScoringPass()(Pops(4, 3), xb)
        assert list(xb[0])==['x']
        assert len(xb[1])==1

def test_inference_tensors_can_be_looked_at():
    with torch.inference_mode(): x = torch.randn(8, 4)
    for model in nn.Linear(4, 4),Moving():
        for _ in range(2): assert ScoringPass()(model, (x,)).shape==(8,4)

def test_lazy_modules_are_made_in_the_first_look():
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    state = random_states()
    for _ in range(2): assert ScoringPass()(model, (torch.randn(8, 4),)).shape==(8,3)
    assert random_states()[:2]==state[:2]
    assert model[0].in_features==4

# losses
def test_a_loss_that_mixes_items_is_refused_each_time():
    def normalised(pred, y): return F.cross_entropy(pred, y)/pred.var()
    pred,y = torch.randn(6, 3),torch.tensor([0,1,2,0,1,2])
    for _ in range(3):
        with pytest.raises(ValueError, match='It mixes items.*item_loss='): separable_losses(normalised, pred, y)

class Slots:
    "Can't be referenced weakly"
    __slots__ = ()
    def __call__(self, pred, y, reduction='mean'): return own_loss(pred, y, reduction)

class Equal:
    "Can't be hashed"
    def __eq__(self, other): return True
    def __call__(self, pred, y, reduction='mean'): return own_loss(pred, y, reduction)
    def method(self, pred, y, reduction='mean'): return own_loss(pred, y, reduction)

UNKNOWN = [Slots(), Equal(), Equal().method, Slots().__call__, torch.jit.script(nn.CrossEntropyLoss())]

@pytest.mark.parametrize('loss', UNKNOWN, ids=lambda o: type(o).__name__)
def test_losses_of_which_nothing_can_be_remembered(loss):
    pred,y = torch.randn(6, 3),torch.tensor([0,1,2,0,1,2])
    wanted = F.cross_entropy(pred, y, reduction='none')
    for _ in range(2): torch.testing.assert_close(separable_losses(loss, pred, y), wanted)

def test_a_loss_is_forgotten_with_its_last_reference():
    def loss(pred, y, reduction='mean'): return F.cross_entropy(pred, y, reduction=reduction)
    module = nn.CrossEntropyLoss()
    for f in loss,module: separable_losses(f, torch.randn(6, 3), torch.tensor([0,1,2,0,1,2]))
    gone = [weakref.ref(f) for f in (loss, module)]
    del loss,module,f
    gc.collect()
    assert [ref() for ref in gone]==[None,None]

def test_the_signature_of_a_loss_is_read_once(monkeypatch):
    read,signature = [],inspect.signature
    monkeypatch.setattr(inspect, 'signature', lambda f: read.append(f) or signature(f))
    def loss(pred, y, reduction='mean', ignore_index=-100):
        return F.cross_entropy(pred, y, reduction=reduction, ignore_index=ignore_index)
    pred,y = torch.randn(6, 3, 2),torch.zeros(6, 2, dtype=torch.int64)
    for _ in range(3): item_losses(loss, pred, y)
    assert read==[loss]
