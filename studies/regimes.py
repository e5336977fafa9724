"Kinds of data on which choosing may pay or not: `python -m studies.regimes NAME` runs one"
import tempfile
from functools import lru_cache, partial
from pathlib import Path

import numpy as np, pandas as pd, torch
from fastai.callback.data import WeightedDL
from fastai.data.core import DataLoaders
from fastai.data.external import URLs, fastai_path, untar_data
from fastai.data.transforms import Normalize
from fastai.layers import ConvLayer
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import AccumMetric, error_rate
from fastai.optimizer import OptimWrapper
from fastai.torch_core import default_device
from fastai.vision.augment import Flip, Resize
from fastai.vision.data import ImageDataLoaders, imagenet_stats
from fastcore.script import call_parse
from PIL import Image
from torch import nn
from torch.nn import functional as F

from selback.core.scoring import counting
from selback.all import (InclusionSelection, record_choices, reducible_loss, ReplayChoicesCallback,
    SelectiveBackpropCallback, step_inclusion)
from selback.bench.datasets import PadCrop, TensorDL, datasets, small_convnet, tensor_dls
from selback.bench.compare import compare, describe
from studies.experiments import in_bf16, results, scale, stored

@lru_cache
def cifar_parts():
    "Images and labels of the training and the validation set"
    if scale()!='tiny': return tuple((images,labels) for images,labels in datasets['cifar10']()[:2])
    g = torch.Generator().manual_seed(0)
    return tuple((torch.randint(256, (n,3,32,32), generator=g, dtype=torch.uint8),torch.arange(n)%10) for n in (600,200))

def _generator(): return torch.Generator().manual_seed(0)

def near_duplicates(
    n_items:int=20_000, # Items of the training set
    n_images:int=5000, # Of so many images
    exponent:float=1.1, # Of Zipf's law: the k-th image has a share in proportion to k^-exponent
)->tuple: # Images, labels, and the number of the image that each item is a copy of
    "Copies of images, each a little moved and lit in its own way; the first of each is the image itself"
    g,(images,labels) = _generator(),cifar_parts()[0]
    n_images = min(n_images, len(labels)//2)
    n_items = min(n_items, 4*n_images)
    rows = torch.randperm(len(labels), generator=g)[:n_images]
    p = torch.arange(1, n_images+1).double()**-exponent
    copies = torch.multinomial(p, n_items-n_images, replacement=True, generator=g)
    moved = images[rows[copies]].float()
    light = .85+.3*torch.rand(len(copies), 1, 1, 1, generator=g)
    shifts = torch.randint(-2, 3, (len(copies),2), generator=g)
    for i,(dy,dx) in enumerate(shifts.tolist()): moved[i] = moved[i].roll((dy,dx), (1,2))
    of = torch.cat([torch.arange(n_images), copies])
    return torch.cat([images[rows], (moved*light).clamp(0, 255).byte()]),labels[rows[of]],of

def long_tail(
    imbalance:float=100., # How many times as many items the first class has as the last one
)->tuple: # Images and labels
    "Classes that get rarer from the first to the last one, each by the same factor (Cui et al. 2019)"
    images,labels = cifar_parts()[0]
    n = int((labels==0).sum())
    rows = [torch.nonzero(labels==c)[:max(2, int(n*imbalance**(-c/9))),0] for c in range(10)]
    return images[torch.cat(rows)],labels[torch.cat(rows)]

vehicles = 0,1,8,9 # airplane, automobile, ship and truck
rare_kinds = 7,9 # horses among the animals, trucks among the vehicles

def hidden_groups(
    imbalance:float=50., # How many times as many items a common kind has as a rare one
)->tuple: # Images, labels (1: a vehicle), and kinds, of the training and the validation set
    "Animals and vehicles, of which some kinds are rare in training"
    (images,kinds),(valid,valid_kinds) = cifar_parts()
    n = int((kinds==0).sum())
    rows = torch.cat([torch.nonzero(kinds==c)[:max(2, int(n/imbalance)) if c in rare_kinds else n,0] for c in range(10)])
    def is_vehicle(kinds): return torch.isin(kinds, torch.tensor(vehicles)).long()
    return (images[rows],is_vehicle(kinds[rows]),kinds[rows]),(valid,is_vehicle(valid_kinds),valid_kinds)

def human_labels(
    column:str, # 'aggregate' (9 % are wrong), 'random1' to 'random3' (18 %) or 'worst' (40 %)
)->torch.Tensor: # Class numbers, shape (50000,); raises a `FileNotFoundError` without the file
    "CIFAR-10N: labels that people gave (Wei et al. 2022); `cifar10n.csv.gz`, with a row for each image and the columns 'file', 'clean' and `column`, lies in fastai's data folder"
    images,labels = cifar_parts()[0]
    if scale()=='tiny': return (labels+(torch.rand(len(labels), generator=_generator())<.4))%10
    path = fastai_path('data')/'cifar10n.csv.gz'
    if not path.exists(): raise FileNotFoundError(f'{path}: wanted a table with the columns file, clean and {column}; make it from the labels of github.com/UCSC-REAL/cifar-10-100n.')
    df = pd.read_csv(path).sort_values('file')
    names = sorted(df.clean.unique())
    if [names.index(o) for o in df.clean]!=labels.tolist(): raise ValueError('cifar10n.csv.gz: got other images than those of fastai\'s CIFAR-10, wanted the same files.')
    return torch.tensor([names.index(o) for o in df[column]])

sgd = partial(OptimWrapper, opt=partial(torch.optim.SGD, momentum=.9, nesterov=True, weight_decay=5e-4))

class WeightedTensorDL(WeightedDL, TensorDL):
    "Draws items in memory by weights"

def image_learner(
    train:tuple, # Images and labels
    valid:tuple|None=None, # The same; None: CIFAR-10's own
    weights=None, # How likely each item is drawn, with replacement; None: each comes once an epoch
    metric=error_rate, # An error
    widen:float=1., # Width of the network, as a multiple
    bs:int=64, # Batch size
)->Learner:
    "A learner of images in memory"
    dls = tensor_dls(train[:2], (valid or cifar_parts()[1])[:2], bs, [PadCrop(2),Flip()])
    if weights is not None: dls = DataLoaders(WeightedTensorDL(dls.train_ds, bs=bs, wgts=np.asarray(weights, float), shuffle=True, drop_last=True, num_workers=0,
        after_batch=dls.train.after_batch, device=dls.device), dls.valid)
    return in_bf16(Learner(dls, small_convnet(int(train[1].max())+1, widen), CrossEntropyLossFlat(), opt_func=sgd, metrics=metric))

def balanced(
    groups:torch.Tensor, # The group of each item, shape (n,)
)->torch.Tensor: # Shape (n,), of sum 1
    "Weights that give each group the same chance"
    weights = 1/groups.bincount()[groups].double()
    return weights/weights.sum()

def worst_of(
    groups:torch.Tensor, # The group of each validation item, shape (n,)
): # A metric
    "The error of the group that has the highest"
    def worst_group(preds, targs):
        wrong = (preds.argmax(1)!=targs).float().cpu()
        return max(wrong[groups==g].mean().item() for g in groups.unique())
    return AccumMetric(worst_group, flatten=False)

@lru_cache
def camvid_parts():
    "Images and masks of the training and the validation set, and the number of the class that is not looked at"
    if scale()=='tiny':
        g = _generator()
        return *((torch.randint(256, (n,3,24,32), generator=g, dtype=torch.uint8),torch.randint(12, (n,24,32), generator=g)) for n in (40,20)),11
    path = untar_data(URLs.CAMVID)
    codes,held_out = (path/'codes.txt').read_text().split(),set((path/'valid.txt').read_text().split())
    def read(f, how): return torch.from_numpy(np.array(Image.open(f).resize((160,120), how)))
    def part(is_valid):
        files = [f for f in sorted((path/'images').iterdir()) if (f.name in held_out)==is_valid]
        masks = [read(path/'labels'/f'{f.stem}_P.png', Image.Resampling.NEAREST).long() for f in files]
        return torch.stack([read(f, Image.Resampling.BILINEAR).permute(2,0,1) for f in files]).contiguous(),torch.stack(masks)
    if codes[-1]!='Void': raise ValueError(f'CamVid: got {len(codes)} classes, the last one {codes[-1]}, wanted the eleven classes of Badrinarayanan et al. (2017) and then Void, in {path}.')
    return part(False),part(True),len(codes)-1

class SmallUNet(nn.Module):
    "Three scales and 0.12 million parameters"
    def __init__(self,
        n_out:int, # Number of classes
        width:int=16, # Channels of the first scale
    ):
        super().__init__()
        def block(n_in, n): return nn.Sequential(ConvLayer(n_in, n), ConvLayer(n, n))
        w = width
        self.down,self.up = nn.ModuleList([block(3, w), block(w, 2*w), block(2*w, 4*w)]),nn.ModuleList([block(6*w, 2*w), block(3*w, w)])
        self.head = nn.Conv2d(w, n_out, 1)
    def forward(self, x):
        a = self.down[0](x)
        b = self.down[1](F.max_pool2d(a, 2))
        c = self.down[2](F.max_pool2d(b, 2))
        b = self.up[0](torch.cat([F.interpolate(c, size=b.shape[2:]), b], 1))
        return self.head(self.up[1](torch.cat([F.interpolate(b, size=a.shape[2:]), a], 1)))

def mean_iou_error(
    void:int, # The class that is not looked at
): # A metric
    "1 less the mean over the classes of intersection by union"
    def error(preds, targs):
        preds,seen = preds.argmax(1),targs!=void
        both = [((preds==c) & (targs==c)).sum()/((((preds==c) | (targs==c)) & seen).sum().clamp(min=1)) for c in range(void)]
        return 1-float(torch.stack(both).mean())
    return AccumMetric(error, flatten=False)

def segmentation_learner(
    weighted:bool=False, # Does each class weigh by the root of how rare its pixels are?
)->Learner:
    "A learner of CamVid's frames"
    train,valid,void = camvid_parts()
    weights = None
    if weighted:
        counts = train[1].flatten().bincount(minlength=void+1).double()
        weights = (counts.sum()/counts.clamp(min=1)).sqrt().float()
    loss = CrossEntropyLossFlat(axis=1, ignore_index=void, weight=None if weights is None else weights.to(default_device()))
    return in_bf16(Learner(tensor_dls(train, valid, 8, [Flip()]), SmallUNet(void+1), loss, metrics=mean_iou_error(void)))

@lru_cache
def photographs():
    "A folder of class folders: images of CIFAR-10, enlarged"
    photographs.folder = tempfile.TemporaryDirectory() # gone when the program ends
    path,size = Path(photographs.folder.name),32 if scale()=='tiny' else 256
    for part,(images,labels),n in zip(('train','valid'), cifar_parts(), (4000,1000)):
        for i in torch.randperm(len(labels), generator=_generator())[:n].tolist():
            (path/part/f'{int(labels[i])}').mkdir(parents=True, exist_ok=True)
            Image.fromarray(images[i].permute(1,2,0).numpy()).resize((size,size), Image.Resampling.BICUBIC).save(path/part/f'{int(labels[i])}/{i}.jpg')
    return path

def file_learner()->Learner:
    "A learner of photographs that are decoded and made small"
    dls = ImageDataLoaders.from_folder(photographs(), valid='valid', bs=64, item_tfms=Resize(32), batch_tfms=[PadCrop(2),Flip(),Normalize.from_stats(*imagenet_stats)], num_workers=0)
    return in_bf16(Learner(dls, small_convnet(10), CrossEntropyLossFlat(), opt_func=sgd, metrics=error_rate))

class EasiestFirst(InclusionSelection):
    "The easiest half of the items in the first half of the training, then all (Wu et al. 2021)"
    def inclusion(self, loss): return 1-step_inclusion(loss, .5, 1.) if self.pct_train<.5 else torch.ones_like(loss)

class Regime:
    "A situation: parts, which are learners with methods, and a budget"
    def __init__(self,
        parts:dict, # For each part a function that makes a learner, and what `compare` takes as methods
        compute:int|None=None, # What each run computes, in items trained
        seconds:float|None=None, # In place of it
        lr:float=.1, # The highest learning rate
    ): self.parts,self.compute,self.seconds,self.lr = parts,compute,seconds,lr
    def plan(self)->dict:
        "The budget, as `compare` takes it"
        if scale()=='tiny': return dict(compute=200)
        return dict(seconds=self.seconds) if self.seconds else dict(compute=self.compute)

look_free = 'favor_hard'

def _some_images(n):
    "A random choice of CIFAR-10's training set, with its labels"
    rows = torch.randperm(len(cifar_parts()[0][1]), generator=_generator())[:n]
    return [o[rows] for o in cifar_parts()[0]]

# Each situation says how its data are made, and leaves that to the first run that is not stored.

def _with_duplicates():
    made = lru_cache(near_duplicates)
    def copied(): return image_learner(made())
    def deduplicated():
        *data,of = made()
        n_images = int(of.max())+1 # the first of each is the image itself
        return image_learner([o[:n_images] for o in data])
    methods = ['none',look_free,'prioritized_sampling','info_batch','seta']
    return Regime(dict(all=(copied, methods), deduplicated=(deduplicated, {'deduplicated': 'none'})), 200_000)

def _with_long_tail():
    made = lru_cache(long_tail)
    def plain(): return image_learner(made())
    def class_balanced(): return image_learner(made(), weights=balanced(made()[1]))
    methods = ['none',look_free,'prioritized_sampling','prioritized_sampling(alpha=1)','selective_backprop(start=.5)']
    weighted = {'class-balanced': 'none', 'class-balanced and prioritized': 'prioritized_sampling'}
    return Regime(dict(all=(plain, methods), balanced=(class_balanced, weighted)), 150_000)

def _with_hidden_groups():
    made = lru_cache(hidden_groups)
    def learner(is_balanced=False):
        train,valid = made()
        return image_learner(train, valid, balanced(train[2]) if is_balanced else None, worst_of(valid[2]))
    methods = ['none',look_free,'prioritized_sampling','batch_loss_filter']
    known = {'kinds known and balanced': 'none'}
    return Regime(dict(all=(learner, methods), balanced=(partial(learner, is_balanced=True), known)), 150_000)

def _with_noise(column, guard):
    "10,000 items are held out, for a reference or as more to train on"
    @lru_cache
    def made():
        labels,(images,truth) = human_labels(column),cifar_parts()[0]
        order = torch.randperm(len(labels), generator=_generator())
        n = len(order)//5
        held_out,rest = order[:n],order[n:]
        return dict(data=(images[rest],labels[rest]), held_out=(images[held_out],labels[held_out]), mended=(images[held_out],truth[held_out]))
    def learner_of(*names): return image_learner([torch.cat(o) for o in zip(*(made()[name] for name in names))])
    def reducible(learn):
        reference = learner_of('held_out')
        with reference.no_bar(),reference.no_logging():
            return SelectiveBackpropCallback(score=reducible_loss(reference, learn.dls, n_epoch=5, lr=.02), auto=False)
    def clean(learn):
        reference = learner_of('mended')
        with reference.no_bar(),reference.no_logging(),counting(None): # a gift
            reference.fit_one_cycle(1 if scale()=='tiny' else 15, .1)
            return SelectiveBackpropCallback(score=reducible_loss(reference, learn.dls, n_epoch=0), auto=False)
    guarded = f'noise_quantile={guard}'
    names = ('none',look_free,f'{look_free}({guarded})',f'prioritized_sampling({guarded})','info_batch',"selective_backprop(score='entropy')")
    return Regime(dict(
        all=(partial(learner_of, 'data'), {name: name for name in names} | {'reducible loss': reducible}),
        clean=(partial(learner_of, 'data'), {'reducible loss, a clean reference for free': clean}),
        added=(partial(learner_of, 'data', 'mended'), {'the clean items added': 'none'}),
        alone=(partial(learner_of, 'mended'), {'the clean items alone': 'none'})), 200_000)

def _with_files():
    methods = ['none',look_free,'selective_backprop','random_subset(keep=.5,before_loading=True)']
    return Regime(dict(all=(file_learner, methods)), seconds=60)

def _with_segments():
    methods = ['none',look_free,'prioritized_sampling','selective_backprop(start=.5)','batch_loss_filter']
    weighted = partial(segmentation_learner, weighted=True)
    return Regime(dict(all=(segmentation_learner, methods), weighted=(weighted, {'weights in the loss': 'none'})), 9_000, lr=.02)

def _with_little_time():
    methods = {'none': 'none', 'hardest first': 'favor_hard(end=.5)', 'hardest always': look_free,
        'easiest first': lambda: EasiestFirst(auto=False)}
    return Regime(dict(all=(lambda: image_learner(_some_images(10_000)), methods)), 60_000)

def _with_a_proxy():
    compute = 200 if scale()=='tiny' else 100_000
    def large(): return image_learner(_some_images(20_000), widen=2.)
    def record(learn):
        n_epoch = max(1, 2*compute//len(learn.dls.train_ds))
        return record_choices(learn, small_convnet(10, .5), lambda small: small.fit_one_cycle(n_epoch, .1))
    def replayed(learn): return ReplayChoicesCallback(record(learn), auto=False)
    def swept(learn): # other trainings have paid for it
        with counting(None): return ReplayChoicesCallback(record(learn), auto=False)
    methods = {'none': 'none', look_free: look_free, 'a proxy, paid for': replayed, 'a proxy, already paid': swept}
    return Regime(dict(all=(large, methods)), compute)

regimes = dict(near_duplicates=_with_duplicates, long_tail=_with_long_tail, hidden_groups=_with_hidden_groups, noise_9=partial(_with_noise, 'aggregate', .9),
    noise_40=partial(_with_noise, 'worst', .6), files=_with_files, segmentation=_with_segments, little_time=_with_little_time, proxy=_with_a_proxy)

def _regime_of(name):
    if name not in regimes: raise ValueError(f"regime: got {name!r}, wanted one of {', '.join(regimes)}.")
    return regimes[name]()

def _run_part(name, regime, part, get_learner, methods, lr, seeds, **kwargs):
    path,seeds = results('where_it_pays')/f'{name}_{part}.csv',2 if scale()=='tiny' else seeds
    runs = stored(path, methods, seeds)
    if runs is not None: return runs
    learn = get_learner()
    arch = f'{type(learn.model).__name__} of {sum(p.numel() for p in learn.model.parameters())}'
    data = 'camvid' if name=='segmentation' else 'cifar10'
    about = dict(regime=name, part=part, data=data, arch=arch, **describe(learn.dls))
    return compare(get_learner, methods, seeds=seeds, lr=lr, path=path, plot=False, about=about, **regime.plan(), **kwargs)

def run_regime(
    name:str, # One of `regimes`
    seeds=5, # Runs of each method, or their seeds
)->pd.DataFrame: # A row for each epoch of each run, of all parts
    "Run what is not stored yet of a situation"
    regime = _regime_of(name)
    return pd.concat([_run_part(name, regime, part, *o, regime.lr, seeds) for part,o in regime.parts.items()], ignore_index=True)

def at_rates(
    name:str, # One of `regimes`
    method:str, # To compare with plain training
    factors=(.5,2.), # Of the learning rate
    seeds=3, # Runs of each, or their seeds
)->pd.DataFrame: # A row for each epoch of each run; `lr` says at which rate
    "Run a method and plain training at other learning rates"
    regime = _regime_of(name)
    get_learner,rates = regime.parts['all'][0],[f*regime.lr for f in factors]
    return pd.concat([_run_part(name, regime, f'lr_{lr:g}', get_learner, ['none',method], lr, seeds, tell_controls=False) for lr in rates], ignore_index=True)

@call_parse
def run_one(
    name:str, # near_duplicates, long_tail, hidden_groups, noise_9, noise_40, files, segmentation, little_time or proxy
):
    "Run the methods in one situation; what is stored is not run again"
    run_regime(name)
