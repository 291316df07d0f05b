"""The same exchange over MPI, for those who ask for it: always timed, never a blocking call."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from ezpz_dist._errors import CollectiveError
from ezpz_dist._hangs.waiting import explain, waiting
from ezpz_dist._world import World

from .call import Call
from .exchange import Channel, exchange
from .members import Members

_SPIN = 1e-3
"""Seconds in which a waiting rank asks MPI again as soon as the others have had the core."""

_POLL = 1e-3

_TYPES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
}
_OPS = {"sum": "SUM", "min": "MIN", "max": "MAX", "product": "PROD"}

_opened: OverMpi | None = None

_abandoned: list[Any] = []
"""Operations that did not come about, with their memory: MPI may still write into it."""


def find_channel(
    operation: str,
    implementation: str,
    members: Members | None,
    group: dist.ProcessGroup | None,
) -> Channel | None:
    """Return what carries a collective; None where this process is the only rank.

    Args:
        operation: What is called: ``"barrier()"``.
        implementation: ``"torch"`` or ``"mpi"``.
        members: The ranks.
        group: What the caller gave; MPI has the world only.

    Raises:
        CollectiveError: MPI's world is not this job's, or another rank cannot take part.
        MismatchError: Not every rank uses MPI, where it is the first time that one does.
        ValueError: ``implementation`` is unknown, or ``"mpi"`` with a group.
    """
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
        if members is not None:
            exchange(Call(operation), members, refusal=refusal)
        raise refusal
    return None if members is None else _open(operation, members)


@dataclass(frozen=True, slots=True)
class OverMpi:
    """All ranks, over a communicator of our own.

    Attributes:
        world: What set-up decided.
        ranks: Their ranks.
        place: This rank.
        where: The host: MPI need not know of devices.
    """

    world: World
    ranks: Sequence[int]
    place: int
    where: torch.device
    _mpi: ModuleType
    _comm: Any

    def gather(self, mine: bytearray, what: str, timeout: float | None = None) -> bytearray:
        """Return every rank's bytes, of equal length, one after the other by rank."""
        every = bytearray(len(mine) * len(self.ranks))
        byte = self._mpi.BYTE
        request = self._comm.Iallgather([mine, byte], [every, byte])
        finish(request, (mine, every), f"{what} over MPI", self.world, timeout)
        return every

    def reduce(self, tensor: torch.Tensor, op: str, what: str) -> None:
        """Combine a contiguous tensor on the host over the ranks, in place."""
        mpi = self._mpi
        # By address: mpi4py would want numpy to see into a tensor.
        memory = mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
        spec = [memory, getattr(mpi, _TYPES[tensor.dtype])]
        request = self._comm.Iallreduce(mpi.IN_PLACE, spec, getattr(mpi, _OPS[op]))
        finish(request, tensor, f"{what} over MPI", self.world, None)


def finish(request: Any, memory: object, what: str, world: World, timeout: float | None) -> None:
    """Wait for a request of MPI's, at most so long.

    Args:
        request: An ``mpi4py.MPI.Request``.
        memory: What it reads and writes.
        what: The operation.
        world: The world.
        timeout: Seconds; None: the world's own.

    Raises:
        HangError: It is not done in time; names the ranks that have not come.
    """
    limit = world.timeout if timeout is None else timeout
    start = time.monotonic()
    with waiting(what, world):
        while not request.Test():
            waited = time.monotonic() - start
            if waited > limit:
                _abandoned.append((request, memory))
                raise explain(TimeoutError(f"not done after {limit:g} s"), what, world, waited)
            time.sleep(0 if waited < _SPIN else _POLL)


def _open(operation: str, members: Members) -> OverMpi:
    global _opened
    ours = _opened if _opened is not None and _opened.world is members.world else None
    if ours is not None and ours._mpi.Is_finalized():  # noqa: SLF001  # our own
        raise _ended(ours._mpi)  # noqa: SLF001
    # Once those who were missing have come after all, MPI is in step again.
    _abandoned[:] = [each for each in _abandoned if not each[0].Test()]
    if _abandoned:
        raise CollectiveError(
            f"{operation} with implementation='mpi' after one that not all ranks have come to yet: "
            "MPI cannot take it back; expected implementation='torch' until then"
        )
    if ours is not None:
        return ours
    # MPI may only now be initialised, and waits for all ranks, without a time-out.
    call = Call(f"{operation} with implementation='mpi', for the first time")
    exchange(call, members)
    mpi: ModuleType | None = None
    refusal: CollectiveError | None = None
    try:
        mpi = importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        refusal = CollectiveError(f"mpi4py cannot load an MPI ({error}); expected one; {_REMEDY}")
    else:
        refusal = _foreign(mpi, members)
    exchange(call, members, refusal=refusal)
    assert mpi is not None  # or the exchange would have raised
    # Of our own: the script's messages and ours must not meet.
    comm, request = mpi.COMM_WORLD.Idup()
    finish(request, comm, f"{call.name} over MPI", members.world, None)
    _opened = OverMpi(members.world, members.ranks, members.place, torch.device("cpu"), mpi, comm)
    return _opened


_REMEDY = "start the ranks with mpiexec, or leave implementation='mpi' out"


def _ended(mpi: ModuleType) -> CollectiveError:
    state = "was finalized" if mpi.Is_finalized() else "is not initialized"
    return CollectiveError(
        f"implementation='mpi' where MPI {state}; expected the script to leave that to mpi4py, or "
        "implementation='torch'"
    )


def _foreign(mpi: ModuleType, members: Members) -> CollectiveError | None:
    if mpi.Is_finalized() or not mpi.Is_initialized():
        # The next call would end the process.
        return _ended(mpi)
    comm, info = mpi.COMM_WORLD, members.world.info
    if (comm.rank, comm.size) == (info.rank, info.world_size):
        return None
    library = mpi.Get_library_version().splitlines()[0]
    return CollectiveError(
        f"mpi4py sees rank {comm.rank} of {comm.size} ({library}), set-up {info.rank} of "
        f"{info.world_size} ({info.launcher}); expected MPI's world to be this job's; {_REMEDY}"
    )
