"""Ranks as threads of this process, joined by gloo groups of their own."""

from __future__ import annotations

import gc
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from ezpz_tp._groups.default import use_state
from ezpz_tp._groups.ranks import AXES, RankLayout
from ezpz_tp._groups.state import ParallelState

from ._failure import MARGIN, not_in_time, release_frames, with_rank
from ._operations import make_operations

Result = TypeVar("Result")

_AFTERMATH = 5.0
"""Seconds in which the ranks beside one that failed notice that it is gone."""


def run_in_threads(
    function: Callable[..., Result],
    layout: RankLayout,
    args: tuple[Any, ...],
    also: tuple[tuple[str, ...], ...] | None,
    timeout: float,
) -> list[Result]:
    """Call ``function(*args)`` once per rank in threads; see `run_ranks`."""
    make_operations()
    threads = torch.get_num_threads()
    try:
        return _Run(function, layout, args, also, timeout).finish()
    finally:
        # Each rank asked for one; later threads of this process would inherit that.
        torch.set_num_threads(threads)


class _Run:
    """One call of `run_ranks`."""

    def __init__(
        self,
        function: Callable[..., Any],
        layout: RankLayout,
        args: tuple[Any, ...],
        also: tuple[tuple[str, ...], ...] | None,
        timeout: float,
    ) -> None:
        self.function, self.args = function, args
        self.layout, self.also, self.timeout = layout, also, timeout
        self.store = HashStore()
        # One event loop for all: eight of them on few cores take three times as long.
        self.device = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
        # A rank that is done keeps its groups until all are: its peers may still be reading.
        self.groups: dict[int, dict[tuple[str, ...], dist.ProcessGroup]] = {}
        # A rank that fails closes its connections: not while its peers are still making theirs.
        self.connected = threading.Barrier(layout.world_size)
        self.alone = threading.Lock()
        self.reports: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()

    def finish(self) -> list[Any]:
        """Start the ranks, wait for them, and return their results."""
        deadline = time.monotonic() + self.timeout
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

    def _collect(self, running: dict[int, threading.Thread], deadline: float) -> list[Any]:
        results: dict[int, Any] = {}
        while running:
            try:
                rank, result, error = self.reports.get(timeout=max(deadline - time.monotonic(), 0))
            except queue.Empty:
                raise not_in_time(self.timeout, self.layout.world_size, _stacks(running)) from None
            running.pop(rank).join()
            if error is not None:
                until = time.monotonic() + _AFTERMATH
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
            tensor=groups.get(("tensor",)),
            context=groups.get(("context",)),
            data=groups.get(("data",)),
            pipeline=groups.get(("pipeline",)),
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
