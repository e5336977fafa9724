"Ctrl-C at any line of the package: nothing is left open, and the next fit is whole"
import linecache, os, random, sys, threading, warnings
from pathlib import Path

import pytest, selback, torch
from helpers import *
from selback.callback.watching import WatchItemsCallback

package = str(Path(selback.__file__).parent)
n_interrupts = int(os.environ.get('SELBACK_INTERRUPTS', 8)) # of each kind of method

class AtLine:
    "Interrupts before the `n`-th line of the package that is run; without a number, only counts them"
    def __init__(self, n=None): self.n,self.seen,self.where = n,0,None
    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self.call)
        return self
    def __exit__(self, *args): sys.settrace(self.before)
    def call(self, frame, event, arg):
        if frame.f_code.co_filename.startswith(package): return self.line
    def line(self, frame, event, arg):
        if event!='line': return self.line
        self.seen += 1
        if self.seen!=self.n: return self.line
        file,n = frame.f_code.co_filename,frame.f_lineno
        self.where = f'{Path(file).name}:{n}: {linecache.getline(file, n).strip()}'
        raise KeyboardInterrupt

def learner(seed=0): return table_learner(seed, n=64, n_valid=16) # three batches, and one of validation

KINDS = {one_liner(cls): (lambda cls=cls: lively(cls)) for cls in methods()} | dict(
    gathered=lambda: TopLossCallback(.5, warmup=0, gather=True),
    one_pass=lambda: TopLossCallback(.5, warmup=0, passes=1),
    smoothed=lambda: DropEasyCallback(warmup=0, ema=.5, max_rest=1),
    ahead=lambda: SelectiveBackpropCallback(warmup=0, scorer=Ahead(2)),
    watches=WatchItemsCallback,
    remembers=lambda: SelectiveBackpropCallback(warmup=0, track_items=True))
LIVELY = {SelectiveBackpropCallback: dict(beta=.5), StaleLossCallback: dict(beta=.5), InfoBatchCallback: dict(delta=1.),
    ImportanceSamplingCallback: dict(tau=0, presample=2)}
def lively(cls): return cls(warmup=0, seed=0, **LIVELY.get(cls, {})) # selects in its first epoch

def lines_of(make):
    "How many lines of the package a fit of two epochs runs"
    learn = quiet_fit(learner().add_cb(make()), 2)
    with AtLine() as counted: quiet_fit(learn, 2)
    return counted.seen

def interrupted(learn, n):
    "Where a fit was interrupted; None if it ran to its end"
    try:
        with AtLine(n) as at: quiet_fit(learn, 2)
    except KeyboardInterrupt: return at.where

def check_nothing_open(learn, where, line=''):
    """Python leaves a `with` line before it closes what it opened: one interrupted there stays open until a fit begins.
    So does `no_grad` within `deepcopy` of tensors, which asks the package how to close"""
    may_be_open = '_grad' in line or 'Tensor.__deepcopy__' in line
    assert torch.is_grad_enabled() or may_be_open, where
    for thread in [t for t in threading.enumerate() if t.name=='selback']: thread.join(10) # it ends what it has begun
    assert 'selback' not in {t.name for t in threading.enumerate()}, where
    assert learn.loss_func.func.reduction=='mean', where

def check_one_mode(learn, where):
    "An interrupt within what puts the flags of modules back may leave some open until a fit begins"
    assert len({m.training for m in learn.model.modules()})==1, where

def check_whole(learn, where):
    "A fit goes through, and what the report or the memory says of it is whole"
    if learn.selection.is_watching: return check_watched(learn, where)
    stats = learn.selection.stats
    assert len(quiet_fit(learn, 2).recorder.values)==2, where
    now = learn.selection.stats
    assert now.iloc[:len(stats)].equals(stats), where
    own = now.iloc[len(stats):]
    assert own.fit.nunique()==1 and own.epoch.tolist()==sorted(own.epoch) and set(own.epoch)=={0,1}, where
    assert (own.trained>0).sum()==len(learn.recorder.losses), where

def check_watched(learn, where):
    seen = learn.selection.memory.seen.clone()
    assert len(quiet_fit(learn, 2).recorder.values)==2, where
    assert (learn.selection.memory.seen-seen==2).all(), where

ON_PATHS = [name for name in KINDS if known_methods().get(name) in PATHS.values()]

@pytest.mark.law(6)
@pytest.mark.parametrize('kind', mostly_slow(KINDS, *ON_PATHS, 'ahead', 'watches'))
def test_an_interrupt_never_breaks_the_next_fit(kind):
    make,found = KINDS[kind],[]
    lines,draw = lines_of(make),random.Random(kind)
    learn = learner().add_cb(make())
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        quiet_fit(learn, 1)
        for _ in range(n_interrupts):
            found.append(interrupted(learn, draw.randrange(1, lines)))
            check_nothing_open(learn, found[-1], line=found[-1] or '')
            check_whole(learn, found[-1])
            check_nothing_open(learn, found[-1])
            check_one_mode(learn, found[-1])
    assert sum(where is not None for where in found)>n_interrupts//2

@pytest.mark.parametrize('cls', [FavorHardCallback, TopLossCallback, WatchItemsCallback], ids=one_liner)
def test_gradients_that_an_interrupt_left_off_are_on_in_the_next_fit(cls):
    learn = learner().add_cb(cls())
    with torch.no_grad():
        quiet_fit(learn, 1)
        assert torch.is_grad_enabled()
