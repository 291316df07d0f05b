"""One file for a node or a job: each rank its slice, or one rank reads for its node."""

from __future__ import annotations

import ctypes
import importlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from io import RawIOBase
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist

from ezpz_device import as_dtype
from ezpz_topo import get_hostname, get_rank

from ._collectives import all_gather_object, broadcast
from ._data import check_share
from ._errors import CollectiveError, DataError
from ._members import Call, Members, exchange, find_members
from ._mpi import find_channel, find_running, finish_request
from ._objects import dump, is_plain, receive_object, send_object
from ._watch import waiting
from ._world import current_world

# Each rank's own slice of one file, by MPI-IO or by plain reads.

_PIECE = 1 << 30  # bytes of one read: MPI counts in 32-bit ints


def read_share(
    path: str | os.PathLike[str],
    dtype: str | torch.dtype,
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
        path: A file in this machine's byte order, such as numpy's ``tofile`` writes.
        dtype: Of its numbers; also by name, such as ``"int32"``.
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
        ValueError: ``dtype`` or ``implementation`` is unknown, or ``shape`` or ``offset`` are none.
    """
    name = os.fspath(path)
    dtype = as_dtype(dtype)
    row_bytes = 0
    if len(shape) > 0:
        row_bytes = dtype.itemsize * math.prod(shape[1:])
    if row_bytes < 1 or shape[0] < -1 or offset < 0:
        raise ValueError(f"shape {tuple(shape)}, offset {offset}; expected rows that hold bytes")
    members = find_members("read_share()", None)
    if implementation is None:
        is_running = members is not None and find_running(members.size)
        implementation = "mpi" if is_running else "posix"
    if implementation not in ("mpi", "posix"):
        raise ValueError(f"implementation {implementation!r}; expected 'mpi', 'posix' or None")
    which, count = check_share(share)
    exchange(Call(f"read_share(implementation={implementation!r})"), members)
    with _raise_on_all(name):
        rows, extra = divmod(_count_rows(name, shape[0], row_bytes, offset), count)
        start = which * rows + min(which, extra)
        if which < extra:
            rows += 1
    part = torch.empty(rows, *shape[1:], dtype=dtype)
    begin = offset + start * row_bytes
    with _raise_on_all(name):
        if implementation == "mpi" and members is not None:
            _read_over_mpi(name, part, begin, members)
        else:
            with open(name, "rb", buffering=0) as file:
                file.seek(begin)
                _fill(file, part)
    return part


@contextmanager
def _raise_on_all(name: str) -> Iterator[None]:
    """Raise on every rank, at the end of a block, what any of them could not do."""
    failure = ""
    cause = None
    try:
        yield
    except CollectiveError:  # the others have it too
        raise
    except Exception as error:  # noqa: BLE001 - MPI's own, say: the others wait for this one
        cause = error
        this_rank = f"rank {get_rank()} on {get_hostname()}"
        failure = f"{this_rank} cannot read its share of {name}: {type(error).__name__}: {error}"
    failures = [each for each in all_gather_object(failure) if each]
    if len(failures) > 1:
        raise DataError(f"{failures[0]} (and {len(failures) - 1} ranks more)") from cause
    if failures:
        raise DataError(failures[0]) from cause


def _count_rows(name: str, requested: int, row_bytes: int, offset: int) -> int:
    """Return the rows of an array, having made sure that the file has them."""
    size = os.path.getsize(name)
    available = max(0, size - offset)
    if requested == -1:
        if available % row_bytes:
            raise DataError(
                f"{available} bytes after offset {offset}; expected rows of {row_bytes} bytes"
            )
        return available // row_bytes
    if available < requested * row_bytes:
        raise DataError(
            f"it has {size} bytes; expected {offset + requested * row_bytes}: offset {offset} and "
            f"{requested} rows of {row_bytes}"
        )
    return requested


def _fill(file: RawIOBase, part: torch.Tensor) -> None:
    if part.nbytes == 0:
        return
    memory = (ctypes.c_char * part.nbytes).from_address(part.data_ptr())
    view = memoryview(memory).cast("B")
    done = 0
    while done < len(view):
        count = file.readinto(view[done : done + _PIECE])
        if not count:
            raise DataError(f"it ended {len(view) - done} bytes early; expected it not to change")
        done += count


def _read_over_mpi(name: str, part: torch.Tensor, begin: int, members: Members) -> None:
    # Has MPI initialised if need be, on all ranks and in time, and its world compared.
    find_channel("read_share()", "mpi", members, None)
    # Collective reads: as many on each rank as on the one with most.
    largest = max(all_gather_object(part.nbytes))
    rounds = math.ceil(largest / _PIECE)
    mpi: Any = importlib.import_module("mpi4py.MPI")
    try:
        file = mpi.File.Open(mpi.COMM_WORLD, name, mpi.MODE_RDONLY)
        try:
            for number in range(rounds):
                at = min(number * _PIECE, part.nbytes)
                size = min(_PIECE, part.nbytes - at)
                # By address: mpi4py would want numpy to see into a tensor.
                memory = mpi.buffer.fromaddress(part.data_ptr() + at, size)
                request = file.Iread_at_all(begin + at, [memory, size, mpi.BYTE])
                finish_request(request, part, f"read_share({name}) over MPI", members.world, None)
        finally:
            file.Close()
    except mpi.Exception as error:
        raise DataError(str(error)) from error


# One rank of a node reads, and the others of the node have it from there.

T = TypeVar("T")


def node_group() -> dist.ProcessGroup | None:
    """Return the group of the ranks on this rank's host; made once, over gloo.

    Collective on each node: every rank of it calls this. None in a process that was never set
    up. Its ranks and collectives are on the host, whatever the world's backend is.

    Raises:
        NotSetUpError: There are several ranks and `setup_torch` was not called.
    """
    world = current_world("node_group()")
    if world is None:
        return None
    if "node" not in world.kept:
        import ezpz_tp  # noqa: PLC0415 - only where its groups are used

        host = world.hosts[world.info.rank]
        timeout = timedelta(seconds=world.timeout)
        ranks = [rank for rank, name in enumerate(world.hosts) if name == host]
        with waiting("node_group()", world):  # the node's ranks alone make it
            world.kept["node"] = ezpz_tp.make_group(ranks, "gloo", timeout)
    return cast("dist.ProcessGroup", world.kept["node"])


def scatter_from_one_reader(
    read: Callable[[], Sequence[T]], *, group: dist.ProcessGroup | None = None
) -> T:
    """Let the first rank of a group read for all of it; return this rank's part.

    Collective: every rank of the group calls this.

    Args:
        read: Called on the first rank only; returns one part for each rank, by place in the
            group: tensors (sent without pickling), or anything that can be pickled.
        group: Who shares a reader; default: this node's ranks (`node_group`).

    Returns:
        This rank's part; a tensor lies on the host, or where this rank computes if it lay on
        the reader's device.

    Raises:
        DataError: On every rank of the group: ``read`` failed, or returned another number of
            parts or one that cannot be pickled. The reader's own exception is its cause there.
        NotSetUpError: There are several ranks and `setup_torch` was not called.
    """
    if group is None:
        group = node_group()
    members = find_members(_SCATTER, group)
    if members is None:
        return cast("T", _read_parts(read, 1, "rank 0")[0].value)
    reader = members.ranks[0]
    parts: list[_Part] = []
    failure: DataError | None = None
    if members.place == 0:
        try:
            name = f"rank {reader} on {members.world.hosts[reader]}"
            parts = _read_parts(read, len(members.ranks), name)
        except DataError as error:
            failure = error
    others_failure = broadcast(failure, reader, members.group)
    if others_failure is not None:
        raise failure or others_failure
    with waiting(_SCATTER, members.world):
        if members.place > 0:
            return cast("T", receive_object(reader, members.where, members.group))
        for rank, part in zip(members.ranks[1:], parts[1:], strict=True):
            send_object(part.value, rank, members.where, members.group, part.pickled)
    return cast("T", parts[0].value)


_SCATTER = "scatter_from_one_reader()"


class _Part(NamedTuple):
    value: Any
    pickled: bytes | None  # None: sent as it is


def _read_parts(read: Callable[[], Any], count: int, name: str) -> list[_Part]:
    """Read, and pickle what has to be, so that no rank fails while others receive."""
    try:
        values = read()
        if not isinstance(values, Sequence):
            raise DataError(f"it returned a {type(values).__name__}; {_expect(count)}")
        if len(values) != count:
            raise DataError(f"it returned {len(values)} parts; {_expect(count)}")
        parts = [_Part(values[0], None)]
        for value in values[1:]:
            if is_plain(value):
                parts.append(_Part(value, None))
            else:
                parts.append(_Part(value, dump(value)))
    except Exception as error:  # whatever it is, every rank raises it
        text = f"{type(error).__name__}: {error}"
        if type(error) is DataError:
            text = str(error)
        raise DataError(f"{_SCATTER}: the reader, {name}, failed: {text}") from error
    return parts


def _expect(count: int) -> str:
    return f"expected a list, one part for each of {count} ranks"
