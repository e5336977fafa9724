"Training does what it did when `goldens.json.gz` was written, step by step; gathered training by an oracle in plain PyTorch"
from fnmatch import fnmatch

import pytest, torch
from fastai.callback.schedule import combined_cos
from fastai.optimizer import SGD
from goldens import *
from selback.core.policies import History, cdf_power, top_k
from torch.nn import functional as F

# Deliberate changes: a pattern of case ids -> why, in a sentence, and the fields that it exempts
EXCEPTIONS = {}

def exempt(case_id): return {field for pattern,(_,fields) in EXCEPTIONS.items() if fnmatch(case_id, pattern) for field in fields}

def up_to_first_selecting_end(case):
    "The case up to the last loader batch of the first epoch whose batches are chosen from, and of that one what is known before it trains"
    rows = [dict(zip(COLUMNS, row)) for row in case['rows']]
    epoch = next((r['epoch'] for r in rows if r['step']>=0 and r['kept']!=r['seen']), None)
    if epoch is None: return case # nothing ever waits: batches are full, or all of their items were chosen before loading
    rows = [r for r in rows if r['seen']] # without steps that no loader batch belongs to
    last = max(r['step'] for r in rows if r['epoch']==epoch)
    rows = rows[:next(i for i,r in enumerate(rows) if (r['epoch'], r['step'])==(epoch, last))+1]
    end = rows[-1]
    later = {'trained'} if end['scored'] else {'trained','loss_share','full_loss'} # the loss of what trains, where nothing is scored
    if case['method']=='importance_sampling': later |= {'kept','loss_share'} # of a pool, once it is drawn from
    steps = [s for s in case['steps'] if tuple(s[:2])<(epoch, last)]
    return dict(case, rows=[list(r.values()) for r in rows[:-1]]+[[None if k in later else v for k,v in end.items()]], steps=steps,
        weights=steps[-1][4], size=steps[-1][5], events=case['events'][:epoch])

FREE = 'random_subset','random_before' # what they draw does not depend on losses

def without_rounding(case):
    "What of a case does not depend on rounding: all epochs of some methods, of others those before the first choice"
    rows = [dict(zip(COLUMNS, row)) for row in case['rows']]
    chosen = [row['epoch'] for row in rows if row['step']<0 or row['scored'] or row['kept']!=row['seen']]
    first = min(chosen, default=EPOCHS) if case['method'] not in FREE else EPOCHS
    steps = [step for step in case['steps'] if step[0]<first]
    return dict(rows=[row[:7] for row in case['rows'] if row[1]<first], batches=[step[:2] for step in steps], rates=[step[2] for step in steps],
        items=[step[3] for step in steps], events=case['events'][:first], text=case['text'], size=case['size'])

def fields(case):
    "What is compared of a case, by name"
    epochs,batches,rates,items,hashes,_ = zip(*case['steps'])
    return dict(zip(COLUMNS, zip(*case['rows'])), batches=tuple(zip(epochs, batches)), rates=rates, items=items,
        weights=[*hashes, case['weights']], size=case['size'], text=case['text'], events=tuple(case['events']))

WRITTEN,GOLDENS = read()

def compare(written, now, alike=environment()==WRITTEN):
    "Compare what a process did in a case with what was written"
    if waits(now['method'], now['variant']): written,now = map(up_to_first_selecting_end, (written, now))
    a,b = fields(written),fields(now)
    if not alike: # losses differ in their last bits, and what is chosen by them may
        a,b = without_rounding(written),without_rounding(now)
        a['size'] = pytest.approx(a['size'], rel=1e-3)
        a['rates'] = pytest.approx(a['rates'], rel=1e-9)
    spared = exempt(name_of(now['method'], now['variant']))
    differ = {name: first_difference(a[name], b[name]) for name in a if name not in spared and a[name]!=b[name]}
    assert not differ, f'what was written, and what happens: {differ}'

def first_difference(a, b):
    "Number and values of the first entries that differ, or how many there are; numbers and texts as they are"
    if not isinstance(a, (tuple,list)): return a,b
    return next(((i,x,y) for i,(x,y) in enumerate(zip(a, b)) if x!=y), (len(a),len(b)))

@pytest.fixture(scope='module')
def on_ranks(): return run_on_ranks()

@pytest.mark.parametrize('method,variant', CASES, ids=lambda v: v)
def test_training_is_what_it_was(method, variant, request):
    written,name = GOLDENS[name_of(method, variant)],name_of(method, variant)
    now = request.getfixturevalue('on_ranks')[name] if variant=='ranks' else [run(method, variant)]
    assert len(written)==len(now)
    for pair in zip(written, now): compare(*pair)

def test_each_case_is_written(): assert set(GOLDENS)=={name_of(*case) for case in CASES}

def test_exceptions_are_of_cases_and_fields_that_are_there():
    case, = GOLDENS['top_loss-plain']
    assert len(case['events'])==EPOCHS
    for pattern,(reason,names) in EXCEPTIONS.items():
        assert reason and set(names)<=set(fields(case)) and any(fnmatch(name, pattern) for name in GOLDENS), pattern

def changed(case, **kwargs): return json.loads(json.dumps(dict(case, **kwargs)))

def test_differences_are_noticed(monkeypatch):
    "Of gathering those up to the end of the epoch, and no others"
    for name,(epoch,end) in {'top_loss-plain': (3,9), 'selective_backprop-plain': (1,8)}.items():
        case, = GOLDENS[name]
        within = max(i for i,s in enumerate(case['steps']) if s[0]==epoch and s[1]<end)
        for at,other in ((2,.5), (3,[1,2]), (4,'other')):
            new = changed(case)
            new['steps'][within][at] = other
            with pytest.raises(AssertionError, match='what was written'): compare(case, new, True)
        new = changed(case)
        next(r for r in new['rows'] if r[1]==epoch)[4] += 1
        with pytest.raises(AssertionError, match='kept'): compare(case, new, True)
        monkeypatch.setitem(EXCEPTIONS, f'{name[:5]}*', ('It keeps more.', ['kept']))
        compare(case, new, True)
    new = changed(case, weights='other', rows=[r for r in case['rows'] if r[1]<2], steps=[s for s in case['steps'] if s[:2]<[1,8]])
    new['rows'][-1][5] = 99
    compare(case, new, True)

@pytest.mark.parametrize('name,free', [('top_loss-plain', False), ('favor_hard-plain', False), ('random_subset-plain', True)])
def test_what_another_machine_compares(name, free):
    "Losses and what is chosen by them may differ there; what comes before a choice, and free draws, may not"
    case, = GOLDENS[name]
    def other(**kwargs): return compare(case, changed(case, **kwargs), False)
    steps = case['steps']
    later = [[*s[:3], [1,2], *s[4:]] if s[0]==3 else s for s in steps]
    other(weights='other', rows=[[*row[:7], None, None] for row in case['rows']], steps=[[*s[:4], 'other', 0.] for s in steps])
    if free:
        with pytest.raises(AssertionError, match='items'): other(steps=later)
    else: other(steps=later)
    for kwargs in (dict(steps=[[*steps[0][:3], [1,2], *steps[0][4:]], *steps[1:]]), dict(steps=[[*steps[0][:2], .5, *steps[0][3:]], *steps[1:]]),
            dict(events=['other', *case['events'][1:]]), dict(text='other')):
        with pytest.raises(AssertionError, match='what was written'): other(**kwargs)

# gathered training in plain PyTorch
class Plain(nn.Module):
    "Without BatchNorm and dropout"
    def __init__(self): super().__init__(); self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    def forward(self, x): return self.net(x[:,:4])

def plain_learner(n, cbs=()): return numbered_learner(list(cbs), n, model=Plain, lr=.5, opt_func=SGD)

def hardest(keep): return lambda scores: top_k(scores, keep).rows

def by_cdf(beta, hist_size, seed):
    "The draws of selective backprop, of its own random numbers"
    history,gen = History(hist_size),torch.Generator().manual_seed(seed ^ 0x5e1bac)
    return lambda scores: cdf_power(scores, history.push(scores), beta, gen).rows

def top(): return TopLossCallback(.3, gather=True, auto=False)
def backprop(): return SelectiveBackpropCallback(beta=1, hist_size=64, auto=False, seed=3)

# The callback, the oracle's choice, and the items of the training set: the last loader batch of 124 has more items than a step lacks
GATHERED = dict(top_loss=(top, lambda: hardest(.3), N), top_loss_124=(top, lambda: hardest(.3), 124),
    selective_backprop=(backprop, lambda: by_cdf(1, 64, 3), N))

def gathered(choose, n):
    "The steps of gathered training after an epoch of warm-up, (epoch, loader batch read last, rate, items, topped up?), and the weights"
    learn = plain_learner(n)
    model,dl,rate,steps = learn.model,learn.dls.train,combined_cos(.25, .5/25, .5, .5/1e5),[]
    opt,n_iter = torch.optim.SGD(model.parameters(), lr=.5),len(learn.dls.train)
    def step(epoch, j, x, y, topped_up=False):
        opt.param_groups[0]['lr'] = lr = rate((epoch+j/n_iter)/EPOCHS)
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
        steps.append((epoch, j, lr, numbers_of(x), topped_up))
    for epoch in range(EPOCHS):
        wait_x,wait_y,announced = torch.zeros(0, 5),torch.zeros(0, dtype=torch.int64),False
        for j,(x,y) in enumerate(dl):
            if epoch==0:
                step(epoch, j, x, y)
                continue
            with torch.no_grad(): scores = F.cross_entropy(model.eval()(x), y, reduction='none')
            model.train()
            idx = choose(scores)
            wait_x,wait_y = torch.cat([wait_x, x[idx]]),torch.cat([wait_y, y[idx]])
            announced = len(wait_x)<BS
            if not announced:
                step(epoch, j, wait_x[:BS], wait_y[:BS])
                wait_x,wait_y = wait_x[BS:],wait_y[BS:]
        while len(wait_x) or announced: # the loader is exhausted; x, y, scores and idx are of its last batch; a step that was announced is made
            announced = False
            short = max(0, BS-len(wait_x))
            others = [i for i in scores.argsort(descending=True).tolist() if i not in idx.tolist()][:short]
            step(epoch, j, torch.cat([wait_x[:BS], x[others]]), torch.cat([wait_y[:BS], y[others]]), bool(others))
            wait_x,wait_y = wait_x[BS:],wait_y[BS:]
    return steps,list(model.parameters())

def as_noted(steps): return [(*s[:2], pytest.approx(s[2]), sorted(s[3]) if topped_up else s[3]) for *s,topped_up in steps]

def noted(learn, steps):
    "The steps of a learner, to compare with those of the oracle: what is topped up has no order"
    sort = [topped_up for *_,topped_up in steps]+[False]*len(learn.notes.steps)
    return [(epoch, j, lr, sorted(items) if s else items) for (epoch,j,lr,items,*_),s in zip(learn.notes.steps, sort)]

@pytest.mark.law(4)
@pytest.mark.parametrize('method', GATHERED)
def test_gathering_is_that_of_the_oracle(method):
    make,chooser,n = GATHERED[method]
    steps,weights = gathered(chooser(), n)
    learn = trained(plain_learner(n, [make(), Notes()]))
    assert noted(learn, steps)==as_noted(steps)
    for ours,theirs in zip(learn.model.parameters(), weights): torch.testing.assert_close(ours.data, theirs.data, rtol=0, atol=1e-6)

@pytest.mark.parametrize('method', GATHERED)
def test_the_oracle_fills_its_batches(method):
    "An epoch's steps are full ones but for the last, which is topped up as far as the last loader batch goes"
    _,chooser,n = GATHERED[method]
    steps,_ = gathered(chooser(), n)
    for epoch in range(1, EPOCHS):
        *full,(_,j,_,items,topped_up) = [s for s in steps if s[0]==epoch]
        assert full and all(len(s[3])==BS and not s[4] for s in full)
        assert len(set(items))==len(items)<=BS and (len(items)==BS or j==-(-n//BS)-1)
        assert topped_up and len(items)==BS if n==124 else topped_up==(j==8)
