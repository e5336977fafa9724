"Scoring ahead: what a copy of that lag would choose, whatever the thread does, and nothing of it is left behind"
import gc, threading, time, traceback, weakref

import pytest, torch
from fastai.callback.core import CancelEpochException, CancelFitException, CancelTrainException
from fastai.callback.hook import ActivationStats
from fastai.callback.training import GradientAccumulation
from fastai.optimizer import OptimWrapper
from helpers import *
from selback.core import ahead as ahead_room
from selback.core.ahead import PassAhead, Worker, read_ahead
from selback.core.loop import chosen
from selback.functional import TopLoss
from torch.nn import functional as F

AHEAD = dict(
    selective=lambda **k: SelectiveBackpropCallback(beta=1, **k),
    top=lambda **k: TopLossCallback(.5, **k),
    gathered=lambda **k: pooled(2, TopLossCallback(.3, gather=True, **k)),
    share=lambda **k: BatchLossFilterCallback(.6, **k),
    stale=lambda **k: StaleLossCallback(beta=1, n=2, **k),
    importance=lambda **k: ImportanceSamplingCallback(tau=0, presample=2, **k),
    window=lambda **k: TopLossCallback(.5, start=.3, end=.8, interrupt=3, **k),
    followed=lambda **k: SelectiveBackpropCallback(beta=1, scorer=ModelCopy(every=3, decay=.5), **k))
ON_PATHS = [make for name,make in AHEAD.items() if name not in ('top','share')]
of_each_kind = pytest.mark.parametrize('make', mostly_slow(AHEAD.values(), *ON_PATHS), ids=AHEAD)

def threads():
    "Those that are left when what was begun is done"
    ours = [t for t in threading.enumerate() if t.name=='selback']
    for thread in ours: thread.join(5)
    return [t for t in ours if t.is_alive()]

@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not threads()

class AtOnce(Worker):
    "No thread: each function is run when it is submitted"
    def submit(self, run):
        job = super().submit(run)
        self.wait()
        return job

class Late(Worker):
    "A thread that is slow now and then"
    chance = torch.Generator()
    def submit(self, run):
        def late():
            if torch.randint(4, (1,), generator=self.chance)==0: time.sleep(.005)
            return run()
        return super().submit(late)

class VeryLate(Worker):
    "A thread that is slow"
    def submit(self, run):
        def late():
            time.sleep(.05)
            return run()
        return super().submit(late)

def fit_of(make, n_epoch=3, learner=numbered_learner, **kwargs):
    "The items, weights and losses of each step, and the rates"
    learn = learner(cbs=[Diary(), make(warmup=0, seed=0, **kwargs)])
    quiet_fit(learn, n_epoch, fit='fit_one_cycle')
    return learn.diary.epochs,learn.recorder.lrs,weights(learn)

@pytest.mark.parametrize('worker', [AtOnce,slow(Late)])
@of_each_kind
def test_the_thread_changes_nothing(make, worker, monkeypatch):
    epochs,rates,ours = fit_of(make, ahead=3)
    monkeypatch.setattr(ahead_room, 'Worker', worker)
    same_epochs,same_rates,theirs = fit_of(make, ahead=3)
    assert epochs==same_epochs and rates==same_rates and same(ours, theirs)

@of_each_kind
def test_a_model_that_does_not_learn_is_scored_alike_ahead_and_in_time(make):
    "So schedules, the window, gathering and what is known of items are those of a batch's own turn"
    def run(**kwargs):
        torch.manual_seed(0)
        learn = numbered_learner(net=nn.Linear(4, 3), cbs=[Diary(), make(warmup=1, seed=0, **kwargs)])
        quiet_fit(learn, 4, lr=0.)
        return [[step[:2] for step in epoch] for epoch in learn.diary.epochs],learn.selection.stats
    (steps,stats),(wanted,plain) = run(ahead=4),run()
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
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    seen = []
    class Seen(Callback):
        order,run_valid = 60,False
        def after_loss(self): seen.append(self.x.clone())
    train = TfmdDL(TensorDataset(x, y), bs=16, num_workers=0)
    dls = DataLoaders(train, TfmdDL(TensorDataset(x[:16], y[:16]), bs=16, num_workers=0))
    cbs = [Seen(), TopLossCallback(.25, warmup=0, ahead=n, scorer=ModelCopy(every))]
    def sgd(params, lr): return OptimWrapper(params, torch.optim.SGD, lr=lr)
    learn = Learner(dls, net(), loss_func=CrossEntropyLossFlat(), opt_func=sgd, cbs=cbs, lr=.5)
    quiet_fit(learn, 1)
    wanted = ByHand(net(), F.cross_entropy, .5, n, every, .25).epoch(batches)
    assert len(seen)==len(wanted)
    assert all(map(torch.equal, seen, wanted))
    in_time = ByHand(net(), F.cross_entropy, .5, 0, 1, .25).epoch(batches)
    assert not all(map(torch.equal, seen, in_time)) # the lag is felt

def test_random_numbers_of_training_are_its_own(monkeypatch):
    "Dropout, and augmentation in the main process, whatever the thread does meanwhile"
    def run(worker):
        monkeypatch.setattr(ahead_room, 'Worker', worker)
        learn = image_learner(cbs=[TopLossCallback(.5, warmup=0, ahead=2)])
        learn.model[-1] = nn.Sequential(nn.Dropout(.5), learn.model[-1])
        quiet_fit(learn, 2)
        return weights(learn),torch.rand(3)
    (ours,after),(theirs,later) = run(AtOnce),run(Late)
    assert same(ours, theirs) and torch.equal(after, later)

@pytest.mark.parametrize('num_workers', [0,slow(2)])
def test_a_resumed_run_is_the_same(num_workers):
    def made(): return numbered_learner(cbs=[Diary(), SelectiveBackpropCallback(warmup=0, seed=0, ahead=2)],
        shuffle=False, num_workers=num_workers)
    whole = quiet_fit(made(), 2, lr=.1)
    first = quiet_fit(made(), 1, lr=.1)
    second = made()
    second.model.load_state_dict(first.model.state_dict())
    second.create_opt()
    second.opt.load_state_dict(first.opt.state_dict())
    second.selection.load_state_dict(first.selection.state_dict())
    torch.manual_seed(5)
    quiet_fit(second, 1, lr=.1)
    def items(epoch): return [step[0] for step in epoch]
    assert items(whole.diary.epochs[0])==items(first.diary.epochs[0])
    # dropout draws on, so that only the first choices of the second epoch are known to agree
    assert items(whole.diary.epochs[1])[0]==items(second.diary.epochs[0])[0]

@pytest.mark.parametrize('cbs', [[CPUMixedPrecision], [partial(MixUp, .4)], [partial(GradientAccumulation, 24)]])
def test_beside_other_callbacks(cbs, monkeypatch):
    def run():
        learn = table_learner(cbs=[*(cb() for cb in cbs), SelectiveBackpropCallback(beta=1, warmup=0, ahead=2, seed=0)])
        return weights(quiet_fit(learn, 2))
    ours = run()
    monkeypatch.setattr(ahead_room, 'Worker', AtOnce)
    assert same(ours, run())

# Nothing is left behind
def alive(copies): return [copy for copy in copies if copy() is not None]

@pytest.fixture
def copies(monkeypatch):
    "Weak references to all copies that predict"
    found,begin = [],PassAhead.begin
    def noted(self, *args, **kwargs):
        prediction = begin(self, *args, **kwargs)
        found.append(weakref.ref(self.copy.model))
        return prediction
    monkeypatch.setattr(PassAhead, 'begin', noted)
    return found

class Stops(Callback):
    order,run_valid = 30,False
    def __init__(self, error, event, i): self.error,self.event,self.i = error,event,i
    def __call__(self, event_name):
        if event_name==self.event and self.learn.training and getattr(self.learn, 'iter', 0)==self.i: raise self.error
        return super().__call__(event_name)

ERRORS = KeyboardInterrupt,CancelFitException,CancelEpochException,CancelTrainException,ZeroDivisionError

@pytest.mark.parametrize('error', mostly_slow(ERRORS, KeyboardInterrupt, CancelEpochException))
@pytest.mark.parametrize('event', ['after_pred','after_step',slow('before_batch'),slow('after_batch')])
def test_a_fit_that_ends_early_leaves_no_thread_and_no_copy(error, event, copies):
    learn = table_learner(cbs=[Stops(error, event, 3), SelectiveBackpropCallback(beta=1, warmup=0, ahead=3)])
    try: quiet_fit(learn, 2)
    except error: pass
    assert not threads() and copies
    learn.xb = learn.yb = learn.pred = learn.loss = None
    gc.collect()
    assert not alive(copies)

def test_fits_in_a_row_leave_no_thread_and_no_copy(copies):
    learn = table_learner(cbs=[SelectiveBackpropCallback(warmup=0, ahead=2)])
    for n_epoch in (1,2,1):
        quiet_fit(learn, n_epoch)
        assert not threads() and not alive(copies)
    learn.full_batches()
    assert not alive(copies)

def test_a_selection_that_is_taken_off_in_an_epoch_leaves_nothing(copies):
    class TakesOff(Callback):
        order,run_valid = 30,False
        def after_batch(self):
            if self.iter==2: self.learn.full_batches()
    learn = numbered_learner(cbs=[TakesOff(), Diary(), TopLossCallback(.5, warmup=0, ahead=3)])
    with pytest.raises(AttributeError): quiet_fit(learn, 1) # of the diary, which asks for the selection's weights
    assert not threads()

# What goes wrong in the thread
class Fails(nn.Module):
    "In evaluation mode, at the third call"
    def __init__(self):
        super().__init__()
        self.net,self.calls = mlp(),torch.tensor(0)
    def forward(self, x):
        if not self.training: self.calls += 1
        if self.calls==3: raise ArithmeticError('the third call')
        return self.net(x)

def test_an_error_of_the_thread_arrives_in_the_fit_with_its_trace():
    learn = table_learner(cbs=[TopLossCallback(.5, warmup=0, ahead=2)])
    learn.model = Fails()
    with pytest.raises(ArithmeticError, match='the third call') as e: quiet_fit(learn, 1)
    assert any(frame.name=='forward' for frame in traceback.extract_tb(e.value.__traceback__))
    assert not threads()

class Draws(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()
    def forward(self, x): return self.net(x+.1*torch.randn_like(x))

def test_a_model_that_draws_random_numbers_when_it_predicts_is_refused():
    learn = table_learner(cbs=[TopLossCallback(.5, warmup=0, ahead=2)])
    learn.model = Draws()
    before = weights(learn)
    with pytest.raises(ValueError, match='ahead: got a model that draws random numbers'): quiet_fit(learn, 1)
    assert same(weights(learn), before)

def test_a_callback_that_changes_batches_first_is_refused():
    class Doubles(Callback):
        order,run_valid = BatchSelection.order-1,False
        def before_batch(self): self.learn.xb = (2*self.x,)
    learn = table_learner(cbs=[Doubles(), TopLossCallback(.5, warmup=0, ahead=2)])
    with pytest.raises(ValueError, match='got a batch that a callback of a lower order'): quiet_fit(learn, 1)

    class Watches(Callback):
        order,run_valid,seen = BatchSelection.order-1,False,0
        def before_batch(self): self.seen += 1
    learn = quiet_fit(table_learner(cbs=[Watches(), TopLossCallback(.5, warmup=0, ahead=2)]), 1)
    assert learn.watches.seen

def test_options_that_do_not_go_with_it():
    with pytest.raises(ValueError, match='ahead: got 2 with passes=1'): TopLossCallback(ahead=2, passes=1)
    with pytest.raises(ValueError, match='ahead: got -1'): TopLossCallback(ahead=-1)
    with pytest.raises(TypeError, match="ahead: got 'cuda:1'"): TopLossCallback(ahead='cuda:1')
    with pytest.raises(ValueError, match='ahead: got 2, wanted none'): RandomSubsetCallback(ahead=2)

def test_hooks_of_callbacks_see_training_only():
    def stats(**kwargs):
        learn = table_learner(cbs=[ActivationStats(with_hist=False), TopLossCallback(.5, warmup=0, **kwargs)])
        quiet_fit(learn, 1)
        return [len(o) for o in learn.activation_stats.stats]
    assert stats(ahead=2)==stats()

@pytest.mark.slow
def test_a_compiled_model():
    learn = table_learner(cbs=[TopLossCallback(.5, warmup=0, ahead=2)])
    learn.model = torch.compile(learn.model, backend='eager')
    quiet_fit(learn, 1)
    assert len(learn.recorder.losses)==7

def test_what_waits_for_a_slow_thread_at_the_end_of_an_epoch_is_trained(monkeypatch):
    def run(worker):
        monkeypatch.setattr(ahead_room, 'Worker', worker)
        learn = table_learner(cbs=[pooled(5, TopLossCallback(.3, gather=True, warmup=0, ahead=2))])
        return weights(quiet_fit(learn, 1))
    assert same(run(VeryLate), run(AtOnce))

class Tied(nn.Module):
    "Uses a weight several times"
    def __init__(self):
        super().__init__()
        self.w,self.head = nn.Linear(4, 4),nn.Linear(4, 3)
    def forward(self, x):
        for _ in range(4):
            x = torch.tanh(self.w(x))
            time.sleep(.0005)
        return self.head(x)

class Dropped(nn.Module):
    "Compiled, with dropout"
    def __init__(self):
        super().__init__()
        self.net = torch.compile(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(.3), nn.Linear(8, 3)),
            backend='eager')
    def forward(self, x): return self.net(x)

class Holds(nn.Module):
    "Keeps on itself what it has computed"
    def __init__(self):
        super().__init__()
        self.a,self.b = nn.Linear(4, 8),nn.Linear(8, 3)
    def forward(self, x):
        self.features = self.a(x)
        time.sleep(.001)
        return self.b(self.features)

@pytest.mark.parametrize('model,cbs,scorer', [(Tied, [CPUMixedPrecision], None), slow(Dropped, [], None),
    (Holds, [], ModelCopy), slow(Holds, [], None)])
def test_odd_models_are_trained_alike_however_fast_the_thread_is(model, cbs, scorer, monkeypatch):
    def run(worker):
        monkeypatch.setattr(ahead_room, 'Worker', worker)
        torch.manual_seed(0)
        selection = TopLossCallback(.5, warmup=0, ahead=3, scorer=scorer and scorer(4))
        learn = table_learner(cbs=[*(cb() for cb in cbs), selection])
        torch.manual_seed(1)
        learn.model = model()
        quiet_fit(learn, 2)
        return weights(learn),torch.rand(1)
    (ours,after),(theirs,later) = run(AtOnce),run(Late)
    assert same(ours, theirs) and torch.equal(after, later)

class Closes(nn.Module):
    "Reaches its layers through a function"
    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.f = lambda x: self.net(x)
    def forward(self, x): return self.f(x)

def test_a_copy_that_shares_something_with_its_model_is_refused():
    def fit_of(model):
        learn = table_learner(cbs=[TopLossCallback(.5, warmup=0, ahead=2)])
        learn.model = model
        return quiet_fit(learn, 1)
    with pytest.raises(ValueError, match="calls the model's own Sequential"): fit_of(Closes())
    model,seen = mlp(),[]
    model[0].register_forward_hook(lambda m, i, o: seen.append(len(o)))
    with pytest.raises(ValueError, match='a hook that is a function'): fit_of(model)
    class Locked(nn.Linear):
        def __init__(self):
            super().__init__(4, 3)
            self.lock = threading.Lock()
    with pytest.raises(ValueError, match="can't be copied.*ahead=0"): fit_of(Locked())

@pytest.mark.parametrize('ahead', [0,2])
def test_a_copy_follows_a_model_whose_layers_are_exchanged(ahead):
    class Exchanges(Callback):
        order,run_valid = 30,False
        def after_batch(self):
            if self.iter!=1: return
            self.model[-1] = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 3))
            self.model.append(nn.Linear(3, 3))
    sizes,copied = [],ModelCopy(2)
    def score(pred, y):
        sizes.append(len(copied.model or []))
        return F.cross_entropy(pred, y, reduction='none')
    selection = TopLossCallback(.5, warmup=0, score=score, scorer=copied, ahead=ahead)
    quiet_fit(table_learner(cbs=[Exchanges(), selection], n=292), 1)
    assert sizes[0]==5 and sizes[-1]==6

def test_a_smaller_scorer_that_is_trained_itself_is_followed():
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.steps,self.net = nn.Parameter(torch.zeros(1)),nn.Linear(4, 3)
        def forward(self, x): return self.net(x)+self.steps
    small = Small()
    class Trains(Callback):
        order,run_valid = 20,False
        def after_batch(self):
            with torch.no_grad(): small.steps += 1
    learn = table_learner(cbs=[Trains(), TopLossCallback(.5, warmup=0, ahead=1, scorer=small)], n=532)
    copies = []
    class Looks(Callback):
        order,run_valid = 40,False
        def after_batch(self): copies.append(float(self.selection.engine.pass_ahead.copy.model.steps))
    learn.add_cb(Looks())
    quiet_fit(learn, 1)
    assert len(copies)>20 and copies[0]==0
    assert all(0<=step-copy<=3 for step,copy in enumerate(copies, 1)) # it follows at every third

def test_inputs_that_are_not_numbers_are_themselves():
    class Watches(Callback):
        order,run_valid = BatchSelection.order-1,False
        def before_batch(self): "Nothing"
    learn = table_learner(cbs=[Watches(), TopLossCallback(.5, warmup=0, ahead=2)])
    learn.dls.train.dataset.tensors[0][3,1] = torch.nan
    quiet_fit(learn, 1)

def test_the_autocast_around_a_loop_is_that_of_all_passes():
    kinds = Trail()
    class Notes(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            if not torch.is_grad_enabled(): kinds.append(out.dtype)
            return out
    batches = [(torch.randn(4, 3),torch.randint(2, (4,))) for _ in range(4)]
    with torch.autocast('cpu', dtype=torch.bfloat16):
        for batch in chosen(batches, Notes(3, 2), F.cross_entropy, TopLoss(), ahead=2): pass
    assert kinds.seen==4*[torch.bfloat16]

def test_the_reader_hands_out_each_batch_once():
    for n in range(6): assert list(read_ahead(iter(range(4)), n, lambda read: None))==[0,1,2,3]
