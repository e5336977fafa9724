"The site as a browser shows it: `make docs` builds it"
import inspect, os, re, shutil, subprocess, sys
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlparse

import pytest
from playwright.sync_api import sync_playwright

pytestmark = pytest.mark.slow # the site in a browser

site = Path(__file__).parents[1]/'_docs'
pages = sorted(p.relative_to(site).as_posix() for p in site.rglob('*.html')) if site.is_dir() else []

def missing(what):
    "A reason to skip, and a failure where `.ci/run` has brought all"
    give_up = pytest.fail if os.environ.get('SELBACK_SITE') else pytest.skip
    give_up(what)

@pytest.fixture(scope='module')
def address():
    "A server in a process of its own, whose threads nobody traces"
    if 'index.html' not in pages: missing('there is no site: run `make docs` first')
    command = [sys.executable, '-u', '-m', 'http.server', '0', '--bind', '127.0.0.1', '--directory', site]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        yield re.search(r'http://[^)]+', server.stdout.readline())[0]
        server.terminate()

@pytest.fixture(scope='module')
def browser(address):
    found = [shutil.which(name) for name in ('chromium','chromium-browser','google-chrome')]
    program = next(filter(None, found), None)
    if program is None: missing('there is no Chromium')
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=['--no-sandbox'])
        yield browser
        browser.close()

class Tab:
    "A page with what went wrong in it"
    def __init__(self, browser, address, width=1280, dark=False):
        self.address,self.wrong = address,[]
        scheme = 'dark' if dark else 'light'
        self.page = browser.new_page(viewport=dict(width=width, height=900), color_scheme=scheme)
        self.page.on('console', self.note_message)
        self.page.on('pageerror', lambda error: self.wrong.append(str(error)))
        self.page.on('response', self.note_response)
        self.page.on('request', self.note_request)

    def note_message(self, message):
        if message.type in ('error','warning'): self.wrong.append(message.text)

    def note_response(self, response):
        if response.status>=400: self.wrong.append(f'{response.status} {response.url}')

    def note_request(self, request):
        is_ours = request.url.startswith((self.address, 'data:'))
        if not is_ours: self.wrong.append(f'asks elsewhere: {request.url}')

    def go(self, page):
        self.page.goto(self.address+page)
        return self.page

@pytest.fixture
def tab(browser, address, request):
    tab = Tab(browser, address, **getattr(request, 'param', {}))
    yield tab
    tab.page.close()
    assert not tab.wrong

narrow = pytest.mark.parametrize('tab', [dict(width=390)], indirect=True, ids=['390px'])
dark = pytest.mark.parametrize('tab', [dict(dark=True)], indirect=True, ids=['dark'])
some = pytest.mark.parametrize('name', ['index.html','methods/selective_backprop.html','experiments/cifar10.html'])

def has_target(url, ids):
    "Does a path of the site lead to a page, and to a place on it?"
    path,anchor = map(unquote, urldefrag(url))
    path = urlparse(path).path or 'index.html'
    if not (site/path).is_file(): return False
    return not anchor or path not in ids or anchor in ids[path]

def test_links_lead_somewhere(tab):
    "All of them, on all pages, to addresses of the site"
    linked,ids = {},{}
    for name in pages:
        page = tab.go(name)
        ids[name] = set(page.evaluate("[...document.querySelectorAll('[id]')].map(o => o.id)"))
        for url in page.evaluate("[...document.querySelectorAll('a[href], img[src]')].map(o => o.href || o.src)"):
            if url.startswith(tab.address): linked.setdefault(url.removeprefix(tab.address), name)
            else: assert urlparse(url).scheme in ('https','data'), f'{name}: {url}'

    broken = [f'{name}: {url}' for url,name in linked.items() if not has_target(url, ids)]
    assert not broken
    assert len(linked)>len(pages)>40

def test_every_page_is_reached_from_home(tab):
    seen = tab.go('index.html').evaluate("[...document.querySelectorAll('.sidebar-tree a')].map(o => o.href)")
    reached = {url.removeprefix(tab.address).partition('#')[0] for url in seen}
    assert set(pages)-reached<={'index.html','search.html','genindex.html'}

@pytest.mark.usefixtures('address')
def test_llms_txt_has_a_line_for_each_notebook():
    text = (site/'llms.txt').read_text(encoding='utf-8')
    assert re.match(r'# selback\n\n> .+\n\n## Start here\n\n- \[Installation\]', text)
    listed = re.findall(r'^- \[.+\]\((.+\.html)\.md\): \w.+$', text, re.M)
    assert len(listed)==len(set(listed))==text.count('\n- ')
    sections = dict(re.findall(r'^## (.+)\n\n((?:- .+\n)*)', text, re.M))
    assert 'experiments/easy_data.html' in sections['Experiments']
    assert 'experiments/' not in sections['API']
    made_otherwise = {'all','map','measured','messages','index','search','project/changelog','project/contributing'}
    assert set(pages)-set(listed)=={f'{name}.html' for name in made_otherwise}

@pytest.mark.usefixtures('address')
def test_every_page_is_there_as_markdown():
    "For language models: its words, its code and what that shows, with links from one to the other"
    written = {p.relative_to(site).as_posix() for p in site.rglob('*.html.md')}
    assert written=={f'{page}.md' for page in pages if page!='search.html'}
    for name in written:
        text = (site/name).read_text(encoding='utf-8')
        assert re.match(r'(<a id="[^"]+"></a>\s+)*# \w', text), name
        links = re.findall(r'\]\(([^):]+\.html\.md)', text)
        for link in links: assert (site/name).parent.joinpath(link).is_file(), f'{name}: {link}'

    text = (site/'methods/favor_hard.html.md').read_text(encoding='utf-8')
    assert 'learn.favor_hard().fit_one_cycle(60)' in text
    assert '| `beta`' in text
    full = (site/'llms-full.txt').read_text(encoding='utf-8')
    assert text in full
    assert len(full)<1_000_000

@pytest.mark.usefixtures('address')
def test_the_map_has_a_line_for_each_module():
    listed = re.findall(r'^\| \[.+?\]\((\w+)/(\w+)\.html\.md\) +\| \w.+\|$', (site/'map.html.md').read_text(), re.M)
    numbered = [p for p in (site.parent/'nbs').glob('*/[0-9]*.ipynb') if '_' in p.stem]
    assert set(listed)=={(p.parent.name,p.stem[3:]) for p in numbered}
    assert [folder for folder,_ in listed][:1]==['core']

IS_LARGE = 'o => o.complete && o.naturalWidth>200 && o.getBoundingClientRect().width>150'

@some
def test_pictures_are_visible(tab, name):
    page = tab.go(name)
    assert page.locator('article h1').is_visible()
    assert len(page.locator('article p').all())>3
    pictures = page.locator('article img').all()
    assert pictures
    for picture in pictures:
        picture.scroll_into_view_if_needed()
        assert picture.is_visible()
        assert picture.evaluate(IS_LARGE)

SEARCHES = [
    ('checkpoint', 'recipes/checkpoints'),
    ('resume', 'recipes/checkpoints'),
    ('export', 'tutorials/saving'),
    ('stale', 'methods/stale_loss'),
    ('OHEM', 'methods/top_loss'),
    ('hard example mining', 'methods/top_loss'),
    ('InfoBatch', 'methods/info_batch'),
    ('Composer', 'start/migrate'),
    ('curriculum', 'methods/seta'),
    ('active learning', 'start/questions'),
    ('importance sampling', 'methods/importance_sampling'),
    ('noisy labels', 'tutorials/noisy_labels'),
    ('mislabeled', 'tutorials/noisy_labels'),
    ('cleanlab', 'tutorials/noisy_labels'),
    ('spurious correlation', 'tutorials/misled'),
    ('near-duplicate', 'tutorials/honest_validation'),
    ('data leakage', 'tutorials/honest_validation'),
    ('corrupt files', 'clean/odd'),
    ('spurious', 'tutorials/misled'),
    ('segmentation masks', 'recipes/unet'),
    ('multi label', 'recipes/several_labels'),
    ('JTT', 'methods/early_loss_sampling'),
    ('multilabel', 'recipes/several_labels'),
    ('multi-label', 'recipes/several_labels'),
    ('tabular', 'recipes/tables'),
    ('U-Net', 'recipes/unet'),
    ('text classification', 'recipes/texts'),
    ('mixed precision', 'recipes/half_precision'),
    ('Lightning', 'recipes/lightning'),
    ('transformers', 'recipes/hugging_face'),
    ('timm', 'tutorials/plain_pytorch'),
    ('GPU', 'start/installation'),
    ('imbalanced', 'methods/balanced_sampling'),
    ('class imbalance', 'methods/balanced_sampling'),
    ('oversample', 'methods/balanced_sampling'),
    ('Hugging Face', 'recipes/hugging_face'),
    ('speed', 'tutorials/cost')]

IS_DONE = """!document.querySelector('#search-progress')?.innerText.trim()
  || document.querySelector('#search-results p.search-summary')"""
RESULTS = """[...document.querySelectorAll('#search-results li a')]
  .map(o => o.getAttribute('href').split(/[?#]/)[0])"""

@pytest.mark.parametrize('word,wanted', SEARCHES)
def test_search_finds_a_page_first(tab, word, wanted):
    page = tab.go('index.html')
    page.get_by_placeholder('Search').fill(word)
    page.keyboard.press('Enter')
    page.wait_for_selector('#search-results li a')
    page.wait_for_function(IS_DONE)
    best = page.evaluate(RESULTS)
    assert best[0]==f'{wanted}.html', best[:3]

CAPTIONS = """() => [...document.querySelectorAll('.sidebar-tree .caption')].map(o =>
  [o.innerText.trim(), [...o.nextElementSibling.querySelectorAll('a')].map(a => a.getAttribute('href'))])"""

@pytest.fixture
def parts(tab):
    "The sections of the sidebar, each with the pages that it has, folded or not"
    return {name.lower(): listed for name,listed in tab.go('index.html').evaluate(CAPTIONS)}

def test_the_api_begins_with_what_is_called(parts):
    assert parts['start here'][0]=='start/installation.html'
    api = parts['api']
    middle = api.index('map.html')
    called,inside = api[:middle],api[middle:]
    assert called[0]=='all.html'
    assert {'views/views.html','callback/batch.html','bench/compare.html','bench/command.html'}<=set(called)
    assert {'callback/loaders.html','callback/notes.html','callback/selection.html'}<=set(inside)

ON_SIGHT = "[...document.querySelectorAll('.sidebar-tree a')].filter(o => o.offsetHeight).length"

def test_the_api_and_the_experiments_are_folded(tab): assert tab.go('index.html').evaluate(ON_SIGHT)<55

def test_methods_come_by_evidence(parts):
    "And what only helps a method is none"
    methods = parts['methods']
    assert methods[0]=='methods/favor_hard.html'
    assert not {'methods/scale_lr.html','methods/proxy.html','methods/reducible_loss.html'} & set(methods)

def test_all_calls_are_on_one_page(tab):
    "One-liners with their own options, what `selback.all` exports, and the command"
    import selback.all as selback
    from helpers import OWN_MODULES
    from selback.bench.command import run_study
    page = tab.go('all.html')
    text = page.locator('article').inner_text()
    for name,cls in selback.known_methods().items():
        if cls.__module__ in OWN_MODULES: assert f'learn.{name}(' in text
    assert 'learn.favor_hard(beta=1, ...)' in text
    for name in selback.__all__:
        o = getattr(selback, name)
        if inspect.isfunction(o) or inspect.isclass(o): assert re.search(rf'\b{name}\(', text), name
    for name in inspect.signature(run_study).parameters: assert f'--{name}' in text

    rows = page.locator('table.calls:not(.options) tbody tr').count()
    assert page.locator('table.calls:not(.options) tbody td:last-child a').count()>rows-25 # options have no page

BOXES = "[...document.querySelectorAll('article table, article .table-wrapper')]"
TOO_WIDE = f'{BOXES}.filter(o => o.scrollWidth>o.clientWidth+1).length'
SAID = "document.querySelectorAll('article .scrolls').length"

def test_tables_fit_a_screen(tab):
    wide = {name: tab.go(name).evaluate(TOO_WIDE) for name in pages}
    assert not {name: n for name,n in wide.items() if n}

@narrow
def test_a_table_that_scrolls_says_so(tab):
    page = tab.go('tutorials/choosing.html')
    page.wait_for_function(SAID)
    assert page.evaluate(SAID)==page.evaluate(TOO_WIDE)

def test_version_and_repository(tab):
    "Without a repository there are no links to one"
    import selback
    conf,_ = builders()
    page = tab.go('methods/selective_backprop.html')
    assert selback.__version__ in page.locator('.sidebar-brand-text').inner_text()

    links = page.evaluate("[...document.querySelectorAll('a[rel=edit], a.colab, a.source')].map(o => o.href)")
    if conf.repository is None:
        assert not links
        assert not page.locator(f'a[href*="{conf.cfg.git_url}"]').count()
        return
    assert f'{conf.repository}/edit/{conf.cfg.branch}/nbs/methods/05_selective_backprop.ipynb' in links
    assert any('colab' in link for link in links)
    assert page.locator(f'.sidebar-tree a[href="{conf.repository}"]').count()==1

def builders():
    "The modules that build the site"
    pytest.importorskip('sphinx')
    import _docs, conf
    return conf,_docs

def test_a_placeholder_is_no_repository():
    conf,_docs = builders()
    url = conf.published('https://github.com/someone/selback', 'someone', 'selback')
    assert conf.published(url, 'selback', 'selback') is None
    assert _docs.in_colab('start/get_started.ipynb', None)==''
    assert _docs.in_colab('a.ipynb', 'https://gitlab.com/someone/selback')==''

    place = f'someone/selback/blob/{conf.cfg.branch}/nbs/start/get_started.ipynb'
    button = _docs.in_colab('start/get_started.ipynb', url)
    assert f'href="https://colab.research.google.com/github/{place}"' in button

NAMES = 'Learner','top_k','compare','torch.compile','vision_learner','Chosen','DataLoader','include'
WORDS = 'E','run','run()','first','method','results','seta','schedule','accuracy'

def test_only_names_become_links():
    _,_docs = builders()
    def n_links(text): return _docs.lookup.linkify(text).count('](')
    for name in NAMES: assert n_links(f'`{name}`'), name
    for word in WORDS: assert not n_links(f'`{word}`'), word
    assert n_links('| `top_k` | as `top_k` |')==1 # a column, or a parameter, is not the function of its name

def test_no_word_is_linked_elsewhere(tab):
    linked = "[...document.querySelectorAll('article a.external > code')].map(o => o.innerText)"
    links = {(text, name) for name in pages for text in tab.go(name).evaluate(linked)}
    assert links
    assert not {(text, name) for text,name in links if re.fullmatch(r'[a-z]+(\(\))?|.{1,3}', text)}

def test_nothing_is_wider_than_a_small_window(tab):
    tab.page.set_viewport_size(dict(width=1050, height=900))
    widths = {name: tab.go(name).evaluate('document.documentElement.scrollWidth') for name in pages}
    assert not {name: width for name,width in widths.items() if width>1050}

@narrow
def test_nothing_is_wider_than_a_phone(tab):
    widths = {name: tab.go(name).evaluate('document.documentElement.scrollWidth') for name in pages}
    assert not {name: width for name,width in widths.items() if width>390}
    assert tab.page.locator('article').bounding_box()['width']>330

BROKEN = """codes => codes
  .flatMap(code => [...code.querySelectorAll('.pre')].flatMap(o => [...o.childNodes]))
  .filter(o => o.nodeType==3)
  .map(o => {
    let range = document.createRange()
    range.selectNode(o)
    let lines = new Set([...range.getClientRects()].map(box => Math.round(box.top)))
    return [o.textContent, lines.size]
  })
  .filter(o => o[1]>1)"""
MAY_BREAK = "codes => codes.some(code => code.querySelector('wbr'))"

@narrow
@pytest.mark.parametrize('name', ['tutorials/choosing.html','index.html'])
def test_no_word_of_a_call_is_broken_on_a_phone(tab, name):
    codes = tab.go(name).locator('article td code')
    assert codes.count()>5
    assert codes.evaluate_all(MAY_BREAK)
    assert not codes.evaluate_all(BROKEN)

LUMINANCE = """o => {
  let numbers = color => color.match(/[\\d.]+/g).map(Number)
  let isClear = o => getComputedStyle(o).backgroundColor.match(/(, 0\\)|transparent)$/)
  let linear = v => v<=.03928 ? v/12.92 : ((v+.055)/1.055)**2.4
  let luminance = color => numbers(color).slice(0, 3)
    .map((v, i) => linear(v/255)*[.2126,.7152,.0722][i])
    .reduce((sum, v) => sum+v, 0)
  let back = o
  while (isClear(back)) back = back.parentElement
  return [luminance(getComputedStyle(o).color), luminance(getComputedStyle(back).backgroundColor)]
}"""

@dark
@some
def test_dark_pages_are_dark_and_readable(tab, name):
    page = tab.go(name)
    for what in 'article p','article h1','.sidebar-tree a','article code','article pre span':
        text,back = page.locator(what).first.evaluate(LUMINANCE)
        contrast = (text+.05)/(back+.05)
        assert back<.1<text
        assert contrast>=4.5, f'{what}: contrast of {contrast:.1f}'

    for picture in page.locator('article .cell_output img').all():
        assert picture.evaluate('o => getComputedStyle(o).backgroundColor')=='rgb(255, 255, 255)'

def test_names_are_shown_with_parameters_and_links(tab):
    page = tab.go('core/policies.html')
    name = page.locator('section:has(> h2:text("loss_share"), > h3:text("loss_share"))').last
    conf,_ = builders()
    if conf.repository: assert '/selback/policies.py#L' in name.locator('a.source').get_attribute('href')
    assert name.locator('table tbody tr').count()==4
    assert 'Share of the summed loss' in name.locator('table').inner_text()
    assert name.locator('a[href*="pytorch.org"]').count()>0
    assert name.locator('a[href$="#def-chosen"]').count()>0
    page = tab.go('methods/selective_backprop.html')
    assert page.locator('a[href^="https://docs.fast.ai"]').count()>0

SHOWN = """() => Object.fromEntries([...document.querySelectorAll('[id^=def-]')].map(o => {
  let code = (o.closest('section') || o).querySelector('.highlight-python pre')
  return [o.id.slice(4), code?.innerText || '']
}))"""

def parameters_of(o):
    "The names of a signature in their order, with the stars before them"
    names,after_star = [],False
    for p in inspect.signature(o).parameters.values():
        if p.kind==p.KEYWORD_ONLY and not after_star: names.append('*')
        after_star = after_star or p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        stars = {p.VAR_POSITIONAL: '*', p.VAR_KEYWORD: '**'}.get(p.kind, '')
        names.append(stars+p.name)
    return names

def parameters_in(text):
    "The same of a signature that is shown"
    before_return = text.partition(' -> ')[0]
    found = re.findall(r'(?<=[(,])\s*(\*{0,2}[a-z_]*\w*|\*)(?=[=,)])', before_return)
    return [name for name in found if name]

def test_signatures_are_those_of_the_code(tab):
    "Each parameter of each public name in its order, and which ones are keywords only"
    import selback.all as selback
    shown = {name: text for page in pages for name,text in tab.go(page).evaluate(SHOWN).items()}
    checked = 0
    for name in selback.__all__:
        o,label = getattr(selback, name),name.lower().replace('_', '-')
        if inspect.isfunction(o) and f'{label}-function' in shown: label += '-function' # a class has the same letters
        has_signature = inspect.isfunction(o) or inspect.isclass(o)
        if not has_signature or label not in shown: continue
        assert parameters_in(shown[label])==parameters_of(o), f'{name}: {shown[label]}'
        checked += 1
    assert checked>40

def test_formulas_are_drawn_without_a_script(tab):
    page = tab.go('start/how_it_works.html')
    assert page.locator('math').count()>1
    assert page.locator('math mfrac').first.bounding_box()['height']>15
