"""All that only a GPU can show, in one run of eight minutes at most: `make gpu`

One process after the other, each with a time limit. `gpu.csv` says of each how it ended, as soon as it has; each keeps
what it printed in a file, and writes its rows as they come. `--device cpu --scale tiny` tries the run itself."""
import argparse, subprocess, sys, time
from datetime import datetime, timezone
from pathlib import Path

import pandas as pd

here = Path(__file__).parent
LIMITS = dict(tests=100, watching=50, looking=60, steps=60, memory=25, overhead=40, ahead=45, cifar10=100) # seconds
TESTS = 'tests/test_gpu.py','tests/test_steps.py','tests/test_callback.py'

# The run
def command(name, device, scale, out):
    "What is run for a part"
    if name=='tests': return [sys.executable, '-m', 'pytest', *(TESTS[:1] if scale=='tiny' else TESTS), '-k', 'gpu']
    shared = ['--device', device, '--out', out]
    if name in PARTS: return [sys.executable, here/'gpu.py', *shared, '--scale', scale, '--part', name]
    return [sys.executable, here/f'{name}.py', *shared, '--repeats', '3']

def commands(device, scale, out):
    "All parts, by name; at the tiny scale without what takes minutes on a CPU"
    names = [name for name in LIMITS if scale!='tiny' or name=='tests' or name in PARTS]
    return {name: command(name, device, scale, out) for name in names}

def run(command, limit, said):
    "How a process ended, whose output goes to a file: its code, or that it was out of time"
    with open(said, 'w', encoding='utf-8') as file:
        try: return subprocess.run(command, stdout=file, stderr=file, timeout=limit).returncode
        except subprocess.TimeoutExpired: return 'out of time'

def run_all(
    commands, # By name
    limits, # In seconds, by name
    out, # Folder for the files
): # A row for each
    "Run one after the other, and write down how each ended as soon as it has"
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    for name,command in commands.items():
        start,when = time.perf_counter(),datetime.now(timezone.utc).strftime('%Y-%m-%d %H:%M')
        ended = run(command, limits[name], out/f'gpu_{name}.txt')
        seconds = round(time.perf_counter()-start, 1)
        rows.append(dict(part=name, ended=ended, seconds=seconds, limit=limits[name], when=when))
        pd.DataFrame(rows).to_csv(out/'gpu.csv', index=False)
        print(*rows[-1].values(), flush=True)
    return rows

# The parts that are measured here
def seconds_of(f, device):
    "Of a call, with all that it has the device do"
    from selback.bench.compute import seconds_now
    start = seconds_now(device)
    f()
    return seconds_now(device)-start

def image_learner(arch, side, bs, n_batches, device):
    "A network with random weights; images made on the device, the pattern of a class in noise, with some wrong labels"
    import torch
    from fastai.learner import Learner
    from fastai.losses import CrossEntropyLossFlat
    from fastai.torch_core import default_device
    from selback.bench.datasets import get_model, tensor_dls
    default_device(device!='cpu')
    torch.manual_seed(0)
    patterns = torch.rand(10, 3, side, side, device=device)
    def images(n):
        y = torch.arange(n, device=device)%10
        is_wrong = torch.rand(n, device=device)<.1
        return (torch.rand(n, 3, side, side, device=device)+patterns[y])/2,y.masked_fill(is_wrong, 0)

    learn = Learner(tensor_dls(images(n_batches*bs), images(4*bs), bs), get_model(arch, 10), CrossEntropyLossFlat())
    return learn if device=='cpu' else learn.to_fp16()

def fit(learn, n_epoch=1):
    with learn.no_bar(),learn.no_logging(): learn.fit(n_epoch, 1e-3)

def watching(device, tiny):
    "Epochs, plain and watched in turn, for each size of images"
    for side in (32,128,224):
        arch,bs,n_batches,repeats = ('small_resnet',4,3,1) if tiny else ('resnet18',64,16,5)
        learners = {kind: image_learner(arch, side, bs, n_batches, device) for kind in ('plain','watched')}
        learners['watched'].watch_items()
        for learn in learners.values(): fit(learn) # warms up
        for repeat in range(repeats):
            for kind,learn in learners.items():
                seconds = seconds_of(lambda: fit(learn), device)
                yield dict(arch=arch, side=side, items=bs*n_batches, kind=kind, repeat=repeat, seconds=seconds)

def looking(device, tiny):
    "What a watched epoch takes, and the looks at all items after it"
    arch,side,bs,n_batches = ('small_resnet',32,4,26) if tiny else ('resnet50',224,64,32)
    learn = image_learner(arch, side, bs, n_batches, device).watch_items(valid=True)
    fit(learn, 3) # 75 steps at least, by which an early epoch is known
    looks = dict(epoch=lambda: fit(learn), refit_head=learn.refit_head, find_copies=learn.find_copies,
        suspects=lambda: learn.selection.suspects(look=True))
    for what,f in looks.items():
        with learn.no_bar(): seconds = seconds_of(f, device)
        yield dict(arch=arch, side=side, items=bs*n_batches, what=what, seconds=seconds)

def cifar10(device, tiny):
    "A row of the study at the papers' scale, cut short, if the data are at hand"
    from fastai.data.external import fastai_path
    from fastai.learner import Learner
    from fastai.losses import CrossEntropyLossFlat
    from fastai.metrics import error_rate
    from fastai.optimizer import SGD
    from functools import partial
    from selback.all import compare
    from selback.bench.datasets import get_dls, get_model
    is_there = any((fastai_path(of)/name).exists() for of,name in (('data','cifar10'),('archive','cifar10.tgz')))
    if not tiny and not is_there: return print('CIFAR-10 is not at hand, in the folder data or archive of fastai')

    data,arch,bs,n,seconds = ('digits','small_resnet',32,320,.3) if tiny else ('cifar10','cifar_resnet18',128,None,22)
    opt = partial(SGD, mom=.9, wd=5e-4, decouple_wd=False)
    def get_learner():
        dls = get_dls(data, bs, n_train=n)
        learn = Learner(dls, get_model(arch, dls.c), CrossEntropyLossFlat(), opt_func=opt, metrics=error_rate)
        return learn if device=='cpu' else learn.to_channelslast()
    methods = ['none','random_subset(keep=.33,gather=True)','selective_backprop']
    runs = compare(get_learner, methods, seconds=seconds, seeds=1, lr=.1, plot=False)
    yield from runs.to_dict('records')

PARTS = dict(watching=watching, looking=looking, cifar10=cifar10)

def measure(name, device, scale, out):
    "Write the rows of a part as they come"
    import selback.all # noqa: F401, for what learners are told
    from selback.bench.compare import machine
    rows = []
    for row in PARTS[name](device, scale=='tiny'):
        rows.append(row | dict(machine=machine(device)))
        pd.DataFrame(rows).to_csv(out/f'gpu_{name}.csv', index=False, float_format='%.6g')
        print(row, flush=True)

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--device', default='cuda')
    parser.add_argument('--scale', default='full', choices=('full','tiny'))
    parser.add_argument('--out', default='results/gpu', type=Path, help='folder for the files')
    parser.add_argument('--part', choices=PARTS, help='only this, without a limit')
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.part: return measure(args.part, args.device, args.scale, args.out)
    limits = LIMITS if args.scale=='full' else dict.fromkeys(LIMITS, 600) # of a slow CPU
    rows = run_all(commands(args.device, args.scale, args.out), limits, args.out)
    sys.exit(any(row['ended']!=0 for row in rows))

if __name__=='__main__': main()
