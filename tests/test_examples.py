"What docstrings show is what comes out: their lines that begin with `>>>`"
import ast, doctest, re
from importlib import import_module
from pathlib import Path

import pytest, torch
import selback.all, selback.functional
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import error_rate
from fastai.torch_core import set_seed
from selback.bench.datasets import get_dls, small_convnet

package = Path(selback.all.__file__).parent

def docstrings(tree):
    "Of a module's functions and classes, with the lines that they end on"
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef,ast.ClassDef)): continue
        text = ast.get_docstring(node)
        if text: yield node.name,text,node.body[0].lineno

def examples():
    for file in sorted(package.rglob('*.py')):
        module = '.'.join(file.relative_to(package.parent).with_suffix('').parts)
        for name,text,line in docstrings(ast.parse(file.read_text(encoding='utf-8'))):
            if '>>>' in text: yield pytest.param(module, text, line, id=f'{module}.{name}')

class Checker(doctest.OutputChecker):
    "Leaves out the sentences that a selection tells, such as 'find_suspects: ...'"
    def check_output(self, want, got, optionflags):
        return super().check_output(want, re.sub(r'^\w+(?<!Error): .+\n', '', got, flags=re.M), optionflags)

@pytest.fixture
def learn():
    "Of 100 digits, without a training table"
    set_seed(0)
    dls = get_dls('digits', bs=20, n_train=100, n_valid=50)
    learn = Learner(dls, small_convnet(10, .25), CrossEntropyLossFlat(), metrics=error_rate)
    with learn.no_bar(),learn.no_logging(): yield learn

EXAMPLES = list(examples())

@pytest.mark.parametrize('module,text,line', EXAMPLES)
def test_a_docstring_shows_what_comes_out(module, text, line, request):
    names = vars(selback.all) | vars(selback.functional) | vars(import_module(module))
    names |= dict(torch=torch, tensor=torch.tensor)
    if 'learn.' in text: names['learn'] = request.getfixturevalue('learn')
    test = doctest.DocTestParser().get_doctest(text, names, module, module, line)
    said = []
    doctest.DocTestRunner(Checker()).run(test, out=said.append)
    assert not said, ''.join(said)

def test_there_are_examples_and_a_wrong_one_is_noticed(request):
    assert len(EXAMPLES)>40
    with pytest.raises(AssertionError, match='Expected'):
        test_a_docstring_shows_what_comes_out('selback.core.policies', '>>> 1+1\n3', 1, request)
