"The experiments run from top to bottom, and what is stored of them is whole"
import os, re, subprocess, sys
from pathlib import Path

import pandas as pd, pytest
from fastcore.nbio import read_nb

root = Path(__file__).parents[1]
experiments = sorted((root/'nbs/experiments').glob('*.ipynb'))

@pytest.mark.parametrize('fn', experiments, ids=lambda p: p.stem)
def test_it_runs_at_a_tiny_scale(fn, tmp_path):
    code = '\n\n'.join(''.join(c.source) for c in read_nb(fn).cells if c.cell_type=='code')
    script = tmp_path/'run.py'
    script.write_text(f"import matplotlib\nmatplotlib.use('Agg')\ndisplay = print\n{code}", encoding='utf-8')
    done = subprocess.run([sys.executable, '-W', 'ignore', script], cwd=fn.parent, env=os.environ | dict(SELBACK_SCALE='tiny', OMP_NUM_THREADS='1'), capture_output=True, text=True)
    assert done.returncode==0, done.stderr[-2000:]

@pytest.mark.parametrize('name', ['cifar10','imagenette','label_noise','multi_label'])
def test_stored_runs_are_whole(name):
    files = sorted((root/'results'/name).glob('*.csv'))
    assert files
    for file in files:
        df = pd.read_csv(file)
        assert {'device','torch','fastai','python','arch','n_train','n_valid'}<=set(df.columns)
        if 'seed' not in df: continue # times, not runs
        assert (df.groupby('method').seed.nunique()>=3).all(), f'{file}: fewer than 3 seeds'
        for c in ('device','torch','fastai','python','budget','lr'): assert df[c].nunique()==1, f'{file}: several {c}'

def test_a_scale_that_nobody_knows_is_an_error(monkeypatch):
    from selback.experiments import scale
    monkeypatch.setenv('SELBACK_SCALE', 'Paper')
    with pytest.raises(ValueError, match="SELBACK_SCALE: got 'Paper', wanted one of small, paper, tiny"): scale()

def test_results_lie_apart_by_scale(monkeypatch, tmp_path):
    from selback.experiments import results
    (tmp_path/'results').mkdir()
    (tmp_path/'a/b').mkdir(parents=True)
    monkeypatch.chdir(tmp_path/'a/b')
    assert results('x')==tmp_path/'results/x' and (tmp_path/'results/x').is_dir()
    monkeypatch.setenv('SELBACK_SCALE', 'paper')
    assert results('x')==tmp_path/'results/x_paper'
    monkeypatch.setenv('SELBACK_SCALE', 'tiny')
    assert results('x')!=results('x') and not list(results('x').iterdir()) and tmp_path not in results('x').parents

def test_the_parts_of_a_step_are_timed_where_they_happen(monkeypatch):
    "By a clock that each part moves on by an amount of its own"
    from fastai.callback.core import Callback
    from helpers import table_learner, TopLossCallback
    import selback.experiments as e
    t = [0.]
    monkeypatch.setattr(e, 'now', lambda device: t[0])
    class Slow(TopLossCallback):
        def choose(self, scores): t[0] += 1; return super().choose(scores)
    class Parts(Callback):
        order = 30
        def before_epoch(self): t[0] += 1000 # outside of training
        def after_pred(self): t[0] += 10
        def before_backward(self): t[0] += 0
        def after_step(self): t[0] += 10_000
    learn = table_learner(cbs=[Slow(.5, warmup=0, auto=False), Parts(), *(times := e.step_times())])
    n,backward = len(learn.dls.train),learn._backward
    learn._backward = lambda: (t.__setitem__(0, t[0]+100), backward())
    with learn.no_bar(),learn.no_logging(): learn.fit(2)
    assert times[0].seconds==dict(selection=2*n, forward=20*n, backward=200*n, other=20_000*n)
