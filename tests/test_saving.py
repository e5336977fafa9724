"The state of a selection lies beside each model that is saved, and is of the same moment"
import random, warnings

import pytest, torch
from fastai.callback.tracker import EarlyStoppingCallback, SaveModelCallback
from fastai.data.core import Datasets
from fastai.data.transforms import MultiCategorize, OneHotEncode
from helpers import *
from selback.functional import MemorySampler, FavorHard, SelectiveBackprop, TopLoss

def learner(path, **kwargs): return short_learner(path=path).favor_hard(seed=0, **kwargs)

def files(path): return sorted(file.name for file in (path/'models').iterdir())

def epochs_in(path, name):
    "How many epochs a saved selection has done"
    return learner(path).load_selection(name).selection.epochs_done

class Ends(Callback):
    "Has a validation end with given losses"
    order = SaveModelCallback.order-1

    def __init__(self, *losses): self.losses = losses

    def after_epoch(self): self.learn.recorder.values[-1][1] = self.losses[self.epoch]

def test_each_saved_model_has_its_selection(tmp_path):
    quiet_fit(learner(tmp_path), 3, cbs=[SaveSelection(), SaveModelCallback(every_epoch=True)])
    assert files(tmp_path)==[f'model_{i}{end}.pth' for i in range(3) for end in ('','.selection')]
    assert [epochs_in(tmp_path, f'model_{i}') for i in range(3)]==[1,2,3]

def test_the_selection_of_the_best_epoch(tmp_path):
    "Each improvement has the same name; one that stops early saves first"
    cbs = [SaveModelCallback(), SaveSelection(), EarlyStoppingCallback(patience=1), Ends(3., 1., 2., .5)]
    quiet_fit(learner(tmp_path), 4, cbs=cbs)
    assert files(tmp_path)==['model.pth','model.selection.pth']
    assert epochs_in(tmp_path, 'model')==2

def test_a_stopped_training_goes_on_from_its_files(tmp_path):
    "With the items, and to the weights, of one that was not"
    class Stop(Callback):
        def before_epoch(self):
            if self.epoch==2: raise KeyboardInterrupt
    class Seeds(Callback):
        "Each epoch has random states of its own, so that a later one begins as it would have"
        def before_epoch(self):
            set_seed(self.epoch)
            self.learn.dls.train.rng = random.Random(self.epoch)
    def made(): return short_learner(path=tmp_path).prioritized_sampling(seed=0).add_cb(Diary())
    def seeded(learn, *cbs, **kwargs):
        saves = SaveModelCallback(every_epoch=True, with_opt=True),SaveSelection()
        return quiet_fit(learn, 4, cbs=[Seeds(), *saves, *cbs], **kwargs)

    whole = seeded(made())
    with pytest.raises(KeyboardInterrupt): seeded(made(), Stop())
    again = seeded(made().load('model_1').load_selection('model_1'), start_epoch=2)
    assert again.diary.epochs[-2:]==whole.diary.epochs[-2:]
    assert same(weights(again), weights(whole))

def test_a_file_that_is_half_written_leaves_the_older_one(tmp_path, monkeypatch):
    learn = quiet_fit(learner(tmp_path), 1)
    learn.save_selection('model')
    write = torch.save
    def interrupted(state, file):
        write(state, file)
        file.write_bytes(file.read_bytes()[:100])
        raise KeyboardInterrupt
    quiet_fit(learn, 1)
    monkeypatch.setattr(torch, 'save', interrupted)
    with pytest.raises(KeyboardInterrupt): learn.save_selection('model')
    monkeypatch.undo()
    assert learner(tmp_path).load_selection('model').selection.epochs_done==1
    learn.save_selection('model')
    assert files(tmp_path)==['model.selection.pth']
    assert epochs_in(tmp_path, 'model')==2

def test_only_the_first_process_writes(tmp_path, monkeypatch):
    learn = quiet_fit(learner(tmp_path), 1)
    monkeypatch.setenv('RANK', '1')
    path = learn.save_selection('model')
    assert not path.exists()
    monkeypatch.setenv('RANK', '0')
    assert learn.save_selection('model')==path
    assert path.exists()

def test_what_saves_nothing_is_refused(tmp_path):
    saves = SaveModelCallback(every_epoch=True)
    class Late(SaveModelCallback): order = SaveSelection.order
    late = Late(every_epoch=True)
    cases = (short_learner(path=tmp_path), [saves]),(learner(tmp_path), []),(learner(tmp_path), [late])
    for learn,cbs in cases:
        with pytest.raises(ValueError, match='wanted a selection, and a SaveModelCallback of an order below 62'):
            quiet_fit(learn, 1, cbs=[*cbs, SaveSelection()])
    for name in 'save_selection','load_selection':
        with pytest.raises(AttributeError, match='got a learner without a selection'):
            getattr(short_learner(path=tmp_path), name)('model')

# Settings
SAID = 'got a state that was saved with {}, wanted {}; it was loaded'

def loaded(first, then):
    "What is warned of when one loads the state of another"
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter('always')
        then.load_state_dict(first.state_dict())
    return [str(o.message) for o in seen]

def one_warning(first, then, got, wanted):
    text, = loaded(first, then)
    return SAID.format(got, wanted) in text

def selection(**kwargs): return short_learner().favor_hard(**kwargs).selection

def sampler(policy): return MemorySampler(ItemMemory(8), policy)

def test_a_plain_loop_is_told_too():
    assert one_warning(SelectiveBackprop(beta=1), SelectiveBackprop(beta=2), 'beta=1', 'beta=2')
    assert one_warning(TopLoss(keep=.5), TopLoss(keep=.25), 'keep=0.5', 'keep=0.25')
    assert one_warning(sampler(FavorHard(beta=1)), sampler(FavorHard(beta=2)), 'beta=1', 'beta=2')
    assert not loaded(SelectiveBackprop(beta=1), SelectiveBackprop(beta=1, seed=3))
    assert not loaded(sampler(FavorHard()), sampler(FavorHard()))

@pytest.mark.parametrize('name', [
    'favor_hard','selective_backprop','stale_loss','importance_sampling','early_loss_sampling','watch_items'])
def test_what_was_loaded_is_what_was_saved(name, tmp_path):
    options = {} if name=='watch_items' else dict(seed=0, track_items=True)
    def made(): return getattr(short_learner(path=tmp_path), name)(**options)
    learn = quiet_fit(made(), 3)
    learn.save_selection('model')
    assert alike(made().load_selection('model').selection.state_dict(), learn.selection.state_dict())

def test_a_state_of_other_items_is_not_loaded_in_part(tmp_path):
    quiet_fit(learner(tmp_path), 2).save_selection('model')
    other = table_learner(n=80, path=tmp_path).favor_hard(seed=0)
    with pytest.raises(ValueError, match='none of the .* training items was found'): other.load_selection('model')
    assert (other.selection.epochs_done,other.selection.memory)==(0,None)

def test_several_labels_of_other_classes_begin_anew(tmp_path, capsys):
    def made(vocab):
        items = [*range(40)]
        names = [lambda i: ['ant']*(i%2)+['bee']*(i%3>0),MultiCategorize(vocab),OneHotEncode()]
        dls = Datasets(items, [[float_of],names], splits=[items[:32],items[32:]]).dataloaders(bs=8)
        return Learner(dls, nn.Linear(1, len(vocab)), BCEWithLogitsLossFlat(), path=tmp_path).watch_items()
    quiet_fit(made(['ant','bee']), 2).save_selection('model')
    same,other = (made(vocab).load_selection('model').selection for vocab in (['ant','bee'],['ant','bee','cat']))
    assert (same.labels.looks==2).all() and (other.memory.seen==2).all()
    assert other.labels is None
    told = 'Items have several labels of other classes now: what was predicted of them begins anew.\n'
    assert capsys.readouterr().out==told

def float_of(i): return torch.tensor([i/40])

def test_a_selection_without_a_learner_has_no_state():
    learn = quiet_fit(table_learner(cbs=FavorHardCallback()), 1)
    selection = learn.selection
    state = selection.state_dict()
    learn.full_batches()
    for call in selection.state_dict,lambda: selection.load_state_dict(state):
        with pytest.raises(ValueError, match='FavorHardCallback has no learner; attach it first'): call()

@pytest.mark.parametrize('data', [b'', b'text', None], ids=['empty','text','cut'])
def test_a_file_of_another_kind_is_named(data, tmp_path):
    learn = quiet_fit(table_learner().favor_hard(), 1)
    file = learn.save_selection(tmp_path/'mine')
    file.write_bytes(file.read_bytes()[:500] if data is None else data)
    refused = pytest.raises(ValueError, match=r'mine\.selection\.pth, wanted a file that save_selection wrote')
    with refused: learn.load_selection(tmp_path/'mine')
    torch.save(learn.model.state_dict(), file)
    with refused: learn.load_selection(tmp_path/'mine')
