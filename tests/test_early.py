"Draws by the losses of one early epoch: which are kept, for how long, and how often each item comes by them"
import copy, math, random

import pytest, torch
from fastai.callback.core import CancelBatchException, CancelFitException, CancelTrainException, Callback
from fastai.callback.data import WeightedDL
from helpers import *
from torch.nn import functional as F

def losses_in(epoch, n=100):
    "Of each item as it trained, NaN for those that did not"
    losses = torch.full((n,), math.nan)
    for items,_,values in epoch: losses[items] = torch.tensor(values)
    return losses

def counts_in(epochs, n=100): return torch.bincount(torch.tensor([i for e in epochs for i in items_of(e)]), minlength=n)

def is_near(counts, p):
    "Did each item come as often as its probability says, within 4 sigma?"
    n = counts.sum()
    return ((counts/n-p).abs()<=4*(p*(1-p)/n).sqrt()).all()

def kept(learn): return learn.selection.early.loss

# which losses are kept
@pytest.mark.parametrize('after', [1, 2, 3])
def test_the_losses_of_the_epoch_after_are_kept_and_no_later_epoch_changes_them(after):
    learn = with_diary(EarlyLossSamplingCallback(after))
    epochs = trained_only(learn, 5).diary.epochs
    torch.testing.assert_close(kept(learn), losses_in(epochs[after-1]))
    before = kept(learn).clone()
    trained_only(learn, 2)
    assert kept(learn).equal(before)

@pytest.mark.parametrize('after,n_epoch,epoch', [(.1,10,1), (.25,10,3), (.3,10,3), (.31,10,4), (.5,3,2), (.99,2,2)])
def test_a_share_of_the_fit_is_rounded_up_to_an_epochs_end(after, n_epoch, epoch):
    learn = with_diary(EarlyLossSamplingCallback(after))
    epochs = trained_only(learn, n_epoch).diary.epochs
    torch.testing.assert_close(kept(learn), losses_in(epochs[epoch-1]))

def test_epochs_count_over_fits():
    learn = with_diary(EarlyLossSamplingCallback(3))
    trained_only(learn, 2)
    assert kept(learn) is None
    epochs = trained_only(learn, 2).diary.epochs
    torch.testing.assert_close(kept(learn), losses_in(epochs[0]))

def test_an_item_that_did_not_train_counts_as_the_mean():
    "100 items in batches of 32 without the last four"
    learn = with_diary(EarlyLossSamplingCallback(1), linear(), drop_last=True)
    losses = losses_in(trained_only(learn, 1).diary.epochs[0])
    missing = losses.isnan()
    assert missing.sum()==4
    torch.testing.assert_close(learn.selection.early.filled[missing], losses[~missing].mean().expand(4))
    torch.testing.assert_close(learn.selection.early.filled[~missing], losses[~missing])

class Stop(Callback):
    "Ends a fit in the middle of an epoch"
    order = 200
    def __init__(self, epoch): self.at = epoch
    def after_batch(self):
        if self.training and self.epoch==self.at and self.iter==2: raise CancelFitException

def test_an_interrupted_epoch_does_not_count():
    learn = with_diary(EarlyLossSamplingCallback(2))
    trained_only(learn, 3, cbs=Stop(1))
    assert kept(learn) is None
    epochs = trained_only(learn, 2).diary.epochs
    torch.testing.assert_close(kept(learn), losses_in(epochs[0]))

class Cancel(Callback):
    "Cancels training at a batch of the first epoch"
    order = 30
    def __init__(self, event, batch, exception):
        self.batch,self.exception = batch,exception
        setattr(self, event, self.cancel)

    def cancel(self):
        if self.training and self.epoch==0 and self.iter>=self.batch: raise self.exception

@pytest.mark.parametrize('event,batch,exception', [
    ('before_batch', 3, CancelTrainException), # the last one
    ('after_pred', 0, CancelTrainException),
    ('after_pred', 0, CancelBatchException),
    ('before_batch', 0, CancelBatchException)])
def test_an_epoch_that_another_callback_cancels_does_not_count(event, batch, exception):
    learn = with_diary(EarlyLossSamplingCallback(1))
    epochs = trained_only(learn, 2, cbs=Cancel(event, batch, exception)).diary.epochs
    torch.testing.assert_close(kept(learn), losses_in(epochs[1]))

def test_an_epoch_without_a_batch_does_not_count():
    learn = with_diary(EarlyLossSamplingCallback(1), bs=200, drop_last=True)
    trained_only(learn, 1)
    assert kept(learn) is None

def test_an_epoch_without_a_finite_loss_does_not_count():
    learn = with_diary(EarlyLossSamplingCallback(1))
    class Broken(Callback):
        order = -60
        def before_batch(self):
            if self.training and self.epoch==0: self.learn.xb = (self.x*math.nan,)
    learn.diary.after_loss = lambda: None
    with pytest.warns(UserWarning, match='NaN or infinite'): trained_only(learn, 1, cbs=Broken())
    assert kept(learn) is None

def test_epochs_on_another_training_set_do_not_count():
    learn = with_diary(EarlyLossSamplingCallback(2))
    trained_only(learn, 1)
    learn.dls = numbered_learner(n=112).dls
    trained_only(learn, 1)
    assert kept(learn) is None

def test_a_loss_that_mixes_items_is_refused_before_it_is_needed():
    def mixing(pred, y): return F.cross_entropy(pred-pred.mean(0), y)
    learn = with_diary(EarlyLossSamplingCallback(1), net=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)))
    learn.splitter = lambda model: [list(model.net[0].parameters()),list(model.net[1].parameters())]
    learn.freeze()
    learn.loss_func = mixing
    said = 'mixing gives no loss per item: got losses of items that are no shares'
    with pytest.raises(ValueError, match=said): trained_only(learn, 1)

def test_frozen_epochs_do_not_count():
    def parts(model): return [list(model.net[:1].parameters()),list(model.net[1:].parameters())]
    learn = with_diary(EarlyLossSamplingCallback(1))
    learn.splitter = parts
    learn._do_epoch_validate = lambda *args: None
    quiet_fit(learn, 2, fit='fine_tune', freeze_epochs=3)
    torch.testing.assert_close(kept(learn), losses_in(learn.diary.epochs[0])) # the diary is of the last fit
    assert learn.selection.early.epochs==1

def test_where_layers_were_frozen_throughout_that_is_said():
    learn = with_diary(WatchItemsCallback())
    learn.splitter = lambda model: [list(model.net[:1].parameters()),list(model.net[1:].parameters())]
    learn.freeze()
    quiet_fit(learn, 3)
    with pytest.raises(ValueError, match=r'learn.unfreeze\(\) where layers are frozen'): learn.refit_head()

def test_a_training_set_of_another_length_is_remembered_anew():
    learn = with_diary(EarlyLossSamplingCallback(1))
    trained_only(learn, 2)
    other = numbered_learner(n=112)
    learn.dls = other.dls
    epochs = trained_only(learn, 2).diary.epochs
    torch.testing.assert_close(kept(learn), losses_in(epochs[0], 80))

# what trains
@pytest.mark.law(1)
@pytest.mark.parametrize('after,n_epoch', [(2,2), (3,2), (.6,1)])
def test_until_losses_are_kept_training_is_bit_equal_to_plain(after, n_epoch):
    def trained(cb):
        learn = trained_only(numbered_learner(bs=32, cbs=cb), n_epoch)
        return weights(learn),[float(loss) for loss in learn.recorder.losses]
    (plain,plain_losses),(ours,losses) = trained(None),trained(EarlyLossSamplingCallback(after))
    assert same(plain, ours)
    assert losses==plain_losses

@pytest.mark.parametrize('alpha', [0., .5, 1., 2.])
def test_items_come_as_often_as_their_early_loss_says(alpha):
    "Whatever is learned later"
    learn = with_diary(EarlyLossSamplingCallback(1, alpha, seed=0), linear(), bs=50)
    first,*later = trained_only(learn, 61, lr=.05).diary.epochs
    power = losses_in(first)**alpha
    assert all(len(items_of(epoch))==100 for epoch in later)
    assert is_near(counts_in(later), power/power.sum())

@pytest.mark.parametrize('uniform', [.25, 1.])
def test_a_share_keeps_the_epochs_own_order(uniform):
    learn = with_diary(EarlyLossSamplingCallback(1, uniform=uniform, seed=0), linear(), bs=100)
    first,*later = trained_only(learn, 41).diary.epochs
    p = losses_in(first)/losses_in(first).sum()
    n_own = round(100*uniform)
    assert all(len(set(items_of(epoch)))>=n_own for epoch in later)
    if uniform==1: assert all(sorted(items_of(epoch))==[*range(100)] for epoch in later)
    else: assert is_near(counts_in(later), uniform/100+(1-uniform)*p)

def test_weights_of_the_loader_and_early_losses_multiply():
    learn = with_diary(EarlyLossSamplingCallback(1, seed=0), linear())
    plain = learn.dls.train
    wgts = torch.arange(100.)+1
    learn.dls.loaders[0] = WeightedDL(plain.dataset, bs=100, wgts=wgts.numpy(), shuffle=True, num_workers=0)
    first,*later = trained_only(learn, 301, lr=0.).diary.epochs
    assert kept(learn).isnan().any() # some were not drawn in the first epoch
    p = wgts*learn.selection.early.filled
    counts = counts_in(later).float()
    # an epoch's probabilities are in proportion among those that it drew, so near to their product
    assert torch.corrcoef(torch.stack([counts, p]))[0,1]>.97

def test_nothing_is_scored():
    learn = with_diary(EarlyLossSamplingCallback(1))
    read,runs,epochs = reads_and_runs(learn, 3)
    assert runs==sum(map(len, epochs))
    assert sum(read.values())==300

@pytest.mark.parametrize('workers', [0, slow(2)])
@pytest.mark.parametrize('bs,drop_last,sizes', [(16,False,[16]*6+[4]), (16,True,[16]*6), (25,False,[25]*4)])
def test_batches_are_as_many_as_ever(bs, drop_last, sizes, workers):
    learn = with_diary(EarlyLossSamplingCallback(1), bs=bs, drop_last=drop_last, num_workers=workers)
    epochs = trained_only(learn, 3).diary.epochs
    assert [[len(items) for items,*_ in epoch] for epoch in epochs]==[sizes]*3

def test_interrupted_epochs_and_those_after_the_end_are_plain_and_renew_nothing():
    learn = with_diary(EarlyLossSamplingCallback(1, interrupt=3, end=.8))
    epochs = trained_only(learn, 10).diary.epochs
    is_plain = [sorted(items_of(epoch))==[*range(100)] for epoch in epochs]
    assert is_plain==[True,False,True,False,False,True,False,False,True,True]
    torch.testing.assert_close(kept(learn), losses_in(epochs[0]))

def test_options_may_follow_a_schedule():
    learn = with_diary(EarlyLossSamplingCallback(1, uniform=lambda pct: float(pct>=.5)))
    epochs = trained_only(learn, 4).diary.epochs
    assert [sorted(items_of(epoch))==[*range(100)] for epoch in epochs]==[True,False,True,True]

# saved and resumed
@pytest.mark.parametrize('n_before', [1, 2, 3])
def test_a_resumed_training_goes_on_as_an_uninterrupted_one(n_before):
    "Saved before losses are kept, or after"
    def new(): return with_diary(EarlyLossSamplingCallback(2, seed=3), linear())
    whole,first,second = new(),new(),new()
    for learn in (whole,first): trained_only(learn, n_before)
    second.model.load_state_dict(first.model.state_dict())
    second.selection.load_state_dict(copy.deepcopy(first.selection.state_dict()))
    for learn in (whole,second):
        set_seed(5)
        learn.dls.train.rng = random.Random(5)
        learn.opt = None
        trained_only(learn, 4)
    assert whole.diary.epochs==second.diary.epochs
    assert kept(whole).equal(kept(second))

def test_state_of_other_items_is_refused():
    learn,other = with_diary(EarlyLossSamplingCallback(1)),numbered_learner(n=112, cbs=[EarlyLossSamplingCallback(1)])
    trained_only(learn, 1)
    state = learn.selection.state_dict()
    refused = 'a state in which none of the 80 training items was found, wanted one of these'
    with pytest.raises(ValueError, match=refused): other.selection.load_state_dict(state)

# what is remembered besides
def test_last_losses_are_remembered_where_they_are_asked_for():
    options = {},dict(track_items=True)
    without,having = (trained_only(with_diary(EarlyLossSamplingCallback(1, **kwargs)), 3) for kwargs in options)
    with pytest.raises(ValueError, match='pass track_items=True'): without.selection.items()
    last = losses_in(having.diary.epochs[-1])
    trained = ~last.isnan()
    torch.testing.assert_close(having.selection.memory.loss[trained], last[trained])
    torch.testing.assert_close(kept(having), losses_in(having.diary.epochs[0]))
    assert same(*map(weights, (without,having)))

def test_the_report_tells_of_the_losses_that_were_chosen_by():
    learn = with_diary(EarlyLossSamplingCallback(1), linear())
    trained_only(learn, 3)
    row = learn.selection.stats.query('step<0').iloc[-1]
    assert row.full_loss==pytest.approx(kept(learn).mean().item(), rel=1e-4)

# refusals
@pytest.mark.parametrize('kwargs,error,said', [
    (dict(after=0), ValueError, 'after: got 0'),
    (dict(after=-1), ValueError, 'after: got -1'),
    (dict(after=1.5), ValueError, 'after: got 1.5'),
    (dict(after='1'), TypeError, "after: got '1'"),
    (dict(alpha=-1), ValueError, 'alpha: got -1'),
    (dict(uniform=2), ValueError, 'uniform: got 2'),
    (dict(warmup=1), ValueError, 'warmup: got 1, wanted none; after='),
    (dict(gather=True), TypeError, "unknown option 'gather'"),
    (dict(ema=.5), TypeError, "unknown option 'ema'")], ids=str)
def test_options_that_make_no_sense_are_refused(kwargs, error, said):
    with pytest.raises(error, match=said): EarlyLossSamplingCallback(**kwargs)

@pytest.mark.parametrize('after,bs,says', [(1,16,'after=6'), (2,16,'after=6'), (1,2,None), (6,16,None), (8,20,None)])
def test_losses_of_the_first_steps_are_told_of(after, bs, says, capsys):
    "Of a hundred items: 40 steps are six epochs in batches of 16, and less than one in batches of 2"
    trained_only(with_diary(EarlyLossSamplingCallback(after), linear(), bs=bs), 8)
    said = capsys.readouterr().out
    if says is None: assert 'are kept, by the end of which' not in said
    else: assert f'the losses of epoch {after} are kept, by the end of which {7*after} steps were made' in said
    if says: assert f'({says})' in said

# what can be seen
def test_early_items_come_by_their_early_loss():
    learn = with_diary(EarlyLossSamplingCallback(1), drop_last=True)
    with pytest.raises(ValueError, match='early_items: nothing is remembered'): learn.selection.early_items()
    losses = losses_in(trained_only(learn, 3).diary.epochs[0])
    idxs = learn.selection.early_items()
    assert len(idxs)==96
    assert losses[idxs].tolist()==sorted(losses[~losses.isnan()].tolist(), reverse=True)
    assert learn.selection.early_items(5).equal(idxs[:5])

@pytest.mark.parametrize('n,said', [(112, 'got a training set of 80 items, .*wanted the one with 100'),
    (132, 'got a training set of 100 items, of which nothing is remembered')])
def test_items_of_another_training_set_or_without_a_learner_are_refused(n, said):
    "Also of one of the same length"
    learn = trained_only(with_diary(EarlyLossSamplingCallback(1)), 1)
    selection = learn.selection
    learn.dls = numbered_learner(n=n).dls
    with pytest.raises(ValueError, match=said): selection.early_items()
    learn.full_batches()
    with pytest.raises(ValueError, match='show_early: .* was taken off its learner'): selection.show_early()

def test_the_hardest_of_each_class_are_shown_class_by_class():
    import matplotlib.pyplot as plt
    learn = quiet_fit(image_learner(cbs=EarlyLossSamplingCallback(1, track_items=True)), 1)
    labels,by_loss = learn.selection.items().label,learn.selection.early_items().tolist()
    for classes in (None, [2,0], 1):
        learn.selection.show_early(2, classes)
        titles = [ax.get_title() for ax in plt.gcf().axes if ax.get_title()]
        plt.close('all')
        wanted = [0,1,2] if classes is None else classes if isinstance(classes, list) else [classes]
        idxs = [i for c in wanted for i in [i for i in by_loss if labels[i]==c][:2]]
        assert len(titles)==len(idxs)
        for title,i in zip(titles, idxs): assert f'early loss {kept(learn)[i]:.3g}' in title and f'item {i}' in title
    for classes in ([7],[]):
        with pytest.raises(ValueError, match='show_early: got classes .*, wanted some of'):
            learn.selection.show_early(2, classes)

def test_a_fit_that_ends_too_early_says_so(capsys):
    trained_only(with_diary(EarlyLossSamplingCallback(3)), 2)
    said = 'It selects at the earliest from 0% to 100% of a fit, once losses are kept, after=3'
    assert f'this fit trained on all items. {said}' in capsys.readouterr().out
