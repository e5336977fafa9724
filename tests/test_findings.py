"What runs amount to: one moment, one arithmetic, and words for tables"
import inspect

import numpy as np, pandas as pd, pytest
from helpers import *
from selback.bench.findings import *

def run(method, seed, losses, seconds, **more):
    n = len(losses)
    costs = dict(seconds=seconds, cpu_seconds=seconds, forwarded=1, backpropagated=[100*s for s in seconds], kept=.5)
    study = dict(n_valid=9, budget='4 seconds')
    rows = dict(method=method, seed=seed, epoch=range(1, n+1)) | costs | dict(valid_loss=losses, error=losses) | study
    return pd.DataFrame(rows | more)

@pytest.mark.law(11)
def test_all_differences_are_of_one_moment():
    "The end, whatever two runs are compared, and however good one of them was on its way"
    ran = dict(none=([1.,.8,.3,.5], [1.,2,3,4]), top_loss=([.9,.2,.4], [1.5,3,4.1]), random_subset=([.9,.45], [2.,4]))
    runs = pd.concat([run(m, s, losses, seconds) for s in (0,1,2) for m,(losses,seconds) in ran.items()])
    ends = summarize(runs).set_index(['method','seed']).xs(0, level='seed')
    at = dict(none=.5, top_loss=.4, random_subset=.45)
    assert ends['validation loss'].to_dict()==at
    assert ends['best loss'].to_dict()==dict(none=.3, top_loss=.2, random_subset=.45)
    for m in ('top_loss','random_subset'):
        assert ends.loc[m,'vs plain, equal time']==pytest.approx(at[m]/at['none']-1)
    assert ends.loc['top_loss','vs random, equal time']==pytest.approx(at['top_loss']/at['random_subset']-1)
    assert verdict(runs).startswith('At equal seconds the validation loss of top_loss, against plain training, is '
        'clearly better: -20.0% (')

def test_the_pieces_of_a_difference_agree():
    "The verdict, the tables and `paired` say the same of the same runs"
    losses = dict(none=[.5,.52,.49], top_loss=[.4,.43,.41], random_subset=[.45,.52,.44])
    study = dict(budget='1 seconds', kept=.5)
    runs = pd.concat([run(m, s, [l], [1.], **study) for m,ls in losses.items() for s,l in enumerate(ls)])
    d = paired(last_epochs(runs), 'top_loss', 'none', 'valid_loss')
    assert differences(summarize(runs)).loc['top_loss','vs plain, equal time']==pytest.approx(d)
    assert f'against plain training, is {d.verdict}; against a random choice, ' in verdict(runs)
    assert show_table(runs).loc['vs plain, equal time','top_loss']==d.brief==signed(d.mean)

@pytest.mark.parametrize('n', [1,2])
def test_one_seed_or_two_prove_little(n):
    "Half of the loss on each: no interval, nothing clear"
    ends = pd.DataFrame(dict(method=m, seed=s, error=e+.01*s) for m,e in dict(none=.4, a=.2).items() for s in range(n))
    d = paired(ends, 'a')
    assert d.better==n and not d.is_clear
    assert np.isnan([d.low,d.high]).all()
    assert d.sure.endswith(', which proves little')
    assert 'interval' not in str(d)
    assert d.verdict==f"not clear: {signed(d.mean)} in {n} seed{'s' if n>1 else ''}"

def interleaved(runs): return runs.sort_values('epoch', kind='stable')

def test_rows_may_stand_in_any_order_of_methods():
    ran = dict(none=[.9,.8,.7], favor_hard=[.6,.5])
    runs = pd.concat([run(m, 0, losses, [1.,2.,3.][:len(losses)]) for m,losses in ran.items()])
    for given in (runs, interleaved(runs)):
        found = summarize(given).set_index('method')
        assert found['best loss'].to_dict()==dict(none=.7, favor_hard=.5)
        assert found.loc['favor_hard','vs plain, equal time']==pytest.approx(.5/.7-1)

def test_runs_of_several_studies_are_refused():
    "A race's rounds, and rows that are no whole runs"
    runs = pd.concat([run('none', 0, [1.,.8], [1.,2.]), run('top_loss', 0, [1.,.7], [1.,2.])])
    other = runs.assign(budget=['4 seconds']*2+['8 seconds']*2)
    said = 'runs: got budgets of 4 seconds and 8 seconds, wanted runs of one budget; of a race, runs.compared has them'
    for ask in (verdict, summarize, show_table, plot_runs):
        with pytest.raises(ValueError, match=said): ask(other)
        with pytest.raises(ValueError, match=r'got epochs \[2, 1\] of top_loss'): ask(runs.sort_values('valid_loss'))

def test_the_error_of_a_run_that_diverged_does_not_count():
    "Whatever an argmax makes of no numbers; the verdict says who diverged"
    losses = dict(none=[.06,.061,.062], favor_hard=[.05,.051,np.nan], random_subset=[.07,.08,np.inf])
    ends = {m: [run(m, s, [l], [4.], error=.01 if not np.isfinite(l) else l) for s,l in enumerate(of)]
        for m,of in losses.items()}
    runs = pd.concat(sum(ends.values(), []))
    assert last_epochs(runs).error.isna().sum()==2
    said = verdict(runs, 'error')
    assert said.startswith('There is nothing to compare: all methods that choose by loss diverged.')
    assert ' Diverged: favor_hard on 1 of 3 seeds, random_subset on 1 of 3 seeds.' in said
    well = pd.concat(ends['none']+ends['favor_hard'][:2]+[run('favor_hard', 2, [.052], [4.])]+ends['random_subset'])
    assert verdict(well, 'error').startswith('At equal seconds the error of favor_hard, against plain')
    assert ' Diverged: random_subset on 1 of 3 seeds.' in verdict(well, 'error')

def test_losses_below_zero_are_ranked_by_what_is_printed():
    "Shares add up, factors multiply: of negative ones there are no factors"
    ran = dict(none=[-.5,-.5,-.5], a=[-.9,-.25,-.25])
    ends = pd.DataFrame([dict(method=m, seed=s, valid_loss=l) for m,of in ran.items() for s,l in enumerate(of)])
    assert paired(ends, 'a', measure='valid_loss').mean==pytest.approx((-.8+.5+.5)/3)
    ends = ends.assign(epoch=1, budget='9 compute')
    assert 'of a, against plain training, is not clear: +6.7% (' in verdict(ends)
    with_zero = ends.assign(valid_loss=[1.,.01,.5,.5,.03,0.])
    assert 'of a, against plain training, is not clear: +16.7% (' in verdict(with_zero)

def test_a_brief_table_is_of_what_is_compared():
    "At its best, too"
    runs = pd.concat([run(m, 0, [.8,.9], [1.,2.], error=[.07,.08]) for m in ('none','top_loss')])
    assert brief(show_table(runs, 'error')).none['best on the way']=='0.07'
    assert brief(show_table(runs)).none['best on the way']=='0.8'

@pytest.mark.parametrize('value', [.5,-.5])
def test_many_methods_and_losses_below_zero_are_drawn(value):
    kinds = dict(random_subset=60, top_loss=99)
    names = ['none', *(f'{kind}(keep=.{i})' for kind,n in kinds.items() for i in range(10, n))]
    axes = plot_runs(pd.concat([run(m, 0, [value], [1.]) for m in names]))
    assert [len(ax.lines) for ax in axes]==[len(names)]*2
    assert axes[0].get_yscale()==('log' if value>0 else 'linear')
    assert all(line.get_marker()=='.' for line in axes[0].lines) # or one epoch would not be seen

@pytest.mark.parametrize('spec', ['top_loss(keep=.5,keep=.3)','top_loss(**{"keep": .5})','lambda: 3','top_loss[1]','1'])
def test_what_is_no_plain_call_is_no_method(spec):
    with pytest.raises(ValueError, match='wanted a name or a call such as'): parse_method(spec)

def test_negative_losses_keep_their_order():
    assert relative([-2.,-.5], [-1.,-1.]).tolist()==[-1.,.5]
    assert relative(0, 0)==0
    assert relative(.1, 0)==np.inf

def test_a_method_that_never_selected_gets_a_dash():
    ran = [('none',.5,0), ('top_loss',.4,3), ('stale_loss(warmup=9)',.3,0)]
    runs = pd.concat([run(m, s, [1.,l-.01*s], [1.,2.], selected=n) for s in (0,1) for m,l,n in ran])
    shown = show_table(runs)
    rows = [r for r in shown.index if r.startswith('vs')]
    assert rows
    assert (shown.loc[rows,'stale_loss(warmup=9)']=='-').all()
    assert (shown.loc[rows,'top_loss']!='-').any()
    summary = summarize(runs)
    assert summary[summary.method=='stale_loss(warmup=9)'].filter(regex='^vs').isna().all(axis=None)
    assert 'stale_loss' not in verdict(runs).partition(' Never selected: ')[0]

def test_tables_lead_with_the_measure_and_the_difference_and_show_options():
    ran = [('none',.5), ('selective_backprop(1)',.4), ('by hand',.3)]
    runs = pd.concat([run(m, s, [1.,l], [1.,2.], error=[.5,.1]) for s in (0,1) for m,l in ran])
    shown = show_table(runs)
    assert shown.index[:2].tolist()==['validation loss, equal time','vs plain, equal time']
    assert show_table(runs.assign(budget='2 epochs')).index[0]=='validation loss'
    assert shown.loc['options'].tolist()==['-','beta=1, hist_size=1024, gather=True','-']

def test_options_are_those_that_run():
    for name,c in known_methods().items():
        if not c.__module__ in OWN_MODULES: continue
        told = eval(f'dict({options_of(name)})')
        assert told
        assert {k: v for k,v in told.items() if v!=inspect.signature(c).parameters[k].default}=={}
    assert options_of('top_loss(.25,warmup=0)')=='keep=0.25, warmup=0'

def test_a_measure_of_which_more_is_better_is_refused():
    runs = run('none', 0, [1.], [1.])
    calls = [lambda: summarize(runs, 'accuracy'), lambda: verdict(runs, 'accuracy'),
        lambda: show_table(runs, 'accuracy'), lambda: plot_runs(runs, measure='accuracy')]
    said = "measure: got 'accuracy', wanted 'valid_loss' or 'error', of which less is better"
    for call in calls:
        with pytest.raises(ValueError, match=said): call()

@pytest.mark.parametrize('text,said', [
    ('AMD EPYC, 1 threads', 'AMD EPYC, 1 thread'),
    ('AMD EPYC, 2 threads', 'AMD EPYC, 2 threads'),
    ('china, coordinate_net, 1200000 compute, batch size 64',
        'china, coordinate_net, compute of 1,200,000 items, batch size 64'),
    ('1 epochs', '1 epoch'),
    ('11 epochs', '11 epochs'),
    ('0.5 seconds', '0.5 seconds'),
    ('480 items', '480 items'),
    ('20000 items', '20,000 items')])
def test_numbers_are_written_for_readers(text, said): assert in_words(text)==said

@pytest.mark.parametrize('name', ['digits/runs','an_image/china_full','cifar10/time','label_noise/as_it_is'])
def test_stored_runs_are_read(name):
    runs = pd.read_csv(f'results/{name}.csv')
    if 'n_valid' not in runs: runs['n_valid'] = 360
    assert verdict(runs).startswith('At equal ')
    assert len(show_table(runs))

def test_a_method_that_needs_an_object_has_no_options_of_its_own(monkeypatch):
    class NeedsCallback(TopLossCallback):
        def __init__(self, needed, **kwargs): super().__init__(**kwargs)
    monkeypatch.setattr(Learner, 'needs', None, raising=False) # goes with the test
    with_one_liner('Needs an object')(NeedsCallback)
    assert options_of('needs')==''

def test_a_terminal_shows_eight_rows():
    "At the moment of equal cost: what is compared, against whom, with which options, and what it took"
    methods = {'none': .2, 'favor_hard': .1, 'random_subset(keep=.5)': .3}
    costs = dict(seconds=1., cpu_seconds=1., forwarded=90, backpropagated=80, compute=100.)
    def row(method, error, seed):
        quality = dict(valid_loss=error+.01*seed, error=2*error)
        return dict(method=method, seed=seed, epoch=1, **costs, selected=int(method!='none'), kept=.5,
            budget='100 compute', **quality)
    rows = [row(method, error, seed) for method,error in methods.items() for seed in range(3)]
    table = brief(show_table(pd.DataFrame(rows)))
    assert table.index.tolist()==['validation loss, equal compute','vs plain, equal compute','vs random, equal compute',
        'options','seconds','items','share kept','best on the way']
    assert table.loc['items'].tolist()==['80']*3
    assert float(table.favor_hard['best on the way'])==pytest.approx(.11, abs=.001)
