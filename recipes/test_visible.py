"Whoever copies what a page of recipes shows can run it: no cell needs a hidden one"
import os, subprocess, sys
from pathlib import Path

import pytest
from fastcore.nbio import read_nb

root = Path(__file__).parents[1]
pages = sorted((root/'nbs/recipes').glob('*.ipynb'))

def is_visible(cell):
    "Is it code that the site shows?"
    hides = '#| hide','#| hide_input','#| echo: false','#| include: false'
    return cell.cell_type=='code' and not {*hides} & {line.strip() for line in cell.source.splitlines()}

@pytest.mark.slow
@pytest.mark.parametrize('page', pages, ids=lambda page: page.stem)
def test_what_a_page_shows_runs_by_itself(page, tmp_path):
    script = tmp_path/'shown.py'
    script.write_text('\n\n'.join(cell.source for cell in read_nb(page).cells if is_visible(cell)), encoding='utf-8')
    env = os.environ | dict(PYTHONPATH=str(root), MPLBACKEND='agg')
    command = [sys.executable, '-W', 'ignore', script]
    ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert not ended.returncode, ended.stderr[-2000:]
