"Solutions solve their equations, points are drawn as papers say, and runs go from beginning to end"
import numpy as np, pandas as pd, pytest, torch
from fastai.torch_core import set_seed
from torch import nn
from studies import equations as q

@pytest.fixture(autouse=True)
def tiny(monkeypatch): monkeypatch.setenv('SELBACK_SCALE', 'tiny')

def equations(): return [part.equation for part in q.parts.values()]

class Nothing(nn.Module):
    "A network that says nothing"
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(1))
    def forward(self, points): return self.scale*points.sum(1, keepdim=True)

@pytest.mark.parametrize('equation', equations(), ids=list(q.parts))
def test_the_solution_solves_the_equation(equation):
    "By differences of the solution, in double precision"
    g = np.random.default_rng(0)
    x,t = g.uniform(-.9, .9, 200),g.uniform(.1, .3, 200) # before a front is too steep for differences
    h = 1e-4
    u = equation.exact(x, t)
    u_t = (equation.exact(x, t+h)-equation.exact(x, t-h))/(2*h)
    beside = equation.exact(x+h, t),equation.exact(x-h, t)
    u_x,u_xx = (beside[0]-beside[1])/(2*h),(beside[0]-2*u+beside[1])/h**2
    left = dict(
        Burgers=lambda: u_t+u*u_x-.01/np.pi*u_xx,
        Advection=lambda: u_t+u_x-1e-3*u_xx,
        Heat=lambda: u_t-.1*u_xx)[type(equation).__name__]()
    assert np.abs(left).max()<1e-3*np.abs(u_t).max()

@pytest.mark.parametrize('equation', equations(), ids=list(q.parts))
def test_the_residual_is_that_of_the_equation(equation):
    "Of a polynomial, whose derivatives are known"
    x,t = (o.double().requires_grad_() for o in torch.rand(2, 50, 1))
    u = x**2*t
    u_t,u_x,u_xx = x**2,2*x*t,2*t
    wanted = dict(Burgers=u_t+u*u_x-.01/np.pi*u_xx, Advection=u_t+u_x-1e-3*u_xx, Heat=u_t-.1*u_xx)
    assert torch.allclose(equation.residual(u, x, t), wanted[type(equation).__name__])

@pytest.mark.parametrize('equation', equations(), ids=list(q.parts))
def test_the_network_cannot_change_the_beginning_or_the_ends(equation):
    edge = torch.linspace(-1, 1, 30)
    beginning = torch.stack([edge, torch.zeros(30)], 1)
    ends = torch.cat([torch.stack([torch.full((30,), end), edge.abs()], 1) for end in (-1.,1.)])
    points = torch.cat([beginning, ends])
    model = q.Residual(equation, q.tanh_net())
    assert torch.allclose(model.solution(points), q.exact_on(equation, points), atol=2e-6)

def test_a_residual_is_the_same_in_validation_where_gradients_are_off():
    model,points = q.Residual(q.Burgers(), q.tanh_net()),q.any_points(q.Burgers(), 20)
    trained = model(points)
    assert trained.requires_grad
    with torch.no_grad(): validated = model(points)
    assert not validated.requires_grad
    assert validated.equal(trained)

def test_the_error_is_relative_to_the_solution():
    "A network that says nothing leaves the sine of the beginning, of which exp(-at) is left at time t"
    error = q.SolutionError(q.Heat())
    error.model = q.Residual(q.Heat(), Nothing())
    t = np.linspace(0, 1, 101)
    left = np.exp(-.1*np.pi**2*t)
    assert error.value==pytest.approx(np.sqrt(((1-left)**2).sum()/(left**2).sum()), rel=1e-4)

class PointsOfSteps(q.Callback):
    order = 20
    def __init__(self): self.points,self.residuals = [],[]
    def after_loss(self):
        if not self.training: return
        self.points.append(self.x.clone())
        self.residuals.append(self.pred.detach().abs()[:,0])

def steps_of(*cbs, epochs=2):
    set_seed(0)
    seen = PointsOfSteps()
    learn = q.learner_of(q.Heat(), *cbs, seen)
    with learn.no_bar(),learn.no_logging(): learn.fit(epochs, 1e-3)
    return learn,seen

def rows(points): return {tuple(o) for o in points.tolist()}

def test_fresh_points_never_come_again():
    _,seen = steps_of(q.FreshPoints(q.Heat()))
    assert len(rows(torch.cat(seen.points)))==6*q.bs

def test_r3_keeps_what_is_above_the_mean_and_nothing_else():
    _,seen = steps_of(q.R3(q.Heat()))
    for points,residual,then in zip(seen.points, seen.residuals, seen.points[1:]):
        high = residual>residual.mean()
        assert rows(points[high])<=rows(then)
        assert not rows(points[~high]) & rows(then)
        assert len(then)==q.bs

def test_rad_draws_by_the_residual():
    "The mean residual of what is drawn is sum(p*r), p in proportion to r/mean+1"
    learn,seen = steps_of(q.RAD(q.Heat()), epochs=1)
    set_seed(0)
    start = q.learner_of(q.Heat()).model # the same weights as before the first epoch
    with torch.no_grad():
        residual = start(q.any_points(q.Heat(), 200_000)).abs()[:,0].double()
        drawn = start(learn.dls.train_ds.points).abs()[:,0].double()
    p = residual/residual.mean()+1
    wanted = (p*residual).sum()/p.sum()
    error = drawn.std()/len(drawn)**.5
    assert abs(drawn.mean()-wanted)<5*error
    assert wanted-residual.mean()>5*error # a draw that is even would fail

def test_it_runs_from_beginning_to_end():
    runs = pd.concat([q.run_best('heat'), q.run_settings('heat')])
    assert set(runs.method)=={*q.by_loss,*q.settings,*q.others}
    assert runs.error.notna().all()
    assert runs.budget.nunique()==1
    rad,fresh = (runs[(runs.method==method) & (runs.epoch==1)] for method in ('RAD','fresh points'))
    looked = (rad.compute-rad.backpropagated).mean()
    assert .1*q.RAD.n_candidates<looked<q.RAD.n_candidates # the look is paid
    assert (fresh.compute-fresh.backpropagated).abs().max()<1
