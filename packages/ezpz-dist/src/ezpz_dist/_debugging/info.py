"""What set-up decided, and what the environment says, as plain values."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Any

import torch

import ezpz_device
import ezpz_topo
from ezpz_dist._version import __version__
from ezpz_dist._world import find_world

from .picture import picture


def get_dist_info() -> dict[str, Any]:
    """Return where this rank is, among whom, and with what; `json.dumps` takes it.

    Not a collective. Before `setup_torch` it is what the environment says, and what set-up
    would choose by it.

    Returns:
        ``is_set_up``, ``rank``, ``world_size``, ``local_rank``, ``local_world_size``,
        ``node_rank``, ``num_nodes`` (the last three None where nobody tells), ``hostname``,
        ``hosts`` (each once, by their first rank), ``device``, ``device_type``, ``backend``,
        ``timeout`` (seconds; None before set-up), ``launcher``, ``scheduler``, ``job_id``,
        ``machine``, ``master_addr``, ``master_port``, ``degrees`` (of the axes tensor,
        context, pipeline and data; before set-up data is the world size), ``versions``.

    Raises:
        ezpz_topo.TopoError: The environment is half set or contradicts itself.
        ezpz_device.DeviceError: Before set-up: there is no device for this rank.
    """
    import ezpz_tp  # noqa: PLC0415  # only who asks pays for it

    world = find_world()
    info = ezpz_topo.get_rank_info() if world is None else world.info
    job = _allocation()
    device = torch.device(ezpz_device.get_torch_device() if world is None else world.device)
    hosts = _hosts(job) if world is None else list(dict.fromkeys(world.hosts))
    port = os.environ.get("MASTER_PORT", "")
    return {
        "is_set_up": world is not None,
        "rank": info.rank,
        "world_size": info.world_size,
        "local_rank": info.local_rank,
        "local_world_size": info.local_world_size,
        "node_rank": info.node_rank,
        "num_nodes": info.num_nodes if world is None else info.num_nodes or len(hosts),
        "hostname": ezpz_topo.get_hostname(),
        "hosts": hosts,
        "device": str(device),
        "device_type": device.type,
        "backend": ezpz_device.get_torch_backend() if world is None else world.backend,
        "timeout": None if world is None else world.timeout,
        "launcher": info.launcher,
        "scheduler": job.scheduler,
        "job_id": job.job_id,
        "machine": ezpz_topo.get_machine(),
        "master_addr": os.environ.get("MASTER_ADDR") or None,
        "master_port": int(port) if port.isascii() and port.isdigit() else None,
        "degrees": _degrees(info.world_size),
        "versions": {
            "torch": str(torch.__version__),  # a plain string, for YAML too
            "python": platform.python_version(),
            "ezpz_dist": __version__,
            "ezpz_topo": ezpz_topo.__version__,
            "ezpz_device": ezpz_device.__version__,
            "ezpz_tp": ezpz_tp.__version__,
        },
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
        ``num_nodes`` (the last three None where nobody tells), ``launcher``, ``sources``
        (for each of the numbers the variable or rule that it comes from), ``variables``
        (all of the known launchers' that are set, with their values), ``notes`` (what was
        seen and set aside).

    Raises:
        ezpz_topo.TopoError: The variables are half set or contradict each other.
    """
    env = os.environ if env is None else env
    info = ezpz_topo.get_rank_info(env)
    names = {
        name
        for family in ezpz_topo.FAMILIES
        for field in (
            family.rank, family.world_size, family.local_rank, family.local_world_size,
            family.node_rank, family.num_nodes, family.proof, (family.tasks_per_node,),
        )
        for name in field
    } | {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}  # fmt: skip
    return {
        "rank": info.rank,
        "world_size": info.world_size,
        "local_rank": info.local_rank,
        "local_world_size": info.local_world_size,
        "node_rank": info.node_rank,
        "num_nodes": info.num_nodes,
        "launcher": info.launcher,
        "sources": dict(info.sources),
        "variables": {name: env[name] for name in sorted(names) if env.get(name)},
        "notes": list(info.notes),
    }


def _allocation() -> ezpz_topo.Allocation:
    try:
        # No rank may start the scheduler's commands: ten thousand at once take it down.
        return ezpz_topo.get_allocation(ask=False)
    except ezpz_topo.SchedulerError:
        # Only a command could tell the hosts; the job's name is told all the same.
        for scheduler, name in (("slurm", "SLURM_JOB_ID"), ("pbs", "PBS_JOBID")):
            if os.environ.get(name):
                return ezpz_topo.Allocation(scheduler, os.environ[name], ())
        return ezpz_topo.Allocation("unknown", None, ())


def _hosts(job: ezpz_topo.Allocation) -> list[str]:
    return list(job.hosts) or [ezpz_topo.get_hostname()]


def _degrees(world_size: int) -> dict[str, int]:
    import ezpz_tp  # noqa: PLC0415  # only who asks pays for it

    if not ezpz_tp.tensor_parallel_is_initialized():
        return {"tensor": 1, "context": 1, "pipeline": 1, "data": world_size}
    return {
        "tensor": ezpz_tp.get_tensor_parallel_world_size(),
        "context": ezpz_tp.get_context_parallel_world_size(),
        "pipeline": ezpz_tp.get_pipeline_parallel_world_size(),
        "data": ezpz_tp.get_data_parallel_world_size(),
    }
