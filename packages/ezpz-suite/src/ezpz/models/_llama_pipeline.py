"""Llama over the stages of a pipeline."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

import ezpz_tp

from ._llama import Llama, LlamaConfig, llamas, mean_loss


class LlamaPipeline(ezpz_tp.Pipeline):
    """A rank's part of a Llama, and the steps of its training: made by `llama_pipeline`."""

    def shard_sequence(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's part of tokens or targets, as `Llama.shard_sequence`."""
        return next(llamas(self.module)).shard_sequence(tensor, dim)


def llama_pipeline(
    config: LlamaConfig,
    *,
    microbatches: int,
    schedule: str = "1f1b",
    virtual: int = 1,
    **options: Any,
) -> LlamaPipeline:
    """Return this rank's part of a parallel Llama, split by its blocks over the pipeline's ranks.

    ``pipeline.module`` is what this rank holds: a `Llama` with some of the blocks, named as in
    the whole model (with ``virtual`` above 1 several such). Its steps take the tokens and targets
    of a batch, where sequences are shared those that `LlamaPipeline.shard_sequence` keeps; the
    losses that they return are those of `Llama.loss`, of each microbatch.

    Embeddings that are tied want ``initialize_tensor_parallel(..., embedding=True)``. After a step
    call ``ezpz_tp.finalize_grads(pipeline.module, average_over="data")``, or over ``("data",
    "context")`` where sequences are shared, for DDP does not go around a stage.

    >>> import torch
    >>> pipeline = llama_pipeline(LlamaConfig(dim=64, layers=2, heads=4), microbatches=2)
    >>> tokens = torch.zeros(4, 16, dtype=torch.int64)
    >>> pipeline.step(tokens, tokens).shape
    torch.Size([2])

    Args:
        config: Sizes of the whole model.
        microbatches: As of `ezpz_tp.Pipeline`.
        schedule: As of `ezpz_tp.Pipeline`.
        virtual: As of `ezpz_tp.Pipeline`.
        options: As of `Llama`: ``sequence_parallel``, ``checkpoint``, ``seed``, ...

    Raises:
        DegreeError, ParallelError: See `ezpz_tp.Pipeline` and `Llama`.
    """
    options.setdefault("parallel", True)
    loss = partial(mean_loss, vocab_size=config.vocab_size, parallel=options["parallel"])
    return LlamaPipeline(
        partial(Llama, config, **options), layers=config.layers, microbatches=microbatches,
        loss=loss, schedule=schedule, virtual=virtual,
    )  # fmt: skip
