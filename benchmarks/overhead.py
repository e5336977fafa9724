"""Selection without its scoring pass, against a plain step; the same as a user would write it; the callback at rest;
and the memory of items"""
import json, os, subprocess, sys, time
from collections import deque
from contextlib import redirect_stdout
from itertools import cycle
from unittest.mock import patch

import numpy as np
from greenlet import getcurrent, greenlet
from scipy.stats import percentileofscore
from selback.callback.learner import TrainingOnly
from selback.core.policies import cdf_power
from selback.core.memory import ItemMemory
from against import Ready
from common import *

SIZES = {'cpu': (32, 128, 512, 2048, 4096), 'cuda': (32, 128, 512, 2048, 4096)}

OFF = dict(warmup=0)

def methods():
    "Each method that chooses from a batch"
    histories = {f'selective_backprop, R={size}': SelectiveBackpropCallback(2., hist_size=size, **OFF)
        for size in (1024, 32768, 1_000_000)}
    return dict(
        top_loss=TopLossCallback(1/3, **OFF),
        batch_loss_filter=BatchLossFilterCallback(.6, **OFF),
        composer=SelectiveBackpropCallback(keep=1/3, gather=False, **OFF),
        random_subset=RandomSubsetCallback(1/3, **OFF),
        **histories)

class Fit(greenlet):
    "A fit of one epoch that others can interrupt"
    def __init__(self, learn):
        self.learn = learn
        super().__init__()

    def run(self):
        with self.learn.no_bar(),self.learn.no_logging(): self.learn.fit(1)

def chooses_only(cb, note, preds):
    """Have a selection choose by predictions that cost nothing, note the seconds for each batch of the loader, and let
    none train"""
    before_batch = cb.before_batch
    n_read,took = 0,0.
    def now(): return clock(cb.device)
    def add(seconds):
        nonlocal took
        took += seconds

    def timed():
        nonlocal n_read,took
        start = now()
        before_batch()
        add(now()-start)
        note(took/(cb.loader.n_read-n_read)) # it may have read several
        n_read,took = cb.loader.n_read,0.
        getcurrent().parent.switch()
        cb.learn.yb = ()
        raise CancelBatchException

    time_steps(cb, now, add)
    cb.before_batch = timed
    if cb.is_scored: cb.scorer.scoring = Ready(preds)
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
    n = int((values[order].cumsum()>=.9*values.sum()).argmax())+1
    def kept(o): return o[torch.tensor(order[:n].copy(), device=losses.device)]
    return kept(xb),kept(yb)

def percentiles_in_a_loop(losses, xb, yb):
    "Selective backprop with a deque and a percentile for each item"
    values = [l.item() for l in losses]
    history.extend(values)
    def share_below(v): return percentileofscore(history, v, 'strict')/100
    keep = [i for i,v in enumerate(values) if np.random.rand()<share_below(v)**2]
    return xb[keep],yb[keep]

BY_HAND = dict(numpy_sort=sort_in_numpy, percentile_loop=percentiles_in_a_loop)

def one_fit(ds, net, bs, device, *cbs):
    learn = learner_of(ds, bs, NETS[net](), device, cbs)
    return Fit(learn)

def take_turns(fits, first):
    "A step of each; who comes after a plain step finds its memory cold, so another one begins each time"
    for i in range(len(fits)): fits[(first+i)%len(fits)].switch()

def choosing(net, bs, args):
    "What choosing takes at a batch size, in each repeat, as a share of a plain step: fits of all methods take turns"
    device,rows = args.device,[]
    ds = image_data(bs, 9*(args.repeats+2), device)
    preds = cycle([torch.randn(bs, 10, device=device) for _ in range(8)])
    xb,yb = ds.rows(torch.arange(bs))
    losses = nn.functional.cross_entropy(next(preds), yb, reduction='none')

    def noting(what): return lambda seconds: rows.append(dict(what=what, repeat=repeat, seconds=seconds))
    def by_hand(choose, note):
        start = clock(device)
        choose(losses, xb, yb)
        note(clock(device)-start)

    fits = [one_fit(ds, net, bs, device, StepStarts(), StepEnds(noting('plain step')))]
    for name,cb in methods().items(): fits.append(one_fit(ds, net, bs, device, chooses_only(cb, noting(name), preds)))
    for repeat in range(-1, args.repeats): # the first is slow
        take_turns(fits, repeat)
        if bs>512: continue # too slow by hand
        for name,choose in BY_HAND.items(): by_hand(choose, noting(name))
    for fit in fits: fit.throw() # they are not needed any more

    plain = {row['repeat']: row['seconds'] for row in rows if row['what']=='plain step'}
    return [dict(net=net, bs=bs, **row, share_of_a_step=row['seconds']/plain[row['repeat']])
        for row in rows if row['repeat']>=0]

class Batches(Callback):
    "Begins a new sum of seconds after each batch"
    order = 101
    def __init__(self): self.spent = []
    def after_batch(self): self.spent.append(0.)

    def add(self, seconds):
        if self.spent: self.spent[-1] += seconds

def at_rest(args):
    "Microseconds a batch that the callback takes when it selects nothing"
    learn = image_learner('small_resnet', 8, 40*args.repeats, args.device)
    learn.top_loss(warmup=99)
    batches,call = Batches(),TrainingOnly.__call__ # of the selection and its companions
    def timed(self, event):
        start = time.perf_counter()
        try: return call(self, event)
        finally: batches.add(time.perf_counter()-start)

    time_steps(learn.selection, time.perf_counter, batches.add)
    with patch.object(TrainingOnly, '__call__', timed),learn.no_bar(),learn.no_logging(),redirect_stdout(None):
        learn.fit(1, cbs=batches)
    parts = [batches.spent[40*repeat+1:40*repeat+39] for repeat in range(args.repeats)]
    return [dict(repeat=repeat, microseconds=1e6*float(np.mean(part))) for repeat,part in enumerate(parts)]

def megabytes(memory):
    kept = [getattr(memory, name) for name in memory.fields]
    return sum(values.numel()*values.element_size() for values in kept)/1e6

def one_epoch_of(memory, losses, device):
    "Seconds of an epoch's bookkeeping, and of its notes alone"
    batches = torch.randperm(len(losses), device=device).split(512)
    start = clock(device)
    for idx in batches: memory.note(idx, losses[idx], picked=True)
    noted = clock(device)
    cdf_power(memory.loss, memory.loss, 2.)
    memory.next_epoch()
    end = clock(device)
    return dict(seconds=end-start, noting=noted-start)

def remembering(args):
    "An epoch of bookkeeping for items in memory, on one core: losses noted batch by batch, a choice, the next epoch"
    rows,threads = [],torch.get_num_threads()
    torch.set_num_threads(1)
    for n in (10_000, 100_000, 1_000_000, 10_000_000):
        memory,losses = ItemMemory(n, args.device),torch.rand(n, device=args.device)
        for repeat in range(args.repeats if n<10_000_000 else 3):
            took = one_epoch_of(memory, losses, args.device)
            rows.append(dict(items=n, repeat=repeat, **took, megabytes=megabytes(memory)))
    torch.set_num_threads(threads)
    return rows

def start_process(root, here):
    "The package of a checkout, which measures when it is asked to"
    python = sys.executable if root==here else root/'.venv/bin/python'
    script = Path(__file__).with_name('against.py')
    env = os.environ | dict(PYTHONPATH=str(root), PYTHONDONTWRITEBYTECODE='1', OMP_NUM_THREADS='1')
    return subprocess.Popen([python, '-W', 'ignore', script], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True)

def ask(process):
    "A row for each measurement"
    print(file=process.stdin, flush=True)
    return json.loads(process.stdout.readline())

def in_columns(rows, packages):
    "Medians of both packages and of the difference between them"
    df = pd.DataFrame(rows).query('repeat>=0')
    df = df.pivot(index=['measure','what','repeat'], columns='package', values='us')[[*packages]]
    df = df.assign(difference=df.after-df.before)
    return df.groupby(['measure','what'], sort=False).median().round(1)

def against(path, args):
    """The callback at rest and choosing, by the package of another checkout and by this one, in turns: a table, also in
    runs/"""
    path,here = Path(path).resolve(),Path(__file__).parents[1]
    packages = dict(before=start_process(path, here), after=start_process(here, here))
    rows = []
    for repeat in range(-1, args.repeats): # the first is slow
        turns = [*packages.items()]
        if repeat%2==0: turns.reverse()
        for name,process in turns: rows += [dict(repeat=repeat, package=name, **row) for row in ask(process)]
    for process in packages.values(): process.communicate()

    what = 'Microseconds of processor time for each batch of 128 from the loader, around one linear layer'
    about = f'{machine(args.device)}, {args.repeats} paired repeats, {path} and {here}'
    text = f'{what}\n{about}\n{in_columns(rows, packages).to_string()}'
    out = Path('runs')/'overhead_against.txt'
    out.parent.mkdir(exist_ok=True)
    out.write_text(text+'\n')
    print(f'{text}\nwrote {out}')

def main():
    other = dict(metavar='PATH',
        help='another checkout with a .venv: print what its package and this one take, and measure nothing else')
    args = arguments(__doc__, against=other)
    if args.against: return against(args.against, args)

    rows = []
    for bs in SIZES[torch.device(args.device).type]: rows += choosing('small_resnet', bs, args)
    for net in ('cifar_resnet18','resnet18'): rows += choosing(net, 128, args)
    df = save(rows, 'choosing', args)
    shares = df.pivot_table(index='what', columns=['net','bs'], values='share_of_a_step', aggfunc='median', sort=False)
    print((100*shares).round(2).astype(str).add(' %').to_string())

    resting = save(at_rest(args), 'at_rest', args)
    print(resting.microseconds.median().round(1), 'microseconds a batch at rest')

    by_items = save(remembering(args), 'memory_of_items', args).groupby('items')
    print(by_items[['seconds','noting','megabytes']].median().round(3).to_string())

if __name__=='__main__': main()
