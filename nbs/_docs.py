"""Build the site: `python nbs/_docs.py` writes `_docs/`. nbdev processes the notebooks, and Sphinx renders them with MyST-NB and furo.

`nbdev-docs` would do that with Quarto, which no package index has."""
import json, re, shutil, sys, textwrap
from inspect import Parameter, formatannotation
from pathlib import Path

import yaml
from fastcore.basics import patch
from fastcore.nbio import mk_cell, read_nb, write_nb
from nbdev.doclinks import NbdevLookup
from nbdev.serve import proc_nbs
from nbdev.showdoc import BasicMarkdownRenderer
from sphinx.cmd.build import main as sphinx

import selback.all
from conf import cfg, repository

nbs = Path(__file__).parent
top,out = nbs.parent,nbs.parent/'_docs'
sections = {'start': 'Start here', 'tutorials': 'Guides', 'methods': 'Methods', 'experiments': 'Experiments', 'called': 'API: what you call', 'inside': 'API: inside', 'project': 'Project'}
# what comes first in a section, in this order
first = dict(start='installation get_started how_it_works what_it_takes laws questions migrate', tutorials='choosing demo cost saving setups targets noisy_labels',
    called='all views pictures gradients batch scoring compare race command findings datasets functional')
first = {folder: names.split() for folder,names in first.items()}
# what people search for, and the page that tells
words = {'what_it_takes': 'requirements, options, supported tasks, loss functions', 'installation': 'installation, GPU, CUDA, CPU', 'saving': 'checkpoint, resume, export, save, load', 'questions': 'FAQ, warnings, error messages, active learning',
    'migrate': 'Composer, MosaicML, tsai, fastai v1', 'noisy_labels': 'noisy labels, label errors, label noise', 'papers': 'Jiang 2019, Hu 2021, published results',
    'setups': 'mixed precision, distributed training, gradient accumulation', 'targets': 'multi-label, segmentation, regression', 'plain_pytorch': 'PyTorch',
    '04_seta': 'curriculum, curriculum learning', '05_selective_backprop': 'selective backpropagation, biggest losers', '07_stale_loss': 'stale, stale losses', '08_top_loss': 'OHEM, hard example mining, random subset',
    '09_importance_sampling': 'importance sampling', '03_info_batch': 'InfoBatch, data pruning', '10_reducible_loss': 'RHO-LOSS, noise guard', '11_proxy': 'proxy model', '02_prioritized_sampling': 'prioritized experience replay'}
lookup = NbdevLookup()

def is_name(text):
    "Is a text in backticks a name of an API? Words and letters are not, except for what users import"
    if '.' in text or '_' in text.strip('_') or len(text)>3 and re.search('[A-Z]', text): return True
    return text in ('compare','race') or text in selback.all.__all__ and f'Learner.{text}' not in lookup.syms

@patch
def doc(self:NbdevLookup, sym): return self._orig_doc(sym) if is_name(sym) else None

@patch
def link_line(self:NbdevLookup, line):
    "Links for names, but for those that a table explains: parameters and columns"
    own = re.match(r'\| `\w+` (?=\|)|', line).end()
    return line[:own]+self._orig_link_line(line[own:])

def row(*cells):
    "A row of a table; a comment of several lines becomes one"
    return '| '+' | '.join(' '.join(o.split()).replace('|', '\\|') for o in cells)+' |'

def code(o): return '' if o is Parameter.empty else f'`{formatannotation(o)}`'

@patch
def _repr_markdown_(self:BasicMarkdownRenderer):
    "A name with a label for links to it, its signature, and its parameters in a table"
    params,about = [p for p in self.sig.parameters.values() if p.name!='self'],self.dm.dm
    bare = self.sig.replace(parameters=[p.replace(annotation=p.empty) for p in params])
    signature = textwrap.fill(f"{self.nm.rpartition('.')[2]}{bare}", 88, subsequent_indent='    ', break_long_words=False)
    rows = [row(f'`{p.name}`', code(p.annotation), '' if p.default is p.empty else f'`{p.default!r}`', text) for p in params if (text := about.get(p.name, {}).get('docment'))]
    source,returns = lookup.code(self.fn),about.get('return', {}).get('docment')
    parts = [f'(def-{self.nm.lower()})=\n### {self.nm}', source and repository and f'<a class="source" href="{source}">source</a>', f'```python\n{signature}\n```',
        self.docs and f'*{self.docs}*', rows and '\n'.join([row('Parameter', 'Type', 'Default', ''), row(*['---']*4), *rows]), returns and 'Returns '+': '.join(filter(None, (code(self.sig.return_annotation), returns)))]
    return lookup.linkify(re.sub(r' at 0x\w+|__main__\.', '', '\n\n'.join(filter(None, parts))))

def symbol(cell, tables):
    "What `show_doc` wrote; a table that the page has already is not shown again"
    md = '\n'.join(''.join(o['data']['text/markdown']) for o in cell.outputs if 'text/markdown' in o.get('data', {}))
    name,table = re.search(r'^### (\S+)$', md, re.M),re.search(r'^\| Parameter.*?(?=\n\n|\Z)', md, re.M|re.S)
    if table and table[0] in tables: md = md.replace(table[0], f'The parameters are those of [`{tables[table[0]]}`](#def-{tables[table[0]].lower()}).')
    elif table: tables[table[0]] = name[1]
    return mk_cell(md, 'markdown')

def converted(cell, tables, folded=False):
    "A cell of a processed notebook as MyST-NB wants it, or None; its code unfolds at a click, if that is asked for"
    if cell.cell_type=='markdown': return None if 'AUTOGENERATED' in cell.source else mk_cell(cell.source, 'markdown')
    if cell.cell_type!='code': return
    marks = dict(re.findall(r'^#\|\s*([\w-]+):?\s*(.*)$', cell.source, re.M))
    if marks.get('output')=='asis' and 'show_doc' in cell.source: return symbol(cell, tables)
    cell.source = re.sub(r'^#\|.*\n?', '', cell.source, flags=re.M).strip()
    if not cell.source or marks.get('include')=='false': return
    cell.metadata = dict(tags=['remove-input']) if marks.get('echo')=='false' or 'hide_input' in marks else dict(tags=['hide-input']) if folded else {}
    return cell

def in_colab(path, repository=repository):
    "A link that opens a notebook of the repository in Colab, if it is on GitHub"
    if not (repository or '').startswith('https://github.com/'): return ''
    where = f"{repository.replace('//github.com', '//colab.research.google.com/github')}/blob/{cfg.branch}/nbs/{path}"
    return f'<a class="colab" href="{where}" title="Run `pip install {cfg.lib_name}` in its first cell">Open in Colab</a>'

def page(fn, path):
    "A processed notebook with its title and search words in place, and the name of its page"
    nb,tables = read_nb(fn),{}
    front = yaml.safe_load(nb.cells[0].source.strip('-\n')) if nb.cells[0].cell_type=='raw' else {}
    found_by = '```{index} '+', '.join(f'! {o}' for o in words[fn.stem].split(', '))+'\n```' if fn.stem in words else '' # before a paragraph, which search then shows
    about = front.get('description') and f"*{front['description']}*"
    title = mk_cell('\n\n'.join(filter(None, (f"# {front.get('title', fn.stem)}", found_by, about, in_colab(path.as_posix())))), 'markdown')
    nb.cells = [title, *filter(None, (converted(c, tables, path.parent.name=='experiments') for c in nb.cells))]
    return nb,Path(front.get('output-file', fn.name)).stem

def linked(md, names, labels):
    "Links to notebooks and symbols as Sphinx checks them; pictures where `stage` puts them"
    def to_label(m): return next((f'](#{o})' for o in (f'def-{m[1]}', f"def-{m[1].rpartition('.')[0]}") if o in labels), '](#)')
    md = re.sub(r'\[\[(`[^`]+`)\]\([^)]*\)\]\(', r'[\1](', md) # a link in a link: the page's own wins
    md = re.sub(r'\]\(/[\w/]+\.html#([\w.]+)\)', to_label, md).replace('](../results/', '](results/')
    md = re.sub(r'\]\((?:\.\./)+(CHANGELOG|CONTRIBUTING)\.md\)', lambda m: f'](/project/{m[1].lower()}.md)', md)
    def to_test(m): return f'[{m[1]}]({repository}/blob/{cfg.branch}/{m[2]})' if repository else m[1]
    md = re.sub(r'\[([^\]]+)\]\((?:\.\./)+(tests/\w+\.py)\)', to_test, md)
    return re.sub(r'(\]\([^)#\s:]*?)([\w-]+)\.ipynb', lambda m: f'{m[1]}{names.get(m[2], m[2])}.ipynb', md)

def folder_of(path):
    "The section of a notebook"
    folder = path.parent.as_posix()
    return folder if folder in sections else 'called' if path.stem[3:] in first['called'] else 'inside'

def in_order(folder, names):
    "The pages of a section, with those that come first at its beginning"
    wanted = first.get(folder, [])
    return sorted(names, key=lambda o: wanted.index(Path(o).name) if Path(o).name in wanted else len(wanted))

def stage(src):
    "Write what Sphinx reads"
    proc = proc_nbs(n_workers=0, force=True)
    shutil.rmtree(src, ignore_errors=True)
    shutil.copytree(top/'results', src/'results', ignore=shutil.ignore_patterns('*.csv'))
    pages = {fn.relative_to(proc): page(fn, fn.relative_to(proc)) for fn in sorted(proc.rglob('*.ipynb'))}
    names = {fn.stem: name for fn,(_,name) in pages.items()}
    labels = {label for nb,_ in pages.values() for c in nb.cells for label in re.findall(r'^\((\S+)\)=$', c.source, re.M)}
    inside,made_from = {folder: [] for folder in sections},{}
    for fn,(_,name) in pages.items():
        made_from[(at := (fn.parent/name).as_posix())] = f'nbs/{fn.as_posix()}'
        if name!='index': inside[folder_of(fn)].append(at)
    (src/'project').mkdir()
    for name in 'CHANGELOG','CONTRIBUTING':
        md = (top/f'{name}.md').read_text(encoding='utf-8').replace('](nbs/', '](../')
        (src/'project'/f'{name.lower()}.md').write_text(linked(md, names, labels), encoding='utf-8')
        inside['project'].append(f'project/{name.lower()}')
        made_from[inside['project'][-1]] = f'{name}.md'
    if repository: inside['project'].append(f'Repository <{repository}>')
    (src/'made_from.json').write_text(json.dumps(made_from), encoding='utf-8')
    for fn,(nb,name) in pages.items():
        for c in nb.cells:
            if c.cell_type=='markdown': c.source = linked(c.source, names, labels)
            for o in c.get('outputs', []):
                if 'text/markdown' in o.get('data', {}): o['data']['text/markdown'] = linked(''.join(o['data']['text/markdown']), names, labels)
        if fn.name=='index.ipynb':
            for folder,caption in sections.items(): nb.cells.append(mk_cell(f'```{{toctree}}\n:hidden:\n:caption: {caption}\n\n'+'\n'.join(in_order(folder, inside[folder]))+'\n```', 'markdown'))
        (src/fn).parent.mkdir(parents=True, exist_ok=True)
        write_nb(nb, src/fn.parent/f'{name}.ipynb')

def main():
    shutil.rmtree(out, ignore_errors=True)
    stage(top/'build/docs')
    failed = sphinx(['-W', '--keep-going', '-q', '-b', 'html', '-c', str(nbs), '-d', str(top/'build/doctrees'), str(top/'build/docs'), str(out)])
    shutil.rmtree(top/'jupyter_execute', ignore_errors=True) # MyST-NB puts the pictures there on their way
    return failed

if __name__=='__main__': sys.exit(main())
