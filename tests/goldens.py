"""Does training do, step by step, what it did at another commit? `make goldens` holds the files as they are against it

What is written are hashes of weights and what is chosen by them, which another processor rounds otherwise: both commits
are run on one machine. A change that is meant to be one has a line in `EXCEPTIONS`, for as long as it is needed."""
import argparse, hashlib, io, json, math, os, re, subprocess, sys, tempfile
from contextlib import contextmanager, redirect_stdout
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import torch
from fastai.callback.core import Callback, CancelFitException
from fastai.callback.mixup import MixUp
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.torch_core import set_seed
from fastcore.basics import patch
from helpers import CPUMixedPrecision, class_data, dls_of, mlp, on_two_ranks
from selback.all import (BatchLossFilterCallback, DropEasyCallback, FavorHardCallback, ImportanceSamplingCallback,
    InfoBatchCallback, PrioritizedSamplingCallback, RandomSubsetCallback, SelectiveBackpropCallback, SeTaCallback,
    StaleLossCallback, TopLossCallback)
from selback.callback.report import SelectionReport
from torch import distributed as dist, nn

root = Path(__file__).resolve().parents[1]
N,VALID,BS,EPOCHS = 132,32,16,4 # the last of an epoch's 9 batches has 4 items, and of a rank's 2
COLUMNS = ['fit','epoch','step','seen','kept','trained','scored','loss_share','full_loss']

# Cases
METHODS = dict(
    batch_loss_filter=partial(BatchLossFilterCallback, .5),
    selective_backprop=partial(SelectiveBackpropCallback, beta=1, hist_size=64),
    composer=partial(SelectiveBackpropCallback, beta=1, gather=False),
    stale_loss=partial(StaleLossCallback, beta=1, n=2, hist_size=64),
    stale_batchwise=partial(StaleLossCallback, beta=1, n=2, gather=False),
    favor_hard=partial(FavorHardCallback, beta=1),
    drop_easy=partial(DropEasyCallback, .6, .6, max_rest=2),
    prioritized_sampling=partial(PrioritizedSamplingCallback, warmup=1, correct=.5),
    top_loss=partial(TopLossCallback, .45),
    tails=partial(TopLossCallback, .3, also_bottom=.2),
    random_subset=partial(RandomSubsetCallback, .45),
    random_before=partial(RandomSubsetCallback, .5, before_loading=True),
    importance_sampling=partial(ImportanceSamplingCallback, presample=2, tau=.01, score='loss'),
    info_batch=partial(InfoBatchCallback, .5),
    seta=partial(SeTaCallback, .2, 3, .6))

VARIANTS = dict(plain={}, gather=dict(gather=True), mixup={}, bf16={}, ranks={}, resume={}, interrupt=dict(interrupt=3),
    frozen={}, one_pass=dict(passes=1))

WAIT = 'selective_backprop','stale_loss','importance_sampling' # their items wait for a full batch by default
BY_MEMORY = 'favor_hard','drop_easy','prioritized_sampling','info_batch','seta' # they take no option about batches
BEFORE = *BY_MEMORY,'random_before' # they choose before loading only
NOT_GATHERED = *WAIT,'composer','stale_batchwise',*BEFORE # what gathers if it can is a case without `gather=True`

def takes(method, variant):
    "Is there such a case?"
    if variant=='gather': return method not in NOT_GATHERED
    if variant=='one_pass': return method not in (*BEFORE, 'importance_sampling')
    return True

def waits(method, variant):
    "Do chosen items wait for a full batch? With a single pass they can't"
    if variant=='gather': return True
    return variant!='one_pass' and method in WAIT

CASES = [(method,variant) for method in METHODS for variant in VARIANTS if takes(method, variant)]

def name_of(method, variant): return f'{method}-{variant}'

# Items and learners
class Head(nn.Module):
    "Does not look at the last column, the item's number"
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x): return self.net(x[:,:4])

def numbered_data(n):
    "Items that end in their number in the training set; a fifth of the labels are wrong"
    x,y = class_data(VALID+n)
    y[::5] = (y[::5]+1)%3
    number = torch.arange(-VALID, n)[:,None].float()
    return torch.cat([x, number], 1),y

def numbers_of(x): return x[:,-1].long().tolist()

def splitter(model):
    params = list(model.parameters())
    return [params[:2], params[2:]]

def numbered_learner(cbs, n=N, bs=BS, model=Head, lr=2e-2, **kwargs):
    set_seed(0)
    dls = dls_of(*numbered_data(n), bs=bs, n_valid=VALID)
    loss_func = CrossEntropyLossFlat()
    return Learner(dls, model(), loss_func=loss_func, cbs=cbs, splitter=splitter, lr=lr, **kwargs)

# What happens in a step

class NumberedMixUp(MixUp):
    "Knows which items it mixes"
    name = 'mix_up'

    def before_batch(self):
        self.numbers = numbers_of(self.x)
        super().before_batch()

class Notes(Callback):
    "Notes each step, which a cancelled batch is not"
    order,run_valid = 20,False

    def __init__(self): self.steps = []

    def after_loss(self):
        "Epoch, number of the loader's batch, learning rate, items; with one pass those that it has chosen"
        mixed = next((cb for cb in self.learn.cbs if isinstance(cb, MixUp)), None)
        items = mixed.numbers if mixed else numbers_of(self.x)
        rows = self.learn.selection.current.rows
        if rows is not None: items = [items[row] for row in rows.tolist()]
        self.begun = [self.epoch, self.iter, float(self.opt.hypers[-1]['lr']), items]

    def after_step(self):
        "And the weights after it"
        self.steps.append([*self.begun, hash_of(self.model)[:12], size_of(self.model)])

class Events(Callback):
    "Notes the order of events, epoch by epoch, as fastai or the selection has the callbacks before it called"
    order,run_valid = -20,False

    def __init__(self): self.epochs,self.in_train = [],False

    def __call__(self, event_name):
        if event_name=='before_train':
            self.epochs.append([])
            self.in_train = True
        if self.in_train: self.epochs[-1].append(self.in_words(event_name))
        if event_name=='after_train': self.in_train = False

    def in_words(self, event_name): return f'{event_name} {self.learn.iter}' if 'batch' in event_name else event_name

class StopAfter(Callback):
    order = 70

    def __init__(self, epochs): self.epochs = epochs

    def after_epoch(self):
        if self.epoch+1==self.epochs: raise CancelFitException

def hash_of(model):
    "Of all weights and statistics, as bytes"
    arrays = [v.cpu().numpy() for v in model.state_dict().values()]
    return hashlib.sha1(b''.join(array.tobytes() for array in arrays)).hexdigest()

def short_hash(text): return hashlib.sha1(text.encode()).hexdigest()[:12]

def size_of(model):
    "The sum of the absolute weights, but for biases"
    # before BatchNorm the gradient of a bias is nothing but rounding errors, which Adam scales up
    sizes = (p.detach().double().abs().sum() for p in model.parameters() if p.ndim>1)
    return round(float(sum(sizes)), 6)

def rows_of(stats):
    def digits(v): return None if math.isnan(v) else round(float(v), 6)
    return [[*map(int, row[:7]), *map(digits, row[7:])] for row in stats[COLUMNS].itertuples(index=False)]

# Training
@contextmanager
def steadily():
    "On one thread, without what epochs took, which differs from run to run"
    n,cost = torch.get_num_threads(),SelectionReport.cost
    torch.set_num_threads(1)
    SelectionReport.cost = ''
    try: yield
    finally:
        torch.set_num_threads(n)
        SelectionReport.cost = cost

def trained(learn, cbs=(), **kwargs):
    with learn.no_bar(),learn.no_logging(): learn.fit_one_cycle(EPOCHS, cbs=list(cbs), **kwargs)
    return learn

def fit(make, variant):
    "The learner of a case, after its training"
    first = dict(mixup=[NumberedMixUp()], bf16=[CPUMixedPrecision()]).get(variant, [])
    learn = numbered_learner([*first, make(), Notes(), Events()], bs=BS//2 if variant=='ranks' else BS)
    if variant=='frozen': learn.freeze()
    if variant!='ranks': return trained(learn)

    set_seed(dist.get_rank()) # their own random numbers, but the same weights
    with learn.distrib_ctx(sync_bn=False): return trained(learn)

def through_a_file(state):
    saved = io.BytesIO()
    torch.save(state, saved)
    saved.seek(0)
    return torch.load(saved, weights_only=False)

def stopped(make, epochs):
    "A learner that was stopped after some epochs, and one that went on from its files"
    first = trained(numbered_learner([make(), Notes(), Events()]), [StopAfter(epochs)])
    then = numbered_learner([make(), Notes(), Events()])

    parts = dict(model=first.model, opt=first.opt, selection=first.selection)
    state = through_a_file({name: part.state_dict() for name,part in parts.items()})
    then.model.load_state_dict(state['model'])
    then.create_opt()
    then.opt.load_state_dict(state['opt'])
    then.selection.load_state_dict(state['selection'])

    set_seed(9)
    return [first, trained(then, start_epoch=epochs)]

def learners(method, variant):
    "Those of a case, in order, after their training"
    make = partial(METHODS[method], **VARIANTS[variant], warmup=1, seed=3)
    if variant!='resume': return [fit(make, variant)]
    # items that wait are compared in the first epoch that chooses; the others may have chosen before they stop
    return stopped(make, 1 if waits(method, variant) else 2)

def run(method, variant):
    "What happens in a case"
    said = io.StringIO()
    with steadily(),redirect_stdout(said): learns = learners(method, variant)
    epochs = [epoch for learn in learns for epoch in learn.events.epochs]
    return dict(method=method, variant=variant,
        rows=[row for learn in learns for row in rows_of(learn.selection.stats)],
        steps=[step for learn in learns for step in learn.notes.steps],
        weights=hash_of(learns[-1].model),
        events=[short_hash(' '.join(epoch)) for epoch in epochs],
        size=size_of(learns[-1].model),
        text=re.sub(r'\d+', '#', said.getvalue()))

# Two processes
def run_on_ranks():
    "What happens in each case in each of two processes, by case"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        on_two_ranks(partial(run_as_rank, out), out)
        ranks = [json.loads((out/f'{rank}.json').read_text()) for rank in range(2)]
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}

def run_as_rank(out, rank):
    "Train all cases of two processes in one of them"
    from fastai.distributed import DistributedDL
    @patch
    def _broadcast(self:DistributedDL, t, rank): # fastai's needs a GPU
        t = torch.LongTensor(t)
        dist.broadcast(t, rank)
        return t.tolist()

    cases = {name_of(*case): run(*case) for case in CASES if case[1]=='ranks'}
    (out/f'{rank}.json').write_text(json.dumps(cases))

# Two commits
# Deliberate changes: a pattern of case names -> why, in a sentence, and the fields that it exempts
EXCEPTIONS = {'random_subset-one_pass':
    ('With one pass and without scores the loss of a step is the mean of the batch.', ['full_loss'])}

def fields_of(case):
    "What is compared of a process, by name"
    epochs,batches,rates,items,hashes,_ = zip(*case['steps'])
    rows = zip(COLUMNS, zip(*case['rows']))
    return dict(rows, batches=[*zip(epochs, batches)], rates=rates, items=items, weights=[*hashes, case['weights']],
        size=case['size'], text=case['text'], events=case['events'])

def exempt(name):
    "The fields that a case may differ in"
    return {field for pattern,(_,fields) in EXCEPTIONS.items() if fnmatch(name, pattern) for field in fields}

def first_difference(a, b):
    "Number and values of the first entries that differ, or how many there are; numbers and texts as they are"
    if not isinstance(a, (tuple,list)): return a,b
    return next(((i,x,y) for i,(x,y) in enumerate(zip(a, b)) if x!=y), (len(a),len(b)))

def differences(name, before, after):
    "What processes do otherwise in a case: sentences"
    for rank,(a,b) in enumerate(zip(before, after, strict=True)):
        a,b = fields_of(a),fields_of(b)
        for field in sorted(a.keys()-exempt(name)):
            if a[field]!=b[field]: yield f'{name}, process {rank}, {field}: {first_difference(a[field], b[field])}'

def all_cases():
    "What happens in each process, by case"
    return {name_of(*case): [run(*case)] for case in CASES if case[1]!='ranks'} | run_on_ranks()

def as_read(cases): return json.loads(json.dumps(cases))

def git(*args): return subprocess.run(['git', *args], cwd=root, capture_output=True, check=True).stdout

def cases_at(commit):
    "What happened at another commit, by its own copy of this file; it is run once with each PyTorch"
    kind = f'{torch.__version__}-{torch.backends.cpu.get_cpu_capability()}'.replace(' ', '-')
    file = root/f'runs/goldens/{commit[:12]}-{kind}.json'
    if b'--write' not in git('show', f'{commit}:tests/goldens.py'):
        raise ValueError(f'goldens: got {commit[:12]}, wanted a commit whose tests/goldens.py can write what it does.')
    if not file.exists():
        with tempfile.TemporaryDirectory() as folder:
            files = git('archive', commit, 'selback', 'tests')
            subprocess.run(['tar', 'xf', '-', '-C', folder], input=files, check=True)
            file.parent.mkdir(parents=True, exist_ok=True)
            paths = os.pathsep.join([folder, f'{folder}/tests'])
            subprocess.run([sys.executable, 'tests/goldens.py', '--write', str(file)], cwd=folder, check=True,
                env={**os.environ, 'PYTHONPATH': paths})
    return json.loads(file.read_text())

def hold(commit):
    "Print what differs from a commit; gives how many differences there are"
    before = cases_at(commit)
    after = as_read(all_cases())
    found = [f'{name} is in one of them only' for name in sorted(before.keys() ^ after.keys())]
    for name in sorted(before.keys() & after.keys()): found += differences(name, before[name], after[name])
    print(*found, sep='\n')
    print(f'{len(before.keys() & after.keys())} cases, {len(found)} differences from {commit[:12]}')
    return len(found)

def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('commit', nargs='?', default='HEAD', help='what the files as they are are held against')
    parser.add_argument('--write', help='only write what happens, to this file')
    args = parser.parse_args()
    if args.write: Path(args.write).write_text(json.dumps(all_cases()))
    else: sys.exit(hold(git('rev-parse', args.commit).decode().strip())>0)

if __name__=='__main__': main()
