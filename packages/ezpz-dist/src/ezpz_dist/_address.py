"""Where ranks meet: the job, the place, names and addresses of hosts and their interfaces."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Self

from ezpz_topo import RankInfo, get_hostname, get_machine_info

from ._errors import SetupError

# Names and addresses: what a name stands for, which address is ours, and which to tell others.

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


# The network interfaces of this host, and which of them leads to the others.

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


# The hosts of all ranks, made short: rank 0 sends them to every other one.

_NUMBER = re.compile("([0-9]{1,15})")


def fold_hosts(hosts: Sequence[str]) -> dict[str, Any]:
    """Return the hosts of all ranks as JSON that compresses well; `unfold_hosts` undoes it.

    Each name stands once, as the differences of its numbers from the name before. Compressed,
    the names of 10,080 hosts, regular but for gaps, take 2 kB in place of 25 kB.

    >>> fold_hosts(["x1c0n0", "x1c0n0", "x1c0n1", "x1c1n0"])
    {'names': ['x1c0n0', [0, 0, 1], [0, 1, -1]], 'steps': [0, 0, 1, 1]}
    """
    places = {name: place for place, name in enumerate(dict.fromkeys(hosts))}
    at = [places[host] for host in hosts]
    steps = [here - before for before, here in zip([0, *at], at, strict=False)]
    return {"names": list(_fold_names(places)), "steps": steps}


def unfold_hosts(folded: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the hosts, by rank, that were folded."""
    names = list(_unfold_names(folded["names"]))
    return tuple(names[place] for place in accumulate(folded["steps"]))


def _fold_names(names: Iterable[str]) -> Iterator[str | list[int]]:
    before: list[str] = []
    for name in names:
        parts = _NUMBER.split(name)
        yield _difference(before, parts) or name
        before = parts


def _difference(before: list[str], parts: list[str]) -> list[int]:
    """Return by how much each number differs; nothing where the text does, or the width."""
    if before[::2] != parts[::2]:
        return []
    steps = [int(new) - int(old) for old, new in zip(before[1::2], parts[1::2], strict=True)]
    return steps if _step(before, steps) == parts else []


def _unfold_names(folded: Iterable[str | list[int]]) -> Iterator[str]:
    parts: list[str] = []
    for each in folded:
        parts = _NUMBER.split(each) if isinstance(each, str) else _step(parts, each)
        yield "".join(parts)


def _step(before: list[str], steps: list[int]) -> list[str]:
    parts = before.copy()
    for at, step in enumerate(steps):
        if step:
            old = before[2 * at + 1]
            parts[2 * at + 1] = f"{int(old) + step:0{len(old)}d}"
    return parts


# Which job a store belongs to: what rank 0 writes into it, and what the others compare.

_OF_ANY = {
    # The parts of a heterogeneous Slurm job have numbers of their own, and one in common.
    "Slurm job": ("SLURM_HET_JOB_ID", "SLURM_JOB_ID"),
    "PBS job": ("PBS_JOBID",),
}
_OF_LAUNCHER = {
    "ezpz": {"launch": ("EZPZ_LAUNCH_ID",), "attempt": ("EZPZ_ATTEMPT",)},
    "torchrun": {"run": ("TORCHELASTIC_RUN_ID",), "restart": ("TORCHELASTIC_RESTART_COUNT",)},
    # Ranks that another launcher started may lie in several steps: they are one world still.
    "slurm": {"Slurm step": ("SLURM_STEP_ID",)},
}


@dataclass(frozen=True, slots=True)
class Job:
    """What a rank knows of the job that it is part of.

    Attributes:
        facts: Such as ``{"user": "1000", "PBS job": "7.pbs"}``. Not every rank need know all of
            them: a variable may reach some nodes only.
        host: Where the process runs that wrote this.
        pid: Its process id there.
    """

    facts: Mapping[str, str]
    host: str
    pid: int

    @classmethod
    def of(cls, info: RankInfo, port: int, env: Mapping[str, str]) -> Self:
        """Return this rank's job.

        Args:
            info: This rank.
            port: Where the ranks were told to meet. The address is no part of it: rank 0's own
                is often ``localhost`` to itself.
            env: The environment to read.
        """
        names = _OF_ANY | _OF_LAUNCHER.get(info.launcher, {})
        facts = {"user": str(os.getuid()), "port": str(port)}
        for fact, variables in names.items():
            value = next((env[name] for name in variables if env.get(name)), None)
            if value is not None:
                facts[fact] = value
        return cls(facts, get_hostname(), os.getpid())

    @classmethod
    def read(cls, written: bytes) -> Self | None:
        """Return the job that was written; None if this is no such thing."""
        try:
            facts, host, pid = json.loads(written)
            return cls({key: str(value) for key, value in facts.items()}, str(host), int(pid))
        except (ValueError, TypeError, AttributeError):
            return None

    def written(self) -> bytes:
        """Return what `read` reads."""
        return json.dumps([dict(self.facts), self.host, self.pid]).encode()

    def differs(self, other: Job) -> str:
        """Return by what this is another job than the other; an empty text if it is the same."""
        both = self.facts.keys() & other.facts.keys()
        return ", ".join(
            f"{key} {self.facts[key]}, not {other.facts[key]}"
            for key in sorted(both)
            if self.facts[key] != other.facts[key]
        )


# Where the ranks were told to meet, and what they know of it beforehand.

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
