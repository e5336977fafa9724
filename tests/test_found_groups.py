"What belongs together: what is found, what is called torn, and splits that keep it on one side"
import os
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np, pandas as pd, pytest, torch
from fastai.data.block import CategoryBlock, DataBlock, RegressionBlock
from fastai.data.transforms import RandomSplitter, get_image_files
from fastai.tabular.all import Categorify, FillMissing, Normalize, TabularPandas
from fastai.vision.all import ImageBlock, ImageDataLoaders, MaskBlock
from fastai.metrics import error_rate
from helpers import *
from PIL import Image
from selback.bench.compare import compare
from selback.clean.groups import find_groups, torn, torn_in_words
from selback.clean.splits import drawn_by_group, keep_together
from torch import nn

# Pictures: those of a group show one scene
def picture(scene, rng, noise=14):
    shown = np.kron(scene, np.ones((4,4,1)))
    return Image.fromarray(np.clip(shown+rng.normal(0, noise, shown.shape), 0, 255).astype(np.uint8))

def write(folder, names, truth, **kwargs):
    "An image by each name, of the scene that its group has; each name may have its own EXIF data"
    rng = np.random.RandomState(0)
    scenes = {}
    for name,own in zip(names, truth):
        scene = scenes.setdefault(own, rng.randint(0, 255, (4,4,3)))
        (folder/name).parent.mkdir(parents=True, exist_ok=True)
        picture(scene, rng).save(folder/name, **{key: of(name) for key,of in kwargs.items()})
    return dict(zip(names, truth))

def kind_of(file): return 'dog' if 'dog' in Path(file).parts else 'cat'

def image_dls(path, splitter=None, get_y=kind_of, blocks=(ImageBlock,CategoryBlock)):
    block = DataBlock(blocks, get_items=get_image_files, get_y=get_y, splitter=splitter or RandomSplitter(seed=0))
    return block.dataloaders(path, bs=16, num_workers=0, path=path)

KINDS = 'cat','dog'
def several(name, n=24, each=4):
    "Names of so many groups in two classes, and the group of each"
    return zip(*[(name(KINDS[g%2], g, i), g) for g in range(n) for i in range(each)])

def alone(name, n=96): return zip(*[(name(KINDS[i%2], i), i) for i in range(n)])

def moment(seconds): return datetime(2024, 5, 1, 6)+timedelta(seconds=seconds)

TOGETHER = dict(
    patients=lambda kind, g, i: f'{kind}/{kind.upper()}-{7001+37*g}-{i}.png',
    patients_before_views=lambda kind, g, i: f'{kind}/p{g:03}_view{i}.png',
    folders=lambda kind, g, i: f'{kind}/drive_{g:04}/{i:010}.png',
    folders_above=lambda kind, g, i: f'site{g}/{kind}/{i}.png',
    parts=lambda kind, g, i: f"{('train','valid')[i%2]}/{kind}/v_g{g:02}_c{i:02}.png",
    bursts=lambda kind, g, i: f'{kind}/IMG_{moment(600*g+i):%Y%m%d_%H%M%S}.png',
    seconds=lambda kind, g, i: f'{kind}/{1_700_000_000_000+600_000*g+700*i}.png',
    numbers_with_gaps=lambda kind, g, i: f'{kind}/DSC{100*g+i:05}.png')

APART = dict(
    running=lambda kind, i: f'{kind}/{i:04}.png',
    hashes=lambda kind, i: f'{kind}/{hash((i,3))%10**9:x}.png',
    classes_in_names=lambda kind, i: f'{kind}/great_{kind}_{i}.png',
    sets=lambda kind, i: f'{kind}/COCO_train2014_{581000+7*i:012}.png',
    pages=lambda kind, i: f'{kind}/p{i//8:03}_{i%8}.png',
    times=lambda kind, i: f'{kind}/{moment(97*i%5000):%Y%m%d_%H%M%S}.png')

@pytest.mark.parametrize('how', TOGETHER)
def test_what_belongs_together_is_found_and_stays_on_one_side(how, tmp_path):
    truth = write(tmp_path, *several(TOGETHER[how]))
    found = find_groups(image_dls(tmp_path))
    groups = found.groupby(found['item'].map(truth)).group.agg(set)
    assert all(len(o)==1 for o in groups) and len({*map(min, groups)})==24
    assert torn(found).mean()>.5
    assert found.label.tolist()==[*map(kind_of, found['item'])]
    dls = image_dls(tmp_path, keep_together(found, seed=1))
    ours = [{truth[Path(o).relative_to(tmp_path).as_posix()] for o in ds.items} for ds in (dls.train_ds,dls.valid_ds)]
    assert not ours[0] & ours[1] and len(dls.valid_ds)==pytest.approx(.2*96, abs=4)
    assert torn_in_words(dls)==''

@pytest.mark.parametrize('how', APART)
def test_where_nothing_belongs_together_nothing_is_found(how, tmp_path, capsys):
    write(tmp_path, *alone(APART[how]))
    found = find_groups(image_dls(tmp_path))
    assert found.group.isna().all() and not found.by and not found.tried.holds.any()
    assert 'find_groups(dls, groups=...)' in capsys.readouterr().out
    with pytest.raises(ValueError, match='in which nothing belongs together'): image_dls(tmp_path, keep_together(found))

def test_classes_in_names_are_no_groups_though_some_are_filed_wrongly(tmp_path):
    classes = [i//12 for i in range(96)]
    write(tmp_path, [f"{(k+(i%3==0))%8}/{k}_{i:03}.png" for i,k in enumerate(classes)], classes)
    assert not find_groups(image_dls(tmp_path, get_y=lambda file: file.parent.name)).by

def test_times_that_a_camera_wrote(tmp_path):
    def exif(name):
        g,i = map(int, Path(name).stem.split('x'))
        data = Image.Exif()
        data.get_ifd(0x8769)[36867] = moment(400*(g*7%24)+2*i).strftime('%Y:%m:%d %H:%M:%S')
        return data
    names,groups = several(lambda kind, g, i: f'{kind}/{g}x{i}.jpg')
    hidden = {name: f'{Path(name).parent}/{hash(name)%10**12:x}.jpg' for name in names}
    back = {v: k for k,v in hidden.items()}
    truth = write(tmp_path, [*back], groups, exif=lambda name: exif(back[name]))
    found = find_groups(image_dls(tmp_path))
    assert found.by.startswith('time in the file')
    assert (found.groupby(found['item'].map(truth)).group.nunique()==1).all() and found.group.nunique()==24

def test_bursts_that_are_numbered_through_are_cut_between_them(tmp_path):
    "Pieces end where the picture changes"
    truth = write(tmp_path, *several(lambda kind, g, i: f'{kind}/{5*g+i:05}.png', n=48, each=5))
    found = find_groups(image_dls(tmp_path))
    assert 'neighbours by number' in found.by
    assert (found.groupby(found['item'].map(truth)).group.nunique()==1).all() and found.group.nunique()>=24

def test_frames_between_two_pieces_of_a_film_are_left_out(tmp_path):
    "Of a film that changes slowly: neighbours on both sides of a cut are alike"
    rng = np.random.RandomState(0)
    ends = [rng.randint(0, 255, (4,4,3)) for _ in range(9)]
    for t in range(256):
        k,part = divmod(t/32, 1)
        picture(ends[int(k)]*(1-part)+ends[int(k)+1]*part, rng, 2).save(tmp_path/f'film_{t:04}.png')
    dls = image_dls(tmp_path, get_y=lambda o: float(o.stem[-1]), blocks=(ImageBlock,RegressionBlock))
    found = find_groups(dls)
    between = {*found['item'][found.group.isna()]}
    assert 0<len(between)<=16
    train,valid = keep_together(found, seed=0)(sorted(tmp_path.iterdir()))
    number = [int(Path(o).stem[-4:]) for o in between]
    assert not {*train,*valid} & {*number} and len(train)+len(valid)==256-len(between)
    assert min(abs(i-j) for i in train for j in valid)>1

# Kinds of data
def men(n=60, years=6):
    "A table of persons: what is known of one hardly changes; the index tells rows apart"
    rng = np.random.RandomState(0)
    own = rng.normal(size=(n,3))
    rows = [dict(nr=1000+i, year=year, a=own[i,0], b=own[i,1]+.05*rng.normal(), c='xyz'[int(own[i,2]>0)],
        y='no' if i%3 else 'yes') for i in range(n) for year in range(years)]
    return pd.DataFrame(rows).sample(frac=1, random_state=0)

def table_dls(df, splits=None, y='y', **kwargs):
    splits = splits or RandomSplitter(seed=0)(range(len(df)))
    procs = [Categorify,FillMissing,Normalize]
    return TabularPandas(df, procs, ['c'], ['a','b'], y, splits=splits, **kwargs).dataloaders(bs=16)

def test_persons_in_a_table():
    df = men()
    found = find_groups(table_dls(df))
    assert found.by=='column nr' and found.group.nunique()==60
    assert (found.groupby(df.nr[found['item']].to_numpy()).group.nunique()==1).all()
    for splitter in (keep_together(found, seed=0), keep_together('nr', seed=0, y='y')):
        train,valid = splitter(df)
        assert not {*df.nr.iloc[train]} & {*df.nr.iloc[valid]} and len(valid)==72
        assert (df.y.iloc[valid]=='yes').mean()==pytest.approx((df.y=='yes').mean(), abs=.01)
        assert torn_in_words(table_dls(df, (train,valid)))==''

def test_inputs_targets_and_columns_of_nothing_tell_no_groups():
    df = men().drop(columns='nr')
    rng = np.random.RandomState(1)
    df['clerk'],df['postcode'] = rng.choice([*'abcde'], len(df)),rng.randint(0, 90, len(df))
    found = find_groups(table_dls(df))
    assert {*found.tried.by}=={'column year','column clerk','column postcode'} and not found.tried.holds.any()

@pytest.mark.parametrize('how', ['column','several_labels','own_columns'])
def test_patients_of_images_in_a_table(how, tmp_path):
    names,groups = several(lambda kind, g, i: f'{kind}{hash((g,i))%10**9:x}.png')
    write(tmp_path, names, groups)
    df = pd.DataFrame(dict(file=names, label=[o[:3] for o in names], patient=groups, clerk=np.arange(96)%7))
    if how=='several_labels': df['label'] = [f'{a} {"big" if g%4<2 else "small"}' for a,g in zip(df.label, groups)]
    if how=='own_columns':
        block = DataBlock((ImageBlock,CategoryBlock), get_x=lambda row: tmp_path/row.file, get_y=lambda row: row.label,
            splitter=RandomSplitter(seed=0))
        dls = block.dataloaders(df, bs=16, num_workers=0)
    else:
        dls = ImageDataLoaders.from_df(df, tmp_path, fn_col='file', label_col='label', bs=16, num_workers=0, seed=0,
            label_delim=' ' if how=='several_labels' else None)
    found = find_groups(dls)
    assert found.by=='column patient' and found.group.nunique()==24
    found = find_groups(dls, groups='patient')
    assert torn(found).any() and found.group.nunique()==24
    df['is_valid'] = np.isin(range(96), keep_together('patient', seed=0, y='label')(df)[1])
    assert df.groupby('patient').is_valid.nunique().max()==1 and 15<=df.is_valid.sum()<=24

def test_masks(tmp_path):
    truth = write(tmp_path/'images', *several(lambda kind, g, i: f'case{g:02}_slice{i}.png'))
    for name in truth: Image.new('L', (16,16)).save((tmp_path/'images'/name).with_suffix('.gif'))
    def mask(file): return file.with_suffix('.gif')
    block = DataBlock((ImageBlock,MaskBlock([0,1])), get_y=mask, splitter=RandomSplitter(seed=0))
    files = sorted((tmp_path/'images').glob('*.png'))
    found = find_groups(block.dataloaders(files, bs=16, num_workers=0, path=tmp_path/'images'))
    assert found.group.nunique()==24 and found.label.isna().all()
    assert (found.groupby(found['item'].map(truth)).group.nunique()==1).all()

# Groups that one knows
@pytest.mark.parametrize('groups', [lambda file: file.name[:4], [i//4 for i in range(96)]], ids=['function','list'])
def test_known_groups_are_taken_as_they_are(groups, tmp_path, capsys):
    "Even if nothing is alike"
    rng = np.random.RandomState(0)
    (tmp_path/'a').mkdir()
    files = [tmp_path/'a'/f'{i//4:04}{i%4}.png' for i in range(96)]
    for file in files: picture(rng.randint(0, 255, (4,4,3)), rng).save(file)
    def splits(items): return [i for i in range(96) if i%4<3 or i<8],[i for i in range(96) if i%4==3 and i>=8]
    block = DataBlock((ImageBlock,RegressionBlock), get_y=lambda o: float(o.stem), splitter=splits)
    dls = block.dataloaders(files, bs=16, num_workers=0, path=tmp_path)
    if isinstance(groups, list):
        at = [*dls.train_ds.items,*dls.valid_ds.items]
        groups = [groups[files.index(o)] for o in at]
    found = find_groups(dls, groups=groups)
    assert found.group.nunique()==24 and torn(found).all() and len(found.tried)==0
    assert '22 of 22 validation items have others of their group in training' in capsys.readouterr().out

def test_items_without_a_group_are_by_themselves(capsys):
    df = men()
    df.loc[df.nr<1010,'nr'] = np.nan
    found = find_groups(table_dls(df), groups='nr')
    assert found.group.nunique()==50+60 and '60 have no group, and are by themselves' in capsys.readouterr().out
    train,valid = keep_together('nr', seed=0)(df)
    known = df.nr.notna().to_numpy()
    assert not {*df.nr.iloc[train].dropna()} & {*df.nr.iloc[valid].dropna()}
    assert len({*train,*valid})==len(df) and (~known)[valid].any()

def test_an_item_that_is_listed_twice_counts_once(tmp_path):
    truth = write(tmp_path, *several(TOGETHER['patients']))
    def often(items):
        train,valid = RandomSplitter(seed=0)(items)
        return train*2,valid
    found = find_groups(image_dls(tmp_path, often))
    assert len(found)==96 and {*found['item']}=={*truth}

def test_items_of_no_name():
    dls = dls_of(torch.randn(60, 4), torch.arange(60)%2)
    found = find_groups(dls)
    assert found.group.isna().all() and len(found)==60
    found = find_groups(dls, groups=[i%20 for i in range(60)])
    assert found.group.nunique()==20 and torn(found).all()

def test_names_that_are_no_text(tmp_path, capsys):
    names,groups = several(TOGETHER['patients'])
    names = [os.fsdecode(o.replace('CAT', 'CAF\udce9').encode('utf-8', 'surrogateescape')) for o in names]
    write(tmp_path, names, groups)
    found = find_groups(image_dls(tmp_path))
    assert found.group.nunique()==24 and found.by in capsys.readouterr().out.encode().decode()

def test_an_image_that_cannot_be_opened_is_named(tmp_path):
    names,groups = several(TOGETHER['patients'])
    write(tmp_path, names, groups)
    (tmp_path/names[3]).write_text('no image')
    with pytest.raises(ValueError, match=Path(names[3]).name): find_groups(image_dls(tmp_path))

@pytest.mark.parametrize('groups, said', [
    ('nobody', "a column 'nobody' of a table of"), ([1,2], 'one for each; training items come first'),
    (5, 'a column 5 of a table of'), (lambda row: None, 'no group of any item'),
    (pd.Series([1,2]), 'a column of other rows'), (lambda row: 1, 'one group of all items'),
    ('y', 'a class must do both')])
def test_groups_of_no_use(groups, said):
    with pytest.raises(ValueError, match=said): find_groups(table_dls(men()), groups=groups)

# Splits
@pytest.mark.parametrize('share', [.05,.1,.2,.3,.5,.9])
def test_a_split_has_the_share_the_classes_and_whole_groups(share):
    rng = np.random.RandomState(0)
    group = rng.randint(0, 200, 1000)
    label = (rng.rand(1000)<.1+.2*(group%2)).astype(int)
    train,valid = drawn_by_group(group, label, share, seed=3)
    assert sorted(train+valid)==[*range(1000)] and not {*group[train]} & {*group[valid]}
    assert len(valid)/1000==pytest.approx(share, abs=.01)
    assert label[valid].mean()==pytest.approx(label.mean(), abs=.02)
    assert drawn_by_group(group, label, share, seed=3)==(train,valid)!=drawn_by_group(group, label, share, seed=4)

def test_a_class_of_one_group_trains():
    group,label = np.repeat(np.arange(10), 10),np.repeat([0,1,2,0,0,0,0,0,0,0], 10)
    for seed in range(5):
        _,valid = drawn_by_group(group, label, .2, seed)
        assert {*label[valid]}=={0} and len(valid)==20

def test_a_copy_and_its_film_are_one_group():
    df = pd.DataFrame(dict(film=[f'f{i//10}' for i in range(100)]))
    copies = pd.DataFrame([(5,15), (17,77)], columns=['item','other'])
    for seed in range(9):
        _,valid = keep_together('film', copies, seed=seed)(df)
        assert len({i//10 in {0,1,7} for i in valid})<=2
        assert len({(i//10)*10+j in valid for i in (0,1,7) for j in range(10) for i in (0,1,7)})==1

@pytest.mark.parametrize('group, label, share, said', [
    ([0]*20, None, .2, 'one group of 20 items'),
    ([0]*18+[1,2], None, .4, 'groups that leave 10% to validate; the largest has 90% of the items'),
    ([*range(5)]*4, [*range(5)]*4, .2, 'nothing validates')])
def test_groups_that_leave_no_such_share(group, label, share, said):
    with pytest.raises(ValueError, match=said): drawn_by_group(group, label, share)

@pytest.mark.parametrize('seed, error', [(-1, ValueError), (2**32, ValueError), ('a', TypeError)])
def test_a_seed_that_is_none(seed, error):
    with pytest.raises(error, match='seed: got'): drawn_by_group([*range(9)], None, .2, seed)

def test_a_small_share_of_many_items():
    "Shared out by so many folds it would take minutes"
    _,valid = drawn_by_group(np.arange(2000)//2, np.arange(2000)%3, np.float32(.002))
    assert len(valid)==4

@pytest.mark.parametrize('values', [torch.tensor, lambda o: [[i,'a'] for i in o], lambda o: [np.array([i]) for i in o]],
    ids=['tensor','lists','arrays'])
def test_groups_that_are_no_numbers(values):
    group = np.arange(80)//4
    train,valid = keep_together(values(group), seed=0)([*range(80)])
    assert len(valid)==16 and not {*group[train]} & {*group[valid]}

def test_a_column_is_known_by_its_rows():
    "In whatever order they are"
    df = men()
    other = df.nr.sample(frac=1, random_state=1)
    train,valid = keep_together(other, seed=0)(df)
    assert not {*df.nr.iloc[train]} & {*df.nr.iloc[valid]}
    found = find_groups(table_dls(df), groups=other)
    assert (found.groupby(df.nr[found['item']].to_numpy()).group.nunique()==1).all()

def test_lists_in_a_column_are_values():
    df = men()
    df['box'] = [[o,1] for o in df.nr]
    assert find_groups(table_dls(df, reduce_memory=False)).by in ('column nr','column box')
    assert find_groups(table_dls(df, reduce_memory=False), groups='box').group.nunique()==60

@pytest.mark.parametrize('root', [Path('/d'), Path('.')])
def test_a_path_is_no_other_one_that_ends_alike(root):
    found = pd.DataFrame(dict(item=[f'{o}a/{i}.png' for o in ('','b/') for i in range(20)], part='train',
        group=[*np.arange(20)//2]+[*10+np.arange(20)%10]))
    files = [root/o for o in found['item']]
    for seed in range(3):
        train,valid = keep_together(found, seed=seed)(files)
        assert not {*found.group[train]} & {*found.group[valid]}

def test_a_file_that_is_listed_twice_is_on_one_side():
    found = pd.DataFrame(dict(item=[f'{i}.png' for i in range(40)], part='train', group=np.arange(40)//2))
    train,valid = keep_together(found, seed=0)([*found['item']]*2)
    assert not {i%40//2 for i in train} & {i%40//2 for i in valid} and len(valid)==16

def test_few_groups_are_said(capsys):
    drawn_by_group([0]*12+[1]*4+[2]*4, None, .2)
    assert '3 groups, the largest with 60% of the items' in capsys.readouterr().out

@pytest.mark.parametrize('by, items, error, said', [
    (('nr',), [1,2,3], ValueError, 'of items of no table'), (('who',), men(), ValueError, "the column 'who'"),
    (([1,2],), [1,2,3], ValueError, '2 values for 3 items'), ((5,), [1,2], ValueError, 'the column 5 of items of no'),
    ((pd.Series([1,2]),), men(), ValueError, 'a column of other rows'),
    (([],), [], ValueError, 'got no items'), ((), [1,2], TypeError, 'got nothing'),
    ((pd.DataFrame(dict(a=[1])),), [1,2], TypeError, 'find_groups or learn.find_copies')])
def test_what_items_cannot_be_kept_together_by(by, items, error, said):
    with pytest.raises(error, match=said): keep_together(*by)(items)

# What is done about a split that is there
def test_validation_without_what_is_of_a_group_that_trains(tmp_path):
    truth = write(tmp_path, *several(TOGETHER['patients']))
    def group(file): return truth[Path(file).relative_to(tmp_path).as_posix()]
    def split(items):
        "At random, but for two groups, which validate"
        train,valid = RandomSplitter(seed=0)(items)
        only_valid = [i for i,o in enumerate(items) if group(o) in (20,21)]
        return [i for i in train if i not in only_valid],sorted({*valid,*only_valid})
    dls = image_dls(tmp_path, split)
    found = find_groups(dls)
    left = [*map(group, without_leaks(dls, found).valid_ds.items)]
    assert {*left}<={*map(group, dls.valid_ds.items)}-{*map(group, dls.train_ds.items)}>={20,21} and left.count(20)==4
    whole = image_dls(tmp_path)
    with pytest.raises(ValueError, match=r'split anew, by splitter=keep_together\(found\)'):
        without_leaks(whole, find_groups(whole))
    with pytest.raises(TypeError, match='got no list'): without_leaks(whole)

def test_the_list_of_a_watched_training_says_it(tmp_path, capsys):
    write(tmp_path, *several(TOGETHER['patients']))
    learn = quiet_fit(learner_on(image_dls(tmp_path), cnn(2)).watch_items(valid=True), 1)
    capsys.readouterr()
    learn.selection.suspects()
    said = capsys.readouterr().out
    assert 'validation items have others of their group in training' in said and 'name up to part 2' in said
    learn.selection.suspects()
    assert 'others of their group' not in capsys.readouterr().out

@pytest.mark.parametrize('groups', [None,'nr'])
def test_a_comparison_says_it_before_it_trains(groups, capsys):
    class Net(nn.Linear):
        def forward(self, codes, numbers): return super().forward(numbers)
    def get_learner(): return learner_on(table_dls(men()), Net(2, 2), metrics=error_rate)
    compare(get_learner, 'none', epochs=1, seeds=1, plot=False, groups=groups)
    said = capsys.readouterr().out
    assert 'of 72 validation items have others of their group in training (column nr)' in said
    assert said.index('of their group')<said.index('run 1 of 1')

# What each asker is told
def test_a_table_and_images_are_told_what_splits_them(tmp_path, capsys):
    write(tmp_path, *several(TOGETHER['patients']))
    find_groups(image_dls(tmp_path))
    assert 'Split anew: DataBlock(splitter=keep_together(found)).' in capsys.readouterr().out
    find_groups(table_dls(men()))
    assert 'Split anew: TabularPandas(..., splits=keep_together(found)(df)).' in capsys.readouterr().out

def test_what_is_no_loaders():
    df = men()
    for given in (df, table_dls(df).train.dataset):
        with pytest.raises(TypeError, match='wanted DataLoaders, such as to.dataloaders'): find_groups(given)
    with pytest.raises(TypeError, match='wanted files, or a table'): keep_together('nr')(table_dls(df))
