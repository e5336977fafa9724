"Selection without its scoring pass, against a plain step; the same as a user would write it; the callback at rest; and the memory of items"
import json, os, subprocess, sys, time
from collections import deque
from itertools import cycle
from unittest.mock import patch

import numpy as np
from scipy.stats import percentileofscore
from selback.core.batches import as_tensors
from selback.core.policies import cdf_power
from selback.core.memory import ItemMemory
from common import *

SIZES = {'cpu': (32, 128, 512, 2048, 4096), 'cuda': (32, 128, 512, 2048, 4096)}

def methods():
    "Each method that chooses from a batch"
    off = dict(warmup=0, auto=False)
    return dict(top_loss=TopLossCallback(1/3, **off), batch_loss_filter=BatchLossFilterCallback(.6, **off), composer=SelectiveBackpropCallback(keep=1/3, gather=False, **off),
        random_subset=RandomSubsetCallback(1/3, **off), **{f'selective_backprop, R={r}': SelectiveBackpropCallback(2., hist_size=r, **off) for r in (1024, 32768, 1_000_000)})

def chooses_only(cb, note, preds):
    "Have a selection choose by predictions that cost nothing, note the seconds for each batch of the loader, and let none train"
    before_batch = cb.before_batch
    def timed():
        position,waited,start = cb.feed.position,cb.feed.waited,clock(cb.device)
        before_batch()
        note((clock(cb.device)-start-(cb.feed.waited-waited))/(1+cb.feed.position-position)) # it may have read further
        getcurrent().parent.switch()
        cb.learn.yb = ()
        raise CancelBatchException
    cb.before_batch,cb.scorer.predict = timed,lambda *args, **kwargs: next(preds)
    return cb

class StepStarts(Callback):
    order = -60
    def before_batch(self): self.learn.step_start = clock(self.dls.device)
class StepEnds(Callback):
    order = 100
    def __init__(self, note): self.note = note
    def after_batch(self):
        self.note(clock(self.dls.device)-self.step_start)
        getcurrent().parent.switch()

history = deque(maxlen=1024)
def sort_in_numpy(losses, xb, yb):
    "A loss filter with the losses on the host, one `.item()` each"
    values = np.array([l.item() for l in losses])
    order = values.argsort()[::-1]
    keep = order[:int((values[order].cumsum()>=.9*values.sum()).argmax())+1]
    return xb[torch.tensor(keep.copy(), device=losses.device)],yb[torch.tensor(keep.copy(), device=losses.device)]

def percentiles_in_a_loop(losses, xb, yb):
    "Selective backprop with a deque and a percentile for each item"
    values = [l.item() for l in losses]
    history.extend(values)
    keep = [i for i,v in enumerate(values) if np.random.rand()<(percentileofscore(history, v, 'strict')/100)**2]
    return xb[keep],yb[keep]

BY_HAND = dict(numpy_sort=sort_in_numpy, percentile_loop=percentiles_in_a_loop)

def choosing(net, bs, args):
    "What choosing takes at a batch size, in each repeat, as a share of a plain step: fits of all methods take turns"
    rows,ds,step = [],image_data(bs, 9*(args.repeats+2), args.device),{}
    preds = cycle([torch.randn(bs, 10, device=args.device) for _ in range(8)])
    xb,yb = ds.rows(torch.arange(bs))
    losses = nn.functional.cross_entropy(next(preds), yb, reduction='none')
    def noting(what): return lambda seconds: rows.append(dict(what=what, repeat=repeat, seconds=seconds))
    def by_hand(choose, note):
        start = clock(args.device)
        choose(losses, xb, yb)
        note(clock(args.device)-start)
    def fit(*cbs): return Fit(learner_of(ds, bs, NETS[net](), args.device, cbs), None, args.device, epochs=1)
    fits = [fit(StepStarts(), StepEnds(noting('plain step')))] + [fit(chooses_only(cb, noting(name), preds)) for name,cb in methods().items()]
    for repeat in range(-1, args.repeats): # the first is slow
        for i in range(len(fits)): fits[(repeat+i)%len(fits)].switch() # who comes after a plain step finds its memory cold
        if bs<=512: # else too slow
            for name,choose in BY_HAND.items(): by_hand(choose, noting(name))
    for o in fits: o.throw() # they are not needed any more
    step = {r['repeat']: r['seconds'] for r in rows if r['what']=='plain step'}
    return [dict(net=net, bs=bs, **r, share_of_a_step=r['seconds']/step[r['repeat']]) for r in rows if r['repeat']>=0]

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
    with patch.object(SelectionCallback, '__call__', timed),learn.no_bar(),learn.no_logging(): learn.fit(1, cbs=Batches())
    return [dict(repeat=r, microseconds=1e6*float(np.mean(spent[40*r+1:40*r+39]))) for r in range(args.repeats)]

def remembering(args):
    "An epoch of bookkeeping for items in memory, on one core: losses noted batch by batch, a choice, the next epoch"
    rows,threads = [],torch.get_num_threads()
    torch.set_num_threads(1)
    for n in (10_000, 100_000, 1_000_000, 10_000_000):
        memory,losses = ItemMemory(n, args.device),torch.rand(n, device=args.device)
        for r in range(args.repeats if n<10_000_000 else 3):
            batches = torch.randperm(n, device=args.device).split(512)
            start = clock(args.device)
            for idx in batches: memory.note(idx, losses[idx], picked=True)
            noted = clock(args.device)
            cdf_power(memory.loss, memory.loss, 2.)
            memory.next_epoch()
            end = clock(args.device)
            rows.append(dict(items=n, repeat=r, seconds=end-start, noting=noted-start, megabytes=sum(getattr(memory, f).numel()*getattr(memory, f).element_size() for f in memory.fields)/1e6))
    torch.set_num_threads(threads)
    return rows

def against(path, args):
    "The callback at rest and choosing, by the package of another checkout and by this one, in turns: a table, also in runs/"
    path,here = Path(path).resolve(),Path(__file__).parents[1]
    def start(root):
        env = os.environ | dict(PYTHONPATH=str(root), PYTHONDONTWRITEBYTECODE='1', OMP_NUM_THREADS='1')
        python = root/'.venv/bin/python' if root!=here else sys.executable
        return subprocess.Popen([python, '-W', 'ignore', Path(__file__).with_name('against.py')], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    def measure(process):
        print(file=process.stdin, flush=True)
        return json.loads(process.stdout.readline())
    packages,rows = dict(before=start(path), after=start(here)),[]
    for r in range(-1, args.repeats): # the first is slow
        for name,process in [*packages.items()][::1 if r%2 else -1]: rows += [dict(repeat=r, package=name, **row) for row in measure(process)]
    for process in packages.values(): process.communicate()
    df = pd.DataFrame(rows).query('repeat>=0').pivot(index=['measure','what','repeat'], columns='package', values='us')[[*packages]]
    df = df.assign(difference=df.after-df.before).groupby(['measure','what'], sort=False).median().round(1)
    text = f'Microseconds of processor time for each batch of 128 from the loader, around one linear layer\n{machine(args.device)}, {args.repeats} paired repeats, {path} and {here}\n{df.to_string()}'
    (out := Path('runs')/'overhead_against.txt').parent.mkdir(exist_ok=True)
    out.write_text(text+'\n')
    print(f'{text}\nwrote {out}')

def main():
    args = arguments(__doc__, against=dict(metavar='PATH', help='another checkout with a .venv: print what its package and this one take, and measure nothing else'))
    if args.against: return against(args.against, args)
    rows = sum((choosing('small_resnet', bs, args) for bs in SIZES[torch.device(args.device).type]), []) + choosing('cifar_resnet18', 128, args) + choosing('resnet18', 128, args)
    df = save(rows, 'choosing', args)
    print((100*df.pivot_table(index='what', columns=['net','bs'], values='share_of_a_step', aggfunc='median', sort=False)).round(2).astype(str).add(' %').to_string())
    print(save(at_rest(args), 'at_rest', args).microseconds.median().round(1), 'microseconds a batch at rest')
    print(save(remembering(args), 'memory_of_items', args).groupby('items')[['seconds','noting','megabytes']].median().round(3).to_string())

if __name__=='__main__': main()
