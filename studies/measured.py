"Each method against plain training, study by study: `python -m studies.measured` writes `results/comparisons.csv`"
from pathlib import Path
from typing import NamedTuple

import numpy as np, pandas as pd

from selback.bench.findings import Difference, is_control, last_epochs, never_selected, paired, words
from studies.experiments import results_folder

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

def _cifar(epochs, name): return Study(f'CIFAR-10, {epochs} epochs', 'experiments/without_a_look', tuple(f'without_a_look/{kind}_{name}' for kind in ('plain','best','others')))
def _regime(where, name, *parts, **kwargs): return Study(where, 'experiments/where_it_pays', tuple(f'where_it_pays/{name}_{part}' for part in ('all',*parts)), **kwargs)
def _faster(where, name, *args): return [Study(f'{where}, {times} times the rate', f'experiments/{name}', (f'{name}/lr_{lr}',), 'valid_loss', *args) for times,lr in (('three',.003),('ten',.01))]
def _rates(where, name, **kwargs): return [Study(f'{where}, {times} the rate', 'experiments/where_it_pays', (f'where_it_pays/{name}_lr_{lr}',), **kwargs) for times,lr in (('half',.05),('twice',.2))]
def _squared(where, name): return Study(where, 'experiments/an_image', (f'an_image/{name}',), error='mean squared error')
def _noise(where, name): return _regime(where, name, 'clean', 'added', 'alone', rivals=('the clean items added','the clean items alone'), given=('reducible loss, a clean reference for free',))

studies = [_cifar(6, 'short'), _cifar(20, 'half'), _cifar(40, 'once'),
    *(_squared(f'{image}.jpg, {how}', f'{image}_{name}') for how,name in {'pixel by pixel': 'full', 'at the best rate': 'lr_0.016', 'at the best rate, equal seconds': 'seconds', 'less compute': 'less',
        'half the rate': 'lr_0.002', 'twice the rate': 'lr_0.008', 'above the best rate': 'lr_0.03'}.items() for image in ('china','flower')),
    *(_squared(f'{function}, a table, {how} BatchNorm', f'{function}_{how}_batchnorm') for function in ('friedman1','friedman2') for how in ('without','with')),
    *(_squared(f'{function}, a table, with BatchNorm, {times} times the rate', f'{function}_with_batchnorm_lr_{lr}') for function in ('friedman1','friedman2') for times,lr in (('three',.015),('ten',.05))),
    *(Study(f'digits, {damage}', 'experiments/label_noise', (f'label_noise/{name}',), 'valid_loss', False) for damage,name in {'equal items': 'as_it_is', '1 % of the labels wrong': '1_flipped',
        '10 % of the labels wrong': '10_flipped', '20 % of the labels wrong': '20_flipped', 'a quarter of the labels random': '25_random_labels', 'half of the labels random': '50_random_labels',
        'a quarter of the images shuffled': '25_shuffled_pixels', 'a quarter of the images random': '25_gaussian_images'}.items()),
    Study('several labels', 'experiments/multi_label', ('multi_label/items',), 'valid_loss', False),
    *_faster('several labels', 'multi_label', False),
    Study('digits, 7 epochs', 'tutorials/demo', ('digits/runs',), 'valid_loss'), Study('digits, 8 epochs', 'experiments/forum', ('forum/full_batches',), 'valid_loss'),
    *_faster('digits, 8 epochs', 'forum'), *(Study(f'digits, 8 epochs, {how}', 'experiments/forum', (f'forum/{name}',), 'valid_loss') for how,name in (('what is left of 64','small_batches'),('batches of 21','batches_of_21'))),
    *(Study('CIFAR-10, 10,000 images, 120 seconds', 'experiments/cifar10', (f'cifar10/{name}',)) for name in ('time','others')),
    *(Study(f'CIFAR-10, 10,000 images, {how}equal items', 'experiments/cifar10', (f'cifar10/{name}',), 'error', False) for how,name in (('','items'),('MixUp, ','mixup'))),
    Study('digits, as files, equal seconds', 'experiments/imagenette', ('imagenette/digits',), 'valid_loss'),
    _regime('near-duplicates', 'near_duplicates', 'deduplicated', rivals=('deduplicated',)), _regime('a long tail of classes', 'long_tail', 'balanced', rivals=('class-balanced',)), _regime('rare kinds, hidden', 'hidden_groups', 'balanced', rivals=('kinds known and balanced',), error='error of the worst kind'),
    _noise('9 % wrong labels, from people', 'noise_9'), _noise('40 % wrong labels, from people', 'noise_40'), _regime('files to decode, equal seconds', 'files'),
    _regime('segmentation, rare classes', 'segmentation', 'weighted', rivals=('weights in the loss',), error='mean IoU error'), _regime('CIFAR-10, 10,000 images, 6 epochs', 'little_time'),
    _regime('CIFAR-10, 20,000 images, 5 epochs, a larger network', 'proxy', given=('a proxy, already paid',)), *_rates('CIFAR-10, 20,000 images, 5 epochs, a larger network', 'proxy'),
    *_rates('a long tail of classes', 'long_tail'), *_rates('rare kinds, hidden', 'hidden_groups', error='error of the worst kind')]

def _outcome(ends, method, measure):
    "A method's difference from plain training and the verdict on it; None if no seed ran both"
    own,plain = (ends[ends.method==m].set_index('seed')[measure] for m in (method,'none'))
    shared = own.index.intersection(plain.index)
    if not len(shared): return
    if not np.isfinite([*own, *plain[shared]]).all(): return None,'diverged' # the seeds that went well would flatter it
    return (found := paired(ends, method, measure=measure)),_verdict(found)

def _verdict(difference):
    if difference.seeds==1: return 'one seed'
    if not difference.is_clear: return 'no clear difference'
    return 'better' if difference.mean<0 else 'worse'

def _of_study(study, top):
    runs = pd.concat([pd.read_csv(f) for f in (top/f'{name}.csv' for name in study.files) if f.exists()] or [pd.DataFrame(columns=['method'])])
    if 'none' not in set(runs.method): return []
    ends,idle = last_epochs(runs),never_selected(runs)
    found = {m: (None,'never selected') if m in idle and not is_control(m) and m not in study.rivals else _outcome(ends, m, study.measure) for m in ends.method.unique() if m!='none'}
    looks = ends.assign(looks=ends.forwarded>1.01*ends.backpropagated).groupby('method').looks.any()
    has_loss = study.measure=='error' and not (ends.error==ends.valid_loss).all()
    def loss_of(m): return (_outcome(ends, m, 'valid_loss') or [None])[0] if has_loss and m not in study.rivals else None
    def not_counted(m): return 'what it was given' if m in study.given else 'looks' if looks[m] and not study.counts_looks else ''
    measure = study.error if study.measure=='error' else words[study.measure]
    return [dict(where=study.where, data=study.where.partition(',')[0], page=study.page, method=m, difference=o[0], verdict=o[1], measure=measure, loss=o[0] and loss_of(m), not_counted=not_counted(m), equal_cost=not not_counted(m), is_rival=m in study.rivals)
        for m,o in found.items() if o]

columns = 'where','data','page','method','difference','verdict','measure','loss','not_counted','equal_cost','is_rival'

def comparisons(
    top:Path|str|None=None, # The folder `results`; None: that of the checkout
)->pd.DataFrame: # A row for each study and method; `difference` and `loss`, that of the validation loss, are a `Difference` or None
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
    as_table(comparisons(top)).to_csv(top/'comparisons.csv', index=False)

if __name__=='__main__': write()
