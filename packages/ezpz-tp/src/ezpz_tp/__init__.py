"""Tensor, context, data and pipeline parallelism for plain PyTorch.

Every rank makes the groups it belongs to, builds layers that hold its part of each weight, and
runs the code that it ran alone:

    import torch.distributed as dist
    import ezpz_tp as tp

    dist.init_process_group()
    tp.initialize_tensor_parallel(tensor_parallel_size=2)
    up = tp.ColumnParallelLinear(1024, 4096, gather_output=False)
    down = tp.RowParallelLinear(4096, 1024, input_is_parallel=True)

The names here are ezpz's; `ezpz_tp.parallel_state`, `ezpz_tp.mpu` and `ezpz_tp.tensor_parallel`
hold Megatron-LM's, `ezpz_tp.model_parallel` fairscale's, and `ezpz_tp.testing` what tests a
user's own layers. One implementation lies beneath them all.
"""

import importlib
from typing import TYPE_CHECKING

from . import _current, _errors, _linear, _mappings, _random
from ._cross_entropy import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy
from ._current import *  # noqa: F403 - what they list
from ._data import broadcast_data, sequence_positions, shard_sequence, unshard_sequence
from ._embedding import ParallelEmbedding, VocabParallelEmbedding
from ._errors import *  # noqa: F403
from ._grads import clip_grad_norm_, finalize_grads, get_grad_norm
from ._groups import make_group
from ._init import initialize_shard
from ._linear import *  # noqa: F403
from ._mappings import *  # noqa: F403
from ._pipeline import Pipeline, split_layers
from ._random import *  # noqa: F403
from ._ranks import AXES, EXPERT_AXES, RankLayout
from ._ring import ring_attention
from ._shard import Piece, Shard, set_shard, shard_of
from ._state import ParallelState, make_mesh
from ._ulysses import split_context, ulysses_attention, unified_attention

if TYPE_CHECKING:
    from ._check import check, declare_type, type_of
    from ._check.replicated import verify_replicated
    from ._describe import Description, describe, describe_mesh
    from ._formats.dcp import dtensor_state_dict, load_dtensor_state_dict, reshard
    from ._formats.huggingface import save_huggingface
    from ._formats.llama import save_llama
    from ._lora import apply_lora, load_lora, lora_state_dict, merge_lora, save_lora
    from ._sharding import EinsumSharding, einsum_sharding
    from ._state_dict import gather_state_dict, shard_state_dict

__version__ = "0.1.0"

_LATER = {
    **dict.fromkeys(("check", "declare_type", "type_of"), "_check"),
    "verify_replicated": "_check.replicated",
    **dict.fromkeys(("Description", "describe", "describe_mesh"), "_describe"),
    **dict.fromkeys(("EinsumSharding", "einsum_sharding"), "_sharding"),
    **dict.fromkeys(("dtensor_state_dict", "load_dtensor_state_dict", "reshard"), "_formats.dcp"),
    "save_huggingface": "_formats.huggingface",
    "save_llama": "_formats.llama",
    **dict.fromkeys(
        ("apply_lora", "load_lora", "lora_state_dict", "merge_lora", "save_lora"), "_lora"
    ),
    **dict.fromkeys(("gather_state_dict", "shard_state_dict"), "_state_dict"),
}
"""What designs and checks, and what works on files: imported when it is first used."""


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f".{_LATER[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})


__all__ = [
    "AXES", "EXPERT_AXES", "Description", "EinsumSharding", "ParallelEmbedding", "ParallelState",
    "Piece", "Pipeline", "RankLayout", "Shard", "VocabParallelEmbedding", "__version__",
    "apply_lora", "broadcast_data", "check", "clip_grad_norm_", "declare_type", "describe",
    "describe_mesh", "dtensor_state_dict", "einsum_sharding", "finalize_grads", "gather_state_dict",
    "get_grad_norm", "initialize_shard", "load_dtensor_state_dict", "load_lora", "lora_state_dict",
    "make_group", "make_mesh", "merge_lora", "reshard", "ring_attention", "save_huggingface",
    "save_llama", "save_lora", "sequence_positions", "set_shard", "shard_of", "shard_sequence",
    "shard_state_dict", "split_context", "split_layers", "type_of", "ulysses_attention",
    "unified_attention", "unshard_sequence", "verify_replicated", "vocab_parallel_cross_entropy",
    "vocab_parallel_linear_cross_entropy",
]  # fmt: skip
__all__ += _current.__all__
__all__ += _errors.__all__
__all__ += _linear.__all__
__all__ += _mappings.__all__
__all__ += _random.__all__
