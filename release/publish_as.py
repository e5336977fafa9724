"""Put the repository's owner into all addresses: `python release/publish_as.py NAME`

Who owns it now, `Repository` in pyproject.toml says."""
import re, subprocess, sys
from pathlib import Path

def addresses(owner, name):
    "What finds the owner in the repository's addresses, on GitHub and Colab, and in that of the site"
    return re.compile(rf'(?<=/){re.escape(owner)}(?=/{name}\b)|(?<=//){re.escape(owner)}(?=\.github\.io/{name}\b)')

def text_files(top):
    "What git knows of, with its text"
    listed = subprocess.run(['git', 'ls-files', '-z'], cwd=top, capture_output=True, text=True, check=True).stdout
    for path in map(top.joinpath, filter(None, listed.split('\0'))):
        try: yield path,path.read_bytes().decode()
        except (UnicodeDecodeError,FileNotFoundError): pass # a picture, or a file that was deleted

def repository(top):
    "Its owner and its name"
    project = (top/'pyproject.toml').read_text(encoding='utf-8')
    return re.search(r'^Repository = "https://github\.com/(.+)/(.+)"$', project, re.M).groups()

def publish_as(owner, top):
    "Replace the owner; returns how many addresses each file had"
    is_name = re.fullmatch(r'[A-Za-z\d]+(-[A-Za-z\d]+)*', owner) and len(owner)<=39
    if not is_name:
        raise ValueError(f'owner: got {owner!r}, wanted a name on GitHub: up to 39 letters, digits and single hyphens')
    before,name = repository(top)
    if before==owner: return {}
    found = {}
    for path,text in text_files(top):
        changed,n = addresses(before, name).subn(owner, text)
        if not n: continue
        path.write_bytes(changed.encode())
        found[path.relative_to(top).as_posix()] = n
    return found

def main(owner):
    found = publish_as(owner, Path(__file__).parents[1])
    for file,n in found.items(): print(f'{file}: {n}')
    if not found: print(f'Nothing to change: {owner} owns it.')

if __name__=='__main__':
    try: main(sys.argv[1])
    except ValueError as e: sys.exit(str(e))
