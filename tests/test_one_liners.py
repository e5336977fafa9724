"Methods of `Learner` that are made from classes: what they take, what is said of them, and who counts as a method"
import inspect

import pytest
from fastai.metrics import error_rate
from fastcore.docments import docments
from fastcore.meta import delegates
from helpers import *
from selback.bench.compare import compare, get_method
from selback.callback.attach import Attached

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

@each_method
def test_each_own_option_of_a_one_liner_is_explained(name, cls):
    own = inspect.signature(cls.__init__).parameters
    own = [p.name for p in own.values() if p.kind==p.POSITIONAL_OR_KEYWORD and p.name!='self']
    assert own
    assert all(docments(getattr(Learner, name))[option] for option in own)

@each_method
def test_a_one_liner_says_where_it_is_from(name, cls):
    f = getattr(Learner, name)
    assert (f.__name__, f.__qualname__, f.__module__)==(name, f'Learner.{name}', cls.__module__)
    assert f.__doc__ and '\n' not in f.__doc__

@pytest.fixture
def make(monkeypatch):
    "Makes a class and its one-liner, which goes with the test"
    def made(name, does=None, **attributes):
        class Halves(TopLossCallback):
            "Train on the harder half"
            @delegates(TopLossCallback.__init__)
            def __init__(self,
                times=1, # How often it is halved
                also_bottom=0., # Share of the easiest
                **kwargs
            ):
                super().__init__(.5**times, also_bottom, **kwargs)
                self.times = times
        cls = type(name, (Halves,), attributes)
        cls.__doc__ = Halves.__doc__
        called = attributes.get('one_liner', name.removesuffix('Callback').lower())
        monkeypatch.setattr(Learner, called, None, raising=False)
        return (with_one_liner if does is None else with_one_liner(does))(cls)
    return made

def test_a_class_of_ones_own_gets_a_one_liner(make):
    cls = make('HalfCallback')
    learn = table_learner()
    assert learn.half(2, .25) is learn
    assert type(learn.selection) is cls
    assert (learn.selection.times, learn.selection.keep, learn.selection.also_bottom)==(2, .25, .25)
    assert learn.half.__doc__=='Train on the harder half'
    assert docments(Learner.half).times=='How often it is halved'
    assert known_methods()['half'] is cls

def test_the_docstring_and_the_name_of_a_one_liner_may_be_others(make):
    cls = make('HalfCallback', 'Train on half', one_liner='halve')
    assert table_learner().halve.__doc__=='Train on half'
    assert known_methods()['halve'] is cls
    assert 'half' not in known_methods()

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

def test_a_method_of_ones_own_can_be_compared(make):
    cls = make('HalfCallback')
    assert type(get_method('half(times=2)')()) is cls
    runs = compare(partial(table_learner, metrics=error_rate), ['none','half(warmup=0)'], epochs=1, seeds=1, plot=False)
    assert set(runs.method)=={'none','half(warmup=0)'}

def test_only_methods_are_known():
    assert 'selection' not in known_methods()
    for name,cls in known_methods().items():
        assert issubclass(cls, Attached)
        assert inspect.isfunction(getattr(Learner, name))

def test_what_fastai_has_under_a_name_is_no_one_liner():
    class FineTuneCallback(TopLossCallback): pass
    assert FineTuneCallback not in known_methods().values()

def test_selection_is_no_method_to_compare():
    with pytest.raises(ValueError, match="method: got 'selection', wanted one of none, .*favor_hard.*top_loss"):
        compare(table_learner, ['none','selection'], epochs=1, seeds=1, plot=False)

@pytest.mark.parametrize('before_loading', [False,True])
@pytest.mark.parametrize('name,value', dict(score='entropy', scorer=None, scale_factor=.5, precision='bf16').items())
def test_the_random_control_refuses_what_it_would_not_use(name, value, before_loading):
    said = f'{name}: got {value!r}, wanted none; random_subset scores nothing'
    learn = table_learner()
    with pytest.raises(ValueError, match=said): learn.random_subset(before_loading=before_loading, **{name: value})
    assert name not in inspect.signature(RandomSubsetCallback).parameters
