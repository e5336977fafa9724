"Which item is which: the dataset index of every row"

import random, traceback

import pytest, torch
from fastai.callback.core import Callback
from fastai.callback.data import PartialDL, WeightedDL
from fastai.data.load import DataLoader, SkipItemException
from fastai.distributed import DistributedDL
from fastai.text.data import LMDataLoader, SortedDL
from helpers import *
from selback.callback.loaders import check_loader, drawn, load, own_order, shuffled

class Numbered:
    "Each item says its own number; reads are noted"
    def __init__(self, n=50):
        self.n = n
        self.reads = []
    def __len__(self): return self.n
    def __getitem__(self, i):
        self.reads.append(int(i))
        return torch.full((4,), float(i)),torch.tensor(int(i)%3)

def rows(dl): return [x[:,0].long().tolist() for x,_ in dl]

def batches_of(idxs, bs=8): return [idxs[i:i+bs].tolist() for i in range(0, len(idxs), bs)]

def epoch_items(dl, keep=None):
    "A loader for one epoch of the items that a mask keeps, and their indices"
    idxs = drawn(dl)
    return load(dl, idxs if keep is None else idxs[keep(idxs)])

def epoch_items(dl, keep=None):
    "A loader for one epoch of the items that a mask keeps, and their indices"
    idxs = drawn(dl)
    return load(dl, idxs if keep is None else idxs[keep(idxs)])

@pytest.mark.law(8)
@pytest.mark.parametrize('shuffle,num_workers,persistent', [
    (False,0,False),
    (True,0,False),
    (True,2,False),
    (True,2,True)])
@pytest.mark.parametrize('drop_last', [True, False])
def test_rows_are_the_items(shuffle, drop_last, num_workers, persistent):
    workers = dict(num_workers=num_workers, persistent_workers=persistent)
    base = TfmdDL(Numbered(), bs=8, shuffle=shuffle, drop_last=drop_last, **workers)
    for keep in (None, lambda idxs: idxs%3!=0):
        dl,idxs = epoch_items(base, keep)
        got = rows(dl)
        assert len(got)==len(dl)
        assert got==batches_of(idxs)[:len(dl)]
        assert sum(map(len, got))==(len(idxs)//8*8 if drop_last else len(idxs))
        assert dl.fake_l.persistent_workers==persistent
        assert keep is None or not [i for i in sum(got, []) if i%3==0]

def plain_dl(): return TfmdDL(Numbered(), bs=8, shuffle=True, num_workers=0)
def weighted_dl(): return WeightedDL(Numbered(), bs=8, wgts=range(1,51), shuffle=True, num_workers=0)
def sorted_dl(sign=1, **kwargs):
    return SortedDL(Numbered(), sort_func=lambda o: sign*o[0][0], bs=8, num_workers=0, **kwargs)

@pytest.mark.parametrize('make', [
    weighted_dl,
    lambda: PartialDL(Numbered(), bs=8, partial_n=21, num_workers=0),
    lambda: sorted_dl(-1),
    lambda: DataLoader(Numbered(), bs=8, shuffle=True)], ids=['weighted','partial','sorted','plain'])
def test_other_loaders(make):
    dl,idxs = epoch_items(make())
    assert sum(rows(dl), [])==idxs.tolist()

@pytest.mark.parametrize('make', [
    plain_dl,
    weighted_dl,
    lambda: sorted_dl(shuffle=True)])
def test_the_copy_draws_what_the_loader_would(make):
    def epochs(copy):
        set_seed(0)
        dl = make()
        return [rows(epoch_items(dl)[0] if copy else dl) for _ in range(3)],random_states()
    assert epochs(True)==epochs(False)

class OnCpu(DistributedDL):
    def _broadcast(self, t, rank): return list(t)

@pytest.mark.parametrize('drop_last', [True, False])
def test_distributed_loaders(drop_last):
    def of_rank(rank):
        set_seed(3)
        dl = TfmdDL(Numbered(51), bs=8, shuffle=True, drop_last=drop_last, num_workers=0)
        return OnCpu(dl, rank, 2)
    def epochs(keep): return [epoch_items(of_rank(rank), keep) for rank in (0,1)]

    for keep in (None, lambda idxs: idxs%2==0):
        for dl,idxs in epochs(keep):
            got = rows(dl)
            assert got==batches_of(idxs)[:len(got)]
        (_,first),(_,second) = epochs(keep)
        assert len(first)==len(second)
        assert {*first.tolist(), *second.tolist()}==set(range(0, 51, 1 if keep is None else 2))

    assert [rows(dl) for dl,_ in epochs(None)]==[rows(of_rank(rank)) for rank in (0,1)]

def skip_thirteen(o):
    if o.ndim and o[0]==13: raise SkipItemException
    return o

@pytest.mark.parametrize('num_workers', [0, 2])
def test_skipped_items_are_refused(num_workers):
    dl,_ = epoch_items(TfmdDL(Numbered(), bs=8, after_item=skip_thirteen, num_workers=num_workers))
    with pytest.raises(ValueError, match='Item 13 was skipped') as raised: list(dl)
    traceback.clear_frames(raised.tb) # or the garbage collector waits ten seconds for the workers

@pytest.mark.parametrize('make,match', [
    (lambda: torch.utils.data.DataLoader(Numbered(), batch_size=8), "DataLoader; use fastai's"),
    (lambda: DataLoader(iter(range(9)), bs=4), 'iterable dataset'),
    (lambda: DataLoader(list(range(9)), bs=None), 'whole batches'),
    (lambda: LMDataLoader([torch.arange(99)], bs=2, seq_len=5), 'continue each other')])
def test_unknown_items_are_refused_when_the_fit_begins(make, match):
    with pytest.raises(TypeError, match=match): check_loader(make())
    learn = table_learner().stale_loss()
    learn.dls.loaders[0] = make()
    with pytest.raises(TypeError, match=match): quiet_fit(learn, 2)

METHODS = [
    lambda: StaleLossCallback(beta=2, n=3),
    lambda: FavorHardCallback(beta=2),
    lambda: InfoBatchCallback(),
    lambda: RandomSubsetCallback(.3, before_loading=True),
    lambda: TopLossCallback(.5, noise_quantile=.9),
    lambda: SelectiveBackpropCallback(noise_quantile=.9),
    lambda: SelectiveBackpropCallback(score=ReducibleLoss(torch.zeros(50))),
    lambda: EarlyLossSamplingCallback(1)] # which takes no guard
GUARDED = [cls for cls in methods() if cls is not EarlyLossSamplingCallback]
METHODS += [partial(cls, noise_quantile=.95) for cls in GUARDED] # the guard makes any method track its items

def numbered_learner(cb, num_workers=0, drop_last=True, **kwargs):
    set_seed(0)
    ds = Numbered()
    train = TfmdDL(ds, bs=8, shuffle=True, drop_last=drop_last, num_workers=num_workers)
    dls = DataLoaders(train, TfmdDL(Numbered(16), bs=8, num_workers=0))
    model = nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 3))
    return Learner(dls, model, loss_func=CrossEntropyLossFlat(), cbs=cb, lr=.05, **kwargs),ds

@pytest.mark.law(8)
@pytest.mark.parametrize('make,num_workers', [(make, 0) for make in METHODS]+[(make, 2) for make in METHODS[::2]])
def test_methods_know_the_items_they_train(make, num_workers):
    seen = []
    class Spy(Callback):
        order,run_valid = 20,False
        def after_loss(self):
            trained = self.x[:,0].long().tolist()
            seen.append((trained, self.learn.selection.item_idx.tolist()))
    learn,_ = numbered_learner([make(), Spy()], num_workers)
    if num_workers: learn.dls.train.fake_l.num_workers = num_workers
    quiet_fit(learn, 4 if num_workers==0 else 2)
    assert len(seen)>5
    for trained,idx in seen: assert trained==idx

@pytest.mark.parametrize('make,share', [
    (lambda: StaleLossCallback(beta=2, n=100, seed=0), 1/3),
    (lambda: FavorHardCallback(beta=1, seed=0), 1/2),
    (lambda: RandomSubsetCallback(.3, before_loading=True), .3)])
def test_left_out_items_are_not_read(make, share):
    "An epoch that keeps a third reads a third of the items"
    learn,ds = numbered_learner(make(), drop_last=False)
    n_epoch,reads = 41,[]
    class Count(Callback):
        def before_train(self): ds.reads.clear()
        def after_train(self): reads.append(len(ds.reads))
    learn.add_cb(Count())
    learn._do_epoch_validate = lambda *args: None
    quiet_fit(learn, n_epoch)

    kept = learn.selection.stats.query('step>=0').groupby('epoch').seen.sum()
    assert kept[0]==50 # in the first epoch fastai itself reads one item more, to learn the types
    assert reads[1:]==kept.tolist()[1:]
    n = 50*(n_epoch-1)
    deviation = (share*(1-share)/n)**.5
    lone = 1/50 # at most one item an epoch is left out as a lone last one
    assert abs(sum(reads[1:])/n-share)<4*deviation+lone

def test_clocks_are_exact_in_shortened_epochs():
    clocks = []
    class Spy(Callback):
        order,run_valid = 20,False
        def before_batch(self): clocks.append((self.epoch, self.pct_train, self.n_iter, self.iter))
    learn,_ = numbered_learner([RandomSubsetCallback(.5, before_loading=True), Spy()])
    quiet_fit(learn, 4, 'fit_one_cycle')

    for epoch,pct,n_iter,i in clocks:
        assert n_iter==(6 if epoch==0 else 3)
        assert pct==pytest.approx((epoch+i/n_iter)/4)
    assert learn.pct_train==pytest.approx(1)
    assert learn.train_iter==6+3*3==len(learn.recorder.losses)
    assert learn.recorder.lrs[-1]<max(learn.recorder.lrs)/5

def test_the_progress_bar_counts_the_shortened_epoch(capsys):
    totals = []
    class Spy(Callback):
        order,run_valid = 61,False
        def before_batch(self): totals.append((self.epoch, self.progress.pbar.total, self.n_iter, len(self.learn.dl)))
    learn,_ = numbered_learner([RandomSubsetCallback(.5, before_loading=True), Spy()])
    learn.fit(2)
    assert set(totals)=={(0,6,6,6), (1,3,3,3)}

def test_a_halved_batch_is_refused():
    class Half(Callback):
        order,run_valid = SelectionCallback.order-1,False
        def before_batch(self):
            self.learn.xb = self.x[:4],
            self.learn.yb = self.y[:4],
    learn,_ = numbered_learner([StaleLossCallback(), Half()])
    with pytest.raises(ValueError, match='got a batch of 4 items, wanted 8'): quiet_fit(learn, 1)

def test_a_lone_last_item_has_company():
    class Nine(EpochSelection):
        def choose_items(self, idxs): return Chosen(torch.arange(9))
    learn,_ = numbered_learner(Nine(warmup=0), drop_last=False)
    stats = quiet_fit(learn, 2).selection.stats
    assert stats.query('step>=0').trained.tolist()==[8,2]*2

class Ahead:
    "A loader that reads a batch ahead"
    def __init__(self, dl): self.dl = dl
    def __len__(self): return len(self.dl)
    def __iter__(self):
        before = None
        for b in self.dl:
            if before is not None: yield before
            before = b
        yield before

class Wraps(Callback):
    run_valid = False
    def __init__(self, wrap, order): self.wrap,self.order = wrap,order
    def before_train(self): self.learn.dl = self.wrap(self.learn.dl)

@pytest.mark.law(12)
@pytest.mark.parametrize('make', METHODS[:6])
@pytest.mark.parametrize('wrap', [Ahead, lambda dl: dl.new()], ids=['ahead','another'])
def test_batches_that_are_not_handed_on_at_once_are_refused(make, wrap):
    "Or one batch is taken for another"
    learn,_ = numbered_learner([make(), Wraps(wrap, 0)])
    refused = 'learn.dl: got batch 1 when . had been handed out, wanted each batch at once'
    with pytest.raises(ValueError, match=refused): quiet_fit(learn, 3)

@pytest.mark.law(12)
@pytest.mark.parametrize('make', METHODS[:6])
def test_a_wrapper_that_hands_on_each_batch_changes_nothing(make):
    def known(*cbs):
        learn,_ = numbered_learner([make(), *cbs])
        torch.manual_seed(1)
        stats = quiet_fit(learn, 3).selection.stats
        return stats.drop(columns=['loss','kept_loss','loss_share','full_loss'], errors='ignore')
    assert known().equals(known(Wraps(Streams, 0)))

class Streams(Ahead):
    "Hands on each batch at once"
    def __iter__(self): yield from self.dl

@pytest.mark.parametrize('order', [0,-8])
def test_a_changed_number_of_items_is_refused(order):
    "By a callback after the selection, or before it"
    class Doubles(Callback):
        run_valid = False
        def before_batch(self):
            self.learn.xb = torch.cat([self.x]*2),
            self.learn.yb = torch.cat([self.y]*2),
    doubles = Doubles()
    doubles.order = order
    learn,_ = numbered_learner([FavorHardCallback(), doubles])
    where = 'after' if order==0 else 'before'
    with pytest.raises(ValueError, match=f'changes the number of items {where} the selection'): quiet_fit(learn, 2)

# fastai's permutation, all at once
SIZES = [1, 2, 4999, 5000, 8191, 8192, 8193, 16_383, 16_384, 16_385, 24_576, 65_535, 65_537]

@pytest.mark.parametrize('n', SIZES)
def test_a_permutation_is_pythons_and_so_is_the_state_behind_it(n):
    for seed in range(5):
        ours,pythons = random.Random(seed),random.Random(seed)
        for _ in range(seed*100): assert ours.random()==pythons.random() # from anywhere in the generator's words
        if seed: assert ours.gauss(0, 1)==pythons.gauss(0, 1) # which keeps a second number for later
        assert shuffled(ours, n).tolist()==pythons.sample(range(n), n)
        assert ours.getstate()==pythons.getstate()
        assert shuffled(ours, n).tolist()==pythons.sample(list(range(n)), n)
        assert ours.getstate()==pythons.getstate()

class Own(random.Random):
    "Another source of random numbers"
    def sample(self, population, k): return super().sample(population, k)[::-1]

def test_another_source_or_another_python_samples_by_itself(monkeypatch):
    assert shuffled(Own(1), 6000).tolist()==random.Random(1).sample(range(6000), 6000)[::-1]
    monkeypatch.setattr('selback.callback.loader._is_sample_known', lambda: False)
    monkeypatch.setattr('selback.callback.loader._sampled', None)
    assert shuffled(random.Random(1), 6000).tolist()==random.Random(1).sample(range(6000), 6000)

@pytest.mark.parametrize('options', [{}, dict(shuffle_fn=lambda idxs: idxs[::-1])], ids=['fastais','own'])
@pytest.mark.parametrize('shuffle', [True, False])
def test_an_order_is_what_the_loader_draws(shuffle, options):
    def dl(): return TfmdDL(Numbered(6000), bs=64, shuffle=shuffle, num_workers=0, **options)
    a,b = dl(),dl()
    b.rng.setstate(a.rng.getstate())
    assert own_order(a).tolist()==b.get_idxs()
    assert drawn(a).tolist()==(b.randomize(), b.get_idxs())[1]
    assert a.rng.getstate()==b.rng.getstate()
