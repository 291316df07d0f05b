"""fairscale's random streams and checkpointing: its names over `ezpz_tp`'s.

Source: facebookresearch/fairscale fairscale/nn/model_parallel/random.py, 2025-04-26.
"""

from ezpz_tp._random import RngTracker as CudaRNGStatesTracker
from ezpz_tp._random import checkpoint_activations as checkpoint
from ezpz_tp._random import get_rng_tracker as get_cuda_rng_tracker
from ezpz_tp._random import seed_as_megatron as model_parallel_cuda_manual_seed

__all__ = [
    "CudaRNGStatesTracker", "checkpoint", "get_cuda_rng_tracker", "model_parallel_cuda_manual_seed",
]  # fmt: skip
