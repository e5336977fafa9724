"Recorded choices: what a proxy keeps, by a loop written out by hand, and what a replay loads"
import pickle
from collections import Counter

import pytest, torch
from fastai.callback.core import CancelFitException
from fastai.callback.training import GradientAccumulation
from fastai.optimizer import SGD
from goldens import hash_of
from helpers import *
from selback.methods.replay_choices import Choices, fingerprint, record_choices
from selback.bench.compare import compare
from torch.nn import functional as F

def linear(): return nn.Linear(4, 3)
def learner(net=None, cbs=(), **kwargs):
    learn = numbered_learner(cbs=list(cbs), net=net, **kwargs) # a hundred items
    learn.opt_func = SGD
    return learn
def proxy(seed=3):
    set_seed(seed)
    return Numbered(linear())
def some_choices(learn, n_epoch=4, p=.4):
    kept = torch.rand(n_epoch, len(learn.dls.train_ds), generator=torch.Generator().manual_seed(1))<p
    return Choices(kept, fingerprint(learn.dls.train_ds)),kept

def by_hand(dls, net, n_epoch, lr, keep, every):
    "Of each batch the hardest share by the net's losses; on it, it takes a step of SGD now and then"
    kept = []
    for e in range(n_epoch):
        kept.append(kept[-1].clone() if e else torch.ones(100, dtype=torch.bool))
        for i,(x,y) in enumerate(dls.train):
            with torch.no_grad(): losses = F.cross_entropy(net(x), y, reduction='none').tolist()
            rows = sorted(range(len(y)), key=lambda r: -losses[r])[:max(2, int(keep*len(y)))]
            for r,idx in enumerate(numbers(x)): kept[-1][idx] = r in rows
            if i%every: continue
            grads = torch.autograd.grad(F.cross_entropy(net(x[rows]), y[rows]), list(net.parameters()))
            with torch.no_grad():
                for w,g in zip(net.parameters(), grads): w -= lr*g
    return torch.stack(kept)

@pytest.mark.parametrize('keep,every,drop_last', [(.5,4,False), (.25,1,False), (.5,3,True)])
def test_the_proxy_keeps_and_trains_on_its_hardest_items(keep, every, drop_last):
    learn,hand = learner(drop_last=drop_last),learner(drop_last=drop_last)
    net = proxy()
    got = record_choices(learn, net, lambda small: small.fit(3, .3), keep, every)
    other = proxy()
    numbered_learner(drop_last=drop_last) # where the random states were
    wanted = by_hand(hand.dls, other, 3, .3, keep, every)
    assert len(got)==3 and torch.equal(torch.stack(list(got)), wanted)
    assert all(torch.allclose(a, b, atol=1e-6) for a,b in zip(net.parameters(), other.parameters()))
    sizes = [16]*6+[4]*(not drop_last)
    if not drop_last: assert all(o.sum()==sum(max(2, int(keep*n)) for n in sizes) for o in got)

def test_an_item_that_an_epoch_did_not_see_keeps_its_last_choice():
    seen = []
    class Seen(Callback):
        order,run_valid = -15,False
        def before_train(self): seen.append(set())
        def before_batch(self): seen[-1].update(numbers(self.x))
    def fit(small):
        small.add_cb(Seen())
        small.fit(4)
    choices = list(record_choices(learner(drop_last=True), proxy(), fit))
    before = torch.ones(100, dtype=torch.bool)
    for now,of in zip(choices, seen):
        out = [i for i in range(100) if i not in of]
        assert len(out)==4 and torch.equal(now[out], before[out])
        before = now

@pytest.mark.parametrize('fit', [lambda small: small.fit_one_cycle(2, .1), lambda small: (small.fit(1), small.fit(1))], ids=['one','two'])
def test_recording_leaves_no_trace_and_counts_all_fits(fit):
    def trained(records):
        learn = learner()
        if records: assert len(record_choices(learn, proxy(), fit))==2
        if not records: proxy()
        else: set_seed(3), linear() # as `proxy` leaves the random states
        return hash_of(quiet_fit(learn, 2).model)
    assert trained(True)==trained(False)

def loaded(cb, n_epoch, **kwargs):
    "The items of each epoch"
    return [items_of(e) for e in trained_only(learner(net=linear(), cbs=[cb, Diary()], **kwargs), n_epoch).diary.epochs]

@pytest.mark.parametrize('n_epoch,rows', [(4,[0,1,2,3]), (8,[0,0,1,1,2,2,3,3]), (2,[0,2]), (3,[0,1,2]), (1,[0]), (5,[0,0,1,2,3])])
@pytest.mark.parametrize('bs', [16, 7])
def test_an_epoch_is_the_shuffle_less_what_its_recorded_one_left_out(n_epoch, rows, bs):
    choices,kept = some_choices(learner())
    epochs = loaded(ReplayChoicesCallback(choices), n_epoch, bs=bs)
    for epoch,row in zip(epochs, rows, strict=True):
        wanted = set(kept[row].nonzero()[:,0].tolist())
        assert len(epoch)==len(set(epoch)) and wanted<=set(epoch) and len(epoch)-len(wanted)==(len(wanted)%bs==1)
        assert epoch!=sorted(epoch)

@pytest.mark.parametrize('other', [MixUp(.4), CPUMixedPrecision(), GradientAccumulation(24)], ids=lambda cb: cb.name)
def test_other_callbacks_leave_the_choice_alone(other):
    "As the card says"
    choices,kept = some_choices(learner())
    learn = quiet_fit(learner(net=linear(), cbs=[ReplayChoicesCallback(choices), other]), 4)
    trained = learn.selection.stats.query('step>=0').groupby('epoch').trained.sum().tolist()
    assert trained==[n+(n%16==1) for n in kept.sum(1).tolist()] # no item trains alone

def test_suspects_are_left_out_of_what_was_recorded():
    choices,kept = some_choices(learner(), p=1.)
    learn = quiet_fit(learner(net=linear(), cbs=[ReplayChoicesCallback(choices, noise_quantile=.5)]), 6)
    suspects = len(learn.selection.suspects)
    assert suspects and learn.selection.stats.query('step>=0').groupby('epoch').trained.sum().min()<100

def test_what_is_left_out_is_never_read():
    "Each of the hundred for its target, which the fingerprint asks for, and three of them twice; then what is kept in each epoch"
    choices,kept = some_choices(learner(), 2)
    read,_,epochs = reads_and_runs(learner(net=linear(), cbs=[ReplayChoicesCallback(choices), Diary()]), 4)
    read.subtract([*range(100), 0, 1, 2])
    assert +read==Counter(sum(map(items_of, epochs), [])) and min(read.values())==0
    assert all(len(set(items_of(e))-set(kept[i//2].nonzero()[:,0].tolist()))<=1 for i,e in enumerate(epochs))

def test_a_file_keeps_them(tmp_path):
    learn = learner()
    choices,kept = some_choices(learn, 30)
    choices.save(tmp_path/'c.npz')
    again = Choices.load(tmp_path/'c.npz')
    assert torch.equal(torch.stack(list(again)), kept) and again.dataset==choices.dataset and repr(again)==repr(choices) and f'{kept.float().mean():.0%}' in repr(again)
    assert (tmp_path/'c.npz').stat().st_size<30*13+1000
    a,b = (loaded(ReplayChoicesCallback(o, seed=0), 3) for o in (choices, str(tmp_path/'c.npz')))
    assert a==b

def test_a_replay_is_pickled_and_exported_with_its_learner(tmp_path):
    learn = learner(net=linear())
    choices,kept = some_choices(learn)
    learn.replay_choices(choices)
    copy = pickle.loads(pickle.dumps(quiet_fit(learn, 4)))
    assert torch.equal(torch.stack(list(copy.selection.choices)), kept)
    a,b = (hash_of(quiet_fit(o, 4).model) for o in (learn, copy) if not set_seed(5))
    assert a==b

@pytest.mark.parametrize('stop', [1,2,3])
def test_a_stopped_replay_goes_on_with_its_epoch(stop):
    choices,kept = some_choices(learner())
    def run(start, until):
        class Stop(Callback):
            order,run_valid = 90,False
            def before_epoch(self):
                if self.epoch==until: raise CancelFitException
        learn = learner(net=linear(), cbs=[ReplayChoicesCallback(choices), Diary(), Stop()])
        quiet_fit(learn, 4, start_epoch=start)
        return [set(items_of(e)) for e in learn.diary.epochs if e]
    whole,first,rest = run(0, 4),run(0, stop),run(stop, 4)
    for epoch,row in zip(first+rest, kept, strict=True):
        wanted = set(row.nonzero()[:,0].tolist())
        assert wanted<=epoch and len(epoch-wanted)<=1
    assert len(whole)==4

def test_another_dataset_is_refused():
    choices,_ = some_choices(learner())
    with pytest.raises(ValueError, match='got a training set of 90 items, wanted 100'): quiet_fit(learner(n=122, cbs=[ReplayChoicesCallback(choices)]), 1)
    other = learner(cbs=[ReplayChoicesCallback(choices)])
    x,y = other.dls.train.dataset.tensors
    y[50] = (y[50]+1)%3
    with pytest.raises(ValueError, match='other targets than the recorded one'): quiet_fit(other, 1)

@pytest.mark.parametrize('targets', [[torch.tensor(1.5)]*3, ['cat','dog','cat'], [('a','b'),(),('c',)], [torch.ones(2, 2)]*3, [{'k': 1}]*3, [None]*3, [(torch.ones(2, 4),torch.ones(2))]*3], ids=str)
def test_the_fingerprint_is_of_length_and_targets(targets):
    def ds(ys): return [(torch.rand(2), y) for y in ys]
    assert fingerprint(ds(targets))==fingerprint(ds(targets))!=fingerprint(ds(targets[:2]))
    assert fingerprint(ds(targets))!=fingerprint(ds([*targets[:2],'other']))

def test_random_targets_do_not_tell_datasets_apart():
    class Noisy(list):
        def __getitem__(self, i): return torch.rand(2),torch.rand(2)
    a,b = fingerprint(Noisy(range(5))),fingerprint(Noisy(range(5)))
    assert a==b!=fingerprint(Noisy(range(6)))

def test_a_proxy_that_diverged_is_an_error():
    net = proxy()
    with torch.no_grad(): net.net.weight.fill_(float('nan'))
    with pytest.raises(ValueError, match='no finite loss from the proxy in epoch 0'): record_choices(learner(), net, lambda small: small.fit(1))

def test_plain_training_if_all_is_kept():
    def weights(cbs): return hash_of(quiet_fit(table_learner(cbs=cbs), 3).model)
    ds = table_learner().dls.train_ds
    assert weights([])==weights([ReplayChoicesCallback(Choices(torch.ones(2, 100, dtype=torch.bool), fingerprint(ds)))])

def test_the_recording_is_paid_for():
    "A look of the proxy at each of two epochs' items, a step on 12 of 25 in every fourth batch, and 48 items an epoch for the learner; each of the two has tried a batch first"
    def recorded(learn): return ReplayChoicesCallback(record_choices(learn, mlp(), lambda small: small.fit(2), every=4), auto=False)
    def get_learner():
        learn = table_learner(bs=25)
        learn.metrics = [lambda pred, y: (pred.argmax(1)!=y).float().mean()]
        return learn
    runs = compare(get_learner, {'replayed': recorded}, epochs=2, seeds=1, plot=False)
    look = (2*(4*8+8*3))/(4*(4*8+8*3)+2*8*3)
    assert runs.compute.iloc[-1]==pytest.approx(250*look+2*12+2*48)

OTHER_FILES = dict(text=lambda f: f.write(b'hello'), empty=lambda f: None, array=lambda f: np.save(f, np.arange(3)), archive=lambda f: np.savez(f, x=1), of_other_kinds=lambda f: np.savez(f, packed=1, n=[1,2], dataset=3),
    pickled=lambda f: np.savez(f, packed=np.array([{}], dtype=object), n=1, dataset='a'), pickle=lambda f: pickle.dump({}, f))

@pytest.mark.parametrize('cut', [None, -30], ids=['whole','cut short'])
@pytest.mark.parametrize('kind', OTHER_FILES)
def test_another_file_is_refused_in_one_way(kind, cut, tmp_path):
    "And nobody is told to unpickle it"
    with open(tmp_path/'choices.npz', 'wb') as f: OTHER_FILES[kind](f)
    (tmp_path/'choices.npz').write_bytes((tmp_path/'choices.npz').read_bytes()[:cut])
    with pytest.raises(ValueError) as e: learner().replay_choices(tmp_path/'choices.npz')
    assert str(e.value)==f'choices: got {tmp_path/"choices.npz"}, wanted a file that Choices.save wrote; record one with record_choices.' and e.value.__suppress_context__

def test_a_file_that_is_cut_short_is_refused(tmp_path):
    path,(choices,_) = tmp_path/'choices.npz',some_choices(learner())
    choices.save(path)
    assert torch.equal(Choices.load(path)[3], choices[3]) and Choices.load(path).dataset==choices.dataset
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ValueError, match='wanted a file that Choices.save wrote'): Choices.load(path)

def test_what_cannot_be_recorded():
    learn = learner()
    with pytest.raises(ValueError, match='trained no epoch'): record_choices(learn, proxy(), lambda small: None)
    for kwargs in (dict(keep=0), dict(keep=1.5), dict(every=0)):
        with pytest.raises(ValueError): record_choices(learn, proxy(), lambda small: small.fit(1), **kwargs)
    with pytest.raises(FileNotFoundError): ReplayChoicesCallback('nowhere.npz')
    with pytest.raises(TypeError, match='fit: got 5, wanted a function'): record_choices(learn, proxy(), 5)
    with pytest.raises(TypeError, match='proxy: got None, wanted a model'): record_choices(learn, None, lambda small: small.fit(1))
    with pytest.raises(TypeError, match='choices: got None, wanted what record_choices returns'): ReplayChoicesCallback(None)

class Lone:
    "A dataset whose targets can be read alone; counts the items that are loaded"
    def __init__(self, labels, alone=True):
        self.y,self.loaded = labels,0
        if alone: self.labels = labels
    def __len__(self): return len(self.y)
    def __getitem__(self, i):
        self.loaded += 1
        return torch.zeros(1),self.y[i]

def test_two_items_that_are_swapped_are_seen():
    "Any two of them where targets can be read alone; nothing is loaded for that"
    labels = list(range(300))
    swapped = labels[:]
    swapped[7],swapped[11] = swapped[11],swapped[7]
    kept,other = Lone(labels),Lone(swapped)
    assert fingerprint(kept)==fingerprint(Lone(labels))!=fingerprint(other) and not kept.loaded and not other.loaded

def test_a_hundred_items_are_loaded_once_where_targets_need_it():
    "And three of them twice, to see whether targets are random"
    ds = Lone(list(range(300)), alone=False)
    assert fingerprint(ds)==fingerprint(Lone(list(range(300)), alone=False)) and ds.loaded<=106

def test_numbers_are_not_read_as_one(): assert fingerprint(Lone([5,5,5,1,11]))!=fingerprint(Lone([5,5,5,11,1]))
