"""A photograph learned point by point, and digits whose colours mislead: `python -m studies.demo` trains on both, in
minutes, and writes one page"""
import base64, io
from functools import partial
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt, pandas as pd, torch
from fastcore.script import call_parse

from selback.all import EarlyLossSamplingCallback, RandomSubsetCallback
from selback.bench.compare import compare, describe
from selback.bench.datasets import get_dls, learned
from selback.bench.findings import last_epochs, relative, signed
from studies import photographs
from studies.experiments import scale
from studies.shortcuts import parts

class Part(NamedTuple):
    "A situation, and what trains on it"
    title:str
    what:str # A sentence about it
    learner:callable # Makes a learner
    methods:dict # As `compare` takes them: plain training, a method, and the random control
    lr:float # The highest learning rate: plain training's best in the study of the part
    compute:float # Of each run, in items trained
    error:str # What the error is called
    study:str # The page where it is measured

def random_half(): return RandomSubsetCallback(.5, before_loading=True)
def early(): return EarlyLossSamplingCallback(after=2)

demo = dict(
    photograph=Part('A photograph, learned point by point',
        'A network learns the colour at each place of a picture. Plain training takes all 24,576 points in turn; '
        'favor_hard(beta=2) takes those more often whose last loss ranks high.',
        partial(photographs.learner, 'china', full_size=False),
        {'none': 'none', 'favor_hard(beta=2)': 'favor_hard(beta=2)', 'random half': random_half},
        .016, 900_000, 'mean squared error', 'an_image'),
    digits=Part('Digits whose colours mislead',
        '95 of 100 digits for training have the colour of their class, so that a network learns colours. In the test '
        'they have any colour. early_loss_sampling() keeps the losses of the second epoch, in which what contradicts '
        'the colours is still hard, and draws by them.',
        parts['digits'].learner, {'none': 'none', 'early_loss_sampling': early, 'random half': random_half},
        .0125, parts['digits'].compute, 'error at any colour', 'shortcuts'))

def named(method): return 'plain training' if method=='none' else method

def run(
    name:str, # One of `demo`
    watch=None, # As `compare` takes it
)->pd.DataFrame: # A row for each epoch of each run
    "Two runs of each method, at equal compute"
    part = demo[name]
    compute,seeds = (part.compute,2) if scale()!='tiny' else (3000,1)
    return compare(part.learner, part.methods, seeds=seeds, lr=part.lr, compute=compute, plot=False,
        measure='error', watch=watch, tell_controls=False, about=dict(data=name, **describe(part.learner().dls)))

def ended(
    runs:pd.DataFrame, # As `run` returns it
)->pd.DataFrame: # A row for each method: the error by seed, and the difference from plain training
    "What the runs end with"
    errors = last_epochs(runs).pivot(index='method', columns='seed', values='error')
    errors = errors.loc[runs.method.unique()] # plain training first
    shown = errors.map('{:.3g}'.format).add_prefix('seed ')
    vs_plain = [', '.join(map(signed, relative(row, errors.loc['none']))) for row in errors.values]
    shown = shown.assign(**{'against plain training': vs_plain}).rename(index=named)
    return shown.rename_axis(index=None, columns=None)

def in_words(
    name:str, # One of `demo`
    runs:pd.DataFrame, # As `run` returns it
)->str:
    "What a method came to, beside plain training and a random half"
    errors = last_epochs(runs).pivot(index='seed', columns='method', values='error')
    method = list(demo[name].methods)[1]
    changes = {other: relative(errors[method], errors[other]).mean() for other in ('none','random half')}
    said = {other: f"{abs(change):.0%} {'lower' if change<0 else 'higher'}" for other,change in changes.items()}
    return (f"At equal compute {method} ends {said['none']} in {demo[name].error} than plain training, and "
        f"{said['random half']} than training on a random half of each epoch ({len(errors)} seeds, which prove little: "
        f'nbs/experiments/{demo[name].study}.ipynb has more).')

# The page

def as_image(fig):
    "A figure as HTML"
    file = io.BytesIO()
    fig.savefig(file, format='png', dpi=110)
    plt.close(fig)
    return f'<img src="data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}">'

def bars(ax, runs, error):
    "Errors at the end, by method, a point for each seed"
    ends = last_epochs(runs)
    for i,(method,of) in enumerate(ends.groupby('method', sort=False)):
        ax.barh(i, of.error.mean(), color='black' if method=='none' else 'grey' if method=='random half' else 'C1')
        ax.plot(of.error, [i]*len(of), 'o', color='white', mec='black')
    names = [*map(named, ends.method.unique())]
    ax.set(yticks=range(len(names)), yticklabels=names, xlabel=error)
    ax.invert_yaxis()
    ax.spines[['top','right']].set_visible(False)

def show_photographs(pictures):
    "The picture, and what each method has learned of it"
    fig,axes = plt.subplots(2, 2, figsize=(8,5.6), layout='constrained')
    for ax,(title,picture) in zip(axes.flat, pictures.items()):
        ax.imshow(picture)
        ax.set_title(title)
        ax.axis('off')
    return as_image(fig)

def show_digits():
    "A few digits for training, and of the test"
    train,_,test = parts['digits'].data()
    fig,axes = plt.subplots(2, 10, figsize=(8,2), layout='constrained')
    for row,title,(images,labels,_) in zip(axes, ('training','test'), (train,test)):
        for kind,ax in enumerate(row):
            ax.imshow(images[labels==kind][0].permute(1,2,0))
            ax.axis('off')
        row[0].set_title(title, loc='left')
    return as_image(fig)

STYLE = '''body {font: 16px/1.5 system-ui, sans-serif; max-width: 46em; margin: 2em auto; padding: 0 1em}
img {max-width: 100%} table {border-collapse: collapse; display: block; overflow-x: auto}
td, th {padding: .2em .8em; text-align: right; border-bottom: 1px solid #ccc} td:first-child {text-align: left}
pre {overflow-x: auto}'''

def page_of(
    sections, # For each part its title, sentences, HTML of pictures and table
)->str:
    "One page of HTML"
    blocks = [f'<h2>{title}</h2><p>{what}</p>{pictures}{table}<p><b>{said}</b></p>'
        for title,what,pictures,table,said in sections]
    more = '<p>On your own images:</p><pre>.venv/bin/selback-compare --data FOLDER --race</pre>'
    head = f'<!doctype html><meta charset="utf-8"><title>selback: demo</title><style>{STYLE}</style>'
    return f'{head}<h1>What choosing examples is worth, in two places</h1>{"".join(blocks)}{more}'

def section(name, folder):
    "Run a part, print what came of it, and return it for the page"
    part,pictures = demo[name],{}
    def keep(learn):
        log = learn.cost_log
        if name=='photograph' and log.seed==0: pictures[log.method] = learned(learn).cpu()
        return {}

    print(f'{part.title}: {len(part.methods)} methods', flush=True)
    runs = run(name, watch=keep)
    runs.to_csv(folder/f'demo_{name}.csv', index=False)
    table,said = ended(runs),in_words(name, runs)
    print(f'\n{table.to_string()}\n\n{said}\n', flush=True)

    fig,ax = plt.subplots(figsize=(8,1.8), layout='constrained')
    bars(ax, runs, part.error)
    if name=='digits': shown = show_digits()
    else:
        image = get_dls('china').train_ds
        shown = show_photographs({'the picture': image.colours.reshape(*image.size, 3).cpu()} |
            {named(method): picture for method,picture in pictures.items()})
    return part.title,part.what,shown+as_image(fig),table.to_html(border=0),said

@call_parse
def main(
    out:str='runs', # Folder for demo.html and the runs
):
    "Train, and write one page"
    torch.set_num_threads(1)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    page = page_of([section(name, folder) for name in demo])
    (folder/'demo.html').write_text(page, encoding='utf-8')
    print(f'All of it with pictures: {folder/"demo.html"}')
