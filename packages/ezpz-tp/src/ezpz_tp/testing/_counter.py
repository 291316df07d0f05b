"""Count the collectives that a rank starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

_NAMES = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
}


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count the collectives that this rank starts in the block, by name.

    Names are ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``broadcast``,
    ``reduce``, ``gather``, ``scatter``, ``barrier``, ``send`` and ``recv``. A collective counts
    once however it was called: through torch.distributed, a group's own method, a functional
    collective or with ``async_op=True``, in forward or in backward.

    >>> with counting() as counter:
    ...     pass
    >>> counter["all_reduce"]
    0
    """
    counter: Counter[str] = Counter()
    with _Watch(counter):
        yield counter


class _Watch(TorchDispatchMode):
    """Sees every operation; a group's methods are operations of torch's namespace c10d."""

    def __init__(self, counter: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counter = counter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in {"c10d", "_c10d_functional"}:
            name = name_of(func._schema.name)  # noqa: SLF001 - how torch's own CommDebugMode asks
            if name is not None:
                self.counter[name] += 1
        return func(*args, **(kwargs or {}))


def name_of(operation: str) -> str | None:
    """Return the plain name of e.g. ``c10d::_allgather_base_``; None if it is no collective."""
    words = operation.partition("::")[2].lstrip("_")
    found = [key for key in _NAMES if words.startswith(key)]
    return _NAMES[max(found, key=len)] if found else None
