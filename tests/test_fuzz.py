"Properties that hold for any losses, shapes, dtypes, shares and schedules, against float64 computations by hand"
import math, os

import pytest, torch
from helpers import prune_easy
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from selback.functional import *

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

# the losses of items
tolerance = {torch.float32: 1e-5, torch.float64: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}
