"What is uploaded works in an empty environment, outside of the checkout"
import re, subprocess, sys, tarfile, zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

root = Path(__file__).parents[1]
uv = sys.executable,'-m','uv'

def run(*cmd, **kwargs):
    done = subprocess.run([*map(str, cmd)], capture_output=True, text=True, **kwargs)
    assert done.returncode==0, f'{cmd}: {done.stdout[-1500:]}{done.stderr[-1500:]}'
    return done.stdout

def run_code(python, code, **kwargs): return run(python, '-W', 'ignore', '-c', code, **kwargs)

@pytest.fixture(scope='module')
def dist(tmp_path_factory):
    "An sdist, and a wheel that is built from it"
    out = tmp_path_factory.mktemp('dist')
    run(sys.executable, '-m', 'build', '--installer', 'uv', '--outdir', out, root)
    return out

@pytest.fixture(scope='module')
def wheel(dist): return Wheel(next(dist.glob('*.whl')))

@pytest.fixture(scope='module')
def python(wheel, tmp_path_factory):
    "The Python of an environment that has nothing but the wheel and what it asks for"
    env = tmp_path_factory.mktemp('env')
    run(*uv, 'venv', '--quiet', '--clear', '--python', sys.executable, env)
    run(*uv, 'pip', 'install', '--quiet', '--python', env/'bin/python', wheel.path)
    return env/'bin/python'

class Wheel:
    "What a wheel holds"
    def __init__(self, path):
        self.path = path
        with zipfile.ZipFile(path) as z: self.files = z.namelist()

    def read(self, end):
        "The file whose name ends so"
        name = next(name for name in self.files if name.endswith(end))
        with zipfile.ZipFile(self.path) as z: return z.read(name)

    @property
    def metadata(self): return message_from_bytes(self.read('/METADATA'))

    @property
    def urls(self): return dict(url.split(', ', 1) for url in self.metadata.get_all('Project-URL'))

def test_metadata(wheel):
    meta = wheel.metadata
    assert meta['Name']=='selback'
    assert meta['License-Expression']=='Apache-2.0'
    assert meta['Description-Content-Type']=='text/markdown'
    assert meta.get_payload().startswith('# selback')
    assert {'Repository','Homepage'}<=set(wheel.urls)

def test_files_of_the_wheel(wheel):
    there = [path for path in (root/'selback').rglob('*.*') if path.is_file() and path.suffix!='.pyc']
    exported = {path.relative_to(root).as_posix() for path in there}
    assert 'selback/.agents/skills/selback/SKILL.md' in exported
    assert {name for name in wheel.files if '.dist-info/' not in name}==exported
    assert any(name.endswith('licenses/LICENSE') for name in wheel.files)

    scripts = wheel.read('/entry_points.txt').decode()
    assert 'selback-compare = selback.bench.begin:begin_compare' in scripts
    assert 'selback-doctor = selback.bench.begin:begin_doctor' in scripts
    assert '[nbdev]' in scripts

def test_files_of_the_sdist(dist):
    with tarfile.open(next(dist.glob('*.tar.gz'))) as t: inside = {name.partition('/')[2] for name in t.getnames()}
    assert {'setup.py','pyproject.toml','README.md','LICENSE'}<=inside

def test_pictures_and_links_of_the_readme_show_on_the_package_index(wheel):
    repo,text = wheel.urls['Repository'],wheel.metadata.get_payload()
    links = re.findall(rf'\]\({repo}/(raw|blob)/main/([^)#]+)', text)
    assert links
    for kind,path in links:
        assert (root/path).is_file()
        assert (kind=='raw')==path.endswith('.png')
    assert not re.findall(r'\]\((?!https?:)[^)]*\)', text)

def quick_start():
    "The code of the README, on small images that are at hand, without weights to download"
    [code] = re.findall(r'```python\n(.*?)```', (root/'README.md').read_text(encoding='utf-8'), re.S)
    changes = {'Resize(224)': 'Resize(32), num_workers=0', 'metrics=': 'pretrained=False, metrics=', '(3)': '(1)'}
    for there,here in changes.items():
        assert there in code
        code = code.replace(there, here)
    return code

def test_it_works_where_nothing_else_is_installed(python, tmp_path):
    script = tmp_path/'quick_start.py'
    is_installed = f'import selback\nassert {str(root)!r} not in selback.__file__'
    photos = 'from pathlib import Path\nfrom selback.bench.datasets import example_folder\n'
    photos += 'Path("photos").symlink_to(example_folder())'
    told = f'{is_installed}\n{photos}\n{quick_start()}\nprint(learn.selection.card)\n'
    script.write_text(told, encoding='utf-8')
    assert 'WatchItemsCallback' in run(python, '-W', 'ignore', script, cwd=tmp_path)
    assert '--methods' in run(python.parent/'selback-compare', '--help', cwd=tmp_path)
    assert '--arch' in run(python.parent/'selback-doctor', '--help', cwd=tmp_path)

IMPORTED = '''
import sys, selback.functional
others = 'fastai','fastcore','pandas','matplotlib','sklearn','torchvision'
print([name for name in others if name in sys.modules])
'''

def test_functional_needs_neither_fastai_nor_pandas(python, tmp_path):
    assert run(python, '-c', IMPORTED, cwd=tmp_path).strip()=='[]'

def module_of(file): return file.removesuffix('.py').removesuffix('/__init__').replace('/', '.')

def test_every_module_of_the_wheel_imports(wheel, python, tmp_path):
    "With what the package asks for, and nothing else"
    modules = sorted(module_of(name) for name in wheel.files if name.endswith('.py'))
    assert {'selback.core.losses','selback.bench.race','selback.all'}<=set(modules)
    assert not [name for name in modules if 'studies' in name]
    run_code(python, f'import importlib\nfor name in {modules}: importlib.import_module(name)', cwd=tmp_path)

BY_THE_COMMAND = {'n-train': 64, 'n-valid': 32, 'bs': 16, 'compute': 128, 'seeds': 1, 'methods': 'none,favor_hard'}
BY_THE_FUNCTION = '''
from fastai.vision.all import *
from selback.all import *
from selback.bench.datasets import get_dls, small_resnet

def learner():
    dls = get_dls('digits', 16, 64, 32)
    return Learner(dls, small_resnet(10), CrossEntropyLossFlat(), metrics=error_rate)

runs = compare(learner, ['none','favor_hard'], compute=64, seeds=1, plot=False)
print(sorted(set(runs.method)))
'''

def test_it_compares_in_an_empty_folder(python, tmp_path):
    "The command and the function, on data that need no download"
    options = [word for name,value in BY_THE_COMMAND.items() for word in (f'--{name}', value)]
    run(python.parent/'selback-compare', *options, cwd=tmp_path)
    assert {'runs.csv','summary.csv','table.md','compare.png'}<={path.name for path in (tmp_path/'runs').iterdir()}
    assert "['favor_hard', 'none']" in run_code(python, BY_THE_FUNCTION, cwd=tmp_path)
