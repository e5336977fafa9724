"What the experiments share: how much they do, and where the time of a step goes"
import os, tempfile, warnings
from pathlib import Path

import pandas as pd
import torch
from fastai.callback.core import Callback, TrainEvalCallback
from fastai.callback.fp16 import MixedPrecision

from selback.bench.findings import Difference, differences, last_epochs, measure_of, options_of
from selback.callback.batch import BatchSelection
from selback.callback.loaders import ChosenWithin
from selback.bench.compute import seconds_now as clock
from selback.core.checks import error_text
from _measured import published # for the notebooks

results_folder = Path(__file__).parents[1]/'results'

_scales = 'small','paper','tiny'

def scale()->str: # 'small', 'paper' or 'tiny'; raises a `ValueError` for anything else
    "How much the experiments do"
    name = os.environ.get('SELBACK_SCALE', 'small')
    if name not in _scales: raise ValueError(error_text('SELBACK_SCALE', repr(name), f"one of {', '.join(_scales)}"))
    return name

def results(
    name:str, # Of the experiment
)->Path: # `results/name`, `results/name_paper`, or a new folder for what is not kept
    "The folder for the runs of an experiment"
    if scale()=='tiny': return Path(tempfile.mkdtemp())
    if scale()=='paper': name = f'{name}_paper'
    path = results_folder/name
    path.mkdir(parents=True, exist_ok=True)
    return path

def stored(
    path:Path, # A CSV file that `compare` wrote, or will
    methods, # As `compare` takes them
    seeds, # Runs of each method, or their seeds
): # The runs, or None if any is missing
    "The runs of a study that is complete, for which neither data nor a learner are made"
    if not path.exists(): return
    if isinstance(seeds, int): seeds = range(seeds)

    runs = pd.read_csv(path)
    runs = runs[runs.method.isin(list(methods)) & runs.seed.isin(seeds)]
    there = set(zip(runs.method, runs.seed))
    wanted = {(method,seed) for method in methods for seed in seeds}
    if wanted<=there: return runs.reset_index(drop=True)

def rows_with(
    runs:pd.DataFrame,
    keys:dict, # Columns, and their values
)->pd.DataFrame:
    "Those of some runs"
    if not len(runs): return runs
    return runs[(runs[[*keys]]==pd.Series(keys)).all(axis=1)]

def once(
    path:Path, # A CSV file of runs
    keys:dict, # Columns by which a run is known, and their values
    make, # A function that returns its rows
    float_format:str='%.6g',
)->pd.DataFrame:
    "The rows of a run, from the file, or made and written there"
    def stored(): return pd.read_csv(path) if path.exists() else pd.DataFrame(columns=[*keys])
    found = rows_with(stored(), keys)
    if len(found): return found
    rows = make()
    pd.concat([stored(), rows]).to_csv(path, index=False, float_format=float_format) # another process may have written
    return rows

class BF16(MixedPrecision):
    "fastai's mixed precision in bf16, on a CPU"
    name = 'mixed_precision'
    def __init__(self): super().__init__('bf16')

    def before_fit(self):
        with warnings.catch_warnings():
            warnings.simplefilter('ignore') # that there is no GPU
            super().before_fit()
        if not torch.cuda.is_available(): self.autocast = torch.autocast('cpu', dtype=torch.bfloat16)

def computes_bf16()->bool:
    "Has the machine instructions for bf16? Elsewhere it is emulated, and a study takes ten times as long"
    if torch.cuda.is_available(): return True
    able = torch.cpu.get_capabilities()
    return able.get('avx512_bf16', False) or able.get('amx_bf16', False)

def in_bf16(
    learn, # A `Learner` whose model takes images
): # The learner
    "Train channels-last, and in bf16 where the machine computes it"
    learn.model.to(memory_format=torch.channels_last)
    return learn.add_cb(BF16()) if computes_bf16() else learn

def end_table(
    runs:pd.DataFrame, # As `compare` returns it, with a column `n_valid`
)->pd.DataFrame: # A row for each method; the differences from plain training and the random control are `Difference`s
    "Means over the seeds at the end of the runs, what they are compared by first, and the deviation of the error"
    measure = measure_of(runs)
    other = 'valid_loss' if measure=='error' else 'error'
    by_method = last_epochs(runs).groupby('method', sort=False)
    seeds = by_method.size().rename('seeds')

    found = differences(runs).reindex(seeds.index)
    spent = by_method[['epoch','forwarded','backpropagated','kept','seconds']].mean()
    spent = spent.assign(deviation=by_method.error.std(), options=[options_of(method) for method in seeds.index])
    return pd.concat([by_method[[measure]].mean(), found, by_method[[other]].mean(), seeds, spent], axis=1)

def styled(
    df:pd.DataFrame, # As `end_table` returns it
): # A `Styler` of pandas
    "The table, for reading"
    def in_brief(found): return found.brief if isinstance(found, Difference) else '-'
    whole = [c for c in ('seeds','epoch','forwarded','backpropagated','seconds') if c in df]
    compared = [c for c in df if c.startswith('vs')]
    return df.style.format(precision=4).format('{:,.0f}', subset=whole).format(in_brief, subset=compared)

class StepTimes(Callback):
    "Seconds that the training of a learner spent where, as `seconds`"
    order,run_valid = BatchSelection.order+1,False

    def __init__(self):
        self.seconds = dict(selection=0., forward=0., backward=0., other=0.)
        self._mark = None # when the last part ended
        self._is_watching = False # are steps made of batches, and timed?

    def lap(self,
        what:str, # A key of `seconds`
    ):
        "The time since the last call was spent on that"
        end = clock(self.dls.device or 'cpu')
        self.seconds[what] += end-self._mark
        self._mark = end

    def _timed(self, batches, before, until):
        "The batches; the time until one is there was spent on `until`, that before it was asked for on `before`"
        while True:
            self.lap(before)
            batch = next(batches, None)
            self.lap(until)
            if batch is None: return
            yield batch

    def before_train(self):
        self._mark = clock(self.dls.device or 'cpu')
        self._is_watching = type(self.learn.dl) is ChosenWithin
        if self._is_watching: self._watch(self.learn.selection, self.learn.dl)

    def _watch(self, selection, loader):
        "Time what a selection makes of a loader's batches; to read them is not its part"
        steps,reads = loader.steps,selection.reads
        vars(selection)['reads'] = lambda dl: self._timed(reads(dl), 'selection', 'other')
        vars(loader)['steps'] = lambda dl: self._timed(steps(dl), 'other', 'selection')

    def before_batch(self): self.lap('selection' if self._is_watching else 'other')
    def after_loss(self): self.lap('forward')
    def after_backward(self): self.lap('backward')
    def after_train(self):
        self.lap('other')
        if self._is_watching: del vars(self.learn.selection)['reads']

def step_times()->list: # Callbacks; the first is a `StepTimes`
    "What times the parts of a step"
    return [StepTimes()]
