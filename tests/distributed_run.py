"What each of two processes does that `test_distributed.py` has train together"
import torch
from torch import distributed as dist

from fastai.callback.core import Callback, CancelEpochException
from fastai.distributed import DistributedDL
from fastai.data.core import DataLoaders, TfmdDL
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from helpers import *
from selback.methods.replay_choices import Choices, fingerprint

def on_cpu(self, t, rank):
    t = torch.LongTensor(t)
    dist.broadcast(t, rank)
    orders.append(t.tolist())
    return t.tolist()
orders = [] # that rank 0 has told of; in each epoch its own comes first
DistributedDL._broadcast = on_cpu # fastai's needs a GPU

class Witness(Callback):
    "Which items train, and with which weights; who hands out the batches; an epoch's own order, and what is remembered before it"
    order,run_valid = 20,False
    def __init__(self): self.steps,self.n,self.loaders,self.lengths,self.orders,self.memories = [],-1,set(),[],[],[]
    def before_epoch(self):
        self.n += 1 # over both fits
        orders.clear()
    def before_train(self):
        self.orders.append(orders[0] if orders else None)
        self.memories.append(self.learn.selection.memory.state_dict() if self.learn.selection and self.learn.selection.memory else None)
    def before_batch(self):
        feed = getattr(self.learn.selection, 'feed', None)
        self.loaders.add((isinstance(self.learn.dl, DistributedDL), feed is None or self.learn.dl is feed))
    def after_loss(self):
        cb = self.learn.selection
        idx,weight = (cb.item_idx,cb.item_weight) if cb else (None,None)
        self.steps.append((self.n, numbers(self.x), None if idx is None else idx.tolist(), None if weight is None else weight.tolist()))
    def after_train(self): self.lengths.append(self.n_iter)

class OddOnes(SelectionCallback):
    "Chooses nothing on one rank in every other batch"
    def choose(self, scores): return Chosen(torch.arange(0 if dist.get_rank()==self.iter%2 else 3))

class OnlyTheFirst(SelectionCallback):
    "Chooses on rank 0 only"
    def choose(self, scores): return Chosen(torch.arange(0 if dist.get_rank() else min(5, len(scores))))

class CancelEpoch(Callback):
    "Leaves the third epoch half-way"
    run_valid = False
    def before_batch(self):
        if self.learn.witness.n==2 and self.learn.iter>=3: raise CancelEpochException

CASES = dict(plain=lambda: None, all_sb=lambda: SelectiveBackpropCallback(beta=0, warmup=0), all_stale=lambda: StaleLossCallback(beta=0, n=2, warmup=0), blf=lambda: BatchLossFilterCallback(.6), sb=lambda: SelectiveBackpropCallback(beta=1), composer=lambda: SelectiveBackpropCallback(beta=1, gather=False),
    stale=lambda: StaleLossCallback(beta=1, n=2), stale_batchwise=lambda: StaleLossCallback(beta=1, n=2, gather=False), top=lambda: TopLossCallback(.5), pooled=lambda: TopLossCallback(.6, gather=True, presample=3),
    guarded=lambda: TopLossCallback(.5, noise_quantile=.5), random=lambda: RandomSubsetCallback(.5), gathered_random=lambda: RandomSubsetCallback(.7, gather=True), random_before=lambda: RandomSubsetCallback(.37, before_loading=True),
    cancelled=lambda: StaleLossCallback(beta=1, n=2, gather=False), cancelled_sb=lambda: SelectiveBackpropCallback(keep=.4, warmup=0), favor_hard=lambda: FavorHardCallback(beta=1, max_rest=2, correct=1.), drop_easy=lambda: DropEasyCallback(drop=1., max_rest=1), info_long=lambda: InfoBatchCallback(prune=.7, delta=1.), seta=lambda: SeTaCallback(prune=.2, n_groups=3, window=.5, delta=1.),
    replayed=lambda: ReplayChoicesCallback(Choices(torch.arange(101).add(torch.arange(3)[:,None])%3>0, fingerprint(TensorDataset(*data())))),
    all_hard=lambda: FavorHardCallback(beta=0, warmup=0), all_own=lambda: PrioritizedSamplingCallback(uniform=1., warmup=0), prioritized=lambda: PrioritizedSamplingCallback(alpha=2., uniform=.3, correct=1., warmup=1),
    dropped_prioritized=lambda: PrioritizedSamplingCallback(uniform=.6, warmup=1), importance=lambda: ImportanceSamplingCallback(presample=2, tau=1.02, score='loss'), info=lambda: InfoBatchCallback(delta=1.), empty=OddOnes,
    empty_gathered=lambda: OddOnes(gather=True), needy=lambda: OnlyTheFirst(gather=True), guarded_sb=lambda: SelectiveBackpropCallback(beta=1, noise_quantile=.5), left_over=lambda: RandomSubsetCallback(34/101, before_loading=True),
    dropped=lambda: None, dropped_top=lambda: TopLossCallback(.5), dropped_sb=lambda: SelectiveBackpropCallback(beta=1), dropped_all=lambda: SelectiveBackpropCallback(beta=0, warmup=0))

def data(n=101):
    torch.manual_seed(0)
    x,y = class_data(n)
    y[::7] = (y[::7]+1)%3
    return torch.cat([x, torch.arange(n)[:,None].float()], 1),y

def train(name):
    dropped = name.startswith('dropped') # of 90 items each of two ranks has 45, which are 5 full batches of 8; the loader says 6
    x,y = data(90 if dropped else 101)
    train,valid = TensorDataset(x, y),TensorDataset(x[:16], y[:16])
    set_seed(dist.get_rank()) # their own random numbers, but the same weights
    dls = DataLoaders(TfmdDL(train, bs=8, shuffle=True, drop_last=dropped, num_workers=0), TfmdDL(valid, bs=8, num_workers=0))
    witness,cb,cbs = Witness(),CASES[name](),[CancelEpoch()] if name.startswith('cancelled') else []
    torch.manual_seed(1)
    learn = Learner(dls, Numbered(), loss_func=CrossEntropyLossFlat(), lr=.05, cbs=[o for o in (cb,witness) if o is not None]+cbs)
    torch.manual_seed(dist.get_rank())
    with learn.no_bar(),learn.no_logging(),learn.distrib_ctx(sync_bn=False): learn.fit(3); learn.fit(3 if name.startswith('guarded') else 5 if name in ('favor_hard','drop_easy','info_long') else 1)
    res = dict(steps=witness.steps, weights=weights(learn), loaders=witness.loaders, lengths=witness.lengths, orders=witness.orders, memories=witness.memories)
    return res if cb is None else dict(res, memory=None if cb.memory is None else cb.memory.state_dict(), stats=cb.stats, left=cb.report.left, waiting=n_waiting(cb))

def train_all(out, rank):
    for name in CASES: torch.save(train(name), out/f'{name}_{rank}.pt')
