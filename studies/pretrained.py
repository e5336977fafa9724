"Fine-tuning a network with ImageNet's weights: `python -m studies.pretrained clean,border,noisy,frozen` runs all parts"
import time
from functools import lru_cache, partial
from typing import NamedTuple

import pandas as pd, torch
from fastai.callback.core import Callback
from fastai.callback.schedule import ParamScheduler
from fastai.data.core import DataLoaders
from fastai.data.transforms import Normalize
from fastai.layers import apply_init
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import error_rate
from fastai.torch_core import default_device, no_random, params
from fastai.vision.augment import Flip
from fastai.vision.learner import create_head
from fastcore.script import call_parse
from torch import nn
from torch.nn import functional as F

from selback.all import EarlyLossSamplingCallback, WorstGroup, balanced_chances
from selback.bench.compare import compare, describe
from selback.bench.compute import count_flops
from selback.bench.datasets import PadCrop, TensorDL, TensorItems
from selback.clean.reading import lite0
from studies import shortcuts
from studies.experiments import results, scale, stored
from studies.regimes import cifar_parts, human_labels, is_vehicle, weighted_dls
from studies.shortcuts import groups_of, mean_error, with_marks

class Size(NamedTuple):
    "How much is done at a scale"
    n_train:int # Images to train on
    n_valid:int # Others, by which the learning rate is chosen
    n_test:int
    pixels:int # Side of an image
    bs:int # Batch size
    seeds:int # Runs of each method
    rates:tuple # Of which plain training's best is taken, for the head
    epochs:int=3 # Of all items, with the whole network; the compute of a run

sizes = dict(
    tiny=Size(96, 40, 60, 32, 16, 2, (.003,)),
    small=Size(960, 600, 1_000, 64, 32, 3, (.0003,.001,.003)),
    paper=Size(5_000, 2_000, 10_000, 96, 64, 5, (.0003,.001,.003)))

def size()->Size: return sizes[scale()]

# The network

model_stats = [127/255]*3,[128/255]*3 # mean and deviation that the weights were trained with (Tan & Liu 2020)

class Body(nn.Sequential):
    "An early and a late half, whose BatchNorm keeps ImageNet's statistics: those of few small images are poor"
    def train(self, mode=True):
        super().train(mode)
        for o in self.modules():
            if isinstance(o, nn.BatchNorm2d): o.eval()
        return self

def _tiny_body():
    def layer(n_in, n, stride): return nn.Sequential(nn.Conv2d(n_in, n, 3, stride), nn.BatchNorm2d(n), nn.ReLU())
    return Body(layer(3, 8, 4), layer(8, 8, 2)),8

def body(
    has_weights:bool=True, # ImageNet's? False: random ones
): # A model of an early and a late half, and how many channels it returns
    "What is in a pretrained network before its head; at the tiny scale a stand-in with random weights"
    if scale()=='tiny': return _tiny_body()
    net = lite0(has_weights)
    stem,stem_norm,blocks,last,last_norm,*_,activation = net.children()
    half = len(blocks)//2
    early = nn.Sequential(stem, stem_norm, activation, *blocks[:half])
    late = nn.Sequential(*blocks[half:], last, last_norm, activation)
    return Body(early, late),1280

def halves_and_head(model): # Its parameters, in three groups
    "What has a learning rate of its own, as in fastai's ResNets"
    (early,late),head = model
    return [params(o) for o in (early,late,head)]

def with_head(
    n_classes:int,
): # A model
    "A pretrained body with a new head, as `vision_learner` makes it"
    made,n = body()
    head = create_head(n, n_classes)
    apply_init(head)
    return nn.Sequential(made, head).to(memory_format=torch.channels_last)

# Data: images, labels, and the mark that goes with the label

def larger(x, pixels=None):
    "Images of the size that is trained on, or of another one"
    pixels = pixels or size().pixels
    parts = (F.interpolate(o.float(), size=pixels, mode='bicubic', antialias=True) for o in x.split(5000))
    return torch.cat([o.clamp(0, 255).round().byte() for o in parts])

@lru_cache
def enlarged():
    "CIFAR-10: images, classes and rows in the training set; for training, ordinary validation, and the test"
    (images,labels),(test,test_labels) = cifar_parts()
    n,n_valid,n_test = size()[:3]
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    parts = [(larger(images[rows]),labels[rows],rows) for rows in (order[:n],order[n:n+n_valid])]
    rows = torch.randperm(len(test), generator=torch.Generator().manual_seed(0))[:n_test]
    return *parts,(larger(test[rows]),test_labels[rows],rows)

def unmarked(): return tuple((images,labels,torch.zeros_like(labels)) for images,labels,_ in enlarged())

def mislabelled():
    "For training, labels of which people got 40 % wrong (CIFAR-10N's worst); else the true ones"
    (images,_,marks),*others = unmarked()
    return (images,human_labels('worst')[enlarged()[0][2]],marks),*others

def with_border(
    images, # Bytes, shape (n, 3, height, width)
    marks, # 1: it has one, shape (n,)
): # The same images, some with a red border of a sixteenth of their width
    "A mark that has nothing to do with what is to be seen"
    return shortcuts.with_border(images, marks, max(1, images.shape[-1]//16))

@lru_cache
def bordered(
    share:float=.98, # Of the items whose border goes with the label
): # For training, ordinary validation and test: images, labels (1: a vehicle), and whether there is a border
    "Animals and vehicles, of which vehicles have a red border; in the test it says nothing"
    g = torch.Generator().manual_seed(1)
    parts = [(images,is_vehicle(kinds)) for images,kinds,_ in enlarged()]
    return tuple((with_border(images, marks),labels,marks) for images,labels,marks in with_marks(*parts, 2, share, g))

def dls_of(
    train:tuple, # Images, labels and more
    valid:tuple, # The same
    weights=None, # How likely each item is drawn; None: each comes once an epoch
):
    "Data as the pretrained network wants them"
    device = default_device()
    tfms = [PadCrop(size().pixels//16), Flip(), Normalize.from_stats(*model_stats, cuda=False)]
    def items(part, split_idx): return TensorItems(*(o.to(device) for o in part[:2]), split_idx)
    dls = DataLoaders.from_dsets(items(train, 0), items(valid, 1), bs=size().bs, after_batch=tfms, num_workers=0,
        device=device, dl_type=TensorDL)
    return dls if weights is None else weighted_dls(dls, weights)

# Learners

class Discriminative(Callback):
    "The body learns slower than its head, by the factors of `fine_tune`"
    order,run_valid = ParamScheduler.order+1,False
    def before_batch(self):
        lr = self.opt.hypers[-1]['lr']
        self.opt.set_hyper('lr', [lr/100, lr/10, lr])

def freeze_all(learn):
    "Nothing of the body trains; `Learner.freeze` by itself leaves BatchNorm's weights to train"
    learn.train_bn = False
    learn.freeze()

def _new_learner(dls, metrics):
    n_classes = dls.c
    return Learner(dls, with_head(n_classes), CrossEntropyLossFlat(), splitter=halves_and_head, metrics=metrics,
        cbs=Discriminative())

@lru_cache(maxsize=1) # methods of a seed come one after the other
def head_trained(
    name:str, # One of `parts`
    is_balanced:bool, # Are the groups known, and drawn alike?
    lr:float, # The highest learning rate
    seed:int,
)->dict: # Weights
    "The frozen epoch of `fine_tune`, alike for all methods of a seed"
    part = parts[name]
    train,valid,_ = part.data()
    few = tuple(o[:2] for o in valid)
    with no_random(seed):
        learn = _new_learner(dls_of(train, few, part.weights(is_balanced)), None)
        learn.freeze()
        with learn.no_bar(),learn.no_logging(): learn.fit_one_cycle(1, lr, pct_start=.99)
    return {name: o.clone() for name,o in learn.model.state_dict().items()}

class Part:
    "A situation: its data, what is measured, and the methods"
    def __init__(self,
        name:str, # By which it is known
        data, # A function: for training, ordinary validation and test, each images, labels and marks
        methods, # As `compare` takes them
        is_frozen:bool=False, # Does the body stay frozen?
        has_groups:bool=False, # Is the error that of the worst group of label and mark?
        rate_of:str|None=None, # The part whose learning rate it has; None: its own
        others=(), # More methods, in a file of their own
    ):
        self.name,self.data,self.methods = name,data,methods
        self.is_frozen,self.has_groups = is_frozen,has_groups
        self.rate_of = rate_of or name
        self.others = others

    def weights(self, is_balanced):
        if not is_balanced: return
        _,labels,marks = self.data()[0]
        return balanced_chances(groups_of(labels, marks, 2))

    def untrained(self, is_tested=True, is_balanced=False)->Learner:
        "A learner that is tested, or validated as its user would, with a new head"
        train,valid,test = self.data()
        held_out = test if is_tested else valid
        metric = WorstGroup(groups_of(*held_out[1:], 2)) if self.has_groups else error_rate
        return _new_learner(dls_of(train, held_out, self.weights(is_balanced)), metric)

    def learner(self, lr, is_tested=True, is_balanced=False)->Learner:
        "The same when its head has trained for an epoch, by the seed that is set"
        learn = self.untrained(is_tested, is_balanced)
        trained = head_trained(self.name, is_balanced, 2*lr, torch.initial_seed()) # as `fine_tune` halves the rate
        learn.model.load_state_dict(trained)
        if self.is_frozen: freeze_all(learn)
        return learn

def _early(): return EarlyLossSamplingCallback()

parts = {part.name: part for part in (
    Part('clean', unmarked, ['none','favor_hard(beta=.5)','favor_hard','selective_backprop','random_subset(keep=.5)'],
        others=['drop_easy','info_batch','prioritized_sampling']),
    Part('border', bordered, {'none': 'none', 'favor_hard': 'favor_hard', 'early_loss_sampling': _early},
        has_groups=True, rate_of='clean'),
    Part('noisy', mislabelled, ['none','favor_hard'], rate_of='clean'),
    Part('frozen', unmarked, ['none','favor_hard','selective_backprop'], is_frozen=True))}

def _about(part, learn):
    "What is written beside the runs"
    n_parameters = sum(p.numel() for p in learn.model.parameters())
    arch = f'efficientnet-lite0 with a new head, {n_parameters} parameters'
    return dict(part=part.name, data='cifar10', pixels=size().pixels, arch=arch, **describe(learn.dls))

def run(
    name:str, # One of `parts`
    file:str, # For the runs
    methods, # As `compare` takes them
    lr:float, # The highest learning rate, of the head
    seeds, # Runs of each method, or their seeds
    **options # Of `Part.learner`
)->pd.DataFrame: # A row for each epoch of each run
    "The runs, from a file, or made"
    part,path = parts[name],results('pretrained')/f'{file}.csv'
    runs = stored(path, methods, seeds)
    if runs is not None: return runs
    about = _about(part, part.untrained(**options))
    torch.manual_seed(seeds[0]) # `compare` makes a learner first, which then is that of its first run
    watch = mean_error if part.has_groups else None
    compute = size().epochs*size().n_train
    return compare(partial(part.learner, lr, **options), methods, seeds=seeds, lr=lr, compute=compute, path=path,
        about=about, watch=watch, measure='error', plot=False, tell_controls=False)

def tried(
    name:str, # One of `parts`, which has a rate of its own
)->pd.Series: # By the rate
    "Plain training's error in ordinary validation at each rate, whose items have the mark as in training"
    found = {}
    for lr in size().rates:
        ends = run(name, f'search_{name}_{lr:g}', ['none'], lr, [10], is_tested=False)
        found[lr] = ends['mean_error' if parts[name].has_groups else 'error'].iloc[-1]
    return pd.Series(found)

def best_rate(name)->float: return float(tried(parts[name].rate_of).idxmin())

def run_part(
    name:str, # One of `parts`
    seeds:int=0, # Runs of each method; 0: as many as the scale has
)->pd.DataFrame: # A row for each epoch of each run
    "The methods, in one situation"
    part,lr,seeds = parts[name],best_rate(name),[*range(seeds or size().seeds)]
    runs = [run(name, f'{name}_all', part.methods, lr, seeds)]
    if part.others: runs.append(run(name, f'{name}_others', part.others, lr, seeds))
    if part.has_groups:
        runs.append(run(name, f'{name}_balanced', {'groups known': 'none'}, lr, seeds, is_balanced=True))
    return pd.concat(runs, ignore_index=True)

# What there is to know beside the runs

def _table(file, rows):
    "A table from a file, or made"
    path = results('pretrained')/f'{file}.csv'
    if not path.exists():
        about = _about(parts['clean'], parts['clean'].untrained())
        pd.DataFrame([row | about for row in rows()]).to_csv(path, index=False, float_format='%.6g')
    return pd.read_csv(path)

@torch.no_grad()
def _features(model, images):
    mean,std = (torch.tensor(o)[:,None,None] for o in model_stats)
    batches = images.split(100)
    return torch.cat([model.eval()((x/255-mean)/std).mean((2,3)) for x in batches])

def _linear_errors():
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    (x,y,_),(valid,wanted,_),_ = enlarged()
    for name,has_weights in {'ImageNet weights': True, 'random weights': False}.items():
        torch.manual_seed(0)
        model,_ = body(has_weights)
        linear = make_pipeline(StandardScaler(), LogisticRegression(C=.001, max_iter=500))
        linear.fit(_features(model, x), y)
        yield dict(weights=name, error=1-linear.score(_features(model, valid), wanted))

def linear_errors()->pd.DataFrame: # A row for each
    "Are the weights what they are said to be? Errors of a linear model of what the body returns"
    return _table('linear', _linear_errors)

def _seconds(run, times=5):
    run()
    began = time.process_time()
    for _ in range(times): run()
    return (time.process_time()-began)/times

def _frozen_as(how):
    learn = parts['clean'].untrained()
    if how=='body frozen': learn.freeze()
    if how=='body frozen, BatchNorm too': freeze_all(learn)
    return learn

def _look_costs():
    for how in ('whole network','body frozen','body frozen, BatchNorm too'):
        learn = _frozen_as(how)
        x,y = learn.dls.train.one_batch()
        model = learn.model.train()
        def look():
            with torch.no_grad(): return model(x)
        def step(): learn.loss_func(model(x), y).backward()
        flops = {name: count_flops(o)[1]/len(x) for name,o in dict(look=look, step=step).items()}
        yield dict(trains=how, look=flops['look'], step=flops['step'], look_seconds=_seconds(look)/len(x),
            step_seconds=_seconds(step)/len(x))

def look_costs()->pd.DataFrame: # FLOPs of a look and a step for an item, and seconds on one core
    "What a look costs beside a training step, by what trains"
    return _table('look_costs', _look_costs)

@call_parse
def main(
    names:str, # Of `parts`, with commas between them
    seeds:int=0, # Runs of each method; 0: all
):
    "Run parts; what is stored is not run again"
    torch.set_num_threads(1)
    for name in names.split(','): run_part(name, seeds)
    linear_errors()
    look_costs()
