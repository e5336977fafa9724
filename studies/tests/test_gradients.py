"Gradients of hard items and confidence by percentile, beside what is computed by hand"
import matplotlib
matplotlib.use('agg')
import matplotlib.pyplot as plt, numpy as np, pytest, torch
from helpers import *
from studies.gradients import by_percentile, gradient_similarity, plot_by_percentile
from torch.nn import functional as F

@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close('all')

def lines(ax): return {line.get_label().split(', loss')[0]: line.get_xydata() for line in ax.lines}

def losses_of(learn):
    "The loss of each training item, computed from the dataset itself"
    x,y = learn.dls.train_ds.tensors
    return F.cross_entropy(learn.model(x), y, reduction='none').detach()

# gradients
def gradient(learn, rows):
    "Of the mean loss of some training items, flat"
    x,y = learn.dls.train_ds.tensors
    loss = F.cross_entropy(learn.model(x[rows]), y[rows])
    return torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, list(learn.model.parameters()))])

def test_gradients_of_a_linear_model_by_hand():
    learn = Learner(dls_of(*class_data(), bs=16), nn.Linear(4, 3), loss_func=CrossEntropyLossFlat())
    found = gradient_similarity(learn, n_batches=2, keep=.25, seed=3)
    idxs = torch.randperm(100, generator=torch.Generator().manual_seed(3))[:32]
    for i in range(2):
        rows = idxs[i*16:(i+1)*16]
        hardest = rows[losses_of(learn)[rows].argsort(descending=True)[:4]]
        whole,part = gradient(learn, rows),gradient(learn, hardest)
        cosine = float(whole@part/whole.norm()/part.norm())

        row = found[(found.batch==i) & (found.of=='hardest')].iloc[0]
        assert row['items']==4
        assert row.cosine==pytest.approx(cosine, abs=1e-5)
        assert row.same_sign==pytest.approx(float((whole*part>0).float().mean()))

def test_gradient_similarity_leaves_the_learner_as_it_was():
    def fitted():
        learn = quiet_fit(short_learner().top_loss(), 1)
        learn.model[1].train()
        return learn

    def grads(learn): return [p.grad.clone() for p in learn.model.parameters()]
    def modes_and_randomness(learn):
        return [m.training for m in learn.model.modules()],random_states(),learn.dls.train.rng.getstate()

    looked_at = fitted()
    weights_before,grads_before = weights(looked_at),grads(looked_at)
    others_before = modes_and_randomness(looked_at)
    gradient_similarity(looked_at)
    assert same(weights_before, weights(looked_at))
    assert all(torch.equal(before, after) for before,after in zip(grads_before, grads(looked_at), strict=True))
    assert modes_and_randomness(looked_at)==others_before

    looked_at_weights = weights(quiet_fit(looked_at, 1))
    assert same(looked_at_weights, weights(quiet_fit(fitted(), 1)))

# by percentile
def test_confidence_and_accuracy_by_percentile():
    learn = quiet_fit(table_learner(), 3)
    rows = by_percentile(learn, bins=4)
    assert rows.percentile.tolist()==[25,50,75,100]
    assert (rows['items']==8).all()
    assert rows.loss.is_monotonic_increasing
    assert rows.target_confidence.is_monotonic_decreasing
    assert (rows.target_confidence<=rows.confidence+1e-6).all()
    hardest = rows.iloc[-1]
    assert hardest.target_confidence<hardest.confidence # what is wrong is sure of something else

    x,y = learn.dls.valid_ds.tensors
    pred = learn.model.eval()(x).detach()
    share,right = pred.softmax(1),(pred.argmax(1)==y).float()
    order = F.cross_entropy(pred, y, reduction='none').argsort().view(4, 8)
    def means(values): return values[order].mean(1).numpy()
    assert rows.target_confidence.to_numpy()==pytest.approx(means(share[range(len(y)),y]), rel=1e-5)
    assert rows.confidence.to_numpy()==pytest.approx(means(share.amax(1)), rel=1e-5)
    assert rows.accuracy.tolist()==means(right).tolist()

    assert by_percentile(learn, ds_idx=0)['items'].sum()==100
    drawn = lines(plot_by_percentile(rows))['accuracy']
    assert np.allclose(drawn, np.stack([[12.5,37.5,62.5,87.5], rows.accuracy], 1))
