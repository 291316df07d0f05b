"""Ring, Ulysses and unified attention against full attention; what they compute, send and hold."""

from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from on_ranks import MemoryWatch, all_raise, on_ranks
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

import ezpz_tp as tp
from ezpz_tp import _ring
from ezpz_tp.testing import counting, run_ranks


@dataclass(frozen=True)
class Case:
    heads: int = 4
    kv_heads: int = 4
    length: int = 48
    keys: int | None = None
    head_dim: int = 16
    value_dim: int = 16
    is_causal: bool = False
    balanced: bool = True
    scale: float | None = None
    dtype: torch.dtype = torch.float64


def whole_of(case, *, batch=2):
    """Full attention in float64, of values that ``case.dtype`` can have. The same on every rank."""
    generator = torch.Generator().manual_seed(1)

    def draw(heads, length, size):
        drawn = torch.randn(batch, heads, length, size, generator=generator, dtype=torch.float64)
        return drawn.to(case.dtype).double()

    keys = case.length if case.keys is None else case.keys
    inputs = [
        draw(case.heads, case.length, case.head_dim).requires_grad_(),
        draw(case.kv_heads, keys, case.head_dim).requires_grad_(),
        draw(case.kv_heads, keys, case.value_dim).requires_grad_(),
    ]
    options = {"is_causal": case.is_causal, "scale": case.scale, "enable_gqa": True}
    output = scaled_dot_product_attention(*inputs, **options)
    output_grad = draw(case.heads, case.length, case.value_dim)
    grads = torch.autograd.grad(output, inputs, output_grad)
    wanted = {"output": output.detach(), "output_grad": output_grad, "grads": grads}
    return SimpleNamespace(inputs=inputs, **wanted)


def crossing(kind):
    """The groups that an attention, or its sharding, is given: heads over the tensor axis."""
    state = tp.get_state()
    heads, ring = state.group("tensor"), state.group("context")
    if kind == "unified":
        return {"ulysses_group": heads, "ring_group": ring}, {"ulysses_group": heads, "group": ring}
    return {}, {}


def attention(kind, case, groups=None):
    function = getattr(tp, f"{kind}_attention")
    options = {"is_causal": case.is_causal, "balanced": case.balanced, "scale": case.scale}
    return partial(function, **(crossing(kind)[0] if groups is None else groups), **options)


def part(case, whole, **groups):
    return tp.shard_sequence(whole.detach(), 2, balanced=case.balanced, **groups)


def own_inputs(case, **groups):
    return [part(case, each, **groups).requires_grad_() for each in whole_of(case).inputs]


def largest(attend, case, groups, layout=torch.Tensor.contiguous):
    """How far a rank's output and gradients are from full attention's; `layout` keeps values."""
    whole = whole_of(case)
    cut = partial(part, case, **groups)
    own = [layout(cut(each).to(case.dtype)).requires_grad_() for each in whole.inputs]
    output = attend(*own)
    assert output.dtype == case.dtype
    output.backward(layout(cut(whole.output_grad).to(case.dtype)))
    found = [output, *(each.grad for each in own)]
    expected = [cut(each) for each in (whole.output, *whole.grads)]
    return max((a.double() - b).abs().max().item() for a, b in zip(found, expected, strict=True))


def difference(kind, case, *layout):
    return largest(attention(kind, case), case, crossing(kind)[1], *layout)


def worst_of(kind, case, heads=1, ring=1, *layout):
    """The worst rank's; only the unified one has both degrees."""
    ranks = heads * ring
    tensor, context = (heads, ring) if kind == "unified" else (1, ranks)
    return max(run_ranks(difference, ranks, kind, case, *layout, tensor=tensor, context=context))


CAUSAL, GROUPED = Case(is_causal=True), Case(kv_heads=2, is_causal=True)
BOTH = {
    "all see all": Case(),
    "causal": CAUSAL,
    "causal, not balanced": Case(is_causal=True, balanced=False),
    "one key head, scale": Case(kv_heads=1, balanced=False, scale=0.7),
}
RING = BOTH | {
    "grouped": GROUPED,
    "other value_dim": Case(kv_heads=2, value_dim=6, is_causal=True),
    "odd head_dim": Case(head_dim=7, value_dim=7, is_causal=True),
    "more keys than queries": Case(keys=96),
}
ULYSSES = BOTH | {
    "a key head for two query heads": Case(heads=8, is_causal=True),
    "fewer key heads than ranks": Case(heads=8, kv_heads=2, is_causal=True),
    "key heads that do not divide": Case(heads=12, kv_heads=3, value_dim=6),
    "more keys than queries": Case(keys=80),
    # Of 6 ranks with 2 of 12 heads each, 3 of which share a key head, the second needs two.
    "ranks that need two key heads": Case(heads=12, kv_heads=4),
}
UNIFIED = {
    "all see all": Case(heads=6, kv_heads=3),
    "causal": Case(heads=6, kv_heads=6, is_causal=True),
    "causal, not balanced": Case(heads=6, kv_heads=6, is_causal=True, balanced=False),
    "grouped": Case(heads=6, kv_heads=2, is_causal=True, scale=0.7),
    "other value_dim": Case(heads=12, kv_heads=4, value_dim=6, is_causal=True),
}
COMPARED = [
    *(("ring", name, 1, degree) for name in RING for degree in (2, 3)),
    *(("ulysses", name, degree, 1) for name in ULYSSES for degree in (2, 4)),
    ("ulysses", "ranks that need two key heads", 6, 1),
    *(("unified", name, *degrees) for name in UNIFIED for degrees in ((2, 2), (3, 2))),
    *(("unified", "causal", *degrees) for degrees in ((1, 2), (2, 1), (1, 1))),
    *(("ring", "causal", 1, 4), ("ring", "causal", 1, 1), ("ulysses", "causal", 1, 1)),
]


@pytest.mark.parametrize(("kind", "name", "heads", "ring"), COMPARED)
def test_outputs_and_gradients_are_full_attentions(kind, name, heads, ring):
    case = {"ring": RING, "ulysses": ULYSSES, "unified": UNIFIED}[kind][name]
    assert worst_of(kind, case, heads, ring) < 1e-12


@pytest.mark.parametrize(
    ("kind", "dtype", "limit"),
    [
        ("ring", torch.float32, 2e-6),
        ("ring", torch.bfloat16, 0.04),
        ("ring", torch.float16, 0.005),
        ("ulysses", torch.bfloat16, 0.05),
        ("unified", torch.bfloat16, 0.05),
    ],
)
def test_fewer_digits(kind, dtype, limit):
    case = Case(heads=8, kv_heads=2, is_causal=True, dtype=dtype)
    assert worst_of(kind, case, 2, 2) < max(limit, 2 * worst_of(kind, case))


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 0.05), (torch.float16, 0.01)],
)
def test_blocks_without_a_kernel_of_torchs_are_computed_in_pieces(dtype, limit):
    assert (
        _ring._kernel(_ring.Block(*[torch.ones(1, 1, 1, 1, device="meta")] * 3, True, 1)) == "plain"
    )

    def difference_in_pieces(case):
        with (
            mock.patch.object(_ring, "_kernel", return_value="plain"),
            mock.patch.object(_ring, "SCORES_AT_A_TIME", 1000),  # the last piece is a short one
        ):
            return difference("ring", case)

    for name in ("all see all", "causal", "other value_dim", "one key head, scale"):
        case = replace(RING[name], dtype=dtype)
        assert max(run_ranks(difference_in_pieces, 3, case, context=3)) < limit


@on_ranks(2, context=2)
def test_scores_far_apart():
    """Blocks whose weights differ by more than float64 can say."""
    whole = whole_of(CAUSAL)
    q, k, v = (part(CAUSAL, each) for each in whole.inputs)
    far = torch.where(tp.sequence_positions(48) < 24, 400.0, -400.0)[:, None]
    output = tp.ring_attention(q.abs(), k + far.double(), v, is_causal=True)
    full = [each.detach() for each in whole.inputs]
    low = torch.where(torch.arange(48) < 24, 400.0, -400.0)[:, None]
    expected = scaled_dot_product_attention(full[0].abs(), full[1] + low, full[2], is_causal=True)
    assert (output - part(CAUSAL, expected)).abs().max() < 1e-10


def from_sequence_first(tensor):
    return tensor.detach().permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *(("ring", from_sequence_first), ("ulysses", from_sequence_first)),
        ("ring", lambda tensor: tensor.detach().mT.contiguous().mT),  # the last dim is apart
    ],
)
def test_other_layouts_in_memory(kind, layout):
    assert worst_of(kind, GROUPED, 2, 1, layout) < 1e-12


@on_ranks(2, context=2)
def test_an_expanded_gradient_and_nothing_is_changed_in_place():
    whole = whole_of(Case())
    q, k, v = own_inputs(Case())
    before = [each.detach().clone() for each in (q, k, v)]
    output = tp.ring_attention(q, k, v)
    kept = output.detach().clone()
    output.sum().backward()  # a gradient of ones that has one element in memory
    assert torch.equal(output, kept)
    assert all(map(torch.equal, (q, k, v), before))
    full = scaled_dot_product_attention(*whole.inputs)
    expected = torch.autograd.grad(full.sum(), whole.inputs)
    for found, wanted in zip((q, k, v), expected, strict=True):
        assert (found.grad - part(Case(), wanted)).abs().max() < 1e-12


@pytest.mark.parametrize("needed", [[0], [1], [2], [0, 2]])
@on_ranks(2, context=2)
def test_gradients_of_some_inputs(needed):
    whole = whole_of(CAUSAL)
    own = [part(CAUSAL, each).requires_grad_(at in needed) for at, each in enumerate(whole.inputs)]
    tp.ring_attention(*own, is_causal=True).backward(part(CAUSAL, whole.output_grad))
    for at, each in enumerate(own):
        if at not in needed:
            assert each.grad is None
        else:
            assert (each.grad - part(CAUSAL, whole.grads[at])).abs().max() < 1e-12


@on_ranks(2, context=2)
def test_no_grad_and_second_derivatives():
    whole = whole_of(CAUSAL)
    own = own_inputs(CAUSAL)
    with torch.no_grad():
        output = tp.ring_attention(*own, is_causal=True)
    assert not output.requires_grad
    assert (output - part(CAUSAL, whole.output)).abs().max() < 1e-12
    output = tp.ring_attention(*own, is_causal=True)
    with pytest.raises(tp.ParallelError, match="ring_attention: a second derivative is asked for"):
        torch.autograd.grad(output.sum(), own[0], create_graph=True)


@on_ranks(2, context=2)
def test_autocast():
    q, k, v = (part(Case(), each) for each in whole_of(Case(dtype=torch.float32)).inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        # As after rotary embeddings: q and k in float32, v as a linear layer left it.
        mixed = q.float(), k.float(), v.bfloat16()
        assert tp.ring_attention(*mixed).dtype == torch.bfloat16
        assert tp.ring_attention(q, k, v).dtype == torch.float64
        assert tp.ulysses_attention(*mixed).dtype == torch.bfloat16
        # Products of blocks without a kernel are not rounded once more.
        narrow = [each.bfloat16().requires_grad_() for each in (q, k, v[..., :6])]
        inside = torch.autograd.grad(tp.ring_attention(*narrow).sum(), narrow)
    outside = torch.autograd.grad(tp.ring_attention(*narrow).sum(), narrow)
    assert all(map(torch.equal, inside, outside))


class Computed(TorchDispatchMode):
    """Counts pairs of a query and a key that kernels were asked for, forward and backward."""

    def __init__(self):
        super().__init__()
        self.calls, self.pairs = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if "flash_attention_for_cpu" in name:
            backward = name.endswith("backward")
            q, k, *rest = args[1:] if backward else args
            causal = rest[4 if backward else 2 :] == [True]  # left out when false
            self.calls += 1
            self.pairs += q.shape[2] * k.shape[2] // (2 if causal else 1)
        return func(*args, **(kwargs or {}))


def computed(case):
    q, k, v = own_inputs(case)
    with Computed() as forward:
        output = attention("ring", case)(q, k, v)
    with Computed() as backward:
        output.sum().backward()
    assert (forward.calls, forward.pairs) == (backward.calls, backward.pairs)
    return forward.calls, forward.pairs


@on_ranks(4, context=4)
def test_what_a_causal_mask_hides_is_not_computed():
    rank, block = tp.get_state().rank, 12 * 12  # of a rank's queries and another's keys
    assert computed(Case()) == (4, 4 * block)
    assert computed(CAUSAL) == (4, 2 * block)  # the same for all
    assert computed(RING["causal, not balanced"]) == (rank + 1, rank * block + block // 2)


def sent(kind, case):
    q, k, v = own_inputs(case, **crossing(kind)[1])
    with counting() as forward:
        output = attention(kind, case)(q, k, v)
    with counting() as backward:
        output.sum().backward()  # of an expanded gradient
    return forward["all_to_all"], backward["all_to_all"], len(forward + backward)


@pytest.mark.parametrize(
    ("kind", "case", "tensor", "forward", "backward"),
    [
        ("ring", CAUSAL, 1, 3, 6),
        ("ulysses", Case(), 1, 2, 2),
        ("ulysses", Case(kv_heads=1, keys=80, value_dim=6), 1, 2, 2),
        ("unified", CAUSAL, 2, 2 + 1, 2 + 2),
    ],
)
def test_what_is_sent(kind, case, tensor, forward, backward):
    seen = run_ranks(sent, 4, kind, case, tensor=tensor, context=4 // tensor)
    assert seen == [(forward, backward, 1)] * 4
    assert run_ranks(sent, 1, kind, case) == [(0, 0, 0)]


def held(attend, length):
    q = torch.ones(1, 8, length // tp.get_state().size("context"), 8, requires_grad=True)
    with MemoryWatch() as memory:
        attend(q, q, q, is_causal=True).sum().backward()
    return memory.peak / q.nbytes, memory.largest


@pytest.mark.parametrize("attend", [tp.ring_attention, tp.ulysses_attention])
def test_twice_the_sequence_on_twice_the_ranks_in_the_same_memory(attend):
    """The ring holds a few parts, and not one for each rank; no one has the scores of one head."""
    four, eight = (run_ranks(held, ranks, attend, 256 * ranks, context=ranks) for ranks in (4, 8))
    assert max(peak for peak, _ in eight) < 1.25 * max(peak for peak, _ in four)
    assert max(largest for _, largest in (*four, *eight)) < 256 * 256 * 4


# Shapes of q, of k and v, and of v where it differs; dtypes of q, and of k and v.
Q, WITH_CAUSE = (1, 2, 4, 8), {"is_causal": True}
TURNED = {"attention": lambda q, *_, **__: q.transpose(1, 2)}
FLOATS, INTEGERS = (torch.float32,) * 2, (torch.int64,) * 2
SHAPE, DEGREE = tp.ParallelError, tp.DegreeError
REFUSED_BY_RING = [
    ([Q, Q], {}, (torch.float64, torch.float32), SHAPE,
     "q is torch.float64 on cpu, k torch.float32 .*; expected one dtype and device: cast"),
    ([Q, Q], {}, INTEGERS, SHAPE, "are torch.int64; expected a floating"),
    ([(1, 4, 4, 8), (1, 3, 4, 8)], {}, FLOATS, DEGREE,
     "the 3 heads of k and v do not divide the 4 heads of q"),
    ([Q, (1, 2, 6, 8)], WITH_CAUSE, FLOATS, DEGREE,
     "is_causal with 4 queries and 6 keys on this rank; expected as many"),
    ([(1, 2, 5, 8)] * 2, WITH_CAUSE, FLOATS, DEGREE,
     "has 5 tokens, and a balanced part is two chunks of one length; pad"),
    ([(2, 4, 8)] * 2, {}, FLOATS, SHAPE, r"q \(2, 4, 8\).*; expected \[batch, h"),
    ([Q, Q, (1, 2, 5, 8)], {}, FLOATS, SHAPE,
     "expected one batch size, and as many heads and tokens in k as in v"),
    ([Q, (1, 2, 4, 6)], {}, FLOATS, SHAPE, "expected one head_dim in q and k, got 8 and 6"),
]  # fmt: skip
REFUSED_BY_ULYSSES = [
    ([(1, 3, 4, 8)] * 2, {}, FLOATS, DEGREE,
     "3 heads of q do not divide among 2 ranks; expected a multiple. With fewer heads"),
    ([(1, 4, 4, 8), (1, 3, 4, 8)], {}, FLOATS, DEGREE,
     "ulysses_attention: the 3 heads of k and v do not divide the 4 heads of q"),
    ([Q, (1, 2, 3, 8)], {}, FLOATS, DEGREE, "has 4 queries and 3 keys"),
    ([Q, (1, 2, 6, 8)], WITH_CAUSE, FLOATS, DEGREE, "is_causal with 4 queries and 6 keys"),
    ([(4, 8)] * 2, {}, FLOATS, SHAPE, r"ulysses_attention: q \(4, 8\), .*; expected \[batch"),
    ([Q, Q], TURNED, FLOATS, SHAPE,
     r"returned \(1, 8, 1, 8\) for queries of shape \(1, 1, 8, 8\); expected"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "shapes", "options", "dtypes", "error", "message"),
    [
        *(("ring", *row) for row in REFUSED_BY_RING),
        *(("ulysses", *row) for row in REFUSED_BY_ULYSSES),
    ],
)
def test_what_does_not_fit(kind, shapes, options, dtypes, error, message):
    q = torch.zeros(shapes[0], dtype=dtypes[0])
    k = torch.zeros(shapes[1], dtype=dtypes[1])
    v = torch.zeros(shapes[-1], dtype=dtypes[1])
    refused = partial(getattr(tp, f"{kind}_attention"), q, k, v, **options)
    all_raise(2, refused, error, message, context=2)


@pytest.mark.parametrize("shape", [(0, 2, 4, 8), (1, 2, 0, 8)])
@pytest.mark.parametrize("case", [("ring", True), ("ulysses", False)], ids=str)
@on_ranks(2, context=2)
def test_nothing_to_attend_to(case, shape):
    q = torch.zeros(shape, requires_grad=True)
    attention(case[0], Case(is_causal=case[1]))(q, q, q).sum().backward()
    assert q.grad.shape == q.shape


@pytest.mark.parametrize("attend", [tp.ring_attention, tp.ulysses_attention])
def test_alone_it_is_torchs_own(attend):
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)  # no halves are needed
    expected = scaled_dot_product_attention(q, k, k, is_causal=True, scale=0.5, enable_gqa=True)
    assert torch.equal(attend(q, k, k, is_causal=True, scale=0.5), expected)
    with pytest.raises(tp.DegreeError, match="the 3 heads of k and v do not divide the 4 heads of"):
        attend(q, torch.ones(2, 3, 5, 8), torch.ones(2, 3, 5, 8))


@pytest.mark.slow
@on_ranks(2, context=2)
def test_torch_compile_traces_it_whole():
    def twice(q, k, v):
        return tp.ring_attention(2 * q, k, v, is_causal=True)

    compiled = torch.compile(twice, backend="aot_eager", fullgraph=True)
    whole = whole_of(GROUPED)
    results = []
    for function in (compiled, twice):
        own = own_inputs(GROUPED)
        output = function(*own)
        output.backward(part(GROUPED, whole.output_grad))
        results.append([output, *(each.grad for each in own)])
    assert all(torch.equal(*each) for each in zip(*results, strict=True))


@on_ranks(4, tensor=4)
def test_an_attention_of_ones_own_over_a_group_that_is_given():
    """A window of three tokens: the sequence inside is whole, and in its own order."""

    def window(q, k, v, *, is_causal, scale, dropout_p):
        assert (is_causal, scale, dropout_p) == (False, 0.5, 0.1)
        at = torch.arange(q.shape[2])
        near = (at[:, None] - at).abs() <= 1
        return scaled_dot_product_attention(q, k, v, attn_mask=near, scale=scale)

    how, given = {"scale": 0.5, "dropout_p": 0.1}, {"group": tp.get_state().group("tensor")}
    output = tp.ulysses_attention(*own_inputs(Case(), **given), **how, attention=window, **given)
    expected = window(*whole_of(Case()).inputs, is_causal=False, **how)
    assert (output - part(Case(), expected, **given)).abs().max() < 1e-12


@on_ranks(8, tensor=2, context=4)
def test_splitting_the_context_axis():
    state = tp.get_state()
    heads, ring = tp.split_context(2)
    again = tp.split_context(ulysses=2, state=state)
    assert again[0] is heads
    assert again[1] is ring
    for group, apart in ((heads, 2), (ring, 4)):  # tensor is the fastest axis: ranks 1 apart
        assert dist.get_process_group_ranks(group) == [state.rank & ~apart, state.rank | apart]
    # Gathered over both groups, the parts are the sequence.
    groups = {"group": ring, "ulysses_group": heads}
    own = tp.sequence_positions(24, **groups)
    assert torch.equal(tp.unshard_sequence(own, 0, **groups), torch.arange(24))
    attend = attention("unified", GROUPED, {"ulysses_group": heads, "ring_group": ring})
    assert largest(attend, GROUPED, groups) < 1e-12
    tp.destroy_tensor_parallel()
    with pytest.raises(KeyError):  # freed with the state
        dist.get_process_group_ranks(heads)


@on_ranks(2, context=2)
def test_all_to_one_side_and_what_cannot_be_split():
    whole = tp.get_state().group("context")
    assert tp.split_context(2)[0] is whole
    assert tp.split_context(2)[1].size() == 1
    assert tp.split_context(1)[1] is whole
    with pytest.raises(tp.DegreeError, match="ulysses=3 does not divide the context degree 2"):
        tp.split_context(3)
    foreign = tp.ParallelState.from_groups(context=whole)
    with pytest.raises(tp.ParallelError, match="made from groups without a layout; give unified"):
        tp.split_context(2, state=foreign)
    tp.destroy_tensor_parallel()
    with pytest.raises(tp.NotInitializedError, match="no parallel groups"):
        tp.split_context(2)


@on_ranks(2, context=2)
def test_groups_that_do_not_cross_or_are_others():
    group, q = tp.get_state().group("context"), torch.zeros(*Q)
    with pytest.raises(tp.ParallelError, match=r"the context group is .*; expected a process g"):
        tp.ring_attention(q, q, q, group=dist.GroupMember.NON_GROUP_MEMBER)
    for heads, told in (
        (group, "are one group of 2 ranks; expected two that cross"),
        (None, r"ulysses_group=None, ring_group=.*; expected two"),
    ):
        with pytest.raises(tp.ParallelError, match=told):
            tp.unified_attention(q, q, q, ulysses_group=heads, ring_group=group)
