"""One call that makes a model train on all ranks: DDP, ZeRO-1 or FSDP2."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ezpz_device import get_torch_device

from . import _replicas
from ._errors import WrapError
from ._fsdp2 import wrap_model_for_fsdp2
from ._materialize import Initialize, materialize, refuse_unfillable
from ._watch import waiting
from ._world import current_world

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer


# A copy of the model on every rank: DistributedDataParallel.

_DDP = "wrap_model_for_ddp()"


def wrap_model_for_ddp(
    model: nn.Module, *, initialize: Initialize | None = None, **options: Any
) -> DistributedDataParallel:
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
    with _replicas.agreed(_DDP, model, {"initialize": initialize, **options}, replicas):
        _replicas.check_model(_DDP, model, replicas, options, _replicas.RESERVED)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise WrapError(
                f"{_DDP}: {type(model).__name__} has no parameter that requires a gradient; "
                "expected one at least; without it there is nothing to average: use wrap_model"
            )
        refuse_unfillable(model, initialize)
    materialize(model, device, initialize, replicas=replicas)
    model = model.to(device)
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
        MismatchError: The ranks called something else, or with other options.
        NotSetUpError: `setup_torch` was not called.
        WrapError: The parameters are FSDP's, which shards the optimizer's state as well; or they
            differ between ranks; or ``process_group`` is given.
    """
    replicas = _replicas.find_replicas(_ZERO1)
    groups: list[Any] = list(params)
    every: list[torch.Tensor] = []
    tensors: dict[str, torch.Tensor] = {}
    given = {"optimizer_class": getattr(optimizer_class, "__name__", None), **options}
    with _replicas.agreed(_ZERO1, tensors, given, replicas):
        for group in groups:
            one = group["params"] if isinstance(group, dict) else group
            every += [one] if isinstance(one, torch.Tensor) else one
        tensors |= {f"parameter {number}": one for number, one in enumerate(every)}
        _replicas.check_options(_ZERO1, options, _replicas.RESERVED)
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


logger = logging.getLogger(__name__)

_CALL = "wrap_model()"


def wrap_model(
    model: nn.Module,
    use_fsdp: bool = False,
    dtype: str | torch.dtype | None = None,
    *,
    initialize: Initialize | None = None,
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

    Returns:
        The model itself on one rank, with FSDP2, and where it has nothing to train; the
        DDP wrapper otherwise.

    Raises:
        MismatchError: The ranks called something else, or with other options.
        NotSetUpError: There are several ranks and `setup_torch` was not called.
        TypeError: ``model`` is no module.
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
        return model.to(device)
    given = {"use_fsdp": use_fsdp, "dtype": dtype, "initialize": initialize}
    with _replicas.agreed(_CALL, model, given, replicas):
        _check(model, use_fsdp, dtype, initialize)
        _replicas.refuse_mps(_CALL, replicas)
    parameters = list(model.parameters())
    if use_fsdp and parameters:
        return wrap_model_for_fsdp2(model, dtype=dtype, initialize=initialize)
    if any(parameter.requires_grad for parameter in parameters):
        return wrap_model_for_ddp(model, initialize=initialize)
    materialize(model, device, initialize)
    model = model.to(device)
    _replicas.start_alike([*model.parameters(), *model.buffers()], replicas)
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
