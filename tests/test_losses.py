"`item_losses` and the scores against float64 computations written out by hand"
from functools import partial

import pytest, torch
from fastai.losses import (BCEWithLogitsLossFlat, CrossEntropyLossFlat, DiceLoss, FocalLossFlat, L1LossFlat,
    LabelSmoothingCrossEntropyFlat, MSELossFlat)
from selback.core.first_batch import separable_losses
from selback.core.losses import item_losses, unreduced
from selback.core.scores import entropy_score, get_score
from torch import nn
from torch.nn import functional as F

def name_of(o):
    "Without addresses in memory, so that each process gives a case the same name"
    if isinstance(o, torch.Tensor): return ''
    if isinstance(o, partial): return f'partial {name_of(o.func)}'
    return str(getattr(o, '__name__', o))

torch.manual_seed(0)
n,classes = 5,4
logits = torch.randn(n, classes)
label = torch.randint(0, classes, (n,))
labels = (torch.rand(n, classes)>.5).float()
maps,mask = torch.randn(n, classes, 6, 7),torch.randint(0, classes, (n, 6, 7))
mask[0,:3],mask[1] = 255,255
weight = torch.tensor([.5,1.,2.,4.])

def by_hand_ce(pred, target, weight=None, ignore=None):
    "Cross-entropy of each item, element by element in float64"
    if weight is None: weight = torch.ones(classes)
    def item_loss(p, t):
        p = p.reshape(classes, -1).T
        losses = [-(p[i,c]-p[i].exp().sum().log())*weight[c].double()
            for i,c in enumerate(t.reshape(-1).tolist()) if c!=ignore]
        return sum(losses)/len(losses) if losses else torch.tensor(0.).double()
    return torch.stack([item_loss(p, t) for p,t in zip(pred.double(), target)])

def by_hand_bce(pred, target):
    "Binary cross-entropy of each item, in float64"
    p = 1/(1+(-pred.double()).exp())
    return -(target*p.log()+(1-target)*(1-p).log()).mean(1)

def by_hand_kl(log_p, target): return (target.double()*(target.double().log()-log_p.double())).mean(1)

@pytest.mark.parametrize('loss,pred,y,wanted', [
    (CrossEntropyLossFlat(), logits, label, by_hand_ce(logits, label)),
    (nn.CrossEntropyLoss(weight=weight), logits, label, by_hand_ce(logits, label, weight)),
    (CrossEntropyLossFlat(weight=weight), logits, label, by_hand_ce(logits, label, weight)),
    (F.cross_entropy, logits, label, by_hand_ce(logits, label)),
    (partial(F.cross_entropy, weight=weight), logits, label, by_hand_ce(logits, label, weight)),
    (BCEWithLogitsLossFlat(), logits, labels, by_hand_bce(logits, labels)),
    (nn.BCEWithLogitsLoss(reduction='sum'), logits, labels, by_hand_bce(logits, labels)),
    (CrossEntropyLossFlat(axis=1, ignore_index=255), maps, mask, by_hand_ce(maps, mask, ignore=255)),
    (nn.CrossEntropyLoss(ignore_index=255, weight=weight), maps, mask, by_hand_ce(maps, mask, weight, 255)),
    (partial(F.cross_entropy, ignore_index=255), maps, mask, by_hand_ce(maps, mask, ignore=255)),
    (MSELossFlat(), logits, labels, ((logits-labels).double()**2).mean(1)),
    (L1LossFlat(), logits, labels, (logits-labels).double().abs().mean(1)),
    (nn.KLDivLoss(reduction='batchmean'), logits.log_softmax(1), labels.softmax(1),
        by_hand_kl(logits.double().log_softmax(1), labels.softmax(1))),
    (partial(CrossEntropyLossFlat()), logits, label, by_hand_ce(logits, label)),
], ids=name_of)
def test_item_losses_by_hand(loss, pred, y, wanted):
    got = item_losses(loss, pred, y)
    assert got.dtype==torch.float32
    assert got.shape==(n,)
    torch.testing.assert_close(got, wanted.float(), rtol=1e-5, atol=1e-6)

def test_dice_is_the_mean_over_classes():
    target = torch.randint(0, classes, (n, 6, 7))
    p,one_hot = maps.double().softmax(1),F.one_hot(target, classes).permute(0,3,1,2).double()
    both,either = (p*one_hot).sum((2,3)),(p+one_hot).sum((2,3))
    wanted = 1-(2*both+1e-6)/(either+1e-6)
    torch.testing.assert_close(item_losses(DiceLoss(), maps, target), wanted.mean(1).float())

def test_half_precision_is_summed_in_float32():
    got = item_losses(nn.MSELoss(), torch.full((2,4096), 200.).half(), torch.zeros(2,4096).half())
    torch.testing.assert_close(got, torch.full((2,), 40000.))

class ByItself(nn.Module):
    "Calls a method of its own that it holds, which a copy would still hold of the loss it was copied from"
    def __init__(self):
        super().__init__()
        self.reduction,self.inner = 'mean',self.compute
    def compute(self, pred, y): return F.cross_entropy(pred, y, reduction=self.reduction)
    def forward(self, pred, y): return self.inner(pred, y)

class Passes:
    "Hands its reduction on to another loss, which a copy shares"
    def __init__(self): self.loss = nn.CrossEntropyLoss()
    @property
    def reduction(self): return self.loss.reduction
    @reduction.setter
    def reduction(self, value): self.loss.reduction = value
    def __call__(self, pred, y): return self.loss(pred, y)

class Holds(nn.Module):
    "Wraps another one as a part"
    def __init__(self):
        super().__init__()
        self.func = nn.CrossEntropyLoss()
    def forward(self, pred, y): return self.func(pred, y)

@pytest.mark.parametrize('make', [ByItself, Passes, Holds, nn.CrossEntropyLoss, FocalLossFlat,
    CrossEntropyLossFlat, LabelSmoothingCrossEntropyFlat, lambda: partial(CrossEntropyLossFlat())], ids=name_of)
def test_a_loss_stays_as_it_is_while_its_copy_is_unreduced(make):
    loss = make()
    def said(): return [o.reduction for o in (loss, getattr(loss, 'func', loss)) if hasattr(o, 'reduction')]
    before = said()
    losses = item_losses(loss, logits, label)
    torch.testing.assert_close(losses.mean(), torch.as_tensor(loss(logits, label)), check_dtype=False)
    assert said()==before==['mean']*len(before)
    with pytest.raises(RuntimeError), unreduced(loss): raise RuntimeError
    assert said()==before

class HasNone(nn.Module):
    def forward(self, pred, targ): return (pred-targ).mean()
class Ignores(HasNone): reduction = 'mean'
class ReadOnly(HasNone):
    @property
    def reduction(self): return 'mean'
def has_none(pred, targ): return (pred-targ).mean()
def not_traceable(pred, targ): return (pred-targ).mean() if pred.sum().item()<1e9 else pred.sum()
def of_numbers(pred, targ): return float((pred-targ).mean())

@pytest.mark.parametrize('loss', [HasNone(), has_none, Ignores(), ReadOnly(), partial(has_none),
    lambda p,t,reduction='mean': (p-t).mean(), not_traceable, of_numbers], ids=name_of)
def test_losses_that_return_one_number_are_taken_item_by_item(loss):
    got = item_losses(loss, logits, labels)
    assert got.dtype==torch.float32
    torch.testing.assert_close(got, (logits-labels).double().mean(1).float())
    torch.testing.assert_close(separable_losses(loss, logits, labels), got)

def squared_distances(pred): return (pred[:,None]-pred).square().sum(-1)
def contrastive(pred, y):
    same,distance = y[:,None]==y,squared_distances(pred)
    return torch.where(same, distance, (4-distance).clamp(min=0)).mean()
def batch_hard_triplet(pred, y):
    same,distance = y[:,None]==y,squared_distances(pred)
    farthest = distance.masked_fill(~same, 0).amax(1)
    nearest_other = distance.masked_fill(same, 1e3).amin(1)
    return (farthest-nearest_other+1).clamp(min=0).mean()
def batch_dice(pred, y):
    p,t = pred.sigmoid(),F.one_hot(y, classes)
    return 1-2*(p*t).sum()/(p+t).sum()
def root_mean_square(pred, y): return (pred-F.one_hot(y, classes)).square().mean().sqrt()
def weighted_by_batch(pred, y): return F.cross_entropy(pred, y, weight)

@pytest.mark.parametrize('loss', [contrastive, batch_hard_triplet, batch_dice, root_mean_square, weighted_by_batch])
def test_losses_that_mix_items_are_refused(loss):
    y = torch.tensor([0,1,0,3,1])
    refused = f'{loss.__name__} gives no loss per item.*It mixes items.*item_loss='
    with pytest.raises(ValueError, match=refused): separable_losses(loss, logits, y)

def test_unreduced_losses_of_another_number_are_refused_with_shapes():
    def seven(pred, y, reduction): return torch.zeros(7)
    with pytest.raises(ValueError, match=r'\(5, 4\).*wanted 5 items.*item_loss='):
        item_losses(seven, logits, labels)

def test_entropy_by_hand():
    p = logits.double().softmax(1)
    torch.testing.assert_close(entropy_score(logits), -(p*p.log()).sum(1).float())

    q = logits.double().sigmoid()
    by_label = q*q.log()+(1-q)*(1-q).log()
    torch.testing.assert_close(entropy_score(logits, multi_label=True), -by_label.mean(1).float())

    p = maps.double().softmax(1)
    score = get_score('entropy', CrossEntropyLossFlat(axis=1))
    torch.testing.assert_close(score(maps, mask), -(p*p.log()).sum(1).mean((1,2)).float())

    assert entropy_score(torch.tensor([[1e4,-1e4]])).isfinite().all()

def test_scores_refuse():
    with pytest.raises(ValueError, match="'loss', 'entropy'"): get_score('luck', CrossEntropyLossFlat())
    with pytest.raises(ValueError, match='no logits'): get_score('entropy', MSELossFlat())
    for f in (F.mse_loss, nn.BCELoss(), F.binary_cross_entropy):
        with pytest.raises(ValueError, match='no logits'): get_score('entropy', f)
