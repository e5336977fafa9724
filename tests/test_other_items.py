"What is remembered of items ends with what it is of: their targets, the model, the loss that trains"
import pytest, torch
from helpers import *
from torch.nn import functional as F

N = 48

class Rows:
    "A dataset, whose rows may be others in each epoch"
    def __init__(self, change=None):
        torch.manual_seed(0)
        self.x = torch.randn(N, 4)
        self.y = (2*self.x[:,0]).round().long().clamp(-1, 1)+1
        self.change = change
    def __len__(self): return N
    def __getitem__(self, i): return self.x[i],self.y[i]

class EachEpoch(Callback):
    order = -8
    def before_train(self):
        ds = self.dls.train.dataset
        if ds.change: ds.change(ds, self.epoch)

def learner(cb, change=None, model=None, lr=0., loss_func=None, cbs=()):
    set_seed(0)
    dls = DataLoaders(TfmdDL(Rows(change), bs=8, num_workers=0, shuffle=True), TfmdDL(Rows(), bs=8, num_workers=0))
    return learner_on(dls, model or nn.Linear(4, 3), loss_func=loss_func, cbs=[cb, EachEpoch(), *cbs], lr=lr)

def probabilities(model, ds):
    with torch.no_grad(): return model(ds.x).softmax(1).gather(1, ds.y[:,None])[:,0]

WRONG = torch.arange(0, N, 6)

@pytest.mark.parametrize('n_after', [1,2])
@pytest.mark.parametrize('make', [WatchItemsCallback, lambda: FavorHardCallback(beta=0, track_items=True)])
def test_a_label_that_was_corrected_begins_anew(make, n_after):
    learn = learner(make())
    ds = learn.dls.train.dataset
    right = ds.y.clone()
    ds.y[WRONG] = (ds.y[WRONG]+1)%3
    quiet_fit(learn, 2)
    ds.y.copy_(right)
    quiet_fit(learn, n_after)

    labels,is_corrected = learn.selection.labels,torch.zeros(N, dtype=bool).index_fill(0, WRONG, True)
    assert labels.looks.tolist()==torch.where(is_corrected, n_after, 2+n_after).tolist()
    torch.testing.assert_close(labels.probabilities/labels.looks, probabilities(learn.model, ds))
    losses = F.cross_entropy(learn.model(ds.x), ds.y, reduction='none').detach()
    memory = learn.selection.memory
    torch.testing.assert_close(memory.ewma, losses)
    torch.testing.assert_close(memory.total/memory.seen, losses)

def shuffles(ds, epoch):
    order = torch.randperm(N, generator=torch.Generator().manual_seed(epoch))
    ds.x,ds.y = ds.x[order],ds.y[order]

def draws(ds, epoch):
    generator = torch.Generator().manual_seed(epoch)
    ds.x = torch.randn(N, 4, generator=generator)
    ds.y = torch.randint(0, 3, (N,), generator=generator)

@pytest.mark.parametrize('change', [shuffles,draws])
@pytest.mark.parametrize('make', [lambda: FavorHardCallback(beta=2, warmup=2), lambda: DropEasyCallback(warmup=2),
    lambda: PrioritizedSamplingCallback(warmup=2), lambda: StaleLossCallback(n=3, warmup=2)])
def test_nothing_is_chosen_by_losses_of_other_rows(make, change, capsys):
    learn = quiet_fit(learner(make(), change), 6)
    assert capsys.readouterr().out.count('most items have another target than in the epoch before')==1
    stats = learn.selection.stats.query('epoch>=2 and not scored')
    assert (stats.kept==stats.seen).all()

def flips(ds, epoch): ds.x = -ds.x

def few(ds, epoch): ds.y[epoch] = (ds.y[epoch]+1)%3

@pytest.mark.parametrize('change', [None,flips,few])
def test_rows_that_stay_are_chosen_from(change, capsys):
    learn = quiet_fit(learner(FavorHardCallback(beta=2), change), 5)
    assert 'another target' not in capsys.readouterr().out
    assert (learn.selection.stats.query('epoch>=1').groupby('epoch').kept.sum()<N).all()

def test_masks_that_are_flipped_are_the_same_items(capsys):
    class Masks(Rows):
        def __getitem__(self, i):
            flip = torch.rand(())<.5
            mask = torch.arange(4).reshape(2, 2)+i
            return torch.randn(1, 2, 2),(mask.flip(-1) if flip else mask)%3
    dls = DataLoaders(*[TfmdDL(Masks(), bs=8, num_workers=0) for _ in range(2)])
    learn = Learner(dls, nn.Conv2d(1, 3, 1), loss_func=CrossEntropyLossFlat(axis=1), cbs=FavorHardCallback(beta=2))
    quiet_fit(learn, 4)
    assert 'another target' not in capsys.readouterr().out
    assert learn.selection.stats.query('epoch==3').kept.sum()<N

def test_tokens_that_are_padded_otherwise_are_the_same_items(capsys):
    class Tokens(Rows):
        def __getitem__(self, i): return torch.randn(3, 6),torch.arange(6)%3
    class Pads(Callback):
        order = -8
        def before_batch(self):
            n = 2+self.epoch%4
            self.learn.xb,self.learn.yb = (self.x[...,:n],),(self.y[:,:n],)
    dls = DataLoaders(*[TfmdDL(Tokens(), bs=8, num_workers=0) for _ in range(2)])
    learn = Learner(dls, nn.Conv1d(3, 3, 1), loss_func=CrossEntropyLossFlat(axis=1), cbs=[FavorHardCallback(), Pads()])
    quiet_fit(learn, 4)
    assert 'another target' not in capsys.readouterr().out
    assert learn.selection.stats.query('epoch==3').kept.sum()<N

@pytest.mark.parametrize('passes', [1,2])
def test_targets_are_compared_where_rows_are_chosen_within_a_batch(passes, capsys):
    learn = learner(TopLossCallback(.5, passes=passes, track_items=True, warmup=0), draws)
    quiet_fit(learn, 3)
    assert 'most items have another target' in capsys.readouterr().out

def test_another_model_is_told_of(capsys):
    learn = quiet_fit(learner(FavorHardCallback(beta=2)), 2)
    assert 'the model is another one' not in capsys.readouterr().out
    learn.model = nn.Linear(4, 3)
    quiet_fit(learn.create_opt() or learn, 1)
    assert capsys.readouterr().out.count('the model is another one, and what is remembered of each item goes on')==1
    quiet_fit(learn, 1)
    assert 'the model is another one' not in capsys.readouterr().out

class Distils(Callback):
    "A term that begins in the third epoch"
    order = 60
    def after_loss(self):
        if self.epoch<2 or not self.training: return
        self.learn.loss_grad = self.loss_grad+(self.pred-self.pred.detach().roll(1, 1)).square().mean()
        self.learn.loss = self.learn.loss_grad.clone()

@pytest.mark.parametrize('make', [lambda: FavorHardCallback(beta=2), lambda: TopLossCallback(.5), WatchItemsCallback])
def test_a_term_that_begins_late_is_refused(make):
    learn = learner(make(), lr=.1, cbs=[Distils()])
    with pytest.raises(ValueError, match='with a gradient of its own'): quiet_fit(learn, 4)
    assert learn.epoch==2

def test_a_label_that_was_corrected_since_a_state_was_saved_begins_anew():
    "Where a dataset does not say its labels without loading an item, the state does"
    learn = learner(WatchItemsCallback())
    ds = learn.dls.train.dataset
    ds.y[WRONG] = (ds.y[WRONG]+1)%3
    state = quiet_fit(learn, 2).selection.state_dict()
    other = learner(WatchItemsCallback())
    other.selection.load_state_dict(state)
    assert other.selection.memory.seen.tolist()==[2]*N
    quiet_fit(other, 1)
    wanted = torch.full((N,), 3).index_fill(0, WRONG, 1).tolist()
    assert other.selection.labels.looks.tolist()==other.selection.memory.seen.tolist()==wanted

def test_early_losses_of_corrected_items_are_forgotten():
    learn = quiet_fit(learner(EarlyLossSamplingCallback(after=1, track_items=True)), 1)
    ds = learn.dls.train.dataset
    before = learn.selection.early.loss.clone()
    ds.y[WRONG] = (ds.y[WRONG]+1)%3
    quiet_fit(learn, 3)
    is_same = torch.ones(N, dtype=bool).index_fill(0, WRONG, False)
    early = learn.selection.early.loss
    assert early[WRONG].isnan().any() and torch.equal(early[is_same], before[is_same])

def test_who_watches_is_told_that_targets_are_drawn_anew(capsys):
    quiet_fit(learner(WatchItemsCallback(), draws), 4)
    assert capsys.readouterr().out.count('most items have another target than in the epoch before')==1
