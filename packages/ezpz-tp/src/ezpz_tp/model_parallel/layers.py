"""fairscale's layers: `ezpz_tp`'s own, which have its constructors and return values.

Source: facebookresearch/fairscale fairscale/nn/model_parallel/layers.py, 2025-04-26.
"""

from ezpz_tp._embedding import ParallelEmbedding, VocabParallelEmbedding
from ezpz_tp._linear import ColumnParallelLinear, RowParallelLinear

__all__ = [
    "ColumnParallelLinear", "ParallelEmbedding", "RowParallelLinear", "VocabParallelEmbedding",
]  # fmt: skip
