"What a fit's first batch is asked: kinds of models, losses, loaders and callbacks that are right by values, or refused"
import torch
from helpers import *
from torch.nn import functional as F

class BatchNormByBatch(nn.Module):
    "Predicts by the statistics of its batch in evaluation, too, as BatchNorm without running statistics does"
    def __init__(self):
        super().__init__()
        self.norm,self.out = nn.BatchNorm1d(4, track_running_stats=False),nn.Linear(4, 3)
    def forward(self, x): return self.out(self.norm(x))

def test_items_may_go_by_the_others_if_not_by_their_order():
    "The hardest half by the whole batch trains"
    learn = Learner(dls_of(*class_data()), BatchNormByBatch(), loss_func=CrossEntropyLossFlat(), lr=0.)
    learn.top_loss(keep=.5, gather=False, warmup=0)
    seen = []
    watch_choices(learn.selection, lambda batch, scores, losses, chosen: seen.append((batch, chosen.rows)))
    trained_only(learn, 1)
    assert len(seen)==7
    for batch,rows in seen:
        with torch.no_grad(): losses = F.cross_entropy(learn.model(batch.xb[0]), batch.yb[0], reduction='none')
        half = losses.topk(len(rows)).indices
        assert {*rows.tolist()}=={*half.tolist()}
        assert len(rows)==-(-len(losses)//2)
