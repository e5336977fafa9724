"Balanced sampling against a loader that draws by weights"
import numpy as np, pandas as pd, pytest, torch
from selback.all import balanced_chances
from studies import balanced, regimes, shortcuts

@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setenv('SELBACK_SCALE', 'tiny')
    regimes.cifar_parts.cache_clear()
    yield
    regimes.cifar_parts.cache_clear()

@pytest.mark.parametrize('name', ['long_tail','digits'])
def test_it_runs_at_a_tiny_scale(name):
    runs = balanced.run(name)
    assert runs.seed.nunique()==2
    assert runs.error.notna().all()
    assert (runs.groupby('seed').selected.last()>0).all()

def test_the_method_draws_as_the_loader_does():
    "Of long-tailed classes, and of groups of label and mark: as often each, within 4 sigma"
    def drawn(idxs, groups): return groups[torch.as_tensor(idxs)].bincount()
    for name,groups in [
        ('long_tail', lambda ds: ds.labels),
        ('digits', lambda ds: shortcuts.groups_of(*shortcuts.parts['digits'].data()[0][1:], 10))]:
        part = balanced.part_of(name)
        learn = part.get_learner()
        ds = learn.dls.train_ds
        of = groups(ds).unique(return_inverse=True)[1]
        method, = part.methods.values()
        if isinstance(method, str): learn.balanced_sampling()
        else: learn.add_cb(method())
        with learn.no_bar(),learn.no_logging(): learn.fit(1, 0.)
        idxs,cb = torch.arange(len(ds)),learn.selection
        ours = torch.cat([idxs[cb.method.choose(cb.losses_of(idxs), cb.now(idx=idxs)).rows] for _ in range(50)])
        weighted = regimes.weighted_dls(learn.dls, balanced_chances(of)).train
        theirs = [i for _ in range(50) for i in weighted.get_idxs()]
        n,p = len(ours),1/len(of.unique())
        for counts in drawn(ours, of),drawn(theirs, of):
            assert ((counts/counts.sum()-p).abs()<=4*(p*(1-p)/n)**.5).all()

def test_ways_are_compared_by_the_interval_of_their_means(monkeypatch):
    errors = dict(method=np.array([.2,.3,.25]), loader=np.array([.26,.24,.25,.25]))
    monkeypatch.setattr(balanced, 'errors', lambda name: errors)
    d = balanced.compared('long_tail')
    assert d['difference']==pytest.approx(0)
    assert d['low']<-.2 and d['high']>.2
    assert "25.0% on 3 seeds against the loader's 25.0% on 4" in balanced.in_words('long_tail')
    errors['method'] = np.array([.1,.11,.12])
    assert balanced.compared('long_tail')['high']<0
    errors['method'] = np.array([.1])
    assert balanced.in_words('long_tail')==''

def test_stored_runs_are_those_of_both_ways():
    "The last epoch of each run of the right method"
    found = balanced.errors('digits')
    assert len(found['method'])==len(found['loader'])==5
    stored = pd.read_csv(balanced.results_folder/'shortcuts/digits_balanced.csv')
    assert found['loader'].tolist()==stored.groupby('seed').error.last().tolist()
