"""All-to-all regions: a tensor that is sharded along one dim becomes sharded along another.

Ulysses (Jacobs et al., arXiv:2309.14509) holds a part of the sequence outside attention and a
part of the heads inside it. All are collective, and change neither inputs nor gradients.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.overrides import has_torch_function_unary

from ezpz_tp._errors import DegreeError
from ezpz_tp._groups.default import tensor_group

from .mappings import _AllToAll, applied
from .watched import watched


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
    if has_torch_function_unary(input_):
        return watched(all_to_all, input_, output_split_sizes, input_split_sizes, group=group)
    if group.size() == 1:
        return input_
    rows, ranks = input_.shape[0], group.size()
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
    """Split one dim over the ranks, and join what they send along another."""
    if group is None:
        return input_
    ranks, split, joined = group.size(), split % input_.dim(), joined % input_.dim()
    if input_.shape[split] % ranks:
        raise DegreeError(
            f"{name}: dim {split} of {tuple(input_.shape)} is {input_.shape[split]}, which "
            f"{ranks} ranks do not divide"
        )
    parts = input_.unflatten(split, (ranks, -1)).movedim(split, 0)
    received = all_to_all(parts.contiguous(), group=group)
    return received.movedim(0, joined).flatten(joined, joined + 1)
