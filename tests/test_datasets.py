"What a learner of `get_dls` does besides training; data and loaders"
import os

import matplotlib, matplotlib.pyplot as plt, numpy as np, pytest, torch
from fastai.callback.progress import ProgressCallback
from fastai.data.external import URLs
from fastai.interpret import ClassificationInterpretation
from fastai.learner import Learner, load_learner
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import error_rate
from fastai.torch_core import TensorImage
from PIL import Image
from torch import nn

from selback.bench.datasets import flip_labels, get_dls, get_model, PadCrop, tensor_dls, TensorItems

pytestmark = pytest.mark.slow # workbench

matplotlib.use('Agg')

@pytest.fixture(autouse=True)
def afresh():
    torch.manual_seed(0)
    yield
    plt.close('all')

def titles(): return [ax.get_title() for ax in plt.gcf().axes if ax.images]
def shown(): return [np.asarray(ax.images[0].get_array()) for ax in plt.gcf().axes if ax.images]

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

def test_an_item_is_predicted(learn):
    ds = learn.dls.valid_ds
    probs = learn.get_preds()[0]
    name,number,p = learn.predict(ds[3][0])
    assert torch.allclose(p, probs[3])
    assert number==p.argmax()
    assert name==str(int(number))==learn.dls.vocab[number]
    item,*_ = learn.predict(ds[3][0], with_input=True)
    assert torch.allclose(item, ds[3][0], atol=1e-6) # normalization is undone

    as_bytes = (ds[3][0]*255).round().byte()
    assert torch.equal(learn.predict(as_bytes)[2], learn.predict(as_bytes/255)[2])
    for other in (as_bytes[0], as_bytes[:1], as_bytes.numpy().transpose(1,2,0), 'a.png'):
        with pytest.raises(ValueError, match='test_dl: got an image of .*, wanted tensors of'): learn.predict(other)

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

def test_labels_that_are_no_class_numbers_are_refused():
    for labels in (torch.rand(12,4), torch.randint(5, (12,8,8))):
        with pytest.raises(ValueError, match=r'labels: got shape \(12, .*wanted class numbers'):
            tensor_dls((torch.rand(12,3,8,8),labels), (torch.rand(12,3,8,8),labels), 4)

# wrong labels
@pytest.mark.parametrize('share', [0,.25,1])
def test_each_of_a_share_gets_the_label_of_another_class(share):
    "And those that the seed tells; what the dataset was made of is as it was"
    images,labels = torch.rand(2000, 3, 2, 2),torch.arange(2000)%10
    def again(seed):
        ds = TensorItems(images, labels, 0)
        return flip_labels(ds, share, seed),ds
    wrong,ds = again(1)
    assert torch.equal(ds.labels!=labels, wrong)
    assert wrong.sum()==share*2000
    assert torch.equal(labels, torch.arange(2000)%10)
    assert ds.images is images
    if share: assert ds.labels[wrong].bincount(minlength=10).min()>share*100

    assert torch.equal(again(1)[1].labels, ds.labels)
    assert torch.equal(again(2)[1].labels, ds.labels)==(share==0)

def test_a_share_of_labels_is_no_more_than_all():
    ds = TensorItems(torch.rand(4, 3, 2, 2), torch.arange(4), 0)
    with pytest.raises(ValueError, match='share: got 2'): flip_labels(ds, 2)

# by name
PUBLIC = dict(cifar10=URLs.CIFAR, cifar100=URLs.CIFAR_100, imagenette=URLs.IMAGENETTE_160, imagewoof=URLs.IMAGEWOOF_160)

@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for part,n in (('train',16),('valid',8)):
        for c in ('cat','dog'):
            (tmp_path/part/c).mkdir(parents=True)
            for i in range(n):
                pixels = rng.integers(0, 256, (20,20,3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path/part/c/f'{i}.png')
    return tmp_path

@pytest.fixture
def datasets():
    "The module, which has kept no CIFAR-10, and keeps none"
    import selback.bench.datasets as module
    kept = module.datasets['cifar10'].func
    kept.cache_clear()
    yield module
    kept.cache_clear()

def sizes_of(dls): return len(dls.train_ds),len(dls.valid_ds),dls.c

def test_public_datasets_by_name(datasets, monkeypatch, folder):
    asked = []
    def download(url):
        asked.append(url)
        return folder

    monkeypatch.setattr(datasets, 'untar_data', download)
    (folder/'test').symlink_to(folder/'valid')
    for name,url in PUBLIC.items():
        assert sizes_of(get_dls(name, 8))==(32,16,2)
        assert asked[-1]==url

    x,_ = get_dls('cifar10', 8).train_ds[0]
    assert x.dtype==torch.float32
    assert 0<=x.min()
    assert x.max()<=1

@pytest.mark.parametrize('name', ['small_resnet','small_convnet','cifar_resnet18','resnet18'])
def test_networks_take_a_look_at_half_the_resolution(name):
    for side in (16,32): assert get_model(name, 7)(torch.randn(2, 3, side, side)).shape==(2,7)

def test_a_folder_of_class_folders(folder):
    assert sizes_of(get_dls(str(folder), 8))==(32,16,2)
    assert sizes_of(get_dls(str(folder/'train'), 8))==(26,6,2)

def test_bad_words_are_refused():
    with pytest.raises(ValueError, match="arch: got 'resnet0'"): get_model('resnet0', 3)
    with pytest.raises(ValueError, match="data: got 'no/where'"): get_dls('no/where')
    with pytest.raises(ValueError, match="size: got 64 with 'digits'"): get_dls('digits', size=64)

def test_parts_of_the_data_share_nothing_and_are_the_same_each_time():
    first,again,second = (get_dls('digits', n_train=700, part=i).train_ds for i in (0,0,1))
    assert torch.equal(first.images, again.images)
    assert len(first)==len(second)==700
    def contents(ds): return {image.numpy().tobytes() for image in ds.images}
    assert not contents(first) & contents(second)

    with pytest.raises(ValueError, match='n_train: got 800'): get_dls('digits', n_train=800, part=1)
    with pytest.raises(ValueError, match='n_train, n_valid: got a number'): get_dls('imagenette', n_train=10)

def test_images_are_moved_each_by_itself_and_nothing_is_lost():
    image = torch.arange(64.).view(1, 1, 8, 8)
    x = TensorImage(image.expand(400, 2, 8, 8))
    moved = PadCrop(2)(x, split_idx=0)
    assert type(moved) is TensorImage
    assert torch.equal(moved[:,0], moved[:,1])

    def contents(image): return image.contiguous().numpy().tobytes()
    padded = nn.functional.pad(image, [2]*4, mode='reflect')[0,0]
    windows = {contents(padded[i:i+8,j:j+8]) for i in range(5) for j in range(5)}
    seen = {contents(channels[0]) for channels in torch.Tensor(moved)}
    assert len(windows)==25
    assert seen==windows # each is there about 16 times, and nothing but shifts
    assert PadCrop(2)(x, split_idx=1) is x

