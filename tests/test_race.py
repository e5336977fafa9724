"Races: who goes on, what each round costs, and which words a result gets"
from html import escape

import matplotlib
matplotlib.use('agg')
import numpy as np, pandas as pd, pytest
from fastai.metrics import error_rate
from helpers import *
from scipy.stats import t
from selback.bench.findings import paired, signed, verdict
from selback.bench.compare import describe
from selback.bench.race import best_rate, better_half, by_group, field, field_of, race, rounds_of
from selback.bench.command import main

pytestmark = pytest.mark.slow # workbench

NAN = float('nan')

def ends_of(measure='error', **values):
    "The last epoch of each run; for each method, a value for each seed"
    return pd.DataFrame([{'method': m, 'seed': s, measure: v} for m,vs in values.items() for s,v in enumerate(vs)])

def runs_of(*rounds, n_valid=5000):
    "Runs of one epoch, in rounds"
    more = dict(epoch=1, n_valid=n_valid, valid_loss=1., budget='100 compute')
    return pd.concat([ends_of(**values).assign(**more, round=i) for i,values in enumerate(rounds, 1)])

def test_a_difference_is_that_of_the_same_seeds():
    d = paired(ends_of(none=[.2,.4,.1], a=[.1,.3,.09]), 'a')
    logs = np.log([.5,.75,.9])
    mean,half = np.mean(logs),np.std(logs, ddof=1)/3**.5*t.ppf(.975, 2)
    assert tuple(d[:3])==pytest.approx(np.exp([mean, mean-half, mean+half])-1)
    assert d[3:]==(3,3,0)
    assert not d.is_clear # all seeds agree, but the interval contains zero

    diverged = ends_of(none=[.2,.4,.1], a=[.1,.3,NAN])
    assert paired(diverged, 'a')[3:]==(2,2,1)
    not_run = ends_of(none=[.2,.4,.1], a=[.1,.3])
    assert paired(not_run, 'a')[3:]==(2,2,0)

@pytest.mark.law(11)
@pytest.mark.parametrize('a,b,clear', [
    ([.1,.11,.12], [.2,.21,.22], True),
    ([.2,.21,.22], [.1,.11,.12], True),
    ([.1,.2,.3], [.1,.2,.3], False),
    ([.1,.2,.3,.4,.1,.1,.1], [.2,.4,.6,.8,.2,.2,.09], False),
    ([.1], [.5], False)])
def test_clear_takes_all_seeds_and_the_interval(a, b, clear):
    d = paired(ends_of(a=a, b=b), 'a', 'b')
    assert d.is_clear==clear
    assert ('not clearly different' in str(d))==d.verdict.startswith('not clear: ')==(not clear)
    if not clear: return

    way,better = ('lower',3) if a[0]<b[0] else ('higher',0)
    assert str(d).startswith(f'{abs(d.mean):.1%} {way} (95 % interval ')
    assert str(d).endswith(f'better on {better} of 3 seeds)')
    way = 'better' if a[0]<b[0] else 'worse'
    assert d.verdict==f'clearly {way}: {d.mean:+.1%} ({d.low:+.1%} to {d.high:+.1%}) in 3 seeds'

@pytest.mark.law(11)
def test_equal_methods_are_taken_for_different_once_in_twenty():
    "Which is what an interval of 95 % says; that all seeds agree makes it rarer"
    rng = np.random.default_rng(0)
    def alike(): return ends_of(a=rng.normal(1, .05, 3), b=rng.normal(1, .05, 3))
    found = sum(paired(alike(), 'a', 'b').is_clear for _ in range(800))/800
    assert .01<found<.05+4*(.05*.95/800)**.5

def test_no_method_of_zero_and_no_sign_of_nothing():
    assert [signed(o) for o in (0., -.0001, .0004, .015, -.5)]==['0.0%','0.0%','0.0%','+1.5%','-50.0%']
    assert paired(ends_of(none=[0.,0.], a=[0.,0.]), 'a').mean==0
    assert paired(ends_of(none=[0.,0.], a=[.1,.1]), 'a').mean==float('inf')
    with pytest.raises(ValueError, match='no seed that both a and none'): paired(ends_of(none=[.1], a=[NAN]), 'a')

def test_the_worse_half_goes_but_no_control():
    control = {'random_subset(keep=.3)': [8.,8.]}
    ends = ends_of(none=[9.,9.], a=[1.,5.], b=[2.,2.], c=[4.,4.], d=[NAN,1.], **control)
    assert better_half(ends)==['none','a','b','random_subset(keep=.3)']
    assert better_half(ends[ends.method.isin(['none','a','b','c'])])==['none','a','b']
    assert better_half(ends_of(none=[1.], a=[2.]))==['none','a']

def test_what_never_selected_goes_on_and_takes_no_place():
    "Of it nothing is known: it trained as plain training does"
    ends = ends_of(none=[3.], a=[4.], b=[5.], c=[6.], d=[7.], idle=[3.])
    assert better_half(ends, idle=['idle'])==['none','a','b','idle']
    assert better_half(ends)==['none','a','b','idle']
    assert better_half(ends.assign(error=[3.,4.,5.,6.,7.,9.]), idle=['idle'])==['none','a','b','idle']

@pytest.mark.parametrize('n', range(1, 20))
def test_two_are_left_for_the_last_round(n):
    left = n
    shares = [share for share,_ in rounds_of(['none', *(f'm{i}' for i in range(n))], 1000)]
    for _ in shares[1:]: left = max(2, -(-left//2))
    assert left<=2
    assert shares[-1]==1
    assert all(b==2*a for a,b in zip(shares, shares[1:]))
    assert len(shares)==1 or n>2**(len(shares)-1) # no more rounds than are needed

@pytest.mark.parametrize('epochs', [1,4.9,5,9.9,10,19,20,40,1000])
def test_no_method_is_dropped_after_fewer_than_five_epochs(epochs):
    "Rounds that would be shorter are left out, and no others"
    shares = [share for share,_ in rounds_of(list('abcdef'), epochs)]
    assert shares==[.25,.5,1][-len(shares):]
    assert len(shares)==1 or shares[0]*epochs>=5
    assert len(shares)==3 or shares[0]*epochs/2<5

OF_A = 'At equal compute the error of a, against plain training, is '
VERDICTS = [
    (dict(none=[.3,.31,.32], a=[.2,.21,.22], b=[.4,.4,.4]),
        OF_A+'clearly better: -32.3% (-34.8% to -29.6%) in 3 seeds.',
        []),
    (dict(none=[.3,.31,.32], a=[.2,.21,.22], b=[.21,.2,.225], c=[.2,.21,.221]),
        OF_A+'clearly better: ', ['; against b and c, not clear.']),
    (dict(none=[.3,.31,.32], a=[.29,.32,.3], b=[.4,.4,.4]),
        OF_A+'not clear: -2.2% (', []),
    (dict(none=[.2,.21,.22], a=[.3,.31,.32]),
        OF_A+'clearly worse: +47.7% (', []),
    (dict(none=[.3,.3], a=[.3,.2]),
        OF_A+'not clear: -18.4% in 2 seeds.', []),
    (dict(none=[.3,.31,.32], a=[.2,.21,.22], b=[NAN,.1,.1]),
        OF_A+'clearly better: ', [' Diverged: b on 1 of 3 seeds.']),
    (dict(none=[.3,.3], a=[NAN,NAN]),
        'There is nothing to compare', [' Diverged: a on 2 of 2 seeds.'])]

@pytest.mark.parametrize('of,begins,more', VERDICTS)
def test_the_words_fit_the_numbers(of, begins, more):
    said = verdict(runs_of(of))
    assert said.startswith(begins)
    assert all(o in said for o in more)
    assert '-0' not in said
    assert said==verdict(runs_of(dict(reversed(of.items()))))

@pytest.mark.law(9)
def test_a_random_choice_stands_beside_a_method():
    lucky = runs_of({'none': [.3,.31,.32], 'random_subset(keep=.3)': [.2,.21,.22], 'a': [.25,.25,.26]})
    said = verdict(lucky)
    assert 'the error of a, against plain training, is clearly better' in said
    assert '; against a random choice, clearly worse: ' in said
    assert said.endswith(' in 3 seeds.')
    assert verdict(lucky[~lucky.method.str.startswith('random')]).endswith('there is no control.')

def test_twice_and_half_cancel_out_and_nothing_falls_by_more_than_all():
    assert paired(ends_of(none=[.1,.1], a=[.2,.05]), 'a').mean==pytest.approx(0)
    d = paired(ends_of(none=[.1,.1,.1], a=[.001,.3,.1]), 'a')
    assert -1<d.low<d.mean<d.high
    assert d.mean==pytest.approx(.03**(1/3)-1)
    assert paired(ends_of(none=[.1,.1], a=[0.,.1]), 'a').mean==-.5 # a zero has no logarithm

def test_losses_may_be_negative():
    d = paired(ends_of(none=[-1.,-1.1,-1.2], a=[-2.,-2.2,-2.4]), 'a')
    assert d.mean==pytest.approx(-1)
    assert d.better==3
    assert 'lower' in d.size

@pytest.mark.law(11)
@pytest.mark.parametrize('bad', [float('inf'), NAN])
def test_what_diverged_on_a_seed_is_not_clearly_better(bad):
    runs = ends_of(none=[.3,.31,.32,.3], a=[.1,.11,.12,bad])
    assert paired(runs[runs.seed<3], 'a').is_clear
    d = paired(runs, 'a')
    assert not d.is_clear
    assert d.seeds==3
    assert 'better on 3 of 3 seeds, diverged on 1 more' in str(d)
    assert d.verdict.startswith('not clear: ') and d.verdict.endswith(' in 3 seeds, 1 more diverged')
    assert not paired(runs, 'none', 'a').is_clear

def test_a_method_that_never_selected_takes_no_part():
    runs = runs_of(dict(none=[.3,.31,.32], a=[.2,.21,.22], idle=[.1,.1,.1]))
    said = verdict(runs.assign(selected=[0]*3+[9]*3+[0]*3))
    assert said.startswith('At equal compute the error of a, against plain training, is clearly better: ')
    assert said.endswith(' Never selected: idle.')
    assert said.count('idle')==1

def test_who_left_is_named_with_the_round():
    first = dict(none=[.3,.3], a=[.2,.2], b=[.5,.5], c=[.1,.1])
    second = dict(none=[.3,.31], a=[.2,.21], c=[.1,.11])
    third = dict(none=[.3,.31], c=[.1,.11])
    said = verdict(runs_of(first, second, third))
    assert said.endswith('Dropped: b (round 1), a (round 2).')

def test_few_validation_items_are_compared_by_their_loss():
    runs = runs_of(dict(none=[.3,.31], a=[.2,.21]), n_valid=100)
    assert 'validation loss' in verdict(runs)

def learner(): # fifty items
    learn = table_learner(n=66, n_valid=16)
    learn.metrics = [lambda pred, y: (pred.argmax(1)!=y).float().mean()]
    return learn

@pytest.fixture
def short_rounds(monkeypatch): monkeypatch.setattr('selback.bench.race.min_epochs', 2)

def test_rounds_have_budgets_of_their_own(tmp_path, capsys, short_rounds):
    methods = ['top_loss(keep=.5)','top_loss(keep=.25)','batch_loss_filter','random_subset(keep=.5)']
    runs = race(learner, methods, compute=200, seeds=2, path=tmp_path/'race')
    first,second = runs[runs['round']==1],runs[runs['round']==2]
    assert runs.groupby('round').budget.unique().tolist()==[['100 compute'],['200 compute']]
    assert first.method.nunique()==5
    assert second.method.nunique()==4
    assert {'none','random_subset(keep=.5)'}<set(second.method)
    ends = second.groupby(['method','seed']).compute.max()
    assert ((ends>=200) & (ends<200+20)).all()

    said = capsys.readouterr().out
    assert verdict(runs) in said
    assert escape(verdict(runs)) in in_notebook(runs)
    assert 'without' not in said
    assert "Round 1 of 2: 5 methods, of which each computes 100 items' worth a run (2 epochs).\n" in said
    assert 'Round 2 of 2: 4 methods' in said

    def files(): return {f.name: f.read_bytes() for f in (tmp_path/'race').iterdir()}
    before = files()
    again = race(learner, methods, compute=200, seeds=2, path=tmp_path/'race')
    assert set(before)=={'round_1.csv','round_2.csv'}
    assert files()==before
    pd.testing.assert_frame_equal(again, runs, check_dtype=False, rtol=1e-5)

def test_the_command(tmp_path, capsys, tiny_network):
    methods = ['top_loss(keep=.5)','random_subset(keep=.5)']
    args = dict(race=True, data='digits', n_train=200, n_valid=100, seeds=1, compute=600,
        methods=','.join(methods), out=str(tmp_path))
    main(**args)
    said = capsys.readouterr().out
    assert (tmp_path/'round_1.csv').exists()
    assert 'validation loss' in said
    assert f'Wrote 1 round, and table.md of the last one, to {tmp_path}' in said

    table = (tmp_path/'table.md').read_text(encoding='utf-8')
    assert all(m in table for m in ('none',*methods))
    assert table.splitlines()[-1] in said.splitlines()
    with pytest.raises(SystemExit): main(**args|dict(seconds=3.))
    assert 'race: got --epochs, --seconds or --items, wanted --compute' in capsys.readouterr().err

@pytest.mark.parametrize('epochs,short', [(1.9,True),(2,False)])
def test_a_race_too_short_to_choose_says_so_first(epochs, short, capsys):
    n = len(learner().dls.train_ds)
    warning = ('race: round 1 has 1.9 epochs, and most methods choose from the second one on; '
        f'compute={2*n} gives it two.\n')
    race(learner, ['top_loss(keep=.5)','random_subset(keep=.5)'], compute=epochs*n, seeds=1)
    assert capsys.readouterr().out.startswith(warning)==short

def test_what_a_race_needs():
    with pytest.raises(ValueError, match='wanted one at least that chooses by loss'):
        race(learner, 'none,random_subset')
    with pytest.raises(ValueError, match="method: got 'nonsense'"): race(learner, 'nonsense', compute=100)
    with pytest.raises(ValueError, match='compute: got 0'): race(learner, compute=0)
    with pytest.raises(TypeError, match='race: got epochs, wanted compute alone'): race(learner, epochs=3)
    with pytest.raises(TypeError, match="unknown option 'lrs', wanted 'lr', or another of "):
        race(learner, compute=100, lrs=3)

NOT_AN_OPTION = ("race: got an unknown option 'plot', wanted one of get_learner, methods, compute, seeds, lr, path, "
    'about, annealing, watch, measure. A budget is compute alone; ')

@pytest.mark.parametrize('kwargs,error,match', [
    (dict(plot=False), TypeError, NOT_AN_OPTION),
    (dict(tell_controls=True), TypeError, "race: got an unknown option 'tell_controls'"),
    (dict(anealing='step'), TypeError, "race: got an unknown option 'anealing', wanted 'annealing'"),
    (dict(annealing='cosine'), ValueError, "annealing: got 'cosine'"),
    (dict(methods='favor_hard(beta=-1)'), ValueError, 'beta: got -1'),
    (dict(seeds=0), ValueError, 'seeds: got 0'),
    (dict(about=dict(epoch=3)), ValueError, 'about: got epoch')])
def test_a_race_refuses_before_its_first_round(kwargs, error, match, capsys, tmp_path):
    "And leaves no folder"
    plan = dict(methods=['favor_hard'], compute=100, path=tmp_path/'race')
    with pytest.raises(error, match=match): race(learner, **plan | kwargs)
    assert 'Round' not in capsys.readouterr().out
    assert not (tmp_path/'race').exists()

def test_a_race_hands_on_what_it_takes():
    plan = dict(compute=100, seeds=1, annealing='step', watch=lambda learn: dict(steps=7))
    runs = race(learner, ['top_loss(keep=.5,warmup=0)'], **plan)
    assert set(runs.annealing)=={'step'}
    assert set(runs.steps)=={7}

def test_a_missing_control_is_said_once(capsys, short_rounds):
    race(learner, ['top_loss(keep=.5)','top_loss(keep=.25)','batch_loss_filter'], compute=200, seeds=1)
    assert capsys.readouterr().out.count('without random_subset among the methods')==1

def test_six_methods_and_two_controls_take_two_rounds_by_default():
    "Of ten epochs; from twenty on, three"
    assert 'none' in field
    assert rounds_of(field, 10)==[(.5,8),(1,5)]
    assert rounds_of(field, 20)==[(.25,8),(.5,5),(1,4)]

@pytest.mark.parametrize('n', range(1, 12))
def test_the_rounds_ahead_are_those_that_come(n):
    left = ['none', *(f'm{i}' for i in range(n))]
    for _,size in rounds_of(left, 1000):
        assert len(left)==size
        left = better_half(ends_of(**{m: [float(i)] for i,m in enumerate(left)}))
    assert len(left)==1+min(n, 2)

def test_a_race_in_which_no_method_chooses_is_refused(monkeypatch):
    monkeypatch.setattr('selback.bench.race.compare', None)
    methods = ['top_loss(keep=.5)','top_loss(keep=.25)','batch_loss_filter']
    said = r'compute: got 50 \(1 epochs\), wanted more than 50.* so take 100'
    with pytest.raises(ValueError, match=said): race(learner, methods, compute=50, seeds=1)

@pytest.mark.parametrize('n_valid,constant', [(5000,dict(constant_error=.2, constant_loss=2.)),
    (100,dict(constant_error=.9, constant_loss=1.))])
def test_where_nothing_was_learned_nobody_is_ranked(n_valid, constant):
    "By what is compared: the error, or with few validation items the loss, which is 1 here"
    runs = runs_of(dict(none=[.3,.31], a=[.2,.21], b=[.5,.5]), dict(none=[.3,.31], a=[.2,.21]), n_valid=n_valid)
    said = verdict(runs.assign(**constant))
    assert said.startswith('Nothing was learned: no run is better than a constant prediction, whose ')
    assert 'Dropped' not in said
    assert 'is clearly better' in verdict(runs_of(dict(none=[.3,.31,.32], a=[.2,.21,.22])).assign(constant_error=.4))

def test_a_budget_too_small_for_any_choice_decides_nothing():
    said = verdict(runs_of(dict(none=[.3,.31], a=[.3,.31])).assign(selected=0))
    assert said.startswith('No method selected anything')

@pytest.mark.parametrize('got', [learner, None], ids=['a learner','nothing'])
def test_a_race_wants_a_function(got):
    with pytest.raises(TypeError, match='get_learner: got .*, wanted a function that returns a new learner'):
        race(got and got())

def test_plain_training_has_its_name_to_itself():
    with pytest.raises(ValueError, match="methods: got 'favor_hard' by the name 'none'"):
        race(learner, {'none': 'favor_hard', 'a': 'info_batch'})

def test_an_error_of_the_training_keeps_its_traceback(monkeypatch, tmp_path):
    "Only what the line itself has wrong is told in a line"
    def fails(*args, **kwargs): raise TypeError('deep inside a training')
    monkeypatch.setattr('selback.bench.command.race', fails)
    cut = dict(n_train=64, n_valid=32)
    with pytest.raises(TypeError, match='deep inside a training'):
        main(race=True, compute=600, seeds=1, out=tmp_path, **cut)
    with pytest.raises(SystemExit): main(race=True, methods='none', out=tmp_path/'no', **cut)
    assert not (tmp_path/'no').exists()

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
    def runs_at(get_learner, methods, lr, path, plot, **kwargs):
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

    said = capsys.readouterr().out
    parts = ['plain training at 1e-09.','plain training at 0.01.','learning rate of 0.01','Round 1']
    places = [said.index(o) for o in parts]
    assert places==sorted(places)

def test_the_command_searches_the_rate(tmp_path, capsys, tiny_network):
    methods = 'none,top_loss(keep=.5),random_subset(keep=.5)'
    args = dict(data='digits', n_train=64, n_valid=32, bs=16, seeds=1, compute=256, methods=methods, out=str(tmp_path))
    main(lr='0.003,9', **args)
    assert set(pd.read_csv(tmp_path/'runs.csv').lr)=={.003}
    assert 'Plain training ends best at a learning rate of 0.003' in capsys.readouterr().out

    refused = {'fast': "lr: got 'fast', wanted a learning rate, or several", '0.1,-1': 'lr: got -1',
        '0.1': 'got runs with lr 0.003, wanted 0.1'}
    for lr,said in refused.items():
        with pytest.raises(SystemExit): main(lr=lr, **args)
        assert said in capsys.readouterr().err

def test_rates_at_which_all_diverge_are_told_in_a_line(tmp_path, capsys, tiny_network):
    args = dict(data='digits', n_train=64, n_valid=32, bs=16, seeds=1, compute=256, out=str(tmp_path))
    with pytest.raises(SystemExit): main(lr='1e30,1e35', methods='none,top_loss', **args)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith('selback-compare: error: lr: got 1e+30, 1e+35, at each of which plain training diverged')

def test_a_place_may_be_written_from_home(tmp_path, capsys, tiny_network, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    main(data='digits', n_train=64, n_valid=32, bs=16, seeds=1, compute=256, methods='none,top_loss', out='~/runs')
    assert (tmp_path/'runs/runs.csv').exists()

def test_a_race_may_go_to_a_place_from_home(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    race(learner, ['top_loss'], compute=100, seeds=1, path='~/runs/of_race')
    assert (tmp_path/'runs/of_race/round_1.csv').exists()

def test_plain_training_by_a_name_of_ones_own_races():
    runs = race(learner, {'plain': 'none', 'top': 'top_loss'}, compute=200, seeds=1)
    assert set(runs.method)=={'none','plain','top'}

# who races where nobody is named
@pytest.mark.parametrize('y,joins', [
    (torch.tensor([0]*30+[1]*10), True), (torch.tensor([0]*29+[1]*11), False), (torch.tensor([0]*40), False),
    (torch.rand(40), False)])
@pytest.mark.parametrize('has_groups,others', [(False,field), (True,by_group)])
def test_balanced_sampling_races_where_classes_are_known_to_be_uneven(y, joins, has_groups, others, capsys):
    dls = dls_of(torch.rand(40, 4), y, n_valid=0)
    assert field_of(dls, has_groups)==(*others, *['balanced_sampling']*joins)
    assert ('balanced_sampling races, too' in capsys.readouterr().out)==joins

def test_a_race_on_uneven_classes_tries_it(monkeypatch):
    from selback.bench import race as module
    asked = []
    def noted(get_learner, methods, **study):
        asked.extend(methods)
        raise KeyboardInterrupt
    monkeypatch.setattr(module, 'compare', noted)
    def get_learner():
        dls = dls_of(torch.rand(112, 4), torch.arange(112)%16//15)
        return Learner(dls, mlp(), loss_func=CrossEntropyLossFlat(), metrics=error_rate)
    with pytest.raises(KeyboardInterrupt): race(get_learner, compute=2000)
    assert 'balanced_sampling' in asked
    asked.clear()
    with pytest.raises(KeyboardInterrupt): race(get_learner, ['favor_hard'], compute=2000)
    assert asked==['none','favor_hard']
