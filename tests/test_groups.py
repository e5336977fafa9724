"The error of the worst group, by hand; and what is ranked by it"
from types import SimpleNamespace

import matplotlib.pyplot as plt, numpy as np, pandas as pd, pytest, torch
from fastai.callback.tracker import SaveModelCallback
from fastai.data.core import TfmdDL
from fastai.metrics import error_rate
from helpers import *
from selback.bench.compare import compare
from selback.bench.findings import measure_of
from selback.bench.race import by_group, race
from torch.nn import functional as F
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
    assert 'worst_group_error' in ours.recorder.metric_names

@pytest.mark.parametrize('loss_func,pred,target', [
    (CrossEntropyLossFlat(), torch.eye(3)[[0,1,2,0]], torch.tensor([[0],[2],[2],[1]])),
    (CrossEntropyLossFlat(), torch.eye(3)[[0,1,2,0]], torch.tensor([0,2,2,1])),
    (BCEWithLogitsLossFlat(), torch.tensor([[1.],[-1.],[2.],[-3.]]), torch.tensor([1.,1.,1.,1.])),
    (F.cross_entropy, torch.eye(3)[[0,1,2,0]], torch.tensor([0,2,2,1]))],
    ids=['column','classes','one number','function'])
def test_predictions_may_have_another_shape_than_targets(loss_func, pred, target):
    "Items 0 and 2 are right"
    metric = WorstGroup([0,1,0,1])
    metric.accumulate(batch_of(loss_func, pred, target))
    assert metric.errors.to_dict()=={0: 0., 1: 1.}

def batch_of(loss_func, pred, target):
    dl = TfmdDL(TensorDataset(pred, target), bs=4, num_workers=0)
    return SimpleNamespace(loss_func=loss_func, pred=pred, y=target, dl=dl, dls=SimpleNamespace(valid=dl))

@pytest.mark.parametrize('loss_func,pred,target', [
    (MSELossFlat(), torch.rand(4, 1), torch.rand(4)),
    (F.mse_loss, torch.rand(4), torch.rand(4)),
    (F.binary_cross_entropy_with_logits, torch.rand(4, 1), torch.ones(4, 1))], ids=['mse','function','bce'])
def test_what_are_no_classes_is_refused(loss_func, pred, target):
    with pytest.raises(TypeError, match='WorstGroup: got predictions that are'):
        WorstGroup([0]*4).accumulate(batch_of(loss_func, pred, target))

def test_several_outputs_are_refused():
    batch = batch_of(CrossEntropyLossFlat(), torch.rand(4, 3), torch.zeros(4))
    batch.pred = batch.pred,batch.pred
    with pytest.raises(TypeError, match='got predictions that are a tuple'): WorstGroup([0]*4).accumulate(batch)

@pytest.mark.parametrize('groups', [
    [None,'a',None,'a'], [float('nan'),1.,float('nan'),1.], pd.Series([None,'a',None,'a']), [pd.NA,1,pd.NA,1]], ids=str)
def test_an_unknown_group_is_a_group(groups):
    metric = WorstGroup(groups)
    metric.accumulate(batch_of(CrossEntropyLossFlat(), torch.eye(3)[[1,0,2,0]], torch.zeros(4, dtype=torch.int64)))
    assert metric.errors.tolist()==[1.,0.]
    assert metric.value==1.

def test_other_uses_of_a_learner_are_left_alone():
    learn = quiet_fit(learner(), 1)
    images = image_learner()
    images.metrics = WorstGroup([0,1]*8)
    with images.no_bar(): images.show_results()
    plt.close('all')
    with learn.no_bar():
        learn.get_preds(ds_idx=0)
        assert learn.validate(ds_idx=0)[1] is None
        assert learn.validate(dl=learn.dls.train.new(shuffle=False, drop_last=False))[1] is None
        assert learn.validate()[1] is not None

def test_other_items_of_the_same_number_have_no_groups():
    learn = learner()
    x,y = learn.dls.valid.dataset.tensors
    others = TfmdDL(TensorDataset(x.flip(0), y.flip(0)), bs=5, num_workers=0)
    with learn.no_bar(): assert learn.validate(dl=others)[1] is None
    with pytest.raises(ValueError, match='not what was validated last'): learn.metrics[0].errors

def test_fewer_errors_are_better_for_callbacks_that_compare_epochs():
    saves = SaveModelCallback(monitor='worst_group_error')
    assert saves.comp is np.less

def test_errors_before_a_validation_are_refused():
    with pytest.raises(ValueError, match='errors: .*validation set'):
        WorstGroup([0]).errors

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
