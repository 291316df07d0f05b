"""A copy of the model on every rank: DistributedDataParallel."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ezpz_dist._errors import WrapError
from ezpz_dist._hangs.waiting import waiting

from .agreement import agreed, refuse_experts, refuse_options, refuse_unmovable
from .materialize import (
    Initialize,
    first_ranks_draws,
    has_meta,
    materialize,
    refuse_unfillable,
)
from .replicas import find_replicas
from .wrapper import refuse_wrapped, remember_inside

_CALL = "wrap_model_for_ddp()"

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
    replicas = find_replicas(_CALL)
    device = replicas.world.device
    with agreed(_CALL, model, {"initialize": initialize, **options}, replicas):
        refuse_wrapped(model)
        refuse_unmovable(_CALL, replicas)
        refuse_experts(_CALL, model)
        refuse_options(_CALL, options, _RESERVED)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise WrapError(
                f"{_CALL}: {type(model).__name__} has no parameter that requires a gradient; "
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
