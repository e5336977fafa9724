"The tables at the end of a study say what the package's own say"
import pandas as pd, pytest
from selback.bench.findings import last_epochs, paired
from studies.experiments import end_table, styled
from test_findings import run

def test_a_difference_is_that_of_the_verdict():
    losses = dict(none=[.5,.52,.49], top_loss=[.4,.43,.41], random_subset=[.45,.52,.44])
    runs = pd.concat([run(method, seed, [loss], [1.], annealing='one_cycle', budget='1 seconds')
        for method,by_seed in losses.items() for seed,loss in enumerate(by_seed)])
    wanted = paired(last_epochs(runs), 'top_loss', 'none', 'valid_loss')
    assert end_table(runs).loc['top_loss','vs plain, equal time']==pytest.approx(wanted)

def test_what_never_selected_gets_a_dash():
    methods = ('none',.5,0),('top_loss',.4,3),('stale_loss(warmup=9)',.3,0) # with loss, and steps that selected
    runs = [run(method, seed, [1.,loss-.01*seed], [1.,2.], selected=selected)
        for seed in (0,1) for method,loss,selected in methods]
    ends = end_table(pd.concat(runs))
    assert ends.loc['stale_loss(warmup=9)'].filter(regex='^vs').isna().all()
    assert '>-<' in styled(ends).to_html()

def test_the_measure_and_the_difference_come_first():
    losses = {'none': .5, 'selective_backprop(1)': .4, 'by hand': .3}
    runs = pd.concat([run(method, seed, [1.,loss], [1.,2.], error=[.5,.1])
        for seed in (0,1) for method,loss in losses.items()])
    ends = end_table(runs)
    assert ends.columns[:2].tolist()==['valid_loss','vs plain, equal time']
    assert ends.options['selective_backprop(1)']=='beta=1, hist_size=1024, gather=True'
    assert end_table(runs.assign(n_valid=5000)).columns[0]=='error'
    assert 'no clear difference' in styled(end_table(runs[runs.seed==0])).to_html()

@pytest.mark.parametrize('name', ['an_image/china_full','cifar10/time','label_noise/as_it_is'])
def test_stored_runs_are_read(name):
    runs = pd.read_csv(f'results/{name}.csv')
    assert len(end_table(runs))>1
