"Choosing without a look: which items are loaded, how many and how often, against the formulas"
import copy, math
from collections import Counter
from functools import partial

import pytest, torch
from fastai.optimizer import SGD
from helpers import *
from selback.core.policies import include, mean_inclusion, rank_inclusion, step_inclusion

def gen(seed=0): return torch.Generator().manual_seed(seed)

# The formulas, for a list of finite losses
def cdf(l, losses): return (sum(o<l for o in losses)+sum(o<=l for o in losses))/2/len(losses)
def by_rank(losses, beta): return [cdf(l, losses)**beta for l in losses]
def by_step(losses, quantile, drop): return [1-drop if cdf(l, losses)<quantile else 1. for l in losses]
def by_mean(losses, prune): return [1-prune if l<math.fsum(losses)/len(losses) else 1. for l in losses]

def chances(losses, formula):
    "The probability of each item; without a finite loss it is 1"
    known = iter(formula([l for l in losses if math.isfinite(l)]))
    return [next(known) if math.isfinite(l) else 1. for l in losses]

SHAPES = dict(
    rank=(rank_inclusion, by_rank, dict(beta=2.)),
    half_rank=(rank_inclusion, by_rank, dict(beta=.5)),
    step=(step_inclusion, by_step, dict(quantile=.6, drop=.7)),
    half=(step_inclusion, by_step, dict(quantile=.5, drop=.5)),
    gone=(step_inclusion, by_step, dict(quantile=.3, drop=1.)),
    mean=(mean_inclusion, by_mean, dict(prune=.7)))
LOSSES = dict(
    distinct=torch.rand(37, generator=gen())**2,
    ties=torch.tensor([1.]*9+[2.]*5+[0.]*8+[7.]),
    equal=torch.full((12,), .1),
    signs=torch.randn(23, generator=gen()),
    unknown=torch.tensor([math.nan,3.,1.,math.inf,2.,-math.inf,1.,5.,.5]),
    one=torch.tensor([4.]),
    none_known=torch.tensor([math.nan,math.inf]))

def mask_of(rows, n): return torch.zeros(n).index_fill_(0, rows, 1.)

@pytest.mark.law(2)
@pytest.mark.parametrize('shape', SHAPES)
@pytest.mark.parametrize('losses', LOSSES.values(), ids=LOSSES)
def test_as_many_as_the_probabilities_sum_to_and_each_as_often_as_its_own(shape, losses):
    "The sum is rounded at random; items of probability 1 are always there, of 0 never, all others within 4 sigma"
    inclusion,formula,kwargs = SHAPES[shape]
    inclusion,formula = partial(inclusion, **kwargs),partial(formula, **kwargs)
    p = torch.tensor(chances(losses.tolist(), formula)).double()
    n,generator = 300,gen(1)
    drawn = torch.stack([mask_of(include(losses, inclusion, 0., generator).rows, len(p)) for _ in range(n)]).double()

    counts,total = drawn.sum(1),p.sum().item()
    assert set(counts.tolist())<={math.floor(total+1e-5),math.ceil(total-1e-5)}
    assert abs(counts.mean()-total)<=4*(total%1*(1-total%1)/n)**.5+1e-5
    assert ((drawn.mean(0)-p).abs()<=4*(p*(1-p)/n).sqrt()).all()

    known = losses[losses.isfinite()]
    wanted = torch.tensor(formula(known.tolist())).double()
    torch.testing.assert_close(inclusion(known).double(), wanted, rtol=0, atol=1e-6)

def test_items_alike_come_together_as_often_as_any_two():
    "Ten of twenty: a pair in 9/38 of the draws"
    n,generator = 1500,gen()
    together = torch.zeros(20, 20)
    def half(loss): return torch.full((20,), .5)
    for _ in range(n):
        drawn = mask_of(include(torch.zeros(20), half, 0., generator).rows, 20)
        together += drawn[:,None]*drawn
    pairs = together[torch.ones(20, 20).triu(1).bool()]/n
    assert ((pairs-9/38).abs()<4.5*(9/38*29/38/n)**.5).all()
    assert pairs.mean().item()==pytest.approx(9/38)

@pytest.mark.parametrize('correct', [0., .5, 1.])
def test_weights_are_powers_of_the_probabilities(correct):
    losses = LOSSES['unknown']
    p = torch.tensor(chances(losses.tolist(), partial(by_rank, beta=2.)))
    for s in range(20):
        due = torch.arange(9)==6
        rows,weight = include(losses, partial(rank_inclusion, beta=2.), correct, gen(s), due)
        assert 6 in rows.tolist()
        assert rows.tolist()==sorted(set(rows.tolist()))
        assert (weight is None)==(correct==0)
        if correct: torch.testing.assert_close(weight, torch.where(due, 1., p)[rows]**-correct)

# in training
METHODS = dict(
    favor_hard=(partial(FavorHardCallback, beta=2), partial(by_rank, beta=2)),
    drop_easy=(partial(DropEasyCallback, quantile=.6, drop=.7), partial(by_step, quantile=.6, drop=.7)),
    info_batch=(partial(InfoBatchCallback, prune=.7, delta=1.), partial(by_mean, prune=.7)))

def epochs_of(cb, n_epoch, bs=32, net=None, drop_last=False, num_workers=0, **kwargs):
    learn = with_diary(cb, net, bs=bs, drop_last=drop_last, num_workers=num_workers)
    return trained_only(learn, n_epoch, **kwargs).diary.epochs

def longer_rest(rested, trained): return [0 if i in trained else r+1 for i,r in enumerate(rested)]

def longest_rest(epochs, n_items=100):
    "For how many epochs in a row an item was left out, the longest time"
    rested,longest = [0]*n_items,0
    for epoch in epochs:
        rested = longer_rest(rested, set(items_of(epoch)))
        longest = max(longest, *rested)
    return longest

@pytest.mark.parametrize('kwargs', [dict(), dict(ema=.5), dict(correct=1.), dict(max_rest=2)], ids=str)
@pytest.mark.parametrize('method', METHODS)
def test_each_epoch_loads_what_the_formula_says_of_the_last_losses(method, kwargs):
    "Where one would be left over for a batch of its own, another one comes along"
    make,formula = METHODS[method]
    correct = kwargs.get('correct', method=='info_batch')
    last,smooth,rested = [math.nan]*100,[math.nan]*100,[0]*100
    for epoch in epochs_of(make(seed=0, **kwargs), 16, bs=16):
        p = chances(smooth if 'ema' in kwargs else last, formula)
        p = [1. if kwargs.get('max_rest')==r else q for q,r in zip(p, rested)]
        total,sure = math.fsum(p),{i for i in range(100) if p[i]==1}

        loaded,sizes = items_of(epoch),[len(batch) for batch,*_ in epoch]
        assert len(loaded) in {n+(n%16==1) for n in (math.floor(total+1e-4),math.ceil(total-1e-4))}
        assert len(set(loaded))==len(loaded)
        assert sure<=set(loaded)
        assert sizes[:-1]==[16]*(len(sizes)-1)
        assert sizes[-1]>1

        weight_of = {i: w for batch,weights,_ in epoch for i,w in zip(batch, weights)}
        of_others = [i for i,w in weight_of.items() if w!=pytest.approx(p[i]**-correct, rel=1e-4)]
        assert len(of_others)<=(sizes[-1]==2) # the one that came along

        for batch,_,losses in epoch:
            for i,l in zip(batch, losses):
                last[i] = l
                smooth[i] = l if math.isnan(smooth[i]) else .5*smooth[i]+.5*l
        rested = longer_rest(rested, set(loaded))

@pytest.mark.parametrize('bs', [16, 20])
@pytest.mark.parametrize('k', [1, 2])
@pytest.mark.parametrize('cb', [
    partial(FavorHardCallback, beta=3),
    partial(FavorHardCallback, beta=1000),
    partial(DropEasyCallback, .83, 1.)])
def test_a_dropped_last_batch_is_not_made_of_items_that_are_due(cb, k, bs):
    "100 items: in batches of 16 even a full epoch would drop four of them"
    epochs = epochs_of(cb(max_rest=k, seed=0), 4*k+6, bs=bs, drop_last=True)
    for epoch in epochs: assert all(len(batch)==bs for batch,*_ in epoch) or len(set(items_of(epoch)))<bs
    assert longest_rest(epochs)==k

def test_items_that_never_trained_are_loaded():
    "The warm-up drops four of a hundred; later on nobody is spared for a batch that is not full"
    epochs = epochs_of(DropEasyCallback(quantile=.9, drop=1., seed=0), 3, drop_last=True)
    first,second,_ = map(items_of, epochs)
    assert len(first)==96
    assert set(second)>=set(range(100))-set(first)

WINDOWS = [
    dict(), dict(warmup=3), dict(start=.5), dict(end=.5, warmup=0), dict(interrupt=3),
    dict(start=.25, end=.75, warmup=0, interrupt=2)]

@pytest.mark.parametrize('window', WINDOWS, ids=str)
def test_when(window):
    w = dict(start=0., end=1., warmup=1, interrupt=0) | window
    def is_on(e):
        is_full = w['interrupt'] and (e+1)%w['interrupt']==0
        return e>=max(w['warmup'], 1) and w['start']<=e/8<w['end'] and not is_full # in the first one nothing is known
    sizes = [len(items_of(e)) for e in epochs_of(FavorHardCallback(seed=0, **window), 8)]
    assert [n<100 for n in sizes]==[is_on(e) for e in range(8)]
    assert min(sizes)>=49

@pytest.mark.parametrize('make,share', [
    (lambda: FavorHardCallback(beta=lambda pct: 8*pct), lambda pct: sum(((2*i+1)/200)**(8*pct) for i in range(100))),
    (lambda: DropEasyCallback(quantile=lambda pct: pct, drop=.5), lambda pct: 100-50*pct),
    (lambda: DropEasyCallback(quantile=.5, drop=lambda pct: 1-pct), lambda pct: 100-50*(1-pct))])
def test_numbers_follow_schedules(make, share):
    for e,epoch in enumerate(epochs_of(make(), 10, bs=50)[1:], 1):
        n = round(share(e/10), 9)
        assert len(items_of(epoch)) in {m+(m%50==1) for m in (math.floor(n),math.ceil(n))}

def test_what_is_left_out_is_not_loaded_and_nothing_is_looked_at():
    "Items are read once for each time that they train; the model runs once a step"
    read,runs,epochs = reads_and_runs(with_diary(FavorHardCallback(beta=3, seed=0)), 6)
    n_steps = sum(map(len, epochs))
    assert read==Counter(sum(map(items_of, epochs), []))
    assert 100<read.total()<6*50
    assert runs==n_steps

@pytest.mark.parametrize('make,ema', [
    *[(partial(make, ema=.8), .8) for make,_ in METHODS.values()],
    (partial(PrioritizedSamplingCallback, 2., uniform=.2, warmup=1), .9)], ids=[*METHODS,'prioritized'])
def test_training_and_memory_are_those_of_a_loop_by_hand(make, ema):
    "Also of items that come several times within a batch"
    learn = with_diary(make(seed=0, correct=1.), linear())
    learn.opt_func = SGD
    net,(x,y) = copy.deepcopy(learn.model),learn.dls.train.dataset.tensors
    epochs = trained_only(learn, 6, lr=.05).diary.epochs

    table = by_hand(net, x, y, epochs, .05, ema)
    for a,b in zip(net.parameters(), learn.model.parameters()): torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    for k in table[0]:
        remembered,wanted = getattr(learn.selection.memory, k),torch.tensor([o[k] for o in table])
        torch.testing.assert_close(remembered.double(), wanted.double(), rtol=1e-4, atol=1e-5)

@pytest.mark.parametrize('call', [
    lambda: FavorHardCallback(beta=-1.), lambda: FavorHardCallback(beta=lambda pct: -pct),
    lambda: DropEasyCallback(quantile=1.1), lambda: DropEasyCallback(drop=lambda pct: 2*pct),
    lambda: DropEasyCallback(max_rest=-1), lambda: DropEasyCallback(max_rest=1.5),
    lambda: FavorHardCallback(ema=1.),
    lambda: FavorHardCallback(correct=-.1), lambda: FavorHardCallback(correct=lambda pct: -pct),
    lambda: mean_inclusion(LOSSES['ties'], 1.),
    lambda: step_inclusion(LOSSES['ties'], 2.),
    lambda: rank_inclusion(LOSSES['ties'], -1.)])
def test_numbers_out_of_range(call):
    with pytest.raises(ValueError, match='got .*wanted'): call()
