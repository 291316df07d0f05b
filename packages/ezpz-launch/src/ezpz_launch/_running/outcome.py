"""How a launch ended: its exit status, and what is said of it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .launch import Launch
from .status import Status

USAGE = 2
"""Exit status of a launch that asks for what cannot be."""

HANG = 124
"""Exit status of a launch whose ranks hung: that of timeout(1)."""

_NAMED = 16
"""So many ranks are named."""

REQUEUE = 75
"""Exit status by which a script says: check-pointed, start me again (EX_TEMPFAIL)."""


class Outcome(NamedTuple):
    """How a launch ended.

    Attributes:
        exit_status: That of ezpz-launch.
        failure: Rank, host and exit status of the first rank that failed, if one did.
        told: The signal that ended it, if one did.
        port_taken: Whether another program holds the port on rank 0's host.
        tail: The last bytes of standard error.
    """

    exit_status: int
    failure: tuple[int, str, int] | None = None
    told: signal.Signals | None = None
    port_taken: bool = False
    tail: bytes = b""


def how(status: int) -> str:
    """Say what an exit status means."""
    if status > 128 and status - 128 in {s.value for s in signal.Signals}:
        return f"was killed by {signal.Signals(status - 128).name} (exit status {status})"
    return f"exited with status {status}"


def name_ranks(launch: Launch, ranks: Sequence[int]) -> str:
    """Name ranks with their hosts, the first of many."""
    named = ", ".join(f"{rank} on {launch.host_of(rank)}" for rank in ranks[:_NAMED])
    return named + (f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else "")


def describe(launch: Launch, rank: int, status: int) -> str:
    """Say which rank failed first, where, and how."""
    return f"rank {rank} on {launch.host_of(rank)} {how(status)}, first of all ranks"


def exit_status_of(
    launch: Launch,
    status: Status,
    returncode: int,
    *,
    told: signal.Signals | None,
    hang: bool,
    say: Callable[[str], None],
) -> int:
    """Return the exit status of a launch, and say why, unless it is known already.

    Args:
        launch: The launch.
        status: What its ranks reported.
        returncode: The launcher's own.
        told: The signal that ended it, if one did.
        hang: Whether it was ended because no rank wrote anything.
        say: Where to say it.
    """
    failure = status.first_failure
    if told is not None:
        say(f"ended by {told.name}")
        # Who check-pointed says so; the others died of the same signal, or had nothing to save.
        meant = {0, REQUEUE, 128 + told, 128 + signal.SIGTERM}
        statuses = set(status.ended.values())
        return REQUEUE if REQUEUE in statuses and statuses <= meant else 128 + told
    if hang:
        return HANG
    if failure is not None:
        return failure[1]
    return _without_a_failure(
        launch, status, 128 - returncode if returncode < 0 else returncode, say
    )


def _without_a_failure(launch: Launch, status: Status, own: int, say: Callable[[str], None]) -> int:
    """Return the exit status where no rank reported a failure, given the launcher's own."""
    if status.all_ended:
        if own:
            # Hydra can return 141 under load after ranks that end at once (seen 4 times in 726).
            say(f"every rank ended with 0; the launcher with {own}, which is not passed on")
        return 0
    silent = [rank for rank in range(launch.nproc) if rank not in status.ended]
    lost = name_ranks(launch, silent)
    started = "" if status.pids else "; none had started"
    say(f"the launcher {how(own)}; ranks that did not report their end: {lost}{started}")
    # Without a word from its ranks even a 0 is no success.
    return own or 1
