"""How one tensor is brought from one layout to another, and its gradient back; at what cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import prod

from ezpz_tp._errors import DegreeError, ParallelError

from .placement import PARTIAL, REPLICATED, Layout, conversion
from .regions import calls

_TENSOR_AXES = ("tensor", "tp")
_WORDS = {REPLICATED, PARTIAL}


@dataclass(frozen=True, slots=True)
class Step:
    """One step of forward or backward.

    Args:
        kind: all-reduce, reduce-scatter, all-gather or all-to-all; or slice, which keeps this
            rank's part and sends nothing.
        axis: That of the ranks that take part.
        tensor: What it works on: ``x``, ``w``, ``y`` in forward, ``dy``, ``dx``, ``dw`` in
            backward.
        gathered: The letter that is whole afterwards (all-gather, all-to-all).
        split: The letter that is sharded afterwards (reduce-scatter, slice, all-to-all).
        region: The call of this package that does it, on the tensor axis; else None. One call
            may do one step in forward and another in backward.
        bytes: Bytes that each rank sends by a ring's algorithm; None without sizes.
    """

    kind: str
    axis: str
    tensor: str
    gathered: str | None
    split: str | None
    region: str | None
    bytes: int | None

    def __str__(self) -> str:
        words = [self.kind, self.tensor]
        if self.gathered and self.split:
            words += ["from", self.gathered, "to", self.split]
        elif self.gathered or self.split:
            words += ["on", self.gathered or self.split or ""]
        return " ".join([*words, "over", self.axis])


@dataclass(frozen=True, slots=True)
class Move:
    """A tensor's way along one axis, and its gradient's way back."""

    axis: str
    source: str
    target: str
    gradient: str
    back: str

    @property
    def is_nothing(self) -> bool:
        """Whether neither does anything."""
        return self.source == self.target and self.gradient == self.back


@dataclass(frozen=True, slots=True)
class Cost:
    """The sizes that bytes are counted for."""

    sizes: Mapping[str, int]
    degrees: Mapping[str, int]
    itemsize: int

    def shape(self, letters: str, layout: Layout) -> tuple[int, ...]:
        """Return the shape of a rank's part.

        Raises:
            DegreeError: The degrees do not divide a size.
        """
        shape = []
        for letter in letters:
            axes = [axis for axis, where in layout.items() if where == letter]
            degree = prod(self.degrees[axis] for axis in axes)
            if self.sizes[letter] % degree:
                words = " x ".join(f"{axis} {self.degrees[axis]}" for axis in axes)
                raise DegreeError(
                    f"size {self.sizes[letter]} of {letter!r} in {letters!r} does not divide by "
                    f"{words}; pad it to a multiple of {degree}"
                )
            shape.append(self.sizes[letter] // degree)
        return tuple(shape)

    def sent(self, kind: str | None, axis: str, letters: str, before: Layout) -> int:
        """Return the bytes that each rank sends in a ring, of a tensor that lies so before."""
        if kind is None or kind == "slice":
            return 0
        have, degree = prod(self.shape(letters, before)) * self.itemsize, self.degrees[axis]
        if kind == "all-gather":
            return have * (degree - 1)
        rounds = 2 if kind == "all-reduce" else 1
        return -(-rounds * have * (degree - 1) // degree)


@dataclass(frozen=True, slots=True)
class Way:
    """A tensor's steps, in order, the gradient's, in order, and the calls that do both."""

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    regions: tuple[str, ...]

    @property
    def sent(self) -> int:
        """Bytes that each rank sends, in forward and backward."""
        return sum(step.bytes or 0 for step in (*self.forward, *self.backward))


def cheapest_way(name: str, letters: str, start: Layout, moves: Sequence[Move], cost: Cost) -> Way:
    """Return the moves in the order that sends the least.

    Raises:
        ParallelError: In no order are the parts of a letter contiguous all along.
        DegreeError: The degrees do not divide a size.
    """
    wanted = [move for move in moves if not move.is_nothing]
    orders = [order for order in permutations(wanted) if _is_contiguous(order, start)]
    if not orders:
        raise ParallelError(_apart(name, letters, start, wanted))
    return min((_walk(name, letters, start, order, cost) for order in orders), key=_sent)


def _sent(way: Way) -> int:
    return way.sent


def _is_contiguous(order: Sequence[Move], start: Layout) -> bool:
    """Whether each step finds, and leaves, contiguous parts of every letter.

    The first of a letter's axes cuts it, the next one cuts those parts: only the last of them
    can be taken away, and one that is added has to come last.
    """
    layout, axes = dict(start), list(start)
    for move in order:
        if move.source != move.target:
            later = axes[axes.index(move.axis) + 1 :]
            if any(layout[axis] in {move.source, move.target} - _WORDS for axis in later):
                return False
        layout[move.axis] = move.target
    return True


def _walk(name: str, letters: str, start: Layout, order: Sequence[Move], cost: Cost) -> Way:
    forward: list[Step] = []
    backward: list[Step] = []
    regions: list[str] = []
    layout = dict(start)

    def step(tensor: str, source: str, move: Move, target: str, region: str | None) -> Step:
        kind = conversion(source, target)
        gathered, split = (None if where in _WORDS else where for where in (source, target))
        sent = cost.sent(kind, move.axis, letters, layout)
        return Step(kind or "", move.axis, tensor, gathered, split, region, sent)

    for move in order:
        written = _calls(name, letters, move)
        regions += written
        if move.source != move.target:
            region = written[0] if written else None
            forward.append(step(name, move.source, move, move.target, region))
        layout[move.axis] = move.target
        if move.gradient != move.back:
            region = written[-1] if written else None
            # A gradient that is partial has the shape of what is replicated.
            backward.insert(0, step(f"d{name}", move.gradient, move, move.back, region))
    cost.shape(letters, layout)
    return Way(tuple(forward), tuple(backward), tuple(regions))


def _calls(name: str, letters: str, move: Move) -> tuple[str, ...]:
    if move.axis not in _TENSOR_AXES:
        return ()
    return calls(name, letters, move.source, move.target, move.gradient, move.back)


def _apart(name: str, letters: str, start: Layout, moves: Sequence[Move]) -> str:
    ways = ", ".join(
        f"from {move.source} to {move.target} over {move.axis}"
        for move in moves
        if move.source != move.target
    )
    return (
        f"{name} {letters!r} cannot go {ways} in contiguous parts: of the axes that cut a dim, in "
        f"the order {', '.join(start)}, only the last can be added or taken away. Name mesh_axes= "
        "in another order, cut the dim alike in all operands, or gather it before"
    )
