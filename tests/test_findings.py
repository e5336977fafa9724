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
    assert verdict(runs).startswith('At equal seconds top_loss won: its validation loss is 20.0% lower')

def test_the_pieces_of_a_difference_agree():
    "The verdict, the tables and `paired` say the same of the same runs"
    losses = dict(none=[.5,.52,.49], top_loss=[.4,.43,.41], random_subset=[.45,.52,.44])
    study = dict(budget='1 seconds', kept=.5)
    runs = pd.concat([run(m, s, [l], [1.], **study) for m,ls in losses.items() for s,l in enumerate(ls)])
    d = paired(last_epochs(runs), 'top_loss', 'none', 'valid_loss')
    assert differences(summarize(runs)).loc['top_loss','vs plain, equal time']==pytest.approx(d)
    assert f'{d.size} than with plain training ({d.sure})' in verdict(runs)
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
    assert 'stale_loss' not in verdict(runs)

def test_tables_lead_with_the_measure_and_the_difference_and_show_options():
    ran = [('none',.5), ('selective_backprop(1)',.4), ('by hand',.3)]
    runs = pd.concat([run(m, s, [1.,l], [1.,2.], error=[.5,.1]) for s in (0,1) for m,l in ran])
    shown = show_table(runs)
    assert shown.index[:2].tolist()==['validation loss, equal time','vs plain, equal time']
    assert show_table(runs.assign(budget='2 epochs')).index[0]=='validation loss'
    assert shown.loc['options'].tolist()==['-','beta=1, hist_size=1024, gather=True','-']

def test_options_are_those_that_run():
    for name,c in known_methods().items():
        if not c.__module__.startswith('selback.methods.') or name=='replay_choices': continue
        told = eval(f'dict({options_of(name)})')
        assert told
        assert {k: v for k,v in told.items() if v!=inspect.signature(c).parameters[k].default}=={}
    assert options_of('top_loss(.25,warmup=0)')=='keep=0.25, warmup=0'

def test_a_measure_of_which_more_is_better_is_refused():
    runs = run('none', 0, [1.], [1.])
    calls = [lambda: summarize(runs, 'accuracy'), lambda: verdict(runs, 'accuracy'),
        lambda: show_table(runs, 'accuracy'), lambda: plot_runs(runs, measure='accuracy'),
        lambda: standing(runs, 'accuracy')]
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

def test_a_method_that_needs_an_object_has_no_options_of_its_own():
    assert options_of('replay_choices')==''

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
