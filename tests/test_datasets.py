"What a learner of `get_dls` does besides training; networks, Cutout and damage as the papers have them"
import json, os, random, re
from pathlib import Path

import matplotlib, matplotlib.pyplot as plt, numpy as np, pytest, torch, torchvision
from fastai.callback.data import WeightedDL
from fastai.callback.progress import ProgressCallback
from fastai.data.core import TfmdDL
from fastai.interpret import ClassificationInterpretation, Interpretation
from fastai.learner import Learner, load_learner
from fastai.losses import BCEWithLogitsLossFlat, CrossEntropyLossFlat
from fastai.metrics import error_rate
from fastai.torch_core import set_seed
from fastai.vision.augment import Flip
from fastai.vision.core import PILImage, TensorImage, TensorMask
from PIL import Image
from torch import nn

import selback.bench.datasets as d
from selback.bench.datasets import (Cutout, PadCrop, TensorDL, TensorItems, damage, get_dls, get_model,
    tensor_dls)
from selback.callback.loaders import ChosenBefore, draw

matplotlib.use('Agg')
root = Path(__file__).parents[1]

@pytest.fixture(autouse=True)
def afresh():
    torch.manual_seed(0)
    yield
    plt.close('all')

def titles(): return [ax.get_title() for ax in plt.gcf().axes if ax.images]
def shown(): return [np.asarray(ax.images[0].get_array()) for ax in plt.gcf().axes if ax.images]
def plain(o): return o.as_subclass(torch.Tensor)

def tiny(n_out):
    convolution = nn.Conv2d(3, 4, 3, 2),nn.BatchNorm2d(4),nn.ReLU()
    return nn.Sequential(*convolution, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, n_out))

@pytest.fixture(scope='module')
def learn(tmp_path_factory):
    dls = get_dls('digits', 16, n_train=64, n_valid=40)
    learn = Learner(dls, tiny(10), CrossEntropyLossFlat(), metrics=error_rate, path=tmp_path_factory.mktemp('digits'))
    with learn.no_bar(),learn.no_logging(): learn.fit(1)
    learn.remove_cb(ProgressCallback)
    return learn

def test_an_item_is_predicted_whatever_it_is_given_as(learn, tmp_path):
    ds = learn.dls.valid_ds
    probs = learn.get_preds()[0]
    name,number,p = learn.predict(ds[3][0])
    assert torch.allclose(p, probs[3])
    assert number==p.argmax()
    assert name==str(int(number))==learn.dls.vocab[number]
    item,*_ = learn.predict(ds[3][0], with_input=True)
    assert torch.allclose(item, ds[3][0], atol=1e-6) # normalization is undone

    as_bytes = (ds[3][0]*255).round().byte()
    image = Image.fromarray(as_bytes.permute(1,2,0).numpy())
    file,large = tmp_path/'3.png',tmp_path/'large.png'
    image.save(file)
    image.resize((64,64), Image.Resampling.NEAREST).save(large)
    for o in (as_bytes, image, np.asarray(image), PILImage.create(image), file, str(file), file.read_bytes()):
        assert torch.equal(learn.predict(o)[2], learn.predict(as_bytes)[2])
    assert learn.dls.test_dl([large, as_bytes]).one_batch()[0].shape==(2,3,32,32)
    said = r'test_dl: got an image of shape \(32, 32\), wanted \(3, height, width\)'
    with pytest.raises(ValueError, match=said): learn.predict(as_bytes[0])

def test_a_test_loader_gives_what_the_validation_gives(learn):
    ds,dls = learn.dls.valid_ds,learn.dls
    for items in ([ds[i][0] for i in range(20)], ds.images[:20], ds.items[:20]):
        assert torch.allclose(learn.get_preds(dl=dls.test_dl(items))[0], learn.get_preds()[0][:20])
    assert len(dls.test_dl(ds.images[:20]).one_batch())==1
    labels = dls.test_dl(ds.items[:5], with_labels=True).one_batch()[1]
    assert torch.equal(labels, ds.labels[:5])

def test_batches_and_results_are_shown_by_name(learn):
    dls = learn.dls
    dls.valid.show_batch(max_n=4)
    assert titles()==[str(int(y)) for y in dls.valid_ds.labels[:4]]
    for a,b in zip(shown(), dls.valid_ds.images): np.testing.assert_allclose(a, b.permute(1,2,0), atol=1e-6)

    dls.show_batch(max_n=4)
    assert all(0<=o.min() and o.max()<=1 for o in shown()) # augmented, too

    dls.test_dl(dls.valid_ds.images[:2]).show_batch()
    assert titles()==['','']

    learn.show_results(max_n=4, shuffle=False)
    predicted = learn.get_preds()[0].argmax(1)
    assert titles()==[f'{int(y)}\n{int(p)}' for y,p in zip(dls.valid_ds.labels[:4], predicted)]

def test_an_interpretation_names_classes(learn):
    interp = ClassificationInterpretation.from_learner(learn)
    probs,y = learn.get_preds()
    confusions = interp.confusion_matrix()
    assert confusions.shape==(10,10)
    assert confusions.sum()==40
    assert confusions.trace()==(probs.argmax(1)==y).sum()
    interp.plot_confusion_matrix()
    assert [o.get_text() for o in plt.gca().get_xticklabels()]==[str(i) for i in range(10)]
    assert all(confusions[int(a),int(b)]==n>1 for a,b,n in interp.most_confused(min_val=2))

    losses = nn.functional.cross_entropy(probs.log(), y, reduction='none')
    def title(i): return f'{int(probs[i].argmax())}/{int(y[i])} / {losses[i]:.2f} / {probs[i].max():.2f}'
    interp.plot_top_losses(3)
    assert titles()==[title(i) for i in losses.argsort(descending=True)[:3]]
    ClassificationInterpretation.from_learner(learn, ds_idx=0).plot_top_losses(2)

def test_test_time_augmentation_augments(learn):
    probs,_ = learn.get_preds()
    assert torch.allclose(learn.tta(n=1, beta=1.)[0], probs)
    augmented,_ = learn.tta(n=2, beta=None)[0]
    assert augmented.shape==probs.shape
    assert not torch.allclose(augmented, probs)
    assert learn.dls.valid_ds.split_idx==1

@pytest.mark.filterwarnings('ignore')
def test_an_exported_learner_predicts_and_takes_no_images_along(learn):
    x = learn.dls.valid_ds[0][0]
    learn.export('tiny.pkl')
    assert os.path.getsize(learn.path/'tiny.pkl')<learn.dls.valid_ds.images.nbytes/2
    loaded = load_learner(learn.path/'tiny.pkl')
    with loaded.no_bar(): (name,_,p),(same_name,_,same_p) = learn.predict(x),loaded.predict(x)
    assert same_name==name
    assert torch.equal(same_p, p)
    assert loaded.dls.vocab==learn.dls.vocab
    assert loaded.dls.c==10
    assert len(loaded.dls.train_ds)==0

def test_names_of_classes():
    items = torch.rand(12,3,8,8),torch.arange(12)%3
    dls = tensor_dls(items, items, 4, vocab=['ant','bee','cat'])
    assert dls.vocab==['ant','bee','cat']
    assert dls.vocab.o2i['cat']==2
    assert dls.c==3
    dls.valid.show_batch()
    assert titles()==['ant','bee','cat','ant']
    with pytest.raises(ValueError, match='vocab: got 2 names, wanted 3'):
        tensor_dls(items, items, 4, n_classes=3, vocab=['ant','bee'])

def test_several_labels_are_shown_by_name():
    images = torch.rand(12,3,8,8)
    labels = (torch.rand(12,4)<torch.tensor([1.,.5,.5,.5])).float()
    learn = Learner(tensor_dls((images,labels), (images,labels), 4, vocab='abcd'), tiny(4), BCEWithLogitsLossFlat())
    def named(y): return [o for o,there in zip('abcd', y) if there]
    assert learn.dls.c==4
    with learn.no_bar():
        names,there,p = learn.predict(images[0])
        assert list(names)==named(there)==named(p>.5)
        learn.show_results(max_n=2, shuffle=False)
        assert [t.split('\n')[0] for t in titles()]==[';'.join(named(y)) for y in labels[:2]]
        Interpretation.from_learner(learn).plot_top_losses(2)

def test_masks_are_shown_as_masks():
    images,masks = torch.rand(12,3,8,8),torch.randint(5, (12,8,8))
    learn = Learner(tensor_dls((images,masks), (images,masks), 4), nn.Conv2d(3, 5, 1), CrossEntropyLossFlat(axis=1))
    with learn.no_bar():
        mask,_,p = learn.predict(images[0])
        assert isinstance(mask, TensorMask)
        assert torch.equal(mask, TensorMask(p.argmax(0)))
        learn.dls.valid.show_batch(max_n=1)
        np.testing.assert_allclose(plt.gcf().axes[0].images[1].get_array(), masks[0])
        learn.show_results(max_n=2)
        Interpretation.from_learner(learn).plot_top_losses(2)

@pytest.mark.filterwarnings('ignore')
def test_pixels_are_predicted_by_place_and_not_shown(tmp_path):
    dls = get_dls('china', 4096)
    learn = Learner(dls, get_model('coordinate_net', 3), path=tmp_path)
    with learn.no_bar():
        place = dls.train_ds.places[7]
        colour,_,p = learn.predict(place)
        assert torch.equal(torch.as_tensor(colour), p)
        assert torch.allclose(p, learn.model(place[None])[0])
        for show in (dls.show_batch, learn.show_results):
            with pytest.raises(ValueError, match=r'got single pixels.*learned\(learn\)'): show()
        with pytest.raises(ValueError, match=r'test_dl: got a str of shape \(\), wanted a place'):
            learn.predict('x.png')

        learn.export('pixels.pkl')
        loaded = load_learner(tmp_path/'pixels.pkl')
        with loaded.no_bar(): assert torch.equal(loaded.predict(place)[2], p)

# data
def test_svhn_with_its_extra_part(monkeypatch):
    class SVHN:
        def __init__(self, root, split, download):
            n,of = dict(train=(16,1), test=(8,2), extra=(30,3))[split]
            self.data = np.full((n,3,32,32), of, dtype=np.uint8)
            self.labels = (np.arange(n)+of)%10
    monkeypatch.setattr(torchvision.datasets, 'SVHN', SVHN)
    d.datasets['svhn'].cache_clear()
    dls = get_dls('svhn_extra', 8)
    def labels(n, of): return [(i+of)%10 for i in range(n)]
    assert dls.train_ds.images[:,0,0,0].tolist()==[1]*16+[3]*30
    assert dls.train_ds.labels.tolist()==labels(16, 1)+labels(30, 3)
    assert dls.valid_ds.labels.tolist()==labels(8, 2)
    assert dls.c==10
    assert len(get_dls('svhn', 8).train_ds)==16
    d.datasets['svhn'].cache_clear()

def test_cutout_hides_a_square_whose_center_is_any_pixel():
    x = TensorImage(torch.ones(4000,2,6,6))
    hidden = torch.Tensor(Cutout(4)(x, split_idx=0))==0
    assert torch.equal(hidden[:,0], hidden[:,1])
    assert Cutout(4)(x, split_idx=1) is x

    at = torch.arange(6)
    def around(i): return (at>=i-2) & (at<i+2)
    squares = torch.stack([around(i)[:,None] & around(j) for i in range(6) for j in range(6)])
    n = (hidden[:,0,None]==squares).all((2,3)).sum(0)
    assert n.sum()==4000 # nothing else
    assert n.min()>60 and n.max()<170 # each of the 36 about 111 times

def test_cutout_comes_after_normalization_and_is_for_training():
    dls = get_dls('digits', 16, n_train=64, n_valid=16, cutout=16)
    assert [type(o).__name__ for o in dls.train.after_batch.fs][-2:]==['Normalize','Cutout']
    x,y = dls.train.one_batch()
    assert ((x==0).all(1).sum((1,2))>=64).all() # 8x8 at least, in a corner
    assert not (dls.valid.one_batch()[0]==0).all(1).any()
    with pytest.raises(ValueError, match="cutout: got 16 with 'china', wanted 0"): get_dls('china', cutout=16)
    with pytest.raises(ValueError, match='cutout: got -1'): get_dls('digits', cutout=-1)

@pytest.mark.parametrize('as_bytes', [True, False])
def test_gaussian_images_have_the_mean_and_the_variance_of_the_image_they_replace(as_bytes):
    means,stds = .5+.2*(torch.rand(40,3,1,1)-.5),.02+.08*torch.rand(40,3,1,1)
    images = means+stds*torch.randn(40,3,48,48)
    images = (images*255).clamp(0, 255).byte() if as_bytes else images.clamp(0, 1)
    ds = TensorItems(images, torch.arange(40)%4, 0)
    damaged = damage(ds, 'gaussian_images', .5)
    brightest = 255 if as_bytes else 1
    new,old = ((o[damaged].float()/brightest).flatten(2) for o in (ds.images, images))
    assert (new.mean(2)-old.mean(2)).abs().max()<.01
    assert (new.std(2)/old.std(2)-1).abs().max()<.1
    assert old.mean((0,2)).std()<.1
    centered = torch.stack([(o-o.mean(2, keepdim=True)).flatten() for o in (new,old)])
    assert abs(torch.corrcoef(centered)[0,1])<.02
    assert damage(TensorItems(images, torch.arange(40)%4, 0), 'gaussian_images', 0).sum()==0

# networks
@pytest.mark.parametrize('name,n_weights,n,n_out', [
    ('wide_resnet28_10',36_479_194,25,10),
    ('wide_resnet28_10',36_536_884,25,100),
    ('resnet56',853_018,55,10)])
def test_networks_of_the_papers(name, n_weights, n, n_out):
    with torch.device('meta'):
        net = get_model(name, n_out)
        assert net(torch.zeros(2,3,32,32)).shape==(2,n_out)
        maps = net[:-3](torch.zeros(2,3,32,32))
    assert maps.shape[2:]==(8,8)
    assert sum(p.numel() for p in net.parameters())==n_weights
    assert sum(isinstance(m, nn.Conv2d) and m.kernel_size==(3,3) for m in net.modules())==n

def test_shortcuts_are_what_the_papers_say():
    x = torch.rand(2,16,8,8)
    net,wide = get_model('resnet56', 10),get_model('wide_resnet28_10', 10)[2]
    first,down = net[3],net[3+9]
    for m in (first,down): m.layers[-1].weight.data.zero_()
    assert torch.equal(first(x), x) # no weights
    assert torch.equal(down(x)[:,:16], x[:,:,::2,::2]) # option A
    assert not down(x)[:,16:].any()

    wide.layers[-1].weight.data.zero_()
    x = torch.randn(2,160,4,4)
    assert torch.equal(wide(x), x) # nothing behind the sum

# the manual
IN_SMALL = {'bs=64': 'bs=8', 'Resize(460)': 'Resize(40)', 'size=224': 'size=32',
    'resnet34,': 'resnet18, pretrained=False,', 'fit_one_cycle(14': 'fit_one_cycle(2'}

@pytest.mark.filterwarnings('ignore')
def test_the_learner_of_files_in_the_manual_runs(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    for c in ('cat','dog'):
        (tmp_path/c).mkdir()
        for i in range(16): Image.fromarray(rng.integers(0, 256, (40,40,3), dtype=np.uint8)).save(tmp_path/c/f'{i}.png')
    notebook = json.loads((root/'nbs/start/get_started.ipynb').read_text(encoding='utf-8'))
    cells = [''.join(o['source']) for o in notebook['cells']]
    text = next(o for o in cells if '## A learner of your own' in o)
    code = re.search(r'```python\n(.*?)```', text, re.S)[1]
    assert code.index('unfreeze')<code.index('favor_hard')
    for written,tried in ({"'path/to/images'": repr(str(tmp_path))} | IN_SMALL).items():
        assert code.count(written)==1, written
        code = code.replace(written, tried)

    names = {}
    exec(code, names)
    learn = names['learn']
    assert learn.selection.stats.kept.notna().any()
    assert all(p.requires_grad for p in learn.model.parameters())

@pytest.mark.parametrize('augment', [[Flip()], [PadCrop(2)], [PadCrop(2),Flip()]], ids=['mirrored','moved','both'])
def test_masks_go_where_their_images_go(augment):
    images = torch.randint(256, (48,3,12,16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    masks = images[:,0].long()//26
    dls = d.tensor_dls((images,masks), (images,masks), 16, augment)
    norm = dls.train.after_batch.fs[-1]
    mean,std = plain(norm.mean),plain(norm.std)
    n_moved = 0
    for x,y in dls.train:
        x,y = plain(x),plain(y)
        assert (y==((x*std+mean)[:,0]*255).round().long()//26).all()
        n_moved += sum(not any((m==o).all() for o in masks) for m in y)
    assert n_moved>10

# `TensorDL` hands out what fastai's own steps through a list would
class ByLists(TfmdDL):
    "As `TensorDL`, item by item"
    def create_item(self, s): return s or 0
    def create_batch(self, b): return self.dataset[b]

class WeightedTensorDL(WeightedDL, TensorDL): pass
class WeightedByLists(WeightedDL, ByLists): pass

def some_items(n): return TensorItems(torch.rand(n, 3, 4, 4), torch.arange(n)%7, 0)

def batches_and_state(cls, ds, **options):
    "All batches of two epochs, and the random states behind them"
    set_seed(3)
    dl = cls(ds, **dict(num_workers=0) | options)
    batches = [b for _ in range(2) for b in dl]
    return batches,(dl.rng.getstate(), random.getstate(), torch.get_rng_state().tolist()),dl

@pytest.mark.parametrize('n,bs', [(50,8), (48,8), (5,8), (6001,100), (1,1)])
@pytest.mark.parametrize('options', [dict(shuffle=True), dict(shuffle=True, drop_last=True), dict(),
    dict(shuffle=True, num_workers=2), dict(shuffle=True, after_item=lambda i: i)],
    ids=['shuffled','drop_last','in order','workers','by item'])
def test_batches_by_a_tensor_are_those_by_a_list(n, bs, options):
    ds = some_items(n)
    got,states,dl = batches_and_state(TensorDL, ds, bs=bs, **options)
    wanted,wanted_states,plain = batches_and_state(ByLists, ds, bs=bs, **options)
    assert len(got)==len(wanted)==2*len(dl)==2*len(plain)
    assert states==wanted_states
    for (x,y),(x2,y2) in zip(got, wanted):
        assert type(x) is type(x2) and type(y) is type(y2)
        assert torch.equal(x, x2) and torch.equal(y, y2)

def test_a_weighted_loader_draws_as_ever():
    ds,options = some_items(300),dict(bs=32, shuffle=True, wgts=range(1, 301))
    got,states,_ = batches_and_state(WeightedTensorDL, ds, **options)
    wanted,wanted_states,_ = batches_and_state(WeightedByLists, ds, **options)
    assert states==wanted_states
    assert all(torch.equal(x, x2) and torch.equal(y, y2) for (x,y),(x2,y2) in zip(got, wanted, strict=True))

@pytest.mark.parametrize('num_workers', [0, 2])
def test_an_epoch_of_some_items_is_loaded_by_a_tensor(num_workers):
    ds,kinds = some_items(50),[]
    class Spied(TensorDL):
        keeps_order = True
        def create_batches(self, samps):
            kinds.append(type(samps)) # in this process
            return super().create_batches(samps)

    dl = Spied(ds, bs=8, shuffle=True, num_workers=num_workers)
    idxs = draw(dl)
    wanted = idxs[idxs%3>0]
    batches = [*ChosenBefore(dl, wanted)]
    if not num_workers: assert kinds==[torch.Tensor]
    assert torch.equal(torch.cat([x for x,_ in batches]), ds[wanted][0])
    assert [len(y) for _,y in batches]==[8,8,8,8,1][:len(batches)]

def test_a_photograph_has_its_own_size():
    ds = get_dls('flower', 4096, full_size=True).train_ds
    assert (ds.size,len(ds))==((427,640),273_280)
    with pytest.raises(ValueError, match="full_size: got True with 'digits'"): get_dls('digits', full_size=True)
