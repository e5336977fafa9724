"Labels that may be wrong: the list of them, pictures, the map, and their correction"
import shutil
from functools import partial
from pathlib import Path

import matplotlib, numpy as np, pandas as pd, pytest
from fastai.data.block import CategoryBlock, DataBlock, MultiCategoryBlock
from fastai.data.transforms import ColReader, ColSplitter
from fastai.losses import BCEWithLogitsLossFlat
from fastai.tabular.all import Categorify, Normalize, TabularDataLoaders, tabular_learner
from fastai.vision.augment import Resize
from fastai.vision.data import ImageBlock, ImageDataLoaders, MaskBlock
from helpers import *
from PIL import Image

matplotlib.use('Agg')
import matplotlib.pyplot as plt

COLOURS = dict(blue=(30,30,220), green=(30,220,30), red=(220,30,30))
N_OF_EACH = 10 # training items; two more of each are for validation
WRONG = {'blue_3.png': 'red', 'green_5.png': 'blue', 'red_8.png': 'green'} # labels of three pictures

@pytest.fixture(autouse=True)
def shown(monkeypatch):
    "As in a notebook, where `display` is known"
    from fastai.vision import widgets
    monkeypatch.setattr(widgets, 'display', lambda o: None, raising=False)
    yield
    plt.close('all')

# A folder of pictures
@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    "Pictures of one colour each, in folders that are their labels; three of them in the wrong one"
    root,generator = tmp_path_factory.mktemp('colours'),np.random.default_rng(0)
    for colour,rgb in COLOURS.items():
        for i in range(N_OF_EACH+2):
            name = f'{colour}_{i}.png'
            label = WRONG.get(name, colour)
            file = root/('train' if i<N_OF_EACH else 'valid')/label/name
            file.parent.mkdir(parents=True, exist_ok=True)
            pixels = np.clip(np.array(rgb)+generator.normal(0, 20, (12, 12, 3)), 0, 255)
            Image.fromarray(pixels.astype(np.uint8)).save(file)
    return root

def table_of(folder, **names):
    "The same as a table, with the paths in `file` and the labels in `colour`, unless these have other names"
    files = sorted(folder.rglob('*.png'))
    frame = pd.DataFrame(dict(file=[str(f.relative_to(folder)) for f in files], colour=[f.parent.name for f in files],
        is_valid=[f.parts[-3]=='valid' for f in files]))
    return frame.rename(columns=names)

HOW = dict(bs=10, num_workers=0, item_tfms=Resize(12))

def from_folder(folder): return ImageDataLoaders.from_folder(folder, **HOW)

def from_df(folder):
    columns = dict(fn_col='file', label_col='colour', valid_col='is_valid')
    return ImageDataLoaders.from_df(table_of(folder), folder, **columns, **HOW)

def from_block(folder, block=CategoryBlock, get_y=ColReader('colour'), frame=None, **kwargs):
    columns = dict(get_x=ColReader('file', pref=f'{folder}/'), get_y=get_y, splitter=ColSplitter())
    blocks = DataBlock((ImageBlock,block), item_tfms=Resize(12), **columns, **kwargs)
    return blocks.dataloaders(table_of(folder) if frame is None else frame, bs=10, num_workers=0)

SOURCES = dict(from_folder=from_folder, from_df=from_df, from_block=from_block)

def learner_of(dls, n_out=3, loss_func=None):
    set_seed(0)
    net = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.BatchNorm1d(3), nn.Linear(3, n_out))
    return learner_on(dls, net, loss_func=loss_func, lr=.1)

@pytest.fixture(scope='module')
def learners(folder):
    "Of each source one that has trained"
    def trained(make):
        set_seed(0)
        return quiet_fit(learner_of(make(folder)).watch_items(), 8)
    return {name: trained(make) for name,make in SOURCES.items()}

@pytest.fixture
def learn(learners): return learners['from_folder']

def file_of(learn, i):
    items = learn.dls.train_ds.items
    return Path(items.file.iloc[i] if isinstance(items, pd.DataFrame) else items[i]).name

def keys_of(learn):
    "The key of each training item: its path from the folder, or its row's own index"
    items = learn.dls.train_ds.items
    if isinstance(items, pd.DataFrame): return items.index.tolist()
    return [Path(o).relative_to(learn.dls.path).as_posix() for o in items]

def name_of(learn, key): return file_of(learn, keys_of(learn).index(key))

def of_wrong(learn): return {key for key in keys_of(learn) if name_of(learn, key) in WRONG}

def right_label(name): return name.split('_')[0]

# The list
@pytest.mark.parametrize('source', SOURCES)
def test_the_list_begins_with_the_wrong_labels(learners, source):
    learn = learners[source]
    found = learn.selection.suspects()
    assert found.columns[:6].tolist()==['label','likelier','margin','probability','disagreed','looks']
    assert found.index.name==('file' if source=='from_folder' else 'row')
    assert sorted(found.index)==sorted(keys_of(learn))
    assert set(found.index[:3])==of_wrong(learn)
    assert found.margin.is_monotonic_increasing
    assert (found.looks==8).all()
    for key,row in found.iterrows():
        name = name_of(learn, key)
        assert row.label==WRONG.get(name, right_label(name))
        if name in WRONG: assert row.likelier==right_label(name) and row.margin<0
        if source!='from_folder': assert Path(row.file).name==name

def test_the_list_has_what_training_has_told(learn):
    found,told = learn.selection.suspects(),learn.selection.labels.frame()
    told = told.set_axis(keys_of(learn)).loc[found.index]
    for name in ('margin','probability','disagreed','looks'): assert found[name].tolist()==told[name].tolist()
    names = [None if i<0 else list(COLOURS)[i] for i in told.most_other]
    assert found.likelier.tolist()==names
    assert ((found.likelier.isna())==(found.disagreed==0)).all()

def test_what_was_never_looked_at_is_not_listed():
    learn = learner_of_table(bs=16, drop_last=True)
    found = quiet_fit(learn.watch_items(), 1).selection.suspects()
    assert len(found)==48==len(set(found.index)) # of 60 three batches
    seen = learn.selection.items().seen
    assert set(found.index)==set(seen[seen>0].index)

def test_a_selecting_method_lists_as_well(folder):
    learn = quiet_fit(learner_of(from_folder(folder)).top_loss(.7, track_items=True), 8)
    assert set(learn.selection.suspects().index[:3])==of_wrong(learn)

def learner_of_table(**kwargs):
    "Item i is of class i%2, but for two items; tensors, of which nothing tells where they come from"
    set_seed(0)
    y = torch.arange(76)%2
    y[[20,41]] = 1-y[[20,41]] # the first 16 are for validation
    x = torch.cat([2*(torch.arange(76)%2*2-1)[:,None]+.3*torch.randn(76, 1), torch.zeros(76, 3)], 1)
    return learner_on(dls_of(x, y, n_valid=16, **kwargs), nn.Linear(4, 2), lr=.1)

def test_tensors_are_listed_by_their_numbers():
    found = quiet_fit(learner_of_table().watch_items(), 6).selection.suspects()
    assert set(found.index[:2])=={4,25}
    assert found.columns.tolist()==['label','likelier','margin','probability','disagreed','looks']
    assert found.loc[[4,25],['label','likelier']].values.tolist()==[[1,0],[0,1]]

def table_learner_of_ages():
    i = np.arange(80)
    good = np.where((i>=40)^np.isin(i, [5,60]), 'yes', 'no')
    df = pd.DataFrame(dict(age=i.astype(float), kind=np.where(i%3==0, 'a', 'b'), good=good))
    columns = dict(cat_names=['kind'], cont_names=['age'], y_names='good', procs=[Categorify,Normalize])
    dls = TabularDataLoaders.from_df(df, valid_idx=list(range(0, 80, 8)), bs=16, num_workers=0, **columns)
    set_seed(0)
    return tabular_learner(dls, layers=[8], lr=.05)

def test_rows_of_a_table_are_listed():
    learn = quiet_fit(table_learner_of_ages().watch_items(), 12)
    found,first = learn.selection.suspects(),learn.selection.suspects()[:2]
    assert {'kind','good'}<={*found.columns}
    assert sorted(first[['label','likelier']].values.tolist())==[['no','yes'],['yes','no']]
    assert found.age.tolist()==found.index.tolist() # one's own table's
    assert found.kind.tolist()==['a' if i%3==0 else 'b' for i in found.index]
    assert found.good.tolist()==found.label.tolist()

def test_each_of_several_labels_has_a_row(folder):
    "Of blue and green pictures a warm tone is claimed of one, and red is denied of another"
    frame = table_of(folder)
    frame['colour'] = [right_label(Path(f).name) for f in frame.file]
    frame['tags'] = ['red' if c=='red' else f'{c} cold' for c in frame.colour]
    odd = {'train/blue/blue_1.png': 'blue cold red', 'train/red/red_2.png': ''}
    frame['tags'] = [odd.get(f, tags) for f,tags in zip(frame.file, frame.tags)]
    dls = from_block(folder, MultiCategoryBlock, ColReader('tags', label_delim=' '), frame)
    learn = quiet_fit(learner_of(dls, 4, BCEWithLogitsLossFlat()).watch_items(), 12)
    found = learn.selection.suspects()
    files = learn.dls.train_ds.items.file
    assert len(found)==4*30
    assert {(files[key],label) for key,label in found.label[:2].items()}=={
        ('train/blue/blue_1.png','red'), ('train/red/red_2.png','no red')}
    for row in found.itertuples():
        tag = row.label.removeprefix('no ')
        if row.disagreed: assert {row.label,row.likelier}=={tag,f'no {tag}'}
        else: assert pd.isna(row.likelier)
    for i,rows in found.groupby(level=0):
        tags = set(learn.dls.train_ds.items.tags[i].split())
        assert {label for label in rows.label if not label.startswith('no ')}==tags

    plt.close('all')
    learn.selection.show_suspects(4)
    assert len([ax for ax in plt.gcf().axes if ax.get_title()])==4 # of an item one picture
    said = 'clean_suspects: got items that have not a class each, wanted one class for each'
    with pytest.raises(ValueError, match=said): learn.selection.clean_suspects()

def test_masks_of_which_nothing_counts_come_first():
    g = torch.Generator().manual_seed(0)
    images,masks = torch.rand(40, 3, 6, 6, generator=g),torch.randint(0, 3, (40,6,6), generator=g)
    masks[[9,25]] = 255
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1))
    loss_func = CrossEntropyLossFlat(axis=1, ignore_index=255)
    learn = Learner(dls_of(images, masks, n_valid=8), net, loss_func=loss_func).watch_items()
    found = quiet_fit(learn, 2).selection.suspects()
    assert found.index[:2].tolist()==[1,17] and (found.mean_loss[:2]==0).all()
    assert found.mean_loss[2:].is_monotonic_decreasing and len(found)==32
    assert '2 items was 0 whenever they trained' in learn.selection.told['empty']

def test_numbers_stand_beside_what_is_predicted_now():
    x,_ = class_data(68)
    dls = dls_of(x, 3*x[:,:1]+1, n_valid=16)
    learn = quiet_fit(Learner(dls, mlp(1), loss_func=MSELossFlat(), lr=.01).watch_items(valid=True), 3)
    found = learn.selection.suspects()
    learn.model.eval()
    for part,rows in found.groupby('part'):
        ds = learn.dls.train_ds if part=='train' else learn.dls.valid_ds
        at = torch.tensor(rows.index.tolist())
        with torch.no_grad(): pred = learn.model(ds.tensors[0][at])
        assert rows.likelier.tolist()==pytest.approx(pred.flatten().tolist(), abs=1e-5)
        assert rows.label.tolist()==pytest.approx(ds.tensors[1][at].flatten().tolist(), abs=1e-5)

def test_masks_are_listed_by_their_mean_loss(folder):
    "A picture is all of the class of its folder"
    def mask(row): return np.full((12, 12), list(COLOURS).index(row['colour']), dtype=np.uint8)
    dls = from_block(folder, partial(MaskBlock, codes=list(COLOURS)), mask)
    learn = Learner(dls, nn.Conv2d(3, 3, 1), loss_func=CrossEntropyLossFlat(axis=1), lr=.1)
    found = quiet_fit(learn.watch_items(), 8).selection.suspects()
    assert {name_of(learn, key) for key in found.index[:3]}==set(WRONG)
    assert found.columns[0]=='mean_loss' and found.mean_loss.is_monotonic_decreasing
    memory = learn.selection.memory
    by_hand = dict(zip(keys_of(learn), (memory.total/memory.seen).tolist()))
    assert found.mean_loss.tolist()==pytest.approx([by_hand[key] for key in found.index])

def test_numbers_whose_losses_are_lost_are_not_listed(capsys):
    "As after a target that is NaN, in whose step all weights become so"
    x = torch.randn(96, 2, generator=torch.Generator().manual_seed(0))
    learn = Learner(dls_of(x, x[:,:1], bs=16), nn.Linear(2, 1), loss_func=MSELossFlat(), lr=.1).watch_items()
    quiet_fit(learn, 1)
    n = len(learn.selection.suspects())
    lost = torch.arange(0, len(learn.selection.memory), 3)
    learn.selection.memory.total[lost] = torch.nan
    found = learn.selection.suspects()
    assert not {*lost.tolist()} & {*found.index} and len(found)==n-len(lost)
    assert found.mean_loss.gt(0).all()
    said = f'the losses of {len(lost)} items were NaN, in a step or more, which does not count.'
    assert said in capsys.readouterr().out

# Pictures
def titles(): return [ax.get_title() for ax in plt.gcf().axes]

@pytest.mark.parametrize('source', SOURCES)
def test_pictures_have_both_labels(learners, source):
    learn = learners[source]
    learn.selection.show_suspects(3)
    found = learn.selection.suspects()[:3]
    assert len(titles())==3
    for title,(i,row) in zip(titles(), found.iterrows()):
        item = Path(i).name if source=='from_folder' else i
        facts = f'label {row.label}',f'likelier {row.likelier}',f'margin {row.margin:.3g}',f'item {item}'
        assert title=='\n'.join(facts)
    for ax,i in zip(plt.gcf().axes, found.index): # the picture of that item
        drawn = np.asarray(ax.images[0].get_array(), dtype=float).mean((0,1))
        assert drawn.argmax()==2-list(COLOURS).index(right_label(name_of(learn, i)))

# The map
def test_the_map_has_a_dot_for_each_item(learn):
    ax, = learn.selection.plot_items()
    told = learn.selection.labels.frame()
    dots, = ax.collections
    drawn = np.column_stack([dots.get_offsets(), dots.get_array()])
    wanted = np.column_stack([told.spread, told.probability, 1-told.disagreed/told.looks])
    np.testing.assert_allclose(sorted(drawn.round(4).tolist()), sorted(wanted.round(4).tolist()), atol=2e-4)
    assert dots.get_clim()==(0,1)
    assert dots.cmap(0.)[0]>dots.cmap(0.)[2] and dots.cmap(1.)[2]>dots.cmap(1.)[0] # red is never, blue always
    wrong = told[np.isin(keys_of(learn), [*of_wrong(learn)])]
    assert (wrong.probability<.5).all() and (told.probability.drop(wrong.index)>.5).mean()>.9

def test_each_class_has_a_map(learn):
    axes = learn.selection.plot_items(by_class=True)
    labels,told = learn.selection.items().label,learn.selection.labels.frame()
    assert [ax.get_title() for ax in axes]==list(COLOURS)
    for ax in axes:
        own = told[(labels==ax.get_title()).to_numpy()]
        dots, = ax.collections
        assert sorted(dots.get_offsets()[:,1])==pytest.approx(sorted(own.probability))

# Correction
def by_item(cleaner):
    "The menu of each picture, by the item's key"
    return {i: box.children[1] for i,box in zip(cleaner.suspects.index, cleaner.widget.children)}

@pytest.mark.parametrize('source', SOURCES)
def test_the_likelier_class_is_preset(learners, source):
    learn = learners[source]
    cleaner = learn.selection.clean_suspects(6)
    found = learn.selection.suspects()[:6]
    assert list(by_item(cleaner))==found.index.tolist()
    assert [Path(f).name for f in cleaner.fns]==[name_of(learn, key) for key in found.index]
    for i,menu in by_item(cleaner).items():
        assert menu.options==('<Keep>','<Delete>',*COLOURS)
        is_outvoted = 2*found.disagreed[i]>found.looks[i] # by one class, as the other is hardly ever predicted
        assert menu.value==(found.likelier[i] if is_outvoted else '<Keep>')

@pytest.mark.parametrize('source', SOURCES)
def test_what_a_person_says_is_corrected(learners, source):
    learn = learners[source]
    cleaner = learn.selection.clean_suspects(6)
    first,second,third,fourth,*others = by_item(cleaner)
    menus,labels = by_item(cleaner),learn.selection.suspects().label
    menus[second].value = '<Keep>'
    menus[third].value = '<Delete>'
    menus[fourth].value = next(c for c in COLOURS if c!=labels[fourth])
    for i in others: menus[i].value = '<Keep>'
    wanted = {first: menus[first].value, fourth: menus[fourth].value}

    frame = learn.selection.corrected(cleaner)
    columns = ['file','label','is_valid'] if source=='from_folder' else ['file','colour','is_valid']
    assert frame.columns.tolist()==columns
    names,given = [Path(f).name for f in frame.file],frame[columns[1]].tolist()
    known = {name_of(learn, key): wanted.get(key, labels[key]) for key in keys_of(learn) if key!=third}
    known |= {f'{c}_{k}.png': c for c in COLOURS for k in (N_OF_EACH,N_OF_EACH+1)}
    assert len(frame)==35 and dict(zip(names, given))==known
    assert frame.is_valid.dtype==bool
    assert frame.is_valid.tolist()==[int(Path(f).stem.split('_')[1])>=N_OF_EACH for f in frame.file]

def test_corrected_labels_train(learn, folder):
    frame = learn.selection.corrected(learn.selection.clean_suspects(3))
    dls = ImageDataLoaders.from_df(frame, folder, valid_col='is_valid', **HOW)
    files = [Path(f).name for f in dls.train_ds.items.file]
    assert len(files)==30 and len(dls.valid_ds)==6
    assert [dls.vocab[int(y)] for _,y in dls.train_ds]==[right_label(f) for f in files]

def test_a_training_that_suspects_nothing_says_so(learn, capsys):
    selection = learn.selection
    selection.suspects()
    assert 'no other class was likelier' not in capsys.readouterr().out
    y = torch.arange(76)%2
    dls = dls_of(4*y[:,None]-2.+torch.zeros(76, 4), y)
    learn = learner_on(dls, nn.Linear(4, 2), lr=.1).watch_items()
    learned = quiet_fit(learn, 6).selection
    learned.suspects()
    learned.suspects()
    assert capsys.readouterr().out.count('no other class was likelier than a label on the average')==1

@pytest.mark.parametrize('n_epoch,look,n_said', [(1,False,1), (2,False,1), (3,False,0), (1,True,0)])
def test_after_few_epochs_another_look_is_advised(n_epoch, look, n_said, folder, capsys):
    selection = quiet_fit(learner_of(from_folder(folder)).watch_items(), n_epoch).selection
    for _ in range(2): selection.suspects(look=look)
    assert capsys.readouterr().out.count('suspects(look=True) looks once more')==n_said

def test_pixels_are_no_labels_of_which_some_must_be_wrong(folder, capsys):
    "Of right masks nothing is said"
    def mask(row): return np.full((12, 12), list(COLOURS).index(right_label(Path(row.file).name)), dtype=np.uint8)
    dls = from_block(folder, partial(MaskBlock, codes=list(COLOURS)), mask)
    learn = Learner(dls, nn.Conv2d(3, 3, 1), loss_func=CrossEntropyLossFlat(axis=1), lr=.1)
    assert 'margin' not in quiet_fit(learn.watch_items(), 8).selection.suspects()
    assert capsys.readouterr().out==''

@pytest.mark.parametrize('wrong', [0,3])
def test_a_network_that_validates_worse_than_a_guess_says_so(wrong, capsys):
    "Whose labels of the validation set are others than those that it learns"
    y = torch.arange(76)%2
    x = 4*y[:,None]-2.+torch.zeros(76, 4)
    x[:32] *= -1
    y[76-wrong:] = 1-y[76-wrong:]
    dls = dls_of(x, y, n_valid=32)
    dls.c = 2
    learn = quiet_fit(learner_on(dls, nn.Linear(4, 2), lr=.1).watch_items(), 6)
    loss = learn.recorder.values[-1][1]
    learn.selection.suspects()
    said = f'the last validation loss, {loss:.2f}, is above that of a guess, 0.69: '
    assert loss>.7
    assert (said in capsys.readouterr().out)==(wrong>0) # else nothing is suspected at all

@pytest.mark.parametrize('n_rare', [8,40])
def test_a_guess_knows_how_often_each_class_is_given(n_rare, capsys):
    "Of two classes as .9 and .1 it has a loss of .33, of two alike one of .69"
    y = (torch.arange(96)%80<n_rare).long()
    learn = learner_on(dls_of(torch.zeros(96, 4), y, n_valid=16, drop_last=False), nn.Linear(4, 2))
    with torch.no_grad(): learn.model.bias[:] = 0.
    quiet_fit(learn.watch_items(), 1, lr=0.)
    learn.selection.labels.margins -= 1. # or nothing is suspected at all
    learn.selection.suspects()
    share = n_rare/80
    guess = -share*np.log(share)-(1-share)*np.log(1-share)
    assert (f'0.69, is above that of a guess, {guess:.2f}' in capsys.readouterr().out)==(n_rare==8)

def test_a_fit_that_diverged_says_so(folder, capsys):
    learn = learner_of(from_folder(folder)).watch_items()
    class Diverges(Callback):
        def after_validate(self): self.model[-1].weight.data.fill_(torch.nan)
        def before_validate(self): self.model[-1].weight.data.fill_(torch.nan)
    quiet_fit(learn, 1, cbs=Diverges())
    learn.selection.suspects()
    assert 'the last validation loss is NaN: the fit has diverged' in capsys.readouterr().out

def test_files_of_a_folder_that_was_named_from_here_are_found_again(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    learn = quiet_fit(learner_of(from_folder(Path(folder.name))).watch_items(), 1)
    frame = learn.selection.corrected(learn.selection.suspects().head(1))
    dls = ImageDataLoaders.from_df(frame, learn.dls.path, valid_col='is_valid', **HOW)
    assert len(dls.train_ds)==30 and dls.one_batch()[0].shape[1:]==(3,12,12)

def test_a_menu_is_preset_only_where_another_class_won_most_looks(folder, monkeypatch):
    "Rare classes are made up for in the list, by which a right label may have a margin below 0"
    learn = quiet_fit(learner_of(from_folder(folder)).watch_items(), 2)
    memory = learn.selection.labels
    at = [keys_of(learn).index(key) for key in learn.selection.suspects().index[:2]]
    for name,value in dict(looks=5, margins=-4., disagreed=2, votes=2, most_other=1).items():
        getattr(memory, name)[at] = value # two of five looks
    memory.disagreed[at[1]] = memory.votes[at[1]] = 3
    found = learn.selection.suspects()
    menus = by_item(learn.selection.clean_suspects(2))
    assert (found.margin[:2]<0).all() and {*menus}=={keys_of(learn)[i] for i in at}
    assert [menus[keys_of(learn)[i]].value for i in at]==['<Keep>',list(COLOURS)[1]]

def test_a_class_that_no_item_has_can_be_chosen_from_a_menu(folder):
    block = CategoryBlock(vocab=['blue','green','red','violet'])
    learn = quiet_fit(learner_of(from_block(folder, block), 4).watch_items(), 2)
    memory = learn.selection.labels
    memory.margins -= 9.
    memory.disagreed[:],memory.votes[:],memory.most_other[:] = memory.looks,memory.looks,3
    cleaner = learn.selection.clean_suspects(2)
    assert [menu.value for menu in by_item(cleaner).values()]==['violet']*2
    frame = learn.selection.corrected(cleaner)
    assert frame.colour[list(by_item(cleaner))].tolist()==['violet']*2

def test_a_file_that_is_gone_is_not_opened(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path/'copy')
    learn = quiet_fit(learner_of(from_folder(copy)).watch_items(), 2)
    first,second = learn.selection.suspects().index[:2]
    (copy/first).unlink()
    assert next(iter(by_item(learn.selection.clean_suspects(3))))==second

# After what else one calls
ELSE = dict(predict=lambda learn: learn.predict(learn.dls.train_ds.items[0]), get_preds=lambda learn: learn.get_preds(),
    lr_find=lambda learn: learn.lr_find(num_it=3, show_plot=False), validate=lambda learn: learn.validate(),
    summary=lambda learn: learn.summary(), no_valid=lambda learn: quiet_fit(without_validation(learn), 1),
    no_recorder=lambda learn: learn.remove_cb(learn.recorder), nothing=lambda learn: None)

def test_both_parts_are_in_one_figure(folder):
    learn = quiet_fit(learner_of(from_folder(folder)).watch_items(valid=True), 6)
    found = learn.selection.suspects()
    n = 1+[*found.part].index('valid')
    plt.close('all')
    learn.selection.show_suspects(n+1)
    assert len(plt.get_fignums())==1
    names = [title.split('item ')[1] for title in titles() if title]
    assert names==[Path(o).name for o in found.index[:n+1]]
    for ax,i in zip(plt.gcf().axes, found.index[:n+1]):
        drawn = np.asarray(ax.images[0].get_array(), dtype=float).mean((0,1))
        assert drawn.argmax()==2-list(COLOURS).index(right_label(Path(i).name))

def without_validation(learn):
    learn._do_epoch_validate = lambda *args: None
    return learn

@pytest.mark.parametrize('call', ELSE)
def test_the_list_is_there_whatever_was_called_since(folder, call, capsys):
    learn = quiet_fit(learner_of(from_folder(folder)).watch_items(), 2)
    before = learn.selection.suspects()
    with learn.no_bar(),learn.no_logging(): ELSE[call](learn)
    after = learn.selection.suspects()
    assert {*after.index}=={*before.index}
    if call!='no_valid': pd.testing.assert_frame_equal(after, before)
    learn.selection.show_suspects(2)

def test_a_state_that_was_loaded_lists_without_a_fit(folder):
    learn = quiet_fit(learner_of(from_folder(folder)).watch_items(), 2)
    other = learner_of(from_folder(folder)).watch_items()
    other.selection.load_state_dict(learn.selection.state_dict())
    pd.testing.assert_frame_equal(other.selection.suspects(), learn.selection.suspects())

# What can't be
NO_FILES = 'clean_suspects: got a .* whose items are no files, wanted an image folder, or a table of files; write '

@pytest.mark.parametrize('make', [learner_of_table, table_learner_of_ages])
def test_what_is_no_file_is_not_opened(make):
    selection = quiet_fit(make().watch_items(), 1).selection
    with pytest.raises(ValueError, match=NO_FILES): selection.clean_suspects()

@pytest.mark.parametrize('name', ['suspects','show_suspects','plot_items','clean_suspects'])
def test_nothing_was_told_yet(folder, name):
    selection = learner_of(from_folder(folder)).watch_items().selection
    said = 'nothing is remembered of the items yet; call fit first'
    with pytest.raises(ValueError, match=said): getattr(selection, name)()

@pytest.mark.parametrize('n', [0, 2.5, -1])
def test_a_number_of_items_is_a_whole_one(learn, n):
    for ask in (learn.selection.show_suspects, learn.selection.clean_suspects):
        with pytest.raises(ValueError, match='^n: got'): ask(n)
