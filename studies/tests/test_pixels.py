"An image is predicted place by place, and exported with its learner"
import pytest, torch
from fastai.learner import Learner, load_learner
from studies.pixels import CoordinateNet, photograph, pixel_dls

@pytest.mark.filterwarnings('ignore')
def test_pixels_are_predicted_by_place_and_not_shown(tmp_path):
    dls = pixel_dls(photograph('china'), 4096)
    learn = Learner(dls, CoordinateNet(3), path=tmp_path)
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
