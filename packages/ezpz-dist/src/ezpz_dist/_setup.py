"""Set up and clean up: topology, device, rendezvous, group, seeds."""

from __future__ import annotations

import atexit
import itertools
import logging
import multiprocessing.util
import operator
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # torch exports them

from ezpz_device import get_torch_backend, get_torch_device, is_backend_available
from ezpz_topo import RankInfo, get_cpu_count, get_hostname, get_local_device, get_rank_info

from . import _diagnosis, _mpi, _watch
from ._agreement import Roster, agree, common_facts, refuse
from ._diagnosis import Board, calling_line, pid_namespace
from ._errors import SetupError
from ._rendezvous import Rendezvous, gloo_interface, meet, side_store
from ._seed import seed_everything, seed_for_rank
from ._store import LOST, arrived, within
from ._watch import first_line
from ._world import World, enter, find_world, finish_all, is_forked, mark_forked

# The default process group: made once all ranks have met and are found to agree.

logger = logging.getLogger(__name__)

_generation = itertools.count()
"""How many groups this process has tried to make: the same number on every rank."""

LONGEST = 1e8
"""Seconds: the longest time-out, about three years."""

_INTERFACE = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}
"""What names the network interface that a backend takes."""

_WITHDRAWAL = 5.0
"""Seconds for a rank that cannot take part to reach the others."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What `setup_torch` was called with: the same on every rank."""

    framework: str
    backend: str | None
    seed: int | None
    timeout: float
    tensor_parallel_size: int | None
    pipeline_parallel_size: int | None
    context_parallel_size: int | None

    def __post_init__(self) -> None:
        """Refuse what would fail only later, with the ranks half set up."""
        if not 0 < self.timeout <= LONGEST:
            raise ValueError(
                f"timeout {self.timeout:g}; expected seconds, above 0 and at most {LONGEST:g}"
            )
        if self.seed is not None:
            seed_for_rank(self.seed, 0)

    @property
    def degrees(self) -> tuple[int, int, int] | None:
        """Of the groups to be made: tensor, pipeline, context; None: no groups."""
        asked = (
            self.tensor_parallel_size, self.pipeline_parallel_size, self.context_parallel_size
        )  # fmt: skip
        if asked == (None, None, None):
            return None
        tensor, pipeline, context = (1 if degree is None else degree for degree in asked)
        return tensor, pipeline, context


@dataclass(frozen=True, slots=True)
class Group:
    """What became of it.

    Attributes:
        meeting: Where the ranks met.
        store: This set-up's part of the store.
        roster: Who is there.
        variables: What was exported for torch and gloo, which were not set before.
    """

    meeting: Rendezvous
    store: Store
    roster: Roster
    variables: tuple[str, ...]


def choose_backend(asked: str | None) -> str:
    """Return the backend's name; by device where none is asked for.

    Raises:
        SetupError: This torch has no such backend.
    """
    if asked is not None and not is_backend_available(asked):
        raise SetupError(
            f"backend {asked!r} is not in this torch; leave it out to choose by device"
        )
    chosen = get_torch_backend() if asked is None else asked.lower()
    if chosen == "ccl":
        # Registers the backend with torch; torch does not know it otherwise.
        __import__("oneccl_bindings_for_pytorch")
    return chosen


def bind(device: torch.device) -> None:
    """Make the device current before the group exists: NCCL would take device 0 on every rank."""
    if device.type in ("cuda", "xpu"):
        getattr(torch, device.type).set_device(device)


def limit_threads(info: RankInfo) -> None:
    """Share the node's cores among its ranks, unless the user or a CPU binding already did."""
    ranks_here = info.local_world_size or 1
    if "OMP_NUM_THREADS" in os.environ or ranks_here == 1:
        return
    cores = get_cpu_count()
    if cores == os.cpu_count():
        torch.set_num_threads(max(1, cores // ranks_here))


def withdraw(info: RankInfo, timeout: float, error: Exception) -> None:
    """Tell the others that this rank cannot take part: they would wait for it. Not collective."""
    if info.world_size == 1:
        return
    why = f"{type(error).__name__}: {first_line(error)}"
    # Now, for the others may be long in coming.
    logger.error("rank %d of %d cannot take part: %s", info.rank, info.world_size, why)
    try:
        meeting = meet(info, timedelta(seconds=min(timeout, _WITHDRAWAL)))
        store = _part_of(meeting, next(_generation))
        within(_WITHDRAWAL, lambda: refuse(store, info, _this_process(), why))
    # The caller raises the error that matters.
    except Exception as trouble:  # noqa: BLE001
        logger.debug("rank %d could not tell the others: %s", info.rank, trouble)


def make_group(info: RankInfo, device: torch.device, backend: str, asked: Asked) -> Group:
    """Meet, agree, connect. Collective: every rank calls this.

    Raises:
        SetupError: The ranks cannot meet or connect, one is missing, or they differ.
    """
    timeout, generation, added = timedelta(seconds=asked.timeout), next(_generation), {}
    where = f" at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        meeting = meet(info, timeout)
        where = f" at {meeting.master_addr}:{meeting.master_port} ({meeting.source})"
        # A store that outlives its group (a model may hold it) keeps its old keys.
        store = _part_of(meeting, generation)
        process = _this_process()
        roster = Roster((process[0],), process[1:])
        if info.world_size > 1:
            common = common_facts(arguments=asdict(asked), device=device.type, backend=backend)
            roster = agree(store, info, asked.timeout, common, process)
            # From here on a rank that fails can tell those who wait for it in torch.
            _diagnosis.start(
                Board(
                    info.rank, roster.hosts, store,
                    lambda seconds: _part_of(meeting, generation, seconds), roster.holder,
                )
            )  # fmt: skip
        added = _diagnosis.variables()
        if backend == "gloo":
            interface = gloo_interface(info, meeting.master_addr, meeting.master_port)
            if interface is not None:
                added["GLOO_SOCKET_IFNAME"] = interface
        os.environ.update(added)
        dist.init_process_group(
            backend,
            store=PrefixStore("group", store),
            rank=info.rank,
            world_size=info.world_size,
            timeout=timeout,
            # A bound device lets NCCL and XCCL connect now instead of at the first collective.
            device_id=device if backend in ("nccl", "xccl") else None,
        )
        _see_all_in(store, info, timeout)
    except BaseException as error:
        for name in added:
            os.environ.pop(name, None)
        have_met = _take_back(info, error)
        # gloo raises a plain RuntimeError where two hosts cannot connect.
        if not isinstance(error, (dist.DistError, RuntimeError)):
            raise
        remedy = (
            f"expected {backend} to connect the ranks, which have all come there; look for the "
            "first error of another rank, and for the interface by which the hosts reach each "
            f"other: {_INTERFACE.get(backend, 'CCL_KVS_IFACE')} names it"
            if have_met
            else "expected every rank to call setup_torch and reach that address; check that no "
            "rank failed earlier and that the port is free"
        )
        raise SetupError(
            f"rank {info.rank} of {info.world_size} could not meet the others{where} within "
            f"{asked.timeout:g} s: {first_line(error)}; {remedy}"
        ) from error
    return Group(meeting, store, roster, tuple(added))


def _take_back(info: RankInfo, error: BaseException) -> bool:
    """Undo a set-up that failed; return whether the ranks had met. Those who wait are ended."""
    own = _diagnosis.find_watcher()
    if own is not None:
        host = own.board.hosts[info.rank]
        what = f"{type(error).__name__}: {first_line(error)}"
        _watch.end_job(f"rank {info.rank} on {host} failed in setup_torch: {what}", 1)
        own.stop(own.board.store)
        _diagnosis.forget()
    if dist.is_initialized():
        dist.destroy_process_group()
    return own is not None


def _part_of(meeting: Rendezvous, generation: int, seconds: float | None = None) -> Store:
    """Return a set-up's part of the store; with seconds for each request: a new connection's."""
    whole = meeting.store if seconds is None else side_store(meeting, timedelta(seconds=seconds))
    return PrefixStore(f"ezpz-{generation}", whole)


def _this_process() -> tuple[str, int, int]:
    return get_hostname(), os.getpid(), pid_namespace()


def _see_all_in(store: Store, info: RankInfo, timeout: timedelta) -> None:
    """Keep rank 0, whose process may hold the store, until every rank is through.

    init_process_group can return on rank 0 while others still read from its store: were it
    to leave now, they would be cut off.
    """
    if store.add("through", 1) == info.world_size:
        store.set("all", "through")
    if info.rank == 0:
        store.wait(["all"], timeout)


# Take the group down once, on whatever way a rank ends.

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


@dataclass(frozen=True, slots=True)
class Made:
    """What there is to undo, and what was asked for."""

    asked: Asked
    exported: dict[str, str | None]
    """What the variables that we set were before; None: not set."""
    hooks: tuple[Hook, Hook]
    """``sys.excepthook`` before, and as torch and we have left it."""
    is_whole: bool = False
    """Whether set-up came to its end."""


_made: Made | None = None
_left: tuple[Hook, Hook] | None = None
_forks_are_seen = False

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
"""Seconds that rank 0, whose process may hold the store, waits at clean-up for the others."""


def find_made() -> Made | None:
    """Return what `cleanup` will undo; None where there is nothing."""
    return _made


def to_undo(made: Made) -> None:
    """Have `cleanup` undo this, at exit at the latest. For set-up."""
    global _made, _forks_are_seen
    _made = made
    atexit.register(_retired.clear)
    atexit.register(cleanup)
    if multiprocessing.parent_process() is not None:
        # Python < 3.14 ends a process that multiprocessing has forked without calling `atexit`'s.
        multiprocessing.util.Finalize(None, _when_the_function_ends, exitpriority=0)
    if not _forks_are_seen:
        os.register_at_fork(after_in_child=_in_forked_child)
        _forks_are_seen = True


def mark_whole() -> None:
    """Say that set-up has come to its end."""
    global _made
    if _made is not None:
        _made = replace(_made, is_whole=True)


def before_failure() -> Hook:
    """Return ``sys.excepthook``, without what a set-up that failed has left there."""
    global _left
    if _left is not None and sys.excepthook is _left[1]:
        sys.excepthook = _left[0]
    _left = None
    return sys.excepthook


def left_by_failure(before: Hook) -> None:
    """Say what ``sys.excepthook`` was before a set-up that failed. For set-up."""
    global _left
    _left = before, sys.excepthook


def drop_retired() -> None:
    """Drop the groups that were destroyed."""
    _retired.clear()


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
    if world is None or made is None or is_forked():
        return
    line = calling_line()
    trouble = finish_all()
    _watch.leave_word("its script ended" if line == "?" else f"cleanup() at {line}")
    enter(None)
    _made = None
    atexit.unregister(cleanup)
    # Whatever fails, the rest is done; the last comes first.
    with ExitStack() as rest:
        rest.callback(_restore, made)
        rest.callback(_leave, world)
        rest.callback(_destroy_group, world)
        if made.asked.degrees is not None:
            import ezpz_tp  # noqa: PLC0415  # only where its groups are used

            rest.callback(ezpz_tp.destroy_tensor_parallel)
        if trouble is not None:
            raise trouble


def _when_the_function_ends() -> None:
    """End as a script does, where the rank is a function that multiprocessing runs."""
    error = sys.exc_info()[1]
    world = find_world()
    if world is not None and error is not None and not isinstance(error, SystemExit):
        _watch.last_words(world, error, error.__traceback__)
    cleanup()


def _destroy_group(world: World) -> None:
    if dist.is_initialized():
        _retired.append(dist.group.WORLD)
        dist.destroy_process_group()
        if world.info.world_size > 1:
            time.sleep(_LAST_TENSOR)


def _restore(made: Made) -> None:
    """Undo what this process and its environment were changed in."""
    before, ours = made.hooks
    if sys.excepthook is ours:
        # Torch's own too: under another set-up's they would hold back what we say.
        sys.excepthook = before
    for name, value in made.exported.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _leave(world: World) -> None:
    """End the watcher; on rank 0 wait a moment for those of the others."""
    own = _diagnosis.find_watcher()
    if own is None:
        return
    _watch.release_sigterm()
    _diagnosis.forget()
    stay = world.info.rank == 0 and not _watch.has_failed()

    def leave() -> None:
        own.stop(world.store)
        if not own.lost and world.store.add("left", 1) == world.info.world_size:
            world.store.set("all left", "")
        if stay and not arrived(world.store, ["all left"], _FAREWELL):
            # A connection that breaks under a sleeping watcher costs a page of torch's warnings.
            own.board.post(world.store, "closed")
            time.sleep(_LAST_TENSOR)

    try:
        within(_FAREWELL + 1.0 if stay else 1.0, leave)
    except LOST as error:
        logger.debug("rank %d leaves before others: %s", world.info.rank, error)


def _in_forked_child() -> None:
    """Leave the world to the parent: a child must neither end the job nor close the group."""
    if _made is not None:
        mark_forked()
        _watch.release_sigterm()
        if sys.excepthook is _made.hooks[1]:
            sys.excepthook = _made.hooks[0]


# Bring the ranks together once.

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
        _mpi.abort_on_uncaught(info.world_size)
        left_by_failure(hook)
        raise
    enter(World(info, device, chosen, asked.timeout, group.store, group.roster.hosts))
    if info.world_size > 1:
        _watch.install()
    _mpi.abort_on_uncaught(info.world_size)
    to_undo(Made(asked, _export(info, device, group), (hook, sys.excepthook)))
    if asked.degrees is not None:
        _make_groups(asked.degrees, asked.timeout)
    if framework != "DDP":
        from ._frameworks import prepare_framework  # noqa: PLC0415 - only where it is requested

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
        if asked.framework != "DDP":
            from ._frameworks import check_framework  # noqa: PLC0415 - only where it is requested

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
