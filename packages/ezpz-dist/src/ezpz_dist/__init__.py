"""Set up torch.distributed, communicate, wrap a model: under any launcher, on any device.

>>> import ezpz_dist
>>> ezpz_dist.setup_torch(seed=42)          # plain python: a world of one
0
>>> ezpz_dist.all_reduce(3.0, op="mean")
3.0
>>> ezpz_dist.cleanup()
"""

from typing import TYPE_CHECKING

from ._collectives import all_gather_object, all_reduce, barrier, broadcast, synchronize
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
from ._setup import cleanup, seed_everything, seed_for_rank, setup_torch
from ._version import __version__
from ._watch import StepWatchdog as Watch
from ._watch import watch

# What a script may never use is imported when it is.
_ROOMS = {
    "_checkpoints.load": "Checkpoint Loaded latest_checkpoint list_checkpoints load_checkpoint "
    "verify_checkpoint",
    "_checkpoints.plain": "load_into load_on_one_rank",
    "_checkpoints.save": "Saving finish_saving save_checkpoint",
    "_checkpoints.signal": "SnapshotOnSignal",
    "_data": "DataLoader DataParallelSampler data_share share_of",
    "_debugger": "breakpoint",
    "_frameworks": "deepspeed_config wrap_model_for_deepspeed wrap_model_for_horovod",
    "_fsdp2": "wrap_model_for_fsdp wrap_model_for_fsdp2",
    "_info": "ModelDescription describe get_dist_info print_dist_setup query_environment",
    "_slices": "node_group read_share scatter_from_one_reader share_on_node",
    "_timers": "StragglerReport Stragglers Timer Timers Timing timed timeitlogit",
    "_wrap": "wrap_model wrap_model_for_ddp wrap_optimizer_for_zero1",
}
_LATER = {name: room for room, names in _ROOMS.items() for name in names.split()}
if TYPE_CHECKING:
    from ._checkpoints.load import (
        Checkpoint,
        Loaded,
        latest_checkpoint,
        list_checkpoints,
        load_checkpoint,
        verify_checkpoint,
    )
    from ._checkpoints.plain import load_into, load_on_one_rank
    from ._checkpoints.save import Saving, finish_saving, save_checkpoint
    from ._checkpoints.signal import SnapshotOnSignal
    from ._data import DataLoader, DataParallelSampler, data_share, share_of
    from ._debugger import breakpoint  # noqa: A004  # the name that was promised
    from ._frameworks import deepspeed_config, wrap_model_for_deepspeed, wrap_model_for_horovod
    from ._fsdp2 import wrap_model_for_fsdp, wrap_model_for_fsdp2
    from ._info import (
        ModelDescription,
        describe,
        get_dist_info,
        print_dist_setup,
        query_environment,
    )
    from ._slices import node_group, read_share, scatter_from_one_reader, share_on_node
    from ._timers import (
        StragglerReport,
        Stragglers,
        Timer,
        Timers,
        Timing,
        timed,
        timeitlogit,
    )
    from ._wrap import wrap_model, wrap_model_for_ddp, wrap_optimizer_for_zero1

__all__ = [
    "Checkpoint", "CheckpointError", "CollectiveError", "DataError", "DataLoader",
    "DataParallelSampler", "DistError", "HangError", "Loaded", "LostRankError", "MismatchError",
    "ModelDescription", "NotSetUpError", "Saving", "SetupError", "SnapshotOnSignal",
    "StragglerReport", "Stragglers", "Timer", "Timers", "Timing", "Watch", "WrapError",
    "__version__", "all_gather_object", "all_reduce", "barrier", "breakpoint", "broadcast",
    "cleanup", "data_share", "deepspeed_config", "describe", "finish_saving", "get_dist_info",
    "latest_checkpoint", "list_checkpoints", "load_checkpoint", "load_into", "load_on_one_rank",
    "node_group", "print_dist_setup", "query_environment", "read_share", "save_checkpoint",
    "scatter_from_one_reader", "seed_everything", "seed_for_rank", "setup_torch", "share_of",
    "share_on_node", "synchronize", "timed", "timeitlogit", "verify_checkpoint", "watch",
    "wrap_model", "wrap_model_for_ddp", "wrap_model_for_deepspeed", "wrap_model_for_fsdp",
    "wrap_model_for_fsdp2", "wrap_model_for_horovod", "wrap_optimizer_for_zero1",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415

    value = getattr(import_module(f".{_LATER[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
