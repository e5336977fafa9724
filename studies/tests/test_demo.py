"The demo, at the tiny scale"
import re
from functools import partial

import fastai.vision.all, pandas as pd, pytest, torch
from PIL import Image
from studies import demo as d

@pytest.fixture(autouse=True)
def tiny(monkeypatch): monkeypatch.setenv('SELBACK_SCALE', 'tiny')

def test_one_page_has_all_of_it(tmp_path, capsys):
    d.main(out=str(tmp_path))
    page,printed = (tmp_path/'demo.html').read_text(),capsys.readouterr().out
    for part in d.demo.values():
        assert part.title in page and part.title in printed
        for method in [*part.methods][1:]: assert method in page
    assert page.count('<img src="data:image/png;base64,')==6
    assert not re.search(r'(src|href)="(?!data:)', page) # all of it is in the file
    assert printed.index('wrong label')<min(printed.index(part.title) for part in d.demo.values())
    assert 'On your own images' in printed and d.OWN in printed
    assert 'no verdict' not in printed # its control is among the methods
    assert re.findall(r'interval|nan', printed)==[]

def test_what_a_list_of_suspects_finds_is_counted():
    is_wrong = torch.tensor([0,1,0,0,1,0,0,1,0,0,0,0,1,0,0,0]).bool() # four of sixteen
    class Learn:
        class selection:
            def suspects(): return pd.DataFrame(index=[1,4,0,12,2,7,3,5,6,*range(8, 12),13,14,15])
    found = d.Searched(Learn, is_wrong).found
    assert found.tolist()==[1,2,2,3,3,4]+[4]*10
    table = d.found_table(found)
    assert table['wrong labels'].tolist()==[1,2,3,4]
    assert table['by chance'].tolist()==[0,0,1,2]
    assert table.index[2]=='the first 4 suspects'
    assert 'Of the first 4 suspects among 16 labels 3 are wrong; 4 are in all.' in d.found_in_words(found)

def test_what_is_said_to_type_runs(tmp_path, monkeypatch):
    "On a folder for each class, but for the download of weights"
    make = fastai.vision.all.vision_learner
    monkeypatch.setattr(fastai.vision.all, 'vision_learner', partial(make, pretrained=False))
    for i in range(10):
        file = tmp_path/'images'/'ab'[i%2]/f'{i}.png'
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new('RGB', (24,24), (25*i,0,0)).save(file)
    doctor,code,command = d.OWN.split('\n\n')
    monkeypatch.chdir(tmp_path)
    small = code.replace("'FOLDER'", "'images', bs=4").replace('Resize(224)', 'Resize(32)')
    exec(small, {})
    assert len(pd.read_csv('suspects.csv'))==8
    assert '.venv/bin/selback-doctor FOLDER' in doctor
    assert '.venv/bin/selback-compare --data FOLDER' in command

def runs_of(errors):
    rows = [dict(method=m, seed=s, epoch=1, error=e) for m,es in errors.items() for s,e in enumerate(es)]
    return pd.DataFrame(rows)

def test_the_words_fit_the_numbers():
    runs = runs_of({'none': [.4,.2], 'early_loss_sampling': [.2,.1], 'random half': [.25,.125]})
    said = d.in_words('digits', runs)
    assert 'early_loss_sampling ends 50% lower in error at any colour than plain training' in said
    assert '20% lower than training on a random half' in said
    worse = runs_of({'none': [.2,.2], 'early_loss_sampling': [.3,.3], 'random half': [.2,.2]})
    assert '50% higher in error' in d.in_words('digits', worse)
