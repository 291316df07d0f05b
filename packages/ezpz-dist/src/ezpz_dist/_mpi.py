"""MPI: a broadcast for the rendezvous, and an end that no rank waits in for ever."""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import json
import logging
import sys
import time
from types import FunctionType, ModuleType, TracebackType
from typing import TypeVar

from ezpz_topo import RankInfo, get_hostname

from ._address import SAY_AFTER, speaks
from ._errors import SetupError

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=tuple[str | int, ...])

_GRACE = 1.0
"""Seconds beyond the time-out for our own error, which says more than the watchdog."""

_MESSAGE = 4096
"""Bytes of the broadcast: all ranks must know how many before they know what."""

_LAST_WORDS = 0.5
"""Seconds for a traceback to reach the launcher; without, it was lost under load (MPICH 5.0.2)."""

_ours: ModuleType | None = None
"""mpi4py.MPI, when it was we who initialised MPI."""


def broadcast_once(value: T, info: RankInfo, timeout: float) -> T:
    """Return rank 0's texts and numbers on every rank, over MPI. Collective: every rank calls this.

    Where MPI itself blocks, as in MPI_Init when a rank never comes, no Python runs: the process
    then prints where it stands and ends with exit status 1, a second after the time-out.

    Raises:
        SetupError: mpi4py cannot load an MPI, its world is not the launcher's, or rank 0 has
            not sent anything in time. In that last case the whole job ends with this process.
    """
    deadline = time.monotonic() + timeout
    # The only watchdog that runs while a C library holds the GIL. What it prints is the names
    # of functions: so this one's name says who waits, and for what.
    words = (
        f"rank {info.rank} of {info.world_size} on {get_hostname()}: waits in MPI for the others"
    )
    code = _broadcast.__code__.replace(co_name=words[:99])
    watched = FunctionType(code, globals())
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
    while not request.Test():
        now = time.monotonic()
        if now >= deadline:
            # MPI_Finalize would wait for the broadcast.
            atexit.register(mpi.COMM_WORLD.Abort, 1)
            raise SetupError(
                f"rank {info.rank} of {info.world_size} on {get_hostname()} has waited {timeout:g} "
                "s in MPI for rank 0 to broadcast the address at which the ranks meet; expected "
                "rank 0 to call setup_torch too; look for where rank 0 stands, or for its error"
            )
        if now >= say_at:
            say_at = float("inf")
            if speaks(info):
                logger.warning(
                    "rank %d of %d on %s has waited %.0f s in MPI for rank 0 to broadcast the "
                    "address at which the ranks meet",
                    info.rank, info.world_size, get_hostname(), SAY_AFTER,
                )  # fmt: skip
        time.sleep(pause)
        pause = min(1.5 * pause, 0.01)
    return bytes(buffer)


def abort_on_uncaught(world_size: int) -> None:
    """After an uncaught exception end the whole job: peers and MPI_Finalize would wait for ever.

    Does nothing where MPI is not initialised, nor where it was by the script, for more ranks
    than ours. To be called after ``init_process_group``, whose own hook captures stderr while
    it calls ours.
    """
    mpi, previous = _ours or _the_scripts(world_size), sys.excepthook
    if mpi is None:
        return

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        previous(kind, value, trace)
        sys.stdout.flush()
        sys.stderr.flush()
        if mpi.Is_initialized() and not mpi.Is_finalized():
            # What the launcher has not passed on yet is lost when it ends the ranks.
            time.sleep(_LAST_WORDS)
            mpi.COMM_WORLD.Abort(1)

    sys.excepthook = hook


def _the_scripts(world_size: int) -> ModuleType | None:
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return None
    return mpi if mpi.COMM_WORLD.size == world_size > 1 else None


def _load() -> ModuleType:
    global _ours
    already = "mpi4py.MPI" in sys.modules
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
    if not already:
        # mpi4py finalises MPI after the interpreter has dropped its objects: by then a
        # failed rank's connections are closed, and its peers fail instead of waiting.
        _ours = mpi
    if not mpi.Is_initialized():
        # The script told mpi4py to leave that to it (mpi4py.rc), and then has not done it.
        mpi.Init_thread()
        _ours = mpi
        atexit.register(_finalize, mpi)
    return mpi


def _finalize(mpi: ModuleType) -> None:
    if not mpi.Is_finalized():
        mpi.Finalize()
