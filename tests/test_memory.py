"The memory against a table that takes one row after the other"
import math

import pytest, torch
from selback.core.memory import ItemMemory

class Table:
    "What a memory holds, by hand"
    def __init__(self, ema): self.ema,self.rows = ema,{}
    def note(self, idx, losses, fresh=True, picked=False, again=False):
        for i,l in zip(idx, losses):
            o = self.rows.setdefault(i, dict(loss=math.nan, ewma=math.nan, age=0, seen=0, picked=0))
            if not again: o['ewma'],o['seen'] = l if math.isnan(o['ewma']) else self.ema*o['ewma']+(1-self.ema)*l,o['seen']+1
            o['loss'],o['picked'] = l,o['picked']+picked
            if fresh: o['age'] = 0

def agree(memory, table):
    for i in range(len(memory)):
        for k,v in table.rows.get(i, dict(loss=math.nan, ewma=math.nan, age=0, seen=0, picked=0)).items():
            assert getattr(memory, k)[i].item()==pytest.approx(v, rel=1e-5, nan_ok=True), (i, k)

@pytest.fixture(params=['asked', 'not asked'])
def rows(request, monkeypatch):
    "The way of a CPU, which finds out whether items repeat, and that of a GPU, which takes any batch as if they did"
    if request.param=='asked': return lambda o: o
    class Elsewhere(torch.Tensor):
        is_cpu = False
    return lambda o: o.as_subclass(Elsewhere)

def test_an_item_twice_in_a_batch_is_smoothed_once_for_each_row(rows):
    memory = ItemMemory(2, ema=.5)
    memory.note(torch.tensor([0]), torch.tensor([4.]))
    memory.note(rows(torch.tensor([0,0])), torch.tensor([2.,0.]), picked=True)
    assert [getattr(memory, k)[0].item() for k in ('ewma','loss','seen','picked')]==[1.5,0.,3,2] and memory.loss[1].isnan()

@pytest.mark.parametrize('ema', [0., .3, .5, .9, .99])
@pytest.mark.parametrize('n', [1, 3, 40])
def test_rows_count_one_after_the_other(n, ema, rows):
    generator = torch.Generator().manual_seed(n)
    memory,table = ItemMemory(n, ema=ema),Table(ema)
    for size,kwargs in (1,{}),(7,{}),(16,dict(picked=True)),(33,dict(fresh=False, picked=True)),(33,dict(again=True)),(0,{}):
        idx,losses = torch.randint(0, n, (size,), generator=generator),torch.randn(size, generator=generator)*5
        memory.note(rows(idx), losses, **kwargs)
        table.note(idx.tolist(), losses.tolist(), **kwargs)
        agree(memory, table)
        memory.next_epoch()
        for o in table.rows.values(): o['age'] += o['seen']>0

def test_a_batch_without_repeats_is_noted_as_ever(rows):
    generator,memory,past = torch.Generator().manual_seed(0),ItemMemory(50),torch.full((50,), math.nan)
    for _ in range(9):
        idx,losses = torch.randperm(50, generator=generator)[:20],torch.randn(20, generator=generator)
        losses[0] = [1.,math.nan,math.inf,-math.inf][int(idx[0])%4]
        old = past[idx]
        past[idx] = torch.where(old.isnan(), losses, torch.lerp(losses, old, .9))
        memory.note(rows(idx), losses)
        for a,b in (memory.ewma,past),(memory.loss[idx],losses): assert torch.equal(a.nan_to_num(9e9), b.nan_to_num(9e9))

@pytest.mark.parametrize('losses,wanted', [([2.,math.nan], math.nan), ([math.nan,2.], 2.), ([math.nan]*2, math.nan), ([6.,math.inf], math.inf)])
def test_losses_that_are_not_finite_in_two_rows(losses, wanted, rows):
    memory,table = ItemMemory(3, ema=.5),Table(.5)
    for o in memory,table: o.note(*((torch.tensor([1]), torch.tensor([4.])) if o is memory else ([1], [4.])))
    memory.note(rows(torch.tensor([1,1])), torch.tensor(losses))
    assert memory.ewma[1].item()==pytest.approx(wanted, nan_ok=True) and memory.loss[1].item()==pytest.approx(losses[-1], nan_ok=True)
    table.note([1,1], losses)
    agree(memory, table)
    memory.note(torch.tensor([2]), torch.tensor([1.])) # the others go on
    assert memory.ewma[2]==1

def test_elsewhere_than_on_the_cpu_nothing_is_waited_for():
    "On a device without data every answer to the host would raise"
    memory = ItemMemory(9, 'meta', guard=True)
    idx,losses = torch.zeros(4, dtype=torch.int64, device='meta'),torch.zeros(4, device='meta')
    for kwargs in {},dict(picked=True, again=True): memory.note(idx, losses, **kwargs)
    with pytest.raises(NotImplementedError): memory.loss.tolist()

def test_the_guard_looks_at_repeated_rows_once():
    memory = ItemMemory(10, guard=True)
    for _ in range(3):
        memory.note(torch.tensor([*range(10), 9, 9]), torch.tensor([*range(10), 9, 9]).float())
        memory.next_epoch(noise_quantile=.8)
    assert memory.suspects.nonzero()[:,0].tolist()==[8,9] and memory.streak.max()==3 and not memory.looked.any()
