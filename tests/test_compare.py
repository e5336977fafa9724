"The comparison: what runs cost, what it amounts to, the command"
import re, runpy, sys

import matplotlib.pyplot as plt, pandas as pd, pytest, torch
from fastai.callback.core import Callback
from fastai.data.external import URLs
from fastai.metrics import F1Score, R2Score, accuracy, error_rate, mse, top_k_accuracy
from helpers import *
from selback.bench.findings import *
from selback.bench.compare import *
from selback.bench.compare import Budget, CostLog
from selback.bench.command import main

def run(seconds, losses, items=None, kept=1.):
    return pd.DataFrame(dict(seconds=seconds, cpu_seconds=seconds, backpropagated=items or [s*100 for s in seconds], forwarded=[s*200 for s in seconds],
        kept=kept, valid_loss=losses, error=[l/2 for l in losses], epoch=range(1, len(losses)+1)))

PLAIN,FAST,CONTROL = run([2.,4,6,8],[1.,.6,.5,.55]),run([1.,2,3,4],[1.,.8,.58,.57],kept=.5),run([1.,2,3,4],[1.,.9,.8,.8],kept=.5)
RUNS = pd.concat([r.assign(method=m, seed=s) for s in (0,1) for m,r in
    (('none',PLAIN), ('top_loss',FAST), ('random_subset(keep=.5)',CONTROL))])

@pytest.mark.parametrize('measure', ['valid_loss','error'])
def test_summary_by_hand(measure):
    s = summarize(RUNS, measure, target=1.5).set_index(['method','seed'])
    row = s.loc['top_loss',0]
    assert row['time to 1.2x']==3 and row['items to 1.2x']==300 # .58 <= 1.2*.5
    assert row[['time to 1.1x','time to 1.4x','time to 1.5x']].isna().tolist()==[True,False,False] and row['time to 1.5x']==3
    assert row['best loss']==.57 and row.seconds==4 and s.loc['none',0]['time to 1.2x']==4 and s.loc['none',0]['time to 1.1x']==6
    assert row['vs random, equal time']==pytest.approx(.57/.8-1) and row['vs plain, equal items']==pytest.approx(.57/.6-1)
    assert s.loc['random_subset(keep=.5)',1][['time to 1.2x','items to 1.2x']].isna().all()
    assert not any('vs' in c for c in summarize(RUNS, measure, equal=())) and 'vs plain, equal time' not in summarize(RUNS, equal=('items',))
    with pytest.raises(ValueError, match='target: got 0.5'): summarize(RUNS, target=.5)

def test_speedups_are_geometric_means_with_an_interval_by_the_t_distribution():
    ratios = np.array([2.,1.5,1.2])
    s = pd.DataFrame([dict(method=m, seed=i, **{'time to 1.2x': 12./(r if m!='none' else 1)}) for i,r in enumerate(ratios) for m in ('none','top_loss')])
    up,logs = speedup(s).loc['top_loss'],np.log(ratios)
    half = 4.302653*logs.std(ddof=1)/3**.5 # t of 2 degrees of freedom at 97.5 %
    assert up.tolist()==pytest.approx([np.exp(logs.mean()), np.exp(logs.mean()-half), np.exp(logs.mean()+half)], rel=1e-5)
    assert speedup(s).loc['none'].tolist()==[1,1,1]
    assert np.isnan(speedup(s[s.seed==0]).loc['top_loss'].low) and speedup(s[s.seed==0]).loc['top_loss'].speedup==2
    s.loc[5,'time to 1.2x'] = float('nan') # not reached by one seed
    assert speedup(s).loc['top_loss'].isna().all()

def test_pareto_points_are_beaten_by_none():
    s = pd.DataFrame(dict(method=list('abcde'), seed=0, seconds=[5.,1,2,3,3], **{'best error':[.1,.4,.4,.2,.3]}))
    assert pareto(s)==['b','d','a']

@pytest.mark.law(9)
def test_verdict_says_who_won():
    said = verdict(summarize(RUNS))
    assert said.startswith('At equal seconds top_loss won: its validation loss is 5.0% lower than with plain training (95 % interval -5.0% to -5.0%, better on 2 of 2 seeds) '
        'and 28.8% lower than with a random choice (95 % interval -28.8% to -28.8%, ')
    slower = RUNS.assign(seconds=RUNS.seconds.where(RUNS.seed==0, RUNS.seconds*1.01))
    assert "top_loss reached 1.2 times plain training's best validation loss in 0.75 of its time (95 % interval 0.75 to 0.75)." in verdict(summarize(slower))
    worse = RUNS.assign(valid_loss=RUNS.valid_loss.where(RUNS.method!='top_loss', RUNS.valid_loss*3))
    assert verdict(summarize(worse))==('At equal seconds plain training has the lowest validation loss. Of the methods that choose by loss top_loss came closest; '
        'against plain training, its validation loss is 185.0% higher (95 % interval +185.0% to +185.0%, better on 0 of 2 seeds).')
    assert verdict(summarize(worse.assign(valid_loss=worse.valid_loss.where(~worse.method.str.startswith('random'), worse.valid_loss/2)))).startswith(
        'At equal seconds no method that chooses by loss is the best: a random choice, random_subset(keep=.5), has the lowest')
    assert 'no control' in verdict(summarize(RUNS[~RUNS.method.str.startswith('random')]))
    assert 'nothing to compare' in verdict(summarize(RUNS[RUNS.method=='none']))
    assert 'No method selected anything' in verdict(summarize(RUNS.assign(kept=1.))) # as files from before tell it
    assert 'won' in verdict(summarize(RUNS.assign(kept=1., selected=5)))
    assert 'error is' in verdict(summarize(RUNS, 'error'), 'error') and 'equal compute, seconds or items' in verdict(summarize(RUNS, equal=()))
    assert verdict(summarize(RUNS, equal=('items',))).startswith('At equal back-propagated items top_loss won')

UNCLEAR = dict(one_seed=lambda runs: runs[runs.seed==0], seeds_disagree=lambda runs: runs.assign(valid_loss=runs.valid_loss.where((runs.method!='top_loss') | (runs.seed==0), runs.valid_loss*1.07)),
    wide=lambda runs: runs.assign(valid_loss=runs.valid_loss.where((runs.method!='top_loss') | (runs.seed==0), runs.valid_loss*.1)))

@pytest.mark.parametrize('name', UNCLEAR)
def test_what_is_not_clear_is_no_win(name):
    summary = summarize(UNCLEAR[name](RUNS))
    said,shown = verdict(summary),show_table(summary)
    assert said.startswith('At equal seconds there is no clear difference from plain training: top_loss has the lowest validation loss on average') and 'won' not in said and 'beat' not in said
    assert shown.loc['vs plain, equal time','top_loss'].startswith('no clear difference (-')

def test_runs_count_their_cost():
    def get_learner(): return Learner(dls_of(*class_data(132), drop_last=True), mlp(), loss_func=CrossEntropyLossFlat(), metrics=error)
    methods = ['none','top_loss(keep=.25)','random_subset(keep=.25)','selective_backprop(beta=9)']
    runs = compare(get_learner, methods, epochs=3, seeds=2)
    last = runs[runs.epoch==3].set_index(['method','seed'])
    assert len(runs)==3*2*4
    for seed in (0,1):
        assert last.loc[('none',seed), ['forwarded','backpropagated']].tolist()==[288,288]
        assert last.loc[('top_loss(keep=.25)',seed), ['forwarded','backpropagated']].tolist()==[96+2*24+2*96, 96+2*24]
        assert last.loc[('random_subset(keep=.25)',seed), ['forwarded','backpropagated']].tolist()==[96+2*24]*2
        sb = last.loc[('selective_backprop(beta=9)',seed)]
        assert sb.backpropagated%16==0 and sb.forwarded==sb.backpropagated+2*96
    assert (runs.groupby(['method','seed']).seconds.diff().dropna()>0).all()
    warm = runs[runs.epoch==1].groupby('seed').valid_loss.nunique() # the warm-up is plain training with the same seed
    assert warm.tolist()==[1,1]

@pytest.mark.parametrize('method,looks', [('top_loss(keep=.5,warmup=0)',100), ('top_loss(keep=.5,warmup=0,passes=1)',50), ('random_subset(keep=.5,warmup=0)',0), ('random_subset(keep=.5,warmup=0,passes=1)',50)])
def test_with_one_pass_an_item_is_forwarded_once(method, looks):
    "Besides what trains: all 100 items in a pass of its own, or in the pass of training the half that is left out"
    def get_learner(): return Learner(dls_of(*class_data(132), bs=20), mlp(), loss_func=CrossEntropyLossFlat(), metrics=error)
    runs = compare(get_learner, [method], 2, 1, plot=False)
    assert runs.backpropagated.tolist()==[50,100] and runs.forwarded.tolist()==[50+looks, 100+2*looks]

def test_choosing_before_loading_costs_seconds_and_validation_none(monkeypatch):
    "A clock that only this moves: each epoch draws for 3 seconds, trains 5 batches of 1, validates for 50"
    import selback.bench.compare as c
    t = [0.]
    monkeypatch.setattr(c.time, 'perf_counter', lambda: t[0])
    monkeypatch.setattr(c.time, 'process_time', lambda: 2*t[0])
    def passes(s): t[0] += s
    class Draws(FavorHardCallback):
        def choose_items(self, idxs): passes(3)
    class Trains(Callback):
        def after_batch(self): passes(1 if self.training else 25)
    def get_learner(): return Learner(dls_of(*class_data(132), bs=20, drop_last=True), mlp(), loss_func=CrossEntropyLossFlat(), metrics=error, cbs=Trains())
    runs = compare(get_learner, {'none': 'none', 'draws': lambda: Draws(warmup=0, auto=False)}, 2, 1, plot=False).set_index(['method','epoch'])
    assert runs.seconds.tolist()==[5,10,8,16] and runs.cpu_seconds.tolist()==[10,20,16,32]

def error(pred, y): return (pred.argmax(1)!=y).float().mean()

def test_bad_words_fail_before_the_first_run():
    def never(): raise AssertionError('a run was started')
    for spec,match in [('ohem','wanted one of none, .*top_loss'), ('top_loss(keep=7)','keep: got 7'), ('top_loss(keep=',"wanted a name or a call"), ('top_loss(kep=.5)','kep'),
        ('top_loss(keep=x)','method'), ('1+1','method')]:
        with pytest.raises((ValueError,TypeError), match=match): compare(never, ['none', spec], 1, 1)
    with pytest.raises(ValueError, match="arch: got 'resnet0'"): get_model('resnet0', 3)
    with pytest.raises(ValueError, match="data: got 'no/where'"): get_dls('no/where')

def test_the_command_answers_bad_input_in_one_line(tmp_path, capsys):
    (tmp_path/'empty').mkdir()
    for kwargs,match in [(dict(methods='ohem'), "got 'ohem'"), (dict(methods='top_loss(keep=2)'), 'keep: got 2'), (dict(methods=','), "got ''"), (dict(epochs=0), 'epochs: got 0'),
        (dict(seeds=0), 'seeds: got 0'), (dict(bs=0), 'bs: got 0'), (dict(bs=10**5), 'a batch of 100000'), (dict(lr=-1.), 'lr: got -1'),
        (dict(data=str(tmp_path/'empty')), 'without images'), (dict(data='no/where'), 'no/where'), (dict(arch='resnet0'), 'resnet0'), (dict(seconds=-1.), 'seconds: got -1'),
        (dict(seconds=9., items=9), 'budget: got seconds and items'), (dict(epochs=9, compute=9), 'budget: got epochs and compute'), (dict(annealing='cosine'), "'cosine'"), (dict(target_error='best'), "target_error: got 'best'"), (dict(target_error='.5x'), 'at least 1')]:
        with pytest.raises(SystemExit) as e: main(**{'data':'digits', 'out':str(tmp_path/'out'), **kwargs})
        said = capsys.readouterr().err
        assert e.value.code==2 and match in said and said.startswith('selback-compare: error:') and said.count('\n')==1
    assert not (tmp_path/'out').exists()

def test_plots_and_tables_for_any_order_of_methods():
    axes = plot_runs(RUNS[RUNS.method=='top_loss'], measure='error')
    assert axes[0].lines[0].get_xydata().tolist()==[[1,.5],[2,.4],[3,.29],[4,.285]]
    shown = show_table(summarize(RUNS).assign(forwarded=22528))
    assert shown.loc['forwarded','none']=='22,528' and shown.loc['vs random, equal time','top_loss']=='-28.8%' and shown.loc['vs plain, equal time','none']=='-'
    assert shown.loc['times less time to 1.2x','top_loss']=='1.33 (1.33 to 1.33)' and shown.loc['times less time to 1.2x','none']=='-'
    assert to_markdown(shown).splitlines()[0]=='|  | `none` | `top_loss` | `random_subset(keep=.5)` |'

def learner_with(metric): return Learner(learner_of().dls, mlp(), loss_func=CrossEntropyLossFlat(), metrics=metric)
def learner_of(n=132, **kwargs): return Learner(dls_of(*class_data(n), drop_last=True), mlp(), loss_func=CrossEntropyLossFlat(), metrics=error, **kwargs)

@pytest.mark.parametrize('method,trains', [('none', 48), ('top_loss(keep=.25)', 16)])
def test_a_budget_of_items_ends_every_run_alike(method, trains):
    lrs,pcts = [],[]
    class Notes(Callback):
        order = 99
        def before_backward(self): lrs.append(self.opt.hypers[0]['lr']); pcts.append(self.pct_train)
    runs = compare(lambda: learner_of(cbs=[Notes()]), [method], items=480, seeds=1, lr=.01, plot=False)
    assert runs.backpropagated.iloc[-1]==pytest.approx(480, abs=15) and (runs.annealing=='one_cycle').all() and (runs.budget=='480 items').all()
    steps = pcts[pcts.index(0., 20):] # after the piece that wakes the machine up
    assert steps==sorted(steps) and .9<steps[-1]<1 and lrs[-1]<.001 and max(lrs)<=.01

def test_a_budget_of_seconds_ends_a_run(monkeypatch):
    import selback.bench.compare as c
    t = [0.]
    def tick(): t[0] += .5; return t[0]
    monkeypatch.setattr(c.time, 'perf_counter', tick)
    runs = compare(learner_of, ['none'], seconds=40, seeds=1, plot=False)
    assert 40<=runs.seconds.iloc[-1]<43 and (runs.seconds.iloc[:-1]<40).all()

@pytest.mark.parametrize('budget', [dict(items=960), dict(compute=960)])
def test_a_run_that_ends_before_its_budget_is_refused(budget, tmp_path):
    "It can't be compared with one that used all of it; a budget of epochs may end early"
    from fastai.callback.tracker import EarlyStoppingCallback
    def stopping(): return learner_of(cbs=[EarlyStoppingCallback(patience=1, min_delta=9)])
    with pytest.raises(ValueError, match=r'none, seed 0: the fit ended at \d+ of 960 (items|compute), wanted all of its budget, .*EarlyStoppingCallback'):
        compare(stopping, ['none'], seeds=1, plot=False, path=tmp_path/'runs.csv', **budget)
    assert not (tmp_path/'runs.csv').exists()
    assert compare(stopping, ['none'], epochs=9, seeds=1, plot=False).epoch.max()<9

def test_a_selection_follows_the_budget():
    learn = learner_of(cbs=[CostLog(), TopLossCallback(.25, start=.5, warmup=0)])
    with learn.no_bar(),learn.no_logging(): learn.fit(10**4, cbs=Budget('items', 960))
    stats = learn.selection.stats
    first = (stats.kept<stats.seen).idxmax()
    assert stats.trained[:first].sum()==480 # half of it

def test_finished_runs_are_not_run_again(tmp_path, monkeypatch):
    made,fit,path = [],Learner.fit,tmp_path/'runs.csv'
    def counted(learn, *args, **kwargs):
        made.append(learn.selection)
        if len(made)==4: raise KeyboardInterrupt
        fit(learn, *args, **kwargs)
    monkeypatch.setattr(Learner, 'fit', counted)
    study = dict(get_learner=learner_of, methods=['none','top_loss'], epochs=2, seeds=2, path=path, plot=False, about=dict(data='mine'))
    with pytest.raises(KeyboardInterrupt): compare(**study)
    saved = pd.read_csv(path)
    assert saved.groupby(['method','seed']).size().to_dict()=={('none',0):2, ('top_loss',0):2}
    runs = compare(**study)
    assert len(made)==4+3 and runs.groupby(['method','seed']).size().tolist()==[2]*4
    pd.testing.assert_frame_equal(runs[runs.seed==0].reset_index(drop=True), saved)
    compare(**study)
    assert len(made)==7
    compare(**study | dict(methods=['none','top_loss','random_subset']))
    assert len(made)==7+3
    for other,match in [(dict(lr=.1),'lr 0.001, wanted 0.1'), (dict(about=dict(data='yours')), 'data mine, wanted yours'), (dict(epochs=3), 'budget 2 epochs, wanted 3 epochs'), (dict(about=dict(data='mine', colour='red')),'colour unknown')]:
        with pytest.raises(ValueError, match=match): compare(**study | other)

def test_methods_have_their_names_however_they_are_given():
    wanted,own = {'none': 'none', 'top_loss(keep=.5, warmup=0)': 'top_loss(keep=.5, warmup=0)'},dict(none='none', mine='top_loss')
    assert methods_by_name('none,top_loss(keep=.5, warmup=0)')==methods_by_name(list(wanted))==methods_by_name(tuple(wanted))==wanted
    assert methods_by_name(own)==own and methods_by_name(own) is not own

def test_methods_are_split_outside_of_brackets():
    assert split_methods('none,top_loss(keep=.5, warmup=0) , random_subset')==['none','top_loss(keep=.5, warmup=0)','random_subset']

def test_public_datasets_by_name(monkeypatch, folder, tmp_path):
    import selback.bench.datasets as d
    import torchvision
    asked = []
    def download(url): asked.append(url); return folder
    monkeypatch.setattr(d, 'untar_data', download)
    (folder/'test').symlink_to(folder/'valid')
    d.datasets['cifar10'].func.cache_clear()
    for name,url in (('cifar10',URLs.CIFAR),('cifar100',URLs.CIFAR_100),('imagenette',URLs.IMAGENETTE_160),('imagewoof',URLs.IMAGEWOOF_160)):
        dls = get_dls(name, 8)
        assert asked[-1]==url and dls.c==2 and len(dls.train_ds)==32 and len(dls.valid_ds)==16
    x = get_dls('cifar10', 8).train_ds[0][0]
    assert x.dtype==torch.float32 and 0<=x.min() and x.max()<=1
    d.datasets['cifar10'].func.cache_clear()
    class SVHN:
        def __init__(self, root, split, download):
            assert download
            n = dict(train=16, test=8)[split]
            self.data,self.labels = np.zeros((n,3,32,32), dtype=np.uint8),np.arange(n)%10
    monkeypatch.setattr(torchvision.datasets, 'SVHN', SVHN)
    dls = get_dls('svhn', 8)
    assert (len(dls.train_ds),len(dls.valid_ds),dls.c)==(16,8,10)
    d.datasets['svhn'].cache_clear()

def test_networks(): assert get_model('small_resnet', 7)(torch.randn(2,3,32,32)).shape==get_model('resnet18', 7)(torch.randn(2,3,32,32)).shape==(2,7)

@pytest.mark.parametrize('name', ['small_resnet','small_convnet','cifar_resnet18'])
def test_small_networks_take_a_look_at_half_the_resolution(name): assert get_model(name, 7)(torch.randn(2,3,16,16)).shape==(2,7)

@pytest.fixture
def folder(tmp_path):
    from PIL import Image
    rng = np.random.default_rng(0)
    for part,n in (('train',16),('valid',8)):
        for c in ('cat','dog'):
            (tmp_path/part/c).mkdir(parents=True)
            for i in range(n): Image.fromarray(rng.integers(0, 256, (20,20,3), dtype=np.uint8)).save(tmp_path/part/c/f'{i}.png')
    return tmp_path

def test_a_folder_of_class_folders(folder):
    dls = get_dls(str(folder), 8)
    assert (len(dls.train_ds), len(dls.valid_ds), dls.c)==(32,16,2)
    dls = get_dls(str(folder/'train'), 8)
    assert (len(dls.train_ds), len(dls.valid_ds), dls.c)==(26,6,2)

def test_the_command(folder, capsys, tiny_network):
    out = folder/'out'
    main(data=str(folder), methods='none,top_loss(keep=.5,warmup=0),random_subset(keep=.5,warmup=0)', epochs=1, seeds=1, bs=8, out=str(out))
    said = capsys.readouterr().out
    assert all(row in said for row in ('\nitems ','\nshare kept ','\noptions ')) and said.strip().splitlines()[-1].endswith('.')
    runs,summary = pd.read_csv(out/'runs.csv'),pd.read_csv(out/'summary.csv')
    assert len(runs)==3 and {'arch','device','torch','fastai','lr','bs'}<=set(runs.columns) and len(summary)==3
    assert (out/'compare.png').stat().st_size>10000 and '<svg' in (out/'compare.svg').read_text() and '| `none` |' in (out/'table.md').read_text()

def test_an_image_is_learned_pixel_by_pixel(tmp_path, capsys):
    "And what each method has learned is drawn, at the end of its first run"
    main(data='china', methods='none,favor_hard', compute=50_000, seeds=2, bs=1024, lr=4e-3, out=str(tmp_path))
    runs,said = pd.read_csv(tmp_path/'runs.csv'),capsys.readouterr().out
    last = runs[runs.seed==0].groupby('method').error.last()
    assert 'learned.png' in said and (last<.05).all() and (runs.arch=='coordinate_net').all() and (tmp_path/'learned.png').stat().st_size>20_000
    image = get_dls('china').train_ds
    for method,error in last.items():
        picture = torch.tensor(plt.imread(tmp_path/f'learned/{method}.png')[...,:3])
        assert picture.shape==(*image.size, 3) and abs(float((picture.reshape(-1, 3)-image.colours.cpu()).square().mean())-error)<.1*error # colours end at 0 and 1

def test_errors_by_any_name_are_taken(capsys):
    def mean_iou_error(pred, y): return error(pred, y)
    for metric in (error_rate, mean_iou_error, error): assert len(compare(lambda: learner_with(metric), ['none'], 1, 1, plot=False))==1

@pytest.mark.law(9)
def test_a_missing_control_is_said_once_and_before_training(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(Learner, 'fit', lambda *args, fit=Learner.fit, **kwargs: (print('trains'), fit(*args, **kwargs)))
    study = dict(epochs=1, seeds=2, plot=False)
    def said(methods, **kwargs):
        compare(learner_of, methods, **study, **kwargs)
        return capsys.readouterr().out
    before,first,_ = said(['top_loss(warmup=0)']).partition('trains')
    assert before=='compare: without none and random_subset among the methods there will be no verdict against plain training or a random choice.\n' and first
    assert said(['none','top_loss(warmup=0)'], path=tmp_path/'runs.csv').startswith('compare: without random_subset among the methods there will be no verdict against a random choice.\n')
    for methods in (['none'], ['none','random_subset'], ['none','top_loss','random_subset(keep=.3)']): assert 'without' not in said(methods)
    assert said(['none','top_loss(warmup=0)'], path=tmp_path/'runs.csv')=='' # nothing is trained

def test_each_finished_run_is_a_line_where_there_is_no_terminal(capsys):
    compare(learner_of, ['none','random_subset(warmup=0)'], 1, 2, plot=False)
    lines = capsys.readouterr().out.splitlines()
    for i,(line,run) in enumerate(zip(lines, ('none, seed 0','random_subset(warmup=0), seed 0','none, seed 1','random_subset(warmup=0), seed 1'), strict=True), 1):
        assert re.fullmatch(rf'run {i} of 4: {re.escape(run)}, valid_loss \d\.\d+, \d+:\d\d left', line)

@pytest.mark.parametrize('columns,label', [(140,'random_subset(keep=.5,warmup=0), seed 0: '), (80,'run 2 of 2: ')])
def test_a_terminal_has_a_bar_that_ends_full_and_stays_one_line(capsys, monkeypatch, columns, label):
    monkeypatch.setattr(sys.stdout, 'isatty', lambda: True, raising=False)
    monkeypatch.setenv('COLUMNS', str(columns))
    compare(learner_of, ['none','random_subset(keep=.5,warmup=0)'], 1, 1, plot=False)
    said = capsys.readouterr().out
    shown = said.strip().split('\r')
    assert '100.00% [200/200' in shown[-1] and label in shown[-1] and said.endswith('\n') and max(map(len, shown))<=columns

STORED = {'an_image/china_half': dict(compute=614_400, seeds=5, lr=4e-3, about=dict(data='china', arch='coordinate_net', bs=1024, n_valid=24_576)),
    'digits/runs': dict(compute=10_000, seeds=3, about=dict(data='digits', arch='small_resnet', bs=64, n_train=1437, n_valid=360))}

@pytest.mark.parametrize('name', STORED)
def test_stored_runs_are_recognised(name):
    def never(): raise AssertionError('a run was started')
    file,study = f'results/{name}.csv',STORED[name]
    runs = pd.read_csv(file)
    again = compare(never, runs.method.unique().tolist(), path=file, plot=False, **study | dict(seeds=runs.seed.unique().tolist(), about=study['about'] | environment()))
    pd.testing.assert_frame_equal(again, runs, check_dtype=False)

def test_help(monkeypatch, capsys):
    "As `python -m selback.bench.command --help`, in this process"
    monkeypatch.setattr(sys, 'argv', ['selback.bench.command', '--help'])
    with pytest.raises(SystemExit) as e: runpy.run_module('selback.bench.command', run_name='__main__', alter_sys=True)
    said = ' '.join(capsys.readouterr().out.split())
    assert e.value.code==0
    for word in ('--data','--methods','--epochs','--seeds','--arch','--bs','--out','cifar10','folder of class folders'): assert word in said

def test_methods_by_names_of_ones_own_and_columns_of_ones_own(tmp_path):
    made = []
    def own(): made.append(1); return TopLossCallback(.25, auto=False)
    watch = lambda learn: dict(steps=learn.epoch*10)
    study = dict(get_learner=learner_of, methods={'none':'none', 'by hand':own, 'renamed':'top_loss(keep=.25)'}, epochs=2, seeds=2, plot=False, watch=watch, path=tmp_path/'runs.csv')
    runs = compare(**study)
    assert len(made)==2 # one for each run, none to try it
    assert runs.method.unique().tolist()==['none','by hand','renamed'] and runs.steps.tolist()==[0,10]*6
    last = runs[(runs.epoch==2) & (runs.seed==1)].set_index('method')
    assert last.error['by hand']==last.error['renamed'] and last.backpropagated['by hand']==last.backpropagated['renamed']<last.backpropagated['none']
    compare(**study)
    assert len(made)==2
    with pytest.raises(ValueError, match="method: got 'ohem'"): compare(learner_of, {'mine':'ohem'}, plot=False)

def test_a_complete_study_is_read_on_any_machine_but_added_to_on_its_own_only(tmp_path):
    study = dict(get_learner=learner_of, methods=['none'], epochs=1, seeds=1, path=tmp_path/'runs.csv', plot=False)
    here,there = dict(device='this', python='3', torch='2', fastai='2'),dict(device='that', python='4', torch='3', fastai='3')
    assert set(here)==set(environment())
    runs = compare(**study, about=here)
    pd.testing.assert_frame_equal(compare(**study, about=there), pd.read_csv(study['path']), check_dtype=False)
    for name in here:
        with pytest.raises(ValueError, match=f'got runs with {name} '): compare(**study | dict(seeds=2), about=here | {name: there[name]})
    with pytest.raises(ValueError, match='lr 0.001, wanted 0.1'): compare(**study | dict(lr=.1), about=here) # complete or not

def test_pareto_points_are_drawn():
    axes = plot_runs(RUNS)
    points = [next(l for l in ax.lines if l.get_marker()=='o').get_xydata().tolist() for ax in axes]
    assert points==[[[4.,.57],[8.,.5]]]+[[[400.,.57],[800.,.5]]] # the random control is as dear as top_loss, and worse

def test_info_batch_follows_a_budget():
    learn = learner_of(n=32+96, cbs=[CostLog(), InfoBatchCallback(delta=.5, auto=False)])
    with learn.no_bar(),learn.no_logging(): learn.fit(10**4, cbs=Budget('items', 960))
    epochs = learn.selection.stats.groupby('epoch')[['trained']].sum()
    start = epochs.trained.cumsum().shift(fill_value=0)/960
    pruned = epochs.trained<96
    ends = start+start/epochs.index # as long as those before it were
    assert pruned[(start>0) & (ends<=.5)].all() and not pruned[(ends>.5) & (start<.9)].any() and pruned.any()

@pytest.mark.parametrize('kind', ['flipped_labels','random_labels','shuffled_pixels','gaussian_images'])
@pytest.mark.parametrize('as_bytes', [True, False])
def test_damage(kind, as_bytes):
    from selback.bench.datasets import damage
    images,labels = torch.rand(2000, 3, 8, 8)*torch.tensor([.2,.5,1.])[:,None,None],torch.arange(2000)%10
    if as_bytes: images = (images*255).byte()
    ds = TensorItems(images, labels, 0)
    before = images.clone(),labels.clone()
    damaged = damage(ds, kind, .25, seed=1)
    assert damaged.sum()==500 and torch.equal(images, before[0]) and torch.equal(labels, before[1]) # what the dataset was made of is as it was
    assert torch.equal(ds.images[~damaged], images[~damaged]) and torch.equal(ds.labels[~damaged], labels[~damaged])
    assert ds.images.dtype==images.dtype
    wrong = (ds.labels!=labels)[damaged].float().mean()
    if kind=='flipped_labels': assert wrong==1
    if kind=='random_labels': assert abs(wrong-.9)<.05 # one in ten is right by chance
    if kind in ('flipped_labels','random_labels'): assert torch.equal(ds.images, images) and ds.labels[damaged].bincount(minlength=10).min()>25
    else: assert wrong==0
    new,old = ds.images[damaged].float(),images[damaged].float()
    if kind=='shuffled_pixels':
        assert torch.equal(new.flatten(2).sort().values, old.flatten(2).sort().values) and not torch.equal(new, old)
        order = [(old[0,0].flatten()==v).nonzero()[0,0] for v in new[0,0].flatten()] if not as_bytes else None
        if order: assert torch.equal(old.flatten(2)[:,:,order], new.flatten(2)) # one order for all
    if kind=='gaussian_images':
        scale = 255 if as_bytes else 1
        assert ((new.mean((0,2,3))-images.float().mean((0,2,3))).abs()<.06*scale).all() and (new.std((0,2,3))>.6*images.float().std((0,2,3))).all()
        assert 0<=new.min() and new.max()<=scale
        assert abs(torch.corrcoef(torch.stack([new.flatten(), old.flatten()]))[0,1]-torch.corrcoef(torch.stack([new[torch.randperm(500)].flatten(), old.flatten()]))[0,1])<.05 # nothing of the image is left
    again = TensorItems(images, labels, 0)
    assert torch.equal(damage(again, kind, .25, seed=1), damaged) and torch.equal(again.images, ds.images) and torch.equal(again.labels, ds.labels)
    assert not torch.equal(damage(TensorItems(images, labels, 0), kind, .25, seed=2), damaged)

def test_damage_refuses_what_it_does_not_know():
    from selback.bench.datasets import damage
    ds = get_dls('digits', bs=8, n_train=20).train_ds
    with pytest.raises(ValueError, match="kind: got 'noise', wanted one of flipped_labels"): damage(ds, 'noise', .1)
    with pytest.raises(ValueError, match='share: got 2'): damage(ds, 'random_labels', 2)

def test_parts_of_the_data_share_nothing_and_are_the_same_each_time():
    a,again,b = (get_dls('digits', n_train=700, part=i).train_ds for i in (0,0,1))
    assert torch.equal(a.images, again.images) and len(a)==len(b)==700
    assert not {t.numpy().tobytes() for t in a.images} & {t.numpy().tobytes() for t in b.images}
    with pytest.raises(ValueError, match='n_train: got 800'): get_dls('digits', n_train=800, part=1)
    with pytest.raises(ValueError, match='n_train, n_valid: got a number'): get_dls('imagenette', n_train=10)

def test_images_are_moved_each_by_itself_and_nothing_is_lost():
    from selback.bench.datasets import PadCrop
    x = TensorImage(torch.arange(64.).view(1,1,8,8).expand(400,2,8,8))
    moved = PadCrop(2)(x, split_idx=0)
    assert type(moved) is TensorImage and torch.equal(moved[:,0], moved[:,1])
    padded = nn.functional.pad(torch.arange(64.).view(1,1,8,8), [2]*4, mode='reflect')[0,0]
    windows = {padded[i:i+8,j:j+8].numpy().tobytes(): (i,j) for i in range(5) for j in range(5)}
    seen = [windows[m[0].contiguous().numpy().tobytes()] for m in torch.Tensor(moved)] # a KeyError: something else than a shift
    assert set(seen)==set(windows.values()) # all 25, about 16 times each
    assert PadCrop(2)(x, split_idx=1) is x

def test_a_batch_is_taken_at_once_and_is_what_its_items_are():
    dls = get_dls('digits', bs=16, n_train=64)
    dls.train.after_batch.fs.clear()
    for dl in (dls.train.new(shuffle=False), dls.train.new(get_idxs=lambda: [5,3,60,*range(13)], n=16)):
        idxs = dl.get_idxs()
        batches = list(dl)
        xs,ys = torch.cat([b[0] for b in batches]),torch.cat([b[1] for b in batches])
        items = [dl.dataset[i] for i in idxs[:len(xs)]]
        assert torch.equal(xs, torch.stack([x for x,_ in items])) and torch.equal(ys, torch.stack([y for _,y in items]))
        assert type(xs) is TensorImage and type(ys) is TensorCategory

# what a study refuses, before it trains
def test_what_cannot_be_compared_is_refused_at_once(tmp_path, monkeypatch):
    trained = []
    monkeypatch.setattr(Learner, 'fit', lambda *args, **kwargs: trained.append(args))
    def refuses(match, get_learner=learner_of, methods=('none','top_loss'), error=ValueError, **kwargs):
        with pytest.raises(error, match=match): compare(get_learner, methods, 1, 1, plot=False, **kwargs)
    refuses('wanted a function that returns a new learner', learner_of(), error=TypeError)
    refuses('got Sequential, wanted a Learner', mlp, error=TypeError)
    refuses('with TopLossCallback, wanted one without a selection', lambda: learner_of().top_loss())
    refuses('with 2 metrics, wanted one', lambda: Learner(learner_of().dls, mlp(), loss_func=CrossEntropyLossFlat(), metrics=[error, error]))
    refuses('got a training set without a batch', lambda: Learner(dls_of(*class_data(40), bs=16, n_valid=32, drop_last=True), mlp(), loss_func=CrossEntropyLossFlat(), metrics=error))
    refuses('methods: got none', methods=[])
    refuses("'a': 3, wanted a name with", methods={'a': 3}, error=TypeError)
    refuses('wanted a name with', methods=[TopLossCallback()], error=TypeError)
    refuses('got epoch, which it writes itself', about=dict(epoch=3))
    refuses('about: got 3, wanted a dict', about=3, error=TypeError)
    for name,meant in dict(n_epoch='epochs', n_epochs='epochs', n_seeds='seeds', computes='compute').items(): refuses(f"unknown option '{name}', wanted '{meant}'", error=TypeError, **{name: 3})
    refuses(r'A budget is epochs, seconds, items or compute; .* about=dict\(budget=...\)', error=TypeError, budget=3)
    for metric in (accuracy, F1Score(), partial(top_k_accuracy, k=2), R2Score()): refuses('of which more is better, wanted an error', lambda: learner_with(metric))
    refuses('watch: got 3', watch=3, error=TypeError)
    refuses('path: got .*nowhere.*wanted a CSV file in a folder that exists', path=tmp_path/'nowhere'/'runs.csv')
    refuses('path: got', path=tmp_path)
    assert not trained

def test_runs_that_go_on_from_another_are_refused():
    model = mlp()
    with pytest.raises(ValueError, match='the same model twice'):
        compare(lambda: Learner(learner_of().dls, model, loss_func=CrossEntropyLossFlat(), metrics=error), ['none'], 1, 1, plot=False)

def shares():
    "A function that makes learners on the same loaders each time"
    set_seed(0)
    dls = dls_of(*class_data())
    return lambda: Learner(dls, mlp(), loss_func=CrossEntropyLossFlat(), metrics=error)

def test_methods_on_the_same_loaders_see_the_same_batches(tmp_path):
    "And so do runs that are added later"
    study = dict(epochs=2, plot=False, methods={'none': 'none', 'same': 'none'})
    runs = compare(shares(), seeds=2, **study).drop(columns=['seconds','cpu_seconds'])
    a,b = (runs[runs.method==m].drop(columns='method').reset_index(drop=True) for m in ('none','same'))
    pd.testing.assert_frame_equal(a, b)
    assert a.valid_loss.nunique()==4 # another order for another seed
    for seeds in 1,2: later = compare(shares(), seeds=seeds, path=tmp_path/'runs.csv', **study)
    assert later.valid_loss.tolist()==pytest.approx(runs.valid_loss.tolist(), rel=1e-5)

def test_new_loaders_shuffle_as_they_would_without_compare():
    runs = compare(learner_of, ['none'], 2, 1, plot=False, lr=.01, annealing='constant')
    set_seed(0, reproducible=True)
    learn = quiet_fit(learner_of(), 2, lr=.01)
    assert runs.valid_loss.tolist()==[o[1] for o in learn.recorder.values]

@pytest.mark.parametrize('ends', [lambda: None, lambda: 1/0])
def test_what_was_set_for_cudnn_is_set_again(ends, monkeypatch):
    flags = torch.backends.cudnn
    monkeypatch.setattr(flags, 'benchmark', True)
    monkeypatch.setattr(flags, 'deterministic', False)
    seen = []
    try: compare(learner_of, {'a': lambda: seen.append((flags.benchmark, flags.deterministic)) or ends()}, 1, 1, plot=False)
    except ZeroDivisionError: pass
    assert seen==[(False,True)] and (flags.benchmark, flags.deterministic)==(True,False)

def test_a_method_that_gives_the_same_callback_again_counts_anew():
    cb = TopLossCallback(auto=False, warmup=0, keep=.25)
    runs = compare(learner_of, {'a': lambda: cb}, epochs=2, seeds=2, plot=False)
    ends = last_epochs(runs)
    assert ends.forwarded.nunique()==1 and ends.kept.nunique()==1 and ends.epoch.tolist()==[2,2]

NOTES = [dict(note=None), dict(note='NA'), dict(frac=1/3), dict(version='2.10'), dict(n=1.)]

@pytest.mark.parametrize('lr,more', [*[(1, o) for o in NOTES], (1., NOTES[0]), (.0012345678, NOTES[0])], ids=str)
def test_a_study_knows_its_columns_again(tmp_path, lr, more):
    study = dict(get_learner=learner_of, methods=['none'], epochs=1, path=tmp_path/'runs.csv', plot=False, lr=lr, about=more)
    first = compare(seeds=1, **study)
    both = compare(seeds=2, **study)
    assert both.valid_loss[0]==pytest.approx(first.valid_loss[0], rel=1e-5) and both.seed.tolist()==[0,1]

@pytest.mark.parametrize('damage,match', [(lambda s: '', 'is no table'), (lambda s: 'a,b\n1,2\n', 'a file without annealing, backpropagated'), (lambda s: '\n'.join([*s.split('\n')[:1], *s.split('\n')[2:]]), r'got epochs \[2\] of none, seed 0'),
    (lambda s: s+'\n'.join(s.split('\n')[1:]), r'got epochs \[1, 2, 1, 2\]')], ids=['empty','other columns','an epoch is missing','twice'])
def test_a_damaged_file_is_refused(tmp_path, damage, match):
    study = dict(get_learner=learner_of, methods=['none'], epochs=2, seeds=1, path=tmp_path/'runs.csv', plot=False)
    compare(**study)
    study['path'].write_text(damage(study['path'].read_text()))
    with pytest.raises(ValueError, match=match): compare(**study)

def test_a_fit_that_is_cancelled_at_once_leaves_no_file(tmp_path):
    from fastai.callback.core import CancelFitException
    class Cancels(Callback):
        def before_epoch(self): raise CancelFitException
    with pytest.raises(ValueError, match='none, seed 0: the fit ended before its first epoch'):
        compare(lambda: learner_of(cbs=Cancels()), ['none'], 2, 1, plot=False, path=tmp_path/'runs.csv')
    assert not list(tmp_path.iterdir())

# verdicts on runs that are not finite or not all there
def test_verdicts_say_when_there_is_nothing_to_say():
    nan = RUNS.assign(valid_loss=RUNS.valid_loss.where(RUNS.method!='none'))
    assert 'no finite validation loss' in verdict(summarize(nan))
    lost = RUNS[~(RUNS.method.str.startswith('random') & (RUNS.seed==1))]
    assert verdict(summarize(lost))==verdict(summarize(RUNS[RUNS.seed==0]))
    diverged = RUNS.assign(valid_loss=RUNS.valid_loss.where((RUNS.method!='top_loss') | (RUNS.seconds<4)))
    assert diverged.valid_loss.isna().sum()==2 and 'nan' not in verdict(summarize(diverged)) and '0.58' not in verdict(summarize(diverged))

def test_how_good_a_run_was_before_it_diverged():
    run = pd.DataFrame(dict(seconds=[1.,2,3,4], valid_loss=[1.,.3,float('nan'),float('nan')]))
    assert best_within(run, 4., 'seconds')==.3
    zero = run.assign(valid_loss=0.)
    assert against(zero, zero, 'seconds')==0
