"The cards of methods say the same things in the same order, and nothing that was not measured"
import ast, json, re
from functools import lru_cache
from pathlib import Path

import pytest
from _measured import comparisons, measured, tally

root = Path(__file__).parents[1]
each_card = pytest.mark.parametrize('card', sorted(o.stem for o in (root/'nbs/methods').glob('*.ipynb')))
NO_METHOD = '13_scale_lr', # a helper: it selects nothing, so that there is nothing to compare
PARTS = [r'\A# .+\n\n> .+\n', r'#\| default_exp', r'#\| hide_input\nfrom _measured import measured, tally\ntally\(', r'\*\*Use it\*\*\n\n```python\n', *(rf'\*\*{o}\.\*\* ' for o in
    ('What it does','Suggested values','Cost','When','When not','Goes with')), r'#\| export', r'\*\*An example\*\*', r'## Measured\n', r'## Messages and remedies\n', r'\*\*Source\.\*\* ']
MEASURED = re.compile(r'\d\s*(%|×|x\b|dB\b|points?\b|per ?cent|times\b|-?fold\b)')

@lru_cache
def all_comparisons(): return comparisons()

@lru_cache
def cells(card): return json.loads((root/f'nbs/methods/{card}.ipynb').read_text(encoding='utf-8'))['cells']
def source(cell): return ''.join(cell['source'])
def markdown(card): return '\n\n'.join(source(c) for c in cells(card) if c['cell_type']=='markdown')
def is_hidden(code): return re.match(r'#\|\s*hide\n', code) is not None
def code_of(card): return [source(c) for c in cells(card) if c['cell_type']=='code']
def paragraph(card, name): return re.search(rf'\*\*{name}\.\*\* (.+)', markdown(card))[1]
def prose(md): return re.sub(r'```.*?```|`[^`\n]*`|\]\([^)]*\)', ' ', md, flags=re.S)

def calls(card, name):
    "The cells that call a function of `_measured`, and with what"
    for c in cells(card):
        if c['cell_type']=='code' and (found := re.search(rf'^{name}\(.*\)$', source(c), re.M)): yield c,[o.value for o in ast.parse(found[0]).body[0].value.args]

def quoted(card):
    "The messages in a card's table"
    md = markdown(card)
    return re.findall(r'^\| `([^`]+)` \| .+ \|$', md[md.index('## Messages'):], re.M)

def expected(code):
    "What `expect_fail` waits for"
    found = [n for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Call) and getattr(n.func, 'id', '')=='expect_fail']
    return [k.value.value for n in found for k in n.keywords if k.arg=='contains']

@each_card
def test_parts_come_in_their_order(card):
    whole = '\n\n'.join(source(c) for c in cells(card))
    parts = [o for o in PARTS if card not in NO_METHOD or 'tally' not in o and 'Measured' not in o]
    found = {o: [m.start() for m in re.finditer(o, whole, re.M if o[:2]!=r'\A' else 0)] for o in parts}
    assert all(len(at)==1 or at and 'export' in o for o,at in found.items()), found
    firsts = [at[0] for at in found.values()]
    assert firsts==sorted(firsts) and max(found[r'#\| export'])<found[r'\*\*An example\*\*'][0]
    if card not in NO_METHOD: assert 'tally(' in source(cells(card)[2]) and 'measured(' in whole[found[r'## Measured\n'][0]:found[r'## Messages and remedies\n'][0]]

@each_card
def test_a_card_is_read_in_two_minutes(card):
    "At 280 words a minute, code and results aside"
    assert len(prose(markdown(card)).split())<=560

@each_card
def test_no_measured_number_is_typed(card): assert not MEASURED.search(prose(markdown(card)))

def test_typed_numbers_are_noticed():
    for text in 'an error 12 % lower','3.5% more','1.5 times faster','2 dB','two points of 0.3 points','a 2x gain': assert MEASURED.search(prose(text)), text
    for text in '`keep=.5` keeps half','arXiv [2503.13385](https://arxiv.org/abs/2503.13385)','`(1 + 3*keep)/3` of a step','```\n50 %\n```': assert not MEASURED.search(prose(text)), text

@each_card
def test_the_source_is_linked_where_the_method_is_told(card):
    for name in 'What it does','Source': assert re.search(r'\]\(https://(arxiv\.org/abs/|forums\.fast\.ai/)', paragraph(card, name)), name

@each_card
def test_who_must_watch_out_is_told(card):
    told = paragraph(card, 'When not')
    assert '`valid_loss` rises while `train_loss` falls' in told and '`end=.85`' in told and 'BatchNorm' in told

@each_card
def test_words_are_told_once(card):
    text = prose(markdown(card))
    assert not re.search(r'\bpays\b|look-free', text)
    if re.search(r'\blook(s|ed|ing)?\b', text): assert 'a forward pass that only scores' in text

@each_card
def test_an_example_trains_on_digits_and_asserts_a_law(card):
    shown = [o for o in code_of(card) if not is_hidden(o) and "get_dls('digits'" in o]
    assert shown and all(re.search(r'\.fit(_one_cycle)?\(', o) for o in shown) and 'set_seed(0)' in shown[0]
    assert re.search(r'\bassert |\btest_\w+\(', shown[0])

@each_card
def test_each_quoted_message_is_raised(card):
    hidden = [m for o in code_of(card) if is_hidden(o) for m in expected(o)]
    assert not [m for o in code_of(card) if not is_hidden(o) for m in expected(o)], 'bare expect_fail'
    assert quoted(card) or 'It raises nothing of its own.' in markdown(card)
    assert not set(quoted(card))-set(hidden)

def study_pages(text): return {page for page in re.findall(r'\]\(\.\./([^)#]+)\.ipynb\)', text) if page in set(all_comparisons().page)}

@each_card
def test_what_did_not_win_is_not_recommended_for_winning(card):
    "And what did is recommended for what it won at"
    when = paragraph(card, 'When')
    disclaims = re.match('Nowhere that we measured|Not measured here|Not for a better network', when)
    if card in NO_METHOD: assert disclaims; return
    names = next(calls(card, 'tally'))[1]
    df = all_comparisons()
    df = df[(df.method.isin(names) | df.method.str.startswith(tuple(f'{o}(' for o in names))) & (df.verdict=='better')]
    won = '**Measured:** clearly better' in tally(*names).data
    assert won==df.equal_cost.any() and won!=bool(disclaims), f"{tally(*names).data} Rewrite its \"When\"."
    wins = set(df.page[df.equal_cost]) if won else set(df.page)
    assert study_pages(when)<=wins, f'recommended for {study_pages(when)-wins}, where it was not clearly better'
    if won: assert study_pages(when), f'it won at {wins}, which its "When" names none of'
    elif study_pages(when): assert 'looks not counted' in when or 'look is free' in when

@each_card
def test_what_is_shown_is_what_was_measured(card):
    "Refresh it by `.venv/bin/python nbs/_run.py nbs/methods/CARD.ipynb`"
    for name,f in dict(tally=tally, measured=measured).items():
        found = list(calls(card, name))
        assert found or card in NO_METHOD
        for cell,names in found:
            shown = [''.join(o['data']['text/markdown']) for o in cell['outputs'] if 'text/markdown' in o.get('data', {})]
            assert shown==[f(*names).data], f'run `.venv/bin/python nbs/_run.py nbs/methods/{card}.ipynb`'

def test_each_method_has_a_card():
    "And each comparison of a method shows on one"
    shown = {name for card in (o.stem for o in (root/'nbs/methods').glob('*.ipynb')) for _,names in calls(card, 'measured') for name in names}
    no_methods = {'class-balanced and prioritized','easiest first'} # what methods are compared with
    methods = all_comparisons().query('~is_rival').method
    assert set(methods.str.replace(r'\(.*', '', regex=True))-no_methods<=shown
