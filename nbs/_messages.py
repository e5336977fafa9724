"""What the package says when something is wrong or odd, for a page of it, `start/messages.md`

A message is what `error_text` makes, or another sentence of the code; dots stand for what is filled in."""
import ast, json, re
from itertools import product
from pathlib import Path

nbs = Path(__file__).parent
package = nbs.parent/'selback'

def is_refusal(node): return isinstance(node, ast.Call) and ast.unparse(node.func)=='error_text' and len(node.args)>2

def texts_of(node, known):
    "What a string may say; `known` has what names may stand for"
    def each(nodes): return product(*(texts_of(o, known) for o in nodes))
    if isinstance(node, ast.Constant): return [str(node.value)]
    if isinstance(node, ast.JoinedStr): return list(map(''.join, each(node.values)))
    if isinstance(node, ast.FormattedValue): return texts_of(node.value, known)
    if isinstance(node, ast.IfExp): return texts_of(node.body, known)+texts_of(node.orelse, known)
    if isinstance(node, ast.Name): return known.get(node.id, ['...'])
    if not is_refusal(node): return ['...']
    return [f"{where}: got {got}, wanted {'; '.join(wanted)}." for where,got,*wanted in each(node.args)]

def is_text(node): return isinstance(node, (ast.JoinedStr,ast.Constant,ast.IfExp)) or is_refusal(node)

def names_in(function):
    "The texts that names stand for in a function"
    known = {}
    for node in ast.walk(function):
        is_name = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        if is_name and is_text(node.value): known.setdefault(node.targets[0].id, []).extend(texts_of(node.value, {}))
    return known

def said_in(node, known):
    "The texts of a piece of code, but for docstrings and for parts of a text"
    if isinstance(node, (ast.FunctionDef,ast.Module)): known = names_in(node)
    if isinstance(node, (ast.JoinedStr,ast.Constant)) or is_refusal(node): yield from texts_of(node, known)
    if isinstance(node, ast.JoinedStr) or is_refusal(node): return
    for child in ast.iter_child_nodes(node):
        is_docstring = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
        if not is_docstring: yield from said_in(child, known)

def said_by(file): return list(dict.fromkeys(map(str.strip, said_in(ast.parse(file.read_text(encoding='utf-8')), {}))))

def is_message(text):
    "Is it a sentence that says something of its own?"
    words = set(re.findall('[a-z]+', text))-{'got','wanted'}
    ends = re.search(r'(?<!\.)\.(\.{3})?$', text) # one dot, or that after three
    return bool(ends) and len(words)>2

def said(): return {file: said_by(file) for file in sorted(package.rglob('*.py')) if file.name!='_modidx.py'}

def messages():
    "The messages of each module but `selback.all`, by its name"
    found = {'.'.join(file.relative_to(package).with_suffix('').parts): list(filter(is_message, texts))
        for file,texts in said().items()}
    return {name: texts for name,texts in found.items() if texts and name!='all'}

def in_code(text): return f'`` {text} ``' if '`' in text else f'`{text}`'

ABOUT = """# Messages

*What the package says where something is refused, or odd, or was found*

Read from the code: dots stand for what is filled in, and the heading is the page that says it. An error says what it
got, what it wanted, and what to do. Of some messages [questions](questions.ipynb#messages) tells more."""

def pages():
    "The notebook of each module, and its title"
    for file in sorted(nbs.glob('*/[0-9]*.ipynb')):
        first,*cells = map(''.join, (cell['source'] for cell in json.loads(file.read_text(encoding='utf-8'))['cells']))
        module = re.search(r'^#\| default_exp (\S+)', '\n'.join(cells), re.M)
        if module: yield module[1],file.relative_to(nbs),re.match('# (.+)', first)[1]

def page():
    "The text of the page"
    found,parts = messages(),[ABOUT]
    for module,file,title in pages():
        if module not in found: continue
        listed = '\n'.join(f'- {in_code(text)}' for text in found[module])
        parts.append(f'## [{title}](../{file.as_posix()})\n\n{listed}')
    return '\n\n'.join(parts)+'\n'

def write(): (nbs/'start/messages.md').write_text(page(), encoding='utf-8')
