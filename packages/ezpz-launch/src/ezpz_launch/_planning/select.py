"""Which hosts a launch may use: all that we were given, less what the user leaves out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ezpz_launch._errors import UsageError
from ezpz_topo import expand_nodelist, same_host, short_name


def select_hosts(
    hosts: Sequence[str], source: str, *, include: str = "", exclude: str = "", nodes: int = 0
) -> tuple[tuple[str, ...], str]:
    """Return the hosts to use, in order, and why these.

    Args:
        hosts: The hosts that there are.
        source: Where they come from.
        include: A nodelist of those to use, such as ``nid[001-004]``; all if empty.
        exclude: A nodelist of those not to use.
        nodes: How many, counted from the first; all if 0.

    Raises:
        UsageError: A name is none of the hosts, no host is left, or there are fewer than asked.
        NodelistError: A nodelist does not parse.
    """
    kept, why = list(hosts), source
    for flag, nodelist in (("--include", include), ("--exclude", exclude)):
        if nodelist:
            chosen, unknown = match_hosts(expand_nodelist(nodelist), hosts)
            if unknown:
                raise UsageError(
                    f"{flag} {unknown[0]}: none of the hosts {shown(hosts)} ({source}); "
                    "expected one of them"
                )
            kept = [host for host in kept if (host in chosen) == (flag == "--include")]
            why += f", {flag} {nodelist}"
    if not kept:
        raise UsageError(
            f"{why}: no host is left of {len(hosts)}; expected one at least; exclude fewer"
        )
    if nodes:
        if nodes < 0 or nodes > len(kept):
            raise UsageError(
                f"-N {nodes}: there are {len(kept)} hosts ({why}); expected from 1 to {len(kept)}"
            )
        kept, why = kept[:nodes], f"the first {nodes} of {len(kept)}: {why}"
    return tuple(kept), why


def match_hosts(names: Iterable[str], hosts: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return those of ``hosts`` that are named, each with its name, in order; and what is none.

    Names mean a host as `same_host` has it; ten thousand of each are matched in one pass.
    """
    exact = set(hosts)
    by_short: dict[str, str] | None = None
    found: dict[str, str] = {}
    unknown: list[str] = []
    for name in names:
        host: str | None = name if name in exact else None
        if host is None and ":" in name:
            # IPv6 has several spellings, and only same_host knows them.
            host = next((each for each in hosts if same_host(each, name)), None)
        elif host is None:
            if by_short is None:
                by_short = {short_name(each).lower(): each for each in reversed(hosts)}
            host = by_short.get(short_name(name).lower())
        if host is None:
            unknown.append(name)
        else:
            found[host] = name
    return found, unknown


def shown(hosts: Sequence[str]) -> str:
    """Return a few hosts for an error; there can be ten thousand."""
    return ", ".join([*hosts[:4], *(["..."] if len(hosts) > 4 else [])])
