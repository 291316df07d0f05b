"""One call that makes a model train on all ranks."""

from __future__ import annotations

import logging

import torch
from torch import nn

from ezpz_device import get_torch_device
from ezpz_dist._errors import WrapError
from ezpz_dist._world import World, current_world

from .agreement import agreed, as_floating, refuse_unmovable
from .ddp import wrap_model_for_ddp
from .fsdp2 import wrap_model_for_fsdp2
from .materialize import Initialize, has_meta, materialize, refuse_unfillable
from .replicas import find_replicas, start_alike
from .wrapper import refuse_wrapped

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
