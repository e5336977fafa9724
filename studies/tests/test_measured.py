"What cards and the guide say was measured follows from the runs"
import re, shutil
from pathlib import Path

import pandas as pd, pytest
from helpers import *
from _measured import gain, measured, tally
from studies.measured import as_table, comparisons, studies, write

results = Path(__file__).parents[2]/'results'
NAN = float('nan')

def row_of(method, seed, error, forwarded=100, selected=1):
    "A run of one epoch; plain training forwards what it trains, and never selects"
    if method=='none': forwarded,selected = 100,0
    return dict(method=method, seed=seed, epoch=1, forwarded=forwarded, backpropagated=100, selected=selected, kept=1,
        valid_loss=10*error, error=error, compute=100)

def runs_of(errors, **kwargs):
    "Runs of one epoch: errors by method and seed"
    return pd.DataFrame([row_of(method, seed, error, **kwargs)
        for method,by_seed in errors.items() for seed,error in enumerate(by_seed)])

def written(folder):
    "The folder, with what its runs amount to"
    write(folder)
    return folder

def told(folder, *methods): return tally(*methods, top=written(folder)).data
def carded(folder, *methods): return measured(*methods, top=written(folder)).data

def store(runs, folder, name):
    "As the runs of a study"
    file = folder/f'{name}.csv'
    file.parent.mkdir(exist_ok=True)
    runs.to_csv(file, index=False)

HALF = 'without_a_look/plain_half' # of the study below

@pytest.fixture
def top(tmp_path):
    "A folder of results with one study"
    def write(errors=(), **kwargs):
        usual = {'none': [.2,.2,.2], 'favor_hard(beta=2)': [.18,.181,.179], 'drop_easy': [.18,.21,.19],
            'favor_harder': [.3,.3,.3]}
        store(runs_of(usual | dict(errors), **kwargs), tmp_path, HALF)
        return tmp_path
    return write

def test_differences_are_those_of_the_runs(top):
    df = comparisons(top()).set_index('method')
    difference = df.loc['favor_hard(beta=2)','difference']
    assert difference.mean==pytest.approx(-.1, abs=1e-4)
    assert difference.better==3
    assert df.verdict.to_dict()=={
        'favor_hard(beta=2)': 'better', 'drop_easy': 'no clear difference', 'favor_harder': 'worse'}
    assert set(df['where'])=={'CIFAR-10, 20 epochs'}
    assert 'none' not in df.index

def test_a_changed_file_changes_the_card(top):
    folder = top()
    assert 'clearly better than' in told(folder, 'favor_hard')
    assert '-10.0%' in carded(folder, 'favor_hard')
    top(errors={'favor_hard(beta=2)': [.22,.221,.219]})
    assert 'clearly worse than' in told(folder, 'favor_hard')
    assert '+10.0%' in carded(folder, 'favor_hard')

def test_what_never_selected_has_no_difference(top):
    folder = top(selected=0)
    assert set(comparisons(folder).verdict)=={'never selected'}
    assert comparisons(folder).difference.isna().all()
    assert 'never found selecting worth its cost' in told(folder, 'drop_easy')

def test_looks_that_were_not_counted_win_nothing(top):
    "Equal back-propagated items are an equal cost for a method without looks only"
    folder = top(forwarded=200)
    (folder/'multi_label').mkdir()
    shutil.move(folder/f'{HALF}.csv', folder/'multi_label/items.csv')
    assert not comparisons(folder).equal_cost.any()
    assert 'Not measured' in told(folder, 'favor_hard')
    assert ', in validation loss, looks not counted' in carded(folder, 'favor_hard')

    store(runs_of({'none': [.2]*3, 'info_batch': [.1,.11,.1]}), folder, 'multi_label/items')
    assert 'clearly better than' in told(folder, 'info_batch')

def test_a_gift_wins_nothing(top):
    "A reference that was there already is told apart from one that was paid for"
    folder,free = top(),'reducible loss, a clean reference for free'
    store(runs_of({'none': [.2]*3, 'reducible loss': [.3,.31,.3]}), folder, 'where_it_pays/noise_40_all')
    store(runs_of({free: [.1,.11,.1]}), folder, 'where_it_pays/noise_40_clean')
    assert 'Not measured' in told(folder, free)
    assert 'what it was given not counted' in carded(folder, free)
    assert 'clearly worse than' in told(folder, 'reducible loss', free)

LOWER,HIGHER,UNCLEAR = [.18,.181,.179],[.22,.221,.219],[.1,.3,.2] # than .2, on three seeds

@pytest.mark.parametrize('losses,errors,more,in_card', [
    (LOWER, LOWER, '', '-10.0%'),
    (HIGHER, LOWER, ' validation loss 10.0% higher', '+10.0%'),
    (UNCLEAR, LOWER, '', ''),
    (LOWER, UNCLEAR, ' validation loss 10.0% lower', '-10.0%')])
def test_a_loss_that_says_something_else_is_told(top, losses, errors, more, in_card):
    "Not one that agrees with the error, nor one that is not clear"
    folder,method = top(),'favor_hard(beta=2)'
    runs = runs_of({'none': [.2]*3, method: errors})
    runs.loc[runs.method==method,'valid_loss'] = [10*loss for loss in losses]
    store(runs, folder, HALF)
    assert gain('CIFAR-10, 20 epochs', method, written(folder)).partition(';')[2]==more
    assert carded(folder, 'favor_hard').split('|')[-2].strip()==in_card

def test_data_sets_are_counted_apart_from_comparisons(top):
    "Twenty and forty epochs are of the same data"
    folder = top()
    shutil.copy(folder/f'{HALF}.csv', folder/'without_a_look/plain_once.csv')
    assert 'on one data set (2 comparisons: 2 better).' in told(folder, 'favor_hard')
    store(runs_of({'none': [.2]*3, 'favor_hard': [.2,.21,.19]}), folder, 'forum/full_batches')
    assert 'on 1 of 2 data sets (3 comparisons: 2 better).' in told(folder, 'favor_hard')

def test_two_seeds_make_nothing_clear(top):
    folder = top()
    store(runs_of({'none': [.2]*2, 'favor_hard': [.1,.11]}), folder, HALF)
    assert set(comparisons(folder).verdict)=={'no clear difference'}
    assert ' to ' not in carded(folder, 'favor_hard') # no interval

def holds_runs(file): return {'method','seed','epoch'}<=set(pd.read_csv(file, nrows=0))

def test_every_file_of_runs_is_of_a_study():
    """But searches of settings and rates, other budgets of plain training, races, equal epochs, easy data by cells,
    balanced sampling, which is held against a loader, and claims of others beside a shorter training"""
    known = {name for study in studies for name in study.files}
    stored = {str(f.relative_to(results).with_suffix('')) for f in results.rglob('*.csv') if holds_runs(f)}
    beside = ('_settings|search|_own_lr_|_rate_|fit_|_half|_twice|race/|resized|noise_cifar10/|easy_data|balanced/|'
        'counter_evidence|batch_loss_score')
    assert {name for name in stored-known if not re.search(beside, name)}=={'forum/long','forum/rate'}

def test_every_study_names_a_page_and_its_files():
    for study in studies:
        assert (results.parent/'nbs'/f'{study.page}.ipynb').exists(), study
        needed = [name for name in study.files if 'others' not in name]
        assert all((results/f'{name}.csv').exists() for name in needed), study

@pytest.mark.parametrize('errors', [[NAN,NAN,NAN], [NAN,.18,.18], [.18,.18,float('inf')]])
def test_what_diverged_on_any_seed_has_no_difference_and_is_no_win(top, errors):
    "And takes nothing away from the others"
    wanted = comparisons(top()).set_index('method').drop('drop_easy')
    folder = top(errors={'drop_easy': errors})
    found = comparisons(folder).set_index('method')
    assert found.verdict['drop_easy']=='diverged'
    assert found.difference['drop_easy'] is None
    pd.testing.assert_frame_equal(found.drop('drop_easy'), wanted)

    alone = 'diverged, unlike plain training of equal cost, in the one comparison made.'
    assert told(folder, 'drop_easy')==f'**Measured:** {alone}'
    together = told(folder, 'drop_easy', 'favor_hard', 'favor_harder')
    better = 'clearly better than plain training of equal cost on one data set, clearly worse in some'
    assert together==f'**Measured:** {better} (3 comparisons: 1 better, 1 worse, 1 diverged).'
    assert '| `drop_easy` | - | - | diverged |' in carded(folder, 'drop_easy')
    assert gain('CIFAR-10, 20 epochs', 'drop_easy', written(folder))=='diverged'

def test_a_method_without_a_seed_of_plain_training_is_left_out(top):
    "As when runs are still in work; one seed is enough"
    folder = top()
    drop_easy = runs_of({'drop_easy': [.1,.1,.1]}).query('seed>0')
    first_seed = runs_of({'none': [.2], 'info_batch': [NAN]})
    store(pd.concat([first_seed, drop_easy]), folder, HALF)
    assert comparisons(folder).verdict.to_dict()=={0: 'diverged'} # of `info_batch`

    two_seeds = runs_of({'none': [.2,.2]})
    store(pd.concat([two_seeds, drop_easy]), folder, HALF)
    (found,) = comparisons(folder).to_dict('records')
    assert found['verdict']=='one seed'
    assert found['difference'].seeds==1

def test_the_file_agrees_with_the_runs():
    "What cards, guide and README read; refresh it by `make comparisons`"
    wanted = as_table(comparisons())
    assert len(wanted)>200
    found = pd.read_csv(results/'comparisons.csv', keep_default_na=True).fillna({'not_counted': ''})
    pd.testing.assert_frame_equal(found, wanted, check_dtype=False)

def test_a_row_is_read_as_it_was_written(top):
    from _measured import comparisons as read
    folder = written(top(errors={'drop_easy': [.2,NAN,.2]}))
    made,found = comparisons(folder),read(top=folder)
    assert found.method.tolist()==made.method.tolist()
    assert found.verdict.tolist()==made.verdict.tolist()
    for a,b in zip([*found.difference,*found.loss], [*made.difference,*made.loss]):
        assert a is None and b is None or a==pytest.approx(b)
