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

from torch.distributed import ProcessGroup

from . import parallel_state
from ._groups.default import (
    get_state,
    index_or_alone,
    ranks_or_alone,
    size_or_alone,
    tensor_parallel_is_initialized,
)
from ._layers.attributes import (
    copy_tensor_model_parallel_attributes,
    param_is_not_tensor_parallel_duplicate,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
    set_tensor_model_parallel_attributes,
)
from ._megatron import layers as _layers
from ._megatron.layers import *  # noqa: F403
from ._regions.mappings import copy_to_tensor_parallel_region as copy_to_model_parallel_region
from ._regions.mappings import (
    copy_to_tensor_parallel_region as copy_to_tensor_model_parallel_region,
)
from ._regions.mappings import (
    gather_from_tensor_parallel_region as gather_from_model_parallel_region,
)
from ._regions.mappings import (
    gather_from_tensor_parallel_region as gather_from_tensor_model_parallel_region,
)
from ._regions.mappings import (
    reduce_from_tensor_parallel_region as reduce_from_model_parallel_region,
)
from ._regions.mappings import (
    reduce_from_tensor_parallel_region as reduce_from_tensor_model_parallel_region,
)
from ._regions.mappings import scatter_to_tensor_parallel_region as scatter_to_model_parallel_region
from ._regions.mappings import (
    scatter_to_tensor_parallel_region as scatter_to_tensor_model_parallel_region,
)
from ._regions.split import divide_and_check_no_remainder as divide
from ._regions.split import (
    gather_split_1d_tensor,
    split_tensor_along_last_dim,
    split_tensor_into_1d_equal_chunks,
)
from ._training.broadcast import broadcast_data
from ._training.checkpoint import checkpoint_activations as checkpoint
from ._training.cross_entropy import vocab_parallel_cross_entropy
from ._training.random import get_rng_tracker as get_cuda_rng_tracker
from ._training.random import seed_as_megatron as model_parallel_cuda_manual_seed
from .parallel_state import *  # noqa: F403 - all of it, by intention

__all__ = [
    "broadcast_data",
    "checkpoint",
    "copy_tensor_model_parallel_attributes",
    "copy_to_model_parallel_region",
    "copy_to_tensor_model_parallel_region",
    "divide",
    "gather_from_model_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "gather_split_1d_tensor",
    "get_cuda_rng_tracker",
    "get_data_parallel_group_ranks",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "get_pipe_parallel_group",
    "get_pipe_parallel_rank",
    "get_pipe_parallel_world_size",
    "get_pipeline_parallel_world_size",
    "get_sequence_data_parallel_group",
    "get_sequence_data_parallel_rank",
    "get_sequence_data_parallel_world_size",
    "get_sequence_parallel_group",
    "get_sequence_parallel_rank",
    "get_sequence_parallel_src_rank",
    "get_sequence_parallel_world_size",
    "get_slice_parallel_group",
    "get_slice_parallel_rank",
    "get_slice_parallel_world_size",
    "is_unitialized",
    "model_parallel_cuda_manual_seed",
    "param_is_not_tensor_parallel_duplicate",
    "reduce_from_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "scatter_to_model_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "set_defaults_if_not_set_tensor_model_parallel_attributes",
    "set_tensor_model_parallel_attributes",
    "split_tensor_along_last_dim",
    "split_tensor_into_1d_equal_chunks",
    "vocab_parallel_cross_entropy",
]
__all__ += parallel_state.__all__
__all__ += _layers.__all__


def is_unitialized() -> bool:
    """Return whether there are no groups yet. The name is spelled as it was."""
    return not tensor_parallel_is_initialized()


def get_model_parallel_rank() -> int:
    """Return this rank's position in the group over tensor and pipeline."""
    return index_or_alone("tensor", "pipeline")


def get_model_parallel_world_size() -> int:
    """Return the number of ranks in the group over tensor and pipeline."""
    return size_or_alone("tensor", "pipeline")


def get_slice_parallel_group() -> ProcessGroup:
    """Return this rank's tensor-parallel group."""
    return get_state().group("tensor")


def get_slice_parallel_rank() -> int:
    """Return this rank's position in this rank's tensor-parallel group."""
    return index_or_alone("tensor")


def get_slice_parallel_world_size() -> int:
    """Return the number of ranks in this rank's tensor-parallel group."""
    return size_or_alone("tensor")


def get_pipe_parallel_group() -> ProcessGroup:
    """Return this rank's pipeline-parallel group."""
    return get_state().group("pipeline")


def get_pipe_parallel_rank() -> int:
    """Return this rank's position in this rank's pipeline-parallel group."""
    return index_or_alone("pipeline")


def get_pipe_parallel_world_size() -> int:
    """Return the number of ranks in this rank's pipeline-parallel group."""
    return size_or_alone("pipeline")


def get_sequence_parallel_group() -> ProcessGroup:
    """Return this rank's context-parallel group."""
    return get_state().group("context")


def get_sequence_parallel_rank() -> int:
    """Return this rank's position in this rank's context-parallel group."""
    return index_or_alone("context")


def get_sequence_parallel_world_size() -> int:
    """Return the number of ranks in this rank's context-parallel group."""
    return size_or_alone("context")


def get_sequence_data_parallel_group() -> ProcessGroup:
    """Return the group over context and data."""
    return get_state().group("context", "data")


def get_sequence_data_parallel_rank() -> int:
    """Return this rank's position in the group over context and data."""
    return index_or_alone("context", "data")


def get_sequence_data_parallel_world_size() -> int:
    """Return the number of ranks in the group over context and data."""
    return size_or_alone("context", "data")


def get_sequence_parallel_src_rank() -> int:
    """Return the global rank of the first rank of the context-parallel group."""
    return ranks_or_alone("context")[0]


def get_data_parallel_group_ranks() -> list[int]:
    """Return the global ranks of this rank's data-parallel group."""
    return list(ranks_or_alone("data"))


def get_pipeline_parallel_world_size() -> int:
    """Return the number of stages of this rank's pipeline."""
    return size_or_alone("pipeline")
