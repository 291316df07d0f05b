"""Set up torch.distributed, communicate, wrap a model: under any launcher, on any device.

>>> import ezpz_dist
>>> ezpz_dist.setup_torch(seed=42)          # plain python: a world of one
0
>>> ezpz_dist.all_reduce(3.0, op="mean")
3.0
>>> ezpz_dist.cleanup()
"""

from ._cleanup import cleanup
from ._collectives.barrier import barrier
from ._collectives.broadcast import broadcast
from ._collectives.device import synchronize
from ._collectives.gather import all_gather_object
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
from ._hangs.watch import Watch, watch
from ._seed import seed_everything, seed_for_rank
from ._setup import setup_torch
from ._version import __version__

# What a script may never use is imported when it is.
_LATER = {
    "Checkpoint": "_checkpoints.listing",
    "DataLoader": "_data.loader",
    "DataParallelSampler": "_data.sampler",
    "Loaded": "_checkpoints.load",
    "ModelDescription": "_wrapping.description",
    "Saving": "_checkpoints.background",
    "SnapshotOnSignal": "_checkpoints.signal",
    "StragglerReport": "_debugging.straggler_report",
    "Stragglers": "_debugging.stragglers",
    "Timer": "_debugging.timers",
    "Timers": "_debugging.timers",
    "Timing": "_debugging.timers",
    "breakpoint": "_debugging.breakpoint",
    "data_share": "_data.share",
    "deepspeed_config": "_wrapping.deepspeed_config",
    "describe": "_wrapping.describe",
    "finish_saving": "_checkpoints.background",
    "get_dist_info": "_debugging.info",
    "latest_checkpoint": "_checkpoints.listing",
    "list_checkpoints": "_checkpoints.listing",
    "load_checkpoint": "_checkpoints.load",
    "load_into": "_checkpoints.plain_into",
    "load_on_one_rank": "_checkpoints.plain",
    "node_group": "_data.node",
    "print_dist_setup": "_debugging.info",
    "query_environment": "_debugging.info",
    "read_share": "_data.slices",
    "save_checkpoint": "_checkpoints.save",
    "scatter_from_one_reader": "_data.node",
    "share_of": "_data.share",
    "share_on_node": "_data.shared",
    "timed": "_debugging.timing",
    "timeitlogit": "_debugging.timing",
    "verify_checkpoint": "_checkpoints.listing",
    "wrap_model": "_wrapping.model",
    "wrap_model_for_ddp": "_wrapping.ddp",
    "wrap_model_for_deepspeed": "_wrapping.deepspeed",
    "wrap_model_for_fsdp": "_wrapping.fsdp",
    "wrap_model_for_fsdp2": "_wrapping.fsdp2",
    "wrap_model_for_horovod": "_wrapping.horovod",
    "wrap_optimizer_for_zero1": "_wrapping.zero1",
}
TYPE_CHECKING = False
if TYPE_CHECKING:
    from ._checkpoints.background import Saving, finish_saving
    from ._checkpoints.listing import (
        Checkpoint,
        latest_checkpoint,
        list_checkpoints,
        verify_checkpoint,
    )
    from ._checkpoints.load import Loaded, load_checkpoint
    from ._checkpoints.plain import load_on_one_rank
    from ._checkpoints.plain_into import load_into
    from ._checkpoints.save import save_checkpoint
    from ._checkpoints.signal import SnapshotOnSignal
    from ._data.loader import DataLoader
    from ._data.node import node_group, scatter_from_one_reader
    from ._data.sampler import DataParallelSampler
    from ._data.share import data_share, share_of
    from ._data.shared import share_on_node
    from ._data.slices import read_share
    from ._debugging.breakpoint import breakpoint  # noqa: A004  # the name that was promised
    from ._debugging.info import get_dist_info, print_dist_setup, query_environment
    from ._debugging.straggler_report import StragglerReport
    from ._debugging.stragglers import Stragglers
    from ._debugging.timers import Timer, Timers, Timing
    from ._debugging.timing import timed, timeitlogit
    from ._wrapping.ddp import wrap_model_for_ddp
    from ._wrapping.deepspeed import wrap_model_for_deepspeed
    from ._wrapping.deepspeed_config import deepspeed_config
    from ._wrapping.describe import describe
    from ._wrapping.description import ModelDescription
    from ._wrapping.fsdp import wrap_model_for_fsdp
    from ._wrapping.fsdp2 import wrap_model_for_fsdp2
    from ._wrapping.horovod import wrap_model_for_horovod
    from ._wrapping.model import wrap_model
    from ._wrapping.zero1 import wrap_optimizer_for_zero1

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CollectiveError",
    "DataError",
    "DataLoader",
    "DataParallelSampler",
    "DistError",
    "HangError",
    "Loaded",
    "LostRankError",
    "MismatchError",
    "ModelDescription",
    "NotSetUpError",
    "Saving",
    "SetupError",
    "SnapshotOnSignal",
    "StragglerReport",
    "Stragglers",
    "Timer",
    "Timers",
    "Timing",
    "Watch",
    "WrapError",
    "__version__",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "breakpoint",
    "broadcast",
    "cleanup",
    "data_share",
    "deepspeed_config",
    "describe",
    "finish_saving",
    "get_dist_info",
    "latest_checkpoint",
    "list_checkpoints",
    "load_checkpoint",
    "load_into",
    "load_on_one_rank",
    "node_group",
    "print_dist_setup",
    "query_environment",
    "read_share",
    "save_checkpoint",
    "scatter_from_one_reader",
    "seed_everything",
    "seed_for_rank",
    "setup_torch",
    "share_of",
    "share_on_node",
    "synchronize",
    "timed",
    "timeitlogit",
    "verify_checkpoint",
    "watch",
    "wrap_model",
    "wrap_model_for_ddp",
    "wrap_model_for_deepspeed",
    "wrap_model_for_fsdp",
    "wrap_model_for_fsdp2",
    "wrap_model_for_horovod",
    "wrap_optimizer_for_zero1",
]


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415

    value = getattr(import_module(f".{_LATER[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
