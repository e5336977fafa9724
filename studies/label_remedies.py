"""What helps where labels are wrong? `python -m studies.label_remedies` trains what is not stored, on 10,000 of
CIFAR-10's images with people's labels: results/label_remedies.csv"""
from copy import deepcopy
from functools import lru_cache

import pandas as pd, torch
from fastai.callback.core import Callback
from fastai.callback.mixup import MixUp
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat, LabelSmoothingCrossEntropyFlat
from fastai.torch_core import set_seed
from fastai.vision.augment import Flip
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from selback.all import FavorHardCallback, WatchItemsCallback
from selback.bench.datasets import PadCrop, small_convnet, tensor_dls
from studies.experiments import once, results_folder, scale
from studies.regimes import cifar_parts, human_labels, sgd
from studies.wrong_labels import logits_of, smaller

path = results_folder/'label_remedies.csv'
rates = .0125,.025,.05,.1
epochs = 1 if scale()=='tiny' else 16

@lru_cache
def parts():
    "Images and rows of CIFAR-10's training set, to train on and to validate on; the test's images and labels"
    (images,_),(test,test_labels) = cifar_parts()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    n,n_valid = (300,100) if scale()=='tiny' else (10_000,2_000)
    train,valid = order[:n],order[n:n+n_valid]
    return (smaller(images[train]),train),(smaller(images[valid]),valid),(smaller(test),test_labels)

class Averaged(Callback):
    "An exponential moving average of the weights, by which is predicted in the end"
    order,run_valid = 80,False
    def before_fit(self):
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(.998), use_buffers=True)
    def after_batch(self): self.ema.update_parameters(self.model)
    def after_fit(self): self.model.load_state_dict(self.ema.module.state_dict())

class Best(Callback):
    "Early stopping: the weights of the epoch with the fewest errors on the validation set, whose labels are people's"
    order = 80
    def before_fit(self): self.error,self.weights = 2.,None
    def after_validate(self):
        error = validation_error(self.learn)
        if error<self.error: self.error,self.weights = error,deepcopy(self.model.state_dict())
    def after_fit(self): self.model.load_state_dict(self.weights)

def _error(learn, images, labels): return float((logits_of(learn, images).argmax(1)!=labels).float().mean())

def validation_error(learn): return _error(learn, *learn.validation)

def train(images, labels, column, seed, lr, cbs=(), loss_func=None, n_epochs=epochs):
    "A learner after a training"
    set_seed(seed)
    valid,rows = parts()[1]
    validation = valid,human_labels(column)[rows]
    dls = tensor_dls((images,labels), (valid[:64],validation[1][:64]), 64, [PadCrop(1),Flip()], n_classes=10)
    learn = Learner(dls, small_convnet(10, .5), loss_func or CrossEntropyLossFlat(), opt_func=sgd, cbs=cbs)
    learn.validation = validation
    with learn.no_bar(),learn.no_logging(): learn.fit_one_cycle(n_epochs, lr)
    return learn

@lru_cache(maxsize=1) # the methods of a seed come one after the other
def suspects(column, seed, lr): # Items, the most suspect first
    "By a training of its own"
    (images,rows),*_ = parts()
    learn = train(images, human_labels(column)[rows], column, seed, lr, WatchItemsCallback())
    return learn.selection.labels.suspects().cpu()

def corrected(labels, truth, items):
    "The first of a list, as they should be"
    labels = labels.clone()
    labels[items] = truth[items]
    return labels

remedies = {
    'plain': {}, 'EMA of weights': dict(cbs=Averaged), 'early stopping': dict(cbs=Best), 'MixUp': dict(cbs=MixUp),
    'label smoothing .1': dict(loss_func=lambda: LabelSmoothingCrossEntropyFlat(eps=.1)),
    'label smoothing .3': dict(loss_func=lambda: LabelSmoothingCrossEntropyFlat(eps=.3)),
    'favor_hard': dict(cbs=FavorHardCallback)}
lists = 'without suspects','100 corrected','500 corrected','as many corrected as are wrong','all right'

def run(column, method, seed, lr):
    "A row: errors on the test, in whose labels nothing is wrong, and on the validation set"
    (images,rows),_,test = parts()
    labels,truth = human_labels(column)[rows],cifar_parts()[0][1][rows]
    kwargs = {name: make() for name,make in remedies.get(method, {}).items()}
    if method in lists:
        order,n_wrong = suspects(column, seed, lr),int((labels!=truth).sum())
        if method=='without suspects': images,labels = images[order[n_wrong:]],labels[order[n_wrong:]]
        elif method=='all right': labels = truth
        else:
            n = dict(zip(lists[1:4], (100,500,n_wrong)))[method]
            labels = corrected(labels, truth, order[:n])
    n_epochs = 2*epochs-1 if method=='favor_hard' else round(epochs*len(rows)/len(images)) # of equal compute
    learn = train(images, labels, column, seed, lr, n_epochs=n_epochs, **kwargs)
    error = _error(learn, *test)
    return dict(labels=column, method=method, seed=seed, lr=lr, error=error, valid_error=validation_error(learn))

def row_of(column, method, seed, lr):
    "A run, unless it is stored"
    def make():
        row = run(column, method, seed, lr)
        print(*row.values(), flush=True)
        return pd.DataFrame([row])
    return once(path, dict(labels=column, method=method, seed=seed, lr=lr), make).iloc[0]

def best_rate(column): # Of plain training, by the validation set
    return min(rates, key=lambda lr: row_of(column, 'plain', 0, lr)['valid_error'])

def main(seeds=range(2), columns=('worst','aggregate','random1')):
    for column in columns:
        lr = best_rate(column)
        for seed in seeds:
            for method in (*remedies,*lists): row_of(column, method, seed, lr)

if __name__=='__main__': main()
