"""Do the losses of a quarter of a training tell whether choosing will pay? `python -m studies.outlook` looks at what is
not stored yet: results/outlook.csv; the rule is that of `selback.core.outlook`"""
from functools import partial
from typing import NamedTuple

import numpy as np, pandas as pd
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import error_rate
from fastcore.script import call_parse

from selback.all import FavorHardCallback, WatchItemsCallback
from selback.bench.compare import compare, get_dls, get_model
from selback.core.outlook import hardest_tenth
from studies import easy_data, photographs, shortcuts
from studies.experiments import once, results_folder, scale
from studies.regimes import regimes

path = results_folder/'outlook.csv'
own_path = results_folder/'outlook_own.csv'
at = .25 # of a training
pays = .03 # the least share of the error by which `favor_hard` is lower, or it doesn't pay

# Cells of the study of easy data: the gain, and what the losses told

by = [*easy_data.of_cell,'seed']

def _a_quarter_in():
    "Of each plain training the first epoch that ends a quarter into it"
    plain = pd.read_csv(easy_data.plain_path)
    there = plain[plain.compute>=.99*at*plain.n*plain.epochs]
    return there.sort_values('epoch').groupby([*by,'lr'], as_index=False).first()

def gains(
    method:str='favor_hard',
)->pd.DataFrame: # A row for each cell: its `gain`, in `seeds`, and what plain training told a quarter in, and at last
    "How much lower the error of a method is than that of plain training, in each cell that ran both, but not on digits"
    ends = easy_data.stored_ends()
    plain,chosen = (ends[ends.method==o][[*by,'lr','error']] for o in ('none',method))
    both = chosen.merge(plain, on=[*by,'lr'], suffixes=('','_plain'))
    told = 'hardest_tenth','train_error'
    both = both.merge(_a_quarter_in()[[*by,'lr',*told]], on=[*by,'lr'])
    both = both[both.data!='digits'] # of 360 images that validate it, one is .3 %
    by_cell = both.groupby(easy_data.of_cell, sort=False)
    means = by_cell[['error','error_plain',*told]].mean()
    found = dict(gain=1-means.error/means.error_plain, seeds=by_cell.seed.nunique(), final_error=means.error_plain)
    return pd.DataFrame(found).join(means[[*told]]).dropna().reset_index()

# The rule

def fitted(df)->float: # Half-way between two cells
    "The threshold with the fewest misses"
    shares = np.sort(df.hardest_tenth.unique())
    between = (shares[1:]+shares[:-1])/2
    misses = [((df.hardest_tenth>=t)!=(df.gain>=pays)).sum() for t in between]
    best = np.flatnonzero(np.array(misses)==min(misses))
    return float(between[best[len(best)//2]])

def halves(df): # Two tables
    "Every other cell, from the most even losses to the most uneven"
    ordered = df.sort_values('hardest_tenth')
    return ordered.iloc[::2],ordered.iloc[1::2]

# Other data, whose gains are in results/comparisons.csv

_image = partial(photographs.learner, full_size=False)

def _digits(): return Learner(get_dls('digits', 64), get_model('small_resnet', 10), CrossEntropyLossFlat(),
    metrics=error_rate)

def _regime(name):
    "What a regime trains plainly, at which rate and budget"
    regime = regimes[name]()
    return regime.parts['all'][0],regime.lr,regime.compute

def _shortcut(name): return shortcuts.parts[name].learner,shortcuts.best_rate(name),shortcuts.parts[name].compute

unseen = { # where it stands in the comparisons: a function that makes learner, rate and compute
    'a red border, 95 %': partial(_shortcut, 'border_95'),
    'a red border, 98 %': partial(_shortcut, 'border_98'),
    'a red border, 99.5 %': partial(_shortcut, 'border_995'),
    'a red border, 98 %, 5 % of the labels wrong': partial(_shortcut, 'border_98_wrong'),
    'corruptions, 98 %': partial(_shortcut, 'corrupted'),
    'coloured digits, 95 %': partial(_shortcut, 'digits'),
    'rare kinds, no shortcut': partial(_shortcut, 'rare_kinds'),
    'CIFAR-10, 20,000 images at 16x16, no shortcut': partial(_shortcut, 'ordinary'),
    'china.jpg, at the best rate': lambda: (partial(_image, 'china'),.016,1_228_800),
    'flower.jpg, at the best rate': lambda: (partial(_image, 'flower'),.016,1_228_800),
    'digits, 8 epochs, ten times the rate': lambda: (_digits,.01,10_000),
    'a long tail of classes': partial(_regime, 'long_tail'),
    '40 % wrong labels, from people': partial(_regime, 'noise_40'),
    '9 % wrong labels, from people': partial(_regime, 'noise_9'),
    'near-duplicates': partial(_regime, 'near_duplicates'),
    'rare kinds, hidden': partial(_regime, 'hidden_groups'),
    'CIFAR-10, 20,000 images, 5 epochs, a larger network': partial(_regime, 'proxy'),
    'segmentation, rare classes': partial(_regime, 'segmentation')}

class _Enough(Exception): "What was to be seen of a training is seen"

def a_quarter_in(
    get_learner, # A function without arguments
    method, # A function that returns a selection that remembers losses
    lr:float,
    compute:float, # Of a whole training
)->float: # Of the loss; NaN where it is not told
    "The share that the hardest tenth of the items has, as a selection remembers them a quarter into a training"
    found = []
    def watch(learn):
        memory = getattr(learn.selection, 'memory', None)
        if memory is None or learn.cost_log.spent['compute']<.99*at*compute: return {}
        found.append(hardest_tenth(memory.loss))
        raise _Enough('a quarter')
    quietly = dict(plot=False, tell_controls=False)
    try: compare(get_learner, dict(watched=method), seeds=[0], lr=lr, compute=compute, watch=watch, **quietly)
    except _Enough: return found[0]

def look(
    where:str, # A key of `unseen`
)->float: # Of the loss
    "The share that the hardest tenth of the items has, a quarter into plain training"
    get_learner,lr,compute = unseen[where]()
    return a_quarter_in(get_learner, WatchItemsCallback, lr, 400 if scale()=='tiny' else compute)

def own_share(
    data:str, # A kind of data of the study
)->float:
    "The same as `favor_hard` itself remembers it"
    cell = easy_data.first[data]
    return a_quarter_in(cell.learner, FavorHardCallback, easy_data.own_rate(data), cell.compute)

def keep(file, name, key, column, share_of):
    "Store a share, unless it is there"
    def make():
        share = share_of(key)
        print(key, f'{share:.3f}', flush=True)
        return pd.DataFrame([{name: key, column: share}])
    once(file, {name: key}, make, '%.4g')

def others()->pd.DataFrame: # The same columns as `gains` has, and `where`
    "What is stored of other data, with the gain of `favor_hard`, of another `beta` where that alone ran"
    known = pd.read_csv(results_folder/'comparisons.csv')
    known = known[known.method.str.startswith('favor_hard')].sort_values('method', kind='stable')
    known = known.drop_duplicates('where')
    found = pd.read_csv(path).merge(known, on='where')
    return pd.DataFrame(dict(where=found['where'], gain=-found.difference_mean, seeds=found.difference_seeds,
        hardest_tenth=found.hardest_tenth))

class Hits(NamedTuple):
    "On how many a rule was right, of how many"
    right:int
    all:int

def hits(
    df, # As `gains` and `others` return it
    threshold:float,
)->Hits:
    "Where the rule and the gain agree"
    agree = (df.hardest_tenth>=threshold)==(df.gain>=pays)
    return Hits(int(agree.sum()), len(df))

def without_each_kind(
    df, # As `gains` returns it
)->Hits: # On all cells
    "How often a rule is right on a kind of data that it was not fitted on"
    found = [hits(df[df.data==data], fitted(df[df.data!=data])) for data in df.data.unique()]
    return Hits(*map(sum, zip(*found)))

def rival(
    fit, # Half of the cells
    test, # The others
    figure:str, # A column of which less promises a gain
)->Hits: # On the others
    "How often the same rule is right that goes by another figure"
    fit,test = (df.assign(hardest_tenth=-df[figure]) for df in (fit,test))
    return hits(test, fitted(fit))

def unseen_gains()->tuple: # The threshold, and a table of `gain` and `hardest_tenth`
    "What the threshold was not fitted on: every other cell, and the other data"
    fit,test = halves(gains())
    return fitted(fit),pd.concat([test, others()], ignore_index=True)

@call_parse
def main():
    "Look at what is not stored yet"
    for data in easy_data.first:
        if data!='digits': keep(own_path, 'data', data, 'own', own_share)
    for where in unseen: keep(path, 'where', where, 'hardest_tenth', look)
