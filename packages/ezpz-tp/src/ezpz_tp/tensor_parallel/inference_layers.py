"""Megatron-LM's layers for inference over Transformer Engine: their names, which models import.

Building one is an error; asking whether a layer is one is answered.

Source: NVIDIA/Megatron-LM megatron/core/tensor_parallel/inference_layers.py, 2026-08-22.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .mappings import (
    gather_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

__all__ = [
    "InferenceColumnParallelLinear", "InferenceLayerNormColumnParallelLinear", "InferenceLinear",
    "InferenceRowParallelLinear", "inference_all_gather_from_tensor_model_parallel_region",
    "inference_reduce_scatter_to_sequence_parallel_region", "is_inference_column_parallel_linear",
]  # fmt: skip


class InferenceLinear(nn.Module):
    """Refuses to be built.

    Raises:
        NotImplementedError: Always.
    """

    def __init__(self, *args: object, **options: object) -> None:
        del args, options
        raise NotImplementedError(
            f"{type(self).__name__} needs Transformer Engine and is not supported; expected "
            "transformer_impl='local'"
        )


class InferenceColumnParallelLinear(InferenceLinear):
    """See `InferenceLinear`."""


class InferenceLayerNormColumnParallelLinear(InferenceLinear):
    """See `InferenceLinear`."""


class InferenceRowParallelLinear(InferenceLinear):
    """See `InferenceLinear`."""


def is_inference_column_parallel_linear(module: object) -> bool:
    """Return whether a layer is one of these, which none is."""
    return isinstance(
        module, (InferenceColumnParallelLinear, InferenceLayerNormColumnParallelLinear)
    )


def inference_all_gather_from_tensor_model_parallel_region(
    x: Tensor, tp_group: ProcessGroup, config: object, barrier_before: bool = False
) -> Tensor:
    """See `gather_from_tensor_model_parallel_region`."""
    del config, barrier_before
    return gather_from_tensor_model_parallel_region(x, tp_group)


def inference_reduce_scatter_to_sequence_parallel_region(
    x: Tensor, tp_group: ProcessGroup, config: object
) -> Tensor:
    """See `reduce_scatter_to_sequence_parallel_region`."""
    del config
    return reduce_scatter_to_sequence_parallel_region(x, tp_group)
