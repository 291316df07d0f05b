"""Which tokens of a sequence are whose, and how each rank comes by its own.

In a balanced sequence of n ranks rank r holds chunks r and 2n - 1 - r of 2n: attention to what
came before costs as much on every rank (Megatron-LM, megatron/core/utils.py, and torch's
head-and-tail order). Otherwise rank r holds the r-th of n parts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.overrides import has_torch_function_unary

from ezpz_tp._errors import DegreeError
from ezpz_tp._groups.default import context_group
from ezpz_tp._groups.given import member
from ezpz_tp._regions.mappings import _Gather, applied
from ezpz_tp._regions.watched import watched


def shard_sequence(
    tensor: Tensor,
    dim: int,
    *,
    group: ProcessGroup | None = None,
    ulysses_group: ProcessGroup | None = None,
    balanced: bool = True,
) -> Tensor:
    """Keep this rank's part of a sequence that every rank of the group has. Nothing is sent.

    For tokens, labels and whatever else has the sequence as a dim; `sequence_positions` says
    where the part's tokens lie. `ring_attention`, `ulysses_attention` and `unified_attention`,
    told the same ``balanced``, take the parts.

    **The loss and gradients.** Each rank has the loss of its own tokens only, so sum it and divide
    by the number of tokens in all parts, of all data-parallel ranks:
    ``loss = losses.sum() / tokens_in_all``. Then the ranks' losses add up to the batch's mean, and
    the gradients of every parameter add up to its gradient: sum them over data x context, whose
    group is made by ``initialize_tensor_parallel(..., also=[("data", "context")])``. DDP over that
    group takes the mean: give it ``loss * group.size()``. That holds of parameters before this
    function too: its own gradient is zero at the tokens of other ranks.

    Args:
        tensor: The whole, the same on every rank.
        dim: That of the sequence.
        group: The ranks that share the sequence; default: the context-parallel group. For
            `unified_attention` the ring.
        ulysses_group: For `unified_attention`: the ranks that share a ring rank's part, each
            holding one stretch of it.
        balanced: Two chunks for each rank, from both ends. False: one.

    Returns:
        A new tensor with ``1 / n`` of the sequence; with one rank the tensor itself.

    Raises:
        DegreeError: The parts would differ in length; names the multiple that is needed.
    """
    if has_torch_function_unary(tensor):
        return watched(
            shard_sequence,
            tensor,
            dim,
            group=group,
            ulysses_group=ulysses_group,
            balanced=balanced,
        )
    ranks = _Ranks("shard_sequence", group, ulysses_group, balanced)
    if ranks.count == 1:
        return tensor
    length = _length(tensor, dim, "shard_sequence")
    parts = [tensor.narrow(dim, at, end - at) for at, end in ranks.spans(length)]
    if len(parts) == 1:  # a copy, so that the whole can be freed
        return parts[0].clone(memory_format=torch.contiguous_format)
    return torch.cat(parts, dim)


def unshard_sequence(
    tensor: Tensor,
    dim: int,
    *,
    group: ProcessGroup | None = None,
    ulysses_group: ProcessGroup | None = None,
    balanced: bool = True,
    sum_grads: bool = False,
) -> Tensor:
    """Join the ranks' parts of a sequence, in its order: the inverse of `shard_sequence`.

    Collective: every rank calls this, with the same shape: one all-gather for each group.

    Args:
        tensor: This rank's part.
        dim: That of the sequence.
        group: As for `shard_sequence`.
        ulysses_group: As for `shard_sequence`.
        balanced: As for `shard_sequence`.
        sum_grads: False where every rank goes on to compute the same, and so has the same
            gradient: each keeps its part of it. True where each computes something else (its
            queries' attention to all keys): the gradients are summed, by a reduce-scatter.

    Raises:
        DegreeError: ``balanced``, and the part is not two chunks of one length.
    """
    if has_torch_function_unary(tensor):
        return watched(
            unshard_sequence,
            tensor,
            dim,
            group=group,
            ulysses_group=ulysses_group,
            balanced=balanced,
            sum_grads=sum_grads,
        )
    ranks = _Ranks("unshard_sequence", group, ulysses_group, balanced)
    if ranks.count == 1:
        return tensor
    ranks.check(_length(tensor, dim, "unshard_sequence") * ranks.count)
    if ranks.ulysses is not None:
        tensor = applied(_Gather, tensor, dim, sum_grads, ranks.ulysses)
    if ranks.ring is not None:
        tensor = applied(_Gather, tensor, dim, sum_grads, ranks.ring)
        if balanced:
            chunks = tensor.chunk(2 * ranks.ring.size(), dim)
            tensor = torch.cat([*chunks[0::2], *chunks[-1::-2]], dim)
    return tensor


def rank_order(tensor: Tensor, dim: int, ranks: int) -> Tensor:
    """Put the chunks of a whole sequence in the order of the ranks that hold them, balanced."""
    chunks = tensor.chunk(2 * ranks, dim)
    return torch.cat([chunks[at] for rank in range(ranks) for at in (rank, -1 - rank)], dim)


def sequence_positions(
    length: int,
    *,
    group: ProcessGroup | None = None,
    ulysses_group: ProcessGroup | None = None,
    balanced: bool = True,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return where in the whole sequence this rank's tokens lie, for rotary embeddings and masks.

    Args:
        length: Of the whole sequence, in tokens.
        group: As for `shard_sequence`.
        ulysses_group: As for `shard_sequence`.
        balanced: As for `shard_sequence`.
        device: Of the result; torch's default device if None.

    Returns:
        ``[length / n]``, int64.

    Raises:
        DegreeError: The parts would differ in length; names the multiple that is needed.
    """
    ranks = _Ranks("sequence_positions", group, ulysses_group, balanced)
    spans = ranks.spans(length)
    return torch.cat([torch.arange(at, end, device=device) for at, end in spans])


class _Ranks:
    """Who shares a sequence: a ring, and for each of its ranks those that share the part of it."""

    def __init__(
        self,
        name: str,
        group: ProcessGroup | None,
        ulysses_group: ProcessGroup | None,
        balanced: bool,
    ) -> None:
        self.name = name
        self.ring = context_group(group)
        given = member(ulysses_group, "Ulysses")
        self.ulysses = given if given is not None and given.size() > 1 else None
        self.balanced = balanced and self.ring is not None
        self._rings = 1 if self.ring is None else self.ring.size()
        self._heads = 1 if self.ulysses is None else self.ulysses.size()
        self.count = self._rings * self._heads

    def check(self, length: int) -> None:
        """Raise unless the sequence divides into equal parts, and these into chunks."""
        chunks = 2 if self.balanced else 1
        multiple = self._rings * math.lcm(chunks, self._heads)
        if length % multiple:
            what = "in two chunks each " if self.balanced else ""
            raise DegreeError(
                f"{self.name}: the sequence has {length} tokens, which {self.count} ranks {what}"
                f"cannot share equally; expected a multiple of {multiple}: pad it to "
                f"{-(-length // multiple) * multiple}, and leave the padding out of the loss"
            )

    def spans(self, length: int) -> list[tuple[int, int]]:
        """Return from where to where in the whole this rank's tokens lie, in their order."""
        self.check(length)
        index = 0 if self.ring is None else self.ring.rank()
        if self.balanced:
            size = length // (2 * self._rings)
            starts = [index * size, (2 * self._rings - 1 - index) * size]
        else:
            size = length // self._rings
            starts = [index * size]
        if self.ulysses is None:
            return [(start, start + size) for start in starts]
        stretch = length // self.count
        low = self.ulysses.rank() * stretch
        spans = []
        for number, start in enumerate(starts):
            # What [low, low + stretch) of the part takes from this chunk of it.
            at = max(low - number * size, 0)
            end = min(low + stretch - number * size, size)
            if at < end:
                spans.append((start + at, start + end))
        return spans


def _length(tensor: Tensor, dim: int, name: str) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise DegreeError(
            f"{name}: dim {dim} of a tensor of shape {tuple(tensor.shape)}; expected the dim of "
            f"the sequence, {-tensor.dim()} to {tensor.dim() - 1}"
        )
    return tensor.shape[dim]
