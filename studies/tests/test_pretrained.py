"Fine-tuning at the tiny scale, where a stand-in has random weights: data as described, and runs from beginning to end"

import pytest, torch
from selback.bench.compare import set_seed
from studies import pretrained as p, regimes
from torch import nn

@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setenv('SELBACK_SCALE', 'tiny')
    caches = regimes.cifar_parts,p.enlarged,p.bordered,p.head_trained
    for made in caches: made.cache_clear()
    yield
    for made in caches: made.cache_clear()

@pytest.mark.parametrize('name', p.parts)
def test_it_runs_from_beginning_to_end(name):
    runs,part = p.run_part(name),p.parts[name]
    assert set(runs.method)=={*part.methods, *part.others} | ({'groups known'} if part.has_groups else set())
    assert (runs.groupby('method').seed.nunique()==2).all()
    assert runs.error.notna().all()
    assert runs.budget.nunique()==1
    assert (runs.groupby(['method','seed']).compute.max()>=3*96).all()

def test_no_image_is_in_two_parts_of_the_training_set():
    train,valid,test = p.enlarged()
    assert [len(o[1]) for o in (train,valid,test)]==[96,40,60]
    assert not {*train[2].tolist()} & {*valid[2].tolist()}
    (images,labels),_ = regimes.cifar_parts()
    assert train[1].equal(labels[train[2]])
    assert train[0].equal(images[train[2]]) # at the tiny scale they are as large as before

def test_a_border_is_on_marked_images_only_and_inside_nothing_changes():
    images = torch.randint(255, (4,3,64,64), dtype=torch.uint8)
    marked = p.with_border(images, torch.tensor([1,0,1,0]))
    assert marked[1::2].equal(images[1::2])
    assert marked[0::2,:,4:-4,4:-4].equal(images[0::2,:,4:-4,4:-4])
    for edge in (marked[0::2,:,:4], marked[0::2,:,-4:], marked[0::2,...,:4], marked[0::2,...,-4:]):
        assert (edge[:,0]==255).all()
        assert (edge[:,1:]==0).all()

def test_marks_go_with_the_label_in_training_and_not_in_the_test(monkeypatch):
    n = 20_000
    def many(): return [(torch.zeros(n, 3, 1, 1, dtype=torch.uint8),torch.arange(n)%10,torch.arange(n))]*3
    monkeypatch.setattr(p, 'enlarged', many)
    monkeypatch.setattr(p, 'with_border', lambda images, marks: images)
    agree = [(labels==marks).float().mean() for _,labels,marks in p.bordered()]
    for share,wanted in zip(agree, (.98,.98,.5)): assert abs(share-wanted)<4*(wanted*(1-wanted)/n)**.5

def test_labels_are_wrong_in_training_only():
    rows = p.enlarged()[0][2]
    clean,wrong = p.unmarked(),p.mislabelled()
    assert wrong[0][1].equal(regimes.human_labels('worst')[rows])
    assert .2<(clean[0][1]!=wrong[0][1]).float().mean()<.6
    for part,same in zip(clean[1:], wrong[1:]): assert part[1].equal(same[1])

def weights(learn): return [o.clone() for o in learn.model.parameters()]

def test_a_head_trains_once_for_all_methods_of_a_seed():
    part = p.parts['clean']
    def learner(seed):
        set_seed(seed)
        return part.learner(.003),torch.rand(1)
    (first,draw),(second,same) = learner(0),learner(0)
    assert all(a.equal(b) for a,b in zip(weights(first), weights(second)))
    assert draw==same # whether the head was trained just now or before
    assert p.head_trained.cache_info().hits==1
    other,_ = learner(1)
    assert any(not a.equal(b) for a,b in zip(weights(first), weights(other)))
    assert all(o.requires_grad for o in first.model.parameters())

def changes(learn, freeze):
    "Which parameters a frozen epoch changes, of the body and of the head"
    freeze(learn)
    before = weights(learn)
    with learn.no_bar(),learn.no_logging(): learn.fit(1, .01)
    changed = [not a.equal(b) for a,b in zip(before, weights(learn))]
    n = len([*learn.model[0].parameters()])
    return changed[:n],changed[n:]

def test_a_frozen_body_trains_its_batchnorm_unless_told():
    part = p.parts['clean']
    body,head = changes(part.untrained(), lambda learn: learn.freeze())
    is_batchnorm = [isinstance(o, nn.BatchNorm2d) for o in p.body()[0].modules() for _ in o.parameters(False)]
    assert body==is_batchnorm
    assert any(head)

    body,head = changes(part.untrained(), p.freeze_all)
    assert not any(body)
    assert any(head)

def test_batchnorm_keeps_its_statistics():
    learn = p.parts['clean'].untrained()
    def statistics(): return [o.clone() for name,o in learn.model[0].named_buffers()]
    before = statistics()
    with learn.no_bar(),learn.no_logging(): learn.fit(1, .01)
    assert all(a.equal(b) for a,b in zip(before, statistics()))
    assert learn.model.training==learn.model[1].training
