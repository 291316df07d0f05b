"""The part of a backward in which a rank has nothing to do but wait for the others' gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from .clock import Clock, Mark, clock_for, device_here


class BackwardWaits:
    """Measures, in each backward of a model, from its last gradient to the end of the wait.

    DistributedDataParallel waits for its all-reduces in a callback that autograd's engine
    runs when the whole backward is done (torch 2.6 to 2.13: reducer.cpp, finalize_backward).
    A callback of ours that is queued earlier, when the backward begins, runs before it, on
    the rank's own work being done; one that it queues itself runs after it.

    A rank that is slower than the others waits less here than they do.

    Attributes:
        waits: For each backward since the last `clear`: clock, start and end of the wait.

    Args:
        model: What is called; its output is what the backward begins at.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.waits: list[tuple[Clock, Mark, Mark]] = []
        self._is_queued = False
        self._hook = model.register_forward_hook(self._after_forward)

    def remove(self) -> None:
        """Measure no more."""
        self._hook.remove()

    def _after_forward(self, _model: torch.nn.Module, _arguments: Any, output: Any) -> None:
        # A backward that failed has not run its callbacks.
        self._is_queued = False
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(self._at_backward)

    def _at_backward(self, _gradient: torch.Tensor) -> None:
        if not self._is_queued:
            self._is_queued = True
            _at_end(self._when_computed)

    def _when_computed(self) -> None:
        self._is_queued = False
        clock = clock_for(device_here(), exact=False)
        start = clock.mark()
        _at_end(lambda: self.waits.append((clock, start, clock.mark())))


def _at_end(callback: Any) -> None:
    """Have the engine call something when the backward that runs is done, in order."""
    engine = torch.autograd.Variable._execution_engine  # noqa: SLF001  # as FSDP itself does
    engine.queue_callback(callback)


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a model's output: of mappings and sequences, however deep."""
    if isinstance(output, torch.Tensor):
        yield output
        return
    parts: Iterable[Any] = ()
    if isinstance(output, Mapping):
        parts = output.values()
    elif isinstance(output, (list, tuple)):
        parts = output
    for part in parts:
        yield from _tensors(part)
