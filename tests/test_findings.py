"What runs amount to: one moment, one arithmetic, and words for tables and verdicts"
import inspect

import numpy as np, pandas as pd, pytest
from helpers import *
from scipy.stats import t
from selback.bench.findings import *

NAN = float('nan')
RANDOM = 'random_subset(keep=.5)'

def run(method, seed, losses, seconds, **more):
    n = len(losses)
    costs = dict(seconds=seconds, cpu_seconds=seconds, forwarded=1, backpropagated=[100*s for s in seconds], kept=.5)
    study = dict(n_valid=9, budget='4 seconds')
    rows = dict(method=method, seed=seed, epoch=range(1, n+1)) | costs | dict(valid_loss=losses, error=losses) | study
    return pd.DataFrame(rows | more)

def ends_of(measure='error', **values):
    "The last epoch of each run; for each method, a value for each seed"
    return pd.DataFrame([{'method': m, 'seed': s, measure: v} for m,vs in values.items() for s,v in enumerate(vs)])

def runs_of(*rounds, n_valid=5000):
    "Runs of one epoch, in rounds"
    more = dict(epoch=1, n_valid=n_valid, valid_loss=1., budget='100 compute')
    return pd.concat([ends_of(**values).assign(**more, round=i) for i,values in enumerate(rounds, 1)])

OF_METHODS = {'none': ([1.,.8,.3,.5], [1.,2,3,4]), 'top_loss': ([.9,.2,.4], [1.5,3,4.1]), RANDOM: ([.9,.45], [2.,4])}
RUNS = pd.concat([run(m, s, *of, error=[loss/2 for loss in of[0]]) for s in (0,1,2) for m,of in OF_METHODS.items()])

# differences
def test_a_difference_is_that_of_the_same_seeds():
    d = paired(ends_of(none=[.2,.4,.1], a=[.1,.3,.09]), 'a')
    logs = np.log([.5,.75,.9])
    mean,half = np.mean(logs),np.std(logs, ddof=1)/3**.5*t.ppf(.975, 2)
    assert tuple(d[:3])==pytest.approx(np.exp([mean, mean-half, mean+half])-1)
    assert d[3:]==(3,3,0)
    assert not d.is_clear # all seeds agree, but the interval contains zero
    assert paired(ends_of(none=[.2,.4,.1], a=[.1,.3,NAN]), 'a')[3:]==(2,2,1)
    assert paired(ends_of(none=[.2,.4,.1], a=[.1,.3]), 'a')[3:]==(2,2,0)
    with pytest.raises(ValueError, match='no seed that both a and none'): paired(ends_of(none=[.1], a=[NAN]), 'a')

@pytest.mark.law(11)
@pytest.mark.parametrize('a,b,clear', [
    ([.1,.11,.12], [.2,.21,.22], True),
    ([.2,.21,.22], [.1,.11,.12], True),
    ([.1,.2,.3], [.1,.2,.3], False),
    ([.1,.2,.3,.4,.1,.1,.1], [.2,.4,.6,.8,.2,.2,.09], False),
    ([.1,.11], [.5,.52], False),
    ([.1], [.5], False)])
def test_clear_takes_three_seeds_that_agree_and_the_interval(a, b, clear):
    d = paired(ends_of(a=a, b=b), 'a', 'b')
    assert d.is_clear==clear
    assert str(d).startswith('not clear: ')==(not clear)
    assert np.isnan([d.low,d.high]).all()==(len(a)<3)
    if not clear: return
    way = 'better' if a[0]<b[0] else 'worse'
    assert str(d)==f'clearly {way}: {d.mean:+.1%} ({d.low:+.1%} to {d.high:+.1%}) in 3 seeds'

@pytest.mark.law(11)
def test_equal_methods_are_taken_for_different_once_in_twenty():
    "Which is what an interval of 95 % says; that all seeds agree makes it rarer"
    rng = np.random.default_rng(0)
    def alike(): return ends_of(a=rng.normal(1, .05, 3), b=rng.normal(1, .05, 3))
    found = sum(paired(alike(), 'a', 'b').is_clear for _ in range(400))/400
    assert .01<found<.05+4*(.05*.95/400)**.5

@pytest.mark.law(11)
@pytest.mark.parametrize('bad', [float('inf'), NAN])
def test_what_diverged_on_a_seed_is_not_clearly_better(bad):
    runs = ends_of(none=[.3,.31,.32,.3], a=[.1,.11,.12,bad])
    assert paired(runs[runs.seed<3], 'a').is_clear
    d = paired(runs, 'a')
    assert not d.is_clear
    assert d.seeds==3
    assert str(d).startswith('not clear: ') and str(d).endswith(' in 3 seeds, 1 more diverged')
    assert not paired(runs, 'none', 'a').is_clear

def test_factors_multiply_and_shares_add_up():
    "Twice and half cancel out, nothing falls by more than all; of negative losses and of zeros there are no factors"
    assert paired(ends_of(none=[.1,.1], a=[.2,.05]), 'a').mean==pytest.approx(0)
    d = paired(ends_of(none=[.1,.1,.1], a=[.001,.3,.1]), 'a')
    assert -1<d.low<d.mean<d.high
    assert d.mean==pytest.approx(.03**(1/3)-1)
    assert paired(ends_of(none=[.1,.1], a=[0.,.1]), 'a').mean==-.5
    assert paired(ends_of(none=[0.,0.], a=[0.,0.]), 'a').mean==0
    assert paired(ends_of(none=[0.,0.], a=[.1,.1]), 'a').mean==float('inf')
    assert paired(ends_of(none=[-.5,-.5,-.5], a=[-.9,-.25,-.25]), 'a').mean==pytest.approx((-.8+.5+.5)/3)
    assert relative([-2.,-.5], [-1.,-1.]).tolist()==[-1.,.5]
    assert [signed(o) for o in (0., -.0001, .0004, .015, -.5)]==['0.0%','0.0%','0.0%','+1.5%','-50.0%']

# tables
@pytest.mark.law(11)
@pytest.mark.parametrize('measure,of', [('valid_loss',1), ('error',.5)])
def test_all_differences_are_of_one_moment(measure, of):
    "The end, whatever two runs are compared, however good one was on its way, and in whatever order the rows stand"
    at = {'none': .5, 'top_loss': .4, RANDOM: .45}
    for runs in (RUNS, RUNS.sort_values('epoch', kind='stable')):
        means = table(last_epochs(runs)[['method','seed',measure]])[measure]
        assert means.to_dict()==pytest.approx({m: loss*of for m,loss in at.items()})
        found = differences(runs.assign(measure=measure))
        assert found.loc['top_loss','vs plain, equal time'].mean==pytest.approx(.4/.5-1)
        assert found.loc[RANDOM,'vs plain, equal time'].mean==pytest.approx(.45/.5-1)
        assert found.loc['top_loss','vs random, equal time'].mean==pytest.approx(.4/.45-1)
        assert found.loc['none','vs plain, equal time'] is found.loc[RANDOM,'vs random, equal time'] is None

def test_the_pieces_of_a_difference_agree():
    "The verdict, the tables and `paired` say the same of the same runs"
    losses = dict(none=[.5,.52,.49], top_loss=[.4,.43,.41], random_subset=[.45,.52,.44])
    runs = pd.concat([run(m, s, [l], [1.]) for m,ls in losses.items() for s,l in enumerate(ls)])
    d = paired(last_epochs(runs), 'top_loss', 'none', 'valid_loss')
    assert differences(runs).loc['top_loss','vs plain, equal time']==pytest.approx(d)
    assert f'against plain training, is {d}; against a random choice, ' in verdict(runs)
    assert show_table(runs).loc['vs plain, equal time','top_loss']==signed(d.mean)

EQUAL = {'16 epochs': None, '9 compute': 'compute', '9 items': 'items', '2 seconds': 'time'}

@pytest.mark.parametrize('budget', EQUAL)
def test_runs_are_compared_at_what_all_of_them_spent(budget):
    "Those of equal epochs cost differently"
    runs,equal = RUNS.assign(budget=budget),EQUAL[budget]
    assert equal_of(runs)==equal
    rows = [f'vs plain, equal {equal}',f'vs random, equal {equal}'] if equal else []
    assert [name for name in show_table(runs).index if name.startswith('vs ')]==rows
    words = {None: 'Runs of equal epochs', 'items': 'At equal back-propagated items', 'time': 'At equal seconds'}
    assert verdict(runs).startswith(words.get(equal, f'At equal {equal}'))

def test_runs_of_several_studies_are_refused():
    "A race's rounds, and rows that are no whole runs"
    runs = pd.concat([run('none', 0, [1.,.8], [1.,2.]), run('top_loss', 0, [1.,.7], [1.,2.])])
    other = runs.assign(budget=['4 seconds']*2+['8 seconds']*2)
    for ask in (verdict, differences, show_table, plot_runs):
        with pytest.raises(ValueError, match='runs: got budgets of 4 seconds and 8 seconds'): ask(other)
        with pytest.raises(ValueError, match=r'got epochs \[2, 1\] of top_loss'): ask(runs.sort_values('valid_loss'))

def test_a_table_leads_with_what_is_compared():
    ran = [('none',.5), ('selective_backprop(1)',.4), ('by hand',.3)]
    runs = pd.concat([run(m, s, [1.,l], [1.,2250.], error=[.5,.1]) for s in (0,1) for m,l in ran])
    shown = show_table(runs)
    rows = ['validation loss, equal time','vs plain, equal time','options','seconds','items','share kept']
    assert shown.index.tolist()==rows
    assert shown.none.tolist()==['0.5','-','-','2,250','225,000','0.5']
    assert shown.loc['options'].tolist()==['-','beta=1, hist_size=1024, gather=True','-']
    assert shown.loc['vs plain, equal time','by hand'].startswith('no clear difference (-')
    assert show_table(runs.assign(measure='error')).index[0]=='error, equal time'
    assert to_markdown(shown).splitlines()[0]=='|  | `none` | `selective_backprop(1)` | `by hand` |'

def test_a_method_that_never_selected_is_named_and_compared_with_nothing():
    ran = [('none',.5,0), ('top_loss',.4,3), ('idle',.3,0)]
    runs = pd.concat([run(m, s, [1.,l-.01*s], [1.,2.], selected=n) for s in (0,1) for m,l,n in ran])
    shown = show_table(runs)
    assert shown.loc['vs plain, equal time'].tolist()[::2]==['-','-']
    assert shown.loc['vs plain, equal time','top_loss']!='-'
    said,_,never = verdict(runs).partition(' Never selected: ')
    assert never=='idle.' and 'idle' not in said

def test_options_are_those_that_run():
    for name,c in known_methods().items():
        if not c.__module__ in OWN_MODULES: continue
        told = eval(f'dict({options_of(name)})')
        assert told
        assert {k: v for k,v in told.items() if v!=inspect.signature(c).parameters[k].default}=={}
    assert options_of('top_loss(.25,warmup=0)')=='keep=0.25, warmup=0'

@pytest.mark.parametrize('spec', ['top_loss(keep=.5,keep=.3)','top_loss(**{"keep": .5})','lambda: 3','top_loss[1]','1'])
def test_what_is_no_plain_call_is_no_method(spec):
    with pytest.raises(ValueError, match='wanted a name or a call such as'): parse_method(spec)

def test_a_measure_of_which_more_is_better_is_refused():
    for ask in (verdict, show_table, plot_runs):
        with pytest.raises(ValueError, match="measure: got 'accuracy'"): ask(RUNS.assign(measure='accuracy'))

@pytest.mark.parametrize('name', ['digits/runs','an_image/china_full','cifar10/time','label_noise/as_it_is'])
def test_stored_runs_are_read(name):
    runs = pd.read_csv(f'results/{name}.csv')
    if 'n_valid' not in runs: runs['n_valid'] = 360
    assert verdict(runs).startswith('At equal ')
    assert len(show_table(runs))

# verdicts
OF_A = 'At equal compute the error of a, against plain training, is '
VERDICTS = [
    (dict(none=[.3,.31,.32], a=[.2,.21,.22], b=[.4,.4,.4]),
        OF_A+'clearly better: -32.3% (-34.8% to -29.6%) in 3 seeds.'),
    (dict(none=[.3,.31,.32], a=[.2,.21,.22], b=[.21,.2,.225], c=[.2,.21,.221]), '; against b and c, not clear.'),
    (dict(none=[.3,.31,.32], a=[.29,.32,.3], b=[.4,.4,.4]), OF_A+'not clear: -2.2% ('),
    (dict(none=[.2,.21,.22], a=[.3,.31,.32]), OF_A+'clearly worse: +47.7% ('),
    (dict(none=[.3,.3], a=[.3,.2]), OF_A+'not clear: -18.4% in 2 seeds.'),
    (dict(none=[.3,.31,.32], a=[.2,.21,.22], b=[NAN,.1,.1]), ' Diverged: b on 1 of 3 seeds.'),
    (dict(none=[.3,.3], a=[NAN,NAN]), 'all methods that choose by loss diverged. Diverged: a on 2 of 2 seeds.'),
    (dict(none=[NAN,.3], a=[.2,.2]), 'There is nothing to compare with: plain training diverged.'),
    (dict(none=[.3,.3]), 'There is nothing to compare'),
    (dict(a=[.3,.3]), 'There is nothing to compare'),
    (dict(none=[.3,.31,.32], a=[.2]), 'Of 3 seeds 1 count, which were run with all methods.')]

@pytest.mark.parametrize('of,says', VERDICTS)
def test_the_words_fit_the_numbers(of, says):
    assert says in verdict(runs_of(of))
    assert verdict(runs_of(of))==verdict(runs_of(dict(reversed(of.items()))))

@pytest.mark.law(9)
def test_a_random_choice_stands_beside_a_method():
    lucky = runs_of({'none': [.3,.31,.32], 'random_subset(keep=.3)': [.2,.21,.22], 'a': [.25,.25,.26]})
    said = verdict(lucky)
    assert said.startswith(OF_A+'clearly better: ')
    assert '; against a random choice, clearly worse: ' in said
    assert verdict(lucky[~lucky.method.str.startswith('random')]).endswith('there is no control.')

@pytest.mark.parametrize('factors', [(.01,5.3),(.1,.3,2.8)])
def test_verdict_ranks_by_what_it_prints(factors):
    "By factors, whose product counts: one bad seed does not hide what the others gained"
    ran = dict(none=[1.]*len(factors), favor_hard=factors, top_loss=[.98]*len(factors))
    rows = [dict(method=m, seed=s, epoch=1, budget='9 compute', valid_loss=.02*10**s*f)
        for m,of in ran.items() for s,f in enumerate(of)]
    mean = np.prod(factors)**(1/len(factors))-1
    assert f'of favor_hard, against plain training, is not clear: {mean:+.1%} ' in verdict(pd.DataFrame(rows))

def test_the_error_of_a_run_that_diverged_does_not_count():
    "Whatever an argmax makes of no numbers"
    runs = runs_of(dict(none=[.06,.061,.062], a=[.05,.051,.01]))
    runs['valid_loss'] = [1.]*5+[np.inf]
    assert last_epochs(runs).error.isna().sum()==1
    assert ' Diverged: a on 1 of 3 seeds.' in verdict(runs)

@pytest.mark.parametrize('told', [dict(selected=0), dict(kept=1.)])
def test_where_no_method_selected_nothing_is_decided(told):
    assert verdict(runs_of(dict(none=[.3,.31], a=[.3,.31])).assign(**told)).startswith('No method selected anything')

def test_few_validation_items_are_compared_by_their_loss():
    assert 'validation loss' in verdict(runs_of(dict(none=[.3,.31], a=[.2,.21]), n_valid=100))

def test_who_left_a_race_is_named_with_the_round():
    first = dict(none=[.3,.3], a=[.2,.2], b=[.5,.5], c=[.1,.1])
    second = dict(none=[.3,.31], a=[.2,.21], c=[.1,.11])
    third = dict(none=[.3,.31], c=[.1,.11])
    assert verdict(runs_of(first, second, third)).endswith('Dropped: b (round 1), a (round 2).')

@pytest.mark.parametrize('constant,n_valid,learned', [
    (dict(constant_error=.2, constant_loss=2.), 5000, False),
    (dict(constant_error=.4, constant_loss=.5), 5000, True),
    (dict(constant_error=.9, constant_loss=1.), 100, False), # by the loss, which is 1
    (dict(constant_error=NAN, constant_loss=1.), 5000, False), # by the loss, where the error is not known
    (dict(constant_error=NAN, constant_loss=1.1), 5000, True),
    (dict(constant_error=NAN, constant_loss=NAN), 5000, True)])
def test_where_nothing_was_learned_nobody_is_ranked(constant, n_valid, learned):
    of = dict(none=[.3,.31], a=[.21,.22])
    said = verdict(runs_of(of | dict(b=[.5,.5]), of, n_valid=n_valid).assign(**constant))
    assert said.startswith('Nothing was learned: no run is better than a constant prediction, whose ')==(not learned)
    assert ('Dropped' in said)==learned

def test_a_run_that_was_better_on_its_way_has_learned():
    assert verdict(RUNS.assign(constant_loss=.25)).startswith('At equal')
    assert verdict(RUNS.assign(constant_loss=.15)).startswith('Nothing was learned')

# pictures
@pytest.mark.parametrize('value', [.5,-.5])
def test_many_methods_and_losses_below_zero_are_drawn(value):
    kinds = dict(random_subset=60, top_loss=99)
    names = ['none', *(f'{kind}(keep=.{i})' for kind,n in kinds.items() for i in range(10, n))]
    axes = plot_runs(pd.concat([run(m, 0, [value], [1.]) for m in names]))
    assert [len(ax.lines) for ax in axes]==[len(names)]*2
    assert axes[0].get_yscale()==('log' if value>0 else 'linear')
    assert all(line.get_marker()=='.' for line in axes[0].lines) # or one epoch would not be seen

@pytest.mark.parametrize('budget,label', [('4 seconds','seconds of training'),
    ('9 compute','compute, in items trained')])
def test_curves_are_drawn_by_what_was_spent_and_by_items(budget, label):
    "The best so far, up to the end"
    by_cost,by_items = plot_runs(RUNS.assign(budget=budget, compute=RUNS.seconds))
    assert [ax.get_xlabel() for ax in (by_cost,by_items)]==[label,'items back-propagated']
    lines = {line.get_label(): line.get_xydata().round(9).tolist() for line in by_cost.lines}
    assert lines['plain training']==[[1,1.],[2,.8],[3,.3],[4,.3]]
    assert lines['top_loss'][-1]==[4.1,.2]
