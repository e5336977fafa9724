"The scoring pass: cheap looks, another model that looks, several batches at once, batches that are not chosen from"

import pytest, torch
from helpers import *
from torch.nn import functional as F

class Looks(nn.Module):
    "Notes what it is asked to look at"
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
        self.looks = Trail()
    def forward(self, x):
        is_channels_last = x.is_contiguous(memory_format=torch.channels_last)
        if not self.training: self.looks.append((tuple(x.shape),is_channels_last,torch.is_autocast_enabled('cpu')))
        return self.net(x)

def test_low_precision_and_resolution_go_together():
    x,model = torch.randn(4, 3, 16, 16),Looks()
    pred = ScoringPass(.5, 'bf16')(model, (x,))
    with torch.autocast('cpu', dtype=torch.bfloat16),torch.no_grad():
        small = F.interpolate(x, size=8, mode='bilinear', align_corners=False)
        wanted = model.eval()(small).float()

    assert pred.dtype==torch.float32
    assert model.looks.seen[0]==((4,3,8,8),True,True)
    assert not torch.is_autocast_enabled('cpu')
    torch.testing.assert_close(pred, wanted, rtol=.02, atol=.02)
    in_full = ScoringPass(.5)(model, (x,))
    assert (pred-in_full).abs().max()>1e-6 # it was bf16

# another model looks
def test_a_proxy_scores_and_the_model_does_not():
    learn,proxy = image_learner(n=36),Looks()
    learn.model = main = Looks()
    chosen = []
    def note(batch, scores, losses, rows): chosen.append((as_tensors(batch.xb)[0], as_tensors(batch.yb)[0], scores))
    cb = watch_choices(TopLossCallback(.5, warmup=0, scorer=proxy), note)
    learn._do_epoch_validate = lambda *args: None
    quiet_fit(learn.add_cb(cb), 1)

    assert len(proxy.looks.seen)>=4
    assert not main.looks.seen
    for x,y,scores in chosen:
        losses = F.cross_entropy(proxy.net(x), y, reduction='none').detach()
        torch.testing.assert_close(scores, losses)

def test_errors_name_the_scorer():
    refused = 'scorer: got the class Linear, wanted a module'
    with pytest.raises(TypeError, match=refused): TopLossCallback(scorer=nn.Linear)
    learn = short_learner(cbs=TopLossCallback(scorer=nn.Linear(9, 3)))
    with pytest.raises(ValueError, match='the scorer must take the inputs of the model'): quiet_fit(learn, 1)

# several batches in one look
def test_weighted_items_of_several_batches_are_scored_together():
    class Weighs(BatchMethod):
        weighs,presample = True,2
        def choose(self, scores, now):
            half = len(scores)//2
            return Chosen(torch.arange(half), torch.full((half,), 2.))
    cb = BatchSelection(Weighs(gather=True), warmup=0)
    stats = quiet_fit(table_learner(n=32+336, drop_last=True, cbs=cb), 1).selection.stats
    assert stats.trained.sum()==stats.kept.sum()==336//2
    assert stats[stats.trained>0].trained.tolist()==[16]*10+[8] # not filled up

def test_what_presample_and_passes_refuse():
    for k,v in dict(scale_factor=.5, precision='bf16', scorer=nn.Linear(1, 1)).items():
        with pytest.raises(ValueError, match='passes: got 1, so that there is no scoring pass'):
            TopLossCallback(passes=1, **{k: v})
    for bad in 3,'auto':
        with pytest.raises(ValueError, match=f'passes: got {bad!r}, wanted 1 or 2'): TopLossCallback(passes=bad)

    with pytest.raises(TypeError, match="unknown option 'presample'"):
        TopLossCallback(presample=2, gather=True)
    with pytest.raises(ValueError, match='presample: got 0'): ImportanceSamplingCallback(presample=0)
    with pytest.raises(ValueError, match='passes: got 1 with ImportanceSampling'):
        ImportanceSamplingCallback(passes=1)
