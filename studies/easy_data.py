"""How much does choosing gain, against how easy the data are? `python -m studies.easy_data PART` trains what is not
stored of a part: results/easy_data*.csv, of which easy_data_claims.csv has the claims under their own protocol"""
from functools import lru_cache
from typing import NamedTuple

import numpy as np, pandas as pd, torch
from fastai.callback.core import Callback
from fastai.callback.mixup import MixUp
from fastai.data.external import URLs, untar_data
from fastai.layers import ConvLayer
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import error_rate
from fastai.vision.augment import Flip
from fastcore.script import call_parse
from PIL import Image
from torch import nn
from torch.nn import functional as F

from selback.all import composer, SelectiveBackpropCallback
from selback.bench.compare import compare
from selback.bench.datasets import PadCrop, tensor_dls
from selback.bench.findings import last_epochs
from selback.core.ahead import Ahead
from selback.core.outlook import hardest_tenth
from studies.data import damage
from studies.experiments import once, results_folder, scale
from studies.regimes import cifar_parts, is_vehicle, sgd
from studies.wrong_labels import digits, smaller

path = results_folder/'easy_data.csv'
plain_path = results_folder/'easy_data_plain.csv'
pace_path = results_folder/'easy_data_pace.csv'
seconds_path = results_folder/'easy_data_seconds.csv'
claims_path = results_folder/'easy_data_claims.csv'
ahead_path = results_folder/'easy_data_ahead.csv'

# Data, from easy to hard: images and labels to train on and to validate on

def _mnist_files(folder):
    files = sorted(folder.glob('*/*.png'))
    images = torch.stack([torch.from_numpy(np.array(Image.open(f))) for f in files])
    return images[:,None],torch.tensor([int(f.parent.name) for f in files])

@lru_cache
def mnist():
    "Both sets at 28 pixels, as bytes; read from 70,000 files once"
    if scale()=='tiny':
        g = torch.Generator().manual_seed(0)
        return [(torch.randint(256, (n,1,28,28), generator=g, dtype=torch.uint8),torch.arange(n)%10) for n in (600,200)]
    kept = results_folder.parent/'runs/mnist.pt'
    if kept.exists(): return torch.load(kept)
    root = untar_data(URLs.MNIST)
    both = [_mnist_files(root/name) for name in ('training','testing')]
    kept.parent.mkdir(exist_ok=True)
    torch.save(both, kept)
    return both

def _halved(part): return smaller(part[0]),part[1]

def _two_kinds(part): # 1: an animal
    images,labels = _halved(part)
    return images,1-is_vehicle(labels)

def _two_classes(part, classes):
    is_one = torch.isin(part[1], torch.tensor(classes))
    images,labels = _halved((part[0][is_one],part[1][is_one]))
    return images,(labels==classes[1]).long()

def _digits():
    "Four fifths to train on"
    images,labels = digits()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    n = len(order)*4//5
    return [((255*images[rows]).byte(),labels[rows]) for rows in (order[:n],order[n:])]

sets = dict(
    mnist_14=lambda: [_halved(part) for part in mnist()],
    mnist_28=lambda: mnist(),
    frogs_ships=lambda: [_two_classes(part, (6,8)) for part in cifar_parts()],
    cats_dogs=lambda: [_two_classes(part, (3,5)) for part in cifar_parts()],
    animals=lambda: [_two_kinds(part) for part in cifar_parts()],
    cifar10=lambda: [_halved(part) for part in cifar_parts()],
    digits=_digits)
data_of = lru_cache(lambda name: sets[name]())

in_words = dict(
    mnist_14='MNIST, 14x14',
    mnist_28='MNIST, 28x28',
    frogs_ships='frogs and ships',
    cats_dogs='cats and dogs',
    animals='animals and vehicles',
    cifar10='CIFAR-10, 16x16',
    digits='digits') | {'mnist_14+flipped_labels_.1': 'MNIST with 10 % wrong labels'}

class Cell(NamedTuple):
    "Data, how many of them, how long one trains on them, and how wide the network is"
    data:str='mnist_14' # One of `sets`, and behind a plus 'mixup' or a damage with its share
    n:int=20_000 # Items to train on, chosen at random
    epochs:int=8 # Of all of these, by plain training: the compute of each run
    width:float=1. # Of the network

    def dls(self):
        (images,labels),valid = data_of(self.name)
        rows = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[:self.n]
        tfms = [PadCrop(1)] if self.name in ('mnist_14','mnist_28','digits') else [PadCrop(1),Flip()]
        dls = tensor_dls((images[rows],labels[rows]), valid, 128, tfms)
        dls.train.drop_last = len(rows)>=1000
        if self.more and self.more!='mixup':
            kind,_,share = self.more.rpartition('_')
            damage(dls.train_ds, kind, float(share))
        return dls

    def learner(self):
        dls = self.dls()
        cbs = [Ease(), WrongItems()] + [MixUp(1.)]*(self.more=='mixup')
        n_channels = dls.train_ds.images.shape[1]
        widths = [round(self.width*n) for n in (16,32,64)]
        body = [ConvLayer(n_channels, widths[0]), *(ConvLayer(*o, stride=2) for o in zip(widths, widths[1:]))]
        head = nn.AdaptiveAvgPool2d(1),nn.Flatten(),nn.Linear(widths[-1], dls.c)
        return Learner(dls, nn.Sequential(*body, *head), CrossEntropyLossFlat(), opt_func=sgd, metrics=error_rate,
            cbs=cbs)

    @property
    def name(self): return self.data.partition('+')[0]

    @property
    def more(self): return self.data.partition('+')[2]

    @property
    def compute(self): return self.n*self.epochs

class Ease(Callback):
    "What the losses of an epoch tell: how many items are learned, and who has the loss"
    run_valid = False
    def before_train(self): self.told = []

    def after_loss(self):
        losses = F.cross_entropy(self.pred.detach(), self.y, reduction='none')
        self.told.append(torch.stack([losses, (self.pred.argmax(1)!=self.y).float()]))

    def after_train(self):
        losses,is_wrong = torch.cat(self.told, 1)
        self.figures = dict(train_loss=losses.mean(), train_error=is_wrong.mean(), easy=(losses<.1).float().mean(),
            hardest_tenth=hardest_tenth(losses, least=1), median_loss=losses.median())

class WrongItems(Callback):
    "Which items of the validation set are predicted wrongly"
    run_train = False
    def before_validate(self): self.told = []
    def after_pred(self): self.told.append(self.pred.argmax(1)!=self.y)

    @property
    def rows(self): return torch.cat(self.told).nonzero()[:,0].tolist()

def told_of(learn):
    "Columns of a run: what `Ease` tells, and the rows of the validation items that are wrong"
    ease = {name: float(value) for name,value in learn.ease.figures.items()}
    return ease | dict(wrong=' '.join(map(str, learn.wrong_items.rows)))

# Runs

def run(cell, method, seed, lr, **budget): # DataFrame
    "The epochs of a run"
    return run_with_wrong(cell, method, seed, lr, **budget)[[*columns]]

def run_with_wrong(cell, method, seed, lr, **budget):
    "The same, with the rows of the validation items that are wrong in the end"
    budget = budget or dict(compute=cell.compute)
    if scale()=='tiny': budget = dict(epochs=3, annealing=budget.get('annealing', 'one_cycle'))
    methods = {method: presets.get(method, method)}
    rows = compare(cell.learner, methods, seeds=[seed], lr=lr, plot=False, tell_controls=False, watch=told_of,
        **budget)
    rows.loc[rows.index[:-1],'wrong'] = ''
    return rows.assign(**cell._asdict(), lr=lr)[[*columns,'wrong']]

columns = (*Cell._fields,'lr','method','seed','epoch','seconds','forwarded','backpropagated','compute','kept',
    'valid_loss','error','train_loss','train_error','easy','hardest_tenth','median_loss')

def end_of(cell, method, seed, lr): # a row
    "The end of a run at equal compute, unless it is stored; of plain training all epochs are"
    is_plain = method=='none'
    keys = dict(cell._asdict(), method=method, seed=seed, lr=lr)
    def make():
        rows = run_with_wrong(cell, method, seed, lr)
        print(*keys.values(), f'{rows.error.iloc[-1]:.4f}', flush=True)
        return rows if is_plain else rows.tail(1)
    return once(plain_path if is_plain else path, keys, make, '%.5g').iloc[-1]

rates = .1,.2,.4,.8,1.6
kinds = *sets,'mnist_14+flipped_labels_.1'
two_classes = {name: Cell(name, 10_000, 16) for name in ('frogs_ships','cats_dogs')}
first = {name: Cell(name) for name in kinds} | two_classes | dict(digits=Cell('digits', 1437, 30))

@lru_cache
def _rate_of_each(file):
    return pd.read_csv(file).drop_duplicates(of_cell).set_index(of_cell).lr

def own_rate(data)->float:
    "The rate at which the stored runs of a kind of data choose"
    return float(_rate_of_each(path)[first[data]])

def best_rate(data): # Of plain training, by its loss on the validation set
    return min(rates, key=lambda lr: end_of(first[data], 'none', 0, lr)['valid_loss'])

scored = 'selective_backprop','stale_loss','batch_loss_filter'
remembering = 'favor_hard(beta=.5)','favor_hard','favor_hard(beta=2)','prioritized_sampling','drop_easy','info_batch'
random = 'random_subset'
all_methods = 'none',*remembering,*scored,random
some_methods = 'none','favor_hard','favor_hard(beta=2)',*scored,random
few_methods = 'none','favor_hard','stale_loss'
cells = [ # beside `first`
    *(Cell('mnist_14', 20_000, epochs) for epochs in (4,16,32,64)),
    *(Cell('mnist_14', n) for n in (2_000,6_000,60_000)), Cell('mnist_14', 2_000, 64),
    Cell('mnist_14', width=.5), Cell('mnist_14', width=4.), Cell('mnist_28', 60_000, 4), Cell('mnist_28', 6_000, 16),
    *(Cell(data, 20_000, epochs) for data in ('animals','cifar10') for epochs in (4,24)),
    *(Cell(data, 4_000, 24) for data in ('animals','cifar10')), Cell('animals', width=2.), Cell('cifar10', width=2.),
    *(Cell(data, 10_000, epochs) for data in two_classes for epochs in (4,48)),
    *(Cell(data, 2_000, 32) for data in two_classes),
    Cell('mnist_14+flipped_labels_.1', epochs=16), Cell('mnist_14+flipped_labels_.1', 4_000, 16),
    Cell('digits', 1437, 8), Cell('digits', 1437, 100)]

parts = dict(
    first=[(cell, method, seed) for data,cell in first.items() for seed in range(10 if data=='mnist_14' else 3)
        for method in (all_methods if data=='mnist_14' else some_methods)],
    cells=[(cell, method, seed) for seed in range(2) for cell in cells for method in few_methods])

of_cell = [*Cell._fields]

def stored_ends()->pd.DataFrame: # A row for each run
    "How the stored runs of all cells end, plain training's at the rate that the others have"
    chosen,plain = pd.read_csv(path),last_epochs(pd.read_csv(plain_path), *of_cell, 'lr')
    rates_of = chosen[[*of_cell,'lr']].drop_duplicates()
    return pd.concat([plain.merge(rates_of, on=[*of_cell,'lr']), chosen], ignore_index=True)

# Equal seconds: a run of a method that takes more seconds for the same compute has less of it

told = [(first[data], method, seed) for seed in range(3) for data,methods in dict(
    mnist_14=('favor_hard(beta=2)',*scored), animals=('favor_hard(beta=2)',)).items() for method in methods]

def seconds_of_plain(cell, method): # Of the processor, on one thread
    "How many times as long a method takes as plain training does for the same compute; both are timed in turn"
    def make():
        rows = compare(cell.learner, ['none',method], seeds=3, lr=.1, compute=3*cell.n, plot=False, tell_controls=False)
        ends = last_epochs(rows)
        timed = ends.assign(**cell._asdict(), timed=method)
        return timed[['timed',*of_cell,'method','seed','cpu_seconds','compute']]
    ends = once(pace_path, dict(cell._asdict(), timed=method), make, '%.5g')
    spent = (ends.cpu_seconds/ends.compute).groupby([ends.seed,ends.method=='none']).mean().unstack()
    return float((spent[False]/spent[True]).median())

def in_equal_seconds(cell, method, seed, lr):
    "The end of a run that takes as long as plain training, unless it is stored"
    def make():
        print(*cell, method, seed, flush=True)
        return run(cell, method, seed, lr, compute=cell.compute/seconds_of_plain(cell, method)).tail(1)
    return once(seconds_path, dict(cell._asdict(), method=method, seed=seed), make, '%.5g').iloc[-1]

# Ahead of time: choices by losses of a copy, up to so many steps old

rarely = 'ahead=6, by a copy that follows at every tenth step'
ahead_kinds = 'selective_backprop','selective_backprop(ahead=6)',rarely # as they are stored

def ahead_of(method, seed):
    "The end of a run that chooses ahead of time, or of one that does not, unless it is stored"
    cell = first['mnist_14']
    def make(): return run(cell, method, seed, best_rate(cell.data)).tail(1)
    return once(ahead_path, dict(cell._asdict(), method=method, seed=seed), make, '%.5g').iloc[-1]

# The claims, under their own protocol: so many epochs, steps of the learning rate, whatever is kept

claimed = 'none',*scored,'favor_hard',random,'composer'
presets = dict(composer=lambda: SelectiveBackpropCallback(**composer))
presets[ahead_kinds[1]] = lambda: SelectiveBackpropCallback(scorer=Ahead(6))
presets[rarely] = lambda: SelectiveBackpropCallback(scorer=Ahead(6, every=10))
protocol = 16 # epochs
shorter = 4,6,8,10,12 # epochs of plain training, whose schedule ends there

def claim(data, method, seed, lr, epochs):
    "The epochs of a run"
    rows = run(first[data.partition('+')[0]]._replace(data=data), method, seed, lr, epochs=epochs, annealing='step')
    if 'mixup' in data: rows = rows.assign(**dict.fromkeys(columns[-5:])) # of items that were mixed they say nothing
    return rows.assign(epochs=epochs)

def claim_once(data, method, seed, lr, epochs):
    "A run, unless it is stored"
    def make():
        print(data, method, seed, epochs, flush=True)
        return claim(data, method, seed, lr, epochs)
    once(claims_path, dict(data=data, method=method, seed=seed, epochs=epochs), make, '%.5g')

damaged = [f'mnist_14+{kind}_{share}' for share in (.5,.25)
    for kind in ('random_labels','shuffled_pixels','gaussian_images')] # as in Hu et al. 2021
on_damaged = 'none','selective_backprop(keep=.5)','selective_backprop',"selective_backprop(score='entropy')",random

def claims():
    "Data, method, seed and epochs of each run"
    for data in ('mnist_14','cifar10'):
        for seed in range(5 if data=='mnist_14' else 2):
            yield from ((data, method, seed, protocol) for method in claimed)
            yield from ((data, 'none', seed, epochs) for epochs in shorter)
    for seed in range(2):
        yield from (('mnist_14+mixup', method, seed, protocol) for method in ('none','batch_loss_filter'))
    yield from ((data, method, 0, protocol) for data in damaged for method in on_damaged)

claim_rate = .1 # as in the paper

@call_parse
def main(
    names:str, # Parts, with commas between: rates, first, cells, seconds, ahead, claims
):
    "Train what is not stored yet"
    for name in names.split(','):
        if name=='rates': print({data: best_rate(data) for data in kinds})
        elif name=='seconds':
            for cell,method,seed in told: in_equal_seconds(cell, method, seed, best_rate(cell.data))
        elif name=='ahead':
            for seed in range(5):
                for method in ahead_kinds: print(method, seed, ahead_of(method, seed).error, flush=True)
        elif name=='claims':
            for data,method,seed,epochs in claims(): claim_once(data, method, seed, claim_rate, epochs)
        else:
            for cell,method,seed in parts[name]: end_of(cell, method, seed, best_rate(cell.data))
