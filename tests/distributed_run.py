"Run by `test_distributed.py` in each of several processes: trains and saves what happened"
import os, sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist

from fastai.callback.core import Callback, CancelEpochException
from fastai.distributed import DistributedDL
from fastai.data.core import DataLoaders, TfmdDL
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from helpers import *

def on_cpu(self, t, rank):
    t = torch.LongTensor(t)
    dist.broadcast(t, rank)
    return t.tolist()
DistributedDL._broadcast = on_cpu

class Witness(Callback):
    "Which items train, and with which weights"
    order,run_valid = 20,False
    def __init__(self): self.steps,self.n = [],-1
    def before_epoch(self): self.n += 1 # over both fits
    def after_loss(self):
        cb = self.learn.selection
        idx,weight = (None,None) if cb is None else (cb.item_idx,cb.item_weight)
        self.steps.append((self.n, self.x[:,-1].long().tolist(), None if idx is None else idx.tolist(), None if weight is None else weight.tolist()))

class Head(nn.Module):
    def __init__(self): super().__init__(); self.net = mlp()
    def forward(self, x): return self.net(x[:,:4])

class OddOnes(SelectionCallback):
    "Chooses nothing on one rank in every other batch"
    def choose(self, scores): return Chosen(torch.arange(0 if dist.get_rank()==self.iter%2 else 3))

CASES = dict(plain=lambda: None, all_sb=lambda: SelectiveBackpropCallback(beta=0, warmup=0), all_stale=lambda: StaleLossCallback(beta=0, n=2, warmup=0), blf=lambda: BatchLossFilterCallback(.6), sb=lambda: SelectiveBackpropCallback(beta=1), composer=lambda: SelectiveBackpropCallback(beta=1, gather=False),
    stale=lambda: StaleLossCallback(beta=1, n=2), stale_batchwise=lambda: StaleLossCallback(beta=1, n=2, gather=False), top=lambda: TopLossCallback(.5),
    guarded=lambda: TopLossCallback(.5, max_quantile=.5), random=lambda: RandomSubsetCallback(.5), random_before=lambda: RandomSubsetCallback(.37, before_loading=True),
    cancelled=lambda: StaleLossCallback(beta=1, n=2, gather=False), importance=lambda: ImportanceSamplingCallback(presample=2, tau=1.02), info=lambda: InfoBatchCallback(), empty=OddOnes,
    empty_gathered=lambda: OddOnes(gather=True), guarded_sb=lambda: SelectiveBackpropCallback(beta=1, max_quantile=.5), left_over=lambda: RandomSubsetCallback(34/101, before_loading=True))

class CancelEpoch(Callback):
    "Leaves the third epoch half-way"
    run_valid = False
    def before_batch(self):
        if self.learn.witness.n==2 and self.iter==3: raise CancelEpochException

def data(n=101):
    torch.manual_seed(0)
    x,y = class_data(n)
    y[::7] = (y[::7]+1)%3
    return torch.cat([x, torch.arange(n)[:,None].float()], 1),y

def train(make, cbs=(), n_epoch=6):
    x,y = data()
    train,valid = TensorDataset(x, y),TensorDataset(x[:16], y[:16])
    set_seed(dist.get_rank()) # their own random numbers, but the same weights
    dls = DataLoaders(TfmdDL(train, bs=8, shuffle=True, num_workers=0), TfmdDL(valid, bs=8, num_workers=0))
    witness,cb = Witness(),make()
    torch.manual_seed(1)
    learn = Learner(dls, Head(), loss_func=CrossEntropyLossFlat(), lr=.05, cbs=[o for o in (cb,witness) if o is not None]+list(cbs))
    torch.manual_seed(dist.get_rank())
    with learn.no_bar(),learn.no_logging(),learn.distrib_ctx(sync_bn=False): learn.fit(n_epoch-2); learn.fit(2)
    res = dict(steps=witness.steps, weights=weights(learn))
    return res if cb is None else dict(res, memory=None if cb.memory is None else cb.memory.state_dict(), stats=cb.stats, left=len(cb.waiting))

if __name__=='__main__':
    torch.set_num_threads(1)
    dist.init_process_group('gloo', timeout=timedelta(seconds=60))
    for name in sys.argv[2:] or CASES:
        torch.save(train(CASES[name], [CancelEpoch()] if name=='cancelled' else []), Path(sys.argv[1])/f'{name}_{dist.get_rank()}.pt')
    dist.destroy_process_group()
