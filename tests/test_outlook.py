"What the losses of a quarter of a training tell, when it is said, and by whom"
import pytest, torch
from fastai.metrics import mse
from fastai.test_utils import synth_learner
from helpers import *
from selback.all import composer, forum, outlook
from selback.bench.compare import compare
from selback.core.outlook import enough, hardest_tenth

said = 'a quarter into training the hardest tenth'

def quarters(capsys): return capsys.readouterr().out.count(said)

def fitted(capsys, method, *n_epochs, **kwargs):
    "How often it was said after each of several fits"
    learn = getattr(synth_learner(n_trn=10), method)(**kwargs)
    found = []
    for n in n_epochs:
        quiet_fit(learn, n)
        found.append(quarters(capsys))
    return found

def test_it_is_said_once_after_the_first_fit(capsys):
    assert fitted(capsys, 'favor_hard', 8, 8)==[1,0]

def test_a_fit_without_an_epoch_that_ends_at_a_quarter_says_nothing(capsys):
    assert fitted(capsys, 'favor_hard', 1, 2, 3)==[0,0,0]
    assert fitted(capsys, 'favor_hard', 5)==[0] # a fifth, two fifths

@pytest.mark.parametrize('method,kwargs', [
    ('watch_items',{}), ('favor_hard',dict(start=.5)), ('selective_backprop',{}),
    ('random_subset',dict(before_loading=True))])
def test_who_chose_nothing_or_remembers_nothing_says_nothing(method, kwargs, capsys):
    assert fitted(capsys, method, 8, **kwargs)==[0]

@pytest.mark.slow
def test_compare_says_it_once_for_all_runs(capsys):
    compare(learner_with_error, ['favor_hard','info_batch'], epochs=8, seeds=2, plot=False)
    assert quarters(capsys)==1

def learner_with_error():
    learn = synth_learner(n_trn=10)
    learn.metrics = [mse]
    return learn

def test_few_losses_that_have_it_all_promise_a_gain_and_even_ones_none():
    few = torch.full((200,), .01)
    few[:20] = 3.
    assert hardest_tenth(few)>.9 and 'is likely to pay, if the labels are right' in outlook(few)
    assert hardest_tenth(torch.ones(200))<enough and 'is not likely to pay' in outlook(torch.ones(200))

def test_presets_are_what_their_sources_say():
    "Composer's method card, and the first post of the forum's thread"
    card = SelectiveBackpropCallback(**composer)
    assert (card.window.start,card.window.end,card.window.interrupt)==(.5,.9,3)
    assert card.beta==1. and not card.gather and card.scorer.scoring.scale_factor==.5
    filters = BatchLossFilterCallback(**forum)
    assert (filters.min_loss_perc,filters.min_sample_perc,filters.window.warmup)==(.9,0.,1) and not filters.gather
