"""What a rank holds as DTensors, which `torch.distributed.checkpoint` saves and fills.

What is split is pieces there; matrices that are stacked in one weight are a tensor each,
``<name>.block0``, ``<name>.block1``, ...
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from ._errors import DegreeError, ParallelError
from ._shard import Shard, optimizer_name, parameter_of
from ._state import ParallelState
from ._state_dict import (
    collect_parts,
    nested,
    parameter_names,
    state_or_alone,
    survey,
    with_optimizer,
)

Items = dict[str, Any]


@torch.no_grad()
def dtensor_state_dict(
    module: nn.Module,
    *,
    optimizer: Optimizer | None = None,
    state: ParallelState | None = None,
    loading: bool = False,
) -> Items:
    """Return what this rank holds, as views that `torch.distributed.checkpoint` saves or fills.

    What is split is a DTensor over the tensor group, ``Shard(dim)``; what is whole is a plain
    tensor. So a checkpoint has the full tensors, of their true sizes, and loads at any degree,
    in any program. Matrices that are stacked in one weight are a tensor each, ``<name>.block0``,
    ``<name>.block1``, ...: DTensor has no public placement for several stretches of one dim.

        checkpoint.save(dtensor_state_dict(model, optimizer=optimizer), checkpoint_id=path)

        held = dtensor_state_dict(model, optimizer=optimizer, loading=True)
        checkpoint.load(held, checkpoint_id=path)
        load_dtensor_state_dict(model, held, optimizer=optimizer)

    Collective: every rank calls this.

    Args:
        module: This rank's model, or stage of it; stages use the names of the whole model.
        optimizer: Add its state, by the names of parameters.
        state: Whose groups; the default's if None.
        loading: Let an optimizer that has made no step yet make its state, to be filled. It makes
            a step with gradients of zero at a learning rate of zero, as
            ``torch.distributed.checkpoint.state_dict`` does.

    Returns:
        Tensors by name; with an optimizer ``{"model": that, "optimizer": {"state": {name:
        {"exp_avg": ..., ...}}, "param_groups": {name: {"lr": ..., ...}}}}``, which are the keys
        that torch has with ``flatten_optimizer_state_dict=True``.

    Raises:
        DegreeError: A tensor has not the shape that its metadata say.
        ParallelError: As of `gather_state_dict`.
    """
    state = state_or_alone(state)
    if optimizer is not None and loading:
        _make_state(optimizer)
    parts, _ = survey(module, optimizer, state)
    group = state.group("tensor")
    items: Items = {}
    for name, part in parts.tensors.items():
        parameter, key = parameter_of(name)
        for piece, tensor in _dtensors(parameter, part.tensor, part.shard, group):
            items[optimizer_name(piece, key)] = tensor
    model, states = nested({**items, **parts.values})
    if optimizer is None:
        return model
    options: dict[str, Items] = {}
    for found in parts.groups or ():
        names = found.pop("params")
        options |= {name: dict(found) for name in names}
    return {"model": model, "optimizer": {"state": states, "param_groups": options}}


@torch.no_grad()
def load_dtensor_state_dict(
    module: nn.Module,
    held: Mapping[str, Any],
    *,
    optimizer: Optimizer | None = None,
    state: ParallelState | None = None,
) -> None:
    """Take what `dtensor_state_dict` returned, after ``torch.distributed.checkpoint.load``.

    Its tensors are views of the module's and the optimizer's, and hold the values already; what
    is set here is the rest, such as the learning rate. Tensors of another dict are copied. The
    padding of a vocabulary is left as it is. Nothing is sent.

    Args:
        module: This rank's model, or stage of it.
        held: Tensors by name, or ``{"model": ..., "optimizer": ...}`` with an optimizer.
        optimizer: It has state already, as after ``dtensor_state_dict(..., loading=True)``.
        state: Whose groups; the default's if None.

    Raises:
        DegreeError: A tensor has not the shape that this rank needs.
        ParallelError: A tensor is missing, or is one that the module has not; or parameters of one
            group have different options.
    """
    state = state_or_alone(state)
    model, saved = with_optimizer(held, optimizer, "load_dtensor_state_dict", "dtensor_state_dict")
    given = {**model}
    group = state.group("tensor")
    for name, values in saved["state"].items():
        given |= {optimizer_name(name, key): value for key, value in values.items()}
    parts = collect_parts(module, optimizer, state)
    for name, part in parts.tensors.items():
        parameter, key = parameter_of(name)
        for piece, tensor, _ in _views(parameter, part.tensor, part.shard, group):
            own = optimizer_name(piece, key)
            _copy_into(_describe_key(own), given.pop(own, None), tensor)
    rest = {name: given.pop(name, None) for name in parts.values}
    if given:
        raise ParallelError(
            f"load_dtensor_state_dict: {_describe_key(next(iter(given)))} is none of "
            f"{type(module).__name__}'s, and {len(given) - 1} others; expected the names of "
            "dtensor_state_dict"
        )
    extra, states = nested(rest)
    if extra:
        module.load_state_dict(extra, strict=False)
    if optimizer is None:
        return
    names = parameter_names(optimizer, module)
    for owner, name in names.items():
        for key, value in states.get(name, {}).items():
            optimizer.state[owner][key] = value
    for options in optimizer.param_groups:
        _set_options(options, [names[one] for one in options["params"]], saved["param_groups"])


def _dtensors(
    name: str, local: Tensor, shard: Shard, group: ProcessGroup
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and DTensor of each matrix of a tensor, views of it without padding."""
    from torch.distributed import tensor as dtensor  # noqa: PLC0415 - heavy to import
    from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415

    for piece, view, matrix in _views(name, local, shard, group):
        if shard.dim is None or group.size() == 1:
            yield piece, view
            continue
        mesh = DeviceMesh.from_group(group, view.device.type)
        placed = [dtensor.Shard(shard.dim)]
        shape = torch.Size(matrix.full_shape)
        stride = _contiguous_strides(matrix.full_shape)
        about: Any = {"shape": shape, "stride": stride, "run_check": False}
        yield piece, dtensor.DTensor.from_local(view, mesh, placed, **about)


def _views(
    name: str, local: Tensor, shard: Shard, group: ProcessGroup
) -> Iterator[tuple[str, Tensor, Shard]]:
    start = 0
    for piece, matrix in _split_into_matrices(name, shard):
        view = local
        if shard.dim is not None:
            length = sum(length for *_, length in matrix.pieces(group.rank(), group.size()))
            view = local.narrow(shard.dim, start, length)
            start += length
        yield piece, view, matrix


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _split_into_matrices(name: str, shard: Shard) -> list[tuple[str, Shard]]:
    if shard.dim is None or not shard.blocks:
        return [(name, shard)]
    before = shard.full_shape[: shard.dim]
    after = shard.full_shape[shard.dim + 1 :]
    return [
        (f"{name}.block{number}", Shard((*before, size, *after), shard.dim))
        for number, size in enumerate(shard.blocks)
    ]


def _describe_key(name: str) -> str:
    parameter, key = parameter_of(name)
    if key is None:
        return parameter
    return f"{parameter}, {key!r} of the optimizer,"


def _copy_into(what: str, found: Any, into: Tensor) -> None:
    local = found
    if hasattr(found, "to_local"):
        local = found.to_local()
    if not isinstance(local, Tensor):
        raise ParallelError(
            f"load_dtensor_state_dict: {what} is missing; expected a tensor of shape "
            f"{tuple(into.shape)}"
        )
    if local.shape != into.shape:
        raise DegreeError(
            f"load_dtensor_state_dict: {what} has shape {tuple(local.shape)} on this rank; "
            f"expected {tuple(into.shape)}"
        )
    if local.data_ptr() != into.data_ptr() or local.stride() != into.stride():
        into.copy_(local)


def _set_options(group: Items, names: list[str], options: Mapping[str, Items]) -> None:
    """Set a group's hyperparameters; a tensor stays a tensor and a tuple a tuple."""
    for name in names:
        if name not in options:
            raise ParallelError(
                f"load_dtensor_state_dict: param_groups has nothing of {name}; expected the "
                "options of each parameter, by name"
            )
        if options[name] != options[names[0]]:
            raise ParallelError(
                f"load_dtensor_state_dict: {names[0]} and {name} are in one group of the "
                f"optimizer, but have the options {dict(options[names[0]])} and "
                f"{dict(options[name])}; expected the groups that were saved"
            )
    for key, value in options[names[0]].items() if names else ():
        before = group.get(key)
        if isinstance(before, Tensor) and not isinstance(value, Tensor):
            group[key] = torch.tensor(value, dtype=before.dtype, device=before.device)
        else:
            group[key] = tuple(value) if isinstance(before, tuple) else value


def _make_state(optimizer: Optimizer) -> None:
    from torch.distributed.checkpoint.state_dict import _init_optim_state  # noqa: PLC0415 - heavy

    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    before = [each.grad for each in parameters]
    try:
        for each in parameters:
            each.grad = None  # torch makes no state where there is one
        _init_optim_state(optimizer)
    finally:
        for each, grad in zip(parameters, before, strict=True):
            each.grad = grad
