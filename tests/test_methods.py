"Every method against its paper"
import copy, math, random, warnings

import numpy as np, pytest, torch
from fastai.callback.core import Callback, CancelFitException
from fastai.callback.mixup import CutMix, MixUp
from fastai.callback.schedule import SchedLin
from helpers import *
from selback.callback.reducible_loss import reducible_loss
from torch.nn import functional as F
from torch.utils.data import Subset

def gen(seed=0): return torch.Generator().manual_seed(seed)

def item_learner(cbs, drop_last=True, **kwargs):
    "Fifty items, each of which says its own number"
    set_seed(0)
    x,y = torch.arange(50.)[:,None].repeat(1, 4),torch.arange(50)%3
    dls = dls_of(torch.cat([x[:16], x]), torch.cat([y[:16], y]), bs=8, n_valid=16, drop_last=drop_last)
    model = nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 3))
    return learner_on(dls, model, cbs=cbs, lr=.05, **kwargs)

# importance sampling
class Loads(Callback):
    "Notes, behind the selection, which items each epoch loads"
    order,run_valid = 20,False
    def before_fit(self): self.epochs = []
    def before_train(self): self.epochs.append([])
    def before_batch(self): self.epochs[-1] = self.learn.selection.loader.idxs.tolist()

def test_importance_sampling_draws_in_proportion():
    scores,counts = torch.tensor([0.,1,2,5]),torch.zeros(4)
    generator = gen()
    for _ in range(2000):
        rows = importance_sample(scores, 8, generator=generator).rows
        counts += torch.bincount(rows, minlength=4)
    p = scores/8
    assert counts[0]==0
    assert ((counts/16000-p).abs()<=4*(p*(1-p)/16000).sqrt()).all()

def test_grad_bound_is_the_distance_of_softmax_and_label():
    pred,y = torch.randn(9,4),torch.randint(0,4,(9,))
    got = get_score('grad_bound', CrossEntropyLossFlat())(pred, y)
    torch.testing.assert_close(got, (pred.softmax(1)-F.one_hot(y, 4)).norm(dim=1))
    assert not torch.is_inference_mode_enabled()
    assert not got.requires_grad
    with torch.no_grad(): of_squares = get_score('grad_bound', F.mse_loss)(pred, torch.zeros(9,4))
    torch.testing.assert_close(of_squares, (2*pred/4).norm(dim=1))

def flat_grads(grads): return torch.cat([grad.flatten() for grad in grads])

class Grads(Callback):
    order,run_valid = 60,False
    def before_fit(self): self.seen = []
    def after_backward(self): self.seen.append(flat_grads(p.grad for p in self.model.parameters()))

@pytest.mark.law(3)
def test_importance_sampling_gradients_are_unbiased():
    "The mean weighted gradient over many draws is that of the pool, also of the smaller one at an epoch's end"
    pools = []
    cb = ImportanceSamplingCallback(tau=0, warmup=1, presample=3)
    watch_choices(cb, lambda batch, scores, losses, chosen: pools.append([*batch.xb, *batch.yb]))
    learn = table_learner(n=32+64, bs=16, cbs=[cb, Grads()])
    learn.model,learn.opt = nn.Linear(4, 3),None
    trained_only(learn, 81, lr=0.)

    errors = []
    for grad,(x,y) in zip(learn.grads.seen[4:], pools, strict=True):
        of_pool = torch.autograd.grad(F.cross_entropy(learn.model(x), y), list(learn.model.parameters()))
        errors.append(grad-flat_grads(of_pool))
    errors = torch.stack(errors)
    assert len(errors)==160
    assert [len(x) for x,_ in pools]==[48,16]*80
    assert (errors.mean(0).abs()<4.5*errors.std(0)/160**.5).all()
    assert errors.std()>.01

def test_importance_sampling_waits_for_its_threshold():
    assert ImportanceSamplingCallback(presample=5).tau==pytest.approx(8/3)
    learn = quiet_fit(table_learner(n=432).importance_sampling(warmup=0), 3)
    cb = learn.selection
    assert cb.tau==2.
    assert (cb.stats.trained==cb.stats.seen).all()
    assert 0<float(cb.tau_now)<2 # equal scores: nothing to win

    cb.method.tau_now = 5.
    quiet_fit(learn, 1)
    stats = cb.stats.query('fit==2')
    assert stats.trained.tolist()[:6]==[0,0,16]*2
    assert stats.scored[:6].all()
    assert cb.tau_now<5

def test_tau_is_smoothed_as_in_the_paper():
    learn = table_learner(n=32+48).importance_sampling(warmup=0, tau=99)
    cb,gains = learn.selection,[]
    note = cb.method.look
    def spy(scores):
        gains.append(float(variance_gain(scores)))
        note(scores)
    cb.method.look = spy
    quiet_fit(learn, 2)
    wanted = 0.
    for g in gains: wanted = .9*wanted+.1*g
    assert len(gains)==6
    assert float(cb.tau_now)==pytest.approx(wanted, rel=1e-5)

# InfoBatch
@pytest.mark.parametrize('epochs', [10, 15, 40])
def test_the_last_epochs_are_full(epochs):
    weights = []
    class Spy(Callback):
        order,run_valid = 20,False
        def before_train(self): weights.append([])
        def after_pred(self): weights[-1].append(self.learn.selection.item_weight)
    learn = table_learner(n=32+24, bs=24, cbs=Spy()).info_batch(prune=.5, delta=.875)
    trained_only(learn, epochs, lr=1e-3)

    kept = learn.selection.stats.groupby('epoch').kept.sum()
    first_full = math.floor(.875*epochs)
    assert kept[0]==24
    assert (kept[1:first_full]<24).all()
    assert (kept[first_full:]==24).all()
    assert all(w is None for epoch in weights[first_full:] for w in epoch)
    assert any(w is not None and (w==2).any() for w in weights[first_full-1])

# stale losses
def passes(learn): return learn.selection.stats.groupby('epoch').scored.any()

@pytest.mark.parametrize('n,epochs', [(1,4), (2,6), (3,7), (4,9)])
def test_stale_forward_counts(n, epochs):
    "ceil(E/n)*N forward passes, the priming epoch included"
    learn = quiet_fit(table_learner().stale_loss(beta=2, n=n), epochs)
    looks,n_looks = passes(learn),math.ceil(epochs/n)
    assert [e for e in range(epochs) if e==0 or looks[e]]==list(range(0, epochs, n))
    assert int(looks.sum())+1==n_looks
    assert learn.selection.stats.query('scored').seen.sum()==(n_looks-1)*100

@pytest.mark.parametrize('kwargs', [
    dict(), dict(gather=False), dict(keep=.5), dict(warmup=0), dict(drop_last=True),
    dict(interrupt=2), dict(interrupt=3, gather=False), dict(start=.3, end=.7, warmup=0)])
def test_stale_with_n_1_is_selective_backprop(kwargs):
    options = dict(seed=1) | kwargs
    drop_last = options.pop('drop_last', False)
    if 'keep' in options: options['beta'] = 1/options.pop('keep')-1
    a = quiet_fit(short_learner(drop_last=drop_last).selective_backprop(**options), 4)
    b = quiet_fit(short_learner(drop_last=drop_last).stale_loss(n=1, **options), 4)
    assert same(weights(a), weights(b))
    assert a.selection.stats.equals(b.selection.stats)

def test_training_refreshes_a_loss_but_not_its_age():
    ages,losses,trained = [],[],[]
    class Spy(Callback):
        order,run_valid = 20,False
        def before_train(self): trained.append(set())
        def after_loss(self): trained[-1] |= set(self.learn.selection.item_idx.tolist())
        def after_train(self):
            memory = self.learn.selection.memory
            ages.append(memory.age.tolist())
            losses.append(memory.loss.clone())
    learn = item_learner([StaleLossCallback(n=4, seed=0), Spy()], drop_last=False)
    quiet_fit(learn, 4)
    assert ages==[[e+1]*50 for e in range(4)] # of all items alike, trained or not
    for e in (1,2,3):
        changed = set((losses[e]!=losses[e-1]).nonzero()[:,0].tolist())
        assert 0<len(trained[e])<35
        assert changed<=trained[e]
        assert len(changed)>.9*len(trained[e])
    assert learn.selection.memory.picked.tolist()==[sum(i in items for items in trained) for i in range(50)]

def test_items_never_seen_are_loaded():
    "Of fifty items two are not seen in the warm-up, which drops the last batch"
    learn = item_learner(StaleLossCallback(beta=9, n=50, seed=0))
    quiet_fit(learn, 1)
    unseen = set(learn.selection.memory.loss.isnan().nonzero()[:,0].tolist())
    learn.add_cb(Loads())
    quiet_fit(learn, 1)
    assert len(unseen)==2
    assert unseen<=set(learn.loads.epochs[0])

@pytest.mark.parametrize('mixer', [MixUp, CutMix])
def test_mixed_losses_count_for_the_first_item(mixer):
    seen = []
    class Spy(Callback):
        order,run_valid = 60,False
        def after_loss(self):
            mix,cb = self.loss_func.__self__,self.learn.selection
            def ce(y): return F.cross_entropy(self.pred, y.as_subclass(torch.Tensor), reduction='none')
            mixed = mix.lam*ce(self.y)+(1-mix.lam)*ce(mix.yb1[0])
            seen.append((cb.item_idx, mixed, cb.memory.loss.clone()))
    learn = image_learner(cbs=[mixer(), InfoBatchCallback(warmup=0), Spy()], n=36)
    quiet_fit(learn, 2)
    for idx,wanted,loss in seen: torch.testing.assert_close(loss[idx], wanted.detach().as_subclass(torch.Tensor))

# scores for noisy data
def scored(**kwargs):
    "Notes what each batch was chosen by, and its losses by hand"
    cb = TopLossCallback(**kwargs)
    cb.seen = []
    def note(batch, scores, losses, chosen):
        with torch.no_grad(): by_hand = F.cross_entropy(cb.model.eval()(batch.xb[0]), batch.yb[0], reduction='none')
        cb.model.train()
        cb.seen.append((batch, scores, by_hand))
    return watch_choices(cb, note)

def test_reducible_loss_scores_by_item():
    il = torch.rand(50, generator=gen())*3
    learn = item_learner(scored(keep=.5, score=ReducibleLoss(il), warmup=0))
    for batch,scores,losses in quiet_fit(learn, 2).selection.seen:
        assert batch.idx.tolist()==batch.xb[0][:,0].long().tolist()
        torch.testing.assert_close(scores, losses-il[batch.idx])
    with pytest.raises(ValueError, match='one loss for each item'): ReducibleLoss(torch.rand(3,2))
    learn = item_learner(TopLossCallback(score=ReducibleLoss(torch.rand(7)), warmup=0))
    with pytest.raises(ValueError, match='got 7 holdout losses, wanted 50'): quiet_fit(learn, 1)

def test_holdout_sets_that_overlap_are_refused():
    base = TensorDataset(*class_data(60))
    def learner(items):
        ds = Subset(base, items)
        dls = DataLoaders(TfmdDL(ds, bs=10, shuffle=True, num_workers=0), TfmdDL(ds, bs=10, num_workers=0))
        return learner_on(dls)
    a,b,c = map(learner, (range(30), range(30, 60), range(20, 50)))
    with a.no_bar(),a.no_logging(): score = reducible_loss(a, b.dls, n_epoch=1)
    x,y = base[30:60]
    torch.testing.assert_close(score.holdout, F.cross_entropy(a.model.eval()(x), y, reduction='none').detach())
    with pytest.raises(ValueError, match='shares 10 items'): reducible_loss(a, c.dls)
    with pytest.raises(ValueError, match='shares 30 items'): reducible_loss(a, a.dls)

# schedules
def kept_by_epoch(learn, n_epoch): return quiet_fit(learn, n_epoch).selection.stats.groupby('epoch').kept

def test_schedules():
    filtered = table_learner(n=160).batch_loss_filter(min_loss_perc=SchedLin(1., .3), warmup=0)
    shares = kept_by_epoch(filtered, 5).mean().tolist()
    assert shares==sorted(shares, reverse=True)
    assert shares[0]>14>8>shares[-1]

    halfway = table_learner(n=160).top_loss(keep=lambda pct: 1. if pct<.5 else .25, warmup=0)
    assert kept_by_epoch(halfway, 4).mean().tolist()==[16,16,4,4]

def test_a_schedule_of_beta_is_one_of_keep():
    def stats(**kwargs):
        return quiet_fit(short_learner().selective_backprop(**kwargs, warmup=0, seed=0), 3).selection.stats
    by_beta,by_keep = stats(beta=lambda pct: 3*pct),stats(keep=lambda pct: 1/(3*pct+1))
    assert by_beta.equals(by_keep)
    kept = by_beta.groupby('epoch').kept.sum()
    assert kept.iloc[-1]<kept.iloc[0]

@pytest.mark.parametrize('call', [
    lambda: TopLossCallback(keep=lambda pct: 1-pct),
    lambda: SelectiveBackpropCallback(beta=lambda pct: -pct),
    lambda: InfoBatchCallback(prune=lambda pct: 2*pct),
    lambda: BatchLossFilterCallback(min_loss_perc=lambda pct: 1+pct),
    lambda: InfoBatchCallback(prune=1.), lambda: InfoBatchCallback(delta=1.5),
    lambda: StaleLossCallback(n=0), lambda: StaleLossCallback(n=1.5), lambda: StaleLossCallback(beta=-1),
    lambda: ImportanceSamplingCallback(presample=0),
    lambda: ImportanceSamplingCallback(correct=-1),
    lambda: ImportanceSamplingCallback(tau=-1),
    lambda: RandomSubsetCallback(0, before_loading=True)])
def test_numbers_and_schedules_are_checked_when_the_callback_is_made(call):
    with pytest.raises(ValueError, match='got'): call()

# saving
class Picks(Callback):
    "The items that train, in order"
    order,run_valid = 20,False
    def before_fit(self): self.picks = []
    def after_loss(self): self.picks.append((self.epoch, self.x[:,0].long().tolist()))

class StopAfter(Callback):
    order = 70
    def __init__(self, epochs): self.epochs = epochs
    def after_epoch(self):
        if self.epoch+1==self.epochs: raise CancelFitException

RESUMED = {
    StaleLossCallback: [dict(n=2), dict(n=3), dict(ema=.5)],
    SelectiveBackpropCallback: [dict(), dict(gather=False), dict(track_items=True)],
    FavorHardCallback: [dict(), dict(max_rest=1, ema=.5), dict(correct=1.)],
    PrioritizedSamplingCallback: [dict(), dict(correct=1., warmup=0)],
    BalancedSamplingCallback: [dict(), dict(alpha=1., ema=.5), dict(power=.5, n=30)],
    ImportanceSamplingCallback: [dict(tau=0), dict(tau=1.05)],
    RandomSubsetCallback: [dict(), dict(before_loading=True), dict(gather=True)],
    TopLossCallback: [dict(), dict(gather=True), dict(passes=1)]}

WITH_STATE = StaleLossCallback,EarlyLossSamplingCallback # of their own

def resumed_cases():
    "The first setting of a method for each path, and of those with a state of their own"
    for cls in methods():
        for n,kwargs in enumerate(RESUMED.get(cls, [dict()])):
            is_fast = n==0 and cls in (*PATHS.values(),*WITH_STATE)
            yield (pytest.param if is_fast else slow)(cls, kwargs)

@pytest.mark.parametrize('cls,kwargs', resumed_cases())
def test_a_stopped_fit_goes_on_with_the_same_items(cls, kwargs, tmp_path):
    def learner(**more): return item_learner([cls(**kwargs), Picks()], **more)
    whole = quiet_fit(learner(), 6)

    first = quiet_fit(learner(path=tmp_path), 6, cbs=StopAfter(3))
    first.save('half')
    first.save_selection('half')
    of_python,of_numpy,of_torch = random.getstate(),np.random.get_state(),torch.get_rng_state()
    of_loader = first.dls.train.rng.getstate()

    then = learner(path=tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning) # that a setting is another one
        then.load('half').load_selection('half')
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    torch.set_rng_state(of_torch)
    then.dls.train.rng.setstate(of_loader)
    quiet_fit(then, 6, start_epoch=3)
    assert first.picks.picks+then.picks.picks==whole.picks.picks
    assert len(then.picks.picks)>3
    assert same(weights(whole), weights(then))

def test_states_of_another_method_are_refused():
    state = quiet_fit(short_learner().stale_loss(), 1).selection.state_dict()
    other = short_learner().top_loss().selection
    with pytest.raises(ValueError, match='got the state of StaleLoss.*, wanted one of TopLoss'):
        other.load_state_dict(state)
    for foreign in {}, None, dict(model=1, opt=2), dict(method='TopLossCallback'):
        with pytest.raises(ValueError, match='load_state_dict: got .*, wanted what state_dict'):
            other.load_state_dict(foreign)

def test_a_saved_state_stays_as_it_was():
    "Also where one that goes on from it trains"
    learn = quiet_fit(short_learner().stale_loss(warmup=0), 2)
    state = learn.selection.state_dict()
    before = copy.deepcopy(state)
    quiet_fit(learn, 2)
    assert alike(state, before)
    learn.selection.load_state_dict(state)
    assert alike(learn.selection.state_dict(), before)
    quiet_fit(learn, 1)
    assert alike(state, before)

# what the report says of epochs that leave items out
def test_negative_scores_never_switch_importance_sampling_on():
    assert variance_gain(torch.tensor([3.,-2.9])).item()==1
    learn = quiet_fit(table_learner(n=224).importance_sampling(score=ReducibleLoss(torch.full((192,), .9))), 4)
    assert (learn.selection.stats.trained==16).all()

def test_stale_losses_by_reducible_loss():
    holdout_losses = torch.zeros(50)
    holdout_losses[:25] = 99.
    stale = StaleLossCallback(beta=4, n=99, score=ReducibleLoss(holdout_losses), seed=0)
    learn = quiet_fit(item_learner([stale, Loads()], drop_last=False), 12)
    loaded = torch.tensor(sum(learn.loads.epochs[1:], []))
    assert (loaded>=25).float().mean()>.9
    for bad in ('entropy', lambda pred, y: y.float()):
        with pytest.raises(ValueError, match='stored losses choose'): StaleLossCallback(score=bad)

@pytest.mark.parametrize('n', [2, 3])
def test_stale_scoring_epochs_keep_what_beta_says(n):
    "The CDF of a scoring epoch is not that of an untrained model"
    learn = quiet_fit(table_learner(n=32+640, seed=3).stale_loss(beta=2, n=n, seed=0), 13)
    stats = learn.selection.stats.query('scored')
    n_items = stats.seen.sum()
    assert abs(stats.kept.sum()/n_items-1/3)<4*(.09/n_items)**.5+.02 # losses fall within an epoch, too
    assert (stats.groupby('epoch').kept.sum()/640-1/3).abs().max()<.1
