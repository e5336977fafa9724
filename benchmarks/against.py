"""Microseconds of processor time for each batch of the loader, around one linear layer: a line of JSON for each line
of input, by the selback that the interpreter finds. `overhead.py --against` runs it"""
import json, sys, warnings
from contextlib import redirect_stdout
from itertools import count, cycle
from time import process_time

import torch
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders, TfmdDL
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from selback.all import (BatchLossFilterCallback, InfoBatchCallback, RandomSubsetCallback, SelectiveBackpropCallback,
    TopLossCallback)
from selback.core.scoring import ScoringPass
from torch import nn

BS = 128 # batch size
N,SKIPPED = 80,20 # batches of an epoch, and how many of them are not timed
X,Y = torch.randn(4*BS, 32),torch.randint(0, 10, (4*BS,))

class Loader(TfmdDL):
    "Hands out rows that are in memory, counts the batches, and adds up the time that it takes"
    n_read,seconds = 0,0.
    keeps_order = True # its batches are consecutive pieces of what it draws

    def __init__(self, *args, **kwargs):
        def create_batch(rows): return X[rows],Y[rows]
        super().__init__(*args, **kwargs | dict(create_batch=create_batch))

    def __iter__(self):
        batches = super().__iter__()
        while True:
            start = process_time()
            b = next(batches, None)
            Loader.seconds += process_time()-start
            if b is None: return
            Loader.n_read += 1
            yield b

class Rows:
    "A dataset of row numbers"
    def __len__(self): return N*BS
    def __getitem__(self, i): return i%len(X)

class Watch(Callback):
    "What steps take, from one batch on"
    order,in_events = 200,0.

    def before_fit(self):
        self.start = None # when the first of the timed batches is there
        self.first = Loader.n_read
        self.n = 0 # timed batches of the loader

    def after_batch(self):
        read,now = Loader.n_read-self.first,process_time()
        if self.start is not None: self.note(read, now)
        elif read>=SKIPPED: self.begin()

    def begin(self):
        self.first,self.loaded = Loader.n_read,Loader.seconds
        self.steps,self.items = 0,0
        self.in_events = 0.
        self.start = process_time()

    def note(self, n, now):
        self.n = n
        if len(self.yb): # else it was cancelled
            self.steps += 1
            self.items += len(self.yb[0])
        self.seconds = now-self.start
        self.loading = Loader.seconds-self.loaded
        self.spent = self.in_events

def time_events(cb, watch):
    """Have the seconds that a selection and its companions take added up, in events and between batches, without those
    of the loader"""
    learn = cb.learn
    calls = {type(o): type(o).__call__ for o in (cb, *getattr(cb, 'companions', ()))}
    def added(f, *args):
        loading,start = Loader.seconds,process_time()
        try: return f(*args)
        finally: watch.in_events += process_time()-start-(Loader.seconds-loading)

    def all_batches():
        learn.n_iter,batches = len(learn.dl),iter(learn.dl)
        for i in count():
            b = added(next, batches, None)
            if b is None: return
            learn.one_batch(i, b)

    def timed(call): return lambda self, event: added(call, self, event)
    for cls,call in calls.items(): cls.__call__ = timed(call)
    learn.all_batches = all_batches
    def undo():
        for cls,call in calls.items(): cls.__call__ = call
    return undo

class Ready(ScoringPass):
    "A scoring pass whose predictions are there already"
    def __init__(self, preds):
        super().__init__()
        self.preds = preds

    def __call__(self, *args, **kwargs): return next(self.preds)

def watched(cb=None, preds=None, events=False):
    "An epoch that was watched"
    watch = Watch()
    cbs = [watch] if cb is None else [watch,cb]
    dls = DataLoaders(*[Loader(Rows(), bs=BS, num_workers=0) for _ in range(2)], device=torch.device('cpu'))
    learn = Learner(dls, nn.Linear(32, 10), loss_func=CrossEntropyLossFlat(), lr=1e-3, cbs=cbs)
    learn._do_epoch_validate = lambda *args: None
    if preds is not None and hasattr(cb, 'scorer'): cb.scorer.scoring = Ready(preds)

    undo = time_events(cb, watch) if events else None
    with learn.no_bar(),learn.no_logging(),redirect_stdout(None): learn.fit(1)
    if undo: undo()
    return watch

METHODS = dict(
    top_loss=lambda **kwargs: TopLossCallback(1/3, **kwargs),
    batch_loss_filter=lambda **kwargs: BatchLossFilterCallback(.6, **kwargs),
    composer=lambda **kwargs: SelectiveBackpropCallback(keep=1/3, gather=False, **kwargs),
    selective_backprop=lambda **kwargs: SelectiveBackpropCallback(2., **kwargs),
    random_subset=lambda **kwargs: RandomSubsetCallback(1/3, **kwargs))
RESTING = METHODS | dict(info_batch=lambda **kwargs: InfoBatchCallback(**kwargs))
REST = dict(warmup=10**6)
ON = dict(warmup=0)

def whole_epoch(cb=None):
    "Microseconds a batch"
    watch = watched(cb)
    return 1e6*watch.seconds/watch.n

def its_events(cb, preds=None):
    "Microseconds a batch of them"
    watch = watched(cb, preds, events=True)
    return 1e6*watch.spent/watch.n

def measure(preds):
    "Each measurement once"
    rows = []
    def note(what, measure, us): rows.append(dict(what=what, measure=measure, us=us))

    note('plain', 'whole epoch', whole_epoch())
    for name,make in RESTING.items():
        note(name, 'at rest, its events', its_events(make(**REST)))
        note(name, 'at rest, more than plain', whole_epoch(make(**REST))-whole_epoch())
    for name,make in METHODS.items():
        note(name, 'choosing, its events', its_events(make(**ON), preds))
        note(name, 'selecting, its events', its_events(make(**ON)))
        note(name, 'selecting, whole epoch', whole_epoch(make(**ON)))
    return rows

if __name__=='__main__':
    warnings.simplefilter('ignore')
    torch.set_num_threads(1)
    torch.manual_seed(0)
    preds = cycle([torch.randn(BS, 10) for _ in range(8)])
    for _ in sys.stdin: print(json.dumps(measure(preds)), flush=True)
