# ruff: noqa: SLF001 - torch has no public names for kernels that return the log-sum-exp
"""Attention of some queries to some keys: its output, and what it takes to merge it with others.

Attention to many keys is a weighted mean of attention to parts of them, and the weights follow
from each part's log-sum-exp of the scores (Rabe and Staats, arXiv:2112.05682). torch's fused
kernels return it, and their backward, given the output and the log-sum-exp over *all* keys, gives
one part's share of the gradients. None holds the matrix of scores.

=========  ====================================  ====================================
kernel     where                                 dtypes
=========  ====================================  ====================================
CPU        CPUs                                  float64, float32, bfloat16, float16
flash      CUDA and ROCm, where torch allows it  bfloat16, float16
efficient  CUDA and ROCm, where torch allows it  float32, and what flash refuses
plain      everywhere else                       any, some rows of scores at a time
=========  ====================================  ====================================
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

_aten: Any = torch.ops.aten

SCORES_AT_A_TIME = 1 << 22
"""The plain way holds this many scores, or those of one row of all heads if they are more."""

Gradients = tuple[Tensor, Tensor, Tensor]


class Block(NamedTuple):
    """Some queries, and the keys that they see. None of the tensors is empty.

    Attributes:
        q: ``[batch, heads, m, head_dim]``, its last dim contiguous, as those of k and v.
        k: ``[batch, kv_heads, n, head_dim]``; ``kv_heads`` divides ``heads``.
        v: ``[batch, kv_heads, n, value_dim]``.
        causal: Whether query i sees keys 0 to i only. Then m is n.
        scale: What the products of queries and keys are multiplied by.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    scale: float


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which blocks are summed: never less than float32."""
    return torch.promote_types(dtype, torch.float32)


def block_attention(block: Block) -> tuple[Tensor, Tensor]:
    """Return the attention to the block's keys alone, and the log-sum-exp of its scores.

    Returns:
        The output ``[batch, heads, m, value_dim]`` in the dtype of the queries or wider, and the
        log-sum-exp ``[batch, heads, m]`` in `accumulated` of it. Both are new.
    """
    forward = {"cpu": _cpu, "flash": _flash, "efficient": _efficient}.get(_kernel(block), _plain)
    return forward(block)


def block_attention_backward(block: Block, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    """Return the block's share of the gradients of its queries, keys and values.

    Args:
        block: As it was in forward.
        grad: Gradient of ``out``, with its last dim contiguous.
        out: The output of these queries over all keys, not only the block's.
        lse: The log-sum-exp of their scores, over all keys.

    Returns:
        New tensors of the shapes of q, k and v, in their dtype or wider.
    """
    backward = {
        "cpu": _cpu_backward,
        "flash": _flash_backward,
        "efficient": _efficient_backward,
    }.get(_kernel(block), _plain_backward)
    return backward(block, grad, out, lse)


def _kernel(block: Block) -> str:
    q, device = block.q, block.q.device.type
    if q.shape[-1] != block.v.shape[-1]:
        return "plain"
    if device == "cuda":
        # What torch itself asks before it takes a kernel; also whether the user forbids it.
        cuda: Any = torch.backends.cuda
        asked = cuda.SDPAParams(q, q, q, None, 0.0, block.causal, False)
        if q.shape[-1] % 8 == 0 and cuda.can_use_flash_attention(asked):
            return "flash"
        return "efficient" if cuda.can_use_efficient_attention(asked) else "plain"
    return "cpu" if device == "cpu" else "plain"


def _cpu(block: Block) -> tuple[Tensor, Tensor]:
    q, k, v = _repeated(block)
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, block.causal, scale=block.scale
    )
    return out, lse


def _cpu_backward(block: Block, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    q, k, v = _repeated(block)
    return _summed(
        block,
        *_aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, block.causal, scale=block.scale
        ),
    )


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
    q, k, v = _repeated(block)
    out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, block.causal, scale=block.scale
    )
    return out, lse[:, :, : q.shape[2]]  # the kernel pads the rows to a multiple of 32


def _efficient_backward(block: Block, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    q, k, v = _repeated(block)
    lse = F.pad(lse, (0, -lse.shape[2] % 32), value=torch.inf).contiguous()  # as it pads itself
    random = q.new_empty((), dtype=torch.int64)
    mask = [True, True, True, False]  # of the gradients that are wanted; there is no bias
    dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, None, out, lse, random, random, 0.0, mask, block.causal, scale=block.scale
    )
    return _summed(block, dq, dk, dv)


def _repeated(block: Block) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors with as many key heads as query heads: not every kernel lets heads share."""
    q, k, v, _, _ = block
    shared = q.shape[1] // k.shape[1]
    if shared == 1:
        return q, k, v
    return q, k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)


def _summed(block: Block, dq: Tensor, dk: Tensor, dv: Tensor) -> Gradients:
    """The gradients of key heads from those of the repeated ones."""
    kv_heads = block.k.shape[1]
    if dk.shape[1] == kv_heads:
        return dq, dk, dv
    wide = accumulated(dk.dtype)
    each = (grad.unflatten(1, (kv_heads, -1)).sum(2, dtype=wide) for grad in (dk, dv))
    return dq, *each


def _plain(block: Block) -> tuple[Tensor, Tensor]:
    outs, sums = [], []
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
        dq, dk, dv = [], torch.zeros_like(block.k, dtype=v.dtype), torch.zeros_like(v)
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
