"""Collectives that are the same under every launcher, and in a world of one."""

from __future__ import annotations

import pickle
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist

from ._setup import World, current_world

T = TypeVar("T")

OPS: dict[str, dist.ReduceOp.RedOpType] = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,  # divided afterwards: gloo and oneCCL have no AVG
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


def barrier() -> None:
    """Wait until every rank is here. Collective: every rank calls this.

    Raises:
        NotSetUpError: There are several ranks and `setup_torch` was not called.
    """
    world = current_world("barrier()")
    if world is None or world.info.world_size == 1:
        return
    # NCCL's barrier is an all-reduce on a device: say which, or it guesses.
    device_ids = [world.device.index] if world.backend == "nccl" else None
    dist.barrier(device_ids=device_ids)


def broadcast(obj: T, root: int = 0) -> T:
    """Return ``root``'s object on every rank. Collective: every rank calls this.

    Args:
        obj: Any picklable object; only the one on ``root`` matters.
        root: The rank to send from.

    Raises:
        NotSetUpError: There are several ranks and `setup_torch` was not called.
        ValueError: ``root`` is no rank.
    """
    world = current_world("broadcast()")
    size = 1 if world is None else world.info.world_size
    if not 0 <= root < size:
        raise ValueError(f"root {root}; expected a rank from 0 to {size - 1}")
    if world is None or size == 1:
        return obj
    mine = bytearray(pickle.dumps(obj) if world.info.rank == root else b"")
    length = torch.tensor([len(mine)], device=_where(world))
    dist.broadcast(length, src=root)
    # torch's own broadcast_object_list needs numpy for this; a bytearray does as well.
    payload = mine if world.info.rank == root else bytearray(int(length))
    on_host = torch.frombuffer(payload, dtype=torch.uint8)
    sent = on_host.to(_where(world))
    dist.broadcast(sent, src=root)
    if world.info.rank == root:
        return obj
    on_host.copy_(sent)
    result: T = pickle.loads(payload)  # noqa: S301  # from a rank of this very job
    return result


@overload
def all_reduce(obj: torch.Tensor, op: str = "sum") -> torch.Tensor: ...
@overload
def all_reduce(obj: int, op: str = "sum") -> int | float: ...
@overload
def all_reduce(obj: float, op: str = "sum") -> float: ...
def all_reduce(obj: Any, op: str = "sum") -> Any:
    """Combine a number or tensor over all ranks; every rank gets the result.

    Collective: every rank calls this, with the same type, shape and dtype. The argument
    is not changed.

    Args:
        obj: An int, a float, or a tensor of any shape on the host or this rank's device.
        op: ``"sum"``, ``"mean"``, ``"min"``, ``"max"`` or ``"product"``. The mean of ints
            is a float; the mean of an integer tensor is refused.

    Returns:
        A number for a number, a new tensor of the same shape, dtype and device for a tensor.

    Raises:
        NotSetUpError: There are several ranks and `setup_torch` was not called.
        TypeError: ``obj`` is something else.
        ValueError: ``op`` is unknown, or the mean of an integer tensor.
    """
    if op not in OPS:
        raise ValueError(f"op {op!r}; expected one of {', '.join(OPS)}")
    world = current_world("all_reduce()")
    if isinstance(obj, torch.Tensor):
        if op == "mean" and not (obj.is_floating_point() or obj.is_complex()):
            raise ValueError(f"the mean of a {obj.dtype} tensor; expected a floating-point one")
        return _reduce(obj, op, world)
    if isinstance(obj, bool) or not isinstance(obj, (int, float)):
        raise TypeError(f"all_reduce of {type(obj).__name__}; expected an int, a float or a tensor")
    wide = torch.float64 if isinstance(obj, float) or op == "mean" else torch.int64
    return _reduce(torch.tensor(obj, dtype=wide), op, world).item()


def _reduce(tensor: torch.Tensor, op: str, world: World | None) -> torch.Tensor:
    if world is None or world.info.world_size == 1:
        return tensor.detach().clone()
    result = tensor.detach().to(_where(world), copy=True, memory_format=torch.contiguous_format)
    dist.all_reduce(result, op=OPS[op])
    if op == "mean":
        result /= world.info.world_size
    return result.to(tensor.device)


def _where(world: World) -> torch.device:
    """Gloo moves host memory, NCCL and the like their device's."""
    return torch.device("cpu") if world.backend == "gloo" else world.device
