"What the matrix is made of: methods with an oracle each, tasks with a loss by hand each, other callbacks"
import contextlib, io, math

import pandas as pd
from fastai.callback.all import *
del test_overflow # not a test of ours
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

# Tasks
WEIGHT = torch.tensor([.5,1.,2.])

def nll(pred, y): return -torch.log_softmax(pred.double(), 1).gather(1, y.clamp(0, CLASSES-1)[:,None])[:,0]
def ce(pred, y): return nll(pred, y.long().view(-1))
def weighted_ce(pred, y): return nll(pred, y)*WEIGHT[y]
def smooth_ce(pred, y): return .9*nll(pred, y)-.1*torch.log_softmax(pred.double(), 1).mean(1)
def focal(pred, y): return (1-(-nll(pred, y)).exp())**2*nll(pred, y)
def bce(pred, y): return -(y*pred.double().sigmoid().log()+(1-y)*(-pred.double()).sigmoid().log()).mean(1)
def pixels(pred, y, w=None):
    counts = y!=255
    losses = (nll(pred, y)*(1 if w is None else w[y.clamp(0, CLASSES-1)])).where(counts, 0.)
    return losses.sum((1,2))/counts.sum((1,2)).clamp(min=1)
def weighted_pixels(pred, y): return pixels(pred, y, WEIGHT)
def dice(pred, y):
    p,t = pred.double().softmax(1),torch.stack([y==c for c in range(CLASSES)], 1).double()
    return (1-(2*(p*t).sum((2,3))+1e-6)/((p+t).sum((2,3))+1e-6)).mean(1)
def squared(pred, y): return (pred.double()-y).square().flatten(1).mean(1)
def absolute(pred, y): return (pred.double()-y).abs().flatten(1).mean(1)

def scalar_ce(pred, y): return F.cross_entropy(pred, y)
def looped_ce(pred, y): return F.cross_entropy(pred, y)*(1 if pred.sum().item()<1e30 else 0)
def batch_rms(pred, y): return 2*(pred-y).square().mean().sqrt()
def of_item(pred, y): return (pred-y).square().flatten(1).mean(1)

class Net(nn.Module):
    "Takes any batch apart: what of it is a float tensor goes in"
    def __init__(self, n_out=CLASSES, shape=()): super().__init__(); self.net,self.shape = mlp(n_out),shape
    def forward(self, *xb):
        def leaves(o): return [o] if isinstance(o, torch.Tensor) else sum(map(leaves, o.values() if isinstance(o, dict) else o), [])
        out = self.net(torch.cat([t.flatten(1) for t in leaves(xb) if t.is_floating_point()], 1))
        return out.view(-1, *self.shape) if self.shape else out

class Generated:
    "Items of any structure"
    def __init__(self, f, n, offset): self.f,self.n,self.offset = f,n,offset
    def __len__(self): return self.n
    def __getitem__(self, i): return self.f(i+self.offset)

def splitter(model):
    ps = list(model.parameters())
    return [ps[:2], ps[2:]]

def build(item, model, loss_func, **kwargs):
    "A learner of generated items; the model and the items are the same at each call"
    set_seed(0)
    dls = DataLoaders(*[TfmdDL(Generated(item, n, o), bs=BS, shuffle=not o, drop_last=False, num_workers=0) for n,o in ((N,0), (BS,N))])
    return Learner(dls, model(), loss_func=loss_func, splitter=splitter, lr=.02, **kwargs)

g = torch.Generator().manual_seed(0)
X,IMAGES = torch.randn(N+BS, 4, generator=g),torch.rand(N+BS, 3, 6, 6, generator=g)
LABEL = ((X[:,0]+.7*torch.randn(N+BS, generator=g))*2).round().long().clamp(-1, 1)+1
LABELS,VALUES = (torch.rand(N+BS, CLASSES, generator=g)>.5).float(),torch.randn(N+BS, CLASSES, generator=g)
MASKS = torch.randint(0, CLASSES, (N+BS, 6, 6), generator=g)
MASKS[::5,:2],MASKS[3] = 255,255
TEXTS = [torch.randint(2, 20, (int(k),), generator=g) for k in torch.randint(3, 14, (N+BS,), generator=g)]

def cnn(): return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES))
def dense(): return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, CLASSES, 1))
def single(loss): return lambda **kwargs: build(lambda i: (X[i],LABEL[i]), Net, loss(), **kwargs)
def values(loss): return lambda **kwargs: build(lambda i: (X[i],VALUES[i]), Net, loss(), **kwargs)
def masks(loss): return lambda **kwargs: build(lambda i: (TensorImage(IMAGES[i]),MASKS[i]), dense, loss(), **kwargs)
def images(**kwargs): return build(lambda i: (TensorImage(IMAGES[i]),TensorCategory(LABEL[i])), cnn, CrossEntropyLossFlat(), **kwargs)
def labels(**kwargs): return build(lambda i: (X[i],LABELS[i]), Net, BCEWithLogitsLossFlat(), **kwargs)
def points(**kwargs): return build(lambda i: (X[i],VALUES[i,:2].repeat(2,1)), lambda: Net(4, (2,2)), MSELossFlat(), **kwargs)
def two_inputs(**kwargs): return build(lambda i: (X[i,:1],X[i,1:],LABEL[i]), Net, CrossEntropyLossFlat(), **kwargs)
def dicts(**kwargs): return build(lambda i: (dict(a=X[i,:2], b=X[i,2:]),LABEL[i]), Net, CrossEntropyLossFlat(), **kwargs)
def nested(**kwargs): return build(lambda i: ((X[i,:1],dict(b=X[i,1:])),LABEL[i]), Net, CrossEntropyLossFlat(), **kwargs)

def tabular(**kwargs):
    set_seed(0)
    df = pd.DataFrame(dict(a=X[:,0], b=X[:,1], c=(X[:,2]>0).int().tolist(), y=LABEL.tolist()))
    dls = TabularDataLoaders.from_df(df, procs=[Categorify, Normalize], cat_names=['c'], cont_names=['a','b'], y_names='y', y_block=CategoryBlock(),
        valid_idx=list(range(N, N+BS)), bs=BS, drop_last=False, num_workers=0)
    return tabular_learner(dls, layers=[8], n_out=CLASSES, loss_func=CrossEntropyLossFlat(), splitter=splitter, lr=.02, **kwargs)

def text(**kwargs):
    set_seed(0)
    def texts(a, b): return [(TensorText(TEXTS[i]),LABEL[i]) for i in range(a, b)]
    dls = DataLoaders(*[SortedDL(texts(a, b), bs=BS, shuffle=not a, drop_last=False, num_workers=0, before_batch=Pad_Chunk(seq_len=5))
        for a,b in ((0,N), (N,N+BS))])
    config = dict(awd_lstm_clas_config, emb_sz=6, n_hid=8, n_layers=2)
    model = get_text_classifier(AWD_LSTM, 20, CLASSES, seq_len=5, config=config, max_len=15)
    cbs = [*L(kwargs.pop('cbs', None)), ModelResetter(), RNNCallback(), RNNRegularizer(alpha=2., beta=1.)]
    return Learner(dls, model, loss_func=CrossEntropyLossFlat(), splitter=splitter, lr=.02, cbs=cbs, **kwargs)

TASKS = dict(cross_entropy=(single(CrossEntropyLossFlat), ce), class_weights=(single(lambda: CrossEntropyLossFlat(weight=WEIGHT)), weighted_ce),
    label_smoothing=(single(LabelSmoothingCrossEntropyFlat), smooth_ce), focal=(single(FocalLossFlat), focal), function=(single(lambda: F.cross_entropy), ce),
    module=(single(lambda: nn.CrossEntropyLoss(label_smoothing=.1)), smooth_ce), one_number=(single(lambda: scalar_ce), ce), one_number_looped=(single(lambda: looped_ce), ce),
    images=(images, ce), multi_label=(labels, bce), segmentation=(masks(lambda: CrossEntropyLossFlat(axis=1, ignore_index=255)), pixels),
    weighted_pixels=(masks(lambda: nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=255)), weighted_pixels), dice=(masks(DiceLoss), dice),
    regression=(values(MSELossFlat), squared), absolute=(values(L1LossFlat), absolute), points=(points, squared), item_loss=(values(lambda: batch_rms), squared),
    tabular=(tabular, ce), text=(text, ce), two_inputs=(two_inputs, ce), dict=(dicts, ce), nested=(nested, ce))

# Methods: how they are made, and what they should choose, in the papers' words
def at_least(n, multiple, most): return min(math.ceil(n/multiple)*multiple, most)
def hardest_first(scores): return sorted(range(len(scores)), key=lambda i: -scores[i])
def ones(rows):
    rows = sorted(rows)
    return rows,[1.]*len(rows)

class Oracle:
    "What a method should train in an epoch, step by step; items are known by a key each"
    gather = False
    def choose(self, scores, gen, multiple): "Row numbers and weights of the chosen items of a batch; not of a method that chooses before loading only"

    def steps(self, batches):
        "The keys and weights of the items of each step, and how many batches of the loader were read for it"
        if type(self).choose is Oracle.choose: return [([(k,1.) for k in b['keys']],i) for i,b in enumerate(batches, 1)]
        if self.gather: return self.gathered(batches)
        def chosen(b): return [(b['keys'][i],w) for i,w in zip(*self.company(b['seen'], *self.choose(b['seen'], b['gen'], b['multiple'])))]
        return [(chosen(b),i) for i,b in enumerate(batches, 1)]

    def company(self, scores, rows, weights):
        "Never one item alone"
        if len(rows)!=1 or len(scores)==1: return rows,weights
        return ones([rows[0], next(i for i in hardest_first(scores) if i!=rows[0])])

    def gathered(self, batches):
        "Batch after batch is read until enough are chosen; at the end all that wait train, with the hardest others of the last batch"
        pool,steps = [],[]
        for n,b in enumerate(batches, 1):
            rows,weights = self.choose(b['seen'], b['gen'], 1)
            pool += [(b['keys'][i],w) for i,w in zip(rows, weights)]
            while len(pool)>=BS:
                steps.append((pool[:BS],n))
                pool = pool[BS:]
        if not pool and steps and steps[-1][1]==n: return steps
        others = [i for i in hardest_first(b['seen']) if i not in rows][:BS-len(pool)]
        pool += [(b['keys'][i],1.) for i in sorted(others)]
        if len(pool)==1: pool = [(pool[0][0],2.), (b['keys'][0],0.)]
        return [*steps, (pool,n)]

class LossShare(Oracle):
    "The smallest set of hardest items whose losses add up to 70 %"
    def choose(self, scores, gen, multiple):
        order,total,k = hardest_first(scores),0.,0
        while total<.7*sum(scores)*(1-1e-6): total,k = total+scores[order[k]],k+1
        return ones(order[:at_least(k, multiple, len(order))])

class GatheredLossShare(LossShare): gather = True

class Cdf(Oracle):
    "Each item with probability CDF(loss)^1 over the last 20 losses, gathered"
    gather = True
    def __init__(self): self.history = []
    def choose(self, scores, gen, multiple):
        self.history = (self.history+scores)[-20:]
        return ones(self.draw(scores, self.history, gen))
    def draw(self, scores, history, gen):
        u = torch.rand(len(scores), generator=gen).tolist()
        cdf = [(sum(h<s for h in history)+sum(h<=s for h in history))/2/len(history) for s in scores]
        return [i for i in range(len(scores)) if u[i]<cdf[i]]

class ByRank(Oracle):
    "Half of the items, drawn without replacement with weights that grow with the rank (Efraimidis and Spirakis)"
    def choose(self, scores, gen, multiple):
        n,u = len(scores),torch.rand(len(scores), generator=gen).double().tolist()
        rank = {i: r for r,i in enumerate(sorted(range(n), key=lambda i: scores[i]))}
        keys = [u[i]**(1/((rank[i]+.5)/n)) for i in range(n)]
        return ones(sorted(range(n), key=lambda i: -keys[i])[:at_least(n//2, multiple, n)])

class Top(Oracle):
    "The hardest 40 %"
    def choose(self, scores, gen, multiple): return ones(hardest_first(scores)[:at_least(int(len(scores)*.4), multiple, len(scores))])

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
        torch.rand(len(scores), generator=gen)
        u = torch.rand(len(scores), generator=gen).tolist()
        return ones(sorted(range(len(u)), key=lambda i: u[i])[:at_least(len(u)//2, multiple, len(u))])

class GatheredHalf(Half): gather = True

class HalfBefore(Oracle):
    "A random half of an epoch's items"
    def load(self, losses, everything, gen):
        u = torch.rand(len(losses), generator=gen).tolist()
        return ones(sorted(range(len(u)), key=lambda i: u[i])[:len(u)//2])

class ByChance(Oracle):
    "Each item with a probability by its loss, what was never seen is loaded: in a random order, whenever the sum of the probabilities passes a whole number"
    correct = 0.
    def load(self, losses, everything, gen):
        known,n = [l for l in losses if l is not None],len(losses)
        p = [1. if l is None else self.chance(l, known) for l in losses]
        order,total,rows = torch.randperm(n, generator=gen).tolist(),torch.rand(1, generator=gen).item(),[]
        for i in order:
            if math.floor(total)<math.floor(total := total+p[i]): rows.append(i)
        weights = [p[i]**-self.correct if i in rows else 1. for i in range(n)]
        if len(rows)%BS==1 and len(rows)<n: # another one comes along
            u = torch.rand(n, generator=gen).tolist()
            rows.append(max({*range(n)}-{*rows}, key=lambda i: u[i]))
        return sorted(rows),[weights[i] for i in sorted(rows)]

class Pruned(ByChance):
    "Half of the items below the mean loss are left out, and the others of them have weight 2"
    correct = 1.
    def chance(self, l, known): return .5 if l<sum(known)/len(known) else 1.

class Favored(ByChance):
    "CDF(loss)"
    def chance(self, l, known): return (sum(o<l for o in known)+sum(o<=l for o in known))/2/len(known)

class Thinned(Favored):
    "Of the easiest half a quarter"
    def chance(self, l, known): return .25 if super().chance(l, known)<.5 else 1.

class Prioritized(Oracle):
    "Every other position has its own item, the first one's is drawn by the square root of its loss; what was never seen counts as the hardest"
    def load(self, losses, everything, gen):
        hardest,n = max((l for l in losses if l is not None), default=1.),len(losses)
        sums,rows = [0.],list(range(n))
        for l in losses: sums.append(sums[-1]+(hardest if l is None else l)**.5)
        p = [(b-a)/sums[-1] for a,b in zip(sums, sums[1:])]
        for j,u in zip(rows[::2], torch.rand(n//2, generator=gen, dtype=torch.float64).tolist()): rows[j] = sum(s<=u*sums[-1] for s in sums[1:])
        return rows,[1/(n*(.5/n+.5*p[i])) for i in rows]

class Stale(Cdf, Favored):
    "Epoch 0, 2, ... score all items; in the others stored losses choose which are loaded"
    def steps(self, batches):
        self.history = []
        return super().steps(batches)

class Importance(Oracle):
    "After the first batch of all, of two batches one in proportion to the loss, weighted by 1/(n p); of an epoch's last items as many as there are"
    began = False
    def steps(self, batches):
        steps,first = [],[] if self.began else [([(k,1.) for k in batches[0]['keys']],1)]
        for n in range(len(first), len(batches), 2):
            items,gen = [o for b in batches[n:n+2] for o in zip(b['keys'], b['seen'])],batches[n:n+2][-1]['gen']
            s = torch.tensor([s for _,s in items])
            p = s/s.sum() if s.sum()>0 and (s>=0).all() else torch.full_like(s, 1/len(s))
            drawn = sorted(torch.multinomial(p, min(BS, len(s)), replacement=True, generator=gen).tolist())
            steps.append(([(items[i][0], float(1/(len(s)*p[i]))) for i in drawn], min(n+2, len(batches))))
        self.began = True
        return first+steps

def in_batches(oracle):
    "The same method where items can't wait for other batches"
    oracle.gather = False
    if isinstance(oracle, Cdf): oracle.choose = ByRank().choose
    return oracle

METHODS = dict(
    batch_loss_filter=(lambda **k: BatchLossFilterCallback(.7, **k), LossShare),
    gathered_filter=(lambda **k: BatchLossFilterCallback(.7, gather=True, **k), GatheredLossShare),
    selective_backprop=(lambda **k: SelectiveBackpropCallback(beta=1, hist_size=20, **k), Cdf), composer=(lambda **k: SelectiveBackpropCallback(beta=1, gather=False, **k), ByRank),
    stale_loss=(lambda **k: StaleLossCallback(beta=1, n=2, hist_size=20, **k), Stale), top_loss=(lambda **k: TopLossCallback(.4, **k), Top),
    tails=(lambda **k: TopLossCallback(.3, also_bottom=.2, **k), Tails), random_subset=(lambda **k: RandomSubsetCallback(.5, **k), Half),
    gathered_random=(lambda **k: RandomSubsetCallback(.5, gather=True, **k), GatheredHalf),
    random_before=(lambda **k: RandomSubsetCallback(.5, before_loading=True, **k), HalfBefore),
    importance_sampling=(lambda **k: ImportanceSamplingCallback(presample=2, tau=.01, score='loss', **k), Importance),
    info_batch=(lambda **k: InfoBatchCallback(prune=.5, delta=1., **k), Pruned), favor_hard=(lambda **k: FavorHardCallback(beta=1., **k), Favored),
    drop_easy=(lambda **k: DropEasyCallback(.5, .75, **k), Thinned), prioritized_sampling=(lambda **k: PrioritizedSamplingCallback(correct=1., **k), Prioritized))

def with_all(cases, classes):
    "The methods of the matrix; of those that have no oracle the defaults, of which is known what every method keeps to"
    covered = {type(make()) for make,_ in cases.values()}
    return cases | {one_liner(c): (c, None) for c in classes if c not in covered}

METHODS = with_all(METHODS, methods())

# Other callbacks: what is attached before ours, what after, and how the fit is called
def fits(n, **kwargs): return lambda learn: learn.fit(n, **kwargs)
FIT2,FIT3 = fits(2),fits(3)
def mixes(task): return task in ('cross_entropy','class_weights','label_smoothing','focal','images','multi_label','regression','absolute','points','tabular','two_inputs')
def pictures(task): return task in ('images','segmentation','weighted_pixels','dice')
OTHERS = dict(
    none=([], [], FIT3), mixup_first=([lambda: MixUp(.4)], [], FIT2, lambda t: mixes(t) and t!='two_inputs' and t!='tabular'), mixup_last=([], [lambda: MixUp(.4)], FIT2, lambda t: mixes(t) and t not in ('two_inputs','tabular')),
    cutmix=([lambda: CutMix(1.)], [], FIT2, lambda t: t=='images'), cutmix_last=([], [lambda: CutMix(1.)], FIT2, lambda t: t=='images'),
    mixed_precision=([CPUMixedPrecision], [], FIT2), mixed_precision_last=([], [CPUMixedPrecision], FIT2), accumulation=([lambda: GradientAccumulation(24)], [], FIT2),
    clip=([], [lambda: GradientClip(.1)], FIT2), channels_last=([ChannelsLast], [], FIT2, pictures), bn_freeze=([BnFreeze], [], FIT2),
    early_stopping=([lambda: EarlyStoppingCallback(min_delta=1e9, patience=1)], [], FIT3), save_model=([SaveModelCallback], [], FIT2),
    reduce_lr=([lambda: ReduceLROnPlateau(min_delta=1e9, patience=0)], [], FIT3), csv_logger=([CSVLogger], [], FIT2),
    tensorboard=([lambda: TensorBoardCallback('runs', trace_model=False, log_preds=False)], [], FIT2),
    one_cycle=([], [], lambda learn: learn.fit_one_cycle(2)), fine_tune=([], [], lambda learn: learn.fine_tune(2)), start_epoch=([], [], fits(3, start_epoch=1)))

def cases():
    "Every method with every task and every callback that the task can take"
    for task in TASKS:
        for other,(_,_,_,*takes) in OTHERS.items():
            if not takes or takes[0](task): yield from ((method, task, other) for method in METHODS if (method, task)!=('importance_sampling', 'text')) # refused
