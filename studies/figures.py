"More of a comparison: who is on the front, and what plain training would need"
import numpy as np, pandas as pd

from selback.core.checks import check_range, error_text

def reach(
    run:pd.DataFrame, # The epochs of one run
    target:float, # The most that `measure` may be
    cost:str, # A column: 'seconds', 'compute', 'forwarded' or 'backpropagated'
    measure:str='valid_loss', # A column: 'valid_loss' or 'error'
)->float: # NaN if the run never gets there
    "What a run had cost when it first was as good as `target`"
    there = run[run[measure]<=target]
    return there[cost].iloc[0] if len(there) else float('nan')

def times_less(
    runs:pd.DataFrame, # As `compare` returns it
    cost:str='seconds', # A column: 'seconds', 'compute', 'forwarded' or 'backpropagated'
    measure:str='error', # A column: 'error' or 'valid_loss'
    factor:float=1.2, # The target, as a multiple of plain training's best with the same seed
)->pd.Series: # For each method the geometric mean over the seeds that both ran; NaN if one of these never gets there
    "How many times less than plain training a method needs"
    best = runs[runs.method=='none'].groupby('seed')[measure].min()
    by_run = runs[runs.seed.isin(best.index)].groupby(['method','seed'], sort=False)
    needs = pd.Series({(m,s): reach(run, factor*best[s], cost, measure) for (m,s),run in by_run})
    logs = np.log(needs.index.get_level_values(1).map(needs['none'])/needs)
    return np.exp(logs.groupby(level=0, sort=False).agg(lambda o: o.mean(skipna=False)))

def _evenly(runs, measure, n):
    "So many targets, from the worst first epoch to the best of all"
    first = runs.groupby(['method','seed'], sort=False)[measure].first()
    return np.linspace(first.max(), runs[measure].min(), check_range('targets', n, 1, whole=True))

def cost_to_targets(
    runs:pd.DataFrame, # As `compare` returns it
    cost:str='backpropagated', # A column: 'seconds', 'compute', 'forwarded' or 'backpropagated'
    measure:str='error', # A column: 'error' or 'valid_loss'
    targets=20, # Values of `measure`, or how many, evenly spread from the worst first epoch to the best of all
)->pd.DataFrame: # A row for each target, a column for each method; NaN where a method does not get there in every run
    "What each method had cost when it first reached each target"
    if not np.iterable(targets): targets = _evenly(runs, measure, targets)
    by_run = runs.groupby(['method','seed'], sort=False)

    def mean_cost(target):
        of_runs = by_run.apply(reach, target, cost, measure, include_groups=False)
        return of_runs.groupby('method', sort=False).agg(lambda o: o.mean(skipna=False))
    return pd.DataFrame({target: mean_cost(target) for target in targets}).T.rename_axis(measure)

def pareto_share(
    runs:pd.DataFrame, # As `compare` returns it
    cost:str='backpropagated', # A column: 'seconds', 'compute', 'forwarded' or 'backpropagated'
    measure:str='error', # A column: 'error' or 'valid_loss'
    targets=20, # As `cost_to_targets` takes them
    within:float=0., # Also counted: what costs so much more than the cheapest, as a share of it
)->pd.DataFrame: # A row for each method, the most often first: `first`, the share of the targets, and `misses`
    "At which share of many targets each method is the cheapest that gets there (Jiang et al. 2019, figure 14)"
    costs = cost_to_targets(runs, cost, measure, targets).dropna(how='all')
    if not len(costs):
        got = f'targets of {measure} that no method reaches in every run'
        raise ValueError(error_text('pareto_share', got, 'some that are reached'))

    most = costs.min(axis=1)*(1+check_range('within', within, 0))
    is_first = costs.le(most, axis=0)
    shares = pd.DataFrame(dict(first=is_first.mean(), misses=costs.isna().mean()))
    return shares.sort_values('first', ascending=False, kind='stable').rename_axis('method')

# Under a schedule that ends with the budget, a run shows what it was worth at its end only. So plain training runs on
# several budgets, each with a schedule of its own; between two of these rungs the logarithm of the cost is interpolated
def on_ladder(
    ends:pd.DataFrame, # The last epoch of each run, as `last_epochs` gives it
    ladder:pd.DataFrame, # The same of plain training on several budgets
    measure:str='error', # A column: 'valid_loss' or 'error'
    cost:str='compute', # A column
)->pd.DataFrame: # `ends`, with 'times less' (NaN below the lowest rung, at most the highest rung's) and 'difference'
    "What plain training of the same seed needs to be as good as each run, and how good it is at the run's cost"
    rungs_of = {seed: rungs.sort_values(cost) for seed,rungs in ladder.groupby('seed')}
    times_less,difference = [],[]
    for _,run in ends.iterrows():
        rungs = rungs_of[run.seed]
        log_costs,best = np.log(rungs[cost]),rungs[measure].cummin()
        log_needed = np.interp(-run[measure], -best, log_costs, left=np.nan)
        times_less.append(np.exp(log_needed)/run[cost])
        difference.append(run[measure] - np.interp(np.log(run[cost]), log_costs, best))
    return ends.assign(**{'times less': times_less, 'difference': difference})
