"Data in which something irrelevant goes with the label: `python -m studies.shortcuts NAME` runs one part"
import io
from functools import lru_cache, partial

import numpy as np, pandas as pd, torch
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastcore.script import call_parse
from PIL import Image
from torch.nn import functional as F

from selback.all import (as_tensors, balanced_chances, Chosen, EarlyLossSamplingCallback, EpochMethod, EpochSelection,
    ScoringPass, WorstGroup, item_losses)
from selback.bench.compare import compare, describe
from selback.bench.datasets import coloured_digits, PadCrop, small_convnet, tensor_dls
from selback.callback.learner import autocast_of
from selback.callback.loaders import check_loader, loader_of, unaugmented
from studies.experiments import in_bf16, results, scale, stored
from studies.regimes import (cifar_parts, image_learner, is_vehicle, rare_kinds as kinds_that_are_rare,
    sgd, weighted_dls)

# Data: images, labels, and the mark that goes with the label

def _generator(seed=0): return torch.Generator().manual_seed(seed)

def _small(images):
    "Bytes, at half the resolution"
    return F.avg_pool2d(images.float(), 2).round().byte()

@lru_cache
def small_cifar(
    n:int, # Images for training
):
    "CIFAR-10 at 16x16: images and classes for training, for ordinary validation, and for the test"
    (images,labels),test = cifar_parts()
    n,n_valid = (n,5_000) if scale()!='tiny' else (400,100)
    order = torch.randperm(len(labels), generator=_generator())
    parts = [(images[rows],labels[rows]) for rows in (order[:n],order[n:n+n_valid])]
    return tuple((_small(x),y) for x,y in (*parts,test))

def marks_of(labels, n_marks, share, generator):
    "For each item the mark of its class with a probability of `share`, else one of the others"
    other = (labels+torch.randint(1, n_marks, labels.shape, generator=generator))%n_marks
    agrees = torch.rand(labels.shape, generator=generator)<share
    return torch.where(agrees, labels, other)

def _any_marks(labels, n_marks, generator): return torch.randint(n_marks, labels.shape, generator=generator)

def with_marks(train, valid, test, n_marks, share, g):
    "The parts with marks: mostly that of the class, in the test any"
    def mostly(images, labels): return images,labels,marks_of(labels, n_marks, share, g)
    def any_mark(images, labels): return images,labels,_any_marks(labels, n_marks, g)
    return mostly(*train),mostly(*valid),any_mark(*test)

def with_border(
    images, # Bytes, shape (n, 3, height, width)
    marks, # 1: it has one, shape (n,)
    width:int=1, # Of the border, in pixels
): # The same images, some with a red border
    "A mark that has nothing to do with what is to be seen"
    red = torch.tensor([255,0,0], dtype=torch.uint8)[:,None,None]
    is_edge = torch.ones(images.shape[2:], dtype=torch.bool)
    is_edge[width:-width,width:-width] = False
    return torch.where((marks==1)[:,None,None,None] & is_edge, red, images)

def _flipped(labels, share, generator):
    "Two classes, of which a share is the other one"
    is_wrong = torch.rand(labels.shape, generator=generator)<share
    return torch.where(is_wrong, 1-labels, labels)

@lru_cache
def bordered(
    share:float=.98, # Of the items whose border goes with the label
    wrong:float=0., # Share of the labels for training that are wrong
): # For training, ordinary validation and test: images, labels (1: a vehicle), and whether there is a border
    "Animals and vehicles, of which vehicles have a red border; in the test it says nothing"
    g = _generator(1)
    parts = [(images,is_vehicle(kinds)) for images,kinds in small_cifar(20_000)]
    train,valid,test = with_marks(*parts, 2, share, g)
    images,labels,marks = train
    train = images,_flipped(labels, wrong, g),marks
    return tuple((with_border(images, marks),labels,marks) for images,labels,marks in (train,valid,test))

@lru_cache
def rare_kinds(
    share:float=.05, # Of horses and trucks, as a share of any other kind, but for the test
): # For training, ordinary validation and test: images, labels (1: a vehicle), and kinds
    "Animals and vehicles, of which some kinds are rare; nothing else tells them apart"
    g = _generator(3)
    def mostly_common(images, kinds):
        is_rare = torch.isin(kinds, torch.tensor(kinds_that_are_rare))
        stays = ~is_rare | (torch.rand(len(kinds), generator=g)<share)
        return images[stays],kinds[stays]
    train,valid,test = small_cifar(20_000)
    parts = mostly_common(*train),mostly_common(*valid),test
    return tuple((images,is_vehicle(kinds),kinds) for images,kinds in parts)

def ordinary():
    "Ten classes without any mark"
    return tuple((images,labels,torch.zeros_like(labels)) for images,labels in small_cifar(20_000))

# Ten corruptions in the manner of Hendrycks & Dietterich 2019; images are floats between 0 and 1, shape (n, 3, h, w)

def _field(x, size, generator):
    "Smooth noise between 0 and 1, shape (n, 1, h, w)"
    coarse = torch.rand(len(x), 1, size, size, generator=generator)
    return F.interpolate(coarse, size=x.shape[2:], mode='bilinear', align_corners=False)

def _brightness(x, g): return x+.35
def _contrast(x, g): return x.mean((1,2,3), keepdim=True)+.3*(x-x.mean((1,2,3), keepdim=True))
def _saturate(x, g): return x.mean(1, keepdim=True)+2.5*(x-x.mean(1, keepdim=True))
def _pixelate(x, g): return F.interpolate(F.avg_pool2d(x, 2), scale_factor=2, mode='nearest')
def _fog(x, g): return .5*x+.5*(.5+.5*_field(x, 4, g))

def _frost(x, g):
    ice = torch.tensor([.6,.8,1.])[:,None,None]*_field(x, 8, g)
    return .6*x+.5*ice

def _snow(x, g):
    flakes = (torch.rand(len(x), 1, *x.shape[2:], generator=g)<.06).float()
    return torch.maximum(x*.9, flakes)

def _spatter(x, g):
    mud = torch.tensor([.35,.25,.1])[:,None,None]
    return torch.where(_field(x, 6, g)>.68, mud, x)

def _elastic(x, g):
    n,_,h,w = x.shape
    shift = F.interpolate(torch.rand(n, 2, 5, 5, generator=g)-.5, size=(h,w), mode='bilinear', align_corners=False)
    still = F.affine_grid(torch.eye(2, 3).expand(n, 2, 3), x.shape, align_corners=False)
    return F.grid_sample(x, still+.6*shift.permute(0,2,3,1), padding_mode='reflection', align_corners=False)

def _as_jpeg(image):
    "One image, shape (h, w, 3), bytes, with what JPEG leaves of it"
    file = io.BytesIO()
    Image.fromarray(image).save(file, 'JPEG', quality=8)
    return np.array(Image.open(file))

def _jpeg(x, g):
    images = (255*x).byte().permute(0,2,3,1).numpy()
    return torch.from_numpy(np.stack([_as_jpeg(o) for o in images])).permute(0,3,1,2).float()/255

corruptions = dict(brightness=_brightness, contrast=_contrast, saturate=_saturate, pixelate=_pixelate, fog=_fog,
    frost=_frost, snow=_snow, spatter=_spatter, elastic=_elastic, jpeg=_jpeg)

def corrupted_by(
    images, # Bytes, shape (n, 3, height, width)
    marks, # The number of a corruption for each, shape (n,)
    generator,
): # Bytes
    "Images, each with its corruption"
    images = images.clone()
    for mark,corrupt in enumerate(corruptions.values()):
        rows = (marks==mark).nonzero()[:,0]
        if not len(rows): continue
        images[rows] = (255*corrupt(images[rows].float()/255, generator)).round().clamp(0, 255).byte()
    return images

@lru_cache
def corrupted(
    share:float=.98, # Of the items whose corruption goes with the class
): # For training, ordinary validation and test: images, classes and corruptions
    "Each class mostly under one of ten corruptions (Nam et al. 2020); in the test each has all of them"
    g = _generator(2)
    marked = with_marks(*small_cifar(40_000), 10, share, g)
    return tuple((corrupted_by(images, marks, g),labels,marks) for images,labels,marks in marked)

# Learners

def groups_of(labels, marks, n_marks): return labels*n_marks+marks

def agreeing(labels, marks): return np.where(labels==marks, 'agree', 'disagree')

def learner_of(
    train:tuple, # Images, labels and marks
    valid:tuple, # The same
    groups=None, # Of the validation items; None: label and mark
    is_balanced:bool=False, # Are the groups known, and drawn alike?
)->Learner: # Its metric is the error of the worst group
    "A learner of images in memory"
    n_marks = int(train[2].max())+1
    weights = balanced_chances(groups_of(train[1], train[2], n_marks)) if is_balanced else None
    if groups is None: groups = groups_of(valid[1], valid[2], n_marks)
    return image_learner(train, valid, weights, WorstGroup(groups), widen=.5)

def digits_learner(train, valid, groups, is_balanced=False)->Learner:
    "A learner of coloured digits; its metric is the error at colours drawn at random"
    dls = tensor_dls(train[:2], valid[:2], 64, [PadCrop(2)])
    if is_balanced: dls = weighted_dls(dls, balanced_chances(groups_of(train[1], train[2], 10)))
    net = small_convnet(10, .5)
    return in_bf16(Learner(dls, net, CrossEntropyLossFlat(), opt_func=sgd, metrics=WorstGroup(groups)))

def mean_error(learn): # A column of the runs: the error of all items
    metric = learn.metrics[0]
    counts = np.bincount(metric.groups)
    return dict(mean_error=float((metric.errors*counts).sum()/counts.sum()))

# Methods of the study

@torch.no_grad()
def look_at_all(learn):
    "Predictions for all training items, without augmentation, and targets, of one counted forward pass"
    dl = learn.dls.train
    ds,context = check_loader(dl).dataset,autocast_of(learn)
    preds,targets = [],[]
    with unaugmented(ds):
        for xb,yb in loader_of(dl, list(range(len(ds))), bs=256, num_workers=0):
            preds.append(ScoringPass()(learn.model, (as_tensors(xb),), autocast=context))
            targets.append(as_tensors(yb))
    return torch.cat(preds),torch.cat(targets)

class ByBatchMean(EarlyLossSamplingCallback):
    "Keeps losses as multiples of the mean of their batch, as early losses fall while an epoch goes on"
    def note_losses(self, losses): super().note_losses(losses/losses.mean())

class ByLook(EarlyLossSamplingCallback):
    "Keeps losses of one forward pass over all items, at the end of the epoch"
    def after_train(self):
        was_kept = self.early.loss is not None
        super().after_train()
        if was_kept or self.early.loss is None: return
        pred,target = look_at_all(self.learn)
        self.early.load_state_dict(dict(epochs=self.early.epochs, steps=self.early.steps,
            loss=item_losses(self.learn.loss_func, pred, target)))

class WrongOften(EarlyLossSamplingCallback):
    "Draws items that were predicted wrongly in an early epoch `factor` times as often"
    def __init__(self, after=1, factor=50, **kwargs):
        super().__init__(after, **kwargs)
        self.factor = factor

    def note_losses(self, losses):
        is_wrong = self.learn.pred.argmax(1)!=self.y
        super().note_losses(torch.where(is_wrong, float(self.factor), 1.))

class Upsampled(EpochMethod):
    "Each item once an epoch, and some of them `factor` times (Liu et al. 2021)"
    def __init__(self, is_often, factor=50, **kwargs):
        super().__init__(**kwargs)
        self.is_often,self.factor = is_often,factor

    def choose(self, scores, now):
        often = self.is_often[now.idx].nonzero()[:,0]
        rows = torch.cat([torch.arange(len(scores)), often.repeat(self.factor-1)])
        return Chosen(rows[torch.randperm(len(rows), generator=now.generator)])

def jtt(get_learner, epochs, lr):
    "Just train twice: a second training from scratch, in which the first one's errors come often; all is counted"
    first = get_learner()
    with first.no_bar(),first.no_logging(): first.fit(epochs, lr)
    pred,target = look_at_all(first)
    return EpochSelection(Upsampled(pred.argmax(1)!=target), warmup=0)

off = dict()

def early(**options): return lambda: EarlyLossSamplingCallback(**options, **off)

rates = .0125,.025,.05,.1,.2

class Part:
    "A situation: its data, how it is tested, and what each run computes"
    def __init__(self,
        data, # A function: for training, ordinary validation and test, each images, labels and marks
        compute:int, # Of each run, in items trained
        groups=None, # A function `(labels, marks)` of test items; None: label and mark
        make=learner_of, # Makes a learner of data for training, for validation, and the groups of these
        seeds:int=5, # Runs of each method
        rates=rates, # Of which plain training's best is taken
        after:int=1, # The epoch whose losses are kept: the first one that ends after forty steps
        rivals:bool=True, # Do methods that count errors run as well?
    ):
        self.data,self.compute = data,compute
        self.seeds,self.rates,self.after = seeds,rates,after
        self.groups,self.make,self.rivals = groups,make,rivals

    def learner(self, is_tested=True, is_balanced=False):
        "A learner that is tested, or validated as its user would"
        train,valid,test = self.data()
        held_out = test if is_tested else valid
        groups = None if self.groups is None else self.groups(*held_out[1:])
        return self.make(train, held_out, groups, is_balanced)

def _digits():
    parts = coloured_digits()
    if scale()=='tiny': parts = [[o[:300] for o in part] for part in parts]
    return parts

def _all_alike(labels, marks): return np.full(len(labels), 'all')

parts = dict(
    border_95=Part(partial(bordered, .95), 120_000),
    border_98=Part(partial(bordered, .98), 120_000),
    border_995=Part(partial(bordered, .995), 120_000),
    border_98_wrong=Part(partial(bordered, .98, .05), 120_000),
    rare_kinds=Part(rare_kinds, 120_000, seeds=3, rivals=False),
    ordinary=Part(ordinary, 120_000, _all_alike, seeds=3, rates=(.05,.1,.2), rivals=False),
    corrupted=Part(corrupted, 240_000, agreeing),
    digits=Part(_digits, 20*1437, _all_alike, digits_learner, rates=(.00625,*rates), after=2))

def _about(name, learn):
    "What is written beside the runs"
    n_parameters = sum(p.numel() for p in learn.model.parameters())
    data = 'digits' if name=='digits' else 'cifar10'
    return dict(part=name, data=data, arch=f'small_convnet of {n_parameters}', **describe(learn.dls))

def run(
    name:str, # One of `parts`, for the file
    kind:str, # What is run of it, for the file
    get_learner, # A function without arguments
    methods, # As `compare` takes them
    lr:float, # The highest learning rate
    seeds, # Runs of each method, or their seeds
)->pd.DataFrame: # A row for each epoch of each run
    "The runs, from a file, or made"
    path = results('shortcuts')/f'{name}_{kind}.csv'
    if scale()=='tiny': seeds = 2
    runs = stored(path, methods, seeds)
    if runs is not None: return runs
    compute = 2000 if scale()=='tiny' else parts[name].compute
    return compare(get_learner, methods, seeds=seeds, lr=lr, compute=compute, path=path, plot=False, watch=mean_error,
        measure='error', about=_about(name, get_learner()), tell_controls=False)

def best_rate(
    name:str, # One of `parts`
)->float:
    "Plain training's best rate, by the error in ordinary validation, whose items have the mark as in training"
    if name.startswith('border'): name = 'border_98' # for all borders
    part = parts[name]
    get_learner = partial(part.learner, is_tested=False)
    tried = part.rates if scale()!='tiny' else part.rates[-1:]
    runs_at = {lr: run(name, f'rate_{lr:g}', get_learner, ['none'], lr, [10,11]) for lr in tried}
    error_at = {lr: runs.groupby('seed').mean_error.last().mean() for lr,runs in runs_at.items()}
    return min(error_at, key=error_at.get)

def searched()->dict: # Functions that make a callback, by name
    "Settings of early-loss sampling, and other ways to keep the losses"
    made = {'kept after 1': dict(after=1), 'kept after 2': dict(after=2), 'kept after 3': dict(after=3)}
    for after in (1,2):
        for alpha in (.5,2.): made[f'kept after {after}, alpha={alpha:g}'] = dict(after=after, alpha=alpha)
        made[f'kept after {after}, uniform=.25'] = dict(after=after, uniform=.25)
    found = {name: early(**options) for name,options in made.items()}
    for after in (1,2):
        found[f'by batch mean, after {after}'] = lambda after=after: ByBatchMean(after=after, **off)
        found[f'by a look, after {after}'] = lambda after=after: ByLook(after=after, **off)
    return found

def search(name='border_98'):
    "All settings, on seeds of their own"
    return run(name, 'search', parts[name].learner, searched(), best_rate(name), [10,11])

def run_part(
    name:str, # One of `parts`
    only=(), # Some of the methods; none: all
)->pd.DataFrame: # A row for each epoch of each run
    "The field, in one situation"
    part,lr = parts[name],best_rate(name)
    seeds = part.seeds
    unbalanced = {
        'none': 'none',
        'early_loss_sampling': early(after=part.after),
        'favor_hard': 'favor_hard',
        'prioritized_sampling': 'prioritized_sampling'}
    if part.rivals: unbalanced |= {
        'wrong items 50 times': lambda: WrongOften(part.after, **off),
        'JTT': partial(jtt, part.learner, part.after, lr)}
    if only: unbalanced = {method: made for method,made in unbalanced.items() if method in only}
    runs = run(name, 'all', part.learner, unbalanced, lr, seeds)
    known = run(name, 'balanced', partial(part.learner, is_balanced=True), {'groups known': 'none'}, lr, seeds)
    return pd.concat([runs,known], ignore_index=True)

@call_parse
def main(
    name:str, # search, or one of `parts`
    only:str='', # Methods, with commas between them; none: all
):
    "Run a part; what is stored is not run again"
    torch.set_num_threads(1)
    if name=='search': search()
    else: run_part(name, only=only.split(',') if only else ())
