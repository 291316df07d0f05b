"""The attributes by which optimizers, gradient clipping and checkpoints know a parameter.

The names are Megatron-LM's (megatron/core/tensor_parallel/layers.py), read by DeepSpeed,
Transformer Engine and others:

``tensor_model_parallel``  each tensor-parallel rank holds another part of it
``partition_dim``          the dim along which it is split, -1 when it is not
``partition_stride``       how many separate stretches of that dim a rank holds
``sequence_parallel``      replicated, but used on a part of the sequence: its gradient is partial
``allreduce``              False for an expert's parameter, reduced over another group
``shared``                 a copy of a tied parameter that is counted elsewhere

Megatron-LM's do not say how large the whole is, nor of which parts; these do, for checkpoints
that change their degree (`ezpz_tp.Shard`):

``full_shape``             shape over all ranks, without padding
``partition_blocks``       sizes along the dim of the matrices stacked in it, each split by itself
``partition_padded``       whether a degree that does not divide the dim pads it
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ezpz_tp._errors import ParallelError
from ezpz_tp._groups.default import tensor_group

# Megatron-LM's optimizers read these of weights that it shards once more, or stacks.
_GTP = ("is_gtp_weight_remat", "allreduce", "gtp_replica_group", "pad_length")
_DEFAULTS = {"tensor_model_parallel": False, "partition_dim": -1, "partition_stride": 1}
_WHOLE = ("full_shape", "partition_blocks", "partition_padded")
# Megatron-LM's optimizers ask how queries, keys and values are stacked, and whose experts' it is.
_OTHERS = ("sequence_parallel", "allreduce", "shared", "is_qkv", "qkv_split_shapes", "expert_tp")
_ALL = (*_DEFAULTS, *_WHOLE, *_OTHERS)


def set_tensor_model_parallel_attributes(
    tensor: Tensor, is_parallel: bool, dim: int, stride: int
) -> None:
    """Say that a parameter is split over the tensor-parallel ranks, and how.

    Args:
        tensor: The parameter.
        is_parallel: Whether each rank holds another part of it.
        dim: The dim along which it is split.
        stride: How many separate stretches of that dim a rank holds.

    Raises:
        ParallelError: It is already said, and otherwise: two owners claim one parameter.
    """
    wanted = {
        "tensor_model_parallel": is_parallel,
        "partition_dim": dim,
        "partition_stride": stride,
    }
    for name, value in wanted.items():
        found = getattr(tensor, name, value)
        if found != value:
            raise ParallelError(
                f"{name} of a parameter of shape {tuple(tensor.shape)} is already {found}, "
                f"and {value} is asked; expected it to be set once: remove one of the two calls"
            )
    for name, value in wanted.items():
        setattr(tensor, name, value)


def set_whole(
    tensor: Tensor, full_shape: tuple[int, ...], blocks: tuple[int, ...] = (), padded: bool = False
) -> None:
    """Say what a parameter is a part of, see `ezpz_tp.Shard` for the arguments."""
    for name, value in zip(_WHOLE, (full_shape, blocks, padded), strict=True):
        setattr(tensor, name, value)


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: Tensor) -> None:
    """Say that a parameter is whole on every rank, where nothing is said of it yet."""
    for name, value in _DEFAULTS.items():
        if not hasattr(tensor, name):
            setattr(tensor, name, value)


def copy_tensor_model_parallel_attributes(
    destination_tensor: Tensor, source_tensor: Tensor
) -> None:
    """Say of one tensor (an optimizer's fp32 copy, say) what is said of another.

    What is not set on the source is left as it is on the destination.
    """
    for name in _ALL:
        if hasattr(source_tensor, name):
            setattr(destination_tensor, name, getattr(source_tensor, name))


def mark_sequence_parallel(param: Tensor) -> None:
    """Say that a replicated parameter acts on a part of the sequence.

    Its gradient is then partial on each tensor-parallel rank, and `finalize_grads` sums it.
    For the norms of a sequence-parallel block, and whatever else stands between its regions.
    What replaces a parameter forgets its attributes: see `keep_attributes`, `copy_attributes`.
    """
    param.sequence_parallel = True  # type: ignore[attr-defined]


def param_is_not_tensor_parallel_duplicate(
    param: Tensor,
    tp_group: ProcessGroup | None = None,
    expert_tp_group: ProcessGroup | None = None,
) -> bool:
    """Return whether this rank's copy of a parameter is the one to count.

    True for a part of a split parameter, and on the first tensor-parallel rank for a
    replicated one: so that a sum over the ranks counts every value once.

    Args:
        param: The parameter.
        tp_group: The tensor-parallel group; None for the default one.
        expert_tp_group: The group of experts' parameters (``allreduce`` False), where it differs.
    """
    if getattr(param, "tensor_model_parallel", False):
        return True
    if expert_tp_group is not None and not getattr(param, "allreduce", True):
        tp_group = expert_tp_group
    group = tensor_group(tp_group)
    return group is None or group.rank() == 0


def copy_gtp_attributes(destination: Tensor, source: Tensor) -> None:
    """Say of one tensor what Megatron-LM says of another's weight that is sharded once more."""
    for name in _GTP:
        if hasattr(source, name):
            setattr(destination, name, getattr(source, name))


def param_is_not_gtp_duplicate(param: Tensor) -> bool:  # noqa: ARG001 - none is one
    """Return True: no parameter is sharded, or copied, over an axis of its own."""
    return True


@contextmanager
def keep_attributes(module: nn.Module) -> Iterator[None]:
    """Say of a module's parameters after the block what was said of them before it.

    For what makes new parameters, which have no attributes: ``fully_shard`` of FSDP2, ``to_empty``
    of a module on the meta device, ``load_state_dict(..., assign=True)``. Parameters are known
    again by their names. (The layers of this package keep those of their own in the last two.)
    """
    said = _said(module)
    yield
    _say(module, said)


def copy_attributes(source: nn.Module, destination: nn.Module) -> None:
    """Say of one module's parameters what is said of those of the same name in another.

    For what copies a module: ``copy.deepcopy`` makes parameters without attributes.
    """
    _say(destination, _said(source))


def _said(module: nn.Module) -> dict[str, dict[str, Any]]:
    named = module.named_parameters(remove_duplicate=False)
    return {name: dict(vars(param)) for name, param in named}


def _say(module: nn.Module, said: dict[str, dict[str, Any]]) -> None:
    for name, param in module.named_parameters(remove_duplicate=False):
        for attribute, value in said.get(name, {}).items():
            if not hasattr(param, attribute):
                setattr(param, attribute, value)
