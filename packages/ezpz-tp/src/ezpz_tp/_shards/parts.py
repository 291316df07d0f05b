"""What one rank holds of a model and its optimizer, and what the whole is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ezpz_tp._errors import DegreeError, ParallelError
from ezpz_tp._groups.state import ParallelState

from .metadata import shard_at
from .optimizer import Group, groups_of, state_of
from .source import optimizer_name
from .spec import Shard


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor that this rank holds a part of, or all: model and optimizer have their own."""

    tensor: Tensor
    shard: Shard


@dataclass(frozen=True, slots=True)
class Parts:
    """All that one rank holds.

    Attributes:
        tensors: By the names that files have (`optimizer_name`), in the model's order.
        values: What is in the states and is no tensor.
        groups: The optimizer's, by names; None without one.
    """

    tensors: dict[str, Part] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    groups: list[Group] | None = None


def parts_of(module: nn.Module, optimizer: Optimizer | None, state: ParallelState) -> Parts:
    """Return what this rank holds. Nothing is copied or sent.

    Raises:
        DegreeError: A tensor has not the shape that its metadata say.
        ParallelError: A tensor is a DTensor, on the meta device, or an expert's; an optimizer's
            tensor is neither a number nor of its parameter's shape.
    """
    index, degree = state.index("tensor"), state.size("tensor")
    found = Parts()
    owners = owners_of(module)
    for name, value in module.state_dict().items():
        if isinstance(value, Tensor):
            shard = shard_in(name, owners.get(name, value), state)
            found.tensors[name] = part_of(name, value, shard, index, degree)
        else:
            found.values[name] = value
    if optimizer is None:
        return found
    for name, parameter, key, value in state_of(optimizer, module):
        entry = optimizer_name(name, key)
        if not isinstance(value, Tensor):
            found.values[entry] = value
        elif value.shape == parameter.shape:
            shard = shard_in(name, parameter, state)
            found.tensors[entry] = part_of(entry, value, shard, index, degree)
        elif value.numel() == 1:
            found.tensors[entry] = part_of(entry, value, Shard(tuple(value.shape)), index, degree)
        else:
            raise ParallelError(
                f"{key!r} of {name!r} in the optimizer has shape {tuple(value.shape)}; expected "
                f"that of its parameter, {tuple(parameter.shape)}, or one number: how it is split "
                "cannot be told, so it cannot change its degree"
            )
    return Parts(found.tensors, found.values, groups_of(optimizer, module))


def owners_of(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, and by those that they have in the state dict."""
    buffers = dict(module.named_buffers(remove_duplicate=False))
    found = {**buffers, **dict(module.named_parameters(remove_duplicate=False))}
    own = set(map(id, found.values()))
    renamed = module.state_dict(keep_vars=True).items()
    return {**found, **{name: value for name, value in renamed if id(value) in own}}


def shard_in(name: str, parameter: Tensor, state: ParallelState) -> Shard:
    """Return what a parameter is a part of.

    Raises:
        ParallelError: It is an expert's, split over other groups.
    """
    expert = not getattr(parameter, "allreduce", True)
    if expert and state.size("expert") * state.size("expert_tensor") > 1:
        raise ParallelError(
            f"{name!r} is an expert's (allreduce is False), split over expert groups; only "
            "parameters split over the tensor group can change their degree"
        )
    return shard_at(parameter, state.size("tensor"))


def part_of(name: str, tensor: Tensor, shard: Shard, index: int, degree: int) -> Part:
    """Return a tensor as a rank's part of another, after a look at it.

    Raises:
        DegreeError: It has not the shape that it should.
        ParallelError: It is a DTensor, sparse, or on the meta device.
    """
    if hasattr(tensor, "device_mesh"):
        raise ParallelError(
            f"{name!r} is a DTensor: its parts are spread over data-parallel ranks too. Save and "
            "load such a model by torch.distributed.checkpoint"
        )
    if tensor.is_meta:
        raise ParallelError(
            f"{name!r} is on the meta device, without values or memory; call to_empty(), then load"
        )
    if tensor.layout != torch.strided:
        raise ParallelError(f"{name!r} is of {tensor.layout}; expected a dense tensor: to_dense()")
    try:
        expected = shard.local_shape(index, degree)
    except DegreeError as error:
        raise DegreeError(f"{name!r}: {error}") from error
    if tuple(tensor.shape) != expected:
        raise DegreeError(
            f"{name!r} has shape {tuple(tensor.shape)}; expected {expected}, rank {index} of "
            f"{degree}'s part of {shard.full_shape}: the state given is not that of the model's "
            "layers, or set_shard was told otherwise"
        )
    return Part(tensor.detach(), shard)
