"""Megatron-LM's layers: its constructors and return values over `ezpz_tp`'s layers.

They take a configuration, and return ``(output, bias)``, where the bias is None unless
``skip_bias_add`` leaves its addition to the caller.

Source: NVIDIA/Megatron-LM megatron/core/tensor_parallel/layers.py, 2026-08-22.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ezpz_tp import _embedding
from ezpz_tp import _linear as _layers
from ezpz_tp._current import current_state, index_or_alone, size_or_alone, tensor_group
from ezpz_tp._data import _backend_device
from ezpz_tp._errors import DegreeError, ParallelError
from ezpz_tp._fused import column_linear
from ezpz_tp._init import InitMethod, agree_on_seed, as_dtype, initialize_from_whole
from ezpz_tp._linear import (
    copy_tensor_model_parallel_attributes,
    param_is_not_tensor_parallel_duplicate,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
    set_tensor_model_parallel_attributes,
)
from ezpz_tp._mappings import scatter_to_tensor_parallel_region
from ezpz_tp._random import EXPERT_PARALLEL_RNG, MODEL_PARALLEL_RNG, get_rng_tracker
from ezpz_tp._state import ParallelState
from ezpz_tp.model_parallel_config import setting

__all__ = [
    "ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding", "copy_gtp_attributes",
    "copy_tensor_model_parallel_attributes", "linear_with_frozen_weight",
    "linear_with_grad_accumulation_and_async_allreduce", "param_is_not_gtp_duplicate",
    "param_is_not_tensor_parallel_duplicate",
    "set_defaults_if_not_set_tensor_model_parallel_attributes",
    "set_tensor_model_parallel_attributes",
]  # fmt: skip


# Weights that Megatron-LM shards once more; no weight is here.


def copy_gtp_attributes(destination: Tensor, source: Tensor) -> None:
    """Copy what Megatron-LM's optimizers read of a weight that is sharded once more."""
    for name in ("is_gtp_weight_remat", "allreduce", "gtp_replica_group", "pad_length"):
        if hasattr(source, name):
            setattr(destination, name, getattr(source, name))


def param_is_not_gtp_duplicate(param: Tensor) -> bool:  # noqa: ARG001 - none is one
    """Return True: no parameter is sharded, or copied, over an axis of its own."""
    return True


# What a layer takes from Megatron-LM's configuration, and what it refuses.

_UNSUPPORTED = ("defer_embedding_wgrad_compute", "gradient_accumulation_fusion", "cpu_offloading")


class LayerSettings:
    """A layer's part of a configuration, resolved. Collective for a layer of experts."""

    def __init__(
        self,
        layer: str,
        config: object,
        tp_group: ProcessGroup | None,
        pg_collection: object = None,
        is_expert: bool = False,
    ) -> None:
        for name in _UNSUPPORTED:
            refuse(layer, f"config.{name}", bool(setting(config, name)), False)
        name = "gtp_weight_remat_size"
        if is_expert:
            name = "expert_gtp_weight_remat_size"
        # Only a configuration of Megatron's own has it.
        refuse(layer, f"config.{name}", getattr(config, name, 1), 1)
        # Looked up in the instance, as in Megatron-LM: its collections answer to every name.
        remat = getattr(pg_collection, "__dict__", {}).get(
            "expt_gtp_remat" if is_expert else "gtp_remat"
        )
        refuse(layer, "size of pg_collection's gtp_remat group", remat.size() if remat else 1, 1)
        state = current_state()
        if tp_group is None and is_expert and state is not None:
            # A state of groups that were made elsewhere may not have the same ranks' group twice.
            same = state.layout is not None
            same = same and state.ranks("expert_tensor") == state.ranks("tensor")
            tp_group = state.group("tensor" if same else "expert_tensor")
        self.tp_group: ProcessGroup | None = tp_group  # to give to the layer; None is the default
        group = tensor_group(tp_group)
        self.degree: int = 1 if group is None else group.size()  # ranks that share the layer
        inner = setting(config, "expert_tensor_parallel_size")
        outer = setting(config, "tensor_model_parallel_size")
        wanted = outer
        if is_expert:
            wanted = inner or outer
        # 1 is also what a configuration says whose author left the degree to the groups.
        if wanted not in {1, self.degree}:
            name = "tensor_model_parallel_size"
            if is_expert:
                name = "expert_tensor_parallel_size"
            raise DegreeError(
                f"{layer}: config.{name}={wanted}, but its tensor-parallel group has size "
                f"{self.degree}; call initialize_model_parallel with {wanted} before building "
                "layers, or give the layer its tp_group"
            )
        expert_degree = 1
        if is_expert:
            expert_degree = setting(config, "expert_model_parallel_size")
        experts = expert_degree > 1
        self.device: torch.device = _device(config, group)
        self.dtype: torch.dtype = as_dtype(setting(config, "params_dtype"), "params_dtype")
        self.initialize: bool = bool(setting(config, "perform_initialization"))
        self.seed: int | None = None  # of its weight; None draws one
        if experts:
            index = _expert_index(layer, state, expert_degree)
            if self.initialize:
                # Experts must not start as copies of each other, and the default generator is the
                # same on all expert ranks.
                seed = agree_on_seed(None, group, self.device)
                self.seed = (seed + index * 0x9E3779B97F4A7C15) % 2**63
        # As configured; at degree 1 too.
        self.sequence_parallel: bool = bool(setting(config, "sequence_parallel"))
        # The layer of an expert: its caller moves the tokens.
        self.leaves_communication: bool = is_expert and (self.degree > 1 or experts)
        # Its gradients, and not over the expert-data group.
        self.is_reduced_with_model: bool = not (
            is_expert and (experts or (inner or outer) != outer)
        )


def refuse(layer: str, what: str, value: object, *supported: object) -> None:
    """Raise NotImplementedError unless the value is one that this package supports."""
    if value not in supported:
        raise NotImplementedError(
            f"{layer}: {what}={value!r} is not supported; expected "
            f"{' or '.join(repr(one) for one in supported)}"
        )


def refuse_output_dtype(
    layer: str, given: torch.dtype | str | None, supported: torch.dtype
) -> None:
    """Raise NotImplementedError unless it is None or the supported one, also by name."""
    if given is not None:
        refuse(layer, "output_dtype", as_dtype(given, "output_dtype"), None, supported)


def _expert_index(layer: str, state: ParallelState | None, wanted: int) -> int:
    degree = 1
    if state is not None:
        degree = state.size("expert")
    if state is None or degree != wanted:
        raise DegreeError(
            f"{layer}: config.expert_model_parallel_size={wanted}, but the expert-parallel group "
            f"has size {degree}; call initialize_model_parallel with {wanted} before building "
            "layers"
        )
    return state.index("expert")


def _device(config: object, group: ProcessGroup | None) -> torch.device:
    # The default device where that was set (also to ``meta``), else the current accelerator, as
    # in Megatron-LM; the CPU if the configuration says so, there is no accelerator, or the backend
    # of the ranks is of the CPU (gloo).
    default = torch.get_default_device()
    if default.type != "cpu" or setting(config, "use_cpu_initialization"):
        return default
    return _backend_device(group)


# What Megatron-LM's layers put into checkpoints besides their parameters.


class ShardedStateDict:
    """A layer with Megatron-LM's name for what distributed checkpoints are made of."""

    initialize: bool

    def reset_parameters(self) -> None:
        """Fill the parameters, if the configuration wants that."""
        if self.initialize:
            super().reset_parameters()  # type: ignore[misc]

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> NoReturn:
        """Refuse: `ezpz_tp.dtensor_state_dict` of the model is what can be saved.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            f"{type(self).__name__} {prefix!r}: Megatron-LM's sharded_state_dict is not supported; "
            "give ezpz_tp.dtensor_state_dict(model) to torch.distributed.checkpoint"
        )


class ExtraState(ShardedStateDict):
    """A layer whose checkpoints have an empty ``_extra_state``, as Transformer Engine's do."""

    input_size: int
    output_size: int
    is_expert: bool

    def get_extra_state(self) -> None:
        """Return None."""

    def set_extra_state(self, state: Any) -> None:
        """Ignore what another implementation saved."""

    def backward_dw(self) -> None:
        """Do nothing: gradients of weights are never delayed."""

    def finish(self, settings: LayerSettings, is_expert: bool) -> None:
        """Set Megatron-LM's attributes of a linear layer and of its parameters."""
        assert isinstance(self, _layers.ShardedLinear)
        self.input_size = self.in_features
        self.output_size = self.out_features
        self.is_expert = is_expert
        for parameter in self.parameters():
            parameter.allreduce = settings.is_reduced_with_model  # type: ignore[attr-defined]

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *more: Any) -> None:
        # A checkpoint without it is loaded strictly, too: that of a plain layer.
        state.setdefault(f"{prefix}_extra_state", None)
        super()._load_from_state_dict(state, prefix, *more)  # type: ignore[misc]


# Megatron-LM's embedding over `ezpz_tp`'s.


class VocabParallelEmbedding(ShardedStateDict, _embedding.VocabParallelEmbedding):
    """`ezpz_tp.VocabParallelEmbedding` with Megatron-LM's constructor.

    Args:
        reduce_scatter_embeddings: Return this rank's part of the sequence, which comes first:
            ids ``[b, s]`` give ``[s / tp, b, h]``.
        config: A `ModelParallelConfig`, or any object with some of its attributes.
        pg_collection: Without effect; a ``gtp_remat`` group of several ranks is refused.

    The other arguments are those of `ezpz_tp.VocabParallelEmbedding`.

    Raises:
        DegreeError: The degree is not the configuration's.
        NotImplementedError: A setting is not supported.

    Collective: every rank of the group builds the layer and calls it.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: Callable[[Tensor], object],
        reduce_scatter_embeddings: bool = False,
        config: Any,
        tp_group: ProcessGroup | None = None,
        pg_collection: Any = None,
    ) -> None:
        settings = LayerSettings("VocabParallelEmbedding", config, tp_group, pg_collection)
        # Known before the parameters are reset, at the end of the parent's constructor.
        self.config: Any = config
        self.initialize: bool = settings.initialize
        super().__init__(
            num_embeddings,
            embedding_dim,
            init_method=init_method,
            sequence_parallel=reduce_scatter_embeddings,
            tp_group=settings.tp_group,
            device=settings.device,
            dtype=settings.dtype,
        )
        self.reduce_scatter_embeddings = reduce_scatter_embeddings

    def forward(self, input_: Tensor) -> Tensor:
        """Return the embeddings of ids ``[b, s]``.

        Returns:
            ``[b, s, h]`` on every rank, or ``[s / tp, b, h]`` with ``reduce_scatter_embeddings``.
        """
        # The ids are turned around, which are fewer numbers than their embeddings.
        return super().forward(input_.transpose(0, 1) if self.reduce_scatter_embeddings else input_)


# Megatron-LM's functions of a column-parallel product, over `ezpz_tp`'s fused one.


def linear_with_grad_accumulation_and_async_allreduce(
    input: Tensor,  # noqa: A002 (Megatron-LM's name)
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    grad_output_buffer: list[Tensor] | None = None,
    wgrad_deferral_limit: int | None = 0,
    tp_group: ProcessGroup | None = None,
    gtp_remat_size: int = 1,
    output_dtype: torch.dtype | str | None = None,
) -> Tensor:
    """Return ``input @ weight.T + bias`` for this rank's rows of the weight.

    The collective of the input's gradient runs beside the product of the weight's. Collective,
    if ``allreduce_dgrad`` or ``sequence_parallel``.

    Args:
        input: ``[..., in]``, or ``[s/tp, ..., in]`` under sequence parallelism.
        weight: ``[out/tp, in]``. It may be frozen, and then has no gradient.
        bias: ``[out/tp]``.
        allreduce_dgrad: Sum the ranks' gradients of the input.
        sequence_parallel: Gather the input along dim 0, and reduce-scatter its gradient.
        tp_group: Default: the tensor-parallel group.
        gradient_accumulation_fusion: Only False.
        grad_output_buffer: Only None.
        wgrad_deferral_limit: Of the buffer: without effect.
        gtp_remat_size: Only 1.
        output_dtype: Only that of the input.

    Raises:
        ParallelError: Both ``allreduce_dgrad`` and ``sequence_parallel`` are set.
        NotImplementedError: An argument has a value that this package does not support.
    """
    del wgrad_deferral_limit
    name = "linear_with_grad_accumulation_and_async_allreduce"
    refuse(name, "gradient_accumulation_fusion", gradient_accumulation_fusion, False)
    refuse(name, "grad_output_buffer", grad_output_buffer, None)
    refuse(name, "gtp_remat_size", gtp_remat_size, 1)
    refuse_output_dtype(name, output_dtype, input.dtype)
    if allreduce_dgrad and sequence_parallel:
        raise ParallelError(
            f"{name}: allreduce_dgrad and sequence_parallel are both set; under sequence "
            "parallelism the input's gradient is reduce-scattered, so leave allreduce_dgrad False"
        )
    group = tensor_group(tp_group)
    if group is None:
        return nn.functional.linear(input, weight, bias)
    return column_linear(input, weight, bias, group, sequence_parallel, allreduce_dgrad)


def linear_with_frozen_weight(
    input: Tensor,  # noqa: A002 (Megatron-LM's name)
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: ProcessGroup | None,
    grad_output_buffer: list[Tensor] | None = None,
    wgrad_deferral_limit: None = None,
    gtp_remat_size: int = 1,
    output_dtype: torch.dtype | str | None = None,
) -> Tensor:
    """Return what `linear_with_grad_accumulation_and_async_allreduce` does; the weight is frozen.

    The arguments are the same, in another order; ``gradient_accumulation_fusion`` has no effect,
    because there is nothing to accumulate.
    """
    del gradient_accumulation_fusion
    modes = False, allreduce_dgrad, sequence_parallel, grad_output_buffer, wgrad_deferral_limit
    return linear_with_grad_accumulation_and_async_allreduce(
        input, weight.detach(), bias, *modes, tp_group, gtp_remat_size, output_dtype
    )


class ColumnParallelLinear(ExtraState, _layers.ColumnParallelLinear):
    """`ezpz_tp.ColumnParallelLinear` with Megatron-LM's constructor and return value.

    Args:
        config: A `ModelParallelConfig`, or any object with some of its attributes.
        skip_weight_param_allocation: Have no weight: it is given to ``forward``, as by an output
            layer that is tied to the embedding.
        embedding_activation_buffer, grad_output_buffer: Only None.
        is_expert: An expert's layer, split over the expert tensor-parallel group. Where there are
            several expert ranks, they start from different weights, and the caller communicates.
        tp_comm_buffer_name, name: Without effect, as in Megatron-LM.
        disable_grad_reduce: Leave the gradient of the input partial.
        tp_group: Default: the (expert) tensor-parallel group.
        output_dtype: Only that of the parameters.
        pg_collection: Without effect; a ``gtp_remat`` group of several ranks is refused.

    The other arguments are those of `ezpz_tp.ColumnParallelLinear`.

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
        output_dtype: torch.dtype | str | None = None,
        pg_collection: Any = None,
    ) -> None:
        del tp_comm_buffer_name, name
        layer = "ColumnParallelLinear"
        settings = LayerSettings(layer, config, tp_group, pg_collection, is_expert)
        refuse(layer, "embedding_activation_buffer", embedding_activation_buffer, None)
        refuse(layer, "grad_output_buffer", grad_output_buffer, None)
        refuse_output_dtype(layer, output_dtype, settings.dtype)
        if settings.sequence_parallel and settings.degree == 1:
            warnings.warn(
                f"{layer}: config.sequence_parallel is on, but the tensor-parallel degree is 1: "
                "there is no one to share the sequence with, so it is off",
                stacklevel=2,
            )
        # Known before the parameters are reset, at the end of the parent's constructor.
        self.config: Any = config
        self.initialize: bool = settings.initialize
        kept = keep_master_weight_for_test and not skip_weight_param_allocation
        how = bias, gather_output, init_method, stride, kept
        super().__init__(
            input_size,
            output_size,
            *how,
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
        self.finish(settings, is_expert)
        self.output_size_per_partition: int = output_size // self.tp_size
        self.disable_grad_reduce: bool = disable_grad_reduce
        self.reduce_input_gradient: bool = not (
            disable_grad_reduce or settings.leaves_communication
        )

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

    The arguments are those of `ColumnParallelLinear`, and ``input_is_parallel``, which has to be
    True under sequence parallelism. Of an expert's layer whose communication is the caller's the
    partial products are not summed, and ``skip_bias_add`` has to be True.

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
        settings = LayerSettings(layer, config, tp_group, pg_collection, is_expert)
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
        how = bias, input_is_parallel, init_method, stride, keep_master_weight_for_test
        super().__init__(
            input_size,
            output_size,
            *how,
            sequence_parallel=settings.sequence_parallel and not settings.leaves_communication,
            skip_bias_add=skip_bias_add,
            tp_group=settings.tp_group,
            seed=settings.seed,
            device=settings.device,
            dtype=settings.dtype,
        )
        self.finish(settings, is_expert)
        self.input_size_per_partition: int = input_size // self.tp_size
        self.leaves_communication: bool = settings.leaves_communication
        if self.bias is not None:
            self.bias.sequence_parallel = settings.sequence_parallel  # type: ignore[attr-defined]

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
        if isinstance(output, tuple):
            return output
        return output, None


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
    params_dtype: torch.dtype | str = torch.float32,
    rank: int | None = None,
    world_size: int | None = None,
    skip_set_tensor_parallel_attributes: bool = False,
) -> Tensor | None:
    """Fill a shard from the full weight, drawn in float32 from torch's default generator."""
    if not skip_set_tensor_parallel_attributes:
        set_tensor_model_parallel_attributes(weight, True, partition_dim, stride)
    del per_partition_size  # the weight has it
    if rank is None or world_size is None:
        rank = index_or_alone("tensor")
        world_size = size_or_alone("tensor")
    place = partition_dim, rank, world_size
    options: Any = {"stride": stride, "dtype": torch.float32, "device": "cpu"}
    full = initialize_from_whole(weight, (output_size, input_size), *place, init_method, **options)
    if return_master_weight:
        return full.to(as_dtype(params_dtype, "params_dtype"))
    return None
