"""Who am I, who else is there, and on which machine: from the standard library alone.

>>> import ezpz_topo
>>> topology = ezpz_topo.detect(env={"PMI_RANK": "1", "PMI_SIZE": "2",
...                                  "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"})
>>> topology.rank.rank, topology.rank.world_size, topology.rank.sources["rank"]
(1, 2, 'PMI_RANK')
"""

from ._accelerators import Accelerators, get_accelerators, get_cpu_count
from ._allocation import Allocation, get_allocation
from ._env import FAMILIES, Family, family
from ._errors import (
    IncompleteLauncherError,
    InvalidVariableError,
    LauncherConflictError,
    NodelistError,
    TopoError,
)
from ._hosts import get_hostname, short_name
from ._nodelist import expand_nodelist, first_host, fold_nodelist
from ._rank import (
    RankInfo,
    get_local_rank,
    get_local_world_size,
    get_rank,
    get_rank_info,
    get_world_size,
)
from ._topology import Topology, detect
from ._version import __version__

__all__ = [
    "FAMILIES",
    "Accelerators",
    "Allocation",
    "Family",
    "IncompleteLauncherError",
    "InvalidVariableError",
    "LauncherConflictError",
    "NodelistError",
    "RankInfo",
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
    "get_hostname",
    "get_local_rank",
    "get_local_world_size",
    "get_rank",
    "get_rank_info",
    "get_world_size",
    "short_name",
]
