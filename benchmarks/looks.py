"Cheap looks: what they cost, and how nearly they choose what a full look chooses, in the course of a CIFAR-10 training"
import warnings

from fastai.optimizer import Adam
from selback.core.policies import top_k
from selback.core.scoring import ScoringPass
from selback.bench.datasets import get_dls
from common import *

def timing(args):
    "Each look against a plain step, in turn"
    bs,rows = 512 if args.device!='cpu' else 128,[]
    for net in ('cifar_resnet18', 'resnet18'):
        learn = image_learner(net, bs, 3, args.device)
        with learn.no_bar(),learn.no_logging(): learn.fit(1)
        x,y = (o.to(args.device) for o in learn.dls.train.one_batch())
        def step():
            learn.model.train()
            learn.loss_func(learn.model(x), y).backward()
            learn.opt.step()
            learn.opt.zero_grad()
        looks = {name: (lambda p=p: p(learn.model, (x,), (y,))) for name,p in LOOKS.items()}
        kinds = dict(plain=step, plain_again=step, **looks)
        for r in range(-1, args.repeats):
            for name,f in kinds.items():
                start = clock(args.device)
                f()
                seconds = clock(args.device)-start
                if name=='plain': plain = seconds
                if r>=0: rows.append(dict(net=net, bs=bs, look=name, repeat=r, seconds=seconds, of_plain=seconds/plain))
    return rows

LOOKS = dict(full=ScoringPass(), half_resolution=ScoringPass(.5), bf16=ScoringPass(precision='bf16'), half_resolution_bf16=ScoringPass(.5, 'bf16'))

class Agreement(Callback):
    "At 0, 25, 50 and 100 % of the training: whose hardest third each look finds"
    order = 95
    def __init__(self, batches, proxy): self.batches,self.proxy,self.rows,self.copies = batches,proxy,[],{}
    def before_fit(self):
        self.at = {0, self.n_epoch*len(self.dls.train)//4, self.n_epoch*len(self.dls.train)//2, self.n_epoch*len(self.dls.train)-1}
        self.copies = {f'{every} steps old': ModelCopy(every) for every in (10, 100)} | {'average of the past': ModelCopy(1, .99)}
        for c in self.copies.values(): c.of(self.model, self.batches[0][:1])
    def before_batch(self):
        if self.training and self.train_iter in self.at: self.compare()
    def after_step(self):
        for c in self.copies.values(): c.step(self.model)

    def compare(self):
        done = round(self.train_iter/(self.n_epoch*len(self.dls.train)), 2)
        looks = LOOKS | {name: ScoringPass(scorer=c) for name,c in self.copies.items()} | {'a smaller proxy': ScoringPass(scorer=self.proxy)}
        for b,(x,y) in enumerate(self.batches):
            losses = {name: nn.functional.cross_entropy(look(self.model, (x,), (y,)), y, reduction='none') for name,look in looks.items()}
            chosen,ranks = {k: set(top_k(l, 1/3).rows.tolist()) for k,l in losses.items()},{k: l.argsort().argsort().double() for k,l in losses.items()}
            for name in looks:
                self.rows.append(dict(done=done, look=name, batch=b, overlap=len(chosen[name] & chosen['full'])/len(chosen['full']),
                    rank_correlation=float(torch.corrcoef(torch.stack([ranks[name], ranks['full']]))[0,1])))

def agreement(args, epochs=5, n=12_500):
    "A network for CIFAR-10, trained on a part of it, and what cheap looks choose meanwhile"
    dls = get_dls('cifar10', bs=64)
    dls.train.dataset.images,dls.train.dataset.labels = dls.train.dataset.images[::4][:n],dls.train.dataset.labels[::4][:n]
    dls.train.n = n
    learn = Learner(dls, NETS['small_resnet']().to(args.device), loss_func=CrossEntropyLossFlat(), opt_func=Adam)
    batches = [tuple(o.as_subclass(torch.Tensor) for o in b) for b,_ in zip(dls.train, range(10))]
    from fastai.vision.models.xresnet import ResBlock, XResNet
    proxy = train_proxy(learn, XResNet(ResBlock, 1, [1,1,1,1], n_out=10, widen=.25).to(args.device), n_epoch=2, lr=1e-3)
    watch = Agreement(batches, proxy)
    learn._do_epoch_validate = lambda *args: None
    with learn.no_bar(),learn.no_logging(): learn.fit_one_cycle(epochs, 2e-3, cbs=watch)
    return [dict(net='small_resnet', items=n, epochs=epochs, **r) for r in watch.rows]

def main():
    args = arguments(__doc__)
    warnings.simplefilter('ignore')
    print(save(timing(args), 'looks', args).groupby(['net','look'], sort=False).of_plain.median().round(3).unstack(0).to_string())
    df = save(agreement(args), 'agreement', args)
    for what in ('overlap', 'rank_correlation'): print(what, df.groupby(['look','done'], sort=False)[what].mean().round(3).unstack(1).to_string(), sep='\n')

if __name__=='__main__': main()
