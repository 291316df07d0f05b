"""The other ranks' part: look for rank 0's store until it is there."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports it so

from ezpz_dist._errors import SetupError
from ezpz_topo import RankInfo, get_hostname

from .place import SAY_AFTER, Place, name, speaks
from .visit import NobodyError, StrangerError, visit

logger = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05
# So that ten thousand ranks ask twenty thousand times a second at most, and not all at once.
_PAUSE_A_RANK, _SPREAD_A_RANK, _MANY_RANKS = 5e-5, 2e-5, 256
_FIRST_LOOK_EVERYWHERE = 0.25
_WRITING = 0.05
"""Seconds from rank 0's opening of the store to its first key."""

_Seen = dict[tuple[str, int], tuple[str, bool]]
"""At each address and port: what is there, in words, and whether the port is taken."""


def find_store(place: Place, info: RankInfo, timeout: timedelta) -> tuple[TCPStore, str, int]:
    """Return a client of rank 0's store, with the address and the port where it was found.

    A port is passed over when something else than this job's store is behind it; what rank 0
    has only not opened yet is waited for.

    Args:
        place: Where to look.
        info: This rank.
        timeout: For all of it, and then the store's own.

    Raises:
        SetupError: The store was not there in time; says what was seen at each port.
    """
    start = time.monotonic()
    end = start + timeout.total_seconds()
    pause, longest = _FIRST_PAUSE, max(_LONGEST_PAUSE, info.world_size * _PAUSE_A_RANK)
    everywhere_at, say_at = _FIRST_LOOK_EVERYWHERE, SAY_AFTER
    seen: _Seen = {}
    if info.world_size >= _MANY_RANKS:
        # Their coming all at once would overrun the listener's queue.
        time.sleep(min(_chance() * info.world_size * _SPREAD_A_RANK, end - start))
    while True:
        elapsed = time.monotonic() - start
        everywhere = elapsed >= everywhere_at
        if everywhere:
            everywhere_at = 2 * elapsed
        limit = _limit(info, elapsed)
        for address, port in _doors(place, seen, everywhere=everywhere):
            left = max(end - time.monotonic(), 0.01)
            try:
                store, _ = visit(
                    address, port, min(limit, left), timeout, place.job, patience=_WRITING
                )
            except (NobodyError, StrangerError) as error:
                # Not the error itself: the connection would live as long.
                seen[address, port] = str(error), isinstance(error, StrangerError)
            else:
                return store, address, port
        if time.monotonic() >= end:
            break
        if elapsed >= say_at:
            say_at = float("inf")
            if speaks(info):
                logger.warning(
                    "%s has waited %.0f s for %s", _who(info), elapsed, _what(place, seen)
                )
        time.sleep(max(min(pause * (0.5 + _chance()), end - time.monotonic()), 0))
        pause = min(1.5 * pause, longest)
    raise SetupError(
        f"{_who(info)} has waited {timeout.total_seconds():g} s for {_what(place, seen)}; expected "
        "rank 0 to call setup_torch and listen there; check that it started, that it did not fail "
        "earlier, and that this host may connect to it"
    )


def _doors(place: Place, seen: _Seen, *, everywhere: bool) -> Iterator[tuple[str, int]]:
    """Yield address and port of where to look now; what is seen there comes into ``seen``.

    Rank 0 goes past a taken port, and so do we. But whoever holds it may be gone again, or not
    be seen from here: so now and then they are all looked at.
    """
    for port in place.ports:
        for address in place.addresses:
            yield address, port
        taken = any(seen[address, port][1] for address in place.addresses)
        if not (taken or everywhere):
            return


def _limit(info: RankInfo, elapsed: float) -> float:
    """Return the seconds for an answer: few, but a busy store must get to answer in the end."""
    return min(max(0.5 + info.world_size * 1e-4, elapsed / 10), 5.0)


def _who(info: RankInfo) -> str:
    return f"rank {info.rank} of {info.world_size} on {get_hostname()}"


def _what(place: Place, seen: _Seen) -> str:
    there = "; ".join(f"{name(*door)}: {what}" for door, (what, _) in seen.items())
    return f"rank 0's store at {place}, and finds at {there}"


def _chance() -> float:
    """Return a number from 0 to 1, without touching the random stream of the script."""
    return int.from_bytes(os.urandom(4), "little") / 2**32
