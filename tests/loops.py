"One training by the callback and by a plain loop: which items train in each step, and with which weights"
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders, TfmdDL
from fastai.optimizer import OptimWrapper
from helpers import Numbered, class_data, learner_on, mlp, numbers, trained_only
from selback.all import *
from selback import functional as plain
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

N,BS,LR = 180,16,.3 # the last batch has 4 items

def dataset(n=N):
    "The last column of the inputs is the item's number"
    torch.manual_seed(0)
    x,y = class_data(n)
    return TensorDataset(torch.cat([x, torch.arange(n)[:,None]], 1), y)

def network():
    torch.manual_seed(1)
    return Numbered(mlp(dropout=0.))

def loader(): return DataLoader(dataset(), BS)

class Trained(NamedTuple):
    "A step"
    items:list # their numbers
    weights:list|None # None: all count alike

    @classmethod
    def of(cls, x, weight=None): return cls(numbers(x), None if weight is None else weight.tolist())

class Case(NamedTuple):
    "A method as a callback and for a plain loop"
    callback:type
    method:object
    options:dict # that both take
    of_pass:dict = {} # options of the callback, and of `chosen`
    n_whole:int = 0 # batches that come before the method chooses from any

CASES = dict(
    selective=Case(SelectiveBackpropCallback, plain.SelectiveBackprop, dict(beta=2, seed=0)),
    by_rank=Case(SelectiveBackpropCallback, plain.SelectiveBackprop, dict(beta=2, gather=False, seed=0)),
    top=Case(TopLossCallback, plain.TopLoss, dict(keep=.5)),
    top_gathered=Case(TopLossCallback, plain.TopLoss, dict(keep=.3, also_bottom=.1, gather=True)),
    share=Case(BatchLossFilterCallback, plain.BatchLossFilter, dict(min_loss_perc=.7)),
    random=Case(RandomSubsetCallback, plain.RandomSubset, dict(keep=.4, seed=0)),
    # the smoothed gain of sampling begins at 0: a first batch trains whole
    importance=Case(ImportanceSamplingCallback, plain.ImportanceSampling, dict(presample=2, seed=0), n_whole=1),
    ahead=Case(SelectiveBackpropCallback, plain.SelectiveBackprop, dict(beta=2, seed=0), dict(scorer=plain.Ahead(2))))

class Noted(Callback):
    "Notes what trains, behind the selection"
    order,run_valid = 60,False

    def __init__(self): self.steps = []

    def after_loss(self): self.steps.append(Trained.of(self.x, self.learn.selection.item_weight))

def by_callback(case, n_epoch=2, warmup=0):
    "The steps of a learner, and its network"
    own = dict(tau=0) if case.n_whole else {}
    noted,cb = Noted(),case.callback(warmup=warmup, **case.options, **case.of_pass, **own)
    of_train = TfmdDL(dataset(), bs=BS, num_workers=0)
    dls = DataLoaders(of_train, TfmdDL(dataset(32), bs=BS, num_workers=0))
    sgd = partial(OptimWrapper, opt=torch.optim.SGD)
    learn = learner_on(dls, network(), opt_func=sgd, cbs=[cb, noted], lr=LR)
    return noted.steps,trained_only(learn, n_epoch).model

def train_step(net, opt, x, y, weight=None):
    pred = net.train()(x)
    if weight is not None: pred = plain.weigh_grads(pred, weight)
    F.cross_entropy(pred, y).backward()
    opt.step()
    opt.zero_grad()
    return Trained.of(x, weight)

def score_of(case): return 'grad_bound' if case.n_whole else 'loss'

def fetched_early(batches):
    "Each but the first is asked for before the one before it trains"
    batches = iter(batches)
    last = next(batches)
    for batch in batches:
        yield last
        last = batch
    yield last

def whole_epoch(net, opt): return [train_step(net, opt, *batch) for batch in loader()]

def by_loop(case, n_epoch=2, warmup=0, fetch=iter):
    "The steps of a plain loop, and its network"
    net,method = network(),case.method(**case.options)
    opt = torch.optim.SGD(net.parameters(), LR)
    steps = []
    for epoch in range(n_epoch):
        if epoch<warmup:
            steps += whole_epoch(net, opt)
            continue
        batches = iter(loader())
        if epoch==0: steps += [train_step(net, opt, *batch) for batch in islice(batches, case.n_whole)]
        epoch_of = plain.chosen(batches, net, F.cross_entropy, method, score_of(case), **case.of_pass)
        steps += [train_step(net, opt, *batch) for batch in fetch(epoch_of)]
    return steps,net

def by_memory(policy, n_epoch=3):
    "The steps of a plain loop that chooses before loading, and its network"
    net = network()
    opt = torch.optim.SGD(net.parameters(), LR)
    memory = plain.ItemMemory(N)
    sampler = plain.MemorySampler(memory, policy, generator=torch.Generator().manual_seed(0))
    steps = []
    for _ in range(n_epoch):
        for x,y in DataLoader(dataset(), BS, sampler=sampler):
            idx = torch.tensor(numbers(x))
            losses = F.cross_entropy(net.train()(x), y, reduction='none')
            memory.note(idx, losses, picked=True)
            weight = None if sampler.weight is None else sampler.weight[idx]
            (losses if weight is None else losses*weight).mean().backward()
            opt.step()
            opt.zero_grad()
            steps.append(Trained.of(x, weight))
        memory.next_epoch()
    return steps,net

def assert_same(ours, theirs):
    "Equal items and weights in each step, and equal networks at the end"
    (steps,net),(wanted,other) = ours,theirs
    assert [step.items for step in steps]==[step.items for step in wanted]
    for step,of_other in zip(steps, wanted):
        assert (step.weights is None)==(of_other.weights is None)
        if step.weights: torch.testing.assert_close(torch.tensor(step.weights), torch.tensor(of_other.weights))
    a,b = net.state_dict(),other.state_dict()
    for name in a: torch.testing.assert_close(a[name], b[name])
