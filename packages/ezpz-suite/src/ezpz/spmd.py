"""Check and draw shardings: all that `ezpz_spmd` offers, as ``ezpz.spmd``.

>>> import torch
>>> import ezpz
>>> print(ezpz.spmd.draw_tensor(torch.arange(4).view(2, 2)))
0 1
2 3
"""

import ezpz_spmd
from ezpz_spmd import *  # noqa: F403  # whatever is in its __all__

__all__ = ezpz_spmd.__all__
