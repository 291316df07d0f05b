"""An optimizer's state by the names of parameters, so that another wrapper's can take it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .names import is_fsdp1, parameters_by_name, quietly

State = dict[str, dict[str, Any]]
Options = list[dict[str, Any]]


def state_of(model: nn.Module, optimizers: Sequence[Optimizer]) -> tuple[State, Options]:
    """Return the states that this rank holds, and the options of parameters by name.

    Nothing is copied. A parameter without a state yet has none here: no step is made up.

    Raises:
        ValueError: A parameter of an optimizer is none of the model's.
    """
    if is_fsdp1(model):
        return _of_fsdp1(model, [one for one in optimizers if one.state])
    names = {parameter: name for name, parameter in parameters_by_name(model).items()}
    state: State = {}
    options: Options = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            named = [_name(parameter, names, model) for parameter in group["params"]]
            rest = {key: value for key, value in group.items() if key != "params"}
            options.append({"names": named, "options": rest})
        inner = _holder(optimizer)
        for parameter, values in inner.state.items():
            state[_name(parameter, names, model)] = dict(values)
    return state, options


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
    inner: Optimizer = optimizer.optim
    return inner


def room_for(
    model: nn.Module, optimizers: Sequence[Optimizer], saved: Mapping[str, Mapping[str, Any]]
) -> State:
    """Return tensors to fill, like those that were saved, of the parameters that are here.

    Args:
        model: The model.
        optimizers: Its optimizers.
        saved: By parameter and key, what was saved: an object with ``size`` and ``dtype``.

    Raises:
        ValueError: How a state is sharded cannot be told.
    """
    if is_fsdp1(model):
        return _of_fsdp1(model, optimizers)[0] if saved else {}
    state: State = {}
    for name, parameter, before in _held(model, optimizers):
        state[name] = {
            key: _like(f"{key!r} of {name!r}", parameter, before.get(key), said, key == "step")
            for key, said in saved.get(name, {}).items()
        }
    return state


def _held(
    model: nn.Module, optimizers: Sequence[Optimizer]
) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
    names = {parameter: name for name, parameter in parameters_by_name(model).items()}
    for optimizer in optimizers:
        inner = _holder(optimizer)
        for group in inner.param_groups:
            for parameter in group["params"]:
                name = _name(parameter, names, model)
                yield name, parameter, inner.state.get(parameter, {})


def _like(what: str, parameter: Tensor, before: Any, said: Any, counts: bool) -> Tensor:
    size, dtype = said.size, said.dtype
    if isinstance(before, Tensor):
        return before.detach() if before.dtype == dtype else torch.empty_like(before, dtype=dtype)
    if counts or size.numel() == 1:
        # Optimizers count on the host, unless their state says otherwise.
        return torch.empty(size, dtype=dtype)
    whole = getattr(parameter, "full_shape", parameter.shape)
    if tuple(size) in (tuple(parameter.shape), tuple(whole)):
        return torch.empty_like(parameter.detach(), dtype=dtype)
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
    """Give optimizers their state, and the options of their parameters.

    Raises:
        ValueError: The parameters of one group were in several, or in none.
    """
    if not options:
        return  # FSDP1's, saved before the first step
    if is_fsdp1(model):
        _set_fsdp1(model, optimizers, state, options)
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
        if inner is not optimizer:
            for group in optimizer.param_groups:
                group.update(options_of([names[each] for each in group["params"]], options))


def options_of(named: Sequence[str], saved: Options) -> dict[str, Any]:
    """Return what was saved for a group with these parameters.

    Raises:
        ValueError: They were in several groups, or some were in none.
    """
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
    from torch.distributed.checkpoint.state_dict import (  # noqa: PLC0415 - where it is used
        get_optimizer_state_dict,
    )

    if not optimizers:
        return {}, []
    with quietly():
        found: dict[str, Any] = get_optimizer_state_dict(model, optimizers)
    options = [
        {
            "names": list(group["params"]),
            "options": {key: value for key, value in group.items() if key != "params"},
        }
        for group in found["param_groups"]
    ]
    return dict(found["state"]), options


def _set_fsdp1(
    model: nn.Module, optimizers: Sequence[Optimizer], state: State, options: Options
) -> None:
    from torch.distributed.checkpoint.state_dict import (  # noqa: PLC0415 - where it is used
        set_optimizer_state_dict,
    )

    groups = [{**group["options"], "params": group["names"]} for group in options]
    if state:
        held: Any = {"state": state, "param_groups": groups}
        with quietly():
            set_optimizer_state_dict(model, optimizers, held)
