"What a fit's first batch is asked: kinds of models, losses, loaders and callbacks that are right by values, or refused"
from functools import partial

import pytest, torch
from fastai.callback.core import CancelEpochException
from fastai.losses import LabelSmoothingCrossEntropy
from fasttransform import ItemTransform
from helpers import *
from selback.functional import chosen
from torch.nn import functional as F

N = 80

def learner(cb, *cbs, model=None, loss_func=None, data=None, change=None, bs=16, lr=0.):
    "Without dropout, so that what trains says what was remembered; `change` is a transform of batches"
    set_seed(0)
    x,y = data or class_data(N)
    dls = dls_of(x, y, bs=bs, n_valid=16, after_batch=[ItemTransform(change)] if change else None)
    model = model or nn.Sequential(nn.Linear(x.shape[-1], 8), nn.ReLU(), nn.Linear(8, 3))
    return Learner(dls, model, loss_func=loss_func or CrossEntropyLossFlat(), cbs=[cb,*cbs], lr=lr)

LOOK = dict(top_loss=lambda: TopLossCallback(.5, warmup=0),
    selective_backprop=lambda: SelectiveBackpropCallback(keep=.5, warmup=0),
    ungathered=lambda: SelectiveBackpropCallback(keep=.5, gather=False, warmup=0),
    batch_loss_filter=lambda: BatchLossFilterCallback(.5, warmup=0),
    importance_sampling=lambda: ImportanceSamplingCallback(warmup=0),
    stale_loss=lambda: StaleLossCallback(warmup=0, n=2))
REMEMBER = dict(favor_hard=lambda: FavorHardCallback(warmup=1), info_batch=lambda: InfoBatchCallback(warmup=1),
    watch_items=lambda: WatchItemsCallback())
def refused(learn, said):
    "Before the second step, with the true cause and what to do instead"
    with pytest.raises((ValueError, TypeError), match=said): quiet_fit(learn, 2)
    assert learn.epoch==0 and learn.train_iter<=1

def remembered(learn):
    quiet_fit(learn, 2)
    return learn.selection.memory.loss

# 1. Another model in evaluation
class Chances(nn.Module):
    "Logits in training, what `end` makes of them in evaluation"
    def __init__(self, end, n_out=3):
        super().__init__()
        self.layer,self.end = nn.Linear(4, n_out),end
    def forward(self, x):
        h = self.layer(x)
        return h if self.training else self.end(h)

ENDS = dict(sigmoid=torch.sigmoid, softmax=partial(torch.softmax, dim=1),
    log_softmax=partial(torch.log_softmax, dim=1), tanh=torch.tanh)

@pytest.mark.parametrize('end', ENDS)
@pytest.mark.parametrize('method', mostly_slow(LOOK, 'top_loss'))
def test_other_predictions_in_evaluation_are_refused(method, end):
    x = torch.randn(N, 4)
    several = dict(data=(x, (x[:,:3]>0).float()), loss_func=BCEWithLogitsLossFlat()) if end=='sigmoid' else {}
    said = f'the model in evaluation mode: got {end} of what it predicts in training, wanted the same'
    refused(learner(LOOK[method](), model=Chances(ENDS[end]), **several), said)

def test_a_plain_loop_refuses_them_too():
    batches = [(torch.randn(8, 4), torch.arange(8)%3) for _ in range(2)]
    with pytest.raises(ValueError, match='got softmax of what it predicts in training'):
        list(chosen(batches, Chances(ENDS['softmax']), F.cross_entropy, TopLoss(.5)))

@pytest.mark.parametrize('method', REMEMBER)
def test_what_training_predicts_is_remembered(method):
    learn = learner(REMEMBER[method](), model=Chances(ENDS['softmax']))
    x,y = learn.dls.train_ds.tensors
    wanted = F.cross_entropy(learn.model.layer(x), y, reduction='none')
    torch.testing.assert_close(remembered(learn), wanted.detach())

# 2. Targets and rows that a later callback sets
class Changes(Callback):
    "Changes each batch from the `first` on"
    order,run_valid = 0,False
    def __init__(self, change, first=0): self.change,self.first = change,first
    def before_batch(self):
        if self.train_iter<self.first: return
        self.learn.xb,self.learn.yb = self.change((self.xb, self.yb))

class Queue:
    "Puts rows of earlier batches in the place of some"
    def __init__(self): self.held = None
    def __call__(self, batch):
        before,self.held = self.held,batch
        if before is None: return batch
        def some_old(new, old): return tuple(torch.cat([b[:4], a[4:]]) for a,b in zip(new, old))
        return some_old(batch[0], before[0]),some_old(batch[1], before[1])

def every(f): return lambda batch: tuple(tuple(f(t) for t in part) for part in batch)

def sorted_rows(batch):
    order = batch[0][0][:,0].argsort()
    return every(lambda t: t[order])(batch)

def next_label(batch): return batch[0],tuple((y+1)%3 for y in batch[1])

CHANGES = dict(
    other_targets=(lambda: next_label, 'learn.xb, learn.yb: got other targets'),
    queue=(Queue, "learn.xb, learn.yb: got other (items in some rows|targets)"),
    joined=(lambda: every(lambda t: torch.cat([t, t])), r'learn.xb: got \d+ items, wanted \d+, as handed out'),
    shorter=(lambda: every(lambda t: t[:3]), r'learn.xb: got 3 items, wanted \d+, as handed out'),
    sorted=(lambda: sorted_rows, "learn.xb, learn.yb: got (rows in other places|other targets)"),
    shuffled=(lambda: every(lambda t: t.flip(0)), "learn.xb, learn.yb: got (rows in other places|other targets)"))

@pytest.mark.parametrize('method', mostly_slow(LOOK | REMEMBER, 'top_loss', 'favor_hard', 'watch_items'))
@pytest.mark.parametrize('change', CHANGES)
def test_rows_that_a_later_callback_changes_are_refused(change, method):
    make,said = CHANGES[change]
    learn = learner((LOOK | REMEMBER)[method](), Changes(make()))
    if change=='other_targets' and method in REMEMBER: # losses of steps are right by values, as the next test says
        quiet_fit(learn, 2)
        return
    with pytest.raises(ValueError, match=said): quiet_fit(learn, 2)
    assert learn.train_iter<=(2 if change=='queue' else 1)

@pytest.mark.parametrize('method', REMEMBER)
def test_losses_of_targets_that_are_set_later_are_remembered(method):
    learn = learner(REMEMBER[method](), Changes(next_label))
    x,y = learn.dls.train_ds.tensors
    wanted = F.cross_entropy(learn.model(x), (y+1)%3, reduction='none')
    torch.testing.assert_close(remembered(learn), wanted.detach())

# 3. Rows that a collate or a batch transform sorts, and 10. mixes
def sort_batch(b):
    order = b[0][:,0].argsort()
    return b[0][order],b[1][order]

def mix(b):
    perm = torch.randperm(len(b[0]))
    return .6*b[0]+.4*b[0][perm],b[1]

def mix_labels(b):
    perm = torch.randperm(len(b[0]))
    y = F.one_hot(b[1], 3).float()
    return .6*b[0]+.4*b[0][perm],.6*y+.4*y[perm]

def roll(b): return .6*b[0]+.4*b[0].roll(1, 0),b[1]

@pytest.mark.parametrize('method', REMEMBER)
@pytest.mark.parametrize('change', [sort_batch, mix, mix_labels, roll], ids=lambda f: f.__name__)
def test_a_loader_that_sorts_or_mixes_is_refused_by_what_remembers(change, method):
    loss_func = nn.CrossEntropyLoss() if change is mix_labels else None
    learn = learner(REMEMBER[method](), loss_func=loss_func, change=change)
    refused(learn, 'rows that are sorted, shuffled or mixed as a batch is made.*such as top_loss')

def test_the_remedy_for_a_loader_that_sorts():
    "A method that chooses within a batch goes by its rows"
    learn,seen = learner(LOOK['top_loss'](), change=sort_batch),[]
    def note(batch, scores, losses, chosen): seen.append((batch, chosen))
    watch_choices(learn.selection, note)
    quiet_fit(learn, 1)
    for batch,kept in seen:
        losses = F.cross_entropy(learn.model(batch.xb[0]), batch.yb[0], reduction='none')
        assert {*kept.rows.tolist()}=={*losses.topk(len(kept.rows)).indices.tolist()}

# 4. Labels that are places in the batch
class Views(nn.Module):
    "Which of a batch's items is each item's other view? Labels are places"
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 8)
    def seen(self, x): return F.normalize(self.layer(x[:,:2]), dim=1),F.normalize(self.layer(x[:,2:]), dim=1)
    def forward(self, x):
        a,b = self.seen(x)
        return a@b.T

class Features(Views):
    "The loss compares items, and makes labels of their places"
    def forward(self, x): return torch.stack(self.seen(x), 1)

def contrast(pred, y):
    a,b = pred.unbind(1)
    return F.cross_entropy(a@b.T, torch.arange(len(a)))

def places(b): return b[0],torch.arange(len(b[0]))

@pytest.mark.parametrize('method', mostly_slow(LOOK, 'top_loss', 'selective_backprop'))
def test_labels_that_are_places_are_refused(method):
    refused(learner(LOOK[method](), model=Views(), change=places), 'rows are no items of their own')

@pytest.mark.parametrize('method', mostly_slow(LOOK | REMEMBER, 'top_loss', 'favor_hard', 'watch_items'))
def test_a_loss_that_compares_items_is_refused(method):
    learn = learner((LOOK | REMEMBER)[method](), model=Features(), loss_func=contrast)
    refused(learn, 'Pass item_loss=|rows are no items of their own')

# 5. Time first, and 6. state that goes from row to row
class OverTime(nn.Module):
    "An RNN over the first dimension"
    def __init__(self, kind=nn.GRU):
        super().__init__()
        self.rnn,self.out = kind(4, 8),nn.Linear(8, 3)
    def forward(self, x): return self.out(self.rnn(x)[0])

@pytest.mark.parametrize('method', mostly_slow(LOOK, 'top_loss'))
@pytest.mark.parametrize('kind', [nn.GRU, nn.LSTM, nn.RNN])
def test_rows_that_are_steps_of_time_are_refused(kind, method):
    x = torch.randn(N, 12, 4)
    y = (x[...,0]>0).long()
    def time_first(b): return b[0].transpose(0, 1),b[1].transpose(0, 1)
    loss_func = CrossEntropyLossFlat()
    learn = learner(LOOK[method](), model=OverTime(kind), data=(x,y), loss_func=loss_func, change=time_first)
    refused(learn, 'rows are no items of their own|or time comes first')

@pytest.mark.parametrize('method', REMEMBER)
def test_rows_that_are_steps_of_time_are_no_items(method):
    x = torch.randn(N, 12, 4)
    def time_first(b): return b[0].transpose(0, 1),b[1].transpose(0, 1)
    learn = learner(REMEMBER[method](), model=OverTime(), data=(x,(x[...,0]>0).long()), change=time_first)
    refused(learn, 'learn.xb: got a batch of 12 items, wanted 16')

class GoesOn(nn.Module):
    "Keeps the state of the last row for the next batch"
    def __init__(self):
        super().__init__()
        self.cell,self.out,self.h = nn.GRUCell(4, 8),nn.Linear(8, 3),None
    def forward(self, x):
        h = torch.zeros(len(x), 8) if self.h is None else self.h.expand(len(x), -1)
        h = self.cell(x, h)
        self.h = h[-1:].detach()
        return self.out(h)

class RowToRow(GoesOn):
    "Each row goes on with the state of the one before"
    def forward(self, x):
        found,h = [],torch.zeros(1, 8)
        for row in x:
            h = self.cell(row[None], h)
            found.append(h)
        return self.out(torch.cat(found))

class OneForEachRow(GoesOn):
    "Each place of the batch has a state that goes on from batch to batch"
    def forward(self, x):
        self.h = self.cell(x, None if self.h is None else self.h).detach()
        return self.out(self.h)

@pytest.mark.parametrize('method', mostly_slow(LOOK, 'top_loss'))
@pytest.mark.parametrize('model', [RowToRow, OneForEachRow])
def test_state_that_goes_from_row_to_row_is_refused(model, method):
    learn = learner(LOOK[method](), model=model(), bs=16)
    with pytest.raises(ValueError, match='rows are no items of their own|the model failed in the scoring pass'):
        quiet_fit(learn, 1)
    assert learn.train_iter<=1

class BatchNormByBatch(nn.Module):
    "Predicts by the statistics of its batch in evaluation, too, as BatchNorm without running statistics does"
    def __init__(self):
        super().__init__()
        self.norm,self.out = nn.BatchNorm1d(4, track_running_stats=False),nn.Linear(4, 3)
    def forward(self, x): return self.out(self.norm(x))

def test_items_may_go_by_the_others_if_not_by_their_order():
    "The hardest half by the whole batch trains"
    learn = Learner(dls_of(*class_data()), BatchNormByBatch(), loss_func=CrossEntropyLossFlat(), lr=0.)
    learn.top_loss(keep=.5, gather=False, warmup=0)
    seen = []
    watch_choices(learn.selection, lambda batch, scores, losses, chosen: seen.append((batch, chosen.rows)))
    trained_only(learn, 1)
    assert len(seen)==7
    for batch,rows in seen:
        with torch.no_grad(): losses = F.cross_entropy(learn.model(batch.xb[0]), batch.yb[0], reduction='none')
        half = losses.topk(len(rows)).indices
        assert {*rows.tolist()}=={*half.tolist()}
        assert len(rows)==-(-len(losses)//2)

# 9. A loss that reads what the learner trains on
@pytest.mark.parametrize('method', LOOK)
def test_an_item_loss_may_read_the_batch(method):
    "The items of the batch that is scored, gathered or not"
    at = []
    def item_loss(pred, y): return F.cross_entropy(pred, y, reduction='none')*at[0].xb[0][:,0].abs()
    cb = LOOK[method]()
    cb.losses.item_loss = item_loss
    learn,seen = learner(cb),[]
    at.append(learn)
    if isinstance(cb, BatchSelection) and not cb.method.before_loading:
        watch_choices(cb, lambda batch, scores, losses, chosen: seen.append((batch, losses)))
    quiet_fit(learn, 2)
    for batch,losses in seen:
        x,y = batch.xb[0],batch.yb[0]
        wanted = F.cross_entropy(learn.model(x), y, reduction='none')*x[:,0].abs()
        torch.testing.assert_close(losses, wanted.detach())

class OtherLoss(Callback):
    "Trains on another loss than the loss function's"
    order = 0
    def __init__(self, more): self.more = more
    def after_loss(self):
        if not self.training: return
        self.learn.loss_grad = self.loss_grad+self.more(self.pred, self.y)
        self.learn.loss = self.learn.loss_grad.clone()

@pytest.mark.parametrize('method', mostly_slow(LOOK | REMEMBER, 'top_loss', 'favor_hard', 'watch_items'))
def test_another_loss_that_a_callback_sets_is_refused(method):
    def of_predictions(pred, y): return 2*F.cross_entropy(pred, (y+1)%3)
    refused(learner((LOOK | REMEMBER)[method](), OtherLoss(of_predictions)), 'what trains: got a loss with a gradient')

@pytest.mark.parametrize('method', mostly_slow(LOOK | REMEMBER, 'top_loss', 'favor_hard', 'watch_items'))
def test_a_penalty_of_the_weights_is_none(method):
    learn = learner((LOOK | REMEMBER)[method]())
    learn.add_cb(OtherLoss(lambda pred, y: sum(p.square().sum() for p in learn.model.parameters())))
    quiet_fit(learn, 2)

# What comes within an epoch, or in another order
class Sets(Callback):
    "Sets another loader as an epoch begins"
    def __init__(self, order, make): self.order,self.make = order,make
    def before_train(self): self.learn.dl = self.make(self.learn.dl)

def other_items(dl): return TfmdDL([*zip(*class_data(64))], bs=16, num_workers=0)

@pytest.mark.parametrize('method', REMEMBER)
def test_a_loader_that_is_set_after_items_were_drawn_is_refused_and_the_remedy_works(method):
    refused(learner(REMEMBER[method](), Sets(-6, other_items)), 'learn.dl: got a .*order below -6')
    learn = learner(REMEMBER[method](), Sets(-7, other_items))
    quiet_fit(learn, 2)
    assert len(learn.selection.memory)==64
    assert learn.selection.memory.seen.min()>0

@pytest.mark.parametrize('missing', ['after_pred','after_loss','after_backward'])
def test_a_step_that_leaves_out_an_event_is_refused(missing):
    class Own(Learner):
        def __call__(self, event): return None if event==missing else super().__call__(event)
    dls = dls_of(*class_data(N), n_valid=16)
    learn = Own(dls, mlp(), loss_func=CrossEntropyLossFlat(), cbs=FavorHardCallback())
    refused(learn, 'a step of Own: got not all of the events after_pred, after_loss and after_backward')

def test_an_epoch_that_is_cancelled_is_not_weighed_later():
    class Cancels(Callback):
        order = 70
        def after_train(self): raise CancelEpochException
    learn = learner(WatchItemsCallback(), Cancels())
    quiet_fit(learn, 1)
    before = learn.selection.labels.margin.clone()
    for p in learn.model.parameters(): nn.init.zeros_(p)
    learn.validate()
    assert torch.equal(learn.selection.labels.margin, before)

def test_a_loader_of_the_first_items_saves_a_state_of_these():
    def half():
        dls = dls_of(*class_data(N), n_valid=16)
        dls.loaders[0] = dls.train.new(n=32)
        return Learner(dls, mlp(), loss_func=CrossEntropyLossFlat(), cbs=FavorHardCallback())
    learn,other = quiet_fit(half(), 1),half()
    other.dls = learn.dls
    other.selection.load_state_dict(quiet_fit(learn, 1).selection.state_dict())
    assert other.selection.memory.loss.equal(learn.selection.memory.loss)
    assert len(other.selection.memory)==32

def repeat_rows(b): return tuple(t.repeat_interleave(2, 0) for t in b)
def drop_rows(b): return tuple(t[3:] for t in b)
def append_row(b): return tuple(torch.cat([t, t[:1]]) for t in b)

ALL_REMEMBER = REMEMBER | dict(stale_loss=LOOK['stale_loss'])

@pytest.mark.parametrize('method', mostly_slow(ALL_REMEMBER, 'favor_hard', 'stale_loss'))
@pytest.mark.parametrize('change', [repeat_rows, drop_rows, append_row], ids=lambda f: f.__name__)
def test_a_transform_that_changes_the_number_of_rows_is_refused_by_what_remembers(change, method):
    learn = learner((LOOK | REMEMBER)[method](), change=change)
    refused(learn, r'learn.xb: got a batch of \d+ items, wanted 16; a callback or transform')

# 11. A loss whose weights change with the epochs
class Grows(nn.Module):
    "Has a factor that a callback sets"
    factor = 1.
    def forward(self, pred, y): return self.factor*F.cross_entropy(pred, y)

class Each(Callback):
    "Does something to the loss function as each epoch begins"
    def __init__(self, change): self.change = change
    def before_epoch(self): self.change(self.learn.loss_func, self.epoch)

def grow(loss_func, epoch): loss_func.factor = 1.+epoch
def weigh(loss_func, epoch): loss_func.weight = torch.tensor([1.+epoch, 1., 1.])
def smooth(loss_func, epoch): loss_func.eps = .3*.5**epoch
def leave(loss_func, epoch): pass
units = 'the loss function gives other losses of the same predictions'

@pytest.mark.parametrize('method', mostly_slow(ALL_REMEMBER, 'favor_hard', 'stale_loss'))
@pytest.mark.parametrize('make,change', [(Grows, grow), (lambda: nn.CrossEntropyLoss(torch.ones(3)), weigh),
    (lambda: LabelSmoothingCrossEntropy(.3), smooth)], ids=['own','weights','smoothing'])
def test_a_loss_that_changes_with_the_epochs_is_told_of(make, change, method, capsys):
    quiet_fit(learner(ALL_REMEMBER[method](), Each(change), loss_func=make()), 3)
    assert capsys.readouterr().out.count(units)==1
    quiet_fit(learner(ALL_REMEMBER[method](), Each(leave), loss_func=make()), 3)
    assert units not in capsys.readouterr().out

def test_with_item_loss_what_is_remembered_has_one_unit(capsys):
    plain = partial(F.cross_entropy, reduction='none')
    learn = learner(FavorHardCallback(warmup=1, item_loss=plain), Each(grow), loss_func=Grows())
    x,y = learn.dls.train_ds.tensors
    torch.testing.assert_close(remembered(learn), plain(learn.model(x), y).detach())
    assert units not in capsys.readouterr().out

# 12. Targets that are other numbers each time
class Varying:
    "Numbers, of which `change` makes others"
    def __init__(self, change, n=96):
        self.x,self.change = torch.randn(n, 4),change
        self.y = self.x.sum(1)
    def __len__(self): return len(self.x)
    def __getitem__(self, i): return self.change(self.x[i], self.y[i])

def negate(x, y):
    sign = 1. if torch.rand(())<.5 else -1.
    return sign*x,sign*y

def add_noise(x, y): return x,y+.1*torch.randn(())

def shares(change, *cbs, seed=0):
    "Which part of the items trained in each epoch, with half of them chosen"
    set_seed(seed)
    dls = DataLoaders(*[TfmdDL(Varying(change), bs=16, shuffle=True, num_workers=0) for _ in range(2)])
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1), nn.Flatten(0))
    learn = Learner(dls, net, loss_func=MSELossFlat(), cbs=[FavorHardCallback(warmup=1), *cbs], lr=1e-2)
    quiet_fit(learn, 5)
    return [*learn.selection.stats.groupby('epoch').trained.sum()/96]

@pytest.mark.parametrize('seed', range(4))
def test_a_flip_that_negates_targets_leaves_items_what_they_are(seed):
    assert shares(negate, seed=seed)==pytest.approx([1.,.5,.5,.5,.5], abs=.03)

def test_noise_on_targets_is_told_of_and_the_remedy_works(capsys):
    assert shares(add_noise)==pytest.approx([1.,.5,1.,1.,1.], abs=.03) # two epochs tell
    said = capsys.readouterr().out
    assert said.count('most items have another target than in the epoch before')==1
    assert 'have a callback add it in before_batch' in said
    class Noise(Callback):
        order,run_valid = 10,False
        def before_batch(self): self.learn.yb = add_noise(None, self.y)[1:]
    assert shares(lambda x, y: (x, y), Noise())==pytest.approx([1.,.5,.5,.5,.5], abs=.03)

# 13. Rows of one order, and of other shapes
class Packs(nn.Module):
    "Takes sequences only if the longest comes first"
    def __init__(self):
        super().__init__()
        self.rnn,self.out = nn.GRU(4, 8, batch_first=True),nn.Linear(8, 3)
    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return self.out(self.rnn(packed)[1][0])

class LongestFirst(ItemTransform):
    def encodes(self, b):
        order = b[1].argsort(descending=True)
        return tuple(t[order] for t in b)

def packing(*cbs):
    set_seed(0)
    x,lengths = torch.randn(N, 9, 4),torch.randint(2, 10, (N,))
    dls = DataLoaders(*[TfmdDL([*zip(x, lengths, (x[:,0,0]>0).long())], bs=16, num_workers=0,
        after_batch=[LongestFirst()]) for _ in range(2)])
    for dl in dls.loaders: dl._n_inp = 2
    return Learner(dls, Packs(), loss_func=CrossEntropyLossFlat(), cbs=cbs)

@pytest.mark.parametrize('method', ['selective_backprop','stale_loss','importance_sampling'])
def test_packed_sequences_do_not_wait_for_each_other(method):
    said = 'items that wait for a full batch: got a model that fails where they come in another order.*gather=False'
    refused(packing(LOOK[method]()), said)

@pytest.mark.parametrize('method', ['ungathered','top_loss'])
def test_packed_sequences_are_chosen_within_a_batch(method):
    learn = packing(LOOK[method]())
    quiet_fit(learn, 2)
    assert learn.selection.stats.trained.sum()<.7*2*N

def test_images_that_grow_within_an_epoch_do_not_wait_for_each_other():
    grown = iter(range(1000))
    def grow(b): return F.interpolate(b[0], size=8+next(grown)//2),b[1]
    x = torch.randn(N, 1, 8, 8)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    learn = learner(LOOK['selective_backprop'](), model=net, data=(x,torch.arange(N)%3), change=grow)
    with pytest.raises(ValueError, match=r'items of shape \(1, 8, 8\) and \(1, 9, 9\).*gather=False'):
        quiet_fit(learn, 2)
    quiet_fit(learner(LOOK['ungathered'](), model=net, data=(x,torch.arange(N)%3), change=grow), 2)

# Losses and models of other kinds
class Characters(nn.Module):
    "Predicts (time, batch, classes), as CTC takes it"
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv1d(4, 6, 3, padding=1)
    def forward(self, x): return self.layer(x.transpose(1, 2)).permute(2, 0, 1).log_softmax(-1)

def by_characters(pred, y, reduction='none'):
    lengths = [torch.full((len(y),), k) for k in (len(pred), y.shape[1])]
    return F.ctc_loss(pred, y, *lengths, reduction=reduction)

def ctc(pred, y): return by_characters(pred, y, reduction='mean')

@pytest.mark.parametrize('method', mostly_slow(LOOK | REMEMBER, 'top_loss', 'favor_hard', 'watch_items'))
def test_predictions_with_time_first_are_named_and_item_loss_takes_them(method):
    data = torch.randn(N, 12, 4),torch.randint(1, 6, (N, 3))
    def made(cb): return learner(cb, model=Characters(), data=data, loss_func=ctc)
    cb = (LOOK | REMEMBER)[method]()
    refused(made(cb), r'predictions of shape \(12, 16, 6\) for 16 items, wanted a row for each item, not time first')
    if method=='importance_sampling': return # weighs rows, of which there are none
    cb = (LOOK | REMEMBER)[method]()
    cb.losses.item_loss = by_characters
    quiet_fit(made(cb), 2)

class Groups(nn.Module):
    "The worst groups weigh most, by what they have lost before (group DRO)"
    def __init__(self):
        super().__init__()
        self.register_buffer('weights', torch.ones(3)/3)
    def forward(self, pred, y):
        losses = F.cross_entropy(pred, y, reduction='none')
        of_groups = torch.stack([losses[y==k].sum()/max(1, (y==k).sum()) for k in range(3)])
        with torch.no_grad(): self.weights *= of_groups.exp()
        return (self.weights*of_groups).sum()/self.weights.sum()

class Running(nn.Module):
    "A share of the mean of the losses before"
    mean = 1.
    def forward(self, pred, y):
        loss = F.cross_entropy(pred, y)
        self.mean = .9*self.mean+.1*float(loss.detach())
        return loss/self.mean

class PullsTogether(nn.Module):
    "Items of one class are to be near each other"
    def forward(self, pred, y): return (torch.cdist(pred, pred)*(y[:,None]==y)).mean()

def ignores_in_place(pred, y):
    y[y==2] = 0
    return F.cross_entropy(pred, y)

LOSSES = dict(groups=(Groups, 'gives no loss per item'), running=(Running, 'gives no loss per item'),
    classes=(PullsTogether, 'gives no loss per item'),
    in_place=(lambda: ignores_in_place, 'predictions or targets that it changes in place'))

@pytest.mark.parametrize('method', mostly_slow(LOOK | REMEMBER, 'top_loss', 'favor_hard', 'watch_items'))
@pytest.mark.parametrize('name', LOSSES)
def test_losses_by_groups_or_with_a_state_are_refused(name, method):
    make,said = LOSSES[name]
    refused(learner((LOOK | REMEMBER)[method](), loss_func=make()), said)

class Weighted(nn.Module):
    "Learns how much it weighs itself, as in several tasks"
    def __init__(self):
        super().__init__()
        self.log = nn.Parameter(torch.zeros(1))
    def forward(self, pred, y): return F.cross_entropy(pred, y)*torch.exp(-self.log[0])+self.log[0]

class WritesInput(nn.Module):
    "Doubles its input in place"
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
    def forward(self, x): return self.layer(x.mul_(2))

class Lazy(nn.Module):
    "Makes its weights in the first pass"
    def __init__(self):
        super().__init__()
        self.layer = nn.LazyLinear(3)
    def forward(self, x): return self.layer(x)

class Filled(nn.Module):
    "Keeps a queue of what it predicted in training"
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer('queue', torch.zeros(32, 3))
    def forward(self, x):
        h = self.layer(x)
        self.queue.copy_(torch.cat([self.queue, h.detach()])[-32:])
        return h

OTHERS = dict(weighted=dict(loss_func=Weighted), in_place=dict(model=WritesInput), lazy=dict(model=Lazy),
    queue=dict(model=Filled))

@pytest.mark.parametrize('method', mostly_slow(LOOK, 'top_loss'))
@pytest.mark.parametrize('name', OTHERS)
def test_what_may_be_looked_at_is_chosen_from_by_its_losses(name, method):
    "Each batch is that of the dataset, and its losses are those of the model that trains"
    cb,found = LOOK[method](),[]
    learn = learner(cb, **{key: make() for key,make in OTHERS[name].items()})
    if not cb.method.before_loading:
        watch_choices(cb, lambda batch, scores, losses, chosen: found.append((batch, losses)))
    quiet_fit(learn, 1)
    x,y = learn.dls.train_ds.tensors
    for batch,losses in found:
        rows = (batch.xb[0][:,None]==x).all(-1).long().argmax(1)
        assert torch.equal(batch.xb[0], x[rows]) and torch.equal(batch.yb[0], y[rows])
        with torch.no_grad(): wanted = F.cross_entropy(learn.model(x.clone()), y, reduction='none')
        torch.testing.assert_close(losses, wanted[rows])

@pytest.mark.parametrize('end', ['sigmoid','softmax'])
def test_a_list_of_validation_by_probabilities_is_refused(end):
    x = torch.randn(N, 4)
    several = dict(data=(x, (x[:,:3]>0).float()), loss_func=BCEWithLogitsLossFlat()) if end=='sigmoid' else {}
    learn = learner(WatchItemsCallback(valid=True), model=Chances(ENDS[end]), **several)
    with pytest.raises(ValueError, match=f'the model in evaluation mode: got {end} of what it predicts in training'):
        quiet_fit(learn, 2)
    quiet_fit(learner(WatchItemsCallback(), model=Chances(ENDS[end]), **several), 2)

class Output:
    "What some models predict: an object, whose rows nobody can take"
    def __init__(self, logits): self.logits = logits

class PredictsObject(nn.Linear):
    def forward(self, x): return Output(super().forward(x))

@pytest.mark.parametrize('method', mostly_slow(LOOK | REMEMBER, 'top_loss', 'favor_hard', 'watch_items'))
def test_predictions_that_are_an_object_are_named_and_item_loss_takes_them(method):
    def loss(pred, y, reduction='mean'): return F.cross_entropy(pred.logits, y, reduction=reduction)
    def made(cb): return learner(cb, model=PredictsObject(4, 3), loss_func=lambda pred, y: loss(pred, y))
    refused(made((LOOK | REMEMBER)[method]()), 'predictions that are a Output, wanted tensors')
    cb = (LOOK | REMEMBER)[method]()
    cb.losses.item_loss = partial(loss, reduction='none')
    if method=='importance_sampling': return refused(made(cb), "use score='loss'") # it goes by rows
    learn = made(cb)
    quiet_fit(learn, 2)
    if method in REMEMBER:
        x,y = learn.dls.train_ds.tensors
        with torch.no_grad(): wanted = loss(learn.model(x), y, reduction='none')
        noted = learn.selection.memory.loss
        torch.testing.assert_close(noted[noted.isfinite()], wanted[noted.isfinite()])
