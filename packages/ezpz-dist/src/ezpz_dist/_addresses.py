"""Names and addresses: what a name stands for, which address is ours, and which to tell others."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress

from ezpz_topo import RankInfo, get_hostname

from ._errors import SetupError

_RETRIED = 1.5  # seconds in which a name may still come to be known, as on large systems
_LONGEST = 1.8  # seconds for the resolver to say anything: by itself it may take half a minute
_SIOCGIFADDR = 0x8915  # Linux, linux/sockios.h


def is_one_node(info: RankInfo) -> bool:
    return info.local_world_size == info.world_size


def resolve(host: str, info: RankInfo, source: str) -> tuple[str, ...]:
    """Return the numeric addresses of a host, within 2 s, or say by what source it is wrong."""
    found, why = look_up(host, _RETRIED)
    if not found:
        raise SetupError(
            f"rank {info.rank} of {info.world_size} on {get_hostname()}: {source} is {host!r}, "
            f"which does not resolve here ({why}); expected rank 0's host, by a name that every "
            "node knows, or by address; export MASTER_ADDR and MASTER_PORT to name another"
        )
    return found


def look_up(host: str, retried: float = 0.0) -> tuple[tuple[str, ...], str]:
    """Return a host's numeric addresses, and why there are none; it has so long to be known."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        result: list[tuple[tuple[str, ...], str]] = []
    else:
        return (host,), ""

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


def _ask(host: str) -> tuple[str, ...]:
    # As bytes where that will do: a text is made ready for foreign alphabets, which takes 10 ms.
    asked = host.encode() if host.isascii() else host
    answers = socket.getaddrinfo(asked, None, type=socket.SOCK_STREAM)
    # A zone is in the fourth member of the address, and in its text by this.
    texts = (socket.getnameinfo(each[4], socket.NI_NUMERICHOST)[0] for each in answers)
    return tuple(dict.fromkeys(texts))


def is_own(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as asked, suppress(OSError):
        asked.bind((address, 0))
        return True
    return False


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def is_reachable_by_name(host: str) -> bool:
    # Debian gives a host's own name the address 127.0.1.1. Of several, the first of this host's
    # counts: gloo tells that one to the others.
    own = next((each for each in look_up(host)[0] if is_own(each)), None)
    return own is not None and not is_loopback(own)


def on_fast_network(host: str, env: Mapping[str, str]) -> str:
    """Return a host's name on the machine's fast network, as ezpz-launch does; else the same."""
    from ezpz_topo import get_machine_info  # noqa: PLC0415  # ezpz-launch has told the address

    suffix = get_machine_info(env).hsn_suffix
    if not suffix or ":" in host or host.replace(".", "").isdigit():
        return host
    return host.partition(".")[0] + suffix


def advertised(info: RankInfo, env: Mapping[str, str]) -> str:
    """Return by what name, or else address, the other ranks can reach this host."""
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


def gloo_interface(
    info: RankInfo, master_addr: str, master_port: int, env: Mapping[str, str] | None = None
) -> str | None:
    """Return the network interface for ``GLOO_SOCKET_IFNAME``; None to leave the choice to gloo."""
    # gloo tells the other ranks the address that this host's own name stands for. Where that is
    # loopback's (Debian: 127.0.1.1) they cannot connect.
    env = os.environ if env is None else env
    if env.get("GLOO_SOCKET_IFNAME") or is_one_node(info) or is_reachable_by_name(get_hostname()):
        return None
    for address in resolve(master_addr, info, "rank 0's address"):
        source = _source_toward(address, master_port)
        if source is not None and (found := interface_of(source)):
            return found
    # Rank 0's host, whose own name is what does not lead to the others.
    outward = outward_address()
    return None if outward is None else interface_of(outward)


def outward_address() -> str | None:
    """Return this host's address on the default route, else of the first interface; or None."""
    # Of 192.0.2.0/24, which RFC 5737 sets apart: nothing is sent.
    for beyond in ("192.0.2.1", "2001:db8::1"):
        if source := _source_toward(beyond, 9):
            return source
    return next((address for _, address in _interfaces() if not is_loopback(address)), None)


def _source_toward(address: str, port: int) -> str | None:
    """Return this host's address on the way to another; None if there is no way, or loopback's."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as asked:
        try:
            # Connecting a datagram socket asks the routing table, and sends nothing.
            asked.connect((address, port))
        except OSError:
            return None
        source = str(asked.getsockname()[0])
    return None if is_loopback(source) else source


def interface_of(address: str) -> str | None:
    bare = address.partition("%")[0]
    return next((name for name, each in _interfaces() if each == bare), None)


def _interfaces() -> Iterator[tuple[str, str]]:
    """Yield interface and numeric address, in the kernel's order; nothing but on Linux."""
    if sys.platform != "linux":
        return
    from fcntl import ioctl  # noqa: PLC0415  # not on every system

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = ioctl(asked, _SIOCGIFADDR, request)
            except OSError:
                continue  # it has no IPv4 address
            yield name, socket.inet_ntoa(answer[20:24])
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as lines:
            found = [line.split() for line in lines]
    except OSError:
        return  # no IPv6 here
    for fields in found:
        yield fields[5], socket.inet_ntop(socket.AF_INET6, bytes.fromhex(fields[0]))
