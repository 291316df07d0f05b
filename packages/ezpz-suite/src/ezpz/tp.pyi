import ezpz_tp
from ezpz_tp import *  # noqa: F403  # whatever is in its __all__

__all__ = ezpz_tp.__all__
