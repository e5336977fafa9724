"What every method has: warm-up, columns, precision, neighbours, errors"
import itertools
import functools, math, pickle, re, subprocess, sys, warnings

import numpy as np, pandas as pd, pytest, torch
from fastai.callback.core import Callback, CancelFitException, CancelTrainException
from fastai.callback.mixup import CutMix, MixUp
from fastai.callback.progress import CSVLogger, ShowGraphCallback
from fastai.data.core import Datasets
from fastai.callback.tracker import EarlyStoppingCallback, SaveModelCallback
from fastai.callback.training import GradientAccumulation
from fastai.learner import Learner, load_learner
from helpers import *
from selback.callback.first_batch import FirstBatch
from selback.callback.report import SelectionReport
from selback.core.batches import tensors_in
from torch.nn import functional as F

def steps(learn, **where):
    stats = learn.selection.stats
    for column,value in where.items(): stats = stats[stats[column]==value]
    return stats

class Inside(Callback):
    "Comes behind the selection and MixUp, in training only"
    order,run_valid = 20,False

def head_and_rest(model): return [list(model[0].parameters()), list(model[1:].parameters())]

def is_known(v): return not math.isnan(v)

# A method of one's own
def hardest_and_easiest(scores):
    order = scores.argsort()
    rows = torch.cat([order[:2], order[-2:]]).sort().values
    return Chosen(rows, torch.full((4,), .5))

class BothTails(BatchMethod):
    "The two easiest and the two hardest items, at half weight"
    weighs = True

    def choose(self, scores, now): return hardest_and_easiest(scores)

class Nothing(BatchMethod):
    def choose(self, scores, now): return Chosen(torch.arange(0))

def test_a_new_method_trains_and_reports():
    learn = quiet_fit(set_selection(table_learner(), BatchSelection(BothTails())), 3)
    later = learn.selection.stats.query('epoch>0')
    assert steps(learn, epoch=0).kept.eq(16).sum()==6
    assert (later.kept==4).all()
    assert 0<later.loss_share.mean()<1
    assert not same(weights(learn), weights(table_learner()))

def test_weights_of_a_method_scale_the_gradient():
    class Grad(Callback):
        order = 60
        def before_fit(self): self.seen = []
        def after_backward(self): self.seen.append(next(self.model.parameters()).grad.clone())
    class Unweighted(BothTails):
        def choose(self, scores, now): return Chosen(super().choose(scores, now).rows)

    def first_grad(cb): return quiet_fit(table_learner(cbs=[cb, Grad()]), 1).grad.seen[0]
    torch.testing.assert_close(first_grad(BatchSelection(BothTails(), warmup=0))*2,
        first_grad(BatchSelection(Unweighted(), warmup=0)))

@pytest.mark.parametrize('method', ['favor_hard','top_loss','watch_items'])
def test_a_fit_without_a_batch_says_so(method, capsys):
    "It is no warm-up"
    learn = Learner(dls_of(*class_data(40), bs=64, drop_last=True), mlp(), CrossEntropyLossFlat())
    quiet_fit(getattr(learn, method)(), 2)
    said = capsys.readouterr().out
    assert said.count('the training loader gave no batch, so that nothing was trained.')==1
    assert 'warm-up' not in said

def test_a_method_after_watching_goes_on_watching(capsys):
    "And loses nothing; who wants to begin anew says track_items=True"
    learn = quiet_fit(table_learner().watch_items(), 2)
    before = learn.selection.suspects()
    learn.favor_hard()
    assert 'and goes on noting what was predicted' in capsys.readouterr().out
    pd.testing.assert_frame_equal(learn.selection.suspects(), before)
    assert quiet_fit(learn, 1).selection.suspects().looks.tolist()==[3]*len(before)

    learn.top_loss()
    assert 'what it remembered of items is gone' in capsys.readouterr().out and learn.selection.memory is None
    learn.favor_hard(track_items=True)
    learn.watch_items()
    assert 'is gone' not in capsys.readouterr().out and learn.selection.memory is None

# One-liners
def ours(learn): return [type(cb) for cb in learn.cbs if type(cb).__module__.startswith('selback.')]

@pytest.mark.parametrize('cls', by_path(methods()), ids=one_liner)
def test_one_liners_return_the_learner_and_replace(cls, capsys):
    learn = table_learner()
    assert getattr(learn, one_liner(cls))() is learn
    assert type(learn.selection) is cls
    assert capsys.readouterr().out==''

    first,told = learn.selection,repr(learn.selection)
    assert learn.top_loss(keep=.25) is learn
    assert type(learn.selection) is TopLossCallback
    said = capsys.readouterr().out
    assert said.startswith('TopLossCallback(keep=0.25') and told in said and said.count('\n')==1
    assert first not in learn.cbs
    assert {*ours(learn)}=={TopLossCallback,FirstBatch,SelectionReport} and len(ours(learn))==3

    assert learn.full_batches() is learn
    assert not learn.selection
    assert not ours(learn)

def test_a_second_selection_is_refused():
    "A learner has one, also in a fit of its own, and is as it was before"
    learn = quiet_fit(table_learner().top_loss(keep=.25, warmup=0), 1)
    usual,guest,before = learn.selection,RandomSubsetCallback(keep=.5, warmup=0),ours(learn)
    match = r'got RandomSubsetCallback beside TopLossCallback, wanted one selection; .* learn.full_batches\(\), or .* '\
        'one-liner'
    with pytest.raises(ValueError, match=match): quiet_fit(learn, 1, cbs=guest)
    with pytest.raises(ValueError, match=match): learn.add_cb(guest)
    with pytest.raises(ValueError, match='beside'): table_learner(cbs=[TopLossCallback(), guest])
    assert ours(learn)==before and learn.selection is usual
    quiet_fit(learn, 1)
    assert (usual.stats.query('seen==16').kept==4).all() and usual.stats.fit.max()==2

    other = table_learner()
    with pytest.raises(ValueError, match='got a TopLossCallback of another learner, wanted one for each learner'):
        other.add_cb(usual)
    assert not other.selection and usual.learn is learn

def test_a_selection_of_one_fit():
    guest = RandomSubsetCallback(keep=.5, warmup=0)
    learn = quiet_fit(table_learner(), 1, cbs=guest)
    assert not learn.selection and not ours(learn)
    assert (guest.stats.kept[:6]==8).all()
    assert list(learn.recorder.metric_names).count('samp_perc')==1
    quiet_fit(learn, 1)
    assert 'samp_perc' not in learn.recorder.metric_names
    assert len(guest.stats)==7
    assert quiet_fit(learn.add_cb(guest), 1).selection.stats.fit.max()==2

def test_selection_among_the_learners_callbacks():
    learn = quiet_fit(table_learner(cbs=[SelectiveBackpropCallback]), 2)
    assert isinstance(learn.selection, SelectiveBackpropCallback)
    assert 'samp_perc' in learn.recorder.metric_names

# When
def test_warm_up_counts_epochs_over_fits_and_fills_no_history(capsys):
    learn = table_learner().selective_backprop(beta=2, warmup=2)
    quiet_fit(learn, 1)
    assert capsys.readouterr().out.count('this fit trained on all items')==1
    assert learn.selection.history.values is None

    quiet_fit(learn, 1)
    quiet_fit(learn, 2)
    assert 'this fit trained on all items' not in capsys.readouterr().out
    stats = learn.selection.stats
    warm_up = stats[stats.fit<3]
    assert [stats[stats.fit==fit].scored.all() for fit in (1,2,3)]==[False,False,True]
    assert (warm_up.kept==warm_up.seen).all()

NEVER_GAINS = 'while the smoothed gain of sampling, tau_now, is above tau=1e+09'
SHORT_FITS = [
    (lambda: FavorHardCallback(start=.9), 2, 'warmup=1 epoch(s), counted over fits, and from 90% to 100%'),
    (InfoBatchCallback, 2, 'in epochs that end by delta=87.5% of it'),
    (lambda: ImportanceSamplingCallback(tau=1e9), 3, NEVER_GAINS),
    (lambda: TopLossCallback(start=.4, end=.5, interrupt=2), 2, 'from 40% to 50%'),
    (InfoBatchCallback, 3, None),
    (FavorHardCallback, 2, None),
    (lambda: RandomSubsetCallback(.5), 2, None),
    (ImportanceSamplingCallback, 1, 'warmup=')]

@pytest.mark.parametrize('cb,n,says', SHORT_FITS)
def test_a_fit_that_chose_nothing_says_so_once(cb, n, says, capsys):
    learn = quiet_fit(table_learner(cbs=cb()), n)
    said = capsys.readouterr().out
    if says:
        assert said.count('this fit trained on all items')==1
        assert says in said
    else: assert 'all items' not in said
    quiet_fit(learn, n)
    assert 'this fit trained' not in capsys.readouterr().out

@pytest.mark.parametrize('ends_early', [False,True])
def test_only_a_whole_epoch_without_a_choice_is_warned_of(ends_early):
    class Budget(Callback):
        order,run_valid = -20,False
        def before_batch(self):
            if ends_early and self.epoch==1: raise CancelTrainException

    cb = FavorHardCallback() if ends_early else BatchSelection(Nothing())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        quiet_fit(table_learner(cbs=[cb, Budget()]), 2)
    assert sum('Epoch 1: no item was chosen' in str(w.message) for w in said)==(not ends_early)

def test_fine_tune_warms_up_once(capsys):
    learn = table_learner(splitter=head_and_rest).batch_loss_filter()
    quiet_fit(learn, 2, 'fine_tune')
    stats = learn.selection.stats
    assert stats.groupby(['fit','epoch']).scored.all().tolist()==[False,True,True]
    assert capsys.readouterr().out.count('this fit trained on all items')==1

def test_cancelled_epochs_do_not_warm_up():
    learn = quiet_fit(table_learner().top_loss(), 4, start_epoch=2)
    assert learn.selection.stats.groupby('epoch').scored.all().to_dict()=={2:False, 3:True}

def test_composers_window():
    learn = table_learner().top_loss(keep=.5, warmup=0, start=.5, end=.75, interrupt=3)
    quiet_fit(learn, 4)
    scored = learn.selection.stats.scored.tolist()
    assert scored==[False]*14+[True,True,False,True,True,False,True]+[False]*7

# Columns
def test_columns_are_what_they_say():
    learn = quiet_fit(table_learner(n=160).top_loss(keep=.25), 3)
    names = list(learn.recorder.metric_names)
    for epoch,values in enumerate(learn.recorder.values):
        row,stats = dict(zip(names[1:], values)),steps(learn, epoch=epoch)
        full_loss = (stats.full_loss*stats.seen).sum()
        kept_loss = (stats.loss_share*stats.full_loss*stats.seen).sum()
        assert row['samp_perc']==pytest.approx(stats.kept.sum()/stats.seen.sum())
        assert row['loss_perc']==pytest.approx(kept_loss/full_loss, rel=1e-5)
        assert row['full_loss']==pytest.approx(full_loss/stats.seen.sum(), rel=1e-5)
        if epoch==0: assert (row['samp_perc'],row['loss_perc'])==(1,1)
        else: assert .25==row['samp_perc']<row['loss_perc']<1
    assert row['train_loss']>row['full_loss'] # the hard items look worse than all

def test_full_loss_without_scores_is_the_training_loss():
    losses = []
    class Watch(Callback):
        run_valid = False
        def after_loss(self): losses.append((self.loss.item(), len(self.y)))

    learn = quiet_fit(table_learner(cbs=Watch()).random_subset(keep=.5, warmup=0), 1)
    *_,loss_perc,full_loss = learn.recorder.values[0]
    mean = sum(loss*n for loss,n in losses)/sum(n for _,n in losses)
    assert full_loss==pytest.approx(mean, rel=1e-5)
    assert not is_known(loss_perc)

def test_the_recorder_counts_real_steps():
    learn = quiet_fit(table_learner(n=432).selective_backprop(beta=2, seed=0), 4, 'fit_one_cycle')
    stats,rec = learn.selection.stats,learn.recorder
    n_steps = (stats.trained>0).sum()
    assert n_steps<(stats.seen>0).sum()*.7
    assert len(rec.losses)==len(rec.lrs)==len(rec.hps['lr'])==n_steps
    assert rec.iters[-1]==learn.train_iter==n_steps
    assert learn.pct_train==pytest.approx(1)
    assert rec.hps['lr']==rec.lrs
    assert rec.lrs[-1]<max(rec.lrs)/50

class Bar:
    "A progress bar that keeps the lines of its graph"
    def __init__(self): self.graphs = []

    def update_graph(self, lines, *args): self.graphs.append([list(y) for _,y in lines])

    def __getattr__(self, _): return lambda *args,**kwargs: None

def test_neighbours_that_read_the_table(tmp_path, monkeypatch):
    bar = Bar()
    class Graph(Callback):
        order = 61
        def before_fit(self): self.learn.progress.mbar = bar

    learn = table_learner(path=tmp_path).top_loss(keep=.5)
    learn.add_cbs([CSVLogger(), SaveModelCallback(monitor='full_loss'), ShowGraphCallback()])
    learn.progress.after_fit = lambda: None
    learn.add_cb(Graph())
    with learn.no_logging(): learn.fit(3)

    log = pd.read_csv(tmp_path/'history.csv')
    assert list(log.columns)==list(learn.recorder.metric_names)
    assert log.samp_perc.round(2).tolist()==[1,.5,.5]
    assert bar.graphs[-1][1]==[valid_loss for _,valid_loss,*_ in learn.recorder.values]
    assert learn.save_model.best==min(full_loss for *_,full_loss in learn.recorder.values)

def test_early_stopping_on_a_column(capsys):
    stopping = EarlyStoppingCallback(monitor='samp_perc', comp=np.less, patience=1)
    learn = table_learner(cbs=stopping).top_loss(keep=.5)
    quiet_fit(learn, 9)
    assert len(learn.recorder.values)==3

def test_tensorboard_sees_real_steps(tmp_path, monkeypatch):
    pytest.importorskip('tensorboard', reason='TensorBoard is not installed')
    from fastai.callback.tensorboard import TensorBoardCallback
    from torch.utils.tensorboard import SummaryWriter
    seen,add = [],SummaryWriter.add_scalar
    def noting(self, tag, value, step, **kwargs):
        if tag=='train_loss' and learn.training: seen.append((step, float(value)))
        add(self, tag, value, step, **kwargs)
    monkeypatch.setattr(SummaryWriter, 'add_scalar', noting)

    smooth = []
    class After(Callback):
        order,run_valid = 90,False
        def after_batch(self): smooth.append((self.train_iter, float(self.smooth_loss)))
    board = TensorBoardCallback(tmp_path, trace_model=False, log_preds=False)
    learn = table_learner(cbs=[board, After()]).selective_backprop(beta=1, warmup=0, seed=0)
    quiet_fit(learn, 1)
    n_steps = (learn.selection.stats.trained>0).sum()
    assert [step for step,_ in seen]==list(range(1, 1+n_steps))
    assert seen==smooth
    assert len(seen)<7

# Neighbours in a batch
@pytest.mark.parametrize('ours_first', [True, False])
@pytest.mark.parametrize('mixer', [MixUp, CutMix])
def test_clean_items_are_chosen_then_mixed(mixer, ours_first):
    seen,mixed = [],[]
    def note(batch, scores, losses, chosen): seen.append((batch.xb[0].clone(), batch.yb[0].clone(), scores.clone()))
    class After(Callback):
        order,run_valid = 5,False
        def before_batch(self): mixed.append((self.x.clone(), self.y.clone(), owner(self.loss_func)))
    def owner(function): return type(getattr(function, '__self__', None))

    cbs = [watch_choices(TopLossCallback(keep=.5, warmup=0), note), mixer()]
    learn = image_learner(cbs=[*(cbs if ours_first else cbs[::-1]), After()])
    loss_func = learn.loss_func
    quiet_fit(learn, 2)
    assert learn.loss_func is loss_func
    assert len(seen)==len(mixed)==10
    changed = []
    for (x,y,scores),(mixed_x,mixed_y,swapped_by) in zip(seen, mixed):
        if len(x)<8: continue
        rows = scores.topk(4).indices.sort().values
        assert swapped_by is mixer
        assert torch.equal(mixed_y, y[rows])
        assert mixed_x.shape==x[rows].shape
        changed.append(not torch.equal(mixed_x, x[rows]))
    assert sum(changed)>len(changed)/2 # what CutMix draws may be an empty box

    x,y,scores = seen[0]
    fresh = image_learner().model.eval()
    wanted = F.cross_entropy(fresh(x.as_subclass(torch.Tensor)), y.as_subclass(torch.Tensor), reduction='none')
    torch.testing.assert_close(scores, wanted)

def test_gradient_accumulation_counts_kept_items():
    class Steps(Callback):
        n = 0
        def after_step(self): self.n += 1

    learn = table_learner(n=160, cbs=[GradientAccumulation(32), Steps()]).top_loss(keep=.5, warmup=0)
    quiet_fit(learn, 1)
    assert learn.steps.n==8*8//32

SELECTS_SOON = {ImportanceSamplingCallback: dict(tau=0), BatchLossFilterCallback: dict(min_loss_perc=.5)}

@pytest.mark.parametrize('cls', by_path(methods()), ids=one_liner)
def test_mixed_precision_rounds_to_eight_and_leaves_no_autocast(cls):
    within,after = [],[]
    class Spy(Callback):
        order,run_valid = BatchSelection.order+1,False
        def after_pred(self): within.append(torch.is_autocast_enabled('cpu'))
        def after_batch(self): after.append(torch.is_autocast_enabled('cpu'))

    cb = cls(**full_epochs(cls, 0), seed=0, **SELECTS_SOON.get(cls, {}))
    learn = quiet_fit(table_learner(bs=32, cbs=[CPUMixedPrecision(), Spy(), cb]), 4)
    stats = learn.selection.stats.query('trained>0')
    assert within==[True]*len(stats)
    assert after==[False]*len(stats)
    assert (stats.trained.sum()<4*100)==leaves_out(cls)

    is_by_memory = cb.memory is not None
    for _,epoch in stats.groupby('epoch'):
        if gathers(cb): assert (epoch.trained.iloc[:-1]==32).all() # an epoch's last may be of any size
        elif not is_by_memory:
            full = epoch[epoch.seen==32]
            assert full.trained.isin([8,16,24]).all() or not leaves_out(cls)

def test_scores_have_the_precision_of_training():
    class Spy(nn.Module):
        def __init__(self):
            super().__init__()
            self.net,self.seen = mlp(),Trail()

        def forward(self, x):
            out = self.net(x)
            self.seen.append((self.training, out.dtype))
            return out

    learn = Learner(dls_of(*class_data()), Spy(), loss_func=CrossEntropyLossFlat(), cbs=CPUMixedPrecision())
    quiet_fit(learn.top_loss(warmup=0), 1)
    assert set(learn.model.seen.seen)=={(False, torch.bfloat16), (True, torch.bfloat16)}

def test_counts_are_rounded_in_mixed_precision_alone():
    learn = table_learner().batch_loss_filter(.01)
    assert learn.selection.round_to==1
    learn.add_cb(CPUMixedPrecision())
    assert learn.selection.round_to==8

# Resolution and scores
class AnySize(nn.Module):
    "Takes images of any size, and notes them"
    def __init__(self, n_out=3, dense=False):
        super().__init__()
        self.conv,self.head = nn.Conv2d(3, 4, 3, padding=1),nn.Conv2d(4, n_out, 1)
        self.dense,self.sizes = dense,Trail()

    def forward(self, x):
        self.sizes.append((self.training, tuple(x.shape[2:])))
        x = self.head(self.conv(x).relu())
        return x if self.dense else x.mean((2,3))

def sized_learner(n_out=3, dense=False):
    set_seed(0)
    x = torch.rand(48, 3, 16, 16)
    y = torch.randint(0, n_out, (48,16,16) if dense else (48,))
    loss_func = CrossEntropyLossFlat(axis=1 if dense else -1)
    return Learner(dls_of(x, y, bs=8, n_valid=16), AnySize(n_out, dense), loss_func=loss_func)

@pytest.mark.parametrize('dense', [False, True])
def test_scale_factor(dense):
    class Clear(Callback):
        def before_epoch(self): self.model.sizes.clear()
    learn = sized_learner(dense=dense)
    quiet_fit(learn.top_loss(keep=.5, scale_factor=.5, warmup=0).add_cb(Clear()), 2)
    validated = [(False, (16,16))]*len(learn.dls.valid)
    assert learn.model.sizes.seen==[(False, (8,8)), (True, (16,16))]*len(learn.dls.train)+validated

def test_scale_factor_look_ahead_does_not_disturb():
    def trained(scale): return weights(quiet_fit(sized_learner().top_loss(keep=1., scale_factor=scale, warmup=0), 2))
    assert same(trained(1.), trained(.5))

def flat_images_learner():
    dls = dls_of(torch.randn(64,3,8,8), torch.randint(0,3,(64,)))
    return Learner(dls, nn.Sequential(nn.Flatten(), nn.Linear(192,3)), loss_func=CrossEntropyLossFlat())

UNSCALABLE = [
    (table_learner, r'torch.float32 of shape \(16, 4\).*3 to 5 dimensions'),
    (flat_images_learner, 'takes no inputs of a lower resolution')]

@pytest.mark.parametrize('make,match', UNSCALABLE)
def test_scale_factor_is_refused_before_training(make, match):
    learn = make().top_loss(scale_factor=.5)
    before = weights(learn)
    with pytest.raises(ValueError, match=match): quiet_fit(learn, 1)
    assert same(before, weights(learn))

def test_entropy_selects_without_labels():
    seen = []
    def note(batch, scores, losses, chosen): seen.append((scores, batch.xb[0], weights(cb.learn)))
    cb = watch_choices(TopLossCallback(keep=.5, score='entropy', warmup=0), note)
    learn = quiet_fit(table_learner(cbs=cb), 1)
    scores,x,state = seen[-1]
    model = mlp()
    model.load_state_dict(state)
    torch.testing.assert_close(scores, torch.distributions.Categorical(logits=model.eval()(x)).entropy())
    *_,loss_perc,_ = learn.recorder.values[0]
    assert 0<loss_perc<1

def test_a_score_of_ones_own():
    learn = quiet_fit(table_learner().top_loss(keep=.25, warmup=0, score=lambda pred,y: -y.float()), 1)
    assert steps(learn, seen=16).kept.eq(4).all()

    learn.top_loss(score=lambda pred,y: pred)
    match = r'score: .* returned Tensor of shape \(16, 3\), wanted one number for each of 16 items'
    with pytest.raises(ValueError, match=match): quiet_fit(learn, 2)
    assert learn.selection.stats.query('scored').empty # in the warm-up already

# Randomness
DRAWING = [
    lambda seed: SelectiveBackpropCallback(seed=seed, warmup=0),
    lambda seed: RandomSubsetCallback(seed=seed, warmup=0),
    lambda seed: SelectiveBackpropCallback(gather=False, seed=seed, warmup=0)]

@pytest.mark.parametrize('make', DRAWING)
def test_seeds(make):
    def kept(seed):
        stats = quiet_fit(table_learner(cbs=make(seed)), 2).selection.stats
        return stats[['kept','trained','full_loss']].fillna(-1).values.tolist()
    assert kept(3)==kept(3)!=kept(4)
    assert kept(None)==kept(None)

# Bad days
class BadLoss(nn.Module):
    "Cross-entropy with some losses that are not finite"
    reduction = 'mean'

    def __init__(self, bad=float('nan')):
        super().__init__()
        self.bad = bad

    def forward(self, pred, y):
        losses = F.cross_entropy(pred, y, reduction='none')
        if not pred.requires_grad: losses = torch.cat([torch.full_like(losses[:1], self.bad), losses[1:]])
        return losses if self.reduction=='none' else losses.mean()

KEPT_OF_BAD = [
    (lambda: BatchLossFilterCallback(.5, warmup=0), 16),
    (lambda: SelectiveBackpropCallback(warmup=0), 16),
    (lambda: TopLossCallback(.25, warmup=0), 4),
    (lambda: SelectiveBackpropCallback(keep=.25, gather=False, warmup=0), 4)]

@pytest.mark.parametrize('bad', [float('nan'), float('inf')])
@pytest.mark.parametrize('make,kept', KEPT_OF_BAD)
def test_losses_that_are_not_finite(make, kept, bad):
    learn = table_learner(n=32+96, loss_func=BadLoss(bad), cbs=make())
    match = 'Epoch [01]: [56] of (80|96) losses were NaN or infinite'
    with pytest.warns(UserWarning, match=match) as warned: quiet_fit(learn, 2)
    assert len([w for w in warned if 'NaN' in str(w.message)])==2
    assert steps(learn, scored=True).kept.eq(kept).all()
    *_,samp_perc,loss_perc,full_loss = learn.recorder.values[-1]
    assert is_known(samp_perc)
    assert is_known(loss_perc)
    assert is_known(full_loss)

def test_batches_without_targets_train_in_full():
    set_seed(0)
    x = torch.randn(64, 4)
    dls = DataLoaders(*[TfmdDL(TensorDataset(x), bs=16, num_workers=0) for _ in range(2)])
    learn = Learner(dls, mlp(), loss_func=CrossEntropyLossFlat()).top_loss(warmup=0)
    learn.dls.n_inp = 1
    quiet_fit(learn, 1)
    assert (learn.selection.stats.kept==16).all()

def test_a_lone_item_gets_company():
    seen,trained = [],[]
    def note(batch, scores, losses, chosen): seen.append((batch.xb[0].clone(), scores.clone()))
    cb = watch_choices(BatchSelection(lambda scores: Chosen(scores.argmin()[None]), warmup=0), note)
    class Spy(Inside):
        def after_loss(self): trained.append(self.x.clone())

    learn = quiet_fit(table_learner(n=160, cbs=[cb, Spy()]), 1)
    assert learn.selection.stats.trained.tolist()==[2]*8
    for (x,scores),got in zip(seen, trained):
        rows = torch.stack([scores.argmin(), scores.argmax()]).sort().values
        assert torch.equal(got, x[rows])

def test_weighted_company_adds_no_gradient():
    class One(BatchMethod):
        weighs = True
        def choose(self, scores, now): return Chosen(scores.argmax()[None], torch.tensor([3.]))
    grads = []
    class Spy(Inside):
        def after_backward(self): grads.append((self.x.clone(), self.y.clone(), self.model.weight.grad.clone()))

    learn = table_learner(cbs=[BatchSelection(One(), warmup=0), Spy()])
    learn.model = nn.Linear(4, 3)
    weight,bias = (p.clone().detach().requires_grad_() for p in learn.model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter('error') # attributes of ours must not shadow a model's `weight`
        quiet_fit(learn, 1)

    x,y,grad = grads[0]
    losses = F.cross_entropy(x@weight.T+bias, y, reduction='none')
    wanted, = torch.autograd.grad(3*losses.max(), weight) # the other's weight is 0
    torch.testing.assert_close(grad, wanted)

def test_no_weight_counts_as_a_weight_of_1_where_batches_wait_together():
    "As when a schedule of `correct` passes 0"
    turns = itertools.count()
    def some(scores): return Chosen(torch.arange(3), torch.full((3,), 5.) if next(turns)%2 else None)
    seen = set()
    class Weights(Callback):
        def after_pred(self):
            weight = self.learn.selection.item_weight
            if weight is not None: seen.update(weight.tolist())

    cb = BatchSelection(PolicyMethod(some, gather=True, weighs=True), warmup=0)
    quiet_fit(table_learner(cbs=[cb, Weights()], n=32+96), 1)
    assert seen=={1.,5.}

def test_stats_may_be_read_at_any_time():
    rows = []
    class Nosy(Callback):
        def after_batch(self): rows.append(len(self.learn.selection.stats))

    plain = quiet_fit(table_learner().top_loss(seed=0), 2)
    learn = quiet_fit(table_learner(cbs=Nosy()).top_loss(seed=0), 2)
    assert [v[2:-1] for v in plain.recorder.values]==[v[2:-1] for v in learn.recorder.values]
    assert max(rows)==14
    pd.testing.assert_frame_equal(plain.selection.stats, learn.selection.stats)

def test_gathered_items_wait_while_the_window_is_closed():
    "3 items of each batch; each fifth trains as it is, the very last one, too, before what waited"
    learn = table_learner(n=32+160).random_subset(keep=.2, gather=True, warmup=0, interrupt=5)
    quiet_fit(learn, 2)
    for _,epoch in learn.selection.stats.groupby('epoch'):
        assert epoch.step.tolist()==list(range(11))
        assert epoch.seen.tolist()==[16]*10+[0]
        assert epoch.kept.tolist()==[3,3,3,3,16]*2+[0]
        assert epoch.trained.tolist()==[0,0,0,0,16,0,16,0,0,16,8]

NO_CHOICES = [
    lambda scores: scores.argsort()[:5],
    lambda scores: Chosen(scores>scores.median()),
    lambda scores: Chosen(scores[:3]),
    lambda scores: None]

@pytest.mark.parametrize('wrong', NO_CHOICES)
def test_a_choice_of_another_kind_is_refused(wrong):
    class Wrong(BatchMethod):
        def choose(self, scores, now): return wrong(scores)

    learn = table_learner(cbs=BatchSelection(Wrong(), warmup=0))
    with pytest.raises(TypeError, match=r'Wrong.choose: got .*wanted Chosen\(rows\)'): quiet_fit(learn, 1)

@pytest.mark.filterwarnings('ignore:Epoch 1. no item')
def test_where_nothing_is_chosen_an_epoch_makes_a_step_without_a_gradient():
    largest = []
    class Spy(Inside):
        def after_backward(self): largest.append(max(p.grad.abs().max().item() for p in self.model.parameters()))

    learn = quiet_fit(table_learner(cbs=[BatchSelection(Nothing()), Spy()]), 2)
    assert learn.selection.stats.query('epoch==1').trained.tolist()==[0]*6+[2]
    assert learn.selection.item_weight.tolist()==[0,0]
    assert len(largest)==len(learn.recorder.losses)==8
    assert largest[-1]==0<min(largest[:-1])
    assert learn.recorder.values[1][2]==0

OUT_OF_RANGE = [
    lambda learn: learn.top_loss(keep=0),
    lambda learn: learn.top_loss(keep=2),
    lambda learn: learn.random_subset(keep=-.1),
    lambda learn: learn.batch_loss_filter(0),
    lambda learn: learn.batch_loss_filter(1.2),
    lambda learn: learn.batch_loss_filter(min_sample_perc=-1),
    lambda learn: learn.selective_backprop(beta=-1),
    lambda learn: learn.selective_backprop(keep=0),
    lambda learn: learn.selective_backprop(beta=1, keep=.25),
    lambda learn: learn.selective_backprop(hist_size=0),
    lambda learn: learn.selective_backprop(interrupt=1),
    lambda learn: learn.selective_backprop(start=.9, end=.5),
    lambda learn: learn.selective_backprop(warmup=-1),
    lambda learn: learn.top_loss(scale_factor=0),
    lambda learn: learn.top_loss(scale_factor=1.5),
    lambda learn: learn.top_loss(score='luck'),
    lambda learn: learn.top_loss(seed=-1)]

@pytest.mark.parametrize('call', OUT_OF_RANGE)
def test_numbers_are_checked_when_the_callback_is_made(call):
    learn = table_learner()
    with pytest.raises(ValueError, match='got'): call(learn)
    assert not learn.selection

def test_wrong_types_and_words():
    learn = table_learner()
    with pytest.raises(TypeError, match="keep: got 'half'"): learn.top_loss(keep='half')

    def misspelt(method, option, who, wanted):
        match = f"^{who}: got an unknown option '{option}', wanted {wanted}"
        with pytest.raises(TypeError, match=match): getattr(learn, method)(**{option: 1})
    misspelt('top_loss', 'kep', 'TopLossCallback', "'keep', or another of keep, also_bottom, gather, ")
    misspelt('selective_backprop', 'gathr', 'SelectiveBackpropCallback', "'gather'")
    misspelt('stale_loss', 'xyzzy', 'StaleLossCallback', 'one of beta, n, ')
    misspelt('importance_sampling', 'presampl', 'ImportanceSamplingCallback', "'presample'")
    for option in ('score','gather','scale_factor','passes','presample'):
        misspelt('info_batch', option, 'InfoBatchCallback', '')

def test_items_of_unequal_number_are_refused():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x, extra): return self.net(x)

    learn = table_learner().top_loss(warmup=0)
    learn.dls.train.after_batch = lambda batch: (batch[0], torch.zeros(3), batch[1])
    learn.model = Net()
    with pytest.raises(ValueError, match='got tensors of 16 and of 3 items'): quiet_fit(learn, 1)

# Multi-label and segmentation
def test_multi_label():
    set_seed(0)
    x = torch.randn(96, 4)
    labels = (x[:,:3]>0).float()
    learn = Learner(dls_of(x, labels), mlp(), loss_func=BCEWithLogitsLossFlat()).batch_loss_filter(.8, warmup=0)
    quiet_fit(learn, 2)
    assert (learn.selection.stats.loss_share>=.8*(1-1e-6)).all()
    assert learn.selection.stats.kept.mean()<15

def test_segmentation():
    learn = sized_learner(dense=True)
    quiet_fit(learn.selective_backprop(beta=1, warmup=0), 3)
    assert 0<learn.recorder.values[-1][2]<1

# Saving
def to_input(i): return torch.randn(4, generator=torch.Generator().manual_seed(i))

def to_label(i): return i%3

def saved_learner(path, cb):
    set_seed(0)
    items = Datasets(list(range(64)), [[to_input], [to_label]], splits=[range(48), range(48, 64)])
    dls = items.dataloaders(bs=16, num_workers=0)
    return Learner(dls, mlp(), loss_func=CrossEntropyLossFlat(), path=path, cbs=cb)

@pytest.mark.parametrize('cls', by_path(methods()), ids=one_liner)
def test_pickle_and_export(cls, tmp_path, capsys):
    learn = quiet_fit(saved_learner(tmp_path, cls(**full_epochs(cls, 0))), 3)
    copy = pickle.loads(pickle.dumps(learn))
    assert copy.selection.loader is None # no pixels but the dataset's
    assert copy.selection.item_idx is None and copy.selection.is_selecting in (False,True)
    assert not tensors_in([copy.selection.current.xb, copy.selection.door.handed])
    quiet_fit(copy, 3)
    assert type(copy.selection) is cls
    assert copy.selection is not learn.selection

    said = capsys.readouterr().out
    may_say = {'this fit trained on all items'} if cls is ImportanceSamplingCallback else set()
    assert set(re.findall('this fit .*? items', said))==may_say
    assert said.count('\n')==said.count('this fit')+said.count('of epoch 1 are kept') # after three steps

    learn.export('x.pkl')
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        loaded = load_learner(tmp_path/'x.pkl')
    x,_ = learn.dls.valid.one_batch()
    torch.testing.assert_close(loaded.model.eval()(x), learn.model.eval()(x))

WITHOUT_SELBACK = """
import pickle, sys, warnings
sys.modules['selback'] = None
warnings.simplefilter('ignore')
from fastai.learner import load_learner
for name in sys.argv[1:]:
    learn = load_learner(name)
    with learn.no_bar(): print(*learn.predict(3)[2].tolist())
"""

@pytest.mark.slow
@pytest.mark.filterwarnings('ignore')
def test_an_exported_learner_needs_no_selback(tmp_path):
    "And is as another one: it takes a selection again, by the line that attached it"
    def items_of(i): return torch.full((4,), i/64) # by value in the file, since they are local
    def label_of(i): return i%3
    items = Datasets(list(range(64)), [[items_of], [label_of]], splits=[range(48), range(48, 64)])
    names,wanted = [],[]
    for cls in methods():
        name = one_liner(cls)
        learn = Learner(items.dataloaders(bs=16, num_workers=0), mlp(), CrossEntropyLossFlat(), path=tmp_path)
        quiet_fit(learn.add_cbs([cls(**full_epochs(cls, 0)), ScaleLR()]), 2)
        before = learn.add_cb(SaveSelection()).selection
        learn.export(f'{name}.pkl')
        assert learn.selection is before
        names.append(tmp_path/f'{name}.pkl')
        with learn.no_bar(): wanted.append(learn.predict(3)[2])

    done = subprocess.run([sys.executable, '-c', WITHOUT_SELBACK, *names], capture_output=True, text=True, check=True)
    got = [[float(o) for o in line.split()] for line in done.stdout.splitlines()]
    torch.testing.assert_close(torch.tensor(got), torch.stack(wanted))

    loaded = load_learner(names[0])
    assert not loaded.selection
    assert type(loaded.top_loss().selection) is TopLossCallback

def test_pytorch_loaders():
    from torch.utils.data import DataLoader
    from fastai.data.core import DataLoaders
    set_seed(0)
    ds = TensorDataset(*class_data(100))
    dls = DataLoaders(DataLoader(ds, batch_size=16, shuffle=True), DataLoader(ds, batch_size=16))
    learn = quiet_fit(Learner(dls, mlp(), loss_func=CrossEntropyLossFlat()).selective_backprop(warmup=0), 3)
    for _,epoch in learn.selection.stats.query('epoch>0 and trained>0').groupby('epoch'):
        assert (epoch.trained[:-1]==16).all()
        assert len(epoch)>1

@on_a_gpu
@pytest.mark.parametrize('gather', [False, True])
@pytest.mark.parametrize('precision', ['to_fp16', 'to_bf16'])
def test_gpu(precision, gather):
    learn = table_learner(bs=32, drop_last=True)
    learn.dls.to(torch.device('cuda'))
    getattr(learn, precision)().selective_backprop(gather=gather, warmup=0)
    quiet_fit(learn, 4)
    stats = learn.selection.stats
    last = -1 if gather else None # step of an epoch: it takes what is left
    sizes = [n for _,steps in stats.query('trained>0').groupby('epoch') for n in steps.trained[:last]]
    assert sizes and all(n%8==0 for n in sizes)
    assert not torch.is_autocast_enabled('cuda')
    assert stats.trained.sum()<stats.seen.sum()
    assert next(learn.model.parameters()).is_cuda
    if gather: assert learn.selection.history.values.is_cuda

# A batch by hand, as fastai's MixUp notebook has it
BY_HAND = [
    (TopLossCallback, dict(keep=1.), 16),
    (TopLossCallback, dict(keep=1., gather=True), 16),
    (TopLossCallback, dict(keep=.25), 4),
    (InfoBatchCallback, {}, 16),
    (ImportanceSamplingCallback, {}, 16)]

@pytest.mark.parametrize('cls,kwargs,n', BY_HAND)
@pytest.mark.parametrize('mixup', [False, True])
def test_events_by_hand(cls, kwargs, n, mixup):
    learn = table_learner(cbs=[cls(**kwargs, warmup=0)]+[MixUp(.4)]*mixup)
    learn.epoch,learn.training,learn.pct_train,learn.n_epoch = 0,True,0.,1
    dl = learn.dl = learn.dls.train
    learn.n_iter = len(dl)
    state = dl.rng.getstate()
    x,y = dl.one_batch()
    dl.rng.setstate(state)
    chance = table_learner().model.eval()(x).log_softmax(1).gather(1, y[:,None])[:,0]
    order = chance.argsort() # the hardest first
    k = int(16*kwargs['keep']) if cls is TopLossCallback else 16
    rows = torch.cat([order[:k].sort().values, order[k:].sort().values])[:n] # gathered, it is filled up from itself

    learn('before_train')
    learn.iter,b = next(enumerate(learn.dl))
    learn._split(b)
    learn('before_batch')
    assert torch.equal(learn.y, y[rows])
    assert len(learn.x)==n
    assert torch.equal(learn.x, x[rows])!=mixup
    assert hasattr(learn.loss_func, '__self__')==mixup

# As many steps as plain training
@pytest.mark.parametrize('amp', [False, True])
@pytest.mark.parametrize('cls,kwargs', by_path((cls,kwargs) for cls in methods() for kwargs in cls.keeps_all), ids=str)
def test_keeping_everything_makes_as_many_steps(cls, kwargs, amp):
    "A lone last item trains, and in mixed precision a last batch that is no multiple of 8"
    wanted = steps_of(amp)
    assert steps_of(amp, cls(**kwargs, **full_epochs(cls, 0)))==wanted
    assert len(wanted)==(14 if amp else 10)

def lone_item_learner(cbs):
    "129 items, no BatchNorm"
    learn = table_learner(n=32+129, bs=32, cbs=cbs)
    learn.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    return learn

def bf16_learner(cbs): return table_learner(n=32+100, bs=16, cbs=[*cbs, CPUMixedPrecision()])

@functools.cache
def steps_of(amp, *cbs):
    learn = bf16_learner(cbs) if amp else lone_item_learner(cbs)
    set_seed(0)
    return [float(loss) for loss in quiet_fit(learn, 2).recorder.losses]

# Taken off, and what was saved
def test_columns_stay_until_the_fit_ends():
    "Of a selection that is taken off in a callback's `before_epoch`"
    names = ['epoch','train_loss','valid_loss','samp_perc','loss_perc','full_loss','time']
    class Off(Callback):
        def before_epoch(self):
            if self.epoch==1: self.learn.full_batches()
    class Names(Callback):
        order = 90
        def after_epoch(self): assert list(self.recorder.metric_names)==names

    learn = quiet_fit(table_learner(cbs=[TopLossCallback(.5, warmup=0), Off(), Names()]), 3)
    assert [len(row) for row in learn.recorder.values]==[5,2,2]
    assert not learn.selection
    assert not ours(learn)

    quiet_fit(learn.remove_cb(learn.names), 1)
    assert list(learn.recorder.metric_names)==names[:3]+names[-1:]
    assert len(learn.recorder.values[-1])==2

# What is told
class Tells(TopLossCallback):
    def before_fit(self):
        super().before_fit()
        self.tell_once('begins', 'told as the fit begins.')

    def after_batch(self): self.tell_once('batch', 'told within an epoch.')

class Interrupts(Callback):
    order,run_valid = 60,False

    def before_batch(self):
        if self.epoch==1: raise CancelFitException

def test_nothing_is_told_into_the_training_table(capsys):
    "Header and rows stand together; what comes up within the fit is told below them"
    for others,n_rows in ([], 3),([Interrupts()], 1):
        learn = table_learner(cbs=[Tells(.5), *others])
        with learn.no_bar(): learn.fit(3)
        said = capsys.readouterr().out.splitlines()
        assert [line.startswith('[') for line in said]==[True]*n_rows+[False]*2
        assert said[n_rows:]==['Tells: told as the fit begins.','Tells: told within an epoch.']
        assert not learn.selection.untold

    learn.selection.tell_once('more', 'told at rest.')
    assert capsys.readouterr().out=='Tells: told at rest.\n'

def test_what_an_error_kept_from_being_told_is_told_before_the_next_fit(capsys):
    class Fails(Callback):
        order,run_valid = 60,False
        def before_batch(self): raise ZeroDivisionError("no")
    class Looks(Callback):
        def before_epoch(self): self.told = capsys.readouterr().out

    learn = table_learner(cbs=[Tells(.5, warmup=0), Fails()])
    with pytest.raises(ZeroDivisionError): quiet_fit(learn, 1)
    assert not capsys.readouterr().out

    learn.remove_cb(Fails)
    looks = Looks()
    quiet_fit(learn, 1, cbs=looks)
    assert looks.told=='Tells: told as the fit begins.\n'
    assert capsys.readouterr().out=='Tells: told within an epoch.\n'
