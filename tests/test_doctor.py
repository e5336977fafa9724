"The doctor: what was planted in a folder is on its page"
import re, shutil
from html import unescape
from pathlib import Path
from types import SimpleNamespace

import numpy as np, pandas as pd, pytest, torch
from fastai.data.transforms import get_image_files
from fastai.learner import Learner
from helpers import *
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from selback.clean.doctor import *
from selback.core.said import read_list
from selback.bench.begin import begin_doctor as doctor
from selback.clean.folders import Images, find_images
from selback.clean.reading import Body
from sklearn.datasets import load_digits
from torch import nn

def save(image, file):
    file.parent.mkdir(parents=True, exist_ok=True)
    image.save(file)

def draw(root, n, n_wrong=0, n_copies=0):
    "Digits in a folder for each class; a name begins with the digit that it is. The last ones are there twice"
    digits = load_digits()
    for i,(pixels,digit) in enumerate(zip(digits.images[:n], digits.target)):
        image = Image.fromarray((pixels*15.9).astype('uint8')).resize((32,32), Image.Resampling.BICUBIC)
        filed = root/str((digit+1+i%9)%10 if i<n_wrong else digit)
        save(image, filed/f'{digit}_{i:03}.png')
        if n-i<=n_copies: save(image.resize((30,30)).resize((32,32)), filed/f'{digit}_{i:03}_again.png')
    return root

@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    root = draw(tmp_path_factory.mktemp('images')/'digits & more', 120, n_copies=8)
    save(Image.new('RGB', (32,32), (250,250,250)), root/'0/white.png')
    (root/'1/broken.png').write_bytes(b'no image')
    return root

@pytest.fixture(scope='module')
def place(folder, tmp_path_factory):
    "Where the command has written, after an epoch; an untrained network knows copies, too"
    out = tmp_path_factory.mktemp('found')/'of_digits'/'page.html'
    doctor(str(folder), size=32, epochs=1, bs=34, out=str(out))
    return out

def test_the_page_shows_what_was_planted(place):
    page = place.read_text(encoding='utf-8')
    for said in '<h1>digits &amp; more: ','1/broken.png','0/white.png','1 corrupt, 1 white': assert said in page
    assert not re.search(r'(src|href)="(?!data:)', page) # all of it is in the file
    assert page.count('<img')>=16 # both of each pair

def test_the_lists_are_beside_it(place):
    copies,odd,suspects = (pd.read_csv(place.parent/f'{name}.csv') for name in ('copies','odd','suspects'))
    planted = copies.item.str[:7]==copies.other.str[:7]
    assert planted.sum()>=7
    assert (copies.part!=copies.other_part).any() # of a split that was drawn, which says nothing
    differ = (copies.label!=copies.other_label).tolist()
    assert differ==sorted(differ, reverse=True)
    assert {*zip(odd['item'], odd.kind)}=={('1/broken.png','corrupt'),('0/white.png','white')}
    assert len(suspects)>=127 # all that can be opened and have something on them, but for the last of an epoch
    assert {*suspects.part}=={'train','valid'}

def test_the_lines_on_the_page_run(folder, place, monkeypatch):
    "And a label that was written into the list is what trains"
    suspects = pd.read_csv(place.parent/'suspects.csv', dtype=str)
    of_three = suspects.index[suspects.file=='3/3_013.png'][0]
    suspects.loc[of_three,'label'] = '8'
    suspects.loc[suspects.file=='5/5_005.png','label'] = 'unsure'
    suspects.to_csv(place.parent/'suspects.csv', index=False)
    lines = unescape(re.search('<pre class="python">(.*)</pre>', place.read_text(encoding='utf-8'), re.S)[1])
    monkeypatch.chdir(place.parent)
    names = {}
    exec(lines, names)
    df = names['df'].set_index('file').label
    assert df['3/3_013.png']=='8'
    assert len(df)==127
    assert len(names['dls'].train_ds)+len(names['dls'].valid_ds)==127

def test_the_lines_of_a_folder_with_parts_keep_them(tmp_path, monkeypatch):
    "But for images to validate on of which a copy trains; a folder test and stray files are left out"
    root = draw(tmp_path/'data/train', 60)
    for file in get_image_files(root):
        if int(file.stem[2:])%4: continue
        (file.parents[2]/'valid'/file.parent.name).mkdir(parents=True, exist_ok=True)
        file.rename(file.parents[2]/'valid'/file.parent.name/file.name)
    copy = next(iter(get_image_files(tmp_path/'data/valid')))
    shutil.copy(copy, root/copy.parent.name/f'{copy.stem}_again.png')
    within = next(iter(get_image_files(root)))
    shutil.copy(within, within.with_stem(f'{within.stem}_within'))
    shutil.copytree(root, tmp_path/'data/test')
    shutil.copy(copy, tmp_path/'data/stray.png')
    doctor(str(tmp_path/'data'), size=32, epochs=1, out=str(tmp_path/'out/page.html'))
    lines = unescape(re.search('<pre class="python">(.*)</pre>', (tmp_path/'out/page.html').read_text(), re.S)[1])
    monkeypatch.chdir(tmp_path/'out')
    copies = pd.read_csv('copies.csv')
    across = (copies.part!=copies.other_part).tolist()
    assert across==sorted(across, reverse=True) and 0<sum(across)<len(copies)
    copies[copies.item.str.contains('_again') | copies.other.str.contains('_again')].to_csv('copies.csv', index=False)
    leak = copy.relative_to(tmp_path/'data').as_posix()
    Path('answers.csv').write_text(f'file,label,answer\n{leak},{copy.parent.name},right\n')
    names = {}
    exec(lines, names)
    dls = names['dls']
    assert len(dls.train_ds)==47 and len(dls.valid_ds)==14
    assert leak not in {*dls.valid_ds.items.file}

def test_a_class_whose_files_are_broken_is_named(tmp_path):
    draw(tmp_path/'data', 40)
    for file in (tmp_path/'data/3').iterdir(): file.write_bytes(b'no image')
    with pytest.raises(SystemExit, match='got no image that can be opened of 3, wanted some of each class'):
        doctor(str(tmp_path/'data'), size=32, epochs=1, out=str(tmp_path/'out/page.html'))

def test_where_it_cannot_write_is_told_before_it_trains(folder, tmp_path, monkeypatch):
    monkeypatch.setattr('selback.clean.doctor.examine', None)
    for out,said in ((tmp_path/'suspects.csv', 'wanted a page to write'), ('/proc/page.html', 'error: '),
        (folder/'page.html', 'which lies in the data')):
        with pytest.raises(SystemExit, match=said): doctor(str(folder), out=str(out))

def test_a_folder_of_all_kinds_from_start_to_end(tmp_path, monkeypatch, capsys):
    "By a relative path; what is on the page runs"
    root = draw(tmp_path/'mine/$data/Train', 60)
    for file in sorted(get_image_files(root)):
        part = {0:'Validation', 1:'testing'}.get(int(file.stem[2:])%5, 'Train')
        to = root.parent/part/f'={file.parent.name}&<b>'/'some'/file.name
        to.parent.mkdir(parents=True, exist_ok=True)
        file.rename(to)
    for folder in root.iterdir():
        if not any(folder.iterdir()): folder.rmdir()
    first,deep,turned,long = sorted(get_image_files(root))[:4]
    first.write_bytes(b'no image')
    Image.fromarray(np.asarray(Image.open(deep)).astype(np.uint16)*257).save(deep)
    exif,text = Image.Exif(),PngInfo()
    exif[0x112] = 8
    Image.open(turned).save(turned, exif=exif)
    text.add_text('notes', 'a'*(2**20+1), zip=True) # Pillow takes no more than a mebibyte
    Image.open(long).save(long, pnginfo=text)
    (root/'=3&<b>/up').symlink_to(tmp_path, target_is_directory=True)

    monkeypatch.chdir(tmp_path/'mine')
    doctor('$data', size=32, epochs=1, out='found/page.html')
    said = capsys.readouterr().out
    assert '36 images to train on, 12 to validate on (its folder Validation)' in said
    for left in '12 images to test on','links that lead back','belong to it': assert left in said
    assert '2 corrupt, 1 deep, 1 turned' in said
    for name in 'suspects','copies','odd': # a spreadsheet would run what begins so
        cells = pd.read_csv(f'found/{name}.csv').select_dtypes('str')
        assert not cells.map(lambda o: str(o)[0] in '=+-@').any(axis=None)
    odd = read_list('found/odd.csv')
    names = [f.relative_to(root.parent).as_posix() for f in (first,long,deep,turned)]
    assert odd[odd.kind.isin(['corrupt','deep','turned'])]['item'].tolist()==names

    page = (tmp_path/'mine/found/page.html').read_text(encoding='utf-8')
    assert '<b>/' not in page # a name is no markup
    found = {}
    monkeypatch.chdir(tmp_path/'mine/found')
    exec(unescape(re.search('<pre class="python">(.*)</pre>', page, re.S)[1]), found)
    assert len(found['df'])==46 and {*found['df'].label}<={f'={i}&<b>' for i in range(10)}

@pytest.mark.parametrize('there', ['page.html','odd.csv'])
def test_what_is_there_is_kept(there, folder, tmp_path):
    (tmp_path/there).write_text('mine')
    out = str(tmp_path/'page.html')
    with pytest.raises(SystemExit, match=f'there is {there} already'): doctor(str(folder), out=out)
    assert (tmp_path/there).read_text()=='mine'

@pytest.mark.parametrize('error', [OSError(28, 'No space left on device'), KeyboardInterrupt()])
def test_a_stop_while_it_writes_leaves_nothing(error, folder, tmp_path, monkeypatch):
    lists = dict.fromkeys(('suspects','copies','odd'), pd.DataFrame())
    found = SimpleNamespace(images=find_images(folder), is_whole=True, groups=SimpleNamespace(by=''), **lists)
    def stops(*args): raise error
    monkeypatch.setattr('selback.clean.doctor.page_of', stops)
    with pytest.raises(type(error)): write_page(found, tmp_path/'page.html')
    assert not [*tmp_path.iterdir()]

def test_it_can_be_stopped(folder, tmp_path, monkeypatch):
    def stops(*args, **kwargs): raise KeyboardInterrupt
    monkeypatch.setattr('selback.clean.doctor.examine', stops)
    with pytest.raises(SystemExit) as end: doctor(str(folder), out=str(tmp_path/'out/page.html'))
    assert end.value.code==130

def test_a_link_to_nothing_cannot_be_opened(tmp_path):
    draw(tmp_path/'data', 40)
    (tmp_path/'data/3/gone.png').symlink_to(tmp_path/'nowhere.png')
    images = find_images(tmp_path/'data')
    assert len(images.files)==41 and images.fingerprint()
    learn = Learner(images.dls(8, 32), nn.Identity(), loss_func=nn.CrossEntropyLoss())
    odd = learn.find_odd()
    assert odd[odd.kind=='corrupt']['item'].tolist()==['3/gone.png']

def test_folders_of_both_parts_are_known(tmp_path):
    for part,n in (('train',6),('valid',4),('test',3)):
        for i in range(n): save(Image.new('RGB', (32,32)), tmp_path/part/'ab'[i%2]/f'{i}.png')
    images = find_images(tmp_path)
    assert images.parts==['train','valid']
    assert images.counts().to_dict()=={'train': dict(a=3, b=3), 'valid': dict(a=2, b=2)}

def test_a_share_is_drawn(tmp_path):
    for i in range(20): save(Image.new('RGB', (8,8)), tmp_path/'ab'[i%2]/f'{i}.png')
    save(Image.new('RGB', (8,8)), tmp_path/'of_no_class.png')
    images = find_images(tmp_path, valid=.25, seed=1)
    assert (len(images.train),len(images.valid))==(15,5)
    assert images.valid==find_images(tmp_path, valid=.25, seed=1).valid!=find_images(tmp_path, valid=.25, seed=2).valid

@pytest.mark.parametrize('files,said', [
    ([], 'a folder without images in class folders'),
    (['a/1.png','a/2.png'], 'got 2 images of one class, a, wanted at least 2'),
    (['img/1.png','img/2.png','masks/1.png','masks/2.png'], 'of which masks has the file names of img'),
    (['a/1.png','b/2.png'], 'got 2 images, none to validate on')])
def test_what_is_no_folder_of_classes_is_refused(files, said, tmp_path):
    for file in files: save(Image.new('RGB', (8,8)), tmp_path/file)
    with pytest.raises(SystemExit, match=said): doctor(str(tmp_path), out=str(tmp_path/'out/page.html'))

@pytest.mark.parametrize('kwargs,said', [
    (dict(size=8), 'size: got 8'), (dict(epochs=0), 'epochs: got 0'), (dict(arch='resnet1'), 'resnet1'),
    (dict(valid=1.), 'valid: got 1.0'), (dict(folder='nowhere'), "nowhere', wanted a folder")])
def test_options_that_make_no_sense_are_refused(kwargs, said, folder, tmp_path):
    with pytest.raises(SystemExit, match=said):
        doctor(**dict(folder=str(folder), out=str(tmp_path/'page.html')) | kwargs)

def test_fewer_images_take_more_epochs():
    assert [epochs_for(n) for n in (100,2_000,10**6)]==[30,8,5]

@pytest.mark.parametrize('n_of_a, error, is_poor', [(50,.38,False), (50,.42,True), (90,.07,False), (90,.09,True)])
def test_a_network_that_has_learned_little_is_told_of(n_of_a, error, is_poor):
    "One that is little better than who calls all images by the commonest label"
    pairs = pd.DataFrame(dict(part='train', other_part=['valid','train'], label=['a','b'], other_label='a'))
    kinds = pd.DataFrame(dict(kind=['corrupt','corrupt','small_file']))
    suspects = pd.DataFrame(dict(label=['a']*n_of_a+['b']*(100-n_of_a)))
    found = SimpleNamespace(images=Images(None, range(80), range(20), ['train','valid']), suspects=suspects,
        n_suspects=1, copies=pairs, odd=kinds, how='A stand-in was asked', seconds=200, error=error,
        groups=SimpleNamespace(by=''))
    labels,copies,odd = found_in_words(found)
    assert ('learned too little' in labels)==is_poor and ('1 of 100' in labels)!=is_poor
    assert '1 across the split, 1 within a part; pairs with different labels: 1' in copies
    assert '2 corrupt, 1 small file' in odd
    said = limits_in_words(found)
    assert ('many labels in the list are right' in said)==is_poor
    assert said.startswith('Labels of 100 of 102 images were looked at (cannot be opened: 2). A stand-in')

class StandIn(nn.Module):
    "In place of a pretrained network: random filters; batches are counted, and one may be stopped"
    def __init__(self, stop_at=None):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Conv2d(3, 16, 5, 2), nn.ReLU(), nn.Conv2d(16, 256, 5, 2), nn.ReLU())
        self.n,self.stop_at = 0,stop_at

    def forward(self, x):
        self.n += 1
        if self.n==self.stop_at: raise KeyboardInterrupt
        return self.net(x)

@pytest.fixture
def stand_in(monkeypatch):
    def use(**kwargs):
        model = StandIn(**kwargs)
        body = Body(model, ([.5]*3,[.5]*3), 'a stand-in')
        monkeypatch.setattr('selback.clean.doctor.pretrained_body', lambda arch: (body, f'no {arch}'))
        return model
    return use

def test_wrong_labels_are_found_without_training(stand_in, tmp_path, capsys):
    stand_in()
    folder = draw(tmp_path/'digits', 300, n_wrong=15, n_copies=6)
    blank = {'0/white.png','1/white.png','1/black.png'}
    for name in blank: save(Image.new('RGB', (32,32), 'black' if 'black' in name else (250,250,250)), folder/name)
    out = tmp_path/'out/page.html'
    doctor(str(folder), size=32, out=str(out))
    suspects,copies = read_list(out.with_name('suspects.csv')),read_list(out.with_name('copies.csv'))
    is_wrong = [Path(name).name[0]!=name[0] for name in suspects.file]
    assert sum(is_wrong)==15 and sum(is_wrong[:25])>=10
    assert len(suspects)==306 and not blank & {*suspects.file, *copies.item, *copies.other}
    assert suspects.columns.tolist()==['file','part','label','likelier','margin','probability']
    assert {*suspects.part}=={'train','valid'}
    assert (copies.item.str[:7]==copies.other.str[:7]).sum()==6
    said = capsys.readouterr().out
    assert 'no resnet18' in said and 'Labels of 306 of 309 images were looked at (blank: 3).' in said

def test_what_was_read_is_read_once(stand_in, tmp_path, capsys):
    folder = draw(tmp_path/'digits', 60)
    def examined(n_read):
        model = stand_in()
        found = examine(find_images(folder), size=32, kept=tmp_path/'kept.pt')
        assert model.n==(1+2*-(-n_read//16) if n_read else 0) # the first batch also tells the layer
        return found
    first = examined(60)
    again = examined(0)
    pd.testing.assert_frame_equal(again.suspects, first.suspects)
    changed = next(folder.rglob('*.png'))
    Image.open(changed).rotate(90).save(changed)
    examined(1)
    folder = shutil.copytree(folder, tmp_path/'elsewhere', copy_function=shutil.copyfile)
    examined(0)
    model = stand_in()
    examine(find_images(folder), size=40, kept=tmp_path/'kept.pt')
    assert model.n==1+2*4 # of this size nothing was known

def test_a_stop_leaves_a_page_of_what_was_read(stand_in, tmp_path, capsys):
    "In the place of another one of such, but not of a full one"
    folder = draw(tmp_path/'digits', 120)
    out = tmp_path/'out/page.html'
    for stop_at in (12,14):
        stand_in(stop_at=stop_at)
        out.with_name('features.pt').unlink(missing_ok=True)
        doctor(str(folder), size=32, out=str(out))
    assert len(read_list(out.with_name('suspects.csv')))==96 # six batches, each read as it is and mirrored
    assert 'what follows is of 96 of 120 images' in capsys.readouterr().out
    assert 'It was stopped when 96 of 120 images were read.' in out.read_text()
    model = stand_in()
    doctor(str(folder), size=32, out=str(out))
    assert model.n==1+2*2 # the rest
    full = out.read_bytes()
    stand_in(stop_at=14)
    doctor(str(folder), size=40, out=str(out))
    assert out.read_bytes()==full and 'It was stopped' in (out.parent/'stopped/page.html').read_text()
    assert len(read_list(out.with_name('suspects.csv')))==120

def test_a_second_run_keeps_what_was_corrected(stand_in, tmp_path, capsys):
    "Lists that stay the same are not doubled; of those that don't, each run's have a number"
    folder = draw(tmp_path/'digits', 60, n_copies=2)
    out = tmp_path/'out/page.html'
    def run():
        stand_in()
        doctor(str(folder), size=32, out=str(out))
        return {o.name: o.read_bytes() for o in out.parent.glob('*.csv')}
    def timeless(page): return re.sub(r'Seconds: \d+', '', page)
    lists,page = run(),out.read_text()
    for i in (1,2):
        for name in ('suspects.csv','odd.csv'): (out.parent/name).write_text(f'mine {i}')
        out.write_text(page.replace('digits', 'an older one'))
        kept = {f'{name}.{j}.csv': f'mine {j}'.encode() for name in ('suspects','odd') for j in range(1, i+1)}
        assert run()==lists|kept
        assert f'kept as suspects.{i}.csv, odd.{i}.csv.' in capsys.readouterr().out
    assert timeless(out.read_text())==timeless(page)

@pytest.mark.parametrize('made', [b'', b'no features'])
def test_features_that_cannot_be_read_are_named(made, stand_in, tmp_path):
    stand_in()
    (tmp_path/'kept.pt').write_bytes(made)
    with pytest.raises(ValueError, match='kept.pt, which can not be read'):
        examine(find_images(draw(tmp_path/'digits', 60)), size=32, kept=tmp_path/'kept.pt')

@pytest.mark.slow
def test_wrong_labels_are_found(tmp_path, capsys):
    folder = draw(tmp_path/'digits', 300, n_wrong=15)
    found = examine(find_images(folder), size=32, epochs=12, bs=32)
    is_wrong = [name[2]!=name[0] for name in found.suspects.index]
    assert sum(is_wrong)==15
    assert sum(is_wrong[:25])>=8
    assert 5<=found.n_suspects<=60
    assert page_of(found).count('<img')>=found.n_suspects
