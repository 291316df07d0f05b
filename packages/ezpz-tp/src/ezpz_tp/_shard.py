"""A piece of a tensor, and which pieces each tensor-parallel rank holds: pure arithmetic."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ._errors import DegreeError
from ._mappings import vocabulary_range, vocabulary_rows


class Piece(NamedTuple):
    """A box of a tensor.

    Attributes:
        offsets: Where it begins in the whole, by dim.
        sizes: How large it is, by dim.

    >>> Piece((0, 2), (4, 4)).overlap(Piece((2, 0), (4, 4)))
    Piece(offsets=(2, 2), sizes=(2, 2))
    >>> Piece((2, 2), (2, 2)).within(Piece((0, 2), (4, 4)))
    Piece(offsets=(2, 0), sizes=(2, 2))
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """Return the indices by which a tensor has this piece."""
        return tuple(slice(start, start + size) for start, size in zip(*self, strict=True))

    def overlap(self, other: Piece) -> Piece | None:
        """Return what both have in common; None: nothing."""
        offsets = []
        sizes = []
        for start, size, begin, count in zip(*self, *other, strict=True):
            first = max(start, begin)
            last = min(start + size, begin + count)
            if first >= last:
                return None
            offsets.append(first)
            sizes.append(last - first)
        return Piece(tuple(offsets), tuple(sizes))

    def within(self, outer: Piece) -> Piece:
        """Return the same box, counted from where another begins."""
        return self.moved([-first for first in outer.offsets])

    def moved(self, by: Sequence[int]) -> Piece:
        """Return a box of the same sizes, elsewhere."""
        return Piece(tuple(map(operator.add, self.offsets, by)), self.sizes)


def whole(shape: Sequence[int]) -> Piece:
    return Piece((0,) * len(shape), tuple(shape))


def along(piece: Piece, dim: int, start: int, size: int) -> Piece:
    """Return a piece that begins and ends elsewhere in one dim."""
    offsets = list(piece.offsets)
    sizes = list(piece.sizes)
    offsets[dim], sizes[dim] = start, size
    return Piece(tuple(offsets), tuple(sizes))


@dataclass(frozen=True, slots=True)
class Shard:
    """How a full tensor is divided among tensor-parallel ranks, at any degree.

    Args:
        full_shape: Shape of the full tensor, without padding.
        dim: The dim that is split, counted from the front; None where every rank holds the whole.
        blocks: Sizes, along ``dim``, of the matrices that are stacked in it and split each by
            itself: ``(q, k, v)`` of a fused projection, two equal ones for a gate above an up
            projection (Megatron-LM's ``partition_stride`` 2). Empty for one.
        padded: A degree that does not divide the dim is allowed, as for a vocabulary. Each rank
            holds as many rows as the first, and rows past the end are padding.

    In its methods ``index`` is a rank's place among those that share the tensor, and ``degree`` the
    number of those.

    Raises:
        DegreeError: The dim is not one of the tensor, or the blocks are not the size of it; of the
            methods: the degree does not divide the dim, or each of its blocks.

    >>> Shard((10, 4), 0, padded=True).local_shape(3, degree=4)
    (3, 4)
    >>> Shard((10, 4), 0, padded=True).pieces(3, degree=4)
    ((0, 9, 1),)
    >>> Shard((8, 4), 0, blocks=(4, 2, 2)).pieces(1, degree=2)
    ((0, 2, 2), (2, 5, 1), (3, 7, 1))
    """

    full_shape: tuple[int, ...]
    dim: int | None = None
    blocks: tuple[int, ...] = ()
    padded: bool = False

    def __post_init__(self) -> None:
        set_ = object.__setattr__  # of a frozen dataclass
        set_(self, "full_shape", tuple(int(size) for size in self.full_shape))
        set_(self, "blocks", tuple(int(size) for size in self.blocks))
        if self.dim is None:
            if self.blocks or self.padded:
                raise DegreeError(
                    f"blocks {self.blocks} or padding of a tensor of shape {self.full_shape} that "
                    "is not split; give the dim that they are along"
                )
            return
        if not -len(self.full_shape) <= self.dim < len(self.full_shape):
            raise DegreeError(
                f"dim {self.dim} of a tensor of shape {self.full_shape}; expected "
                f"0 to {len(self.full_shape) - 1}"
            )
        set_(self, "dim", self.dim % len(self.full_shape))
        if self.blocks and (min(self.blocks) < 0 or sum(self.blocks) != self.size):
            raise DegreeError(
                f"blocks {self.blocks} add up to {sum(self.blocks)}; expected {self.size}, dim "
                f"{self.dim} of the full shape {self.full_shape}"
            )
        if len(self.blocks) == 1:
            set_(self, "blocks", ())
        if self.blocks and self.padded:
            raise DegreeError(
                f"blocks {self.blocks} of a tensor of shape {self.full_shape} cannot be padded; "
                "choose a degree that divides each of them"
            )

    @property
    def size(self) -> int:
        """Return the size of the dim that is split."""
        return self.full_shape[0 if self.dim is None else self.dim]

    def local_shape(self, index: int, degree: int) -> tuple[int, ...]:
        """Return the shape of what a rank holds, padding included."""
        self._check(index, degree)
        if self.dim is None:
            return self.full_shape
        held = vocabulary_rows(self.size, degree)
        return (*self.full_shape[: self.dim], held, *self.full_shape[self.dim + 1 :])

    def pieces(self, index: int, degree: int) -> tuple[tuple[int, int, int], ...]:
        """Return what a rank holds of the full tensor, in the order of the local one.

        Returns:
            ``(start in the local tensor, start in the full tensor, length)`` for each stretch of
            ``dim``. Padding is in no piece; a tensor that is not split is one piece of its dim 0,
            or of length 1 where it has no dims.
        """
        self._check(index, degree)
        if self.dim is None:
            return ((0, 0, self.full_shape[0] if self.full_shape else 1),)
        found = []
        local = 0
        full = 0
        for block in self.blocks or (self.size,):
            start, stop = vocabulary_range(block, index, degree)
            if stop > start:
                found.append((local, full + start, stop - start))
            local = local + stop - start
            full = full + block
        return tuple(found)

    def boxes(
        self, index: int, degree: int, held: Piece | None = None
    ) -> list[tuple[Piece, Piece]]:
        """Return what a rank holds, as boxes: of its local tensor, and of the full one.

        ``held`` is what there is of the local tensor, as of a DTensor's; None: all.
        """
        local = held or whole(self.local_shape(index, degree))
        if self.dim is None:
            return [(local, local)]
        found = []
        dim = self.dim
        for begin, full, length in self.pieces(index, degree):
            own = local.overlap(along(local, dim, begin, length))
            if own:
                there = own.offsets[dim] + full - begin
                found.append((own, along(own, dim, there, own.sizes[dim])))
        return found

    def cut(self, full: Tensor, index: int, degree: int) -> Tensor:
        """Return what a rank holds of a full tensor: a view where that is one stretch of it."""
        shape = self.local_shape(index, degree)
        boxes = self.boxes(index, degree)
        if len(boxes) == 1 and boxes[0][1].sizes == shape:
            return full[boxes[0][1].slices]
        part = full.new_zeros(shape)
        for own, box in boxes:
            part[own.slices].copy_(full[box.slices])
        return part

    def join(self, parts: Sequence[Tensor], device: torch.device | None = None) -> Tensor:
        """Return the full tensor, on a device or theirs, of what all ranks hold, in order."""
        full = torch.empty(self.full_shape, dtype=parts[0].dtype, device=device or parts[0].device)
        for index, part in enumerate(parts):
            for own, box in self.boxes(index, len(parts)):
                full[box.slices].copy_(part[own.slices])
        return full

    def _check(self, index: int, degree: int) -> None:
        if degree < 1 or not 0 <= index < degree:
            raise DegreeError(f"rank {index} of degree {degree}; expected 0 to {degree - 1}")
        if self.dim is None or self.padded:
            return
        for block in self.blocks or (self.size,):
            if block % degree:
                raise DegreeError(
                    f"dim {self.dim} of a tensor of full shape {self.full_shape}"
                    + (f", stacked of {self.blocks}," if self.blocks else "")
                    + f" does not divide: {block} over degree {degree}; choose a degree that "
                    f"divides {math.gcd(*(self.blocks or (self.size,)))}"
                )


# What a parameter is a part of, in attributes beside Megatron-LM's.

WHOLE = ("full_shape", "partition_blocks", "partition_padded")


def set_whole(
    tensor: Tensor, full_shape: tuple[int, ...], blocks: tuple[int, ...] = (), padded: bool = False
) -> None:
    vars(tensor).update(zip(WHOLE, (full_shape, blocks, padded), strict=True))


def shard_of(parameter: Tensor, degree: int | None = None) -> Shard | None:
    """Return what a parameter is a part of.

    The layers of this package say it of all of theirs. What nothing is said of is whole on
    every rank.

    Args:
        parameter: This rank's.
        degree: The tensor-parallel degree, for parameters with Megatron-LM's attributes alone,
            which do not say how large the whole is: they are then taken as divided evenly.

    Returns:
        None where a parameter is split, the size of the whole is not said, and neither is
        ``degree``.
    """
    dim: int = getattr(parameter, "partition_dim", -1)
    full_shape: tuple[int, ...] | None = getattr(parameter, "full_shape", None)
    if full_shape is not None:
        blocks = getattr(parameter, "partition_blocks", ())
        padded = getattr(parameter, "partition_padded", False)
        return Shard(full_shape, dim if dim >= 0 else None, blocks, padded)
    full = list(parameter.shape)
    if dim < 0:
        return Shard(tuple(full))
    if getattr(parameter, "tensor_model_parallel", False):
        if degree is None:
            return None
        full[dim] *= degree
    stride = getattr(parameter, "partition_stride", 1)
    if full[dim] % stride:
        raise DegreeError(
            f"a parameter of shape {tuple(parameter.shape)} has partition_stride {stride}, which "
            f"does not divide {full[dim]}, the whole dim {dim}"
        )
    return Shard(tuple(full), dim, (full[dim] // stride,) * stride if stride > 1 else ())


def set_shard(parameter: Tensor, shard: Shard, degree: int | None = None) -> None:
    """Say what a parameter of your own is a part of.

    Sets Megatron-LM's attributes too, by which gradient norms and clipping know it.

    Args:
        parameter: This rank's part, of ``shard.local_shape(...)``.
        shard: What it is a part of: say ``Shard((q + k + v, hidden), 0, blocks=(q, k, v))``.
        degree: The tensor-parallel degree, where the shapes do not tell whether it is above 1.

    Raises:
        DegreeError: The parameter has not the shape that it would have.
    """
    shape = tuple(parameter.shape)
    full = shard.full_shape
    dim = shard.dim
    split = shape != full if degree is None else degree > 1 and dim is not None
    if degree is not None:
        expected = shard.local_shape(0, degree)
        if shape != expected:
            raise DegreeError(
                f"a parameter of shape {shape} is no part of {shard} at degree {degree}; expected "
                f"{expected}"
            )
    unlike = [at for at, held in enumerate(shape) if full[at : at + 1] != (held,)]
    if len(shape) != len(full) or not set(unlike) <= ({dim} if split else set()):
        raise DegreeError(
            f"a parameter of shape {shape} is no part of {shard}; expected the full shape"
            + ("" if dim is None else f", or less of dim {dim}")
        )
    set_whole(parameter, shard.full_shape, shard.blocks, shard.padded)
    vars(parameter).update(
        tensor_model_parallel=split,
        partition_dim=-1 if dim is None else dim,
        partition_stride=max(1, len(shard.blocks)),
    )


# Tensors by name; an optimizer's are named ``optimizer/<parameter>/<key>``.


@dataclass(frozen=True, slots=True)
class Entry:
    name: str
    dtype: torch.dtype
    shard: Shard

    def local_shape(self, index: int, degree: int) -> tuple[int, ...]:
        """Return the shape of a rank's part; an error names the tensor."""
        try:
            return self.shard.local_shape(index, degree)
        except DegreeError as error:
            raise DegreeError(f"{self.name!r}: {error}") from error


OPTIMIZER = "optimizer/"


def optimizer_name(parameter: str, key: str | None) -> str:
    """Return the name of what an optimizer has of a parameter; of the parameter itself for None."""
    if key is None:
        return parameter
    return f"{OPTIMIZER}{parameter}/{key}"


def parameter_of(name: str) -> tuple[str, str | None]:
    if not name.startswith(OPTIMIZER):
        return name, None
    parameter, _, key = name.removeprefix(OPTIMIZER).rpartition("/")
    return parameter, key
