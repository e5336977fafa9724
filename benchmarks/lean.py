"""What selecting takes besides computing, on one thread, around one linear layer at batch size 128: each call, and each fit, in turn with all others.
For a call, `added` is how much longer it takes than the one it is compared with; for a learner, the microseconds that a selecting step adds to a plain one: the processor time of an
epoch, less that of the loader and of as many plain steps on as many items, less that of a look by hand with the same loss function, for each batch of the loader"""
import statistics, time, warnings
from itertools import cycle
from time import process_time

import numpy as np
from against import BS, watched
from common import *
from fastai.optimizer import Adam
from selback.core.functional import ItemMemory, fixed_random, prune_easy, select_batch, untouched
from torch.nn import functional as F
from torch.utils.data import TensorDataset

CALLS = 100 # of each, in each repeat

def functional():
    "Calls by name: each with the one whose time it is compared with, or None"
    model,loss_func,x,y = nn.Linear(32, 10),nn.CrossEntropyLoss(),torch.randn(BS, 32),torch.randint(0, 10, (BS,))
    def bare():
        with torch.no_grad(): return F.cross_entropy(model(x), y, reduction='none')
    flat = CrossEntropyLossFlat(reduction='none')
    def bare_flat():
        with torch.no_grad(): return flat(model(x), y)
    def select(policy, loss_func=loss_func, **kwargs): return lambda: select_batch(model, loss_func, x, y, policy, **kwargs)
    def own(pred, y, reduction='mean'): return F.cross_entropy(pred, y, reduction=reduction)
    yield 'a look and its losses, by hand',bare,None
    yield "the same with fastai's loss function",bare_flat,None
    yield "select_batch 'top_k'",select('top_k', keep=.5),bare
    yield "select_batch 'loss_share'",select('loss_share'),bare
    yield "select_batch 'top_k', score='entropy'",select('top_k', keep=.5, score='entropy'),bare
    yield "select_batch 'top_k', a loss function of one's own",select('top_k', own, keep=.5),bare
    def back(n): return lambda: F.cross_entropy(model(x[:n]), y[:n]).backward()
    for n in range(BS//2, BS+1, BS//4): yield f'{n} items forward and backward, by hand',back(n),None

def parts():
    "What a step is made of"
    deep = nn.Sequential(*[nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(20)])
    memory,losses = ItemMemory(50_000),torch.rand(BS)
    batches = cycle(torch.randperm(50_000).split(BS)[:-1])
    def twice():
        with fixed_random(): pass
    def through():
        with untouched(deep): pass
    yield 'fixed_random',twice,None
    yield f'untouched, {len(list(deep.modules()))} modules',through,None
    yield 'ItemMemory.note, 128 of 50,000 items',lambda: memory.note(next(batches), losses),None

def epochs():
    "What an epoch begins with"
    scores = torch.rand(50_000)**2
    def by_hand(prune=.5): # as in the paper's code, without shuffling
        easy = (scores<scores.mean()).numpy()
        at,chosen,weights = np.where(easy)[0],np.where(~easy)[0].tolist(),np.ones(len(easy))
        kept = np.random.choice(at, int((1-prune)*len(at)), replace=False)
        weights[kept] = 1/(1-prune)
        chosen.extend(kept)
        return chosen,weights
    yield "InfoBatch's choice of 50,000 items, by hand",by_hand,None
    yield 'prune_easy',lambda: prune_easy(scores),by_hand

GROUPS = [functional, parts, epochs] # each yields what is timed in turn: a name, a function, and the function it is compared with

def measure(cases, repeats):
    "A row for each call: its median time, and how much more that is than the median of the other"
    times,functions = {},[f for _,f,_ in cases]
    for i in range(-50, repeats*CALLS): # some to warm up
        for f in functions:
            start = time.perf_counter()
            f()
            if i>=0: times.setdefault(f, []).append(time.perf_counter()-start)
    micro = {f: statistics.median(t)*1e6 for f,t in times.items()}
    added = {f: micro[f]-micro[beside] for _,f,beside in cases if beside}
    return [dict(what=what, microseconds=micro[f], added=added.get(f), calls=repeats*CALLS) for what,f,_ in cases]

def learners():
    "Selecting learners by name"
    off = dict(warmup=0, auto=False)
    return dict(batch_loss_filter=lambda: BatchLossFilterCallback(**off), top_loss=lambda: TopLossCallback(.5, **off), selective_backprop=lambda: SelectiveBackpropCallback(**off))

def steps(repeats, by_hand):
    "A row for each learner: microseconds of an epoch for each batch of the loader, without the loader, and what selecting adds to them"
    look,sizes = by_hand["the same with fastai's loss function"],range(BS//2, BS+1, BS//4)
    back = lambda n: np.interp(n, sizes, [by_hand[f'{s} items forward and backward, by hand'] for s in sizes])
    times,watches = {},{}
    for r in range(-2, repeats):
        for name,make in ({'a plain learner': lambda: None} | learners()).items():
            w = watched(make())
            micro = 1e6*(w.seconds-w.loading)/w.n
            if name=='a plain learner': plain = micro
            of_steps = w.steps/w.n*(plain+back(w.items/w.steps)-back(BS))
            if r>=0: times.setdefault(name, []).append((micro, micro-of_steps-look, w.n, w.steps/w.n, w.items/w.n/BS))
    for name,t in times.items():
        micro,added,n,made,trained = np.median(t, 0)
        yield dict(what=name, microseconds=micro, added=None if name=='a plain learner' else added, steps=made, trained=trained, calls=int(n)*repeats)

def loop(dl, n_epoch, prune=.5):
    "InfoBatch in plain PyTorch, or plain training without `prune`: seconds of each epoch, and its steps"
    n,bs,ds = len(dl.dataset),dl.bs,dl.dataset
    model,scores,weights = nn.Linear(32, 10),torch.full((n,), 3.),torch.ones(n) # as in the paper's code, nothing is known at first
    opt = Adam(list(model.parameters()), lr=1e-3)
    for epoch in range(n_epoch):
        start,idxs = process_time(),torch.arange(n)
        if epoch and prune:
            easy = scores<scores.mean()
            kept = easy.nonzero()[:,0]
            kept = kept[torch.randperm(len(kept))[:int((1-prune)*len(kept))]]
            weights = torch.ones(n).index_fill_(0, kept, 1/(1-prune))
            idxs = torch.cat([(~easy).nonzero()[:,0], kept])
        batches = idxs[torch.randperm(len(idxs))].split(bs)
        loader = dl.new(get_idxs=lambda: torch.cat(batches).tolist(), n=len(idxs), shuffle=False)
        for idx,(xb,yb) in zip(batches, loader):
            if prune:
                losses = F.cross_entropy(model(xb), yb, reduction='none')
                scores[idx] = losses.detach()
                loss = (losses*weights[idx]).mean()
            else: loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            opt.step()
            opt.zero_grad()
        yield process_time()-start,len(batches)

def fitted(dls, n_epoch, cb=None):
    "Seconds of each epoch of a learner, and its steps"
    learn,ends = Learner(dls, nn.Linear(32, 10), loss_func=CrossEntropyLossFlat(), lr=1e-3, opt_func=Adam, cbs=cb),[]
    learn._do_epoch_validate = lambda *args: None
    class Ends(Callback):
        order = 300
        def before_epoch(self): self.start,self.before = process_time(),self.train_iter
        def after_epoch(self): ends.append((process_time()-self.start, self.train_iter-self.before))
    with learn.no_bar(),learn.no_logging(): learn.fit(n_epoch, cbs=Ends())
    return ends

def info_batch(repeats, n_batches=100, n_epoch=4):
    "An epoch of `info_batch` beside the same epoch as a loop in plain PyTorch, and what fastai takes for a plain epoch of as many steps"
    ds = TensorDataset(torch.randn(n_batches*BS, 32), torch.randint(0, 10, (n_batches*BS,)))
    dls = DataLoaders(*[TfmdDL(ds, bs=BS, shuffle=not i, num_workers=0) for i in range(2)], device=torch.device('cpu'))
    kinds = {'plain training, a loop by hand': lambda: loop(dls.train, n_epoch, 0), 'plain training, a learner': lambda: fitted(dls, n_epoch),
        'InfoBatch, a loop by hand': lambda: loop(dls.train, n_epoch), 'info_batch, a learner': lambda: fitted(dls, n_epoch, InfoBatchCallback(delta=1., auto=False))}
    rows = []
    for r in range(-1, repeats):
        t = {name: np.median([1e6*s/n for s,n in [*make()][1:]]) for name,make in kinds.items()} # the first epoch is whole
        plain_loop,plain,by_hand,ours = t.values()
        if r>=0: rows.append(t | dict(of_loop=ours/by_hand, of_loop_in_fastai=ours/(by_hand+plain-plain_loop)))
    median = {k: statistics.median(row[k] for row in rows) for k in rows[0]}
    for name in kinds:
        ratios = {k: median[k] for k in ('of_loop','of_loop_in_fastai')} if name.startswith('info_batch') else {}
        yield dict(what=f'{name}, a step of its epochs', microseconds=median[name], calls=repeats, **ratios)

def main():
    args = arguments(__doc__)
    args.device = 'cpu'
    torch.set_num_threads(1)
    warnings.simplefilter('ignore')
    rows = [row for group in GROUPS for row in measure(list(group()), args.repeats)]
    rows += steps(args.repeats, {r['what']: r['microseconds'] for r in rows})
    rows += info_batch(args.repeats)
    df = save(rows, 'lean', args)
    print('Freed memory is kept, so that no call waits for the system.')
    print(df[['what','microseconds','added','steps','trained','of_loop','of_loop_in_fastai']].round(2).to_string(index=False, na_rep=''))

if __name__=='__main__': main()
