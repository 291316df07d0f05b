"""Collectives that are the same under every launcher, and in a world of one."""

from __future__ import annotations

import math
import pickle
import struct
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist

from ezpz_dist._world import World, current_world

T = TypeVar("T")

OPS: dict[str, dist.ReduceOp.RedOpType] = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,  # divided afterwards: gloo and oneCCL have no AVG
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.uint8, torch.int8, torch.int32, torch.int64,
)  # fmt: skip
"""What `all_reduce` takes, in every world: the types that every backend can reduce."""

_INT, _FLOAT = 1, 2


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
def all_reduce(obj: float, op: str = "sum") -> float: ...
def all_reduce(obj: Any, op: str = "sum") -> Any:
    """Combine a number or tensor over all ranks; every rank gets the result.

    Collective: every rank calls this, with a tensor of the same shape and dtype, or with
    a number. The argument is not changed. NaN on any rank gives NaN.

    Args:
        obj: An int of at most 64 bits, a float, or a dense tensor of any shape on the host
            or this rank's device, of one of `DTYPES`.
        op: ``"sum"``, ``"mean"``, ``"min"``, ``"max"`` or ``"product"``. The mean of ints
            is a float; the mean of an integer tensor is refused.

    Returns:
        A number for a number: an int where every rank gave an int (of any size: nothing
        overflows), else a float, summed exactly. A new tensor of the same shape, dtype and
        device for a tensor; its integers wrap around as torch's do.

    Raises:
        NotSetUpError: There are several ranks and `setup_torch` was not called.
        OverflowError: An int of more than 64 bits.
        TypeError: ``obj`` is something else.
        ValueError: ``op`` is unknown, or the mean of an integer tensor.
    """
    if op not in OPS:
        raise ValueError(f"op {op!r}; expected one of {', '.join(OPS)}")
    world = current_world("all_reduce()")
    if isinstance(obj, torch.Tensor):
        return _reduce_tensor(_checked(obj, op), op, world)
    if isinstance(obj, bool) or not isinstance(obj, (int, float)):
        raise TypeError(f"all_reduce of {type(obj).__name__}; expected an int, a float or a tensor")
    return _combine(_every_number(obj, world), op)


def _checked(tensor: torch.Tensor, op: str) -> torch.Tensor:
    if tensor.dtype not in DTYPES or tensor.layout is not torch.strided:
        raise TypeError(
            f"all_reduce of a {tensor.layout} {tensor.dtype} tensor; expected a dense one of "
            f"{', '.join(str(dtype) for dtype in DTYPES)}"
        )
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"the mean of a {tensor.dtype} tensor; expected a floating-point one")
    if op in ("min", "max") and tensor.is_complex():
        raise ValueError(f"the {op} of a {tensor.dtype} tensor; expected real numbers")
    return tensor.detach()


def _reduce_tensor(tensor: torch.Tensor, op: str, world: World | None) -> torch.Tensor:
    if world is None or world.info.world_size == 1:
        return tensor.clone()
    # A sum of halves can overflow where their mean does not.
    wide = op == "mean" and tensor.dtype in (torch.float16, torch.bfloat16)
    result = tensor.to(
        device=_where(world),
        dtype=torch.float32 if wide else tensor.dtype,
        copy=True,
        memory_format=torch.contiguous_format,
    )
    if op in ("min", "max") and tensor.is_floating_point():
        # Whether a NaN survives a minimum would depend on the rank that has it.
        no_number = result.isnan().to(torch.uint8)
        dist.all_reduce(no_number, op=dist.ReduceOp.MAX)
        dist.all_reduce(result, op=OPS[op])
        result[no_number.bool()] = float("nan")
    else:
        dist.all_reduce(result, op=OPS[op])
    if op == "mean":
        result /= world.info.world_size
    return result.to(device=tensor.device, dtype=tensor.dtype)


def _every_number(mine: float, world: World | None) -> list[int | float]:
    """Return every rank's number, by rank. Collective: every rank calls this.

    Ten bytes a rank, so that an int on one rank and a float on another are told apart.
    """
    if world is None or world.info.world_size == 1:
        return [mine]
    if isinstance(mine, int) and not -(1 << 63) <= mine < 1 << 63:
        raise OverflowError(f"all_reduce of {mine}; expected an int of at most 64 bits")
    packed = struct.pack("=q" if isinstance(mine, int) else "=d", mine)
    # A sum with zeros is a gather that every backend and version of torch has.
    slots = torch.zeros(world.info.world_size, 1 + len(packed), dtype=torch.uint8)
    kind = _INT if isinstance(mine, int) else _FLOAT
    slots[world.info.rank] = torch.frombuffer(bytearray((kind, *packed)), dtype=torch.uint8)
    shared = slots.to(_where(world))
    dist.all_reduce(shared)
    raw = bytes(shared.flatten().tolist())
    return [
        struct.unpack_from("=q" if raw[at] == _INT else "=d", raw, at + 1)[0]
        for at in range(0, len(raw), 1 + len(packed))
    ]


def _combine(numbers: list[int | float], op: str) -> int | float:
    if op in ("sum", "mean"):
        exact = all(isinstance(number, int) for number in numbers)
        total = sum(numbers) if exact else math.fsum(numbers)
        return total / len(numbers) if op == "mean" else total
    if op == "product":
        return math.prod(numbers)
    if any(math.isnan(number) for number in numbers):
        return math.nan
    return min(numbers) if op == "min" else max(numbers)


def _where(world: World) -> torch.device:
    """Gloo moves host memory, NCCL and the like their device's."""
    return torch.device("cpu") if world.backend == "gloo" else world.device
