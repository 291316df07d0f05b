"""Who am I, who else is there, and on which machine: from the standard library alone.

>>> import ezpz_topo
>>> topology = ezpz_topo.detect(env={"PMI_RANK": "1", "PMI_SIZE": "2",
...                                  "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"})
>>> topology.rank.rank, topology.rank.world_size, topology.rank.sources["rank"]
(1, 2, 'PMI_RANK')
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ._allocation import Allocation
from ._devices import Accelerators, get_accelerators, get_cpu_count, get_cpus_per_node
from ._env import FAMILIES, Family, family
from ._errors import (
    CheckError,
    HostfileError,
    IncompleteLauncherError,
    InvalidVariableError,
    LauncherConflictError,
    MachineError,
    NodelistError,
    SchedulerError,
    TopoError,
)
from ._hostfile import HostSlots, get_nodes_from_hostfile, parse_hostfile, read_hostfile
from ._hosts import (
    Hosts,
    get_allocation,
    get_hostfile_with_fallback,
    get_hosts,
    write_hostfile_from_list_of_hosts,
    write_localhost_to_hostfile,
)
from ._machine import Machine, get_machine, get_machine_info, known_machines
from ._nodelist import (
    expand_nodelist,
    first_host,
    fold_nodelist,
    get_hostname,
    same_host,
    short_name,
)
from ._rank import (
    Ancestor,
    RankInfo,
    get_local_device,
    get_local_rank,
    get_local_world_size,
    get_rank,
    get_rank_info,
    launching_ancestors,
)
from ._topology import (
    Topology,
    detect,
    get_gpus_per_node,
    get_node_index,
    get_num_nodes,
    get_world_size,
    get_world_size_in_use,
    get_world_size_total,
    imagine,
)
from ._version import __version__

if TYPE_CHECKING:
    from ._checks import CheckResult
    from ._pbs import get_pbs_folder
    from ._secrets import redact

__all__ = [
    "FAMILIES",
    "Accelerators",
    "Allocation",
    "Ancestor",
    "CheckError",
    "CheckResult",
    "Family",
    "HostSlots",
    "HostfileError",
    "Hosts",
    "IncompleteLauncherError",
    "InvalidVariableError",
    "LauncherConflictError",
    "Machine",
    "MachineError",
    "NodelistError",
    "RankInfo",
    "SchedulerError",
    "TopoError",
    "Topology",
    "__version__",
    "detect",
    "expand_nodelist",
    "family",
    "first_host",
    "fold_nodelist",
    "get_accelerators",
    "get_allocation",
    "get_cpu_count",
    "get_cpus_per_node",
    "get_gpus_per_node",
    "get_hostfile_with_fallback",
    "get_hostname",
    "get_hosts",
    "get_local_device",
    "get_local_rank",
    "get_local_world_size",
    "get_machine",
    "get_machine_info",
    "get_node_index",
    "get_nodes_from_hostfile",
    "get_num_nodes",
    "get_pbs_folder",
    "get_rank",
    "get_rank_info",
    "get_world_size",
    "get_world_size_in_use",
    "get_world_size_total",
    "imagine",
    "known_machines",
    "launching_ancestors",
    "parse_hostfile",
    "read_hostfile",
    "redact",
    "same_host",
    "short_name",
    "write_hostfile_from_list_of_hosts",
    "write_localhost_to_hostfile",
]

# Few need these, and they take 10 ms of a start.
_LAZY = {"CheckResult": "_checks", "get_pbs_folder": "_pbs", "redact": "_secrets"}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_LAZY[name]}", __name__), name)
