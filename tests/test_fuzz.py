"Properties that hold for any losses, shapes, dtypes, shares and schedules, against float64 computations by hand"
import math

import pytest, torch
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from selback.core.batches import Items
from selback.core.losses import item_losses_how
from selback.core.functional import *
from torch import nn
from torch.nn import functional as F

settings.register_profile('fuzz', max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
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
    values = draw(st.lists(of, min_size=low, max_size=high)) if draw(st.booleans()) else [draw(of)]*draw(st.integers(low, high))
    return torch.tensor(values, dtype=torch.float64).to(draw(dtypes) if dtype is None else dtype)

def positive(**kwargs): return scores(of=st.floats(0, 1e4, width=32) | st.sampled_from([0.,1.]), **kwargs)
def gen(seed): return torch.Generator().manual_seed(seed)
def up(count, multiple, n): return min(-(-count//multiple)*multiple, n)
def rank_value(s): return [math.inf if not math.isfinite(v) else v for v in s.tolist()] # what is not finite ranks highest

def check_rows(chosen, n, count=None):
    "Row numbers of the batch, in its order, none twice"
    idx = chosen.rows.tolist()
    assert chosen.rows.dtype==torch.int64 and idx==sorted(set(idx)) and all(0<=i<n for i in idx)
    if count is not None: assert len(idx)==count
    return idx

def check_hardest(idx, values):
    rest = [v for i,v in enumerate(values) if i not in set(idx)]
    assert not rest or not idx or min(values[i] for i in idx)>=max(rest)

@given(scores(), shares, st.floats(0, 1), multiples)
def test_loss_share(s, share, least, multiple):
    n,values = len(s),s.double().tolist()
    idx = check_rows(chosen := loss_share(s, share, least, multiple), n)
    assert chosen.weight is None
    check_hardest(idx, values)
    total,at_least = sum(values),up(math.ceil(n*least-1e-9), multiple, n)
    if share==1 or total<=0:
        assert len(idx)==n
        return
    kept = sum(values[i] for i in idx)
    assert kept>=share*total-1e-5*sum(map(abs, values)) and len(idx)>=at_least and (len(idx)%multiple==0 or len(idx)==n)
    fewer = sum(sorted(values, reverse=True)[:len(idx)-multiple]) # a multiple less would not be enough
    assert len(idx)<=multiple or len(idx)-multiple<at_least or fewer<share*total*(1+1e-5)+1e-5*sum(map(abs, values))

@given(scores(of=odd), shares)
def test_loss_share_of_losses_that_are_not_finite(s, share):
    assume(not s.isfinite().all())
    check_rows(loss_share(s, share), len(s), len(s))

@given(scores(of=odd), shares, multiples)
def test_top_k(s, keep, multiple):
    count = up(max(1, math.floor(len(s)*keep+1e-9)), multiple, len(s))
    check_hardest(check_rows(top_k(s, keep, multiple), len(s), count), rank_value(s))

@given(scores(of=odd), st.floats(.01, .6), st.floats(0, .4), multiples)
def test_top_and_bottom(s, keep, also_bottom, multiple):
    n,values = len(s),rank_value(s)
    top = max(1, math.floor(n*keep+1e-9))
    bottom = min(math.floor(n*also_bottom+1e-9), n-top)
    idx = check_rows(top_and_bottom(s, keep, also_bottom, multiple), n, up(top+bottom, multiple, n))
    got,ordered = sorted((values[i] for i in idx), reverse=True),sorted(values, reverse=True)
    assert got==ordered[:len(idx)-bottom]+ordered[n-bottom:]

@given(scores(of=odd), shares, multiples, seeds)
def test_rank_sample(s, keep, multiple, seed):
    n,count = len(s),up(max(1, math.floor(len(s)*keep+1e-9)), multiple, len(s))
    idx = check_rows(rank_sample(s, keep, gen(seed), multiple), n, count)
    assume(len(set(rank_value(s)))==n) # ranks of equal losses are arbitrary
    u,order = torch.rand(n, generator=gen(seed)).double().tolist(),sorted(range(n), key=lambda i: rank_value(s)[i])
    key = {i: math.log(-math.log(max(u[i], 1e-30)))-(1/keep-1)*math.log((r+.5)/n) for r,i in enumerate(order)} # Efraimidis and Spirakis, as logarithms
    wanted = sorted(range(n), key=lambda i: key[i])
    gap = key[wanted[count]]-key[wanted[count-1]] if count<n else 1.
    if gap>1e-4: assert idx==sorted(wanted[:count])

@given(scores(), st.lists(odd, max_size=30), st.floats(0, 20), multiples, seeds)
def test_cdf_power(s, past, beta, multiple, seed):
    s = s.float()
    history = torch.cat([torch.tensor(past, dtype=torch.float32), s])
    known,n = sorted(h for h in history.tolist() if math.isfinite(h)),len(s)
    idx = set(check_rows(cdf_power(s, history, beta, gen(seed), multiple), n))
    prob = [((sum(h<v for h in known)+sum(h<=v for h in known))/2/len(known))**beta for v in s.tolist()]
    torch.testing.assert_close(mid_rank(s, history)**beta, torch.tensor(prob), rtol=1e-4, atol=1e-6)
    u = torch.rand(n, generator=gen(seed)).tolist()
    sure = {i for i in range(n) if u[i]<prob[i]*(1-1e-4)}
    maybe = {i for i in range(n) if u[i]<=prob[i]*(1+1e-4)}
    assert sure<=idx and (len(idx)%multiple==0 or len(idx)==n)
    if multiple==1: assert idx<=maybe
    assert len(idx)<=up(len(maybe), multiple, n)

@given(scores(of=odd, dtype=torch.float32), st.floats(0, 20), seeds)
def test_cdf_power_of_scores_that_are_not_finite(s, beta, seed):
    assume(not s.isfinite().all() and s.isfinite().any())
    check_rows(cdf_power(s, s, beta, gen(seed)), len(s), len(s))

@given(scores(of=odd), shares, multiples, seeds)
def test_random_k(s, keep, multiple, seed):
    count = up(max(1, math.floor(len(s)*keep+1e-9)), multiple, len(s))
    idx = check_rows(random_k(s, keep, gen(seed), multiple), len(s), count)
    assert idx==check_rows(random_k(torch.zeros(len(s)), keep, gen(seed), multiple), len(s)) # the scores don't matter

@given(positive(dtype=torch.float32), st.integers(1, 30), st.floats(0, 2), seeds)
def test_importance_sample(s, count, correct, seed):
    chosen,n = importance_sample(s, count, correct, gen(seed)),len(s)
    values = s.double().tolist()
    p = [v/sum(values) for v in values] if sum(values)>0 else [1/n]*n
    assert chosen.rows.tolist()==sorted(chosen.rows.tolist()) and len(chosen.rows)==count and all(p[i]>0 for i in chosen.rows.tolist())
    drawn = [p[i] for i in chosen.rows.tolist()]
    unbiased = [1/(n*q) for q in drawn]
    if not correct:
        assert chosen.weight is None
        return
    scale = sum(w*q for w,q in zip(unbiased, drawn))/sum(w**correct*q for w,q in zip(unbiased, drawn))
    wanted = [w**correct*(1. if correct==1 else scale) for w in unbiased]
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
    idx,known = check_rows(chosen, len(s)),[v for v in values if math.isfinite(v)]
    mean = sum(known)/len(known) if known else math.nan
    assume(all(abs(v-mean)>1e-6*max(1., abs(mean)) for v in known) or len(set(known))<=1)
    easy = {i for i,v in enumerate(values) if math.isfinite(v) and v<mean} if len(set(known))>1 else set()
    share = (1-prune)*len(easy)
    assert set(range(len(s)))-easy<=set(idx) and len(easy & set(idx)) in (math.floor(share+1e-9), math.ceil(share-1e-9))
    torch.testing.assert_close(chosen.weight.double(), torch.tensor([1/(1-prune) if i in easy else 1. for i in idx]).double(), rtol=1e-5, atol=0)

@given(positive(dtype=torch.float32))
def test_variance_gain(s):
    values = s.double().tolist()
    wanted = math.sqrt(len(values)*sum((v/sum(values))**2 for v in values)) if sum(values)>1e-30 else 1.
    assume(sum(values)==0 or sum(values)>1e-20)
    assert float(variance_gain(s))==pytest.approx(wanted, rel=1e-4) and 1-1e-4<=wanted<=math.sqrt(len(s))+1e-4

@given(st.lists(scores(of=odd, dtype=torch.float32, high=12), min_size=1, max_size=6), st.integers(1, 20))
def test_history_is_the_tail_of_what_was_pushed(batches, size):
    history = History(size)
    for s in batches: got = history.push(s)
    wanted = sum([rank_value(s) for s in batches], [])[-size:]
    assert sorted(got.tolist())==sorted(wanted+[math.inf]*(size-len(wanted)))

@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), min_size=1, max_size=20))
def test_the_pool_is_first_in_first_out(steps):
    pool,queue,next_item = ItemPool(),[],0
    for add,n in steps:
        if add:
            new = list(range(next_item, next_item+n))
            next_item += n
            pool.add(Items((torch.tensor(new)[:,None].float(),), dict(y=torch.tensor(new)), torch.tensor(new)))
            queue += new
        elif queue:
            items = pool.pop(n)
            assert items.xb[0][:,0].long().tolist()==items.yb['y'].tolist()==items.idx.tolist()==queue[:n]
            queue = queue[n:]
        assert len(pool)==len(queue)

@given(st.floats(0, 1), st.floats(0, 1), st.integers(0, 4), st.sampled_from([0,2,3,5]), st.floats(0, 1), st.integers(0, 6), st.integers(0, 20))
def test_window(start, end, warmup, interrupt, pct, epochs, batch):
    if start>=end:
        with pytest.raises(ValueError, match='start below end'): Window(start, end, warmup, interrupt)
        return
    inside = pct>=start and (pct<end or end==1)
    full = interrupt and batch%interrupt==interrupt-1
    assert Window(start, end, warmup, interrupt).is_on(pct, epochs, batch)==bool(epochs>=warmup and inside and not full)

@given(st.floats(.01, 1), st.floats(.01, 1), st.floats(0, 1.2), positive(low=2, dtype=torch.float32))
def test_a_share_that_follows_a_schedule(first, last, pct, s):
    def keep(pct): return first+(last-first)*pct
    now = first+(last-first)*min(pct, 1.)
    assert value_at(keep, pct)==now and value_at(first, pct)==first
    check_rows(top_k(s, min(1., now)), len(s), max(1, math.floor(len(s)*min(1., now)+1e-9)))

@given(st.integers(0, 500), st.integers(1, 64), st.none() | st.integers(0, 500))
def test_round_up(n, multiple, most):
    wanted = next(m for m in range(n, n+multiple) if m%multiple==0)
    assert round_up(n, multiple, most)==(wanted if most is None else min(wanted, most))

@given(st.lists(st.tuples(st.lists(st.tuples(st.integers(0, 7), number), min_size=1, max_size=8, unique_by=lambda o: o[0]), st.booleans(), st.booleans(), st.booleans()),
    min_size=1, max_size=6), st.floats(0, .99))
def test_the_memory_is_a_table(notes, ema):
    memory,table = ItemMemory(8, ema=ema),{}
    for items,fresh,picked,next_epoch in notes:
        memory.note(torch.tensor([i for i,_ in items]), torch.tensor([l for _,l in items]), fresh, picked)
        for i,l in items:
            old = table.get(i, dict(ewma=l, age=0, seen=0, picked=0))
            table[i] = dict(loss=l, ewma=old['ewma']*ema+l*(1-ema) if i in table else l, age=0 if fresh else old['age'], seen=old['seen']+1, picked=old['picked']+picked)
        if next_epoch:
            memory.next_epoch()
            for o in table.values(): o['age'] += 1
    for i in range(8):
        o = table.get(i, dict(loss=math.nan, ewma=math.nan, age=0, seen=0, picked=0))
        assert [getattr(memory, k)[i].item() for k in ('age','seen','picked')]==[o[k] for k in ('age','seen','picked')]
        for k in ('loss','ewma'): assert getattr(memory, k)[i].item()==pytest.approx(o[k], rel=1e-3, abs=1e-2, nan_ok=True)

# item_losses
def tensor_of(shape, seed, dtype=torch.float32): return (torch.randn(shape, generator=gen(seed))*3).to(dtype)
spatial = st.lists(st.integers(1, 4), max_size=2)
tolerance = {torch.float32: 1e-5, torch.float64: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}

def assert_near(got, wanted, n, dtype):
    assert got.dtype==torch.float32 and got.shape==(n,)
    torch.testing.assert_close(got.double(), wanted, rtol=tolerance[dtype], atol=tolerance[dtype]*10)

def by_hand(pred, y, weight, ignore):
    "The mean cross-entropy of each item over what is not ignored, one element after the other"
    res = []
    for p,t in zip(pred.double().flatten(2) if pred.ndim>2 else pred.double()[...,None], y.reshape(len(y), -1)):
        losses = [-(p[c,j]-p[:,j].logsumexp(0))*(1 if weight is None else weight[c].double()) for j,c in enumerate(t.tolist()) if c!=ignore]
        res.append(sum(losses)/len(losses) if losses else torch.tensor(0.).double())
    return torch.stack(res)

@given(st.integers(1, 5), st.integers(2, 4), spatial, dtypes, st.booleans(), st.booleans(), st.sampled_from(['mean','sum','none']), st.booleans(), seeds)
def test_cross_entropy(n, classes, shape, dtype, weighted, ignores, reduction, function, seed):
    pred,y = tensor_of((n, classes, *shape), seed, dtype),torch.randint(0, classes, (n, *shape), generator=gen(seed))
    weight = torch.rand(classes, generator=gen(seed)).to(dtype) if weighted else None
    if ignores: y[torch.rand(y.shape, generator=gen(seed))<.4] = -100
    loss = nn.CrossEntropyLoss(weight=weight, reduction=reduction)
    if function: loss = lambda p, t, reduction=reduction, ignore_index=-100: F.cross_entropy(p, t, weight, reduction=reduction, ignore_index=ignore_index)
    assert_near(item_losses(loss, pred, y), by_hand(pred, y, weight, -100), n, dtype)
    if not function: assert loss.reduction==reduction

@given(st.integers(1, 5), spatial, dtypes, st.sampled_from(['mean','sum']), st.sampled_from(['mse','l1','bce','huber']), seeds)
def test_elementwise_losses(n, shape, dtype, reduction, kind, seed):
    pred,y = tensor_of((n, 2, *shape), seed, dtype),tensor_of((n, 2, *shape), seed+1, dtype)
    if kind=='bce': y = y.sigmoid()
    loss = dict(mse=nn.MSELoss, l1=nn.L1Loss, bce=nn.BCEWithLogitsLoss, huber=nn.HuberLoss)[kind](reduction=reduction)
    p,t = pred.double(),y.double()
    d = (p-t).abs()
    by_element = dict(mse=d**2, l1=d, bce=-(t*p.sigmoid().log()+(1-t)*(-p).sigmoid().log()), huber=torch.where(d<1, d**2/2, d-.5))[kind]
    assert_near(item_losses(loss, pred, y), by_element.reshape(n, -1).mean(1), n, dtype)

@given(st.integers(1, 5), spatial, st.sampled_from([torch.float32, torch.float64]), st.booleans(), seeds)
def test_losses_that_return_one_number(n, shape, dtype, traceable, seed):
    pred,y = tensor_of((n, 2, *shape), seed, dtype),tensor_of((n, 2, *shape), seed+1, dtype)
    def one_number(p, t): return ((p-t)**2).mean() if traceable or p.sum().item()<1e30 else p.sum()
    losses,way = item_losses_how(one_number, pred, y)
    assert way==('vmap' if traceable else 'loop')
    assert_near(losses, ((pred.double()-y)**2).reshape(n, -1).mean(1), n, dtype)
    torch.testing.assert_close(separable_losses(one_number, pred, y), losses)

@given(st.integers(3, 8), seeds)
def test_losses_that_mix_items_are_refused(n, seed):
    pred,y = tensor_of((n, 2), seed),tensor_of((n, 2), seed+1)
    def normalised(p, t): return ((p-t)**2).mean()/p.var()
    with pytest.raises(ValueError, match='item_loss='): separable_losses(normalised, pred, y)
