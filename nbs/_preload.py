"What notebooks import is imported once, before the processes that test them fork"
import fastai.vision.all, matplotlib.pyplot, selback.all

def preload(cells): "nbdev calls it with the cells that will run"
