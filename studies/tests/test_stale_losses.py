"Which losses `stale_loss` goes by"
import pandas as pd, torch
from fastai.torch_core import set_seed
from studies import stale_losses

def test_losses_of_passes_stay_while_items_train():
    "And those of training take their place in the package's own method"
    changed = {}
    for way,cls in stale_losses.WAYS.items():
        class Spy(cls):
            def note_losses(self, losses):
                before = self.memory.loss.clone()
                super().note_losses(losses)
                after = self.memory.loss
                if self.is_selecting: changed[way] = not torch.equal(before.nan_to_num(-1), after.nan_to_num(-1))
        stale_losses.WAYS = stale_losses.WAYS | {way: Spy}
        set_seed(0)
        stale_losses.train(way, .6, 0, *stale_losses.tables(), epochs=4)
    assert changed==dict(of_training=True, of_passes=False)

def test_it_runs_at_a_tiny_scale(tmp_path):
    stale_losses.main([0], 1, tmp_path/'runs.csv')
    runs = pd.read_csv(tmp_path/'runs.csv')
    assert len(runs)==4
    assert runs.valid_loss.between(0, 5).all()
