"Shortcuts that are mended after the training"
import pandas as pd, pytest, torch
from studies import mended
from studies.mended import *
from torch import tensor

@pytest.fixture(autouse=True)
def smallest(tiny_network, monkeypatch):
    monkeypatch.setenv('SELBACK_SCALE', 'tiny')
    monkeypatch.setattr(mended, 'small_convnet', tiny_network)

made = ('AV','corner'),('AV','blur'),('table','leak'),('text','leak'),('ten','corner')

@pytest.mark.parametrize('data,mark', made)
def test_a_training_is_told_by_each_way(data, mark, tmp_path, monkeypatch):
    monkeypatch.setattr(mended, 'results_folder', tmp_path/'results')
    rows = mended.trained(Situation(data, mark, .9, .1), 0, with_sampling=data=='AV').set_index('way')
    assert {'plain','even','early','groups known','scaled by class','epoch of the best worst class'}<={*rows.index}
    assert ('early_loss_sampling' in rows.index)==(data=='AV')
    assert ((rows.worst>=rows['mean']) & (rows['mean']>=0)).all()
    assert rows.ratio.nunique()==1
    assert rows.loc['early'].order==rows.loc['early'].order # it is known

@pytest.mark.parametrize('mark', ['border','corner','tint','blur'])
def test_a_mark_is_on_those_that_have_it_only(mark):
    images = torch.randint(60, 200, (4,3,16,16), dtype=torch.uint8)
    drawn = mended.drawings[mark](images, tensor([0,1,0,1]))
    assert [bool((a!=b).any()) for a,b in zip(images, drawn)]==[False,True,False,True]

def test_wrong_labels_and_rare_classes_are_as_many_as_asked_for():
    situation = Situation('table', '', wrong=.2, rare=.1, n=4000)
    g = torch.Generator().manual_seed(0)
    y = torch.arange(8000)%2
    _,spoilt,_ = situation.spoilt((y, y, y), g)
    n_last = 4000*.1
    assert len(spoilt)==pytest.approx(4000+n_last, abs=80)
    assert float(spoilt.float().mean())==pytest.approx((4000*.2+n_last*.8)/(4000+n_last), abs=.03)

def test_the_worst_group_by_hand():
    logits = tensor([[1.,0.],[1.,0.],[0.,1.],[1.,0.]])
    test = None,tensor([0,0,1,1]),tensor([0,1,1,0])
    assert errors(logits, test, True)==dict(worst=1., mean=.25)
    assert errors(logits, test, False)==dict(worst=.5, mean=.25)

def test_outputs_are_shifted_until_the_worst_class_is_best():
    logits = tensor([[2.,0.],[2.,0.],[1.,0.],[1.,0.]])
    shift = scaled_by_class(logits, tensor([0,0,1,1]))
    assert 1<shift[1]-shift[0]<2

def runs_of(*rows):
    "Plain and refitted error, ratio, order; error and order by the root of early losses"
    found = []
    for i,(plain,refitted,ratio,order,by_root,order_by_root) in enumerate(rows):
        about = dict(part='a', situation=str(i), seed=0, ratio=ratio)
        found += [about | dict(way='plain', mean=plain, own=.05), about | dict(way='early', mean=refitted, order=order),
            about | dict(way='early^.5', mean=by_root, order=order_by_root)]
    return pd.DataFrame(found)

def test_a_rule_by_hand():
    runs = runs_of((.4,.1,.1,.9,.2,.95), (.1,.3,.6,.9,.2,.95), (.1,.2,.2,.5,.15,.6), (.3,.2,.5,.9,.25,.9),
        (.5,.6,.2,.5,.1,.8))
    found = by_rule(runs)
    assert found.taken.tolist()==['early','plain','plain','plain','early^.5']
    assert found.says_yes.tolist()==[True,False,False,False,True]
    assert found.chosen.tolist()==[.1,.1,.1,.3,.1]
    told = in_brief(found)
    assert told.gain==pytest.approx((.3+.4)/5)
    assert told.possible==pytest.approx((.3+.1+.4)/5)
    assert told.always==pytest.approx((.3-.2-.1+.1-.1)/5)
    assert told.worst==0
    assert told.worst_always==pytest.approx(.2)
    assert in_brief(by_rule(runs, .5, .4)).worst==pytest.approx(.1)
    assert by_rule(runs, ways=('early',)).taken.tolist()==['early',*['plain']*4]

def test_thresholds_are_chosen_that_never_cost():
    runs = runs_of((.4,.1,.1,.9,.1,.9), (.1,.3,.6,.9,.3,.9), (.1,.2,.2,.55,.2,.55), (.3,.2,.45,.9,.2,.9))
    assert fitted_rule(runs) in {(.5,.6),(.5,.7),(.5,.8)}
    assert [len(half) for half in halves(runs)]==[6,6]
    assert not {*halves(runs)[0].situation} & {*halves(runs)[1].situation}
