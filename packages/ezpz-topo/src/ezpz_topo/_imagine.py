"""A topology that is not here: to plan for a machine from a laptop."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

from ._accelerators import Accelerators
from ._allocation import Allocation
from ._errors import MachineError
from ._match import get_machine_info
from ._nodelist import MAX_HOSTS
from ._reading import ONE_PROCESS
from ._topology import Topology


def imagine(machine: str, nodes: int = 1, env: Mapping[str, str] | None = None) -> Topology:
    """Return what `detect` would say in a job of so many nodes of a machine; nothing is looked at.

    Numbers that the machine's file does not tell are 0.

    Args:
        machine: A name of `known_machines`.
        nodes: Number of nodes; their names are made up.
        env: The environment that tells where the user's machines are; default ``os.environ``.

    Raises:
        MachineError: No machine has that name, its file is wrong, or ``nodes`` is impossible.
    """
    env = os.environ if env is None else env
    if not 1 <= nodes <= MAX_HOSTS:
        raise MachineError(f"{nodes} nodes; expected from 1 to {MAX_HOSTS}; name another number")
    # Only where its machines are: the job and the host of this environment are not meant.
    folders = ("EZPZ_MACHINES", "XDG_CONFIG_HOME", "HOME")
    known = get_machine_info(
        {**{name: env[name] for name in folders if name in env}, "EZPZ_MACHINE": machine},
        hostname="imagined",
    )
    source = f"imagined: {nodes} nodes of {known.name}"
    width = max(4, len(str(nodes)))
    hosts = tuple(f"node{number:0{width}d}" for number in range(1, nodes + 1))
    in_job = known.scheduler != "none"
    facts = f"{known.name}.toml"
    cores = known.cores_per_node or _cores_bound(known.cpu_bind.values())
    told = facts if cores else f"not told by {facts}"
    return Topology(
        rank=ONE_PROCESS,
        allocation=Allocation(
            known.scheduler,
            "imagined" if in_job else None,
            hosts,
            node_name=hosts[0],
            sources=dict.fromkeys(("scheduler", "job_id", "hosts", "node_name"), source),
        ),
        machine=known,
        accelerators=Accelerators(
            known.device_type or "cpu", known.devices_per_node or 0, f"devices_per_node of {facts}"
        ),
        hostname=hosts[0],
        cpu_count=cores,
        cpu_source=told,
        cpus_per_node=cores,
        cpus_per_node_source=told,
    )


def _cores_bound(lists: Iterable[tuple[str, ...]]) -> int:
    """Return one more than the highest core of any bind list; 0 without any."""
    ends = [end for ranges in lists for text in ranges for end in re.findall("[0-9]+", text)]
    return max(map(int, ends), default=-1) + 1
