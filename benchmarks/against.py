"Microseconds of processor time for each batch of the loader, around one linear layer: a line of JSON for each line of input, by the selback that the interpreter finds. `overhead.py --against` runs it"
import json, sys, warnings
from contextlib import redirect_stdout
from itertools import cycle
from time import process_time

import torch
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders, TfmdDL
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from selback.all import (BatchLossFilterCallback, InfoBatchCallback, RandomSubsetCallback, SelectiveBackpropCallback,
    TopLossCallback)
from torch import nn

BS,N,SKIPPED = 128,80,20 # batch size; batches of an epoch, and how many of them are not timed
X,Y = torch.randn(4*BS, 32),torch.randint(0, 10, (4*BS,))

class Loader(TfmdDL):
    "Hands out rows that are in memory, counts the batches, and adds up the time that it takes"
    n_read,seconds = 0,0.
    def __init__(self, *args, **kwargs): super().__init__(*args, **kwargs | dict(create_batch=lambda rows: (X[rows], Y[rows])))
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
    def before_fit(self): self.start,self.first,self.n = None,Loader.n_read,0
    def after_batch(self):
        n,now = Loader.n_read-self.first,process_time()
        if self.start is None:
            if n>=SKIPPED: self.first,self.loaded,self.steps,self.items,self.in_events,self.start = Loader.n_read,Loader.seconds,0,0,0.,process_time()
            return
        made = len(self.yb)>0 # or it was cancelled
        self.steps,self.items,self.n = self.steps+made,self.items+(len(self.yb[0]) if made else 0),n
        self.seconds,self.loading,self.spent = now-self.start,Loader.seconds-self.loaded,self.in_events

def time_events(cb, watch):
    "Have the seconds that a callback takes added up, without what the loader takes in them"
    cls,call = type(cb),type(cb).__call__
    def timed(self, event):
        loading,start = Loader.seconds,process_time()
        try: return call(self, event)
        finally: watch.in_events += process_time()-start-(Loader.seconds-loading)
    cls.__call__ = timed
    return lambda: setattr(cls, '__call__', call)

def watched(cb=None, preds=None, events=False):
    "An epoch that was watched"
    dls = DataLoaders(*[Loader(Rows(), bs=BS, num_workers=0) for _ in range(2)], device=torch.device('cpu'))
    learn = Learner(dls, nn.Linear(32, 10), loss_func=CrossEntropyLossFlat(), lr=1e-3, cbs=[watch := Watch(), *([cb] if cb else [])])
    learn._do_epoch_validate = lambda *args: None
    if preds is not None: (cb.scorer if hasattr(cb, 'meter') else cb).predict = lambda *args, **kwargs: next(preds)
    undo = time_events(cb, watch) if events else None
    with learn.no_bar(),learn.no_logging(),redirect_stdout(None): learn.fit(1)
    if undo: undo()
    return watch

METHODS = dict(top_loss=lambda **kw: TopLossCallback(1/3, **kw), batch_loss_filter=lambda **kw: BatchLossFilterCallback(.6, **kw), composer=lambda **kw: SelectiveBackpropCallback(keep=1/3, gather=False, **kw),
    selective_backprop=lambda **kw: SelectiveBackpropCallback(2., **kw), random_subset=lambda **kw: RandomSubsetCallback(1/3, **kw))
RESTING = METHODS | dict(info_batch=lambda **kw: InfoBatchCallback(**kw))

def measure(preds):
    "Each measurement once"
    def whole(cb=None): return 1e6*(w := watched(cb)).seconds/w.n
    def events(cb, preds=None): return 1e6*(w := watched(cb, preds, True)).spent/w.n
    rest,on = dict(warmup=10**6, auto=False),dict(warmup=0, auto=False)
    rows = [dict(what='plain', measure='whole epoch', us=whole())]
    for name,make in RESTING.items(): rows += [dict(what=name, measure='at rest, its events', us=events(make(**rest))), dict(what=name, measure='at rest, more than plain', us=whole(make(**rest))-whole())]
    for name,make in METHODS.items():
        rows += [dict(what=name, measure='choosing, its events', us=events(make(**on), preds)), dict(what=name, measure='selecting, its events', us=events(make(**on))),
            dict(what=name, measure='selecting, whole epoch', us=whole(make(**on)))]
    return rows

if __name__=='__main__':
    warnings.simplefilter('ignore')
    torch.set_num_threads(1)
    torch.manual_seed(0)
    preds = cycle([torch.randn(BS, 10) for _ in range(8)])
    for _ in sys.stdin: print(json.dumps(measure(preds)), flush=True)
