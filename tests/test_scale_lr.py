"The learning rate by the share of a full batch that trains: what each step is made with, and what it leaves behind"
import contextlib

import pytest, torch
from fastai.callback.core import Callback, CancelStepException
from fastai.callback.training import GradientAccumulation
from fastai.optimizer import SGD
from helpers import *

class Rates(Callback):
    "Notes of each step its rate, its items and its change of the weights, and the rates before and after it"
    order,run_valid = 100,False

    @property
    def rate(self): return self.opt.hypers[0]['lr']

    @property
    def weight(self): return next(self.model.parameters())

    def before_fit(self):
        self.used,self.around = [],[]
        self.sizes,self.changes = [],[]

    def before_batch(self): self.around.append(self.rate)
    def after_loss(self): self.sizes.append(len(self.y))

    def before_step(self):
        self.used.append(self.rate)
        self.before,self.grad = self.weight.clone(),self.weight.grad.clone()

    def after_step(self): self.changes.append((self.weight.detach()-self.before, self.grad))
    def after_batch(self): self.around.append(self.rate)

def trained(*cbs, n_epoch=1, opt_func=partial(SGD, wd=0.), **kwargs):
    learn = table_learner(cbs=[ScaleLR(), Rates(), *cbs], opt_func=opt_func, **kwargs)
    quiet_fit(learn, n_epoch, lr=.1)
    assert set(learn.rates.around)=={.1}=={*learn.recorder.lrs} # restored after each step
    return learn

SIZES = dict(
    top_loss=(lambda: [TopLossCallback(.5, warmup=0)], [8]*6+[2]),
    none=(lambda: [], [16]*6+[4]),
    gathered=(lambda: [TopLossCallback(.25, gather=True, warmup=0)], [16,12]),
    amp=(lambda: [CPUMixedPrecision(), TopLossCallback(.5, warmup=0)], [8]*6+[2]),
    warm_up=(lambda: [SelectiveBackpropCallback(warmup=1)], [16]*6+[4]))

@pytest.mark.parametrize('cbs,sizes', SIZES.values(), ids=SIZES)
def test_a_step_is_made_with_its_share_of_the_rate(cbs, sizes):
    "Gathered: 4 items of each of 6 batches and one of the last, which fills up with its other 3"
    rates = trained(*cbs()).rates
    assert rates.sizes==sizes
    assert rates.used==pytest.approx([.1*n/16 for n in sizes])
    for n,(change,grad) in zip(sizes, rates.changes): torch.testing.assert_close(change, -.1*n/16*grad)

def test_after_gradient_accumulation_the_items_of_a_step_count():
    "8 of each batch train; a step has all that it waited for, and the whole rate, also where that is less than a batch"
    for n_acc,n_steps in ((24, 2), (16, 3), (40, 1), (8, 6), (4, 6)):
        learn = trained(GradientAccumulation(n_acc), TopLossCallback(.5, warmup=0))
        assert learn.rates.used==pytest.approx([.1]*n_steps)

class Cancels(Callback):
    "Cancels the third step, before or after the rate was scaled"
    run_valid = False
    def __init__(self, order): self.order = order
    def before_step(self):
        if self.train_iter==2: raise CancelStepException

@pytest.mark.parametrize('order', [5, 50])
def test_a_cancelled_step_leaves_the_rate_and_counts_no_items(order):
    learn = trained(TopLossCallback(.5, warmup=0), Cancels(order))
    assert learn.rates.used==pytest.approx([.05]*5+[.1*2/16])
    assert len(learn.rates.sizes)==7

def test_the_rate_of_an_interrupted_fit_is_forgotten():
    class Stop(Callback):
        order = 100
        def before_step(self): raise KeyboardInterrupt
    learn = table_learner(cbs=[TopLossCallback(.5, warmup=0), ScaleLR()])
    with contextlib.suppress(KeyboardInterrupt): quiet_fit(learn, 1, lr=1., cbs=Stop())

    rates = Rates()
    quiet_fit(learn, 1, lr=1e-4, cbs=rates)
    assert set(rates.around)=={1e-4}
    assert rates.used==pytest.approx([5e-5]*6+[1e-4*2/16])
