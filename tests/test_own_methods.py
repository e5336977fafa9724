"Methods of one's own: what is refused, what two drivers share, and what a question leaves alone"
import copy
from contextlib import nullcontext

import pytest, torch
from helpers import *
from selback.functional import MemorySampler, StaleLoss, chosen
from torch.nn import functional as F

class Counts(BatchMethod):
    "The first half; counts how often it was asked"
    saved = 'n',
    n = 0
    def choose(self, scores, now):
        self.n += 1
        return Chosen(torch.arange(len(scores)//2))

def known(n=40):
    memory = ItemMemory(n)
    memory.note(torch.arange(n), torch.arange(float(n)))
    return memory

# Names
@pytest.mark.parametrize('name', ['draws','parts','options','choose','scored','saved','learn','score'])
def test_an_option_is_not_called_like_what_every_method_has(name):
    init = eval(f'lambda self, {name}=1, **kwargs: None')
    with pytest.raises(TypeError, match=f'options called {name}, as what every method has'):
        type('Own', (BatchMethod,), dict(__init__=init))

@pytest.mark.parametrize('name', ['warmup','start','interrupt','track_items','scorer'])
def test_an_option_is_not_called_like_one_of_every_selection(name):
    init = eval(f'lambda self, {name}=1, **kwargs: None')
    own = type('Own', (BatchMethod,), dict(__init__=init))
    with pytest.raises(TypeError, match=f'OwnCallback: got options of Own called {name}, as every selection has'):
        with_one_liner(type('OwnCallback', (BatchSelection,), dict(of=own)))

# Kinds
@pytest.mark.parametrize('call,match', [
    (lambda: BatchSelection(TopLoss), 'wanted a method, of BatchMethod; pass an object such as TopLoss'),
    (lambda: BatchSelection(TopLossCallback()), 'got TopLossCallback.*, wanted a method, of BatchMethod; '),
    (lambda: BatchSelection(FavorHard()), 'wanted a method, of BatchMethod; it chooses before loading: EpochSelection'),
    (lambda: EpochSelection(TopLoss()), 'wanted a method, of EpochMethod; it chooses from batches: BatchSelection'),
    (lambda: EpochSelection(lambda scores: scores), 'wanted a method, of EpochMethod; pass an object'),
    (lambda: BatchSelection(), 'BatchSelection: got None, wanted a method'),
    (lambda: MemorySampler(known(), FavorHard), "got <class '.*FavorHard'>, wanted a method, of Method; pass"),
    (lambda: MemorySampler(known(), EarlyLossSampling()), 'which keeps the losses of an early epoch'),
    (lambda: chosen([], mlp(), F.cross_entropy, FavorHard()), 'chosen: got FavorHard.* a method, of BatchMethod'),
    (lambda: chosen([], mlp(), F.cross_entropy, StaleLoss()), 'which must know the items behind a batch')])
def test_what_is_no_method_of_the_kind_is_named(call, match):
    with pytest.raises(TypeError, match=match): call()

def test_groups_that_no_learner_reads_are_asked_for():
    with pytest.raises(ValueError, match='groups: got None, wanted the group of each item'):
        MemorySampler(known(), BalancedSampling())
    sampler = MemorySampler(ItemMemory(100), BalancedSampling([0]*90+[1]*10, seed=0))
    assert sum(i>=90 for i in sampler)>30 # in the first epoch, too, since no loss is wanted

# Two drivers
def test_a_method_with_a_history_trains_in_one_selection():
    method = StaleLoss(n=3)
    quiet_fit(table_learner(cbs=BatchSelection(method, warmup=0)), 1)
    other = table_learner(cbs=BatchSelection(method, warmup=0))
    with pytest.raises(ValueError, match='a method that another selection has trained by, with its history'):
        quiet_fit(other, 1)
    quiet_fit(table_learner(cbs=BatchSelection(copy.deepcopy(method), warmup=0)), 1)

def test_a_sampler_that_is_asked_leaves_a_method_as_it_was():
    method = Counts()
    sampler = MemorySampler(known(), method)
    assert len(sampler)==20
    assert method.n==0
    assert len([*sampler])==20
    assert method.n==1

# Options
def test_what_is_set_of_a_method_holds_from_then_on():
    learn = table_learner().favor_hard(beta=9, seed=0)
    learn.selection.method.max_rest = 1
    quiet_fit(learn, 6)
    assert learn.selection.max_rest==1
    assert learn.selection.memory.rested.max()<=2 # and one more for the epoch that is over

# Weights
def test_an_item_has_one_weight():
    class Twice(EpochMethod):
        weighs = True
        def choose(self, scores, now): return Chosen(torch.tensor([0,0,1,1]), torch.tensor([1.,3.,2.,2.]))
    for driven in (lambda: quiet_fit(table_learner(cbs=EpochSelection(Twice(), warmup=0)), 1),
                   lambda: [*MemorySampler(known(), Twice())]):
        with pytest.raises(ValueError, match='an item that was chosen several times, with different weights'): driven()

# Loops
def test_a_loop_says_when_its_epochs_begin_and_end():
    seen = []
    class Own(TopLoss):
        def begin_epoch(self): seen.append('begin')
        def end_epoch(self, chose_before): seen.append(chose_before)
    method = Own(.5)
    for _ in range(2): [*chosen([class_data(8)], mlp(), F.cross_entropy, method)]
    assert seen==['begin',False]*2

# Devices, and leaving
@pytest.mark.parametrize('other', [None,FavorHardCallback])
def test_a_selection_may_be_taken_off_as_an_epoch_begins(other):
    "By a callback behind it: the epoch trains on all items; another one comes too late for it"
    class TakesOff(Callback):
        order,run_valid = 70,False
        def before_train(self):
            if self.epoch!=1: return
            self.learn.full_batches()
            if other: self.learn.add_cb(other())
    learn = table_learner(cbs=[TopLossCallback(.5, warmup=0), TakesOff()])
    too_late = pytest.raises(ValueError, match='came or went within an epoch')
    with too_late if other else nullcontext(): quiet_fit(learn, 3)
    assert len(learn.recorder.losses)==(7 if other else 3*7)
