"Scoring ahead: what a copy of that lag would choose, whatever the thread does, and nothing of it is left behind"
import copy, gc, random, threading, time, traceback

import pytest, torch
from fastai.callback.core import CancelEpochException, CancelFitException, CancelTrainException
from fastai.callback.hook import ActivationStats
from fastai.optimizer import OptimWrapper
from helpers import *
from selback.functional import Ahead
from torch.nn import functional as F

AHEAD = dict(
    selective=lambda **k: SelectiveBackpropCallback(beta=1, **k),
    top=lambda **k: TopLossCallback(.5, **k),
    gathered=lambda **k: pooled(2, TopLossCallback(.3, gather=True, **k)),
    share=lambda **k: BatchLossFilterCallback(.6, **k),
    stale=lambda **k: StaleLossCallback(beta=1, n=2, **k),
    importance=lambda **k: ImportanceSamplingCallback(tau=0, presample=2, **k),
    window=lambda **k: TopLossCallback(.5, start=.3, end=.8, interrupt=3, **k))
ON_PATHS = [make for name,make in AHEAD.items() if name not in ('top','share')]
of_each_kind = pytest.mark.parametrize('make', mostly_slow(AHEAD.values(), *ON_PATHS), ids=AHEAD)

def threads():
    "Those that are left when what was begun is done"
    ours = [t for t in threading.enumerate() if t.name.startswith('selback')]
    for thread in ours: thread.join(5)
    return [t for t in ours if t.is_alive()]

@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not threads()

class Slowly(nn.Module):
    "Takes its time in the thread: each pass, or one in four"
    waits = torch.Generator()
    def __init__(self, net, seconds, always=False):
        super().__init__()
        self.net,self.seconds,self.always = net,seconds,always

    def forward(self, x):
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main and (self.always or not torch.randint(4, (1,), generator=self.waits)): time.sleep(self.seconds)
        return self.net(x)

    def __deepcopy__(self, memo): # the generator of the class is nobody's copy
        return Slowly(copy.deepcopy(self.net, memo), self.seconds, self.always)

def slowed(learn, seconds, always=False):
    "A learner whose scoring passes take time, now and then or each"
    learn.model = Slowly(learn.model, seconds, always)
    return learn

@pytest.mark.parametrize('seconds', [0,slow(.005)])
@of_each_kind
def test_the_thread_changes_nothing(make, seconds):
    def run(seconds):
        learn = slowed(numbered_learner(cbs=[Diary(), make(warmup=0, seed=0, scorer=Ahead(3))]), seconds)
        quiet_fit(learn, 3, fit='fit_one_cycle')
        return learn.diary.epochs,learn.recorder.lrs,weights(learn)
    epochs,rates,ours = run(.001)
    same_epochs,same_rates,theirs = run(seconds)
    assert epochs==same_epochs and rates==same_rates and same(ours, theirs)

@of_each_kind
def test_a_model_that_does_not_learn_is_scored_alike_ahead_and_in_time(make):
    "So schedules, the window, gathering and what is known of items are those of a batch's own turn"
    def run(**kwargs):
        torch.manual_seed(0)
        learn = numbered_learner(net=nn.Linear(4, 3), cbs=[Diary(), make(warmup=1, seed=0, **kwargs)])
        quiet_fit(learn, 4, lr=0.)
        return [[step[:2] for step in epoch] for epoch in learn.diary.epochs],learn.selection.stats
    (steps,stats),(wanted,plain) = run(scorer=Ahead(4)),run()
    assert steps==wanted
    assert stats.drop(columns='full_loss').equals(plain.drop(columns='full_loss'))

class ByHand:
    "A lagging copy by hand: batch `i+n` is predicted before batch `i` is chosen from"
    def __init__(self, net, loss, lr, n, every, keep):
        self.net,self.loss,self.n,self.every,self.keep = net,loss,n,every,keep
        self.opt = torch.optim.SGD(net.parameters(), lr)
        self.state = {k: v.clone() for k,v in net.state_dict().items()}
        self.steps = 0

    def scores(self, x, y):
        now = {k: v.clone() for k,v in self.net.state_dict().items()}
        self.net.load_state_dict(self.state)
        self.net.eval()
        with torch.no_grad(): losses = self.loss(self.net(x), y, reduction='none')
        self.net.train()
        self.net.load_state_dict(now)
        return losses

    def epoch(self, batches):
        scores,chosen = [],[]
        for i in range(len(batches)+self.n):
            if i<len(batches): scores.append(self.scores(*batches[i]))
            if i<self.n: continue
            x,y = batches[i-self.n]
            rows = scores[i-self.n].topk(int(self.keep*len(x))).indices.sort().values
            chosen.append(x[rows])
            self.opt.zero_grad()
            self.loss(self.net(x[rows]), y[rows]).backward()
            self.opt.step()
            self.steps += 1
            if self.steps%self.every==0: self.state = {k: v.clone() for k,v in self.net.state_dict().items()}
        return chosen

@pytest.mark.parametrize('n,every', [(1,1),(2,3),(5,1),(30,2)])
def test_a_batch_is_scored_by_the_copy_of_when_it_was_read(n, every):
    x,y = class_data(160)
    batches = [(x[i:i+16],y[i:i+16]) for i in range(0, 160, 16)]
    def net():
        torch.manual_seed(1)
        return mlp(dropout=0.)

    seen = []
    class Seen(Callback):
        order,run_valid = 60,False
        def after_loss(self): seen.append(self.x.clone())
    train = TfmdDL(TensorDataset(x, y), bs=16, num_workers=0)
    dls = DataLoaders(train, TfmdDL(TensorDataset(x[:16], y[:16]), bs=16, num_workers=0))
    cbs = [Seen(), TopLossCallback(.25, warmup=0, scorer=Ahead(n, every))]
    def sgd(params, lr): return OptimWrapper(params, torch.optim.SGD, lr=lr)
    learn = learner_on(dls, net(), opt_func=sgd, cbs=cbs, lr=.5)
    quiet_fit(learn, 1)
    wanted = ByHand(net(), F.cross_entropy, .5, n, every, .25).epoch(batches)
    assert len(seen)==len(wanted)
    assert all(map(torch.equal, seen, wanted))
    in_time = ByHand(net(), F.cross_entropy, .5, 0, 1, .25).epoch(batches)
    assert not all(map(torch.equal, seen, in_time)) # the lag is felt

def test_random_numbers_of_training_are_its_own():
    "Dropout, and augmentation in the main process, whatever the thread does meanwhile"
    def run(seconds):
        learn = image_learner(cbs=[TopLossCallback(.5, warmup=0, scorer=Ahead(2))])
        learn.model[-1] = nn.Sequential(nn.Dropout(.5), learn.model[-1])
        quiet_fit(slowed(learn, seconds), 2)
        return weights(learn),torch.rand(3)
    (ours,after),(theirs,later) = run(0.),run(.005)
    assert same(ours, theirs) and torch.equal(after, later)

# Nothing is left behind
class Stops(Callback):
    order,run_valid = 30,False
    def __init__(self, error, event, i): self.error,self.event,self.i = error,event,i
    def __call__(self, event_name):
        if event_name==self.event and self.learn.training and getattr(self.learn, 'iter', 0)==self.i: raise self.error
        return super().__call__(event_name)

ERRORS = KeyboardInterrupt,CancelFitException,CancelEpochException,CancelTrainException,ZeroDivisionError

@pytest.mark.parametrize('error', mostly_slow(ERRORS, KeyboardInterrupt, CancelEpochException))
@pytest.mark.parametrize('event', ['after_pred','after_step',slow('before_batch'),slow('after_batch')])
def test_a_fit_that_ends_early_leaves_no_thread_and_no_copy(error, event):
    class Counted(nn.Sequential): "A model whose copies are counted"
    def n_copies(): return sum(type(o) is Counted for o in gc.get_objects())-1
    class Notes(Callback):
        order,n = 29,0
        def after_pred(self): self.n = max(self.n, n_copies())
    selection = SelectiveBackpropCallback(beta=1, warmup=0, scorer=Ahead(3))
    learn = table_learner(cbs=[Notes(), Stops(error, event, 3), selection])
    learn.model = Counted(*learn.model)
    try: quiet_fit(learn, 2)
    except error: pass
    assert learn.notes.n==1
    assert not threads()
    learn.xb = learn.yb = learn.pred = learn.loss = None
    gc.collect()
    assert not n_copies()

# What goes wrong in the thread
class Fails(nn.Module):
    "In the thread, at the second call"
    def __init__(self):
        super().__init__()
        self.net,self.calls = mlp(),torch.tensor(0)
    def forward(self, x):
        if threading.current_thread() is not threading.main_thread(): self.calls += 1
        if self.calls==2: raise ArithmeticError('the second call')
        return self.net(x)

def test_an_error_of_the_thread_arrives_in_the_fit_with_its_trace():
    learn = table_learner(cbs=[TopLossCallback(.5, warmup=0, scorer=Ahead(2))])
    learn.model = Fails()
    with pytest.raises(ArithmeticError, match='the second call') as e: quiet_fit(learn, 1)
    assert any(frame.name=='forward' for frame in traceback.extract_tb(e.value.__traceback__))
    del e
    assert not threads()

def refused(model, match):
    "A learner is not trained a step"
    learn = table_learner(cbs=[TopLossCallback(.5, warmup=0, scorer=Ahead(2))])
    learn.model = model
    before = weights(learn)
    with pytest.raises(ValueError, match=match): quiet_fit(learn, 1)
    assert same(weights(learn), before)
    assert not threads()

class Draws(nn.Module):
    def __init__(self, of_python=False):
        super().__init__()
        self.net,self.of_python = mlp(),of_python
    def forward(self, x):
        return self.net(x+.1*(random.random() if self.of_python else torch.randn_like(x)))

@pytest.mark.parametrize('of_python', [False,True])
def test_a_model_that_draws_random_numbers_when_it_predicts_is_refused(of_python):
    refused(Draws(of_python), 'got a model that draws random numbers.*leave scorer=Ahead')

class Closes(nn.Module):
    "Reaches its layers through a function"
    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.f = lambda x: self.net(x)
    def forward(self, x): return self.f(x)

class Locked(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)
        self.lock = threading.Lock()

def test_a_copy_that_shares_something_with_its_model_is_refused():
    refused(Closes(), "calls the model's own Sequential")
    model,seen = mlp(),[]
    model[0].register_forward_hook(lambda m, i, o: seen.append(len(o)))
    refused(model, 'a model with a hook, .*lambda')
    refused(Locked(), 'can not be copied.*leave scorer=Ahead')

def test_the_hooks_of_callbacks_are_refused():
    "They would be called in the thread, too"
    cbs = [ActivationStats(with_hist=False), TopLossCallback(.5, warmup=0, scorer=Ahead(2))]
    with pytest.raises(ValueError, match='a model with a hook'): quiet_fit(table_learner(cbs=cbs), 1)
