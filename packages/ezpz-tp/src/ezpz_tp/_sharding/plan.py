"""Which letter, or which terms of a sum, the local products along each axis share out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from ezpz_tp._errors import ParallelError

from .equation import Equation
from .placement import PARTIAL, REPLICATED, Layout, dual
from .steps import Cost, Move, Way, cheapest_way


@dataclass(frozen=True, slots=True)
class _Work:
    """How the local products share the work along an axis."""

    letter: str | None = None  # each rank takes a part of it
    partial: int | None = None  # or a term of this operand

    def entering(self, number: int, letters: str) -> str:
        """Where an operand has to be."""
        if self.letter is None:
            return PARTIAL if self.partial == number else REPLICATED
        return self.letter if self.letter in letters else REPLICATED

    def gradient(self, number: int, letters: str) -> str:
        """Where the gradient of an operand comes out."""
        if self.letter is None:
            return REPLICATED if self.partial in {None, number} else PARTIAL
        return self.letter if self.letter in letters else PARTIAL

    def result(self, letters: str) -> str:
        """Where the product comes out."""
        if self.letter is None:
            return REPLICATED if self.partial is None else PARTIAL
        return self.letter if self.letter in letters else PARTIAL


@dataclass(frozen=True, slots=True)
class Plan:
    """What moves, and where gradients and output end up."""

    gradients: tuple[Layout, ...]
    output: Layout
    ways: tuple[Way, ...]
    end: Way
    price: int


def cheapest_plan(
    equation: Equation, axes: Sequence[str], given: Sequence[Layout], wanted: Layout, cost: Cost
) -> Plan:
    """Return the plan that sends the least, of those that share the work in different ways.

    Raises:
        ParallelError: No plan is possible.
        DegreeError: Of none do the degrees divide the sizes.
    """
    best: Plan | None = None
    failures: list[ParallelError] = []
    choices = [list(_works(equation, axis, given, wanted)) for axis in axes]
    for works in product(*choices):
        try:
            plan = _plan(equation, dict(zip(axes, works, strict=True)), given, wanted, cost)
        except ParallelError as error:
            failures.append(error)
            continue
        if best is None or plan.price < best.price:
            best = plan
    if best is None:
        raise failures[0]
    return best


def _works(
    equation: Equation, axis: str, given: Sequence[Layout], wanted: Layout
) -> Iterator[_Work]:
    """Yield the ways to share the work along one axis that are worth a look."""
    places = [layout[axis] for layout in given]
    letters = list(dict.fromkeys(w for w in places if w not in {PARTIAL, REPLICATED}))
    partial = [number for number, where in enumerate(places) if where == PARTIAL]
    goal = wanted.get(axis, REPLICATED)
    if len(letters) == 1 and all(
        where == (letters[0] if letters[0] in own else REPLICATED)
        for where, own in zip(places, equation.operands, strict=True)
    ):
        yield _Work(letters[0])
    elif len(partial) == 1 and not letters:
        yield _Work(partial=partial[0])
    elif goal not in {PARTIAL, REPLICATED}:
        yield _Work(goal)
    elif letters:
        yield from map(_Work, letters)
    else:
        yield _Work()
        yield from (_Work(partial=number) for number in partial)


def _plan(
    equation: Equation,
    works: Mapping[str, _Work],
    given: Sequence[Layout],
    wanted: Layout,
    cost: Cost,
) -> Plan:
    """Return what sharing the work so leads to."""
    ways, gradients = [], []
    for number, letters in enumerate(equation.operands):
        gradient = {axis: work.gradient(number, letters) for axis, work in works.items()}
        moves = [
            Move(axis, where, work.entering(number, letters), gradient[axis], dual(where))
            for (axis, where), work in zip(given[number].items(), works.values(), strict=True)
        ]
        gradients.append(gradient)
        ways.append(cheapest_way(equation.names[number], letters, given[number], moves, cost))
    result = {axis: work.result(equation.output) for axis, work in works.items()}
    output = {axis: wanted.get(axis, where) for axis, where in result.items()}
    moves = [
        Move(axis, where, output[axis], dual(output[axis]), dual(where))
        for axis, where in result.items()
    ]
    for move in moves:
        if move.target == PARTIAL != move.source:
            raise ParallelError(
                f"y is {move.source} over {move.axis}, which does not become partial; leave "
                f"{move.axis} out of output="
            )
    end = cheapest_way("y", equation.output, result, moves, cost)
    price = sum(way.sent for way in (*ways, end))
    for axis, where in output.items():
        if where == PARTIAL:  # somebody has to sum it
            price += cost.sent("all-reduce", axis, equation.output, output)
    return Plan(tuple(gradients), output, tuple(ways), end, price)
