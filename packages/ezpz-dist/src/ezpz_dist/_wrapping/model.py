"""One call that makes a model train on all ranks."""

from __future__ import annotations

import torch
from torch import nn

from ezpz_device import get_torch_device
from ezpz_dist._errors import WrapError
from ezpz_dist._world import World, current_world

from .agreement import agreed, as_floating, refuse_unmovable, refuse_wrapped
from .ddp import wrap_model_for_ddp
from .fsdp2 import wrap_model_for_fsdp2
from .materialize import Initialize, has_meta, materialize, refuse_unfillable
from .replicas import find_replicas, start_alike

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
            fp32. On one rank, and with None, nothing is cast.
        initialize: For a model on the meta device, as of `wrap_model_for_fsdp2`.

    Returns:
        The model itself on one rank, with FSDP2, and where it has nothing to train; the
        DDP wrapper otherwise.

    Raises:
        NotSetUpError: There are several ranks and `setup_torch` was not called.
        WrapError: The model is wrapped already, or ``dtype`` is given with DDP; or the ranks
            differ in what they wrap.
        ValueError: ``dtype`` is not known, or no floating-point type.
    """
    if dtype is not None:
        if not use_fsdp:
            raise WrapError(
                f"dtype={dtype!r} without use_fsdp; expected it with FSDP only; with DDP wrap the "
                "forward pass in torch.autocast"
            )
        as_floating(dtype)
    world = current_world(_CALL)
    if world is None or find_replicas(_CALL).size == 1:
        return _alone(model, world, initialize)
    parameters = list(model.parameters())
    if use_fsdp and parameters:
        return wrap_model_for_fsdp2(model, dtype=dtype, initialize=initialize)
    if any(parameter.requires_grad for parameter in parameters):
        return wrap_model_for_ddp(model, initialize=initialize)
    replicas = find_replicas(_CALL)
    with agreed(_CALL, model, {}, replicas):
        refuse_unmovable(_CALL, replicas)
        refuse_wrapped(model)
    model = _alone(model, world, initialize)
    start_alike([*model.parameters(), *model.buffers()], replicas)
    return model


def _alone(model: nn.Module, world: World | None, initialize: Initialize | None) -> nn.Module:
    refuse_wrapped(model)
    device = torch.device(get_torch_device()) if world is None else world.device
    if has_meta(model):
        refuse_unfillable(model, initialize)
        materialize(model, device, initialize)
    return model.to(device)
