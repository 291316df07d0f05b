"""Megatron-LM's vocabulary-parallel cross entropy: `ezpz_tp`'s own.

Label smoothing is torch's, with the mean over the whole vocabulary; Megatron-LM's takes the mean
over each rank's part, so that its loss differs between ranks.

Source: NVIDIA/Megatron-LM megatron/core/tensor_parallel/cross_entropy.py, 2026-08-22.
"""

from ezpz_tp._cross_entropy import VocabParallelCrossEntropy, vocab_parallel_cross_entropy

__all__ = ["VocabParallelCrossEntropy", "vocab_parallel_cross_entropy"]
