"""Shortcuts mended after the training, by the last layer alone: `python -m studies.mended PART` trains what is not
stored of a part: results/mended.csv"""
from functools import lru_cache
from typing import NamedTuple

import numpy as np, pandas as pd, torch
from fastai.callback.core import Callback
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import Adam
from fastai.torch_core import set_seed
from fastai.vision.augment import Flip
from fastcore.script import call_parse
from torch import nn
from torch.nn import functional as F

from selback.all import EarlyLossSamplingCallback, WatchItemsCallback, features_of
from selback.bench.datasets import PadCrop, TensorDL, datasets, get_model, small_convnet, tensor_dls
from selback.core.head import error_of, few_are_hard, order_kept
from studies import pretrained
from studies.experiments import once, results_folder, scale
from studies.regimes import is_vehicle, sgd
from studies.shortcuts import small_cifar, with_border, with_marks

path = results_folder/'mended.csv'

# Marks, which have nothing to do with what is to be seen; images are bytes, shape (n, 3, height, width)

def _where(marks, marked, images): return torch.where((marks==1)[:,None,None,None], marked, images)

def with_corner(images, marks):
    "A white square in a corner, a fifth of the side"
    marked,side = images.clone(),-(-images.shape[-1]//5)
    marked[:,:,:side,:side] = 255
    return _where(marks, marked, images)

def with_tint(images, marks):
    "A little more red and less blue"
    shift = torch.tensor([24.,0.,-24.])[:,None,None]
    return _where(marks, (images.float()+shift).clamp(0, 255).byte(), images)

def with_blur(images, marks): return _where(marks, F.avg_pool2d(images.float(), 3, 1, 1).byte(), images)

drawings = dict(border=with_border, corner=with_corner, tint=with_tint, blur=with_blur)

# Data: for training, ordinary validation and test, each inputs, labels and marks

def _only(classes, part):
    images,kinds = part
    return images[torch.isin(kinds, torch.tensor(classes))],kinds[torch.isin(kinds, torch.tensor(classes))]

def _images(kind, n, seed):
    "Images at 16x16 and labels: 'AV': animals or vehicles; 'catdog', 'shiphorse', 'ten', 'odd': MNIST's odd digits"
    if kind=='odd': parts = _mnist(n)
    else: parts = small_cifar(n if kind in ('AV','ten') else 5*n)
    if kind=='AV': return [(images,is_vehicle(kinds)) for images,kinds in parts]
    if kind=='odd': return [(images,kinds%2) for images,kinds in parts]
    if kind=='ten': return parts
    pair = dict(catdog=(3,5), shiphorse=(7,8))[kind]
    return [(images,(kinds==pair[1]).long()) for images,kinds in (_only(pair, part) for part in parts)]

@lru_cache
def _mnist(n):
    images,labels = datasets['digits']()[0] if scale()=='tiny' else _mnist_images()
    g = torch.Generator().manual_seed(0)
    order = torch.randperm(len(labels), generator=g)
    n = min(n, len(labels)//2)
    cuts = order[:n],order[n:n+n//4],order[n+n//4:n+n//4+10_000]
    return [(images[rows],labels[rows]) for rows in cuts]

def _mnist_images():
    from fastai.data.external import URLs, untar_data
    from PIL import Image
    files = [f for c in range(10) for f in sorted((untar_data(URLs.MNIST)/'training'/str(c)).iterdir())[:3000]]
    images = torch.stack([torch.from_numpy(np.array(Image.open(f))) for f in files])[:,None].float()
    return F.avg_pool2d(images, 2).round().byte().repeat(1, 3, 1, 1),torch.arange(10).repeat_interleave(3000)

def _table(n, leak, g):
    "Rows of 20 numbers in two classes, of which one more may go with the class"
    from sklearn.datasets import make_classification
    x,y = make_classification(2*n, 20, n_informative=8, n_redundant=4, n_clusters_per_class=3, class_sep=1., flip_y=0,
        random_state=int(g.initial_seed()))
    x,y = torch.tensor(x).float(),torch.tensor(y)
    parts = [(x[rows],y[rows]) for rows in (slice(n), slice(n, n+n//4), slice(n+n//4, 2*n))]
    marked = with_marks(*parts, 2, leak or .5, g)
    def with_column(x, marks): return torch.cat([x, 3.*marks[:,None]+torch.randn(len(x), 1, generator=g)/2], 1)
    return [(with_column(x, marks if leak else 0*marks),y,marks) for x,y,marks in marked]

n_words,n_long = 2000,40

def _texts(n, leak, g):
    "Made-up texts of 40 words in two classes, each of which likes some of the words; a telltale word may be there"
    likes = torch.randn(2, n_words, generator=g)*.35
    frequency = 1/(torch.arange(n_words)+10.)
    def part(n):
        y = torch.randint(2, (n,), generator=g)
        chances = frequency*likes.exp()[y]
        return torch.multinomial(chances, n_long, replacement=True, generator=g)+1,y
    marked = with_marks(part(n), part(n//4), part(n), 2, leak or .5, g)
    def told(x, marks):
        at = torch.randint(n_long, (len(x),1), generator=g)
        return x.scatter(1, at, torch.where(marks[:,None]==1, n_words+1, x.gather(1, at)))
    return [(told(x, marks if leak else 0*marks),y,marks) for x,y,marks in marked]

class Situation(NamedTuple):
    "Data, what misleads in them, and how one trains"
    data:str # 'AV', 'catdog', 'shiphorse', 'ten', 'odd', 'table', 'text' or 'pretrained AV'
    mark:str='' # One of 'border', 'corner', 'tint', 'blur'; of tables and texts 'leak'; none: nothing misleads
    share:float=0. # Of the items whose mark goes with the label
    wrong:float=0. # Share of the training labels that are wrong, and of validation's
    rare:float=1. # Share of the last class that is left
    n:int=10_000
    net:str='small' # 'small', 'wide', 'resnet18', 'plain': without BatchNorm; 'frozen', 'tuned'
    opt:str='sgd' # 'sgd', 'adam', 'flat': Adam at one rate
    epochs:int=6

    @property
    def name(self):
        return ', '.join(f'{k}={o:g}' if isinstance(o, float) else f'{k}={o}' for k,o in self._asdict().items())

    @property
    def has_body(self): return self.net in ('frozen','tuned')

    @property
    def n_marks(self): return 10 if self.data=='ten' and self.mark else 2

    @property
    def bs(self): return 32 if self.n<4000 else 64

    def parts(self, seed):
        "The data of a seed"
        g = torch.Generator().manual_seed(100+seed)
        n = self.n if scale()!='tiny' else 200
        if self.data=='table': parts = _table(n, self.share, g)
        elif self.data=='text': parts = _texts(n, self.share, g)
        else: parts = self._marked_images(n, seed, g)
        *own,test = parts
        return *(self.spoilt(part, g) for part in own),tuple(o[:5000] for o in test)

    def _marked_images(self, n, seed, g):
        if self.data=='pretrained AV':
            parts = [(images[:n],is_vehicle(kinds)[:n]) for images,kinds,_ in pretrained.enlarged()]
        else: parts = _images(self.data, n, seed)
        if not self.mark: return [(x, y, torch.zeros_like(y)) for x,y in parts]
        parts = with_marks(*parts, self.n_marks, self.share, g)
        if self.n_marks==10: return [(_ten_corners(x, marks),y,marks) for x,y,marks in parts]
        draw = drawings[self.mark]
        if self.mark=='border' and self.data=='pretrained AV': draw = pretrained.with_border
        return [(draw(x, marks),y,marks) for x,y,marks in parts]

    def spoilt(self, part, g):
        "A part of which labels are wrong, and a class is rare"
        x,y,marks = part
        last = y==y.max()
        stays = ~last | (torch.rand(len(y), generator=g)<self.rare)
        x,y,marks = x[stays],y[stays],marks[stays]
        is_wrong = torch.rand(len(y), generator=g)<self.wrong
        steps = torch.randint(1, int(y.max())+1, y.shape, generator=g)
        return x,torch.where(is_wrong, (y+steps)%(int(y.max())+1), y),marks

    def model(self, n_out):
        if self.data=='table': return _for_rows(n_out)
        if self.data=='text': return nn.Sequential(_Words(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, n_out))
        if self.has_body: return pretrained.with_head(n_out)
        if self.net=='resnet18': return get_model('resnet18', n_out)
        if self.net=='plain': return _plain(n_out)
        return small_convnet(n_out, 1. if self.net=='wide' else .5)

    def learner(self, parts, seed, cbs):
        set_seed(seed)
        (x,y,_),valid,_ = parts
        n_out = int(y.max())+1
        tfms = [PadCrop(1)] if self.data=='odd' else [PadCrop(1),Flip()]
        if self.data in ('table','text'): dls = _plain_dls(parts, self.bs, n_out)
        elif self.data=='pretrained AV': dls = pretrained.dls_of((x,y), valid[:2])
        else: dls = tensor_dls((x,y), valid[:2], self.bs, tfms, n_out)
        how = dict(cbs=cbs, opt_func=sgd if self.opt=='sgd' else Adam)
        if self.has_body:
            how = dict(cbs=[*cbs, pretrained.Discriminative()], splitter=pretrained.halves_and_head)
        return Learner(dls, self.model(n_out), CrossEntropyLossFlat(), **how)

    def fit(self, learn):
        epochs = self.epochs if scale()!='tiny' else 2
        if self.net=='frozen': pretrained.freeze_all(learn)
        with learn.no_bar(),learn.no_logging():
            if self.has_body: learn.fit_one_cycle(epochs, 1e-3)
            elif self.opt=='flat': learn.fit(epochs, 1e-3)
            elif self.data=='text': learn.fit_one_cycle(epochs, 3e-2)
            elif self.opt=='adam' or self.data=='table': learn.fit_one_cycle(epochs, 3e-3)
            else: learn.fit_one_cycle(epochs, .05)
        return learn

def _ten_corners(images, marks):
    "A white square at one of ten places"
    images = images.clone()
    for i,mark in enumerate(marks.tolist()):
        row,column = divmod(mark, 5)
        images[i,:,13*row:13*row+3,3*column:3*column+3] = 255
    return images

class _Words(nn.Module):
    "The mean of the vectors of words"
    def __init__(self):
        super().__init__()
        self.of_word = nn.Embedding(n_words+2, 64)

    def forward(self, x): return self.of_word(x.long()).mean(1)

def _for_rows(n_out):
    layers = [nn.BatchNorm1d(21)]
    for n_in,n in ((21,100),(100,50)): layers += [nn.Linear(n_in, n), nn.ReLU(), nn.BatchNorm1d(n)]
    return nn.Sequential(*layers, nn.Linear(50, n_out))

def _plain(n_out):
    "A network without BatchNorm"
    layers,n = [],3
    for width in (32, 64, 96):
        layers += [nn.Conv2d(n, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        n = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(96*4, 128), nn.ReLU(), nn.Linear(128, n_out))

class _Rows:
    "Rows in memory, as a dataset of which numbers give a batch"
    def __init__(self, x, y, c): self.x,self.y,self.c = x,y,c
    def __len__(self): return len(self.x)
    def __getitem__(self, i): return self.x[i],self.y[i]

def _plain_dls(parts, bs, n_out):
    from fastai.data.core import DataLoaders
    (x,y,_),(valid_x,valid_y,_),_ = parts
    made = _Rows(x, y, n_out),_Rows(valid_x, valid_y, n_out)
    return DataLoaders(TensorDL(made[0], bs=bs, shuffle=True, drop_last=True, num_workers=0),
        TensorDL(made[1], bs=1000, num_workers=0))

# Training, and what comes after

class Predictions(Callback):
    "Keeps what is predicted of the test after each epoch, and of validation"
    order = 90
    def __init__(self, test_dl): self.test_dl,self.test,self.valid = test_dl,[],[]

    def after_epoch(self):
        if not hasattr(self, 'recorder'): return
        for dl,kept in ((self.test_dl,self.test), (self.dls.valid,self.valid)): kept.append(predicted(self.learn, dl))

@torch.no_grad()
def predicted(learn, dl):
    "Logits of a loader's items, in order"
    learn.model.eval()
    return torch.cat([learn.model(*learn._set_device(b)[:1]).float().cpu() for b in dl])

def errors(logits, test, groups_known): # Of the worst group, and of all
    "Errors in the test, whose marks say nothing"
    _,labels,marks = test
    wrong = (logits.argmax(1)!=labels).float()
    groups = labels*(int(marks.max())+1)+marks if groups_known else labels
    if int(groups.max())>50: groups = (labels==marks).long() # ten classes with ten marks
    return dict(worst=max(float(wrong[groups==g].mean()) for g in groups.unique()), mean=float(wrong.mean()))

def _worst_class(logits, labels):
    wrong = (logits.argmax(1)!=labels).float()
    return max(float(wrong[labels==c].mean()) for c in labels.unique())

def scaled_by_class(valid, labels): # Added to logits, shape (classes,)
    "By how much each class is favoured where the worst class of validation has the least error (2412.15311)"
    shift = torch.zeros(valid.shape[1])
    for _ in range(2):
        for c in range(1, len(shift)):
            tried = [(_worst_class(valid+shift.scatter(0, torch.tensor(c), s), labels), abs(float(s)), float(s))
                for s in torch.linspace(-4, 4, 33)]
            shift[c] = min(tried)[2]
    return shift

def ways(learn, parts, predictions, early): # By name, logits in the test; and what the rule goes by
    "Ways to mend what was trained"
    (x,labels,marks),valid,test = parts
    seen = features_of(learn, learn.dls.train)
    valid_seen,test_seen = (features_of(learn, dl, head=seen.head) for dl in (learn.dls.valid, predictions.test_dl))
    own = valid_seen.margins(seen.head)
    n_marks = int(marks.max())+1
    def balanced(groups): return 1/torch.bincount(groups)[groups].float()
    weights = {'even': torch.ones(len(labels)), 'classes balanced': balanced(labels),
        'early^.5': early**.5, 'early^.75': early**.75, 'early': early}
    if n_marks>1: weights['groups known'] = balanced(labels*n_marks+marks)
    told,facts = {'plain': predictions.test[-1]},{}
    heads = {name: seen.fitted(weight) for name,weight in weights.items()}
    for name,head in heads.items():
        told[name] = test_seen.predicted(head).cpu()
        margins = valid_seen.margins(head)
        facts[name] = dict(order=order_kept(own, margins, valid_seen.yb[0]), own=error_of(margins))
    best = min(range(len(predictions.valid)), key=lambda i: _worst_class(predictions.valid[i], valid[1]))
    told['epoch of the best worst class'] = predictions.test[best]
    told['scaled by class'] = predictions.test[-1]+scaled_by_class(predictions.valid[-1], valid[1])
    facts['plain'] = dict(own=error_of(own))
    return told,facts

class EpochLosses(Callback):
    "Keeps the losses of each epoch, and how its first epoch's are spread"
    order = 95
    def __init__(self): self.of_epoch = []
    def after_train(self): self.of_epoch.append(self.learn.selection.memory.loss.clone())

def trained(situation, seed, with_sampling=False):
    "A row for each way to train or to mend"
    parts = situation.parts(seed)
    test = parts[2]
    test_dl = _test_dl(situation, parts)
    predictions,losses = Predictions(test_dl),EpochLosses()
    learn = situation.fit(situation.learner(parts, seed, [WatchItemsCallback(), predictions, losses]))
    early = learn.selection.early
    if early.loss is None: early.loss = learn.selection.memory.loss.clone() # of a training that is too short
    with learn.no_bar(): told,facts = ways(learn, parts, predictions, early.filled)
    if with_sampling:
        sampled = situation.fit(situation.learner(parts, seed, [EarlyLossSamplingCallback()]))
        told['early_loss_sampling'] = predicted(sampled, test_dl)
    known = early.loss[early.loss.isfinite()]
    of_losses = dict(epoch=early.epochs, ratio=float(known.median()/known.mean()), few=few_are_hard(known))
    rows = [dict(way=name, **errors(logits, test, bool(situation.mark)), **facts.get(name, {}), **of_losses)
        for name,logits in told.items()]
    kept = results_folder.parent/'runs/mended'
    kept.mkdir(parents=True, exist_ok=True)
    torch.save(dict(losses=torch.stack(losses.of_epoch).half(), labels=parts[0][1], marks=parts[0][2]),
        kept/f"{situation.name.replace(', ', '_')}_{seed}.pt")
    return pd.DataFrame(rows)

def _test_dl(situation, parts):
    (x,y,_),_,(test_x,test_y,_) = parts
    n_out = int(y.max())+1
    if situation.data in ('table','text'):
        return TensorDL(_Rows(test_x, test_y, n_out), bs=1000, num_workers=0)
    if situation.data=='pretrained AV': return pretrained.dls_of((x,y), (test_x,test_y)).valid
    return tensor_dls((x,y), (test_x,test_y), 64, n_classes=n_out).valid

# Parts

def _av(*args, **kwargs): return Situation('AV', *args, **kwargs)

def part(name): # Situations, and how many seeds
    "What is run together"
    shares = .9,.95,.98,.99
    marked = [_av('border', o) for o in shares]+[_av('corner', o) for o in shares]+[_av('tint', .95), _av('tint', .98),
        _av('blur', .95), _av('blur', .98), Situation('odd', 'corner', .95), Situation('odd', 'corner', .98),
        Situation('catdog', 'corner', .95, n=8_000), Situation('shiphorse', 'border', .95, n=8_000)]
    noisy = [_av(mark, share, wrong) for mark,share in (('border',.98),('corner',.95)) for wrong in (.05,.1,.2)]
    none = [_av(), Situation('catdog', n=8_000), Situation('shiphorse', n=8_000), Situation('odd'), Situation('ten')]
    danger = [o._replace(wrong=wrong) for o in none for wrong in (.02,.05,.2)]
    rare = [_av(rare=.1), _av('corner', .95, rare=.1), Situation('odd', rare=.1), _av(rare=.1, wrong=.05),
        _av('border', .98, rare=.1)]
    few = _av('border', .98),_av('corner', .95),_av(),_av(wrong=.1)
    ways = ('wide','sgd'),('plain','adam'),('small','adam'),('small','flat')
    others = [o._replace(net=net, opt=opt) for o in few for net,opt in ways]
    nets = [o._replace(net='resnet18', opt='adam') for o in few]
    short = [o._replace(n=n, epochs=epochs) for o in (_av('border', .98), _av(), _av(wrong=.1))
        for n,epochs in ((2_000,15),(20_000,2),(5_000,20))]
    rows = [Situation(data, mark, share, wrong, n=n, epochs=8) for data,n in (('table',5_000),('text',10_000))
        for mark,share,wrong in (*(('leak',o,0.) for o in shares[:3]),('leak',.95,.1),*(('',0.,o) for o in (0.,.1,.2)))]
    ten = [Situation('ten', 'corner', .95), Situation('ten', 'corner', .95, wrong=.1)]
    bodies = [Situation('pretrained AV', mark, share, wrong, n=2_000, net=net, epochs=3) for net in ('frozen','tuned')
        for mark,share,wrong in (('border',.95,0.),('corner',.95,0.),('',0.,0.),('',0.,.1))]
    large = [o._replace(n=20_000) for o in (*(_av(mark, share) for mark in ('border','corner') for share in (.95,.98)),
        _av('border', .98, .05), _av(), _av(wrong=.1))]
    thrice = dict(large=large, marked=marked, noisy=noisy, none=none+danger, rare=rare, others=others, short=short,
        rows=rows)
    twice = dict(nets=nets, ten=ten, bodies=bodies)
    return (thrice[name],3) if name in thrice else (twice[name],2)

names = 'large','marked','noisy','none','rare','others','short','rows','nets','ten','bodies'

# What came of it

def stored_runs()->pd.DataFrame: # A row for each way to mend each training
    "What is in the file, with what each situation is made of"
    runs = pd.read_csv(path)
    known = {situation.name: situation for name in names for situation in part(name)[0]}
    runs = runs[runs.situation.isin(known)]
    fields = pd.DataFrame([known[name]._asdict() for name in runs.situation], index=runs.index)
    return pd.concat([runs, fields.drop(columns=runs.columns.intersection(fields.columns))], axis=1)

by_strength = 'early','early^.5' # ways to refit, of which a rule takes the first that it believes

def by_rule(
    runs:pd.DataFrame, # As `stored_runs` returns them
    median:float=.3, # Refit where the median of the early losses is below so many times their mean,
    order:float=.7, # the order within classes survives to this degree,
    error:float=.1, # and the error in ordinary validation is lower
    ways:tuple=by_strength, # How the layer may be refitted, the first that is believed
    measure:str='mean', # 'mean': error of all items in the test; 'worst': of the worst group
)->pd.DataFrame: # A row for each training: its errors, and the way that was taken
    "What a rule makes of each training"
    keys = ['part','situation','seed']
    runs = runs.drop_duplicates([*keys,'way'])
    errors,orders = (runs.pivot(index=keys, columns='way', values=o) for o in (measure,'order'))
    facts = runs[runs.way=='plain'].set_index(keys).reindex(errors.index)
    found = pd.DataFrame(dict(plain=errors.plain, refitted=errors[ways[0]], taken='plain', chosen=errors.plain))
    for way in reversed(ways):
        is_believed = (facts.ratio<median) & (facts.own<error) & (orders[way]>order)
        found['taken'] = found.taken.mask(is_believed, way)
        found['chosen'] = found.chosen.mask(is_believed, errors[way])
    found['says_yes'] = found.taken!='plain'
    found['best'] = errors[['plain',*ways]].min(axis=1)
    return found

def in_brief(found)->pd.Series:
    "What a rule amounts to: mean gains in error, and the worst cost in one training"
    gain = found.plain-found.chosen
    return pd.Series(dict(trainings=len(found), refitted=found.says_yes.mean(), gain=gain.mean(),
        possible=(found.plain-found.best).mean(), always=(found.plain-found.refitted).mean(),
        worst=max(0., -gain.min()), worst_always=max(0., (found.refitted-found.plain).max())))

def fitted_rule(runs, cost=.005): # Two thresholds
    "Those with the highest mean gain among those that never cost more, on some trainings"
    tried = [(median,order) for median in (.1,.15,.2,.25,.3,1/3,.4,.5) for order in (-1,.5,.6,.7,.8,.9)]
    told = {o: in_brief(by_rule(runs, *o)) for o in tried}
    allowed = {o: found for o,found in told.items() if found.worst<=cost}
    return max(allowed, key=lambda o: allowed[o].gain)

def halves(runs): # Two DataFrames
    "Situations in two halves, every other one"
    every = sorted(runs.situation.unique())
    return [runs[runs.situation.isin(every[i::2])] for i in (0,1)]

with_sampling = 'large','noisy' # parts in which one more training draws by early losses

@call_parse
def main(
    names:str, # Parts, with commas between
    seed:int=-1, # -1: all of them
):
    "Train what is not stored yet"
    torch.set_num_threads(1)
    for name in names.split(','):
        situations,seeds = part(name)
        for i in range(1 if scale()=='tiny' else seeds):
            if seed not in (-1, i): continue
            for situation in situations:
                keys = dict(part=name, situation=situation.name, seed=i)
                rows = once(path, keys, lambda: trained(situation, i, name in with_sampling).assign(**keys))
                by_way = rows.set_index('way')['mean'].round(3).to_dict()
                print(name, situation.name, i, by_way, flush=True)
