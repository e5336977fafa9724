"The sampler for a plain PyTorch loop: which items are loaded, in which order, with which weights"
import random

import numpy as np, pytest, torch
from helpers import quiet_fit, table_learner
from selback.core.policies import Draws
from selback.core.functional import *
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

N = 200

def gen(seed=0): return torch.Generator().manual_seed(seed)
def known(n=N):
    "A memory of the losses 0 to n-1, shuffled, after an epoch"
    memory = ItemMemory(n)
    memory.note(torch.arange(n), torch.randperm(n, generator=gen(9)).float(), picked=True)
    memory.next_epoch()
    return memory

KEEP_ALL = [dict(policy='include', inclusion=lambda loss: rank_inclusion(loss, 0.)), dict(policy='include', inclusion=lambda loss: step_inclusion(loss, drop=0.), correct=1.),
    dict(policy='prune_easy', prune=0.), dict(policy='prioritized_epoch', uniform=1.), dict(policy='random_k', keep=1.), dict(policy='top_k', keep=1.)]
CHOOSE = [dict(policy='include', inclusion=rank_inclusion), dict(policy=include, inclusion=mean_inclusion, correct=.5), dict(policy='prune_easy'),
    dict(policy='prioritized_epoch'), dict(policy='prioritized', n=77), dict(policy='random_k', keep=.3), dict(policy='top_k', keep=.25),
    dict(policy=lambda loss: top_k(loss, .5)), dict(policy=lambda loss: Chosen((torch.rand(len(loss))<.5).nonzero()[:,0]))]
def name(o): return '-'.join(str(getattr(v, '__name__', v)).strip('<>') for v in o.values())
keep_all,choose = (pytest.mark.parametrize('kwargs', o, ids=name) for o in (KEEP_ALL, CHOOSE))
given = pytest.mark.parametrize('given', [True, False], ids=['generator', 'global'])

# the order
@choose
@given
def test_without_losses_an_epoch_is_that_of_a_plain_loader(kwargs, given):
    def epochs(sampler): torch.manual_seed(3); return [list(sampler) for _ in range(3)]
    sampler = MemorySampler(ItemMemory(N), generator=gen() if given else None, **kwargs)
    assert epochs(sampler)==epochs(RandomSampler(range(N), generator=gen() if given else None)) and sampler.weight is None and len(sampler)==N

@keep_all
@given
def test_training_on_everything_is_bit_equal_to_plain_training(kwargs, given):
    x,y = torch.randn(50, 4, generator=gen()),torch.randint(0, 3, (50,), generator=gen())
    def train(chosen):
        torch.manual_seed(1)
        model,memory,generator = nn.Sequential(nn.Linear(4, 8), nn.Dropout(.3), nn.Linear(8, 3)),ItemMemory(50),gen() if given else None
        sampler = MemorySampler(memory, generator=generator, **kwargs) if chosen else RandomSampler(x, generator=generator)
        opt,log = torch.optim.SGD(model.parameters(), lr=.1),[]
        for _ in range(4):
            for idx,xb,yb in DataLoader(TensorDataset(torch.arange(50), x, y), batch_size=8, sampler=sampler):
                losses = F.cross_entropy(model(xb), yb, reduction='none')
                memory.note(idx, losses, picked=True)
                (losses*sampler.weight[idx] if chosen and sampler.weight is not None else losses).mean().backward()
                opt.step()
                opt.zero_grad()
                log.append((idx, losses.detach()))
            memory.next_epoch()
        return [*sum(log, ()),*model.parameters()]
    assert all(a.equal(b) for a,b in zip(train(True), train(False), strict=True))

def test_chosen_items_are_in_the_order_of_the_whole_epoch():
    memory = known()
    whole,idx = list(RandomSampler(range(N), generator=gen(5))),list(MemorySampler(memory, 'top_k', gen(5), keep=.5))
    hardest = set(memory.loss.topk(N//2).indices.tolist())
    assert idx==[i for i in whole if i in hardest]

# which items
@pytest.mark.parametrize('inclusion', [rank_inclusion, lambda loss: rank_inclusion(loss, 3.), step_inclusion, mean_inclusion])
def test_inclusion_counts_and_frequencies(inclusion):
    memory = known()
    memory.loss[7] = float('nan')
    prob = torch.ones(N)
    prob[memory.loss.isfinite()] = inclusion(memory.loss[memory.loss.isfinite()])
    sampler,n,times = MemorySampler(memory, 'include', gen(), inclusion=inclusion),1000,torch.zeros(N)
    for _ in range(n):
        idx = list(sampler)
        assert len(set(idx))==len(idx) and abs(len(idx)-prob.sum())<1
        times[idx] += 1
    assert times[7]==n and ((times/n-prob).abs()<=5*(prob*(1-prob)/n).sqrt()+1e-6).all()

@pytest.mark.parametrize('alpha,uniform', [(.5,.5), (1.,.2), (2.,0.), (0.,.5)])
def test_prioritized_frequencies(alpha, uniform):
    memory,n,times = known(),500,torch.zeros(N)
    sampler = MemorySampler(memory, 'prioritized_epoch', gen(), alpha=alpha, uniform=uniform)
    for _ in range(n):
        idx = torch.tensor(list(sampler))
        assert len(idx)==N==len(sampler)
        times += idx.bincount(minlength=N)
    wanted = uniform+(1-uniform)*N*memory.loss.double()**alpha/(memory.loss.double()**alpha).sum()
    assert ((times/n-wanted).abs()<=5*(wanted.clamp(min=.05)/n).sqrt()).all()

def test_losses_of_each_epoch_choose_anew():
    memory = known()
    sampler = MemorySampler(memory, 'top_k', keep=.5)
    first = set(sampler)
    memory.note(torch.arange(N), -memory.loss)
    assert set(sampler)=={*range(N)}-first

# the same as the callbacks
@pytest.mark.parametrize('attach,kwargs', [
    (lambda learn: learn.favor_hard(2., correct=1.), dict(policy='include', inclusion=lambda loss: rank_inclusion(loss, 2.), correct=1.)),
    (lambda learn: learn.drop_easy(.5, .8), dict(policy='include', inclusion=lambda loss: step_inclusion(loss, .5, .8))),
    (lambda learn: learn.info_batch(.4, delta=1.), dict(policy='prune_easy', prune=.4)),
    (lambda learn: learn.prioritized_sampling(1., .3, 1.), dict(policy='prioritized_epoch', alpha=1., uniform=.3, correct=1.))], ids=['favor_hard','drop_easy','info_batch','prioritized'])
def test_a_callback_with_the_same_memory_loads_the_same_items(attach, kwargs):
    cb = quiet_fit(attach(table_learner()), 3).selection
    cb.learn.pct_train = .5 # of a fit that goes on
    cb.draws,order = Draws(5),torch.tensor(list(RandomSampler(cb.memory, generator=gen(5))))
    sampler = MemorySampler(cb.memory, generator=gen(5), **kwargs)
    rows,weight = cb.choose_items(order)
    assert list(sampler)==order[rows].tolist() and len(set(rows.tolist()))<100
    assert sampler.weight is None if weight is None else sampler.weight[order[rows]].equal(weight)

# weights
@pytest.mark.parametrize('correct', [.5, 1.])
def test_weights_by_dataset_index(correct):
    memory = known()
    sampler = MemorySampler(memory, 'include', gen(), inclusion=rank_inclusion, correct=correct)
    idx = list(sampler)
    torch.testing.assert_close(sampler.weight[idx], rank_inclusion(memory.loss)[idx]**-correct)
    memory.loss.fill_(float('nan'))
    assert len(list(sampler))==N and sampler.weight is None

@pytest.mark.parametrize('kwargs', [dict(policy='include', inclusion=lambda loss: rank_inclusion(loss, .5), correct=1.), dict(policy='prune_easy', prune=.7),
    dict(policy='prioritized_epoch', uniform=.3, correct=1.)], ids=name)
def test_weighted_sums_are_unbiased(kwargs):
    memory,values = known(),torch.randn(N, generator=gen(2))+1
    sampler,sums = MemorySampler(memory, generator=gen(), **kwargs),[]
    for _ in range(1000):
        idx = list(sampler)
        sums.append((values*sampler.weight)[idx].sum())
    sums = torch.stack(sums)
    assert (sums.mean()-values.sum()).abs()<4*sums.std()/1000**.5

# loading
class Counted(Dataset):
    "Counts, in any process, how often each item is loaded"
    def __init__(self, n): self.times = torch.zeros(n, dtype=torch.int32).share_memory_()
    def __len__(self): return len(self.times)
    def __getitem__(self, i):
        self.times[i] += 1
        return i

@pytest.mark.parametrize('num_workers', [0, 2])
def test_what_is_left_out_is_never_loaded(num_workers):
    memory,ds = ItemMemory(48),Counted(48)
    sampler = MemorySampler(memory, 'include', gen(), inclusion=mean_inclusion, correct=1.)
    loader,loaded = DataLoader(ds, batch_size=8, sampler=sampler, num_workers=num_workers, persistent_workers=num_workers>0),[]
    for _ in range(3):
        before = ds.times.clone()
        idx = torch.cat([b for b in loader for _ in [memory.note(b, b.float(), picked=True)]])
        memory.next_epoch()
        assert (ds.times-before).equal(idx.bincount(minlength=48).int())
        if loaded: assert set(range(24, 48))<=set(idx.tolist()) and sampler.weight[idx].equal(torch.where(idx<24, 2., 1.))
        loaded.append(len(idx))
    assert loaded==[48,36,36]

def test_a_short_epoch_makes_few_batches():
    sampler = MemorySampler(known(), 'top_k', keep=.1)
    for drop_last,n in ((True,2), (False,3)):
        loader = DataLoader(range(N), batch_size=8, sampler=sampler, drop_last=drop_last)
        assert len(loader)==len(list(loader))==n

# the length
@choose
def test_the_length_is_that_of_the_coming_epoch_then_of_the_running_one(kwargs):
    memory = ItemMemory(N)
    sampler = MemorySampler(memory, generator=gen(), **kwargs)
    for epoch in range(4):
        coming,n = len(sampler),0
        if name(kwargs)[:6]!='lambda': assert coming==len(list(fresh(sampler)))
        for i in sampler:
            n += 1
            memory.note(torch.tensor([i]), torch.tensor([float(i%7)]), picked=True)
            if n%20==1: running = len(sampler)
        assert n==running==len(sampler) and (coming==n or kwargs is CHOOSE[-1]) # which draws from the global generator
        memory.next_epoch()

def fresh(sampler):
    "Another sampler in the same state"
    other = MemorySampler(ItemMemory(len(sampler.memory)), sampler.policy, gen(1))
    other.load_state_dict(sampler.state_dict())
    return other

@choose
def test_questions_change_nothing(kwargs):
    def states(): return [torch.get_rng_state().tolist(),random.getstate(),np.random.get_state()[1].tolist(),generator.get_state().tolist()]
    generator,memory = gen(),known()
    before = states()
    asked,quiet = MemorySampler(memory, generator=generator, **kwargs),MemorySampler(memory, generator=gen(), **kwargs)
    for _ in range(3): len(asked)
    assert states()==before
    def epoch(sampler): torch.manual_seed(4); return list(sampler)
    for _ in range(3):
        assert epoch(asked)==epoch(quiet)
        memory.next_epoch()
        len(asked)

# going on
@choose
@given
@pytest.mark.parametrize('done', [0, 1, 3])
def test_a_resumed_training_loads_what_it_would_have(kwargs, given, done):
    def sampler(seed): return MemorySampler(ItemMemory(N), generator=gen(seed) if given else None, **kwargs)
    def epochs(sampler, n):
        out = []
        for _ in range(n):
            idx = torch.tensor(list(sampler))
            sampler.memory.note(idx, (idx*len(idx)%31).float(), picked=True)
            sampler.memory.next_epoch()
            out.append(idx.tolist())
        return out
    torch.manual_seed(0)
    one = sampler(0)
    epochs(one, done)
    state,random_state = one.state_dict(),torch.get_rng_state()
    wanted = epochs(one, 3)
    torch.manual_seed(8)
    other = sampler(6)
    epochs(other, 1)
    list(other) # an epoch that is broken off
    other.load_state_dict(state)
    torch.set_rng_state(random_state)
    assert len(other)==len(wanted[0]) or kwargs is CHOOSE[-1]
    assert epochs(other, 3)==wanted

def test_one_seed_one_training():
    def epochs(seed): return [list(sampler) for sampler in [MemorySampler(known(), 'prune_easy', gen(seed))] for _ in range(3)]
    assert epochs(0)==epochs(0)!=epochs(1)
    assert len(list(MemorySampler(known(), 'prune_easy', torch.Generator().manual_seed(-1)))) # a seed of 64 bits

# what can go wrong
@pytest.mark.parametrize('kwargs,error,message', [
    (dict(memory=torch.zeros(4), policy='prune_easy'), TypeError, r'memory: got Tensor, wanted an ItemMemory\(len\(dataset\)\)'),
    (dict(policy='rank_inclusion'), ValueError, "policy: got 'rank_inclusion', wanted one of .*'include', 'prioritized', 'prioritized_epoch' or a function"),
    (dict(policy=rank_inclusion), TypeError, r"got a function that returns Tensor, wanted Chosen\(rows, weight\); .*policy='include', inclusion=..."),
    (dict(policy='include'), TypeError, 'inclusion'),
    (dict(policy='include', inclusion=rank_inclusion, corect=1.), TypeError, "unexpected keyword argument 'corect'"),
    (dict(policy='include', inclusion=lambda loss: step_inclusion(loss, drop=3)), ValueError, 'drop: got 3, wanted a number of at least 0 and at most 1'),
    (dict(policy='prioritized_epoch', alpha=-1), ValueError, 'alpha: got -1'),
    (dict(policy='prioritized_epoch', allowed=torch.ones(4).bool()), ValueError, 'allowed: got a tensor, wanted a number or a function')])
def test_errors_when_it_is_made(kwargs, error, message):
    with pytest.raises(error, match=message): MemorySampler(**dict(dict(memory=ItemMemory(4)), **kwargs))

def test_states_that_do_not_fit():
    plain,seeded = MemorySampler(ItemMemory(4), 'prune_easy'),MemorySampler(ItemMemory(4), 'prune_easy', gen())
    with pytest.raises(ValueError, match='made without a generator, wanted one made with a'): seeded.load_state_dict(plain.state_dict())
    with pytest.raises(ValueError, match='made with a generator, wanted one made without'): plain.load_state_dict(seeded.state_dict())
    with pytest.raises(ValueError, match='got a state of 4 items, wanted 5'): MemorySampler(ItemMemory(5), 'prune_easy').load_state_dict(plain.state_dict())
