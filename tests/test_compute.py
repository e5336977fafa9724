"Compute: what it comes to by hand, that it disturbs nothing and nothing disturbs it"
import matplotlib
matplotlib.use('agg')
import pandas as pd, pytest, torch
from fastai.callback.core import Callback
from fastai.callback.training import GradientAccumulation
from helpers import *
from matrix import TASKS
from selback.core.scoring import counting
from selback.callback.reducible_loss import reducible_loss
from selback.bench.compute import Compute, Unit, count_flops, counted_steps, unit_of
from selback.bench.findings import *
from selback.bench.compare import compare
from torch.nn import functional as F

pytestmark = pytest.mark.slow # workbench

LOOK = 2*(4*8+8*3) # FLOPs of `mlp`, by hand: a multiplication and an addition for each weight

class Spy(Callback):
    "Counts, without a look at the package, the items that models are called with"
    order,run_valid = 80,False
    def before_fit(self):
        self.trained,self.called = 0,Trail()
        def note(model, xb): self.called.append((torch.is_grad_enabled(), self.learn.training, n_items(xb)))
        self.handle = self.model.register_forward_pre_hook(note)

    def after_backward(self): self.trained += n_items(self.yb)
    def after_fit(self): self.handle.remove()

    @property
    def looked(self): return sum(n for has_grad,in_training,n in self.called.seen if in_training and not has_grad)

def counted_fit(learn, n_epoch=2, unit=Unit(flops=LOOK)):
    "What a fit costs beside what it trains, and what it called"
    compute,spy = Compute(learn.model, unit),Spy()
    with counting(compute): quiet_fit(learn, n_epoch, cbs=spy)
    return compute,spy

def looks(spy, cost=1/3):
    "What the looks come to that were called for, in items that train"
    return pytest.approx(spy.looked*cost)

def top(keep=.5, **kwargs): return TopLossCallback(keep, **{'warmup':0} | kwargs)

# Of a first batch of 16: twice as it is, once as its own modules train and once by half, then both again after a step
ASKED,ASKED_FIRST = 5*16,3*16+8

# looks
@pytest.mark.parametrize('passes', [0,1])
def test_what_takes_no_look_costs_its_items(passes):
    "Where one pass serves both, its backward pass is that of the whole batch"
    compute,spy = counted_fit(table_learner(cbs=[top(passes=1)] if passes else []), 3)
    assert spy.trained==300
    assert compute.items==spy.looked==0
    assert compute.is_exact

WAYS = dict(two_passes={}, bf16=dict(precision='bf16'), gather=dict(gather=True),
    interrupt=dict(warmup=1, interrupt=2), tracked=dict(track_items=True))
OTHERS = dict(autocast=CPUMixedPrecision, mixup=lambda: MixUp(.4), accumulation=lambda: GradientAccumulation(40))

@pytest.mark.parametrize('way', [*WAYS,*OTHERS])
def test_looks_at_full_cost(way):
    options = {k: v() if callable(v) else v for k,v in WAYS.get(way, {}).items()}
    others = [OTHERS[way]()] if way in OTHERS else []
    compute,spy = counted_fit(table_learner(cbs=[top(**options), *others]), 3)
    assert spy.looked>=100+ASKED
    assert spy.trained<300
    assert compute.is_exact
    assert compute.items==looks(spy)

@pytest.mark.parametrize('cls,options', [
    (ImportanceSamplingCallback, dict(presample=2, tau=.01, warmup=0)),
    (SelectiveBackpropCallback, dict(beta=3, warmup=0)),
    (StaleLossCallback, dict(warmup=0)),
    (PrioritizedSamplingCallback, dict(warmup=1)),
    (InfoBatchCallback, dict(warmup=1)),
    (RandomSubsetCallback, dict(warmup=0))], ids=lambda o: getattr(o, '__name__', ''))
def test_looks_of_methods(cls, options):
    compute,spy = counted_fit(short_learner(cbs=cls(**options)), 3)
    assert (spy.looked>16)==does_score(cls)
    assert compute.items==looks(spy)

@pytest.mark.parametrize('transposed', [False,True])
@pytest.mark.parametrize('groups', [1,2,8])
def test_a_step_costs_three_passes_whatever_the_groups(groups, transposed):
    "Of a convolution whose input wants a gradient, too"
    layer = nn.ConvTranspose2d if transposed else nn.Conv2d
    conv,x = layer(8, 8, 3, groups=groups),torch.randn(2, 8, 6, 6, requires_grad=True)
    out,look,_ = count_flops(lambda: conv(x))
    places = 6*6 if transposed else out.shape[2]*out.shape[3]
    assert look==2*2*places*3*3*8*8//groups
    _,step,_ = count_flops(lambda: conv(x).sum().backward())
    assert step==3*look

@pytest.mark.parametrize('share', [.5,.75,1.])
def test_looks_at_lower_resolution_cost_their_pixels(share):
    compute,spy = counted_fit(image_learner(cbs=top(scale_factor=share)))
    assert spy.looked==72+5*8
    assert compute.items==looks(spy, share**2/3)

def test_looks_by_another_model():
    linear = 2*4*3/LOOK
    compute,spy = counted_fit(table_learner(cbs=top(scorer=nn.Linear(4, 3))))
    assert not spy.looked
    assert compute.items==pytest.approx((200+ASKED)*linear/3)

# other batches

@pytest.mark.parametrize('task', ['dict','nested','two_inputs'])
def test_inputs_of_any_structure(task):
    compute,spy = counted_fit(TASKS[task][0](cbs=top()))
    assert compute.is_exact
    assert spy.looked==2*56+ASKED
    assert compute.items==looks(spy)

class Words(nn.Module):
    "As dear as its input is long"
    def __init__(self):
        super().__init__()
        self.first,self.last = nn.Linear(2, 5),nn.Linear(5, 3)
    def forward(self, x): return self.last(self.first(x)).mean(1)

def test_a_look_is_a_third_however_long_a_text_is():
    texts = [(torch.randn(n, 2), i%3) for i,n in enumerate([3]*16+[9]*16+[5]*8)]
    dl = TfmdDL(texts, bs=8, num_workers=0)
    compute,spy = counted_fit(learner_on(DataLoaders(dl, dl), Words(), cbs=top()))
    assert spy.looked==80+5*8
    assert compute.items==looks(spy)

# the unit
class NotesUnit(Callback):
    run_valid = False
    def after_batch(self): self.unit = unit_of(self.learn)

def unit_with(learn):
    notes = NotesUnit()
    quiet_fit(learn, 1, cbs=notes)
    return notes.unit

def frozen(learn):
    "All but the head"
    for p in [*learn.model.parameters()][:-2]: p.requires_grad_(False)
    return learn

def test_a_step_costs_three_passes_where_all_of_it_trains():
    assert unit_with(table_learner())==Unit(3., LOOK)
    assert unit_with(table_learner(cbs=[MixUp(.4), GradientAccumulation(40), CPUMixedPrecision()]))==Unit(3., LOOK)

def test_a_frozen_body_makes_a_look_as_dear_as_training():
    assert unit_with(frozen(table_learner()))==(pytest.approx(1+2*8*3/LOOK), LOOK) # the head's weights
    assert unit_with(frozen(image_learner())).passes==pytest.approx(1, rel=.01) # the head is next to nothing

    unit = Unit(1.5, LOOK)
    compute,spy = counted_fit(frozen(table_learner(cbs=top())), 2, unit=unit)
    assert spy.looked==200+ASKED
    assert compute.items==looks(spy, 1/1.5)

# what is not counted
class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm,self.head = nn.LSTM(1, 5, batch_first=True),nn.Linear(5, 3)

    def forward(self, x):
        states,_ = self.lstm(x[...,None])
        return self.head(states[:,-1])

class Attends(nn.Module):
    "In evaluation, PyTorch has one operation for all of its layer"
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x): return self.head(self.layer(x[:,None])[:,0])

class Halves(nn.Bilinear):
    def __init__(self): super().__init__(2, 2, 3)
    def forward(self, x): return super().forward(x[:,:2], x[:,2:])

def with_model(cls):
    learn = short_learner()
    learn.model = cls()
    return learn

@pytest.mark.parametrize('make', [partial(with_model, Recurrent),partial(with_model, Halves),regression_learner],
    ids=['lstm','bilinear','no products'])
def test_where_a_network_is_not_counted_a_look_of_its_own_is_a_third(make):
    assert unit_with(make())==Unit()
    learn = make()
    learn.top_loss(.5, warmup=0)
    compute,spy = counted_fit(learn, unit=Unit())
    assert compute.is_exact
    assert spy.looked
    assert compute.items==looks(spy)

@pytest.mark.parametrize('scorer,unit', [(Recurrent,Unit(flops=LOOK)), (Attends,Unit(flops=LOOK)),
    (Halves,Unit(flops=LOOK)), (partial(nn.Linear, 4, 3),Unit())], ids=['lstm','attention','bilinear','unit'])
def test_another_network_that_is_not_counted_is_taken_for_as_large(scorer, unit):
    compute,_ = counted_fit(short_learner(cbs=top(scorer=scorer())), unit=unit)
    assert not compute.is_exact
    known,_ = counted_fit(short_learner(cbs=top()))
    assert compute.items==pytest.approx(known.items)

# what counting leaves alone
class Stateful(nn.Module):
    "A loss that counts and draws"
    def __init__(self):
        super().__init__()
        self.n = 0
        self.register_buffer('seen', torch.zeros(()))

    def forward(self, pred, y, reduction='mean'):
        self.n += 1
        self.seen += 1
        return F.cross_entropy(pred, y, reduction=reduction)*(1+.1/self.n)+0*torch.rand(())

def learner_for(task, cbs=None):
    if task=='stateful': return short_learner(loss_func=Stateful(), cbs=cbs)
    return TASKS[task][0](cbs=cbs)

@pytest.mark.parametrize('options', [None, {}, dict(passes=1)], ids=['plain','two passes','one pass'])
@pytest.mark.parametrize('task', [*TASKS,'stateful'])
def test_counting_leaves_training_alone(task, options):
    of_item = (lambda pred, y: (pred-y).square().flatten(1).mean(1)) if task=='item_loss' else None
    def ended(fit):
        cbs = [] if options is None else [top(item_loss=of_item, **options)]
        learn = learner_for(task, cbs)
        fit(learn, 2)
        return weights(learn),random_states(),getattr(learn.loss_func, 'n', 0),learn.recorder.losses

    plain,*others = ended(quiet_fit)
    counted,*same_others = ended(counted_fit)
    assert same(plain, counted)
    assert others==same_others

# preparation
def test_steps_of_any_learner_are_counted_within_the_context():
    count,learn = Compute(unit=Unit(flops=LOOK)),table_learner(cbs=GradientAccumulation(40))
    plain = Learner._do_one_batch
    with counting(count),counted_steps(): quiet_fit(learn, 2)
    inputs = 2*4*8 # whose gradient nothing needs
    assert count.passes==pytest.approx(200*(3*LOOK-inputs)/LOOK)
    before = count.passes
    assert Learner._do_one_batch is plain
    assert same(weights(learn), weights(quiet_fit(table_learner(cbs=GradientAccumulation(40)), 2)))

    with counting(count): quiet_fit(learn, 1)
    assert count.passes==before

    with pytest.raises(KeyError),counted_steps(): raise KeyError
    assert Learner._do_one_batch is plain

def error(pred, y): return (pred.argmax(1)!=y).float().mean()

def learner_with(model, **kwargs):
    "Epochs of 6 batches"
    dls = dls_of(*class_data(), drop_last=True)
    return learner_on(dls, model, metrics=error, **kwargs)

def learner_of(**kwargs): return learner_with(mlp(), **kwargs)
def study(methods, **kwargs): return compare(learner_of, methods, **{'seeds':1, 'plot':False} | kwargs)
def end(runs, method): return runs[runs.method==method].iloc[-1]

def by_proxy(n_epoch=1):
    def prepared():
        proxy = learner_with(nn.Linear(4, 3))
        with proxy.no_bar(),proxy.no_logging(): proxy.fit(n_epoch)
        return top(scorer=proxy.model)
    return prepared

PROXY,PROXY_LOOK = 2*2*12/LOOK/3,2*12/LOOK/3 # it has one layer

def test_holdout_losses_stand_in_the_count():
    def prepared():
        train,holdout = learner_of(),learner_of()
        with holdout.no_bar(),holdout.no_logging(): return top(score=reducible_loss(holdout, train.dls, n_epoch=3))
    run = end(study({'reducible': prepared}, epochs=1), 'reducible')
    inputs = 2*4*8 # whose gradient nothing needs
    step = 1-inputs/LOOK/3
    n_looks = 100+ASKED+96 # its losses, and those of the run; its validation is not counted, as no other is
    assert run.compute==pytest.approx(3*96*step + n_looks/3 + 48)

@pytest.mark.parametrize('n', [50,70])
def test_preparation_that_eats_up_the_budget_ends_the_run(n):
    runs = study({'none':'none', 'proxy': by_proxy(5)}, compute=n)
    run = end(runs, 'proxy')
    assert len(runs[runs.method=='proxy'])==1
    assert run.compute==pytest.approx(5*96*PROXY+(ASKED_FIRST+16)*PROXY_LOOK) # the first batch was asked, and scored
    assert run.backpropagated==run.selected==0
    assert np.isfinite(run.valid_loss)
    assert never_selected(runs)==['proxy']

def test_preparation_that_leaves_a_part_of_the_budget():
    run = end(study({'proxy': by_proxy(2)}, compute=192), 'proxy')
    n_looks = ASKED+2*run.backpropagated
    assert run.compute==pytest.approx(2*96*PROXY + run.backpropagated + n_looks*PROXY_LOOK)
    assert 192<=run.compute<192+8+16*PROXY_LOOK

# budgets
@pytest.mark.parametrize('method,step', [
    ('none', 16),
    ('top_loss(keep=.5,warmup=0)', 8+16*1/3),
    ('random_subset(keep=.5,gather=True)', 16),
    ('selective_backprop(beta=2)', 16+16*1/3),
    ('importance_sampling(presample=3,tau=.01,warmup=0)', 16+48*1/3),
    ('stale_loss(warmup=0)', 16+16*1/3),
    ('top_loss(keep=.5,passes=1,warmup=0)', 16),
    ('prioritized_sampling(warmup=0)', 16),
    ('info_batch', 16)])
def test_a_budget_of_compute_ends_every_run_alike(method, step):
    run = end(study([method], compute=500), method)
    assert 500<=run.compute<500+step
    assert run.budget=='500 compute'
    assert run.annealing=='one_cycle'
    assert run.compute>=run.backpropagated

def test_the_column_by_hand():
    runs = study(['none','top_loss(keep=.25)','random_subset(keep=.25)'], epochs=3)
    share = 1/3
    known = runs.groupby('method').compute.agg(list)
    assert known['none']==[96,192,288]
    assert known['random_subset(keep=.25)']==[96,96+24,96+48]
    assert known['top_loss(keep=.25)']==pytest.approx([96+ASKED*share, 96+24+(ASKED+96)*share, 96+48+(ASKED+192)*share])

def test_the_share_of_a_budget_is_what_schedules_follow():
    pcts = []
    class Notes(Callback):
        order,run_valid = 99,False
        def before_backward(self): pcts.append((self.pct_train, self.learn.cost_log.spent['compute']))

    compare(lambda: learner_of(cbs=Notes()), ['top_loss(keep=.5,warmup=0)'], compute=400, seeds=1, plot=False)
    first = (ASKED_FIRST+16)/3 # what the first batch is asked, and its scoring pass
    begins = [i for i,(_,spent) in enumerate(pcts) if spent==pytest.approx(first)]
    steps = pcts[begins[-1]:] # after the piece that wakes the machine up
    assert len(steps)>20
    assert all(pct==pytest.approx(spent/400) for pct,spent in steps)

# who selected
def test_who_selected_is_told_by_steps():
    gathers = 'top_loss(keep=1.,warmup=0)'
    weighs = 'prioritized_sampling(warmup=0,uniform=.5)'
    methods = ['none', weighs, 'top_loss(keep=.5,warmup=9)', gathers, 'stale_loss(warmup=1)']
    runs = study(methods, epochs=2)
    last = runs[runs.epoch==2].set_index('method')
    assert last.selected.tolist()==[0,12,0,12,2] # the last one gathers
    assert last.kept[weighs]==last.kept[gathers]==1
    in_time,late = 'stale_loss(warmup=2)','stale_loss(warmup=3)'
    assert never_selected(study(['none', in_time, late], compute=3*96))==[late]

# files
def test_a_file_from_before_is_added_to(tmp_path):
    path = tmp_path/'runs.csv'
    study(['none'], epochs=2, path=path)
    pd.read_csv(path).drop(columns=['compute','selected']).to_csv(path, index=False)
    runs = study(['none','top_loss(keep=.5,warmup=0)'], epochs=2, path=path)
    assert runs.compute.isna().tolist()==runs.selected.isna().tolist()==[True]*2+[False]*2
    assert set(pd.read_csv(path).columns)>={'compute','selected'}
    assert verdict(runs).endswith('.')
    assert len(show_table(runs))
