"""Make torch's dispatch modes safe in several threads."""

from __future__ import annotations

import contextlib

import torch

_made: set[str] = set()


def make_operations() -> None:
    """Make the Python object of every operation that torch knows by now. Call it before threads.

    torch makes them when a dispatch mode first sees an operation, and lets C++ refer to them
    without owning them. Two threads that meet there make two: the second takes the first one's
    place in ``torch.ops``, and the C++ side may be left with the one that is freed (seen in torch
    2.13, in ``OpOverloadPacket.__getattr__``: wrong objects, then a crash). Takes 0.2 s once.
    """
    names = set(torch._C._dispatch_get_all_op_names())  # noqa: SLF001 - nothing public lists them
    for full_name in names - _made:
        space, _, rest = full_name.partition("::")
        name, _, overload = rest.partition(".")
        # Some are there for TorchScript only, and have none.
        with contextlib.suppress(AttributeError):
            getattr(getattr(getattr(torch.ops, space), name), overload or "default")
    _made.update(names)
