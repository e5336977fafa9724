"The memory against a table that is kept by hand"
import math

import pytest, torch
from selback.core.memory import ItemMemory

def nothing_known(): return dict(loss=math.nan, total=0., ewma=math.nan, age=0, seen=0, picked=0)

class Table:
    "What a memory holds, by hand"
    def __init__(self, ema): self.ema,self.rows = ema,{}

    def note(self, idx, losses, fresh=True, picked=False, again=False):
        last = dict(zip(idx, losses)) # of an item with several rows
        for i,loss in last.items():
            row = self.rows.setdefault(i, nothing_known())
            if not again: self.smooth(row, loss)
        for i,loss in zip(idx, losses):
            row = self.rows[i]
            if not again: self.count(row, loss)
            row['loss'] = loss
            row['picked'] += picked
            if fresh: row['age'] = 0

    def smooth(self, row, loss):
        is_first = math.isnan(row['ewma'])
        row['ewma'] = loss if is_first else self.ema*row['ewma']+(1-self.ema)*loss

    def count(self, row, loss):
        row['total'] += loss
        row['seen'] += 1

    def next_epoch(self):
        for row in self.rows.values(): row['age'] += row['seen']>0

def agree(memory, table):
    for i in range(len(memory)):
        for name,value in table.rows.get(i, nothing_known()).items():
            held = getattr(memory, name)[i].item()
            lost = 1e-4 if name=='total' else 1e-12 # a sum of both signs loses digits
            assert held==pytest.approx(value, rel=1e-5, abs=lost, nan_ok=True), (i, name)

BATCHES = [
    (1, {}),
    (7, {}),
    (16, dict(picked=True)),
    (33, dict(fresh=False, picked=True)),
    (33, dict(again=True)),
    (0, {})]

@pytest.mark.parametrize('ema', [0., .3, .5, .9, .99])
@pytest.mark.parametrize('n', [1, 3, 40])
def test_all_rows_count_and_the_last_one_of_an_item_tells_its_loss(n, ema):
    generator = torch.Generator().manual_seed(n)
    memory,table = ItemMemory(n, ema=ema),Table(ema)
    for size,kwargs in BATCHES:
        idx = torch.randint(0, n, (size,), generator=generator)
        losses = torch.randn(size, generator=generator)*5
        memory.note(idx, losses, **kwargs)
        table.note(idx.tolist(), losses.tolist(), **kwargs)
        agree(memory, table)
        memory.next_epoch()
        table.next_epoch()

IN_TWO_ROWS = [
    ([2.,math.nan], math.nan),
    ([math.nan,2.], 3.),
    ([math.nan,math.nan], math.nan),
    ([6.,math.inf], math.inf)]

@pytest.mark.parametrize('losses,wanted', IN_TWO_ROWS)
def test_losses_that_are_not_finite_in_two_rows(losses, wanted):
    memory,table = ItemMemory(3, ema=.5),Table(.5)
    memory.note(torch.tensor([1]), torch.tensor([4.]))
    table.note([1], [4.])

    memory.note(torch.tensor([1,1]), torch.tensor(losses))
    table.note([1,1], losses)
    assert memory.ewma[1].item()==pytest.approx(wanted, nan_ok=True)
    assert memory.loss[1].item()==pytest.approx(losses[-1], nan_ok=True)
    agree(memory, table)

    memory.note(torch.tensor([2]), torch.tensor([1.])) # the others go on
    assert memory.ewma[2]==1

def test_elsewhere_than_on_the_cpu_nothing_is_waited_for():
    "On a device without data every answer to the host would raise"
    memory = ItemMemory(9, 'meta')
    idx = torch.zeros(4, dtype=torch.int64, device='meta')
    losses = torch.zeros(4, device='meta')
    memory.note(idx, losses)
    memory.note(idx, losses, picked=True, again=True)
    with pytest.raises(NotImplementedError): memory.loss.tolist()
