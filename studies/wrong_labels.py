"""Which numbers of an ordinary training tell wrong labels? `python -m studies.wrong_labels PART` trains what is not
stored of a part: results/wrong_labels.csv"""
import re, time
from functools import lru_cache, partial
from typing import NamedTuple

import pandas as pd, torch
from fastai.learner import Learner
from fastai.losses import BCEWithLogitsLossFlat, CrossEntropyLossFlat
from fastai.torch_core import set_seed
from fastai.vision.augment import Flip
from fastcore.script import call_parse
from torch import nn
from torch.nn import functional as F

from selback.all import WatchItemsCallback
from selback.bench.datasets import PadCrop, datasets, get_model, small_convnet
from selback.core.labels import BinaryLabels, ClassLabels, LabelMemory
from studies import pretrained
from studies.data import dls_of
from studies.experiments import results_folder, rows_with, scale
from studies.regimes import cifar_parts, human_labels, sgd

path = results_folder/'wrong_labels.csv'
kept = results_folder.parent/'runs/wrong_labels' # what each item was predicted, epoch by epoch

class Trajectory(WatchItemsCallback):
    "Plain training that keeps what is predicted of each item in each epoch"
    def __init__(self):
        super().__init__()
        self.logits,self.valid = [],[] # of each epoch; the share of validation's labels that are predicted

    def before_fit(self):
        super().before_fit()
        self.n_before,n = len(self.logits),self.learn.n_epoch
        self.logits += [torch.full((len(self.dls.train_ds),self.dls.c), torch.nan).half() for _ in range(n)]
        self.valid += [torch.nan]*n

    @property
    def at(self): return self.n_before+self.epoch

    def after_loss(self):
        self.logits[self.at][self.item_idx.cpu()] = self.learn.pred.detach().half().cpu()

# Data: images, labels as they should be, and as they are given

people = 'aggregate','random1','worst' # CIFAR-10N

def _chosen(n, share, generator):
    "A mask of so many of `n`"
    mask = torch.zeros(n, dtype=torch.bool)
    mask[torch.randperm(n, generator=generator)[:round(share*n)]] = True
    return mask

def flipped(
    labels, # As they should be, shape (n,)
    kind:str, # 'symmetric': any other class; 'pairwise': the next one
    share:float, # Of them
    seed:int,
): # Shape (n,)
    "Labels of which a share is wrong"
    g = torch.Generator().manual_seed(seed)
    n_classes = int(labels.max())+1
    steps = torch.randint(1, n_classes, labels.shape, generator=g) if kind=='symmetric' else torch.ones_like(labels)
    return torch.where(_chosen(len(labels), share, g), (labels+steps)%n_classes, labels)

def misfiled(
    labels, # Of three classes
    share:float, # Of the first class, which is filed under the others
    seed:int,
): # Shape (n,)
    "Labels of which those of one class are wrong"
    g = torch.Generator().manual_seed(seed)
    first = (labels==0).nonzero()[:,0]
    wrong = first[_chosen(len(first), share, g)]
    return labels.index_copy(0, wrong, torch.randint(1, 3, wrong.shape, generator=g))

def unsaid(
    labels, # 0 or 1, shape (n, labels)
    kind:str, # 'missing': labels that an item has are not given; 'flipped': any may be wrong
    share:float, # Of them
    seed:int,
): # Shape (n, labels)
    "Several labels for each item, of which some are wrong"
    g = torch.Generator().manual_seed(seed)
    is_wrong = torch.rand(labels.shape, generator=g)<share
    if kind=='missing': is_wrong &= labels>.5
    return torch.where(is_wrong, 1-labels, labels)

def smaller(images): return torch.cat([F.avg_pool2d(o.float(), 2).round().byte() for o in images.split(5000)])

def _some(n, n_tiny=300): return n_tiny if scale()=='tiny' else n

@lru_cache
def photographs(is_valid=False, resized=smaller):
    "Images of CIFAR-10 at half the size, their labels, and which rows of the training set they are"
    images,labels = cifar_parts()[0]
    n,n_valid = _some(10_000),_some(2_000, 100)
    rows = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    rows = rows[n:n+n_valid] if is_valid else rows[:n]
    return resized(images[rows]),labels[rows],rows

@lru_cache
def digits(is_valid=False):
    "Images of digits in their own 8x8 pixels, and their labels"
    images,labels = datasets['digits']()[is_valid]
    return F.avg_pool2d(images, 4)[:_some(len(labels))],labels[:_some(len(labels))]

def _corners(n, seed=0):
    "Images of up to four digits, and which of them each shows"
    images,labels = datasets['digits']()[0]
    g = torch.Generator().manual_seed(seed)
    at = torch.randint(len(images), (n,4), generator=g)
    is_there = torch.rand(n, 4, generator=g)<.5
    is_there[:,0] = True
    tiles = F.avg_pool2d(images, 2)[at]*is_there[:,:,None,None,None]
    whole = tiles.view(n, 2, 2, 3, 16, 16).permute(0, 3, 1, 4, 2, 5).reshape(n, 3, 32, 32)
    return whole,torch.zeros(n, 10).scatter_reduce_(1, labels[at], is_there.float(), 'amax')

def _with_a_rare_one(n_labels, n_with, n):
    "Images of up to four digits, and whether each shows a 0, a 1, and so on, and a 9, which so many of them do"
    images,digits = _corners(4*n)
    has = digits[:,9]>0
    rows = torch.cat([has.nonzero()[:n_with,0], (~has).nonzero()[:n-n_with,0]]).sort().values
    return images[rows],torch.cat([digits[rows,:n_labels-1], digits[rows,9:]], 1)

class Situation(NamedTuple):
    "Data, labels, and how one trains on them"
    data:str # 'cifar', 'digits', 'folder', 'pretrained', 'several' or 'rare', which is several, too
    labels:str # One of `people`, or what is wrong and per cent; of 'rare' one of `rare_ones`
    augmented:bool
    epochs:int
    net:str='small' # 'small', 'wide', 'resnet18', 'pretrained'; the last by its head alone 'frozen', fine-tuned 'tuned'

    @property
    def name(self):
        how = 'augmented' if self.augmented else 'as they are'
        net = '' if self.net=='small' else f', {self.net}'
        return f'{self.data}, {self.labels}, {how}, {self.epochs} epochs{net}'

    @property
    def are_several(self): return self.data in ('several','rare')

    @property
    def has_body(self): return self.net in ('frozen','tuned')

    @property
    def loss_func(self): return BCEWithLogitsLossFlat() if self.are_several else CrossEntropyLossFlat()

    def validation(self, seed): # Images, and labels as they are given; None: there is none
        "Other items, whose labels are wrong as often"
        if self.data=='folder': images,_,labels = self._folder(seed, is_valid=True)
        elif self.data in ('cifar','digits'): images,_,labels = self._flipped(seed+100, is_valid=True)
        elif self.data=='several': images,_,labels = self._unsaid(seed+100, is_valid=True)
        else: return None
        return images,labels

    def items(self, seed): # Images, labels as they should be, and as they are given
        "What is trained on"
        if self.data=='several': return self._unsaid(seed)
        if self.data=='rare': return self._rare(seed)
        if self.data=='folder': return self._folder(seed)
        return self._flipped(seed)

    def _flipped(self, seed, is_valid=False):
        if self.data=='pretrained':
            images,truth,rows = pretrained.enlarged()[0]
        elif self.data=='digits': (images,truth),rows = digits(is_valid),None
        else: images,truth,rows = photographs(is_valid, pretrained.larger if self.has_body else smaller)
        if self.labels in people: return images,truth,human_labels(self.labels)[rows]
        kind,percent = self.labels.split()
        return images,truth,flipped(truth, kind, int(percent)/100, seed)

    def _unsaid(self, seed, is_valid=False):
        images,truth = _corners(_some(500 if is_valid else 2000, 100), seed=int(is_valid))
        kind,percent = self.labels.split()
        return images,truth,unsaid(truth, kind, int(percent)/100, seed)

    def _rare(self, seed):
        "5 % of the labels are flipped, of few items 1 %; but not the rare one where it is right, or no item has it"
        n_labels,n_with,n = (int(o) for o in re.findall(r'\d+', self.labels))
        images,truth = _with_a_rare_one(n_labels, n_with, _some(n, 100))
        labels = unsaid(truth, 'flipped', .05 if n>300 else 16/(n*n_labels), seed)
        if n_with==0 or self.labels.endswith('right'): labels[:,-1] = truth[:,-1]
        return images,truth,labels

    def _folder(self, seed, is_valid=False):
        "300 photographs of birds, cats and dogs, others for each seed; two fifths of the birds are filed as the others"
        images,kinds = cifar_parts()[0]
        g = torch.Generator().manual_seed(seed)
        n = _some(100, 20)
        def some_of(c):
            rows = (kinds==c).nonzero()[:,0]
            rows = rows[torch.randperm(len(rows), generator=g)]
            return rows[n:2*n] if is_valid else rows[:n]
        rows = torch.cat([some_of(c) for c in (2,3,5)])
        truth = torch.arange(3).repeat_interleave(n)
        images = images[rows]
        if self.net!='small':
            images = F.interpolate(images.float(), size=64, mode='bicubic', antialias=True).clamp(0, 255).byte()
        return images,truth,misfiled(truth, .4, seed)

    def model(self, n_out):
        if self.has_body or self.net=='pretrained': return pretrained.with_head(n_out)
        if self.net=='resnet18': return get_model('resnet18', n_out)
        if self.data=='digits':
            return nn.Sequential(nn.Flatten(), nn.Linear(192,128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128,n_out))
        return small_convnet(n_out, 1. if self.net=='wide' or self.data=='folder' else .5)

    def learner(self, images, labels, seed, cbs=None):
        set_seed(seed)
        if self.has_body:
            dls = pretrained.dls_of((images,labels), self.validation(seed))
            return Learner(dls, self.model(10), self.loss_func, cbs=cbs, splitter=pretrained.halves_and_head)
        tfms = []
        if self.augmented: tfms = [PadCrop(max(1, images.shape[-1]//16))]
        if self.augmented and self.data!='digits' and not self.are_several: tfms.append(Flip())
        valid = self.validation(seed) or (images[:100],labels[:100])
        n_classes = 3 if self.data=='folder' else labels.shape[1] if self.are_several else 10
        dls = dls_of((images,labels), valid, n_classes, 64 if len(images)>2000 else 32, tfms)
        dls.train.drop_last = len(images)>300 # fastai's own, by which 300 items would lose a tenth
        split = dict(splitter=pretrained.halves_and_head) if self.net=='pretrained' else {}
        opt = dict(opt_func=sgd) if self.net in ('small','wide') else {}
        return Learner(dls, self.model(n_classes), self.loss_func, cbs=cbs, **opt, **split)

    def fit(self, learn):
        trajectory = learn.selection if isinstance(learn.selection, Trajectory) else None
        watches = trajectory and self.data in ('cifar','digits','folder','several')
        learn._do_epoch_validate = (lambda *args: note_validation(learn, trajectory)) if watches else lambda *args: None
        with learn.no_bar(),learn.no_logging():
            if self.net=='frozen':
                pretrained.freeze_all(learn)
                learn.fit_one_cycle(self.epochs, 3e-3)
            elif self.net=='tuned': learn.fine_tune(self.epochs)
            elif self.net=='pretrained': learn.fit_one_cycle(self.epochs, slice(3e-5, 3e-3))
            elif self.net=='resnet18': learn.fit_one_cycle(self.epochs, 1e-3)
            else: learn.fit_one_cycle(self.epochs, .1 if self.data in ('cifar','folder') else .05)
        return learn

# Training

@torch.no_grad()
def note_validation(learn, trajectory):
    "How many labels of the validation part are predicted, after an epoch"
    learn.model.eval()
    def predicted(pred, y): return pred.argmax(1)==y if y.ndim==1 else (pred>0)==(y>.5)
    right = [predicted(learn.model(x), y).float() for x,y in learn.dls.valid]
    trajectory.valid[trajectory.at] = float(torch.cat(right).mean())

def logits_of(learn, images): # Shape (n, classes)
    "Of images as they are, normalized as the training set is"
    learn.model.eval()
    norm = next(o for o in learn.dls.train.after_batch.fs if hasattr(o, 'mean') and hasattr(o, 'std'))
    scale = 1 if images.is_floating_point() else 255
    with torch.no_grad():
        parts = (o.to(norm.mean.device).float()/scale for o in images.split(1000))
        return torch.cat([learn.model((o-norm.mean)/norm.std) for o in parts]).cpu()

def predicted(situation, learn, images): # Probabilities, shape (n, classes)
    "What a trained network says of images as they are"
    logits = logits_of(learn, images)
    return logits.sigmoid() if situation.are_several else logits.softmax(1)

def held_out(situation, images, labels, seed, n_folds=5): # Probabilities, shape (n, classes)
    "What networks say of items that they have not seen"
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    probs = []
    for fold in order.chunk(n_folds):
        rest = torch.ones(len(labels), dtype=torch.bool)
        rest[fold] = False
        learn = situation.fit(situation.learner(images[rest], labels[rest], seed))
        probs.append(predicted(situation, learn, images[fold]))
    return torch.cat(probs)[order.argsort()]

def stored(situation, seed, with_folds=False): # By name
    "What a training leaves of each item, trained once"
    file = kept/f"{situation.name.replace(', ', '_').replace(' ', '-')}_{seed}.pt"
    left = torch.load(file) if file.exists() else {}
    if left and ('held_out' in left or not with_folds): return left

    images,truth,labels = situation.items(seed)
    if not left:
        start = time.process_time()
        learn = situation.fit(situation.learner(images, labels, seed, Trajectory()))
        seconds = time.process_time()-start
        final = predicted(situation, learn, images).half()
        left = dict(labels=labels, truth=truth, logits=torch.stack(learn.selection.logits),
            valid=torch.tensor(learn.selection.valid), final=final, seconds=seconds)
    if with_folds: left['held_out'] = held_out(situation, images, labels, seed).half()
    kept.mkdir(parents=True, exist_ok=True)
    torch.save(left, file)
    return left

# What tells them

def smoothed(values, past): # Shape (epochs, rows), NaN where an item was not seen; weight of the past
    "An exponential moving average over the epochs"
    out = values[0]
    for now in values[1:]:
        mean = torch.where(out.isnan(), now, past*out+(1-past)*now)
        out = torch.where(now.isnan(), out, mean)
    return out

def watched(left, bs=64):
    "What `watch_items` would have remembered; two margins, probabilities, shape (epochs, rows)"
    labels,logits = left['labels'],left['logits']
    read = BinaryLabels(labels.shape[1]) if labels.ndim>1 else ClassLabels()
    memory,generator = LabelMemory(len(labels), read.n_labels),torch.Generator().manual_seed(0)
    told = dict(logit_margin=[], margin=[], probability=[])
    valid = left.get('valid')
    if valid is None or valid.isnan().any(): valid = [None]*len(logits) # there was none
    for looks,of_valid in zip(logits, valid):
        order = torch.randperm(len(labels), generator=generator)
        steps = []
        for rows in order.split(bs):
            steps.append(read(looks[rows], labels[rows], memory.given))
            memory.note(rows, steps[-1])
        memory.end_epoch(of_valid)
        for name,of_all in told.items():
            of_all.append(torch.cat([getattr(o, name) for o in steps])[order.argsort()].flatten())
    margins,balanced,probs = (torch.stack(o) for o in told.values())
    return memory,margins,balanced,torch.where(margins.isnan(), torch.nan, probs)

def _of_the_label(probs, labels): # Probabilities
    "That of each label, and that of the likeliest other class"
    if labels.ndim>1: return tuple(torch.where(has, probs, 1-probs).flatten() for has in (labels>.5, labels<=.5))
    at = labels[:,None]
    return probs.gather(1, at)[:,0],probs.scatter(1, at, -1).max(1).values

def late(margins): # Shape (epochs, rows), NaN where an item was not seen
    "Means in which the k-th look at an item counts k times"
    weights = (~margins.isnan()).cumsum(0)*~margins.isnan()
    return (weights*margins.nan_to_num()).sum(0)/weights.sum(0)

def balanced_as_given(left): # Shape (rows,)
    "Mean margins of several labels, the odds of yes divided by those that were given"
    labels = left['labels']
    odds = (1+labels.sum(0))/(1+(1-labels).sum(0))
    return (torch.where(labels>.5, .5, -.5)*(left['logits'].float()-odds.log())).tanh().nanmean(0).flatten()

def suspicions(left): # By name, shape (rows,): the higher the more suspect
    "What training tells of each label"
    memory,margins,balanced,probs = watched(left)
    losses = -probs.clamp(min=1e-30).log()
    frame = memory.frame()
    read = BinaryLabels(memory.n_labels, True) if left['labels'].ndim>1 else ClassLabels(are_probabilities=True)
    final = read(left['final'].float(), left['labels'], memory.given)
    looked = memory.looked_at([(torch.arange(len(left['labels'])), final)])
    told = {'last loss': smoothed(losses, 0.), 'mean loss': losses.nanmean(0),
        'smoothed loss, .9': smoothed(losses, .9),
        'mean margin (AUM)': -torch.tensor(frame.logit_margin), 'smoothed margin, .8': -smoothed(margins, .8),
        'late margin': -late(margins), 'balanced margin': -balanced.nanmean(0), 'weighed margin': -memory.margin,
        'weighed margin, a look more': -looked.margin,
        'mean probability': -torch.tensor(frame.probability),
        'times other': torch.tensor((frame.disagreed-1e-4*frame.logit_margin)/frame.looks),
        "fastai's top_losses": -_of_the_label(left['final'].float(), left['labels'])[0]}
    if left['labels'].ndim>1: told['balanced as given'] = -balanced_as_given(left)
    if 'held_out' in left: told['five trainings'] = -_of_the_label(left['held_out'].float(), left['labels'])[0]
    return {name: values.nan_to_num(-1e9) for name,values in told.items()} # of an item that was never seen

def auroc(values, is_wrong):
    "How often a wrong label is more suspect than a right one"
    ranks = torch.tensor(pd.Series(values).rank().to_numpy())
    n_wrong,n_right = int(is_wrong.sum()),int((~is_wrong).sum())
    return float(ranks[is_wrong].sum()-n_wrong*(n_wrong+1)/2)/(n_wrong*n_right)

def cleanlab_list(left): # A mask, shape (items,)
    "What cleanlab lists by five trainings"
    from cleanlab.filter import find_label_issues
    return torch.from_numpy(find_label_issues(left['labels'].numpy(), left['held_out'].double().numpy(), n_jobs=1))

def score(left, n_listed=0): # DataFrame
    "A row for each measure; `precision` and `recall` are of a list as long as cleanlab's, or of so many"
    is_wrong = (left['labels']!=left['truth']).flatten()
    n_wrong = int(is_wrong.sum())
    listed = cleanlab_list(left) if 'held_out' in left else None
    if listed is not None: n_listed = int(listed.sum())
    rows = []
    for name,values in suspicions(left).items():
        first = is_wrong[values.argsort(descending=True, stable=True)].double()
        among = dict(found=first[:n_wrong].mean(), first_100=first[:100].mean())
        row = dict(measure=name, auroc=auroc(values, is_wrong), **among)
        if n_listed: row |= dict(precision=first[:n_listed].mean(), recall=first[:n_listed].sum()/n_wrong)
        rows.append(row)
    if listed is not None: rows.append(dict(measure='cleanlab', precision=is_wrong[listed].double().mean(),
        recall=is_wrong[listed].sum()/n_wrong))
    memory,*_ = watched(left)
    counts = dict(n=len(is_wrong), wrong=n_wrong, estimate=int(memory.is_estimated_error.sum()), listed=n_listed)
    return pd.DataFrame(rows).astype({c: float for c in row if c!='measure'}).assign(**counts)

flips = [f'{kind} {percent}' for kind in ('symmetric','pairwise') for percent in (5, 20, 40)]

_rates = '50 of 1000','20 of 1000','5 of 1000'
rare_ones = [*(f'{n_labels}, one on {n}' for n_labels in (1, 3, 5) for n in _rates),
    *(f'{n_labels}, one on {n}, right' for n_labels in (3, 5) for n in _rates),
    '3, one on 0 of 1000', '5, one on 0 of 1000', '5, one on 11 of 260', '5, one on 11 of 260, right',
    '5, one on 0 of 260'] # labels, of which one is rare; right: that one is, of all items

def part(name):
    "Situations, seeds, and are folds trained, too?"
    cifar = partial(Situation, 'cifar')
    return {
        'people': [(cifar(labels, True, 16), seed, True) for seed in range(2) for labels in people],
        'flips': [(cifar(labels, augmented, 16), 0, False) for labels in flips for augmented in (True, False)],
        'people_plain': [(cifar(labels, False, 16), 0, False) for labels in people],
        'short': [(cifar(labels, augmented, 5), 0, False)
            for augmented in (True, False) for labels in (*people,*flips)],
        'long': [(cifar(labels, False, 30, 'wide'), 0, False) for labels in ('worst','symmetric 20','pairwise 20')],
        'digits': [(Situation('digits', labels, augmented, epochs), seed, epochs==30)
            for seed in range(2) for epochs in (5, 30, 100) for augmented in (False, True) for labels in flips],
        'folder': [(Situation('folder', 'misfiled 40', True, 15, net), seed, net=='small')
            for seed in range(4) for net in ('small','resnet18','pretrained')],
        'pretrained': [(Situation('pretrained', labels, True, 5, 'pretrained'), 0, False)
            for labels in (*people,'symmetric 20')],
        'bodies': [(cifar(labels, True, epochs, net), 0, True)
            for labels in people for net,epochs in (('frozen',5),('tuned',3))],
        'several': [(Situation('several', labels, True, epochs), seed, False)
            for seed in range(2) for epochs in (8, 30) for labels in ('missing 20','flipped 5','flipped 20')],
        'rare': [(Situation('rare', labels, True, 40 if '260' in labels else 12), seed, False)
            for seed in range(2) for labels in rare_ones]}[name]

by_folds = 'cleanlab','five trainings'

def note(situation, seed, left):
    "Write down what a training tells, in place of what was written of it before; without folds theirs stays"
    before = _noted(situation, seed)
    n_listed = int(before.listed.max()) if len(before) and 'held_out' not in left else 0
    rows = score(left, n_listed)
    if n_listed: rows = pd.concat([rows, before[before.measure.isin(by_folds)][rows.columns]])
    for at,(name,value) in enumerate(situation._asdict().items()): rows.insert(at, name, value)
    rows.insert(at+1, 'seed', seed)
    if path.exists():
        runs = pd.read_csv(path)
        keys = [*situation._fields,'seed']
        is_other = (runs[keys]!=rows[keys].iloc[0]).any(axis=1)
        rows = pd.concat([runs[is_other], rows])
    rows.to_csv(path, index=False, float_format='%.4f')

def _noted(situation, seed):
    "What was written of a training"
    if not path.exists(): return pd.DataFrame(columns=['listed'])
    return rows_with(pd.read_csv(path), situation._asdict() | dict(seed=seed))

@call_parse
def main(
    names:str, # Parts, with commas between
    keep_folds:bool=False, # Keep what is written of folds, and train none?
):
    "Train what is not stored yet"
    for name in names.split(','):
        for situation,seed,with_folds in part(name):
            note(situation, seed, stored(situation, seed, with_folds and not keep_folds))
            print(name, situation.name, seed, flush=True)
