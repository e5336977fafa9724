"The tool that holds a commit against another one notices what differs"
import json

import pytest
from goldens import COLUMNS, EXCEPTIONS, as_read, differences, fields_of, run

@pytest.fixture(scope='module')
def case(): return as_read(run('top_loss', 'plain'))

def changed(case, i=3, **fields):
    "The case, with one field of a step or row otherwise"
    new = json.loads(json.dumps(case))
    for name,value in fields.items():
        if name in COLUMNS: new['rows'][i][COLUMNS.index(name)] = value
        else: new['steps'][i][dict(rates=2, items=3, weights=4)[name]] = value
    return new

def test_the_same_training_has_no_differences(case):
    assert not [*differences('top_loss-plain', [case], [as_read(run('top_loss', 'plain'))])]

def test_each_difference_is_named(case, monkeypatch):
    others = dict(kept=99, trained=99, loss_share=.5, rates=.5, items=[1,2], weights='other')
    for name,value in others.items():
        said, = differences('top_loss-plain', [case], [changed(case, **{name: value})])
        assert said.startswith(f'top_loss-plain, process 0, {name}: (3, ')
        assert str(value) in said

    monkeypatch.setitem(EXCEPTIONS, 'top_loss-*', ('Why.', ['items']))
    both = changed(case, items=[1,2], rates=.5)
    assert [said.split()[3] for said in differences('top_loss-plain', [case], [both])]==['rates:']

def test_a_lost_step_is_a_difference(case):
    shorter = dict(case, steps=case['steps'][:-1])
    found = [*differences('top_loss-plain', [case], [shorter])]
    assert found and len(found)<=len(fields_of(case))
