"""Execute notebooks in place, so that their outputs are of one run: `python nbs/_run.py [NOTEBOOK...]`

If none is named, all of them. `results/notebooks.csv` says of each which code was run, in which order,
with which versions."""
import hashlib, os, platform, sys
from importlib.metadata import version
from pathlib import Path

import nbformat, pandas as pd
from fastcore.nbio import read_nb
from nbclient import NotebookClient
from nbdev.clean import nbdev_clean
from nbdev.test import nb_test_cells

nbs = Path(__file__).parent.resolve()
record = nbs.parent/'results/notebooks.csv'

def code_of(fn):
    "What tells the code of a notebook, in its order, from any other"
    sources = [c.source for c in read_nb(fn).cells if c.cell_type=='code']
    return hashlib.sha1('\n%%\n'.join(sources).encode()).hexdigest()[:12]

def note(fn):
    "Write down what was run"
    df = pd.read_csv(record, index_col='notebook', dtype=str)
    name = fn.resolve().relative_to(nbs).as_posix()
    df.loc[name] = code_of(fn),platform.python_version(),version('torch'),version('fastai')
    df[[(nbs/name).exists() for name in df.index]].sort_index().to_csv(record)

def run(fn):
    "Execute a notebook, but for the cells that nbdev's tests leave out too"
    nb = nbformat.read(fn, 4)
    tested = {c.id for c in nb_test_cells(fn)}
    for c in nb.cells:
        is_left_out = c.cell_type=='code' and c.id not in tested
        if is_left_out: c.metadata.tags = [*c.metadata.get('tags', []), 'skip-execution']

    resources = dict(metadata=dict(path=fn.parent))
    client = NotebookClient(nb, timeout=None, kernel_name='python3', record_timing=False, resources=resources)
    try: client.execute()
    finally: # an error is to be seen in the notebook
        nb.metadata.pop('widgets', None) # their state holds each image twice
        nbformat.write(nb, fn)
        nbdev_clean.__wrapped__(str(fn))
    note(fn)

def all_notebooks(): return sorted(p for p in nbs.rglob('*.ipynb') if '.ipynb_checkpoints' not in p.parts)

def main():
    os.environ['PYTHONWARNINGS'] = 'ignore'
    for fn in map(Path, sys.argv[1:] or all_notebooks()):
        run(fn)
        print(fn, flush=True)

if __name__=='__main__': main()
