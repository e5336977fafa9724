"What training does with each method, step by step: `python tests/goldens.py` writes `goldens.json.gz`, and `test_goldens.py` compares"
import gzip, hashlib, io, json, math, re, tempfile
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path

import fastai, numpy as np, torch
from fastai.callback.core import Callback, CancelFitException
from fastai.callback.mixup import MixUp
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.torch_core import set_seed
from helpers import CPUMixedPrecision, class_data, dls_of, mlp, on_two_ranks
from selback.all import (BatchLossFilterCallback, DropEasyCallback, FavorHardCallback, ImportanceSamplingCallback, InfoBatchCallback, PrioritizedSamplingCallback, RandomSubsetCallback,
    SelectiveBackpropCallback, SeTaCallback, StaleLossCallback, TopLossCallback)
from torch import distributed as dist, nn

here = Path(__file__).parent
file = here/'goldens.json.gz'
N,VALID,BS,EPOCHS = 132,32,16,4 # the last of an epoch's 9 batches has 4 items, and of a rank's 2
COLUMNS = ['fit','epoch','step','seen','kept','trained','scored','loss_share','full_loss']

METHODS = dict(batch_loss_filter=partial(BatchLossFilterCallback, .5),
    selective_backprop=partial(SelectiveBackpropCallback, beta=1, hist_size=64),
    composer=partial(SelectiveBackpropCallback, beta=1, gather=False), stale_loss=partial(StaleLossCallback, beta=1, n=2, hist_size=64),
    stale_batchwise=partial(StaleLossCallback, beta=1, n=2, gather=False), favor_hard=partial(FavorHardCallback, beta=1),
    drop_easy=partial(DropEasyCallback, .6, .6, max_rest=2), prioritized_sampling=partial(PrioritizedSamplingCallback, warmup=1, correct=.5),
    top_loss=partial(TopLossCallback, .45), tails=partial(TopLossCallback, .3, also_bottom=.2),
    random_subset=partial(RandomSubsetCallback, .45), random_before=partial(RandomSubsetCallback, .5, before_loading=True),
    importance_sampling=partial(ImportanceSamplingCallback, presample=2, tau=.01, score='loss'), info_batch=partial(InfoBatchCallback, .5),
    seta=partial(SeTaCallback, .2, 3, .6))
WAIT = 'selective_backprop','stale_loss','importance_sampling' # their items wait for a full batch by default
BY_MEMORY = 'favor_hard','drop_easy','prioritized_sampling','info_batch','seta' # they take no option that is about batches
BEFORE = *BY_MEMORY,'random_before' # they choose before loading only

def takes(method, variant):
    "Is there such a case?"
    if variant=='gather': return method not in (*WAIT, 'composer', 'stale_batchwise', *BEFORE) # with `gather=True` they are among the others
    if variant=='one_pass': return method not in (*BEFORE, 'importance_sampling')
    return True

def waits(method, variant):
    "Do chosen items wait for a full batch? With a single pass they can't"
    return variant=='gather' or variant!='one_pass' and method in WAIT

VARIANTS = dict(plain={}, gather=dict(gather=True), mixup={}, bf16={}, ranks={}, resume={}, interrupt=dict(interrupt=3),
    frozen={}, one_pass=dict(passes=1))
CASES = [(m,v) for m in METHODS for v in VARIANTS if takes(m, v)]

class Head(nn.Module):
    "Does not look at the last column, the item's number"
    def __init__(self): super().__init__(); self.net = mlp()
    def forward(self, x): return self.net(x[:,:4])

def numbered_data(n):
    "Items that end in their number in the training set; a fifth of the labels are wrong"
    x,y = class_data(VALID+n)
    y[::5] = (y[::5]+1)%3
    return torch.cat([x, torch.arange(-VALID, n)[:,None].float()], 1),y

def splitter(model):
    ps = list(model.parameters())
    return [ps[:2], ps[2:]]

def numbered_learner(cbs, n=N, bs=BS, model=Head, lr=2e-2, **kwargs):
    set_seed(0)
    dls = dls_of(*numbered_data(n), bs=bs, n_valid=VALID)
    return Learner(dls, model(), loss_func=CrossEntropyLossFlat(), cbs=cbs, splitter=splitter, lr=lr, **kwargs)

class NumberedMixUp(MixUp):
    "Knows which items it mixes"
    name = 'mix_up'
    def before_batch(self):
        self.numbers = numbers_of(self.x)
        super().before_batch()

class Notes(Callback):
    "Notes each step, which a cancelled batch is not: epoch, number of the loader's batch, learning rate, items, and the weights after it"
    order,run_valid = 20,False
    def __init__(self): self.steps = []
    def after_loss(self):
        mixed = next((cb for cb in self.learn.cbs if isinstance(cb, MixUp)), None)
        self.begun = [self.epoch, self.iter, float(self.opt.hypers[-1]['lr']), mixed.numbers if mixed else numbers_of(self.x)]
    def after_step(self): self.steps.append([*self.begun, hash_of(self.model)[:12], size_of(self.model)])

class Events(Callback):
    "Notes the order of events, epoch by epoch, as fastai calls them and as the selection has the callbacks before it called"
    order,run_valid = -20,False
    def __init__(self): self.epochs,self.in_train = [],False
    def __call__(self, event_name):
        if event_name=='before_train':
            self.epochs.append([])
            self.in_train = True
        if self.in_train: self.epochs[-1].append(f'{event_name} {self.learn.iter}' if 'batch' in event_name else event_name)
        if event_name=='after_train': self.in_train = False

class StopAfter(Callback):
    order = 70
    def __init__(self, epochs): self.epochs = epochs
    def after_epoch(self):
        if self.epoch+1==self.epochs: raise CancelFitException

def numbers_of(x): return x[:,-1].long().tolist()

def hash_of(model):
    "Of all weights and statistics, as bytes"
    return hashlib.sha1(b''.join(v.cpu().numpy().tobytes() for v in model.state_dict().values())).hexdigest()

def short_hash(text): return hashlib.sha1(text.encode()).hexdigest()[:12]

def size_of(model):
    "The sum of the absolute weights, but for biases: before BatchNorm their gradient is nothing but rounding errors, which Adam scales up"
    return round(float(sum(p.detach().double().abs().sum() for p in model.parameters() if p.ndim>1)), 6)

def rows_of(stats):
    def digits(v): return None if math.isnan(v) else round(float(v), 6)
    return [[*map(int, row[:7]), *map(digits, row[7:])] for row in stats[COLUMNS].itertuples(index=False)]

@contextmanager
def one_thread():
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    try: yield
    finally: torch.set_num_threads(n)

def trained(learn, cbs=(), **kwargs):
    with learn.no_bar(),learn.no_logging(): learn.fit_one_cycle(EPOCHS, cbs=list(cbs), **kwargs)
    return learn

def fit(make, variant):
    "The learners of a case, in order, after their training"
    cbs = dict(mixup=[NumberedMixUp], bf16=[CPUMixedPrecision]).get(variant, [])
    learn = numbered_learner([*(o() for o in cbs), make(), Notes(), Events()], bs=BS//2 if variant=='ranks' else BS)
    if variant=='frozen': learn.freeze()
    if variant!='ranks': return [trained(learn)]
    set_seed(dist.get_rank()) # their own random numbers, but the same weights
    with learn.distrib_ctx(sync_bn=False): return [trained(learn)]

def stopped(make, epochs):
    "A learner that was stopped after some epochs, and one that went on from its files"
    first = trained(numbered_learner([make(), Notes(), Events()]), [StopAfter(epochs)])
    then = numbered_learner([make(), Notes(), Events()])
    saved = io.BytesIO()
    torch.save(dict(model=first.model.state_dict(), opt=first.opt.state_dict(), selection=first.selection.state_dict()), saved)
    saved.seek(0)
    state = torch.load(saved, weights_only=False)
    then.model.load_state_dict(state['model'])
    then.create_opt()
    then.opt.load_state_dict(state['opt'])
    then.selection.load_state_dict(state['selection'])
    set_seed(9)
    return [first, trained(then, start_epoch=epochs)]

def run(method, variant):
    "What happens in a case"
    said,make = io.StringIO(),partial(METHODS[method], **VARIANTS[variant], warmup=1, auto=False, seed=3)
    with one_thread(),redirect_stdout(said):
        # items that wait are compared in the first epoch that chooses; the others may have chosen before they stop
        learns = stopped(make, 1 if waits(method, variant) else 2) if variant=='resume' else fit(make, variant)
    return dict(method=method, variant=variant, rows=[row for o in learns for row in rows_of(o.selection.stats)],
        steps=[step for o in learns for step in o.notes.steps], weights=hash_of(learns[-1].model),
        events=[short_hash(' '.join(epoch)) for o in learns for epoch in o.events.epochs],
        size=size_of(learns[-1].model), text=re.sub(r'\d+', '#', said.getvalue()))

def run_on_ranks():
    "What happens in each case in each of two processes, by case"
    with tempfile.TemporaryDirectory() as folder:
        on_two_ranks(partial(run_as_rank, out := Path(folder)), out)
        ranks = [json.loads((out/f'{rank}.json').read_text()) for rank in range(2)]
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}

def run_as_rank(out, rank):
    "Train all cases of two processes in one of them"
    from fastai.distributed import DistributedDL
    def on_cpu(self, t, rank):
        t = torch.LongTensor(t)
        dist.broadcast(t, rank)
        return t.tolist()
    DistributedDL._broadcast = on_cpu # fastai's needs a GPU
    cases = {name_of(*case): run(*case) for case in CASES if case[1]=='ranks'}
    (out/f'{rank}.json').write_text(json.dumps(cases))

def environment():
    "What the last bits of a loss may depend on"
    info = Path('/proc/cpuinfo')
    cpu = dict(re.findall(r'^(model name|cpu family|model)\s*: (.*)$', info.read_text() if info.exists() else '', flags=re.M))
    with one_thread():
        return dict(torch=torch.__version__, fastai=fastai.__version__, numpy=np.__version__, cpu=cpu,
            instructions=torch.backends.cpu.get_cpu_capability(), threads=torch.get_num_threads())

def name_of(method, variant): return f'{method}-{variant}'

def write():
    "Run all cases and write the file"
    cases = {name_of(*case): [run(*case)] for case in CASES if case[1]!='ranks'} | run_on_ranks()
    text = json.dumps(dict(environment=environment(), cases=cases), separators=(',',':'), sort_keys=True)
    file.write_bytes(gzip.compress(text.encode(), mtime=0))

def read():
    "The environment that was written, and by case what happened in each process"
    saved = json.loads(gzip.decompress(file.read_bytes()))
    return saved['environment'],saved['cases']

if __name__=='__main__': write()
