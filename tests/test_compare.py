"The comparison: what runs cost, what a study refuses, keeps and says"
import itertools, pickle, re
from functools import partial

import pandas as pd, pytest, torch
from fastai.callback.core import Callback, CancelFitException
from fastai.callback.tracker import EarlyStoppingCallback
from fastai.learner import Metric
from fastai.losses import FocalLossFlat
from fastai.metrics import R2Score, accuracy, error_rate, mse, top_k_accuracy
from helpers import *
from selback.bench.findings import *
from selback.bench.compare import *
from selback.bench.compare import Budget, CostLog, check_choice, methods_by_name

pytestmark = pytest.mark.slow # workbench

# what runs cost
def error(pred, y): return (pred.argmax(1)!=y).float().mean()

def learner_of(n=132, bs=32, metrics=error, **kwargs):
    return learner_on(dls_of(*class_data(n), bs=bs, drop_last=True), metrics=metrics, **kwargs)

def never(*args, **kwargs): raise AssertionError('a run was started')

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

@pytest.mark.parametrize('passes,forwarded', [(2,150), (1,100)])
def test_with_one_pass_an_item_is_forwarded_once(passes, forwarded):
    "And backwards as often, since those that are not chosen only weigh nothing; else all 100 in a pass of its own"
    def get_learner(): return learner_on(dls_of(*class_data(132), bs=20), metrics=error)
    runs = compare(get_learner, [f'top_loss(keep=.5,warmup=0,passes={passes})'], 2, 1, plot=False)
    trained = 100/passes
    assert runs.backpropagated.tolist()==[trained,2*trained]
    assert runs.forwarded.tolist()==[forwarded,2*forwarded]

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

@pytest.mark.parametrize('budget', [dict(epochs=4), dict(items=4*96), dict(compute=4*96), dict(seconds=4*6)], ids=str)
def test_the_time_of_all_runs_is_told_first(budget, monkeypatch, capsys):
    "And of those that follow; a first step is slow and does not count"
    clock,steps = Clock(monkeypatch),[]
    class Trains(Callback):
        def after_batch(self):
            if not self.training: clock.passes(.5)
            else: steps.append(clock.passes(2 if steps else 100))
    study = dict(methods={'none': 'none', 'same': 'none'}, plot=False, tell_controls=False, **budget)
    compare(lambda: learner_of(cbs=Trains()), seeds=2, later=1, **study)
    [told] = re.findall('worth (.*) epochs .* takes (.*) s: some (.*) in all', capsys.readouterr().out)
    n_runs,n_later = 4,2
    piece = 100+2+2+.5
    assert told==('24.0','6.5','02:36') # 3 steps and a batch to validate on
    assert 24*6.5==(n_runs+n_later)*(clock.t-piece)/n_runs

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

class Cancels(Callback):
    def before_epoch(self): raise CancelFitException

@pytest.mark.parametrize('get_learner,budget,ended', [
    (stopping, dict(items=960), r'the fit ended at \d+ of 960 items.*, wanted .* all of its budget.*EarlyStopping'),
    (stopping, dict(compute=960), r'the fit ended at \d+ of 960 compute'),
    (lambda: learner_of(cbs=Cancels()), dict(epochs=2), 'the fit ended .* after 0 epochs, wanted one at least')])
def test_a_run_that_ends_before_its_budget_is_refused(get_learner, budget, ended, tmp_path):
    "It can't be compared with one that used all of it; of epochs it may have fewer"
    with pytest.raises(ValueError, match=f'none, seed 0: {ended}'):
        compare(get_learner, ['none'], seeds=1, plot=False, path=tmp_path/'runs.csv', **budget)
    assert not list(tmp_path.iterdir())
    assert compare(stopping, ['none'], epochs=9, seeds=1, plot=False).epoch.max()<9

def fit_within(learn, items):
    with learn.no_bar(),learn.no_logging(): learn.fit(10**4, cbs=Budget('items', items))
    return learn.selection

def test_a_selection_follows_the_budget():
    learn = learner_of(cbs=[CostLog(), TopLossCallback(.25, start=.5, warmup=0)])
    stats = fit_within(learn, 960).stats
    first = (stats.kept<stats.seen).idxmax()
    assert stats.trained[:first].sum()==480 # half of it

def test_info_batch_follows_a_budget_of_items():
    "It prunes in no epoch that ends behind `delta` of the budget, as long as those before it were"
    learn = learner_of(n=32+96, cbs=[CostLog(), InfoBatchCallback(delta=.5)])
    trained = fit_within(learn, 960).stats.groupby('epoch').trained.sum()
    start = trained.cumsum().shift(fill_value=0)/960
    end = start+start/trained.index
    is_pruned = trained<96
    assert is_pruned.any() and is_pruned[(start>0) & (end<=.5)].all()
    assert not is_pruned[(end>.5) & (start<.9)].any()

@pytest.mark.parametrize('methods', [['none','top_loss'], ['none','random_subset','favor_hard']])
def test_a_budget_in_which_no_method_chooses_is_refused(methods):
    with pytest.raises(ValueError, match='got 1 epochs, wanted more than 1, or no method chooses'):
        check_choice(methods_by_name(methods), 1)
    check_choice(methods_by_name(methods), 1.1)
    check_choice(methods_by_name([*methods,'top_loss(warmup=0)']), 1)

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

@pytest.mark.parametrize('other', [dict(lr=.1), dict(epochs=3), dict(about=dict(data='yours')),
    dict(about=dict(data='mine', colour='red'))], ids=str)
def test_runs_of_another_study_are_refused(other, tmp_path):
    study = dict(get_learner=learner_of, methods=['none'], epochs=2, seeds=1, about=dict(data='mine'))
    there = dict(path=tmp_path/'runs.csv', plot=False)
    compare(**study, **there)
    with pytest.raises(ValueError, match='wanted|unknown'): compare(**study | other, **there)

def test_methods_by_names_of_ones_own_and_columns_of_ones_own():
    def by_hand(): return TopLossCallback(.25)
    methods = {'none': 'none', 'by hand': by_hand, 'renamed': 'top_loss(keep=.25)'}
    def watch(learn): return dict(steps=learn.epoch*10)
    runs = compare(learner_of, methods, epochs=2, seeds=1, watch=watch, plot=False)
    assert runs.steps.tolist()==[0,10]*3
    last = runs[runs.epoch==2].set_index('method')
    assert last.error['by hand']==last.error['renamed']
    assert last.backpropagated['by hand']==last.backpropagated['renamed']<last.backpropagated['none']

def test_a_complete_study_is_read_on_any_machine_but_added_to_on_its_own_only(tmp_path):
    here = dict.fromkeys(environment(), '1')
    study = dict(get_learner=learner_of, methods=['none'], epochs=1, seeds=1, path=tmp_path/'runs.csv', plot=False)
    compare(**study, about=here)
    read_elsewhere = compare(**study, about=dict.fromkeys(here, '2'))
    pd.testing.assert_frame_equal(read_elsewhere, pd.read_csv(study['path']), check_dtype=False)
    more = study | dict(seeds=2)
    for name in here:
        with pytest.raises(ValueError, match=f'got runs with {name} '): compare(**more, about=here | {name: '2'})

@pytest.mark.parametrize('lr,about', [
    (1, dict(note=None, version='2.10')),
    (.0012345678, dict(note='NA', frac=1/3, n=1.))])
def test_a_study_knows_its_columns_again(tmp_path, lr, about):
    study = dict(get_learner=learner_of, methods=['none'], epochs=1, lr=lr, about=about, plot=False)
    first = compare(seeds=1, **study, path=tmp_path/'runs.csv')
    both = compare(seeds=2, **study, path=tmp_path/'runs.csv')
    assert both.valid_loss[0]==pytest.approx(first.valid_loss[0], rel=1e-5)
    assert both.seed.tolist()==[0,1]

@pytest.mark.parametrize('damaged', [
    lambda lines: [],
    lambda lines: ['a,b', '1,2'],
    lambda lines: [lines[0], *lines[2:]],
    lambda lines: [*lines, *lines[1:]]], ids=['empty','other columns','an epoch is missing','twice'])
def test_a_damaged_file_is_refused(tmp_path, damaged):
    path = tmp_path/'runs.csv'
    study = dict(get_learner=learner_of, methods=['none'], epochs=2, seeds=1, path=path, plot=False)
    compare(**study)
    path.write_text('\n'.join(damaged(path.read_text().splitlines())))
    with pytest.raises(ValueError, match='runs.csv'): compare(**study)

def test_stored_runs_are_recognised():
    about = dict(data='digits', arch='small_resnet', bs=64, n_train=1437, n_valid=360) | environment()
    runs = pd.read_csv('results/digits/runs.csv')
    seeds = runs.seed.unique().tolist()
    read = compare(never, runs.method.unique().tolist(), compute=10_000, seeds=seeds, path='results/digits/runs.csv',
        plot=False, about=about)
    pd.testing.assert_frame_equal(read, runs, check_dtype=False)

# before it trains
@pytest.mark.law(9)
def test_a_missing_control_is_told_of_before_training(capsys):
    class Trains(Callback):
        def before_fit(self): print('trains')
    def told_first(methods):
        compare(lambda: learner_of(cbs=Trains()), methods, epochs=1, seeds=1, plot=False)
        return 'without' in capsys.readouterr().out.partition('trains')[0]
    assert told_first(['top_loss(warmup=0)'])
    assert told_first(['none','top_loss(warmup=0)'])
    assert not told_first(['none','top_loss(warmup=0)','random_subset(keep=.3)'])

BAD_STUDIES = [
    (TypeError, 'get_learner', dict(get_learner=partial(table_learner)())),
    (TypeError, 'wanted a Learner', dict(get_learner=mlp)),
    (ValueError, 'with TopLossCallback', dict(get_learner=lambda: learner_of().top_loss())),
    (ValueError, '2 metrics', dict(get_learner=lambda: learner_of(metrics=[error, error]))),
    (ValueError, 'without a batch', dict(get_learner=lambda: learner_of(n=40))),
    (ValueError, 'no validation set', dict(
        get_learner=lambda: learner_on(DataLoaders(learner_of().dls.train), metrics=error))),
    *[(ValueError, 'more is better', dict(get_learner=partial(learner_of, metrics=metric)))
        for metric in (accuracy, partial(top_k_accuracy, k=2), R2Score())],
    (ValueError, 'methods: got none', dict(methods=[])),
    (TypeError, 'wanted a name', dict(methods={'a': 3})),
    (TypeError, 'wanted a name', dict(methods=[TopLossCallback()])),
    (ValueError, "wanted 'top_loss'", dict(methods=['topp_loss'])),
    (ValueError, "'none'", dict(methods=['none(3)'])),
    (ValueError, 'keep: got 7', dict(methods=['top_loss(keep=7)'])),
    (TypeError, 'kep', dict(methods=['top_loss(kep=.5)'])),
    (ValueError, 'wanted a name or a call', dict(methods=['top_loss(keep='])),
    (ValueError, 'epoch', dict(about=dict(epoch=3))),
    (ValueError, 'path: got', dict(path='nowhere/runs.csv')),
    (ValueError, 'path: got', dict(path='results')),
    (ValueError, 'seeds: got', dict(seeds=0)),
    (ValueError, 'seeds: got', dict(seeds=[1,1])),
    (ValueError, 'compute: got', dict(epochs=None, compute=0)),
    (ValueError, 'budget: got', dict(items=5)),
    (ValueError, 'measure: got', dict(measure='accuracy'))]

@pytest.mark.parametrize('kind,match,study', BAD_STUDIES, ids=lambda o: o if isinstance(o, str) else '')
def test_what_cannot_be_compared_is_refused_at_once(kind, match, study, monkeypatch):
    monkeypatch.setattr(Learner, 'fit', never)
    plan = dict(get_learner=learner_of, methods=['none','top_loss'], epochs=2, seeds=1, plot=False)
    with pytest.raises(kind, match=match): compare(**plan | study)

@pytest.mark.parametrize('watch,got', [(dict(compute=1), 'compute, which is written anyway'),
    (dict(colour=1), 'colour, which about has, too')])
def test_columns_that_are_watched_have_names_of_their_own(watch, got):
    with pytest.raises(ValueError, match=f'watch: got {got}'):
        compare(learner_of, ['none'], 1, 1, plot=False, about=dict(colour='red'), watch=lambda learn: watch)

@pytest.mark.parametrize('is_frozen', [False,True])
def test_weights_that_train_in_two_runs_are_refused(is_frozen):
    "A body that stays as it is may be shared"
    body = nn.Linear(4, 4).requires_grad_(not is_frozen)
    def get_learner():
        return learner_on(learner_of().dls, nn.Sequential(body, mlp()), metrics=error)
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
    return lambda: learner_on(dls, metrics=error)

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

# what was learned
def constants_of(get_learner):
    "Loss and error of the best constant prediction, of one run"
    runs = compare(get_learner, ['none'], 1, 1, plot=False)
    return runs[['constant_loss','constant_error']].iloc[0].tolist()

def learner_of_targets(y, n_out, loss_func, metric):
    "A network on noise; the first half of the items is for validation"
    x = torch.randn(len(y), 4)
    def get_learner():
        return learner_on(dls_of(x, y, n_valid=len(y)//2), mlp(n_out), loss_func, metrics=metric)
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

@pytest.mark.parametrize('y,loss_func,metric', [
    (torch.zeros(32), MSELossFlat(), mse),
    (torch.arange(32)%3, FocalLossFlat(), error_rate)], ids=['nothing to learn','another loss'])
def test_of_what_has_no_known_constant_nothing_is_said(y, loss_func, metric):
    n_out = 1 if y.is_floating_point() else 3
    assert np.isnan(constants_of(learner_of_targets(y, n_out, loss_func, metric))).all()

class Wrong(Metric):
    "No average over items"
    name = 'wrong'
    value = .1

def test_where_a_metric_is_no_average_the_loss_of_a_constant_is_known():
    y = torch.tensor([0,1]).repeat(32)
    loss,error = constants_of(learner_of_targets(y, 2, CrossEntropyLossFlat(), Wrong()))
    assert loss==pytest.approx(np.log(2)) and np.isnan(error)

@pytest.mark.parametrize('lr,learns', [(1e-9,False),(.02,True)])
def test_where_nothing_was_learned_there_is_no_ranking(lr, learns, tmp_path):
    methods = ['none','top_loss(keep=.5)','random_subset(keep=.5,gather=True)']
    path = tmp_path/'runs.csv'
    compare(partial(learner_of, bs=16), methods, compute=1500, seeds=1, lr=lr, plot=False, path=path)
    runs = pd.read_csv(path)
    said = verdict(runs)
    assert said.startswith('Nothing was learned: no run is better than a constant prediction')==(not learns)
    assert ('At equal compute' in said)==learns

    older = runs.drop(columns=['constant_loss','constant_error'])
    assert ('At equal compute' in verdict(older))

def test_runs_are_a_table_and_their_parts_are_too():
    runs = compare(learner_of, ['none','top_loss(keep=.5)'], compute=400, seeds=1, plot=False, tell_controls=False)
    assert runs.verdict==verdict(runs)
    for part in (runs[runs.epoch==1], runs.copy(), runs.assign(more=1), pd.concat([runs, runs])):
        assert type(part) is pd.DataFrame
    assert type(pickle.loads(pickle.dumps(runs))) is type(runs)
    runs.drop(columns='budget', inplace=True)
    assert str(runs)==str(pd.DataFrame(runs)) # no verdict without it
