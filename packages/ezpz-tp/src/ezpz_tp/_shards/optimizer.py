"""An optimizer's state by the names of parameters rather than by their numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ezpz_tp._errors import ParallelError

Group = dict[str, Any]


def names_of(optimizer: Optimizer, module: nn.Module) -> dict[nn.Parameter, str]:
    """Return the name in the module of each of an optimizer's parameters.

    Raises:
        ParallelError: A parameter is not the module's.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    kept = module.state_dict(keep_vars=True)  # where hooks may have renamed them
    names |= {one: name for name, one in reversed(kept.items()) if isinstance(one, nn.Parameter)}
    found = {}
    for number, group in enumerate(optimizer.param_groups):
        for at, parameter in enumerate(group["params"]):
            if parameter not in names:
                raise ParallelError(
                    f"parameter {at} of group {number} of the optimizer, of shape "
                    f"{tuple(parameter.shape)}, is none of {type(module).__name__}'s; give the "
                    "module that the optimizer was made for. (One that keeps copies of its own, "
                    "in fp32 say, saves itself)"
                )
            found[parameter] = names[parameter]
    return found


def state_of(
    optimizer: Optimizer, module: nn.Module
) -> Iterator[tuple[str, nn.Parameter, str, Any]]:
    """Yield name, parameter, key and value of an optimizer's state, in the module's order."""
    names = names_of(optimizer, module)
    for parameter in module.parameters():
        if parameter in names:
            # Not state[...]: it makes an entry where there is none.
            for key, value in optimizer.state.get(parameter, {}).items():
                yield names[parameter], parameter, key, value


def groups_of(optimizer: Optimizer, module: nn.Module) -> list[Group]:
    """Return an optimizer's groups with names in the place of parameters."""
    names = names_of(optimizer, module)
    return [
        {**group, "params": [names[parameter] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]


def join_groups(stages: Sequence[Sequence[Group] | None]) -> list[Group] | None:
    """Return the groups of a whole model from those of its pipeline stages; None without any.

    Raises:
        ParallelError: Stages have other numbers of groups, or other hyperparameters in one.
    """
    if all(groups is None for groups in stages):
        return None
    joined = [{**group, "params": list(group["params"])} for group in stages[0] or ()]
    for stage, groups in enumerate(stages):
        if groups is None:
            raise ParallelError(
                f"an optimizer was given, but not on pipeline stage {stage}; expected one on each"
            )
        if len(groups) != len(joined):
            raise ParallelError(
                f"the optimizer has {len(groups)} parameter groups on pipeline stage {stage} and "
                f"{len(joined)} on stage 0; expected as many on each: one may be empty"
            )
        for number, (group, all_) in enumerate(zip(groups, joined, strict=True)):
            for key in sorted((group.keys() | all_.keys()) - {"params"}):
                if not _equal(group.get(key), all_.get(key)):
                    raise ParallelError(
                        f"group {number} of the optimizer has {key}={group.get(key)!r} on pipeline "
                        f"stage {stage} and {all_.get(key)!r} on stage 0; expected the same on each"
                    )
            all_["params"] += [name for name in group["params"] if name not in all_["params"]]
    return joined


def groups_for(saved: Sequence[Group], optimizer: Optimizer, module: nn.Module) -> list[Group]:
    """Return what was saved for each group of an optimizer, without its parameters.

    A group is known by the names of its parameters, an empty one by its number.

    Raises:
        ParallelError: A parameter was in no group, or those of one group were in several.
    """
    number_of = {name: number for number, group in enumerate(saved) for name in group["params"]}
    found = []
    for number, group in enumerate(groups_of(optimizer, module)):
        lost = [name for name in group["params"] if name not in number_of]
        numbers = {number_of[name] for name in group["params"] if name in number_of}
        if lost or len(numbers) > 1 or (not numbers and number >= len(saved)):
            raise ParallelError(
                f"group {number} of the optimizer has {len(group['params'])} parameters, of which "
                f"{len(lost)} were in no group when it was saved ({', '.join(lost[:3]) or '-'}) "
                f"and the rest in groups {sorted(numbers)}; expected all in one: make the "
                "optimizer with the groups that it was saved with"
            )
        taken = saved[numbers.pop() if numbers else number]
        found.append({key: value for key, value in taken.items() if key != "params"})
    return found


def set_groups(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Set hyperparameters; a tensor stays a tensor and a tuple a tuple."""
    for group, wanted in zip(optimizer.param_groups, groups, strict=True):
        for key, value in wanted.items():
            before = group.get(key)
            if isinstance(before, Tensor) and not isinstance(value, Tensor):
                group[key] = torch.tensor(value, dtype=before.dtype, device=before.device)
            elif isinstance(before, tuple):
                group[key] = tuple(value)
            else:
                group[key] = value


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return float(one) == float(other)
    return bool(one == other)
