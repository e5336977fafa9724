"SeTa: groups, windows and random shares, against the paper's rule written out by hand"
import math

import pytest, torch
from helpers import *
from selback.core.policies import loss_groups, seta

def gen(seed=0): return torch.Generator().manual_seed(seed)

def lloyd(losses, k):
    "K-means on a list, begun at the middles of k equal shares; each value goes to the nearest mean, or the lower"
    ordered,n = sorted(losses),len(losses)
    means = sorted({ordered[int((i+.5)*n/k)] for i in range(k)})
    while True:
        parts = [[] for _ in means]
        for l in ordered:
            nearest = min(range(len(means)), key=lambda g: (abs(l-means[g]), g))
            parts[nearest].append(l)
        parts = [part for part in parts if part]
        new = [math.fsum(part)/len(part) for part in parts]
        if new==means: return [next(g for g,part in enumerate(parts) if part[0]<=l<=part[-1]) for l in losses]
        means = new

LOSSES = dict(
    even=torch.rand(83, generator=gen(1)).double(),
    skewed=torch.randn(40, generator=gen(2)).exp().double(),
    ties=torch.tensor([1.]*5+[2.]*9+[7.]).double(),
    equal=torch.ones(6).double(),
    one=torch.tensor([3.]).double(),
    signs=torch.tensor([-5.,0.,4.,4.,4.,100.]).double())

@pytest.mark.parametrize('k', [1,2,5,9])
@pytest.mark.parametrize('losses', LOSSES.values(), ids=LOSSES)
def test_groups_are_those_of_k_means(losses, k): assert loss_groups(losses, k).tolist()==lloyd(losses.tolist(), k)

@pytest.mark.parametrize('n_groups,window,cycle', [(5,.9,2), (5,.5,4), (5,.2,5), (4,1.,1), (3,.01,3)])
def test_the_window_slides_from_easy_to_hard_and_begins_again(n_groups, window, cycle):
    losses = torch.tensor([i+.01*j for i in range(n_groups) for j in range(7)])
    width = n_groups-cycle+1
    for epoch in range(3*cycle):
        kept = {i//7 for i in seta(losses, epoch, 0., n_groups, window).rows.tolist()}
        assert kept==set(range(epoch%cycle, epoch%cycle+width))

def test_a_random_share_is_left_out_each_as_often():
    n,left = 2000,torch.zeros(30)
    generator = gen()
    for _ in range(n):
        rows = seta(torch.rand(30, generator=gen(1)), 0, .3, 5, 1., generator).rows
        assert len(rows)==21
        assert rows.tolist()==sorted(set(rows.tolist()))
        left += 1-torch.zeros(30).index_fill_(0, rows, 1.)
    sigma = (.3*.7/n)**.5
    assert ((left/n-.3).abs()<4*sigma).all()

def test_what_never_trained_is_as_hard_as_the_hardest():
    losses = torch.tensor([.1,math.nan,.2,5.,math.inf])
    assert seta(losses, 0, 0., 2, .5).rows.tolist()==[0,2]
    assert seta(losses, 1, 0., 2, .5).rows.tolist()==[1,3,4]
    assert seta(torch.full((4,), math.nan), 3, 0., 2, .5).rows.tolist()==[0,1,2,3]
    assert len(seta(torch.zeros(0)).rows)==0

# the callback
def later_epochs(cb, n_epoch): return trained_only(with_diary(cb, bs=16), n_epoch).diary.epochs

def test_each_epoch_loads_the_window_of_the_last_losses():
    "Where one would be left over for a batch of its own, another comes along; the last two of 16 epochs have no window"
    last = [math.nan]*100
    for e,epoch in enumerate(later_epochs(SeTaCallback(prune=0., n_groups=3, window=.7), 16)):
        groups = lloyd(last, 3) if e else [0]*100
        wanted = {i for i in range(100) if e in (0,14,15) or e%2<=groups[i]<e%2+2}
        loaded = set(items_of(epoch))
        assert len(items_of(epoch))==len(loaded)
        assert wanted<=loaded
        assert len(loaded-wanted)==(len(wanted)%16==1)
        assert all(set(weights)=={1.} for _,weights,_ in epoch)
        for batch,_,losses in epoch:
            for i,l in zip(batch, losses): last[i] = l

def test_in_the_end_chance_alone_leaves_out():
    sizes = [len(items_of(e)) for e in later_epochs(SeTaCallback(prune=.2), 16)]
    assert sizes[0]==100
    assert max(sizes[1:14])<=80
    assert min(sizes[1:14])<60
    assert sizes[14:]==[80,80]

@pytest.mark.parametrize('call', [
    lambda: SeTaCallback(prune=1.), lambda: SeTaCallback(prune=-.1),
    lambda: SeTaCallback(n_groups=0), lambda: SeTaCallback(n_groups=2.5),
    lambda: SeTaCallback(window=0.), lambda: SeTaCallback(window=1.1), lambda: SeTaCallback(delta=2),
    lambda: seta(torch.ones(3), prune=1.), lambda: seta(torch.ones(3), window=0.),
    lambda: loss_groups(torch.ones(3), 0)])
def test_settings_are_checked(call):
    with pytest.raises(ValueError): call()
