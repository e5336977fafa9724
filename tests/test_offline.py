"Tests use no network and no data that lie on this machine, in whichever process"
import os, socket, subprocess, sys

homes = 'FASTAI_HOME','TORCH_HOME','HF_HOME','XDG_CACHE_HOME'

def said(code, **env):
    "What a new process prints that has been told to stay offline"
    inherited = {name: value for name,value in os.environ.items() if name not in homes}
    told = inherited | dict(SELBACK_OFFLINE='1') | env
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, env=told)
    assert done.returncode==0, done.stderr
    return done.stdout.split()

CONNECT = '''
import socket
def connect(address, family=socket.AF_INET):
    sock = socket.socket(family)
    sock.settimeout(.01)
    try: sock.connect(address)
    except ConnectionRefusedError as e: print('refused' if 'tests use no network' in str(e) else 'tried')
    except OSError: print('tried')
'''

OTHERS = '''
connect(('192.0.2.1', 80))
connect(('2001:db8::1', 80), socket.AF_INET6)
'''
THIS = '''
connect(('127.0.0.1', 1))
connect(('localhost', 1))
if hasattr(socket, 'AF_UNIX'): connect('/no/such/socket', socket.AF_UNIX)
'''

def test_other_machines_are_out_of_reach_and_this_one_is_not():
    "192.0.2.1 and 2001:db8::1 are addresses of documentation, which nobody has"
    assert said(CONNECT+OTHERS)==['refused']*2
    has_unix = hasattr(socket, 'AF_UNIX')
    assert said(CONNECT+THIS)==['tried']*(2+has_unix)

def test_processes_below_are_alike():
    inner = CONNECT+"connect(('192.0.2.1', 80))"
    outer = f'import subprocess, sys; subprocess.run([sys.executable, "-c", {inner!r}], check=True)'
    assert said(outer)==['refused']

def test_homes_are_empty_writable_and_gone_afterwards():
    code = f'''
import os
from pathlib import Path
for name in {homes}:
    home = Path(os.environ[name])
    assert home.is_dir()
    assert not list(home.iterdir())
    (home/'data').touch()
    print(home)
'''
    paths = said(code)
    assert len(set(paths))==4
    assert not any(map(os.path.exists, paths))
