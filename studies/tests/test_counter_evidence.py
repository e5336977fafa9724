"Claims beside a shorter training: what the methods choose, and what a score goes with"
import pandas as pd, pytest, torch

from selback.all import Now
from studies import counter_evidence, easy_data
from studies.counter_evidence import bound, order_dp_share, OrderDP, Pruned, RandomShare

@pytest.fixture
def tiny(monkeypatch, tmp_path):
    monkeypatch.setenv('SELBACK_SCALE', 'tiny')
    for name in ('path','scores_path'): monkeypatch.setattr(counter_evidence, name, tmp_path/f'{name}.csv')
    from studies.regimes import cifar_parts
    known = cifar_parts,easy_data.data_of
    for o in known: o.cache_clear()
    yield
    for o in known: o.cache_clear()

def test_order_dp_leaves_out_the_lowest_losses_of_a_random_part():
    losses = torch.arange(1000.)
    found = [OrderDP(seed=seed).choose(losses, Now()).rows for seed in range(2)]
    for rows in found:
        assert len(rows)==int(.85*750)==637 and (rows.diff()>0).all()
        assert abs(rows.float().mean()-(150+999)/2)<25 # the lowest 15 % are gone
        assert rows.min()>80
    assert not found[0].equal(found[1])

def test_what_is_not_known_is_loaded_first():
    losses = torch.where(torch.arange(1000)<500, torch.nan, torch.arange(1000.))
    rows = OrderDP().choose(losses, Now()).rows
    assert (rows<500).sum()>(rows>=500).sum()

def test_the_random_share_is_as_large():
    losses = torch.arange(1000.)
    rows = RandomShare().choose(losses, Now()).rows
    assert len(rows)==int(1000*order_dp_share)==637 and abs(rows.float().mean()-500)<50

def test_scores_of_batches_by_hand():
    method = Pruned('batch loss')
    method.note(torch.tensor([0,1]), torch.tensor([1.,3.]), 4)
    method.note(torch.tensor([1,2]), torch.tensor([2.,2.]), 4)
    assert method.batch_loss.tolist()==pytest.approx([.3*2, .7*.3*2+.3*2, .3*2, 0])
    assert method.own_loss.tolist()==pytest.approx([.3*1, .7*.3*3+.3*2, .3*2, 0])
    assert method.count.tolist()==[1,2,1,0] and method.last.tolist()==[1,2,2,0]

def test_half_of_what_is_below_the_mean_is_left_out():
    scores = torch.cat([torch.zeros(600), torch.ones(400)])
    method = Pruned('own loss')
    rows = method.choose(scores, Now()).rows
    assert (rows>=600).sum()==400 and (rows<600).sum()==300

def test_the_bound_is_met_by_a_mean_of_batches():
    "Items whose losses stay, in batches that are drawn anew: their average score, against their own losses"
    g = torch.Generator().manual_seed(0)
    bs,n = 8,2000
    losses = torch.randn(n, generator=g)
    score = torch.zeros(n)
    for _ in range(60):
        for rows in torch.randperm(n, generator=g).split(bs): score[rows] = .7*score[rows]+.3*losses[rows].mean()
    found = torch.corrcoef(torch.stack([score, losses]))[0,1]
    assert float(found)==pytest.approx(bound(bs), abs=.06)
    assert bound(128)==pytest.approx(.206, abs=.001)

def test_runs_end_at_their_share_of_the_cost_and_are_stored(tiny, monkeypatch):
    full,less = (counter_evidence.end_of('orderdp', 'none', 0, 12, share) for share in (1.,.5))
    own = counter_evidence.end_of('orderdp', 'OrderDP', 0, 12, .5)
    assert own.compute==pytest.approx(full.compute/2, rel=.15)==pytest.approx(less.compute, rel=.15)
    monkeypatch.setattr(counter_evidence, 'compare', None)
    assert counter_evidence.end_of('orderdp', 'OrderDP', 0, 12, .5).error==pytest.approx(own.error, rel=1e-4)

def test_what_the_score_goes_with_is_told_by_epoch_and_in_the_end(tiny):
    for method in ('pruned by batch loss','scored by batch loss'): counter_evidence.end_of('bls', method, 0, 12)
    for _,rows in pd.read_csv(counter_evidence.scores_path).groupby('method'):
        *epochs,end = rows.epoch
        assert epochs==[*range(1, len(epochs)+1)] and end==0
        assert abs(rows.iloc[-1].loss)<.3
    assert rows.seen.isna().all() # without pruning all items are seen alike
