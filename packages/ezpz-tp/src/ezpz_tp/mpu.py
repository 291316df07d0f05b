"""The model-parallel unit that Megatron-style code and DeepSpeed are given: ``mpu=ezpz_tp.mpu``.

It is `ezpz_tp.parallel_state`, the names of ``megatron.mpu`` before ``megatron.core`` (layers,
region functions, random streams), and the other names that DeepSpeed calls. To DeepSpeed, model
parallel is everything that splits a model: its pipeline grid answers ``get_model_parallel_*``
with tensor x pipeline, reduces the gradient norm and detects overflows over that group, and
takes the world's size over it for the number of replicas
(deepspeed/runtime/pipe/topology.py, deepspeed/runtime/config.py, 2026-08-22). Megatron's
``get_model_parallel_group`` is the same. Slice parallel is the tensor axis, pipe parallel the
pipeline, and sequence parallel (Ulysses) the context axis.

There is no ``initialize_sequence_parallel``, on purpose: DeepSpeed takes an mpu that has it for
one that splits sequences and nothing else, and its model-parallel size for 1
(deepspeed/utils/groups.py). Its ``UlyssesSPAttentionHF`` makes groups of its own, with its own
mpu, and is not given this one.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.init import xavier_normal_

from . import _embedding, _linear, _megatron, parallel_state
from ._cross_entropy import vocab_parallel_cross_entropy
from ._current import (
    Number,
    get_state,
    name_made,
)
from ._current import get_context_parallel_group as get_sequence_parallel_group
from ._current import get_context_parallel_rank as get_sequence_parallel_rank
from ._current import get_context_parallel_src_rank as get_sequence_parallel_src_rank
from ._current import get_context_parallel_world_size as get_sequence_parallel_world_size
from ._current import get_data_parallel_ranks as get_data_parallel_group_ranks
from ._current import get_pipeline_parallel_group as get_pipe_parallel_group
from ._current import get_pipeline_parallel_rank as get_pipe_parallel_rank
from ._current import get_pipeline_parallel_world_size as get_pipe_parallel_world_size
from ._current import get_tensor_parallel_group as get_slice_parallel_group
from ._current import get_tensor_parallel_rank as get_slice_parallel_rank
from ._current import get_tensor_parallel_world_size as get_slice_parallel_world_size
from ._data import broadcast_data
from ._init import InitMethod
from ._linear import (
    copy_tensor_model_parallel_attributes,
    param_is_not_tensor_parallel_duplicate,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
    set_tensor_model_parallel_attributes,
)
from ._mappings import copy_to_tensor_parallel_region as copy_to_model_parallel_region
from ._mappings import divide_and_check_no_remainder as divide
from ._mappings import gather_from_tensor_parallel_region as gather_from_model_parallel_region
from ._mappings import (
    gather_split_1d_tensor,
    split_tensor_along_last_dim,
    split_tensor_into_1d_equal_chunks,
)
from ._mappings import reduce_from_tensor_parallel_region as reduce_from_model_parallel_region
from ._mappings import scatter_to_tensor_parallel_region as scatter_to_model_parallel_region
from ._random import checkpoint_activations as checkpoint
from ._random import get_rng_tracker as get_cuda_rng_tracker
from ._random import seed_as_megatron as model_parallel_cuda_manual_seed
from .parallel_state import *  # noqa: F403 - all of it, by intention

__all__ = [
    "ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding", "broadcast_data",
    "checkpoint", "copy_tensor_model_parallel_attributes", "copy_to_model_parallel_region",
    "copy_to_tensor_model_parallel_region", "divide", "gather_from_model_parallel_region",
    "gather_from_tensor_model_parallel_region", "gather_split_1d_tensor", "get_cuda_rng_tracker",
    "get_data_parallel_group_ranks", "get_model_parallel_rank", "get_model_parallel_world_size",
    "get_pipe_parallel_group", "get_pipe_parallel_rank", "get_pipe_parallel_world_size",
    "get_sequence_data_parallel_group",
    "get_sequence_data_parallel_rank", "get_sequence_data_parallel_world_size",
    "get_sequence_parallel_group", "get_sequence_parallel_rank", "get_sequence_parallel_src_rank",
    "get_sequence_parallel_world_size", "get_slice_parallel_group", "get_slice_parallel_rank",
    "get_slice_parallel_world_size", "model_parallel_cuda_manual_seed",
    "param_is_not_tensor_parallel_duplicate", "reduce_from_model_parallel_region",
    "reduce_from_tensor_model_parallel_region", "scatter_to_model_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "set_defaults_if_not_set_tensor_model_parallel_attributes",
    "set_tensor_model_parallel_attributes", "split_tensor_along_last_dim",
    "split_tensor_into_1d_equal_chunks", "vocab_parallel_cross_entropy",
]  # fmt: skip
__all__ += parallel_state.__all__

copy_to_tensor_model_parallel_region = copy_to_model_parallel_region
gather_from_tensor_model_parallel_region = gather_from_model_parallel_region
reduce_from_tensor_model_parallel_region = reduce_from_model_parallel_region
scatter_to_tensor_model_parallel_region = scatter_to_model_parallel_region


# The layers of ``megatron.mpu``: Megatron-LM's before ``megatron.core``, and gpt-neox's.
#
# They take no configuration and return ``(output, bias)``.
#
# Sources: bigscience-workshop/Megatron-DeepSpeed megatron/mpu/layers.py, 2023-12-07;
# EleutherAI/gpt-neox megatron/mpu/layers.py, 2026-05-19.


class ColumnParallelLinear(_linear.ColumnParallelLinear):
    """`ezpz_tp.ColumnParallelLinear` that returns the output and, if it is skipped, the bias.

    Args:
        neox_args: Its ``params_dtype`` and ``sequence_parallel`` are taken.
        options: gpt-neox's others: refused unless they change nothing.

    The other arguments are as there.
    """

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
        more = _layer_options("ColumnParallelLinear", neox_args, options)
        how = gather_output, init_method, stride, keep_master_weight_for_test
        super().__init__(input_size, output_size, bias, *how, skip_bias_add=skip_bias_add, **more)
        self.input_size: int = input_size
        self.output_size: int = output_size
        self.output_size_per_partition: int = output_size // self.tp_size

    def forward(self, input_: Tensor) -> tuple[Tensor, nn.Parameter | None]:
        """Return the output, and the bias if it was not added, else None."""
        output = super().forward(input_)
        if isinstance(output, tuple):
            return output
        return output, None


class RowParallelLinear(_linear.RowParallelLinear):
    """`ezpz_tp.RowParallelLinear`; see `ColumnParallelLinear` for the arguments."""

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
        more = _layer_options("RowParallelLinear", neox_args, options)
        how = input_is_parallel, init_method, stride, keep_master_weight_for_test
        super().__init__(input_size, output_size, bias, *how, skip_bias_add=skip_bias_add, **more)
        self.input_size: int = input_size
        self.output_size: int = output_size
        self.input_size_per_partition: int = input_size // self.tp_size

    def forward(self, input_: Tensor) -> tuple[Tensor, nn.Parameter | None]:
        """Return the output, and the bias if it was not added, else None."""
        output = super().forward(input_)
        if isinstance(output, tuple):
            return output
        return output, None


class VocabParallelEmbedding(_embedding.VocabParallelEmbedding):
    """`ezpz_tp.VocabParallelEmbedding` of which ``init_method`` is the third argument."""

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


def _layer_options(layer: str, neox_args: Any, options: dict[str, Any]) -> dict[str, Any]:
    if not getattr(neox_args, "use_mup", False):
        options.pop("mup_rescale_parameters", None)
    for name, value in options.items():
        if value:
            raise NotImplementedError(f"{layer}: {name}={value!r} is not supported; leave it out")
    return {
        "dtype": getattr(neox_args, "params_dtype", None),
        "sequence_parallel": bool(getattr(neox_args, "sequence_parallel", False)),
    }


get_model_parallel_rank: Number = _megatron.rank_getter("tensor", "pipeline")
get_model_parallel_world_size: Number = _megatron.size_getter("tensor", "pipeline")
get_sequence_data_parallel_rank: Number = _megatron.rank_getter("context", "data")
get_sequence_data_parallel_world_size: Number = _megatron.size_getter("context", "data")
name_made(globals())


def get_sequence_data_parallel_group() -> ProcessGroup:
    """Return the group over context and data."""
    return get_state().group("context", "data")
