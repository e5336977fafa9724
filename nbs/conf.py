"How Sphinx renders the site, for `_docs.py`"
import json, re

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from nbdev.config import get_config

cfg = get_config()
project,release = cfg.lib_name,cfg.version
author = f'The {project} authors'
suppress_warnings = ['myst.header'] # symbols are headings of the third level, wherever they stand

extensions = ['myst_nb','sphinx_copybutton','sphinx_markdown_builder']
myst_enable_extensions = ['amsmath','dollarmath']
myst_heading_anchors = 2 # a page may lead to a heading of another
nb_execution_mode = 'off'
nb_render_markdown_format = 'myst'

# each page once more, for language models (llmstxt.org): tables as they are printed, and no pictures
markdown_file_suffix = markdown_uri_doc_suffix = '.html.md'
nb_mime_priority_overrides = [('markdown','text/markdown',10),('markdown','text/plain',20)]

copybutton_prompt_text = '>>> ' # which is not copied
html_title = f'{project} {release}'
html_theme = 'furo'
html_static_path,html_css_files,html_js_files = ['_static'],['site.css'],['site.js']
html_use_index = False # its entries are what search finds
html_favicon = '_static/icon.svg'
html_copy_source = False
html_show_copyright = False
html_math_renderer = 'mathml' # formulas that browsers show without a script from elsewhere
pygments_dark_style = 'monokai'

def _colours(link, hover):
    "Links have a colour that says nothing: blue is for what is better"
    names = dict.fromkeys(('brand-primary','brand-content','brand-visited'), link) | {'link--hover': hover}
    return {f'color-{name}': colour for name,colour in names.items()}

html_theme_options = dict(
    light_css_variables=_colours('#6b3a87', '#4d2563'),
    dark_css_variables=_colours('#c9a2e0', '#e3c9f2'))

def published(url):
    "The repository's address, or None until `make publish-as` has put in its owner"
    return None if '/OWNER/' in url else url

repository = published(cfg.git_url)

def _edit(app, page, template, context, doctree):
    "Each page has the address of the file that it is made from"
    if not repository: return
    made_from = json.loads((app.srcdir/'made_from.json').read_text(encoding='utf-8'))
    if page not in made_from: return
    context['theme_source_edit_link'] = f'{repository}/edit/{cfg.branch}/{made_from[page]}'

def _breaks(app, page, template, context, doctree):
    "A call in a table breaks between its words, where it must"
    if 'body' not in context: return
    def between(text): return re.sub(r'([_(,]|\bback(?=prop))(?=[^)\s])', r'\1<wbr>', text)
    def in_code(m): return m[1]+between(m[2])
    def in_cell(m): return re.sub('(<span class="pre">)([^<]+)', in_code, m[0])
    def in_frame(m): return m[1]+between(m[2])
    body = re.sub('<td>.*?</td>', in_cell, context['body'], flags=re.S)
    context['body'] = re.sub(r'(<t[hd][^>]*>)([^<]*(?:\w[_(,]\w|backprop)[^<]*)(?=</t[hd]>)', in_frame, body)

def _visit(block):
    "What Sphinx does at a formula: in a paragraph of its own if `block`"
    def visit(self, node):
        formula = tex2mathml(node.astext(), as_block=block)
        self.body.append(f'<div class="math">{formula}</div>' if block else formula)
        raise nodes.SkipNode
    return visit,None

def setup(app):
    app.add_html_math_renderer('mathml', _visit(False), _visit(True))
    app.connect('html-page-context', _edit)
    app.connect('html-page-context', _breaks)
