"The claims' numbers, of runs made by hand"
import math

import pandas as pd, pytest

from studies import claims

def run(method, seed, epochs, errors, costs, kept=None):
    "The epochs of a run; each looks at ten items, of which it trains `kept`"
    rows = []
    for i,(error,cost) in enumerate(zip(errors, costs), 1):
        trained = (kept or 10)*i
        known = dict(data='some', method=method, seed=seed, epochs=epochs, epoch=i)
        rows.append(known | dict(error=error, valid_loss=error/10, compute=cost, backpropagated=trained,
            forwarded=trained+(10*i if kept else 0)))
    return rows

@pytest.fixture(autouse=True)
def stored(monkeypatch, tmp_path):
    rows = []
    for seed in (0,1,2):
        rows += run('none', seed, 4, (.5,.4,.23,.2), (100,200,300,400))
        rows += run('none', seed, 2, (.5,.3), (100,200))
        rows += run('quick', seed, 4, (.5,.24,.2,.2), (50,100,150,200), kept=5)
        rows += run('never', seed, 4, (.5,.5,.4,.3), (50,100,150,200), kept=2)
    pd.DataFrame(rows).to_csv(tmp_path/'claims.csv', index=False)
    monkeypatch.setattr(claims, 'claims_path', tmp_path/'claims.csv')
    monkeypatch.setattr(claims, 'protocol', 4)
    for function in (claims.runs_of,): monkeypatch.setattr(function, '__defaults__', ('none',4))

def test_the_target_is_a_multiple_of_what_plain_training_ends_with():
    assert claims.speedup('some', 'quick')==pytest.approx(3.) # .24 after 100, plain training after 300
    assert claims.speedup('some', 'quick', factor=1.)==pytest.approx(400/150)
    assert math.isnan(claims.speedup('some', 'never'))
    assert math.isnan(claims.speedup('some', 'not run'))
    assert claims.speedup('some', 'quick', cost='backpropagated')==pytest.approx(30/10)

def test_plain_training_that_ends_as_early_is_the_rival():
    d = claims.beside_plain('some', 'quick') # at 200 it ends with .3
    assert d.mean==pytest.approx(.2/.3-1) and (d.better,d.seeds)==(3,3)
    assert claims.beside_plain('some', 'never').mean==pytest.approx(0.)
    assert claims.beside_plain('some', 'quick', 'valid_loss').mean==pytest.approx(.2/.3-1)

def test_there_is_no_plain_training_of_more_than_the_longest_cost(tmp_path):
    path = claims.claims_path
    rows = pd.read_csv(path)
    rows.loc[rows.method=='quick', 'compute'] *= 3
    rows.to_csv(path, index=False)
    assert math.isnan(claims.beside_plain('some', 'quick').mean)

def test_what_the_last_epoch_keeps_and_what_all_of_them_change():
    assert claims.kept_last('some', 'quick')==pytest.approx(.5)
    assert claims.kept_last('some', 'never')==pytest.approx(.2)
    assert claims.change('some', 'never', 'error')==pytest.approx(.5)
    assert claims.change('some', 'quick', 'compute')==pytest.approx(-.5)

def test_one_pass_saves_nothing_and_two_do():
    assert claims.step_of('top_loss')<.9<.97<claims.step_of('one_pass')
