"""The world as plain values and as a table."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch

import ezpz_device
import ezpz_topo
from ezpz_topo import NodelistError, fold_nodelist

from ._errors import fold, grouped
from ._version import __version__
from ._world import find_world, parallel_state

# The world as a table in text: pure, and readable at ten thousand ranks.

_NODES_SHOWN = 8  # of more nodes the first ones are shown, and the last
_FIRST_NODES = 3
_WIDTH = 60  # characters for ranks in columns, and for a folded list of hosts or ranks


_Nodes = Mapping[str, Sequence[int]]
"""The ranks of each host."""


def picture(info: Mapping[str, Any], hosts: Sequence[str]) -> str:
    """Return the facts of a world, and a table of its nodes.

    Args:
        info: As of `get_dist_info`.
        hosts: The host of each rank.
    """
    nodes = grouped((host, rank) for rank, host in enumerate(hosts))
    return "\n".join([_head(nodes), *_facts(info), "", *_table(nodes)])


def _head(nodes: _Nodes) -> str:
    sizes = list(map(len, nodes.values()))
    head = f"{_count(sum(sizes), 'rank')} on {_count(len(sizes), 'node')}"
    if len(sizes) == 1:
        return head
    if min(sizes) == max(sizes):
        return f"{head}, {sizes[0]:,} a node"
    return f"{head}, {min(sizes):,} to {max(sizes):,} a node"


def _count(number: int, noun: str) -> str:
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}s"


def _facts(info: Mapping[str, Any]) -> list[str]:
    start = f"started by {info['launcher']} on {info['machine']}"
    if info["launcher"] == "none":
        start = f"one process on {info['machine']}"
    if info["job_id"]:
        start += f", {info['scheduler']} job {info['job_id']}"
    device = f"device {info['device']}, backend {info['backend']}"
    if info["timeout"] is not None:
        device += f", time-out {info['timeout']:g} s"
    facts = [start, device]
    degrees = info["degrees"]
    if degrees["tensor"] * degrees["context"] * degrees["pipeline"] > 1:
        texts = [f"{axis} {degree:,}" for axis, degree in degrees.items()]
        facts.append("parallel: " + " x ".join(texts))
    facts.append(", ".join(map(" ".join, info["versions"].items())))
    if not info["is_set_up"]:
        facts.append("not set up yet: this is what the environment says")
    return facts


def _table(nodes: _Nodes) -> list[str]:
    """Return a line a node, those in the middle of many as one."""
    hosts = list(nodes)
    shown = hosts
    hidden: list[str] = []
    if len(hosts) > _NODES_SHOWN:
        shown = [*hosts[:_FIRST_NODES], hosts[-1]]
        hidden = hosts[_FIRST_NODES:-1]
    ranks_shown = list(map(nodes.__getitem__, shown))
    digits = len(str(max(map(max, ranks_shown))))
    is_in_columns = max(map(len, ranks_shown)) * (digits + 2) <= _WIDTH
    node_width = max(len("node"), len(str(len(hosts) - 1)))
    host_width = max(map(len, ["host", *shown]))
    lines = [f"{'node':>{node_width}}  {'host':<{host_width}}  ranks"]
    for host, ranks in zip(shown, ranks_shown, strict=True):
        text = _shorten(fold(ranks))
        if is_in_columns:
            text = "  ".join(f"{rank:>{digits}}" for rank in ranks)
        lines.append(f"{hosts.index(host):>{node_width}}  {host:<{host_width}}  {text}")
    if hidden:
        hidden_ranks = fold(chain.from_iterable(map(nodes.__getitem__, hidden)))
        text = f"{len(hidden):,} more: {_fold_hosts(hidden)}, ranks {_shorten(hidden_ranks)}"
        lines.insert(-1, f"{'...':>{node_width}}  {text}")
    return lines


def _fold_hosts(hosts: Sequence[str]) -> str:
    try:
        return _shorten(fold_nodelist(hosts))
    except NodelistError:
        return _shorten(", ".join(hosts))  # names that no nodelist can hold


def _shorten(text: str) -> str:
    if len(text) <= _WIDTH:
        return text
    return f"{text[: _WIDTH - 4]} ..."


# The world as plain values: from set-up, or else from the environment.


def get_dist_info() -> dict[str, Any]:
    """Return where this rank is, among whom, and with what; `json.dumps` takes it.

    Not a collective. Before `setup_torch` it is what the environment says, and what set-up
    would choose by it.

    Returns:
        ``is_set_up``, ``rank``, ``world_size``, ``local_rank``, ``local_world_size``,
        ``node_rank``, ``num_nodes`` (the last three None where it is not known), ``hostname``,
        ``hosts`` (each once, by their first rank), ``device``, ``device_type``, ``backend``.
        ``timeout`` (seconds; None before set-up), ``launcher``, ``scheduler``, ``job_id``,
        ``machine``, ``master_addr``, ``master_port`` and ``versions``. ``degrees`` are those of
        the axes tensor, context, pipeline and data (before set-up data is the world size).

    Raises:
        ezpz_topo.TopoError: The environment is half set or contradicts itself.
        ezpz_device.DeviceError: Before set-up: there is no device for this rank.
    """
    import ezpz_tp  # noqa: PLC0415 - only where it is asked

    job = _find_allocation()
    hostname = ezpz_topo.get_hostname()
    world = find_world()
    if world is None:
        info = ezpz_topo.get_rank_info()
        hosts = list(job.hosts) or [hostname]
        num_nodes = info.num_nodes
        device = torch.device(ezpz_device.get_torch_device())
        backend = ezpz_device.get_torch_backend()
        timeout = None
    else:
        info = world.info
        hosts = list(dict.fromkeys(world.hosts))
        num_nodes = info.num_nodes or len(hosts)
        device = world.device
        backend = world.backend
        timeout = world.timeout
    degrees = {"tensor": 1, "context": 1, "pipeline": 1, "data": info.world_size}
    state = parallel_state()
    if state is not None:
        degrees = {axis: state.size(axis) for axis in degrees}
    master_port = None
    port = os.environ.get("MASTER_PORT", "")
    if port.isascii() and port.isdigit():
        master_port = int(port)
    versions = {
        "torch": str(torch.__version__),  # a plain string, for YAML too
        "python": platform.python_version(),
        "ezpz_dist": __version__,
        "ezpz_topo": ezpz_topo.__version__,
        "ezpz_device": ezpz_device.__version__,
        "ezpz_tp": ezpz_tp.__version__,
    }
    return {
        "is_set_up": world is not None,
        **_find_place(info),
        "num_nodes": num_nodes,
        "hostname": hostname,
        "hosts": hosts,
        "device": str(device),
        "device_type": device.type,
        "backend": backend,
        "timeout": timeout,
        "launcher": info.launcher,
        "scheduler": job.scheduler,
        "job_id": job.job_id,
        "machine": ezpz_topo.get_machine(),
        "master_addr": os.environ.get("MASTER_ADDR") or None,
        "master_port": master_port,
        "degrees": degrees,
        "versions": versions,
    }


def print_dist_setup() -> str:
    """Print a picture of the world on rank 0: its nodes, their ranks, and what they use.

    Not a collective. Of many nodes the first and the last are shown.

    Returns:
        The text, on every rank. Before `setup_torch` only this rank's place is known.

    Raises:
        ezpz_topo.TopoError: As `get_dist_info`.
        ezpz_device.DeviceError: As `get_dist_info`.
    """
    world = find_world()
    info = get_dist_info()
    hosts = [info["hostname"]] if world is None else world.hosts
    text = picture(info, hosts)
    if world is None and info["world_size"] > 1:
        text = f"rank {info['rank']} of {info['world_size']}, seen alone: {text}"
    if info["rank"] == 0:
        print(text, flush=True)
    return text


def query_environment(env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return this process's place by the launcher's variables, and the variables.

    Args:
        env: The environment to read; default ``os.environ``. Nothing else is asked.

    Returns:
        ``rank``, ``world_size``, ``local_rank``, ``local_world_size``, ``node_rank``,
        ``num_nodes`` (the last three None where it is not known) and ``launcher``. ``sources``
        has the variable or rule of each number. ``variables`` are all of the known launchers'
        that are set, with their values. ``notes`` say what was seen and set aside.

    Raises:
        ezpz_topo.TopoError: The variables are half set or contradict each other.
    """
    if env is None:
        env = os.environ
    info = ezpz_topo.get_rank_info(env)
    names = sorted(launch_variables())
    return {
        **_find_place(info),
        "launcher": info.launcher,
        "sources": dict(info.sources),
        "variables": {name: env[name] for name in names if env.get(name)},
        "notes": list(info.notes),
    }


_PLACE = ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes")


def _find_place(info: ezpz_topo.RankInfo) -> dict[str, Any]:
    return {name: getattr(info, name) for name in _PLACE}


def launch_variables() -> set[str]:
    """Return the names of the variables in which known launchers pass a rank its place."""
    names = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}
    for family in ezpz_topo.FAMILIES:
        names.add(family.tasks_per_node)
        for field in (*_PLACE, "proof"):
            names.update(getattr(family, field))
    return names


def _find_allocation() -> ezpz_topo.Allocation:
    try:
        # No rank may start the scheduler's commands: ten thousand at once take it down.
        return ezpz_topo.get_allocation(ask=False)
    except ezpz_topo.SchedulerError:
        # Only a command could tell the hosts; the job's name is known all the same.
        for scheduler, name in (("slurm", "SLURM_JOB_ID"), ("pbs", "PBS_JOBID")):
            if os.environ.get(name):
                return ezpz_topo.Allocation(scheduler, os.environ[name], ())
        return ezpz_topo.Allocation("unknown", None, ())
