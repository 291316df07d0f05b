"""The cross entropy of logits whose vocabulary is sharded over the tensor-parallel ranks.

One collective: each rank sends its maximum, its sum of exponentials under that maximum, and the
target's logit if it has it; whoever gathers these has the loss, bitwise the same on every rank.
(A maximum and then a sum, as in Megatron-LM, are two and need a backend that passes NaN on.)

Backward computes the softmax again from the logits, which the caller mostly keeps anyway, so
that two numbers a token are all that is saved. Keeping the softmax instead costs a tensor of the
logits' size; in fp32 it saves a tenth of the time, in bf16 it takes more (1024 x 16000 on one CPU
core, forward + backward: 106 ms against 115, and 104 against 81).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ._current import tensor_group
from ._errors import DegreeError, ParallelError
from ._mappings import (
    all_gather,
    applied,
    copy_to_tensor_parallel_region,
    gather_from_sequence_parallel_region,
)

_CACHED_ELEMENTS = 2**20
"""Logits at a time on a CPU: 4 MiB in fp32, where forward is twice as fast as all at once."""
_BOUNDED_ELEMENTS = 2**24
"""Logits at a time on a device: enough work for each kernel in 64 MiB."""
_LEAST_ROWS = 256
"""Tokens at a time where their logits are computed too."""


class _Terms(NamedTuple):
    group: ProcessGroup | None
    shard: int  # this rank's columns, with padding
    columns: int  # those that are in the vocabulary
    first: int  # the first one's index in the vocabulary
    vocab_size: int
    smoothing: float
    ignore_index: int
    z_loss: float
    rows: int  # tokens at a time
    seen: bool  # whether all targets are known to be right


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    tp_group: ProcessGroup | None = None,
    *,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    vocab_size: int | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """Return each token's cross entropy from logits that are sharded over the vocabulary.

    Equal to ``torch.nn.functional.cross_entropy(..., reduction="none")`` of the full logits in
    float32. One all-gather of 3 numbers a token (4 with label smoothing) in forward, nothing in
    backward. Collective: every rank of the group calls this, with the same target.

    Args:
        vocab_parallel_logits: ``[..., V/tp]``, floating point: rank r has the columns from
            ``r * V/tp`` on. Not changed; its gradient has its dtype.
        target: ``[...]``, int64: indices in the whole vocabulary, or ``ignore_index``.
        label_smoothing: The part of each target, 0 to 1, that is spread evenly over the whole
            vocabulary, as in torch (Megatron-LM spreads it over each rank's shard).
        tp_group: Default: the tensor-parallel group.
        ignore_index: Tokens with this target have loss 0 and no gradient.
        z_loss: Adds ``z_loss * logsumexp(logits)**2`` (Chowdhery et al., arXiv:2204.02311).
        vocab_size: The true vocabulary where the columns are padded beyond it: those take no
            part and get gradient 0. Default: all columns.
        chunk_size: Tokens at a time, which bounds the float32 working memory. Default: as many
            as make 64 MiB (on a CPU 4 MiB, which is faster); under torch.compile all.

    Returns:
        ``[...]``, float32; float64 if the logits are.

    Raises:
        ValueError: Shapes, dtypes or options do not fit (`DegreeError` for ``vocab_size``).
        IndexError: A target is outside the vocabulary (on a device: a device-side assertion).
    """
    what = "vocab_parallel_cross_entropy"
    shard = vocab_parallel_logits.shape[-1]
    options = label_smoothing, ignore_index, z_loss, chunk_size
    terms = _terms(what, vocab_parallel_logits, shard, target, tp_group, vocab_size, *options)
    wide = vocab_parallel_logits.dtype in (torch.float32, torch.float64)
    if terms.group is None and wide and not z_loss and chunk_size is None:
        loss = torch.nn.functional.cross_entropy(
            vocab_parallel_logits[..., : terms.columns].reshape(-1, terms.columns),
            target.reshape(-1),
            ignore_index=ignore_index,
            reduction="none",
            label_smoothing=label_smoothing,
        )
        return loss.view(target.shape)
    return applied(_CrossEntropy, vocab_parallel_logits, target, *terms)


def vocab_parallel_linear_cross_entropy(
    input_: Tensor,
    weight: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    tp_group: ProcessGroup | None = None,
    *,
    sequence_parallel: bool = False,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    vocab_size: int | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """Return each token's cross entropy from the input of the output layer: no logits are kept.

    Equal to `vocab_parallel_cross_entropy` of ``input_ @ weight.T``. The logits of a few tokens
    exist at a time, and are computed once more in backward: a third more arithmetic of this layer
    for the memory of all logits and of their gradient. Collective, as that is; in backward the
    gradient of the input is summed over the ranks.

    Args:
        input_: ``[..., H]``, floating point, the same on every rank of the group.
        weight: ``[V/tp, H]``, of the input's dtype: this rank's rows, as of a
            `ColumnParallelLinear` without bias, or of a tied `VocabParallelEmbedding`.
        target: ``[...]``, int64, as of `vocab_parallel_cross_entropy`.
        label_smoothing, tp_group, ignore_index, z_loss, vocab_size: As there.
        sequence_parallel: The input is this rank's part of dim 0, and is gathered first.
        chunk_size: As there. Default: at least 256.

    Returns:
        ``[...]``, float32; float64 if the input is.

    Raises:
        ValueError: As there, or ``weight`` does not fit the input.
        IndexError: As there.
    """
    what = "vocab_parallel_linear_cross_entropy"
    device = input_.device.type
    if torch.is_autocast_enabled(device):
        # As `linear` would; here, because backward is not under it.
        dtype = torch.get_autocast_dtype(device)
        input_ = input_.to(dtype)
        weight = weight.to(dtype)
    if weight.dim() != 2 or weight.dtype != input_.dtype or weight.shape[-1] != input_.shape[-1]:
        raise ValueError(
            f"{what}: input {tuple(input_.shape)} of {input_.dtype} and weight "
            f"{tuple(weight.shape)} of {weight.dtype}; expected [..., H] and [V/tp, H] of one dtype"
        )
    if sequence_parallel:
        input_ = gather_from_sequence_parallel_region(input_, tp_group=tp_group)
    else:
        input_ = copy_to_tensor_parallel_region(input_, tp_group)
    options = label_smoothing, ignore_index, z_loss, chunk_size
    terms = _terms(what, input_, len(weight), target, tp_group, vocab_size, *options)
    if chunk_size is None:
        # Each chunk goes through the whole weight and its gradient: a matrix product's worth.
        terms = terms._replace(rows=max(terms.rows, _LEAST_ROWS))
    return applied(_LinearCrossEntropy, input_, weight, target, *terms)


def _terms(
    what: str, of: Tensor, shard: int, target: Tensor, tp_group: ProcessGroup | None,
    vocab_size: int | None, smoothing: float, ignore_index: int, z_loss: float,
    chunk_size: int | None,
) -> _Terms:  # fmt: skip
    _check(what, of, target)
    if not 0 <= smoothing <= 1:
        raise ValueError(f"{what}: label_smoothing={smoothing}; expected 0 to 1")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"{what}: chunk_size={chunk_size}; expected at least 1 token")
    group = tensor_group(tp_group)
    rank = 0
    degree = 1
    if group is not None:
        rank = group.rank()
        degree = group.size()
    if vocab_size is None:
        vocab_size = shard * degree
    elif not 0 < vocab_size <= shard * degree:
        raise DegreeError(
            f"{what}: vocab_size={vocab_size}; expected 1 to {shard * degree}, the {shard} columns "
            f"of each of {degree} ranks"
        )
    seen = _check_targets(what, target, vocab_size, ignore_index)
    columns = min(max(vocab_size - rank * shard, 0), shard)
    if chunk_size is None and torch.compiler.is_compiling():
        chunk_size = target.numel()
    elif chunk_size is None:
        elements = _BOUNDED_ELEMENTS
        if of.device.type == "cpu":
            elements = _CACHED_ELEMENTS
        chunk_size = elements // max(shard, 1)
    place = group, shard, columns, rank * shard, vocab_size
    return _Terms(*place, smoothing, ignore_index, z_loss, max(chunk_size, 1), seen)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, *values: Any) -> Tensor:
        terms = _Terms(*values)
        pieces = logits.reshape(-1, terms.shard)[:, : terms.columns]
        loss, saved = _loss(lambda rows: pieces[rows], logits.dtype, target, terms)
        ctx.save_for_backward(logits, *saved)
        ctx.terms = terms
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, *saved = ctx.saved_tensors
        terms: _Terms = ctx.terms
        gradient = _Gradient("vocab_parallel_cross_entropy", grads[0], saved, terms)
        pieces = logits.reshape(-1, terms.shard)
        if terms.rows >= len(pieces) and terms.columns == terms.shard:
            result = gradient.of(pieces, slice(None)).to(logits.dtype)
        else:
            result = pieces.new_empty(pieces.shape)
            result[:, terms.columns :] = 0
            for rows in _chunks(len(pieces), terms):
                kept = result[rows, : terms.columns]
                gradient.of(pieces[rows, : terms.columns], rows, kept)
        return result.view(logits.shape), *(None for _ in range(1 + len(terms)))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_: Tensor, weight: Tensor, target: Tensor, *values: Any) -> Tensor:
        terms = _Terms(*values)
        flat = input_.reshape(-1, input_.shape[-1])
        used = weight[: terms.columns]
        loss, saved = _loss(lambda rows: flat[rows] @ used.T, input_.dtype, target, terms)
        ctx.save_for_backward(input_, weight, *saved)
        ctx.terms = terms
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        input_, weight, *saved = ctx.saved_tensors
        terms: _Terms = ctx.terms
        gradient = _Gradient("vocab_parallel_linear_cross_entropy", grads[0], saved, terms)
        flat = input_.reshape(-1, input_.shape[-1])
        used = weight[: terms.columns]
        by_input = torch.empty_like(flat)
        # Of many sums, in the precision of the loss.
        by_weight = torch.zeros_like(weight, dtype=saved[-1].dtype)
        for rows in _chunks(len(flat), terms):
            logits = flat[rows] @ used.T
            piece = gradient.of(logits, rows, logits)
            by_input[rows] = piece @ used
            if by_weight.dtype == piece.dtype:
                by_weight[: terms.columns].addmm_(piece.T, flat[rows])
            else:
                by_weight[: terms.columns] += piece.T @ flat[rows]
            del logits, piece  # before the next are made
        others = (None for _ in range(1 + len(terms)))
        return by_input.view(input_.shape), by_weight.to(weight.dtype), *others


def _loss(
    piece_of: Callable[[slice], Tensor], dtype: torch.dtype, target: Tensor, terms: _Terms
) -> tuple[Tensor, list[Tensor]]:
    """Return each token's loss, and what `_Gradient` needs of it; a piece is of some tokens."""
    ignored = target.reshape(-1) == terms.ignore_index
    index, mine = _local_index(target.reshape(-1), ignored, terms)
    own = _local_statistics(piece_of, dtype, index, mine, terms)
    maximum, total, predicted, mean = _reduce_over_ranks(own, terms)
    # The logit under the maximum first: at logits of 1000 the other order loses 4 digits.
    log_total = total.log()
    loss = log_total - (predicted - maximum)
    if terms.smoothing:
        loss = loss * (1 - terms.smoothing) + (log_total - mean) * terms.smoothing
    # d(loss)/d(logsumexp), over the sum that makes exponentials a softmax
    weight = total.reciprocal()
    if terms.z_loss:
        logsumexp = maximum + log_total
        loss = loss + terms.z_loss * logsumexp.square()
        weight = weight * (1 + 2 * terms.z_loss * logsumexp)
    saved = [index, mine, ignored, maximum, weight]
    return loss.masked_fill(ignored, 0).view(target.shape), saved


class _Gradient:
    """The gradient by the logits of some tokens, given that by the losses of all."""

    def __init__(self, what: str, grad: Tensor, saved: list[Tensor], terms: _Terms) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise ParallelError(
                f"{what} has no second derivative; leave out create_graph=True, or take the cross "
                "entropy of gathered logits"
            )
        index, mine, ignored, maximum, weight = (each.unsqueeze(-1) for each in saved)
        grad = grad.reshape(-1, 1).masked_fill(ignored, 0)
        self._index = index
        self._maximum = maximum
        self._weight = weight * grad
        self._at_target = grad * mine * (1 - terms.smoothing)
        self._even: Tensor | None = None
        if terms.smoothing:
            self._even = grad * (terms.smoothing / terms.vocab_size)

    def of(self, logits: Tensor, rows: slice, out: Tensor | None = None) -> Tensor:
        """Return it, in ``out`` where that is given; these may be the logits themselves."""
        index = self._index[rows]
        weight = self._weight[rows]
        eager = None
        if not torch.compiler.is_compiling():
            eager = out
        in_place = None
        if eager is not None and eager.dtype == weight.dtype:
            in_place = eager
        wide = torch.sub(logits, self._maximum[rows], out=in_place).exp_()
        if self._even is not None:
            wide.mul_(weight).sub_(self._even[rows])
            weight = torch.ones_like(weight)
        has_columns = logits.shape[-1] > 0
        if has_columns:
            # Of the tokens that are not this rank's, index 0 gets what it has.
            own = wide.gather(1, index).mul_(weight).sub_(self._at_target[rows])
        # A product that is rounded as it is written: no float32 of it goes through memory.
        result = torch.mul(wide, weight, out=eager)
        if has_columns:
            result.scatter_(1, index, own.to(result.dtype))
        if out is None or eager is not None:
            return result
        return out.copy_(result)


def _local_index(target: Tensor, ignored: Tensor, terms: _Terms) -> tuple[Tensor, Tensor]:
    index = target
    if terms.first:
        index = target - terms.first
    mine = (index >= 0) & (index < terms.columns)
    if 0 <= terms.ignore_index < terms.vocab_size:
        mine &= ~ignored
    index = index * mine
    if not terms.seen:
        known = (target >= 0) & (target < terms.vocab_size) | ignored
        # An index that gather itself refuses, on every rank and without waiting for the device.
        index = torch.where(known, index, terms.shard)
    return index, mine


def _local_statistics(
    piece_of: Callable[[slice], Tensor],
    dtype: torch.dtype,
    index: Tensor,
    mine: Tensor,
    terms: _Terms,
) -> Tensor:
    # The maximum of this rank's columns, the sum of exponentials under it, the target's logit
    # or 0, and for smoothing the sum of all under the maximum.
    dtype = torch.float64 if dtype == torch.float64 else torch.float32
    # A maximum of -inf, of a shard that is all masked, would make NaN out of -inf - -inf.
    lowest = torch.finfo(dtype).min
    if not terms.columns:
        empty = torch.zeros(index.shape, dtype=dtype, device=index.device)
        own = [torch.full_like(empty, lowest), empty, empty, empty]
        return torch.stack(own if terms.smoothing else own[:3])
    parts = []
    for rows in _chunks(len(index), terms):
        piece = piece_of(rows)
        predicted = piece.gather(1, index[rows].unsqueeze(-1)).squeeze(-1).to(dtype)
        predicted = torch.where(mine[rows], predicted, 0)
        maximum = piece.amax(-1).to(dtype).clamp_(min=lowest)
        below = piece - maximum.unsqueeze(-1)
        sums = []
        if terms.smoothing:
            sums = [below.sum(-1)]
        parts.append(torch.stack([maximum, below.exp_().sum(-1), predicted, *sums]))
        del piece, below  # before the next are made
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, 1)


def _reduce_over_ranks(own: Tensor, terms: _Terms) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # Sum and mean are of the logits less the maximum. Without smoothing the last is not used.
    if terms.group is None:
        maximum = own[0]
        total = own[1]
        predicted = own[2]
        return maximum, total, predicted, own[-1] / terms.vocab_size
    parts = all_gather(own, 0, terms.group).unflatten(0, (-1, len(own)))
    maxima = parts[:, 0]
    maximum = maxima.amax(0)
    offset = maxima - maximum
    total = (parts[:, 1] * offset.exp()).sum(0)
    predicted = parts[:, 2].sum(0)
    if not terms.smoothing:
        return maximum, total, predicted, predicted
    # Full ranks come first, then at most one that is partly padding, then empty ones.
    full, rest = divmod(terms.vocab_size, terms.shard)
    mean = parts[:, 3].sum(0) + offset[:full].sum(0) * terms.shard
    if rest:
        mean = mean + offset[full] * rest
    return maximum, total, predicted, mean / terms.vocab_size


def _chunks(tokens: int, terms: _Terms) -> Iterator[slice]:
    """The tokens, so many at a time; one empty chunk of none."""
    for start in range(0, max(tokens, 1), terms.rows):
        yield slice(start, start + terms.rows)


def _check(what: str, given: Tensor, target: Tensor) -> None:
    problem = ""
    if not given.is_floating_point() or target.dtype != torch.int64:
        problem = (
            f"logits are {given.dtype} and the target is {target.dtype}; expected floating "
            "point and torch.int64"
        )
    elif target.shape != given.shape[:-1]:
        problem = (
            f"logits {tuple(given.shape)} and target {tuple(target.shape)}; expected a target "
            f"of shape {tuple(given.shape[:-1])}"
        )
    elif target.device != given.device:
        problem = f"logits on {given.device} and target on {target.device}; move the target"
    if problem:
        raise ValueError(f"{what}: {problem}")


def _check_targets(what: str, target: Tensor, vocab_size: int, ignore_index: int) -> bool:
    """Raise IndexError for a target outside the vocabulary; return whether there was a look."""
    # On a device that would wait for it, and tensors that only stand for others have no values.
    if torch.compiler.is_compiling() or type(target) is not Tensor or target.device.type != "cpu":
        return False
    if not target.numel():
        return True
    lowest, highest = (bound.item() for bound in target.aminmax())
    if lowest >= 0 and highest < vocab_size:
        return True
    wrong = ((target < 0) | (target >= vocab_size)) & (target != ignore_index)
    if wrong.any():
        place = wrong.nonzero()[0].tolist()
        raise IndexError(
            f"{what}: target {int(target[tuple(place)])} at {place}; "
            f"expected 0 to {vocab_size - 1}, or ignore_index={ignore_index}"
        )
    return True
