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
from fastai.torch_core import TensorImage, TensorMask, default_device
from fastai.vision.augment import Flip, Resize
from fastai.vision.data import ImageDataLoaders, imagenet_stats
from fastcore.script import call_parse
from PIL import Image
from torch import nn
from torch.nn import functional as F

from selback.all import (balanced_chances, EpochSelection, Inclusion, reducible_loss, SelectiveBackpropCallback,
    step_inclusion)
from selback.bench.compare import compare, describe
from selback.bench.datasets import PadCrop, TensorDL, TensorItems, datasets, small_convnet, tensor_dls
from selback.core.checks import error_text
from selback.core.scoring import counting
from studies.data import dls_of
from studies.experiments import in_bf16, results, scale, stored
from studies.proxy import record_choices, ReplayChoicesCallback

def _generator(): return torch.Generator().manual_seed(0)

def _noise_images(n, height, width, generator):
    return torch.randint(256, (n,3,height,width), generator=generator, dtype=torch.uint8)

@lru_cache
def cifar_parts():
    "Images and labels of the training and the validation set"
    if scale()!='tiny': return tuple((images,labels) for images,labels in datasets['cifar10']()[:2])
    g = _generator()
    return tuple((_noise_images(n, 32, 32, g),torch.arange(n)%10) for n in (600,200))

def _move_and_light(images, generator):
    "Each up to two pixels away, and up to 15 % lighter or darker; bytes"
    images = images.float()
    light = .85+.3*torch.rand(len(images), 1, 1, 1, generator=generator)
    shifts = torch.randint(-2, 3, (len(images),2), generator=generator)
    for i,(down,right) in enumerate(shifts.tolist()): images[i] = images[i].roll((down,right), (1,2))
    return (images*light).clamp(0, 255).byte()

def near_duplicates(
    n_items:int=20_000, # Items of the training set
    n_images:int=5000, # Of so many images
    exponent:float=1.1, # Of Zipf's law: the k-th image has a share in proportion to k^-exponent
)->tuple: # Images, labels, and the number of the image that each item is a copy of
    "Copies of images, each a little moved and lit in its own way; the first of each is the image itself"
    images,labels = cifar_parts()[0]
    n_images = min(n_images, len(labels)//2)
    n_items = min(n_items, 4*n_images)

    g = _generator()
    rows = torch.randperm(len(labels), generator=g)[:n_images]
    shares = torch.arange(1, n_images+1).double()**-exponent
    copied = torch.multinomial(shares, n_items-n_images, replacement=True, generator=g)
    copies = _move_and_light(images[rows[copied]], g)

    copy_of = torch.cat([torch.arange(n_images), copied])
    return torch.cat([images[rows], copies]),labels[rows[copy_of]],copy_of

def long_tail(
    imbalance:float=100., # How many times as many items the first class has as the last one
)->tuple: # Images and labels
    "Classes that get rarer from the first to the last one, each by the same factor (Cui et al. 2019)"
    images,labels = cifar_parts()[0]
    n = int((labels==0).sum())
    sizes = [max(2, int(n*imbalance**(-c/9))) for c in range(10)]
    rows = torch.cat([torch.nonzero(labels==c)[:size,0] for c,size in enumerate(sizes)])
    return images[rows],labels[rows]

vehicles = 0,1,8,9 # airplane, automobile, ship and truck
rare_kinds = 7,9 # horses among the animals, trucks among the vehicles

def is_vehicle(kinds): return torch.isin(kinds, torch.tensor(vehicles)).long()

def hidden_groups(
    imbalance:float=50., # How many times as many items a common kind has as a rare one
)->tuple: # Images, labels (1: a vehicle), and kinds, of the training and the validation set
    "Animals and vehicles, of which some kinds are rare in training"
    (images,kinds),(valid,valid_kinds) = cifar_parts()
    common = int((kinds==0).sum())
    rare = max(2, int(common/imbalance))
    sizes = [rare if kind in rare_kinds else common for kind in range(10)]
    rows = torch.cat([torch.nonzero(kinds==kind)[:size,0] for kind,size in enumerate(sizes)])
    images,kinds = images[rows],kinds[rows]
    return (images,is_vehicle(kinds),kinds),(valid,is_vehicle(valid_kinds),valid_kinds)

def _cifar10n(column):
    "A table with a row for each image, sorted by file: 'file', 'clean' and a column of labels that people gave"
    path = fastai_path('data')/'cifar10n.csv.gz'
    if path.exists(): return pd.read_csv(path).sort_values('file')
    wanted = f'a table with the columns file, clean and {column}'
    remedy = 'make it from the labels of github.com/UCSC-REAL/cifar-10-100n'
    raise FileNotFoundError(error_text(path, 'no file', wanted, remedy))

def human_labels(
    column:str, # 'aggregate' (9 % are wrong), 'random1' to 'random3' (18 %) or 'worst' (40 %)
)->torch.Tensor: # Class numbers, shape (50000,); raises a `FileNotFoundError` without the file
    "CIFAR-10N: labels that people gave (Wei et al. 2022), of which `cifar10n.csv.gz` in fastai's data folder tells"
    _,labels = cifar_parts()[0]
    if scale()=='tiny': return (labels+(torch.rand(len(labels), generator=_generator())<.4))%10

    df = _cifar10n(column)
    number = {name: i for i,name in enumerate(sorted(df.clean.unique()))}
    if [number[name] for name in df.clean]!=labels.tolist():
        got = "other images than those of fastai's CIFAR-10"
        raise ValueError(error_text('cifar10n.csv.gz', got, 'the same files'))
    return torch.tensor([number[name] for name in df[column]])

sgd = partial(OptimWrapper, opt=partial(torch.optim.SGD, momentum=.9, nesterov=True, weight_decay=5e-4))

class WeightedTensorDL(WeightedDL, TensorDL):
    "Draws items in memory by weights"

def weighted_dls(dls, weights):
    "The same data, of which the items to train on are drawn by weights"
    plain = dls.train
    train = WeightedTensorDL(plain.dataset, bs=plain.bs, wgts=np.asarray(weights, float), shuffle=True, drop_last=True,
        num_workers=0, after_batch=plain.after_batch, device=dls.device)
    return DataLoaders(train, dls.valid)

def image_learner(
    train:tuple, # Images and labels
    valid:tuple|None=None, # The same; None: CIFAR-10's own
    weights=None, # How likely each item is drawn, with replacement; None: each comes once an epoch
    metric=error_rate, # An error
    widen:float=1., # Width of the network, as a multiple
    bs:int=64, # Batch size
)->Learner:
    "A learner of images in memory"
    if valid is None: valid = cifar_parts()[1]
    dls = tensor_dls(train[:2], valid[:2], bs, [PadCrop(2),Flip()])
    if weights is not None: dls = weighted_dls(dls, weights)
    n_classes = int(train[1].max())+1
    model = small_convnet(n_classes, widen)
    return in_bf16(Learner(dls, model, CrossEntropyLossFlat(), opt_func=sgd, metrics=metric))

def worst_of(
    groups:torch.Tensor, # The group of each validation item, shape (n,)
): # A metric
    "The error of the group that has the highest"
    def worst_group(preds, targs):
        wrong = (preds.argmax(1)!=targs).float().cpu()
        return max(wrong[groups==g].mean().item() for g in groups.unique())
    return AccumMetric(worst_group, flatten=False)

def _small_frame(file, resample):
    return torch.from_numpy(np.array(Image.open(file).resize((160,120), resample)))

def frames_of(files):
    "Images, shape (n, 3, 120, 160), and masks, shape (n, 120, 160)"
    images = [_small_frame(f, Image.Resampling.BILINEAR).permute(2,0,1) for f in files]
    masks = [f.parents[1]/'labels'/f'{f.stem}_P.png' for f in files]
    masks = [_small_frame(f, Image.Resampling.NEAREST).long() for f in masks]
    return torch.stack(images).contiguous(),torch.stack(masks)

def _tiny_frames(n, generator):
    return _noise_images(n, 24, 32, generator),torch.randint(12, (n,24,32), generator=generator)

@lru_cache
def camvid_parts():
    "Images and masks of the training and the validation set, and the number of the class that is not looked at"
    if scale()=='tiny':
        g = _generator()
        return _tiny_frames(40, g),_tiny_frames(20, g),11

    path = untar_data(URLs.CAMVID)
    codes = (path/'codes.txt').read_text().split()
    if codes[-1]!='Void':
        wanted = f'the eleven classes of Badrinarayanan et al. (2017) and then Void, in {path}'
        raise ValueError(error_text('CamVid', f'{len(codes)} classes, the last one {codes[-1]}', wanted))

    held_out = set((path/'valid.txt').read_text().split())
    files = sorted((path/'images').iterdir())
    train = frames_of([f for f in files if f.name not in held_out])
    valid = frames_of([f for f in files if f.name in held_out])
    return train,valid,len(codes)-1

class _Frames(TensorItems):
    "Images and masks"
    def __getitem__(self, i): return TensorImage(self.images[i].float()/255),TensorMask(self.labels[i])

def mask_dls(
    train:tuple, # Images as bytes, shape (n, 3, height, width), and masks, shape (n, height, width)
    valid:tuple, # The same
)->DataLoaders:
    "Loaders of images, half of which are mirrored, and of masks of twelve classes"
    return dls_of(train, valid, 12, 8, [Flip()], _Frames)

class SmallUNet(nn.Module):
    "Three scales and 0.12 million parameters"
    def __init__(self,
        n_out:int, # Number of classes
        width:int=16, # Channels of the first scale
    ):
        super().__init__()
        def block(n_in, n): return nn.Sequential(ConvLayer(n_in, n), ConvLayer(n, n))
        self.down = nn.ModuleList([block(3, width), block(width, 2*width), block(2*width, 4*width)])
        self.up = nn.ModuleList([block(6*width, 2*width), block(3*width, width)])
        self.head = nn.Conv2d(width, n_out, 1)

    def forward(self, x):
        def beside(small, large): return torch.cat([F.interpolate(small, size=large.shape[2:]), large], 1)
        whole = self.down[0](x)
        half = self.down[1](F.max_pool2d(whole, 2))
        quarter = self.down[2](F.max_pool2d(half, 2))
        half = self.up[0](beside(quarter, half))
        whole = self.up[1](beside(half, whole))
        return self.head(whole)

def mean_iou_error(
    void:int, # The class that is not looked at
): # A metric
    "1 less the mean over the classes of intersection by union"
    def iou(found, wanted, seen):
        either = (found | wanted) & seen
        return (found & wanted).sum()/either.sum().clamp(min=1)

    def error(preds, targs):
        preds,seen = preds.argmax(1),targs!=void
        of_classes = [iou(preds==c, targs==c, seen) for c in range(void)]
        return 1-float(torch.stack(of_classes).mean())
    return AccumMetric(error, flatten=False)

def _by_rarity(masks, n_classes):
    "Weights of the classes: the root of how rare their pixels are"
    counts = masks.flatten().bincount(minlength=n_classes).double()
    return (counts.sum()/counts.clamp(min=1)).sqrt().float().to(default_device())

def segmentation_learner(
    weighted:bool=False, # Does each class weigh by the root of how rare its pixels are?
)->Learner:
    "A learner of CamVid's frames"
    train,valid,void = camvid_parts()
    weights = _by_rarity(train[1], void+1) if weighted else None
    loss = CrossEntropyLossFlat(axis=1, ignore_index=void, weight=weights)
    dls = mask_dls(train, valid)
    return in_bf16(Learner(dls, SmallUNet(void+1), loss, metrics=mean_iou_error(void)))

def _write_photographs(path, images, labels, n):
    "So many of the images, chosen at random, each as a JPEG in the folder of its class"
    size = 32 if scale()=='tiny' else 256
    for i in torch.randperm(len(labels), generator=_generator())[:n].tolist():
        folder = path/f'{int(labels[i])}'
        folder.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(images[i].permute(1,2,0).numpy())
        image.resize((size,size), Image.Resampling.BICUBIC).save(folder/f'{i}.jpg')

@lru_cache
def photographs():
    "A folder of class folders: images of CIFAR-10, enlarged"
    photographs.folder = tempfile.TemporaryDirectory() # gone when the program ends
    path = Path(photographs.folder.name)
    train,valid = cifar_parts()
    _write_photographs(path/'train', *train, 4000)
    _write_photographs(path/'valid', *valid, 1000)
    return path

def file_learner()->Learner:
    "A learner of photographs that are decoded and made small"
    batch_tfms = [PadCrop(2),Flip(),Normalize.from_stats(*imagenet_stats)]
    dls = ImageDataLoaders.from_folder(photographs(), valid='valid', bs=64, item_tfms=Resize(32), batch_tfms=batch_tfms,
        num_workers=0)
    return in_bf16(Learner(dls, small_convnet(10), CrossEntropyLossFlat(), opt_func=sgd, metrics=error_rate))

class EasiestFirst(Inclusion):
    "The easiest half of the items in the first half of the training, then all (Wu et al. 2021)"
    def inclusion(self, losses, now):
        if now.pct>=.5: return torch.ones_like(losses)
        return 1-step_inclusion(losses, .5, 1.)

class Regime:
    "A situation: parts, which are learners with methods, and a budget"
    def __init__(self,
        parts:dict, # For each part a function that makes a learner, and what `compare` takes as methods
        compute:int|None=None, # What each run computes, in items trained
        seconds:float|None=None, # In place of it
        lr:float=.1, # The highest learning rate
    ):
        self.parts,self.lr = parts,lr
        self.compute,self.seconds = compute,seconds

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
        images,labels,copy_of = made()
        n_images = int(copy_of.max())+1 # the first of each is the image itself
        return image_learner((images[:n_images],labels[:n_images]))
    methods = ['none',look_free,'prioritized_sampling','info_batch','seta']
    parts = dict(all=(copied, methods), deduplicated=(deduplicated, {'deduplicated': 'none'}))
    return Regime(parts, 200_000)

def _with_long_tail():
    made = lru_cache(long_tail)
    def plain(): return image_learner(made())
    def class_balanced():
        images,labels = made()
        return image_learner((images,labels), weights=balanced_chances(labels))
    methods = ['none',look_free,'prioritized_sampling','prioritized_sampling(alpha=1)','selective_backprop(start=.5)']
    weighted = {'class-balanced': 'none', 'class-balanced and prioritized': 'prioritized_sampling'}
    return Regime(dict(all=(plain, methods), balanced=(class_balanced, weighted)), 150_000)

def _with_hidden_groups():
    made = lru_cache(hidden_groups)
    def learner(is_balanced=False):
        train,valid = made()
        kinds,valid_kinds = train[2],valid[2]
        weights = balanced_chances(kinds) if is_balanced else None
        return image_learner(train, valid, weights, worst_of(valid_kinds))
    methods = ['none',look_free,'prioritized_sampling','batch_loss_filter']
    known = {'kinds known and balanced': 'none'}
    parts = dict(all=(learner, methods), balanced=(partial(learner, is_balanced=True), known))
    return Regime(parts, 150_000)

def _noisy_parts(column):
    "Items with the labels that people gave; of a fifth, which is held out, the true ones as well"
    labels,(images,truth) = human_labels(column),cifar_parts()[0]
    order = torch.randperm(len(labels), generator=_generator())
    n = len(order)//5
    held_out,rest = order[:n],order[n:]
    return dict(
        data=(images[rest],labels[rest]),
        held_out=(images[held_out],labels[held_out]),
        mended=(images[held_out],truth[held_out]))

def _with_noise(column):
    "10,000 items are held out, for a reference or as more to train on"
    made = lru_cache(partial(_noisy_parts, column))
    def learner_of(*names):
        images,labels = zip(*(made()[name] for name in names))
        return image_learner((torch.cat(images),torch.cat(labels)))

    def reducible(learn):
        reference = learner_of('held_out')
        with reference.no_bar(),reference.no_logging():
            score = reducible_loss(reference, learn.dls, n_epoch=5, lr=.02)
            return SelectiveBackpropCallback(score=score)

    def clean(learn):
        reference = learner_of('mended')
        with reference.no_bar(),reference.no_logging(),counting(None): # a gift
            reference.fit_one_cycle(1 if scale()=='tiny' else 15, .1)
            score = reducible_loss(reference, learn.dls, n_epoch=0)
            return SelectiveBackpropCallback(score=score)

    names = ['none',look_free,'info_batch',"selective_backprop(score='entropy')"]
    methods = {name: name for name in names} | {'reducible loss': reducible}
    return Regime(dict(
        all=(partial(learner_of, 'data'), methods),
        clean=(partial(learner_of, 'data'), {'reducible loss, a clean reference for free': clean}),
        added=(partial(learner_of, 'data', 'mended'), {'the clean items added': 'none'}),
        alone=(partial(learner_of, 'mended'), {'the clean items alone': 'none'})), 200_000)

def _with_files():
    methods = ['none',look_free,'selective_backprop','random_subset(keep=.5,before_loading=True)']
    return Regime(dict(all=(file_learner, methods)), seconds=60)

def _with_segments():
    methods = ['none',look_free,'prioritized_sampling','selective_backprop(start=.5)','batch_loss_filter']
    weighted = partial(segmentation_learner, weighted=True)
    parts = dict(all=(segmentation_learner, methods), weighted=(weighted, {'weights in the loss': 'none'}))
    return Regime(parts, 9_000, lr=.02)

def _with_little_time():
    def few(): return image_learner(_some_images(10_000))
    methods = {
        'none': 'none',
        'hardest first': 'favor_hard(end=.5)',
        'hardest always': look_free,
        'easiest first': lambda: EpochSelection(EasiestFirst())}
    return Regime(dict(all=(few, methods)), 60_000)

def _with_a_proxy():
    compute = 200 if scale()=='tiny' else 100_000
    def large(): return image_learner(_some_images(20_000), widen=2.)

    def record(learn):
        n_epoch = max(1, 2*compute//len(learn.dls.train_ds))
        return record_choices(learn, small_convnet(10, .5), lambda small: small.fit_one_cycle(n_epoch, .1))

    def replayed(learn): return ReplayChoicesCallback(record(learn))
    def swept(learn): # other trainings have paid for it
        with counting(None): return ReplayChoicesCallback(record(learn))

    methods = {'none': 'none', look_free: look_free, 'a proxy, paid for': replayed, 'a proxy, already paid': swept}
    return Regime(dict(all=(large, methods)), compute)

regimes = dict(
    near_duplicates=_with_duplicates,
    long_tail=_with_long_tail,
    hidden_groups=_with_hidden_groups,
    noise_9=partial(_with_noise, 'aggregate'),
    noise_40=partial(_with_noise, 'worst'),
    files=_with_files,
    segmentation=_with_segments,
    little_time=_with_little_time,
    proxy=_with_a_proxy)

def _regime_of(name):
    if name not in regimes: raise ValueError(error_text('regime', repr(name), f"one of {', '.join(regimes)}"))
    return regimes[name]()

def _about(name, part, learn):
    "What is written beside the runs"
    n_parameters = sum(p.numel() for p in learn.model.parameters())
    arch = f'{type(learn.model).__name__} of {n_parameters}'
    data = 'camvid' if name=='segmentation' else 'cifar10'
    return dict(regime=name, part=part, data=data, arch=arch, **describe(learn.dls))

def _run_part(name, regime, part, get_learner, methods, lr, seeds, **kwargs):
    "The runs of a part, from the file, or made"
    path = results('where_it_pays')/f'{name}_{part}.csv'
    if scale()=='tiny': seeds = 2
    runs = stored(path, methods, seeds)
    if runs is not None: return runs
    about = _about(name, part, get_learner())
    return compare(get_learner, methods, seeds=seeds, lr=lr, path=path, plot=False, about=about, **regime.plan(),
        **kwargs)

def run_regime(
    name:str, # One of `regimes`
    seeds=5, # Runs of each method, or their seeds
)->pd.DataFrame: # A row for each epoch of each run, of all parts
    "Run what is not stored yet of a situation"
    regime = _regime_of(name)
    runs = [_run_part(name, regime, part, get_learner, methods, regime.lr, seeds)
        for part,(get_learner,methods) in regime.parts.items()]
    return pd.concat(runs, ignore_index=True)

def at_rates(
    name:str, # One of `regimes`
    method:str, # To compare with plain training
    factors=(.5,2.), # Of the learning rate
    seeds=3, # Runs of each, or their seeds
)->pd.DataFrame: # A row for each epoch of each run; `lr` says at which rate
    "Run a method and plain training at other learning rates"
    regime = _regime_of(name)
    get_learner,_ = regime.parts['all']
    methods = ['none',method]
    runs = []
    for lr in [factor*regime.lr for factor in factors]:
        runs.append(_run_part(name, regime, f'lr_{lr:g}', get_learner, methods, lr, seeds, tell_controls=False))
    return pd.concat(runs, ignore_index=True)

@call_parse
def run_one(
    name:str, # near_duplicates, long_tail, hidden_groups, noise_9, noise_40, files, segmentation, little_time or proxy
):
    "Run the methods in one situation; what is stored is not run again"
    run_regime(name)
