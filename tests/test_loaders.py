"Loaders in the place of a training loader: which item is which, and that all else is the user's own loader"
import sys, traceback

import pandas as pd, pytest, torch
from fastai.callback.core import Callback, CancelEpochException
from fastai.callback.data import PartialDL, WeightedDL
from fastai.data.load import DataLoader, SkipItemException
from fastai.distributed import DistributedDL
from fastai.tabular.core import Categorify, TabDataLoader, TabularPandas, TabWeightedDL
from fastai.text.data import LMDataLoader, SortedDL
from fastcore.basics import chunked
from fasttransform import Pipeline
from helpers import *
from selback.bench.datasets import TensorDL
from selback.callback.loaders import ChosenBefore, Plan, check_loader, draw, own_loader, unwrapped_loader

class OwnNumbers:
    "Each item says its own number; reads are noted"
    def __init__(self, n=50):
        self.n = n
        self.targets = [i%3 for i in range(n)]
        self.reads = []
    def __len__(self): return self.n
    def __getitem__(self, i):
        self.reads.append(int(i))
        return torch.full((4,), float(i)),torch.tensor(self.targets[int(i)])

def rows(dl): return [x[:,0].long().tolist() for x,_ in dl]

def batches_of(idxs, bs=8): return [idxs[i:i+bs].tolist() for i in range(0, len(idxs), bs)]

def chosen_before(dl, keep=None, weights=None):
    "What reads an epoch's items that a mask keeps"
    def choose():
        idxs = draw(dl)
        return Plan(idxs if keep is None else idxs[keep(idxs)], weights=weights)
    return ChosenBefore(dl, choose)

OURS = 'get_idxs','do_item','randomize','before_iter','drop_last'
def own_attributes(dl):
    "What a loader's instance has of what is replaced while it starts"
    inner = own_loader(dl)
    return [{name: vars(o)[name] for name in OURS if name in vars(o)} for o in (unwrapped_loader(dl), inner)]

# Which item is which
@pytest.mark.law(8)
@pytest.mark.parametrize('shuffle,num_workers,persistent', [
    (False,0,False),
    (True,0,False),
    (True,2,False),
    (True,2,True)])
@pytest.mark.parametrize('drop_last', [True, False])
def test_rows_are_the_items(shuffle, drop_last, num_workers, persistent):
    workers = dict(num_workers=num_workers, persistent_workers=persistent)
    base = TfmdDL(OwnNumbers(), bs=8, shuffle=shuffle, drop_last=drop_last, **workers)
    before = own_attributes(base)
    for keep in (None, lambda idxs: idxs%3!=0):
        dl = chosen_before(base, keep)
        got,known = [],[]
        for x,_ in dl:
            got.append(x[:,0].long().tolist())
            known.append(dl.current)
        n,idxs = len(got),dl.idxs
        assert n==len(dl)==dl.n_read==dl.n_handed
        assert dl.is_done
        assert got==batches_of(idxs)[:n]==[current.idx.tolist() for current in known]
        assert [current.i for current in known]==list(range(n))
        assert sum(map(len, got))==(len(idxs)//8*8 if drop_last else len(idxs))
        assert dl.fake_l.persistent_workers==persistent
        assert keep is None or not [i for i in sum(got, []) if i%3==0]
        assert own_attributes(base)==before

def test_weights_go_with_the_items():
    base = TfmdDL(OwnNumbers(), bs=8, shuffle=True, num_workers=0)
    dl = chosen_before(base, weights=torch.arange(50.)**2)
    for x,_ in dl: assert torch.equal(dl.current.weight, x[:,0]**2)

def test_an_epochs_only_batch_is_not_left_out():
    "Unless the loader would leave out all of its items, too"
    for n,n_chosen,wanted in [(50,5,[5]), (50,8,[8]), (50,12,[8]), (5,5,[])]:
        base = TfmdDL(OwnNumbers(n), bs=8, drop_last=True, num_workers=0)
        dl = chosen_before(base, lambda idxs: torch.arange(n)<n_chosen)
        assert [len(batch) for batch in rows(dl)]==wanted
        assert len(dl)==len(wanted)
        assert base.drop_last

# Loaders of all kinds
def frame(n=50):
    number = torch.arange(n)
    return pd.DataFrame(dict(a=number.double(), c=list('xyzzy'*(n//5)), y=number%3))

def tab_dl(cls=TabDataLoader, **kwargs):
    table = TabularPandas(frame(), [Categorify], ['c'], ['a'], ['y'])
    return cls(table, bs=8, shuffle=True, **kwargs)

def plain_dl(**kwargs): return TfmdDL(OwnNumbers(), bs=8, shuffle=True, num_workers=0, **kwargs)
def weighted_dl(): return WeightedDL(OwnNumbers(), bs=8, wgts=range(1,51), shuffle=True, num_workers=0)
def partial_dl(**kwargs): return PartialDL(OwnNumbers(), bs=8, partial_n=21, num_workers=0, **kwargs)
def sorted_dl(sign=1, **kwargs):
    return SortedDL(OwnNumbers(), sort_func=lambda o: sign*o[0][0], bs=8, num_workers=0, **kwargs)
def tensor_dl(**kwargs):
    x = torch.arange(50.)[:,None].expand(50, 4).contiguous()
    return TensorDL(TensorItems(x, torch.arange(50)%3, 0), bs=8, shuffle=True, num_workers=0, **kwargs)
def by_item(): return tensor_dl(after_item=lambda o: o) # which reads item by item

class Numbering(DataLoader):
    "Whose `get_idxs` returns NumPy numbers, in a tuple"
    def get_idxs(self): return tuple(torch.tensor(super().get_idxs()).numpy())

KINDS = dict(
    plain=plain_dl,
    weighted=weighted_dl,
    partial=partial_dl,
    sorted=lambda: sorted_dl(-1),
    shuffled_sorted=lambda: sorted_dl(shuffle=True),
    tensors=tensor_dl,
    tensors_by_item=by_item,
    tab=tab_dl,
    tab_weighted=lambda: tab_dl(TabWeightedDL, wgts=range(1,51)),
    fastais=lambda: DataLoader(OwnNumbers(), bs=8, shuffle=True),
    numbering=lambda: Numbering(OwnNumbers(), bs=8, shuffle=True))

class OnCpu(DistributedDL):
    def _broadcast(self, t, rank): return list(t)

@pytest.mark.parametrize('drop_last', [True, False])
def test_distributed_loaders(drop_last):
    def of_rank(rank):
        set_seed(3)
        dl = TfmdDL(OwnNumbers(51), bs=8, shuffle=True, drop_last=drop_last, num_workers=0)
        return OnCpu(dl, rank, 2)
    def epochs(keep):
        dls = [chosen_before(of_rank(rank), keep) for rank in (0,1)]
        for dl in dls: dl.begin()
        return dls

    for keep in (None, lambda idxs: idxs%2==0):
        for dl in epochs(keep):
            before = own_attributes(dl)
            got = rows(dl)
            assert got==batches_of(dl.idxs)[:len(got)]
            assert own_attributes(dl)==before
        first,second = (dl.idxs for dl in epochs(keep))
        assert len(first)==len(second)
        assert {*first.tolist(), *second.tolist()}==set(range(0, 51, 1 if keep is None else 2))

    assert [rows(dl) for dl in epochs(None)]==[rows(of_rank(rank)) for rank in (0,1)]

def skip_thirteen(o):
    if o.ndim and o[0]==13: raise SkipItemException
    return o

@pytest.mark.parametrize('num_workers', [0, slow(2)])
def test_skipped_items_are_refused(num_workers):
    dl = chosen_before(TfmdDL(OwnNumbers(), bs=8, after_item=skip_thirteen, num_workers=num_workers))
    with pytest.raises(ValueError, match='Item 13 was skipped') as raised: list(dl)
    traceback.clear_frames(raised.tb) # or the garbage collector waits ten seconds for the workers

def refuse_thirteen(o):
    if o.ndim and o[0]==13: raise OSError('cut off')
    return o

@pytest.mark.skipif(sys.version_info<(3,11), reason='errors have no notes')
@pytest.mark.parametrize('num_workers', [0, slow(2)])
@pytest.mark.parametrize('cls', [FavorHardCallback, TopLossCallback, WatchItemsCallback])
def test_an_item_that_cannot_be_read_is_named(cls, num_workers):
    learn,ds = numbered_learner(cls(), num_workers)
    ds.items = [f'{i}.jpg' for i in range(50)]
    learn.dls.train.after_item = Pipeline([refuse_thirteen])
    with pytest.raises(OSError, match='cut off') as raised: quiet_fit(learn)
    assert 'item 13 could not be read, 13.jpg' in ''.join(traceback.format_exception(raised.value))
    assert 'do_item' not in vars(learn.dls.train)
    traceback.clear_frames(raised.tb)

@pytest.mark.parametrize('make,match', [
    (lambda: torch.utils.data.DataLoader(OwnNumbers(), batch_size=8), "DataLoader; use fastai's"),
    (lambda: DataLoader(iter(range(9)), bs=4), 'iterable dataset'),
    (lambda: DataLoader(list(range(9)), bs=None), 'whole batches'),
    (lambda: LMDataLoader([torch.arange(99)], bs=2, seq_len=5), 'continue each other')])
def test_unknown_items_are_refused_when_the_fit_begins(make, match):
    with pytest.raises(TypeError, match=match): check_loader(make())
    learn = table_learner().stale_loss()
    learn.dls.loaders[0] = make()
    with pytest.raises(TypeError, match=match): quiet_fit(learn, 2)

@pytest.mark.parametrize('out', [-1, 50])
@pytest.mark.parametrize('make', [FavorHardCallback, StaleLossCallback, lambda: TopLossCallback(track_items=True)])
def test_indices_out_of_range_are_refused(make, out):
    class Beyond(TfmdDL):
        def get_idxs(self): return [*range(20), out]
    learn,_ = numbered_learner(make())
    learn.dls.loaders[0] = Beyond(OwnNumbers(), bs=8, num_workers=0)
    with pytest.raises(ValueError, match='numbers from 0 to 49'): quiet_fit(learn, 1)

# Loaders that cut batches in a way of their own
class Buckets(TfmdDL):
    "Items of like remainders by three come together"
    def create_batches(self, samps): return super().create_batches(iter(sorted(samps, key=lambda i: i%3)))

class Backwards(TfmdDL):
    "Samples batches by itself, the last one first"
    def sample(self): return iter([*super().sample()][::-1])

class Halves(TfmdDL):
    "Hands out half batches"
    def chunkify(self, b): return super().chunkify(b) if self.prebatched else chunked(b, self.bs//2, self.drop_last)

class Iterates(TfmdDL):
    "Leaves out its first batch"
    def __iter__(self):
        batches = super().__iter__()
        next(batches)
        yield from batches

CUTS = dict(buckets=Buckets, sampler=Backwards, halves=Halves, iterates=Iterates)
UNKNOWN = CUTS | dict(pytorch=lambda items, bs, **kwargs: torch.utils.data.DataLoader(items, bs))
LOCAL = dict(
    top_loss=lambda: TopLossCallback(.5, warmup=0),
    gathered=lambda: TopLossCallback(.5, gather=True, warmup=0),
    one_pass=lambda: TopLossCallback(.5, passes=1, warmup=0),
    importance=lambda: ImportanceSamplingCallback(tau=0, warmup=0))

def claiming(cls): return type(cls.__name__, (cls,), dict(keeps_order=True))

def learner_of(dl, cb, *cbs):
    learn,_ = numbered_learner([cb, Spy(), *cbs])
    learn.dls.loaders[0] = dl
    return learn

@pytest.mark.parametrize('cut', CUTS)
def test_methods_that_must_know_the_items_refuse_a_loader_that_cuts_its_own_batches(cut):
    refused = pytest.raises(TypeError, match='cuts batches in a way of its own .*keeps_order = True')
    for make in METHODS:
        learn = learner_of(CUTS[cut](OwnNumbers(), bs=8, num_workers=0), make())
        with refused: quiet_fit(learn, 1)
        assert not getattr(learn.spy, 'batches', ()) # some refuse it before the fit begins

@pytest.mark.parametrize('method', LOCAL)
@pytest.mark.parametrize('cut', UNKNOWN)
def test_other_methods_go_on_with_it(cut, method):
    dl = UNKNOWN[cut](OwnNumbers(), bs=8, num_workers=0)
    n = sum(map(len, rows(dl)))
    stats = quiet_fit(learner_of(dl, LOCAL[method]()), 2).selection.stats
    assert stats.groupby('epoch').seen.sum().tolist()==[n]*2
    assert stats.kept.sum()<2*n

class Shifted(TfmdDL):
    "With an option of its own"
    def __init__(self, *args, shift, **kwargs):
        super().__init__(*args, **kwargs)
        self.shift = shift
    def create_batch(self, b):
        x,y = super().create_batch(b)
        return x+self.shift,y

@pytest.mark.parametrize('method', [*LOCAL.values(),FavorHardCallback,WatchItemsCallback])
def test_a_loader_keeps_its_own_options(method):
    "Those of its class, and the function that shuffles"
    options = dict(shift=100., shuffle=True, shuffle_fn=lambda idxs: idxs[::-1])
    learn = learner_of(Shifted(OwnNumbers(), bs=8, num_workers=0, **options), method())
    for _ in range(2):
        seen = sum(quiet_fit(learn, 1).spy.batches, [])
        batches = [(149-i)//8 for i in seen]
        assert batches==sorted(batches) and {*range(6)}<={*batches}<={*range(7)}

def replaced_on_the_instance(name):
    "A loader whose own method is an attribute"
    dl = plain_dl()
    method = getattr(dl, name)
    setattr(dl, name, lambda *args: method(*args))
    return dl

@pytest.mark.parametrize('name', ['create_batches','sample','chunkify'])
def test_methods_replaced_on_a_loader_itself_are_refused_too(name):
    with pytest.raises(TypeError, match=name): check_loader(replaced_on_the_instance(name))
    quiet_fit(learner_of(replaced_on_the_instance(name), TopLossCallback(.5, warmup=0)), 1)

def test_a_class_that_says_so_keeps_the_order():
    "It or one below it, unless this has a method of its own again"
    class Says(TfmdDL):
        keeps_order = True
        def create_batches(self, samps): return super().create_batches(samps)
    class GoesOn(Says): pass
    class Another(Says):
        def create_batches(self, samps): return super().create_batches(samps)

    def fit(cls):
        dl = cls(OwnNumbers(), bs=8, shuffle=True, num_workers=0)
        return quiet_fit(learner_of(dl, FavorHardCallback()), 3).selection.stats
    for cls in (Says, GoesOn): assert fit(cls).kept.sum()<150
    with pytest.raises(TypeError, match='create_batches'): fit(Another)

@pytest.mark.parametrize('cut', ['buckets','sampler'])
def test_a_wrong_claim_is_refused_in_the_first_batch(cut):
    for make in METHODS[:6]:
        dl = claiming(CUTS[cut])(OwnNumbers(), bs=8, num_workers=0)
        before = own_attributes(dl)
        learn = learner_of(dl, make())
        with pytest.raises(ValueError, match='wanted .* and so on, as drawn'): quiet_fit(learn, 1)
        assert not learn.spy.batches
        assert own_attributes(dl)==before

# All is as in plain training
KEEP_ALL = dict(
    favor_hard=lambda **k: FavorHardCallback(beta=0, warmup=0, **k),
    stale_loss=lambda **k: StaleLossCallback(beta=0, n=2, warmup=0, **k),
    before=lambda **k: RandomSubsetCallback(1., before_loading=True, warmup=0, **k),
    prioritized=lambda **k: PrioritizedSamplingCallback(uniform=1., warmup=0, **k),
    balanced=lambda **k: BalancedSamplingCallback(power=0., **k),
    gathered=lambda **k: TopLossCallback(1., gather=True, warmup=0, **k),
    tracked=lambda **k: TopLossCallback(1., warmup=0, track_items=True, **k),
    one_pass=lambda **k: TopLossCallback(1., passes=1, warmup=0, track_items=True, **k))

FEW = 'favor_hard','gathered','tracked' # both loaders, and one in the place of the other

class First(nn.Module):
    "Looks at the first inputs of a batch that are floats"
    def __init__(self):
        super().__init__()
        self.norm,self.out = nn.BatchNorm1d(1, affine=False),nn.Linear(1, 3)
    def forward(self, *xb):
        x = next(x for x in xb if x.is_floating_point())
        return self.out(self.norm(x[:,:1]))

class Observed(Callback):
    "Notes what a step is made of, behind the selection"
    order,run_valid = 60,False
    def __init__(self): self.steps = []
    def after_loss(self):
        x = next(x for x in self.xb if x.is_floating_point())
        if self.learn.selection and self.learn.selection.memory is not None:
            assert self.learn.selection.item_idx.tolist()==x[:,0].long().tolist()
        clocks = self.epoch,self.iter,self.n_iter,float(self.pct_train)
        self.steps.append((*clocks, x[:,0].tolist(), float(self.loss)))

def trained_on(make_dl, cbs, n_epoch=3):
    "All that a fit leaves behind"
    set_seed(0)
    dl = make_dl()
    dls,loss_func = DataLoaders(dl, dl.new(shuffle=False)),CrossEntropyLossFlat()
    learn = Learner(dls, First(), loss_func=loss_func, lr=.05, cbs=[*cbs(), Observed()])
    learn._do_epoch_validate = lambda *args: None
    before = own_attributes(dl)
    quiet_fit(learn, n_epoch, 'fit_one_cycle')
    assert own_attributes(dl)==before
    recorder,model = learn.recorder,learn.model.state_dict()
    return dict(steps=learn.observed.steps, weights=[p.tolist() for p in model.values()], rates=recorder.lrs,
        losses=[float(loss) for loss in recorder.losses], random=(dl.rng.getstate(),random_states()))

def of_two(**kwargs): return TfmdDL(OwnNumbers(), bs=8, shuffle=True, num_workers=2, **kwargs)

WHOLE = KINDS | dict(
    drop_last=lambda: plain_dl(drop_last=True),
    in_order=lambda: TfmdDL(OwnNumbers(), bs=8, num_workers=0),
    partial_dropped=lambda: partial_dl(drop_last=True),
    pinned=lambda: plain_dl(pin_memory=True),
    workers=of_two,
    pinned_workers=lambda: of_two(pin_memory=True),
    persistent=lambda: of_two(persistent_workers=True))

def but_workers(kinds):
    "Kinds of loaders, of which those with worker processes are slow"
    return [slow(kind) if 'workers' in kind or kind=='persistent' else kind for kind in kinds]

@pytest.mark.law(1)
@pytest.mark.parametrize('names', [FEW, slow([*KEEP_ALL])], ids=['few','all'])
@pytest.mark.parametrize('kind', but_workers(WHOLE))
def test_keeping_all_is_plain_training_with_loaders_of_all_kinds(kind, names):
    plain = trained_on(WHOLE[kind], lambda: [])
    for method in names:
        ours = trained_on(WHOLE[kind], lambda: [KEEP_ALL[method]()])
        for name in plain: assert ours[name]==plain[name], (method, name)

def test_a_schedule_ends_with_a_loader_that_draws_a_part():
    "Its last learning rate is that of plain training, where as many batches are read"
    plain = trained_on(partial_dl, lambda: [])
    for make in (*KEEP_ALL.values(), lambda: TopLossCallback(.5, track_items=True), TopLossCallback):
        ours = trained_on(partial_dl, lambda: [make()])
        assert ours['rates']==plain['rates']
        assert ours['steps'][-1][:4]==plain['steps'][-1][:4]

    last = trained_on(partial_dl, lambda: [FavorHardCallback()])['steps'][-1]
    epoch,i,n_iter,pct,*_ = last
    assert (epoch,i+1)==(2,n_iter)
    assert pct==pytest.approx((2+i/n_iter)/3)

class Growing(TfmdDL):
    "Hands out 16 items more in each epoch, as a curriculum does"
    n_begun = 0
    def before_iter(self):
        self.n_begun += 1
        super().before_iter()
    def get_idxs(self):
        self.drawn = super().get_idxs()[:16*self.n_begun]
        return self.drawn

class Draws(Callback):
    "Notes what is drawn for each epoch, and what trains"
    order,run_valid = 60,False
    def __init__(self): self.drawn,self.trained = [],[]
    def before_train(self): self.trained.append([])
    def after_loss(self): self.trained[-1] += self.x[:,0].long().tolist()
    def after_train(self): self.drawn.append(self.dls.train.drawn)

def grown(*cbs):
    "What is drawn and trained in four epochs"
    learn,_ = numbered_learner([Draws(), *cbs])
    learn.dls.loaders[0] = Growing(OwnNumbers(64), bs=8, shuffle=True, num_workers=0)
    quiet_fit(learn, 4)
    assert learn.dls.train.n_begun==4
    return learn.draws.drawn,learn.draws.trained

CURRICULUM = dict(
    favor_hard=FavorHardCallback,
    prioritized_sampling=lambda: PrioritizedSamplingCallback(warmup=1),
    early_loss_sampling=lambda: EarlyLossSamplingCallback(1),
    balanced_sampling=lambda: BalancedSamplingCallback(warmup=1),
    info_batch=InfoBatchCallback,
    stale_loss=lambda: StaleLossCallback(n=3),
    stale_batchwise=lambda: StaleLossCallback(n=2, gather=False),
    seta=SeTaCallback,
    drop_easy=DropEasyCallback,
    tracked=lambda: TopLossCallback(track_items=True))

def test_plain_training_follows_a_curriculum():
    drawn,trained = grown()
    assert trained==drawn
    assert list(map(len, drawn))==[16,32,48,64]

@pytest.mark.parametrize('method', CURRICULUM)
def test_a_method_chooses_of_what_a_growing_loader_draws(method):
    drawn,trained = grown(CURRICULUM[method]())
    assert list(map(len, drawn))==[16,32,48,64]
    assert drawn==grown()[0]
    assert trained[0]==drawn[0]
    for of_epoch,all_of_it in zip(trained[1:], drawn[1:]):
        assert 2<=len(of_epoch)<=len(all_of_it)
        assert {*of_epoch}<={*all_of_it}
    if 'sampling' in method: assert list(map(len, trained))==[16,32,48,64]
    else: assert sum(map(len, trained))<160

# It passes for the loader that it is in the place of

def test_the_running_loader_passes_for_the_users_own():
    "What is set arrives there, too"
    class Sets(Callback):
        order,run_valid = 60,False
        def before_batch(self):
            assert isinstance(self.learn.dl, TfmdDL)
            assert len(self.learn.dl)==len(self.dls.train)
            assert self.learn.dl.dataset is self.dls.train.dataset
            self.learn.dl.note = self.iter
            assert vars(self.dls.train)['note']==self.learn.dl.note==self.iter
            self.dls.train.other = -self.iter
            assert self.learn.dl.other==-self.iter
            self.learn.dl.to(torch.device('cpu'))
            self.learn.dl.num_workers = 1
        def after_train(self): assert vars(self.dls.train)['note']==self.iter
    for make in KEEP_ALL.values():
        learn,_ = numbered_learner([make(), Sets()])
        learn.dls.to(torch.device('cpu'))
        quiet_fit(learn, 2)
        assert learn.dls.train.device==torch.device('cpu')
        assert type(learn.dls.train) is TfmdDL

# The user's loader afterwards
class Fails:
    "A dataset that raises when an item is read"
    ex,at = None,None
    def __init__(self, n=50): self.n,self.count = n,0
    def __len__(self): return self.n
    def __getitem__(self, i):
        self.count += 1
        if self.count==self.at: raise self.ex('dataset')
        return torch.full((4,), float(i)),torch.tensor(int(i)%3)

@pytest.mark.law(6)
@pytest.mark.parametrize('at', [2, 13, 50+13])
@pytest.mark.parametrize('ex', [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize('is_own', [False, slow(True)], ids=['','own draw'])
@pytest.mark.parametrize('method', ['favor_hard','stale_loss','tracked','gathered'])
def test_nothing_of_ours_is_left_on_a_loader(method, is_own, ex, at):
    "After an exception in the first batch of an epoch or a later one; also where an instance has a draw of its own"
    ds = Fails()
    own = dict(get_idxs=lambda: list(range(49, -1, -1)), before_iter=lambda: None) if is_own else {}
    dl = TfmdDL(ds, bs=8, num_workers=0, **own)
    learn = learner_of(dl, KEEP_ALL[method]())
    before = own_attributes(dl)
    ds.ex,ds.at,ds.count = ex,at,-1 # fastai itself reads an item, to learn the types
    with pytest.raises(ex): quiet_fit(learn, 2)
    assert own_attributes(dl)==before

    ds.at = None
    quiet_fit(learn, 1)
    assert own_attributes(dl)==before
    wanted = list(range(49, -1, -1)) if is_own else list(range(50))
    assert learn.spy.batches[-7:]==batches_of(torch.tensor(wanted))

@pytest.mark.parametrize('event', ['before_batch','after_loss'])
@pytest.mark.parametrize('method', KEEP_ALL)
def test_an_epoch_that_is_left_leaves_nothing_either(method, event):
    class Leaves(Callback):
        order,run_valid = 60,False
        def __call__(self, name):
            if name==event and self.training and self.epoch==1 and self.iter==2: raise CancelEpochException
    dl = plain_dl()
    before = own_attributes(dl)
    learn = quiet_fit(learner_of(dl, KEEP_ALL[method](), Leaves()), 3)
    assert own_attributes(dl)==before
    assert len(learn.spy.batches)==7+2+(event=='after_loss')+7

# Reading within an epoch
READS = dict(
    all_of_it=lambda learn: rows(learn.dl),
    all_of_dls=lambda learn: rows(learn.dls.train),
    some=lambda learn: next(iter(learn.dl))[0][:,0].long().tolist(),
    one_batch=lambda learn: learn.dl.one_batch()[0][:,0].long().tolist(),
    one_of_dls=lambda learn: learn.dls.one_batch()[0][:,0].long().tolist())

@pytest.mark.parametrize('order', [-15, 60])
@pytest.mark.parametrize('read', mostly_slow(READS, 'all_of_it', 'one_of_dls'))
def test_a_loader_may_be_read_within_its_epoch(read, order):
    "It hands out what plain fastai's does, and the epoch goes on as if nobody had read"
    def trained(*cbs):
        found = []
        class Reads(Callback):
            run_valid = False
            def after_pred(self):
                if self.learn.iter in (0,3): found.append(READS[read](self.learn))
        Reads.order = order
        set_seed(0)
        learn = quiet_fit(learner_of(plain_dl(), *cbs, Reads()), 2)
        return found,learn.spy.batches,weights(learn)
    class Nothing(Callback): pass
    found,batches,model = trained(Nothing())
    assert len(found)==4
    for method in FEW:
        ours,our_batches,our_model = trained(KEEP_ALL[method]())
        assert ours==found, method
        assert our_batches==batches, method
        assert same(our_model, model), method

@pytest.mark.parametrize('method', mostly_slow(KEEP_ALL, *FEW))
def test_a_loader_may_be_read_before_and_after_its_epoch(method):
    "But for a callback behind the selection that reads what is about to train"
    def trained(event, order, *cbs):
        found = []
        class Reads(Callback):
            run_valid = False
            def __call__(self, name):
                if name==event and self.training: found.append(rows(self.learn.dl))
        Reads.order = order
        set_seed(0)
        learn = quiet_fit(learner_of(plain_dl(), *cbs, Reads()), 2)
        return found,learn.spy.batches
    class Nothing(Callback): pass
    for event,order in [('before_train',-15), ('after_train',-15), ('after_train',60)]:
        assert trained(event, order, KEEP_ALL[method]())==trained(event, order, Nothing())
    with pytest.raises(ValueError, match='batch 0 when 7 had been handed out.*order below'):
        trained('before_train', 60, KEEP_ALL[method]())

# The methods
OWN = [
    lambda: StaleLossCallback(beta=2, n=3),
    lambda: FavorHardCallback(beta=2),
    lambda: InfoBatchCallback(),
    lambda: RandomSubsetCallback(.3, before_loading=True),
    lambda: TopLossCallback(.5, track_items=True),
    lambda: SelectiveBackpropCallback(track_items=True),
    lambda: SelectiveBackpropCallback(score=ReducibleLoss(torch.zeros(50))),
    lambda: EarlyLossSamplingCallback(1)]
OTHERS = [partial(cls, track_items=True) for cls in methods()]
METHODS = OWN+OTHERS

def numbered_learner(cb, num_workers=0, drop_last=True, **kwargs):
    set_seed(0)
    ds = OwnNumbers()
    train = TfmdDL(ds, bs=8, shuffle=True, drop_last=drop_last, num_workers=num_workers)
    dls = DataLoaders(train, TfmdDL(OwnNumbers(16), bs=8, num_workers=0))
    model = nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 3))
    return learner_on(dls, model, cbs=cb, lr=.05, **kwargs),ds

@pytest.mark.law(8)
@pytest.mark.parametrize('make,num_workers', [*((make, 0) for make in OWN), *(slow(make, 0) for make in OTHERS),
    *(slow(make, 2) for make in METHODS[::2])])
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

def test_the_progress_bar_counts_the_shortened_epoch(capsys):
    totals = []
    class Spy(Callback):
        order,run_valid = 61,False
        def before_batch(self): totals.append((self.epoch, self.progress.pbar.total, self.n_iter, len(self.learn.dl)))
    learn,_ = numbered_learner([RandomSubsetCallback(.5, before_loading=True), Spy()])
    learn.fit(2)
    assert set(totals)=={(0,6,6,6), (1,3,3,3)}

def test_a_lone_last_item_has_company():
    nine = ByPlace(lambda idxs, now: Chosen(torch.arange(9)))
    learn,_ = numbered_learner(EpochSelection(nine, warmup=0), drop_last=False)
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
@pytest.mark.parametrize('wrap,refused', [
    (Ahead, 'learn.dl: got batch 0 when 2 had been handed out, wanted each batch at once'),
    (lambda dl: dl.new(), 'learn.dl: got (a TfmdDL|batch 0 when 0 had been handed out), wanted .* order below')],
    ids=['ahead','another'])
def test_batches_that_are_not_handed_on_at_once_are_refused(make, wrap, refused):
    "Or one batch is taken for another"
    learn,_ = numbered_learner([make(), Wraps(wrap, 0)])
    with pytest.raises(ValueError, match=refused): quiet_fit(learn, 3)
    assert not learn.recorder.losses

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
    after = 'got 16 items, wanted 8, as handed out; a callback .* joins or moves rows, after the selection'
    refused = after if order==0 else 'changes the number of items before the selection'
    with pytest.raises(ValueError, match=refused): quiet_fit(learn, 2)

def test_a_halved_batch_is_refused():
    class Half(Callback):
        order,run_valid = BatchSelection.order-1,False
        def before_batch(self):
            self.learn.xb = self.x[:4],
            self.learn.yb = self.y[:4],
    learn,_ = numbered_learner([StaleLossCallback(), Half()])
    refused = 'got a batch of 4 items, wanted 8; a callback .* before the selection'
    with pytest.raises(ValueError, match=refused): quiet_fit(learn, 1)
