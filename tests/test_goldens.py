"Training does what it did when `goldens.json.gz` was written; gathered training does what a loop in plain PyTorch does"
from fnmatch import fnmatch

import pytest, torch
from fastai.callback.schedule import combined_cos
from fastai.optimizer import SGD
from goldens import *
from selback.core.policies import History, cdf_power, top_k
from torch.nn import functional as F

# Deliberate changes: a pattern of case ids -> why, in a sentence, and the fields that it exempts
_order = 'A batch is scored when the loader hands it out, before it is announced.',['events']
_weights = ('The others of a batch train with weight 0, so that gradients are added up over more items, which rounds '
    'them otherwise: a hash of all weights is another one.',['weights'])
_eights = ('Counts are not rounded up to eight where that would keep all of a batch, as of the last one, of four.',
    ['kept','trained','rows','items','weights','size','loss_share','full_loss'])
EXCEPTIONS = {
    '*-gather': _order,
    'selective_backprop-*': _order,
    'stale_loss-*': _order,
    'importance_sampling-*': _order,
    '*-one_pass': _weights,
    **{f'{method}-bf16': _eights for method in ('batch_loss_filter','composer','top_loss','random_subset')}}
# And those of which only the last digits differ
ROUNDED = {'*-one_pass': ('For the same reason.', ['loss_share','full_loss','size'])}

def fields_of(exceptions, case_id):
    "The fields that exceptions name for a case"
    of_case = [fields for pattern,(_,fields) in exceptions.items() if fnmatch(case_id, pattern)]
    return {field for fields in of_case for field in fields}

# What of a case is compared
def rows_by_name(case): return [dict(zip(COLUMNS, row)) for row in case['rows']]

def not_yet_known(row, method):
    "The columns of a batch that depend on what trains after it"
    of_pool = {'kept','loss_share'} if method=='importance_sampling' else set() # once it is drawn from
    of_trained = set() if row['scored'] else {'loss_share','full_loss'} # where nothing else has a loss
    return {'trained',*of_pool,*of_trained}

def up_to_first_selecting_end(case):
    "The case up to the last batch of the first epoch that chooses, and what is known of that one before it trains"
    rows = rows_by_name(case)
    epoch = next((row['epoch'] for row in rows if row['step']>=0 and row['kept']!=row['seen']), None)
    if epoch is None: return case # nothing ever waits: batches are full, or all items were chosen before loading

    rows = [row for row in rows if row['seen']] # without steps that no loader batch belongs to
    last = max(row['step'] for row in rows if row['epoch']==epoch)
    n = next(n for n,row in enumerate(rows) if (row['epoch'], row['step'])==(epoch, last))
    later = not_yet_known(rows[n], case['method'])
    end = [None if name in later else value for name,value in rows[n].items()]

    steps = [step for step in case['steps'] if tuple(step[:2])<(epoch, last)]
    *_,weights,size = steps[-1]
    before = [list(row.values()) for row in rows[:n]]
    return dict(case, rows=[*before, end], steps=steps, weights=weights, size=size, events=case['events'][:epoch])

FREE = 'random_subset','random_before' # what they draw does not depend on losses

def first_choice(case):
    "The epoch before which nothing depends on losses"
    if case['method'] in FREE: return EPOCHS
    def chooses(row): return row['step']<0 or row['scored'] or row['kept']!=row['seen']
    return min((row['epoch'] for row in rows_by_name(case) if chooses(row)), default=EPOCHS)

def without_rounding(case):
    "What of a case does not depend on rounding: all epochs of some methods, of others those before the first choice"
    first = first_choice(case)
    rows = [row[:7] for row in case['rows'] if row[1]<first]
    steps = [step for step in case['steps'] if step[0]<first]
    return dict(rows=rows, batches=[step[:2] for step in steps], rates=[step[2] for step in steps],
        items=[step[3] for step in steps], events=case['events'][:first], text=case['text'], size=case['size'])

def fields(case):
    "What is compared of a case, by name"
    epochs,batches,rates,items,hashes,_ = zip(*case['steps'])
    return dict(zip(COLUMNS, zip(*case['rows'])), batches=tuple(zip(epochs, batches)), rates=rates, items=items,
        weights=[*hashes, case['weights']], size=case['size'], text=case['text'], events=tuple(case['events']))

def first_difference(a, b):
    "Number and values of the first entries that differ, or how many there are; numbers and texts as they are"
    if not isinstance(a, (tuple,list)): return a,b
    return next(((i,x,y) for i,(x,y) in enumerate(zip(a, b)) if x!=y), (len(a),len(b)))

def but_for_last_digits(values):
    "Numbers, some of them None, or one number, to compare with"
    if isinstance(values, tuple): return tuple(map(but_for_last_digits, values))
    return None if values is None else pytest.approx(values, rel=1e-5)

WRITTEN,GOLDENS = read()

def compare(written, now, alike=environment()==WRITTEN):
    "Compare what a process did in a case with what was written"
    if waits(now['method'], now['variant']): written,now = map(up_to_first_selecting_end, (written, now))
    a,b = fields(written),fields(now)
    if not alike: # losses differ in their last bits, and what is chosen by them may
        a,b = without_rounding(written),without_rounding(now)
        a['size'] = pytest.approx(a['size'], rel=1e-3)
        a['rates'] = pytest.approx(a['rates'], rel=1e-9)

    case_id = name_of(now['method'], now['variant'])
    spared,rounded = fields_of(EXCEPTIONS, case_id),fields_of(ROUNDED, case_id)
    if alike:
        for name in rounded: a[name] = but_for_last_digits(a[name])
    names = [name for name in a if name not in spared and a[name]!=b[name]]
    differ = {name: first_difference(a[name], b[name]) for name in names}
    assert not differ, f'what was written, and what happens: {differ}'

# Cases
@pytest.fixture(scope='module')
def on_ranks(): return run_on_ranks()

@pytest.mark.parametrize('method,variant', CASES, ids=lambda v: v)
def test_training_is_what_it_was(method, variant, request):
    name = name_of(method, variant)
    written = GOLDENS[name]
    now = request.getfixturevalue('on_ranks')[name] if variant=='ranks' else [run(method, variant)]
    assert len(written)==len(now)
    for pair in zip(written, now): compare(*pair)

def test_each_case_is_written(): assert set(GOLDENS)=={name_of(*case) for case in CASES}

def test_exceptions_are_of_cases_and_fields_that_are_there():
    case, = GOLDENS['top_loss-plain']
    assert len(case['events'])==EPOCHS
    for pattern,(reason,names) in [*EXCEPTIONS.items(), *ROUNDED.items()]:
        assert reason
        assert set(names)<={*fields(case), *without_rounding(case)}
        assert any(fnmatch(name, pattern) for name in GOLDENS), pattern

def changed(case, **kwargs): return json.loads(json.dumps(dict(case, **kwargs)))

def refuses(match): return pytest.raises(AssertionError, match=match)

def test_differences_are_noticed(monkeypatch):
    "Of gathering those up to the end of the epoch, and no others"
    for name,(epoch,end) in {'top_loss-plain': (3,9), 'selective_backprop-plain': (1,8)}.items():
        case, = GOLDENS[name]
        within = max(i for i,step in enumerate(case['steps']) if step[0]==epoch and step[1]<end)
        for field,other in ((2,.5), (3,[1,2]), (4,'other')):
            new = changed(case)
            new['steps'][within][field] = other
            with refuses('what was written'): compare(case, new, True)

        new = changed(case)
        row = next(row for row in new['rows'] if row[1]==epoch)
        row[4] += 1
        with refuses('kept'): compare(case, new, True)
        monkeypatch.setitem(EXCEPTIONS, f'{name[:5]}*', ('It keeps more.', ['kept']))
        compare(case, new, True)

    earlier_rows = [row for row in case['rows'] if row[1]<2]
    earlier_steps = [step for step in case['steps'] if step[:2]<[1,8]]
    new = changed(case, weights='other', rows=earlier_rows, steps=earlier_steps)
    new['rows'][-1][5] = 99
    compare(case, new, True)

def test_last_digits_are_all_that_one_pass_may_differ_in():
    case, = GOLDENS['top_loss-one_pass']
    def with_share(factor): return [[*row[:7], row[7]*factor, row[8]] for row in case['rows']]
    compare(case, changed(case, weights='other', size=case['size']*(1+2e-6), rows=with_share(1-2e-6)), True)
    step,*steps = case['steps']
    for field,kwargs in dict(size=dict(size=case['size']*1.001), loss_share=dict(rows=with_share(.999)),
            items=dict(steps=[[*step[:3], [1,2], *step[4:]], *steps])).items():
        with refuses(field): compare(case, changed(case, **kwargs), True)

@pytest.mark.parametrize('name,free',
    [('top_loss-plain', False), ('favor_hard-plain', False), ('random_subset-plain', True)])
def test_what_another_machine_compares(name, free):
    "Losses and what is chosen by them may differ there; what comes before a choice, and free draws, may not"
    case, = GOLDENS[name]
    steps,events = case['steps'],case['events']
    def other(**kwargs): return compare(case, changed(case, **kwargs), False)
    def with_items(step): return [*step[:3], [1,2], *step[4:]]
    def with_rate(step): return [*step[:2], .5, *step[3:]]

    rows = [[*row[:7], None, None] for row in case['rows']]
    other(weights='other', rows=rows, steps=[[*step[:4], 'other', 0.] for step in steps])
    later = [with_items(step) if step[0]==3 else step for step in steps]
    if not free: other(steps=later)
    else:
        with refuses('items'): other(steps=later)

    first,*more = steps
    for kwargs in (dict(steps=[with_items(first), *more]), dict(steps=[with_rate(first), *more]),
            dict(events=['other', *events[1:]]), dict(text='other')):
        with refuses('what was written'): other(**kwargs)

# Gathered training in plain PyTorch
class Plain(nn.Module):
    "Without BatchNorm and dropout"
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x): return self.net(x[:,:4])

def plain_learner(n, cbs=()): return numbered_learner(list(cbs), n, model=Plain, lr=.5, opt_func=SGD)

def hardest(keep): return lambda scores: top_k(scores, keep).rows

def by_cdf(beta, hist_size, seed):
    "The draws of selective backprop, of its own random numbers"
    history,gen = History(hist_size),torch.Generator().manual_seed(seed ^ 0x5e1bac)
    return lambda scores: cdf_power(scores, history.push(scores), beta, gen).rows

def top(): return TopLossCallback(.3, gather=True)

def backprop(): return SelectiveBackpropCallback(beta=1, hist_size=64, seed=3)

# The callback, the oracle's choice, and how many items: the last loader batch of 124 has more than a step lacks
GATHERED = dict(
    top_loss=(top, lambda: hardest(.3), N),
    top_loss_124=(top, lambda: hardest(.3), 124),
    selective_backprop=(backprop, lambda: by_cdf(1, 64, 3), N))

class Oracle:
    "Gathered training; a step is noted as epoch, loader batch read last, rate, items, topped up?"
    def __init__(self, choose, n):
        learn = plain_learner(n)
        self.choose,self.model,self.dl = choose,learn.model,learn.dls.train
        self.opt = torch.optim.SGD(self.model.parameters(), lr=.5)
        self.rate = combined_cos(.25, .5/25, .5, .5/1e5)
        self.steps = []
        self.warm_up()
        for epoch in range(1, EPOCHS): self.gather(epoch)

    def warm_up(self):
        for j,(x,y) in enumerate(self.dl): self.step(0, j, x, y)

    def step(self, epoch, j, x, y, topped_up=False):
        self.opt.param_groups[0]['lr'] = lr = self.rate((epoch+j/len(self.dl))/EPOCHS)
        self.opt.zero_grad()
        F.cross_entropy(self.model(x), y).backward()
        self.opt.step()
        self.steps.append((epoch, j, lr, numbers_of(x), topped_up))

    def scores(self, x, y):
        self.model.eval()
        with torch.no_grad(): scores = F.cross_entropy(self.model(x), y, reduction='none')
        self.model.train()
        return scores

    def gather(self, epoch):
        "An epoch; a step that was announced is made"
        wait_x,wait_y = torch.zeros(0, 5),torch.zeros(0, dtype=torch.int64)
        for j,(x,y) in enumerate(self.dl):
            scores = self.scores(x, y)
            rows = self.choose(scores)
            wait_x,wait_y = torch.cat([wait_x, x[rows]]),torch.cat([wait_y, y[rows]])
            is_announced = len(wait_x)<BS
            if is_announced: continue
            self.step(epoch, j, wait_x[:BS], wait_y[:BS])
            wait_x,wait_y = wait_x[BS:],wait_y[BS:]

        others = [i for i in scores.argsort(descending=True).tolist() if i not in rows.tolist()]
        while len(wait_x) or is_announced: # the loader is exhausted; its last batch fills up
            is_announced = False
            more = others[:max(0, BS-len(wait_x))]
            last_x,last_y = torch.cat([wait_x[:BS], x[more]]),torch.cat([wait_y[:BS], y[more]])
            self.step(epoch, j, last_x, last_y, topped_up=bool(more))
            wait_x,wait_y = wait_x[BS:],wait_y[BS:]

def as_noted(step):
    "What is topped up has no order"
    epoch,j,lr,items,topped_up = step
    return epoch,j,pytest.approx(lr),sorted(items) if topped_up else items

def noted(learn, steps):
    "The steps of a learner, to compare with those of the oracle"
    unordered = [topped_up for *_,topped_up in steps]+[False]*len(learn.notes.steps)
    return [(epoch, j, lr, sorted(items) if is_unordered else items)
        for (epoch,j,lr,items,*_),is_unordered in zip(learn.notes.steps, unordered)]

@pytest.mark.law(4)
@pytest.mark.parametrize('method', GATHERED)
def test_gathering_is_that_of_the_oracle(method):
    make,chooser,n = GATHERED[method]
    oracle = Oracle(chooser(), n)
    learn = trained(plain_learner(n, [make(), Notes()]))
    assert noted(learn, oracle.steps)==[as_noted(step) for step in oracle.steps]
    for ours,theirs in zip(learn.model.parameters(), oracle.model.parameters()):
        torch.testing.assert_close(ours.data, theirs.data, rtol=0, atol=1e-6)

@pytest.mark.parametrize('method', GATHERED)
def test_the_oracle_fills_its_batches(method):
    "An epoch's steps are full ones but for the last, which is topped up as far as the last loader batch goes"
    _,chooser,n = GATHERED[method]
    steps,last_batch = Oracle(chooser(), n).steps,math.ceil(n/BS)-1
    for epoch in range(1, EPOCHS):
        *full,(_,j,_,items,topped_up) = [step for step in steps if step[0]==epoch]
        assert full
        assert all(len(step[3])==BS and not step[4] for step in full)
        assert len(set(items))==len(items)<=BS
        assert len(items)==BS or j==last_batch
        if n==124: assert topped_up and len(items)==BS
        else: assert topped_up==(j==8)
