"The study of easy data: what is trained on, what its first epochs tell, and that nothing is run twice"
import pandas as pd, pytest, torch

from studies import easy_data
from studies.easy_data import Cell, Ease, data_of, sets

@pytest.fixture
def tiny(monkeypatch, tmp_path):
    monkeypatch.setenv('SELBACK_SCALE', 'tiny')
    for name in ('path','plain_path','pace_path','seconds_path','claims_path','ahead_path'):
        monkeypatch.setattr(easy_data, name, tmp_path/f'{name}.csv')
    from studies.regimes import cifar_parts
    from studies.wrong_labels import digits
    known = easy_data.mnist,cifar_parts,data_of,digits
    for o in known: o.cache_clear()
    yield
    for o in known: o.cache_clear()

@pytest.mark.parametrize('name', sets)
def test_labels_go_from_0_and_images_are_small(tiny, name):
    for images,labels in data_of(name):
        assert len(images)==len(labels) and images.dtype==torch.uint8
        assert labels.unique().tolist()==list(range(int(labels.max())+1))
        assert images.shape[-1]=={'mnist_28': 28, 'mnist_14': 14, 'digits': 8}.get(name, 16)

def test_animals_are_no_vehicles(tiny):
    from studies.regimes import cifar_parts
    vehicles = 0,1,8,9 # airplane, automobile, ship, truck
    for (_,kinds),(_,labels) in zip(cifar_parts(), data_of('animals')):
        assert [int(kind not in vehicles) for kind in kinds.tolist()]==labels.tolist()
    for (_,kinds),(images,labels) in zip(cifar_parts(), data_of('frogs_ships')):
        assert [int(kind==8) for kind in kinds.tolist() if kind in (6,8)]==labels.tolist()

def test_a_cell_trains_on_as_many_as_it_says(tiny):
    cell = Cell('mnist_14', 300, 4)
    learn = cell.learner()
    assert len(learn.dls.train_ds)==300 and cell.compute==1200
    wide = Cell('mnist_14', 300, 4, width=4.).learner()
    assert next(wide.model.parameters()).shape[0]==4*next(learn.model.parameters()).shape[0]==64

def test_what_the_losses_of_an_epoch_tell_by_hand():
    ease = Ease()
    ease.before_train()
    pred = torch.tensor([[9.,0.],[0.,0.],[0.,9.],[9.,0.]])
    for rows in (slice(0,2),slice(2,4)):
        ease.pred,ease.y = pred[rows],torch.tensor([0,1,0,0])[rows]
        ease.after_loss()
    ease.after_train()
    small,even,large = 1.234e-4,.6931,9.0001
    told = {name: float(value) for name,value in ease.figures.items()}
    total = 2*small+even+large
    assert told==pytest.approx(dict(train_loss=total/4, train_error=.5, easy=.5, hardest_tenth=large/total,
        median_loss=small), rel=1e-3) # of two equal predictions the first counts as predicted

def test_of_plain_training_all_epochs_are_stored_and_nothing_is_run_again(tiny, monkeypatch):
    cell = Cell('mnist_14', 300, 2)
    ends = [easy_data.end_of(cell, method, 0, .1) for method in ('none','favor_hard')]
    monkeypatch.setattr(easy_data, 'run', None)
    again = [easy_data.end_of(cell, method, 0, .1) for method in ('none','favor_hard')]
    assert [o.error for o in again]==pytest.approx([o.error for o in ends], rel=1e-4)
    assert [o.epoch for o in again]==[3,3]
    assert len(pd.read_csv(easy_data.path))==1 and len(pd.read_csv(easy_data.plain_path))==3

def test_damage_and_mixup_are_of_the_training_alone(tiny):
    plain,wrong,mixed = (Cell(f'mnist_14{more}', 600).learner() for more in ('','+flipped_labels_.25','+mixup'))
    assert (plain.dls.train_ds.labels!=wrong.dls.train_ds.labels).sum()==150
    assert (plain.dls.valid_ds.labels==wrong.dls.valid_ds.labels).all()
    assert hasattr(mixed, 'mix_up') and not hasattr(plain, 'mix_up')

def test_a_slower_method_has_less_compute_in_equal_seconds(tiny, monkeypatch):
    timed = [dict(method=m, seed=s, epoch=1, cpu_seconds=t*(1+s), compute=100)
        for s in range(3) for m,t in (('none',2),('slow',3))]
    monkeypatch.setattr(easy_data, 'compare', lambda *args, **kwargs: pd.DataFrame(timed))
    spent = {}
    def run(cell, method, seed, lr, compute):
        spent[method] = compute
        return pd.DataFrame([dict(cell._asdict(), method=method, seed=seed, error=.1)])
    monkeypatch.setattr(easy_data, 'run', run)
    easy_data.in_equal_seconds(Cell(), 'slow', 0, .1)
    assert spent=={'slow': pytest.approx(Cell().compute/1.5)}

def test_choices_made_ahead_are_run_beside_others_once(tiny, monkeypatch):
    monkeypatch.setattr(easy_data, 'best_rate', lambda data: .1)
    monkeypatch.setitem(easy_data.first, 'mnist_14', Cell('mnist_14', 300, 2))
    found = [easy_data.ahead_of(method, 0) for method in easy_data.ahead_kinds]
    assert all(row.kept<1 for row in found)
    monkeypatch.setattr(easy_data, 'run', None)
    again = [easy_data.ahead_of(method, 0) for method in easy_data.ahead_kinds]
    assert [row.error for row in again]==pytest.approx([row.error for row in found], rel=1e-4)

def test_the_rate_is_that_of_the_lowest_loss(monkeypatch):
    losses = {.1: .5, .2: .4, .4: .3, .8: .6, 1.6: .9}
    monkeypatch.setattr(easy_data, 'end_of', lambda cell, method, seed, lr: dict(valid_loss=losses[lr]))
    assert easy_data.best_rate('mnist_14')==.4

def test_claims_are_run_under_their_protocol(tiny):
    easy_data.claim_once('mnist_14', 'selective_backprop', 0, .1, 16)
    rows = pd.read_csv(easy_data.claims_path)
    assert rows.epoch.tolist()==[1,2,3] # at the tiny scale
    easy_data.claim_once('mnist_14', 'selective_backprop', 0, .1, 16)
    assert len(pd.read_csv(easy_data.claims_path))==3
