"How Sphinx renders the site, for `_docs.py`"
from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from nbdev.config import get_config

cfg = get_config()
project,release = cfg.lib_name,cfg.version
author = f'The {project} authors'
html_title,html_theme,html_copy_source = project,'furo',False
extensions = ['myst_nb','sphinx_copybutton']
myst_enable_extensions = ['amsmath','dollarmath']
nb_execution_mode,nb_render_markdown_format = 'off','myst'
suppress_warnings = ['myst.header'] # symbols are headings of the third level, wherever they stand
html_static_path,html_css_files,html_favicon = ['_static'],['site.css'],'_static/icon.svg'
html_show_copyright,pygments_dark_style = False,'monokai'

# Formulas as MathML, which browsers show without a script from elsewhere
html_math_renderer = 'mathml'

def _visit(block):
    def visit(self, node):
        formula = tex2mathml(node.astext(), as_block=block)
        self.body.append(f'<div class="math">{formula}</div>' if block else formula)
        raise nodes.SkipNode
    return visit,None

def setup(app): app.add_html_math_renderer('mathml', _visit(False), _visit(True))
