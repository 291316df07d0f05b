"""What a checkpoint holds, by name: pieces of tensors, optimizers, random streams, the rest."""

from __future__ import annotations

import datetime as dt
import functools
import hashlib
import io
import pickle
import random
import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from pathlib import PurePath
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

import ezpz_tp
from ezpz_dist._errors import CheckpointError
from ezpz_dist._objects import as_tensor
from ezpz_dist._setup import seed_generators
from ezpz_dist._world import World, parallel_state
from ezpz_tp import Piece, Shard

# This rank's place in ezpz_tp's groups; alone along every axis where there are none.

AXES = ("tensor", "context", "pipeline", "data")


@dataclass(frozen=True, slots=True)
class Layout:
    degrees: dict[str, int]
    index: dict[str, int]


def current_layout(rank: int, size: int) -> Layout:
    """Return the layout of a rank of a world; all are data parallel without ezpz_tp's groups."""
    if (state := parallel_state()) is None:
        degrees, index = dict.fromkeys(AXES, 1), dict.fromkeys(AXES, 0)
        return Layout(degrees | {"data": size}, index | {"data": rank})
    return Layout(*({axis: of(axis) for axis in AXES} for of in (state.size, state.index)))


# A model's tensors by the names that the model itself gave them, whatever wraps it.

_INSIDE = {
    DistributedDataParallel: "module",
    FullyShardedDataParallel: "_fsdp_wrapped_module",
    CheckpointWrapper: "_checkpoint_wrapped_module",
}


def plain_name(model: nn.Module, name: str) -> str:
    """Return a parameter's name without the parts that wrappers added."""
    kept, module = [], model
    for part in name.split("."):
        if part != _added_by(type(module)):  # type: ignore[arg-type]  # a class is hashable
            kept.append(part)
        child = getattr(module, part, None)
        if isinstance(child, nn.Module):
            module = child
    return ".".join(kept)


@functools.lru_cache(maxsize=1024)  # asked for each part of each name
def _added_by(kind: type[nn.Module]) -> str | None:
    """Return the name under which a wrapper holds its module; None: it is none."""
    if kind.__name__ == "OptimizedModule":  # torch.compile's; importing it takes seconds
        return "_orig_mod"
    return next((inside for outer, inside in _INSIDE.items() if issubclass(kind, outer)), None)


@contextmanager
def quietly() -> Iterator[None]:
    """Keep back torch's warnings that FSDP1 is deprecated: whoever uses it was told by torch."""
    with warnings.catch_warnings():
        for text in ("Please use DTensor instead", "FSDP.state_dict_type"):
            warnings.filterwarnings("ignore", text, FutureWarning)
        yield


def refuse_deepspeed(model: nn.Module) -> None:
    engine = any(kind.__name__ == "DeepSpeedEngine" for kind in type(model).__mro__)
    if engine or any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} is DeepSpeed's, which holds the state in parts of its own; "
            "expected engine.save_checkpoint() and engine.load_checkpoint()"
        )


def is_fsdp1(model: nn.Module) -> bool:
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def parameters_by_name(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters by the names that the model's state dict has them under."""
    renamed = {id(value): key for key, value in reversed(model.state_dict(keep_vars=True).items())}
    return {
        plain_name(model, renamed.get(id(parameter), name)): parameter
        for name, parameter in model.named_parameters()
    }


def tied_names(model: nn.Module) -> dict[str, set[str]]:
    """Return for each tensor's plain name all names that the same tensor has, this one too."""
    state = model.state_dict(keep_vars=True)
    parameters = model.named_parameters(remove_duplicate=False)
    buffers = model.named_buffers(remove_duplicate=False)
    names: dict[int, set[str]] = {}
    for name, value in chain(parameters, buffers, state.items()):
        if isinstance(value, Tensor):
            names.setdefault(id(value), set()).add(plain_name(model, name))
    return {name: group for group in names.values() for name in group}


def frozen_names(model: nn.Module) -> set[str]:
    """Return the plain names of what needs no gradient, those of tied parameters too."""
    if is_fsdp1(model):
        raise ValueError(
            f"{type(model).__name__} is FSDP1's, which flattens frozen parameters with others; "
            "expected FSDP2 (fully_shard), DDP or a bare model with frozen=False"
        )
    held = model.state_dict(keep_vars=True).items()
    frozen = (k for k, one in held if isinstance(one, nn.Parameter) and not one.requires_grad)
    return {plain_name(model, name) for name in frozen}


# A tensor as this rank holds it: which pieces of the whole, at which offsets.

LocalPiece = tuple[Piece, Tensor]  # of the whole, and its elements: a view of what is in use


class Pieces(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    held: tuple[LocalPiece, ...]

    def at(self, offsets: tuple[int, ...]) -> Tensor:
        return next(tensor for piece, tensor in self.held if piece.offsets == offsets)


def pieces_of(
    tensor: Tensor, shard: Shard | None = None, index: int = 0, degree: int = 1
) -> Pieces:
    if isinstance(tensor, ShardedTensor):
        about = tensor.metadata()  # size() and dtype warn that FSDP1 is deprecated
        return Pieces(tuple(about.size), about.tensor_properties.dtype, tuple(_local(tensor)))
    if tensor.is_meta:
        raise ValueError("it is on the meta device, without values; expected to_empty() first")
    local, shape = tuple(_local(tensor)), tuple(tensor.size())
    if shard is None or shard.dim is None:
        return Pieces(shape, tensor.dtype, local)
    expected = shard.local_shape(index, degree)
    if shape != expected:
        raise ValueError(
            f"it has shape {shape}; expected {expected}, part {index} of {degree} of "
            f"{shard.full_shape}: make the groups (setup_torch) before the layers"
        )
    cut = [
        (full, tensor[part.within(piece).slices])
        for piece, tensor in local
        for part, full in shard.boxes(index, degree, piece)
    ]
    return Pieces(shard.full_shape, tensor.dtype, tuple(cut))


def _local(tensor: Tensor) -> Iterator[LocalPiece]:
    if isinstance(tensor, DTensor):
        # Ranks outside of its mesh hold nothing, and so do the last of an uneven split.
        if tensor.device_mesh.get_coordinate() is not None:
            local = tensor.to_local().detach()
            for one in cast("list[ChunkStorageMetadata]", tensor.__create_chunk_list__()):
                if all(one.sizes):
                    yield _piece(tuple(one.offsets), tuple(one.sizes)), local
    elif isinstance(tensor, ShardedTensor):
        for shard in tensor.local_shards():
            about = shard.metadata
            if all(about.shard_sizes):
                piece = _piece(tuple(about.shard_offsets), tuple(about.shard_sizes))
                yield piece, shard.tensor.detach()
    else:
        yield _piece((0,) * tensor.dim(), tensor.shape), tensor.detach()


@functools.lru_cache(maxsize=4096)
def _piece(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Piece:
    # What is equal is one object, which is pickled once, however many tensors there are.
    return Piece(tuple(offsets), tuple(sizes))


def blob_of(value: Any) -> Pieces:
    data = as_tensor(value)
    return Pieces((len(data),), torch.uint8, ((Piece((0,), (len(data),)), data),))


# An optimizer's state by the names of parameters, so that another wrapper's can take it.

State = dict[str, dict[str, Any]]
Options = list[dict[str, Any]]


def state_of(model: nn.Module, optimizers: Sequence[Optimizer]) -> tuple[State, Options]:
    """Return the states that this rank holds, not copied, and the options of parameters by name."""
    if is_fsdp1(model):
        return _of_fsdp1(model, [one for one in optimizers if one.state])
    names = {parameter: name for name, parameter in parameters_by_name(model).items()}
    state: State = {}
    options: Options = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            named = [_name(parameter, names, model) for parameter in group["params"]]
            options.append(_options(named, group))
        for parameter, values in _holder(optimizer).state.items():
            state[_name(parameter, names, model)] = dict(values)
    return state, options


_NAMES_IN_A_GROUP = ("params", "param_names")
"""Which parameters a group of an optimizer has: not options, and each layout has others."""


def _options(names: list[str], group: Mapping[str, Any]) -> dict[str, Any]:
    rest = {key: value for key, value in group.items() if key not in _NAMES_IN_A_GROUP}
    return {"names": names, "options": rest}


def _name(parameter: Tensor, names: Mapping[Tensor, str], model: nn.Module) -> str:
    if parameter not in names:
        raise ValueError(
            f"a parameter of the optimizer, of shape {tuple(parameter.shape)}, is none of "
            f"{type(model).__name__}'s; expected the model that the optimizer was made for, as "
            "it is wrapped now"
        )
    return names[parameter]


def _holder(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that has the state: ZeRO-1's is a local one, of this rank's share."""
    # Not imported: that compiles scripts, with a warning. Whoever has one did it.
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if module is None or not isinstance(optimizer, module.ZeroRedundancyOptimizer):
        return optimizer
    return cast("Optimizer", optimizer.optim)


def room_for(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    saved: Mapping[str, Mapping[str, Any]],
    saved_dtypes: Mapping[str, torch.dtype],
) -> State:
    """Return tensors to fill, like those that were saved, of the parameters that are here.

    ``saved_dtypes`` are those of the parameters.
    """
    if is_fsdp1(model):
        return _of_fsdp1(model, optimizers)[0] if saved else {}
    state: State = {}
    names = {parameter: name for name, parameter in parameters_by_name(model).items()}
    for inner in map(_holder, optimizers):
        for parameter in (each for group in inner.param_groups for each in group["params"]):
            name = _name(parameter, names, model)
            before = inner.state.get(parameter, {})
            state[name] = {}
            for key, about in saved.get(name, {}).items():
                present = before.get(key)
                dtype = about.dtype
                if key != "step" and name in saved_dtypes:
                    dtype = _state_dtype(dtype, saved_dtypes[name], parameter.dtype, present)
                if key == "step" and not isinstance(present, Tensor):
                    # Optimizers count on the host, unless their state says otherwise.
                    state[name][key] = torch.empty(about.size, dtype=dtype)
                    continue
                what = f"{key!r} of {name!r}"
                state[name][key] = _like(what, parameter, present, about.size, dtype)
    return state


def _state_dtype(
    saved: torch.dtype, parameter_saved: torch.dtype, parameter: torch.dtype, present: Any
) -> torch.dtype:
    """Return the dtype that a state is loaded with: its own, unless its parameter is cast."""
    if parameter == parameter_saved:
        return saved
    # strict=False.
    if isinstance(present, Tensor):
        return present.dtype
    if saved == parameter_saved:
        return parameter
    return saved


def _like(
    what: str, parameter: Tensor, present: Any, size: torch.Size, dtype: torch.dtype
) -> Tensor:
    if isinstance(present, Tensor):
        if present.dtype == dtype:
            return present.detach()
        return torch.empty_like(present, dtype=dtype)
    whole = getattr(parameter, "full_shape", parameter.shape)
    if tuple(size) in (tuple(parameter.shape), tuple(whole)):
        # Zeros: what pads a vocabulary is in no checkpoint.
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    if size.numel() == 1:
        return torch.empty(size, dtype=dtype)
    if isinstance(parameter, DTensor):
        raise ValueError(
            f"{what} in the optimizer was saved with shape {tuple(size)}, the parameter has "
            f"{tuple(parameter.shape)}: how it is sharded cannot be told; make one step with the "
            "optimizer before load_checkpoint"
        )
    return torch.empty(size, dtype=dtype, device=parameter.device)


def set_state(
    model: nn.Module, optimizers: Sequence[Optimizer], state: State, options: Options
) -> None:
    if not options:
        return  # FSDP1's, saved before the first step
    if is_fsdp1(model):
        saved = [{**group["options"], "params": group["names"]} for group in options]
        if state:
            held: Any = {"state": state, "param_groups": saved}
            with quietly():
                dcp.set_optimizer_state_dict(model, optimizers, held)
        return
    names = {parameter: name for name, parameter in parameters_by_name(model).items()}
    for optimizer in optimizers:
        inner = _holder(optimizer)
        flat = [each for group in inner.param_groups for each in group["params"]]
        numbers = {parameter: number for number, parameter in enumerate(flat)}
        groups = []
        for group in inner.param_groups:
            found = options_of([names[each] for each in group["params"]], options)
            groups.append(group | found | {"params": [numbers[each] for each in group["params"]]})
        own = {numbers[each]: state[names[each]] for each in flat if state.get(names[each])}
        inner.load_state_dict({"state": own, "param_groups": groups})
        _restore_dtypes(inner, own)
        if inner is not optimizer:
            for group in optimizer.param_groups:
                group.update(options_of([names[each] for each in group["params"]], options))


def _restore_dtypes(optimizer: Optimizer, numbered: Mapping[int, dict[str, Any]]) -> None:
    """Put back what ``load_state_dict`` cast to the dtype of its parameter (torch 2.13)."""
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, parameter in enumerate(parameters):
        loaded = optimizer.state.get(parameter, {})
        for key, value in numbered.get(number, {}).items():
            # What "step" is depends on how the optimizer works, not on what was saved.
            if key != "step" and key in loaded:
                loaded[key] = _with_saved_dtype(loaded[key], value)


def _with_saved_dtype(loaded: Any, saved: Any) -> Any:
    if type(loaded) is not type(saved):
        return loaded  # an optimizer with its own way of loading
    if isinstance(saved, Tensor):
        if loaded.dtype == saved.dtype:
            return loaded
        return saved.to(loaded.device)
    if isinstance(saved, dict) and loaded.keys() == saved.keys():
        return {key: _with_saved_dtype(loaded[key], value) for key, value in saved.items()}
    if type(saved) in (list, tuple) and len(loaded) == len(saved):
        pairs = zip(loaded, saved, strict=True)
        return type(saved)(_with_saved_dtype(one, other) for one, other in pairs)
    return loaded


def options_of(named: Sequence[str], saved: Options) -> dict[str, Any]:
    held = set(named)
    groups = [group for group in saved if held & set(group["names"])]
    lost = held - {name for group in groups for name in group["names"]}
    different = [group for group in groups if group["options"] != groups[0]["options"]]
    if lost or different:
        where = f"{min(lost)!r} was in none" if lost else f"they were in {len(groups)}"
        raise ValueError(
            f"a group of the optimizer has {len(held)} parameters, and of the groups that were "
            f"saved {where}; expected the groups that the optimizer was saved with"
        )
    return dict(groups[0]["options"]) if groups else {}


def _of_fsdp1(model: nn.Module, optimizers: Sequence[Optimizer]) -> tuple[State, Options]:
    if not optimizers:
        return {}, []
    with quietly():
        found: dict[str, Any] = dcp.get_optimizer_state_dict(model, optimizers)
    options = [_options(list(group["params"]), group) for group in found["param_groups"]]
    return dict(found["state"]), options


# The streams of random numbers of a rank.


def device_of(model: nn.Module, world: World | None) -> torch.device:
    """Return the device whose stream a rank draws from: without `setup_torch` the model's."""
    tensors = chain(model.parameters(), model.buffers())
    found = (one.device for one in tensors if not one.is_meta)
    return world.device if world is not None else next(found, torch.device("cpu"))


def rng_state(device: torch.device) -> dict[str, Any]:
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if numpy := sys.modules.get("numpy"):
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (kind, keys.tolist(), *rest)
    if device.type != "cpu":
        state["device"] = (device.type, torch.get_device_module(device).get_rng_state(device))
    if (tracker := ezpz_tp.get_rng_tracker()).is_initialized():
        state["ezpz_tp"] = tracker.get_states()
    return state


def set_rng_state(state: dict[str, Any], device: torch.device) -> list[str]:
    """Put this rank's streams where they were; return notes on those that could not be."""
    notes = []
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    numpy = sys.modules.get("numpy")
    if numpy and "numpy" in state:
        numpy.random.set_state(state["numpy"])
    elif numpy:
        notes.append("numpy's random numbers stay as they are: it was not imported at the save")
    if device.type != "cpu":
        kind, held = state.get("device", ("cpu", None))
        if kind == device.type:
            torch.get_device_module(device).set_rng_state(held, device)
        else:
            notes.append(f"random numbers on {device.type} stay as they are: saved on {kind}")
    if "ezpz_tp" in state:
        ezpz_tp.get_rng_tracker().set_states(state["ezpz_tp"])
    return notes


def derive_rng_state(saved: bytes, stream: tuple[int, ...]) -> None:
    """Seed the streams of a rank that was not there, from the state of rank 0; always the same."""
    # Not seeds of `seed_for_rank`: those have been drawn from already.
    digest = hashlib.sha256(saved + repr(stream).encode()).digest()
    value = int.from_bytes(digest[:8], "little") >> 4
    seed_generators(value)
    if ezpz_tp.get_rng_tracker().is_initialized():
        ezpz_tp.seed_model_parallel(value)


# What is no tensor, as bytes that are read without running code.


def encoded(what: str, value: Any) -> Pieces:
    """Return an object's bytes as a tensor, having made sure that they can be read again."""
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        decode(what, stream.getvalue())
    except (ValueError, TypeError, AttributeError, pickle.PicklingError, RuntimeError) as error:
        named = value.items() if isinstance(value, dict) else ()
        found = next((found for key, one in named if (found := _culprit(str(key), one))), None)
        culprit = found or f"{what} ({str(error).splitlines()[0]})"
        raise TypeError(
            f"{culprit} cannot be saved so that it can be read without running code; expected "
            "numbers, strings, tensors, None, and tuples, lists and dicts of them"
        ) from error
    return blob_of(stream.getvalue())


def plain(value: Any) -> Any:
    """Return a value with common types inside as plain ones; what is none of these as it is."""
    numpy = sys.modules.get("numpy")
    if isinstance(value, Enum):
        value = plain(value.value)
    elif numpy and isinstance(value, numpy.generic):
        number = value.item()
        value = value if isinstance(number, numpy.generic) else plain(number)
    elif isinstance(value, PurePath):
        value = str(value)
    elif isinstance(value, dt.date | dt.time):
        value = value.isoformat()
    elif isinstance(value, dt.timedelta):
        value = value.total_seconds()
    elif type(value) in (dict, OrderedDict):
        value = type(value)((plain(key), plain(each)) for key, each in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        value = tuple(map(plain, value))
    elif type(value) in (list, tuple, set):
        value = type(value)(map(plain, value))
    return value


def decode(what: str, data: bytes) -> Any:
    """Return an object from its bytes. Never runs code that is in them."""
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{what} is damaged, or holds what is not read because it could run code: {reason}"
        ) from error


_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.Tensor, torch.dtype, torch.Size)


def _culprit(path: str, value: Any) -> str | None:
    """Return the first thing inside that is not plain, with its place; None: all is."""
    if isinstance(value, dict):
        items = [(f"{path}[{key!r}]", each) for key, each in value.items()]
        items += [(f"a key of {path}", key) for key in value]
    elif type(value) in (list, tuple, set):
        items = [(f"{path}[{number}]", each) for number, each in enumerate(value)]
    elif type(value) in _PLAIN or isinstance(value, torch.Tensor):
        return None
    else:
        return f"{path}, of type {type(value).__module__}.{type(value).__qualname__},"
    return next((found for each in items if (found := _culprit(*each))), None)


# All that a checkpoint holds, by key: tensors in pieces, and the rest as bytes.

MODEL = "model."
OPTIMIZER = "optimizer.state."
VALUES = "optimizer.values."
COMMON = "common"
REPLICA = "replica."

Held = dict[str, Pieces]


def stage_key(stage: int) -> str:
    return f"stage.{stage:04d}"


def rank_key(rank: int) -> str:
    return f"rank.{rank:07d}"


def replica_key(rank: int) -> str:
    return f"{REPLICA}{rank:07d}"


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return a model's state by plain names; its tensors are those in use."""
    # Not get_model_state_dict: it looks for an attribute of every name, and wants a tensor at
    # least; what its counterpart expects of a module under two names it does not give (2.13).
    with quietly(), _sharded(model):
        return {plain_name(model, name): value for name, value in model.state_dict().items()}


def set_model_state(model: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Give a model its state, all of which it has, by plain names."""
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
    if is_fsdp1(model):
        kind = StateDictType.SHARDED_STATE_DICT
        return FullyShardedDataParallel.state_dict_type(model, kind)
    return nullcontext()


def is_extra_state(name: str) -> bool:
    """Whether a name of a state dict is that of what ``get_extra_state`` of a module returned."""
    return name.rpartition(".")[2] == "_extra_state"


def replica_state(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what each rank may have values of its own of: buffers, and what is no tensor.

    On the host, so that it is the same bytes on ranks where it has the same values.
    """
    buffers = {plain_name(model, name) for name, _ in model.named_buffers(remove_duplicate=False)}
    found: dict[str, Any] = {}
    for name, value in state.items():
        is_whole_buffer = name in buffers and not isinstance(value, DTensor)
        if is_whole_buffer or not _is_in_pieces(name, value):
            found[name] = tree_map_only(Tensor, _copy_to_host, value)
    return found


def _copy_to_host(tensor: Tensor) -> Tensor:
    # A copy: of a view, torch.save writes all that it is a view of.
    return tensor.detach().to("cpu", copy=True)


def split_key(key: str, names: Mapping[str, Any]) -> tuple[str, str]:
    """Return parameter and key of a tensor of an optimizer's state; both may have dots."""
    # The longest of the names that fits; of none, what precedes the last dot.
    rest = key.removeprefix(OPTIMIZER)
    at = len(rest)
    while (at := rest.rfind(".", 0, at)) > 0:
        if rest[:at] in names:
            return rest[:at], rest[at + 1 :]
    name, _, last = rest.rpartition(".")
    return name, last


class Parts:
    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self._layout = layout
        tied = model.named_parameters(remove_duplicate=False)  # each under all of its names
        named: dict[str, Tensor] = {plain_name(model, name): one for name, one in tied}
        self._parameters = named | parameters_by_name(model)
        degree, known = layout.degrees["tensor"], self._parameters.items()
        self._shards = {name: ezpz_tp.shard_of(one, degree) for name, one in known}
        self._peers = set(ezpz_tp.get_state().ranks("tensor")) if degree > 1 else set[int]()
        split = any(one is None or one.dim is not None for one in self._shards.values())
        split = split or any(self._is_over_peers(one) for _, one in known)
        if degree > 1 and self._shards and not split:
            raise CheckpointError(
                f"there are {degree} tensor-parallel ranks, but no parameter of "
                f"{type(model).__name__} says what it is a part of, and one rank's would be saved "
                "for all; expected layers of ezpz_tp; wrap with fully_shard inside `with "
                "ezpz_tp.keep_attributes(model):`, and of weights of your own say it by "
                "ezpz_tp.set_shard"
            )

    def _is_over_peers(self, tensor: Any) -> bool:
        # DTensors of parallelize_module may lie over the tensor-parallel group.
        mesh = getattr(tensor, "device_mesh", None) if self._peers else None
        return mesh is not None and len(self._peers & {*mesh.mesh.flatten().tolist()}) > 1

    def are_copies(self, name: str, value: Any) -> bool:
        """Return whether it is taken for equal on the ranks of a tensor-parallel group."""
        shard = self._shards.get(name)
        split = (shard is not None and shard.dim is not None) or self._is_over_peers(value)
        return bool(self._peers) and _is_in_pieces(name, value) and not split

    def of_state(self, name: str, key: str, tensor: Tensor) -> Pieces:
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
        return self.pieces(f"{key!r} of {name!r} in the optimizer", tensor, name if alike else "")

    def pieces(self, what: str, tensor: Tensor, owner: str) -> Pieces:
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
    cut = {name: value for name, value in model.items() if _is_in_pieces(name, value)}
    held = {MODEL + name: parts.pieces(name, value, name) for name, value in cut.items()}
    values = {name: value for name, value in model.items() if name not in cut}
    others: dict[str, dict[str, Any]] = {}
    for name, entries in state.items():
        for key, value in entries.items():
            if _has_pieces(value):
                held[f"{OPTIMIZER}{name}.{key}"] = parts.of_state(name, key, value)
            else:
                others.setdefault(name, {})[key] = value
    return held, values, others


def _is_in_pieces(name: str, value: Any) -> bool:
    """Return whether a value of a model's state is saved in pieces.

    An extra state is not: it may have another length each time.
    """
    if is_extra_state(name) and not isinstance(value, DTensor):
        return False
    return _has_pieces(value)


def _has_pieces(value: Any) -> bool:
    """Return whether it is a tensor that can be cut; a sparse one is saved whole, with the rest."""
    dense = isinstance(value, Tensor) and value.layout is torch.strided
    return dense or hasattr(value, "local_shards")


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
    """Give an object, or several, their state back; a dict is filled."""
    if isinstance(things, dict):
        things.clear()
        things.update(state)
    elif isinstance(things, Sequence):
        for each, saved in zip(things, state, strict=True):
            load_state_dicts(each, saved)
    else:
        things.load_state_dict(state)
