"""The process of one rank: takes one job after another from a pipe."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import socket
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from ezpz_tp._current import destroy_tensor_parallel, initialize_tensor_parallel
from ezpz_tp._errors import ParallelError
from ezpz_tp._random import get_rng_tracker
from ezpz_tp._ranks import RankLayout

from ._pickling import Call, load_call

_MARGIN = 5.0
"""Seconds more for a collective than for the call, so that a hang is reported by the latter."""


class RankError(ParallelError):
    """A rank's process ended, or raised what cannot be sent to another process."""


@dataclass(frozen=True, slots=True)
class Job:
    call: Call
    rank: int
    layout: RankLayout
    initialize: bool
    also: tuple[tuple[str, ...], ...]
    timeout: float
    store: str
    """Path of a file for torch's FileStore."""
    stack: str
    """Path of a file for the stack of a rank that hangs."""


def serve(connection: Connection) -> None:
    """Run jobs until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends this process
    faulthandler.enable()  # a crash leaves its stack on stderr
    interfaces = [name for _, name in socket.if_nameindex()]
    os.environ["GLOO_SOCKET_IFNAME"] = next(name for name in interfaces if name.startswith("lo"))
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, OSError):
        while True:
            connection.send_bytes(_run(connection.recv()))
            # The groups stay until all ranks are done: peers may still read from them.
            connection.recv()
            destroy_tensor_parallel()
            if dist.is_initialized():
                dist.destroy_process_group()


def _run(job: Job) -> bytes:
    """Return whether it went well, and the result or the error."""
    try:
        return pickle.dumps((True, _call(job)))
    except BaseException as error:  # noqa: BLE001 - sent to the parent
        note = "".join(traceback.format_exception(error))
        note = f"raised by rank {job.rank} of {job.layout.world_size}:\n{note}"
        error.add_note(note)
        try:
            pickled = pickle.dumps((False, error))
            pickle.loads(pickled)  # noqa: S301 - pickled the line before
        except Exception:  # noqa: BLE001 - an exception's own pickling may raise anything
            error = RankError(f"{type(error).__name__}: {error}")
            error.add_note(note)
            pickled = pickle.dumps((False, error))
        return pickled


def _call(job: Job) -> Any:
    function, args = load_call(job.call)
    torch.manual_seed(0)
    get_rng_tracker().reset()
    dist.init_process_group(
        "gloo",
        store=FileStore(job.store, job.layout.world_size),
        rank=job.rank,
        world_size=job.layout.world_size,
        timeout=timedelta(seconds=job.timeout + _MARGIN),
    )
    if job.initialize:
        initialize_tensor_parallel(
            job.layout.tensor,
            pipeline_parallel_size=job.layout.pipeline,
            context_parallel_size=job.layout.context,
            also=job.also,
        )
    with open(job.stack, "w") as stack:
        faulthandler.dump_traceback_later(job.timeout * 0.9, file=stack)
        try:
            return function(*args)
        finally:
            faulthandler.cancel_dump_traceback_later()
