"""Products that sum over a dim which is split over the tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .regions import argument
from .types import Operand

_ADDED_FIRST = frozenset({"addmm", "baddbmm", "addbmm", "addmv"})
_MATRICES = frozenset({"matmul", "__matmul__", "mm", "bmm", "mv", *_ADDED_FIRST})
_ROWS = frozenset({"linear", "conv1d", "conv2d", "conv3d"})


def contracts(
    name: str, operands: Sequence[Operand], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Return whether a function sums over a dim along which one of its tensors is sharded."""
    if all(one.record.sharded_dim is None for one in operands):
        return False
    factors = list(operands[1:] if name in _ADDED_FIRST else operands)
    return any(
        factor.record.sharded_dim in dims for factor, dims in _summed(name, factors, args, kwargs)
    )


def _summed(
    name: str, factors: Sequence[Operand], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Operand, Sequence[int]]]:
    """The factors of a product, and the dims of each that it sums over."""
    if name == "einsum" and isinstance(args[0], str):
        yield from _of_einsum(args[0], factors)
    elif len(factors) < 2:
        return
    elif name in _ROWS:
        yield factors[1], (min(1, factors[1].tensor.dim() - 1),)
    elif name in _MATRICES:
        yield factors[0], (factors[0].tensor.dim() - 1,)
        yield factors[1], (max(0, factors[1].tensor.dim() - 2),)
    elif name == "tensordot":
        dims = argument(args, kwargs, 2, "dims")
        if isinstance(dims, int):
            dims = range(-dims, 0), range(dims)
        for factor, summed in zip(factors, dims, strict=True):
            yield factor, [dim % factor.tensor.dim() for dim in summed]


def _of_einsum(
    equation: str, factors: Sequence[Operand]
) -> Iterator[tuple[Operand, Sequence[int]]]:
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    if not arrow:
        output = "".join(letter for letter in inputs if inputs.count(letter) == 1)
    for factor, letters in zip(factors, inputs.split(","), strict=False):
        if "." not in letters:
            yield factor, [dim for dim, letter in enumerate(letters) if letter not in output]
