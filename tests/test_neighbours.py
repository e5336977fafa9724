"Rows of numbers, their nearest neighbours, how near a copy is, and groups"
import pytest, torch
from helpers import *
from selback.core.neighbours import (codes_as_numbers, equal_by_chance, expected_below, groups_of, likely_pairs,
    narrowed, nearest, pooled, unit, waves, whitened)

def noise(*shape, seed=0): return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

def pairs_of(x, k=8):
    "All pairs of rows, the likeliest copies first"
    rows = torch.arange(len(x))
    return likely_pairs(*nearest(unit(x), unit(x), k, rows), rows)

def couples(pairs): return [(min(a, b), max(a, b)) for a,b in zip(pairs.row, pairs.other)]

# Vectors
def test_maps_are_pooled_by_hand_and_light_that_is_the_same_all_over_counts_for_nothing():
    maps = torch.arange(64.).view(1, 1, 8, 8)
    cells = maps[0,0].view(4, 2, 4, 2).mean((1,3))
    torch.testing.assert_close(pooled(maps)[0], (cells-cells.mean()).flatten())
    torch.testing.assert_close(pooled(maps+3), pooled(maps), rtol=1e-4, atol=1e-5)

def test_whitened_rows_vary_alike_and_not_together():
    x = noise(4000, 5)@noise(5, 5, seed=1)+3
    made = whitened(x).float()
    torch.testing.assert_close(made.T@made/len(made), torch.eye(5), rtol=0, atol=.02)

@pytest.mark.parametrize('n, wanted', [(40,8), (160,20), (9000,64)])
def test_few_items_have_few_directions(n, wanted): assert whitened(noise(n, 64)).shape==(n,wanted)

def test_fewer_numbers_keep_distances():
    x = noise(30, 5000)
    torch.testing.assert_close(torch.cdist(narrowed(x), narrowed(x)), torch.cdist(x, x), rtol=.12, atol=1.)
    assert narrowed(x).equal(narrowed(x)) # the same for each batch

def test_products_of_waves_fall_as_a_bell_curve_does():
    x = noise(20, 6)
    made = waves(x, 6, 40_000)
    torch.testing.assert_close(made@made.T, (-2*torch.cdist(x, x)**2/6).exp(), rtol=0, atol=.04)

def test_categories_that_differ_are_about_as_far_apart_as_numbers():
    made = codes_as_numbers(torch.tensor([[1,2],[1,2],[1,3]]), 500)
    assert made[0].equal(made[1])
    assert float(((made[0]-made[2])**2).sum())==pytest.approx(2, abs=.3)

# Neighbours
def exact(x): return torch.nn.functional.normalize(x.float(), dim=1)

@pytest.mark.parametrize('block', [1, 7, 500])
@pytest.mark.parametrize('k', [1, 4, 80])
def test_blocks_find_what_the_whole_matrix_has(block, k):
    "And mirror images, of which the nearer counts; there are no more neighbours than other items"
    x,turned = unit(noise(50, 8)),unit(noise(50, 8, seed=1))
    every = exact(x)@exact(x).T
    for mirrored,seen in ((None, every), (turned, every.maximum(exact(turned)@exact(x).T))):
        similar,at = nearest(x, x, k, torch.arange(50), block, mirrored=mirrored)
        wanted = seen.clone().fill_diagonal_(-9).topk(min(k, 49), 1)
        torch.testing.assert_close(similar, wanted.values)
        assert at.equal(wanted.indices)

def test_among_others_an_item_may_be_its_own_neighbour():
    x = unit(noise(90, 8))
    similar,at = nearest(x[:10], x, 5, block=5) # neighbours come in blocks of 20
    assert at.equal((exact(x[:10])@exact(x).T).topk(5, 1).indices)
    assert at[:,0].tolist()==[*range(10)]

# Copies
def test_exact_duplicates_come_first_and_once():
    x = noise(400, 16)
    pairs = pairs_of(torch.cat([x, x[:3], x[10:12]+.3*noise(2, 16, seed=1)]))
    found = couples(pairs)
    assert {*found[:3]}=={(0,400),(1,401),(2,402)} and {*found[3:5]}=={(10,403),(11,404)}
    assert (pairs.similarity[:3]==1).all() and (pairs.similarity[3:5]<1).all()
    assert len(found)==len({*found})
    assert pairs.ratio.is_monotonic_increasing

def test_a_near_pair_among_many_alike_is_no_copy_and_a_farther_one_among_lonely_items_is():
    "Distances count by what else is near"
    crowd = exact(torch.ones(1, 16)+.05*noise(300, 16))
    lonely = noise(300, 16, seed=1)
    pairs = pairs_of(torch.cat([crowd, lonely, lonely[:1]+.25*noise(1, 16, seed=2)]))
    assert couples(pairs)[0]==(300,600)
    assert pairs.similarity[[b<300 for _,b in couples(pairs)]].max()>pairs.similarity[0]

@pytest.mark.parametrize('features, scale', [(16,.2), (64,.3)])
@pytest.mark.parametrize('n_copies', [0, 30, 300])
def test_as_many_pairs_are_likely_as_were_planted(features, scale, n_copies):
    x = noise(1500, features)
    pairs = pairs_of(torch.cat([x, x[:n_copies]+scale*noise(n_copies, features, seed=1)]))
    assert .9*n_copies<=pairs.is_likely.sum()<=1.15*n_copies+5
    assert all(b-a==1500 for a,b in couples(pairs)[:int(.9*n_copies)])

@pytest.mark.parametrize('features', [4, 16])
def test_small_sets_without_copies_seldom_have_likely_ones(features):
    assert sum(pairs_of(noise(60, features, seed=seed)).is_likely.any() for seed in range(40))<=4

def test_rows_that_are_equal_by_chance_are_not_likely():
    "Of independent columns with three values each"
    x = torch.randint(3, (300,3), generator=torch.Generator().manual_seed(0)).float()
    n_equal = sum(int((x[i]==x[:i]).all(1).sum()) for i in range(300))
    assert equal_by_chance(x)==pytest.approx(n_equal, rel=.1)
    assert equal_by_chance(torch.cat([x, torch.ones(300, 1)], 1))==equal_by_chance(x)
    rows = torch.arange(300)
    near = nearest(unit(x+.1), unit(x+.1), 8, rows)
    assert likely_pairs(*near, rows).is_likely.sum()>500
    assert not likely_pairs(*near, rows, 2*equal_by_chance(x)).is_likely.any()

def test_rows_that_were_entered_twice_are_not_equal_by_chance():
    fine = torch.rand(200, 4, generator=torch.Generator().manual_seed(0))
    assert equal_by_chance(torch.cat([fine, fine[:50]]))==0

def test_classes_of_their_own_density_are_no_copies():
    "Digits: some classes are far more alike than others"
    widths = torch.linspace(.2, 1, 10)
    x = [centre+width*noise(150, 12, seed=i) for i,(centre,width) in enumerate(zip(2*noise(10, 12), widths))]
    assert pairs_of(torch.cat(x)).is_likely.sum()<15

def test_across_two_sets_each_pair_is_there_once():
    x = unit(noise(60, 8))
    pairs = likely_pairs(*nearest(x[40:], x[:40], 4), torch.arange(40, 60))
    assert pairs.row.between(40, 59).all() and pairs.other.between(0, 39).all()
    assert len(pairs)==len(pairs[['row','other']].drop_duplicates())==20*3

def test_two_items_are_a_pair_and_too_few_to_tell():
    pairs = pairs_of(torch.tensor([[1.,0.],[1.,.1]]))
    assert couples(pairs)==[(0,1)] and not pairs.is_likely.any()

def test_expected_counts_of_items_that_lie_evenly():
    "Ratios to the power of the dimension are even, so that as many are expected below each as there are"
    ratios = (torch.rand(20_000, generator=torch.Generator().manual_seed(0))**.2).sort().values
    below = expected_below(ratios)
    for n in (400,2000,6000): assert float(below[n])==pytest.approx(n, rel=.08, abs=20)

@pytest.mark.parametrize('dim', [3,6,16])
def test_equal_items_make_other_pairs_no_likelier(dim):
    "Ten of eighty are there twice; of the others a few in all may be near by luck"
    n_false = 0
    for seed in range(20):
        x = noise(80, dim, seed=seed)
        likely = couples(pairs_of(torch.cat([x, x[:10]])).query('is_likely'))
        equal = {(i, i+80) for i in range(10)}
        assert equal<={*likely}
        n_false += len(likely)-10
    assert n_false<=5

# Groups
def test_groups_by_hand():
    "Numbered by their first items; of a long chain and of pairs that are named twice, too"
    assert groups_of([], 3).tolist()==[0,1,2]
    assert groups_of([(2,1),(0,2),(4,3)], 6).tolist()==[0,0,0,1,1,2]
    assert not groups_of([(i, i+1) for i in range(99)][::-1], 100).any()
    assert groups_of([(1,1),(1,2),(2,1)], 3).tolist()==[0,1,1]
