"Cheap looks: what they cost, and how nearly they choose what a full look chooses, in the course of a CIFAR-10 training"
import warnings
from copy import deepcopy
from functools import partial

from fastai.optimizer import Adam
from fastai.vision.models.xresnet import ResBlock, XResNet
from selback.bench.datasets import get_dls
from selback.core.policies import top_k
from selback.core.scoring import ScoringPass
from common import *

LOOKS = dict(
    full=ScoringPass(),
    half_resolution=ScoringPass(.5),
    bf16=ScoringPass(precision='bf16'),
    half_resolution_bf16=ScoringPass(.5, 'bf16'))

def plain_step(learn, x, y):
    learn.model.train()
    learn.loss_func(learn.model(x), y).backward()
    learn.opt.step()
    learn.opt.zero_grad()

def seconds_of(call, device):
    start = clock(device)
    call()
    return clock(device)-start

def timed_calls(net, bs, args):
    "A plain step, another one, and a look of each kind, by name"
    learn = image_learner(net, bs, 3, args.device)
    with learn.no_bar(),learn.no_logging(): learn.fit(1)
    x,y = (o.to(args.device) for o in learn.dls.train.one_batch())
    step = partial(plain_step, learn, x, y)
    looks = {name: partial(look, learn.model, (x,), (y,)) for name,look in LOOKS.items()}
    return dict(plain=step, plain_again=step, **looks)

def timing(args):
    "Each look against a plain step, in turn"
    bs = 128 if args.device=='cpu' else 512
    rows = []
    for net in ('cifar_resnet18', 'resnet18'):
        calls = timed_calls(net, bs, args)
        for repeat in range(-1, args.repeats): # the first is slow
            seconds = {name: seconds_of(call, args.device) for name,call in calls.items()}
            if repeat<0: continue
            for name,took in seconds.items():
                of_plain = took/seconds['plain']
                rows.append(dict(net=net, bs=bs, look=name, repeat=repeat, seconds=took, of_plain=of_plain))
    return rows

def ranks_of(losses): return losses.argsort().argsort().double()
def hardest_third(losses): return set(top_k(losses, 1/3).rows.tolist())

def agrees(losses, full):
    "How nearly a look chooses what a full look chooses, by the losses of both"
    wanted = hardest_third(full)
    correlation = torch.corrcoef(torch.stack([ranks_of(losses), ranks_of(full)]))[0,1]
    return dict(overlap=len(hardest_third(losses) & wanted)/len(wanted), rank_correlation=float(correlation))

class Agreement(Callback):
    "At 0, 25, 50 and 100 % of the training: whose hardest third each look finds"
    order = 95

    def __init__(self, batches, proxy):
        self.batches,self.proxy = batches,proxy
        self.rows = []

    def before_fit(self):
        self.n_steps = self.n_epoch*len(self.dls.train)
        self.at = {0, self.n_steps//4, self.n_steps//2, self.n_steps-1}
        self.copies = {every: deepcopy(self.model) for every in (10, 100)}

    def before_batch(self):
        if self.training and self.train_iter in self.at: self.compare()

    def after_step(self):
        for every in self.copies:
            if self.train_iter%every==0: self.copies[every] = deepcopy(self.model)

    def compare(self):
        done = round(self.train_iter/self.n_steps, 2)
        scorers = {f'{every} steps old': copy for every,copy in self.copies.items()} | {'a smaller proxy': self.proxy}
        looks = LOOKS | {name: ScoringPass(scorer=scorer) for name,scorer in scorers.items()}
        for i,(x,y) in enumerate(self.batches):
            losses = {name: self.losses(look, x, y) for name,look in looks.items()}
            for name in looks:
                self.rows.append(dict(done=done, look=name, batch=i, **agrees(losses[name], losses['full'])))

    def losses(self, look, x, y):
        return nn.functional.cross_entropy(look(self.model, (x,), (y,)), y, reduction='none')

def part_of_cifar10(n):
    "Every fourth item, up to so many"
    dls = get_dls('cifar10', bs=64)
    items = dls.train.dataset
    items.images,items.labels = items.images[::4][:n],items.labels[::4][:n]
    dls.train.n = n
    return dls

def small_proxy(): return XResNet(ResBlock, 1, [1,1,1,1], n_out=10, widen=.25)

def agreement(args, epochs=5, n=12_500):
    "A network for CIFAR-10, trained on a part of it, and what cheap looks choose meanwhile"
    dls = part_of_cifar10(n)
    learn = Learner(dls, NETS['small_resnet']().to(args.device), loss_func=CrossEntropyLossFlat(), opt_func=Adam)
    batches = [tuple(o.as_subclass(torch.Tensor) for o in batch) for batch,_ in zip(dls.train, range(10))]
    proxy = small_proxy().to(args.device)
    small = Learner(dls, proxy, loss_func=CrossEntropyLossFlat(), opt_func=Adam)
    small._do_epoch_validate = lambda *args: None
    with small.no_bar(),small.no_logging(): small.fit(2, 1e-3)
    watch = Agreement(batches, proxy)
    learn._do_epoch_validate = lambda *args: None
    with learn.no_bar(),learn.no_logging(): learn.fit_one_cycle(epochs, 2e-3, cbs=watch)
    return [dict(net='small_resnet', items=n, epochs=epochs, **row) for row in watch.rows]

def main():
    args = arguments(__doc__)
    warnings.simplefilter('ignore')
    df = save(timing(args), 'looks', args)
    print(df.groupby(['net','look'], sort=False).of_plain.median().round(3).unstack(0).to_string())

    df = save(agreement(args), 'agreement', args)
    for what in ('overlap','rank_correlation'):
        means = df.groupby(['look','done'], sort=False)[what].mean()
        print(what, means.round(3).unstack(1).to_string(), sep='\n')

if __name__=='__main__': main()
