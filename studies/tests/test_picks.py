"Picks by epoch are those that trained"
import matplotlib
matplotlib.use('agg')
import matplotlib.pyplot as plt, numpy as np, pytest, torch
from helpers import *
from studies.picks import NotePicks, pick_rates, plot_pick_rates, plot_picks

@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close('all')

def lines(ax): return {line.get_label().split(', loss')[0]: line.get_xydata() for line in ax.lines}

def picks_of(n_epoch, *fits):
    "Of a learner that keeps the harder half of each batch, noted over its fits"
    learn = table_learner(cbs=NotePicks()).top_loss(keep=.5, track_items=True)
    for n in (n_epoch, *fits): quiet_fit(learn, n)
    return learn.note_picks

def test_rates_of_picks_by_hand():
    picks = picks_of(4)
    counts = [torch.zeros(100), *picks.by_epoch]
    rates = pick_rates(picks, last=3)
    assert rates.index.tolist()==[3,4]
    assert rates.columns.tolist()==[0,1,2,3]
    assert np.allclose(rates.sum(axis=1), 1)

    for epoch in (3,4):
        of_late = (counts[epoch]-counts[epoch-3]).int() # each item trains once in an epoch, at most
        assert rates.loc[epoch].tolist()==pytest.approx([(of_late==k).float().mean().item() for k in range(4)])

    with pytest.raises(ValueError, match='pick_rates: got 4 epochs, wanted 5'): pick_rates(picks)
    assert len(plot_pick_rates(rates).collections)==4

def test_picks_of_single_items():
    "Over two fits"
    picks = picks_of(3, 1)
    ax = plot_picks(picks, [3,50])
    for i in (3,50):
        epochs,picked = lines(ax)[f'item {i}'].T
        assert epochs.tolist()==[0,1,2,3,4]
        assert picked[1]==1 # all train in the warm-up
        assert picked[-1]==picks.selection.items().picked[i]
        assert set(np.diff(picked))<={0,1}
