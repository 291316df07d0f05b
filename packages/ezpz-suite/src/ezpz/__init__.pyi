from ezpz_device import TORCH_DTYPES_MAP as TORCH_DTYPES_MAP
from ezpz_device import get_torch_backend as get_torch_backend
from ezpz_device import get_torch_device as get_torch_device
from ezpz_device import get_torch_device_type as get_torch_device_type
from ezpz_dist import all_reduce as all_reduce
from ezpz_dist import barrier as barrier
from ezpz_dist import broadcast as broadcast
from ezpz_dist import cleanup as cleanup
from ezpz_dist import seed_everything as seed_everything
from ezpz_dist import setup_torch as setup_torch
from ezpz_dist import wrap_model as wrap_model
from ezpz_obs import History as History
from ezpz_obs import get_logger as get_logger
from ezpz_topo import get_hostname as get_hostname
from ezpz_topo import get_local_rank as get_local_rank
from ezpz_topo import get_local_world_size as get_local_world_size
from ezpz_topo import get_rank as get_rank
from ezpz_topo import get_world_size as get_world_size

from ._version import __version__ as __version__

__all__ = [
    "TORCH_DTYPES_MAP",
    "History",
    "__version__",
    "all_reduce",
    "barrier",
    "broadcast",
    "cleanup",
    "get_hostname",
    "get_local_rank",
    "get_local_world_size",
    "get_logger",
    "get_rank",
    "get_torch_backend",
    "get_torch_device",
    "get_torch_device_type",
    "get_world_size",
    "seed_everything",
    "setup_torch",
    "wrap_model",
]
