"Package metadata, read from `settings.ini` (name, urls and version: see `pyproject.toml`)"
import re
from configparser import ConfigParser
from pathlib import Path
from setuptools import setup

top = Path(__file__).parent
cfg = ConfigParser(interpolation=None, delimiters='=')
cfg.read(top/'settings.ini', encoding='utf-8')
cfg = cfg['DEFAULT']
repo = re.search(r'^Repository = "(.+)"$', (top/'pyproject.toml').read_text(encoding='utf-8'), re.M)[1]

def absolute(md):
    "Links as they work outside of the repository"
    return re.sub(r'\]\((?!https?:)([^)]+)\)', lambda m: f"]({repo}/{'raw' if m[1].endswith('.png') else 'blob'}/main/{m[1]})", md)

setup(
    description=cfg['description'], keywords=cfg['keywords'].split(), author=cfg['author'],
    license_expression=cfg['license'], python_requires=f">={cfg['min_python']}",
    long_description=absolute((top/'README.md').read_text(encoding='utf-8')), long_description_content_type='text/markdown',
    classifiers=[f"Development Status :: {cfg['status']}", 'Programming Language :: Python :: 3',
        'Intended Audience :: Science/Research', 'Topic :: Scientific/Engineering :: Artificial Intelligence'],
    install_requires=cfg['requirements'].split(),
    extras_require={k: cfg[f'{k}_requirements'].split() for k in ('dev', 'docs')},
)
