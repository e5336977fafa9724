"A copy of a learner in mid-training goes on as the learner does, with a memory of its own"
import copy, io, pickle

import pytest, torch
from fastai.callback.core import Callback
from fastai.data.core import Datasets
from helpers import *
from selback.core.scoring import ModelCopy

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
    assert learn.selection.epochs_done==other.selection.epochs_done-1
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

class Copies(Callback):
    "Copies its learner at an event of the last epoch"
    order = 70
    def __init__(self, event, how): self.event,self.how,self.made = event,how,None

    def __call__(self, name):
        if name!=self.event or self.learn.lock.locked() or self.epoch!=2 or self.made: return
        self.made = COPIES[self.how](self.learn)

@pytest.mark.parametrize('how', COPIES)
@pytest.mark.parametrize('cls', PATHS.values(), ids=PATHS)
def test_a_copy_from_within_a_fit_goes_on(cls, how):
    learn,copies = new(cls),Copies('after_epoch', how)
    quiet_fit(learn, 3, cbs=copies)
    check_goes_on(learn, copies.made.remove_cb(Copies))

@pytest.mark.parametrize('event', ['before_train','before_batch'])
@pytest.mark.parametrize('cls', PATHS.values(), ids=PATHS)
def test_a_copy_from_within_an_epoch_trains_whole_epochs(cls, event):
    "What lives for an epoch is not in it, nor what waits"
    learn,copies = new(cls),Copies(event, 'pickle')
    quiet_fit(learn, 3, cbs=copies)
    other = copies.made.remove_cb(Copies)
    assert type(other.dl) is TfmdDL
    assert not n_waiting(other.selection)
    assert quiet_fit(other, 1).selection.epochs_done==3
    report = other.selection.stats.query('fit==2')
    assert report.seen.sum()==96
    assert report.trained.sum()==len([i for batch in other.spy.batches for i in batch])

@pytest.mark.parametrize('decay', [0., .5])
def test_a_copy_scores_by_the_stale_model_of_the_learner(decay):
    "Also where that comes up to date before it is asked"
    learn = made(TopLossCallback, scorer=ModelCopy(every=5, decay=decay))
    other = COPIES['pickle'](learn)
    for _ in range(2): check_goes_on(learn, other)

    learn = made(TopLossCallback, scorer=ModelCopy(every=5, decay=decay), end=.99)
    other = COPIES['pickle'](learn)
    for o in (learn,other):
        o.selection.window.start = 2. # nothing is scored
        o.selection.window.end = 3.
    check_goes_on(learn, other)
    for o in (learn,other): o.selection.window.start,o.selection.window.end = 0.,1.
    check_goes_on(learn, other)

def test_labels_go_with_a_copy():
    learn = made(TopLossCallback, track_items=True)
    other = COPIES['pickle'](learn)
    def of(learn): return learn.selection.tracker.labels.state_dict()
    assert is_equal(of(other), of(learn))
    check_goes_on(learn, other)
    assert is_equal(of(other), of(learn))

def test_draws_without_a_seed_go_on():
    set_seed(3)
    method = RandomSubset()
    torch.rand(5, generator=method.draws.on('cpu'))
    other = copy.deepcopy(method)
    drawn = [torch.rand(5, generator=o.draws.on('cpu')) for o in (method,other)]
    assert torch.equal(*drawn)

def test_the_copied_learner_is_the_home_of_its_selection():
    "Taken off and attached again it goes on; on another learner it begins anew"
    learn = made(TopLossCallback, track_items=True)
    other = copy.deepcopy(learn)
    selection = other.selection
    table = copy.deepcopy(table_of(other))
    other.full_batches().add_cb(selection)
    assert is_equal(table_of(other), table)
    assert selection.epochs_done==3
    third = numbered_learner(n=128, cbs=selection)
    assert (third.selection.memory, third.selection.epochs_done)==(None,0)

def test_a_copy_of_a_selection_without_a_learner_begins_anew():
    learn = made(TopLossCallback, track_items=True)
    selection = learn.selection
    learn.full_batches()
    for make in COPIES.values():
        other = numbered_learner(n=128, cbs=make(selection))
        assert (other.selection.memory, other.selection.epochs_done)==(None,0)

def test_an_exported_learner_holds_no_memory(tmp_path):
    "Of 100,000 items"
    dls = Datasets([*range(132)], [[float_of], [label_of]], splits=[range(100), range(100, 132)]).dataloaders(bs=16)
    learn = Learner(dls, mlp(), loss_func=CrossEntropyLossFlat(), path=tmp_path, model_dir='.')
    quiet_fit(learn.early_loss_sampling(track_items=True), 2)
    selection = learn.selection
    selection.tracker.remember_dataset(100_000, id(dls.train_ds))
    selection.tracker.remember_labels(1, (3,))
    selection.early.load_state_dict(dict(epochs=1, steps=4, n=100_000, loss=torch.rand(100_000)))
    assert len(pickle.dumps(learn))>3_000_000
    learn.export('x.pkl')
    learn.save('y')
    assert all((tmp_path/name).stat().st_size<100_000 for name in ('x.pkl','y.pth'))
    assert len(selection.memory)==len(selection.early.loss)==100_000

def float_of(i): return torch.full((4,), i/132)
def label_of(i): return i%3
