"What can only be seen on a GPU: `make gpu`"
import io

import pytest, torch
from helpers import *
from selback import functional as plain
from selback.methods.favor_hard import FavorHard
from torch.utils.data import DataLoader

pytestmark = [pytest.mark.usefixtures('gpu'), pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU')]

KEEPS_ALL = dict(
    epoch=lambda: FavorHardCallback(beta=0, warmup=0),
    weighted_epoch=lambda: InfoBatchCallback(prune=0, warmup=0),
    batch=lambda: TopLossCallback(1., warmup=0),
    gathered=lambda: TopLossCallback(1., gather=True, warmup=0),
    watched=WatchItemsCallback)

class Noted(Callback):
    "Which items train in each step, and with which losses"
    order,run_valid = 60,False
    def __init__(self): self.steps = []
    def after_batch(self): self.steps.append((self.learn.selection.item_idx.tolist(), self.loss.item()))

def on_gpu(learn):
    learn.dls.to(torch.device('cuda'))
    return learn

@pytest.mark.parametrize('precision', ['to_fp32','to_fp16','to_bf16'])
@pytest.mark.parametrize('path', KEEPS_ALL)
def test_keeping_all_is_plain_training(path, precision):
    def trained(*cbs):
        learn = quiet_fit(getattr(on_gpu(table_learner(cbs=cbs)), precision)(), 3)
        return [p.detach().cpu() for p in learn.model.parameters()]
    for ours,theirs in zip(trained(KEEPS_ALL[path]()), trained()): assert torch.equal(ours, theirs)

def tracked(path): return PATHS[path](**{} if path=='watched' else dict(track_items=True))

def without_dropout(**kwargs):
    "A learner that draws nothing on the device"
    learn = table_learner(**kwargs)
    learn.model[3] = nn.Identity()
    return learn

@pytest.mark.parametrize('path', PATHS)
def test_the_first_epoch_is_that_of_the_cpu(path):
    ours,theirs = Noted(),Noted()
    for noted,move in (ours, on_gpu),(theirs, lambda learn: learn):
        quiet_fit(move(without_dropout(cbs=[tracked(path), noted])), 1)
    for (idx,loss),(wanted,wanted_loss) in zip(ours.steps, theirs.steps):
        assert idx==wanted
        assert loss==pytest.approx(wanted_loss, rel=1e-3)

def test_what_is_said_of_labels_is_what_the_cpu_says():
    def margins(move):
        learn = quiet_fit(move(without_dropout(cbs=WatchItemsCallback())), 2)
        return learn.selection.suspects().sort_index().margin.to_numpy()
    ours,theirs = margins(on_gpu),margins(lambda learn: learn)
    np.testing.assert_allclose(ours, theirs, atol=.01)

@pytest.mark.parametrize('there', ['cpu','cuda'])
@pytest.mark.parametrize('path', PATHS)
def test_a_state_goes_on_where_it_is_loaded(path, there):
    def new(): return table_learner(cbs=tracked(path))
    learn = quiet_fit(on_gpu(new()), 2)
    file = io.BytesIO()
    torch.save(learn.selection.state_dict(), file)
    file.seek(0)
    other = new()
    if there=='cuda': on_gpu(other)
    other.selection.load_state_dict(torch.load(file, weights_only=False))
    torch.testing.assert_close(other.selection.memory.loss.cpu(), learn.selection.memory.loss.cpu(), equal_nan=True)
    quiet_fit(other, 1)
    assert other.selection.epochs_done==3

def test_a_plain_loop_and_a_sampler():
    "The hardest quarter of each batch of a loader on the host; a sampler goes by what was noted on the device"
    x,y = class_data(160)
    model,loss_func = mlp().cuda(),nn.functional.cross_entropy
    opt = torch.optim.SGD(model.parameters(), .1)
    memory = plain.ItemMemory(160, device='cuda')
    loader = DataLoader([*zip(x, y, torch.arange(160))], 16, pin_memory=True)
    def split(batch): return batch[:1],batch[1:2]

    for i,(xb,yb,idx) in enumerate(plain.chosen(loader, model, loss_func, plain.TopLoss(.25), split=split)):
        rows = slice(16*i, 16*i+16)
        with torch.no_grad(): losses = loss_func(model.eval()(x[rows].cuda()), y[rows].cuda(), reduction='none')
        torch.testing.assert_close(losses[idx-16*i].sort().values, losses.topk(4).values.flip(0))
        pred = model.train()(xb)
        memory.note(idx, plain.item_losses(loss_func, pred, yb).detach())
        loss_func(pred, yb).backward()
        opt.step()
        opt.zero_grad()
    drawn = [*plain.MemorySampler(memory, FavorHard(beta=2))]
    assert len({*drawn})==len(drawn)
    assert 120<len(drawn)<160 # of 160, of which 40 have a loss; the others are loaded
