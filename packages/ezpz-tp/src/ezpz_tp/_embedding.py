"""Embeddings of which each rank holds a part: some of the rows, or some of the columns."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp
from torch.nn import functional
from torch.nn.init import xavier_normal_

from ._errors import DegreeError, ParallelError
from ._init import InitMethod, held_part
from ._linear import ParallelModule
from ._mappings import (
    all_reduce_,
    applied,
    copy_gradient,
    gather_from_tensor_parallel_region,
    gather_gradient,
    reduce_scatter,
    vocabulary_range,
    vocabulary_rows,
)

# Looking up rows of a vocabulary of which each rank holds a stretch, as one autograd function.
#
# The sum over the ranks works in place on what the lookup just made, and backward skips the ids
# that are not this rank's instead of adding rows of zeros: compared with an embedding, a mask and
# a region function in a row, that saves two passes over the output and one over its gradient.


def vocabulary_lookup(
    weight: Tensor,
    rows: Tensor,
    foreign: Tensor,
    group: ProcessGroup,
    *,
    padding_row: int | None = None,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    sequence_parallel: bool = False,
) -> Tensor:
    """Return the embeddings of ids, each of which is a row of one rank's weight.

    What `VocabParallelEmbedding` computes, as a function. Collective: every rank of the group
    calls this.

    Args:
        weight: ``[rows, embedding_dim]``, this rank's part of the table.
        rows: ``[...]``, int32 or int64: the row of each id in this rank's weight; any valid row
            where the id is another rank's.
        foreign: ``[...]``, bool: whether the id is another rank's.
        group: The tensor-parallel group.
        padding_row: A row that gets no gradient.
        scale_grad_by_freq: As of `torch.nn.Embedding`.
        sparse: As of `torch.nn.Embedding`.
        sequence_parallel: Scatter the result along dim 0.

    Returns:
        ``[..., embedding_dim]``, the same on all ranks; under sequence parallelism this rank's
        part of dim 0.
    """
    flags = (padding_row, scale_grad_by_freq, sparse, sequence_parallel)
    return applied(_Lookup, weight, rows, foreign, group, flags)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        rows: Tensor,
        foreign: Tensor,
        group: ProcessGroup,
        flags: tuple[int | None, bool, bool, bool],
    ) -> Tensor:
        ctx.save_for_backward(rows, foreign)
        ctx.shape = weight.shape
        ctx.group = group
        ctx.flags = flags
        output = torch.embedding(weight, rows)
        if output.device.type == "cpu" and not torch.compiler.is_compiling():
            # Whole rows: several times as fast there as a mask that is broadcast.
            output.view(-1, output.shape[-1]).index_fill_(
                0, foreign.reshape(-1).nonzero().view(-1), 0
            )
        else:
            output.masked_fill_(foreign.unsqueeze(-1), 0)
        if flags[-1]:
            return reduce_scatter(output, 0, group)
        return all_reduce_(output, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        rows, foreign = ctx.saved_tensors
        padding_row, by_frequency, sparse, sequence_parallel = ctx.flags
        regained = copy_gradient
        if sequence_parallel:
            regained = gather_gradient
        grad = regained(grad, ctx.group)
        count, width = ctx.shape
        # An extra row collects, and as "padding" skips, what has no gradient here.
        rows = rows.masked_fill(foreign, count)
        if padding_row is not None:
            rows.masked_fill_(rows == padding_row, count)
        if sparse:
            own = (rows != count).reshape(-1).nonzero().view(-1)
            values = grad.reshape(-1, width).index_select(0, own)
            indices = rows.reshape(-1).index_select(0, own).unsqueeze(0)
            gradient = torch.sparse_coo_tensor(
                indices, values, (count, width), check_invariants=False
            )
        else:
            gradient = torch.ops.aten.embedding_dense_backward(
                grad, rows, count + 1, count, by_frequency
            )[:count]
        return gradient, None, None, None, None


# What the embeddings have in common: a table, of which each rank holds a part.


class EmbeddingTable(ParallelModule):
    """One table, split along ``partition_dim``, and what both embeddings do with it."""

    padding_idx: int | None

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None,
        max_norm: float | None,
        norm_type: float,
        scale_grad_by_freq: bool,
        sparse: bool,
        init_method: InitMethod,
        tp_group: ProcessGroup | None,
        seed: int | None,
        init: str,
    ) -> None:
        sizes = {"num_embeddings": num_embeddings, "embedding_dim": embedding_dim}
        super().__init__(sizes, init_method, tp_group, seed, init)
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise DegreeError(
                f"{type(self).__name__}: padding_idx={padding_idx} is not an id of the "
                f"vocabulary; expected 0 to {num_embeddings - 1}, or as many from its end"
            )
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.full_shape: tuple[int, int] = (num_embeddings, embedding_dim)
        self.padding_idx: int | None = None
        if padding_idx is not None:
            self.padding_idx = padding_idx % num_embeddings
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.scale_grad_by_freq = scale_grad_by_freq
        self.sparse = sparse

    def set_zeros(self) -> None:
        """Set the row of ``padding_idx``, on the rank that has it."""
        row = self.padding_row()
        if row is not None:
            local, (first, _) = held_part(self.weight)
            if first <= row < first + local.shape[0]:
                local[row - first].zero_()

    def extra_repr(self) -> str:
        """Return the sizes, the options and this rank's place."""
        return (
            f"{self.num_embeddings}, {self.embedding_dim}"
            + ("" if self.padding_idx is None else f", padding_idx={self.padding_idx}")
            + ("" if self.max_norm is None else f", max_norm={self.max_norm}")
            + f", tp={self.tp_rank}/{self.tp_size}"
        )

    def padding_row(self) -> int | None:
        """Return the row here that gets no gradient."""
        return self.padding_idx

    def look_up_whole(self, ids: Tensor) -> Tensor:
        """Return the embeddings, on a rank that holds all rows: what `nn.Embedding` does."""
        if self._built_early:
            self.check_not_early()
        return nn.functional.embedding(
            ids,
            self.weight,
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )

    def check_device(self, ids: Tensor) -> None:
        """Raise `ParallelError` where the ids are on another device, or a DTensor."""
        self.check_plain(ids)
        if ids.device != self.weight.device:
            raise ParallelError(
                f"{type(self).__name__}({self.extra_repr()}): the ids are on {ids.device} and "
                f"the weight on {self.weight.device}; move one of them"
            )

    def out_of_vocabulary_error(self, ids: Tensor) -> IndexError:
        """Return what to raise once a lookup has failed."""
        low, high = (int(bound) for bound in ids.aminmax())
        return IndexError(
            f"{type(self).__name__}({self.extra_repr()}): id {low if low < 0 else high} is not in "
            f"the vocabulary; expected 0 to {self.num_embeddings - 1}"
        )


class VocabParallelEmbedding(EmbeddingTable):
    """An embedding with the vocabulary split over the ranks; each has ``ceil(V / tp)`` rows.

    A degree that does not divide the vocabulary pads it at its end, with rows of zeros that no
    id has and that get no gradient.

    Args:
        num_embeddings: V, the size of the vocabulary, over all ranks.
        embedding_dim: Size of a row.
        padding_idx: An id, of the whole vocabulary, whose row is zero at first and gets no
            gradient.
        max_norm: Scale rows that are looked up down to this norm, in place.
        norm_type: The p of that norm.
        scale_grad_by_freq: Divide a row's gradient by the times its id is in the batch.
        sparse: Make the gradient of the weight a sparse tensor.
        init_method: Fills a tensor of the full weight's shape, in place.
        sequence_parallel: Return this rank's part of dim 0.
        tp_group: Default: the tensor-parallel group.
        seed: Of the weight; default: drawn from torch's generator.
        init: ``"whole"`` makes the full weight on every rank, from torch's default generator, as
            fairscale's and torch's layers do, so that the same seed gives the same weight.

    Raises:
        DegreeError: The ``padding_idx`` is not in the vocabulary.
        IndexError: In forward: an id is not (on accelerators, as of `torch.nn.Embedding`, an
            assertion on the device).
        NotInitializedError: In forward: tensor parallelism was initialized after the layer.

    Collective: every rank of the group builds the layer and calls it, with the same ids.

    >>> VocabParallelEmbedding(50, 8, padding_idx=0)
    VocabParallelEmbedding(50, 8, padding_idx=0, tp=0/1)
    """

    partition_dim = 0
    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        init_method: InitMethod = xavier_normal_,
        *,
        sequence_parallel: bool = False,
        tp_group: ProcessGroup | None = None,
        seed: int | None = None,
        init: str = "blocks",
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
    ) -> None:
        how = max_norm, norm_type, scale_grad_by_freq, sparse, init_method, tp_group, seed, init
        super().__init__(num_embeddings, embedding_dim, padding_idx, *how)
        # With one rank there is no sequence to share.
        self.sequence_parallel: bool = sequence_parallel and self.tp_group is not None
        rows = vocabulary_rows(num_embeddings, self.tp_size)
        self.num_embeddings_per_partition: int = rows
        start, end = vocabulary_range(num_embeddings, self.tp_rank, self.tp_size)
        self.vocab_start_index: int = start
        self.vocab_end_index: int = end
        of = self.full_shape
        self.weight = self.part(rows, embedding_dim, of=of, padded=True, device=device, dtype=dtype)
        self.reset_parameters()

    def forward(self, input_: Tensor) -> Tensor:
        """Look up ids ``[...]``, of int32 or int64, the same on every rank.

        Returns:
            ``[..., embedding_dim]``, the same on all ranks; under sequence parallelism this
            rank's part of dim 0.
        """
        self.check_device(input_)
        try:
            if self.tp_group is None:
                return self.look_up_whole(input_)
            if self.sequence_parallel:
                self.shard_size("dim 0 of the ids", input_.shape[0] if input_.dim() else 1)
            return self._look_up(input_, self.tp_group)
        except IndexError as error:
            raise self.out_of_vocabulary_error(input_) from error

    def _look_up(self, ids: Tensor, group: ProcessGroup) -> Tensor:
        count = self.num_embeddings_per_partition
        local = ids - self.tp_rank * count
        rows = local.clamp(0, count - 1)
        foreign = rows != local
        # No row: the lookup itself refuses them, as `nn.Embedding` does, on any device and with
        # no wait for it.
        outside = ids != ids.clamp(0, self.num_embeddings - 1)
        if self.max_norm is not None:
            with torch.no_grad():
                own = rows[~(foreign | outside)]
                torch.embedding_renorm_(self.weight.detach(), own, self.max_norm, self.norm_type)
        return vocabulary_lookup(
            self.weight,
            rows.masked_fill_(outside, count),
            foreign,
            group,
            padding_row=self.padding_row(),
            scale_grad_by_freq=self.scale_grad_by_freq,
            sparse=self.sparse,
            sequence_parallel=self.sequence_parallel,
        )

    def padding_row(self) -> int | None:
        """Return the row of ``padding_idx``, on the rank that has it."""
        row = self.padding_idx
        first = self.vocab_start_index
        if row is not None and first <= row < self.vocab_end_index:
            return row - first
        return None


class ParallelEmbedding(EmbeddingTable):
    """An embedding with its columns split over the ranks; each has all ids (fairscale's).

    Args:
        max_norm: Scale rows that are looked up down to this norm, of the whole row, in place.
        keep_master_weight_for_test: Keep the full weight as ``master_weight``.
        gather_output: Return whole rows on every rank; False returns this rank's columns.

    The other arguments are those of `VocabParallelEmbedding`.

    Raises:
        DegreeError: The degree does not divide ``embedding_dim``; or as of
            `VocabParallelEmbedding`, as are the errors of forward.

    Collective: every rank of the group builds the layer and calls it, with the same ids.
    """

    partition_dim = 1
    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        init_method: InitMethod = xavier_normal_,
        keep_master_weight_for_test: bool = False,
        *,
        gather_output: bool = True,
        tp_group: ProcessGroup | None = None,
        seed: int | None = None,
        init: str = "blocks",
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
    ) -> None:
        how = max_norm, norm_type, scale_grad_by_freq, sparse, init_method, tp_group, seed, init
        super().__init__(num_embeddings, embedding_dim, padding_idx, *how)
        self.gather_output = gather_output
        columns = self.shard_size("embedding_dim", embedding_dim)
        self.embedding_dim_per_partition: int = columns
        of = self.full_shape
        self.weight = self.part(num_embeddings, columns, of=of, device=device, dtype=dtype)
        self.reset_parameters()
        self.master_weight: Tensor | None = (
            self.get_master_weight() if keep_master_weight_for_test else None
        )

    def forward(self, input_: Tensor) -> Tensor:
        """Look up ids ``[...]``, of int32 or int64, the same on every rank.

        Returns:
            ``[..., embedding_dim]``, or ``[..., embedding_dim / tp]`` if it is not gathered.
        """
        self.check_device(input_)
        try:
            if self.tp_group is None:
                return self.look_up_whole(input_)
            if self.max_norm is not None:
                self._apply_max_norm(input_, self.tp_group, self.max_norm)
            output = functional.embedding(
                input_,
                self.weight,
                self.padding_idx,
                scale_grad_by_freq=self.scale_grad_by_freq,
                sparse=self.sparse,
            )
        except IndexError as error:
            raise self.out_of_vocabulary_error(input_) from error
        if self.gather_output:
            output = gather_from_tensor_parallel_region(output, self.tp_group)
        return output

    @torch.no_grad()
    def _apply_max_norm(self, ids: Tensor, group: ProcessGroup, max_norm: float) -> None:
        """Do what `torch.embedding_renorm_` does, to rows that are longer than what is here."""
        seen = ids.unique().long()
        rows = self.weight.detach().index_select(0, seen)
        p = self.norm_type
        exact = rows.double()
        if math.isinf(p):
            norm = all_reduce_(exact.abs().amax(1), group, ReduceOp.MAX)
        elif p == 2:
            norm = all_reduce_(exact.square().sum(1), group).sqrt()
        else:
            norm = all_reduce_(exact.abs().pow(p).sum(1), group).pow(1 / p)
        scale = torch.where(norm > max_norm, max_norm / (norm + 1e-7), 1.0).unsqueeze(1)
        self.weight.detach().index_copy_(0, seen, (exact * scale).to(rows.dtype))
