"""Files of torch.save and safetensors: one rank reads, the others get it from there."""

from __future__ import annotations

import importlib
import io
import os
import pickle
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ezpz_dist._collectives import all_gather_object
from ezpz_dist._errors import CheckpointError
from ezpz_dist._members import find_members
from ezpz_dist._objects import as_bytes, is_plain
from ezpz_dist._replicas import unexpand_buffers
from ezpz_dist._slices import read_for_all
from ezpz_topo import get_hostname, get_rank

from .pieces import (
    find_tied_names,
    is_extra_state,
    is_fsdp1,
    model_state,
    pieces_of,
    set_model_state,
)

# Reading a file of torch.save or safetensors, on one rank.

_REFUSED = re.compile(r"WeightsUnpickler error:\s*(\S.*)")
_GLOBAL = re.compile(r"GLOBAL (\S+)")
"""How torch says why it refuses a file, and what that wants to import."""


def read(path: str) -> Any:
    """Return what a file holds, its tensors on the host; no code of the file's is run."""
    if path.endswith(".safetensors"):
        try:
            safetensors = importlib.import_module("safetensors.torch")
        except ImportError as error:
            raise CheckpointError(f"{error}; pip install safetensors") from error
        return safetensors.load_file(path)
    # Mapped, the file is read tensor by tensor as it is sent; old formats cannot be.
    mapped = zipfile.is_zipfile(path)
    return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)


def explain(path: str, error: Exception) -> CheckpointError:
    where = f"rank {get_rank()} on {get_hostname()} cannot load {path}"
    text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    if isinstance(error, pickle.UnpicklingError):
        reason = text
        refused = _REFUSED.search(str(error))
        if refused is not None:
            reason = refused[1]
        wanted = _GLOBAL.search(str(error))
        if wanted is not None:
            reason = f"it asks for {wanted[1]}"
        return CheckpointError(
            f"{where}: {reason}, and what it holds beyond tensors and plain values could run code; "
            "nothing of it was run; expected a state dict; save model.state_dict(), or allow a "
            "class that you trust by torch.serialization.add_safe_globals"
        )
    return CheckpointError(f"{where}: {text}; expected a file of torch.save or of safetensors")


# A model's tensors, or its shards of them, from a plain file that one rank reads.

_SHOWN = 5  # names that a message lists


def load_into(
    model: torch.nn.Module,
    path: str | os.PathLike[str],
    *,
    key: str | None = None,
    strict: bool = True,
    root: int = 0,
) -> None:
    """Fill a model from a plain file that one rank reads; shards of FSDP2 and DTensor as well.

    Collective: every rank calls this. Beyond the model itself, a rank holds one full tensor
    at a time, the reader also what its file system caches.

    Args:
        model: Plain, or wrapped by DDP, FSDP2 or torch.compile; not on the meta device.
        path: A file of ``torch.save`` (a state dict, by the names of the unwrapped model) or
            safetensors.
        key: Where in the file the state dict is: ``"model"``; default: it is all there is.
        strict: Refuse a file with tensors that the model has not; those that the file has
            not are refused in any case.
        root: The rank that reads.

    Raises:
        CheckpointError: On every rank: the file cannot be read, holds more than tensors and
            plain values, or does not fit the model of some rank.
        NotSetUpError: There are several ranks and `setup_torch` was not called.
        ValueError: ``root`` is no rank.
    """
    file = PlainFile(path, root, None, "load_into()")
    state = file.tree(list(file.infos))
    trouble = ""
    targets: dict[int, list[torch.Tensor]] = {}
    try:
        if key is not None:
            state = _get_inner(state, key)
        targets = _fit(model, state, strict=strict)
    except CheckpointError as error:
        trouble = str(error)
    # No rank begins what another cannot: it would wait.
    for rank, problem in enumerate(all_gather_object(trouble)):
        if problem:
            raise CheckpointError(f"{os.fspath(path)} does not fit on rank {rank}: {problem}")
    rest = {name: value for name, value in state.items() if not isinstance(value, TensorInfo)}
    extra_states = {
        name: info.index
        for name, info in state.items()
        if isinstance(info, TensorInfo) and is_extra_state(name)
    }
    extra_tensors = {}
    with torch.no_grad():
        for info, tensor in zip(file.infos, file.tensors(), strict=True):
            for target in targets.get(info.index, ()):
                _fill(target, tensor)
            if info.index in extra_states.values():
                extra_tensors[info.index] = tensor
    rest |= {name: extra_tensors[index] for name, index in extra_states.items()}
    if rest:
        set_model_state(model, {**model_state(model), **rest}, strict=False)


def _get_inner(state: object, key: str) -> Any:
    if not isinstance(state, Mapping):
        raise CheckpointError(f"it has no {key!r}: it holds a {type(state).__name__}")
    if key not in state:
        raise CheckpointError(f"it has no {key!r}; expected one of {list(state)[:_SHOWN]}")
    return state[key]


def _fill(target: torch.Tensor, tensor: torch.Tensor) -> None:
    for piece, local in pieces_of(target).held:
        local.copy_(tensor[piece.slices])


def _fit(model: torch.nn.Module, state: object, *, strict: bool) -> dict[int, list[torch.Tensor]]:
    """Return the model's tensors by their index in the file."""
    if not isinstance(state, Mapping):
        raise CheckpointError(f"it holds a {type(state).__name__}; expected a state dict")
    if is_fsdp1(model):
        raise CheckpointError("the model is wrapped by FSDP1; load the file before wrapping it")
    unexpand_buffers(model)
    mine = model_state(model)
    named = _names_in_file(model, mine, state)
    missing = [name for name in mine if named[name] not in state]
    known = {*mine, *named.values()}
    extra = []
    if strict:
        extra = [name for name in state if name not in known]
    if missing or extra:
        raise CheckpointError(
            f"it lacks {len(missing)} of the model's tensors {missing[:_SHOWN]} and has "
            f"{len(extra)} others {extra[:_SHOWN]}; expected the names of the unwrapped model, of "
            "tied tensors at least one"
        )
    targets: dict[int, list[torch.Tensor]] = {}
    for name, target in mine.items():
        info = state[named[name]]
        if not isinstance(target, torch.Tensor) or is_extra_state(name):
            continue
        if not isinstance(info, TensorInfo) or tuple(target.shape) != info.shape:
            shape = list(info.shape) if isinstance(info, TensorInfo) else type(info).__name__
            raise CheckpointError(
                f"{name} is {shape}; expected {list(target.shape)} (a file of full tensors goes "
                "into tensor-parallel layers by ezpz_tp.shard_state_dict)"
            )
        if target.is_meta:
            raise CheckpointError(f"{name} is on the meta device; call model.to_empty() first")
        targets.setdefault(info.index, []).append(target)
    return targets


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What stands for a tensor in a file's tree."""

    index: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    is_parameter: bool


class PlainFile:
    """A file that one rank has read: its tree on every rank, its tensors on the reader."""

    def __init__(self, path: str | os.PathLike[str], root: int, group: Any, operation: str) -> None:
        """Read on ``root``; raise on every rank what that raises. Collective."""
        name = os.fspath(path)
        self._members = find_members(operation, group)
        self._root = root
        self._what = f"{operation} of {name}"
        self._tensors: list[torch.Tensor] = []

        def split() -> tuple[bytes, list[TensorInfo]]:
            buffer = io.BytesIO()
            pickler = _Pickler(buffer)
            pickler.dump(read(name))
            self._tensors = pickler.tensors
            return buffer.getvalue(), pickler.infos

        self._tree, self.infos = read_for_all(split, self._members, root, partial(explain, name))

    def tree(self, leaves: list[Any]) -> Any:
        """Return the tree, with these in the tensors' places."""
        unpickler: Any = pickle.Unpickler(io.BytesIO(self._tree))  # noqa: S301 - of this very job
        unpickler.persistent_load = leaves.__getitem__
        return unpickler.load()

    def tensors(self) -> Iterator[torch.Tensor]:
        """Return the tensors, one after the other. Collective: every rank takes all of them."""
        for info in self.infos:
            tensor = torch.empty(info.shape, dtype=info.dtype)
            if self._tensors:  # on the reader
                tensor.copy_(self._tensors[info.index])
            if self._members is not None and tensor.numel():
                self._members.send(as_bytes(tensor), self._root, self._what)
            yield tensor


class _Pickler(pickle.Pickler):
    """Pickles all but the tensors. What a file shares (tied weights) stays shared."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self.infos: list[TensorInfo] = []
        self._seen: dict[tuple[object, ...], int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if not is_plain(obj):
            return None
        tensor: torch.Tensor = obj.detach()
        # Empty ones have no address to be told apart by.
        address = tensor.data_ptr() if tensor.numel() else -1 - len(self.infos)
        key = (address, tensor.dtype, tensor.shape, tensor.stride(), type(obj))
        index = self._seen.setdefault(key, len(self.infos))
        if index == len(self.infos):
            is_parameter = isinstance(obj, torch.nn.Parameter)
            self.infos.append(TensorInfo(index, tensor.dtype, tuple(tensor.shape), is_parameter))
            self.tensors.append(tensor)
        return index


def _names_in_file(
    model: torch.nn.Module, mine: Iterable[str], state: Mapping[str, object]
) -> dict[str, str]:
    """Return the name in the file of each of the model's: of tied tensors one is enough."""
    tied = find_tied_names(model)
    named = {}
    for name in mine:
        names = sorted(tied.get(name, {name}) & state.keys())
        if name in names or not names:
            named[name] = name
        else:
            named[name] = names[0]
    return named


def load_on_one_rank(
    path: str | os.PathLike[str],
    *,
    map_location: str | torch.device = "cpu",
    root: int = 0,
    group: torch.distributed.ProcessGroup | None = None,
) -> Any:
    """Return what a file of ``torch.save`` or safetensors holds; one rank reads it.

    Collective: every rank calls this. The reader sends the tensors one by one, without
    pickling them, in pieces of at most 256 MiB. Nothing that the file brings is run:
    it holds tensors and plain values, or it is refused.

    Args:
        path: A file. One of safetensors ends in ``.safetensors``.
        map_location: Where the tensors are to be in the end, on each rank.
        root: The rank that reads: its rank in the world.
        group: The ranks that take part; None: all. With `ezpz_dist.node_group` and the
            first rank of each node there is one reader a node.

    Returns:
        The same on every rank. Tensors are contiguous and do not require gradients,
        parameters are parameters; what was one tensor under two names still is.

    Raises:
        CheckpointError: On every rank, when the reader cannot read the file, or it holds more
            than tensors and plain values.
        NotSetUpError: There are several ranks and `setup_torch` was not called.
        ValueError: ``root`` is no rank of the group.
    """
    file = PlainFile(path, root, group, "load_on_one_rank()")
    leaves: list[Any] = []
    for info, tensor in zip(file.infos, file.tensors(), strict=True):
        leaf = tensor.to(map_location)
        if info.is_parameter:
            leaf = torch.nn.Parameter(leaf, requires_grad=False)
        leaves.append(leaf)
    return file.tree(leaves)
