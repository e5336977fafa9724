"The demo, at the tiny scale"
import re

import pandas as pd, pytest
from studies import demo as d

@pytest.fixture(autouse=True)
def tiny(monkeypatch): monkeypatch.setenv('SELBACK_SCALE', 'tiny')

def test_one_page_has_all_of_it(tmp_path, capsys):
    d.main(out=str(tmp_path))
    page,printed = (tmp_path/'demo.html').read_text(),capsys.readouterr().out
    for part in d.demo.values():
        assert part.title in page and part.title in printed
        for method in [*part.methods][1:]: assert method in page
    assert page.count('<img src="data:image/png;base64,')==4
    assert 'no verdict' not in printed # its control is among the methods
    assert re.findall(r'interval|nan', printed)==[]

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

def test_the_table_has_each_seed():
    table = d.ended(runs_of({'none': [.4,.2], 'favor_hard(beta=2)': [.2,.15], 'random half': [.4,.2]}))
    assert table.index.tolist()==['plain training','favor_hard(beta=2)','random half']
    assert table.loc['favor_hard(beta=2)'].tolist()==['0.2','0.15','-50.0%, -25.0%']
