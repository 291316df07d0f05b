"""Megatron-LM's layers: its constructors and return values over `ezpz_tp`'s layers.

They take a configuration, and return ``(output, bias)``, where the bias is None unless
``skip_bias_add`` leaves its addition to the caller.

Source: NVIDIA/Megatron-LM megatron/core/tensor_parallel/layers.py, 2026-08-22.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ezpz_tp._errors import DegreeError, ParallelError
from ezpz_tp._groups.default import index_or_alone, size_or_alone
from ezpz_tp._layers import linear as _layers
from ezpz_tp._layers.attributes import (
    copy_gtp_attributes,
    copy_tensor_model_parallel_attributes,
    param_is_not_gtp_duplicate,
    param_is_not_tensor_parallel_duplicate,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
    set_tensor_model_parallel_attributes,
)
from ezpz_tp._layers.initialize import InitMethod, initialize_from_whole
from ezpz_tp._regions.mappings import scatter_to_tensor_parallel_region
from ezpz_tp._training.random import EXPERT_PARALLEL_RNG, MODEL_PARALLEL_RNG, get_rng_tracker

from ._embedding import VocabParallelEmbedding
from ._linear import linear_with_frozen_weight, linear_with_grad_accumulation_and_async_allreduce
from ._settings import read_settings, refuse
from ._state_dict import ExtraState, allow_without_extra_state

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "copy_gtp_attributes",
    "copy_tensor_model_parallel_attributes",
    "linear_with_frozen_weight",
    "linear_with_grad_accumulation_and_async_allreduce",
    "param_is_not_gtp_duplicate",
    "param_is_not_tensor_parallel_duplicate",
    "set_defaults_if_not_set_tensor_model_parallel_attributes",
    "set_tensor_model_parallel_attributes",
]


class ColumnParallelLinear(ExtraState, _layers.ColumnParallelLinear):
    """`ezpz_tp.ColumnParallelLinear` with Megatron-LM's constructor and return value.

    Args:
        input_size: Size of the last dim of the input.
        output_size: Size of the last dim of the whole output.
        config: A `ModelParallelConfig`, or any object with some of its attributes.
        init_method: Fills a tensor of the full weight's shape, in place.
        bias: Add a bias.
        gather_output: Return all output features on every rank.
        stride: Number of matrices that are stacked in the weight and split each by itself.
        keep_master_weight_for_test: Keep the full weight as ``master_weight``.
        skip_bias_add: Return the bias instead of adding it.
        skip_weight_param_allocation: Have no weight: it is given to ``forward``, as by an output
            layer that is tied to the embedding.
        embedding_activation_buffer: Only None.
        grad_output_buffer: Only None.
        is_expert: An expert's layer, split over the expert tensor-parallel group. Where there are
            several expert ranks, they start from different weights, and the caller communicates.
        tp_comm_buffer_name: Without effect, as in Megatron-LM.
        disable_grad_reduce: Leave the gradient of the input partial.
        tp_group: Default: the (expert) tensor-parallel group.
        name: Without effect, as in Megatron-LM.
        output_dtype: Only that of the parameters.
        pg_collection: Without effect; a ``gtp_remat`` group of several ranks is refused.

    Raises:
        DegreeError: The degree does not divide ``output_size``, or is not the configuration's.
        NotImplementedError: An argument or a setting is not supported.

    Collective: every rank of the group builds the layer and calls it.
    """

    weight: nn.Parameter | None  # type: ignore[assignment]
    bias: nn.Parameter | None

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: InitMethod,
        bias: bool = True,
        gather_output: bool = False,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        skip_weight_param_allocation: bool = False,
        embedding_activation_buffer: list[Tensor] | None = None,
        grad_output_buffer: list[Tensor] | None = None,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        disable_grad_reduce: bool = False,
        tp_group: ProcessGroup | None = None,
        name: str | None = None,
        output_dtype: torch.dtype | None = None,
        pg_collection: Any = None,
    ) -> None:
        del tp_comm_buffer_name, name
        layer = "ColumnParallelLinear"
        settings = read_settings(layer, config, tp_group, pg_collection, is_expert)
        refuse(layer, "embedding_activation_buffer", embedding_activation_buffer, None)
        refuse(layer, "grad_output_buffer", grad_output_buffer, None)
        refuse(layer, "output_dtype", output_dtype, None, settings.dtype)
        if settings.sequence_parallel and settings.degree == 1:
            warnings.warn(
                f"{layer}: config.sequence_parallel is on, but the tensor-parallel degree is 1: "
                "there is no one to share the sequence with, so it is off",
                stacklevel=2,
            )
        # Known before the parameters are reset, at the end of the parent's constructor.
        self.config: Any = config
        self.initialize: bool = settings.initialize
        super().__init__(
            input_size,
            output_size,
            bias,
            gather_output,
            init_method,
            stride,
            keep_master_weight_for_test and not skip_weight_param_allocation,
            sequence_parallel=settings.sequence_parallel and not settings.leaves_communication,
            skip_bias_add=skip_bias_add,
            tp_group=settings.tp_group,
            seed=settings.seed,
            # A weight that is not to be is not allocated either.
            device="meta" if skip_weight_param_allocation else settings.device,
            dtype=settings.dtype,
        )
        if skip_weight_param_allocation:
            self.weight = None
            if self.bias is not None:
                here = nn.Parameter(torch.zeros_like(self.bias, device=settings.device))
                copy_tensor_model_parallel_attributes(here, self.bias)
                self.bias = here
        self.input_size: int = input_size
        self.output_size: int = output_size
        self.output_size_per_partition: int = output_size // self.tp_size
        self.is_expert: bool = is_expert
        self.disable_grad_reduce: bool = disable_grad_reduce
        self.reduce_input_gradient: bool = not (
            disable_grad_reduce or settings.leaves_communication
        )
        for parameter in self.parameters():
            parameter.allreduce = settings.is_reduced_with_model  # type: ignore[attr-defined]
        allow_without_extra_state(self)

    def reset_parameters(self) -> None:
        """Fill the parameters, if the configuration wants that."""
        if not self.initialize:
            return
        if self.weight is not None:
            super().reset_parameters()
        elif self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, nn.Parameter | None]:
        """Apply the layer to ``[..., input_size]``.

        Args:
            input_: As of `ezpz_tp.ColumnParallelLinear`.
            weight: Used instead of the layer's own: ``[output_size / tp, input_size]``.
            runtime_gather_output: Overrides ``gather_output``.

        Returns:
            The output, and the bias if ``skip_bias_add``, else None.

        Raises:
            ParallelError: There is no weight, or one of another shape.
        """
        if weight is None:
            if self.weight is None:
                raise ParallelError(
                    "ColumnParallelLinear has no weight of its own, as "
                    "skip_weight_param_allocation=True; expected forward(input_, weight=...)"
                )
            weight = self.weight
        elif weight.shape != (self.output_size_per_partition, self.input_size):
            raise DegreeError(
                f"ColumnParallelLinear: the weight given is {tuple(weight.shape)}; expected "
                f"({self.output_size_per_partition}, {self.input_size}) at degree {self.tp_size}"
            )
        output = self.multiply(input_, weight, None if self.skip_bias_add else self.bias)
        if self.gather_output if runtime_gather_output is None else runtime_gather_output:
            output = self.gather(output)
        return output, self.bias if self.skip_bias_add else None


class RowParallelLinear(ExtraState, _layers.RowParallelLinear):
    """`ezpz_tp.RowParallelLinear` with Megatron-LM's constructor and return value.

    Args:
        input_size: Size of the last dim of the whole input.
        output_size: Size of the last dim of the output.
        config: A `ModelParallelConfig`, or any object with some of its attributes.
        init_method: Fills a tensor of the full weight's shape, in place.
        bias: Add a bias.
        input_is_parallel: The input is this rank's features; has to be under sequence
            parallelism.
        skip_bias_add: Return the bias instead of adding it; has to be where an expert's layer
            leaves communication to the caller.
        stride: As of `ColumnParallelLinear`, along the input features.
        keep_master_weight_for_test: Keep the full weight as ``master_weight``.
        is_expert: As of `ColumnParallelLinear`: the partial products are then not summed.
        tp_comm_buffer_name: Without effect, as in Megatron-LM.
        tp_group: Default: the (expert) tensor-parallel group.
        name: Without effect, too.
        pg_collection: Without effect; a ``gtp_remat`` group of several ranks is refused.

    Raises:
        DegreeError: The degree does not divide ``input_size``, or is not the configuration's.
        NotImplementedError: A setting is not supported.
        ParallelError: The arguments contradict each other.

    Collective: every rank of the group builds the layer and calls it.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: InitMethod,
        bias: bool,
        input_is_parallel: bool,
        skip_bias_add: bool,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: ProcessGroup | None = None,
        name: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        del tp_comm_buffer_name, name
        layer = "RowParallelLinear"
        settings = read_settings(layer, config, tp_group, pg_collection, is_expert)
        if settings.sequence_parallel and not input_is_parallel:
            raise ParallelError(
                f"{layer}: config.sequence_parallel needs input_is_parallel=True: the input is "
                "the whole sequence of this rank's features"
            )
        if settings.leaves_communication and not skip_bias_add:
            raise ParallelError(
                f"{layer}: is_expert needs skip_bias_add=True: the caller sums the partial "
                "products, and the bias comes after the sum"
            )
        self.config: Any = config
        self.initialize: bool = settings.initialize
        super().__init__(
            input_size,
            output_size,
            bias,
            input_is_parallel,
            init_method,
            stride,
            keep_master_weight_for_test,
            sequence_parallel=settings.sequence_parallel and not settings.leaves_communication,
            skip_bias_add=skip_bias_add,
            tp_group=settings.tp_group,
            seed=settings.seed,
            device=settings.device,
            dtype=settings.dtype,
        )
        self.input_size: int = input_size
        self.output_size: int = output_size
        self.input_size_per_partition: int = input_size // self.tp_size
        self.is_expert: bool = is_expert
        self.leaves_communication: bool = settings.leaves_communication
        for parameter in self.parameters():
            parameter.allreduce = settings.is_reduced_with_model  # type: ignore[attr-defined]
        if self.bias is not None:
            self.bias.sequence_parallel = settings.sequence_parallel  # type: ignore[attr-defined]
        allow_without_extra_state(self)

    def reset_parameters(self) -> None:
        """Fill the parameters, if the configuration wants that."""
        if self.initialize:
            super().reset_parameters()

    def forward(self, input_: Tensor) -> tuple[Tensor, nn.Parameter | None]:
        """Apply the layer; the input and output are those of `ezpz_tp.RowParallelLinear`.

        Returns:
            The output, and the bias if ``skip_bias_add``, else None.
        """
        if self.leaves_communication:
            if self.tp_group is not None and not self.input_is_parallel:
                input_ = scatter_to_tensor_parallel_region(input_, self.tp_group)
            return nn.functional.linear(input_, self.weight), self.bias
        output = super().forward(input_)
        return output if isinstance(output, tuple) else (output, None)


def _initialize_affine_weight_gpu(
    weight: Tensor,
    init_method: InitMethod,
    partition_dim: int,
    stride: int = 1,
    is_expert: bool = False,
) -> None:
    """Fill a shard from this rank's own random stream: the full weight depends on the degree."""
    set_tensor_model_parallel_attributes(weight, True, partition_dim, stride)
    with get_rng_tracker().fork(EXPERT_PARALLEL_RNG if is_expert else MODEL_PARALLEL_RNG):
        init_method(weight)


def _initialize_affine_weight_cpu(
    weight: Tensor,
    output_size: int,
    input_size: int,
    per_partition_size: int,
    partition_dim: int,
    init_method: InitMethod,
    stride: int = 1,
    return_master_weight: bool = False,
    *,
    params_dtype: torch.dtype = torch.float32,
    rank: int | None = None,
    world_size: int | None = None,
    skip_set_tensor_parallel_attributes: bool = False,
) -> Tensor | None:
    """Fill a shard from the full weight, drawn in float32 from torch's default generator."""
    if not skip_set_tensor_parallel_attributes:
        set_tensor_model_parallel_attributes(weight, True, partition_dim, stride)
    del per_partition_size  # the weight has it
    if rank is None or world_size is None:
        rank, world_size = index_or_alone("tensor"), size_or_alone("tensor")
    full = initialize_from_whole(
        weight,
        (output_size, input_size),
        partition_dim,
        rank,
        world_size,
        init_method,
        stride=stride,
        dtype=torch.float32,
        device="cpu",
    )
    return full.to(params_dtype) if return_master_weight else None
