"""Set up torch.distributed, communicate, wrap a model: under any launcher, on any device.

>>> import ezpz_dist
>>> ezpz_dist.setup_torch(seed=42)          # plain python: a world of one
0
>>> ezpz_dist.all_reduce(3.0, op="mean")
3.0
>>> ezpz_dist.cleanup()
"""

from ._version import __version__ as __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ._checkpoints.background import Saving as Saving
    from ._checkpoints.background import finish_saving as finish_saving
    from ._checkpoints.listing import Checkpoint as Checkpoint
    from ._checkpoints.listing import latest_checkpoint as latest_checkpoint
    from ._checkpoints.listing import list_checkpoints as list_checkpoints
    from ._checkpoints.listing import verify_checkpoint as verify_checkpoint
    from ._checkpoints.load import Loaded as Loaded
    from ._checkpoints.load import load_checkpoint as load_checkpoint
    from ._checkpoints.save import save_checkpoint as save_checkpoint
    from ._checkpoints.signal import SnapshotOnSignal as SnapshotOnSignal
    from ._collectives import all_gather_object as all_gather_object
    from ._collectives import all_reduce as all_reduce
    from ._collectives import barrier as barrier
    from ._collectives import broadcast as broadcast
    from ._collectives import synchronize as synchronize
    from ._data import DataLoader as DataLoader
    from ._data import DataParallelSampler as DataParallelSampler
    from ._data import data_share as data_share
    from ._data import share_of as share_of
    from ._debugger import breakpoint as breakpoint
    from ._errors import CheckpointError as CheckpointError
    from ._errors import CollectiveError as CollectiveError
    from ._errors import DataError as DataError
    from ._errors import DistError as DistError
    from ._errors import HangError as HangError
    from ._errors import LostRankError as LostRankError
    from ._errors import MismatchError as MismatchError
    from ._errors import NotSetUpError as NotSetUpError
    from ._errors import SetupError as SetupError
    from ._errors import WrapError as WrapError
    from ._frameworks import deepspeed_config as deepspeed_config
    from ._frameworks import wrap_model_for_deepspeed as wrap_model_for_deepspeed
    from ._info import get_dist_info as get_dist_info
    from ._info import print_dist_setup as print_dist_setup
    from ._info import query_environment as query_environment
    from ._setup import cleanup as cleanup
    from ._setup import seed_everything as seed_everything
    from ._setup import seed_for_rank as seed_for_rank
    from ._setup import setup_torch as setup_torch
    from ._slices import node_group as node_group
    from ._slices import read_share as read_share
    from ._slices import scatter_from_one_reader as scatter_from_one_reader
    from ._timers import Timer as Timer
    from ._timers import Timing as Timing
    from ._timers import timed as timed
    from ._timers import timeitlogit as timeitlogit
    from ._watch import StepWatchdog as Watch  # noqa: F401  # its public name
    from ._watch import watch as watch
    from ._wrap import wrap_model as wrap_model
    from ._wrap import wrap_model_for_ddp as wrap_model_for_ddp
    from ._wrap import wrap_model_for_fsdp as wrap_model_for_fsdp
    from ._wrap import wrap_model_for_fsdp2 as wrap_model_for_fsdp2
    from ._wrap import wrap_optimizer_for_zero1 as wrap_optimizer_for_zero1
else:
    from ezpz_topo import attach

    __getattr__, __dir__ = attach(__name__)
