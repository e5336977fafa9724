"What tells wrong labels"
import math

import pandas as pd, pytest, torch
from studies import label_remedies, wrong_labels
from studies.wrong_labels import Situation, auroc, flipped, misfiled, score, suspicions, unsaid
from torch import tensor
from torch.nn import functional as F

@pytest.mark.parametrize('share', [.05, .4])
@pytest.mark.parametrize('kind', ['symmetric','pairwise'])
def test_as_many_labels_are_flipped_as_are_asked_for(kind, share):
    labels = torch.arange(1000)%10
    wrong = flipped(labels, kind, share, 0)
    assert (wrong!=labels).sum()==1000*share
    assert wrong.max()<10
    steps = ((wrong-labels)%10)[wrong!=labels]
    assert set(steps.tolist())==(set(range(1, 10)) if kind=='symmetric' else {1})

def test_one_class_is_misfiled():
    labels = torch.arange(3).repeat_interleave(100)
    wrong = misfiled(labels, .4, 0)
    assert (wrong!=labels).sum()==40
    assert set(labels[wrong!=labels].tolist())=={0}
    assert set(wrong[wrong!=labels].tolist())=={1,2}

def test_only_labels_that_are_there_go_missing():
    labels = (torch.rand(500, 4)>.5).float()
    assert (unsaid(labels, 'missing', .3, 0)<=labels).all()
    flips = unsaid(labels, 'flipped', .3, 1)
    assert (flips>labels).any() and (flips<labels).any()

def test_area_under_the_curve_by_hand():
    "Of six pairs of a wrong and a right label four are in order, and one is level"
    values = tensor([5.,2.,3.,3.,1.])
    is_wrong = tensor([True,False,True,False,False])
    assert auroc(values, is_wrong)==pytest.approx((3+2.5)/6)

def left_of(logits, labels, **more):
    logits,labels = tensor(logits),tensor(labels)
    return dict(logits=logits, labels=labels, truth=labels, final=logits[-1].softmax(1)) | more

def test_what_is_told_of_each_label_by_hand():
    "Three epochs; the second item is not seen in the second"
    nan = float('nan')
    logits = [[[2.,0.,1.],[0.,1.,0.]], [[0.,3.,0.],[nan]*3], [[1.,0.,0.],[0.,0.,4.]]]
    left = left_of(logits, [0,1])
    told = suspicions(left)
    first = F.cross_entropy(tensor(logits)[:,0], tensor([0,0,0]), reduction='none')
    second = F.cross_entropy(tensor(logits)[[0,2],1], tensor([1,1]), reduction='none')
    close = dict(abs=1e-4)
    assert told['last loss'].tolist()==pytest.approx([float(first[2]),float(second[1])], **close)
    assert told['mean loss'].tolist()==pytest.approx([float(first.mean()),float(second.mean())], **close)
    smoothed = .9*(.9*first[0]+.1*first[1])+.1*first[2]
    of_second = .9*second[0]+.1*second[1]
    assert told['smoothed loss, .9'].tolist()==pytest.approx([float(smoothed),float(of_second)], **close)
    assert told['mean margin (AUM)'].tolist()==pytest.approx([-(1-3+1)/3,-(1-4)/2], **close)
    assert told['late margin'].tolist()==pytest.approx([-(1-2*3+3*1)/6,-(1-2*4)/3], **close)
    assert told['balanced margin'].argsort().tolist()==[0,1]
    assert told['weighed margin'].argsort().tolist()==[1,0] # the first epoch, in which both were right, weighs most
    assert told['times other'].tolist()==pytest.approx([1/3,1/2], abs=1e-3)
    assert told["fastai's top_losses"].argsort().tolist()==[0,1]

def test_several_labels_are_told_one_by_one():
    left = dict(logits=tensor([[[2.,-1.]],[[4.,3.]]]), labels=tensor([[1.,0.]]), final=tensor([[.9,.8]]))
    told = suspicions(left)
    assert told['mean margin (AUM)'].tolist()==[-3.,1.]
    assert told["fastai's top_losses"].tolist()==pytest.approx([-.9,-.2])
    odds = 2/1,1/2 # of each one more
    looks = [[(math.exp(z)/given)**sign for z,given,sign in zip(o, odds, (1, -1))] for o in ((2, -1), (4, 3))]
    shares = [[(o-1)/(o+1) for o in look] for look in looks]
    assert told['balanced as given'].tolist()==pytest.approx([-(a+b)/2 for a,b in zip(*shares)], abs=1e-5)

@pytest.mark.parametrize('n_with', [0, 20])
@pytest.mark.parametrize('more', ['',', right'])
def test_so_many_have_a_rare_label(n_with, more):
    images,truth,labels = Situation('rare', f'3, one on {n_with} of 400{more}', True, 1).items(0)
    assert len(images)==len(truth)==len(labels)==400
    assert truth.sum(0)[2]==n_with<truth.sum(0)[:2].min()
    is_wrong = (labels!=truth).float().mean(0)
    assert is_wrong[:2].tolist()==pytest.approx([.05]*2, abs=.03)
    assert (is_wrong[2]==0)==(n_with==0 or bool(more))

def test_a_list_of_the_truth_is_whole():
    "And one that begins with what is surely right is empty"
    labels = torch.arange(400)%4
    truth = labels.clone()
    truth[:40] = (truth[:40]+1)%4
    right = 5*F.one_hot(truth, 4).float()
    rows = score(dict(logits=right[None], labels=labels, truth=truth, final=right.softmax(1))).set_index('measure')
    assert (rows[['auroc','found']]==1).all(axis=None)
    assert rows.first_100.tolist()==pytest.approx([.4]*len(rows))
    assert (rows.estimate==40).all()
    wrong = 5*F.one_hot(labels, 4).float()
    wrong[40:] = 0
    rows = score(dict(logits=wrong[None], labels=labels, truth=truth, final=wrong.softmax(1))).set_index('measure')
    assert (rows.found==0).all()

@pytest.fixture
def tiny(monkeypatch, tmp_path):
    monkeypatch.setenv('SELBACK_SCALE', 'tiny')
    for module in wrong_labels,label_remedies: monkeypatch.setattr(module, 'path', tmp_path/f'{module.__name__}.csv')
    monkeypatch.setattr(wrong_labels, 'kept', tmp_path/'kept')
    caches = wrong_labels.photographs,wrong_labels.digits,label_remedies.parts,label_remedies.suspects
    for cache in caches: cache.cache_clear()
    yield
    for cache in caches: cache.cache_clear()

@pytest.mark.parametrize('situation', [
    Situation('digits', 'symmetric 20', False, 2), Situation('several', 'missing 20', True, 1),
    Situation('rare', '3, one on 5 of 1000', True, 1), Situation('cifar', 'pairwise 40', True, 1),
    Situation('folder', 'misfiled 40', True, 1)], ids=lambda s: s.data)
def test_a_training_is_kept_and_noted_once(tiny, situation):
    left = wrong_labels.stored(situation, 0)
    assert left['logits'].shape==(situation.epochs,len(left['labels']),3 if situation.data in ('rare','folder') else 10)
    for _ in range(2): wrong_labels.note(situation, 0, wrong_labels.stored(situation, 0))
    runs = pd.read_csv(wrong_labels.path)
    assert runs.measure.is_unique
    assert runs.found.between(0, 1).all()
    assert set(runs.wrong)=={int((left['labels']!=left['truth']).sum())}

def test_folds_hand_back_each_item_once(tiny):
    pytest.importorskip('cleanlab', reason='a requirement of the studies: pip install -e .[studies]')
    situation = Situation('folder', 'misfiled 40', True, 1)
    left = wrong_labels.stored(situation, 0, with_folds=True)
    assert torch.allclose(left['held_out'].float().sum(1), torch.ones(len(left['labels'])), atol=1e-2)
    rows = score(left).set_index('measure')
    assert rows.loc['five trainings','listed']==rows.loc['cleanlab','listed']
    assert {'five trainings','cleanlab'}<=set(rows.index)

def test_corrected_labels_are_right_where_they_were_looked_at():
    labels,truth = tensor([1,2,3,4]),tensor([0,2,0,0])
    assert label_remedies.corrected(labels, truth, tensor([0,2])).tolist()==[0,2,0,4]
    assert labels.tolist()==[1,2,3,4]

def test_remedies_run_at_a_tiny_scale(tiny, monkeypatch):
    monkeypatch.setattr(label_remedies, 'rates', (.01,.05))
    monkeypatch.setattr(label_remedies, 'epochs', 1)
    label_remedies.main(seeds=[0], columns=['worst'])
    runs = pd.read_csv(label_remedies.path)
    assert set(runs.method)=={*label_remedies.remedies,*label_remedies.lists}
    n = len(runs)
    label_remedies.main(seeds=[0], columns=['worst'])
    assert len(pd.read_csv(label_remedies.path))==n # nothing is trained twice
