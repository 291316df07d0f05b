"""The process of one rank: takes jobs from a pipe, one at a time."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from ezpz_tp._groups import default as _default
from ezpz_tp._groups.ranks import RankLayout
from ezpz_tp._training.random import get_rng_tracker

from ._failure import MARGIN, RankError


@dataclass(frozen=True, slots=True)
class Job:
    """What a rank is to run."""

    rank: int
    layout: RankLayout
    place: str  # begins the path of each file of this call
    also: tuple[tuple[str, ...], ...] | None
    timeout: float
    path: tuple[str, ...]
    modules: tuple[tuple[str, str], ...]
    payload: bytes

    def read_stack(self) -> str:
        """Where the rank stood shortly before its time was over."""
        try:
            return self.stack_file.read_text()
        except OSError:
            return "(unknown)\n"

    @property
    def stack_file(self) -> Path:
        """The file that faulthandler writes to."""
        return Path(f"{self.place}.stack{self.rank}")


@dataclass(frozen=True, slots=True)
class Report:
    """How a rank fared."""

    rank: int
    when: float
    result: bytes = b""
    error: bytes | None = None
    text: str = ""


def serve(connection: Connection) -> None:
    """Run jobs until the other end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends this process
    faulthandler.enable()  # a crash leaves its stack on stderr
    os.environ["GLOO_SOCKET_IFNAME"] = _loopback()
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
        _clear()


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
        _default.initialize_tensor_parallel(
            job.layout.tensor,
            pipeline_parallel_size=job.layout.pipeline,
            context_parallel_size=job.layout.context,
            also=job.also,
        )
    # A rank that fails closes its connections: not while its peers are still making theirs.
    dist.barrier()
    with _stack_before(job):
        result = function(*args)
    try:
        return pickle.dumps(result)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise TypeError(
            f"{function!r} returned {type(result).__name__}, which does not pickle: {error}; "
            "return plain values and tensors"
        ) from error


@contextlib.contextmanager
def _stack_before(job: Job) -> Iterator[None]:
    """Write down where this process stands just before its time is over."""
    with job.stack_file.open("w") as file:
        faulthandler.dump_traceback_later(job.timeout * 0.9, file=file)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


def _failure(rank: int, error: BaseException) -> Report:
    when, text = time.monotonic(), "".join(traceback.format_exception(error))
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)  # noqa: S301 - pickled the line before
    except Exception:  # noqa: BLE001 - an exception's own pickling may raise anything
        pickled = pickle.dumps(RankError(f"{type(error).__name__}: {error}"))
    return Report(rank, when, error=pickled, text=text)


def _clear() -> None:
    """Leave nothing of a job: closing its groups also tells waiting peers of a failure."""
    _default.destroy_tensor_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


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


def _loopback() -> str:
    """The name of this machine's loopback interface."""
    names: list[Any] = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name.startswith("lo")), "lo")
