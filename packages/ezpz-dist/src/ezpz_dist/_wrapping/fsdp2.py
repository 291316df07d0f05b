"""Parameters, gradients and optimizer state shared out over the ranks: FSDP2."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeGuard

import torch
from torch import nn

from ezpz_dist._errors import WrapError
from ezpz_dist._hangs.waiting import waiting

from .agreement import agreed, as_floating, refuse_experts, refuse_options, refuse_unmovable
from .materialize import Initialize, first_ranks_draws, has_meta, materialize, refuse_unfillable
from .mesh import data_parallel_mesh
from .replicas import Replicas, attributes_kept, find_replicas, start_alike
from .units import find_units, home_of
from .wrapper import refuse_wrapped

_CALL = "wrap_model_for_fsdp2()"

_WITHOUT_AVERAGE = ("ccl", "xccl")
"""Backends on which an average is a sum, divided.

oneCCL has none, or (2021.15 and later) not on every path: "average operation is not supported
for the scheduler path", https://github.com/intel/torch-xpu-ops/issues/2361; and until 2022.1 it
divides small messages twice, https://github.com/intel/torch-xpu-ops/issues/3020.
"""

_RESERVED = {
    "mesh": "give shard_size, or ezpz_tp's groups",
    "mp_policy": "give dtype, reduce_dtype",
}


def wrap_model_for_fsdp2(
    model: nn.Module,
    *,
    dtype: str | torch.dtype | None = None,
    reduce_dtype: str | torch.dtype = torch.float32,
    reshard_after_forward: bool | int = True,
    shard_size: int | None = None,
    units: Collection[type[nn.Module]] | None = None,
    initialize: Initialize | None = None,
    **options: Any,
) -> nn.Module:
    """Share a model's parameters, gradients and optimizer state out over the ranks (FSDP2).

    Each transformer block is a unit: gathered when it runs, freed after. Blocks are the members
    of lists (ModuleList, ModuleDict, Sequential, one in another); embeddings and linear layers
    outside of them are units too, unless their weights are tied. The rest is the root's.
    Make the optimizer afterwards: it has to see the shards. Buffers stay whole, in their own
    type, and each rank's own: a batch norm's running statistics are of that rank's samples.

    A model built under ``torch.device("meta")`` gets its values after it is sharded, so no rank
    ever holds all of it: each module's ``reset_parameters()`` fills that module's whole tensors,
    of which a rank keeps its part, with the first rank's random numbers on every rank. The
    result is that of one process that builds the model on this device with the first rank's
    seed, if its constructors draw in the order in which they register. Draws from `random`
    or numpy are not shared.

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
        initialize: For a model on the meta device: called with each module after its
            ``reset_parameters()``, to fill what the module itself holds, as the function
            given to ``model.apply`` does (``model._init_weights`` of many).
        options: Any other of ``fully_shard``'s, such as ``offload_policy``.

    Returns:
        The model itself, whose class now also is torch's FSDPModule.

    Raises:
        MismatchError: The ranks called something else, or with other options.
        NotSetUpError: `setup_torch` was not called.
        TypeError: ``model`` is no module.
        WrapError: The model is wrapped already, differs between ranks (names rank and
            parameter), or cannot be sharded or filled as asked.
        ValueError: A type is not known, or no floating-point type.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy  # noqa: PLC0415 - 0.6 s

    replicas = find_replicas(_CALL)
    asked = {
        "dtype": dtype,
        "reduce_dtype": reduce_dtype,
        "reshard_after_forward": reshard_after_forward,
        "shard_size": shard_size,
        "initialize": initialize,
        **options,
    }
    policy = MixedPrecisionPolicy()
    with agreed(_CALL, model, asked, replicas) as lines:
        refuse_wrapped(model)
        refuse_unmovable(_CALL, replicas)
        refuse_experts(_CALL, model)
        refuse_options(_CALL, options, _RESERVED)
        if dtype is not None:
            policy = MixedPrecisionPolicy(
                param_dtype=as_floating(dtype),
                reduce_dtype=as_floating(reduce_dtype, "reduce_dtype"),
            )
        _refuse_backend(replicas.world.backend)
        _check_sizes(reshard_after_forward, shard_size, replicas)
        refuse_unfillable(model, initialize)
        found = find_units(model, units)
        _refuse_unshardable(model, found, dtype, options.get("ignored_params", ()))
        lines |= {f"unit {name}": type(module).__name__ for name, module in found.items()}
    settings = {
        "mesh": data_parallel_mesh(replicas, shard_size),
        "mp_policy": policy,
        "reshard_after_forward": reshard_after_forward,
        **options,
    }
    with attributes_kept(model):
        _shard(model, found, replicas, settings)
        if has_meta(model):
            device = replicas.world.device
            offloads = hasattr(options.get("offload_policy"), "pin_memory")
            with first_ranks_draws(device, replicas):
                keep_on = torch.device("cpu") if offloads else None
                materialize(model, device, initialize, keep_on=keep_on)
    return model


def _shard(
    model: nn.Module,
    found: dict[str, nn.Module],
    replicas: Replicas,
    settings: dict[str, Any],
) -> None:
    """Move, equal and shard one unit after another: only one at a time is whole on the device."""
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - 0.6 s

    done: set[torch.Tensor] = set()
    for module in (*found.values(), model):
        held = [*module.parameters(), *module.buffers()]
        start_alike([one for one in held if one not in done and not _is_shard(one)], replicas)
        done.update(held)
        if module is model and settings["reshard_after_forward"] is not False:
            # torch then keeps the root after forward: backward begins with it.
            del settings["reshard_after_forward"]
        with waiting("fully_shard", replicas.world, replicas.ranks):
            sharded: Any = fully_shard(module, **settings)
        if replicas.world.backend in _WITHOUT_AVERAGE:
            sharded.set_force_sum_reduction_for_comms(True)


def _is_shard(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "device_mesh")


def _refuse_backend(backend: str) -> None:
    from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415 - 0.6 s

    # Offered by torch 2.8 and later.
    can_sum = hasattr(FSDPModule, "set_force_sum_reduction_for_comms")
    if backend in _WITHOUT_AVERAGE and not can_sum:
        raise WrapError(
            f"{_CALL}: {backend} cannot average, and torch {torch.__version__} asks it to; "
            "expected torch 2.8 or later; or use wrap_model_for_ddp"
        )


def _refuse_unshardable(
    model: nn.Module,
    found: dict[str, nn.Module],
    dtype: object,
    ignored: Collection[nn.Parameter],
) -> None:
    """Raise before anything is done, and by name, where torch raises in mid-work or in backward."""
    if isinstance(model, (nn.ModuleList, nn.ModuleDict)):
        raise WrapError(
            f"{_CALL}: a {type(model).__name__} has no forward; expected the model that calls its "
            "members"
        )
    trained: dict[str, tuple[str, torch.dtype]] = {}
    for name, parameter in model.named_parameters():
        if parameter in ignored:
            continue
        about = f"{_CALL}: parameter {name}"
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
        home = home_of(name, found)
        other, kind = trained.setdefault(home, (name, parameter.dtype))
        if kind != parameter.dtype:
            raise WrapError(
                f"{about} is {parameter.dtype} and {other} {kind}, in one unit "
                f"({home or 'the root'}); expected one type of all that it trains; cast the model "
                "to one, and give dtype= to compute in another"
            )


def _check_sizes(kept: object, shard_size: object, replicas: Replicas) -> None:
    size = replicas.size
    if shard_size is not None and not (_is_count(shard_size) and size % shard_size == 0):
        raise WrapError(
            f"{_CALL}: shard_size={shard_size!r} of {size} data-parallel ranks; expected a divisor "
            "of their number above 1; for a whole copy on every rank use wrap_model_for_ddp"
        )
    if isinstance(kept, bool):
        return
    among = size if shard_size is None else int(shard_size)
    if not _is_count(kept) or among % kept:
        raise WrapError(
            f"{_CALL}: reshard_after_forward={kept!r}; expected True, False or a divisor of "
            f"{among}, the ranks that share a copy, above 1"
        )
    if kept < among and size < replicas.world.info.world_size:
        # Each unit's groups are made by ranks that do not know of each other: they would hang.
        raise WrapError(
            f"{_CALL}: reshard_after_forward={kept} with ezpz_tp's groups ({size} of "
            f"{replicas.world.info.world_size} ranks are data-parallel here), for which torch "
            "cannot make the groups; expected True or False"
        )


def _is_count(value: object) -> TypeGuard[int]:
    """Return whether it is a number of ranks that share something."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 1
