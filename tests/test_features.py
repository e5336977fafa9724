"Wrong labels by features of a network as it is: folds, the list, pictures and corrections"
from pathlib import Path

import matplotlib.pyplot as plt, numpy as np, pandas as pd, pytest, torch
from fastai.data.block import DataBlock, MultiCategoryBlock
from fastai.vision.augment import Resize
from fastai.vision.data import ImageBlock, ImageDataLoaders
from helpers import *
from PIL import Image
from selback.clean.features import n_confident, out_of_fold, suspects_by
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedGroupKFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer
from torch import nn

def points(n=300, n_wrong=20, classes=3):
    "Around the axes; the first labels are wrong"
    g = np.random.default_rng(0)
    truth = np.arange(n)%classes
    x = 4*np.eye(classes)[truth]+g.normal(size=(n,classes))
    given = truth.copy()
    given[:n_wrong] = (given[:n_wrong]+1)%classes
    return x.astype(np.float32),given,truth

def own(probs, labels): return probs[np.arange(len(labels)),labels]

# Folds
@pytest.mark.parametrize('n,n_asked', [(300,300), (2100,420)])
def test_each_fold_is_predicted_by_the_others(n, n_asked):
    "At the strength of least log loss, of many items in the first fold, by scikit-learn's own loop"
    x,y,_ = points(n, n//15)
    folds = StratifiedGroupKFold(5, shuffle=True, random_state=3)
    def by_sklearn(strength):
        model = make_pipeline(Normalizer(), LogisticRegression(C=strength, max_iter=300))
        return cross_val_predict(model, x, y, groups=np.arange(len(y)), cv=folds, method='predict_proba')
    tried = [by_sklearn(strength) for strength in (.3,1,3,10,30)]
    asked = np.arange(n) if n_asked==n else next(folds.split(x, y, np.arange(n)))[1]
    assert len(asked)==n_asked
    expected = min(tried, key=lambda probs: -np.log(own(probs, y)[asked]).sum())
    np.testing.assert_allclose(out_of_fold(x, y, seed=3), expected, atol=1e-5)

def test_wrong_labels_are_unlikely():
    x,y,truth = points()
    first = own(out_of_fold(x, y), y).argsort()[:20]
    assert (y!=truth)[first].mean()>=.9

def test_a_group_does_not_tell_its_own_labels():
    "Each item many times, a little moved, in many directions: only its copies say what is said of it"
    g = np.random.default_rng(0)
    x,y = g.normal(size=(60,400)),np.arange(60)%2
    x,y,groups = np.repeat(x, 5, 0)+.01*g.normal(size=(300,400)),np.repeat(y, 5),np.repeat(np.arange(60), 5)
    assert own(out_of_fold(x, y), y).mean()>.8
    assert own(out_of_fold(x, y, groups), y).mean()<.6

@pytest.mark.parametrize('labels,unknown', [([0]*8+[1]*8+[2], [16]), ([0]*9+[1], [9]), ([0,0,1], [2])])
def test_a_class_of_one_item_is_not_known(labels, unknown):
    probs = out_of_fold(np.random.default_rng(0).normal(size=(len(labels),3)), labels)
    assert np.flatnonzero(np.isnan(own(probs, np.array(labels)))).tolist()==unknown
    found = suspects_by(probs, np.array(labels), ['a','b','c'])
    assert found.index[-1] in unknown and pd.isna(found.likelier.iloc[-1])

def test_classes_of_one_item_each_are_refused():
    with pytest.raises(ValueError, match='got classes of one item each'): out_of_fold(np.eye(3), [0,1,2])

# The list
def test_the_least_likely_label_comes_first():
    probs = np.array([[.7,.2,.1],[.1,.3,.6],[.2,.5,.3],[.25,.05,.7]])
    found = suspects_by(probs, np.array([0,0,2,2]), ['a','b','c'])
    assert found.index.tolist()==[1,2,0,3]
    assert found.label.tolist()==['a','c','a','c']
    assert found.likelier.tolist()==['c','b','b','a']
    assert found.margin.tolist()==pytest.approx([-.5,-.2,.5,.45])
    assert found.probability.tolist()==pytest.approx([.1,.3,.7,.7])

def test_the_estimate_is_that_of_confident_learning():
    "The usual probability of a is .56, of b .5: the second item is surely b, the third is sure of nothing"
    probs = np.array([[.95,.05],[.2,.8],[.53,.47],[.8,.2],[.2,.8]])
    labels = np.array([0,0,0,1,1])
    assert n_confident(probs, labels)==2 # the second and the fourth

def learner_of(x, y, model=None, n_valid=60):
    dls = dls_of(torch.tensor(x), torch.tensor(y), n_valid=n_valid)
    return learner_on(dls, model or nn.Linear(x.shape[1], 3))

def test_a_learner_stays_as_it_is_and_both_parts_are_listed(capsys):
    x,y,_ = points()
    learn = learner_of(x, y)
    before,state = weights(learn),torch.get_rng_state()
    found = learn.find_suspects()
    assert same(weights(learn), before) and torch.equal(torch.get_rng_state(), state)
    assert found.columns.tolist()==['part','label','likelier','margin','probability']
    assert len(found)==300 and found.probability.is_monotonic_increasing
    first = found[:20]
    assert ((first.part=='valid') & (first.index<20)).mean()>=.9 # the first ones validate
    position = found.index+60*(found.part=='train')
    assert found.label.tolist()==y[position].tolist()
    assert 'labels may be wrong, the most suspect come first' in capsys.readouterr().out

def test_copies_do_not_tell_each_others_labels():
    "Of items that only their copies are like, the wrong labels are as those of the copies"
    g = np.random.default_rng(0)
    x,y = g.normal(size=(80,300)).astype(np.float32),np.arange(80)%3
    learn = learner_of(np.repeat(x, 3, 0), np.repeat(y, 3), nn.Linear(300, 3))
    copies = learn.find_copies()
    assert learn.find_suspects().probability.mean()>.8
    assert (learn.find_suspects(copies=copies).groupby('part').probability.mean()<.6).all()

class Maps(nn.Module):
    "Maps of each input, and a head with a layer of its own"
    def __init__(self, has_maps_late=True):
        super().__init__()
        self.conv,self.more = nn.Conv2d(1, 4, 3, padding=1),nn.Conv2d(4, 5, 3, padding=1)
        self.hidden,self.head = nn.Linear(5, 7),nn.Linear(7, 3)
        self.has_maps_late = has_maps_late

    def forward(self, x):
        x = self.conv(x.view(-1, 1, 6, 6))
        if self.has_maps_late: return self.head(self.hidden(self.more(x).mean((2,3))))
        x = x.mean((2,3))
        for _ in range(3): x = self.hidden(nn.functional.pad(x, (0,1))[:,:5])
        return self.head(x)

@pytest.mark.parametrize('kind', ['maps','inputs','named'])
def test_what_the_body_says_goes_in(kind, monkeypatch):
    x,y = torch.randn(90, 36),torch.arange(90)%3
    net = Maps(has_maps_late=kind!='inputs')
    asked = []
    monkeypatch.setattr('selback.clean.features.out_of_fold', lambda x, *args: asked.append(x) or out_of_fold(x, *args))
    learner_of(x.numpy(), y.numpy(), net).find_suspects(layer=net.hidden if kind=='named' else None)
    expected = []
    layer = dict(maps=net.more, inputs=net.head, named=net.hidden)[kind]
    layer.register_forward_hook(lambda m, args, out: expected.append(args[0] if kind=='inputs' else out))
    with torch.no_grad(): net(torch.cat([x[60:], x[:60]]))
    wanted = expected[0].mean((2,3)) if kind=='maps' else expected[0]
    np.testing.assert_allclose(asked[0], wanted.numpy(), atol=2e-3) # kept in halves

# Files
COLOURS = dict(red=(220,40,40), green=(40,180,60), blue=(50,70,220))

@pytest.fixture
def folder(tmp_path):
    "Of each colour ten pictures; the first red one is filed as blue"
    g = np.random.default_rng(0)
    for name,rgb in COLOURS.items():
        for i in range(10):
            file = tmp_path/('blue' if (name,i)==('red',0) else name)/f'{name}_{i}.png'
            file.parent.mkdir(exist_ok=True)
            Image.fromarray(np.clip(g.normal(rgb, 20, (12,12,3)), 0, 255).astype(np.uint8)).save(file)
    return tmp_path

def colour_learner(folder):
    dls = ImageDataLoaders.from_folder(folder, valid_pct=.3, seed=0, bs=8, num_workers=0, item_tfms=Resize(12))
    return Learner(dls, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3)))

def test_a_list_of_files_is_shown_written_and_corrected(folder):
    learn = colour_learner(folder)
    found = learn.find_suspects()
    assert found.index.name=='file' and found.index[0]=='blue/red_0.png'
    assert (found.label.iloc[0],found.likelier.iloc[0])==('blue','red')
    learn.show_suspects(4, found)
    titles = [ax.get_title() for ax in plt.gcf().axes if ax.get_title()]
    assert [title.split('item ')[1] for title in titles]==[Path(o).name for o in found.index[:4]]
    assert 'likelier red' in titles[0]

    found.head(1).assign(label=found.likelier).to_csv(folder/'suspects.csv')
    frame = learn.corrected(folder/'suspects.csv')
    assert len(frame)==30
    assert [Path(o).name.split('_')[0] for o in frame.file]==frame.label.tolist()

# What can't be
def several_labels(folder):
    blocks = ImageBlock,MultiCategoryBlock
    block = DataBlock(blocks, get_y=lambda file: [file.parent.name,'any'], item_tfms=Resize(12))
    return Learner(block.dataloaders(sorted(folder.rglob('*.png')), bs=8), nn.Conv2d(3, 4, 1), lambda *args: 0)

def of_numbers(folder): return learner_of(points()[0], points()[0])

def of_one_class(folder): return learner_of(points()[0], np.zeros(300, dtype=int))

@pytest.mark.parametrize('make,said', [(several_labels, 'targets that are no class for each item'),
    (of_numbers, 'targets that are no class for each item'), (of_one_class, 'items of one class')])
def test_items_without_a_class_each_are_refused(make, said, folder):
    with pytest.raises(ValueError, match=f'find_suspects: got {said}'): make(folder).find_suspects()

def test_a_layer_that_does_not_run_is_refused():
    x,y,_ = points()
    with pytest.raises(ValueError, match='find_suspects: got nothing for .* items'):
        learner_of(x, y).find_suspects(layer=nn.Linear(3, 3))
