"""Every region, split and exchange against its definition: outputs, gradients, collectives."""

from functools import partial

import pytest
import torch
from on_ranks import all_raise, numbers, on_ranks

import ezpz_tp as tp
from ezpz_tp import _mappings as regions
from ezpz_tp.testing import counting, run_ranks

RANKS = 4
here = tp.get_tensor_parallel_rank

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

    def __init__(self, kind, dim, seed, expanded=False):
        self.kind, self.dim = kind, dim
        own = [numbers(8, 4, 8, seed=seed + rank) for rank in range(RANKS)]
        if expanded:  # as the gradient of a sum: one element of memory, whatever its shape
            own = [each[:1, :1, :1].expand_as(each) for each in own]
        self.each = own if kind == "each" else own[:1] * RANKS
        self.total = sum(own) if kind == "each" else own[0]

    def held(self):
        return self.cut(self.each[here()], self.kind)

    def cut(self, whole, kind):
        return whole.chunk(RANKS, self.dim)[here()] if kind == "part" else whole


@pytest.mark.parametrize("expanded", [False, True])  # trap 1: such a gradient is owned first
@pytest.mark.parametrize(
    ("name", "options", "dim", "input_", "output", "grad", "forward", "backward"),
    REGIONS,
    ids=[f"{row[0]} {row[1] or ''}" for row in REGIONS],
)
@on_ranks(RANKS)
def test_region(name, options, dim, input_, output, grad, forward, backward, expanded):
    region, given = getattr(regions, name), Shared(input_, dim, 0)
    incoming = Shared(grad, dim, 10, expanded)
    gradient = incoming.held()
    kept = gradient.clone()
    held = given.held().clone().requires_grad_()
    with counting() as before:
        found = region(held, **options)
    with counting() as after:
        found.backward(gradient)
    assert torch.equal(gradient, kept)
    close = {"rtol": 0, "atol": 1e-12}
    torch.testing.assert_close(found.detach(), given.cut(given.total, output), **close)
    torch.testing.assert_close(held.grad, incoming.cut(incoming.total, input_), **close)
    assert (before, after) == (forward, backward)


@on_ranks(2)
def test_what_autograd_shares_or_saves_is_not_changed():
    # Trap 1: autograd hands one gradient to both terms of a sum.
    a = torch.ones(3, dtype=torch.float64, requires_grad=True)
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    z, c = a * 1, regions.copy_to_tensor_parallel_region(x)
    grad = torch.full((3,), 5.0, dtype=torch.float64)
    (c + z).backward(grad)
    assert a.grad.tolist() == [5.0] * 3
    assert x.grad.tolist() == [10.0] * 3
    assert grad.tolist() == [5.0] * 3
    # Trap 2: ``hidden`` is saved by its square, and would be the ranks' sum.
    x = torch.ones(4, requires_grad=True)
    hidden = x * 2
    before = hidden.detach().clone()
    summed = tp.reduce_from_tensor_parallel_region(hidden)
    (summed.sum() + (hidden * hidden).sum()).backward()
    assert torch.equal(hidden, before)
    assert x.grad.tolist() == [2.0 + 8.0] * 4
    # Nor does writing to an output change the input.
    x = torch.ones(4, 4)
    for region in (
        tp.scatter_to_tensor_parallel_region,
        tp.scatter_to_sequence_parallel_region,
        tp.reduce_from_tensor_parallel_region,
    ):
        region(x).add_(1)
    assert x.eq(1).all()
    # Second derivatives go through the regions.
    x = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)
    weight = torch.tensor(float(here() + 1), dtype=torch.float64)
    inside = regions.copy_to_tensor_parallel_region(x)
    loss = regions.reduce_from_tensor_parallel_region((inside**3 * weight).sum())
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert first.tolist() == [36.0, 81.0]
    assert second.tolist() == [36.0, 54.0]


NAMES = [name for name in dir(regions) if name.endswith("_region")]


def identities():
    x = torch.ones(3, 3)
    with counting() as counter:
        assert all(getattr(regions, name)(x) is x for name in NAMES)
        assert tp.sequence_to_head(x, 0, 1) is tp.head_to_sequence(x, 0, 1) is x
    assert not counter


def test_trap_13_alone_and_at_degree_one_every_region_is_the_identity():
    identities()  # before anything is initialized
    run_ranks(identities, 2, tensor=1)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        *(
            (getattr(regions, name), [torch.zeros(7, 7)], r".*\(7, 7\) is 7, which 2 ranks")
            for name in NAMES
            if "scatter_" in name
        ),
        *(
            (getattr(regions, name), [torch.tensor(1.0)], "the input is 0-dim")
            for name in NAMES
            if "er_" in name
        ),
        (tp.sequence_to_head, [torch.zeros(2, 3), 0, 1], r"dim 1 of \(2, 3\) is 3, which 2"),
        (
            tp.split_tensor_into_1d_equal_chunks,
            [torch.zeros(1, 5)],
            ".* 5 elements, which 2 tensor",
        ),
    ],
)
def test_what_cannot_be_shared_is_named(function, arguments, message):
    told = f"{function.__name__}: {message}"
    all_raise(2, partial(function, *arguments), tp.DegreeError, told)


def test_the_last_dim_is_split_into_views_or_copies():
    whole = torch.arange(24.0).view(2, 12)
    parts = tp.split_tensor_along_last_dim(whole, 3)
    assert [part.shape for part in parts] == [(2, 4)] * 3
    assert torch.equal(torch.cat(parts, -1), whole)
    assert all(part.untyped_storage().data_ptr() == whole.data_ptr() for part in parts)
    for part in tp.split_tensor_along_last_dim(whole, 3, contiguous_split_chunks=True):
        assert part.is_contiguous()
        part.zero_()
    assert whole.count_nonzero() == 23


@pytest.mark.parametrize("shape", [(2, 10), ()])
def test_a_last_dim_that_does_not_split_is_told(shape):
    with pytest.raises(tp.DegreeError, match=r"\(.*\) does not split into 3 equal parts"):
        tp.split_tensor_along_last_dim(torch.zeros(shape), 3)


def test_division_without_remainder_and_vocabularies():
    tp.ensure_divisibility(12, 4)
    assert tp.divide_and_check_no_remainder(12, 4) == 3
    with pytest.raises(tp.DegreeError, match="13 is not divisible by 4"):
        tp.divide_and_check_no_remainder(13, 4)

    assert tp.VocabUtility.vocab_range_from_global_vocab_size(10, 2, 3) == (8, 10)
    assert tp.VocabUtility.vocab_range_from_per_partition_vocab_size(4, 2, 3) == (8, 12)


def chunks(new_buffer, transposed):
    degree = tp.get_tensor_parallel_world_size()
    whole = torch.arange(24.0).view(4, 6)
    whole = whole.t() if transposed else whole
    part = tp.split_tensor_into_1d_equal_chunks(whole, new_buffer)
    shares = part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert shares is not (new_buffer or transposed)
    assert torch.equal(part, whole.reshape(-1).chunk(degree)[here()])
    with counting() as counter:
        assert torch.equal(tp.gather_split_1d_tensor(part), whole.reshape(-1))
    assert counter == ({"all_gather": 1} if degree > 1 else {})


@pytest.mark.parametrize("new_buffer", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_chunks_of_all_ranks_join_to_the_whole(new_buffer, transposed):
    chunks(new_buffer, transposed)
    run_ranks(chunks, 3, new_buffer, transposed)


def numbered(*shape):
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


@pytest.mark.parametrize(("sequence_dim", "head_dim"), [(0, 2), (1, 3), (-4, -2)])
@on_ranks(RANKS)
def test_sequence_to_head_and_back(sequence_dim, head_dim):
    full = numbered(2, 8, 3, 4) if (sequence_dim, head_dim) == (1, 3) else numbered(8, 2, 4, 3)
    own = full.chunk(RANKS, sequence_dim)[here()].clone().requires_grad_()
    with counting() as counter:
        inside = tp.sequence_to_head(own, sequence_dim, head_dim)
        back = tp.head_to_sequence(inside * 1, sequence_dim, head_dim)
        back.backward(own.detach() * 3)
    assert torch.equal(inside, full.chunk(RANKS, head_dim)[here()])
    assert torch.equal(back, own)
    assert torch.equal(own.grad, own.detach() * 3)
    assert counter == {"all_to_all": 4}


@on_ranks(2)
def test_uneven_rows_and_their_gradients():
    # Rank 0 sends one row to itself and two to rank 1; rank 1 sends three and none.
    sent, received, wanted = [
        ([1, 2], [1, 3], [0.0, 10.0, 11.0, 12.0]),
        ([3, 0], [2, 0], [1.0, 2.0]),
    ][here()]
    rows = (torch.arange(3.0) + 10 * here()).unsqueeze(1).requires_grad_()
    got = tp.all_to_all(rows, received, sent, group=tp.get_tensor_parallel_group())
    got.backward(got.detach())
    assert got.flatten().tolist() == wanted
    assert torch.equal(rows.grad, rows.detach())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, None, 3), "2 ranks do not divide 3 rows"),
        (([1, 1], [1, 1], 3), r"input_split_sizes \[1, 1\] add up to 2; expected the 3 rows"),
        (([2], [1, 1], 2), "output_split_sizes has 1 entries; expected one for each of 2 ranks"),
    ],
)
def test_split_sizes_that_do_not_fit(arguments, message):
    *sizes, rows = arguments

    def bad():
        tp.all_to_all(torch.zeros(rows, 1), *sizes, group=tp.get_tensor_parallel_group())

    all_raise(2, bad, tp.DegreeError, message)
