"""What the benchmarks share: learners on random images, steps timed in turn, and CSV files that say where they come
from"""
import argparse, os, platform, sys
from pathlib import Path

import fastai, pandas as pd, torch
from fastai.callback.core import Callback, CancelBatchException
from fastai.data.core import DataLoaders, TfmdDL
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from selback.core.batches import Batch, take
from selback.bench.compute import seconds_now as clock
from selback.all import *
from selback.bench.datasets import cifar_resnet18
from selback.bench.compare import get_model, machine
from torch import nn

MALLOC = dict( # bytes; glibc takes no larger first one
    MALLOC_MMAP_THRESHOLD_=str(2**25),
    MALLOC_TRIM_THRESHOLD_=str(2**30))

def steady_memory():
    "Start anew with an allocator that keeps what is freed: page faults, up to 7,000 a step, move figures by a tenth"
    is_set = MALLOC.items()<=os.environ.items()
    if not is_set: os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | MALLOC)
    print(*(f'{k}={v}' for k,v in MALLOC.items()), flush=True)

def arguments(description, **more):
    "The command line"
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument('--out', default='results/benchmarks', help='folder for the CSV files')
    parser.add_argument('--repeats', type=int, default=9, help='paired repeats of each measurement')
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    for name,kwargs in more.items(): parser.add_argument(f'--{name}', **kwargs)
    args = parser.parse_args()
    steady_memory()
    torch.manual_seed(0)
    return args

def save(rows, name, args, repeats=None, keep=()):
    "Write rows as CSV, with machine, versions and allocator in each; rows of the learners to `keep` stay"
    path = Path(args.out)/f'{name}_{torch.device(args.device).type}.csv'
    path.parent.mkdir(parents=True, exist_ok=True)
    about = dict(
        machine=machine(args.device),
        repeats=repeats or args.repeats,
        python=platform.python_version(),
        torch=torch.__version__,
        fastai=fastai.__version__,
        malloc=' '.join(f'{k}={v}' for k,v in MALLOC.items()))
    df = pd.DataFrame(rows)
    df = df.assign(**{name: value for name,value in about.items() if name not in df}) # rows may have their own repeats
    if keep: df = pd.concat([pd.read_csv(path).query('learner in @keep'), df])
    df.to_csv(path, index=False, float_format='%.6g')
    print(f'wrote {path}', flush=True)
    return df

NETS = dict(
    resnet18=lambda: get_model('resnet18', 10),
    cifar_resnet18=lambda: cifar_resnet18(10),
    small_resnet=lambda: get_model('small_resnet', 10))

def image_data(bs, n_batches, device='cpu', size=32):
    "Random images, which are in memory already"
    n_images = min(n_batches, 4)*bs
    x = torch.randn(n_images, 3, size, size)
    y = torch.randint(0, 10, (n_images,))
    return Indexed(x.to(device), y.to(device), torch.arange(n_batches*bs)%n_images)

def learner_of(ds, bs, model, device='cpu', cbs=None):
    "A learner of a model and an `Indexed` dataset, without validation"
    train,valid = (TfmdDL(ds, bs=bs, num_workers=0, create_batch=ds.rows) for _ in range(2))
    dls = DataLoaders(train, valid, device=torch.device(device))
    learn = Learner(dls, model.to(device), loss_func=CrossEntropyLossFlat(), lr=1e-3, cbs=cbs)
    learn._do_epoch_validate = lambda *args: None
    return learn

def image_learner(net, bs, n_batches, device='cpu', cbs=None, size=32):
    "A learner on random images"
    return learner_of(image_data(bs, n_batches, device, size), bs, NETS[net](), device, cbs)

class Indexed:
    "A dataset of row numbers: a batch is one indexing operation, so that loading takes no time"
    def __init__(self, x, y, idx): self.x,self.y,self.idx = x,y,idx
    def __len__(self): return len(self.idx)
    def __getitem__(self, i): return int(self.idx[i])
    def rows(self, b): return self.x[b],self.y[b]

class TimedReads:
    "A loader's batches, and the seconds that they took"
    def __init__(self, batches, clock):
        self.batches,self.clock = batches,clock
        self.n,self.seconds = 0,0. # batches that were asked for

    def __iter__(self): return self

    def __next__(self):
        start = self.clock()
        self.n += 1
        try: return next(self.batches)
        finally: self.seconds += self.clock()-start

def time_steps(cb, clock, note):
    "Have the seconds noted in which a selection makes each step of a loader's batches, less those of the loader"
    reads,steps = cb.reads,cb.steps
    def timed(dl):
        read = TimedReads(reads(dl), clock)
        cb.reads = lambda dl: read
        running = steps(dl)
        while True:
            start,waited = clock(),read.seconds
            step = next(running, None)
            note(clock()-start-(read.seconds-waited))
            if step is None: return
            yield step
            step = None # it may be large
    cb.steps = timed

class Turns(Callback):
    "Times kinds of steps in turn, by batches of the loader: plain, smaller and selecting ones, and scoring by itself"
    order = BatchSelection.order+1 # no scored batch is copied for it

    def __init__(self, kinds, repeats, device):
        self.turns = [(repeat,kind) for repeat in range(-2, repeats) for kind in kinds] # two repeats to warm up
        self.device,self.rows = device,[]
        self.start = None # of the step that is being timed

    def before_fit(self):
        self.cb = self.learn.selection
        self.cb.window.is_on = lambda *args: self.kind=='select'
        reads = self.cb.reads
        self.cb.reads = lambda dl: self.begun(reads(dl))

    @property
    def kind(self): return self.rows[-1]['kind']

    def begun(self, batches):
        "Each batch of the loader, with which a turn begins"
        for batch in batches:
            self.stop()
            repeat,kind = self.turns[len(self.rows)]
            self.rows.append(dict(kind=kind, repeat=repeat, seconds=0., trained=0))
            self.start = clock(self.device)
            yield batch
            batch = None

    def before_batch(self):
        if self.start is None or self.kind=='select': return # or the last chosen items, for which no batch was read
        self.start = clock(self.device)
        if isinstance(self.kind, float): self.make_smaller(self.kind)
        if self.kind=='score': self.only_score()

    def make_smaller(self, share):
        n = int(len(self.y)*share)
        self.learn.xb,self.learn.yb = take((self.xb, self.yb), slice(0, n))

    def only_score(self):
        self.cb.score(Batch(self.xb, self.yb))
        self.stop()
        self.learn.yb = ()
        raise CancelBatchException

    def stop(self, trained=0):
        if self.start is None: return
        self.rows[-1].update(seconds=clock(self.device)-self.start, trained=trained)
        self.start = None

class Stop(Callback):
    "Ends the turn of a step that trained"
    order = 100
    def __init__(self, turns): self.turns_cb = turns
    def after_batch(self):
        n = len(self.yb[0]) if len(self.yb) else 0
        self.turns_cb.stop(n)

def in_turn(net, bs, cb, kinds, args, size=32):
    """Mean seconds of each kind of step in each repeat, for each batch of the loader, and as `trained` the share of a
    batch that selecting steps trained"""
    turns = Turns(kinds, args.repeats, args.device)
    learn = image_learner(net, bs, len(turns.turns), args.device, [turns, Stop(turns), cb], size)
    with learn.no_bar(),learn.no_logging(): learn.fit(1)

    rows = pd.DataFrame(turns.rows).query('repeat>=0')
    rows = rows.assign(kind=rows.kind.astype(str))
    means = rows.groupby(['kind','repeat'], sort=False)[['seconds','trained']].mean().unstack(0)
    trained = means.trained['select']/bs if 'select' in means.trained else 1.
    return means.seconds.assign(trained=trained)
