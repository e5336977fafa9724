"""Copies across a split, planted and real ones, and who finds them: `python -m studies.copies DATA` runs what is not
stored yet: results/copies.csv, copies_called.csv"""
import io, re, time
from functools import lru_cache, partial
from pathlib import PurePath
from typing import NamedTuple

import numpy as np, pandas as pd, torch
from fastai.data.external import URLs, fastai_path, untar_data
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
from studies.regimes import SmallUNet, camvid_parts, cifar_parts, frames_of, mask_dls, mean_iou_error

path,called_path = results_folder/'copies.csv',results_folder/'copies_called.csv'

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

# Data: both parts, and which validation item is a copy of which training item

class Data(NamedTuple):
    train:tuple # Images, bytes, and labels
    valid:tuple # The same
    copies:dict # By kind: pairs of a validation item and the training item of which it is a copy

def _size(): # Items for training, ordinary ones for validation, copies of each kind
    return (6_000, 2_000, 100) if scale()!='tiny' else (300, 60, 4)

@lru_cache
def planted(
    seed:int,
)->Data:
    "CIFAR-10, of which some validation images, at the end, are copies of training images"
    (images,labels),(others,other_labels) = cifar_parts()
    n,n_valid,n_copies = _size()
    g = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(labels), generator=g)[:n]
    valid = torch.randperm(len(other_labels), generator=g)[:n_valid]
    of = torch.randperm(n, generator=g)[:n_copies*len(kinds)].split(n_copies)
    copies = [make(images[rows[i]], g) for make,own in zip(kinds.values(), of) for i in own]
    train = images[rows],labels[rows]
    valid = torch.cat([others[valid], torch.stack(copies)]),torch.cat([other_labels[valid], train[1][torch.cat(of)]])
    numbers = (n_valid+torch.arange(n_copies*len(kinds))).split(n_copies)
    pairs = [[*zip(a.tolist(), b.tolist())] for a,b in zip(numbers, of)]
    return Data(train, valid, dict(zip(kinds, pairs)))

known = {1: 'the same shot', 2: 'very similar'} # Barz & Denzler's words

@lru_cache
def of_cifar10(
    seed:int, # Not used: the data are as they are
)->Data:
    "CIFAR-10 and the copies that Barz & Denzler (2020) have found in it, listed by file in `cifar10_copies.csv`"
    train,valid = cifar_parts()
    if scale()=='tiny': return Data(train, valid, {kind: [] for kind in known.values()})
    listed = pd.read_csv(fastai_path('data')/'cifar10_copies.csv')
    names = sorted({PurePath(file).parent.name for file in listed.train})
    def numbers(files, n): # of items in the order of their files, n of each class
        return [n*names.index(PurePath(file).parent.name)+int(PurePath(file).stem) for file in files]
    listed = listed.assign(i=numbers(listed.test, 1000), j=numbers(listed.train, 5000))
    def pairs(judgment): return [*listed[listed.judgment==judgment][['i','j']].itertuples(index=False, name=None)]
    return Data(train, valid, {kind: pairs(judgment) for judgment,kind in known.items()})

def _film_and_frame(file):
    film,_,frame = file.stem.partition('_')
    return film,int(re.sub(r'\D', '', frame))

@lru_cache
def frames(
    seed:int,
)->Data:
    "Frames of CamVid's films, a fifth drawn to validate; a copy is of the same film, a second away at most"
    if scale()=='tiny':
        (images,masks),_,_ = camvid_parts()
        shown = [('film', 5*i) for i in range(len(images))]
    else:
        files = sorted((untar_data(URLs.CAMVID)/'images').iterdir())
        images,masks = frames_of(files)
        shown = [_film_and_frame(file) for file in files]
    drawn = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    valid,train = (rows.sort().values for rows in drawn.split([len(drawn)//5, len(drawn)-len(drawn)//5]))
    def are_near(a, b): return a[0]==b[0] and abs(a[1]-b[1])<=30
    pairs = [(i, j) for i,a in enumerate(valid.tolist()) for j,b in enumerate(train.tolist())
        if are_near(shown[a], shown[b])]
    return Data((images[train],masks[train]), (images[valid],masks[valid]), {'a second away': pairs})

# Networks

def _learner(data, net, seed):
    train,valid = data.train,data.valid
    set_seed(seed)
    if train[1].ndim>1: # masks
        loss,metric = CrossEntropyLossFlat(axis=1, ignore_index=11),mean_iou_error(11)
        return Learner(mask_dls(train, valid), SmallUNet(12), loss, opt_func=Adam, metrics=metric)
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

def _fitted(data, net, seed):
    learn = _learner(data, net, seed)
    if net=='pretrained': return learn # as it comes
    with learn.no_bar(),learn.no_logging(): learn.fit_one_cycle(3 if scale()!='tiny' else 1, .01)
    return learn

# Ways: pairs of a validation and a training item, the likeliest first

def n_copies(data): return sum(map(len, data.copies.values()))

def by_package(learn, data):
    "`find_copies`, with mirror images"
    found = learn.find_copies(within='across', n=2*max(50, n_copies(data)), flips=True)
    return [*zip(found['item'], found['other'])],int(found.group.notna().sum())

def _listed(train, valid, k=4): # The nearest few of each, by similarity
    similar,at = nearest(unit(valid), unit(train), k)
    order = similar.flatten().argsort(descending=True)
    rows = torch.arange(len(valid))[:,None].expand_as(at).flatten()
    return [*zip(rows[order].tolist(), at.flatten()[order].tolist())]

def _centred(train, valid):
    mean = train.float().mean(0)
    return train.float()-mean,valid.float()-mean

def by_last_layer(learn):
    "What goes into the last layer, by cosine"
    def of(dl):
        rows = []
        def note(look): rows.append(look.seen[-1][1].float().cpu())
        look_at(learn, dl, torch.arange(len(dl.dataset)), note, linear_layers_seen)
        return torch.cat(rows)
    with learn.no_bar(): return _listed(*_centred(*map(of, learn.dls)))

def by_pixels(data):
    "Images at 8x8, by cosine"
    return _listed(*_centred(*(F.adaptive_avg_pool2d(o.float(), 8).flatten(1) for o,_ in (data.train,data.valid))))

def _bits(images, name): # 64 of each, as 1 and -1
    import imagehash
    function = dict(average=imagehash.average_hash, perception=imagehash.phash)[name]
    return torch.tensor(np.array([function(_picture(o)).hash.flatten() for o in images])).float()*2-1

def by_hash(data, name):
    "`imagehash`'s bits, by how many of them differ"
    return _listed(_bits(data.train[0], name), _bits(data.valid[0], name))

# What is found

def told(way, pairs, n_likely, data):
    "A row for each kind: the share that is among as many pairs as there are copies, and among twice as many"
    n,true = n_copies(data),{pair for own in data.copies.values() for pair in own}
    false,rows = sum(pair not in true for pair in pairs[:100]),[]
    for kind,own in data.copies.items():
        def share(n): return len({*own} & {*pairs[:n]})/max(1, len(own))
        rows.append(dict(way=way, kind=kind, once=share(n), twice=share(2*n), false=false, n_likely=n_likely, copies=n))
    return pd.DataFrame(rows)

def _errors(learn):
    "The error of validation with copies in it, and without those that are found"
    with learn.no_bar():
        honest = without_leaks(learn.dls, learn.find_copies(within='across', flips=True))
        return dict(error=learn.validate()[1], honest=learn.validate(dl=honest.valid)[1])

hashes = {name: partial(by_hash, name=name) for name in ('average','perception')}
rivals = dict(pixels=by_pixels, **hashes)

def run(data, who, seed):
    "The rows of a part"
    name,data = data,datasets[data](seed)
    if who in rivals: return told(who, rivals[who](data), None, data)
    learn = _fitted(data, who, seed)
    with learn.no_bar(): rows = [told('find_copies', *by_package(learn, data), data)]
    if name!='frames': rows.append(told('last layer', by_last_layer(learn), None, data))
    return pd.concat(rows).assign(**_errors(learn) if name=='planted' and who!='pretrained' else {})

# What is called a copy

def by_distance(data, most):
    "All pairs whose perception hashes differ in so many bits at most"
    train,valid = (_bits(images, 'perception') for images,_ in (data.train,data.valid))
    return [*map(tuple, (valid@train.T>=64-2*most).nonzero().tolist())]

def by_guess(data, net, seed):
    "The pairs that `find_copies` holds to be copies"
    learn = _fitted(data, net, seed)
    start = time.process_time()
    with learn.no_bar(): found = learn.find_copies(within='across', flips=True)
    found = found[found.group.notna()]
    return [*zip(found['item'], found['other'])],time.process_time()-start

def called(pairs, data):
    "A row for each kind: how many are found, and how many pairs in all are false"
    true = {pair for own in data.copies.values() for pair in own}
    false = len({*pairs}-true)
    return pd.DataFrame([dict(kind=kind, found=len({*own} & {*pairs}), of=len(own), false=false)
        for kind,own in data.copies.items()])

distances = {f'phash, {most} bits': most for most in (0,4,8)}

def run_called(way, seed):
    "The rows of a way that tells copies from others by itself, on the planted ones"
    data,start = planted(seed),time.process_time()
    if way in distances: pairs,seconds = by_distance(data, distances[way]),time.process_time()-start
    else: pairs,seconds = by_guess(data, way, seed)
    return called(pairs, data).assign(seconds=seconds)

datasets = dict(planted=planted, cifar10=of_cifar10, frames=frames)
parts = [(data, who) for data,networks in dict(planted=('small','resnet18','pretrained'), cifar10=('small','resnet18'),
    frames=('small',)).items() for who in (*rivals, *networks)]

@call_parse
def main(
    name:str, # Of the data: planted, cifar10 or frames
    seeds:int=2,
):
    "Run what is not stored yet"
    torch.set_num_threads(1)
    for seed in range(seeds):
        for data,who in parts:
            if data!=name: continue
            keys = dict(data=data, who=who, seed=seed)
            rows = once(path, keys, lambda: run(**keys).assign(**keys))
            print(data, who, seed, rows[['way','kind','once','twice']].round(2).to_string(), flush=True)
        if name!='planted': continue
        for way in (*distances, 'small', 'pretrained'):
            keys = dict(way=way, seed=seed)
            print(way, seed, once(called_path, keys, lambda: run_called(**keys).assign(**keys)).to_string(), flush=True)
