"""One rank's part of a tensor: cut it from the whole, and compare it with the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class Part(NamedTuple):
    """What one rank holds: the whole if ``dim`` is None."""

    value: Tensor
    dim: int | None
    stride: int | tuple[int, ...]
    rank: int


def part_of(
    whole: Tensor, dim: int | None, stride: int | tuple[int, ...], index: int, degree: int
) -> tuple[Tensor, int]:
    """Cut one rank's part out, padded at its end with zeros where the dim is uneven.

    Args:
        whole: The whole tensor.
        dim: The dim that is split; None for none.
        stride: Number of equal stretches of that dim that are each split, or their sizes.
        index: The rank's position.
        degree: Number of ranks.

    Returns:
        The part, and how much of it along ``dim`` is not padding.
    """
    if dim is None:
        return whole, 0
    parts, real = [], 0
    stretches = whole.chunk(stride, dim) if isinstance(stride, int) else whole.split(stride, dim)
    for stretch in stretches:
        size = -(-stretch.shape[dim] // degree)
        first = min(index * size, stretch.shape[dim])
        length = min(size, stretch.shape[dim] - first)
        piece = stretch.narrow(dim, first, length)
        if length < size:
            after = [0, 0] * (whole.dim() - 1 - dim % whole.dim()) + [0, size - length]
            piece = pad(piece, after)
        parts.append(piece)
        real += length
    return torch.cat(parts, dim), real


def compare(
    name: str, part: Part, whole: Tensor | None, degree: int, tolerance: float | None
) -> None:
    """Raise AssertionError if a part is not what the whole has there.

    A part's padding must be zero in a gradient, and is not looked at in an output.
    """
    where = f"tensor degree {degree}, rank {part.rank}: {name}"
    if whole is None:
        raise AssertionError(f"{where} is there, but the unsharded module has none")
    expected, real = part_of(whole, part.dim, part.stride, part.rank, degree)
    found = part.value
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise AssertionError(
            f"{where} is {_form(found)}; expected {_form(expected)}"
            + ("" if part.dim is None else f", a part of {_form(whole)} along dim {part.dim}")
        )
    if part.dim is not None and name.startswith("output"):
        found, expected = found.narrow(part.dim, 0, real), expected.narrow(part.dim, 0, real)
    if tolerance is None:
        wrong = (found != expected) & ~(found.isnan() & expected.isnan())
    else:
        largest = max(1.0, whole.abs().max().item()) if whole.numel() else 1.0
        wrong = ~((found - expected).abs() <= tolerance * largest)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{where} differs in {int(wrong.sum())} of {wrong.numel()} values, first at "
            f"{list(at)}: {found[at].item()!r}, but {expected[at].item()!r} unsharded"
            + (_NOT_INTEGERS if tolerance is None and not _are_integers(whole) else "")
        )


_NOT_INTEGERS = (
    "; the unsharded values are not all integers, so that the order of sums may show: "
    "not integer arithmetic: pass tolerance="
)


def _are_integers(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool((tensor == tensor.round()).all())


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def same_on_all(name: str, parts: Sequence[Part], degree: int) -> None:
    """Raise AssertionError if a replicated tensor has not the same bits on every rank."""
    if parts[0].dim is not None:
        return
    first = parts[0].value.contiguous().view(-1).view(torch.uint8)
    for part in parts[1:]:
        other = part.value.contiguous().view(-1).view(torch.uint8)
        if not torch.equal(first, other):
            at = int((first != other).nonzero()[0]) // part.value.element_size()
            raise AssertionError(
                f"tensor degree {degree}: {name} is replicated, but rank {part.rank} has "
                f"{part.value.reshape(-1)[at].item()!r} where rank 0 has "
                f"{parts[0].value.reshape(-1)[at].item()!r} (value {at})"
            )
