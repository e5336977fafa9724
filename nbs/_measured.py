"What was measured of each method, for its card, the guide and the first page: read from `results/comparisons.csv`, which `make comparisons` writes"
from pathlib import Path

import pandas as pd
from IPython.display import Markdown
from selback.bench.findings import Difference, signed

results = Path(__file__).resolve().parents[1]/'results'

def _difference(row, name):
    "A difference from its columns, or None"
    fields = [row[f'{name}_{field}'] for field in Difference._fields]
    if pd.isna(fields[0]): return None
    mean,low,high,*counts = fields
    return Difference(mean, low, high, *map(int, counts))

def _is_of(method, names): return method in names or method.startswith(tuple(f'{name}(' for name in names))

def comparisons(
    *methods, # Names of one-liners, or labels; none: all
    top=None, # The folder `results`; None: that of the checkout
    where=None, # A study, as the file names it; None: all
)->pd.DataFrame: # A row for each study and method; `difference` and `loss`, that of the validation loss, are a `Difference` or None
    "What each method was worth against plain training, in each study"
    df = pd.read_csv(Path(top or results)/'comparisons.csv').fillna({'not_counted': ''})
    for name in 'difference','loss':
        df[name] = pd.Series([_difference(row, name) for _,row in df.iterrows()], dtype=object, index=df.index)
    if methods: df = df[[_is_of(method, methods) for method in df.method]]
    if where is not None: df = df[df['where']==where]
    return df.reset_index(drop=True)

def _in_all(verdicts):
    "What several comparisons of equal cost amount to"
    n = len(verdicts)
    wins,losses,diverged = ((verdicts.verdict==verdict).sum() for verdict in ('better','worse','diverged'))
    n_data,n_won = verdicts.data.nunique(),verdicts.data[verdicts.verdict=='better'].nunique()
    if wins:
        said = f'clearly better than plain training of equal cost in {wins} of {n} comparisons'
        if n_data>1: said += f', on {n_won} of {n_data} data sets'
    else:
        said = f'never clearly better than plain training of equal cost, in {n} comparisons'
        if n_data>1: said += f' on {n_data} data sets'
    if losses: said += f'; clearly worse in {losses}'
    if diverged: said += f'; diverged in {diverged}'
    return f'{said}.'

def tally(
    *methods, # Names of one-liners, or labels
    top=None, # The folder `results`; None: that of the checkout
)->Markdown:
    "In how many comparisons, and on how many data sets, a method was better than plain training, in a sentence"
    df = comparisons(*methods, top=top)
    never = df.verdict=='never selected'
    fair = df[df.equal_cost & ~never]
    if len(fair)==1:
        alone = dict(better='clearly better than', worse='clearly worse than', diverged='diverged, unlike')
        said = f"{alone.get(fair.verdict.iloc[0], 'no clear difference from')} plain training of equal cost, in the one comparison made."
    elif len(fair): said = _in_all(fair)
    elif never.any(): said = 'it never found selecting worth its cost, and trained as plain training does.'
    else: return Markdown('**Not measured** against plain training of equal cost.')
    return Markdown(f'**Measured:** {said}')

def _row(o, up):
    d = o.difference
    numbers = '-' if d is None else f'{signed(d.mean)} ({d.span})' if d.seeds>1 else signed(d.mean)
    notes = ('' if o.measure=='error' else f', in {o.measure}')+(f', {o.not_counted} not counted' if o.not_counted else '')
    seeds = '-' if d is None else f'{d.better} of {d.seeds}'
    loss = signed(o.loss.mean) if o.loss and o.loss.is_clear else ''
    return f'| [{o.where}]({up}{o.page}.ipynb){notes} | `{o.method}` | {numbers} | {seeds} | {o.verdict} | {loss} |'

def measured(
    *methods, # Names of one-liners, or labels
    top=None, # The folder `results`; None: that of the checkout
    up='../', # From the page to `nbs`
)->Markdown:
    "What a method was worth in each study"
    head = '| study | method | against plain training (95 % interval) | seeds better | | validation loss, where clear |\n| --- | --- | --- | --- | --- | --- |'
    return Markdown('\n'.join([head, *(_row(o, up) for o in comparisons(*methods, top=top).itertuples())]))

def gain(
    where, # A study, as the file names it
    method, # As the study has it
    top=None, # The folder `results`; None: that of the checkout
)->str: # Raises a `ValueError` if it was not run
    "What a method was worth in a study, in words"
    df = comparisons(top=top, where=where)
    found = df[df.method==method]
    if not len(found):
        raise ValueError(f"gain: got {method} on {where!r}, wanted a method that ran there: {', '.join(df.method) or 'none did'}.")
    d,loss,verdict,measure = found[['difference','loss','verdict','measure']].iloc[0]
    if d is None: return verdict
    of = '' if measure=='error' else f' {measure}'
    if d.is_clear: said = f"{d.size}{of} on {'each' if d.seeds<3 else 'all'} of {d.seeds} seeds ({d.span})"
    elif d.seeds>1: said = f"no clear difference{of and f' in{of}'} ({d.span})"
    else: said = f'{signed(d.mean)}{of} {d.sure}'
    differs = loss and loss.is_clear and not (d.is_clear and (loss.mean<0)==(d.mean<0))
    return f'{said}; validation loss {loss.size}' if differs else said

def published(
    source:str, # The beginning of its name, such as 'Jiang 2019'
    dataset:str|None=None, # Of the numbers; None: of all its data
)->pd.DataFrame: # With the place where each number stands
    "What a source reports, as it reports it"
    df = pd.read_csv(results/'published.csv')
    df = df[df.source.str.startswith(source) & (df.dataset.eq(dataset) | (dataset is None))]
    if df.empty: raise ValueError(f'published: got {source!r} and {dataset!r}, wanted a source of results/published.csv with data of its own.')
    return df.reset_index(drop=True)
