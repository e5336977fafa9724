"What an import brings: a plain loop needs no fastai, the star face no workbench"
import subprocess, sys
from pathlib import Path

import pytest
import selback

pytestmark = pytest.mark.slow # new processes

package = Path(selback.__file__).parent

def test_plain_modules_import_no_fastai():
    plain = ['functional', *(f'core.{file.stem}' for file in (package/'core').glob('*.py') if file.stem!='__init__')]
    imports = [f'import selback.{name}' for name in plain]
    of_fastai = "[m for m in sys.modules if m.split('.')[0] in ('fastai','fastcore')]"
    program = '\n'.join(['import sys', *imports, f'assert not {of_fastai}'])
    assert len(plain)>10
    subprocess.run([sys.executable, '-c', program], check=True, cwd='/')

def test_all_has_compare_and_race_without_importing_them():
    program = """
import sys
from selback.all import *
assert not [m for m in sys.modules if m.startswith(('selback.bench','fastai.vision.data'))]
try: compare(None, 'none')
except TypeError as e: print(e)
try: race(None)
except TypeError as e: print(e)
"""
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=True)
    assert done.stdout=='get_learner: got NoneType, wanted a function that returns a new learner.\n'*2
