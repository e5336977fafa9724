"Policies: which items, with which chance; oracles from the papers"
import math

import pytest, torch
from helpers import prune_easy
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

def test_loss_share_of_one_keeps_all_of_heavy_tailed_batches():
    generator = gen()
    for _ in range(500): assert len(loss_share((torch.randn(64, generator=generator)*3).exp(), 1.).rows)==64

BAD_LOSSES = [
    torch.zeros(6), torch.tensor([1.,float('nan'),2,3,4,5]), torch.tensor([1.,math.inf,2,3,4,5]), -torch.ones(6)]

@pytest.mark.parametrize('losses', BAD_LOSSES)
def test_loss_share_keeps_whole_a_batch_that_has_no_shares(losses): assert ids(loss_share(losses))==[0,1,2,3,4,5]

def test_loss_share_floor_and_rounding():
    losses = torch.tensor([100.]+[1.]*19)
    assert len(loss_share(losses, .5).rows)==1
    assert len(loss_share(losses, .5, min_sample_perc=.3).rows)==6
    assert len(loss_share(losses, 0, min_sample_perc=.31).rows)==7
    assert len(loss_share(losses, 0, min_sample_perc=.07).rows)==2
    assert [len(loss_share(losses, .5, m, multiple_of=8).rows) for m in (0, .5, .9)]==[8,16,18]
    assert 0 in ids(loss_share(losses, .5, multiple_of=8))

def test_loss_share_is_monotone_in_the_share():
    losses = torch.rand(64, generator=gen()).exp()
    counts = [len(loss_share(losses, p/20).rows) for p in range(1, 21)]
    assert counts==sorted(counts)
    assert counts[-1]==64

@pytest.mark.parametrize('beta', [.5, 1., 2., 4.])
def test_cdf_power_probabilities(beta):
    "History 0..1023 in any order: the loss k has P = ((k+.5)/1024)^beta"
    history = torch.randperm(1024, generator=gen()).float()
    k = torch.arange(1024).float()
    wanted = ((k.double()+.5)/1024)**beta
    torch.testing.assert_close(mid_rank(k, history).double()**beta, wanted, rtol=0, atol=1e-6)

    n,draws = 400,torch.zeros(1024)
    for s in range(n): draws[cdf_power(k, history, beta, gen(s)).rows] += 1
    p = ((k+.5)/1024)**beta
    sigma = (p*(1-p)/n).sqrt()
    assert ((draws/n-p).abs()<=5*sigma+1e-3).all()

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

def test_cdf_power_of_equal_losses_is_one_half_to_beta():
    n_draws,generator = 200,gen()
    counts = [len(cdf_power(torch.ones(64), torch.ones(1024), 2., generator).rows) for _ in range(n_draws)]
    n_items = 64*n_draws
    assert abs(sum(counts)/n_items-.25)<4*(.25*.75/n_items)**.5

def test_cdf_power_keeps_whole_a_batch_with_bad_losses():
    scores = torch.rand(32, generator=gen())
    for bad in (float('nan'), math.inf):
        with_bad = torch.cat([scores, torch.tensor([bad])])
        assert len(cdf_power(with_bad, scores, 9.).rows)==33

def test_mid_rank_matches_scipy():
    history,scores = torch.randint(0, 9, (50,), generator=gen()).float(),torch.arange(-1., 10.)
    wanted = [stats.percentileofscore(history.numpy(), s, kind='mean')/100 for s in scores.tolist()]
    torch.testing.assert_close(mid_rank(scores, history).double(), torch.tensor(wanted).double(), rtol=0, atol=1e-6)
    with_gaps = torch.cat([history, torch.tensor([math.inf,float('nan')])])
    torch.testing.assert_close(mid_rank(scores, with_gaps), mid_rank(scores, history))

def test_history_is_a_ring_of_the_last_scores():
    history,seen = History(10),[]
    for n in (3,4,0,5,12,2,10,1):
        new = torch.rand(n, generator=gen(n))
        seen += new.tolist()
        values = history.push(new)
        assert sorted(v for v in values.tolist() if v<math.inf)==sorted(seen[-10:])
    assert history.push(torch.tensor([float('nan')])).isfinite().sum()==9

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

def test_rank_sample_counts():
    assert ids(rank_sample(torch.rand(9), 1.))==list(range(9))
    assert [len(rank_sample(torch.rand(n), .5).rows) for n in (1,3,64)]==[1,1,32]
    assert len(rank_sample(torch.rand(1000), .01).rows)==10

def test_top_k_keeps_the_highest():
    scores = torch.rand(40, generator=gen())
    assert ids(top_k(scores, .25))==sorted(scores.argsort(descending=True)[:10].tolist())
    for bad in (float('nan'), math.inf, -math.inf): assert 3 in ids(top_k(torch.tensor([1.,9.,2.,bad]), .25))

def test_random_k_is_uniform():
    counts,generator = torch.zeros(20),gen()
    for _ in range(2000): counts[random_k(counts, .3, generator).rows] += 1
    assert counts.sum()==2000*6
    sigma = (.3*.7/2000)**.5
    assert ((counts/2000-.3).abs()<5*sigma).all()

def test_top_k_counts():
    scores = torch.rand(40, generator=gen())
    assert len(top_k(scores, .29).rows)==11
    assert len(top_k(torch.rand(100), .29).rows)==29
    assert len(top_k(scores, .1, multiple_of=8).rows)==8
    assert len(top_k(scores[:5], .5, multiple_of=8).rows)==2 # else nothing would be left out

def test_every_policy_returns_sorted_rows_without_repeats():
    scores = torch.rand(33, generator=gen())
    for chosen in (
        loss_share(scores),
        cdf_power(scores, scores, 1.),
        rank_sample(scores, .4),
        top_k(scores, .4),
        random_k(scores, .4)):
        assert chosen.rows.dtype==torch.int64
        assert chosen.weight is None
        assert ids(chosen)==sorted(set(ids(chosen)))
        assert 0<=min(ids(chosen))
        assert max(ids(chosen))<33

def test_same_generator_same_draw():
    scores = torch.rand(64)
    for draw in (
        lambda generator: cdf_power(scores, scores, 1., generator),
        lambda generator: rank_sample(scores, .5, generator),
        lambda generator: random_k(scores, .5, generator)):
        assert ids(draw(gen(5)))==ids(draw(gen(5)))
        assert ids(draw(gen(5)))!=ids(draw(gen(6)))

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

def test_window_table():
    def on(window): return [window.is_on(.6, epochs=1, batch=b) for b in range(6)]
    assert on(Window(interrupt=0))==[True]*6
    assert on(Window(interrupt=2))==[True,False]*3
    assert on(Window(interrupt=3))==[True,True,False]*2
    window = Window(start=.5, end=.9, warmup=0)
    assert [window.is_on(pct) for pct in (.49,.5,.89,.9,1.)]==[False,True,True,False,False]
    assert Window(warmup=0).is_on(1.0000001)

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

# pruning
@pytest.mark.parametrize('prune,n_easy', [
    (.5,0), (.5,2), (.5,64), (.75,64), (.25,400), (.9,10), (.7,10), (0.,33), (.3,1000)])
def test_a_whole_number_of_easy_items_is_kept_exactly(prune, n_easy):
    "With all others, each time another part of them"
    n = n_easy+77
    order = torch.randperm(n, generator=gen(1))
    scores = torch.cat([torch.rand(n_easy, generator=gen())*.1, torch.ones(77)])[order]
    easy = scores<.5
    chosen = [prune_easy(scores, prune, gen(s)) for s in range(5)]
    for c in chosen:
        kept = torch.zeros(n, dtype=torch.bool).index_fill_(0, c.rows, True)
        assert kept[~easy].all()
        assert kept[easy].sum()==round((1-prune)*n_easy)==len(c.rows)-77
        assert torch.equal(c.weight, torch.where(easy, 1/(1-prune), 1.)[c.rows])
    n_different = len(set(map(str, map(ids, chosen))))
    assert n_different>(1 if prune and n_easy else 0)

@pytest.mark.parametrize('n_easy,prune', [(9,.9), (1,.5), (3,.5), (7,.3), (10,.85), (1,.99)])
@pytest.mark.parametrize('unknown', [pytest.param(0, marks=pytest.mark.slow), 5])
def test_the_rounding_of_a_share_is_right_on_average(n_easy, prune, unknown):
    "The number of easy items that are kept, the sum of the weights, and each item's chance, within 5 sigma"
    scores = torch.cat([torch.full((unknown,), math.nan), torch.ones(20), torch.arange(n_easy)/100])
    n_others,share,draws = unknown+20,1-prune,1200
    kept,sums,generator = torch.zeros(len(scores)),[],gen(n_easy)
    for _ in range(draws):
        chosen = prune_easy(scores, prune, generator)
        kept[chosen.rows] += 1
        sums.append(chosen.weight.sum().double())
        assert len(chosen.rows)-n_others in (math.floor(share*n_easy), math.ceil(share*n_easy))
    assert (kept[:n_others]==draws).all()

    sums,p = torch.stack(sums),kept[n_others:]/draws
    assert abs(sums.mean()-len(scores))<5*sums.std()/draws**.5+1e-9
    assert ((p-share).abs()<5*(share*prune/draws)**.5).all() # alike for all of them

    fresh,used = gen(3),gen(3)
    prune_easy(scores, prune, used)
    torch.rand(len(scores), generator=fresh)
    assert torch.equal(fresh.get_state(), used.get_state()) # no draw more than one for each item

@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_equal_losses_are_not_easy(dtype):
    for n in (3,7,10,1000): assert ids(prune_easy(torch.full((n,), .1, dtype=dtype), .5, gen()))==list(range(n))

@pytest.mark.parametrize('scores', [torch.zeros(0), torch.full((3,), math.nan), torch.tensor([math.inf,math.nan])])
def test_nothing_known_nothing_pruned(scores): assert ids(prune_easy(scores, .5, gen()))==list(range(len(scores)))

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

@pytest.mark.parametrize('bad', [float('nan'), math.inf, -math.inf])
def test_company_with_a_score_that_is_not_finite_ranks_highest(bad):
    scores = torch.tensor([9.,1.,bad,7.])
    assert lists(at_least_two(Chosen(torch.tensor([0])), scores))==([0,2], None)
    assert lists(at_least_two(Chosen(torch.tensor([2])), scores))==([0,2], None)

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

def by_search(losses):
    "The mid-rank by its definition"
    less,up_to = (losses[:,None]>losses).sum(1),(losses[:,None]>=losses).sum(1)
    return (less+up_to)/(2*len(losses))

@pytest.mark.parametrize('losses', [
    torch.tensor([0., -0., 1., -1., 0., -0.]),
    torch.tensor([-1e38, 1e38, -1e-42, 1e-42, 0.]),
    torch.tensor([2.]),
    torch.full((9,), -3.),
    torch.randn(2000, generator=torch.Generator().manual_seed(0)).round(decimals=1),
    torch.rand(2000, generator=torch.Generator().manual_seed(0))], ids=lambda losses: str(len(losses)))
def test_ranks_among_the_losses_themselves_are_those_by_definition(losses):
    assert torch.equal(mid_rank(losses, losses), by_search(losses))
    assert torch.equal(mid_rank(losses, losses), mid_rank(losses, losses.clone()))
    assert torch.equal(mid_rank(losses.double(), losses.double()), by_search(losses))

def test_a_draw_in_order_finds_what_each_search_finds():
    loss = torch.rand(3000, generator=gen())
    rows = prioritized_epoch(loss, uniform=0., generator=gen(1)).rows
    sums = priorities(loss).cumsum(0)
    at = torch.rand(3000, generator=gen(1), dtype=torch.float64)*sums[-1]
    assert torch.equal(rows, torch.searchsorted(sums, at, right=True).clamp(max=2999))
