"""Checking the parallelism of a program, operation by operation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from ezpz_tp._errors import ParallelError
from ezpz_tp._groups.default import get_state
from ezpz_tp._groups.state import ParallelState

from .mode import AXES, Checker
from .raw import active_checkers, exchanged
from .types import TYPES


@contextmanager
def check(
    model: nn.Module | None = None, *, state: ParallelState | None = None
) -> Iterator[Checker]:
    """Check every operation in the block: a missing reduction or copy is an error at its line.

    Along each axis of degree above 1 (tensor, context, data) a tensor is *invariant* (equal on
    all ranks, as is its gradient), *replicated* (equal, its gradient partial), *varying* or
    *partial* (a sum is still due). What starts as what: parameters that are sharded are varying,
    those tagged ``sequence_parallel`` replicated, others invariant; data is invariant along the
    tensor axis and varying along the others; `declare_type` says otherwise. Regions and layers
    change types, and operations need ones that fit:

    * invariant goes with invariant; replicated with varying gives varying;
    * of a replicated tensor, a slice varies: it may be another one on each rank;
    * partial goes through what is linear, and with partial into a sum;
    * a loss that backward starts from is invariant along the tensor axis;
    * dropout of what varies belongs within ``get_rng_tracker().fork()``, any other outside.

    For tests, or the first step of a run: 10 to 50 us an operation. Nothing is left behind, and
    outside of it a region function pays 16 ns. What is compared is types, and no value: pair it
    with `verify_replicated`. Backward itself is not looked into, but for what checkpointing runs
    again. What torch.compile compiled before the block runs as it is written, and is checked.
    All ranks of the tensor axis fail alike; those of other pipeline stages may wait for them.

    Args:
        model: Whose parameters are known by name: in errors, and where FSDP2 replaces them.
        state: Whose groups; the default's if None.

    Yields:
        The checker: its ``operations`` says how many it saw.

    Raises:
        ParallelTypeError: Names the operation, the types, the user's line, and the mend.
        NotInitializedError: There is neither ``state`` nor default.
    """
    checker = Checker(state or get_state(), model)
    with exchanged(), checker:
        yield checker


def declare_type(tensor: Tensor, /, **types: str) -> Tensor:
    """Say what a tensor is, where `check` cannot know; it believes it. Else nothing happens.

    For what comes from other ranks, as a pipeline's activations under sequence parallelism, and
    for collectives within autograd functions of one's own, or torch's functional collectives.

    Args:
        tensor: Returned as it is.
        **types: By axis, ``tensor``, ``context`` or ``data``: ``invariant``, ``replicated``,
            ``varying`` or ``partial``. Axes that are not named keep their type.

    Raises:
        ParallelError: No such axis or type.

    >>> import torch
    >>> hidden = declare_type(torch.ones(4), tensor="varying")
    """
    for axis, kind in types.items():
        if axis not in AXES or kind not in TYPES:
            raise ParallelError(
                f"declare_type({axis}={kind!r}); expected an axis of {', '.join(AXES)} and a type "
                f"of {', '.join(TYPES)}"
            )
    for checker in active_checkers():
        checker.records.declare(tensor, types)
    return tensor


def type_of(tensor: Tensor) -> dict[str, str]:
    """Return a tensor's type by axis, within `check`; empty outside of it.

    >>> import torch
    >>> type_of(torch.ones(4))
    {}
    """
    checker = next(iter(active_checkers()), None)
    if checker is None:
        return {}
    return dict(zip(checker.axes, checker.records.of(tensor).types, strict=True))
