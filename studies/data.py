"""Damage to data, and a network as the papers have it, which `get_model` knows once this is imported"""
import torch
from fastai.data.core import DataLoaders
from fastai.data.transforms import Normalize
from fastai.torch_core import default_device
from torch import nn

from selback.bench.datasets import TensorDL, TensorItems, flip_labels, networks
from selback.core.checks import check_range, error_text

def dls_of(
    train:tuple, # Images, shape (n, 3, height, width), bytes or floats between 0 and 1, and labels of any shape
    valid:tuple, # The same
    n_classes:int,
    bs:int,
    augment:list, # Batch transforms for training
    kind=TensorItems, # Of dataset
)->DataLoaders:
    "As `tensor_dls`, of labels that are no class numbers"
    device = default_device()
    sets = [kind(*(o.to(device) for o in part), i, n_classes) for i,part in enumerate((train,valid))]
    some = train[0][:10_000]
    some = some if some.is_floating_point() else some.float()/255
    normalize = Normalize.from_stats(some.mean((0,2,3)), some.std((0,2,3)), cuda=False)
    return DataLoaders.from_dsets(*sets, bs=bs, after_batch=[*augment, normalize], num_workers=0, device=device,
        dl_type=TensorDL)

# Damage: labels of another class (Jiang et al. 2019, section 4.5); labels at random, pixels of all images shuffled
# alike, or normal noise with the mean and the variance of an image, channel by channel (Hu et al. 2021)

def _randomized(images, labels, n_classes, generator):
    "Each label any one"
    return images,torch.randint(n_classes, labels.shape, generator=generator).to(labels.device)

def _shuffled(images, labels, n_classes, generator):
    "The pixels of all images in one new order"
    order = torch.randperm(images.shape[2:].numel(), generator=generator).to(images.device)
    return images.flatten(2)[:,:,order].view_as(images),labels

def _gaussian(images, labels, n_classes, generator):
    "Noise with the mean and the variance of each image's channels"
    mean = images.float().mean((2,3), keepdim=True)
    std = (images-mean).square().mean((2,3), keepdim=True).sqrt()
    noise = torch.randn(images.shape, generator=generator).to(images.device)*std+mean
    brightest = 1 if images.is_floating_point() else 255
    return noise.clamp(0, brightest).to(images.dtype),labels

damages = dict(random_labels=_randomized, shuffled_pixels=_shuffled, gaussian_images=_gaussian)

def damage(
    ds:TensorItems, # What to damage, such as `dls.train_ds`
    kind:str, # 'flipped_labels', 'random_labels', 'shuffled_pixels' or 'gaussian_images'
    share:float, # Of the items
    seed:int=0, # Of the random choice
)->torch.Tensor: # Which items are damaged, a mask of shape (n,)
    "Damage a share of the items of a dataset"
    known = 'flipped_labels',*damages
    if kind not in known: raise ValueError(error_text('kind', repr(kind), f"one of {', '.join(known)}"))
    if kind=='flipped_labels': return flip_labels(ds, share, seed)
    check_range('share', share, 0, 1)
    n = len(ds)
    generator = torch.Generator().manual_seed(seed)
    damaged = torch.zeros(n, dtype=torch.bool)
    damaged[torch.randperm(n, generator=generator)[:round(share*n)]] = True

    images,labels = ds.images.clone(),ds.labels.clone()
    images[damaged],labels[damaged] = damages[kind](images[damaged], labels[damaged], ds.c, generator)
    ds.images,ds.labels = images,labels
    return damaged

# Networks

def _conv(n_in, n, stride=1, size=3): return nn.Conv2d(n_in, n, size, stride, size//2, bias=False)

class _Wide(nn.Module):
    "Two convolutions, each with BatchNorm and ReLU before it; where the shape changes, a 1x1 convolution beside them"
    def __init__(self, n_in, n, stride):
        super().__init__()
        self.norm = nn.Sequential(nn.BatchNorm2d(n_in), nn.ReLU())
        self.layers = nn.Sequential(_conv(n_in, n, stride), nn.BatchNorm2d(n), nn.ReLU(), _conv(n, n))
        self.shortcut = None if n_in==n else _conv(n_in, n, stride, 1)

    def forward(self, x):
        active = self.norm(x)
        beside = x if self.shortcut is None else self.shortcut(active)
        return self.layers(active)+beside

def wide_resnet28_10(
    n_out:int, # Number of classes
): # A module for images of 32x32
    "WideResNet-28-10, 36.5 million parameters, without dropout (Zagoruyko & Komodakis 2016, arXiv 1605.07146)"
    blocks,n_in = [],16
    for width,stride in (160,1),(320,2),(640,2):
        blocks += [_Wide(n_in, width, stride), *(_Wide(width, width, 1) for _ in range(3))]
        n_in = width
    net = nn.Sequential(_conv(3, 16), *blocks, nn.BatchNorm2d(640), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(640, n_out))
    for m in net.modules(): # as He et al. 2015 draw them
        if isinstance(m, nn.Conv2d): nn.init.kaiming_normal_(m.weight, mode='fan_out', nonlinearity='relu')
    return net

networks['wide_resnet28_10'] = wide_resnet28_10
