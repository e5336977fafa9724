"Balanced sampling where draws by a weighted loader were measured: `python -m studies.balanced` runs what is not stored"
from typing import NamedTuple

import pandas as pd, torch
from fastcore.script import call_parse

from selback.all import BalancedSamplingCallback
from selback.bench.compare import compare, describe
from selback.bench.findings import last_epochs, signed
from studies import regimes, shortcuts
from studies.experiments import results, results_folder, scale, stored

class Part(NamedTuple):
    "A situation in which draws were balanced by a loader"
    get_learner:object # A function without arguments, whose loader is not balanced
    methods:dict # As `compare` takes them
    lr:float # The highest learning rate
    compute:int # Of each run, in items trained
    seeds:int # Runs; fewer than of the loader where each takes minutes
    options:dict={} # More for `compare`

def _long_tail():
    regime = regimes.regimes['long_tail']()
    get_learner,_ = regime.parts['all']
    methods = {'balanced_sampling': 'balanced_sampling'}
    return Part(get_learner, methods, regime.lr, regime.compute, 3)

def _shortcut(name, seeds):
    part = shortcuts.parts[name]
    def by_groups():
        _,labels,marks = part.data()[0]
        return BalancedSamplingCallback(shortcuts.groups_of(labels, marks, int(marks.max())+1))
    return Part(part.learner, {'balanced_sampling(groups)': by_groups}, shortcuts.best_rate(name), part.compute,
        seeds, dict(watch=shortcuts.mean_error, measure='error'))

# what was run with a weighted loader: the file, and the method's name there
by_loader = dict(
    long_tail=('where_it_pays/long_tail_balanced','class-balanced'),
    border_98=('shortcuts/border_98_balanced','groups known'),
    digits=('shortcuts/digits_balanced','groups known'))

def part_of(
    name:str, # One of `by_loader`
)->Part:
    "The situation"
    if name=='long_tail': return _long_tail()
    return _shortcut(name, dict(border_98=3, digits=5)[name])

def run(
    name:str, # One of `by_loader`
    seeds:int=0, # Runs; 0: as many as the situation has
)->pd.DataFrame: # A row for each epoch of each run
    "The runs, from a file, or made"
    path,part = results('balanced')/f'{name}.csv',part_of(name)
    tiny = scale()=='tiny'
    seeds = 2 if tiny else seeds or part.seeds
    runs = stored(path, part.methods, seeds)
    if runs is not None: return runs
    about = dict(part=name, **describe(part.get_learner().dls))
    return compare(part.get_learner, part.methods, seeds=seeds, lr=part.lr, compute=400 if tiny else part.compute,
        path=path, plot=False, tell_controls=False, about=about, **part.options)

def _ends(path): return last_epochs(pd.read_csv(path)) if path.exists() else pd.DataFrame(columns=['method','error'])

def errors(
    name:str, # One of `by_loader`
)->dict: # Of each stored run at the end: by the `method`, and by the `loader` that draws by weights
    "The errors of both ways"
    file,method = by_loader[name]
    ours,theirs = _ends(results_folder/f'balanced/{name}.csv'),_ends(results_folder/f'{file}.csv')
    return dict(method=ours.error.to_numpy(), loader=theirs[theirs.method==method].error.to_numpy())

def compared(
    name:str, # One of `by_loader`
)->dict|None: # `difference` of the means, with `low` and `high` of 95 %, as shares of the loader's; None: too few runs
    "How far the two ways are apart, over seeds that share nothing but their number"
    from scipy.stats import ttest_ind
    found = errors(name)
    if len(found['method'])<2: return
    method,loader = found['method'].mean(),found['loader'].mean()
    span = ttest_ind(found['method'], found['loader'], equal_var=False).confidence_interval()
    return dict(method=method, loader=loader, n=len(found['method']), n_loader=len(found['loader']),
        difference=method/loader-1, low=span.low/loader, high=span.high/loader)

def in_words(
    name:str, # One of `by_loader`
)->str: # Empty, where there are too few runs
    "The errors of both ways, and the interval of their difference"
    d = compared(name)
    if d is None: return ''
    return (f"{d['method']:.1%} on {d['n']} seeds against the loader's {d['loader']:.1%} on {d['n_loader']}, apart by "
        f"{signed(d['difference'])} (95 % interval {signed(d['low'])} to {signed(d['high'])})")

@call_parse
def main(
    only:str='', # Some of the situations, with commas between them; none: all
    seeds:int=0, # Runs of each; 0: all
):
    "Run what is not stored, and say how far it is from a weighted loader"
    torch.set_num_threads(1)
    for name in only.split(',') if only else by_loader:
        run(name, seeds)
        print(f'{name}: {in_words(name)}', flush=True)
