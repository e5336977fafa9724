"Execute notebooks in place, so that their outputs are of one run: `python nbs/_run.py [NOTEBOOK...]`; all of them if none is named"
import os, sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbdev.clean import nbdev_clean
from nbdev.test import nb_test_cells

nbs = Path(__file__).parent
os.environ['PYTHONWARNINGS'] = 'ignore'

for fn in map(Path, sys.argv[1:] or sorted(p for p in nbs.rglob('*.ipynb') if '.ipynb_checkpoints' not in p.parts)):
    nb,run = nbformat.read(fn, 4),{c.id for c in nb_test_cells(fn)}
    for c in nb.cells:
        if c.cell_type=='code' and c.id not in run: c.metadata.tags = c.metadata.get('tags', [])+['skip-execution']
    try: NotebookClient(nb, timeout=None, kernel_name='python3', record_timing=False, resources=dict(metadata=dict(path=fn.parent))).execute()
    finally: # an error is to be seen in the notebook
        nbformat.write(nb, fn)
        nbdev_clean.__wrapped__(str(fn))
    print(fn, flush=True)
