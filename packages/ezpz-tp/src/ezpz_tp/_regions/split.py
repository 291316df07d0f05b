"""Cutting tensors and vocabularies into the parts that ranks hold."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from ezpz_tp._errors import DegreeError
from ezpz_tp._groups.default import tensor_group

from .collectives import all_gather


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
    return flat.detach().clone() if new_buffer else flat


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
    return flat.clone() if group is None else all_gather(flat, 0, group)


def vocabulary_rows(num_embeddings: int, degree: int) -> int:
    """Return how many rows each rank's shard of a vocabulary has, padding included."""
    return -(-num_embeddings // degree)


def vocabulary_range(num_embeddings: int, index: int, degree: int) -> tuple[int, int]:
    """Return the first id of a rank's shard of a vocabulary, and the one after its last.

    A vocabulary that does not divide is padded at its end: shards are equally long, and the
    last ones hold fewer ids than rows, or none.

    >>> [vocabulary_range(10, index, degree=4) for index in range(4)]
    [(0, 3), (3, 6), (6, 9), (9, 10)]
    """
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
