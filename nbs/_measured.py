"""What was measured of each method, for its card, the guide and the first page

It is read from `results/comparisons.csv`, which `make comparisons` writes."""
from pathlib import Path

import pandas as pd
from IPython.display import Markdown
from selback.bench.findings import Difference, signed
from selback.core.checks import refusal

results = Path(__file__).resolve().parents[1]/'results'

def _difference(row, name):
    "A difference from its columns, or None"
    fields = [row[f'{name}_{field}'] for field in Difference._fields]
    if pd.isna(fields[0]): return
    mean,low,high,*counts = fields
    return Difference(mean, low, high, *map(int, counts))

def _is_of(method, names): return method in names or method.startswith(tuple(f'{name}(' for name in names))

def comparisons(
    *methods, # Names of one-liners, or labels; none: all
    top=None, # The folder `results`; None: that of the checkout
    where=None, # A study, as the file names it; None: all
)->pd.DataFrame: # A row for each study and method; `difference` and `loss` are a `Difference` or None
    "What each method was worth against plain training, in each study; `loss` is that of the validation loss"
    df = pd.read_csv(Path(top or results)/'comparisons.csv').fillna({'not_counted': ''})
    for name in 'difference','loss':
        df[name] = pd.Series([_difference(row, name) for _,row in df.iterrows()], dtype=object, index=df.index)
    if methods: df = df[[_is_of(method, methods) for method in df.method]]
    if where is not None: df = df[df['where']==where]
    return df.reset_index(drop=True)

def _in_all(fair):
    "What several comparisons of equal cost amount to"
    count = fair.verdict.value_counts()
    n,n_data = len(fair),fair.data.nunique()
    n_won = fair.data[fair.verdict=='better'].nunique()

    if 'better' in count:
        said = f"clearly better than plain training of equal cost in {count['better']} of {n} comparisons"
        if n_data>1: said += f', on {n_won} of {n_data} data sets'
    else:
        said = f'never clearly better than plain training of equal cost, in {n} comparisons'
        if n_data>1: said += f' on {n_data} data sets'
    if 'worse' in count: said += f"; clearly worse in {count['worse']}"
    if 'diverged' in count: said += f"; diverged in {count['diverged']}"
    return f'{said}.'

def _in_one(verdict):
    "What a single comparison of equal cost amounts to"
    words = dict(better='clearly better than', worse='clearly worse than', diverged='diverged, unlike')
    found = words.get(verdict, 'no clear difference from')
    return f'{found} plain training of equal cost, in the one comparison made.'

def tally(
    *methods, # Names of one-liners, or labels
    top=None, # The folder `results`; None: that of the checkout
)->Markdown:
    "In how many comparisons, and on how many data sets, a method was better than plain training, in a sentence"
    df = comparisons(*methods, top=top)
    never = df.verdict=='never selected'
    fair = df[df.equal_cost & ~never]

    if len(fair)==1: said = _in_one(fair.verdict.iloc[0])
    elif len(fair): said = _in_all(fair)
    elif never.any(): said = 'it never found selecting worth its cost, and trained as plain training does.'
    else: return Markdown('**Not measured** against plain training of equal cost.')
    return Markdown(f'**Measured:** {said}')

def _gained(d):
    "The mean of a `Difference`, with its interval where there is one"
    if d is None: return '-'
    return f'{signed(d.mean)} ({d.span})' if d.seeds>1 else signed(d.mean)

def _row(study, up):
    "A study and a method in the table, from a row of `comparisons`"
    d,loss = study.difference,study.loss
    notes = ''
    if study.measure!='error': notes += f', in {study.measure}'
    if study.not_counted: notes += f', {study.not_counted} not counted'
    seeds = '-' if d is None else f'{d.better} of {d.seeds}'
    in_loss = signed(loss.mean) if loss and loss.is_clear else ''
    where = f'[{study.where}]({up}{study.page}.ipynb){notes}'
    return f'| {where} | `{study.method}` | {_gained(d)} | {seeds} | {study.verdict} | {in_loss} |'

def measured(
    *methods, # Names of one-liners, or labels
    top=None, # The folder `results`; None: that of the checkout
    up='../', # From the page to `nbs`
)->Markdown:
    "What a method was worth in each study"
    head = '| study | method | against plain training (95 % interval) | seeds better | | validation loss, where clear |'
    rule = '| --- | --- | --- | --- | --- | --- |'
    rows = [_row(study, up) for study in comparisons(*methods, top=top).itertuples()]
    return Markdown('\n'.join([head, rule, *rows]))

def gain(
    where, # A study, as the file names it
    method, # As the study has it
    top=None, # The folder `results`; None: that of the checkout
)->str: # Raises a `ValueError` if it was not run
    "What a method was worth in a study, in words"
    df = comparisons(top=top, where=where)
    found = df[df.method==method]
    if not len(found):
        wanted = f"a method that ran there: {', '.join(df.method) or 'none did'}"
        raise ValueError(refusal('gain', f'{method} on {where!r}', wanted))

    study = found.iloc[0]
    d,loss = study.difference,study.loss
    if d is None: return study.verdict
    said = _in_words(d, '' if study.measure=='error' else study.measure)
    differs = loss and loss.is_clear and not (d.is_clear and (loss.mean<0)==(d.mean<0))
    return f'{said}; validation loss {loss.size}' if differs else said

def _in_words(d, measure):
    "A `Difference` of errors, or of a measure that is named"
    of = f' {measure}' if measure else ''
    seeds = 'each' if d.seeds<3 else 'all'
    if d.is_clear: return f'{d.size}{of} on {seeds} of {d.seeds} seeds ({d.span})'
    if d.seeds>1: return f"no clear difference{' in' if of else ''}{of} ({d.span})"
    return f'{signed(d.mean)}{of} {d.sure}'

def published(
    source:str, # The beginning of its name, such as 'Jiang 2019'
    dataset:str|None=None, # Of the numbers; None: of all its data
)->pd.DataFrame: # With the place where each number stands
    "What a source reports, as it reports it"
    df = pd.read_csv(results/'published.csv')
    df = df[df.source.str.startswith(source)]
    if dataset is not None: df = df[df.dataset==dataset]
    if df.empty:
        wanted = 'a source of results/published.csv with data of its own'
        raise ValueError(refusal('published', f'{source!r} and {dataset!r}', wanted))
    return df.reset_index(drop=True)
