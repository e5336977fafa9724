"No part of a selection, and of what comes and goes with it, holds the learner or another callback"
import inspect
from functools import partial

import pytest, torch
from fastai.callback.core import Callback
from fastai.learner import Learner
from helpers import *

def below(o):
    "What an object holds: attributes, items, what a function closes over"
    if isinstance(o, dict): return [*o.keys(),*o.values()]
    if isinstance(o, (tuple,list,set,frozenset)): return list(o)
    if isinstance(o, partial): return [o.func,*o.args,*o.keywords.values()]
    if hasattr(o, '__self__'): return [o.__self__,getattr(o, '__func__', None)]
    if hasattr(o, '__code__'): return [*inspect.getclosurevars(o).nonlocals.values(),*(o.__defaults__ or ())]
    if hasattr(o, 'gi_frame'): return list(o.gi_frame.f_locals.values()) if o.gi_frame else []
    is_ours = type(o).__module__.startswith('selback')
    return list(getattr(o, '__dict__', {}).values()) if is_ours else []

def held(o, path, seen):
    "The paths from an object to a learner or a callback"
    if isinstance(o, (Learner,Callback)): return [path]
    if id(o) in seen or isinstance(o, (torch.Tensor,nn.Module,type,str)): return []
    seen[id(o)] = o
    return [found for part in below(o) for found in held(part, f'{path}.{type(part).__name__}', seen)]

def holders(cb):
    "The same for each part of a selection and of its companions"
    no_parts = '_learn','learn','loader','place' # which are the learner's, or an epoch's
    own = {id(o) for o in cb.companions}
    found = []
    for of in (cb, *cb.companions):
        parts = {name: o for name,o in vars(of).items() if name not in no_parts and id(o) not in own}
        found += [path for name,o in parts.items() for path in held(o, name, {})]
    return found

EVERYTHING = dict(track_items=True, interrupt=3, start=.01, end=.99, seed=0, warmup=0)
BATCHWISE = dict(gather=True, precision='bf16', scorer=mlp())
ONE_PASS = dict(passes=1, score='entropy')
TAKES_NO = {
    ImportanceSamplingCallback: ('gather','passes'),
    StaleLossCallback: ('score',),
    RandomSubsetCallback: ('score','scorer','precision')}

def settings_of(cls):
    "Options that make all of a method's parts, together and apart"
    ways = [BATCHWISE, ONE_PASS, {}] if issubclass(cls, BatchSelection) else [{}]
    return [EVERYTHING | way for way in ways]

SETTINGS = [(cls,kwargs) for cls in methods() for kwargs in settings_of(cls)]

class Look(Callback):
    "Notes what holds too much while an epoch trains"
    order,run_valid = 90,False

    def __init__(self): self.found = []

    def after_pred(self): self.found += holders(self.learn.selection)

def in_words(o): return o.__name__ if isinstance(o, type) else ','.join(o)

@pytest.mark.parametrize('cls,kwargs', by_path(SETTINGS), ids=in_words)
def test_no_part_holds_the_learner_or_a_callback(cls, kwargs):
    taken = {name: value for name,value in kwargs.items() if name not in TAKES_NO.get(cls, ())}
    look = Look()
    learn = quiet_fit(table_learner(n=84, cbs=[cls(**taken), look]), 2)
    assert not look.found
    assert not holders(learn.selection)

def test_what_is_held_is_noticed():
    class Part: __module__ = 'selback.part'
    cb = TopLossCallback()
    for way in (cb, [cb], dict(a=(cb,)), lambda: cb, cb.now, partial(print, cb), (lambda x=cb: x)):
        cb.scorer.part = Part()
        cb.scorer.part.way = way
        found = holders(cb)
        assert found
        assert all(path.startswith('scorer.') for path in found)
