"""What selecting takes besides computing, on one thread, around one linear layer at batch size 128: each call, and each
fit, in turn with all others. For a call, `added` is how much longer it takes than the one it is compared with; for a
learner, the microseconds that a selecting step adds to a plain one: the processor time of an epoch, less that of the
loader and of as many plain steps on as many items, less that of a look by hand with the same loss function, for each
batch of the loader"""
import statistics, time, warnings
from contextlib import redirect_stdout
from functools import partial
from itertools import cycle
from time import process_time

import numpy as np
from against import BS, watched
from common import *
from fastai.optimizer import Adam
from selback.core.scoring import ScoringPass, batch_scores
from selback.functional import ItemMemory, Watch, fixed_random, include, loss_share, mean_inclusion, top_k, untouched
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

CALLS = 100 # of each, in each repeat

SIZES = range(BS//2, BS+1, BS//4) # of plain steps by hand
LOOK = "the same with fastai's loss function"
def of_size(n): return f'{n} items forward and backward, by hand'

def functional():
    "Calls by name: each with the one whose time it is compared with, or None"
    model,loss_func = nn.Linear(32, 10),nn.CrossEntropyLoss()
    x,y = torch.randn(BS, 32),torch.randint(0, 10, (BS,))
    flat = CrossEntropyLossFlat(reduction='none')

    def bare():
        with torch.no_grad(): return F.cross_entropy(model(x), y, reduction='none')
    def bare_flat():
        with torch.no_grad(): return flat(model(x), y)
    def select(policy, loss_func=loss_func, score='loss', **kwargs):
        policy = partial(policy, **kwargs)
        def chosen():
            pred = ScoringPass()(model, (x,), (y,))
            return policy(batch_scores(score, loss_func, pred, (y,)))
        return chosen
    def own(pred, y, reduction='mean'): return F.cross_entropy(pred, y, reduction=reduction)
    def back(n): return lambda: F.cross_entropy(model(x[:n]), y[:n]).backward()

    yield 'a look and its losses, by hand',bare,None
    yield LOOK,bare_flat,None
    yield 'a look and top_k',select(top_k, keep=.5),bare
    yield 'a look and loss_share',select(loss_share),bare
    yield "a look and top_k, score='entropy'",select(top_k, keep=.5, score='entropy'),bare
    yield "a look and top_k, a loss function of one's own",select(top_k, own, keep=.5),bare
    for n in SIZES: yield of_size(n),back(n),None

def parts():
    "What a step is made of"
    def block(): return nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    deep = nn.Sequential(*[block() for _ in range(20)])
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
        at,chosen = np.where(easy)[0],np.where(~easy)[0].tolist()
        weights = np.ones(len(easy))
        kept = np.random.choice(at, int((1-prune)*len(at)), replace=False)
        weights[kept] = 1/(1-prune)
        chosen.extend(kept)
        return chosen,weights

    yield "InfoBatch's choice of 50,000 items, by hand",by_hand,None
    yield 'include',lambda: include(scores, mean_inclusion, 1.),by_hand

GROUPS = [functional, parts, epochs] # of what is timed in turn: a name, a function, and what it is compared with

def measure(cases, repeats):
    "A row for each call: its median time, and how much more that is than the median of the other"
    times = {call: [] for _,call,_ in cases}
    for i in range(-50, repeats*CALLS): # some to warm up
        for call in times:
            start = time.perf_counter()
            call()
            if i>=0: times[call].append(time.perf_counter()-start)

    micro = {call: statistics.median(seconds)*1e6 for call,seconds in times.items()}
    added = {call: micro[call]-micro[beside] for _,call,beside in cases if beside}
    return [dict(what=what, microseconds=micro[call], added=added.get(call), calls=repeats*CALLS)
        for what,call,_ in cases]

OFF = dict(warmup=0)
PLAIN = 'a plain learner'
LEARNERS = {
    PLAIN: lambda: None,
    'batch_loss_filter': lambda: BatchLossFilterCallback(**OFF),
    'top_loss': lambda: TopLossCallback(.5, **OFF),
    'selective_backprop': lambda: SelectiveBackpropCallback(**OFF)}

def without_loader(watch): return 1e6*(watch.seconds-watch.loading)/watch.n

def steps(repeats, by_hand):
    "A row for each learner: microseconds for each batch of the loader, without the loader, and what selecting adds"
    def back(n): return np.interp(n, SIZES, [by_hand[of_size(size)] for size in SIZES])

    def added(micro, plain, watch):
        "Beyond the plain steps on as many items, and a look"
        one_step = plain+back(watch.items/watch.steps)-back(BS)
        return micro-watch.steps/watch.n*one_step-by_hand[LOOK]

    seen = {name: [] for name in LEARNERS}
    for repeat in range(-2, repeats):
        watches = {name: watched(make()) for name,make in LEARNERS.items()}
        plain = without_loader(watches[PLAIN])
        for name,watch in watches.items():
            micro = without_loader(watch)
            row = micro,added(micro, plain, watch),watch.n,watch.steps/watch.n,watch.items/watch.n/BS
            if repeat>=0: seen[name].append(row)

    for name,rows in seen.items():
        micro,more,n,made,trained = np.median(rows, 0)
        if name==PLAIN: more = None
        yield dict(what=name, microseconds=micro, added=more, steps=made, trained=trained, calls=int(n)*repeats)

def watching(repeats):
    "What `watch_items` adds to a step, beside a step of a network that looks at images"
    net,x,y = get_model('resnet18', 10),torch.randn(BS, 3, 32, 32),torch.randint(0, 10, (BS,))
    def back():
        start = process_time()
        F.cross_entropy(net(x), y).backward()
        return 1e6*(process_time()-start)

    rows = []
    for repeat in range(-2, repeats):
        plain,watches = (without_loader(watched(cb)) for cb in (None,WatchItemsCallback()))
        if repeat>=0: rows.append((plain, watches, watches-plain, back()))
    plain,watches,added,step = np.median(rows, 0)
    yield dict(what='a plain learner, beside the next', microseconds=plain, calls=repeats)
    yield dict(what='watch_items', microseconds=watches, added=added, of_step=added/step, calls=repeats)
    what = f'{BS} images of 32 pixels forward and backward through ResNet-18'
    yield dict(what=what, microseconds=step, calls=repeats)

def looped(loader, repeats=20):
    "Microseconds of a step of a bare loop, which notes what it predicts if the loader is a watch"
    model,note = nn.Linear(32, 10),getattr(loader, 'note', lambda pred, yb: None)
    opt,n = torch.optim.SGD(model.parameters(), 1e-3),0
    start = process_time()
    for _ in range(repeats):
        for xb,yb in loader:
            pred = model(xb)
            note(pred, yb)
            F.cross_entropy(pred, yb).backward()
            opt.step()
            opt.zero_grad()
            n += 1
    return 1e6*(process_time()-start)/n

def watching_a_loop(repeats):
    "What `Watch` adds to a step of a bare loop"
    def loader(): return DataLoader(TensorDataset(torch.randn(20*BS, 32), torch.randint(0, 10, (20*BS,))), BS)
    rows = []
    for repeat in range(-2, repeats):
        row = looped(loader()),looped(Watch(loader()))
        if repeat>=0: rows.append(row)
    plain,watched = np.median(rows, 0)
    yield dict(what='a bare loop, beside the next', microseconds=plain, calls=repeats)
    yield dict(what='Watch', microseconds=watched, added=watched-plain, calls=repeats)

def pruned(scores, prune):
    "As in the paper's code: the items of an epoch, and all items' weights"
    easy = scores<scores.mean()
    kept = easy.nonzero()[:,0]
    kept = kept[torch.randperm(len(kept))[:int((1-prune)*len(kept))]]
    weights = torch.ones(len(scores)).index_fill_(0, kept, 1/(1-prune))
    return torch.cat([(~easy).nonzero()[:,0], kept]),weights

def loop(dl, n_epoch, prune=.5):
    "InfoBatch in plain PyTorch, or plain training without `prune`: seconds of each epoch, and its steps"
    n,model = len(dl.dataset),nn.Linear(32, 10)
    scores,weights = torch.full((n,), 3.),torch.ones(n) # as in the paper's code, nothing is known at first
    opt = Adam(list(model.parameters()), lr=1e-3)
    for epoch in range(n_epoch):
        start,idxs = process_time(),torch.arange(n)
        if epoch and prune: idxs,weights = pruned(scores, prune)
        batches = idxs[torch.randperm(len(idxs))].split(dl.bs)
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

class Ends(Callback):
    "Seconds of each epoch, and its steps"
    order = 300
    def __init__(self): self.epochs = []
    def before_epoch(self): self.start,self.before = process_time(),self.train_iter
    def after_epoch(self): self.epochs.append((process_time()-self.start, self.train_iter-self.before))

def fitted(dls, n_epoch, cb=None):
    "Seconds of each epoch of a learner, and its steps"
    learn = Learner(dls, nn.Linear(32, 10), loss_func=CrossEntropyLossFlat(), lr=1e-3, opt_func=Adam, cbs=cb)
    learn._do_epoch_validate = lambda *args: None
    ends = Ends()
    with learn.no_bar(),learn.no_logging(),redirect_stdout(None): learn.fit(n_epoch, cbs=ends)
    return ends.epochs

def of_later_epochs(epochs):
    "Microseconds a step; the first epoch is whole"
    return np.median([1e6*seconds/n for seconds,n in [*epochs][1:]])

def info_batch(repeats, n_batches=100, n_epoch=4):
    """An epoch of `info_batch` beside the same epoch as a loop in plain PyTorch, and what fastai takes for a plain
    epoch of as many steps"""
    n = n_batches*BS
    ds = TensorDataset(torch.randn(n, 32), torch.randint(0, 10, (n,)))
    train,valid = (TfmdDL(ds, bs=BS, shuffle=shuffle, num_workers=0) for shuffle in (True,False))
    dls = DataLoaders(train, valid, device=torch.device('cpu'))
    kinds = {
        'plain training, a loop by hand': lambda: loop(dls.train, n_epoch, 0),
        'plain training, a learner': lambda: fitted(dls, n_epoch),
        'InfoBatch, a loop by hand': lambda: loop(dls.train, n_epoch),
        'info_batch, a learner': lambda: fitted(dls, n_epoch, InfoBatchCallback(delta=1.))}

    rows = []
    for repeat in range(-1, repeats):
        times = {name: of_later_epochs(make()) for name,make in kinds.items()}
        plain_loop,plain,by_hand,ours = times.values()
        in_fastai = by_hand+plain-plain_loop
        if repeat>=0: rows.append(times | dict(of_loop=ours/by_hand, of_loop_in_fastai=ours/in_fastai))

    median = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    for name in kinds:
        ratios = {key: median[key] for key in ('of_loop','of_loop_in_fastai')} if name.startswith('info_batch') else {}
        yield dict(what=f'{name}, a step of its epochs', microseconds=median[name], calls=repeats, **ratios)

def main():
    args = arguments(__doc__)
    args.device = 'cpu'
    torch.set_num_threads(1)
    warnings.simplefilter('ignore')
    rows = [row for group in GROUPS for row in measure(list(group()), args.repeats)]
    rows += steps(args.repeats, {row['what']: row['microseconds'] for row in rows})
    rows += watching(args.repeats)
    rows += watching_a_loop(args.repeats)
    rows += info_batch(args.repeats)
    df = save(rows, 'lean', args)
    print('Freed memory is kept, so that no call waits for the system.')
    told = ['what','microseconds','added','of_step','steps','trained','of_loop','of_loop_in_fastai']
    print(df[told].round(2).to_string(index=False, na_rep=''))

if __name__=='__main__': main()
