"Every method against its paper"
import math, pickle, random, warnings

import numpy as np, pandas as pd, pytest, torch
from fastai.callback.core import Callback, CancelFitException
from fastai.callback.mixup import CutMix, MixUp
from fastai.callback.schedule import SchedLin
from fastai.data.block import CategoryBlock
from helpers import *
from selback.callback.reducible_loss import reducible_loss
from torch.nn import functional as F
from torch.utils.data import Subset

def gen(seed=0): return torch.Generator().manual_seed(seed)

def numbered_dls(drop_last):
    x,y = torch.arange(50.)[:,None].repeat(1, 4),torch.arange(50)%3
    train = TfmdDL(TensorDataset(x, y), bs=8, shuffle=True, drop_last=drop_last, num_workers=0)
    valid = TfmdDL(TensorDataset(x[:16], y[:16]), bs=8, num_workers=0)
    return DataLoaders(train, valid)

def item_learner(cbs, drop_last=True, **kwargs):
    "Fifty items, each of which says its own number"
    set_seed(0)
    dls = numbered_dls(drop_last)
    model = nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 3))
    return Learner(dls, model, loss_func=CrossEntropyLossFlat(), cbs=cbs, lr=.05, **kwargs)

# importance sampling
class Loads(Callback):
    "Notes, behind the selection, which items each epoch loads"
    order,run_valid = 20,False
    def before_fit(self): self.epochs = []
    def before_train(self): self.epochs.append([])
    def before_batch(self): self.epochs[-1] = self.learn.selection.loader.idxs.tolist()

def test_tau_of_equal_and_of_one_hot_scores():
    for n in (2, 9, 100):
        assert variance_gain(torch.full((n,), 3.)).item()==pytest.approx(1)
        assert variance_gain(F.one_hot(torch.tensor(1), n).float()).item()==pytest.approx(n**.5)
    scores = torch.rand(50, generator=gen())
    g,u = scores.double()/scores.double().sum(),1/50
    in_the_paper = (1-(g-u).square().sum()/g.square().sum())**-.5
    assert variance_gain(scores).item()==pytest.approx(float(in_the_paper), rel=1e-5)

def test_importance_weights_are_unbiased():
    generator = gen(1)
    scores,x = torch.rand(40, generator=generator)+.05,torch.randn(40, generator=generator)
    means,weights = [],[]
    for _ in range(2000):
        c = importance_sample(scores, 8, generator=generator)
        means.append((x[c.rows]*c.weight).mean())
        weights.append(c.weight.mean())
    for values,wanted in ((means, x.mean()), (weights, torch.tensor(1.))):
        values = torch.stack(values)
        assert abs(values.mean()-wanted)<4*values.std()/2000**.5
    p = scores/scores.sum()
    torch.testing.assert_close(c.weight, 1/(40*p[c.rows]))

def test_importance_sampling_draws_in_proportion():
    scores,counts = torch.tensor([0.,1,2,5]),torch.zeros(4)
    generator = gen()
    for _ in range(2000):
        rows = importance_sample(scores, 8, generator=generator).rows
        counts += torch.bincount(rows, minlength=4)
    p = scores/8
    assert counts[0]==0
    assert ((counts/16000-p).abs()<=4*(p*(1-p)/16000).sqrt()).all()

def test_bias_softens_the_weights_and_keeps_their_sum_of_scores():
    scores = torch.rand(30, generator=gen())
    exact,half,none = (importance_sample(scores, 16, correct, gen(5)) for correct in (1., .5, 0.))
    assert torch.equal(exact.rows, half.rows)
    assert none.weight is None
    s = scores[exact.rows]
    torch.testing.assert_close((half.weight*s).sum(), (exact.weight*s).sum())
    torch.testing.assert_close((half.weight/half.weight[0]), (exact.weight/exact.weight[0]).sqrt())

@pytest.mark.parametrize('bad', [
    torch.zeros(5), torch.tensor([1.,float('nan'),1,1,1]), torch.tensor([1.,-1,1,1,1])])
def test_scores_that_cannot_be_drawn_by_are_drawn_uniformly(bad):
    c = importance_sample(bad, 400, generator=gen())
    assert (torch.bincount(c.rows, minlength=5)>40).all()
    assert torch.equal(c.weight, torch.ones(400))

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
@pytest.mark.parametrize('prune', [.3, .5, .9])
def test_prune_easy(prune):
    scores = torch.rand(1000, generator=gen())**2
    easy = scores<scores.mean()
    c = prune_easy(scores, prune, gen())
    kept = torch.zeros(1000, dtype=torch.bool).index_fill_(0, c.rows, True)
    assert kept[~easy].all()
    assert abs((kept & easy).sum()-(1-prune)*int(easy.sum()))<1-1e-6
    torch.testing.assert_close(c.weight, torch.where(easy[c.rows], 1/(1-prune), 1.))
    assert abs(c.weight.sum()-1000)<1/(1-prune)+1e-3

def test_nothing_is_pruned_that_is_not_below_the_mean():
    assert prune_easy(torch.ones(5)).rows.tolist()==[0,1,2,3,4]
    assert 0 in prune_easy(torch.tensor([float('nan'),1.,1.,9.]), .99, gen()).rows
    assert torch.equal(prune_easy(torch.full((3,), float('nan'))).weight, torch.ones(3))

def test_pruning_is_unbiased():
    generator = gen(2)
    scores,x = torch.rand(60, generator=generator)**2,torch.randn(60, generator=generator)
    draws = [prune_easy(scores, .5, generator) for _ in range(1500)]
    sums = torch.stack([(x[c.rows]*c.weight).sum() for c in draws])
    assert abs(sums.mean()-x.sum())<4*sums.std()/1500**.5
    assert sums.std()>.1

@pytest.mark.parametrize('epochs', [10, 15, 20, 40, 100])
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

def test_info_batch_goes_by_training_losses():
    noted = {}
    class Spy(Callback):
        order,run_valid = 60,False
        def after_loss(self):
            losses = F.cross_entropy(self.pred, self.y, reduction='none')
            noted.update(zip(self.learn.selection.item_idx.tolist(), losses.tolist()))
    learn = item_learner([InfoBatchCallback(seed=0), Spy()], drop_last=False)
    quiet_fit(learn, 1)
    memory = learn.selection.memory
    assert memory.loss.tolist()==pytest.approx([noted[i] for i in range(50)])
    assert (memory.picked==1).all()

    before = memory.loss.clone()
    quiet_fit(learn, 8)
    steps = learn.selection.stats.query('fit==2')
    n_easy = int((before<before.mean()).sum())
    assert not steps.scored.any()
    assert steps[steps.epoch==0].kept.sum() in (50-n_easy+n_easy//2, 50-n_easy//2) # rounded either way

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

def test_favor_hard_never_looks():
    stats = quiet_fit(table_learner().favor_hard(beta=2), 6).selection.stats
    kept = stats.groupby('epoch').kept.sum()
    assert not stats.scored.any()
    assert kept[0]==100
    assert (kept[1:]<70).all()
    without_warmup = quiet_fit(table_learner().favor_hard(warmup=0), 2).selection.stats
    assert without_warmup.query('epoch==0').kept.sum()==100 # nothing is known yet

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

def test_stale_epochs_draw_anew_and_by_loss():
    learn = item_learner([StaleLossCallback(beta=2, n=10**6, seed=0), Loads()], drop_last=False)
    cb = learn.selection
    choose = cb.method.choose
    def fixed(scores, now): return choose(torch.arange(50.)[now.idx] if cb.method.before_loading else scores, now)
    cb.method.choose = fixed
    trained_only(learn, 121, bs=50)
    picks = [frozenset(epoch) for epoch in learn.loads.epochs[1:]]
    rate = torch.tensor([sum(i in pick for pick in picks)/120 for i in range(50)])
    p = ((torch.arange(50)+.5)/50)**2
    assert ((rate-p).abs()<=4.5*(p*(1-p)/120).sqrt()+.01).all()
    assert len(set(picks))>117

def test_items_never_seen_are_loaded():
    "Of fifty items two are not seen in the warm-up, which drops the last batch"
    learn = item_learner(StaleLossCallback(beta=9, n=50, seed=0))
    quiet_fit(learn, 1)
    unseen = set(learn.selection.memory.loss.isnan().nonzero()[:,0].tolist())
    learn.add_cb(Loads())
    quiet_fit(learn, 1)
    assert len(unseen)==2
    assert unseen<=set(learn.loads.epochs[0])

def test_ema_chooses_by_the_smoothed_loss():
    learn = item_learner(StaleLossCallback(n=9, ema=.5), drop_last=False)
    quiet_fit(learn, 1)
    first = learn.selection.memory.loss.clone()
    quiet_fit(learn, 1)
    memory = learn.selection.memory
    trained = memory.picked==2
    torch.testing.assert_close(memory.ewma[trained], .5*(first+memory.loss)[trained])
    assert memory.ema==.5
    with pytest.raises(ValueError, match='ema'): StaleLossCallback(ema=1.)

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

def test_a_memory_is_small():
    memory = ItemMemory(3)
    assert sum(getattr(memory, name).element_size() for name in memory.fields)<=28 # of which 4 are a mark of its target

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
        return Learner(dls, mlp(), loss_func=CrossEntropyLossFlat())
    a,b,c = map(learner, (range(30), range(30, 60), range(20, 50)))
    with a.no_bar(),a.no_logging(): score = reducible_loss(a, b.dls, n_epoch=1)
    x,y = base[30:60]
    torch.testing.assert_close(score.holdout, F.cross_entropy(a.model.eval()(x), y, reduction='none').detach())
    with pytest.raises(ValueError, match='shares 10 items'): reducible_loss(a, c.dls)
    with pytest.raises(ValueError, match='shares 30 items'): reducible_loss(a, a.dls)

# both tails, random, schedules
def test_both_tails():
    scores = torch.randperm(20, generator=gen()).float()
    rows = top_k(scores, .3, .2).rows
    assert sorted(scores[rows].tolist())==[0,1,2,3,14,15,16,17,18,19]
    assert rows.tolist()==sorted(rows.tolist())
    assert len(top_k(scores, .3, .2, 8).rows)==16
    for bad in (dict(keep=.8, also_bottom=.3), dict(also_bottom=-.1)):
        with pytest.raises(ValueError, match='also_bottom'): TopLossCallback(**bad)

def kept_by_epoch(learn, n_epoch): return quiet_fit(learn, n_epoch).selection.stats.groupby('epoch').kept

def test_schedules():
    filtered = table_learner(n=160).batch_loss_filter(min_loss_perc=SchedLin(1., .3), warmup=0)
    shares = kept_by_epoch(filtered, 5).mean().tolist()
    assert shares==sorted(shares, reverse=True)
    assert shares[0]>14>8>shares[-1]

    halfway = table_learner(n=160).top_loss(keep=lambda pct: 1. if pct<.5 else .25, warmup=0)
    assert kept_by_epoch(halfway, 4).mean().tolist()==[16,16,4,4]

    pruned = kept_by_epoch(short_learner().info_batch(prune=SchedLin(0., .9), delta=1.), 6).sum()
    assert pruned.iloc[-1]<pruned.iloc[1]

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

# Composer
def test_composers_variant():
    learn,sizes = sized()
    learn.selective_backprop(keep=.5, start=.5, end=.9, interrupt=2, scale_factor=.5, gather=False, warmup=0)
    class Forgets(Callback):
        "What the first batch was asked"
        def before_epoch(self):
            if self.epoch==1: sizes.seen.clear()
    quiet_fit(learn, 10, cbs=Forgets())
    stats,n = learn.selection.stats,len(learn.dls.train)
    def is_on(epoch, i):
        pct = (epoch+i/n)/10
        return .5<=pct+1e-9 and pct<.9-1e-9 and (i+1)%2!=0
    on = [is_on(epoch, i) for epoch in range(10) for i in range(n)]
    assert stats.scored.tolist()==on
    assert (stats[stats.scored].kept==4).all()
    assert (stats[~stats.scored].kept==8).all()
    assert sizes.seen.count((8,8))==sum(on)
    assert set(sizes.seen)=={(8,8),(16,16)}

def sized():
    "A learner of images, and the sizes of those that train or are looked at"
    set_seed(0)
    sizes = Trail()
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv,self.head = nn.Conv2d(3, 4, 3, padding=1),nn.Conv2d(4, 3, 1)
        def forward(self, x):
            if self.training or x.shape[2]==8: sizes.append(tuple(x.shape[2:]))
            return self.head(self.conv(x).relu()).mean((2,3))
    dls = dls_of(torch.rand(48, 3, 16, 16), torch.randint(0, 3, (48,)), bs=8, n_valid=16)
    return Learner(dls, Net(), loss_func=CrossEntropyLossFlat()),sizes

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

def tensors_in(o):
    if isinstance(o, torch.Tensor): return [o]
    if isinstance(o, dict): o = o.values()
    elif not isinstance(o, (tuple,list)): return []
    return [tensor for part in o for tensor in tensors_in(part)]

def n_waiting(selection):
    "How many chosen items of this epoch wait until there are enough for a batch"
    stats = selection.stats
    if not isinstance(selection, BatchSelection) or not len(stats): return 0
    of_epoch = stats[(stats.fit==stats.fit.iloc[-1]) & (stats.epoch==stats.epoch.iloc[-1])]
    return max(0, int((of_epoch.kept-of_epoch.trained).sum())) # the last batch may be topped up with others

def holds_batches(state):
    "Are there rows of four numbers in a state? It has a number for each item, and tables of three classes"
    return any(tensor.ndim>1 and max(tensor.shape)>3 for tensor in tensors_in(state))

@pytest.mark.parametrize('make,waits', [
    (lambda: SelectiveBackpropCallback(beta=1, warmup=0), True),
    (lambda: pooled(2, TopLossCallback(.7, gather=True, warmup=0)), True),
    (lambda: RandomSubsetCallback(.7, gather=True, warmup=0), True),
    (lambda: ImportanceSamplingCallback(tau=0, warmup=0), False)]) # it draws a whole batch each time
def test_a_state_saved_within_an_epoch_holds_no_items_of_a_batch(make, waits):
    waited = []
    class Saves(Callback):
        order,run_valid = 60,False
        def after_batch(self):
            cb = self.learn.selection
            waited.append(n_waiting(cb))
            assert not holds_batches(cb.state_dict())
    learn = item_learner([make(), Saves()])
    quiet_fit(learn, 1)
    assert len(waited)>1
    assert any(waited)==waits
    assert waited[-1]==0

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

def in_words(o): return one_liner(o) if isinstance(o, type) else str(o)

@pytest.mark.parametrize('cls,kwargs', resumed_cases(), ids=in_words)
def test_a_stopped_fit_goes_on_with_the_same_items(cls, kwargs, tmp_path):
    def learner(**more): return item_learner([cls(**kwargs), Picks()], **more)
    whole = quiet_fit(learner(), 6)

    first = quiet_fit(learner(path=tmp_path), 6, cbs=StopAfter(3))
    first.save('half')
    first.save_selection('half')
    assert not n_waiting(first.selection)
    assert not holds_batches(first.selection.state_dict())
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
        for cb in TopLossCallback(),StaleLossCallback():
            selection = short_learner(cbs=cb).selection
            with pytest.raises(ValueError, match='load_state_dict: got .*, wanted what state_dict\\(\\) of'):
                selection.load_state_dict(foreign)
    with pytest.raises(ValueError, match='attach it first'): StaleLossCallback().load_state_dict(state)

def test_states_of_another_dataset_are_refused():
    state = quiet_fit(table_learner().stale_loss(), 1).selection.state_dict()
    used = quiet_fit(table_learner(n=64).stale_loss(), 1).selection
    before = used.state_dict()
    refused = 'got a state in which none of the 32 training items was found, wanted one of these'
    with pytest.raises(ValueError, match=refused): used.load_state_dict(state)
    assert used.epochs_done==before['epochs_done']
    assert used.memory.frame().equals(memory_of(before))
    fresh = table_learner(n=64).stale_loss().selection
    with pytest.raises(ValueError, match=refused): fresh.load_state_dict(state)

def memory_of(state):
    saved = state['parts']['notes'][0]['of']['memory']
    memory = ItemMemory(len(saved['loss']))
    memory.load_state_dict(saved)
    return memory.frame()

def test_columns_that_are_unknown_are_left_out():
    "As older states have some"
    used = quiet_fit(short_learner().stale_loss(), 2).selection
    state = used.state_dict()
    n = len(used.memory)
    more = dict(streak=torch.ones(n, dtype=torch.int16), looked=torch.ones(n, dtype=torch.bool))
    state['parts']['notes'][0]['of']['memory'] |= more
    other = short_learner().stale_loss().selection
    other.load_state_dict(state)
    assert other.memory.frame().equals(used.memory.frame())
    assert not more.keys() & other.state_dict()['parts']['notes'][0]['of']['memory'].keys()

def test_a_saved_state_stays_as_it_was():
    learn = quiet_fit(short_learner().stale_loss(warmup=0), 2)
    state = learn.selection.state_dict()
    def history(): return state['parts']['method']['history']['values']
    memory,values = memory_of(state),history().clone()
    quiet_fit(learn, 2)
    assert memory_of(state).equals(memory)
    assert torch.equal(history(), values)

    learn.selection.load_state_dict(state)
    assert learn.selection.memory.frame().equals(memory)
    assert learn.selection.epochs_done==2

# plain PyTorch
def test_two_that_load_a_state_share_nothing():
    state = quiet_fit(short_learner().stale_loss(warmup=0), 2).selection.state_dict()
    a,b = (short_learner().stale_loss().selection for _ in range(2))
    for cb in (a, b): cb.load_state_dict(state)
    assert a.history.values is not b.history.values

# what the report says of epochs that leave items out
@pytest.mark.parametrize('make', [
    lambda: RandomSubsetCallback(.3, before_loading=True),
    lambda: InfoBatchCallback(delta=1.),
    lambda: StaleLossCallback(n=9),
    FavorHardCallback,
    DropEasyCallback])
def test_columns_of_epochs_that_leave_items_out(make):
    learn = quiet_fit(table_learner(cbs=make()), 4)
    names,stats = list(learn.recorder.metric_names)[1:],learn.selection.stats
    is_random = isinstance(learn.selection, RandomSubsetCallback)
    for epoch,values in enumerate(learn.recorder.values):
        row,steps = dict(zip(names, values)),stats.query(f'epoch=={epoch}')
        share = row['samp_perc']
        assert share==pytest.approx(steps.kept.sum()/100)
        assert (share<.8)==(epoch>0)
        assert steps.seen.sum()==100
        if epoch and is_random: assert math.isnan(row['loss_perc'])
        elif epoch: assert share<row['loss_perc']<1
        assert row['full_loss']>0
    quiet_fit(learn, 1)
    assert (learn.selection.stats.groupby(['fit','epoch']).seen.sum()==100).all()

def test_tiny_shares_load_two_items():
    for cb in (RandomSubsetCallback(.01, before_loading=True), StaleLossCallback(beta=500, n=99)):
        stats = quiet_fit(table_learner(cbs=cb), 3).selection.stats
        first,*later = stats.query('step>=0').groupby('epoch').kept.sum().tolist()
        assert first==100
        assert all(2<=n<=4 for n in later)

def test_a_gain_is_noted_once_a_batch():
    learn = table_learner(n=32+192).importance_sampling(warmup=0, tau=1.2)
    cb,sizes = learn.selection,[]
    note = cb.method.look
    def spy(scores):
        sizes.append((cb.iter, len(scores)))
        note(scores)
        cb.method.tau_now = 1.21 if cb.iter==0 else 1.
    cb.method.look = spy
    quiet_fit(learn, 1)
    assert sizes==[(0,16),(3,48)]+[(i,16) for i in range(4, 12)]

def test_negative_scores_never_switch_importance_sampling_on():
    assert variance_gain(torch.tensor([3.,-2.9])).item()==1
    learn = quiet_fit(table_learner(n=224).importance_sampling(score=ReducibleLoss(torch.full((192,), .9))), 4)
    assert (learn.selection.stats.trained==16).all()

def test_tuple_predictions():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()
        def forward(self, x): return self.net(x),x.mean(1)
    def first(pred, y, reduction='mean'): return F.cross_entropy(pred[0], y, reduction=reduction)
    def learner(cb): return Learner(dls_of(*class_data()), Pair(), loss_func=first, cbs=cb)
    for cb in (InfoBatchCallback(delta=1.), ImportanceSamplingCallback(tau=0, score='loss'), TopLossCallback()):
        assert quiet_fit(learner(cb), 3).selection.stats.kept.sum()<300
    learn = learner(ImportanceSamplingCallback())
    with pytest.raises(ValueError, match='wanted a tensor'): quiet_fit(learn, 3)

def test_keep_schedules_can_be_pickled():
    cb = pickle.loads(pickle.dumps(SelectiveBackpropCallback(keep=SchedLin(1., .25))))
    assert cb.beta(1.)==pytest.approx(3)
    assert cb.beta(0.)==0

def test_tables_held_out():
    from fastai.tabular.all import TabularDataLoaders, tabular_learner
    noise = np.random.default_rng(0).normal(size=80)
    frame = pd.DataFrame(dict(a=np.arange(80.), b=noise, y=np.arange(80)%2))
    columns = dict(cont_names=['a','b'], y_names='y', y_block=CategoryBlock())
    def dls(rows):
        table = frame.iloc[rows]
        return TabularDataLoaders.from_df(table, **columns, bs=8, valid_idx=list(range(5)), num_workers=0)
    held_out,apart,overlapping = map(dls, (range(40), range(40,80), range(20,60)))
    learn = tabular_learner(held_out, layers=[8])
    with learn.no_bar(),learn.no_logging():
        assert len(reducible_loss(learn, apart, n_epoch=1).holdout)==35
        with pytest.raises(ValueError, match='items with the training set'):
            reducible_loss(learn, overlapping, n_epoch=0)

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

class GradientSums(Callback):
    "Of each epoch the sum of its gradients, which is that of the loaded items with their weights"
    order,run_valid = 60,False
    def before_fit(self): self.sums = []
    def before_train(self): self.total,self.by_hand = 0.,0.

    def after_loss(self):
        weight = self.learn.selection.item_weight
        of_items = F.one_hot(self.y, 3)-self.pred.detach().softmax(1) # less the gradient of each item's loss
        if weight is not None: of_items = of_items*weight[:,None]
        self.by_hand = self.by_hand-of_items.sum(0)

    def after_backward(self): self.total = self.total+self.model.bias.grad*len(self.y)

    def after_train(self):
        torch.testing.assert_close(self.total, self.by_hand, rtol=1e-4, atol=1e-4)
        self.sums.append(self.total.clone())

@pytest.mark.law(3)
def test_info_batch_gradients_are_unbiased():
    "On average over the draws the sum of an epoch's gradients is that of all items"
    cb = InfoBatchCallback(prune=.5, delta=1., seed=0, warmup=0)
    learn = item_learner([cb, GradientSums()], drop_last=False)
    learn.model,learn.opt = nn.Linear(4, 3),None
    torch.nn.init.normal_(learn.model.weight, std=.01)
    trained_only(learn, 151, bs=25, lr=0.)
    full,*draws = learn.gradient_sums.sums
    draws = torch.stack(draws)
    assert draws.std(0).max()>.1
    assert ((draws.mean(0)-full).abs()<4.5*draws.std(0)/150**.5).all()
