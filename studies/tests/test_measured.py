"What cards and the guide say was measured follows from the runs"
import re, shutil
from pathlib import Path

import pandas as pd, pytest
from helpers import *
from _measured import gain, measured, tally
from studies.measured import as_table, comparisons, studies, write

def runs_of(errors, forwarded=100, selected=1):
    "Runs of one epoch: errors by method and seed"
    return pd.DataFrame([dict(method=m, seed=s, epoch=1, forwarded=100 if m=='none' else forwarded, backpropagated=100, selected=0 if m=='none' else selected, kept=1, valid_loss=10*e, error=e, compute=100)
        for m,es in errors.items() for s,e in enumerate(es)])

def written(folder):
    "The folder, with what its runs amount to"
    write(folder)
    return folder

@pytest.fixture
def top(tmp_path):
    "A folder of results with one study"
    (tmp_path/'without_a_look').mkdir()
    def write(**kwargs):
        errors = {'none': [.2,.2,.2], 'favor_hard(beta=2)': [.18,.181,.179], 'drop_easy': [.18,.21,.19], 'favor_harder': [.3,.3,.3]}
        runs_of({**errors, **kwargs.pop('errors', {})}, **kwargs).to_csv(tmp_path/'without_a_look/plain_half.csv', index=False)
        return tmp_path
    return write

def test_differences_are_those_of_the_runs(top):
    df = comparisons(top()).set_index('method')
    assert df.loc['favor_hard(beta=2)','difference'].mean==pytest.approx(-.1, abs=1e-4) and df.loc['favor_hard(beta=2)','difference'].better==3
    assert df.verdict.to_dict()=={'favor_hard(beta=2)': 'better', 'drop_easy': 'no clear difference', 'favor_harder': 'worse'}
    assert set(df['where'])=={'CIFAR-10, 20 epochs'} and 'none' not in df.index

def test_a_changed_file_changes_the_card(top):
    folder = top()
    assert 'clearly better than' in tally('favor_hard', top=written(folder)).data and '-10.0%' in measured('favor_hard', top=written(folder)).data
    top(errors={'favor_hard(beta=2)': [.22,.221,.219]})
    assert 'clearly worse than' in tally('favor_hard', top=written(folder)).data and '+10.0%' in measured('favor_hard', top=written(folder)).data

def test_a_card_counts_its_own_method_only(top):
    assert measured('favor_hard', top=written(top())).data.count('`favor_hard')==1
    assert measured('favor_hard', 'drop_easy', top=written(top())).data.count('CIFAR-10')==2
    assert 'Not measured' in tally('favor', top=written(top())).data

def test_what_never_selected_has_no_difference(top):
    folder = top(selected=0)
    assert set(comparisons(folder).verdict)=={'never selected'} and comparisons(folder).difference.isna().all()
    assert 'never found selecting worth its cost' in tally('drop_easy', top=written(folder)).data

def test_looks_that_were_not_counted_win_nothing(top):
    "Equal back-propagated items are an equal cost for a method without looks only"
    folder = top(forwarded=200)
    shutil.move(folder/'without_a_look/plain_half.csv', (folder/'multi_label').mkdir() or folder/'multi_label/items.csv')
    assert not comparisons(folder).equal_cost.any()
    assert 'Not measured' in tally('favor_hard', top=written(folder)).data and ', in validation loss, looks not counted' in measured('favor_hard', top=written(folder)).data
    runs_of({'none': [.2,.2], 'info_batch': [.1,.11]}).to_csv(folder/'multi_label/items.csv', index=False)
    assert 'clearly better than' in tally('info_batch', top=written(folder)).data

def test_a_gift_wins_nothing(top):
    "A reference that was there already is told apart from one that was paid for"
    folder,errors = top(),{'none': [.2,.2], 'reducible loss': [.3,.31], 'reducible loss, a clean reference for free': [.1,.11]}
    runs = runs_of(errors)
    (folder/'where_it_pays').mkdir()
    for part,of in runs.groupby(runs.method.str.endswith('free').map({False: 'all', True: 'clean'})): of.to_csv(folder/f'where_it_pays/noise_40_{part}.csv', index=False)
    assert 'Not measured' in tally('reducible loss, a clean reference for free', top=written(folder)).data and 'what it was given not counted' in measured('reducible loss, a clean reference for free', top=written(folder)).data
    assert 'clearly worse than' in tally('reducible loss', 'reducible loss, a clean reference for free', top=written(folder)).data

def test_what_was_measured_is_named(top):
    "The error, unless the study goes by the validation loss"
    folder = top()
    assert gain('CIFAR-10, 20 epochs', 'favor_hard(beta=2)', written(folder)).startswith('10.0% lower on all of 3 seeds') and ', in validation loss' not in measured('drop_easy', top=written(folder)).data
    (folder/'digits').mkdir()
    runs_of({'none': [.2,.2,.2], 'drop_easy': [.18,.181,.179], 'info_batch': [.1,.3,.2]}).to_csv(folder/'digits/runs.csv', index=False)
    assert gain('digits, 7 epochs', 'drop_easy', written(folder)).startswith('10.0% lower validation loss on all of 3 seeds')
    assert gain('digits, 7 epochs', 'info_batch', written(folder)).startswith('no clear difference in validation loss (-')

def test_a_loss_that_says_something_else_is_told(top):
    "Not one that agrees with the error, nor one that is not clear"
    folder,method = top(),'favor_hard(beta=2)'
    file = folder/'without_a_look/plain_half.csv'
    def told(losses, errors=(.18,.181,.179)):
        runs = runs_of({'none': [.2]*3, method: errors})
        runs.loc[runs.method==method,'valid_loss'] = losses
        runs.to_csv(file, index=False)
        return gain('CIFAR-10, 20 epochs', method, written(folder)).partition(';')[2],measured('favor_hard', top=written(folder)).data.split('|')[-2].strip()
    assert told([1.8,1.81,1.79])==('','-10.0%') and told([2.2,2.21,2.19])==(' validation loss 10.0% higher','+10.0%') and told([1.,3.,2.])==('','')
    assert told([1.8,1.81,1.79], [.1,.3,.2])==(' validation loss 10.0% lower','-10.0%')

def test_the_error_is_named_where_it_is_another(top):
    folder = top()
    (folder/'where_it_pays').mkdir()
    runs_of({'none': [.2]*3, 'favor_hard': [.18,.181,.179]}).to_csv(folder/'where_it_pays/hidden_groups_all.csv', index=False)
    assert gain('rare kinds, hidden', 'favor_hard', written(folder)).startswith('10.0% lower error of the worst kind on all of 3 seeds') and 'rare kinds, hidden](../experiments/where_it_pays.ipynb), in error of the worst kind' in measured('favor_hard', top=written(folder)).data

def test_data_sets_are_counted_apart_from_comparisons(top):
    "Twenty and forty epochs are of the same data"
    folder = top()
    shutil.copy(folder/'without_a_look/plain_half.csv', folder/'without_a_look/plain_once.csv')
    assert 'in 2 of 2 comparisons.' in tally('favor_hard', top=written(folder)).data
    (folder/'forum').mkdir()
    runs_of({'none': [.2]*3, 'favor_hard': [.2,.21,.19]}).to_csv(folder/'forum/full_batches.csv', index=False)
    assert 'in 2 of 3 comparisons, on 1 of 2 data sets.' in tally('favor_hard', top=written(folder)).data

def test_every_file_of_runs_is_of_a_study():
    "But searches of settings, other budgets of plain training, races and equal epochs"
    root,known = Path(__file__).parents[2]/'results',{o for study in studies for o in study.files}
    others = [str(f.relative_to(root).with_suffix('')) for f in root.rglob('*.csv') if {'method','seed','epoch'}<=set(pd.read_csv(f, nrows=0))]
    left = {o for o in others if o not in known and not re.search('_settings|search_|fit_|_half|_twice|race/|resized|noise_cifar10/', o)}
    assert left=={'forum/long','forum/rate'}

def test_every_study_names_a_page_and_its_files():
    root = Path(__file__).parents[2]
    for study in studies:
        assert (root/'nbs'/f'{study.page}.ipynb').exists(), study
        assert all((root/'results'/f'{o}.csv').exists() for o in study.files if 'others' not in o), study

NAN = float('nan')

@pytest.mark.parametrize('errors', [[NAN,NAN,NAN], [NAN,.18,.18], [.18,.18,float('inf')]])
def test_what_diverged_on_any_seed_has_no_difference_and_is_no_win(top, errors):
    "And takes nothing away from the others"
    wanted = comparisons(top()).set_index('method').drop('drop_easy')
    folder = top(errors={'drop_easy': errors})
    found = comparisons(folder).set_index('method')
    assert found.verdict['drop_easy']=='diverged' and found.difference['drop_easy'] is None
    pd.testing.assert_frame_equal(found.drop('drop_easy'), wanted)
    assert tally('drop_easy', top=written(folder)).data=='**Measured:** diverged, unlike plain training of equal cost, in the one comparison made.'
    assert tally('drop_easy', 'favor_hard', 'favor_harder', top=written(folder)).data=='**Measured:** clearly better than plain training of equal cost in 1 of 3 comparisons; clearly worse in 1; diverged in 1.'
    assert '| `drop_easy` | - | - | diverged |' in measured('drop_easy', top=written(folder)).data and gain('CIFAR-10, 20 epochs', 'drop_easy', written(folder))=='diverged'

def test_nothing_is_better_than_training_that_diverged(top):
    assert set(comparisons(top(errors={'none': [.2,NAN,.2]})).verdict)=={'diverged'}

def test_a_method_without_a_seed_of_plain_training_is_left_out(top):
    "As when runs are still in work; one seed is enough"
    folder = top()
    runs = runs_of({'none': [.2,.2,.2], 'drop_easy': [.1,.1,.1], 'info_batch': [NAN,.1,.1]})
    runs[(runs.method!='drop_easy') & (runs.seed<1) | (runs.method=='drop_easy') & (runs.seed>0)].to_csv(folder/'without_a_look/plain_half.csv', index=False)
    assert comparisons(folder).verdict.to_dict()=={0: 'diverged'}
    runs[(runs.method=='none') & (runs.seed<2) | (runs.method=='drop_easy') & (runs.seed>0)].to_csv(folder/'without_a_look/plain_half.csv', index=False)
    assert comparisons(folder).verdict.to_dict()=={0: 'one seed'} and comparisons(folder).difference[0].seeds==1

def test_the_file_agrees_with_the_runs():
    "What cards, guide and README read; refresh it by `make comparisons`"
    file = Path(__file__).parents[2]/'results/comparisons.csv'
    wanted = as_table(comparisons())
    assert len(wanted)>200
    pd.testing.assert_frame_equal(pd.read_csv(file, keep_default_na=True).fillna({'not_counted': ''}), wanted, check_dtype=False)

def test_a_row_is_read_as_it_was_written(top):
    from _measured import comparisons as read
    folder = written(top(errors={'drop_easy': [.2,float('nan'),.2]}))
    made,found = comparisons(folder),read(top=folder)
    assert found.method.tolist()==made.method.tolist() and found.verdict.tolist()==made.verdict.tolist()
    for a,b in zip([*found.difference,*found.loss], [*made.difference,*made.loss]):
        assert a is None and b is None or a==pytest.approx(b)
