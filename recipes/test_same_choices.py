"The classes that a reader copies train on what the callback and a plain loop train on, step by step"
import logging, re
from pathlib import Path
from types import SimpleNamespace

import lightning, pytest, transformers
from fastcore.nbio import read_nb
from loops import *
from pandas.testing import assert_frame_equal
from selback.functional import FavorHard, InfoBatch, PrioritizedSampling, Watch
from transformers.modeling_outputs import SequenceClassifierOutput

transformers.logging.set_verbosity_error()
for name in ('pytorch','fabric'): logging.getLogger(f'lightning.{name}').setLevel(logging.ERROR)
pytestmark = pytest.mark.filterwarnings('ignore')
N_EPOCH = 3

def classes_of(page, *names, **others):
    "What a page imports first and classes that it defines; `others` stand for what else they use"
    nb = read_nb(Path(__file__).parents[1]/f'nbs/recipes/{page}.ipynb')
    cells = [cell.source for cell in nb.cells if cell.cell_type=='code']
    defines = re.compile(fr"class ({'|'.join(names)})\b").match
    for text in (cells[0], *filter(defines, cells)): exec(text, others)
    return SimpleNamespace(**{name: others[name] for name in names})

# Lightning
of_lightning = classes_of('lightning', 'SelbackWatch', 'ChosenLoader', 'ChoosingModule', 'RememberingModule',
    network=network, numbered=dataset())

class Choosing(of_lightning.ChoosingModule):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.steps = []

    def train_dataloader(self):
        return of_lightning.ChosenLoader(loader(), self, F.cross_entropy, self.method, **self.kwargs)

    def training_step(self, batch, batch_idx):
        x,_,*weight = batch
        self.steps.append(Trained.of(x, *weight))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), LR)

class WithItems(torch.utils.data.Dataset):
    "Each item with its index"
    def __init__(self): self.items = dataset()
    def __len__(self): return len(self.items)
    def __getitem__(self, i): return i,*self.items[i]

class Remembering(of_lightning.RememberingModule):
    def __init__(self, *args):
        super().__init__(*args)
        self.steps,self.validated = [],0

    def train_dataloader(self): return DataLoader(WithItems(), BS, sampler=self.sampler)

    def val_dataloader(self): return DataLoader(WithItems(), N)

    def training_step(self, batch, batch_idx):
        idx,x,_ = batch
        self.steps.append(Trained.of(x, None if self.sampler.weight is None else self.sampler.weight[idx]))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx): self.validated += 1

    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), LR)

def by_lightning(module, **kwargs):
    fitted_by_lightning(module, **kwargs)
    return module.steps,module.net

def fitted_by_lightning(module, loader=None, **kwargs):
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    trainer = lightning.Trainer(max_epochs=N_EPOCH, accelerator='cpu', num_sanity_val_steps=0, **quiet, **kwargs)
    trainer.fit(module, loader)

# Trainer
of_trainer = classes_of('hugging_face', 'WatchingTrainer', 'EndEpoch', 'Logits', 'EachEpoch', 'ChoosingTrainer',
    'Remember', 'RememberingTrainer')

class AsTransformer(nn.Module):
    "Takes and returns what a transformer does"
    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, input_ids, labels=None, idx=None):
        logits = self.net(input_ids)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)

class NotingTrainer:
    "Notes what trains"
    def compute_loss(self, model, inputs, *args, **kwargs):
        self.steps.append(Trained.of(inputs['input_ids'], self.weight_of(inputs)))
        return super().compute_loss(model, inputs, *args, **kwargs)

class ChoosingTrainer(NotingTrainer, of_trainer.ChoosingTrainer):
    def weight_of(self, inputs): return inputs.get('weight')

class RememberingTrainer(NotingTrainer, of_trainer.RememberingTrainer):
    def weight_of(self, inputs): return None if self.sampler.weight is None else self.sampler.weight[inputs['idx']]

def by_trainer(cls, folder, n_steps, **kwargs):
    args = transformers.TrainingArguments(folder, max_steps=n_steps, per_device_train_batch_size=BS, max_grad_norm=0,
        train_sampling_strategy='sequential', remove_unused_columns=False, use_cpu=True, report_to='none',
        disable_tqdm=True, logging_strategy='no', save_strategy='no')
    model = AsTransformer()
    sgd = torch.optim.SGD(model.parameters(), LR)
    constant = torch.optim.lr_scheduler.LambdaLR(sgd, lambda step: 1.)
    items = [dict(input_ids=x, labels=y, idx=i) for i,(x,y) in enumerate(dataset())]
    trainer = cls(model, args, train_dataset=items, optimizers=(sgd, constant), **kwargs)
    trainer.steps = []
    trainer.train()
    return trainer

def steps_by_trainer(*args, **kwargs):
    trainer = by_trainer(*args, **kwargs)
    return trainer.steps,trainer.model.net

# Watching
class Predicts(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = network()

    def training_step(self, batch, batch_idx):
        pred = self.net(batch[0])
        return dict(loss=F.cross_entropy(pred, batch[1]), pred=pred)

    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), LR)

# The same
@pytest.mark.parametrize('name', ['selective','top','share','random','importance','ahead'])
def test_all_train_on_the_same_items_with_the_same_weights(name, tmp_path):
    case = CASES[name]
    wanted = by_callback(case, N_EPOCH, warmup=1)
    assert_same(by_loop(case, N_EPOCH, warmup=1), wanted)

    choose = dict(score=score_of(case), **case.of_pass)
    options = dict(method=case.method(**case.options), choose=choose)
    assert_same(steps_by_trainer(ChoosingTrainer, tmp_path, len(wanted[0]), **options), wanted)

    method = case.method(**case.options)
    if method.gather: wanted = by_loop(case, N_EPOCH, warmup=1, fetch=fetched_early) # to know which step is the last
    assert_same(by_lightning(Choosing(method, **choose)), wanted)

POLICIES = dict(
    FavorHard=partial(FavorHard, correct=1.),
    InfoBatch=partial(InfoBatch, prune=.4),
    prioritized=partial(PrioritizedSampling, correct=1.))

@pytest.mark.parametrize('name', POLICIES)
def test_all_load_the_same_items_with_the_same_weights(name, tmp_path):
    wanted = by_memory(POLICIES[name](), N_EPOCH)
    assert len({len(step.items) for step in wanted[0]})>1
    assert_same(steps_by_trainer(RememberingTrainer, tmp_path, len(wanted[0]), method=POLICIES[name]()), wanted)
    module = Remembering(POLICIES[name]())
    assert_same(by_lightning(module, reload_dataloaders_every_n_epochs=1), wanted)
    assert module.validated==N_EPOCH

def test_without_asking_again_lightning_does_not_validate():
    "As the page says: after as many batches as the first epoch had"
    module = Remembering(FavorHard())
    by_lightning(module)
    assert module.validated==1

def watched_by_loop():
    watch,net = Watch(loader()),network()
    opt = torch.optim.SGD(net.parameters(), LR)
    for _ in range(N_EPOCH):
        for x,y in watch:
            pred = net.train()(x)
            watch.note(pred, y)
            F.cross_entropy(pred, y).backward()
            opt.step()
            opt.zero_grad()
        watch.end_epoch()
    return watch

def watched_by_lightning():
    watching = of_lightning.SelbackWatch(loader())
    fitted_by_lightning(Predicts(), watching.watch, callbacks=[watching])
    return watching.watch

def watched_by_learner():
    dl = TfmdDL(dataset(), bs=BS, num_workers=0)
    sgd = partial(OptimWrapper, opt=torch.optim.SGD)
    learn = learner_on(DataLoaders(dl, dl), network(), opt_func=sgd, lr=LR).watch_items()
    return trained_only(learn, N_EPOCH).selection

def test_all_who_watch_list_the_same(tmp_path):
    wanted = watched_by_learner().suspects()
    assert len(wanted)==N
    assert_frame_equal(watched_by_loop().suspects(), wanted)
    assert_frame_equal(watched_by_lightning().suspects(), wanted)
    n_steps = N_EPOCH*-(-N//BS)
    trainer = by_trainer(of_trainer.WatchingTrainer, tmp_path, n_steps, callbacks=[of_trainer.EndEpoch()])
    assert_frame_equal(trainer.watch.suspects(), wanted)
