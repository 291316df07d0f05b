"""Megatron-LM's embedding over `ezpz_tp`'s."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from ezpz_tp._layers import embedding as _embedding

from ._settings import read_settings
from ._state_dict import ShardedStateDict


class VocabParallelEmbedding(ShardedStateDict, _embedding.VocabParallelEmbedding):
    """`ezpz_tp.VocabParallelEmbedding` with Megatron-LM's constructor.

    Args:
        num_embeddings: Size of the vocabulary; the degree need not divide it.
        embedding_dim: Size of an embedding.
        init_method: Fills a tensor of the full weight's shape, in place.
        reduce_scatter_embeddings: Return this rank's part of the sequence, which comes first:
            ids ``[b, s]`` give ``[s / tp, b, h]``.
        config: A `ModelParallelConfig`, or any object with some of its attributes.
        tp_group: Default: the tensor-parallel group.
        pg_collection: Without effect; a ``gtp_remat`` group of several ranks is refused.

    Raises:
        DegreeError: The degree is not the configuration's.
        NotImplementedError: A setting is not supported.

    Collective: every rank of the group builds the layer and calls it.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: Callable[[Tensor], object],
        reduce_scatter_embeddings: bool = False,
        config: Any,
        tp_group: ProcessGroup | None = None,
        pg_collection: Any = None,
    ) -> None:
        settings = read_settings("VocabParallelEmbedding", config, tp_group, pg_collection)
        # Known before the parameters are reset, at the end of the parent's constructor.
        self.config: Any = config
        self.initialize: bool = settings.initialize
        super().__init__(
            num_embeddings,
            embedding_dim,
            init_method=init_method,
            sequence_parallel=reduce_scatter_embeddings,
            tp_group=settings.tp_group,
            device=settings.device,
            dtype=settings.dtype,
        )
        self.reduce_scatter_embeddings = reduce_scatter_embeddings

    def reset_parameters(self) -> None:
        """Fill the weight, if the configuration wants that."""
        if self.initialize:
            super().reset_parameters()

    def forward(self, input_: Tensor) -> Tensor:
        """Return the embeddings of ids ``[b, s]``.

        Returns:
            ``[b, s, h]`` on every rank, or ``[s / tp, b, h]`` with ``reduce_scatter_embeddings``.
        """
        # The ids are turned around, which are fewer numbers than their embeddings.
        return super().forward(input_.transpose(0, 1) if self.reduce_scatter_embeddings else input_)
