"""One call that makes a model train on all ranks: DDP, ZeRO-1, FSDP2 or FSDP1."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext
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
    given = {"initialize": initialize, "compile": compile or None, **options}
    with _replicas.agreed(_DDP, model, given, replicas):
        _replicas.check_model(_DDP, model, replicas, options, _replicas.RESERVED)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise WrapError(
                f"{_DDP}: {type(model).__name__} has no parameter that requires a gradient; "
                "expected one at least; without it there is nothing to average: use wrap_model"
            )
        refuse_unfillable(model, initialize)
    materialize(model, device, initialize)
    model = _compiled(model.to(device), compile)
    _replicas.unexpand_buffers(model)
    # For one accelerator a process; on the CPU torch refuses it.
    device_ids = [device.index] if device.type in ("cuda", "xpu") else None
    with waiting("DDP's start values", replicas.world, replicas.ranks):
        wrapped = DistributedDataParallel(
            model, device_ids=device_ids, process_group=replicas.group, **options
        )
    _replicas.remember_inside(model, "DDP", wrapped)
    return wrapped


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
    groups: list[Any] = list(params)
    every: list[torch.Tensor] = []
    tensors: dict[str, torch.Tensor] = {}
    given = {"optimizer_class": getattr(optimizer_class, "__name__", None), **options}
    with _replicas.agreed(_ZERO1, tensors, given, replicas):
        for number, group in enumerate(groups):
            one = group["params"] if isinstance(group, dict) else group
            listed = [one] if isinstance(one, torch.Tensor) else list(one)
            if isinstance(group, dict):  # torch reads it again, which a generator allows once
                groups[number] = {**group, "params": listed}
            every += listed
        tensors |= {f"parameter {number}": one for number, one in enumerate(every)}
        _replicas.check_options(_ZERO1, options, _replicas.RESERVED)
        for name, tensor in tensors.items():
            _replicas.refuse_expanded(_ZERO1, name, tensor)
        for sharded, by in (("device_mesh", "FSDP2"), ("_fsdp_flattened", "FSDP1")):
            if any(hasattr(one, sharded) for one in every):
                raise WrapError(
                    f"{_ZERO1}: the parameters are {by}'s shards; expected those of a DDP model; "
                    f"use {optimizer_class.__name__} itself: its state is sharded as they are"
                )
    with warnings.catch_warnings(), waiting("ZeRO-1's start", replicas.world, replicas.ranks):
        # Importing it warns of TorchScript, which is not used here.
        warnings.simplefilter("ignore")
        from torch.distributed import optim  # noqa: PLC0415

        return optim.ZeroRedundancyOptimizer(
            groups, optimizer_class=optimizer_class, process_group=replicas.group, **options
        )


# torch's mesh over the data-parallel ranks: a line, or copies x shards.


def data_parallel_mesh(replicas: Members, shard_size: int | None = None) -> DeviceMesh:
    device_type = replicas.world.device.type
    if shard_size in (None, replicas.size):
        assert replicas.group is not None
        return DeviceMesh.from_group(replicas.group, device_type, mesh_dim_names=("shard",))
    lines = [tuple(replicas.ranks)]
    if replicas.size < replicas.world.info.world_size:
        lines = list(dict.fromkeys(all_gather_object(lines[0])))
    import ezpz_tp  # noqa: PLC0415 - only where its groups are used

    ranks = torch.tensor(lines).view(len(lines), -1, shard_size)
    with waiting("the groups of hybrid sharding", replicas.world):
        return ezpz_tp.make_mesh(device_type, ranks, ("replicate", "shard"))


# Which modules of a model are sharded by themselves: gathered when they run, freed after.

_Named = Iterator[tuple[str, nn.Module]]


def find_units(
    model: nn.Module, kinds: Collection[type[nn.Module]] | None = None
) -> dict[str, nn.Module]:
    """Return the modules to shard by themselves, by name, each before those that contain it."""
    if kinds is None:
        found = dict(_of_list(model, "") if _is_list(model) else _outside(model, ""))
    else:
        wanted, every = tuple(kinds), model.named_modules()
        found = {name: module for name, module in every if name and isinstance(module, wanted)}
    homes: dict[nn.Parameter, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        homes.setdefault(parameter, set()).add(_replicas.home_of(name, found))
    used = {home for used_in in homes.values() for home in used_in}
    shared = {home for used_in in homes.values() if len(used_in) > 1 for home in used_in}
    return {name: found[name] for name in reversed(found) if name in used - shared}


def _outside(module: nn.Module, prefix: str) -> _Named:
    """Look for units in what is no list: it reads its children's weights as it likes."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if _is_list(child):
            yield from _of_list(child, f"{path}.")
        elif _is_matrix(child):
            yield path, child
        elif not isinstance(child, nn.MultiheadAttention):  # reads the weights of its child
            yield from _outside(child, f"{path}.")


def _of_list(container: nn.Module, prefix: str) -> _Named:
    for name, block in container.named_children():
        path = f"{prefix}{name}"
        if isinstance(block, (nn.ModuleList, nn.ModuleDict)) or (
            isinstance(block, nn.Sequential) and all(_is_composed(one) for one in block)
        ):
            yield from _of_list(block, f"{path}.")
        elif any(parameter.dim() > 1 for parameter in block.parameters()):
            # A norm by itself would cost a collective for a few numbers.
            yield path, block


def _is_list(module: nn.Module) -> bool:
    """Return whether the members of a module are blocks. A Sequential may also be a block."""
    if isinstance(module, nn.Sequential):
        return any(_is_composed(member) for member in module)
    return isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _is_composed(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _is_matrix(module: nn.Module) -> bool:
    """Return whether a module is used by its forward alone. Subclasses may be read by others."""
    kinds: tuple[type[nn.Module], ...] = (nn.Linear, nn.Embedding)
    if tp := sys.modules.get("ezpz_tp"):
        kinds += (tp.ColumnParallelLinear, tp.RowParallelLinear)
        kinds += (tp.ParallelEmbedding, tp.VocabParallelEmbedding)
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
    given = {"dtype": dtype, "compile": compile or None, **options}
    with _replicas.agreed(_FSDP1, model, given, replicas) as lines:
        _replicas.check_model(_FSDP1, model, replicas, options, _replicas.RESERVED)
        if "HYBRID" in str(options.get("sharding_strategy")):
            raise WrapError(
                f"{_FSDP1}: {options['sharding_strategy']}, which wants groups of its own; "
                "expected a strategy for one group; use wrap_model_for_fsdp2 with shard_size"
            )
        if dtype is not None:
            wanted = _replicas.as_floating(dtype)
            precision = MixedPrecision(wanted, torch.float32, wanted)  # of gradients, of buffers
        if has_meta(model):
            raise WrapError(
                f"{_FSDP1}: {type(model).__name__} is on the meta device; expected one with data: "
                "FSDP1 would fill the shards of all ranks with the same numbers; use "
                "wrap_model_for_fsdp2"
            )
        found = find_units(model, units)
        lines |= {f"unit {name}": type(module).__name__ for name, module in found.items()}
    _replicas.start_alike([*model.parameters(), *model.buffers()], replicas)
    _compiled(model, compile)
    chosen = set(found.values())
    policy = CustomPolicy(lambda module: module in chosen)
    settings: dict[str, Any] = {"auto_wrap_policy": policy, "mixed_precision": precision}
    settings |= {"use_orig_params": True, **options}
    with warnings.catch_warnings(), waiting("FSDP1's start", replicas.world, replicas.ranks):
        # Said above, to the reader; no news to who runs the script. Nor is that one rank has
        # nothing to share out.
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", "FSDP is switching to use `NO_SHARD`")
        wrapped = FullyShardedDataParallel(
            model, process_group=replicas.group, device_id=replicas.world.device, **settings
        )
    _replicas.remember_inside(model, "FSDP1", wrapped)
    return wrapped


# Parameters, gradients and optimizer state shared out over the ranks: FSDP2.

_FSDP2 = "wrap_model_for_fsdp2()"

# Backends on which an average is a sum, divided: oneCCL has none, or (2021.15 and later) not on
# every path (https://github.com/intel/torch-xpu-ops/issues/2361), and until 2022.1 it divides small
# messages twice (https://github.com/intel/torch-xpu-ops/issues/3020).
_WITHOUT_AVERAGE = ("ccl", "xccl")
_RESERVED = {
    "mesh": "give shard_size, or ezpz_tp's groups", "mp_policy": "give dtype, reduce_dtype",
}  # fmt: skip


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
    given = {
        "dtype": dtype, "reduce_dtype": reduce_dtype, "shard_size": shard_size,
        "reshard_after_forward": reshard_after_forward, "initialize": initialize,
        "compile": compile or None, **options,
    }  # fmt: skip
    policy = MixedPrecisionPolicy()
    with _replicas.agreed(_FSDP2, model, given, replicas) as lines:
        _replicas.check_model(_FSDP2, model, replicas, options, _RESERVED)
        if dtype is not None:
            policy = MixedPrecisionPolicy(
                param_dtype=_replicas.as_floating(dtype),
                reduce_dtype=_replicas.as_floating(reduce_dtype, "reduce_dtype"),
            )
        # Offered by torch 2.8 and later.
        can_sum = hasattr(FSDPModule, "set_force_sum_reduction_for_comms")
        if (backend := replicas.world.backend) in _WITHOUT_AVERAGE and not can_sum:
            raise WrapError(
                f"{_FSDP2}: {backend} cannot average, and torch {torch.__version__} asks it to; "
                "expected torch 2.8 or later; or use wrap_model_for_ddp"
            )
        _check_sizes(reshard_after_forward, shard_size, replicas)
        refuse_unfillable(model, initialize)
        found = find_units(model, units)
        _refuse_unshardable(model, found, dtype, options.get("ignored_params", ()))
        lines |= {f"unit {name}": type(module).__name__ for name, module in found.items()}
    _compiled(model, compile)
    settings = {"mesh": data_parallel_mesh(replicas, shard_size), "mp_policy": policy}
    settings |= {"reshard_after_forward": reshard_after_forward, **options}
    # What ezpz_tp says of parameters is kept while others take their place.
    tp = sys.modules.get("ezpz_tp")
    with nullcontext() if tp is None else tp.keep_attributes(model):
        _shard(model, set(found.values()), replicas, settings, initialize)
    return model


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

    def left(module: nn.Module) -> list[torch.Tensor]:
        held = (*module.parameters(), *module.buffers())
        return [one for one in held if one not in done and not hasattr(one, "device_mesh")]

    for module in _replicas.children_first(model):
        _replicas.materialize_own(module, replicas.world.device, initialize, holders)
        if module is not model and module not in units:
            continue
        _replicas.start_alike(left(module), replicas)
        if ignored:
            moved = [getattr(*holders[one]) if one in holders else one for one in ignored]
            settings["ignored_params"] = set(moved)
        if module is model and settings["reshard_after_forward"] is not False:
            # torch then keeps the root after forward: backward begins with it.
            del settings["reshard_after_forward"]
        with waiting("fully_shard", replicas.world, replicas.ranks):
            sharded: Any = fully_shard(module, **settings)
        # Buffers and ignored parameters. A reference to what was sharded would keep it whole.
        done.update(left(module))
        if replicas.world.backend in _WITHOUT_AVERAGE:
            sharded.set_force_sum_reduction_for_comms(True)


def _refuse_unshardable(
    model: nn.Module, found: dict[str, nn.Module], dtype: object, ignored: Collection[nn.Parameter]
) -> None:
    """Raise before anything is done, and by name, where torch raises in mid-work or in backward."""
    if isinstance(model, (nn.ModuleList, nn.ModuleDict)):
        raise WrapError(
            f"{_FSDP2}: a {type(model).__name__} has no forward; expected the model that calls its "
            "members"
        )
    trained: dict[str, tuple[str, torch.dtype]] = {}
    for name, parameter in model.named_parameters():
        if parameter in ignored:
            continue
        about = f"{_FSDP2}: parameter {name}"
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
        home = _replicas.home_of(name, found)
        other, kind = trained.setdefault(home, (name, parameter.dtype))
        if kind != parameter.dtype:
            raise WrapError(
                f"{about} is {parameter.dtype} and {other} {kind}, in one unit "
                f"({home or 'the root'}); expected one type of all that it trains; cast the model "
                "to one, and give dtype= to compute in another"
            )


def _check_sizes(kept: object, shard_size: object, replicas: Members) -> None:
    size = replicas.size
    if shard_size is not None and not (_is_count(shard_size) and size % shard_size == 0):
        raise WrapError(
            f"{_FSDP2}: shard_size={shard_size!r} of {size} data-parallel ranks; expected a "
            "divisor of their number above 1; for a whole copy on every rank use wrap_model_for_ddp"
        )
    if isinstance(kept, bool):
        return
    among = size if shard_size is None else int(shard_size)
    if not _is_count(kept) or among % kept:
        raise WrapError(
            f"{_FSDP2}: reshard_after_forward={kept!r}; expected True, False or a divisor of "
            f"{among}, the ranks that share a copy, above 1"
        )
    if kept < among and size < replicas.world.info.world_size:
        # Each unit's groups are made by ranks that do not know of each other: they would hang.
        raise WrapError(
            f"{_FSDP2}: reshard_after_forward={kept} with ezpz_tp's groups ({size} of "
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
    device = torch.device(get_torch_device()) if world is None else world.device
    replicas = None if world is None else _replicas.find_replicas(_CALL)
    if replicas is None or replicas.size == 1:
        _check(model, use_fsdp, dtype, initialize)
        if dtype is not None:
            logger.warning("wrap_model(dtype=%s) on one rank casts nothing", dtype)
        materialize(model, device, initialize)
        return _compiled(model.to(device), compile)
    given = {"use_fsdp": use_fsdp, "dtype": dtype, "initialize": initialize}
    with _replicas.agreed(_CALL, model, given, replicas):
        _check(model, use_fsdp, dtype, initialize)
        _replicas.refuse_mps(_CALL, replicas)
    if use_fsdp and next(model.parameters(), None) is not None:
        return wrap_model_for_fsdp2(model, dtype=dtype, initialize=initialize, compile=compile)
    if any(parameter.requires_grad for parameter in model.parameters()):
        return wrap_model_for_ddp(model, initialize=initialize, compile=compile)
    materialize(model, device, initialize)
    model = model.to(device)
    _replicas.start_alike([*model.parameters(), *model.buffers()], replicas)
    return _compiled(model, compile)


def _compiled(model: nn.Module, options: bool | Mapping[str, Any]) -> nn.Module:
    """Have torch compile what runs in each block: hooks, and so collectives, stay outside."""
    if options is not False:
        blocks = [one for one in find_units(model).values() if _is_composed(one)]
        for module in blocks or [model]:
            module.forward = torch.compile(module.forward, **({} if options is True else options))
    return model


def _check(
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
