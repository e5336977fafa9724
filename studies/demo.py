"""Wrong labels, digits whose colours mislead, and a photograph learned point by point: `python -m studies.demo` trains
on each, in minutes, and writes one page"""
import base64, io, textwrap
from functools import partial
from html import escape
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt, pandas as pd, torch
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import error_rate
from fastai.torch_core import set_seed
from fastcore.script import call_parse

from selback.all import EarlyLossSamplingCallback, RandomSubsetCallback
from selback.bench.compare import compare, describe
from selback.bench.datasets import coloured_digits, flip_labels, get_dls, small_convnet
from selback.bench.findings import last_epochs, relative, signed
from selback.views.views import tidy
from studies import photographs
from studies.experiments import scale
from studies.pixels import learned, photograph, pixel_dls
from studies.regimes import sgd

# Labels that are wrong

class Searched(NamedTuple):
    "A training that was watched, and the truth"
    learn:Learner
    is_wrong:torch.Tensor # By dataset index

    @property
    def found(self): # Shape (n,)
        "How many of the wrong labels are among the first so many suspects"
        suspects = self.learn.selection.suspects().index.tolist()
        return self.is_wrong[suspects].cumsum(0)

def watched_digits(
    share:float=.1, # Of the labels for training that are wrong
)->Searched:
    "Train on digits, and watch"
    set_seed(0, reproducible=True)
    dls = get_dls('digits', n_train=200 if scale()=='tiny' else None)
    is_wrong = flip_labels(dls.train_ds, share)
    learn = Learner(dls, small_convnet(10, .5), CrossEntropyLossFlat(), metrics=error_rate).watch_items()
    with learn.no_bar(),learn.no_logging(): learn.fit_one_cycle(4, .01)
    return Searched(learn, is_wrong)

def found_table(
    found, # As `Searched` has it
)->pd.DataFrame: # A row for each length of the list
    "How many wrong labels are found if the list is looked at so far"
    n_wrong,n = int(found[-1]),len(found)
    lengths = [n_wrong//4,n_wrong//2,n_wrong,n_wrong*3//2]
    rows = [{'wrong labels': int(found[k-1]), 'by chance': round(k*n_wrong/n)} for k in lengths]
    return pd.DataFrame(rows, index=[f'the first {k} suspects' for k in lengths])

def found_in_words(
    found, # As `Searched` has it
)->str:
    "What a look at as many suspects as there are wrong labels comes to"
    n_wrong = int(found[-1])
    return (f'Of the first {n_wrong} suspects among {len(found):,} labels {found[n_wrong-1]} are wrong; '
        f'{n_wrong} are in all. The training is the one that you do anyway: watching adds no pass and leaves nothing '
        'out (nbs/tutorials/noisy_labels.ipynb goes on from here).')

# Methods beside plain training

class Part(NamedTuple):
    "A situation, and what trains on it"
    title:str
    what:str # A sentence about it
    learner:callable # Makes a learner
    methods:dict # As `compare` takes them: plain training, a method, and the random control
    lr:float # The highest learning rate: plain training's best in the study
    compute:float # Of each run, in items trained
    error:str # What the error is called
    study:str # The page where it is measured

def random_half(): return RandomSubsetCallback(.5, before_loading=True)
def early(): return EarlyLossSamplingCallback(after=2)

def coloured_learner():
    "As in the study, but in single precision, which any CPU computes well; validated at any colour"
    dls = get_dls('coloured_digits', n_train=200 if scale()=='tiny' else None)
    return Learner(dls, small_convnet(10, .5), CrossEntropyLossFlat(), opt_func=sgd, metrics=error_rate)

demo = dict(
    digits=Part('Digits whose colours mislead',
        '95 of 100 digits for training have the colour of their class, so that a network learns colours. In the test '
        'they have any colour. early_loss_sampling() keeps the losses of the second epoch, in which what contradicts '
        'the colours is still hard, and draws by them.',
        coloured_learner, {'none': 'none', 'early_loss_sampling': early, 'random half': random_half},
        .0125, 20_000, 'error at any colour', 'shortcuts'),
    photograph=Part('A photograph, learned point by point',
        'A network learns the colour at each place of a picture. Plain training takes all 24,576 points in turn; '
        'favor_hard(beta=2) takes those more often whose last loss ranks high.',
        partial(photographs.learner, 'china', full_size=False),
        {'none': 'none', 'favor_hard(beta=2)': 'favor_hard(beta=2)', 'random half': random_half},
        .016, 500_000, 'mean squared error', 'an_image'))

def named(method): return 'plain training' if method=='none' else method

def run(
    name:str, # One of `demo`
    watch=None, # As `compare` takes it
)->pd.DataFrame: # A row for each epoch of each run
    "Two runs of each method, at equal compute"
    part = demo[name]
    compute,seeds = (part.compute,2) if scale()!='tiny' else (1000,1)
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
    shown = shown.assign(**{'against plain': vs_plain}).rename(index=named)
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
    fig.savefig(file, format='png', dpi=150)
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
    fig,axes = plt.subplots(2, 2, figsize=(6,4.4), layout='constrained')
    for ax,(title,picture) in zip(axes.flat, pictures.items()):
        ax.imshow(picture)
        ax.set_title(title)
        ax.axis('off')
    return as_image(fig)

def show_digits():
    "A few digits for training, and of the test"
    train,_,test = coloured_digits()
    fig,axes = plt.subplots(2, 10, figsize=(6,1.7), layout='constrained')
    for row,title,(images,labels,_) in zip(axes, ('training','test'), (train,test)):
        for kind,ax in enumerate(row):
            ax.imshow(images[labels==kind][0].permute(1,2,0))
            ax.axis('off')
        row[0].set_title(title, loc='left')
    return as_image(fig)

OWN = """\
# FOLDER has a folder of images for each class. Wrong labels, copies and odd images of it, on one page:
.venv/bin/selback-doctor FOLDER

# The same labels with a pretrained network. In .venv/bin/python:
from fastai.vision.all import *
from selback.all import *
dls = ImageDataLoaders.from_folder('FOLDER', valid_pct=.2, item_tfms=Resize(224))
learn = vision_learner(dls, resnet18, metrics=error_rate).watch_items()
learn.fine_tune(3)
learn.selection.suspects().to_csv('suspects.csv')

# Which method is worth it? In a shell again:
.venv/bin/selback-compare --data FOLDER --arch resnet18 --lr .001,.003,.01 --race"""

STYLE = '''body {font: 16px/1.5 system-ui, sans-serif; max-width: 42em; margin: 2em auto; padding: 0 1em}
h1 {font-size: 1.6em; line-height: 1.2} h2 {font-size: 1.25em; margin-top: 2em} img {width: 100%} div {overflow-x: auto}
table {border-collapse: collapse; font-size: .9em; margin: .5em 0} tr {border-bottom: 1px solid #ccc}
td, th {padding: .2em .5em; text-align: right; font-weight: normal} th:first-child {text-align: left}
pre {white-space: pre-wrap; font-size: .85em}'''

def page_of(
    sections, # As `tell` returns them
)->str:
    "One page of HTML"
    head = ('<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<title>selback: demo</title><style>{STYLE}</style>')
    own = f'<h2>On your own images</h2><pre>{escape(OWN)}</pre>'
    return f'{head}<h1>Which labels are wrong, and what choosing examples is worth</h1>{"".join(sections)}{own}'

def tell(title, what, pictures, table, said):
    "Print what came of a part, and return it for the page"
    print(f'\n{table.to_string()}\n\n{textwrap.fill(said, 110)}\n', flush=True)
    shown = f'<div>{table.to_html(border=0)}</div>'
    return f'<h2>{title}</h2><p>{what}</p><p><b>{said}</b></p>{pictures}{shown}'

def show_found(found):
    "Wrong labels found, by how many suspects are looked at"
    n_wrong,n = int(found[-1]),len(found)
    fig,ax = plt.subplots(figsize=(6,2.2), layout='constrained')
    looked_at = range(1, n+1)
    ax.plot(looked_at, found, color='C1', label='the first suspects')
    ax.plot(looked_at, [k*n_wrong/n for k in looked_at], color='grey', label='any labels')
    tidy(ax, xlabel='labels looked at', ylabel='wrong ones found', xlim=(0,3*n_wrong), ylim=(0,n_wrong*1.05))
    ax.legend(frameon=False, loc='center right')
    return as_image(fig)

def find_labels():
    "Search wrong labels"
    title = 'Digits, a tenth of which have a wrong label'
    print(f'{title}: one training', flush=True)
    searched = watched_digits()
    searched.learn.selection.show_suspects(10, nrows=2, figsize=(6,4))
    suspects = as_image(plt.gcf())
    what = ('Plain training with learn.watch_items() remembers what was predicted of each digit. '
        'learn.selection.suspects() then lists all labels, the most suspect first. Of the first ones the picture shows '
        'the <i>label</i>, and as <i>likelier</i> what was predicted in its place.')
    found = searched.found
    return tell(title, what, suspects+show_found(found), found_table(found), found_in_words(found))

def compare_methods(name, folder):
    "Run a part of the comparison"
    part,pictures = demo[name],{}
    def keep(learn):
        log = learn.cost_log
        if name=='photograph' and log.seed==0: pictures[log.method] = learned(learn).cpu()
        return {}

    print(f'{part.title}: {len(part.methods)} methods', flush=True)
    runs = run(name, watch=keep)
    runs.to_csv(folder/f'demo_{name}.csv', index=False)
    fig,ax = plt.subplots(figsize=(6,1.6), layout='constrained')
    bars(ax, runs, part.error)
    if name=='digits': shown = show_digits()
    else:
        image = pixel_dls(photograph('china')).train_ds
        shown = show_photographs({'the picture': image.colours.reshape(*image.size, 3).cpu()} |
            {named(method): picture for method,picture in pictures.items()})
    return tell(part.title, part.what, shown+as_image(fig), ended(runs), in_words(name, runs))

@call_parse
def main(
    out:str='runs', # Folder for demo.html and the runs
):
    "Train, and write one page"
    torch.set_num_threads(1)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    page = page_of([find_labels(), *(compare_methods(name, folder) for name in demo)])
    (folder/'demo.html').write_text(page, encoding='utf-8')
    print(f'On your own images:\n\n{OWN}\n\nAll of the above with pictures: {folder/"demo.html"}')
