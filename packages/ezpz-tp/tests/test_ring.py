"""Ring attention against full attention; what it computes, sends and holds."""

import contextlib
import weakref

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from sequences import Case, differences, whole_of
from torch.nn.functional import scaled_dot_product_attention, silu
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ezpz_tp as tp
from ezpz_tp.testing import counting, run_ranks


def attention(case):
    return lambda q, k, v: tp.ring_attention(
        q, k, v, is_causal=case.is_causal, balanced=case.balanced, scale=case.scale
    )


def part(case):
    return lambda whole: tp.shard_sequence(whole, 2, balanced=case.balanced)


def largest(case, layout=torch.Tensor.contiguous):
    return max(differences(attention(case), case, part(case), layout=layout))


CASES = [
    pytest.param(Case(), id="all see all"),
    pytest.param(Case(is_causal=True), id="causal"),
    pytest.param(Case(is_causal=True, balanced=False), id="causal, not balanced"),
    pytest.param(Case(kv_heads=2, is_causal=True), id="grouped"),
    pytest.param(Case(kv_heads=1, balanced=False, scale=0.7), id="one key head, scale"),
    pytest.param(Case(kv_heads=2, value_dim=6, is_causal=True), id="other value_dim"),
    pytest.param(Case(head_dim=7, value_dim=7, is_causal=True), id="odd head_dim"),
    pytest.param(Case(keys=96), id="more keys than queries"),
]


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_full_attentions(case, degree):
    assert max(run_ranks(largest, degree, case, context=degree)) < 1e-12


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 2e-6), (torch.bfloat16, 0.04), (torch.float16, 0.005)]
)
def test_fewer_digits(dtype, limit):
    case = Case(kv_heads=2, is_causal=True, dtype=dtype)
    alone = run_ranks(largest, 1, case, context=1)[0]
    assert max(run_ranks(largest, 4, case, context=4)) < max(limit, 2 * alone)


def scores_far_apart():
    """Blocks whose weights differ by more than float64 can say."""
    whole = whole_of(Case(is_causal=True))
    q, k, v = (tp.shard_sequence(each.detach(), 2) for each in whole.inputs)
    far = torch.where(tp.sequence_positions(48) < 24, 400.0, -400.0)[:, None]
    q, k = q.abs(), k + far.double()
    output = tp.ring_attention(q, k, v, is_causal=True)
    full = [each.detach() for each in whole.inputs]
    low = torch.where(torch.arange(48) < 24, 400.0, -400.0)[:, None]
    expected = scaled_dot_product_attention(full[0].abs(), full[1] + low, full[2], is_causal=True)
    return (output - tp.shard_sequence(expected, 2)).abs().max().item()


def test_scores_far_apart():
    assert max(run_ranks(scores_far_apart, 2, context=2)) < 1e-10


def from_sequence_first(tensor):
    """The same values, as a view of ``[sequence, batch, heads, head_dim]``."""
    return tensor.detach().permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)


def last_dim_apart(tensor):
    return tensor.detach().mT.contiguous().mT


@pytest.mark.parametrize("layout", [from_sequence_first, last_dim_apart])
def test_other_layouts_in_memory(layout):
    case = Case(kv_heads=2, is_causal=True)
    assert max(run_ranks(largest, 2, case, layout, context=2)) < 1e-12


@on_ranks(2, context=2)
def test_an_expanded_gradient_and_nothing_is_changed_in_place():
    whole = whole_of(Case())
    q, k, v = (tp.shard_sequence(each.detach(), 2).requires_grad_() for each in whole.inputs)
    before = [each.detach().clone() for each in (q, k, v)]
    output = tp.ring_attention(q, k, v)
    kept = output.detach().clone()
    output.sum().backward()  # a gradient of ones that has one element in memory
    assert torch.equal(output, kept)
    assert all(map(torch.equal, (q, k, v), before))
    full = scaled_dot_product_attention(*whole.inputs)
    expected = torch.autograd.grad(full.sum(), whole.inputs)
    for found, wanted in zip((q, k, v), expected, strict=True):
        assert (found.grad - tp.shard_sequence(wanted, 2)).abs().max() < 1e-12


@pytest.mark.parametrize("needed", [[0], [1], [2], [0, 2]])
@on_ranks(2, context=2)
def test_gradients_of_some_inputs(needed):
    whole = whole_of(Case(is_causal=True))
    own = [tp.shard_sequence(each.detach(), 2) for each in whole.inputs]
    for at in needed:
        own[at].requires_grad_()
    tp.ring_attention(*own, is_causal=True).backward(tp.shard_sequence(whole.output_grad, 2))
    for at, each in enumerate(own):
        if at not in needed:
            assert each.grad is None
        else:
            assert (each.grad - tp.shard_sequence(whole.grads[at], 2)).abs().max() < 1e-12


@on_ranks(2, context=2)
def test_no_grad_and_second_derivatives():
    whole = whole_of(Case(is_causal=True))
    own = [tp.shard_sequence(each, 2) for each in whole.inputs]
    with torch.no_grad():
        output = tp.ring_attention(*own, is_causal=True)
    assert not output.requires_grad
    assert (output - tp.shard_sequence(whole.output, 2)).abs().max() < 1e-12
    output = tp.ring_attention(*own, is_causal=True)
    with pytest.raises(tp.ParallelError, match="ring_attention: a second derivative is asked for"):
        torch.autograd.grad(output.sum(), own[0], create_graph=True)


@on_ranks(2, context=2)
def test_autocast():
    case = Case(dtype=torch.float32)
    q, k, v = (tp.shard_sequence(each.detach(), 2) for each in whole_of(case).inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        # As after rotary embeddings: q and k in float32, v as a linear layer left it.
        output = tp.ring_attention(q.float(), k.float(), v.bfloat16())
        double = tp.ring_attention(q, k, v)
    assert output.dtype == torch.bfloat16
    assert double.dtype == torch.float64


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
    q, k, v = (part(case)(each.detach()).requires_grad_() for each in whole_of(case).inputs)
    with Computed() as forward:
        output = attention(case)(q, k, v)
    with Computed() as backward:
        output.sum().backward()
    assert (forward.calls, forward.pairs) == (backward.calls, backward.pairs)
    return forward.calls, forward.pairs


def test_what_a_causal_mask_hides_is_not_computed():
    half = 48 * 48 // 2
    balanced = run_ranks(computed, 4, Case(is_causal=True), context=4)
    assert balanced == [(4, half // 4)] * 4  # the same for all
    calls, pairs = zip(
        *run_ranks(computed, 4, Case(is_causal=True, balanced=False), context=4), strict=True
    )
    assert calls == (1, 2, 3, 4)
    assert sum(pairs) == half
    assert run_ranks(computed, 4, Case(), context=4) == [(4, 48 * 12)] * 4


def exchanges():
    q = torch.ones(1, 2, 4, 8, requires_grad=True)
    with counting() as forward:
        output = tp.ring_attention(q, q, q, is_causal=True)
    with counting() as backward:
        output.sum().backward()
    return dict(forward), dict(backward)


def test_what_is_sent():
    assert run_ranks(exchanges, 4, context=4) == [({"all_to_all": 3}, {"all_to_all": 6})] * 4
    assert run_ranks(exchanges, 1, context=1) == [({}, {})]


class Live(TorchDispatchMode):
    """Bytes of the tensors that are alive: the most there were at once, and the largest."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = self.largest = 0
        self.seen = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor.untyped_storage())
        return result

    def add(self, storage):
        if storage in self.seen:
            return
        self.seen.add(storage)
        size = storage.nbytes()
        self.now += size
        self.peak, self.largest = max(self.peak, self.now), max(self.largest, size)
        weakref.finalize(storage, self.remove, size)

    def remove(self, size):
        self.now -= size


HIDDEN, HEADS, HEAD_DIM, INNER = 64, 8, 8, 172


def rotated(values, positions):
    half = HEAD_DIM // 2
    angles = positions[:, None] * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = angles.cos(), angles.sin()
    first, second = values[..., :half], values[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def llama_block(hidden, weights, positions, attend):
    """A block of Llama, one key head for two heads."""
    normed = torch.nn.functional.rms_norm(hidden, (HIDDEN,))
    q, k, v = (
        (normed @ weights[name]).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for name in "qkv"
    )
    mixed = attend(rotated(q, positions), rotated(k, positions), v, is_causal=True)
    hidden = hidden + mixed.transpose(1, 2).flatten(2) @ weights["out"]
    normed = torch.nn.functional.rms_norm(hidden, (HIDDEN,))
    return hidden + (silu(normed @ weights["gate"]) * (normed @ weights["up"])) @ weights["down"]


def peak_of_a_block(attend, length):
    """Peak and largest tensor, in bytes, of a block's forward and backward, one rank's part."""
    shapes = {
        "q": (HIDDEN, HIDDEN),
        "k": (HIDDEN, HIDDEN // 2),
        "v": (HIDDEN, HIDDEN // 2),
        "out": (HIDDEN, HIDDEN),
        "gate": (HIDDEN, INNER),
        "up": (HIDDEN, INNER),
        "down": (INNER, HIDDEN),
    }
    positions = tp.sequence_positions(length)
    with Live() as live:
        weights = {name: torch.full(shape, 0.01) for name, shape in shapes.items()}
        for weight in weights.values():
            weight.requires_grad_()
        hidden = torch.ones(1, len(positions), HIDDEN, requires_grad=True)
        llama_block(hidden, weights, positions, attend).square().sum().backward()
    return live.peak, live.largest


@pytest.mark.parametrize("attend", [tp.ring_attention, tp.ulysses_attention])
def test_eight_times_the_sequence_in_the_same_memory(attend):
    (alone,) = run_ranks(peak_of_a_block, 1, attend, 256, context=1)
    shared = run_ranks(peak_of_a_block, 8, attend, 8 * 256, context=8)
    assert max(peak for peak, _ in shared) < 1.15 * alone[0]
    # Nothing is as large as the scores of one head, let alone of the whole sequence.
    assert max(largest for _, largest in shared) < 256 * 256 * 4


def of_the_ring_alone(length):
    q = torch.ones(1, HEADS, length // tp.get_state().size("context"), HEAD_DIM, requires_grad=True)
    with Live() as live:
        tp.ring_attention(q, q, q, is_causal=True).sum().backward()
    return live.peak / q.nbytes


def test_the_ring_holds_a_few_parts_and_not_one_for_each_rank():
    four = run_ranks(of_the_ring_alone, 4, 1024, context=4)
    assert max(run_ranks(of_the_ring_alone, 8, 2048, context=8)) == max(four)


def refused(shapes, options, dtypes):
    q, k, v = (torch.zeros(*s, dtype=d) for s, d in zip(shapes, dtypes, strict=True))
    tp.ring_attention(q, k, v, **options)


FLOAT, DOUBLE, INT = torch.float32, torch.float64, torch.int64


@pytest.mark.parametrize(
    ("shapes", "options", "dtypes", "error", "message"),
    [
        (
            [(1, 2, 4, 8)] * 3,
            {},
            (DOUBLE, FLOAT, FLOAT),
            tp.ParallelError,
            "q is torch.float64 on cpu, k torch.float32 .*; expected one dtype and device: cast",
        ),
        (
            [(1, 2, 4, 8)] * 3,
            {},
            (INT,) * 3,
            tp.ParallelError,
            "are torch.int64; expected a floating",
        ),
        (
            [(1, 4, 4, 8), (1, 3, 4, 8), (1, 3, 4, 8)],
            {},
            (FLOAT,) * 3,
            tp.DegreeError,
            "the 3 heads of k and v do not divide the 4 heads of q",
        ),
        (
            [(1, 2, 4, 8), (1, 2, 6, 8), (1, 2, 6, 8)],
            {"is_causal": True},
            (FLOAT,) * 3,
            tp.DegreeError,
            "is_causal with 4 queries and 6 keys on this rank; expected as many",
        ),
        (
            [(1, 2, 5, 8)] * 3,
            {"is_causal": True},
            (FLOAT,) * 3,
            tp.DegreeError,
            "has 5 tokens, and a balanced part is two chunks of one length; pad",
        ),
        (
            [(2, 4, 8)] * 3,
            {},
            (FLOAT,) * 3,
            tp.ParallelError,
            r"q \(2, 4, 8\).*; expected \[batch, h",
        ),
        (
            [(1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 5, 8)],
            {},
            (FLOAT,) * 3,
            tp.ParallelError,
            "expected one batch size, and as many heads and tokens in k as in v",
        ),
        (
            [(1, 2, 4, 8), (1, 2, 4, 6), (1, 2, 4, 6)],
            {},
            (FLOAT,) * 3,
            tp.ParallelError,
            "expected one head_dim in q and k, got 8 and 6",
        ),
    ],
)
@pytest.mark.parametrize("degree", [1, 2])
def test_what_does_not_fit(shapes, options, dtypes, error, message, degree):
    # Alone nothing is cut in halves.
    fits = "two chunks" in message and degree == 1
    with contextlib.nullcontext() if fits else pytest.raises(error, match=message):
        if degree == 1:
            refused(shapes, options, dtypes)
        else:
            run_ranks(refused, degree, shapes, options, dtypes, context=degree)


def test_a_group_that_this_rank_is_not_in():
    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(
        tp.ParallelError, match=r"the context group is .*; expected a process group"
    ):
        tp.ring_attention(q, q, q, group=dist.GroupMember.NON_GROUP_MEMBER)


class Watched(TorchFunctionMode):
    """Names what is called, and runs it unwatched."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@on_ranks(2, context=2)
def test_who_watches_sees_one_call_of_each():
    heads, ring = tp.get_state().group("tensor"), tp.get_state().group("context")
    q = torch.zeros(1, 2, 4, 8)
    with Watched() as seen:
        tp.ring_attention(q, q, q)
        tp.ulysses_attention(q, q, q)
        tp.unified_attention(q, q, q, ulysses_group=heads, ring_group=ring)
        tp.unshard_sequence(tp.shard_sequence(q, 2), 2)
    assert seen.names == [
        "ring_attention",
        "ulysses_attention",
        "unified_attention",
        "shard_sequence",
        "unshard_sequence",
    ]


@pytest.mark.parametrize("shape", [(0, 2, 4, 8), (1, 2, 0, 8)])
@on_ranks(2, context=2)
def test_nothing_to_attend_to(shape):
    q = torch.zeros(shape, requires_grad=True)
    tp.ring_attention(q, q, q, is_causal=True).sum().backward()
    assert q.grad.shape == q.shape


def test_alone_it_is_torchs_own():
    q = torch.randn(2, 4, 6, 8)
    k = torch.randn(2, 2, 6, 8)
    expected = scaled_dot_product_attention(q, k, k, is_causal=True, scale=0.5, enable_gqa=True)
    assert torch.equal(tp.ring_attention(q, k, k, is_causal=True, scale=0.5), expected)


@on_ranks(2, context=2, in_processes=True)
def test_torch_compile_traces_it_whole():
    case = Case(kv_heads=2, is_causal=True)

    def twice(q, k, v):
        return tp.ring_attention(2 * q, k, v, is_causal=True)

    compiled = torch.compile(twice, backend="aot_eager", fullgraph=True)
    whole = whole_of(case)
    results = []
    for function in (compiled, twice):
        own = [tp.shard_sequence(each.detach(), 2).requires_grad_() for each in whole.inputs]
        output = function(*own)
        output.backward(tp.shard_sequence(whole.output_grad, 2))
        results.append([output, *(each.grad for each in own)])
    assert all(torch.equal(*each) for each in zip(*results, strict=True))
