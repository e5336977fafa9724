from selback.bench.race import *
from selback.bench.race import __all__
