"""Which losses should `stale_loss` choose by, once a scored item has trained: those of training, as in the authors'
code, or those of the scoring pass? Digits, with and without dropout, as many epochs: results/stale_losses.csv"""
import pandas as pd, torch
from fastai.data.core import DataLoaders, TfmdDL
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import error_rate
from fastai.torch_core import set_seed
from selback.bench.datasets import get_dls
from selback.callback.methods import StaleLossCallback
from selback.callback.notes import ItemNotes
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

PATH = 'results/stale_losses.csv'

class NotesOfPasses(ItemNotes):
    "Notes the losses of training of epochs that train on all items only; of others those of scoring passes alone"
    def note_step(self):
        memory = self.train.memory
        loss,ewma = memory.loss.clone(),memory.ewma.clone()
        super().note_step()
        if not self.learn.selection.is_selecting: return
        memory.loss.copy_(loss)
        memory.ewma.copy_(ewma)

class OfPassesCallback(StaleLossCallback):
    "Goes by the losses of scoring passes"
    def make_notes(self, track_items): return NotesOfPasses(self.losses, self.method.ema, labels_too=track_items)

WAYS = dict(of_training=StaleLossCallback, of_passes=OfPassesCallback)

def tables():
    "The digits' pixels and labels, to train on and to validate on"
    def table(ds):
        images,labels = zip(*ds)
        pixels = F.avg_pool2d(torch.stack([torch.as_tensor(image).float() for image in images]), 4) # their own 8x8
        return TensorDataset(pixels.flatten(1), torch.tensor([int(label) for label in labels]))
    dls = get_dls('digits')
    return table(dls.train_ds),table(dls.valid_ds)

def train(way, dropout, seed, train_ds, valid_ds, epochs):
    "Validation loss and error of a run, and the items it trained"
    set_seed(seed)
    train_dl = TfmdDL(train_ds, bs=32, shuffle=True, drop_last=True, num_workers=0)
    dls = DataLoaders(train_dl, TfmdDL(valid_ds, bs=512, num_workers=0))
    hidden = nn.Linear(192, 128),nn.BatchNorm1d(128),nn.ReLU(),nn.Dropout(dropout)
    net = nn.Sequential(*hidden, nn.Linear(128, 10))
    cb = WAYS[way](beta=2, n=3)
    learn = Learner(dls, net, CrossEntropyLossFlat(), metrics=error_rate, cbs=cb)
    with learn.no_bar(),learn.no_logging():
        learn.fit_one_cycle(epochs, 1e-2)
        loss,error = learn.validate()
    return dict(way=way, dropout=dropout, seed=seed, valid_loss=loss, error=error, trained=cb.stats.trained.sum())

def main(seeds=range(7), epochs=15, path=PATH):
    data = tables()
    rows = [train(way, dropout, seed, *data, epochs) for seed in seeds for dropout in (0, .6) for way in WAYS]
    runs = pd.DataFrame(rows)
    runs.to_csv(path, index=False, float_format='%.6g')
    print(runs.groupby(['dropout','way'])[['valid_loss','error','trained']].mean().round(4))

if __name__=='__main__': main()
