"""Copies planted across a split, and who finds them: `python -m studies.copies PART` runs what is not stored of a part:
results/copies.csv"""
import io
from functools import lru_cache

import numpy as np, pandas as pd, torch
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import error_rate
from fastai.optimizer import Adam
from fastai.torch_core import set_seed
from fastai.vision.augment import Flip
from fastcore.script import call_parse
from PIL import Image
from torch.nn import functional as F

from selback.all import without_leaks
from selback.bench.datasets import PadCrop, get_model, small_convnet, tensor_dls
from selback.core.head import linear_layers_seen
from selback.core.neighbours import nearest, unit
from selback.callback.looking import look_at
from studies import pretrained
from studies.experiments import once, results_folder, scale
from studies.regimes import cifar_parts

path = results_folder/'copies.csv'

# What becomes of an image

def _picture(image): return Image.fromarray(image.permute(1, 2, 0).numpy())

def _bytes(picture): return torch.from_numpy(np.array(picture)).permute(2, 0, 1)

def _cut(share):
    def made(image, g):
        side = image.shape[-1]
        n = round(share*side)
        top,left = torch.randint(side-n+1, (2,), generator=g).tolist()
        return _bytes(_picture(image).crop((left,top,left+n,top+n)).resize((side,side), Image.Resampling.BILINEAR))
    return made

def _jpeg(image, g):
    file = io.BytesIO()
    _picture(image).save(file, 'JPEG', quality=20)
    return _bytes(Image.open(file).convert('RGB'))

def _resized(image, g):
    side = image.shape[-1]
    small = _picture(image).resize((side//2,side//2), Image.Resampling.BILINEAR)
    return _bytes(small.resize((side,side), Image.Resampling.BILINEAR))

def _framed(image, g):
    framed,n = torch.zeros_like(image),image.shape[-1]//16
    framed[:,n:-n,n:-n] = image[:,n:-n,n:-n]
    return framed

kinds = {
    'the same': lambda image, g: image.clone(),
    'JPEG': _jpeg,
    'brighter': lambda image, g: (image.float()*1.3).clamp(0, 255).byte(),
    'cut to 90 %': _cut(.9),
    'cut to 65 %': _cut(.65),
    'half the pixels': _resized,
    'a black border': _framed,
    'mirrored': lambda image, g: image.flip(-1)}

# Data: training, validation with copies of training items at its end, and of which item each is one

def _size(): # Items for training, ordinary ones for validation, copies of each kind
    return (6_000, 2_000, 100) if scale()!='tiny' else (300, 60, 4)

@lru_cache
def planted(
    seed:int,
): # Images and labels of both parts; the training item of each copy, int64
    "CIFAR-10, of which some validation images are copies of training images"
    (images,labels),(others,other_labels) = cifar_parts()
    n,n_valid,n_copies = _size()
    g = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(labels), generator=g)[:n]
    valid = torch.randperm(len(other_labels), generator=g)[:n_valid]
    of = torch.randperm(n, generator=g)[:n_copies*len(kinds)]
    copies = [make(images[rows[i]], g) for make,own in zip(kinds.values(), of.split(n_copies)) for i in own]
    train = images[rows],labels[rows]
    return train,(torch.cat([others[valid], torch.stack(copies)]),torch.cat([other_labels[valid], train[1][of]])),of

# Networks

def _learner(net, seed):
    train,valid,_ = planted(seed)
    set_seed(seed)
    if net=='pretrained':
        side = 96 if scale()!='tiny' else 32
        train,valid = ((_enlarged(images, side),labels) for images,labels in (train,valid))
        dls = pretrained.dls_of(train, valid)
        return Learner(dls, pretrained.with_head(10), CrossEntropyLossFlat(), metrics=error_rate)
    dls = tensor_dls(train, valid, 64, [PadCrop(4),Flip()], 10)
    model = small_convnet(10) if net=='small' else get_model(net, 10)
    return Learner(dls, model, CrossEntropyLossFlat(), opt_func=Adam, metrics=error_rate)

def _enlarged(images, side):
    large = [F.interpolate(o.float(), size=side, mode='bicubic', antialias=True) for o in images.split(1000)]
    return torch.cat([o.clamp(0, 255).round().byte() for o in large])

def _fitted(net, seed):
    learn = _learner(net, seed)
    if net=='pretrained': return learn # as it comes
    with learn.no_bar(),learn.no_logging(): learn.fit_one_cycle(3 if scale()!='tiny' else 1, .01)
    return learn

# Ways: pairs of a validation and a training item, the likeliest first

def by_package(learn, seed):
    "`find_copies`, with mirror images"
    n = 2*len(planted(seed)[2])
    found = learn.find_copies(within='across', n=n, flips=True)
    return [*zip(found['item'], found['other'])],int(found.group.notna().sum())

def _listed(train, valid, k=4): # The nearest few of each, by similarity
    similar,at = nearest(unit(valid), unit(train), k)
    order = similar.flatten().argsort(descending=True)
    rows = torch.arange(len(valid))[:,None].expand_as(at).flatten()
    return [*zip(rows[order].tolist(), at.flatten()[order].tolist())]

def _centred(train, valid):
    mean = train.float().mean(0)
    return train.float()-mean,valid.float()-mean

def by_last_layer(learn, seed):
    "What goes into the last layer, by cosine"
    def of(dl):
        rows = []
        def note(look): rows.append(look.seen[-1][1].float().cpu())
        look_at(learn, dl, torch.arange(len(dl.dataset)), note, linear_layers_seen)
        return torch.cat(rows)
    with learn.no_bar(): return _listed(*_centred(*map(of, learn.dls))),None

def by_pixels(seed):
    "Images at 8x8, by cosine"
    (train,_),(valid,_),_ = planted(seed)
    return _listed(*_centred(*(F.adaptive_avg_pool2d(o.float(), 8).flatten(1) for o in (train,valid)))),None

def by_hash(name, seed):
    "`imagehash`'s bits, by how many of them differ"
    import imagehash
    function = dict(average=imagehash.average_hash, perception=imagehash.phash)[name]
    (train,_),(valid,_),_ = planted(seed)
    def bits(images): return torch.tensor(np.array([function(_picture(o)).hash.flatten() for o in images])).float()*2-1
    return _listed(bits(train), bits(valid)),None

# What is found

def told(way, pairs, n_likely, seed):
    "A row for each kind: the share that is among as many pairs as were planted, and among twice as many"
    _,(_,labels),of = planted(seed)
    n,first = len(of),len(labels)-len(of)
    true = {(first+i, int(o)) for i,o in enumerate(of)}
    def found(n): return {pair for pair in pairs[:n] if pair in true}
    once_,twice = found(n),found(2*n)
    false = sum(pair not in true for pair in pairs[:100])
    rows = []
    for k,kind in enumerate(kinds):
        own = {pair for pair in true if (pair[0]-first)//(n//len(kinds))==k}
        rows.append(dict(way=way, kind=kind, once=len(own & once_)/len(own), twice=len(own & twice)/len(own),
            false=false, n_likely=n_likely, planted=n))
    return pd.DataFrame(rows)

def _errors(learn, seed):
    "The error of validation with copies in it, and without those that are found"
    with learn.no_bar():
        honest = without_leaks(learn.dls, learn.find_copies(within='across', flips=True))
        return dict(error=learn.validate()[1], honest=learn.validate(dl=honest.valid)[1])

def run(part, seed):
    "The rows of a part"
    if part=='pixels': return told('pixels', *by_pixels(seed), seed)
    if part in ('average','perception'): return told(f'{part} hash', *by_hash(part, seed), seed)
    learn = _fitted(part, seed)
    with learn.no_bar(): rows = [told('find_copies', *by_package(learn, seed), seed)]
    rows.append(told('last layer', *by_last_layer(learn, seed), seed))
    errors = _errors(learn, seed) if part!='pretrained' else {}
    return pd.concat(rows).assign(**errors)

parts = 'pixels','average','perception','small','resnet18','pretrained'

@call_parse
def main(
    names:str, # Parts, with commas between
    seeds:int=2,
):
    "Run what is not stored yet"
    torch.set_num_threads(1)
    for seed in range(seeds):
        for name in names.split(','):
            rows = once(path, dict(part=name, seed=seed), lambda: run(name, seed).assign(part=name, seed=seed))
            print(name, seed, rows[['way','kind','once','twice']].round(2).to_string(), flush=True)
