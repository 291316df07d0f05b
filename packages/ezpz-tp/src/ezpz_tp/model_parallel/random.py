"""fairscale's random streams and checkpointing: its names over `ezpz_tp`'s.

Source: facebookresearch/fairscale fairscale/nn/model_parallel/random.py, 2025-04-26.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from ezpz_tp._random import RngTracker as CudaRNGStatesTracker
from ezpz_tp._random import checkpoint_activations, seed_as_megatron
from ezpz_tp._random import get_rng_tracker as get_cuda_rng_tracker

__all__ = [
    "CudaRNGStatesTracker", "checkpoint", "get_cuda_rng_tracker", "model_parallel_cuda_manual_seed",
]  # fmt: skip

Result = TypeVar("Result")


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """See `ezpz_tp.seed_model_parallel`; with an accelerator the CPU's stream is left alone."""
    seed_as_megatron(seed)


def checkpoint(function: Callable[..., Result], *args: Any) -> Result:
    """See `ezpz_tp.checkpoint_activations`."""
    return checkpoint_activations(function, *args)
