"A copy of a learner between fits goes on as the learner does, with a memory of its own"
import copy, io, pickle

import pytest, torch
from fastai.data.core import Datasets
from helpers import *

def saved(learn):
    file = io.BytesIO()
    torch.save(learn, file)
    file.seek(0)
    return torch.load(file, weights_only=False)

COPIES = dict(deepcopy=copy.deepcopy, pickle=lambda o: pickle.loads(pickle.dumps(o)), torch_save=saved)

def new(cls, **kwargs):
    "It selects from its second epoch on"
    begins = {} if cls is WatchItemsCallback else full_epochs(cls, 1)
    return numbered_learner(n=128, cbs=[cls(**begins, **kwargs), Spy()])

def made(cls, **kwargs): return quiet_fit(new(cls, **kwargs), 3)

def next_epoch(learn):
    set_seed(7)
    quiet_fit(learn, 1)
    return learn.spy.batches,weights(learn),table_of(learn)

def table_of(learn):
    memory = learn.selection.memory
    return None if memory is None else memory.state_dict()

def is_equal(a, b):
    "Bit for bit, NaN for NaN"
    if isinstance(a, dict): return a.keys()==b.keys() and all(is_equal(a[name], b[name]) for name in a)
    if not isinstance(a, torch.Tensor): return a==b
    return torch.equal(a.nan_to_num(-1.), b.nan_to_num(-1.))

def check_goes_on(learn, other):
    "Train both; neither changes what the other remembers"
    before = copy.deepcopy(table_of(learn))
    batches,net,table = next_epoch(other)
    assert is_equal(table_of(learn), before)
    if not learn.selection.is_watching: assert learn.selection.epochs_done==other.selection.epochs_done-1
    wanted = next_epoch(learn)
    assert batches==wanted[0]
    assert is_equal(net, wanted[1])
    assert is_equal(table, wanted[2])
    assert is_equal(table_of(other), table)

@pytest.mark.law
@pytest.mark.parametrize('how', COPIES)
@pytest.mark.parametrize('cls', PATHS.values(), ids=PATHS)
def test_a_copy_goes_on_as_the_learner_does(cls, how):
    learn = made(cls)
    check_goes_on(learn, COPIES[how](learn))

@pytest.mark.law
@pytest.mark.parametrize('cls', methods(), ids=one_liner)
def test_a_copy_of_a_copy_goes_on_with_each_method(cls, capsys):
    "Twice, and what was said is not said again"
    learn = made(cls)
    capsys.readouterr()
    other = copy.deepcopy(saved(learn))
    for _ in range(2): check_goes_on(learn, other)
    said = capsys.readouterr().out.splitlines()
    assert not [line for line in said if 'are kept, by the end' in line or 'another one of as many items' in line]

def test_labels_go_with_a_copy():
    learn = made(TopLossCallback, track_items=True)
    other = COPIES['pickle'](learn)
    def of(learn): return learn.selection.labels.state_dict()
    assert is_equal(of(other), of(learn))
    assert other.selection.items().equals(learn.selection.items())
    check_goes_on(learn, other)
    assert is_equal(of(other), of(learn))

def test_draws_without_a_seed_go_on():
    set_seed(3)
    method = RandomSubset()
    torch.rand(5, generator=method.draws.on('cpu'))
    other = copy.deepcopy(method)
    drawn = [torch.rand(5, generator=o.draws.on('cpu')) for o in (method,other)]
    assert torch.equal(*drawn)

def test_a_selection_of_a_copy_goes_on_when_it_is_attached_again():
    "Another learner is refused as long as it has one"
    learn = made(TopLossCallback, track_items=True)
    other = copy.deepcopy(learn)
    selection = other.selection
    table = copy.deepcopy(table_of(other))
    other.full_batches().add_cb(selection)
    assert is_equal(table_of(other), table)
    assert selection.epochs_done==3
    refused = 'got a TopLossCallback of another learner, wanted one for each learner; make another one'
    with pytest.raises(ValueError, match=refused): numbered_learner(n=128, cbs=selection)

def test_an_exported_learner_holds_no_memory(tmp_path):
    "Of 100,000 items"
    dls = Datasets([*range(132)], [[float_of], [label_of]], splits=[range(100), range(100, 132)]).dataloaders(bs=16)
    learn = learner_on(dls, path=tmp_path, model_dir='.')
    quiet_fit(learn.early_loss_sampling(track_items=True), 2)
    selection = learn.selection
    selection.notes.train.remember_dataset(100_000, id(dls.train_ds))
    selection.notes.train.remember_labels(1, (3,))
    selection.early.load_state_dict(dict(epochs=1, steps=4, n=100_000, loss=torch.rand(100_000)))
    assert len(pickle.dumps(learn))>3_000_000
    learn.export('x.pkl')
    learn.save('y')
    assert all((tmp_path/name).stat().st_size<100_000 for name in ('x.pkl','y.pth'))
    assert len(selection.memory)==len(selection.early.loss)==100_000

def float_of(i): return torch.full((4,), i/132)
def label_of(i): return i%3
