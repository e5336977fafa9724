"Time to import `selback.functional`, which needs no fastai, beside PyTorch alone, each in a new process"
import subprocess, sys, time
from common import *

def seconds(code):
    start = time.perf_counter()
    subprocess.run([sys.executable, '-c', code], check=True)
    return time.perf_counter()-start

def main():
    args = arguments(__doc__)
    rows = []
    for repeat in range(-1, args.repeats): # the first fills the disk's cache
        nothing = seconds('pass')
        of_torch = seconds('import torch')-nothing
        again = seconds('import torch')-nothing
        ours = seconds('import selback.functional')-nothing
        if repeat<0: continue
        rows.append(dict(repeat=repeat, torch_seconds=of_torch, torch_again=again/of_torch, functional=ours/of_torch))
    df = save(rows, 'imports', args)
    print(df[['torch_seconds','torch_again','functional']].median().round(3).to_string())

if __name__=='__main__': main()
