"The last layer, fitted anew by early losses: what goes into it, what comes out, when it stays, and what is left alone"
import copy, pickle, random, re
from functools import lru_cache

import numpy as np, pandas as pd, pytest, torch
from fastai.callback.hook import ActivationStats
from fastai.callback.progress import ProgressCallback
from fastai.callback.schedule import *
from fastai.learner import Learner
from fastai.losses import BCEWithLogitsLossFlat, MSELossFlat
from fastai.text.all import AWD_LSTM, TextDataLoaders, awd_lstm_clas_config, text_classifier_learner
from helpers import *
from torch.nn import functional as F
from torch.nn.utils import prune

def marked(n, share, g, wrong=0.):
    "Two classes, of which a mark tells strongly, for that share of the items, and eight numbers tell weakly, for all"
    y = torch.arange(n)%2
    agrees = torch.rand(n, generator=g)<share
    sign = 2.*y-1
    x = torch.cat([torch.where(agrees, 3*sign, -3*sign)[:,None], .6*sign[:,None]+torch.randn(n, 8, generator=g)], 1)
    is_wrong = torch.rand(n, generator=g)<wrong
    return x,torch.where(is_wrong, 1-y, y),agrees

def two_layers(n_out=2, n_in=9):
    return nn.Sequential(nn.Linear(n_in, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(.1), nn.Linear(16, n_out))

@lru_cache
def _misled(share, wrong, epochs, in_bf16):
    set_seed(0)
    g = torch.Generator().manual_seed(0)
    x,y,_ = marked(1600, share, g, wrong)
    test = marked(2000, .5, g)
    dls = dls_of(x, y, bs=16, n_valid=320)
    cbs = [CPUMixedPrecision(),ActivationStats()] if in_bf16 else []
    learn = learner_on(dls, two_layers(), lr=1e-2, cbs=cbs).watch_items(valid=True)
    return quiet_fit(learn, epochs),test

def misled(share=.98, wrong=0., epochs=5, in_bf16=False):
    "A learner that was watched, and a test in which the mark says nothing"
    return copy.deepcopy(_misled(share, wrong, epochs, in_bf16))

def wrong_of(learn, test):
    "The error where the mark misleads, and where it does not"
    x,y,agrees = test
    learn.model.eval()
    with torch.no_grad(): is_wrong = (learn.model(x).argmax(1)!=y).float()
    return float(is_wrong[~agrees].mean()),float(is_wrong[agrees].mean())

def refitted(learn, **kwargs):
    with learn.no_bar(): return learn.refit_head(**kwargs)

# What it is worth
def test_a_model_that_follows_a_mark_is_mended():
    learn,test = misled()
    before = wrong_of(learn, test)
    assert before[0]>.25>.05>before[1] # misled
    assert refitted(learn)
    after = wrong_of(learn, test)
    assert after[0]<.6*before[0]
    assert sum(after)<.8*sum(before)

def test_where_labels_are_wrong_and_nothing_misleads_the_layer_stays(capsys):
    learn,test = misled(share=.5, wrong=.2)
    before = weights(learn)
    assert not refitted(learn)
    assert same(weights(learn), before)
    said = capsys.readouterr().out
    assert 'many were hard, and no shortcut explains that' in said
    assert 'the last layer stays as it was trained. If you know of a shortcut' in said
    with pytest.raises(ValueError, match='restore_head: nothing to restore'): learn.restore_head()
    assert refitted(learn, strength=1) # the user's word
    assert not same(weights(learn), before)

def test_what_it_says_is_so(capsys):
    learn,_ = misled()
    early = learn.selection.early.loss
    valid = learn.selection.validation.early.loss
    x,y = learn.dls.valid.dataset.tensors
    hardest = valid.topk(len(valid)//10).indices
    def errors():
        learn.model.eval()
        with torch.no_grad(): is_wrong = (learn.model(x).argmax(1)!=y).float()
        return float(is_wrong.mean()),float(is_wrong[hardest].mean())
    before = errors()
    refitted(learn)
    after,said = errors(),capsys.readouterr().out
    assert f'half of the items had a loss below {float(early.median()):.2g} in epoch 1, and the mean was' in said
    assert f'error in validation {before[0]:.3f} before, {after[0]:.3f} after' in said
    assert f'of the tenth of it that was hardest early {before[1]:.3f} before, {after[1]:.3f} after' in said

# By hand
def by_adam(learn, strength):
    "The state of a last layer that Adam fits to the training items' features, weighed by early losses"
    x,y = learn.dls.train.dataset.tensors
    early = learn.selection.early.loss
    assert early.isfinite().all()
    learn.model.eval()
    with torch.no_grad(): features = learn.model[:-1](x).half().float()
    head,weight = copy.deepcopy(learn.model[-1]),early**strength
    opt = torch.optim.Adam(head.parameters(), .01)
    for _ in range(500):
        losses = F.cross_entropy(head(features), y, reduction='none')
        loss = (weight*losses).sum()/weight.sum()
        opt.zero_grad()
        loss.backward()
        opt.step()
    return head.state_dict()

def assert_close_to(head, state):
    for name,p in state.items(): torch.testing.assert_close(head.state_dict()[name], p, rtol=2e-3, atol=2e-3)

@pytest.mark.parametrize('strength', [None, 1, .5, 0])
def test_the_layer_is_the_one_that_adam_finds_on_the_features(strength):
    learn,_ = misled(share=.99)
    expected = by_adam(learn, 1 if strength is None else strength)
    refitted(learn, strength=strength)
    if strength is None: assert learn.selection.refitted
    assert_close_to(learn.model[-1], expected)

@pytest.mark.parametrize('kept,strength', [((.71,), 1), ((.69,.71), .5)])
def test_the_rule_takes_the_first_strength_that_keeps_the_order(kept, strength, monkeypatch, capsys):
    "Of 1 and .5"
    learn,_ = misled(share=.99)
    expected,orders = by_adam(learn, strength),iter(kept)
    monkeypatch.setattr('selback.clean.refit.order_kept', lambda *args: next(orders))
    assert refitted(learn)
    assert_close_to(learn.model[-1], expected)
    assert f'the last layer was replaced, strength={strength:g};' in capsys.readouterr().out

@pytest.mark.parametrize('orders', [(.2,.3),(float('nan'),)*2])
def test_the_layer_stays_where_no_strength_keeps_the_order(orders, monkeypatch, capsys):
    learn,_ = misled(share=.99)
    before,left = weights(learn),iter(orders)
    monkeypatch.setattr('selback.clean.refit.order_kept', lambda *args: next(left))
    assert not refitted(learn)
    assert same(weights(learn), before)
    said = capsys.readouterr().out
    assert f'in another order than the old one (correlation {orders[1]:.2f}; it is believed above 0.7).' in said
    assert re.search(r'error in validation 0\.\d+ before, 0\.\d+ with the new layer', said)

def test_an_item_without_an_early_loss_weighs_nothing():
    "What was never trained on, as it may be wrong, and whose label is another one since"
    learn,_ = misled(share=.99)
    others = [copy.deepcopy(learn) for _ in range(3)]
    others[0].selection.early.loss[:50] = float('nan')
    others[1].selection.early.loss[:50] = 0.
    y = others[2].dls.train.dataset.tensors[1]
    y[:50] = 1-y[:50]
    for o in others: refitted(o, strength=1)
    assert same(weights(others[0]), weights(others[1]))
    found = weights(others[2])
    for name,p in weights(others[0]).items(): torch.testing.assert_close(found[name], p, rtol=1e-3, atol=1e-3)

# What is left alone
def digest(learn):
    "All that a refit might touch beside the last layer, and the flags of that"
    flags = [(m.training, sorted(m._forward_hooks), sorted(m._forward_pre_hooks)) for m in learn.model.modules()]
    grads = [(p.requires_grad, None if p.grad is None else p.grad.clone()) for p in learn.model.parameters()]
    body = {name: o.clone() for name,o in learn.model.state_dict().items() if not name.startswith('4.')}
    random_states = torch.get_rng_state(),random.getstate(),str(np.random.get_state()),learn.dls.train.rng.getstate()
    return copy.deepcopy((flags, grads, body, learn.opt.state_dict(), random_states, [*map(type, learn.cbs)],
        learn.selection.state_dict(), learn.dls.train.dataset.tensors))

def test_nothing_but_the_layer_is_another_and_that_comes_back_bit_for_bit():
    learn,_ = misled()
    before,head = digest(learn),{name: o.clone() for name,o in learn.model[-1].state_dict().items()}
    parameters = [id(p) for p in learn.model.parameters()]
    assert refitted(learn)
    assert all(map(alike, digest(learn), before))
    assert not alike(dict(learn.model[-1].state_dict()), head)
    learn.restore_head()
    assert alike(dict(learn.model[-1].state_dict()), head)
    assert parameters==[id(p) for p in learn.model.parameters()]

class Stops(Callback):
    "Interrupts the first look, or the one with the new layer"
    order = 200
    def __init__(self, last): self.last = last
    def before_batch(self):
        is_new = not self.model[-1].weight.equal(self.trained)
        if is_new==self.last: raise KeyboardInterrupt

@pytest.mark.parametrize('last', [False, True])
def test_an_interrupt_leaves_it_all_as_it_was(last):
    learn,_ = misled()
    learn.add_cb(Stops(last)).remove_cb(ProgressCallback)
    learn.stops.trained = learn.model[-1].weight.detach().clone()
    before,head = digest(learn),{name: o.clone() for name,o in learn.model[-1].state_dict().items()}
    with pytest.raises(KeyboardInterrupt): learn.refit_head()
    assert all(map(alike, digest(learn), before))
    assert alike(dict(learn.model[-1].state_dict()), head)

def test_a_second_refit_begins_with_the_layer_as_it_was_trained():
    learn,_ = misled()
    trained = copy.deepcopy(learn.model[-1].state_dict())
    refitted(learn, strength=1)
    once = weights(learn)
    refitted(learn, strength=1)
    assert same(weights(learn), once)
    learn.restore_head()
    assert alike(dict(learn.model[-1].state_dict()), dict(trained))

def pickled(learn): return pickle.loads(pickle.dumps(learn))

@pytest.mark.parametrize('copied', [copy.deepcopy, pickled])
def test_a_copy_puts_its_own_layer_back(copied):
    learn,_ = misled()
    trained = weights(learn)
    refitted(learn, strength=1)
    other = copied(learn)
    other.restore_head()
    assert same(weights(other), trained)
    assert not same(weights(learn), trained)

def test_training_goes_on_with_the_new_layer():
    learn,_ = misled()
    refitted(learn, strength=1)
    new = learn.model[-1].weight.clone()
    quiet_fit(learn, 1, lr=0.)
    assert learn.model[-1].weight.equal(new)
    quiet_fit(learn, 1)
    assert not learn.model[-1].weight.equal(new)

# Kinds of models and data
def labels_learner():
    "Four labels for each item"
    set_seed(0)
    x = torch.randn(160, 9)
    y = (x[:,:4]+.3*torch.randn(160, 4)>0).float()
    learn = Learner(dls_of(x, y), two_layers(4), loss_func=BCEWithLogitsLossFlat(), lr=1e-2).watch_items()
    quiet_fit(learn, 3)
    learn.selection.early.loss = torch.rand(128)
    return learn

def test_several_labels(capsys):
    learn = labels_learner()
    x,y = learn.dls.valid.dataset.tensors
    learn.model.eval()
    with torch.no_grad(): before = float(((learn.model(x)>0)!=(y>.5)).float().mean())
    assert refitted(learn, strength=1)
    with torch.no_grad(): after = float(((learn.model(x)>0)!=(y>.5)).float().mean())
    assert f'error in validation {before:.3f} before, {after:.3f} after' in capsys.readouterr().out

def test_texts_of_other_lengths_keep_their_weights():
    "Loaders that sort by length read items in another order"
    set_seed(0)
    words = 'good bad dull fine long short film plot'.split()
    rng = random.Random(0)
    texts = [' '.join(rng.choices(words, k=rng.randint(3, 12))) for _ in range(60)]
    df = pd.DataFrame(dict(text=texts, label=['good' in o for o in texts]))
    dls = TextDataLoaders.from_df(df, text_col='text', label_col='label', valid_pct=.2, bs=8, seed=0)
    small = awd_lstm_clas_config | dict(emb_sz=8, n_hid=8, n_layers=1)
    learn = text_classifier_learner(dls, AWD_LSTM, pretrained=False, config=small).watch_items()
    quiet_fit(learn, 1)
    seen = features_of(learn, dls.train)
    assert seen.idx.tolist()==[*range(48)]
    assert seen.yb[0].tolist()==[int(y) for _,y in dls.train.dataset]
    learn.selection.early.loss = torch.rand(48)
    assert refitted(learn, strength=1)

def test_mixed_precision_and_callbacks_that_hook_the_model():
    learn,_ = misled(epochs=1, in_bf16=True)
    stats = len(learn.activation_stats.stats)
    assert refitted(learn, strength=1)
    assert learn.model[-1].weight.dtype==torch.float32
    assert len(learn.activation_stats.stats)==stats

class Deep(nn.Module):
    "Its last linear layer to run is not its last module, and a part of the output comes of another one"
    def __init__(self):
        super().__init__()
        self.out,self.body,self.aside = nn.Linear(8, 2),nn.Linear(9, 8),nn.Linear(8, 2)

    def forward(self, x):
        h = self.body(x).relu()
        self.told = self.aside(h)
        return self.out(h)

def test_the_layer_is_found_where_it_runs():
    learn = learner_on(dls_of(*marked(160, .9, torch.Generator().manual_seed(0))[:2]), Deep()).watch_items()
    quiet_fit(learn, 1)
    assert features_of(learn, learn.dls.valid).head is learn.model.out

class Turned(Callback):
    "Turns round what comes in, also where it validates"
    order = 200
    def before_batch(self): self.learn.xb = (-self.x,)

def test_augmentation_is_left_out():
    learn = quiet_fit(image_learner(n=80, cbs=WatchItemsCallback()), 2)
    learn.model.eval()
    with torch.no_grad(): features = learn.model[:-1](learn.dls.train.dataset.images)
    torch.testing.assert_close(features_of(learn, learn.dls.train).x, features, rtol=2e-3, atol=2e-3)

def test_a_callback_that_changes_batches_is_heard():
    learn = quiet_fit(plain(cbs=[Turned()]).watch_items(), 2)
    learn.selection.early.loss = torch.rand(128)
    x,_ = learn.dls.train.dataset.tensors
    learn.model.eval()
    with torch.no_grad(): features = learn.model[:-1](-x)
    torch.testing.assert_close(features_of(learn, learn.dls.train).x, features, rtol=2e-3, atol=2e-3)
    assert learn.refit_head(strength=1)

class Tied(nn.Module):
    "Its last layer is also its second one"
    def __init__(self):
        super().__init__()
        self.first,self.out,self.last = nn.Linear(9, 2),nn.Linear(2, 2),nn.Linear(2, 2)
        self.last.weight = self.out.weight

    def forward(self, x): return self.last(self.out(self.first(x)))

class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first,self.out = nn.Linear(9, 2),nn.Linear(2, 2)

    def forward(self, x): return self.out(self.out(self.first(x)))

shared = (Tied, 'a last layer that shares its weights'),(Twice, 'a layer that runs twice')

@pytest.mark.parametrize('model,said', shared)
def test_a_layer_that_is_used_elsewhere_is_refused_and_stays(model, said):
    learn = watched_learner(model())
    before = weights(learn)
    with pytest.raises(ValueError, match=said): refitted(learn, strength=1)
    assert same(weights(learn), before)

@pytest.mark.parametrize('changed', ['trained','by hand','another model'])
def test_a_layer_that_was_changed_since_is_neither_put_back_nor_begun_with(changed):
    learn,_ = misled(share=.5, wrong=.2)
    refitted(learn, strength=1)
    if changed=='another model': learn.model = copy.deepcopy(learn.model)
    if changed=='trained': quiet_fit(learn, 1)
    else:
        with torch.no_grad(): learn.model[-1].weight += .5
    before = weights(learn)
    with pytest.raises(ValueError, match='nothing to restore'): learn.restore_head()
    assert not refitted(learn)
    assert same(weights(learn), before)

# What is refused
def plain(model=None, y=None, loss_func=None, cbs=None, **kwargs):
    x,own,_ = marked(160, .9, torch.Generator().manual_seed(0))
    return learner_on(dls_of(x, own if y is None else y, **kwargs), model or two_layers(), loss_func, cbs=cbs)

def watched_learner(*args, **kwargs):
    learn = quiet_fit(plain(*args, **kwargs).watch_items(), 1)
    learn.selection.early.loss = torch.rand(128)
    return learn

def no_early():
    return quiet_fit(plain().watch_items(), 1)

def without_validation():
    learn = watched_learner()
    learn.dls.loaders = learn.dls.loaders[:1]
    return learn

def half_early():
    learn = watched_learner()
    learn.selection.early.loss[60:] = torch.nan
    return learn

def zero_early():
    learn = watched_learner()
    learn.selection.early.loss.zero_()
    return learn

def regression():
    return watched_learner(two_layers(1), torch.randn(160, 1), MSELossFlat())

def another_set():
    learn = watched_learner()
    learn.dls = dls_of(*marked(200, .9, torch.Generator().manual_seed(1))[:2])
    return learn

@pytest.mark.parametrize('make,kwargs,said', [
    (no_early, {}, 'got no early losses yet: no epoch trained the whole network'),
    (half_early, dict(strength=1), 'got early losses of less than half of the items'),
    (zero_early, {}, 'got a new layer that is NaN'),
    (without_validation, dict(strength=1), 'got no validation items, by which its rule goes, wanted some'),
    (regression, {}, 'got targets that are no labels'),
    (another_set, {}, 'got a training set of 168 items'),
    (watched_learner, dict(strength=2), 'strength: got 2'),
    (watched_learner, dict(head=nn.Linear(2, 2)), 'bias=True), whose output is not what the model predicts'),
    (lambda: watched_learner(nn.Sequential(two_layers(), nn.LogSoftmax(1)), loss_func=nn.NLLLoss()), {},
        'got no linear layer whose output is what the model predicts')])
def test_what_can_not_be_refitted_is_refused(make, kwargs, said):
    learn = make()
    with pytest.raises(ValueError, match=re.escape(said)): refitted(learn, **kwargs)

# Early losses of a training that is watched
def tells(losses, steps, share_done):
    "Has the hardest twentieth more than .35 of the loss? Or have 75 steps taught something, or been half of a fit?"
    losses = sorted(losses)
    n = len(losses)
    if sum(losses[n-round(n/20):])>.35*sum(losses): return True
    return steps>=75 and (losses[(n-1)//2]<.8*sum(losses)/n or share_done>=.5)

@pytest.mark.parametrize('bs,lr,first', [(4,.3,None), (4,0.,3), (16,.05,4), (16,1.,None)])
def test_watching_keeps_the_losses_of_the_first_epoch_that_tells(bs, lr, first):
    "Of 300 items, in six epochs"
    learn = numbered_learner(n=332, bs=bs, cbs=[WatchItemsCallback(), Diary()])
    trained_only(learn, 6, lr=lr)
    steps,told = -(-300//bs),[]
    for i,epoch in enumerate(learn.diary.epochs):
        losses = [loss for _,_,batch in epoch for loss in batch]
        told.append(tells(losses, steps*(i+1), (i+1)/6))
    found = told.index(True)
    assert first in (None, found+1)
    early = learn.selection.early
    of_epoch = torch.full((300,), torch.nan)
    for items,_,losses in learn.diary.epochs[found]: of_epoch[items] = torch.tensor(losses)
    torch.testing.assert_close(early.loss, of_epoch)
    assert early.epochs==found+1

def test_validation_keeps_those_of_the_same_epoch():
    learn,_ = misled()
    tracker = learn.selection.validation
    assert tracker.early.loss.isfinite().all()
    assert learn.selection.early.epochs==1
    assert not tracker.early.loss.equal(tracker.memory.loss)

def test_a_label_that_was_corrected_has_no_early_loss():
    learn,_ = misled(epochs=2)
    x,y = learn.dls.train.dataset.tensors
    y[:3] = 1-y[:3]
    quiet_fit(learn, 1)
    early = learn.selection.early
    assert early.loss.isnan().nonzero()[:,0].tolist()==[0,1,2]
    assert early.filled.isfinite().all()

def test_early_losses_are_saved_and_go_on_with_a_method():
    learn,_ = misled(epochs=2)
    state = copy.deepcopy(learn.selection.state_dict())
    other,_ = misled(epochs=2)
    other.selection.early.forget()
    other.selection.load_state_dict(state)
    assert other.selection.early.loss.equal(learn.selection.early.loss)
    learn.favor_hard()
    assert learn.selection.early.loss.equal(other.selection.early.loss)

@pytest.mark.parametrize('look', ['summary','validate'])
def test_a_look_at_the_model_is_no_fit(look):
    learn,_ = misled(epochs=2)
    before = [p.detach().clone() for p in learn.model.parameters()]
    learn.refit_head()
    with learn.no_bar(),learn.no_logging(): getattr(learn, look)()
    learn.restore_head()
    assert all(map(torch.equal, learn.model.parameters(), before))

@pytest.mark.parametrize('make', [torch.nn.utils.weight_norm, torch.nn.utils.parametrizations.weight_norm,
    torch.nn.utils.spectral_norm, lambda layer: prune.l1_unstructured(layer, 'weight', .5)])
def test_a_layer_whose_weight_is_made_of_others_is_refused(make):
    learn,_ = misled()
    learn.model[-1] = make(learn.model[-1])
    with pytest.raises(ValueError, match='whose weight is made of others, .* wanted a plain nn.Linear; take that off'):
        refitted(learn)
