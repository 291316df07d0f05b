# ruff: noqa: SLF001 - torch names the collectives of one tensor so, and has no others
"""Collectives on tensors, without autograd.

Nothing here changes a tensor that the caller does not own: what ends in an underscore works in
place, all else returns a new tensor.

The methods of the process group are called directly: `torch.distributed.all_reduce` adds 2 us
of checks that are done once here, as much as a small addition costs. While torch.compile
traces, the functions of `torch.distributed` are called instead, because it knows those.

Only ``rank()``, ``size()`` and the collectives of a group are used, so that groups unknown to
``torch.distributed`` work too, as those of ranks that are threads (`ezpz_tp.testing`).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    AllreduceOptions,
    BroadcastOptions,
    ReduceScatterOptions,
)

SUM = dist.ReduceOp.SUM


_BLOCKING, _OVERLAPPED = AllreduceOptions(), AllreduceOptions()
_GATHER, _OVERLAPPED_GATHER = AllgatherOptions(), AllgatherOptions()
_SCATTER, _OVERLAPPED_SCATTER = ReduceScatterOptions(), ReduceScatterOptions()
for _options, _asynchronous in (
    (_BLOCKING, False),
    (_GATHER, False),
    (_SCATTER, False),
    (_OVERLAPPED, True),
    (_OVERLAPPED_GATHER, True),
    (_OVERLAPPED_SCATTER, True),
):
    # False keeps NCCL's work on the current stream; unknown before torch 2.8.
    if hasattr(_options, "asyncOp"):
        _options.asyncOp = _asynchronous


def contiguous_copy(tensor: Tensor) -> Tensor:
    """A copy with memory of its own, also of an expanded tensor: safe to reduce in place."""
    return tensor.clone(memory_format=torch.contiguous_format)


def all_reduce_(tensor: Tensor, group: ProcessGroup, op: dist.ReduceOp.RedOpType = SUM) -> Tensor:
    """Reduce a contiguous tensor that the caller owns, in place. Collective."""
    if torch.compiler.is_compiling():
        dist.all_reduce(tensor, op, group)
        return tensor
    options = _BLOCKING
    if op is not SUM:
        options = AllreduceOptions()
        options.reduceOp = op  # type: ignore[assignment]
    _wait(group.allreduce([tensor], options))
    return tensor


def all_reduce(tensor: Tensor, group: ProcessGroup, op: dist.ReduceOp.RedOpType = SUM) -> Tensor:
    """Return the reduction of a tensor over the group. Collective."""
    return all_reduce_(contiguous_copy(tensor), group, op)


def start_all_reduce_(tensor: Tensor, group: ProcessGroup) -> Work:
    """Start the sum, in place, of a tensor that the caller owns; it is ready after ``wait()``.

    Not for code under torch.compile. Collective.
    """
    return group.allreduce([tensor], _OVERLAPPED)


def all_gather(tensor: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return the ranks' tensors, of one shape, joined along ``dim`` by rank. Collective."""
    dim %= tensor.dim()
    parts = tensor.new_empty((group.size() * tensor.shape[0], *tensor.shape[1:]))
    if torch.compiler.is_compiling():
        dist.all_gather_into_tensor(parts, tensor.contiguous(), group)
    else:
        _wait(group._allgather_base(parts, tensor.contiguous(), _GATHER))
    return parts if dim == 0 else torch.cat(parts.chunk(group.size()), dim)


def start_all_gather(tensor: Tensor, group: ProcessGroup) -> tuple[Tensor, Work]:
    """Start to join the ranks' tensors along dim 0; the result is ready after ``wait()``.

    Not for code under torch.compile. Collective.
    """
    parts = tensor.new_empty((group.size() * tensor.shape[0], *tensor.shape[1:]))
    return parts, group._allgather_base(parts, tensor.contiguous(), _OVERLAPPED_GATHER)


def reduce_scatter(tensor: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return this rank's part, along ``dim``, of the ranks' sum. Collective."""
    parts = _parts_first(tensor, dim, group.size())
    part = tensor.new_empty(parts.shape[1:])
    if torch.compiler.is_compiling():
        dist.reduce_scatter_tensor(part, parts.flatten(0, 1), SUM, group)
    else:
        _wait(group._reduce_scatter_base(part, parts.flatten(0, 1), _SCATTER))
    return part


def start_reduce_scatter(tensor: Tensor, group: ProcessGroup) -> tuple[Tensor, Work]:
    """Start to sum the ranks' tensors and keep this rank's part along dim 0.

    Not for code under torch.compile. Collective.
    """
    part = tensor.new_empty((tensor.shape[0] // group.size(), *tensor.shape[1:]))
    return part, group._reduce_scatter_base(part, tensor.contiguous(), _OVERLAPPED_SCATTER)


def all_to_all(
    tensor: Tensor,
    group: ProcessGroup,
    output_splits: list[int] | None = None,
    input_splits: list[int] | None = None,
) -> Tensor:
    """Send a part of dim 0 to each rank and return what they sent, by rank. Collective.

    Args:
        tensor: ``[rows, ...]``.
        group: The ranks.
        output_splits: Rows that come from each rank; None for equal parts.
        input_splits: Rows that go to each rank; None for equal parts.
    """
    rows = tensor.shape[0] if output_splits is None else sum(output_splits)
    output = tensor.new_empty((rows, *tensor.shape[1:]))
    if torch.compiler.is_compiling():
        dist.all_to_all_single(output, tensor.contiguous(), output_splits, input_splits, group)
    else:
        work = group.alltoall_base(
            output, tensor.contiguous(), output_splits or [], input_splits or []
        )
        _wait(work)
    return output


def broadcast_(tensor: Tensor, source: int, group: ProcessGroup) -> Tensor:
    """Overwrite a contiguous tensor by that of the group's rank ``source``. Collective."""
    options = BroadcastOptions()
    options.rootRank = source
    options.rootTensor = 0
    _wait(group.broadcast([tensor], options))
    return tensor


def _parts_first(tensor: Tensor, dim: int, count: int) -> Tensor:
    """The tensor's equal parts along ``dim``, stacked in a new first dim, contiguous."""
    parts: Tensor = tensor.unflatten(dim, (count, -1))
    return parts.movedim(dim % tensor.dim(), 0).contiguous()


def _wait(work: Work | None) -> None:
    # A backend that has ordered the operation in its stream already may return none.
    if work is not None:
        work.wait()
