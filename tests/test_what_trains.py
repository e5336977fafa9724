"A loss of one's own: what it says with `reduction='none'` is held against what trains"
from copy import deepcopy
from functools import partial

import pytest, torch
from helpers import *
from selback import functional as plain
from torch.nn import functional as F
from torch.utils.data import DataLoader

IGNORED = 255
N,BS = 48,8

class OwnLoss(nn.Module):
    "A loss with a reduction, as people write them"
    def __init__(self):
        super().__init__()
        self.reduction = 'mean'

    def forward(self, pred, y):
        losses = self.losses(pred, y)
        return losses if self.reduction=='none' else self.mean(losses, y)

    def losses(self, pred, y): return F.cross_entropy(pred, y, reduction='none')
    def mean(self, losses, y): return losses.mean()

class CountsIgnored(OwnLoss):
    "Ignored pixels count in the mean"
    ignore_index = IGNORED
    def losses(self, pred, y): return F.cross_entropy(pred, y, reduction='none', ignore_index=IGNORED)

class LeavesOut(CountsIgnored):
    "They do not count"
    def mean(self, losses, y): return losses.sum()/(y!=IGNORED).sum()

class Drops(OwnLoss):
    "They are dropped before the reduction"
    def losses(self, pred, y):
        losses = F.cross_entropy(pred, y, reduction='none', ignore_index=IGNORED)
        return losses[y!=IGNORED]

WEIGHTS = torch.tensor([1.,1.,20.])

class WeighsMean(OwnLoss):
    "Class weights count in the mean only"
    def mean(self, losses, y): return (losses*WEIGHTS[y]).mean()

class WeighsNormalized(OwnLoss):
    "The same, divided by the sum of weights, as PyTorch does"
    def mean(self, losses, y): return (losses*WEIGHTS[y]).sum()/WEIGHTS[y].sum()

class Weighs(WeighsNormalized):
    "Class weights count everywhere"
    def forward(self, pred, y): return F.cross_entropy(pred, y, weight=WEIGHTS, reduction=self.reduction)

class HardestOnly(OwnLoss):
    "Trains on the hardest quarter, and says nothing of that"
    def mean(self, losses, y): return losses.topk(max(1, losses.numel()//4)).values.mean()

def pixels(n=N, ignored=(1,)):
    "Images of four pixels, and masks, some pixels of which are ignored in some items"
    torch.manual_seed(0)
    x,mask = torch.randn(n, 3, 2, 2),torch.randint(0, 3, (n, 2, 2))
    for i in ignored: mask[i,0] = IGNORED
    return x,mask

def classes(n=N, rare=(3,)):
    "Class 2, which has a weight, is rare"
    torch.manual_seed(0)
    x,y = torch.randn(n, 4),torch.randint(0, 2, (n,))
    y[list(rare)] = 2
    return x,y

def network(of_pixels): return nn.Conv2d(3, 3, 1) if of_pixels else nn.Linear(4, 3)

def learner(loss_func, cb, data, of_pixels):
    torch.manual_seed(1)
    dls = DataLoaders(*[TfmdDL(TensorDataset(*data), bs=BS, num_workers=0) for _ in range(2)])
    return Learner(dls, network(of_pixels), loss_func=loss_func, cbs=cb, lr=1e-3)

METHODS = [TopLossCallback, BatchLossFilterCallback, SelectiveBackpropCallback, FavorHardCallback, WatchItemsCallback]
def new(cls, **kwargs): return cls(**kwargs) if cls is WatchItemsCallback else cls(warmup=0, **kwargs)

REFUSED = dict(
    counts_ignored=(CountsIgnored, True, 'ignored elements'),
    drops=(Drops, True, '8 items along the first dimension'),
    weighs_mean=(WeighsMean, False, 'weights of classes'),
    weighs_normalized=(WeighsNormalized, False, 'weights of classes'),
    hardest_only=(HardestOnly, False, 'gives no loss per item'))

def data_of(of_pixels, **kwargs): return pixels(**kwargs) if of_pixels else classes(**kwargs)

@pytest.mark.parametrize('name', REFUSED)
@pytest.mark.parametrize('cls', METHODS)
def test_a_loss_that_says_other_than_what_trains_is_refused_before_a_step(cls, name):
    make,of_pixels,why = REFUSED[name]
    learn = learner(make(), new(cls), data_of(of_pixels), of_pixels)
    before = [p.detach().clone() for p in learn.model.parameters()]
    with pytest.raises(ValueError, match=why) as e: quiet_fit(learn, 1)
    assert 'Pass item_loss=' in str(e.value)
    for p,was in zip(learn.model.parameters(), before): assert torch.equal(p, was)

@pytest.mark.parametrize('name', REFUSED)
def test_a_plain_loop_refuses_it(name):
    make,of_pixels,why = REFUSED[name]
    loader,model = DataLoader(TensorDataset(*data_of(of_pixels)), BS),network(of_pixels)
    with pytest.raises(ValueError, match=why): [*plain.chosen(loader, model, make(), plain.TopLoss(.25))]

def by_item(of_pixels):
    "What a user passes as `item_loss=`"
    def of_image(pred, y):
        losses = F.cross_entropy(pred, y, reduction='none', ignore_index=IGNORED)
        return losses.flatten(1).mean(1)
    def of_class(pred, y): return F.cross_entropy(pred, y, reduction='none')*WEIGHTS[y]
    return of_image if of_pixels else of_class

@pytest.mark.parametrize('name', REFUSED)
@pytest.mark.parametrize('cls', [TopLossCallback,FavorHardCallback])
def test_the_remedy_helps(cls, name):
    make,of_pixels,_ = REFUSED[name]
    data,item_loss = data_of(of_pixels),by_item(of_pixels)
    learn = learner(make(), new(cls, item_loss=item_loss, track_items=True), data, of_pixels)
    model = deepcopy(learn.model)
    quiet_fit(learn, 1, lr=0.)
    remembered = learn.selection.memory.loss
    seen = ~remembered.isnan()
    with torch.no_grad(): wanted = item_loss(model(data[0]), data[1])
    torch.testing.assert_close(remembered[seen], wanted[seen])
    assert seen.any()

HELD = dict(leaves_out=(LeavesOut, True), weighs=(Weighs, False), own=(OwnLoss, False))

@pytest.mark.parametrize('name', HELD)
@pytest.mark.parametrize('cls', METHODS)
def test_a_loss_that_says_what_trains_is_believed(cls, name):
    make,of_pixels = HELD[name]
    data = data_of(of_pixels)
    learn = learner(make(), new(cls, **{} if cls is WatchItemsCallback else dict(track_items=True)), data, of_pixels)
    model = deepcopy(learn.model)
    quiet_fit(learn, 1, lr=0.)
    remembered = learn.selection.memory.loss
    with torch.no_grad():
        losses = make().losses(model(data[0]), data[1])
        if name=='weighs': losses = losses*WEIGHTS[data[1]]
    counts = (data[1]!=IGNORED).reshape(N, -1).sum(1)
    wanted = losses.reshape(N, -1).sum(1)/counts
    seen = ~remembered.isnan()
    torch.testing.assert_close(remembered[seen], wanted[seen])
    assert seen.sum()>=N//4

@pytest.mark.parametrize('name', ['counts_ignored','drops','weighs_mean'])
@pytest.mark.parametrize('batch,found', [(2,2),(7,7),(12,16)])
def test_what_comes_late_is_refused(name, batch, found):
    "A rare class, or an ignored pixel, is not in the first batches; it is found when their number has doubled"
    make,of_pixels,why = REFUSED[name]
    at = range((batch-1)*BS+2, 20*BS, BS)
    late = dict(ignored=at) if of_pixels else dict(rare=at)
    learn = learner(make(), new(TopLossCallback), data_of(of_pixels, n=20*BS, **late), of_pixels)
    with pytest.raises(ValueError, match=why): quiet_fit(learn, 1)
    assert learn.selection.stats.step.max()<found

def test_losses_of_dropped_elements_are_nobody_elses():
    "With eight pixels dropped the rows of losses still divide by the number of items"
    x,mask = pixels(8)
    mask[:] = torch.randint(0, 3, mask.shape)
    mask[0],mask[1] = IGNORED,IGNORED
    with pytest.raises(ValueError, match='wanted 8 items along the first dimension'):
        plain.item_losses(Drops(), network(True)(x), mask)

@pytest.mark.parametrize('make', [nn.CrossEntropyLoss, CrossEntropyLossFlat, partial(partial, F.cross_entropy)])
def test_class_weights_of_known_losses_are_kept(make):
    "Of PyTorch's and fastai's losses an item's is that with its class's weight"
    data = classes(rare=(3,9,20))
    learn = learner(make(weight=WEIGHTS), FavorHardCallback(), data, False)
    model = deepcopy(learn.model)
    quiet_fit(learn, 1, lr=0.)
    with torch.no_grad(): wanted = F.cross_entropy(model(data[0]), data[1], weight=WEIGHTS, reduction='none')
    torch.testing.assert_close(learn.selection.memory.loss, wanted)

class Ignores(OwnLoss):
    ignore_index = -100
    def forward(self, pred, y): return F.cross_entropy(pred, y, ignore_index=-100, reduction=self.reduction)

def own(pred, y, reduction='mean'): return F.cross_entropy(pred, y, reduction=reduction)

@pytest.mark.parametrize('cls', [TopLossCallback,FavorHardCallback])
def test_an_item_that_is_ignored_as_a_whole_tells_nothing(cls):
    x,y = torch.randn(N, 3, 4),torch.randint(0, 3, (N, 4))
    y[1],y[3,:2] = -100,-100
    learn = learner(Ignores(), new(cls), (x, y), False)
    learn.model = nn.Conv1d(3, 3, 1)
    quiet_fit(learn, 1)

@pytest.mark.parametrize('margin', [0., 20., 40., 200.])
@pytest.mark.parametrize('scale', [1e-15, 1., 1e15])
def test_losses_of_any_size_are_believed(margin, scale):
    x,y = classes()
    def scaled(pred, y, reduction='mean'): return scale*own(pred+margin*F.one_hot(y, 3), y, reduction)
    quiet_fit(learner(scaled, new(TopLossCallback), (x, y), False), 1, lr=0.)

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.one,self.other = nn.Linear(4, 3),nn.Linear(4, 3)
    def forward(self, x): return self.one(x),self.other(x)

@pytest.mark.parametrize('cls', [SelectiveBackpropCallback,FavorHardCallback])
def test_a_term_that_only_the_mean_has_is_refused(cls):
    def with_another(pred, y, reduction='mean'):
        losses = F.cross_entropy(pred[0], y, reduction=reduction)
        return losses+.4*F.cross_entropy(pred[1], y) if reduction=='mean' else losses
    learn = learner(with_another, new(cls), classes(), False)
    learn.model = Two()
    with pytest.raises(ValueError, match='Pass item_loss='): quiet_fit(learn, 1)

def test_a_loss_that_is_no_mean_of_its_items_is_told_in_their_units():
    def root(pred, y, reduction='mean'):
        losses = F.cross_entropy(pred, y, reduction='none')
        return losses if reduction=='none' else losses.mean().sqrt()
    learn = quiet_fit(learner(root, TopLossCallback(.5, warmup=1), classes(), False), 2, lr=0.)
    full = learn.selection.stats.groupby('epoch').full_loss.mean()
    assert full[0]==pytest.approx(full[1], rel=1e-4)
