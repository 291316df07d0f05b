"""Ulysses attention against full attention; heads that do not come out even; what is sent."""

import pytest
import torch
from ranks import on_ranks
from sequences import Case, differences, whole_of
from torch.nn.functional import scaled_dot_product_attention

import ezpz_tp as tp
from ezpz_tp.testing import counting, run_ranks


def attention(case, **options):
    return lambda q, k, v: tp.ulysses_attention(
        q, k, v, is_causal=case.is_causal, balanced=case.balanced, scale=case.scale, **options
    )


def part(case):
    return lambda whole: tp.shard_sequence(whole, 2, balanced=case.balanced)


def largest(case, layout=torch.Tensor.contiguous):
    return max(differences(attention(case), case, part(case), layout=layout))


CASES = [
    pytest.param(Case(), id="all see all"),
    pytest.param(Case(is_causal=True), id="causal"),
    pytest.param(Case(is_causal=True, balanced=False), id="causal, not balanced"),
    pytest.param(Case(heads=8, is_causal=True), id="a key head for two query heads"),
    pytest.param(Case(heads=8, kv_heads=2, is_causal=True), id="fewer key heads than ranks"),
    pytest.param(Case(kv_heads=1, balanced=False, scale=0.7), id="one key head, scale"),
    pytest.param(Case(heads=12, kv_heads=3, value_dim=6), id="key heads that do not divide"),
    pytest.param(Case(keys=80), id="more keys than queries"),
]


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_full_attentions(case, degree):
    assert max(run_ranks(largest, degree, case, context=degree)) < 1e-12


def test_heads_of_which_some_ranks_need_two():
    """Of 6 ranks with 2 of 12 heads each, 3 of which share a key head, the second needs two."""
    assert max(run_ranks(largest, 6, Case(heads=12, kv_heads=4), context=6)) < 1e-12


def test_fewer_digits():
    case = Case(heads=8, kv_heads=2, is_causal=True, dtype=torch.bfloat16)
    (alone,) = run_ranks(largest, 1, case, context=1)
    assert max(run_ranks(largest, 4, case, context=4)) < max(0.05, 2 * alone)


def from_sequence_first(tensor):
    """The same values, as a view of ``[sequence, batch, heads, head_dim]``."""
    return tensor.detach().permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)


def test_other_layouts_in_memory():
    case = Case(kv_heads=2, is_causal=True)
    assert max(run_ranks(largest, 2, case, from_sequence_first, context=2)) < 1e-12


def sent(case):
    q, k, v = (part(case)(each.detach()).requires_grad_() for each in whole_of(case).inputs)
    with counting() as forward:
        output = attention(case)(q, k, v)
    with counting() as backward:
        output.sum().backward()  # of an expanded gradient
    return dict(forward), dict(backward)


@pytest.mark.parametrize("case", [Case(), Case(kv_heads=1, keys=80, value_dim=6)])
def test_one_exchange_before_and_one_after(case):
    two = {"all_to_all": 2}
    assert run_ranks(sent, 4, case, context=4) == [(two, two)] * 4
    assert run_ranks(sent, 1, case, context=1) == [({}, {})]


def with_an_attention_of_ones_own():
    """A window of three tokens: the sequence inside is whole, and in its own order."""

    def window(q, k, v, *, is_causal, scale, dropout_p):
        assert (is_causal, scale, dropout_p) == (False, 0.5, 0.0)
        at = torch.arange(q.shape[2])
        near = (at[:, None] - at).abs() <= 1
        return scaled_dot_product_attention(q, k, v, attn_mask=near, scale=scale)

    whole = whole_of(Case())
    own = [tp.shard_sequence(each, 2) for each in whole.inputs]
    output = tp.ulysses_attention(*own, scale=0.5, attention=window)
    expected = window(*whole.inputs, is_causal=False, scale=0.5, dropout_p=0.0)
    return (output - tp.shard_sequence(expected, 2)).abs().max().item()


def test_an_attention_of_ones_own():
    assert max(run_ranks(with_an_attention_of_ones_own, 4, context=4)) < 1e-12


@on_ranks(2, context=2)
def test_dropout_is_passed_on():
    generator = torch.Generator().manual_seed(0)
    seen = []

    def dropping(q, k, v, *, is_causal, scale, dropout_p):
        seen.append(dropout_p)
        return q * (torch.rand(q.shape[:3], generator=generator) >= dropout_p).unsqueeze(-1)

    q = torch.ones(1, 4, 16, 2)
    kept = tp.ulysses_attention(q, q, q, dropout_p=0.5, attention=dropping).mean().item()
    assert seen == [0.5]
    assert 0 < kept < 1


def second_derivative():
    def written_out(q, k, v, **_):
        return (q @ k.mT).softmax(-1) @ v

    whole = whole_of(Case(kv_heads=4, length=8))
    results = []
    for inputs, function in (
        ([tp.shard_sequence(each, 2) for each in whole.inputs], tp.ulysses_attention),
        (whole.inputs, lambda *given, attention: attention(*given)),
    ):
        own = [each.detach().requires_grad_() for each in inputs]
        output = function(*own, attention=written_out)
        grads = torch.autograd.grad(output.square().sum(), own, create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in grads), own))
    return max(
        (one - tp.shard_sequence(other, 2)).abs().max().item()
        for one, other in zip(*results, strict=True)
    )


def test_second_derivatives():
    assert max(run_ranks(second_derivative, 2, context=2)) < 1e-10


def another_group():
    state = tp.get_state()
    whole = whole_of(Case())
    group = state.group("tensor")
    own = [tp.shard_sequence(each, 2, group=group) for each in whole.inputs]
    output = tp.ulysses_attention(*own, group=group)
    return (output - tp.shard_sequence(whole.output, 2, group=group)).abs().max().item()


def test_a_group_that_is_given():
    assert max(run_ranks(another_group, 4, tensor=2, context=2)) < 1e-12


def under_autocast():
    q, k, v = (tp.shard_sequence(each, 2).float() for each in whole_of(Case()).inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return tp.ulysses_attention(q, k, v.bfloat16()).dtype


def test_autocast():
    assert run_ranks(under_autocast, 2, context=2) == [torch.bfloat16] * 2


def refused(shapes, options):
    tp.ulysses_attention(*(torch.zeros(*shape) for shape in shapes), **options)


@pytest.mark.parametrize(
    ("shapes", "options", "error", "message"),
    [
        (
            [(1, 3, 4, 8)] * 3,
            {},
            tp.DegreeError,
            "3 heads of q do not divide among 2 ranks; expected a multiple. With fewer heads",
        ),
        (
            [(1, 4, 4, 8), (1, 3, 4, 8), (1, 3, 4, 8)],
            {},
            tp.DegreeError,
            "ulysses_attention: the 3 heads of k and v do not divide the 4 heads of q",
        ),
        (
            [(1, 2, 4, 8), (1, 2, 3, 8), (1, 2, 3, 8)],
            {},
            tp.DegreeError,
            "has 4 queries and 3 keys",
        ),
        (
            [(1, 2, 4, 8), (1, 2, 6, 8), (1, 2, 6, 8)],
            {"is_causal": True},
            tp.DegreeError,
            "is_causal with 4 queries and 6 keys",
        ),
        (
            [(4, 8)] * 3,
            {},
            tp.ParallelError,
            r"ulysses_attention: q \(4, 8\), .*; expected \[batch",
        ),
        (
            [(1, 2, 4, 8)] * 3,
            {"attention": lambda q, k, v, **_: q.transpose(1, 2)},
            tp.ParallelError,
            r"returned \(1, 8, 1, 8\) for queries of shape \(1, 1, 8, 8\); expected",
        ),
    ],
)
def test_what_does_not_fit(shapes, options, error, message):
    with pytest.raises(error, match=message):
        run_ranks(refused, 2, shapes, options, context=2)


@pytest.mark.parametrize("shape", [(0, 2, 4, 8), (1, 2, 0, 8)])
@on_ranks(2, context=2)
def test_nothing_to_attend_to(shape):
    q = torch.zeros(shape, requires_grad=True)
    tp.ulysses_attention(q, q, q).sum().backward()
    assert q.grad.shape == q.shape


def test_alone_it_is_the_attention():
    q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
    expected = scaled_dot_product_attention(q, k, k, is_causal=True, scale=0.5, enable_gqa=True)
    assert torch.equal(tp.ulysses_attention(q, k, k, is_causal=True, scale=0.5), expected)
