"What the benchmarks share: learners on random images, steps timed in turn, and CSV files that say where they come from"
import argparse, platform
from pathlib import Path

import fastai, pandas as pd, torch
from fastai.callback.core import Callback, CancelBatchException
from fastai.data.core import DataLoaders, TfmdDL
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from selback.all import *
from selback.compare import get_model, machine
from selback.cost import now
from selback.datasets import cifar_resnet18
from selback.items import take
from torch import nn
from torch.utils.data import TensorDataset

def arguments(description, **more):
    "The command line"
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument('--out', default='results/benchmarks', help='folder for the CSV files')
    parser.add_argument('--repeats', type=int, default=9, help='paired repeats of each measurement')
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    for name,kwargs in more.items(): parser.add_argument(f'--{name}', **kwargs)
    args = parser.parse_args()
    torch.manual_seed(0)
    return args

def save(rows, name, args, repeats=None, keep=()):
    "Write rows as CSV, with machine and versions in each; rows of the learners to `keep` stay"
    path = Path(args.out)/f'{name}_{torch.device(args.device).type}.csv'
    path.parent.mkdir(parents=True, exist_ok=True)
    about = dict(machine=machine(args.device), repeats=repeats or args.repeats, python=platform.python_version(), torch=torch.__version__, fastai=fastai.__version__)
    df = pd.DataFrame(rows).assign(**about)
    if keep: df = pd.concat([pd.read_csv(path).query('learner in @keep'), df])
    df.to_csv(path, index=False, float_format='%.6g')
    print(f'wrote {path}', flush=True)
    return df

NETS = dict(resnet18=lambda: get_model('resnet18', 10), cifar_resnet18=lambda: cifar_resnet18(10), small_resnet=lambda: get_model('small_resnet', 10))

def image_learner(net, bs, n_batches, device='cpu', cbs=None, size=32):
    "A learner on random images, which are in memory already"
    x,y = torch.randn(min(n_batches, 4)*bs, 3, size, size),torch.randint(0, 10, (min(n_batches, 4)*bs,))
    idx = torch.arange(n_batches*bs)%len(x)
    ds = Indexed(x.to(device), y.to(device), idx)
    dls = DataLoaders(TfmdDL(ds, bs=bs, num_workers=0, create_batch=ds.rows), TfmdDL(ds, bs=bs, num_workers=0, create_batch=ds.rows), device=torch.device(device))
    learn = Learner(dls, NETS[net]().to(device), loss_func=CrossEntropyLossFlat(), lr=1e-3, cbs=cbs)
    learn._do_epoch_validate = lambda *args: None
    return learn

class Indexed:
    "A dataset of row numbers: a batch is one indexing operation, so that loading takes no time"
    def __init__(self, x, y, idx): self.x,self.y,self.idx = x,y,idx
    def __len__(self): return len(self.idx)
    def __getitem__(self, i): return int(self.idx[i])
    def rows(self, b): return self.x[b],self.y[b]

class Turns(Callback):
    "Times kinds of steps in turn: plain ones, smaller ones, selecting ones, and the scoring pass by itself"
    order = -60
    def __init__(self, kinds, repeats, device): self.turns,self.device,self.rows = [(r,k) for r in range(-2, repeats) for k in kinds],device,[] # two to warm up
    @property
    def kind(self): return self.turns[self.iter][1]

    def before_fit(self):
        self.cb = self.learn.selection
        if self.cb is None: return
        self.cb.window.is_on = lambda *args: self.kind=='select'
        self.cb.governor.auto = False

    def before_batch(self):
        self.repeat,kind = self.turns[self.iter]
        if isinstance(kind, float): self.learn.xb,self.learn.yb = take((self.xb, self.yb), slice(0, int(len(self.y)*kind)))
        self.start = now(self.device)
        if kind!='score': return
        self.cb.score_items()
        self.stop()
        self.learn.yb = ()
        raise CancelBatchException

    def stop(self):
        if self.start is not None: self.rows.append(dict(kind=self.kind, repeat=self.repeat, seconds=now(self.device)-self.start, trained=len(self.yb[0]) if len(self.yb) else 0))
        self.start = None

class Stop(Callback):
    order = 100
    def after_batch(self): self.turns_cb.stop()

def in_turn(net, bs, cb, kinds, args, size=32):
    "Mean seconds of each kind of step in each repeat, and as `trained` the share of a batch that selecting steps trained"
    turns = Turns(kinds, args.repeats, args.device)
    stop = Stop()
    stop.turns_cb = turns
    learn = image_learner(net, bs, len(turns.turns), args.device, [turns, stop, *([cb] if cb else [])], size)
    with learn.no_bar(),learn.no_logging(): learn.fit(1)
    rows = pd.DataFrame(turns.rows).query('repeat>=0')
    means = rows.assign(kind=rows.kind.astype(str)).groupby(['kind','repeat'], sort=False)[['seconds','trained']].mean().unstack(0)
    return means.seconds.assign(trained=means.trained['select']/bs if 'select' in means.trained else 1.)
