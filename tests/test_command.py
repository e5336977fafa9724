"The command: its help, its data, what it refuses and leaves"
import itertools, re, shlex, shutil, sys
from pathlib import Path

import numpy as np, pandas as pd, pytest
from fastai.torch_core import defaults
from helpers import *
from PIL import Image
from selback.bench.command import help_parser, main, run_study
from selback.bench.datasets import get_dls
from selback.bench.findings import own_options

pytestmark = pytest.mark.slow # workbench

# what a line says
def test_help_lists_every_option_and_every_method_with_its_own_options(monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['selback-compare', '--help'])
    with pytest.raises(SystemExit) as ended: main()
    said = capsys.readouterr().out
    assert ended.value.code==0
    for option in ('data','methods','compute','seeds','arch','bs','out','race','n-train'): assert f'--{option}' in said
    ours = {name: c for name,c in known_methods().items() if c.__module__ in OWN_MODULES}
    assert ours
    for name,c in ours.items():
        call,what = re.search(rf'^  ({name}\(.*\))\n      (.*)$', said, re.M).groups()
        assert eval(f"dict{call.removeprefix(name)}")=={p.name: p.default for p in own_options(c)}
        assert what==c.__doc__
    assert 'watch_items' not in said # which chooses nothing

    examples = re.findall(r'^  selback-compare (.*)$', said, re.M)
    examples = [help_parser(run_study).parse_args(shlex.split(o)) for o in examples]
    assert (examples[0].compute,examples[1].arch,examples[2].race)==(10_000,'resnet18',True)

def test_an_option_that_is_cut_short_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['selback-compare', '--data', 'digits', '--method', 'none'])
    with pytest.raises(SystemExit): main()
    assert 'unrecognized arguments: --method none' in capsys.readouterr().err

CUT = dict(data='digits', n_train=64, n_valid=32, bs=16, seeds=1)
METHODS = 'none,top_loss(keep=.5),random_subset(keep=.5,gather=True)'

def line(**kwargs):
    "As a shell says it"
    args = [(f"--{name.replace('_', '-')}", str(o)) for name,o in kwargs.items() if o is not True]
    flags = [f'--{name}' for name,o in kwargs.items() if o is True]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, 'argv', ['selback-compare', *itertools.chain(*args), *flags])
        main()

# what it leaves
def left(out): return {f.name for f in out.iterdir()}
TABLES = {'summary.csv','table.md','compare.png','compare.svg'}

def test_a_study_leaves_its_runs_and_what_they_amount_to(tmp_path, capsys, tiny_network, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    line(**CUT, methods=METHODS, compute=256, out='~/runs')
    out = tmp_path/'runs'
    assert left(out)=={'runs.csv'} | TABLES
    runs = pd.read_csv(out/'runs.csv')
    assert {'arch','device','torch','fastai','lr','bs'}<=set(runs.columns)
    assert set(runs.budget)=={'256 compute'}
    assert len(pd.read_csv(out/'summary.csv'))==3

    said = capsys.readouterr().out
    assert said.startswith('none, top_loss(keep=.5), random_subset(keep=.5,gather=True): 1 run(s) of 256 compute')
    *table,_,verdict = (out/'table.md').read_text().splitlines()
    assert said.splitlines()[-1]==verdict
    rows = [o.split('|')[1].strip() for o in table[2:]]
    assert rows[0]=='validation loss, equal compute'
    for row in rows: assert f'\n{row} ' in said # the screen's rows

    trained = (out/'runs.csv').read_bytes()
    line(**CUT, methods=METHODS, compute=256, out='~/runs')
    assert (out/'runs.csv').read_bytes()==trained

def test_a_race_leaves_its_rounds_and_what_the_last_one_amounts_to(tmp_path, capsys, tiny_network):
    line(**CUT, race=True, methods='top_loss(keep=.5)', compute=256, lr='0.003,9', out=tmp_path)
    assert left(tmp_path)=={'lr_0.003.csv','lr_9.csv','round_1.csv'} | TABLES
    assert set(pd.read_csv(tmp_path/'round_1.csv').method)=={'none','top_loss(keep=.5)'}
    assert set(pd.read_csv(tmp_path/'round_1.csv').lr)=={.003}
    assert 'Plain training ends best at a learning rate of 0.003' in capsys.readouterr().out

@pytest.mark.parametrize('is_terminal', [False,True])
def test_a_table_is_no_wider_than_the_terminal(is_terminal, monkeypatch, tmp_path, capsys, tiny_network):
    "And in one block where the output is a file"
    monkeypatch.setenv('COLUMNS', '80')
    monkeypatch.setattr(sys.stdout, 'isatty', lambda: is_terminal)
    run_study(**CUT, methods=METHODS, compute=256, out=tmp_path)
    table = capsys.readouterr().out.partition('\n\n')[2].partition('\n\nWrote')[0]
    is_narrow = max(map(len, table.split('\n')))<=80
    assert is_narrow==is_terminal
    for method in METHODS.split(',')[1:2]: assert method in table

# what it refuses
@pytest.fixture
def refused(capsys, monkeypatch, tmp_path):
    "A line is refused in a line; nothing trains, and nothing is written"
    def trains(*args, **kwargs): raise AssertionError('it trains')
    def refused(match, out=tmp_path/'out', **kwargs):
        monkeypatch.setattr('selback.bench.compare.Learner.fit', trains)
        with pytest.raises(SystemExit) as ended: run_study(**dict(data='digits', out=out) | kwargs)
        said = capsys.readouterr().err
        assert ended.value.code==2
        assert match in said
        assert said.startswith('selback-compare: error:')
        assert said.count('\n')==1
        assert not (tmp_path/'out').exists()
    return refused

BAD_INPUT = [
    (dict(methods='ohem'), "got 'ohem'"),
    (dict(methods='top_loss(keep=2)'), 'keep: got 2'),
    (dict(methods=','), "got ''"),
    (dict(epochs=0), 'epochs: got 0'),
    (dict(seeds=0), 'seeds: got 0'),
    (dict(bs=0), 'bs: got 0'),
    (dict(bs=10**5), 'bs: got 100000 with 1437 items to train on, wanted at most so many'),
    (dict(lr=-1.), 'lr: got -1'),
    (dict(lr='0.1,-1'), 'lr: got -1'),
    (dict(lr='fast'), "lr: got 'fast', wanted a learning rate, or several"),
    (dict(data='no/where'), 'no/where'),
    (dict(arch='resnet0'), 'resnet0'),
    (dict(seconds=-1.), 'seconds: got -1'),
    (dict(seconds=9., items=9), 'budget: got seconds and items'),
    (dict(epochs=9, compute=9), 'budget: got epochs and compute'),
    (dict(race=True, seconds=9.), 'race: got --epochs, --seconds or --items, wanted --compute'),
    (dict(race=True, methods='none'), 'wanted one at least that chooses by loss'),
    (dict(size=64), "size: got 64 with 'digits', wanted 128; it is for folders"),
    (dict(annealing='cosine'), "'cosine'")]

@pytest.mark.parametrize('kwargs,match', BAD_INPUT)
def test_bad_input_is_answered_in_one_line(kwargs, match, refused): refused(match, **kwargs)

def test_a_folder_that_takes_no_files_is_refused_at_first(refused, monkeypatch):
    def refuses(out, images): raise PermissionError(13, 'Permission denied', str(out))
    monkeypatch.setattr('selback.bench.command.make_writable', refuses)
    refused('Permission denied')

def test_a_file_of_another_study_is_refused(refused, tmp_path, tiny_network):
    args = CUT | dict(compute=128, methods='none,top_loss', out=tmp_path/'there')
    run_study(**args)
    refused('got runs with lr 0.001, wanted 0.1', **args | dict(lr=.1))

def test_rates_at_which_all_diverge_are_told_in_a_line(tmp_path, capsys, tiny_network):
    with pytest.raises(SystemExit): run_study(**CUT, compute=256, out=tmp_path, lr='1e30,1e35', methods='none,top_loss')
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith('selback-compare: error: lr: got 1e+30, 1e+35, at each of which plain training diverged')

@pytest.mark.parametrize('race', [False,True])
def test_an_error_of_the_training_keeps_its_traceback(race, monkeypatch, tmp_path):
    def fails(*args, **kwargs): raise TypeError('deep inside a training')
    monkeypatch.setattr('selback.bench.command.run_race' if race else 'selback.bench.command.compare', fails)
    with pytest.raises(TypeError, match='deep inside'): run_study(**CUT, race=race, compute=600, out=tmp_path)

def test_to_stop_it_is_to_go_on_later(tmp_path, capsys, monkeypatch):
    def stops(*args, **kwargs): raise KeyboardInterrupt
    monkeypatch.setattr('selback.bench.command.compare', stops)
    with pytest.raises(SystemExit) as end: run_study(**CUT, epochs=2, out=tmp_path)
    assert end.value.code==130
    assert capsys.readouterr().err.endswith('stopped. Finished runs are kept; the same command goes on.\n')

# a folder of images
def images_in(folder, *parts, n=10):
    "Tiny images of three classes, in each of these folders"
    from PIL import Image
    for part,name in itertools.product(parts, ('red','green','blue')):
        (folder/part/name).mkdir(parents=True)
        for i in range(n): Image.new('RGB', (20,16), name).save(folder/part/name/f'{i}.png')
    return str(folder)

LAYOUTS = {
    ('.',): '24 images to train on, 6 to validate on (20% of them, drawn at random with seed 0)',
    ('.','test'): '24 images to train on, 6 to validate on (20% of them, drawn at random with seed 0)',
    ('train','valid','test'): '30 images to train on, 30 to validate on (its folder valid)',
    ('train','val'): '30 images to train on, 30 to validate on (its folder val)',
    ('train','test'): '24 images to train on, 6 to validate on (20% of them, drawn at random with seed 0)'}

@pytest.mark.parametrize('parts', LAYOUTS, ids=' '.join)
def test_what_is_done_with_a_folder_is_said_and_done(parts, tmp_path, capsys, monkeypatch):
    def trains(*args, **kwargs): raise KeyboardInterrupt
    monkeypatch.setattr('selback.bench.command.compare', trains)
    data = images_in(tmp_path/'data', *parts)
    args = dict(data=data, bs=8, size=24)
    with pytest.raises(SystemExit): run_study(**args, out=tmp_path/'out')
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f'{data}: {LAYOUTS[parts]}.')
    assert ('images to test on' in lines[0])==('test' in parts)
    assert lines[2].startswith('Each image is resized to 24x24 pixels, cropped where it is no square;')

    dls = get_dls(**args)
    assert f'{len(dls.train_ds)} images to train on, {len(dls.valid_ds)} to validate on' in lines[0]
    assert lines[-1].endswith(f': 3 run(s) of {10*len(dls.train_ds)} compute each')
    files = [*dls.train_ds.items, *dls.valid_ds.items]
    assert len(set(files))==len(files)
    assert not any('test' in f.parts for f in files)
    assert dls.one_batch()[0].shape[2:]==(24,24)
    assert get_dls(**args).valid_ds.items==dls.valid_ds.items

@pytest.mark.parametrize('names,is_refused', [(('img','msk'),True), (('images','masks'),True), (('x','gt_mask'),True),
    (('cats','dogs'),False), (('hats','masks'),False)])
def test_masks_are_no_class(names, is_refused, tmp_path, capsys):
    "Nor is each folder with equal file names one of masks, or each folder of that name"
    from PIL import Image
    for name in names:
        (tmp_path/'data'/name).mkdir(parents=True)
        for i in range(10):
            stem = f'{name}_{i}' if names==('hats','masks') else str(i)
            Image.new('RGB', (24,24)).save(tmp_path/'data'/name/f'{stem}.png')
    if not is_refused: return get_dls(str(tmp_path/'data'), 4, size=24)
    with pytest.raises(SystemExit): run_study(data=str(tmp_path/'data'), out=str(tmp_path/'out'))
    counts = ', '.join(f'{name} (10)' for name in sorted(names))
    said = f'got folders {counts}, of which {names[1]} has the file names of {names[0]}'
    assert said in capsys.readouterr().err

@pytest.mark.parametrize('n,is_few', [(10,True),(170,False)])
def test_few_images_are_read_without_processes_of_their_own(n, is_few, tmp_path):
    dls = get_dls(images_in(tmp_path, '.', n=n), 8)
    wanted = 0 if is_few else min(16, defaults.cpus)
    assert [dl.fake_l.num_workers for dl in dls]==[wanted]*2

def test_a_class_that_nothing_trains_is_refused_by_name(tmp_path):
    "One that the folder train lacks, or whose only image fell to the validation"
    data = Path(images_in(tmp_path, 'train', 'valid'))
    shutil.rmtree(data/'train/red')
    with pytest.raises(ValueError, match='data: got images of red to validate on and none to train on, wanted more'):
        get_dls(str(data), 8)

def test_a_folder_with_nothing_to_validate_on_is_refused(tmp_path):
    with pytest.raises(ValueError, match='data: got 3 images, none to validate on, wanted more of them'):
        get_dls(images_in(tmp_path, '.', n=1), 2)

@pytest.mark.parametrize('is_cut', [False,True])
def test_a_file_that_is_no_image_is_left_out_and_named(is_cut, tmp_path, capsys, tiny_network):
    data = images_in(tmp_path/'data', 'train', 'valid')
    bad = tmp_path/'data/train/blue/0.png' # the first one, which loaders read as they are made
    bad.write_bytes(bad.read_bytes()[:60] if is_cut else b'no image')
    run_study(data=data, size=16, bs=8, compute=60, seeds=1, methods='none,top_loss', out=tmp_path/'out')
    said = capsys.readouterr().out
    assert '29 images to train on, 30 to validate on' in said
    assert '1 cannot be opened, such as 0.png, and are left out' in said
    assert pd.read_csv(tmp_path/'out/runs.csv').n_train.unique().tolist()==[29]

def test_a_file_that_another_process_could_not_read_is_named(tmp_path, capsys, monkeypatch):
    "Whose message comes with its trace"
    from selback.clean.folders import UnreadableImage
    def fails(*args, **kwargs):
        raise UnreadableImage('Traceback in process 0:\nselback.clean.folders.UnreadableImage: data: got a.png')
    monkeypatch.setattr('selback.bench.command.compare', fails)
    with pytest.raises(SystemExit): run_study(**CUT, epochs=2, out=tmp_path)
    assert capsys.readouterr().err=='selback-compare: error: data: got a.png\n'

def test_drawings_are_no_images(tmp_path):
    data = images_in(tmp_path, '.')
    (tmp_path/'red/plot.svg').write_text('<svg/>')
    dls = get_dls(data, 8)
    assert len(dls.train_ds)+len(dls.valid_ds)==30

def test_nothing_is_written_among_the_images(refused, tmp_path, monkeypatch):
    data = images_in(tmp_path/'data', '.')
    refused('runs, which lies in the data, wanted a folder elsewhere', data=data, bs=8, out=f'{data}/runs')
    refused('size: got 8, wanted a whole number of at least 16', data=data, bs=8, size=8)
    monkeypatch.chdir(data)
    refused('got runs, which lies in the data', data='.', bs=8, out='runs')

def test_runs_of_other_images_are_not_taken_for_these(tmp_path, capsys, tiny_network):
    "In a folder of the same name, with as many of them"
    first,other = (images_in(tmp_path/name/'data', '.') for name in ('a','b'))
    args = dict(size=16, bs=8, compute=60, seeds=1, methods='none,top_loss', out=tmp_path/'out')
    run_study(data=first, **args)
    ran = (tmp_path/'out/runs.csv').read_bytes()
    Path(first).rename(tmp_path/'data')
    run_study(data=str(tmp_path/'data'), **args) # the same elsewhere
    assert (tmp_path/'out/runs.csv').read_bytes()==ran
    (tmp_path/'b/data/red/0.png').rename(tmp_path/'b/data/blue/new.png')
    with pytest.raises(SystemExit): run_study(data=other, **args)
    assert 'runs.csv: got runs with images ' in capsys.readouterr().err

def test_a_class_may_be_called_train(tmp_path):
    from PIL import Image
    for name in ('train','bus'):
        (tmp_path/name).mkdir()
        for i in range(10): Image.new('RGB', (20,16)).save(tmp_path/name/f'{i}.png')
    dls = get_dls(str(tmp_path), 8)
    assert list(dls.vocab)==['bus','train']

# what belongs together
def patients(folder):
    "Images of twelve patients in two classes, four each"
    rng = np.random.RandomState(0)
    for g in range(12):
        scene = np.kron(rng.randint(0, 255, (4,4,3)), np.ones((8,8,1)))
        for i in range(4):
            at = folder/('ill' if g%2 else 'well')
            at.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.clip(scene+rng.normal(0, 14, scene.shape), 0, 255).astype(np.uint8)).save(
                at/f'p{g:03}_{i}.png')
    return folder

def test_torn_validation_is_said_and_a_pattern_mends_it(tmp_path, capsys, tiny_network):
    data = patients(tmp_path/'data')
    plan = dict(data=data, methods='none', compute=48, seeds=1, bs=8, size=16)
    line(**plan, out=tmp_path/'torn')
    assert 'validation items have others of their group in training (name up to part 1' in capsys.readouterr().out
    line(**plan, out=tmp_path/'whole', groups='p\\d+')
    said = capsys.readouterr().out
    assert 'whole groups of p\\d+' in said and 'others of their group' not in said
    assert set(pd.read_csv(tmp_path/'whole/runs.csv').groups)=={'p\\d+'}
    for pattern,wanted in (('(p', 'a regular expression'), ('nobody', 'a pattern that is in some')):
        with pytest.raises(SystemExit): line(**plan, out=tmp_path/'no', groups=pattern)
        assert wanted in capsys.readouterr().err
