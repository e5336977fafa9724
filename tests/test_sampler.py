"The sampler for a plain PyTorch loop: which items are loaded, in which order, with which weights"
import copy
from functools import partial

import pytest, torch
from helpers import alike, chosen_before_loading, on_two_ranks, prune_easy, quiet_fit, slow, table_learner
from selback.core.policies import Draws
from selback.functional import *
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, TensorDataset

N = 200

def gen(seed=0): return torch.Generator().manual_seed(seed)

def half_at_random(loss): return Chosen((torch.rand(len(loss))<.5).nonzero()[:,0])

def no_one(loss): return (loss>99).float() # in an epoch where losses are known

def include_all(loss): return Chosen(torch.arange(len(loss)))

KEEP_ALL = [
    partial(include, inclusion=lambda loss: rank_inclusion(loss, 0.), correct=1.),
    partial(prune_easy, prune=0.),
    partial(prioritized_epoch, uniform=1.),
    partial(top_k, keep=1.)]

GLOBALLY_DRAWN = half_at_random # whatever the generator of the sampler
CHOOSE = [
    partial(include, inclusion=mean_inclusion, correct=.5),
    prioritized_epoch,
    partial(random_k, keep=.3),
    partial(top_k, keep=.25),
    GLOBALLY_DRAWN]

keep_all = pytest.mark.parametrize('policy', KEEP_ALL)
choose = pytest.mark.parametrize('policy', CHOOSE)
given = pytest.mark.parametrize('given', [True, False], ids=['generator', 'global'])

# the order
@choose
@given
def test_without_losses_an_epoch_is_that_of_a_plain_loader(policy, given):
    def generator(): return gen() if given else None
    def epochs(sampler):
        torch.manual_seed(3)
        return [list(sampler) for _ in range(3)]

    sampler = MemorySampler(ItemMemory(N), policy, generator=generator())
    plain = RandomSampler(range(N), generator=generator())
    assert epochs(sampler)==epochs(plain)
    assert sampler.weight is None
    assert len(sampler)==N

class Loop:
    "A plain loop over 50 items, with a sampler made for its memory"
    def __init__(self, make_sampler):
        self.x = torch.randn(50, 4, generator=gen())
        self.y = torch.randint(0, 3, (50,), generator=gen())
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(.3), nn.Linear(8, 3))
        self.memory,self.log = ItemMemory(50),[]
        self.sampler = make_sampler(self.memory)

    def train(self, n_epoch=4):
        "The items and losses of each step, and the weights at the end"
        data = TensorDataset(torch.arange(50), self.x, self.y)
        opt = torch.optim.SGD(self.model.parameters(), lr=.1)
        for _ in range(n_epoch):
            for batch in DataLoader(data, batch_size=8, sampler=self.sampler):
                self.backward(*batch)
                opt.step()
                opt.zero_grad()
            self.memory.next_epoch()
        return [*self.log, *self.model.parameters()]

    def backward(self, idx, xb, yb):
        losses = F.cross_entropy(self.model(xb), yb, reduction='none')
        self.memory.note(idx, losses, picked=True)
        self.log += [idx, losses.detach()]
        weight = getattr(self.sampler, 'weight', None)
        weighted = losses if weight is None else losses*weight[idx]
        weighted.mean().backward()

@keep_all
@given
def test_training_on_everything_is_bit_equal_to_plain_training(policy, given):
    def generator(): return gen() if given else None
    ours = Loop(lambda memory: MemorySampler(memory, policy, generator=generator())).train()
    plain = Loop(lambda memory: RandomSampler(memory, generator=generator())).train()
    assert all(a.equal(b) for a,b in zip(ours, plain, strict=True))

# the same as the callbacks
def by_rank(loss): return rank_inclusion(loss, 2.)

def by_step(loss): return step_inclusion(loss, .5, .8)

CALLBACKS = dict(
    favor_hard=(lambda learn: learn.favor_hard(2., correct=1.), partial(include, inclusion=by_rank, correct=1.)),
    drop_easy=(lambda learn: learn.drop_easy(.5, .8), partial(include, inclusion=by_step)),
    info_batch=(lambda learn: learn.info_batch(.4, delta=1.), partial(prune_easy, prune=.4)),
    prioritized=(lambda learn: learn.prioritized_sampling(1., .3, 1.),
        partial(prioritized_epoch, alpha=1., uniform=.3, correct=1.)))

@pytest.mark.parametrize('method', CALLBACKS)
def test_a_callback_with_the_same_memory_loads_the_same_items(method):
    attach,policy = CALLBACKS[method]
    cb = quiet_fit(attach(table_learner()), 3).selection
    cb.learn.pct_train = .5 # of a fit that goes on
    cb.method.draws = Draws(5)
    order = torch.tensor(list(RandomSampler(cb.memory, generator=gen(5))))
    sampler = MemorySampler(cb.memory, policy, generator=gen(5))

    rows,weight = chosen_before_loading(cb, order)
    chosen = order[rows]
    assert list(sampler)==chosen.tolist()
    assert len(set(rows.tolist()))<100
    if weight is None: assert sampler.weight is None
    else: assert sampler.weight[chosen].equal(weight)

# loading
class Counted(Dataset):
    "Counts, in any process, how often each item is loaded"
    def __init__(self, n): self.times = torch.zeros(n, dtype=torch.int32).share_memory_()

    def __len__(self): return len(self.times)

    def __getitem__(self, i):
        self.times[i] += 1
        return i

@pytest.mark.parametrize('num_workers', [0, slow(2)])
def test_what_is_left_out_is_never_loaded(num_workers):
    memory,ds = ItemMemory(48),Counted(48)
    sampler = MemorySampler(memory, partial(include, inclusion=mean_inclusion, correct=1.), gen())
    workers = dict(num_workers=num_workers, persistent_workers=num_workers>0)
    loader = DataLoader(ds, batch_size=8, sampler=sampler, **workers)
    def epoch():
        batches = []
        for idx in loader:
            memory.note(idx, idx.float(), picked=True)
            batches.append(idx)
        memory.next_epoch()
        return torch.cat(batches)

    for n in (48,36,36):
        before = ds.times.clone()
        idx = epoch()
        assert len(idx)==n
        assert (ds.times-before).equal(idx.bincount(minlength=48).int())
        if n==48: continue # nothing is known yet
        assert set(range(24, 48))<=set(idx.tolist())
        assert sampler.weight[idx].equal(torch.where(idx<24, 2., 1.))

# the length
@choose
def test_the_length_is_that_of_the_coming_epoch_then_of_the_running_one(policy):
    memory = ItemMemory(N)
    sampler = MemorySampler(memory, policy, generator=gen())
    can_be_told = policy is not GLOBALLY_DRAWN
    for epoch in range(4):
        coming,n = len(sampler),0
        for i in sampler:
            n += 1
            memory.note(torch.tensor([i]), torch.tensor([float(i%7)]), picked=True)
            if n%20==1: running = len(sampler)

        assert n==running==len(sampler)
        if can_be_told: assert coming==n
        memory.next_epoch()

# going on
def noted_epochs(sampler, n):
    "The items of some epochs, after each of which losses are noted that follow from its items"
    epochs = []
    for _ in range(n):
        idx = torch.tensor(list(sampler))
        sampler.memory.note(idx, (idx*len(idx)%31).float(), picked=True)
        sampler.memory.next_epoch()
        epochs.append(idx.tolist())
    return epochs

@choose
@given
@pytest.mark.parametrize('done', [0, 1, 3])
def test_a_resumed_training_loads_what_it_would_have(policy, given, done):
    def sampler(seed): return MemorySampler(ItemMemory(N), policy, generator=gen(seed) if given else None)
    torch.manual_seed(0)
    one = sampler(0)
    noted_epochs(one, done)
    state,random_state = one.state_dict(),torch.get_rng_state()
    wanted = noted_epochs(one, 3)

    torch.manual_seed(8)
    other = sampler(6)
    noted_epochs(other, 1)
    list(other) # an epoch that is broken off
    other.load_state_dict(state)
    torch.set_rng_state(random_state)
    if policy is not GLOBALLY_DRAWN: assert len(other)==len(wanted[0])
    assert noted_epochs(other, 3)==wanted

def train(sampler, items):
    "Note losses that follow from the items"
    idx = torch.tensor(items, dtype=torch.int64)
    sampler.memory.note(idx, (idx*7%31).float(), picked=True)

@choose
@given
@pytest.mark.parametrize('n', [0, 1, 40])
def test_a_training_stopped_within_an_epoch_goes_on_with_the_rest_of_its_items(policy, given, n):
    def sampler(seed): return MemorySampler(ItemMemory(N), policy, generator=gen(seed) if given else None)
    torch.manual_seed(0)
    one = sampler(0)
    noted_epochs(one, 1)
    items = list(one) # a loader reads ahead
    train(one, items[:n])
    state,random_state,weight = one.state_dict(),torch.get_rng_state(),one.weight
    train(one, items[n:])
    one.next_epoch()
    wanted = noted_epochs(one, 2)

    torch.manual_seed(8)
    other = sampler(6)
    noted_epochs(other, 1)
    other.load_state_dict(state)
    torch.set_rng_state(random_state)
    assert len(other)==len(items)-n
    assert list(other)==items[n:]
    assert alike(other.weight, weight)
    train(other, items[n:])
    other.next_epoch()
    assert noted_epochs(other, 2)==wanted

@pytest.mark.parametrize('num_workers', [0, slow(2)])
def test_each_item_of_an_epoch_that_is_stopped_twice_trains_once(num_workers):
    sampler = MemorySampler(ItemMemory(48), prioritized_epoch, gen())
    noted_epochs(sampler, 1)
    whole,trained = copy.deepcopy(sampler),[]
    for steps in (2,1,3):
        loader = DataLoader(range(48), batch_size=8, sampler=sampler, num_workers=num_workers)
        for step,idx in enumerate(loader):
            if step==steps: break
            train(sampler, idx.tolist())
            trained += idx.tolist()
        state = sampler.state_dict()
        sampler = MemorySampler(ItemMemory(48), prioritized_epoch, gen(1))
        sampler.load_state_dict(state)
    assert trained==list(whole)
    with pytest.raises(ValueError, match='all items have trained.*next_epoch'): next(iter(sampler))
    sampler.next_epoch()
    assert len(list(sampler))==48

def test_a_batch_that_was_not_noted_comes_again():
    sampler = MemorySampler(ItemMemory(8), include_all, gen())
    items = list(sampler)
    train(sampler, items[2:4])
    sampler.load_state_dict(sampler.state_dict())
    assert list(sampler)==items[:2]+items[4:]

@pytest.mark.parametrize('notes,message', [
    (dict(picked=False), 'losses of an epoch in which nothing trained, wanted each batch noted once, with picked=True'),
    (dict(picked=True), 'more often than they were drawn')])
def test_a_position_that_cannot_be_told_is_refused(notes, message):
    sampler = MemorySampler(ItemMemory(8), include_all, gen())
    idx = torch.tensor(list(sampler))[:2]
    for _ in range(2): sampler.memory.note(idx, torch.ones(2), **notes)
    with pytest.raises(ValueError, match=message): sampler.state_dict()

# several processes
SHARED = [policy for policy in CHOOSE if policy is not GLOBALLY_DRAWN] + [partial(include, inclusion=no_one)]

def shared(n=N+1, policy=prioritized_epoch, seed=0, **kwargs):
    return MemorySampler(ItemMemory(n), policy, gen(seed), **kwargs)

def epochs_of_rank(rank, policy, drop_last):
    "Each length and draw, its weights, and what is known after it"
    sampler,epochs = shared(policy=policy, drop_last=drop_last),[]
    for epoch in range(4):
        length = len(sampler)
        items = list(sampler)
        n = len(items)//2
        train(sampler, items[:n])
        if epoch==2:
            state,sampler = sampler.state_dict(),shared(policy=policy, seed=3, drop_last=drop_last)
            sampler.load_state_dict(state)
            if n: assert list(sampler)==items[n:]
        train(sampler, items[n:])
        weight = sampler.weight
        sampler.next_epoch()
        epochs.append((length, items, weight, sampler.memory.state_dict()))
    return epochs

def of_other(rank, state):
    states = [None]*2
    torch.distributed.all_gather_object(states, state)
    return states[1-rank]

def refusals_of_rank(rank):
    "What is wrong in one process is said in both"
    def refused(message): return pytest.raises(ValueError, match=message)
    for wrong in (shared(seed=rank), shared(n=N+rank), shared(policy=half_at_random)):
        if wrong.method.needs_losses: wrong.memory.note(torch.arange(N), torch.rand(N, generator=gen()))
        torch.manual_seed(rank)
        with refused('another draw in each process'): list(wrong)
    with refused('generator: got None, wanted one for each of 2 processes'): MemorySampler(ItemMemory(9), include_all)
    with refused(f'got rank 0 of 3, wanted {rank} of 2, as in the process group'): list(shared(num_replicas=3))
    assert sorted(MemorySampler(ItemMemory(9), include_all, num_replicas=1))==[*range(9)]

    sampler = shared()
    shared().load_state_dict(of_other(rank, sampler.state_dict())) # between epochs all have the same
    train(sampler, list(sampler)[:8*rank])
    state = sampler.state_dict()
    resumed = shared()
    with refused(f'of rank {1-rank} of 2, wanted that of {rank} of 2'): resumed.load_state_dict(of_other(rank, state))
    resumed.load_state_dict(state)
    with refused('another draw in each process'): list(resumed) # as many items are not left in both

    sampler.memory.next_epoch()
    for ask in (len, list, MemorySampler.state_dict, MemorySampler.next_epoch):
        with refused(r'memory.next_epoch\(\) ended.*wanted sampler.next_epoch\(\)'): ask(sampler)

def both_ranks(out, rank):
    refusals_of_rank(rank)
    epochs = [[epochs_of_rank(rank, policy, drop_last) for policy in SHARED] for drop_last in (False, True)]
    torch.save(epochs, out/f'{rank}.pt')

@pytest.fixture(scope='module')
def ranks(tmp_path_factory):
    out = tmp_path_factory.mktemp('sampler')
    on_two_ranks(partial(both_ranks, out), out)
    return [torch.load(out/f'{rank}.pt', weights_only=False) for rank in range(2)]

@pytest.mark.slow
@pytest.mark.parametrize('drop_last', [False, True])
@pytest.mark.parametrize('policy', range(len(SHARED)))
def test_two_processes_share_out_the_draw_of_one(ranks, policy, drop_last):
    "Draws, lengths and weights are those of one process that notes the items of both, and its memory that of both"
    alone = shared(policy=SHARED[policy])
    times = torch.zeros(N+1)
    for epoch in range(4):
        items = list(alone)
        parts = [DistributedSampler(items, 2, rank, shuffle=False, drop_last=drop_last) for rank in range(2)]
        trained = []
        for rank,part in zip(ranks, parts):
            length,of_rank,weight,_ = rank[drop_last][policy][epoch]
            assert of_rank==[items[i] for i in part]
            assert length==len(of_rank)
            assert alike(weight, alone.weight)
            trained += of_rank
        train(alone, [*{*trained}])
        alone.next_epoch()
        times += torch.tensor(trained, dtype=torch.int64).bincount(minlength=N+1)
        a,b = (rank[drop_last][policy][epoch][-1] for rank in ranks)
        assert alike(a, b)
        assert a['picked'].equal(times.int())
        known = alone.memory.state_dict()
        assert all(alike(a[name], known[name]) for name in ('loss','age','rested'))

# what can go wrong
MISTAKES = [
    (dict(memory=torch.zeros(4), method=prune_easy), TypeError,
        r'memory: got Tensor, wanted an ItemMemory\(len\(dataset\)\)'),
    (dict(method='rank_inclusion'), TypeError,
        "MemorySampler: got 'rank_inclusion', wanted a method, of Method; pass an object"),
    (dict(method=rank_inclusion), TypeError,
        r"got a tensor of torch.float32.*wanted Chosen\(rows\)"),
    (dict(method=include), TypeError, 'inclusion'),
    (dict(method=partial(include, inclusion=rank_inclusion, corect=1.)), TypeError,
        "unexpected keyword argument 'corect'"),
    (dict(method=partial(include, inclusion=lambda loss: step_inclusion(loss, drop=3))), ValueError,
        'drop: got 3, wanted a number of at least 0 and at most 1'),
    (dict(method=partial(prioritized_epoch, alpha=-1)), ValueError, 'alpha: got -1'),
    (dict(method=partial(include, inclusion=rank_inclusion, due=torch.ones(4).bool())), ValueError,
        'due: got a tensor, wanted a number or a function'),
    (dict(num_replicas=2), ValueError, 'generator: got None, wanted one for each of 2 processes, seeded alike'),
    (dict(num_replicas=2, rank=2), ValueError, 'rank: got 2, wanted a whole number of at least 0 and at most 1'),
    (dict(num_replicas=0), ValueError, 'num_replicas: got 0')]

@pytest.mark.parametrize('kwargs,error,message', MISTAKES)
def test_errors_when_it_is_made(kwargs, error, message):
    with pytest.raises(error, match=message): MemorySampler(**dict(memory=ItemMemory(4), method=include_all) | kwargs)
