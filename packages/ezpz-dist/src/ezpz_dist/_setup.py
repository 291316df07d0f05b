"""Bring the ranks together once, and take the group down once."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from ezpz_device import get_torch_backend, get_torch_device, is_backend_available
from ezpz_topo import RankInfo, get_cpu_count, get_hostname, get_local_device, get_rank_info

from ._errors import SetupError
from ._meeting import mpi
from ._meeting.rendezvous import Rendezvous, meet
from ._seed import seed_everything
from ._world import World, enter, find_world

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT = 600.0
"""Seconds that a rank waits for the others, at set-up and in every collective."""


@dataclass(frozen=True, slots=True)
class _Made:
    """What there is to undo, and what was asked for."""

    arguments: tuple[str | None, int | None, float]
    exported: dict[str, str | None]
    """What the variables that we set were before; None: not set."""


_made: _Made | None = None

_generation = itertools.count()
"""How many groups this process has made: the same number on every rank."""

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


def setup_torch(
    *, backend: str | None = None, seed: int | None = None, timeout: float = DEFAULT_TIMEOUT
) -> int:
    """Set up torch.distributed for this process and return its rank.

    Works under ezpz-launch, mpiexec, torchrun and srun, and in plain ``python`` (a world
    of one, in which collectives work too). Collective: every rank calls this, once;
    calling it again with the same arguments returns the same rank.

    Afterwards the device is bound, the default process group exists, and in a world of
    several ranks torchrun's variables (``RANK``, ``MASTER_ADDR``, ...) are exported, so
    that other libraries see the same world.

    Args:
        backend: ``"nccl"``, ``"xccl"``, ``"ccl"``, ``"gloo"``; default: by device.
        seed: Seeds Python, numpy and torch, differently on each rank; default: no seeding.
        timeout: Seconds that a rank waits for the others.

    Raises:
        SetupError: The ranks cannot meet, the backend is not there, or an earlier call
            had other arguments.
        ezpz_topo.TopoError: The launcher's variables are half set or contradictory.
        ezpz_device.DeviceError: There is no device for this rank.
    """
    global _made
    arguments = backend, seed, timeout
    world = find_world()
    if world is not None and _made is not None:
        if _made.arguments != arguments:
            raise SetupError(
                f"setup_torch was called with (backend, seed, timeout) = {_made.arguments} and "
                f"now with {arguments}; expected the same; call cleanup() in between"
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
    chosen = _backend(backend)
    _bind(device)
    _limit_threads(info)
    meeting = _init_group(info, device, chosen, timedelta(seconds=timeout))
    hosts = (get_hostname(),) * info.world_size
    enter(World(info, device, chosen, timeout, PrefixStore("ezpz-world", meeting.store), hosts))
    _made = _Made(arguments, _export(info, meeting))
    atexit.register(_retired.clear)
    atexit.register(cleanup)
    mpi.abort_on_uncaught()
    if seed is not None:
        seed_everything(seed)
    logger.info(
        "rank %d of %d on %s with %s; ranks by %s, address by %s",
        info.rank, info.world_size, device, chosen, info.launcher, meeting.source,
    )  # fmt: skip
    return info.rank


def cleanup() -> None:
    """Destroy the process group that `setup_torch` made; harmless when there is none.

    Collective: every rank calls this. It also runs at exit, so that a rank that fails
    closes its connections and the others learn of it.
    """
    global _made
    world, made = find_world(), _made
    if world is None or made is None:
        return
    enter(None)
    _made = None
    atexit.unregister(cleanup)
    if dist.is_initialized():
        _retired.append(dist.group.WORLD)
        dist.destroy_process_group()
        if world.info.world_size > 1:
            time.sleep(_LAST_TENSOR)
    for name, value in made.exported.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _backend(asked: str | None) -> str:
    if asked is None:
        return get_torch_backend()
    if not is_backend_available(asked):
        raise SetupError(
            f"backend {asked!r} is not in this torch; leave it out to choose by device"
        )
    return asked.lower()


def _bind(device: torch.device) -> None:
    """Make the device current before the group exists: NCCL would take device 0 on every rank."""
    if device.type in ("cuda", "xpu"):
        getattr(torch, device.type).set_device(device)


def _limit_threads(info: RankInfo) -> None:
    """Share the node's cores among its ranks, unless the user or a CPU binding already did."""
    ranks_here = info.local_world_size or 1
    if "OMP_NUM_THREADS" in os.environ or ranks_here == 1:
        return
    cores = get_cpu_count()
    if cores == os.cpu_count():
        torch.set_num_threads(max(1, cores // ranks_here))


def _init_group(
    info: RankInfo, device: torch.device, backend: str, timeout: timedelta
) -> Rendezvous:
    if backend == "ccl":
        # Registers the backend with torch; torch does not know it otherwise.
        __import__("oneccl_bindings_for_pytorch")
    where = ""
    try:
        meeting = meet(info, timeout)
        where = f" at {meeting.master_addr}:{meeting.master_port} ({meeting.source})"
        # A store that outlives its group (a model may hold it) keeps its old keys.
        store = PrefixStore(f"ezpz-{next(_generation)}", meeting.store)
        dist.init_process_group(
            backend,
            store=store,
            rank=info.rank,
            world_size=info.world_size,
            timeout=timeout,
            # A bound device lets NCCL and XCCL connect now instead of at the first collective.
            device_id=device if backend in ("nccl", "xccl") else None,
        )
        _see_all_in(store, info, timeout)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        where = where or f" at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise SetupError(
            f"rank {info.rank} of {info.world_size} could not meet the others{where} within "
            f"{timeout.total_seconds():g} s: {error}; expected every rank to call setup_torch and "
            "reach that address; check that no rank failed earlier and that the port is free"
        ) from error
    return meeting


def _see_all_in(store: PrefixStore, info: RankInfo, timeout: timedelta) -> None:
    """Keep rank 0, whose process may hold the store, until every rank is through.

    init_process_group can return on rank 0 while others still read from its store: were it
    to leave now, they would be cut off.
    """
    if store.add("through", 1) == info.world_size:
        store.set("all", "through")
    if info.rank == 0:
        store.wait(["all"], timeout)


def _export(info: RankInfo, meeting: Rendezvous) -> dict[str, str | None]:
    """Set torchrun's variables; return what they were before (None: not set)."""
    if info.world_size == 1:
        # Nobody to agree with; a subprocess must not take itself for a rank of ours.
        return {}
    values: dict[str, int | str | None] = {
        "RANK": info.rank,
        "WORLD_SIZE": info.world_size,
        # torchrun's scripts choose their device by it.
        "LOCAL_RANK": get_local_device(),
        "LOCAL_WORLD_SIZE": info.local_world_size,
        "NODE_RANK": info.node_rank,
        "GROUP_RANK": info.node_rank,
        "MASTER_ADDR": meeting.master_addr,
        "MASTER_PORT": meeting.master_port,
    }
    known = {name: str(value) for name, value in values.items() if value is not None}
    before = {name: os.environ.get(name) for name in known}
    os.environ.update(known)
    return before
