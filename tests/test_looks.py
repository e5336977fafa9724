"The scoring pass: cheap looks, another model that looks, several batches at once, batches that are not chosen from"
import itertools

import pytest, torch
from fastai.callback.core import Callback
from helpers import *
from selback.core.untouched import fixed_random
from torch.nn import functional as F

class Looks(nn.Module):
    "Notes what it is asked to look at"
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
        self.looks = Trail()
    def forward(self, x):
        is_channels_last = x.is_contiguous(memory_format=torch.channels_last)
        if not self.training: self.looks.append((tuple(x.shape),is_channels_last,torch.is_autocast_enabled('cpu')))
        return self.net(x)

def test_low_precision_and_resolution_go_together():
    x,model = torch.randn(4, 3, 16, 16),Looks()
    pred = ScoringPass(.5, 'bf16')(model, (x,))
    with torch.autocast('cpu', dtype=torch.bfloat16),torch.no_grad():
        small = F.interpolate(x, size=8, mode='bilinear', align_corners=False)
        wanted = model.eval()(small).float()

    assert pred.dtype==torch.float32
    assert model.looks.seen[0]==((4,3,8,8),True,True)
    assert not torch.is_autocast_enabled('cpu')
    torch.testing.assert_close(pred, wanted, rtol=.02, atol=.02)
    in_full = ScoringPass(.5)(model, (x,))
    assert (pred-in_full).abs().max()>1e-6 # it was bf16

# another model looks
def test_a_proxy_scores_and_the_model_does_not():
    learn,proxy = image_learner(n=36),Looks()
    learn.model = main = Looks()
    chosen = []
    def note(batch, scores, losses, rows): chosen.append((as_tensors(batch.xb)[0], as_tensors(batch.yb)[0], scores))
    cb = watch_choices(TopLossCallback(.5, warmup=0, scorer=proxy), note)
    learn._do_epoch_validate = lambda *args: None
    quiet_fit(learn.add_cb(cb), 1)

    assert len(proxy.looks.seen)>=4
    assert not main.looks.seen
    for x,y,scores in chosen:
        losses = F.cross_entropy(proxy.net(x), y, reduction='none').detach()
        torch.testing.assert_close(scores, losses)

def test_errors_name_the_scorer():
    refused = 'scorer: got the class Linear, wanted a module'
    with pytest.raises(TypeError, match=refused): TopLossCallback(scorer=nn.Linear)
    learn = short_learner(cbs=TopLossCallback(scorer=nn.Linear(9, 3)))
    with pytest.raises(ValueError, match='the scorer must take the inputs of the model'): quiet_fit(learn, 1)

# several batches in one look
class Batches(LoaderBatches):
    "Each batch of the loader, with what losses a look at it finds"
    def __init__(self): self.epochs = []
    def before_train(self):
        super().before_train()
        self.epochs.append([])
    def note(self, i, xb, yb):
        (x,),(y,) = xb,yb
        with fixed_random(),torch.no_grad():
            losses = F.cross_entropy(self.model.eval()(x), y, reduction='none')
        self.model.train()
        self.epochs[-1].append((x.clone(), y.clone(), losses))

class Trained(Callback):
    "The items of each step"
    order,run_valid = 60,False
    def __init__(self): self.epochs = []
    def before_train(self): self.epochs.append([])
    def after_loss(self): self.epochs[-1].append(self.x.clone())

def follow(cb, n=32+132, n_epoch=2, bs=16, **kwargs):
    "The loader's batches and the steps of each epoch"
    learn = table_learner(n=n, bs=bs, cbs=[cb, Batches(), Trained()], **kwargs)
    quiet_fit(learn, n_epoch)
    return learn,[*zip(learn.batches.epochs, learn.trained.epochs)]

def hardest(batch, n):
    "The `n` hardest items of a batch, in its order"
    x,_,losses = batch
    return x[losses.argsort(descending=True)[:n].sort().values]

def next_hardest(batch, n, more):
    "The `more` hardest items after the `n` hardest, in the batch's order"
    x,_,losses = batch
    return x[losses.argsort(descending=True)[n:n+more].sort().values]

def together(batches):
    "Several batches as one"
    return [torch.cat(o) for o in zip(*batches)]

def keys(x): return {item.numpy().tobytes() for item in x}

@pytest.mark.parametrize('k', [2, 3, 99])
def test_batches_are_scored_together(k):
    "The hardest of `k` batches at once, and of as many as are there at an epoch's end; nothing waits between epochs"
    looks = []
    cb = pooled(k, TopLossCallback(keep=.25, warmup=0, gather=True))
    learn,epochs = follow(watch_choices(cb, lambda batch, scores, losses, chosen: looks.append((batch.xb[0], losses))))
    pools_of = [[together(batches[i:i+k]) for i in range(0, len(batches), k)] for batches,_ in epochs]

    for (x,losses),(wanted_x,_,wanted) in zip(looks, sum(pools_of, []), strict=True):
        assert torch.equal(x, wanted_x) # each is scored once, with its neighbours
        torch.testing.assert_close(losses, wanted)

    for (_,steps),pools in zip(epochs, pools_of):
        chosen = [hardest(pool, len(pool[0])//4) for pool in pools]
        lacking = -sum(map(len, chosen))%16
        chosen.append(next_hardest(pools[-1], len(chosen[-1]), lacking)) # these fill the last step up
        assert torch.equal(torch.cat(steps), torch.cat(chosen))
        assert [len(o) for o in steps[:-1]]==[16]*(len(steps)-1)

    stats = learn.selection.stats
    assert (stats.trained>0).sum()==sum(map(len, learn.trained.epochs))
    for _,rows in stats.groupby('epoch'): assert_chosen_from_every(k, rows, n_batches=9)

def assert_chosen_from_every(k, rows, n_batches):
    "Of an epoch's rows in the report those of the loader's batches come first"
    read,more = rows[:n_batches],rows[n_batches:]
    assert rows.seen.sum()==132
    assert rows.step.tolist()==list(range(len(rows)))
    assert read.scored.all()
    assert (more.seen==0).all()
    are_looked_at = [(i+1)%k==0 or i==n_batches-1 for i in range(n_batches)]
    assert (read.kept>0).tolist()==are_looked_at
    assert read.full_loss[are_looked_at].notna().all()

@pytest.mark.parametrize('k', [2, 3])
def test_selective_backprop_of_several_batches(k):
    "Each item that is chosen trains once, in its turn and its epoch"
    choices = []
    def note(batch, scores, losses, got): choices.append((batch.xb[0][got.rows], batch.xb[0]))
    cb = watch_choices(SelectiveBackpropCallback(beta=1, warmup=0, seed=0), note)
    cb.method.presample = k
    learn,epochs = follow(cb)

    in_turn = iter(choices)
    for batches,steps in epochs:
        n_looks = -(-len(batches)//k)
        own = [next(in_turn) for _ in range(n_looks)]
        chosen,trained = torch.cat([x for x,_ in own]),torch.cat(steps)
        assert torch.equal(trained[:len(chosen)], chosen)

        more,last_pool = trained[len(chosen):],own[-1][1]
        assert len(keys(more))==len(more)<16
        assert keys(more)<=keys(last_pool)
        assert not keys(more) & keys(chosen)
    assert next(in_turn, None) is None

def test_weighted_items_of_several_batches_are_scored_together():
    class Weighs(BatchMethod):
        weighs,presample = True,2
        def choose(self, scores, now):
            half = len(scores)//2
            return Chosen(torch.arange(half), torch.full((half,), 2.))
    cb = BatchSelection(Weighs(gather=True), warmup=0)
    stats = quiet_fit(table_learner(n=32+336, drop_last=True, cbs=cb), 1).selection.stats
    assert stats.trained.sum()==stats.kept.sum()==336//2
    assert stats[stats.trained>0].trained.tolist()==[16]*10+[8] # not filled up

def test_what_presample_and_passes_refuse():
    for k,v in dict(scale_factor=.5, precision='bf16', scorer=nn.Linear(1, 1)).items():
        with pytest.raises(ValueError, match='passes: got 1, so that there is no scoring pass'):
            TopLossCallback(passes=1, **{k: v})
    for bad in 3,'auto':
        with pytest.raises(ValueError, match=f'passes: got {bad!r}, wanted 1 or 2'): TopLossCallback(passes=bad)

    with pytest.raises(TypeError, match="unknown option 'presample'"):
        TopLossCallback(presample=2, gather=True)
    with pytest.raises(ValueError, match='presample: got 0'): ImportanceSamplingCallback(presample=0)
    with pytest.raises(ValueError, match='passes: got 1 with ImportanceSampling'):
        ImportanceSamplingCallback(passes=1)

# before each pull it is asked whether that batch is chosen from
class InBetween:
    "By hand, with the hardest quarter of each look: some batches train as they are, and what waits goes on waiting"
    def __init__(self, presample):
        self.presample = presample
        self.steps = []
        self.look,self.waiting = [],torch.zeros(0, 4) # batches to be looked at together, and items that are chosen
        self.last = None # the pool that was chosen from last, unless another batch has trained since

    def choose(self):
        self.last = together(self.look)
        self.look = []
        self.waiting = torch.cat([self.waiting, hardest(self.last, len(self.last[0])//4)])
    def train_whole(self, batch):
        if self.look: self.choose() # those that had come are chosen from
        self.steps.append(batch[0])
        self.last = None
    def read(self, batch):
        self.look.append(batch)
        if len(self.look)==self.presample: self.choose()
        self.train_full_ones()
    def train_full_ones(self):
        while len(self.waiting)>=16:
            self.steps.append(self.waiting[:16])
            self.waiting = self.waiting[16:]
    def end(self):
        if self.look: self.choose()
        self.train_full_ones()
        if not len(self.waiting): return
        step = [self.waiting]
        if self.last: # they are filled up, if the last batch was chosen from
            step.append(next_hardest(self.last, len(self.last[0])//4, 16-len(self.waiting)))
        self.steps.append(torch.cat(step))

@pytest.mark.parametrize('presample', [1, 2])
@pytest.mark.parametrize('interrupt', [2, 3, 5])
def test_a_batch_in_between_trains_as_it_is(interrupt, presample):
    "What waits goes on waiting for the next one that is chosen from, or for the epoch's end"
    cb = pooled(presample, TopLossCallback(keep=.25, warmup=0, gather=True, interrupt=interrupt))
    learn,epochs = follow(cb, n=32+176)
    for batches,steps in epochs:
        wanted = InBetween(presample)
        for i,batch in enumerate(batches, 1):
            if i%interrupt==0: wanted.train_whole(batch)
            else: wanted.read(batch)
        wanted.end()
        assert_same_steps(steps, wanted.steps)

    stats = cb.stats
    whole = stats[(stats.seen>0) & ((stats.step+1)%interrupt==0)]
    assert not whole.scored.any()
    assert (whole.trained==16).all()
    assert (whole.kept==16).all()

def assert_same_steps(got, wanted):
    for a,b in zip(got, wanted, strict=True): assert torch.equal(a, b)

def test_the_window_is_asked_for_each_batch():
    "By the trained share that the loader has come to"
    cb = TopLossCallback(keep=.25, warmup=0, gather=True, start=.25, end=.75)
    learn,epochs = follow(cb, n=32+160, n_epoch=2)
    scored = cb.stats.query('seen>0').scored.tolist()
    assert scored==[.25<=i/20<.75 for i in range(20)]

    first,second = ([len(step) for step in steps] for _,steps in epochs)
    assert first==[16]*5+[16,16]
    assert second==[16]+[16]*5+[4] # 5 of 10 are looked at; 4 wait for the epoch's end

def test_the_gain_is_asked_for_each_batch():
    "Where it is too small for a batch, those that had come are chosen from, and that one trains as it is"
    turns = itertools.count()
    class Spy(ImportanceSampling):
        def look(self, scores): "It is told below"
        def is_on(self):
            self.tau_now = torch.tensor(0. if next(turns) in (0,5) else 9.)
            return super().is_on()
    cb = BatchSelection(Spy(tau=1., seed=0), warmup=0)
    learn,((batches,steps),) = follow(cb, n=32+160, n_epoch=1)
    stats = learn.selection.stats
    assert stats.query('seen>0').scored.tolist()==[i not in (0,5) for i in range(10)]
    assert len(steps)==6
    assert torch.equal(steps[0], batches[0][0])
    assert torch.equal(steps[2], batches[5][0])
    for step,pool in zip((1,3,4,5), ((1,2,3),(4,),(6,7,8),(9,)), strict=True):
        assert len(steps[step])==16
        assert keys(steps[step])<=keys(torch.cat([batches[i][0] for i in pool]))
    assert stats[stats.trained>0].seen.tolist()==[16,16,16,0,16,16] # a step more for what was drawn from batch 4

