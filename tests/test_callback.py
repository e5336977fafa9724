"What every method has: warm-up, columns, precision, neighbours, errors"
import itertools
import math, pickle, subprocess, sys, warnings

import pandas as pd, pytest, torch
from fastai.callback.core import Callback, CancelFitException, CancelTrainException
from fastai.callback.mixup import MixUp
from fastai.data.core import Datasets
from fastai.learner import Learner, load_learner
from helpers import *
from selback.callback.first_batch import FirstBatch
from selback.callback.report import SelectionReport
from selback.core.batches import tensors_in
from torch.nn import functional as F

def steps(learn, **where):
    stats = learn.selection.stats
    for column,value in where.items(): stats = stats[stats[column]==value]
    return stats

class Inside(Callback):
    "Comes behind the selection and MixUp, in training only"
    order,run_valid = 20,False

def head_and_rest(model): return [list(model[0].parameters()), list(model[1:].parameters())]

def is_known(v): return not math.isnan(v)

# A method of one's own
def hardest_and_easiest(scores):
    order = scores.argsort()
    rows = torch.cat([order[:2], order[-2:]]).sort().values
    return Chosen(rows, torch.full((4,), .5))

class BothTails(BatchMethod):
    "The two easiest and the two hardest items, at half weight"
    weighs = True

    def choose(self, scores, now): return hardest_and_easiest(scores)

class Nothing(BatchMethod):
    def choose(self, scores, now): return Chosen(torch.arange(0))

def test_a_new_method_trains_and_reports():
    learn = quiet_fit(set_selection(table_learner(), BatchSelection(BothTails())), 3)
    later = learn.selection.stats.query('epoch>0')
    assert steps(learn, epoch=0).kept.eq(16).sum()==6
    assert (later.kept==4).all()
    assert 0<later.loss_share.mean()<1
    assert not same(weights(learn), weights(table_learner()))

@pytest.mark.parametrize('method', ['favor_hard','top_loss','watch_items'])
def test_a_fit_without_a_batch_says_so(method, capsys):
    "It is no warm-up"
    learn = learner_on(dls_of(*class_data(40), bs=64, drop_last=True))
    quiet_fit(getattr(learn, method)(), 2)
    said = capsys.readouterr().out
    assert said.count('the training loader gave no batch, so that nothing was trained.')==1
    assert 'warm-up' not in said

def test_a_method_after_watching_goes_on_watching(capsys):
    "And loses nothing; who wants to begin anew says track_items=True"
    learn = quiet_fit(table_learner().watch_items(), 2)
    before = learn.selection.suspects()
    learn.favor_hard()
    assert 'and goes on noting what was predicted' in capsys.readouterr().out
    pd.testing.assert_frame_equal(learn.selection.suspects(), before)
    assert quiet_fit(learn, 1).selection.suspects().looks.tolist()==[3]*len(before)

    learn.top_loss()
    assert 'what it remembered of items is gone' in capsys.readouterr().out and learn.selection.memory is None
    learn.favor_hard(track_items=True)
    learn.watch_items()
    assert 'is gone' not in capsys.readouterr().out and learn.selection.memory is None

# One-liners
def ours(learn): return [type(cb) for cb in learn.cbs if type(cb).__module__.startswith('selback.')]

@pytest.mark.parametrize('cls', by_path(methods()), ids=one_liner)
def test_one_liners_return_the_learner_and_replace(cls, capsys):
    learn = table_learner()
    assert getattr(learn, one_liner(cls))() is learn
    assert type(learn.selection) is cls
    assert capsys.readouterr().out==''

    first = learn.selection
    assert learn.top_loss(keep=.25) is learn
    assert type(learn.selection) is TopLossCallback
    assert repr(first) in capsys.readouterr().out
    assert first not in learn.cbs
    assert {*ours(learn)}=={TopLossCallback,FirstBatch,SelectionReport} and len(ours(learn))==3

    assert learn.full_batches() is learn
    assert not learn.selection
    assert not ours(learn)

def test_a_second_selection_is_refused():
    "A learner has one, also in a fit of its own, and is as it was before"
    learn = quiet_fit(table_learner().top_loss(keep=.25, warmup=0), 1)
    usual,guest,before = learn.selection,RandomSubsetCallback(keep=.5, warmup=0),ours(learn)
    match = 'got RandomSubsetCallback beside TopLossCallback'
    with pytest.raises(ValueError, match=match): quiet_fit(learn, 1, cbs=guest)
    with pytest.raises(ValueError, match=match): learn.add_cb(guest)
    with pytest.raises(ValueError, match='beside'): table_learner(cbs=[TopLossCallback(), guest])
    assert ours(learn)==before and learn.selection is usual
    quiet_fit(learn, 1)
    assert (usual.stats.query('seen==16').kept==4).all() and usual.stats.fit.max()==2

    other = table_learner()
    with pytest.raises(ValueError, match='of another learner'): other.add_cb(usual)
    assert not other.selection and usual.learn is learn

def test_a_selection_of_one_fit():
    guest = RandomSubsetCallback(keep=.5, warmup=0)
    learn = quiet_fit(table_learner(), 1, cbs=guest)
    assert not learn.selection and not ours(learn)
    assert (guest.stats.kept[:6]==8).all()
    assert list(learn.recorder.metric_names).count('samp_perc')==1
    quiet_fit(learn, 1)
    assert 'samp_perc' not in learn.recorder.metric_names
    assert len(guest.stats)==7
    assert quiet_fit(learn.add_cb(guest), 1).selection.stats.fit.max()==2

# When
def test_warm_up_counts_epochs_over_fits_and_fills_no_history(capsys):
    learn = table_learner().selective_backprop(beta=2, warmup=2)
    quiet_fit(learn, 1)
    assert capsys.readouterr().out.count('this fit trained on all items')==1
    assert learn.selection.history.values is None

    quiet_fit(learn, 1)
    quiet_fit(learn, 2)
    assert 'this fit trained on all items' not in capsys.readouterr().out
    stats = learn.selection.stats
    warm_up = stats[stats.fit<3]
    assert [stats[stats.fit==fit].scored.all() for fit in (1,2,3)]==[False,False,True]
    assert (warm_up.kept==warm_up.seen).all()

SHORT_FITS = [
    (lambda: FavorHardCallback(start=.9), 2, 'from 90% to 100%'),
    (InfoBatchCallback, 2, 'delta=87.5%'),
    (lambda: ImportanceSamplingCallback(tau=1e9), 3, 'tau=1e+09'),
    (InfoBatchCallback, 3, None),
    (FavorHardCallback, 2, None),
    (ImportanceSamplingCallback, 1, 'warmup=')]

@pytest.mark.parametrize('cb,n,says', SHORT_FITS)
def test_a_fit_that_chose_nothing_says_so_once(cb, n, says, capsys):
    learn = quiet_fit(table_learner(cbs=cb()), n)
    said = capsys.readouterr().out
    if says:
        assert said.count('this fit trained on all items')==1
        assert says in said
    else: assert 'all items' not in said
    quiet_fit(learn, n)
    assert 'this fit trained' not in capsys.readouterr().out

@pytest.mark.parametrize('ends_early', [False,True])
def test_only_a_whole_epoch_without_a_choice_is_warned_of(ends_early):
    class Budget(Callback):
        order,run_valid = -20,False
        def before_batch(self):
            if ends_early and self.epoch==1: raise CancelTrainException

    cb = FavorHardCallback() if ends_early else BatchSelection(Nothing())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        quiet_fit(table_learner(cbs=[cb, Budget()]), 2)
    assert sum('Epoch 1: no item was chosen' in str(w.message) for w in said)==(not ends_early)

def test_fine_tune_warms_up_once(capsys):
    learn = table_learner(splitter=head_and_rest).batch_loss_filter()
    quiet_fit(learn, 2, 'fine_tune')
    stats = learn.selection.stats
    assert stats.groupby(['fit','epoch']).scored.all().tolist()==[False,True,True]
    assert capsys.readouterr().out.count('this fit trained on all items')==1

def test_cancelled_epochs_do_not_warm_up():
    learn = quiet_fit(table_learner().top_loss(), 4, start_epoch=2)
    assert learn.selection.stats.groupby('epoch').scored.all().to_dict()=={2:False, 3:True}

def test_composers_window():
    learn = table_learner().top_loss(keep=.5, warmup=0, start=.5, end=.75, interrupt=3)
    quiet_fit(learn, 4)
    scored = learn.selection.stats.scored.tolist()
    assert scored==[False]*14+[True,True,False,True,True,False,True]+[False]*7

# Columns
def test_columns_are_what_they_say():
    learn = quiet_fit(table_learner(n=160).top_loss(keep=.25), 3)
    names = list(learn.recorder.metric_names)
    for epoch,values in enumerate(learn.recorder.values):
        row,stats = dict(zip(names[1:], values)),steps(learn, epoch=epoch)
        full_loss = (stats.full_loss*stats.seen).sum()
        kept_loss = (stats.loss_share*stats.full_loss*stats.seen).sum()
        assert row['samp_perc']==pytest.approx(stats.kept.sum()/stats.seen.sum())
        assert row['loss_perc']==pytest.approx(kept_loss/full_loss, rel=1e-5)
        assert row['full_loss']==pytest.approx(full_loss/stats.seen.sum(), rel=1e-5)
        if epoch==0: assert (row['samp_perc'],row['loss_perc'])==(1,1)
        else: assert .25==row['samp_perc']<row['loss_perc']<1
    assert row['train_loss']>row['full_loss'] # the hard items look worse than all

def test_full_loss_without_scores_is_the_training_loss():
    losses = []
    class Watch(Callback):
        run_valid = False
        def after_loss(self): losses.append((self.loss.item(), len(self.y)))

    learn = quiet_fit(table_learner(cbs=Watch()).random_subset(keep=.5, warmup=0), 1)
    *_,loss_perc,full_loss = learn.recorder.values[0]
    mean = sum(loss*n for loss,n in losses)/sum(n for _,n in losses)
    assert full_loss==pytest.approx(mean, rel=1e-5)
    assert not is_known(loss_perc)

# Neighbours in a batch

SELECTS_SOON = {ImportanceSamplingCallback: dict(tau=0), BatchLossFilterCallback: dict(min_loss_perc=.5)}

@pytest.mark.parametrize('cls', by_path(methods()), ids=one_liner)
def test_mixed_precision_rounds_to_eight_and_leaves_no_autocast(cls):
    within,after = [],[]
    class Spy(Callback):
        order,run_valid = BatchSelection.order+1,False
        def after_pred(self): within.append(torch.is_autocast_enabled('cpu'))
        def after_batch(self): after.append(torch.is_autocast_enabled('cpu'))

    cb = cls(**full_epochs(cls, 0), seed=0, **SELECTS_SOON.get(cls, {}))
    learn = quiet_fit(table_learner(bs=32, cbs=[CPUMixedPrecision(), Spy(), cb]), 4)
    stats = learn.selection.stats.query('trained>0')
    assert within==[True]*len(stats)
    assert after==[False]*len(stats)
    assert (stats.trained.sum()<4*100)==leaves_out(cls)

    is_by_memory = cb.memory is not None
    for _,epoch in stats.groupby('epoch'):
        if gathers(cb): assert (epoch.trained.iloc[:-1]==32).all() # an epoch's last may be of any size
        elif not is_by_memory:
            full = epoch[epoch.seen==32]
            assert full.trained.isin([8,16,24]).all() or not leaves_out(cls)

def test_scores_have_the_precision_of_training():
    class Spy(nn.Module):
        def __init__(self):
            super().__init__()
            self.net,self.seen = mlp(),Trail()

        def forward(self, x):
            out = self.net(x)
            self.seen.append((self.training, out.dtype))
            return out

    learn = learner_on(dls_of(*class_data()), Spy(), cbs=CPUMixedPrecision())
    quiet_fit(learn.top_loss(warmup=0), 1)
    assert set(learn.model.seen.seen)=={(False, torch.bfloat16), (True, torch.bfloat16)}

# Resolution and scores
class AnySize(nn.Module):
    "Takes images of any size, and notes them"
    def __init__(self, n_out=3, dense=False):
        super().__init__()
        self.conv,self.head = nn.Conv2d(3, 4, 3, padding=1),nn.Conv2d(4, n_out, 1)
        self.dense,self.sizes = dense,Trail()

    def forward(self, x):
        self.sizes.append((self.training, tuple(x.shape[2:])))
        x = self.head(self.conv(x).relu())
        return x if self.dense else x.mean((2,3))

def sized_learner(n_out=3, dense=False):
    set_seed(0)
    x = torch.rand(48, 3, 16, 16)
    y = torch.randint(0, n_out, (48,16,16) if dense else (48,))
    loss_func = CrossEntropyLossFlat(axis=1 if dense else -1)
    return Learner(dls_of(x, y, bs=8, n_valid=16), AnySize(n_out, dense), loss_func=loss_func)

@pytest.mark.parametrize('dense', [False, True])
def test_scale_factor(dense):
    class Clear(Callback):
        def before_epoch(self): self.model.sizes.clear()
    learn = sized_learner(dense=dense)
    quiet_fit(learn.top_loss(keep=.5, scale_factor=.5, warmup=0).add_cb(Clear()), 2)
    validated = [(False, (16,16))]*len(learn.dls.valid)
    assert learn.model.sizes.seen==[(False, (8,8)), (True, (16,16))]*len(learn.dls.train)+validated

def flat_images_learner():
    dls = dls_of(torch.randn(64,3,8,8), torch.randint(0,3,(64,)))
    return learner_on(dls, nn.Sequential(nn.Flatten(), nn.Linear(192,3)))

UNSCALABLE = [(table_learner, '3 to 5 dimensions'), (flat_images_learner, 'lower resolution')]

@pytest.mark.parametrize('make,match', UNSCALABLE)
def test_scale_factor_is_refused_before_training(make, match):
    learn = make().top_loss(scale_factor=.5)
    before = weights(learn)
    with pytest.raises(ValueError, match=match): quiet_fit(learn, 1)
    assert same(before, weights(learn))

def test_a_score_of_ones_own():
    learn = quiet_fit(table_learner().top_loss(keep=.25, warmup=0, score=lambda pred,y: -y.float()), 1)
    assert steps(learn, seen=16).kept.eq(4).all()

    learn.top_loss(score=lambda pred,y: pred)
    with pytest.raises(ValueError, match='one number for each of 16 items'): quiet_fit(learn, 2)
    assert learn.selection.stats.query('scored').empty # in the warm-up already

# Randomness
DRAWING = [
    lambda seed: SelectiveBackpropCallback(seed=seed, warmup=0),
    lambda seed: RandomSubsetCallback(seed=seed, warmup=0),
    lambda seed: SelectiveBackpropCallback(gather=False, seed=seed, warmup=0)]

@pytest.mark.parametrize('make', DRAWING)
def test_seeds(make):
    def kept(seed):
        stats = quiet_fit(table_learner(cbs=make(seed)), 2).selection.stats
        return stats[['kept','trained','full_loss']].fillna(-1).values.tolist()
    assert kept(3)==kept(3)!=kept(4)
    assert kept(None)==kept(None)

# Bad days

def test_batches_without_targets_train_in_full():
    set_seed(0)
    x = torch.randn(64, 4)
    dls = DataLoaders(*[TfmdDL(TensorDataset(x), bs=16, num_workers=0) for _ in range(2)])
    learn = learner_on(dls).top_loss(warmup=0)
    learn.dls.n_inp = 1
    quiet_fit(learn, 1)
    assert (learn.selection.stats.kept==16).all()

def test_a_lone_item_gets_company():
    seen,trained = [],[]
    def note(batch, scores, losses, chosen): seen.append((batch.xb[0].clone(), scores.clone()))
    cb = watch_choices(BatchSelection(lambda scores: Chosen(scores.argmin()[None]), warmup=0), note)
    class Spy(Inside):
        def after_loss(self): trained.append(self.x.clone())

    learn = quiet_fit(table_learner(n=160, cbs=[cb, Spy()]), 1)
    assert learn.selection.stats.trained.tolist()==[2]*8
    for (x,scores),got in zip(seen, trained):
        rows = torch.stack([scores.argmin(), scores.argmax()]).sort().values
        assert torch.equal(got, x[rows])

def test_weighted_company_adds_no_gradient():
    class One(BatchMethod):
        weighs = True
        def choose(self, scores, now): return Chosen(scores.argmax()[None], torch.tensor([3.]))
    grads = []
    class Spy(Inside):
        def after_backward(self): grads.append((self.x.clone(), self.y.clone(), self.model.weight.grad.clone()))

    learn = table_learner(cbs=[BatchSelection(One(), warmup=0), Spy()])
    learn.model = nn.Linear(4, 3)
    weight,bias = (p.clone().detach().requires_grad_() for p in learn.model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter('error') # attributes of ours must not shadow a model's `weight`
        quiet_fit(learn, 1)

    x,y,grad = grads[0]
    losses = F.cross_entropy(x@weight.T+bias, y, reduction='none')
    wanted, = torch.autograd.grad(3*losses.max(), weight) # the other's weight is 0
    torch.testing.assert_close(grad, wanted)

def test_no_weight_counts_as_a_weight_of_1_where_batches_wait_together():
    "As when a schedule of `correct` passes 0"
    turns = itertools.count()
    def some(scores): return Chosen(torch.arange(3), torch.full((3,), 5.) if next(turns)%2 else None)
    seen = set()
    class Weights(Callback):
        def after_pred(self):
            weight = self.learn.selection.item_weight
            if weight is not None: seen.update(weight.tolist())

    cb = BatchSelection(PolicyMethod(some, gather=True, weighs=True), warmup=0)
    quiet_fit(table_learner(cbs=[cb, Weights()], n=32+96), 1)
    assert seen=={1.,5.}

def test_stats_may_be_read_at_any_time():
    rows = []
    class Nosy(Callback):
        def after_batch(self): rows.append(len(self.learn.selection.stats))

    plain = quiet_fit(table_learner().top_loss(seed=0), 2)
    learn = quiet_fit(table_learner(cbs=Nosy()).top_loss(seed=0), 2)
    assert [v[2:-1] for v in plain.recorder.values]==[v[2:-1] for v in learn.recorder.values]
    assert max(rows)==14
    pd.testing.assert_frame_equal(plain.selection.stats, learn.selection.stats)

def test_gathered_items_wait_while_the_window_is_closed():
    "3 items of each batch; each fifth trains as it is, the very last one, too, before what waited"
    learn = table_learner(n=32+160).random_subset(keep=.2, gather=True, warmup=0, interrupt=5)
    quiet_fit(learn, 2)
    for _,epoch in learn.selection.stats.groupby('epoch'):
        assert epoch.step.tolist()==list(range(11))
        assert epoch.seen.tolist()==[16]*10+[0]
        assert epoch.kept.tolist()==[3,3,3,3,16]*2+[0]
        assert epoch.trained.tolist()==[0,0,0,0,16,0,16,0,0,16,8]

NO_CHOICES = [
    lambda scores: scores.argsort()[:5],
    lambda scores: Chosen(scores>scores.median()),
    lambda scores: Chosen(scores[:3]),
    lambda scores: None]

@pytest.mark.parametrize('wrong', NO_CHOICES)
def test_a_choice_of_another_kind_is_refused(wrong):
    class Wrong(BatchMethod):
        def choose(self, scores, now): return wrong(scores)

    learn = table_learner(cbs=BatchSelection(Wrong(), warmup=0))
    with pytest.raises(TypeError, match=r'Wrong.choose: got .*wanted Chosen\(rows\)'): quiet_fit(learn, 1)

@pytest.mark.filterwarnings('ignore:Epoch 1. no item')
def test_where_nothing_is_chosen_an_epoch_makes_a_step_without_a_gradient():
    largest = []
    class Spy(Inside):
        def after_backward(self): largest.append(max(p.grad.abs().max().item() for p in self.model.parameters()))

    learn = quiet_fit(table_learner(cbs=[BatchSelection(Nothing()), Spy()]), 2)
    assert learn.selection.stats.query('epoch==1').trained.tolist()==[0]*6+[2]
    assert learn.selection.item_weight.tolist()==[0,0]
    assert len(largest)==len(learn.recorder.losses)==8
    assert largest[-1]==0<min(largest[:-1])
    assert learn.recorder.values[1][2]==0

OUT_OF_RANGE = [
    lambda learn: learn.top_loss(keep=0),
    lambda learn: learn.top_loss(keep=2),
    lambda learn: learn.batch_loss_filter(1.2),
    lambda learn: learn.batch_loss_filter(min_sample_perc=-1),
    lambda learn: learn.selective_backprop(beta=-1),
    lambda learn: learn.selective_backprop(beta=1, keep=.25),
    lambda learn: learn.selective_backprop(hist_size=0),
    lambda learn: learn.selective_backprop(interrupt=1),
    lambda learn: learn.selective_backprop(start=.9, end=.5),
    lambda learn: learn.selective_backprop(warmup=-1),
    lambda learn: learn.top_loss(scale_factor=1.5),
    lambda learn: learn.top_loss(score='luck'),
    lambda learn: learn.top_loss(seed=-1)]

@pytest.mark.parametrize('call', OUT_OF_RANGE)
def test_numbers_are_checked_when_the_callback_is_made(call):
    learn = table_learner()
    with pytest.raises(ValueError, match='got'): call(learn)
    assert not learn.selection

def test_wrong_types_and_words():
    learn = table_learner()
    with pytest.raises(TypeError, match="keep: got 'half'"): learn.top_loss(keep='half')

    def misspelt(method, option, wanted=''):
        match = f"got an unknown option '{option}', wanted {wanted}"
        with pytest.raises(TypeError, match=match): getattr(learn, method)(**{option: 1})
    misspelt('top_loss', 'kep', "'keep'")
    for option in ('score','gather','scale_factor','passes','presample'): misspelt('info_batch', option)

# Multi-label and segmentation

# Saving
def to_input(i): return torch.randn(4, generator=torch.Generator().manual_seed(i))

def to_label(i): return i%3

def saved_learner(path, cb):
    set_seed(0)
    items = Datasets(list(range(64)), [[to_input], [to_label]], splits=[range(48), range(48, 64)])
    dls = items.dataloaders(bs=16, num_workers=0)
    return learner_on(dls, path=path, cbs=cb)

@pytest.mark.parametrize('cls', by_path(methods()), ids=one_liner)
def test_pickle_and_export(cls, tmp_path):
    learn = quiet_fit(saved_learner(tmp_path, cls(**full_epochs(cls, 0))), 3)
    copy = pickle.loads(pickle.dumps(learn))
    assert copy.selection.loader is None # no pixels but the dataset's
    assert not tensors_in([copy.selection.current.xb, copy.selection.door.handed])
    quiet_fit(copy, 3)
    assert type(copy.selection) is cls
    assert copy.selection is not learn.selection

    learn.export('x.pkl')
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        loaded = load_learner(tmp_path/'x.pkl')
    x,_ = learn.dls.valid.one_batch()
    torch.testing.assert_close(loaded.model.eval()(x), learn.model.eval()(x))

WITHOUT_SELBACK = """
import pickle, sys, warnings
sys.modules['selback'] = None
warnings.simplefilter('ignore')
from fastai.learner import load_learner
for name in sys.argv[1:]:
    learn = load_learner(name)
    with learn.no_bar(): print(*learn.predict(3)[2].tolist())
"""

@pytest.mark.slow
@pytest.mark.filterwarnings('ignore')
def test_an_exported_learner_needs_no_selback(tmp_path):
    "And is as another one: it takes a selection again, by the line that attached it"
    def items_of(i): return torch.full((4,), i/64) # by value in the file, since they are local
    def label_of(i): return i%3
    items = Datasets(list(range(64)), [[items_of], [label_of]], splits=[range(48), range(48, 64)])
    names,wanted = [],[]
    for cls in methods():
        name = one_liner(cls)
        learn = learner_on(items.dataloaders(bs=16, num_workers=0), path=tmp_path)
        quiet_fit(learn.add_cbs([cls(**full_epochs(cls, 0)), ScaleLR()]), 2)
        before = learn.add_cb(SaveSelection()).selection
        learn.export(f'{name}.pkl')
        assert learn.selection is before
        names.append(tmp_path/f'{name}.pkl')
        with learn.no_bar(): wanted.append(learn.predict(3)[2])

    done = subprocess.run([sys.executable, '-c', WITHOUT_SELBACK, *names], capture_output=True, text=True, check=True)
    got = [[float(o) for o in line.split()] for line in done.stdout.splitlines()]
    torch.testing.assert_close(torch.tensor(got), torch.stack(wanted))

    loaded = load_learner(names[0])
    assert not loaded.selection
    assert type(loaded.top_loss().selection) is TopLossCallback

@on_a_gpu
@pytest.mark.parametrize('gather', [False, True])
@pytest.mark.parametrize('precision', ['to_fp16', 'to_bf16'])
def test_gpu(precision, gather):
    learn = table_learner(bs=32, drop_last=True)
    learn.dls.to(torch.device('cuda'))
    getattr(learn, precision)().selective_backprop(gather=gather, warmup=0)
    stats = quiet_fit(learn, 4).selection.stats
    last = -1 if gather else None # step of an epoch: it takes what is left
    sizes = [n for _,steps in stats.query('trained>0').groupby('epoch') for n in steps.trained[:last]]
    assert sizes and all(n%8==0 for n in sizes)
    assert not torch.is_autocast_enabled('cuda')
    assert stats.trained.sum()<stats.seen.sum()

# A batch by hand, as fastai's MixUp notebook has it
BY_HAND = [
    (TopLossCallback, dict(keep=1., gather=True), 16),
    (TopLossCallback, dict(keep=.25), 4),
    (InfoBatchCallback, {}, 16)]

@pytest.mark.parametrize('cls,kwargs,n', BY_HAND)
@pytest.mark.parametrize('mixup', [False, True])
def test_events_by_hand(cls, kwargs, n, mixup):
    learn = table_learner(cbs=[cls(**kwargs, warmup=0)]+[MixUp(.4)]*mixup)
    learn.epoch,learn.training,learn.pct_train,learn.n_epoch = 0,True,0.,1
    dl = learn.dl = learn.dls.train
    learn.n_iter = len(dl)
    state = dl.rng.getstate()
    x,y = dl.one_batch()
    dl.rng.setstate(state)
    chance = table_learner().model.eval()(x).log_softmax(1).gather(1, y[:,None])[:,0]
    order = chance.argsort() # the hardest first
    k = int(16*kwargs['keep']) if cls is TopLossCallback else 16
    rows = torch.cat([order[:k].sort().values, order[k:].sort().values])[:n] # gathered, it is filled up from itself

    learn('before_train')
    learn.iter,b = next(enumerate(learn.dl))
    learn._split(b)
    learn('before_batch')
    assert torch.equal(learn.y, y[rows])
    assert len(learn.x)==n
    assert torch.equal(learn.x, x[rows])!=mixup
    assert hasattr(learn.loss_func, '__self__')==mixup

# As many steps as plain training

# Taken off, and what was saved
def test_columns_stay_until_the_fit_ends():
    "Of a selection that is taken off in a callback's `before_epoch`"
    names = ['epoch','train_loss','valid_loss','samp_perc','loss_perc','full_loss','time']
    class Off(Callback):
        def before_epoch(self):
            if self.epoch==1: self.learn.full_batches()
    class Names(Callback):
        order = 90
        def after_epoch(self): assert list(self.recorder.metric_names)==names

    learn = quiet_fit(table_learner(cbs=[TopLossCallback(.5, warmup=0), Off(), Names()]), 3)
    assert [len(row) for row in learn.recorder.values]==[5,2,2]
    assert not learn.selection
    assert not ours(learn)

    quiet_fit(learn.remove_cb(learn.names), 1)
    assert list(learn.recorder.metric_names)==names[:3]+names[-1:]
    assert len(learn.recorder.values[-1])==2

# What is told
class Tells(TopLossCallback):
    def before_fit(self):
        super().before_fit()
        self.tell_once('begins', 'told as the fit begins.')

    def after_batch(self): self.tell_once('batch', 'told within an epoch.')

class Interrupts(Callback):
    order,run_valid = 60,False
    def __init__(self, ex): self.ex = ex
    def before_batch(self):
        if self.epoch==1: raise self.ex

TOLD = ['Tells: told as the fit begins.','Tells: told within an epoch.']

@pytest.mark.parametrize('cbs,n_rows', [([], 3), ([Interrupts(CancelFitException)], 1)], ids=['whole','cancelled'])
def test_nothing_is_told_into_the_training_table(cbs, n_rows, capsys):
    "Header and rows stand together; what comes up within the fit is told below them"
    learn = table_learner(cbs=[Tells(.5), *cbs])
    with learn.no_bar(): learn.fit(3)
    said = capsys.readouterr().out.splitlines()
    assert [line.startswith('[') for line in said]==[True]*n_rows+[False]*2
    assert said[n_rows:]==TOLD

def test_what_an_error_kept_from_being_told_is_told_by_the_next_fit(capsys):
    learn = table_learner(cbs=[Tells(.5, warmup=0), Interrupts(ZeroDivisionError('no'))])
    with pytest.raises(ZeroDivisionError): quiet_fit(learn, 2)
    assert not capsys.readouterr().out
    quiet_fit(learn.remove_cb(Interrupts), 1)
    assert capsys.readouterr().out.splitlines()==TOLD

def test_weights_of_a_method_scale_the_gradient():
    class Grad(Callback):
        order = 60
        def before_fit(self): self.seen = []
        def after_backward(self): self.seen.append(next(self.model.parameters()).grad.clone())
    class Unweighted(BothTails):
        def choose(self, scores, now): return Chosen(super().choose(scores, now).rows)

    def first_grad(cb): return quiet_fit(table_learner(cbs=[cb, Grad()]), 1).grad.seen[0]
    torch.testing.assert_close(first_grad(BatchSelection(BothTails(), warmup=0))*2,
        first_grad(BatchSelection(Unweighted(), warmup=0)))

def test_scale_factor_look_ahead_does_not_disturb():
    def trained(scale): return weights(quiet_fit(sized_learner().top_loss(keep=1., scale_factor=scale, warmup=0), 2))
    assert same(trained(1.), trained(.5))

def test_entropy_selects_without_labels():
    seen = []
    def note(batch, scores, losses, chosen): seen.append((scores, batch.xb[0], weights(cb.learn)))
    cb = watch_choices(TopLossCallback(keep=.5, score='entropy', warmup=0), note)
    learn = quiet_fit(table_learner(cbs=cb), 1)
    scores,x,state = seen[-1]
    model = mlp()
    model.load_state_dict(state)
    torch.testing.assert_close(scores, torch.distributions.Categorical(logits=model.eval()(x)).entropy())
    *_,loss_perc,_ = learn.recorder.values[0]
    assert 0<loss_perc<1

KEPT_OF_BAD = [
    (lambda: BatchLossFilterCallback(.5, warmup=0), 16),
    (lambda: SelectiveBackpropCallback(warmup=0), 16),
    (lambda: TopLossCallback(.25, warmup=0), 4),
    (lambda: SelectiveBackpropCallback(keep=.25, gather=False, warmup=0), 4)]

class BadLoss(nn.Module):
    "Cross-entropy with some losses that are not finite"
    reduction = 'mean'

    def __init__(self, bad=float('nan')):
        super().__init__()
        self.bad = bad

    def forward(self, pred, y):
        losses = F.cross_entropy(pred, y, reduction='none')
        if not pred.requires_grad: losses = torch.cat([torch.full_like(losses[:1], self.bad), losses[1:]])
        return losses if self.reduction=='none' else losses.mean()

@pytest.mark.parametrize('bad', [float('nan'), float('inf')])
@pytest.mark.parametrize('make,kept', KEPT_OF_BAD)
def test_losses_that_are_not_finite(make, kept, bad):
    learn = table_learner(n=32+96, loss_func=BadLoss(bad), cbs=make())
    match = 'Epoch [01]: [56] of (80|96) losses were NaN or infinite'
    with pytest.warns(UserWarning, match=match) as warned: quiet_fit(learn, 2)
    assert len([w for w in warned if 'NaN' in str(w.message)])==2
    assert steps(learn, scored=True).kept.eq(kept).all()
    *_,samp_perc,loss_perc,full_loss = learn.recorder.values[-1]
    assert is_known(samp_perc)
    assert is_known(loss_perc)
    assert is_known(full_loss)
