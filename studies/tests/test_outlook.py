"The rule that says whether choosing will pay: how it is fitted, and that the package has what was found"
import numpy as np, pandas as pd, pytest

from selback.core import outlook as rule
from studies import easy_data, outlook
from studies.outlook import fitted, halves, hits, pays

def table(shares, gains): return pd.DataFrame(dict(hardest_tenth=shares, gain=gains))

def test_the_threshold_lies_between_what_pays_and_what_does_not():
    df = table([.1,.2,.3,.5,.8], [-.1,0.,.02,.1,.2])
    assert fitted(df)==pytest.approx(.4)
    assert hits(df, fitted(df))==(5,5)

def test_of_equal_thresholds_the_one_in_the_middle_is_taken_and_misses_are_counted():
    df = table([.1,.2,.3,.4,.5], [0.,.1,0.,.1,.1])
    assert hits(df, .15)==hits(df, .35)==(4,5)
    assert fitted(df)==pytest.approx(.35)

def test_halves_take_turns_and_share_nothing():
    df = table(np.random.default_rng(0).permutation(9)/10, np.zeros(9))
    one,other = halves(df)
    assert sorted([*one.index,*other.index])==[*range(9)]
    assert one.hardest_tenth.tolist()==[0.,.2,.4,.6,.8] and other.hardest_tenth.tolist()==[.1,.3,.5,.7]

def test_a_quarter_is_the_first_epoch_that_ends_there(monkeypatch, tmp_path):
    cell = dict(easy_data.Cell('mnist_14', 100, 8)._asdict(), lr=.1, seed=0)
    epochs = [dict(cell, method='none', epoch=e, compute=100*e, error=.2, train_error=.3,
        hardest_tenth=e/10) for e in range(1, 9)]
    pd.DataFrame(epochs).to_csv(tmp_path/'plain.csv', index=False)
    chosen = [dict(cell, method='favor_hard', epoch=16, compute=800, error=.15)]
    pd.DataFrame(chosen).to_csv(tmp_path/'ends.csv', index=False)
    monkeypatch.setattr(easy_data, 'plain_path', tmp_path/'plain.csv')
    monkeypatch.setattr(easy_data, 'path', tmp_path/'ends.csv')
    found = outlook.gains().iloc[0]
    assert (found.hardest_tenth,found.seeds)==(.2,1)
    assert found.gain==pytest.approx(.25)

@pytest.mark.parametrize('where', ['digits, 8 epochs, ten times the rate','coloured digits, 95 %'])
def test_a_look_is_taken_a_quarter_in(where, monkeypatch):
    monkeypatch.setenv('SELBACK_SCALE', 'tiny')
    assert .1<outlook.look(where)<1

def test_the_package_has_what_was_found():
    threshold,unseen = outlook.unseen_gains()
    assert rule.enough==round(threshold, 2)
    for is_uneven,counts in rule.paid.items():
        such = unseen[(unseen.hardest_tenth>=rule.enough)==is_uneven]
        assert counts==((such.gain>=pays).sum(),len(such))
