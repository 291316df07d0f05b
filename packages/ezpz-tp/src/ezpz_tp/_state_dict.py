"""Full tensors from the parts that ranks hold, and back: in memory."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from ._current import current_state
from ._errors import DegreeError, ParallelError
from ._groups import live_world
from ._init import sending_device
from ._mappings import all_gather, broadcast_
from ._random import checksum
from ._ranks import AXES
from ._shard import Entry, Shard, optimizer_name, parameter_of, shard_of
from ._state import ParallelState

# What ranks tell each other about their shards: words, and the parts of one tensor.


def state_or_alone(state: ParallelState | None) -> ParallelState:
    state = state or current_state()
    if state is not None:
        return state
    world = live_world()
    if world is not None and world.size() > 1:
        raise ParallelError(
            f"there are no parallel groups, but a world of {world.size()} ranks; call "
            "initialize_tensor_parallel first, or give those of the layers, as in "
            "state=ParallelState.from_groups(tensor=group)"
        )
    return ParallelState.from_groups(rank=0)


def gather_from_ranks(value: Any, state: ParallelState, axes: Iterable[str] = AXES) -> list[Any]:
    """Return the values of all ranks along some axes. Collective over one axis after another."""
    values = [value]
    for axis in axes:
        if state.size(axis) > 1:
            gathered: list[Any] = [None] * state.size(axis)
            dist.all_gather_object(gathered, values, state.group(axis))
            values = list(chain.from_iterable(gathered))
    return values


@contextmanager
def raise_on_all_ranks(state: ParallelState) -> Iterator[None]:
    """Raise on every rank, at the end of a block, what it raised on any."""
    error: ParallelError | None = None
    cause: Exception | None = None
    try:
        yield
    except Exception as caught:  # noqa: BLE001 - whatever it is, the other ranks wait for word
        cause = caught
        error = ParallelError(f"{type(caught).__name__}: {caught}")
        if isinstance(caught, ParallelError):
            error = caught
    for rank, error_there in gather_from_ranks((state.rank, error), state):
        if error_there is not None:
            raise type(error_there)(f"rank {rank}: {error_there}") from cause


def gather_full(part: Part, group: ProcessGroup, device: torch.device | None) -> Tensor:
    """Return a full tensor, joined from the parts of a tensor group."""
    local, shard = part
    degree = group.size()
    if shard.dim is None or degree == 1:
        return local.to(device=device, copy=True)
    if not local.numel():  # nor has the whole any
        return torch.empty(shard.full_shape, dtype=local.dtype, device=device)
    # As bytes, because not every backend knows every dtype.
    at = sending_device(group, local.device)
    parts = all_gather(flat_bytes(local.to(at)), 0, group)
    values = [bytes_.view(local.dtype).view(local.shape) for bytes_ in parts.chunk(degree)]
    return shard.join(values, device)


def send_full(
    full: Tensor | None, held: Held, group: ProcessGroup, device: torch.device | None
) -> Tensor:
    """Return, on every stage, the full tensor of the first that holds it. Collective."""
    at = sending_device(group, device)  # not where it is: the other ranks do not know
    shape = held.entry.shard.full_shape
    dtype = held.entry.dtype
    sent = torch.empty(shape, dtype=dtype, device=at) if full is None else full.to(at)
    if sent.numel():
        sent = broadcast_(flat_bytes(sent), held.stages[0], group).view(dtype).view(shape)
    if device is None:
        return sent
    return sent.to(device)


def flat_bytes(tensor: Tensor) -> Tensor:
    whole = tensor.detach().contiguous()
    # Not view(-1): a tensor of one element counts as contiguous whatever its strides.
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


# An optimizer's state by the names of parameters rather than by their numbers.

Group = dict[str, Any]
Kind = TypeVar("Kind")


def parameter_names(optimizer: Optimizer, module: nn.Module) -> dict[nn.Parameter, str]:
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


def collect_groups(optimizer: Optimizer, module: nn.Module) -> list[Group]:
    names = parameter_names(optimizer, module)
    found = []
    for group in optimizer.param_groups:
        named = {**group, "params": [names[one] for one in group["params"]]}
        named.pop("param_names", None)  # other ones on each pipeline stage
        found.append(named)
    return found


def join_groups(stages: Sequence[Sequence[Group] | None]) -> list[Group] | None:
    """Return the groups of a whole model from those of its pipeline stages; None without any."""
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
                here: Any = group.get(key)
                first: Any = all_.get(key)
                tensors = isinstance(here, Tensor) or isinstance(first, Tensor)
                if (float(here) != float(first)) if tensors else (here != first):
                    raise ParallelError(
                        f"group {number} of the optimizer has {key}={here!r} on pipeline stage "
                        f"{stage} and {first!r} on stage 0; expected the same on each"
                    )
            all_["params"] += [name for name in group["params"] if name not in all_["params"]]
    return joined


def select_groups(saved: Sequence[Group], optimizer: Optimizer, module: nn.Module) -> list[Group]:
    number_of = {name: number for number, group in enumerate(saved) for name in group["params"]}
    found = []
    for number, group in enumerate(collect_groups(optimizer, module)):
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
        options = {key: value for key, value in taken.items() if key != "params"}
        own = optimizer.param_groups[number]
        if "param_names" in own:
            options["param_names"] = own["param_names"]
        found.append(options)
    return found


# What one rank holds of a model and its optimizer, and what the whole is.


class Part(NamedTuple):
    """A tensor that this rank holds a part of, or all: model and optimizer have their own."""

    tensor: Tensor
    shard: Shard


@dataclass(frozen=True, slots=True)
class Parts(Generic[Kind]):
    tensors: dict[str, Kind]
    values: dict[str, Any]
    groups: list[Group] | None


def collect_parts(
    module: nn.Module, optimizer: Optimizer | None, state: ParallelState
) -> Parts[Part]:
    found: Parts[Part] = Parts(
        {}, {}, None if optimizer is None else collect_groups(optimizer, module)
    )
    owners = named_owners(module)
    for name, value in module.state_dict().items():
        if isinstance(value, Tensor) and not is_extra_state(name):
            found.tensors[name] = make_part(name, value, owners.get(name, value), state)
        else:
            found.values[name] = value
    if optimizer is None:
        return found
    names = parameter_names(optimizer, module)
    for parameter in filter(names.__contains__, module.parameters()):
        # Not state[...]: it makes an entry where there is none.
        for key, value in optimizer.state.get(parameter, {}).items():
            name = optimizer_name(names[parameter], key)
            if not isinstance(value, Tensor):
                found.values[name] = value
            elif value.shape == parameter.shape or value.numel() == 1:
                owner = value
                if value.shape == parameter.shape:
                    owner = parameter
                found.tensors[name] = make_part(name, value, owner, state)
            else:
                raise ParallelError(
                    f"{key!r} of {names[parameter]!r} in the optimizer has shape "
                    f"{tuple(value.shape)}; expected that of its parameter, "
                    f"{tuple(parameter.shape)}, or one number: how it is split cannot be told, so "
                    "it cannot change its degree"
                )
    return found


def is_extra_state(name: str) -> bool:
    """Whether a name of a state dict is that of what ``get_extra_state`` of a module returned.

    Where that is a tensor, it is no part of one, and may have another length each time.
    """
    return name.rpartition(".")[2] == "_extra_state"


def named_owners(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, and by those that they have in the state dict."""
    buffers = dict(module.named_buffers(remove_duplicate=False))
    found = {**buffers, **dict(module.named_parameters(remove_duplicate=False))}
    own = set(map(id, found.values()))
    renamed = module.state_dict(keep_vars=True).items()
    found |= {name: value for name, value in renamed if id(value) in own}
    return found


def find_shard(name: str, parameter: Tensor, state: ParallelState) -> Shard:
    expert = not getattr(parameter, "allreduce", True)
    if expert and state.size("expert") * state.size("expert_tensor") > 1:
        raise ParallelError(
            f"{name!r} is an expert's (allreduce is False), split over expert groups; only "
            "parameters split over the tensor group can change their degree"
        )
    shard = shard_of(parameter, state.size("tensor"))
    assert shard is not None  # a degree was given
    return shard


def make_part(name: str, tensor: Tensor, owner: Tensor, state: ParallelState) -> Part:
    """Return a tensor as a rank's part of another, after a look at it."""
    index = state.index("tensor")
    degree = state.size("tensor")
    shard = find_shard(parameter_of(name)[0], owner, state)
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
    expected = Entry(name, tensor.dtype, shard).local_shape(index, degree)
    if tuple(tensor.shape) != expected:
        raise DegreeError(
            f"{name!r} has shape {tuple(tensor.shape)}; expected {expected}, rank {index} of "
            f"{degree}'s part of {shard.full_shape}: the state given is not that of the model's "
            "layers, or set_shard was told otherwise"
        )
    return Part(tensor.detach(), shard)


# What all ranks hold together: the whole model, as they agree on it.


class Held(NamedTuple):
    """A full tensor, and the pipeline stages that hold it: more than one where it is tied."""

    entry: Entry
    stages: tuple[int, ...]


def survey(
    module: nn.Module, optimizer: Optimizer | None, state: ParallelState
) -> tuple[Parts[Part], Parts[Held]]:
    with raise_on_all_ranks(state):
        parts = collect_parts(module, optimizer, state)
        entries = [Entry(name, one.tensor.dtype, one.shard) for name, one in parts.tensors.items()]
        own_stage = entries, parts.values, parts.groups
        if state.size("pipeline") > 1:
            pickle.dumps(own_stage)  # what cannot be sent is known before anything is
    alike = gather_from_ranks((entries, optimizer is None), state, ("tensor",))
    stages = gather_from_ranks(own_stage, state, ("pipeline",))
    entries_of_stages = []
    values: dict[str, Any] = {}
    groups_of_stages = []
    for stage_entries, stage_values, stage_groups in stages:
        entries_of_stages.append(stage_entries)
        values |= stage_values
        groups_of_stages.append(stage_groups)
    counts = Counter(entry.name for entry in chain.from_iterable(entries_of_stages))
    tied = {}
    for name, part in parts.tensors.items():
        if counts[name] > 1:
            digest = checksum(part.tensor).item()
            tied[name] = digest
    digests = gather_from_ranks(tied, state, ("pipeline",))
    with raise_on_all_ranks(state):
        (first, without), *others = alike
        for rank, (other, none) in enumerate(others, 1):
            if (first, without) != (other, none):
                odd = sorted(set(map(repr, first)) ^ set(map(repr, other)))
                same = "but one has an optimizer"
                if first != other:
                    same = "in another order"
                raise ParallelError(
                    f"tensor-parallel ranks 0 and {rank} of stage {state.index('pipeline')} hold "
                    f"parts of other tensors: {', '.join(odd[:4]) or same}; expected the same "
                    "model and optimizer on each"
                )
        held = _merge_stages(entries_of_stages, digests)
        groups = join_groups(groups_of_stages)
    return parts, Parts(held, values, groups)


def _merge_stages(
    stages: Sequence[list[Entry]], digests: Sequence[Mapping[str, float]]
) -> dict[str, Held]:
    """Return the full tensors, and the stages that have each: the same one, if it is several."""
    held: dict[str, Held] = {}
    for stage, entries in enumerate(stages):
        for entry in entries:
            name = entry.name
            first, others = held.get(name, Held(entry, ()))
            at = (*others, stage)
            if (entry, digests[stage].get(name)) != (first, digests[at[0]].get(name)):
                what = "other values"
                if entry != first:
                    what = f"{first} and {entry}"
                raise ParallelError(
                    f"pipeline stages {at[0]} and {stage} both have {name!r}, with {what}; "
                    "expected a tied parameter, equal on both, or the names of the whole model: "
                    "number the layers of a stage as they are in the model"
                )
            held[name] = Held(entry, at)
    return held


@torch.no_grad()
def gather_state_dict(
    module: nn.Module,
    *,
    optimizer: Optimizer | None = None,
    state: ParallelState | None = None,
    device: torch.device | str | None = "cpu",
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
    parts, whole = survey(module, optimizer, state)
    full: dict[str, Any] = {}
    for name, held in whole.tensors.items():
        found = None
        if state.index("pipeline") == held.stages[0]:
            found = gather_full(parts.tensors[name], state.group("tensor"), device)
        if state.size("pipeline") > 1:
            found = send_full(found, held, state.group("pipeline"), device)
        if found is not None:
            full[name] = found
    full |= whole.values
    if whole.groups is None:
        return full
    model, states = nested(full)
    return {"model": model, "optimizer": {"state": states, "param_groups": whole.groups}}


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
            optimizer's. In a pipeline, a name that the module has not is another stage's, and is
            left out. Otherwise it is passed on, for ``load_state_dict`` to judge.
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
    tensors, saved = with_optimizer(full, optimizer, "shard_state_dict", "gather_state_dict")
    owners = named_owners(module)
    own = module.state_dict()
    model: dict[str, Any] = {}
    for name, value in tensors.items():
        is_part = isinstance(value, Tensor) and not is_extra_state(name)
        if name in own and is_part and isinstance(own[name], Tensor):
            model[name] = cut(name, value, owners.get(name, own[name]), state)
        elif name in own or state.size("pipeline") == 1:
            model[name] = value
    if optimizer is None:
        return model
    names = parameter_names(optimizer, module)
    numbers = {parameter: number for number, parameter in enumerate(names)}
    groups = select_groups(saved["param_groups"], optimizer, module)
    for group, own_group in zip(groups, optimizer.param_groups, strict=True):
        group["params"] = [numbers[parameter] for parameter in own_group["params"]]
    states: dict[int, dict[str, Any]] = {}
    for parameter, name in names.items():
        for key, value in saved["state"].get(name, {}).items():
            part = value
            if isinstance(value, Tensor):
                alike = tuple(value.shape) == find_shard(key, parameter, state).full_shape
                if alike or value.numel() > 1:
                    part = cut(f"{name} {key}", value, parameter, state)
                part = part.clone()  # load_state_dict of an optimizer keeps what it is given
            states.setdefault(numbers[parameter], {})[key] = part
    return {"model": model, "optimizer": {"state": states, "param_groups": groups}}


def cut(name: str, full: Tensor, parameter: Tensor, state: ParallelState) -> Tensor:
    shard = find_shard(name, parameter, state)
    if tuple(full.shape) != shard.full_shape:
        raise DegreeError(
            f"{name!r} has shape {tuple(full.shape)}; expected {shard.full_shape}, the full shape "
            f"of the module's, of which this rank holds {tuple(parameter.shape)}"
        )
    return shard.cut(full, state.index("tensor"), state.size("tensor"))


def nested(found: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return what is a model's by name, and what is an optimizer's by parameter and key."""
    model: dict[str, Any] = {}
    states: dict[str, dict[str, Any]] = {}
    for name, value in found.items():
        parameter, key = parameter_of(name)
        into = model
        if key is not None:
            into = states.setdefault(parameter, {})
        into[key or name] = value
    return model, states


def with_optimizer(
    held: Mapping[str, Any], optimizer: Optimizer | None, caller: str, maker: str
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    if optimizer is None:
        return held, {"state": {}, "param_groups": {}}
    if set(held) != {"model", "optimizer"}:
        raise ParallelError(
            f"{caller}: expected {{'model', 'optimizer'}}, as {maker}(..., optimizer=...) returns "
            f"them, and found {sorted(held)[:5]}"
        )
    return held["model"], held["optimizer"]
