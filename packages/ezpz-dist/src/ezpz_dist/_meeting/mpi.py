"""The little that we need of MPI: one broadcast, and an end that no rank waits in for ever."""

from __future__ import annotations

import faulthandler
import importlib
import sys
import time
from types import ModuleType, TracebackType
from typing import TypeVar

from ezpz_dist._errors import SetupError
from ezpz_topo import RankInfo

T = TypeVar("T")

_LAST_WORDS = 0.5
"""Seconds for a traceback to reach the launcher; without, it was lost under load (MPICH 5.0.2)."""

_ours: ModuleType | None = None
"""mpi4py.MPI, when it was we who initialised MPI."""


def broadcast_once(value: T, info: RankInfo, timeout: float) -> T:
    """Return rank 0's small object on every rank, over MPI. Collective: every rank calls this.

    A rank that the others do not join within the timeout prints where it stands and ends
    with exit status 1: MPI itself would wait for ever, with the GIL held.

    Raises:
        SetupError: mpi4py cannot load an MPI, or its world is not the launcher's.
    """
    # The only watchdog that runs while a C library holds the GIL.
    faulthandler.dump_traceback_later(timeout, exit=True)
    try:
        return _broadcast(value, info)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _broadcast(value: T, info: RankInfo) -> T:
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
    result: T = comm.bcast(value, root=0)
    return result


def abort_on_uncaught() -> None:
    """After an uncaught exception end the whole job: the peers would wait for ever.

    Does nothing where the script initialised MPI itself, or nobody did. To be called
    after ``init_process_group``, whose own hook captures stderr while it calls ours.
    """
    mpi, previous = _ours, sys.excepthook
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
    if not already:
        # mpi4py finalises MPI after the interpreter has dropped its objects: by then a
        # failed rank's connections are closed, and its peers fail instead of waiting.
        _ours = mpi
    return mpi
