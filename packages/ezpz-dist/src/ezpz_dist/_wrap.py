"""One call that makes a model train on all ranks: DDP, ZeRO-1, Horovod, FSDP."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ezpz_device import get_torch_device

from ._errors import WrapError
from ._frameworks import check_framework, prepare_framework
from ._fsdp2 import wrap_model_for_fsdp2
from ._materialize import Initialize, first_ranks_draws, has_meta, materialize, refuse_unfillable
from ._replicas import (
    agreed,
    as_floating,
    find_replicas,
    parallel_state,
    refuse_experts,
    refuse_options,
    refuse_unmovable,
    refuse_wrapped,
    remember_inside,
    start_alike,
)
from ._watch import waiting
from ._world import World, current_world

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer


# A copy of the model on every rank: DistributedDataParallel.

_DDP = "wrap_model_for_ddp()"

_RESERVED = dict.fromkeys(
    ("device_ids", "output_device", "process_group", "device_mesh"),
    "it is chosen by the set-up: leave it out",
)


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
    replicas = find_replicas(_DDP)
    device = replicas.world.device
    with agreed(_DDP, model, {"initialize": initialize, **options}, replicas):
        refuse_wrapped(model)
        refuse_unmovable(_DDP, replicas)
        refuse_experts(_DDP, model)
        refuse_options(_DDP, options, _RESERVED)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise WrapError(
                f"{_DDP}: {type(model).__name__} has no parameter that requires a gradient; "
                "expected one at least; without it there is nothing to average: use wrap_model"
            )
        refuse_unfillable(model, initialize)
    if has_meta(model):
        with first_ranks_draws(device, replicas):
            materialize(model, device, initialize)
    model = model.to(device)
    # For one accelerator a process; on the CPU torch refuses it.
    device_ids = [device.index] if device.type in ("cuda", "xpu") else None
    with waiting("DDP's start values", replicas.world, replicas.ranks):
        wrapped = DistributedDataParallel(
            model, device_ids=device_ids, process_group=replicas.group, **options
        )
    remember_inside(model, "DDP", wrapped)
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

    For a check-point every rank calls ``optimizer.consolidate_state_dict(to=0)``, after which
    ``optimizer.state_dict()`` of rank 0 (of the data-parallel group) is that of a plain
    optimizer; ``load_state_dict`` takes it on every rank, whatever their number.

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
    replicas = find_replicas(_ZERO1)
    given: list[Any] = list(params)
    tensors: dict[str, torch.Tensor] = {}
    asked = {"optimizer_class": getattr(optimizer_class, "__name__", None), **options}
    with agreed(_ZERO1, tensors, asked, replicas):
        every = [one for entry in given for one in _tensors(entry)]
        tensors |= {f"parameter {number}": one for number, one in enumerate(every)}
        refuse_options(
            _ZERO1, options, {"process_group": "it is chosen by the set-up: leave it out"}
        )
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
            given, optimizer_class=optimizer_class, process_group=replicas.group, **options
        )


def _tensors(entry: Any) -> list[torch.Tensor]:
    """Return the parameters of an entry of an optimizer's argument: one, or a group of them."""
    if isinstance(entry, torch.Tensor):
        return [entry]
    params = entry["params"]
    return [params] if isinstance(params, torch.Tensor) else list(params)


# Horovod's optimizer around torch's, where Horovod can be imported.

_HOROVOD = "wrap_model_for_horovod()"


def wrap_model_for_horovod(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    gradient_accumulation_steps: int = 1,
    compress: bool = False,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make a model train by Horovod; return it, and the optimizer that averages its gradients.

    The model is moved to this rank's device. All ranks start from rank 0's parameters,
    buffers and optimizer state. Collective: every rank calls this.

    Args:
        model: The bare model, the same on every rank.
        optimizer: One over the model's parameters.
        gradient_accumulation_steps: Backward passes for one step.
        compress: Send gradients as 16-bit floats.

    Raises:
        NotSetUpError: `setup_torch` was not called.
        SetupError: Horovod cannot be imported (it does not build against torch 2.1 or later),
            or sees another world.
        WrapError: The model or the optimizer is wrapped already, or ezpz_tp splits the model.
    """
    replicas = find_replicas(_HOROVOD)
    world = replicas.world
    options = {"gradient_accumulation_steps": gradient_accumulation_steps, "compress": compress}
    with agreed(_HOROVOD, model, {**options, "optimizer": optimizer}, replicas):
        check_framework("horovod", world.device)
        refuse_wrapped(model)
        if type(optimizer).__module__.split(".")[0] == "horovod":
            raise WrapError(
                f"{type(optimizer).__name__} is Horovod's already; expected torch's own; wrap "
                "it once"
            )
        if parallel_state() is not None and replicas.size < world.info.world_size:
            raise WrapError(
                f"{_HOROVOD} with ezpz_tp's groups: Horovod averages over all "
                f"{world.info.world_size} "
                f"ranks, and {replicas.size} hold the same parameters; use wrap_model_for_ddp"
            )
    prepare_framework("horovod", world.info, world.device, world.backend)
    horovod = importlib.import_module("horovod.torch")
    model.to(world.device)
    with waiting(f"Horovod's broadcasts for {_HOROVOD}", world):
        horovod.broadcast_parameters(model.state_dict(), root_rank=0)
        horovod.broadcast_optimizer_state(optimizer, root_rank=0)
    wrapped: torch.optim.Optimizer = horovod.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=horovod.Compression.fp16 if compress else horovod.Compression.none,
        backward_passes_per_step=gradient_accumulation_steps,
    )
    return model, wrapped


# One call that makes a model train on all ranks.

logger = logging.getLogger(__name__)

_CALL = "wrap_model()"


def wrap_model(
    model: nn.Module,
    use_fsdp: bool = False,
    dtype: str | torch.dtype | None = None,
    *,
    initialize: Initialize | None = None,
) -> nn.Module:
    """Make a model train on all ranks: as it is on one rank, else by DDP or FSDP2.

    The model is moved to this rank's device. For more say in it there are `wrap_model_for_ddp`
    and `wrap_model_for_fsdp2`, which wrap on one rank too. Collective: every rank calls this.

    Args:
        model: The model, with the same parameters in the same order on every rank; all
            ranks start from rank 0's values (with ezpz_tp's groups, from those of the first
            data-parallel rank), buffers too. It may be on the meta device.
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
    replicas = None if world is None else find_replicas(_CALL)
    if replicas is None or replicas.size == 1:
        _check(model, use_fsdp, dtype, initialize)
        if dtype is not None:
            logger.warning("wrap_model(dtype=%s) on one rank casts nothing", dtype)
        return _alone(model, world, initialize)
    asked = {"use_fsdp": use_fsdp, "dtype": dtype, "initialize": initialize}
    with agreed(_CALL, model, asked, replicas):
        _check(model, use_fsdp, dtype, initialize)
        refuse_unmovable(_CALL, replicas)
    parameters = list(model.parameters())
    if use_fsdp and parameters:
        return wrap_model_for_fsdp2(model, dtype=dtype, initialize=initialize)
    if any(parameter.requires_grad for parameter in parameters):
        return wrap_model_for_ddp(model, initialize=initialize)
    model = _alone(model, world, initialize)
    start_alike([*model.parameters(), *model.buffers()], replicas)
    return model


def _check(
    model: nn.Module,
    use_fsdp: bool,
    dtype: str | torch.dtype | None,
    initialize: Initialize | None,
) -> None:
    refuse_wrapped(model)
    if dtype is not None:
        if not use_fsdp:
            raise WrapError(
                f"dtype={dtype!r} without use_fsdp; expected it with FSDP only; with DDP wrap the "
                "forward pass in torch.autocast"
            )
        as_floating(dtype)
    refuse_unfillable(model, initialize)


def _alone(model: nn.Module, world: World | None, initialize: Initialize | None) -> nn.Module:
    device = torch.device(get_torch_device()) if world is None else world.device
    if has_meta(model):
        materialize(model, device, initialize)
    return model.to(device)
