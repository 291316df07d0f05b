"""Which hosts a launch may use: all that we were given, less what the user leaves out."""

from __future__ import annotations

from collections.abc import Sequence

from ezpz_topo import expand_nodelist, same_host

from ._errors import UsageError


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
            named = [_one_of(hosts, name, flag, source) for name in expand_nodelist(nodelist)]
            chosen = set(named)
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


def _one_of(hosts: Sequence[str], name: str, flag: str, source: str) -> str:
    for host in hosts:
        if host == name or same_host(host, name):
            return host
    shown = ", ".join([*hosts[:4], *(["..."] if len(hosts) > 4 else [])])
    raise UsageError(f"{flag} {name}: none of the hosts {shown} ({source}); expected one of them")
