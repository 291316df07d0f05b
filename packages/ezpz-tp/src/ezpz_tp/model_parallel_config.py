"""Megatron-LM's ``ModelParallelConfig``: the part of it that layers read.

The layers of `ezpz_tp.tensor_parallel` take any object with these attributes, Megatron's own
included; what it lacks has the default below.

Source: NVIDIA/Megatron-LM megatron/core/model_parallel_config.py, 2026-08-22.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ._init import as_dtype


@dataclass
class ModelParallelConfig:
    """How layers are sharded, made and run.

    Args:
        tensor_model_parallel_size: Degree of tensor parallelism. A layer whose group has another
            size refuses it, unless it is 1, which says nothing.
        pipeline_model_parallel_size: Degree of pipeline parallelism; no layer reads it.
        virtual_pipeline_model_parallel_size: Stages a rank; no layer reads it.
        context_parallel_size: Degree of context parallelism; no layer reads it.
        expert_model_parallel_size: Degree of expert parallelism.
        expert_tensor_parallel_size: Degree of tensor parallelism within experts; None for
            ``tensor_model_parallel_size``.
        sequence_parallel: Activations between layers are sharded along the sequence.
        perform_initialization: False leaves weights as they were allocated, for a checkpoint.
        use_cpu_initialization: Make weights on the CPU, whatever accelerator there is.
        params_dtype: dtype of weights and biases; also by name, as in ``"bf16"``.
        fp16: Train in fp16; no layer reads it.
        bf16: Train in bf16; no layer reads it.
        deterministic_mode: No layer reads it: torch sums the gradient of an embedding in one order.
        pipeline_dtype: dtype that stages send; no layer reads it.
        async_tensor_model_parallel_allreduce: An older Megatron's; the input gradient's
            all-reduce always runs beside the weight gradient.
        gradient_accumulation_fusion: Only False: it needs a CUDA extension.
        defer_embedding_wgrad_compute: Only False.
        cpu_offloading: Only False.
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    sequence_parallel: bool = False
    perform_initialization: bool = True
    use_cpu_initialization: bool = False
    params_dtype: torch.dtype = torch.float32
    fp16: bool = False
    bf16: bool = False
    deterministic_mode: bool = False
    pipeline_dtype: torch.dtype | None = None
    async_tensor_model_parallel_allreduce: bool = True
    gradient_accumulation_fusion: bool = False
    defer_embedding_wgrad_compute: bool = False
    cpu_offloading: bool = False

    def __post_init__(self) -> None:
        if self.expert_tensor_parallel_size is None:
            self.expert_tensor_parallel_size = self.tensor_model_parallel_size
        self.params_dtype = as_dtype(self.params_dtype, "params_dtype")
        if self.pipeline_dtype is not None:
            self.pipeline_dtype = as_dtype(self.pipeline_dtype, "pipeline_dtype")


def setting(config: object, name: str) -> Any:
    """Return an attribute of a configuration, or its default where the object lacks it."""
    return getattr(config, name, getattr(ModelParallelConfig, name))
