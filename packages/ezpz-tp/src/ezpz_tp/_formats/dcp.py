"""`torch.distributed.checkpoint`: a rank's shards as DTensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from ezpz_tp._errors import DegreeError, ParallelError
from ezpz_tp._groups.state import ParallelState
from ezpz_tp._shard import Shard, parameter_of
from ezpz_tp._state_dict import names_of, parts_of, state_or_alone, survey

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
    tensor. So a check-point has the full tensors, of their true sizes, and loads at any degree,
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
        loading: Let an optimizer that has made no step yet make its state, to be filled: by a
            step with gradients of zero at a learning rate of zero, as
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
    model: Items = {}
    states: dict[str, Items] = {}
    for name, part in parts.tensors.items():
        parameter, key = parameter_of(name)
        for piece, tensor in dtensors(parameter, part.tensor, part.shard, group):
            if key is None:
                model[piece] = tensor
            else:
                states.setdefault(piece, {})[key] = tensor
    for name, value in parts.values.items():
        parameter, key = parameter_of(name)
        if key is None:
            model[parameter] = value
        else:
            states.setdefault(parameter, {})[key] = value
    if optimizer is None:
        return model
    options = {
        name: {key: value for key, value in found.items() if key != "params"}
        for found in parts.groups or ()
        for name in found["params"]
    }
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
    if optimizer is not None and set(held) != {"model", "optimizer"}:
        raise ParallelError(
            "load_dtensor_state_dict: expected {'model', 'optimizer'}, as dtensor_state_dict(..., "
            f"optimizer=...) returns them, and found {sorted(held)[:5]}"
        )
    parts = parts_of(module, optimizer, state)
    given = _flat(held, optimizer is not None)
    rest: Items = {}
    for name, part in parts.tensors.items():
        parameter, key = parameter_of(name)
        for piece, tensor in _pieces(parameter, part.tensor, part.shard, state.group("tensor")):
            _copy(piece, key, given.pop((piece, key), None), tensor)
    for name in parts.values:
        rest[name] = given.pop(parameter_of(name), None)
    if given:
        piece, key = next(iter(given))
        raise ParallelError(
            f"load_dtensor_state_dict: {piece}{f', {key!r} of the optimizer,' if key else ''} is "
            f"none of {type(module).__name__}'s, and {len(given) - 1} others; expected the names "
            "of dtensor_state_dict"
        )
    extra = {name: value for name, value in rest.items() if parameter_of(name)[1] is None}
    if extra:
        module.load_state_dict(extra, strict=False)
    if optimizer is None:
        return
    by_name = {name: parameter for parameter, name in names_of(optimizer, module).items()}
    for name, value in rest.items():
        parameter, key = parameter_of(name)
        if key is not None:
            optimizer.state[by_name[parameter]][key] = value
    _set_options(optimizer, module, held["optimizer"]["param_groups"])


def dtensors(
    name: str, local: Tensor, shard: Shard, group: ProcessGroup | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and DTensor of each matrix of a tensor, or a plain tensor where none is split.

    They are views of ``local``, without its padding.
    """
    if shard.dim is None or group is None or group.size() == 1:
        yield from _pieces(name, local, shard, group)
        return
    from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415 - where it is used
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - heavy to import
    from torch.distributed.tensor import Shard as Split  # noqa: PLC0415

    mesh = DeviceMesh.from_group(group, local.device.type)
    lengths = shard.blocks or (shard.size,)
    for length, (piece, view) in zip(lengths, _pieces(name, local, shard, group), strict=True):
        full = (*shard.full_shape[: shard.dim], length, *shard.full_shape[shard.dim + 1 :])
        stride = tuple(math.prod(full[dim + 1 :]) for dim in range(len(full)))
        yield (
            piece,
            DTensor.from_local(
                view,
                mesh,
                [Split(shard.dim)],
                run_check=False,
                shape=torch.Size(full),
                stride=stride,
            ),
        )


def _pieces(
    name: str, local: Tensor, shard: Shard, group: ProcessGroup | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and view of each matrix that a rank holds a part of."""
    if shard.dim is None:
        yield name, local
        return
    index, degree = (0, 1) if group is None else (group.rank(), group.size())
    if not shard.blocks:
        length = sum(length for *_, length in shard.pieces(index, degree))
        yield name, local.narrow(shard.dim, 0, length)
        return
    start = 0
    for number, block in enumerate(shard.blocks):
        yield f"{name}.block{number}", local.narrow(shard.dim, start, block // degree)
        start += block // degree


def _flat(held: Mapping[str, Any], with_optimizer: bool) -> dict[tuple[str, str | None], Any]:
    model = held["model"] if with_optimizer else held
    found: dict[tuple[str, str | None], Any] = {
        (name, None): value for name, value in model.items()
    }
    if with_optimizer:
        for name, values in held["optimizer"]["state"].items():
            found |= {(name, key): value for key, value in values.items()}
    return found


def _copy(name: str, key: str | None, found: Any, into: Tensor) -> None:
    what = name if key is None else f"{name}, {key!r} of the optimizer,"
    if not isinstance(found, Tensor):
        raise ParallelError(
            f"load_dtensor_state_dict: {what} is missing; expected a tensor of shape "
            f"{tuple(into.shape)}"
        )
    local = found.to_local() if hasattr(found, "to_local") else found
    if local.shape != into.shape:
        raise DegreeError(
            f"load_dtensor_state_dict: {what} has shape {tuple(local.shape)} on this rank; "
            f"expected {tuple(into.shape)}"
        )
    if local.data_ptr() != into.data_ptr() or local.stride() != into.stride():
        into.copy_(local)


def _set_options(
    optimizer: Optimizer, module: nn.Module, options: Mapping[str, Mapping[str, Any]]
) -> None:
    names = names_of(optimizer, module)
    for group in optimizer.param_groups:
        own = [names[parameter] for parameter in group["params"]]
        lost = [name for name in own if name not in options]
        if lost:
            raise ParallelError(
                f"load_dtensor_state_dict: param_groups has nothing of {lost[0]}; expected the "
                "options of each parameter, by name"
            )
        for name in own:
            if options[name] != options[own[0]]:
                raise ParallelError(
                    f"load_dtensor_state_dict: {own[0]} and {name} are in one group of the "
                    f"optimizer, but have the options {dict(options[own[0]])} and "
                    f"{dict(options[name])}; expected the groups that were saved"
                )
        group.update(options[own[0]] if own else {})


def _make_state(optimizer: Optimizer) -> None:
    """Let an optimizer make its state, without a change of any parameter."""
    if optimizer.state:
        return
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    before = [each.grad for each in parameters]
    rates = [group.get("lr") for group in optimizer.param_groups]
    try:
        for each in parameters:
            each.grad = torch.zeros_like(each) if each.requires_grad else None
        for group in optimizer.param_groups:
            if "lr" in group:
                lr = group["lr"]
                group["lr"] = torch.zeros_like(lr) if isinstance(lr, Tensor) else 0.0
        optimizer.step()
    finally:
        for each, grad in zip(parameters, before, strict=True):
            each.grad = grad
        for group, lr in zip(optimizer.param_groups, rates, strict=True):
            if "lr" in group:
                group["lr"] = lr
