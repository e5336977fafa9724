"""A selection with `auto=True` against plain training, where it pays and where it doesn't; and loading, where that is
the bottleneck"""
import io, itertools, warnings
from unittest.mock import patch

import numpy as np
from PIL import Image
from selback.callback import meter
from common import *

class Jpegs:
    "Photographs' worth of JPEG, decoded anew for each batch: 200 files, again and again"
    def __init__(self, n, size=512):
        rng = np.random.default_rng(0)
        files = [self.made(rng, size) for _ in range(min(n, 200))]
        self.files = (files*(n//len(files)+1))[:n]

    def made(self, rng, size):
        pixels = rng.integers(0, 255, (size//8, size//8, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).resize((size, size)).save(file, 'jpeg', quality=90)
        return file.getvalue()

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
    def loader(shuffle):
        return TfmdDL(Jpegs(n, size), bs=bs, shuffle=shuffle, num_workers=workers, persistent_workers=workers>0)
    dls = DataLoaders(loader(True), loader(False), device=torch.device(args.device))
    model = NETS['small_resnet']().to(args.device)
    learn = Learner(dls, model, loss_func=CrossEntropyLossFlat(), lr=1e-3)
    learn._do_epoch_validate = lambda *args: None
    return learn

def loader_bound(args): return jpeg_learner(args)
def loader_bound_workers(args): return jpeg_learner(args, workers=1, size=1024)

LEARNERS = {make.__name__: make for make in (normal,small_batch,frozen_body,loader_bound,loader_bound_workers)}
METHODS = dict(top_loss=lambda: TopLossCallback(1/3, auto=True))

def time_in_turns(_=None):
    "The clock of the fit that is running"
    fit = getcurrent()
    return clock(fit.device)-fit.start+fit.seconds

def fit_in_turns(fits, first):
    "Seconds of each fit, while they take turns: what else the machine does slows them alike"
    with patch.object(meter, 'clock', time_in_turns):
        for turn in itertools.count(first): # each is the first of a round as often as any other
            start = turn%len(fits)
            for fit in fits[start:]+fits[:start]: fit.go_on()
            if all(fit.dead for fit in fits): break
    return [fit.seconds for fit in fits]

class EpochTimes(Callback):
    "Seconds of the training part of each epoch"
    order = 200
    def __init__(self, device): self.device,self.seconds = device,[]
    def before_train(self): self.start = clock(self.device)
    def after_train(self): self.seconds.append(clock(self.device)-self.start)

def one_round(name, args, first):
    "Plain, plain again and a selection, in turn: the selections and the seconds, and the steps of each"
    make = LEARNERS[name]
    every = None if 'workers' in name else 5 # they would load while others have their turn
    cbs = dict(plain=None, plain_again=None) | {method: get_cb() for method,get_cb in METHODS.items()}
    learns = [make(args) for _ in cbs]
    fits = [Fit(learn, cb, args.device, every) for learn,cb in zip(learns, cbs.values())]
    seconds = dict(zip(cbs, fit_in_turns(fits, first)))
    return cbs,seconds,2*len(learns[0].dls.train)

def decisions(cb):
    "What a selection foretold, whether it stands aside, and the share of its steps that selected"
    if cb is None: return dict(predicted=None, aside=None, selecting_steps=0.)
    selecting = float((cb.stats.kept<cb.stats.seen).mean())
    return dict(predicted=cb.meter.cost, aside=cb.meter.is_aside, selecting_steps=selecting)

def standing_aside(args):
    "Plain, plain again and a selection with `auto=True`, in turn"
    rows = []
    for name in args.learners:
        for repeat in range(-1, args.repeats):
            cbs,seconds,steps = one_round(name, args, max(repeat, 0))
            if repeat<0: continue
            plain = seconds.pop('plain')
            about = dict(repeat=repeat, plain_step_ms=1000*plain/steps, steps=steps)
            for method,took in seconds.items():
                rows.append(dict(learner=name, method=method, **about, of_plain=took/plain, **decisions(cbs[method])))
    return rows

LOADING = dict(
    none=lambda: None,
    random_subset_before_loading=lambda: RandomSubsetCallback(1/3, before_loading=True),
    stale_loss=lambda: StaleLossCallback(2, n=2),
    info_batch=lambda: InfoBatchCallback(delta=1.),
    selective_backprop=lambda: SelectiveBackpropCallback(),
    top_loss=lambda: TopLossCallback(1/3))

def epoch_seconds(args, workers, cb):
    "Of two epochs after one to warm up: two that select, one of them scored by stale losses"
    learn = jpeg_learner(args, workers, bs=32, n=640)
    timer = EpochTimes(args.device)
    learn.add_cb(timer)
    Fit(learn, cb, args.device, epochs=3).switch()
    return sum(timer.seconds[1:])/2

def loading(args):
    "Epochs of methods that choose before loading, and of one that does not, by time for an epoch of plain training"
    rows = []
    for workers in 0,1:
        for repeat in range(min(args.repeats, 3)):
            seconds = {name: epoch_seconds(args, workers, make()) for name,make in LOADING.items()}
            for name,took in seconds.items():
                rows.append(dict(workers=workers, method=name, repeat=repeat, epoch_seconds=took,
                    of_plain=took/seconds['none']))
    return rows

def main():
    only = dict(nargs='*', default=[*LEARNERS], choices=[*LEARNERS],
        help='measure these only, and keep what the file says of the others')
    args = arguments(__doc__, learners=only)
    warnings.simplefilter('ignore')

    df = save(standing_aside(args), 'governor', args, keep=[name for name in LEARNERS if name not in args.learners])
    if len(args.learners)<len(LEARNERS): return
    told = ['plain_step_ms','of_plain','predicted','selecting_steps']
    print(df.groupby(['learner','method'], sort=False)[told].median(numeric_only=True).round(3).to_string())

    df = save(loading(args), 'loading', args, repeats=min(args.repeats, 3))
    print(df.groupby(['workers','method'], sort=False)[['epoch_seconds','of_plain']].median().round(3).to_string())

if __name__=='__main__': main()
