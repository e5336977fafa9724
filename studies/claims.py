"What was claimed, under its own protocol, and beside plain training whose schedule ends at the same cost"
import numpy as np, pandas as pd

from selback.bench.findings import Difference, last_epochs, over_seeds, relative
from studies.easy_data import claims_path, protocol
from studies.experiments import results_folder, rows_with
from studies.figures import on_ladder, reach

def runs_of(
    data:str, # As `Cell` has it
    method:str='none',
    epochs:int=protocol,
)->pd.DataFrame: # A row for each epoch of each seed
    "Runs under the claims' protocol"
    return rows_with(pd.read_csv(claims_path), dict(data=data, method=method, epochs=epochs))

def _by_seed(runs): return {seed: run.sort_values('epoch') for seed,run in runs.groupby('seed')}

def ends_of(data, method='none'):
    "The last epoch of each seed"
    return last_epochs(runs_of(data, method))

def speedup(
    data:str, # As `Cell` has it
    method:str,
    factor:float=1.2, # The target, as a multiple of plain training's final error
    cost:str='compute', # A column
)->float: # The geometric mean over the seeds; NaN if a seed never gets there
    "How many times less than plain training a method needs, of one long schedule each (Jiang 2019, table 1)"
    plain,own = _by_seed(runs_of(data)),_by_seed(runs_of(data, method))
    ratios = []
    for seed in plain.keys() & own.keys():
        target = factor*plain[seed].error.iloc[-1]
        ratios.append(reach(plain[seed], target, cost, 'error')/reach(own[seed], target, cost, 'error'))
    return float(np.exp(np.mean(np.log(ratios)))) if ratios else float('nan')

def rungs(
    data:str, # As `Cell` has it
)->pd.DataFrame: # A row for each seed and length
    "How plain trainings of several lengths end"
    return last_epochs(rows_with(pd.read_csv(claims_path), dict(data=data, method='none')), 'epochs')

def beside_plain(
    data:str, # As `Cell` has it
    method:str,
    measure:str='error', # Or 'valid_loss'
)->Difference: # NaN if it costs more than the longest or less than the shortest
    "A method's end against that of plain training whose schedule ends at the same cost, between two lengths if need be"
    ladder = rungs(data)
    ends = on_ladder(ends_of(data, method), ladder, measure)
    is_within = ends.compute.between(ladder.compute.min(), ladder.compute.max())
    at_cost = (ends[measure]-ends.difference).where(is_within)
    return over_seeds(relative(ends[measure], at_cost))

def kept_last(data, method='batch_loss_filter')->float:
    "The share that is kept in the last epoch"
    shares = []
    for run in _by_seed(runs_of(data, method)).values():
        before,last = run.iloc[-2],run.iloc[-1]
        trained = last.backpropagated-before.backpropagated
        shares.append(trained/(last.forwarded-before.forwarded-trained)) # what is not trained on is looked at
    return float(np.mean(shares))

def change(data, method, measure)->float:
    "By which share the mean of a measure, at the end of the same number of epochs, is higher than plain training's"
    return float(ends_of(data, method)[measure].mean()/ends_of(data)[measure].mean()-1)

def step_of(
    method:str, # As the benchmark has it: 'top_loss', of two passes, or 'one_pass'
    share:float=1/3, # That is kept
)->float: # As a multiple of a plain step, in the small ResNet; median over the repeats
    "What a selecting step took"
    df = pd.read_csv(results_folder/'benchmarks/steps_cpu.csv')
    there = df[(df.net=='small_resnet') & (df.method==method) & np.isclose(df.share, share)]
    return float(there.step.median())
