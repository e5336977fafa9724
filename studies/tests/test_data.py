"SVHN, damage, Cutout and networks as the papers have them; photographs at their own size"
import numpy as np, pytest, torch, torchvision
from fastai.vision.core import TensorImage
from torch import nn

from selback.bench.datasets import datasets, get_dls, get_model, TensorItems
from studies.data import Cutout, damage
from studies.photographs import learner

@pytest.fixture(autouse=True)
def afresh(): torch.manual_seed(0)

# SVHN
def test_svhn_with_its_extra_part(monkeypatch):
    class SVHN:
        def __init__(self, root, split, download):
            n,of = dict(train=(16,1), test=(8,2), extra=(30,3))[split]
            self.data = np.full((n,3,32,32), of, dtype=np.uint8)
            self.labels = (np.arange(n)+of)%10
    monkeypatch.setattr(torchvision.datasets, 'SVHN', SVHN)
    datasets['svhn'].cache_clear()
    dls = get_dls('svhn_extra', 8)
    def labels(n, of): return [(i+of)%10 for i in range(n)]
    assert dls.train_ds.images[:,0,0,0].tolist()==[1]*16+[3]*30
    assert dls.train_ds.labels.tolist()==labels(16, 1)+labels(30, 3)
    assert dls.valid_ds.labels.tolist()==labels(8, 2)
    assert dls.c==10
    assert len(get_dls('svhn', 8).train_ds)==16
    datasets['svhn'].cache_clear()

# damage
OF_LABELS = ['flipped_labels','random_labels']
OF_PIXELS = ['shuffled_pixels','gaussian_images']

class Damaged:
    "A quarter of 2,000 images of 10 classes is damaged"
    def __init__(self, kind, as_bytes):
        self.kind,self.scale = kind,255 if as_bytes else 1
        images = torch.rand(2000, 3, 8, 8)*torch.tensor([.2,.5,1.])[:,None,None]
        self.images = (images*255).byte() if as_bytes else images
        self.labels = torch.arange(2000)%10
        self.before = self.images.clone(),self.labels.clone()
        self.ds,self.where = self.again(seed=1)

    def again(self, seed):
        ds = TensorItems(self.images, self.labels, 0)
        return ds,damage(ds, self.kind, .25, seed=seed)

    @property
    def new(self): return self.ds.images[self.where].float()

    @property
    def old(self): return self.images[self.where].float()

    @property
    def share_mislabelled(self): return (self.ds.labels!=self.labels)[self.where].float().mean()

as_bytes = pytest.mark.parametrize('as_bytes', [True, False])

@pytest.mark.parametrize('kind', OF_LABELS+OF_PIXELS)
@as_bytes
def test_damage(kind, as_bytes):
    damaged = Damaged(kind, as_bytes)
    images,labels = damaged.before
    assert damaged.where.sum()==500
    assert torch.equal(damaged.images, images) # what the dataset was made of is as it was
    assert torch.equal(damaged.labels, labels)

    ds,intact = damaged.ds,~damaged.where
    assert torch.equal(ds.images[intact], images[intact])
    assert torch.equal(ds.labels[intact], labels[intact])
    assert ds.images.dtype==images.dtype

@pytest.mark.parametrize('kind', OF_LABELS+OF_PIXELS)
@as_bytes
def test_damage_goes_by_its_seed(kind, as_bytes):
    damaged = Damaged(kind, as_bytes)
    again,where = damaged.again(seed=1)
    assert torch.equal(where, damaged.where)
    assert torch.equal(again.images, damaged.ds.images)
    assert torch.equal(again.labels, damaged.ds.labels)
    _,elsewhere = damaged.again(seed=2)
    assert not torch.equal(elsewhere, damaged.where)

@pytest.mark.parametrize('kind', OF_LABELS)
@as_bytes
def test_damaged_labels(kind, as_bytes):
    damaged = Damaged(kind, as_bytes)
    ds,wrong = damaged.ds,damaged.share_mislabelled
    assert torch.equal(ds.images, damaged.images)
    assert ds.labels[damaged.where].bincount(minlength=10).min()>25
    if kind=='flipped_labels': assert wrong==1
    else: assert abs(wrong-.9)<.05 # one in ten is right by chance

@as_bytes
def test_shuffled_pixels_are_the_same_in_one_order_for_all(as_bytes):
    damaged = Damaged('shuffled_pixels', as_bytes)
    new,old = damaged.new.flatten(2),damaged.old.flatten(2)
    assert damaged.share_mislabelled==0
    assert torch.equal(new.sort().values, old.sort().values)
    assert not torch.equal(new, old)
    if as_bytes: return # a value may be there twice
    order = [(old[0,0]==value).nonzero()[0,0] for value in new[0,0]]
    assert torch.equal(old[:,:,order], new)

@as_bytes
def test_gaussian_images_have_the_colours_of_all_and_nothing_of_their_own(as_bytes):
    damaged = Damaged('gaussian_images', as_bytes)
    new,old,every = damaged.new,damaged.old,damaged.images.float()
    def means(images): return images.mean((0,2,3))
    def spreads(images): return images.std((0,2,3))
    assert damaged.share_mislabelled==0
    assert ((means(new)-means(every)).abs()<.06*damaged.scale).all()
    assert (spreads(new)>.6*spreads(every)).all()
    assert 0<=new.min()
    assert new.max()<=damaged.scale

    def correlation(images): return torch.corrcoef(torch.stack([images.flatten(), old.flatten()]))[0,1]
    assert abs(correlation(new)-correlation(new[torch.randperm(500)]))<.05

def test_damage_refuses_what_it_does_not_know():
    ds = get_dls('digits', bs=8, n_train=20).train_ds
    with pytest.raises(ValueError, match="kind: got 'noise', wanted one of flipped_labels"): damage(ds, 'noise', .1)
    with pytest.raises(ValueError, match='share: got 2'): damage(ds, 'random_labels', 2)

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

# Cutout
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
    dls = get_dls('digits', 16, n_train=64, n_valid=16)
    dls.train.after_batch.add(Cutout(16))
    assert [type(o).__name__ for o in dls.train.after_batch.fs][-2:]==['Normalize','Cutout']
    x,y = dls.train.one_batch()
    assert ((x==0).all(1).sum((1,2))>=64).all() # 8x8 at least, in a corner
    assert not (dls.valid.one_batch()[0]==0).all(1).any()

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

def test_a_photograph_has_its_own_size():
    sizes = {of_its_own: learner('flower', of_its_own).dls.train_ds.size for of_its_own in (True,False)}
    assert sizes=={True: (427,640), False: (128,192)}
