"The house stands as it was drawn: no room reaches into another, no part holds the whole, nothing has grown too large"
import ast, inspect, json, re
from functools import partial
from pathlib import Path

import pytest, torch
from fastai.callback.core import Callback
from fastai.learner import Learner
from helpers import *

root = Path(__file__).parents[1]
FOREIGN = dict(_split='fastai: a batch becomes xb and yb', _set_device='fastai: a batch goes to where the model is', _do_epoch_validate='fastai: validation, by itself or replaced',
    _backward="fastai: a step's backward pass", _do_one_batch='fastai: a batch, forward and backward', _n_inp='fastai: how many inputs a batch has', _types='fastai: what a batch is made of', _broadcast='fastai: ranks agree on the order of items',
    _version='PyTorch: how often a tensor was changed', _buffers="PyTorch: a module's own", _modules="PyTorch: a module's own", _parameters="PyTorch: a module's own", _fields='Python: of a named tuple', _exit='Python: ends a process that was forked', _asdict='Python: of a named tuple', _replace='Python: of a named tuple',
    _dynamo='PyTorch: the compiler', _qualified_op_name='PyTorch: the name of an operation')

# no module reads or writes a private name of another
def private(name): return isinstance(name, str) and re.match('_[^_]', name)

def strangers(code):
    "Private names in `code` that are defined elsewhere, with their lines"
    tree = ast.parse(code)
    nodes = list(ast.walk(tree))
    own = {n.name for n in nodes if isinstance(n, (ast.FunctionDef,ast.ClassDef))} | {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    own |= {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store) and ast.unparse(n.value) in ('self','cls')}
    own |= {k.arg for n in nodes if isinstance(n, ast.Call) and ast.unparse(n.func).endswith('__dict__.update') for k in n.keywords}
    used = [(n.lineno, n.attr) for n in nodes if isinstance(n, ast.Attribute)]
    used += [(n.lineno, a.name) for n in nodes if isinstance(n, ast.ImportFrom) and n.module!='nbdev' for a in n.names]
    used += [(n.lineno, a.value) for n in nodes if isinstance(n, ast.Call) and re.search(r'\b(get|set|has|del)attr$', ast.unparse(n.func)) for a in n.args[:2] if isinstance(a, ast.Constant)]
    used += [(n.lineno, n.slice.value) for n in nodes if isinstance(n, ast.Subscript) and isinstance(n.slice, ast.Constant) and ast.unparse(n.value).endswith('__dict__')]
    return sorted((line, name) for line,name in used if private(name) and name not in own and name not in FOREIGN)

@pytest.mark.parametrize('folder', ['selback','tests','benchmarks','studies'])
def test_no_module_uses_a_private_name_of_another(folder):
    found = {f.relative_to(root).as_posix(): names for f in sorted((root/folder).rglob('*.py')) if f.name!='_modidx.py' and (names := strangers(f.read_text(encoding='utf-8')))}
    assert not found

def test_strangers_are_noticed():
    code = "from a import _b\nclass C:\n    def f(self): self._mine = o._theirs; getattr(o, '_x'); o.__dict__['_y'] = 1; return self._base, o._split, o._mine, o.__len__\n"
    assert strangers(code)==[(1,'_b'), (3,'_base'), (3,'_theirs'), (3,'_x'), (3,'_y')]

# no part holds the learner or a callback
def below(o):
    "What an object holds: attributes, items, what a function closes over"
    if isinstance(o, dict): return [*o.keys(),*o.values()]
    if isinstance(o, (tuple,list,set,frozenset)): return list(o)
    if isinstance(o, partial): return [o.func,*o.args,*o.keywords.values()]
    if hasattr(o, '__self__'): return [o.__self__,getattr(o, '__func__', None)]
    if hasattr(o, '__code__'): return [*inspect.getclosurevars(o).nonlocals.values(),*(o.__defaults__ or ())]
    if hasattr(o, 'gi_frame'): return list(o.gi_frame.f_locals.values()) if o.gi_frame else []
    return list(getattr(o, '__dict__', {}).values()) if type(o).__module__.startswith('selback') else []

def held(o, path, seen):
    "The paths from an object to a learner or a callback"
    if isinstance(o, (Learner,Callback)): return [path]
    if id(o) in seen or isinstance(o, (torch.Tensor,nn.Module,type,str)): return []
    seen[id(o)] = o
    return sum((held(b, f'{path}.{type(b).__name__}', seen) for b in below(o)), [])

def holders(cb):
    "The same for each part of a callback"
    return sum((held(o, name, {}) for name,o in vars(cb).items() if name not in ('_learn','learn')), [])

EVERYTHING = dict(noise_quantile=.95, track_items=True, interrupt=3, start=.01, end=.99, auto=True, seed=0, warmup=0)
BATCHWISE = dict(gather=True, precision='bf16', scorer=ModelCopy(2), multiple_of=4, presample=2)
SETTINGS = [(cls, dict(EVERYTHING, **more)) for cls in methods() for more in ([BATCHWISE, dict(passes=1, score='entropy'), {}] if issubclass(cls, SelectionCallback) else [{}])]

@pytest.mark.measured
@pytest.mark.parametrize('cls,kwargs', SETTINGS, ids=lambda o: o.__name__ if isinstance(o, type) else ','.join(o))
def test_no_part_holds_the_learner_or_a_callback(cls, kwargs):
    if cls is ImportanceSamplingCallback: kwargs = {k: v for k,v in kwargs.items() if k not in ('gather','passes')}
    if cls is StaleLossCallback: kwargs = {k: v for k,v in kwargs.items() if k!='score'}
    found = []
    class Look(Callback):
        order,run_valid = 90,False
        def after_pred(self): found.extend(holders(self.learn.selection))
    learn = quiet_fit(table_learner(n=84, cbs=[cls(**kwargs), Look()]), 2)
    assert not found and not holders(learn.selection)

def test_what_is_held_is_noticed():
    class Part: __module__ = 'selback.part'
    cb = TopLossCallback()
    for way in (cb, [cb], dict(a=(cb,)), lambda: cb, cb.choose, partial(print, cb), (lambda x=cb: x)):
        cb.scorer.part = Part()
        cb.scorer.part.way = way
        assert holders(cb)==[p for p in holders(cb) if p.startswith('scorer.')]!=[]

# sizes
GIVEN = 'learn','recorder','bar' # fastai's and fastprogress's, which are made to be written

def written_outside(tree):
    "Assignments to attributes of what `self` holds, such as `self.part.number = 1`"
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, (ast.AugAssign,ast.AnnAssign)) else []
        for target in (o for t in targets for o in (t.elts if isinstance(t, ast.Tuple) else [t])):
            part = getattr(target, 'value', None) if isinstance(target, ast.Attribute) else None
            if isinstance(part, ast.Attribute) and getattr(part.value, 'id', None)=='self' and part.attr not in GIVEN: yield ast.unparse(target)

@pytest.mark.parametrize('line,found', [('self.part.n = 1', ['self.part.n']), ('self.part.n += 1', ['self.part.n']), ('self.a,self.part.n = 1,2', ['self.part.n']),
    ('self.learn.xb = 1', []), ('self.n = 1', []), ('self.part.leave(1)', [])])
def test_writing_from_outside_is_noticed(line, found): assert list(written_outside(ast.parse(line)))==found

def test_each_attribute_has_one_writer():
    "A part is changed by its own verbs"
    found = {p.relative_to(root).as_posix(): names for p in sorted((root/'selback').rglob('*.py')) if (names := list(written_outside(ast.parse(p.read_text(encoding='utf-8')))))}
    assert not found
