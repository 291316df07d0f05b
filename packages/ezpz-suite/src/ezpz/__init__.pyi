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
from ezpz_topo import get_cpus_per_node as get_cpus_per_node
from ezpz_topo import get_gpus_per_node as get_gpus_per_node
from ezpz_topo import get_hostfile_with_fallback as get_hostfile_with_fallback
from ezpz_topo import get_hostname as get_hostname
from ezpz_topo import get_local_rank as get_local_rank
from ezpz_topo import get_local_world_size as get_local_world_size
from ezpz_topo import get_machine as get_machine
from ezpz_topo import get_node_index as get_node_index
from ezpz_topo import get_nodes_from_hostfile as get_nodes_from_hostfile
from ezpz_topo import get_num_nodes as get_num_nodes
from ezpz_topo import get_rank as get_rank
from ezpz_topo import get_world_size as get_world_size
from ezpz_topo import get_world_size_in_use as get_world_size_in_use
from ezpz_topo import get_world_size_total as get_world_size_total
from ezpz_topo import write_hostfile_from_list_of_hosts as write_hostfile_from_list_of_hosts
from ezpz_topo import write_localhost_to_hostfile as write_localhost_to_hostfile

from ._version import __version__ as __version__

__all__ = [
    "TORCH_DTYPES_MAP",
    "History",
    "__version__",
    "all_reduce",
    "barrier",
    "broadcast",
    "cleanup",
    "get_cpus_per_node",
    "get_gpus_per_node",
    "get_hostfile_with_fallback",
    "get_hostname",
    "get_local_rank",
    "get_local_world_size",
    "get_logger",
    "get_machine",
    "get_node_index",
    "get_nodes_from_hostfile",
    "get_num_nodes",
    "get_rank",
    "get_torch_backend",
    "get_torch_device",
    "get_torch_device_type",
    "get_world_size",
    "get_world_size_in_use",
    "get_world_size_total",
    "seed_everything",
    "setup_torch",
    "wrap_model",
    "write_hostfile_from_list_of_hosts",
    "write_localhost_to_hostfile",
]
