"""Photographs at their own size, pixel by pixel, at equal compute and in equal seconds: `python -m studies.photographs`
runs what is not stored yet, on one thread"""
from functools import partial

import numpy as np, pandas as pd, torch
from fastai.learner import Learner
from fastai.metrics import mse
from fastai.torch_core import default_device
from sklearn.datasets import load_sample_image

from selback.bench.compare import compare, environment
from selback.bench.findings import last_epochs, paired
from studies.experiments import results, scale, stored
from studies.pixels import CoordinateNet, photograph, pixel_dls

METHODS = 'none','favor_hard(beta=2)','prioritized_sampling(alpha=0.5,uniform=0.25)'
ITEMS = 427*640
plan = dict(
    tiny=dict(images=['china'], compute=.1*ITEMS, seconds=.1, rates=[.008], searched_on=[5], seeds=[0]),
    small=dict(images=['china','flower'], compute=24*ITEMS, seconds=30, rates=[.002,.004,.008,.016], searched_on=[5],
        seeds=[0,1,2]))
plan['paper'] = plan['small']|dict(compute=96*ITEMS, seconds=120)

def learner(image, full_size=True):
    "Of a photograph, pixel by pixel, at its own 640x427 or at 192x128"
    dls = pixel_dls(load_sample_image(f'{image}.jpg') if full_size else photograph(image), 1024)
    return Learner(dls, CoordinateNet(3), metrics=mse)

def study(
    folder, # For the files
    image:str, # 'china' or 'flower'
    name:str, # Of the file
    methods, # As `compare` takes them
    seeds, # Of the runs of each method
    lr:float, # The highest learning rate
    only_stored:bool=False, # None in place of runs that are not stored?
    **budget # `compute` or `seconds`
):
    "Runs of one budget and one rate, in a file of their own"
    path = folder/f'{image}_own_{name}.csv'
    if only_stored and stored(path, methods, seeds) is None: return
    about = dict(data=image, arch='coordinate_net', bs=1024, n_valid=ITEMS, size='640x427',
        **environment(default_device()))
    return compare(partial(learner, image), list(methods), seeds=seeds, lr=lr, path=path, plot=False, about=about,
        tell_controls=False, **budget)

def searched(folder, image, only_stored=False):
    "Plain training at each rate, on a seed of its own: the error at the end by the rate; None if a run is missing"
    of = plan[scale()]
    runs = {lr: study(folder, image, f'lr_{lr:g}', ['none'], of['searched_on'], lr, only_stored, compute=of['compute'])
        for lr in of['rates']}
    if any(o is None for o in runs.values()): return
    return pd.Series({lr: last_epochs(o).error.mean() for lr,o in runs.items()})

def all_runs(
    folder, # For the files, or with them
    only_stored:bool=False, # None if a run is missing?
)->dict|None: # By image: the errors of plain training by rate, its best rate, and the runs by what was equal
    "Search plain training's rate for each image, then train at equal compute and in equal seconds"
    of,found = plan[scale()],{}
    for image in of['images']:
        errors = searched(folder, image, only_stored)
        if errors is None: return
        lr = float(errors.idxmin())
        runs = {unit: study(folder, image, unit, METHODS, of['seeds'], lr, only_stored, **{unit: of[unit]})
            for unit in ('compute','seconds')}
        if any(o is None for o in runs.values()): return
        found[image] = dict(errors=errors, lr=lr, **runs)
    return found

def decibels(error): return -10*np.log10(error)

def gains(
    runs:pd.DataFrame, # Of one image and one budget
    method:str, # Beside plain training
)->pd.Series: # By seed
    "What a method brings, in decibels"
    error = last_epochs(runs).set_index(['method','seed']).error
    return decibels(error[method])-decibels(error['none'])

def rate_table(found):
    "Plain training by rate, in decibels"
    return pd.DataFrame({image: decibels(o['errors']) for image,o in found.items()}).rename_axis('learning rate')

def own_size_table(
    found:dict, # As `all_runs` returns it
)->pd.DataFrame: # A row for each image and method
    "Against plain training at equal compute and in equal seconds, and how much of the gain is left by the worst seed"
    rows = []
    for image,of in found.items():
        for method in METHODS[1:]:
            by_compute,by_time = gains(of['compute'], method),gains(of['seconds'], method)
            ends = {unit: last_epochs(of[unit], 'data') for unit in ('compute','seconds')}
            rows.append({'image': image, 'method': method,
                'equal compute, vs plain': paired(ends['compute'], method).brief,
                'equal seconds, vs plain': paired(ends['seconds'], method).brief,
                'gain, dB': by_compute.mean(), 'in equal seconds, dB': by_time.mean(),
                'of that, worst seed': (by_time/by_compute).min()})
    return pd.DataFrame(rows).set_index(['image','method'])

if __name__=='__main__':
    torch.set_num_threads(1)
    found = all_runs(results('an_image'))
    print(rate_table(found).round(2).to_string())
    print(own_size_table(found).round(2).to_string())
