"Policies: which items, with which chance; oracles from the papers"
import math

import pytest, torch
from scipy import stats
from selback.core.item_loss import weigh_grads
from selback.core.policies import *
from selback.core.schedules import Window

def gen(seed=0): return torch.Generator().manual_seed(seed)
def ids(chosen): return chosen.rows.tolist()

LOSSES = torch.tensor([.5,.3,.15,.05])

@pytest.mark.parametrize('share,n', [(.7,2), (.8,2), (.81,3), (1.,4), (.5,1), (.01,1)])
@pytest.mark.parametrize('order', [[0,1,2,3], [3,2,1,0], [2,0,3,1]])
def test_loss_share_keeps_the_hardest_until_the_share_is_crossed(share, n, order):
    losses = LOSSES[order]
    kept = loss_share(losses, share).rows
    assert sorted(losses[kept].tolist(), reverse=True)==LOSSES[:n].tolist()
    assert kept.tolist()==sorted(kept.tolist())

@pytest.mark.law(2)
@pytest.mark.parametrize('beta', [0, 1, 2, 4])
def test_cdf_power_mean_share(beta):
    "A share of 1/(beta+1) is kept on average, within 4 sigma"
    n,generator = 200,gen(1)
    scores = torch.rand(1024, generator=gen(2))
    kept = sum(len(cdf_power(scores, scores, beta, generator).rows) for _ in range(n))/(n*1024)
    p = ((torch.arange(1024).double()+.5)/1024)**beta
    sigma = (p*(1-p)).sum().sqrt()/(1024*n**.5)
    assert abs(kept-p.mean())<=4*sigma+1e-12
    assert abs(p.mean()-1/(beta+1))<1e-3

def test_mid_rank_matches_scipy():
    history,scores = torch.randint(0, 9, (50,), generator=gen()).float(),torch.arange(-1., 10.)
    wanted = [stats.percentileofscore(history.numpy(), s, kind='mean')/100 for s in scores.tolist()]
    torch.testing.assert_close(mid_rank(scores, history).double(), torch.tensor(wanted).double(), rtol=0, atol=1e-6)
    with_gaps = torch.cat([history, torch.tensor([math.inf,float('nan')])])
    torch.testing.assert_close(mid_rank(scores, with_gaps), mid_rank(scores, history))

def test_rank_sample_is_composers_draw():
    "Without replacement, p ~ ((i+.5)/N)^(1/keep-1): inclusion rates against NumPy's `choice`"
    import numpy as np
    n,keep,draws = 16,.25,1500
    p = ((np.arange(n)+.5)/n)**(1/keep-1)
    rng,generator = np.random.default_rng(0),gen()
    wanted,got = np.zeros(n),torch.zeros(n)
    for _ in range(draws):
        wanted[rng.choice(n, int(keep*n), replace=False, p=p/p.sum())] += 1
        got[rank_sample(torch.arange(n).float(), keep, generator).rows] += 1
    rate = wanted/draws
    sigma = (np.maximum(rate*(1-rate), 1e-3)*2/draws)**.5
    assert (np.abs(wanted-got.numpy())/draws<5*sigma).all()

def test_random_k_is_uniform():
    counts,generator = torch.zeros(20),gen()
    for _ in range(2000): counts[random_k(counts, .3, generator).rows] += 1
    assert counts.sum()==2000*6
    sigma = (.3*.7/2000)**.5
    assert ((counts/2000-.3).abs()<5*sigma).all()

@pytest.mark.parametrize('call', [
    lambda: top_k(LOSSES, 0), lambda: top_k(LOSSES, 1.1), lambda: random_k(LOSSES, -1), lambda: rank_sample(LOSSES, 2),
    lambda: cdf_power(LOSSES, LOSSES, -.1), lambda: cdf_power(LOSSES, LOSSES, float('nan')),
    lambda: loss_share(LOSSES, 1.5), lambda: loss_share(LOSSES, 0, 0), lambda: loss_share(LOSSES, -.5),
    lambda: top_k(LOSSES, .5, .6), lambda: History(0),
    lambda: Window(start=.5, end=.5), lambda: Window(end=1.5), lambda: Window(start=-.1),
    lambda: Window(warmup=-1), lambda: Window(interrupt=1), lambda: Window(interrupt=-2),
    lambda: Window(interrupt=2.5), lambda: Window(warmup=.5),
    lambda: cdf_power(LOSSES, LOSSES, math.inf), lambda: top_k(LOSSES, .5, -.1), lambda: History(1.5)])
def test_numbers_out_of_range(call):
    with pytest.raises(ValueError, match='got .*wanted'): call()

@pytest.mark.law(3)
def test_weighted_gradient_is_that_of_the_weighted_loss():
    F = torch.nn.functional
    w = torch.rand(6, generator=gen())*3
    cases = [
        (torch.randn(6,3), torch.randint(0,3,(6,)), F.cross_entropy),
        (torch.randn(6,3,4,4), torch.randint(0,3,(6,4,4)), F.cross_entropy),
        (torch.randn(6,3), torch.rand(6,3).round(), F.binary_cross_entropy_with_logits),
        (torch.randn(6,2), torch.randn(6,2), F.mse_loss)]
    for x,y,f in cases:
        x = x.double().requires_grad_()
        y = y.double() if y.is_floating_point() else y
        of_items = f(x, y, reduction='none').reshape(6,-1).mean(1)
        wanted, = torch.autograd.grad((of_items*w).mean(), x)
        pred = weigh_grads(x*1, w)
        torch.testing.assert_close(torch.autograd.grad(f(pred, y), x)[0], wanted, rtol=1e-6, atol=1e-9)

@pytest.mark.parametrize('kind', ['two','same','nested'])
def test_predictions_made_from_each_other_are_weighed_once(kind):
    "Features and the logits made of them, or one tensor twice"
    F = torch.nn.functional
    w = torch.rand(6, generator=gen())*3
    x,y = torch.randn(6,4, generator=gen(1)).requires_grad_(),torch.arange(6)%3
    head = torch.randn(4,3, generator=gen(2))
    def model(x):
        features = x.tanh()
        out = features@head
        return dict(two=(features,out), same=(out,)*2, nested={'raw': [features], 'out': out})[kind]
    def losses(pred):
        features,out = (pred['raw'][0],pred['out']) if kind=='nested' else pred
        return F.cross_entropy(out, y, reduction='none')+features.square().mean(1)
    wanted, = torch.autograd.grad((losses(model(x))*w).mean(), x)
    pred = weigh_grads(model(x), w)
    torch.testing.assert_close(torch.autograd.grad(losses(pred).mean(), x)[0], wanted)
    assert type(pred) is type(model(x))

# no batch of one item
SCORES = torch.tensor([9.,1.,5.,7.])
def lists(chosen): return chosen.rows.tolist(),None if chosen.weight is None else chosen.weight.tolist()

@pytest.mark.parametrize('row,weight,wanted', [
    (0, None, ([0,3], None)), (2, None, ([0,2], None)), (3, None, ([0,3], None)),
    (0, 3., ([0,3], [6.,0.])), (2, 3., ([0,2], [0.,6.])), (3, .5, ([0,3], [0.,1.]))])
def test_a_single_item_gets_the_hardest_of_the_others_for_company(row, weight, wanted):
    chosen = Chosen(torch.tensor([row]), None if weight is None else torch.tensor([weight]))
    got = at_least_two(chosen, SCORES)
    assert lists(got)==wanted
    assert got.rows.dtype==torch.int64
    assert torch.equal(SCORES, torch.tensor([9.,1.,5.,7.])) # what it was given is as it was
    assert len(chosen.rows)==1
    if weight is not None: assert got.weight.sum()==2*weight # the mean over two is the single item's

@pytest.mark.parametrize('rows,n', [([],4), ([0,2],4), ([0,1,2,3],4), ([0],1)])
def test_other_counts_get_no_company(rows, n):
    for weight in None,torch.ones(len(rows)):
        chosen = Chosen(torch.tensor(rows, dtype=torch.int64), weight)
        assert at_least_two(chosen, SCORES[:n]) is chosen

@pytest.mark.parametrize('count,n,bs,n_ranks,drop_last,more', [
    (5,9,4,1,False,1), (4,9,4,1,False,0), (6,9,4,1,False,0), (5,9,4,1,True,0), (5,5,4,1,False,0), (8,9,7,1,False,1),
    (9,20,4,2,False,2), (10,20,4,2,False,1), (10,11,4,2,False,1), (9,10,4,2,False,1), (17,20,8,2,False,2),
    (3,9,1,1,False,0), (1,9,4,1,False,1)])
def test_one_left_over_is_joined_by_others(count, n, bs, n_ranks, drop_last, more):
    rows,joined = torch.arange(count)+(n-count),set()
    for s in range(60):
        loaded = avoid_singleton_batch(rows, n, bs, n_ranks, drop_last, gen(s)).tolist()
        assert loaded==sorted(set(loaded))
        assert set(rows.tolist())<=set(loaded)
        assert len(loaded)==count+more
        joined |= set(loaded)
    if more: assert joined==set(range(n)) # any of the others
    else: assert joined==set(rows.tolist())

def test_too_few_items_are_joined_by_others_that_are_drawn():
    single,none = torch.tensor([2]),torch.zeros(0, dtype=torch.int64)
    drawn = {tuple(avoid_singleton_batch(single, 5, 4, generator=gen(s)).tolist()) for s in range(50)}
    assert drawn=={(0,2),(1,2),(2,3),(2,4)}
    for_two_processes = avoid_singleton_batch(none, 5, 4, 2, generator=gen())
    assert len(set(for_two_processes.tolist()))==4 # two for each
    assert avoid_singleton_batch(none, 1, 4).tolist()==[0]
    assert not len(avoid_singleton_batch(none, 0, 4))
