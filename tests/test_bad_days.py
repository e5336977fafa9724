"Bad losses, odd batches, too little memory: training goes on with one warning, or an error says what to do"
import contextlib, math

import pytest, torch
from fastai.callback.core import Callback
from helpers import *
from selback.learner import ItemLoss
from selback.policies import top_k
from torch.nn import functional as F

def name_of(v): return v.__name__.removesuffix('Callback') if isinstance(v, type) else str(v)
every_method = pytest.mark.parametrize('cls', methods(), ids=name_of)

class Changed(nn.Module):
    "Cross-entropy whose unreduced losses are changed, those that train only in their mean"
    def __init__(self, change): super().__init__(); self.change,self.reduction,self.y_int = change,'mean',True
    def forward(self, pred, y):
        losses = F.cross_entropy(pred, y, reduction='none')
        return self.change(losses) if self.reduction=='none' else losses.mean()

def some(value): return lambda losses: torch.cat([losses[:1]*0+value, losses[1:]])
BAD = dict(nan=some(math.nan), inf=some(math.inf), all_nan=lambda l: l*math.nan, equal=lambda l: l*0+2, zero=lambda l: l*0, negative=lambda l: l-5, some_negative=lambda l: l-l.mean())

@pytest.mark.parametrize('kind', BAD)
@every_method
def test_any_loss_trains_on_with_one_warning(cls, kind):
    learn = table_learner(loss_func=Changed(BAD[kind]), cbs=cls(warmup=0, seed=1), n=256+32)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter('always')
        quiet_fit(learn, 3)
    stats,cb = learn.selection.stats.query('step>=0'),learn.selection
    assert (stats.groupby('epoch').trained.sum()>0).all() and all(torch.isfinite(p).all() for p in learn.model.parameters())
    said = [str(w.message) for w in seen if 'losses were' in str(w.message)]
    if not stats.scored.any() or kind in ('equal','zero'): assert not said # nothing was scored, or nothing is wrong
    elif 'negative' in kind: assert len(said)==1 and 'were negative' in said[0]
    else: assert len(said)<=3 and said and all('NaN or infinite' in o for o in said)
    if cls is TopLossCallback: assert (stats.kept==8).all()
    if cls is BatchLossFilterCallback: # all of an equal batch's 90 %; the whole batch where no share can be taken
        whole = kind in ('nan','inf','all_nan','zero','negative')
        assert kind=='some_negative' or (stats.kept==(16 if whole else 15)).all()

def test_a_bad_loss_trains_first():
    learn = table_learner(loss_func=Changed(some(math.nan)), n=256+32)
    chosen = []
    class Spy(TopLossCallback):
        def choose(self, scores):
            got = super().choose(scores)
            chosen.append((scores.isnan().nonzero()[:,0].tolist(), got.idx.tolist()))
            return got
    with pytest.warns(UserWarning, match='chosen first'): quiet_fit(learn.add_cb(Spy(.25, warmup=0)), 1)
    assert all(nan==[0] and 0 in idx for nan,idx in chosen)

@every_method
def test_batches_of_one(cls):
    set_seed(0)
    x,y = class_data(40)
    dls = DataLoaders(*[TfmdDL(TensorDataset(x, y), bs=1, shuffle=True, num_workers=0) for _ in range(2)])
    learn = quiet_fit(Learner(dls, nn.Linear(4, 3), loss_func=CrossEntropyLossFlat(), cbs=cls(warmup=0, seed=0)), 3)
    stats = learn.selection.stats.query('step>=0')
    assert (stats.trained<=1).all() and stats.trained.sum()>=20 and stats.kept.sum()==stats.trained.sum()+len(learn.selection.waiting)

@every_method
def test_no_training_set_is_as_in_fastai(cls):
    set_seed(0)
    x,y = class_data(32)
    dls = DataLoaders(TfmdDL([], bs=8, num_workers=0), TfmdDL(TensorDataset(x, y), bs=8, num_workers=0))
    dls.train._n_inp,dls.train._types = 1,None
    def learner(cbs=None): return Learner(dls, mlp(), loss_func=CrossEntropyLossFlat(), cbs=cbs)
    learn = learner(cls(**(dict(before_loading=True) if cls is RandomSubsetCallback else {})))
    quiet_fit(plain := learner(), 1)
    learn.model.load_state_dict(plain.model.state_dict())
    quiet_fit(learn, 2)
    assert same(weights(plain), weights(learn)) and plain.recorder.values[-1][1:2]==learn.recorder.values[-1][1:2]
    with learn.no_bar():
        assert len(learn.validate())==1 and len(learn.get_preds(dl=dls.valid)[0])==32

def test_fewer_items_than_a_batch_are_as_fastai_has_them():
    for cls in methods(): assert not quiet_fit(table_learner(n=40, drop_last=True, cbs=cls(warmup=0)), 2).selection.stats.trained.sum()

# too little memory
class Small(nn.Module):
    "Runs out of memory with more than `most` items in evaluation mode"
    def __init__(self, most): super().__init__(); self.net,self.most,self.sizes = mlp(),most,[]
    def forward(self, x):
        if not self.training:
            self.sizes.append(len(x))
            if len(x)>self.most: raise torch.cuda.OutOfMemoryError('CUDA out of memory')
        return self.net(x)

def test_a_scoring_pass_without_memory_takes_smaller_parts_once():
    scores,sizes = {},{}
    for most in (99, 5):
        learn = table_learner(cbs=TopLossCallback(.5, warmup=0))
        learn.model,seen = Small(most),[]
        learn.model.load_state_dict({'net.'+k: v for k,v in table_learner().model.state_dict().items()})
        choose = learn.selection.choose
        learn.selection.choose = lambda s: (seen.append(s), choose(s))[1]
        with (pytest.warns(UserWarning, match='ran out of memory with 16 items at a time') if most==5 else contextlib.nullcontext()) as warned:
            learn._do_epoch_validate = lambda *args: None # it has no smaller parts
            set_seed(3)
            quiet_fit(learn, 2)
        if warned: assert sum('out of memory' in str(w.message) for w in warned)==1
        scores[most],sizes[most] = torch.cat(seen),learn.model.sizes
    torch.testing.assert_close(scores[99], scores[5])
    assert sizes[5][:3]==[16,8,4] and set(sizes[5][3:])=={4} # never tried with more again

def test_no_memory_for_one_item_is_an_error():
    learn = table_learner(cbs=TopLossCallback(.5, warmup=0))
    learn.model = Small(0)
    with pytest.raises(torch.cuda.OutOfMemoryError),pytest.warns(UserWarning, match='ran out of memory'): quiet_fit(learn, 1)

def test_a_model_on_another_device_scores_there():
    class Elsewhere(nn.Module):
        "On the device 'meta', whose tensors have no values; it predicts zeros, which are on the CPU or stay there"
        def __init__(self, stay): super().__init__(); self.p,self.stay,self.devices = nn.Parameter(torch.zeros(1, device='meta')),stay,[]
        def forward(self, x): self.devices.append(x.device.type); return x.new_zeros(len(x), 3) if self.stay else torch.zeros(len(x), 3)
    x,y = torch.randn(8, 4),torch.randint(0, 3, (8,))
    proxy = Elsewhere(stay=False)
    scores = ReducibleLoss(proxy).of_batch(torch.ones(8), None, F.cross_entropy, (x,), (y,))
    assert proxy.devices==['meta'] and x.device.type=='cpu' # the batch went to the proxy, not the proxy to the batch
    torch.testing.assert_close(scores, torch.full((8,), 1-math.log(3)))
    with pytest.raises(NotImplementedError, match='meta'): ScoringPass()(Elsewhere(stay=True), (x,), (y,)) # predictions are brought back

# two selections, shapes
def test_two_selections_are_told_of_once(capsys):
    learn = table_learner(cbs=[TopLossCallback(.5, warmup=0), BatchLossFilterCallback(warmup=0)])
    quiet_fit(learn, 1)
    quiet_fit(learn, 1)
    assert capsys.readouterr().out.count('BatchLossFilterCallback was attached last and selects; TopLossCallback rests.')==1
    assert isinstance(learn.selection, BatchLossFilterCallback) and len(learn.cbs.filter(lambda cb: isinstance(cb, TopLossCallback))[0].stats)==0

def test_detection_lists_are_refused_before_training():
    class Boxes(Callback):
        order,run_valid = SelectionCallback.order-1,False
        def before_batch(self): self.learn.yb = (self.y,[torch.zeros(i%3+1, 4) for i in range(len(self.y))])
    for cls in methods():
        learn = table_learner(cbs=[Boxes(), cls(warmup=0)])
        with pytest.raises(ValueError, match='as detection has them'): quiet_fit(learn, 1)

@pytest.mark.parametrize('odd,error,match', [(lambda b: (*b, torch.zeros(3)), ValueError, 'got tensors of 16 and of 3 items'), (lambda b: (*b, ['a']*16), TypeError, 'got a str in the batch')])
@every_method
def test_batches_that_cannot_be_taken_apart_are_refused_before_training(cls, odd, error, match):
    class Odd(Callback):
        order,run_valid = SelectionCallback.order-1,False
        def before_batch(self): self.learn.xb = odd(self.xb)
    class Net(nn.Module):
        def __init__(self): super().__init__(); self.net = mlp()
        def forward(self, x, *rest): return self.net(x)
    learn = table_learner(cbs=[Odd(), cls()])
    learn.model = Net()
    before = weights(learn)
    with pytest.raises(error, match=match): quiet_fit(learn, 1)
    assert same(before, weights(learn))

# any loss
def one_number(pred, y): return F.cross_entropy(pred, y)
def in_a_loop(pred, y): return F.cross_entropy(pred, y)*(1 if pred.sum().item()<1e30 else 0)
def normalised(pred, y): return F.cross_entropy(pred, y)/pred.var()
def by_item(pred, y): return F.cross_entropy(pred, y, reduction='none')

@pytest.mark.parametrize('loss,way', [(one_number, 'vmap'), (in_a_loop, 'loop'), (CrossEntropyLossFlat(), 'reduction')])
def test_the_card_says_how_each_items_loss_was_found(loss, way, capsys):
    learn = quiet_fit(table_learner(loss_func=loss).top_loss(warmup=0), 2)
    told = capsys.readouterr().out
    words = dict(vmap='(vmap)', loop='(a loop)', reduction='unreduced losses')[way]
    assert words in learn.selection.card and learn.selection.loss_way==way
    assert told.count('has no unreduced losses')==(way!='reduction') and (way=='reduction' or words in told)

@every_method
def test_losses_that_mix_items_are_refused_before_training(cls):
    learn = table_learner(loss_func=normalised, cbs=cls())
    before = weights(learn)
    if cls is RandomSubsetCallback: return quiet_fit(learn, 2) and None # it asks for no losses
    with pytest.raises(ValueError, match='normalised gives no loss per item.*It mixes items.*item_loss='): quiet_fit(learn, 2)
    assert same(before, weights(learn)) and learn.selection.epochs_done==0

@every_method
def test_item_loss_says_what_each_item_is_worth(cls):
    learn = quiet_fit(table_learner(loss_func=normalised, cbs=cls(warmup=0, item_loss=by_item, seed=0)), 3)
    plain = quiet_fit(table_learner(loss_func=CrossEntropyLossFlat(), cbs=cls(warmup=0, seed=0)), 3)
    assert learn.selection.stats.trained.sum()>0
    if cls is not RandomSubsetCallback: assert 'your item_loss' in learn.selection.card
    assert learn.selection.stats.kept.iloc[0]==plain.selection.stats.kept.iloc[0] # the same scores before anything has trained

def test_item_losses_of_another_shape_are_refused():
    for wrong in (one_number, lambda p,y: torch.zeros(3), lambda p,y: 1.):
        with pytest.raises(ValueError, match='item_loss: .*wanted one number for each of 16 items'): quiet_fit(table_learner().top_loss(item_loss=wrong), 1)
    with pytest.raises(TypeError, match='item_loss: got 3, wanted a function'): table_learner().top_loss(item_loss=3)
    assert ItemLoss(by_item, CrossEntropyLossFlat(axis=2)).axis==2

def test_a_mixing_loss_that_the_first_batch_hides_is_refused_later():
    def hidden(pred, y): return pred.sum()*0+(1. if len(y)<2 or hidden.calls<3 else pred.var())
    hidden.calls = 0
    class Count(Callback):
        order,run_valid = -20,False
        def before_batch(self): hidden.calls += 1
    with pytest.raises(ValueError, match='It mixes items'): quiet_fit(table_learner(loss_func=hidden, cbs=[Count(), TopLossCallback(warmup=0)]), 1)

def test_a_model_may_have_layers_named_like_callbacks():
    class Net(nn.Module):
        def __init__(self): super().__init__(); self.net,self.rnn,self.mixed_precision,self.lr_finder,self.recorder,self.gradient_accumulation = mlp(),nn.Identity(),None,1,2,3
        def forward(self, x): return self.net(x)
    def trained(model):
        learn = table_learner(cbs=TopLossCallback(.4, warmup=0))
        learn.model = model
        model.load_state_dict({f'net.{k}' if isinstance(model, Net) else k: v for k,v in table_learner().model.state_dict().items()})
        set_seed(0)
        return quiet_fit(learn, 2)
    a,b = trained(mlp()),trained(Net())
    assert a.selection.stats.equals(b.selection.stats) and list(weights(a).values())[0].equal(list(weights(b).values())[0]) and (a.selection.stats.kept==6).any()

# sequences
def test_language_models_are_refused_before_training():
    from fastai.text.data import LMDataLoader
    texts = [torch.randint(0, 9, (40,)) for _ in range(8)]
    dls = DataLoaders(*[LMDataLoader(texts, bs=4, seq_len=5) for _ in range(2)])
    class LM(nn.Module):
        def __init__(self): super().__init__(); self.e,self.o = nn.Embedding(9, 4),nn.Linear(4, 9)
        def forward(self, x): return self.o(self.e(x))
    for cls in methods():
        learn = Learner(dls, LM(), loss_func=CrossEntropyLossFlat(), cbs=cls())
        before = weights(learn)
        with pytest.raises(TypeError, match='LMDataLoader, whose batches continue each other'): quiet_fit(learn, 1)
        assert same(before, weights(learn)) and len(learn.full_batches().cbs) and len(quiet_fit(learn, 1).recorder.values)==1

def test_padded_sequences_do_not_wait_for_each_other(capsys):
    import matrix
    learn = quiet_fit(matrix.text(cbs=SelectiveBackpropCallback(warmup=0)), 2)
    assert capsys.readouterr().out.count('gather=True stands aside')==1 and learn.selection.report.left==0 and learn.selection.gather
    quiet_fit(learn, 1)
    assert 'stands aside' not in capsys.readouterr().out
    with pytest.raises(TypeError, match='ImportanceSamplingCallback: got a training loader that pads sequences'): quiet_fit(matrix.text(cbs=ImportanceSamplingCallback()), 1)

def test_chosen_sequences_stay_sorted_by_length():
    import matrix
    class Ahead(Callback):
        order,run_valid = 20,False
        def before_batch(self):
            lengths = (self.x!=1).sum(1).tolist()
            assert lengths==sorted(lengths, reverse=True)
            self.learn.seen = True
    for cls in methods():
        if cls is ImportanceSamplingCallback: continue
        learn = quiet_fit(matrix.text(cbs=[cls(warmup=0), Ahead()]), 4)
        assert learn.seen

def test_gathered_items_of_other_shapes_are_refused():
    class Crop(Callback):
        order,run_valid = SelectionCallback.order-1,False
        def before_batch(self): self.learn.xb = (self.x[..., :12-self.iter%2],)
    with pytest.raises(ValueError, match='items that wait for a full batch need one shape'): quiet_fit(image_learner(n=80, cbs=[Crop(), SelectiveBackpropCallback(warmup=0)]), 2)
