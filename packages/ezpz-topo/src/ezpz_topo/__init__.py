"""Find this process's rank, its job and hosts, and its machine, by the standard library alone.

>>> import ezpz_topo
>>> topology = ezpz_topo.detect(env={"PMI_RANK": "1", "PMI_SIZE": "2",
...                                  "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"})
>>> topology.rank.rank, topology.rank.world_size, topology.rank.sources["rank"]
(1, 2, 'PMI_RANK')
"""

import sys

from ._version import __version__ as __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    # The one list of the public names: type checkers read it, and `attach` does.
    from ._allocation import Allocation as Allocation
    from ._checks import CheckResult as CheckResult
    from ._commands import Answer as Answer
    from ._commands import ask as ask
    from ._cpus import get_cpu_count as get_cpu_count
    from ._cpus import get_cpus_per_node as get_cpus_per_node
    from ._cpus import get_memory_limit as get_memory_limit
    from ._devices import Accelerators as Accelerators
    from ._devices import get_accelerators as get_accelerators
    from ._env import FAMILIES as FAMILIES
    from ._env import Family as Family
    from ._env import family as family
    from ._errors import CheckError as CheckError
    from ._errors import HostfileError as HostfileError
    from ._errors import IncompleteLauncherError as IncompleteLauncherError
    from ._errors import InvalidVariableError as InvalidVariableError
    from ._errors import LauncherConflictError as LauncherConflictError
    from ._errors import MachineError as MachineError
    from ._errors import NodelistError as NodelistError
    from ._errors import NoSchedulerError as NoSchedulerError
    from ._errors import SchedulerError as SchedulerError
    from ._errors import TopoError as TopoError
    from ._hostfile import HostSlots as HostSlots
    from ._hostfile import get_nodes_from_hostfile as get_nodes_from_hostfile
    from ._hostfile import read_hostfile as read_hostfile
    from ._hosts import Hosts as Hosts
    from ._hosts import find_schedulers as find_schedulers
    from ._hosts import get_allocation as get_allocation
    from ._hosts import get_hostfile_with_fallback as get_hostfile_with_fallback
    from ._hosts import get_hosts as get_hosts
    from ._hosts import write_hostfile_from_list_of_hosts as write_hostfile_from_list_of_hosts
    from ._hosts import write_localhost_to_hostfile as write_localhost_to_hostfile
    from ._machine import Machine as Machine
    from ._machine import get_machine as get_machine
    from ._machine import get_machine_info as get_machine_info
    from ._machine import known_machines as known_machines
    from ._nodelist import expand_nodelist as expand_nodelist
    from ._nodelist import first_host as first_host
    from ._nodelist import fold_nodelist as fold_nodelist
    from ._nodelist import get_hostname as get_hostname
    from ._nodelist import is_own_address as is_own_address
    from ._nodelist import same_host as same_host
    from ._nodelist import short_name as short_name
    from ._pbs import get_pbs_folder as get_pbs_folder
    from ._pbs import get_pbs_jobs as get_pbs_jobs
    from ._rank import Ancestor as Ancestor
    from ._rank import RankInfo as RankInfo
    from ._rank import get_local_device as get_local_device
    from ._rank import get_local_rank as get_local_rank
    from ._rank import get_local_world_size as get_local_world_size
    from ._rank import get_rank as get_rank
    from ._rank import get_rank_info as get_rank_info
    from ._secrets import redact as redact
    from ._topology import Topology as Topology
    from ._topology import detect as detect
    from ._topology import get_gpus_per_node as get_gpus_per_node
    from ._topology import get_node_index as get_node_index
    from ._topology import get_num_nodes as get_num_nodes
    from ._topology import get_staged_path as get_staged_path
    from ._topology import get_world_size as get_world_size
    from ._topology import get_world_size_in_use as get_world_size_in_use
    from ._topology import get_world_size_total as get_world_size_total
    from ._topology import imagine as imagine


def attach(module: str) -> "tuple[Callable[[str], object], Callable[[], list[str]]]":
    """Make the public names of a package of ezpz's load their modules when they are first used.

    The names are those that the package's source imports for type checkers, each on a line of its
    own: ``from .home import name as name``. The source is read when a name is first looked up.

    Args:
        module: the package's name.

    Returns:
        Its ``__getattr__``, which also gives its ``__all__``, and its ``__dir__``.
    """
    locations: dict[str, tuple[str, str]] = {}  # of each name: module, and its name there

    def load(name: str) -> object:
        from importlib import import_module  # noqa: PLC0415  # importing a package loads nothing

        if not locations:
            spec = sys.modules[module].__spec__
            source = spec.loader.get_data(spec.origin)  # type: ignore[union-attr]  # it has a file
            for line in source.decode().splitlines():
                words = line.split()
                if words[:5:2] == ["from", "import", "as"]:
                    locations[words[5]] = (words[1], words[3])
        if name == "__all__":
            return sorted(locations)
        if name not in locations:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        source_module, source_name = locations[name]
        if source_module == ".":
            return import_module(f"{module}.{source_name}")
        value: object = getattr(import_module(source_module, module), source_name)
        setattr(sys.modules[module], name, value)
        return value

    def list_names() -> list[str]:
        load("__all__")
        return sorted(locations)

    return load, list_names


if not TYPE_CHECKING:
    __getattr__, __dir__ = attach(__name__)
