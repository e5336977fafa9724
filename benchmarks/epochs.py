"""What an epoch that is chosen before loading takes above a plain one, on one thread, with steps as short as they come:
photographs learned pixel by pixel. Pairs of fits in turn, each told by its median epoch. `added`: the processor time of
a selecting epoch less that of as many plain steps, in microseconds for each item of the dataset. And the draw alone, by
the parts that it is made of, beside NumPy's argsort of as many numbers"""
import os
os.environ['OMP_NUM_THREADS'] = '1'
import statistics, time, warnings
from contextlib import redirect_stdout

import numpy as np
from fastai.learner import Recorder
from fastai.metrics import mse
from PIL import Image
from sklearn.datasets import load_sample_image
from common import *
from selback.bench.datasets import TensorDL
from selback.callback.loaders import ChosenBefore, Plan, draw
from selback.core.policies import include, rank_inclusion

SIZES = {'at 192x128': (192,128), 'at its own size': None}
METHODS = {
    'plain again': lambda: None,
    'favor_hard(beta=2)': lambda: FavorHardCallback(2.),
    'favor_hard(beta=0)': lambda: FavorHardCallback(0.),
    'prioritized_sampling(uniform=0.25)': lambda: PrioritizedSamplingCallback(uniform=.25, warmup=1)}
LARGE = 'plain again','favor_hard(beta=2)' # what is timed with ten times the items
EPOCHS = 3 # of a fit; the first is not told

class Epochs(Callback):
    "Seconds, processor seconds and steps of each epoch's training"
    order = Recorder.order+5

    def before_fit(self): self.rows = []
    def before_epoch(self): self.began,self.cpu_began,self.steps = time.perf_counter(),time.process_time(),0
    def after_step(self): self.steps += 1
    def after_train(self):
        now = time.perf_counter()-self.began,time.process_time()-self.cpu_began
        self.rows.append((*now,self.steps))

class Pixels:
    "The places of an image's pixels, and their colours; numbers give a batch"
    def __init__(self, image):
        rows,columns = (torch.linspace(-1, 1, n) for n in image.shape[:2])
        self.places,self.colours = torch.cartesian_prod(rows, columns),image.reshape(-1, 3)

    def __len__(self): return len(self.places)
    def __getitem__(self, i): return self.places[i],self.colours[i]

class CoordinateNet(nn.Module):
    "Fourier features of a place and two hidden layers"
    def __init__(self):
        super().__init__()
        self.register_buffer('frequencies', torch.randn(2, 64)*10)
        hidden = [nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()]
        self.layers = nn.Sequential(*hidden, nn.Linear(128, 3))

    def forward(self, x):
        x = x@self.frequencies
        return self.layers(torch.cat([x.sin(), x.cos()], 1))

def photograph(name, size):
    image = Image.fromarray(load_sample_image(f'{name}.jpg'))
    if size is not None: image = image.resize(size, Image.Resampling.LANCZOS)
    ds = Pixels(torch.tensor(np.array(image)).float()/255)
    return DataLoaders.from_dsets(ds, ds, bs=1024, num_workers=0, device=torch.device('cpu'), dl_type=TensorDL)

def epoch_of(learn):
    "Seconds, processor seconds and steps of the median epoch of a fit"
    with learn.no_bar(),learn.no_logging(),redirect_stdout(None): learn.fit(EPOCHS)
    return [statistics.median(column) for column in zip(*learn.epochs.rows[1:])]

def pixel_learner(size, cb):
    dls = photograph('china', size)
    learn = Learner(dls, CoordinateNet(), nn.MSELoss(), metrics=mse, lr=4e-3, cbs=Epochs())
    learn._do_epoch_validate = lambda *args: None
    if cb is not None: learn.add_cb(cb)
    return learn

def pairs(args):
    "A row for each method and repeat: its epoch beside a plain one that came just before or after"
    rows = []
    for what,size in SIZES.items():
        plain = pixel_learner(size, None)
        n = len(plain.dls.train_ds)
        names = METHODS if size else LARGE
        learners = {name: pixel_learner(size, METHODS[name]()) for name in names}
        n_repeats = args.repeats if size else args.repeats//4
        for repeat in range(-1, n_repeats): # the first is slow
            for name,learn in learners.items():
                turns = [plain,learn] if repeat%2 else [learn,plain]
                took = {id(o): epoch_of(o) for o in turns}
                (plain_seconds,plain_cpu,plain_steps),(seconds,cpu,steps) = took[id(plain)],took[id(learn)]
                if repeat<0: continue
                share = steps/plain_steps
                rows.append(dict(
                    photograph=what,
                    items=n,
                    method=name,
                    repeat=repeat,
                    repeats=n_repeats,
                    plain_cpu_seconds=plain_cpu,
                    of_plain=cpu/plain_cpu,
                    steps=share,
                    added=1e6*(cpu-share*plain_cpu)/n,
                    added_wall=1e6*(seconds-share*plain_seconds)/n))
    return rows

class Nothing:
    "A dataset of which only the length matters"
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def __getitem__(self, i): return i

def timed(call):
    "What a function returns, and its processor seconds"
    start = time.process_time()
    out = call()
    return out,time.process_time()-start

def draw_of(dl, losses, generator):
    "Processor seconds of the parts of a draw"
    order,shuffle = timed(lambda: draw(dl))
    known,lookup = timed(lambda: losses[order])
    chosen,choice = timed(lambda: include(known, lambda loss: rank_inclusion(loss, 2.), 0., generator))
    plan = Plan(order[chosen.rows], chosen.rows)
    _,loading = timed(lambda: ChosenBefore(dl, lambda: plan).begin())
    return dict(shuffle=shuffle, lookup=lookup, choice=choice, loading=loading)

def drawing(args):
    "A row for each size and repeat: the draw, NumPy's argsort in the same turn, and the draw as a multiple of it"
    rows = []
    for n in (100_000, 1_000_000, 10_000_000):
        dl = TensorDL(Nothing(n), bs=1024, shuffle=True, num_workers=0)
        losses,numbers,generator = torch.rand(n),np.random.rand(n),torch.Generator().manual_seed(0)
        n_repeats = args.repeats if n<10_000_000 else 3
        for repeat in range(-1, n_repeats):
            _,argsort = timed(lambda: np.argsort(numbers))
            parts = draw_of(dl, losses, generator)
            draw = sum(parts.values())
            if repeat<0: continue
            rows.append(dict(items=n, repeat=repeat, repeats=n_repeats, argsort=argsort, **parts, draw=draw,
                draw_of_argsort=draw/argsort, choice_of_argsort=parts['choice']/argsort))
    return rows

def main():
    args = arguments(__doc__)
    warnings.simplefilter('ignore')
    torch.set_num_threads(1)
    df = save(drawing(args), 'drawing', args)
    print(df.groupby('items').median(numeric_only=True).drop(columns='repeat').round(3).to_string())

    df = save(pairs(args), 'epochs', args)
    by = df.groupby(['photograph','method'], sort=False)
    print(by[['plain_cpu_seconds','of_plain','steps','added','added_wall']].median().round(3).to_string())

if __name__=='__main__': main()
