"What a folder holds: its parts, classes, links and kinds of images"
import os
from pathlib import Path

import matplotlib.pyplot as plt, numpy as np, pandas as pd, pytest
from fastai.vision.core import PILImage
from helpers import *
from PIL import Image
from selback.clean.folders import NamedImage, UnreadableImage, find_images

def fill(root, *names, n=5):
    "Images of their own, so many in each of some folders"
    for name in names:
        (root/name).mkdir(parents=True)
        for i in range(n): (root/name/f'{i}.png').write_bytes(f'{name} {i}'.encode())
    return root

def folders_of(files, root): return sorted({f.parent.relative_to(root).as_posix() for f in files})

# Parts
@pytest.mark.parametrize('train,valid,test', [('train','valid','test'), ('train','val','testing'),
    ('Train','Valid','Test'), ('training','validation','testing'), ('TRAIN','dev','TEST')])
def test_parts_are_known_by_any_usual_name(train, valid, test, tmp_path):
    root = fill(tmp_path, *(f'{part}/{c}' for part in (train,valid,test) for c in 'ab'))
    images = find_images(root)
    assert folders_of(images.train, root)==[f'{train}/a',f'{train}/b']
    assert folders_of(images.valid, root)==[f'{valid}/a',f'{valid}/b']
    assert images.counts().to_dict()=={'train': dict(a=5, b=5), 'valid': dict(a=5, b=5)}
    assert '10 images to test on' in images.in_words()

@pytest.mark.parametrize('test', ['test','Testing'])
@pytest.mark.parametrize('beside', [['a','b'], ['train/a','train/b'], ['train/a','train/b','val/a']])
def test_what_is_to_test_on_neither_trains_nor_validates(test, beside, tmp_path):
    root = fill(tmp_path, *beside, f'{test}/a', f'{test}/b/deeper')
    (root/test/'loose.png').write_bytes(b'')
    assert folders_of(find_images(root).files, root)==beside

def test_a_class_may_have_the_name_of_a_part(tmp_path):
    "If images lie in it at once"
    assert [*find_images(fill(tmp_path, 'train', 'plane', 'dev')).counts().index]==['dev','plane','train']

@pytest.mark.parametrize('names,said', [
    (['train/a','training/b','val/a'], 'two folders for one part, train and training'),
    (['train/a','train/b','val/a','dev/a'], 'two folders for one part, dev and val'),
    (['a','b','val/a'], 'a folder val and none to train on'),
    (['a/train','a/test','b/train'], 'a part within a class, a/test'),
    (['mine/train/a','mine/val/a'], 'name .*/mine if that has the parts'),
    (['all/a','all/b'], 'of one class, all, .* which may be those in all'),
    (['train/a','valid/b'], 'images of b to validate on and none to train on')])
def test_what_is_no_tree_of_classes_is_refused(names, said, tmp_path):
    with pytest.raises(ValueError, match=said): find_images(fill(tmp_path, *names))

# Classes
def test_the_class_is_the_folder_below_the_part(tmp_path):
    root = fill(tmp_path, 'train/cat/part1', 'train/cat/part2', 'train/dog/part1', 'valid/dog', 'valid/cat/part1/more')
    images = find_images(root)
    assert images.counts().to_dict()=={'train': dict(cat=10, dog=5), 'valid': dict(cat=5, dog=5)}
    assert 'Folders within a class belong to it, such as train/cat/part1.' in images.in_words()
    assert {images.label_of(f) for f in images.train if 'part2' in f.parts}=={'cat'}

def test_equal_names_deeper_down_are_two_classes(tmp_path):
    images = find_images(fill(tmp_path, 'building/outdoor', 'garage/outdoor'))
    assert images.counts().sum(axis=1).to_dict()==dict(building=5, garage=5)

def test_what_is_left_out_is_said(tmp_path):
    root = fill(tmp_path, 'train/a', 'train/b', 'valid/a', 'masks/a')
    (root/'train/cover.jpg').write_bytes(b'')
    images = find_images(root)
    assert len(images.files)==15
    for said in 'in no class folder, such as cover.jpg','what is in masks': assert said in images.told

def test_other_files_empty_folders_and_names_that_are_alike_are_said(tmp_path):
    root = fill(tmp_path, 'Cat', 'cat', 'New York', 'newyork ', 'dog')
    for name in 'dog/1.dcm','dog/2.DCM','cat/scan.npy','list','dog/.hidden': (root/name).write_bytes(b'')
    for name in 'empty','__MACOSX/dog': (root/name).mkdir(parents=True)
    told = find_images(root).told
    assert '4 files that are no images by their suffix (' in told
    for kind in '.dcm','.npy','none': assert kind in told
    assert 'what is in __MACOSX, empty' in told
    for names in "'Cat' and 'cat'","'New York' and 'newyork '": assert f'The classes {names} differ in' in told
    assert find_images(fill(tmp_path/'plain', 'a', 'b')).told==''

def test_an_empty_class_of_a_part_is_said(tmp_path):
    root = fill(tmp_path, 'train/a', 'train/b', 'valid/a', 'valid/b')
    (root/'train/c').mkdir()
    assert 'what is in train/c' in find_images(root).in_words()

@pytest.mark.parametrize('seed', range(5))
def test_each_class_leaves_an_image_to_train_on(seed, tmp_path):
    root = fill(tmp_path, *(f'{i:03}' for i in range(60)), n=3)
    images = find_images(root, seed=seed)
    counts = images.counts()
    assert counts.train.min()==1 and counts.sum().sum()==180
    assert 24<=len(images.valid)<=36
    again = find_images(root, seed=seed)
    assert again.train==images.train

# Links
def linked(link, to):
    link.symlink_to(to, target_is_directory=True)

LINKS = dict( # what leads where
    up=[('a/up','.')], above=[('a/above','..')], itself=[('a/me','a')], each_other=[('a/b','b'), ('b/a','a')],
    to_a_loop=[('a/x','../elsewhere')])

@pytest.mark.parametrize('links', LINKS.values(), ids=LINKS)
def test_links_that_lead_back_are_left_out(links, tmp_path):
    root = fill(tmp_path/'data', 'a', 'b')
    fill(tmp_path, 'elsewhere/of_a')
    linked(tmp_path/'elsewhere/of_a/back', tmp_path/'elsewhere')
    for link,to in links: linked(root/link, (root/to).resolve())
    images = find_images(root)
    n = 15 if links==LINKS['to_a_loop'] else 10
    assert len({f.resolve() for f in images.files})==len(images.files)==n
    assert 'links that lead back' in images.told

@pytest.mark.parametrize('part', ['valid','test'])
def test_a_link_takes_nothing_out_of_another_part(part, tmp_path):
    root = fill(tmp_path, 'train/a', 'train/b', 'valid/a', 'test/a')
    linked(root/'train/b/more', root/part/'a')
    images = find_images(root)
    assert folders_of(images.train, root)==['train/a','train/b']
    assert folders_of(images.valid, root)==['valid/a']

def test_links_to_elsewhere_are_followed(tmp_path):
    fill(tmp_path, 'elsewhere/cats', 'elsewhere/dogs', 'more/train/c')
    root = fill(tmp_path/'data', 'raw/mice', 'train/mouse', 'valid/cat')
    linked(root/'train/cat', tmp_path/'elsewhere/cats')
    linked(root/'train/dog', tmp_path/'elsewhere/dogs')
    linked(root/'train/mouse/raw', root/'raw/mice') # within the folder, and in no part
    assert find_images(root).counts().train.to_dict()==dict(cat=5, dog=5, mouse=10)

    linked(tmp_path/'data2', root)
    assert len(find_images(tmp_path/'data2').files)==25

# What cannot be read
def test_a_locked_folder_is_named(tmp_path, monkeypatch):
    root,scan = fill(tmp_path, 'a', 'b', 'c'),os.scandir
    def locked(path):
        if Path(path).name=='b': raise PermissionError(13, 'Permission denied', str(path))
        return scan(path)
    with monkeypatch.context() as m:
        m.setattr(os, 'scandir', locked)
        with pytest.raises(PermissionError, match='/b'): find_images(root)

def test_a_name_that_cannot_be_written_is_refused(tmp_path):
    root = fill(tmp_path, 'a', 'b')
    with open(os.fsencode(root/'a')+b'/caf\xe9.png', 'wb'): pass
    with pytest.raises(ValueError, match=r'caf\\udce9.png.*, wanted a name in UTF-8; rename it'): find_images(root)

# Names that a plot takes for formulas
@pytest.mark.filterwarnings('ignore:No artists')
def test_dollars_are_shown_as_they_are(tmp_path):
    for i,pixels in enumerate(np.random.default_rng(0).integers(0, 255, (24,16,16,3), dtype=np.uint8)):
        file = tmp_path/['$ a_$','b'][i%2]/f'${i}^$.png'
        file.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(file)
    dls = find_images(tmp_path).dls(8, 16)
    learn = learner_on(dls, cnn(2)).watch_items()
    quiet_fit(learn, 1)
    selection = learn.selection
    pair = dict(item='b/$1^$.png', part='train', other='b/$3^$.png', other_part='train', similarity=1.)
    known = {*selection.suspects().index}
    pair = pair | dict(zip(('item','other'), sorted(known)[:2])) | dict(label='$ a_$', other_label='$ a_$')
    odd = pd.DataFrame(dict(item=sorted(known)[:3], part='train', kind='dark'))
    shown = [lambda: selection.show_suspects(4), lambda: selection.show_hardest(4), lambda: learn.show_odd(found=odd),
        lambda: learn.show_copies(found=pd.DataFrame([pair]))]
    with learn.no_bar():
        for show in shown:
            show()
            plt.gcf().canvas.draw() # which reads formulas
            said = ' '.join(ax.get_title() for ax in plt.gcf().axes)
            assert r'\$' in said
            plt.close('all')

# Kinds of images
SHADES = np.linspace(0, 255, 12*8).round().astype(np.uint8).reshape(12, 8)

KINDS = dict( # how a file of the same picture is written
    bytes=lambda o: Image.fromarray(o),
    of_16_bits=lambda o: Image.fromarray(o.astype(np.uint16)*257),
    of_32_bits=lambda o: Image.fromarray(o.astype(np.int32)*257),
    bytes_in_32_bits=lambda o: Image.fromarray(o.astype(np.int32)),
    shares=lambda o: Image.fromarray((o/255).astype(np.float32)),
    floats=lambda o: Image.fromarray(o.astype(np.float32)))

@pytest.mark.parametrize('kind', KINDS)
def test_numbers_of_any_kind_are_the_same_picture(kind, tmp_path):
    file = tmp_path/'image.tif'
    KINDS[kind](SHADES).save(file)
    read = np.asarray(NamedImage.create(file))
    np.testing.assert_allclose(read, np.repeat(SHADES[...,None], 3, 2), atol=1)

@pytest.mark.parametrize('orientation,seen', [(1, SHADES), (2, SHADES[:,::-1]), (3, SHADES[::-1,::-1]),
    (6, np.rot90(SHADES, -1)), (8, np.rot90(SHADES))])
def test_an_image_is_turned_as_viewers_turn_it(orientation, seen, tmp_path):
    exif = Image.Exif()
    exif[0x112] = orientation
    Image.fromarray(SHADES).save(tmp_path/'image.png', exif=exif)
    np.testing.assert_array_equal(np.asarray(NamedImage.create(tmp_path/'image.png'))[...,0], seen)

def test_numbers_of_no_known_range_and_broken_files_are_named(tmp_path):
    Image.fromarray(np.full((4,4), -3, np.int32)).save(tmp_path/'below.tif')
    (tmp_path/'cut.png').write_bytes(b'\x89PNG\r\n\x1a\n')
    for name in 'below.tif','cut.png','none.png':
        with pytest.raises(UnreadableImage, match=name): NamedImage.create(tmp_path/name)

def test_what_is_no_file_is_read_as_fastai_reads_it():
    for o in SHADES,Image.fromarray(SHADES):
        assert np.array_equal(NamedImage.create(o), PILImage.create(o))
