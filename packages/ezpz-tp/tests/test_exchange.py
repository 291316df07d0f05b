"""All-to-all regions: where every element goes, and its gradient comes back."""

import pytest
import torch
from ranks import on_ranks

import ezpz_tp as tp
from ezpz_tp.testing import counting, run_ranks

RANKS = 4


def here():
    return tp.get_state().index("tensor")


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


@on_ranks(RANKS)
def test_megatrons_sp2hp_and_hp2sp():
    full = numbered(8, 4)  # tokens, hidden
    tokens = full.chunk(RANKS, 0)[here()].clone().requires_grad_()
    hidden = tp.all_to_all_sp2hp(tokens.unsqueeze(1))
    back = tp.all_to_all_hp2sp(hidden)
    back.sum().backward()
    assert torch.equal(hidden, full.chunk(RANKS, 1)[here()])
    assert torch.equal(back, tokens)
    assert tokens.grad.eq(1).all()


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

    with pytest.raises(tp.DegreeError, match=message):
        run_ranks(bad, 2)


def test_heads_that_do_not_divide():
    told = r"sequence_to_head: dim 1 of \(2, 3\) is 3, which 2"
    with pytest.raises(tp.DegreeError, match=told):
        run_ranks(lambda: tp.sequence_to_head(torch.zeros(2, 3), 0, 1), 2)


def test_before_initialization_the_input_comes_back():
    x = torch.ones(4, 4)
    assert tp.sequence_to_head(x, 0, 1) is x
    assert tp.head_to_sequence(x, 0, 1) is x
