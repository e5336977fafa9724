"Draws that give rare classes their due: how often each item comes, of which classes, and where these are known from"
import math
from collections import Counter

import numpy as np, pandas as pd, pytest, torch
from fastai.callback.core import Callback
from fastai.data.block import CategoryBlock, RegressionBlock
from fastai.data.core import Datasets
from fastai.data.transforms import Categorize, MultiCategorize, OneHotEncode
from fastai.tabular.core import TabularPandas
from fastai.torch_core import TensorMask
from helpers import *
from selback.core.policies import balanced, balanced_chances
from selback.callback.classes import item_classes
from torch.utils.data import Dataset

nan,inf = math.nan,math.inf

def gen(seed=0): return torch.Generator().manual_seed(seed)

def filled(groups, losses):
    "What is unknown counts as the mean of its class, if that has one"
    known = [loss for loss in losses if math.isfinite(loss)]
    lowest = min([0., *known]) # where some are negative, the lowest counts as 0
    values = []
    for group,loss in zip(groups, losses):
        of_group = [l for g,l in zip(groups, losses) if g==group and math.isfinite(l)]
        mean = sum(of_group)/len(of_group) if of_group else 0.
        values.append((loss if math.isfinite(loss) else mean)-lowest)
    return values

def chances(groups, losses, power, alpha):
    "A class has size^(1-power), an item its share of that by loss^alpha, or an equal one where all count nothing"
    size = Counter(groups)
    of_group = {g: n**(1-power) for g,n in size.items()}
    powers = [value**alpha for value in filled(groups, losses)]
    total = {g: sum(p for p,o in zip(powers, groups) if o==g) for g in size}
    within = [p/total[g] if total[g] else 1/size[g] for p,g in zip(powers, groups)]
    return torch.tensor([of_group[g]*w for g,w in zip(groups, within)]).double()/sum(of_group.values())

def is_near(counts, p):
    "Did each item come as often as its chance says, within 4 sigma?"
    n = counts.sum()
    return ((counts/n-p).abs()<=4*(p*(1-p)/n).sqrt()).all()

def counts_of(rows, n): return torch.bincount(rows, minlength=n)

GROUPS = [0]*12+[7]*4+[3]
LOSSES = dict(
    plain=[.1,.2,3.,1.]*4+[2.],
    unknown=[nan,2.,.1,inf,-inf,4.]*2+[1.,nan,3.,inf,nan],
    zero=[0.]*17,
    zero_in_a_class=[1.,2.]*6+[0.]*5,
    none_known=[nan]*17,
    unknown_class=[1.,2.]*6+[nan]*4+[3.],
    negative=[-1.,0.,2.,1.]*4+[nan],
    huge=[1e38,3e38]*8+[1.])

@pytest.mark.parametrize('power', [0., .5, 1.])
@pytest.mark.parametrize('alpha', [0., .5, 1., 2.])
@pytest.mark.parametrize('losses', LOSSES.values(), ids=LOSSES)
def test_chances_are_those_of_the_formula_and_draws_follow_them(losses, power, alpha):
    groups,loss = torch.tensor(GROUPS),torch.tensor(losses)
    p = chances(GROUPS, losses, power, alpha)
    torch.testing.assert_close(balanced_chances(groups, loss, power, alpha), p, rtol=1e-5, atol=1e-12)
    rows = balanced(groups, loss, power, alpha, 20_000, gen()).rows
    assert is_near(counts_of(rows, 17), p)

def test_how_many_are_drawn():
    groups,empty = torch.tensor([0,0,1]),torch.zeros(0, dtype=torch.int64)
    sizes = [len(o.rows) for o in (balanced(groups), balanced(groups, n=70), balanced(groups, n=0), balanced(empty))]
    assert sizes==[3,70,0,0]
    with pytest.raises(ValueError, match='got no items to draw 3 from'): balanced(empty, n=3)
    with pytest.raises(ValueError, match='got 2 losses for 3 items'): balanced(groups, torch.ones(2))

# in training
UNEVEN = torch.tensor([0]*70+[1]*25+[2]*5)

def learner(*args, labels=UNEVEN, net=None, bs=25, cbs=(), **kwargs):
    "A hundred items, of uneven classes"
    cb = BalancedSamplingCallback(*args, seed=0, **kwargs.pop('options', {}))
    learn = numbered_learner(cbs=[cb, Diary(), *cbs], net=net, bs=bs, **kwargs)
    x,_ = learn.dls.train.dataset.tensors
    learn.dls.train.dataset.tensors = x,labels
    return learn

def drawn(epochs): return counts_of(torch.tensor(sum(map(items_of, epochs), [])), 100)

@pytest.mark.parametrize('power', [1., .5, 0.])
def test_classes_come_as_often_as_their_size_says(power):
    options = dict(power=power) if power else dict(power=power, n=100) # without a number all come once
    epochs = trained_only(learner(options=options), 40).diary.epochs
    assert is_near(drawn(epochs), chances(UNEVEN.tolist(), [1.]*100, power, 0.))
    assert {len(items_of(epoch)) for epoch in epochs}=={100}

@pytest.mark.parametrize('power,alpha', [(1.,1.), (.5,.5), (0.,1.)])
def test_within_a_class_items_come_by_their_last_loss(power, alpha):
    learn = learner(net=linear(), options=dict(power=power, alpha=alpha, warmup=1))
    x,y = learn.dls.train.dataset.tensors
    losses = cross_entropy(learn.model(x), y, reduction='none').tolist()
    epochs = trained_only(learn, 41, lr=0.).diary.epochs
    assert (drawn(epochs[:1])==1).all()
    assert is_near(drawn(epochs[1:]), chances(UNEVEN.tolist(), losses, power, alpha))

NAMED = dict(
    names=['common']*80+['rare']*20,
    pairs=[('a',1)]*80+[('b',1)]*20,
    array=np.array(['common']*80+['rare']*20),
    column=pd.Series(['common']*80+['rare']*20, index=range(100, 200)),
    missing=pd.Series([1.]*80+[nan]*20),
    mixed=['none']*80+[3]*20)

@pytest.mark.parametrize('groups', NAMED.values(), ids=NAMED)
def test_groups_of_ones_own_are_drawn_alike(groups):
    epochs = trained_only(learner(groups), 20).diary.epochs
    assert is_near(drawn(epochs), chances([0]*80+[1]*20, [1.]*100, 1., 0.))

# how many, and by which loader
@pytest.mark.parametrize('n,bs,drop_last,sizes', [
    (60, 25, False, [25,25,10]), (60, 25, True, [25,25]), (250, 100, False, [100,100,50]),
    (51, 25, False, [25,25,2]), # none is left over for a batch of its own
    (51, 25, True, [25,25]), (1, 25, False, [2]), (10, 25, True, [10]), (3, 1, False, [1]*3)])
def test_an_epoch_has_as_many_items_as_asked_for(n, bs, drop_last, sizes):
    net = nn.Linear(4, 3)
    epochs = trained_only(learner(options=dict(n=n), bs=bs, drop_last=drop_last, net=net), 2).diary.epochs
    for epoch in epochs: assert [len(items) for items,*_ in epoch]==sizes

def test_batches_are_mixed():
    "Repeats of the rarest class do not stand side by side"
    epochs = trained_only(learner(), 20).diary.epochs
    of_rarest = [sum(i>=95 for i in items) for epoch in epochs for items,*_ in epoch]
    assert max(of_rarest)<25*.8
    assert min(of_rarest)>0

def test_sizes_are_counted_over_what_the_loader_draws():
    "Of a loader over a part of the items"
    learn = learner()
    part = [*range(60, 80), *range(93, 100)] # of the classes ten, twelve and five
    dl = learn.dls.train
    dl.get_idxs = lambda: part
    epochs = trained_only(learn, 60).diary.epochs
    p = torch.zeros(100).double()
    p[part] = chances(UNEVEN[part].tolist(), [1.]*len(part), 1., 0.)
    assert is_near(drawn(epochs), p)
    assert {len(items_of(epoch)) for epoch in epochs}=={27}

def test_a_loader_may_draw_from_the_first_items_of_a_dataset():
    learn = learner()
    learn.dls.train.n = 95 # without the rarest class
    epochs = trained_only(learn, 20).diary.epochs
    assert is_near(drawn(epochs)[:95], chances(UNEVEN[:95].tolist(), [1.]*95, 1., 0.))
    assert max(sum(map(items_of, epochs), []))<95

def test_nothing_is_looked_at_and_repeats_are_loaded_for_themselves():
    read,runs,epochs = reads_and_runs(learner(), 3)
    assert read==Counter(sum(map(items_of, epochs), []))
    assert (read.total(),runs)==(300,3*4)

def test_all_as_they_are_is_plain_training():
    "Also of targets that are no classes"
    plain,ours = (trained_only(numbered_learner(cbs=cb), 3) for cb in (None, BalancedSamplingCallback(power=0.)))
    assert same(weights(plain), weights(ours))
    trained_only(regression_learner().balanced_sampling(power=0.), 1)

def mean_of_all(pred, y): return (pred-pred.mean(0)).square().mean()+cross_entropy(pred, y)

def test_losses_of_items_are_asked_for_only_where_they_are_drawn_by():
    def made(**options):
        learn = learner(options=options)
        learn.remove_cb(Diary)
        learn.loss_func = mean_of_all
        return learn
    trained_only(made(), 2)
    refused = 'mean_of_all gives no loss per item: got losses of items that are no shares'
    with pytest.raises(ValueError, match=refused): trained_only(made(alpha=1.), 2)
    with pytest.raises(ValueError, match=refused): trained_only(made(track_items=True), 2)

# where classes are known from
class Unread(Dataset):
    "Its inputs can't be loaded"
    def __init__(self, **known): self.__dict__.update(known)
    def __len__(self): return 4
    def __getitem__(self, i): raise AssertionError('an input was loaded')

loads = [] # numbers of the inputs that fastai has loaded

def load(i):
    loads.append(i)
    return torch.zeros(1)

def of_labels(tfms, labels=('b','b','a','b'), **kwargs):
    return Datasets(range(len(labels)), [[load], [lambda i: labels[i], *tfms]], **kwargs)

def table(**columns):
    df = pd.DataFrame(dict(x=[.1,.2,.3,.4]) | columns)
    blocks = dict(y=CategoryBlock(), number=RegressionBlock())
    names = [name for name in columns]
    return TabularPandas(df, cont_names=['x'], y_names=names, y_block=blocks[names[0]], splits=([0,1,2,3],[0]))

MULTI = [['b','c'],['b'],[],['a','b']]
READABLE = dict(
    tensors=lambda: TensorDataset(torch.zeros(4, 2), torch.tensor([5,5,2,5])),
    columns=lambda: TensorDataset(torch.zeros(4, 2), torch.tensor([[5],[5],[2],[5]])),
    flags=lambda: TensorDataset(torch.zeros(4, 2), torch.tensor([[1.],[1.],[0.],[1.]])),
    names=lambda: Unread(targets=['dog','dog','cat','dog']),
    words=lambda: Unread(labels=np.array(['dog','dog','cat','dog'])),
    column=lambda: Unread(targets=pd.Series([3,3,1,3], index=[9,8,7,6])),
    datasets=lambda: of_labels([Categorize()]),
    texts=lambda: of_labels([]),
    subset=lambda: of_labels([Categorize()], 'abbaab', splits=[[1,2,3,5],[0,4]]).train,
    table=lambda: table(y=['dog','dog','cat','dog']).train)

@pytest.mark.parametrize('make', READABLE.values(), ids=READABLE)
def test_classes_are_read_without_loading_inputs(make):
    ds = make()
    loads.clear()
    first,*others = item_classes(ds).tolist()
    assert [o==first for o in others]==[True,False,True]
    assert not loads

@pytest.mark.parametrize('make', [
    lambda: Unread(targets=MULTI),
    lambda: of_labels([MultiCategorize(), OneHotEncode()], MULTI),
    lambda: of_labels([], MULTI)], ids=['lists','encoded','written'])
def test_of_several_labels_the_rarest_counts_however_they_are_written(make):
    "Four items of four classes: two rare labels, the common one alone, and none"
    ds = make()
    loads.clear()
    assert len(set(item_classes(ds).tolist()))==4
    assert not loads

def test_the_rarest_label_of_an_item_is_the_one_that_fewest_have():
    "One is on three items, two and three are on two; of those that are as rare the first counts"
    found = item_classes(of_labels([], [['one','two'],['one'],['one','three','two'],['three'],[]])).tolist()
    assert found[0]==found[2]
    assert len({found[0],found[1],found[3],found[4]})==4
    assert item_classes(Unread(targets=[[]]*4)).tolist()==[0]*4

def masks(): return Datasets(range(4), [[load],[lambda i: TensorMask(torch.zeros(4, 4))]])

def of_targets(y): return TensorDataset(torch.zeros(4, 2), y)

@pytest.mark.parametrize('make', [
    lambda: of_targets(torch.rand(4)),
    lambda: of_targets(torch.rand(4, 2)),
    lambda: of_targets(torch.eye(4)),
    masks,
    lambda: of_labels([], (.1,.2,.3,.4)),
    lambda: Unread(targets=[[1,2],[3],[4],[5]]),
    lambda: Unread(targets=[object()]*4),
    lambda: table(number=[.1,.2,.3,.4]).train,
    lambda: Unread(),
    lambda: Unread(targets=dict(a=1, b=2, c=3, d=4)),
    lambda: Unread(targets=[1,2]),
    lambda: Datasets(range(4), [[load]])])
def test_what_tells_no_classes_is_refused_and_groups_are_asked_for(make):
    with pytest.raises(ValueError, match='balanced_sampling: got .*pass groups='): item_classes(make())

def untrained(learn, said, error=ValueError):
    "Is a fit refused before its first step?"
    before = weights(learn)
    with pytest.raises(error, match=said): trained_only(learn, 2)
    assert same(before, weights(learn))
    assert not sum(learn.diary.epochs, [])

@pytest.mark.parametrize('warmup', [0, 1])
@pytest.mark.parametrize('args,said', [
    ((), 'balanced_sampling: got a TensorDataset whose targets are no classes'),
    (([0]*99,), 'groups: got 99 groups, wanted 100, one for each item of the training set')])
def test_a_fit_without_groups_is_refused_before_its_first_step(args, said, warmup):
    untrained(learner(*args, labels=torch.rand(100), options=dict(warmup=warmup)), said)

def test_numbers_can_be_trained_on_with_groups():
    learn = learner([0]*90+[1]*10, labels=torch.rand(100, 1))
    learn.remove_cb(Diary)
    learn.loss_func = lambda pred,y: (pred[:,:1]-y).square().mean()
    assert trained_only(learn, 2).selection.stats.trained.sum()==200

@pytest.mark.parametrize('groups', [torch.zeros(4, 2), [[1],[2]], [{1},{2}]])
def test_what_is_no_group_is_refused_at_once(groups):
    with pytest.raises(TypeError, match='groups: got items'): BalancedSamplingCallback(groups)

@pytest.mark.parametrize('kwargs', [dict(power=-.1), dict(power=1.1), dict(alpha=-1.), dict(n=0), dict(n=2.5),
    dict(ema=1.), dict(warmup=-1), dict(power=lambda pct: 2+pct)])
def test_numbers_out_of_range(kwargs):
    with pytest.raises(ValueError, match='got .*wanted'): BalancedSamplingCallback(**kwargs)

# over several fits
def test_labels_that_were_corrected_count_from_the_next_fit_on():
    learn = learner()
    trained_only(learn, 1)
    x,_ = learn.dls.train.dataset.tensors
    corrected = UNEVEN.clone()
    corrected[:30] = 2
    learn.dls.train.dataset.tensors = x,corrected
    epochs = trained_only(learn, 30).diary.epochs
    assert is_near(drawn(epochs), chances(corrected.tolist(), [1.]*100, 1., 0.))

# the classes that train
class Renewed(Callback):
    "Calls `renew(learn, epoch)` before each epoch"
    order,run_valid = -6,False
    def __init__(self, renew): self.renew = renew
    def before_train(self): self.renew(self.learn, self.epoch)

def test_where_the_target_is_not_the_last_part_groups_are_asked_for():
    parts = TensorDataset(torch.zeros(100, 5), UNEVEN, (UNEVEN==0).long())
    dls = DataLoaders(*[TfmdDL(parts, bs=25, shuffle=True, num_workers=0) for _ in range(2)])
    dls.n_inp = 1
    learn = Learner(dls, nn.Linear(5, 3), loss_func=lambda pred,*yb: cross_entropy(pred, yb[0]))
    with pytest.raises(ValueError, match='pass groups='): trained_only(learn.balanced_sampling(), 1)
    trained_only(learn.balanced_sampling(UNEVEN), 1)

class Transformed(Dataset):
    "As of torchvision: what it hands out is made of what it has"
    def __init__(self, labels, transform):
        self.targets,self.transform = labels.tolist(),transform
    def __len__(self): return len(self.targets)
    def __getitem__(self, i): return torch.tensor([0.,0,0,0,i]),self.transform(self.targets[i])

def transformed(transform, *args, labels=UNEVEN, **options):
    learn = learner(*args, options=options)
    learn.dls.loaders[0] = TfmdDL(Transformed(labels, transform), bs=25, shuffle=True, num_workers=0)
    return learn

PARTED = dict(
    joined=lambda c: min(c, 1),
    split=lambda c, halves=iter([0,1]*10**4): next(halves),
    as_numbers=lambda c: float(c>0))

@pytest.mark.parametrize('warmup', [0, 1])
@pytest.mark.parametrize('how', PARTED)
def test_other_classes_than_those_that_train_are_refused_before_a_step(how, warmup):
    labels = torch.arange(100)%3 # each batch has all three
    learn = transformed(PARTED[how], labels=labels, warmup=warmup)
    untrained(learn, 'balanced_sampling: got items of one .*, wanted the classes that train; pass groups=')

def test_later_batches_are_compared_now_and_then():
    "Of each epoch the first eight, the 16th and so on"
    seen = []
    def transform(c):
        seen.append(c)
        return 0 if len(seen)>70 else c # from the 15th batch on
    learn = transformed(transform, labels=torch.arange(100)%2)
    learn.dls.loaders[0] = TfmdDL(learn.dls.train.dataset, bs=5, shuffle=True, num_workers=0)
    seen.clear()
    with pytest.raises(ValueError, match='of several that come as one'): trained_only(learn, 1)
    assert [len(epoch) for epoch in learn.diary.epochs]==[15]

@pytest.mark.parametrize('transform', [lambda c: (c+1)%3, lambda c: torch.tensor([(2,0,1)[c]])])
def test_classes_of_other_names_are_the_same(transform):
    learn = transformed(transform)
    learn.remove_cb(Diary)
    learn.add_cb(Spy())
    trained_only(learn, 20)
    p = chances(UNEVEN.tolist(), [1.]*100, 1., 0.)
    assert is_near(counts_of(torch.tensor(sum(learn.spy.batches, [])), 100), p)

def test_own_groups_may_be_other_than_the_classes_that_train():
    learn = transformed(lambda c: min(c, 1), UNEVEN)
    assert is_near(drawn(trained_only(learn, 20).diary.epochs), chances(UNEVEN.tolist(), [1.]*100, 1., 0.))

@pytest.mark.parametrize('is_renewed', [False, True])
def test_labels_that_are_read_one_by_one_are_read_once_a_fit(is_renewed):
    "Such that are renewed within it are refused"
    labels,reads = [*map(str, UNEVEN.tolist())],[]
    def label(i):
        reads.append(i)
        return labels[int(i)]
    def renew(learn, epoch):
        if epoch==1 and is_renewed: labels[:50] = ['1']*50
    ds = Datasets(range(100), [[lambda i: torch.tensor([0.,0,0,0,i])],[label, Categorize(['0','1','2'])]])
    learn = learner(cbs=[Renewed(renew)])
    learn.dls.loaders[0] = TfmdDL(ds, bs=25, shuffle=True, num_workers=0)
    reads.clear()
    if is_renewed:
        with pytest.raises(ValueError, match='labels that were renewed'): trained_only(learn, 3)
        assert [len(epoch) for epoch in learn.diary.epochs]==[4,0]
    else:
        trained_only(learn, 3)
        asked = 16 # of the first batch, whether each row is made of its item
        assert 100<=len(reads)-3*100-asked<110 # beside those that train; fastai reads some, to see what they are

def grow(learn, epoch):
    "Ten more items of a fourth class from the second epoch on"
    if epoch!=1: return
    dl = learn.dls.train
    x,y = dl.dataset.tensors
    new = x[:10].clone()
    new[:,-1] = torch.arange(100., 110.)
    dl.dataset.tensors = torch.cat([x, new]),torch.cat([y, torch.full((10,), 3)])
    dl.n = 110

def test_a_dataset_that_grows_has_the_classes_of_its_new_items():
    learn = learner(net=nn.Linear(4, 4), cbs=[Renewed(grow)])
    epochs = trained_only(learn, 31).diary.epochs[1:]
    p = chances(UNEVEN.tolist()+[3]*10, [1.]*110, 1., 0.)
    assert is_near(counts_of(torch.tensor(sum(map(items_of, epochs), [])), 110), p)

def test_numbers_follow_schedules():
    def rises(pct): return pct
    learn = learner(options=dict(power=rises, alpha=rises, warmup=1), net=linear())
    x,y = learn.dls.train.dataset.tensors
    losses = cross_entropy(learn.model(x), y, reduction='none').tolist()
    asked = []
    class Asks(Callback):
        order,run_valid = 70,False
        def before_train(self):
            if not self.epoch: return
            idxs = torch.arange(100).repeat(40)
            rows = chosen_before_loading(self.learn.selection, idxs).rows
            assert is_near(counts_of(idxs[rows], 100), chances(y.tolist(), losses, self.pct_train, self.pct_train))
            asked.append(self.pct_train)
    trained_only(learn.add_cb(Asks()), 4, lr=0.)
    assert asked==[.25,.5,.75]

def test_picks_are_counted_where_items_are_tracked():
    learn = trained_only(learner(options=dict(track_items=True)), 3)
    assert learn.selection.items().picked.tolist()==drawn(learn.diary.epochs).tolist()

def test_groups_of_a_dataset_that_has_grown_are_refused_as_the_epoch_begins():
    learn = learner(UNEVEN, net=nn.Linear(4, 4), cbs=[Renewed(grow)])
    with pytest.raises(ValueError, match='groups: got 100 groups, wanted 110'): trained_only(learn, 2)
    assert [len(epoch) for epoch in learn.diary.epochs]==[4,0]
