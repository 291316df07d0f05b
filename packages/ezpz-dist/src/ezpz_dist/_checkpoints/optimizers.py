"""The state of optimizers by names of parameters, so that any wrapper's can take it."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from .disk_format import Saved
from .pieces import Splits, hide_fsdp1_warnings, is_fsdp1, parameters_by_name

State = dict[str, dict[str, Any]]
"""By the parameter's plain name and the optimizer's key."""

LocalState = dict[str, dict[str, Any]]
"""What a rank has of its part of a parameter, by name: the ``pieces`` that it has, ``state``."""

Options = list[dict[str, Any]]
"""For each group: ``names`` of its parameters, and ``options``."""

_NAMES_IN_A_GROUP = ("params", "param_names")
"""Which parameters a group has: no options, and different in each layout."""


def collect_optimizers(model: nn.Module, optimizers: Sequence[Optimizer]) -> tuple[State, Options]:
    """Return the states that this rank holds, not copied, and the options of all groups."""
    if is_fsdp1(model):
        return collect_fsdp1(model, [each for each in optimizers if each.state])
    names = Names(model)
    state: State = {}
    options: Options = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            options.append(describe_group(names.list_group(group), group))
        for parameter, values in unwrap_zero1(optimizer).state.items():
            state[names.find(parameter)] = dict(values)
    return state, options


def collect_fsdp1(model: nn.Module, optimizers: Sequence[Optimizer]) -> tuple[State, Options]:
    """Return the same of FSDP1, whose parameters are flat: torch takes them apart. Collective."""
    if not optimizers:
        return {}, []
    with hide_fsdp1_warnings():
        found: dict[str, Any] = dcp.get_optimizer_state_dict(model, optimizers)
    options = [describe_group(list(group["params"]), group) for group in found["param_groups"]]
    return dict(found["state"]), options


def pop_local_state(state: State, splits: Splits) -> LocalState:
    """Remove from a state the tensors that are neither shards nor shared, and return them.

    Such as blocks of 8-bit moments of a shard: their place in a whole is not known.
    """
    found: LocalState = {}
    for name, entries in state.items():
        own = {key: value for key, value in entries.items() if has_plain_tensors(value)}
        if not own or not splits.is_sharded(name):
            continue
        for key, value in list(own.items()):
            if isinstance(value, Tensor) and splits.is_split_like(name, value):
                del own[key]
            else:
                del entries[key]
        if own:
            found[name] = {"pieces": splits.list_held_pieces(name), "state": own}
    return found


def has_plain_tensors(value: Any) -> bool:
    """True for plain tensors that are no counters (of one element), also in containers."""
    if isinstance(value, list | tuple | dict):
        return any(has_plain_tensors(leaf) for leaf in tree_leaves(value))
    if not isinstance(value, Tensor) or isinstance(value, DTensor | ShardedTensor):
        return False
    return value.numel() != 1


def pop_counters(state: State, splits: Splits) -> State:
    """Remove from a state the tensors of shape [1], also in containers, and return them.

    They are values, as numbers are, if all ranks have the same.
    """
    found: State = {}
    for name, entries in state.items():
        if not splits.is_sharded(name):
            continue
        for key, value in list(entries.items()):
            if isinstance(value, Tensor) and splits.is_split_like(name, value):
                continue
            if any(is_counter(leaf) for leaf in tree_leaves(value)):
                found.setdefault(name, {})[key] = entries.pop(key)
    return found


def is_counter(value: Any) -> bool:
    """True for plain tensors of one element, but for scalars, which are shared as tensors."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor | ShardedTensor):
        return False
    return value.numel() == 1 and value.dim() > 0


def describe_group(names: list[str], group: Mapping[str, Any]) -> dict[str, Any]:
    options = {key: value for key, value in group.items() if key not in _NAMES_IN_A_GROUP}
    return {"names": names, "options": options}


class Names:
    """The plain names of a model's parameters, by parameter."""

    def __init__(self, model: nn.Module) -> None:
        self._model = type(model).__name__
        named = parameters_by_name(model)
        self._names = dict(zip(named.values(), named, strict=True))

    def find(self, parameter: Tensor) -> str:
        if parameter not in self._names:
            raise ValueError(
                f"a parameter of the optimizer, of shape {tuple(parameter.shape)}, is none of "
                f"{self._model}'s; expected the model that the optimizer was made for, as it is "
                "wrapped now"
            )
        return self._names[parameter]

    def list_group(self, group: Mapping[str, Any]) -> list[str]:
        """Return the names of a group's parameters."""
        return list(map(self.find, group["params"]))


def unwrap_zero1(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that has the state: ZeRO-1's is a local one, of this rank's share."""
    # Not imported: that compiles scripts, with a warning. Whoever has one did it.
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if module is None or not isinstance(optimizer, module.ZeroRedundancyOptimizer):
        return optimizer
    return cast("Optimizer", optimizer.optim)


def has_zero1(optimizers: Sequence[Optimizer]) -> bool:
    return any(unwrap_zero1(each) is not each for each in optimizers)


def list_parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


# Tensors to fill.


def allocate_state(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    splits: Splits,
    saved: Mapping[str, Mapping[str, Saved]],
    parameter_dtypes: Mapping[str, torch.dtype],
) -> State:
    """Return tensors to fill with the saved state of the parameters that this rank has.

    Args:
        model: The model.
        optimizers: Its optimizers.
        splits: How its parameters are split.
        saved: What was saved of each parameter, by its name and the optimizer's key.
        parameter_dtypes: What parameters were saved as.
    """
    if is_fsdp1(model):
        return collect_fsdp1(model, optimizers)[0] if saved else {}
    names = Names(model)
    state: State = {}
    for optimizer in optimizers:
        inner = unwrap_zero1(optimizer)
        for parameter in list_parameters(inner):
            name = names.find(parameter)
            present = inner.state.get(parameter, {})
            state[name] = {}
            for key, tensor in saved.get(name, {}).items():
                if key == "step":
                    state[name][key] = allocate_step(present.get(key), tensor)
                    continue
                dtype = choose_dtype(
                    tensor.dtype, parameter_dtypes.get(name), parameter.dtype, present.get(key)
                )
                shape = tensor.shape
                is_split = matches_shape(parameter, shape) or isinstance(present.get(key), DTensor)
                if math.prod(shape) > 1 and not is_split and splits.is_sharded(name):
                    raise ValueError(
                        f"{key!r} of {name!r} in the optimizer was saved with shape {shape}, and "
                        f"the parameter has {tuple(parameter.shape)}: how it is sharded here "
                        "cannot be told; expected the layout that saved it"
                    )
                state[name][key] = allocate_like(parameter, present.get(key), shape, dtype)
    return state


def allocate_step(present: Any, saved: Saved) -> Tensor:
    if isinstance(present, Tensor):
        return torch.empty_like(present, dtype=saved.dtype)
    # Optimizers count on the host, unless their state says otherwise.
    return torch.empty(saved.shape, dtype=saved.dtype)


def choose_dtype(
    saved: torch.dtype, parameter_saved: torch.dtype | None, parameter: torch.dtype, present: Any
) -> torch.dtype:
    """Return the dtype to load a state with: its own, unless its parameter is cast."""
    if parameter_saved is None or parameter == parameter_saved:
        return saved
    # The user wants another dtype, by strict=False.
    if isinstance(present, Tensor):
        return present.dtype
    if saved == parameter_saved:
        return parameter
    return saved


def allocate_like(
    parameter: Tensor, present: Any, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Return a tensor to fill, on the device, and split as the parameter is."""
    if isinstance(present, Tensor):
        if present.dtype == dtype:
            return present.detach()
        return torch.empty_like(present, dtype=dtype)
    if matches_shape(parameter, shape):
        # Zeros: what pads a vocabulary is in no checkpoint.
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    if math.prod(shape) == 1:
        return torch.empty(shape, dtype=dtype)
    return torch.empty(shape, dtype=dtype, device=parameter.device)


def matches_shape(parameter: Tensor, shape: tuple[int, ...]) -> bool:
    full_shape = getattr(parameter, "full_shape", parameter.shape)
    return shape in (tuple(parameter.shape), tuple(full_shape))


# Giving it back.


def check_groups(model: nn.Module, optimizers: Sequence[Optimizer], options: Options) -> None:
    """Make sure that the groups of the optimizers have options that were saved."""
    if not options or is_fsdp1(model):
        return
    names = Names(model)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            find_options(names.list_group(group), options)


def set_optimizers(
    model: nn.Module, optimizers: Sequence[Optimizer], state: State, options: Options
) -> None:
    """Give optimizers their state, and their groups the options that were saved."""
    if not options:
        return  # FSDP1's, saved before the first step
    if is_fsdp1(model):
        set_fsdp1(model, optimizers, state, options)
        return
    names = Names(model)
    for optimizer in optimizers:
        inner = unwrap_zero1(optimizer)
        numbers: dict[Tensor, int] = {}
        numbered: dict[int, dict[str, Any]] = {}
        for parameter in list_parameters(inner):
            number = numbers.setdefault(parameter, len(numbers))
            values = state.get(names.find(parameter))
            if values:
                numbered[number] = values
        groups = []
        for group in inner.param_groups:
            options_of_group = find_options(names.list_group(group), options)
            params = list(map(numbers.__getitem__, group["params"]))
            groups.append({**group, **options_of_group, "params": params})
        inner.load_state_dict({"state": numbered, "param_groups": groups})
        restore_dtypes(inner, numbered)
        if inner is not optimizer:
            for group in optimizer.param_groups:
                group.update(find_options(names.list_group(group), options))


def set_fsdp1(
    model: nn.Module, optimizers: Sequence[Optimizer], state: State, options: Options
) -> None:
    if not state:
        return
    groups = [{**group["options"], "params": group["names"]} for group in options]
    values: Any = {"state": state, "param_groups": groups}
    with hide_fsdp1_warnings():
        dcp.set_optimizer_state_dict(model, optimizers, values)


def find_options(names: Sequence[str], options: Options) -> dict[str, Any]:
    """Return the options of the saved groups that had these parameters, which must be equal."""
    wanted = set(names)
    groups = [group for group in options if wanted & set(group["names"])]
    missing = wanted.difference(*(group["names"] for group in groups))
    if missing:
        found = f"{min(missing)!r} was in none"
    elif any(group["options"] != groups[0]["options"] for group in groups):
        found = f"they were in {len(groups)}"
    else:
        return dict(groups[0]["options"]) if groups else {}
    raise ValueError(
        f"a group of the optimizer has {len(wanted)} parameters, and of the groups that were "
        f"saved {found}; expected the groups that the optimizer was saved with"
    )


def restore_dtypes(optimizer: Optimizer, numbered: Mapping[int, dict[str, Any]]) -> None:
    """Put back what ``load_state_dict`` cast to the dtype of its parameter (torch 2.13)."""
    for number, parameter in enumerate(list_parameters(optimizer)):
        loaded = optimizer.state.get(parameter, {})
        for key, value in numbered.get(number, {}).items():
            # The kind of "step" depends on how the optimizer works, not on the checkpoint.
            if key != "step" and key in loaded:
                loaded[key] = restore_dtype(loaded[key], value)


def restore_dtype(loaded: Any, saved: Any) -> Any:
    if type(loaded) is not type(saved):
        return loaded  # an optimizer with its own way of loading
    if isinstance(saved, Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(saved, dict) and loaded.keys() == saved.keys():
        return {key: restore_dtype(loaded[key], value) for key, value in saved.items()}
    if type(saved) in (list, tuple) and len(loaded) == len(saved):
        pairs = zip(loaded, saved, strict=True)
        return type(saved)(restore_dtype(one, other) for one, other in pairs)
    return loaded
