"""What set-up decided, kept until clean-up."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]  # torch exports it so

from ezpz_topo import RankInfo, get_rank_info

from ._errors import NotSetUpError

if TYPE_CHECKING:
    from ezpz_tp import ParallelState


@dataclass(frozen=True, slots=True)
class World:
    """The ranks that were brought together, and how this one takes part."""

    info: RankInfo
    device: torch.device  # what this rank computes on
    backend: str  # ``"gloo"``, ``"nccl"``, ``"xccl"`` or ``"ccl"``
    timeout: float  # seconds that a rank waits for the others, if nothing else is said
    store: Store
    """Under a prefix of this set-up's own. The main thread's: a blocking call on it keeps other
    threads waiting."""
    hosts: tuple[str, ...]  # by rank, the name of its host
    # What is made once of it, by name.
    kept: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def on_host(self) -> torch.device:
        """Where tensors must lie to be sent: gloo moves host memory, others their device's."""
        return torch.device("cpu") if self.backend == "gloo" else self.device


_world: World | None = None
_process = 0  # in which it was entered
_unfinished: list[Callable[[], None]] = []


def enter(world: World | None) -> None:
    """Make this the process's world; None: there is none any more. For set-up and clean-up."""
    global _world, _process
    _world, _process = world, os.getpid()


def find_world() -> World | None:
    return _world


def current_world(operation: str) -> World | None:
    """Return what set-up decided; None for one process that was never set up."""
    if _world is None and (info := get_rank_info()).world_size > 1:
        raise NotSetUpError(
            f"{operation} on rank {info.rank} of {info.world_size} before setup_torch(); "
            "expected ezpz.setup_torch() first, on every rank"
        )
    return _world


def parallel_state() -> ParallelState | None:
    """Return ezpz_tp's groups if there are any; it is not imported for the question."""
    tp = sys.modules.get("ezpz_tp")
    state: ParallelState | None = None if tp is None else tp.current_state()
    return state if state is not None and state.is_live else None


def is_forked() -> bool:
    """Return whether this process is a rank's forked child, which is no part of the world."""
    return _world is not None and _process != os.getpid()


def finish_before_leaving(finish: Callable[[], None]) -> None:
    """Have something called once by clean-up, while the world still exists."""
    if finish not in _unfinished:
        _unfinished.append(finish)


def finish_all() -> Exception | None:
    """Call what is to be called before the world ends; return the first error. For clean-up."""
    first: Exception | None = None
    while _unfinished:
        try:
            _unfinished.pop()()
        except Exception as error:  # noqa: BLE001 - raised by clean-up, once the rest is done
            first = first or error
    return first


@contextmanager
def variables(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables (None: remove them), and bring back what they were."""
    before = {name: os.environ.get(name) for name in values}
    try:
        for name in values:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in values.items() if value is not None})
        yield
    finally:
        for name in before:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})
