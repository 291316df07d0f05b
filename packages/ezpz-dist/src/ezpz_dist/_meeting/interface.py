"""The network interfaces of this host, and which of them leads to the others."""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Iterator

_SIOCGIFADDR = 0x8915  # Linux, linux/sockios.h


def interface_toward(address: str, port: int) -> str | None:
    """Return the interface from which this host reaches a numeric address and a port there.

    None where it cannot be told (another system than Linux), or is loopback.
    """
    source = _source_toward(address, port)
    return None if source is None else _interface_of(source)


def outward_address() -> str | None:
    """Return an address of this host that is not loopback's; None if there is none.

    That of the default route, else of the first interface that is up.
    """
    # Of 192.0.2.0/24, which RFC 5737 sets apart: nothing is sent.
    for beyond in ("192.0.2.1", "2001:db8::1"):
        source = _source_toward(beyond, 9)
        if source is not None:
            return source
    return next((address for _, address in _addresses() if not _is_loopback(address)), None)


def outward_interface() -> str | None:
    """Return the interface of `outward_address`."""
    address = outward_address()
    return None if address is None else _interface_of(address)


def _source_toward(address: str, port: int) -> str | None:
    """Return this host's address on the way to another; None if there is no way, or loopback's."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a datagram socket asks the routing table, and sends nothing.
            probe.connect((address, port))
        except OSError:
            return None
        source = str(probe.getsockname()[0])
    return None if _is_loopback(source) else source


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _interface_of(address: str) -> str | None:
    bare = address.partition("%")[0]
    return next((name for name, each in _addresses() if each == bare), None)


def _addresses() -> Iterator[tuple[str, str]]:
    """Yield interface and numeric address, in the kernel's order."""
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
