"""Wrong labels by frozen features and folds, beside other ways: `python -m studies.frozen_labels` runs what is not
stored yet: results/frozen_labels.csv"""
import hashlib, time
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np, pandas as pd, torch
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.torch_core import set_seed
from fastai.vision.augment import Flip
from fastcore.script import call_parse
from torch import nn
from torch.nn import functional as F

from selback.all import *
from selback.bench.datasets import PadCrop, TensorDL, TensorItems, small_convnet, tensor_dls
from selback.clean.doctor import epochs_for
from selback.clean.features import n_confident, out_of_fold
from selback.core.neighbours import unit
from studies import pretrained, wrong_labels
from studies.easy_data import mnist
from studies.experiments import once, results_folder, rows_with, scale
from studies.regimes import cifar_parts, human_labels, sgd
from studies.wrong_labels import Situation, flipped, people

path = results_folder/'frozen_labels.csv'
kept = results_folder.parent/'runs/frozen_labels' # features

# Situations: images, labels as they should be, and as they are given; others for each seed

everything = torch.arange(10)
animals = torch.tensor([2,3,4,5,6,7])

def _drawn(n, seed, classes=everything):
    "Rows of CIFAR-10's training set"
    _,labels = cifar_parts()[0]
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1000+seed))
    return order[torch.isin(labels[order], classes)][:n]

def by_people(column, n, seed, classes=everything):
    "Images of some classes, if people filed them under one of these"
    images,labels = cifar_parts()[0]
    rows = _drawn(n, seed, classes)
    rows = rows[torch.isin(human_labels(column)[rows], classes)]
    truth,given = (torch.searchsorted(classes, o[rows]) for o in (labels, human_labels(column)))
    return images[rows],truth,given

def planted(n_wrong, seed):
    "Animals by people, of which some more are wrong"
    images,truth,given = by_people('random1', 1040, seed, animals)
    g = torch.Generator().manual_seed(seed)
    right = (truth==given).nonzero()[:,0]
    rows = right[torch.randperm(len(right), generator=g)[:n_wrong]]
    steps = torch.randint(1, len(animals), rows.shape, generator=g)
    return images,truth,given.index_copy(0, rows, (given[rows]+steps)%len(animals))

def rare(seed):
    "Cats, dogs and 20 ships; five ships are filed as cats, and 20 cats and dogs as each other"
    classes = torch.tensor([3,5,8])
    images,labels = cifar_parts()[0]
    rows = _drawn(1000, seed, classes)
    truth = torch.searchsorted(classes, labels[rows])
    ships,others = (truth==2).nonzero()[:20,0],(truth<2).nonzero()[:,0]
    order = torch.cat([ships, others])
    truth = truth[order]
    given = truth.clone()
    given[:len(ships)//4] = 0
    given[len(ships):len(ships)+20] = 1-truth[len(ships):len(ships)+20]
    return images[rows[order]],truth,given

def digits(seed):
    "MNIST, a tenth of it filed under any other digit"
    images,labels = mnist()[1]
    rows = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))[:1500]
    return images[rows].expand(-1, 3, -1, -1),labels[rows],flipped(labels[rows], 'symmetric', .1, seed)

situations = {
    'ten classes, 500': partial(by_people, 'random1', 500),
    'ten classes, 1000': partial(by_people, 'random1', 1000),
    'ten classes, 4000': partial(by_people, 'random1', 4000),
    'ten classes, 1000, best of three': partial(by_people, 'aggregate', 1000),
    'three classes, worst of three': partial(by_people, 'worst', 1800, classes=torch.tensor([0,1,8])),
    'cats and dogs': partial(by_people, 'random1', 800, classes=torch.tensor([3,5])),
    'animals, 20 planted': partial(planted, 20),
    'a rare class': rare,
    'digits': digits}

# those of `wrong_labels` with cleanlab's list: as pretrained networks had them there, and as small ones did
beside = {f'10,000, {labels}': Situation('cifar', labels, True, 16, 'frozen') for labels in people}
beside |= {f'10,000 of 16 pixels, {labels}': Situation('cifar', labels, True, 16) for labels in people}
beside['300 photographs'] = Situation('folder', 'misfiled 40', True, 15)

def items_of(name, seed): return beside[name].items(seed) if name in beside else situations[name](seed)

class Case(NamedTuple):
    "A situation of a seed"
    images:torch.Tensor # Bytes
    truth:torch.Tensor # Class numbers
    given:torch.Tensor # The same, some of them wrong
    x:torch.Tensor # Features, shape (n, features)
    seconds:float # Of the CPU, for the features
    seed:int
    name:str

    @property
    def n_classes(self): return int(self.given.max())+1

def _enlarged(images, pixels=96): return pretrained.larger(images, None if scale()=='tiny' else pixels)

@torch.no_grad()
def features(images): # Of the size that the body sees
    "What a pretrained body says of images, mean over the places"
    mean,std = (torch.tensor(o)[:,None,None] for o in pretrained.model_stats)
    model = pretrained.body()[0].eval().to(memory_format=torch.channels_last)
    return torch.cat([model((o/255-mean)/std).mean((2,3)) for o in images.split(64)])

def _kept_features(images):
    "The same, computed once, and the CPU seconds that it took"
    file = kept/f'{hashlib.sha1(images.numpy().tobytes()).hexdigest()[:16]}.pt'
    if not file.exists():
        start = time.process_time()
        x = features(images)
        kept.mkdir(parents=True, exist_ok=True)
        torch.save((x.half(),time.process_time()-start), file)
    x,seconds = torch.load(file)
    return x.float(),seconds

@lru_cache(maxsize=1) # methods come one after the other
def case_of(name, seed):
    images,truth,given = items_of(name, seed)
    return Case(images, truth, given, *_kept_features(_enlarged(images, 64 if name in beside else 96)), seed, name)

# Methods: of a case, and maybe of a network that has trained on it, they return its rows, the most suspect first, and
# how many may be wrong, or None

def _least_likely(probs, labels):
    "Rows by the probability of their labels; what is not known comes last"
    return np.argsort(probs[np.arange(len(labels)),labels], kind='stable')

def folds(case):
    labels = case.given.numpy()
    probs = out_of_fold(case.x, labels)
    return _least_likely(probs, labels),n_confident(probs, labels)

def as_many_as_cleanlab(case):
    "The same, and how many cleanlab listed by five trainings from scratch"
    about = beside[case.name]._asdict() | dict(net='small')
    if case.name=='300 photographs': about['seed'] = case.seed
    listed = rows_with(pd.read_csv(wrong_labels.path), about).listed
    return folds(case)[0],round(listed[listed>0].mean())

def by_cleanlab(case):
    "Of the same probabilities: its list by its own ranking, then the others by that"
    from cleanlab.filter import find_label_issues
    from cleanlab.rank import get_label_quality_scores
    labels = case.given.numpy()
    probs = np.nan_to_num(out_of_fold(case.x, labels), nan=1/case.n_classes)
    listed = find_label_issues(labels, probs, n_jobs=1)
    return np.lexsort((get_label_quality_scores(labels, probs), ~listed)),int(listed.sum())

def neighbours(case, n=20):
    "By the votes of the nearest others, each counted by its cosine"
    rows = unit(case.x)
    alike = rows@rows.T
    alike.fill_diagonal_(-1)
    alike,nearest = alike.topk(n)
    votes = F.one_hot(case.given[nearest], case.n_classes)*alike[...,None]
    probs = (votes.sum(1)/alike.sum(1, keepdim=True)).numpy()
    labels = case.given.numpy()
    return _least_likely(probs, labels),n_confident(probs, labels)

def _watch(learn, fit):
    "Train on all items and watch them"
    learn.watch_items()
    learn._do_epoch_validate = lambda *args: None # all items train
    with learn.no_bar(),learn.no_logging(): fit()
    return learn

def _head(case, lr):
    "A linear head on frozen features, watched for five epochs"
    set_seed(case.seed)
    items = [TensorItems(case.x, case.given, split_idx, case.n_classes) for split_idx in (0,1)]
    dls = DataLoaders.from_dsets(*items, bs=64, num_workers=0, device='cpu', dl_type=TensorDL)
    model = nn.Sequential(nn.BatchNorm1d(case.x.shape[1]), nn.Linear(case.x.shape[1], case.n_classes))
    learn = Learner(dls, model, CrossEntropyLossFlat())
    return _watch(learn, partial(learn.fit_one_cycle, 5, lr))

def watched(case, learn): return learn.selection.suspects().index.to_numpy(),learn.selection.estimated_errors()

def watched_head(case, lr): return watched(case, _head(case, lr))

def top_losses(case, lr):
    "Of that head, when it is trained"
    model = _head(case, lr).model.eval()
    with torch.no_grad(): probs = model(case.x).softmax(1)
    return _least_likely(probs.numpy(), case.given.numpy()),None

def found_by(case, learn):
    "By the body as it is"
    only = Learner(DataLoaders(learn.dls.train), learn.model, learn.loss_func)
    with only.no_bar(): return only.find_suspects().index.to_numpy(),None

# Networks: a learner

def _few(images, labels): return images[:64],labels[:64] # validation, which is not asked

def from_scratch(case):
    "A small network that trained at the images' own size"
    set_seed(case.seed)
    items = case.images,case.given
    augment = [PadCrop(2)] if case.name=='digits' else [PadCrop(2),Flip()]
    dls = tensor_dls(items, _few(*items), 32, augment, n_classes=case.n_classes)
    learn = Learner(dls, small_convnet(case.n_classes), CrossEntropyLossFlat(), opt_func=sgd)
    return _watch(learn, partial(learn.fit_one_cycle, 1 if scale()=='tiny' else epochs_for(len(case.given)), .1))

def as_it_came(case):
    "The pretrained network"
    set_seed(case.seed)
    items = _enlarged(case.images),case.given
    dls = pretrained.dls_of(items, _few(*items))
    model = pretrained.with_head(case.n_classes)
    return Learner(dls, model, CrossEntropyLossFlat(), splitter=pretrained.halves_and_head)

def tuned(case):
    "The same, fine-tuned on these labels"
    learn = as_it_came(case)
    return _watch(learn, partial(learn.fine_tune, 1 if scale()=='tiny' else 3))

@lru_cache(maxsize=1)
def trained(network, name, seed):
    "A network, and the CPU seconds that it took"
    case = case_of(name, seed)
    start = time.process_time()
    return network(case),time.process_time()-start

class Method(NamedTuple):
    tell:object # A function of a case, and of a network if there is one
    network:object=None # A function of a case

by_features = dict(folds=Method(folds), cleanlab=Method(by_cleanlab), neighbours=Method(neighbours))
rates = .003,.001 # the better two of four
by_features |= {f'watched head, {lr}': Method(partial(watched_head, lr=lr)) for lr in rates}
by_features |= {f'top_losses, {lr}': Method(partial(top_losses, lr=lr)) for lr in rates}
watched_from_scratch = {'watched, from scratch': Method(watched, from_scratch)}
by_bodies = {
    'find_suspects, as it came': Method(found_by, as_it_came),
    'find_suspects, from scratch': Method(found_by, from_scratch),
    'watched, fine-tuned': Method(watched, tuned),
    'find_suspects, fine-tuned': Method(found_by, tuned)}
as_listed = {'folds, as many as cleanlab': Method(as_many_as_cleanlab)}
methods = by_features | as_listed | watched_from_scratch | by_bodies

# What they find

columns = 'found','first_50','listed','precision','recall','before','seconds'

def score(order, is_wrong, listed=None): # By name
    "`precision` and `recall` are of as many of the first as may be wrong"
    first,n_wrong = is_wrong[order],is_wrong.sum()
    told = dict(found=first[:n_wrong].mean(), first_50=first[:50].mean())
    if not listed: return told
    rows = first[:listed]
    return told | dict(listed=listed, precision=rows.mean(), recall=rows.sum()/n_wrong)

def measured(situation, seed, method): # A DataFrame of one row
    "`before`: CPU seconds of the features, or of the network's training; `seconds`: of the method itself"
    case = case_of(situation, seed)
    tell,network = methods[method]
    args,before = (case,),case.seconds
    if network is not None:
        learn,before = trained(network, situation, seed)
        args = case,learn
    start = time.process_time()
    order,listed = tell(*args)
    seconds = time.process_time()-start
    is_wrong = (case.truth!=case.given).numpy()
    counts = dict(n=len(is_wrong), wrong=is_wrong.sum())
    about = dict(situation=situation, seed=seed, method=method) | counts
    row = about | score(order, is_wrong, listed) | dict(before=before, seconds=seconds)
    return pd.DataFrame([row], columns=[*about,*columns])

def plan():
    "What is run: situation, seed and method"
    for seed in range(2):
        for situation in situations: yield from ((situation, seed, method) for method in by_features)
    for situation in situations: yield from ((situation, 0, method) for method in watched_from_scratch)
    for seed in range(2): yield from (('ten classes, 1000', seed, method) for method in by_bodies)
    for situation in beside:
        for seed in range(4 if situation=='300 photographs' else 1):
            yield from ((situation, seed, method) for method in as_listed)

@call_parse
def main():
    "Measure what is not stored yet"
    torch.set_num_threads(1)
    for situation,seed,method in plan():
        keys = dict(situation=situation, seed=seed, method=method)
        rows = once(path, keys, partial(measured, **keys))
        print(situation, seed, method, round(rows.found.iloc[0], 3), flush=True)
