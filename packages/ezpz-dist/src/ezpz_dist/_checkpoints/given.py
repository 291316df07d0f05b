"""What a caller gives to be saved or filled, and asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

Optimizers = Optimizer | Sequence[Optimizer]


@dataclass(frozen=True, slots=True)
class Given:
    """A model, and what else there is.

    Attributes:
        model: Wrapped or not.
        optimizers: Its optimizers; none, if none was given.
        scheduler: None, one or several.
        data: None, one or several.
        extra: None, or a dict.
    """

    model: nn.Module
    optimizers: list[Optimizer]
    scheduler: Any
    data: Any
    extra: Mapping[str, Any] | None = None

    @property
    def contents(self) -> tuple[str, ...]:
        """Return the names of what there is."""
        there = {
            "model": True,
            "optimizer": bool(self.optimizers),
            "scheduler": self.scheduler is not None,
            "data": self.data is not None,
            "extra": self.extra is not None,
        }
        return tuple(name for name, given in there.items() if given)


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be written.

    Attributes:
        step: The step.
        contents: What there is.
        keep: How many to keep.
    """

    step: int
    contents: tuple[str, ...]
    keep: int | None


def listed(optimizer: Optimizers | None) -> list[Optimizer]:
    """Return one optimizer, several or none as a list."""
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)


def give_memory(model: nn.Module) -> None:
    """Give elements of buffers that share memory (`expand`) some of their own, to be filled."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.layout is not torch.strided or buffer.is_meta:
                continue
            if any(
                size > 1 and not step
                for size, step in zip(buffer.shape, buffer.stride(), strict=True)
            ):
                setattr(module, name, buffer.clone(memory_format=torch.contiguous_format))
