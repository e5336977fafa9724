"A batch size that a callback changes counts from the next epoch on, as in plain training"
from collections import Counter

import pytest, torch
from fastai.callback.core import Callback
from helpers import *

N = 100 # items: batches of 16 and of 32 end with one of 4

class Grows(Callback):
    "Sets the batch size that the epochs after the first have"
    run_valid = False
    def __init__(self, when, order=0, bs=32): self.when,self.order,self.bs = when,order,bs

    def grow(self): self.dls.train.bs = self.bs

    def before_train(self):
        if self.when=='before_train' and self.epoch==1: self.grow()

    def after_batch(self):
        if self.epoch==0 and self.when=='middle' and self.iter>=2: self.grow()
        if self.epoch==0 and self.when=='last' and self.iter==self.n_iter-1: self.grow()

WHEN = 'last','middle','before_train'

class Steps(Spy):
    "The items of each step, epoch by epoch, and what a method is told of a batch's size"
    def before_fit(self): self.epochs,self.sizes = [],[]

    def before_train(self): self.epochs.append([])

    def after_loss(self):
        self.epochs[-1].append(numbers(self.x))
        selection = self.learn.selection
        if selection: self.sizes.append(self.learn.dl.size if selection.is_watching else selection.now().bs)

def grown(cbs=(), when='last', n_epoch=3, **kwargs):
    learn = numbered_learner(cbs=[*cbs, Grows(when), Steps()], **kwargs)
    return trained_only(learn, n_epoch)

def sizes(learn): return [[*map(len, epoch)] for epoch in learn.steps.epochs]

def keeps_all(cls):
    "A selection that leaves nothing out, as it is in its warm-up"
    return cls() if cls is WatchItemsCallback else cls(warmup=9)

@pytest.mark.law
@pytest.mark.parametrize('when', WHEN)
@pytest.mark.parametrize('cls', PATHS.values(), ids=PATHS)
def test_steps_are_those_of_plain_training_where_all_is_kept(cls, when):
    plain,ours = grown(when=when),grown([keeps_all(cls)], when)
    assert sizes(ours)==sizes(plain)==[[16]*6+[4], [32]*3+[4], [32]*3+[4]]
    assert ours.steps.epochs==plain.steps.epochs
    assert ours.steps.sizes==[16]*7+[32]*8
    assert same(*map(weights, (plain,ours)))

SELECTING = {path: cls for path,cls in PATHS.items() if path!='watched'}

@pytest.mark.law
@pytest.mark.parametrize('when', WHEN)
@pytest.mark.parametrize('cls', SELECTING.values(), ids=SELECTING)
def test_batches_of_a_selecting_epoch_have_its_size(cls, when):
    "And what is remembered is of the items that trained"
    learn = grown([cls(warmup=0, track_items=True)], when)
    stats = learn.selection.stats
    for epoch,bs in enumerate([16, 32, 32]):
        batches = learn.steps.epochs[epoch]
        assert max(map(len, batches))<=bs
        of_epoch = stats[stats.epoch==epoch]
        assert of_epoch.trained.sum()==sum(map(len, batches))
        assert of_epoch.query('step>=0').seen.max()<=bs
        assert of_epoch.seen.sum()==N
        draws = cls in (PrioritizedSamplingCallback,ImportanceSamplingCallback)
        if not draws: assert max(Counter(sum(batches, [])).values())==1
    picked = Counter(i for epoch in learn.steps.epochs for batch in epoch for i in batch)
    if cls is not ImportanceSamplingCallback: # with company of weight 0
        assert learn.selection.memory.picked.tolist()==[picked[i] for i in range(N)]

@pytest.mark.parametrize('when', WHEN)
@pytest.mark.parametrize('bs', [33, 8])
def test_no_item_of_a_choice_is_alone_in_its_batch(when, bs):
    "A plan goes by the size of its own epoch: 66 of 33 and 34 of 33, 25 of 8"
    for n in (67, 34, 25):
        def first_ones(idx, now): return Chosen(torch.arange(n)) if now.epoch else None
        learn = numbered_learner(cbs=[EpochSelection(ByPlace(first_ones), warmup=0), Grows(when, bs=bs), Steps()])
        epochs = sizes(trained_only(learn, 3))
        assert all(min(epoch)>1 for epoch in epochs)
        assert {sum(epoch) for epoch in epochs[1:]}=={n+(n%bs==1)}

@pytest.mark.parametrize('when', WHEN)
def test_a_loader_that_drops_its_last_batch_has_full_ones(when):
    def half(idx, now): return Chosen(torch.arange(57)) if now.epoch else None
    learn = numbered_learner(cbs=[EpochSelection(ByPlace(half), warmup=0), Grows(when), Steps()], drop_last=True)
    assert sizes(trained_only(learn, 3))==[[16]*6, [32], [32]]
