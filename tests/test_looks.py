"The scoring pass: cheap looks, copies of the model, several batches at once, batches that are not chosen from"
import copy

import pytest, torch
from fastai.callback.core import Callback
from helpers import *
from selback.core.untouched import fixed_random
from torch.nn import functional as F

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

# another model looks
def test_a_proxy_scores_and_the_model_does_not():
    learn,proxy = image_learner(),Looks()
    learn.model = main = Looks()
    chosen = []
    class Spy(TopLossCallback):
        def choose_from(self, pool, batch, scores, losses):
            chosen.append((as_tensors(batch.xb)[0], as_tensors(batch.yb)[0], scores))
            return super().choose_from(pool, batch, scores, losses)
    learn._do_epoch_validate = lambda *args: None
    quiet_fit(learn.add_cb(Spy(.5, warmup=0, scorer=proxy)), 1)
    assert len(proxy.looks)>=4 and not main.looks
    for x,y,s in chosen: torch.testing.assert_close(s, F.cross_entropy(proxy.net(x), y, reduction='none').detach())

def test_errors_name_the_scorer():
    with pytest.raises(TypeError, match='scorer: got the class ModelCopy, wanted a module'): TopLossCallback(scorer=ModelCopy)
    with pytest.raises(ValueError, match='the scorer must take the inputs of the model'): quiet_fit(table_learner(cbs=TopLossCallback(scorer=nn.Linear(9, 3))), 1)
    for bad in dict(n_epoch=0),dict(lr=-1.):
        with pytest.raises(ValueError, match=f'{[*bad][0]}: got'): train_proxy(table_learner(), mlp(), **bad)

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

# copies
def copy_of(cb): return cb.scorer.scoring.scorer

@pytest.mark.parametrize('decay', [0., .5])
def test_a_copy_follows_the_model_every_k_steps(decay):
    class Follow(Callback):
        order,run_valid = 90,False
        def before_fit(self): self.average,self.n = None,0
        def before_batch(self):
            if self.average is None: self.average = weights(self.learn)
            copied = copy_of(self.learn.selection).model.state_dict()
            for k in [k for k,v in copied.items() if v.is_floating_point() and 'running' not in k]: torch.testing.assert_close(copied[k], self.average[k])
        def after_step(self):
            self.n += 1
            if self.n%3: return
            now = weights(self.learn)
            for k,v in self.average.items(): self.average[k] = decay*v+(1-decay)*now[k] if v.is_floating_point() else now[k]
    learn = quiet_fit(table_learner(cbs=[TopLossCallback(.5, warmup=0, scorer=ModelCopy(every=3, decay=decay)), Follow()]), 2)
    assert learn.follow.n>9

def learner_with(model, cb):
    learn = table_learner(cbs=cb)
    learn.model = model
    return learn

def test_a_copy_is_of_the_model_that_trains():
    copied,x = ModelCopy(every=1000),torch.randn(8, 4)
    first,second = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)),nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 3))
    for model in first,second,first:
        got,wanted = copied.of(model, (x,))(x),model(x)
        assert (got-wanted).abs().max()<.1*wanted.abs().max()
        for _ in range(1000): copied.step(model)
    copied.step(second) # not its model

def test_a_model_that_cannot_be_copied_is_named():
    model = mlp()
    model.extra = model[0].weight*2 # not a leaf
    with pytest.raises(ValueError, match="ModelCopy: the model can't be copied"): quiet_fit(learner_with(model, TopLossCallback(scorer=ModelCopy())), 1)

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
    copied = copy_of(resumed.selection).of(resumed.model).state_dict()
    assert same(copied, state['parts']['scoring']['model']) and not same(copied, trained)
    for learn in whole,resumed: # both go on, on the same batches
        set_seed(9)
        learn.dls.train.rng.seed(9)
        quiet_fit(learn, 1)
    assert same(weights(whole), weights(resumed)) and not same(trained, weights(resumed))

def test_a_stale_copy_begins_with_the_selection():
    copies = []
    class Notes(Callback):
        order,run_valid = 60,False
        def after_loss(self):
            cb = self.learn.selection
            if cb.is_chosen: copies.append((weights(copy_of(cb)), self.learn.before))
        def before_batch(self): self.learn.before = weights(self.learn)
    learn = table_learner(n=32+160, drop_last=True, cbs=TopLossCallback(.5, warmup=1, scorer=ModelCopy(every=1000)))
    quiet_fit(learn.add_cb(Notes()), 2)
    copied,first = copies[0]
    assert same(copied, first) and same(copies[-1][0], first) and not same(copies[-1][1], first)

def test_copies_check_what_they_get():
    for bad in dict(every=0),dict(decay=1.),dict(decay=-1):
        with pytest.raises(ValueError): ModelCopy(**bad)

# several batches in one look
class Batches(Callback):
    "Each batch of the loader, with what losses a look at it finds, ahead of the selection"
    order,run_valid = SelectionCallback.order-1,False
    def __init__(self): self.epochs = []
    def before_train(self): self.epochs.append([])
    def before_batch(self):
        if any(torch.equal(self.x, x) for x,*_ in self.epochs[-1]): return # a step after the last one
        with fixed_random(),torch.no_grad(): losses = F.cross_entropy(self.model.eval()(self.x), self.y, reduction='none')
        self.model.train()
        self.epochs[-1].append((self.x.clone(), self.y.clone(), losses))

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

@pytest.mark.parametrize('k', [2, 3, 99])
def test_batches_are_scored_together(k):
    "The hardest of `k` batches at once, and of as many as are there at an epoch's end; nothing waits between epochs"
    looks = []
    class Spy(TopLossCallback):
        def score(self, batch):
            scores,losses = super().score(batch)
            looks.append((batch, losses))
            return scores,losses
    learn,epochs = follow(Spy(keep=.25, warmup=0, gather=True, presample=k))
    pools = iter(looks)
    for batches,steps in epochs:
        wanted = []
        for i in range(0, len(batches), k):
            x,losses = (torch.cat([b[j] for b in batches[i:i+k]]) for j in (0,2))
            batch,found = next(pools)
            assert torch.equal(batch.xb[0], x) # each is scored once, with its neighbours
            torch.testing.assert_close(found, losses)
            hardest = losses.argsort(descending=True)
            wanted.append(x[hardest[:len(x)//4].sort().values])
        total = sum(map(len, wanted))
        if total%16: # the hardest others of the last look fill the last batch up
            wanted.append(x[hardest[len(x)//4:][:16-total%16].sort().values])
        wanted = torch.cat(wanted)
        assert torch.equal(torch.cat(steps), wanted) and [len(o) for o in steps[:-1]]==[16]*(len(steps)-1)
    assert next(pools, None) is None
    stats = learn.selection.stats
    for _,rows in stats.groupby('epoch'):
        n_loader = -(-132//16)
        assert rows.seen.sum()==132 and rows.scored[:n_loader].all() and rows.step.tolist()==list(range(len(rows))) and (rows.seen[n_loader:]==0).all()
        full = [(i+1)%k==0 or i==n_loader-1 for i in range(n_loader)]
        assert (rows.kept[:n_loader]>0).tolist()==full and rows.full_loss[:n_loader][full].notna().all()
    assert (stats.trained>0).sum()==len(learn.trained.epochs[0])+len(learn.trained.epochs[1])

@pytest.mark.parametrize('k', [2, 3])
def test_selective_backprop_of_several_batches(k):
    "Each item that is chosen trains once, in its turn and its epoch"
    chosen = []
    class Spy(SelectiveBackpropCallback):
        def choose_from(self, pool, batch, scores, losses):
            got = super().choose_from(pool, batch, scores, losses)
            chosen.append((batch.xb[0][got.rows], batch.xb[0]))
            return got
    learn,epochs = follow(Spy(beta=1, warmup=0, seed=0, presample=k))
    i = 0
    for batches,steps in epochs:
        n_looks = -(-len(batches)//k)
        kept = torch.cat([x for x,_ in chosen[i:i+n_looks]])
        trained,i = torch.cat(steps),i+n_looks
        assert torch.equal(trained[:len(kept)], kept)
        more = {x.numpy().tobytes() for x in trained[len(kept):]}
        assert len(more)==len(trained)-len(kept)<16 and more<={x.numpy().tobytes() for x in chosen[i-1][1]} and not more & {x.numpy().tobytes() for x in kept}
    assert i==len(chosen)

def test_weighted_items_of_several_batches_are_scored_together():
    class Weighs(SelectionCallback):
        def choose(self, scores): return Chosen(torch.arange(len(scores)//2), torch.full((len(scores)//2,), 2.))
    learn = quiet_fit(table_learner(n=32+336, drop_last=True, cbs=Weighs(warmup=0, gather=True, presample=2)), 1)
    stats = learn.selection.stats
    assert stats.trained.sum()==stats.kept.sum()==336//2 and stats[stats.trained>0].trained.tolist()==[16]*10+[8] # not filled up

def test_what_presample_and_passes_refuse():
    for k,v in dict(scale_factor=.5, precision='bf16', scorer=nn.Linear(1, 1)).items():
        with pytest.raises(ValueError, match='passes: got 1, so that there is no scoring pass'): TopLossCallback(passes=1, **{k: v})
    for bad in 3,'auto':
        with pytest.raises(ValueError, match=f'passes: got {bad!r}, wanted 1 or 2'): TopLossCallback(passes=bad)
    with pytest.raises(ValueError, match='presample: got 2 with passes=1.*wanted passes=2 and gather=True'): SelectiveBackpropCallback(passes=1, presample=2)
    with pytest.raises(ValueError, match='presample: got 2 with passes=2 and gather=False, wanted passes=2 and gather=True'): TopLossCallback(presample=2)
    with pytest.raises(ValueError, match='presample: got 0'): TopLossCallback(presample=0, gather=True)
    with pytest.raises(ValueError, match='passes: got 1, but importance sampling draws from several batches'): ImportanceSamplingCallback(passes=1)

# before each pull it is asked whether that batch is chosen from
@pytest.mark.parametrize('presample', [1, 2])
@pytest.mark.parametrize('interrupt', [2, 3, 5])
def test_a_batch_in_between_trains_as_it_is(interrupt, presample):
    "What waits goes on waiting for the next one that is chosen from, or for the epoch's end"
    learn,epochs = follow(TopLossCallback(keep=.25, warmup=0, gather=True, interrupt=interrupt, presample=presample), n=32+176)
    for batches,steps in epochs:
        wanted,pool,look,last = [],[],[],None
        def choose():
            x,losses = (torch.cat([o[j] for o in look]) for j in (0,2))
            order = losses.argsort(descending=True)
            pool.extend(x[order[:len(x)//4].sort().values])
            look.clear()
            return x,order[len(x)//4:]
        for i,b in enumerate(batches, 1):
            if i%interrupt==0:
                if look: choose() # those that had come are chosen from
                wanted.append(b[0])
                last = None
                continue
            look.append(b)
            if len(look)==presample: last = choose()
            while len(pool)>=16:
                wanted.append(torch.stack(pool[:16]))
                del pool[:16]
        if look: last = choose()
        while len(pool)>=16:
            wanted.append(torch.stack(pool[:16]))
            del pool[:16]
        if pool: # they are filled up, if the last batch was chosen from
            more = last[0][last[1][:16-len(pool)].sort().values] if last else torch.zeros(0, 4)
            wanted.append(torch.cat([torch.stack(pool), more]))
        assert len(steps)==len(wanted) and all(torch.equal(a, b) for a,b in zip(steps, wanted))
    stats = learn.selection.stats
    whole = stats[(stats.seen>0) & ((stats.step+1)%interrupt==0)]
    assert not whole.scored.any() and (whole.trained==16).all() and (whole.kept==16).all() and learn.selection.report.left==0

def test_the_window_is_asked_for_each_batch():
    "By the trained share that the loader has come to"
    learn,epochs = follow(TopLossCallback(keep=.25, warmup=0, gather=True, start=.25, end=.75), n=32+160, n_epoch=2)
    scored = learn.selection.stats.query('seen>0').scored.tolist()
    assert scored==[.25<=i/20<.75 for i in range(20)]
    first,second = (steps for _,steps in epochs)
    assert [len(o) for o in first]==[16]*5+[16,16] and [len(o) for o in second]==[16]+[16]*5+[4] # 5 of 10 are looked at; 4 wait for the epoch's end

def hardest(batch, n):
    "The `n` hardest items of a batch, in its order"
    x,_,losses = batch
    return x[losses.argsort(descending=True)[:n].sort().values]

def test_the_gain_is_asked_for_each_batch():
    "Where it is too small for a batch, those that had come are chosen from, and that one trains as it is"
    class Spy(ImportanceSamplingCallback):
        def note_gain(self, scores): "It is told below"
        def meet(self, batch):
            self.tau_now = torch.tensor(0. if self.iter in (0,5) else 9.)
            return super().meet(batch)
    learn,((batches,steps),) = follow(Spy(tau=1., warmup=0, seed=0), n=32+160, n_epoch=1)
    stats = learn.selection.stats
    assert stats.query('seen>0').scored.tolist()==[i not in (0,5) for i in range(10)]
    assert torch.equal(steps[0], batches[0][0]) and torch.equal(steps[2], batches[5][0])
    for step,pool in zip((1,3,4,5), ((1,2,3),(4,),(6,7,8),(9,)), strict=True):
        known = {x.numpy().tobytes() for i in pool for x in batches[i][0]}
        assert len(steps[step])==16 and all(x.numpy().tobytes() in known for x in steps[step])
    assert len(steps)==6 and stats[stats.trained>0].seen.tolist()==[16,16,16,0,16,16] # a step more for what was drawn from batch 4

def test_a_meter_that_stands_aside_is_asked_for_each_batch():
    class Spy(TopLossCallback):
        def meet(self, batch):
            self.meter.is_aside = self.iter in (2,3,6)
            return super().meet(batch)
    learn,((batches,steps),) = follow(Spy(keep=.25, warmup=0, gather=True), n=32+160, n_epoch=1)
    stats = learn.selection.stats
    assert stats.scored.tolist()==[i not in (2,3,6) for i in range(10)] and stats.trained.tolist()==[0,0,16,16,0,16,16,0,0,16]
    last = torch.cat([hardest(batches[i], 4) for i in (7,8,9)])
    more = batches[9][2].argsort(descending=True)[4:8].sort().values # they fill it up
    wanted = batches[2][0],batches[3][0],torch.cat([hardest(batches[i], 4) for i in (0,1,4,5)]),batches[6][0],torch.cat([last, batches[9][0][more]])
    assert all(torch.equal(a, b) for a,b in zip(steps, wanted, strict=True))

def test_a_resumed_copy_is_first_made_of_what_the_warm_up_trained():
    "As it is without the stop in between"
    def made(): return TopLossCallback(.5, auto=False, scorer=ModelCopy(every=10**6))
    learn = quiet_fit(table_learner(cbs=made()), 1)
    trained = {k: v.clone() for k,v in learn.model.state_dict().items()}
    then = table_learner(seed=9, cbs=made())
    then.model.load_state_dict(trained)
    then.selection.load_state_dict(learn.selection.state_dict())
    for o in learn,then:
        quiet_fit(o, 1)
        assert torch.equal(o.selection.scorer.scoring.scorer.model[0].weight, trained['0.weight'])
