"Methods of `Learner` that are made from classes: what they take, what is said of them, and who counts as a method"
import inspect

import pytest
from fastcore.docments import docments
from helpers import *

OURS = {name: cls for name,cls in known_methods().items() if cls.__module__ in OWN_MODULES}
each_method = pytest.mark.parametrize('name,cls', OURS.items(), ids=list(OURS))

def parameters_of(f): return [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()]

def said_of(f):
    said = docments(f, full=True)
    return {name: (about.docment, about.anno) for name,about in said.items() if name not in ('self','return')}

@each_method
def test_a_one_liner_has_the_options_of_its_class(name, cls):
    learn = table_learner()
    f = getattr(learn, name)
    assert parameters_of(f)==parameters_of(cls)
    assert said_of(getattr(Learner, name))==said_of(cls.__init__)
    assert inspect.signature(f).return_annotation is Learner
    assert docments(f)['return']=='The learner'

def test_options_that_are_misspelt_are_named():
    learn = table_learner()
    with pytest.raises(TypeError, match="got an unknown option 'bta', wanted 'beta'"): learn.favor_hard(bta=1)
    with pytest.raises(TypeError, match="got an unknown option 'gather'"): learn.favor_hard(gather=True)
    refused = "got an unknown option 'auto', wanted one of beta, "
    with pytest.raises(TypeError, match=refused): learn.favor_hard(auto=False)
    with pytest.raises(TypeError, match='takes from 1 to 2 positional arguments but 3'): learn.favor_hard(1, 2)

@pytest.mark.parametrize('name', sorted(OURS))
def test_a_signature_shows_options_only(name):
    for f in getattr(Learner, name),OURS[name]:
        assert not [p for p in inspect.signature(f).parameters.values() if p.kind==p.VAR_KEYWORD]
    with pytest.raises(TypeError, match="got an unknown option 'no_such', wanted"):
        getattr(table_learner(), name)(no_such=1)

@pytest.mark.parametrize('cls', by_path(methods()), ids=one_liner)
def test_options_are_read_and_not_set(cls):
    "Those of the method, and when it selects"
    selection = getattr(table_learner(), one_liner(cls))().selection
    # `window` is SeTa's, and when all select
    parts = {name: selection.method for name in selection.method.options if name!='window'}
    parts |= dict.fromkeys(('start','end','warmup','interrupt'), selection.window)
    for name,part in parts.items():
        assert getattr(selection, name)==getattr(part, name)
        with pytest.raises(AttributeError, match='object has no setter'): setattr(selection, name, 1)

@pytest.mark.parametrize('before_loading', [False,True])
@pytest.mark.parametrize('name,value', dict(score='entropy', scorer=None, scale_factor=.5, precision='bf16').items())
def test_the_random_control_refuses_what_it_would_not_use(name, value, before_loading):
    said = f'{name}: got {value!r}, wanted none; random_subset scores nothing'
    learn = table_learner()
    with pytest.raises(ValueError, match=said): learn.random_subset(before_loading=before_loading, **{name: value})
    assert name not in inspect.signature(RandomSubsetCallback).parameters
