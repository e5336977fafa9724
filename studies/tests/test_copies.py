"Planted copies, and who finds them"
import pytest, torch
from studies import copies
from studies.copies import *

@pytest.fixture(autouse=True)
def smallest(tiny_network, monkeypatch):
    monkeypatch.setenv('SELBACK_SCALE', 'tiny')
    monkeypatch.setattr(copies, 'small_convnet', tiny_network)
    for make in datasets.values(): make.cache_clear()

def test_copies_are_of_the_items_that_are_named():
    (train,labels),(valid,valid_labels),copies = planted(0)
    assert [*copies]==[*kinds]
    for pairs in copies.values():
        for i,j in pairs: assert i>=60 and valid_labels[i]==labels[j]
    assert all(valid[i].equal(train[j]) for i,j in copies['the same'])
    assert all(valid[i].flip(-1).equal(train[j]) for i,j in copies['mirrored'])

@pytest.mark.parametrize('kind', [*kinds])
def test_what_becomes_of_an_image(kind):
    image = torch.randint(0, 256, (3,32,32), dtype=torch.uint8)
    made = kinds[kind](image, torch.Generator().manual_seed(0))
    assert made.shape==image.shape and made.dtype==torch.uint8
    assert made.equal(image)==(kind=='the same')

def test_frames_of_a_film_are_a_second_apart():
    (train,_),(valid,_),copies = frames(0)
    assert len(train)+len(valid)==40
    of_all = camvid_parts()[0][0]
    def number(image): return next(i for i,o in enumerate(of_all) if o.equal(image))
    near = {(i, j) for i,a in enumerate(map(number, valid)) for j,b in enumerate(map(number, train)) if abs(a-b)<=6}
    assert {*copies['a second away']}==near

def test_shares_by_hand():
    data = planted(0)
    pairs = [pair for own in data.copies.values() for pair in own]
    assert told('all', pairs, None, data).once.tolist()==[1.]*len(kinds)
    wrong = [(a, b+1) for a,b in pairs]
    late = told('late', wrong+pairs, None, data)
    assert late.once.tolist()==[0.]*len(kinds) and late.twice.tolist()==[1.]*len(kinds)
    assert (late.false==len(pairs)).all()

def test_what_is_called_a_copy_by_hand():
    data = planted(0)
    first,*others = [pair for own in data.copies.values() for pair in own]
    rows = called([first, first, (0,1)], data)
    assert rows.found.tolist()==[1]+[0]*(len(kinds)-1) and (rows.of==4).all() and (rows.false==1).all()

def test_hashes_at_a_larger_distance_call_more():
    pytest.importorskip('imagehash', reason='a requirement of the studies: pip install -e .[studies]')
    same = run_called('phash, 0 bits', 0)
    assert same.found[0]==4 and same.false[0]==0 # noise has hashes of its own
    assert (run_called('phash, 8 bits', 0).found>=same.found).all()

@pytest.mark.parametrize('who', ['small','pixels'])
@pytest.mark.parametrize('data', ['planted','frames'])
def test_a_part_tells_of_each_kind(data, who):
    rows = run(data, who, 0)
    assert {*rows.kind}=={*datasets[data](0).copies}
    assert (rows.twice>=rows.once).all() and rows.once.between(0, 1).all()
    if data=='planted': assert (rows[rows.kind=='the same'].twice==1).all()
