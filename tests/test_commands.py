"Where commands begin: what is wrong with a line is told before PyTorch is imported"
import subprocess, sys

import pytest
from selback.bench.datasets import datasets, folders
from selback.bench.begin import named_data

def run(command, *args, cwd, then=''):
    "In a process of its own, as its script does"
    imports = f'import sys\nfrom selback.bench.begin import begin_{command} as begin'
    program = f'{imports}\ntry: begin()\nfinally: {then or "pass"}'
    (cwd/'script.py').write_text(program)
    return subprocess.run([sys.executable, 'script.py', *args], capture_output=True, text=True, cwd=cwd)

@pytest.mark.parametrize('command,args,said', [
    ('doctor', ['nowhere'], "nowhere', wanted a folder of class folders"),
    ('doctor', ['--size', '64', 'flat'], 'a folder without images in class folders'),
    ('doctor', ['flat', '--apply', 'answers.csv'], 'a folder without images in class folders'),
    ('doctor', ['data', '--out', 'mine/index.html'], 'in whose folder there is odd.csv already'),
    ('doctor', ['data', '--sise', '64'], 'unrecognized arguments: --sise 64'),
    ('compare', ['--seeds', '2', '--data', 'nowhere'], "'nowhere', wanted one of digits, "),
    ('compare', ['--data=flat'], 'a folder without images in class folders')])
def test_a_slip_is_told_at_once(command, args, said, tmp_path):
    for name in ('flat/1.png','data/cats/1.png','mine/odd.csv'):
        (tmp_path/name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path/name).touch()
    told = run(command, *args, cwd=tmp_path, then="print('torch' in sys.modules)")
    assert told.returncode and told.stdout=='False\n'
    assert said in told.stderr and 'Traceback' not in told.stderr

def test_data_that_has_a_name_is_no_folder(): assert {*named_data}=={*datasets, *folders}

@pytest.mark.slow # the whole of an import
@pytest.mark.parametrize('command,args', [('doctor',['data','--apply','answers.csv']), ('compare',['--data=data'])])
def test_imports_warn_of_nothing(command, args, tmp_path):
    (tmp_path/'data/cats').mkdir(parents=True)
    for i in range(2): (tmp_path/f'data/cats/{i}.png').touch()
    told = run(command, *args, cwd=tmp_path)
    assert told.stderr.count('\n')==1 and 'got 2 images of one class' in told.stderr and told.stdout==''
