"""SVHN, damage to data, Cutout and networks as the papers have them; `get_dls` and `get_model` know them once this is
imported"""
from functools import lru_cache, partial

import numpy as np, torch
from fastai.data.external import fastai_path
from fastai.data.transforms import Normalize
from fastai.vision.augment import RandTransform
from fastai.vision.core import TensorImage
from torch import nn
from torch.nn import functional as F

from selback.bench.datasets import PadCrop, TensorItems, datasets, flip_labels, networks
from selback.core.checks import check_range, error_text

def _moved(): return [PadCrop()] # not mirrored, as digits are not

@lru_cache
def _svhn(*more):
    from torchvision.datasets import SVHN
    def part(*splits):
        parts = [SVHN(fastai_path('data')/'svhn', split=split, download=True) for split in splits]
        images = np.concatenate([p.data for p in parts])
        labels = np.concatenate([p.labels for p in parts])
        return torch.from_numpy(images),torch.from_numpy(labels)

    return part('train', *more),part('test'),_moved,[str(i) for i in range(10)]

datasets |= dict(svhn=_svhn, svhn_extra=partial(_svhn, 'extra')) # with 531,131 easier images

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
    images[damaged],labels[damaged] = damages[kind](images[damaged], labels[damaged], ds.n_classes, generator)
    ds.images,ds.labels = images,labels
    return damaged

class Cutout(RandTransform):
    """Sets a square to zero in each image of a batch, with its center at any pixel (DeVries & Taylor 2017, arXiv
    1708.04552); their sides are 16 pixels for CIFAR-10, 8 for CIFAR-100 and 20 for SVHN"""
    split_idx = 0
    order = Normalize.order+1 # where zero is the mean

    def __init__(self,
        size:int=16, # Side of the square, in pixels
    ):
        super().__init__()
        self.size = size

    def encodes(self, x:TensorImage):
        def within(side): # which rows or columns of each image, shape (n, side)
            start = torch.randint(side, (len(x),1), device=x.device)-self.size//2
            at = torch.arange(side, device=x.device)
            return (start<=at) & (at<start+self.size)

        rows,columns = within(x.shape[2]),within(x.shape[3])
        square = rows[:,:,None] & columns[:,None]
        return x.masked_fill(square[:,None], 0)

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

class _Plain(nn.Module):
    "Two convolutions, each with BatchNorm behind it; the shortcut leaves pixels out and adds channels of zeros"
    def __init__(self, n_in, n, stride):
        super().__init__()
        first = [_conv(n_in, n, stride), nn.BatchNorm2d(n), nn.ReLU()]
        self.layers = nn.Sequential(*first, _conv(n, n), nn.BatchNorm2d(n))
        self.stride = stride
        self.added = n-n_in # channels

    def forward(self, x):
        shortcut = F.pad(x[:,:,::self.stride,::self.stride], (0,0,0,0,0,self.added))
        return F.relu(self.layers(x)+shortcut)

def _stages(block, n_in, widths, n):
    "`n` blocks of each width; each stage but the first halves the image"
    layers = []
    for i,width in enumerate(widths):
        for j in range(n):
            stride = 2 if i>0 and j==0 else 1
            layers.append(block(n_in, width, stride))
            n_in = width
    return layers

def _resnet(*layers, n, n_out):
    "The layers, and a linear one for `n` channels; weights as He et al. 2015 draw them"
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n, n_out))
    for m in net.modules():
        if isinstance(m, nn.Conv2d): nn.init.kaiming_normal_(m.weight, mode='fan_out', nonlinearity='relu')
    return net

def wide_resnet28_10(
    n_out:int, # Number of classes
): # A module for images of 32x32
    "WideResNet-28-10, 36.5 million parameters, without dropout (Zagoruyko & Komodakis 2016, arXiv 1605.07146)"
    stages = [_conv(3, 16), *_stages(_Wide, 16, (160,320,640), 4)]
    return _resnet(*stages, nn.BatchNorm2d(640), nn.ReLU(), n=640, n_out=n_out)

def resnet56(
    n_out:int, # Number of classes
): # A module for images of 32x32
    "ResNet-56, 0.85 million parameters, shortcuts without weights (He et al. 2016, arXiv 1512.03385, section 4.2)"
    stem = [_conv(3, 16), nn.BatchNorm2d(16), nn.ReLU()]
    return _resnet(*stem, *_stages(_Plain, 16, (16,32,64), 9), n=64, n_out=n_out)

networks |= dict(wide_resnet28_10=wide_resnet28_10, resnet56=resnet56)
