"The error of the worst group, by hand; and what is ranked by it"
from types import SimpleNamespace

import numpy as np, pytest, torch
from fastai.data.core import TfmdDL
from fastai.metrics import error_rate
from helpers import *
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

def test_other_items_of_the_same_number_have_no_groups():
    learn = learner()
    x,y = learn.dls.valid.dataset.tensors
    others = TfmdDL(TensorDataset(x.flip(0), y.flip(0)), bs=5, num_workers=0)
    with learn.no_bar(): assert learn.validate(dl=others)[1] is None
    with pytest.raises(ValueError, match='not what was validated last'): learn.metrics[0].errors
