"Properties that hold for any losses, shapes, dtypes, shares and schedules, against float64 computations by hand"
import math, os

import pytest, torch
from helpers import prune_easy
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from selback.core.batches import Batch as Items
from selback.core.losses import item_losses
from selback.core.batches import UntilFull
from selback.functional import *
from torch import nn
from torch.nn import functional as F

every_check = list(HealthCheck)
n_examples = int(os.environ.get('SELBACK_EXAMPLES', 50)) # of each property
settings.register_profile('fuzz', max_examples=n_examples, deadline=None, derandomize=True,
    suppress_health_check=every_check)
settings.load_profile('fuzz')

number = st.floats(-1e4, 1e4, width=32) | st.sampled_from([0.,1.,1.,.5])
odd = number | st.sampled_from([math.nan, math.inf, -math.inf])
dtypes = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16])
shares = st.floats(.01, 1.) | st.sampled_from([.1,.25,1/3,.29,.5,1.])
multiples = st.sampled_from([1,1,2,3,8])
seeds = st.integers(0, 2**31)

@st.composite
def scores(draw, of=number, low=1, high=40, dtype=None):
    "Scores, some of which may be equal"
    if draw(st.booleans()): values = draw(st.lists(of, min_size=low, max_size=high))
    else: values = [draw(of)]*draw(st.integers(low, high))
    return torch.tensor(values, dtype=torch.float64).to(draw(dtypes) if dtype is None else dtype)

def positive(**kwargs): return scores(of=st.floats(0, 1e4, width=32) | st.sampled_from([0.,1.]), **kwargs)

def gen(seed): return torch.Generator().manual_seed(seed)

def up(count, multiple, n):
    "What a count is rounded up to, if that leaves items out"
    rounded = -(-count//multiple)*multiple
    return rounded if rounded<n else count

def floor(share_of_items): return math.floor(share_of_items+1e-9)

def ceil(share_of_items): return math.ceil(share_of_items-1e-9)

def rank_value(s):
    "What is not finite ranks highest"
    return [v if math.isfinite(v) else math.inf for v in s.tolist()]

def n_kept(s, keep, multiple): return up(max(1, floor(len(s)*keep)), multiple, len(s))

def check_rows(chosen, n, count=None):
    "Row numbers of the batch, in its order, none twice"
    idx = chosen.rows.tolist()
    assert chosen.rows.dtype==torch.int64
    assert idx==sorted(set(idx))
    assert all(0<=i<n for i in idx)
    if count is not None: assert len(idx)==count
    return idx

def check_hardest(idx, values):
    chosen = set(idx)
    rest = [v for i,v in enumerate(values) if i not in chosen]
    if rest and idx: assert min(values[i] for i in idx)>=max(rest)

# policies
@given(scores(), shares, st.floats(0, 1), multiples)
def test_loss_share(s, share, least, multiple):
    n,values = len(s),s.double().tolist()
    chosen = loss_share(s, share, least, multiple)
    idx = check_rows(chosen, n)
    assert chosen.weight is None
    check_hardest(idx, values)

    total,at_least = sum(values),up(ceil(n*least), multiple, n)
    if share==1 or total<=0:
        assert len(idx)==n
        return

    kept,tolerance = sum(values[i] for i in idx),1e-5*sum(map(abs, values))
    assert kept>=share*total-tolerance
    assert len(idx)>=at_least
    is_rounded = len(idx)%multiple==0
    assert is_rounded or -(-len(idx)//multiple)*multiple>=n

    fewer = len(idx)-(multiple if is_rounded else 1) # would not be enough
    if fewer<=0: return
    of_fewer = sum(sorted(values, reverse=True)[:fewer])
    assert fewer<at_least or of_fewer<share*total*(1+1e-5)+tolerance

@given(scores(of=odd), shares)
def test_loss_share_of_losses_that_are_not_finite(s, share):
    assume(not s.isfinite().all())
    check_rows(loss_share(s, share), len(s), len(s))

@given(scores(of=odd), shares, multiples)
def test_top_k(s, keep, multiple):
    idx = check_rows(top_k(s, keep, multiple_of=multiple), len(s), n_kept(s, keep, multiple))
    check_hardest(idx, rank_value(s))

@given(scores(of=odd), st.floats(.01, .6), st.floats(0, .4), multiples)
def test_top_k_of_both_ends(s, keep, also_bottom, multiple):
    n,values = len(s),rank_value(s)
    top = max(1, floor(n*keep))
    bottom = min(floor(n*also_bottom), n-top)
    idx = check_rows(top_k(s, keep, also_bottom, multiple), n, up(top+bottom, multiple, n))
    ordered = sorted(values, reverse=True)
    assert sorted((values[i] for i in idx), reverse=True)==ordered[:len(idx)-bottom]+ordered[n-bottom:]

@given(scores(of=odd), shares, multiples, seeds)
def test_rank_sample(s, keep, multiple, seed):
    n,values,count = len(s),rank_value(s),n_kept(s, keep, multiple)
    idx = check_rows(rank_sample(s, keep, gen(seed), multiple), n, count)
    assume(len(set(values))==n) # ranks of equal losses are arbitrary

    u = torch.rand(n, generator=gen(seed)).double().tolist()
    rank = {i: r for r,i in enumerate(sorted(range(n), key=lambda i: values[i]))}
    def key(i): # of Efraimidis and Spirakis, as logarithms
        log_weight = (1/keep-1)*math.log((rank[i]+.5)/n)
        return math.log(-math.log(max(u[i], 1e-30)))-log_weight

    wanted = sorted(range(n), key=key)
    gap = key(wanted[count])-key(wanted[count-1]) if count<n else 1.
    if gap>1e-4: assert idx==sorted(wanted[:count])

def mid_ranks(values, known):
    "The share of what is known that is below each value, what is equal to it by half"
    def below(v): return sum(o<v for o in known)+sum(o<=v for o in known)
    return [below(v)/2/len(known) for v in values]

@given(scores(), st.lists(odd, max_size=30), st.floats(0, 20), seeds)
def test_cdf_power(s, past, beta, seed):
    s = s.float()
    history,n = torch.cat([torch.tensor(past, dtype=torch.float32), s]),len(s)
    idx = set(check_rows(cdf_power(s, history, beta, gen(seed)), n))

    known = [v for v in history.tolist() if math.isfinite(v)]
    prob = [rank**beta for rank in mid_ranks(s.tolist(), known)]
    torch.testing.assert_close(mid_rank(s, history)**beta, torch.tensor(prob), rtol=1e-4, atol=1e-6)

    u = torch.rand(n, generator=gen(seed)).tolist()
    sure = {i for i in range(n) if u[i]<prob[i]*(1-1e-4)}
    maybe = {i for i in range(n) if u[i]<=prob[i]*(1+1e-4)}
    assert sure<=idx
    assert len(idx)<=len(maybe)
    assert idx<=maybe

@given(scores(of=odd, dtype=torch.float32), st.floats(0, 20), seeds)
def test_cdf_power_of_scores_that_are_not_finite(s, beta, seed):
    assume(not s.isfinite().all() and s.isfinite().any())
    check_rows(cdf_power(s, s, beta, gen(seed)), len(s), len(s))

@given(scores(of=odd), shares, multiples, seeds)
def test_random_k(s, keep, multiple, seed):
    n = len(s)
    idx = check_rows(random_k(s, keep, gen(seed), multiple), n, n_kept(s, keep, multiple))
    others = torch.zeros(n) # the scores don't matter
    assert idx==check_rows(random_k(others, keep, gen(seed), multiple), n)

@given(positive(dtype=torch.float32), st.integers(1, 30), st.floats(0, 2), seeds)
def test_importance_sample(s, count, correct, seed):
    chosen,n = importance_sample(s, count, correct, gen(seed)),len(s)
    rows,values = chosen.rows.tolist(),s.double().tolist()
    total = sum(values)
    chance = [v/total for v in values] if total>0 else [1/n]*n
    drawn = [chance[row] for row in rows]
    assert rows==sorted(rows)
    assert len(rows)==count
    assert all(p>0 for p in drawn)
    if not correct:
        assert chosen.weight is None
        return

    unbiased = [1/(n*p) for p in drawn]
    power = [w**correct for w in unbiased]
    def sum_by_chance(weights): return sum(w*p for w,p in zip(weights, drawn))
    scale = 1. if correct==1 else sum_by_chance(unbiased)/sum_by_chance(power)
    wanted = [w*scale for w in power]
    assume(max(wanted)<1e20)
    torch.testing.assert_close(chosen.weight.double(), torch.tensor(wanted).double(), rtol=2e-3, atol=1e-6)

@given(scores(of=odd, dtype=torch.float32), seeds)
def test_importance_sample_of_scores_that_say_nothing(s, seed):
    assume(not s.isfinite().all() or (s<0).any() or s.sum()<=0)
    chosen = importance_sample(s, 5, 1., gen(seed))
    torch.testing.assert_close(chosen.weight, torch.ones(5)) # uniform

@given(scores(of=odd, dtype=torch.float32), st.floats(0, .95), seeds)
def test_prune_easy(s, prune, seed):
    chosen,values = prune_easy(s, prune, gen(seed)),s.double().tolist()
    idx = check_rows(chosen, len(s))

    known = [v for v in values if math.isfinite(v)]
    differ = len(set(known))>1
    mean = sum(known)/len(known) if known else math.nan
    def is_clear(v): return abs(v-mean)>1e-6*max(1., abs(mean))
    assume(not differ or all(map(is_clear, known)))

    easy = {i for i,v in enumerate(values) if differ and math.isfinite(v) and v<mean}
    hard,share = set(range(len(s)))-easy,(1-prune)*len(easy)
    assert hard<=set(idx)
    assert len(easy & set(idx)) in (floor(share), ceil(share))
    weight = torch.tensor([1/(1-prune) if i in easy else 1. for i in idx])
    torch.testing.assert_close(chosen.weight.double(), weight.double(), rtol=1e-5, atol=0)

@given(positive(dtype=torch.float32))
def test_variance_gain(s):
    values = s.double().tolist()
    n,total = len(values),sum(values)
    assume(total==0 or total>1e-20)
    wanted = math.sqrt(n*sum((v/total)**2 for v in values)) if total>1e-30 else 1.
    assert float(variance_gain(s))==pytest.approx(wanted, rel=1e-4)
    assert 1-1e-4<=wanted<=math.sqrt(n)+1e-4

# what is kept between batches
@given(st.lists(scores(of=odd, dtype=torch.float32, high=12), min_size=1, max_size=6), st.integers(1, 20))
def test_history_is_the_tail_of_what_was_pushed(batches, size):
    history = History(size)
    for s in batches: got = history.push(s)
    wanted = sum([rank_value(s) for s in batches], [])[-size:]
    assert got.tolist()==wanted

def numbered_items(idx):
    "Inputs, targets and indices that all say the same"
    idx = torch.tensor(idx)
    return Items((idx[:,None].float(),), dict(y=idx), idx)

@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), min_size=1, max_size=20))
def test_who_waits_is_first_in_first_out(steps):
    waiting,queue,next_item = UntilFull(),[],0
    for adds,n in steps:
        if adds:
            new = list(range(next_item, next_item+n))
            next_item += n
            waiting.add(numbered_items(new), Chosen(torch.arange(n)))
            queue += new
        elif queue:
            first,queue = queue[:n],queue[n:]
            waiting.bs = len(first) # a full batch
            items = waiting.pop()
            assert items.xb[0][:,0].long().tolist()==first
            assert items.yb['y'].tolist()==first
            assert items.idx.tolist()==first
        assert len(waiting)==len(queue)

# schedules
unit = st.floats(0, 1)

@given(unit, unit, st.integers(0, 4), st.sampled_from([0,2,3,5]), unit, st.integers(0, 6), st.integers(0, 20))
def test_window(start, end, warmup, interrupt, pct, epochs, batch):
    if start>=end:
        with pytest.raises(ValueError, match='start below end'): Window(start, end, warmup, interrupt)
        return

    is_inside = pct>=start and (pct<end or end==1)
    is_interrupted = interrupt and batch%interrupt==interrupt-1
    is_on = is_inside and epochs>=warmup and not is_interrupted
    assert Window(start, end, warmup, interrupt).is_on(pct, epochs, batch)==is_on

@given(st.floats(.01, 1), st.floats(.01, 1), st.floats(0, 1.2), positive(low=2, dtype=torch.float32))
def test_a_share_that_follows_a_schedule(first, last, pct, s):
    def keep(pct): return first+(last-first)*pct
    now = keep(min(pct, 1.))
    assert value_at(keep, pct)==now
    assert value_at(first, pct)==first
    share = min(1., now)
    check_rows(top_k(s, share), len(s), n_kept(s, share, 1))

# the memory
NOTHING_KNOWN = dict(loss=math.nan, total=0., ewma=math.nan, age=0, seen=0, picked=0)
COUNTED,AVERAGED = ('age','seen','picked'),('loss','total','ewma')

def after(row, loss, ema, fresh, picked):
    "What is known of an item, once another loss is noted; None: nothing was"
    before = row or NOTHING_KNOWN
    return dict(
        loss=loss,
        total=before['total']+loss,
        ewma=before['ewma']*ema+loss*(1-ema) if row else loss,
        age=0 if fresh else before['age'],
        seen=before['seen']+1,
        picked=before['picked']+picked)

item_and_loss = st.tuples(st.integers(0, 7), number)
batch_of_losses = st.lists(item_and_loss, min_size=1, max_size=8, unique_by=lambda o: o[0])
notes_of_batches = st.lists(st.tuples(batch_of_losses, *[st.booleans()]*3), min_size=1, max_size=6)

@given(notes_of_batches, st.floats(0, .99))
def test_the_memory_is_a_table(notes, ema):
    memory,table = ItemMemory(8, ema=ema),{}
    for batch,fresh,picked,ends_epoch in notes:
        idx,losses = zip(*batch)
        memory.note(torch.tensor(idx), torch.tensor(losses), fresh, picked)
        for i,loss in batch: table[i] = after(table.get(i), loss, ema, fresh, picked)
        if not ends_epoch: continue
        memory.next_epoch()
        for row in table.values(): row['age'] += 1

    for i in range(8):
        row = table.get(i, NOTHING_KNOWN)
        for name in COUNTED: assert getattr(memory, name)[i].item()==row[name]
        for name in AVERAGED:
            assert getattr(memory, name)[i].item()==pytest.approx(row[name], rel=1e-3, abs=1e-2, nan_ok=True)

# the losses of items
def tensor_of(shape, seed, dtype=torch.float32): return (torch.randn(shape, generator=gen(seed))*3).to(dtype)

spatial = st.lists(st.integers(1, 4), max_size=2)
tolerance = {torch.float32: 1e-5, torch.float64: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}

def assert_near(got, wanted, n, dtype):
    assert got.dtype==torch.float32
    assert got.shape==(n,)
    torch.testing.assert_close(got.double(), wanted, rtol=tolerance[dtype], atol=tolerance[dtype]*10)

def by_hand(pred, y, weight, ignored):
    "The mean cross-entropy of each item over what is not ignored, one element after the other"
    def element(p, c):
        loss = p.logsumexp(0)-p[c]
        return loss if weight is None else loss*weight[c].double()
    def item(p, t):
        losses = [element(p[:,j], c) for j,c in enumerate(t.tolist()) if c!=ignored]
        return sum(losses)/len(losses) if losses else torch.tensor(0.).double()

    pred = pred.double()
    preds = pred.flatten(2) if pred.ndim>2 else pred[...,None]
    return torch.stack([item(p, t) for p,t in zip(preds, y.reshape(len(y), -1))])

def cross_entropy_function(weight, reduction):
    def loss(pred, y, reduction=reduction, ignore_index=-100):
        return F.cross_entropy(pred, y, weight, reduction=reduction, ignore_index=ignore_index)
    return loss

reductions = st.sampled_from(['mean','sum','none'])
flags = st.booleans()

@given(st.integers(1, 5), st.integers(2, 4), spatial, dtypes, flags, flags, reductions, flags, seeds)
def test_cross_entropy(n, classes, shape, dtype, is_weighted, ignores, reduction, is_function, seed):
    pred = tensor_of((n, classes, *shape), seed, dtype)
    y = torch.randint(0, classes, (n, *shape), generator=gen(seed))
    weight = torch.rand(classes, generator=gen(seed)).to(dtype) if is_weighted else None
    if ignores: y[torch.rand(y.shape, generator=gen(seed))<.4] = -100

    if is_function: loss = cross_entropy_function(weight, reduction)
    else: loss = nn.CrossEntropyLoss(weight=weight, reduction=reduction)
    assert_near(item_losses(loss, pred, y), by_hand(pred, y, weight, -100), n, dtype)
    if not is_function: assert loss.reduction==reduction

ELEMENTWISE = dict(
    mse=(nn.MSELoss, lambda p, t: (p-t)**2),
    l1=(nn.L1Loss, lambda p, t: (p-t).abs()),
    bce=(nn.BCEWithLogitsLoss, lambda p, t: -(t*p.sigmoid().log()+(1-t)*(-p).sigmoid().log())),
    huber=(nn.HuberLoss, lambda p, t: torch.where((p-t).abs()<1, (p-t)**2/2, (p-t).abs()-.5)))

@given(st.integers(1, 5), spatial, dtypes, st.sampled_from(['mean','sum']), st.sampled_from([*ELEMENTWISE]), seeds)
def test_elementwise_losses(n, shape, dtype, reduction, kind, seed):
    pred,y = (tensor_of((n, 2, *shape), seed+i, dtype) for i in range(2))
    if kind=='bce': y = y.sigmoid()
    cls,formula = ELEMENTWISE[kind]
    by_element = formula(pred.double(), y.double())
    wanted = by_element.reshape(n, -1).mean(1)
    assert_near(item_losses(cls(reduction=reduction), pred, y), wanted, n, dtype)

@given(st.integers(1, 5), spatial, st.sampled_from([torch.float32, torch.float64]), st.booleans(), seeds)
def test_losses_that_return_one_number(n, shape, dtype, is_traceable, seed):
    pred,y = (tensor_of((n, 2, *shape), seed+i, dtype) for i in range(2))
    def one_number(p, t):
        if is_traceable or p.sum().item()<1e30: return ((p-t)**2).mean()
        return p.sum()

    losses = item_losses(one_number, pred, y)
    assert_near(losses, ((pred.double()-y)**2).reshape(n, -1).mean(1), n, dtype)
    torch.testing.assert_close(separable_losses(one_number, pred, y), losses)

@given(st.integers(3, 8), seeds)
def test_losses_that_mix_items_are_refused(n, seed):
    pred,y = (tensor_of((n, 2), seed+i) for i in range(2))
    def normalised(p, t): return ((p-t)**2).mean()/p.var()
    with pytest.raises(ValueError, match='item_loss='): separable_losses(normalised, pred, y)
