"Calls as users write them: `make check` has pyright read their types; nothing runs this file"
import torch
from fastai.vision.all import DataLoader, Learner
from selback.all import *
from selback.functional import MemorySampler, chosen
from torch import Tensor, nn

def trains(learn:Learner)->Learner:
    learn.favor_hard(beta=2) # fastai's learner takes any name: what is checked are the classes
    return learn.add_cbs([StaleLossCallback(beta=2, n=3), ScaleLR()])

def attaches(learn:Learner)->Learner:
    set_selection(learn, BatchLossFilterCallback(.9, min_sample_perc=.1))
    return learn.add_cb(InfoBatchCallback(prune=.5))

def chooses(losses:Tensor)->Tensor:
    chosen_rows:Chosen = top_k(losses, .5)
    weight:Tensor|None = loss_share(losses, min_loss_perc=.9).weight
    prob:Tensor = rank_inclusion(losses, beta=2.)
    assert weight is None and len(prob)==len(losses)
    return chosen_rows.rows

def in_a_loop(loader:DataLoader, model:nn.Module, opt:torch.optim.Optimizer):
    loss_func = nn.CrossEntropyLoss()
    for x,y in chosen(loader, model, loss_func, TopLoss(keep=.5)):
        loss_func(model(x), y).backward()
        opt.step()

def by_a_sampler(n:int)->int:
    memory = ItemMemory(n, ema=.5)
    memory.note(torch.arange(n), torch.rand(n))
    sampler = MemorySampler(memory, FavorHard(beta=1.))
    losses:Tensor = item_losses(nn.MSELoss(), torch.zeros(n, 2), torch.zeros(n, 2))
    return len(sampler)+len(losses)

class EveryThird(BatchMethod):
    "A method of one's own"
    def choose(self, scores:Tensor, now:Now)->Chosen: return Chosen(torch.arange(0, len(scores), 3))

def attaches_own(learn:Learner)->Learner: return learn.add_cb(BatchSelection(EveryThird(gather=True), warmup=0))

def is_refused(losses:Tensor):
    "What must not pass, or the types say nothing"
    top_k(losses, 'half') # pyright: ignore[reportArgumentType]
    StaleLoss(beta='no') # pyright: ignore[reportArgumentType]
    MemorySampler() # pyright: ignore[reportCallIssue]
