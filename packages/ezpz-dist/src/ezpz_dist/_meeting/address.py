"""Names and addresses: what a name stands for, which address is ours, and which to tell others."""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Mapping

from ezpz_dist._errors import SetupError
from ezpz_topo import RankInfo, get_hostname, get_machine_info

from .interface import outward_address

_RETRIED = 1.5
"""Seconds in which a name may still come to be known: on large systems it sometimes does."""

_LONGEST = 1.8
"""Seconds for the resolver to say anything at all: by itself it may take half a minute."""


def is_one_node(info: RankInfo) -> bool:
    """Return whether every rank is on this node; False where the launcher does not tell."""
    return info.local_world_size == info.world_size


def literal(host: str) -> str:
    """Return a host without the brackets that IPv6 addresses have in URLs."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def resolve(host: str, info: RankInfo, source: str) -> tuple[str, ...]:
    """Return the numeric addresses of a host, within 2 s.

    Args:
        host: A name, or an address.
        info: This rank, for the message.
        source: Where the name was found, for the message: ``"MASTER_ADDR"``.

    Raises:
        SetupError: The name does not resolve here.
    """
    found, why = look_up(host, _RETRIED)
    if not found:
        raise SetupError(
            f"rank {info.rank} of {info.world_size} on {get_hostname()}: {source} is {host!r}, "
            f"which does not resolve here ({why}); expected rank 0's host, by a name that every "
            "node knows, or by address; export MASTER_ADDR and MASTER_PORT to name another"
        )
    return found


def look_up(host: str, retried: float = 0.0) -> tuple[tuple[str, ...], str]:
    """Return the numeric addresses of a host, and why there are none.

    Args:
        host: A name, or an address.
        retried: Seconds for a name to come to be known.
    """
    if _is_numeric(host):
        return (host,), ""
    result: list[tuple[tuple[str, ...], str]] = []

    def ask() -> None:
        deadline = time.monotonic() + retried
        while True:
            try:
                result.append((_ask(host), ""))
            except (OSError, ValueError) as error:  # ValueError: nothing that a name can be
                reason = getattr(error, "strerror", None) or str(error)
                if isinstance(error, OSError) and time.monotonic() < deadline:
                    time.sleep(0.1)
                    continue
                result.append(((), reason))
            return

    # The resolver's own time-outs cannot be set: it is left behind if it does not answer.
    asking = threading.Thread(target=ask, name="ezpz-resolve", daemon=True)
    asking.start()
    asking.join(_LONGEST)
    return result[0] if result else ((), f"the resolver has not answered in {_LONGEST:g} s")


def _is_numeric(host: str) -> bool:
    """Return whether this is a numeric address, with or without a zone (``fe80::1%eth0``)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.inet_pton(family, host.partition("%")[0])
    except (OSError, ValueError):  # ValueError: a null character
        return False
    return True


def _ask(host: str) -> tuple[str, ...]:
    # As bytes where that will do: a text is made ready for foreign alphabets, which takes 10 ms.
    asked = host.encode() if host.isascii() else host
    answers = socket.getaddrinfo(asked, None, type=socket.SOCK_STREAM)
    # A zone is in the fourth member of the address, and in its text by this.
    texts = (socket.getnameinfo(each[4], socket.NI_NUMERICHOST)[0] for each in answers)
    return tuple(dict.fromkeys(texts))


def is_own(address: str) -> bool:
    """Return whether a numeric address is one of this host's."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def is_loopback(address: str) -> bool:
    """Return whether a numeric address means the host itself, whichever that is."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_reachable_by_name(host: str) -> bool:
    """Return whether a name of this host stands for an address that others can reach.

    Debian gives a host's own name the address 127.0.1.1. Of several, the first of this host's
    counts: gloo tells that one to the others.
    """
    found, _ = look_up(host)
    own = next((each for each in found if is_own(each)), None)
    return own is not None and not is_loopback(own)


def on_fast_network(host: str, env: Mapping[str, str]) -> str:
    """Return a host's name on the machine's fast network, where it has one; else the same.

    The choice that ezpz-launch makes: ``hsn_suffix`` in the machine's file.
    """
    suffix = get_machine_info(env).hsn_suffix
    if not suffix or ":" in host or host.replace(".", "").isdigit():
        return host
    return host.partition(".")[0] + suffix


def advertised(info: RankInfo, env: Mapping[str, str]) -> str:
    """Return by what name, or else address, the other ranks can reach this host.

    Raises:
        SetupError: It has none but loopback's.
    """
    if is_one_node(info):
        # Works on laptops whose own name resolves to nothing, or to a dead VPN address.
        return "127.0.0.1"
    name = get_hostname()
    for each in dict.fromkeys((on_fast_network(name, env), name)):
        if is_reachable_by_name(each):
            return each
    address = outward_address()
    if address is None:
        raise SetupError(
            f"rank 0's host {name} has no address that other nodes could reach: its name does not "
            "stand for one, and no interface but loopback is up; expected an address; export "
            "MASTER_ADDR and MASTER_PORT to name one"
        )
    return address
