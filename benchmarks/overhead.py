"Selection without its scoring pass, against a plain step; the same as a user would write it; the callback at rest; and the memory of items"
import math, time
from collections import deque

import numpy as np
from scipy.stats import percentileofscore
from selback.losses import plain
from selback.memory import ItemMemory
from selback.policies import cdf_power
from common import *

SIZES = {'cpu': (32, 128, 512, 2048, 4096), 'cuda': (32, 128, 512, 2048, 4096)}

class Selects(Callback):
    "Before a plain step, has each method choose from the batch, by predictions that cost nothing"
    order = -60
    def __init__(self, cbs, repeats, device): self.methods,self.repeats,self.device,self.rows = cbs,repeats,device,[]
    def before_fit(self):
        for cb in self.methods.values(): cb.governor.auto = False

    def before_batch(self):
        batch,n = (self.xb,self.yb),len(self.y)
        pred = torch.randn(n, 10, device=self.device)
        losses = nn.functional.cross_entropy(pred, self.y, reduction='none')
        for name,cb in self.methods.items():
            cb.predict,cb._began,cb.item_idx = (lambda: pred),True,None
            start = now(self.device)
            try: cb._select(n)
            except CancelBatchException: pass
            self.note(name, start)
            self.learn.xb,self.learn.yb = batch
        for name,choose in BY_HAND.items():
            if n>512: continue # too slow
            start = now(self.device)
            choose(losses, *plain(batch))
            self.note(name, start)
        self.start = now(self.device)

    def note(self, name, start): self.rows.append(dict(what=name, repeat=self.iter-1, seconds=now(self.device)-start))

class Ends(Callback):
    order = 100
    def after_batch(self): self.learn.selects.note('plain step', self.learn.selects.start)

history = deque(maxlen=1024)
def sort_in_numpy(losses, xb, yb):
    "A loss filter with the losses on the host, one `.item()` each"
    values = np.array([l.item() for l in losses])
    order = values.argsort()[::-1]
    keep = order[:int((values[order].cumsum()>=.9*values.sum()).argmax())+1]
    return xb[0][torch.tensor(keep.copy(), device=losses.device)],yb[0][torch.tensor(keep.copy(), device=losses.device)]

def percentiles_in_a_loop(losses, xb, yb):
    "Selective backprop with a deque and a percentile for each item"
    values = [l.item() for l in losses]
    history.extend(values)
    keep = [i for i,v in enumerate(values) if np.random.rand()<(percentileofscore(history, v, 'strict')/100)**2]
    return xb[0][keep],yb[0][keep]

BY_HAND = dict(numpy_sort=sort_in_numpy, percentile_loop=percentiles_in_a_loop)

def choosing(net, bs, args):
    "What choosing takes at a batch size, in each repeat, as a share of a plain step"
    cbs = dict(top_loss=TopLossCallback(1/3, warmup=0), batch_loss_filter=BatchLossFilterCallback(.6, warmup=0), composer=SelectiveBackpropCallback(keep=1/3, gather=False, warmup=0),
        random_subset=RandomSubsetCallback(1/3, warmup=0), **{f'selective_backprop, R={r}': SelectiveBackpropCallback(2., hist_size=r, warmup=0) for r in (1024, 32768, 1_000_000)})
    learn = image_learner(net, bs, args.repeats+1, args.device, list(cbs.values()))
    learn.selects = Selects(cbs, args.repeats, args.device)
    for cb in cbs.values(): cb.__dict__['run'] = False
    learn.add_cbs([learn.selects, Ends()])
    for cb in cbs.values(): cb.window.is_on = lambda *args: False
    with learn.no_bar(),learn.no_logging(): learn.fit(1)
    rows = pd.DataFrame(learn.selects.rows).query('repeat>=0')
    step = rows[rows.what=='plain step'].set_index('repeat').seconds
    return [dict(net=net, bs=bs, what=r.what, repeat=r.repeat, seconds=r.seconds, share_of_a_step=r.seconds/step[r.repeat]) for r in rows.itertuples()]

def at_rest(args):
    "Microseconds a batch that the callback takes when it selects nothing"
    learn = image_learner('small_resnet', 8, 40*args.repeats, args.device)
    learn.top_loss(warmup=99, auto=False)
    spent,call = [],SelectionCallback.__call__
    class Batches(Callback):
        order = 101
        def after_batch(self): spent.append(0.)
    def timed(self, event):
        start = time.perf_counter()
        try: return call(self, event)
        finally:
            if spent: spent[-1] += time.perf_counter()-start
    SelectionCallback.__call__ = timed
    try:
        with learn.no_bar(),learn.no_logging(): learn.fit(1, cbs=Batches())
    finally: SelectionCallback.__call__ = call
    return [dict(repeat=r, microseconds=1e6*float(np.mean(spent[40*r+1:40*r+39]))) for r in range(args.repeats)]

def remembering(args):
    "An epoch of bookkeeping for items in memory, on one core: losses noted batch by batch, a choice, the next epoch"
    rows,threads = [],torch.get_num_threads()
    torch.set_num_threads(1)
    for n in (10_000, 100_000, 1_000_000, 10_000_000):
        memory,losses = ItemMemory(n, args.device),torch.rand(n, device=args.device)
        for r in range(args.repeats if n<10_000_000 else 3):
            batches = torch.randperm(n, device=args.device).split(512)
            start = now(args.device)
            for idx in batches: memory.note(idx, losses[idx], picked=True)
            noted = now(args.device)
            cdf_power(memory.loss, memory.loss, 2.)
            memory.next_epoch()
            end = now(args.device)
            rows.append(dict(items=n, repeat=r, seconds=end-start, noting=noted-start, megabytes=sum(getattr(memory, f).numel()*getattr(memory, f).element_size() for f in memory.fields)/1e6))
    torch.set_num_threads(threads)
    return rows

def main():
    args = arguments(__doc__)
    rows = sum((choosing('small_resnet', bs, args) for bs in SIZES[torch.device(args.device).type]), []) + choosing('cifar_resnet18', 128, args) + choosing('resnet18', 128, args)
    df = save(rows, 'choosing', args)
    print((100*df.pivot_table(index='what', columns=['net','bs'], values='share_of_a_step', aggfunc='median', sort=False)).round(2).astype(str).add(' %').to_string())
    print(save(at_rest(args), 'at_rest', args).microseconds.median().round(1), 'microseconds a batch at rest')
    print(save(remembering(args), 'memory_of_items', args).groupby('items')[['seconds','noting','megabytes']].median().round(3).to_string())

if __name__=='__main__': main()
