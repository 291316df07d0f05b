"""All that a check-point holds, by key: tensors in pieces, and the rest as bytes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

from ezpz_dist._errors import CheckpointError

from . import objects
from .layout import Layout
from .names import is_fsdp1, parameters_by_name, plain_name, quietly
from .optimizers import State
from .pieces import Pieces, blob_of, pieces_of

MODEL = "model."
OPTIMIZER = "optimizer.state."
VALUES = "optimizer.values."
COMMON = "common"

Held = dict[str, Pieces]


def stage_key(stage: int) -> str:
    """Return the key of what is no tensor in a pipeline stage's model and optimizer."""
    return f"stage.{stage:04d}"


def rank_key(rank: int) -> str:
    """Return the key of what a rank has for itself."""
    return f"rank.{rank:07d}"


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return a model's state by plain names; its tensors are those in use."""
    # Not get_model_state_dict: it looks for an attribute of every name, and wants a tensor at
    # least; what its counterpart expects of a module under two names it does not give (2.13).
    with quietly(), _sharded(model):
        return {plain_name(model, name): value for name, value in model.state_dict().items()}


def set_model_state(model: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Give a model its state, all of which it has, by plain names.

    Raises:
        ValueError: `load_state_dict` refuses what `state_dict` gave: a hook of the model's.
    """
    with quietly(), _sharded(model):
        named = {name: state[plain_name(model, name)] for name in model.state_dict()}
        try:
            model.load_state_dict(named, strict=strict)
        except RuntimeError as error:
            raise ValueError(
                f"{' '.join(str(error).split())}; expected a model that can load its own "
                "state_dict(): hooks that change it need a counterpart for loading"
            ) from error


def _sharded(model: nn.Module) -> AbstractContextManager[object]:
    if not is_fsdp1(model):
        return nullcontext()
    kind = StateDictType.SHARDED_STATE_DICT
    return FullyShardedDataParallel.state_dict_type(model, kind)


def optimizer_key(name: str, key: str, prefix: str = OPTIMIZER) -> str:
    """Return the key of a tensor of a parameter's state."""
    return f"{prefix}{name}.{key}"


def split_key(key: str, names: Mapping[str, Any], prefix: str = OPTIMIZER) -> tuple[str, str]:
    """Return parameter and key of a tensor of an optimizer's state; both may have dots.

    The longest of the names that fits; of none, what precedes the last dot.
    """
    rest = key.removeprefix(prefix)
    at = len(rest)
    while (at := rest.rfind(".", 0, at)) > 0:
        if rest[:at] in names:
            return rest[:at], rest[at + 1 :]
    name, _, last = rest.rpartition(".")
    return name, last


class Parts:
    """How this rank's tensors are parts of whole ones.

    Args:
        model: The model, wrapped or not.
        layout: This rank's place in ezpz_tp's groups.

    Raises:
        CheckpointError: Tensor-parallel ranks hold different parts, and nothing says of what.
    """

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self._model, self._layout = model, layout
        self._parameters = parameters_by_name(model)
        degree = layout.degrees["tensor"]
        tp = sys.modules.get("ezpz_tp")
        self._shards = (
            {name: tp.shard_of(one, degree) for name, one in self._parameters.items()} if tp else {}
        )
        split = any(one is None or one.dim is not None for one in self._shards.values())
        if degree > 1 and self._shards and not split and not self._is_split_by_torch():
            raise CheckpointError(
                f"there are {degree} tensor-parallel ranks, but no parameter of "
                f"{type(model).__name__} says what it is a part of, and one rank's would be saved "
                "for all; expected layers of ezpz_tp; wrap with fully_shard inside `with "
                "ezpz_tp.keep_attributes(model):`, and of weights of your own say it by "
                "ezpz_tp.set_shard"
            )

    @property
    def buffers(self) -> set[str]:
        """Return the names of the model's buffers."""
        named = self._model.named_buffers(remove_duplicate=False)
        return {plain_name(self._model, name) for name, _ in named}

    def _is_split_by_torch(self) -> bool:
        """Return whether DTensors of parallelize_module lie over the tensor-parallel group."""
        tp = sys.modules["ezpz_tp"]
        state = tp.current_state()
        import torch.distributed as dist  # noqa: PLC0415 - beside its use

        peers = set(dist.get_process_group_ranks(state.group("tensor")))
        meshes = [getattr(one, "device_mesh", None) for one in self._parameters.values()]
        return any(
            mesh is not None and len(peers & set(mesh.mesh.flatten().tolist())) > 1
            for mesh in meshes
        )

    def of_model(self, name: str, tensor: Tensor) -> Pieces:
        """Return the pieces of a tensor of the model's state."""
        return self._pieces(name, tensor, name)

    def of_state(self, name: str, key: str, tensor: Tensor) -> Pieces:
        """Return the pieces of a tensor of an optimizer's state."""
        if hasattr(tensor, "local_shards"):
            return pieces_of(tensor)  # FSDP1's, of the whole parameter
        owner = self._parameters.get(name)
        alike = owner is not None and tensor.size() == owner.size()
        shard = self._shards.get(name)
        if shard is not None and shard.dim is not None and not alike and tensor.numel() > 1:
            raise CheckpointError(
                f"{key!r} of {name!r} in the optimizer has shape {tuple(tensor.shape)}; expected "
                "that of its parameter, or one number: how tensor-parallel ranks share it cannot "
                "be told"
            )
        return self._pieces(f"{key!r} of {name!r} in the optimizer", tensor, name if alike else "")

    def _pieces(self, what: str, tensor: Tensor, owner: str) -> Pieces:
        index, degree = self._layout.index["tensor"], self._layout.degrees["tensor"]
        parameter, shard = self._parameters.get(owner), self._shards.get(owner)
        if not getattr(parameter, "allreduce", True):
            raise CheckpointError(
                f"{what} is an expert's (allreduce is False), split over expert groups; only "
                "parameters split over the tensor group can be saved"
            )
        try:
            return pieces_of(tensor, shard, index, degree)
        except ValueError as error:
            raise CheckpointError(f"{what}: {error}") from error


def held_by(
    parts: Parts, model: Mapping[str, Any], state: State
) -> tuple[Held, dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the tensors of model and optimizer by key, and what of each is no tensor."""
    held: Held = {}
    values: dict[str, Any] = {}
    for name, value in model.items():
        if _has_pieces(value):
            held[MODEL + name] = parts.of_model(name, value)
        else:
            values[name] = value
    others: dict[str, dict[str, Any]] = {}
    for name, entries in state.items():
        for key, value in entries.items():
            if _has_pieces(value):
                held[optimizer_key(name, key)] = parts.of_state(name, key, value)
            else:
                others.setdefault(name, {})[key] = value
    return held, values, others


def _has_pieces(value: Any) -> bool:
    """Return whether it is a tensor that can be cut; a sparse one is saved whole, with the rest."""
    dense = isinstance(value, Tensor) and value.layout is torch.strided
    return dense or hasattr(value, "local_shards")


def encoded(what: str, value: Any) -> Pieces:
    """Return what is no tensor as the bytes of one."""
    return blob_of(objects.encode(what, value))


def values_of(others: Mapping[str, Mapping[str, Any]]) -> Held:
    """Return what is no tensor in an optimizer's state, by key."""
    return {VALUES + name: encoded(f"the state of {name!r}", each) for name, each in others.items()}


def state_dicts(things: Any) -> Any:
    """Return the state of an object, or of several; a dict is its own, and None none."""
    if things is None:
        return None
    if isinstance(things, Mapping):
        return dict(things)
    if isinstance(things, Sequence):
        return [state_dicts(each) for each in things]
    return things.state_dict()


def load_state_dicts(things: Any, state: Any) -> None:
    """Give an object, or several, their state back; a dict is filled anew."""
    if isinstance(things, dict):
        things.clear()
        things.update(state)
    elif isinstance(things, Sequence):
        for each, saved in zip(things, state, strict=True):
            load_state_dicts(each, saved)
    else:
        things.load_state_dict(state)
