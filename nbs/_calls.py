"""Every call with its options and defaults, for the page that `_docs.py` makes of it

All of it is read from signatures, docstrings and the comments beside parameters."""
import inspect, re
from collections import namedtuple
from inspect import Parameter

from fastai.learner import Learner, Recorder
from fastcore.docments import docments

import selback.all
from selback.bench.command import run_study
from selback.bench.compare import compare
from selback.bench.race import race
from selback.callback.attach import Attached, known_methods
from selback.callback.batch import BatchSelection
from selback.callback.selection import EpochSelection, Selection
from selback.core.method import BatchMethod, Inclusion
from selback import functional

# A call as it is written, what it does, where it is defined, and its name there
Call = namedtuple('Call', 'written does module name')

OWN_MODULES = 'selback.callback.methods', # of the methods' callbacks

def is_ours(o): return (getattr(o, '__module__', None) or '').startswith('selback.')

def method_of(cls):
    "What has the options of a class that are its own: of a method's callback, the method"
    return getattr(cls, 'of', None) or cls

def parameters(o):
    "The parameters that a function or class names itself, and whether it takes others"
    params = [p for p in inspect.signature(o).parameters.values() if p.name!='self']
    f = inspect.unwrap(method_of(o).__init__ if inspect.isclass(o) else o)
    if not hasattr(f, '__code__'): return params,False # a named tuple
    code = f.__code__
    names = code.co_varnames[:code.co_argcount+code.co_kwonlyargcount]
    own = [p for p in params if p.name in names or p.kind==Parameter.VAR_POSITIONAL]
    others = [p for p in params if p not in own]
    is_refused = (docments(f, args_kwargs=True).get('kwargs') or '').startswith('Refused')
    return own,bool(others) and is_ours(f) and not is_refused

def in_code(default):
    "A default as it is written"
    if isinstance(default, float): return f'{default:g}'
    return re.sub(r'<(?:\w+\.)*(\w+) object(?: at 0x\w+)?>', r'\1()', repr(default))

def written(p):
    "A parameter with its default"
    star = '*' if p.kind==Parameter.VAR_POSITIONAL else ''
    return f'{star}{p.name}' if p.default is p.empty else f'{p.name}={in_code(p.default)}'

def in_brackets(o):
    "Options and their defaults, as they are written in a call"
    own,has_others = parameters(o)
    return ', '.join([*map(written, own), *['...']*has_others])

def call(before, o, name):
    "The call of a function, a class, a method or a property"
    f = getattr(o, 'fget', o)
    brackets = '' if isinstance(o, property) else f'({in_brackets(f)})'
    does = (inspect.getdoc(f) or '').partition('\n')[0]
    return Call(f'{before}{name}{brackets}', does, f.__module__, getattr(f, '__qualname__', name))

def of_class(cls, before, is_wanted, owner=None):
    "Calls of what a class has got from the package"
    for name,o in vars(cls).items():
        f = getattr(o, 'fget', o)
        if name[0]=='_' or not is_ours(f) or not is_wanted(name, f): continue
        yield call(before, o, name)._replace(name=f'{owner or cls.__name__}.{name}')

# Groups of calls
def is_own(name, cls): return cls.__module__ in OWN_MODULES and name in vars(Learner)

def methods():
    "Methods by the name of their one-liner"
    return {name: cls for name,cls in known_methods().items() if is_own(name, cls)}

def one_liners():
    "The methods, each as a call on a learner, with the options of its class"
    for name,cls in methods().items():
        does = inspect.getdoc(vars(Learner)[name]).partition('\n')[0]
        yield call('learn.', cls, name)._replace(does=does, module=cls.of.__module__, name=f'Learner.{name}')

TELLS = 'memory','state_dict','load_state_dict','stats' # beside its views

def on_selection():
    "What a learner's selection tells, and how it is taken off"
    yield from of_class(Learner, 'learn.', lambda name, f: name in ('full_batches','selection'))
    for cls in Attached,Selection:
        yield from of_class(cls, 'learn.selection.', lambda name, f: name in TELLS and f.__doc__)
    def is_view(name, f): return f.__module__.startswith(('selback.views.','selback.clean.'))
    for cls in Attached,Selection,selback.all.EarlyLossSamplingCallback:
        yield from of_class(cls, 'learn.selection.', is_view)
    yield from of_class(Recorder, 'learn.recorder.', lambda name, f: True)

def called_on(cls):
    "What a user calls that a class has, by its names"
    owned = [call.name.rpartition('.') for call in GROUPS['The selection of a learner']]
    return [name for owner,_,name in owned if owner==cls.__name__]

def named(folder, *others):
    "Functions and classes of `selback.all` that a folder of modules has, but for those of other modules"
    for name in selback.all.__all__:
        o = getattr(selback.all, name)
        is_there = is_ours(o) and f'{o.__module__}.'.startswith(f'selback.{folder}.') and o.__module__ not in others
        if is_there and (inspect.isfunction(o) or inspect.isclass(o)): yield call('', o, name)

def comparing():
    "What runs methods side by side"
    yield call('', compare, 'compare')
    yield call('', race, 'race')

in_a_loop = ('chosen','MemorySampler','SelectiveBackprop','BatchLossFilter','TopLoss','RandomSubset',
    'ImportanceSampling','FavorHard','DropEasy','InfoBatch','PrioritizedSampling','SeTa','StaleLoss','EarlyLossSampling',
    'BalancedSampling')

def groups():
    "All calls, by the heading that they stand under"
    callbacks = [cls.__name__ for cls in methods().values()]
    return {
        'Methods': list(one_liners()),
        'The selection of a learner': list(on_selection()),
        'Comparisons': list(comparing()),
        'Methods as objects, and what goes with them': list(named('methods')),
        'Methods as callbacks': [o for o in named('callback') if o.module in OWN_MODULES and o.name in callbacks],
        'Pictures and numbers': [*named('views'), *named('clean')],
        'For a method of your own': [*named('core.method'), *named('callback', *OWN_MODULES)],
        'In a plain PyTorch loop': [call('', getattr(functional, name), name) for name in in_a_loop],
        'Its parts': list(named('core', 'selback.core.method'))}

# Options
def who_takes(names, all_names):
    "The methods that take an option, in few words"
    if len(names)==len(all_names): return 'all methods'
    others = [name for name in all_names if name not in names]
    listed = names if len(names)<=len(others) else others
    text = ', '.join(f'`{name}`' for name in listed)
    return text if listed is names else f'all but {text}'

def shared_options():
    "Each option that methods hand on: as it is written, what it is, and who takes it"
    comments = {}
    for cls in BatchMethod,Inclusion,EpochSelection,BatchSelection,Selection: comments |= docments(cls.__init__)
    taken = {}
    for name,cls in methods().items():
        own = [p.name for p in parameters(cls)[0]]
        for p in inspect.signature(cls).parameters.values():
            is_shared = p.name not in own and comments.get(p.name)
            if is_shared: taken.setdefault((p.name, written(p)), []).append(name)
    for (name,option),names in sorted(taken.items(), key=lambda o: -len(o[1])):
        yield option,comments[name],who_takes(names, list(methods()))

def command_options():
    "Each option of `selback-compare`: as it is written, and what it is"
    comments = docments(run_study)
    for p in inspect.signature(run_study).parameters.values():
        has_default = p.default is not None and p.default is not False
        yield f"--{p.name}{f' {p.default}' if has_default else ''}",' '.join(comments[p.name].split())

# Read before notebooks run, which define names of the package again
GROUPS,OPTIONS = groups(),list(shared_options())

# The page
def row(*cells):
    "A row of a table; a comment of several lines becomes one"
    texts = [' '.join(cell.split()).replace('|', '\\|') for cell in cells]
    return f"| {' | '.join(texts)} |"

def table(head, rows, name):
    "A table with a class of its own"
    lines = '\n'.join([row(*head), row(*['---']*len(head)), *(row(*cells) for cells in rows)])
    return f'```{{table}}\n:class: {name}\n\n{lines}\n```'

INTRO = ('Read from the code. Three dots stand for more options: those of methods are [below](#options-of-methods), '
    'others on the page that is linked. `from selback.all import *` brings all but '
    'those of a plain PyTorch loop, which are in `selback.functional`.')

def page(link, in_order):
    "The texts of the page; `link` makes a link of a call, `in_order` has the names of methods' pages"
    def place(call):
        name = call.module.rpartition('.')[2]
        return in_order.index(name) if name in in_order else len(in_order)

    yield '*Every call, with its options and their defaults*'
    yield INTRO
    for heading,calls in GROUPS.items():
        if heading=='Methods': calls = sorted(calls, key=place)
        yield f'## {heading}'
        yield table(['call','what it does','page'], [(f'`{c.written}`', c.does, link(c)) for c in calls], 'calls')
        if heading=='Methods':
            yield '### Options of methods'
            options = [(f'`{option}`', about, who) for option,about,who in OPTIONS]
            yield table(['option','what it is','taken by'], options, 'calls')
    yield '## The command'
    command = Call('selback-compare', run_study.__doc__, 'selback.bench.command', 'main')
    yield table(['call','what it does','page'], [(f'`{command.written}`', command.does, link(command))], 'calls')
    yield table(['option','what it is'], [(f'`{name}`', about) for name,about in command_options()], 'calls options')
