"No module reaches into another, each attribute has one writer, a recipe fits on its page"
import ast, json, re
from pathlib import Path

import pytest

root = Path(__file__).parents[1]

def code_in(*patterns):
    "The modules below the root, with their code"
    files = sorted(file for pattern in patterns for file in root.glob(pattern) if file.name!='_modidx.py')
    return {file.relative_to(root).as_posix(): file.read_text(encoding='utf-8') for file in files}

# No module reads or writes a private name of another, but for these
FOREIGN = dict(
    _repr_html_='IPython: what a notebook shows',
    _split='fastai: a batch becomes xb and yb',
    _set_device='fastai: a batch goes to where the model is',
    _do_epoch_validate='fastai: validation, by itself or replaced',
    _backward="fastai: a step's backward pass",
    _do_one_batch='fastai: a batch, forward and backward',
    _do_grad_opt='fastai: backward and step',
    _version='PyTorch: how often a tensor was changed in place',
    _n_inp='fastai: how many inputs a batch has',
    _types='fastai: what a batch is made of',
    _broadcast='fastai: ranks agree on the order of items',
    _buffers="PyTorch: a module's own",
    _modules="PyTorch: a module's own",
    _parameters="PyTorch: a module's own",
    _dynamo='PyTorch: the compiler',
    _orig_mod='PyTorch: what was compiled',
    _forward_hooks="PyTorch: a module's own",
    _forward_pre_hooks="PyTorch: a module's own",
    _qualified_op_name='PyTorch: the name of an operation',
    _fields='Python: of a named tuple',
    _asdict='Python: of a named tuple',
    _replace='Python: of a named tuple',
    _exit='Python: ends a process that was forked')

def is_private(name): return isinstance(name, str) and re.match('_[^_]', name)

def is_own(node): return ast.unparse(node) in ('self','cls')

def is_stored(node): return isinstance(node.ctx, ast.Store)

class Names(ast.NodeVisitor):
    "The names that a module defines, and those that it uses of others, with their lines"
    def __init__(self, code):
        self.own,self.used = set(),[]
        self.visit(ast.parse(code))

    def visit_FunctionDef(self, node):
        self.own.add(node.name)
        self.generic_visit(node)

    visit_ClassDef = visit_FunctionDef

    def visit_Name(self, node):
        if is_stored(node): self.own.add(node.id)

    def visit_Attribute(self, node):
        self.used.append((node.lineno, node.attr))
        if is_stored(node) and is_own(node.value): self.own.add(node.attr)
        self.generic_visit(node)

    def visit_ImportFrom(self, node):
        if node.module!='nbdev': self.used += [(node.lineno, alias.name) for alias in node.names]

    def visit_Call(self, node):
        "`getattr(o, '_name')` and its like, and `o.__dict__.update(_name=...)`"
        function = ast.unparse(node.func)
        if function.endswith('__dict__.update'): self.own |= {keyword.arg for keyword in node.keywords}
        if re.search(r'\b(get|set|has|del)attr$', function):
            self.used += [(node.lineno, arg.value) for arg in node.args[:2] if isinstance(arg, ast.Constant)]
        self.generic_visit(node)

    def visit_Subscript(self, node):
        "`o.__dict__['_name']`"
        is_name = isinstance(node.slice, ast.Constant) and ast.unparse(node.value).endswith('__dict__')
        if is_name: self.used.append((node.lineno, node.slice.value))
        self.generic_visit(node)

def strangers(code):
    "Private names in `code` that are defined elsewhere, with their lines"
    names = Names(code)
    known = names.own | set(FOREIGN)
    return sorted((line, name) for line,name in names.used if is_private(name) and name not in known)

@pytest.mark.parametrize('folder', ['selback','tests','benchmarks','studies','recipes'])
def test_no_module_uses_a_private_name_of_another(folder):
    found = {file: strangers(code) for file,code in code_in(f'{folder}/**/*.py').items()}
    assert not {file: names for file,names in found.items() if names}

def test_strangers_are_noticed():
    code = """
from a import _b
class C:
    def f(self):
        self._mine = o._theirs
        getattr(o, '_x')
        o.__dict__['_y'] = 1
        return self._base, o._split, o._mine, o.__len__
"""
    assert strangers(code)==[(2,'_b'), (5,'_theirs'), (6,'_x'), (7,'_y'), (8,'_base')]

# Each attribute is written by the class that owns it. What fastai and fastprogress give others to write:
GIVEN = dict(
    learn={'xb','yb','dl','pred','iter','n_iter','pct_train'}, # set anew for each batch or epoch
    recorder={'metric_names','log','cancel_train'}, # set anew for each fit or epoch
    bar={'comment','prefix'})
KINDS = dict(Learner='learn', Recorder='recorder')

def parameters_of(function):
    "The parameters that are a learner or a recorder, by their type or name"
    for arg in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs):
        kind = getattr(arg.annotation, 'id', None)
        if kind in KINDS: yield arg.arg,(KINDS[kind],)
        elif arg.arg in GIVEN: yield arg.arg,(arg.arg,)

def put_back(function):
    "What a `finally` of a function writes"
    blocks = [node.finalbody for node in ast.walk(function) if isinstance(node, ast.Try)]
    nodes = [node for block in blocks for line in block for node in ast.walk(line)]
    return {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute) and is_stored(node)}

HANDED_ON = {'setattr(self.dl, name, value)'} # to the loader in whose place another one is

def is_class(node): return isinstance(node, ast.Name) and re.match('_?[A-Z].*[a-z]', node.id)

def elements(node): return node.elts if isinstance(node, (ast.Tuple,ast.List)) else [node]

class Writes(ast.NodeVisitor):
    "The lines that write an attribute of what `self` holds, or of a class from outside of it, and do not put it back"
    def __init__(self, code):
        self.found,self.classes = [],[]
        self.restored,self.places = set(),{'self': ()} # where local names come from, such as ('part',) for `self.part`
        self.visit(ast.parse(code))

    def place_of(self, node):
        "The names that lead from `self` to an object, or None for what it does not hold"
        if isinstance(node, ast.Name): return self.places.get(node.id)
        if not isinstance(node, ast.Attribute): return None
        before = self.place_of(node.value)
        return None if before is None else (*before, node.attr)

    def is_foreign(self, owner, name):
        "Does the attribute `name` of an object belong to another class than the one that writes it?"
        place = self.place_of(owner)
        if place is None: return is_class(owner) and owner.id not in self.classes
        return bool(place) and name not in GIVEN.get(place[-1], ())

    def note(self, owner, name, node):
        text = ast.unparse(node)
        is_fine = text in self.restored or text in HANDED_ON
        if self.is_foreign(owner, name) and not is_fine: self.found.append(text)

    def bind(self, target, value):
        if not isinstance(target, ast.Name): return
        self.places.pop(target.id, None)
        place = self.place_of(value)
        if place is not None: self.places[target.id] = place

    def visit_ClassDef(self, node):
        self.classes.append(node.name)
        self.generic_visit(node)
        self.classes.pop()

    def visit_FunctionDef(self, node):
        before = self.places,self.restored
        self.places = {**self.places, 'self': (), **dict(parameters_of(node))}
        self.restored = self.restored | put_back(node)
        self.generic_visit(node)
        self.places,self.restored = before

    def visit_Assign(self, node):
        self.generic_visit(node)
        for target in node.targets:
            names,values = elements(target),elements(node.value)
            if len(names)!=len(values): values = [ast.Constant(None)]*len(names)
            for name,value in zip(names, values): self.bind(name, value)

    def visit_NamedExpr(self, node):
        self.generic_visit(node)
        self.bind(node.target, node.value)

    def visit_Attribute(self, node):
        "`self.part.name = 1`, and all else that stores or deletes"
        if not isinstance(node.ctx, ast.Load): self.note(node.value, node.attr, node)
        self.generic_visit(node)

    def visit_Subscript(self, node):
        "`self.part.__dict__['name'] = 1`"
        is_dict = isinstance(node.value, ast.Attribute) and node.value.attr=='__dict__'
        if is_dict and not isinstance(node.ctx, ast.Load): self.note(node.value.value, None, node)
        self.generic_visit(node)

    def visit_Call(self, node):
        "`setattr(self.part, 'name', 1)` and `self.part.__dict__.update(name=1)`"
        function = ast.unparse(node.func)
        if re.search(r'\b(setattr|delattr|__setattr__|__delattr__)$', function) and len(node.args)>1:
            owner,name,*_ = node.args
            self.note(owner, getattr(name, 'value', None), node)
        if function.endswith('.__dict__.update'): self.note(node.func.value.value, None, node)
        if re.fullmatch(r'vars\(.*\)\.update', function): self.note(node.func.value.args[0], None, node)
        self.generic_visit(node)

def written_outside(code):
    "What a module writes of others"
    return Writes(code).found

OUTSIDE = [
    'self.part.n = 1',
    'self.part.n += 1',
    'self.part.n: int = 1',
    'del self.part.n',
    'self.part.inner.n = 1',
    'self.a,self.part.n = 1,2',
    'for self.part.n in range(3): pass',
    'part = self.part; part.n = 1',
    'a,part = 1,self.part; part.n = 1',
    'part = self.part; inner = part.inner; inner.n = 1',
    'if part := self.part: part.n = 1',
    "setattr(self.part, 'n', 1)",
    "object.__setattr__(self.part, 'n', 1)",
    'self.part.__dict__.update(n=1)',
    'vars(self.part).update(n=1)',
    "self.part.__dict__['n'] = 1",
    'self.learn.loss_func = 1',
    'self.learn.model.n = 1',
    'learn = self.learn; learn.loss_func = 1',
    'def f(learn): learn.loss_func = 1',
    'def f(self:Learner): self.loss_func = 1',
    'self.recorder.losses = 1',
    'self.bar.total = 1',
    'Selection.choose = 1',
    'Selection.a,Selection.b = 1,2',
    "setattr(Selection, 'choose', 1)",
    'def f():\n  self.part.n = 1\n  try: pass\n  finally: self.part.other = 0']

INSIDE = [
    'self.n = 1',
    'self.part = 1',
    'self.part.leave(1)',
    'self.table[self.part.n] = 1',
    'n = self.part.n; n = 1',
    'part = self.part; part = other(); part.n = 1',
    "setattr(self, 'n', 1)",
    'self.__dict__.update(n=1)',
    'self.learn.xb = 1',
    'self.learn.xb,self.learn.yb = 1,2',
    'self.learn.pct_train += 1',
    'self.learn.recorder.log += [1]',
    "setattr(self.learn, 'dl', 1)",
    'def f(learn): learn.iter = 1',
    'def f(self:Learner): self.dl = 1',
    'self.recorder.metric_names = 1',
    'self.bar.comment = 1',
    'class Selection:\n  def f(self): Selection.n = 1',
    'def f():\n  self.part.n = 1\n  try: pass\n  finally: self.part.n = 0',
    'def f():\n  Learner.fit = 1\n  try: pass\n  finally: Learner.fit = 0']

@pytest.mark.parametrize('code', OUTSIDE)
def test_writing_from_outside_is_noticed(code): assert written_outside(code)

@pytest.mark.parametrize('code', INSIDE)
def test_what_may_be_written_is_not_noticed(code): assert not written_outside(code)

def test_each_attribute_has_one_writer():
    "A part is changed by its own verbs, a class where it is defined or by `@patch`"
    found = {file: written_outside(code) for file,code in code_in('selback/**/*.py').items()}
    assert not {file: lines for file,lines in found.items() if lines}

# What a page shows
def code_cells():
    "The code of the notebooks, by notebook and cell"
    for nb in sorted((root/'nbs').rglob('*.ipynb')):
        if '.ipynb_checkpoints' in nb.parts: continue
        name,cells = nb.relative_to(root).as_posix(),json.loads(nb.read_text(encoding='utf-8'))['cells']
        for cell in cells:
            if cell['cell_type']=='code': yield f"{name} #{cell['id']}",''.join(cell['source'])

def test_a_recipe_fits_on_its_page():
    "Its code at 1280 pixels"
    found = {place: [line for line in text.splitlines() if len(line)>88]
        for place,text in code_cells() if place.startswith('nbs/recipes/')}
    assert len(found)>40
    assert not {place: lines for place,lines in found.items() if lines}
