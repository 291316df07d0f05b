"""How many ranks on which hosts: pure arithmetic, and an error where numbers contradict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ezpz_launch._errors import UsageError


class Placement(NamedTuple):
    """Ranks on hosts, filled host by host.

    Attributes:
        hosts: The hosts that get ranks, in rank order.
        ranks: How many each of them gets: all the same, but for a smaller last one.
        source: Where the number of ranks comes from.
        source_per_host: Where the number of ranks of a host comes from.
    """

    hosts: tuple[str, ...]
    ranks: tuple[int, ...]
    source: str
    source_per_host: str

    @property
    def nproc(self) -> int:
        """Number of ranks in all."""
        return sum(self.ranks)

    @property
    def ppn(self) -> int:
        """Number of ranks of a full host."""
        return self.ranks[0]

    @property
    def is_even(self) -> bool:
        """Whether every host has as many ranks."""
        return self.ranks[-1] == self.ranks[0]


def place(
    hosts: Sequence[str],
    *,
    nproc: int | None,
    ppn: int | None,
    default_ppn: int,
    why_default: str,
) -> Placement:
    """Decide how many ranks each host gets.

    Without ``nproc`` every host gets ``ppn``; with it the hosts are filled in order, each up to
    ``ppn``, and the rest get none: ranks that are close to each other talk faster.

    Args:
        hosts: Where ranks may run.
        nproc: Ranks in all, if asked for.
        ppn: Ranks a host, if asked for.
        default_ppn: Ranks a host, if not.
        why_default: Where that comes from.

    Raises:
        UsageError: The numbers contradict each other, or are below 1.
    """
    for name, value in (("-n", nproc), ("--ppn", ppn)):
        if value is not None and value < 1:
            raise UsageError(f"{name} {value}: expected at least 1 rank")
    if nproc is None:
        per_host, why = (default_ppn, why_default) if ppn is None else (ppn, "--ppn")
        total, why_total = per_host * len(hosts), f"{len(hosts)} x {per_host}: {why}"
        if len(hosts) == 1:
            why_total = why
    else:
        total, why_total = nproc, "-n"
        # More than one a device on one host is asked for on purpose; on several it is not known
        # to be, so that they are filled evenly instead.
        crowded = -(-nproc // len(hosts))
        per_host, why = (max(default_ppn, crowded), why_default) if ppn is None else (ppn, "--ppn")
        if crowded > per_host:
            raise UsageError(
                f"-n {nproc} with --ppn {per_host} on {len(hosts)} hosts: room for "
                f"{per_host * len(hosts)} ranks; expected at most that many, or more hosts"
            )
        if ppn is None and crowded > default_ppn:
            why = f"-n {nproc} / {len(hosts)} hosts"
    per_host = min(per_host, total)
    full, rest = divmod(total, per_host)
    ranks = (per_host,) * full + ((rest,) if rest else ())
    return Placement(tuple(hosts[: len(ranks)]), ranks, why_total, why)
