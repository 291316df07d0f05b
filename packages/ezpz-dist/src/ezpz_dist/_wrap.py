"""One call that makes a model train on all ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ezpz_device import as_dtype

from ._errors import WrapError
from ._setup import World, current_world


def wrap_model(
    model: nn.Module, use_fsdp: bool = False, dtype: str | torch.dtype | None = None
) -> nn.Module:
    """Make a model train on all ranks: as it is on one rank, else by DDP or FSDP2.

    The model is moved to this rank's device. Collective: every rank calls this.

    Args:
        model: The model, with the same parameters in the same order on every rank.
        use_fsdp: Shard parameters, gradients and optimizer state over the ranks (FSDP2)
            instead of keeping a copy on each (DDP).
        dtype: With FSDP, the type to compute in (``"bf16"``); gradients are reduced in
            fp32. On one rank, and with None, nothing is cast.

    Returns:
        The model itself on one rank and with FSDP2; the DDP wrapper otherwise.

    Raises:
        NotSetUpError: There are several ranks and `setup_torch` was not called.
        WrapError: The model is wrapped already, or ``dtype`` is given with DDP.
        ValueError: ``dtype`` is not known.
    """
    policy = MixedPrecisionPolicy()
    if dtype is not None:
        if not use_fsdp:
            raise WrapError(
                f"dtype={dtype!r} without use_fsdp; expected it with FSDP only; with DDP wrap the "
                "forward pass in torch.autocast"
            )
        policy = MixedPrecisionPolicy(param_dtype=as_dtype(dtype), reduce_dtype=torch.float32)
    if any(isinstance(m, (DistributedDataParallel, FSDPModule)) for m in model.modules()):
        raise WrapError(
            f"{type(model).__name__} is wrapped already; expected the bare model; call "
            "wrap_model once"
        )
    world = current_world("wrap_model()")
    if world is None:
        return model
    model = model.to(world.device)
    if world.info.world_size == 1:
        return model
    return _shard(model, policy) if use_fsdp else _replicate(model, world)


def _replicate(model: nn.Module, world: World) -> nn.Module:
    # device_ids is for one accelerator a process; on the CPU torch refuses it.
    device_ids = [world.device.index] if world.device.type in ("cuda", "xpu") else None
    return DistributedDataParallel(model, device_ids=device_ids)


def _shard(model: nn.Module, policy: MixedPrecisionPolicy) -> nn.Module:
    # A block gathers its parameters when it runs and frees them after; the root takes what
    # is left (embeddings, head).
    for block in _blocks(model):
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the members of the outermost lists of modules: a transformer's layers."""
    for child in module.children():
        if not isinstance(child, (nn.ModuleList, nn.Sequential)):
            yield from _blocks(child)
            continue
        yield from (block for block in child if any(True for _ in block.parameters()))
