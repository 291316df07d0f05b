"""One block of attention: kernels, and the plain way, against the formula written out."""

import pytest
import torch

from ezpz_tp import _ring as module
from ezpz_tp._ring import Block, block_attention, block_attention_backward


def draw(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def block_of(m, n, *, heads=4, kv_heads=4, head_dim=8, value_dim=8, causal=False, dtype=None):
    dtype = dtype or torch.float64
    q = draw(2, heads, m, head_dim, dtype=dtype)
    k = draw(2, kv_heads, n, head_dim, dtype=dtype, seed=1)
    v = draw(2, kv_heads, n, value_dim, dtype=dtype, seed=2)
    return Block(q, k, v, causal, 0.3)


def written_out(block, other=None):
    """Output and log-sum-exp over the keys of a block, and of another one if given, in float64."""
    q, k, v = (each.double().requires_grad_() for each in block[:3])
    keys, values = k, v
    if other is not None:
        keys = torch.cat([k, other.k.double()], 2)
        values = torch.cat([v, other.v.double()], 2)
    shared = q.shape[1] // k.shape[1]
    keys, values = keys.repeat_interleave(shared, 1), values.repeat_interleave(shared, 1)
    scores = q @ keys.mT * block.scale
    if block.causal:
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(
            torch.nn.functional.pad(hidden, (0, keys.shape[2] - k.shape[2])), -torch.inf
        )
    return (q, k, v), scores.softmax(-1) @ values, scores.logsumexp(-1)


CASES = [
    pytest.param({"m": 9, "n": 9, "causal": True}, id="causal"),
    pytest.param({"m": 9, "n": 5}, id="uneven"),
    pytest.param({"m": 6, "n": 6, "kv_heads": 2, "causal": True}, id="grouped causal"),
    pytest.param({"m": 6, "n": 7, "kv_heads": 1}, id="one key head"),
    pytest.param({"m": 1, "n": 1, "head_dim": 3, "value_dim": 3}, id="one token, odd head_dim"),
    pytest.param({"m": 7, "n": 7, "kv_heads": 2, "value_dim": 5, "causal": True}, id="values"),
]
DTYPES = pytest.mark.parametrize(
    ("dtype", "limit"),
    [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 0.05), (torch.float16, 0.01)],
    ids=str,
)


@pytest.mark.parametrize("plainly", [False, True], ids=["as chosen", "plain"])
@pytest.mark.parametrize("sizes", CASES)
@DTYPES
def test_a_block_among_others(sizes, dtype, limit, plainly, monkeypatch):
    """The output of the block alone, and its share of the gradients of attention to more keys."""
    if plainly:
        monkeypatch.setattr(module, "_kernel", lambda block: "plain")
        monkeypatch.setattr(module, "SCORES_AT_A_TIME", 150)  # several pieces, the last one short
    block = block_of(**sizes, dtype=dtype)
    _, expected, expected_lse = written_out(block)
    out, lse = block_attention(block)
    assert lse.dtype == torch.promote_types(dtype, torch.float32)
    assert (out - expected).abs().max() < limit
    assert (lse - expected_lse).abs().max() < limit

    other = block_of(**{**sizes, "n": 4, "causal": False}, dtype=dtype)
    inputs, whole, whole_lse = written_out(block, other)
    grad = draw(*whole.shape, seed=5)
    wanted = torch.autograd.grad(whole, inputs, grad, retain_graph=True)
    found = block_attention_backward(
        block, grad.to(dtype), whole.detach().to(dtype), whole_lse.detach().to(lse.dtype)
    )
    # The queries have a share from the other keys too.
    rest = block_attention_backward(
        other._replace(q=block.q),
        grad.to(dtype),
        whole.detach().to(dtype),
        whole_lse.detach().to(lse.dtype),
    )
    found = (found[0] + rest[0], *found[1:])
    for one, another in zip(found, wanted, strict=True):
        assert (one - another).abs().max() < 3 * limit


def test_what_goes_the_plain_way():
    assert module._kernel(block_of(2, 2)) == "cpu"
    assert module._kernel(block_of(2, 2, value_dim=4)) == "plain"
    meta = Block(*(each.to("meta") for each in block_of(2, 2)[:3]), False, 1.0)
    assert module._kernel(meta) == "plain"


def test_the_plain_way_under_autocast_is_not_rounded():
    block = block_of(8, 8, value_dim=4, dtype=torch.float32)
    out, lse = block_attention(block)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again, lse_again = block_attention(block)
        grads = block_attention_backward(block, out, out, lse)
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)
    expected = block_attention_backward(block, out, out, lse)
    assert all(map(torch.equal, grads, expected))
