"The skill for agents: its snippets run, in their order, and find what they say"
import re
from pathlib import Path

import selback
import selback.all, selback.functional

skill = Path(selback.__file__).parent/'.agents/skills/selback/SKILL.md'
text = skill.read_text(encoding='utf-8')
snippets = re.findall(r'```python\n(.*?)```', text, re.S)

def test_agents_find_it_by_its_name_and_description():
    front = re.match(r'---\nname: (.+)\ndescription: (.+)\n---\n', text)
    assert front[1]==skill.parent.name=='selback'
    assert len(front[2])<=1024

def test_its_snippets_run_and_find_what_they_say(tmp_path, monkeypatch):
    import matplotlib
    matplotlib.use('agg')
    monkeypatch.chdir(tmp_path)
    names = {}
    for code in snippets: exec(code, names)

    assert len(snippets)==5
    found,is_wrong = names['found'],names['is_wrong']
    n_wrong = int(is_wrong.sum())
    assert is_wrong[found.index[:n_wrong].tolist()].sum()>.7*n_wrong
    assert names['table'].label[found.index[0]]==found.likelier.iloc[0]
    assert len(names['copies'])==9 and names['honest'].valid.n==200-9
    assert {'none','favor_hard(beta=2)'}==set(names['runs'].method)
    assert set(names['watch'].suspects().index[:5])=={0,1,2,3,4}
