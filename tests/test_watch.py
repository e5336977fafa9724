"What a loop of one's own watches: the items of each batch, and what is listed of them"
from collections import Counter
from pathlib import Path

import pandas as pd, pytest
from helpers import learner_on, on_two_ranks, quiet_fit
from loops import *
from selback.functional import Watch

from torch.utils.data import BatchSampler, IterableDataset, WeightedRandomSampler

N_CLASSES = 1+int(dataset().tensors[1].max())
CLASSES = [*'abcdefghij'][:N_CLASSES]
WRONG = [3,50,51,120] # items that get another label

def given():
    "Items with wrong labels"
    items = dataset()
    items.tensors[1][WRONG] = (items.tensors[1][WRONG]+1)%N_CLASSES
    return items

def accuracy_of(net):
    x,y = dataset(32).tensors
    with torch.no_grad(): return (net.eval()(x).argmax(1)==y).float().mean()

def ended(watch, net): watch.end_epoch(accuracy_of(net))

def watched(loader, n_epoch=3, net=None, end=ended, **kwargs):
    "A watch, after a training; its network, and the items that were noted, by epoch"
    watch,net = Watch(loader, **kwargs),net or network()
    opt,seen = torch.optim.SGD(net.parameters(), LR),[]
    for _ in range(n_epoch):
        seen.append([])
        for x,y in watch:
            pred = net.train()(x)
            F.cross_entropy(pred, y).backward()
            watch.note(pred, y)
            seen[-1] += numbers(x)
            opt.step()
            opt.zero_grad()
        end(watch, net)
    return watch,net,seen

def looks_of(watch): return Counter(watch.suspects().looks.to_dict())

# The same as in fastai
def test_a_loop_lists_what_a_learner_lists():
    dls = DataLoaders(TfmdDL(given(), bs=BS, num_workers=0), TfmdDL(dataset(32), bs=BS, num_workers=0))
    sgd = partial(OptimWrapper, opt=torch.optim.SGD)
    learn = learner_on(dls, network(), opt_func=sgd, lr=LR).watch_items()
    quiet_fit(learn, 3)
    watch,net,_ = watched(DataLoader(given(), BS))
    assert all(a.equal(b) for a,b in zip(net.parameters(), learn.model.parameters()))
    pd.testing.assert_frame_equal(watch.suspects(), learn.selection.suspects())
    assert watch.estimated_errors()==learn.selection.estimated_errors()>0

def test_watching_changes_nothing():
    def trained(loader):
        torch.manual_seed(5)
        net = network()
        opt = torch.optim.SGD(net.parameters(), LR)
        for _ in range(2):
            for x,y in loader:
                pred = net(x)
                F.cross_entropy(pred, y).backward()
                if isinstance(loader, Watch): loader.note(pred, y)
                opt.step()
                opt.zero_grad()
        return [*net.parameters(),torch.rand(3)] # the random state is the same, too

    def shuffled(**kwargs): return DataLoader(given(), BS, shuffle=True, **kwargs)
    for kwargs in dict(), dict(drop_last=True, generator=torch.Generator().manual_seed(0)):
        if 'generator' in kwargs: kwargs['generator'].manual_seed(0)
        plain = trained(shuffled(**kwargs))
        if 'generator' in kwargs: kwargs['generator'].manual_seed(0)
        assert all(a.equal(b) for a,b in zip(plain, trained(Watch(shuffled(**kwargs)))))

# Which items
def alternating(): return [*range(0, N, 2),*range(1, N, 2)]

LOADERS = dict(
    ragged=lambda: DataLoader(given(), BS, shuffle=True),
    dropped=lambda: DataLoader(given(), BS, shuffle=True, drop_last=True),
    sampler=lambda: DataLoader(given(), BS, sampler=alternating()),
    with_replacement=lambda: DataLoader(given(), BS, sampler=WeightedRandomSampler(torch.arange(1., N+1), N)),
    batch_sampler=lambda: DataLoader(given(), batch_sampler=BatchSampler(alternating(), 7, False)),
    one_by_one=lambda: DataLoader(given(), 1, sampler=range(20)),
    no_collation=lambda: DataLoader(given(), None, sampler=BatchSampler(alternating(), 7, False)))

@pytest.mark.parametrize('name', LOADERS)
def test_each_look_is_at_the_item_that_trained(name):
    watch,_,seen = watched(LOADERS[name](), net=nn.Sequential(network()) if name!='one_by_one' else LastLayer())
    assert looks_of(watch)==Counter(i for epoch in seen for i in epoch)
    x,y = given().tensors
    assert all(watch.suspects().label[i]==y[i] for i in {*seen[0]})

class LastLayer(nn.Linear):
    "Takes one item, which BatchNorm does not"
    def __init__(self): super().__init__(given().tensors[0].shape[1]-1, N_CLASSES)
    def forward(self, x): return super().forward(x[:,:-1])

@pytest.mark.slow
@pytest.mark.parametrize('persistent', [False,True])
def test_worker_processes_read_ahead_and_looks_stay_exact(persistent):
    loader = DataLoader(given(), BS, shuffle=True, num_workers=2, persistent_workers=persistent)
    for _ in loader: break # what it began before is of no matter
    watch,_,seen = watched(loader)
    assert looks_of(watch)==Counter(i for epoch in seen for i in epoch)

def test_what_is_not_noted_does_not_count():
    watch,net = Watch(DataLoader(given(), BS, shuffle=True)),network()
    seen = Counter()
    for _ in range(2):
        for i,(x,y) in enumerate(watch):
            if i%3==1: continue # a step that is left out
            watch.note(net(x), y)
            seen.update(numbers(x))
            if i==6: break
        watch.end_epoch()
    assert looks_of(watch)==seen

def test_an_epoch_that_nobody_ended_ends_before_the_next():
    said,_,_ = watched(DataLoader(given(), BS), end=lambda watch, net: watch.end_epoch())
    unsaid,_,_ = watched(DataLoader(given(), BS), end=lambda watch, net: None)
    pd.testing.assert_frame_equal(unsaid.suspects(), said.suspects())

def test_indices_that_come_with_a_batch_are_taken():
    items = TensorDataset(*given().tensors, torch.arange(N))
    loader = DataLoader(items, BS, shuffle=True)
    watch,net = Watch(N),network()
    for x,y,idx in loader: watch.note(net(x), y, idx)
    watch.end_epoch()
    assert looks_of(watch)==Counter(range(N))
    assert watch.suspects().label.sort_index().tolist()==given().tensors[1].tolist()

# What it tells
def test_keys_and_classes_name_items():
    items = given()
    items.tensors[1][1::2] = items.tensors[1][::2]
    keys = [Path(f'a/{i//2}.png') for i in range(N)] # each file is listed twice
    watch,*_ = watched(DataLoader(items, BS), keys=keys, classes=CLASSES)
    found = watch.suspects()
    assert len(found)==N//2 and {*found.looks}=={6}
    assert {*found.label}=={*CLASSES} and found.index.name=='key'
    assert found.label[keys[0].as_posix()]==CLASSES[items.tensors[1][0]]

def test_items_of_one_key_have_one_label():
    watch,*_ = watched(DataLoader(given(), BS), keys=[i//2 for i in range(N)])
    with pytest.raises(ValueError, match='keys: got 0 of items with the labels .* keys that tell items apart'):
        watch.suspects()

def test_a_person_corrects_by_key():
    watch,*_ = watched(DataLoader(given(), BS), classes=CLASSES)
    before = watch.corrected({})
    assert before.tolist()==[CLASSES[i] for i in given().tensors[1]]
    after = watch.corrected({3: 'a' if before[3]=='b' else 'b', 50: 'unsure'})
    assert after[3]!=before[3] and 50 not in after.index
    assert after.drop(3).equals(before.drop([3,50]))
    with pytest.raises(ValueError, match="got a label 'cow'"): watch.corrected({3: 'cow'})

def of_several(n=64):
    "Items of three labels each, of which one is wrong: the first item's first"
    torch.manual_seed(0)
    x = torch.randn(n, 6)
    y = (x[:,:3]>0).float()
    y[0,0] = 1-y[0,0]
    return TensorDataset(x, y)

def test_each_of_several_labels_has_a_row():
    watch,net = Watch(DataLoader(of_several(), 16), classes=['a','b','c']),nn.Linear(6, 3)
    opt = torch.optim.Adam(net.parameters(), .05)
    for _ in range(10):
        for x,y in watch:
            pred = net(x)
            F.binary_cross_entropy_with_logits(pred, y).backward()
            watch.note(pred, y)
            opt.step()
            opt.zero_grad()
        watch.end_epoch()
    found = watch.suspects()
    y = of_several().tensors[1]
    assert len(found)==3*64
    assert (found.index[0],found.label.iloc[0],found.likelier.iloc[0])==((0,'a','no a') if y[0,0] else (0,'no a','a'))
    has = watch.corrected({})
    assert [[name in o for name in 'abc'] for o in has]==(y>.5).tolist()
    mended = watch.corrected(found[:1].assign(label=found.likelier[:1]))
    assert ('a' in mended[0])!=('a' in has[0]) and mended[1:].equals(has[1:])

def test_numbers_are_listed_by_their_loss():
    x = torch.randn(40, 3)
    y = x[:,:1].clone()
    y[7] += 9
    watch,net = Watch(DataLoader(TensorDataset(x, y), 8), loss_func=nn.MSELoss()),nn.Linear(3, 1)
    for a,b in watch: watch.note(net(a), b)
    watch.end_epoch()
    assert watch.suspects().index[0]==7
    with pytest.raises(ValueError, match='targets that are no labels'): watch.estimated_errors()

def test_a_state_goes_on():
    whole,*_ = watched(DataLoader(given(), BS), 4)
    first,net,_ = watched(DataLoader(given(), BS), 2)
    second = Watch(DataLoader(given(), BS))
    second.load_state_dict(first.state_dict())
    opt = torch.optim.SGD(net.parameters(), LR)
    for _ in range(2):
        for x,y in second:
            pred = net.train()(x)
            F.cross_entropy(pred, y).backward()
            second.note(pred, y)
            opt.step()
            opt.zero_grad()
        second.end_epoch(accuracy_of(net))
    pd.testing.assert_frame_equal(second.suspects(), whole.suspects())
    with pytest.raises(ValueError, match=f'a state of {N} items, wanted 9'):
        Watch(9).load_state_dict(first.state_dict())

# Several processes
def of_both(rank, out):
    "What a process lists that has noted each second batch"
    watch,net = Watch(N),network()
    x,y = given().tensors
    for epoch in range(2):
        for step,idx in enumerate(torch.randperm(N, generator=torch.Generator().manual_seed(epoch)).split(BS)):
            if step%2==rank and not (epoch and rank): watch.note(net.eval()(x[idx]), y[idx], idx)
        watch.end_epoch()
    watch.suspects().to_pickle(out/f'{rank}.pkl')

@pytest.mark.slow
def test_processes_put_together_what_each_has_noted(tmp_path):
    on_two_ranks(partial(of_both, out=tmp_path), tmp_path)
    a,b = (pd.read_pickle(tmp_path/f'{rank}.pkl') for rank in range(2))
    pd.testing.assert_frame_equal(a, b)
    second = torch.randperm(N, generator=torch.Generator().manual_seed(1)).split(BS)[::2] # the other process had none
    assert Counter(a.looks.to_dict())==Counter([*range(N),*torch.cat(second).tolist()])
    assert a.label.sort_index().tolist()==given().tensors[1].tolist()

# What can go wrong
class Endless(IterableDataset):
    def __iter__(self): return iter(range(10))

@pytest.mark.parametrize('loader', [[1,2], DataLoader(Endless(), 4),
    DataLoader(range(9), 4, num_workers=1, in_order=False), TfmdDL(range(9), bs=4)])
def test_a_loader_that_cannot_tell_its_items_is_refused(loader):
    with pytest.raises(TypeError, match=r'have the dataset return the index of each item.*Watch\(len\(dataset\)\)'):
        Watch(loader)

class ReadsAhead:
    "As a prefetcher does, outside of the watch"
    def __init__(self, loader): self.loader = loader
    def __iter__(self): return fetched_early(self.loader)

def test_a_batch_that_was_read_ahead_is_not_mistaken():
    watch,net = Watch(DataLoader(given(), BS)),network()
    with pytest.raises(ValueError, match='targets of another batch than the last one.*read ahead'):
        for x,y in ReadsAhead(watch): watch.note(net(x), y)

def test_a_batch_is_noted_once():
    watch,net = Watch(DataLoader(given(), BS)),network()
    x,y = next(iter(watch))
    watch.note(net(x), y)
    with pytest.raises(ValueError, match='no batch that was not noted yet'): watch.note(net(x), y)

BAD = { # predictions, targets and indices of four items
    '4 predictions of 3 targets': (torch.randn(4, 3), torch.arange(3), [0,1,2,3]),
    'from 2 to 10, wanted 4 whole numbers, from 0 to 9': (torch.randn(4, 3), torch.zeros(4).long(), [2,3,4,10]),
    'from -1 to 4, wanted 4': (torch.randn(4, 3), torch.zeros(4).long(), [2,3,4,-1]),
    'idx: got torch.float32': (torch.randn(4, 3), torch.zeros(4).long(), [2.,3,4,5]),
    r'idx: got torch.int64 \(3,\)': (torch.randn(4, 3), torch.zeros(4).long(), [2,3,4]),
    'predictions that are all from 0 to 1': (torch.rand(4, 3), (torch.rand(4, 3)>.5).float(), [0,1,2,3]),
    'targets that are not 0 or 1': (torch.randn(4, 1), torch.randn(4, 1), [0,1,2,3]),
    'zeros and ones of which each item has a single one.*yb.argmax': (torch.randn(4, 4), torch.eye(4), [0,1,2,3]),
    r'predictions \(4, 3, 5, 5\) of targets': (torch.randn(4, 3, 5, 5), torch.zeros(4, 5, 5).long(), [0,1,2,3])}

@pytest.mark.parametrize('said', BAD)
def test_what_does_not_go_together_is_said_in_the_first_step(said):
    pred,y,idx = BAD[said]
    watch = Watch(10)
    with pytest.raises(ValueError, match=said): watch.note(pred, y, idx)
    watch.note(torch.randn(4, 3), torch.tensor([0,1,2,0]), [0,1,2,3]) # nothing of it stayed
    watch.end_epoch()
    assert looks_of(watch)==Counter(range(4))

def test_other_kinds_of_labels_in_a_later_step_are_refused():
    watch = Watch(10)
    watch.note(torch.randn(4, 3), torch.tensor([0,1,2,0]), [0,1,2,3])
    with pytest.raises(ValueError, match='targets of another kind than before'):
        watch.note(torch.randn(4, 3), torch.rand(4, 3), [4,5,6,7])

def test_labels_that_do_not_count_are_not_listed():
    watch = Watch(4)
    watch.note(torch.randn(4, 3), torch.tensor([0,-1,-100,2]), [0,1,2,3])
    watch.end_epoch()
    assert {*watch.suspects().index}=={0,3}

def test_predictions_that_are_no_numbers_do_not_count():
    watch,pred = Watch(4),torch.randn(4, 3)
    pred[2] = torch.nan
    watch.note(pred, torch.tensor([0,1,1,2]), [0,1,2,3])
    watch.end_epoch()
    assert {*watch.suspects().index}=={0,1,3}

def test_an_epoch_ends_once_and_its_accuracy_is_a_share():
    watch = Watch(4)
    with pytest.raises(ValueError, match='nothing was noted yet'): watch.suspects()
    with pytest.raises(ValueError, match='end an epoch once'): watch.end_epoch()
    watch.note(torch.randn(4, 3), torch.tensor([0,1,1,2]), [0,1,2,3])
    with pytest.raises(ValueError, match='accuracy: got 93'): watch.end_epoch(93)
    watch.end_epoch(.93)
    with pytest.raises(ValueError, match='end an epoch once'): watch.end_epoch()

def test_a_corrected_label_begins_anew_and_labels_of_other_items_are_refused(capsys):
    watch,y = Watch(40),torch.arange(40)%4
    pred,idx = 3*F.one_hot(y, 4).float(),torch.arange(40)
    def epoch(y):
        watch.note(pred, y, idx)
        watch.end_epoch()
    epoch(y)
    other = y.clone()
    other[5] = (y[5]+1)%4
    assert not capsys.readouterr().out
    epoch(other)
    assert 'Watch: 1 items have another label than in the epoch before' in capsys.readouterr().out
    assert watch.suspects().looks[5]==1 and watch.suspects().index[0]==5
    with pytest.raises(ValueError, match='other labels of most items than in the epoch before'): epoch(y.flip(0))

@pytest.mark.parametrize('loader', [0, -3])
def test_a_number_of_items_is_above_zero(loader):
    with pytest.raises(ValueError, match='loader: got'): Watch(loader)

def test_keys_are_as_many_as_items():
    with pytest.raises(ValueError, match='keys: got 3, wanted 4'): Watch(4, keys=['a','b','c'])
