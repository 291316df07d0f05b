"""Set up torch.distributed, communicate, wrap a model: under any launcher, on any device.

>>> import ezpz_dist
>>> ezpz_dist.setup_torch(seed=42)          # plain python: a world of one
0
>>> ezpz_dist.all_reduce(3.0, op="mean")
3.0
>>> ezpz_dist.cleanup()
"""

from ._collectives.barrier import barrier
from ._collectives.broadcast import broadcast
from ._collectives.reduce import all_reduce
from ._errors import (
    CheckpointError,
    CollectiveError,
    DataError,
    DistError,
    HangError,
    LostRankError,
    MismatchError,
    NotSetUpError,
    SetupError,
    WrapError,
)
from ._seed import seed_everything, seed_for_rank
from ._setup import cleanup, setup_torch
from ._version import __version__
from ._wrapping.model import wrap_model

__all__ = [
    "CheckpointError",
    "CollectiveError",
    "DataError",
    "DistError",
    "HangError",
    "LostRankError",
    "MismatchError",
    "NotSetUpError",
    "SetupError",
    "WrapError",
    "__version__",
    "all_reduce",
    "barrier",
    "broadcast",
    "cleanup",
    "seed_everything",
    "seed_for_rank",
    "setup_torch",
    "wrap_model",
]
