"Answers of the doctor's page: clicked, saved, read by `corrected`, and applied in a new folder"
import json, os, re, shutil
from types import SimpleNamespace

import pandas as pd, pytest
from helpers import *
from PIL import Image
from playwright.sync_api import sync_playwright
from selback.clean.answers import *
from selback.clean.doctor import page_of
from selback.clean.folders import find_images
from selback.bench.begin import begin_doctor as doctor
from torch import nn

COLOURS = 'red','green','blue','gray','pink','gold'

def fill(root, *names):
    "Images, each unlike the others"
    for i,name in enumerate(names):
        (root/name).parent.mkdir(parents=True, exist_ok=True)
        Image.new('RGB', (16+i,16), COLOURS[i%6]).save(root/name)
    return root

def tree(root):
    "What is below a folder, by path"
    return {o.relative_to(root).as_posix(): o.read_bytes() for o in root.rglob('*') if o.is_file()}

def write(file, *rows):
    file.write_text('\n'.join(['file,label,answer',*rows]), encoding='utf-8')
    return str(file)

@pytest.fixture
def folder(tmp_path):
    return fill(tmp_path/'data', 'a/1.png', 'a/2.png', 'a/3.png', 'b/1.png', 'b/deep/4.png', 'b/5.png')

# Answers
@pytest.mark.parametrize('row,said', [
    ('a/9.png,a,right', "line 3: 'a/9.png', which is not there"),
    ('a/2.png,a,maybe', "line 3: the answer 'maybe' for a/2.png, wanted right, change, unsure, delete"),
    ('a/2.png,c,change', "line 3: the label 'c' for a/2.png, whose answer is change, wanted one of a, b"),
    ('a/2.png,b,right', "line 3: the label 'b' for a/2.png, whose answer is right, wanted 'a', its class"),
    ('a/2.png,a,delete', "line 3: the label 'a' for a/2.png, whose answer is delete, wanted 'unsure'"),
    ('a/2.png,b,change\na/2.png,a,change', "line 4: 'change a' for a/2.png, of which line 3 said 'change b'")])
def test_an_answer_that_makes_no_sense_is_refused_by_its_line(row, said, folder, tmp_path):
    file = write(tmp_path/'mine.csv', 'a/1.png,a,right', row)
    said = re.escape(f'error: apply: got {file}, {said}')
    with pytest.raises(SystemExit, match=said): doctor(str(folder), apply=file)

def test_a_list_of_other_columns_is_refused(folder, tmp_path):
    (tmp_path/'suspects.csv').write_text('file,label\na/1.png,a\n')
    with pytest.raises(SystemExit, match='wanted file, label, answer'):
        doctor(str(folder), apply=str(tmp_path/'suspects.csv'))

@pytest.mark.parametrize('kwargs', [dict(to='new'), dict(link=True)])
def test_a_new_folder_wants_answers(kwargs, folder):
    with pytest.raises(SystemExit, match='got no answers'): doctor(str(folder), **kwargs)

# The new folder
def test_it_says_what_it_would_do(folder, tmp_path, capsys):
    (folder/'a/broken.png').write_bytes(b'no image')
    before = tree(tmp_path)
    rows = 'a/1.png,b,change','a/2.png,b,change','a/3.png,unsure,unsure','b/1.png,b,right'
    file = write(tmp_path/'answers.csv', *rows)
    before['answers.csv'] = (tmp_path/'answers.csv').read_bytes()
    doctor(str(folder), apply=file)
    said = capsys.readouterr().out
    for o in ('4 answers: 1 right, 2 change, 1 unsure.\n', '5 of 7 images are kept.\n',
        '2 of them get another label (a → b: 2).\n', '1 cannot be opened.\n', 'No image is left of a.', 'Nothing was'):
        assert o in said
    assert tree(tmp_path)==before

def test_it_says_where_no_copy_is_left_and_that_there_is_a_newer_download(folder, tmp_path, capsys):
    for name in ('a/4.png','b/6.png'): shutil.copy(folder/'a/1.png', folder/name)
    def said(*rows):
        doctor(str(folder), apply=write(tmp_path/'answers.csv', *rows))
        return capsys.readouterr().out
    two = 'a/1.png,unsure,delete','a/4.png,unsure,delete'
    assert 'equal' not in said(*two) and 'newer' not in said(*two)
    assert 'Of 3 equal images none is left: ' in said(*two, 'b/6.png,unsure,delete')
    write(tmp_path/'answers (1).csv')
    os.utime(tmp_path/'answers (1).csv', (2**32,2**32))
    assert 'there is a newer answers (1).csv: is it that one?' in capsys.readouterr().out+said()

@pytest.mark.parametrize('link', [False,True])
def test_a_folder_is_made_of_the_answers(link, folder, tmp_path):
    "The class is another folder within the part, deeper ones stay, and a name that is taken gets a number"
    fill(tmp_path/'parts/valid', 'a/6.png', 'b/7.png')
    folder = folder.rename(tmp_path/'parts/train').parent
    (folder/'train/b/broken.png').write_bytes(b'no image')
    before = tree(folder)
    file = write(tmp_path/'answers.csv', 'train/a/1.png,b,change', 'train/b/deep/4.png,a,change',
        'valid/a/6.png,b,change', 'train/a/2.png,unsure,delete', 'train/b/5.png,unsure,unsure', 'train/a/3.png,a,right')
    (tmp_path/'new').mkdir()
    doctor(str(folder), apply=file, to=str(tmp_path/'new'), link=link)
    kept = {'train/b/1.png':'train/b/1.png', 'train/b/1_2.png':'train/a/1.png',
        'train/a/deep/4.png':'train/b/deep/4.png',
        'valid/b/6.png':'valid/a/6.png', 'train/a/3.png':'train/a/3.png', 'valid/b/7.png':'valid/b/7.png'}
    made = tree(tmp_path/'new')
    seen = json.loads(made.pop('.selback-answers.json'))
    assert {(name,label) for name,_,label in seen}=={('train/b/1_2.png','b'), ('train/a/deep/4.png','a'),
        ('valid/b/6.png','b'), ('train/a/3.png','a')}
    assert made=={new: before[old] for new,old in kept.items()}
    assert tree(folder)==before
    assert os.path.samefile(tmp_path/'new/train/b/1_2.png', folder/'train/a/1.png')==link
    assert {o.name for o in tmp_path.iterdir()}=={'parts','answers.csv','new'}

def test_names_that_some_systems_take_for_one_are_told_apart(tmp_path):
    folder = fill(tmp_path/'data', 'a/X.png', 'a/x_2.png', 'a/z.png', 'b/x.png', 'b/y.png')
    file = write(tmp_path/'answers.csv', 'a/X.png,b,change', 'a/x_2.png,b,change')
    doctor(str(folder), apply=file, to=str(tmp_path/'new'))
    names = {o for o in tree(tmp_path/'new') if o[0]!='.'}
    assert names=={'a/z.png','b/x.png','b/y.png','b/X_2.png','b/x_2_2.png'}

@pytest.mark.parametrize('to,said', [('data/new','which lies in the data'), ('elsewhere/new','which lies in the data'),
    ('.','which is there'), ('answers.csv','which is there')])
def test_a_place_that_is_taken_or_in_the_data_is_refused(to, said, folder, tmp_path):
    (tmp_path/'elsewhere').mkdir()
    shutil.copy(folder/'a/1.png', tmp_path/'elsewhere')
    (folder/'c').symlink_to(tmp_path/'elsewhere', target_is_directory=True)
    file = write(tmp_path/'answers.csv', 'a/1.png,b,change')
    before = tree(tmp_path)
    with pytest.raises(SystemExit, match=said): doctor(str(folder), apply=file, to=str(tmp_path/to))
    assert tree(tmp_path)==before

@pytest.mark.parametrize('error', [OSError(28, 'No space left on device'), KeyboardInterrupt()])
def test_a_stop_while_it_copies_leaves_nothing(error, folder, tmp_path, monkeypatch):
    copied = []
    def copy(file, to):
        if copied: raise error
        copied.append(shutil.copyfile(file, to))
    monkeypatch.setattr(shutil, 'copy2', copy)
    file = write(tmp_path/'answers.csv', 'a/1.png,b,change')
    with pytest.raises(SystemExit): doctor(str(folder), apply=file, to=str(tmp_path/'new'))
    assert copied
    assert {o.name for o in tmp_path.iterdir()}=={'data','answers.csv'}

# The page
HOSTILE = '=1+"  &amp;<' # a class, below which
ENDS_SCRIPT = 'script><img src=x onerror=alert(1)>\',.png' # makes a path that has </script>

@pytest.fixture
def browser():
    program = next(filter(None, map(shutil.which, ('chromium','chromium-browser','google-chrome'))), None)
    if program is None: pytest.skip('there is no Chromium')
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=['--no-sandbox'])
        yield browser
        browser.close()

def found_in(folder, suspects, copies, odd, valid=.2):
    "As `examine` tells it"
    images = find_images(folder, valid).readable()
    def label(file): return images.label_of(folder/file)
    suspects = pd.DataFrame([(o, 'train', label(o), likelier, 0.) for o,likelier in suspects],
        columns=['file','part','label','likelier','margin'])
    copies = pd.DataFrame([(a, 'train', label(a), b, 'train', label(b), 1.) for a,b in copies],
        columns=['item','part','label','other','other_part','other_label','similarity'])
    odd = pd.DataFrame([(o, 'train', kind, 0.) for o,kind in odd], columns=['item','part','kind','value'])
    return SimpleNamespace(images=images, suspects=suspects.set_index('file'), n_suspects=len(suspects), copies=copies,
        odd=odd, how='', size=32, bs=4, seconds=1, error=0., is_whole=True, groups=SimpleNamespace(by=''))

class Page:
    "The doctor's page in a browser, and what went wrong in it"
    def __init__(self, browser, file, width=1280):
        self.wrong = []
        self.page = browser.new_page(viewport=dict(width=width, height=900), accept_downloads=True)
        self.page.on('console', lambda o: self.wrong.append(o.text))
        self.page.on('pageerror', lambda o: self.wrong.append(str(o)))
        self.page.on('dialog', lambda o: self.wrong.append(o.message))
        self.page.goto(file.as_uri())

    def click(self, figure, said): figure.get_by_role('button', name=said, exact=True).click()

    def count(self): return self.page.inner_text('#count')

    def save(self, place):
        with self.page.expect_download() as got: self.page.click('#save')
        assert got.value.suggested_filename=='answers.csv'
        got.value.save_as(place)
        return place

@pytest.mark.slow
def test_answers_are_clicked_kept_saved_and_applied(browser, folder, tmp_path):
    fill(folder/HOSTILE, '-1.png', ENDS_SCRIPT, '7.png', '8.png')
    (folder/'b/broken.png').write_bytes(b'no image')
    suspects = [('a/1.png','b'),('a/2.png','b'),('a/3.png','b'),('b/1.png',HOSTILE),(f'{HOSTILE}/{ENDS_SCRIPT}','a')]
    found = found_in(folder, suspects, [('b/5.png','b/deep/4.png'),(f'{HOSTILE}/7.png',f'{HOSTILE}/8.png')],
        [('b/broken.png','corrupt'),(f'{HOSTILE}/-1.png','black')])
    page_file = tmp_path/'page.html'
    page_file.write_text(page_of(found), encoding='utf-8')
    tab = Page(browser, page_file)
    page = tab.page
    assert tab.count()=='0 of 8 answered' # a file that can't be opened is left out anyway
    figures = page.locator('figure[data-kind]')

    tab.click(figures.nth(0), 'right')
    tab.click(figures.nth(0), 'right')
    assert tab.count()=='0 of 8 answered' # it is taken back
    assert figures.nth(0).locator('select').input_value()=='b' # the likelier one
    figures.nth(4).locator('select').select_option('b')
    tab.click(figures.nth(5), 'keep right')
    tab.click(figures.nth(6), 'keep both')
    tab.click(figures.nth(7), 'delete')
    for key in ['ArrowLeft']*9+['c','r','u','d']: page.keyboard.press(key) # each answer moves on
    assert tab.count()=='8 of 8 answered'
    page.reload()
    assert tab.count()=='8 of 8 answered'
    assert figures.nth(4).locator('select').input_value()=='b'
    file = tab.save(tmp_path/'answers.csv')
    assert not tab.wrong

    answers = read_answers(file, found.images)
    assert {f.relative_to(folder).as_posix(): tuple(o) for f,o in answers.items()}=={
        'a/1.png': ('change','b'), 'a/2.png': ('right','a'), 'a/3.png': ('unsure','unsure'),
        'b/1.png': ('delete','unsure'), 'b/5.png': ('delete','unsure'),
        f'{HOSTILE}/{ENDS_SCRIPT}': ('change','b'), f'{HOSTILE}/-1.png': ('delete','unsure')}
    learn = Learner(found.images.dls(2, 16), nn.Identity(), loss_func=nn.CrossEntropyLoss()).watch_items()
    labels = learn.selection.corrected(str(file)).set_index('file').label
    doctor(str(folder), apply=str(file), to=str(tmp_path/'new'))
    by_label = {(label,name.split('/')[-1]) for name,label in labels.items()}
    placed = {(o.split('/')[0], o.split('/')[-1].replace('1_2', '1')) for o in tree(tmp_path/'new') if o[0]!='.'}
    assert placed==by_label
    assert labels[f'{HOSTILE}/{ENDS_SCRIPT}']==labels['a/1.png']=='b' and len(labels)==6

    # the new folder's page begins with what was said of labels
    found_new = found_in(tmp_path/'new', [('b/1.png','a'),('a/2.png','b'),('b/deep/4.png','a')], [], [], .4)
    (tmp_path/'later.html').write_text(page_of(found_new), encoding='utf-8')
    new_tab = Page(browser, tmp_path/'later.html')
    assert new_tab.count()=='2 of 3 answered, 1 on an earlier page'
    again = read_answers(new_tab.save(tmp_path/'again.csv'), found_new.images)
    assert {o.answer for o in again.values()}=={'right'} and len(again)==3
    assert not new_tab.wrong

    # a later page of the folder has the answers, those that it doesn't ask for too; of a file that is gone, or another
    # image now, it has none
    (folder/'b/1.png').unlink()
    (folder/'a/2.png').write_bytes((folder/'a/1.png').read_bytes())
    fill(folder, 'a/9.png')
    found = found_in(folder, [('a/3.png','b'),('a/9.png','b')], [], [])
    page_file.write_text(page_of(found), encoding='utf-8')
    page.reload()
    assert tab.count()=='1 of 2 answered, 5 on an earlier page'
    tab.click(figures.nth(0), 'unsure')
    later = read_answers(tab.save(tmp_path/'later.csv'), found.images)
    assert later=={f: o for f,o in answers.items() if f not in (folder/'a/3.png', folder/'a/2.png', folder/'b/1.png')}
    assert not tab.wrong

@pytest.mark.slow
def test_an_image_that_is_deleted_as_a_copy_is_deleted(browser, folder, tmp_path):
    "Whatever is said of its label; at the width of a phone"
    found = found_in(folder, [('a/1.png','b')], [('a/1.png','a/2.png')], [])
    (tmp_path/'page.html').write_text(page_of(found), encoding='utf-8')
    tab = Page(browser, tmp_path/'page.html', width=390)
    assert tab.page.evaluate('document.documentElement.scrollWidth')==390
    figures = tab.page.locator('figure[data-kind]')
    tab.click(figures.nth(1), 'keep right')
    tab.click(figures.nth(0), 'right')
    assert read_answers(tab.save(tmp_path/'answers.csv'), found.images)=={folder/'a/1.png': ('delete','unsure')}
    assert not tab.wrong

@pytest.mark.slow
def test_pairs_that_contradict_each_other_leave_an_image(browser, folder, tmp_path):
    found = found_in(folder, [], [('a/1.png','a/2.png'),('a/2.png','a/3.png'),('a/3.png','a/1.png')], [])
    (tmp_path/'page.html').write_text(page_of(found), encoding='utf-8')
    tab = Page(browser, tmp_path/'page.html')
    for i in range(3): tab.click(tab.page.locator('figure').nth(i), 'keep left')
    gone = read_answers(tab.save(tmp_path/'answers.csv'), found.images)
    assert {*gone}=={folder/'a/2.png',folder/'a/3.png'}
    assert not tab.wrong
