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

LOOK = dict(top_loss=lambda: TopLossCallback(.5, warmup=0),
    selective_backprop=lambda: SelectiveBackpropCallback(keep=.5, warmup=0),
    ungathered=lambda: SelectiveBackpropCallback(keep=.5, gather=False, warmup=0),
    batch_loss_filter=lambda: BatchLossFilterCallback(.5, warmup=0),
    importance_sampling=lambda: ImportanceSamplingCallback(warmup=0),
    stale_loss=lambda: StaleLossCallback(warmup=0, n=2))
REMEMBER = dict(favor_hard=lambda: FavorHardCallback(warmup=1), info_batch=lambda: InfoBatchCallback(warmup=1),
    watch_items=lambda: WatchItemsCallback())
ALL = LOOK | REMEMBER
ALL_REMEMBER = dict(stale_loss=LOOK['stale_loss']) | REMEMBER
WAIT = {name: LOOK[name] for name in ('selective_backprop','stale_loss','importance_sampling')}
FAST = 'top_loss','favor_hard','watch_items'

def each(methods): return pytest.mark.parametrize('method', mostly_slow(methods, *({*FAST} & {*methods})))

def learner(cb, *cbs, model=None, loss_func=None, data=None, change=None):
    "Without dropout, so that what trains says what was remembered; `change` is a transform of batches"
    set_seed(0)
    x,y = data or class_data(N)
    dls = dls_of(x, y, n_valid=16, after_batch=[ItemTransform(change)] if change else None)
    model = model or nn.Sequential(nn.Linear(x.shape[-1], 8), nn.ReLU(), nn.Linear(8, 3))
    return learner_on(dls, model, loss_func=loss_func, cbs=[cb,*cbs], lr=0.)

def refused(learn, said, n_steps=1):
    "Before the second step, with the true cause and what to do instead"
    with pytest.raises((ValueError, TypeError), match=said): quiet_fit(learn, 2)
    assert learn.epoch==0 and learn.train_iter<=n_steps

def losses_by_hand(learn, loss=F.cross_entropy):
    x,y = learn.dls.train_ds.tensors
    with torch.no_grad(): return loss(learn.model(x.clone()), y, reduction='none')

class Own(nn.Sequential):
    "A model that is no layer of PyTorch"

# Another model in evaluation
class Chances(nn.Linear):
    "Logits in training, what `end` makes of them in evaluation"
    def __init__(self, end):
        super().__init__(4, 3)
        self.end = end
    def forward(self, x):
        h = super().forward(x)
        return h if self.training else self.end(h)

ENDS = dict(sigmoid=torch.sigmoid, softmax=partial(torch.softmax, dim=1),
    log_softmax=partial(torch.log_softmax, dim=1), tanh=torch.tanh)

def ends_in(end, cb):
    x = torch.randn(N, 4)
    several = dict(data=(x, (x[:,:3]>0).float()), loss_func=BCEWithLogitsLossFlat()) if end=='sigmoid' else {}
    return learner(cb, model=Chances(ENDS[end]), **several)

def test_a_plain_loop_refuses_them_too():
    batches = [(torch.randn(8, 4), torch.arange(8)%3) for _ in range(2)]
    with pytest.raises(ValueError, match='got softmax of what it predicts in training'):
        list(chosen(batches, Chances(ENDS['softmax']), F.cross_entropy, TopLoss(.5)))

@pytest.mark.parametrize('end', ['sigmoid','softmax'])
def test_a_list_of_validation_by_probabilities_is_refused(end):
    with pytest.raises(ValueError, match='the model in evaluation mode: got'):
        quiet_fit(ends_in(end, WatchItemsCallback(valid=True)), 2)
    quiet_fit(ends_in(end, WatchItemsCallback()), 2)

# Targets and rows that a later callback sets
class Changes(Callback):
    "Changes each batch"
    order,run_valid = 0,False
    def __init__(self, change): self.change = change
    def before_batch(self): self.learn.xb,self.learn.yb = self.change((self.xb, self.yb))

class Queue:
    "Puts rows of earlier batches in the place of some"
    held = None
    def __call__(self, batch):
        before,self.held = self.held,batch
        if before is None: return batch
        return tuple(tuple(torch.cat([b[:4], a[4:]]) for a,b in zip(*parts)) for parts in zip(batch, before))

def every(f): return lambda batch: tuple(tuple(f(t) for t in part) for part in batch)

def next_label(batch): return batch[0],tuple((y+1)%3 for y in batch[1])

# Rows that a collate or a batch transform sorts, mixes, repeats or drops
def sort_batch(b):
    order = b[0][:,0].argsort()
    return b[0][order],b[1][order]

def mix_labels(b):
    perm = torch.randperm(len(b[0]))
    y = F.one_hot(b[1], 3).float()
    return .6*b[0]+.4*b[0][perm],.6*y+.4*y[perm]
def repeat_rows(b): return tuple(t.repeat_interleave(2, 0) for t in b)
def drop_rows(b): return tuple(t[3:] for t in b)

class Views(nn.Linear):
    "Which of a batch's items is each item's other view? Labels are places in the batch"
    def __init__(self): super().__init__(2, 8)
    def forward(self, x):
        a,b = (F.normalize(super(Views, self).forward(o), dim=1) for o in (x[:,:2],x[:,2:]))
        return a@b.T

def places(b): return b[0],torch.arange(len(b[0]))

def by_place(pred, y): return F.cross_entropy(pred, torch.arange(len(pred)))

# Time first, and state that goes from row to row
class OverTime(nn.Module):
    "An RNN over the first dimension"
    def __init__(self):
        super().__init__()
        self.rnn,self.out = nn.GRU(4, 8),nn.Linear(8, 3)
    def forward(self, x): return self.out(self.rnn(x)[0])

def over_time(cb):
    x = torch.randn(N, 12, 4)
    def time_first(b): return tuple(t.transpose(0, 1) for t in b)
    return learner(cb, model=OverTime(), data=(x,(x[...,0]>0).long()), change=time_first)

class RowToRow(nn.Module):
    "Each row goes on with the state of the one before"
    def __init__(self):
        super().__init__()
        self.cell,self.out = nn.GRUCell(4, 8),nn.Linear(8, 3)
    def forward(self, x):
        found = [torch.zeros(1, 8)]
        for row in x: found.append(self.cell(row[None], found[-1]))
        return self.out(torch.cat(found[1:]))

# Losses of other kinds
class OtherLoss(Callback):
    "Trains on another loss than the loss function's"
    order = 0
    def __init__(self, more): self.more = more
    def after_loss(self):
        if not self.training: return
        self.learn.loss_grad = self.loss_grad+self.more(self.pred, self.y)
        self.learn.loss = self.learn.loss_grad.clone()

def of_predictions(pred, y): return 2*F.cross_entropy(pred, (y+1)%3)

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

def pulls_together(pred, y): return (torch.cdist(pred, pred)*(y[:,None]==y)).mean()

def ignores_in_place(pred, y):
    y[y==2] = 0
    return F.cross_entropy(pred, y)

def lowers_in_place(pred, y):
    pred[torch.arange(len(y)),y] -= .35
    return F.cross_entropy(pred, y)

class ScalesInPlace(Callback):
    run_valid = False
    def after_pred(self):
        with torch.no_grad(): self.pred.mul_(10)

# Loaders that come within an epoch, and rows of one order
class Sets(Callback):
    "Sets another loader as an epoch begins"
    def __init__(self, order): self.order = order
    def before_train(self): self.learn.dl = TfmdDL([*zip(*class_data(64))], bs=16, num_workers=0)

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
    return learner_on(dls, Packs(), cbs=cbs)

# Predictions of other kinds
class Characters(nn.Conv1d):
    "Predicts (time, batch, classes), as CTC takes it"
    def __init__(self): super().__init__(4, 6, 3, padding=1)
    def forward(self, x): return super().forward(x.transpose(1, 2)).permute(2, 0, 1).log_softmax(-1)

def ctc(pred, y, reduction):
    lengths = [torch.full((len(y),), k) for k in (len(pred), y.shape[1])]
    return F.ctc_loss(pred, y, *lengths, reduction=reduction)

class Output:
    "What some models predict: an object, whose rows nobody can take"
    def __init__(self, logits): self.logits = logits

class PredictsObject(nn.Linear):
    def forward(self, x): return Output(super().forward(x))

def of_object(pred, y, reduction): return F.cross_entropy(pred.logits, y, reduction=reduction)

def by_characters(cb):
    data = torch.randn(N, 12, 4),torch.randint(1, 6, (N, 3))
    return learner(cb, model=Characters(), data=data, loss_func=lambda pred, y: ctc(pred, y, 'mean'))

def by_object(cb): return learner(cb, model=PredictsObject(4, 3), loss_func=lambda pred, y: of_object(pred, y, 'mean'))

# What is refused: by which methods, the learner, and what is said
def made(*cbs, **kwargs): return lambda cb: learner(cb, *[make() for make in cbs], **kwargs)

def changes(change): return lambda: Changes(change)

mixed = 'rows that are sorted, shuffled or mixed'
no_items = 'rows are no items of their own|the model failed in the scoring pass'
number = r'learn.xb: got a batch of \d+ items, wanted 16'
no_loss = 'gives no loss per item'
in_place = 'predictions or targets that it changes in place'

REFUSED = {end: (LOOK, partial(ends_in, end), f'got {end} of what it predicts in training') for end in ENDS} | dict(
    other_targets=(LOOK, made(changes(next_label)), 'got other targets'),
    queue=(ALL, made(lambda: Changes(Queue())), 'got other (items in some rows|targets)'),
    shorter=(ALL, made(changes(every(lambda t: t[:3]))), r'got \d+ items, wanted \d+, as handed out'),
    shuffled=(ALL, made(changes(every(lambda t: t.flip(0)))), 'got (rows in other places|other targets)'),
    sort_batch=(REMEMBER, made(change=sort_batch), mixed),
    mix_labels=(REMEMBER, made(change=mix_labels, loss_func=nn.CrossEntropyLoss()), mixed),
    repeat_rows=(ALL_REMEMBER, made(change=repeat_rows), number),
    drop_rows=(ALL_REMEMBER, made(change=drop_rows), number),
    places=(LOOK, lambda cb: learner(cb, model=Views(), change=places), no_items),
    contrast=(ALL, lambda cb: learner(cb, model=Views(), loss_func=by_place), f'{no_loss}|{no_items}'),
    gru=(LOOK, over_time, f'{no_items}|or time comes first'),
    steps_of_time=(REMEMBER, over_time, number),
    row_to_row=(LOOK, lambda cb: learner(cb, model=RowToRow()), no_items),
    another_loss=(ALL, made(lambda: OtherLoss(of_predictions)), 'what trains: got a loss with a gradient'),
    groups=(ALL, lambda cb: learner(cb, loss_func=Groups()), no_loss),
    classes=(ALL, made(loss_func=pulls_together), no_loss),
    targets_in_place=(ALL, made(loss_func=ignores_in_place), in_place),
    loss_in_place=(ALL, made(loss_func=lowers_in_place), in_place),
    callback_in_place=(ALL, made(ScalesInPlace), in_place),
    late_loader=(REMEMBER, made(lambda: Sets(-6)), 'learn.dl: got a .*order below -6'),
    packed=(WAIT, packing, 'got a model that fails where they come in another order.*gather=False'),
    characters=(ALL, by_characters, r'predictions of shape \(12, 16, 6\) for 16 items'),
    objects=(ALL, by_object, 'predictions that are a Output, wanted tensors'))

def refused_cases():
    for kind,(methods,*_) in REFUSED.items():
        for i,method in enumerate(methods): yield (pytest.param if method in FAST or i==0 else slow)(kind, method)

@pytest.mark.parametrize('kind,method', refused_cases())
def test_what_makes_losses_of_other_items_is_refused(kind, method):
    _,make,said = REFUSED[kind]
    refused(make(ALL[method]()), said, n_steps=2 if kind=='queue' else 1) # the second batch has rows of the first

# What is trained, or helps
@pytest.mark.parametrize('method', REMEMBER)
def test_losses_of_what_trains_are_remembered(method):
    "By what a model predicts in training, and of targets that are set later"
    learn = quiet_fit(learner(REMEMBER[method](), model=Chances(ENDS['softmax'])), 2)
    learn.model.train()
    torch.testing.assert_close(learn.selection.memory.loss, losses_by_hand(learn))
    learn = quiet_fit(learner(REMEMBER[method](), Changes(next_label)), 2)
    def of_next(pred, y, **kwargs): return F.cross_entropy(pred, (y+1)%3, **kwargs)
    torch.testing.assert_close(learn.selection.memory.loss, losses_by_hand(learn, of_next))

@pytest.mark.parametrize('kwargs', [
    dict(change=sort_batch),
    dict(model=Own(nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3)))], ids=['sorted','by the batch'])
def test_the_hardest_rows_of_a_batch_train_also_where_items_go_by_each_other(kwargs):
    learn,seen = learner(LOOK['top_loss'](), **kwargs),[]
    watch_choices(learn.selection, lambda batch, scores, losses, chosen: seen.append((batch, chosen.rows)))
    quiet_fit(learn, 1)
    assert len(seen)==4
    for batch,rows in seen:
        losses = F.cross_entropy(learn.model(batch.xb[0]), batch.yb[0], reduction='none')
        assert len(rows)==8 and {*rows.tolist()}=={*losses.topk(8).indices.tolist()}

@pytest.mark.parametrize('method', LOOK)
def test_an_item_loss_may_read_the_batch(method):
    "The items of the batch that is scored, gathered or not"
    at,seen,cb = [],[],LOOK[method]()
    cb.losses.item_loss = lambda pred, y: F.cross_entropy(pred, y, reduction='none')*at[0].xb[0][:,0].abs()
    at.append(learner(cb))
    if not cb.method.before_loading:
        watch_choices(cb, lambda batch, scores, losses, chosen: seen.append((batch, losses)))
    quiet_fit(at[0], 2)
    for batch,losses in seen:
        x,y = batch.xb[0],batch.yb[0]
        wanted = F.cross_entropy(at[0].model(x), y, reduction='none')*x[:,0].abs()
        torch.testing.assert_close(losses, wanted.detach())

@each(ALL)
def test_a_penalty_of_the_weights_is_none(method):
    learn = learner(ALL[method]())
    learn.add_cb(OtherLoss(lambda pred, y: sum(p.square().sum() for p in learn.model.parameters())))
    quiet_fit(learn, 2)

@pytest.mark.parametrize('method', REMEMBER)
def test_a_loader_that_is_set_before_items_are_drawn_is_followed(method):
    memory = quiet_fit(learner(REMEMBER[method](), Sets(-7)), 2).selection.memory
    assert len(memory)==64 and memory.seen.min()>0

def test_an_epoch_that_is_cancelled_is_not_weighed_later():
    class Cancels(Callback):
        order = 70
        def after_train(self): raise CancelEpochException
    learn = quiet_fit(learner(WatchItemsCallback(), Cancels()), 1)
    before = learn.selection.labels.margin.clone()
    for p in learn.model.parameters(): nn.init.zeros_(p)
    learn.validate()
    assert torch.equal(learn.selection.labels.margin, before)

def test_a_loader_of_the_first_items_saves_a_state_of_these():
    def half():
        learn = learner(FavorHardCallback())
        learn.dls.loaders[0] = learn.dls.train.new(n=32)
        return learn
    learn,other = quiet_fit(half(), 1),half()
    other.dls = learn.dls
    other.selection.load_state_dict(quiet_fit(learn, 1).selection.state_dict())
    assert other.selection.memory.loss.equal(learn.selection.memory.loss)
    assert len(other.selection.memory)==32

# A loss whose weights change with the epochs
class Grows(nn.Module):
    "Has a factor that a callback sets"
    factor = 1.
    def forward(self, pred, y): return self.factor*F.cross_entropy(pred, y)

class Each(Callback):
    "Sets something of the loss function as each epoch begins"
    def __init__(self, of, value): self.of,self.value = of,value
    def before_epoch(self): setattr(self.learn.loss_func, self.of, self.value(self.epoch))

units = 'the loss function gives other losses of the same predictions'

@pytest.mark.parametrize('method', mostly_slow(ALL_REMEMBER, 'favor_hard', 'stale_loss'))
@pytest.mark.parametrize('make,name,value', [
    (Grows, 'factor', lambda epoch: 1.+epoch),
    (lambda: nn.CrossEntropyLoss(torch.ones(3)), 'weight', lambda epoch: torch.tensor([1.+epoch, 1., 1.])),
    (lambda: LabelSmoothingCrossEntropy(.3), 'eps', lambda epoch: .3*.5**epoch)], ids=['own','weights','smoothing'])
def test_a_loss_that_changes_with_the_epochs_is_told_of(make, name, value, method, capsys):
    for change,n in (value,1),(lambda epoch: value(0),0):
        quiet_fit(learner(ALL_REMEMBER[method](), Each(name, change), loss_func=make()), 3)
        assert capsys.readouterr().out.count(units)==n

def test_with_item_loss_what_is_remembered_has_one_unit(capsys):
    cb = FavorHardCallback(warmup=1, item_loss=partial(F.cross_entropy, reduction='none'))
    learn = quiet_fit(learner(cb, Each('factor', lambda epoch: 1.+epoch), loss_func=Grows()), 2)
    torch.testing.assert_close(cb.memory.loss, losses_by_hand(learn))
    assert units not in capsys.readouterr().out

# Targets that are other numbers each time
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
    return [*quiet_fit(learn, 5).selection.stats.groupby('epoch').trained.sum()/96]

@pytest.mark.parametrize('seed', range(2))
def test_a_flip_that_negates_targets_leaves_items_what_they_are(seed):
    assert shares(negate, seed=seed)==pytest.approx([1.,.5,.5,.5,.5], abs=.03)

def test_noise_on_targets_is_told_of_and_the_remedy_works(capsys):
    assert shares(add_noise)==pytest.approx([1.,.5,1.,1.,1.], abs=.03) # two epochs tell
    assert capsys.readouterr().out.count('most items have another target than in the epoch before')==1
    class Noise(Callback):
        order,run_valid = 10,False
        def before_batch(self): self.learn.yb = add_noise(None, self.y)[1:]
    assert shares(lambda x, y: (x, y), Noise())==pytest.approx([1.,.5,.5,.5,.5], abs=.03)

# Rows of one order, and of other shapes
@pytest.mark.parametrize('method', ['ungathered','top_loss'])
def test_packed_sequences_are_chosen_within_a_batch(method):
    assert quiet_fit(packing(LOOK[method]()), 2).selection.stats.trained.sum()<.7*2*N

# Losses and models of other kinds
@each(ALL)
@pytest.mark.parametrize('make,loss', [(by_characters, ctc), (by_object, of_object)], ids=['characters','objects'])
def test_item_loss_takes_predictions_that_have_no_rows(make, loss, method):
    cb = ALL[method]()
    cb.losses.item_loss = partial(loss, reduction='none')
    if method=='importance_sampling': return refused(make(cb), "score: got grad_bound|score='loss'") # it goes by rows
    learn = quiet_fit(make(cb), 2)
    if method not in REMEMBER: return
    noted = learn.selection.memory.loss
    torch.testing.assert_close(noted[noted.isfinite()], losses_by_hand(learn, loss)[noted.isfinite()])

class Weighted(nn.Module):
    "Learns how much it weighs itself, as in several tasks"
    def __init__(self):
        super().__init__()
        self.log = nn.Parameter(torch.zeros(1))
    def forward(self, pred, y): return F.cross_entropy(pred, y)*torch.exp(-self.log[0])+self.log[0]

@each(LOOK)
@pytest.mark.parametrize('kind', ['weighted','lazy'])
def test_what_may_be_looked_at_is_chosen_from_by_its_losses(kind, method):
    cb = LOOK[method]()
    learn = learner(cb, **dict(loss_func=Weighted()) if kind=='weighted' else dict(model=Own(nn.LazyLinear(3))))
    def check(batch, scores, losses, chosen):
        wanted = F.cross_entropy(learn.model(batch.xb[0]), batch.yb[0], reduction='none')
        torch.testing.assert_close(losses, wanted.detach())
    if not cb.method.before_loading: watch_choices(cb, check)
    quiet_fit(learn, 1)
