"""Megatron-LM's functions of a column-parallel product, over `ezpz_tp`'s fused one."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ezpz_tp._errors import ParallelError
from ezpz_tp._groups.default import tensor_group
from ezpz_tp._layers.fused import column_linear

from ._settings import refuse


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
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return ``input @ weight.T + bias`` for this rank's rows of the weight.

    The collective of the input's gradient runs beside the product of the weight's. Collective,
    if ``allreduce_dgrad`` or ``sequence_parallel``.

    Args:
        input: ``[..., in]``, or ``[s/tp, ..., in]`` under sequence parallelism.
        weight: ``[out/tp, in]``. It may be frozen, and then has no gradient.
        bias: ``[out/tp]``.
        gradient_accumulation_fusion: Only False.
        allreduce_dgrad: Sum the ranks' gradients of the input.
        sequence_parallel: Gather the input along dim 0, and reduce-scatter its gradient.
        grad_output_buffer: Only None.
        wgrad_deferral_limit: Of the buffer: without effect.
        tp_group: Default: the tensor-parallel group.
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
    refuse(name, "output_dtype", output_dtype, None, input.dtype)
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
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return what `linear_with_grad_accumulation_and_async_allreduce` does; the weight is frozen.

    The arguments are the same, in another order; ``gradient_accumulation_fusion`` has no effect,
    because there is nothing to accumulate.
    """
    del gradient_accumulation_fusion
    return linear_with_grad_accumulation_and_async_allreduce(
        input,
        weight.detach(),
        bias,
        gradient_accumulation_fusion=False,
        allreduce_dgrad=allreduce_dgrad,
        sequence_parallel=sequence_parallel,
        grad_output_buffer=grad_output_buffer,
        wgrad_deferral_limit=wgrad_deferral_limit,
        tp_group=tp_group,
        gtp_remat_size=gtp_remat_size,
        output_dtype=output_dtype,
    )
