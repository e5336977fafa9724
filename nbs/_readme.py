"Write README.md, and the pictures in it, from index.ipynb: `python nbs/_readme.py`"
import base64, json, re
from pathlib import Path

nbs = Path(__file__).parent

def _cell(cell, pictures):
    "A cell as Markdown: its source unless it is hidden, and its Markdown, text and pictures"
    source,shown = ''.join(cell['source']),[]
    alt = (re.search(r'^#\|\s*fig-alt:\s*(.*)$', source, re.M) or [0,'What it draws'])[1]
    if cell['cell_type']=='markdown': return [source]
    if re.search(r'^#\|\s*hide\s*$', source, re.M): return []
    is_hidden = re.search(r'^#\|\s*(echo:\s*false|hide_input)', source, re.M)
    if not is_hidden: shown.append(f'```python\n{source}\n```')
    for data in (o.get('data', {}) for o in cell['outputs']):
        if is_hidden and 'text/markdown' in data: shown.append(''.join(data['text/markdown']))
        elif 'image/png' in data:
            pictures[f'results/index_{len(pictures)}.png'] = base64.b64decode(''.join(data['image/png']))
            shown.append(f'![{alt}](../{list(pictures)[-1]})')
    return shown

def readme():
    "The text of README.md, and its pictures by their paths"
    cells,pictures = json.loads((nbs/'index.ipynb').read_text(encoding='utf-8'))['cells'],{}
    text = '\n\n'.join(part.strip() for cell in cells for part in _cell(cell, pictures))+'\n'
    return re.sub(r'\]\(([\w/]+\.ipynb(?:#[\w-]+)?)\)', r'](nbs/\1)', text).replace('](../', ']('),pictures

if __name__=='__main__':
    text,pictures = readme()
    (nbs.parent/'README.md').write_text(text, encoding='utf-8')
    for path,picture in pictures.items(): (nbs.parent/path).write_bytes(picture)
