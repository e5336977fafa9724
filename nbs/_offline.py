"""A Python process without a network and without data: `SELBACK_OFFLINE=1` has the set-up's `.pth` file import this

Tests must pass on a new machine, where nothing can be loaded. The processes that such a process starts are alike."""
import atexit, os, shutil, socket, tempfile
from pathlib import Path

homes = 'FASTAI_HOME','TORCH_HOME','HF_HOME','XDG_CACHE_HOME'

def is_local(family, address):
    "Is an address one of this machine?"
    if family not in (socket.AF_INET,socket.AF_INET6): return True
    host = address[0]
    return host in ('localhost','::1') or host.startswith('127.')

def refuse_others(name):
    "Have a method of sockets refuse connections to other machines"
    # not a hook for audits, which would run in the midst of starting threads
    connect = getattr(socket.socket, name)

    def refusing(sock, address):
        if is_local(sock.family, address): return connect(sock, address)
        remedy = 'make the data they need, or move them to studies/.'
        raise ConnectionRefusedError(f'{address}: tests use no network; {remedy}')

    setattr(socket.socket, name, refusing)

def empty_homes():
    "Folders without data, in place of those where libraries look for it; gone when the first process ends"
    home = Path(tempfile.mkdtemp(prefix='selback-'))
    atexit.register(shutil.rmtree, home, ignore_errors=True)

    for name in homes:
        os.environ[name] = str(home/name.lower())
        (home/name.lower()).mkdir()

    os.environ['SELBACK_OFFLINE'] = str(home) # the processes below use it, and leave it

for name in ('connect','connect_ex'): refuse_others(name)
if os.environ['SELBACK_OFFLINE']=='1': empty_homes()
