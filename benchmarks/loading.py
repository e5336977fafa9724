"Epochs where loading is the bottleneck: methods that choose before loading, and one that does not"
import io, warnings
from contextlib import redirect_stdout

import numpy as np
from PIL import Image
from common import *

class Jpegs:
    "Photographs' worth of JPEG, decoded anew for each batch: 200 files, again and again"
    def __init__(self, n, size=512):
        rng = np.random.default_rng(0)
        files = [self.made(rng, size) for _ in range(min(n, 200))]
        self.files = (files*(n//len(files)+1))[:n]

    def made(self, rng, size):
        pixels = rng.integers(0, 255, (size//8, size//8, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).resize((size, size)).save(file, 'jpeg', quality=90)
        return file.getvalue()

    def __len__(self): return len(self.files)
    def __getitem__(self, i):
        image = np.asarray(Image.open(io.BytesIO(self.files[i])).resize((32, 32)))
        return torch.from_numpy(image.copy()).permute(2, 0, 1).float()/255-.5,i%10

def jpeg_learner(args, workers=0, bs=32, n=640, size=512):
    def loader(shuffle):
        return TfmdDL(Jpegs(n, size), bs=bs, shuffle=shuffle, num_workers=workers, persistent_workers=workers>0)
    dls = DataLoaders(loader(True), loader(False), device=torch.device(args.device))
    model = NETS['small_resnet']().to(args.device)
    learn = Learner(dls, model, loss_func=CrossEntropyLossFlat(), lr=1e-3)
    learn._do_epoch_validate = lambda *args: None
    return learn

class EpochTimes(Callback):
    "Seconds of the training part of each epoch"
    order = 200
    def __init__(self, device): self.device,self.seconds = device,[]
    def before_train(self): self.start = clock(self.device)
    def after_train(self): self.seconds.append(clock(self.device)-self.start)

LOADING = dict(
    none=lambda: None,
    random_subset_before_loading=lambda: RandomSubsetCallback(1/3, before_loading=True),
    stale_loss=lambda: StaleLossCallback(2, n=2),
    info_batch=lambda: InfoBatchCallback(delta=1.),
    selective_backprop=lambda: SelectiveBackpropCallback(),
    top_loss=lambda: TopLossCallback(1/3))

def epoch_seconds(args, workers, cb):
    "Of two epochs after one to warm up: two that select, one of them scored by stale losses"
    learn = jpeg_learner(args, workers)
    timer = EpochTimes(args.device)
    learn.add_cbs([timer, *([] if cb is None else [cb])])
    with learn.no_bar(),learn.no_logging(),redirect_stdout(None): learn.fit(3)
    return sum(timer.seconds[1:])/2

def loading(args):
    "Epochs of methods that choose before loading, and of one that does not, by time for an epoch of plain training"
    rows = []
    for workers in 0,1:
        for repeat in range(min(args.repeats, 3)):
            seconds = {name: epoch_seconds(args, workers, make()) for name,make in LOADING.items()}
            for name,took in seconds.items():
                rows.append(dict(workers=workers, method=name, repeat=repeat, epoch_seconds=took,
                    of_plain=took/seconds['none']))
    return rows

def main():
    args = arguments(__doc__)
    warnings.simplefilter('ignore')
    df = save(loading(args), 'loading', args, repeats=min(args.repeats, 3))
    print(df.groupby(['workers','method'], sort=False)[['epoch_seconds','of_plain']].median().round(3).to_string())

if __name__=='__main__': main()
