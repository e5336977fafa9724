"Peak memory of selecting steps against plain ones: the bytes of all tensors alive, which do not differ from run to run"
import warnings, weakref

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from common import *

class Live(TorchDispatchMode):
    "Adds up the storages that operations make, until they are freed"
    def __init__(self): super().__init__(); self.known,self.bytes,self.peak = WeakIdKeyDictionary(),0,0
    def freed(self, n): self.bytes -= n
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if not isinstance(t, torch.Tensor): continue
            storage = t.untyped_storage()
            if storage in self.known: continue
            self.known[storage] = True
            self.bytes += storage.nbytes()
            weakref.finalize(storage, self.freed, storage.nbytes())
        self.peak = max(self.peak, self.bytes)
        return out

def peak(cb, args, bs=128):
    "Bytes at the peak of eight steps"
    learn = image_learner('small_resnet' if args.device=='cpu' else 'resnet18', bs, 8, args.device, cb)
    with learn.no_bar(),learn.no_logging():
        learn.fit(1) # the optimizer's state
        if cb is not None: cb.meter.forget() # it measures again
        if args.device=='cpu':
            with Live() as live: learn.fit(1)
            return live.peak
        torch.cuda.reset_peak_memory_stats()
        learn.fit(1)
        return torch.cuda.max_memory_allocated()

def main():
    args = arguments(__doc__)
    warnings.simplefilter('ignore')
    batch = 128*(3*32*32*4+8)
    methods = dict(plain=lambda: None, plain_again=lambda: None, top_loss=lambda: TopLossCallback(1/3, warmup=0, auto=False), composer=lambda: SelectiveBackpropCallback(keep=1/3, gather=False, warmup=0, auto=False),
        selective_backprop=lambda: SelectiveBackpropCallback(warmup=0, auto=False), batch_loss_filter=lambda: BatchLossFilterCallback(warmup=0, auto=False), one_pass=lambda: TopLossCallback(1/3, passes=1, warmup=0),
        importance_sampling=lambda: ImportanceSamplingCallback(warmup=0, tau=0, auto=False), keep_all=lambda: TopLossCallback(1., warmup=0, auto=False), measuring=lambda: TopLossCallback(1/3, warmup=0))
    rows = []
    for name,make in methods.items():
        b = peak(make(), args)
        rows.append(dict(method=name, peak_bytes=b, over_plain_in_batches=(b-(plain := b if name=='plain' else plain))/batch))
    print(save(rows, 'peak_memory', args, repeats=1)[['method','peak_bytes','over_plain_in_batches']].round(2).to_string())

if __name__=='__main__': main()
