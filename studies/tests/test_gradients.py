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

def pixel_learner():
    "A target for each pixel"
    set_seed(0)
    dls = dls_of(torch.randn(48, 3, 4, 4), torch.randint(0, 3, (48,4,4)), bs=8, n_valid=16)
    return Learner(dls, nn.Conv2d(3, 3, 1), loss_func=CrossEntropyLossFlat(axis=1))

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

@pytest.mark.parametrize('make', [table_learner, image_learner, regression_learner])
def test_the_gradient_of_all_is_that_of_all(make):
    found = gradient_similarity(make(), 2, keep=1.)
    assert len(found)==4
    assert np.allclose(found.cosine, 1, atol=1e-5)
    assert (found.same_sign==1).all()

    part = gradient_similarity(make(), 2, keep=.3)
    assert (part.cosine<1-1e-4).all()
    assert part.cosine.between(-1, 1).all()

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

def test_gradients_of_a_loss_that_mixes_items_are_refused():
    learn = short_learner(loss_func=lambda pred, y: F.cross_entropy(pred, y).sqrt())
    with pytest.raises(ValueError, match='It mixes items'): gradient_similarity(learn)
    def item_loss(pred, y): return F.cross_entropy(pred, y, reduction='none')
    assert len(gradient_similarity(learn, 1, item_loss=item_loss))==2

def test_gradients_that_are_refused():
    with pytest.raises(ValueError, match='keep: got 0'): gradient_similarity(short_learner(), keep=0)
    frozen = short_learner()
    frozen.model.requires_grad_(False)
    with pytest.raises(ValueError, match='weights are all frozen'): gradient_similarity(frozen)

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

def test_percentiles_of_pixels():
    learn = pixel_learner()
    (row,) = by_percentile(learn, bins=1).itertuples()
    x,y = learn.dls.valid_ds.tensors
    pred = learn.model(x).detach()
    share,right = pred.softmax(1),(pred.argmax(1)==y).float()
    def near(value): return pytest.approx(float(value), rel=1e-5)
    assert row.loss==near(F.cross_entropy(pred, y))
    assert row.target_confidence==near(share.gather(1, y[:,None]).mean())
    assert row.confidence==near(share.amax(1).mean())
    assert row.accuracy==near(right.mean())

def test_percentiles_are_of_classes():
    refused = 'by_percentile: got targets.*wanted class numbers'
    with pytest.raises(ValueError, match=refused): by_percentile(regression_learner())
