"""Tensors that a node's ranks share: read once, in memory once."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch

from ezpz_dist._collectives.broadcast import broadcast
from ezpz_dist._collectives.gather import all_gather_object
from ezpz_dist._collectives.members import find_members
from ezpz_dist._collectives.pickled import is_plain

from .node import agree, node_group, reads, try_to_read

Tensors = TypeVar("Tensors", torch.Tensor, dict[str, torch.Tensor])

Place = tuple[str | None, str, tuple[int, ...], int]
"""Name (None: there is one tensor, and no dict), dtype, shape, and the offset in the file."""

_ALIGNED = 64
"""Bytes: a tensor begins at a multiple, as torch's own do."""


def share_on_node(read: Callable[[], Tensors]) -> Tensors:
    """Let one rank of each node read; its ranks have the same memory, once a node.

    Collective on each node: every rank of it calls this. What a rank writes into the tensors
    the others see. The memory is freed when no rank holds a tensor any more.

    Args:
        read: Called on the node's first rank only; returns a dense tensor, or a dict of them.

    Returns:
        The same on every rank, on the host.

    Raises:
        DataError: On every rank of the node: ``read`` failed, returned something else, or
            there is not enough shared memory. The reader's exception is its cause there.
        NotSetUpError: There are several ranks and `setup_torch` was not called.
    """
    group = node_group()
    members = find_members("share_on_node()", group)
    found, trouble, cause = try_to_read(read, members)
    path, places = "", list[Place]()
    if reads(members) and not trouble:
        try:
            path, places = _put(found)
        except (OSError, TypeError) as error:
            trouble, cause = f"{type(error).__name__}: {error}", error
    try:
        agree(trouble, cause, members, "share_on_node()")
        if members is not None:
            path, places = broadcast((path, places), members.ranks[0], group)
        tensors = _map(path, places)
        if members is not None:
            all_gather_object(None, group)  # all have mapped it: its name can go
    finally:
        if path and reads(members):
            os.unlink(path)
    result: Any = tensors.get(None, tensors)
    return cast("Tensors", result)


def _put(found: object) -> tuple[str, list[Place]]:
    """Write tensors into a file in memory; return its path, and where each tensor is."""
    named = found if isinstance(found, Mapping) else {None: found}
    places: list[Place] = []
    size = 0
    for name, tensor in named.items():
        if not isinstance(tensor, torch.Tensor) or not is_plain(tensor):
            raise TypeError(f"{name or 'it'} is {type(tensor).__name__}; expected dense tensors")
        places.append((name, str(tensor.dtype)[6:], tuple(tensor.shape), size))
        size += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None  # noqa: S108  # Linux's memory
    number, path = tempfile.mkstemp(prefix="ezpz-", dir=folder)
    try:
        # Now, or writing to the memory would be a bus error where there is none.
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(number, 0, size)
        else:
            os.ftruncate(number, size)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(number)
    for tensor, shared in zip(named.values(), _map(path, places).values(), strict=True):
        shared.copy_(tensor.detach())
    return path, places


def _map(path: str, places: list[Place]) -> dict[str | None, torch.Tensor]:
    size = os.path.getsize(path)
    memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8) if size else None
    tensors: dict[str | None, torch.Tensor] = {}
    for name, kind, shape, start in places:
        dtype = getattr(torch, kind)
        if memory is None or 0 in shape:
            tensors[name] = torch.empty(shape, dtype=dtype)
            continue
        nbytes = dtype.itemsize * torch.Size(shape).numel()
        tensors[name] = memory[start : start + nbytes].view(dtype).view(shape)
    return tensors
