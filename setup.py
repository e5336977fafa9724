"Package metadata, read from `settings.ini` (name, urls and version: see `pyproject.toml`)"
from configparser import ConfigParser
from pathlib import Path
from setuptools import setup

cfg = ConfigParser(interpolation=None, delimiters='=')
cfg.read(Path(__file__).parent/'settings.ini', encoding='utf-8')
cfg = cfg['DEFAULT']

setup(
    description=cfg['description'], keywords=cfg['keywords'].split(), author=cfg['author'],
    license_expression=cfg['license'], python_requires=f">={cfg['min_python']}",
    classifiers=[f"Development Status :: {cfg['status']}", 'Programming Language :: Python :: 3',
        'Intended Audience :: Science/Research', 'Topic :: Scientific/Engineering :: Artificial Intelligence'],
    install_requires=cfg['requirements'].split(),
    extras_require={k: cfg[f'{k}_requirements'].split() for k in ('dev', 'docs')},
)
