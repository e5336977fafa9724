"Planted copies, and who finds them"
import pytest, torch
from studies import copies
from studies.copies import *

@pytest.fixture(autouse=True)
def smallest(tiny_network, monkeypatch):
    monkeypatch.setenv('SELBACK_SCALE', 'tiny')
    monkeypatch.setattr(copies, 'small_convnet', tiny_network)
    planted.cache_clear()

def test_copies_are_of_the_items_that_are_named():
    (train,labels),(valid,valid_labels),of = planted(0)
    n = len(of)//len(kinds)
    same = valid[60:60+n]
    assert same.equal(train[of[:n]]) and valid_labels[60:].equal(labels[of])
    assert valid[-n:].flip(-1).equal(train[of[-n:]])

@pytest.mark.parametrize('kind', [*kinds])
def test_what_becomes_of_an_image(kind):
    image = torch.randint(0, 256, (3,32,32), dtype=torch.uint8)
    made = kinds[kind](image, torch.Generator().manual_seed(0))
    assert made.shape==image.shape and made.dtype==torch.uint8
    assert made.equal(image)==(kind=='the same')

def test_shares_by_hand():
    _,(_,labels),of = planted(0)
    first = len(labels)-len(of)
    pairs = [(first+i, int(o)) for i,o in enumerate(of)]
    assert told('all', pairs, None, 0).once.tolist()==[1.]*len(kinds)
    wrong = [(a, b+1) for a,b in pairs]
    late = told('late', wrong+pairs, None, 0)
    assert late.once.tolist()==[0.]*len(kinds) and late.twice.tolist()==[1.]*len(kinds)
    assert (late.false==len(pairs)).all()

@pytest.mark.parametrize('part', ['small','pixels'])
def test_a_part_tells_of_each_kind(part):
    rows = run(part, 0)
    assert {*rows.kind}=={*kinds}
    assert (rows.twice>=rows.once).all() and rows.once.between(0, 1).all()
    assert (rows[rows.kind=='the same'].twice==1).all()
