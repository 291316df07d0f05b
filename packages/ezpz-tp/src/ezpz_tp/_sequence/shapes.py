"""What queries, keys and values have to be, before they meet a kernel or another rank."""

from __future__ import annotations

import torch
from torch import Tensor

from ezpz_tp._errors import DegreeError, ParallelError


def checked(name: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the three, cast as autocast casts for attention, after a look at shapes and dtypes.

    Raises:
        ParallelError: They do not fit each other. What another rank passes is not known here.
        DegreeError: The key heads do not divide the query heads.
    """
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ParallelError(
            f"{name}: {shapes}; expected [batch, heads, sequence of this rank, head_dim] of each, "
            "as for scaled_dot_product_attention"
        )
    if not (q.shape[0] == k.shape[0] == v.shape[0] and k.shape[:3] == v.shape[:3]):
        raise ParallelError(
            f"{name}: {shapes}; expected one batch size, and as many heads and tokens in k as in v"
        )
    if q.shape[3] != k.shape[3]:
        raise ParallelError(
            f"{name}: {shapes}; expected one head_dim in q and k, got {q.shape[3]} and {k.shape[3]}"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise DegreeError(
            f"{name}: the {k.shape[1]} heads of k and v do not divide the {q.shape[1]} heads of q; "
            "expected each of them to serve as many query heads"
        )
    q, k, v = _as_autocast(q), _as_autocast(k), _as_autocast(v)
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        raise ParallelError(
            f"{name}: q is {q.dtype} on {q.device}, k {k.dtype} on {k.device}, v {v.dtype} on "
            f"{v.device}; expected one dtype and device: cast them, or use torch.autocast"
        )
    if not q.is_floating_point():
        raise ParallelError(f"{name}: q, k and v are {q.dtype}; expected a floating point dtype")
    return q, k, v


def check_causal(name: str, q: Tensor, k: Tensor, halves: bool) -> None:
    """Refuse what has no causal order.

    Args:
        name: Of the function.
        q: The queries.
        k: The keys.
        halves: Whether this rank's part has to be two chunks of the sequence.

    Raises:
        DegreeError: As many queries as keys were expected; or an even number of them.
    """
    if q.shape[2] != k.shape[2]:
        raise DegreeError(
            f"{name}: is_causal with {q.shape[2]} queries and {k.shape[2]} keys on this rank; "
            "expected as many, because a query is one of the sequence's own tokens"
        )
    if halves and q.shape[2] % 2:
        raise DegreeError(
            f"{name}: this rank's part of the sequence has {q.shape[2]} tokens, and a balanced "
            "part is two chunks of one length; pad the sequence to a multiple of two chunks for "
            "each rank before shard_sequence, or shard and call with balanced=False"
        )


def _as_autocast(tensor: Tensor) -> Tensor:
    device = tensor.device.type
    # Autocast leaves float64 alone, for attention as for all else.
    if tensor.dtype == torch.float64 or not tensor.is_floating_point():
        return tensor
    if not torch.is_autocast_enabled(device):
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))
