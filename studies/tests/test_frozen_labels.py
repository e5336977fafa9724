"Wrong labels by frozen features"
import numpy as np, pandas as pd, pytest
from studies import frozen_labels
from studies.frozen_labels import as_listed, methods, score, situations

@pytest.fixture(autouse=True)
def tiny(monkeypatch, tmp_path, tiny_network):
    monkeypatch.setenv('SELBACK_SCALE', 'tiny')
    monkeypatch.setattr(frozen_labels, 'path', tmp_path/'found.csv')
    monkeypatch.setattr(frozen_labels, 'kept', tmp_path/'kept')
    monkeypatch.setattr(frozen_labels, 'small_convnet', tiny_network)
    caches = frozen_labels.case_of,frozen_labels.trained
    for cache in caches: cache.cache_clear()
    yield
    for cache in caches: cache.cache_clear()

def test_what_is_found_by_hand():
    is_wrong = np.array([True,False,True,False,False])
    assert score([0,1,2,3,4], is_wrong, 3)==dict(found=.5, first_50=.4, listed=3, precision=2/3, recall=1)
    assert score([2,0,1,4,3], is_wrong)==dict(found=1, first_50=.4)

@pytest.mark.parametrize('name', situations)
def test_classes_are_numbered_and_some_are_wrong(name):
    images,truth,given = situations[name](0)
    assert len(images)==len(truth)==len(given)
    assert {*given.tolist()}<={*truth.tolist()}=={*range(int(truth.max())+1)}
    if name not in ('cats and dogs','three classes, worst of three'): # where at the tiny scale none is
        assert 0<(truth!=given).sum()<len(truth)/2

def test_a_rare_class_is_filed_wrongly():
    _,truth,given = situations['a rare class'](0)
    assert ((truth==2).sum(),(given==2).sum(),(truth!=given).sum())==(20,15,25)

def test_each_way_is_measured_once(monkeypatch):
    pytest.importorskip('cleanlab', reason='a requirement of the studies: pip install -e .[studies]')
    names = {method: 'ten classes, 500' for method in methods} | {method: '300 photographs' for method in as_listed}
    monkeypatch.setattr(frozen_labels, 'plan', lambda: [(name, 0, method) for method,name in names.items()])
    for _ in range(2): frozen_labels.main()
    runs = pd.read_csv(frozen_labels.path)
    assert [*runs.method]==[*names]
    assert runs.found.between(0, 1).all()
    assert (runs.groupby('situation')[['n','wrong']].nunique()==1).all(axis=None)
    assert len([*frozen_labels.kept.iterdir()])==2 # features
