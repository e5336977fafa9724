"The command's help: quick, and with all that can be written in a line"
import inspect, re, shlex, subprocess, sys

import pytest
from helpers import *
from selback.bench.command import help_parser, main, methods_written, run_study

HELP = help_parser(run_study).format_help()

def own_defaults(cls):
    "A method's own options, with their defaults"
    parameters = inspect.signature(cls.__init__).parameters.values()
    return {p.name: p.default for p in parameters if p.name!='self' and p.kind==p.POSITIONAL_OR_KEYWORD}

def test_help_lists_every_method_with_its_own_options():
    "As the classes have them; `replay_choices` needs an object"
    written = {name.partition('(')[0]: (name,what) for name,what in methods_written().items()}
    ours = {name: c for name,c in known_methods().items() if c.__module__.startswith('selback.methods.')}
    assert set(written)==set(ours)-{'replay_choices'}
    for name,(call,what) in written.items():
        assert eval(f"dict{call.removeprefix(name)}")==own_defaults(ours[name])
        assert what==ours[name].__doc__
        assert f'  {call}\n      {what}' in HELP

def test_help_has_examples_that_are_read_and_no_default_of_what_is_off():
    defaults = re.findall(r'\(default:\s+(.*?)\)', HELP)
    assert defaults==['digits','3','64','0.001','1.2x','runs']

    examples = re.findall(r'^  selback-compare (.*)$', HELP, re.M)
    args = [help_parser(run_study).parse_args(shlex.split(o)) for o in examples]
    assert len(args)==3
    assert args[0].compute==10_000
    assert args[1].methods.startswith('none,favor_hard')
    assert args[2].race

ASKS_FOR_HELP = """
import sys
sys.argv = ['selback-compare','--help']
from selback.bench.command import main
try: main()
except SystemExit: pass
print([m for m in ('torch','fastai','pandas','matplotlib','sklearn') if m in sys.modules])
"""

def test_help_imports_no_torch():
    done = subprocess.run([sys.executable, '-c', ASKS_FOR_HELP], capture_output=True, text=True, check=True)
    assert done.stdout.endswith('[]\n')

def test_a_line_reaches_the_study(monkeypatch):
    import selback.bench.command as c
    asked = []
    monkeypatch.setattr(c, 'run_study', c.delegates(run_study)(lambda **kwargs: asked.append(kwargs)))
    monkeypatch.setattr(c, 'help_parser', lambda func: help_parser(run_study))
    monkeypatch.setattr(sys, 'argv', ['selback-compare', '--compute', '500', '--n-train', '32', '--race'])
    c.main()
    wanted = dict(compute=500, n_train=32, race=True, seconds=None, epochs=None, methods=None)
    assert asked[0] | wanted==asked[0]
    assert set(asked[0])==set(inspect.signature(run_study).parameters)

def test_an_option_that_is_cut_short_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['selback-compare', '--data', 'digits', '--method', 'none'])
    with pytest.raises(SystemExit): main()
    assert 'unrecognized arguments: --method none' in capsys.readouterr().err

@pytest.mark.parametrize('is_terminal', [False,True])
def test_a_table_is_no_wider_than_the_terminal(is_terminal, monkeypatch, tmp_path, capsys, tiny_network):
    "And in one block where the output is a file"
    monkeypatch.setenv('COLUMNS', '80')
    monkeypatch.setattr(sys.stdout, 'isatty', lambda: is_terminal)
    methods = ['none','top_loss(keep=.5)','random_subset(keep=.5,gather=True)']
    run_study(methods=','.join(methods), compute=256, n_train=64, n_valid=32, bs=32, seeds=1, out=tmp_path)
    table = capsys.readouterr().out.partition('\n\n')[2].partition('\n\nWrote')[0]
    is_narrow = max(map(len, table.split('\n')))<=80
    assert is_narrow==is_terminal
    for method in methods[1:]: assert method in table
