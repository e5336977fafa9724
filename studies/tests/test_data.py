"Damage, and a network as the papers have it; photographs at their own size"
import pytest, torch
from torch import nn

from selback.bench.datasets import get_dls, get_model, TensorItems
from studies.data import damage
from studies.photographs import learner

@pytest.fixture(autouse=True)
def afresh(): torch.manual_seed(0)

# damage
def images_of(as_bytes):
    "Of which each channel of each has a mean and a spread of its own, and 10 classes"
    means,stds = torch.tensor([.2,.4,.7])[:,None,None]+.2*torch.rand(400,3,1,1)-.1,.02+.03*torch.rand(400,3,1,1)
    images = means+stds*torch.randn(400,3,24,24)
    return (images*255).clamp(0, 255).byte() if as_bytes else images.clamp(0, 1)

@pytest.mark.parametrize('kind', ['flipped_labels','random_labels','shuffled_pixels','gaussian_images'])
@pytest.mark.parametrize('as_bytes', [True, False])
def test_a_share_of_the_items_is_damaged_as_its_seed_says(kind, as_bytes):
    images,labels = images_of(as_bytes),torch.arange(400)%10
    before = images.clone(),labels.clone()
    def again(seed):
        ds = TensorItems(images, labels, 0)
        return ds,damage(ds, kind, .5, seed)
    ds,where = again(1)
    assert where.sum()==200
    assert torch.equal(images, before[0]) and torch.equal(labels, before[1]) # what the dataset was made of
    assert torch.equal(ds.images[~where], images[~where]) and torch.equal(ds.labels[~where], labels[~where])
    same,same_where = again(1)
    assert torch.equal(same_where, where)
    assert torch.equal(same.images, ds.images) and torch.equal(same.labels, ds.labels)
    assert not torch.equal(again(2)[1], where)

    new,old = (o[where].float().flatten(2)/(255 if as_bytes else 1) for o in (ds.images, images))
    wrong = (ds.labels!=labels)[where].float().mean()
    if kind=='flipped_labels': assert wrong==1
    if kind=='random_labels': assert abs(wrong-.9)<.08 # one in ten is right by chance
    if kind.endswith('labels'): return torch.testing.assert_close(new, old)
    assert wrong==0
    assert not torch.equal(new, old)
    if kind=='shuffled_pixels':
        assert torch.equal(new.sort().values, old.sort().values)
        if not as_bytes: # a value may be there twice
            order = [int((old[0,0]==value).nonzero()[0,0]) for value in new[0,0]]
            assert torch.equal(old[:,:,order], new) # one order for all
    else: # noise with the mean and the spread of each channel of the image, and nothing else of it
        assert (new.mean(2)-old.mean(2)).abs().max()<.02
        assert (new.std(2)/old.std(2)-1).abs().max()<.2
        centered = torch.stack([(o-o.mean(2, keepdim=True)).flatten() for o in (new,old)])
        assert abs(torch.corrcoef(centered)[0,1])<.02

def test_damage_refuses_what_it_does_not_know():
    ds = get_dls('digits', bs=8, n_train=20).train_ds
    with pytest.raises(ValueError, match="kind: got 'noise', wanted one of flipped_labels"): damage(ds, 'noise', .1)
    with pytest.raises(ValueError, match='share: got 2'): damage(ds, 'random_labels', 2)

@pytest.mark.parametrize('n_weights,n_out', [(36_479_194,10), (36_536_884,100)])
def test_the_network_of_the_paper(n_weights, n_out):
    with torch.device('meta'):
        net = get_model('wide_resnet28_10', n_out)
        assert net(torch.zeros(2,3,32,32)).shape==(2,n_out)
        assert net[:-3](torch.zeros(2,3,32,32)).shape[2:]==(8,8)
    assert sum(p.numel() for p in net.parameters())==n_weights
    assert sum(isinstance(m, nn.Conv2d) and m.kernel_size==(3,3) for m in net.modules())==25

def test_a_photograph_has_its_own_size():
    sizes = {of_its_own: learner('flower', of_its_own).dls.train_ds.size for of_its_own in (True,False)}
    assert sizes=={True: (427,640), False: (128,192)}
