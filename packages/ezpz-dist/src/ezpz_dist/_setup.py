"""Bring the ranks together once, and take the group down once."""

from __future__ import annotations

import atexit
import logging
import os
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ezpz_device import get_torch_device
from ezpz_topo import RankInfo, get_local_device, get_rank_info

from ._errors import SetupError
from ._group import Asked, Group, bind, choose_backend, limit_threads, make_group
from ._hangs import ending, watcher
from ._hangs.board import Board
from ._hangs.standing import calling_line
from ._meeting import mpi
from ._meeting.frameworks import check_framework, leave_frameworks, prepare_framework
from ._seed import seed_everything
from ._store import LOST, arrived, within
from ._world import World, enter, find_world, finish_all

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT = 600.0
"""Seconds that a rank waits for the others, at set-up and in every collective."""


@dataclass(frozen=True, slots=True)
class _Made:
    """What there is to undo, and what was asked for."""

    asked: Asked
    exported: dict[str, str | None]
    """What the variables that we set were before; None: not set."""


_made: _Made | None = None

_retired: list[dist.ProcessGroup | None] = []
"""Groups that `cleanup` destroyed, kept until they can be dropped without harm.

A DDP model holds its group too. Were it the last to hold it, the group's destructor would
join gloo's thread with the GIL held, while that thread waits for the GIL to drop the tensor
of the last collective: a deadlock (torch 2.13; within 150 set-ups of two ranks on two
cores). Python's own reference drops the group without the GIL.
"""


_LAST_TENSOR = 0.1
"""Seconds in which gloo's threads get the GIL, to drop the tensor of the last collective.

A script's model can outlive `cleanup` and hold the group until the interpreter ends; a thread
that still waits for the GIL then aborts the process ("terminate called without an active
exception"; torch 2.13, 15 of 50 launches of four ranks on two cores, and none of 10 with it).
"""

_FAREWELL = 5.0
"""Seconds that rank 0, whose process may hold the store, waits at clean-up for the others to
leave it: a connection that breaks under a sleeping watcher costs a page of torch's warnings."""


def setup_torch(
    framework: str = "DDP",
    backend: str | None = None,
    seed: int | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    *,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    context_parallel_size: int = 1,
) -> int:
    """Set up torch.distributed for this process and return its rank.

    Works under ezpz-launch, mpiexec, torchrun and srun, and in plain ``python`` (a world
    of one, in which collectives work too). Collective: every rank calls this, once;
    calling it again with the same arguments returns the same rank.

    Afterwards the device is bound, the default process group exists, and in a world of
    several ranks torchrun's variables (``RANK``, ``MASTER_ADDR``, ...) are exported, so
    that other libraries see the same world. All ranks have been found to be there once, with
    the same versions, script and arguments. From then on an uncaught exception on one rank
    ends all of them, and a collective of ours that fails names who is missing. SIGTERM
    unwinds the script, unless it handles it itself.

    Args:
        framework: ``"DDP"`` for everything of torch's own, ``"deepspeed"`` or ``"horovod"``
            to set up that one as well.
        backend: ``"nccl"``, ``"xccl"``, ``"ccl"``, ``"gloo"``; default: by device.
        seed: Seeds Python, numpy and torch, differently on each rank but equally within a
            tensor-parallel group (`seed_everything`); default: no seeding.
        timeout: Seconds that a rank waits for the others.
        tensor_parallel_size: With one of these three above 1, ``ezpz_tp``'s groups are
            made; the rest of the world is data parallel.
        pipeline_parallel_size: See above.
        context_parallel_size: See above.

    Raises:
        SetupError: The ranks cannot meet, one is missing or differs, the backend or the
            framework is not there, or an earlier call had other arguments.
        ezpz_topo.TopoError: The launcher's variables are half set or contradictory.
        ezpz_device.DeviceError: There is no device for this rank.
        ezpz_tp.DegreeError: The degrees do not divide the world.
    """
    global _made
    asked = Asked(
        framework, backend, seed, timeout,
        tensor_parallel_size, pipeline_parallel_size, context_parallel_size,
    )  # fmt: skip
    world = find_world()
    if world is not None and _made is not None:
        if _made.asked != asked:
            raise SetupError(
                f"setup_torch was called with {_made.asked} and now with {asked}; expected the "
                "same; call cleanup() in between"
            )
        return world.info.rank
    if dist.is_initialized():
        raise SetupError(
            "a process group exists already; expected setup_torch to make it; call setup_torch "
            "first, or remove the other init_process_group"
        )
    _retired.clear()
    info = get_rank_info()
    device = torch.device(get_torch_device())
    check_framework(framework, device)
    chosen = choose_backend(backend)
    bind(device)
    limit_threads(info)
    group = make_group(info, device, chosen, asked)
    hosts = group.roster.hosts
    enter(World(info, device, chosen, timeout, group.store, hosts))
    _made = _Made(asked, _export(info, device, group))
    atexit.register(_retired.clear)
    atexit.register(cleanup)
    if info.world_size > 1:
        watcher.start(Board(info.rank, hosts, group.connector(), group.roster.holder))
        ending.install()
    mpi.abort_on_uncaught()
    if asked.degrees != (1, 1, 1):
        _make_groups(asked)
    prepare_framework(framework, info, device, chosen)
    if seed is not None:
        seed_everything(seed)
    logger.info(
        "rank %d of %d on %s with %s; ranks by %s, address by %s",
        info.rank, info.world_size, device, chosen, info.launcher, group.meeting.source,
    )  # fmt: skip
    return info.rank


def cleanup() -> None:
    """Destroy the process group that `setup_torch` made; harmless when there is none.

    Collective: every rank calls this. It also runs at exit, so that a rank that fails
    closes its connections and the others learn of it.

    Raises:
        CheckpointError: A check-point that was written in the background has failed; the
            rest of clean-up is done.
    """
    global _made
    world, made = find_world(), _made
    if world is None or made is None:
        return
    line = calling_line()
    trouble = finish_all()
    ending.leave_word("its script ended" if line == "?" else f"cleanup() at {line}")
    enter(None)
    _made = None
    atexit.unregister(cleanup)
    if made.asked.degrees != (1, 1, 1):
        import ezpz_tp  # noqa: PLC0415  # only where its groups are used

        ezpz_tp.destroy_tensor_parallel()
    leave_frameworks()
    if dist.is_initialized():
        _retired.append(dist.group.WORLD)
        dist.destroy_process_group()
        if world.info.world_size > 1:
            time.sleep(_LAST_TENSOR)
    _leave(world)
    for name, value in made.exported.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if trouble is not None:
        raise trouble


def _leave(world: World) -> None:
    """End the watcher; on rank 0 wait a moment for those of the others."""
    own = watcher.find_watcher()
    if own is None:
        return
    ending.uninstall()
    watcher.forget()
    stay = world.info.rank == 0 and not ending.has_failed()

    def leave() -> None:
        own.stop(world.store)
        if not own.lost and world.store.add("left", 1) == world.info.world_size:
            world.store.set("all left", "")
        if stay:
            arrived(world.store, ["all left"], _FAREWELL)

    try:
        within(_FAREWELL + 1.0 if stay else 1.0, leave)
    except LOST as error:
        logger.debug("rank %d leaves before others: %s", world.info.rank, error)


def _make_groups(asked: Asked) -> None:
    import ezpz_tp  # noqa: PLC0415  # only where its groups are used

    # Ranks of one sequence's parts share their gradients' mean with the data-parallel ones.
    shared = [("data", "context")] if asked.context_parallel_size > 1 else []
    ezpz_tp.initialize_tensor_parallel(
        *asked.degrees, timeout=timedelta(seconds=asked.timeout), also=shared
    )


def _export(info: RankInfo, device: torch.device, group: Group) -> dict[str, str | None]:
    """Set torchrun's variables; return what they were before (None: not set)."""
    added: dict[str, str | None] = dict.fromkeys(group.variables)
    if info.world_size == 1:
        # Nobody to agree with; a subprocess must not take itself for a rank of ours.
        return added
    values: dict[str, int | str | None] = {
        "RANK": info.rank,
        "WORLD_SIZE": info.world_size,
        # torchrun's scripts choose their device by it.
        "LOCAL_RANK": get_local_device(),
        "LOCAL_WORLD_SIZE": info.local_world_size,
        "NODE_RANK": info.node_rank,
        "GROUP_RANK": info.node_rank,
        "MASTER_ADDR": group.meeting.master_addr,
        "MASTER_PORT": group.meeting.master_port,
    }
    if device.type == "cpu":
        # accelerate, and transformers by it, take a world without accelerators for a single
        # process unless they are told (accelerate 1.15).
        values["ACCELERATE_USE_CPU"] = "true"
    known = {name: str(value) for name, value in values.items() if value is not None}
    before = added | {name: os.environ.get(name) for name in known}
    os.environ.update(known)
    return before
