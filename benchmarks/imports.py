"Time to import `selback.core.functional`, which needs no fastai, beside PyTorch alone, each in a new process"
import subprocess, sys, time
from common import *

def seconds(code):
    start = time.perf_counter()
    subprocess.run([sys.executable, '-c', code], check=True)
    return time.perf_counter()-start

def main():
    args,rows = arguments(__doc__),[]
    for r in range(-1, args.repeats): # the first fills the disk's cache
        nothing,torch_,again,ours = map(seconds, ('pass', 'import torch', 'import torch', 'import selback.core.functional'))
        if r>=0: rows.append(dict(repeat=r, torch_seconds=torch_-nothing, torch_again=(again-nothing)/(torch_-nothing), functional=(ours-nothing)/(torch_-nothing)))
    df = save(rows, 'imports', args)
    print(df[['torch_seconds','torch_again','functional']].median().round(3).to_string())

if __name__=='__main__': main()
