"An epoch that is in part drawn by the last loss: how often each item comes, where, and with which weight"
import math
from collections import Counter
from fractions import Fraction

import pytest, torch
from fastai.callback.core import Callback
from fastai.callback.data import WeightedDL
from helpers import *
from selback.core.policies import priorities, prioritized_epoch
from torch.nn import functional as F

def gen(seed=0): return torch.Generator().manual_seed(seed)

def shares(losses, alpha):
    "p_i = l_i^alpha over their sum, or 1/n where all count nothing"
    known = [l for l in losses if math.isfinite(l)]
    highest = max(known, default=0.) # what is not finite counts as the highest finite loss
    lowest = min([0., *known]) # where some are negative, the lowest counts as 0
    powers = [((l if math.isfinite(l) else highest)-lowest)**alpha for l in losses]
    total = sum(powers)
    return [w/total if total else 1/len(losses) for w in powers]

def is_own(j, u): return (j+1)*u//1>j*u//1 # of a Fraction
def mixed(n, u): return [is_own(j, Fraction(str(u))) for j in range(n)]

LOSSES = dict(
    plain=[.5,2.,.1,3.,1.,1.],
    unknown=[math.nan,2.,.1,math.inf,-math.inf,4.],
    negative=[-1.,0.,.5,2.,-math.inf],
    zero=[0.]*5,
    only_negative=[-1.,-2.,math.nan],
    none_known=[math.nan]*3,
    zero_or_unknown=[0.,math.nan,0.,math.inf],
    huge=[1e38,3e38,1.],
    tiny=[1e-38,3e-38,2e-38])

def is_near(share, p, n):
    "Is the share of `n` draws that each item got its probability, within 4 sigma?"
    return ((share-p).abs()<=4*(p*(1-p)/n).sqrt()).all()

@pytest.mark.parametrize('alpha', [0., .5, 1., 2.])
@pytest.mark.parametrize('losses', LOSSES.values(), ids=LOSSES)
def test_items_are_drawn_as_often_as_the_power_of_their_loss_says(losses, alpha):
    n = 20_000
    p = torch.tensor(shares(losses, alpha), dtype=torch.float64)
    torch.testing.assert_close(priorities(torch.tensor(losses), alpha), p, rtol=1e-5, atol=0.)
    tiled = torch.tensor(losses).repeat(n//len(losses))
    rows = prioritized_epoch(tiled, alpha, 0., generator=gen()).rows%len(losses)
    assert is_near(torch.bincount(rows, minlength=len(losses))/len(rows), p, len(rows))

# the layout
def own_positions(n, u):
    "Which positions keep their item, where all that are drawn are the first, or the last one"
    def kept(loss): return prioritized_epoch(loss, 1., u).rows==torch.arange(n)
    first = torch.zeros(n).index_fill_(0, torch.tensor(0), 1.)
    return kept(first) & kept(first.flip(0))

@pytest.mark.parametrize('a,b', [(1,3), (2,3), (1,7), (29,30)])
def test_shares_that_no_float_is_are_exact(a, b):
    assert own_positions(9000, a/b).tolist()==[is_own(j, Fraction(a, b)) for j in range(9000)]

@pytest.mark.parametrize('u', [.1, .3, .5, .7])
@pytest.mark.parametrize('bs', [1, 4, 16, 30])
def test_any_batch_is_mixed_alike(u, bs):
    "Wherever it begins"
    own,exact = own_positions(200, u).long(),Fraction(str(u))
    counts = own.unfold(0, bs, 1).sum(1)
    assert set(counts.tolist())<={math.floor(exact*bs),math.ceil(exact*bs)}
    assert own.sum()==math.floor(exact*200)

def losses_of(learn):
    "Of all items, by hand"
    x,y = learn.dls.train.dataset.tensors
    return F.cross_entropy(learn.model(x), y, reduction='none').detach()

def followed(learn, n_epoch, **kwargs):
    "The epochs of a fit, and the order in which the loader itself would have drawn its items in each"
    dl,orders = learn.dls.train,[]
    draw = dl.get_idxs
    def noted():
        orders.append([int(i) for i in draw()])
        return orders[-1]
    dl.get_idxs = noted
    epochs = trained_only(learn, n_epoch, **kwargs).diary.epochs
    del dl.get_idxs
    return epochs,orders

@pytest.mark.parametrize('bs,drop_last', [(16,False), (16,True), (32,False), (100,False), (25,True)])
@pytest.mark.parametrize('u', [0., .3, .7])
def test_batches_are_as_many_as_ever_and_keep_their_own_items_where_they_were(u, bs, drop_last):
    selection = PrioritizedSamplingCallback(uniform=u, warmup=1)
    epochs,orders = followed(with_diary(selection, bs=bs, drop_last=drop_last), 4)
    sizes = [bs]*(100//bs)+[100%bs]*(not drop_last and 100%bs>0)
    exact = Fraction(str(u))
    for e,(epoch,order) in enumerate(zip(epochs, orders, strict=True)):
        own = mixed(100, u if e else 1)
        kept = [i==o for i,o in zip(items_of(epoch), order)]
        assert [len(batch) for batch,*_ in epoch]==sizes
        assert all(k for k,o in zip(kept, own) if o)
        if e==0: continue # the warm-up
        assert sum(kept)<sum(own)+20
        for start,n in zip(range(0, 100, bs), sizes):
            assert sum(own[start:start+n]) in (math.floor(n*exact),math.ceil(n*exact))

# how often
def test_what_the_loader_draws_more_often_is_drawn_more_often_here():
    "In an epoch of a `WeightedDL` an item stands several times, or never; of weight 0 it never comes"
    learn = with_diary(PrioritizedSamplingCallback(1., uniform=.2, seed=0, warmup=0), linear(), bs=100)
    loss,wgts = losses_of(learn),torch.tensor([0.,1.,1.,4.]*25)
    ds = learn.dls.train.dataset
    learn.dls.loaders[0] = WeightedDL(ds, bs=100, wgts=wgts.numpy(), shuffle=True, num_workers=0)
    epochs,orders = followed(learn, 61, lr=0.)

    own,known = mixed(100, .2),torch.zeros(100).bool()
    got,wanted,variance = (torch.zeros(100) for _ in range(3)) # of the draws of each item
    for epoch,order in zip(epochs, orders, strict=True):
        highest = loss[order][known[order]].max() if known[order].any() else 1.
        p = torch.bincount(torch.tensor(order), minlength=100)*torch.where(known, loss, highest)
        p = p/p.sum()
        known = known.index_fill(0, torch.tensor(items_of(epoch)), True)
        drawn = [i for i,is_kept in zip(items_of(epoch), own) if not is_kept]
        got += torch.bincount(torch.tensor(drawn), minlength=100)
        wanted += 80*p
        variance += 80*p*(1-p)
    assert (got[::4]==0).all()
    assert ((got-wanted).abs()<=4*variance.sqrt()).all()

    rate = got/loss # less what the losses say: as the weights
    of_weight_1,of_weight_4 = torch.cat([rate[1::4], rate[2::4]]),rate[3::4]
    assert of_weight_4.mean()/of_weight_1.mean()==pytest.approx(4, rel=.15)

# weights
@pytest.mark.parametrize('u,alpha', [(0.,.5), (.25,1.), (.5,.5)])
@pytest.mark.parametrize('correct', [.5, 1., 2.])
def test_weights_are_powers_of_how_often_an_item_comes_of_mean_1(u, alpha, correct):
    loss = (torch.rand(40, generator=gen())+.01).double()
    p = torch.tensor(shares(loss.tolist(), alpha)).double()
    q = u/40+(1-u)*p # how often an item comes
    w = (1/(40*q))**correct
    w = w/(q*w).sum()
    rows,weight = prioritized_epoch(loss, alpha, u, correct, gen())
    torch.testing.assert_close(weight.double(), w[rows], rtol=1e-5, atol=0.)
    assert (q*w).sum().item()==pytest.approx(1)
    if correct==1: assert (q*w*40).tolist()==pytest.approx([1.]*40) # unbiased
    assert prioritized_epoch(loss, alpha, u, 0., gen()).weight is None
    assert prioritized_epoch(loss, alpha, 1., correct, gen()).weight is None

@pytest.mark.law(3)
@pytest.mark.parametrize('make', [
    lambda: PrioritizedSamplingCallback(1., uniform=.5, correct=1., seed=0, warmup=1),
    lambda: InfoBatchCallback(prune=.5, delta=1., seed=0, warmup=1)], ids=['drawn','pruned'])
def test_corrected_gradients_are_unbiased(make):
    "On average over the draws an epoch's gradient is that of all items"
    learn,sums = with_diary(make(), linear(), bs=50),[]
    class Sum(Callback):
        order,run_valid = 60,False
        def before_train(self): self.total = 0.
        def after_backward(self):
            grads = torch.cat([p.grad.flatten() for p in self.model.parameters()])
            self.total = self.total+grads*len(self.y)
        def after_train(self): sums.append(self.total)
    learn.add_cb(Sum())
    trained_only(learn, 61, lr=0.)
    full,draws = sums[0],torch.stack(sums[1:])
    assert draws.std(0).min()>.05
    assert ((draws.mean(0)-full).abs()<4*draws.std(0)/60**.5).all()

def test_in_training_weights_go_with_their_items():
    learn = with_diary(PrioritizedSamplingCallback(.5, uniform=.4, correct=1., warmup=1), linear())
    q = .004+.6*torch.tensor(shares(losses_of(learn).tolist(), .5))
    for epoch in trained_only(learn, 4, lr=0.).diary.epochs[1:]:
        for batch,weight,_ in epoch: assert weight==pytest.approx((1/(100*q[batch])).tolist(), rel=1e-4)

# when, and with what
def test_nothing_is_looked_at_and_repeats_are_loaded_for_themselves():
    "Items are read once for each time that they train; the model runs once a step"
    read,runs,epochs = reads_and_runs(with_diary(PrioritizedSamplingCallback(seed=0, warmup=1)), 4)
    assert read==Counter(sum(map(items_of, epochs), []))
    assert read.total()==400
    assert max(read.values())>4
    assert runs==4*4

@pytest.mark.parametrize('call', [
    lambda: PrioritizedSamplingCallback(-1.),
    lambda: PrioritizedSamplingCallback(uniform=1.1),
    lambda: PrioritizedSamplingCallback(uniform=lambda pct: -pct),
    lambda: PrioritizedSamplingCallback(correct=-1.),
    lambda: PrioritizedSamplingCallback(alpha=lambda pct: 1-2*pct),
    lambda: PrioritizedSamplingCallback(warmup=-1),
    lambda: priorities(torch.ones(3), -1.),
    lambda: prioritized_epoch(torch.ones(3), uniform=2.),
    lambda: prioritized_epoch(torch.ones(3), correct=-1.)])
def test_numbers_out_of_range(call):
    with pytest.raises(ValueError, match='got .*wanted'): call()
