"Who is first at many targets, and what plain training needs to be as good"
import numpy as np, pandas as pd, pytest
from studies.figures import cost_to_targets, on_ladder, pareto_share, times_less

def made(method, items, error, seed=0):
    epochs = [*range(1, len(items)+1)]
    return pd.DataFrame(dict(method=method, seed=seed, epoch=epochs, seconds=items, backpropagated=items, error=error))

SLOW = made('slow', [10,20,30], [.5,.3,.1])
FAST = made('fast', [4,8,12], [.45,.4,.35])

def test_costs_are_those_of_the_first_epoch_that_is_as_good():
    worse_later = made('up', [1,2,3,4], [.6,.2,.4,.15])
    costs = cost_to_targets(pd.concat([SLOW, worse_later]), targets=[.5,.3,.16,.05])
    assert costs.slow.tolist()[:3]==[10,20,30]
    assert costs.up.tolist()[:3]==[2,2,4]
    assert costs.loc[.05].isna().all()

def test_times_less_are_geometric_means_over_the_seeds_that_both_ran():
    "The target is a multiple of plain training's best, on its way or not; a seed that misses it is a gap"
    plain = [made('none', [8,16], [.10,.20], s) for s in (0,1)]
    fewer = [made('fewer', [2,4], [.50,.12], 0), made('fewer', [1,2], [.50,.11], 1), made('fewer', [1], [.1], 7)]
    missed = [made('missed', [4], [.12]), made('missed', [4], [.13], 1)]
    found = times_less(pd.concat([*plain, *fewer, *missed]), 'seconds')
    assert found['none']==1
    assert found['fewer']==pytest.approx((2*4)**.5)
    assert np.isnan(found['missed'])
    assert times_less(pd.concat([*plain, *fewer]), 'backpropagated', factor=6.)['fewer']==pytest.approx((4*8)**.5)

def test_a_method_that_misses_a_target_with_one_seed_misses_it():
    runs = pd.concat([FAST, made('fast', [6,9], [.45,.41], seed=1), SLOW])
    costs = cost_to_targets(runs, targets=[.45,.4])
    assert costs.fast.iloc[0]==5
    assert np.isnan(costs.fast.iloc[1])
    assert costs.slow.tolist()==[20,20]

def test_shares_of_the_front():
    runs = pd.concat([SLOW, FAST])
    shares = pareto_share(runs, targets=[.5,.4,.3,.1])
    assert shares['first'].to_dict()==dict(slow=.5, fast=.5)
    assert shares.misses.to_dict()==dict(slow=0, fast=.5)

    nearly = pareto_share(runs, targets=[.5,.4], within=1.5)
    assert nearly['first'].to_dict()==dict(slow=1., fast=1.)

    twin = pd.concat([SLOW, SLOW.assign(method='twin')])
    assert (pareto_share(twin)['first']==1).all() # as good for as much: both

    many = pareto_share(runs, targets=21)['first'] # evenly from .5 to .1
    assert many.sum()==pytest.approx(1)
    assert many['fast']==pytest.approx(8/21)

    with pytest.raises(ValueError, match='no method reaches'): pareto_share(runs, targets=[.01])
    with pytest.raises(ValueError, match='targets: got 0'): pareto_share(runs, targets=0)

def test_a_ladder_tells_what_plain_training_needs():
    "By the logarithm of its cost; at most the highest rung's, and nothing below the lowest"
    ladder = pd.DataFrame(dict(seed=0, compute=[100.,200.,400.], error=[.4,.3,.2]))
    ends = pd.DataFrame(dict(seed=0, compute=[100.,200.,50.], error=[.35,.1,.9]))
    found = on_ladder(ends, ladder)
    assert found['times less'].tolist()[:2]==pytest.approx([2**.5,2.])
    assert np.isnan(found['times less'].iloc[2])
    assert found['difference'].tolist()[:2]==pytest.approx([-.05,-.2])
