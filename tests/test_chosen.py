"`chosen` trains on what the callbacks train on, and leaves all else as it is"
import io, threading
from functools import cache, partial

import pytest, torch
from helpers import mlp, on_two_ranks, same
from loops import *
from selback.functional import (Ahead, BatchLossFilter, ImportanceSampling, RandomSubset, SelectiveBackprop, TopLoss,
    chosen, inputs_and_targets, weigh_grads)
from torch.nn import functional as F

@pytest.mark.parametrize('name', CASES)
def test_a_plain_loop_trains_on_what_the_callback_does(name):
    assert_same(by_loop(CASES[name]), by_callback(CASES[name]))

# The laws
def seeded_mlp():
    torch.manual_seed(2)
    return mlp() # with dropout and BatchNorm

def fit(batches_of, n_epoch=2):
    "The network's state after training on shuffled batches, and the next random number"
    net = seeded_mlp()
    opt = torch.optim.SGD(net.parameters(), LR)
    x,y = dataset().tensors
    shuffled = DataLoader(TensorDataset(x[:,:4], y), BS, shuffle=True)
    for _ in range(n_epoch):
        for xb,yb,*weight in batches_of(shuffled, net):
            pred = net.train()(xb)
            if weight: pred = weigh_grads(pred, *weight)
            F.cross_entropy(pred, yb).backward()
            opt.step()
            opt.zero_grad()
    return net.state_dict(),torch.rand(1)

@cache
def fit_of_all(): return fit(lambda batches, net: batches)

def choosing(method, **kwargs):
    return lambda batches, net: chosen(batches, net, F.cross_entropy, method, **kwargs)

ALL = dict(
    selective=partial(SelectiveBackprop, beta=0, seed=0),
    by_rank=partial(SelectiveBackprop, beta=0, gather=False, seed=0),
    top=partial(TopLoss, 1.),
    top_gathered=partial(TopLoss, 1., gather=True),
    share=partial(BatchLossFilter, 1.),
    random=partial(RandomSubset, 1., seed=0))

@pytest.mark.parametrize('scorer', [None, Ahead(2)], ids=['in_time','ahead'])
@pytest.mark.parametrize('name', ALL)
def test_choosing_everything_is_plain_training(name, scorer):
    "To the last bit, dropout and the random numbers that follow included"
    (plainly,after),(ours,later) = fit_of_all(),fit(choosing(ALL[name](), scorer=scorer))
    assert same(ours, plainly)
    assert torch.equal(after, later)

# What a batch may be
class AsDict(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, inputs): return self.net(inputs['x'])

SOME = TopLoss,partial(SelectiveBackprop, seed=0),partial(ImportanceSampling, seed=0)

@pytest.mark.parametrize('method', SOME)
def test_a_dict_is_chosen_from_as_a_tuple_is(method):
    net = network().eval()
    tuples = [*chosen(loader(), net, F.cross_entropy, method())]
    as_dicts = [dict(x=x, labels=y) for x,y in loader()]
    dicts = [*chosen(as_dicts, AsDict(net), F.cross_entropy, method())]
    assert len(dicts)==len(tuples)>1
    for batch,(x,y,*weight) in zip(dicts, tuples):
        assert batch['x'].equal(x)
        assert batch['labels'].equal(y)
        assert ('weight' in batch)==bool(weight)
        if weight: assert batch['weight'].equal(*weight)

@pytest.mark.parametrize('batch', [object(), torch.zeros(4, 4), (torch.zeros(4, 4),), dict(x=torch.zeros(4, 4))])
def test_a_batch_that_cannot_be_split_is_refused(batch):
    with pytest.raises(TypeError, match='pass split='): inputs_and_targets(batch)

def test_a_split_of_ones_own_says_what_is_what():
    "Here the target comes first"
    swapped = [(y,x) for x,y in loader()]
    net = network().eval()
    ours = [*chosen(swapped, net, F.cross_entropy, TopLoss(), split=lambda batch: (batch[1:], batch[:1]))]
    wanted = [*chosen(loader(), net, F.cross_entropy, TopLoss())]
    assert [x.tolist() for _,x in ours]==[x.tolist() for x,_ in wanted]

class OwnLoss(nn.Module):
    "Returns its loss, a single number"
    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, x, y): return F.cross_entropy(self.net(x), y)

@pytest.mark.parametrize('scorer', [None, Ahead()], ids=['in_time','ahead'])
def test_a_model_that_returns_its_loss_is_refused(scorer):
    "Each item would have the same, and any of them would be chosen"
    def split(batch): return batch,batch[1:]
    steps = chosen(loader(), OwnLoss(), lambda loss, y: loss, TopLoss(), split=split, scorer=scorer)
    with pytest.raises(ValueError, match='a single number from the model'): next(steps)

# Saved and gone on with
def saved(state):
    "A state that was written to a file, and read"
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)

STATES = dict(
    selective=partial(SelectiveBackprop, seed=0),
    by_rank=partial(SelectiveBackprop, gather=False, seed=0),
    random=partial(RandomSubset, seed=0),
    importance=partial(ImportanceSampling, 2, seed=0))

def epoch_of(net, method):
    "The steps of an epoch"
    opt = torch.optim.SGD(net.parameters(), LR)
    return [train_step(net, opt, *batch) for batch in chosen(loader(), net, F.cross_entropy, method)]

@pytest.mark.parametrize('name', STATES)
def test_a_saved_method_goes_on_as_if_nothing_had_been(name):
    net,method = network(),STATES[name]()
    epoch_of(net, method)
    states = saved(dict(net=net.state_dict(), method=method.state_dict()))
    wanted = epoch_of(net, method)

    net,method = network(),STATES[name]()
    net.load_state_dict(states['net'])
    assert epoch_of(net, method)!=wanted
    net.load_state_dict(states['net'])
    method.load_state_dict(states['method'])
    assert epoch_of(net, method)==wanted

# Nothing is left behind
def threads(): return [t for t in threading.enumerate() if t.name.startswith('selback')]

class Slow(nn.Module):
    "Takes its time, so that its pass is not over when nobody wants it any more"
    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, x):
        threading.Event().wait(.02)
        return self.net(x)

@pytest.mark.parametrize('end', ['closed','deleted','interrupted'])
def test_an_epoch_that_ends_early_leaves_no_thread(end):
    net = Slow()
    batches = chosen(loader(), net, F.cross_entropy, TopLoss(), scorer=Ahead(3))
    next(batches)
    assert threads()
    if end=='closed': batches.close()
    elif end=='interrupted':
        with pytest.raises(KeyboardInterrupt): batches.throw(KeyboardInterrupt)
    del batches
    assert not threads()

# Two processes
UNEVEN = dict(
    top=partial(TopLoss, .5),
    gathered=partial(TopLoss, .5, gather=True),
    selective=partial(SelectiveBackprop, seed=0),
    random=partial(RandomSubset, .3, gather=True, seed=0),
    importance=partial(ImportanceSampling, 2, seed=0))

def steps_of_rank(out, rank):
    "Each process has hard items where the other has easy ones, and a last batch of its own size"
    torch.manual_seed(rank)
    results = {}
    for name,method in UNEVEN.items():
        net = torch.nn.parallel.DistributedDataParallel(network())
        sizes = [BS]*5+[3+4*rank]
        batches = [dataset(BS*6)[:n] for n in sizes]
        if rank: batches = [(3*x, 2-y) for x,y in batches]
        opt = torch.optim.SGD(net.parameters(), LR)
        steps = [train_step(net, opt, *batch) for batch in chosen(batches, net, F.cross_entropy, method())]
        results[name] = steps,net.module.net[0].weight.detach()
    torch.save(results, out/f'{rank}.pt')

@pytest.fixture(scope='module')
def ranks(tmp_path_factory):
    out = tmp_path_factory.mktemp('chosen')
    on_two_ranks(partial(steps_of_rank, out), out)
    return [torch.load(out/f'{rank}.pt', weights_only=False) for rank in range(2)]

@pytest.mark.slow
@pytest.mark.parametrize('name', UNEVEN)
def test_two_processes_make_as_many_steps(ranks, name):
    (a,of_a),(b,of_b) = (rank[name] for rank in ranks)
    assert len(a)==len(b)>1
    assert [step.items for step in a]!=[step.items for step in b] # each chooses from its own
    assert torch.equal(of_a, of_b)
