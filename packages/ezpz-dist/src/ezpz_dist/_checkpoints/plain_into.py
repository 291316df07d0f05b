"""A model's tensors, or its shards of them, from a plain file that one rank reads."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

import torch

from ezpz_dist._collectives.gather import all_gather_object
from ezpz_dist._errors import CheckpointError

from .given import give_memory
from .plain import Place, PlainFile

_SHOWN = 5
"""Names that a message lists."""


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
            safetensors, or a URL that fsspec knows.
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
    state = file.tree(list(file.places))
    trouble, targets = "", {}
    try:
        if key is not None:
            if not isinstance(state, Mapping) or key not in state:
                raise CheckpointError(f"it has no {key!r}; expected one of {_some(state)}")
            state = state[key]
        targets = _fit(_bare(model), state, strict=strict)
    except CheckpointError as error:
        trouble = str(error)
    # No rank begins what another cannot: it would wait.
    for rank, said in enumerate(all_gather_object(trouble)):
        if said:
            raise CheckpointError(f"{os.fspath(path)} does not fit on rank {rank}: {said}")
    with torch.no_grad():
        for place, tensor in zip(file.places, file.tensors(), strict=True):
            for target in targets.get(place.index, ()):
                _fill(target, tensor)
    rest = {name: value for name, value in state.items() if not isinstance(value, Place)}
    if rest:
        _bare(model).load_state_dict(rest, strict=False)


def _fit(model: torch.nn.Module, state: object, *, strict: bool) -> dict[int, list[torch.Tensor]]:
    """Return the model's tensors by their place in the file."""
    if not isinstance(state, Mapping):
        raise CheckpointError(f"it holds a {type(state).__name__}; expected a state dict")
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise CheckpointError("the model is wrapped by FSDP1; load the file before wrapping it")
    give_memory(model)
    mine = model.state_dict()
    missing = [name for name in mine if name not in state]
    extra = [name for name in state if name not in mine] if strict else []
    if missing or extra:
        raise CheckpointError(
            f"it lacks {len(missing)} of the model's tensors {missing[:_SHOWN]} and has "
            f"{len(extra)} others {extra[:_SHOWN]}; expected the names of the unwrapped model"
        )
    targets: dict[int, list[torch.Tensor]] = {}
    for name, target in mine.items():
        place = state[name]
        if not isinstance(target, torch.Tensor):
            continue
        if not isinstance(place, Place) or tuple(target.shape) != place.shape:
            shape = list(place.shape) if isinstance(place, Place) else type(place).__name__
            raise CheckpointError(
                f"{name} is {shape}; expected {list(target.shape)} (a file of full tensors goes "
                "into tensor-parallel layers by ezpz_tp.load_shards)"
            )
        if target.is_meta:
            raise CheckpointError(f"{name} is on the meta device; call model.to_empty() first")
        targets.setdefault(place.index, []).append(target)
    return targets


def _fill(target: torch.Tensor, full: torch.Tensor) -> None:
    mesh = getattr(target, "device_mesh", None)  # a DTensor's
    if mesh is None:
        target.copy_(full)
        return
    dtensor = importlib.import_module("torch.distributed.tensor")
    sharded: Any = target
    # From a copy on every rank each takes its own part: nothing is sent.
    whole = dtensor.DTensor.from_local(
        full.to(sharded.device), mesh, [dtensor.Replicate()] * mesh.ndim, run_check=False
    )
    sharded.to_local().copy_(whole.redistribute(placements=sharded.placements).to_local())


def _bare(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside DDP and torch.compile."""
    while True:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), torch.nn.Module):
            model = inner
        else:
            return model


def _some(state: object) -> str:
    names = list(state)[:_SHOWN] if isinstance(state, Mapping) else type(state).__name__
    return str(names)
