"How often items are picked, epoch by epoch (Jiang et al. 2019, figure 15)"
import numpy as np, pandas as pd, torch
from fastai.callback.core import Callback

from selback.callback.attach import Attached
from selback.core.checks import check_range, error_text
from selback.views.pictures import check_remembered
from selback.views.views import tidy, width

class NotePicks(Callback):
    "Notes how often each item of a selection with `track_items` had been picked by the end of each epoch"
    order,run_valid = Attached.order+1,False # what an epoch trained is remembered by then

    def __init__(self): self.by_epoch = [] # counts of picks, one for each item

    def after_train(self):
        check_remembered(self.selection, 'NotePicks')
        self.by_epoch.append(self.selection.memory.picked.cpu().clone())

def _spread_by_loss(losses, n=6):
    "Some items whose loss is known, from the easiest to the hardest"
    n_known = int((~losses.isnan()).sum())
    some = torch.linspace(0, n_known-1, min(n, n_known)).round().long()
    return losses.argsort()[:n_known][some].tolist()

def plot_picks(
    picks:NotePicks, # Of a learner that has trained
    idxs=None, # Dataset indices; None: six, from the easiest to the hardest
): # Axes
    "How often single items had been picked by the end of each epoch"
    import matplotlib.pyplot as plt
    losses = picks.selection.memory.loss.cpu()
    idxs = _spread_by_loss(losses) if idxs is None else [int(i) for i in idxs]
    epochs = range(len(picks.by_epoch)+1)

    fig,ax = plt.subplots(figsize=(width,4.2), layout='constrained')
    colours = plt.cm.viridis(np.linspace(0, .85, len(idxs)))
    widths = np.linspace(5, 1.5, len(idxs)) # lines may lie on each other
    for i,colour,lw in zip(idxs, colours, widths):
        counts = [0,*(int(picked[i]) for picked in picks.by_epoch)]
        ax.plot(epochs, counts, lw=lw, color=colour, label=f'item {i}, loss {losses[i]:.2g}')
    ax.plot(epochs, epochs, ls='--', color='grey', lw=1, label='every epoch')

    tidy(ax, xlabel='epochs', ylabel='times picked')
    for axis in (ax.xaxis,ax.yaxis): axis.get_major_locator().set_params(integer=True)
    fig.legend(frameon=False, loc='outside lower left', ncols=2)
    return ax

def pick_rates(
    picks:NotePicks, # Of a learner that has trained
    last:int=5, # Of how many epochs
)->pd.DataFrame: # A row for each epoch from the `last`-th on, a column for each number of picks from 0 to `last`
    "The share of the items that were picked in so many of the last epochs"
    last = check_range('last', last, 1, whole=True)
    n = len(picks.by_epoch)
    if n<last:
        remedy = 'train for longer, or pass a smaller number'
        raise ValueError(error_text('pick_rates', f'{n} epochs', f'{last} at least, as last={last}', remedy))

    counts = torch.stack([torch.zeros_like(picks.by_epoch[0]), *picks.by_epoch])
    was_picked = counts.diff(dim=0)>0 # an item that trains twice in an epoch counts once
    of_late = was_picked.int().unfold(0, last, 1).sum(-1)
    rates = [[float((row==k).float().mean()) for k in range(last+1)] for row in of_late]
    return pd.DataFrame(rates, index=pd.RangeIndex(last, n+1, name='epoch'))

def plot_pick_rates(
    rates:pd.DataFrame, # As `pick_rates` returns it
): # Axes
    "The share of the items by how often they were picked of late, epoch by epoch"
    import matplotlib.pyplot as plt
    last = rates.shape[1]-1
    first_epoch,last_epoch = rates.index[0],rates.index[-1]
    colours = plt.cm.viridis(np.linspace(.95, .05, last+1))

    fig,ax = plt.subplots(figsize=(width,4), layout='constrained')
    ax.stackplot(rates.index, rates.to_numpy().T, labels=[f'in {k}' for k in rates], colors=colours)
    xlim = first_epoch,max(last_epoch, first_epoch+1)
    tidy(ax, xlabel='epochs', ylabel='share of the items', ylim=(0,1), xlim=xlim)
    ax.xaxis.get_major_locator().set_params(integer=True)

    handles,names = (o[::-1] for o in ax.get_legend_handles_labels())
    title = f'picked in so many of the last {last} epochs'
    fig.legend(handles, names, title=title, frameon=False, loc='outside lower center', ncols=3)
    return ax
