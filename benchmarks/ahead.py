"Epochs whose scoring pass is ahead in a thread, beside others and plain ones, with one and two threads that compute"
from common import *
from selback.core.ahead import Ahead
from selback.core.scoring import counting

AHEAD = 6 # batches, from which two steps come
SHARE = 1/3
SIZES = { # network, items in a batch, batches in an epoch: a plain step takes some 5, 50 and 500 ms with one thread
    '5 ms': ('small_net', 9, 96),
    '50 ms': ('small_resnet', 21, 36),
    '500 ms': ('cifar_resnet18', 9, 12)}

def small_net():
    def conv(n_in, n_out): return nn.Conv2d(n_in, n_out, 3, 2, 1, bias=False),nn.BatchNorm2d(n_out),nn.ReLU()
    layers = *conv(3, 16),*conv(16, 32),*conv(32, 64)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))

NETS['small_net'] = small_net

def selecting(**kwargs): return TopLossCallback(SHARE, gather=True, warmup=0, **kwargs)

KINDS = { # threads that compute, for each thread of Python, and the selection
    'plain': (1, lambda: None),
    'plain, 2 threads': (2, lambda: None),
    'selecting': (1, selecting),
    'selecting, 2 threads': (2, selecting),
    'ahead': (1, lambda: selecting(scorer=Ahead(AHEAD))),
    'ahead, 2 threads each': (2, lambda: selecting(scorer=Ahead(AHEAD)))}

def learner(name, kind, args):
    _,make = KINDS[kind]
    return image_learner(*SIZES[name], args.device, make())

def fit(learn, kind):
    torch.set_num_threads(KINDS[kind][0])
    with learn.no_bar(),learn.no_logging(): learn.fit(1)

def seconds_of(learn, kind, device):
    "Of an epoch"
    start = clock(device)
    fit(learn, kind)
    return clock(device)-start

def measure(name, args):
    "A row for each kind and repeat, the kinds in turn"
    net,bs,n_batches = SIZES[name]
    learners,rows = {kind: learner(name, kind, args) for kind in KINDS},[]
    for repeat in range(-1, args.repeats): # one to warm up
        for kind,learn in learners.items():
            seconds = seconds_of(learn, kind, args.device)
            n_trained = sum(learn.selection.stats.trained.tail(n_batches)) if learn.selection else n_batches*bs
            rows.append(dict(step=name, net=net, bs=bs, batches=n_batches, ahead=AHEAD, kind=kind, repeat=repeat,
                seconds=seconds, trained=n_trained/(n_batches*bs)))

    rows = pd.DataFrame(rows).query('repeat>=0')
    plain = rows.query("kind=='plain'").set_index('repeat').seconds
    return rows.assign(of_plain=rows.seconds/rows.repeat.map(plain))

class Steps(Callback):
    "Notes when each step began and ended"
    order = BatchSelection.order+1

    def __init__(self, device): self.device,self.rows = device,[]
    def before_batch(self): self.start = clock(self.device)
    def after_batch(self): self.rows.append(dict(what='step', start=self.start, end=clock(self.device)))

def profile(name, kind, args):
    "When the steps and the scoring passes of an epoch began and ended"
    learn,steps = learner(name, kind, args),Steps(args.device)
    fit(learn, kind)
    learn.add_cb(steps)
    passes = []
    def timed(run, model, xb, thirds):
        start = clock(args.device)
        out = run()
        passes.append(dict(what='scoring pass', start=start, end=clock(args.device)))
        return out

    begun = clock(args.device)
    with counting(timed): fit(learn, kind)
    rows = pd.DataFrame(steps.rows+passes)
    return rows.assign(step=name, kind=kind, start=rows.start-begun, end=rows.end-begun)

def main():
    args = arguments(__doc__)
    save(pd.concat([profile('50 ms', kind, args) for kind in ('selecting','ahead')]), 'ahead_profile', args)
    df = save(pd.concat([measure(name, args) for name in SIZES]), 'ahead', args)
    by = df.groupby(['step','kind'], sort=False)
    table = by[['seconds','of_plain','trained']].median()
    table['ms_of_batch'] = 1000*table.seconds/by.batches.first()
    print(table.round(3).to_string())

if __name__=='__main__': main()
