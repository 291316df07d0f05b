"""A number by which tensors of different ranks are compared without being sent."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AT_A_TIME = 1 << 24
"""Elements whose products are in memory at once."""


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Return a number of all bits and their places; 0-dim int64, on the tensor's device."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype is torch.bool:
        tensor = tensor.view(torch.uint8)
    columns = tensor.shape[-1] if tensor.dim() else 1
    bits = tensor.reshape(-1, columns) if tensor.numel() else tensor.reshape(0, max(columns, 1))
    bits = bits.view(_INTEGERS[bits.element_size()])
    weights = _weights(bits.shape[1], torch.int32, bits.device)
    # Overflow does no harm: it is the same everywhere.
    rows = bits.split(max(1, _AT_A_TIME // max(1, bits.shape[1])))
    sums = torch.cat([(some * weights).sum(1, dtype=torch.int64) for some in rows])
    return (sums * _weights(len(sums), torch.int64, bits.device)).sum()


def _weights(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a number for each place, without a pattern by which moved values could cancel."""
    places = torch.arange(1, count + 1, dtype=dtype, device=device) * 1_640_531_527
    return (places ^ (places >> 15)) * 2 + 1
