"What each of two processes does that `test_distributed.py` has train together"
from typing import NamedTuple

import torch
from torch import distributed as dist

from fastai.callback.core import Callback, CancelEpochException
from fastai.distributed import DistributedDL
from fastai.data.core import DataLoaders, TfmdDL
from fastcore.basics import patch
from helpers import *

@patch
def _broadcast(self:DistributedDL, t, rank): # fastai's needs a GPU
    t = torch.LongTensor(t)
    dist.broadcast(t, rank)
    return t.tolist()

# what is noted
def listed(tensor): return None if tensor is None else tensor.tolist()

def state_of(memory): return None if memory is None else memory.state_dict()

class Step(NamedTuple):
    "A training step; None where the selection says nothing"
    epoch:int # over both fits
    items:list
    idx:list|None # that the selection names
    weight:list|None

    @property
    def is_idle(self): return self.weight==[0.,0.]

class Witness(Callback):
    "Notes what trains, and what is remembered before each epoch"
    order,run_valid = 20,False

    def __init__(self):
        self.n = -1 # of the epoch, over both fits
        self.steps,self.lengths,self.memories = [],[],[]

    def before_epoch(self): self.n += 1

    def before_train(self):
        selection = self.learn.selection
        self.memories.append(state_of(selection.memory) if selection else None)

    def after_loss(self):
        cb = self.learn.selection
        idx,weight = (cb.item_idx,cb.item_weight) if cb else (None,None)
        self.steps.append(Step(self.n, numbers(self.x), listed(idx), listed(weight)))

    def after_train(self): self.lengths.append(self.n_iter)

    @property
    def notes(self): return {name: getattr(self, name) for name in ('steps','lengths','memories')}

# who trains
class OddOnes(BatchMethod):
    "Chooses nothing on one rank in every other batch"
    def begin_epoch(self): self.n = 0

    def choose(self, scores, now):
        self.n += 1
        return Chosen(torch.arange(3 if dist.get_rank()==self.n%2 else 0))

class OnlyTheFirst(BatchMethod):
    "Chooses on rank 0 only"
    def choose(self, scores, now): return Chosen(torch.arange(0 if dist.get_rank() else min(5, len(scores))))

class CancelEpoch(Callback):
    "Leaves the third epoch half-way"
    run_valid = False

    def before_batch(self):
        if self.learn.witness.n!=2 or self.learn.iter<3: return
        raise CancelEpochException

class LeaveThirds(EpochMethod):
    "Leaves out every third item, others in each epoch"
    def choose(self, scores, now): return Chosen(((now.idx+now.epoch)%3>0).nonzero()[:,0])

CASES = dict(
    plain=lambda: None,
    all_sb=lambda: SelectiveBackpropCallback(beta=0, warmup=0),
    all_stale=lambda: StaleLossCallback(beta=0, n=2, warmup=0),
    blf=lambda: BatchLossFilterCallback(.6),
    sb=lambda: SelectiveBackpropCallback(beta=1),
    composer=lambda: SelectiveBackpropCallback(beta=1, gather=False),
    stale=lambda: StaleLossCallback(beta=1, n=2),
    stale_batchwise=lambda: StaleLossCallback(beta=1, n=2, gather=False),
    top=lambda: TopLossCallback(.5),
    pooled=lambda: pooled(3, TopLossCallback(.6, gather=True)),
    tracked=lambda: TopLossCallback(.5, track_items=True),
    random=lambda: RandomSubsetCallback(.5),
    gathered_random=lambda: RandomSubsetCallback(.7, gather=True),
    random_before=lambda: RandomSubsetCallback(.37, before_loading=True),
    cancelled=lambda: StaleLossCallback(beta=1, n=2, gather=False),
    cancelled_sb=lambda: SelectiveBackpropCallback(keep=.4, warmup=0),
    favor_hard=lambda: FavorHardCallback(beta=1, max_rest=2, correct=1.),
    drop_easy=lambda: DropEasyCallback(drop=1., max_rest=1),
    info_long=lambda: InfoBatchCallback(prune=.7, delta=1.),
    seta=lambda: SeTaCallback(prune=.2, n_groups=3, window=.5, delta=1.),
    thirds=lambda: EpochSelection(LeaveThirds(), warmup=0),
    all_hard=lambda: FavorHardCallback(beta=0, warmup=0),
    all_own=lambda: PrioritizedSamplingCallback(uniform=1., warmup=0),
    prioritized=lambda: PrioritizedSamplingCallback(alpha=2., uniform=.3, correct=1., warmup=1),
    dropped_prioritized=lambda: PrioritizedSamplingCallback(uniform=.6, warmup=1),
    early=lambda: EarlyLossSamplingCallback(1, track_items=True),
    balanced=lambda: BalancedSamplingCallback(alpha=1., track_items=True),
    balanced_few=lambda: BalancedSamplingCallback([0]*90+['rare']*11, n=82),
    all_as_they_are=lambda: BalancedSamplingCallback(power=0.),
    importance=lambda: ImportanceSamplingCallback(presample=2, tau=1.02, score='loss'),
    info=lambda: InfoBatchCallback(delta=1.),
    empty=lambda: BatchSelection(OddOnes()),
    empty_gathered=lambda: BatchSelection(OddOnes(gather=True)),
    needy=lambda: BatchSelection(OnlyTheFirst(gather=True)),
    left_over=lambda: RandomSubsetCallback(34/101, before_loading=True),
    dropped=lambda: None,
    dropped_top=lambda: TopLossCallback(.5),
    dropped_sb=lambda: SelectiveBackpropCallback(beta=1),
    dropped_all=lambda: SelectiveBackpropCallback(beta=0, warmup=0))

def second_fit(name):
    "How many epochs follow the first three"
    if name in ('favor_hard','drop_easy','info_long'): return 5
    return 1

# the training
def data(n=101):
    "The last input is the item's number"
    torch.manual_seed(0)
    x,y = class_data(n)
    y[::7] = (y[::7]+1)%3
    return torch.cat([x, torch.arange(n)[:,None].float()], 1),y

def loaders_of(name):
    "Of 90 items each of two ranks has 45, which are 5 full batches of 8; the loader that drops the last says 6"
    dropped = name.startswith('dropped')
    x,y = data(90 if dropped else 101)
    train,valid = TensorDataset(x, y),TensorDataset(x[:16], y[:16])
    set_seed(dist.get_rank()) # their own random numbers, but the same weights
    of_train = TfmdDL(train, bs=8, shuffle=True, drop_last=dropped, num_workers=0)
    return DataLoaders(of_train, TfmdDL(valid, bs=8, num_workers=0))

def train(name):
    dls,witness,cb = loaders_of(name),Witness(),CASES[name]()
    cbs = [witness] if cb is None else [cb, witness]
    if name.startswith('cancelled'): cbs.append(CancelEpoch())

    torch.manual_seed(1)
    learn = learner_on(dls, Numbered(), lr=.05, cbs=cbs)
    torch.manual_seed(dist.get_rank())
    with learn.no_bar(),learn.no_logging(),learn.distrib_ctx(sync_bn=False):
        learn.fit(3)
        learn.fit(second_fit(name))

    notes = dict(witness.notes, weights=weights(learn))
    return notes if cb is None else dict(notes, memory=state_of(cb.memory), stats=cb.stats)

def train_all(out, rank):
    for name in CASES: torch.save(train(name), out/f'{name}_{rank}.pt')
