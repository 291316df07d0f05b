"""Wait until every rank is here."""

from __future__ import annotations

import torch.distributed as dist

from .call import Call
from .exchange import exchange
from .members import find_members
from .over_mpi import find_channel

_CALL = Call("barrier()")

LONGEST = 1e9
"""Seconds: 30 years; torch's clocks overflow not far beyond, and would not wait at all."""


def barrier(
    group: dist.ProcessGroup | None = None,
    implementation: str = "torch",
    timeout: float | None = None,
) -> None:
    """Wait until every rank is here. Collective: every rank calls this.

    Args:
        group: torch's group of which this rank is a member; None: all ranks.
        implementation: ``"torch"``; or ``"mpi"``, which leaves devices alone, on all ranks only.
        timeout: Seconds to wait, fewer or more than `setup_torch` was given; None: those. The
            group can be used further where the missing ranks come within `setup_torch`'s.

    Raises:
        CollectiveError: Another rank cannot take part.
        HangError: Not every rank came in time.
        MismatchError: Other ranks called something else.
        NotSetUpError: There are several ranks and `setup_torch` was not called.
        TypeError: ``group`` is no group.
        ValueError: This rank is not in ``group``, ``timeout`` is not positive or beyond 30
            years, or ``implementation`` is unknown.
    """
    members = find_members("barrier()", group)
    channel = find_channel("barrier()", implementation, members, group)
    if timeout is not None and not 0 < timeout <= LONGEST:
        error = ValueError(
            f"timeout {timeout!r}; expected seconds, more than 0 and at most {LONGEST:g}, or None"
        )
        if channel is not None:
            exchange(_CALL, channel, refusal=error)
        raise error
    if channel is not None:
        exchange(_CALL, channel, timeout=timeout)
