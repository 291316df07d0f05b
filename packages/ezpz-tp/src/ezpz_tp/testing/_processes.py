"""Ranks as processes that are kept for the next call."""

from __future__ import annotations

import atexit
import inspect
import io
import multiprocessing
import pickle
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from ezpz_tp._groups.ranks import RankLayout

from ._failure import RankError, not_in_time, with_rank
from ._worker import Job, Report, serve

Result = TypeVar("Result")

_AFTERMATH = 2.0
"""Seconds in which the ranks beside one that failed may report, and so be kept."""


def run_in_processes(
    function: Callable[..., Result],
    layout: RankLayout,
    args: tuple[Any, ...],
    also: tuple[tuple[str, ...], ...] | None,
    timeout: float,
) -> list[Result]:
    """Call ``function(*args)`` once per rank in processes; see `run_ranks`."""
    try:
        payload, modules = _pickled((function, args))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise TypeError(
            f"{function!r} and its arguments go to other processes, but do not pickle: {error}; "
            "use a function at the top level of a module and arguments that pickle, "
            "or threads (in_processes=False)"
        ) from error
    # What is pickled by its name in the program is looked for there by the other processes.
    if b"__main__" in payload and not _is_importable(sys.modules["__main__"]):
        raise TypeError(
            f"{function!r} or an argument is defined where other processes cannot import it "
            "(python -c, standard input or a notebook): put it in a file that can be imported, "
            "or use threads (in_processes=False)"
        )
    with _lock:
        workers = _pool.take(layout.world_size)
        place = _pool.place()
        jobs = [
            Job(rank, layout, place, also, timeout, tuple(sys.path), modules, payload)
            for rank in range(layout.world_size)
        ]
        try:
            for worker, job in zip(workers, jobs, strict=True):
                worker.start(job)
            reports = _collect(workers, jobs, timeout)
        finally:
            _pool.drop_busy()
    return [pickle.loads(r.result) for r in reports]  # noqa: S301 - from our own processes


def _collect(workers: list[_Worker], jobs: list[Job], timeout: float) -> list[Report]:
    """Wait for every rank's report; raise what the first that failed raised."""
    world_size = len(workers)
    running = {worker.connection: rank for rank, worker in enumerate(workers)}
    reports: dict[int, Report] = {}
    deadline, failed = time.monotonic() + timeout, False
    while running and (ready := wait(list(running), max(deadline - time.monotonic(), 0))):
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = running.pop(connection)
            reports[rank] = workers[rank].report(rank)
            if reports[rank].error is not None and not failed:
                failed, deadline = True, time.monotonic() + _AFTERMATH
    for rank, report in reports.items():
        if report.error is None:
            workers[rank].connection.send(None)  # nobody reads from its groups any more
    if failed:
        first = min((r for r in reports.values() if r.error is not None), key=lambda r: r.when)
        raise _unpack(first, world_size)
    if running:
        stacks = {rank: jobs[rank].read_stack() for rank in sorted(running.values())}
        raise not_in_time(timeout, world_size, stacks)
    return [reports[rank] for rank in range(world_size)]


def _unpack(report: Report, world_size: int) -> BaseException:
    assert report.error is not None
    try:
        error = pickle.loads(report.error)  # noqa: S301 - from our own processes
    except Exception as reason:  # noqa: BLE001 - whatever its __reduce__ or __init__ does
        error = RankError(f"what it raised does not unpickle here ({reason!r})")
    assert isinstance(error, BaseException)
    return with_rank(error, report.rank, world_size, report.text)


def _pickled(value: object) -> tuple[bytes, tuple[tuple[str, str], ...]]:
    """Pickle, and return name and file of the modules that its functions and classes come from.

    A test's module has a name that only its test runner can import: ranks load it from its file.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(value)
    return buffer.getvalue(), tuple(pickler.modules.items())


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer)
        self.modules: dict[str, str] = {}

    def reducer_override(self, value: Any) -> Any:
        """Note where a value comes from; pickle it as usual."""
        owner = value if inspect.isroutine(value) or inspect.isclass(value) else type(value)
        name = getattr(owner, "__module__", None)
        file = getattr(sys.modules.get(name or ""), "__file__", None)
        if file and name not in {None, "__main__", "builtins"}:
            self.modules[str(name)] = str(file)
        return NotImplemented


def _is_importable(program: ModuleType) -> bool:
    """Whether multiprocessing can give a new process the module that this one was started with."""
    file = getattr(program, "__file__", None)
    return program.__spec__ is not None or (file is not None and Path(file).is_file())


class _Worker:
    """One process, and our end of the pipe to it."""

    def __init__(self, context: BaseContext) -> None:
        self.connection, theirs = context.Pipe()
        self.busy = False
        self.owes_word = False  # that it has let go of its last job's groups
        self.process: BaseProcess = context.Process(  # type: ignore[attr-defined]
            target=serve, args=(theirs,), name="ezpz-rank", daemon=True
        )
        self.process.start()
        theirs.close()

    def start(self, job: Job) -> None:
        self.busy = self.owes_word = True
        self.connection.send(job)

    def is_ready(self) -> bool:
        """Whether it lives, and has let go of its last job; waits a moment for that."""
        try:
            if self.owes_word and self.connection.poll(_AFTERMATH):
                self.connection.recv()
                self.owes_word = False
        except (EOFError, OSError):
            return False
        return self.process.is_alive() and not self.owes_word

    def report(self, rank: int) -> Report:
        try:
            report = self.connection.recv()
        except (EOFError, OSError):  # and stays busy: it is of no more use
            self.process.join(5)
            error = RankError(f"rank {rank} ended with status {self.process.exitcode}")
            # Before whatever its peers say of the connections that it left.
            return Report(rank, 0.0, error=pickle.dumps(error))
        assert isinstance(report, Report)
        self.busy = False
        return report

    def end(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.join(5)


class _Pool:
    """Processes, as many as the largest call needed; a smaller call uses the first of them."""

    def __init__(self) -> None:
        self.workers: list[_Worker] = []
        self.directory = ""
        self.calls = 0

    def take(self, count: int) -> list[_Worker]:
        """Return that many idle processes."""
        for worker in self.workers:
            worker.busy = not worker.is_ready()
        self.drop_busy()
        while len(self.workers) < count:
            self.workers.append(_Worker(_context()))
        return self.workers[:count]

    def place(self) -> str:
        """Return a new path for the files of one call.

        They stay until the end: a store that is let go of looks for its file once more.
        """
        if not self.directory:
            self.directory = tempfile.mkdtemp(prefix="ezpz-ranks-")
            atexit.register(self.end)
        self.calls += 1
        return str(Path(self.directory, str(self.calls)))

    def drop_busy(self) -> None:
        """End the processes that did not come to the end of their job."""
        for worker in self.workers:
            if worker.busy:
                worker.end()
        self.workers = [worker for worker in self.workers if not worker.busy]

    def end(self) -> None:
        """End all processes."""
        for worker in self.workers:
            worker.end()
        self.workers = []
        shutil.rmtree(self.directory, ignore_errors=True)


def _context() -> BaseContext:
    """A server that has torch loaded and forks, where there is one."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # Each new process imports the main module, so its package is best there before; and
    # torch._dynamo, longer than torch itself, once it makes an optimizer or counts collectives.
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    program = [main.name.partition(".")[0]] if main is not None else []
    context.set_forkserver_preload(["ezpz_tp.testing._worker", "torch._dynamo", *program])
    return context


_pool = _Pool()
_lock = threading.Lock()
