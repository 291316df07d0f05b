"""Buffers that are kept and handed out again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod

import torch
from torch import Tensor


class GlobalMemoryBuffer:
    """Buffers by name, dtype and device, which grow and never shrink.

    The same memory is handed out each time: who asks sees to it that two uses of a name do
    not overlap. Megatron-LM's class of this name (megatron/core/utils.py).
    """

    def __init__(self) -> None:
        self.buffer: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def get_tensor(
        self,
        tensor_shape: Sequence[int],
        dtype: torch.dtype,
        name: str,
        mem_alloc_context: Callable[[], AbstractContextManager[object]] | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Return a tensor of uninitialized, reused memory.

        Args:
            tensor_shape: Its shape.
            dtype: Its dtype.
            name: Of the buffer.
            mem_alloc_context: In which new memory is allocated.
            device: Of the buffer; the current accelerator if None, and else the CPU.
        """
        where = _current_device() if device is None else torch.device(device)
        key = (name, dtype, where)
        length = prod(tensor_shape)
        held = self.buffer.get(key)
        if held is None or held.numel() < length:
            with (mem_alloc_context or nullcontext)():
                held = torch.empty(length, dtype=dtype, device=where)
            self.buffer[key] = held
        return held[:length].view(*tensor_shape)


def _current_device() -> torch.device:
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        return torch.device(kind.type, torch.get_device_module(kind).current_device())
    return torch.device("cpu")
