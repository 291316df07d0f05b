"""Bring the ranks together once."""

from __future__ import annotations

import logging
import operator
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from ezpz_device import get_torch_device
from ezpz_topo import RankInfo, get_local_device, get_rank_info

from ._cleanup import (
    Made,
    before_failure,
    cleanup,
    drop_retired,
    find_made,
    left_by_failure,
    mark_whole,
    to_undo,
)
from ._errors import SetupError
from ._group import Asked, Group, bind, choose_backend, limit_threads, make_group, withdraw
from ._hangs import ending
from ._meeting import mpi
from ._meeting.frameworks import check_framework, prepare_framework
from ._seed import seed_everything
from ._world import World, enter, is_forked

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT = 600.0
"""Seconds that a rank waits for the others, at set-up and in every collective."""


def setup_torch(
    framework: str = "DDP",
    backend: str | None = None,
    seed: int | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    *,
    tensor_parallel_size: int | None = None,
    pipeline_parallel_size: int | None = None,
    context_parallel_size: int | None = None,
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
    unwinds the script, unless it handles it itself; a main thread that is stuck in native code
    does not hear it. A forked child, such as a data loader's worker, has no part in all this.

    Args:
        framework: ``"DDP"`` for everything of torch's own, ``"deepspeed"`` or ``"horovod"``
            to set up that one as well.
        backend: ``"nccl"``, ``"xccl"``, ``"ccl"``, ``"gloo"``; default: by device.
        seed: Seeds Python, numpy and torch, differently on each rank but equally within a
            tensor-parallel group (`seed_everything`); default: no seeding.
        timeout: Seconds that a rank waits for the others, above 0 and at most 1e8.
        tensor_parallel_size: Where one of these three is given, be it 1, ``ezpz_tp``'s
            groups are made; the rest of the world is data parallel.
        pipeline_parallel_size: See above.
        context_parallel_size: See above.

    Raises:
        SetupError: The ranks cannot meet, one is missing, differs or has failed, the backend
            or the framework is not there, or an earlier call had other arguments.
        ValueError: ``timeout`` or ``seed`` is out of range.
        ezpz_topo.TopoError: The launcher's variables are half set or contradictory.
        ezpz_device.DeviceError: There is no device for this rank.
        ezpz_tp.DegreeError: The degrees do not divide the world.
    """
    asked = Asked(
        framework, backend, None if seed is None else operator.index(seed), float(timeout),
        tensor_parallel_size, pipeline_parallel_size, context_parallel_size,
    )  # fmt: skip
    if _is_done(asked):
        return get_rank_info().rank
    if dist.is_initialized():
        raise SetupError(
            "a process group exists already; expected setup_torch to make it; call setup_torch "
            "first, or remove the other init_process_group"
        )
    drop_retired()
    hook, info = before_failure(), get_rank_info()
    try:
        device, chosen = _prepare(info, asked)
        group = make_group(info, device, chosen, asked)
    except BaseException:
        # MPI_Finalize, and so the end of this rank, would wait for one that is missing.
        mpi.abort_on_uncaught(info.world_size)
        left_by_failure(hook)
        raise
    enter(World(info, device, chosen, asked.timeout, group.store, group.roster.hosts))
    if info.world_size > 1:
        ending.install()
    mpi.abort_on_uncaught(info.world_size)
    to_undo(Made(asked, _export(info, device, group), (hook, sys.excepthook)))
    if asked.degrees is not None:
        _make_groups(asked.degrees, asked.timeout)
    prepare_framework(framework, info, device, chosen)
    if asked.seed is not None:
        seed_everything(asked.seed)
    mark_whole()
    logger.info(
        "rank %d of %d on %s with %s; ranks by %s, address by %s",
        info.rank, info.world_size, device, chosen, info.launcher, group.meeting.source,
    )  # fmt: skip
    return info.rank


def _prepare(info: RankInfo, asked: Asked) -> tuple[torch.device, str]:
    """Return this rank's device and backend; if it has none, tell the others, who wait for it."""
    try:
        device = torch.device(get_torch_device())
        check_framework(asked.framework, device)
        backend = choose_backend(asked.backend)
        bind(device)
        limit_threads(info)
    # Whatever it is: they need not wait until their time is over.
    except Exception as error:
        withdraw(info, asked.timeout, error)
        raise
    return device, backend


def _is_done(asked: Asked) -> bool:
    """Return whether an earlier call has done what is asked for."""
    if is_forked():
        raise SetupError(
            "setup_torch in a process that a rank has forked, whose group it would share; expected "
            "it in the rank itself; start such a process by spawn"
        )
    made = find_made()
    if made is None:
        return False
    if not dist.is_initialized():
        cleanup()  # the script has destroyed the group itself
        return False
    if not made.is_whole:
        raise SetupError(
            "setup_torch failed half-way before; expected cleanup() in between; see the first error"
        )
    if made.asked != asked:
        raise SetupError(
            f"setup_torch was called with {made.asked} and now with {asked}; expected the same; "
            "call cleanup() in between"
        )
    return True


def _make_groups(degrees: tuple[int, int, int], timeout: float) -> None:
    import ezpz_tp  # noqa: PLC0415  # only where its groups are used

    # Ranks of one sequence's parts share their gradients' mean with the data-parallel ones.
    shared = [("data", "context")] if degrees[2] > 1 else []
    ezpz_tp.initialize_tensor_parallel(*degrees, timeout=timedelta(seconds=timeout), also=shared)


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
