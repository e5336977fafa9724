"Copies among a learner's items, what is done about them, and odd images; the learner stays as it is"
import copy, random

import numpy as np, pandas as pd, pytest, torch
from fastai.callback.core import Callback
from fastai.data.block import CategoryBlock, DataBlock
from fastai.data.core import DataLoaders, TfmdDL
from fastai.data.transforms import get_image_files, parent_label
from fastai.learner import Learner, load_learner
from fastai.losses import CrossEntropyLossFlat
from fastai.tabular.all import Categorify, Normalize, TabularDataLoaders, tabular_learner
from fastai.text.all import AWD_LSTM, TextDataLoaders, awd_lstm_clas_config, text_classifier_learner
from fastai.vision.all import ImageBlock, ImageDataLoaders, Resize
from helpers import *
from PIL import Image
from selback.bench.datasets import small_convnet, tensor_dls
from selback.views.odd import far_out, measures
from torch import tensor
from torch.utils.data import Subset

def drawn(n, seed=0, side=32):
    "Images of chance, smooth, as bytes"
    small = torch.rand(n, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
    return (torch.nn.functional.interpolate(small, size=side, mode='bicubic').clamp(0, 1)*255).byte()

def labels_of(n): return torch.arange(n)%3

def of_images(train, valid, train_y=None, valid_y=None):
    "A learner of images in memory, untrained"
    set_seed(0)
    y = labels_of(len(train)) if train_y is None else train_y
    dls = tensor_dls((train, y), (valid, labels_of(len(valid)) if valid_y is None else valid_y), 32, n_classes=3)
    return Learner(dls, small_convnet(3, .25), loss_func=CrossEntropyLossFlat(), lr=1e-2)

def copies(learn, **kwargs):
    with learn.no_bar(): return learn.find_copies(**kwargs)

def lighter(x): return (x.float()*.85+10).byte()

def with_planted():
    "200 items to train on, 60 to validate, of which the last 4 are lighter copies of the first; two train twice"
    train = drawn(200)
    return of_images(torch.cat([train, train[50:52]]), torch.cat([drawn(56, seed=1), lighter(train[:4])]))

def places(found): return {frozenset([(o.part, o.item), (o.other_part, o.other)]) for o in found.itertuples()}

leaks = {frozenset([('train', i), ('valid', 56+i)]) for i in range(4)}
twice = {frozenset([('train', 50+i), ('train', 200+i)]) for i in range(2)}

# What is found
def test_planted_copies_are_found_exact_ones_first(capsys):
    found = copies(with_planted())
    assert places(found[:2])==twice
    assert places(found[:6])==twice | leaks
    assert found.similarity[:2].tolist()==[1.,1.]
    assert (found.similarity[2:6]<1).all()
    assert len(found)<10
    assert found.group[:6].tolist()==[1,2,3,4,5,6]
    n_likely = found.group.notna().sum()
    assert f': some {n_likely} pairs are likelier copies than not' in capsys.readouterr().out
    assert list(found)==['item','part','other','other_part','similarity','label','other_label','group']

def test_without_copies_none_are_likely(capsys):
    learn = of_images(drawn(300), drawn(60, seed=1))
    found = copies(learn)
    assert found.group.notna().sum()<4 and 5<=len(found)
    assert (found.similarity<1).all()

@pytest.mark.parametrize('within, wanted', [('across',leaks), ('train',twice)])
def test_pairs_of_some_parts_only(within, wanted):
    found = copies(with_planted(), within=within)
    assert places(found[:len(wanted)])==wanted
    parts = dict(across={('valid','train')}, train={('train','train')})[within]
    assert {*zip(found.part, found.other_part)}==parts

def test_pairs_within_validation_only():
    valid = drawn(60, seed=1)
    found = copies(of_images(drawn(40), torch.cat([valid, valid[:1]])), within='valid')
    assert places(found[:1])=={frozenset([('valid',0),('valid',60)])}
    assert {*found.part}=={*found.other_part}=={'valid'}

def test_as_many_as_asked_for():
    learn = with_planted()
    assert [len(copies(learn, n=n)) for n in (1,50)]==[1,50]
    found = copies(learn, n=50)
    assert places(found[:6])==twice | leaks
    assert found.group[20:].isna().all() # no likely copies

def test_mirror_images_only_where_asked_for():
    train = drawn(200)
    learn = of_images(train, torch.cat([drawn(50, seed=1), train[:3].flip(-1)]))
    mirrored = {frozenset([('train', i), ('valid', 50+i)]) for i in range(3)}
    assert places(copies(learn, flips=True)[:3])==mirrored
    assert not places(copies(learn)[:3]) & mirrored

def test_labels_and_those_that_differ():
    train = drawn(150)
    y = labels_of(150)
    learn = of_images(train, train[:3], y, tensor([2,1,2]))
    found = copies(learn, within='across', n=3).sort_values('other')
    assert [*zip(found.label, found.other_label)]==[(2,0),(1,1),(2,2)]

def test_a_burst_is_one_group():
    train = drawn(200)
    burst = torch.cat([(train[:1].float()*(1-.02*i)).byte() for i in range(1, 4)])
    found = copies(of_images(torch.cat([train, burst[:2]]), torch.cat([drawn(40, seed=1), burst[2:]])))
    own = found[found.group==1]
    assert {*own.item, *own.other}=={0,200,201,40} and len(own)==6
    assert found.group.max()<4

def test_a_layer_that_is_named():
    learn = with_planted()
    assert places(copies(learn, layer=learn.model[8])[:6])==twice | leaks
    assert places(copies(learn, layer=learn.model[-2], n=6)[:2])==twice # rows, no maps

def test_augmentation_is_left_out():
    "Of images that fastai augments by batch"
    learn = image_learner(n=80)
    images = learn.dls.train.dataset.images
    images[1] = images[0]
    found = copies(learn, within='train', n=1)
    assert {*found.item, *found.other}=={0,1} and found.similarity[0]==1

def test_half_precision():
    learn = with_planted()
    learn.add_cb(CPUMixedPrecision())
    quiet_fit(learn, 1)
    assert places(copies(learn)[:6])==twice | leaks

# Keys
@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    "Files of three classes, of which two are there twice"
    root = tmp_path_factory.mktemp('images')
    for i,image in enumerate(drawn(90)):
        at = root/'abc'[i%3]
        at.mkdir(exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(at/f'{i:02}.png')
        if i<2: Image.fromarray(image.permute(1, 2, 0).numpy()).resize((28,28)).save(at/f'{i:02}_again.png')
    return root

def of_folder(folder, **kwargs):
    set_seed(0)
    block = DataBlock((ImageBlock,CategoryBlock), get_items=get_image_files, get_y=parent_label, item_tfms=Resize(32),
        **kwargs)
    return Learner(block.dataloaders(folder, path=folder, bs=16, num_workers=0), small_convnet(3, .25),
        loss_func=CrossEntropyLossFlat())

again = {frozenset([f'{c}/0{i}.png', f'{c}/0{i}_again.png']) for i,c in enumerate('ab')}

def names(found): return {frozenset(o) for o in zip(found.item, found.other)}

def test_files_are_told_by_their_paths_and_the_next_split_keeps_copies_together(folder):
    learn = of_folder(folder)
    found = copies(learn)
    assert names(found[:2])==again
    assert [*found.label[:2]]==[o[0] for o in found.item[:2]]
    other = of_folder(folder, splitter=without_copies(found[:2], .25, seed=1))
    parts = [{*ds.items} for ds in (other.dls.train_ds, other.dls.valid_ds)]
    assert [*map(len, parts)]==[69,23]
    for pair in again: assert sum({folder/o for o in pair}<=part for part in parts)==1
    assert len(copies(other, within='across', n=92))==92 and not names(copies(other, within='across')[:5]) & again

def test_a_table_of_files_is_told_by_its_own_index(folder):
    files = sorted(get_image_files(folder))
    df = pd.DataFrame(dict(file=[o.relative_to(folder).as_posix() for o in files]))
    df['label'] = [o.parent.name for o in files]
    df.index = [f'row {i}' for i in range(len(df))]
    dls = ImageDataLoaders.from_df(df, folder, bs=16, item_tfms=Resize(32), num_workers=0, seed=0)
    found = copies(Learner(dls, small_convnet(3, .25), loss_func=CrossEntropyLossFlat()))
    assert {frozenset(df.file[[*pair]]) for pair in names(found[:2])}==again
    train,valid = without_copies(found[:2], seed=0)(df)
    assert sorted(train+valid)==list(range(92))
    for pair in names(found[:2]): assert len({df.index.get_loc(o) in valid for o in pair})==1

def test_a_subset_is_told_by_its_places_in_the_whole():
    images = drawn(120)
    images[110] = images[5]
    whole = TensorItems(images, labels_of(120), 1)
    parts = Subset(whole, [*range(100)][::-1]),Subset(whole, [*range(100, 120)])
    dls = DataLoaders(*(TfmdDL(o, bs=16, num_workers=0) for o in parts))
    found = copies(Learner(dls, small_convnet(3, .25), loss_func=CrossEntropyLossFlat()), n=1)
    assert {found.item[0], found.other[0]}=={5,110} and {found.part[0], found.other_part[0]}=={'train','valid'}

def test_a_file_that_is_in_both_parts_is_a_leak(folder):
    learn = of_folder(folder, splitter=lambda items: ([*range(len(items))],[0,1]))
    found = copies(learn, within='across', n=2)
    assert (found.item==found.other).all() and (found.similarity==1).all()
    with pytest.raises(ValueError, match='a copy in training of each validation item'): without_leaks(learn.dls, found)

# What is done about it
def test_validation_without_what_has_a_copy_in_training(capsys):
    learn = with_planted()
    found = copies(learn)[:6]
    honest = without_leaks(learn.dls, found)
    assert '4 of 60 validation items have a copy in training' in capsys.readouterr().out
    with learn.no_bar():
        before,after = learn.get_preds(1)[0],learn.get_preds(dl=honest.valid)[0]
        loss = learn.validate(dl=honest.valid)[0]
    torch.testing.assert_close(after, before[:56])
    assert honest.train is learn.dls.train
    assert loss==pytest.approx(float(nn.functional.nll_loss(before[:56].log(), labels_of(60)[:56])), rel=1e-3)

def test_a_copy_of_a_copy_leaks_too():
    learn = with_planted()
    found = pd.DataFrame(dict(item=[56,57], part='valid', other=[0,56], other_part=['train','valid']))
    assert without_leaks(learn.dls, found).valid.n==58

def test_copies_within_validation_are_no_leak():
    learn = with_planted()
    found = pd.DataFrame(dict(item=[56], part='valid', other=[57], other_part='valid'))
    assert without_leaks(learn.dls, found).valid.n==learn.dls.valid.n==60

def test_files_that_leak_are_gone_from_validation(folder):
    learn = of_folder(folder, splitter=lambda items: ([i for i,o in enumerate(items) if 'again' not in o.name],
        [i for i,o in enumerate(items) if 'again' in o.name or o.name=='89.png']))
    found = copies(learn, within='across', n=2)
    honest = without_leaks(learn.dls, found)
    assert [o.name for o in honest.valid_ds.items]==['89.png'] or len(honest.valid_ds)==1
    with learn.no_bar(): assert len(learn.get_preds(dl=honest.valid)[0])==1

@pytest.mark.parametrize('valid_pct', [.1,.2,.5])
def test_a_splitter_keeps_groups_together_and_is_as_large_as_asked_for(valid_pct):
    df = pd.DataFrame(index=range(100, 300))
    found = pd.DataFrame(dict(item=[100,101,150,160], other=[101,102,151,299]))
    train,valid = without_copies(found, valid_pct, seed=3)(df)
    assert sorted(train+valid)==list(range(200)) and len(valid)==200*valid_pct
    for group in ({0,1,2},{50,51},{60,199}): assert group<={*train} or group<={*valid}
    assert without_copies(found, valid_pct, seed=3)(df)==(train,valid)
    assert without_copies(found, valid_pct, seed=4)(df)!=(train,valid)

def test_a_splitter_leaves_random_states_alone():
    before = torch.get_rng_state()
    without_copies(pd.DataFrame(dict(item=[], other=[])))(pd.DataFrame(index=range(9)))
    assert torch.get_rng_state().equal(before)

# What is left alone
def digest(learn):
    model = [(m.training, len(m._forward_hooks)) for m in learn.model.modules()]
    states = torch.get_rng_state(),random.getstate(),str(np.random.get_state()),learn.dls.train.rng.getstate()
    held = [getattr(learn, name, None) for name in ('xb','yb','pred','dl','iter','training')]
    cbs = sorted(map(str, map(type, learn.cbs)))
    return copy.deepcopy((model, weights(learn), learn.opt.state_dict(), states, cbs)),held

def is_unchanged(learn, before):
    now = digest(learn)
    is_held = all(a is b for a,b in zip(now[1], before[1]))
    return same(now[0][1], before[0][1]) and str(now[0])==str(before[0]) and is_held

def trained():
    learn = quiet_fit(with_planted(), 1)
    next(iter(learn.dls.train))
    return learn

@pytest.mark.parametrize('asked', [copies, lambda learn: copies(learn, flips=True),
    lambda learn: odd(learn)], ids=['copies','flips','odd'])
def test_nothing_of_a_learner_changes(asked):
    learn = trained()
    before = digest(learn)
    asked(learn)
    assert is_unchanged(learn, before)

class Stops(Callback):
    "Ctrl-C in the second batch of a pass"
    def after_pred(self):
        if self.iter==1: raise KeyboardInterrupt

def test_an_interrupt_leaves_nothing_behind():
    learn = trained()
    learn.add_cb(Stops())
    before = digest(learn)
    with pytest.raises(KeyboardInterrupt): copies(learn)
    assert is_unchanged(learn, before)

def test_training_goes_on_as_it_would_have():
    one,two = trained(),trained()
    copies(one)
    for learn in (one,two):
        set_seed(1)
        quiet_fit(learn, 1)
    assert same(weights(one), weights(two))

# Tables and texts
def table(n=300):
    g = np.random.default_rng(0)
    df = pd.DataFrame(dict(a=g.normal(size=n), b=100*g.normal(size=n), kind=g.choice(list('xyz'), n)))
    df.index = [f'r{i}' for i in range(n)]
    df['y'] = np.where(df.a>0, 'yes', 'no')
    return df

def of_table(df, valid_idx):
    set_seed(0)
    dls = TabularDataLoaders.from_df(df, procs=[Categorify, Normalize], cat_names=['kind'], cont_names=['a','b'],
        y_names='y', valid_idx=valid_idx, bs=16)
    return tabular_learner(dls, layers=[8], loss_func=CrossEntropyLossFlat())

def shown_tables(monkeypatch):
    "The tables that are shown"
    tables = []
    monkeypatch.setattr('selback.views.copies.display_df', tables.append)
    return tables

def test_rows_of_a_table_are_refused():
    said = r'inputs of shape .* wanted images or texts; .* Equal rows of a table are df\[df.duplicated\(keep=False\)\]'
    with pytest.raises(ValueError, match=said): copies(of_table(table(), [*range(60)]))

def test_texts(monkeypatch):
    set_seed(0)
    words = [f'{a}{b}' for a in 'kltmr' for b in 'aeiou']
    rng = random.Random(0)
    texts = [' '.join(rng.choices(words, k=rng.randint(20, 40))) for _ in range(80)]
    texts[70],texts[71] = texts[3],' '.join(texts[4].split()[:-4]+['kala'])
    df = pd.DataFrame(dict(text=texts, label=[i%2 for i in range(80)], is_valid=[i>=60 for i in range(80)]))
    dls = TextDataLoaders.from_df(df, text_col='text', label_col='label', valid_col='is_valid', bs=16, seq_len=16)
    config = awd_lstm_clas_config.copy()
    config.update(emb_sz=8, n_hid=8, n_layers=1)
    learn = text_classifier_learner(dls, AWD_LSTM, config=config, pretrained=False, loss_func=CrossEntropyLossFlat())
    found = copies(learn)
    assert names(found[:2])=={frozenset([3,70]), frozenset([4,71])}
    assert found.similarity[0]==1 and .6<found.similarity[1]<1
    tables = shown_tables(monkeypatch)
    learn.show_copies(2, found=found)
    assert tables[0].both.str.contains(' '.join(texts[4].split()[:6])).tolist()==[False,True]

# Pictures
def test_pairs_are_shown_side_by_side_and_those_that_differ_first():
    import matplotlib.pyplot as plt
    learn = with_planted()
    found = copies(learn, n=6)
    learn.show_copies(4, found=found)
    assert len(plt.gcf().axes)==8
    titles = [ax.get_title().split('\n') for ax in plt.gcf().axes[:2]]
    assert titles==[[f'{part}, {label}', f'{key}'] for part,label,key in
        ((found.part[0], found.label[0], found.item[0]), (found.other_part[0], found.other_label[0], found.other[0]))]
    learn.show_copies(1, differ=True, found=found)
    first = found[found.label!=found.other_label].iloc[0]
    assert plt.gcf().axes[0].get_title()==f'{first.part}, {first.label}\n{first["item"]}'
    plt.close('all')

# Odd images
def odd(learn):
    with learn.no_bar(): return learn.find_odd()

def test_what_is_odd_in_arrays_made_by_hand():
    train = drawn(150)
    train[3],train[4],train[5] = 0,255,100
    train[6] = train[6].float().mean(0, keepdim=True).round().byte()
    train[7,0],train[7,1:] = train[7,0]//2+127,train[7,1:]//4
    train[8,:,:9],train[8,:,-9:] = 0,0
    found = odd(of_images(train, drawn(30, seed=1)))
    wanted = {('black',3), ('white',4), ('blank',5), ('grey',6), ('tinted',7), ('margins',8)}
    assert {*zip(found.kind, found['item'])}>=wanted
    assert {*found['item']}=={3,4,5,6,7,8} and {*found.part}=={'train'}

def test_among_clean_images_little_is_odd(): assert len(odd(of_images(drawn(400), drawn(60, seed=1))))<3

def test_where_margins_and_grey_are_usual_they_are_not_odd():
    train = drawn(150).float().mean(1, keepdim=True).repeat(1, 3, 1, 1).byte()
    train[:,:,:8] = 0
    assert not len(odd(of_images(train, train[:20])))
    train[0,0] //= 2
    assert odd(of_images(train, train[1:20])).kind.tolist()==['coloured']

def test_files_that_are_broken_tiny_or_large(folder, tmp_path):
    import shutil
    here = shutil.copytree(folder, tmp_path/'images')
    good = (here/'a'/'03.png').read_bytes()
    (here/'a'/'03.png').write_bytes(good[:200])
    Image.open(here/'b'/'04.png').resize((6,6)).save(here/'b'/'04.png')
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (32,32,3), dtype=np.uint8)).save(here/'c'/'05.png')
    learn = of_folder(here)
    found = odd(learn).set_index('item').kind
    assert found['a/03.png']=='corrupt' and 'tiny' in [*found[['b/04.png']]]
    with pytest.raises(ValueError, match=r'1 files that cannot be opened: .*03\.png'): copies(learn)

def test_values_by_hand():
    told = measures(Image.fromarray(np.full((10,20), 51, np.uint8)), 400)
    assert told['light']==pytest.approx(.2) and told['side']==10 and told['contrast']==0 and told['bytes_per_pixel']==2
    assert far_out([1]*30+[9], True, 1).nonzero()[0].tolist()==[30]
    assert not far_out([1]*30+[9], False, 1).any() and not far_out([1]*30+[1.5], True, 1).any()
    assert not far_out([float('nan')]*3, True, 1).any()

# What can go wrong
@pytest.mark.parametrize('kwargs, error, said', [
    (dict(within='test'), ValueError, "within: got 'test', wanted 'both', 'across', 'train' or 'valid'"),
    (dict(n=0), ValueError, 'n: got 0, wanted a whole number of at least 1'),
    (dict(n='3'), TypeError, "n: got '3'"),
    (dict(layer='8'), TypeError, 'layer: got a str, wanted a module of the model'),
    (dict(layer=nn.Linear(2, 2)), ValueError, 'layer: got a Linear that does not, wanted one that runs in the model')])
def test_what_is_asked_for_wrongly(kwargs, error, said):
    with pytest.raises(error, match=said): copies(with_planted(), **kwargs)

def test_what_is_no_list_of_copies():
    learn = with_planted()
    found = copies(learn, n=5)
    for asked in (lambda o: learn.show_copies(found=o), lambda o: without_leaks(learn.dls, o), without_copies):
        with pytest.raises(TypeError, match=r'wanted what learn\.find_copies\(\) returned'): asked([1])
    with pytest.raises(ValueError, match='got an item 999 of part'): learn.show_copies(found=found.assign(item=999))
    with pytest.raises(ValueError, match='items that are known by their place'): without_copies(found)([*range(9)])
    with pytest.raises(ValueError, match='pairs with an item that is not there'):
        without_copies(pd.DataFrame(dict(item=['a/1.png'], other=['a/2.png'])))(['x/a/1.png'])

def test_no_validation_and_no_images():
    learn = table_learner()
    with pytest.raises(ValueError, match='find_odd: got items that are a Tensor, wanted images'): odd(learn)
    learn.dls.loaders.pop()
    with pytest.raises(ValueError, match="within: got 'across' of a learner without validation items"):
        copies(learn, within='across')

# What a tester found
def test_a_network_that_tells_nothing_apart_is_refused(folder):
    for value,said in ((float('nan'),'features that are NaN'), (0.,'the same features of all items')):
        learn = of_folder(folder)
        with torch.no_grad():
            for p in learn.model.parameters(): p.fill_(value)
        with pytest.raises(ValueError, match=said): copies(learn)

def test_of_few_items_only_equal_ones_are_called_copies(capsys):
    x = torch.rand(12, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    x[7] = x[3]
    dls = dls_of(x, torch.arange(12)%2, bs=4, n_valid=2)
    learn = Learner(dls, small_convnet(2, .5), loss_func=CrossEntropyLossFlat())
    found = copies(learn, n=1)
    assert 'some 1 pairs are likelier copies than not' in capsys.readouterr().out
    assert (found.similarity==1).all()

def test_a_layer_that_is_used_for_each_of_two_images_is_taken(capsys):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.body,self.head = nn.Conv2d(3, 8, 3, padding=1),nn.Linear(8, 3)

        def forward(self, a, b): return self.head((self.body(a)-self.body(b)).abs().mean((2,3)))

    a,b = drawn(60).float()/255,drawn(60, seed=1).float()/255
    a[40],b[40] = a[7],b[7]
    a[41] = a[8] # the other image is another one
    items = [*zip(a, b, tensor([i%3 for i in range(60)]))]
    dls = DataLoaders.from_dsets(items[:48], items[48:], bs=16, n_inp=2, num_workers=0)
    dls.n_inp = 2
    found = copies(Learner(dls, Pair(), loss_func=CrossEntropyLossFlat()))
    assert "compared by the output of 'body'" in capsys.readouterr().out
    assert {found['item'][0],found.other[0]}=={7,40} and found.similarity[0]==1
    assert (found.similarity[1:]<1).all()

@pytest.mark.parametrize('side, wanted', [(8, '1'), (16, '2'), (32, '2')])
def test_the_layer_that_is_chosen_has_maps_of_eight_pixels_or_else_of_four(side, wanted, capsys):
    def halve(n_in, n_out): return nn.Conv2d(n_in, n_out, 3, stride=2, padding=1)
    alike = [nn.Conv2d(8, 8, 3, padding=1) for _ in range(3)] # a third of six is two, and the one that runs then
    model = nn.Sequential(nn.Identity(), halve(3, 8), nn.Conv2d(8, 8, 3, padding=1) if side>8 else halve(8, 8), *alike,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    dls = dls_of(torch.rand(60, 3, side, side), torch.arange(60)%3, n_valid=12)
    copies(Learner(dls, model, loss_func=CrossEntropyLossFlat()))
    assert f"60 items, compared by the output of '{wanted}'" in capsys.readouterr().out

def test_labels_that_are_unknown_do_not_differ():
    found = pd.DataFrame(dict(item=[0,1,2], part='train', other=[3,4,5], other_part='train', similarity=1.,
        label=['a',float('nan'),'a'], other_label=['a',float('nan'),'b'], group=[1,2,3]))
    import matplotlib.pyplot as plt
    learn = of_images(drawn(20), drawn(8, seed=1))
    learn.show_copies(1, differ=True, found=found)
    names = [ax.get_title() for ax in plt.gcf().axes]
    plt.close('all')
    assert [name.split()[-1] for name in names]==['2','5']

def test_a_file_that_is_broken_cannot_be_shown():
    found = pd.DataFrame(dict(item=[0,1], part='train', kind=['corrupt','blank']))
    with pytest.raises(ValueError, match="got 'corrupt' of a list with 'blank' that can be shown"):
        of_images(drawn(8), drawn(4)).show_odd(kind='corrupt', found=found)

def test_where_most_images_are_blank_they_are_told():
    x = drawn(60)
    x[:40] = 128
    found = odd(of_images(x, drawn(20, seed=1)))
    assert (found.kind=='blank').sum()==40

def test_a_table_whose_index_repeats_is_refused(folder):
    table = pd.DataFrame(dict(x=range(80)), index=[*range(40)]*2)
    found = pd.DataFrame(dict(item=[3], other=[5]))
    with pytest.raises(ValueError, match='rows of a table whose index has each label once'):
        without_copies(found)(table)

@pytest.mark.parametrize('asked', ['find_copies', 'find_odd'])
def test_a_learner_that_was_loaded_has_no_items(asked, tmp_path):
    of_images(drawn(8), drawn(4)).export(tmp_path/'learner.pkl')
    with pytest.raises(ValueError, match='give a learner that was loaded its data'):
        getattr(load_learner(tmp_path/'learner.pkl'), asked)()

def test_groups_that_fill_all_leave_nothing_to_validate_on():
    table = pd.DataFrame(dict(x=range(20)))
    found = pd.DataFrame(dict(item=[*range(19)], other=[*range(1, 20)]))
    with pytest.raises(ValueError, match='got groups of copies of which none is as small'): without_copies(found)(table)
