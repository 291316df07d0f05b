"""Tensor, context, data and pipeline parallelism for plain PyTorch.

This first version holds the arithmetic that says which ranks belong together:

>>> from ezpz_tp import RankLayout
>>> RankLayout(world_size=8, tensor=2, pipeline=2).group_of("pipeline", rank=0)
(0, 4)
"""

from ._ranks import AXES, RankLayout
from ._version import __version__

__all__ = ["AXES", "RankLayout", "__version__"]
