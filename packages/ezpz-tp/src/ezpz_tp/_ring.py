# ruff: noqa: SLF001 - torch has no public names for kernels that return the log-sum-exp
"""Ring attention: each rank keeps its part of the sequence, and keys and values go round.

Liu et al., arXiv:2310.01889. Under a causal mask the parts are balanced as Megatron-LM and others
do: of 2n chunks, rank r holds r and 2n - 1 - r, and has as much to do as any other rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.distributed.distributed_c10d import AllToAllOptions
from torch.nn import functional as F

from ._current import context_group
from ._errors import DegreeError, ParallelError
from ._fused import as_autocast
from ._mappings import applied

# Attention of some queries to some keys: its output, and what it takes to merge it with others.
#
# Attention to many keys is a weighted mean of attention to parts of them, and the weights follow
# from each part's log-sum-exp of the scores (Rabe and Staats, arXiv:2112.05682). torch's fused
# kernels return it, and their backward, given the output and the log-sum-exp over *all* keys, gives
# one part's share of the gradients. None holds the matrix of scores.
#
# =========  ====================================  ====================================
# kernel     where                                 dtypes
# =========  ====================================  ====================================
# CPU        CPUs                                  float64, float32, bfloat16, float16
# flash      CUDA and ROCm, where torch allows it  bfloat16, float16
# efficient  CUDA and ROCm, where torch allows it  float32, and what flash refuses
# plain      everywhere else                       any, some rows of scores at a time
# =========  ====================================  ====================================

_aten: Any = torch.ops.aten

SCORES_AT_A_TIME = 1 << 22
"""The plain way holds this many scores, or those of one row of all heads if they are more."""

Gradients = tuple[Tensor, Tensor, Tensor]


class Block(NamedTuple):
    """Some queries, and the keys that they see. None of the tensors is empty."""

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    scale: float


def accumulated(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _kernel(block: Block) -> str:
    q = block.q
    device = block.q.device.type
    if q.shape[-1] != block.v.shape[-1]:
        return "plain"
    if device == "cuda":
        # What torch itself asks before it takes a kernel; also whether the user forbids it.
        cuda: Any = torch.backends.cuda
        asked = cuda.SDPAParams(q, q, q, None, 0.0, block.causal, False)
        if q.shape[-1] % 8 == 0 and cuda.can_use_flash_attention(asked):
            return "flash"
        if cuda.can_use_efficient_attention(asked):
            return "efficient"
        return "plain"
    if device == "cpu":
        return "cpu"
    return "plain"


def _cpu(block: Block) -> tuple[Tensor, Tensor]:
    attend = _aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = attend(*_repeat_kv_heads(block), 0.0, block.causal, scale=block.scale)
    return out, lse


def _cpu_backward(block: Block, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    back = _aten._scaled_dot_product_flash_attention_for_cpu_backward
    given = grad, *_repeat_kv_heads(block), out, lse, 0.0, block.causal
    return _sum_repeated_heads(block, *back(*given, scale=block.scale))


def _flash(block: Block) -> tuple[Tensor, Tensor]:
    q, k, v, causal, scale = block
    out, lse, *_ = _aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=scale
    )
    return out, lse


def _flash_backward(block: Block, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    q, k, v, causal, scale = block
    lengths = None, None, q.shape[2], k.shape[2]  # of batches of several lengths: none
    # Without dropout the state of the random generator is not looked at.
    random = q.new_empty(2, dtype=torch.uint64), q.new_empty(0, dtype=torch.uint64)
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse.contiguous(), *lengths, 0.0, causal, *random, scale=scale
    )
    return dq, dk, dv


def _efficient(block: Block) -> tuple[Tensor, Tensor]:
    q, k, v = _repeat_kv_heads(block)
    out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, block.causal, scale=block.scale
    )
    return out, lse[:, :, : q.shape[2]]  # the kernel pads the rows to a multiple of 32


def _efficient_backward(block: Block, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    q, k, v = _repeat_kv_heads(block)
    lse = F.pad(lse, (0, -lse.shape[2] % 32), value=torch.inf).contiguous()  # as it pads itself
    random = q.new_empty((), dtype=torch.int64)
    mask = [True, True, True, False]  # of the gradients that are wanted; there is no bias
    dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, None, out, lse, random, random, 0.0, mask, block.causal, scale=block.scale
    )
    return _sum_repeated_heads(block, dq, dk, dv)


def _repeat_kv_heads(block: Block) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, _, _ = block
    shared = q.shape[1] // k.shape[1]
    if shared == 1:
        return q, k, v
    return q, k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)


def _sum_repeated_heads(block: Block, dq: Tensor, dk: Tensor, dv: Tensor) -> Gradients:
    """The gradients of key heads from those of the repeated ones."""
    kv_heads = block.k.shape[1]
    if dk.shape[1] == kv_heads:
        return dq, dk, dv
    wide = accumulated(dk.dtype)
    each = (grad.unflatten(1, (kv_heads, -1)).sum(2, dtype=wide) for grad in (dk, dv))
    return dq, *each


def _plain(block: Block) -> tuple[Tensor, Tensor]:
    outs = []
    sums = []
    with torch.autocast(block.q.device.type, enabled=False):
        v = block.v.to(accumulated(block.v.dtype))
        for piece in _pieces(block):
            scores = piece.scores()
            lse = scores.logsumexp(-1, keepdim=True)
            outs.append(piece.ungrouped(scores.sub_(lse).exp_() @ v))
            sums.append(piece.ungrouped(lse).squeeze(-1))
    return torch.cat(outs, 2), torch.cat(sums, 2)


def _plain_backward(block: Block, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    with torch.autocast(block.q.device.type, enabled=False):
        v = block.v.to(accumulated(block.v.dtype))
        dq = []
        dk = torch.zeros_like(block.k, dtype=v.dtype)
        dv = torch.zeros_like(v)
        for piece in _pieces(block):
            dout = piece.grouped(grad)
            mean = (dout * piece.grouped(out)).sum(-1, keepdim=True)
            weights = piece.scores().sub_(piece.grouped(lse.unsqueeze(-1))).exp_()
            dv += weights.mT @ dout
            dscores = (dout @ v.mT).sub_(mean).mul_(weights).mul_(block.scale)
            dk += dscores.mT @ piece.grouped(block.q)
            dq.append(piece.ungrouped(dscores @ piece.k))
    return torch.cat(dq, 2), dk, dv


class _Piece(NamedTuple):
    """Some rows of a block. The heads that share a key are below each other, not in a dim."""

    block: Block
    k: Tensor
    rows: slice

    def grouped(self, tensor: Tensor) -> Tensor:
        """``[batch, heads, m, d]`` to ``[batch, kv_heads, shared * rows, d]``, these rows of it."""
        rows = tensor[:, :, self.rows].to(self.k.dtype)
        by_key: Tensor = rows.unflatten(1, (self.k.shape[1], -1))
        return by_key.flatten(2, 3)

    def ungrouped(self, tensor: Tensor) -> Tensor:
        """``[batch, kv_heads, shared * rows, d]`` to ``[batch, heads, rows, d]``."""
        shared = self.block.q.shape[1] // self.k.shape[1]
        by_key: Tensor = tensor.unflatten(2, (shared, -1))
        return by_key.flatten(1, 2)

    def scores(self) -> Tensor:
        """``[batch, kv_heads, shared * rows, n]``; minus infinity where hidden."""
        scores = (self.grouped(self.block.q) @ self.k.mT).mul_(self.block.scale)
        if self.block.causal:
            row = torch.arange(self.rows.start, self.rows.stop, device=scores.device)
            hidden = row.unsqueeze(-1) < torch.arange(self.k.shape[2], device=scores.device)
            scores.masked_fill_(hidden.repeat(scores.shape[2] // len(row), 1), -torch.inf)
        return scores


def _pieces(block: Block) -> Iterator[_Piece]:
    k = block.k.to(accumulated(block.k.dtype))
    batch, heads, rows, _ = block.q.shape
    some = max(1, SCORES_AT_A_TIME // (batch * heads * k.shape[2]))
    for start in range(0, rows, some):
        yield _Piece(block, k, slice(start, min(start + some, rows)))


_KERNELS = {
    "cpu": (_cpu, _cpu_backward),
    "flash": (_flash, _flash_backward),
    "efficient": (_efficient, _efficient_backward),
    "plain": (_plain, _plain_backward),
}


# What queries, keys and values have to be, before they meet a kernel or another rank.


def checked(name: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the three, cast as autocast casts for attention, after a look at shapes and dtypes."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ParallelError(
            f"{name}: {shapes}; expected [batch, heads, sequence of this rank, head_dim] of each, "
            "as for scaled_dot_product_attention"
        )
    if not (q.shape[0] == k.shape[0] == v.shape[0] and k.shape[:3] == v.shape[:3]):
        raise ParallelError(
            f"{name}: {shapes}; expected one batch size, and as many heads and tokens in k as in v"
        )
    if q.shape[3] != k.shape[3]:
        raise ParallelError(
            f"{name}: {shapes}; expected one head_dim in q and k, got {q.shape[3]} and {k.shape[3]}"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise DegreeError(
            f"{name}: the {k.shape[1]} heads of k and v do not divide the {q.shape[1]} heads of q; "
            "expected each of them to serve as many query heads"
        )
    q = as_autocast(q)
    k = as_autocast(k)
    v = as_autocast(v)
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        raise ParallelError(
            f"{name}: q is {q.dtype} on {q.device}, k {k.dtype} on {k.device}, v {v.dtype} on "
            f"{v.device}; expected one dtype and device: cast them, or use torch.autocast"
        )
    if not q.is_floating_point():
        raise ParallelError(f"{name}: q, k and v are {q.dtype}; expected a floating point dtype")
    return q, k, v


def check_causal(name: str, q: Tensor, k: Tensor, halves: bool) -> None:
    if q.shape[2] != k.shape[2]:
        raise DegreeError(
            f"{name}: is_causal with {q.shape[2]} queries and {k.shape[2]} keys on this rank; "
            "expected as many, because a query is one of the sequence's own tokens"
        )
    if halves and q.shape[2] % 2:
        raise DegreeError(
            f"{name}: this rank's part of the sequence has {q.shape[2]} tokens, and a balanced "
            "part is two chunks of one length; pad the sequence to a multiple of two chunks for "
            "each rank before shard_sequence, or shard and call with balanced=False"
        )


# Keys and values that go round a ring of ranks, while each of them is computed with.

_OVERLAPPED = AllToAllOptions()
if hasattr(_OVERLAPPED, "asyncOp"):  # unknown before torch 2.8, which overlaps anyway
    _OVERLAPPED.asyncOp = True


class Pair:
    def __init__(self, memory: Tensor, k_shape: torch.Size, v_shape: torch.Size) -> None:
        k, v = memory.split([k_shape.numel(), v_shape.numel()])
        self.memory = memory
        self.k = k.view(k_shape)
        self.v = v.view(v_shape)

    @classmethod
    def zeros(cls, k: Tensor, v: Tensor, dtype: torch.dtype) -> Pair:
        return cls(k.new_zeros(k.numel() + v.numel(), dtype=dtype), k.shape, v.shape)


class Moving:
    """A pair that has set out for the next rank, while another comes from the one before."""

    # It is an all-to-all in which the others get nothing: every backend has that. Collective.

    def __init__(self, sent: Pair, group: ProcessGroup) -> None:
        self._sent = sent  # its memory stays until it has left
        self._received = torch.empty_like(sent.memory)
        size = group.size()
        rank = group.rank()
        count = sent.memory.numel()
        to = [0] * size
        from_ = [0] * size
        to[(rank + 1) % size] = from_[(rank - 1) % size] = count
        self._work: Work | None = None
        if torch.compiler.is_compiling():
            dist.all_to_all_single(self._received, sent.memory, from_, to, group)
        else:
            self._work = group.alltoall_base(self._received, sent.memory, from_, to, _OVERLAPPED)

    def arrived(self) -> Pair:
        if self._work is not None:
            self._work.wait()
        return Pair(self._received, self._sent.k.shape, self._sent.v.shape)


class Round:
    """One trip of every rank's keys and values to every rank, the next always on its way."""

    # Each step gives the rank that `pair` comes from, this rank first. Hold no view of a pair
    # beyond its step, and there are never more than two of them.

    def __init__(self, k: Tensor, v: Tensor, group: ProcessGroup) -> None:
        self.pair = Pair(torch.cat([k.flatten(), v.flatten()]), k.shape, v.shape)
        self._group = group

    def __iter__(self) -> Iterator[int]:
        rank = self._group.rank()
        size = self._group.size()
        for step in range(size - 1):
            moving = Moving(self.pair, self._group)
            yield (rank - step) % size
            self.pair = moving.arrived()
            del moving  # and with it what was sent
        yield (rank + 1) % size


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: ProcessGroup | None = None,
    is_causal: bool = False,
    balanced: bool = True,
    scale: float | None = None,
) -> Tensor:
    """Return this rank's rows of the attention over a sequence that the ranks share.

    It is what `scaled_dot_product_attention` gives for the whole sequence. No rank ever holds more
    than its own part and two others' keys and values, and no scores, so memory is O(s/n).
    While a block is computed, the next keys and values are on their way (n - 1 exchanges
    forward, twice as many backward). Blocks that a causal mask hides are not computed. Parts are
    summed in float32, float64 in float64.

    With one rank, or before anything is initialized, it is `scaled_dot_product_attention`.
    torch.compile traces it whole; exchanges do not overlap then.

    Collective: every rank of the group calls this, with equal shapes and arguments; what the
    others pass cannot be checked here. So it is with backward.

    Args:
        q: ``[batch, heads, s/n, head_dim]``, this rank's part (`shard_sequence`).
        k: ``[batch, kv_heads, s/n, head_dim]``; ``kv_heads`` divides ``heads``.
        v: ``[batch, kv_heads, s/n, value_dim]``.
        group: The ranks that share the sequence; default: the context-parallel group.
        is_causal: Whether a token sees those before it, and itself, only.
        balanced: Which part is whose, as in `shard_sequence`. Without ``is_causal`` it makes no
            difference.
        scale: Of the scores; ``head_dim ** -0.5`` if None.

    Raises:
        DegreeError: ``is_causal`` with other numbers of queries than of keys, or ``balanced`` with
            an odd number; the key heads do not divide the query heads.
        ParallelError: Shapes, dtypes or devices of q, k and v do not fit. In backward: a second
            derivative is asked for.
    """
    ranks = context_group(group)
    q, k, v = checked("ring_attention", q, k, v)
    if is_causal:
        check_causal("ring_attention", q, k, balanced and ranks is not None)
    if ranks is None or not q.numel() or not k.numel():
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=is_causal, scale=scale, enable_gqa=grouped
        )
    if scale is None:
        scale = q.shape[-1] ** -0.5
    return applied(_Ring, q, k, v, ranks, is_causal, balanced, scale)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup, *options: Any
    ) -> Tensor:
        ctx.group = group
        ctx.plan = _Plan(group.rank(), *options)
        out, lse = _forward(ctx.plan, group, _with_contiguous_last_dim(q), k, v)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise ParallelError(
                "ring_attention: a second derivative is asked for (create_graph=True), which the "
                "kernels do not have; ulysses_attention has it, with an attention that has"
            )
        # All three are computed, whichever is asked for: so every rank exchanges as often.
        q, k, v, out, lse = ctx.saved_tensors
        known = _with_contiguous_last_dim(q), grad.contiguous(), out, lse
        dq, dk, dv = _backward(ctx.plan, ctx.group, known, k, v)
        grads = zip((dq, dk, dv), (q, k, v), ctx.needs_input_grad, strict=False)
        return *(grad.to(one.dtype) if need else None for grad, one, need in grads), *[None] * 4


def _forward(
    plan: _Plan, group: ProcessGroup, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    round_ = Round(k, v, group)
    for source in round_:
        seen = plan.seen(source, q.shape[2])
        if seen is None:
            continue
        block = plan.block(seen, q, round_.pair)
        part, part_lse = _KERNELS[_kernel(block)][0](block)
        if source == plan.rank:
            out = part.to(accumulated(q.dtype))
            lse = part_lse
        else:
            _merge_(out[:, :, seen.queries], lse[:, :, seen.queries], part, part_lse)
        del block, part  # before the next one is made
    return out, lse


def _merge_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    total = torch.logaddexp(lse, part_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1))
    out.addcmul_(part.to(out.dtype), (part_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


def _backward(
    plan: _Plan, group: ProcessGroup, known: tuple[Tensor, ...], k: Tensor, v: Tensor
) -> Gradients:
    """Send keys and values round again, and behind them the gradients that they collect."""
    # The gradients of a rank's own keys set out with the first rank that adds to them, and end at
    # the one they belong to, where its own share has stayed.
    wide = accumulated(k.dtype)
    length = known[0].shape[2]
    returning: Moving | None = None
    round_ = Round(k, v, group)
    for source in round_:
        seen = plan.seen(source, length)
        share = None
        if seen is not None:
            share = _share(plan, seen, known, round_.pair)
        if source == plan.rank:
            assert share is not None
            dq, dk, dv = (each.to(wide) for each in share)
            del share
            continue
        collected = Pair.zeros(k, v, wide) if returning is None else returning.arrived()
        if seen is not None and share is not None:
            dq[:, :, seen.queries] += share[0]
            collected.k[:, :, seen.keys] += share[1]
            collected.v[:, :, seen.keys] += share[2]
        returning = Moving(collected, group)
        del share, collected  # before the next ones are made
    assert returning is not None
    collected = returning.arrived()
    return dq, dk.add_(collected.k), dv.add_(collected.v)


def _share(plan: _Plan, seen: _Seen, known: tuple[Tensor, ...], pair: Pair) -> Gradients:
    q, *others = known
    rows = (each[:, :, seen.queries] for each in others)
    block = plan.block(seen, q, pair)
    return _KERNELS[_kernel(block)][1](block, *rows)


class _Seen(NamedTuple):
    """Which of this rank's queries see which of some rank's keys, and whether causally."""

    queries: slice
    keys: slice
    causal: bool


_ALL = slice(None)


class _Plan(NamedTuple):
    rank: int
    is_causal: bool
    balanced: bool
    scale: float

    def seen(self, source: int, length: int) -> _Seen | None:
        """Return what this rank's queries see of a rank's keys; None where all is hidden."""
        # A rank's own part is causal within itself, also where it is two chunks. Of two ranks'
        # chunks, the lower rank's first comes before both of the other's, its last after both.
        if not self.is_causal:
            return _Seen(_ALL, _ALL, False)
        if source == self.rank:
            return _Seen(_ALL, _ALL, True)
        if not self.balanced:
            if source < self.rank:
                return _Seen(_ALL, _ALL, False)
            return None
        if source < self.rank:
            return _Seen(_ALL, slice(length // 2), False)
        return _Seen(slice(length // 2, None), _ALL, False)

    def block(self, seen: _Seen, q: Tensor, pair: Pair) -> Block:
        k = pair.k[:, :, seen.keys]
        v = pair.v[:, :, seen.keys]
        return Block(q[:, :, seen.queries], k, v, seen.causal, self.scale)


def _with_contiguous_last_dim(tensor: Tensor) -> Tensor:
    """The tensor with its last dim contiguous, as kernels want it."""
    if tensor.stride(-1) == 1:
        return tensor
    return tensor.contiguous()
