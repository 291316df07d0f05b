"""MPI: a broadcast for the rendezvous, collectives on request; no rank waits in it for ever."""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import json
import logging
import sys
import time
from dataclasses import dataclass
from types import FunctionType, ModuleType, TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ezpz_topo import RankInfo, get_hostname

from ._diagnosis import flush
from ._errors import CollectiveError, SetupError
from ._members import Call, Members, exchange
from ._watch import poll, waiting
from ._world import World

logger = logging.getLogger(__name__)


# The rendezvous: rank 0 tells the others where it is.

T = TypeVar("T", bound=tuple[str | int, ...])

SAY_AFTER = 10.0  # seconds of waiting after which one rank of each node says what it waits for
_GRACE = 1.0  # seconds beyond the time-out for our own error, which says more than the watchdog
_MESSAGE = 4096  # bytes of the broadcast: all ranks must know how many before they know what
_LAST_WORDS = 0.5  # seconds for a traceback to reach the launcher: under load it was lost (MPICH)


def speaks(info: RankInfo) -> bool:
    """Return whether it is this rank that says what its node waits for, which may be rank 0."""
    return info.local_rank == 0 or info.rank == 1


def broadcast_once(value: T, info: RankInfo, timeout: float) -> T:
    """Return rank 0's texts and numbers on every rank, over MPI. Collective."""
    # Where MPI itself blocks, as in MPI_Init when a rank never comes, no Python runs: the process
    # then prints where it stands and ends with exit status 1, a second after the time-out.
    deadline = time.monotonic() + timeout
    # The only watchdog that runs while a C library holds the GIL. What it prints is the names
    # of functions: so this one's name says who waits, and for what.
    who = f"rank {info.rank} of {info.world_size} on {get_hostname()}"
    words = f"{who}: waits in MPI for the others"
    watched = FunctionType(_broadcast.__code__.replace(co_name=words[:99]), globals())
    faulthandler.dump_traceback_later(timeout + _GRACE, exit=True)
    try:
        message = watched(json.dumps(value).encode(), info, deadline, timeout)
    finally:
        faulthandler.cancel_dump_traceback_later()
    result: T = tuple(json.loads(message))  # type: ignore[assignment]
    return result


def _broadcast(message: bytes, info: RankInfo, deadline: float, timeout: float) -> bytes:
    mpi = _load()
    comm = mpi.COMM_WORLD
    if (comm.rank, comm.size) != (info.rank, info.world_size):
        raise SetupError(
            f"mpi4py sees rank {comm.rank} of {comm.size}, the launcher ({info.launcher}) says "
            f"{info.rank} of {info.world_size}: mpi4py loaded another MPI "
            f"({mpi.Get_library_version().splitlines()[0]}) than the one whose mpiexec started "
            "this; expected one MPI; install mpi4py against the launcher's MPI, or start with "
            "ezpz-launch, which needs no MPI for this"
        )
    buffer = bytearray(message.ljust(_MESSAGE)[:_MESSAGE])
    request = comm.Ibcast([buffer, mpi.BYTE], root=0)
    pause, say_at = 1e-5, time.monotonic() + SAY_AFTER
    who = f"rank {info.rank} of {info.world_size} on {get_hostname()}"
    what = "rank 0 to broadcast the address at which the ranks meet"
    while not request.Test():
        now = time.monotonic()
        if now >= deadline:
            # MPI_Finalize would wait for the broadcast.
            atexit.register(mpi.COMM_WORLD.Abort, 1)
            raise SetupError(
                f"{who} has waited {timeout:g} s in MPI for {what}; expected rank 0 to call "
                "setup_torch too; look for where rank 0 stands, or for its error"
            )
        if now >= say_at:
            say_at = float("inf")
            if speaks(info):
                logger.warning("%s has waited %.0f s in MPI for %s", who, SAY_AFTER, what)
        time.sleep(pause)
        pause = min(1.5 * pause, 0.01)
    return bytes(buffer)


def find_running(world_size: int) -> Any:
    """Return mpi4py.MPI, ours or the script's, where it runs so many ranks; else None."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    runs = mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized()
    return mpi if runs and mpi.COMM_WORLD.size == world_size > 1 else None


def abort_on_uncaught(world_size: int) -> None:
    """After an uncaught exception end the whole job: peers and MPI_Finalize would wait for ever."""
    # To be called after init_process_group, whose own hook captures stderr while it calls ours.
    if (mpi := find_running(world_size)) is None:
        return
    previous = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        previous(kind, value, trace)
        flush()
        if mpi.Is_initialized() and not mpi.Is_finalized():
            # What the launcher has not passed on yet is lost when it ends the ranks.
            time.sleep(_LAST_WORDS)
            mpi.COMM_WORLD.Abort(1)

    sys.excepthook = hook


def _load() -> ModuleType:
    try:
        mpi = importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise SetupError(
            f"MASTER_ADDR and MASTER_PORT are not set and mpi4py cannot load an MPI ({error}); "
            "expected one of the two; start with ezpz-launch, or install an MPI (pip install mpich)"
        ) from error
    if mpi.Is_finalized():
        raise SetupError(
            "MPI was finalized before setup_torch, which needs it to tell the ranks where to meet; "
            "expected setup_torch before MPI.Finalize(); call it earlier, or start with ezpz-launch"
        )
    # mpi4py finalizes MPI after the interpreter has dropped its objects: by then a failed rank's
    # connections are closed, and its peers fail instead of waiting.
    if not mpi.Is_initialized():
        # The script told mpi4py to leave that to it (mpi4py.rc), and then has not done it.
        mpi.Init_thread()
        atexit.register(lambda: mpi.Is_finalized() or mpi.Finalize())
    return mpi


# Collectives over MPI, for those who ask for it: always timed, never a blocking call.

_TYPES = {
    torch.float32: "FLOAT", torch.float64: "DOUBLE", torch.int32: "INT32_T", torch.int64: "INT64_T",
}  # fmt: skip
_OPS = {"sum": "SUM", "min": "MIN", "max": "MAX", "product": "PROD"}

_REMEDY = "start the ranks with mpiexec, or leave implementation='mpi' out"
_abandoned: list[Any] = []  # operations that failed, with memory that MPI may still write into


@dataclass(frozen=True, slots=True, kw_only=True)
class OverMpi(Members):
    """All ranks, over a communicator of our own; from the host: MPI need not know of devices."""

    mpi: ModuleType
    comm: Any

    def gather(self, mine: bytearray, what: str, timeout: float | None = None) -> bytearray:
        every = bytearray(len(mine) * len(self.ranks))
        byte = self.mpi.BYTE
        request = self.comm.Iallgather([mine, byte], [every, byte])
        finish_request(request, (mine, every), f"{what} over MPI", self.world, timeout)
        return every

    def send(self, data: torch.Tensor, root: int, what: str) -> None:
        memory = self.mpi.buffer.fromaddress(data.data_ptr(), data.nbytes)
        request = self.comm.Ibcast([memory, self.mpi.BYTE], root=root)
        finish_request(request, data, f"{what} over MPI", self.world, None)

    def reduce(self, tensor: torch.Tensor, op: str, what: str) -> None:
        # By address: mpi4py would want numpy to see into a tensor.
        memory = self.mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
        spec = [memory, getattr(self.mpi, _TYPES[tensor.dtype])]
        request = self.comm.Iallreduce(self.mpi.IN_PLACE, spec, getattr(self.mpi, _OPS[op]))
        finish_request(request, tensor, f"{what} over MPI", self.world, None)


def find_channel(
    operation: str, implementation: str, members: Members | None, group: dist.ProcessGroup | None
) -> Members | None:
    """Return what carries a collective; None where this process is the only rank."""
    if implementation == "torch":
        return members
    refusal: ValueError | None = None
    if implementation != "mpi":
        refusal = ValueError(f"implementation {implementation!r}; expected 'torch' or 'mpi'")
    elif group is not None:
        refusal = ValueError(
            f"{operation} with implementation='mpi' and a group; expected group=None, because MPI "
            "knows nothing of torch's groups; leave one of the two out"
        )
    if refusal is not None:
        exchange(Call(operation), members, refusal=refusal)
    return None if members is None else _open(operation, members)


def finish_request(
    request: Any, memory: object, what: str, world: World, timeout: float | None
) -> None:
    """Wait for a request of MPI's, at most so long (None: the world's time-out)."""
    with waiting(what, world):
        try:
            poll(request.Test, world.timeout if timeout is None else timeout, what, world)
        except CollectiveError:
            _abandoned.append((request, memory))
            raise


def _open(operation: str, members: Members) -> OverMpi:
    ours: OverMpi | None = members.world.kept.get("mpi")
    if ours is not None and (refusal := _foreign(ours.mpi, members)) is not None:
        raise refusal
    # Once those who were missing have come after all, MPI is in step again.
    _abandoned[:] = [each for each in _abandoned if not each[0].Test()]
    if _abandoned:
        raise CollectiveError(
            f"{operation} with implementation='mpi' after one that not all ranks have come to yet: "
            "MPI cannot take it back; expected implementation='torch' until then"
        )
    if ours is not None:
        return ours
    # MPI may only now be initialized, and waits for all ranks, without a time-out.
    call = Call(f"{operation} with implementation='mpi', for the first time")
    exchange(call, members)
    mpi: Any = None
    try:
        mpi = importlib.import_module("mpi4py.MPI")
        refusal = _foreign(mpi, members)
    except (ImportError, RuntimeError) as error:
        refusal = CollectiveError(f"mpi4py cannot load an MPI ({error}); expected one; {_REMEDY}")
    exchange(call, members, refusal=refusal)
    # Of our own: the script's messages and ours must not meet.
    comm, request = mpi.COMM_WORLD.Idup()
    finish_request(request, comm, f"{call.name} over MPI", members.world, None)
    all_ranks = members.world, None, members.ranks, members.place, torch.device("cpu")
    ours = members.world.kept["mpi"] = OverMpi(*all_ranks, mpi=mpi, comm=comm)
    return ours


def _foreign(mpi: ModuleType, members: Members) -> CollectiveError | None:
    if mpi.Is_finalized() or not mpi.Is_initialized():  # the next call would end the process
        state = "was finalized" if mpi.Is_finalized() else "is not initialized"
        return CollectiveError(
            f"implementation='mpi' where MPI {state}; expected the script to leave that to mpi4py, "
            "or implementation='torch'"
        )
    comm, info = mpi.COMM_WORLD, members.world.info
    if (comm.rank, comm.size) == (info.rank, info.world_size):
        return None
    library = mpi.Get_library_version().splitlines()[0]
    return CollectiveError(
        f"mpi4py sees rank {comm.rank} of {comm.size} ({library}), set-up {info.rank} of "
        f"{info.world_size} ({info.launcher}); expected MPI's world to be this job's; {_REMEDY}"
    )
