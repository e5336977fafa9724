"""Build the site: `python nbs/_docs.py` writes `_docs/`

nbdev processes the notebooks, and Sphinx renders them with MyST-NB and furo. `nbdev-docs` would do that with Quarto,
which no package index has."""
import ast, base64, inspect, json, re, shutil, sys, textwrap, warnings
from inspect import Parameter, formatannotation
from pathlib import Path

import yaml
from fastai.learner import Learner
from fastcore.basics import patch
from fastcore.nbio import mk_cell, read_nb, write_nb
from nbdev.doclinks import NbdevLookup
from nbdev.serve import proc_nbs
from nbdev.showdoc import BasicMarkdownRenderer
from sphinx.cmd.build import main as sphinx

import selback.all
from selback.callback.attach import known_methods
import _calls, _messages
from _calls import row, table
from _measured import by_evidence, comparisons, counts, fair
from conf import cfg, repository

nbs = Path(__file__).parent
top,out = nbs.parent,nbs.parent/'_docs'
sections = dict(
    start='Start here',
    tutorials='Guides',
    recipes='Recipes',
    methods='Methods',
    views='See a selection',
    clean='Clean your data',
    experiments='Experiments',
    api='API',
    project='Project')

# pages that are made, each with those that are folded under it: name, title, section and maker of each
parts = dict(
    called=('all','What you call','api','_calls'), # its name is that of `selback.all`, whose page it is
    inside=('map','Map of the package','api','_docs'),
    measured=('measured','What was measured','experiments','_docs'))

# what stands on the first page: a title, a notebook, which of its pictures, and a sentence
on_first_page = [
    ('Which labels are wrong', 'tutorials/noisy_labels', 0, 'From the training that you do anyway.'),
    ('Copies, films, patients', 'tutorials/honest_validation', 0, 'What makes validation too good.'),
    ('A shortcut', 'tutorials/misled', 0, 'What a model goes by in place of what you mean.'),
    ('Odd images', 'clean/03_odd', 0, 'Blank, framed, grey, tiny, turned or broken.'),
    ('Choose what trains', 'experiments/where_it_pays', 0, 'Where it pays at equal compute, and where it does not.'),
    ('In any loop', 'tutorials/plain_pytorch', 0, 'PyTorch, Lightning, Hugging Face: the same list.')]

floors = 'core','methods','callback','views','clean','','bench' # folders of modules, from the ground up

# pages that stand elsewhere than in the section of their folder
elsewhere = dict(laws='project')

# what comes first in a section, in this order
first = dict(
    start=['installation','get_started','how_it_works','what_it_takes','questions','messages','migrate'],
    tutorials=['after_training','noisy_labels','choosing','misled','honest_validation','equation','demo','cost','saving','setups','targets'],
    recipes=['tables','unet','several_labels','texts','checkpoints','half_precision','lightning','hugging_face'],
    measured=['where_it_pays','easy_data','claims','counter_evidence','wrong_labels','an_image','an_equation','shortcuts',
        'mended','copies','torn_splits','without_a_look','pretrained','cifar10','forum','multi_label','label_noise',
        'noise_cifar10',
        'imagenette','race','hard_items','proxy'],
    views=['views','pictures','groups'],
    clean=['suspects','corrections','refit','early','copies','groups','splits','odd','doctor'],
    called=['watching','scale_lr','reducible_loss','batch','scoring','compare','race','command','begin','findings','datasets','functional'])

# what people search for, and the page that tells
words = {
    'what_it_takes': 'requirements, options, supported tasks, loss functions',
    'all': 'signature, cheat sheet, all options',
    'installation': 'installation, GPU, CUDA, CPU',
    'saving': 'export, save, load',
    'questions': 'FAQ, AttributeError, reproducible, active learning, learning rate finder',
    'messages': 'errors, warnings, notices, error messages',
    'migrate': 'Composer, MosaicML, tsai, fastai v1, ImageClassifierCleaner',
    'after_training': 'dir, overview, lists and pictures, vocabulary',
    'noisy_labels': 'noisy labels, wrong labels, label errors, label noise, mislabeled, cleanlab, confident learning, '
        'relabel, mislabelled, find wrong labels, find mislabeled images, fix labels, outliers, top_losses',
    '07_suspects': 'AUM, area under the margin, dataset cartography, data cleaning',
    'misled': 'spurious correlation, spurious, shortcut, background, bias, group robustness, Clever Hans',
    '10_refit': 'last layer, retrain the last layer, DFR, refit',
    'honest_validation': 'duplicate, duplicates, near-duplicate, leak, leakage, data leakage, dedup, deduplication, '
        'group split, split by patient, GroupKFold, video frames, bursts, '
        'similar images, from_similars, train test contamination, imagededup',
    '06_groups': 'group split, GroupKFold, patient, subject, video frames, burst, camera trap',
    '00_splits': 'group split, StratifiedGroupKFold, patient split, GroupShuffleSplit, splitter',
    '03_odd': 'blank images, corrupt files, broken images, truncated, dark images, grayscale, verify_images',
    '13_answers': 'relabel, annotation, review labels',
    '14_doctor': 'doctor, audit, clean a folder, data quality, no code, fastdup, cleanvision',
    'papers': 'Jiang 2019, Hu 2021, published results',
    'claims': 'Composer, published claims, reproduction',
    'counter_evidence': 'lossless, data pruning, OrderDP, BLS, PODS, RePB, progressive data dropout',
    'cost': 'speed, faster, time, overhead, throughput',
    'setups': 'distributed training, multiple GPUs, slow loader',
    'targets': 'regression, points, object detection, bounding boxes, custom loss, item_loss',
    'equation': 'physics-informed neural network, PINN, collocation points, partial differential equation',
    'plain_pytorch': 'PyTorch, timm, torchvision, training script, logger, training dynamics, data maps, AUM',
    '23_watch': 'logger, training dynamics, data maps, AUM, Watch',
    'tables': 'tabular, table, DataFrame',
    'unet': 'U-Net, segmentation, segmentation masks, masks, memory',
    'several_labels': 'multi-label, multi label, multilabel, MultiCategoryBlock',
    'texts': 'text classification, AWD_LSTM, NLP',
    'checkpoints': 'checkpoint, resume, interrupt, Ctrl-C, SaveModelCallback, SaveSelection',
    'half_precision': 'mixed precision, fp16, bf16, MixUp, CutMix, gradient accumulation',
    'lightning': 'Lightning, PyTorch Lightning, LightningModule',
    'hugging_face': 'Hugging Face, transformers, Trainer, Accelerate',
    '02_prioritized_sampling': 'prioritized experience replay',
    '03_info_batch': 'InfoBatch, data pruning, coreset',
    '04_seta': 'curriculum, curriculum learning',
    '05_selective_backprop': 'selective backpropagation, biggest losers',
    '07_stale_loss': 'stale, stale losses',
    '08_top_loss': 'OHEM, hard example mining, hard negative mining, random subset',
    '09_importance_sampling': 'importance sampling',
    '10_reducible_loss': 'RHO-LOSS',
    'proxy': 'proxy model, airbench',
    '14_early_loss_sampling': 'Just Train Twice, JTT',
    '15_balanced_sampling': 'class imbalance, imbalanced, imbalanced classes, long tail, rare classes, oversample, '
        'oversampling, WeightedRandomSampler, unbalanced, class weights'}
lookup = NbdevLookup()

def enter_one_liners():
    "Add the one-liners to nbdev's index of names, which has what a module defines by `def` and `class`"
    for name,cls in _calls.methods().items():
        page,file,address = lookup.syms[cls.of.__name__]
        entry = f"{page.partition('#')[0]}#learner.{name}",file,address
        for written in f'Learner.{name}',f'{cls.of.__module__}.Learner.{name}': lookup.syms[written] = entry

enter_one_liners()

def joined(parts, between='\n\n'):
    "Those of the parts that say something, as one text"
    return between.join(part for part in parts if part)

# Names in texts
def is_name(text):
    "Is a text in backticks a name of an API? Words and letters are not, except for what users import"
    if text.startswith('_'): return False
    if '.' in text or '_' in text.strip('_'): return True
    if len(text)>3 and re.search('[A-Z]', text): return True
    if text in ('compare','race'): return True
    return text in selback.all.__all__ and f'Learner.{text}' not in lookup.syms

@patch
def doc(self:NbdevLookup, sym): return self._orig_doc(sym) if is_name(sym) else None

@patch
def link_line(self:NbdevLookup, line):
    "Links for names, but for those that a table explains: parameters and columns"
    own = re.match(r'\| `\w+` (?=\|)|', line).end()
    return line[:own]+self._orig_link_line(line[own:])

# What a page says of a symbol
def code(annotation): return '' if annotation is Parameter.empty else f'`{formatannotation(annotation)}`'

# functions that differ from a class, `Chosen`, `SeTa` and `Unit`, in their case only: name and page
twins = dict(chosen='/core/loop.html', seta='/core/policies.html', unit='/core/neighbours.html')

def anchor(name): return f'def-{name}-function' if name in twins else f'def-{name.lower()}'

def parameter_row(p, about):
    default = '' if p.default is p.empty else f'`{_calls.in_code(p.default)}`'
    return row(f'`{p.name}`', code(p.annotation), default, about)

def parameter_table(params, about):
    "The parameters that have a comment; nothing if none has"
    comments = {p.name: about.get(p.name, {}).get('docment') for p in params}
    rows = [parameter_row(p, comments[p.name]) for p in params if comments[p.name]]
    if not rows: return ''
    return '\n'.join([row('Parameter', 'Type', 'Default', ''), row(*['---']*4), *rows])

def returned(sig, about):
    "What a function returns, if a comment says it"
    comment = about.get('return', {}).get('docment')
    return comment and f"Returns {joined([code(sig.return_annotation), comment], ': ')}"

def source_link(f):
    address = lookup.code(f)
    return address and repository and f'<a class="source" href="{address}">source</a>'

def explained(symbol):
    "A name with a label for links to it, its signature, and its parameters in a table"
    params = [p for p in symbol.sig.parameters.values() if p.name!='self']
    bare = symbol.sig.replace(parameters=[p.replace(annotation=p.empty) for p in params])
    call = f"{symbol.nm.rpartition('.')[2]}{bare}"
    signature = textwrap.fill(call, 88, subsequent_indent='    ', break_long_words=False)
    does,_,example = inspect.cleandoc(symbol.docs).partition('\n\n')
    md = joined([
        f'({anchor(symbol.nm)})=\n### {symbol.nm}',
        source_link(symbol.fn),
        f'```python\n{signature}\n```',
        does and f'*{does}*',
        example and f'```pycon\n{example}\n```',
        parameter_table(params, symbol.dm.dm),
        returned(symbol.sig, symbol.dm.dm)])
    return lookup.linkify(re.sub(r' at 0x\w+|__main__\.', '', md))

@patch
def _repr_markdown_(self:BasicMarkdownRenderer):
    "What there is to say of a name, and after a method of its one-liner and of what is called besides"
    name = getattr(self.sym, '__name__', None) # nbdev defines what a page exports once more
    found = {line: cls for line,cls in known_methods().items() if _calls.method_of(cls).__name__==name}
    one_liners = [getattr(Learner, line) for line in found]
    besides = [getattr(cls, name) for cls in found.values() for name in _calls.called_on(cls)]
    return joined(map(explained, [self, *map(BasicMarkdownRenderer, [*one_liners, *besides])]))

# Cells
def markdown_of(cell):
    "The data of those outputs that are Markdown"
    data = [o.get('data', {}) for o in cell.get('outputs', [])]
    return [o for o in data if 'text/markdown' in o]

def without_table(md, tables):
    "What is said of a name, but for a table that the page has already"
    name = re.search(r'^### (\S+)$', md, re.M)
    table = re.search(r'^\| Parameter.*?(?=\n\n|\Z)', md, re.M|re.S)
    if table is None: return md

    shown_by = tables.setdefault(table[0], name[1])
    if shown_by==name[1]: return md
    return md.replace(table[0], f'The parameters are those of [`{shown_by}`](#{anchor(shown_by)}).')

def symbols(cell, tables):
    "What `show_doc` wrote, of one name or several"
    md = '\n'.join(''.join(data['text/markdown']) for data in markdown_of(cell))
    names = re.split(r'^(?=\(def-)', md, flags=re.M)
    return mk_cell(''.join(without_table(name, tables) for name in names), 'markdown')

def converted(cell, tables, folded=False):
    "A cell of a processed notebook as MyST-NB wants it, or None; its code unfolds at a click, if that is asked for"
    if cell.cell_type=='markdown':
        is_ours = 'AUTOGENERATED' not in cell.source
        return mk_cell(cell.source, 'markdown') if is_ours else None
    if cell.cell_type!='code': return None

    marks = dict(re.findall(r'^#\|\s*([\w-]+):?\s*(.*)$', cell.source, re.M))
    if marks.get('output')=='asis' and 'show_doc' in cell.source: return symbols(cell, tables)

    cell.source = re.sub(r'^#\|.*\n?', '', cell.source, flags=re.M).strip()
    if not cell.source or marks.get('include')=='false': return None
    cell.metadata = tags_for(marks, folded)
    return cell

def in_one_fold(cells):
    "Code that shows nothing joins the code that follows it"
    joined_cells = []
    for cell in cells:
        last = joined_cells[-1] if joined_cells else None
        goes_on = last is not None and last.cell_type==cell.cell_type=='code' and not last.outputs
        if goes_on: cell.source = f'{joined_cells.pop().source}\n\n{cell.source}'
        joined_cells.append(cell)
    return joined_cells

def api_last(cells):
    "What a card says of classes and functions comes after all that it says of the method"
    def is_symbol(cell): return cell.source.startswith('(def-')
    told = [cell for cell in cells if not is_symbol(cell)]
    return [*told, mk_cell('## API', 'markdown'), *filter(is_symbol, cells)]

def tags_for(marks, folded):
    "Metadata that hide a cell's code, or fold it"
    if marks.get('echo')=='false' or 'hide_input' in marks: return dict(tags=['remove-input'])
    return dict(tags=['hide-input']) if folded else {}

# Pages
def in_colab(path, repository=repository):
    "A link that opens a notebook of the repository in Colab, if it is on GitHub"
    if not (repository or '').startswith('https://github.com/'): return ''
    colab = repository.replace('//github.com', '//colab.research.google.com/github')
    tip = f'Run `pip install {cfg.lib_name}` in its first cell'
    return f'<a class="colab" href="{colab}/blob/{cfg.branch}/nbs/{path}" title="{tip}">Open in Colab</a>'

def index_entry(name):
    "Search words of a page; before a paragraph, which search then shows"
    if name not in words: return ''
    entries = ', '.join(f'! {word}' for word in words[name].split(', '))
    return f'```{{index}} {entries}\n```'

def page(fn, path):
    "A processed notebook with its title and search words in place, and the name of its page"
    nb = read_nb(fn)
    begins = nb.cells[0]
    front = yaml.safe_load(begins.source.strip('-\n')) if begins.cell_type=='raw' else {}
    about = front.get('description') and f"*{front['description']}*"
    title = f"# {front.get('title', fn.stem)}"
    head = mk_cell(joined([title, index_entry(fn.stem), about, in_colab(path.as_posix())]), 'markdown')

    tables = {} # of parameters, with the symbol that shows each
    folded = path.parent.name=='experiments'
    cells = list(filter(None, [converted(cell, tables, folded) for cell in nb.cells]))
    if folded: cells = in_one_fold(cells)
    if path.parent.name=='methods': cells = api_last(cells)
    nb.cells = [head, *cells]
    return nb,Path(front.get('output-file', fn.name)).stem

def linked(md, names, labels):
    "Links to notebooks and symbols as Sphinx checks them; pictures where `stage` puts them"
    def to_label(m):
        "A symbol, or the class that has it"
        name = f'{m[2]}-function' if twins.get(m[2])==m[1] else m[2]
        for label in f'def-{name}',f"def-{name.rpartition('.')[0]}":
            if label in labels: return f'](#{label})'
        return '](#)'

    def to_project(m): return f'](/project/{m[1].lower()}.md)'
    def to_file(m): return f'[{m[1]}]({repository}/blob/{cfg.branch}/{m[2]})' if repository else m[1]
    def to_page(m):
        if m[2]=='00_all': return f'{m[1]}all.md'
        return f'{m[1]}{names.get(m[2], m[2])}.ipynb'

    md = re.sub(r'\[!\[[^]]*\]\(https:[^)]*\)\]\([^)]*\)\s*', '', md) # badges, for which a page would ask elsewhere
    md = re.sub(r'\[\[(`[^`]+`)\]\([^)]*\)\]\(', r'[\1](', md) # a link in a link: the page's own wins
    md = re.sub(r'\]\((/[\w/]+\.html)#([\w.]+)\)', to_label, md)
    md = md.replace('](../results/', '](results/')
    md = re.sub(r'\]\((?:\.\./)*(CHANGELOG|CONTRIBUTING)\.md\)', to_project, md)
    md = re.sub(r'\[([^\]]+)\]\((?:\.\./)*(tests/\w+\.py|CITATION\.cff)\)', to_file, md)
    return re.sub(r'(\]\([^)#\s:]*?)([\w-]+)\.ipynb', to_page, md)

cards = {cls.of.__module__.rpartition('.')[2] for cls in _calls.methods().values()} # the modules with a one-liner

def folder_of(path):
    "The section of a notebook, or its part of the API; a helper is no method"
    folder,name = path.parent.as_posix(),path.stem[3:]
    if path.stem in elsewhere: return elsewhere[path.stem]
    if folder=='methods': return folder if name in cards else 'called'
    if folder=='experiments': return 'measured'
    if folder in ('views','clean'): return folder if name in first[folder] else 'inside'
    if folder in sections: return folder
    return 'called' if name in first['called'] else 'inside'

def evidence(nb):
    "On how many data sets a card's method was clearly better or worse, at equal cost"
    tallies = [re.search(r'^tally\((.*?)\)$', cell.source, re.M|re.S) for cell in nb.cells]
    names = [name for found in filter(None, tallies) for name in ast.literal_eval(f'[{found[1]}]')]
    return counts(fair(comparisons(*names)), 'data')

def in_order(names, wanted):
    "The pages of a section, with those that come first at its beginning"
    def place(page):
        name = Path(page).name
        return wanted.index(name) if name in wanted else len(wanted)
    return sorted(names, key=place)

def picture_of(notebook, number):
    "One of the pictures that a notebook shows, as the bytes of a PNG file"
    cells = read_nb(nbs/f'{notebook}.ipynb').cells
    shown = [o.data['image/png'] for cell in cells for o in cell.get('outputs', []) if 'image/png' in o.get('data', {})]
    return base64.b64decode(''.join(shown[number]))

def first_page_cards(src):
    "The cards of the first page, whose pictures are written among the results"
    lines = []
    for title,notebook,number,sentence in on_first_page:
        picture = f"results/card_{Path(notebook).name}.png"
        (src/picture).write_bytes(picture_of(notebook, number))
        lines.append(f'[![{title}]({picture}) **{title}**]({notebook}.ipynb) {sentence}')
    return mk_cell(joined(['<div class="cards">', *lines, '</div>']), 'markdown')

def toctree(pages, caption=None):
    "A section of the sidebar, or what is folded under a page"
    lines = '\n'.join(pages)
    named = f':caption: {caption}\n' if caption else ''
    return f'```{{toctree}}\n:hidden:\n{named}\n{lines}\n```'

# The site
class Site:
    "The pages that Sphinx reads, and what they have to know of each other"
    def __init__(self,
        proc:Path, # The folder of the processed notebooks
    ):
        paths = [fn.relative_to(proc) for fn in sorted(proc.rglob('*.ipynb')) if fn.stem!='00_all']
        self.pages = {path: page(proc/path, path) for path in paths} # each with its notebook and its name
        self.names = {path.stem: name for path,(_,name) in self.pages.items()}
        self.paths = {(path.parent/name).as_posix(): path for path,(_,name) in self.pages.items()} # by page
        texts = [cell.source for nb,_ in self.pages.values() for cell in nb.cells]
        self.labels = {label for text in texts for label in re.findall(r'^\((\S+)\)=$', text, re.M)}

        self.inside = {folder: [] for folder in [*sections,*parts]} # the pages of each section
        self.made_from = {} # the file that each page is made from

    def linked(self, md): return linked(md, self.names, self.labels)

    def enter(self, folder, at, made_from):
        "Note where a page stands"
        self.made_from[at] = made_from
        if folder: self.inside[folder].append(at)

    def enter_notebooks(self):
        for page,path in self.paths.items():
            folder = None if path.stem=='index' else folder_of(path)
            self.enter(folder, page, f'nbs/{path.as_posix()}')

    def write_project(self, src):
        "The pages on the project itself"
        (src/'project').mkdir()
        for name in 'CHANGELOG','CONTRIBUTING':
            md = (top/f'{name}.md').read_text(encoding='utf-8').replace('](nbs/', '](../')
            at = f'project/{name.lower()}'
            (src/f'{at}.md').write_text(self.linked(md), encoding='utf-8')
            self.enter('project', at, f'{name}.md')
        if repository: self.inside['project'].append(f'Repository <{repository}>')

    def title(self, path): return re.match('# (.+)', self.head(path))[1]
    def caption(self, path): return re.search(r'^\*(.+)\*$', self.head(path), re.M)[1]
    def head(self, path): return self.pages[path][0].cells[0].source

    def ordered(self, folder):
        "The pages of a section in their order"
        wanted = first.get(folder, [])
        if folder=='methods':
            on_cards = [self.pages[path] for path in self.pages if folder_of(path)==folder]
            wanted = by_evidence({name: evidence(nb) for nb,name in on_cards})
        pages = self.inside[folder]
        if folder=='inside': pages = [page for page in self.modules() if page in pages]
        return in_order(pages, wanted)

    def toctrees(self):
        for folder,caption in sections.items(): yield mk_cell(toctree(self.ordered(folder), caption), 'markdown')

    def page_of(self, module):
        "Where a module is explained, which may be a card"
        at = module.removeprefix('selback.').replace('.', '/')
        return at if at in self.paths else next(page for page in self.paths if Path(page).name==Path(at).name)

    def link_to(self, call):
        "A link to where a call is explained"
        at = self.page_of(call.module)
        label = anchor(call.name)
        target = f'#{label}' if label in self.labels else f'{at}.ipynb'
        return f'[{self.title(self.paths[at])}]({target})'

    def calls(self):
        "The page of all that a user calls"
        return [index_entry('all'), *_calls.page(self.link_to, [Path(page).name for page in self.ordered('methods')])]

    def listed(self, part, about, head, pages):
        "A page that lists others, each with its caption"
        rows = [(f'[{self.title(self.paths[page])}]({page}.ipynb)', self.caption(self.paths[page])) for page in pages]
        return [f'*{about}*', table(head, rows, part)]

    def modules(self):
        "The pages of modules, from the ground up"
        numbered = [page for page,path in self.paths.items() if path.stem[0].isdigit()]
        return sorted(numbered, key=lambda page: floors.index(page.rpartition('/')[0]))

    def write_messages(self, src):
        "The page of all that the package says"
        (src/'start').mkdir()
        title,text = _messages.page().split('\n\n', 1)
        md = joined([title, index_entry('messages'), self.linked(text)])
        (src/'start/messages.md').write_text(md, encoding='utf-8')
        self.enter('start', 'start/messages', 'nbs/_messages.py')

    def write_parts(self, src):
        "The pages that others are folded under"
        texts = dict(
            called=self.calls(),
            inside=self.listed('inside', 'Each module, from the ground up: it imports from those above it alone',
                ['module','what it is'], self.modules()),
            measured=self.listed('measured', 'The experiments, each with its code and its runs',
                ['experiment','what it is'], self.ordered('measured')))
        for part,(name,title,section,maker) in parts.items():
            folded = self.ordered(part) and toctree([f'/{page}' for page in self.ordered(part)])
            (src/f'{name}.md').write_text(joined([f'# {title}', *texts[part], folded]), encoding='utf-8')
            self.enter(section, name, f'nbs/{maker}.py')

    def llms_txt(self):
        "Each page in a line, by section, as language models read it (llmstxt.org)"
        def line(page): return f'- [{self.title(self.paths[page])}]({page}.html.md): {self.caption(self.paths[page])}'
        blocks = [f"# {cfg.lib_name}", f"> {self.caption(Path('index.ipynb'))}"]
        for folder,name in sections.items():
            folded = [part for part,(_,_,section,_) in parts.items() if section==folder]
            pages = [page for part in (folder, *folded) for page in self.ordered(part)]
            blocks += [f'## {name}', '\n'.join(line(page) for page in pages if page in self.paths)]
        return joined(blocks)+'\n'

    def llms_full_txt(self):
        "What a user reads, page after page: all but the experiments, the modules inside and the project"
        of_users = [part for part in (*sections,*parts) if part not in ('experiments','measured','inside','project')]
        pages = ['index',*(page for part in of_users for page in self.ordered(part))]
        return '\n'.join((out/f'{page}.html.md').read_text(encoding='utf-8') for page in dict.fromkeys(pages))

    def link(self, cell):
        "Have the links of a cell, and of what it shows, lead to pages"
        if cell.cell_type=='markdown': cell.source = self.linked(cell.source)
        for data in markdown_of(cell): data['text/markdown'] = self.linked(''.join(data['text/markdown']))

    def write_notebooks(self, src):
        for path,(nb,name) in self.pages.items():
            if path.name=='index.ipynb':
                at = next(i for i,cell in enumerate(nb.cells) if cell.source.startswith('## '))
                nb.cells.insert(at, first_page_cards(src))
            for cell in nb.cells: self.link(cell)
            if path.name=='index.ipynb': nb.cells.extend(self.toctrees())
            (src/path).parent.mkdir(parents=True, exist_ok=True)
            write_nb(nb, src/path.parent/f'{name}.ipynb')

def stage(src):
    "Write what Sphinx reads, and return the `Site`"
    site = Site(proc_nbs(n_workers=0, force=True))
    shutil.rmtree(src, ignore_errors=True)
    shutil.copytree(top/'results', src/'results', ignore=shutil.ignore_patterns('*.csv'))

    site.enter_notebooks()
    site.write_project(src)
    site.write_messages(src)
    site.write_parts(src)
    (src/'made_from.json').write_text(json.dumps(site.made_from), encoding='utf-8')
    site.write_notebooks(src)
    return site

def tell(what): print(f'The site: {what}', flush=True)

def main():
    shutil.rmtree(out, ignore_errors=True)
    src = top/'build/docs'
    warnings.filterwarnings('ignore', 'Found cells containing imports') # a page may do both in a cell
    tell('its pages from the notebooks; two minutes in all')
    site = stage(src)
    options = ['-W', '--keep-going', '-q', '-c', nbs, '-d', top/'build/doctrees']
    failed = []
    for builder in 'html','markdown':
        tell(f'{len(site.pages)} pages as {builder}')
        failed.append(sphinx(list(map(str, [*options, '-b', builder, src, out]))))
    (out/'llms.txt').write_text(site.llms_txt(), encoding='utf-8')
    (out/'llms-full.txt').write_text(site.llms_full_txt(), encoding='utf-8')
    shutil.rmtree(top/'jupyter_execute', ignore_errors=True) # MyST-NB puts the pictures there on their way
    tell(f"open {out/'index.html'}")
    return max(failed)

if __name__=='__main__': sys.exit(main())
