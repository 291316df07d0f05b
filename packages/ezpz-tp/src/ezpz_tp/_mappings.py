# ruff: noqa: SLF001 - torch names the collectives of one tensor so, and has no others
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
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    AllreduceOptions,
    BroadcastOptions,
    ReduceScatterOptions,
)

from ._current import tensor_group
from ._errors import DegreeError

# Collectives on tensors, without autograd. What ends in an underscore works in place, on a tensor
# that the caller owns; all else returns a new one.
#
# The methods of the process group are called directly: `torch.distributed.all_reduce` adds 2 us
# of checks that are done once here, as much as a small addition costs. While torch.compile
# traces, the functions of `torch.distributed` are called instead, because it knows those.

SUM = dist.ReduceOp.SUM

_BLOCKING = AllreduceOptions()
_OVERLAPPED = AllreduceOptions()
_GATHER = AllgatherOptions()
_OVERLAPPED_GATHER = AllgatherOptions()
_SCATTER = ReduceScatterOptions()
_OVERLAPPED_SCATTER = ReduceScatterOptions()
if hasattr(_BLOCKING, "asyncOp"):  # unknown before torch 2.8
    # False keeps NCCL's work on the current stream.
    _BLOCKING.asyncOp = _GATHER.asyncOp = _SCATTER.asyncOp = False
    _OVERLAPPED.asyncOp = _OVERLAPPED_GATHER.asyncOp = _OVERLAPPED_SCATTER.asyncOp = True


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


def all_reduce(tensor: Tensor, group: ProcessGroup) -> Tensor:
    return all_reduce_(contiguous_copy(tensor), group)


# What starts a collective and does not wait is not for code under torch.compile.
def start_all_reduce_(tensor: Tensor, group: ProcessGroup) -> Work:
    """Start the sum, in place, of a tensor that the caller owns; it is ready after ``wait()``."""
    return group.allreduce([tensor], _OVERLAPPED)


def all_gather(tensor: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return the ranks' tensors, of one shape, joined along ``dim`` by rank. Collective."""
    dim %= tensor.dim()
    parts = tensor.new_empty((group.size() * tensor.shape[0], *tensor.shape[1:]))
    if torch.compiler.is_compiling():
        dist.all_gather_into_tensor(parts, tensor.contiguous(), group)
    else:
        _wait(group._allgather_base(parts, tensor.contiguous(), _GATHER))
    if dim == 0:
        return parts
    return torch.cat(parts.chunk(group.size()), dim)


def start_all_gather(tensor: Tensor, group: ProcessGroup) -> tuple[Tensor, Work]:
    """Start to join the ranks' tensors along dim 0; the result is ready after ``wait()``."""
    parts = tensor.new_empty((group.size() * tensor.shape[0], *tensor.shape[1:]))
    return parts, group._allgather_base(parts, tensor.contiguous(), _OVERLAPPED_GATHER)


def reduce_scatter(tensor: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return this rank's part, along ``dim``, of the ranks' sum. Collective."""
    cut: Tensor = tensor.unflatten(dim, (group.size(), -1))
    parts = cut.movedim(dim % tensor.dim(), 0).contiguous()
    part = tensor.new_empty(parts.shape[1:])
    if torch.compiler.is_compiling():
        dist.reduce_scatter_tensor(part, parts.flatten(0, 1), SUM, group)
    else:
        _wait(group._reduce_scatter_base(part, parts.flatten(0, 1), _SCATTER))
    return part


def start_reduce_scatter(tensor: Tensor, group: ProcessGroup) -> tuple[Tensor, Work]:
    """Start to sum the ranks' tensors and keep this rank's part along dim 0."""
    part = tensor.new_empty((tensor.shape[0] // group.size(), *tensor.shape[1:]))
    return part, group._reduce_scatter_base(part, tensor.contiguous(), _OVERLAPPED_SCATTER)


def exchange_rows(
    tensor: Tensor,
    group: ProcessGroup,
    output_splits: list[int] | None = None,
    input_splits: list[int] | None = None,
) -> Tensor:
    """Send a part of dim 0 to each rank and return what they sent, by rank. Collective."""
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


def _wait(work: Work | None) -> None:
    # A backend that has ordered the operation in its stream already may return none.
    if work is not None:
        work.wait()


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
        ctx.dim = dim
        ctx.group = group
        size = input_.shape[dim] // group.size()
        # Never a view into the input.
        return contiguous_copy(input_.narrow(dim, group.rank() * size, size))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return applied(_Gather, grad, ctx.dim, False, ctx.group), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_: Tensor, dim: int, partial: bool, group: ProcessGroup) -> Tensor:
        ctx.dim = dim
        ctx.partial = partial
        ctx.group = group
        return all_gather(input_, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.partial:
            own = applied(_ReduceScatter, grad, ctx.dim, ctx.group)
        else:
            own = applied(_Split, grad, ctx.dim, ctx.group)
        return own, None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim = dim
        ctx.group = group
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
        ctx.output_splits = output_splits
        ctx.input_splits = input_splits
        ctx.group = group
        return exchange_rows(input_, group, output_splits, input_splits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        splits = ctx.input_splits, ctx.output_splits
        return applied(_AllToAll, grad, *splits, ctx.group), None, None, None


# As functions of their own, so that a second derivative goes through the regions too.
def reduce_gradient(grad: Tensor, group: ProcessGroup) -> Tensor:
    if torch.is_grad_enabled():
        return applied(_Reduce, grad, group)
    return all_reduce(grad, group)


def copy_gradient(grad: Tensor, group: ProcessGroup) -> Tensor:
    if torch.is_grad_enabled():
        return applied(_Copy, grad, group)
    return grad


def gather_gradient(grad: Tensor, group: ProcessGroup) -> Tensor:
    if torch.is_grad_enabled():
        return applied(_Gather, grad, 0, True, group)
    return all_gather(grad, 0, group)


def copy_to_tensor_parallel_region(input_: Tensor, tp_group: ProcessGroup | None = None) -> Tensor:
    """Hand a replicated tensor to sharded code: the ranks' gradients are summed."""
    group = tensor_group(tp_group)
    if group is None:
        return input_
    return applied(_Copy, input_, group)


def reduce_from_tensor_parallel_region(
    input_: Tensor, tp_group: ProcessGroup | None = None
) -> Tensor:
    """Sum the ranks' partial results."""
    group = tensor_group(tp_group)
    if group is None:
        return input_
    return applied(_Reduce, input_, group)


def scatter_to_tensor_parallel_region(
    input_: Tensor, tp_group: ProcessGroup | None = None
) -> Tensor:
    """Keep this rank's part of the last dim of a replicated tensor ``[..., h]``: ``[..., h/tp]``.

    Raises:
        DegreeError: The degree does not divide the last dim.
    """
    return _exchanged(_Split, "scatter_to_tensor_parallel_region", tp_group, input_, -1)


def gather_from_tensor_parallel_region(
    input_: Tensor, tp_group: ProcessGroup | None = None
) -> Tensor:
    """Join the ranks' parts ``[..., h/tp]`` along the last dim: ``[..., h]`` on every rank.

    The gradient of the result must be the same on all ranks: each keeps its part of it.
    """
    return _exchanged(_Gather, "gather_from_tensor_parallel_region", tp_group, input_, -1, False)


def scatter_to_sequence_parallel_region(
    input_: Tensor, dim: int = 0, tp_group: ProcessGroup | None = None
) -> Tensor:
    """Keep this rank's part of the sequence of a replicated tensor ``[s, ...]``: ``[s/tp, ...]``.

    Raises:
        DegreeError: The degree does not divide the sequence.
    """
    return _exchanged(_Split, "scatter_to_sequence_parallel_region", tp_group, input_, dim)


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
    name = "gather_from_sequence_parallel_region"
    return _exchanged(_Gather, name, tp_group, input_, dim, tensor_parallel_output_grad)


def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor, dim: int = 0, tp_group: ProcessGroup | None = None
) -> Tensor:
    """Sum the ranks' partial results ``[s, ...]`` and keep this rank's part: ``[s/tp, ...]``.

    Raises:
        DegreeError: The degree does not divide the sequence.
    """
    name = "reduce_scatter_to_sequence_parallel_region"
    return _exchanged(_ReduceScatter, name, tp_group, input_, dim)


def all_gather_last_dim_from_tensor_parallel_region(
    input_: Tensor, tp_group: ProcessGroup | None = None
) -> Tensor:
    """Join the ranks' parts ``[..., h/tp]`` where sharded code follows: gradients are summed."""
    name = "all_gather_last_dim_from_tensor_parallel_region"
    return _exchanged(_Gather, name, tp_group, input_, -1, True)


def reduce_scatter_last_dim_to_tensor_parallel_region(
    input_: Tensor, tp_group: ProcessGroup | None = None
) -> Tensor:
    """Sum the ranks' partial results ``[..., h]`` and keep this rank's part ``[..., h/tp]``.

    Raises:
        DegreeError: The degree does not divide the last dim.
    """
    name = "reduce_scatter_last_dim_to_tensor_parallel_region"
    return _exchanged(_ReduceScatter, name, tp_group, input_, -1)


def _exchanged(
    function: type[torch.autograd.Function],
    region: str,
    tp_group: ProcessGroup | None,
    input_: Tensor,
    dim: int,
    *more: bool,
) -> Tensor:
    group = tensor_group(tp_group)
    if group is None:
        return input_
    if not input_.dim():
        raise DegreeError(f"{region}: the input is 0-dim; expected at least one dim to share")
    # A gather joins what there is. (Not by the function's class, which torch.compile cannot trace.)
    if "scatter" in region and input_.shape[dim] % group.size():
        raise DegreeError(
            f"{region}: dim {dim} of {tuple(input_.shape)} is {input_.shape[dim]}, which "
            f"{group.size()} ranks do not divide; pad it to a multiple"
        )
    return applied(function, input_, dim, *more, group)


# All-to-all regions: a tensor that is sharded along one dim becomes sharded along another.
#
# Ulysses (Jacobs et al., arXiv:2309.14509) holds a part of the sequence outside attention and a
# part of the heads inside it. All are collective, and change neither inputs nor gradients.


def all_to_all(
    input_: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    *,
    group: ProcessGroup,
) -> Tensor:
    """Send rows of ``input_`` to each rank of ``group`` and return the rows that they sent.

    Args:
        input_: ``[rows, ...]``.
        output_split_sizes: Rows that come from each rank; None for equal parts.
        input_split_sizes: Rows that go to each rank; None for equal parts.
        group: The ranks.

    Raises:
        DegreeError: The split sizes do not add up to the rows, or there is not one a rank.
    """
    if group.size() == 1:
        return input_
    rows = input_.shape[0]
    ranks = group.size()
    if input_split_sizes is None and rows % ranks:
        raise DegreeError(f"all_to_all: {ranks} ranks do not divide {rows} rows; give split sizes")
    if input_split_sizes is not None and sum(input_split_sizes) != rows:
        raise DegreeError(
            f"all_to_all: input_split_sizes {input_split_sizes} add up to "
            f"{sum(input_split_sizes)}; expected the {rows} rows of the input"
        )
    for name, sizes in (("input", input_split_sizes), ("output", output_split_sizes)):
        if sizes is not None and len(sizes) != ranks:
            raise DegreeError(
                f"all_to_all: {name}_split_sizes has {len(sizes)} entries; expected one for "
                f"each of {ranks} ranks"
            )
    return applied(_AllToAll, input_, output_split_sizes, input_split_sizes, group)


def sequence_to_head(
    input_: Tensor, sequence_dim: int, head_dim: int, group: ProcessGroup | None = None
) -> Tensor:
    """Gather the sequence and shard the heads: ``[s/n, ..., h]`` becomes ``[s, ..., h/n]``.

    Args:
        input_: This rank's part of the sequence, with all heads.
        sequence_dim: The dim that is gathered.
        head_dim: The dim that is sharded.
        group: The ranks that share the sequence; default: the tensor-parallel group.

    Raises:
        DegreeError: The group's size does not divide the heads.
    """
    return _reshard(input_, head_dim, sequence_dim, tensor_group(group), "sequence_to_head")


def head_to_sequence(
    input_: Tensor, sequence_dim: int, head_dim: int, group: ProcessGroup | None = None
) -> Tensor:
    """Gather the heads and shard the sequence: ``[s, ..., h/n]`` becomes ``[s/n, ..., h]``.

    The inverse of `sequence_to_head`, with the same arguments.
    """
    return _reshard(input_, sequence_dim, head_dim, tensor_group(group), "head_to_sequence")


def all_to_all_sp2hp(input_: Tensor, tp_group: ProcessGroup | None = None) -> Tensor:
    """Turn ``[..., h]`` with this rank's tokens into ``[tokens, h/tp]`` with all of them."""
    rows = input_.reshape(-1, input_.shape[-1])
    return _reshard(rows, 1, 0, tensor_group(tp_group), "all_to_all_sp2hp")


def all_to_all_hp2sp(input_: Tensor, tp_group: ProcessGroup | None = None) -> Tensor:
    """Turn ``[..., h/tp]`` with all tokens into ``[tokens/tp, h]`` with this rank's."""
    rows = input_.reshape(-1, input_.shape[-1])
    return _reshard(rows, 0, 1, tensor_group(tp_group), "all_to_all_hp2sp")


def _reshard(
    input_: Tensor, split: int, joined: int, group: ProcessGroup | None, name: str
) -> Tensor:
    if group is None:
        return input_
    ranks = group.size()
    split = split % input_.dim()
    joined = joined % input_.dim()
    if input_.shape[split] % ranks:
        raise DegreeError(
            f"{name}: dim {split} of {tuple(input_.shape)} is {input_.shape[split]}, which "
            f"{ranks} ranks do not divide"
        )
    parts = input_.unflatten(split, (ranks, -1)).movedim(split, 0)
    received = all_to_all(parts.contiguous(), group=group)
    return received.movedim(0, joined).flatten(joined, joined + 1)


# Cutting tensors and vocabularies into the parts that ranks hold.


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raise `DegreeError` unless ``numerator`` is a multiple of ``denominator``."""
    if denominator < 1 or numerator % denominator:
        raise DegreeError(
            f"{numerator} is not divisible by {denominator}; "
            f"expected a multiple, so that each of {denominator} ranks holds as much"
        )


def divide_and_check_no_remainder(numerator: int, denominator: int) -> int:
    """Return ``numerator / denominator``; raise `DegreeError` where there is a remainder."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Split a tensor into equal parts of its last dim.

    Args:
        tensor: Any shape ``[..., n]`` and dtype.
        num_partitions: How many parts; has to divide ``n``.
        contiguous_split_chunks: Copy each part into memory of its own. Without it the parts
            are views.

    Returns:
        ``num_partitions`` tensors of shape ``[..., n / num_partitions]``.

    Raises:
        DegreeError: The last dim does not divide.
    """
    if tensor.dim() == 0 or num_partitions < 1 or tensor.size(-1) % num_partitions:
        raise DegreeError(
            f"split_tensor_along_last_dim: the last dim of {tuple(tensor.shape)} does not "
            f"split into {num_partitions} equal parts"
        )
    parts: tuple[Tensor, ...] = tensor.split(tensor.size(-1) // num_partitions, dim=-1)
    if contiguous_split_chunks:
        return tuple(part.contiguous() for part in parts)
    return parts


def split_tensor_into_1d_equal_chunks(
    tensor: Tensor, new_buffer: bool = False, tp_group: ProcessGroup | None = None
) -> Tensor:
    """Return this rank's part of a tensor that every tensor-parallel rank holds, flattened.

    Args:
        tensor: Any shape; its number of elements is a multiple of the degree.
        new_buffer: Return a detached copy, so that the whole can be freed. Without it the part
            is a view where ``tensor`` is contiguous.
        tp_group: The tensor-parallel group; the default state's if None.

    Raises:
        DegreeError: The elements cannot be shared out equally (Megatron-LM drops the rest).
    """
    group = tensor_group(tp_group)
    flat = tensor.reshape(-1)
    if group is not None:
        degree = group.size()
        if flat.numel() % degree:
            raise DegreeError(
                f"split_tensor_into_1d_equal_chunks: {tuple(tensor.shape)} has {flat.numel()} "
                f"elements, which {degree} tensor-parallel ranks cannot share equally"
            )
        length = flat.numel() // degree
        flat = flat.narrow(0, group.rank() * length, length)
    if new_buffer:
        return flat.detach().clone()
    return flat


def gather_split_1d_tensor(tensor: Tensor, tp_group: ProcessGroup | None = None) -> Tensor:
    """Join the parts that `split_tensor_into_1d_equal_chunks` made; the inverse of it.

    Collective: every rank of the tensor-parallel group calls this.

    Args:
        tensor: This rank's part, ``[n]``, of the same length and dtype on every rank.
        tp_group: The tensor-parallel group; the default state's if None.

    Returns:
        A new tensor ``[n * degree]``, outside autograd.
    """
    group = tensor_group(tp_group)
    flat = tensor.detach().reshape(-1)
    if group is None:
        return flat.clone()
    return all_gather(flat, 0, group)


def vocabulary_rows(num_embeddings: int, degree: int) -> int:
    return -(-num_embeddings // degree)


def vocabulary_range(num_embeddings: int, index: int, degree: int) -> tuple[int, int]:
    """Return the first id of a rank's shard, and the one after its last."""
    # A vocabulary that does not divide is padded at its end: the last shards hold fewer ids.
    rows = vocabulary_rows(num_embeddings, degree)
    return min(index * rows, num_embeddings), min((index + 1) * rows, num_embeddings)


class VocabUtility:
    """The ids ``[first, last)`` of a rank's shard of the vocabulary, under Megatron's names."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int,
        rank: int,
        world_size: int,  # noqa: ARG004 (part of the signature, in Megatron-LM as well)
    ) -> tuple[int, int]:
        """Return the range of a rank whose shard holds ``per_partition_vocab_size`` ids."""
        first = rank * per_partition_vocab_size
        return first, first + per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(
        global_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """Return the range of a rank; the last ranks' is shorter where the size is uneven."""
        return vocabulary_range(global_vocab_size, rank, world_size)
