"""Region functions: what a tensor goes through where sharded and replicated code meet.

Each is one collective in forward, backward or both, as in Shoeybi et al., "Megatron-LM"
(arXiv:1909.08053), and Korthikanti et al. (arXiv:2205.05198) for sequence parallelism:

=========================================================  =================  =================
function                                                   forward            backward
=========================================================  =================  =================
copy_to_tensor_parallel_region                             -                  all-reduce
reduce_from_tensor_parallel_region                         all-reduce         -
scatter_to_tensor_parallel_region                          split last dim     all-gather
gather_from_tensor_parallel_region                         all-gather         split last dim
scatter_to_sequence_parallel_region                        split              all-gather
gather_from_sequence_parallel_region                       all-gather         reduce-scatter
reduce_scatter_to_sequence_parallel_region                 reduce-scatter     all-gather
all_gather_last_dim_from_tensor_parallel_region            all-gather         reduce-scatter
reduce_scatter_last_dim_to_tensor_parallel_region          reduce-scatter     all-gather
all_to_all, sequence_to_head, head_to_sequence             all-to-all         all-to-all
=========================================================  =================  =================

All are collective: every rank of the group calls them, in the same order. ``tp_group`` defaults
to the tensor-parallel group; where that has one rank, or nothing is initialized, they return
their input. None changes an input or a gradient in place: autograd shares gradients between
branches, and an expanded one has less memory than it has elements.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.overrides import has_torch_function_unary

from ezpz_tp._errors import DegreeError
from ezpz_tp._groups.default import tensor_group

from .collectives import all_gather, all_reduce, reduce_scatter
from .collectives import all_to_all as exchange_rows
from .watched import watched


def applied(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """Call an autograd function, which torch leaves without types."""
    output: Tensor = function.apply(*arguments)
    return output


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return input_

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_gradient(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return all_reduce(input_, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return copy_gradient(grad, ctx.group), None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return own_part(input_, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return applied(_Gather, grad, ctx.dim, False, ctx.group), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_: Tensor, dim: int, partial: bool, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.partial, ctx.group = dim, partial, group
        return all_gather(input_, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        inverse = _ReduceScatter if ctx.partial else _Split
        return applied(inverse, grad, ctx.dim, ctx.group), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return reduce_scatter(input_, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return applied(_Gather, grad, ctx.dim, True, ctx.group), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input_: Tensor,
        output_splits: list[int] | None,
        input_splits: list[int] | None,
        group: ProcessGroup,
    ) -> Tensor:
        ctx.output_splits, ctx.input_splits, ctx.group = output_splits, input_splits, group
        return exchange_rows(input_, group, output_splits, input_splits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        splits = ctx.input_splits, ctx.output_splits
        return applied(_AllToAll, grad, *splits, ctx.group), None, None, None


# As functions of their own, so that a second derivative goes through the regions too.
def reduce_gradient(grad: Tensor, group: ProcessGroup) -> Tensor:
    return applied(_Reduce, grad, group) if torch.is_grad_enabled() else all_reduce(grad, group)


def copy_gradient(grad: Tensor, group: ProcessGroup) -> Tensor:
    return applied(_Copy, grad, group) if torch.is_grad_enabled() else grad


def own_part(input_: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """A copy of this rank's equal part along ``dim``: never a view into the input."""
    size = input_.shape[dim] // group.size()
    part = input_.narrow(dim, group.rank() * size, size)
    return part.clone(memory_format=torch.contiguous_format)


def copy_to_tensor_parallel_region(input_: Tensor, tp_group: ProcessGroup | None = None) -> Tensor:
    """Hand a replicated tensor to sharded code: the ranks' gradients are summed."""
    if has_torch_function_unary(input_):
        return watched(copy_to_tensor_parallel_region, input_, tp_group)
    group = tensor_group(tp_group)
    return input_ if group is None else applied(_Copy, input_, group)


def reduce_from_tensor_parallel_region(
    input_: Tensor, tp_group: ProcessGroup | None = None
) -> Tensor:
    """Sum the ranks' partial results."""
    if has_torch_function_unary(input_):
        return watched(reduce_from_tensor_parallel_region, input_, tp_group)
    group = tensor_group(tp_group)
    return input_ if group is None else applied(_Reduce, input_, group)


def scatter_to_tensor_parallel_region(
    input_: Tensor, tp_group: ProcessGroup | None = None
) -> Tensor:
    """Keep this rank's part of the last dim of a replicated tensor ``[..., h]``: ``[..., h/tp]``.

    Raises:
        DegreeError: The degree does not divide the last dim.
    """
    if has_torch_function_unary(input_):
        return watched(scatter_to_tensor_parallel_region, input_, tp_group)
    group = tensor_group(tp_group)
    if group is None:
        return input_
    _check_divides(input_, -1, group, "scatter_to_tensor_parallel_region")
    return applied(_Split, input_, -1, group)


def gather_from_tensor_parallel_region(
    input_: Tensor, tp_group: ProcessGroup | None = None
) -> Tensor:
    """Join the ranks' parts ``[..., h/tp]`` along the last dim: ``[..., h]`` on every rank.

    The gradient of the result must be the same on all ranks: each keeps its part of it.
    """
    if has_torch_function_unary(input_):
        return watched(gather_from_tensor_parallel_region, input_, tp_group)
    group = tensor_group(tp_group)
    if group is None:
        return input_
    _check_has_dims(input_, "gather_from_tensor_parallel_region")
    return applied(_Gather, input_, -1, False, group)


def scatter_to_sequence_parallel_region(
    input_: Tensor, dim: int = 0, tp_group: ProcessGroup | None = None
) -> Tensor:
    """Keep this rank's part of the sequence of a replicated tensor ``[s, ...]``: ``[s/tp, ...]``.

    Raises:
        DegreeError: The degree does not divide the sequence.
    """
    if has_torch_function_unary(input_):
        return watched(scatter_to_sequence_parallel_region, input_, dim, tp_group)
    group = tensor_group(tp_group)
    if group is None:
        return input_
    _check_divides(input_, dim, group, "scatter_to_sequence_parallel_region")
    return applied(_Split, input_, dim, group)


def gather_from_sequence_parallel_region(
    input_: Tensor,
    tensor_parallel_output_grad: bool = True,
    dim: int = 0,
    tp_group: ProcessGroup | None = None,
) -> Tensor:
    """Join the ranks' parts of the sequence ``[s/tp, ...]``: ``[s, ...]`` on every rank.

    Args:
        input_: This rank's part.
        tensor_parallel_output_grad: True where sharded code follows: its gradients are
            partial, so they are summed (reduce-scatter). False where replicated code follows:
            its gradient is the same on all ranks, each keeps its part.
        dim: That of the sequence.
        tp_group: Default: the tensor-parallel group.
    """
    if has_torch_function_unary(input_):
        return watched(
            gather_from_sequence_parallel_region, input_, tensor_parallel_output_grad, dim, tp_group
        )
    group = tensor_group(tp_group)
    if group is None:
        return input_
    _check_has_dims(input_, "gather_from_sequence_parallel_region")
    return applied(_Gather, input_, dim, tensor_parallel_output_grad, group)


def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor, dim: int = 0, tp_group: ProcessGroup | None = None
) -> Tensor:
    """Sum the ranks' partial results ``[s, ...]`` and keep this rank's part: ``[s/tp, ...]``.

    Raises:
        DegreeError: The degree does not divide the sequence.
    """
    if has_torch_function_unary(input_):
        return watched(reduce_scatter_to_sequence_parallel_region, input_, dim, tp_group)
    group = tensor_group(tp_group)
    if group is None:
        return input_
    _check_divides(input_, dim, group, "reduce_scatter_to_sequence_parallel_region")
    return applied(_ReduceScatter, input_, dim, group)


def all_gather_last_dim_from_tensor_parallel_region(
    input_: Tensor, tp_group: ProcessGroup | None = None
) -> Tensor:
    """Join the ranks' parts ``[..., h/tp]`` where sharded code follows: gradients are summed."""
    if has_torch_function_unary(input_):
        return watched(all_gather_last_dim_from_tensor_parallel_region, input_, tp_group)
    group = tensor_group(tp_group)
    if group is None:
        return input_
    _check_has_dims(input_, "all_gather_last_dim_from_tensor_parallel_region")
    return applied(_Gather, input_, -1, True, group)


def reduce_scatter_last_dim_to_tensor_parallel_region(
    input_: Tensor, tp_group: ProcessGroup | None = None
) -> Tensor:
    """Sum the ranks' partial results ``[..., h]`` and keep this rank's part ``[..., h/tp]``.

    Raises:
        DegreeError: The degree does not divide the last dim.
    """
    if has_torch_function_unary(input_):
        return watched(reduce_scatter_last_dim_to_tensor_parallel_region, input_, tp_group)
    group = tensor_group(tp_group)
    if group is None:
        return input_
    _check_divides(input_, -1, group, "reduce_scatter_last_dim_to_tensor_parallel_region")
    return applied(_ReduceScatter, input_, -1, group)


def _check_divides(input_: Tensor, dim: int, group: ProcessGroup, region: str) -> None:
    _check_has_dims(input_, region)
    if input_.shape[dim] % group.size():
        raise DegreeError(
            f"{region}: dim {dim} of {tuple(input_.shape)} is {input_.shape[dim]}, which "
            f"{group.size()} ranks do not divide; pad it to a multiple"
        )


def _check_has_dims(input_: Tensor, region: str) -> None:
    if not input_.dim():
        raise DegreeError(f"{region}: the input is 0-dim; expected at least one dim to share")
