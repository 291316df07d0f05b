"""How large the world is: nodes, devices, and the ranks that run or could run on them."""

from __future__ import annotations

from collections.abc import Mapping

from ._accelerators import Accelerators, get_accelerators
from ._allocation import Allocation, get_allocation
from ._errors import IncompleteLauncherError, SchedulerError
from ._machine import Machine
from ._match import get_machine_info
from ._rank import get_rank_info
from ._reading import RankInfo


def get_world_size(
    env: Mapping[str, str] | None = None, *, total: bool = False, in_use: bool = False
) -> int:
    """Return the number of ranks; 1 for one process without a launcher.

    Args:
        env: The environment to read; default ``os.environ``.
        total: Instead of the ranks that run, those that the allocation has devices for:
            `get_world_size_total`.
        in_use: The ranks that run, which is the default.

    Raises:
        ValueError: Both are asked for.
        TopoError: The environment is half set or contradicts itself (see `get_rank_info`).
    """
    if total and in_use:
        raise ValueError("get_world_size(total=True, in_use=True); expected one of them")
    return get_world_size_total(env) if total else get_world_size_in_use(env)


def get_world_size_in_use(env: Mapping[str, str] | None = None) -> int:
    """Return the number of ranks that run; 1 for one process without a launcher.

    Raises:
        TopoError: The environment is half set or contradicts itself (see `get_rank_info`).
    """
    return get_rank_info(env).world_size


def get_world_size_total(env: Mapping[str, str] | None = None) -> int:
    """Return the number of ranks that all nodes together have room for.

    One a device; where there are no devices, the ranks that the scheduler foresees, else one
    a node. Never less than the ranks that run.

    Raises:
        TopoError: Ranks, job or devices cannot be known.
    """
    rank = get_rank_info(env)
    job = _job(rank, env)
    return world_size_total(rank, job, devices_here(env, rank, job, get_machine_info(env)))[0]


def get_gpus_per_node(env: Mapping[str, str] | None = None) -> int:
    """Return the number of devices of this node that this process may use; 0 without any.

    Tiles count where the driver shows them as devices (Aurora: 12). A launcher that hides all
    devices but one from each rank makes this 1.

    Raises:
        TopoError: A variable that selects devices or the machine is wrong.
    """
    rank = get_rank_info(env)
    return devices_here(env, rank, _job(rank, env), get_machine_info(env)).count


def devices_here(
    env: Mapping[str, str] | None, rank: RankInfo, job: Allocation | None, machine: Machine
) -> Accelerators:
    """Return this node's accelerators; on a login node those that the machine's nodes have.

    On a node of the job the host itself is believed: a machine's CPU nodes have its name too.
    """
    on_node = job is None or (job.scheduler != "none" and job.on_node)
    devices = None
    if machine.devices_per_node and not on_node:
        source = f"devices_per_node of {machine.name}.toml"
        devices = (machine.device_type, machine.devices_per_node, source)
    # What every rank calls starts no command.
    return get_accelerators(env, fallback=devices, tools=rank.world_size == 1)


def get_num_nodes(env: Mapping[str, str] | None = None) -> int:
    """Return the number of nodes: of the job (the step, in a Slurm step), else that ranks run on.

    Ranks may be on fewer nodes than their job has; `get_node_index` counts those with ranks.

    Raises:
        TopoError: The job cannot be read, or nothing tells how many nodes the ranks are on.
    """
    rank = get_rank_info(env)
    return num_nodes(rank, _job(rank, env))[0]


def get_node_index(env: Mapping[str, str] | None = None) -> int:
    """Return the index of this node among those that ranks are on; 0 for one process.

    Raises:
        TopoError: The environment is half set or contradicts itself, or nothing tells.
    """
    rank = get_rank_info(env)
    return rank.node_rank if rank.node_rank is not None else node_index(rank, _job(rank, env))[0]


def _job(rank: RankInfo, env: Mapping[str, str] | None) -> Allocation | None:
    """Return the job; None where only a command could tell it, and every rank would start one."""
    if rank.world_size == 1:
        return get_allocation(env)
    try:
        return get_allocation(env, ask=False)
    except SchedulerError:
        return None


def num_nodes(rank: RankInfo, job: Allocation | None) -> tuple[int, str]:
    """Return the number of nodes, and where that comes from.

    Raises:
        IncompleteLauncherError: Ranks of several nodes, and neither a job nor their launcher
            tells of how many.
    """
    if job is not None and job.scheduler != "none" and job.hosts:
        return job.num_nodes, job.sources["hosts"]
    if rank.num_nodes is not None:
        return rank.num_nodes, rank.sources["num_nodes"]
    # World size over local world size is a guess: 1 + 2 + 3 ranks would say 6, 3 and 2.
    per_node = rank.local_world_size
    raise IncompleteLauncherError(
        f"{rank.launcher}: {rank.world_size} ranks, {per_node or 'an unknown number'} of them on "
        "this node, and no job whose hosts can be read; expected to be told the number of nodes; "
        "start the ranks with ezpz-launch",
        family=rank.launcher,
        missing=("GROUP_WORLD_SIZE",),
    )


def _fits(rank: RankInfo, index: int, nodes: int) -> bool:
    """Whether every node of the job has as many ranks, and this one those of its place.

    Only then is the order of the ranks' nodes surely the job's.
    """
    per_node = rank.local_world_size or 0
    in_blocks = (index * per_node + rank.local_rank) == rank.rank
    in_turn = (rank.local_rank * nodes + index) == rank.rank
    return per_node * nodes == rank.world_size and (in_blocks or in_turn)


def world_size_total(
    rank: RankInfo, job: Allocation | None, devices: Accelerators
) -> tuple[int, str]:
    """Return the number of ranks that all nodes have room for, and where that comes from.

    Raises:
        IncompleteLauncherError: The number of nodes is not known.
    """
    nodes, _ = num_nodes(rank, job)
    if devices.count:
        room, why = nodes * devices.count, f"{nodes} nodes x {devices.count} devices"
    elif job is not None and job.slots:
        room, why = sum(job.slots), job.sources["slots"]
    else:
        room, why = nodes, f"{nodes} nodes without devices"
    return (room, why) if room >= rank.world_size else (rank.world_size, "the ranks that run")


def node_index(rank: RankInfo, job: Allocation | None) -> tuple[int, str]:
    """Return the index of this node among those the ranks are on, and where that comes from.

    Raises:
        IncompleteLauncherError: The launcher does not tell, and the job has other nodes than
            those that the ranks are on.
    """
    if rank.node_rank is not None:
        return rank.node_rank, rank.sources["node_rank"]
    per_node = rank.local_world_size or 0
    if job is not None and job.scheduler != "none" and job.node_name in job.hosts:
        index = job.hosts.index(job.node_name)
        if _fits(rank, index, job.num_nodes):
            return index, f"{job.node_name} in {job.sources['hosts']}"
    raise IncompleteLauncherError(
        f"{rank.launcher} does not tell which node this is ({rank.world_size} ranks, "
        f"{per_node or 'an unknown number'} of them here); expected NODE_RANK; start the ranks "
        "with ezpz-launch",
        family=rank.launcher,
        missing=("NODE_RANK",),
    )
