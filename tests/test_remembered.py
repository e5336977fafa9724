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
    "Counts steps that were taken"
    order,run_valid = 90,False
    def __init__(self): self.n = 0
    def before_step(self): self.n += 1

def refused(learn, match='item_loss', n_epoch=3):
    "The fit ends with an error before the first step; its text"
    learn.add_cb(Steps())
    with pytest.raises((ValueError,TypeError), match=match) as error: fit(learn, n_epoch)
    assert learn.steps.n==0
    return str(error.value)

class WeighedSteps(Callback):
    "Counts steps of weighted items"
    order,run_valid = 90,False
    def __init__(self): self.n = 0
    def before_step(self): self.n += self.learn.selection.item_weight is not None

def refused_once_weighed(learn, match):
    "The fit ends with an error before the first step of weighted items"
    learn.add_cb(WeighedSteps())
    with pytest.raises((ValueError,TypeError), match=match): fit(learn)
    assert learn.weighed_steps.n==0

# A loss that a callback sets
class StandIn:
    "A loss function that says nothing"
    reduction = 'mean'
    def __call__(self, pred, y): return pred.new_zeros(len(pred) if self.reduction=='none' else ())

class SetsLoss(Callback):
    "Has the model's own loss trained"
    order,run_valid = 0,False
    def __init__(self, both): self.both = both

    def after_loss(self):
        self.learn.loss_grad = F.cross_entropy(self.pred, self.y)
        if self.both: self.learn.loss = self.loss_grad.clone()

@by_losses
@pytest.mark.parametrize('both', [True, False])
@pytest.mark.parametrize('stand_in', [StandIn(), lambda pred, y: pred.new_zeros(())], ids=['unreduced','number'])
def test_a_loss_that_a_callback_sets_is_refused(make, both, stand_in):
    refused(learner(at_once(make), stand_in, cbs=[SetsLoss(both)]))

@pytest.mark.parametrize('make', [FavorHardCallback, StaleLossCallback])
def test_with_item_loss_it_is_remembered(make):
    cb = make(item_loss=lambda pred, y: F.cross_entropy(pred, y, reduction='none'))
    learn = fit(learner(cb, StandIn(), cbs=[SetsLoss(True)]))
    check_remembered(learn, true_losses(learn))

@by_losses
def test_a_loss_that_mixes_items_is_refused_wherever_its_inputs_come_from(make):
    "Two views of a batch, which a callback makes"
    def info_nce(pred, y):
        a,b = F.normalize(pred[0]),F.normalize(pred[1])
        return F.cross_entropy(a@b.T/.1, torch.arange(len(a)))
    class Views(Callback):
        run_valid = False
        def before_batch(self): self.learn.xb = (torch.stack([self.x, self.x+.01*torch.randn_like(self.x)], 1),)
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()
        def forward(self, x): return (self.net(x[:,0]),self.net(x[:,1])) if x.ndim==3 else (self.net(x),self.net(x))
    for order in (0, -8):
        views = Views()
        views.order = order
        refused(learner(at_once(make), info_nce, Pair(), cbs=[views]), 'item_loss|batch transform')

class Weighted(nn.Module):
    "Cross-entropy with a weight for each item of the batch, which a callback gives it"
    weight = None
    def forward(self, pred, y):
        losses = F.cross_entropy(pred, y, reduction='none')
        return losses.mean() if self.weight is None else (self.weight*losses).mean()

class GivesWeights(Callback):
    order,run_valid = 5,False
    def after_pred(self): self.loss_func.weight = torch.linspace(.1, 3, len(self.y))

@by_losses
def test_a_loss_with_a_state_for_each_batch_is_refused(make):
    refused(learner(at_once(make), Weighted(), cbs=[GivesWeights()]))

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

def own_sum(pred, y): return F.cross_entropy(pred, y, reduction='sum')

LOSSES = dict( # test_matrix.py has others
    sums=CrossEntropyLossFlat(reduction='sum'),
    ignores=CrossEntropyLossFlat(ignore_index=1),
    own_sum=own_sum)

@pytest.mark.parametrize('loss', LOSSES)
@pytest.mark.parametrize('make', [FavorHardCallback, TopLossCallback, partial(InfoBatchCallback, correct=1.),
    partial(TopLossCallback, passes=1)], ids=['before','within','weights','one_pass'])
def test_sums_and_ignored_items_are_no_other_loss(make, loss):
    cbs = [CPUMixedPrecision(), GradientAccumulation(32)]
    fit(learner(make(warmup=0), LOSSES[loss], lr=1e-2, cbs=cbs), 2)

def test_the_check_costs_nothing_after_the_first_batch():
    calls = Trail()
    def counted(pred, y, reduction='mean'):
        calls.append(reduction)
        return F.cross_entropy(pred, y, reduction=reduction)
    def n_of(n_epoch):
        calls.clear()
        fit(learner(FavorHardCallback(warmup=9), counted), n_epoch)
        return len(calls.seen)
    # a step's own loss, and those of its items; the first ones are held against it, and a few asked again in each epoch
    assert n_of(7)-n_of(6)==2*4+2

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

def weighted(**kwargs): return [FavorHardCallback(correct=1., seed=0, **kwargs), InfoBatchCallback(seed=0, **kwargs)]

@pytest.mark.parametrize('i', [0, 1])
def test_a_number_among_the_outputs_is_not_weighed(i):
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
    cb = weighted(item_loss=logits_loss)[i]
    fit(learner(cb, with_balance, Several(), lr=1e-2, cbs=[ByHand()]))
    assert any(got)

@pytest.mark.parametrize('i', [0, 1])
def test_outputs_that_are_no_items_are_refused_before_they_are_weighed(i):
    cb = weighted(item_loss=logits_loss)[i]
    refused_once_weighed(learner(cb, with_balance, Several(2)), 'weights: got an output of ')

def by_attention(pred, y): return logits_loss(pred, y)+pred['attention'].mean((0,1))

@pytest.mark.parametrize('heads', [2, 16])
@pytest.mark.parametrize('i', [0, 1])
def test_losses_that_go_by_other_rows_are_refused_before_they_are_weighed(i, heads):
    cb = weighted(item_loss=by_attention)[i]
    refused_once_weighed(learner(cb, with_balance, Several(heads)), 'weights: got an output of ')

def test_a_model_that_takes_no_part_of_a_batch_is_trained():
    class Whole(Several):
        def forward(self, x):
            if len(x)!=16: raise ValueError('a batch of 16')
            return super().forward(x)
    def both(pred, y): return F.cross_entropy(pred['logits'], y)
    fit(learner(InfoBatchCallback(warmup=9), both, Whole(2)))

def test_predictions_that_cannot_be_weighed_are_refused():
    def loss(pred, y, reduction='mean'): return F.cross_entropy(pred.logits, y, reduction=reduction)
    for cb in (*weighted(), TopLossCallback(passes=1, warmup=1)):
        refused_once_weighed(learner(cb, loss, Object()), 'weigh_grads: got predictions that are a Record')

# Steps of one's own
class OwnStep(Learner):
    "Fires no events within a step"
    n_own = 0
    def _do_one_batch(self):
        self.n_own += self.training
        self.pred = self.model(*self.xb)
        self.loss_grad = self.loss_func(self.pred, *self.yb)
        self.loss = self.loss_grad.clone()
        if not self.training: return
        self.loss_grad.backward()
        self.opt.step()
        self.opt.zero_grad()

@by_losses
def test_a_step_without_events_is_refused(make):
    learn = learner(at_once(make), lr=1e-3, kind=OwnStep)
    with pytest.raises(ValueError, match='not all of the events after_pred, after_loss and after_backward'): fit(learn)
    assert learn.n_own==1

def test_weights_that_no_step_takes_are_refused():
    class Weighs(BatchMethod):
        weighs = True
        def choose(self, scores, now): return Chosen(torch.arange(len(scores)), torch.linspace(0, 2, len(scores)))
    for cb in BatchSelection(Weighs(), warmup=0),InfoBatchCallback(),TopLossCallback(passes=1):
        learn = learner(cb, lr=1e-3, kind=OwnStep)
        with pytest.raises(ValueError, match='not all of the events after_pred'): fit(learn, 2)
        assert learn.iter==0

def test_what_goes_by_no_losses_is_trained_in_a_step_without_events():
    learn = fit(learner(RandomSubsetCallback(.5, warmup=0), lr=1e-3, kind=OwnStep), 1)
    assert learn.selection.stats.kept.tolist()==[8]*4

def test_a_first_batch_that_a_callback_cancels_is_passed_over():
    class Cancels(Callback):
        order,run_valid = 5,False
        def before_batch(self):
            if not self.iter: raise CancelBatchException
    learn = learner(FavorHardCallback(), cbs=[Cancels(),Steps()])
    fit(learn, 1)
    assert learn.steps.n==3

# What the check leaves alone
class Boxes(nn.Module):
    "Two outputs, of which the loss goes by the second for items of class 2 only"
    def __init__(self):
        super().__init__()
        self.net,self.box = net(),nn.Linear(4, 1)
    def forward(self, x): return self.net(x),self.box(x)[:,0]

def box_losses(pred, y):
    logits,box = pred
    losses = F.cross_entropy(logits, y, reduction='none')
    return losses+(y==2)*(box-1)**2 if (y==2).any() else losses

def box_loss(pred, y, reduction='mean'):
    losses = box_losses(pred, y)
    return losses if reduction=='none' else losses.mean()

@pytest.mark.parametrize('make', [lambda: InfoBatchCallback(seed=0), lambda: FavorHardCallback(correct=1., seed=0),
    lambda: TopLossCallback(passes=1)], ids=['info_batch','favor_hard','one_pass'])
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
    norms,calls = {},[]
    class Kept(Callback):
        run_valid = False
        def after_pred(self): self.pred.retain_grad()
        def after_backward(self): norms.setdefault(self.learn.name, self.pred.grad.norm())
    class InPlace(torch.autograd.Function):
        @staticmethod
        def forward(ctx, pred, y):
            ctx.grad = (pred.softmax(1)-F.one_hot(y, 3))/len(y)
            calls.append(1)
            return F.cross_entropy(pred, y)
        @staticmethod
        def backward(ctx, g): return ctx.grad.mul_(g),None
    def in_place(pred, y, reduction='mean'):
        return InPlace.apply(pred, y) if reduction=='mean' else F.cross_entropy(pred, y, reduction=reduction)
    def anew(pred, y, reduction='mean'):
        loss = partial(F.cross_entropy, reduction=reduction)
        return torch.utils.checkpoint.checkpoint(loss, pred, y, use_reentrant=True)
    for loss in in_place,anew:
        ends = {}
        for name in 'plain','ours':
            cb = FavorHardCallback(beta=0) if name=='ours' else Callback()
            learn = learner(cb, loss, lr=1e-2, cbs=[Kept(), GradientAccumulation(32)])
            learn.name = name
            ends[name] = weights(fit(learn, 2))
        assert same(ends['plain'], ends['ours'])
        assert norms['plain']==norms['ours']
        norms.clear()

def test_a_loss_that_counts_its_calls_under_mixup_counts_those_of_training():
    class Counted(CrossEntropyLossFlat):
        n = 0
        def __call__(self, *args, **kwargs):
            self.n += 1
            return super().__call__(*args, **kwargs)
    def n_of(*cbs): return fit(learner(MixUp(.4), Counted(), cbs=cbs), 1).loss_func.n
    assert n_of()==n_of(FavorHardCallback(beta=0))

class Warming(nn.Module):
    "A loss that grows from step to step"
    n = 0
    def forward(self, pred, y, reduction='mean'):
        self.n += 1
        return min(1, self.n/100)*F.cross_entropy(pred, y, reduction=reduction)

class Shrinks(Callback):
    "Adds to what trains, and to what is shown, what depends on no prediction"
    run_valid = False
    def after_loss(self):
        self.learn.loss_grad = self.loss_grad+.01*sum(p.abs().sum() for p in self.model.parameters())
        self.learn.loss = self.loss_grad.clone()

@by_losses
@pytest.mark.parametrize('loss,cbs', [(Warming, []), (CrossEntropyLossFlat, [Shrinks])], ids=['warming','penalty'])
def test_a_scale_and_a_penalty_are_no_other_loss(make, loss, cbs):
    fit(learner(at_once(make), loss(), lr=1e-2, cbs=[cb() for cb in cbs]), 2)

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
    learn = learner(FavorHardCallback(), StandIn(), lr=1e-2, cbs=[SetsLoss(True)])
    with pytest.raises(ValueError, match='item_loss'): fit(learn)
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

def test_an_empty_first_batch_is_passed_over():
    class Empties(Callback):
        order,run_valid = -8,False
        def before_batch(self):
            if not self.iter: self.learn.xb,self.learn.yb = (self.x[:0],),(self.y[:0],)
    learn = fit(learner(TopLossCallback(passes=1, warmup=0), cbs=[Empties()]), 1)
    assert learn.selection.stats.kept.tolist()[1:]==[8]*3

def test_what_is_set_after_the_loss_is_no_other_loss():
    class ScalesBack(Callback):
        run_valid = False
        def after_loss(self): self.learn.pred,self.learn.yb = 10*self.pred.detach(),(2-self.y,)
    learn = fit(learner(FavorHardCallback(), cbs=[ScalesBack()]))
    check_remembered(learn, true_losses(learn))

def test_outputs_of_low_precision_are_taken():
    def loss(pred, y): return F.cross_entropy(pred.float(), y)
    class Low(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()
        def forward(self, x): return self.net(x).bfloat16()
    for cb in FavorHardCallback(),InfoBatchCallback(),TopLossCallback(warmup=0):
        fit(learner(cb, loss, Low(), lr=1e-2), 2)

@by_losses
@pytest.mark.parametrize('own', [False, True])
def test_a_loss_that_changes_predictions_in_place_is_named(make, own):
    def margin(pred, y, reduction='mean'):
        pred[torch.arange(len(y)),y] -= .35
        return F.cross_entropy(4*pred, y, reduction=reduction)
    options = dict(item_loss=lambda pred, y: F.cross_entropy(4*pred, y, reduction='none')) if own else {}
    refused(learner(make(**options), margin), 'in place' if own else 'in place|gives no loss per item')

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

def test_rows_that_are_time_steps_are_refused_before_they_are_weighed():
    class TimeFirst(nn.Module):
        "As many time steps as items"
        def __init__(self):
            super().__init__()
            self.net = net()
        def forward(self, x): return self.net(x).expand(len(x), -1, -1) # (time, items, classes)
    def losses(pred, y): return F.cross_entropy(pred.mean(0), y, reduction='none')
    def loss(pred, y): return losses(pred, y).mean()
    for cb in (*weighted(item_loss=losses), TopLossCallback(passes=1, warmup=1, item_loss=losses)):
        refused_once_weighed(learner(cb, loss, TimeFirst()), 'whose rows are no items')

# What a scoring pass fails on
class Record:
    def __init__(self, logits): self.logits = logits

class Unpacked(Callback):
    run_valid = True
    def after_pred(self): self.learn.pred = self.pred.logits

class Object(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()
    def forward(self, x): return Record(self.net(x))

def plain(pred, y): return F.cross_entropy(pred, y)

@pytest.mark.parametrize('loss', [CrossEntropyLossFlat(), plain], ids=['unreduced','number'])
def test_an_object_that_a_callback_unpacks_is_named_and_what_helps_does(loss):
    refused(learner(TopLossCallback(warmup=0), loss, Object(), cbs=[Unpacked()]), 'Record.*item_loss=')
    fit(learner(FavorHardCallback(), loss, Object(), lr=1e-2, cbs=[Unpacked()]))
    def raw(pred, y): return F.cross_entropy(getattr(pred, 'logits', pred), y, reduction='none')
    fit(learner(TopLossCallback(warmup=0, item_loss=raw), loss, Object(), lr=1e-2, cbs=[Unpacked()]))

def test_errors_of_a_model_are_told_with_what_helps():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()
        def forward(self, x): return self.net(x['table'])
    class NeedsMore(Named):
        def forward(self, x, more): return self.net(x)
    class Gives(Callback):
        run_valid = False
        def __init__(self, xb, order): self.xb_of,self.order = xb,order
        def before_batch(self): self.learn.xb = self.xb_of(self.x)
    for model,xb in (Named(), lambda x: (dict(table=x),)),(NeedsMore(), lambda x: (x,x)):
        for order in 0,-8:
            cbs = [Gives(xb, order)]
            refused(learner(TopLossCallback(warmup=0), model=model, cbs=cbs), 'change it in a batch transform')
        learn = learner(TopLossCallback(warmup=0), model=model, lr=1e-2)
        learn.dls.train.after_batch = lambda batch: (*xb(batch[0]), batch[1])
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
