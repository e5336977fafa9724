"The error of the worst group, by hand; and what is ranked by it"
import numpy as np, pandas as pd, pytest, torch
from fastai.data.core import TfmdDL
from fastai.metrics import error_rate
from helpers import *
from selback.bench.compare import compare, measure_of
from selback.bench.race import by_group, race
from torch.utils.data import TensorDataset

GROUPS = ['a','b','c','a']*8 # of the 32 validation items

def learner(groups=GROUPS, **kwargs):
    learn = table_learner(**kwargs)
    learn.metrics = WorstGroup(groups)
    return learn

def wrong_by_hand(learn):
    x,y = learn.dls.valid.dataset.tensors
    with torch.no_grad(): return (learn.model.eval()(x).argmax(1)!=y).numpy()

def test_the_error_of_each_group_is_that_by_hand():
    learn = learner()
    with learn.no_bar(): _,worst = learn.validate()
    wrong,names = wrong_by_hand(learn),np.array(GROUPS)
    errors = {name: wrong[names==name].mean() for name in 'abc'}
    assert learn.metrics[0].errors.to_dict()==pytest.approx(errors)
    assert worst==pytest.approx(max(errors.values()))

def test_groups_follow_the_items_where_a_loader_sorts_them():
    class Backwards(TfmdDL):
        def get_idxs(self): return list(range(self.n))[::-1]
    learn = learner()
    with learn.no_bar(): _,worst = learn.validate()
    wanted = learn.metrics[0].errors
    backwards = Backwards(learn.dls.valid.dataset, bs=5, num_workers=0)
    with learn.no_bar(): _,again = learn.validate(dl=backwards)
    assert again==pytest.approx(worst)
    assert learn.metrics[0].errors.to_dict()==pytest.approx(wanted.to_dict())

@pytest.mark.parametrize('groups,said', [
    ([0]*31, 'got 31 groups for 32 validation items'),
    ([0]*100, 'got 100 groups for 32 validation items')])
def test_other_lengths_are_refused(groups, said):
    learn = learner(groups)
    with pytest.raises(ValueError, match=said), learn.no_bar(): learn.validate()

def test_the_metric_is_a_column_of_the_table_and_changes_nothing():
    plain,ours = table_learner(),learner()
    plain.metrics = error_rate
    fits = []
    for learn in plain,ours:
        set_seed(1)
        fits.append(weights(quiet_fit(learn)))
    assert same(*fits)
    assert 'worst_group' in ours.recorder.metric_names

METHODS = ['none','top_loss(keep=.5,warmup=0)','random_subset(keep=.5)']

def test_runs_are_ranked_by_it_where_that_is_asked_for(tmp_path):
    "Though the validation set is small"
    options = dict(compute=200, seeds=1, path=tmp_path/'runs.csv', plot=False)
    runs = compare(learner, METHODS, measure='error', **options)
    assert measure_of(runs)=='error'
    assert measure_of(pd.read_csv(tmp_path/'runs.csv'))=='error'
    assert set((runs.error*8).round(6)%1)=={0.} # of 8 or 16 items
    with pytest.raises(ValueError, match='measure: got 1'): compare(learner, METHODS, measure=1, compute=200)

def test_a_race_by_groups_has_early_losses_in_its_field(monkeypatch):
    from selback.bench import race as module
    asked = []
    def noted(get_learner, methods, measure, **study):
        asked.append((tuple(methods), measure))
        raise KeyboardInterrupt
    monkeypatch.setattr(module, 'compare', noted)
    for make in learner,lambda: table_learner(metrics=error_rate):
        with pytest.raises(KeyboardInterrupt): race(make, compute=2000)
    assert asked[0]==(by_group,'error')
    assert 'early_loss_sampling' not in asked[1][0]
    assert asked[1][1] is None
