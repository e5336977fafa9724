"The repository agrees with itself"
import ast, importlib, importlib.metadata, inspect, json, pkgutil, re, subprocess
from itertools import chain
from pathlib import Path

import pandas as pd, pytest, yaml
from fastcore.docments import docments
from nbdev.clean import clean_nb
from nbdev.export import nb_export
from fastcore.nbio import read_nb
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import _measured, _messages
from _readme import readme
from _run import was_run

try: import tomllib
except ModuleNotFoundError: import tomli as tomllib

root = Path(__file__).parents[1]
notebooks = sorted(p for p in (root/'nbs').rglob('*.ipynb') if '.ipynb_checkpoints' not in p.parts)
code = [p for p in notebooks if p.stem[0].isdigit()] # the others are tutorials and the index
folders = 'core','methods','callback','views','clean','.','bench' # from the ground up; `all` is outside of them
project = tomllib.loads((root/'pyproject.toml').read_text(encoding='utf-8'))['project']
requirements = list(map(Requirement, project['dependencies']))
pythons = [kind.rpartition(' ')[2] for kind in project['classifiers'] if 'Python :: 3.' in kind] # the oldest first
TEXT = '.py','.toml','.ini','.md','.ipynb','.yml','.yaml','.cfg','.in',''

def text_in(path): return (root/path).read_text(encoding='utf-8')

def cells_of(nb): return json.loads(nb.read_text(encoding='utf-8'))['cells']

def source(cell): return ''.join(cell['source'])

def code_cells(nb): return [cell for cell in cells_of(nb) if cell['cell_type']=='code']

def page_text(name): return ''.join('\n'+source(cell) for cell in cells_of(root/f'nbs/{name}.ipynb'))

def shown_text(cell):
    outputs = [o['data'] for o in cell['outputs'] if 'text/markdown' in o.get('data', {})]
    return [''.join(data['text/markdown']) for data in outputs]

def id_of(p): return p.relative_to(root/'nbs').as_posix() if isinstance(p, Path) else None

def tracked():
    listed = subprocess.run(['git', 'ls-files'], cwd=root, capture_output=True, text=True)
    if listed.returncode: pytest.skip('not a git checkout')
    files = [root/name for name in listed.stdout.splitlines()]
    return [f for f in files if f.suffix in TEXT and f.is_file()]

# Metadata
def test_each_fact_is_in_one_file():
    once = project['description'],project['authors'][0]['name']
    for fact in once:
        files = [f for f in tracked() if f.name!='_modidx.py' and fact in f.read_text(encoding='utf-8')]
        assert len(files)==1, f'{fact!r} is stated in {[f.relative_to(root).as_posix() for f in files]}'

def test_addresses_are_of_one_owner():
    owner,name = project['urls']['Repository'].split('/')[-2:]
    address = re.compile(rf'github[\w.]*/([\w-]+)/{name}\b|//([\w-]+)\.github\.io/{name}\b')
    files = [f for f in tracked() if f.parent!=root/'release'] # whose tests have other owners
    owners = {''.join(found) for f in files for found in address.findall(f.read_text(encoding='utf-8'))}
    assert owners=={owner}

def test_the_version_is_the_first_of_the_changelog():
    version = re.search(r'"(.+)"', text_in('selback/__init__.py'))[1]
    assert re.search(r'^## (\S+)', text_in('CHANGELOG.md'), re.M)[1]==version

def test_each_requirement_is_stated_once():
    specs = [*project['dependencies'], *chain(*project['optional-dependencies'].values())]
    names = [Requirement(spec).name for spec in specs]
    assert len(names)==len(set(names))

def test_installed_metadata_is_that_of_the_file():
    meta = importlib.metadata.metadata('selback')
    assert meta['Name']=='selback'
    assert meta['Summary']==project['description']
    assert meta['License-Expression']=='Apache-2.0'
    assert meta['Requires-Python']==project['requires-python']==f'>={pythons[0]}'
    assert meta.get_all('Classifier')==project['classifiers']
    assert meta['Author']==project['authors'][0]['name']
    assert meta['Version']==re.search(r'"(.+)"', text_in('selback/__init__.py'))[1]
    assert {r.name for r in requirements}<={Requirement(spec).name for spec in meta.get_all('Requires-Dist')}
    assert set(meta.get_all('Provides-Extra'))==set(project['optional-dependencies'])

SOUGHT = 'noisy-labels','label-errors','class-imbalance','hard-examples','shortcut-learning','near-duplicates'

def test_what_people_search_for_is_among_the_keywords(): assert set(SOUGHT)<=set(project['keywords'])

def jobs(workflow): return yaml.safe_load(text_in(f'.github/workflows/{workflow}.yml'))['jobs']

def test_ci_runs_every_python_and_the_oldest_of_what_is_needed():
    tested = jobs('test')
    assert tested['test']['strategy']['matrix']['python']==pythons
    oldest = json.dumps(tested['oldest'])
    assert 'lowest-direct' in oldest
    assert f'"python-version": "{pythons[0]}"' in oldest
    for needed in requirements: assert '>=' in {bound.operator for bound in needed.specifier}, f'{needed}: from which?'

def test_ci_runs_commands_that_exist():
    steps = [step for name in ('test','docs','release') for job in jobs(name).values() for step in job['steps']]
    commands = '\n'.join([text_in('.ci/run'), *(step.get('run', '') for step in steps)])
    targets = re.findall(r'\bmake ([\w-]+)', commands)
    assert {'test','test-all','check','docs'}<=set(targets)
    for target in targets: assert f'\n{target}:' in text_in('Makefile')
    for file in re.findall(r'tests/\w+\.py', commands): assert (root/file).exists(), file

# Notebooks
def body(p): return re.sub(r'^# (%% |AUTOGENERATED).*$', '', p.read_text(), flags=re.M)

def test_the_package_is_what_the_notebooks_export(tmp_path):
    lib = tmp_path/'selback'
    for nb in code: nb_export(nb, lib_path=lib)
    exported = {p.relative_to(lib): p for p in lib.rglob('*.py')}
    there = {p.relative_to(root/'selback') for p in (root/'selback').rglob('*.py') if p.name!='__init__.py'}
    assert exported
    assert there-set(exported)=={Path('_modidx.py')}
    for name,p in exported.items(): assert body(p)==body(root/'selback'/name), f'{name}: run nbdev-export'

OF_A_MACHINE = re.compile(r'(/home/|/root/|/tmp/|/work/|site-packages)')

@pytest.mark.parametrize('nb', notebooks, ids=id_of)
def test_notebooks_are_clean_and_their_outputs_too(nb):
    cleaned = read_nb(nb)
    clean_nb(cleaned, allowed_out_metadata_keys=['image/png'])
    for cell,clean in zip(cells_of(nb), cleaned.cells):
        assert cell.get('metadata', {})==dict(clean.get('metadata', {})), 'run nbdev-clean'
        assert cell.get('execution_count') is None, 'run nbdev-clean'
        for output in cell.get('outputs', []):
            assert output['output_type']!='error'
            assert output.get('name')!='stderr'
            assert not OF_A_MACHINE.search(json.dumps(output.get('data', output.get('text', ''))))

@pytest.mark.parametrize('nb', code, ids=id_of)
def test_notebooks_have_a_title_a_caption_and_lead_on(nb):
    first,*more = [source(cell) for cell in cells_of(nb)]
    assert re.match(r'# .+\n\n> .+', first)
    assert any('#| default_exp' in text for text in more)

@pytest.mark.parametrize('nb', notebooks, ids=id_of)
def test_a_title_cell_has_nothing_below_its_caption(nb):
    "nbdev makes front matter of the cell, and drops the rest"
    first = source(cells_of(nb)[0])
    assert re.fullmatch(r'# .+\n\n> .+\s*', first), 'move the text into a cell of its own'

# Floors
def floors():
    "The place of each module: its folder's, then the number of its notebook"
    found = {re.search(r'default_exp ([\w.]+)', nb.read_text())[1]: int(nb.stem[:2]) for nb in code}
    return {name: (folders.index(name.rpartition('.')[0] or '.'), number) for name,number in found.items()}

def is_plain_torch(name):
    "Is a module for loops of one's own, too?"
    return name=='functional' or name.startswith(('core.','methods.'))

def imports_of(name):
    "The modules that a module imports from: those of the package without its name"
    package = ['selback',*name.split('.')]
    tree = ast.parse(text_in(f"selback/{name.replace('.','/')}.py"))
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom): continue
        base = package[:-node.level] if node.level else []
        yield '.'.join([*base, *(node.module or '').split('.')]).removeprefix('selback.')

def test_imports_go_down_only():
    where = floors()
    for name,floor in where.items():
        for target in imports_of(name):
            if target in where: assert where[target]<floor, f'{name} {floor} imports {target} {where[target]}'
            if not is_plain_torch(name): continue
            assert target.split('.')[0] not in ('fastai','fastcore'), f'{name} is plain PyTorch, but imports {target}'

IMPORTS_A_STUDY = re.compile(r'^\s*(from|import) studies\b', re.M)

@pytest.mark.parametrize('folder', ['selback','tests','benchmarks'])
def test_nothing_but_pages_of_evidence_needs_a_study(folder):
    "A study may use all of the package, and nothing in it a study"
    for file in (root/folder).rglob('*.py'):
        assert not IMPORTS_A_STUDY.search(file.read_text(encoding='utf-8')), file
    pages = [nb for nb in notebooks if nb.parent.name!='experiments']
    for nb in pages:
        assert not [cell for cell in code_cells(nb) if IMPORTS_A_STUDY.search(source(cell))], nb

# The first page, and what is measured on pages
def test_readme_is_made_from_the_index():
    text,pictures = readme()
    assert pictures
    assert (root/'README.md').read_text()==text, 'run make readme'
    for path,picture in pictures.items(): assert (root/path).read_bytes()==picture, 'run make readme'
    for link in re.findall(r'\]\(((?!http)[^)#]+)\)', text): assert (root/link).exists(), link

def test_readme_is_read_in_two_minutes():
    text = (root/'README.md').read_text()
    assert len(text.split())<=500
    assert len(text.encode())<=4*1024

def measured_numbers(text):
    found = re.findall(r'([\d.]+)\s?(?:%|dB|points|times)', text)
    return [number for number in found if number!='95'] # of an interval

@pytest.mark.parametrize('page', ['index','tutorials/choosing'])
def test_measured_numbers_come_from_files(page):
    "What a reader is told was measured stands in cells that read the runs"
    cells = cells_of(root/f'nbs/{page}.ipynb')
    typed = '\n'.join(source(cell) for cell in cells if cell['cell_type']=='markdown')
    assert not measured_numbers(typed)
    assert measured_numbers('3% of it, 1.2 dB more, 95 % sure')==['3','1.2']

def run_again(cells):
    "What cells show that end in an expression of `Markdown`"
    names = {}
    for cell in cells:
        *lines,last = re.split(r'\n(?=Markdown\()', source(cell))
        exec('\n'.join(lines), names)
        yield eval(last, names).data

@pytest.mark.parametrize('page', ['tutorials/choosing'])
def test_pages_follow_the_runs(page, tmp_path, monkeypatch):
    "A comparison that comes out otherwise changes the page; until then, the page shows what was measured"
    cells = [cell for cell in code_cells(root/f'nbs/{page}.ipynb') if 'gain(' in source(cell)]
    stored = [text for cell in cells for text in shown_text(cell)]
    assert list(run_again(cells))==stored, f'run nbs/_run.py nbs/{page}.ipynb, and make readme'

    df = pd.read_csv(root/'results/comparisons.csv')
    df.loc[df['where']=='china.jpg, at the best rate', 'difference_mean'] /= 2
    df.to_csv(tmp_path/'comparisons.csv', index=False)
    monkeypatch.setattr(_measured, 'results', tmp_path)
    assert list(run_again(cells))!=stored

# Commands
def test_the_readme_names_two_commands_that_set_up_everything():
    "In this order, with how long each takes; both need nothing but a checkout"
    text,make = text_in('README.md'),text_in('Makefile')
    commands = re.findall(r'^make (\w+)$', text, re.M)
    assert commands==['demo','test']
    for name in commands:
        assert re.search(rf'```\nmake {name}\n```\n\n.*minutes', text), f'how long does make {name} take?'
        assert re.search(rf'^{name}: \$\(BIN\)/\.installed$', make, re.M)

def test_commands_in_the_readme_exist():
    make = text_in('Makefile')
    for target in re.findall(r'^make (\w+)$', text_in('README.md'), re.M): assert f'\n{target}:' in make

def test_commands_in_contributing_exist():
    text,make = text_in('CONTRIBUTING.md'),text_in('Makefile')
    targets = re.findall(r'(?:^|`)make ([\w-]+)', text, re.M)
    assert {'test','docs','notebooks','bench'}<=set(targets)
    for target in targets: assert f'\n{target}:' in make
    for path in re.findall(r'(?:tests|checks|nbs)/[\w/]+\.(?:py|ipynb)', text):
        is_placeholder = 'FILE' in path or 'above_mean' in path
        assert is_placeholder or (root/path).exists(), path

def test_make_says_what_each_command_does():
    make = text_in('Makefile')
    commands = re.search(r'^\.PHONY: ((?:.*\\\n)*.*)', make, re.M)[1].replace('\\', '').split()
    told = re.findall(r'^## make ([\w-]+) +\S.*\n(?:#.*\n)?([\w-]+):', make, re.M)
    assert [name for name,_ in told]==[name for _,name in told]==[name for name in commands if name!='help']

# What pages say
def test_messages_that_are_explained_are_said():
    "Each in its parts between the dots"
    page = page_text('start/questions').partition('## Messages')[2]
    said = '\n'.join(text for texts in _messages.said().values() for text in texts)
    quoted = re.findall(r'`([^`]+)`', '\n'.join(re.findall(r'^\| (`.+?`) \|', page, re.M)))
    parts = [part.strip(' .,:;') for message in quoted for part in message.split('...')]
    assert not [part for part in parts if part not in said]

CODE = '''
def check(n, kind):
    "A docstring is no message."
    got = f'a {kind} without items' if n else 'nothing'
    if n: raise ValueError(error_text('learn.dls', got, 'one with some', remedy))
    warn(f'In {kind} are {n+1} of them.', 'a part of a sentence')
'''

def test_messages_are_read_from_the_code(tmp_path):
    file = tmp_path/'module.py'
    file.write_text(CODE)
    assert list(filter(_messages.is_message, _messages.said_by(file)))==[
        'learn.dls: got a ... without items, wanted one with some; ....',
        'learn.dls: got nothing, wanted one with some; ....',
        'In ... are ... of them.']
    found = _messages.messages()
    assert 'no item was chosen.' in found['callback.report']
    assert sum(map(len, found.values()))>300

def test_the_page_of_messages_has_those_of_the_code():
    "And all of them"
    page = text_in('nbs/start/messages.md')
    assert page==_messages.page(), 'run make notebooks'
    assert page.count('\n- ')==sum(map(len, _messages.messages().values()))

def laws_on_the_page():
    "Number, file and name of each test that the page of laws names"
    for number,rest in re.findall(r'^\| (\d+) \|(.*)$', page_text('start/laws'), re.M):
        for test,file in re.findall(r'\[`(\w+)`\]\(../../tests/(\w+).py\)', rest): yield int(number),file,test

def laws_in_tests():
    "The same of each test that is marked"
    for p in sorted((root/'tests').glob('test_*.py')):
        for node in ast.walk(ast.parse(p.read_text(encoding='utf-8'))):
            for mark in getattr(node, 'decorator_list', []):
                is_law = re.match(r'pytest\.mark\.law\(', ast.unparse(mark))
                if is_law: yield mark.args[0].value,p.stem,node.name.removeprefix('test_')

def test_the_page_of_laws_names_the_tests_that_hold_them():
    "And each test of a law is named there"
    named = set(laws_on_the_page())
    assert named==set(laws_in_tests())
    assert {number for number,*_ in named}==set(range(1, 13))

def test_interrupt_is_as_the_page_for_migrants_says():
    "Composer's code alternates with 2, its card says that a standard batch comes after every two"
    from selback.core.schedules import Window
    def selects(interrupt):
        window = Window(warmup=0, interrupt=interrupt)
        return [window.is_on(.5, batch=batch) for batch in range(6)]
    assert selects(2)==[True,False]*3
    assert selects(3)==[True,True,False]*2
    assert 'that is `interrupt=3` here' in text_in('nbs/start/migrate.ipynb')

def test_published_numbers_have_a_source_and_a_place():
    df = pd.read_csv(root/'results/published.csv', dtype=str)
    assert list(df)==['source','where','dataset','setting','method','measure','value']
    assert df.notna().all().all()
    assert not (df=='as above').any().any()
    assert {'Jiang 2019 (arXiv 1910.00762)','Hu 2021 (arXiv 2107.07741)'}<=set(df.source)

def test_every_figure_of_the_papers_has_a_line():
    text = page_text('tutorials/papers')
    for title,last in ('## Jiang et al. 2019',15), ('## Hu et al. 2021',4):
        part = text.partition(title)[2].partition('\n## ')[0]
        lines = re.findall(r'^\| figures? (\d+)(?: (?:and|to) (\d+))? \| [^|]+ \| [^|]+ \|$', part, re.M)
        figures = [n for first,end in lines for n in range(int(first), int(end or first)+1)]
        assert figures==[*range(1, last+1)]
        assert '| table 1 |' in part

# Public names
def public_of_modules():
    for info in pkgutil.walk_packages([root/'selback'], 'selback.'):
        module = importlib.import_module(info.name)
        for name in getattr(module, '__all__', ()):
            o = getattr(module, name)
            if callable(o): yield f'{info.name}.{name}',o

def public_of_fastai():
    "What the package adds to fastai's classes"
    from fastai.learner import Learner, Recorder
    for cls in Learner,Recorder:
        for name,o in vars(cls).items():
            o = getattr(o, 'fget', o)
            is_ours = (getattr(o, '__module__', None) or '').startswith('selback')
            if is_ours and name[0]!='_': yield f'{cls.__name__}.{name}',o

SPEAK_FOR_THEMSELVES = 'self','return','kwargs','args','yb'

def bare_parameters(f):
    if f is None: return []
    bare = [name for name,words in docments(f).items() if not words]
    return [name for name in bare if name not in SPEAK_FOR_THEMSELVES]

def lacks(o):
    "What is not said of a name: a docstring of one line, with or without an example, and a comment on each parameter"
    is_function = inspect.isfunction(o)
    if not is_function and not inspect.isclass(o): return [] # an alias of something documented elsewhere
    bare = bare_parameters(o if is_function else vars(o).get('__init__'))
    has_docstring = re.fullmatch(r'.+(\n\n(>>> .+\n?(.+\n?)*)+)?', inspect.getdoc(o) or '')
    return bare if has_docstring else [*bare,'docstring']

def test_no_public_name_is_undocumented():
    names = dict([*public_of_modules(), *public_of_fastai()])
    without = {name: lacks(o) for name,o in names.items()}
    assert len(names)>150
    assert not {name: what for name,what in without.items() if what}

def test_names_without_documentation_are_noticed():
    def bare(x): pass
    def half(
        x, # What it is
        y,
    ): "A docstring"
    assert lacks(bare)==['x','docstring']
    assert lacks(half)==['y']

# What notebooks show
def test_outputs_are_of_the_code_that_is_there():
    "Of a run from top to bottom of these cells, in this order"
    assert not [id_of(nb) for nb in notebooks if not was_run(nb)], 'run make notebooks'

def test_outputs_are_of_versions_that_are_supported():
    supported = {r.name: r.specifier for r in requirements} | {'python': SpecifierSet(project['requires-python'])}
    for nb in filter(was_run, notebooks):
        run = read_nb(nb).metadata['run']
        for name in 'python','torch','fastai': assert run[name] in supported[name], id_of(nb)

def shows(text):
    "Does a cell's code print or display, and is it run and shown?"
    prints = re.search(r'^(print|display)\(', text, re.M)
    return prints and not re.search(r'^#\| *(hide$|eval: false)', text, re.M)

def test_what_is_printed_is_stored():
    for nb in notebooks:
        for cell in code_cells(nb):
            text = source(cell)
            if shows(text): assert cell['outputs'], f'{id_of(nb)}: {text[:80]}'

# Benchmarks
def test_benchmarks_are_made_by_one_command():
    scripts = list((root/'benchmarks').glob('*.py'))
    made = re.search(r'^bench:.*?for b in (.*?);', text_in('Makefile'), re.DOTALL | re.MULTILINE)[1].split()
    assert set(made)=={script.stem for script in scripts}-{'common','against','gpu'}
    for script in scripts: compile(script.read_text(), script, 'exec')

COSTS = {'steps','peak_memory','choosing','at_rest','memory_of_items','looks','agreement','loading',
    'imports','lean','epochs','drawing'}

def test_measured_costs_say_where_they_come_from():
    files = sorted((root/'results/benchmarks').glob('*.csv'))
    assert {f.stem.rsplit('_', 1)[0] for f in files}>=COSTS
    for f in files:
        df = pd.read_csv(f)
        assert len(df)
        assert df[['machine','repeats','python','torch','fastai']].notna().all().all()
        is_timed = not f.stem.startswith(('peak_memory','loading'))
        least = 3 if f.stem.startswith(('epochs','drawing','neighbours')) else 9 # of large data sets there are fewer
        if is_timed: assert (df.repeats>=least).all()

# Faults
def test_faults_are_of_lines_and_files_that_are_there():
    from faults import FAULTS
    for fault in FAULTS:
        assert text_in(f'selback/{fault.file}').count(fault.line)==1, fault.name
        for name in fault.tests.split(): assert (root/f'tests/test_{name}.py').exists(), fault.name
