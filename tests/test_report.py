"The report by itself, and its columns in fastai's training table"
import re

import pandas as pd, pytest, torch
from fastai.callback.core import Callback
from fastai.callback.core import CancelBatchException, CancelEpochException, CancelTrainException, CancelValidException
from fastai.callback.progress import CSVLogger, ShowGraphCallback
from fastai.callback.tracker import EarlyStoppingCallback, SaveModelCallback
from helpers import *
from selback.callback.report import rising_loss

COLUMNS = ['samp_perc','loss_perc','full_loss']
nan = float('nan')

def begun(n_batches=9):
    "A report that is told by hand, in epoch 3 of its learner's fit"
    learn = table_learner(loss_func=nn.L1Loss()).top_loss()
    learn.remove_cb(learn.recorder)
    learn.epoch,learn.n_iter,learn.dl = 3,n_batches,learn.dls.train
    report = learn.selection.report
    report.before_fit()
    report.begin_epoch()
    return report

# The sample of losses
def told(n_batches, bs):
    "A report that was told of an epoch whose losses are the items' numbers"
    report = begun(n_batches)
    for i in range(n_batches):
        losses = i*bs+torch.arange(float(bs))
        report.read(i, bs, 3, losses, torch.arange(3))
    return report

EVERY = [(200, 64, 7), (5000, 3, 8), (32, 64, 1), (33, 64, 2)]

@pytest.mark.parametrize('n_batches,bs,every', EVERY)
def test_a_sample_of_many_items_is_small_and_even(n_batches, bs, every):
    samples = told(n_batches, bs).samples
    assert 1024<=len(samples)<=2048
    assert samples.loss.tolist()==[float(i*bs+row) for i in range(0, n_batches, every) for row in range(bs)]
    assert (samples.chosen==(samples.loss%bs<3)).all()

def test_a_sample_of_a_batch_that_is_larger():
    samples = told(2, 5000).samples
    assert samples.loss.tolist()==list(range(0, 5000, 3))
    assert samples.chosen.sum()==1

# What a selecting epoch costs
@pytest.mark.measured
@pytest.mark.parametrize('method,kwargs', [
    ('top_loss', dict(keep=1.)), # all is kept, and scored
    ('favor_hard', dict(beta=1.)),
    ('prioritized_sampling', dict(warmup=1))]) # others train in place of those that are left out
def test_what_a_selecting_epoch_took_is_told_where_a_plain_one_was(method, kwargs, capsys):
    def cost(fit, n, **more):
        learn = table_learner(splitter=lambda model: [[*model[0].parameters()], [*model[1:].parameters()]])
        return quiet_fit(getattr(learn, method)(**kwargs|more), n, fit).selection.report.cost
    said = cost('fit', 2)
    assert re.match(r'a selecting epoch took \d+\.\d\d of the plain one', said)
    assert said in capsys.readouterr().out
    assert cost('fit', 1)==''
    assert cost('fine_tune', 1)=='' # a frozen epoch says nothing of those after it
    if method=='top_loss': assert cost('fit', 2, warmup=0)==''

# What a fit showed
def test_what_counts_as_rising():
    def said(train, full, valid=(.5,)*7, kept=(1,)+(.3,)*6):
        return rising_loss(pd.DataFrame(dict(train_loss=train, full_loss=full, valid_loss=valid, samp_perc=kept)))
    falls,rises = [1,.9,.8,.7,.6,.5,.4],[.4,.4,.5,.6,.7,.7,.7]
    unknown = [nan]*7

    assert 'full_loss rises while train_loss falls: from 0.4 to 0.7 since epoch 1' in said(falls, rises)
    assert 'valid_loss rises' in said(falls, unknown, rises) # where the loss of all items is not known
    assert said(falls, falls, rises) is None # it overfits, which the selection did not make
    assert said(rises, rises) is None # it diverges
    assert said(falls, [.4,.4,.1,.1,.2,.2,.2]) is None # better than at first
    assert said(falls, unknown, unknown) is None
    assert said(falls, rises, kept=(1,)*7) is None # nothing was selected
    assert said(falls, rises, kept=(1,1,1,1,.3,.3,.3)) is None # little was

# Epochs that are cut short: the table is fastai's own, with our columns in their place or without them
class Raises(Callback):
    "Raises an exception in the second epoch, at an event of training or of validation"
    order = 65

    def __init__(self, ex, event, training):
        self.ex,self.event,self.is_in_training = ex,event,training

    def __call__(self, name):
        if name!=self.event or self.learn.lock.locked() or self.epoch!=1: return
        if self.training==self.is_in_training: raise self.ex

class ReadsLog(Callback):
    "Notes the lines of the table, and fastai's last record, as they are after each epoch"
    order = 90

    def before_fit(self): self.logs = []

    def after_epoch(self):
        *log,_ = self.recorder.log # the time is another one
        assert str(list(self.learn.final_record))==str(log[1:])
        self.logs.append(log)

def has_no_validation(learn): learn._do_epoch_validate = lambda *args, **kwargs: None

def is_raised(ex, event, training): return lambda learn: learn.add_cb(Raises(ex, event, training))

DAYS = dict(
    usual=lambda learn: None,
    never_validated=has_no_validation,
    no_validation=is_raised(CancelValidException, 'before_validate', False),
    half_a_validation=is_raised(CancelValidException, 'after_pred', False),
    no_training=is_raised(CancelTrainException, 'before_train', True),
    half_a_training=is_raised(CancelTrainException, 'after_batch', True),
    no_batch=is_raised(CancelBatchException, 'before_batch', True),
    no_epoch=is_raised(CancelEpochException, 'before_train', True),
    epoch_ends_in_training=is_raised(CancelEpochException, 'after_batch', True),
    epoch_ends_in_validation=is_raised(CancelEpochException, 'after_pred', False),
    epoch_ends_after_training=is_raised(CancelEpochException, 'after_train', True))

def accuracy_of(pred, y): return (pred.argmax(1)==y).float().mean()

def cut_short(day, path, reader=None, cb=None, n_epoch=3):
    "A learner after such a fit, and what was raised by a reader that does not bear it"
    learn = table_learner(n=64, n_valid=16, metrics=accuracy_of, path=path, cbs=[ReadsLog()])
    if cb: learn.add_cb(cb)
    if reader: learn.add_cb(reader)
    DAYS[day](learn)
    raised = None
    with learn.no_logging():
        try: learn.fit(n_epoch)
        except (IndexError, AttributeError, ValueError, RuntimeError) as ex: raised = type(ex)
    return learn,raised

def without_ours(learn, row):
    "A row of the table without our columns, which are all there, where they belong, or not at all"
    at = learn.recorder.metric_names.index('samp_perc')
    if len(row)<=at: return list(row)
    assert list(learn.recorder.metric_names[at:])==[*COLUMNS,'time']
    assert len(row)>=at+len(COLUMNS)
    return [*row[:at],*row[at+len(COLUMNS):]]

def in_warm_up(): return TopLossCallback(.5, warmup=9) # it trains what plain fastai trains

@pytest.mark.law(6)
@pytest.mark.parametrize('day', DAYS)
def test_a_row_that_is_cut_short_is_as_fastai_leaves_it(day, tmp_path):
    plain,_ = cut_short(day, tmp_path)
    ours,_ = cut_short(day, tmp_path, cb=in_warm_up())
    assert [without_ours(ours, log) for log in ours.reads_log.logs]==plain.reads_log.logs
    logs = [[epoch,*values] for epoch,values in enumerate(ours.recorder.values)]
    assert str(logs)==str(ours.reads_log.logs)

    is_whole = [len(log)==7 for log in ours.reads_log.logs]
    assert is_whole==[day!='never_validated',day in ('usual','no_batch'),day!='never_validated']
    assert ours.selection.stats.groupby('epoch').seen.sum().to_dict()|{1: 48}=={0: 48, 1: 48, 2: 48}

@pytest.mark.parametrize('day', DAYS)
@pytest.mark.parametrize('make', [
    slow(lambda: SaveModelCallback(monitor='valid_loss')),
    lambda: SaveModelCallback(monitor='accuracy_of'),
    lambda: EarlyStoppingCallback(monitor='valid_loss', patience=1)], ids=['save','save_by_metric','stop'])
def test_who_monitors_the_validation_sees_what_it_sees_in_fastai(day, make, tmp_path, capsys):
    plain,raised = cut_short(day, tmp_path, make())
    said = capsys.readouterr().out
    ours,ours_raised = cut_short(day, tmp_path, make(), in_warm_up())
    assert ours_raised is raised
    if 'validation' in day: assert raised is IndexError # fastai has no answer to a row that lacks it
    def best(learn): return next(cb.best for cb in learn.cbs if hasattr(cb, 'best'))
    assert best(ours)==best(plain)
    def table_and_words(text): return [line for line in text.splitlines() if line.startswith(('Better','No impr'))]
    assert table_and_words(capsys.readouterr().out)==table_and_words(said)

@pytest.mark.parametrize('day', DAYS)
def test_a_file_of_the_table_is_as_fastai_writes_it(day, tmp_path):
    def lines(cb):
        learn,_ = cut_short(day, tmp_path, CSVLogger(), cb)
        _,*rows = (tmp_path/'history.csv').read_text().splitlines()
        return learn,[row.split(',')[:-1] for row in rows]
    _,plain = lines(None)
    learn,ours = lines(in_warm_up())
    assert [without_ours(learn, row) for row in ours]==plain

class Bar:
    "A progress bar that keeps the lines of its graph"
    def __init__(self): self.graphs = []

    def update_graph(self, lines, *args): self.graphs.append([list(y) for _,y in lines])

    def __getattr__(self, _): return lambda *args,**kwargs: None

class Draws(ShowGraphCallback):
    "Into such a bar"
    def before_fit(self):
        self.learn.progress.mbar = self.bar = Bar()
        self.learn.progress.after_fit = lambda: None
        super().before_fit()

@pytest.mark.parametrize('day', DAYS)
def test_a_graph_has_the_lines_that_it_has_in_fastai(day, tmp_path):
    plain,raised = cut_short(day, tmp_path, Draws())
    ours,ours_raised = cut_short(day, tmp_path, Draws(), in_warm_up())
    assert ours_raised is raised
    assert ours.draws.bar.graphs==plain.draws.bar.graphs

def test_no_advice_is_drawn_from_epochs_without_validation():
    learn = table_learner(cbs=TopLossCallback(.5, warmup=0))
    has_no_validation(learn)
    assert quiet_fit(learn, 6).selection.report.advice is None

@pytest.mark.parametrize('validates', [False,True])
@pytest.mark.parametrize('train_metrics', [False,True])
def test_a_table_without_columns_of_a_validation_has_ours(validates, train_metrics):
    learn = table_learner(cbs=TopLossCallback(.5, warmup=0))
    learn.recorder.valid_metrics,learn.recorder.train_metrics = False,train_metrics
    if not validates: has_no_validation(learn)
    quiet_fit(learn, 2)
    assert list(learn.recorder.metric_names)==['epoch','train_loss',*COLUMNS,'time']
    for train_loss,*ours in learn.recorder.values:
        assert len(ours)==3
        assert ours[0]==pytest.approx(.5, abs=.1)

@pytest.mark.parametrize('when', ['before_train','after_batch','after_train'])
def test_a_validation_within_an_epoch_moves_nothing(when, tmp_path):
    "fastai's row is then another one, too"
    class Peek(Callback):
        order = 70
        def __call__(self, name):
            if name==when and self.training and not self.learn.lock.locked(): self.learn.validate()

    def values(*cbs):
        learn = quiet_fit(table_learner(n=64, n_valid=16, path=tmp_path, cbs=[Peek(), *cbs]), 2)
        return [list(row[:2]) for row in learn.recorder.values]
    assert values(in_warm_up())==values()

def test_the_table_goes_on_after_a_validation_within_a_fit():
    class Peek(Callback):
        order,run_valid = 70,False
        def after_epoch(self):
            if not self.learn.lock.locked(): self.learn.validate()

    learn = table_learner(cbs=[TopLossCallback(.5, warmup=0), Peek()])
    rows = []
    learn.logger = lambda log: rows.append(len(log))
    with learn.no_bar(): learn.fit(3)
    assert set(rows)=={len(learn.recorder.metric_names)}

@pytest.mark.parametrize('make', [FavorHardCallback, WatchItemsCallback, lambda: WatchItemsCallback(valid=True),
    lambda: TopLossCallback(track_items=True)], ids=['epoch','watched','watched_valid','batch'])
def test_a_validation_within_an_epoch_hides_no_items(make, capsys):
    "Where its callback goes on training, as fastai by itself does not"
    class Peek(Callback):
        order,run_valid = 70,False
        def after_batch(self):
            self.learn.validate()
            self.model.train()
            self.learn.training = True

    learn = quiet_fit(table_learner(n=64, n_valid=16, cbs=[make(), Peek()]), 3)
    memory = learn.selection.memory
    assert memory.epochs==3
    if type(learn.selection) is FavorHardCallback:
        assert memory.seen.sum()==learn.selection.stats.trained.sum() and memory.seen.min()<3
    else: assert memory.seen.tolist()==[3]*48
    if learn.selection.validation: assert learn.selection.validation.memory.seen.tolist()==[3]*16
    assert 'another one' not in capsys.readouterr().out

class WithoutTable(Callback):
    "Validates without fastai's table"
    order,run_valid = 70,False
    def after_train(self):
        with self.learn.removed_cbs(self.learn.recorder): self.learn.validate()

@pytest.mark.parametrize('make', [FavorHardCallback, TopLossCallback])
def test_a_validation_within_an_epoch_needs_no_recorder(make):
    learn = quiet_fit(table_learner(cbs=[make(warmup=0), WithoutTable()]), 2)
    assert list(learn.recorder.metric_names).count('samp_perc')==1
    assert [len(row) for row in learn.recorder.values]==[2+3]*2

def test_a_recorder_may_be_taken_off_within_a_fit():
    class TakesOff(Callback):
        order,run_valid = 70,False
        def before_train(self):
            if self.epoch==1: self.learn.remove_cb(self.learn.recorder)
    learn = table_learner(cbs=[TopLossCallback(warmup=0), TakesOff()])
    learn.remove_cbs([cb for cb in learn.cbs if cb.name=='progress'])
    assert quiet_fit(learn, 3).selection.stats.epoch.nunique()==3
