"""Is the gain on easy data there on more seeds, in other networks, on another machine? `python -m studies.elsewhere`
trains what is not stored, results/easy_data_elsewhere.csv, and writes what all of it amounts to,
results/easy_data_confirmed.csv"""
from functools import partial
from typing import NamedTuple

import pandas as pd
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import error_rate
from fastai.optimizer import Adam
from fastcore.script import call_parse
from torch import nn

from selback.bench.compare import compare, machine
from selback.bench.findings import Difference, paired, signed
from studies.easy_data import Ease, first, stored_ends, told_of, WrongItems
from studies.experiments import once, results_folder, rows_with, scale
from studies.items_noise import confirmed_by, noise_of_items, widened

path = results_folder/'easy_data_elsewhere.csv'
confirmed_path = results_folder/'easy_data_confirmed.csv'

cell = first['mnist_14']
n_valid = 10_000

# Other networks, with another optimizer

def perceptron():
    return nn.Sequential(nn.Flatten(), nn.Linear(196,256), nn.ReLU(), nn.Linear(256,128), nn.ReLU(), nn.Linear(128,10))

def pooled():
    "Convolutions of 24, 24 and 48 channels with pooling between them, and no BatchNorm"
    def block(n_in, n): return nn.Conv2d(n_in, n, 3, padding=1),nn.GELU(),nn.MaxPool2d(2)
    return nn.Sequential(*block(1,24), *block(24,24), *block(24,48), nn.Flatten(), nn.Linear(48,10))

class Net(NamedTuple):
    "A network, and how it is trained"
    words:str
    make:object
    opt:object
    rates:tuple

nets = dict(
    perceptron=Net('a perceptron of three layers, Adam', perceptron, Adam, (.001,.002,.004,.008,.016)),
    pooled=Net('convolutions with pooling and GELU, Adam', pooled, Adam, (.002,.004,.008,.016)))

def learner_of(net):
    made = nets[net]
    return Learner(cell.dls(), made.make(), CrossEntropyLossFlat(), opt_func=made.opt, metrics=error_rate,
        cbs=[Ease(), WrongItems()])

columns = ('net','lr','method','seed','epoch','seconds','cpu_seconds','backpropagated','compute','valid_loss','error',
    'hardest_tenth','device','wrong')

def end_of(net, method, seed, lr): # a row
    "The end of a run, unless it is stored"
    def make():
        budget = dict(epochs=2) if scale()=='tiny' else dict(compute=cell.compute)
        rows = compare(partial(learner_of, net), [method], seeds=[seed], lr=lr, plot=False, tell_controls=False,
            watch=told_of, **budget)
        print(net, method, seed, lr, f'{rows.error.iloc[-1]:.4f}', flush=True)
        return rows.tail(1).assign(net=net, lr=lr, device=machine())[[*columns]]
    return once(path, dict(net=net, method=method, seed=seed, lr=lr), make).iloc[-1]

def rate_of(net)->float:
    "Plain training's best, by its loss on the validation set"
    return min(nets[net].rates, key=lambda lr: end_of(net, 'none', 0, lr)['valid_loss'])

seeds = range(10)
ours = 'favor_hard(beta=2)'
methods = 'none',ours

def todo():
    "Network, method and seed of each run"
    for net in nets:
        for seed in seeds: yield from ((net, method, seed) for method in methods)

# What they amount to

def study_runs()->pd.DataFrame:
    "How the study's own runs on MNIST end"
    return rows_with(stored_ends(), cell._asdict())

def runs_in(
    net:str, # One of `nets`
)->pd.DataFrame:
    "How the runs in another network end, at plain training's best rate"
    return rows_with(pd.read_csv(path), dict(net=net, lr=rate_of(net)))

def difference(
    ends:pd.DataFrame, # Such as `study_runs` gives
    method:str, # One of its methods
    measure:str='error', # Or 'valid_loss'
)->Difference: # Its interval counts which items validate, too, where that is known; of losses it is not
    "A method's difference from plain training"
    d = paired(ends, method, measure=measure)
    return widened(d, noise_of_items(ends, method, n_valid)) if measure=='error' else d

def confirmed(
    ends:pd.DataFrame, # Such as `study_runs` gives
    method:str, # One of its methods
    n_seeds:int, # Of the runs elsewhere
)->tuple: # Low, high
    "Where 95 % of the differences in error lie that another machine will find"
    own,plain = (ends[ends.method==m].set_index('seed').error for m in (method,'none'))
    shared = own.index.intersection(plain.index)
    return confirmed_by(own[shared], plain[shared], n_seeds)

study = 'study'
in_words = {study: 'three convolutions, SGD (the study)'} | {name: net.words for name,net in nets.items()}

def amounts()->pd.DataFrame: # A row for each network
    "What all runs amount to: differences from plain training, and what one seed or two will find elsewhere"
    rows = []
    for net,words in in_words.items():
        ends = study_runs() if net==study else runs_in(net)
        found,loss = difference(ends, ours),difference(ends, ours, 'valid_loss')
        will_be = {f'{name}_{end}': value for name,n in dict(one=1, two=2).items()
            for end,value in zip(('low','high'), confirmed(ends, ours, n))}
        rows.append(dict(net=net, words=words, method=ours, plain=ends[ends.method=='none'].error.mean())
            | found._asdict() | {f'loss_{name}': value for name,value in loss._asdict().items()} | will_be)
    return pd.DataFrame(rows)

def table()->pd.DataFrame: # Strings, a row for each network
    "What the runs amount to, for reading"
    def span(row, start): return f'{signed(row[f"{start}low"])} to {signed(row[f"{start}high"])}'
    found = pd.read_csv(confirmed_path)
    rows = [{'error of plain training, %': f'{100*row.plain:.2f}', 'error': f"{signed(row['mean'])} ({span(row, '')})",
        'lower on': f'{row.better} of {row.seeds} seeds',
        'validation loss': f"{signed(row.loss_mean)} ({span(row, 'loss_')})",
        'two seeds elsewhere': span(row, 'two_')} for _,row in found.iterrows()]
    return pd.DataFrame(rows, index=found.words).rename_axis(None)

@call_parse
def main():
    "Train what is not stored yet"
    for net,method,seed in todo(): end_of(net, method, seed, rate_of(net))
    amounts().to_csv(confirmed_path, index=False, float_format='%.5g')
