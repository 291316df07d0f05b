"""Every region against its definition: what comes out, what gradient goes in, how often."""

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

import ezpz_tp as tp
from ezpz_tp import _mappings as regions
from ezpz_tp.testing import counting, run_ranks

RANKS = 4


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def here():
    return tp.get_state().index("tensor")


# Region, options; dim that is shared; input, output and incoming gradient: whole (the same on all
# ranks), part (of the whole, along that dim) or each (of a rank's own numbers, whose sum counts);
# collectives forward and backward.
GATHER, SCATTER, REDUCE = {"all_gather": 1}, {"reduce_scatter": 1}, {"all_reduce": 1}
REGIONS = [
    ("copy_to_tensor_parallel_region", {}, -1, "whole", "whole", "each", {}, REDUCE),
    ("reduce_from_tensor_parallel_region", {}, -1, "each", "whole", "whole", REDUCE, {}),
    ("scatter_to_tensor_parallel_region", {}, -1, "whole", "part", "part", {}, GATHER),
    ("gather_from_tensor_parallel_region", {}, -1, "part", "whole", "whole", GATHER, {}),
    ("scatter_to_sequence_parallel_region", {}, 0, "whole", "part", "part", {}, GATHER),
    ("gather_from_sequence_parallel_region", {}, 0, "part", "whole", "each", GATHER, SCATTER),
    # Trap 8: the gradient of replicated code is the same everywhere, so it is split.
    (
        *("gather_from_sequence_parallel_region", {"tensor_parallel_output_grad": False}, 0),
        *("part", "whole", "whole", GATHER, {}),
    ),
    (
        *("gather_from_sequence_parallel_region", {"dim": 1}, 1),
        *("part", "whole", "each", GATHER, SCATTER),
    ),
    ("reduce_scatter_to_sequence_parallel_region", {}, 0, "each", "part", "part", SCATTER, GATHER),
    (
        *("all_gather_last_dim_from_tensor_parallel_region", {}, -1),
        *("part", "whole", "each", GATHER, SCATTER),
    ),
    (
        *("reduce_scatter_last_dim_to_tensor_parallel_region", {}, -1),
        *("each", "part", "part", SCATTER, GATHER),
    ),
]


class Shared:
    """A tensor as the ranks hold it, and what it counts as: the whole, or the sum."""

    def __init__(self, kind, dim, seed):
        self.kind, self.dim = kind, dim
        own = [numbers(8, 4, 8, seed=seed + rank) for rank in range(RANKS)]
        self.each = own if kind == "each" else own[:1] * RANKS
        self.total = sum(own) if kind == "each" else own[0]

    def held(self):
        return self.cut(self.each[here()], self.kind)

    def cut(self, whole, kind):
        return whole.chunk(RANKS, self.dim)[here()] if kind == "part" else whole


@pytest.mark.parametrize(
    ("name", "options", "dim", "input_", "output", "grad", "forward", "backward"),
    REGIONS,
    ids=[f"{row[0]} {row[1] or ''}" for row in REGIONS],
)
@on_ranks(RANKS)
def test_region(name, options, dim, input_, output, grad, forward, backward):
    region, given = getattr(regions, name), Shared(input_, dim, 0)
    incoming = Shared(grad, dim, 10)
    held = given.held().clone().requires_grad_()
    with counting() as before:
        found = region(held, **options)
    with counting() as after:
        found.backward(incoming.held())
    close = {"rtol": 0, "atol": 1e-12}
    torch.testing.assert_close(found.detach(), given.cut(given.total, output), **close)
    torch.testing.assert_close(held.grad, incoming.cut(incoming.total, input_), **close)
    assert (before, after) == (forward, backward)


@on_ranks(2)
def test_a_gradient_that_autograd_shares_is_not_changed():
    """Trap 1: autograd hands one gradient to both terms of a sum."""
    a = torch.ones(3, dtype=torch.float64, requires_grad=True)
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    z, c = a * 1, regions.copy_to_tensor_parallel_region(x)
    grad = torch.full((3,), 5.0, dtype=torch.float64)
    (c + z).backward(grad)
    assert a.grad.tolist() == [5.0] * 3
    assert x.grad.tolist() == [10.0] * 3
    assert grad.tolist() == [5.0] * 3


SUMMED = {"copy_to_tensor_parallel_region", "gather_from_sequence_parallel_region"}
SUMMED |= {"all_gather_last_dim_from_tensor_parallel_region"}


@pytest.mark.parametrize("name", dict.fromkeys(row[0] for row in REGIONS))
@on_ranks(2)
def test_an_expanded_gradient_is_owned_first(name):
    """Trap 1: the gradient of a sum has one element of memory, whatever its shape."""
    x = torch.ones(4, 6, dtype=torch.float64, requires_grad=True)
    getattr(regions, name)(x).sum().backward()
    assert x.grad.eq(2.0 if name in SUMMED else 1.0).all()


@on_ranks(2)
def test_reduce_from_does_not_change_a_live_activation():
    """Trap 2: ``hidden`` is saved by its square, and would be the ranks' sum."""
    x = torch.ones(4, requires_grad=True)
    hidden = x * 2
    before = hidden.detach().clone()
    summed = tp.reduce_from_tensor_parallel_region(hidden)
    (summed.sum() + (hidden * hidden).sum()).backward()
    assert torch.equal(hidden, before)
    assert x.grad.tolist() == [2.0 + 8.0] * 4


@on_ranks(2)
def test_writing_to_an_output_leaves_the_input_alone():
    x = torch.ones(4, 4)
    for region in (
        tp.scatter_to_tensor_parallel_region,
        tp.scatter_to_sequence_parallel_region,
        tp.reduce_from_tensor_parallel_region,
    ):
        region(x).add_(1)
    assert x.eq(1).all()


@on_ranks(2)
def test_second_derivatives_go_through_the_regions():
    x = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)
    weight = torch.tensor(float(here() + 1), dtype=torch.float64)
    inside = regions.copy_to_tensor_parallel_region(x)
    loss = regions.reduce_from_tensor_parallel_region((inside**3 * weight).sum())
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert first.tolist() == [36.0, 81.0]
    assert second.tolist() == [36.0, 54.0]


@pytest.mark.parametrize(
    "region",
    [
        tp.scatter_to_tensor_parallel_region,
        tp.scatter_to_sequence_parallel_region,
        tp.reduce_scatter_to_sequence_parallel_region,
        tp.reduce_scatter_last_dim_to_tensor_parallel_region,
    ],
)
def test_what_does_not_divide_is_named(region):
    told = rf"{region.__name__}: .*\(7, 7\) is 7, which 2 ranks"
    with pytest.raises(tp.DegreeError, match=told):
        run_ranks(lambda: region(torch.zeros(7, 7)), 2)


NAMES = [name for name in dir(regions) if name.endswith("_region")]


def test_before_initialization_every_region_is_the_identity():
    x = torch.ones(3, 3)
    assert all(getattr(regions, name)(x) is x for name in NAMES)


@on_ranks(2, tensor=1)
def test_at_degree_one_every_region_is_the_identity():
    """Trap 13."""
    x = torch.ones(3, 3)
    with counting() as counter:
        assert all(getattr(regions, name)(x) is x for name in NAMES)
    assert not counter


@on_ranks(4, in_processes=True, initialize=False)
def test_a_compiled_region_is_traced_again_for_another_group():
    """Of a group torch.compile guards the type alone: size and rank of the first would stay."""
    rank = dist.get_rank()

    def body(x, group):
        scattered = tp.scatter_to_tensor_parallel_region(x, tp_group=group)
        return tp.reduce_from_tensor_parallel_region(scattered, tp_group=group)

    compiled = torch.compile(body, fullgraph=True, backend="aot_eager")
    x = torch.arange(64.0).view(8, 8) * (rank + 1)
    for group in (
        [dist.new_group([each]) for each in range(4)][rank],
        [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2],
        [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2],
        dist.group.WORLD,
    ):
        assert torch.equal(compiled(x, group), body(x, group))


@pytest.mark.parametrize("name", [name for name in NAMES if "er_" in name])
def test_a_scalar_has_no_dim_to_share(name):
    with pytest.raises(tp.DegreeError, match=f"{name}: the input is 0-dim"):
        run_ranks(lambda: getattr(regions, name)(torch.tensor(1.0)), 2)
