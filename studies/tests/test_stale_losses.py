"Which losses `stale_loss` goes by"
import pandas as pd, torch
from fastai.callback.core import Callback
from fastai.torch_core import set_seed
from selback.callback.notes import ItemNotes
from studies import stale_losses

def test_losses_of_passes_stay_while_items_train(monkeypatch):
    "And those of training take their place in the package's own method"
    changed = {}
    def known(learn): return learn.selection.memory.loss.nan_to_num(-1)
    class Before(Callback):
        order,run_valid = ItemNotes.order-1,False
        def after_loss(self): self.learn.known_before = known(self.learn)
    class After(Callback):
        order,run_valid = ItemNotes.order+2,False
        def after_loss(self):
            if self.learn.selection.is_selecting:
                changed[self.learn.way] = not torch.equal(self.learn.known_before, known(self.learn))

    for way,cls in stale_losses.WAYS.items():
        class Spy(cls):
            spies = Before(),After()
            @property
            def companions(self): return [*super().companions, *self.spies]
            def before_fit(self):
                super().before_fit()
                self.learn.way = way
        monkeypatch.setitem(stale_losses.WAYS, way, Spy)
        set_seed(0)
        stale_losses.train(way, .6, 0, *stale_losses.tables(), epochs=4)
    assert changed==dict(of_training=True, of_passes=False)

def test_it_runs_at_a_tiny_scale(tmp_path):
    stale_losses.main([0], 1, tmp_path/'runs.csv')
    runs = pd.read_csv(tmp_path/'runs.csv')
    assert len(runs)==4
    assert runs.valid_loss.between(0, 5).all()
