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

@pytest.fixture(scope='module')
def dist(tmp_path_factory):
    "An sdist, and a wheel that is built from it"
    out = tmp_path_factory.mktemp('dist')
    run(sys.executable, '-m', 'build', '--installer', 'uv', '--outdir', out, root)
    return out

@pytest.fixture(scope='module')
def python(dist, tmp_path_factory):
    "The Python of an environment that has nothing but the wheel and what it asks for"
    env,wheel = tmp_path_factory.mktemp('env'),next(dist.glob('*.whl'))
    run(*uv, 'venv', '--quiet', '--clear', '--python', sys.executable, env)
    run(*uv, 'pip', 'install', '--quiet', '--python', env/'bin/python', wheel)
    return env/'bin/python'

def metadata(wheel):
    with zipfile.ZipFile(wheel) as z: return message_from_bytes(z.read(next(n for n in z.namelist() if n.endswith('/METADATA'))))

def test_metadata_and_files(dist):
    wheel,sdist = next(dist.glob('*.whl')),next(dist.glob('*.tar.gz'))
    meta = metadata(wheel)
    with zipfile.ZipFile(wheel) as z:
        names = z.namelist()
        scripts = z.read(next(n for n in names if n.endswith('/entry_points.txt'))).decode()
    assert meta['Name']=='selback' and meta['License-Expression']=='Apache-2.0' and meta['Description-Content-Type']=='text/markdown'
    assert meta.get_payload().startswith('# selback') and {'Repository','Homepage'}<={o.partition(',')[0] for o in meta.get_all('Project-URL')}
    assert all(o in scripts for o in ('selback-compare = selback.bench.command:main', '[nbdev]'))
    exported = {p.relative_to(root).as_posix() for p in (root/'selback').rglob('*.py')}
    assert {n for n in names if '.dist-info/' not in n}==exported and any(n.endswith('licenses/LICENSE') for n in names)
    with tarfile.open(sdist) as t: inside = {n.partition('/')[2] for n in t.getnames()}
    assert {'settings.ini','setup.py','pyproject.toml','README.md','LICENSE'}<=inside

def test_pictures_and_links_of_the_readme_show_on_the_package_index(dist):
    meta = metadata(next(dist.glob('*.whl')))
    repo,text = next(o.partition(', ')[2] for o in meta.get_all('Project-URL') if o.startswith('Repository')),meta.get_payload()
    links = re.findall(rf'\]\({repo}/(raw|blob)/main/([^)#]+)', text)
    assert links and all((root/path).is_file() and (kind=='raw')==path.endswith('.png') for kind,path in links)
    assert not re.findall(r'\]\((?!https?:)[^)]*\)', text)

def test_it_works_where_nothing_else_is_installed(python, tmp_path):
    quick_start = next(c for c in re.findall(r'```python\n(.*?)```', (root/'README.md').read_text(encoding='utf-8'), re.S) if 'get_dls' in c)
    script = tmp_path/'quick_start.py'
    script.write_text(f"import selback\nassert {str(root)!r} not in selback.__file__\n{quick_start}\nprint(learn.selection.card)\n", encoding='utf-8')
    assert 'FavorHardCallback' in run(python, '-W', 'ignore', script, cwd=tmp_path)
    assert '--methods' in run(python.parent/'selback-compare', '--help', cwd=tmp_path)

def test_functional_needs_neither_fastai_nor_pandas(python, tmp_path):
    code = "import sys, selback.core.functional; print([m for m in ('fastai','fastcore','pandas','matplotlib','sklearn','torchvision') if m in sys.modules])"
    assert run(python, '-c', code, cwd=tmp_path).strip()=='[]'

def test_every_module_of_the_wheel_imports(dist, python, tmp_path):
    "With what the package asks for, and nothing else"
    with zipfile.ZipFile(next(dist.glob('*.whl'))) as z: files = [n for n in z.namelist() if n.endswith('.py')]
    modules = sorted(n.removesuffix('.py').removesuffix('/__init__').replace('/','.') for n in files)
    assert {'selback.core.losses','selback.bench.race','selback.compare'}<=set(modules) and not [m for m in modules if 'studies' in m]
    run(python, '-W', 'ignore', '-c', f'import importlib\nfor m in {modules}: importlib.import_module(m)', cwd=tmp_path)

def test_it_compares_in_an_empty_folder(python, tmp_path):
    "The command and the function, on data that need no download"
    run(python.parent/'selback-compare', '--n-train', 64, '--n-valid', 32, '--bs', 16, '--compute', 64, '--seeds', 1, '--methods', 'none,favor_hard', cwd=tmp_path)
    assert {'runs.csv','summary.csv','table.md','compare.png'}<={p.name for p in (tmp_path/'runs').iterdir()}
    code = '''
from fastai.vision.all import *
from selback.bench.datasets import get_dls, small_resnet
from selback.compare import compare
def learner(): return Learner(get_dls('digits', 16, 64, 32), small_resnet(10), CrossEntropyLossFlat(), metrics=error_rate)
print(sorted(set(compare(learner, ['none','favor_hard'], compute=64, seeds=1, plot=False).method)))
'''
    assert "['favor_hard', 'none']" in run(python, '-W', 'ignore', '-c', code, cwd=tmp_path)
