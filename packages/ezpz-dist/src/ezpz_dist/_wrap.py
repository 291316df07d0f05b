"""One call that makes a model train on all ranks: DDP, ZeRO-1, FSDP2 or FSDP1."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ezpz_device import get_torch_device

from . import _replicas
from ._collectives import all_gather_object
from ._errors import WrapError
from ._members import Members
from ._replicas import Initialize, has_meta, materialize, refuse_unfillable
from ._watch import waiting
from ._world import current_world

if TYPE_CHECKING:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.optim import ZeroRedundancyOptimizer

logger = logging.getLogger(__name__)

# A copy of the model on every rank: DistributedDataParallel.

_DDP = "wrap_model_for_ddp()"


def wrap_model_for_ddp(
    model: nn.Module, *, initialize: Initialize | None = None,
    compile: bool | Mapping[str, Any] = False, **options: Any,
) -> DistributedDataParallel:  # fmt: skip
    """Keep a copy of a model on every rank, and average the gradients in backward (DDP).

    In place of ``DistributedDataParallel(model, device_ids=[local_rank])``, which torch refuses
    on CPUs. The model is moved to this rank's device, and starts from the first rank's values.
    What is returned is torch's own wrapper; nothing of ours runs in a step.

    Buffers are not averaged: before each forward pass all ranks take the first's, so that a
    batch norm's running statistics are of its samples alone (``SyncBatchNorm`` has all ranks').

    With ezpz_tp's groups, gradients are averaged over data (and context) parallel ranks only,
    so a rank's loss is the mean over its own tokens. Call `ezpz_tp.finalize_grads` as ever.

    Collective: every rank calls this, once.

    Args:
        model: The bare model, the same on every rank. It may be on the meta device.
        initialize: For a model on the meta device, as of `wrap_model_for_fsdp2`.
        compile: As of `wrap_model`.
        options: Any other of DistributedDataParallel's, such as ``static_graph``.

    Raises:
        MismatchError: The ranks called something else, or with other options.
        NotSetUpError: `setup_torch` was not called.
        TypeError: ``model`` is no module.
        WrapError: The model is wrapped already, has nothing to train, or differs between ranks
            (names rank and parameter); or ``device_ids`` is given.
    """
    replicas = _replicas.find_replicas(_DDP)
    device = replicas.world.device
    arguments = {"initialize": initialize, "compile": compile or None, **options}
    with _replicas.require_agreement(_DDP, model, arguments, replicas):
        _replicas.check_model(_DDP, model, replicas, options, _replicas.RESERVED)
        if not _is_trained(model):
            raise WrapError(
                f"{_DDP}: {type(model).__name__} has no parameter that requires a gradient; "
                "expected one at least; without it there is nothing to average: use wrap_model"
            )
        refuse_unfillable(model, initialize)
    materialize(model, device, initialize)
    model.to(device)
    _compile_blocks(model, compile)
    _replicas.unexpand_buffers(model)
    device_ids = None  # on the CPU torch refuses them
    if device.type in ("cuda", "xpu"):
        device_ids = [device.index]
    with waiting("DDP's start values", replicas.world, replicas.ranks):
        wrapped = DistributedDataParallel(
            model, device_ids=device_ids, process_group=replicas.group, **options
        )
    _replicas.register_wrapped(model, "DDP", wrapped)
    return wrapped


def _is_trained(model: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())


# ZeRO-1: each rank updates a part of the parameters, and holds the optimizer's state of these.

_ZERO1 = "wrap_optimizer_for_zero1()"


def wrap_optimizer_for_zero1(
    optimizer_class: type[Optimizer],
    params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
    **options: Any,
) -> ZeroRedundancyOptimizer:
    """Share an optimizer's state out over the ranks, for a model wrapped by DDP (ZeRO-1).

    Parameters and gradients stay whole on every rank; each rank updates those that are its own
    and sends them to the others. AdamW's two states of a parameter are then on one rank only.

    For a checkpoint every rank calls ``optimizer.consolidate_state_dict(to=0)``. Then
    ``optimizer.state_dict()`` of rank 0 (of the data-parallel group) is that of a plain
    optimizer. ``load_state_dict`` takes it on every rank, for any number of ranks.

    Collective: every rank calls this, with the same parameters in the same order.

    Args:
        optimizer_class: ``torch.optim.AdamW``, say.
        params: Of the DDP model: all of one dtype. Or groups of parameters.
        options: The optimizer's own (``lr``, ...), and ZeroRedundancyOptimizer's
            (``parameters_as_bucket_view``).

    Raises:
        MismatchError, NotSetUpError: As of `wrap_model_for_ddp`.
        WrapError: The parameters are FSDP's, which shards the optimizer's state as well; or they
            differ between ranks; or ``process_group`` is given.
    """
    replicas = _replicas.find_replicas(_ZERO1)
    groups: list[Any] = []
    parameters: dict[str, torch.Tensor] = {}
    arguments = {"optimizer_class": getattr(optimizer_class, "__name__", None), **options}
    with _replicas.require_agreement(_ZERO1, parameters, arguments, replicas):
        for entry in params:
            group = _copy_group(entry)
            groups.append(group)
            members = group["params"] if isinstance(group, dict) else [group]
            for parameter in members:
                parameters[f"parameter {len(parameters)}"] = parameter
        _replicas.check_options(_ZERO1, options, _replicas.RESERVED)
        for name, parameter in parameters.items():
            _replicas.refuse_expanded(_ZERO1, name, parameter)
            _refuse_shard(parameter, optimizer_class)
    with warnings.catch_warnings(), waiting("ZeRO-1's start", replicas.world, replicas.ranks):
        # Importing it warns of TorchScript, which is not used here.
        warnings.simplefilter("ignore")
        from torch.distributed import optim  # noqa: PLC0415

        return optim.ZeroRedundancyOptimizer(
            groups, optimizer_class=optimizer_class, process_group=replicas.group, **options
        )


def _copy_group(group: torch.Tensor | dict[str, Any]) -> torch.Tensor | dict[str, Any]:
    """Return a group of parameters that can be read twice: they may come from a generator."""
    if isinstance(group, torch.Tensor):
        return group
    params = group["params"]
    if isinstance(params, torch.Tensor):
        params = [params]
    return {**group, "params": list(params)}


def _refuse_shard(parameter: torch.Tensor, optimizer_class: type[Optimizer]) -> None:
    for attribute, wrapper in (("device_mesh", "FSDP2"), ("_fsdp_flattened", "FSDP1")):
        if hasattr(parameter, attribute):
            raise WrapError(
                f"{_ZERO1}: the parameters are {wrapper}'s shards; expected those of a DDP model; "
                f"use {optimizer_class.__name__} itself: its state is sharded as they are"
            )


# torch's mesh over the data-parallel ranks: a line, or copies x shards.


def data_parallel_mesh(replicas: Members, shard_size: int | None = None) -> DeviceMesh:
    device_type = replicas.world.device.type
    if shard_size in (None, replicas.size):
        assert replicas.group is not None
        return DeviceMesh.from_group(replicas.group, device_type, mesh_dim_names=("shard",))
    # Of all ranks that are replicas of each other, as all ranks make all groups.
    every = [tuple(replicas.ranks)]
    if replicas.size < replicas.world.info.world_size:
        every = list(dict.fromkeys(all_gather_object(every[0])))
    import ezpz_tp  # noqa: PLC0415 - only where its groups are used

    ranks = torch.tensor(every).view(len(every), -1, shard_size)
    with waiting("the groups of hybrid sharding", replicas.world):
        return ezpz_tp.make_mesh(device_type, ranks, ("replicate", "shard"))


# Which modules of a model are sharded by themselves: gathered when they run, freed after.


def find_units(
    model: nn.Module, kinds: Collection[type[nn.Module]] | None = None
) -> dict[str, nn.Module]:
    """Return the modules to shard by themselves, by name, each before those that contain it."""
    candidates: dict[str, nn.Module] = {}
    if kinds is None:
        candidates.update(_find_blocks(model, ""))
    else:
        wanted = tuple(kinds)
        every = model.named_modules()
        candidates = {name: each for name, each in every if name and isinstance(each, wanted)}
    # A unit frees its parameters after its forward: those that others use too stay the root's.
    users: dict[nn.Parameter, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        users.setdefault(parameter, set()).add(find_enclosing_unit(name, candidates))
    owners: set[str] = set()
    sharers: set[str] = set()
    for names in users.values():
        owners |= names
        if len(names) > 1:
            sharers |= names
    units: dict[str, nn.Module] = {}
    for name in reversed(candidates):
        if name in owners and name not in sharers:
            units[name] = candidates[name]
    return units


def find_enclosing_unit(name: str, units: Container[str]) -> str:
    """Return the innermost of some modules that a name is in, or "", the root."""
    while name:
        name = name.rpartition(".")[0]
        if name in units:
            return name
    return ""


def _find_blocks(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the members of lists, and the matrices that are in none, with their paths."""
    is_list = _is_list(module)
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        if is_list:
            if _is_list_of_blocks(child):
                yield from _find_blocks(child, child_path)
            elif any(parameter.dim() > 1 for parameter in child.parameters()):
                # A norm by itself would cost a collective for a few numbers.
                yield child_path, child
        elif _is_matrix(child):
            yield child_path, child
        elif not isinstance(child, nn.MultiheadAttention):  # reads the weights of its child
            yield from _find_blocks(child, child_path)


def _is_list(module: nn.Module) -> bool:
    """True if the members of a module are blocks. A Sequential may also be a block."""
    if isinstance(module, nn.Sequential):
        return any(map(_has_children, module))
    return isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _is_list_of_blocks(member: nn.Module) -> bool:
    """True if a member of a list is no block, but a list itself."""
    if isinstance(member, nn.Sequential):
        return all(map(_has_children, member))
    return isinstance(member, (nn.ModuleList, nn.ModuleDict))


def _has_children(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _is_matrix(module: nn.Module) -> bool:
    """True if a module is used by its forward alone. Subclasses may be read by others."""
    kinds: set[type[nn.Module]] = {nn.Linear, nn.Embedding}
    tp = sys.modules.get("ezpz_tp")
    if tp is not None:
        kinds |= {tp.ColumnParallelLinear, tp.RowParallelLinear}
        kinds |= {tp.ParallelEmbedding, tp.VocabParallelEmbedding}
    return type(module) in kinds


# FSDP1, for those who need it.

_FSDP1 = "wrap_model_for_fsdp()"


def wrap_model_for_fsdp(
    model: nn.Module, *, dtype: str | torch.dtype | None = None,
    units: Collection[type[nn.Module]] | None = None,
    compile: bool | Mapping[str, Any] = False, **options: Any,
) -> FullyShardedDataParallel:  # fmt: skip
    """Shard a model by torch's FullyShardedDataParallel (FSDP1).

    torch calls it deprecated, and develops FSDP2 instead: prefer `wrap_model_for_fsdp2`, which
    also takes models on the meta device. Here for code that needs the class or its checkpoints.

    Collective: every rank calls this, once.

    Args:
        model: The bare model, the same on every rank; all start from the first rank's values.
        dtype: The type to compute in (``"bf16"``); gradients are reduced in fp32.
        units: As of `wrap_model_for_fsdp2`.
        compile: As of `wrap_model`.
        options: Any of FullyShardedDataParallel's; they take the place of what is set here
            (``use_orig_params=True``, the units as ``auto_wrap_policy``).

    Raises:
        MismatchError, NotSetUpError, TypeError, ValueError: As of `wrap_model_for_fsdp2`.
        WrapError: The model is wrapped already, is on the meta device, or differs between ranks
            (names rank and parameter); or ``process_group``, ``device_id`` or a hybrid strategy
            is given.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision  # noqa: PLC0415 - 0.6 s
    from torch.distributed.fsdp.wrap import CustomPolicy  # noqa: PLC0415

    replicas = _replicas.find_replicas(_FSDP1)
    precision = None
    arguments = {"dtype": dtype, "compile": compile or None, **options}
    with _replicas.require_agreement(_FSDP1, model, arguments, replicas) as lines:
        _replicas.check_model(_FSDP1, model, replicas, options, _replicas.RESERVED)
        if "HYBRID" in str(options.get("sharding_strategy")):
            raise WrapError(
                f"{_FSDP1}: {options['sharding_strategy']}, which wants groups of its own; "
                "expected a strategy for one group; use wrap_model_for_fsdp2 with shard_size"
            )
        if dtype is not None:
            wanted = _replicas.as_floating(dtype)
            precision = MixedPrecision(
                param_dtype=wanted, reduce_dtype=torch.float32, buffer_dtype=wanted
            )
        if has_meta(model):
            raise WrapError(
                f"{_FSDP1}: {type(model).__name__} is on the meta device; expected one with data: "
                "FSDP1 would fill the shards of all ranks with the same numbers; use "
                "wrap_model_for_fsdp2"
            )
        found = find_units(model, units)
        lines.update(_describe_units(found))
    _replicas.broadcast_start_values([*model.parameters(), *model.buffers()], replicas)
    _compile_blocks(model, compile)
    settings: dict[str, Any] = {
        "auto_wrap_policy": CustomPolicy(set(found.values()).__contains__),
        "mixed_precision": precision,
        "use_orig_params": True,
        **options,
    }
    with warnings.catch_warnings(), waiting("FSDP1's start", replicas.world, replicas.ranks):
        # The docstring says it; a user cannot act on it. Nor on that one rank has
        # nothing to share out.
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", "FSDP is switching to use `NO_SHARD`")
        wrapped = FullyShardedDataParallel(
            model, process_group=replicas.group, device_id=replicas.world.device, **settings
        )
    _replicas.register_wrapped(model, "FSDP1", wrapped)
    return wrapped


# Parameters, gradients and optimizer state shared out over the ranks: FSDP2.

_FSDP2 = "wrap_model_for_fsdp2()"

# Backends on which an average is a sum, divided: oneCCL has none, or (2021.15 and later) not on
# every path (https://github.com/intel/torch-xpu-ops/issues/2361), and until 2022.1 it divides small
# messages twice (https://github.com/intel/torch-xpu-ops/issues/3020).
_WITHOUT_AVERAGE = ("ccl", "xccl")
_RESERVED = {
    "mesh": "give shard_size, or ezpz_tp's groups",
    "mp_policy": "give dtype, reduce_dtype",
}


def wrap_model_for_fsdp2(
    model: nn.Module, *, dtype: str | torch.dtype | None = None,
    reduce_dtype: str | torch.dtype = torch.float32, reshard_after_forward: bool | int = True,
    shard_size: int | None = None, units: Collection[type[nn.Module]] | None = None,
    initialize: Initialize | None = None, compile: bool | Mapping[str, Any] = False, **options: Any,
) -> nn.Module:  # fmt: skip
    """Share a model's parameters, gradients and optimizer state out over the ranks (FSDP2).

    Each transformer block is a unit: gathered when it runs, freed after. Blocks are the members
    of lists (ModuleList, ModuleDict, Sequential, one in another); embeddings and linear layers
    outside of them are units too, unless their weights are tied. The rest is the root's.
    Make the optimizer afterwards: it has to see the shards. Buffers stay whole, in their own
    type, and each rank's own: a batch norm's running statistics are of that rank's samples.

    A model built under ``torch.device("meta")`` gets its values unit by unit, each before it is
    sharded, so no rank ever holds all of it. Each module's ``reset_parameters()`` fills what that
    module holds itself, its buffers too (numbers that it leaves out are NaN, integers anything),
    and the first rank's values are sent to the others.
    They are those of one process that builds the model on this device with the first rank's
    seed, if its constructors draw in the order in which they register.

    With ezpz_tp's groups it is sharded over data (and context) parallel ranks only.

    Collective: every rank calls this, once.

    Args:
        model: The bare model, the same on every rank; all start from the first rank's values.
        dtype: The type to compute in (``"bf16"``); None: the parameters' own.
        reduce_dtype: With ``dtype``, the type that gradients are reduced in.
        reshard_after_forward: True: a unit is freed after forward and gathered again for
            backward (ZeRO-3). False: kept until backward (ZeRO-2), more memory, a third less
            communication. A number: kept as shards over so many ranks, a node's say, for
            which torch makes two process groups a unit; not where ezpz_tp splits the model.
        shard_size: Hybrid sharding: so many ranks, neighbors, hold one copy of the model
            together, and copies are kept equal (a node's ranks, say); None: all ranks. It
            divides the number of data-parallel ranks.
        units: Classes whose instances are the units, in place of those above: for a model that
            reads the weights of an embedding or a head without calling it.
        initialize: For a model on the meta device. It is called with each module after its
            ``reset_parameters()``, to fill the module's own tensors. The function of
            ``model.apply`` does the same (``model._init_weights`` of many).
        compile: As of `wrap_model`.
        options: Any other of ``fully_shard``'s, such as ``offload_policy``.

    Returns:
        The model itself, whose class now also is torch's FSDPModule.

    Raises:
        MismatchError, NotSetUpError, TypeError: As of `wrap_model_for_ddp`.
        WrapError: The model is wrapped already, differs between ranks (names rank and
            parameter), or cannot be sharded or filled as asked.
        ValueError: A type is not known, or no floating-point type.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy  # noqa: PLC0415 - 0.6 s

    replicas = _replicas.find_replicas(_FSDP2)
    arguments = {
        "dtype": dtype,
        "reduce_dtype": reduce_dtype,
        "shard_size": shard_size,
        "reshard_after_forward": reshard_after_forward,
        "initialize": initialize,
        "compile": compile or None,
        **options,
    }
    policy = MixedPrecisionPolicy()
    with _replicas.require_agreement(_FSDP2, model, arguments, replicas) as lines:
        _replicas.check_model(_FSDP2, model, replicas, options, _RESERVED)
        if dtype is not None:
            policy = MixedPrecisionPolicy(
                param_dtype=_replicas.as_floating(dtype),
                reduce_dtype=_replicas.as_floating(reduce_dtype, "reduce_dtype"),
            )
        # Offered by torch 2.8 and later.
        can_sum = hasattr(FSDPModule, "set_force_sum_reduction_for_comms")
        if replicas.world.backend in _WITHOUT_AVERAGE and not can_sum:
            raise WrapError(
                f"{_FSDP2}: {replicas.world.backend} cannot average, and torch "
                f"{torch.__version__} asks it to; expected torch 2.8 or later; or use "
                "wrap_model_for_ddp"
            )
        _check_sizes(reshard_after_forward, shard_size, replicas)
        refuse_unfillable(model, initialize)
        found = find_units(model, units)
        _refuse_unshardable(model, found, dtype, options.get("ignored_params", ()))
        lines.update(_describe_units(found))
    _compile_blocks(model, compile)
    settings = {
        "mesh": data_parallel_mesh(replicas, shard_size),
        "mp_policy": policy,
        "reshard_after_forward": reshard_after_forward,
        **options,
    }
    with ExitStack() as stack:
        tp = sys.modules.get("ezpz_tp")
        if tp is not None:
            # Its attributes of parameters are kept while others take their place.
            stack.enter_context(tp.keep_attributes(model))
        _shard(model, set(found.values()), replicas, settings, initialize)
    return model


def _describe_units(units: Mapping[str, nn.Module]) -> dict[str, str]:
    return {f"unit {name}": type(module).__name__ for name, module in units.items()}


def _shard(
    model: nn.Module,
    units: set[nn.Module],
    replicas: Members,
    settings: dict[str, Any],
    initialize: Initialize | None,
) -> None:
    """Fill, equal and shard one unit after another: only one at a time is whole on the device."""
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - 0.6 s

    ignored = settings.get("ignored_params", ())
    holders: dict[torch.Tensor, _replicas.Holder] = {}
    done: set[torch.Tensor] = set()

    def find_remaining(module: nn.Module) -> list[torch.Tensor]:
        tensors = chain(module.parameters(), module.buffers())
        return [each for each in tensors if each not in done and not hasattr(each, "device_mesh")]

    for module in _replicas.children_first(model):
        _replicas.materialize_module(module, replicas.world.device, initialize, holders)
        if module is not model and module not in units:
            continue
        _replicas.broadcast_start_values(find_remaining(module), replicas)
        if ignored:
            settings["ignored_params"] = {_find_moved(each, holders) for each in ignored}
        if module is model and settings["reshard_after_forward"] is not False:
            # torch then keeps the root after forward: backward begins with it.
            del settings["reshard_after_forward"]
        with waiting("fully_shard", replicas.world, replicas.ranks):
            sharded: Any = fully_shard(module, **settings)
        # Buffers and ignored parameters. A reference to what was sharded would keep it whole.
        done.update(find_remaining(module))
        if replicas.world.backend in _WITHOUT_AVERAGE:
            sharded.set_force_sum_reduction_for_comms(True)


def _find_moved(
    tensor: torch.Tensor, holders: Mapping[torch.Tensor, _replicas.Holder]
) -> torch.Tensor:
    """Return what has taken a tensor's place, if it was on the meta device."""
    if tensor not in holders:
        return tensor
    module, name = holders[tensor]
    moved: torch.Tensor = getattr(module, name)
    return moved


def _refuse_unshardable(
    model: nn.Module, units: dict[str, nn.Module], dtype: object, ignored: Collection[nn.Parameter]
) -> None:
    """Raise by name, before anything is done, where torch raises later, in mid-work or training."""
    if isinstance(model, nn.ModuleList | nn.ModuleDict):
        raise WrapError(
            f"{_FSDP2}: a {type(model).__name__} has no forward; expected the model that calls its "
            "members"
        )
    trained: dict[str, tuple[str, torch.dtype]] = {}
    for name, parameter in model.named_parameters():
        if parameter in ignored:
            continue
        about = f"{_FSDP2}: parameter {name}"
        _refuse_layout(about, parameter)
        if not parameter.requires_grad:
            continue
        if not parameter.numel():
            raise WrapError(
                f"{about} of shape {list(parameter.shape)} has nothing to train; expected an "
                "element at least; leave it out, or freeze it: requires_grad_(False)"
            )
        if dtype is not None and parameter.is_complex():
            raise WrapError(
                f"{about} is {parameter.dtype}, and dtype={dtype!r}; expected real parameters with "
                "a dtype to compute in; leave dtype out"
            )
        unit = find_enclosing_unit(name, units)
        first, first_dtype = trained.setdefault(unit, (name, parameter.dtype))
        if first_dtype != parameter.dtype:
            raise WrapError(
                f"{about} is {parameter.dtype} and {first} {first_dtype}, in one unit "
                f"({unit or 'the root'}); expected one type of all that it trains; cast the model "
                "to one, and give dtype= to compute in another"
            )


def _refuse_layout(about: str, parameter: nn.Parameter) -> None:
    if parameter.dim() == 0:
        raise WrapError(
            f"{about} has no dim to shard along; expected one at least; make it a tensor of "
            "shape [1]"
        )
    if not parameter.is_contiguous():
        raise WrapError(
            f"{about} has the strides {list(parameter.stride())} for the shape "
            f"{list(parameter.shape)}; expected row after row; make it so before: "
            "parameter.data = parameter.data.contiguous()"
        )


def _check_sizes(reshard: object, shard_size: object, replicas: Members) -> None:
    size = replicas.size
    if shard_size is not None and not (_is_count(shard_size) and size % shard_size == 0):
        raise WrapError(
            f"{_FSDP2}: shard_size={shard_size!r} of {size} data-parallel ranks; expected a "
            "divisor of their number above 1; for a whole copy on every rank use wrap_model_for_ddp"
        )
    if isinstance(reshard, bool):
        return
    shards = size if shard_size is None else int(shard_size)
    if not (_is_count(reshard) and shards % reshard == 0):
        raise WrapError(
            f"{_FSDP2}: reshard_after_forward={reshard!r}; expected True, False or a divisor of "
            f"{shards}, the ranks that share a copy, above 1"
        )
    if reshard < shards and size < replicas.world.info.world_size:
        # Each unit's groups are made by ranks that do not know of each other: they would hang.
        raise WrapError(
            f"{_FSDP2}: reshard_after_forward={reshard} with ezpz_tp's groups ({size} of "
            f"{replicas.world.info.world_size} ranks are data-parallel here), for which torch "
            "cannot make the groups; expected True or False"
        )


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 1


# All of them by one call.

_CALL = "wrap_model()"


def wrap_model(
    model: nn.Module,
    use_fsdp: bool = False,
    dtype: str | torch.dtype | None = None,
    *,
    initialize: Initialize | None = None,
    compile: bool | Mapping[str, Any] = False,
) -> nn.Module:
    """Make a model train on all ranks: unchanged on one rank, else by DDP or FSDP2.

    The model is moved to this rank's device. `wrap_model_for_ddp` and `wrap_model_for_fsdp2`
    have more options, and wrap on one rank too. Collective: every rank calls this.

    Args:
        model: The model, with the same parameters in the same order on every rank. All
            ranks start from rank 0's values and buffers (with ezpz_tp's groups, from those of
            the first data-parallel rank). It may be on the meta device.
        use_fsdp: Shard parameters, gradients and optimizer state over the ranks (FSDP2)
            instead of keeping a copy on each (DDP).
        dtype: With FSDP, the type to compute in (``"bf16"``); gradients are reduced in
            fp32. With None nothing is cast, nor on one rank, which is logged.
        initialize: For a model on the meta device, as of `wrap_model_for_fsdp2`.
        compile: Compile each block (as of `wrap_model_for_fsdp2`) by itself, so that collectives
            stay outside of its graph, and equal blocks are compiled once; a model without blocks
            is compiled whole. Parameters keep their names. Or the options of ``torch.compile``.

    Returns:
        The model itself on one rank, with FSDP2, and where it has nothing to train; the
        DDP wrapper otherwise.

    Raises:
        MismatchError, TypeError: As of `wrap_model_for_ddp`.
        NotSetUpError: There are several ranks and `setup_torch` was not called.
        WrapError: The model is wrapped already, or ``dtype`` is given with DDP; or the ranks
            differ in what they wrap.
        ValueError: ``dtype`` is not known, or no floating-point type.
    """
    world = current_world(_CALL)
    if world is None:
        device = torch.device(get_torch_device())
        replicas = None
    else:
        device = world.device
        replicas = _replicas.find_replicas(_CALL)
    if replicas is None or replicas.size == 1:
        _check_arguments(model, use_fsdp, dtype, initialize)
        if dtype is not None:
            logger.warning("wrap_model(dtype=%s) on one rank casts nothing", dtype)
        replicas = None
    else:
        arguments = {"use_fsdp": use_fsdp, "dtype": dtype, "initialize": initialize}
        with _replicas.require_agreement(_CALL, model, arguments, replicas):
            _check_arguments(model, use_fsdp, dtype, initialize)
            _replicas.refuse_mps(_CALL, replicas)
        if use_fsdp and next(model.parameters(), None) is not None:
            return wrap_model_for_fsdp2(model, dtype=dtype, initialize=initialize, compile=compile)
        if _is_trained(model):
            return wrap_model_for_ddp(model, initialize=initialize, compile=compile)
    materialize(model, device, initialize)
    model.to(device)
    if replicas is not None:
        _replicas.broadcast_start_values([*model.parameters(), *model.buffers()], replicas)
    _compile_blocks(model, compile)
    return model


def _compile_blocks(model: nn.Module, options: bool | Mapping[str, Any]) -> None:
    """Have torch compile what runs in each block: hooks, and so collectives, stay outside."""
    if options is False:
        return
    if options is True:
        options = {}
    blocks = list(filter(_has_children, find_units(model).values()))
    for module in blocks or [model]:
        module.forward = torch.compile(module.forward, **options)


def _check_arguments(
    model: nn.Module, use_fsdp: bool, dtype: str | torch.dtype | None, initialize: Initialize | None
) -> None:
    _replicas.refuse_wrapped(model)
    if dtype is not None:
        if not use_fsdp:
            raise WrapError(
                f"dtype={dtype!r} without use_fsdp; expected it with FSDP only; with DDP wrap the "
                "forward pass in torch.autocast"
            )
        _replicas.as_floating(dtype)
    refuse_unfillable(model, initialize)
