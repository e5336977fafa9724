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
    code = '\n\n'.join(''.join(c.source) for c in read_nb(fn).cells if c.cell_type=='code')
    monkeypatch.setenv('SELBACK_SCALE', 'tiny')
    monkeypatch.chdir(fn.parent)
    monkeypatch.setattr(compare, 'get_dls', lambda data, bs, n_train=None, *args: get_dls(data, bs, n_train and min(n_train, 3*bs), *args)) # three batches an epoch
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        try: exec(compile(code, fn, 'exec'), dict(__name__='__main__', display=print))
        finally: plt.close('all')

@pytest.mark.parametrize('name', ['cifar10','imagenette','label_noise','multi_label','an_image','without_a_look','where_it_pays','race','forum','noise_cifar10'])
def test_stored_runs_are_whole(name):
    files = sorted((root/'results'/name).rglob('*.csv'))
    assert files
    for file in files:
        df = pd.read_csv(file)
        assert {'device','torch','fastai','python','arch','n_valid'}<=set(df.columns)
        if 'seed' not in df: continue # times, not runs
        least = 1 if file.stem.startswith(('search_','fit_')) or file.stem.endswith('_once') else 2 if file.stem.endswith('_settings') else 3 # settings are chosen on seeds that no result is of; long runs say how few they are; why a gain ends is looked at on one
        assert (df.groupby('method').seed.nunique()>=least).all(), f'{file}: fewer than {least} seeds'
        for c in ('device','torch','fastai','python','budget','lr'): assert df[c].nunique()==1, f'{file}: several {c}'

def test_a_scale_that_nobody_knows_is_an_error(monkeypatch):
    from studies.experiments import scale
    monkeypatch.setenv('SELBACK_SCALE', 'Paper')
    with pytest.raises(ValueError, match="SELBACK_SCALE: got 'Paper', wanted one of small, paper, tiny"): scale()

def test_results_lie_apart_by_scale(monkeypatch, tmp_path):
    from studies.experiments import results
    monkeypatch.setattr('studies.experiments.results_folder', tmp_path/'results')
    assert results('x')==tmp_path/'results/x' and (tmp_path/'results/x').is_dir()
    monkeypatch.setenv('SELBACK_SCALE', 'paper')
    assert results('x')==tmp_path/'results/x_paper'
    monkeypatch.setenv('SELBACK_SCALE', 'tiny')
    assert results('x')!=results('x') and not list(results('x').iterdir()) and tmp_path not in results('x').parents

@pytest.mark.parametrize('gather', [False,True])
def test_the_parts_of_a_step_are_timed_where_they_happen(gather, monkeypatch):
    "By a clock that each part moves on by an amount of its own; a step that gathers reads two batches"
    from types import SimpleNamespace
    from fastai.callback.core import Callback
    from helpers import table_learner, TopLossCallback
    import studies.experiments as e
    t = [0.]
    monkeypatch.setattr(e, 'clock', lambda device: t[0])
    monkeypatch.setattr('selback.callback.loader.time', SimpleNamespace(perf_counter=lambda: t[0]))
    class Slow(TopLossCallback):
        def choose(self, scores): t[0] += 1; return super().choose(scores)
    class Parts(Callback):
        order = 30
        def before_epoch(self): t[0] += 1e9 # outside of training
        def after_pred(self): t[0] += 10
        def after_step(self): t[0] += 10_000
    learn = table_learner(cbs=[Slow(.5, warmup=0, auto=False, gather=gather), Parts(), *(times := e.step_times())])
    n,backward,_ = len(learn.dls.train),learn._backward,learn.dls.n_inp # which passes a batch through all transforms, once
    learn._backward = lambda: (t.__setitem__(0, t[0]+100), backward())
    learn.dls.train.after_batch = lambda b: (t.__setitem__(0, t[0]+1e6), b)[1]
    with learn.no_bar(),learn.no_logging(): learn.fit(2)
    steps = len(learn.recorder.losses)
    assert n==7 and steps==(8 if gather else 14) # six batches of 16 and one of 4: 50 chosen items
    assert times[0].seconds==dict(selection=2*n, forward=10*steps, backward=100*steps, other=10_000*steps+1e6*2*n)
