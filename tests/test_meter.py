"What selecting costs, measured: the arithmetic, the meter alone, and a selection that is told of or stands aside"
import math, re, time
from decimal import Decimal

import pytest
import selback.callback.batch
import selback.callback.meter
import selback.callback.meter
import torch
from fastai.callback.core import Callback, CancelBatchException
from fastai.callback.training import GradientAccumulation
from helpers import *
from selback.callback.ranks import Ranks
from selback.callback.meter import CostMeter, cost_parts, relative_cost, trial_step
from torch.nn import functional as F

def name_of(v): return v.__name__.removesuffix('Callback') if isinstance(v, type) else str(v)
pytestmark = pytest.mark.measured
every_method = pytest.mark.parametrize('cls', methods(), ids=name_of)

# the arithmetic
@pytest.mark.parametrize('c,s,wanted', [(1, 1/3, 2/3), (1, 2/3, 1), (.25, 1/3, 1.25/3), (.25, 1/2, 1.75/3), (1, .25, 1.75/3), (0, .25, .25)])
def test_cost_on_paper(c, s, wanted):
    "A backward pass costs two forward passes: c + 3s of 3"
    times = dict(full=3., small=1., score=c, step=3., wait=0.)
    for whole in (False, True): assert math.isclose(relative_cost(times, 1/3, s, whole_steps=whole), wanted)
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

# a trial step
def test_a_trial_step_leaves_no_trace_when_it_fails():
    model = mlp()
    F.cross_entropy(model(torch.randn(8, 4)), torch.zeros(8).long()).backward()
    x = torch.randn(8, 4)
    before,grads,rng = {k: v.clone() for k,v in model.state_dict().items()},[p.grad for p in model.parameters()],torch.get_rng_state()
    def fails(pred, y): raise ZeroDivisionError('no')
    with pytest.raises(ZeroDivisionError): trial_step(model, fails, (x,), (torch.zeros(8).long(),))
    assert same(before, model.state_dict()) and all(a is p.grad for a,p in zip(grads, model.parameters())) and torch.equal(rng, torch.get_rng_state())

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

# the meter alone
class Time:
    "Time that passes as it is told to"
    def __init__(self, monkeypatch):
        self.t = 0.
        for module in selback.callback.meter,selback.callback.meter: monkeypatch.setattr(module, 'clock', lambda device='cpu': self.t)
    def tick(self, dt): self.t += dt

BS = 9 # a third of it is 3

class Steps:
    "A training by hand: a meter, and how long everything takes"
    def __init__(self, monkeypatch, n_batches=10, wait=0., forth_and_back=3., opt=.5, score=1., choice=.1, **kwargs):
        self.time,self.meter,self.n_batches = Time(monkeypatch),CostMeter(**kwargs),n_batches
        self.wait,self.per_item,self.opt,self.score,self.choice = wait,forth_and_back/BS,opt,score,choice
        self.said,self.trials,self.looks = [],[],0
    def tell(self, text): self.said += [text] if text else []
    def trial(self, n): self.trials.append(n); self.time.tick(n*self.per_item)
    def look(self): self.looks += 1; self.time.tick(self.score)
    def begin_fit(self, circumstances='these', **method): self.meter.begin_fit(circumstances, **method)
    def epoch(self, selecting=True, kept=1/3, n=BS):
        "Batches that are looked at and trained in part, or whole ones"
        self.meter.begin_epoch(self.n_batches)
        waited = 0.
        for i in range(self.n_batches):
            self.time.tick(self.wait)
            waited += self.wait
            chosen = selecting and not self.meter.is_aside
            self.meter.arrive(waited, chosen)
            if self.meter.is_measuring: self.tell(self.meter.try_parts(n, BS, self.trial, self.look, chosen))
            if selecting and not chosen and self.meter.is_time_to_look(): self.meter.reconsider(kept)
            if chosen:
                with self.meter.timing(): self.time.tick(self.score+self.choice)
                self.tell(self.meter.observe(kept))
            self.time.tick((kept if chosen else 1)*n*self.per_item)
            self.meter.passed()
            self.time.tick(self.opt)
            self.tell(self.meter.stepped())
        self.tell(self.meter.end_epoch())

def plain_times(wait=0., opt=.5, score=1.): return dict(wait=wait, small=1., full=3., step=3.+opt, score=score)

def test_parts_are_timed_on_every_second_full_batch(monkeypatch):
    s = Steps(monkeypatch, wait=.2)
    s.begin_fit()
    s.epoch(selecting=False)
    assert s.trials==[3,3,3] and s.looks==3 and s.meter.is_measured and not s.meter.is_measuring # whole steps are timed as they are
    assert s.meter.times==pytest.approx(plain_times(.2)) and s.meter.small_share==1/3 and all(len(v)==3 for v in s.meter.seen.values())
    assert s.meter.cost is None and not s.said and s.meter.in_words=='not measured' # nothing was chosen yet
    s.epoch(selecting=False)
    assert s.trials==[3,3,3] and all(len(v)==3 for v in s.meter.seen.values()) # once is enough

def test_where_items_are_chosen_whole_steps_are_tried(monkeypatch):
    s = Steps(monkeypatch)
    s.begin_fit()
    s.epoch()
    assert s.trials==[3,9]*3 and s.meter.times==pytest.approx(plain_times(opt=0., score=1.1) | dict(select=1.1)) # with the choice

def test_ragged_batches_are_not_timed(monkeypatch):
    s = Steps(monkeypatch)
    s.begin_fit()
    s.epoch(n=7)
    assert not s.trials and not s.looks and s.meter.cost is None

@pytest.mark.parametrize('auto', ['warn', True])
@pytest.mark.parametrize('score,kept,word', [(1., 1/3, None), (1., .9, 'saves no time'), (1.88, 1/3, 'saves next to nothing'), (2.5, 1/3, 'saves no time')])
def test_it_decides_after_five_choices(score, kept, word, auto, monkeypatch):
    s = Steps(monkeypatch, score=score, auto=auto)
    s.begin_fit()
    s.epoch(selecting=False)
    decided,settle = [],s.meter.observe
    def observe(kept):
        text = settle(kept)
        decided.append(s.meter.cost)
        return text
    s.meter.observe = observe
    s.epoch(kept=kept)
    cost = (3.5-(1-kept)*3+score+.1)/3.5
    assert decided[:4]==[None]*4 and decided[4]==pytest.approx(cost) and s.meter.share==pytest.approx(kept)
    assert s.meter.pays()==(cost<.97)==(word is None) and s.meter.is_aside==(word is not None and auto is True) and len(decided)==(5 if s.meter.is_aside else 10)
    assert len(s.said)==(word is not None)
    if word: assert s.said[0].startswith(f'selecting {word} here: a selecting step takes {cost:.2f} of a plain one of 3.5e+03 ms: ') and f'training the {kept:.0%} that are kept. ' in s.said[0]
    if word: assert s.said[0].endswith('It stands aside, and looks again now and then.' if auto is True else 'It goes on; auto=True would stand aside, auto=False says nothing.')

def test_where_no_share_can_pay_nothing_is_waited_for(monkeypatch):
    s = Steps(monkeypatch, score=3.2, auto=True)
    s.begin_fit()
    s.epoch(selecting=False)
    assert s.meter.cost==pytest.approx((3.5-3+3.2)/3.5) and s.meter.is_aside and 'takes 1.06 of a plain one of 3.5e+03 ms: 0.00 waiting for data + 0.91 scoring + 0.15 training, even if next to nothing were kept. It' in s.said[0]

def test_it_looks_again_more_and_more_seldom(monkeypatch):
    monkeypatch.setattr(CostMeter, 'every', 10)
    s = Steps(monkeypatch, auto=True, n_batches=9) # it is measured after five batches, the last of which is the first of five choices
    s.begin_fit()
    s.epoch(kept=.9)
    assert s.meter.is_aside and len(s.said)==1
    asked = []
    def look(n, share):
        for _ in range(n):
            if not s.meter.is_time_to_look(): continue
            asked.append(share)
            s.meter.reconsider(share)
    look(9, .1)
    assert not asked
    look(1, .9)
    assert asked==[.9] and s.meter.is_aside # not yet
    look(10, .1)
    assert asked==[.9,.1] and not s.meter.is_aside and s.meter.cost is None # it is decided anew, after five choices
    s.epoch(kept=.9)
    assert s.meter.is_aside and len(s.said)==1 # told already; of nine batches four have passed
    look(15, .1)
    assert s.meter.is_aside and len(asked)==2
    look(1, .1)
    s.epoch(kept=.1)
    assert not s.meter.is_aside and len(s.said)==2 and s.said[1].endswith('It selects again.') and 'selecting saves time here: ' in s.said[1] and 'training the 10% that are kept' in s.said[1]

def test_shares_that_change_are_noticed(monkeypatch):
    monkeypatch.setattr(CostMeter, 'every', 10)
    s = Steps(monkeypatch)
    s.begin_fit()
    s.epoch(kept=.2)
    assert s.meter.pays() and not s.said
    s.epoch(kept=.95)
    s.epoch(kept=.95)
    assert not s.meter.pays() and len(s.said)==1

def test_without_a_wish_nothing_is_measured(monkeypatch):
    def never(*args): raise AssertionError('it was asked')
    time,meter = Time(monkeypatch),CostMeter(auto=False)
    meter.begin_fit('these')
    meter.begin_epoch(3)
    for i in range(3):
        meter.arrive(1.*i, True)
        assert not meter.is_measuring and meter.try_parts(9, 9, never, never, True) is None
        with meter.timing(): time.tick(1.)
        meter.passed()
        assert meter.observe(.5) is meter.stepped() is None
    assert meter.end_epoch() is None and meter.seen=={} and meter.epoch_times==[] and not meter.is_aside and math.isnan(meter.saved_secs) and meter.saved is None

def test_other_circumstances_are_measured_anew(monkeypatch):
    s = Steps(monkeypatch)
    s.begin_fit()
    s.epoch()
    seen = s.meter.seen
    s.begin_fit()
    assert s.meter.seen is seen and len(s.meter.epoch_times)==1
    s.begin_fit('others')
    assert not s.meter.seen and not s.meter.epoch_times and s.meter.cost is None
    s.epoch()
    assert s.trials==[3,9]*6

def test_what_an_epoch_saved_is_known(monkeypatch):
    "Against plain epochs, of earlier fits too; else against the plain step; else nothing is known but that it is as any"
    plain,selecting = 9*3.5+8*.2,9*(1.1+1+.5)+8*.2 # from the arrival of the second batch
    s = Steps(monkeypatch, wait=.2)
    s.begin_fit()
    s.epoch(selecting=False)
    assert s.meter.saved_secs==0 and s.meter.epoch_times==[(0.,pytest.approx(plain))]
    s.epoch()
    assert s.meter.saved_secs==pytest.approx(plain-selecting) and s.meter.saved==pytest.approx(1-selecting/plain)
    s.begin_fit()
    s.epoch()
    assert s.meter.saved_secs==pytest.approx(plain-selecting) # known from the fit before
    s.begin_fit('others')
    s.epoch()
    assert s.meter.saved_secs==pytest.approx(9*(3+.2)-selecting) and s.meter.saved is None # by the plain step that was tried
    s.begin_fit('more others')
    s.epoch(n=7)
    assert math.isnan(s.meter.saved_secs)

def sums_up(text):
    "Do the parts that a text names add up to the whole that it names?"
    whole,*parts = re.search(r'takes ([\d.]+) of a plain one.*: ([\d.]+) waiting for data \+ ([\d.]+) scoring \+ ([\d.]+) training', text).groups()
    return sum(map(Decimal, parts))==Decimal(whole)

@pytest.mark.parametrize('wait', [0., .37, 5.])
@pytest.mark.parametrize('method', [dict(), dict(whole_steps=True), dict(workers=2), dict(workers=2, score_share=1/3, skips_loading=True), dict(score_share=1/3, skips_loading=True)], ids=str)
@pytest.mark.parametrize('kept', [0., 1/3, .977])
def test_what_a_step_takes_adds_up(kept, method, wait):
    "In numbers and in words, waiting included"
    meter = CostMeter(**method)
    for _ in range(3): meter.note(full=2.77, small=1.03, score=.913, step=3.019, wait=wait)
    meter.steps.note_size(1/3)
    meter.settle(meter.cost_of(kept), kept)
    parts,plain = cost_parts(meter.times, 1/3, kept, **method),3.019+wait
    assert math.isclose(sum(parts.values())/plain, meter.cost) and min(parts.values())>=0 and math.isclose(parts['scoring'], .913*method.get('score_share', 1.))
    assert sums_up(meter.in_words) and f'takes {meter.cost:.2f} of a plain one of {1000*plain:.3g} ms' in meter.in_words and 'pay' not in meter.in_words
    assert not kept or meter.in_words.count('%')==1 # one kept share

def test_seconds_saved_in_words(monkeypatch):
    assert CostMeter(auto=False).saved_in_words=='seconds saved: \N{EN DASH}, as auto=False measures nothing'
    s = Steps(monkeypatch)
    s.begin_fit()
    s.epoch(selecting=False)
    assert s.meter.saved_in_words=='nothing saved yet: no epoch was chosen from'
    for _ in range(2): s.epoch()
    plain,selecting = 9*3.5,9*(1.1+1+.5)
    assert s.meter.saved_in_words==f'the selecting epochs took {2*(plain-selecting):.3g} s less than the {2*plain:.3g} s of plain ones'
    s.time.tick(0)
    s.score = 3.
    for _ in range(2): s.epoch()
    assert s.meter.saved_in_words.startswith('the selecting epochs took ') and ' s more than the ' in s.meter.saved_in_words
    s.score = 1.
    s.begin_fit('others')
    s.epoch()
    assert s.meter.saved_in_words==f'the selecting epochs took {9*3-selecting:.3g} s less than the 27 s of plain ones (an estimate from single steps, as there was no full epoch)'
    s.begin_fit('more others')
    s.epoch(n=7)
    assert 'no full epoch to compare with; warmup=1' in s.meter.saved_in_words

def test_the_clock_is_believed_more_than_a_prediction(monkeypatch):
    s = Steps(monkeypatch, auto=True)
    s.begin_fit()
    s.epoch(selecting=False)
    s.epoch()
    assert s.meter.pays() and not s.said
    tick = s.time.tick
    s.time.tick = lambda dt: tick(2*dt) # selecting is slower than its parts
    s.epoch()
    s.epoch()
    took = [t for share,t in s.meter.epoch_times if share]
    assert s.meter.cost==pytest.approx(sum(took[:2])/2/s.meter.epoch_times[0][1]) and s.meter.is_aside and len(s.said)==1
    assert s.meter.in_words==f'a selecting epoch takes {s.meter.cost:.2f} of a plain one, by the clock'

def test_what_cannot_be_measured_is_told_once(monkeypatch):
    said = 'one batch size only'
    faults = RuntimeError(f'{said}\nat line 3'),torch.cuda.OutOfMemoryError(said),TypeError(said),KeyError(said),Exception(said)
    for fault in faults:
        s = Steps(monkeypatch)
        def fails(n): raise fault
        s.trial = fails
        s.begin_fit()
        s.epoch()
        why = f"'{said}'" if isinstance(fault, KeyError) else said
        assert s.said==[f'what selecting costs could not be measured ({why}).'] and not s.meter.can_measure and not s.meter.is_measuring

@pytest.mark.measured
def test_a_trial_never_ends_a_fit(capsys):
    "As with a loss function that plain training never calls: another callback has the loss"
    def never_called(pred, y): raise TypeError('no such argument')
    class HasTheLoss(Callback):
        def after_pred(self): self.learn.loss_func = CrossEntropyLossFlat()
        def after_batch(self): self.learn.loss_func = never_called
    never_called.reduction = 'mean'
    learn = table_learner(loss_func=never_called, cbs=[HasTheLoss(), RandomSubsetCallback(.5, warmup=0)])
    learn._do_epoch_validate = lambda *args: None
    quiet_fit(learn, 2)
    assert capsys.readouterr().out.count('what selecting costs could not be measured (no such argument).')==1
    assert len(learn.recorder.losses)>7 and learn.selection.stats.trained.sum()>0

def test_parts_are_a_multiple_and_smaller_than_a_batch(monkeypatch):
    for bs,multiple,small in (64,1,21),(64,8,24),(3,1,2),(2,1,None),(16,16,None):
        trials,meter = [],CostMeter()
        meter.begin_epoch(9)
        meter.arrive(0., False)
        meter.try_parts(bs, bs, trials.append, lambda: None, False, multiple)
        assert trials==([] if small is None else [small]) and meter.can_measure==(small is not None)

def test_without_parts_only_steps_and_epochs_are_timed(monkeypatch):
    s = Steps(monkeypatch, in_parts=False)
    s.begin_fit()
    s.epoch(selecting=False)
    s.epoch()
    assert not s.trials and not s.looks and set(s.meter.seen)=={'wait','full','step'} and s.meter.cost is None and len(s.meter.epoch_times)==2
    assert s.meter.times['step']==pytest.approx(3.5) and s.meter.saved_secs>0

def test_all_ranks_decide_as_the_first_does(monkeypatch):
    class Follows(Ranks):
        "Rank 0 has seen other times and keeps less"
        def first(self, o): return (dict(full=[6.]*3, small=[2.]*3, score=[1.]*3, step=[6.]*3), [.01]*5) if isinstance(o, tuple) else o
    s = Steps(monkeypatch, auto=True)
    s.begin_fit(ranks=Follows())
    s.epoch(kept=.99)
    assert s.meter.share==pytest.approx(.01) and not s.meter.is_aside and s.meter.cost==pytest.approx((6-.99*6+1)/6)

def test_meters_check_what_they_get():
    with pytest.raises(ValueError, match="auto: got 'yes', wanted 'warn', True or False"): TopLossCallback(auto='yes')
    for bad in 0,1,None: # `0==False`, but is no answer
        with pytest.raises(ValueError, match='auto: got'): TopLossCallback(auto=bad)

# with a learner
SETTINGS = dict(plain=(lambda: [], 0), resting=(lambda: [], 1), amp=(lambda: [CPUMixedPrecision()], 0), amp_resting=(lambda: [CPUMixedPrecision()], 1),
    mixup=(lambda: [MixUp(.4)], 1), accumulation=(lambda: [GradientAccumulation(24)], 0))

@pytest.mark.law(5)
@pytest.mark.parametrize('setting', SETTINGS)
@every_method
def test_measuring_leaves_no_trace(cls, setting):
    cbs,warmup = SETTINGS[setting]
    kwargs = dict(warmup=warmup, seed=0) | {ImportanceSamplingCallback: dict(tau=0), BatchLossFilterCallback: dict(min_loss_perc=.5), InfoBatchCallback: dict(delta=1.)}.get(cls, {})
    def run(auto): return quiet_fit(table_learner(n=32+80, cbs=[*cbs(), cls(auto=auto, **kwargs)]), 2)
    ours,plain = run('warn'),run(False)
    assert (ours.selection.stats.kept<ours.selection.stats.seen).any()==leaves_out(cls)
    assert same(weights(ours), weights(plain)) and [v[:2] for v in ours.recorder.values]==[v[:2] for v in plain.recorder.values]
    if ours.selection.meter.in_parts: assert ours.selection.meter.is_measured and len(ours.selection.meter.seen['small'])==3

class Clock(Time):
    "Time that passes as we say: for a plain batch, a scoring pass, and a trial of a part"
    def __init__(self, monkeypatch, step, score, small):
        super().__init__(monkeypatch)
        self.small,self.step,self.trials,look = small,step,0,SelectionCallback.score
        def takes_time(cb, batch):
            self.tick(score)
            return look(cb, batch)
        def trial(model, loss_func, xb, yb, autocast):
            self.trials += 1
            self.tick(self.small if len(yb[0])<16 else step)
        monkeypatch.setattr(SelectionCallback, 'score', takes_time)
        monkeypatch.setattr(selback.callback.batch, 'trial_step', trial)
    def callback(clock):
        class Ticks(Callback):
            order,run_valid = 0,False
            def before_backward(self): clock.tick(clock.step*len(self.yb[0])/16)
        return Ticks()

DEAR,CHEAP = dict(step=1.1, score=1., small=.4),dict(step=3., score=1., small=1.)

@pytest.mark.parametrize('warmup', [0, 1])
@pytest.mark.parametrize('auto', ['warn', True, False])
@pytest.mark.parametrize('cls,kwargs', [(TopLossCallback, dict(keep=1/3)), (SelectiveBackpropCallback, dict(beta=2)), (SelectiveBackpropCallback, dict(keep=1/3, gather=False))], ids=name_of)
def test_a_selection_that_does_not_pay_is_told_of_or_stands_aside(cls, kwargs, auto, warmup, monkeypatch, capsys):
    clock = Clock(monkeypatch, **DEAR)
    clock.small = 1.1*.9 # a frozen body: a third of the items takes nearly as long
    learn = quiet_fit(table_learner(n=32+320, cbs=[clock.callback(), cls(auto=auto, warmup=warmup, **kwargs)]), 2+warmup)
    said,stats = capsys.readouterr().out,learn.selection.stats
    chosen = (stats.kept<stats.seen).sum()
    if auto is False: assert not clock.trials and not said and chosen>20
    else: assert said.count('selecting saves no time here')==1 and 0<clock.trials<=6
    if auto=='warn': assert 'It goes on' in said and chosen>20
    decides = (4+5 if gathers(learn.selection) else 5)-warmup*(4 if gathers(learn.selection) else 5) # where batches are gathered, it is the share kept that says it
    if auto is True: assert 'It stands aside' in said and chosen==decides and (stats.trained==stats.seen).sum()>=31
    if auto: assert sums_up(learn.selection.card) and 'pay' not in learn.selection.card

@pytest.mark.parametrize('auto', ['warn', True])
@every_method
def test_a_selection_that_pays_says_nothing_and_goes_on(cls, auto, monkeypatch, capsys):
    clock = Clock(monkeypatch, **CHEAP)
    kwargs = dict(tau=1.01) if cls is ImportanceSamplingCallback else dict(min_loss_perc=.5) if cls is BatchLossFilterCallback else {}
    learn = quiet_fit(table_learner(n=32+320, cbs=[clock.callback(), cls(auto=auto, **kwargs)]), 4)
    meter = learn.selection.meter
    assert 'here' not in capsys.readouterr().out and not meter.is_aside and (learn.selection.stats.trained.sum()<learn.selection.stats.seen.sum())==leaves_out(cls)
    if meter.in_parts and cls.scored: assert abs(meter.times['step']-3)<1e-6

def test_it_selects_again_once_less_is_kept(monkeypatch, capsys):
    monkeypatch.setattr(CostMeter, 'every', 10)
    clock = Clock(monkeypatch, **CHEAP)
    class Learns(SelectionCallback):
        def choose(self, scores): return Chosen(torch.arange(15 if self.epochs_done<3 else 4))
    learn = quiet_fit(table_learner(n=32+320, cbs=[clock.callback(), Learns(auto=True)]), 6)
    said,stats = capsys.readouterr().out,learn.selection.stats
    kept = stats.groupby('epoch').kept.mean()
    assert said.count('It stands aside')==1 and said.count('It selects again')==1 and kept[0]==kept[2]==16 and kept[5]==4 and kept[3]<16
    assert ((stats.kept<16) & (stats.epoch==1)).sum()==5 # it decides after five

def known(cb, monkeypatch, **times):
    "A meter that has measured already"
    monkeypatch.setattr(CostMeter, 'forget', lambda self: None)
    cb.meter.steps.note_size(1/3)
    for _ in range(3): cb.meter.note(**(dict(full=3., small=1., score=1., step=3., wait=0.) | times))

def test_one_odd_batch_does_not_reopen_a_selection_for_good(monkeypatch):
    monkeypatch.setattr(CostMeter, 'every', 10)
    class Odd(SelectionCallback):
        def choose(self, scores):
            self.calls = getattr(self, 'calls', 0)+1
            return Chosen(torch.arange(2 if self.calls in (6, 13) else 16))
    learn = table_learner(n=32+3200, cbs=(cb := Odd(auto=True, warmup=0)), drop_last=True)
    known(cb, monkeypatch)
    quiet_fit(learn, 1)
    assert cb.meter.is_aside and 18<cb.calls<30 # of 200: five, five more after each odd one, and single looks

def test_more_kept_later_is_noticed(monkeypatch, capsys):
    monkeypatch.setattr(CostMeter, 'every', 10)
    clock = Clock(monkeypatch, **CHEAP)
    class Forgets(SelectionCallback):
        def choose(self, scores): return Chosen(torch.arange(4 if self.epochs_done<3 else 15))
    learn = quiet_fit(table_learner(n=32+320, cbs=[clock.callback(), Forgets(auto=True)]), 5)
    kept = learn.selection.stats.groupby('epoch').kept.mean()
    assert kept[1]==kept[2]==4 and kept[4]==16 and capsys.readouterr().out.count('It stands aside')==1

def test_another_fit_is_measured_anew():
    learn = table_learner(n=32+320, cbs=(cb := TopLossCallback(1/3)))
    for p in list(learn.model.parameters())[:-2]: p.requires_grad_(False)
    quiet_fit(learn, 1)
    frozen = cb.meter.seen['full']
    quiet_fit(learn, 1)
    assert cb.meter.seen['full'] is frozen and len(frozen)==3 and len(cb.meter.epoch_times)==2
    learn.model.requires_grad_(True)
    quiet_fit(learn, 1)
    assert cb.meter.seen['full'] is not frozen and len(cb.meter.seen['full'])==3 and len(cb.meter.epoch_times)==1
    other = table_learner(n=32+320)
    learn.remove_cb(cb)
    whole = cb.meter.seen
    quiet_fit(other.add_cb(cb), 1)
    assert cb.meter.seen is not whole and len(cb.meter.epoch_times)==1

def test_the_clock_overrules_the_prediction(monkeypatch, capsys):
    clock = Clock(monkeypatch, **CHEAP)
    class Slow(Callback):
        order,run_valid = 1,False
        def before_backward(self): clock.tick(2.9*(self.learn.selection.is_chosen)) # a small step that takes as long as a whole one
    learn = quiet_fit(table_learner(n=32+320, cbs=[clock.callback(), Slow(), TopLossCallback(.25, auto=True)]), 4)
    cb = learn.selection
    kept = cb.stats.groupby('epoch').kept.mean()
    assert kept.tolist()==[16,4,16,16] and cb.meter.is_aside and cb.meter.cost>1
    said = capsys.readouterr().out
    assert said.count('selecting saves no time here')==1 and 'It stands aside' in said and 'It stands aside now.' in cb.card

class InPlace(nn.Module):
    def __init__(self): super().__init__(); self.net = mlp()
    def forward(self, x): return self.net(x.sub_(.5).div_(.25))

class Counts(nn.Module):
    "A model that keeps more than tensors"
    def __init__(self): super().__init__(); self.net,self.n = mlp(),0; self.register_buffer('ema', torch.zeros(4))
    def forward(self, x):
        if self.training: self.ema,self.n = self.ema*.9+.1*x.mean(0),self.n+1
        return self.net(x-self.ema)

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
    assert said.count('could not be measured')==1 and not cb.meter.can_measure and 'cost: not measured; by the clock, ' in cb.card and cb.stats.trained.sum()>16

def test_tiny_batches_are_not_measured_for_ever():
    meter = quiet_fit(table_learner(bs=2, n=64, cbs=TopLossCallback(.5)), 1).selection.meter
    assert not meter.can_measure and not meter.seen.get('small') and len(meter.seen.get('wait', []))<=1

def test_importance_sampling_stands_aside_and_looks_again(monkeypatch):
    monkeypatch.setattr(CostMeter, 'every', 5)
    learn = table_learner(n=32+640, cbs=(cb := ImportanceSamplingCallback(tau=0, warmup=0, auto=True)))
    known(cb, monkeypatch, score=2.5)
    cb.meter.cost,cb.meter.is_aside = 1.5,True
    quiet_fit(learn, 1)
    assert cb.meter.is_aside and (cb.stats.trained==cb.stats.seen).all()

def test_stale_losses_that_stand_aside_look_again(monkeypatch):
    monkeypatch.setattr(CostMeter, 'every', 3)
    learn,shares = table_learner(n=32+320, cbs=(cb := StaleLossCallback(2, n=3, auto=True))),[]
    reconsider = CostMeter.reconsider
    def noting(self, kept):
        shares.append((cb.epoch, kept))
        reconsider(self, kept)
    monkeypatch.setattr(CostMeter, 'reconsider', noting)
    known(cb, monkeypatch)
    cb.meter.cost,cb.meter.is_aside = 1.5,True
    quiet_fit(learn, 6)
    first = shares[0][0]
    assert first in (1, 2, 3) and all(0<kept<1 for _,kept in shares)
    assert learn.selection.stats.query('epoch==@first+1').trained.sum()<learn.selection.stats.query('epoch==@first+1').seen.sum()

class Ticks(Callback):
    "Time that passes in each batch, but not in the loader"
    order,run_valid = SelectionCallback.order-1,False
    def __init__(self, monkeypatch):
        self.t = 0.
        monkeypatch.setattr(time, 'perf_counter', lambda: self.t)
    def before_batch(self): self.t += 1. if self.epoch or self.iter else 20. # the first one is slow
    def after_pred(self): self.t += 3.

def test_waiting_is_for_the_loader_alone(monkeypatch):
    "Not for a validation"
    for n,epochs in (320,2),(16,5):
        clock = Ticks(monkeypatch)
        learn = table_learner(n=32+n, drop_last=True, cbs=[clock, cb := TopLossCallback(1/3, warmup=5)])
        def validates(*args): clock.t += .3
        learn._do_epoch_validate = validates
        quiet_fit(learn, epochs)
        waits = cb.meter.seen.get('wait', [])
        assert len(waits)==3 and not any(waits)

class Slowly:
    "A loader's transform that takes a while"
    def __init__(self, clock): self.clock = clock
    def __call__(self, b): self.clock.t += .125; return b # for inputs and targets

def test_reading_the_loader_is_waiting(monkeypatch):
    "Also within a step that reads several batches"
    clock = Ticks(monkeypatch)
    learn = table_learner(n=32+160, drop_last=True, cbs=[clock, cb := TopLossCallback(.25, warmup=0, gather=True)])
    learn.dls.loaders[0] = learn.dls.train.new(after_batch=Slowly(clock))
    quiet_fit(learn, 1)
    assert cb.meter.seen['wait']==pytest.approx([.25]*3) and cb.feed.waited==pytest.approx(2.5)

def test_cancelled_batches_are_no_steps():
    class Skips(Callback):
        order,run_valid = 20,False
        def before_batch(self):
            if self.iter%3!=2: return
            self.learn.yb = ()
            raise CancelBatchException
    learn = quiet_fit(table_learner(n=32+320, drop_last=True, cbs=[cb := TopLossCallback(1/3, warmup=2), Skips()]), 2)
    seen = cb.meter.seen
    assert len(seen['step'])==len(seen['full'])==3 and all(step>=full for step,full in zip(seen['step'], seen['full']))

def test_a_look_is_remembered_once(monkeypatch):
    monkeypatch.setattr(CostMeter, 'every', 2)
    learn = table_learner(n=32+160, drop_last=True, cbs=(cb := TopLossCallback(.95, auto=True, warmup=0, noise_quantile=.9)))
    known(cb, monkeypatch)
    cb.meter.cost,cb.meter.is_aside = 1.2,True
    quiet_fit(learn, 1)
    assert cb.meter.is_aside and cb.memory.seen.eq(1).all()

def test_a_slow_first_batch_is_no_saving(monkeypatch):
    learn = quiet_fit(table_learner(n=32+320, drop_last=True, cbs=[Ticks(monkeypatch), cb := RandomSubsetCallback(1.)]), 2)
    assert [took for _,took in cb.meter.epoch_times]==pytest.approx([75.,75.]) # from the arrival of the second one of 20

def test_the_card_tells_what_was_saved():
    learn = quiet_fit(table_learner(n=32+320, cbs=TopLossCallback(.25)), 3)
    cb = learn.selection
    times = [t for _,t in cb.meter.epoch_times]
    assert len(times)==3 and math.isclose(cb.meter.saved, 1-(times[1]+times[2])/2/times[0])
    saved = 2*times[0]-times[1]-times[2]
    assert f"; by the clock, the selecting epochs took {abs(saved):.3g} s {'less' if saved>=0 else 'more'} than the {2*times[0]:.3g} s of plain ones" in cb.card and 'a selecting step takes' in cb.card

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
    assert cb.losses.how=='loop' and calls.count(16)<=10+3 and calls[-5:]==[16]*5
    assert cb.stats.full_loss.tolist()==pytest.approx(losses)
