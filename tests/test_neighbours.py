"Rows of numbers, their nearest neighbours, how near a copy is, and groups"
import pytest, torch
from helpers import *
from selback.core.neighbours import (bag_of_pieces, expected_below, groups_of, likely_pairs, merged, narrowed, nearest,
    pieces, pooled, unit, whitened)

def noise(*shape, seed=0): return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

def pairs_of(x, k=8):
    "All pairs of rows, the likeliest copies first"
    rows = torch.arange(len(x))
    return likely_pairs(*nearest(unit(x), unit(x), k, rows), rows)

def couples(pairs, n=None): return [{a, b} for a,b in zip(pairs.row[:n].tolist(), pairs.other[:n].tolist())]

# Vectors
def test_maps_are_pooled_by_hand():
    maps = torch.arange(64.).view(1, 1, 8, 8)
    cells = maps[0,0].view(4, 2, 4, 2).mean((1,3))
    torch.testing.assert_close(pooled(maps)[0], (cells-cells.mean()).flatten())

def test_light_that_is_the_same_all_over_counts_for_nothing():
    maps = torch.rand(3, 5, 6, 6)
    torch.testing.assert_close(pooled(maps+torch.rand(3, 5, 1, 1)), pooled(maps), rtol=1e-4, atol=1e-5)

def test_whitened_rows_vary_alike_and_not_together():
    x = noise(4000, 5)@noise(5, 5, seed=1)+3
    made = whitened(x).float()
    assert made.shape==(4000,5)
    torch.testing.assert_close(made.T@made/len(made), torch.eye(5), rtol=0, atol=.02)

@pytest.mark.parametrize('n, wanted', [(40,8), (160,20), (9000,64)])
def test_few_items_have_few_directions(n, wanted): assert whitened(noise(n, 64)).shape==(n,wanted)

def test_rows_have_length_one_and_the_mean_too():
    x = unit(torch.cat([noise(4, 6), torch.zeros(2, 6)])).float()
    torch.testing.assert_close(x.norm(dim=1), torch.ones(6), rtol=0, atol=1e-3)
    assert x[4].equal(x[5])

def test_fewer_numbers_keep_distances():
    x = noise(30, 5000)
    torch.testing.assert_close(torch.cdist(narrowed(x), narrowed(x)), torch.cdist(x, x), rtol=.12, atol=1.)
    assert narrowed(x[:,:100]) is not None and narrowed(x[:,:100]).shape==(30,100)
    assert narrowed(x).equal(narrowed(x)) # the same for each batch

def test_texts_agree_in_what_they_share():
    a,b = torch.arange(100),torch.arange(200, 300)
    half = torch.cat([a[:50], b[50:]])
    near = unit(bag_of_pieces([a, half, b, a.flip(0)], 2000)).float()
    near = near@near[0]
    assert near[1]==pytest.approx(48/98, abs=.08)
    assert near[2:].abs().max()<.1 # the same words the other way round are another text

@pytest.mark.parametrize('n', [0, 1, 2, 3, 5])
def test_short_texts_have_a_piece(n): assert len(pieces(torch.arange(n)))==max(1, n-2)

# Neighbours
def exact(x): return torch.nn.functional.normalize(x.float(), dim=1)

@pytest.mark.parametrize('block', [1, 7, 50, 500])
@pytest.mark.parametrize('k', [1, 4, 49])
def test_blocks_find_what_the_whole_matrix_has(block, k):
    x = unit(noise(50, 8))
    every = (exact(x)@exact(x).T).fill_diagonal_(-9)
    similar,at = nearest(x, x, k, torch.arange(50), block)
    wanted = every.topk(k, 1)
    torch.testing.assert_close(similar, wanted.values)
    assert at.equal(wanted.indices)

def test_more_items_than_a_block_of_neighbours():
    x = unit(noise(90, 8))
    similar,at = nearest(x[:10], x, 5, block=5) # neighbours come in blocks of 20
    wanted = (exact(x[:10])@exact(x).T).topk(5, 1)
    assert at.equal(wanted.indices)
    assert at[:,0].tolist()==list(range(10)) # without `own`, an item is its own neighbour

def test_there_are_no_more_neighbours_than_items():
    x = unit(noise(4, 8))
    similar,at = nearest(x, x, 8, torch.arange(4))
    assert at.shape==(4,3) and similar.isfinite().all()

def test_what_is_among_both_counts_once():
    first,second = (torch.tensor([[.9,.5]]),torch.tensor([[3,4]])),(torch.tensor([[.95,.7]]),torch.tensor([[3,7]]))
    similar,at = merged(first, second)
    assert at.tolist()==[[3,7]]
    torch.testing.assert_close(similar, torch.tensor([[.95,.7]]))

# Copies
def test_exact_duplicates_come_first_and_once():
    x = noise(400, 16)
    pairs = pairs_of(torch.cat([x, x[:3], x[10:12]+.3*noise(2, 16, seed=1)]))
    assert sorted(map(sorted, couples(pairs, 3)))==[[0,400],[1,401],[2,402]]
    assert pairs.similarity[:3].tolist()==[1.]*3
    assert sorted(map(sorted, couples(pairs, 5)[3:]))==[[10,403],[11,404]]
    assert (pairs.similarity[3:5]<1).all()
    every = couples(pairs)
    assert len(every)==len({*map(frozenset, every)})
    assert (pairs.ratio.diff()>=0).all()

def test_a_near_pair_among_many_alike_is_no_copy_and_a_farther_one_among_lonely_items_is():
    "Distances count by what else is near"
    crowd = torch.nn.functional.normalize(torch.ones(1, 16)+.05*noise(300, 16), dim=1)
    lonely = noise(300, 16, seed=1)
    x = torch.cat([crowd, lonely, lonely[:1]+.25*noise(1, 16, seed=2)])
    pairs = pairs_of(x)
    assert couples(pairs, 1)==[{300, 600}]
    among_crowd = [similarity for (a, b),similarity in zip(map(sorted, couples(pairs)), pairs.similarity) if b<300]
    assert max(among_crowd)>pairs.similarity[0]

@pytest.mark.parametrize('features, scale', [(16,.2), (64,.3)])
@pytest.mark.parametrize('n_copies', [0, 30, 300])
def test_as_many_pairs_are_likely_as_were_planted(features, scale, n_copies):
    x = noise(1500, features)
    pairs = pairs_of(torch.cat([x, x[:n_copies]+scale*noise(n_copies, features, seed=1)]))
    assert .9*n_copies<=pairs.n_likely<=1.15*n_copies+5
    assert all(max(o)-min(o)==1500 for o in couples(pairs, int(.9*n_copies)))

@pytest.mark.parametrize('features', [4, 16])
def test_small_sets_without_copies_seldom_have_likely_ones(features):
    assert sum(pairs_of(noise(60, features, seed=seed)).n_likely>0 for seed in range(40))<=4

def test_classes_of_their_own_density_are_no_copies():
    "Digits: some classes are far more alike than others"
    centres = 2*noise(10, 12)
    widths = torch.linspace(.2, 1, 10)
    x = torch.cat([centre+width*noise(150, 12, seed=i) for i,(centre,width) in enumerate(zip(centres, widths))])
    assert pairs_of(x).n_likely<15

def test_a_burst_belongs_together():
    x = noise(500, 16)
    burst = x[:1]+.05*noise(5, 16, seed=1)
    pairs = pairs_of(torch.cat([x, burst]))
    likely = [tuple(o) for o in couples(pairs, pairs.n_likely)]
    group = groups_of(likely, 505)
    assert len({group[i] for i in (0,*range(500, 505))})==1
    assert 15<=pairs.n_likely<20

def test_across_two_sets_each_pair_is_there_once():
    x = unit(noise(60, 8))
    rows = torch.arange(40, 60)
    similar,at = nearest(x[40:], x[:40], 4)
    pairs = likely_pairs(similar, at, rows)
    assert {*pairs.row.tolist()}<={*range(40, 60)} and {*pairs.other.tolist()}<={*range(40)}
    assert len(pairs.row)==20*3

def test_two_items_are_a_pair():
    pairs = pairs_of(torch.tensor([[1.,0.],[1.,.1]]))
    assert couples(pairs)==[{0,1}] and pairs.n_likely==0 # too few to tell

def test_expected_counts_of_items_that_lie_evenly():
    "Ratios to the power of the dimension are even, so that a share of t lies below t^(1/5)"
    ratios = torch.rand(20_000, generator=torch.Generator().manual_seed(0))**.2
    wanted = torch.tensor([.02,.1,.3])
    torch.testing.assert_close(expected_below(ratios)(wanted**.2), 20_000*wanted.double(), rtol=.08, atol=20)

# Groups
def test_groups_by_hand():
    assert groups_of([], 3)==[0,1,2]
    assert groups_of([(2,1),(0,2),(4,3)], 6)==[0,0,0,3,3,5]
    chain = [(i, i+1) for i in range(99)]
    assert groups_of(chain[::-1], 100)==[0]*100
    assert groups_of([(1,1),(1,2),(2,1)], 3)==[0,1,1]
