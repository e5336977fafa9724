"Gathered training does what a loop in plain PyTorch does, step by step"
import math

import pytest, torch
from fastai.callback.schedule import combined_cos
from fastai.optimizer import SGD
from goldens import EPOCHS, BS, N, Notes, numbered_learner, numbers_of, trained
from selback.all import SelectiveBackpropCallback, TopLossCallback
from selback.core.policies import History, cdf_power, top_k
from torch import nn
from torch.nn import functional as F

class Plain(nn.Module):
    "Without BatchNorm and dropout"
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x): return self.net(x[:,:4])

def plain_learner(n, cbs=()): return numbered_learner(list(cbs), n, model=Plain, lr=.5, opt_func=SGD)

def hardest(keep): return lambda scores: top_k(scores, keep).rows

def by_cdf(beta, hist_size, seed):
    "The draws of selective backprop, of its own random numbers"
    history,gen = History(hist_size),torch.Generator().manual_seed(seed ^ 0x5e1bac)
    return lambda scores: cdf_power(scores, history.push(scores), beta, gen).rows

def top(): return TopLossCallback(.3, gather=True)

def backprop(): return SelectiveBackpropCallback(beta=1, hist_size=64, seed=3)

# The callback, the oracle's choice, and how many items: the last loader batch of 124 has more than a step lacks
GATHERED = dict(
    top_loss=(top, lambda: hardest(.3), N),
    top_loss_124=(top, lambda: hardest(.3), 124),
    selective_backprop=(backprop, lambda: by_cdf(1, 64, 3), N))

class Oracle:
    "Gathered training; a step is noted as epoch, loader batch read last, rate, items, topped up?"
    def __init__(self, choose, n):
        learn = plain_learner(n)
        self.choose,self.model,self.dl = choose,learn.model,learn.dls.train
        self.opt = torch.optim.SGD(self.model.parameters(), lr=.5)
        self.rate = combined_cos(.25, .5/25, .5, .5/1e5)
        self.steps = []
        self.warm_up()
        for epoch in range(1, EPOCHS): self.gather(epoch)

    def warm_up(self):
        for j,(x,y) in enumerate(self.dl): self.step(0, j, x, y)

    def step(self, epoch, j, x, y, topped_up=False):
        self.opt.param_groups[0]['lr'] = lr = self.rate((epoch+j/len(self.dl))/EPOCHS)
        self.opt.zero_grad()
        F.cross_entropy(self.model(x), y).backward()
        self.opt.step()
        self.steps.append((epoch, j, lr, numbers_of(x), topped_up))

    def scores(self, x, y):
        self.model.eval()
        with torch.no_grad(): scores = F.cross_entropy(self.model(x), y, reduction='none')
        self.model.train()
        return scores

    def gather(self, epoch):
        "An epoch; a step that was announced is made"
        wait_x,wait_y = torch.zeros(0, 5),torch.zeros(0, dtype=torch.int64)
        for j,(x,y) in enumerate(self.dl):
            scores = self.scores(x, y)
            rows = self.choose(scores)
            wait_x,wait_y = torch.cat([wait_x, x[rows]]),torch.cat([wait_y, y[rows]])
            is_announced = len(wait_x)<BS
            if is_announced: continue
            self.step(epoch, j, wait_x[:BS], wait_y[:BS])
            wait_x,wait_y = wait_x[BS:],wait_y[BS:]

        others = [i for i in scores.argsort(descending=True).tolist() if i not in rows.tolist()]
        while len(wait_x) or is_announced: # the loader is exhausted; its last batch fills up
            is_announced = False
            more = others[:max(0, BS-len(wait_x))]
            last_x,last_y = torch.cat([wait_x[:BS], x[more]]),torch.cat([wait_y[:BS], y[more]])
            self.step(epoch, j, last_x, last_y, topped_up=bool(more))
            wait_x,wait_y = wait_x[BS:],wait_y[BS:]

def as_noted(step):
    "What is topped up has no order"
    epoch,j,lr,items,topped_up = step
    return epoch,j,pytest.approx(lr),sorted(items) if topped_up else items

def noted(learn, steps):
    "The steps of a learner, to compare with those of the oracle"
    unordered = [topped_up for *_,topped_up in steps]+[False]*len(learn.notes.steps)
    return [(epoch, j, lr, sorted(items) if is_unordered else items)
        for (epoch,j,lr,items,*_),is_unordered in zip(learn.notes.steps, unordered)]

@pytest.mark.law(4)
@pytest.mark.parametrize('method', GATHERED)
def test_gathering_is_that_of_the_oracle(method):
    make,chooser,n = GATHERED[method]
    oracle = Oracle(chooser(), n)
    learn = trained(plain_learner(n, [make(), Notes()]))
    assert noted(learn, oracle.steps)==[as_noted(step) for step in oracle.steps]
    for ours,theirs in zip(learn.model.parameters(), oracle.model.parameters()):
        torch.testing.assert_close(ours.data, theirs.data, rtol=0, atol=1e-6)

@pytest.mark.parametrize('method', GATHERED)
def test_the_oracle_fills_its_batches(method):
    "An epoch's steps are full ones but for the last, which is topped up as far as the last loader batch goes"
    _,chooser,n = GATHERED[method]
    steps,last_batch = Oracle(chooser(), n).steps,math.ceil(n/BS)-1
    for epoch in range(1, EPOCHS):
        *full,(_,j,_,items,topped_up) = [step for step in steps if step[0]==epoch]
        assert full
        assert all(len(step[3])==BS and not step[4] for step in full)
        assert len(set(items))==len(items)<=BS
        assert len(items)==BS or j==last_batch
        if n==124: assert topped_up and len(items)==BS
        else: assert topped_up==(j==8)
