"Copies among a learner's items, and what is done about them; the learner stays as it is"
import copy, random

import matplotlib.pyplot as plt, numpy as np, pandas as pd, pytest, torch
from fastai.callback.core import Callback
from fastai.data.block import CategoryBlock, DataBlock
from fastai.data.core import DataLoaders, TfmdDL
from fastai.data.transforms import get_image_files, parent_label
from fastai.learner import load_learner
from fastai.losses import CrossEntropyLossFlat
from fastai.tabular.all import Categorify, Normalize, TabularDataLoaders, tabular_learner
from fastai.text.all import AWD_LSTM, TextDataLoaders, awd_lstm_clas_config, text_classifier_learner
from fastai.vision.all import ImageBlock, ImageDataLoaders, Resize
from helpers import *
from PIL import Image
from selback.bench.datasets import small_convnet, tensor_dls
from torch.utils.data import Subset

def drawn(n, seed=0, side=32):
    "Images of chance, smooth, as bytes"
    small = torch.rand(n, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
    return (torch.nn.functional.interpolate(small, size=side, mode='bicubic').clamp(0, 1)*255).byte()

def labels_of(n): return torch.arange(n)%3

def of_images(train, valid, **kwargs):
    "A learner of images in memory, untrained"
    set_seed(0)
    dls = tensor_dls((train, labels_of(len(train))), (valid, labels_of(len(valid))), 32, n_classes=3)
    return learner_on(dls, small_convnet(3, .25), lr=1e-2, **kwargs)

def copies(learn, **kwargs):
    with learn.no_bar(): return learn.find_copies(**kwargs)

def with_planted():
    "200 items to train on, 60 to validate, of which the last 4 are lighter copies of the first; two train twice"
    train = drawn(200)
    lighter = (train[:4].float()*.85+10).byte()
    return of_images(torch.cat([train, train[50:52]]), torch.cat([drawn(56, seed=1), lighter]))

def places(found): return {frozenset([(o.part, o.item), (o.other_part, o.other)]) for o in found.itertuples()}
def names(found): return {frozenset(o) for o in zip(found['item'], found.other)}

leaks = {frozenset([('train', i), ('valid', 56+i)]) for i in range(4)}
twice = {frozenset([('train', 50+i), ('train', 200+i)]) for i in range(2)}

# What is found
def test_planted_copies_are_found_exact_ones_first():
    "With their labels; and as many pairs as are asked for, of which the later ones are of no group"
    found = copies(with_planted())
    assert places(found[:2])==twice and places(found[:6])==twice | leaks
    assert (found.similarity[:2]==1).all() and (found.similarity[2:6]<1).all()
    assert 6<=found.group.notna().sum()==len(found)<10
    assert found.group[:6].tolist()==[1,2,3,4,5,6]
    assert list(found)==['item','part','other','other_part','similarity','label','other_label','group']
    assert [*found.label]==[o%3 for o in found['item']] and [*found.other_label]==[o%3 for o in found.other]
    more = copies(with_planted(), n=50)
    assert len(more)==50 and more[:len(found)].equals(found) and more.group[20:].isna().all()

def test_without_copies_few_are_likely_and_none_equal():
    found = copies(of_images(drawn(300), drawn(60, seed=1)))
    assert found.group.notna().sum()<4 and 5<=len(found)
    assert (found.similarity<1).all()

@pytest.mark.parametrize('within, wanted', [('across',leaks), ('train',twice), ('valid',set())])
def test_pairs_of_some_parts_only(within, wanted):
    found = copies(with_planted(), within=within)
    assert places(found[:len(wanted)])==wanted
    assert {*zip(found.part, found.other_part)}=={('valid','train') if within=='across' else (within,within)}

def test_mirror_images_unless_they_are_left_out():
    train = drawn(200)
    learn = of_images(train, torch.cat([drawn(50, seed=1), train[:3].flip(-1)]))
    mirrored = {frozenset([('train', i), ('valid', 50+i)]) for i in range(3)}
    assert places(copies(learn)[:3])==mirrored
    assert not places(copies(learn, flips=False)[:3]) & mirrored

def test_blank_images_are_copies_of_nothing():
    train = drawn(200)
    train[3],train[4],train[5],train[7] = 0,255,255,train[6]
    for i in 8,9: train[i] = torch.tensor([200,90,20]).byte().view(3, 1, 1)
    found = copies(of_images(train, drawn(50, seed=1)))
    assert places(found[found.group.notna()])=={frozenset([('train',6),('train',7)])}

def test_a_burst_is_one_group():
    train = drawn(200)
    burst = torch.cat([(train[:1].float()*(1-.02*i)).byte() for i in range(1, 4)])
    found = copies(of_images(torch.cat([train, burst[:2]]), torch.cat([drawn(40, seed=1), burst[2:]])))
    own = found[found.group==1]
    assert {*own['item'], *own.other}=={0,200,201,40} and len(own)==6
    assert found.group.max()<4

def test_a_layer_that_is_named():
    learn = with_planted()
    assert places(copies(learn, layer=learn.model[8])[:6])==twice | leaks
    assert places(copies(learn, layer=learn.model[-2], n=6)[:2])==twice # rows, no maps

@pytest.mark.parametrize('side, wanted', [(8, '1'), (16, '2'), (32, '2')])
def test_the_layer_that_is_chosen_has_maps_of_eight_pixels_or_else_of_four(side, wanted, capsys):
    def halve(n_in, n_out): return nn.Conv2d(n_in, n_out, 3, stride=2, padding=1)
    alike = [nn.Conv2d(8, 8, 3, padding=1) for _ in range(3)] # a third of six is two, and the one that runs then
    model = nn.Sequential(nn.Identity(), halve(3, 8), nn.Conv2d(8, 8, 3, padding=1) if side>8 else halve(8, 8), *alike,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    dls = dls_of(torch.rand(60, 3, side, side), torch.arange(60)%3, n_valid=12)
    copies(learner_on(dls, model))
    assert f"60 items, compared by the output of '{wanted}'" in capsys.readouterr().out

def test_a_layer_that_is_used_for_each_of_two_images_is_taken(capsys):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.body,self.head = nn.Conv2d(3, 8, 3, padding=1),nn.Linear(8, 3)

        def forward(self, a, b): return self.head((self.body(a)-self.body(b)).abs().mean((2,3)))

    a,b = drawn(60).float()/255,drawn(60, seed=1).float()/255
    a[40],b[40] = a[7],b[7]
    a[41] = a[8] # the other image is another one
    items = [*zip(a, b, labels_of(60))]
    dls = DataLoaders.from_dsets(items[:48], items[48:], bs=16, n_inp=2, num_workers=0)
    dls.n_inp = 2
    found = copies(learner_on(dls, Pair()))
    assert "compared by the output of 'body'" in capsys.readouterr().out
    assert names(found[:1])=={frozenset([7,40])}
    assert found.similarity[0]==1>found.similarity[1:].max()

def test_augmentation_is_left_out():
    "Of images that fastai augments by batch"
    learn = image_learner(n=80)
    images = learn.dls.train.dataset.images
    images[1] = images[0]
    found = copies(learn, within='train', n=1)
    assert names(found)=={frozenset([0,1])} and found.similarity[0]==1

def test_half_precision():
    learn = with_planted()
    learn.add_cb(CPUMixedPrecision())
    quiet_fit(learn, 1)
    assert places(copies(learn)[:6])==twice | leaks

def test_of_few_items_only_equal_ones_are_called_copies():
    x = torch.rand(12, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    x[7] = x[3]
    learn = learner_on(dls_of(x, torch.arange(12)%2, bs=4, n_valid=2), small_convnet(2, .5))
    found = copies(learn)
    assert found.group.notna().tolist()==(found.similarity==1).tolist()==[True]+4*[False]

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
    return learner_on(block.dataloaders(folder, path=folder, bs=16, num_workers=0), small_convnet(3, .25))

again = {frozenset([f'{c}/0{i}.png', f'{c}/0{i}_again.png']) for i,c in enumerate('ab')}

def test_files_are_told_by_their_paths_and_the_next_split_keeps_copies_together(folder):
    found = copies(of_folder(folder))[:2]
    assert names(found)==again
    assert [*found.label]==[o[0] for o in found['item']]
    other = of_folder(folder, splitter=keep_together(found, valid_pct=.25, seed=1))
    parts = [{*ds.items} for ds in (other.dls.train_ds, other.dls.valid_ds)]
    assert [*map(len, parts)]==[69,23]
    for pair in again: assert sum({folder/o for o in pair}<=part for part in parts)==1

def test_a_table_of_files_is_told_by_its_own_index(folder):
    files = [o.relative_to(folder).as_posix() for o in sorted(get_image_files(folder))]
    df = pd.DataFrame(dict(file=files, label=[o[0] for o in files]), index=[f'row {i}' for i in range(len(files))])
    dls = ImageDataLoaders.from_df(df, folder, bs=16, item_tfms=Resize(32), num_workers=0, seed=0)
    found = copies(learner_on(dls, small_convnet(3, .25)))[:2]
    assert {frozenset(df.file[[*pair]]) for pair in names(found)}==again
    for seed in range(9):
        _,valid = keep_together(found, valid_pct=.5, seed=seed)(df)
        for pair in names(found): assert len({df.index.get_loc(o) in valid for o in pair})==1

def test_a_subset_is_told_by_its_places_in_the_whole():
    images = drawn(120)
    images[110] = images[5]
    whole = TensorItems(images, labels_of(120), 1)
    parts = Subset(whole, [*range(100)][::-1]),Subset(whole, [*range(100, 120)])
    dls = DataLoaders(*(TfmdDL(o, bs=16, num_workers=0) for o in parts))
    found = copies(learner_on(dls, small_convnet(3, .25)), n=1)
    assert places(found)=={frozenset([('train',5),('valid',110)])}

# What is done about it
def test_validation_without_what_has_a_copy_in_training():
    learn = with_planted()
    honest = without_leaks(learn.dls, copies(learn)[:6])
    with learn.no_bar(): (before,targets),(after,_) = learn.get_preds(1),learn.get_preds(dl=honest.valid)
    torch.testing.assert_close(after, before[:56])
    with learn.no_bar(): loss = learn.validate(dl=honest.valid)[0]
    assert loss==pytest.approx(float(nn.functional.nll_loss(before[:56].log(), targets[:56])), rel=1e-3)
    assert honest.train is learn.dls.train

@pytest.mark.parametrize('pairs, n_left', [
    ([('valid',56,'train',0), ('valid',57,'valid',56)], 58), # a copy of a copy leaks, too
    ([('valid',56,'valid',57)], 60)])
def test_what_leaks(pairs, n_left):
    found = pd.DataFrame(pairs, columns=['part','item','other_part','other'])
    assert without_leaks(with_planted().dls, found).valid.n==n_left

def test_files_that_leak_are_gone_from_validation(folder):
    "Those that are in both parts, too"
    def split(items): return [[i for i,o in enumerate(items) if ('again' in o.name)==valid] for valid in (False,True)]
    learn = of_folder(folder, splitter=lambda items: (split(items)[0], split(items)[1]+[10,11]))
    found = copies(learn, within='across', n=4)
    assert (found[found['item']==found.other].similarity==1).all()
    with pytest.raises(ValueError, match='in training, wanted others; split anew'): without_leaks(learn.dls, found)
    honest = without_leaks(learn.dls, found[found['item']!=found.other])
    assert len(honest.valid_ds)==2 and not any('again' in o.name for o in honest.valid_ds.items)

@pytest.mark.parametrize('valid_pct', [.1,.2,.5])
def test_a_splitter_keeps_groups_together_and_is_as_large_as_asked_for(valid_pct):
    "And leaves random states alone"
    df = pd.DataFrame(index=range(100, 300))
    pairs = [(100,101), (101,102), (150,151), *zip(range(160, 180), range(299, 279, -1))]
    found = pd.DataFrame(pairs, columns=['item','other'])
    state = torch.get_rng_state()
    train,valid = keep_together(found, valid_pct=valid_pct, seed=3)(df)
    assert sorted(train+valid)==[*range(200)] and len(valid)==200*valid_pct
    for group in ({0,1,2},{50,51},*({60+i,199-i} for i in range(20))): assert group<={*train} or group<={*valid}
    def again(seed): return keep_together(found, valid_pct=valid_pct, seed=seed)(df)
    assert again(3)==(train,valid)!=again(4)
    again(None)
    assert torch.get_rng_state().equal(state)

# What is left alone
def digest(learn):
    model = [(m.training, len(m._forward_hooks)) for m in learn.model.modules()]
    states = torch.get_rng_state(),random.getstate(),str(np.random.get_state()),learn.dls.train.rng.getstate()
    held = [getattr(learn, name, None) for name in ('xb','yb','pred','dl','iter','training')]
    cbs = sorted(map(str, map(type, learn.cbs)))
    return copy.deepcopy((model, weights(learn), learn.opt.state_dict(), states, cbs)),held

def interrupted(learn):
    "Ctrl-C in the second batch of the pass"
    class Stops(Callback):
        def after_pred(self):
            if self.iter==1: raise KeyboardInterrupt
    stops = Stops()
    with pytest.raises(KeyboardInterrupt),learn.added_cbs([stops]): copies(learn)

@pytest.mark.parametrize('asked', [copies, lambda learn: copies(learn, flips=True), lambda learn: learn.find_odd(),
    interrupted], ids=['copies','flips','odd','interrupted'])
def test_nothing_of_a_learner_changes(asked):
    learn = quiet_fit(with_planted(), 1)
    next(iter(learn.dls.train))
    before = digest(learn)
    asked(learn)
    now = digest(learn)
    assert same(now[0][1], before[0][1]) and str(now[0])==str(before[0])
    assert all(a is b for a,b in zip(now[1], before[1]))

# Tables
def of_table(df, valid_idx):
    set_seed(0)
    dls = TabularDataLoaders.from_df(df, procs=[Categorify, Normalize], cat_names=['kind'], cont_names=['a','b'],
        y_names='y', valid_idx=valid_idx, bs=16)
    return tabular_learner(dls, layers=[8], loss_func=CrossEntropyLossFlat())

def test_rows_of_a_table():
    g = np.random.default_rng(0)
    df = pd.DataFrame(dict(a=g.normal(size=300), b=100*g.normal(size=300), kind=g.choice(list('xyz'), 300)),
        index=[f'r{i}' for i in range(300)])
    df['y'] = np.where(df.a>0, 'yes', 'no')
    df.loc['r10',['a','b','kind']] = df.loc['r200',['a','b','kind']]
    df.loc['r11',['a','b','kind']] = df.a['r201']+.002,df.b['r201']-.1,df.kind['r201']
    df.loc['r12',['a','b']] = df.loc['r202',['a','b']]
    df.loc['r12','kind'] = 'x' if df.kind['r202']!='x' else 'y' # another category
    learn = of_table(df, [*range(60)])
    found = copies(learn)
    assert names(found[:2])=={frozenset(['r10','r200']), frozenset(['r11','r201'])}
    assert found.similarity[0]==1>found.similarity[1]
    assert frozenset(['r12','r202']) not in names(found)
    assert found.label[0]==df.y[found['item'][0]]
    with pytest.raises(ValueError, match='show_copies: got rows of a table, wanted images'):
        learn.show_copies(found=found)
    assert len(without_leaks(learn.dls, found[:2]).valid_ds)==58
    with pytest.raises(ValueError, match='flips: got True for rows or texts'): copies(learn, flips=True)

@pytest.mark.parametrize('n_values,n_copies', [(1000,2),(3,0)])
def test_rows_of_categories_alone_are_copies_where_equal_ones_are_no_chance(n_values, n_copies):
    g = np.random.default_rng(0)
    df = pd.DataFrame({name: g.integers(0, n_values, 200).astype(str) for name in 'abc'})
    df['y'] = np.where(np.arange(200)%2, 'yes', 'no')
    df.loc[70:71,['a','b','c']] = df.loc[100:101,['a','b','c']].to_numpy()
    columns = dict(cat_names=[*'abc'], y_names='y', valid_idx=[*range(60)])
    dls = TabularDataLoaders.from_df(df, procs=[Categorify], bs=16, **columns)
    class Net(nn.Linear):
        def forward(self, codes, numbers): return super().forward(codes.float())
    found = copies(learner_on(dls, Net(3, 2)), n=4)
    likely = found[found.group.notna()]
    assert len(likely)==n_copies
    if n_copies: assert names(likely)=={frozenset([70,100]), frozenset([71,101])}

def of_columns(x):
    dls = dls_of(x, torch.arange(len(x))%2, n_valid=60)
    return learner_on(dls, nn.Linear(x.shape[1], 2))

def test_a_number_for_unknown_makes_no_rows_equal():
    x = torch.randn(300, 3, generator=torch.Generator().manual_seed(0))
    for i in range(3): x[7+i,i] = -9999.
    assert (copies(of_columns(x), n=20).similarity<1).all()

@pytest.mark.parametrize('within', ['across','both'])
def test_rows_of_few_values_are_equal_by_chance(within):
    x = torch.randint(3, (240,4), generator=torch.Generator().manual_seed(0)).float()
    found = copies(of_columns(x), within=within)
    assert (found.similarity==1).all() and found.group.isna().all()

def test_rows_that_nearly_agree_are_not_called_equal():
    "As of one column with many values: the nearest are nearer than float32 tells"
    x = torch.rand(2000, 1, generator=torch.Generator().manual_seed(0))
    x[100] = x[200]
    found = copies(of_columns(torch.cat([x, torch.ones(2000, 1)], 1)), n=20)
    assert found.similarity[0]==1>found.similarity[1]
    assert names(found[:1])=={frozenset([40,140])} # behind the 60 that validate

# Texts
def of_texts(texts, **kwargs):
    set_seed(0)
    df = pd.DataFrame(dict(text=texts, label=[i%2 for i in range(len(texts))]))
    dls = TextDataLoaders.from_df(df, text_col='text', label_col='label', bs=16, seq_len=16, seed=0, **kwargs)
    config = awd_lstm_clas_config | dict(emb_sz=8, n_hid=8, n_layers=1)
    return text_classifier_learner(dls, AWD_LSTM, config=config, pretrained=False, loss_func=CrossEntropyLossFlat())

def a_word(rng): return ''.join(rng.choice('bdfgklmnprstvz')+rng.choice('aeiou') for _ in range(rng.randint(2, 4)))

def test_texts(monkeypatch):
    rng = random.Random(0)
    words = [f'{a}{b}' for a in 'kltmr' for b in 'aeiou']
    texts = [' '.join(rng.choices(words, k=rng.randint(20, 40))) for _ in range(80)]
    texts[70],texts[71] = texts[3],' '.join(texts[4].split()[:-4]+['kala'])
    learn = of_texts(texts)
    found = copies(learn)
    assert names(found[:2])=={frozenset([3,70]), frozenset([4,71])}
    assert found.similarity[0]==1 and .6<found.similarity[1]<1
    tables = []
    monkeypatch.setattr('selback.clean.copies.display_rows', tables.append)
    learn.show_copies(n=2, found=found)
    for name in 'text','other_text':
        assert tables[0][name].str.contains(' '.join(texts[4].split()[:6])).tolist()==[False,True]

def rare_titles(seed):
    rng = random.Random(seed)
    return [' '.join(a_word(rng) for _ in range(rng.randint(2, 5))).capitalize() for _ in range(100)]

@pytest.mark.parametrize('seed', range(3))
def test_titles_of_rare_words_are_no_copies(seed):
    "All of these words are the same one to the network"
    found = copies(of_texts(rare_titles(seed), max_vocab=10))
    assert found.group.isna().all() and (found.similarity<1).all()

def test_copies_among_titles_of_rare_words():
    "With a letter changed; those with capital letters are equal, short ones and other orders of words are not"
    titles = rare_titles(0)
    titles[:4] = 'Up','It','Mira Vasoto Kuda Bene','Bene Kuda Vasoto Mira'
    changed = [i for i,o in enumerate(titles) if i>4 and o.count(' ')>2]
    texts = titles+[titles[i][:-1]+'y' for i in changed]+[titles[4].upper()]
    found = copies(of_texts(texts, max_vocab=10))
    assert names(found[found.similarity==1])=={frozenset([4,len(texts)-1])}
    planted = {frozenset([i, 100+k]) for k,i in enumerate(changed)}
    likely = names(found[found.group.notna()])
    assert len(changed)>15 and planted<=likely
    assert {pair for pair in likely if max(pair)<100}<={frozenset([2,3])}

# Pictures
def titles_shown(learn, **kwargs):
    learn.show_copies(**kwargs)
    titles = [ax.get_title() for ax in plt.gcf().axes]
    plt.close('all')
    return titles

def test_pairs_are_shown_side_by_side_and_those_that_differ_first():
    learn = with_planted()
    found = copies(learn, n=6)
    def titles(o): return f'{o.part}, {o.label}\n{o["item"]}',f'{o.other_part}, {o.other_label}\n{o.other}'
    shown = titles_shown(learn, n=4, found=found)
    assert len(shown)==8 and tuple(shown[:2])==titles(found.iloc[0])
    differs = found[found.label!=found.other_label].iloc[0]
    assert tuple(titles_shown(learn, n=1, differ=True, found=found))==titles(differs)

def test_labels_that_are_unknown_do_not_differ():
    nan = float('nan')
    found = pd.DataFrame(dict(item=[0,1,2], part='train', other=[3,4,5], other_part='train', similarity=1.,
        label=['a',nan,'a'], other_label=['a',nan,'b'], group=[1,2,3]))
    shown = titles_shown(of_images(drawn(20), drawn(8, seed=1)), n=1, differ=True, found=found)
    assert [o.split()[-1] for o in shown]==['2','5']

# What can go wrong
@pytest.mark.parametrize('kwargs, error, said', [
    (dict(within='test'), ValueError, "within: got 'test'"),
    (dict(n=0), ValueError, 'n: got 0'),
    (dict(n='3'), TypeError, "n: got '3'"),
    (dict(layer='8'), TypeError, 'layer: got a str'),
    (dict(layer=nn.Linear(2, 2)), ValueError, 'layer: got a Linear that does not')])
def test_what_is_asked_for_wrongly(kwargs, error, said):
    with pytest.raises(error, match=said): copies(with_planted(), **kwargs)

def test_what_is_no_list_of_copies():
    learn = with_planted()
    found = copies(learn, n=5)
    for asked in (lambda o: learn.show_copies(found=o), lambda o: without_leaks(learn.dls, o)):
        for given in ([1], found[['item']]):
            with pytest.raises(TypeError, match=r'wanted what .*learn\.find_copies\(\) returned'): asked(given)
    with pytest.raises(TypeError, match='find_copies'): keep_together(found[['item']])([])
    with pytest.raises(TypeError, match='show_copies: '): learn.show_copies(found=found.drop(columns='label'))
    with pytest.raises(ValueError, match='got an item 999 of part'): learn.show_copies(found=found.assign(item=999))

@pytest.mark.parametrize('pairs, items, said', [
    ([(0,1)], [*range(9)], 'items that are known by their place'),
    ([('a/1.png','a/2.png')], ['x/a/1.png'], 'pairs with an item that is not there'),
    ([(3,5)], pd.DataFrame(index=[*range(40)]*2), 'whose index has each label once'),
    ([*zip(range(19), range(1, 20))], pd.DataFrame(index=range(20)), 'one group of 20 items')])
def test_what_cannot_be_split(pairs, items, said):
    with pytest.raises(ValueError, match=said): keep_together(pd.DataFrame(pairs, columns=['item','other']))(items)

def test_no_validation():
    learn = table_learner()
    learn.dls.loaders.pop()
    with pytest.raises(ValueError, match="got 'across' of a learner without validation"): copies(learn, within='across')

@pytest.mark.parametrize('value, said', [(float('nan'),'features that are NaN'), (0.,'the same features of all items')])
def test_a_network_that_tells_nothing_apart_is_refused(value, said):
    learn = with_planted()
    with torch.no_grad():
        for p in learn.model.parameters(): p.fill_(value)
    with pytest.raises(ValueError, match=said): copies(learn)

def test_a_learner_that_was_loaded_has_no_items(tmp_path):
    of_images(drawn(8), drawn(4)).export(tmp_path/'learner.pkl')
    for asked in ('find_copies', 'find_odd'):
        with pytest.raises(ValueError, match='give a learner that was loaded its data'):
            getattr(load_learner(tmp_path/'learner.pkl'), asked)()
