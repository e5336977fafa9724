"The command: its help, and what it says first"
import inspect, itertools, re, shlex, shutil, sys
from pathlib import Path

import pytest
from fastai.torch_core import defaults
from helpers import *
from selback.bench.command import help_parser, main, run_study, seconds_of_epoch
from selback.bench.datasets import get_dls

pytestmark = pytest.mark.slow # workbench

HELP = help_parser(run_study).format_help()

def own_defaults(cls):
    "A method's own options, with their defaults"
    parameters = inspect.signature(cls.__init__).parameters.values()
    return {p.name: p.default for p in parameters if p.name!='self' and p.kind==p.POSITIONAL_OR_KEYWORD}

def test_help_lists_every_method_with_its_own_options():
    "As the classes have them"
    ours = {name: c for name,c in known_methods().items() if c.__module__ in OWN_MODULES}
    assert ours
    for name,c in ours.items():
        call,what = re.search(rf'^  ({name}\(.*\))\n      (.*)$', HELP, re.M).groups()
        assert eval(f"dict{call.removeprefix(name)}")==own_defaults(c)
        assert what==c.__doc__
    assert 'watch_items' not in HELP # which chooses nothing

def test_help_has_examples_that_are_read_and_no_default_of_what_is_off():
    defaults = re.findall(r'\(default:\s+(.*?)\)', HELP)
    assert defaults==['digits','3','small_resnet','64','128','0.001','one_cycle','runs']

    examples = re.findall(r'^  selback-compare (.*)$', HELP, re.M)
    args = [help_parser(run_study).parse_args(shlex.split(o)) for o in examples]
    assert len(args)==3
    assert args[0].compute==10_000
    assert args[1].methods.startswith('none,favor_hard')
    assert args[2].race

def test_a_line_reaches_the_study(monkeypatch):
    import selback.bench.command as c
    asked = []
    monkeypatch.setattr(c, 'run_study', c.delegates(run_study)(lambda **kwargs: asked.append(kwargs)))
    monkeypatch.setattr(c, 'help_parser', lambda func: help_parser(run_study))
    monkeypatch.setattr(sys, 'argv', ['selback-compare', '--compute', '500', '--n-train', '32', '--race'])
    c.main()
    wanted = dict(compute=500, n_train=32, race=True, seconds=None, epochs=None, methods=None)
    assert asked[0] | wanted==asked[0]
    assert set(asked[0])==set(inspect.signature(run_study).parameters)

def test_an_option_that_is_cut_short_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['selback-compare', '--data', 'digits', '--method', 'none'])
    with pytest.raises(SystemExit): main()
    assert 'unrecognized arguments: --method none' in capsys.readouterr().err

@pytest.mark.parametrize('is_terminal', [False,True])
def test_a_table_is_no_wider_than_the_terminal(is_terminal, monkeypatch, tmp_path, capsys, tiny_network):
    "And in one block where the output is a file"
    monkeypatch.setenv('COLUMNS', '80')
    monkeypatch.setattr(sys.stdout, 'isatty', lambda: is_terminal)
    methods = ['none','top_loss(keep=.5)','random_subset(keep=.5,gather=True)']
    run_study(methods=','.join(methods), compute=256, n_train=64, n_valid=32, bs=32, seeds=1, out=tmp_path)
    table = capsys.readouterr().out.partition('\n\n')[2].partition('\n\nWrote')[0]
    is_narrow = max(map(len, table.split('\n')))<=80
    assert is_narrow==is_terminal
    for method in methods[1:]: assert method in table

# what is said before anything trains
def said_before(capsys, refused=False, **kwargs):
    "What a command says first; it is not to train"
    if refused:
        with pytest.raises(SystemExit): main(**kwargs)
        return capsys.readouterr().err
    with pytest.raises(RuntimeError, match='it trains'): main(**kwargs)
    return capsys.readouterr().out

@pytest.fixture
def trains_not(monkeypatch):
    "An epoch of plain training takes 24 seconds; then nothing trains"
    def trains(*args, **kwargs): raise RuntimeError('it trains')
    monkeypatch.setattr('selback.bench.command.seconds_of_epoch', lambda get_learner: 24.)
    for name in ('command','race'): monkeypatch.setattr(f'selback.bench.{name}.compare', trains)

TINY = dict(data='digits', n_train=200, n_valid=100, bs=20)
PLANS = [
    (dict(epochs=3, methods='none,top_loss', seeds=2),
        ['methods: none, top_loss', 'budget: 3 epochs each', 'seeds: 2', 'learning rate: 0.001',
        'time: about 5 minutes for 4 runs']), # 4*3*24
    (dict(compute=500, methods='none,top_loss', seeds=1),
        ['budget: compute of 500 items each', 'seeds: 1', 'time: about 2 minutes for 2 runs']), # 2*2.5*24
    (dict(seconds=42, methods='none,top_loss', seeds=1, lr='.1,.2'),
        ['budget: 42 seconds each', 'learning rate: 0.1 or 0.2', 'time: about 3 minutes for 4 runs']), # 4*42
    (dict(race=True, compute=4000, seeds=3, lr='.1,.2,.3'), # rounds of 5, 10 and 20 epochs, 24, 15 and 12 runs
        ['budget: compute of 4,000 items each, less in earlier rounds',
        'time: about 4.6 hours for 60 runs']), # (9*20+24*5+15*10+12*20)*24
    (dict(race=True, compute=1600, seeds=3), ['time: about 77 minutes for 24 runs'])] # 24*8*24

@pytest.mark.parametrize('kwargs,says', PLANS)
def test_the_plan_is_told_first_in_five_lines(kwargs, says, trains_not, tmp_path, capsys):
    plan = said_before(capsys, **TINY, **kwargs, out=str(tmp_path)).splitlines()[:5]
    assert [line.partition(':')[0] for line in plan]==['methods','budget','seeds','learning rate','time']
    for said in says: assert any(line.startswith(said) for line in plan), said

def test_a_few_steps_are_timed(monkeypatch):
    "Of a learner that is made; the first step is not among them, and nothing is validated"
    class Counts(Callback):
        steps = 0
        def before_validate(self): raise AssertionError('it validates')
        def after_step(self): Counts.steps += 1
    clock = itertools.count()
    monkeypatch.setattr('time.perf_counter', lambda: float(next(clock)))
    assert seconds_of_epoch(lambda: table_learner(cbs=Counts()))==pytest.approx(1+7+2/3) # one to start
    assert Counts.steps==4

TOO_SHORT = [
    (dict(compute=200), 'compute: got 200 (1 epochs), wanted more than 200, or no method chooses anything'),
    (dict(epochs=1), 'epochs: got 1, wanted more than 1'),
    (dict(race=True, compute=150), 'compute: got 150 (0.75 epochs), wanted more than 200, '
        'or no method chooses anything; each trains on all items for 1 epoch(s) first, so take 400')]

@pytest.mark.parametrize('kwargs,says', TOO_SHORT)
def test_a_budget_in_which_no_method_chooses_is_refused(kwargs, says, trains_not, tmp_path, capsys):
    assert says in said_before(capsys, refused=True, **TINY, **kwargs, out=str(tmp_path))

def test_a_budget_is_enough_where_a_method_chooses_at_once(trains_not, tmp_path, capsys):
    said = said_before(capsys, **TINY, compute=100, methods='none,top_loss(warmup=0)', out=str(tmp_path))
    assert 'methods: none, top_loss(warmup=0)\nbudget: compute of 100 items each\nseeds: 3\n' in said

def test_runs_that_are_there_are_not_announced(tmp_path, capsys, tiny_network, monkeypatch):
    args = dict(methods='none,top_loss', compute=256, n_train=64, n_valid=32, bs=32, out=str(tmp_path))
    main(**args, seeds=1)
    main(**args, seeds=2)
    assert ' for 2 runs' in capsys.readouterr().out
    monkeypatch.setattr('selback.bench.command.seconds_of_epoch', None)
    main(**args, seeds=2)
    assert capsys.readouterr().out.startswith('All runs are there.')

# a folder of images
def images_in(folder, *parts, n=10):
    "Tiny images of three classes, in each of these folders"
    from PIL import Image
    for part,name in itertools.product(parts, ('red','green','blue')):
        (folder/part/name).mkdir(parents=True)
        for i in range(n): Image.new('RGB', (20,16), name).save(folder/part/name/f'{i}.png')
    return str(folder)

LAYOUTS = {
    ('.',): '24 images to train on, 6 to validate on (a fifth, drawn at random with seed 0)',
    ('.','test'): '24 images to train on, 6 to validate on (a fifth, drawn at random with seed 0)',
    ('train','valid','test'): '30 images to train on, 30 to validate on (its folder valid)',
    ('train','val'): '30 images to train on, 30 to validate on (its folder val)',
    ('train','test'): '24 images to train on, 6 to validate on (a fifth, drawn at random with seed 0)'}

@pytest.mark.parametrize('parts', LAYOUTS, ids=' '.join)
def test_what_is_done_with_a_folder_is_said_and_done(parts, trains_not, tmp_path, capsys):
    data = images_in(tmp_path/'data', *parts)
    args = dict(data=data, bs=8, size=24)
    lines = said_before(capsys, **args, out=str(tmp_path/'out')).splitlines()
    assert lines[0]==f'{data}: 3 classes; {LAYOUTS[parts]}.'
    of_each = (len(get_dls(**args).train_ds)+len(get_dls(**args).valid_ds))//3
    assert re.fullmatch(rf'Images of each class: (\w+ \({of_each}\)(, |\.)){{3}}', lines[1])
    assert lines[2].startswith('Each image is resized to 24x24 pixels, cropped where it is no square;')
    assert lines[3].startswith('Its folder test is left out')==('test' in parts)

    dls = get_dls(**args)
    ten_epochs = f'compute of {10*len(dls.train_ds)} items each'
    assert f'budget: {ten_epochs}' in lines
    assert f'{len(dls.train_ds)} images to train on, {len(dls.valid_ds)} to validate on' in lines[0]
    files = [*dls.train_ds.items, *dls.valid_ds.items]
    assert len(set(files))==len(files)
    assert not any('test' in f.parts for f in files)
    assert dls.one_batch()[0].shape[2:]==(24,24)
    assert get_dls(**args).valid_ds.items==dls.valid_ds.items

@pytest.mark.parametrize('names,is_refused', [(('img','msk'),True), (('images','masks'),True), (('x','gt_mask'),True),
    (('cats','dogs'),False), (('hats','masks'),False)])
def test_masks_are_no_class(names, is_refused, trains_not, tmp_path, capsys):
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
def test_a_file_that_is_no_image_is_named(is_cut, tmp_path, capsys, tiny_network):
    data = images_in(tmp_path/'data', 'train', 'valid')
    bad = tmp_path/'data/valid/red/3.png'
    bad.write_bytes(bad.read_bytes()[:60] if is_cut else b'no image')
    args = dict(data=data, size=16, bs=8, compute=60, seeds=1, methods='none,top_loss', out=str(tmp_path/'out'))
    with pytest.raises(SystemExit) as end: main(**args)
    assert end.value.code==2
    *_,said = capsys.readouterr().err.splitlines()
    assert said.startswith(f'selback-compare: error: data: got {bad} (') and 'verify_images' in said

def test_a_file_that_another_process_could_not_read_is_named(tmp_path, capsys, monkeypatch):
    "Whose message comes with its trace"
    from selback.bench.datasets import UnreadableImage
    def fails(get_learner):
        raise UnreadableImage('Traceback in process 0:\nselback.bench.datasets.UnreadableImage: data: got a.png')
    monkeypatch.setattr('selback.bench.command.seconds_of_epoch', fails)
    with pytest.raises(SystemExit): main(**TINY, epochs=2, out=str(tmp_path))
    assert capsys.readouterr().err=='selback-compare: error: data: got a.png\n'

def test_drawings_are_no_images(tmp_path):
    data = images_in(tmp_path, '.')
    (tmp_path/'red/plot.svg').write_text('<svg/>')
    dls = get_dls(data, 8)
    assert len(dls.train_ds)+len(dls.valid_ds)==30

def test_nothing_is_written_among_the_images(trains_not, tmp_path, capsys, monkeypatch):
    data = images_in(tmp_path, '.')
    said = said_before(capsys, refused=True, data=data, bs=8, out=f'{data}/runs')
    assert 'runs, which lies in the data, wanted a folder elsewhere' in said
    monkeypatch.chdir(data)
    assert 'got runs, which lies in the data' in said_before(capsys, refused=True, data='.', bs=8, out='runs')
    beside = images_in(tmp_path/'parts', 'train', 'valid')
    said_before(capsys, data=beside, bs=8, out=f'{beside}/runs')

def test_a_folder_that_takes_no_files_is_refused_at_first(trains_not, tmp_path, capsys, monkeypatch):
    def refuses(dir): raise PermissionError(13, 'Permission denied', str(dir))
    monkeypatch.setattr('tempfile.TemporaryFile', refuses)
    assert 'Permission denied' in said_before(capsys, refused=True, **TINY, epochs=2, out=str(tmp_path))

def test_runs_of_other_images_are_not_taken_for_these(tmp_path, capsys, tiny_network):
    "In a folder of the same name, with as many of them"
    first,other = (images_in(tmp_path/name/'data', '.') for name in ('a','b'))
    args = dict(size=16, bs=8, compute=60, seeds=1, methods='none,top_loss', out=str(tmp_path/'out'))
    main(data=first, **args)
    Path(first).rename(tmp_path/'data')
    main(data=str(tmp_path/'data'), **args) # the same elsewhere
    assert 'All runs are there.' in capsys.readouterr().out
    (tmp_path/'b/data/red/0.png').rename(tmp_path/'b/data/blue/new.png')
    with pytest.raises(SystemExit): main(data=other, **args)
    assert 'runs.csv: got runs with images ' in capsys.readouterr().err

def test_to_stop_it_is_to_go_on_later(tmp_path, capsys, monkeypatch):
    def stops(*args, **kwargs): raise KeyboardInterrupt
    monkeypatch.setattr('selback.bench.command.seconds_of_epoch', stops)
    with pytest.raises(SystemExit) as end: main(**TINY, epochs=2, out=str(tmp_path))
    assert end.value.code==130
    assert capsys.readouterr().err.endswith(f'stopped. Finished runs are in {tmp_path}/; the same command goes on.\n')

def test_a_class_may_be_called_train(tmp_path):
    from PIL import Image
    for name in ('train','bus'):
        (tmp_path/name).mkdir()
        for i in range(10): Image.new('RGB', (20,16)).save(tmp_path/name/f'{i}.png')
    dls = get_dls(str(tmp_path), 8)
    assert list(dls.vocab)==['bus','train']

def test_a_size_is_for_folders_and_one_of_its_own(trains_not, tmp_path, capsys):
    args = dict(out=str(tmp_path), refused=True)
    said = said_before(capsys, data='digits', size=64, **args)
    assert "size: got 64 with 'digits', wanted 128; it is for folders" in said
    data = images_in(tmp_path/'data', '.')
    assert 'size: got 8, wanted a whole number of at least 16' in said_before(capsys, data=data, size=8, **args)
