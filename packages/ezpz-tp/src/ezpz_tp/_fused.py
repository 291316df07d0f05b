"""A sharded linear layer as one autograd function, its collective hidden behind arithmetic.

Column: the all-reduce of the input's gradient (reduce-scatter, when the sequence is sharded)
runs while the weight's gradient is computed, and the input is gathered again while the input's
gradient is computed, so that only its shard is kept. Row: the sum of the partial products and
the bias are one node. Compared with a region function, `F.linear` and a bias in a row, that
saves two nodes of the graph a layer, and the wait.

While torch.compile traces, and for second derivatives, the same products are made of the region
functions, which both understand. On CUDA the overlap wants CUDA_DEVICE_MAX_CONNECTIONS=1, so
that the collective is queued before the product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.nn import functional as F

from ._mappings import (
    all_gather,
    all_reduce_,
    copy_gradient,
    copy_to_tensor_parallel_region,
    gather_from_sequence_parallel_region,
    gather_gradient,
    reduce_from_tensor_parallel_region,
    reduce_scatter,
    reduce_scatter_to_sequence_parallel_region,
    start_all_gather,
    start_all_reduce_,
    start_reduce_scatter,
)

# Each of these calls costs as much as a few percent of a small layer, so:
# Whether a transform of torch.func is at work, for which the region functions have an error.
_transforms_active = torch._C._are_functorch_transforms_active  # noqa: SLF001 - apply asks it too
# Whether autocast is on for any device: a seventh of the price of asking for the tensor's device.
_autocast_enabled = torch._C._is_any_autocast_enabled  # noqa: SLF001 - as torch.nn.RNN asks

_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, None, None]


def column_linear(
    input_: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: ProcessGroup,
    sequence_parallel: bool = False,
    reduce_input_gradient: bool = True,
) -> Tensor:
    """Return ``input_ @ weight.T + bias`` for this rank's rows of a weight.

    What `ColumnParallelLinear` computes, as a function. Collective: every rank of the group calls
    this, in forward under sequence parallelism, else in backward.

    Args:
        input_: ``[..., in]``, the same on all ranks; under sequence parallelism this rank's part
            ``[s/tp, ..., in]``, which is gathered along dim 0.
        weight: ``[out/tp, in]``, of the input's dtype unless autocast is on.
        bias: ``[out/tp]``, or None.
        group: The tensor-parallel group.
        sequence_parallel: Whether the input is this rank's part of the sequence.
        reduce_input_gradient: False leaves the input's gradient partial, for a caller who sums
            the gradients of several layers at once.

    Returns:
        ``[..., out/tp]``.
    """
    if not torch.is_grad_enabled():
        # Autocast itself casts, and keeps the weight that it has cast.
        return F.linear(all_gather(input_, 0, group) if sequence_parallel else input_, weight, bias)
    if _autocast_enabled():
        input_ = as_autocast(input_)
        weight = as_autocast(weight)
        bias = None if bias is None else as_autocast(bias)
    if not (torch.compiler.is_compiling() or _transforms_active()):
        if sequence_parallel:
            mode = 2
        elif reduce_input_gradient:
            mode = 1
        else:
            mode = 0
        return _column(input_, weight, bias, group, mode)
    if sequence_parallel:
        input_ = gather_from_sequence_parallel_region(input_, tp_group=group)
    elif reduce_input_gradient:
        input_ = copy_to_tensor_parallel_region(input_, group)
    return F.linear(input_, weight, bias)


def row_linear(
    input_: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: ProcessGroup,
    sequence_parallel: bool = False,
) -> Tensor:
    """Return the ranks' sum of ``input_ @ weight.T``, plus the bias once.

    What `RowParallelLinear` computes, as a function. Collective: every rank of the group calls
    this.

    Args:
        input_: ``[..., in/tp]``, this rank's features.
        weight: ``[out, in/tp]``, of the input's dtype unless autocast is on.
        bias: ``[out]``, the same on all ranks, or None.
        group: The tensor-parallel group.
        sequence_parallel: Scatter the sum along dim 0.

    Returns:
        ``[..., out]``, the same on all ranks; under sequence parallelism this rank's part
        ``[s/tp, ..., out]``.
    """
    if not torch.is_grad_enabled():
        output = F.linear(input_, weight)
        if sequence_parallel:
            output = reduce_scatter(output, 0, group)
        else:
            output = all_reduce_(output, group)
        if bias is None:
            return output
        return output.add_(bias)
    if _autocast_enabled():
        input_ = as_autocast(input_)
        weight = as_autocast(weight)
        bias = None if bias is None else as_autocast(bias)
    if not (torch.compiler.is_compiling() or _transforms_active()):
        return _row(input_, weight, bias, group, sequence_parallel)
    product = F.linear(input_, weight)
    if sequence_parallel:
        summed = reduce_scatter_to_sequence_parallel_region(product, tp_group=group)
    else:
        summed = reduce_from_tensor_parallel_region(product, tp_group=group)
    if bias is None:
        return summed
    return summed + bias


class _Column(torch.autograd.Function):
    """``mode``: 0 leaves the input's gradient partial, 1 all-reduces it, 2 is sequence parallel."""

    @staticmethod
    def forward(
        ctx: Any,
        input_: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: ProcessGroup,
        mode: int,
    ) -> Tensor:
        _save(ctx, input_, weight)
        ctx.group = group
        ctx.mode = mode
        return F.linear(all_gather(input_, 0, group) if mode == 2 else input_, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> _Gradients:
        input_, weight = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _column_gradients(ctx, grad, input_, weight)
        wants_input, wants_weight, wants_bias, _, _ = ctx.needs_input_grad
        group = ctx.group
        mode = ctx.mode
        grad_input: Tensor | None = None
        grad_weight: Tensor | None = None
        work: Work | None = None
        gather: Work | None = None
        if wants_weight and mode == 2:
            input_, gather = start_all_gather(input_, group)
        if wants_input:
            grad_input = grad.matmul(weight)
            if mode == 1:
                work = start_all_reduce_(grad_input, group)
            elif mode == 2:
                # The partial sums must live until the collective has read them.
                partial = grad_input.contiguous()
                grad_input, work = start_reduce_scatter(partial, group)
        if wants_weight:
            if gather is not None:
                gather.wait()
            grad_weight = _weight_gradient(grad, input_)
        grad_bias = None
        if wants_bias:
            grad_bias = _bias_gradient(grad)
        if work is not None:
            work.wait()
        return grad_input, grad_weight, grad_bias, None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input_: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: ProcessGroup,
        sequence_parallel: bool,
    ) -> Tensor:
        _save(ctx, input_, weight)
        ctx.group = group
        ctx.sequence_parallel = sequence_parallel
        output = F.linear(input_, weight)
        if sequence_parallel:
            output = reduce_scatter(output, 0, group)
        else:
            all_reduce_(output, group)
        if bias is None:
            return output
        return output.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> _Gradients:
        input_, weight = ctx.saved_tensors
        wants_input, wants_weight, wants_bias, _, _ = ctx.needs_input_grad
        grad_bias = None
        if wants_bias:
            grad_bias = _bias_gradient(grad)
        if not ctx.sequence_parallel:
            grad = copy_gradient(grad, ctx.group)
        elif wants_input or wants_weight:
            grad = gather_gradient(grad, ctx.group)
        grad_input = None
        if wants_input:
            grad_input = grad.matmul(weight)
        grad_weight = None
        if wants_weight:
            grad_weight = _weight_gradient(grad, input_)
        return grad_input, grad_weight, grad_bias, None, None


# What `Function.apply` calls once it has seen that no transform is active, as is seen above.
_column: Callable[..., Tensor] = super(torch.autograd.Function, _Column).apply
_row: Callable[..., Tensor] = super(torch.autograd.Function, _Row).apply


def _save(ctx: Any, input_: Tensor, weight: Tensor) -> None:
    # Of a frozen layer the input is not kept, of the first one the weight is not.
    ctx.save_for_backward(
        input_ if weight.requires_grad else None, weight if input_.requires_grad else None
    )


def _weight_gradient(grad: Tensor, input_: Tensor) -> Tensor:
    if grad.dim() != 2:
        grad = grad.reshape(-1, grad.shape[-1])
        input_ = input_.reshape(-1, input_.shape[-1])
    return grad.t().mm(input_)


def _bias_gradient(grad: Tensor) -> Tensor:
    if grad.dim() == 2:
        return grad.sum(0)
    return grad.reshape(-1, grad.shape[-1]).sum(0)


# With create_graph=True the gradients are themselves differentiated: the same products, of
# functions that autograd records.
def _column_gradients(
    ctx: Any, grad: Tensor, input_: Tensor | None, weight: Tensor | None
) -> _Gradients:
    group = ctx.group
    mode = ctx.mode
    grad_input: Tensor | None = None
    grad_weight: Tensor | None = None
    if weight is not None:
        grad_input = grad.matmul(weight)
        if mode == 1:
            grad_input = reduce_from_tensor_parallel_region(grad_input, group)
        elif mode == 2:
            grad_input = reduce_scatter_to_sequence_parallel_region(grad_input, tp_group=group)
    if input_ is not None:
        if mode == 1:
            input_ = copy_to_tensor_parallel_region(input_, group)
        elif mode == 2:
            input_ = gather_from_sequence_parallel_region(input_, tp_group=group)
        grad_weight = _weight_gradient(grad, input_)
    grad_bias = None
    if ctx.needs_input_grad[2]:
        grad_bias = _bias_gradient(grad)
    return grad_input, grad_weight, grad_bias, None, None


def as_autocast(tensor: Tensor) -> Tensor:
    """Cast as autocast casts for products, outside a function: its gradient is cast back."""
    device = tensor.device.type
    # Autocast leaves float64 alone.
    if tensor.dtype == torch.float64 or not tensor.is_floating_point():
        return tensor
    if not torch.is_autocast_enabled(device):
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))
