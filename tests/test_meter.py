"What selecting costs, measured: the arithmetic, the meter alone, and a selection that is told of or stands aside"
import math, re, time
from decimal import Decimal

import pytest
import selback.callback.batch
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
ON_PAPER = [(1, 1/3, 2/3), (1, 2/3, 1), (.25, 1/3, 1.25/3), (.25, 1/2, 1.75/3), (1, .25, 1.75/3), (0, .25, .25)]

@pytest.mark.parametrize('look,kept,wanted', ON_PAPER)
def test_cost_on_paper(look, kept, wanted):
    "A backward pass costs two forward passes: a look and three times the kept share, of 3"
    times = dict(full=3., small=1., score=look, step=3., wait=0.)
    for whole in (False, True): assert math.isclose(relative_cost(times, 1/3, kept, whole_steps=whole), wanted)
    assert math.isclose(relative_cost(times, 1/3, kept, score_share=1/3), wanted-look*2/9) # every third epoch is scored

def test_a_fixed_cost_of_a_step_is_not_saved():
    times = dict(full=3., small=2., score=.1, step=3.5, wait=0.)
    assert math.isclose(relative_cost(times, .5, .5), (3.5-1+.1)/3.5)
    assert relative_cost(times | dict(small=4.), .5, .5)>1 # a smaller step that takes longer saves nothing

def test_a_loader_with_workers_sets_the_pace():
    times = dict(full=3., small=1., score=1., step=3., wait=3.)
    assert math.isclose(relative_cost(times, 1/3, 1/3), 5/6)
    assert relative_cost(times, 1/3, 1/3, workers=2)==1.
    assert math.isclose(relative_cost(times | dict(wait=0.), 1/3, 1/3, workers=2), 2/3)

@pytest.mark.parametrize('workers', [0, 2])
def test_items_that_are_not_loaded_cost_no_waiting(workers):
    times = dict(full=3., small=1., score=1., step=3., wait=6.)
    epoch = 6+3-2+1,1/3*6+3-2,1/3*6+3-2 # of three epochs, one is loaded and scored
    of_loader = (9+3+3)/27 # with workers it is the loader that counts: 9 seconds for a whole batch
    cost = relative_cost(times, 1/3, 1/3, score_share=1/3, skips_loading=True, workers=workers)
    assert math.isclose(cost, of_loader if workers else sum(epoch)/27)

# a trial step
def test_a_trial_step_leaves_no_trace_when_it_fails():
    model = mlp()
    F.cross_entropy(model(torch.randn(8, 4)), torch.zeros(8).long()).backward()
    x = torch.randn(8, 4)
    before = {k: v.clone() for k,v in model.state_dict().items()}
    grads = [p.grad for p in model.parameters()]
    random = torch.get_rng_state()

    def fails(pred, y): raise ZeroDivisionError('no')
    with pytest.raises(ZeroDivisionError): trial_step(model, fails, (x,), (torch.zeros(8).long(),))

    assert same(before, model.state_dict())
    assert all(grad is p.grad for grad,p in zip(grads, model.parameters()))
    assert torch.equal(random, torch.get_rng_state())

def test_a_trial_step_leaves_the_parameters_of_a_loss_alone():
    loss,model = Learned(),mlp()
    trial_step(model, loss, (torch.randn(8, 4),), (torch.zeros(8).long(),))
    assert loss.scale.grad is None
    assert all(p.grad is None for p in model.parameters())

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
        monkeypatch.setattr(selback.callback.meter, 'clock', lambda device='cpu': self.t)

    def tick(self, dt): self.t += dt

BS = 9 # a third of it is 3

class Steps:
    "A training by hand: a meter, and how long everything takes"
    def __init__(self, monkeypatch, n_batches=10, wait=0., forth_and_back=3., opt=.5, score=1., choice=.1, **kwargs):
        self.time,self.meter = Time(monkeypatch),CostMeter(**kwargs)
        self.n_batches = n_batches
        self.wait,self.opt = wait,opt
        self.score,self.choice = score,choice
        self.per_item = forth_and_back/BS
        self.said = [] # sentences
        self.trials,self.looks = [],0

    def tell(self, text): self.said += [text] if text else []

    def trial(self, n):
        self.trials.append(n)
        self.time.tick(n*self.per_item)

    def look(self):
        self.looks += 1
        self.time.tick(self.score)

    def begin_fit(self, circumstances='these', **method): self.meter.begin_fit(circumstances, **method)

    def epoch(self, selecting=True, kept=1/3, n=BS):
        "Batches that are looked at and trained in part, or whole ones"
        self.meter.begin_epoch(self.n_batches)
        for i in range(self.n_batches):
            self.time.tick(self.wait)
            self.step((i+1)*self.wait, selecting, kept, n)
        self.tell(self.meter.end_epoch())

    def step(self, waited, selecting, kept, n):
        meter = self.meter
        chosen = selecting and not meter.is_aside
        meter.arrive(waited, chosen)
        if meter.is_measuring: self.tell(meter.try_parts(n, BS, self.trial, self.look, chosen))
        if selecting and not chosen and meter.is_time_to_look(): meter.reconsider(kept)
        if chosen:
            with meter.timing(): self.time.tick(self.score+self.choice)
            self.tell(meter.observe(kept))

        self.time.tick((kept if chosen else 1)*n*self.per_item)
        meter.passed()
        self.time.tick(self.opt)
        self.tell(meter.stepped())

def plain_times(wait=0., opt=.5, score=1.): return dict(wait=wait, small=1., full=3., step=3.+opt, score=score)

def test_parts_are_timed_on_every_second_full_batch(monkeypatch):
    s = Steps(monkeypatch, wait=.2)
    s.begin_fit()
    s.epoch(selecting=False)
    meter = s.meter
    def tries(): return [len(seconds) for seconds in meter.seen.values()]

    assert s.trials==[3,3,3] # whole steps are timed as they are
    assert s.looks==3
    assert meter.is_measured
    assert not meter.is_measuring
    assert meter.times==pytest.approx(plain_times(.2))
    assert meter.small_share==1/3
    assert set(tries())=={3}

    assert meter.cost is None # nothing was chosen yet
    assert not s.said
    assert meter.in_words=='not measured'

    s.epoch(selecting=False)
    assert s.trials==[3,3,3] # once is enough
    assert set(tries())=={3}

def test_where_items_are_chosen_whole_steps_are_tried(monkeypatch):
    s = Steps(monkeypatch)
    s.begin_fit()
    s.epoch()
    assert s.trials==[3,9]*3
    assert s.meter.times==pytest.approx(plain_times(opt=0., score=1.1) | dict(select=1.1)) # with the choice

def test_ragged_batches_are_not_timed(monkeypatch):
    s = Steps(monkeypatch)
    s.begin_fit()
    s.epoch(n=7)
    assert not s.trials
    assert not s.looks
    assert s.meter.cost is None

STANDS_ASIDE = 'It stands aside, and looks again now and then.'
GOES_ON = 'It goes on; auto=True would stand aside, auto=False says nothing.'
WORTH = [(1., 1/3, None), (1., .9, 'saves no time'), (1.88, 1/3, 'saves next to nothing'), (2.5, 1/3, 'saves no time')]

@pytest.mark.parametrize('auto', ['warn', True])
@pytest.mark.parametrize('score,kept,word', WORTH)
def test_it_decides_after_five_choices(score, kept, word, auto, monkeypatch):
    s = Steps(monkeypatch, score=score, auto=auto)
    s.begin_fit()
    s.epoch(selecting=False)
    decided = costs_of_choices(s.meter)
    s.epoch(kept=kept)

    cost = (3.5-(1-kept)*3+score+.1)/3.5
    assert decided[:4]==[None]*4
    assert decided[4]==pytest.approx(cost)
    assert s.meter.share==pytest.approx(kept)

    pays = word is None
    assert s.meter.pays()==(cost<.97)==pays
    assert s.meter.is_aside==(not pays and auto is True)
    assert len(decided)==(5 if s.meter.is_aside else 10)
    assert len(s.said)==(not pays)
    if pays: return
    said, = s.said
    assert said.startswith(f'selecting {word} here: a selecting step takes {cost:.2f} of a plain one of 3.5e+03 ms: ')
    assert f'training the {kept:.0%} that are kept. ' in said
    assert said.endswith(STANDS_ASIDE if auto is True else GOES_ON)

def costs_of_choices(meter):
    "A list that gets what a meter takes selecting to cost after each choice"
    decided,observe = [],meter.observe
    def noting(kept):
        text = observe(kept)
        decided.append(meter.cost)
        return text
    meter.observe = noting
    return decided

def test_where_no_share_can_pay_nothing_is_waited_for(monkeypatch):
    s = Steps(monkeypatch, score=3.2, auto=True)
    s.begin_fit()
    s.epoch(selecting=False)
    assert s.meter.cost==pytest.approx((3.5-3+3.2)/3.5)
    assert s.meter.is_aside
    parts = '0.00 waiting for data + 0.91 scoring + 0.15 training, even if next to nothing were kept. It'
    assert f'takes 1.06 of a plain one of 3.5e+03 ms: {parts}' in s.said[0]

def test_it_looks_again_more_and_more_seldom(monkeypatch):
    monkeypatch.setattr(CostMeter, 'every', 10)
    s = Steps(monkeypatch, auto=True, n_batches=9) # measured after five batches, the last of which is the first choice
    s.begin_fit()
    s.epoch(kept=.9)
    assert s.meter.is_aside
    assert len(s.said)==1

    asked = []
    def look(n, share):
        for _ in range(n):
            if not s.meter.is_time_to_look(): continue
            asked.append(share)
            s.meter.reconsider(share)

    look(9, .1)
    assert not asked
    look(1, .9)
    assert asked==[.9]
    assert s.meter.is_aside # not yet
    look(10, .1)
    assert asked==[.9,.1]
    assert not s.meter.is_aside
    assert s.meter.cost is None # it is decided anew, after five choices

    s.epoch(kept=.9)
    assert s.meter.is_aside
    assert len(s.said)==1 # told already; of nine batches four have passed
    look(15, .1)
    assert s.meter.is_aside
    assert len(asked)==2
    look(1, .1)

    s.epoch(kept=.1)
    assert not s.meter.is_aside
    assert len(s.said)==2
    assert 'selecting saves time here: ' in s.said[1]
    assert 'training the 10% that are kept' in s.said[1]
    assert s.said[1].endswith('It selects again.')

def test_shares_that_change_are_noticed(monkeypatch):
    monkeypatch.setattr(CostMeter, 'every', 10)
    s = Steps(monkeypatch)
    s.begin_fit()
    s.epoch(kept=.2)
    assert s.meter.pays()
    assert not s.said

    s.epoch(kept=.95)
    s.epoch(kept=.95)
    assert not s.meter.pays()
    assert len(s.said)==1

def test_without_a_wish_nothing_is_measured(monkeypatch):
    def never(*args): raise AssertionError('it was asked')
    time,meter = Time(monkeypatch),CostMeter(auto=False)
    meter.begin_fit('these')
    meter.begin_epoch(3)
    for i in range(3):
        meter.arrive(1.*i, True)
        assert not meter.is_measuring
        assert meter.try_parts(9, 9, never, never, True) is None
        with meter.timing(): time.tick(1.)
        meter.passed()
        assert meter.observe(.5) is None
        assert meter.stepped() is None

    assert meter.end_epoch() is None
    assert meter.seen=={}
    assert meter.epoch_times==[]
    assert not meter.is_aside
    assert math.isnan(meter.saved_secs)
    assert meter.saved is None

def test_other_circumstances_are_measured_anew(monkeypatch):
    s = Steps(monkeypatch)
    s.begin_fit()
    s.epoch()
    seen = s.meter.seen
    s.begin_fit()
    assert s.meter.seen is seen
    assert len(s.meter.epoch_times)==1

    s.begin_fit('others')
    assert not s.meter.seen
    assert not s.meter.epoch_times
    assert s.meter.cost is None
    s.epoch()
    assert s.trials==[3,9]*6

def test_what_an_epoch_saved_is_known(monkeypatch):
    "Against plain epochs, of earlier fits too; else against the plain step; else nothing is known"
    waited = 8*.2 # from the arrival of the second batch
    plain,selecting = 9*3.5+waited,9*(1.1+1+.5)+waited
    s = Steps(monkeypatch, wait=.2)
    s.begin_fit()
    s.epoch(selecting=False)
    assert s.meter.saved_secs==0
    assert s.meter.epoch_times==[(0.,pytest.approx(plain))]

    s.epoch()
    assert s.meter.saved_secs==pytest.approx(plain-selecting)
    assert s.meter.saved==pytest.approx(1-selecting/plain)

    s.begin_fit()
    s.epoch()
    assert s.meter.saved_secs==pytest.approx(plain-selecting) # known from the fit before

    s.begin_fit('others')
    s.epoch()
    assert s.meter.saved_secs==pytest.approx(9*(3+.2)-selecting) # by the plain step that was tried
    assert s.meter.saved is None

    s.begin_fit('more others')
    s.epoch(n=7)
    assert math.isnan(s.meter.saved_secs)

def sums_up(text):
    "Do the parts that a text names add up to the whole that it names?"
    number = r'([\d.]+)'
    parts_said = rf'{number} waiting for data \+ {number} scoring \+ {number} training'
    whole,*parts = re.search(rf'takes {number} of a plain one.*: {parts_said}', text).groups()
    return sum(map(Decimal, parts))==Decimal(whole)

BEFORE_LOADING = dict(score_share=1/3, skips_loading=True)
KINDS = [dict(), dict(whole_steps=True), dict(workers=2), dict(workers=2, **BEFORE_LOADING), BEFORE_LOADING]

@pytest.mark.parametrize('wait', [0., .37, 5.])
@pytest.mark.parametrize('method', KINDS, ids=str)
@pytest.mark.parametrize('kept', [0., 1/3, .977])
def test_what_a_step_takes_adds_up(kept, method, wait):
    "In numbers and in words, waiting included"
    meter = CostMeter(**method)
    for _ in range(3): meter.note(full=2.77, small=1.03, score=.913, step=3.019, wait=wait)
    meter.steps.note_size(1/3)
    meter.settle(meter.cost_of(kept), kept)
    parts,plain = cost_parts(meter.times, 1/3, kept, **method),3.019+wait
    assert math.isclose(sum(parts.values())/plain, meter.cost)
    assert min(parts.values())>=0
    assert math.isclose(parts['scoring'], .913*method.get('score_share', 1.))

    assert sums_up(meter.in_words)
    assert f'takes {meter.cost:.2f} of a plain one of {1000*plain:.3g} ms' in meter.in_words
    assert 'pay' not in meter.in_words
    assert not kept or meter.in_words.count('%')==1 # one kept share

def test_seconds_saved_in_words(monkeypatch):
    assert CostMeter(auto=False).saved_in_words=='seconds saved: \N{EN DASH}, as auto=False measures nothing'

    s = Steps(monkeypatch)
    s.begin_fit()
    s.epoch(selecting=False)
    assert s.meter.saved_in_words=='nothing saved yet: no epoch was chosen from'

    for _ in range(2): s.epoch()
    plain,selecting = 9*3.5,9*(1.1+1+.5)
    less = f'the selecting epochs took {2*(plain-selecting):.3g} s less than the {2*plain:.3g} s of plain ones'
    assert s.meter.saved_in_words==less

    s.time.tick(0)
    s.score = 3.
    for _ in range(2): s.epoch()
    assert s.meter.saved_in_words.startswith('the selecting epochs took ')
    assert ' s more than the ' in s.meter.saved_in_words

    s.score = 1.
    s.begin_fit('others')
    s.epoch()
    less = f'the selecting epochs took {9*3-selecting:.3g} s less than the 27 s of plain ones'
    assert s.meter.saved_in_words==f'{less} (an estimate from single steps, as there was no full epoch)'

    s.begin_fit('more others')
    s.epoch(n=7)
    assert 'no full epoch to compare with; warmup=1' in s.meter.saved_in_words

def test_the_clock_is_believed_more_than_a_prediction(monkeypatch):
    s = Steps(monkeypatch, auto=True)
    s.begin_fit()
    s.epoch(selecting=False)
    s.epoch()
    assert s.meter.pays()
    assert not s.said

    tick = s.time.tick
    s.time.tick = lambda dt: tick(2*dt) # selecting is slower than its parts
    s.epoch()
    s.epoch()
    selecting = [took for share,took in s.meter.epoch_times if share]
    plain = s.meter.epoch_times[0][1]
    assert s.meter.cost==pytest.approx(sum(selecting[:2])/2/plain)
    assert s.meter.is_aside
    assert len(s.said)==1
    assert s.meter.in_words==f'a selecting epoch takes {s.meter.cost:.2f} of a plain one, by the clock'

def test_what_cannot_be_measured_is_told_once(monkeypatch):
    said = 'one batch size only'
    kinds = torch.cuda.OutOfMemoryError,TypeError,KeyError,Exception
    for fault in (RuntimeError(f'{said}\nat line 3'), *(kind(said) for kind in kinds)):
        s = Steps(monkeypatch)
        def fails(n): raise fault
        s.trial = fails
        s.begin_fit()
        s.epoch()
        why = f"'{said}'" if isinstance(fault, KeyError) else said
        assert s.said==[f'what selecting costs could not be measured ({why}).']
        assert not s.meter.can_measure
        assert not s.meter.is_measuring

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
    assert len(learn.recorder.losses)>7
    assert learn.selection.stats.trained.sum()>0

def test_parts_are_a_multiple_and_smaller_than_a_batch(monkeypatch):
    for bs,multiple,small in (64,1,21),(64,8,24),(3,1,2),(2,1,None),(16,16,None):
        trials,meter = [],CostMeter()
        meter.begin_epoch(9)
        meter.arrive(0., False)
        meter.try_parts(bs, bs, trials.append, lambda: None, False, multiple)
        assert trials==([] if small is None else [small])
        assert meter.can_measure==(small is not None)

def test_without_parts_only_steps_and_epochs_are_timed(monkeypatch):
    s = Steps(monkeypatch, in_parts=False)
    s.begin_fit()
    s.epoch(selecting=False)
    s.epoch()
    assert not s.trials
    assert not s.looks
    assert set(s.meter.seen)=={'wait','full','step'}
    assert s.meter.cost is None
    assert len(s.meter.epoch_times)==2
    assert s.meter.times['step']==pytest.approx(3.5)
    assert s.meter.saved_secs>0

def test_all_ranks_decide_as_the_first_does(monkeypatch):
    class Follows(Ranks):
        "Rank 0 has seen other times and keeps less"
        def first(self, o):
            seen = dict(full=[6.]*3, small=[2.]*3, score=[1.]*3, step=[6.]*3)
            return (seen, [.01]*5) if isinstance(o, tuple) else o

    s = Steps(monkeypatch, auto=True)
    s.begin_fit(ranks=Follows())
    s.epoch(kept=.99)
    assert s.meter.share==pytest.approx(.01)
    assert not s.meter.is_aside
    assert s.meter.cost==pytest.approx((6-.99*6+1)/6)

def test_meters_check_what_they_get():
    with pytest.raises(ValueError, match="auto: got 'yes', wanted 'warn', True or False"): TopLossCallback(auto='yes')
    for bad in 0,1,None: # `0==False`, but is no answer
        with pytest.raises(ValueError, match='auto: got'): TopLossCallback(auto=bad)

# with a learner
SETTINGS = dict( # other callbacks, and epochs of warm-up
    plain=(lambda: [], 0),
    resting=(lambda: [], 1),
    amp=(lambda: [CPUMixedPrecision()], 0),
    amp_resting=(lambda: [CPUMixedPrecision()], 1),
    mixup=(lambda: [MixUp(.4)], 1),
    accumulation=(lambda: [GradientAccumulation(24)], 0),
)

@pytest.mark.law(5)
@pytest.mark.parametrize('setting', SETTINGS)
@every_method
def test_measuring_leaves_no_trace(cls, setting):
    cbs,warmup = SETTINGS[setting]
    options = {
        ImportanceSamplingCallback: dict(tau=0),
        BatchLossFilterCallback: dict(min_loss_perc=.5),
        InfoBatchCallback: dict(delta=1.),
    }.get(cls, {})
    def run(auto):
        selection = cls(auto=auto, seed=0, **full_epochs(cls, warmup), **options)
        return quiet_fit(table_learner(n=32+80, cbs=[*cbs(), selection]), 2)
    def losses(learn): return [row[:2] for row in learn.recorder.values]

    ours,plain = run('warn'),run(False)
    stats,meter = ours.selection.stats,ours.selection.meter
    assert (stats.kept<stats.seen).any()==leaves_out(cls)
    assert same(weights(ours), weights(plain))
    assert losses(ours)==losses(plain)
    if not meter.in_parts: return
    assert meter.is_measured
    assert len(meter.seen['small'])==3

class Clock(Time):
    "Time that passes as we say: for a plain batch, a scoring pass, and a trial of a part"
    def __init__(self, monkeypatch, step, score, small):
        super().__init__(monkeypatch)
        self.small,self.step,self.trials = small,step,0
        look = SelectionCallback.score
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

DEAR = dict(step=1.1, score=1., small=.4)
CHEAP = dict(step=3., score=1., small=1.)
FEW = [ # methods that keep few
    (TopLossCallback, dict(keep=1/3)),
    (SelectiveBackpropCallback, dict(beta=2)),
    (SelectiveBackpropCallback, dict(keep=1/3, gather=False)),
]
# Choices until it is decided, by whether batches are gathered (then it is the kept share that says it), and the warm-up
UNTIL_DECIDED = {(True,0): 4+5, (True,1): 5, (False,0): 5, (False,1): 0}

@pytest.mark.parametrize('warmup', [0, 1])
@pytest.mark.parametrize('auto', ['warn', True, False])
@pytest.mark.parametrize('cls,kwargs', FEW, ids=name_of)
def test_a_selection_that_does_not_pay_is_told_of_or_stands_aside(cls, kwargs, auto, warmup, monkeypatch, capsys):
    clock = Clock(monkeypatch, **DEAR)
    clock.small = 1.1*.9 # a frozen body: a third of the items takes nearly as long
    cbs = [clock.callback(), cls(auto=auto, warmup=warmup, **kwargs)]
    learn = quiet_fit(table_learner(n=32+320, cbs=cbs), 2+warmup)
    said,stats = capsys.readouterr().out,learn.selection.stats
    chosen = (stats.kept<stats.seen).sum()

    if auto is False:
        assert not clock.trials
        assert not said
        assert chosen>20
        return
    assert said.count('selecting saves no time here')==1
    assert 0<clock.trials<=6
    assert sums_up(learn.selection.card)
    assert 'pay' not in learn.selection.card

    if auto=='warn':
        assert 'It goes on' in said
        assert chosen>20
        return
    assert 'It stands aside' in said
    assert chosen==UNTIL_DECIDED[gathers(learn.selection),warmup]
    assert (stats.trained==stats.seen).sum()>=31

@pytest.mark.parametrize('auto', ['warn', True])
@every_method
def test_a_selection_that_pays_says_nothing_and_goes_on(cls, auto, monkeypatch, capsys):
    clock = Clock(monkeypatch, **CHEAP)
    options = {ImportanceSamplingCallback: dict(tau=1.01), BatchLossFilterCallback: dict(min_loss_perc=.5)}.get(cls, {})
    learn = quiet_fit(table_learner(n=32+320, cbs=[clock.callback(), cls(auto=auto, **options)]), 4)
    meter,stats = learn.selection.meter,learn.selection.stats
    assert 'here' not in capsys.readouterr().out
    assert not meter.is_aside
    assert (stats.trained.sum()<stats.seen.sum())==leaves_out(cls)
    if meter.in_parts and cls.scored: assert abs(meter.times['step']-3)<1e-6

def test_it_selects_again_once_less_is_kept(monkeypatch, capsys):
    monkeypatch.setattr(CostMeter, 'every', 10)
    clock = Clock(monkeypatch, **CHEAP)
    class Learns(SelectionCallback):
        def choose(self, scores): return Chosen(torch.arange(15 if self.epochs_done<3 else 4))

    learn = quiet_fit(table_learner(n=32+320, cbs=[clock.callback(), Learns(auto=True)]), 6)
    said,stats = capsys.readouterr().out,learn.selection.stats
    kept = stats.groupby('epoch').kept.mean()
    assert said.count('It stands aside')==1
    assert said.count('It selects again')==1
    assert kept[0]==kept[2]==16
    assert kept[3]<16
    assert kept[5]==4
    assert ((stats.kept<16) & (stats.epoch==1)).sum()==5 # it decides after five

def known(cb, monkeypatch, **times):
    "A meter that has measured already"
    monkeypatch.setattr(CostMeter, 'forget', lambda self: None)
    cb.meter.steps.note_size(1/3)
    usual = dict(full=3., small=1., score=1., step=3., wait=0.)
    for _ in range(3): cb.meter.note(**(usual | times))

def aside(cb, cost):
    "Have its meter stand aside"
    cb.meter.cost,cb.meter.is_aside = cost,True

def test_one_odd_batch_does_not_reopen_a_selection_for_good(monkeypatch):
    monkeypatch.setattr(CostMeter, 'every', 10)
    class Odd(SelectionCallback):
        def choose(self, scores):
            self.calls = getattr(self, 'calls', 0)+1
            return Chosen(torch.arange(2 if self.calls in (6, 13) else 16))

    learn = table_learner(n=32+3200, cbs=(cb := Odd(auto=True, warmup=0)), drop_last=True)
    known(cb, monkeypatch)
    quiet_fit(learn, 1)
    assert cb.meter.is_aside
    assert 18<cb.calls<30 # of 200: five, five more after each odd one, and single looks

def test_more_kept_later_is_noticed(monkeypatch, capsys):
    monkeypatch.setattr(CostMeter, 'every', 10)
    clock = Clock(monkeypatch, **CHEAP)
    class Forgets(SelectionCallback):
        def choose(self, scores): return Chosen(torch.arange(4 if self.epochs_done<3 else 15))

    learn = quiet_fit(table_learner(n=32+320, cbs=[clock.callback(), Forgets(auto=True)]), 5)
    kept = learn.selection.stats.groupby('epoch').kept.mean()
    assert kept[1]==kept[2]==4
    assert kept[4]==16
    assert capsys.readouterr().out.count('It stands aside')==1

def test_another_fit_is_measured_anew():
    learn = table_learner(n=32+320, cbs=(cb := TopLossCallback(1/3)))
    for p in list(learn.model.parameters())[:-2]: p.requires_grad_(False)
    quiet_fit(learn, 1)
    frozen = cb.meter.seen['full']
    quiet_fit(learn, 1)
    assert cb.meter.seen['full'] is frozen
    assert len(frozen)==3
    assert len(cb.meter.epoch_times)==2

    learn.model.requires_grad_(True)
    quiet_fit(learn, 1)
    assert cb.meter.seen['full'] is not frozen
    assert len(cb.meter.seen['full'])==3
    assert len(cb.meter.epoch_times)==1

    other = table_learner(n=32+320)
    learn.remove_cb(cb)
    whole = cb.meter.seen
    quiet_fit(other.add_cb(cb), 1)
    assert cb.meter.seen is not whole
    assert len(cb.meter.epoch_times)==1

def test_the_clock_overrules_the_prediction(monkeypatch, capsys):
    clock = Clock(monkeypatch, **CHEAP)
    class Slow(Callback):
        "A small step takes as long as a whole one"
        order,run_valid = 1,False

        def before_backward(self): clock.tick(2.9*(self.learn.selection.is_chosen))

    learn = quiet_fit(table_learner(n=32+320, cbs=[clock.callback(), Slow(), TopLossCallback(.25, auto=True)]), 4)
    cb = learn.selection
    kept = cb.stats.groupby('epoch').kept.mean()
    assert kept.tolist()==[16,4,16,16]
    assert cb.meter.is_aside
    assert cb.meter.cost>1

    said = capsys.readouterr().out
    assert said.count('selecting saves no time here')==1
    assert 'It stands aside' in said
    assert 'It stands aside now.' in cb.card

class InPlace(nn.Module):
    "A model that changes its input"
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x): return self.net(x.sub_(.5).div_(.25))

class Counts(nn.Module):
    "A model that keeps more than tensors"
    def __init__(self):
        super().__init__()
        self.net,self.n = mlp(),0
        self.register_buffer('ema', torch.zeros(4))

    def forward(self, x):
        if self.training:
            self.ema = self.ema*.9+.1*x.mean(0)
            self.n += 1
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
    assert same(weights(ours), weights(plain))
    assert getattr(ours.model, 'n', 0)==getattr(plain.model, 'n', 0)

@pytest.mark.parametrize('fault', [RuntimeError('one batch size only'), torch.cuda.OutOfMemoryError('full')], ids=str)
def test_measuring_never_ends_a_training(fault, capsys):
    class Sixteen(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            if len(x)!=16: raise fault
            return self.net(x)

    learn = table_learner(n=192, drop_last=True, cbs=(cb := SelectiveBackpropCallback(auto=True)))
    learn.model = Sixteen()
    learn._do_epoch_validate = lambda *args: None
    quiet_fit(learn, 2)
    said = capsys.readouterr().out
    assert said.count('could not be measured')==1
    assert not cb.meter.can_measure
    assert 'cost: not measured; by the clock, ' in cb.card
    assert cb.stats.trained.sum()>16

def test_tiny_batches_are_not_measured_for_ever():
    meter = quiet_fit(table_learner(bs=2, n=64, cbs=TopLossCallback(.5)), 1).selection.meter
    assert not meter.can_measure
    assert not meter.seen.get('small')
    assert len(meter.seen.get('wait', []))<=1

def test_importance_sampling_stands_aside_and_looks_again(monkeypatch):
    monkeypatch.setattr(CostMeter, 'every', 5)
    learn = table_learner(n=32+640, cbs=(cb := ImportanceSamplingCallback(tau=0, warmup=0, auto=True)))
    known(cb, monkeypatch, score=2.5)
    aside(cb, 1.5)
    quiet_fit(learn, 1)
    assert cb.meter.is_aside
    assert (cb.stats.trained==cb.stats.seen).all()

def test_stale_losses_that_stand_aside_look_again(monkeypatch):
    monkeypatch.setattr(CostMeter, 'every', 3)
    learn = table_learner(n=32+320, cbs=(cb := StaleLossCallback(2, n=3, auto=True)))
    shares,reconsider = [],CostMeter.reconsider
    def noting(self, kept):
        shares.append((cb.epoch, kept))
        reconsider(self, kept)

    monkeypatch.setattr(CostMeter, 'reconsider', noting)
    known(cb, monkeypatch)
    aside(cb, 1.5)
    quiet_fit(learn, 6)
    first = shares[0][0]
    assert first in (1, 2, 3)
    assert all(0<kept<1 for _,kept in shares)
    after = learn.selection.stats.query('epoch==@first+1')
    assert after.trained.sum()<after.seen.sum()

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
        assert len(waits)==3
        assert not any(waits)

class Slowly:
    "A loader's transform that takes a while, for inputs and for targets"
    def __init__(self, clock): self.clock = clock

    def __call__(self, b):
        self.clock.t += .125
        return b

def test_reading_the_loader_is_waiting(monkeypatch):
    "Also within a step that reads several batches"
    clock = Ticks(monkeypatch)
    learn = table_learner(n=32+160, drop_last=True, cbs=[clock, cb := TopLossCallback(.25, warmup=0, gather=True)])
    learn.dls.loaders[0] = learn.dls.train.new(after_batch=Slowly(clock))
    quiet_fit(learn, 1)
    assert cb.meter.seen['wait']==pytest.approx([.25]*3)
    assert cb.feed.waited==pytest.approx(2.5)

def test_cancelled_batches_are_no_steps():
    class Skips(Callback):
        order,run_valid = 20,False

        def before_batch(self):
            if self.iter%3!=2: return
            self.learn.yb = ()
            raise CancelBatchException

    quiet_fit(table_learner(n=32+320, drop_last=True, cbs=[cb := TopLossCallback(1/3, warmup=2), Skips()]), 2)
    seen = cb.meter.seen
    assert len(seen['step'])==len(seen['full'])==3
    assert all(step>=full for step,full in zip(seen['step'], seen['full']))

def test_a_look_is_remembered_once(monkeypatch):
    monkeypatch.setattr(CostMeter, 'every', 2)
    cb = TopLossCallback(.95, auto=True, warmup=0, noise_quantile=.9)
    learn = table_learner(n=32+160, drop_last=True, cbs=cb)
    known(cb, monkeypatch)
    aside(cb, 1.2)
    quiet_fit(learn, 1)
    assert cb.meter.is_aside
    assert cb.memory.seen.eq(1).all()

def test_a_slow_first_batch_is_no_saving(monkeypatch):
    quiet_fit(table_learner(n=32+320, drop_last=True, cbs=[Ticks(monkeypatch), cb := RandomSubsetCallback(1.)]), 2)
    took = [took for _,took in cb.meter.epoch_times]
    assert took==pytest.approx([75.,75.]) # from the arrival of the second one of 20

def test_the_card_tells_what_was_saved():
    learn = quiet_fit(table_learner(n=32+320, cbs=TopLossCallback(.25)), 3)
    cb = learn.selection
    times = [took for _,took in cb.meter.epoch_times]
    assert len(times)==3
    assert math.isclose(cb.meter.saved, 1-(times[1]+times[2])/2/times[0])

    saved = 2*times[0]-times[1]-times[2]
    word = 'less' if saved>=0 else 'more'
    took = f'the selecting epochs took {abs(saved):.3g} s {word} than the {2*times[0]:.3g} s of plain ones'
    assert f'; by the clock, {took}' in cb.card
    assert 'a selecting step takes' in cb.card

def test_a_loss_without_reduction_is_computed_once_at_rest():
    calls = []
    def loop(pred, y):
        if len(pred)==1: float(pred.detach().sum()) # which `vmap` can't follow
        calls.append(len(pred))
        return (pred[:,0]-y).square().mean()

    losses = []
    class Notes(Callback):
        order,run_valid = 60,False

        def after_loss(self): losses.append(self.loss.item())

    cb = TopLossCallback(.5, warmup=9, auto=False)
    learn = table_learner(n=32+160, drop_last=True, loss_func=loop, cbs=cb)
    learn.add_cb(Notes())
    learn._do_epoch_validate = lambda *args: None
    quiet_fit(learn, 1)
    assert cb.losses.how=='loop'
    assert calls.count(16)<=10+3
    assert calls[-5:]==[16]*5
    assert cb.stats.full_loss.tolist()==pytest.approx(losses)
