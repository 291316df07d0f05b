"""Run a function once per rank, on ranks of this machine that really communicate (gloo)."""

from __future__ import annotations

import atexit
import functools
import itertools
import multiprocessing
import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from ezpz_tp._errors import DegreeError, ParallelError
from ezpz_tp._ranks import RankLayout

from ._pickling import dump_call
from ._worker import Job, RankError, serve

Result = TypeVar("Result")

_PROCESS_NAME = "ezpz-rank"


def run_ranks(
    function: Callable[..., Result],
    world_size: int,
    *args: Any,
    tensor: int | None = None,
    context: int = 1,
    data: int | None = None,
    pipeline: int = 1,
    also: Iterable[tuple[str, ...]] = (),
    initialize: bool = True,
    timeout: float = 60.0,
) -> list[Result]:
    """Call ``function(*args)`` on every one of ``world_size`` ranks and return the results by rank.

    The ranks are processes, which are kept for the next call. They come from a server that has
    only imported torch, and so also work where the calling process uses a GPU. In each of them
    torch.distributed is initialized with gloo and the default state by
    `initialize_tensor_parallel`. Both are new for every call, torch's generator is seeded with 0,
    and `get_rng_tracker` has no streams.

    Arguments, results and errors are pickled. The function may be a local one or a lambda, but
    classes have to be at the top level of a module or of a script, not of a notebook. A script
    needs ``if __name__ == "__main__":`` around the call, as always with processes.

    Args:
        function: What every rank runs. It finds its rank by `get_tensor_parallel_rank` and the
            like: a default state is active in it.
        world_size: Number of ranks.
        *args: Passed on, the same to every rank.
        tensor: Degree of tensor parallelism; what the other degrees leave when None.
        context: Degree of context parallelism.
        data: Degree of data parallelism; what the other degrees leave when None.
        pipeline: Degree of pipeline parallelism.
        also: Groups that span several axes, for example ``[("tensor", "pipeline")]``.
        initialize: False leaves the call to `initialize_tensor_parallel` to ``function``.
        timeout: Seconds for the whole call.

    Returns:
        What ``function`` returned, by rank.

    Raises:
        DegreeError: The degrees do not fit the world size.
        ParallelError: A script calls it without ``if __name__ == "__main__":``.
        TimeoutError: Some rank did not finish in time; says which, and where it stood.
        RankError: A rank's process ended, or what it raised cannot be pickled.
        Exception: What ``function`` raised on the rank that failed first, with its rank as a
            note. The other ranks are ended.
    """
    if multiprocessing.current_process().name == _PROCESS_NAME:
        raise ParallelError(
            "run_ranks was called on a rank, which imports the program that defines its function; "
            'call it below `if __name__ == "__main__":`'
        )
    if tensor is None:
        tensor = max(world_size // (context * pipeline * (data or 1)), 1)
    layout = RankLayout(world_size=world_size, tensor=tensor, context=context, pipeline=pipeline)
    if data is not None and data != layout.data:
        raise DegreeError(
            f"data={data}, but world_size={world_size}, tensor={tensor}, context={context} and "
            f"pipeline={pipeline} leave {layout.data}; leave tensor or data out"
        )
    call = dump_call(function, args)
    folder = _folder() / str(next(_calls))
    folder.mkdir()
    try:
        workers = _take_workers(world_size)
        for rank, worker in enumerate(workers):
            store = str(folder / "store")
            stack = str(folder / f"stack{rank}")
            job = Job(call, rank, layout, initialize, tuple(also), timeout, store, stack)
            worker.connection.send(job)
        results = _collect_results(workers, timeout, folder)
        for worker in workers:
            worker.connection.send("leave the groups")
    except BaseException:
        _end_workers()
        raise
    return results


@dataclass(frozen=True, slots=True)
class _Worker:
    process: BaseProcess
    connection: Connection


_workers: list[_Worker] = []
"""As many as the largest call needed; a smaller call uses the first of them."""
_calls = itertools.count()


@functools.cache
def _folder() -> Path:
    """Make the folder of all calls; removed at exit, as a store looks for its file at its end."""
    folder = tempfile.mkdtemp(prefix="ezpz-ranks-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@functools.cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    # Optimizers import torch._dynamo, which takes longer than torch itself.
    context.set_forkserver_preload(["ezpz_tp.testing._worker", "torch._dynamo", "pytest"])
    return context


def _take_workers(count: int) -> list[_Worker]:
    if not all(worker.process.is_alive() for worker in _workers):
        _end_workers()
    while len(_workers) < count:
        _workers.append(_start_worker())
    return _workers[:count]


def _start_worker() -> _Worker:
    connection, theirs = multiprocessing.Pipe()
    process = _context().Process(target=serve, args=(theirs,), name=_PROCESS_NAME, daemon=True)
    # Without a main module: multiprocessing would execute it (pytest) in each process. A worker
    # imports it for functions that are from there.
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        process.start()
    finally:
        sys.modules["__main__"] = main
    theirs.close()
    return _Worker(process, connection)


def _end_workers() -> None:
    for worker in _workers:
        worker.process.kill()
    for worker in _workers:
        worker.process.join()
        worker.connection.close()
    _workers.clear()


def _collect_results(workers: list[_Worker], timeout: float, folder: Path) -> list[Any]:
    deadline = time.monotonic() + timeout
    running = {worker.connection: rank for rank, worker in enumerate(workers)}
    results: dict[int, Any] = {}
    while running:
        ready = wait(list(running), max(deadline - time.monotonic(), 0))
        if not ready:
            raise _timeout_error(sorted(running.values()), len(workers), timeout, folder)
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = running.pop(connection)
            results[rank] = _receive_result(rank, workers)
    return [results[rank] for rank in range(len(workers))]


def _receive_result(rank: int, workers: list[_Worker]) -> Any:
    """Return what a rank returned, or raise what it raised."""
    try:
        is_result, value = pickle.loads(workers[rank].connection.recv_bytes())  # noqa: S301
    except (EOFError, OSError):
        raise _ended_error(rank, workers[rank]) from None
    if is_result:
        return value
    for other, worker in enumerate(workers):
        if _has_ended(worker):
            # The error says only that the connection to that rank is lost.
            raise _ended_error(other, worker)
    raise value


def _has_ended(worker: _Worker) -> bool:
    # A process that ends closes this connection before those to other ranks, which are newer.
    try:
        while worker.connection.poll():
            worker.connection.recv_bytes()
    except (EOFError, OSError):
        return True
    return False


def _ended_error(rank: int, worker: _Worker) -> RankError:
    worker.process.join()
    return RankError(f"rank {rank} ended with status {worker.process.exitcode}")


def _timeout_error(
    unfinished: list[int], world_size: int, timeout: float, folder: Path
) -> TimeoutError:
    stacks = ""
    for rank in unfinished:
        file = folder / f"stack{rank}"
        stack = "(it had not begun)\n"
        if file.exists():
            stack = file.read_text()
        stacks += f"\nrank {rank}:\n{stack}"
    ranks = ", ".join(str(rank) for rank in unfinished)
    return TimeoutError(
        f"of {world_size} ranks, {ranks} did not finish within {timeout:g} s. Either a collective "
        "that some ranks call and others do not, or timeout= is too short. They stood at:" + stacks
    )
