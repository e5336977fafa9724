"Write README.md from index.ipynb: `python nbs/_readme.py`"
import json, re
from pathlib import Path

nbs = Path(__file__).parent

def _cell(cell):
    "A cell as Markdown: its source unless it is hidden, and its Markdown and text outputs"
    source = ''.join(cell['source'])
    if cell['cell_type']=='markdown': return [source]
    if re.search(r'^#\|\s*hide\s*$', source, re.M): return []
    shown = [] if re.search(r'^#\|\s*(echo:\s*false|hide_input)', source, re.M) else [f'```python\n{source}\n```']
    outputs = [''.join(o['data']['text/markdown']) for o in cell['outputs'] if 'text/markdown' in o.get('data', {})]
    return shown + [re.sub(r'^\s*```html\n|```\s*$|^ +', '', o, flags=re.M) for o in outputs] # fastai's training table is HTML

def readme():
    "The text of README.md"
    cells = json.loads((nbs/'index.ipynb').read_text(encoding='utf-8'))['cells']
    text = '\n\n'.join(part.strip() for cell in cells for part in _cell(cell))+'\n'
    return re.sub(r'\]\(([\w/]+)\.ipynb\)', r'](nbs/\1.ipynb)', text).replace('](../', '](')

if __name__=='__main__': (nbs.parent/'README.md').write_text(readme(), encoding='utf-8')
