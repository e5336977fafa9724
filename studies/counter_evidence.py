"""Claims of 'lossless' pruning, beside plain training that ends at the same cost: `python -m studies.counter_evidence
PART` trains what is not stored of a part: results/counter_evidence.csv, results/batch_loss_score.csv"""
import pandas as pd, torch
from fastai.callback.core import Callback
from fastcore.script import call_parse
from torch.nn import functional as F

from selback.all import Chosen, EpochMethod, EpochSelection
from selback.bench.compare import compare, machine
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
makers['scored by batch loss'] = lambda: EpochSelection(Pruned('batch loss', 0)) # which trains all

class Correlations(Callback):
    "How a batch loss score goes with what is known of the items: after each epoch, and in the end with all losses"
    run_valid = False
    def before_fit(self): self.rows = []

    def _note(self, epoch, method, **known):
        known |= dict(own_mean=method.own_loss, seen=method.count, last=method.last)
        df = pd.DataFrame({name: o.numpy() for name,o in (known | dict(score=method.batch_loss)).items()})
        found = df.corr().score.to_dict()
        self.rows.append(dict(epoch=epoch) | {name: found[name] for name in known})

    def after_train(self):
        selection = self.learn.selection
        if not isinstance(getattr(selection, 'method', None), Pruned): return
        self._note(self.epoch+1, selection.method, stored_loss=selection.memory.loss)

    def after_fit(self):
        method = getattr(self.learn.selection, 'method', None)
        if isinstance(method, Pruned): self._note(0, method, loss=self._losses())

    def _losses(self):
        "Of all training items as they are, without augmentation"
        ds = self.dls.train_ds
        with torch.no_grad():
            self.model.eval()
            found = [F.cross_entropy(self.model(x.float()/255), y, reduction='none')
                for x,y in zip(ds.images.split(1000), ds.labels.split(1000))]
        return torch.cat(found)

# Runs

lr = .8 # plain training's best of five for this network on 20,000 of these images
budgets = 12,36 # epochs of all items
seeds = range(3)

def cell_of(epochs): return Cell('cifar10', 10_000, epochs)

columns = ('part','epochs','share','method','seed','epoch','seconds','cpu_seconds','backpropagated','compute','kept',
    'valid_loss','error','device')

def end_of(part, method, seed, epochs, share=1.): # a row
    "The end of a run of so many epochs' cost, or a share of it, unless it is stored"
    keys = dict(part=part, method=method, seed=seed, epochs=epochs, share=share)
    made = []
    def get_learner():
        made.append(cell_of(epochs).learner().add_cbs([NoteBatches(), Correlations()]))
        return made[-1]
    def make():
        n = 1800 if scale()=='tiny' else cell_of(epochs).compute
        rows = compare(get_learner, {method: makers[method]}, seeds=[seed], lr=lr, plot=False, tell_controls=False,
            compute=share*n).assign(**keys, device=machine())
        print(*keys.values(), f'{rows.error.iloc[-1]:.4f}', flush=True)
        if told := made[-1].correlations.rows:
            once(scores_path, keys, lambda: pd.DataFrame(told).assign(**keys), '%.4f')
        return rows.tail(1)[[*columns]]
    return once(path, keys, make).iloc[-1]

def order_dp_runs(epochs):
    for seed in seeds:
        yield 'none',seed,epochs,1.
        for method in ('none','random share','OrderDP'): yield method,seed,epochs,order_dp_share

pruned_by = 'batch loss','seen often','chance','own loss'

def bls_runs():
    "Plain training of the same cost is among the others"
    for seed in seeds: yield from ((f'pruned by {by}', seed, budgets[0]) for by in pruned_by)
    yield 'scored by batch loss',0,budgets[0]

@call_parse
def main(
    names:str, # Parts, with commas between: orderdp, longer, bls
):
    "Train what is not stored yet"
    for name in names.split(','):
        if name=='bls':
            for run in bls_runs(): end_of(name, *run)
        else:
            for run in order_dp_runs(budgets[name=='longer']): end_of('orderdp', *run)
