"""Where the ranks were told to meet, and what they know of it beforehand."""

from __future__ import annotations

from dataclasses import dataclass

from ezpz_topo import RankInfo

from .job import Job

SAY_AFTER = 10.0
"""Seconds of waiting after which one rank of each node says what it waits for."""


def speaks(info: RankInfo) -> bool:
    """Return whether it is this rank that says what its node waits for.

    Of rank 0's node it is rank 1: the others wait for rank 0.
    """
    return info.local_rank == 0 or info.rank == 1


@dataclass(frozen=True, slots=True)
class Place:
    """Where the ranks were told to meet.

    Attributes:
        host: Rank 0's, by name or address.
        addresses: What the name stands for here, numeric.
        ports: Where rank 0 may listen, in the order in which it tries them; 0: any.
        job: What the store must be of; None: whatever store is there.
        source: How all this came to be known, for people.
    """

    host: str
    addresses: tuple[str, ...]
    ports: tuple[int, ...]
    job: Job | None
    source: str

    def __str__(self) -> str:
        return f"{name(self.host, self.ports[0])} ({self.source})"


def name(host: str, port: int) -> str:
    """Return host and port as one word."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
