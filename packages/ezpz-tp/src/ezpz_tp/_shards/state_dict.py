"""Full tensors from the parts that ranks hold, and back: in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ezpz_tp._errors import DegreeError, ParallelError
from ezpz_tp._groups.state import ParallelState

from .exchange import gather_full, send_full, state_or_alone
from .optimizer import Group, groups_for, names_of
from .parts import owners_of, shard_in
from .source import parameter_of
from .whole import survey


@torch.no_grad()
def gather_state_dict(
    module: nn.Module,
    *,
    optimizer: Optimizer | None = None,
    state: ParallelState | None = None,
    device: torch.device | str | None = "cpu",
    to_rank: int | None = None,
) -> dict[str, Any]:
    """Return the state dict of the whole model, to the last bit, from the parts of its ranks.

    Tensors are joined one at a time. Padding of a vocabulary is left out. Of what every rank
    holds whole, the first tensor-parallel rank's is taken. The stages of a pipeline have to use
    the names of the whole model (``layers.7`` and not each its own ``layers.0``).

    Collective: every rank calls this, data-parallel replicas too; each replica joins its own.

    Args:
        module: This rank's model, or stage of it.
        optimizer: Join its state as well.
        state: Whose groups; the default's if None.
        device: Where the full tensors are; None leaves them where they are joined.
        to_rank: The number of the one rank that gets them; the others return an empty dict.

    Returns:
        Full tensors by name. With an optimizer ``{"model": that, "optimizer": {"state": {name:
        {"exp_avg": full tensor, ...}}, "param_groups": [{"params": [names], "lr": ..., ...}]}}``,
        which is also how ``torch.distributed.checkpoint.state_dict`` names an optimizer's state.

    Raises:
        DegreeError: A tensor has not the shape that its metadata say.
        ParallelError: Two stages use one name for different tensors; a tensor is an expert's, a
            DTensor or on the meta device; an optimizer's tensor has a shape of its own.
    """
    state = state_or_alone(state)
    device = None if device is None else torch.device(device)
    world = state.layout.world_size if state.layout is not None else None
    if to_rank is not None and world is not None and not 0 <= to_rank < world:
        raise ParallelError(f"to_rank={to_rank} of {world} ranks; expected 0 to {world - 1}")
    parts, whole = survey(module, optimizer, state)
    here, keep = state.index("pipeline"), to_rank in (None, state.rank)
    several = state.size("pipeline") > 1
    # Whether a rank of this pipeline wants what another stage has.
    passed = several and (to_rank is None or to_rank in state.ranks("pipeline"))
    full: dict[str, Any] = {}
    for name, held in whole.tensors.items():
        found = None
        if here == held.stages[0]:
            part, group = parts.tensors[name], state.group("tensor")
            found = gather_full(part.tensor, part.shard, group, device, keep=keep or passed)
        if passed:
            stages = state.group("pipeline")
            found = send_full(found, held.entry, held.stages[0], stages, device)
        if keep and found is not None:
            full[name] = found
    if not keep:
        return {}
    full |= whole.values
    return full if whole.groups is None else _nested(full, whole.groups)


def shard_state_dict(
    full: Mapping[str, Any],
    module: nn.Module,
    *,
    optimizer: Optimizer | None = None,
    state: ParallelState | None = None,
) -> dict[str, Any]:
    """Return this rank's parts of a full state dict, ready for ``load_state_dict``.

    Nothing is sent. A part is a view where the tensor is split along one stretch without padding.

    Args:
        full: Full tensors by name, as `gather_state_dict` returns them, with or without an
            optimizer's; a name that the module has not is left out in a pipeline (it is another
            stage's), and passed on else, for ``load_state_dict`` to judge.
        module: This rank's model, or stage of it.
        optimizer: Cut its state as well; it is returned as ``load_state_dict`` of it expects.
        state: Whose groups; the default's if None.

    Returns:
        Parts by name, or ``{"model": ..., "optimizer": ...}`` with an optimizer.

    Raises:
        DegreeError: A tensor has not the full shape of the module's; names both.
        ParallelError: ``full`` has no optimizer's state, and one is asked for.
    """
    state = state_or_alone(state)
    if optimizer is not None and set(full) != {"model", "optimizer"}:
        raise ParallelError(
            f"shard_state_dict: expected {{'model', 'optimizer'}}, as gather_state_dict(..., "
            f"optimizer=...) returns them, and found {sorted(full)[:5]}"
        )
    tensors = full if optimizer is None else full["model"]
    owners = owners_of(module)
    own = module.state_dict()
    model: dict[str, Any] = {}
    for name, value in tensors.items():
        if name in own and isinstance(value, Tensor) and isinstance(own[name], Tensor):
            model[name] = cut(name, value, owners.get(name, own[name]), state)
        elif name in own or state.size("pipeline") == 1:
            model[name] = value
    if optimizer is None:
        return model
    return {
        "model": model,
        "optimizer": _cut_optimizer(full["optimizer"], module, optimizer, state),
    }


def cut(name: str, full: Tensor, parameter: Tensor, state: ParallelState) -> Tensor:
    """Return this rank's part of a full tensor.

    Raises:
        DegreeError: It has not the full shape that it should.
    """
    shard = shard_in(name, parameter, state)
    if tuple(full.shape) != shard.full_shape:
        raise DegreeError(
            f"{name!r} has shape {tuple(full.shape)}; expected {shard.full_shape}, the full shape "
            f"of the module's, of which this rank holds {tuple(parameter.shape)}"
        )
    index, degree = state.index("tensor"), state.size("tensor")
    if shard.dim is None or degree == 1:
        return full
    shape, pieces = shard.local_shape(index, degree), shard.pieces(index, degree)
    if len(pieces) == 1 and pieces[0][2] == shape[shard.dim]:
        return full.narrow(shard.dim, *pieces[0][1:])
    part = full.new_zeros(shape)
    for into, start, length in pieces:
        part.narrow(shard.dim, into, length).copy_(full.narrow(shard.dim, start, length))
    return part


def _cut_optimizer(
    full: Mapping[str, Any], module: nn.Module, optimizer: Optimizer, state: ParallelState
) -> dict[str, Any]:
    names = names_of(optimizer, module)
    numbers: dict[nn.Parameter, int] = {}
    groups = []
    for group, said in zip(
        optimizer.param_groups, groups_for(full["param_groups"], optimizer, module), strict=True
    ):
        for parameter in group["params"]:
            numbers[parameter] = len(numbers)
        groups.append({**said, "params": [numbers[parameter] for parameter in group["params"]]})
    states: dict[int, dict[str, Any]] = {}
    for parameter, number in numbers.items():
        for key, value in full["state"].get(names[parameter], {}).items():
            kept, part = states.setdefault(number, {}), value
            if isinstance(value, Tensor):
                alike = tuple(value.shape) == shard_in(key, parameter, state).full_shape
                if alike or value.numel() > 1:
                    part = cut(f"{names[parameter]} {key}", value, parameter, state)
                part = part.clone()  # load_state_dict of an optimizer keeps what it is given
            kept[key] = part
    return {"state": states, "param_groups": groups}


def _nested(full: Mapping[str, Any], groups: list[Group]) -> dict[str, Any]:
    model: dict[str, Any] = {}
    states: dict[str, dict[str, Any]] = {}
    for name, value in full.items():
        parameter, key = parameter_of(name)
        if key is None:
            model[name] = value
        else:
            states.setdefault(parameter, {})[key] = value
    return {"model": model, "optimizer": {"state": states, "param_groups": groups}}
