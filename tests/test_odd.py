"Odd images, by pixels made by hand and by files"
import numpy as np, pandas as pd, pytest
from helpers import *
from PIL import Image, ImageFilter
from selback.clean.odd import far_out, measured, measures
from test_found_copies import drawn, of_folder, of_images

def odd(learn):
    with learn.no_bar(): return learn.find_odd()

def test_what_is_odd_in_arrays_made_by_hand():
    train = drawn(150)
    train[3],train[4],train[5] = 0,255,100
    train[6] = train[6].float().mean(0, keepdim=True).round().byte()
    train[7,0],train[7,1:] = train[7,0]//2+127,train[7,1:]//4
    train[8,:,:9],train[8,:,-9:] = 0,0
    found = odd(of_images(train, drawn(30, seed=1)))
    wanted = {('black',3), ('white',4), ('blank',5), ('grey',6), ('tinted',7), ('margins',8)}
    assert {*zip(found.kind, found['item'])}>=wanted
    assert {*found['item']}=={3,4,5,6,7,8} and {*found.part}=={'train'}

def test_among_clean_images_little_is_odd(): assert len(odd(of_images(drawn(400), drawn(60, seed=1))))<3

def test_where_margins_and_grey_are_usual_they_are_not_odd():
    train = drawn(150).float().mean(1, keepdim=True).repeat(1, 3, 1, 1).byte()
    train[:,:,:8] = 0
    assert not len(odd(of_images(train, train[:20])))
    train[0,0] //= 2
    assert odd(of_images(train, train[1:20])).kind.tolist()==['coloured']

def test_where_most_images_are_blank_they_are_told():
    x = drawn(60)
    x[:40] = 128
    assert (odd(of_images(x, drawn(20, seed=1))).kind=='blank').sum()==40

def test_files_that_are_broken_tiny_or_large(tmp_path):
    "A broken one is named by `find_copies`, too"
    for i,image in enumerate(drawn(60)):
        (tmp_path/'ab'[i%2]).mkdir(exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(tmp_path/'ab'[i%2]/f'{i:02}.png')
    (tmp_path/'a/04.png').write_bytes((tmp_path/'a/04.png').read_bytes()[:200])
    Image.open(tmp_path/'b/05.png').resize((6,6)).save(tmp_path/'b/05.png')
    (tmp_path/'a/06.png').write_bytes((tmp_path/'a/06.png').read_bytes()+bytes(30_000))
    learn = of_folder(tmp_path)
    found = odd(learn)
    assert {*zip(found['item'], found.kind)}=={('a/04.png','corrupt'), ('b/05.png','tiny'), ('a/06.png','large_file')}
    with pytest.raises(ValueError, match=r'1 files that cannot be opened, such as .*04\.png'): learn.find_copies()

def test_values_by_hand():
    told = measures(Image.fromarray(np.full((10,20), 51, np.uint8)), dict(n_bytes=400))
    assert told['light']==pytest.approx(.2) and told['side']==10 and told['contrast']==0 and told['bytes_per_pixel']==2
    assert told['aspect']==2 and told['sharpness']==0
    lines = np.tile(np.uint8([0,200]), (8,4)) # each pixel between two of the other kind: 400 beside a deviation of 100
    assert measures(Image.fromarray(lines))['sharpness']==pytest.approx(4)
    assert far_out([1]*30+[9], True, 1).nonzero()[0].tolist()==[30]
    assert not far_out([1]*30+[9], False, 1).any() and not far_out([1]*30+[1.5], True, 1).any()
    assert not far_out([float('nan')]*3, True, 1).any()

def test_what_cannot_be_shown_or_is_no_image():
    found = pd.DataFrame(dict(item=[0,1], part='train', kind=['corrupt','blank']))
    with pytest.raises(ValueError, match="got 'corrupt' of a list with 'blank' that can be shown"):
        of_images(drawn(8), drawn(4)).show_odd(kind='corrupt', found=found)
    with pytest.raises(ValueError, match='find_odd: got items that are a Tensor, wanted images'): odd(table_learner())

def test_files_of_many_bits_and_turned_ones_are_told(tmp_path):
    for i,image in enumerate(drawn(40)):
        (tmp_path/'ab'[i%2]).mkdir(exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(tmp_path/'ab'[i%2]/f'{i:02}.png')
    grey = np.asarray(Image.open(tmp_path/'a/04.png').convert('L')).astype(np.uint16)*257
    Image.fromarray(grey).save(tmp_path/'a/04.png')
    exif = Image.Exif()
    exif[0x112] = 3
    Image.open(tmp_path/'b/05.png').save(tmp_path/'b/05.png', exif=exif)
    found = odd(of_folder(tmp_path))
    told = {kind: found[found.kind==kind][['item','value']].values.tolist() for kind in ('deep','turned')}
    assert told==dict(deep=[['a/04.png',16.]], turned=[['b/05.png',3.]])

def test_long_and_blurred_ones_and_what_a_file_may_hold_beside_colours(tmp_path):
    for i,image in enumerate(drawn(80)):
        (tmp_path/'ab'[i%2]).mkdir(exist_ok=True)
        noise = np.random.default_rng(i).normal(0, 20, (*image.shape[1:],1))
        pixels = (image.permute(1, 2, 0).numpy()+noise).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path/'ab'[i%2]/f'{i:02}.png')
    def change(name, to, f, **kwargs):
        file = tmp_path/name
        f(Image.open(file)).save(file.with_name(to), **kwargs)
        if to!=file.name: file.unlink()
    def with_alpha(image):
        image.putalpha(200)
        return image
    change('a/04.png', '04.png', lambda o: o.resize((120,24)))
    change('b/05.png', '05.png', lambda o: o.filter(ImageFilter.GaussianBlur(3)))
    change('a/06.png', '06.png', with_alpha)
    change('b/07.png', '07.jpg', lambda o: o.convert('CMYK'), quality=95)
    others = [Image.open(tmp_path/'a/10.png'),Image.open(tmp_path/'a/12.png')]
    change('a/08.png', '08.gif', lambda o: o, save_all=True, append_images=others)
    found = odd(of_folder(tmp_path))
    wanted = dict(elongated='a/04.png', blurred='b/05.png', transparent='a/06.png', cmyk='b/07.jpg',
        several_frames='a/08.gif')
    for kind,name in wanted.items(): assert found['item'][found.kind==kind].tolist()==[name], kind

def test_where_all_have_an_alpha_channel_none_is_odd(tmp_path):
    for i,image in enumerate(drawn(40)):
        (tmp_path/'ab'[i%2]).mkdir(exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).convert('RGBA').save(tmp_path/'ab'[i%2]/f'{i:02}.png')
    assert 'transparent' not in odd(of_folder(tmp_path)).kind.values

@pytest.mark.parametrize('error', [ValueError('Decompressed data too large'), EOFError(), OSError('cut')])
def test_whatever_a_broken_file_raises_it_is_told(error):
    def read(i, whole):
        if i not in whole: raise error
        return Image.new('RGB', (8,8))
    rows = measured(partial(read, whole=[0,2]), 3)
    assert rows.contrast.isna().tolist()==[False,True,False]
    with pytest.raises(type(error)): measured(partial(read, whole=[]), 3) # it is no broken file
