"""What was measured of each method, for its card, the guide and the first page

It is read from `results/comparisons.csv`, which `make comparisons` writes."""
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from IPython.display import Markdown
from selback.bench.findings import Difference, min_seeds, signed
from selback.core.checks import error_text

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

_other_names = {'hardest first': 'favor_hard', 'hardest always': 'favor_hard',
    'class-balanced': 'balanced_sampling'} # the same draws, by a loader

def family(
    method, # As a study has it
)->str:
    "The one-liner that a method is called by, whatever its options"
    return _other_names.get(method, method.partition('(')[0])

class Counts(NamedTuple):
    "How many comparisons, or data sets, came out how; a data set with several comparisons may be both better and worse"
    all:int
    better:int # clearly
    worse:int # clearly
    diverged:int

def counts(
    of, # Rows of `comparisons` of equal cost
    by=None, # A column, such as 'data': count each of its values once; None: each comparison
)->Counts:
    "In how many comparisons or data sets methods were clearly better and worse than plain training"
    names = of.index.to_series() if by is None else of[by]
    return Counts(names.nunique(), *(names[of.verdict==verdict].nunique() for verdict in Counts._fields[1:]))

def by_evidence(
    found:dict, # The `Counts` of data sets of each method
)->list: # Its keys, the most data sets won less those lost first; what never chose comes last
    "Methods in the order of what was measured"
    def place(method):
        n = found[method]
        return not n.all,n.worse-n.better
    return sorted(found, key=place)

def fair(
    df, # As `comparisons` returns it
): # The same, without the others
    "The comparisons of equal cost in which a method chose"
    return df[df.equal_cost & (df.verdict!='never selected')]

def _in_all(of):
    "What several comparisons of equal cost amount to, data sets first"
    data,runs = counts(of, 'data'),counts(of)
    places = f'{data.all} data sets' if data.all>1 else 'one data set'
    said = f"{'clearly' if data.better else 'never clearly'} better than plain training of equal cost"
    said += f' on {data.better} of {places}' if data.better and data.all>1 else f' on {places}'
    if data.worse: said += f', clearly worse on {data.worse}' if data.all>1 else ', clearly worse in some'
    parts = [f'{n} {verdict}' for verdict,n in runs._asdict().items() if verdict!='all' and n]
    return f"{said} ({runs.all} comparisons: {', '.join(parts) or 'none clear'})."

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
    of = fair(df)
    if len(of)==1: said = _in_one(of.verdict.iloc[0])
    elif len(of): said = _in_all(of)
    elif (df.verdict=='never selected').any():
        said = 'it never found selecting worth its cost, and trained as plain training does.'
    else: return Markdown('**Not measured** against plain training of equal cost.')
    return Markdown(f'**Measured:** {said}')

verdict_colours = dict(better='#1f77b4', worse='#c8503c')

def colour_of(
    d:Difference, # From plain training
)->str: # For a plot
    "Blue where a method is clearly better, red where it is clearly worse, else grey"
    if not d.is_clear: return 'grey'
    return verdict_colours['better' if d.mean<0 else 'worse']

def _gained(d):
    "The mean of a `Difference`, with its interval where there is one"
    if d is None: return '-'
    return f'{signed(d.mean)} ({d.span})' if d.seeds>=min_seeds else signed(d.mean)

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

few = 8 # comparisons that are shown unfolded

def measured(
    *methods, # Names of one-liners, or labels
    top=None, # The folder `results`; None: that of the checkout
    up='../', # From the page to `nbs`
)->Markdown:
    "What a method was worth in each study"
    head = '| study | method | against plain training (95 % interval) | seeds better | | validation loss, where clear |'
    rule = '| --- | --- | --- | --- | --- | --- |'
    rows = [_row(study, up) for study in comparisons(*methods, top=top).itertuples()]
    table = '\n'.join([head, rule, *rows])
    if len(rows)<=few: return Markdown(table)
    return Markdown(f'<details class="stacked"><summary>All {len(rows)} comparisons</summary>\n\n{table}\n\n</details>')

def gain(
    where, # A study, as the file names it
    method, # As the study has it
    top=None, # The folder `results`; None: that of the checkout
    short=False, # In signs rather than in words?
)->str: # Raises a `ValueError` if it was not run
    "What a method was worth in a study, in words"
    df = comparisons(top=top, where=where)
    found = df[df.method==method]
    if not len(found):
        wanted = f"a method that ran there: {', '.join(df.method) or 'none did'}"
        raise ValueError(error_text('gain', f'{method} on {where!r}', wanted))

    study = found.iloc[0]
    d,loss = study.difference,study.loss
    if d is None: return study.verdict
    measure = '' if study.measure=='error' else study.measure
    said = _in_signs(d, measure) if short else _in_words(d, measure)
    differs = loss and loss.is_clear and not (d.is_clear and (loss.mean<0)==(d.mean<0))
    if not differs: return said
    return f'{said}; validation loss {signed(loss.mean) if short else loss.size}'

def confirmed()->str:
    "What two seeds elsewhere will find of the claim on easy data, and what other networks gave, in words"
    study,*others = pd.read_csv(results/'easy_data_confirmed.csv').itertuples()
    found = ' and '.join(f'{signed(row.mean)} in {row.words}' for row in others)
    return (f'two seeds will find {signed(study.two_low)} to {signed(study.two_high)} in the same network (95 %); '
        f'in others it was {found}')

def _in_signs(d, measure):
    "Such as '-11.4% (-19.0% to -3.2%), error of the worst kind'"
    said = f'{signed(d.mean)} ({d.span})' if d.is_clear else f'no clear difference ({d.span})'
    return f'{said}, {measure}' if measure else said

def _in_words(d, measure):
    "A `Difference` of errors, or of a measure that is named"
    of = f' {measure}' if measure else ''
    if d.is_clear: return f'{d.size}{of} on all of {d.seeds} seeds ({d.span})'
    if d.seeds>=min_seeds: return f"no clear difference{' in' if of else ''}{of} ({d.span})"
    return f"{signed(d.mean)}{of} in {d.seeds} seed{'s' if d.seeds>1 else ''}, which proves little"

def wrong_labels()->pd.DataFrame:
    "Runs of the study of wrong labels, with `suspects()` as a measure, of which not all were measured anew"
    runs = pd.read_csv(results/'wrong_labels.csv')
    runs['measure'] = runs.measure.replace('weighed margin, a look more', 'suspects(look=True)')
    training = ['data','labels','augmented','epochs','net','seed']
    has_both = runs[runs.measure.isin(['weighed margin','balanced margin'])].sort_values('measure', ascending=False)
    ours = has_both.drop_duplicates(training).sort_index().assign(measure='suspects()') # the weighed one, if there
    return pd.concat([runs, ours], ignore_index=True)

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
        raise ValueError(error_text('published', f'{source!r} and {dataset!r}', wanted))
    return df.reset_index(drop=True)
