"""Count the collectives that a rank starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# As operations of torch begin; a name that others begin with comes after them.
_COLLECTIVES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "reducescatter": "reduce_scatter",
    "reduce": "reduce",
    "broadcast": "broadcast",
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
    with _CountCollectives(counter):
        yield counter


class _CountCollectives(TorchDispatchMode):
    """Sees every operation; a group's methods are operations of torch's namespace c10d."""

    def __init__(self, counter: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counter = counter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in {"c10d", "_c10d_functional"}:
            operation = func._schema.name.partition("::")[2]  # noqa: SLF001 - as CommDebugMode does
            for beginning, name in _COLLECTIVES.items():
                if operation.replace("_", "").startswith(beginning):
                    self.counter[name] += 1
                    break
        return func(*args, **(kwargs or {}))
