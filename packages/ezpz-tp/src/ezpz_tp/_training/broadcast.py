"""One rank reads the data; its tensor-parallel group gets it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ezpz_tp._errors import ParallelError
from ezpz_tp._groups.default import tensor_group
from ezpz_tp._regions.collectives import broadcast_

_HEADER = 64
"""Numbers in the first message: a status, and the shapes if they fit."""
_FIXED = 5
_FINE, _MISSING, _NOT_A_TENSOR, _WRONG_DTYPE = range(4)
_DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
"""What a wrong dtype is told as; the order is part of the message."""


@torch.no_grad()
def broadcast_data(
    keys: Sequence[str],
    data: Mapping[str, Tensor] | None,
    datatype: torch.dtype,
    tp_group: ProcessGroup | None = None,
    *,
    device: torch.device | str | None = None,
) -> dict[str, Tensor]:
    """Return the tensors of the group's first rank on every rank of the tensor-parallel group.

    Two broadcasts: the shapes, then all values in one buffer, of which the results are views.
    (A third if the shapes need more than 59 numbers.) With one rank, none: the tensors themselves,
    on ``device``. Collective: every rank of the group calls this with the same ``keys`` and
    ``datatype``.

    Args:
        keys: Names of the tensors to send; others in ``data`` are left out.
        data: The tensors, of any shape and on any device. Only the group's first rank's is looked
            at; the others may pass None.
        datatype: The dtype of all of them.
        tp_group: Default: the tensor-parallel group.
        device: Where the results are. Default: the current device of the group's backend (CUDA
            for NCCL, XPU for XCCL, CPU for gloo and MPI).

    Raises:
        ValueError: On every rank: a key is missing on the first rank, or is not a tensor of
            ``datatype``.
        ParallelError: This rank's ``keys`` or ``datatype`` differ from the first rank's.
    """
    group = tensor_group(tp_group)
    place = _backend_device(group) if device is None else torch.device(device)
    first = group is None or group.rank() == 0
    problem, tensors = _look(keys, data or {}, datatype) if first else ((_FINE, 0, 0), [])
    if group is None:
        _raise(problem, keys, datatype)
        return {key: tensor.to(place) for key, tensor in zip(keys, tensors, strict=True)}
    asked = zlib.crc32(repr((tuple(keys), str(datatype))).encode())
    shapes = [number for tensor in tensors for number in (tensor.dim(), *tensor.shape)]
    header = [*problem, asked, len(shapes), *shapes[: _HEADER - _FIXED]]
    message = torch.tensor(header + [0] * (_HEADER - len(header)), device=place)
    header = broadcast_(message, 0, group).tolist()
    sent, count = header[3:_FIXED]
    if sent != asked:
        raise ParallelError(
            f"broadcast_data: rank {group.rank()} of the group asks for {list(keys)} of "
            f"{datatype}, and its first rank sends others; pass the same on every rank"
        )
    _raise(header[:3], keys, datatype)
    if count > _HEADER - _FIXED:
        rest = torch.tensor(shapes or [0] * count, device=place)
        shapes = broadcast_(rest, 0, group).tolist()
    else:
        shapes = header[_FIXED : _FIXED + count]
    sizes = _unpack(shapes)
    lengths = [torch.Size(size).numel() for size in sizes]
    buffer = torch.empty(sum(lengths), dtype=datatype, device=place)
    parts = [part.view(size) for part, size in zip(buffer.split(lengths), sizes, strict=True)]
    for part, tensor in zip(parts, tensors, strict=False):
        part.copy_(tensor)
    if len(buffer):
        # As bytes, because not every backend knows every dtype.
        broadcast_(buffer.view(torch.uint8), 0, group)
    return dict(zip(keys, parts, strict=True))


def _look(
    keys: Sequence[str], data: Mapping[str, object], datatype: torch.dtype
) -> tuple[tuple[int, int, int], list[Tensor]]:
    """The tensors, or a status that says which one cannot be sent: what, key, dtype."""
    tensors: list[Tensor] = []
    for position, key in enumerate(keys):
        if key not in data:
            return (_MISSING, position, 0), []
        tensor = data[key]
        if not isinstance(tensor, Tensor):
            return (_NOT_A_TENSOR, position, 0), []
        if tensor.dtype != datatype:
            known = _DTYPES.index(tensor.dtype) if tensor.dtype in _DTYPES else len(_DTYPES)
            return (_WRONG_DTYPE, position, known), []
        tensors.append(tensor)
    return (_FINE, 0, 0), tensors


def _raise(status: Sequence[int], keys: Sequence[str], datatype: torch.dtype) -> None:
    """Raise what the first rank found, in the same words on every rank."""
    what, position, dtype = status
    if what == _FINE:
        return
    found = {
        _MISSING: "is missing from the data",
        _NOT_A_TENSOR: "is not a tensor",
        _WRONG_DTYPE: f"has dtype {(*_DTYPES, 'unknown')[dtype]}",
    }[what]
    raise ValueError(
        f"broadcast_data: {keys[position]!r} {found} on the first rank of the group; expected a "
        f"tensor of {datatype}. Send tensors of another dtype by a call of their own"
    )


def _unpack(numbers: Sequence[int]) -> list[tuple[int, ...]]:
    """Shapes, from each one's number of dims followed by its dims."""
    sizes, start = [], 0
    while start < len(numbers):
        end = start + 1 + numbers[start]
        sizes.append(tuple(numbers[start + 1 : end]))
        start = end
    return sizes


def _backend_device(group: ProcessGroup | None) -> torch.device:
    """The current accelerator, if there is one that the group's backend sends from; else the CPU.

    gloo takes CUDA tensors too, but copies them to the host first, so it counts as the CPU's.
    """
    cpu = torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        return cpu
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    if group is None:
        return torch.device(accelerator.type)
    # A group made without torch.distributed is a backend itself.
    get_backend = getattr(group, "_get_backend", None)
    try:
        backend = group if get_backend is None else get_backend(accelerator)
    except RuntimeError:
        return cpu  # the group has no backend for the accelerator
    return cpu if backend.name() in ("gloo", "mpi") else torch.device(accelerator.type)
