"""A Python process without a network and without data: `SELBACK_OFFLINE=1` has the set-up's `.pth` file import this

Tests must pass on a new machine, where nothing can be loaded. The processes that such a process starts are alike."""
import atexit, os, shutil, sys, tempfile
from pathlib import Path

homes = 'FASTAI_HOME','TORCH_HOME','HF_HOME','XDG_CACHE_HOME'

def is_local(family, address):
    "Is an address one of this machine?"
    import socket
    if family not in (socket.AF_INET,socket.AF_INET6): return True
    host = address[0]
    return host in ('localhost','::1') or host.startswith('127.')

def refuse(event, args):
    "Refuse a connection to another machine"
    if event!='socket.connect': return
    sock,address = args
    if not is_local(sock.family, address):
        raise ConnectionRefusedError(f'{address}: tests use no network; make the data they need, or move them to studies/.')

def empty_homes():
    "Folders without data, in place of those where libraries look for it; gone when the first process ends"
    home = Path(tempfile.mkdtemp(prefix='selback-'))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    for name in homes:
        os.environ[name] = str(home/name.lower())
        (home/name.lower()).mkdir()
    os.environ['SELBACK_OFFLINE'] = str(home) # the processes below use it, and leave it

sys.addaudithook(refuse)
if os.environ['SELBACK_OFFLINE']=='1': empty_homes()
