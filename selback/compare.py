from selback.bench.compare import *
from selback.bench.compare import __all__
