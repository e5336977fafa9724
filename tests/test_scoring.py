"A scoring pass leaves no trace, whatever the model, the loss and the score do; and it keeps no more than that takes"
import contextlib, math, random
from functools import partial

import numpy as np, pytest, torch
from helpers import Trail, alike, random_states
from selback.core.untouched import fixed_random
from selback.core.scoring import ScoringPass, batch_scores
from selback.functional import TopLoss, chosen
from torch import nn
from torch.nn import functional as F

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

@pytest.mark.law(5)
def test_a_pass_has_no_gradients_and_gives_back_what_the_model_draws():
    seen,xb = Trail(),inputs()
    class Draws(nn.Linear):
        def forward(self, x):
            seen.append(torch.is_grad_enabled())
            return super().forward(x+random.random()+torch.rand(1))
    model,before = Draws(4, 3),random_states()
    for _ in range(2):
        pred = ScoringPass()(model, xb, (), torch.autocast('cpu', dtype=torch.bfloat16))
        assert not pred.requires_grad
        assert pred.dtype==torch.float32
    assert not torch.is_autocast_enabled('cpu')
    assert random_states()==before
    assert seen.seen and not any(seen.seen)

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
    "Their values, their names in each module, and those in its state"
    found = {k: b.clone() for k,b in model.named_buffers()}
    return [found, [list(m._buffers) for m in model.modules()], list(model.state_dict())]

@pytest.mark.parametrize('fails', [(), (0,), (0,1,2)])
@pytest.mark.parametrize('way', ['write', 'data', 'replace', 'make', 'register', 'drop', 'nan', 'none'])
def test_a_model_that_changes_its_buffers_gets_them_back(way, fails):
    "In the first look, in later ones, and where one fails; training moves on"
    model,scoring = nn.Sequential(Moving(way), nn.Identity()),ScoringPass()
    before = buffers(model)
    for i in range(4):
        model[0].fail = i in fails
        with contextlib.suppress(Failed): scoring(model, inputs())
        assert alike(buffers(model), before)
        assert all(m.training for m in model.modules())
    model[0].fail = False
    with torch.no_grad(): model(*inputs())
    assert not alike(buffers(model), before)

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
