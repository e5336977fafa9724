"What another machine or another test set will confirm"
import numpy as np, pandas as pd, pytest

from selback.bench.findings import over_seeds, paired
from studies import easy_data, elsewhere
from studies.items_noise import confirmed_by, noise_of_items, widened

def ends_of(masks):
    "Runs by method and seed, of masks of wrong items"
    rows = [dict(method=method, seed=seed, error=mask.mean(), wrong=' '.join(map(str, mask.nonzero()[0])))
        for method,by_seed in masks.items() for seed,mask in enumerate(by_seed)]
    return pd.DataFrame(rows)

def test_the_noise_of_items_is_that_of_drawing_them_anew():
    rng = np.random.default_rng(0)
    n,seeds = 4000,5
    hard = rng.random(n)
    masks = {'none': [hard+.1*rng.random(n)>.97 for _ in range(seeds)],
        'own': [hard+.1*rng.random(n)>1. for _ in range(seeds)]}
    found = noise_of_items(ends_of(masks), 'own', n)
    drawn = []
    for _ in range(500):
        rows = rng.integers(n, size=n)
        drawn.append(np.mean([np.log(a[rows].mean()/b[rows].mean()) for a,b in zip(masks['own'], masks['none'])]))
    assert found==pytest.approx(np.std(drawn), rel=.15)

def test_the_same_items_wrong_are_no_noise():
    mask = np.arange(1000)<20
    assert noise_of_items(ends_of({'none': [mask,mask], 'own': [mask,mask]}), 'own', 1000)==0
    unknown = ends_of({'none': [mask], 'own': [mask]}).assign(wrong=np.nan)
    assert np.isnan(noise_of_items(unknown, 'own', 1000))

def test_an_interval_gets_wider_and_keeps_its_mean():
    d = over_seeds([-.2,-.15,-.25,-.18])
    wide = widened(d, .05)
    assert wide.mean==d.mean and wide.low<d.low<d.high<wide.high and wide.seeds==4
    assert widened(d, float('nan'))==d and widened(d, 0.).low==pytest.approx(d.low)

def test_what_will_be_confirmed_holds_95_of_100():
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(1000):
        own,new = (np.exp(rng.normal(-.2, .1, size)) for size in (10,2))
        low,high = confirmed_by(own, np.ones(10), 2)
        hits += low<=np.exp(np.log(new).mean())-1<=high
    assert .93<hits/1000<.97

@pytest.mark.parametrize('net', elsewhere.nets)
def test_runs_elsewhere_are_stored_with_their_wrong_items(net, monkeypatch, tmp_path):
    monkeypatch.setenv('SELBACK_SCALE', 'tiny')
    monkeypatch.setattr(elsewhere, 'path', tmp_path/'runs.csv')
    for o in (easy_data.mnist,easy_data.data_of): o.cache_clear()
    end = elsewhere.end_of(net, 'favor_hard', 0, .001)
    for o in (easy_data.mnist,easy_data.data_of): o.cache_clear()
    assert len(end.wrong.split())==round(200*end.error)
    monkeypatch.setattr(elsewhere, 'compare', None)
    assert elsewhere.end_of(net, 'favor_hard', 0, .001).wrong==end.wrong

def test_what_is_quoted_counts_the_items():
    "The interval in the file that pages read is wider than that over seeds alone, and so is that of the page"
    from _measured import comparisons
    [quoted] = comparisons(where='MNIST, 14x14, 20,000 items, 8 epochs').query('method==@elsewhere.ours').difference
    ends = elsewhere.study_runs()
    over = paired(ends, elsewhere.ours)
    assert quoted.seeds==over.seeds==10 and quoted.mean==pytest.approx(over.mean)
    assert quoted.low<over.low and quoted.high>over.high
    assert elsewhere.difference(ends, elsewhere.ours).high==pytest.approx(quoted.high)
