"The experiments run from top to bottom, and what is stored of them is whole"
import warnings
from pathlib import Path

import matplotlib
matplotlib.use('agg')
import matplotlib.pyplot as plt, pandas as pd, pytest
from fastcore.nbio import read_nb
from selback.bench.compare import get_dls
from selback.bench import compare

root = Path(__file__).parents[2]
experiments = sorted((root/'nbs/experiments').glob('*.ipynb'))

@pytest.mark.parametrize('fn', experiments, ids=lambda p: p.stem)
def test_it_runs_at_a_tiny_scale(fn, monkeypatch):
    "All its code in a namespace of its own"
    def three_batches(data, bs, n_train=None, *args):
        return get_dls(data, bs, n_train and min(n_train, 3*bs), *args)
    monkeypatch.setattr(compare, 'get_dls', three_batches)
    monkeypatch.setenv('SELBACK_SCALE', 'tiny')
    monkeypatch.chdir(fn.parent)
    code = '\n\n'.join(''.join(c.source) for c in read_nb(fn).cells if c.cell_type=='code')
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        try: exec(compile(code, fn, 'exec'), dict(__name__='__main__', display=print))
        finally: plt.close('all')

def least_seeds(study):
    "How many runs of each method a study has at least, by its name"
    if study.startswith(('search_','fit_')): return 1 # settings are chosen, and why a gain ends is looked at, on one
    if '_own_lr_' in study: return 1 # a search on one seed
    if study.endswith('_once'): return 1 # long runs say how few they are
    has_own_seeds = study.endswith(('_settings','_search')) or '_rate_' in study # that no result is of
    return 2 if has_own_seeds else 3

with_runs = ['cifar10','imagenette','label_noise','multi_label','an_image','without_a_look','where_it_pays','race',
    'forum','noise_cifar10','shortcuts','an_equation','pretrained']

@pytest.mark.parametrize('name', with_runs)
def test_stored_runs_are_whole(name):
    files = sorted((root/'results'/name).rglob('*.csv'))
    assert files
    for file in files:
        df = pd.read_csv(file)
        assert {'device','torch','fastai','python','arch','n_valid'}<=set(df.columns)
        if 'seed' not in df: continue # times, not runs
        least = least_seeds(file.stem)
        assert (df.groupby('method').seed.nunique()>=least).all(), f'{file}: fewer than {least} seeds'
        for column in ('device','torch','fastai','python','budget','lr'):
            assert df[column].nunique()==1, f'{file}: several {column}'

def test_results_lie_apart_by_scale(monkeypatch, tmp_path):
    from studies.experiments import results
    monkeypatch.setattr('studies.experiments.results_folder', tmp_path/'results')
    assert results('x')==tmp_path/'results/x'
    assert (tmp_path/'results/x').is_dir()

    monkeypatch.setenv('SELBACK_SCALE', 'paper')
    assert results('x')==tmp_path/'results/x_paper'

    monkeypatch.setenv('SELBACK_SCALE', 'tiny')
    assert results('x')!=results('x')
    assert not list(results('x').iterdir())
    assert tmp_path not in results('x').parents

class HandClock:
    "A clock that stands still unless it is moved on"
    def __init__(self): self.seconds = 0.
    def pass_by(self, seconds): self.seconds += seconds

@pytest.fixture
def hand_clock(monkeypatch):
    "What times the parts of a step"
    clock = HandClock()
    monkeypatch.setattr('studies.experiments.clock', lambda device: clock.seconds)
    return clock

@pytest.mark.parametrize('gather', [False,True])
def test_the_parts_of_a_step_are_timed_where_they_happen(gather, hand_clock):
    "By a clock that each part moves on by an amount of its own; a step that gathers reads two batches"
    from fastai.callback.core import Callback
    from helpers import BatchSelection, TopLoss, table_learner
    from studies.experiments import step_times

    class Slow(TopLoss):
        def choose(self, scores, now):
            hand_clock.pass_by(1)
            return super().choose(scores, now)

    class Parts(Callback):
        order = 30
        def before_epoch(self): hand_clock.pass_by(1e9) # outside of training
        def after_pred(self): hand_clock.pass_by(10)
        def after_step(self): hand_clock.pass_by(10_000)

    times = step_times()
    learn = table_learner(cbs=[BatchSelection(Slow(.5, gather=gather), warmup=0), Parts(), *times])
    assert len(learn.dls.train)==7 # six batches of 16 and one of 4
    _ = learn.dls.n_inp # which passes a batch through all transforms, once

    backward = learn._backward
    def slow_backward():
        hand_clock.pass_by(100)
        backward()
    learn._backward = slow_backward

    def slow_batch(batch):
        hand_clock.pass_by(1e6)
        return batch
    learn.dls.train.after_batch = slow_batch

    with learn.no_bar(),learn.no_logging(): learn.fit(2)
    read,steps = 2*7,len(learn.recorder.losses)
    assert steps==(8 if gather else 14) # gathered: 50 chosen items an epoch
    assert times[0].seconds==dict(selection=read, forward=10*steps, backward=100*steps, other=10_000*steps+1e6*read)
