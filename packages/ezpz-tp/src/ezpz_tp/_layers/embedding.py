"""Embeddings of which each rank holds a part: some of the rows, or some of the columns."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.nn import functional
from torch.nn.init import xavier_normal_

from ezpz_tp._regions.collectives import SUM, all_reduce_
from ezpz_tp._regions.mappings import gather_from_tensor_parallel_region

from .initialize import InitMethod
from .lookup import vocabulary_lookup
from .table import EmbeddingTable


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
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            sparse=sparse,
            init_method=init_method,
            tp_group=tp_group,
            seed=seed,
            init=init,
        )
        # With one rank there is no sequence to share.
        self.sequence_parallel: bool = sequence_parallel and self.tp_group is not None
        self.num_embeddings_per_partition: int = -(-num_embeddings // self.tp_size)
        rows = self.num_embeddings_per_partition
        self.vocab_start_index: int = min(self.tp_rank * rows, num_embeddings)
        self.vocab_end_index: int = min(self.vocab_start_index + rows, num_embeddings)
        self.make_weight(rows, embedding_dim, device=device, dtype=dtype)

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
            raise self.outside(input_) from error

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
        first, end = self.vocab_start_index, self.vocab_end_index
        here = self.padding_idx is not None and first <= self.padding_idx < end
        return self.padding_idx - first if self.padding_idx is not None and here else None


class ParallelEmbedding(EmbeddingTable):
    """An embedding with its columns split over the ranks; each has all ids (fairscale's).

    Args:
        num_embeddings: Size of the vocabulary.
        embedding_dim: Size of a row, over all ranks.
        padding_idx: An id whose row is zero at first and gets no gradient.
        max_norm: Scale rows that are looked up down to this norm, of the whole row, in place.
        norm_type: The p of that norm.
        scale_grad_by_freq: Divide a row's gradient by the times its id is in the batch.
        sparse: Make the gradient of the weight a sparse tensor.
        init_method: Fills a tensor of the full weight's shape, in place.
        keep_master_weight_for_test: Keep the full weight as ``master_weight``.
        gather_output: Return whole rows on every rank; False returns this rank's columns.
        tp_group: Default: the tensor-parallel group.
        seed: Of the weight; default: drawn from torch's generator.
        init: ``"whole"`` makes the full weight on every rank, from torch's default generator, as
            fairscale's and torch's layers do, so that the same seed gives the same weight.

    Raises:
        DegreeError: The degree does not divide ``embedding_dim``; or as of
            `VocabParallelEmbedding`, as are the errors of forward.

    Collective: every rank of the group builds the layer and calls it, with the same ids.
    """

    partition_dim = 1

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
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            sparse=sparse,
            init_method=init_method,
            tp_group=tp_group,
            seed=seed,
            init=init,
        )
        self.gather_output = gather_output
        self.embedding_dim_per_partition: int = self.shard_size("embedding_dim", embedding_dim)
        self.make_weight(
            num_embeddings, self.embedding_dim_per_partition, device=device, dtype=dtype
        )
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
                self._scale_down(input_, self.tp_group, self.max_norm)
            output = functional.embedding(
                input_,
                self.weight,
                self.padding_idx,
                scale_grad_by_freq=self.scale_grad_by_freq,
                sparse=self.sparse,
            )
        except IndexError as error:
            raise self.outside(input_) from error
        if self.gather_output:
            output = gather_from_tensor_parallel_region(output, self.tp_group)
        return output

    @torch.no_grad()
    def _scale_down(self, ids: Tensor, group: ProcessGroup, max_norm: float) -> None:
        """Do what `torch.embedding_renorm_` does, to rows that are longer than what is here."""
        seen = ids.unique().long()
        rows, p = self.weight.detach().index_select(0, seen), self.norm_type
        exact = rows.double()
        if math.isinf(p):
            norm = all_reduce_(exact.abs().amax(1), group, ReduceOp.MAX)
        elif p == 2:
            norm = all_reduce_(exact.square().sum(1), group, SUM).sqrt()
        else:
            norm = all_reduce_(exact.abs().pow(p).sum(1), group, SUM).pow(1 / p)
        scale = torch.where(norm > max_norm, max_norm / (norm + 1e-7), 1.0).unsqueeze(1)
        self.weight.detach().index_copy_(0, seen, (exact * scale).to(rows.dtype))
