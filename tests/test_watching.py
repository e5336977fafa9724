"What is remembered of each item against a diary that is kept apart, in plain Python"
import math
from collections import Counter, defaultdict
from copy import deepcopy
from functools import cache, partial
from statistics import fmean, pstdev

import pandas as pd, pytest
from fastai.callback.core import CancelBatchException
from fastai.callback.mixup import CutMix
from fastai.losses import FocalLossFlat
from helpers import *
from selback.core.untouched import fixed_random
from torch.nn import functional as F

N,CLASSES = 50,4 # training items; the last batch of 16 has 2

class Given:
    """How often each class was a label, and one more, times what it weighs in the loss; of yes or no how often it was
    predicted; it meets those of a batch before it is asked"""
    def __init__(self, weights=None): self.counts,self.meets,self.weights = Counter(),False,weights or {}

    def meet(self, label, times=1): self.counts[label] += self.meets*times

    def log(self, label): return math.log((1+self.counts[label])*self.weights.get(label, 1))

def share(own, other):
    "The difference of two probabilities by their sum, from their logarithms"
    return (math.exp(own-other)-1)/(math.exp(own-other)+1)

class Look(tuple):
    "It is known what it was a look at, and later what it weighs, and its margin by transitions"
    by_transitions = 0.
    place = 0 # of several labels, which one
    weight = balance = 1. # what it counts, and which share of that is the balanced margin's

    @property
    def margin(self):
        "The one that orders"
        balanced = self[1]
        return (1-self.balance)*self.by_transitions+self.balance*balanced

    @property
    def is_right(self): return self.logits[self.label]>=max(self.logits)

def share_of_the_commonest(counts):
    "Of a count of classes, or of yes and no for each of several labels"
    of_place = defaultdict(list)
    for key,times in counts.items(): of_place[key[0] if isinstance(key, tuple) else 0].append(times)
    return sum(map(max, of_place.values()))/sum(counts.values())

class Tables:
    "Which classes are given in whose place, and what an epoch tells, by the formula, over whole lists of looks"
    def __init__(self):
        self.past = [] # of each epoch its looks, what they were taken for, their weight, and how many an item had
        self.epoch = [] # what each step of this one has shown
        self.valid = None # share that validation predicted rightly, after the epoch before

    @property
    def looks(self): return [look for step in self.epoch for look in step]

    def taken_now(self):
        "How often each class was given where one is likelier; by the means of what was seen up to each step"
        taken,sure = Counter(),defaultdict(list)
        for look in self.past[-1][0] if self.past else []:
            if look.is_right: sure[look.place,look.label].append(look.chances[look.label])
        for step in self.epoch:
            for look in step:
                if look.is_right: sure[look.place,look.label].append(look.chances[look.label])
            least = {at: fmean(values) for at,values in sure.items()}
            for look in step:
                likely = {c: p for c,p in enumerate(look.chances) if p>=least.get((look.place, c), 1.)-1e-5}
                if likely: taken[look.place,look.label,max(likely, key=likely.get)] += 1
        return taken

    def offset(self, n):
        "By how much likelier the first of two classes is given in the second's place than the other way round"
        epochs = [(taken, weight, share) for _,taken,weight,share in self.past]
        last = self.past[-1][2] if self.past else .01
        epochs.append((self.taken_now(), last, len(self.looks)/n))
        total = sum(weight*share for _,weight,share in epochs) or 1.
        J = Counter()
        for taken,weight,_ in epochs:
            for key,times in taken.items(): J[key] += weight*times/total
        classes = range(self.n_classes)
        def chance(place, given, true):
            every = sum(J[place,c,k] for c in classes for k in classes)
            wrong = min(.5, max(.01, 1-sum(J[place,c,c] for c in classes)/every)) if every else .5
            even = 1-wrong if given==true else wrong/(self.n_classes-1)
            return (J[place,given,true]+20*even)/(sum(J[place,c,true] for c in classes)+20)
        @cache
        def offset(place, y, k):
            own,other = chance(place, y, y)/chance(place, y, k),chance(place, k, k)/chance(place, k, y)
            return (math.log(own)-math.log(other))/2
        return offset

    def note(self, looks, n):
        "A step"
        self.n_classes = len(looks[0].logits)
        offset = self.offset(n)
        for look in looks:
            at,y = look.logits,look.label
            other = max(z-offset(look.place, y, c) for c,z in enumerate(at) if c!=y)
            look.by_transitions = math.tanh((at[y]-other)/2)
        self.epoch.append(looks)

    def weigh(self, counts, valid=None):
        "What the looks of this epoch weigh, by how often classes were given; and how much validation predicted rightly"
        looks = self.looks
        if not looks: return .01,1.,valid
        common = share_of_the_commonest(counts)
        trained = fmean(look.is_right for look in looks)
        if valid is None:
            every = [look for before,*_ in self.past for look in before]+looks
            valid = trained-1.5*max(0., trained-fmean(look.is_right for look in every))
        mean = ((common if self.valid is None else self.valid)+valid)/2
        knows = min(1., max(0., (mean-common)/(1-common)))
        weight = (knows**2+.01)*math.exp(-6*max(0., trained-mean))
        return weight,max(.15, 1-3*knows),valid

    def end_epoch(self, counts, n, valid=None):
        if not self.epoch: return
        weight,balance,self.valid = self.weigh(counts, valid)
        for look in self.looks: look.weight,look.balance = weight,balance
        self.past.append((self.looks, self.taken_now(), weight, len(self.looks)/n))
        self.epoch = []

# One look, by hand: logit margin, balanced margin, probability of the label, and what was predicted in its place
# (-1: the label)
def of_item(logits, label, given):
    "By the odds of the labels, which a loss that weighs classes does not have"
    given.meet(label)
    own,others = logits[label],[logit for c,logit in enumerate(logits) if c!=label]
    likeliest = max(others)
    other = -1 if own>=likeliest else logits.index(likeliest)
    balanced = [logit-given.log(c) for c,logit in enumerate(logits)]
    rival = max(logit for c,logit in enumerate(balanced) if c!=label)
    look = Look((own-likeliest, share(balanced[label], rival), softmax(logits)[label], other))
    look.label,look.logits = label,[logit-math.log(given.weights.get(c, 1)) for c,logit in enumerate(logits)]
    look.chances = softmax(look.logits)
    return look

def softmax(logits):
    total = sum(math.exp(logit-max(logits)) for logit in logits)
    return [math.exp(logit-max(logits))/total for logit in logits]

def of_yes_or_no(logit, label, given, place=0):
    p = 1/(1+math.exp(-logit))
    given.meet((place, True), p)
    given.meet((place, False), 1-p)
    yes = logit-(given.log((place, True))-given.log((place, False)))/2 # odds by the root of those so far
    margin,balanced = (logit,yes) if label else (-logit,-yes)
    look = Look((margin, share(balanced, 0.), 1/(1+math.exp(-margin)), -1 if margin>=0 else int(not label)))
    look.label,look.logits,look.chances,look.place = int(label),[0.,logit],[1-p,p],place
    return look

def single(pred, y, given): return [of_item(pred, y, given)]

def steep(pred, y, given): return single([30*o for o in pred], y, given)

def counting(pred, y, given): return [of_item(pred, y, given) if y>=0 else None]

def in_a_column(pred, y, given): return single(pred, *y, given)

def of_chances(pred, y, given): return [of_item([math.log(p) for p in pred], y, given)]

def several(pred, y, given): return [of_yes_or_no(*o, given, place) for place,o in enumerate(zip(pred, y))]

def yes_or_no(pred, y, given): return several(pred, [y], given)

def logit(p): return math.log(p/(1-p))

def several_chances(pred, y, given): return several([logit(p) for p in pred], y, given)

# All looks at a label, by hand
def leader(others):
    "Boyer and Moore: votes for another one take away from the lead"
    leads,lead = -1,0
    for other in others:
        if lead==0: leads,lead = other,1
        else: lead += 1 if other==leads else -1
    return leads

def summed_up(looks):
    logit_margins,_,chances,others = zip(*looks)
    votes = [o for o in others if o>=0]
    weights = [look.weight for look in looks]
    margin = sum(look.weight*look.margin for look in looks)/sum(weights)
    return dict(looks=len(looks), margin=margin, logit_margin=fmean(logit_margins), probability=fmean(chances),
        spread=pstdev(chances), disagreed=len(votes), last_other=others[-1], most_other=leader(votes))

UNSEEN = dict(looks=0, margin=math.nan, logit_margin=math.nan, probability=math.nan, spread=math.nan, disagreed=0,
    last_other=-1, most_other=-1)

class ByHand(Callback):
    "Keeps what is predicted of each item that trains, over all fits, and weighs it by validation"
    order = 60

    def __init__(self, told=single, n_labels=1, weights=None):
        self.told,self.given = told,Given(weights)
        self.looks = [defaultdict(list) for _ in range(n_labels)] # of each label: told, by item
        self.repeated = set() # items with several rows in one step
        self.tables = Tables()
        self.is_right = [] # of each item of the validation

    @property
    def n_labels(self): return len(self.looks)*len(self.dls.train_ds)

    def before_train(self): self.end_epoch()

    def before_validate(self): self.is_right = []

    def after_validate(self): self.end_epoch(fmean(self.is_right) if self.is_right else None)

    def end_epoch(self, valid=None): self.tables.end_epoch(self.given.counts, self.n_labels, valid)

    def after_loss(self):
        if self.training: self.trained()
        elif self.tables.epoch: self.validated()

    def validated(self):
        for row in zip(self.pred.detach().float().tolist(), self.y.tolist()):
            self.is_right += [look.is_right for look in self.told(*row, self.given) if look is not None]

    def trained(self):
        items,pred,y = numbers(self.x),self.pred.detach().float().tolist(),self.y.tolist()
        self.repeated |= {i for i,times in Counter(items).items() if times>1}
        self.note_all([*zip(items, pred, y)])

    def note_all(self, rows):
        self.given.meets = True
        for _,*row in rows: self.told(*row, self.given)
        self.given.meets = False
        self.step = []
        for row in rows: self.note(*row)
        if self.step: self.tables.note(self.step, self.n_labels)

    def note(self, i, pred, y):
        for looks,told in zip(self.looks, self.told(pred, y, self.given), strict=True):
            if told is None: continue
            looks[i].append(told)
            self.step.append(told)

    def frame(self, n=N):
        "A row for each label, those of an item behind each other"
        weight,balance,_ = self.tables.weigh(self.given.counts)
        for look in self.tables.looks: look.weight,look.balance = weight,balance
        looks = [of_label[i] for i in range(n) for of_label in self.looks]
        return pd.DataFrame([summed_up(o) if o else UNSEEN for o in looks])

def agree(got, hand, n=N, means=('margin','logit_margin','probability')):
    """Sums of float32 agree to five digits; a deviation is a small difference of squares, and loses half of them. Of
    items with several rows in one step no look is the later one"""
    wanted,once = hand.frame(n),[i for i in range(n) if i not in hand.repeated]
    assert wanted.looks.sum()>0
    for name in ('looks','disagreed'): assert got[name].tolist()==wanted[name].tolist(), name
    for name in ('last_other','most_other'): assert got[name][once].tolist()==wanted[name][once].tolist(), name
    for name in means:
        assert got[name].tolist()==pytest.approx(wanted[name].tolist(), rel=1e-4, abs=1e-5, nan_ok=True), name
    assert got.spread.tolist()==pytest.approx(wanted.spread.tolist(), abs=1e-3, nan_ok=True)

def told_of(learn): return learn.selection.labels.frame()

def check(learn, hand, n=N): agree(told_of(learn), hand, n)

# What trains
class Shaped(nn.Module):
    "Predictions of any shape, from four of the columns"
    def __init__(self, shape, activation=None):
        super().__init__()
        self.net,self.shape,self.activation = mlp(math.prod(shape)),shape,activation

    def forward(self, x):
        out = self.net(x[:,:4]).view(-1, *self.shape)
        return self.activation(out) if self.activation else out

def table(y, n=N):
    "The last column is the item's number; the items of the validation are the first ones again"
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(1))
    x = torch.cat([x, torch.arange(n)[:,None]], 1)
    return torch.cat([x[:16], x]),torch.cat([y[:16], y])

def labels_by_chance(*shape, n=N, classes=CLASSES):
    return torch.randint(0, classes, (n,*shape), generator=torch.Generator().manual_seed(2))

def learner(y=None, shape=(CLASSES,), loss_func=None, activation=None, cbs=None, n=N, bs=16, **kwargs):
    set_seed(0)
    dls = dls_of(*table(labels_by_chance(n=n) if y is None else y, n), bs=bs, n_valid=16, **kwargs)
    loss_func = CrossEntropyLossFlat() if loss_func is None else loss_func
    return Learner(dls, Shaped(shape, activation), loss_func=loss_func, cbs=cbs, lr=.05)

def watched(hand=None, **kwargs):
    "A learner that is watched, and the diary"
    hand = hand or ByHand()
    return learner(cbs=hand, **kwargs).watch_items(),hand

# Each kind of labels
def some_ignored():
    y = labels_by_chance()
    y[::5] = -100
    return y

def has_labels(*shape): return labels_by_chance(*shape, classes=2).float()

def focal(pred, y):
    chances = pred.softmax(1)
    return ((1-chances)**2*-chances.log()).gather(1, y[:,None]).mean()

def log_of(pred, y): return -pred.gather(1, y[:,None]).log().mean()

WEIGHT = torch.tensor([.5,1.,2.,4.])
BY_CLASS = dict(enumerate(WEIGHT.tolist()))
MORE_IF_THERE = torch.tensor([1.,2.,3.])
SEVERAL = dict(y=partial(has_labels, 3), shape=(3,))

KINDS = dict( # how a learner is made, and what is told of its items by hand
    classes=(dict(), single),
    class_weights=(dict(loss_func=CrossEntropyLossFlat(weight=WEIGHT)), single, BY_CLASS),
    own_weights=(dict(loss_func=lambda pred, y: (WEIGHT[y]*F.cross_entropy(pred, y, reduction='none')).mean()), single,
        BY_CLASS),
    focal=(dict(loss_func=FocalLossFlat()), single),
    own_function=(dict(loss_func=focal), single),
    steep=(dict(loss_func=lambda pred, y: F.cross_entropy(30*pred, y)), steep),
    ignored=(dict(y=some_ignored, loss_func=CrossEntropyLossFlat(ignore_index=-100)), counting),
    column=(dict(y=partial(labels_by_chance, 1)), in_a_column),
    log_chances=(dict(loss_func=nn.NLLLoss(), activation=nn.LogSoftmax(1)), single),
    chances=(dict(loss_func=log_of, activation=nn.Softmax(1)), of_chances),
    several=(dict(SEVERAL, loss_func=BCEWithLogitsLossFlat()), several),
    several_by_module=(dict(SEVERAL, loss_func=nn.BCEWithLogitsLoss(pos_weight=MORE_IF_THERE)), several),
    several_chances=(dict(SEVERAL, loss_func=nn.BCELoss(), activation=nn.Sigmoid()), several_chances),
    yes_or_no=(dict(y=has_labels, shape=(1,), loss_func=BCEWithLogitsLossFlat()), yes_or_no))

@pytest.mark.parametrize('kind', KINDS)
def test_what_is_told_of_each_kind_of_labels(kind):
    options,told,*weights = KINDS[kind]
    if 'y' in options: options = options | dict(y=options['y']())
    learn,hand = watched(ByHand(told, 3 if kind.startswith('several') else 1, *weights), **options)
    quiet_fit(learn, 4)
    check(learn, hand)

# How it trains
def item_ce(pred, y): return F.cross_entropy(pred, y, reduction='none')

def root_of_mean(pred, y): return F.cross_entropy(pred, y).sqrt() # which mixes items

class Skips(Callback):
    "Leaves out every third batch, before its loss is known"
    run_valid = False

    def after_pred(self):
        if self.iter%3==1: raise CancelBatchException

TRAININGS = dict( # options of a learner, callbacks beside it, how it is trained
    two_fits=(dict(), [], lambda learn: quiet_fit(quiet_fit(learn, 2), 3)),
    fine_tune=(dict(), [], lambda learn: quiet_fit(learn, 2, 'fine_tune', freeze_epochs=2)),
    drop_last=(dict(drop_last=True), [], lambda learn: quiet_fit(learn, 4)),
    half_precision=(dict(), [CPUMixedPrecision], quiet_fit), # in whose numbers both sides are told
    skipped=(dict(), [Skips], lambda learn: quiet_fit(learn, 4)))

@pytest.mark.parametrize('training', TRAININGS)
def test_all_looks_are_remembered(training):
    options,others,train = TRAININGS[training]
    learn,hand = watched(**options)
    learn.add_cbs([make() for make in others])
    train(learn)
    check(learn, hand)
    assert (len(set(hand.frame().looks))>1)==(training in ('drop_last','skipped'))

def test_a_loss_of_items_is_asked_where_the_loss_mixes_them():
    hand = ByHand()
    learn = quiet_fit(learner(cbs=hand, loss_func=root_of_mean).watch_items(item_loss=item_ce), 3)
    check(learn, hand)

# With methods that leave items out
METHODS = dict(
    top_loss=lambda **kwargs: TopLossCallback(.5, warmup=1, **kwargs),
    gathered=lambda **kwargs: SelectiveBackpropCallback(beta=1, warmup=1, **kwargs),
    info_batch=lambda **kwargs: InfoBatchCallback(delta=1., prune=.7, **kwargs),
    importance=lambda **kwargs: ImportanceSamplingCallback(presample=2, tau=0, score='loss', warmup=0, **kwargs),
    prioritized=lambda **kwargs: PrioritizedSamplingCallback(alpha=2., uniform=.2, correct=1., warmup=0, **kwargs))

class ByGradient(ByHand):
    "Where the whole batch is in the loss, those train whose predictions have a gradient"
    def trained(self):
        self.rows = numbers(self.x),self.pred.detach().tolist(),self.y.tolist()
        self.pred.register_hook(self.keep)

    def keep(self, grad):
        self.note_all([row for trains,*row in zip(grad.abs().sum(1)>0, *self.rows) if trains])

def test_what_has_no_weight_in_one_pass_is_no_look():
    hand = ByGradient()
    learn = learner(cbs=[hand, TopLossCallback(.5, warmup=1, passes=1, track_items=True)])
    check(quiet_fit(learn, 4), hand)
    assert len(set(hand.frame().looks))>1

@pytest.mark.parametrize('method', METHODS)
def test_an_item_has_as_many_looks_as_rows_that_train(method):
    hand = ByHand()
    learn = learner(cbs=[hand, METHODS[method](track_items=True, seed=0)])
    check(quiet_fit(learn, 4), hand)
    assert len(set(hand.frame().looks))>1 # some train less
    assert bool(hand.repeated)==(method in ('importance','prioritized'))

def test_without_track_items_nothing_is_remembered_of_labels():
    selection = quiet_fit(learner(cbs=TopLossCallback(warmup=0))).selection
    assert selection.labels is None
    with pytest.raises(ValueError, match='remembers no predictions'): selection.suspects()

# Fits that end early, and go on
def test_a_saved_training_goes_on(tmp_path):
    "As the one that was saved did"
    def in_order():
        learn = learner(shuffle=False).watch_items()
        learn.path = tmp_path
        return learn
    def told_of_rest(learn):
        set_seed(1)
        return told_of(quiet_fit(learn, 4, start_epoch=2))
    learn,other = quiet_fit(in_order(), 2),in_order()
    learn.save('half', with_opt=True)
    state = learn.selection.state_dict()
    wanted = told_of_rest(learn)
    other.load('half', with_opt=True)
    other.selection.load_state_dict(state)
    pd.testing.assert_frame_equal(told_of_rest(other), wanted)
    assert wanted.looks.tolist()==[4]*N

class Stop(Callback):
    "Ctrl-C in the second epoch, once the loss of its second batch is known"
    run_valid = False

    def before_backward(self):
        if self.epoch==1 and self.iter==1: raise KeyboardInterrupt

def test_an_interrupted_fit_keeps_what_it_was_told():
    learn,hand = watched()
    with pytest.raises(KeyboardInterrupt),learn.no_bar(),learn.no_logging(): learn.fit(3, cbs=Stop())
    assert Counter(hand.frame().looks)=={1: N-32, 2: 32}
    check(learn, hand)
    quiet_fit(learn.remove_cbs(Stop), 2)
    check(learn, hand)

# Two processes
class Rows(ByHand):
    "Each look with its epoch, which no two processes have of the same item"
    def before_fit(self): self.epochs_before = getattr(self, 'epochs_before', 0)+getattr(self, 'n_done', 0)

    def note(self, i, pred, y):
        self.n_done = self.epoch+1
        self.looks[0][i].append((self.epochs_before+self.epoch, *self.told(pred, y, self.given)))

def train_both(out, rank):
    import distributed_run # noqa: F401 whose broadcast needs no GPU
    hand = Rows()
    learn = learner(cbs=hand, bs=10).watch_items()
    torch.manual_seed(rank)
    with learn.no_bar(),learn.no_logging(),learn.distrib_ctx(sync_bn=False):
        learn.fit(3)
        learn.fit(2)
    torch.save((dict(hand.looks[0]), learn.selection.labels.frame()), out/f'{rank}.pt')

@pytest.mark.slow
def test_two_processes_remember_what_both_were_told(tmp_path):
    on_two_ranks(partial(train_both, tmp_path), tmp_path)
    (mine,frame),(theirs,other_frame) = (torch.load(tmp_path/f'{rank}.pt', weights_only=False) for rank in range(2))
    pd.testing.assert_frame_equal(frame, other_frame)
    assert set(mine)&set(theirs) # both had the item, in other epochs

    both = ByHand()
    for i in range(N): both.looks[0][i] = [told for _,told in sorted(mine.get(i, [])+theirs.get(i, []))]
    agree(frame, both, means=('logit_margin','probability'))
    assert frame.looks.tolist()==[5]*N

# What has no labels
class Centred(nn.CrossEntropyLoss):
    "Its own centres are the classes; what the model predicts is an embedding"
    def __init__(self):
        super().__init__()
        self.centres = nn.Parameter(torch.randn(CLASSES, 6, generator=torch.Generator().manual_seed(3)))
    def forward(self, pred, y): return F.cross_entropy(pred@self.centres.T, y, reduction=self.reduction)

NO_LABELS = dict(
    masks=dict(y=labels_by_chance(3, 2), shape=(CLASSES,3,2), loss_func=CrossEntropyLossFlat(axis=1)),
    words=dict(y=labels_by_chance(6), shape=(6,CLASSES)),
    pixels=dict(y=has_labels(1, 3, 2), shape=(1,3,2), loss_func=BCEWithLogitsLossFlat()),
    numbers=dict(y=has_labels(1), shape=(1,), loss_func=MSELossFlat()), # which happen to be 0 or 1
    embeddings=dict(shape=(6,), loss_func=Centred()))

@pytest.mark.parametrize('kind', NO_LABELS)
def test_of_items_without_a_label_each_the_losses_are_remembered(kind):
    "The first suspects have the largest mean"
    selection = quiet_fit(learner(**NO_LABELS[kind]).watch_items(), 2).selection
    items,found = selection.items(),selection.suspects()
    assert selection.labels is None
    assert items.seen.tolist()==[2]*N
    mean = (items.total/items.seen).sort_values(ascending=False, kind='stable')
    assert found.index.tolist()==mean.index.tolist()
    assert found.mean_loss.tolist()==mean.tolist()
    with pytest.raises(ValueError, match='do not tell of classes'): selection.plot_items()

class Annealed(nn.Module):
    "A temperature that a callback changes"
    reduction,scale = 'mean',1.
    def forward(self, pred, y): return F.cross_entropy(self.scale*pred, y, reduction=self.reduction)

class Anneals(Callback):
    def before_epoch(self): self.learn.loss_func.scale = [8.,30.][self.epoch]

def test_a_scale_is_read_in_each_epoch():
    def told(pred, y, given): return single([learn.loss_func.scale*o for o in pred], y, given)
    learn,hand = watched(ByHand(told), loss_func=Annealed())
    quiet_fit(learn.add_cb(Anneals()), 2)
    check(learn, hand)

def test_a_loss_that_has_become_small_goes_on_with_labels():
    def own(pred, y): return F.binary_cross_entropy_with_logits(pred, y)
    learn = learner(labels_by_chance(1, classes=2).float(), (1,), own).watch_items()
    quiet_fit(learn, 1)
    with torch.no_grad():
        for p in learn.model.parameters(): p.zero_()
        [*learn.model.parameters()][-1].fill_(40.) # so that all losses of yes are 0
    learn.dls.train.dataset.tensors[1].fill_(1.)
    assert (told_of(quiet_fit(learn, 2)).looks>=2).all()

def test_a_class_without_weight_has_no_looks_whenever_it_comes():
    weight = torch.tensor([0.,1.,1.,1.])
    y = labels_by_chance().clamp(min=1)
    y[-3:] = 0 # in the last batch only
    def own(pred, y): return (weight[y]*F.cross_entropy(pred, y, reduction='none')).mean()
    learn = quiet_fit(learner(y, loss_func=own, shuffle=False).watch_items(), 2)
    assert told_of(learn).looks.tolist()==[0 if c==0 else 2 for c in y.tolist()]

def test_nothing_is_remembered_of_labels_that_are_mixed(capsys):
    learn = image_learner(cbs=CutMix(1.), n=36).watch_items()
    quiet_fit(quiet_fit(learn, 2), 1)
    assert capsys.readouterr().out.count('nothing is remembered of their labels')==1
    assert learn.selection.labels is None
    assert learn.selection.items().seen.tolist()==[3]*20
    quiet_fit(learn.remove_cb(CutMix), 2)
    assert learn.selection.labels.frame().looks.tolist()==[2]*20

# What changes between fits
OTHER_DATA = dict(
    fewer_classes=lambda: (learner(labels_by_chance(classes=3), (3,)), ByHand(), N),
    several_labels=lambda: (learner(has_labels(3), (3,), BCEWithLogitsLossFlat()), ByHand(several, 3), N),
    more_items=lambda: (learner(n=70), ByHand(), 70))

@pytest.mark.parametrize('kind', OTHER_DATA)
def test_other_labels_begin_anew(kind):
    learn = quiet_fit(learner().watch_items(), 2)
    other,hand,n = OTHER_DATA[kind]()
    learn.dls,learn.model,learn.loss_func = other.dls,other.model,other.loss_func
    learn.add_cb(hand).create_opt()
    check(quiet_fit(learn, 2), hand, n)

class Knows(nn.Module):
    "Predicts that each item is the class of its number"
    def __init__(self, n_classes):
        super().__init__()
        self.n_classes,self.scale = n_classes,nn.Parameter(torch.tensor(9.))
    def forward(self, x): return self.scale*F.one_hot(x[:,-1].long(), self.n_classes).float()

def test_thousands_of_classes_are_watched():
    y,wrong = torch.arange(N),[0,1,2]
    y[wrong] += 500
    learn = learner(y).watch_items()
    learn.model = Knows(1001)
    assert {*quiet_fit(learn, 2).selection.suspects().index[:3]}=={*wrong}

def test_another_loss_function_goes_on_with_the_labels(capsys):
    learn,hand = watched()
    quiet_fit(learn, 2)
    learn.loss_func = FocalLossFlat()
    quiet_fit(learn, 2)
    check(learn, hand)
    assert hand.frame().looks.tolist()==[4]*N
    assert 'the loss function is another one' in capsys.readouterr().out

# What it is for
def of_classes(shares, n=600):
    "Heaps of classes that have these shares"
    generator = torch.Generator().manual_seed(1)
    right = torch.multinomial(torch.tensor(shares), n, True, generator=generator)
    return 4*torch.eye(4)[right]+.5*torch.randn(n, 4, generator=generator),right

@pytest.mark.parametrize('n_with', [11, 0])
def test_a_rare_label_does_not_fill_the_first_rows(n_with):
    "Four labels tell of which heap an item is, and 16 of them are wrong; the few with a fifth are a heap of their own"
    n = 260
    x,right = of_classes([.25]*4, n)
    y = torch.cat([F.one_hot(right, CLASSES).float(), torch.zeros(n, 1)], 1)
    x[:n_with] -= 6
    y[:n_with,4] = 1
    wrong = torch.randperm(n*CLASSES, generator=torch.Generator().manual_seed(1))[:16]
    items,places = wrong//CLASSES,wrong%CLASSES
    y[items,places] = 1-y[items,places]
    set_seed(0)
    learn = Learner(dls_of(x, y, n_valid=0, bs=32), mlp(5), loss_func=BCEWithLogitsLossFlat(), lr=.02)
    labels = quiet_fit(learn.watch_items(), 8).selection.labels
    def n_found(order): return len({*order[:16].tolist()}&{*(5*items+places).tolist()})
    by_probability = n_found(labels.frame().probability.argsort(kind='stable'))
    assert n_found(labels.suspects())>=max(12, by_probability-1)

def found_of(x, y, right, n_valid=100):
    "The share of wrong labels among as many suspects, and among as many of the lowest probabilities"
    set_seed(0)
    learn = learner_on(dls_of(x, y, n_valid=n_valid, bs=32), mlp(4), lr=.02)
    labels,is_wrong = quiet_fit(learn.watch_items(), 8).selection.labels,(right!=y)[n_valid:]
    k = int(is_wrong.sum())
    def share(rows): return is_wrong[torch.as_tensor(rows[:k])].float().mean()
    return share(labels.suspects()),share(labels.frame().probability.argsort(kind='stable').tolist())

def test_a_rare_class_with_its_share_of_flips_is_not_swamped():
    x,right = of_classes([.4,.3,.27,.03])
    generator = torch.Generator().manual_seed(1)
    is_wrong = torch.rand(600, generator=generator)<.15
    other = (right+torch.randint(1, 4, (600,), generator=generator))%4
    assert found_of(x, torch.where(is_wrong, other, right), right)[0]>=.9

def test_a_class_that_is_filed_under_another_is_found():
    "By probability right labels of the class come before wrong ones of the other"
    x,right = of_classes([.25]*4)
    is_filed = (right==3) & (torch.rand(600, generator=torch.Generator().manual_seed(2))<.4)
    ours,by_probability = found_of(x, torch.where(is_filed, 0, right), right)
    assert ours>=.85>.65>=by_probability

# What an epoch tells
def without_validation(learn):
    learn._do_epoch_validate = lambda *args: None
    return learn

def test_without_validation_an_epoch_is_weighed_by_its_own_looks():
    learn,hand = watched()
    check(quiet_fit(without_validation(learn), 3), hand)
    check(quiet_fit(learn, 2), hand)
    assert len({look.weight for look in hand.looks[0][0]})>1

def test_a_validation_of_another_time_or_of_other_items_is_not_heard():
    class Others(Callback):
        "Validates once more, on what trains"
        run_valid = False
        def after_epoch(self):
            with fixed_random(): self.learn._do_epoch_validate(dl=self.dls.train.new(shuffle=False))
    learn,hand = watched()
    quiet_fit(learn, 3)
    margins = learn.selection.suspects().margin
    learn.validate()
    learn.get_preds()
    assert learn.selection.suspects().margin.tolist()==margins.tolist()
    other = quiet_fit(learner().watch_items().add_cb(Others()), 3)
    assert other.selection.suspects().margin.tolist()==margins.tolist()

def test_to_ask_in_between_changes_nothing():
    class Asks(Callback):
        run_valid = False
        def after_batch(self): self.learn.selection.labels.suspects()
        def after_train(self): self.learn.selection.state_dict()
    quiet,asked = (quiet_fit(learner(cbs=cbs).watch_items(), 3) for cbs in (None,Asks()))
    assert asked.selection.suspects().margin.tolist()==quiet.selection.suspects().margin.tolist()

def test_one_look_more_counts_three_times():
    "Of the network as it is now, of items as they are"
    learn,hand = watched()
    quiet_fit(learn, 3)
    before = learn.selection.suspects()
    def now():
        own = learn.selection.state_dict(),weights(learn),random_states(),learn.dls.train.rng.getstate()
        return deepcopy(own)
    state = now()
    with learn.no_bar(): found = learn.selection.suspects(look=True)
    assert alike(now(), state)
    assert learn.selection.suspects().equals(before)

    x,y = learn.dls.train.dataset.tensors
    learn.model.eval()
    with torch.no_grad(): pred = learn.model(x).tolist()
    given = hand.given
    for rows in torch.arange(N).split(16):
        hand.given = deepcopy(given)
        hand.note_all([(i, pred[i], int(y[i])) for i in rows.tolist()])
    counts = given.counts+Counter(y.tolist())
    weight,balance,_ = hand.tables.weigh(counts, hand.tables.valid)
    for look in hand.tables.looks: look.weight,look.balance = 3*weight,balance
    margins = [summed_up(hand.looks[0][i])['margin'] for i in range(N)]
    assert found.sort_index().margin.tolist()==pytest.approx(margins, rel=1e-4, abs=1e-5)
    assert (found.looks==4).all()

def test_a_look_that_tells_nothing_is_refused():
    learn = quiet_fit(learner().watch_items(), 1)
    with torch.no_grad(): learn.model.net[-1].bias[0] = math.nan
    with learn.no_bar(), pytest.raises(ValueError, match='got a look that tells of no label'):
        learn.selection.suspects(look=True)
    learn.model = Shaped((CLASSES+1,))
    with learn.no_bar(), pytest.raises(ValueError, match=f'a model of {CLASSES+1} classes, wanted the {CLASSES} that'):
        learn.selection.suspects(look=True)

# Another method
def test_a_method_goes_on_with_what_was_watched_of_validation_too(capsys):
    learn = quiet_fit(learner().watch_items(valid=True), 1)
    learn.favor_hard()
    assert 'goes on noting' in capsys.readouterr().out
    quiet_fit(learn, 1)
    assert learn.selection.labels.looks.tolist()==[2]*N
    assert learn.selection.validation.labels.looks.unique().tolist()==[2]

def test_losses_of_another_function_do_not_go_on(capsys):
    def item_loss(pred, y): return 100*F.cross_entropy(pred, y, reduction='none')
    learn = quiet_fit(learner().watch_items(item_loss=item_loss), 1)
    learn.favor_hard()
    assert 'what it remembered of items is gone' in capsys.readouterr().out
    assert learn.selection.memory is None
