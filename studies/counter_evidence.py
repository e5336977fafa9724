"""Claims of 'lossless' pruning, beside plain training that ends at the same cost: `python -m studies.counter_evidence
PART` trains what is not stored of a part: results/counter_evidence.csv, results/batch_loss_score.csv"""
import pandas as pd, torch
from fastai.callback.core import Callback
from fastai.callback.schedule import ParamScheduler
from fastai.torch_core import set_seed
from fastcore.script import call_parse
from torch.nn import functional as F

from selback.all import Chosen, EpochMethod, EpochSelection
from selback.bench.compare import compare, machine, schedule
from selback.core.policies import include, mean_inclusion
from studies.easy_data import Cell
from studies.experiments import once, results_folder, scale

path = results_folder/'counter_evidence.csv'
scores_path = results_folder/'batch_loss_score.csv'

# OrderDP (Jin et al. 2026), as its code has it: of a random part, those of the highest stored losses

drawn,kept = .75,.85 # as its `cifar/orderDP/orderDP.py` has them
order_dp_share = drawn*kept

class OrderDP(EpochMethod):
    "Load the hardest share, by stored loss, of a random part of the items"
    def choose(self, scores, now):
        part = torch.randperm(len(scores), generator=now.generator)[:int(drawn*len(scores))]
        hardest = scores[part].nan_to_num(torch.inf).topk(int(kept*len(part))).indices
        return Chosen(part[hardest].sort().values)

class RandomShare(EpochMethod):
    "Load a random share of the items, another one in each epoch"
    def __init__(self,
        share=order_dp_share, # Of the items
        **kwargs
    ):
        super().__init__(**kwargs)
        self.share = share

    def choose(self, scores, now):
        part = torch.randperm(len(scores), generator=now.generator)[:int(self.share*len(scores))]
        return Chosen(part.sort().values)

# BLS (Zhou et al. 2026): an item's score is an average of the losses of the batches that it was in

alpha = .7 # weight of the past, as its README has it

def bound(
    bs:int=128, # Items in a batch
    alpha:float=alpha, # Weight of the past
)->float:
    "The highest correlation of such a score with the items' losses, where nothing changes and all are seen alike"
    n = (1+alpha)/(1-alpha) # batches that the average is worth
    return (n/(n+bs))**.5

class Pruned(EpochMethod):
    "InfoBatch's rule without its weights: half of the items with a score below the mean are left out"
    def __init__(self,
        by='own loss', # The score: one of `scores_of`
        prune=.5, # Share of those below the mean that is left out; 0: none
        **kwargs
    ):
        super().__init__(**kwargs)
        self.by,self.prune = by,prune
        self.n_steps = 0
        self.batch_loss = self.own_loss = None

    def note(self, idx, losses, n_items):
        "A batch has trained"
        if self.batch_loss is None:
            self.batch_loss,self.own_loss,self.count,self.last = (torch.zeros(n_items) for _ in range(4))
        for scores,new in (self.batch_loss,losses.mean()),(self.own_loss,losses):
            scores[idx] = alpha*scores[idx]+(1-alpha)*new
        self.n_steps += 1
        self.count[idx] += 1
        self.last[idx] = self.n_steps

    def choose(self, scores, now):
        if not self.prune: return
        own = scores_of[self.by](self, scores)
        return include(own, lambda known: mean_inclusion(known, self.prune), generator=now.generator)

scores_of = {
    'own loss': lambda self, scores: scores,
    'batch loss': lambda self, scores: self.batch_loss, # BLS
    'seen often': lambda self, scores: self.count+torch.rand(len(scores)), # by chance among those seen as often
    'seen lately': lambda self, scores: self.last,
    'seen long ago': lambda self, scores: -self.last,
    'chance': lambda self, scores: torch.rand(len(scores))}

class NoteBatches(Callback):
    "Tell a `Pruned` which items have trained, and with which losses"
    run_valid = False
    def after_loss(self):
        method = getattr(self.learn.selection, 'method', None)
        if not isinstance(method, Pruned): return
        losses = F.cross_entropy(self.pred.detach(), self.y, reduction='none')
        method.note(self.learn.selection.item_idx, losses, len(self.dls.train_ds))

makers = {
    'none': 'none',
    'OrderDP': lambda: EpochSelection(OrderDP(), warmup=0),
    'random share': lambda: EpochSelection(RandomShare(), warmup=0)}
makers |= {f'pruned by {by}': lambda by=by: EpochSelection(Pruned(by)) for by in scores_of}

# Runs

lr = .8 # plain training's best of five for this network on 20,000 of these images
budgets = 12,36 # epochs of all items
seeds = range(3)

def cell_of(epochs): return Cell('cifar10', 10_000, epochs)

def learner_of(epochs):
    learn = cell_of(epochs).learner()
    return learn.add_cb(NoteBatches())

columns = ('part','epochs','share','method','seed','epoch','seconds','cpu_seconds','backpropagated','compute','kept',
    'valid_loss','error','device')

def end_of(part, method, seed, epochs, share=1.): # a row
    "The end of a run of so many epochs' cost, or a share of it, unless it is stored"
    def make():
        budget = dict(compute=share*cell_of(epochs).compute)
        if scale()=='tiny': budget = dict(compute=share*1800)
        rows = compare(lambda: learner_of(epochs), {method: makers[method]}, seeds=[seed], lr=lr, plot=False,
            tell_controls=False, **budget).assign(part=part, epochs=epochs, share=share, device=machine())
        print(part, method, seed, epochs, share, f'{rows.error.iloc[-1]:.4f}', flush=True)
        return rows.tail(1)[[*columns]]
    return once(path, dict(part=part, method=method, seed=seed, epochs=epochs, share=share), make).iloc[-1]

def order_dp_runs(epochs):
    for seed in seeds:
        yield 'none',seed,epochs,1.
        for method in ('none','random share','OrderDP'): yield method,seed,epochs,order_dp_share

by_age = 'seen often','seen lately','seen long ago'
pruned_by = 'own loss','batch loss',*by_age,'chance'

def bls_runs():
    for seed in seeds:
        yield 'none',seed,budgets[0],1.
        for by in pruned_by: yield f'pruned by {by}',seed,budgets[0],1.

# What a batch loss score goes with

class Correlations(Callback):
    "After each epoch: how the score goes with what is known of the items"
    run_valid = False
    def before_fit(self): self.rows = []

    def _losses(self):
        "Of all training items as they are, without augmentation"
        ds = self.dls.train_ds
        images,labels = ds.images.float()/255,ds.labels
        with torch.no_grad():
            self.model.eval()
            found = [F.cross_entropy(self.model(x), y, reduction='none')
                for x,y in zip(images.split(1000), labels.split(1000))]
            self.model.train()
        return torch.cat(found)

    def after_train(self):
        method = self.learn.selection.method
        known = dict(loss=self._losses(), own_loss=method.own_loss, count=method.count, last=method.last)
        df = pd.DataFrame({name: o.numpy() for name,o in (known | dict(score=method.batch_loss)).items()})
        for kind in 'pearson','spearman':
            found = df.corr(kind).score if kind=='pearson' else df.rank().corr().score
            self.rows.append(dict(epoch=self.epoch+1, kind=kind, seen=len(df) and float((df['last']>0).mean()))
                | {name: found[name] for name in known})

def correlations(prune, seed, epochs=None):
    "How the score goes with items' losses, and with when they were seen, by epoch, unless it is stored"
    epochs = epochs or (3 if scale()=='tiny' else budgets[0])
    def make():
        set_seed(seed, reproducible=True)
        learn = learner_of(epochs).add_cbs([EpochSelection(Pruned('batch loss', prune)), Correlations()])
        rate = schedule('one_cycle', lr)
        with learn.no_bar(),learn.no_logging(): learn.fit(epochs, cbs=ParamScheduler(dict(lr=rate)))
        print('scores', prune, seed, learn.correlations.rows[-1], flush=True)
        return pd.DataFrame(learn.correlations.rows).assign(prune=prune, seed=seed, epochs=epochs)
    return once(scores_path, dict(prune=prune, seed=seed, epochs=epochs), make)

@call_parse
def main(
    names:str, # Parts, with commas between: orderdp, longer, bls, scores
):
    "Train what is not stored yet"
    for name in names.split(','):
        if name in ('orderdp','longer'):
            for run in order_dp_runs(budgets[name=='longer']): end_of('orderdp', *run)
        elif name=='bls':
            for run in bls_runs(): end_of(name, *run)
        elif name=='scores':
            for seed in seeds:
                for prune in (0.,.5): correlations(prune, seed)
