"What another machine, or another test set, will confirm of a difference in error"
import numpy as np, pandas as pd
from scipy.stats import norm, t

from selback.bench.findings import Difference, relative

def _wrong(row, n):
    "A mask of the items that are wrong, of a run's column of their rows"
    mask = np.zeros(n, bool)
    mask[[int(i) for i in row.split()]] = True
    return mask

def noise_of_items(
    ends:pd.DataFrame, # A row for each run, with the rows of the items that are wrong, as text, in the column 'wrong'
    method:str, # One of its methods
    n:int, # Items that validate
    other:str='none', # Another one
)->float: # NaN where no seed has these for both
    "The standard error of a relative difference in error, in logarithms, that comes of which items validate"
    known = ends.dropna(subset='wrong').set_index('seed')
    own,plain = (known[known.method==m].wrong for m in (method,other))
    shares = [] # of each item in the difference, by seed
    for seed in own.index.intersection(plain.index):
        a,b = _wrong(own[seed], n),_wrong(plain[seed], n)
        shares.append(a/a.mean()-b/b.mean())
    return float(np.mean(shares, axis=0).std(ddof=1)/n**.5) if shares else float('nan')

def widened(
    d:Difference, # Over seeds, of factors
    se:float, # As `noise_of_items` gives it; NaN: not known
)->Difference:
    "The same, with an interval that counts which items validate, too"
    if not np.isfinite(se) or not np.isfinite(d.low): return d
    mean,low,high = np.log1p([d.mean,d.low,d.high])
    half = np.hypot((high-low)/2, norm.ppf(.975)*se)
    return d._replace(low=float(np.expm1(mean-half)), high=float(np.expm1(mean+half)))

def confirmed_by(
    values, # Errors of a method, one for each seed
    others, # Those of another one
    seeds:int, # Of the runs elsewhere
)->tuple: # Low, high, as shares
    "Where 95 % of the means of so many seeds lie that another machine will find, on the same items"
    logs = np.log1p(relative(values, others))
    n = len(logs)
    half = t.ppf(.975, n-1)*logs.std(ddof=1)*(1/n+1/seeds)**.5
    return tuple(np.expm1([logs.mean()-half, logs.mean()+half]))
