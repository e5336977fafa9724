"Each method against plain training, study by study: `python -m studies.measured` writes `results/comparisons.csv`"
from pathlib import Path
from typing import NamedTuple

import numpy as np, pandas as pd

from selback.bench.findings import Difference, is_control, last_epochs, never_selected, paired, words
from studies import elsewhere
from studies.easy_data import first, in_words, own_rate
from studies.experiments import results_folder, rows_with
from studies.items_noise import noise_of_items, widened

class Study(NamedTuple):
    "Runs that differ in the method and the seed alone"
    where:str # The data, and after a comma the budget and what else there is, in words
    page:str # The notebook that ran them, below `nbs`
    files:tuple # Below `results`, without the ending
    measure:str='error' # A column: 'valid_loss' or 'error'
    counts_looks:bool=True # Were the budgets equal in cost? False: in back-propagated items
    rivals:tuple=() # Plain trainings on other data, or with another loss
    given:tuple=() # Methods that got something for free, such as a reference that was there already
    error:str='error' # What the column of that name is, in words
    plain:str='none' # The method that counts as plain training
    draws:tuple=() # Methods that chose as many items as there are, where the files don't tell that they chose
    rows:dict={} # Which rows of the files are this study's: columns, and their values
    n_valid:int|None=None # Items that validate, where files tell which of them are wrong; None: they do not

def _cifar(epochs, name):
    files = tuple(f'without_a_look/{kind}_{name}' for kind in ('plain','best','others'))
    return Study(f'CIFAR-10, {epochs} epochs', 'experiments/without_a_look', files)

def _squared(where, name):
    return Study(where, 'experiments/an_image', (f'an_image/{name}',), error='mean squared error')

def _by_loss(where, page, name, *args):
    return Study(where, page, (name,), 'valid_loss', *args)

def _faster(where, name, *args):
    "At higher learning rates than the search of a study found"
    rates = dict(three=.003, ten=.01)
    return [_by_loss(f'{where}, {times} times the rate', f'experiments/{name}', f'{name}/lr_{lr}', *args)
        for times,lr in rates.items()]

def _regime(where, name, *parts, **kwargs):
    files = tuple(f'where_it_pays/{name}_{part}' for part in ('all',*parts))
    return Study(where, 'experiments/where_it_pays', files, **kwargs)

def _noise(where, name):
    rivals = 'the clean items added','the clean items alone'
    given = 'reducible loss, a clean reference for free',
    return _regime(where, name, 'clean', 'added', 'alone', rivals=rivals, given=given)

def _rates(where, name, **kwargs):
    "A regime at other learning rates"
    page = 'experiments/where_it_pays'
    rates = dict(half=.05, twice=.2)
    return [Study(f'{where}, {times} the rate', page, (f'where_it_pays/{name}_lr_{lr}',), **kwargs)
        for times,lr in rates.items()]

_cifar_studies = [_cifar(6, 'short'), _cifar(20, 'half'), _cifar(40, 'once')]

_image_fits = {
    'pixel by pixel': 'full',
    'at the best rate': 'lr_0.016',
    'at the best rate, equal seconds': 'seconds',
    'less compute': 'less',
    'half the rate': 'lr_0.002',
    'twice the rate': 'lr_0.008',
    'above the best rate': 'lr_0.03',
    'at 640x427': 'own_compute',
    'at 640x427, equal seconds': 'own_seconds'}

_functions = 'friedman1','friedman2'

_regression_studies = [
    *(_squared(f'{image}.jpg, {how}', f'{image}_{name}')
        for how,name in _image_fits.items() for image in ('china','flower')),
    *(_squared(f'{function}, a table, {how} BatchNorm', f'{function}_{how}_batchnorm')
        for function in _functions for how in ('without','with')),
    *(_squared(f'{function}, a table, with BatchNorm, {times} times the rate', f'{function}_with_batchnorm_lr_{lr}')
        for function in _functions for times,lr in dict(three=.015, ten=.05).items())]

_damages = {
    'equal items': 'as_it_is',
    '1 % of the labels wrong': '1_flipped',
    '10 % of the labels wrong': '10_flipped',
    '20 % of the labels wrong': '20_flipped',
    'a quarter of the labels random': '25_random_labels',
    'half of the labels random': '50_random_labels',
    'a quarter of the images shuffled': '25_shuffled_pixels',
    'a quarter of the images random': '25_gaussian_images'}

_small_studies = [
    *(_by_loss(f'digits, {damage}', 'experiments/label_noise', f'label_noise/{name}', False)
        for damage,name in _damages.items()),
    _by_loss('several labels', 'experiments/multi_label', 'multi_label/items', False),
    *_faster('several labels', 'multi_label', False),
    _by_loss('digits, 7 epochs', 'tutorials/demo', 'digits/runs'),
    _by_loss('digits, 8 epochs', 'experiments/forum', 'forum/full_batches'),
    *_faster('digits, 8 epochs', 'forum'),
    _by_loss('digits, 8 epochs, what is left of 64', 'experiments/forum', 'forum/small_batches'),
    _by_loss('digits, 8 epochs, batches of 21', 'experiments/forum', 'forum/batches_of_21')]

def _some_cifar(how, name, *args):
    return Study(f'CIFAR-10, 10,000 images, {how}', 'experiments/cifar10', (f'cifar10/{name}',), *args)

_few_images_studies = [
    _some_cifar('120 seconds', 'time'),
    _some_cifar('120 seconds', 'others'),
    _some_cifar('equal items', 'items', 'error', False),
    _some_cifar('MixUp, equal items', 'mixup', 'error', False),
    _by_loss('digits, as files, equal seconds', 'experiments/imagenette', 'imagenette/digits')]

_large = 'CIFAR-10, 20,000 images, 5 epochs, a larger network'
_worst_kind = 'error of the worst kind'

_regime_studies = [
    _regime('near-duplicates', 'near_duplicates', 'deduplicated', rivals=('deduplicated',)),
    _regime('a long tail of classes', 'long_tail', 'balanced', rivals=('class-balanced',)),
    _regime('rare kinds, hidden', 'hidden_groups', 'balanced', rivals=('kinds known and balanced',), error=_worst_kind),
    _noise('9 % wrong labels, from people', 'noise_9'),
    _noise('40 % wrong labels, from people', 'noise_40'),
    _regime('files to decode, equal seconds', 'files'),
    _regime('segmentation, rare classes', 'segmentation', 'weighted',
        rivals=('weights in the loss',), error='mean IoU error'),
    _regime('CIFAR-10, 10,000 images, 6 epochs', 'little_time'),
    _regime(_large, 'proxy', given=('a proxy, already paid',)),
    *_rates(_large, 'proxy'),
    *_rates('a long tail of classes', 'long_tail'),
    *_rates('rare kinds, hidden', 'hidden_groups', error=_worst_kind)]

def _shortcut(where, name, error):
    files = f'shortcuts/{name}_all',f'shortcuts/{name}_balanced'
    return Study(where, 'experiments/shortcuts', files, rivals=('groups known',), error=error)

_worst_group = 'error of the worst group'

_shortcut_studies = [
    _shortcut('a red border, 95 %', 'border_95', _worst_group),
    _shortcut('a red border, 98 %', 'border_98', _worst_group),
    _shortcut('a red border, 99.5 %', 'border_995', _worst_group),
    _shortcut('a red border, 98 %, 5 % of the labels wrong', 'border_98_wrong', _worst_group),
    _shortcut('corruptions, 98 %', 'corrupted', 'error where class and corruption disagree'),
    _shortcut('coloured digits, 95 %', 'digits', 'error at any colour'),
    _shortcut('rare kinds, no shortcut', 'rare_kinds', _worst_kind),
    _shortcut('CIFAR-10, 20,000 images at 16x16, no shortcut', 'ordinary', 'error')]

def _pretrained(where, name, *parts, **kwargs):
    files = tuple(f'pretrained/{name}_{part}' for part in ('all',*parts))
    return Study(f'CIFAR-10, a pretrained network{where}', 'experiments/pretrained', files, **kwargs)

_pretrained_studies = [
    _pretrained('', 'clean', 'others'),
    _pretrained(', a red border, 98 %', 'border', 'balanced', rivals=('groups known',), error=_worst_group),
    _pretrained(', 40 % wrong labels, from people', 'noisy'),
    _pretrained(', its body frozen', 'frozen')]

_pool = 'a pool, shuffled'

def _equation(where, name):
    "New points in each step are the control; a pool that is shuffled is a rival"
    files = tuple(f'an_equation/{name}_best_{kind}' for kind in ('pool','fresh_points','RAD','R3','settings'))
    return Study(where, 'experiments/an_equation', files, rivals=(_pool,'RAD','R3'), error='error of the solution',
        plain='fresh points')

_equation_studies = [
    _equation('Burgers, points', 'burgers'),
    _equation('advection, points', 'advection'),
    _equation('heat, points', 'heat')]

def _easy(name):
    "A kind of data, at plain training's best rate"
    cell = first[name]
    where = f'{in_words[name]}, {cell.n:,} items, {cell.epochs} epochs'
    rows = cell._asdict() | dict(lr=own_rate(name))
    files = 'easy_data_plain','easy_data'
    n_valid = elsewhere.n_valid if name==elsewhere.cell.data else None
    return Study(where, 'experiments/easy_data', files, draws=('prioritized_sampling',), rows=rows, n_valid=n_valid)

_easy_studies = [_easy(name) for name in first if name!='digits'] # too few digits validate it

studies = [*_easy_studies, *_cifar_studies, *_regression_studies, *_small_studies, *_few_images_studies,
    *_regime_studies, *_shortcut_studies, *_pretrained_studies, *_equation_studies]

def _verdict(difference):
    if difference.seeds==1: return 'one seed'
    if not difference.is_clear: return 'no clear difference'
    return 'better' if difference.mean<0 else 'worse'

def _outcome(ends, method, measure, n_valid=None):
    """A method's difference from plain training and the verdict on it; None if no seed ran both. Which items validate
    counts where it is known which of the `n_valid` are wrong"""
    own,plain = (ends[ends.method==m].set_index('seed')[measure] for m in (method,'none'))
    shared = own.index.intersection(plain.index)
    if not len(shared): return
    if not np.isfinite([*own, *plain[shared]]).all(): return None,'diverged' # the seeds that went well would flatter it
    difference = paired(ends, method, measure=measure)
    if n_valid: difference = widened(difference, noise_of_items(ends, method, n_valid))
    return difference,_verdict(difference)

def _runs_of(study, top):
    files = [top/f'{name}.csv' for name in study.files]
    there = [rows_with(pd.read_csv(f), study.rows) for f in files if f.exists()]
    if not there: return pd.DataFrame(columns=['method'])
    runs = pd.concat(there)
    if study.plain=='none': return runs
    return runs.assign(method=runs.method.replace({'none': _pool, study.plain: 'none'}))

def _idle_in(study, runs):
    "What chooses by losses and never did"
    return {m for m in never_selected(runs) if not is_control(m) and m not in (*study.rivals,*study.draws)}

def _lookers(ends):
    "What forwarded more than it trained"
    return set(ends.method[ends.forwarded>1.01*ends.backpropagated])

def _not_counted(study, method, looks):
    "What a method had beyond the budget, in words"
    if method in study.given: return 'what it was given'
    return 'looks' if looks and not study.counts_looks else ''

def _loss_of(study, ends, method):
    "A method's difference in validation loss; None where that says nothing new, or there is none"
    has_loss = study.measure=='error' and not (ends.error==ends.valid_loss).all()
    if not has_loss or method in study.rivals: return
    outcome = _outcome(ends, method, 'valid_loss')
    return outcome and outcome[0]

def _of_study(study, top):
    "A row for each method but plain training"
    runs = _runs_of(study, top)
    if 'none' not in set(runs.method): return []
    ends = last_epochs(runs)
    idle,lookers = _idle_in(study, runs),_lookers(ends)
    about = dict(where=study.where, data=study.where.partition(',')[0], page=study.page)
    measure = study.error if study.measure=='error' else words[study.measure]

    rows = []
    for method in ends.method[ends.method!='none'].unique():
        outcome = (None,'never selected') if method in idle else _outcome(ends, method, study.measure, study.n_valid)
        if outcome is None: continue
        difference,verdict = outcome
        loss = None if difference is None else _loss_of(study, ends, method)
        not_counted = _not_counted(study, method, method in lookers)
        rows.append(dict(about, method=method, difference=difference, verdict=verdict, measure=measure, loss=loss,
            not_counted=not_counted, equal_cost=not not_counted, is_rival=method in study.rivals))
    return rows

columns = 'where','data','page','method','difference','verdict','measure','loss','not_counted','equal_cost','is_rival'

def comparisons(
    top:Path|str|None=None, # The folder `results`; None: that of the checkout
)->pd.DataFrame: # A row for each study and method; `difference` and `loss` (of validation): `Difference`s or None
    "What each method was worth against plain training, in each study whose runs are there"
    top = Path(top or results_folder)
    return pd.DataFrame([row for study in studies for row in _of_study(study, top)], columns=columns)

def as_table(
    df:pd.DataFrame, # As `comparisons` returns it
)->pd.DataFrame: # Of numbers and words alone
    "The same for a file: the differences in columns of their own"
    parts = [df.drop(columns=['difference','loss'])]
    for name in 'difference','loss':
        fields = [o._asdict() if isinstance(o, Difference) else {} for o in df[name]]
        parts.append(pd.DataFrame(fields, columns=Difference._fields, index=df.index).add_prefix(f'{name}_'))
    return pd.concat(parts, axis=1)

def write(
    top:Path|str|None=None, # The folder `results`; None: that of the checkout
):
    "Write what cards, guide and first page read"
    top = Path(top or results_folder)
    as_table(comparisons(top)).to_csv(top/'comparisons.csv', index=False, float_format='%.14g')

if __name__=='__main__': write()
