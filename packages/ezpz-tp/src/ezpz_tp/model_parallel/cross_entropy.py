"""fairscale's vocabulary-parallel cross entropy: `ezpz_tp`'s own.

Source: facebookresearch/fairscale fairscale/nn/model_parallel/cross_entropy.py, 2025-04-26.
"""

from ezpz_tp._cross_entropy import vocab_parallel_cross_entropy

__all__ = ["vocab_parallel_cross_entropy"]
