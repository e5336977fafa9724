"Peak memory of selecting steps against plain ones: the bytes of all tensors alive, which do not differ from run to run"
import gc, warnings, weakref

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from common import *

class Live(TorchDispatchMode):
    "Adds up the storages that operations make, until they are freed"
    def __init__(self):
        super().__init__()
        self.known = WeakIdKeyDictionary()
        self.bytes,self.peak = 0,0

    def made(self, storage):
        if storage in self.known: return
        self.known[storage] = True
        self.bytes += storage.nbytes()
        weakref.finalize(storage, self.freed, storage.nbytes())

    def freed(self, n): self.bytes -= n

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for o in tree_leaves(out):
            if isinstance(o, torch.Tensor): self.made(o.untyped_storage())
        self.peak = max(self.peak, self.bytes)
        return out

def peak(cb, args, bs=128):
    "Bytes at the peak of eight steps"
    gc.collect() # the learner before
    net = 'small_resnet' if args.device=='cpu' else 'resnet18'
    learn = image_learner(net, bs, 8, args.device, cb)
    with learn.no_bar(),learn.no_logging():
        learn.fit(1) # the optimizer's state
        if args.device=='cpu':
            with Live() as live: learn.fit(1)
            return live.peak
        torch.cuda.reset_peak_memory_stats()
        learn.fit(1)
        return torch.cuda.max_memory_allocated()

OFF = dict(warmup=0)
METHODS = dict(
    plain=lambda: None,
    plain_again=lambda: None,
    top_loss=lambda: TopLossCallback(1/3, **OFF),
    composer=lambda: SelectiveBackpropCallback(keep=1/3, gather=False, **OFF),
    selective_backprop=lambda: SelectiveBackpropCallback(**OFF),
    batch_loss_filter=lambda: BatchLossFilterCallback(**OFF),
    one_pass=lambda: TopLossCallback(1/3, passes=1, warmup=0),
    importance_sampling=lambda: ImportanceSamplingCallback(tau=0, **OFF),
    keep_all=lambda: TopLossCallback(1., **OFF))

def main():
    args = arguments(__doc__)
    warnings.simplefilter('ignore')
    peaks = {name: peak(make(), args) for name,make in METHODS.items()}
    batch = 128*(3*32*32*4+8)
    rows = [dict(method=name, peak_bytes=n, over_plain_in_batches=(n-peaks['plain'])/batch) for name,n in peaks.items()]
    df = save(rows, 'peak_memory', args, repeats=1)
    print(df[['method','peak_bytes','over_plain_in_batches']].round(2).to_string())

if __name__=='__main__': main()
