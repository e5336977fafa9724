"The comparison: what runs cost, what it amounts to, the command"
import itertools, math, pickle, re, runpy, sys
from functools import partial
from html import escape

import pandas as pd, pytest, torch
from fastai.callback.core import Callback, CancelFitException
from fastai.callback.tracker import EarlyStoppingCallback
from fastai.data.external import URLs
from fastai.learner import Metric
from fastai.losses import FocalLossFlat
from fastai.metrics import F1Score, R2Score, accuracy, error_rate, mse, top_k_accuracy
from helpers import *
from selback.bench.findings import *
from selback.bench.compare import *
from selback.bench.compare import Budget, CostLog
from selback.bench.command import main
from selback.bench.datasets import PadCrop, tensor_dls

pytestmark = pytest.mark.slow # workbench

# findings by hand
RANDOM = 'random_subset(keep=.5)'

def run(seconds, losses, kept=1.):
    items = [100*s for s in seconds]
    costs = dict(seconds=seconds, cpu_seconds=seconds, backpropagated=items, forwarded=[2*n for n in items])
    errors = [loss/2 for loss in losses]
    study = dict(kept=kept, budget='4 seconds', epoch=range(1, len(losses)+1))
    return pd.DataFrame(costs | dict(valid_loss=losses, error=errors) | study)

PLAIN = run([2.,4], [1.,.6])
FAST = run([1.,2,3,4], [1.,.8,.55,.57], kept=.5)
CONTROL = run([1.,2,3,4], [1.,.9,.8,.8], kept=.5)
BY_METHOD = {'none': PLAIN, 'top_loss': FAST, RANDOM: CONTROL}
RUNS = pd.concat([runs.assign(method=m, seed=seed) for seed in range(3) for m,runs in BY_METHOD.items()])

def rescaled(runs, of_those, factor):
    "Runs, the validation losses of some of which are multiplied"
    return runs.assign(valid_loss=runs.valid_loss.where(~of_those, runs.valid_loss*factor))

@pytest.mark.parametrize('measure', ['valid_loss','error'])
def test_summary_by_hand(measure):
    summary = summarize(RUNS, measure).set_index(['method','seed'])
    row,plain,control = (summary.loc[m,0] for m in ('top_loss','none',RANDOM))
    assert row['best loss']==.55
    assert row['best error']==.275
    assert row[word_of(measure)]==(.57 if measure=='valid_loss' else .285)
    assert (row.seconds,row.forwarded)==(4,800)
    assert row['vs random, equal time']==pytest.approx(.57/.8-1)
    assert row['vs plain, equal time']==pytest.approx(.57/.6-1)
    assert plain['vs random, equal time']==pytest.approx(.6/.8-1)
    assert np.isnan([plain['vs plain, equal time'],control['vs random, equal time']]).all()

EQUAL = {'16 epochs': None, '9 compute': 'compute', '9 items': 'items', '2 seconds': 'time'}

@pytest.mark.parametrize('budget', EQUAL)
def test_runs_are_compared_at_what_all_of_them_spent(budget):
    "Those of equal epochs cost differently"
    runs = RUNS.assign(budget=budget)
    assert equal_of(runs)==EQUAL[budget]
    compared = {name for name in summarize(runs) if name.startswith('vs ')}
    equal = EQUAL[budget]
    assert compared==({f'vs plain, equal {equal}',f'vs random, equal {equal}'} if equal else set())

# verdicts
IS_CONTROL = RUNS.method==RANDOM

@pytest.mark.law(9)
def test_a_verdict_is_the_interval_in_one_sentence():
    said = ('is clearly better: -5.0% (-5.0% to -5.0%) in 3 seeds; '
        'against a random choice, clearly better: -28.8% (-28.8% to -28.8%) in 3 seeds.')
    assert verdict(RUNS)==f'At equal seconds the validation loss of top_loss, against plain training, {said}'
    assert verdict(RUNS.assign(budget='400 items')).startswith('At equal back-propagated items the validation loss of')
    assert verdict(RUNS.assign(budget='9 compute')).startswith('At equal compute the validation loss of top_loss')
    assert 'the error of' in verdict(RUNS, 'error')
    assert 'the error of' in verdict(RUNS.assign(n_valid=2000))

    worse = verdict(rescaled(RUNS, RUNS.method=='top_loss', 3))
    assert 'plain training, is clearly worse: +185.0% (+185.0% to +185.0%) in 3 seeds; against a random' in worse

@pytest.mark.parametrize('factors', [(.01,5.3),(.1,.3,2.8)])
def test_verdict_ranks_by_what_it_prints(factors):
    "By factors, whose product counts: one bad seed does not hide what the others gained"
    ran = dict(none=[1.]*len(factors), favor_hard=factors, top_loss=[.98]*len(factors))
    rows = [dict(method=m, seed=s, epoch=1, budget='9 compute', valid_loss=.02*10**s*f)
        for m,of in ran.items() for s,f in enumerate(of)]
    mean = np.prod(factors)**(1/len(factors))-1
    said = verdict(pd.DataFrame(rows))
    assert f'of favor_hard, against plain training, is not clear: {mean:+.1%} ' in said

@pytest.mark.law(9)
def test_verdict_says_what_it_lacks():
    assert 'no control' in verdict(RUNS[~IS_CONTROL])
    assert 'nothing to compare' in verdict(RUNS[RUNS.method=='none'])
    assert 'No method selected anything' in verdict(RUNS.assign(kept=1.)) # as files from before tell it
    assert 'clearly better' in verdict(RUNS.assign(kept=1., selected=5))
    assert 'equal compute, seconds or items' in verdict(RUNS.assign(budget='4 epochs'))

def second_seed_of_top_loss(runs): return (runs.method=='top_loss') & (runs.seed==1)

UNCLEAR = dict(
    one_seed=lambda runs: runs[runs.seed==0],
    seeds_disagree=lambda runs: rescaled(runs, second_seed_of_top_loss(runs), 1.07),
    wide=lambda runs: rescaled(runs, second_seed_of_top_loss(runs), .1))

@pytest.mark.parametrize('name', UNCLEAR)
def test_what_is_not_clear_is_no_win(name):
    runs = UNCLEAR[name](RUNS)
    said = verdict(runs)
    assert said.startswith('At equal seconds the validation loss of top_loss, against plain training, is not clear: -')
    assert show_table(runs).loc['vs plain, equal time','top_loss'].startswith('no clear difference (-')

# what runs cost
def error(pred, y): return (pred.argmax(1)!=y).float().mean()

def learner_on(dls, metrics=error, **kwargs):
    return Learner(dls, mlp(), loss_func=CrossEntropyLossFlat(), metrics=metrics, **kwargs)

def learner_of(n=132, bs=32, **kwargs): return learner_on(dls_of(*class_data(n), bs=bs, drop_last=True), **kwargs)

def learner_with(metrics): return learner_on(learner_of().dls, metrics)

def never(): raise AssertionError('a run was started')

def test_runs_count_their_cost():
    top,random,back = 'top_loss(keep=.25)','random_subset(keep=.25)','selective_backprop(beta=9)'
    runs = compare(learner_of, ['none',top,random,back], epochs=3, seeds=2)
    assert len(runs)==3*2*4

    last = runs[runs.epoch==3].set_index(['method','seed'])
    def counted(method, seed): return last.loc[(method,seed), ['forwarded','backpropagated']].tolist()
    for seed in (0,1):
        assert counted('none', seed)==[288,288]
        assert counted(top, seed)==[96+2*24+2*96, 96+2*24]
        assert counted(random, seed)==[96+2*24]*2
        forwarded,trained = counted(back, seed)
        assert trained%32==0
        assert forwarded==trained+2*96

    assert (runs.groupby(['method','seed']).seconds.diff().dropna()>0).all()
    warm = runs[runs.epoch==1].groupby('seed').valid_loss.nunique() # the warm-up is plain training with the same seed
    assert warm.tolist()==[1,1]

COSTS = [
    ('top_loss(keep=.5,warmup=0)', 150, 50),
    ('top_loss(keep=.5,warmup=0,passes=1)', 100, 100),
    ('random_subset(keep=.5,warmup=0)', 50, 50),
    ('random_subset(keep=.5,warmup=0,passes=1)', 100, 100)]

@pytest.mark.parametrize('method,forwarded,trained', COSTS)
def test_with_one_pass_an_item_is_forwarded_once(method, forwarded, trained):
    "And backwards as often, since those that are not chosen only weigh nothing; else all 100 in a pass of its own"
    def get_learner(): return learner_on(dls_of(*class_data(132), bs=20))
    runs = compare(get_learner, [method], 2, 1, plot=False)
    assert runs.backpropagated.tolist()==[trained,2*trained]
    assert runs.forwarded.tolist()==[forwarded,2*forwarded]

@pytest.mark.measured
def test_what_an_epoch_took_is_not_said_of_each_run(capsys):
    "It is in the runs"
    quiet_fit(learner_of().top_loss(.5), 3)
    assert 'a selecting epoch took' in capsys.readouterr().out
    methods = {m: m for m in ('top_loss(keep=.5)','favor_hard','prioritized_sampling','stale_loss')}
    compare(learner_of, methods | {'own': lambda: FavorHardCallback(beta=2)}, 3, 1, plot=False)
    assert 'a selecting epoch took' not in capsys.readouterr().out

class Clock:
    "The comparison's clock, which only a test moves"
    def __init__(self, monkeypatch):
        self.t = 0.
        monkeypatch.setattr('selback.bench.compare.time.perf_counter', lambda: self.t)
        monkeypatch.setattr('selback.bench.compare.time.process_time', lambda: 2*self.t)

    def passes(self, seconds): self.t += seconds

def test_choosing_before_loading_costs_seconds_and_validation_none(monkeypatch):
    "Each epoch draws for 3 seconds, trains 5 batches of 1, validates for 50"
    clock = Clock(monkeypatch)
    class Draws(FavorHard):
        def choose(self, scores, now): clock.passes(3)
    class Trains(Callback):
        def after_batch(self): clock.passes(1 if self.training else 25)

    def get_learner(): return learner_of(bs=20, cbs=Trains())
    methods = {'none': 'none', 'draws': lambda: EpochSelection(Draws(), warmup=0)}
    runs = compare(get_learner, methods, 2, 1, plot=False)
    assert runs.method.tolist()==['none','none','draws','draws']
    assert runs.seconds.tolist()==[5,10,8,16]
    assert runs.cpu_seconds.tolist()==[10,20,16,32]

# bad words
BAD_METHODS = {
    'ohem': 'wanted one of none, .*top_loss',
    'top_loss(keep=7)': 'keep: got 7',
    'top_loss(keep=': 'wanted a name or a call',
    'top_loss(kep=.5)': 'kep',
    'top_loss(keep=x)': 'method',
    '1+1': 'method'}

@pytest.mark.parametrize('spec', BAD_METHODS)
def test_bad_methods_fail_before_the_first_run(spec):
    with pytest.raises((ValueError,TypeError), match=BAD_METHODS[spec]): compare(never, ['none', spec], 1, 1)

def test_bad_words_are_refused():
    with pytest.raises(ValueError, match="arch: got 'resnet0'"): get_model('resnet0', 3)
    with pytest.raises(ValueError, match="data: got 'no/where'"): get_dls('no/where')

BAD_INPUT = [
    (dict(methods='ohem'), "got 'ohem'"),
    (dict(methods='top_loss(keep=2)'), 'keep: got 2'),
    (dict(methods=','), "got ''"),
    (dict(epochs=0), 'epochs: got 0'),
    (dict(seeds=0), 'seeds: got 0'),
    (dict(bs=0), 'bs: got 0'),
    (dict(bs=10**5), 'bs: got 100000 with 1437 items to train on, wanted at most so many'),
    (dict(lr=-1.), 'lr: got -1'),
    (dict(data='no/where'), 'no/where'),
    (dict(arch='resnet0'), 'resnet0'),
    (dict(seconds=-1.), 'seconds: got -1'),
    (dict(seconds=9., items=9), 'budget: got seconds and items'),
    (dict(epochs=9, compute=9), 'budget: got epochs and compute'),
    (dict(annealing='cosine'), "'cosine'")]

@pytest.mark.parametrize('kwargs,match', BAD_INPUT)
def test_the_command_answers_bad_input_in_one_line(kwargs, match, tmp_path, capsys):
    check_refused(capsys, match, tmp_path/'out', **kwargs)

def test_the_command_refuses_a_folder_without_images(tmp_path, capsys):
    (tmp_path/'empty').mkdir()
    check_refused(capsys, 'without images', tmp_path/'out', data=str(tmp_path/'empty'))

def check_refused(capsys, match, out, data='digits', **kwargs):
    with pytest.raises(SystemExit) as ended: main(data=data, out=str(out), **kwargs)
    said = capsys.readouterr().err
    assert ended.value.code==2
    assert match in said
    assert said.startswith('selback-compare: error:')
    assert said.count('\n')==1
    assert not out.exists()

# tables and pictures
def test_plots_and_tables_for_any_order_of_methods():
    axes = plot_runs(RUNS[RUNS.method=='top_loss'], measure='error')
    wanted = [[1,.5],[2,.4],[3,.275],[4,.275]]
    assert axes[0].lines[0].get_xydata()==pytest.approx(np.array(wanted))

    shown = show_table(RUNS.assign(forwarded=22528))
    assert shown.loc['forwarded','none']=='22,528'
    assert shown.loc['vs random, equal time','top_loss']=='-28.8%'
    assert shown.loc['vs plain, equal time','none']=='-'
    assert to_markdown(shown).splitlines()[0]=='|  | `none` | `top_loss` | `random_subset(keep=.5)` |'

AXES = {'4 seconds': 'seconds of training', '9 compute': 'compute, in items trained'}

@pytest.mark.parametrize('budget', AXES)
def test_curves_are_drawn_by_what_was_spent_and_by_items(budget):
    "Of plain training up to its end, whose best is not its last"
    by_cost,by_items = plot_runs(RUNS.assign(budget=budget, compute=RUNS.seconds))
    assert [ax.get_xlabel() for ax in (by_cost,by_items)]==[AXES[budget],'items back-propagated']
    ends = {line.get_label(): line.get_xydata()[-1].round(9).tolist() for line in by_cost.lines}
    assert ends=={'plain training': [4.,.6], 'top_loss': [4.,.55], RANDOM: [4.,.8]}

# budgets
class Rates(Callback):
    "Notes the learning rate and how far the fit is, in each step"
    order = 99

    def __init__(self): self.lrs,self.pcts = [],[]

    def before_backward(self):
        self.lrs.append(self.opt.hypers[0]['lr'])
        self.pcts.append(self.pct_train)

@pytest.mark.parametrize('method', ['none','top_loss(keep=.25)'])
def test_a_budget_of_items_ends_every_run_alike(method):
    rates = Rates()
    runs = compare(lambda: learner_of(cbs=[rates]), [method], items=480, seeds=1, lr=.01, plot=False)
    assert runs.backpropagated.iloc[-1]==pytest.approx(480, abs=15)
    assert (runs.annealing=='one_cycle').all()
    assert (runs.budget=='480 items').all()

    pcts = rates.pcts[rates.pcts.index(0., 1):] # after the piece that wakes the machine up
    assert pcts==sorted(pcts)
    assert .9<pcts[-1]<1
    assert rates.lrs[-1]<.001
    assert max(rates.lrs)<=.01

def test_a_budget_of_seconds_ends_a_run(monkeypatch):
    ticks = itertools.count(1)
    monkeypatch.setattr('selback.bench.compare.time.perf_counter', lambda: next(ticks)/2)
    *before,last = compare(learner_of, ['none'], seconds=40, seeds=1, plot=False).seconds
    assert 40<=last<43
    assert all(seconds<40 for seconds in before)

def test_a_run_has_the_compute_of_ten_epochs_if_nothing_is_said():
    "Whatever the method; the learning rate ends with it"
    runs = compare(learner_of, ['none','top_loss(keep=.25)'], seeds=1, plot=False, tell_controls=False)
    assert set(runs.budget)=={'1000 compute'} # of 100 items to train on
    assert set(runs.annealing)=={'one_cycle'}
    assert last_epochs(runs).compute.between(1000, 1000+2*32).all()

def stopping(): return learner_of(cbs=[EarlyStoppingCallback(patience=1, min_delta=9)])

@pytest.mark.parametrize('unit', ['items','compute'])
def test_a_run_that_ends_before_its_budget_is_refused(unit, tmp_path):
    "It can't be compared with one that used all of it"
    ended = rf'none, seed 0: the fit ended at \d+ of 960 {unit}, wanted all of its budget, .*EarlyStoppingCallback'
    path = tmp_path/'runs.csv'
    with pytest.raises(ValueError, match=ended):
        compare(stopping, ['none'], seeds=1, plot=False, path=path, **{unit: 960})
    assert not path.exists()

def test_a_budget_of_epochs_may_end_early():
    assert compare(stopping, ['none'], epochs=9, seeds=1, plot=False).epoch.max()<9

def fit_within(learn, items):
    with learn.no_bar(),learn.no_logging(): learn.fit(10**4, cbs=Budget('items', items))
    return learn.selection

def test_a_selection_follows_the_budget():
    learn = learner_of(cbs=[CostLog(), TopLossCallback(.25, start=.5, warmup=0)])
    stats = fit_within(learn, 960).stats
    first = (stats.kept<stats.seen).idxmax()
    assert stats.trained[:first].sum()==480 # half of it

def test_info_batch_follows_a_budget():
    learn = learner_of(n=32+96, cbs=[CostLog(), InfoBatchCallback(delta=.5)])
    trained = fit_within(learn, 960).stats.groupby('epoch').trained.sum()
    start = trained.cumsum().shift(fill_value=0)/960
    end = start+start/trained.index # of an epoch as long as those before it were
    is_pruned = trained<96
    assert is_pruned[(start>0) & (end<=.5)].all()
    assert not is_pruned[(end>.5) & (start<.9)].any()
    assert is_pruned.any()

# studies that go on
class Fits:
    "Counts the fits; one of them may be interrupted"
    def __init__(self, monkeypatch, interrupted=None):
        self.n,self.interrupted = 0,interrupted
        fit = Learner.fit
        def counted(learn, *args, **kwargs):
            self.n += 1
            if self.n==self.interrupted: raise KeyboardInterrupt
            fit(learn, *args, **kwargs)
        monkeypatch.setattr(Learner, 'fit', counted)

    def since(self):
        "How many there were since this was asked before"
        n,self.n = self.n,0
        return n

def sizes(runs): return runs.groupby(['method','seed']).size().to_dict()

def test_finished_runs_are_not_run_again(tmp_path, monkeypatch):
    fits,path = Fits(monkeypatch, interrupted=4),tmp_path/'runs.csv'
    study = dict(get_learner=learner_of, methods=['none','top_loss'], epochs=2, seeds=2, path=path, plot=False)
    with pytest.raises(KeyboardInterrupt): compare(**study)
    saved = pd.read_csv(path)
    assert sizes(saved)=={('none',0): 2, ('top_loss',0): 2}
    assert fits.since()==4

    fits.interrupted = None
    runs = compare(**study)
    assert fits.since()==3
    assert list(sizes(runs).values())==[2]*4
    saved = saved.astype(dict(compute=float)) # written without a decimal
    pd.testing.assert_frame_equal(runs[runs.seed==0].reset_index(drop=True), saved)

    compare(**study)
    assert fits.since()==0
    compare(**study | dict(methods=['none','top_loss','random_subset']))
    assert fits.since()==3

OTHER_STUDIES = [
    (dict(lr=.1), 'lr 0.001, wanted 0.1'),
    (dict(about=dict(data='yours')), 'data mine, wanted yours'),
    (dict(epochs=3), 'budget 2 epochs, wanted 3 epochs'),
    (dict(about=dict(data='mine', colour='red')), 'colour unknown')]

def test_runs_of_another_study_are_refused(tmp_path):
    study = dict(get_learner=learner_of, methods=['none'], epochs=2, seeds=1, about=dict(data='mine'))
    there = dict(path=tmp_path/'runs.csv', plot=False)
    compare(**study, **there)
    for other,match in OTHER_STUDIES:
        with pytest.raises(ValueError, match=match): compare(**study | other, **there)

def test_methods_have_their_names_however_they_are_given():
    line = 'none,top_loss(keep=.5, warmup=0)'
    names = ['none','top_loss(keep=.5, warmup=0)']
    for given in (line, names, tuple(names)): assert methods_by_name(given)=={name: name for name in names}

    own = dict(none='none', mine='top_loss')
    assert methods_by_name(own)==own
    assert methods_by_name(own) is not own

def test_methods_are_split_outside_of_brackets():
    line = 'none,top_loss(keep=.5, warmup=0) , random_subset'
    assert split_methods(line)==['none','top_loss(keep=.5, warmup=0)','random_subset']

def test_methods_by_names_of_ones_own_and_columns_of_ones_own(tmp_path):
    made = []
    def own():
        made.append(1)
        return TopLossCallback(.25)

    methods = {'none': 'none', 'by hand': own, 'renamed': 'top_loss(keep=.25)'}
    def watch(learn): return dict(steps=learn.epoch*10)
    study = dict(get_learner=learner_of, methods=methods, epochs=2, seeds=2, watch=watch)
    there = dict(path=tmp_path/'runs.csv', plot=False)
    runs = compare(**study, **there)
    assert len(made)==2 # one for each run, none to try it
    assert runs.method.unique().tolist()==list(methods)
    assert runs.steps.tolist()==[0,10]*6

    last = runs[(runs.epoch==2) & (runs.seed==1)].set_index('method')
    by_hand,renamed = last.loc['by hand'],last.loc['renamed']
    assert by_hand.error==renamed.error
    assert by_hand.backpropagated==renamed.backpropagated<last.backpropagated['none']

    compare(**study, **there)
    assert len(made)==2
    with pytest.raises(ValueError, match="method: got 'ohem'"): compare(learner_of, {'mine': 'ohem'}, plot=False)

HERE = dict(device='this', python='3', torch='2', fastai='2')
ELSEWHERE = dict(device='that', python='4', torch='3', fastai='3')

def test_a_complete_study_is_read_on_any_machine_but_added_to_on_its_own_only(tmp_path):
    assert set(HERE)==set(environment())
    study = dict(get_learner=learner_of, methods=['none'], epochs=1, seeds=1, path=tmp_path/'runs.csv', plot=False)
    compare(**study, about=HERE)
    read_elsewhere = compare(**study, about=ELSEWHERE)
    pd.testing.assert_frame_equal(read_elsewhere, pd.read_csv(study['path']), check_dtype=False)

    more = study | dict(seeds=2)
    for name in HERE:
        about = HERE | {name: ELSEWHERE[name]}
        with pytest.raises(ValueError, match=f'got runs with {name} '): compare(**more, about=about)

    faster = study | dict(lr=.1)
    with pytest.raises(ValueError, match='lr 0.001, wanted 0.1'): compare(**faster, about=HERE) # complete or not

NOTES = [dict(note=None), dict(note='NA'), dict(frac=1/3), dict(version='2.10'), dict(n=1.)]
WRITTEN = [*[(1, note) for note in NOTES], (1., NOTES[0]), (.0012345678, NOTES[0])]

@pytest.mark.parametrize('lr,about', WRITTEN, ids=str)
def test_a_study_knows_its_columns_again(tmp_path, lr, about):
    study = dict(get_learner=learner_of, methods=['none'], epochs=1, lr=lr, about=about)
    there = dict(path=tmp_path/'runs.csv', plot=False)
    first = compare(seeds=1, **study, **there)
    both = compare(seeds=2, **study, **there)
    assert both.valid_loss[0]==pytest.approx(first.valid_loss[0], rel=1e-5)
    assert both.seed.tolist()==[0,1]

def without_first_epoch(text):
    head,_,*others = text.split('\n')
    return '\n'.join([head, *others])

def with_rows_twice(text):
    _,*rows = text.split('\n')
    return text+'\n'.join(rows)

DAMAGED = {
    'empty': (lambda text: '', 'is no table'),
    'other columns': (lambda text: 'a,b\n1,2\n', 'a file without annealing, backpropagated'),
    'an epoch is missing': (without_first_epoch, r'got epochs \[2\] of none, seed 0'),
    'twice': (with_rows_twice, r'got epochs \[1, 2, 1, 2\]')}

@pytest.mark.parametrize('name', DAMAGED)
def test_a_damaged_file_is_refused(tmp_path, name):
    damaged,match = DAMAGED[name]
    path = tmp_path/'runs.csv'
    study = dict(get_learner=learner_of, methods=['none'], epochs=2, seeds=1, path=path, plot=False)
    compare(**study)
    path.write_text(damaged(path.read_text()))
    with pytest.raises(ValueError, match=match): compare(**study)

def test_a_fit_that_is_cancelled_at_once_leaves_no_file(tmp_path):
    class Cancels(Callback):
        def before_epoch(self): raise CancelFitException

    def get_learner(): return learner_of(cbs=Cancels())
    with pytest.raises(ValueError, match='none, seed 0: the fit ended before its first epoch'):
        compare(get_learner, ['none'], 2, 1, plot=False, path=tmp_path/'runs.csv')
    assert not list(tmp_path.iterdir())

STORED = {
    'an_image/china_half': dict(compute=614_400, seeds=5, lr=4e-3,
        about=dict(data='china', arch='coordinate_net', bs=1024, n_valid=24_576)),
    'digits/runs': dict(compute=10_000, seeds=3,
        about=dict(data='digits', arch='small_resnet', bs=64, n_train=1437, n_valid=360))}

@pytest.mark.parametrize('name', STORED)
def test_stored_runs_are_recognised(name):
    file,study = f'results/{name}.csv',STORED[name]
    runs = pd.read_csv(file)
    again = study | dict(seeds=runs.seed.unique().tolist(), about=study['about'] | environment())
    read = compare(never, runs.method.unique().tolist(), path=file, plot=False, **again)
    pd.testing.assert_frame_equal(read, runs, check_dtype=False)

# data and networks
PUBLIC = dict(cifar10=URLs.CIFAR, cifar100=URLs.CIFAR_100, imagenette=URLs.IMAGENETTE_160, imagewoof=URLs.IMAGEWOOF_160)

@pytest.fixture
def folder(tmp_path):
    from PIL import Image
    rng = np.random.default_rng(0)
    for part,n in (('train',16),('valid',8)):
        for c in ('cat','dog'):
            (tmp_path/part/c).mkdir(parents=True)
            for i in range(n):
                pixels = rng.integers(0, 256, (20,20,3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path/part/c/f'{i}.png')
    return tmp_path

@pytest.fixture
def datasets():
    "The module, which has kept no CIFAR-10, and keeps none"
    import selback.bench.datasets as module
    kept = module.datasets['cifar10'].func
    kept.cache_clear()
    yield module
    kept.cache_clear()

def sizes_of(dls): return len(dls.train_ds),len(dls.valid_ds),dls.c

def test_public_datasets_by_name(datasets, monkeypatch, folder):
    asked = []
    def download(url):
        asked.append(url)
        return folder

    monkeypatch.setattr(datasets, 'untar_data', download)
    (folder/'test').symlink_to(folder/'valid')
    for name,url in PUBLIC.items():
        assert sizes_of(get_dls(name, 8))==(32,16,2)
        assert asked[-1]==url

    x,_ = get_dls('cifar10', 8).train_ds[0]
    assert x.dtype==torch.float32
    assert 0<=x.min()
    assert x.max()<=1

@pytest.mark.parametrize('name', ['small_resnet','resnet18'])
def test_networks(name): assert get_model(name, 7)(torch.randn(2, 3, 32, 32)).shape==(2,7)

@pytest.mark.parametrize('name', ['small_resnet','small_convnet','cifar_resnet18'])
def test_small_networks_take_a_look_at_half_the_resolution(name):
    assert get_model(name, 7)(torch.randn(2, 3, 16, 16)).shape==(2,7)

def test_a_folder_of_class_folders(folder):
    assert sizes_of(get_dls(str(folder), 8))==(32,16,2)
    assert sizes_of(get_dls(str(folder/'train'), 8))==(26,6,2)

# the command
def test_the_command(folder, capsys, tiny_network):
    out = folder/'out'
    methods = 'none,top_loss(keep=.5,warmup=0),random_subset(keep=.5,warmup=0)'
    main(data=str(folder), methods=methods, epochs=1, seeds=1, bs=8, out=str(out))
    said = capsys.readouterr().out
    assert all(row in said for row in ('\nitems ','\nshare kept ','\noptions '))
    assert said.strip().splitlines()[-1].endswith('.')

    runs = pd.read_csv(out/'runs.csv')
    assert len(runs)==3
    assert {'arch','device','torch','fastai','lr','bs'}<=set(runs.columns)
    assert len(pd.read_csv(out/'summary.csv'))==3
    assert (out/'compare.png').stat().st_size>10000
    assert '<svg' in (out/'compare.svg').read_text()
    assert '| `none` |' in (out/'table.md').read_text()

IN_HELP = '--data','--methods','--compute','--seeds','--arch','--bs','--out','cifar10','folder of class folders'

def test_help(monkeypatch, capsys):
    "As `python -m selback.bench.command --help`, in this process"
    monkeypatch.setattr(sys, 'argv', ['selback.bench.command', '--help'])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module('selback.bench.command', run_name='__main__', alter_sys=True)
    said = ' '.join(capsys.readouterr().out.split())
    assert ended.value.code==0
    for word in IN_HELP: assert word in said

# what is said
def mean_iou_error(pred, y): return error(pred, y)

@pytest.mark.parametrize('metric', [error_rate, mean_iou_error, error])
def test_errors_by_any_name_are_taken(metric):
    assert len(compare(lambda: learner_with(metric), ['none'], 1, 1, plot=False))==1

class SaysWhatItCompares:
    "What a comparison of some methods says, 'trains' for each fit"
    def __init__(self, capsys, monkeypatch):
        self.capsys,fit = capsys,Learner.fit
        def saying(*args, **kwargs):
            print('trains')
            fit(*args, **kwargs)
        monkeypatch.setattr(Learner, 'fit', saying)

    def __call__(self, methods, **kwargs):
        compare(learner_of, methods, epochs=1, seeds=2, plot=False, **kwargs)
        return self.capsys.readouterr().out

def warning(missing, against):
    return f'compare: without {missing} among the methods there will be no verdict against {against}.\n'

@pytest.mark.law(9)
def test_a_missing_control_is_said_once_and_before_training(capsys, monkeypatch, tmp_path):
    said = SaysWhatItCompares(capsys, monkeypatch)
    before,_,after = said(['top_loss(warmup=0)']).partition('trains')
    assert before==warning('none and random_subset', 'plain training or a random choice')
    assert after

    without_random = dict(methods=['none','top_loss(warmup=0)'], path=tmp_path/'runs.csv')
    assert said(**without_random).startswith(warning('random_subset', 'a random choice'))
    assert said(**without_random)=='' # nothing is trained

    for methods in (['none'], ['none','random_subset'], ['none','top_loss','random_subset(keep=.3)']):
        assert 'without' not in said(methods)

def test_each_finished_run_is_a_line_where_there_is_no_terminal(capsys):
    methods = ['none','random_subset(warmup=0)']
    compare(learner_of, methods, 1, 2, plot=False)
    runs = [f'{method}, seed {seed}' for seed in range(2) for method in methods]
    lines = capsys.readouterr().out.splitlines()
    for i,(line,run) in enumerate(zip(lines, runs, strict=True), 1):
        assert re.fullmatch(rf'run {i} of 4: {re.escape(run)}, valid_loss \d\.\d+, \d+:\d\d left', line)

@pytest.mark.parametrize('columns', [140,80])
def test_a_terminal_has_one_bar_over_all_runs_that_stays_one_line(capsys, monkeypatch, columns):
    monkeypatch.setattr(sys.stdout, 'isatty', lambda: True, raising=False)
    monkeypatch.setenv('COLUMNS', str(columns))
    method = 'random_subset(keep=.5,warmup=0)'
    compare(learner_of, ['none',method], 2, 1, plot=False)
    shown = capsys.readouterr().out.split('\r')
    assert max(len(o.rstrip(' ')) for o in shown)<=columns
    bars = [o for o in shown if '/200 ' in o]
    at = [int(re.search(r'(\d+)/200 ', o)[1]) for o in bars]
    assert at==sorted(at)
    assert at[0]==0 and at[-1]==200 and len(set(at))>2 # as often as time allows
    assert ('random_subset' if columns==80 else f'{method}, seed 0') in bars[-1]

# loaders
def test_parts_of_the_data_share_nothing_and_are_the_same_each_time():
    first,again,second = (get_dls('digits', n_train=700, part=i).train_ds for i in (0,0,1))
    assert torch.equal(first.images, again.images)
    assert len(first)==len(second)==700
    def contents(ds): return {image.numpy().tobytes() for image in ds.images}
    assert not contents(first) & contents(second)

    with pytest.raises(ValueError, match='n_train: got 800'): get_dls('digits', n_train=800, part=1)
    with pytest.raises(ValueError, match='n_train, n_valid: got a number'): get_dls('imagenette', n_train=10)

def test_images_are_moved_each_by_itself_and_nothing_is_lost():
    image = torch.arange(64.).view(1, 1, 8, 8)
    x = TensorImage(image.expand(400, 2, 8, 8))
    moved = PadCrop(2)(x, split_idx=0)
    assert type(moved) is TensorImage
    assert torch.equal(moved[:,0], moved[:,1])

    def contents(image): return image.contiguous().numpy().tobytes()
    padded = nn.functional.pad(image, [2]*4, mode='reflect')[0,0]
    windows = {contents(padded[i:i+8,j:j+8]) for i in range(5) for j in range(5)}
    seen = {contents(channels[0]) for channels in torch.Tensor(moved)}
    assert len(windows)==25
    assert seen==windows # each is there about 16 times, and nothing but shifts
    assert PadCrop(2)(x, split_idx=1) is x

def test_a_batch_is_taken_at_once_and_is_what_its_items_are():
    dls = get_dls('digits', bs=16, n_train=64)
    dls.train.after_batch.fs.clear()
    in_order = dls.train.new(shuffle=False)
    as_told = dls.train.new(get_idxs=lambda: [5,3,60,*range(13)], n=16)
    for dl in (in_order, as_told):
        idxs = dl.get_idxs()
        xs,ys = map(torch.cat, zip(*dl))
        items = [dl.dataset[i] for i in idxs[:len(xs)]]
        assert torch.equal(xs, torch.stack([x for x,_ in items]))
        assert torch.equal(ys, torch.stack([y for _,y in items]))
        assert type(xs) is TensorImage
        assert type(ys) is TensorCategory

# what a study refuses, before it trains
def two_metrics(): return learner_with([error, error])

def without_a_batch(): return learner_of(n=40)

BAD_STUDIES = [
    (TypeError, 'wanted a function that returns a new learner', lambda: dict(get_learner=learner_of())),
    (TypeError, 'got Sequential, wanted a Learner', lambda: dict(get_learner=mlp)),
    (ValueError, 'with TopLossCallback, wanted one without a selection',
        lambda: dict(get_learner=lambda: learner_of().top_loss())),
    (ValueError, 'with 2 metrics, wanted one', lambda: dict(get_learner=two_metrics)),
    (ValueError, 'got a training set without a batch', lambda: dict(get_learner=without_a_batch)),
    (ValueError, 'methods: got none', lambda: dict(methods=[])),
    (TypeError, "'a': 3, wanted a name with", lambda: dict(methods={'a': 3})),
    (TypeError, 'wanted a name with', lambda: dict(methods=[TopLossCallback()])),
    (ValueError, 'got epoch, which it writes itself', lambda: dict(about=dict(epoch=3))),
    (TypeError, 'about: got 3, wanted a dict', lambda: dict(about=3)),
    (TypeError, r'A budget is epochs, seconds, items or compute; .* about=dict\(budget=...\)',
        lambda: dict(budget=3)),
    (TypeError, 'watch: got 3', lambda: dict(watch=3))]

class Refuses:
    "A study is refused with some words, and nothing trains"
    def __init__(self, monkeypatch):
        self.trained = []
        monkeypatch.setattr(Learner, 'fit', lambda *args, **kwargs: self.trained.append(args))

    def __call__(self, kind, match, get_learner=learner_of, methods=('none','top_loss'), **kwargs):
        with pytest.raises(kind, match=match): compare(get_learner, methods, 1, 1, plot=False, **kwargs)
        assert not self.trained

@pytest.fixture
def refuses(monkeypatch): return Refuses(monkeypatch)

@pytest.mark.parametrize('kind,match,study', BAD_STUDIES)
def test_what_cannot_be_compared_is_refused_at_once(refuses, kind, match, study): refuses(kind, match, **study())

MISWRITTEN = dict(n_epoch='epochs', n_epochs='epochs', n_seeds='seeds', computes='compute')

@pytest.mark.parametrize('name', MISWRITTEN)
def test_an_option_that_is_not_known_is_named(refuses, name):
    refuses(TypeError, f"unknown option '{name}', wanted '{MISWRITTEN[name]}'", **{name: 3})

@pytest.mark.parametrize('metric', [accuracy, F1Score(), partial(top_k_accuracy, k=2), R2Score()])
def test_a_metric_of_which_more_is_better_is_refused(refuses, metric):
    refuses(ValueError, 'of which more is better, wanted an error', lambda: learner_with(metric))

def test_a_path_that_is_no_file_is_refused(refuses, tmp_path):
    nowhere = tmp_path/'nowhere'/'runs.csv'
    refuses(ValueError, 'path: got .*nowhere.*wanted a CSV file in a folder that exists', path=nowhere)
    refuses(ValueError, 'path: got', path=tmp_path)

def test_runs_that_go_on_from_another_are_refused():
    model = mlp()
    def get_learner(): return Learner(learner_of().dls, model, loss_func=CrossEntropyLossFlat(), metrics=error)
    with pytest.raises(ValueError, match='the same weights twice'): compare(get_learner, ['none'], 1, 1, plot=False)

class Endless(torch.utils.data.IterableDataset):
    def __iter__(self): return iter([(torch.zeros(4), torch.tensor(0))]*64)

def learner_of_stream():
    dl = learner_of().dls.train
    return learner_on(DataLoaders(TfmdDL(Endless(), bs=8, n=64), dl))

def test_data_that_cannot_be_compared_on_are_refused(refuses):
    only = DataLoaders(learner_of().dls.train)
    refuses(ValueError, 'get_learner: got no validation set, wanted one', lambda: learner_on(only))
    refuses(ValueError, 'got a training set of unknown length', learner_of_stream)

def test_columns_have_names_of_their_own(refuses, monkeypatch):
    refuses(TypeError, 'about: got a column 3, wanted names', about={3: 1})
    with pytest.raises(ValueError, match='watch: got colour, which about has, too'):
        monkeypatch.undo()
        compare(learner_of, ['none'], 1, 1, plot=False, about=dict(colour='red'), watch=lambda learn: dict(colour=1))

@pytest.mark.parametrize('name,near', [('topp_loss','top_loss'), ('favour_hard','favor_hard'), ('none(3)','none')])
def test_a_method_that_is_not_known_is_told_the_nearest(refuses, name, near):
    said = f"method: got '{re.escape(name)}', wanted '{near}', or another of none, "
    refuses(ValueError, said, methods=['none',name])

@pytest.mark.parametrize('is_frozen', [False,True])
def test_weights_that_train_in_two_runs_are_refused(is_frozen):
    "A body that stays as it is may be shared"
    body = nn.Linear(4, 4).requires_grad_(not is_frozen)
    def get_learner():
        return Learner(learner_of().dls, nn.Sequential(body, mlp()), CrossEntropyLossFlat(), metrics=error)
    def run(): return compare(get_learner, {'none': 'none', 'same': 'none'}, 1, 1, plot=False)
    if is_frozen: assert run().valid_loss.nunique()==1
    else:
        with pytest.raises(ValueError, match='get_learner: got the same weights twice'): run()

def test_runs_of_another_process_stay_in_the_file(tmp_path):
    "Which began while this one trained"
    path = tmp_path/'runs.csv'
    compare(learner_of, ['top_loss(warmup=0)'], 1, 1, plot=False, path=path, tell_controls=False)
    other = path.read_text()
    path.unlink()
    def watch(learn):
        if learn.cost_log.seed==1 and not path.read_text().count('top_loss'):
            path.write_text(path.read_text()+other.split('\n', 1)[1])
        return {}
    runs = compare(learner_of, ['none'], 1, 2, plot=False, path=path, watch=watch)
    assert sizes(runs)=={('none',0): 1, ('none',1): 1}
    assert sizes(pd.read_csv(path))=={('none',0): 1, ('none',1): 1, ('top_loss(warmup=0)',0): 1}

# what runs have in common
def shares_loaders():
    "A function that makes learners on the same loaders each time"
    set_seed(0)
    dls = dls_of(*class_data())
    return lambda: learner_on(dls)

def test_methods_on_the_same_loaders_see_the_same_batches(tmp_path):
    "And so do runs that are added later"
    study = dict(epochs=2, plot=False, methods={'none': 'none', 'same': 'none'})
    runs = compare(shares_loaders(), seeds=2, **study).drop(columns=['seconds','cpu_seconds'])
    def of(method): return runs[runs.method==method].drop(columns='method').reset_index(drop=True)
    pd.testing.assert_frame_equal(of('none'), of('same'))
    assert of('none').valid_loss.nunique()==4 # another order for another seed

    for seeds in (1,2): later = compare(shares_loaders(), seeds=seeds, path=tmp_path/'runs.csv', **study)
    assert later.valid_loss.tolist()==pytest.approx(runs.valid_loss.tolist(), rel=1e-5)

def test_new_loaders_shuffle_as_they_would_without_compare():
    runs = compare(learner_of, ['none'], 2, 1, plot=False, lr=.01, annealing='constant')
    set_seed(0, reproducible=True)
    learn = quiet_fit(learner_of(), 2, lr=.01)
    assert runs.valid_loss.tolist()==[values[1] for values in learn.recorder.values]

@pytest.mark.parametrize('ends', [lambda: None, lambda: 1/0])
def test_what_was_set_for_cudnn_is_set_again(ends, monkeypatch):
    flags = torch.backends.cudnn
    def current(): return flags.benchmark,flags.deterministic
    monkeypatch.setattr(flags, 'benchmark', True)
    monkeypatch.setattr(flags, 'deterministic', False)

    seen = []
    def plain():
        seen.append(current())
        return ends()

    try: compare(learner_of, {'a': plain}, 1, 1, plot=False)
    except ZeroDivisionError: pass
    assert seen==[(False,True)]
    assert current()==(True,False)

def test_a_method_that_gives_the_same_callback_again_is_refused():
    cb = TopLossCallback(warmup=0, keep=.25)
    with pytest.raises(ValueError, match='got a TopLossCallback of another learner, wanted one for each learner'):
        compare(learner_of, {'a': lambda: cb}, epochs=2, seeds=2, plot=False)

# runs that are not finite or not all there
def test_verdicts_say_when_there_is_nothing_to_say():
    without_plain_losses = RUNS.assign(valid_loss=RUNS.valid_loss.where(RUNS.method!='none'))
    assert verdict(without_plain_losses).startswith('There is nothing to compare with: plain training diverged.')

    lost = RUNS[~(IS_CONTROL & (RUNS.seed>0))]
    of_one = verdict(RUNS[RUNS.seed==0])
    assert verdict(lost)==f'{of_one} Of 3 seeds 1 count, which were run with all methods.'

    diverged = RUNS.assign(valid_loss=RUNS.valid_loss.where((RUNS.method!='top_loss') | (RUNS.seconds<4)))
    said = verdict(diverged)
    assert diverged.valid_loss.isna().sum()==3
    assert 'nan' not in said
    assert said.startswith('There is nothing to compare: all methods that choose by loss diverged.')
    assert said.endswith(' Diverged: top_loss on 3 of 3 seeds.')

# what was learned
def constants_of(get_learner):
    "Loss and error of the best constant prediction, of one run"
    runs = compare(get_learner, ['none'], 1, 1, plot=False)
    return runs[['constant_loss','constant_error']].iloc[0].tolist()

def learner_of_targets(y, n_out, loss_func, metric):
    "A network on noise; the first half of the items is for validation"
    x = torch.randn(len(y), 4)
    def get_learner():
        return Learner(dls_of(x, y, n_valid=len(y)//2), mlp(n_out), loss_func, metrics=metric)
    return get_learner

def test_a_constant_prediction_has_the_loss_and_error_of_the_shares():
    "Of the classes in the validation set, whatever the sizes of its batches"
    y = torch.tensor([0,0,0,1,2]).repeat(14)
    shares = torch.tensor([.6,.2,.2])
    loss,error = constants_of(learner_of_targets(y, 3, CrossEntropyLossFlat(), error_rate))
    assert loss==pytest.approx(float(-(shares*shares.log()).sum()))
    assert error==pytest.approx(.4)

    labels = (torch.rand(64, 2, generator=torch.Generator().manual_seed(0))<torch.tensor([.2,.7])).float()
    p = labels[:32].mean(0)
    loss,error = constants_of(learner_of_targets(labels, 2, BCEWithLogitsLossFlat(), accuracy_multi_error))
    assert loss==pytest.approx(float(-(p*p.log()+(1-p)*(1-p).log()).mean()))
    assert error==pytest.approx(float(torch.minimum(p, 1-p).mean()))

    numbers = torch.randn(64, generator=torch.Generator().manual_seed(0))
    loss,error = constants_of(learner_of_targets(numbers, 1, MSELossFlat(), mse))
    assert loss==error==pytest.approx(float(numbers[:32].var(correction=0)))

def accuracy_multi_error(pred, y): return ((pred.sigmoid()>.5)!=y.bool()).float().mean()

def test_a_constant_prediction_of_masks_and_of_what_has_none():
    masks = torch.randint(3, (32,8,8))
    images = torch.rand(32,3,8,8)
    def get_learner(loss_func=CrossEntropyLossFlat(axis=1), metric=wrong_pixels):
        return Learner(tensor_dls((images,masks), (images,masks), 8), nn.Conv2d(3, 3, 1), loss_func, metrics=metric)
    shares = masks.flatten().bincount()/masks.numel()
    loss,error = constants_of(get_learner)
    assert loss==pytest.approx(float(-(shares*shares.log()).sum()))
    assert error==pytest.approx(float(1-shares.max()))

    focal = FocalLossFlat(axis=1)
    assert np.isnan(constants_of(partial(get_learner, focal))).all()
    nothing_to_learn = torch.zeros(32)
    assert np.isnan(constants_of(learner_of_targets(nothing_to_learn, 1, MSELossFlat(), mse))).all()

def wrong_pixels(pred, y): return (pred.argmax(1)!=y).float().mean()

def test_the_loss_decides_where_a_metric_is_no_average():
    class Wrong(Metric):
        name = 'wrong'
        value = .1
    y = torch.tensor([0,1]).repeat(32)
    loss,error = constants_of(learner_of_targets(y, 2, CrossEntropyLossFlat(), Wrong()))
    assert loss==pytest.approx(math.log(2))
    assert math.isnan(error)
    worse = dict(error=[.1,.1], valid_loss=[.7,.8], constant_loss=[.6931]*2, constant_error=[math.nan]*2)
    assert nothing_learned(pd.DataFrame(worse), 'error')
    assert not nothing_learned(pd.DataFrame(worse | dict(constant_loss=[.75]*2)), 'error')

@pytest.mark.parametrize('lr,learns', [(1e-9,False),(.02,True)])
def test_where_nothing_was_learned_there_is_no_ranking(lr, learns, tmp_path):
    methods = ['none','top_loss(keep=.5)','random_subset(keep=.5,gather=True)']
    path = tmp_path/'runs.csv'
    compare(partial(learner_of, bs=16), methods, compute=400, seeds=1, lr=lr, plot=False, path=path)
    runs = pd.read_csv(path)
    said = verdict(runs)
    assert said.startswith('Nothing was learned: no run is better than a constant prediction')==(not learns)
    assert ('At equal compute' in said)==learns

    older = runs.drop(columns=['constant_loss','constant_error'])
    assert ('At equal compute' in verdict(older))

def test_a_run_that_was_better_on_its_way_has_learned():
    runs = pd.DataFrame(dict(valid_loss=[.6,math.nan,.9,.8], constant_loss=.7))
    assert not nothing_learned(runs)
    assert nothing_learned(runs.assign(constant_loss=.5))

# in a notebook
def test_runs_show_their_verdict_and_are_a_table():
    methods = ['none','top_loss(keep=.5)']
    runs = compare(learner_of, methods, compute=400, seeds=2, plot=False, tell_controls=False)
    shown = in_notebook(runs)
    assert escape(runs.verdict) in shown
    assert runs.verdict==verdict(runs)
    assert all(f'<th>{m}</th>' in shown for m in ('none','top_loss(keep=.5)'))
    assert f'{len(runs)} rows' in shown
    for part in (runs[runs.epoch==1], runs.copy(), runs.tail(), runs.assign(more=1), pd.concat([runs, runs])):
        assert type(part) is pd.DataFrame
    assert isinstance(runs, pd.DataFrame)
    assert type(pickle.loads(pickle.dumps(runs))) is type(runs)
    assert str(runs).startswith(f'{runs.verdict}\n\n')
    assert 'top_loss(keep=.5)' in str(runs)
    runs.drop(columns='budget', inplace=True)
    assert str(runs)==str(pd.DataFrame(runs))
    runs['budget'] = '400 compute'
    assert '<td>none</td>' not in in_notebook(runs)
    runs.sort_values('valid_loss', inplace=True)
    assert '<td>none</td>' in in_notebook(runs)
    assert '<td>none</td>' in in_notebook(runs) # rows as those of any table
