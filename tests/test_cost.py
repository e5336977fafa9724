"What selecting costs: cheap looks, one pass, no waiting, steady shapes, and a selection that stands aside"
import contextlib, copy, math, time

import pytest, torch
from fastai.callback.core import Callback, CancelBatchException
from fastai.callback.mixup import CutMix
from fastai.callback.training import GradientAccumulation
from helpers import *
from selback.cost import Governor, relative_cost, trial_step
from selback.items import ItemPool, join, take
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

def name_of(v): return v.__name__.removesuffix('Callback') if isinstance(v, type) else str(v)
every_method = pytest.mark.parametrize('cls', methods(), ids=name_of)
KEEP = [(cls,kwargs) for cls in methods() for kwargs in KEEP_ALL[cls.__name__]]

# a cheap look
class Looks(nn.Module):
    "Notes what it is asked to look at"
    def __init__(self): super().__init__(); self.net,self.looks = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)),[]
    def forward(self, x):
        if not self.training: self.looks.append((tuple(x.shape),x.is_contiguous(memory_format=torch.channels_last),torch.is_autocast_enabled('cpu')))
        return self.net(x)

def test_low_precision_and_resolution_go_together():
    x,model = torch.randn(4, 3, 16, 16),Looks()
    pred = ScoringPass(.5, 'bf16')(model, (x,))
    with torch.autocast('cpu', dtype=torch.bfloat16),torch.no_grad(): wanted = model.eval()(F.interpolate(x, size=8, mode='bilinear', align_corners=False)).float()
    assert pred.dtype==torch.float32 and model.looks[0]==((4,3,8,8),True,True) and not torch.is_autocast_enabled('cpu')
    torch.testing.assert_close(pred, wanted, rtol=.02, atol=.02)
    assert (pred-ScoringPass(.5)(model, (x,))).abs().max()>1e-6 # it was bf16

def test_a_proxy_scores_and_the_model_does_not():
    learn,proxy = image_learner(),Looks()
    learn.model = main = Looks()
    chosen,scores = [],[]
    class Spy(TopLossCallback):
        def choose(self, s):
            got = super().choose(s)
            scores.append((self.x.as_subclass(torch.Tensor).clone(), self.y.as_subclass(torch.Tensor).clone(), s))
            return got
    learn._do_epoch_validate = lambda *args: None
    quiet_fit(learn.add_cb(Spy(.5, warmup=0, scorer=proxy)), 1)
    assert len(proxy.looks)>=4 and not main.looks
    for x,y,s in scores: torch.testing.assert_close(s, F.cross_entropy(proxy.net(x), y, reduction='none').detach())

@pytest.mark.parametrize('decay', [0., .5])
def test_a_copy_follows_the_model_every_k_steps(decay):
    class Follow(Callback):
        order,run_valid = 90,False
        def before_fit(self): self.average,self.n = None,0
        def before_batch(self):
            if self.average is None: self.average = weights(self.learn)
            copy = self.learn.selection.scoring.scorer.model.state_dict()
            floats = [k for k,v in copy.items() if v.is_floating_point() and 'running' not in k]
            for k in floats: torch.testing.assert_close(copy[k], self.average[k])
        def after_step(self):
            self.n += 1
            if self.n%3: return
            now = weights(self.learn)
            for k,v in self.average.items(): self.average[k] = decay*v+(1-decay)*now[k] if v.is_floating_point() else now[k]
    learn = quiet_fit(table_learner(cbs=[TopLossCallback(.5, warmup=0, scorer=ModelCopy(every=3, decay=decay)), Follow()]), 2)
    assert learn.follow.n>9

def test_an_int8_copy_scores_nearly_alike_and_is_converted_when_due():
    learn = image_learner(cbs=[cb := TopLossCallback(.5, warmup=0, scorer=Int8Copy(every=3))], n=16+80)
    copies,errors = [],[]
    class Spy(Callback):
        order,run_valid = SelectionCallback.order+1,False
        def before_batch(self): copies.append(cb.scoring.scorer.model)
    score = cb.score_items
    def both():
        scores,losses = score()
        exact = F.cross_entropy(ScoringPass()(learn.model, plain(learn.xb)), plain(learn.yb)[0], reduction='none')
        errors.append(float((losses-exact).abs().max()))
        return scores,losses
    cb.score_items = both
    before = weights(learn)
    quiet_fit(learn.add_cb(Spy()), 2)
    assert max(errors)<.15 and max(errors)>0 and not same(before, weights(learn))
    changes = [i for i in range(1, len(copies)) if copies[i] is not copies[i-1]]
    assert changes and all(i%3==0 for i in changes) and not any(isinstance(m, torch.nn.quantized.Conv2d) for m in learn.model.modules())

def test_a_model_that_cannot_be_converted_is_refused_before_training():
    class Branches(nn.Module):
        def __init__(self): super().__init__(); self.net = mlp()
        def forward(self, x): return self.net(x) if x.sum()>0 else self.net(-x)
    learn = table_learner(cbs=TopLossCallback(scorer=Int8Copy()))
    learn.model = Branches()
    before = weights(learn)
    with pytest.raises(ValueError, match="Int8Copy: the model can't be converted.*use precision='bf16' instead"): quiet_fit(learn, 1)
    assert same(before, weights(learn))

def test_a_copy_is_saved_and_goes_on():
    def make(): return table_learner(cbs=TopLossCallback(.5, warmup=0, seed=0, scorer=ModelCopy(every=7, decay=.5)))
    whole = make()
    quiet_fit(whole, 1)
    state,trained,opt = whole.selection.state_dict(),weights(whole),copy.deepcopy(whole.opt.state_dict())
    resumed = make()
    resumed.model.load_state_dict(trained)
    resumed.create_opt()
    resumed.opt.load_state_dict(opt)
    resumed.selection.load_state_dict(state)
    copied = resumed.selection.scoring.scorer.of(resumed.model).state_dict()
    assert same(copied, state['parts']['scoring']['model']) and not same(copied, trained)
    for learn in whole,resumed: # both go on, on the same batches
        set_seed(9)
        learn.dls.train.rng.seed(9)
        quiet_fit(learn, 1)
    assert same(weights(whole), weights(resumed)) and not same(trained, weights(resumed))

def test_a_look_of_its_own_is_refused_with_one_pass():
    for k,v in dict(scale_factor=.5, precision='bf16', scorer=nn.Linear(1, 1)).items():
        with pytest.raises(ValueError, match='passes: got 1, so that there is no scoring pass'): TopLossCallback(passes=1, **{k: v})
    with pytest.raises(ValueError, match="passes: got 3, wanted 1, 2 or 'auto'"): TopLossCallback(passes=3)
    with pytest.raises(ValueError, match="passes: got 'auto' with auto=False"): TopLossCallback(passes='auto', auto=False)
    with pytest.raises(ValueError, match='score_batches: got 2 with passes=1'): SelectiveBackpropCallback(passes=1, score_batches=2)
    for passes in 1,'auto':
        with pytest.raises(ValueError, match='passes: got .*, but importance sampling draws from several batches'): ImportanceSamplingCallback(passes=passes)

@pytest.mark.parametrize('k', [2, 3, 99])
def test_batches_are_scored_together(k):
    learn = table_learner(n=32+132, drop_last=False).add_cb(cb := SelectiveBackpropCallback(beta=1, warmup=0, seed=0, score_batches=k))
    looks,scored,chosen,trained = [],[],[],[]
    class Rows(Callback):
        order,run_valid = SelectionCallback.order-1,False
        def before_batch(self): self.learn.seen = [*getattr(self.learn, 'seen', []), *self.x[:,0].tolist()]
    class After(Callback):
        order,run_valid = 60,False
        def after_loss(self): trained.extend(self.x[:,0].tolist())
    choose = cb.choose
    def spy(scores):
        got = choose(scores)
        looks.append(len(scores))
        scored.extend(learn.x[:,0].tolist())
        chosen.extend(learn.x[got.idx,0].tolist())
        return got
    cb.choose = spy
    quiet_fit(learn.add_cbs([Rows(), After()]), 2)
    first = trained[:16] # nothing is skipped before one batch has trained
    assert sorted(scored+first)==sorted(learn.seen) # each is scored once
    left = [] if not len(cb.waiting) else cb.waiting.items[0][0][:,0].tolist()
    assert chosen==trained[16:]+left # each chosen item trains once, in its turn
    assert max(looks)==min(16*k, 132)
    stats = learn.selection.stats
    assert (stats.trained<=16).all() and stats.seen.sum()==264 and len(cb.unscored)==0 and stats.full_loss[stats.scored & (stats.kept>0)].notna().all()
    with pytest.raises(ValueError, match='score_batches: got 2 with gather=False'): TopLossCallback(score_batches=2)

# one pass
MIXES = dict(plain=lambda: [], mixup=lambda: [MixUp(.4)], amp=lambda: [CpuAmp()], accumulation=lambda: [GradientAccumulation(24)], amp_mixup=lambda: [CpuAmp(), MixUp(.4)])

@pytest.mark.parametrize('mix', MIXES)
@pytest.mark.parametrize('cls,kwargs', [(c,k) for c,k in KEEP if c not in (InfoBatchCallback,ImportanceSamplingCallback)], ids=name_of)
def test_keeping_all_in_one_pass_is_plain_training(cls, kwargs, mix):
    def run(cb): return quiet_fit(table_learner(cbs=[*MIXES[mix](), *([cb] if cb else [])]), 3)
    ours,plain = run(cls(warmup=0, passes=1, **kwargs)),run(None)
    assert same(weights(ours), weights(plain)) and [v[:2] for v in ours.recorder.values]==[v[:2] for v in plain.recorder.values]
    assert [float(o) for o in ours.recorder.losses]==[float(o) for o in plain.recorder.losses]

@pytest.mark.parametrize('mix', ['plain', 'mixup', 'cutmix'])
def test_one_pass_trains_the_hardest_of_the_training_forward(mix):
    looks = []
    class Ahead(Callback):
        order,run_valid = SelectionCallback.order-1,False
        def after_pred(self):
            pred,y,mixer = self.pred.detach(),self.y.as_subclass(torch.Tensor),next((cb for cb in self.learn.cbs if isinstance(cb, (MixUp,CutMix))), None)
            losses = F.cross_entropy(pred, y, reduction='none')
            if mixer: losses = mixer.lam*losses+(1-mixer.lam)*F.cross_entropy(pred, mixer.yb1[0].as_subclass(torch.Tensor), reduction='none')
            looks.append(losses)
    class Behind(Callback):
        order,run_valid = 60,False
        def after_loss(self):
            hardest = looks[-1].sort(descending=True).values[:len(looks[-1])//2]
            assert len(self.y)==len(self.x)==len(self.pred)==len(hardest)
            torch.testing.assert_close(self.loss.as_subclass(torch.Tensor).detach(), hardest.mean())
    mixer = dict(plain=[], mixup=[MixUp(.4)], cutmix=[CutMix(1.)])[mix]
    quiet_fit(image_learner(n=16+80, cbs=[*mixer, TopLossCallback(.5, passes=1, warmup=0), Ahead(), Behind()]), 2)
    assert len(looks)==20

def test_one_pass_looks_no_second_time_and_enters_no_autocast_again():
    class Counts(CpuAmp):
        def before_fit(self):
            super().before_fit()
            enter,self.n = self.autocast.__enter__,0
            class Once(type(self.autocast)):
                def __enter__(s): self.n += 1; assert not torch.is_autocast_enabled('cpu'); return super().__enter__()
            self.autocast = Once('cpu', dtype=torch.bfloat16)
    learn = table_learner(cbs=[Counts(), TopLossCallback(.5, passes=1, warmup=0)])
    forwards = []
    learn.model.register_forward_pre_hook(lambda m,args: forwards.append(m.training))
    quiet_fit(learn, 2)
    steps = len(learn.selection.stats)
    assert forwards.count(True)==steps and not torch.is_autocast_enabled('cpu') and (learn.selection.stats.trained%8==0)[learn.selection.stats.seen==16].all()

def test_nothing_chosen_in_one_pass_is_a_step_without_weight():
    class Nothing(SelectionCallback):
        def choose(self, scores): return Chosen(torch.zeros(0 if self.iter%2 else 4, dtype=torch.int64)+torch.arange(0 if self.iter%2 else 4))
    class Grads(Callback):
        order,run_valid = 60,False
        def after_backward(self): self.learn.norms = [*getattr(self.learn, 'norms', []), sum(float(p.grad.abs().sum()) for p in self.model.parameters())]
    learn = quiet_fit(table_learner(cbs=[Nothing(passes=1, warmup=0), Grads(), CpuAmp()]), 1)
    assert [n==0 for n in learn.norms]==[bool(i%2) for i in range(len(learn.norms))] and not torch.is_autocast_enabled('cpu')
    assert learn.selection.stats.kept.tolist()[:4]==[4,0,4,0]

# no waiting
class NoWaiting(TorchDispatchMode):
    "Counts what makes the host wait for the device, or copies between them"
    def __init__(self): super().__init__(); self.seen = []
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket._qualified_op_name
        elsewhere = 'device' in (kwargs or {}) and kwargs['device'] is not None and name in ('aten::_to_copy',) and torch.device(kwargs['device'])!=args[0].device
        masks = name.startswith(('aten::index', 'aten::masked_select')) and any(isinstance(o, torch.Tensor) and o.dtype==torch.bool for a in args[1:2] for o in (a if isinstance(a, (tuple,list)) else [a]))
        if masks or name in ('aten::_local_scalar_dense', 'aten::nonzero', 'aten::is_nonzero', 'aten::equal') or elsewhere: self.seen.append(name)
        return func(*args, **(kwargs or {}))

FIXED = dict(top_loss=lambda: TopLossCallback(.4, warmup=0), tails=lambda: TopLossCallback(.3, also_bottom=.2, warmup=0), random=lambda: RandomSubsetCallback(.4, warmup=0),
    composer=lambda: SelectiveBackpropCallback(keep=.4, gather=False, warmup=0), one_pass=lambda: TopLossCallback(.4, warmup=0, passes=1), entropy=lambda: TopLossCallback(.4, score='entropy', warmup=0),
    bound=lambda: TopLossCallback(.4, score='grad_bound', warmup=0), gathered=lambda: TopLossCallback(.4, gather=True, warmup=0), copy=lambda: TopLossCallback(.4, scorer=ModelCopy(), warmup=0),
    info_batch=lambda: InfoBatchCallback(warmup=0), before=lambda: RandomSubsetCallback(.4, before_loading=True, warmup=0))
COUNTED = dict(batch_loss_filter=lambda: BatchLossFilterCallback(warmup=0), selective_backprop=lambda: SelectiveBackpropCallback(warmup=0), importance=lambda: ImportanceSamplingCallback(warmup=0, tau=.01))

@pytest.mark.parametrize('name', FIXED | COUNTED)
def test_a_step_does_not_wait_for_the_device(name, monkeypatch):
    cb,batches = (FIXED | COUNTED)[name](),[]
    call = SelectionCallback.__call__
    def watched(self, event):
        in_step = event in ('before_batch','after_pred','after_loss','before_step','after_step','after_batch') and self.training
        if event=='before_batch' and self.training and (batches or len(self.report._rows)>2): batches.append([]) # the first batch is tried out
        if not in_step or not batches: return call(self, event)
        with NoWaiting() as mode:
            try: return call(self, event)
            finally: batches[-1].extend(mode.seen)
    monkeypatch.setattr(SelectionCallback, '__call__', watched)
    learn = table_learner(cbs=cb, n=32+160)
    quiet_fit(learn, 3)
    assert len(batches)>=6 and learn.selection.stats.trained.sum()<learn.selection.stats.seen.sum()
    if name in FIXED: assert not any(batches)
    else: assert all(b in ([], ['aten::_local_scalar_dense']) for b in batches) # the one number that the count is

@pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU')
@pytest.mark.parametrize('name', FIXED)
def test_a_step_does_not_synchronize_a_gpu(name, monkeypatch):
    call,seen = SelectionCallback.__call__,[]
    def watched(self, event):
        in_step = event in ('before_batch','after_pred','after_loss','before_step','after_step','after_batch') and self.training
        seen.append(event=='before_batch' and self.training)
        if not in_step or sum(seen)<4: return call(self, event) # the first batch is tried out
        torch.cuda.set_sync_debug_mode('error')
        try: return call(self, event)
        finally: torch.cuda.set_sync_debug_mode('default')
    monkeypatch.setattr(SelectionCallback, '__call__', watched)
    learn = table_learner(cbs=FIXED[name](), n=32+160)
    learn.dls.to(torch.device('cuda'))
    stats = quiet_fit(learn, 3).selection.stats
    assert stats.trained.sum()<stats.seen.sum() and next(learn.model.parameters()).is_cuda

def test_the_counting_of_waits_finds_them():
    with NoWaiting() as mode:
        torch.arange(3).sum().item()
        torch.arange(3)[torch.arange(3)>1]
    assert mode.seen==['aten::_local_scalar_dense', 'aten::index']

# steady shapes
def test_channels_last_stays():
    x = torch.randn(8, 3, 5, 5).contiguous(memory_format=torch.channels_last)
    def is_last(t): return t.is_contiguous(memory_format=torch.channels_last)
    idx = torch.tensor([0,3,7])
    kept = take((x, torch.arange(8)), idx)[0]
    torch.testing.assert_close(kept, x[idx])
    pool = ItemPool()
    for _ in range(3): pool.add((kept, idx))
    assert is_last(kept) and is_last(join(kept, kept)) and is_last(pool.pop(8)[0]) and is_last(take(x, slice(2, 4)))

def test_batch_sizes_are_few_in_mixed_precision():
    sizes = {}
    for name,cb in dict(gathered=SelectiveBackpropCallback(warmup=0), bucketed=BatchLossFilterCallback(.6, warmup=0, multiple_of=32), rounded=BatchLossFilterCallback(.6, warmup=0)).items():
        learn = quiet_fit(table_learner(bs=64, n=32+640, drop_last=True, cbs=[CpuAmp(), cb]), 2)
        sizes[name] = set(learn.selection.stats.trained)
    assert sizes['gathered']<={0,64} and sizes['bucketed']<={32,64} and all(n%8==0 for n in sizes['rounded'])

def test_a_compiled_model_meets_few_sizes():
    from torch._dynamo.testing import CompileCounter
    compiled = {}
    for name,cb in dict(gathered=SelectiveBackpropCallback(warmup=0, seed=0), any_size=BatchLossFilterCallback(.6, warmup=0)).items():
        torch._dynamo.reset()
        counter = CompileCounter()
        learn = table_learner(bs=32, n=32+640, drop_last=True, cbs=cb)
        learn.model = torch.compile(learn.model, backend=counter, dynamic=False)
        learn._do_epoch_validate = lambda *args: None
        quiet_fit(learn, 2)
        compiled[name] = counter.frame_count
    torch._dynamo.reset()
    assert compiled['gathered']<=2<compiled['any_size'] # in training and in evaluation mode

# the arithmetic
@pytest.mark.parametrize('c,s,wanted', [(1, 1/3, 2/3), (1, 2/3, 1), (.25, 1/3, 1.25/3), (.25, 1/2, 1.75/3), (1, .25, 1.75/3), (0, .25, .25)])
def test_cost_on_paper(c, s, wanted):
    "A backward pass costs two forward passes: c + 3s of 3"
    times = dict(full=3., small=1., score=c, step=3., wait=0.)
    for whole in (False, True): assert math.isclose(relative_cost(times, 1/3, s, whole), wanted)
    assert math.isclose(relative_cost(times, 1/3, s, score_share=1/3), wanted-c*2/9) # every third epoch is scored

def test_a_fixed_cost_of_a_step_is_not_saved():
    times = dict(full=3., small=2., score=.1, step=3.5, wait=0.)
    assert math.isclose(relative_cost(times, .5, .5), (3.5-1+.1)/3.5)
    assert relative_cost(times | dict(small=4.), .5, .5)>1 # a smaller step that takes longer saves nothing

def test_a_loader_with_workers_sets_the_pace():
    times = dict(full=3., small=1., score=1., step=3., wait=3.)
    assert math.isclose(relative_cost(times, 1/3, 1/3), 5/6) and relative_cost(times, 1/3, 1/3, workers=2)==1.
    assert math.isclose(relative_cost(times | dict(wait=0.), 1/3, 1/3, workers=2), 2/3)

@pytest.mark.parametrize('workers', [0, 2])
def test_items_that_are_not_loaded_cost_no_waiting(workers):
    times = dict(full=3., small=1., score=1., step=3., wait=6.)
    epoch = 6+3-2+1,1/3*6+3-2,1/3*6+3-2 # of three epochs, one is loaded and scored
    of_loader = (9+3+3)/27 # with workers it is the loader that counts: 9 seconds for a whole batch
    wanted = of_loader if workers else sum(epoch)/27
    assert math.isclose(relative_cost(times, 1/3, 1/3, score_share=1/3, skips_loading=True, workers=workers), wanted)

# the governor
SETTINGS = dict(plain=lambda: [], amp=lambda: [CpuAmp()], mixup=lambda: [MixUp(.4)], accumulation=lambda: [GradientAccumulation(24)])

@pytest.mark.governed
@pytest.mark.parametrize('setting', SETTINGS)
@pytest.mark.parametrize('warmup', [0, 1])
@every_method
def test_measuring_leaves_no_trace(cls, warmup, setting):
    kwargs = dict(warmup=warmup, seed=0) | {ImportanceSamplingCallback: dict(tau=0), BatchLossFilterCallback: dict(min_loss_perc=.5)}.get(cls, {})
    def run(auto): return quiet_fit(table_learner(n=32+160, cbs=[*SETTINGS[setting](), cls(auto=auto, **kwargs)]), 3)
    ours,plain = run('warn'),run(False)
    assert (ours.selection.stats.kept<ours.selection.stats.seen).any()
    assert same(weights(ours), weights(plain)) and [v[:2] for v in ours.recorder.values]==[v[:2] for v in plain.recorder.values]
    if ours.selection.governs: assert ours.selection.governor.measured and len(ours.selection.governor.seen['small'])==3

def test_a_trial_step_leaves_no_trace_when_it_fails():
    model = mlp()
    F.cross_entropy(model(torch.randn(8, 4)), torch.zeros(8).long()).backward()
    x = torch.randn(8, 4)
    before,grads,rng = {k: v.clone() for k,v in model.state_dict().items()},[p.grad for p in model.parameters()],torch.get_rng_state()
    def fails(pred, y): raise ZeroDivisionError('no')
    with pytest.raises(ZeroDivisionError): trial_step(model, fails, (x,), (torch.zeros(8).long(),))
    assert same(before, model.state_dict()) and all(a is p.grad for a,p in zip(grads, model.parameters())) and torch.equal(rng, torch.get_rng_state())

class Clock:
    "Time that passes as we say: for a plain batch, a scoring pass, and a trial step"
    def __init__(self, monkeypatch, step, score, small):
        import selback.callback, selback.governed
        self.t,self.times,self.calls = 0.,dict(score=score, small=small),0
        monkeypatch.setattr(selback.governed, 'now', lambda device='cpu': self.tick(0))
        monkeypatch.setattr(selback.callback, 'now', lambda device='cpu': self.tick(0))
        monkeypatch.setattr(selback.governed, 'seconds', self.seconds)
        self.step,look = step,SelectionCallback.score_items
        def takes_time(cb):
            self.tick(score)
            return look(cb)
        takes_time.__name__ = 'score_items'
        monkeypatch.setattr(SelectionCallback, 'score_items', takes_time)
    def tick(self, dt): self.t += dt; return self.t
    def seconds(self, f, device):
        self.calls += 1
        return self.times['score' if getattr(f, '__name__', '')=='score_items' else 'small']
    def callback(clock):
        class Ticks(Callback):
            order,run_valid = 0,False
            def before_backward(self): clock.tick(clock.step*len(self.yb[0])/16)
        return Ticks()

DEAR,CHEAP = dict(step=1.1, score=1., small=.4),dict(step=3., score=1., small=1.)

@pytest.mark.governed
@pytest.mark.parametrize('warmup', [0, 1])
@pytest.mark.parametrize('auto', ['warn', True, False])
@pytest.mark.parametrize('cls,kwargs', [(TopLossCallback, dict(keep=1/3)), (SelectiveBackpropCallback, dict(beta=2)), (SelectiveBackpropCallback, dict(keep=1/3, gather=False))], ids=name_of)
def test_a_selection_that_does_not_pay_is_told_of_or_stands_aside(cls, kwargs, auto, warmup, monkeypatch, capsys):
    clock = Clock(monkeypatch, **DEAR)
    clock.times['small'] = 1.1*.9 # a frozen body: a third of the items takes nearly as long
    learn = quiet_fit(table_learner(n=32+320, cbs=[clock.callback(), cls(auto=auto, warmup=warmup, **kwargs)]), 2+warmup)
    said,stats = capsys.readouterr().out,learn.selection.stats
    chosen = (stats.kept<stats.seen).sum()
    if auto is False: assert not clock.calls and not said and chosen>20
    else: assert said.count('selecting does not pay here')==1 and 0<clock.calls<=12
    if auto=='warn': assert 'It goes on' in said and chosen>20
    if auto is True: assert 'It stands aside' in said and chosen<=6 and (stats.trained==stats.seen).sum()>=34
    if auto: assert 'does not pay' in learn.selection.card

@pytest.mark.governed
@pytest.mark.parametrize('auto', ['warn', True])
@every_method
def test_a_selection_that_pays_says_nothing_and_goes_on(cls, auto, monkeypatch, capsys):
    clock = Clock(monkeypatch, **CHEAP)
    kwargs = dict(tau=1.01) if cls is ImportanceSamplingCallback else dict(min_loss_perc=.5) if cls is BatchLossFilterCallback else {}
    learn = quiet_fit(table_learner(n=32+320, cbs=[clock.callback(), cls(auto=auto, **kwargs)]), 4)
    assert 'pay' not in capsys.readouterr().out and not learn.selection.governor.aside and learn.selection.stats.trained.sum()<learn.selection.stats.seen.sum()
    if learn.selection.governs and cls.scored: assert abs(learn.selection.governor.times['step']-3)<1e-6

@pytest.mark.governed
def test_it_selects_again_once_less_is_kept(monkeypatch, capsys):
    monkeypatch.setattr(Governor, 'every', 10)
    clock = Clock(monkeypatch, **CHEAP)
    class Learns(SelectionCallback):
        def choose(self, scores): return Chosen(torch.arange(15 if self.epochs_done<3 else 4))
    learn = quiet_fit(table_learner(n=32+320, cbs=[clock.callback(), Learns(auto=True)]), 6)
    said,stats = capsys.readouterr().out,learn.selection.stats
    kept = stats.groupby('epoch').kept.mean()
    assert said.count('It stands aside')==1 and said.count('It selects again')==1 and kept[0]==kept[2]==16 and kept[5]==4 and kept[3]<16
    assert ((stats.kept<16) & (stats.epoch==1)).sum()==5 # it decides after five

def known(cb, monkeypatch, **times):
    "A governor that has measured already"
    monkeypatch.setattr(SelectionCallback, '_meet_circumstances', lambda self: None)
    cb.governor.small_share = 1/3
    for _ in range(3): cb.governor.note(**(dict(full=3., small=1., score=1., step=3., wait=0.) | times))

@pytest.mark.governed
def test_one_odd_batch_does_not_reopen_a_selection_for_good(monkeypatch):
    monkeypatch.setattr(Governor, 'every', 10)
    class Odd(SelectionCallback):
        def choose(self, scores):
            self.calls = getattr(self, 'calls', 0)+1
            return Chosen(torch.arange(2 if self.calls in (6, 13) else 16))
    learn = table_learner(n=32+3200, cbs=(cb := Odd(auto=True, warmup=0)), drop_last=True)
    known(cb, monkeypatch)
    quiet_fit(learn, 1)
    assert cb.governor.aside and 18<cb.calls<30 # of 200: five, five more after each odd one, and single looks

@pytest.mark.governed
def test_more_kept_later_is_noticed(monkeypatch, capsys):
    monkeypatch.setattr(Governor, 'every', 10)
    clock = Clock(monkeypatch, **CHEAP)
    class Forgets(SelectionCallback):
        def choose(self, scores): return Chosen(torch.arange(4 if self.epochs_done<3 else 15))
    learn = quiet_fit(table_learner(n=32+320, cbs=[clock.callback(), Forgets(auto=True)]), 5)
    kept = learn.selection.stats.groupby('epoch').kept.mean()
    assert kept[1]==kept[2]==4 and kept[4]==16 and capsys.readouterr().out.count('It stands aside')==1

@pytest.mark.governed
def test_another_fit_is_measured_anew():
    learn = table_learner(n=32+320, cbs=(cb := TopLossCallback(1/3)))
    for p in list(learn.model.parameters())[:-2]: p.requires_grad_(False)
    quiet_fit(learn, 1)
    frozen = cb.governor.seen['full']
    quiet_fit(learn, 1)
    assert cb.governor.seen['full'] is frozen and len(frozen)==3 and len(cb.epoch_times)==2
    learn.model.requires_grad_(True)
    quiet_fit(learn, 1)
    assert cb.governor.seen['full'] is not frozen and len(cb.governor.seen['full'])==3 and len(cb.epoch_times)==1
    other = table_learner(n=32+320)
    learn.remove_cb(cb)
    whole = cb.governor.seen
    quiet_fit(other.add_cb(cb), 1)
    assert cb.governor.seen is not whole and len(cb.epoch_times)==1

@pytest.mark.governed
def test_the_clock_overrules_the_prediction(monkeypatch, capsys):
    clock = Clock(monkeypatch, **CHEAP)
    class Slow(Callback):
        order,run_valid = 1,False
        def before_backward(self): clock.tick(2.9*(self.learn.selection._chose)) # a small step that takes as long as a whole one
    learn = quiet_fit(table_learner(n=32+320, cbs=[clock.callback(), Slow(), TopLossCallback(.25, auto=True)]), 4)
    cb = learn.selection
    kept = cb.stats.groupby('epoch').kept.mean()
    assert kept.tolist()==[16,4,16,16] and cb.governor.aside and cb.governor.cost>1
    said = capsys.readouterr().out
    assert said.count('selecting does not pay here')==1 and 'It stands aside' in said and 'It stands aside now.' in cb.card

def test_a_stale_copy_begins_with_the_selection():
    copies = []
    class Notes(Callback):
        order,run_valid = 60,False
        def after_loss(self):
            cb = self.learn.selection
            if cb._chose: copies.append((weights(cb.scoring.scorer), self.learn.before))
        def before_batch(self): self.learn.before = weights(self.learn)
    learn = table_learner(n=32+160, drop_last=True, cbs=TopLossCallback(.5, warmup=1, scorer=ModelCopy(every=1000)))
    quiet_fit(learn.add_cb(Notes()), 2)
    copied,first = copies[0]
    assert same(copied, first) and same(copies[-1][0], first) and not same(copies[-1][1], first)

def test_networks_that_do_not_survive_int8_are_refused():
    from fastai.tabular.model import TabularModel
    set_seed(0)
    batch = torch.randint(0, 4, (64, 1)),torch.randn(64, 2)
    with pytest.raises(ValueError, match='Int8Copy: got predictions that correlate by 0.*use precision'): Int8Copy().of(TabularModel([(4,3)], 2, 2, [200,100]).eval(), batch)

def test_errors_name_the_scorer():
    with pytest.raises(TypeError, match='scorer: got the class Int8Copy, wanted a module'): TopLossCallback(scorer=Int8Copy)
    with pytest.raises(ValueError, match='the scorer must take the inputs of the model'): quiet_fit(table_learner(cbs=TopLossCallback(scorer=nn.Linear(9, 3))), 1)
    for bad in dict(n_epoch=0),dict(lr=-1.):
        with pytest.raises(ValueError, match=f'{[*bad][0]}: got'): train_proxy(table_learner(), mlp(), **bad)

class InPlace(nn.Module):
    def __init__(self): super().__init__(); self.net = mlp()
    def forward(self, x): return self.net(x.sub_(.5).div_(.25))

class Counts(nn.Module):
    "A model that keeps more than tensors"
    def __init__(self): super().__init__(); self.net,self.n = mlp(),0; self.register_buffer('ema', torch.zeros(4))
    def forward(self, x):
        if self.training: self.ema,self.n = self.ema*.9+.1*x.mean(0),self.n+1
        return self.net(x-self.ema)

@pytest.mark.governed
@pytest.mark.parametrize('model', [InPlace, Counts])
@pytest.mark.parametrize('kwargs', [dict(auto=False), dict(warmup=5), dict(), dict(passes=1)], ids=str)
def test_models_with_habits_train_as_ever(model, kwargs):
    def run(*cbs):
        learn = table_learner(n=192, cbs=cbs)
        set_seed(1)
        learn.model = model()
        return quiet_fit(learn, 2)
    ours,plain = run(TopLossCallback(1., **(dict(warmup=0) | kwargs))),run()
    assert same(weights(ours), weights(plain)) and getattr(ours.model, 'n', 0)==getattr(plain.model, 'n', 0)

@pytest.mark.governed
@pytest.mark.parametrize('fault', [RuntimeError('one batch size only'), torch.cuda.OutOfMemoryError('full')], ids=str)
def test_measuring_never_ends_a_training(fault, capsys):
    class Sixteen(nn.Module):
        def __init__(self): super().__init__(); self.net = mlp()
        def forward(self, x):
            if len(x)!=16: raise fault
            return self.net(x)
    learn = table_learner(n=192, drop_last=True, cbs=(cb := SelectiveBackpropCallback(auto=True)))
    learn.model = Sixteen()
    learn._do_epoch_validate = lambda *args: None
    quiet_fit(learn, 2)
    said = capsys.readouterr().out
    assert said.count('could not be measured')==1 and not cb.governs and 'Not measured' in cb.card and cb.stats.trained.sum()>16

@pytest.mark.governed
def test_tiny_batches_are_not_measured_for_ever():
    learn = quiet_fit(table_learner(bs=2, n=64, cbs=(cb := TopLossCallback(.5))), 1)
    assert not cb.governs and not cb.governor.seen.get('small') and len(cb.governor.seen.get('wait', []))<=1

@pytest.mark.parametrize('make', [lambda: ModelCopy(every=1000), lambda: Int8Copy(every=1000)], ids=['copy','int8'])
def test_a_copy_is_of_the_model_that_trains(make):
    copy,x = make(),torch.randn(8, 4)
    first,second = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)),nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 3))
    for model in first,second,first:
        got,wanted = copy.of(model, (x,))(x),model(x)
        assert (got-wanted).abs().max()<.1*wanted.abs().max()
        for _ in range(1000): copy.step(model)
    copy.step(second) # not its model

def test_a_model_that_cannot_be_copied_is_named():
    model = mlp()
    model.extra = model[0].weight*2 # not a leaf
    with pytest.raises(ValueError, match="ModelCopy: the model can't be copied"): quiet_fit(learner_with(model, TopLossCallback(scorer=ModelCopy())), 1)

def learner_with(model, cb):
    learn = table_learner(cbs=cb)
    learn.model = model
    return learn

@pytest.mark.parametrize('event', ['before_train','before_batch','after_loss','after_batch','before_epoch','after_train'])
def test_a_selection_may_be_attached_within_an_epoch(event):
    class Attaches(Callback):
        order,run_valid = 60,False
        def __call__(self, name):
            if name==event and self.learn.selection is None: self.learn.top_loss(keep=.5, warmup=0)
            super().__call__(name)
    learn = quiet_fit(table_learner(n=32+160, cbs=Attaches()), 2)
    assert (learn.selection.stats.query('epoch==1').kept==8).all()

@pytest.mark.governed
def test_importance_sampling_stands_aside_and_looks_again(monkeypatch):
    monkeypatch.setattr(Governor, 'every', 5)
    learn = table_learner(n=32+640, cbs=(cb := ImportanceSamplingCallback(tau=0, warmup=0, auto=True)))
    known(cb, monkeypatch, score=2.5)
    cb.governor.cost,cb.governor.aside = 1.5,True
    quiet_fit(learn, 1)
    assert cb.governor.aside and (cb.stats.trained==cb.stats.seen).all()

@pytest.mark.governed
def test_stale_losses_that_stand_aside_look_again(monkeypatch):
    monkeypatch.setattr(Governor, 'every', 3)
    learn,shares = table_learner(n=32+320, cbs=(cb := StaleLossCallback(2, n=3, auto=True))),[]
    look = Governor.look
    monkeypatch.setattr(Governor, 'look', lambda self, kept, **kwargs: (shares.append((cb.epoch, kept)), look(self, kept, **kwargs)))
    known(cb, monkeypatch)
    cb.governor.cost,cb.governor.aside = 1.5,True
    quiet_fit(learn, 6)
    first = shares[0][0]
    assert first in (1, 2, 3) and all(0<kept<1 for _,kept in shares)
    assert learn.selection.stats.query('epoch==@first+1').trained.sum()<learn.selection.stats.query('epoch==@first+1').seen.sum()

@pytest.mark.governed
def test_waiting_is_for_the_loader_alone():
    learn = table_learner(n=32+320, drop_last=True, cbs=(cb := TopLossCallback(1/3, warmup=2)))
    learn._do_epoch_validate = lambda *args: time.sleep(.3)
    quiet_fit(learn, 2)
    one = table_learner(n=32+16, drop_last=True, cbs=(short := TopLossCallback(1/3, warmup=5)))
    one._do_epoch_validate = lambda *args: time.sleep(.3)
    quiet_fit(one, 5)
    assert max(cb.governor.seen['wait'])<.2 and not short.governor.seen.get('wait')

@pytest.mark.governed
def test_cancelled_batches_are_no_steps():
    class Skips(Callback):
        order,run_valid = 20,False
        def before_batch(self):
            if self.iter%3!=2: return
            self.learn.yb = ()
            raise CancelBatchException
    learn = quiet_fit(table_learner(n=32+320, drop_last=True, cbs=[cb := TopLossCallback(1/3, warmup=2), Skips()]), 2)
    seen = cb.governor.seen
    assert len(seen['step'])==len(seen['full'])==3 and all(step>=full for step,full in zip(seen['step'], seen['full']))

@pytest.mark.governed
def test_a_look_is_remembered_once(monkeypatch):
    monkeypatch.setattr(Governor, 'every', 2)
    learn = table_learner(n=32+160, drop_last=True, cbs=(cb := TopLossCallback(.95, auto=True, warmup=0, max_quantile=.9)))
    known(cb, monkeypatch)
    cb.governor.cost,cb.governor.aside = 1.2,True
    quiet_fit(learn, 1)
    assert cb.governor.aside and cb.memory.seen.eq(1).all()

def test_a_slow_first_batch_is_no_saving():
    class Slow(Callback):
        order,run_valid = 30,False
        def before_batch(self):
            if not self.epoch and not self.iter: time.sleep(2.)
    cb = RandomSubsetCallback(1., auto=False)
    quiet_fit(table_learner(n=32+320, drop_last=True, cbs=[cb, Slow()]), 2)
    assert len(cb.epoch_times)==2 and cb.epoch_times[0][1]<1

def test_a_trial_step_leaves_the_parameters_of_a_loss_alone():
    loss,model = Learned(),mlp()
    trial_step(model, loss, (torch.randn(8, 4),), (torch.zeros(8).long(),))
    assert loss.scale.grad is None and all(p.grad is None for p in model.parameters())

class Learned(nn.Module):
    "A loss with a parameter"
    reduction = 'mean'
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
    def forward(self, pred, y): return F.cross_entropy(pred*self.scale, y, reduction=self.reduction)

@pytest.mark.parametrize('interrupt', [0, 11, 5])
def test_batches_that_wait_to_be_scored_outlive_an_epoch(interrupt):
    "Also where its last batch is a full one"
    learn = table_learner(n=32+176, drop_last=True, cbs=(cb := SelectiveBackpropCallback(beta=0, warmup=0, score_batches=4, interrupt=interrupt, seed=0)))
    trained,later = [],[]
    class Rows(Callback):
        order,run_valid = 60,False
        def after_loss(self): trained.extend(self.x[:,0].tolist())
    quiet_fit(learn.add_cb(Rows()), 1)
    assert len(trained)+len(cb.waiting)+len(cb.unscored)==176 # beta=0 keeps all
    state,waited = cb.state_dict(),(len(cb.waiting),len(cb.unscored),cb._n_unscored)
    assert (waited[1]>0)==(interrupt==11)
    quiet_fit(learn, 1)
    assert len(trained)+len(cb.waiting)+len(cb.unscored)==352 and max(trained.count(x) for x in trained)==2
    cb.load_state_dict(state)
    assert (len(cb.waiting),len(cb.unscored),cb._n_unscored)==waited

def test_weighted_items_of_several_batches_are_scored_together():
    class Weighs(SelectionCallback):
        def choose(self, scores): return Chosen(torch.arange(len(scores)//2), torch.full((len(scores)//2,), 2.))
    learn = quiet_fit(table_learner(n=32+320, drop_last=True, cbs=Weighs(warmup=0, gather=True, score_batches=2)), 1)
    assert learn.selection.stats.trained.sum()+len(learn.selection.waiting)==16+(320-16)//2

def test_a_loss_without_reduction_is_computed_once_at_rest():
    calls = []
    def loop(pred, y):
        if len(pred)==1: float(pred.detach().sum()) # which `vmap` can't follow
        calls.append(len(pred))
        return (pred[:,0]-y).square().mean()
    learn,losses = table_learner(n=32+160, drop_last=True, loss_func=loop, cbs=(cb := TopLossCallback(.5, warmup=9, auto=False))),[]
    class Notes(Callback):
        order,run_valid = 60,False
        def after_loss(self): losses.append(self.loss.item())
    learn.add_cb(Notes())
    learn._do_epoch_validate = lambda *args: None
    quiet_fit(learn, 1)
    assert cb.loss_way=='loop' and calls.count(16)<=10+3 and calls[-5:]==[16]*5
    assert cb.stats.full_loss.tolist()==pytest.approx(losses)

@pytest.mark.governed
@pytest.mark.parametrize('clock,passes', [(DEAR, 1), (CHEAP, 2)])
def test_auto_passes_are_picked_by_measurement(clock, passes, monkeypatch, capsys):
    clock = Clock(monkeypatch, **clock)
    if passes==1: clock.times['small'] = 1.
    learn = quiet_fit(table_learner(n=32+320, cbs=[clock.callback(), TopLossCallback(.25, passes='auto')]), 3)
    assert learn.selection.passes_now==passes and learn.selection.stats.query('epoch==2').kept.eq(4).all()
    assert (capsys.readouterr().out.count('It selects in the training pass now')==1)==(passes==1)

@pytest.mark.governed
def test_the_card_tells_what_was_saved():
    learn = quiet_fit(table_learner(n=32+320, cbs=TopLossCallback(.25)), 3)
    cb = learn.selection
    assert len(cb.epoch_times)==3 and math.isclose(cb.saved, 1-(cb.epoch_times[1][1]+cb.epoch_times[2][1])/2/cb.epoch_times[0][1])
    assert f'Measured: a selecting epoch took {1-cb.saved:.2f} of the time of a full one' in cb.card and 'of a plain step' in cb.card

def test_governors_check_what_they_get():
    with pytest.raises(ValueError, match="auto: got 'yes', wanted 'warn', True or False"): TopLossCallback(auto='yes')
    for bad in 0,1,None: # `0==False`, but is no answer
        with pytest.raises(ValueError, match='auto: got'): TopLossCallback(auto=bad)
    for bad in dict(every=0),dict(decay=1.),dict(decay=-1): 
        with pytest.raises(ValueError): ModelCopy(**bad)

# a proxy first
def test_a_proxy_is_trained_on_the_stream_and_nothing_else_changes():
    def run(first):
        proxy,learn = mlp(),table_learner()
        if first: train_proxy(learn, proxy, n_epoch=2, every=2, lr=.1)
        return quiet_fit(learn, 2)
    assert same(weights(run(False)), weights(run(True)))
    set_seed(0)
    learn,proxy = table_learner(),mlp()
    before = {k: v.clone() for k,v in proxy.state_dict().items()}
    assert train_proxy(learn, proxy, every=4) is proxy and not same(before, proxy.state_dict())
    assert proxy[1].num_batches_tracked==2 # of seven batches, every fourth
