"A small model that chooses for the large one, as it trains or by choices that are recorded (airbench, Jordan 2024)"
from contextlib import contextmanager
from copy import copy

import torch
from fastai.callback.core import Callback, CancelBatchException, CancelValidException
from fastai.learner import Learner
from fastai.torch_core import num_distrib
from torch import Tensor, nn

from selback.callback.attach import with_one_liner
from selback.callback.batch import BatchSelection
from selback.callback.selection import EpochSelection
from selback.callback.learner import base_loss
from selback.callback.loaders import check_loader, own_loader
from selback.core.checks import check_range, error_text
from selback.core.losses import preserved
from selback.core.method import EpochMethod
from selback.core.policies import Chosen, at_least_two
from selback.core.untouched import fixed_random
from selback.methods.top_loss import TopLoss

class EveryNth(Callback):
    "Train on every so many batches only"
    def __init__(self,
        every:int, # Train on one batch in this many
        order:float=-20., # Where among the callbacks: those of a lower order prepare each batch
    ):
        self.every = check_range('every', every, 1, whole=True)
        self.order = order

    def before_batch(self):
        if self.training and self.iter%self.every:
            self.learn.yb = () # so that `Recorder` leaves the batch out
            raise CancelBatchException

class _NoValidation(Callback):
    def before_validate(self): raise CancelValidException

@contextmanager
def _same_shuffling(loader):
    "Within the context a loader may be read; after it, it shuffles as if nobody had"
    rng,generator = copy(getattr(loader, 'rng', None)),getattr(loader, 'generator', None)
    state = None if generator is None else generator.get_state()
    try: yield
    finally:
        if rng is not None: loader.rng = rng
        if state is not None: generator.set_state(state)

@contextmanager
def proxy_learner(
    learn:Learner, # The learner whose data, loss function and optimizer are used
    proxy, # An untrained model that takes the same inputs and gives predictions of the same shape
    cbs=(), # Callbacks
):
    "A silent learner, within a context, that trains on the stream of another one, whose random states are put back"
    if not isinstance(proxy, nn.Module):
        raise TypeError(error_text('proxy', repr(proxy), 'a model, as small_resnet(10) makes one'))

    loader,loss_func = own_loader(learn.dls.train),base_loss(learn)
    with _same_shuffling(loader),fixed_random(),preserved(loss_func):
        small = Learner(learn.dls, proxy, loss_func=loss_func, opt_func=learn.opt_func, lr=learn.lr,
            cbs=[*cbs, _NoValidation()])
        with small.no_bar(),small.no_logging(): yield small

def train_proxy(
    learn:Learner, # The learner whose data, loss function and optimizer are used
    proxy, # An untrained model that takes the same inputs and gives predictions of the same shape
    n_epoch:int=1, # Epochs
    lr:float|None=None, # Learning rate; None: that of `learn`
    every:int=1, # Train on one batch in this many
): # `proxy`, trained, for `scorer=`
    "Train a small model on the learner's own stream of batches, to choose by it (airbench)"
    check_range('n_epoch', n_epoch, 1, whole=True)
    if lr is not None: check_range('lr', lr, 0, above=True)
    with proxy_learner(learn, proxy, [EveryNth(every)]) as small: small.fit(n_epoch, lr)
    return proxy

class _Recorder(TopLoss):
    "Notes what is kept of each batch"
    needs_items = True

    def __init__(self, keep):
        super().__init__(keep)
        self.kept = [] # a mask of all items for each epoch
        self.n = None # of the dataset

    def begin_epoch(self): self.is_new = True

    def choose(self, scores, now):
        if not scores.isfinite().any():
            got = f'no finite loss from the proxy in epoch {now.epoch}'
            raise ValueError(error_text('record_choices', got, 'one that learns', 'train it at a lower rate'))

        if self.is_new: self.kept.append(self.kept[-1].clone() if self.kept else torch.ones(self.n, dtype=torch.bool))
        self.is_new = False
        chosen = super().choose(scores, now)
        kept,idx = self.kept[-1],now.idx.cpu()
        kept[idx] = False
        kept[idx[at_least_two(chosen, scores).rows.cpu()]] = True
        return chosen

def record_choices(
    learn:Learner, # The learner whose data, loss function and optimizer are used
    proxy, # An untrained model that takes the same inputs and gives predictions of the same shape
    fit, # A function that trains a learner, in one fit, as the large model will be trained
    keep:float=.5, # Share of each batch to keep
    every:int=4, # The proxy trains on one batch in this many
)->Tensor: # True for what each epoch that the proxy trained keeps, shape (epochs, items)
    "Record which items are the hardest by the losses of a small model, trained on the learner's own batches (airbench)"
    if num_distrib()>1:
        remedy = 'record the choices before, in a process of its own'
        raise ValueError(error_text('record_choices', f'{num_distrib()} processes', 'one', remedy))
    example = 'as in lambda small: small.fit_one_cycle(10)'
    if not callable(fit): raise TypeError(error_text('fit', repr(fit), f'a function that trains a learner, {example}'))

    recorder = _Recorder(keep)
    recorder.n = check_loader(learn.dls.train).n
    cb = BatchSelection(recorder, warmup=0)
    with proxy_learner(learn, proxy, [cb, EveryNth(every, cb.order+1)]) as small: fit(small)

    if not recorder.kept:
        raise ValueError(error_text('record_choices', 'a `fit` that trained no epoch', f'one at least, {example}'))
    return torch.stack(recorder.kept)

class ReplayChoices(EpochMethod):
    "Load what recorded choices keep"
    def __init__(self,
        choices, # As `record_choices` returns them
        **kwargs
    ):
        super().__init__(**kwargs)
        self.choices = choices

    def choose(self, scores, now):
        n_recorded = len(self.choices)
        kept = self.choices[min(int(now.pct*n_recorded+1e-9), n_recorded-1)].to(now.idx.device)
        return Chosen(kept[now.idx].nonzero()[:,0])

@with_one_liner("Train on the items that recorded choices keep")
class ReplayChoicesCallback(EpochSelection):
    "Load what recorded choices keep (airbench)"
    of,defaults = ReplayChoices,dict(warmup=0)

    def before_fit(self):
        super().before_fit()
        if self.learn.lock.locked(): return # it validates
        n,n_recorded = len(check_loader(self.dls.train).dataset),self.method.choices.shape[1]
        if n!=n_recorded:
            got,wanted = f'a training set of {n} items',f'{n_recorded}, as in the recorded one'
            raise ValueError(error_text('replay_choices', got, wanted, 'record its choices anew'))
