"""How a tensor is split, known by its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeAlias

from ezpz_tp._errors import DegreeError, ParallelError

from .names import Split
from .source import Options
from .spec import Shard
from .torch_pickle import StoredTensor

Way: TypeAlias = int | tuple[int, int | Sequence[int]] | None
"""The dim that is split, or None; and with it the number, or the sizes, of matrices stacked."""


class Splits:
    """Which way tensors are split: as the caller's plan says, or else a table.

    Args:
        table: By pattern.
        options: The caller's plan, which comes first, and the vocabulary without padding.
    """

    def __init__(self, table: Mapping[str, Split], options: Options) -> None:
        self._table, self._plan = table, dict(options.plan or {})
        self._vocab_size = options.vocab_size

    def known(self, name: str) -> Split | None:
        """Return what the table says of a name, or None."""
        for pattern, split in self._table.items():
            if fnmatchcase(name, pattern):
                return split
        return None

    def shard(self, name: str, full_shape: tuple[int, ...]) -> Shard | None:
        """Return how a full tensor is to be split, or None if nothing is known of its name.

        A tensor without dims, which cannot be split, is always known. A vocabulary loses its
        padding.

        Raises:
            DegreeError: It cannot be split so.
            ParallelError: It has fewer rows than the vocabulary.
        """
        split = self.known(name)
        vocabulary = split is not None and split.padded
        if vocabulary and self._vocab_size is not None:
            if not 0 < self._vocab_size <= full_shape[0]:
                raise ParallelError(
                    f"vocab_size={self._vocab_size}; expected 1 to {full_shape[0]}: tensor {name} "
                    f"has shape {full_shape}"
                )
            full_shape = (self._vocab_size, *full_shape[1:])
        planned = self._planned(name)
        if planned is not None:
            return _shard(name, full_shape, planned, padded=vocabulary and planned.dim == 0)
        if split is not None:
            return _shard(name, full_shape, split, padded=vocabulary)
        return None if full_shape else Shard(full_shape)

    def stored(self, name: str, local_shape: tuple[int, ...], degree: int) -> Shard | None:
        """Return what a file's tensor is a part of, one of ``degree`` equal ones, or None.

        Here the table comes first: it says what the files are.

        Raises:
            DegreeError: It cannot have been split so.
        """
        split = self.known(name) or self._planned(name)
        if split is None:
            return None if local_shape else Shard(local_shape)
        return _shard(name, _full(local_shape, split.dim, degree), split, padded=split.padded)

    def _planned(self, name: str) -> Split | None:
        for pattern, way in self._plan.items():
            if fnmatchcase(name, pattern):
                dim, matrices = way if isinstance(way, tuple) and len(way) == 2 else (way, 1)
                sizes = (matrices,) if isinstance(matrices, int) else tuple(matrices)
                if not all(isinstance(each, int) for each in (dim or 0, *sizes)):
                    raise ParallelError(
                        f"plan[{pattern!r}]={way!r}; expected a dim, None for what every rank "
                        "holds whole, or (dim, matrices) with their number or sizes"
                    )
                return Split(dim, matrices)
        return None


def unknown(where: object, tensors: Mapping[str, tuple[int, ...]]) -> ParallelError:
    """Return what to raise of tensors whose names no rule knows."""
    shown = [f"{name} {list(shape)}" for name, shape in tensors.items()]
    more = f", ... ({len(shown)} in all)" if len(shown) > 8 else ""
    return ParallelError(
        f"{where}: no rule says how these tensors are split: {', '.join(shown[:8])}{more}. Give "
        'plan={"pattern": dim}, with None as the dim of what every rank holds whole'
    )


def same_names(
    where: object,
    found: Mapping[str, StoredTensor],
    first: object,
    wanted: Mapping[str, StoredTensor],
) -> None:
    """Raise `ParallelError` unless a file has the tensors that the first one has."""
    for name, tensor in wanted.items():
        if name not in found:
            raise ParallelError(
                f"{where}: has no tensor {name}; expected one of shape {tensor.shape}, as {first} "
                "has it (files of different models?)"
            )
    for name, tensor in found.items():
        if name not in wanted:
            raise ParallelError(
                f"{where}: has a tensor {name} of shape {tensor.shape}; expected none, as {first} "
                "has none (files of different models?)"
            )


def _shard(name: str, full_shape: tuple[int, ...], split: Split, *, padded: bool) -> Shard:
    dim, blocks = split.dim, split.matrices
    if dim is None:
        return Shard(full_shape)
    if isinstance(blocks, int):
        size = full_shape[dim] if -len(full_shape) <= dim < len(full_shape) else 0
        if blocks < 1 or size % blocks:
            raise DegreeError(
                f"{name}: dim {dim} of a tensor of shape {full_shape} is not {blocks} matrices of "
                "one size"
            )
        blocks = (size // blocks,) * blocks if blocks > 1 else ()
    try:
        return Shard(full_shape, dim, tuple(blocks), padded)
    except DegreeError as error:
        raise DegreeError(f"{name}: {error}") from error


def _full(local_shape: tuple[int, ...], dim: int | None, degree: int) -> tuple[int, ...]:
    if dim is None or not -len(local_shape) <= dim < len(local_shape):
        return local_shape
    dim %= len(local_shape)
    return (*local_shape[:dim], local_shape[dim] * degree, *local_shape[dim + 1 :])
