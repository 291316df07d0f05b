"""Host names: this host's own, and when two names mean the same host."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

_NAME = r"[A-Za-z0-9_][A-Za-z0-9_-]*(?:\.[A-Za-z0-9_][A-Za-z0-9_-]*)*\.?"
_MAX_NAME = 254  # DNS: 253 characters, and the final dot
_OCTETS = frozenset(str(number) for number in range(256))


def get_hostname() -> str:
    """Return this host's name as the kernel has it (what ``hostname`` prints)."""
    return os.uname().nodename


def short_name(host: str) -> str:
    """Return the part before the first dot: the suffix differs between PBS and ``hostname``.

    An address has no suffix and stays whole.

    >>> short_name("x1n0.hsn.example"), short_name("10.0.0.1"), short_name("fe80::1")
    ('x1n0', '10.0.0.1', 'fe80::1')
    """
    return host if ":" in host or _is_numeric(host) else host.partition(".")[0]


def same_host(a: str, b: str) -> bool:
    """Return whether two names mean the same host: by short name, whatever the case.

    Addresses are compared whole, and never with a name: nothing is looked up.

    >>> same_host("x1n0", "X1N0.hsn.example"), same_host("10.0.0.1", "10.0.0.2")
    (True, False)
    """
    return host_key(a) == host_key(b)


def find_host(host: str, hosts: Sequence[str]) -> str | None:
    """Return the first of these names that means this host, as it stands there (`same_host`)."""
    key = host_key(host)
    # Few of ten thousand begin alike, and only those are looked at. IPv6 has several spellings.
    start = "" if ":" in key else key
    if start not in "\n".join(hosts).lower():
        return None
    for each in hosts:
        if each.lower().startswith(start) and host_key(each) == key:
            return each
    return None


def host_key(host: str) -> str:
    """Return what all spellings of one host have in common."""
    if ":" in host:
        return _ipv6(host.removeprefix("[").removesuffix("]")) or host.lower()
    return short_name(host).lower()


def is_host(text: str) -> bool:
    """Return whether this is a host's name, an IPv4 or an IPv6 address (without brackets).

    All digits, or a number of dotted ones other than four, is neither: the resolver would
    take ``12`` for 0.0.0.12.
    """
    if ":" in text:
        return _ipv6(text) is not None
    if _is_numeric(text):
        # "010" is 8 to some resolvers and 10 to others.
        octets = text.split(".")
        return len(octets) == 4 and all(octet in _OCTETS for octet in octets)
    return len(text) <= _MAX_NAME and re.fullmatch(_NAME, text) is not None


def _is_numeric(host: str) -> bool:
    return host.replace(".", "").isdigit()


def _ipv6(text: str) -> str | None:
    """Return the one spelling of an IPv6 address; None if it is none, or has a zone."""
    # A zone (fe80::1%eth0) holds on one host only, and may have any character in it.
    if "%" in text:
        return None
    import ipaddress  # noqa: PLC0415  # 2 ms, and only IPv6 pays for it

    try:
        return str(ipaddress.IPv6Address(text))
    except ValueError:
        return None
