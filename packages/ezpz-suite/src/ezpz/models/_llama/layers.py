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
        if not self.parallel:
            return self._plain(nn.Linear, self.config.dim, outputs, tensor, _STD)
        options = self._options(tensor, _STD)
        made = ezpz_tp.ColumnParallelLinear(
            self.config.dim, outputs, bias=False, gather_output=False, pad_output=pad_output,
            **options,
        )  # fmt: skip
        made.reduce_input_gradient = False
        return made

    def row(self, inputs: int, tensor: int) -> nn.Module:
        """Return a projection into the residual stream, its inputs split over ranks."""
        # What each of 2 L projections adds is scaled so that their sum is not (GPT-2).
        std = _STD / (2 * self.config.layers) ** 0.5
        if not self.parallel:
            return self._plain(nn.Linear, inputs, self.config.dim, tensor, std)
        options = self._options(tensor, std)
        return ezpz_tp.RowParallelLinear(
            inputs, self.config.dim, bias=False, input_is_parallel=True,
            sequence_parallel=self.sequence_parallel, **options,
        )  # fmt: skip

    def embedding(self, tensor: int) -> nn.Module:
        """Return the table of the tokens' vectors."""
        rows, columns = self.config.vocab_size, self.config.dim
        if not self.parallel:
            return self._plain(nn.Embedding, rows, columns, tensor, _STD)
        return ezpz_tp.VocabParallelEmbedding(
            rows, columns, sequence_parallel=self.sequence_parallel,
            **self._options(tensor, _STD),
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

    def _plain(
        self, kind: type[nn.Linear | nn.Embedding], first: int, second: int, tensor: int, std: float
    ) -> nn.Module:
        """Return a layer of torch's very class, by which FSDP2's units and others know it."""
        options = self._options(tensor, std)
        init_method, seed = options.pop("init_method"), options.pop("seed")
        options["device"] = self.device or torch.get_default_device()
        if kind is nn.Linear:
            options["bias"] = False
        # Without torch's own first weights, which would draw from everybody's generator.
        made: nn.Module = nn.utils.skip_init(kind, first, second, **options)
        fill = partial(_fill, made, init_method, seed)
        vars(made)["reset_parameters"] = fill
        fill()
        return made

    def _options(self, tensor: int, std: float) -> dict[str, Any]:
        return {
            "init_method": partial(nn.init.normal_, std=std),
            "seed": self.seed * 2**24 + tensor,
            "device": self.device,
            "dtype": self.dtype,
        }


def _fill(module: nn.Module, init_method: Any, seed: int) -> None:
    """Fill a weight as ezpz_tp fills its own of that seed: the same on every rank."""
    weight = module.get_parameter("weight")
    ezpz_tp.initialize_shard(weight, weight.shape, None, 0, 1, init_method, seed=seed)
