"Data that mislead as they are said to, and runs from beginning to end"
import pytest, torch
from selback.all import Now
from studies import regimes, shortcuts as s

@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setenv('SELBACK_SCALE', 'tiny')
    caches = regimes.cifar_parts,s.small_cifar,s.bordered,s.corrupted
    for made in caches: made.cache_clear()
    yield
    for made in caches: made.cache_clear()

@pytest.mark.parametrize('name', ['border_98_wrong','corrupted','digits'])
def test_it_runs_from_beginning_to_end(name):
    runs = s.run_part(name)
    assert len(set(runs.method))==7
    assert (runs.groupby('method').seed.nunique()==2).all()
    assert runs[['error','mean_error']].notna().all(axis=None)
    assert runs.budget.nunique()==1

def test_a_first_training_is_paid_from_the_budget():
    runs = s.run_part('digits', only=('none','JTT'))
    first = runs[runs.epoch==1].groupby('method')[['compute','backpropagated']].mean()
    beside_training = first.compute-first.backpropagated
    n = 300-300%64 # of each epoch
    assert beside_training['JTT']>s.parts['digits'].after*n+300/4 # and a look at all items
    assert beside_training['none']<1

@pytest.mark.parametrize('share', [.95,.98])
def test_marks_go_with_labels_as_often_as_is_said(share):
    labels = torch.arange(20_000)%10
    marks = s.marks_of(labels, 10, share, torch.Generator().manual_seed(0))
    agree = (marks==labels).float().mean()
    assert abs(agree-share)<4*(share*(1-share)/20_000)**.5
    others = (marks-labels)[marks!=labels]%10
    assert set(others.tolist())=={*range(1, 10)}

def test_a_border_is_on_marked_images_only_and_inside_nothing_changes():
    images = torch.randint(256, (4,3,16,16), dtype=torch.uint8)
    marked = s.with_border(images, torch.tensor([1,0,1,0]))
    assert marked[1::2].equal(images[1::2])
    assert marked[0::2,:,1:-1,1:-1].equal(images[0::2,:,1:-1,1:-1])
    assert (marked[0::2,0,0]==255).all()
    assert (marked[0::2,1:,:,-1]==0).all()

def test_labels_are_wrong_in_training_only():
    clean,wrong = s.bordered(.98),s.bordered(.98, .05)
    assert (clean[0][1]!=wrong[0][1]).any()
    assert clean[2][1].equal(wrong[2][1])

@pytest.mark.parametrize('mark,name', enumerate(s.corruptions))
def test_each_corruption_changes_its_own_images_only(mark, name):
    images = torch.randint(256, (6,3,16,16), dtype=torch.uint8)
    marks = torch.tensor([mark,(mark+1)%10]*3)
    corrupted = s.corrupted_by(images, marks, torch.Generator().manual_seed(0))
    again = s.corrupted_by(corrupted, torch.full((6,), -1), torch.Generator())
    assert again.equal(corrupted)
    assert (corrupted[0::2]!=images[0::2]).flatten(1).any(1).all()

def test_errors_come_often_and_all_others_once():
    method,idxs = s.Upsampled(torch.tensor([True,False,False,True]), 50, seed=0),torch.tensor([2,3,0,1])
    rows = method.choose(torch.zeros(4), Now(method.draws.on('cpu'), idx=idxs)).rows
    assert torch.bincount(idxs[rows]).tolist()==[50,1,1,50]
