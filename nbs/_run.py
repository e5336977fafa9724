"""Execute notebooks in place, so that their outputs are of one run: `python nbs/_run.py [NOTEBOOK...]`; all of them if none is named

`results/notebooks.csv` says of each which code was run, in which order, with which versions."""
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
    return hashlib.sha1('\n%%\n'.join(c.source for c in read_nb(fn).cells if c.cell_type=='code').encode()).hexdigest()[:12]

def note(fn):
    "Write down what was run"
    df = pd.read_csv(record, index_col='notebook', dtype=str)
    df.loc[fn.resolve().relative_to(nbs).as_posix()] = code_of(fn),platform.python_version(),version('torch'),version('fastai')
    df[[(nbs/name).exists() for name in df.index]].sort_index().to_csv(record)

def run(fn):
    "Execute a notebook, but for the cells that nbdev's tests leave out too"
    nb,tested = nbformat.read(fn, 4),{c.id for c in nb_test_cells(fn)}
    for c in nb.cells:
        if c.cell_type=='code' and c.id not in tested: c.metadata.tags = c.metadata.get('tags', [])+['skip-execution']
    try: NotebookClient(nb, timeout=None, kernel_name='python3', record_timing=False, resources=dict(metadata=dict(path=fn.parent))).execute()
    finally: # an error is to be seen in the notebook
        nbformat.write(nb, fn)
        nbdev_clean.__wrapped__(str(fn))
    note(fn)

def main():
    os.environ['PYTHONWARNINGS'] = 'ignore'
    for fn in map(Path, sys.argv[1:] or sorted(p for p in nbs.rglob('*.ipynb') if '.ipynb_checkpoints' not in p.parts)):
        run(fn)
        print(fn, flush=True)

if __name__=='__main__': main()
