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
def test_every_page_is_there_as_markdown():
    "For language models: its words, its code and what that shows, with links from one to the other"
    written = {p.relative_to(site).as_posix() for p in site.rglob('*.html.md')}
    assert written=={f'{page}.md' for page in pages if page!='search.html'}
    for name in written:
        text = (site/name).read_text(encoding='utf-8')
        assert re.match(r'(<a id="[^"]+"></a>\s+)*# \w', text), name
        links = re.findall(r'\]\(([^):]+\.html\.md)', text)
        for link in links: assert (site/name).parent.joinpath(link).is_file(), f'{name}: {link}'
    full = (site/'llms-full.txt').read_text(encoding='utf-8')
    assert (site/'methods/favor_hard.html.md').read_text(encoding='utf-8') in full

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
    ('hard example mining', 'methods/top_loss'),
    ('Composer', 'start/migrate'),
    ('mislabeled', 'tutorials/noisy_labels'),
    ('data leakage', 'tutorials/honest_validation'),
    ('multi-label', 'recipes/several_labels'),
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

def test_tables_fit_a_screen(tab):
    wide = {name: tab.go(name).evaluate(TOO_WIDE) for name in pages}
    assert not {name: n for name,n in wide.items() if n}

@pytest.mark.parametrize('tab,most', [(dict(width=1050), 1050), (dict(width=390), 390)], indirect=['tab'])
def test_nothing_is_wider_than_a_small_window_or_a_phone(tab, most):
    widths = {name: tab.go(name).evaluate('document.documentElement.scrollWidth') for name in pages}
    assert not {name: width for name,width in widths.items() if width>most}

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
