from selback.core.functional import *
from selback.core.functional import __all__
