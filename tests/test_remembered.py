"What is remembered of an item is the loss that trained it, or there is an error before the first step"
import warnings
from functools import partial

import pytest, torch
from fastai.callback.core import Callback, CancelBatchException
from fastai.callback.training import GradientAccumulation
from fastai.learner import Learner
from helpers import *
from selback.core.policies import Chosen
from torch.nn import functional as F

N = 64
ASKING = [*filter(goes_by_losses, methods())] # new ones as well
by_losses = pytest.mark.parametrize('make', ASKING, ids=one_liner)

def at_once(make): return make(**full_epochs(make, 0))

def net(): return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

def learner(cb, loss_func=None, model=None, lr=0., bs=16, cbs=(), kind=Learner, **kwargs):
    set_seed(0)
    x,y = torch.randn(N+16, 4),torch.randint(0, 3, (N+16,))
    dls = dls_of(x, y, bs=bs, n_valid=16)
    return kind(dls, model or net(), loss_func=loss_func or CrossEntropyLossFlat(), cbs=[cb, *cbs], lr=lr, **kwargs)

def true_losses(learn, model=None):
    "The loss of each item by hand"
    x,y = learn.dls.train.dataset.tensors
    with torch.no_grad(): return F.cross_entropy((model or learn.model)(x), y, reduction='none')

def fit(learn, n_epoch=3): return trained_only(learn, n_epoch)

def check_remembered(learn, wanted):
    torch.testing.assert_close(learn.selection.memory.loss, wanted, rtol=1e-4, atol=1e-6)

class Steps(Callback):
    "Counts the steps that were taken, and those of weighted items"
    order,run_valid = 90,False
    def __init__(self): self.n = self.n_weighed = 0
    def before_step(self):
        self.n += 1
        self.n_weighed += self.learn.selection.item_weight is not None

def refused(learn, match='item_loss', weighed=False):
    "The fit ends with an error before the first step, or before the first one of weighted items"
    learn.add_cb(Steps())
    with pytest.raises((ValueError,TypeError), match=match): fit(learn)
    assert not (learn.steps.n_weighed if weighed else learn.steps.n)

# A loss that a callback sets
class StandIn:
    "A loss function that says nothing"
    reduction = 'mean'
    def __call__(self, pred, y): return pred.new_zeros(len(pred) if self.reduction=='none' else ())

class SetsLoss(Callback):
    "Has the model's own loss trained"
    order,run_valid = 0,False
    def after_loss(self): self.learn.loss_grad = F.cross_entropy(self.pred, self.y)

@by_losses
@pytest.mark.parametrize('stand_in', [StandIn(), lambda pred, y: pred.new_zeros(())], ids=['unreduced','number'])
def test_a_loss_that_a_callback_sets_is_refused(make, stand_in):
    refused(learner(at_once(make), stand_in, cbs=[SetsLoss()]))

@pytest.mark.parametrize('make', [FavorHardCallback, StaleLossCallback])
def test_with_item_loss_it_is_remembered(make):
    cb = make(item_loss=lambda pred, y: F.cross_entropy(pred, y, reduction='none'))
    learn = fit(learner(cb, StandIn(), cbs=[SetsLoss()]))
    check_remembered(learn, true_losses(learn))

def normalised(pred, y): return F.cross_entropy(pred, y)/pred.std()

@by_losses
def test_another_loss_within_a_fit_is_checked_as_well(make):
    class Swaps(Callback):
        run_valid = False
        def before_epoch(self):
            if self.epoch==1: self.learn.loss_func = normalised
    learn = learner(at_once(make), cbs=[Swaps(),Steps()])
    with pytest.raises(ValueError, match='item_loss'): fit(learn)
    assert learn.epoch==1
    assert learn.steps.n<=4

def test_another_loss_of_another_scale_is_told_of(capsys):
    learn = fit(learner(FavorHardCallback()), 2)
    assert 'another one' not in capsys.readouterr().out
    learn.loss_func = lambda pred, y, reduction='mean': 10*F.cross_entropy(pred, y, reduction=reduction)
    fit(learn, 2)
    assert capsys.readouterr().out.count('the loss function is another one')==1

def test_equal_losses_are_told_of(capsys):
    fit(learner(FavorHardCallback(item_loss=lambda pred, y: pred.new_ones(len(y)))), 2)
    assert capsys.readouterr().out.count('all losses that are remembered are equal')==1
    fit(learner(FavorHardCallback()), 2)
    assert 'equal' not in capsys.readouterr().out

# No false alarm

@pytest.mark.parametrize('loss', [ # test_matrix.py has others
    CrossEntropyLossFlat(reduction='sum'),
    CrossEntropyLossFlat(ignore_index=1),
    partial(F.cross_entropy, reduction='sum')], ids=['sums','ignores','own_sum'])
@pytest.mark.parametrize('make', [FavorHardCallback, TopLossCallback, partial(InfoBatchCallback, correct=1.),
    partial(TopLossCallback, passes=1)], ids=['before','within','weights','one_pass'])
def test_sums_and_ignored_items_are_no_other_loss(make, loss):
    cbs = [CPUMixedPrecision(), GradientAccumulation(32)]
    fit(learner(make(warmup=0), loss, lr=1e-2, cbs=cbs), 2)

# Outputs that are no predictions
class Several(nn.Module):
    "Also returns a number that is added to the loss, and, for some heads, attention that isn't"
    def __init__(self, heads=0):
        super().__init__()
        self.features,self.head = nn.Linear(4, 8),nn.Linear(8, 3)
        self.heads = heads

    def forward(self, x):
        h = self.features(x)
        attention = dict(attention=(h@h.T).expand(self.heads, -1, -1).softmax(-1)) if self.heads else {}
        return dict(logits=self.head(h), balance=h.pow(2).mean(), **attention)

def with_balance(pred, y): return F.cross_entropy(pred['logits'], y)+.1*pred['balance']

def logits_loss(pred, y): return F.cross_entropy(pred['logits'], y, reduction='none')

by_weights = pytest.mark.parametrize('make', [partial(FavorHardCallback, correct=1., seed=0),
    partial(InfoBatchCallback, seed=0), partial(TopLossCallback, passes=1)], ids=['favor_hard','info_batch','one_pass'])

@by_weights
def test_a_number_among_the_outputs_is_not_weighed(make):
    "A step by hand: weighted losses of items, and the number as it is"
    got = []
    class ByHand(Callback):
        order,run_valid = 60,False
        def after_backward(self):
            cb = self.learn.selection
            weight = torch.ones(len(self.y)) if cb.item_weight is None else cb.item_weight
            pred = self.model(self.x)
            loss = (weight*logits_loss(pred, self.y)).mean()+.1*pred['balance']
            wanted = torch.autograd.grad(loss, [*self.model.parameters()])
            for p,g in zip(self.model.parameters(), wanted): torch.testing.assert_close(p.grad, g, rtol=1e-4, atol=1e-6)
            got.append(cb.item_weight is not None)
    cb = make(item_loss=logits_loss)
    fit(learner(cb, with_balance, Several(), lr=1e-2, cbs=[ByHand()]))
    assert any(got)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

class TimeFirst(Net):
    "As many time steps as items"
    def forward(self, x): return self.net(x).expand(len(x), -1, -1) # (time, items, classes)

class OfObject(Net):
    def forward(self, x): return Output(self.net(x))

class Output:
    def __init__(self, logits): self.logits = logits

NO_ITEMS = dict(
    attention=(partial(Several, 2), lambda pred, y: logits_loss(pred, y)+.1*pred['balance']),
    loss_by_attention=(partial(Several, 16), lambda pred, y: logits_loss(pred, y)+pred['attention'].mean((0,1))),
    time_first=(TimeFirst, lambda pred, y: F.cross_entropy(pred.mean(0), y, reduction='none')),
    object=(OfObject, lambda pred, y: F.cross_entropy(pred.logits, y, reduction='none')))

@by_weights
@pytest.mark.parametrize('model,losses', NO_ITEMS.values(), ids=NO_ITEMS)
def test_outputs_that_are_no_items_are_refused_before_they_are_weighed(model, losses, make):
    def loss(pred, y): return losses(pred, y).mean()
    refused(learner(make(item_loss=losses, warmup=1), loss, model()), 'weigh', weighed=True)

def test_a_model_that_takes_no_part_of_a_batch_is_trained():
    class Whole(Several):
        def forward(self, x):
            if len(x)!=16: raise ValueError('a batch of 16')
            return super().forward(x)
    def both(pred, y): return F.cross_entropy(pred['logits'], y)
    fit(learner(InfoBatchCallback(warmup=9), both, Whole(2)))

# Steps of one's own
EVENTS = 'after_pred','after_loss','after_backward'

class OwnStep(Learner):
    "Leaves out events within a step"
    left_out = EVENTS
    def __call__(self, event): return None if event in self.left_out else super().__call__(event)

def test_a_step_that_leaves_out_an_event_is_refused():
    for left_out in ((event,) for event in EVENTS):
        learn = learner(FavorHardCallback(), kind=OwnStep)
        learn.left_out = left_out
        with pytest.raises(ValueError, match='got not all of the events'): fit(learn)
        assert learn.train_iter<=1

@by_losses
def test_a_step_without_events_is_refused(make):
    learn = learner(at_once(make), kind=OwnStep)
    with pytest.raises(ValueError, match='got not all of the events'): fit(learn)
    assert learn.train_iter<=1

def test_weights_that_no_step_takes_are_refused():
    class Weighs(BatchMethod):
        weighs = True
        def choose(self, scores, now): return Chosen(torch.arange(len(scores)), torch.linspace(0, 2, len(scores)))
    learn = learner(BatchSelection(Weighs(), warmup=0), kind=OwnStep)
    with pytest.raises(ValueError, match='got not all of the events'): fit(learn, 2)
    assert learn.iter==0

def test_what_goes_by_no_losses_is_trained_in_a_step_without_events():
    learn = fit(learner(RandomSubsetCallback(.5, warmup=0), kind=OwnStep), 1)
    assert learn.selection.stats.kept.tolist()==[8]*4

def test_a_first_batch_that_a_callback_cancels_is_passed_over():
    class Cancels(Callback):
        order,run_valid = 5,False
        def before_batch(self):
            if not self.iter: raise CancelBatchException
    learn = learner(FavorHardCallback(), cbs=[Cancels(),Steps()])
    fit(learn, 1)
    assert learn.steps.n==3

@pytest.mark.parametrize('make', [TopLossCallback,SelectiveBackpropCallback,BatchLossFilterCallback,
    partial(TopLossCallback, passes=1)], ids=['top_loss','gathered','by_share','one_pass'])
def test_an_empty_first_batch_is_passed_over(make):
    learn,is_first = learner(make(warmup=0)),iter([True])
    learn.dls.train.after_batch = lambda batch: tuple(t[:0] for t in batch) if next(is_first, False) else batch
    stats = fit(learn, 1).selection.stats
    assert stats.seen.tolist()==[0,16,16,16] and (stats.kept[1:]<16).all()

def test_losses_of_what_trains_are_computed_once_a_step():
    "Of a loss of one's own they are held against what trains in the first eight steps, and the 16th"
    calls,steps = Trail(),[]
    def summed(pred, y, reduction='sum'):
        calls.append(torch.is_grad_enabled())
        return F.cross_entropy(pred, y, reduction=reduction)
    class Notes(Callback):
        order,run_valid = -8,False
        def after_batch(self):
            steps.append(sorted(calls.seen))
            calls.clear()
    fit(learner(FavorHardCallback(), summed, bs=3, cbs=[Notes()]), 1)
    assert len(steps)==22
    assert [i for i,step in enumerate(steps, 1) if step!=[False,True]]==[*range(1, 9),16]

# What the check leaves alone
class Boxes(Net):
    "Two outputs, of which the loss goes by the second for items of class 2 only"
    def __init__(self):
        super().__init__()
        self.box = nn.Linear(4, 1)
    def forward(self, x): return self.net(x),self.box(x)[:,0]

def box_losses(pred, y):
    logits,box = pred
    losses = F.cross_entropy(logits, y, reduction='none')
    return losses+(y==2)*(box-1)**2 if (y==2).any() else losses

def box_loss(pred, y, reduction='mean'):
    losses = box_losses(pred, y)
    return losses if reduction=='none' else losses.mean()

@by_weights
def test_an_output_that_the_first_batch_does_not_need_is_weighed_later(make):
    class NoneFirst(Callback):
        order,run_valid = -8,False
        def before_batch(self):
            if not self.epoch and not self.iter: self.learn.yb = (self.y.clamp(max=1),)
    n_weighed = []
    class ByHand(Callback):
        order,run_valid = 60,False
        def after_backward(self):
            weight = self.learn.selection.item_weight
            if weight is None: return
            n_weighed.append(len(weight))
            loss = (weight*box_losses(self.model(self.x), self.y)).mean()
            wanted = torch.autograd.grad(loss, [*self.model.parameters()])
            for p,g in zip(self.model.parameters(), wanted): torch.testing.assert_close(p.grad, g, rtol=1e-4, atol=1e-6)
    fit(learner(make(), box_loss, Boxes(), lr=1e-2, cbs=[NoneFirst(), ByHand()]), 4)
    assert len(n_weighed)>3

def test_a_backward_pass_is_made_once():
    "Gradients that are kept, a backward that works in place, and one that is computed anew"
    class Kept(Callback):
        run_valid = False
        def before_fit(self): self.norms = []
        def after_pred(self): self.pred.retain_grad()
        def after_backward(self): self.norms.append(float(self.pred.grad.norm()))
    class InPlace(torch.autograd.Function):
        @staticmethod
        def forward(ctx, pred, y):
            ctx.grad = (pred.softmax(1)-F.one_hot(y, 3))/len(y)
            return F.cross_entropy(pred, y)
        @staticmethod
        def backward(ctx, g): return ctx.grad.mul_(g),None
    def in_place(pred, y, reduction='mean'):
        return InPlace.apply(pred, y) if reduction=='mean' else F.cross_entropy(pred, y, reduction=reduction)
    def anew(pred, y, reduction='mean'):
        loss = partial(F.cross_entropy, reduction=reduction)
        return torch.utils.checkpoint.checkpoint(loss, pred, y, use_reentrant=True)
    for loss in in_place,anew:
        plain,ours = (fit(learner(cb, loss, lr=1e-2, cbs=[Kept(), GradientAccumulation(32)]), 2)
            for cb in (Callback(), FavorHardCallback(beta=0)))
        assert same(weights(plain), weights(ours))
        assert plain.kept.norms==ours.kept.norms

def test_a_loss_that_counts_its_calls_under_mixup_counts_those_of_training():
    class Counted(CrossEntropyLossFlat):
        n = 0
        def __call__(self, *args, **kwargs):
            self.n += 1
            return super().__call__(*args, **kwargs)
    def n_of(*cbs): return fit(learner(MixUp(.4), Counted(), cbs=cbs), 1).loss_func.n
    assert n_of()==n_of(FavorHardCallback(beta=0))

@by_losses
def test_a_loss_that_grows_from_step_to_step_is_taken(make):
    class Warming(nn.Module):
        n = 0
        def forward(self, pred, y, reduction='mean'):
            self.n += 1
            return min(1, self.n/100)*F.cross_entropy(pred, y, reduction=reduction)
    fit(learner(at_once(make), Warming(), lr=1e-2), 2)

@by_losses
def test_a_loss_that_is_set_before_the_backward_pass_is_refused(make):
    class Sets(Callback):
        run_valid = False
        def before_backward(self): self.learn.loss_grad = F.mse_loss(self.pred, torch.ones_like(self.pred))
    refused(learner(at_once(make), cbs=[Sets()]))

def test_a_first_batch_that_tells_nothing_is_followed_by_one_that_does():
    class Sets(Callback):
        run_valid = False
        def after_loss(self):
            factor = float(self.iter>0)
            self.learn.loss_grad = factor*F.mse_loss(self.pred, torch.ones_like(self.pred))
    learn = learner(FavorHardCallback(), cbs=[Sets(),Steps()])
    with pytest.raises(ValueError, match='item_loss'): fit(learn)
    assert learn.steps.n==1

def test_gradients_of_a_refused_batch_are_dropped():
    learn = learner(FavorHardCallback(), StandIn(), lr=1e-2, cbs=[SetsLoss()])
    refused(learn)
    assert all(p.grad is None or not p.grad.any() for p in learn.model.parameters())

def test_an_item_without_a_finite_loss_tells_nothing_of_outputs():
    class Spoilt(Callback):
        order,run_valid = -8,False
        def before_batch(self):
            if self.epoch or self.iter: return
            self.learn.xb = (self.x.index_fill(0, torch.tensor([3]), float('nan')),)
    def losses(pred, y): return F.cross_entropy(pred[0], y, reduction='none')+pred[1].square()
    def loss(pred, y, reduction='mean'): return losses(pred, y) if reduction=='none' else losses(pred, y).mean()
    fit(learner(InfoBatchCallback(), loss, Boxes(), cbs=[Spoilt()]), 1)

def test_what_is_set_after_the_loss_is_no_other_loss():
    class ScalesBack(Callback):
        run_valid = False
        def after_loss(self): self.learn.pred,self.learn.yb = 10*self.pred.detach(),(2-self.y,)
    learn = fit(learner(FavorHardCallback(), cbs=[ScalesBack()]))
    check_remembered(learn, true_losses(learn))

def test_outputs_of_low_precision_are_taken():
    def loss(pred, y): return F.cross_entropy(pred.float(), y)
    class Low(Net):
        def forward(self, x): return self.net(x).bfloat16()
    for cb in FavorHardCallback(),InfoBatchCallback(),TopLossCallback(warmup=0):
        fit(learner(cb, loss, Low(), lr=1e-2), 2)

@pytest.mark.parametrize('make', [FavorHardCallback, partial(TopLossCallback, passes=1, track_items=True)])
def test_a_step_that_goes_through_its_batch_twice_is_noted_once(make):
    class Twice(Learner):
        def _do_one_batch(self):
            for i in range(2):
                self.pred = self.model(*self.xb)
                self('after_pred')
                self.loss_grad = self.loss_func(self.pred, *self.yb)+0*i
                self.loss = self.loss_grad.clone()
                self('after_loss')
                if not self.training: return
                if not i: self.loss_grad.backward()
            self._do_grad_opt()
    learn = fit(learner(make(), kind=Twice), 2)
    assert learn.selection.memory.seen.max()<=2
    check_remembered(learn, true_losses(learn))

# What a scoring pass fails on
def test_a_model_that_needs_what_a_callback_gives_is_refused_and_a_batch_transform_helps():
    class Named(Net):
        def forward(self, x): return self.net(x['table'])
    class Gives(Callback):
        run_valid = False
        def before_batch(self): self.learn.xb = dict(table=self.x),
    for order in 0,-8:
        gives = Gives()
        gives.order = order
        refused(learner(TopLossCallback(warmup=0), model=Named(), cbs=[gives]), 'batch transform')
    learn = learner(TopLossCallback(warmup=0), model=Named(), lr=1e-2)
    learn.dls.train.after_batch = lambda batch: (dict(table=batch[0]), batch[1])
    fit(learn)

@by_losses
def test_shapes_that_are_broadcast_are_named(make):
    def mse(pred, y, reduction='mean'): return F.mse_loss(pred, y.float(), reduction=reduction)
    def regression(cb):
        learn = learner(cb, F.mse_loss, nn.Linear(4, 1))
        for dl in learn.dls: dl.dataset.tensors = (dl.dataset.tensors[0], dl.dataset.tensors[1].float())
        return learn
    with warnings.catch_warnings():
        warnings.simplefilter('ignore') # of PyTorch, of the same
        refused(regression(at_once(make)), 'broadcast')

# Mixed precision
@pytest.mark.parametrize('bs', [4, 8])
@pytest.mark.parametrize('make', [lambda: TopLossCallback(.5, warmup=0), lambda: RandomSubsetCallback(.5, warmup=0),
    lambda: SelectiveBackpropCallback(keep=.5, gather=False, warmup=0)], ids=['top_loss','random_subset','composer'])
def test_small_batches_in_mixed_precision_are_not_kept_whole(make, bs):
    learn = fit(learner(make(), bs=bs, cbs=[CPUMixedPrecision()]), 1)
    assert learn.selection.stats.kept.tolist()==[bs//2]*(N//bs)
