"""The sharding calculator: what one works out in one's head when designing a sharded model.

The letters of an einsum are the dims of its tensors. Along one axis of the mesh a tensor is
replicated, sharded on one of its letters, or partial: the ranks hold terms of a sum. Axes do not
depend on each other. Along each, an einsum of any number of operands is linear in every one of
them, which leaves four cases in which every rank can work on what it has:

========================================  ===========  ===========================================
along an axis the operands are            output       their gradients, from the local product
========================================  ===========  ===========================================
all replicated                            replicated   replicated
sharded on a letter of the output         sharded      sharded; partial where the letter is not
sharded on a letter that is summed        partial      sharded; partial where the letter is not
partial, one of them; others replicated   partial      replicated; of the others partial
========================================  ===========  ===========================================

"Sharded" means here: every operand that has the letter is sharded on it, and all others are
replicated. What has the letter gets a sharded gradient, what lacks it has seen only a part of the
sum over the letter: its gradient is partial. The gradient of an output that is replicated or
partial is the same on every rank, that of a sharded one is sharded.

What does not agree is moved, before the product for operands and after it for the output, and the
gradients go back by the inverse; "-" sends nothing:

==========================  ==============  ======================================================
a tensor goes               forward         backward
==========================  ==============  ======================================================
replicated to sharded code  -               all-reduce (its gradient is partial)
replicated to sharded       slice           all-gather
sharded to replicated       all-gather      reduce-scatter (partial gradient), or slice
sharded to another letter   all-to-all      all-to-all
partial to replicated       all-reduce      - (or all-reduce, if its gradient is partial)
partial to sharded          reduce-scatter  all-gather
==========================  ==============  ======================================================

Along an axis where the operands do not agree, the letter that ``output`` names is the one that is
computed on. If it names none: that letter among the operands' which sends the least in forward
and backward, with the sum of an output that is left partial counted. (Computing the same on
every rank is not considered once something is sharded.) Where operands agree nothing moves before
the product, except that replicated ones are sliced if ``output`` wants the result in parts.

Rules and names are those of Megatron-LM (Shoeybi et al., arXiv:1909.08053; Korthikanti et al.,
arXiv:2205.05198); Austin et al., "How to Scale Your Model" (jax-ml.github.io/scaling-book),
work through many such products.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, permutations

from ezpz_tp._errors import DegreeError, ParallelError

from .equation import Equation
from .placement import PARTIAL, REPLICATED, Given, Layout, complete, read, text
from .plan import Plan, cheapest_plan
from .result import EinsumSharding
from .steps import Cost


def einsum_sharding(
    equation: str,
    *operands: Given,
    output: Given = None,
    mesh_axes: Sequence[str] | None = None,
    sizes: Mapping[str, int] | None = None,
    degrees: Mapping[str, int] | None = None,
    itemsize: int = 2,
    names: Sequence[str] | None = None,
) -> EinsumSharding:
    """Work out a sharded einsum: where output and gradients are, and what is sent.

    Pure arithmetic: nothing is communicated, no tensor is needed. The rules are in this
    module's docstring.

    Args:
        equation: In einsum's notation, with ``->``; no ellipsis, and no letter twice in a tensor.
        *operands: Where each operand is. ``"b@data f@tensor"``: dim b is sharded over the axis
            data and f over tensor; ``"partial@tensor"``: the ranks of tensor hold terms of a
            sum; ``"replicated"``, also ``""`` and None: the same everywhere. Or a mapping,
            ``{"data": "b", "tensor": "f"}``. Or torch's placements, one for each of
            ``mesh_axes``: ``(Shard(0), Partial())``. Axes that are not named are replicated.
        output: Where the output shall be, in the same way. Axes that it does not name stay as
            the product leaves them, perhaps partial; ``"replicated@tensor"`` names one.
        mesh_axes: All axes, from the outermost: a dim sharded over two is cut by the first, and
            the parts by the second. Default: those of the operands, in the order they are named;
            or another, if dims that several cut stay in contiguous parts, or less is sent, only so.
        sizes: The size of the whole dim, for each letter. With it, local shapes and bytes are
            given. Without, all letters are taken to be of one size to find what sends the least.
        degrees: Number of ranks along each axis; together with ``sizes``.
        itemsize: Bytes of an element, 2 for bf16.
        names: What the operands are called; default x and w, or x1, x2 and so on.

    Bytes are what a rank sends in a ring: (n - 1)/n of the whole for an all-gather or a
    reduce-scatter, twice that for an all-reduce, (n - 1)/n of its part for an all-to-all.
    Backward is taken to keep what forward gathered; FSDP and Megatron's sequence parallelism free
    it and gather once more.

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
    parsed = Equation.parse(equation, names)
    if len(operands) != len(parsed.operands):
        raise ValueError(
            f"einsum {equation!r} has {len(parsed.operands)} operands, but placements "
            f"of {len(operands)} are given; '' are those of a replicated one"
        )
    axes, given, wanted = _layouts(parsed, operands, output, mesh_axes)
    cost = _cost(parsed, axes, sizes, degrees, itemsize)
    for letters, layout in zip(parsed.operands, given, strict=True):
        cost.shape(letters, layout)
    axes, given, plan = _cheapest(parsed, axes, given, wanted, cost, fixed=mesh_axes is not None)
    ways = [*plan.ways, plan.end]
    forward = [step for way in ways for step in way.forward]
    backward = [step for way in (plan.end, *plan.ways) for step in way.backward]
    shapes = None
    if sizes is None:
        forward, backward = ([replace(s, bytes=None) for s in x] for x in (forward, backward))
    else:
        tensors = zip((*parsed.operands, parsed.output), (*given, plan.output), strict=True)
        local = [cost.shape(letters, layout) for letters, layout in tensors]
        shapes = dict(zip((*parsed.names, "y"), local, strict=True))
    return EinsumSharding(
        equation=equation,
        names=parsed.names,
        axes=axes,
        operands=tuple(map(text, given)),
        output=text(plan.output),
        gradients=tuple(map(text, plan.gradients)),
        forward=tuple(forward),
        backward=tuple(backward),
        regions=tuple(region for way in ways for region in way.regions),
        shapes=shapes,
    )


def _layouts(
    equation: Equation, operands: Sequence[Given], output: Given, mesh_axes: Sequence[str] | None
) -> tuple[tuple[str, ...], list[Layout], Layout]:
    """Return the axes, the operands' layouts, and what is wanted of the output, by axis."""
    if mesh_axes is not None and (isinstance(mesh_axes, str) or not _differ(mesh_axes)):
        raise ValueError(f"mesh_axes={mesh_axes!r}; expected different names, outermost first")
    told = [
        read(given, letters, name, mesh_axes)[0]
        for given, letters, name in zip(operands, equation.operands, equation.names, strict=True)
    ]
    if isinstance(output, str) and not output.strip():
        raise ValueError(
            f"output={output!r} names no axis; write 'replicated', or leave it out to have "
            "what the product leaves"
        )
    wanted, whole = ({}, False) if output is None else read(output, equation.output, "y", mesh_axes)
    found = dict.fromkeys(axis for layout in (*told, wanted) for axis in layout)
    axes = tuple(found if mesh_axes is None else mesh_axes)
    return axes, [complete(t, axes) for t in told], complete(wanted, axes) if whole else wanted


def _cheapest(
    equation: Equation,
    axes: tuple[str, ...],
    given: Sequence[Layout],
    wanted: Layout,
    cost: Cost,
    *,
    fixed: bool,
) -> tuple[tuple[str, ...], list[Layout], Plan]:
    """Return the cheapest plan, and axes and operands in the order that it is made for."""
    best: tuple[tuple[str, ...], list[Layout], Plan] | None = None
    failures: list[ParallelError] = []
    for order in [axes] if fixed else _orders(axes, (*given, wanted)):
        ordered = [complete(layout, order) for layout in given]
        try:
            plan = cheapest_plan(equation, order, ordered, wanted, cost)
        except ParallelError as error:
            failures.append(error)
            continue
        if best is None or plan.price < best[-1].price:
            best = order, ordered, plan
    if best is None:
        raise failures[0]
    return best


def _orders(axes: tuple[str, ...], layouts: Sequence[Layout]) -> Iterator[tuple[str, ...]]:
    """Yield the orders of the axes that differ in which one cuts a letter before another."""
    letters = {
        axis: {layout.get(axis, REPLICATED) for layout in layouts} - {REPLICATED, PARTIAL}
        for axis in axes
    }
    pairs = [two for two in combinations(axes, 2) if letters[two[0]] & letters[two[1]]]
    seen = set()
    for order in permutations(axes):
        key = tuple(order.index(one) < order.index(other) for one, other in pairs)
        if key not in seen:
            seen.add(key)
            yield order


def _differ(words: Sequence[str]) -> bool:
    return len(set(words)) == len(words)


def _cost(
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
        lacking = "sizes" if sizes is None else "degrees"
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
