"""Numbers that lie on a device, brought to the host in one copy."""

from __future__ import annotations

import sys
from typing import Any

from .numbers import is_on_device


class Copies:
    """Copies of a record's device tensors on their way to the host.

    Made without waiting for the device: the numbers are read when `settle` is called, by then
    usually there. (CUDA, ROCm and XPU copy beside the queue's next kernels; MPS waits.)

    Args:
        flat: A flat record; `settle` fills it in.

    Raises:
        TypeError: A tensor has several elements.
    """

    def __init__(self, flat: dict[str, Any]) -> None:
        self._flat = flat
        self._waiting: list[tuple[list[str], Any, Any]] = []
        by_kind: dict[tuple[Any, bool], list[str]] = {}
        for name, value in flat.items():
            if is_on_device(value):
                if value.numel() != 1:
                    raise TypeError(
                        f"metric {name!r} is not one number: a tensor of shape {tuple(value.shape)}"
                    )
                by_kind.setdefault((value.device, value.is_floating_point()), []).append(name)
        for (device, floating), names in by_kind.items():
            self._send(device, floating, names)

    def _send(self, device: Any, floating: bool, names: list[str]) -> None:
        torch = sys.modules["torch"]
        # MPS has no doubles.
        wide = torch.float32 if device.type == "mps" else torch.float64
        values = [self._flat[name].detach().reshape(()) for name in names]
        together = torch.stack([value.to(wide if floating else torch.int64) for value in values])
        if device.type == "mps":
            self._waiting.append((names, together.cpu(), None))
            return
        host = torch.empty(together.shape, dtype=together.dtype, pin_memory=True)
        host.copy_(together, non_blocking=True)
        event = torch.get_device_module(device).Event()
        event.record()
        self._waiting.append((names, host, event))

    def settle(self) -> dict[str, Any]:
        """Wait for the copies, and return the record with its numbers in it."""
        for names, host, event in self._waiting:
            if event is not None:
                event.synchronize()
            self._flat.update(zip(names, host.tolist(), strict=True))
        self._waiting.clear()
        return self._flat
