"""The sharding calculator: what one works out in one's head when designing a sharded model.

Its rules are in ``docs/guides/tensor.md``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, combinations, permutations, product
from math import prod
from string import ascii_letters
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ezpz_tp import DegreeError, ParallelError

from ._placements import (
    PARTIAL,
    REPLICATED,
    WORDS,
    Given,
    Layout,
    complete,
    conversion,
    gradient_placement,
    is_replicated,
    read,
    text,
)
from ._table import align_columns

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


Axes: TypeAlias = tuple[str, ...]
Layouts: TypeAlias = Sequence[Layout]


# Which of this package's region functions brings a tensor from one place to another.


def _region_calls(name: str, letters: str, move: Move) -> tuple[str, ...]:
    """Return the calls to write: none, one, or two for a sum that sharded code then shares."""
    if move.axis not in _TENSOR_AXES:
        return ()
    source = move.source
    target = move.target
    forward = conversion(source, target)
    backward = conversion(move.gradient, move.back)
    copy: tuple[str, ...] = ()
    if backward == "all-reduce":
        copy = (f"copy_to_tensor_parallel_region({name})",)
    if forward is None:
        return copy
    if forward == "all-reduce":
        return f"reduce_from_tensor_parallel_region({name})", *copy
    if forward == "all-to-all":
        gathered = letters.index(source)
        split = letters.index(target)
        return (f"sequence_to_head({name}, sequence_dim={gathered}, head_dim={split})",)
    dim = letters.index(source if forward == "all-gather" else target)
    last = dim == len(letters) - 1
    function = _FUNCTIONS[forward, backward or "", last]
    arguments = [name]
    if "sequence" in function:
        if (forward, backward) == ("all-gather", "slice"):
            arguments.append("tensor_parallel_output_grad=False")
        if dim:
            arguments.append(f"dim={dim}")
    return (f"{function}({', '.join(arguments)})",)


_FUNCTIONS = {
    # forward, backward, whether along the last dim
    ("slice", "all-gather", True): "scatter_to_tensor_parallel_region",
    ("slice", "all-gather", False): "scatter_to_sequence_parallel_region",
    ("all-gather", "slice", True): "gather_from_tensor_parallel_region",
    ("all-gather", "slice", False): "gather_from_sequence_parallel_region",
    ("all-gather", "reduce-scatter", True): "all_gather_last_dim_from_tensor_parallel_region",
    ("all-gather", "reduce-scatter", False): "gather_from_sequence_parallel_region",
    ("reduce-scatter", "all-gather", True): "reduce_scatter_last_dim_to_tensor_parallel_region",
    ("reduce-scatter", "all-gather", False): "reduce_scatter_to_sequence_parallel_region",
}


# The letters of an einsum: one for each dim of each operand.


@dataclass(frozen=True, slots=True)
class Equation:
    operands: tuple[str, ...]
    output: str
    names: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Equation:
        written = "".join(text.split())
        if "." in written:
            raise ValueError(
                f"einsum {text!r} has an ellipsis; give every dim a letter, for that is how a "
                "placement names it"
            )
        if written.count("->") != 1:
            raise ValueError(
                f"einsum {text!r} does not say what comes out; expected one '->', as in "
                "'bsh,hf->bsf' ('ab->' for the sum)"
            )
        inputs, output = written.split("->")
        operands = tuple(inputs.split(","))
        for letters in (*operands, output):
            for letter in letters:
                if letter not in ascii_letters:
                    raise ValueError(f"einsum {text!r}: {letter!r} is not a letter a-z or A-Z")
                if letters.count(letter) > 1:
                    raise ValueError(
                        f"einsum {text!r}: {letter!r} is twice in {letters!r}; diagonals cannot be "
                        "taken of shards. Take it before, by torch.diagonal"
                    )
        for letter in output:
            if letter not in inputs:
                raise ValueError(f"einsum {text!r}: no operand has {letter!r} of the output")
        count = len(operands)
        if count <= 2:
            return cls(operands, output, ("x", "w")[:count])
        return cls(operands, output, tuple(f"x{n}" for n in range(1, count + 1)))


# How one tensor is brought from one layout to another, and its gradient back; at what cost.

_TENSOR_AXES = ("tensor", "tp")


@dataclass(frozen=True, slots=True)
class Step:
    kind: str
    axis: str
    tensor: str
    gathered: str | None
    split: str | None
    region: str | None
    bytes: int | None

    def __str__(self) -> str:
        where = ""
        if self.gathered and self.split:
            where = f" from {self.gathered} to {self.split}"
        elif self.gathered or self.split:
            where = f" on {self.gathered or self.split}"
        return f"{self.kind} {self.tensor}{where} over {self.axis}"


class Move(NamedTuple):
    axis: str
    source: str
    target: str
    gradient: str
    back: str


@dataclass(frozen=True, slots=True)
class Cost:
    sizes: Mapping[str, int]
    degrees: Mapping[str, int]
    itemsize: int

    def shape(self, letters: str, layout: Layout) -> tuple[int, ...]:
        shape = []
        for letter in letters:
            degree = 1
            cuts = []
            for axis, where in layout.items():
                if where == letter:
                    degree *= self.degrees[axis]
                    cuts.append(f"{axis} {self.degrees[axis]}")
            if self.sizes[letter] % degree:
                raise DegreeError(
                    f"size {self.sizes[letter]} of {letter!r} in {letters!r} does not divide by "
                    f"{' x '.join(cuts)}; pad it to a multiple of {degree}"
                )
            shape.append(self.sizes[letter] // degree)
        return tuple(shape)

    def bytes_sent(self, kind: str | None, axis: str, letters: str, before: Layout) -> int:
        if kind is None or kind == "slice":
            return 0
        have = prod(self.shape(letters, before)) * self.itemsize
        degree = self.degrees[axis]
        if kind == "all-gather":
            return have * (degree - 1)
        rounds = 1
        if kind == "all-reduce":
            rounds = 2
        return -(-rounds * have * (degree - 1) // degree)


class Way(NamedTuple):
    """A tensor's steps, in order, the gradient's, in order, and the calls that do both."""

    forward: tuple[Step, ...] = ()
    backward: tuple[Step, ...] = ()
    regions: tuple[str, ...] = ()

    @property
    def bytes_sent(self) -> int:
        return _sum_bytes((*self.forward, *self.backward))

    def then(self, later: Way) -> Way:
        forward = self.forward + later.forward
        backward = later.backward + self.backward
        return Way(forward, backward, self.regions + later.regions)


def _drop_bytes(steps: Iterable[Step]) -> list[Step]:
    return [replace(step, bytes=None) for step in steps]


def _sum_bytes(steps: Iterable[Step]) -> int:
    return sum(step.bytes or 0 for step in steps)


def cheapest_way(name: str, letters: str, start: Layout, moves: Iterable[Move], cost: Cost) -> Way:
    wanted = [move for move in moves if move.source != move.target or move.gradient != move.back]
    cost.shape(letters, start)
    indivisible: DegreeError | None = None
    # What a move sends depends on which ones were made before it, not on their order: of each
    # set of moves the best order is enough.
    reached: dict[frozenset[int], tuple[int, tuple[int, ...], Way]]
    reached = {frozenset(): (0, (), Way())}
    for _ in wanted:
        before = reached
        reached = {}
        for done, (sent, order, way) in before.items():
            layout = dict(start)
            for number in done:
                layout[wanted[number].axis] = wanted[number].target
            for number, move in enumerate(wanted):
                if number in done or not _is_contiguous(move, layout):
                    continue
                try:
                    last = _make_way(name, letters, layout, move, cost)
                except DegreeError as error:
                    indivisible = error
                    continue
                candidate = sent + last.bytes_sent, (*order, number), way.then(last)
                made = done | {number}
                if made not in reached or candidate[:2] < reached[made][:2]:
                    reached[made] = candidate
    if not reached:
        raise indivisible or ParallelError(_describe_split(name, letters, start, wanted))
    (best,) = reached.values()
    return best[-1]


def _is_contiguous(move: Move, layout: Layout) -> bool:
    # The first of a letter's axes cuts it, the next one cuts those parts: only the last of them
    # can be taken away, and one that is added has to come last.
    axes = list(layout)
    later = axes[axes.index(move.axis) + 1 :]
    changed = {move.source, move.target} - WORDS
    return move.source == move.target or changed.isdisjoint(map(layout.__getitem__, later))


def _make_way(name: str, letters: str, layout: Layout, move: Move, cost: Cost) -> Way:
    after = layout | {move.axis: move.target}
    cost.shape(letters, after)
    regions = _region_calls(name, letters, move)

    def steps(tensor: str, source: str, target: str, lies: Layout, call: int) -> tuple[Step, ...]:
        kind = conversion(source, target)
        if kind is None:
            return ()
        gathered = None if source in WORDS else source
        split = None if target in WORDS else target
        sent = cost.bytes_sent(kind, move.axis, letters, lies)
        region = None
        if regions:
            region = regions[call]
        return (Step(kind, move.axis, tensor, gathered, split, region, sent),)

    forward = steps(name, move.source, move.target, layout, 0)
    # A gradient that is partial has the shape of what is replicated.
    return Way(forward, steps(f"d{name}", move.gradient, move.back, after, -1), regions)


def _describe_split(name: str, letters: str, start: Layout, moves: Sequence[Move]) -> str:
    ways = []
    for move in moves:
        if move.source != move.target:
            way = f"from {move.source} to {move.target} over {move.axis}"
            ways.append(way)
    return (
        f"{name} {letters!r} cannot go {', '.join(ways)} in contiguous parts: of the axes that cut "
        f"a dim, in the order {', '.join(start)}, only the last can be added or taken away. Name "
        "mesh_axes= in another order, cut the dim alike in all operands, or gather it before"
    )


# How the local products share the work along an axis: each rank takes a part of a letter, or a term
# of an operand, by its number, or all do the same.

Work: TypeAlias = str | int | None


def _placement_before(work: Work, number: int, letters: str) -> str:
    if isinstance(work, str):
        if work in letters:
            return work
        return REPLICATED
    if work == number:
        return PARTIAL
    return REPLICATED


def _placement_after(work: Work, letters: str, number: int | None = None) -> str:
    if isinstance(work, str):
        if work in letters:
            return work
        return PARTIAL
    if work in (None, number):
        return REPLICATED
    return PARTIAL


class Plan(NamedTuple):
    gradients: list[Layout]
    output: Layout
    ways: list[Way]
    end: Way
    price: int


def _work_options(
    equation: Equation, axis: str, given: Sequence[Layout], wanted: Layout
) -> Sequence[Work]:
    """Return the ways to share the work along an axis, of which one sends the least."""
    letters: list[str] = []
    partial: list[int] = []
    for number, layout in enumerate(given):
        where = layout[axis]
        if where == PARTIAL:
            partial.append(number)
        elif where != REPLICATED and where not in letters:
            letters.append(where)
    goal = wanted.get(axis, REPLICATED)
    if len(letters) == 1 and _is_shared(letters[0], equation, axis, given):
        return letters
    if len(partial) == 1 and not letters:
        return partial
    if goal not in WORDS:
        return [goal]
    return letters or [None, *partial]


def _is_shared(letter: str, equation: Equation, axis: str, given: Sequence[Layout]) -> bool:
    """Whether all operands that have a letter are cut by it, and the others replicated."""
    for layout, own in zip(given, equation.operands, strict=True):
        expected = letter if letter in own else REPLICATED
        if layout[axis] != expected:
            return False
    return True


def _make_plan(
    equation: Equation, works: Sequence[Work], given: Sequence[Layout], wanted: Layout, cost: Cost
) -> Plan:
    ways = []
    gradients = []
    for number, (letters, layout) in enumerate(zip(equation.operands, given, strict=True)):
        gradient = {}
        moves = []
        for (axis, where), work in zip(layout.items(), works, strict=True):
            gradient[axis] = _placement_after(work, letters, number)
            entering = _placement_before(work, number, letters)
            moves.append(Move(axis, where, entering, gradient[axis], gradient_placement(where)))
        gradients.append(gradient)
        ways.append(cheapest_way(equation.names[number], letters, layout, moves, cost))
    result = {}
    output = {}
    moves = []
    for axis, work in zip(given[0], works, strict=True):
        left = _placement_after(work, equation.output)
        goal = wanted.get(axis, left)
        if goal == PARTIAL != left:
            raise ParallelError(
                f"y is {left} over {axis}, which does not become partial; leave {axis} out of "
                "output="
            )
        result[axis] = left
        output[axis] = goal
        moves.append(Move(axis, left, goal, gradient_placement(goal), gradient_placement(left)))
    end = cheapest_way("y", equation.output, result, moves, cost)
    price = end.bytes_sent
    for way in ways:
        price += way.bytes_sent
    for axis, where in output.items():
        if where == PARTIAL:  # it has to be summed later
            price += cost.bytes_sent("all-reduce", axis, equation.output, output)
    return Plan(gradients, output, ways, end, price)


# The calculator's answer as text.


def _step_rows(title: str, steps: Sequence[Step]) -> Iterable[tuple[str, ...]]:
    if not steps:
        yield title, "-"
    for step in steps:
        sent = []
        if step.bytes is not None:
            sent = [_format_bytes(step.bytes)]
        yield title, str(step), *sent, step.region or ""
        title = ""


def _format_bytes(count: int) -> str:
    """Return a number of bytes in the units of a network, 1 kB = 1000 B."""
    value = float(count)
    units = ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.3g} {units[0]}"


# What the calculator answers.


@dataclass(frozen=True, slots=True)
class EinsumSharding:
    """Where everything in a sharded einsum is, and what is sent; see `einsum_sharding`.

    ``str()`` of it is a table. Placements are texts as `einsum_sharding` reads them, in the
    order of the axes: ``"b@data f@tensor"``, or ``"replicated"``.

    Args:
        equation: As it was given.
        names: What the operands are called: x and w. The output is y, gradients dx, dw, dy.
        axes: The axes of the mesh, from the outermost.
        operands: The placements of the operands, as given.
        output: The placements of the output.
        gradients: For each operand, where the gradient is that comes out of the local product:
            partial is what `backward` then has to sum. Afterwards it lies as its operand, or is
            replicated if that is partial.
        forward: The steps of forward, in order.
        backward: The steps of backward, in order.
        regions: The calls of this package's region functions, in order, that do those of
            the steps that are over the tensor axis.
        shapes: The local shape of each operand as given, and of y; None without sizes.
    """

    equation: str
    names: tuple[str, ...]
    axes: tuple[str, ...]
    operands: tuple[str, ...]
    output: str
    gradients: tuple[str, ...]
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    regions: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]] | None = field(hash=False)

    @property
    def bytes(self) -> int | None:
        """Bytes that each rank sends in forward and backward; None without sizes."""
        if self.shapes is None:
            return None
        return _sum_bytes((*self.forward, *self.backward))

    def placements(self, of: str | int = "output") -> tuple[Placement, ...]:
        """Return torch's placements of a tensor, one for each of ``axes``.

        Args:
            of: An operand by its number or name; ``"output"`` or ``"y"``; or a gradient as it
                leaves the local product, ``"dx"``.

        Raises:
            ValueError: There is no such tensor.
        """
        from torch.distributed.tensor import placement_types as made  # noqa: PLC0415 - heavy

        words: dict[str, Placement] = {REPLICATED: made.Replicate(), PARTIAL: made.Partial()}
        if isinstance(of, int) and -len(self.names) <= of < len(self.names):
            of = self.names[of]
        if of == "output":
            of = "y"
        names = []
        for name, letters, layout in self.rows():
            names.append(name)
            if name == of:
                places = complete(read(layout, letters, "", self.axes), self.axes).values()
                return tuple(words.get(at) or made.Shard(letters.index(at)) for at in places)
        raise ValueError(
            f"no tensor {of!r} in {self.equation!r}; expected 'output', an operand's number below "
            f"{len(self.names)}, or one of {', '.join(names)}"
        )

    def rows(self) -> list[tuple[str, str, str]]:
        """Return name, letters and placements of the operands, the output, and the gradients."""
        equation = Equation.parse(self.equation)
        gradient_names = [f"d{name}" for name in self.names]
        return [
            *zip(self.names, equation.operands, self.operands, strict=True),
            ("y", equation.output, self.output),
            *zip(gradient_names, equation.operands, self.gradients, strict=True),
        ]

    def __str__(self) -> str:
        shapes = self.shapes
        named = self.rows()
        rows = [(self.equation, *self.axes)]
        if shapes:
            rows = [(self.equation, *self.axes, "local")]
        width = len(f"d{self.names[-1]}")
        for name, letters, layout in named:
            wheres = complete(read(layout, letters, name, self.axes), self.axes).values()
            places = ["-" if where == REPLICATED else where for where in wheres]
            local = None
            if shapes is not None:
                local = shapes.get(name)
            shape = ""
            if local is not None:
                shape = " x ".join(map(str, local)) or "scalar"
            rows.append((f"{name:{width}}  {letters}", *places, shape))
        steps = [*_step_rows("forward", self.forward), *_step_rows("backward", self.backward)]
        return "\n".join([*align_columns(rows), *align_columns(steps)])


def einsum_sharding(
    equation: str,
    *operands: Given,
    output: Given = None,
    mesh_axes: Sequence[str] | None = None,
    sizes: Mapping[str, int] | None = None,
    degrees: Mapping[str, int] | None = None,
    itemsize: int = 2,
) -> EinsumSharding:
    """Work out a sharded einsum: where output and gradients are, and what is sent.

    Pure arithmetic: nothing is communicated, no tensor is needed. The rules are those of
    Megatron-LM (arXiv:1909.08053, arXiv:2205.05198), written out in ``docs/guides/tensor.md``.

    Args:
        equation: In einsum's notation, with ``->``; no ellipsis, and no letter twice in a tensor.
        *operands: Where each operand is. ``"b@data f@tensor"`` means that dim b is sharded over
            the axis data and f over tensor. ``"partial@tensor"`` means that the ranks of tensor
            hold terms of a sum. ``"replicated"``, also ``""`` and None, is the same everywhere. Or
            torch's placements, one for each of ``mesh_axes``: ``(Shard(0), Partial())``. Axes that
            are not named are replicated.
        output: Where the output shall be, in the same way. Axes that it does not name stay as
            the product leaves them, perhaps partial; ``"replicated@tensor"`` names one.
        mesh_axes: All axes, from the outermost: a dim sharded over two is cut by the first, and
            the parts by the second. Default: those of the operands, in the order they are named;
            or another, if dims that several cut stay in contiguous parts, or less is sent, only so.
        sizes: The size of the whole dim, for each letter. With it, local shapes and bytes are
            given. Without, all letters are taken to be of one size to find what sends the least.
        degrees: Number of ranks along each axis; together with ``sizes``.
        itemsize: Bytes of an element, 2 for bf16.

    Bytes are what a rank sends in a ring. That is (n - 1)/n of the whole for an all-gather or a
    reduce-scatter, and twice that for an all-reduce. For an all-to-all it is (n - 1)/n of its part.
    Backward is assumed to keep what forward gathered. FSDP and Megatron's sequence parallelism
    free it and gather again.

    Raises:
        ValueError: The equation, a placement or another argument is not well-formed.
        DegreeError: A degree does not divide the size of a dim that is sharded by it.
        ParallelError: The output cannot be had as wanted, or some letter that several axes shard
            would not stay in contiguous parts.

    Megatron's MLP. The column layer needs no collective in forward; under it lies data
    parallelism, whose all-reduce of the weight's gradient shows as well:

    >>> up = einsum_sharding("bsh,hf->bsf", "b@data", "f@tensor")
    >>> print(up)
    bsh,hf->bsf  data     tensor
    x   bsh      b        -
    w   hf       -        f
    y   bsf      b        f
    dx  bsh      b        partial
    dw  hf       partial  f
    forward   -
    backward  all-reduce dx over tensor  copy_to_tensor_parallel_region(x)
              all-reduce dw over data

    Its row layer takes what that left. The output would be partial, unless it is wanted otherwise:

    >>> einsum_sharding("bsf,fh->bsh", up.output, "f@tensor").output
    'b@data partial@tensor'
    >>> down = einsum_sharding("bsf,fh->bsh", up.output, "f@tensor", output="s@tensor")
    >>> [str(step) for step in (*down.forward, *down.backward)[:2]]
    ['reduce-scatter y on s over tensor', 'all-gather dy on s over tensor']
    >>> down.placements()
    (Shard(dim=0), Shard(dim=1))

    FSDP: two letters compete for an axis, and the smaller tensor moves:

    >>> sizes = {"b": 8, "s": 4096, "h": 4096, "f": 16384}
    >>> print(einsum_sharding("bsh,hf->bsf", "b@data", "h@data", sizes=sizes, degrees={"data": 8}))
    bsh,hf->bsf  data     local
    x   bsh      b        1 x 4096 x 4096
    w   hf       h        512 x 16384
    y   bsf      b        1 x 4096 x 16384
    dx  bsh      b
    dw  hf       partial
    forward   all-gather w on h over data       117 MB
    backward  reduce-scatter dw on h over data  117 MB
    """
    parsed = Equation.parse(equation)
    if len(operands) != len(parsed.operands):
        raise ValueError(
            f"einsum {equation!r} has {len(parsed.operands)} operands, but placements "
            f"of {len(operands)} are given; '' are those of a replicated one"
        )
    axes, given, wanted = _read_layouts(parsed, operands, output, mesh_axes)
    cost = _make_cost(parsed, axes, sizes, degrees, itemsize)
    for letters, layout in zip(parsed.operands, given, strict=True):
        cost.shape(letters, layout)
    axes, given, plan = _find_cheapest_plan(
        parsed, axes, given, wanted, cost, fixed=mesh_axes is not None
    )
    forward: list[Step] = []
    backward = list(plan.end.backward)
    regions: list[str] = []
    for way in plan.ways:
        forward += way.forward
        backward += way.backward
        regions += way.regions
    forward += plan.end.forward
    regions += plan.end.regions
    shapes = None
    if sizes is None:
        forward = _drop_bytes(forward)
        backward = _drop_bytes(backward)
    else:
        shapes = {"y": cost.shape(parsed.output, plan.output)}
        for name, letters, layout in zip(parsed.names, parsed.operands, given, strict=True):
            shapes[name] = cost.shape(letters, layout)
    return EinsumSharding(
        equation=equation,
        names=parsed.names,
        axes=axes,
        operands=tuple(map(text, given)),
        output=text(plan.output),
        gradients=tuple(map(text, plan.gradients)),
        forward=tuple(forward),
        backward=tuple(backward),
        regions=tuple(regions),
        shapes=shapes,
    )


def _read_layouts(
    equation: Equation, operands: Sequence[Given], output: Given, mesh_axes: Sequence[str] | None
) -> tuple[Axes, Layouts, Layout]:
    if isinstance(mesh_axes, str) or len(set(mesh_axes or ())) < len(mesh_axes or ()):
        raise ValueError(f"mesh_axes={mesh_axes!r}; expected different names, outermost first")
    layouts = list(
        map(read, operands, equation.operands, equation.names, [mesh_axes] * len(operands))
    )
    if isinstance(output, str) and not output.strip():
        raise ValueError(
            f"output={output!r} names no axis; write 'replicated', or leave it out to have "
            "what the product leaves"
        )
    wanted = read(output, equation.output, "y", mesh_axes)
    axes = tuple(mesh_axes or ())
    if mesh_axes is None:
        axes = tuple(dict.fromkeys(chain(*layouts, wanted)))
    if is_replicated(output):
        wanted = complete(wanted, axes)
    return axes, _complete_all(layouts, axes), wanted


def _complete_all(layouts: Layouts, axes: Axes) -> Layouts:
    return [complete(layout, axes) for layout in layouts]


def _find_cheapest_plan(
    equation: Equation, axes: Axes, given: Layouts, wanted: Layout, cost: Cost, *, fixed: bool
) -> tuple[Axes, Layouts, Plan]:
    """Return the plan that sends the least, and axes and operands in the order that it is for."""
    best: tuple[Axes, Layouts, Plan] | None = None
    failure: ParallelError | None = None
    orders = iter([axes])
    if not fixed:
        orders = _distinct_orders(axes, (*given, wanted))
    for order in orders:
        ordered = _complete_all(given, order)
        choices = [_work_options(equation, axis, ordered, wanted) for axis in order]
        for works in product(*choices):
            try:
                plan = _make_plan(equation, works, ordered, wanted, cost)
            except ParallelError as error:
                failure = failure or error
                continue
            if best is None or plan.price < best[-1].price:
                best = order, ordered, plan
    if best is None:
        assert failure is not None
        raise failure
    return best


def _distinct_orders(axes: Axes, layouts: Layouts) -> Iterator[Axes]:
    """Yield the orders of the axes that differ in which one cuts a letter before another."""
    letters: dict[str, set[str]] = {}
    for axis in axes:
        letters[axis] = set()
        for layout in layouts:
            letters[axis].add(layout.get(axis, PARTIAL))
        letters[axis] -= WORDS
    pairs = [two for two in combinations(axes, 2) if letters[two[0]] & letters[two[1]]]
    seen = set()
    for order in permutations(axes):
        key = tuple(order.index(one) < order.index(other) for one, other in pairs)
        if key not in seen:
            seen.add(key)
            yield order


def _make_cost(
    equation: Equation,
    axes: Sequence[str],
    sizes: Mapping[str, int] | None,
    degrees: Mapping[str, int] | None,
    itemsize: int,
) -> Cost:
    letters = dict.fromkeys("".join(equation.operands))
    if sizes is None and degrees is None:
        return Cost(dict.fromkeys(letters, 2 ** (len(axes) + 10)), dict.fromkeys(axes, 2), 1)
    if sizes is None or degrees is None:
        lacking = "degrees"
        if sizes is None:
            lacking = "sizes"
        raise ValueError(f"{lacking}= is not given; bytes need both sizes= and degrees=")
    for what, keys, given, least in (("sizes", letters, sizes, 0), ("degrees", axes, degrees, 1)):
        for key in keys:
            if key not in given:
                raise ValueError(f"{what}={dict(given)} lacks {key!r}")
            if given[key] < least:
                raise DegreeError(f"{what}: {key!r} is {given[key]}; expected {least} or more")
    if itemsize < 1:
        raise ValueError(f"itemsize={itemsize}; expected the bytes of an element, 1 or more")
    return Cost(sizes, degrees, itemsize)
