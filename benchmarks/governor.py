"A selection with `auto=True` against plain training, where it pays and where it doesn't; and loading, where that is the bottleneck"
import io, itertools, warnings
from unittest.mock import patch

import numpy as np
from PIL import Image
from selback.callback import meter
from common import *

class Jpegs:
    "Photographs' worth of JPEG, decoded anew for each batch: 200 files, again and again"
    def __init__(self, n, size=512):
        rng,files = np.random.default_rng(0),[]
        for _ in range(min(n, 200)):
            small = Image.fromarray(rng.integers(0, 255, (size//8, size//8, 3), dtype=np.uint8))
            small.resize((size, size)).save(buffer := io.BytesIO(), 'jpeg', quality=90)
            files.append(buffer.getvalue())
        self.files = (files*(n//len(files)+1))[:n]
    def __len__(self): return len(self.files)
    def __getitem__(self, i):
        image = np.asarray(Image.open(io.BytesIO(self.files[i])).resize((32, 32)))
        return torch.from_numpy(image.copy()).permute(2, 0, 1).float()/255-.5,i%10

STEPS = 250 # an epoch
def normal(args): return image_learner('small_resnet', 32, STEPS, args.device)
def small_batch(args): return image_learner('small_resnet', 16, STEPS, args.device)
def frozen_body(args):
    learn = image_learner('small_resnet', 128, STEPS, args.device)
    for p in list(learn.model.parameters())[:-2]: p.requires_grad_(False)
    return learn

def jpeg_learner(args, workers=0, bs=8, n=8*STEPS, size=512):
    dls = DataLoaders(*[TfmdDL(Jpegs(n, size), bs=bs, shuffle=not i, num_workers=workers, persistent_workers=workers>0) for i in range(2)], device=torch.device(args.device))
    learn = Learner(dls, NETS['small_resnet']().to(args.device), loss_func=CrossEntropyLossFlat(), lr=1e-3)
    learn._do_epoch_validate = lambda *args: None
    return learn
def loader_bound(args): return jpeg_learner(args)
def loader_bound_workers(args): return jpeg_learner(args, workers=1, size=1024)

LEARNERS = dict(normal=normal, small_batch=small_batch, frozen_body=frozen_body, loader_bound=loader_bound, loader_bound_workers=loader_bound_workers)
METHODS = dict(top_loss=lambda: TopLossCallback(1/3, auto=True))

def time_in_turns(_=None):
    "The clock of the fit that is running"
    fit = getcurrent()
    return clock(fit.device)-fit.start+fit.seconds

def fit_in_turns(fits, first):
    "Seconds of each fit, while they take turns: what else the machine does slows them alike"
    with patch.object(meter, 'clock', time_in_turns):
        for first in itertools.count(first): # each is the first of a round as often as any other
            for fit in fits[first%len(fits):]+fits[:first%len(fits)]: fit.go_on()
            if all(o.dead for o in fits): break
    return [o.seconds for o in fits]

class EpochTimes(Callback):
    "Seconds of the training part of each epoch"
    order = 200
    def __init__(self, device): self.device,self.seconds = device,[]
    def before_train(self): self.start = clock(self.device)
    def after_train(self): self.seconds.append(clock(self.device)-self.start)

def standing_aside(args):
    "Plain, plain again and a selection with `auto=True`, in turn"
    rows = []
    for name in args.learners:
        make = LEARNERS[name]
        every = None if 'workers' in name else 5 # they would load while others have their turn
        for r in range(-1, args.repeats):
            learns = dict(plain=(make(args), None), plain_again=(make(args), None), **{m: (make(args), cb()) for m,cb in METHODS.items()})
            t = dict(zip(learns, fit_in_turns([Fit(*o, args.device, every) for o in learns.values()], max(r, 0))))
            if r<0: continue
            steps = 2*len(learns['plain'][0].dls.train)
            for m in ('plain_again', *METHODS):
                cb = learns[m][1]
                chosen = 0. if cb is None else float((cb.stats.kept<cb.stats.seen).mean())
                rows.append(dict(learner=name, method=m, repeat=r, plain_step_ms=1000*t['plain']/steps, steps=steps, of_plain=t[m]/t['plain'], predicted=None if cb is None else cb.meter.cost,
                    aside=None if cb is None else cb.meter.is_aside, selecting_steps=chosen))
    return rows

def loading(args):
    "Epochs of methods that choose before loading, and of one that does not, by time for an epoch of plain training"
    rows,methods = [],dict(none=None, random_subset_before_loading=lambda: RandomSubsetCallback(1/3, before_loading=True, auto=False), stale_loss=lambda: StaleLossCallback(2, n=2, auto=False),
        info_batch=lambda: InfoBatchCallback(delta=1., auto=False), selective_backprop=lambda: SelectiveBackpropCallback(auto=False), top_loss=lambda: TopLossCallback(1/3, auto=False))
    for workers in 0,1:
        for r in range(min(args.repeats, 3)):
            for name,make in methods.items():
                learn = jpeg_learner(args, workers, bs=32, n=640)
                learn.add_cb(timer := EpochTimes(args.device))
                Fit(learn, make() if make else None, args.device, epochs=3).switch()
                seconds = sum(timer.seconds[1:])/2 # an epoch of warm-up; two that select, one of them scored by stale losses
                rows.append(dict(workers=workers, method=name, repeat=r, epoch_seconds=seconds, of_plain=seconds/(plain := seconds if make is None else plain)))
    return rows

def main():
    args = arguments(__doc__, learners=dict(nargs='*', default=[*LEARNERS], choices=[*LEARNERS], help='measure these only, and keep what the file says of the others'))
    warnings.simplefilter('ignore')
    df = save(standing_aside(args), 'governor', args, keep=[name for name in LEARNERS if name not in args.learners])
    if len(args.learners)<len(LEARNERS): return
    print(df.groupby(['learner','method'], sort=False)[['plain_step_ms','of_plain','predicted','selecting_steps']].median(numeric_only=True).round(3).to_string())
    df = save(loading(args), 'loading', args, repeats=min(args.repeats, 3))
    print(df.groupby(['workers','method'], sort=False)[['epoch_seconds','of_plain']].median().round(3).to_string())

if __name__=='__main__': main()
