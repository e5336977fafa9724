"At the tiny scale networks are tiny, too"
import pytest

@pytest.fixture(autouse=True)
def networks(tiny_network, monkeypatch):
    from studies import regimes
    monkeypatch.setattr(regimes, 'small_convnet', tiny_network)
