"""One call that makes a model train on all ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

from ezpz_device import as_dtype, get_torch_device
from ezpz_dist._errors import WrapError
from ezpz_dist._world import World, current_world


def wrap_model(
    model: nn.Module, use_fsdp: bool = False, dtype: str | torch.dtype | None = None
) -> nn.Module:
    """Make a model train on all ranks: as it is on one rank, else by DDP or FSDP2.

    The model is moved to this rank's device. Collective: every rank calls this.

    Args:
        model: The model, with the same parameters in the same order on every rank; all
            ranks start from rank 0's values, buffers too.
        use_fsdp: Shard parameters, gradients and optimizer state over the ranks (FSDP2)
            instead of keeping a copy on each (DDP).
        dtype: With FSDP, the type to compute in (``"bf16"``); gradients are reduced in
            fp32. On one rank, and with None, nothing is cast.

    Returns:
        The model itself on one rank, with FSDP2, and where it has nothing to train; the
        DDP wrapper otherwise.

    Raises:
        NotSetUpError: There are several ranks and `setup_torch` was not called.
        WrapError: The model is wrapped already, or ``dtype`` is given with DDP.
        ValueError: ``dtype`` is not known, or no floating-point type.
    """
    policy = MixedPrecisionPolicy()
    if dtype is not None:
        if not use_fsdp:
            raise WrapError(
                f"dtype={dtype!r} without use_fsdp; expected it with FSDP only; with DDP wrap the "
                "forward pass in torch.autocast"
            )
        policy = MixedPrecisionPolicy(param_dtype=_floating(dtype), reduce_dtype=torch.float32)
    wrapped = (DistributedDataParallel, FullyShardedDataParallel, FSDPModule)
    if any(isinstance(module, wrapped) for module in model.modules()):
        raise WrapError(
            f"{type(model).__name__} is wrapped already; expected the bare model; call "
            "wrap_model once"
        )
    world = current_world("wrap_model()")
    model = model.to(torch.device(get_torch_device()) if world is None else world.device)
    if world is None or world.info.world_size == 1:
        return model
    if use_fsdp or not any(parameter.requires_grad for parameter in model.parameters()):
        # DDP does this itself; without it every rank would keep its share of its own start.
        _copy_from_rank_0(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    return _shard(model, policy) if use_fsdp else _replicate(model, world)


def _floating(dtype: str | torch.dtype) -> torch.dtype:
    wanted = as_dtype(dtype)
    if not wanted.is_floating_point:
        raise ValueError(f"dtype {wanted}; expected a floating-point type to compute in")
    return wanted


def _copy_from_rank_0(model: nn.Module) -> None:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta:
                dist.broadcast(tensor.detach(), src=0)


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


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return the members of the outermost lists of modules: a transformer's layers.

    A block that shares a parameter with something outside of it, or stands in the model
    twice, is left to the root: FSDP wants the users of a parameter in one group.
    """
    found = dict(_members(model, ""))
    homes: dict[nn.Parameter, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        home = next((prefix for prefix in found if name.startswith(f"{prefix}.")), "")
        homes.setdefault(parameter, set()).add(home)
    shared = {home for used_in in homes.values() if len(used_in) > 1 for home in used_in}
    used = {home for used_in in homes.values() for home in used_in}
    return [block for name, block in found.items() if name in used - shared]


def _members(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            yield from _of_list(child, f"{prefix}{name}")
        else:
            yield from _members(child, f"{prefix}{name}.")


def _of_list(container: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, block in container.named_children():
        if isinstance(block, (nn.ModuleList, nn.ModuleDict)):
            yield from _of_list(block, f"{path}.{name}")
        else:
            yield f"{path}.{name}", block
