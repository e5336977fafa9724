"What can be seen of a selection is what happened"
import matplotlib
matplotlib.use('agg')
import matplotlib.pyplot as plt, numpy as np, pandas as pd, pytest, torch
from fastai.callback.core import Callback, CancelFitException
from fastai.data.core import Datasets
from fastai.data.transforms import Categorize
from fastai.torch_basics import Transform
from helpers import *
from selback.bench.datasets import get_dls, small_resnet
from selback.views.pictures import display_rows
from torch.nn import functional as F

@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close('all')

def lines(ax): return {line.get_label().split(', loss')[0]: line.get_xydata() for line in ax.lines}

def pixel_learner():
    "A target for each pixel"
    set_seed(0)
    dls = dls_of(torch.randn(48, 3, 4, 4), torch.randint(0, 3, (48,4,4)), bs=8, n_valid=16)
    return Learner(dls, nn.Conv2d(3, 3, 1), loss_func=CrossEntropyLossFlat(axis=1))

def tracked(): return TopLossCallback(track_items=True)

class Stops(Callback):
    "Ends a fit within the second epoch"
    order = BatchSelection.order+1

    def before_batch(self):
        if self.training and (self.epoch,self.iter)==(1,3): raise CancelFitException

# the sample of losses
def is_among(rows, n):
    "Of each of n items whether it is among the rows"
    return torch.zeros(n).index_fill_(0, rows, 1).bool().tolist()

def watched(**kwargs):
    "Notes what it chose from"
    cb = TopLossCallback(**kwargs)
    cb.seen = [] # epoch, loss, whether it was chosen
    def note(batch, scores, losses, chosen):
        n = len(scores)
        cb.seen += zip([cb.epoch]*n, scores.tolist(), is_among(chosen.rows, n))
    return watch_choices(cb, note)

def test_a_sample_of_few_items_is_all_of_them():
    learn = quiet_fit(short_learner(cbs=watched(keep=.5, warmup=0)), 3)
    samples = learn.selection.report.samples
    assert list(zip(samples.epoch, samples.loss, samples.chosen))==learn.selection.seen
    assert samples.fit.eq(1).all()

def test_an_interrupted_epoch_has_a_sample_and_keeps_its_number():
    learn = quiet_fit(table_learner(cbs=[watched(keep=.5, warmup=0), Stops()]), 3)
    assert learn.selection.report.samples.groupby('epoch').size().to_dict()=={0: 100, 1: 64}

    learn.remove_cb(Stops)
    quiet_fit(learn, 2)
    samples = learn.selection.report.samples
    sizes = samples.groupby(['fit','epoch']).size().to_dict()
    assert sizes=={(1,0): 100, (1,1): 64, (2,0): 100, (2,1): 100}
    assert samples.loss.tolist()==pytest.approx([loss for _,loss,_ in learn.selection.seen])

class Remembers(Callback):
    "Notes what each epoch was chosen by, and which items it loads"
    order,run_valid = BatchSelection.order+1,False

    def before_fit(self): self.losses,self.loaded = {},{}

    def before_batch(self):
        if self.epoch in self.loaded: return
        self.losses[self.epoch] = self.learn.selection.memory.loss.clone()
        self.loaded[self.epoch] = self.learn.selection.loader.idxs

def known_of(losses): return sorted(losses[~losses.isnan()].tolist())

@pytest.mark.parametrize('make', [lambda: InfoBatchCallback(), lambda: StaleLossCallback(n=3, beta=1)])
def test_samples_of_items_chosen_before_loading(make):
    learn = quiet_fit(table_learner(cbs=[make(), Remembers()], drop_last=True), 4)
    report,remembers = learn.selection.report,learn.remembers
    for epoch in (1,2):
        sample = report.samples[report.samples.epoch==epoch]
        losses,loaded = remembers.losses[epoch],remembers.loaded[epoch]
        assert len(sample)==100
        assert sorted(sample.loss.dropna())==pytest.approx(known_of(losses))

        assert report.stats.query(f'epoch=={epoch}').step.min()<0 # items were left out before loading
        assert sorted(sample[sample.chosen].loss.dropna())==pytest.approx(known_of(losses[loaded]))

def draws(**kwargs):
    "Notes the pools that it draws from"
    cb = ImportanceSamplingCallback(**kwargs)
    cb.seen = [] # epoch, losses, rows
    return watch_choices(cb, lambda batch, scores, losses, chosen: cb.seen.append((cb.epoch, losses, chosen.rows)))

def test_what_is_drawn_from_a_pool_of_batches_is_known():
    "Also of the smaller one at an epoch's end, and so is its share of the loss"
    learn = quiet_fit(table_learner(cbs=draws(tau=0, warmup=0)), 2)
    selection = learn.selection
    samples,seen = selection.report.samples,selection.seen
    assert samples.loss.tolist()==[loss for _,losses,_ in seen for loss in losses.tolist()]
    assert samples.chosen.tolist()==[chosen for _,losses,rows in seen for chosen in is_among(rows, len(losses))]

    names = list(learn.recorder.metric_names)[1:]
    for epoch,values in enumerate(learn.recorder.values):
        pools = [(losses,rows) for e,losses,rows in seen if e==epoch]
        sizes = [len(losses) for losses,_ in pools]
        assert sizes==([48,36] if epoch==0 else [48,48,4]) # the first batch of all trains whole

        whole = selection.stats.query(f'epoch=={epoch} and not scored and seen>0')
        of_whole = (whole.full_loss*whole.seen).sum()
        full = of_whole+float(sum(losses.sum() for losses,_ in pools))
        kept = of_whole+float(sum(losses[rows].sum() for losses,rows in pools))
        assert dict(zip(names, values))['loss_perc']==pytest.approx(kept/full, rel=1e-5)

def test_random_subsets_have_no_losses():
    learn = quiet_fit(short_learner().random_subset(warmup=0), 2)
    assert learn.selection.report.samples.empty
    (kept,) = learn.selection.plot() # no empty panels
    assert lines(kept)['of each batch'][:6,1].tolist()==[.5]*6

def test_a_panel_without_chosen_items_is_left_out():
    selection = quiet_fit(short_learner().top_loss(warmup=0), 1).selection
    samples = selection.report.samples
    assert len(selection_figure(selection.stats, samples).axes)==3
    assert len(selection_figure(selection.stats, samples.assign(chosen=False)).axes)==2

def type_sizes(fig):
    "The sizes of all type, in points, on a screen of 390 pixels, 96 to an inch"
    fig.canvas.draw()
    scale = 390/96/fig.get_figwidth()
    shown = [text for text in fig.findobj(matplotlib.text.Text) if text.get_visible() and text.get_text().strip()]
    return [text.get_fontsize()*scale for text in shown]

@pytest.mark.slow
def test_pictures_can_be_read_on_a_phone():
    learn = quiet_fit(image_learner(cbs=tracked(), n=36), 4)
    selection = learn.selection
    views = [
        selection.plot,
        selection.show_hardest,
        selection.show_easiest,
        lambda: selection.show_picked(1)]
    for view in views:
        plt.close('all')
        view()
        assert min(type_sizes(plt.gcf()))>8.5, view

# the figure
def test_distribution_is_numpys():
    losses = np.random.default_rng(0).exponential(size=999)
    x,share = loss_cdf([*losses, np.nan, np.inf])
    for q in (.1,.5,.99):
        assert np.isclose(np.interp(q, share, x), np.quantile(losses, q, method='interpolated_inverted_cdf'))
    assert np.allclose(share, [(losses<=v).mean() for v in x])

def test_means_by_quantile():
    chosen = pd.array([True,False,True,None,True,False], dtype='boolean')
    rows = by_quantile([5., 1., np.nan, 2., 4., 3.], dict(chosen=chosen), bins=2)
    assert rows.percentile.tolist()==[50,100]
    assert rows['items'].tolist()==[3,2]
    assert rows.loss.tolist()==[2,4.5]
    assert rows.chosen.tolist()==[0,1]

    assert by_quantile([1.,2.], {}, bins=9)['items'].tolist()==[1,1]
    assert not len(by_quantile([np.nan], {}))

def test_the_hardest_are_chosen_from_a_single_batch_as_a_step():
    learn = quiet_fit(table_learner(cbs=TopLossCallback(keep=.3, warmup=0), n=132, bs=100), 3)
    _,cdf,chosen = learn.recorder.plot_selection()
    samples = learn.selection.report.samples
    assert list(lines(cdf))==['epoch 0','epoch 1','epoch 2']
    for epoch in range(3):
        percentile,share = lines(chosen)[f'epoch {epoch}'].T
        assert percentile.tolist()==[5,15,25,35,45,55,65,75,85,95]
        assert share.tolist()==[0]*7+[1]*3

        losses = np.sort(samples[samples.epoch==epoch].loss)
        assert np.allclose(lines(cdf)[f'epoch {epoch}'], np.stack([losses, np.arange(1, 101)/100], 1))

LEAVING_OUT = dict(
    before_loading=lambda: InfoBatchCallback(),
    in_some_epochs=lambda: StaleLossCallback(n=3),
    of_each_batch=lambda: SelectiveBackpropCallback(),
    of_pools_of_batches=lambda: ImportanceSamplingCallback(tau=0))

@pytest.mark.parametrize('name', LEAVING_OUT)
def test_kept_share_adds_up_however_items_are_left_out(name):
    learn = quiet_fit(short_learner(cbs=LEAVING_OUT[name]()), 5)
    stats = learn.selection.stats
    steps = kept_share(stats, 1)
    assert len(steps)==(stats.step>=0).sum()
    assert (steps.share==steps.smooth).all()

    for epoch,row in enumerate(learn.recorder.values):
        share = steps.share[steps.epoch==epoch].to_numpy()
        kept,seen = kept_and_seen(stats[stats.epoch==epoch])
        assert share*seen==pytest.approx(kept)
        assert kept.sum()/seen.sum()==pytest.approx(row[2])

    whole = kept_share(stats, len(steps)*2).smooth
    assert np.allclose(whole, stats.kept.sum()/stats.seen.sum())

def kept_and_seen(rows):
    "Of each batch of an epoch; what was left out before loading counts for all of them alike"
    is_batch = rows.step>=0
    left_out = rows.seen[~is_batch].sum()
    batches = rows[is_batch]
    return batches.kept.to_numpy(),batches.seen.to_numpy()+left_out/len(batches)

def test_epochs_of_several_fits_are_told_apart():
    learn = quiet_fit(quiet_fit(short_learner().top_loss(), 2), 2)
    assert list(lines(learn.selection.plot()[1]))==['fit 1, epoch 1','fit 2, epoch 0','fit 2, epoch 1']
    assert len(lines(learn.selection.plot(n_epochs=2)[1]))==2
    with pytest.raises(ValueError, match='n_epochs: got 0'): learn.selection.plot(n_epochs=0)

def test_completion_offers_what_is_for_users():
    selection = short_learner().early_loss_sampling(alpha=2).selection
    offered = {*dir(selection)}
    assert {'card','stats','suspects','show_hardest','show_early','state_dict','alpha','track_items'}<=offered
    assert not {'add_cb','xb','tracker'} & offered # which are a learner's

def test_a_learner_without_a_selection_has_one_that_is_false_and_says_how_to_get_another():
    learn = short_learner()
    assert hasattr(learn, 'selection')
    assert not learn.selection
    how = r'learn.selection.card: got a learner without.*learn.favor_hard\(\)'
    with pytest.raises(AttributeError, match=how): learn.selection.card
    assert not quiet_fit(learn.top_loss(), 1).full_batches().selection

def test_nothing_to_plot():
    learn = table_learner()
    with pytest.raises(ValueError, match='a learner without a selection'): learn.recorder.plot_selection()
    quiet_fit(learn.top_loss(warmup=2), 2)
    nothing = 'nothing was selected yet in 14 batches.*warmup=0'
    with pytest.raises(ValueError, match=nothing): learn.recorder.plot_selection()

def test_plots_at_any_time(capsys):
    "In the middle of a fit, after the learning rate finder, and after losses that are not finite"
    class Looks(Callback):
        order = 60
        def after_batch(self):
            if self.training and (self.epoch,self.iter) in ((1,2),(2,0)): figures.append(self.learn.selection.plot())

    figures = []
    learn = quiet_fit(short_learner(cbs=[tracked(), Looks()]), 3)
    assert len(figures)==2

    before,items = learn.selection.report.samples,learn.selection.items()
    with learn.no_bar(): learn.lr_find(num_it=5, show_plot=False)
    pd.testing.assert_frame_equal(before, learn.selection.report.samples)
    pd.testing.assert_frame_equal(items, learn.selection.items())

    samples = pd.DataFrame(dict(fit=1, epoch=0, loss=[np.nan,np.inf,1.,2.], chosen=[True]*4))
    assert len(lines(selection_figure(learn.selection.stats, samples).axes[1])['epoch 0'])==2

class HarderHalf(EpochMethod):
    "The half with the highest remembered losses"
    def choose(self, loss, now):
        rows = loss.topk(len(loss)//2).indices
        loss_share = (loss[rows].sum()/loss.sum()).item()
        self.expected = len(rows)/len(loss),loss_share,loss.mean().item()
        return Chosen(rows)

def test_the_columns_of_an_epoch_go_by_the_losses_it_was_chosen_by():
    "Or hard items, once trained, would seem to have had the smaller share of the loss"
    selection = quiet_fit(short_learner(cbs=EpochSelection(HarderHalf())), 2).selection
    assert selection.report.log[:3]==pytest.approx(selection.method.expected)
    assert selection.method.expected[1]>.5

# tracking
def mixed_table_learner(cbs): return short_learner(cbs=[cbs, MixUp(.4)])

@pytest.mark.parametrize('cls', by_path(methods()), ids=one_liner)
@pytest.mark.parametrize('make', [partial(image_learner, n=36), mixed_table_learner], ids=['image','table_mixup'])
def test_tracking_changes_nothing(cls, make):
    def run(**kwargs):
        learn = quiet_fit(make(cbs=cls(seed=0, **full_epochs(cls, 1), **kwargs)), 3)
        return weights(learn),random_states(),learn.selection

    plain_weights,plain_random,plain = run()
    tracking_weights,tracking_random,tracking = run(track_items=True)
    assert same(plain_weights, tracking_weights)
    assert plain_random==tracking_random

    def stats_of(selection): return selection.stats.drop(columns='full_loss')
    pd.testing.assert_frame_equal(stats_of(plain), stats_of(tracking))
    assert tracking.items().picked.sum()==tracking.stats.trained.sum()

class CountsTrained(Callback):
    "How often each of 100 items trained"
    order,run_valid = 60,False

    def __init__(self): self.times = torch.zeros(100, dtype=torch.int32)

    def after_loss(self):
        idx,weight = self.learn.selection.item_idx,self.learn.selection.item_weight
        counts = torch.ones(len(self.y)) if weight is None else weight!=0
        self.times.index_add_(0, idx, counts.int())

PICKING = [dict(), dict(gather=True), dict(passes=1)]

@pytest.mark.parametrize('kwargs', PICKING, ids=str)
def test_picks_add_up_to_what_trained(kwargs):
    counts = CountsTrained()
    cb = TopLossCallback(keep=.3, track_items=True, **kwargs)
    selection = quiet_fit(table_learner(cbs=[cb, counts]), 4).selection
    items,stats = selection.items(),selection.stats
    assert (items.seen==4).all()
    assert items.picked.tolist()==counts.times.tolist()
    assert counts.times.sum()==stats.trained.sum()<stats.seen.sum()

    epochs = stats.groupby('epoch')
    first,*others = epochs.trained.sum()-epochs.kept.sum() # what fills up an epoch's last batch
    most = 15 if kwargs.get('gather') else 0
    assert first==0
    assert all(0<=more<=most for more in others)

def test_a_second_fit_goes_on_and_an_interrupted_one_is_counted():
    learn = quiet_fit(table_learner(cbs=[tracked(), Stops()]), 2)
    selection,items = learn.selection,learn.selection.items()
    assert items.seen.sum()==100+64
    assert items.picked.sum()==selection.stats.trained.sum() # without the batch that was stopped

    learn.remove_cb(Stops)
    quiet_fit(learn, 2)
    assert selection.items().seen.sum()==100+64+200

@pytest.mark.parametrize('name', ['items','picks_by_class','show_hardest','plot_items'])
def test_a_view_of_items_says_how_to_have_them_remembered(name):
    selection = quiet_fit(short_learner().top_loss(), 2).selection
    with pytest.raises(ValueError, match=f'{name}: got .*pass track_items=True'): getattr(selection, name)()

def test_nothing_is_remembered_before_a_fit_or_off_its_learner():
    learn = short_learner().top_loss(track_items=True)
    selection = learn.selection
    with pytest.raises(ValueError, match='items: nothing is remembered.*call fit'):
        selection.items()
    quiet_fit(learn, 2).full_batches()
    with pytest.raises(ValueError, match='items: TopLossCallback was taken off its learner'): selection.items()
    assert len(selection.plot())==3

def test_what_is_remembered_of_another_learner_goes_on_and_that_is_told(capsys):
    learn = quiet_fit(short_learner().top_loss(track_items=True), 2)
    selection = learn.selection
    learn.full_batches()
    other = set_selection(short_learner(1), selection)
    with pytest.raises(ValueError, match='call fit first'): selection.items()
    quiet_fit(other, 1)
    assert 'the training set is another one, and what is remembered of each item goes on' in capsys.readouterr().out
    assert selection.items().seen.max()==3

# labels and sources
def to_x(i): return torch.randn(4, generator=torch.Generator().manual_seed(i))

def to_name(i): return 'even' if i%2==0 else 'odd'

def to_names(i): return [name for name,is_so in (('even',i%2==0),('small',i<20)) if is_so]

SPLITS = [range(48), range(48, 64)]

def datasets_learner(y_tfms, loss_func=None, n_out=2, **kwargs):
    set_seed(0)
    dls = Datasets(list(range(64)), [[to_x], y_tfms], splits=SPLITS).dataloaders(bs=16, num_workers=0)
    learn = learner_on(dls, mlp(n_out), loss_func=loss_func)
    return quiet_fit(learn.top_loss(track_items=True, **kwargs), 3)

def test_items_that_are_the_data_themselves_are_no_column():
    "A path or a row says where an item comes from; a tensor in a table says nothing"
    learn = learner_on(get_dls('digits', 32, 64, 32), small_resnet(10, .125))
    quiet_fit(learn.top_loss(track_items=True), 1)
    assert list(learn.selection.items())==['loss','total','ewma','age','rested','seen','picked','label']

def test_labels_and_items_of_datasets():
    selection = datasets_learner([to_name, Categorize()]).selection
    items = selection.items()
    assert items.label.tolist()==['even','odd']*24
    assert items.item.tolist()==list(range(48))
    assert type(items.label[0]) is str

    by_class = selection.picks_by_class()
    assert by_class.index.tolist()==['even','odd']
    assert by_class['items'].tolist()==[24,24]
    even = items[::2]
    wanted = [24, even.loss.mean(), even.picked.sum()/even.seen.sum(), even.picked.mean()]
    assert by_class.loc['even'].tolist()==pytest.approx(wanted)

def test_an_item_of_several_classes_counts_in_each():
    from fastai.data.transforms import MultiCategorize, OneHotEncode
    y_tfms = [to_names, MultiCategorize(['even','small']), OneHotEncode(2)]
    selection = datasets_learner(y_tfms, BCEWithLogitsLossFlat()).selection
    items,by_class = selection.items(),selection.picks_by_class()
    assert items.label[0]==['even','small']
    assert items.label[1]==['small']
    assert items.label[21]==[]
    assert by_class['items'].to_dict()==dict(even=24, small=20)
    assert by_class.loss['small']==pytest.approx(items.loss[:20].mean())

def test_targets_that_are_no_classes():
    numbers = quiet_fit(regression_learner().top_loss(track_items=True), 2).selection
    assert 'label' in numbers.items()
    with pytest.raises(ValueError, match='numbers of a range'): numbers.picks_by_class()

    pixels = quiet_fit(pixel_learner().top_loss(track_items=True), 2).selection
    assert 'label' not in pixels.items()
    with pytest.raises(ValueError, match='no labels of single items'): pixels.picks_by_class()

# showing items
def shown_axes(): return [ax for ax in plt.gcf().axes if ax.images]

def shown(learn, easiest=False, n=4):
    plt.close('all')
    selection = learn.selection
    show = selection.show_easiest if easiest else selection.show_hardest
    show(n)
    return [np.asarray(ax.images[0].get_array()) for ax in shown_axes()]

def hardest_of(items, n, easiest=False): return items.loss.sort_values(ascending=easiest, kind='stable').index[:n]

def check_images(images, dataset, idxs):
    "Are these the images of a dataset, as they are?"
    for image,i in zip(images, idxs, strict=True):
        np.testing.assert_allclose(image, dataset.images[i].permute(1,2,0), atol=1e-6)

def test_items_that_fastai_cannot_show():
    selection = quiet_fit(short_learner().top_loss(track_items=True), 1).selection
    refused = r'show_hardest: got items that are a Tensor.*use items\(\)'
    with pytest.raises(ValueError, match=refused): selection.show_hardest()

def titles(): return [dict(line.split(' ', 1) for line in ax.get_title().split('\n')) for ax in shown_axes()]

@pytest.mark.parametrize('easiest', [False, True])
def test_what_is_shown_of_items_is_of_one_moment_but_for_the_loss_that_they_are_found_by(easiest):
    learn = quiet_fit(image_learner(cbs=tracked(), n=36), 2)
    shown(learn, easiest)
    items,ds = learn.selection.items(),learn.dls.train_ds
    with torch.no_grad(): pred = learn.model.eval()(ds.images)
    losses = F.cross_entropy(pred, ds.labels, reduction='none')
    assert [int(title['item']) for title in titles()]==hardest_of(items, 4, easiest).tolist()
    for title in titles():
        i = int(title['item'])
        now = dict(predicted=str(int(pred[i].argmax())), loss=f'{float(losses[i]):.3g}')
        assert title==dict(label=str(items.label[i]), **now, remembered=f'{items.loss[i]:.3g}', item=str(i))

@pytest.mark.parametrize('easiest', [False, True])
def test_the_hardest_items_are_shown_as_they_are(easiest):
    "By losses that are computed anew, of a network that stays as it is"
    learn = image_learner(cbs=tracked(), n=36)
    learn.model = nn.Sequential(nn.Flatten(), nn.Linear(3*12*12, 3))
    learn.dls.train.after_batch.fs.clear()
    quiet_fit(learn, 2, lr=0.)
    ds = learn.dls.train_ds
    losses = F.cross_entropy(learn.model(ds.images), ds.labels, reduction='none').detach()
    check_images(shown(learn, easiest), ds, losses.argsort(descending=not easiest)[:4])

@pytest.mark.parametrize('show', [dict(), dict(n=12, nrows=2, figsize=(8,4))])
def test_titles_are_whole_in_a_file(show):
    learn = quiet_fit(image_learner(cbs=tracked(), n=36), 2)
    learn.selection.show_hardest(**show)
    fig = plt.gcf()
    fig.canvas.draw() # once, as `savefig` does
    for ax in shown_axes():
        extent = ax.title.get_window_extent()
        assert 0<=extent.y0 and extent.y1<=fig.bbox.y1
        assert extent.y0>=ax.get_window_extent().y1

@pytest.mark.parametrize('n,columns', [(3,3), (4,2), (10,5), (18,6)])
def test_as_many_columns_as_suit_a_screen(n, columns):
    "With no place empty"
    learn = quiet_fit(image_learner(cbs=tracked(), n=36), 2)
    learn.selection.show_hardest(n)
    assert {ax.get_gridspec().get_geometry() for ax in shown_axes()}=={(n//columns, columns)}
    width,height = plt.gcf().get_size_inches()
    assert width==pytest.approx(max(4.2, 1.4*columns))
    assert height<1.7*width

def test_most_and_least_picked_items_of_each_class():
    selection = quiet_fit(image_learner(cbs=tracked(), n=76), 4).selection
    selection.show_picked(n=2, classes=[2,0])
    items,all_titles = selection.items(),titles()
    for label in (2,0):
        of_class = [title for title in all_titles if title['label']==str(label)]
        idxs = [int(title['item']) for title in of_class]
        picked = items[items.label==label].picked
        assert picked[idxs[:2]].tolist()==picked.nlargest(2).tolist()
        assert picked[idxs[:1:-1]].tolist()==picked.nsmallest(2).tolist()
        assert [title['picked'] for title in of_class]==[f'{items.picked[i]} of {items.seen[i]}' for i in idxs]
    assert len(all_titles)==8
    with pytest.raises(ValueError, match='show_picked: got classes .7., wanted'): selection.show_picked(classes=[7])

def look_at_everything(learn):
    selection = learn.selection
    selection.items()
    selection.picks_by_class()
    selection.plot()
    selection.show_picked(1)

def test_showing_changes_nothing_and_augments_nothing():
    def fitted(): return quiet_fit(image_learner(cbs=tracked(), n=36), 2)
    def loader_state(learn): return learn.dls.train.rng.getstate()
    looked_at = fitted()
    before = random_states(),loader_state(looked_at)
    images,ds = shown(looked_at),looked_at.dls.train_ds
    check_images(images, ds, hardest_of(looked_at.selection.items(), 4))
    look_at_everything(looked_at)
    assert (random_states(),loader_state(looked_at))==before
    assert ds.split_idx==0

    looked_at_weights = weights(quiet_fit(looked_at, 1))
    assert same(looked_at_weights, weights(quiet_fit(fitted(), 1)))

def to_grey(i): return TensorImage(torch.full((3,4,4), i/64))

class Blacken(Transform):
    "An augmentation"
    split_idx = 0

    def encodes(self, x:TensorImage): return x*0

def test_datasets_show_their_items_without_augmentation():
    set_seed(0)
    dsets = Datasets(list(range(64)), [[to_grey], [to_name, Categorize()]], splits=SPLITS)
    dls = dsets.dataloaders(bs=16, num_workers=0, after_batch=Blacken())
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 2))
    learn = learner_on(dls, model).top_loss(track_items=True)
    images = shown(quiet_fit(learn, 2))
    for image,title,i in zip(images, titles(), hardest_of(learn.selection.items(), 4), strict=True):
        assert np.allclose(image, i/64)
        assert title['label']==to_name(i)
        assert title['predicted'] in ('even','odd')
        assert title['item']==str(i)

    assert dsets.train.split_idx==0
    assert float(dls.train.one_batch()[0].sum())==0

def patients(n=80):
    "A table with all that is processed: names, numbers, and what is missing of both"
    draws = np.random.default_rng(0)
    i = np.arange(n)
    table = dict(
        age=20+i%50,
        glucose=draws.normal(90, 9, n).round(2),
        city=np.where(i%3==0, 'Rome', 'Oslo').astype(object),
        pains=i%5==0,
        ill=np.where(i%2==0, 'yes', 'no'))
    df = pd.DataFrame(table, index=[f'p{k}' for k in i])
    df.loc[df.index[::7],'glucose'] = np.nan
    df.loc[df.index[::11],'city'] = None
    return df

@pytest.mark.parametrize('procs', [('Categorify','FillMissing','Normalize'), ('FillMissing','Categorify'),
    ('Categorify',)], ids='-'.join)
@pytest.mark.parametrize('reduce_memory', [True, False])
def test_lists_have_the_columns_of_a_table_as_fastai_decodes_them(procs, reduce_memory):
    from fastai.tabular import core
    from fastai.tabular.learner import tabular_learner
    set_seed(0)
    df = patients() if 'FillMissing' in procs else patients().fillna(dict(glucose=90.))
    table = core.TabularPandas(df, [getattr(core, name) for name in procs], ['city','pains'], ['age','glucose'], 'ill',
        splits=[list(range(64)), list(range(64, 80))], reduce_memory=reduce_memory)
    codes = table.items.copy()
    learn = tabular_learner(table.dataloaders(bs=16), layers=[8]).watch_items(valid=True)
    selection = quiet_fit(learn, 1).selection
    lists = dict(suspects=(selection.suspects(), 'age'), items=(selection.items(), 'age_of_item'))
    for listed,age in lists.values():
        own = df.loc[listed.index]
        assert listed[age].tolist()==own.age.tolist()
        is_known = own.glucose.notna()
        assert listed.glucose[is_known].tolist()==pytest.approx(own.glucose[is_known].tolist(), abs=1e-9)
        assert is_known.all() or (listed.glucose_na.astype(str)=='True').equals(~is_known)
        assert (listed.city=='#na#').equals(own.city.isna())
        for name in 'city','pains','ill': assert listed[name][own[name].notna()].tolist()==own[name].dropna().tolist()
    pd.testing.assert_frame_equal(table.items, codes) # what trains is as it was

def test_tables_show(monkeypatch):
    "Each item's age is its number"
    from fastai.tabular.all import Categorify, TabularDataLoaders, tabular_learner
    set_seed(0)
    i = np.arange(80)
    df = pd.DataFrame(dict(age=i.astype(float), kind=np.where(i%3==0, 'a', 'b'), good=np.where(i%2==0, 'yes', 'no')))
    columns = dict(cat_names=['kind'], cont_names=['age'], y_names='good', valid_idx=[*range(64, 80)])
    dls = TabularDataLoaders.from_df(df, procs=[Categorify], bs=16, num_workers=0, **columns)
    learn = quiet_fit(tabular_learner(dls, layers=[8]).top_loss(track_items=True), 2)
    items,drawn = learn.selection.items(),[]
    assert items.label.tolist()==['yes','no']*32
    hardest = hardest_of(items, 3)
    monkeypatch.setattr('selback.views.pictures.display_rows', drawn.append)
    learn.selection.show_hardest(3)
    facts, = drawn
    assert facts.age.round().tolist()==facts.item.tolist()==hardest.tolist()
    assert facts.good.tolist()==df.good[hardest].tolist()
    assert facts.label.tolist()==items.label[hardest].tolist()
    assert facts.predicted.isin(['yes','no']).all()
    assert facts.remembered.astype(float).tolist()==pytest.approx(items.loss[hardest].tolist(), rel=.01)

def test_a_table_is_text_outside_of_a_notebook(capsys):
    display_rows(pd.DataFrame(dict(label=['yes'])))
    assert 'yes' in capsys.readouterr().out

def text_loaders():
    "Item i has 1+i%5 words"
    from fastai.data.block import CategoryBlock, DataBlock
    from fastai.data.transforms import ColReader, ColSplitter
    from fastai.text.core import BaseTokenizer
    from fastai.text.data import TextBlock
    words = 'one two six ten red'.split()
    texts = [' '.join(words[:1+i%5]) for i in range(40)]
    df = pd.DataFrame(dict(text=texts, label=['a','b']*20, is_valid=[False]*32+[True]*8))
    blocks = TextBlock.from_df('text', tok=BaseTokenizer(), n_workers=0),CategoryBlock
    columns = dict(get_x=ColReader('text'), get_y=ColReader('label'), splitter=ColSplitter())
    return DataBlock(blocks, **columns).dataloaders(df, bs=8, num_workers=0)

def test_texts_show(monkeypatch):
    set_seed(0)
    dls = text_loaders()
    learn = learner_on(dls, nn.EmbeddingBag(len(dls.vocab[0]), 2))
    selection = quiet_fit(learn.top_loss(track_items=True), 2).selection
    assert selection.items().label.tolist()==['a','b']*16

    drawn = []
    monkeypatch.setattr('selback.views.pictures.display_rows', drawn.append)
    selection.show_hardest(3)
    hardest,rows = hardest_of(selection.items(), 3),drawn[0]
    assert rows.label.tolist()==[['a','b'][i%2] for i in hardest]
    assert [len(text.split())-1 for text in rows.text]==[1+i%5 for i in hardest]
    assert rows['item'].tolist()==hardest.tolist()
    assert rows.predicted.isin(['a','b']).all()

@pytest.mark.parametrize('n', [50,100])
def test_items_of_another_training_set_are_not_shown(n):
    learn = quiet_fit(table_learner().top_loss(track_items=True, warmup=0), 1)
    learn.dls = table_learner(n=32+n).dls
    refused = f'got a training set of {n} items, of which nothing is remembered.* the one with 100 that trained'
    for ask in (learn.selection.items, learn.selection.show_hardest):
        with pytest.raises(ValueError, match=refused): ask()
