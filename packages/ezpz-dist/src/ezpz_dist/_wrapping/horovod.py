"""Horovod's optimizer around torch's, where Horovod can be imported."""

from __future__ import annotations

import importlib

import torch
from torch import nn

from ezpz_dist._errors import WrapError
from ezpz_dist._hangs.waiting import waiting
from ezpz_dist._meeting.frameworks import check_framework, prepare_framework

from .agreement import agreed
from .replicas import find_replicas, parallel_state
from .wrapper import refuse_wrapped

_CALL = "wrap_model_for_horovod()"


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
    replicas = find_replicas(_CALL)
    world = replicas.world
    options = {"gradient_accumulation_steps": gradient_accumulation_steps, "compress": compress}
    with agreed(_CALL, model, {**options, "optimizer": optimizer}, replicas):
        check_framework("horovod", world.device)
        refuse_wrapped(model)
        if type(optimizer).__module__.split(".")[0] == "horovod":
            raise WrapError(
                f"{type(optimizer).__name__} is Horovod's already; expected torch's own; wrap "
                "it once"
            )
        if parallel_state() is not None and replicas.size < world.info.world_size:
            raise WrapError(
                f"{_CALL} with ezpz_tp's groups: Horovod averages over all {world.info.world_size} "
                f"ranks, and {replicas.size} hold the same parameters; use wrap_model_for_ddp"
            )
    prepare_framework("horovod", world.info, world.device, world.backend)
    horovod = importlib.import_module("horovod.torch")
    model.to(world.device)
    with waiting(f"Horovod's broadcasts for {_CALL}", world):
        horovod.broadcast_parameters(model.state_dict(), root_rank=0)
        horovod.broadcast_optimizer_state(optimizer, root_rank=0)
    wrapped: torch.optim.Optimizer = horovod.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=horovod.Compression.fp16 if compress else horovod.Compression.none,
        backward_passes_per_step=gradient_accumulation_steps,
    )
    return model, wrapped
