"The situations of the map: data as described, and runs from beginning to end"
from itertools import product

import matplotlib
matplotlib.use('agg')
import pytest, torch
from selback.all import Now, balanced_chances
from studies import regimes as r

@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setenv('SELBACK_SCALE', 'tiny')
    def forget():
        for parts in (r.cifar_parts,r.camvid_parts,r.photographs): parts.cache_clear()
    forget()
    yield
    forget()

@pytest.mark.parametrize('name', r.regimes)
def test_it_runs_from_beginning_to_end(name, capsys):
    runs = r.run_regime(name)
    parts = r.regimes[name]().parts
    assert set(runs.method)=={method for _,methods in parts.values() for method in methods}
    assert (runs.groupby('method').seed.nunique()==2).all()
    assert runs.error.notna().all()
    assert runs.budget.nunique()==1
    assert (runs.groupby(['method','seed']).compute.max()>=200).all()

def test_a_recording_is_paid_by_who_makes_it():
    runs = r.run_regime('proxy')
    first = runs[runs.epoch==1].groupby('method')[['compute','backpropagated']].mean()
    beside_training = first.compute-first.backpropagated
    assert beside_training['a proxy, paid for']-beside_training['a proxy, already paid']>10

def how_far(copy, image):
    "The mean difference of a copy from an image, moved and lit as is most like it"
    shifts = product(range(-2, 3), repeat=2)
    lights = .85,.9,.95,1.,1.05,1.1,1.15
    return min((copy.float()/light-image.float().roll(shift, (1,2))).abs().mean()
        for shift,light in product(shifts, lights))

def test_copies_are_of_the_image_they_say():
    images,labels,copy_of = r.near_duplicates(200, 50)
    (all_images,all_labels),_ = r.cifar_parts()
    assert len(images)==len(labels)==len(copy_of)==200
    assert copy_of[:50].tolist()==list(range(50))

    for i in range(50):
        (row,) = (all_images==images[i]).flatten(1).all(1).nonzero()[:,0]
        assert all_labels[row]==labels[i]
    assert (labels==labels[copy_of]).all()
    for i in range(50, 200): assert how_far(images[i], images[copy_of[i]])<8

    counts = copy_of.bincount()
    assert counts[0]==counts.max()
    assert counts[:5].sum()>counts[25:].sum()

def test_the_tail_gets_thinner_by_the_same_factor():
    _,labels = r.long_tail(16.)
    assert labels.bincount().tolist()==[max(2, int(60*16**(-c/9))) for c in range(10)]

def test_kinds_are_rare_on_both_sides_and_labels_hide_them():
    train,valid = r.hidden_groups(10.)
    for _,labels,kinds in (train,valid):
        assert labels.tolist()==[int(kind in (0,1,8,9)) for kind in kinds.tolist()]

    kinds,valid_kinds = train[2],valid[2]
    assert kinds.bincount().tolist()==[6 if kind in (7,9) else 60 for kind in range(10)]
    assert valid_kinds.bincount().tolist()==[20]*10
    shares = torch.zeros(10, dtype=torch.float64).index_add_(0, kinds, balanced_chances(kinds))
    torch.testing.assert_close(shares, torch.full((10,), .1, dtype=torch.float64))

def test_easiest_first_is_the_easy_half_first():
    losses = torch.tensor([3.,1.,2.,4.])
    def inclusion_at(pct_train): return r.EasiestFirst().inclusion(losses, Now(pct=pct_train)).tolist()
    assert inclusion_at(.4)==[0,1,1,0]
    assert inclusion_at(.5)==[1]*4
