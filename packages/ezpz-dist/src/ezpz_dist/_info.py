"""The world as plain values and as a table."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

import ezpz_device
import ezpz_topo
from ezpz_topo import NodelistError, fold_nodelist

from ._errors import fold, grouped
from ._version import __version__
from ._world import find_world, parallel_state

# The world as a table in text: pure, and readable at ten thousand ranks.

_NODES_SHOWN, _FIRST_NODES = 8, 3  # of more nodes so many first ones, and the last, are shown
_WIDTH = 60  # characters for ranks in columns, and for a folded list of hosts or ranks


def picture(info: Mapping[str, Any], hosts: Sequence[str]) -> str:
    nodes = grouped((host, rank) for rank, host in enumerate(hosts))
    sizes = sorted({len(ranks) for ranks in nodes.values()})
    each = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
    s = "s" * (len(hosts) != 1), "s" * (len(nodes) != 1)
    head = f"{len(hosts):,} rank{s[0]} on {len(nodes):,} node{s[1]}"
    lines = [f"{head}, {each} a node" if len(nodes) > 1 else head, *_facts(info), ""]
    return "\n".join(lines + _table(nodes))


def _facts(info: Mapping[str, Any]) -> Iterator[str]:
    job = f", {info['scheduler']} job {info['job_id']}" if info["job_id"] else ""
    started = "one process" if info["launcher"] == "none" else f"started by {info['launcher']}"
    yield f"{started} on {info['machine']}{job}"
    timeout = "" if info["timeout"] is None else f", time-out {info['timeout']:g} s"
    yield f"device {info['device']}, backend {info['backend']}{timeout}"
    if any(degree > 1 for axis, degree in info["degrees"].items() if axis != "data"):
        degrees = (f"{axis} {degree:,}" for axis, degree in info["degrees"].items())
        yield "parallel: " + " x ".join(degrees)
    yield ", ".join(f"{name} {version}" for name, version in info["versions"].items())
    if not info["is_set_up"]:
        yield "not set up yet: this is what the environment says"


def _table(nodes: Mapping[str, Sequence[int]]) -> list[str]:
    """Return a line a node, those in the middle of many as one."""
    rows = [(str(index), host, ranks) for index, (host, ranks) in enumerate(nodes.items())]
    shown = rows if len(rows) <= _NODES_SHOWN else [*rows[:_FIRST_NODES], rows[-1]]
    digits = max(len(str(rank)) for _, _, ranks in shown for rank in ranks)
    in_columns = max(len(ranks) for _, _, ranks in shown) * (digits + 2) <= _WIDTH
    node_width = max(len("node"), *(len(index) for index, _, _ in shown))
    host_width = max(len("host"), *(len(host) for _, host, _ in shown))
    lines = [f"{'node':>{node_width}}  {'host':<{host_width}}  ranks"]
    for index, host, ranks in shown:
        columns = "  ".join(f"{rank:>{digits}}" for rank in ranks)
        text = columns if in_columns else _cut(fold(ranks))
        lines.append(f"{index:>{node_width}}  {host:<{host_width}}  {text}")
    if shown is not rows:
        hidden = rows[_FIRST_NODES:-1]
        ranks = [rank for _, _, own in hidden for rank in own]
        names = [host for _, host, _ in hidden]
        try:
            where = fold_nodelist(names)
        except NodelistError:
            where = ", ".join(names)  # names that no nodelist can hold
        more = f"{len(hidden):,} more: {_cut(where)}, ranks {_cut(fold(ranks))}"
        lines.insert(-1, f"{'...':>{node_width}}  {more}")
    return lines


def _cut(text: str) -> str:
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 4]} ..."


# What set-up decided, and what the environment says, as plain values.


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

    world = find_world()
    info = ezpz_topo.get_rank_info() if world is None else world.info
    job = _allocation()
    device = torch.device(ezpz_device.get_torch_device() if world is None else world.device)
    hosts = list(job.hosts) or [ezpz_topo.get_hostname()]
    if world is not None:
        hosts = list(dict.fromkeys(world.hosts))
    port = os.environ.get("MASTER_PORT", "")
    degrees = {"tensor": 1, "context": 1, "pipeline": 1, "data": info.world_size}
    if (state := parallel_state()) is not None:
        degrees = {axis: state.size(axis) for axis in degrees}
    return {
        "is_set_up": world is not None, **_place(info),
        "num_nodes": info.num_nodes if world is None else info.num_nodes or len(hosts),
        "hostname": ezpz_topo.get_hostname(), "hosts": hosts,
        "device": str(device), "device_type": device.type,
        "backend": ezpz_device.get_torch_backend() if world is None else world.backend,
        "timeout": None if world is None else world.timeout,
        "launcher": info.launcher, "scheduler": job.scheduler, "job_id": job.job_id,
        "machine": ezpz_topo.get_machine(), "master_addr": os.environ.get("MASTER_ADDR") or None,
        "master_port": int(port) if port.isascii() and port.isdigit() else None, "degrees": degrees,
        "versions": {
            "torch": str(torch.__version__),  # a plain string, for YAML too
            "python": platform.python_version(), "ezpz_dist": __version__,
            "ezpz_topo": ezpz_topo.__version__, "ezpz_device": ezpz_device.__version__,
            "ezpz_tp": ezpz_tp.__version__,
        },
    }  # fmt: skip


def print_dist_setup() -> str:
    """Print a picture of the world on rank 0: its nodes, their ranks, and what they use.

    Not a collective. Of many nodes the first and the last are shown.

    Returns:
        The text, on every rank. Before `setup_torch` only this rank's place is known.

    Raises:
        ezpz_topo.TopoError: As `get_dist_info`.
        ezpz_device.DeviceError: As `get_dist_info`.
    """
    world, info = find_world(), get_dist_info()
    hosts = [info["hostname"]] if world is None else world.hosts
    text = picture(info, hosts)
    if world is None and info["world_size"] > 1:
        text = f"rank {info['rank']} of {info['world_size']}, seen alone: {text}"
    if info["rank"] == 0:
        print(text, flush=True)
    return text


def query_environment(env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return this process's place as the launcher's variables tell it, and which these are.

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
    env = os.environ if env is None else env
    info = ezpz_topo.get_rank_info(env)
    names = sorted(launch_variables())
    return {
        **_place(info), "launcher": info.launcher, "sources": dict(info.sources),
        "variables": {name: env[name] for name in names if env.get(name)}, "notes": [*info.notes],
    }  # fmt: skip


_PLACE = "rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes"


def _place(info: ezpz_topo.RankInfo) -> dict[str, Any]:
    return {name: getattr(info, name) for name in _PLACE}


def launch_variables() -> set[str]:
    found = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}
    for family in ezpz_topo.FAMILIES:
        found.update(*(getattr(family, name) for name in (*_PLACE, "proof")))
        found.add(family.tasks_per_node)
    return found


def _allocation() -> ezpz_topo.Allocation:
    try:
        # No rank may start the scheduler's commands: ten thousand at once take it down.
        return ezpz_topo.get_allocation(ask=False)
    except ezpz_topo.SchedulerError:
        # Only a command could tell the hosts; the job's name is known all the same.
        for scheduler, name in (("slurm", "SLURM_JOB_ID"), ("pbs", "PBS_JOBID")):
            if os.environ.get(name):
                return ezpz_topo.Allocation(scheduler, os.environ[name], ())
        return ezpz_topo.Allocation("unknown", None, ())
