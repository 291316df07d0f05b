"""The layers a Llama is made of: torch's own, or those of ezpz_tp. Both start from one seed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import ezpz_tp

from .config import LlamaConfig

_STD = 0.02
"""Of the first weights (as of GPT-2 and of transformers' Llama)."""


@dataclass(frozen=True)
class Build:
    """How a Llama's layers are made.

    Attributes:
        config: Sizes.
        parallel: By ezpz_tp, over its groups.
        sequence_parallel: Norms and residuals are of ``1/tp`` of the sequence, which is dim 0.
        seed: Of the model's weights.
        device: As torch's; of the meta device nothing is filled.
        dtype: As torch's.
    """

    config: LlamaConfig
    parallel: bool = False
    sequence_parallel: bool = False
    seed: int = 0
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None

    def column(self, outputs: int, tensor: int, *, pad_output: bool = False) -> nn.Module:
        """Return a projection out of the residual stream, its outputs split over ranks.

        Its gradient is not summed over the ranks: that `enter` does, once for several of them.
        """
        options = self._options(tensor, _STD)
        if not self.parallel:
            return SeededLinear(self.config.dim, outputs, **options)
        made = ezpz_tp.ColumnParallelLinear(
            self.config.dim, outputs, bias=False, gather_output=False, pad_output=pad_output,
            **options,
        )  # fmt: skip
        made.reduce_input_gradient = False
        return made

    def row(self, inputs: int, tensor: int) -> nn.Module:
        """Return a projection into the residual stream, its inputs split over ranks."""
        # What each of 2 L projections adds is scaled so that their sum is not (GPT-2).
        options = self._options(tensor, _STD / (2 * self.config.layers) ** 0.5)
        if not self.parallel:
            return SeededLinear(inputs, self.config.dim, **options)
        return ezpz_tp.RowParallelLinear(
            inputs, self.config.dim, bias=False, input_is_parallel=True,
            sequence_parallel=self.sequence_parallel, **options,
        )  # fmt: skip

    def embedding(self, tensor: int) -> nn.Module:
        """Return the table of the tokens' vectors."""
        options = self._options(tensor, _STD)
        if not self.parallel:
            return SeededEmbedding(self.config.vocab_size, self.config.dim, **options)
        return ezpz_tp.VocabParallelEmbedding(
            self.config.vocab_size, self.config.dim, sequence_parallel=self.sequence_parallel,
            **options,
        )  # fmt: skip

    def norm(self) -> nn.RMSNorm:
        """Return an RMS norm (Zhang and Sennrich, arXiv:1910.07467)."""
        made = nn.RMSNorm(
            self.config.dim, eps=self.config.norm_eps, device=self.device, dtype=self.dtype
        )
        if self.sequence_parallel:
            ezpz_tp.mark_sequence_parallel(made.weight)
        return made

    def enter(self, hidden: Tensor) -> Tensor:
        """Hand the residual stream to column-parallel layers: gather or copy it, once for all.

        In backward their gradients are summed over the ranks.
        """
        if self.sequence_parallel:
            return ezpz_tp.gather_from_sequence_parallel_region(hidden)
        return ezpz_tp.copy_to_tensor_parallel_region(hidden) if self.parallel else hidden

    def _options(self, tensor: int, std: float) -> dict[str, Any]:
        return {
            "init_method": partial(nn.init.normal_, std=std),
            "seed": self.seed * 2**24 + tensor,
            "device": self.device,
            "dtype": self.dtype,
        }


class SeededLinear(nn.Linear):
    """torch's linear layer without bias, filled as ezpz_tp fills its own of that seed."""

    def __init__(
        self, in_features: int, out_features: int, *, init_method: Any, seed: int, **more: Any
    ) -> None:
        self._init_method, self.seed = init_method, seed
        super().__init__(in_features, out_features, bias=False, **more)

    def reset_parameters(self) -> None:
        """Fill the weight, the same on every rank."""
        _fill(self.weight, self._init_method, self.seed)


class SeededEmbedding(nn.Embedding):
    """torch's embedding, filled as ezpz_tp fills its own of that seed."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, *, init_method: Any, seed: int, **more: Any
    ) -> None:
        self._init_method, self.seed = init_method, seed
        super().__init__(num_embeddings, embedding_dim, **more)

    def reset_parameters(self) -> None:
        """Fill the table, the same on every rank."""
        _fill(self.weight, self._init_method, self.seed)


def _fill(weight: Tensor, init_method: Any, seed: int) -> None:
    ezpz_tp.initialize_shard(weight, weight.shape, None, 0, 1, init_method, seed=seed)
