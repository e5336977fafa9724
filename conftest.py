"Nothing is measured but in tests of that; what the test command says at its end"
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    "A test draws the same alone and after others"
    from fastai.torch_core import set_seed
    set_seed(0)

@pytest.fixture(autouse=True)
def untimed(request, monkeypatch):
    from selback.callback.report import SelectionReport
    if not request.node.get_closest_marker('measured'): monkeypatch.setattr(SelectionReport, 'cost', '')

@pytest.fixture(autouse=True, scope='session')
def on_cpu():
    "What is made by hand is there; tests of a GPU say so"
    from fastai.torch_core import default_device
    default_device(False)

@pytest.fixture
def gpu(on_cpu):
    "What is made by hand may go to a GPU"
    from fastai.torch_core import default_device
    default_device(True)
    yield
    default_device(False)

@pytest.fixture(autouse=True)
def no_autocast():
    yield
    import torch
    while torch.is_autocast_enabled('cpu'): # left on by a test that fails in mixed precision
        torch.set_autocast_enabled('cpu', False)
        torch.autocast_decrement_nesting()

@pytest.fixture
def tiny_network(monkeypatch):
    """A convolution with a head in place of networks: what a study does does not depend on them, and test_compute.py
    has the real ones"""
    from selback.bench import datasets
    from torch import nn
    def tiny(n_out, widen=1.):
        n = int(4*widen)
        body = nn.Conv2d(3, n, 3, stride=4),nn.BatchNorm2d(n),nn.ReLU()
        head = nn.AdaptiveAvgPool2d(1),nn.Flatten(),nn.Linear(n, n_out)
        return nn.Sequential(*body, *head)
    for name in ('small_resnet','small_convnet'): monkeypatch.setitem(datasets.networks, name, tiny)
    return tiny

def pytest_terminal_summary(terminalreporter):
    done = [r for reports in terminalreporter.stats.values() for r in reports if getattr(r, 'when', None)=='call']
    n = sum('test_matrix.py::test_' in r.nodeid and '[' in r.nodeid for r in done)
    if not n: return
    from test_matrix import ALL, METHODS, OTHERS, TASKS
    product = f'{len(METHODS)} methods x {len(TASKS)} tasks and losses x {len(OTHERS)} callbacks'
    terminalreporter.write_line(f'matrix: {n} of {len(ALL)} cases ({product})')
