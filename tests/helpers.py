"Small learners that train in milliseconds, and the methods under test"
import inspect, os, random, signal, sys, time, traceback, warnings
from collections import Counter
from datetime import timedelta
from functools import partial

import numpy as np, torch
from fastai.callback.core import Callback
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.mixup import MixUp
from fastai.data.core import DataLoaders, TfmdDL
from fastai.learner import Learner
from fastai.losses import BCEWithLogitsLossFlat, CrossEntropyLossFlat, MSELossFlat
from fastai.torch_core import TensorCategory, TensorImage, default_device, set_seed
from fastai.vision.augment import aug_transforms
from fastcore.foundation import L
from selback.core.batches import as_tensors, map_tensors
from selback.callback.selection import known_methods
from selback.all import *
from selback.bench.datasets import TensorItems
from torch import distributed as dist, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

class CPUMixedPrecision(MixedPrecision):
    "fastai's mixed precision in bf16, which works on GPUs only, on a CPU"
    name = 'mixed_precision'
    def __init__(self): super().__init__('bf16')
    def before_fit(self):
        with warnings.catch_warnings():
            warnings.simplefilter('ignore') # that there is no GPU
            super().before_fit()
        self.autocast = torch.autocast('cpu', dtype=torch.bfloat16)

def methods():
    "Every method of the package that needs nothing to choose by"
    def is_complete(c): return all(p.default is not p.empty for p in inspect.signature(c).parameters.values() if p.kind!=p.VAR_KEYWORD)
    return [c for c in known_methods().values() if c.__module__.startswith('selback.methods.') and is_complete(c)]

def one_liner(cls): return next(name for name,c in known_methods().items() if c is cls)

def leaves_out(cls):
    "Does a method train on fewer items, or on others in their place?"
    return cls is not PrioritizedSamplingCallback

def quiet_fit(learn, n_epoch=2, fit='fit', **kwargs):
    with learn.no_bar(),learn.no_logging(): getattr(learn, fit)(n_epoch, **kwargs)
    return learn

def trained_only(learn, n_epoch, bs=None, **kwargs):
    "A fit without validation, in batches of another size"
    learn._do_epoch_validate = lambda *args: None
    if bs: learn.dls.loaders[0] = learn.dls.train.new(bs=bs)
    return quiet_fit(learn, n_epoch, **kwargs)

def dls_of(x, y, bs=16, n_valid=32, shuffle=True, drop_last=False, num_workers=0, persistent_workers=False, **kwargs):
    train,valid = TensorDataset(x[n_valid:], y[n_valid:]),TensorDataset(x[:n_valid], y[:n_valid])
    workers = dict(num_workers=num_workers, persistent_workers=persistent_workers)
    return DataLoaders(TfmdDL(train, bs=bs, shuffle=shuffle, drop_last=drop_last, **workers, **kwargs), TfmdDL(valid, bs=bs, num_workers=0, **kwargs))

def class_data(n=132, classes=3):
    x = torch.randn(n, 4)
    return x,(x[:,0]+.5*torch.randn(n)).mul(2).round().long().clamp(-1, classes-2)+1

def mlp(n_out=3, n_in=4): return nn.Sequential(nn.Linear(n_in, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(.3), nn.Linear(8, n_out))

def table_learner(seed=0, cbs=None, bs=16, drop_last=False, loss_func=None, n=132, n_valid=32, **kwargs):
    "BatchNorm, dropout, and (without `drop_last`) a last batch of 4 items"
    set_seed(seed)
    return Learner(dls_of(*class_data(n), bs=bs, drop_last=drop_last, n_valid=n_valid), mlp(), loss_func=loss_func or CrossEntropyLossFlat(), cbs=cbs, lr=1e-2, **kwargs)

class Numbered(nn.Module):
    "Does not look at the last column"
    def __init__(self, net=None): super().__init__(); self.net = net or mlp()
    def forward(self, x): return self.net(x[:,:4])

def numbered_learner(seed=0, n=132, bs=16, cbs=None, net=None, **kwargs):
    "The last input column is the item's number in the training set"
    set_seed(seed)
    x,y = class_data(n)
    x = torch.cat([x, torch.arange(n)[:,None]-32.], 1)
    return Learner(dls_of(x, y, bs=bs, **kwargs), Numbered(net), loss_func=CrossEntropyLossFlat(), cbs=cbs, lr=1e-2)

def numbers(x): return x[:,-1].long().tolist()

class Diary(Callback):
    "Notes, behind the selection, the items, weights and losses of each batch, epoch by epoch"
    order,run_valid = 60,False
    def before_fit(self): self.epochs = []
    def before_train(self): self.epochs.append([])
    def after_loss(self):
        losses,weight = cross_entropy(self.pred.detach(), self.y, reduction='none'),self.learn.selection.item_weight
        self.epochs[-1].append((numbers(self.x), [1.]*len(losses) if weight is None else weight.tolist(), losses.tolist()))

def reads_and_runs(learn, n_epoch):
    "How often each item is read in a fit, how often the model runs, and the diary's epochs; an epoch before it fills the memory"
    read,runs = Counter(),[]
    class Counted(TensorDataset):
        def __getitem__(self, i):
            read[int(i)] += 1
            return super().__getitem__(i)
    learn.dls.train.dataset.__class__ = Counted
    learn.model.register_forward_hook(lambda *args: runs.append(1))
    trained_only(learn, 1)
    read.clear()
    runs.clear()
    epochs = trained_only(learn, n_epoch).diary.epochs
    return read,len(runs),epochs

def items_of(epoch): return [i for batch,*_ in epoch for i in batch]

def by_hand(net, x, y, epochs, lr, ema=.9):
    "Train on the same batches in plain PyTorch; what a memory has to say of each item then"
    table,opt = [dict(loss=float('nan'), ewma=float('nan'), seen=0, picked=0, rested=0) for _ in y],torch.optim.SGD(net.parameters(), lr)
    for epoch in epochs:
        for batch,weight,_ in epoch:
            losses = cross_entropy(net(x[batch]), y[batch], reduction='none')
            opt.zero_grad()
            (losses*torch.tensor(weight)).mean().backward()
            opt.step()
            for i,l in zip(batch, losses.tolist()):
                o = table[i]
                o.update(loss=l, ewma=ema*o['ewma']+(1-ema)*l if o['seen'] else l, seen=o['seen']+1, picked=o['picked']+1, rested=0)
        for o in table: o['rested'] += 1
    return table

class Spy(Callback):
    "Notes, behind the selection, which items train"
    order,run_valid = 20,False
    def before_fit(self): self.batches = []
    def after_loss(self): self.batches.append(numbers(self.x))

def mixup_learner(seed=0): return table_learner(seed, cbs=MixUp(.4))

def image_learner(seed=0, cbs=None, n=52, **kwargs):
    "`TensorImage` and fastai augmentation"
    set_seed(seed)
    x,y = torch.rand(n, 3, 12, 12),torch.randint(0, 3, (n,))
    dls = DataLoaders.from_dsets(TensorItems(x[16:], y[16:], 0), TensorItems(x[:16], y[:16], 1), bs=8, num_workers=0,
        after_batch=aug_transforms(max_rotate=5.), drop_last=False)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    return Learner(dls, model, loss_func=CrossEntropyLossFlat(), cbs=cbs, lr=1e-2, **kwargs)

def regression_learner(seed=0):
    from fastai.test_utils import synth_learner
    set_seed(seed)
    return synth_learner(n_trn=5, n_val=1)

LEARNERS = dict(table=table_learner, mixup=mixup_learner, image=image_learner, regression=regression_learner)

def weights(learn): return {k: v.clone() for k,v in learn.model.state_dict().items()}

def random_states():
    _,key,*more = np.random.get_state()
    return random.getstate(),key.tobytes(),more,torch.get_rng_state().numpy().tobytes()

def same(a, b): return a.keys()==b.keys() and all(torch.equal(a[k], b[k]) for k in a)

# Two processes
def on_two_ranks(work, out, seconds=180):
    "Call `work(rank)` in two forks of this process, which has imported all there is; what takes longer is a deadlock"
    children = [os.fork() or as_rank(work, rank, out) for rank in range(2)]
    until,open_ones = time.time()+seconds,set(children)
    while open_ones and time.time()<until:
        done = [child for child in open_ones if os.waitpid(child, os.WNOHANG)[0]]
        open_ones -= set(done)
        if not done: time.sleep(.02)
    for child in open_ones:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    ends = [(out/f'rank_{rank}.txt').read_text() if (out/f'rank_{rank}.txt').exists() else 'died' for rank in range(2)]
    assert not open_ones and ends==['done']*2, f'{len(open_ones)} of 2 processes hang: {ends}'

def as_rank(work, rank, out):
    "Be one of two processes that train together, and nothing else after it"
    said = 'done'
    try:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE='2', LOCAL_WORLD_SIZE='2', MASTER_ADDR='localhost', MASTER_PORT='0', ACCELERATE_USE_CPU='1')
        default_device(False)
        torch.set_num_threads(1)
        dist.init_process_group('gloo', init_method=f'file://{out}/store', rank=rank, world_size=2, timeout=timedelta(seconds=60))
        work(rank)
        dist.destroy_process_group()
    except BaseException: said = traceback.format_exc()
    finally:
        (out/f'rank_{rank}.txt').write_text(said)
        measured = sys.modules['coverage'].Coverage.current() if 'coverage' in sys.modules else None
        if measured: measured.save()
        os._exit(0)
