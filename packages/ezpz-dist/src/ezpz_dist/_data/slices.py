"""Each rank's own slice of one file, by MPI-IO or by plain reads."""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from collections.abc import Sequence
from typing import IO, Any, cast

import torch

from ezpz_dist._collectives.gather import all_gather_object
from ezpz_dist._collectives.members import Members, find_members
from ezpz_dist._collectives.over_mpi import find_channel, finish
from ezpz_dist._errors import DataError, MismatchError
from ezpz_dist._ranks import fold
from ezpz_topo import get_hostname, get_rank

from .share import checked

_PIECE = 1 << 30
"""Bytes of one read: MPI counts in 32-bit ints."""


def read_share(
    path: str | os.PathLike[str],
    dtype: torch.dtype,
    shape: Sequence[int],
    *,
    offset: int = 0,
    share: tuple[int, int] | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """Return this rank's rows of an array in a file of raw numbers.

    Collective: every rank calls this. Data-parallel ranks get consecutive rows, the first
    ones a row more where they cannot be divided; no rank reads more than its own.

    Args:
        path: A file in this machine's byte order, such as numpy's ``tofile`` writes; with
            ``"posix"`` also a URL that fsspec knows.
        dtype: Of its numbers.
        shape: Of the whole array; the first may be -1: as many rows as the file has.
        offset: Bytes before the array.
        share: (which, of how many); default: `ezpz_dist.data_share`.
        implementation: ``"mpi"``: MPI-IO, in which the ranks' reads become few large ones
            (``MPI_File_iread_at_all``). ``"posix"``: each reads by itself. None: MPI-IO
            where this job's MPI is running already.

    Returns:
        Dtype ``dtype``, shape [rows of this rank, *shape[1:]], on the host.

    Raises:
        CollectiveError: ``"mpi"``, and there is no MPI for these ranks.
        DataError: On every rank: a rank cannot read its part, or the file is too short.
        MismatchError: The ranks chose different implementations.
        NotSetUpError: There are several ranks and `setup_torch` was not called.
        ValueError: ``implementation`` is unknown, or ``shape`` or ``offset`` are none.
    """
    name = os.fspath(path)
    row = dtype.itemsize * torch.Size(shape[1:]).numel() if len(shape) else 0
    if row < 1 or shape[0] < -1 or offset < 0:
        raise ValueError(f"shape {tuple(shape)}, offset {offset}; expected rows that hold bytes")
    members = find_members("read_share()", None)
    by = implementation or ("mpi" if _mpi_is_running(members) else "posix")
    if by not in ("mpi", "posix"):
        raise ValueError(f"implementation {by!r}; expected 'mpi', 'posix' or None")
    which, count = checked(share)
    rows, start, trouble = 0, 0, ""
    try:
        rows, extra = divmod(_rows(name, shape[0], row, offset), count)
        start = which * rows + min(which, extra)
        rows += which < extra
    except (OSError, ImportError, ValueError, DataError) as error:
        trouble = _words(name, error)
    most = _agree(trouble, by, rows * row)
    part = torch.empty(rows, *shape[1:], dtype=dtype)
    begin = offset + start * row
    try:
        if by == "mpi" and members is not None:
            _read_over_mpi(name, part, begin, -(-most // _PIECE), members)
        else:
            with _open(name) as file:
                file.seek(begin)
                _fill(file, part)
    except (OSError, ImportError, ValueError, DataError) as error:
        trouble = _words(name, error)
    _agree(trouble, by)
    return part


def _rows(name: str, asked: int, row: int, offset: int) -> int:
    with _open(name) as file:
        size = file.seek(0, os.SEEK_END)
    there = max(0, size - offset)
    if asked == -1:
        if there % row:
            raise DataError(f"{there} bytes after offset {offset}; expected rows of {row} bytes")
        return there // row
    if there < asked * row:
        raise DataError(
            f"it has {size} bytes; expected {offset + asked * row}: offset {offset} and {asked} "
            f"rows of {row}"
        )
    return asked


def _memory(part: torch.Tensor) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * part.nbytes).from_address(part.data_ptr())


def _fill(file: IO[bytes], part: torch.Tensor) -> None:
    if part.nbytes == 0:
        return
    view, done = memoryview(_memory(part)).cast("B"), 0
    while done < len(view):
        got: int = cast("Any", file).readinto(view[done : done + _PIECE])
        if not got:
            raise DataError(f"it ended {len(view) - done} bytes early; expected it not to change")
        done += got


def _read_over_mpi(
    name: str, part: torch.Tensor, begin: int, rounds: int, members: Members
) -> None:
    # Has MPI initialised if need be, on all ranks and in time, and its world compared.
    find_channel("read_share()", "mpi", members, None)
    mpi: Any = importlib.import_module("mpi4py.MPI")
    try:
        file = mpi.File.Open(mpi.COMM_WORLD, name, mpi.MODE_RDONLY)
        try:
            # Collective reads: as many on each rank as on the one with most.
            for number in range(rounds):
                at = min(number * _PIECE, part.nbytes)
                size = min(_PIECE, part.nbytes - at)
                # By address: mpi4py would want numpy to see into a tensor.
                memory = mpi.buffer.fromaddress(part.data_ptr() + at, size)
                request = file.Iread_at_all(begin + at, [memory, size, mpi.BYTE])
                finish(request, part, f"read_share({name}) over MPI", members.world, None)
        finally:
            file.Close()
    except mpi.Exception as error:
        raise DataError(str(error)) from error


def _mpi_is_running(members: Members | None) -> bool:
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if members is None or mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return False
    return int(mpi.COMM_WORLD.size) == members.world.info.world_size


def _agree(trouble: str, by: str, nbytes: int = 0) -> int:
    """Return the most bytes of any rank; raise on every rank what any of them could not do."""
    every = all_gather_object((trouble, by, nbytes))
    if failed := [words for words, _, _ in every if words]:
        more = f" (and {len(failed) - 1} ranks more)" if len(failed) > 1 else ""
        raise DataError(failed[0] + more)
    if ranks := [rank for rank, (_, other, _) in enumerate(every) if other != every[0][1]]:
        raise MismatchError(
            f"read_share() by {every[0][1]!r} on rank 0 and by {every[ranks[0]][1]!r} on ranks "
            f"{fold(ranks)}; expected one; give implementation= on every rank",
            ranks,
        )
    most: int = max(each for _, _, each in every)
    return most


def _words(name: str, error: Exception) -> str:
    return (
        f"rank {get_rank()} on {get_hostname()} cannot read its share of {name}: "
        f"{type(error).__name__}: {error}"
    )


def _open(name: str) -> IO[bytes]:
    if "://" in name:
        return cast("IO[bytes]", importlib.import_module("fsspec").open(name, "rb").open())
    return open(name, "rb", buffering=0)
