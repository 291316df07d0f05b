"""Megatron-LM's region functions: its names and arguments over `ezpz_tp`'s.

Source: NVIDIA/Megatron-LM megatron/core/tensor_parallel/mappings.py, 2026-08-22.
``group`` defaults to the tensor-parallel group. All are collective.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ezpz_tp import _mappings
from ezpz_tp._current import tensor_group
from ezpz_tp._errors import DegreeError, ParallelError

__all__ = [
    "all_gather_last_dim_from_tensor_parallel_region", "all_to_all", "all_to_all_hp2sp",
    "all_to_all_sp2hp", "copy_to_tensor_model_parallel_region",
    "gather_from_sequence_parallel_region", "gather_from_tensor_model_parallel_region",
    "reduce_from_tensor_model_parallel_region", "reduce_scatter_last_dim_to_tensor_parallel_region",
    "reduce_scatter_to_sequence_parallel_region", "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
]  # fmt: skip


def copy_to_tensor_model_parallel_region(
    input_: Tensor, group: ProcessGroup | None = None
) -> Tensor:
    """See `ezpz_tp.copy_to_tensor_parallel_region`."""
    return _mappings.copy_to_tensor_parallel_region(input_, group)


def reduce_from_tensor_model_parallel_region(
    input_: Tensor, group: ProcessGroup | None = None
) -> Tensor:
    """See `ezpz_tp.reduce_from_tensor_parallel_region`."""
    return _mappings.reduce_from_tensor_parallel_region(input_, group)


def scatter_to_tensor_model_parallel_region(
    input_: Tensor, group: ProcessGroup | None = None
) -> Tensor:
    """See `ezpz_tp.scatter_to_tensor_parallel_region`."""
    return _mappings.scatter_to_tensor_parallel_region(input_, group)


def gather_from_tensor_model_parallel_region(
    input_: Tensor, group: ProcessGroup | None = None
) -> Tensor:
    """See `ezpz_tp.gather_from_tensor_parallel_region`."""
    return _mappings.gather_from_tensor_parallel_region(input_, group)


def all_gather_last_dim_from_tensor_parallel_region(
    input_: Tensor, group: ProcessGroup | None = None
) -> Tensor:
    """See `ezpz_tp.all_gather_last_dim_from_tensor_parallel_region`."""
    return _mappings.all_gather_last_dim_from_tensor_parallel_region(input_, group)


def reduce_scatter_last_dim_to_tensor_parallel_region(
    input_: Tensor, group: ProcessGroup | None = None
) -> Tensor:
    """See `ezpz_tp.reduce_scatter_last_dim_to_tensor_parallel_region`."""
    return _mappings.reduce_scatter_last_dim_to_tensor_parallel_region(input_, group)


def all_to_all_sp2hp(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """See `ezpz_tp.all_to_all_sp2hp`."""
    return _mappings.all_to_all_sp2hp(input_, group)


def all_to_all_hp2sp(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """See `ezpz_tp.all_to_all_hp2sp`."""
    return _mappings.all_to_all_hp2sp(input_, group)


def scatter_to_sequence_parallel_region(
    input_: Tensor, group: ProcessGroup | None = None
) -> Tensor:
    """See `ezpz_tp.scatter_to_sequence_parallel_region`."""
    return _mappings.scatter_to_sequence_parallel_region(input_, 0, group)


def gather_from_sequence_parallel_region(
    input_: Tensor,
    tensor_parallel_output_grad: bool = True,
    group: ProcessGroup | None = None,
    output_split_sizes: list[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """See `ezpz_tp.gather_from_sequence_parallel_region`.

    ``output_split_sizes`` are the rows that each rank holds, where they differ.

    Raises:
        DegreeError: ``output_split_sizes`` are not those of this group or this input.
    """
    name = "gather_from_sequence_parallel_region"
    _refuse_global_buffer(name, use_global_buffer)
    ranks = tensor_group(group)
    if ranks is None or output_split_sizes is None:
        return _mappings.gather_from_sequence_parallel_region(
            input_, tensor_parallel_output_grad, 0, group
        )
    own = _local_rows(name, output_split_sizes, ranks)
    if input_.shape[0] != own:
        raise DegreeError(
            f"{name}: output_split_sizes {output_split_sizes} give rank {ranks.rank()} {own} rows, "
            f"but its input {tuple(input_.shape)} has {input_.shape[0]}"
        )
    joined = _mappings.gather_from_sequence_parallel_region(
        _pad_rows(input_, max(output_split_sizes)), tensor_parallel_output_grad, 0, ranks
    )
    parts = joined.tensor_split(ranks.size())
    return torch.cat([part[:size] for part, size in zip(parts, output_split_sizes, strict=True)])


def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor,
    group: ProcessGroup | None = None,
    input_split_sizes: list[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """See `ezpz_tp.reduce_scatter_to_sequence_parallel_region`.

    ``input_split_sizes`` are the rows that each rank keeps, where they differ.

    Raises:
        DegreeError: The degree does not divide the rows, or ``input_split_sizes`` are not those
            of this group or this input.
    """
    name = "reduce_scatter_to_sequence_parallel_region"
    _refuse_global_buffer(name, use_global_buffer)
    ranks = tensor_group(group)
    if ranks is None or input_split_sizes is None:
        return _mappings.reduce_scatter_to_sequence_parallel_region(input_, 0, group)
    own = _local_rows(name, input_split_sizes, ranks)
    if input_.shape[0] != sum(input_split_sizes):
        raise DegreeError(
            f"{name}: input_split_sizes {input_split_sizes} add up to {sum(input_split_sizes)}, "
            f"but the input {tuple(input_.shape)} has {input_.shape[0]} rows"
        )
    longest = max(input_split_sizes)
    padded = torch.cat([_pad_rows(part, longest) for part in input_.split(input_split_sizes)])
    return _mappings.reduce_scatter_to_sequence_parallel_region(padded, 0, ranks)[:own]


def all_to_all(
    group: ProcessGroup,
    input_: Tensor,
    output_split_sizes_: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    use_nccl_stream: bool = False,
) -> Tensor:
    """See `ezpz_tp.all_to_all`.

    ``use_nccl_stream`` is without effect, because the result is ready on return either way.

    Raises:
        ParallelError: ``group`` is None, which would mean every rank.
    """
    del use_nccl_stream
    if group is None:
        raise ParallelError("all_to_all: group is None; expected the group to exchange within")
    return _mappings.all_to_all(input_, output_split_sizes_, input_split_sizes, group=group)


def _local_rows(region: str, sizes: list[int], group: ProcessGroup) -> int:
    if len(sizes) != group.size():
        raise DegreeError(
            f"{region}: {len(sizes)} split sizes {sizes}; expected one for each of "
            f"{group.size()} ranks"
        )
    return sizes[group.rank()]


def _pad_rows(tensor: Tensor, rows: int) -> Tensor:
    # All ranks send as much, because only gloo and NCCL know how to join uneven parts. The
    # gradient of padding is cut off again.
    return torch.cat([tensor, tensor.new_zeros((rows - tensor.shape[0], *tensor.shape[1:]))])


def _refuse_global_buffer(region: str, asked: bool) -> None:
    if asked:
        raise NotImplementedError(
            f"{region}: use_global_buffer=True is not supported: the result would be overwritten "
            "by the next call; leave it out"
        )
