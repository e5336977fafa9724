"The situations of the map: data as described, and runs from beginning to end"
import matplotlib
matplotlib.use('agg')
import pytest, torch
from studies import regimes as r

@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setenv('SELBACK_SCALE', 'tiny')
    for o in (r.cifar_parts,r.camvid_parts,r.photographs): o.cache_clear()
    yield
    for o in (r.cifar_parts,r.camvid_parts,r.photographs): o.cache_clear()

@pytest.mark.parametrize('name', r.regimes)
def test_it_runs_from_beginning_to_end(name, capsys):
    runs = r.run_regime(name)
    parts = r.regimes[name]().parts
    wanted = {m for _,methods in parts.values() for m in methods}
    assert set(runs.method)==wanted and (runs.groupby('method').seed.nunique()==2).all() and runs.error.notna().all()
    assert runs.budget.nunique()==1 and (runs.groupby(['method','seed']).compute.max()>=200).all()

def test_a_recording_is_paid_by_who_makes_it():
    runs = r.run_regime('proxy')
    first = runs[runs.epoch==1].groupby('method')[['compute','backpropagated']].mean()
    paid,free = (first.loc[f'a proxy, {o}'] for o in ('paid for','already paid'))
    assert (paid.compute-paid.backpropagated)-(free.compute-free.backpropagated)>10

def test_copies_are_of_the_image_they_say():
    images,labels,of = r.near_duplicates(200, 50)
    (all_images,all_labels),_ = r.cifar_parts()
    assert len(images)==len(labels)==len(of)==200 and of[:50].tolist()==list(range(50))
    for i in range(50):
        rows = (all_images==images[i]).flatten(1).all(1).nonzero()[:,0]
        assert len(rows)==1 and all_labels[rows[0]]==labels[i]
    assert (labels==labels[of]).all()
    for i in range(50, 200):
        best = min((images[i].float()/k-images[of[i]].float().roll((dy,dx), (1,2))).abs().mean() for dy in range(-2, 3) for dx in range(-2, 3) for k in (.85,.9,.95,1.,1.05,1.1,1.15))
        assert best<8
    counts = of.bincount()
    assert counts[0]==counts.max() and counts[:5].sum()>counts[25:].sum()

def test_the_tail_gets_thinner_by_the_same_factor():
    _,labels = r.long_tail(16.)
    n = labels.bincount().tolist()
    assert n==[max(2, int(60*16**(-c/9))) for c in range(10)]

def test_kinds_are_rare_on_both_sides_and_labels_hide_them():
    (images,labels,kinds),(_,valid,valid_kinds) = r.hidden_groups(10.)
    assert kinds.bincount().tolist()==[6 if c in (7,9) else 60 for c in range(10)]
    for ys,ks in ((labels,kinds),(valid,valid_kinds)): assert ys.tolist()==[int(k in (0,1,8,9)) for k in ks.tolist()]
    assert valid_kinds.bincount().tolist()==[20]*10
    shares = torch.zeros(10, dtype=torch.float64).index_add_(0, kinds, r.balanced(kinds))
    torch.testing.assert_close(shares, torch.full((10,), .1, dtype=torch.float64))

def test_easiest_first_is_the_easy_half_first():
    losses = torch.tensor([3.,1.,2.,4.])
    class At:
        def __init__(self, pct): self.pct_train = pct
    assert r.EasiestFirst.inclusion(At(.4), losses).tolist()==[0,1,1,0] and r.EasiestFirst.inclusion(At(.5), losses).tolist()==[1]*4

def test_who_asks_for_what_is_not_there():
    with pytest.raises(ValueError, match="regime: got 'x', wanted one of near_duplicates"): r.run_regime('x')
    with pytest.raises(ValueError, match="regime: got 'x', wanted one of near_duplicates"): r.at_rates('x', 'favor_hard')
