"""What a rank holds of a model: names as the model gave them, and pieces of whole tensors."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

import ezpz_tp
from ezpz_dist._errors import CheckpointError
from ezpz_dist._replicas import find_wrapper
from ezpz_dist._world import parallel_state
from ezpz_tp import Piece, Shard

# A rank's place in ezpz_tp's groups.

AXES = ("tensor", "context", "pipeline", "data")


@dataclass(frozen=True, slots=True)
class Layout:
    """How many ranks there are along each axis, and this rank's index along it."""

    degrees: dict[str, int]
    index: dict[str, int]

    @property
    def is_first_of_stage(self) -> bool:
        return self.index["tensor"] == 0 and not self.is_replica

    @property
    def is_replica(self) -> bool:
        """Whether other data- or context-parallel ranks precede this one."""
        return self.index["data"] > 0 or self.index["context"] > 0


def find_layout(rank: int, size: int) -> Layout:
    """Return the layout of a rank of a world. Without ezpz_tp's groups all are data parallel."""
    state = parallel_state()
    if state is None:
        degrees = dict.fromkeys(AXES, 1)
        index = dict.fromkeys(AXES, 0)
        degrees["data"] = size
        index["data"] = rank
        return Layout(degrees, index)
    degrees = {axis: state.size(axis) for axis in AXES}
    index = {axis: state.index(axis) for axis in AXES}
    return Layout(degrees, index)


# Names without what wrappers add.

_WRAPPED_AS = {
    DistributedDataParallel: "module",
    FullyShardedDataParallel: "_fsdp_wrapped_module",
    CheckpointWrapper: "_checkpoint_wrapped_module",
}


def plain_name(model: nn.Module, name: str) -> str:
    """Return the name of a parameter or buffer without the parts that wrappers added."""
    parts = []
    module = model
    for part in name.split("."):
        if part != name_in_wrapper(type(module)):  # type: ignore[arg-type]  # a class is hashable
            parts.append(part)
        child = getattr(module, part, None)
        if isinstance(child, nn.Module):
            module = child
    return ".".join(parts)


@functools.lru_cache(maxsize=1024)  # it is called for each part of each name
def name_in_wrapper(kind: type[nn.Module]) -> str | None:
    """Return the name under which a wrapper has its module; None if it is no wrapper."""
    if kind.__name__ == "OptimizedModule":  # torch.compile's; importing it takes seconds
        return "_orig_mod"
    for wrapper, name in _WRAPPED_AS.items():
        if issubclass(kind, wrapper):
            return name
    return None


def parameters_by_name(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters by the plain names that the model's state dict has them under."""
    names: dict[int, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        names.setdefault(id(value), name)
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        found[plain_name(model, names.get(id(parameter), name))] = parameter
    return found


def find_tied_names(model: nn.Module) -> dict[str, set[str]]:
    """Return for each tensor's plain name all names that the same tensor has, this one too."""
    parameters = model.named_parameters(remove_duplicate=False)
    buffers = model.named_buffers(remove_duplicate=False)
    state = model.state_dict(keep_vars=True).items()
    names: dict[int, set[str]] = {}
    for name, value in chain(parameters, buffers, state):
        if isinstance(value, Tensor):
            names.setdefault(id(value), set()).add(plain_name(model, name))
    found: dict[str, set[str]] = {}
    for group in names.values():
        found.update(dict.fromkeys(group, group))
    return found


def find_frozen_names(model: nn.Module) -> set[str]:
    """Return the plain names of what needs no gradient, those of tied parameters too."""
    if is_fsdp1(model):
        raise ValueError(
            f"{type(model).__name__} is FSDP1's, which flattens frozen parameters with others; "
            "expected FSDP2 (fully_shard), DDP or a bare model with frozen=False"
        )
    frozen = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, nn.Parameter) and not value.requires_grad:
            frozen.add(plain_name(model, name))
    return frozen


def find_buffer_names(model: nn.Module) -> set[str]:
    buffers = model.named_buffers(remove_duplicate=False)
    return {plain_name(model, name) for name, _ in buffers}


# A model's state, by plain names.


def is_fsdp1(model: nn.Module) -> bool:
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def refuse_deepspeed(model: nn.Module) -> None:
    is_engine = find_wrapper(model) == "DeepSpeed"
    # As ZeRO-3 marks what it has taken apart.
    if is_engine or any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} is DeepSpeed's, which holds the state in parts of its own; "
            "expected engine.save_checkpoint() and engine.load_checkpoint()"
        )


@contextmanager
def hide_fsdp1_warnings() -> Iterator[None]:
    """Hide torch's warnings that FSDP1 is deprecated: whoever wraps with it has seen them."""
    with warnings.catch_warnings():
        for text in ("Please use DTensor instead", "FSDP.state_dict_type"):
            warnings.filterwarnings("ignore", text, FutureWarning)
        yield


def sharded_state(model: nn.Module) -> AbstractContextManager[object]:
    if is_fsdp1(model):
        kind = StateDictType.SHARDED_STATE_DICT
        return FullyShardedDataParallel.state_dict_type(model, kind)
    return nullcontext()


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return a model's state by plain names. Its tensors are those in use."""
    # Not get_model_state_dict: it looks for an attribute of every name, and wants a tensor at
    # least; what its counterpart expects of a module under two names it does not give (2.13).
    with hide_fsdp1_warnings(), sharded_state(model):
        return {plain_name(model, name): value for name, value in model.state_dict().items()}


def set_model_state(model: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Load a model's state, complete and by plain names."""
    with hide_fsdp1_warnings(), sharded_state(model):
        named = {name: state[plain_name(model, name)] for name in model.state_dict()}
        try:
            model.load_state_dict(named, strict=strict)
        except RuntimeError as error:
            raise ValueError(
                f"{' '.join(str(error).split())}; expected a model that can load its own "
                "state_dict(): hooks that change it need a counterpart for loading"
            ) from error


def is_extra_state(name: str) -> bool:
    """Whether a name of a state dict is that of what a module's ``get_extra_state`` returned."""
    return name.rpartition(".")[2] == "_extra_state"


def is_in_pieces(name: str, value: Any) -> bool:
    """Whether a value of a model's state is saved in pieces."""
    if is_extra_state(name) and not isinstance(value, DTensor):
        return False  # it may have another shape each time
    return has_pieces(value)


def has_pieces(value: Any) -> bool:
    """Whether a value is a tensor that can be cut. A sparse one is saved whole."""
    if isinstance(value, ShardedTensor):
        return True
    is_dense = isinstance(value, Tensor) and value.layout is torch.strided
    return is_dense and not value.is_quantized


def replica_state(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that may differ between ranks: whole buffers, and extra state."""
    buffers = find_buffer_names(model)
    found: dict[str, Any] = {}
    for name, value in state.items():
        is_whole_buffer = name in buffers and not isinstance(value, DTensor)
        if is_whole_buffer or not is_in_pieces(name, value):
            found[name] = tree_map_only(Tensor, detach, value)
    return found


def detach(tensor: Tensor) -> Tensor:
    """Return a tensor without its graph, as a plain one unless its class has a layout."""
    detached = tensor.detach()
    if type(detached) is Tensor or has_custom_layout(detached):
        return detached
    return detached.as_subclass(Tensor)


def has_custom_layout(tensor: Tensor) -> bool:
    """True if a tensor's class computes its values, as quantized ones do."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


# A tensor as a rank holds it: which pieces of the whole, at which offsets.

LocalPiece = tuple[Piece, Tensor]
"""Of the whole, and its elements: a view of what is in use."""


class Pieces(NamedTuple):
    """What a rank holds of one tensor."""

    shape: tuple[int, ...]  # of the whole
    dtype: torch.dtype
    held: tuple[LocalPiece, ...]


def find_pieces(
    tensor: Tensor, shard: Shard | None = None, index: int = 0, degree: int = 1
) -> Pieces:
    """Return what a rank holds.

    Args:
        tensor: This rank's: plain, a DTensor, or FSDP1's ShardedTensor.
        shard: How tensor-parallel ranks share the whole; None: they do not.
        index: The rank's place among these.
        degree: Their number.
    """
    if isinstance(tensor, ShardedTensor):
        metadata = tensor.metadata()  # size() and dtype warn that FSDP1 is deprecated
        return Pieces(
            tuple(metadata.size), metadata.tensor_properties.dtype, tuple(list_local(tensor))
        )
    if tensor.is_meta:
        raise ValueError("it is on the meta device, without values; expected to_empty() first")
    local = tuple(list_local(tensor))
    shape = tuple(tensor.size())
    if shard is None or shard.dim is None:
        return Pieces(shape, tensor.dtype, local)
    expected = shard.local_shape(index, degree)
    if shape != expected:
        raise ValueError(
            f"it has shape {shape}; expected {expected}, part {index} of {degree} of "
            f"{shard.full_shape}: make the groups (setup_torch) before the layers"
        )
    held = []
    for piece, elements in local:
        for part, full in shard.boxes(index, degree, piece):
            held.append((full, elements[part.within(piece).slices]))
    return Pieces(shard.full_shape, tensor.dtype, tuple(held))


def list_local(tensor: Tensor) -> Iterator[LocalPiece]:
    if isinstance(tensor, DTensor):
        # Ranks outside of its mesh hold nothing, and so do the last of an uneven split.
        if tensor.device_mesh.get_coordinate() is None:
            return
        local = tensor.to_local().detach()
        for chunk in cast("list[ChunkStorageMetadata]", tensor.__create_chunk_list__()):
            if all(chunk.sizes):
                yield make_piece(tuple(chunk.offsets), tuple(chunk.sizes)), local
    elif isinstance(tensor, ShardedTensor):
        for shard in tensor.local_shards():
            metadata = shard.metadata
            if all(metadata.shard_sizes):
                piece = make_piece(tuple(metadata.shard_offsets), tuple(metadata.shard_sizes))
                yield piece, shard.tensor.detach()
    else:
        yield make_piece((0,) * tensor.dim(), tuple(tensor.shape)), tensor.detach()


@functools.lru_cache(maxsize=4096)
def make_piece(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Piece:
    # Equal ones are one object, which is pickled once, however many tensors there are.
    return Piece(offsets, sizes)


class Splits:
    """How a model's parameters, and what an optimizer has of them, are split over ranks."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self._layout = layout
        self._parameters = parameters_by_name(model)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._parameters.setdefault(plain_name(model, name), parameter)
        degree = layout.degrees["tensor"]
        self._shards: dict[str, Shard | None] = {}
        for name, tensor in self._parameters.items():
            self._shards[name] = ezpz_tp.shard_of(tensor, degree)
        self._peers: set[int] = set()
        if degree > 1:
            self._peers.update(ezpz_tp.get_state().ranks("tensor"))
            self._check_split(model, degree)

    def _check_split(self, model: nn.Module, degree: int) -> None:
        """Refuse a model without any mark that tensor-parallel ranks hold parts of it."""
        for name, parameter in self._parameters.items():
            shard = self._shards[name]
            if shard is None or shard.dim is not None or self._is_over_peers(parameter):
                return
        if self._parameters:
            raise CheckpointError(
                f"there are {degree} tensor-parallel ranks, but no parameter of "
                f"{type(model).__name__} says what it is a part of, and one rank's would be saved "
                "for all; expected layers of ezpz_tp; wrap with fully_shard inside `with "
                "ezpz_tp.keep_attributes(model):`, and of weights of your own say it by "
                "ezpz_tp.set_shard"
            )

    def _is_over_peers(self, tensor: Any) -> bool:
        # DTensors of parallelize_module may lie over the tensor-parallel group.
        mesh = getattr(tensor, "device_mesh", None)
        if mesh is None:
            return False
        return len(self._peers.intersection(mesh.mesh.flatten().tolist())) > 1

    def is_sharded(self, name: str) -> bool:
        """True if a parameter knows which part of a whole it is."""
        shard = self._shards.get(name)
        is_part = shard is not None and shard.dim is not None
        return is_part or isinstance(self._parameters.get(name), DTensor)

    def is_split_like(self, name: str, value: Tensor) -> bool:
        """True if a plain tensor is shared among ranks as the plain parameter is."""
        parameter = self._parameters[name]
        return not isinstance(parameter, DTensor) and value.size() == parameter.size()

    def list_held_pieces(self, name: str) -> list[Piece]:
        """Return the pieces of a parameter that this rank holds."""
        return [piece for piece, _ in self.cut_model_tensor(name, self._parameters[name]).held]

    def cut_model_tensor(self, name: str, value: Tensor) -> Pieces:
        return self._cut(name, value, name)

    def cut_optimizer_tensor(self, name: str, key: str, value: Tensor) -> Pieces:
        if isinstance(value, ShardedTensor):
            return find_pieces(value)  # FSDP1's, of the whole parameter
        what = f"{key!r} of {name!r} in the optimizer"
        parameter = self._parameters.get(name)
        owner = ""
        if parameter is not None and value.size() == parameter.size():
            owner = name
        pieces = self._cut(what, value, owner)
        for _, local in pieces.held:
            if has_custom_layout(local):
                raise CheckpointError(
                    f"{what}: it is a {type(local).__name__}; expected a plain tensor: a new "
                    "optimizer could not be given one back"
                )
        return pieces

    def _cut(self, what: str, value: Tensor, owner: str) -> Pieces:
        parameter = self._parameters.get(owner)
        if not getattr(parameter, "allreduce", True):
            raise CheckpointError(
                f"{what} is an expert's (allreduce is False), split over expert groups; only "
                "parameters split over the tensor group can be saved"
            )
        index = self._layout.index["tensor"]
        degree = self._layout.degrees["tensor"]
        try:
            return find_pieces(value, self._shards.get(owner), index, degree)
        except ValueError as error:
            raise CheckpointError(f"{what}: {error}") from error
