"""Heads over one group and a ring over another; the groups; a whole model's loss and gradients."""

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from sequences import Case, differences
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ezpz_tp as tp
from ezpz_tp.testing import counting, run_ranks


def attention(case, heads, ring):
    return lambda q, k, v: tp.unified_attention(
        q,
        k,
        v,
        ulysses_group=heads,
        ring_group=ring,
        is_causal=case.is_causal,
        balanced=case.balanced,
        scale=case.scale,
    )


def part(case, heads, ring):
    return lambda whole: tp.shard_sequence(
        whole, 2, group=ring, ulysses_group=heads, balanced=case.balanced
    )


def largest(case):
    groups = tp.get_state().group("tensor"), tp.get_state().group("context")
    return max(differences(attention(case, *groups), case, part(case, *groups)))


CASES = [
    pytest.param(Case(heads=6, kv_heads=3), id="all see all"),
    pytest.param(Case(heads=6, kv_heads=6, is_causal=True), id="causal"),
    pytest.param(Case(heads=6, kv_heads=6, is_causal=True, balanced=False), id="not balanced"),
    pytest.param(Case(heads=6, kv_heads=2, is_causal=True, scale=0.7), id="grouped"),
    pytest.param(Case(heads=12, kv_heads=4, value_dim=6, is_causal=True), id="values"),
]


@pytest.mark.parametrize(("heads", "ring"), [(2, 2), (1, 2), (2, 1), (3, 2), (1, 1)])
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_full_attentions(case, heads, ring):
    assert max(run_ranks(largest, heads * ring, case, tensor=heads, context=ring)) < 1e-12


def test_fewer_digits():
    case = Case(heads=8, kv_heads=2, is_causal=True, dtype=torch.bfloat16)
    assert max(run_ranks(largest, 4, case, tensor=2, context=2)) < 0.05


def sent():
    groups = tp.get_state().group("tensor"), tp.get_state().group("context")
    q = torch.ones(1, 2, 4, 8, requires_grad=True)
    with counting() as forward:
        output = attention(Case(is_causal=True), *groups)(q, q, q)
    with counting() as backward:
        output.sum().backward()
    return forward["all_to_all"], backward["all_to_all"]


def test_what_is_sent():
    assert run_ranks(sent, 4, tensor=2, context=2) == [(2 + 1, 2 + 2)] * 4
    assert run_ranks(sent, 1) == [(0, 0)]


def split(ulysses):
    state = tp.get_state()
    heads, ring = tp.split_context(ulysses)
    again = tp.split_context(ulysses=ulysses, state=state)
    assert again[0] is heads
    assert again[1] is ring
    members = [dist.get_process_group_ranks(group) for group in (heads, ring)]
    # Gathered over both groups, the parts are the sequence.
    order = torch.arange(24)
    own = tp.sequence_positions(24, group=ring, ulysses_group=heads)
    whole = tp.unshard_sequence(own, 0, group=ring, ulysses_group=heads)
    assert torch.equal(whole, order)
    case = Case(kv_heads=2, is_causal=True)
    worst = max(differences(attention(case, heads, ring), case, part(case, heads, ring)))
    tp.destroy_tensor_parallel()
    with pytest.raises(KeyError):  # freed with the state, unless it is the context axis itself
        dist.get_process_group_ranks(heads if heads.size() > 1 else ring)
    return members, worst


def test_splitting_the_context_axis():
    seen = run_ranks(split, 8, 2, tensor=2, context=4, in_processes=True)
    assert max(worst for _, worst in seen) < 1e-12
    # tensor is the fastest axis, so context ranks are 2 apart.
    assert [members for members, _ in seen] == [
        [[0, 2], [0, 4]],
        [[1, 3], [1, 5]],
        [[0, 2], [2, 6]],
        [[1, 3], [3, 7]],
        [[4, 6], [0, 4]],
        [[5, 7], [1, 5]],
        [[4, 6], [2, 6]],
        [[5, 7], [3, 7]],
    ]


def all_to_one_side():
    state = tp.get_state()
    whole = state.group("context")
    assert tp.split_context(2)[0] is whole
    assert tp.split_context(2)[1].size() == 1
    assert tp.split_context(1)[1] is whole
    with pytest.raises(tp.DegreeError, match="ulysses=3 does not divide the context degree 2"):
        tp.split_context(3)
    foreign = tp.ParallelState.from_groups(context=whole)
    with pytest.raises(tp.ParallelError, match="made from groups without a layout; give unified"):
        tp.split_context(2, state=foreign)


def test_all_to_one_side_and_what_cannot_be_split():
    run_ranks(all_to_one_side, 2, context=2, in_processes=True)
    with pytest.raises(tp.NotInitializedError, match="no parallel groups"):
        tp.split_context(2)


@on_ranks(2, context=2)
def test_groups_that_do_not_cross():
    group, q = tp.get_state().group("context"), torch.zeros(1, 2, 4, 8)
    with pytest.raises(tp.ParallelError, match="are one group of 2 ranks; expected two that cross"):
        tp.unified_attention(q, q, q, ulysses_group=group, ring_group=group)
    with pytest.raises(tp.ParallelError, match=r"ulysses_group=None, ring_group=.*; expected two"):
        tp.unified_attention(q, q, q, ulysses_group=None, ring_group=group)


class Tiny(nn.Module):
    """An embedding, one block with causal attention and rotary positions, and a head."""

    def __init__(self, attend):
        super().__init__()
        self.attend = attend
        self.embedding = nn.Embedding(31, 32)
        self.norm, self.qkv = nn.LayerNorm(32), nn.Linear(32, 96)
        self.out, self.head = nn.Linear(32, 32), nn.Linear(32, 31, bias=False)

    def forward(self, tokens, positions):
        hidden = self.embedding(tokens)
        q, k, v = (
            each.unflatten(-1, (4, 8)).transpose(1, 2)
            for each in self.qkv(self.norm(hidden)).chunk(3, -1)
        )
        turn = positions[:, None] * 0.3 ** torch.arange(8)
        mixed = self.attend(q * turn.cos(), k * turn.cos(), v)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return self.head(torch.tanh(hidden))


BATCH, LENGTH, PADDED = 4, 24, 5


def data():
    """Tokens and labels ``[batch, length]``; the last labels of each row are not counted."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(31, (BATCH, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[:, -PADDED:] = -100
    return tokens[:, :-1], labels


def tiny(attend):
    torch.manual_seed(5)
    return Tiny(attend).double()


def sum_of_losses(logits, labels):
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def full_gradients():
    def attend(q, k, v):
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    model, (tokens, labels) = tiny(attend), data()
    loss = sum_of_losses(model(tokens, torch.arange(LENGTH)), labels) / (labels >= 0).sum()
    loss.backward()
    return loss.item(), {name: each.grad for name, each in model.named_parameters()}


def trained_over_data_and_context(wrapped):
    """The loss, and how far the gradients are off, as `shard_sequence` says they are reduced."""
    state = tp.get_state()
    both = state.group("data", "context")
    heads, ring = tp.split_context(1)
    tokens, labels = data()
    counted = (labels >= 0).sum()  # in all parts, of all data-parallel ranks
    mine = slice(state.index("data"), None, state.size("data"))
    tokens, labels = (tp.shard_sequence(each[mine], 1, group=ring) for each in (tokens, labels))
    positions = tp.sequence_positions(LENGTH, group=ring)

    model = tiny(attention(Case(is_causal=True), heads, ring))
    forward = DistributedDataParallel(model, process_group=both) if wrapped else model
    loss = sum_of_losses(forward(tokens, positions), labels) / counted
    (loss * both.size() if wrapped else loss).backward()
    if not wrapped:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=both)
    whole = loss.detach().clone()
    dist.all_reduce(whole, group=both)
    _, expected = full_gradients()
    off = {name: (p.grad - expected[name]).abs().max() for name, p in model.named_parameters()}
    return whole.item(), max(off.values()).item()


@pytest.mark.parametrize("wrapped", [False, True], ids=["summed", "DDP"])
def test_loss_and_gradients_over_data_and_context(wrapped):
    seen = run_ranks(
        trained_over_data_and_context,
        4,
        wrapped,
        data=2,
        context=2,
        also=[("data", "context")],
        in_processes=True,
    )
    loss, _ = full_gradients()
    for whole, off in seen:
        assert whole == pytest.approx(loss, rel=1e-12)
        assert off < 1e-12
