"""Wait until every rank is here."""

from __future__ import annotations

import torch.distributed as dist

from .call import Call
from .exchange import exchange
from .members import find_members
from .over_mpi import find_channel

_CALL = Call("barrier()")


def barrier(
    group: dist.ProcessGroup | None = None,
    implementation: str = "torch",
    timeout: float | None = None,
) -> None:
    """Wait until every rank is here. Collective: every rank calls this.

    Args:
        group: torch's group of which this rank is a member; None: all ranks.
        implementation: ``"torch"``; or ``"mpi"``, which leaves devices alone, on all ranks only.
        timeout: Seconds to wait; None: what `setup_torch` was given.

    Raises:
        CollectiveError: Another rank cannot take part.
        HangError: Not every rank came in time.
        MismatchError: Other ranks called something else.
        NotSetUpError: There are several ranks and `setup_torch` was not called.
        TypeError: ``group`` is no group.
        ValueError: This rank is not in ``group``, ``timeout`` is not positive, or
            ``implementation`` is unknown.
    """
    members = find_members("barrier()", group)
    channel = find_channel("barrier()", implementation, members, group)
    if timeout is not None and not timeout > 0:
        error = ValueError(f"timeout {timeout!r}; expected seconds, more than 0, or None")
        if channel is not None:
            exchange(_CALL, channel, refusal=error)
        raise error
    if channel is not None:
        exchange(_CALL, channel, timeout=timeout)
