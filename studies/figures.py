"Two more pictures of a comparison: quality by items back-propagated, and who is on the front"
import numpy as np, pandas as pd

from selback.core.checks import check_range
from selback.bench.findings import reach, word_of

def cost_to_targets(
    runs:pd.DataFrame, # As `compare` returns it
    cost:str='backpropagated', # A column: 'seconds', 'compute', 'forwarded' or 'backpropagated'
    measure:str='error', # A column: 'error' or 'valid_loss'
    targets=20, # Values of `measure`, or how many, evenly spread from the worst first epoch to the best of all
)->pd.DataFrame: # A row for each target, a column for each method; NaN where a method does not get there in every run
    "What each method had cost when it first reached each target"
    by_run = runs.groupby(['method','seed'], sort=False)
    if not np.iterable(targets): targets = np.linspace(by_run[measure].first().max(), runs[measure].min(), check_range('targets', targets, 1, whole=True))
    costs = {t: by_run.apply(reach, t, cost, measure, include_groups=False) for t in targets}
    return pd.DataFrame({t: c.groupby('method', sort=False).agg(lambda o: o.mean(skipna=False)) for t,c in costs.items()}).T.rename_axis(measure)

def pareto_share(
    runs:pd.DataFrame, # As `compare` returns it
    cost:str='backpropagated', # A column: 'seconds', 'compute', 'forwarded' or 'backpropagated'
    measure:str='error', # A column: 'error' or 'valid_loss'
    targets=20, # As `cost_to_targets` takes them
    within:float=0., # Also counted: what costs so much more than the cheapest, as a share of it
)->pd.DataFrame: # A row for each method, the most often first: `first`, the share of the targets, and `misses`
    "At which share of many targets each method is the cheapest that gets there (Jiang et al. 2019, figure 14)"
    costs = cost_to_targets(runs, cost, measure, targets).dropna(how='all')
    if not len(costs): raise ValueError(f'pareto_share: got targets of {measure} that no method reaches in every run, wanted some that are reached.')
    first = costs.le(costs.min(axis=1)*(1+check_range('within', within, 0)), axis=0)
    return pd.DataFrame(dict(first=first.mean(), misses=costs.isna().mean())).sort_values('first', ascending=False, kind='stable').rename_axis('method')

def plot_by_items(
    runs:pd.DataFrame, # As `compare` returns it
    measure:str='error', # A column: 'error' or 'valid_loss'
): # Axes
    "The best error so far against the items back-propagated (Jiang et al. 2019, figure 6)"
    import matplotlib.pyplot as plt
    fig,ax = plt.subplots(figsize=(4.2,4.4), layout='constrained')
    for i,(method,rs) in enumerate(runs.groupby('method', sort=False)):
        by_seed = [(r.backpropagated.to_numpy(float), r[measure].cummin().to_numpy(float)) for _,r in rs.groupby('seed')]
        at = np.linspace(max(x[0] for x,_ in by_seed), min(x[-1] for x,_ in by_seed), 50) # where all seeds are known
        best = np.stack([np.interp(at, *xy) for xy in by_seed])
        look = dict(color='black') if method=='none' else dict(color=f'C{i}')
        ax.plot(at, best.mean(0), lw=1.8, label='plain training' if method=='none' else method, **look)
        if len(by_seed)>1: ax.fill_between(at, best.min(0), best.max(0), alpha=.15, lw=0, **look)
    seeds = runs.groupby('method').seed.nunique().max()
    ax.set(xlabel='items back-propagated', ylabel=f'best {word_of(measure)} so far')
    if runs[measure].min()>0:
        ax.set_yscale('log')
        ax.yaxis.set_major_formatter('{x:g}')
        ax.yaxis.set_minor_formatter('{x:g}' if runs[measure].max()<10*runs[measure].min() else '')
    ax.spines[['top','right']].set_visible(False)
    ax.grid(alpha=.3, lw=.5)
    fig.legend(loc='outside lower center', frameon=False, title=f'mean of {seeds} seeds; band: best to worst' if seeds>1 else None)
    return ax
