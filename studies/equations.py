"""Equations that a network learns at points of their domain: `python -m studies.equations NAME` runs one

An item is a point, its loss the squared residual of the equation there."""
import math
from functools import partial
from typing import NamedTuple

import numpy as np, pandas as pd, torch
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.learner import Learner, Metric
from fastai.losses import MSELossFlat
from fastai.optimizer import OptimWrapper
from fastcore.script import call_parse
from torch import nn

from selback.all import ScoringPass, Selection
from selback.bench.compare import compare, describe
from selback.bench.datasets import TensorDL
from studies.experiments import results, scale, stored

# Equations: each has a domain, a solution that is known, and one that the network forms

def tanh_net(
    width:int=64, # Of the hidden layers
    depth:int=3, # Hidden layers
): # A module: points of two coordinates between -1 and 1 to one number each
    "A small network that can be derived twice"
    sizes = [2,*[width]*depth,1]
    layers = [nn.Linear(n_in, n_out) for n_in,n_out in zip(sizes, sizes[1:])]
    for layer in layers:
        nn.init.xavier_normal_(layer.weight)
        nn.init.zeros_(layer.bias)
    hidden = [module for layer in layers[:-1] for module in (layer,nn.Tanh())]
    return nn.Sequential(*hidden, layers[-1])

def derived(
    u, # Values, shape (n, 1)
    *by, # Coordinates that they were made of, each of shape (n, 1)
)->tuple: # A derivative by each, shape (n, 1), which can be derived again
    "The derivatives of each value by its own coordinates"
    return torch.autograd.grad(u.sum(), by, create_graph=True)

class Equation:
    "An equation of a place and a time; points have the shape (n, 2)"
    low,high = (-1.,0.),(1.,1.) # of place and time

    def exact(self, x, t): # NumPy arrays of shape (n,)
        "The solution"
        raise NotImplementedError

    def at_edges(self, x, t):
        "A function that has the solution's values at the beginning and at both ends, where the network can't change it"
        raise NotImplementedError

    def value(self,
        net, # A network of points
        x, # Places, shape (n, 1)
        t, # Times, shape (n, 1)
    ): # Shape (n, 1)
        "The network's solution: right at the beginning and at both ends, whatever the network says"
        return self.at_edges(x, t)+t*(1-x*x)*net(torch.cat([x,2*t-1], 1))

    def residual(self, u, x, t):
        "What is left of the equation, shape (n, 1): 0 where it holds"
        raise NotImplementedError

class Burgers(Equation):
    "u_t + u u_x = v u_xx: a sine becomes a front (Raissi et al. 2019)"
    viscosity = .01/math.pi

    def at_edges(self, x, t): return -torch.sin(math.pi*x)

    def residual(self, u, x, t):
        u_x,u_t = derived(u, x, t)
        u_xx, = derived(u_x, x)
        return u_t + u*u_x - self.viscosity*u_xx

    def exact(self, x, t):
        "By Cole and Hopf's transformation and Gauss-Hermite quadrature (Basdevant et al. 1986)"
        nodes,weights = np.polynomial.hermite.hermgauss(120)
        places = x[:,None]-nodes*np.sqrt(4*self.viscosity*np.maximum(t, 1e-9))[:,None]
        exponents = -np.cos(np.pi*places)/(2*np.pi*self.viscosity)
        heat = weights*np.exp(exponents-exponents.max(1, keepdims=True))
        return -(heat*np.sin(np.pi*places)).sum(1)/heat.sum(1)

class Advection(Equation):
    "u_t + u_x = e u_xx: a narrow pulse is carried along and spreads a little"
    diffusion,width,start = 1e-3,.05,-.5

    def at_edges(self, x, t): return self._pulse(x, torch.zeros_like(t))
    def exact(self, x, t): return self._pulse(*map(torch.as_tensor, (x,t))).numpy()

    def _pulse(self, x, t):
        variance = self.width**2+2*self.diffusion*t
        return self.width/variance.sqrt()*torch.exp(-(x-self.start-t)**2/(2*variance))

    def residual(self, u, x, t):
        u_x,u_t = derived(u, x, t)
        u_xx, = derived(u_x, x)
        return u_t + u_x - self.diffusion*u_xx

class Heat(Equation):
    "u_t = a u_xx: a smooth solution, which nothing makes hard"
    diffusion = .1

    def at_edges(self, x, t): return torch.sin(math.pi*x)

    def residual(self, u, x, t):
        u_x,u_t = derived(u, x, t)
        u_xx, = derived(u_x, x)
        return u_t - self.diffusion*u_xx

    def exact(self, x, t): return np.exp(-self.diffusion*np.pi**2*t)*np.sin(np.pi*x)

class Residual(nn.Module):
    "A network whose output is the residual of an equation, in validation as well"
    def __init__(self,
        equation:Equation,
        net:nn.Module, # Of points
    ):
        super().__init__()
        self.equation,self.net = equation,net

    def forward(self, points): # Shape (n, 2)
        with torch.enable_grad(): # validation turns gradients off, but the equation is made of them
            x,t = (points[:,i:i+1].detach().requires_grad_() for i in (0,1))
            left = self.equation.residual(self.equation.value(self.net, x, t), x, t)
        return left if torch.is_grad_enabled() else left.detach()

    @torch.no_grad()
    def solution(self, points): # Shape (n, 2)
        "What the network takes for the solution, shape (n,)"
        return self.equation.value(self.net, points[:,:1], points[:,1:])[:,0]

# Points

def any_points(
    equation:Equation,
    n:int,
    generator=None, # Of the draw; None: PyTorch's own
): # Shape (n, 2)
    "Points drawn evenly from the domain"
    low,high = torch.tensor(equation.low),torch.tensor(equation.high)
    return low+(high-low)*torch.rand(n, 2, generator=generator)

class Points:
    "Points as a fastai dataset, with the residual that is wanted: none; a list of numbers gives a batch"
    n_inp = 1
    def __init__(self, points): self.points = points
    def __len__(self): return len(self.points)

    def __getitem__(self, i):
        points = self.points[i]
        return points,torch.zeros_like(points[...,:1])

def grid_of(
    equation:Equation,
    n:int=201, # Places
    n_times:int=101,
): # Points, shape (n_times*n, 2), time by time
    "A grid on which solutions are compared"
    x = torch.linspace(equation.low[0], equation.high[0], n)
    t = torch.linspace(equation.low[1], equation.high[1], n_times)
    return torch.cartesian_prod(t, x).flip(1)

def exact_on(equation, points): # Shape (n,)
    x,t = points.double().numpy().T
    return torch.as_tensor(equation.exact(x, t)).float()

class SolutionError(Metric):
    "The error of the solution on a grid, relative to the solution: |u-exact|/|exact| (l2 norms)"
    name = 'solution_error'
    def __init__(self, equation):
        self.points = grid_of(equation)
        self.exact = exact_on(equation, self.points)
    def accumulate(self, learn): self.model = learn.model

    @property
    def value(self): # asked for once, when a validation is over
        found = self.model.solution(self.points)
        return float((found-self.exact).norm()/self.exact.norm())

# Learners

adam = partial(OptimWrapper, opt=torch.optim.Adam)

n_pool = 50_000 # points that are drawn once and then trained again and again
bs = 1000

def learner_of(
    equation:Equation,
    *cbs, # Callbacks, such as `FreshPoints(equation)`
)->Learner: # Its metric is the error of the solution
    "A learner of an equation, at a pool of points that are drawn once"
    n = n_pool if scale()!='tiny' else 3*bs
    held_out = any_points(equation, bs, torch.Generator().manual_seed(0))
    options = dict(bs=bs, num_workers=0, device=torch.device('cpu'))
    train = TensorDL(Points(any_points(equation, n)), shuffle=True, drop_last=True, **options)
    valid = TensorDL(Points(held_out), **options)
    model = Residual(equation, tanh_net())
    return Learner(DataLoaders(train, valid), model, MSELossFlat(), opt_func=adam, metrics=SolutionError(equation),
        cbs=cbs)

# What the choices are compared with

class PointsCallback(Callback):
    "Chooses points in a way of its own"
    order,run_valid = Selection.order-1,False # before compute is counted
    def __init__(self, equation): self.equation = equation

class FreshPoints(PointsCallback):
    "New points in each step: the control of any pool"
    def before_batch(self): self.learn.xb = (any_points(self.equation, len(self.x)),)

class RAD(PointsCallback):
    "Draws each epoch's points from candidates, by the residual there divided by its mean, plus 1 (Wu et al. 2023)"
    n_candidates = 10_000

    def before_train(self):
        candidates = any_points(self.equation, self.n_candidates)
        residual = ScoringPass()(self.model, (candidates,)).abs()[:,0] # a look, which is counted
        rows = torch.multinomial(residual/residual.mean()+1, len(self.dls.train_ds), replacement=True)
        self.dls.train_ds.points = candidates[rows]

class R3(PointsCallback):
    "Keeps the points whose residual is above the mean, and draws the others anew (Daw et al. 2023)"
    def before_fit(self): self.points = None

    def before_batch(self):
        if self.points is None: self.points = any_points(self.equation, len(self.x))
        self.learn.xb = (self.points,)

    def after_loss(self):
        residual = self.pred.detach().abs()[:,0]
        kept = self.points[residual>residual.mean()]
        self.points = torch.cat([kept, any_points(self.equation, len(self.points)-len(kept))])

# Runs

class Part:
    "An equation, and what each run computes"
    def __init__(self,
        equation:Equation,
        steps:int, # Of plain training
        rates:tuple, # Learning rates, around the one that was best on one seed
    ):
        self.equation,self.steps,self.rates = equation,steps,rates

    @property
    def compute(self): return bs*(self.steps if scale()!='tiny' else 8) # of each run, in points trained

parts = dict(
    burgers=Part(Burgers(), 6000, (.004,.008,.016)),
    advection=Part(Advection(), 3000, (.008,.016,.032)),
    heat=Part(Heat(), 1000, (.008,.016,.032))) # at .064 one of three seeds learned nothing

by_loss = ['none','favor_hard(beta=2)']
pictured = 'fresh points','favor_hard(beta=2)'
settings = ['favor_hard(beta=.5)','favor_hard(beta=1)','prioritized_sampling'] # on fewer seeds
others = {'fresh points': FreshPoints, 'RAD': RAD, 'R3': R3} # each in the place of the pool

def _about(name, learn):
    "What is written beside the runs"
    return dict(part=name, data=name, arch='tanh_net', **describe(learn.dls))

def _run(name, kind, get_learner, methods, lr, seeds):
    "The runs, from a file, or made"
    path = results('an_equation')/f'{name}_{kind}.csv'
    if scale()=='tiny': seeds = seeds[:2]
    runs = stored(path, methods, seeds)
    if runs is not None: return runs
    return compare(get_learner, methods, seeds=seeds, lr=lr, compute=parts[name].compute, path=path, plot=False,
        measure='error', about=_about(name, get_learner()), tell_controls=False)

def _run_other(name, method, kind, lr, seeds):
    "The runs of one of `others`"
    equation = parts[name].equation
    def get_learner(): return learner_of(equation, others[method](equation))
    in_words = method.replace(' ', '_')
    return _run(name, f'{kind}_{in_words}', get_learner, {method: 'none'}, lr, seeds)

def best_rate(
    name:str, # One of `parts`
)->float:
    "The rate at which fresh points end with the least residual on points that are held out, the median of three seeds"
    tried = parts[name].rates if scale()!='tiny' else parts[name].rates[:1]
    runs_at = {lr: _run_other(name, 'fresh points', f'rate_{lr:g}', lr, [10,11,12]) for lr in tried}
    residual_at = {lr: runs.groupby('seed').valid_loss.last().median() for lr,runs in runs_at.items()}
    return min(residual_at, key=residual_at.get)

def run_best(
    name:str, # One of `parts`
)->pd.DataFrame: # A row for each epoch of each run
    "A pool, shuffled or chosen from, and its rivals, at the best rate"
    lr,seeds = best_rate(name),[0,1,2,3,4]
    pool = _run(name, 'best_pool', partial(learner_of, parts[name].equation), by_loss, lr, seeds)
    return pd.concat([pool, *(_run_other(name, method, 'best', lr, seeds) for method in others)], ignore_index=True)

def run_settings(name)->pd.DataFrame:
    "Other choices from the pool, on three seeds"
    return _run(name, 'best_settings', partial(learner_of, parts[name].equation), settings, best_rate(name), [0,1,2])

def run_slower(name)->pd.DataFrame:
    "A few methods, at half the best rate"
    lr,seeds = best_rate(name)/2,[0,1,2]
    pool = _run(name, 'half_pool', partial(learner_of, parts[name].equation), by_loss, lr, seeds)
    return pd.concat([pool, _run_other(name, 'fresh points', 'half', lr, seeds)], ignore_index=True)

class Learned(NamedTuple):
    "What a run ended with"
    solution:np.ndarray # On the grid, shape (times, places)
    # How often points of each part of the domain were trained, shape (parts of time, of place); empty for fresh points
    trained:np.ndarray

def _trained_where(learn):
    "How often points of each part of the domain were trained"
    if not learn.selection: return np.zeros(0)
    x,t = learn.dls.train_ds.points.T.numpy()
    low,high = learn.model.equation.low,learn.model.equation.high
    area = (low[1],high[1]),(low[0],high[0])
    return np.histogram2d(t, x, (20,40), area, weights=learn.selection.memory.picked.numpy())[0]

def _learned(name, method):
    "Train with seed 0, at the best rate"
    kept = {}
    def keep(learn):
        kept['learn'] = learn
        return {}
    part = parts[name]
    controls = [others[method](part.equation)] if method in others else []
    compare(partial(learner_of, part.equation, *controls), ['none' if controls else method], seeds=[0],
        compute=part.compute, lr=best_rate(name), plot=False, watch=keep, tell_controls=False)
    learn = kept['learn']
    solution = learn.model.solution(grid_of(part.equation)).reshape(101, -1).numpy()
    return Learned(solution, _trained_where(learn))

def learned(
    name:str, # One of `parts`
    method:str, # One of `by_loss` but 'none', or of `others`
)->Learned:
    "What a run ended with, from a file, or made"
    in_words = method.replace(' ', '_')
    path = results('an_equation')/f'{name}_{in_words}.npz'
    if not path.exists():
        arrays = {key: o.astype(np.float32) for key,o in _learned(name, method)._asdict().items()}
        np.savez_compressed(path, **arrays)
    with np.load(path) as stored: return Learned(**stored)

@call_parse
def main(
    name:str, # One of `parts`
    what:str='best', # best, slower, settings or pictures
):
    "Run an equation; what is stored is not run again"
    torch.set_num_threads(1)
    run = dict(best=run_best, slower=run_slower, settings=run_settings)
    if what in run: run[what](name)
    else:
        for method in pictured: learned(name, method)
