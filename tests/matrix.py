"What the matrix is made of: methods with an oracle each, tasks with a loss by hand each, other callbacks"
import math
from itertools import accumulate, pairwise
from typing import Callable, NamedTuple, Sequence

import pandas as pd
from fastai.callback.all import *
del test_overflow # noqa: F821 not a test of ours
from fastai.callback.tensorboard import TensorBoardCallback
from fastai.data.block import CategoryBlock
from fastai.data.core import DataLoaders
from fastai.losses import *
from fastai.tabular.all import Categorify, Normalize, TabularDataLoaders, tabular_learner
from fastai.text.data import Pad_Chunk, SortedDL, TensorText
from fastai.text.models.core import get_text_classifier
from fastai.text.models.awdlstm import AWD_LSTM, awd_lstm_clas_config
from helpers import *
from torch.nn import functional as F

N,BS,CLASSES = 56,16,3 # the last batch of an epoch has 8 items

# Losses by hand, of each item
WEIGHT = torch.tensor([.5,1.,2.])

def log_chances(pred): return torch.log_softmax(pred.double(), 1)

def nll(pred, y):
    known = y.clamp(0, CLASSES-1)
    return -log_chances(pred).gather(1, known[:,None])[:,0]

def ce(pred, y): return nll(pred, y.long().view(-1))

def weighted_ce(pred, y): return nll(pred, y)*WEIGHT[y]

def smooth_ce(pred, y): return .9*nll(pred, y)-.1*log_chances(pred).mean(1)

def focal(pred, y):
    loss = nll(pred, y)
    return (1-(-loss).exp())**2*loss

def bce(pred, y):
    pred = pred.double()
    yes,no = pred.sigmoid().log(),(-pred).sigmoid().log()
    return -(y*yes+(1-y)*no).mean(1)

def pixels(pred, y, weight=None):
    "The mean over the pixels that count"
    counts = y!=255
    of_pixel = 1 if weight is None else weight[y.clamp(0, CLASSES-1)]
    losses = (nll(pred, y)*of_pixel).where(counts, 0.)
    return losses.sum((1,2))/counts.sum((1,2)).clamp(min=1)

def weighted_pixels(pred, y): return pixels(pred, y, WEIGHT)

def dice(pred, y):
    chance = pred.double().softmax(1)
    truth = torch.stack([y==c for c in range(CLASSES)], 1).double()
    common,total = (chance*truth).sum((2,3)),(chance+truth).sum((2,3))
    return (1-(2*common+1e-6)/(total+1e-6)).mean(1)

def squared(pred, y): return (pred.double()-y).square().flatten(1).mean(1)

def absolute(pred, y): return (pred.double()-y).abs().flatten(1).mean(1)

# Losses that give one number
def scalar_ce(pred, y): return F.cross_entropy(pred, y)

def looped_ce(pred, y):
    is_sane = pred.sum().item()<1e30
    return F.cross_entropy(pred, y)*(1 if is_sane else 0)

def batch_rms(pred, y): return 2*(pred-y).square().mean().sqrt()

def of_item(pred, y): return (pred-y).square().flatten(1).mean(1)

# Items and models
def leaves(o):
    "The tensors of any structure"
    if isinstance(o, torch.Tensor): return [o]
    if isinstance(o, dict): return leaves([*o.values()])
    if isinstance(o, (tuple,list)): return [t for part in o for t in leaves(part)]
    return []

class Net(nn.Module):
    "Takes any batch apart: what of it is a float tensor goes in"
    def __init__(self, n_out=CLASSES, shape=()):
        super().__init__()
        self.net,self.shape = mlp(n_out),shape

    def forward(self, *xb):
        columns = [t.flatten(1) for t in leaves(xb) if t.is_floating_point()]
        out = self.net(torch.cat(columns, 1))
        return out.view(-1, *self.shape) if self.shape else out

class Generated:
    "Items of any structure"
    def __init__(self, item, n, offset): self.item,self.n,self.offset = item,n,offset

    def __len__(self): return self.n

    def __getitem__(self, i): return self.item(i+self.offset)

def splitter(model):
    params = list(model.parameters())
    return [params[:2], params[2:]]

def build(item, model, loss_func, **kwargs):
    "A learner of generated items; the model and the items are the same at each call"
    set_seed(0)
    dls = loaders_of(Generated(item, N, 0), Generated(item, BS, N), bs=BS)
    return learner_on(dls, model(), loss_func, splitter=splitter, lr=.02, **kwargs)

source = torch.Generator().manual_seed(0)
X = torch.randn(N+BS, 4, generator=source)
IMAGES = torch.rand(N+BS, 3, 6, 6, generator=source)
NOISY = X[:,0]+.7*torch.randn(N+BS, generator=source)
LABEL = (NOISY*2).round().long().clamp(-1, 1)+1
LABELS = (torch.rand(N+BS, CLASSES, generator=source)>.5).float()
VALUES = torch.randn(N+BS, CLASSES, generator=source)
MASKS = torch.randint(0, CLASSES, (N+BS, 6, 6), generator=source)
MASKS[::5,:2],MASKS[3] = 255,255
LENGTHS = torch.randint(3, 14, (N+BS,), generator=source).tolist()
TEXTS = [torch.randint(2, 20, (length,), generator=source) for length in LENGTHS]

def dense():
    conv = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()]
    return nn.Sequential(*conv, nn.Conv2d(4, CLASSES, 1))

# Learners of a task
def single(loss): return lambda **kwargs: build(lambda i: (X[i],LABEL[i]), Net, loss(), **kwargs)

def values(loss): return lambda **kwargs: build(lambda i: (X[i],VALUES[i]), Net, loss(), **kwargs)

def masks(loss): return lambda **kwargs: build(lambda i: (TensorImage(IMAGES[i]),MASKS[i]), dense, loss(), **kwargs)

def images(**kwargs):
    def item(i): return TensorImage(IMAGES[i]),TensorCategory(LABEL[i])
    return build(item, cnn, CrossEntropyLossFlat(), **kwargs)

def labels(**kwargs): return build(lambda i: (X[i],LABELS[i]), Net, BCEWithLogitsLossFlat(), **kwargs)

def points(**kwargs):
    def item(i): return X[i],VALUES[i,:2].repeat(2,1)
    return build(item, lambda: Net(4, (2,2)), MSELossFlat(), **kwargs)

def two_inputs(**kwargs):
    def item(i): return X[i,:1],X[i,1:],LABEL[i]
    return build(item, Net, CrossEntropyLossFlat(), **kwargs)

def dicts(**kwargs):
    def item(i): return dict(a=X[i,:2], b=X[i,2:]),LABEL[i]
    return build(item, Net, CrossEntropyLossFlat(), **kwargs)

def nested(**kwargs):
    def item(i): return (X[i,:1],dict(b=X[i,1:])),LABEL[i]
    return build(item, Net, CrossEntropyLossFlat(), **kwargs)

def tabular(**kwargs):
    set_seed(0)
    is_positive = (X[:,2]>0).int().tolist()
    df = pd.DataFrame(dict(a=X[:,0], b=X[:,1], c=is_positive, y=LABEL.tolist()))
    columns = dict(cat_names=['c'], cont_names=['a','b'], y_names='y', y_block=CategoryBlock())
    dls = TabularDataLoaders.from_df(df, procs=[Categorify, Normalize], valid_idx=list(range(N, N+BS)), bs=BS,
        drop_last=False, num_workers=0, **columns)
    training = dict(loss_func=CrossEntropyLossFlat(), splitter=splitter, lr=.02)
    return tabular_learner(dls, layers=[8], n_out=CLASSES, **training, **kwargs)

def text(**kwargs):
    set_seed(0)
    def loader(start, end):
        items = [(TensorText(TEXTS[i]),LABEL[i]) for i in range(start, end)]
        pad = Pad_Chunk(seq_len=5)
        return SortedDL(items, bs=BS, shuffle=not start, drop_last=False, num_workers=0, before_batch=pad)
    dls = DataLoaders(loader(0, N), loader(N, N+BS))

    config = dict(awd_lstm_clas_config, emb_sz=6, n_hid=8, n_layers=2)
    model = get_text_classifier(AWD_LSTM, 20, CLASSES, seq_len=5, config=config, max_len=15)
    cbs = [*L(kwargs.pop('cbs', None)), ModelResetter(), RNNCallback(), RNNRegularizer(alpha=2., beta=1.)]
    return learner_on(dls, model, splitter=splitter, lr=.02, cbs=cbs, **kwargs)

# How a task's learner is made, and its loss by hand
TASKS = dict(
    cross_entropy=(single(CrossEntropyLossFlat), ce),
    class_weights=(single(lambda: CrossEntropyLossFlat(weight=WEIGHT)), weighted_ce),
    label_smoothing=(single(LabelSmoothingCrossEntropyFlat), smooth_ce),
    focal=(single(FocalLossFlat), focal),
    function=(single(lambda: F.cross_entropy), ce),
    module=(single(lambda: nn.CrossEntropyLoss(label_smoothing=.1)), smooth_ce),
    one_number=(single(lambda: scalar_ce), ce),
    one_number_looped=(single(lambda: looped_ce), ce),
    images=(images, ce),
    multi_label=(labels, bce),
    segmentation=(masks(lambda: CrossEntropyLossFlat(axis=1, ignore_index=255)), pixels),
    weighted_pixels=(masks(lambda: nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=255)), weighted_pixels),
    dice=(masks(DiceLoss), dice),
    regression=(values(MSELossFlat), squared),
    absolute=(values(L1LossFlat), absolute),
    points=(points, squared),
    item_loss=(values(lambda: batch_rms), squared),
    tabular=(tabular, ce),
    text=(text, ce),
    two_inputs=(two_inputs, ce),
    dict=(dicts, ce),
    nested=(nested, ce))

# What a method should choose, in the papers' words
def at_least(n, multiple, most):
    "A count rounded up, unless all would be kept"
    rounded = math.ceil(n/multiple)*multiple
    return rounded if rounded<most else n

def hardest_first(scores): return sorted(range(len(scores)), key=lambda i: -scores[i])

def ones(rows):
    rows = sorted(rows)
    return rows,[1.]*len(rows)

def whole(batch): return [(key,1.) for key in batch['keys']]

def cdf(score, others):
    "The share of others that are smaller; of those that are equal half"
    return (sum(o<score for o in others)+sum(o<=score for o in others))/2/len(others)

class Oracle:
    "What a method should train in an epoch, step by step; items are known by a key each"
    gather = False

    def choose(self, scores, gen, multiple):
        "Row numbers and weights of the chosen items of a batch; not of a method that chooses before loading only"

    def steps(self, batches):
        "The keys and weights of the items of each step, and how many batches of the loader were read for it"
        if type(self).choose is Oracle.choose: return [(whole(batch),n) for n,batch in enumerate(batches, 1)]
        if self.gather: return self.gathered(batches)
        return [(self.chosen(batch),n) for n,batch in enumerate(batches, 1)]

    def chosen(self, batch):
        scores = batch['seen']
        rows,weights = self.choose(scores, batch['gen'], batch['multiple'])
        rows,weights = self.company(scores, rows, weights)
        return [(batch['keys'][i],w) for i,w in zip(rows, weights)]

    def company(self, scores, rows, weights):
        "Never one item alone"
        if len(rows)!=1 or len(scores)==1: return rows,weights
        other = next(i for i in hardest_first(scores) if i!=rows[0])
        return ones([rows[0], other])

    def gathered(self, batches):
        "Batch after batch is read until enough are chosen; at the end all that wait train"
        waiting,steps = [],[]
        for n,batch in enumerate(batches, 1):
            rows,weights = self.choose(batch['seen'], batch['gen'], 1)
            waiting += [(batch['keys'][i],w) for i,w in zip(rows, weights)]
            while len(waiting)>=BS:
                steps.append((waiting[:BS],n))
                waiting = waiting[BS:]

        has_just_trained = bool(steps) and steps[-1][1]==n
        if has_just_trained and not waiting: return steps
        return [*steps, (self.topped_up(waiting, batch, rows),n)]

    def topped_up(self, waiting, batch, rows):
        "What waits, with the hardest others of the last batch"
        others = [i for i in hardest_first(batch['seen']) if i not in rows]
        items = waiting+[(batch['keys'][i],1.) for i in sorted(others[:BS-len(waiting)])]
        if len(items)>1: return items
        alone = items[0][0]
        return [(alone,2.), (batch['keys'][0],0.)]

class LossShare(Oracle):
    "The smallest set of hardest items whose losses add up to 70 %"
    def choose(self, scores, gen, multiple):
        order,wanted = hardest_first(scores),.7*sum(scores)*(1-1e-6)
        total,n = 0.,0
        while total<wanted:
            total += scores[order[n]]
            n += 1
        return ones(order[:at_least(n, multiple, len(order))])

class GatheredLossShare(LossShare): gather = True

class Cdf(Oracle):
    "Each item with probability CDF(loss)^1 over the last 20 losses, gathered"
    gather = True

    def __init__(self): self.history = []

    def choose(self, scores, gen, multiple):
        self.history = (self.history+scores)[-20:]
        u = torch.rand(len(scores), generator=gen).tolist()
        return ones(i for i,score in enumerate(scores) if u[i]<cdf(score, self.history))

class ByRank(Oracle):
    "Half of the items, drawn without replacement with weights that grow with the rank (Efraimidis and Spirakis)"
    def choose(self, scores, gen, multiple):
        n = len(scores)
        u = torch.rand(n, generator=gen).double().tolist()
        easiest_first = sorted(range(n), key=lambda i: scores[i])
        key = {i: u[i]**(1/((rank+.5)/n)) for rank,i in enumerate(easiest_first)}
        largest_first = sorted(range(n), key=lambda i: -key[i])
        return ones(largest_first[:at_least(n//2, multiple, n)])

class Top(Oracle):
    "The hardest 40 %"
    def choose(self, scores, gen, multiple):
        n = len(scores)
        return ones(hardest_first(scores)[:at_least(int(n*.4), multiple, n)])

class Tails(Oracle):
    "The hardest 30 % and the easiest 20 %; what is rounded up comes from the hardest"
    def choose(self, scores, gen, multiple):
        n,order = len(scores),hardest_first(scores)
        top,bottom = int(n*.3),int(n*.2)
        more = at_least(top+bottom, multiple, n)-top-bottom
        return ones(order[:top+more]+order[n-bottom:])

class Half(Oracle):
    "A random half; the scores of a method that scores nothing are drawn first"
    def choose(self, scores, gen, multiple):
        n = len(scores)
        torch.rand(n, generator=gen)
        u = torch.rand(n, generator=gen).tolist()
        return ones(sorted(range(n), key=lambda i: u[i])[:at_least(n//2, multiple, n)])

class GatheredHalf(Half): gather = True

class HalfBefore(Oracle):
    "A random half of an epoch's items"
    def load(self, losses, everything, gen):
        n = len(losses)
        u = torch.rand(n, generator=gen).tolist()
        return ones(sorted(range(n), key=lambda i: u[i])[:n//2])

class ByChance(Oracle):
    "Each item with a probability by its loss; what was never seen is loaded"
    correct = 0.

    def load(self, losses, everything, gen):
        known,n = [loss for loss in losses if loss is not None],len(losses)
        chances = [1. if loss is None else self.chance(loss, known) for loss in losses]
        rows = self.passing(chances, gen)
        weights = [chances[i]**-self.correct if i in rows else 1. for i in range(n)]

        if len(rows)%BS==1 and len(rows)<n: # another one comes along
            u = torch.rand(n, generator=gen).tolist()
            others = {*range(n)}-{*rows}
            rows.append(max(others, key=lambda i: u[i]))
        return sorted(rows),[weights[i] for i in sorted(rows)]

    def passing(self, chances, gen):
        "In a random order, those with which the sum of the probabilities passes a whole number"
        order = torch.randperm(len(chances), generator=gen).tolist()
        total,rows = torch.rand(1, generator=gen).item(),[]
        for i in order:
            before,total = total,total+chances[i]
            if math.floor(before)<math.floor(total): rows.append(i)
        return rows

class Pruned(ByChance):
    "Half of the items below the mean loss are left out, and the others of them have weight 2"
    correct = 1.

    def chance(self, loss, known):
        mean = sum(known)/len(known)
        return .5 if loss<mean else 1.

class Favored(ByChance):
    "CDF(loss)"
    def chance(self, loss, known): return cdf(loss, known)

class Thinned(Favored):
    "Of the easiest half a quarter"
    def chance(self, loss, known): return .25 if super().chance(loss, known)<.5 else 1.

class Prioritized(Oracle):
    "Every other position has its own item, the first one's is drawn by the square root of its loss"
    def load(self, losses, everything, gen):
        n = len(losses)
        hardest = max((loss for loss in losses if loss is not None), default=1.) # as what was never seen counts
        roots = [(hardest if loss is None else loss)**.5 for loss in losses]
        sums = list(accumulate(roots, initial=0.))
        chances = [(high-low)/sums[-1] for low,high in pairwise(sums)]

        rows = list(range(n))
        u = torch.rand(n//2, generator=gen, dtype=torch.float64).tolist()
        for position,drawn in zip(rows[::2], u): rows[position] = sum(s<=drawn*sums[-1] for s in sums[1:])
        return rows,[1/(n*(.5/n+.5*chances[i])) for i in rows]

class Balanced(Oracle):
    "All items are of one class, in which each is drawn by the square root of its loss"
    def load(self, losses, everything, gen):
        known = [loss for loss in losses if loss is not None]
        mean = sum(known)/len(known) if known else 1. # as what was never seen counts
        sums = [*accumulate((mean if loss is None else loss)**.5 for loss in losses)]
        u = torch.rand(len(losses), generator=gen, dtype=torch.float64).tolist()
        return [sum(s<=drawn*sums[-1] for s in sums) for drawn in u],[1.]*len(losses)

class Stale(Cdf, Favored):
    "Epoch 0, 2, ... score all items; in the others stored losses choose which are loaded"
    def steps(self, batches):
        self.history = []
        return super().steps(batches)

class Importance(Oracle):
    "After the first batch of all, of two batches one; of an epoch's last items as many as there are"
    began = False

    def steps(self, batches):
        steps = [] if self.began else [(whole(batches[0]),1)]
        self.began = True
        for n in range(len(steps), len(batches), 2):
            pair = batches[n:n+2]
            steps.append((self.drawn(pair), n+len(pair)))
        return steps

    def drawn(self, batches):
        "In proportion to the loss, weighted by 1/(n p)"
        keys = [key for batch in batches for key in batch['keys']]
        scores = torch.tensor([score for batch in batches for score in batch['seen']])
        n = len(scores)
        can_be_shares = scores.sum()>0 and (scores>=0).all()
        chances = scores/scores.sum() if can_be_shares else torch.full_like(scores, 1/n)

        rows = torch.multinomial(chances, min(BS, n), replacement=True, generator=batches[-1]['gen']).tolist()
        return [(keys[i], float(1/(n*chances[i]))) for i in sorted(rows)]

def in_batches(oracle):
    "The same method where items can't wait for other batches"
    oracle.gather = False
    if isinstance(oracle, Cdf): oracle.choose = ByRank().choose
    return oracle

# How a method is made, and its oracle
WITH_ORACLE = dict(
    batch_loss_filter=(partial(BatchLossFilterCallback, .7), LossShare),
    gathered_filter=(partial(BatchLossFilterCallback, .7, gather=True), GatheredLossShare),
    selective_backprop=(partial(SelectiveBackpropCallback, beta=1, hist_size=20), Cdf),
    composer=(partial(SelectiveBackpropCallback, beta=1, gather=False), ByRank),
    stale_loss=(partial(StaleLossCallback, beta=1, n=2, hist_size=20), Stale),
    top_loss=(partial(TopLossCallback, .4), Top),
    tails=(partial(TopLossCallback, .3, also_bottom=.2), Tails),
    random_subset=(partial(RandomSubsetCallback, .5), Half),
    gathered_random=(partial(RandomSubsetCallback, .5, gather=True), GatheredHalf),
    random_before=(partial(RandomSubsetCallback, .5, before_loading=True), HalfBefore),
    importance_sampling=(partial(ImportanceSamplingCallback, presample=2, tau=.01, score='loss'), Importance),
    info_batch=(partial(InfoBatchCallback, prune=.5, delta=1.), Pruned),
    favor_hard=(partial(FavorHardCallback, beta=1.), Favored),
    drop_easy=(partial(DropEasyCallback, .5, .75), Thinned),
    prioritized_sampling=(partial(PrioritizedSamplingCallback, correct=1.), Prioritized),
    balanced_sampling=(partial(BalancedSamplingCallback, [0]*N, alpha=.5), Balanced))

def with_all(cases, classes):
    "The methods of the matrix; of those that have no oracle the defaults, of which is known what every method keeps to"
    covered = {type(make()) for make,_ in cases.values()}
    return cases | {one_liner(cls): (cls,None) for cls in classes if cls not in covered}

METHODS = with_all(WITH_ORACLE, methods())

# Which way a method's items take, as in `PATHS`
OF_PATH = dict(
    epoch=('favor_hard','drop_easy','random_before','seta'),
    weighted_epoch=('info_batch',),
    drawn_epoch=('prioritized_sampling','balanced_sampling','early_loss_sampling'),
    batch=('batch_loss_filter','composer','top_loss','tails','random_subset'),
    gathered=('gathered_filter','selective_backprop','stale_loss','gathered_random'),
    weighted_batch=('importance_sampling',))
PATH_OF = {method: path for path,ways in OF_PATH.items() for method in ways}

# Other callbacks
def fits(n, **kwargs): return lambda learn: learn.fit(n, **kwargs)

FIT2,FIT3 = fits(2),fits(3)

class Company(NamedTuple):
    "What trains beside a method"
    before:Sequence = () # What makes the callbacks that are attached before ours
    after:Sequence = () # And after
    fit:Callable = FIT2
    takes:Callable = lambda task: True # Can a task be trained so?

OF_CLASSES = 'cross_entropy','class_weights','label_smoothing','focal','images','multi_label'
OF_NUMBERS = 'regression','absolute','points'

def mixes(task): return task in (*OF_CLASSES,*OF_NUMBERS)

def pictures(task): return task in ('images','segmentation','weighted_pixels','dice')

def one_label(task): return task=='images'

mixup,cutmix = partial(MixUp, .4),partial(CutMix, 1.)

OTHERS = dict(
    none=Company(fit=FIT3),
    mixup_first=Company(before=[mixup], takes=mixes),
    mixup_last=Company(after=[mixup], takes=mixes),
    cutmix=Company(before=[cutmix], takes=one_label),
    cutmix_last=Company(after=[cutmix], takes=one_label),
    mixed_precision=Company(before=[CPUMixedPrecision]),
    mixed_precision_last=Company(after=[CPUMixedPrecision]),
    accumulation=Company(before=[partial(GradientAccumulation, 24)]),
    clip=Company(after=[partial(GradientClip, .1)]),
    channels_last=Company(before=[ChannelsLast], takes=pictures),
    bn_freeze=Company(before=[BnFreeze]),
    early_stopping=Company(before=[partial(EarlyStoppingCallback, min_delta=1e9, patience=1)], fit=FIT3),
    save_model=Company(before=[SaveModelCallback]),
    reduce_lr=Company(before=[partial(ReduceLROnPlateau, min_delta=1e9, patience=0)], fit=FIT3),
    csv_logger=Company(before=[CSVLogger]),
    tensorboard=Company(before=[partial(TensorBoardCallback, 'runs', trace_model=False, log_preds=False)]),
    one_cycle=Company(fit=lambda learn: learn.fit_one_cycle(2)),
    fine_tune=Company(fit=lambda learn: learn.fine_tune(2)),
    start_epoch=Company(fit=fits(3, start_epoch=1)))

REFUSED = {('importance_sampling','text')} # it scores batches together, and texts are padded batch by batch

def cases():
    "Every method with every task and every callback that the task can take"
    for task in TASKS:
        for other,company in OTHERS.items():
            if not company.takes(task): continue
            yield from ((method,task,other) for method in METHODS if (method,task) not in REFUSED)
