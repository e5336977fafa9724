"The owner stands in each address of the repository and of the site, and nowhere else"
import subprocess
from pathlib import Path

import pytest
from publish_as import addresses, publish_as, repository, text_files

root = Path(__file__).parents[1]

FILES = {
    'pyproject.toml': 'Homepage = "https://OWNER.github.io/selback"\nRepository = "https://github.com/OWNER/selback"\n',
    'README.md': '![test](https://github.com/OWNER/selback/badge.svg)\n[OWNER](https://github.com/OWNER/other)\n',
    'a/page.md': '[run](https://colab.research.google.com/github/OWNER/selback/blob/main/nbs/index.ipynb)\r\n',
    'code.py': 'OWNER = "no address"\n'}

@pytest.fixture
def top(tmp_path):
    "A repository, with a picture and a file that git does not know"
    (tmp_path/'a').mkdir()
    for name,text in FILES.items(): (tmp_path/name).write_bytes(text.encode())
    (tmp_path/'picture.png').write_bytes(b'\x89PNG\xff\xfe')
    subprocess.run(['git', 'init', '-q'], cwd=tmp_path, check=True)
    subprocess.run(['git', 'add', '.'], cwd=tmp_path, check=True)
    (tmp_path/'own.txt').write_text('https://github.com/OWNER/selback')
    return tmp_path

def texts(top): return {name: (top/name).read_bytes().decode() for name in FILES}

def test_it_sets_all_addresses_and_says_where(top):
    assert publish_as('a-team', top)=={'README.md': 1, 'a/page.md': 1, 'pyproject.toml': 2}
    after = texts(top)
    assert repository(top)==('a-team','selback')
    assert after['pyproject.toml'].startswith('Homepage = "https://a-team.github.io/selback"\n')
    assert after['README.md']=='![test](https://github.com/a-team/selback/badge.svg)\n[OWNER](https://github.com/OWNER/other)\n'
    assert after['a/page.md']==FILES['a/page.md'].replace('OWNER', 'a-team') # its line ends, too
    assert after['code.py']==FILES['code.py']
    assert (top/'own.txt').read_text()=='https://github.com/OWNER/selback'

def test_a_second_time_changes_nothing_and_another_owner_takes_over(top):
    publish_as('a-team', top)
    first = texts(top)
    assert publish_as('a-team', top)=={}
    assert texts(top)==first
    publish_as('selback', top)
    publish_as('OWNER', top)
    assert texts(top)==FILES

@pytest.mark.parametrize('name', ['','two words','a/b','-a','a-','a--b','a_b','a'*40])
def test_what_is_no_name_changes_nothing(top, name):
    with pytest.raises(ValueError, match='wanted a name on GitHub'): publish_as(name, top)
    assert texts(top)==FILES

def test_no_address_of_this_repository_is_left_behind(tmp_path):
    "In a clone, and in all that it tracks"
    subprocess.run(['git', 'clone', '-q', root, tmp_path/'clone'], check=True)
    top = tmp_path/'clone'
    before = repository(top)
    found = publish_as('a-team', top)
    assert {'pyproject.toml','CITATION.cff','selback/_modidx.py'}<=set(found)
    for path,text in text_files(top): assert not addresses(*before).search(text), path
