from itertools import product

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import ezpz_tp as tp
from ezpz_spmd import einsum_sharding
from ezpz_tp.testing import run_ranks


def steps(answer):
    return [str(s) for s in answer.forward], [str(s) for s in answer.backward]


COPY, SUM = "copy_to_tensor_parallel_region({})", "reduce_from_tensor_parallel_region({})"
OUT_OF = "gather_from_sequence_parallel_region({})"
HIDDEN, HEADS = "bsh,hf->bsf", "b@data h@tensor"

# Equation, operands, wanted output; output, gradients, steps forward and backward (of an axis, the
# first one unless it is named), regions. None: not looked at. Column and row layers, data
# parallelism and FSDP are examples of `einsum_sharding`, which are run too.
ANSWERS = {
    "two-dimensional tensor parallelism": (
        "bh,hf->bf", ["h@row", "h@row f@column"], "b@row f@column", "b@row f@column",
        ["h@row partial@column", "h@row f@column"],
        ["reduce-scatter y on b over row"],
        ["all-gather dy on b over row", "all-reduce dx over column"], None,
    ),
    "replicated operands are sliced for an output in parts": (
        HIDDEN, ["", ""], "f@tensor", "f@tensor", ["partial@tensor", "f@tensor"],
        ["slice w on f over tensor"],
        ["all-reduce dx over tensor", "all-gather dw on f over tensor"], None,
    ),
    "a sum passes through what is linear in it": (
        "ab,bc,cd->ad", ["", "partial@tensor", ""], None, "partial@tensor",
        ["partial@tensor", "replicated", "partial@tensor"],
        [], ["all-reduce dx1 over tensor", "all-reduce dx3 over tensor"], None,
    ),
    "two sums are reduced before they are multiplied": (
        "ab,bc->ac", ["partial@tensor"] * 2, None, "replicated", None,
        ["all-reduce x over tensor", "all-reduce w over tensor"], [], None,
    ),
    # w is multiplied by a term: its gradient is a sum again
    "but one, where the output may be a sum": (
        "ab,bc->ac", ["partial@tensor"] * 2, "partial@tensor", "partial@tensor", None,
        None, ["all-reduce dw over tensor"], [SUM.format("w"), COPY.format("w")],
    ),
    "a sum meets shards of what is summed": (
        "ab,bc->ac", ["partial@tensor", "b@tensor"], None, None, None,
        ["reduce-scatter x on b over tensor"], ["all-gather dx on b over tensor"], None,
    ),
    "scores of attention by heads": (
        "bqhk,bshk->bhqs", [HEADS] * 2, None, HEADS, [HEADS] * 2, [], [], [],
    ),
    "Ulysses": (
        "bshd,bthd->bhst", ["s@tensor", "t@tensor"], "h@tensor", "h@tensor", ["h@tensor"] * 2,
        [f"all-to-all {name} to h over tensor" for name in ("x from s", "w from t")],
        [f"all-to-all {name} over tensor" for name in ("dx from h to s", "dw from h to t")],
        [f"sequence_to_head({name}, sequence_dim=1, head_dim=2)" for name in "xw"],
    ),
    "a dim of several axes is gathered from the last": (
        "ab->ab", ["a@outer a@inner"], "replicated", "replicated", None,
        ["all-gather y on a over inner", "all-gather y on a over outer"],
        ["slice dy on a over outer", "slice dy on a over inner"], None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ANSWERS.values(), ids=ANSWERS.keys())
def test_what_is_sharded_and_sent(case):
    equation, operands, wanted, output, gradients, forward, backward, regions = case
    answer = einsum_sharding(equation, *operands, output=wanted)
    found = (answer.output, list(answer.gradients), *steps(answer), list(answer.regions))
    expected = (output, gradients, forward, backward, regions)
    for one, other in zip(found, expected, strict=True):
        assert other is None or one == other


def test_hsdp_scatters_a_gradient_before_it_sums_the_rest_of_it():
    sizes, degrees = {"b": 800, "h": 64, "f": 64}, {"replica": 2, "data": 4}
    operands = "b@replica b@data", "h@data"
    answer = einsum_sharding("bh,hf->bf", *operands, sizes=sizes, degrees=degrees)
    assert steps(answer)[1] == ["reduce-scatter dw on h over data", "all-reduce dw over replica"]
    assert [s.bytes for s in answer.backward] == [64 * 64 * 2 * 3 // 4, 64 * 64 * 2 // 4]


def test_sizes_decide_which_operand_is_gathered():
    few = {"b": 8, "h": 1024, "f": 1024}
    many = {"b": 65536, "h": 1024, "f": 1024}
    for sizes, moved in ((few, "x on b"), (many, "w on f")):
        answer = einsum_sharding(
            "bh,hf->bf", "b@tensor", "f@tensor", sizes=sizes, degrees={"tensor": 4}
        )
        assert steps(answer)[0] == [f"all-gather {moved} over tensor"]


def test_an_output_left_partial_has_yet_to_be_summed():
    """To cut x on h instead of b would send less, and leave the sum of y to others."""
    sizes = {"b": 4096, "h": 1024, "f": 4096}
    answer = einsum_sharding("bh,hf->bf", "b@t", "h@t", sizes=sizes, degrees={"t": 8})
    assert (answer.output, steps(answer)[0]) == ("b@t", ["all-gather w on h over t"])
    assert answer.bytes > 2 * 4096 * 1024 * 2 * 7 // 64


@pytest.mark.parametrize(("axis", "is_ours"), [("tensor", True), ("tp", True), ("data", False)])
def test_regions_are_of_the_tensor_axis(axis, is_ours):
    """Which they are: those that do it on real ranks, for every placement; see below."""
    answer = einsum_sharding("bsf,fg->bsg", f"s@{axis}", f"g@{axis}", output=f"g@{axis}")
    regions = [OUT_OF.format("x, dim=1")] if is_ours else []
    assert list(answer.regions) == regions
    named = {step.region for step in (*answer.forward, *answer.backward)}
    assert named == (set(regions) or {None})


def test_placements_may_be_torchs():
    answer = einsum_sharding(
        "bsh,hf->bsf", (Shard(0), Shard(-1)), [Replicate(), Shard(0)], mesh_axes=("data", "tensor")
    )
    assert answer.operands == ("b@data h@tensor", "h@tensor")
    assert answer.placements() == (Shard(0), Partial())
    assert answer.placements("output") == answer.placements("y")
    assert answer.placements(0) == answer.placements("x") == (Shard(0), Shard(2))
    assert answer.placements(-1) == answer.placements(1) == (Replicate(), Shard(0))
    assert answer.placements("dw") == (Partial(), Shard(0))
    goal = (Shard(0), Shard(1))
    again = einsum_sharding(
        answer.equation, *answer.operands, output=goal, mesh_axes=("data", "tensor")
    )
    assert again.placements() == goal


def test_what_output_does_not_name_stays():
    equation, operands = "bsf,fh->bsh", ("b@data f@tensor", "f@tensor")
    assert einsum_sharding(equation, *operands, output="s@tensor").output == "b@data s@tensor"
    assert einsum_sharding(equation, *operands, output="replicated@tensor").output == "b@data"
    assert einsum_sharding(equation, *operands, output="replicated").output == "replicated"
    assert einsum_sharding(equation, *operands, output="b@data").output == "b@data partial@tensor"


def test_axes_are_put_in_an_order_that_keeps_dims_together():
    """FSDP of what tensor parallelism has cut on the same dim."""
    operands = ("b@data", "f@data f@tensor")
    answer = einsum_sharding("bh,hf->bf", *operands)
    assert answer.axes == ("tensor", "data")
    assert answer.operands == ("b@data", "f@tensor f@data")
    assert answer.output == "f@tensor b@data"
    assert steps(answer)[0] == ["all-gather w on f over data"]
    # In this order the parts of a part would have to be joined before the parts.
    answer = einsum_sharding("bh,hf->bf", *operands, mesh_axes=("data", "tensor"))
    assert steps(answer)[0] == ["all-gather x on b over data"]


def test_a_dim_that_comes_apart_in_any_order_is_told():
    with pytest.raises(
        tp.ParallelError,
        match=r"w 'ab' cannot go from replicated to a over t in contiguous parts: of the axes that "
        r"cut a dim, in the order t, u, only the last can be added or taken away\. Name mesh_axes=",
    ):
        einsum_sharding("ab,ab->ab", "a@t", "a@u")


def test_six_axes():
    """Of the orders of axes, and of moves, only those are tried that can make a difference."""
    operands = ("a@p b@q c@r d@s a@t", "b@s e@p", "f@q e@r f@u")
    answer = einsum_sharding("abcd,bcde,ef->abf", *operands)
    assert set(answer.axes) == set("pqrstu")
    assert answer.axes.index("t") < answer.axes.index("p")  # of a, p is gathered first
    assert steps(answer)[0][0] == "all-gather x1 on a over p"
    whole = einsum_sharding("a->a", "a@p a@q a@r a@s a@t", output="replicated")
    assert [step.axis for step in whole.forward] == list("tsrqp")


SIZES = {"b": 8, "s": 128, "h": 64, "f": 256}


def test_bytes_are_those_of_a_ring():
    def sent(*operands, **settings):
        answer = einsum_sharding(
            "bsh,hf->bsf", *operands, sizes=SIZES, degrees={"tensor": 4, "data": 2}, **settings
        )
        total = sum(s.bytes for s in (*answer.forward, *answer.backward))
        assert answer.bytes == total
        return [s.bytes for s in answer.forward], [s.bytes for s in answer.backward]

    x, w, y = 8 * 128 * 64, 64 * 256, 8 * 128 * 256
    assert sent("", "f@tensor") == ([], [2 * x * 2 * 3 // 4])
    assert sent("b@data", "f@tensor") == ([], [2 * x // 2 * 2 * 3 // 4, 2 * w // 4 * 2 // 2])
    assert sent("h@tensor", "h@tensor", output="s@tensor", itemsize=4) == ([3 * y], [3 * y])
    assert sent("h@tensor", "") == ([0], [2 * w * 3 // 4])
    whole = sent("s@tensor", "h@tensor", output="f@tensor")  # x is gathered, w changes its letter
    assert whole == ([2 * x * 3 // 4, 2 * w * 3 // 16], [2 * x * 3 // 4, 2 * w * 3 // 16])


def test_local_shapes_and_degree_1():
    operands, degrees = ("b@data", "h@data f@tensor"), {"data": 2, "tensor": 4}
    answer = einsum_sharding(HIDDEN, *operands, sizes=SIZES, degrees=degrees)
    assert answer.shapes == {"x": (4, 128, 64), "w": (32, 64), "y": (4, 128, 64)}
    settings = {"output": "s@tensor", "sizes": SIZES, "degrees": {"tensor": 1}}
    answer = einsum_sharding("bsf,fh->bsh", "f@tensor", "f@tensor", **settings)
    assert (answer.bytes, answer.shapes["y"]) == (0, (8, 128, 64))


def test_empty_and_indivisible_sizes():
    """An all-reduce in a ring pads its parts."""
    ask = {"degrees": {"tensor": 4}, "itemsize": 1}
    assert einsum_sharding("a,b->ab", "", "b@tensor", sizes={"a": 0, "b": 4}, **ask).bytes == 0
    assert einsum_sharding("a,b->ab", "", "b@tensor", sizes={"a": 7, "b": 4}, **ask).bytes == 11


def test_text():
    """Beside the examples of `einsum_sharding`, which are run too."""
    answer = einsum_sharding(
        "sbh,hf->sbf", "b@data s@tensor", "h@data f@tensor", output="f@tensor",
        sizes={"b": 64, "s": 4096, "h": 4096, "f": 16384}, degrees={"data": 8, "tensor": 4},
    )  # fmt: skip
    call = "gather_from_sequence_parallel_region(x)"
    assert str(answer).splitlines()[6:] == [
        f"forward   all-gather x on s over tensor       201 MB   {call}",
        "          all-gather w on h over data         29.4 MB",
        f"backward  reduce-scatter dx on s over tensor  201 MB   {call}",
        "          reduce-scatter dw on h over data    29.4 MB",
    ]
    nothing = str(einsum_sharding("ab->", "", sizes={"a": 2, "b": 3}, degrees={}))
    assert nothing.splitlines() == [
        *("ab->    local", "x   ab  2 x 3", "y       scalar", "dx  ab"),
        *("forward   -", "backward  -"),
    ]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        *((0, "0 B"), (999, "999 B"), (10**3, "1 kB"), (999_499, "999 kB"), (999_500, "1 MB")),
        *((12_340_000, "12.3 MB"), (3 * 10**9, "3 GB"), (10**16, "1e+04 TB")),
    ],
)
def test_bytes_in_the_units_of_networks(size, text):
    settings = {"sizes": {"a": 1, "b": size}, "degrees": {"data": 2}, "itemsize": 1}
    answer = einsum_sharding("a,b->ab", "partial@data", "", output="replicated", **settings)
    assert f"all-reduce y over data {text}" in " ".join(str(answer).split())


EQUATIONS = {
    "...h,hf->...f": r"has an ellipsis; give every dim a letter",
    "bsh,hf": r"'bsh,hf' does not say what comes out; expected one '->'",
    "aab,bc->ac": r"'a' is twice in 'aab'; diagonals",
    "ab,bc->aa": r"'a' is twice in 'aa'",
    "ab,bc->ad": r"no operand has 'd' of the output",
    "ab,b1->a": r"'1' is not a letter",
    "ab->a": r"has 1 operands, but placements of 2 are given",
}
ONES = {"a": 1, "b": 1, "c": 1}


@pytest.mark.parametrize(
    ("operands", "settings", "message"),
    [
        *((("", ""), {"equation": equation}, message) for equation, message in EQUATIONS.items()),
        (("tensor", ""), {}, r"x 'tensor': 'tensor' is not a placement; expected letter@axis"),
        (("a@b@c", ""), {}, r"'a@b@c' is not a placement"),
        (("", "a@tensor"), {}, r"w 'a@tensor': 'a' is no dim of 'bc'; expected for an axis"),
        (("a@t", ("a", None)), {}, r"w \('a', None\) does not name its axes; write 'b@data f@"),
        (("a@t b@t", ""), {}, r"x 'a@t b@t' names axis t twice"),
        (("a@t", ""), {"mesh_axes": ["u"]}, r"x 'a@t': axis 't' is none of mesh_axes \('u',\)"),
        (("", ""), {"mesh_axes": ["u", "u"]}, r"mesh_axes=\['u', 'u'\]; expected different"),
        (("", ""), {"output": " "}, r"output=' ' names no axis; write 'replicated'"),
        (("", ""), {"output": "b@t"}, r"y 'b@t': 'b' is no dim of 'ac'"),
        (("", ""), {"sizes": {}}, r"degrees= is not given; bytes need both"),
        (("", ""), {"sizes": {"a": 1, "b": 1}, "degrees": {}}, r"sizes=\{.*\} lacks 'c'"),
        (("a@t", ""), {"sizes": ONES, "degrees": {}}, r"degrees=\{\} lacks 't'"),
        (("", ""), {"sizes": ONES, "degrees": {}, "itemsize": 0}, r"itemsize=0; e"),
    ],
)
def test_malformed_arguments_are_told(operands, settings, message):
    given = {"equation": "ab,bc->ac", **settings}
    with pytest.raises(ValueError, match=message):
        einsum_sharding(given.pop("equation"), *operands, **given)


def test_torchs_placements_that_mean_something_else_are_told():
    for item in (Shard(2), Shard(-3), Partial("avg"), _StridedShard(0, split_factor=2)):
        with pytest.raises(ValueError, match=r"w: .* on axis t; expected Replicate\(\), Partial"):
            einsum_sharding("ab,bc->ac", (Replicate(),), (item,), mesh_axes=("t",))
    told = r"x \(Shard\(dim=0\),\) does not name .* torch's .* with mesh_axes="
    with pytest.raises(ValueError, match=told):
        einsum_sharding("ab,bc->ac", (Shard(0),), "")
    for given in ((Shard(0),), Shard(0)):
        with pytest.raises(ValueError, match=r"expected a tuple of one .* mesh_axes \('t', 'u'\)"):
            einsum_sharding("ab,bc->ac", given, "", mesh_axes=("t", "u"))


def test_degrees_and_outputs_that_do_not_fit_are_told():
    message = r"size 6 of 'b' in 'ab' does not divide by t 2 x u 2; pad it to a multiple of 4"
    sizes = {"a": 4, "b": 6, "c": 4}
    with pytest.raises(tp.DegreeError, match=message):
        einsum_sharding("ab,bc->ac", "b@t b@u", "", sizes=sizes, degrees={"t": 2, "u": 2})
    with pytest.raises(tp.DegreeError, match=r"size 6 of 'b' in 'ab' does not divide by t 4"):
        einsum_sharding("ab,bc->bac", "", "", output="b@t", sizes=sizes, degrees={"t": 4})
    with pytest.raises(tp.DegreeError, match="degrees: 't' is 0; expected 1 or more"):
        einsum_sharding("ab,bc->ac", "b@t", "", sizes=sizes, degrees={"t": 0})
    with pytest.raises(tp.DegreeError, match="sizes: 'a' is -1; expected 0 or more"):
        einsum_sharding("ab,bc->ac", "", "", sizes={"a": -1, "b": 1, "c": 1}, degrees={})
    told = r"y is a over t, which does not become partial; leave"
    with pytest.raises(tp.ParallelError, match=told):
        einsum_sharding("ab,bc->ac", "a@t", "", output="partial@t")


def test_a_tensor_that_is_not_there_is_told():
    answer = einsum_sharding("ab,bc->ac", "a@t", "")
    for name in ("z", 2, -3):
        with pytest.raises(ValueError, match=r"no tensor .* or one of x, w, y, dx, dw"):
            answer.placements(name)


# Carried out on shards of integers, and compared with the whole. Nothing is taken from its rules:
# placements say how tensors are cut, steps are done one by one, gradients are each rank's own.

MATRIX, LINEAR, SCORES = "ab,bc->ac", "bsh,hf->bsf", "bhqd,bhkd->bhqk"
WHERE = ("replicated", "partial")


def numbers(shape, generator):
    return torch.randint(-3, 4, shape, generator=generator).double()


def layout(text, axes):
    words = [word.split("@") for word in text.split() if word != "replicated"]
    told = {axis: where for where, axis in words}
    return {axis: told.get(axis, "replicated") for axis in axes}


def dual(told):
    return {a: "replicated" if where == "partial" else where for a, where in told.items()}


class Mesh:
    """Ranks of a mesh, each with its tensor, as dicts from positions to tensors."""

    def __init__(self, degrees):
        self.degrees = degrees
        self.axes = tuple(degrees)
        self.ranks = list(product(*(range(n) for n in degrees.values())))

    def cut(self, whole, letters, told):
        generator = torch.Generator().manual_seed(0)
        parts = {(): whole}
        for axis in self.axes:
            parts = {
                (*place, n): part
                for place, tensor in parts.items()
                for n, part in enumerate(self._cut(tensor, letters, told[axis], axis, generator))
            }
        return parts

    def _cut(self, tensor, letters, where, axis, generator):
        degree = self.degrees[axis]
        if where == "replicated":
            return [tensor] * degree
        if where == "partial":
            terms = [numbers(tensor.shape, generator) for _ in range(degree - 1)]
            return [*terms, tensor - sum(terms)]
        return tensor.chunk(degree, letters.index(where))

    def join(self, parts, letters, told):
        for axis in reversed(self.axes):
            groups = {}
            for place, tensor in parts.items():
                groups.setdefault(place[:-1], []).append(tensor)
            parts = {p: self._join(group, letters, told[axis]) for p, group in groups.items()}
        return parts[()]

    def _join(self, group, letters, where):
        if where == "replicated":
            assert all(torch.equal(tensor, group[0]) for tensor in group)
            return group[0]
        return sum(group) if where == "partial" else torch.cat(group, letters.index(where))

    def do(self, step, parts, letters):
        at = self.axes.index(step.axis)
        degree = self.degrees[step.axis]
        done = {}
        for rank in self.ranks:
            group = [parts[(*rank[:at], n, *rank[at + 1 :])] for n in range(degree)]
            tensor = parts[rank]
            if step.kind in {"all-reduce", "reduce-scatter"}:
                tensor = sum(group)
            if step.kind in {"all-gather", "all-to-all"}:
                tensor = torch.cat(group, letters.index(step.gathered))
            if step.kind in {"slice", "reduce-scatter", "all-to-all"}:
                tensor = tensor.chunk(degree, letters.index(step.split))[rank[at]]
            done[rank] = tensor
        return done


class Whole:
    def __init__(self, equation, size):
        self.equation = equation
        inputs, self.output = equation.split("->")
        self.operands = inputs.split(",")
        generator = torch.Generator().manual_seed(1)
        self.tensors = [
            numbers([size] * len(letters), generator).requires_grad_() for letters in self.operands
        ]
        self.y = torch.einsum(equation, *self.tensors)
        self.dy = numbers(self.y.shape, generator)
        self.gradients = torch.autograd.grad(self.y, self.tensors, self.dy)
        self.y = self.y.detach()


def prove(whole, mesh, answer):
    operands = dict(zip(answer.names, whole.operands, strict=True))
    letters = {**operands, "y": whole.output}
    letters |= {f"d{name}": own for name, own in letters.items()}
    parts = {
        name: mesh.cut(tensor.detach(), letters[name], layout(given, mesh.axes))
        for name, tensor, given in zip(answer.names, whole.tensors, answer.operands, strict=True)
    }
    before = [step for step in answer.forward if step.tensor != "y"]
    for step in before:
        parts[step.tensor] = mesh.do(step, parts[step.tensor], letters[step.tensor])
    for name in operands:
        parts[name] = {rank: part.detach().requires_grad_() for rank, part in parts[name].items()}
    products = {
        rank: torch.einsum(whole.equation, *(parts[name][rank] for name in operands))
        for rank in mesh.ranks
    }
    y = {rank: part.detach() for rank, part in products.items()}
    for step in answer.forward[len(before) :]:
        y = mesh.do(step, y, whole.output)
    result = layout(answer.output, mesh.axes)
    assert torch.equal(mesh.join(y, whole.output, result), whole.y)

    dy = mesh.cut(whole.dy, whole.output, dual(result))
    after = [step for step in answer.backward if step.tensor == "dy"]
    assert list(answer.backward[: len(after)]) == after
    for step in after:
        dy = mesh.do(step, dy, whole.output)
    found = {
        rank: torch.autograd.grad(
            products[rank], [parts[name][rank] for name in operands], dy[rank]
        )
        for rank in mesh.ranks
    }
    for number, name in enumerate(answer.names):
        gradient = {rank: gradients[number] for rank, gradients in found.items()}
        raw = layout(answer.gradients[number], mesh.axes)
        expected = whole.gradients[number]
        assert torch.equal(mesh.join(gradient, letters[name], raw), expected)
        for step in answer.backward:
            if step.tensor == f"d{name}":
                gradient = mesh.do(step, gradient, letters[name])
        final = dual(layout(answer.operands[number], mesh.axes))
        assert torch.equal(mesh.join(gradient, letters[name], final), expected)


@pytest.mark.parametrize("equation", [MATRIX, LINEAR, SCORES, "ab,bc,cd->ad", "abc->ca", "ab,bc->"])
def test_every_placement_over_one_axis(equation):
    """And every output that may be wanted."""
    mesh, whole = Mesh({"t": 2}), Whole(equation, 4)
    for given in product(*((*WHERE, *letters) for letters in whole.operands)):
        for goal in (None, "replicated", *whole.output):
            output = None if goal is None else f"{goal}@t"
            operands = [f"{where}@t" for where in given]
            answer = einsum_sharding(equation, *operands, output=output)
            assert goal in {None, layout(answer.output, "t")["t"]}
            prove(whole, mesh, answer)


@pytest.mark.parametrize(("equation", "alike"), [(MATRIX, ""), (LINEAR, "bs"), (SCORES, "bh")])
def test_every_placement_over_two_axes(equation, alike):
    """But for those in which two letters that are in the same tensors change places."""
    degrees, whole = {"d": 2, "t": 3}, Whole(equation, 6)
    places = [list(product((*WHERE, *letters), repeat=2)) for letters in whole.operands]
    refused = proved = 0
    for given in product(*places):
        if next((w for pair in given for w in pair if w in alike), alike[:1]) != alike[:1]:
            continue
        operands = [f"{outer}@d {inner}@t" for outer, inner in given]
        try:
            answer = einsum_sharding(equation, *operands)
        except tp.ParallelError:
            # A letter of both operands, which other axes cut in the one than in the other.
            cut = [[tuple(w == letter for w in pair) for pair in given] for letter in equation]
            assert any(x != w and any(x + w) for x, w in cut)
            refused += 1
            continue
        prove(whole, Mesh({axis: degrees[axis] for axis in answer.axes}), answer)
        proved += 1
    assert refused <= proved / 20


def carry_out_regions(cases):
    """On real ranks the calls that it names do it: forward, and backward by autograd."""
    rank, results = (tp.get_tensor_parallel_rank(),), []
    for answer, tensors, dy in cases:
        leaves = [parts[rank].clone().requires_grad_() for parts in tensors]
        names = dict(zip(answer.names, leaves, strict=True))

        def call(text, names=names):
            names[text.split("(")[1].rstrip(")").split(",")[0]] = eval(text, vars(tp), names)

        before = [text for text in answer.regions if "(y" not in text]
        for text in before:
            call(text)
        names["y"] = torch.einsum(answer.equation, *(names[name] for name in answer.names))
        for text in answer.regions[len(before) :]:
            call(text)
        results.append((names["y"].detach(), torch.autograd.grad(names["y"], leaves, dy[rank])))
    return results


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_the_regions_that_it_names_do_it_on_real_ranks(degree):
    whole, mesh = Whole(LINEAR, 6), Mesh({"tensor": degree})
    goals = [None, "replicated@tensor", *(f"{letter}@tensor" for letter in whole.output)]
    cases = []
    for *given, goal in product(*((*WHERE, *letters) for letters in whole.operands), goals):
        answer = einsum_sharding(LINEAR, *(f"{where}@tensor" for where in given), output=goal)
        operands = zip(whole.tensors, whole.operands, answer.operands, strict=True)
        tensors = [mesh.cut(t.detach(), own, layout(at, mesh.axes)) for t, own, at in operands]
        dy = mesh.cut(whole.dy, whole.output, dual(layout(answer.output, mesh.axes)))
        cases.append((answer, tensors, dy))
    ranks = run_ranks(carry_out_regions, degree, cases)
    for number, (answer, _, _) in enumerate(cases):
        results = [rank[number] for rank in ranks]
        y = {(n,): result[0] for n, result in enumerate(results)}
        assert torch.equal(mesh.join(y, "bsf", layout(answer.output, mesh.axes)), whole.y)
        for n, (letters, told) in enumerate(zip(whole.operands, answer.operands, strict=True)):
            parts = {(rank,): result[1][n] for rank, result in enumerate(results)}
            gradient = mesh.join(parts, letters, dual(layout(told, mesh.axes)))
            assert torch.equal(gradient, whole.gradients[n])
