"""Every region against its definition: what comes out, what gradient goes in, how often."""

import pytest
import torch
from ranks import on_ranks

import ezpz_tp as tp
from ezpz_tp import _mappings as regions
from ezpz_tp.testing import counting, run_ranks

RANKS = 4


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def here():
    return tp.get_state().index("tensor")


def parts(full, dim):
    return full.chunk(RANKS, dim)


def through(region, input_, grad):
    """Apply a region; return its output, the input's gradient, and the collectives of each."""
    input_ = input_.clone().requires_grad_()
    with counting() as forward:
        output = region(input_)
    with counting() as backward:
        output.backward(grad)
    return output.detach(), input_.grad, dict(forward), dict(backward)


def copy_to():
    full, grads = numbers(3, 8), [numbers(3, 8, seed=1 + rank) for rank in range(RANKS)]
    seen = through(regions.copy_to_tensor_parallel_region, full, grads[here()])
    return seen, (full, sum(grads), {}, {"all_reduce": 1})


def reduce_from():
    each, grad = [numbers(3, 8, seed=rank) for rank in range(RANKS)], numbers(3, 8, seed=9)
    seen = through(regions.reduce_from_tensor_parallel_region, each[here()], grad)
    return seen, (sum(each), grad, {"all_reduce": 1}, {})


def scatter_to():
    full, grad = numbers(3, 8), numbers(3, 8, seed=1)
    seen = through(regions.scatter_to_tensor_parallel_region, full, parts(grad, -1)[here()])
    return seen, (parts(full, -1)[here()], grad, {}, {"all_gather": 1})


def gather_from():
    full, grad = numbers(3, 8), numbers(3, 8, seed=1)
    seen = through(regions.gather_from_tensor_parallel_region, parts(full, -1)[here()], grad)
    return seen, (full, parts(grad, -1)[here()], {"all_gather": 1}, {})


def scatter_to_sequence():
    full, grad = numbers(8, 3), numbers(8, 3, seed=1)
    seen = through(regions.scatter_to_sequence_parallel_region, full, parts(grad, 0)[here()])
    return seen, (parts(full, 0)[here()], grad, {}, {"all_gather": 1})


def gather_from_sequence():
    full, grads = numbers(8, 3), [numbers(8, 3, seed=1 + rank) for rank in range(RANKS)]
    seen = through(
        regions.gather_from_sequence_parallel_region, parts(full, 0)[here()], grads[here()]
    )
    return seen, (full, parts(sum(grads), 0)[here()], {"all_gather": 1}, {"reduce_scatter": 1})


def gather_from_sequence_replicated():
    """Trap 8: the gradient of replicated code is the same everywhere, so it is split."""
    full, grad = numbers(8, 3), numbers(8, 3, seed=1)
    seen = through(
        lambda input_: regions.gather_from_sequence_parallel_region(input_, False),
        parts(full, 0)[here()],
        grad,
    )
    return seen, (full, parts(grad, 0)[here()], {"all_gather": 1}, {})


def gather_from_sequence_middle():
    full, grads = numbers(2, 8, 3), [numbers(2, 8, 3, seed=1 + rank) for rank in range(RANKS)]
    seen = through(
        lambda input_: regions.gather_from_sequence_parallel_region(input_, dim=1),
        parts(full, 1)[here()],
        grads[here()],
    )
    return seen, (full, parts(sum(grads), 1)[here()], {"all_gather": 1}, {"reduce_scatter": 1})


def reduce_scatter_to_sequence():
    each, grad = [numbers(8, 3, seed=rank) for rank in range(RANKS)], numbers(8, 3, seed=9)
    seen = through(
        regions.reduce_scatter_to_sequence_parallel_region, each[here()], parts(grad, 0)[here()]
    )
    return seen, (parts(sum(each), 0)[here()], grad, {"reduce_scatter": 1}, {"all_gather": 1})


def all_gather_last_dim():
    full, grads = numbers(3, 8), [numbers(3, 8, seed=1 + rank) for rank in range(RANKS)]
    seen = through(
        regions.all_gather_last_dim_from_tensor_parallel_region,
        parts(full, -1)[here()],
        grads[here()],
    )
    return seen, (full, parts(sum(grads), -1)[here()], {"all_gather": 1}, {"reduce_scatter": 1})


def reduce_scatter_last_dim():
    each, grad = [numbers(2, 3, 8, seed=rank) for rank in range(RANKS)], numbers(2, 3, 8, seed=9)
    seen = through(
        regions.reduce_scatter_last_dim_to_tensor_parallel_region,
        each[here()],
        parts(grad, -1)[here()],
    )
    return seen, (parts(sum(each), -1)[here()], grad, {"reduce_scatter": 1}, {"all_gather": 1})


REGIONS = [
    copy_to,
    reduce_from,
    scatter_to,
    gather_from,
    scatter_to_sequence,
    gather_from_sequence,
    gather_from_sequence_replicated,
    gather_from_sequence_middle,
    reduce_scatter_to_sequence,
    all_gather_last_dim,
    reduce_scatter_last_dim,
]


@pytest.mark.parametrize("region", REGIONS, ids=lambda region: region.__name__)
def test_region(region):
    for (output, grad, forward, backward), wanted in run_ranks(region, RANKS):
        torch.testing.assert_close(output, wanted[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(grad, wanted[1], rtol=0, atol=1e-12)
        assert (forward, backward) == wanted[2:]


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


def expanded_gradient(region, length):
    x = torch.ones(length, 6, dtype=torch.float64, requires_grad=True)
    region(x).sum().backward()
    return x.grad


@pytest.mark.parametrize(
    ("region", "value"),
    [
        (regions.copy_to_tensor_parallel_region, 2.0),
        (regions.reduce_from_tensor_parallel_region, 1.0),
        (regions.scatter_to_tensor_parallel_region, 1.0),
        (regions.gather_from_tensor_parallel_region, 1.0),
        (regions.scatter_to_sequence_parallel_region, 1.0),
        (regions.gather_from_sequence_parallel_region, 2.0),
        (regions.reduce_scatter_to_sequence_parallel_region, 1.0),
        (regions.all_gather_last_dim_from_tensor_parallel_region, 2.0),
        (regions.reduce_scatter_last_dim_to_tensor_parallel_region, 1.0),
    ],
)
def test_an_expanded_gradient_is_owned_first(region, value):
    """Trap 1: the gradient of a sum has one element of memory, whatever its shape."""
    for grad in run_ranks(expanded_gradient, 2, region, 4):
        assert grad.eq(value).all()


@on_ranks(2)
def test_reduce_from_does_not_change_a_live_activation():
    """Trap 2: ``hidden`` is saved by its square, and would be the ranks' sum."""
    x = torch.ones(4, requires_grad=True)
    hidden = x * 2
    before = hidden.detach().clone()
    summed = regions.reduce_from_tensor_parallel_region(hidden)
    (summed.sum() + (hidden * hidden).sum()).backward()
    same, grad = torch.equal(hidden, before), x.grad
    assert same
    assert grad.tolist() == [2.0 + 8.0] * 4


@on_ranks(2)
def test_writing_to_an_output_leaves_the_input_alone():
    x = torch.ones(4, 4)
    outputs = [
        regions.scatter_to_tensor_parallel_region(x),
        regions.scatter_to_sequence_parallel_region(x),
        regions.reduce_from_tensor_parallel_region(x),
    ]
    for output in outputs:
        output.add_(1)
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


def uneven(region):
    region(torch.zeros(7, 7))


@pytest.mark.parametrize(
    "region",
    [
        regions.scatter_to_tensor_parallel_region,
        regions.scatter_to_sequence_parallel_region,
        regions.reduce_scatter_to_sequence_parallel_region,
        regions.reduce_scatter_last_dim_to_tensor_parallel_region,
    ],
)
def test_what_does_not_divide_is_named(region):
    with pytest.raises(tp.DegreeError, match=rf"{region.__name__}: .*\(7, 7\) is 7, which 2 ranks"):
        run_ranks(uneven, 2, region)


def test_before_initialization_every_region_is_the_identity():
    x = torch.ones(3, 3)
    for name in dir(regions):
        if name.endswith("_region"):
            assert getattr(regions, name)(x) is x


@on_ranks(2, tensor=1)
def test_at_degree_one_every_region_is_the_identity():
    """Trap 13."""
    x = torch.ones(3, 3)
    with counting() as counter:
        same = [getattr(regions, name)(x) is x for name in dir(regions) if name.endswith("_region")]
    assert all(same)
    assert dict(counter) == {}


def compiled_for_one_group_and_called_with_another(name):
    import torch.distributed as dist

    rank = dist.get_rank()
    groups = [
        [dist.new_group([each]) for each in range(4)][rank],
        [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2],
        [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2],
        dist.group.WORLD,
    ]
    region = getattr(regions, name)

    def body(x, group):
        return region(x, tp_group=group)

    compiled = torch.compile(body, fullgraph=True, backend="aot_eager")
    x = torch.arange(64.0).view(8, 8) * (rank + 1)
    return [torch.equal(compiled(x, each), body(x, each)) for each in groups]


@pytest.mark.parametrize(
    "name", ["reduce_from_tensor_parallel_region", "scatter_to_tensor_parallel_region"]
)
def test_a_compiled_region_is_traced_anew_for_another_group(name):
    """Of a group torch.compile guards the type alone: size and rank of the first would stay."""
    seen = run_ranks(
        compiled_for_one_group_and_called_with_another, 4, name, in_processes=True, initialize=False
    )
    assert seen == [[True] * 4] * 4


def of_no_dims(name):
    getattr(regions, name)(torch.tensor(1.0))


SHARING = [name for name in dir(regions) if name.endswith("_region") and "er_" in name]


@pytest.mark.parametrize("name", SHARING)
def test_a_scalar_has_no_dim_to_share(name):
    with pytest.raises(tp.DegreeError, match=f"{name}: the input is 0-dim"):
        run_ranks(of_no_dims, 2, name)
