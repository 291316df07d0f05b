"""Run a function once per rank, on ranks of this machine that really communicate (gloo)."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib.util
import inspect
import io
import itertools
import multiprocessing
import os
import pickle
import queue
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore, PrefixStore  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode

from ezpz_tp._current import destroy_tensor_parallel, initialize_tensor_parallel, use_state
from ezpz_tp._errors import DegreeError, ParallelError
from ezpz_tp._random import get_rng_tracker
from ezpz_tp._ranks import AXES, RankLayout
from ezpz_tp._state import ParallelState

# What a rank that failed leaves behind.

MARGIN = 5.0
"""Seconds more for a collective than for the call, so that a hang is reported by the latter."""


class RankError(ParallelError):
    """A rank ended without a word, or raised what cannot be sent to another process."""


def with_rank(error: BaseException, rank: int, world_size: int, text: str = "") -> BaseException:
    """Note on an error which rank raised it, and its traceback there when given as text."""
    note = f"raised by rank {rank} of {world_size}"
    error.add_note(f"{note}:\n{text}" if text else note)
    return error


def release_frames(error: BaseException) -> None:
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        waiting += [one.__cause__, one.__context__]


def not_in_time(timeout: float, world_size: int, where: dict[int, str]) -> TimeoutError:
    """The error for ranks that did not finish; ``where`` is the stack of each."""
    ranks = ", ".join(map(str, where))
    stacks = "".join(f"\nrank {rank}:\n{stack}" for rank, stack in where.items())
    return TimeoutError(
        f"of {world_size} ranks, {ranks} did not finish within {timeout:g} s. Either a collective "
        "that some ranks call and others do not, or timeout= is too short. They stood at:" + stacks
    )


# Make torch's dispatch modes safe in several threads.

_made: set[str] = set()


def make_operations() -> None:
    """Make the Python object of every operation that torch knows by now. Call it before threads."""
    # torch makes them when a dispatch mode first sees an operation, and lets C++ refer to them
    # without owning them. Of two that two threads make at once, C++ may be left with the one that
    # is freed (torch 2.13, ``OpOverloadPacket.__getattr__``: a crash). Takes 0.2 s once.
    names = set(torch._C._dispatch_get_all_op_names())  # noqa: SLF001 - nothing public lists them
    for full_name in names - _made:
        space, _, rest = full_name.partition("::")
        name, _, overload = rest.partition(".")
        # Some are there for TorchScript only, and have none.
        with contextlib.suppress(AttributeError):
            getattr(getattr(getattr(torch.ops, space), name), overload or "default")
    _made.update(names)


# Count the collectives that a rank starts.

_COLLECTIVES = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce"),
    *("gather", "scatter", "barrier", "send", "recv"),
)
_NAMES = {name.replace("_", ""): name for name in _COLLECTIVES}


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count the collectives that this rank starts in the block, by name.

    Names are ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``broadcast``,
    ``reduce``, ``gather``, ``scatter``, ``barrier``, ``send`` and ``recv``. A collective counts
    once however it was called: through torch.distributed, a group's own method, a functional
    collective or with ``async_op=True``, in forward or in backward.

    >>> with counting() as counter:
    ...     pass
    >>> counter["all_reduce"]
    0
    """
    counter: Counter[str] = Counter()
    with _Watch(counter):
        yield counter


class _Watch(TorchDispatchMode):
    """Sees every operation; a group's methods are operations of torch's namespace c10d."""

    def __init__(self, counter: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counter = counter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in {"c10d", "_c10d_functional"}:
            operation: str = func._schema.name  # noqa: SLF001 - as torch's own CommDebugMode asks
            words = operation.partition("::")[2].replace("_", "")
            if found := [key for key in _NAMES if words.startswith(key)]:
                self.counter[_NAMES[max(found, key=len)]] += 1
        return func(*args, **(kwargs or {}))


# Ranks as threads of this process, joined by gloo groups of their own.

Result = TypeVar("Result")

Also = tuple[tuple[str, ...], ...] | None
"""Axes whose groups are made besides those of one axis; None for no groups at all."""

_AFTER_A_FAILURE = 5.0
"""Seconds in which the ranks beside one that failed notice that it is gone."""


@dataclass(eq=False)
class _Threads:
    function: Callable[..., Any]
    layout: RankLayout
    args: Any
    also: Also
    timeout: float

    def __post_init__(self) -> None:
        self.store = HashStore()
        # One event loop for all: eight of them on few cores take three times as long.
        self.device = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
        # A rank that is done keeps its groups until all are: its peers may still be reading.
        self.groups: dict[int, dict[tuple[str, ...], dist.ProcessGroup]] = {}
        # A rank that fails closes its connections: not while its peers are still making theirs.
        self.connected = threading.Barrier(self.layout.world_size)
        self.alone = threading.Lock()
        self.reports: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()

    def results(self) -> list[Any]:
        make_operations()
        deadline, threads = time.monotonic() + self.timeout, torch.get_num_threads()
        running = {
            rank: threading.Thread(
                target=self._rank, args=(rank,), name=f"rank {rank}", daemon=True
            )
            for rank in range(self.layout.world_size)
        }
        for thread in running.values():
            thread.start()
        try:
            return self._collect(running, deadline)
        finally:
            # An error's traceback may live long, and leads here.
            self.groups.clear()
            # Each rank asked for one; later threads of this process would inherit that.
            torch.set_num_threads(threads)

    def _collect(self, running: dict[int, threading.Thread], deadline: float) -> list[Any]:
        results: dict[int, Any] = {}
        while running:
            try:
                rank, result, error = self.reports.get(timeout=max(deadline - time.monotonic(), 0))
            except queue.Empty:
                raise not_in_time(self.timeout, self.layout.world_size, _stacks(running)) from None
            running.pop(rank).join()
            if error is not None:
                until = time.monotonic() + _AFTER_A_FAILURE
                for thread in running.values():
                    thread.join(max(until - time.monotonic(), 0))
                raise error
            results[rank] = result
        return [results[rank] for rank in sorted(results)]

    def _rank(self, rank: int) -> None:
        result, failure = None, None
        torch.set_num_threads(1)
        try:
            result = self._call(rank)
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            failure = with_rank(error, rank, self.layout.world_size)
        self.reports.put((rank, result, failure))
        if failure is not None:
            # A group that nothing refers to is closed, and whoever waits for this rank is told.
            self.connected.abort()
            self.groups.pop(rank, None)
            release_frames(failure)
            if self.alone.acquire(blocking=False):  # those that fail after it are told already
                gc.collect()

    def _call(self, rank: int) -> Any:
        # Kept where `_rank` can let go of them.
        groups = self.groups.setdefault(rank, {})
        if self.also is None:
            return self.function(*self.args)
        for axes in [(axis,) for axis in AXES] + list(self.also):
            if self.layout.degree(axes) > 1:
                groups[axes] = self._group(axes, rank)
        state = ParallelState.from_groups(
            **{axis: groups.get((axis,)) for axis in AXES},
            also={axes: group for axes, group in groups.items() if len(axes) > 1},
            layout=self.layout,
            rank=rank,
        )
        self.connected.wait(self.timeout)
        with use_state(state):
            del state  # so that nothing but `groups` and the block refers to the groups
            return self.function(*self.args)

    def _group(self, axes: tuple[str, ...], rank: int) -> dist.ProcessGroup:
        """This rank's group along axes: what init_process_group makes, but not registered."""
        ranks = self.layout.group_of(axes, rank)
        index, size = ranks.index(rank), len(ranks)
        store = PrefixStore(f"{'-'.join(axes)}/{ranks[0]}", self.store)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001
        options._devices = [self.device]  # noqa: SLF001
        options._timeout = timedelta(seconds=self.timeout + MARGIN)  # noqa: SLF001
        options._threads = 1  # noqa: SLF001
        backend = dist.ProcessGroupGloo(store, index, size, options)
        group = dist.ProcessGroup(store, index, size)
        kind = dist.ProcessGroup.BackendType.GLOO
        group._register_backend(torch.device("cpu"), kind, backend)  # noqa: SLF001
        group._set_default_backend(kind)  # noqa: SLF001
        return group


def _stacks(running: dict[int, threading.Thread]) -> dict[int, str]:
    frames = sys._current_frames()  # noqa: SLF001 - public, and documented as such
    return {
        rank: "".join(traceback.format_stack(frames[thread.ident])[-6:])
        for rank, thread in running.items()
        if thread.ident in frames
    }


# The process of one rank: takes jobs from a pipe, one at a time.


@dataclass(frozen=True, slots=True)
class Job:
    rank: int
    layout: RankLayout
    place: str  # begins the path of each file of this call
    also: Also
    timeout: float
    path: tuple[str, ...]
    modules: tuple[tuple[str, str], ...]
    payload: bytes


@dataclass(frozen=True, slots=True)
class Report:
    rank: int
    when: float
    result: bytes = b""
    error: bytes | None = None
    text: str = ""


def serve(connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends this process
    faulthandler.enable()  # a crash leaves its stack on stderr
    names: list[Any] = [name for _, name in socket.if_nameindex()]
    os.environ["GLOO_SOCKET_IFNAME"] = next((n for n in names if n.startswith("lo")), "lo")
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, OSError):
        while True:
            job = connection.recv()
            _run(job, connection)
            connection.send("ready")


def _run(job: Job, connection: Connection) -> None:
    try:
        report = Report(job.rank, time.monotonic(), result=_result_of(job))
    except BaseException as error:  # noqa: BLE001 - sent to the parent
        connection.send(_failure(job.rank, error))
    else:
        connection.send(report)
        # The groups stay until all ranks are done, or the parent is gone: peers may still read.
        connection.recv()
    finally:
        # Nothing of a job is left; and closed groups tell waiting peers of a failure.
        destroy_tensor_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()


def _result_of(job: Job) -> bytes:
    sys.path[:] = job.path
    for name, file in job.modules:
        _load(name, file)
    function, args = pickle.loads(job.payload)  # noqa: S301 - from our own parent
    torch.manual_seed(0)
    get_rng_tracker().reset()  # of the call before
    dist.init_process_group(
        "gloo",
        store=FileStore(f"{job.place}.store", job.layout.world_size),
        rank=job.rank,
        world_size=job.layout.world_size,
        timeout=timedelta(seconds=job.timeout + MARGIN),
    )
    if job.also is not None:
        initialize_tensor_parallel(
            job.layout.tensor,
            pipeline_parallel_size=job.layout.pipeline,
            context_parallel_size=job.layout.context,
            also=job.also,
        )
    # A rank that fails closes its connections: not while its peers are still making theirs.
    dist.barrier()
    with open(f"{job.place}.stack{job.rank}", "w") as stack:
        faulthandler.dump_traceback_later(job.timeout * 0.9, file=stack)
        try:
            result = function(*args)
        finally:
            faulthandler.cancel_dump_traceback_later()
    try:
        return pickle.dumps(result)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise TypeError(
            f"{function!r} returned {type(result).__name__}, which does not pickle: {error}; "
            "return plain values and tensors"
        ) from error


def _failure(rank: int, error: BaseException) -> Report:
    when, text = time.monotonic(), "".join(traceback.format_exception(error))
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)  # noqa: S301 - pickled the line before
    except Exception:  # noqa: BLE001 - an exception's own pickling may raise anything
        pickled = pickle.dumps(RankError(f"{type(error).__name__}: {error}"))
    return Report(rank, when, error=pickled, text=text)


def _load(name: str, file: str) -> None:
    """Import a module by its name, or from its file when the name leads elsewhere."""
    if name in sys.modules:
        return
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin != file:
        spec = importlib.util.spec_from_file_location(name, file)
        # Unpickling imports the first package of a name, which may be pytest's invention.
        parent = name.rpartition(".")[0]
        while parent:
            sys.modules.setdefault(parent, ModuleType(parent))
            parent = parent.rpartition(".")[0]
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


# Ranks as processes that are kept for the next call.

_AFTERMATH = 2.0
"""Seconds in which the ranks beside one that failed may report, and so be kept."""


def run_in_processes(
    function: Callable[..., Result], layout: RankLayout, args: Any, also: Also, timeout: float
) -> list[Result]:
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    try:
        pickler.dump((function, args))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise TypeError(
            f"{function!r} and its arguments go to other processes, but do not pickle: {error}; "
            "use a function at the top level of a module and arguments that pickle, "
            "or threads (in_processes=False)"
        ) from error
    payload, modules = buffer.getvalue(), tuple(pickler.modules.items())
    # What is pickled by its name in the program is looked for there by the other processes, to
    # which multiprocessing gives the module that this one was started with, where it can.
    main = sys.modules["__main__"]
    importable = main.__spec__ is not None or Path(getattr(main, "__file__", None) or "").is_file()
    if b"__main__" in payload and not importable:
        raise TypeError(
            f"{function!r} or an argument is defined where other processes cannot import it "
            "(python -c, standard input or a notebook): put it in a file that can be imported, "
            "or use threads (in_processes=False)"
        )
    with _lock:
        workers = _take(layout.world_size)
        place = str(Path(_directory(), str(next(_calls))))
        how = layout, place, also, timeout, tuple(sys.path), modules, payload
        try:
            for rank, worker in enumerate(workers):
                worker.busy = worker.owes_word = True
                worker.connection.send(Job(rank, *how))
            reports = _collect(workers, place, timeout)
        finally:
            _drop_busy()
    return [pickle.loads(r.result) for r in reports]  # noqa: S301 - from our own processes


def _collect(workers: list[_Worker], place: str, timeout: float) -> list[Report]:
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
        files = {rank: Path(f"{place}.stack{rank}") for rank in sorted(running.values())}
        stacks = {r: f.read_text() if f.exists() else "(unknown)\n" for r, f in files.items()}
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


class _Pickler(pickle.Pickler):
    """Notes name and file of the modules that functions and classes come from."""

    # A test's module has a name that only its test runner can import: ranks load it from its file.

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer)
        self.modules: dict[str, str] = {}

    def reducer_override(self, value: Any) -> Any:
        owner = value if inspect.isroutine(value) or inspect.isclass(value) else type(value)
        name = getattr(owner, "__module__", None)
        file = getattr(sys.modules.get(name or ""), "__file__", None)
        if file and name not in {None, "__main__", "builtins"}:
            self.modules[str(name)] = str(file)
        return NotImplemented


class _Worker:
    def __init__(self, context: BaseContext) -> None:
        self.connection, theirs = context.Pipe()
        self.busy = False
        self.owes_word = False  # that it has let go of its last job's groups
        self.process: BaseProcess = context.Process(  # type: ignore[attr-defined]
            target=serve, args=(theirs,), name="ezpz-rank", daemon=True
        )
        self.process.start()
        theirs.close()

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


_workers: list[_Worker] = []
"""As many as the largest call needed; a smaller call uses the first of them."""
_calls = itertools.count(1)
_lock = threading.Lock()


def _take(count: int) -> list[_Worker]:
    for worker in _workers:
        worker.busy = not worker.is_ready()
    _drop_busy()
    while len(_workers) < count:
        _workers.append(_Worker(_context()))
    return _workers[:count]


def _drop_busy() -> None:
    """End the processes that did not come to the end of their job."""
    for worker in [one for one in _workers if one.busy]:
        worker.end()
        _workers.remove(worker)


@functools.cache
def _directory() -> str:
    # Its files stay until the end: a store that is let go of looks for its file once more.
    directory = tempfile.mkdtemp(prefix="ezpz-ranks-")
    atexit.register(_end, directory)
    return directory


def _end(directory: str) -> None:
    while _workers:
        _workers.pop().end()
    shutil.rmtree(directory, ignore_errors=True)


def _context() -> BaseContext:
    """A server that has torch loaded and forks, where there is one."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # Each new process imports the main module, so its package is best there before; and
    # torch._dynamo, longer than torch itself, once it makes an optimizer or counts collectives.
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    program = [main.name.partition(".")[0]] if main is not None else []
    context.set_forkserver_preload(["ezpz_tp.testing._ranks", "torch._dynamo", *program])
    return context


def run_ranks(
    function: Callable[..., Result],
    world_size: int,
    *args: Any,
    tensor: int | None = None,
    context: int = 1,
    data: int | None = None,
    pipeline: int = 1,
    also: Iterable[tuple[str, ...]] = (),
    in_processes: bool = False,
    initialize: bool = True,
    timeout: float = 60.0,
) -> list[Result]:
    """Call ``function(*args)`` on every one of ``world_size`` ranks and return the results by rank.

    By default the ranks are threads of this process, joined by real gloo groups that
    torch.distributed does not know (so nothing global is touched), and start in milliseconds.
    They share what a process shares: torch's random generators (draw from generators of your
    own), module globals, and the default process group, which there is none of.

    With ``in_processes`` they are processes that are kept for the next call, started from a
    server that has torch loaded. There torch.distributed is initialized with gloo and the default
    state by `initialize_tensor_parallel`; both are new for every call, torch's generator is seeded
    with 0 and `get_rng_tracker` has no streams. Such a function, its arguments and its result must
    be picklable, and a script that is run needs the usual ``if __name__ == "__main__":``.

    Args:
        function: What every rank runs. It finds its rank by `get_tensor_parallel_rank` and the
            like: a default state is active in it.
        world_size: Number of ranks.
        *args: Passed on, the same to every rank. Threads are given the very objects.
        tensor: Degree of tensor parallelism; all that the other degrees leave when None.
        context: Degree of context parallelism.
        data: Degree of data parallelism; what the other degrees leave when None.
        pipeline: Degree of pipeline parallelism.
        also: Groups that span several axes, for example ``[("tensor", "pipeline")]``.
        in_processes: Real processes rather than threads.
        initialize: Whether a default state is active; in processes, False also leaves the
            call to `initialize_tensor_parallel` to ``function``.
        timeout: Seconds for the whole call.

    Returns:
        What ``function`` returned, by rank.

    Raises:
        DegreeError: The degrees do not fit the world size.
        TypeError: ``in_processes`` and something that other processes cannot be given: it does not
            pickle, or is defined in ``python -c``, standard input or a notebook.
        TimeoutError: Some rank did not finish in time; says which, and where it stood.
        RankError: A process ended without a word, or what it raised cannot be pickled.
        Exception: What ``function`` raised on the rank that failed first, with its rank as a
            note. The other ranks are ended.
    """
    fixed = context * pipeline * (1 if data is None else data)
    if tensor is None:
        tensor = max(world_size // fixed, 1) if fixed > 0 else 1
    layout = RankLayout(world_size=world_size, tensor=tensor, context=context, pipeline=pipeline)
    if data is not None and layout.data != data:
        raise DegreeError(
            f"tensor {tensor} x context {context} x data {data} x pipeline {pipeline} = "
            f"{fixed * tensor} ranks, but world_size={world_size}; leave one of tensor and data "
            "out to have it worked out"
        )
    groups = tuple(tuple(axes) for axes in also) if initialize else None
    if in_processes:
        return run_in_processes(function, layout, args, groups, timeout)
    return _Threads(function, layout, args, groups, timeout).results()
