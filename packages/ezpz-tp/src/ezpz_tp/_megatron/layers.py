"""The layers of ``megatron.mpu``: Megatron-LM's before ``megatron.core``, and gpt-neox's.

They take no configuration and return ``(output, bias)``. A layer of any of this package's
dialects is an instance of them, for code that looks for such layers (DeepSpeed's compression).

Sources: bigscience-workshop/Megatron-DeepSpeed megatron/mpu/layers.py, 2023-12-07;
EleutherAI/gpt-neox megatron/mpu/layers.py, 2026-05-19.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.init import xavier_normal_

from ezpz_tp._layers import embedding as _embedding
from ezpz_tp._layers import linear as _linear
from ezpz_tp._layers.initialize import InitMethod

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding"]


class _OfAnyDialect(type):
    """A class of which every instance of ``core`` is one."""

    core: type

    def __instancecheck__(cls, instance: object) -> bool:
        return (
            isinstance(instance, cls.core)
            if "core" in vars(cls)
            else type.__instancecheck__(cls, instance)
        )


class ColumnParallelLinear(_linear.ColumnParallelLinear, metaclass=_OfAnyDialect):
    """`ezpz_tp.ColumnParallelLinear` that returns the output and, if it is skipped, the bias.

    Args:
        input_size: Size of the last dim of the input.
        output_size: Size of the last dim of the whole output.
        bias: As there, and so on.
        gather_output: As there.
        init_method: As there.
        stride: As there.
        keep_master_weight_for_test: As there.
        skip_bias_add: Return the bias instead of adding it.
        neox_args: Its ``params_dtype`` and ``sequence_parallel`` are taken.
        options: gpt-neox's others: refused unless they change nothing.
    """

    core: type = _linear.ColumnParallelLinear

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        init_method: InitMethod = xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        *,
        neox_args: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            bias,
            gather_output,
            init_method,
            stride,
            keep_master_weight_for_test,
            skip_bias_add=skip_bias_add,
            **_read("ColumnParallelLinear", neox_args, options),
        )
        self.input_size: int = input_size
        self.output_size: int = output_size
        self.output_size_per_partition: int = output_size // self.tp_size

    def forward(self, input_: Tensor) -> tuple[Tensor, nn.Parameter | None]:
        """Return the output, and the bias if it was not added, else None."""
        output = super().forward(input_)
        return output if isinstance(output, tuple) else (output, None)


class RowParallelLinear(_linear.RowParallelLinear, metaclass=_OfAnyDialect):
    """`ezpz_tp.RowParallelLinear`; see `ColumnParallelLinear` for the arguments."""

    core: type = _linear.RowParallelLinear

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        init_method: InitMethod = xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        *,
        neox_args: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            bias,
            input_is_parallel,
            init_method,
            stride,
            keep_master_weight_for_test,
            skip_bias_add=skip_bias_add,
            **_read("RowParallelLinear", neox_args, options),
        )
        self.input_size: int = input_size
        self.output_size: int = output_size
        self.input_size_per_partition: int = input_size // self.tp_size

    def forward(self, input_: Tensor) -> tuple[Tensor, nn.Parameter | None]:
        """Return the output, and the bias if it was not added, else None."""
        output = super().forward(input_)
        return output if isinstance(output, tuple) else (output, None)


class VocabParallelEmbedding(_embedding.VocabParallelEmbedding, metaclass=_OfAnyDialect):
    """`ezpz_tp.VocabParallelEmbedding` of which ``init_method`` is the third argument."""

    core: type = _embedding.VocabParallelEmbedding

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        init_method: InitMethod = xavier_normal_,
        *,
        neox_args: Any = None,
    ) -> None:
        dtype = getattr(neox_args, "params_dtype", None)
        super().__init__(num_embeddings, embedding_dim, init_method=init_method, dtype=dtype)


def _read(layer: str, neox_args: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return what gpt-neox's arguments are here."""
    if not getattr(neox_args, "use_mup", False):
        options.pop("mup_rescale_parameters", None)
    for name, value in options.items():
        if value:
            raise NotImplementedError(f"{layer}: {name}={value!r} is not supported; leave it out")
    return {
        "dtype": getattr(neox_args, "params_dtype", None),
        "sequence_parallel": bool(getattr(neox_args, "sequence_parallel", False)),
    }
