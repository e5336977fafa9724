"A proxy trains on the stream of another learner; what it keeps, by a loop written out by hand; what a replay loads"
import pickle
from collections import Counter

import pytest, torch
from fastai.callback.core import CancelFitException
from fastai.optimizer import SGD
from goldens import hash_of
from helpers import *
from selback.bench.compare import compare
from studies.proxy import ReplayChoicesCallback, record_choices, train_proxy
from torch.nn import functional as F

def linear(): return nn.Linear(4, 3)

def learner(net=None, cbs=(), **kwargs):
    "Of a hundred items, which SGD trains"
    learn = numbered_learner(cbs=list(cbs), net=net, **kwargs)
    learn.opt_func = SGD
    return learn

def proxy(seed=3):
    set_seed(seed)
    return Numbered(linear())

def some_choices(learn, n_epoch=4, p=.4):
    "Random ones"
    return torch.rand(n_epoch, len(learn.dls.train_ds), generator=torch.Generator().manual_seed(1))<p

def replaying(choices, *cbs):
    "A learner that replays choices"
    return learner(net=linear(), cbs=[ReplayChoicesCallback(choices), *cbs])

def kept_of(row): return set(row.nonzero()[:,0].tolist())

# a proxy trains
def test_a_proxy_is_trained_on_the_stream_and_nothing_else_changes():
    def run(first):
        proxy,learn = mlp(),table_learner()
        if first: train_proxy(learn, proxy, n_epoch=2, every=2, lr=.1)
        return quiet_fit(learn, 2)
    assert same(weights(run(False)), weights(run(True)))

    set_seed(0)
    learn,proxy = table_learner(),mlp()
    before = {k: v.clone() for k,v in proxy.state_dict().items()}
    assert train_proxy(learn, proxy, every=4) is proxy
    assert not same(before, proxy.state_dict())
    assert proxy[1].num_batches_tracked==2 # of seven batches, every fourth

# what a proxy keeps
def n_kept(n, keep): return max(2, int(keep*n))

def hardest_rows(net, x, y, keep):
    with torch.no_grad(): losses = F.cross_entropy(net(x), y, reduction='none').tolist()
    return sorted(range(len(y)), key=lambda row: -losses[row])[:n_kept(len(y), keep)]

def sgd_step(net, x, y, lr):
    grads = torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters()))
    with torch.no_grad():
        for weight,grad in zip(net.parameters(), grads): weight -= lr*grad

def by_hand(dls, net, n_epoch, lr, keep, every):
    "Of each batch the hardest share by the net's losses; on it, it takes a step of SGD now and then"
    kept,now = [],torch.ones(100, dtype=torch.bool)
    for _ in range(n_epoch):
        now = now.clone()
        for i,(x,y) in enumerate(dls.train):
            rows = hardest_rows(net, x, y, keep)
            for row,idx in enumerate(numbers(x)): now[idx] = row in rows
            if i%every==0: sgd_step(net, x[rows], y[rows], lr)
        kept.append(now)
    return torch.stack(kept)

@pytest.mark.parametrize('keep,every,drop_last', [(.5,4,False), (.25,1,False), (.5,3,True)])
def test_the_proxy_keeps_and_trains_on_its_hardest_items(keep, every, drop_last):
    recorded,hand = learner(drop_last=drop_last),learner(drop_last=drop_last)
    net = proxy()
    got = record_choices(recorded, net, lambda small: small.fit(3, .3), keep, every)

    other = proxy()
    numbered_learner(drop_last=drop_last) # where the random states were
    wanted = by_hand(hand.dls, other, 3, .3, keep, every)
    assert len(got)==3
    assert torch.equal(got, wanted)
    assert all(torch.allclose(a, b, atol=1e-6) for a,b in zip(net.parameters(), other.parameters()))
    if drop_last: return
    in_all = 6*n_kept(16, keep)+n_kept(4, keep)
    assert all(of_epoch.sum()==in_all for of_epoch in got)

class Seen(LoaderBatches):
    "Notes the items of each epoch before anything is chosen"
    def __init__(self): self.epochs = []

    def before_train(self):
        super().before_train()
        self.epochs.append(set())

    def note(self, i, xb, yb): self.epochs[-1].update(numbers(xb[0]))

def test_an_item_that_an_epoch_did_not_see_keeps_its_last_choice():
    seen = Seen()
    def fit(small):
        small.add_cb(seen)
        small.fit(4)

    choices = list(record_choices(learner(drop_last=True), proxy(), fit))
    before = torch.ones(100, dtype=torch.bool)
    for now,of_epoch in zip(choices, seen.epochs, strict=True):
        unseen = [i for i in range(100) if i not in of_epoch]
        assert len(unseen)==4
        assert torch.equal(now[unseen], before[unseen])
        before = now

# what a replay loads
def loaded(cb, n_epoch, **kwargs):
    "The items of each epoch"
    diary = trained_only(learner(net=linear(), cbs=[cb, Diary()], **kwargs), n_epoch).diary
    return [items_of(epoch) for epoch in diary.epochs]

ROWS = {4: [0,1,2,3], 8: [0,0,1,1,2,2,3,3], 2: [0,2], 3: [0,1,2], 1: [0], 5: [0,0,1,2,3]}

@pytest.mark.parametrize('n_epoch', ROWS)
@pytest.mark.parametrize('bs', [16, 7])
def test_an_epoch_is_the_shuffle_less_what_its_recorded_one_left_out(n_epoch, bs):
    kept = some_choices(learner())
    epochs = loaded(ReplayChoicesCallback(kept), n_epoch, bs=bs)
    for epoch,row in zip(epochs, ROWS[n_epoch], strict=True):
        wanted = kept_of(kept[row])
        would_be_alone = len(wanted)%bs==1
        assert len(epoch)==len(set(epoch))
        assert wanted<=set(epoch)
        assert len(epoch)-len(wanted)==would_be_alone
        assert epoch!=sorted(epoch)

def test_what_is_left_out_is_never_read():
    kept = some_choices(learner(), 2)
    read,_,epochs = reads_and_runs(replaying(kept, Diary()), 4)
    items = [items_of(epoch) for epoch in epochs]
    assert +read==Counter(sum(items, []))
    for i,of_epoch in enumerate(items): assert len(set(of_epoch)-kept_of(kept[i//2]))<=1

# copies
def test_a_replay_is_pickled_with_its_learner():
    learn = learner(net=linear())
    learn.replay_choices(some_choices(learn))
    copy = pickle.loads(pickle.dumps(quiet_fit(learn, 4)))
    def goes_on(learn):
        set_seed(5)
        return hash_of(quiet_fit(learn, 4).model)
    assert goes_on(learn)==goes_on(copy)

class Stop(Callback):
    "Ends the fit before an epoch"
    order,run_valid = 90,False

    def __init__(self, until): self.until = until

    def before_epoch(self):
        if self.epoch==self.until: raise CancelFitException

@pytest.mark.parametrize('stop', [1,2,3])
def test_a_stopped_replay_goes_on_with_its_epoch(stop):
    kept = some_choices(learner())
    def run(start, until):
        learn = quiet_fit(replaying(kept, Diary(), Stop(until)), 4, start_epoch=start)
        return [set(items_of(epoch)) for epoch in learn.diary.epochs if epoch]

    assert len(run(0, 4))==4
    for epoch,row in zip(run(0, stop)+run(stop, 4), kept, strict=True):
        wanted = kept_of(row)
        assert wanted<=epoch
        assert len(epoch-wanted)<=1

def test_another_dataset_is_refused():
    smaller = learner(n=122, cbs=[ReplayChoicesCallback(some_choices(learner()))])
    with pytest.raises(ValueError, match='got a training set of 90 items, wanted 100'): quiet_fit(smaller, 1)

# training
def test_plain_training_if_all_is_kept():
    def trained(*cbs): return hash_of(quiet_fit(table_learner(cbs=list(cbs)), 3).model)
    everything = torch.ones(2, 100, dtype=torch.bool)
    assert trained()==trained(ReplayChoicesCallback(everything))

def test_the_recording_is_paid_for():
    "The proxy is asked first: of a batch of 25 thrice and of half of it, and of both again after a step"
    def recorded(learn):
        choices = record_choices(learn, mlp(), lambda small: small.fit(2), every=4)
        return ReplayChoicesCallback(choices)
    def get_learner():
        learn = table_learner(bs=25)
        learn.metrics = [lambda pred, y: (pred.argmax(1)!=y).float().mean()]
        return learn

    runs = compare(get_learner, {'replayed': recorded}, epochs=2, seeds=1, plot=False)
    forward,of_inputs = 2*(4*8+8*3),2*4*8
    looks = (2*100+4*25+2*13)/3
    step = (3*forward-of_inputs)/forward/3 # of the proxy, whose inputs need no gradient
    steps = 2*12*step # in each of two epochs, on the half of every fourth batch
    of_learner = 2*48 # what was kept, in two epochs
    assert runs.compute.iloc[-1]==pytest.approx(looks+steps+of_learner)

# what is refused
def fit_once(small): small.fit(1)

def test_a_proxy_that_diverged_is_an_error():
    net = proxy()
    with torch.no_grad(): net.net.weight.fill_(float('nan'))
    with pytest.raises(ValueError, match='no finite loss from the proxy in epoch 0'):
        record_choices(learner(), net, fit_once)
