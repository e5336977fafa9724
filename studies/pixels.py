"An image, pixel by pixel: a dataset of places and colours, a network of places, and the image as it knows it"
import numpy as np, torch
from fastai.data.core import DataLoaders
from fastai.losses import MSELossFlat
from fastai.torch_core import default_device
from PIL import Image
from sklearn.datasets import load_sample_image
from torch import nn

from selback.bench.datasets import TensorDL
from selback.core.checks import error_text
from selback.core.untouched import untouched

class Pixels:
    "The pixels of an image, as a fastai dataset of places and colours; numbers, as a list or a tensor, give a batch"
    loss_func = MSELossFlat() # what a learner takes if it is given none
    c = 3 # numbers to predict

    def __init__(self,
        image, # Shape (height, width, 3), floats between 0 and 1
    ):
        self.size = image.shape[:2]
        rows,columns = (torch.linspace(-1, 1, n) for n in self.size)
        self.places = torch.cartesian_prod(rows, columns).to(image.device)
        self.colours = image.reshape(-1, 3)

    def __len__(self): return len(self.places)

    def __getitem__(self, i):
        if self.colours is None: return (self.places[i],)
        return self.places[i],self.colours[i]

    def new_empty(self): return Pixels(torch.zeros(0, 0, 3)) # as `Learner.export` wants it

    def test_set(self,
        items, # Places, each a row and a column between -1 and 1
    ):
        "A dataset of places to predict"
        for o in items: self._check_place(o)
        ds = self.new_empty()
        ds.places,ds.colours = torch.stack([torch.as_tensor(o) for o in items]),None
        return ds

    def _check_place(self, o):
        if np.shape(o)==(2,): return
        got = f'a {type(o).__name__} of shape {tuple(np.shape(o))}'
        raise ValueError(error_text('test_dl', got, 'a place: its row and its column, each between -1 and 1'))

    def decode(self,
        o:tuple, # An item
        full:bool=True, # As fastai calls it; False: to show it, which a single pixel can't be
    )->tuple:
        "An item as it is"
        if full: return o
        raise ValueError(error_text('show_batch', 'single pixels', 'items that can be shown',
            '`learned(learn)` is the image as the network knows it'))

def pixel_dls(
    image, # Of Pillow, or an array of bytes as it takes them
    bs:int=64, # Batch size
)->DataLoaders:
    "`DataLoaders` of the pixels of an image"
    device = default_device()
    if not isinstance(image, Image.Image): image = Image.fromarray(image)
    ds = Pixels(torch.tensor(np.array(image.convert('RGB')), device=device).float()/255)
    return DataLoaders.from_dsets(ds, ds, bs=bs, num_workers=0, device=device, dl_type=TensorDL)

def photograph(
    name:str, # 'china' or 'flower'
)->Image.Image: # Of 192x128 pixels
    "A photograph that scikit-learn has, made small"
    return Image.fromarray(load_sample_image(f'{name}.jpg')).resize((192,128), Image.Resampling.LANCZOS)

class CoordinateNet(nn.Module):
    "Fourier features of a place and two hidden layers (Tancik et al. 2020, arXiv 2006.10739)"
    def __init__(self,
        n_out:int, # Number of outputs
    ):
        super().__init__()
        self.register_buffer('frequencies', torch.randn(2, 64)*10) # each has a sine and a cosine
        hidden = [nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()]
        self.layers = nn.Sequential(*hidden, nn.Linear(128, n_out))

    def forward(self, x):
        x = x@self.frequencies
        return self.layers(torch.cat([x.sin(), x.cos()], 1))

def learned(
    learn, # A `Learner` of an image's pixels
): # Shape (height, width, 3), between 0 and 1
    "The image, as its network knows it by now"
    ds = learn.dls.train_ds
    with untouched(learn.model) as model: colours = model(ds.places).float()
    return colours.clamp(0, 1).reshape(*ds.size, -1)
