"Races: who goes on, what each round costs, at which learning rate"
import re

import matplotlib
matplotlib.use('agg')
import pandas as pd, pytest
from fastai.metrics import error_rate
from helpers import *
from selback.bench.compare import describe
from selback.bench.race import best_rate, better_half, by_group, field, field_of, race, rounds_of
from test_findings import NAN, ends_of, runs_of

pytestmark = pytest.mark.slow # workbench

def learner(): # fifty items
    learn = table_learner(n=66, n_valid=16)
    learn.metrics = [lambda pred, y: (pred.argmax(1)!=y).float().mean()]
    return learn

# rounds
def test_the_worse_half_goes_but_no_control():
    control = {'random_subset(keep=.3)': [8.,8.]}
    ends = ends_of(none=[9.,9.], a=[1.,5.], b=[2.,2.], c=[4.,4.], d=[NAN,1.], **control)
    assert better_half(ends)==['none','a','b','random_subset(keep=.3)']
    assert better_half(ends[ends.method.isin(['none','a','b','c'])])==['none','a','b']
    assert better_half(ends_of(none=[1.], a=[2.]))==['none','a']

def test_what_never_selected_goes_on_and_takes_no_place():
    "Of it nothing is known: it trained as plain training does"
    ends = ends_of(none=[3.], a=[4.], b=[5.], c=[6.], d=[7.], idle=[9.])
    assert better_half(ends, idle=['idle'])==['none','a','b','idle']

@pytest.mark.parametrize('n', range(1, 20))
def test_two_are_left_for_the_last_round(n):
    left = ['none', *(f'm{i}' for i in range(n))]
    shares = rounds_of(left, 1000)
    for _ in shares[1:]: left = better_half(ends_of(**{m: [float(i)] for i,m in enumerate(left)}))
    assert len(left)==1+min(n, 2)
    assert shares[-1]==1
    assert all(b==2*a for a,b in zip(shares, shares[1:]))
    assert len(shares)==1 or n>2**(len(shares)-1) # no more rounds than are needed

@pytest.mark.parametrize('epochs', [1,4.9,5,9.9,10,19,20,40,1000])
def test_no_method_is_dropped_after_fewer_than_five_epochs(epochs):
    "Rounds that would be shorter are left out, and no others"
    shares = rounds_of(list('abcdef'), epochs)
    assert shares==[.25,.5,1][-len(shares):]
    assert len(shares)==1 or shares[0]*epochs>=5
    assert len(shares)==3 or shares[0]*epochs/2<5

# races
@pytest.fixture
def short_rounds(monkeypatch): monkeypatch.setattr('selback.bench.race.min_epochs', 2)

def test_rounds_have_budgets_of_their_own(tmp_path, capsys, short_rounds):
    methods = ['top_loss(keep=.5)','top_loss(keep=.25)','batch_loss_filter']
    def run(): return race(learner, methods, compute=200, seeds=2, path=tmp_path/'race')
    runs = run()
    first,second = runs[runs['round']==1],runs[runs['round']==2]
    assert runs.groupby('round').budget.unique().tolist()==[['100 compute'],['200 compute']]
    assert first.method.nunique()==4
    assert second.method.nunique()==3
    ends = second.groupby(['method','seed']).compute.max()
    assert ((ends>=200) & (ends<200+20)).all()
    pd.testing.assert_frame_equal(runs.compared, second)

    said = capsys.readouterr().out
    assert said.count('without random_subset among the methods')==1
    assert "Round 1 of 2: 4 methods, of which each computes 100 items' worth a run (2 epochs).\n" in said
    assert 'Round 2 of 2: 3 methods' in said

    def files(): return {f.name: f.read_bytes() for f in (tmp_path/'race').iterdir()}
    before = files()
    again = run()
    assert set(before)=={'round_1.csv','round_2.csv'}
    assert files()==before
    pd.testing.assert_frame_equal(again, runs, check_dtype=False, rtol=1e-5)

@pytest.mark.parametrize('epochs,short', [(1.9,True),(2,False)])
def test_a_race_too_short_to_choose_says_so_first(epochs, short, capsys):
    n = len(learner().dls.train_ds)
    race(learner, ['top_loss(keep=.5)','random_subset(keep=.5)'], compute=epochs*n, seeds=1)
    assert capsys.readouterr().out.startswith('race: 1.9 epochs, and most methods choose from the second')==short

@pytest.mark.parametrize('kwargs,error,match', [
    (dict(methods='none,random_subset'), ValueError, 'wanted one at least that chooses by loss'),
    (dict(methods='nonsense'), ValueError, "method: got 'nonsense'"),
    (dict(methods={'none': 'favor_hard', 'a': 'info_batch'}), ValueError, "got 'favor_hard' by the name 'none'"),
    (dict(methods='favor_hard(beta=-1)'), ValueError, 'beta: got -1'),
    (dict(compute=0), ValueError, 'compute: got 0'),
    (dict(annealing='cosine'), ValueError, "annealing: got 'cosine'"),
    (dict(seeds=0), ValueError, 'seeds: got 0'),
    (dict(about=dict(epoch=3)), ValueError, 'about: got epoch'),
    (dict(measure='accuracy'), ValueError, "measure: got 'accuracy'"),
    (dict(get_learner=None), TypeError, 'get_learner: got NoneType, wanted a function that returns a new learner'),
    (dict(epochs=3), TypeError, 'epochs')])
def test_a_race_refuses_before_its_first_round(kwargs, error, match, capsys, tmp_path):
    "And leaves no folder"
    plan = dict(get_learner=learner, methods=['favor_hard'], compute=100, path=tmp_path/'race')
    with pytest.raises(error, match=match): race(**plan | kwargs)
    assert 'Round' not in capsys.readouterr().out
    assert not (tmp_path/'race').exists()

def test_a_race_hands_on_what_it_takes(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    plan = dict(compute=100, seeds=1, annealing='step', watch=lambda learn: dict(steps=7), path='~/runs/of_race')
    runs = race(learner, {'plain': 'none', 'top': 'top_loss(keep=.5,warmup=0)'}, **plan)
    assert set(runs.annealing)=={'step'}
    assert set(runs.steps)=={7}
    assert set(runs.method)=={'none','plain','top'}
    assert (tmp_path/'runs/of_race/round_1.csv').exists()

# the learning rate
def epochs_at(lr, errors):
    "Two epochs of plain training for each seed, at the end of which it has these errors"
    def row(seed, epoch, end): return dict(method='none', seed=seed, epoch=epoch, lr=lr, n_valid=5000, valid_loss=end)
    def error(epoch, end): return end if epoch==1 and end==end else 0.
    return pd.DataFrame([row(s, e, end) | dict(error=error(e, end)) for s,end in enumerate(errors) for e in (0,1)])

@pytest.mark.law(10)
@pytest.mark.parametrize('errors,best,says', [
    ({.001: [.3,.4], .01: [.1,.2], .1: [.2,.3]}, .01,
        'Plain training ends best at a learning rate of 0.01: error 0.15 (0.001: 0.35, 0.1: 0.25).\n'),
    ({.1: [.1,.2], .01: [.05,.4]}, .1,
        'error 0.15 (0.01: 0.225). It is the highest; a higher one may be better.\n'),
    ({.1: [.01,NAN], .01: [.3,.4]}, .01,
        'error 0.35 (0.1: diverged). It is the lowest; a lower one may be better.\n')])
def test_the_best_rate_is_that_of_plain_training(errors, best, says, monkeypatch, capsys, tmp_path):
    "By the mean over its seeds; one that diverged on a seed is out, whatever its error says"
    asked = []
    def runs_at(get_learner, methods, lr, path, plot, later, tell_controls, **kwargs):
        asked.append((methods, path, kwargs))
        return epochs_at(lr, errors[lr])
    monkeypatch.setattr('selback.bench.race.compare', runs_at)
    about = describe(learner().dls)
    assert best_rate(learner, [*errors, *errors], tmp_path, epochs=3)==best
    assert capsys.readouterr().out.endswith(says)
    assert asked==[('none', tmp_path/f'lr_{o:g}.csv', dict(epochs=3, about=about)) for o in sorted(errors)]
    assert best_rate(learner, .3)==best_rate(learner, [.3])==.3
    assert len(asked)==len(errors) # one rate is not searched

def test_a_rate_that_is_none(monkeypatch):
    for got,error in ([], ValueError),([.1,-1], ValueError),('0.1', TypeError):
        with pytest.raises(error, match='lr: got'): best_rate(learner, got)

    def diverged(*args, lr, **kwargs): return runs_of(dict(none=[float('inf')])).assign(lr=lr, valid_loss=NAN)
    monkeypatch.setattr('selback.bench.race.compare', diverged)
    said = 'lr: got 0.1, 10, at each of which plain training diverged, wanted a lower one'
    with pytest.raises(ValueError, match=said): best_rate(learner, (10,.1))

def test_what_is_told_to_follow_is_what_the_search_and_all_rounds_compute(tmp_path, capsys, short_rounds):
    methods = ['top_loss(keep=.5)','top_loss(keep=.25)','batch_loss_filter','random_subset']
    race(learner, methods, compute=200, seeds=2, path=tmp_path, lr=[.001,.01])
    n = len(learner().dls.train_ds)
    told = [float(o)*n for o in re.findall('is worth (.*) epochs', capsys.readouterr().out)]
    runs = [pd.read_csv(tmp_path/f'{name}.csv') for name in ('lr_0.001','lr_0.01','round_1','round_2')]
    ends = [o.groupby(['method','seed']).compute.max() for o in runs]
    for i,work in enumerate(told):
        of_these = pd.concat(ends[i:])
        assert work==pytest.approx(of_these.sum(), abs=20*len(of_these)) # a run ends within a step
    assert len(told)==4

@pytest.mark.law(10)
def test_a_race_is_run_at_the_best_rate(tmp_path, capsys):
    runs = race(learner, ['top_loss(keep=.5)'], compute=100, seeds=2, path=tmp_path, lr=[1e-9,.01])
    assert set(runs.lr)=={.01}
    searched = pd.concat([pd.read_csv(tmp_path/f'lr_{o}.csv') for o in ('1e-09','0.01')])
    ends = searched.groupby(['lr','seed']).tail(1)
    assert len(ends)==4
    assert set(ends.method)=={'none'}
    assert ends.groupby('lr').valid_loss.mean().idxmin()==.01
    assert (ends.compute>=100).all()

# who races where nobody is named
@pytest.mark.parametrize('y,joins', [
    (torch.tensor([0]*30+[1]*10), True), (torch.tensor([0]*29+[1]*11), False), (torch.tensor([0]*40), False),
    (torch.rand(40), False)])
@pytest.mark.parametrize('has_groups,others', [(False,field), (True,by_group)])
def test_balanced_sampling_races_where_classes_are_known_to_be_uneven(y, joins, has_groups, others, capsys):
    dls = dls_of(torch.rand(40, 4), y, n_valid=0)
    assert field_of(dls, has_groups)==(*others, *['balanced_sampling']*joins)
    assert ('balanced_sampling races, too' in capsys.readouterr().out)==joins

def test_the_field_races_where_nobody_is_named(monkeypatch):
    asked = []
    def noted(get_learner, methods, **study):
        asked.append([*methods])
        raise KeyboardInterrupt
    monkeypatch.setattr('selback.bench.race.compare', noted)
    def get_learner():
        dls = dls_of(torch.rand(112, 4), torch.arange(112)%16//15)
        return learner_on(dls, metrics=error_rate)
    for methods in (None, ['favor_hard']):
        with pytest.raises(KeyboardInterrupt): race(get_learner, methods, compute=2000)
    assert asked==[[*field,'balanced_sampling'],['none','favor_hard']]
