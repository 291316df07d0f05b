"""Set up and clean up: topology, device, rendezvous, group, parallel groups, seeds."""

from __future__ import annotations

import atexit
import itertools
import logging
import multiprocessing.util
import operator
import os
import random
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # torch exports them

from ezpz_device import get_torch_backend, get_torch_device, is_backend_available
from ezpz_topo import RankInfo, get_cpu_count, get_hostname, get_local_device, get_rank_info

from . import _diagnosis, _watch
from ._addresses import Process, gloo_interface
from ._diagnosis import LOST, SideStore, arrived, calling_line, pid_namespace, within
from ._errors import SetupError
from ._members import Agreement, agree, common_facts, withdraw
from ._mpi import abort_on_uncaught
from ._rendezvous import Rendezvous, leave, rendezvous
from ._watch import first_line
from ._world import World, enter, find_world, finish_all, is_forked, parallel_state, variables

logger = logging.getLogger(__name__)


# What was requested, and what set-up has changed in this process.

DEFAULT_TIMEOUT = 600.0  # seconds that a rank waits for others, at set-up and in collectives
LONGEST = 1e8  # seconds: the longest time-out, about three years
Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


@dataclass(frozen=True, slots=True)
class SetupArgs:
    framework: str
    backend: str | None
    seed: int | None
    timeout: float
    tensor_parallel_size: int | None
    pipeline_parallel_size: int | None
    context_parallel_size: int | None

    def __post_init__(self) -> None:
        # What would fail only later, with the ranks half set up.
        if not 0 < self.timeout <= LONGEST:
            expected = f"expected seconds, above 0 and at most {LONGEST:g}"
            raise ValueError(f"timeout {self.timeout:g}; {expected}")
        if self.seed is not None:
            seed_for_rank(self.seed, 0)

    @property
    def degrees(self) -> tuple[int, int, int] | None:
        """Of tensor, pipeline and context parallelism; None where no groups are requested."""
        given = self.tensor_parallel_size, self.pipeline_parallel_size, self.context_parallel_size
        if given == (None, None, None):
            return None
        tensor, pipeline, context = (1 if degree is None else degree for degree in given)
        return tensor, pipeline, context


@dataclass(slots=True)
class SetupState:
    """What set-up has changed in this process, to be restored by clean-up."""

    args: SetupArgs | None = None  # of the set-up that stands; None: there is none
    is_complete: bool = False
    variables: ExitStack = field(default_factory=ExitStack)  # brings back what they were
    hook: Hook = sys.excepthook  # ``sys.excepthook`` before set-up
    our_hook: Hook | None = None  # the same as torch and we have left it, after a failure too

    def export(self, values: Mapping[str, str]) -> None:
        self.variables.enter_context(variables(values))

    def restore_hook(self) -> None:
        """Bring ``sys.excepthook`` back, torch's own too: it would hold back what we say."""
        if self.our_hook is not None and sys.excepthook is self.our_hook:
            sys.excepthook = self.hook
        self.our_hook = None


_state = SetupState()
_attempts = itertools.count()  # of this process to set up: the same number on every rank


def setup_torch(
    framework: str = "DDP", backend: str | None = None, seed: int | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    *, tensor_parallel_size: int | None = None, pipeline_parallel_size: int | None = None,
    context_parallel_size: int | None = None,
) -> int:  # fmt: skip
    """Set up torch.distributed for this process and return its rank.

    Works under ezpz-launch, mpiexec, torchrun and srun, and in plain ``python`` (a world
    of one, in which collectives work too). Collective: every rank calls this, once.
    Calling it again with the same arguments returns the same rank.

    Afterwards the device is bound, and the default process group exists. In a world of
    several ranks torchrun's variables (``RANK``, ``MASTER_ADDR``, ...) are exported, so
    that other libraries see the same world. No rank is missing or duplicate, and all have
    the same versions, script and arguments. From then on an uncaught exception on one rank
    ends all of them, and a collective of ours that fails names the missing ranks. SIGTERM
    unwinds the script, unless the script handles it, or is stuck in native code. None of this
    holds in a forked child, such as a data loader's worker.

    Args:
        framework: ``"DDP"`` for everything of torch's own, ``"deepspeed"`` to set up that one
            as well. ``"horovod"`` is refused: it does not build against torch 2.1 or later.
        backend: ``"nccl"``, ``"xccl"``, ``"ccl"``, ``"gloo"``; default: by device.
        seed: Seeds Python, numpy and torch, differently on each rank but equally within a
            tensor-parallel group (`seed_everything`); default: no seeding.
        timeout: Seconds that a rank waits for the others, above 0 and at most 1e8.
        tensor_parallel_size, pipeline_parallel_size, context_parallel_size: Where one of these
            is given, be it 1, ``ezpz_tp``'s groups are made; the rest of the world is data
            parallel.

    Raises:
        SetupError: The ranks cannot meet, one is missing, differs or has failed, the backend
            or the framework is not there, or an earlier call had other arguments.
        ValueError: ``timeout`` or ``seed`` is out of range.
        ezpz_topo.TopoError: The launcher's variables are half set or contradictory.
        ezpz_device.DeviceError: There is no device for this rank.
        ezpz_tp.DegreeError: The degrees do not divide the world.
    """
    args = SetupArgs(
        framework, backend, None if seed is None else operator.index(seed), float(timeout),
        tensor_parallel_size, pipeline_parallel_size, context_parallel_size,
    )  # fmt: skip
    if _is_done(args):
        return get_rank_info().rank
    _drop_retired()
    _state.restore_hook()  # a set-up that failed has left its own
    _state.hook, _state.is_complete = sys.excepthook, False
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _watch.print_error
    info = get_rank_info()
    process, prefix = (get_hostname(), os.getpid(), pid_namespace()), f"ezpz-{next(_attempts)}"
    try:
        try:
            device, chosen = _take_device(info, args)
        except Exception as error:  # whatever it is: the others need not wait for this rank
            _tell_of_withdrawal(info, args, process, prefix, error)
            raise
        met, store, hosts = _make_group(info, device, chosen, args, process=process, prefix=prefix)
        enter(World(info, device, chosen, args.timeout, store, hosts))
        if info.world_size > 1:
            _watch.install()
            _state.export(_torchrun_variables(info, device, met))
    except BaseException:
        _state.variables.close()
        leave()
        raise
    finally:
        # After a failure too: MPI_Finalize, and so this rank's end, would wait for a missing one.
        abort_on_uncaught(info.world_size)
        _state.our_hook = sys.excepthook
    _state.args = args
    atexit.register(_drop_retired)
    atexit.register(cleanup)
    if multiprocessing.parent_process() is not None:
        # Python < 3.14 ends a process that multiprocessing has forked without calling `atexit`'s.
        multiprocessing.util.Finalize(None, _when_the_function_ends, exitpriority=0)
    if args.degrees is not None:
        import ezpz_tp  # noqa: PLC0415 - only where its groups are used

        # Ranks of one sequence's parts share their gradients' mean with the data-parallel ones.
        also = [("data", "context")] if args.degrees[2] > 1 else []
        limit = timedelta(seconds=args.timeout)
        ezpz_tp.initialize_tensor_parallel(*args.degrees, timeout=limit, also=also)
    if framework != "DDP":
        from ._frameworks import prepare_framework  # noqa: PLC0415 - only where it is requested

        prepare_framework(framework, info, device, chosen)
    if args.seed is not None:
        seed_everything(args.seed)
    _state.is_complete = True
    logger.info(
        "rank %d of %d on %s with %s; ranks by %s, address by %s",
        info.rank, info.world_size, device, chosen, info.launcher, met.place.source,
    )  # fmt: skip
    return info.rank


def _is_done(args: SetupArgs) -> bool:
    if is_forked():
        raise SetupError(
            "setup_torch in a process that a rank has forked, whose group it would share; expected "
            "it in the rank itself; start such a process by spawn"
        )
    if _state.args is not None and not dist.is_initialized():
        cleanup()  # the script has destroyed the group itself
    if _state.args is None:
        if dist.is_initialized():
            raise SetupError(
                "a process group exists already; expected setup_torch to make it; call setup_torch "
                "first, or remove the other init_process_group"
            )
        return False
    if not _state.is_complete:
        raise SetupError(
            "setup_torch failed half-way before; expected cleanup() in between; see the first error"
        )
    if _state.args != args:
        raise SetupError(
            f"setup_torch was called with {_difference(_state.args, args)}, and now with "
            f"{_difference(args, _state.args)}; expected the same; call cleanup() in between"
        )
    return True


def _difference(args: SetupArgs, other: SetupArgs) -> str:
    """Return the arguments that are not the other's, as they were given: ``seed=1``."""
    its = asdict(other)
    return ", ".join(f"{name}={own!r}" for name, own in asdict(args).items() if own != its[name])


# The device: made current before the group exists, for NCCL would take device 0 on every rank.
def _take_device(info: RankInfo, args: SetupArgs) -> tuple[torch.device, str]:
    """Return this rank's device, which is current from now on, and its backend."""
    device = torch.device(get_torch_device())
    if args.framework != "DDP":
        from ._frameworks import check_framework  # noqa: PLC0415 - only where it is requested

        check_framework(args.framework, device)
    if args.backend is not None and not is_backend_available(args.backend):
        raise SetupError(
            f"backend {args.backend!r} is not in this torch; leave it out to choose by device"
        )
    backend = get_torch_backend() if args.backend is None else args.backend.lower()
    if backend == "ccl":
        # Registers the backend with torch; torch does not know it otherwise.
        __import__("oneccl_bindings_for_pytorch")
    if device.type in ("cuda", "xpu"):
        getattr(torch, device.type).set_device(device)
    # The node's cores are shared among its ranks, unless the user or a CPU binding did so.
    ranks_here = 1 if "OMP_NUM_THREADS" in os.environ else info.local_world_size or 1
    if ranks_here > 1 and (cores := get_cpu_count()) == os.cpu_count():
        torch.set_num_threads(max(1, cores // ranks_here))
    return device, backend


_WITHDRAWAL = 5.0  # seconds for a rank that cannot take part to reach the others


def _tell_of_withdrawal(
    info: RankInfo, args: SetupArgs, process: Process, prefix: str, error: Exception
) -> None:
    """Tell the others that this rank cannot take part: they would wait for it. Not collective."""
    if info.world_size == 1:
        return
    why = f"{type(error).__name__}: {first_line(error)}"
    # Now, for the others may be long in coming.
    logger.error("rank %d of %d cannot take part: %s", info.rank, info.world_size, why)
    try:
        limit = min(args.timeout, _WITHDRAWAL)
        participant = rendezvous(info, timedelta(seconds=limit)).participant(info, prefix, limit)
        within(_WITHDRAWAL, lambda: withdraw(participant, info, process, why))
    except Exception as trouble:  # noqa: BLE001 - the caller raises the error that matters
        logger.debug("rank %d could not tell the others: %s", info.rank, trouble)


# The group: made once all ranks have met and are found to agree.

# What names the network interface that a backend takes.
_INTERFACE = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}
# How many collectives torch's flight recorder keeps, for reports: its name now and of old.
_RECORDER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def _make_group(
    info: RankInfo, device: torch.device, backend: str, args: SetupArgs,
    *, process: Process, prefix: str,
) -> tuple[Rendezvous, Store, tuple[str, ...]]:  # fmt: skip
    """Meet, agree, connect; return where, this set-up's store, and all hosts. Collective."""
    timeout = timedelta(seconds=args.timeout)
    hosts: tuple[str, ...] = (process[0],)
    agreed: Agreement | None = None
    where = f" at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        met = rendezvous(info, timeout)
        where = f" at {met.master_addr}:{met.master_port} ({met.place.source})"
        if info.world_size > 1:
            common = common_facts(arguments=asdict(args), device=device.type, backend=backend)
            participant = met.participant(info, prefix, args.timeout)
            agreed = agree(participant, info, args.timeout, common, process)
            hosts, met = agreed.hosts, met.join(agreed.store, info, timeout)
        assert met.store is not None
        # A store that outlives its group (a model may hold it) keeps its old keys.
        store = PrefixStore(prefix, met.store)
        if agreed is not None:
            # From here on a rank that fails can tell those who wait in torch.
            joined = met

            def connect(seconds: float) -> Store:
                return PrefixStore(prefix, joined.connect(timedelta(seconds=seconds)))

            side = SideStore(info.rank, hosts, store, connect, agreed.wakeup, agreed.holder)
            _diagnosis.start_responder(side)
        if not any(name in os.environ for name in _RECORDER):
            _state.export({_RECORDER[0]: "200"})
        address = met.master_addr, met.master_port
        if backend == "gloo" and (interface := gloo_interface(info, *address)) is not None:
            _state.export({"GLOO_SOCKET_IFNAME": interface})
        dist.init_process_group(
            backend, timeout=timeout,
            store=PrefixStore("group", store), rank=info.rank, world_size=info.world_size,
            # A bound device lets NCCL connect now instead of at the first collective. It also lets
            # torch's meshes split the group, which XCCL cannot (pytorch/pytorch#186548).
            device_id=device if backend == "nccl" else None,
        )  # fmt: skip
        # init_process_group can return on rank 0, whose process may hold the store, while others
        # still read from it: were it to leave now, they would be cut off.
        if store.add("through", 1) == info.world_size:
            store.set("all", "through")
        if info.rank == 0:
            store.wait(["all"], timeout)
    except BaseException as error:
        have_met = _undo_group(info, agreed, error)
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
            f"{args.timeout:g} s: {first_line(error)}; {remedy}"
        ) from error
    return met, store, hosts


def _undo_group(info: RankInfo, agreed: Agreement | None, error: BaseException) -> bool:
    """Undo a set-up that failed; return whether the ranks had met. Those who wait are ended."""
    responder = _diagnosis.find_responder()
    if responder is not None:
        who = f"rank {info.rank} on {responder.side.hosts[info.rank]}"
        what = f"{type(error).__name__}: {first_line(error)}"
        _watch.end_job(f"{who} failed in setup_torch: {what}", 1)
        responder.stop()
        _diagnosis.drop_responder()
    if agreed is not None:
        agreed.wakeup.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return responder is not None


def _torchrun_variables(info: RankInfo, device: torch.device, met: Rendezvous) -> dict[str, str]:
    """Return what torchrun exports, for a world of several: others see the same world."""
    values: dict[str, int | str | None] = {
        "RANK": info.rank, "WORLD_SIZE": info.world_size,
        # torchrun's scripts choose their device by it.
        "LOCAL_RANK": get_local_device(), "LOCAL_WORLD_SIZE": info.local_world_size,
        "NODE_RANK": info.node_rank, "GROUP_RANK": info.node_rank,
        "MASTER_ADDR": met.master_addr, "MASTER_PORT": met.master_port,
    }  # fmt: skip
    if device.type == "cpu":
        # accelerate, and transformers by it, take a world without accelerators for a single
        # process unless they are told (accelerate 1.15).
        values["ACCELERATE_USE_CPU"] = "true"
    return {name: str(value) for name, value in values.items() if value is not None}


# Seeds: they differ on every rank and never collide.

MAX_RANKS = 1 << 20  # that can have seeds of their own; the largest machines have about 120,000
MAX_SEED = 1 << 41  # seeds are below this, so that what is made of them fits torch's 64 bits
STREAMS = ("default", "model-parallel", "expert-parallel")  # of a rank's random numbers


def seed_for_rank(seed: int, rank: int, stream: str = "default") -> int:
    """Return the seed of one rank: distinct for every (seed, rank, stream), rank < `MAX_RANKS`.

    Args:
        seed: The run's seed, 0 <= seed < `MAX_SEED`.
        rank: The rank.
        stream: One of `STREAMS`.

    Raises:
        ValueError: One of them is out of range.
    """
    if not 0 <= rank < MAX_RANKS:
        raise ValueError(f"rank {rank}; expected 0 to {MAX_RANKS - 1}")
    if not 0 <= seed < MAX_SEED:
        raise ValueError(f"seed {seed}; expected 0 to 2**41 - 1")
    if stream not in STREAMS:
        raise ValueError(f"stream {stream!r}; expected one of {', '.join(STREAMS)}")
    return (seed * 4 + STREAMS.index(stream)) * MAX_RANKS + rank


def seed_everything(seed: int, *, rank: int | None = None) -> int:
    """Seed Python's, numpy's and torch's generators; return the seed of this rank.

    Ranks of one tensor-parallel group share a seed, since they compute the same outside of
    sharded layers (dropout there must drop the same). Each still has its own stream for
    what is sharded (``ezpz_tp.get_rng_tracker``). All other ranks have different seeds.

    Args:
        seed: The run's seed; every rank gets a different one from it.
        rank: The rank to seed for; default: this process's, or the first of its
            tensor-parallel group. Give the same number on ranks that must draw the same.

    Raises:
        ValueError: The seed is out of range (see `seed_for_rank`).
    """
    own, state = get_rank_info().rank, parallel_state()
    if rank is None:
        rank = own if state is None else min(state.ranks("tensor"))
    value = seed_for_rank(seed, rank)
    seed_generators(value)
    if rank != own or state is not None:
        import ezpz_tp  # noqa: PLC0415  # only where its streams are used

        tracker = ezpz_tp.get_rng_tracker()
        tracker.reset()
        tracker.add("data-parallel-rng", value)
        tracker.add("model-parallel-rng", seed_for_rank(seed, own, "model-parallel"))
        tracker.add("expert-parallel-rng", seed_for_rank(seed, own, "expert-parallel"))
    return value


def seed_generators(value: int) -> None:
    random.seed(value)
    torch.manual_seed(value)
    # A script that never imports numpy should not pay for it here.
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed([value & 0xFFFFFFFF, value >> 32])


# Clean up once, on whatever way a rank ends.

# Groups that `cleanup` destroyed. A DDP model holds its group too: were it the last to do so, the
# group's destructor would join gloo's thread with the GIL held, while that thread waits for the GIL
# to drop the last collective's tensor: a deadlock (torch 2.13; within 150 set-ups of two ranks).
# Python's own reference drops the group without the GIL.
_retired: list[dist.ProcessGroup | None] = []

# Seconds in which gloo's threads get the GIL, to drop that tensor. A script's model can hold the
# group until the interpreter ends; a thread that still waits for the GIL then aborts the process
# ("terminate called without an active exception"; torch 2.13, 15 of 50 launches of four ranks).
_LAST_TENSOR = 0.1
_dropped_at = 0.0  # when they have had it, by the monotonic clock
_LAST_LEAVES = 5.0  # seconds that rank 0, which may hold the store, waits at clean-up for others


def cleanup() -> None:
    """Destroy the process group that `setup_torch` made; harmless when there is none.

    Collective: every rank calls this. It also runs at exit, so that a rank that fails
    closes its connections and the others learn of it.

    Raises:
        CheckpointError: A checkpoint that was written in the background has failed; the
            rest of clean-up is done.
    """
    world, args = find_world(), _state.args
    if world is None or args is None or is_forked():
        return
    line = calling_line()
    trouble = finish_all()
    world.kept.clear()
    _watch.leave_word("its script ended" if line == "?" else f"cleanup() at {line}")
    enter(None)
    _state.args = None
    atexit.unregister(cleanup)
    # Whatever fails, the rest is done; the last comes first.
    with ExitStack() as rest:
        rest.callback(_state.variables.close)
        rest.callback(_state.restore_hook)
        rest.callback(leave)
        rest.callback(_stop_responder, world)
        rest.callback(_destroy_group, world)
        if args.degrees is not None:
            import ezpz_tp  # noqa: PLC0415  # only where its groups are used

            rest.callback(ezpz_tp.destroy_tensor_parallel)
        if trouble is not None:
            raise trouble


def _when_the_function_ends() -> None:
    """End as a script does, where the rank is a function that multiprocessing runs."""
    error, world = sys.exc_info()[1], find_world()
    if world is not None and error is not None and not isinstance(error, SystemExit):
        _watch.report_failure(world, error, error.__traceback__)
    cleanup()


def _destroy_group(world: World) -> None:
    global _dropped_at
    if dist.is_initialized():
        _retired.append(dist.group.WORLD)
        dist.destroy_process_group()
        if world.info.world_size > 1:
            _dropped_at = time.monotonic() + _LAST_TENSOR


def _drop_retired() -> None:
    if _retired:
        time.sleep(max(0.0, _dropped_at - time.monotonic()))
        _retired.clear()


def _stop_responder(world: World) -> None:
    responder = _diagnosis.drop_responder()
    if responder is None:
        return
    _watch.release_sigterm()
    stay = world.info.rank == 0 and not _watch.has_failed()

    def leave() -> None:
        responder.stop()
        if not responder.lost and world.store.add("left", 1) == world.info.world_size:
            world.store.set("all left", "")
        if stay and not arrived(world.store, ["all left"], _LAST_LEAVES):
            # A connection that breaks under a sleeping responder costs a page of torch's warnings.
            responder.side.post(world.store, "closed")
            time.sleep(_watch.READING)

    try:
        within(_LAST_LEAVES + 1.0 if stay else 1.0, leave)
    except LOST as error:
        logger.debug("rank %d leaves before others: %s", world.info.rank, error)
    responder.side.wakeup.close()


def _leave_the_world_to_the_parent() -> None:
    """In a forked child, which must neither end the job nor close the group."""
    if _state.args is not None:
        _watch.release_sigterm()
        _state.restore_hook()


os.register_at_fork(after_in_child=_leave_the_world_to_the_parent)
