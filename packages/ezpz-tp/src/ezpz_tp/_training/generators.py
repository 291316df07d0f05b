"""The default generators of the CPU and of the accelerator, whichever that is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ezpz_tp._errors import ParallelError

States = dict[str, Tensor]
"""The state of a generator for each type of device."""


def default_states(device: torch.device | None) -> States:
    """Return the states of the default generators in use: the CPU's and an accelerator's.

    Args:
        device: The accelerator; None for this machine's, if something has initialized it.
    """
    states = {"cpu": torch.get_rng_state()}
    device = device or _accelerator_in_use()
    if device is not None and device.type != "cpu":
        states[device.type] = _module(device).get_rng_state(*_index(device))
    return states


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)


def _accelerator_in_use() -> torch.device | None:
    device = torch.accelerator.current_accelerator()
    if device is None:
        return None
    module = _module(device)
    # torch.mps has no such question: it is ready where it is available.
    is_ready = getattr(module, "is_initialized", module.is_available)
    return device if is_ready() else None


def _index(device: torch.device) -> tuple[torch.device, ...]:
    # Without one, the current device; torch.mps takes no argument that it would need.
    index: int | None = device.index
    return () if index is None else (device,)


def set_default_states(states: Mapping[str, Tensor], device: torch.device | None) -> None:
    """Set the default generators, each to the state of its type of device."""
    for kind, state in states.items():
        if kind == "cpu":
            torch.set_rng_state(state)
        else:
            target = device or torch.device(kind)
            _module(target).set_rng_state(state, *_index(target))


def seeded_state(kind: str, seed: int) -> Tensor:
    """Return the state of a generator, for a type of device, that has just been seeded."""
    return torch.Generator(kind).manual_seed(seed).get_state()


def seed_of(name: str, states: States) -> int:
    """Read the seed out of a stream's state: a generator keeps it however much was drawn."""
    kind, state = next(iter(states.items()))
    if kind != "cpu" and not torch.accelerator.is_available():
        raise ParallelError(f"the random stream {name!r} was saved on {kind}, which is not here")
    generator = torch.Generator(kind)
    generator.set_state(state)
    return generator.initial_seed()


def backward_id() -> int | None:
    """Return the number of the backward pass that runs in this thread, if any."""
    # torch.utils.checkpoint and torch.autograd.graph ask in the same way.
    task: int = torch._C._current_graph_task_id()  # noqa: SLF001
    return None if task == -1 else task
