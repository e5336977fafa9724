"What can be seen of a selection is what happened"
import pickle

import matplotlib
matplotlib.use('agg')
import matplotlib.pyplot as plt, numpy as np, pandas as pd, pytest, torch
from fastai.callback.core import Callback, CancelFitException, CancelTrainException
from fastai.data.core import Datasets
from fastai.data.transforms import Categorize
from fastai.torch_basics import Transform
from helpers import *
from selback.callback.report import SelectionReport
from selback.bench.datasets import get_dls, small_resnet
from torch.nn import functional as F

@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close('all')

def lines(ax): return {l.get_label().split(', loss')[0]: l.get_xydata() for l in ax.lines}

class Still(Callback):
    "No weight moves"
    def before_step(self): self.opt.set_hyper('lr', 0.)

def linear_learner(cb, n=132, bs=16, still=True, **kwargs):
    "A linear model, whose losses can be computed again"
    set_seed(0)
    return Learner(dls_of(*class_data(n), bs=bs, **kwargs), nn.Linear(4, 3), loss_func=CrossEntropyLossFlat(), cbs=[cb, Still()] if still else cb)

def losses_of(learn):
    "The loss of each training item, computed from the dataset itself"
    x,y = learn.dls.train_ds.tensors
    return F.cross_entropy(learn.model(x), y, reduction='none').detach()

# the sample of losses
class Watched(TopLossCallback):
    "Notes what it chose from"
    def __init__(self, **kwargs): super().__init__(**kwargs); self.seen = []
    def choose(self, scores):
        chosen = super().choose(scores)
        self.seen += zip([self.epoch]*len(scores), scores.tolist(), torch.zeros(len(scores)).index_fill_(0, chosen.rows, 1).bool().tolist())
        return chosen

def test_a_sample_of_few_items_is_all_of_them():
    learn = quiet_fit(table_learner(cbs=Watched(keep=.5, warmup=0)), 3)
    samples = learn.selection.report.samples
    assert list(zip(samples.epoch, samples.loss, samples.chosen))==learn.selection.seen and samples.fit.eq(1).all()

def told(n_iter, bs, choose=lambda losses: torch.arange(3)):
    report = SelectionReport()
    report.begin_fit()
    report.begin_epoch(0, n_iter)
    for i in range(n_iter):
        losses = i*bs+torch.arange(float(bs))
        report.step(i, bs, 3, 3, losses, choose(losses))
    return report

@pytest.mark.parametrize('n_iter,bs,every', [(200, 64, 7), (50, 63, 2), (3000, 4, 6), (5000, 3, 8), (32, 64, 1), (33, 64, 2)])
def test_a_sample_of_many_items_is_small_and_even(n_iter, bs, every):
    samples = told(n_iter, bs).samples
    assert 1024<=len(samples)<=2048 and samples.loss.tolist()==[float(i*bs+row) for i in range(0, n_iter, every) for row in range(bs)]
    assert (samples.chosen==(samples.loss%bs<3)).all()

def test_a_sample_of_a_batch_that_is_larger():
    samples = told(2, 5000).samples
    assert samples.loss.tolist()==list(range(0, 5000, 3)) and samples.chosen.sum()==1

def test_a_sample_where_few_batches_are_scored():
    "With `presample` the first batch of each pair only waits"
    learn = table_learner(n=16*200, cbs=TopLossCallback(keep=.5, warmup=0, gather=True, presample=2, interrupt=3))
    learn._do_epoch_validate = lambda *args: None
    assert 400<len(quiet_fit(learn, 1).selection.report.samples)<=2048

def test_an_interrupted_epoch_has_a_sample_and_keeps_its_number():
    class Stop(Callback):
        order = SelectionCallback.order+1
        def before_batch(self):
            if self.training and (self.epoch,self.iter)==(1,3): raise CancelFitException
    learn = quiet_fit(table_learner(cbs=[Watched(keep=.5, warmup=0), Stop()]), 3)
    assert learn.selection.report.samples.groupby('epoch').size().to_dict()=={0:100, 1:64}
    learn.remove_cb(Stop)
    quiet_fit(learn, 2)
    samples = learn.selection.report.samples
    assert samples.groupby(['fit','epoch']).size().to_dict()=={(1,0):100, (1,1):64, (2,0):100, (2,1):100}
    assert samples.loss.tolist()==pytest.approx([loss for _,loss,_ in learn.selection.seen])

@pytest.mark.parametrize('make', [lambda: InfoBatchCallback(), lambda: StaleLossCallback(n=3, beta=1)])
def test_samples_of_items_chosen_before_loading(make):
    remembered,loaded = {},{}
    class Watch(Callback):
        order,run_valid = SelectionCallback.order+1,False
        def before_train(self):
            remembered[self.epoch],loaded[self.epoch] = self.learn.selection.memory.loss.clone(),self.learn.selection.tracker.idxs
    learn = quiet_fit(table_learner(cbs=[make(), Watch()], drop_last=True), 4)
    samples = learn.selection.report.samples
    for epoch in (1,2):
        sample = samples[samples.epoch==epoch]
        memory = remembered[epoch]
        if isinstance(learn.selection, InfoBatchCallback): assert len(sample)==100
        known = sample[sample.loss.notna()]
        assert sorted(known.loss)==pytest.approx(sorted(memory[~memory.isnan()].tolist())) or isinstance(learn.selection, StaleLossCallback)
        if learn.selection.stats.query(f'epoch=={epoch}').step.min()<0:
            assert sorted(sample[sample.chosen].loss.dropna())==pytest.approx(sorted(memory[loaded[epoch]][~memory[loaded[epoch]].isnan()].tolist()))

def test_what_is_drawn_from_a_pool_of_batches_is_known():
    "Also of the smaller one at an epoch's end, and so is its share of the loss"
    seen = []
    class Draws(ImportanceSamplingCallback):
        def choose_from(self, pool, batch, scores, losses):
            chosen = super().choose_from(pool, batch, scores, losses)
            seen.append((self.epoch, losses, chosen.rows))
            return chosen
    learn = quiet_fit(table_learner(cbs=Draws(tau=0, warmup=0)), 2)
    samples,names = learn.selection.report.samples,list(learn.recorder.metric_names)[1:]
    assert samples.loss.tolist()==sum((losses.tolist() for _,losses,_ in seen), [])
    assert samples.chosen.tolist()==sum((torch.zeros(len(losses)).index_fill_(0, rows, 1).bool().tolist() for _,losses,rows in seen), [])
    for epoch,values in enumerate(learn.recorder.values):
        pools = [(losses,rows) for e,losses,rows in seen if e==epoch]
        assert [len(losses) for losses,_ in pools]==([48,36] if epoch==0 else [48,48,4]) # the first batch of all trains whole
        whole = learn.selection.stats.query(f'epoch=={epoch} and not scored and seen>0')
        full = float(sum(l.sum() for l,_ in pools)) + (whole.full_loss*whole.seen).sum()
        kept = float(sum(l[r].sum() for l,r in pools)) + (whole.full_loss*whole.seen).sum()
        assert dict(zip(names, values))['loss_perc']==pytest.approx(kept/full, rel=1e-5)

def test_random_subsets_have_no_losses():
    learn = quiet_fit(table_learner().random_subset(warmup=0), 2)
    assert learn.selection.report.samples.empty
    (kept,) = learn.selection.plot() # no empty panels
    assert lines(kept)['of each batch'][:6,1].tolist()==[.5]*6

def test_a_panel_without_chosen_items_is_left_out():
    learn = quiet_fit(table_learner().top_loss(warmup=0), 1)
    samples = learn.selection.report.samples
    assert len(selection_figure(learn.selection.stats, samples).axes)==3 and len(selection_figure(learn.selection.stats, samples.assign(chosen=False)).axes)==2

def type_sizes(fig):
    "The sizes of all type, in points, on a screen of 390 pixels, 96 to an inch"
    fig.canvas.draw()
    return [t.get_fontsize()*390/96/fig.get_figwidth() for t in fig.findobj(matplotlib.text.Text) if t.get_visible() and t.get_text().strip()]

def test_pictures_can_be_read_on_a_phone():
    learn = quiet_fit(image_learner(cbs=TopLossCallback(track_items=True)), 4)
    selection = learn.selection
    views = [selection.plot, selection.plot_items, selection.show_hardest, selection.show_easiest, lambda: selection.show_picked(1),
        lambda: plot_pick_rates(pick_rates(selection, 2)), lambda: plot_by_percentile(by_percentile(learn, bins=4))]
    for view in views:
        plt.close('all')
        view()
        assert min(type_sizes(plt.gcf()))>8.5, view

def test_bands_are_named():
    learn = quiet_fit(table_learner().top_loss(warmup=0), 2)
    kept,*_ = learn.selection.plot()
    assert 'epochs shown below' in [t.get_text() for t in kept.get_legend().get_texts()] and len(kept.patches)==2

# the figure
def test_distribution_is_numpys():
    losses = np.random.default_rng(0).exponential(size=999)
    x,share = loss_cdf([*losses, np.nan, np.inf])
    for q in (.1,.5,.99): assert np.isclose(np.interp(q, share, x), np.quantile(losses, q, method='interpolated_inverted_cdf'))
    assert np.allclose(share, [(losses<=v).mean() for v in x])

def test_means_by_quantile():
    rows = by_quantile([5., 1., np.nan, 2., 4., 3.], dict(chosen=pd.array([True,False,True,None,True,False], dtype='boolean')), bins=2)
    assert rows.percentile.tolist()==[50,100] and rows['items'].tolist()==[3,2] and rows.loss.tolist()==[2,4.5] and rows.chosen.tolist()==[0,1]
    assert by_quantile([1.,2.], {}, bins=9)['items'].tolist()==[1,1] and not len(by_quantile([np.nan], {}))

def test_the_hardest_are_chosen_from_a_single_batch_as_a_step():
    learn = quiet_fit(table_learner(cbs=TopLossCallback(keep=.3, warmup=0), n=132, bs=100), 3)
    _,cdf,chosen = learn.recorder.plot_selection()
    samples = learn.selection.report.samples
    assert list(lines(cdf))==['epoch 0','epoch 1','epoch 2']
    for epoch in range(3):
        xy = lines(chosen)[f'epoch {epoch}']
        assert xy[:,0].tolist()==[5,15,25,35,45,55,65,75,85,95] and xy[:,1].tolist()==[0]*7+[1]*3
        losses = np.sort(samples[samples.epoch==epoch].loss)
        assert np.allclose(lines(cdf)[f'epoch {epoch}'], np.stack([losses, np.arange(1, 101)/100], 1))

def test_random_choices_are_even_over_the_losses():
    class Blind(TopLossCallback):
        def choose(self, scores): return super().choose(torch.rand(len(scores), generator=self.generator))
    learn = quiet_fit(table_learner(cbs=Blind(keep=.5, warmup=0), n=1032), 2)
    for xy in lines(learn.selection.plot()[2]).values(): assert np.abs(xy[:,1]-.5).max()<.2

def test_kept_share_adds_up_however_items_are_left_out():
    for cb in (StaleLossCallback(n=3), InfoBatchCallback(), SelectiveBackpropCallback(), ImportanceSamplingCallback(tau=0)):
        learn = quiet_fit(table_learner(cbs=cb), 5)
        steps,stats = kept_share(learn.selection.stats, 1),learn.selection.stats
        assert len(steps)==(stats.step>=0).sum() and (steps.share==steps.smooth).all()
        for epoch,row in enumerate(learn.recorder.values):
            where,kept = steps.epoch==epoch,stats[(stats.epoch==epoch) & (stats.step>=0)].kept.to_numpy()
            share = steps.share[where].to_numpy()
            seen = np.divide(kept, share, where=share>0, out=np.zeros(len(share)))
            if (share>0).all(): assert kept.sum()/seen.sum()==pytest.approx(row[2])
    whole = kept_share(learn.selection.stats, len(steps)*2).smooth
    assert np.allclose(whole, stats.kept.sum()/stats.seen.sum())

def test_epochs_of_several_fits_are_told_apart():
    learn = quiet_fit(quiet_fit(table_learner().top_loss(), 2), 2)
    assert list(lines(learn.selection.plot()[1]))==['fit 1, epoch 1','fit 2, epoch 0','fit 2, epoch 1']
    assert len(lines(learn.selection.plot(n_epochs=2)[1]))==2
    with pytest.raises(ValueError, match='n_epochs: got 0'): learn.selection.plot(n_epochs=0)

def test_nothing_to_plot():
    learn = table_learner()
    with pytest.raises(ValueError, match='a learner without a selection'): learn.recorder.plot_selection()
    for name in ('card','plot','stats','show_hardest'):
        with pytest.raises(AttributeError, match=rf'learn.selection.{name}: got a learner without.*learn.selective_backprop\(\)'): getattr(learn.selection, name)
    assert not learn.selection and hasattr(learn, 'selection') and not hasattr(learn.selection, 'card') and 'learn.selective_backprop()' in repr(learn.selection)
    assert not quiet_fit(table_learner().top_loss(), 1).full_batches().selection
    quiet_fit(learn.top_loss(warmup=2), 2)
    with pytest.raises(ValueError, match='nothing was selected yet in 14 batches.*warmup=0'): learn.recorder.plot_selection()

def test_plots_at_any_time(capsys):
    "In the middle of a fit, after the learning rate finder, and after losses that are not finite"
    class Look(Callback):
        order = 60
        def after_batch(self):
            if self.training and (self.epoch,self.iter) in ((1,2),(2,0)): figures.append(self.learn.selection.plot())
    figures,learn = [],table_learner(cbs=[TopLossCallback(), Look()])
    quiet_fit(learn, 3)
    assert len(figures)==2
    before = learn.selection.report.samples
    with learn.no_bar(): learn.lr_find(num_it=5, show_plot=False)
    pd.testing.assert_frame_equal(before, learn.selection.report.samples)
    samples = pd.DataFrame(dict(fit=1, epoch=0, loss=[np.nan,np.inf,1.,2.], chosen=[True]*4))
    assert len(lines(selection_figure(learn.selection.stats, samples).axes[1])['epoch 0'])==2

# seconds saved
def saved_secs(learn, n_epoch):
    quiet_fit(learn, n_epoch)
    return [dict(zip(learn.recorder.metric_names[1:], v))['saved_secs'] for v in learn.recorder.values]

@pytest.mark.measured
def test_seconds_saved_against_the_full_epochs():
    "Those of earlier fits count, too, under the same circumstances"
    learn = table_learner().top_loss(warmup=2)
    saved = saved_secs(learn, 4)+saved_secs(learn, 2)
    times = [t for _,t in learn.selection.meter.epoch_times]
    assert saved[0]==0 and saved[1:]==pytest.approx([(times[0]+times[1])/2-t for t in times[1:]])

@pytest.mark.measured
@pytest.mark.parametrize('cls', methods(), ids=one_liner)
def test_seconds_saved_are_known_unless_nothing_is_measured(cls):
    assert not np.isnan(saved_secs(table_learner(cbs=cls(warmup=0)), 2)).any() and np.isnan(saved_secs(table_learner(cbs=cls(warmup=0, auto=False)), 1)).all()

@pytest.mark.measured
def test_seconds_saved_are_known_in_both_fits_of_fine_tune():
    "The second one trains all layers: what was measured of the first is of no use to it"
    learn = table_learner(splitter=lambda m: [list(m[0].parameters()), list(m[1:].parameters())], cbs=TopLossCallback(.25)) # the first epoch is full
    saved = []
    class Notes(Callback):
        order = 99
        def after_fit(self): saved.append([v[-1] for v in self.recorder.values])
    quiet_fit(learn.add_cb(Notes()), 2, 'fine_tune')
    assert [len(o) for o in saved]==[1,2] and not np.isnan(sum(saved, [])).any() and len(learn.selection.meter.epoch_times)==2

@pytest.mark.measured
def test_a_warm_up_is_the_plain_epoch_of_what_is_chosen_before_loading():
    learn = table_learner().favor_hard()
    saved,times = saved_secs(learn, 3),learn.selection.meter.epoch_times
    assert [share for share,_ in times]==[0,1,1] and saved==pytest.approx([times[0][1]-took for _,took in times])

@pytest.mark.measured
@pytest.mark.parametrize('cls', [TopLossCallback, FavorHardCallback])
def test_an_epoch_that_was_stopped_saved_nothing(cls):
    class Stop(Callback):
        order = 60
        def after_batch(self):
            if self.training and self.epoch in (0,2) and self.iter==1: raise CancelTrainException
        def after_epoch(self): saved.append(self.learn.selection.meter.saved_secs)
    saved = []
    learn = quiet_fit(table_learner(cbs=[cls(), Stop()]), 4)
    assert np.isnan([saved[0],saved[2]]).all() and not np.isnan(saved[3]) and len(learn.selection.meter.epoch_times)==2

class _HarderHalf(EpochSelection):
    "The half with the highest remembered losses"
    def choose_items(self, idxs):
        loss = self.memory.loss[idxs]
        rows = loss.topk(len(idxs)//2).indices
        self.expected = len(rows)/len(loss),(loss[rows].sum()/loss.sum()).item(),loss.mean().item()
        return Chosen(rows)

def test_the_columns_of_an_epoch_go_by_the_losses_it_was_chosen_by():
    "Or hard items, once trained, would seem to have had the smaller share of the loss"
    learn = quiet_fit(table_learner(cbs=_HarderHalf()), 2)
    assert learn.selection.report.log[:3]==pytest.approx(learn.selection.expected) and learn.selection.expected[1]>.5

# tracking
def run(cls, make, **kwargs):
    learn = quiet_fit(make(cbs=cls(seed=0, **kwargs)), 3)
    return weights(learn),learn.selection.stats,random_states(),learn.selection

@pytest.mark.parametrize('cls', methods(), ids=one_liner)
@pytest.mark.parametrize('make', [image_learner, lambda cbs: table_learner(cbs=[cbs, MixUp(.4)])], ids=['image','table_mixup'])
def test_tracking_changes_nothing(cls, make):
    plain,tracked = run(cls, make, warmup=1),run(cls, make, warmup=1, track_items=True)
    assert same(plain[0], tracked[0]) and plain[2]==tracked[2]
    pd.testing.assert_frame_equal(plain[1].drop(columns='full_loss'), tracked[1].drop(columns='full_loss'))
    assert tracked[3].items().picked.sum()==tracked[1].trained.sum()

@pytest.mark.parametrize('kwargs', [dict(), dict(gather=True), dict(passes=1), dict(gather=True, presample=2)], ids=str)
def test_picks_add_up_to_what_trained(kwargs):
    trained = torch.zeros(100, dtype=torch.int32)
    class Count(Callback):
        order,run_valid = 60,False
        def after_loss(self): trained.index_add_(0, self.learn.selection.item_idx, torch.ones(len(self.y), dtype=torch.int32))
    learn = quiet_fit(table_learner(cbs=[TopLossCallback(keep=.3, track_items=True, **kwargs), Count()]), 4)
    items,stats = learn.selection.items(),learn.selection.stats
    assert items.picked.tolist()==trained.tolist() and trained.sum()==stats.trained.sum()<stats.seen.sum()
    more = (stats.groupby('epoch').trained.sum()-stats.groupby('epoch').kept.sum()).tolist() # what fills up an epoch's last batch
    assert (items.seen==4).all() and more[0]==0 and all(0<=m<16 if kwargs.get('gather') else m==0 for m in more)

def test_items_of_workers_and_a_dropped_last_batch():
    learn = linear_learner(TopLossCallback(keep=.5, track_items=True), drop_last=True)
    learn.dls.loaders[0] = learn.dls.train.new(num_workers=2)
    quiet_fit(learn, 2)
    items = learn.selection.items()
    seen = items.loss.notna().to_numpy()
    assert 96<=seen.sum()<=100 and items.loss[seen].to_numpy()==pytest.approx(losses_of(learn)[seen].numpy(), rel=1e-5)
    assert (items.label==learn.dls.train_ds.tensors[1].numpy()).all() and items.index.name=='idx'

@pytest.mark.parametrize('make', [lambda: StaleLossCallback(), lambda: InfoBatchCallback(), lambda: SelectiveBackpropCallback(track_items=True),
    lambda: TopLossCallback(track_items=True), lambda: RandomSubsetCallback(before_loading=True, track_items=True)])
def test_remembered_losses_are_the_losses(make):
    learn = quiet_fit(linear_learner(make()), 5)
    assert learn.selection.items().loss.to_numpy()==pytest.approx(losses_of(learn).numpy(), rel=1e-5)

def test_a_second_fit_goes_on_and_an_interrupted_one_is_counted():
    class Stop(Callback):
        order = SelectionCallback.order+1
        def before_batch(self):
            if self.training and (self.epoch,self.iter)==(1,3): raise CancelFitException
    learn = quiet_fit(table_learner(cbs=[TopLossCallback(track_items=True), Stop()]), 2)
    items = learn.selection.items()
    assert items.seen.sum()==100+64 and items.picked.sum()==learn.selection.stats.trained.sum()-8 # the batch that was stopped
    learn.remove_cb(Stop)
    quiet_fit(learn, 2)
    assert learn.selection.items().seen.sum()==100+64+200 and [e for e,_ in learn.selection.tracker.picks_by_epoch]==[1,2,3]

def test_lr_find_leaves_items_alone():
    learn = quiet_fit(table_learner().top_loss(track_items=True), 2)
    before = learn.selection.items()
    with learn.no_bar(): learn.lr_find(num_it=5, show_plot=False)
    pd.testing.assert_frame_equal(before, learn.selection.items())

def test_nothing_is_remembered():
    learn = quiet_fit(table_learner().top_loss(), 2)
    for call in (learn.selection.items, learn.selection.picks_by_class, learn.selection.show_hardest, learn.selection.show_easiest, learn.selection.plot_items):
        with pytest.raises(ValueError, match=f'{call.__name__}: got a TopLossCallback.*pass track_items=True'): call()
    with pytest.raises(ValueError, match='pass track_items=True'): quiet_fit(table_learner().random_subset(before_loading=True), 2).selection.items()
    with pytest.raises(ValueError, match='pass noise_quantile'): learn.selection.suspected_label_errors()
    selection = (learn := table_learner().top_loss(track_items=True)).selection
    with pytest.raises(ValueError, match='items: nothing is remembered of the items yet; call fit first'): selection.items()
    quiet_fit(learn, 2).full_batches()
    with pytest.raises(ValueError, match='items: TopLossCallback was taken off its learner'): selection.items()
    assert len(selection.plot())==3
    with pytest.raises(ValueError, match='pass track_items=True'): pick_rates(table_learner().top_loss().selection)

def test_loaders_whose_items_are_unknown_are_refused():
    learn = table_learner()
    learn.dls.loaders[0] = torch.utils.data.DataLoader(learn.dls.train_ds, batch_size=16)
    with pytest.raises(TypeError, match="use fastai's DataLoader"): quiet_fit(learn.top_loss(track_items=True), 1)

def test_what_is_remembered_stays_with_its_learner(tmp_path):
    learn = quiet_fit(table_learner().top_loss(track_items=True), 2)
    selection = learn.selection
    assert pickle.loads(pickle.dumps(learn)).selection.tracker.picks_by_epoch==()
    other = set_selection(table_learner(1), selection)
    with pytest.raises(ValueError, match='call fit first'): selection.items()
    quiet_fit(other, 1)
    assert selection.items().seen.eq(1).all() and len(selection.tracker.picks_by_epoch)==1

# labels and sources
def to_x(i): return torch.randn(4, generator=torch.Generator().manual_seed(i))
def to_name(i): return 'even' if i%2==0 else 'odd'
def to_names(i): return [o for o,is_so in (('even',i%2==0),('small',i<20)) if is_so]

def datasets_learner(y_tfms, loss_func=None, n_out=2, **kwargs):
    set_seed(0)
    dls = Datasets(list(range(64)), [[to_x], y_tfms], splits=[range(48), range(48, 64)]).dataloaders(bs=16, num_workers=0)
    return quiet_fit(Learner(dls, mlp(n_out), loss_func=loss_func or CrossEntropyLossFlat()).top_loss(track_items=True, **kwargs), 3)

def test_items_that_are_the_data_themselves_are_no_column():
    "A path or a row says where an item comes from; a tensor in a table says nothing"
    learn = quiet_fit(Learner(get_dls('digits', 32, 64, 32), small_resnet(10, .125), CrossEntropyLossFlat()).top_loss(track_items=True), 1)
    assert list(learn.selection.items())==['loss','ewma','age','rested','seen','picked','label']

def test_labels_and_items_of_datasets():
    selection = datasets_learner([to_name, Categorize()]).selection
    items = selection.items()
    assert items.label.tolist()==['even','odd']*24 and items.item.tolist()==list(range(48)) and type(items.label[0]) is str
    by = selection.picks_by_class()
    assert by.index.tolist()==['even','odd'] and by['items'].tolist()==[24,24]
    even = items[::2]
    assert by.loc['even'].tolist()==pytest.approx([24, even.loss.mean(), even.picked.sum()/even.seen.sum(), even.picked.mean()])

def test_an_item_of_several_classes_counts_in_each():
    from fastai.data.transforms import MultiCategorize, OneHotEncode
    selection = datasets_learner([to_names, MultiCategorize(['even','small']), OneHotEncode(2)], BCEWithLogitsLossFlat()).selection
    items,by = selection.items(),selection.picks_by_class()
    assert items.label[0]==['even','small'] and items.label[1]==['small'] and items.label[21]==[] and by['items'].to_dict()==dict(even=24, small=20)
    assert by.loss['small']==pytest.approx(items.loss[:20].mean())

def test_targets_that_are_no_classes():
    learn = quiet_fit(regression_learner().top_loss(track_items=True), 2)
    assert 'label' in learn.selection.items()
    with pytest.raises(ValueError, match='numbers of a range'): learn.selection.picks_by_class()
    set_seed(0)
    dense = Learner(dls_of(torch.randn(48, 3, 4, 4), torch.randint(0, 3, (48,4,4)), bs=8, n_valid=16), nn.Conv2d(3, 3, 1), loss_func=CrossEntropyLossFlat(axis=1))
    quiet_fit(dense.top_loss(track_items=True), 2)
    assert 'label' not in dense.selection.items()
    with pytest.raises(ValueError, match='no labels of single items'): dense.selection.picks_by_class()

# showing items
def shown(learn, easiest=False, n=4):
    plt.close('all')
    (learn.selection.show_easiest if easiest else learn.selection.show_hardest)(n)
    return [np.asarray(ax.images[0].get_array()) for ax in plt.gcf().axes if ax.images]

def test_items_that_fastai_cannot_show():
    with pytest.raises(ValueError, match=r'show_hardest: got items that are a Tensor.*use items\(\)'): quiet_fit(table_learner().top_loss(track_items=True), 1).selection.show_hardest()

@pytest.mark.parametrize('easiest', [False, True])
def test_the_hardest_items_are_shown_as_they_are(easiest):
    learn = image_learner(cbs=[TopLossCallback(track_items=True), Still()])
    learn.model = nn.Sequential(nn.Flatten(), nn.Linear(3*12*12, 3)) # no BatchNorm
    learn.dls.train.after_batch.fs.clear() # no augmentation, so that the losses can be computed again
    quiet_fit(learn, 2)
    ds = learn.dls.train_ds
    losses = F.cross_entropy(learn.model(ds.images), ds.labels, reduction='none').detach()
    images = shown(learn, easiest)
    assert len(images)==4
    for image,i in zip(images, losses.argsort(descending=not easiest)[:4]): np.testing.assert_allclose(image, ds.images[i].permute(1,2,0), atol=1e-6)

def titles(): return [dict(line.split(' ', 1) for line in ax.get_title().split('\n')) for ax in plt.gcf().axes if ax.images]

def test_shown_items_have_target_prediction_loss_and_index():
    learn = quiet_fit(image_learner(cbs=TopLossCallback(track_items=True)), 2)
    shown(learn)
    items,ds = learn.selection.items(),learn.dls.train_ds
    with torch.no_grad(): predicted = learn.model.eval()(ds.images).argmax(1)
    hardest = items.sort_values('loss', ascending=False, kind='stable').index[:4]
    assert [int(t['item']) for t in titles()]==hardest.tolist()
    for t in titles():
        i = int(t['item'])
        assert t==dict(target=str(items.label[i]), predicted=str(int(predicted[i])), loss=f'{items.loss[i]:.3g}', item=str(i))

def test_most_and_least_picked_items_of_each_class():
    learn = quiet_fit(image_learner(cbs=TopLossCallback(track_items=True), n=76), 4)
    learn.selection.show_picked(n=2)
    items,told = learn.selection.items(),titles()
    assert [t['target'] for t in told]==[str(c) for c in range(3) for _ in range(4)]
    for c in range(3):
        own,row = items[items.label==c].picked,[int(t['item']) for t in told[4*c:4*c+4]]
        assert own[row].tolist()[:2]==own.nlargest(2).tolist() and own[row].tolist()[:1:-1]==own.nsmallest(2).tolist()
        assert [t['picked'] for t in told[4*c:4*c+4]]==[f'{items.picked[i]} of {items.seen[i]}' for i in row]
    learn.selection.show_picked(n=1, classes=[2])
    assert [t['target'] for t in titles()]==['2','2']
    with pytest.raises(ValueError, match='show_picked: got 0 items of class 7'): learn.selection.show_picked(classes=[7])

def test_rates_of_picks_by_hand():
    learn = quiet_fit(table_learner().top_loss(keep=.5, track_items=True), 4)
    counts = [torch.zeros(100), *(p for _,p in learn.selection.tracker.picks_by_epoch)]
    rates = pick_rates(learn.selection, last=3)
    assert rates.index.tolist()==[3,4] and rates.columns.tolist()==[0,1,2,3] and np.allclose(rates.sum(axis=1), 1)
    for epoch in (3,4):
        of_late = (counts[epoch]-counts[epoch-3]).int() # each item trains once in an epoch, at most
        assert rates.loc[epoch].tolist()==pytest.approx([(of_late==k).float().mean().item() for k in range(4)])
    with pytest.raises(ValueError, match='pick_rates: got 4 epochs, wanted 5'): pick_rates(learn.selection)
    ax = plot_pick_rates(rates)
    assert len(ax.collections)==4

def test_showing_changes_nothing_and_augments_nothing():
    def last(look):
        learn = quiet_fit(image_learner(cbs=TopLossCallback(track_items=True)), 2)
        if look:
            before,rng = random_states(),learn.dls.train.rng.getstate()
            images,hardest = shown(learn),learn.selection.items().loss.sort_values(ascending=False).index[:4]
            for image,i in zip(images, hardest): np.testing.assert_allclose(image, learn.dls.train_ds.images[i].permute(1,2,0), atol=1e-6)
            learn.selection.items(),learn.selection.picks_by_class(),learn.selection.plot_items(),learn.selection.plot(),learn.selection.show_picked(1),pick_rates(learn.selection, 2),gradient_similarity(learn, 2)
            assert before==random_states() and rng==learn.dls.train.rng.getstate() and learn.dls.train_ds.split_idx==0
        return weights(quiet_fit(learn, 1))
    assert same(last(False), last(True))

def to_grey(i): return TensorImage(torch.full((3,4,4), i/64))

class Blacken(Transform):
    "An augmentation"
    split_idx = 0
    def encodes(self, x:TensorImage): return x*0

def test_datasets_show_their_items_without_augmentation():
    set_seed(0)
    dsets = Datasets(list(range(64)), [[to_grey], [to_name, Categorize()]], splits=[range(48), range(48, 64)])
    dls = dsets.dataloaders(bs=16, num_workers=0, after_batch=Blacken())
    learn = Learner(dls, nn.Sequential(nn.Flatten(), nn.Linear(48, 2)), loss_func=CrossEntropyLossFlat()).top_loss(track_items=True)
    images = shown(quiet_fit(learn, 2))
    titles = [ax.get_title() for ax in plt.gcf().axes if ax.images]
    hardest = learn.selection.items().loss.sort_values(ascending=False, kind='stable').index[:4]
    for image,title,i in zip(images, titles, hardest): assert np.allclose(image, i/64) and f'target {to_name(i)}\n' in title and title.split()[3] in ('even','odd') and title.endswith(f'item {i}')
    assert dsets.train.split_idx==0 and float(dls.train.one_batch()[0].sum())==0

def test_tables_show(monkeypatch):
    from fastai.tabular.core import Categorify, Normalize, TabularPandas
    from fastai.tabular.learner import tabular_learner
    set_seed(0)
    df = pd.DataFrame(dict(age=np.arange(80.), kind=np.where(np.arange(80)%3==0, 'a', 'b'), good=np.where(np.arange(80)%2==0, 'yes', 'no')))
    dls = TabularPandas(df, [Categorify, Normalize], ['kind'], ['age'], 'good', splits=[list(range(64)), list(range(64, 80))]).dataloaders(bs=16)
    learn = quiet_fit(tabular_learner(dls, layers=[8]).top_loss(track_items=True), 2)
    items = learn.selection.items()
    assert items.label[:4].tolist()==['yes','no','yes','no'] and len(items)==64 and {'age','age_of_item','kind'}<=set(items)
    hardest,drawn = items.loss.sort_values(ascending=False).index[:3].tolist(),[]
    monkeypatch.setattr('fastai.tabular.core.display_df', drawn.append)
    learn.selection.show_hardest(3)
    assert drawn[0].age.round().tolist()==hardest # an item's age is its number
    monkeypatch.setattr('selback.views.pictures.display_df', drawn.append)
    learn.selection.show_hardest(3)
    facts = drawn[-1]
    assert facts.item.tolist()==hardest and facts.target.tolist()==items.label[hardest].tolist() and facts.predicted.isin(['yes','no']).all()
    assert facts.loss.astype(float).tolist()==pytest.approx(items.loss[hardest].tolist(), rel=.01)

def test_texts_show(monkeypatch):
    from fastai.data.block import CategoryBlock, DataBlock
    from fastai.data.transforms import ColReader, ColSplitter
    from fastai.text.data import TextBlock
    set_seed(0)
    words = 'one two six ten red'.split()
    df = pd.DataFrame(dict(text=[' '.join(words[:1+i%5]) for i in range(40)], label=['a','b']*20, is_valid=[False]*32+[True]*8))
    block = DataBlock((TextBlock.from_df('text', n_workers=0), CategoryBlock), get_x=ColReader('text'), get_y=ColReader('label'), splitter=ColSplitter())
    dls = block.dataloaders(df, bs=8, num_workers=0)
    class Words(nn.Module):
        def __init__(self): super().__init__(); self.emb,self.lin = nn.Embedding(len(dls.vocab[0]), 4),nn.Linear(4, 2)
        def forward(self, x): return self.lin(self.emb(x).mean(1))
    learn = quiet_fit(Learner(dls, Words(), loss_func=CrossEntropyLossFlat()).top_loss(track_items=True), 2)
    assert learn.selection.items().label.tolist()==['a','b']*16
    drawn = []
    monkeypatch.setattr('fastai.text.data.display_df', drawn.append)
    learn.selection.show_hardest(3)
    hardest = learn.selection.items().loss.sort_values(ascending=False, kind='stable').index[:3]
    assert drawn[0].category.tolist()==[['a','b'][i%2] for i in hardest] and [len(t.split())-1 for t in drawn[0].text]==[1+i%5 for i in hardest]
    assert drawn[0]['item'].tolist()==hardest.tolist() and drawn[0].predicted.isin(['a','b']).all()
    assert len(gradient_similarity(learn, 2))==4

# picks over the epochs
def test_picks_over_the_epochs():
    learn = quiet_fit(table_learner().top_loss(keep=.5, track_items=True), 4)
    selection = learn.selection
    (ax,) = selection.plot_items([3,50])
    for i in (3,50):
        xy = lines(ax)[f'item {i}']
        assert xy[:,0].tolist()==[0,1,2,3,4] and xy[1,1]==1 and xy[-1,1]==selection.items().picked[i] and set(np.diff(xy[:,1]))<={0,1}
    selection.tracker.n_tracked = 30 # of 100 items every fourth
    assert selection.tracker.tracked.tolist()==list(range(0, 100, 4))

def test_picks_over_the_epochs_are_saved_too():
    half = quiet_fit(table_learner().top_loss(keep=.5, track_items=True), 2)
    state = half.selection.state_dict()
    before = [picked.tolist() for _,picked in half.selection.tracker.picks_by_epoch]
    quiet_fit(half, 1) # what is saved does not follow
    resumed = table_learner().top_loss(keep=.5, track_items=True)
    resumed.selection.load_state_dict(state)
    assert [picked.tolist() for _,picked in resumed.selection.tracker.picks_by_epoch]==before
    quiet_fit(resumed, 4, start_epoch=2)
    (ax,) = resumed.selection.plot_items([3])
    (xy,) = (xy for name,xy in lines(ax).items() if name.startswith('item'))
    assert xy[:,0].tolist()==[0,1,2,3,4] and xy[-1,1]==resumed.selection.items().picked[3] and len(state['parts']['tracker']['picks_by_epoch'])==2

def test_items_of_another_training_set_are_not_shown():
    learn = quiet_fit(table_learner().top_loss(track_items=True, warmup=0), 1)
    learn.dls = table_learner(n=82).dls
    for view in (learn.selection.items, learn.selection.show_hardest, learn.selection.plot_items):
        with pytest.raises(ValueError, match='got a training set of 50 items, of which nothing is remembered.* one with 100'): view()

def test_picks_are_kept_of_a_thousand_items_at_most():
    learn = quiet_fit(table_learner(n=2532, bs=500).top_loss(track_items=True), 2)
    selection = learn.selection
    assert [len(picked) for _,picked in selection.tracker.picks_by_epoch]==[834,834] and selection.tracker.tracked.tolist()==list(range(0, 2500, 3))
    with pytest.raises(ValueError, match=r'plot_items: got \[1, 2\].*every 3. item from 0 to 2499'): selection.plot_items([0,1,2])
    (ax,) = selection.plot_items()
    numbers = [int(name.split()[1]) for name in lines(ax) if name.startswith('item')]
    losses = selection.items().loss[numbers].tolist()
    assert losses==sorted(losses) and losses[0]==selection.items().loss[::3].min() and losses[-1]==selection.items().loss[::3].max()

def test_suspected_label_errors():
    set_seed(0)
    x = torch.randn(132, 4)
    y = (x[:,0]>0).long()
    y[32:42] = 1-y[32:42]
    learn = Learner(dls_of(x, y), nn.Linear(4, 2), loss_func=CrossEntropyLossFlat(), lr=.05).top_loss(keep=.5, noise_quantile=.9)
    quiet_fit(learn, 8)
    errors = learn.selection.suspected_label_errors()
    assert sorted(errors.index)==sorted(learn.selection.suspects.tolist()) and (errors.loss.diff().dropna()<=0).all()
    assert len(errors) and (errors.index<10).mean()>.7 and (errors.label==y[32:][errors.index].numpy()).all()

# gradients
def test_gradients_of_a_linear_model_by_hand():
    learn = linear_learner(TopLossCallback())
    found = gradient_similarity(learn, n_batches=2, keep=.25, seed=3)
    idxs = torch.randperm(100, generator=torch.Generator().manual_seed(3))[:32]
    x,y = learn.dls.train_ds.tensors
    for i in range(2):
        rows = idxs[i*16:(i+1)*16]
        def grad(rows): return torch.cat([g.flatten() for g in torch.autograd.grad(F.cross_entropy(learn.model(x[rows]), y[rows]), list(learn.model.parameters()))])
        losses = F.cross_entropy(learn.model(x[rows]), y[rows], reduction='none')
        a,b = grad(rows),grad(rows[losses.argsort(descending=True)[:4]])
        row = found[(found.batch==i) & (found.of=='hardest')].iloc[0]
        assert row['items']==4 and row.cosine==pytest.approx(float(a@b/a.norm()/b.norm()), abs=1e-5) and row.same_sign==pytest.approx(float((a*b>0).float().mean()))

@pytest.mark.parametrize('make', [table_learner, image_learner, regression_learner])
def test_the_gradient_of_all_is_that_of_all(make):
    found = gradient_similarity(make(), 2, keep=1.)
    assert len(found)==4 and np.allclose(found.cosine, 1, atol=1e-5) and (found.same_sign==1).all()
    part = gradient_similarity(make(), 2, keep=.3)
    assert (part.cosine<1-1e-4).all() and part.cosine.between(-1, 1).all()

def test_gradient_similarity_leaves_the_learner_as_it_was():
    def last(look):
        learn = quiet_fit(table_learner().top_loss(), 1)
        learn.model[1].train()
        before = weights(learn),[p.grad.clone() for p in learn.model.parameters()],[m.training for m in learn.model.modules()],random_states(),learn.dls.train.rng.getstate()
        if look: gradient_similarity(learn)
        after = weights(learn),[p.grad.clone() for p in learn.model.parameters()],[m.training for m in learn.model.modules()],random_states(),learn.dls.train.rng.getstate()
        assert same(before[0], after[0]) and all(torch.equal(a, b) for a,b in zip(before[1], after[1])) and before[2:]==after[2:]
        return weights(quiet_fit(learn, 1))
    assert same(last(False), last(True))

def test_gradients_that_are_refused():
    learn = table_learner(loss_func=lambda pred, y: F.cross_entropy(pred, y).sqrt())
    with pytest.raises(ValueError, match='It mixes items'): gradient_similarity(learn)
    assert len(gradient_similarity(learn, 1, item_loss=lambda pred, y: F.cross_entropy(pred, y, reduction='none')))==2
    with pytest.raises(ValueError, match='keep: got 0'): gradient_similarity(table_learner(), keep=0)
    frozen = table_learner()
    frozen.model.requires_grad_(False)
    with pytest.raises(ValueError, match='weights are all frozen'): gradient_similarity(frozen)

# by percentile
def test_confidence_and_accuracy_by_percentile():
    learn = quiet_fit(table_learner(), 3)
    rows = by_percentile(learn, bins=4)
    x,y = learn.dls.valid_ds.tensors
    pred = learn.model.eval()(x).detach()
    order = F.cross_entropy(pred, y, reduction='none').argsort().view(4, 8)
    confidence,right = pred.softmax(1).max(1).values,(pred.argmax(1)==y).float()
    target = pred.softmax(1)[range(len(y)),y]
    assert rows.target_confidence.to_numpy()==pytest.approx(target[order].mean(1).numpy(), rel=1e-5) and rows.target_confidence.is_monotonic_decreasing
    assert (rows.target_confidence<=rows.confidence+1e-6).all() and rows.target_confidence.iloc[-1]<rows.confidence.iloc[-1] # what is wrong is sure of something else
    assert rows.confidence.to_numpy()==pytest.approx(confidence[order].mean(1).numpy(), rel=1e-5) and rows.accuracy.tolist()==right[order].mean(1).tolist()
    assert rows.percentile.tolist()==[25,50,75,100] and (rows['items']==8).all() and rows.loss.is_monotonic_increasing
    assert by_percentile(learn, ds_idx=0)['items'].sum()==100
    assert np.allclose(lines(plot_by_percentile(rows))['accuracy'], np.stack([[12.5,37.5,62.5,87.5], rows.accuracy], 1))

def test_percentiles_of_pixels():
    set_seed(0)
    learn = Learner(dls_of(torch.randn(48, 3, 4, 4), torch.randint(0, 3, (48,4,4)), bs=8, n_valid=16), nn.Conv2d(3, 3, 1), loss_func=CrossEntropyLossFlat(axis=1))
    rows,(x,y) = by_percentile(learn, bins=1),learn.dls.valid_ds.tensors
    pred = learn.model(x).detach()
    wanted = F.cross_entropy(pred, y),pred.softmax(1).gather(1, y[:,None]).mean(),pred.softmax(1).amax(1).mean(),(pred.argmax(1)==y).float().mean()
    assert rows[['loss','target_confidence','confidence','accuracy']].iloc[0].tolist()==pytest.approx([float(o) for o in wanted], rel=1e-5)

def test_percentiles_are_of_classes():
    with pytest.raises(ValueError, match='by_percentile: got targets.*wanted class numbers'): by_percentile(regression_learner())

# what a selection is called
def test_a_selection_names_its_options():
    "Those of its method, and others that are not as by default"
    assert repr(TopLossCallback(.3))=='TopLossCallback(keep=0.3, also_bottom=0.0)'
    assert repr(SelectiveBackpropCallback(keep=.25, warmup=0, seed=3, auto=False))=='SelectiveBackpropCallback(beta=3.0, gather=True, auto=False, warmup=0, seed=3)'
    assert repr(TopLossCallback(.3, passes=1, score='entropy', end=.5))=="TopLossCallback(keep=0.3, also_bottom=0.0, score='entropy', passes=1, end=0.5)"
    assert repr(SeTaCallback(window=.5, noise_quantile=.9))=='SeTaCallback(prune=0.1, n_groups=5, window=0.5, delta=0.875, noise_quantile=0.9)'
    assert repr(FavorHardCallback(ema=.5))=='FavorHardCallback(beta=1.0, ema=0.5)'
    cb = TopLossCallback(.3, scorer=ModelCopy(2), warmup=0)
    assert repr(cb)=='TopLossCallback(keep=0.3, also_bottom=0.0, scorer=ModelCopy, warmup=0)' and cb.card.startswith(repr(cb)+'\n')

def test_the_card_says_why_no_seconds_are_known():
    assert 'cost: not measured.' in TopLossCallback().card
    assert 'cost: seconds saved: \N{EN DASH}, as auto=False measures nothing' in quiet_fit(table_learner().top_loss(auto=False), 1).selection.card
