"""What the calculator says is carried out, on shards of integers, and compared with the whole.

Nothing is taken from its rules: placements say how tensors are cut, steps are done one by one,
and the gradients are those of each rank's own product."""

import random
from itertools import product

import pytest
import torch

import ezpz_tp as tp
from ezpz_tp.testing import run_ranks

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
        """Carry out a step of the calculator's on every rank."""
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
    """The product of whole tensors, and its gradients."""

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
            answer = tp.einsum_sharding(equation, *operands, output=output)
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
            answer = tp.einsum_sharding(equation, *operands)
        except tp.ParallelError:
            # A letter of both operands, which other axes cut in the one than in the other.
            cut = [[tuple(w == letter for w in pair) for pair in given] for letter in equation]
            assert any(x != w and any(x + w) for x, w in cut)
            refused += 1
            continue
        prove(whole, Mesh({axis: degrees[axis] for axis in answer.axes}), answer)
        proved += 1
    assert refused <= proved / 20


def test_wanted_outputs_over_three_axes():
    rng = random.Random(0)
    mesh, whole = Mesh({"a": 2, "b": 2, "c": 2}), Whole(LINEAR, 8)
    proved = 0
    for _ in range(80):
        operands = [
            " ".join(f"{rng.choice([*WHERE, *letters])}@{axis}" for axis in mesh.axes)
            for letters in whole.operands
        ]
        goal = " ".join(f"{rng.choice(['replicated', *whole.output])}@{axis}" for axis in mesh.axes)
        try:
            answer = tp.einsum_sharding(LINEAR, *operands, output=goal, mesh_axes=mesh.axes)
        except tp.ParallelError:
            continue
        assert layout(answer.output, mesh.axes) == layout(goal, mesh.axes)
        prove(whole, mesh, answer)
        proved += 1
    assert proved > 40


def carry_out_regions(cases, tensors, dy):
    """On real ranks the calls that it names do it: forward, and backward by autograd."""
    rank, degree = tp.get_tensor_parallel_rank(), tp.get_tensor_parallel_world_size()

    def mine(whole, letters, told):
        where = layout(told, ["tensor"])["tensor"]
        if where == "partial":
            return whole * (3 if rank == 0 else -2 / (degree - 1))
        return whole if where == "replicated" else whole.chunk(degree, letters.index(where))[rank]

    results = []
    for answer in cases:
        inputs, output = answer.equation.split("->")
        operands = zip(inputs.split(","), answer.operands, tensors, strict=True)
        leaves = [mine(w, own, told).clone().requires_grad_() for own, told, w in operands]
        names = dict(zip(answer.names, leaves, strict=True))

        def call(text, names=names):
            names[text.split("(")[1].rstrip(")").split(",")[0]] = eval(text, vars(tp), names)

        before = [text for text in answer.regions if "(y" not in text]
        for text in before:
            call(text)
        names["y"] = torch.einsum(answer.equation, *(names[name] for name in answer.names))
        for text in answer.regions[len(before) :]:
            call(text)
        goal = " ".join(f"{w}@{a}" for a, w in dual(layout(answer.output, ["tensor"])).items())
        gradients = torch.autograd.grad(names["y"], leaves, mine(dy, output, goal))
        results.append((names["y"].detach(), gradients))
    return results


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_the_regions_that_it_names_do_it_on_real_ranks(degree):
    whole, mesh = Whole(LINEAR, 6), Mesh({"tensor": degree})
    goals = [None, "replicated@tensor", *(f"{letter}@tensor" for letter in whole.output)]
    cases = [
        tp.einsum_sharding(LINEAR, *(f"{where}@tensor" for where in given), output=goal)
        for given in product(*((*WHERE, *letters) for letters in whole.operands))
        for goal in goals
        if degree > 1 or "partial" not in given
    ]
    tensors = [tensor.detach() for tensor in whole.tensors]
    ranks = run_ranks(carry_out_regions, degree, cases, tensors, whole.dy)
    for number, answer in enumerate(cases):
        results = [rank[number] for rank in ranks]
        y = {(n,): result[0] for n, result in enumerate(results)}
        assert torch.allclose(mesh.join(y, "bsf", layout(answer.output, mesh.axes)), whole.y)
        for n, (letters, told) in enumerate(zip(whole.operands, answer.operands, strict=True)):
            parts = {(rank,): result[1][n] for rank, result in enumerate(results)}
            gradient = mesh.join(parts, letters, dual(layout(told, mesh.axes)))
            assert torch.allclose(gradient, whole.gradients[n])
