"Package metadata, read from `settings.ini` (name, urls and version: see `pyproject.toml`)"
import re
from configparser import ConfigParser
from pathlib import Path
from setuptools import setup

top = Path(__file__).parent
cfg = ConfigParser(interpolation=None, delimiters='=')
cfg.read(top/'settings.ini', encoding='utf-8')
cfg = cfg['DEFAULT']
pythons = cfg['pythons'].split() # the oldest first
repo = re.search(r'^Repository = "(.+)"$', (top/'pyproject.toml').read_text(encoding='utf-8'), re.M)[1]

def absolute(md):
    "Links as they work outside of the repository"
    def on_the_web(link):
        kind = 'raw' if link[1].endswith('.png') else 'blob'
        return f']({repo}/{kind}/main/{link[1]})'
    return re.sub(r'\]\((?!https?:)([^)]+)\)', on_the_web, md)

setup(
    description=cfg['description'],
    keywords=cfg['keywords'].split(),
    author=cfg['author'],
    license_expression=cfg['license'],
    python_requires=f'>={pythons[0]}',
    long_description=absolute((top/'README.md').read_text(encoding='utf-8')),
    long_description_content_type='text/markdown',
    classifiers=[f"Development Status :: {cfg['status']}", 'Intended Audience :: Science/Research',
        'Operating System :: OS Independent', 'Programming Language :: Python :: 3',
        *(f'Programming Language :: Python :: {version}' for version in pythons),
        'Topic :: Scientific/Engineering :: Artificial Intelligence'],
    install_requires=cfg['requirements'].split(),
    extras_require={k.removesuffix('_requirements'): v.split() for k,v in cfg.items() if k.endswith('_requirements')},
)
