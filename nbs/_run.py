"""Export the package, list its messages, and execute notebooks in place: `python nbs/_run.py [NOTEBOOK...]`

If none is named, those whose code has changed since they were run. Each says in its metadata, under `run`, which code
its outputs are of, and of which versions."""
import hashlib, os, platform, sys
from importlib.metadata import version
from pathlib import Path

import nbformat
from fastcore.nbio import read_nb
from nbclient import NotebookClient
from nbdev.clean import nbdev_clean
from nbdev.doclinks import nbdev_export
from nbdev.test import nb_test_cells

import _messages

nbs = Path(__file__).parent.resolve()

def code_of(fn):
    "What tells the code of a notebook, in its order, from any other"
    sources = [c.source for c in read_nb(fn).cells if c.cell_type=='code']
    return hashlib.sha1('\n%%\n'.join(sources).encode()).hexdigest()[:12]

def versions(): return dict(python=platform.python_version(), torch=version('torch'), fastai=version('fastai'))

def was_run(fn):
    "Are its outputs of the code that it has?"
    return read_nb(fn).metadata.get('run', {}).get('code')==code_of(fn)

def run(fn):
    "Execute a notebook, but for the cells that nbdev's tests leave out too"
    nb = nbformat.read(fn, 4)
    nb.metadata.pop('run', None)
    tested = {c.id for c in nb_test_cells(fn)}
    for c in nb.cells:
        is_left_out = c.cell_type=='code' and c.id not in tested
        if is_left_out: c.metadata.tags = [*c.metadata.get('tags', []), 'skip-execution']

    resources = dict(metadata=dict(path=fn.parent))
    client = NotebookClient(nb, timeout=None, kernel_name='python3', record_timing=False, resources=resources)
    try:
        client.execute()
        nb.metadata['run'] = dict(versions(), code=code_of(fn))
    finally: # an error is to be seen in the notebook
        nb.metadata.pop('widgets', None) # their state holds each image twice
        nbformat.write(nb, fn)
        nbdev_clean.__wrapped__(str(fn))

def all_notebooks(): return sorted(p for p in nbs.rglob('*.ipynb') if '.ipynb_checkpoints' not in p.parts)

def main():
    os.environ['PYTHONWARNINGS'] = 'ignore'
    nbdev_export.__wrapped__()
    _messages.write()
    for fn in map(Path, sys.argv[1:] or [fn for fn in all_notebooks() if not was_run(fn)]):
        print(fn, flush=True)
        run(fn)

if __name__=='__main__': main()
