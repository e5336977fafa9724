"Small learners that train in milliseconds, and the methods under test"
import inspect, os, random, signal, sys, time, traceback, warnings
from collections import Counter
from datetime import timedelta
from functools import partial
from queue import SimpleQueue

import numpy as np, pytest, torch
from fastai.callback.core import Callback
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.mixup import MixUp
from fastai.data.core import DataLoaders, TfmdDL
from fastai.learner import Learner
from fastai.losses import BCEWithLogitsLossFlat, CrossEntropyLossFlat, MSELossFlat
from fastai.torch_core import TensorCategory, TensorImage, default_device, set_seed
from fastai.vision.augment import aug_transforms
from fastcore.foundation import L
from IPython.core.formatters import HTMLFormatter
from selback.core.batches import Batch, as_tensors, map_tensors
from selback.callback.attach import known_methods
from selback.callback.learner import autocast_of, base_loss, split_batch, true_output
from selback.callback.loaders import ChosenWithin
from selback.all import *
from selback.bench.datasets import TensorItems
from torch import distributed as dist, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

def prune_easy(loss, prune=.5, generator=None): # `Chosen`
    "What InfoBatch loads by the last losses, in a plain loop"
    return include(loss, partial(mean_inclusion, prune=prune), 1., generator)

class Trail:
    "What a model or a loss appends to it stays, also where all that they hold is put back: nothing sees into a queue"
    def __init__(self): self._coming,self._come = SimpleQueue(),[]
    def append(self, o): self._coming.put(o)

    @property
    def seen(self):
        "All of it, as a list; not to be asked within a pass"
        while not self._coming.empty(): self._come.append(self._coming.get())
        return self._come

    def clear(self): self.seen.clear()
    def __deepcopy__(self, memo): return self

class CPUMixedPrecision(MixedPrecision):
    "fastai's mixed precision in bf16, which works on GPUs only, on a CPU"
    name = 'mixed_precision'

    def __init__(self): super().__init__('bf16')

    def before_fit(self):
        with warnings.catch_warnings():
            warnings.simplefilter('ignore') # that there is no GPU
            super().before_fit()
        self.autocast = torch.autocast('cpu', dtype=torch.bfloat16)

# Methods
class ByPlace(EpochMethod):
    "Loads what a function of the dataset indices that were drawn, and of `Now`, chooses"
    def __init__(self, found):
        super().__init__()
        self.found = found

    def choose(self, scores, now): return self.found(now.idx, now)

def pooled(
    n, # Batches
    cb, # Gathers
):
    "Have a selection score and choose from several batches together, as `ImportanceSampling` does"
    cb.method.presample = n
    return cb

def chosen_before_loading(cb, idxs):
    "What a selection chooses of the items of an epoch"
    return cb.method.choose(cb.losses_of(idxs), cb.now(idx=idxs, due=cb.memory.due(idxs, cb.method.max_rest)))

def scores_of(cb, xb, yb):
    "The scores of a batch by a selection's scoring pass"
    return cb.score(Batch(xb, yb))

def watch_choices(cb, note):
    "Have `note(batch, scores, losses, chosen)` called whenever a selection chooses from batches"
    score,choose,seen = cb.score,cb.choose,[]
    def score_and_keep(batch):
        seen[:] = batch,*score(batch)
        return seen[1:]
    def choose_and_note(scores, batch):
        chosen = choose(scores, batch)
        note(*seen, chosen)
        return chosen
    cb.score,cb.choose = score_and_keep,choose_and_note
    return cb

OWN_MODULES = 'selback.callback.methods',

def needs_nothing(cls):
    "Has each parameter of a class a default?"
    params = inspect.signature(cls).parameters.values()
    return all(p.default is not p.empty for p in params if p.kind!=p.VAR_KEYWORD)

def methods():
    "Every method of the package that needs nothing to choose by"
    ours = [cls for cls in known_methods().values() if cls.__module__ in OWN_MODULES]
    return [cls for cls in ours if needs_nothing(cls)]

def one_liner(cls): return next(name for name,method in known_methods().items() if method is cls)

# A method for each path that items take; what a law says of one, it says of all that take the same way
PATHS = dict(
    epoch=FavorHardCallback, # chosen before loading
    weighted_epoch=InfoBatchCallback, # with weights
    drawn_epoch=PrioritizedSamplingCallback, # with replacement
    batch=TopLossCallback, # chosen from each batch
    gathered=SelectiveBackpropCallback, # waits until a batch is full
    weighted_batch=ImportanceSamplingCallback, # drawn from several batches, with weights
    watched=WatchItemsCallback) # all train

def on_a_gpu(test):
    "A test that takes a GPU"
    return pytest.mark.usefixtures('gpu')(pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU')(test))

def slow(*values, **kwargs): return pytest.param(*values, marks=pytest.mark.slow, **kwargs)

def by_path(cases):
    "Cases that begin with a method, of which those are slow whose method stands for no path"
    every = [case if isinstance(case, tuple) else (case,) for case in cases]
    assert any(case[0] in PATHS.values() for case in every)
    return [pytest.param(*case) if case[0] in PATHS.values() else slow(*case) for case in every]

def mostly_slow(names, *fast):
    "Cases, of which those are slow that are not among `fast`"
    assert {*fast}<={*names}, {*fast}-{*names}
    return [name if name in fast else slow(name) for name in names]

def leaves_out(cls):
    "Does a method train on fewer items, or on others in their place?"
    return cls not in (PrioritizedSamplingCallback, EarlyLossSamplingCallback, BalancedSamplingCallback)

def does_score(cls):
    "Does a class of selections score batches?"
    return issubclass(cls, BatchSelection) and cls.of.scored

def goes_by_losses(cls):
    "Does a method, as it is by default, ask for the losses of items?"
    return cls not in (RandomSubsetCallback, BalancedSamplingCallback)

def full_epochs(cls, n):
    "The option by which a method begins with `n` epochs of all items; one that keeps early losses has one at least"
    return dict(after=max(1, n)) if cls is EarlyLossSamplingCallback else dict(warmup=n)

class LoaderBatches(Callback):
    "Notes each batch of the loader, before it is chosen from"
    order,run_valid = BatchSelection.order-1,False
    def before_train(self):
        cb = self.learn.selection
        if not isinstance(cb, BatchSelection) or cb is getattr(self, 'watched', None): return
        self.watched,turn = cb,cb.turn
        def noted(batch):
            self.note(batch.i, batch.xb, batch.yb)
            return turn(batch)
        cb.turn = noted
    def before_batch(self):
        if type(self.learn.dl) is not ChosenWithin: self.note(self.iter, self.xb, self.yb)
    def note(self, i, xb, yb): raise NotImplementedError

def gathers(selection): return isinstance(selection, BatchSelection) and selection.gathers

# Fits
def quiet_fit(learn, n_epoch=2, fit='fit', **kwargs):
    with learn.no_bar(),learn.no_logging(): getattr(learn, fit)(n_epoch, **kwargs)
    return learn

def trained_only(learn, n_epoch, bs=None, **kwargs):
    "A fit without validation, in batches of another size"
    learn._do_epoch_validate = lambda *args: None
    if bs: learn.dls.loaders[0] = learn.dls.train.new(bs=bs)
    return quiet_fit(learn, n_epoch, **kwargs)

# Small learners
def loaders_of(train, valid, bs=16, shuffle=True, drop_last=False, num_workers=0, persistent_workers=False, **kwargs):
    "Of two datasets"
    order = dict(shuffle=shuffle, drop_last=drop_last)
    workers = dict(num_workers=num_workers, persistent_workers=persistent_workers)
    of_train = TfmdDL(train, bs=bs, **order, **workers, **kwargs)
    return DataLoaders(of_train, TfmdDL(valid, bs=bs, num_workers=0, **kwargs))

def dls_of(x, y, n_valid=32, **kwargs):
    "The first items are for validation"
    return loaders_of(TensorDataset(x[n_valid:], y[n_valid:]), TensorDataset(x[:n_valid], y[:n_valid]), **kwargs)

def class_data(n=132, classes=3):
    x = torch.randn(n, 4)
    noisy = x[:,0]+.5*torch.randn(n)
    return x,noisy.mul(2).round().long().clamp(-1, classes-2)+1

def in_notebook(o):
    "The HTML that a notebook shows of it"
    return HTMLFormatter()(o)

def mlp(n_out=3, dropout=.3):
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, n_out))

def linear():
    "The same weights in whatever order tests run"
    set_seed(0)
    return nn.Linear(4, 3)

def cnn(n_out=3):
    conv = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()]
    return nn.Sequential(*conv, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, n_out))

def learner_on(dls, net=None, loss_func=None, **kwargs):
    "The small learner that all others are"
    return Learner(dls, net or mlp(), loss_func=loss_func or CrossEntropyLossFlat(), **kwargs)

def table_learner(seed=0, bs=16, drop_last=False, n=132, n_valid=32, **kwargs):
    "BatchNorm, dropout, and (without `drop_last`) a last batch of 4 items"
    set_seed(seed)
    dls = dls_of(*class_data(n), bs=bs, drop_last=drop_last, n_valid=n_valid)
    return learner_on(dls, lr=1e-2, **kwargs)

def short_learner(seed=0, **kwargs):
    "An epoch of four batches, the last of 4 items, and one batch of validation"
    return table_learner(seed, n=68, n_valid=16, **kwargs)

class Numbered(nn.Module):
    "Does not look at the last column"
    def __init__(self, net=None):
        super().__init__()
        self.net = net or mlp()

    def forward(self, x): return self.net(x[:,:4])

def numbered_learner(seed=0, n=132, bs=16, cbs=None, net=None, **kwargs):
    "The last input column is the item's number in the training set"
    set_seed(seed)
    x,y = class_data(n)
    number = torch.arange(n)-32.
    dls = dls_of(torch.cat([x, number[:,None]], 1), y, bs=bs, **kwargs)
    return learner_on(dls, Numbered(net), cbs=cbs, lr=1e-2)

def with_diary(cb, net=None, bs=32, **kwargs):
    "A hundred items, of which four are in the last batch"
    return numbered_learner(cbs=[cb, Diary()], net=net, bs=bs, **kwargs)

def numbers(x): return x[:,-1].long().tolist()

# What happens in a fit
class Diary(Callback):
    "Notes, behind the selection, the items, weights and losses of each batch, epoch by epoch"
    order,run_valid = 60,False

    def before_fit(self): self.epochs = []

    def before_train(self): self.epochs.append([])

    def after_loss(self):
        losses = cross_entropy(self.pred.detach(), self.y, reduction='none').tolist()
        weight = self.learn.selection.item_weight
        weights = [1.]*len(losses) if weight is None else weight.tolist()
        self.epochs[-1].append((numbers(self.x), weights, losses))

def reads_and_runs(learn, n_epoch):
    "How often each item is read, how often the model runs, and the diary's epochs; one before it fills the memory"
    read,runs = Counter(),[]

    class Counted(TensorDataset):
        def __getitem__(self, i):
            read[int(i)] += 1
            return super().__getitem__(i)

    learn.dls.train.dataset.__class__ = Counted
    learn.model.register_forward_hook(lambda *args: runs.append(1))
    trained_only(learn, 1)

    read.clear()
    runs.clear()
    epochs = trained_only(learn, n_epoch).diary.epochs
    return read,len(runs),epochs

def items_of(epoch): return [i for batch,*_ in epoch for i in batch]

def by_hand(net, x, y, epochs, lr, ema=.9):
    "Train on the same batches in plain PyTorch; what a memory has to say of each item then"
    nan = float('nan')
    table = [dict(loss=nan, ewma=nan, seen=0, picked=0, rested=0) for _ in y]
    opt = torch.optim.SGD(net.parameters(), lr)

    def note(item, losses): # of its rows in a batch
        loss = losses[-1]
        average = ema*item['ewma']+(1-ema)*loss if item['seen'] else loss
        n = len(losses)
        item.update(loss=loss, ewma=average, seen=item['seen']+n, picked=item['picked']+n, rested=0)

    for epoch in epochs:
        for batch,weight,_ in epoch:
            losses = cross_entropy(net(x[batch]), y[batch], reduction='none')
            opt.zero_grad()
            (losses*torch.tensor(weight)).mean().backward()
            opt.step()
            for i in {*batch}: note(table[i], [loss for j,loss in zip(batch, losses.tolist()) if j==i])
        for item in table: item['rested'] += 1
    return table

class Spy(Callback):
    "Notes, behind the selection, which items train"
    order,run_valid = 20,False

    def before_fit(self): self.batches = []

    def after_loss(self): self.batches.append(numbers(self.x))

# Other learners
def image_learner(seed=0, n=52, **kwargs):
    "`TensorImage` and fastai augmentation"
    set_seed(seed)
    x,y = torch.rand(n, 3, 12, 12),torch.randint(0, 3, (n,))
    train,valid = TensorItems(x[16:], y[16:], 0),TensorItems(x[:16], y[:16], 1)
    augment = aug_transforms(max_rotate=5.)
    dls = DataLoaders.from_dsets(train, valid, bs=8, num_workers=0, after_batch=augment, drop_last=False)
    return learner_on(dls, cnn(), lr=1e-2, **kwargs)

def regression_learner(seed=0):
    from fastai.test_utils import synth_learner
    set_seed(seed)
    return synth_learner(n_trn=5, n_val=1)

# What a fit must leave alone
def weights(learn): return {k: v.clone() for k,v in learn.model.state_dict().items()}

def random_states():
    _,key,*more = np.random.get_state()
    return random.getstate(),key.tobytes(),more,torch.get_rng_state().numpy().tobytes()

def alike(a, b):
    "Are nested values equal, NaN as well?"
    if isinstance(a, torch.Tensor): return torch.equal(a.nan_to_num(-1), b.nan_to_num(-1))
    if isinstance(a, dict): return a.keys()==b.keys() and all(alike(a[k], b[k]) for k in a)
    if isinstance(a, (list,tuple)): return len(a)==len(b) and all(map(alike, a, b))
    return a==b

def same(a, b): return a.keys()==b.keys() and all(torch.equal(a[k], b[k]) for k in a)

# Two processes
def on_two_ranks(work, out, seconds=180):
    "Call `work(rank)` in two forks of this process, which has imported all there is; what takes longer is a deadlock"
    children = [os.fork() or as_rank(work, rank, out) for rank in range(2)]
    hanging = wait_for(children, time.time()+seconds)
    for child in hanging:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

    ends = [last_words(out, rank) for rank in range(2)]
    assert not hanging and ends==['done']*2, f'{len(hanging)} of 2 processes hang: {ends}'

def wait_for(children, until):
    "The processes that have not ended by a time"
    running = set(children)
    while running and time.time()<until:
        done = [child for child in running if os.waitpid(child, os.WNOHANG)[0]]
        running -= set(done)
        if not done: time.sleep(.02)
    return running

def report_of(out, rank): return out/f'rank_{rank}.txt'

def last_words(out, rank):
    report = report_of(out, rank)
    return report.read_text() if report.exists() else 'died'

def join_group(out, rank):
    "Become one of two processes that find each other by a file"
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE='2', LOCAL_WORLD_SIZE='2')
    os.environ.update(MASTER_ADDR='localhost', MASTER_PORT='0', ACCELERATE_USE_CPU='1')
    default_device(False)
    torch.set_num_threads(1)
    meeting = f'file://{out}/store'
    dist.init_process_group('gloo', init_method=meeting, rank=rank, world_size=2, timeout=timedelta(seconds=60))

def save_coverage():
    "Of a process that ends without Python's own farewell"
    if 'coverage' not in sys.modules: return
    measured = sys.modules['coverage'].Coverage.current()
    if measured: measured.save()

def as_rank(work, rank, out):
    "Be one of two processes that train together, and nothing else after it"
    said = 'done'
    try:
        join_group(out, rank)
        work(rank)
        dist.destroy_process_group()
    except BaseException: said = traceback.format_exc()
    finally:
        report_of(out, rank).write_text(said)
        save_coverage()
        os._exit(0)
