"The learning rate by the share of a full batch that trains: what each step is made with, and what it leaves behind"
import contextlib

import pytest, torch
from fastai.callback.core import Callback, CancelStepException
from fastai.callback.training import GradientAccumulation
from fastai.optimizer import SGD, OptimWrapper
from helpers import *

class Rates(Callback):
    "Notes the rate that each step is made with, its items and its change of the weights, and the rate before and after it"
    order,run_valid = 100,False
    def before_fit(self): self.used,self.around,self.sizes,self.changes = [],[],[],[]
    def before_batch(self): self.around.append(self.opt.hypers[0]['lr'])
    def after_loss(self): self.sizes.append(len(self.y))
    def before_step(self):
        self.used.append(self.opt.hypers[0]['lr'])
        self.before,self.grad = (next(self.model.parameters()).clone(),next(self.model.parameters()).grad.clone())
    def after_step(self): self.changes.append((next(self.model.parameters()).detach()-self.before, self.grad))
    def after_batch(self): self.around.append(self.opt.hypers[0]['lr'])

def trained(*cbs, n_epoch=1, **kwargs):
    learn = quiet_fit(table_learner(cbs=[ScaleLR(), Rates(), *cbs], opt_func=kwargs.pop('opt_func', partial(SGD, wd=0.)), **kwargs), n_epoch, lr=.1)
    assert set(learn.rates.around)=={.1}=={*learn.recorder.lrs} # restored after each step
    return learn

@pytest.mark.parametrize('cbs,sizes', [(lambda: [TopLossCallback(.5, warmup=0)], [8]*6+[2]), (lambda: [], [16]*6+[4]), (lambda: [TopLossCallback(.25, gather=True, warmup=0)], [16,12]),
    (lambda: [CPUMixedPrecision(), TopLossCallback(.5, warmup=0)], [8]*6+[4]), (lambda: [SelectiveBackpropCallback(warmup=1)], [16]*6+[4])], ids=['top_loss','none','gathered','amp','warm-up'])
def test_a_step_is_made_with_its_share_of_the_rate(cbs, sizes):
    "Gathered: 4 items of each of 6 batches and one of the last, which fills up with its other 3"
    learn = trained(*cbs())
    assert learn.rates.sizes==sizes and learn.rates.used==pytest.approx([.1*n/16 for n in sizes])
    for n,(change,grad) in zip(sizes, learn.rates.changes): torch.testing.assert_close(change, -.1*n/16*grad)

def test_after_gradient_accumulation_the_items_of_a_step_count():
    "8 of each batch train, and a step has all that it waited for: its rate is the whole one, also where it waited for fewer than a full batch"
    for n_acc,n_steps in ((24, 2), (16, 3), (40, 1), (8, 6), (4, 6)):
        assert trained(GradientAccumulation(n_acc), TopLossCallback(.5, warmup=0)).rates.used==pytest.approx([.1]*n_steps)

class Cancels(Callback):
    "Cancels the third step, before or after the rate was scaled"
    run_valid = False
    def __init__(self, order): self.order = order
    def before_step(self):
        if self.train_iter==2: raise CancelStepException

@pytest.mark.parametrize('order', [5, 50])
def test_a_cancelled_step_leaves_the_rate_and_counts_no_items(order):
    learn = trained(TopLossCallback(.5, warmup=0), Cancels(order))
    assert learn.rates.used==pytest.approx([.05]*5+[.1*2/16]) and len(learn.rates.sizes)==7

def test_the_rate_of_an_interrupted_fit_is_forgotten():
    class Stop(Callback):
        order = 100
        def before_step(self): raise KeyboardInterrupt
    learn = table_learner(cbs=[TopLossCallback(.5, warmup=0), ScaleLR()])
    with contextlib.suppress(KeyboardInterrupt): quiet_fit(learn, 1, lr=1., cbs=Stop())
    rates = Rates()
    quiet_fit(learn, 1, lr=1e-4, cbs=rates)
    assert set(rates.around)=={1e-4} and rates.used==pytest.approx([5e-5]*6+[1e-4*2/16])

def test_schedules_and_optimizers_of_pytorch():
    learn = table_learner(n=32+96, cbs=[ScaleLR(), Rates(), TopLossCallback(.5, warmup=0)], opt_func=partial(OptimWrapper, opt=torch.optim.SGD))
    quiet_fit(learn, 2, 'fit_one_cycle', lr_max=.1)
    plain = quiet_fit(table_learner(n=32+96, opt_func=partial(OptimWrapper, opt=torch.optim.SGD)), 2, 'fit_one_cycle', lr_max=.1)
    assert learn.recorder.lrs==plain.recorder.lrs and learn.rates.used==pytest.approx([lr/2 for lr in plain.recorder.lrs])
