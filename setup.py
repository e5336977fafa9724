"The README as the package index shows it, with links to the web; all else is in pyproject.toml"
import re
from pathlib import Path
from setuptools import setup

top = Path(__file__).parent
repo = re.search(r'^Repository = "(.+)"$', (top/'pyproject.toml').read_text(encoding='utf-8'), re.M)[1]

def on_the_web(link):
    kind = 'raw' if link[1].endswith('.png') else 'blob'
    return f']({repo}/{kind}/main/{link[1]})'

readme = re.sub(r'\]\((?!https?:)([^)]+)\)', on_the_web, (top/'README.md').read_text(encoding='utf-8'))
setup(long_description=readme, long_description_content_type='text/markdown')
