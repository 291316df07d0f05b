"""Rank 0's part: hold a port, and keep the store behind it open."""

from __future__ import annotations

import errno
import logging
import os
import resource
import socket
import sys
import zlib
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import (  # type: ignore[attr-defined]  # torch exports them so
    TCPStore,
)

from ezpz_dist._errors import SetupError
from ezpz_topo import RankInfo, get_hostname

from .address import is_loopback, is_one_node, is_own
from .job import Job
from .place import Place
from .visit import JOB_KEY, NobodyError, StrangerError, visit

logger = logging.getLogger(__name__)

# Below Linux's and macOS's ephemeral ranges, so that no outgoing connection holds it.
PORTS = range(20000, 30000)

_CANDIDATES = 8

_BACKLOG = 1 << 16
"""Connections that wait to be accepted, as far as the system lets us: all ranks come at once."""

_OTHER_FILES = 512
"""Files that rank 0 may have open beside its connections."""

_PATIENCE = 0.5
"""Seconds for whoever holds a port to answer, and for a rank 0 to write its job."""


def candidates(port: int) -> tuple[int, ...]:
    """Return the ports to try, best first: the same on every rank.

    >>> candidates(29500)[:3]
    (29500, 20193, 26795)
    """
    found = {port: None}
    step = 0
    while len(found) < _CANDIDATES:
        step += 1
        found[derived_port(f"{port}.{step}")] = None
    return tuple(found)


def derived_port(text: str) -> int:
    """Return a port below the ephemeral ones for a text, the same everywhere."""
    return PORTS[zlib.crc32(text.encode()) % len(PORTS)]


def open_store(place: Place, info: RankInfo, timeout: timedelta) -> tuple[TCPStore, str, int]:
    """Open the store at the first port that is free; return it, with its address and port here.

    Args:
        place: Where the others look for it.
        info: This rank, which is 0.
        timeout: The store's.

    Raises:
        SetupError: A rank 0 of this job is there already, or no port can be had.
    """
    assert place.job is not None
    loopback = next((each for each in place.addresses if is_loopback(each)), "127.0.0.1")
    # Where every rank is here, nobody else need reach the store. Elsewhere MASTER_ADDR may be
    # localhost on rank 0 alone: some operators of Kubernetes export it so.
    inside = is_one_node(info) and all(is_loopback(each) for each in place.addresses)
    taken: list[str] = []
    _make_room(info.world_size)
    for wanted in place.ports:
        try:
            listener = _listen(loopback if inside else "", wanted)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise SetupError(
                    f"rank 0 of {info.world_size} on {get_hostname()} cannot listen on port "
                    f"{wanted} ({place.source}): {error.strerror}; expected a port of its own; "
                    "export MASTER_ADDR and MASTER_PORT to choose another"
                ) from error
            why = (error.strerror or "").lower()
            if error.errno == errno.EADDRINUSE:
                why = _held_by(info, (loopback, *place.addresses), wanted, place.job)
            taken.append(f"{wanted}: {why}")
            continue
        address, port = loopback if inside else "127.0.0.1", listener.getsockname()[1]
        store = TCPStore(
            address, port, None,
            is_master=True, timeout=timeout, wait_for_workers=False,
            # A script's own init_process_group then finds this store instead of a taken port.
            multi_tenant=True, master_listen_fd=listener.detach(), use_libuv=_use_libuv(),
        )  # fmt: skip
        store.set(JOB_KEY, place.job.written().decode())
        if taken:
            logger.warning(
                "rank 0 listens on port %d, for %s is taken (%s)", port, place, "; ".join(taken)
            )
        return store, address, port
    raise SetupError(
        f"rank 0 of {info.world_size} on {get_hostname()} finds no free port for {place}: "
        f"{'; '.join(taken)}; expected one of these to be free; export another MASTER_PORT on "
        "every rank"
    )


def warn_of_a_foreign_address(place: Place) -> None:
    """Say so if what the others take for rank 0's address is not this host's.

    Not an error: behind a service of Kubernetes it is so, and works.
    """
    if not any(is_own(each) for each in place.addresses):
        logger.warning(
            "rank 0 is on %s, and the other ranks look for it at %s, which is no address of this "
            "host (%s); export rank 0's own host as MASTER_ADDR if they do not find it",
            get_hostname(), place, ", ".join(place.addresses),
        )  # fmt: skip


def _make_room(world_size: int) -> None:
    """Let this process hold a connection of every rank, its watcher's, and one that asks."""
    wanted = 3 * world_size + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        logger.warning(
            "rank 0 may open %d files, and holds up to three connections for each of %d ranks; "
            "expected %d; raise the hard limit (ulimit -Hn) for larger worlds",
            allowed, world_size, wanted,
        )  # fmt: skip


def _listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens; an empty address is every one of this host, as torch does."""
    if address:
        families = [(socket.AF_INET6 if ":" in address else socket.AF_INET, address)]
    else:
        families = [(socket.AF_INET6, "::"), (socket.AF_INET, "")]
    for family, host in families:
        try:
            listener = socket.socket(family)
        except OSError:
            if family == socket.AF_INET:
                raise
            continue  # a kernel without IPv6
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if host == "::":
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.bind((host, port))
            # Two may hold the same port until one listens: the other must learn of it now.
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            if host == "::" and error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                continue
            raise
        return listener
    raise AssertionError("IPv4 was tried last")


def _held_by(info: RankInfo, addresses: Sequence[str], port: int, job: Job) -> str:
    """Return who holds a port of this host, in words.

    Raises:
        SetupError: It is a rank 0 of this job.
    """
    why = "held by a process that does not listen"
    for address in dict.fromkeys(addresses):
        if not is_own(address):
            continue
        try:
            limit = timedelta(seconds=max(1.0, _PATIENCE))
            _, found = visit(address, port, _PATIENCE, limit, job, patience=_PATIENCE)
        except NobodyError:
            continue
        except StrangerError as error:
            why = f"held by {error}"
            continue
        assert found is not None
        raise SetupError(
            f"rank 0 of {info.world_size} is there twice: process {found.pid} on {found.host} "
            f"holds port {port}, and this is process {os.getpid()} on {get_hostname()}; expected "
            "one; give each rank its own RANK, end what is left of an earlier run, or give another "
            "job another MASTER_PORT"
        )
    return why


def _use_libuv() -> bool:
    """Return torch's own choice of the server: a torch without libuv must be told so."""
    return os.environ.get("USE_LIBUV", "0" if sys.platform == "win32" else "1") == "1"
