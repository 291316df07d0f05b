"""How one tensor is brought from one layout to another, and its gradient back; at what cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

    def then(self, later: Way) -> Way:
        """Return both, one after the other."""
        forward, backward = self.forward + later.forward, later.backward + self.backward
        return Way(forward, backward, self.regions + later.regions)


def cheapest_way(name: str, letters: str, start: Layout, moves: Sequence[Move], cost: Cost) -> Way:
    """Return the moves in the order that sends the least.

    Raises:
        ParallelError: In no order are the parts of a letter contiguous all along.
        DegreeError: The degrees do not divide a size.
    """
    wanted = [move for move in moves if not move.is_nothing]
    cost.shape(letters, start)
    indivisible: DegreeError | None = None
    # What a move sends depends on which ones were made before it, not on their order: of each
    # set of moves the best order is enough.
    reached: dict[frozenset[int], tuple[int, tuple[int, ...], Way]] = {
        frozenset(): (0, (), Way((), (), ()))
    }
    for _ in wanted:
        further: dict[frozenset[int], tuple[int, tuple[int, ...], Way]] = {}
        for done, (sent, order, way) in reached.items():
            layout = start | {wanted[number].axis: wanted[number].target for number in done}
            for number, move in enumerate(wanted):
                if number in done or not _is_contiguous(move, layout):
                    continue
                try:
                    last = _way(name, letters, layout, move, cost)
                except DegreeError as error:
                    indivisible = error
                    continue
                found = sent + last.sent, (*order, number), way.then(last)
                made = done | {number}
                further[made] = min(found, further.get(made, found), key=_rank)
        reached = further
    if not reached:
        raise indivisible or ParallelError(_apart(name, letters, start, wanted))
    (best,) = reached.values()
    return best[-1]


def _rank(found: tuple[int, tuple[int, ...], Way]) -> tuple[int, tuple[int, ...]]:
    return found[:2]


def _is_contiguous(move: Move, layout: Layout) -> bool:
    """Whether a move finds, and leaves, contiguous parts of every letter.

    The first of a letter's axes cuts it, the next one cuts those parts: only the last of them
    can be taken away, and one that is added has to come last.
    """
    axes = list(layout)
    later = axes[axes.index(move.axis) + 1 :]
    changed = {move.source, move.target} - _WORDS
    return move.source == move.target or not any(layout[axis] in changed for axis in later)


def _way(name: str, letters: str, layout: Layout, move: Move, cost: Cost) -> Way:
    """Return the steps of one move of a tensor that lies so before."""
    after = layout | {move.axis: move.target}
    cost.shape(letters, after)
    regions = _calls(name, letters, move)

    def steps(
        tensor: str, source: str, target: str, lies: Layout, calls: tuple[str, ...]
    ) -> tuple[Step, ...]:
        if source == target:
            return ()
        kind = conversion(source, target)
        gathered, split = (None if where in _WORDS else where for where in (source, target))
        sent = cost.sent(kind, move.axis, letters, lies)
        region = calls[0] if calls else None
        return (Step(kind or "", move.axis, tensor, gathered, split, region, sent),)

    forward = steps(name, move.source, move.target, layout, regions)
    # A gradient that is partial has the shape of what is replicated.
    backward = steps(f"d{name}", move.gradient, move.back, after, regions[::-1])
    return Way(forward, backward, regions)


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
