"What hard items do to the gradient, and how sure the network is of them (Jiang et al. 2019, figures 5, 8 and 9)"
import pandas as pd, torch
from fastai.learner import Learner
from fastcore.basics import noop
from torch import Tensor

from selback.core.checks import check_range, error_text
from selback.core.batches import as_tensors, take
from selback.core.first_batch import separable_losses
from selback.core.item_loss import ItemLoss
from selback.core.losses import preserved
from selback.core.policies import random_k, top_k
from selback.core.untouched import fixed_random, kept, unwrapped
from selback.core.scoring import ScoringPass
from selback.callback.loaders import check_loader, loader_of, longest_first
from selback.callback.learner import base_loss, true_output
from selback.views.views import by_quantile, tidy, width

def _gradient(learn, xb, yb):
    "The gradient of the loss of a batch at all weights that train, one vector"
    model = unwrapped(learn.model)
    weights = [p for p in model.parameters() if p.requires_grad]
    if not weights:
        got = 'a model whose weights are all frozen'
        raise ValueError(error_text('gradient_similarity', got, 'some that train', 'call learn.unfreeze()'))

    loss_func = base_loss(learn)
    with kept([*model.modules()]),fixed_random(),preserved(loss_func),torch.enable_grad():
        model.train()
        loss = loss_func(true_output(learn, model(*xb)), *yb)
        grads = torch.autograd.grad(loss.mean(), weights, allow_unused=True)

    grads = [torch.zeros_like(p) if g is None else g for p,g in zip(weights, grads)]
    return torch.cat([g.flatten().float().cpu() for g in grads])

def _alike(a, b):
    "Cosine of two gradients, and the share of the weights with a gradient in `a` at which both have one sign"
    def dot(s, t): return (s*t).sum(dtype=torch.float64)
    cosine = dot(a, b)/(dot(a, a)*dot(b, b)).sqrt()
    same_sign = (a.sign()==b.sign())[a!=0].double().mean()
    return dict(cosine=float(cosine), same_sign=float(same_sign))

def _some_batches(learn, n, generator):
    "Random training batches, inputs and targets as plain tensors; the loader is left as it is"
    dl = check_loader(learn.dls.train)
    some = torch.randperm(dl.n, generator=generator)[:n*dl.bs]
    loader = loader_of(dl, longest_first(dl, some).tolist(), num_workers=0)
    with fixed_random(): batches = [as_tensors(learn._set_device(b)) for b in loader]

    n_inp = getattr(learn.dls, 'n_inp', len(batches[0])-1)
    return [(b[:n_inp],b[n_inp:]) for b in batches]

def _losses(learn, xb, yb, item_loss):
    "The losses of the items of a batch, by the network as it is"
    loss_func = base_loss(learn)
    if item_loss is not None: loss_func = ItemLoss(item_loss, loss_func)
    with fixed_random():
        pred = true_output(learn, ScoringPass()(learn.model, xb, yb))
        return separable_losses(loss_func, pred, *yb).cpu()

def gradient_similarity(
    learn:Learner, # Its model, loss function and fastai training loader, all of which are left as they are
    n_batches:int=4, # Random training batches, at most an epoch
    keep:float=1/3, # Share of a batch to compare with all of it; two items at least
    item_loss=None, # As for the selection: one loss per item, if the loss function mixes items
    seed:int=0, # Of the batches and the random items
)->pd.DataFrame: # Two rows a batch, `of` 'hardest' and 'random': `items`, `cosine`, share of weights of the `same_sign`
    "How like the batch's gradient that of its hardest items is, and that of random ones (Jiang et al. 2019, figure 5)"
    check_range('keep', keep, 0, 1, above=True)
    n_batches = check_range('n_batches', n_batches, 1, whole=True)
    generator = torch.Generator().manual_seed(seed)
    found = []
    for i,(xb,yb) in enumerate(_some_batches(learn, n_batches, generator)):
        losses = _losses(learn, xb, yb, item_loss)
        whole = _gradient(learn, xb, yb)
        share = min(1., max(keep, 2/len(losses)))
        parts = dict(hardest=top_k(losses, share), random=random_k(losses, share, generator))
        for of,chosen in parts.items():
            part = _gradient(learn, *take((xb, yb), chosen.rows))
            found.append(dict(batch=i, of=of, items=len(chosen.rows), **_alike(whole, part)))
    return pd.DataFrame(found)

def _classes(pred, targ, axis):
    "Of single predictions: the probability of the target, that of the predicted class, and whether they are one"
    probs,label = pred.float().softmax(axis),pred.argmax(axis)
    targ = targ.view_as(label)
    at = targ.clamp(0, pred.shape[axis]-1) # a loss may ignore targets that are no class
    in_target = probs.gather(axis, at.unsqueeze(axis)).squeeze(axis)
    return dict(target_confidence=in_target, confidence=probs.amax(axis), accuracy=label==targ)

def by_percentile(
    learn:Learner, # One that tells one class for each item, or for each pixel
    ds_idx:int=1, # 1: validation items, 0: training items
    bins:int=10, # Groups of as many items
)->pd.DataFrame: # A row for each group, easiest first: `percentile`, its upper end; `items`; the means
    "Mean `loss`, `target_confidence`, `confidence`, `accuracy` by the loss (Jiang et al. 2019, figures 8 and 9)"
    loss_func = base_loss(learn)
    with fixed_random(),learn.no_bar(): pred,targ = learn.get_preds(ds_idx=ds_idx, act=noop)
    has_logits = isinstance(pred, Tensor) and pred.ndim>1
    has_classes = isinstance(targ, Tensor) and not targ.is_floating_point()
    if not has_logits or not has_classes:
        got = f'targets that are {getattr(targ, "dtype", type(targ).__name__)}'
        raise ValueError(error_text('by_percentile', got, 'class numbers: one class for each item'))

    pred,targ = as_tensors(learn._set_device((pred,targ))) # where the loss function may have weights
    of_classes = _classes(pred, targ, getattr(loss_func, 'axis', 1))
    values = {k: v.reshape(len(pred), -1).float().mean(1).cpu().numpy() for k,v in of_classes.items()}
    return by_quantile(separable_losses(loss_func, pred, targ).cpu().numpy(), values, bins)

def plot_by_percentile(
    rows:pd.DataFrame, # As `by_percentile` returns it
): # Axes
    "Confidence in the target and in the predicted class, and accuracy, by percentile of the loss"
    import matplotlib.pyplot as plt
    fig,ax = plt.subplots(figsize=(width,3.4), layout='constrained')
    names = dict(target_confidence='confidence in the target', confidence='confidence', accuracy='accuracy')
    middle = rows.percentile-50/len(rows)
    for column,name in names.items(): ax.plot(middle, rows[column], marker='o', ms=3.5, lw=1.8, label=name)
    tidy(ax, xlabel='percentile of the loss', ylabel='mean of the items', xlim=(0,100), ylim=(0,1.03))
    ax.legend(frameon=False)
    return ax
