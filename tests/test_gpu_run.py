"The run that is prepared for a GPU, tried on a CPU"
import subprocess, sys
from pathlib import Path

import pandas as pd, pytest
from benchmarks.gpu import run_all

root = Path(__file__).parents[1]

def test_a_part_that_fails_or_is_too_slow_holds_up_no_other(tmp_path):
    code = dict(slow='import time; print("begun", flush=True); time.sleep(60)', wrong='1/0', right='print("done")')
    rows = run_all({name: [sys.executable, '-c', text] for name,text in code.items()}, dict(slow=2, wrong=30, right=30),
        tmp_path)
    assert [row['ended'] for row in rows]==['out of time',1,0]
    assert pd.read_csv(tmp_path/'gpu.csv').part.tolist()==['slow','wrong','right']
    said = {name: (tmp_path/f'gpu_{name}.txt').read_text() for name in code}
    assert said['slow']=='begun\n' and said['right']=='done\n' and 'ZeroDivisionError' in said['wrong']

@pytest.mark.slow
def test_the_run_itself_at_a_tiny_scale(tmp_path):
    command = [sys.executable, root/'benchmarks/gpu.py', '--device', 'cpu', '--scale', 'tiny', '--out', tmp_path]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    told = {f.stem: f.read_text()[-800:] for f in tmp_path.glob('*.txt')}
    assert not done.returncode, told
    assert pd.read_csv(tmp_path/'gpu.csv').part.tolist()==['tests','watching','looking','cifar10']
    watched,looked,rows = (pd.read_csv(tmp_path/f'gpu_{name}.csv') for name in ('watching','looking','cifar10'))
    assert {*zip(watched.side, watched.kind)}=={(side, kind) for side in (32,128,224) for kind in ('plain','watched')}
    assert looked.what.tolist()==['epoch','refit_head','find_copies','suspects']
    assert (looked.seconds>0).all() and watched.machine.notna().all()
    assert rows.method.nunique()==3
