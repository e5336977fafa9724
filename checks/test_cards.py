"The cards of methods say the same things in the same order, and nothing that was not measured"
import ast, json, re
from functools import lru_cache
from pathlib import Path

import pytest
from _measured import Counts, by_evidence, comparisons, counts, fair, family, measured, tally
from selback.all import known_methods

root = Path(__file__).parents[1]
cards = sorted(file.stem for file in (root/'nbs/methods').glob('*.ipynb'))
each_card = pytest.mark.parametrize('card', cards)
NO_METHOD = '13_scale_lr', # a helper: it selects nothing, so that there is nothing to compare

# What a card has, in order: a pattern that begins each part
TOLD = 'What it does','When','When not','Suggested values','Cost','Goes with'
TITLE,EXPORT,EXAMPLE = r'\A# .+\n\n> .+\n',r'#\| export',r'\*\*An example\*\*'
TALLY = r'#\| hide_input\nfrom _measured import measured, tally\ntally\('
USE = r'\*\*Use it\*\*\n\n```python\n'
MEASURED,SOURCE = r'## Measured\n',r'\*\*Source\.\*\* '
PARTS = [TITLE, r'#\| default_exp', TALLY, USE, *(rf'\*\*{name}\.\*\* ' for name in TOLD), EXPORT, EXAMPLE, MEASURED,
    SOURCE]

MEASURED_NUMBER = re.compile(r'\d\s*(%|×|x\b|dB\b|points?\b|per ?cent|times\b|-?fold\b)')

@lru_cache
def all_comparisons(): return comparisons()

# What a card says
@lru_cache
def cells(card): return json.loads((root/f'nbs/methods/{card}.ipynb').read_text(encoding='utf-8'))['cells']

def source(cell): return ''.join(cell['source'])

def code_cells(card): return [cell for cell in cells(card) if cell['cell_type']=='code']

def markdown(card): return '\n\n'.join(source(cell) for cell in cells(card) if cell['cell_type']=='markdown')

def is_hidden(code): return re.match(r'#\|\s*hide\n', code) is not None

def code_of(card): return [source(cell) for cell in code_cells(card)]

def shown_code(card): return [code for code in code_of(card) if not is_hidden(code)]

def paragraph(card, name): return re.search(rf'\*\*{name}\.\*\* (.+)', markdown(card))[1]

def prose(md): return re.sub(r'```.*?```|`[^`\n]*`|\]\([^)]*\)', ' ', md, flags=re.S)

def calls(card, name):
    "The cells that call a function of `_measured`, and with what"
    for cell in code_cells(card):
        found = re.search(rf'^{name}\(.*?\)$', source(cell), re.M|re.S)
        if not found: continue
        call = ast.parse(found[0]).body[0].value
        yield cell,[arg.value for arg in call.args]

def starts_of(pattern, text):
    flags = 0 if pattern==TITLE else re.M
    return [match.start() for match in re.finditer(pattern, text, flags)]

@each_card
def test_parts_come_in_their_order(card):
    has_runs = card not in NO_METHOD
    whole = '\n\n'.join(source(cell) for cell in cells(card))
    parts = PARTS if has_runs else [part for part in PARTS if part not in (TALLY,MEASURED)]
    found = {part: starts_of(part, whole) for part in parts}
    assert all(found.values()), found
    assert all(len(at)==1 for part,at in found.items() if part!=EXPORT), found
    firsts = [at[0] for at in found.values()]
    assert firsts==sorted(firsts)
    assert max(found[EXPORT])<found[EXAMPLE][0]

    if not has_runs: return
    measured_part = whole[found[MEASURED][0]:found[SOURCE][0]]
    assert 'tally(' in source(cells(card)[2])
    assert 'measured(' in measured_part

@each_card
def test_a_card_is_read_in_two_minutes(card):
    "At 280 words a minute, code and results aside"
    assert len(prose(markdown(card)).split())<=560

@each_card
def test_no_measured_number_is_typed(card): assert not MEASURED_NUMBER.search(prose(markdown(card)))

def test_typed_numbers_are_noticed():
    typed = ['an error 12 % lower', '3.5% more', '1.5 times faster', '2 dB', 'two points of 0.3 points', 'a 2x gain']
    others = ['`keep=.5` keeps half', 'arXiv [2503.13385](https://arxiv.org/abs/2503.13385)',
        '`(1 + 3*keep)/3` of a step', '```\n50 %\n```']
    for text in typed: assert MEASURED_NUMBER.search(prose(text)), text
    for text in others: assert not MEASURED_NUMBER.search(prose(text)), text

@each_card
def test_an_example_trains_on_digits_and_asserts_a_law(card):
    first,*more = [code for code in shown_code(card) if re.search(r"get_dls\('(coloured_)?digits'", code)]
    for code in (first,*more): assert re.search(r'\.fit(_one_cycle)?\(', code)
    assert 'set_seed(0)' in first
    assert re.search(r'\bassert |\btest_\w+\(', first)

# What was measured
def study_pages(text):
    "The pages of studies that a text links to"
    linked = set(re.findall(r'\]\(\.\./([^)#]+)\.ipynb\)', text))
    return linked & set(all_comparisons().page)

def better_runs(names):
    "The comparisons that came out better for a card's methods, whatever their options"
    df = all_comparisons()
    is_ours = df.method.isin(names) | df.method.str.startswith(tuple(f'{name}(' for name in names))
    return df[is_ours & (df.verdict=='better')]

@each_card
def test_what_did_not_win_is_not_recommended_for_winning(card):
    "And what did is recommended for what it won at"
    when = paragraph(card, 'When')
    disclaims = bool(re.match('Nowhere that we measured|Not measured here|Not for a better network', when))
    if card in NO_METHOD:
        assert disclaims
        return

    _,names = next(calls(card, 'tally'))
    better,told = better_runs(names),tally(*names).data
    won = '**Measured:** clearly better' in told
    assert won==better.equal_cost.any(), told
    assert won!=disclaims, f'{told} Rewrite its "When".'

    wins = set(better.page[better.equal_cost] if won else better.page)
    named = study_pages(when)
    assert named<=wins, f'recommended for {named-wins}, where it was not clearly better'
    if won: assert named, f'it won at {wins}, which its "When" names none of'
    elif named: assert 'looks not counted' in when or 'look is free' in when

@each_card
def test_cards_and_guide_count_alike(card):
    "The guide sums by family, a card by the names that it gives"
    if card in NO_METHOD: return
    _,names = next(calls(card, 'tally'))
    df = all_comparisons()
    of_guide = df[df.method.map(family)==names[0]]
    if names[0] not in known_methods(): return # a study's own name, which the guide leaves out
    of_card = comparisons(*names)
    for by in (None,'data'): assert counts(fair(of_card), by)==counts(fair(of_guide), by)

@each_card
def test_what_is_shown_is_what_was_measured(card):
    "Refresh it by `.venv/bin/python nbs/_run.py nbs/methods/CARD.ipynb`"
    for name,f in dict(tally=tally, measured=measured).items():
        found = list(calls(card, name))
        assert found or card in NO_METHOD
        for cell,names in found:
            outputs = [o['data'] for o in cell['outputs'] if 'text/markdown' in o.get('data', {})]
            shown = [''.join(data['text/markdown']) for data in outputs]
            assert shown==[f(*names).data], f'run `.venv/bin/python nbs/_run.py nbs/methods/{card}.ipynb`'

def test_each_method_has_a_card():
    "And each comparison of a method shows on one"
    shown = {name for card in cards for _,names in calls(card, 'measured') for name in names}
    no_methods = { # what methods are compared with, and what only a study has
        'class-balanced and prioritized','easiest first','wrong items 50 times','JTT',
        'a proxy, paid for','a proxy, already paid'}
    compared = all_comparisons().query('~is_rival').method.str.replace(r'\(.*', '', regex=True)
    assert set(compared)-no_methods<=shown

def test_what_won_more_often_than_it_lost_comes_first():
    found = dict(never=Counts(0, 0, 0, 0), lost=Counts(9, 2, 5, 0), tied=Counts(3, 1, 1, 0), won=Counts(5, 1, 0, 0))
    assert by_evidence(found)==['won','tied','lost','never']
