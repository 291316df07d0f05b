"""How ranks find each other: rank 0 keeps a store, and the others look for it."""

from __future__ import annotations

import errno
import logging
import os
import resource
import socket
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import (  # type: ignore[attr-defined]  # torch exports them so  # type: ignore[attr-defined]  # torch exports them so
    DistNetworkError,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)

from ezpz_topo import RankInfo, first_host, get_hostname

from . import _mpi
from ._address import (
    SAY_AFTER,
    Job,
    Place,
    advertised,
    interface_toward,
    is_loopback,
    is_one_node,
    is_own,
    is_reachable_by_name,
    literal,
    name,
    on_fast_network,
    outward_interface,
    resolve,
    speaks,
)
from ._errors import SetupError

# Go to a port and see whether this job's store is behind it, however odd what answers.

JOB_KEY = "ezpz-job"
"""Where rank 0 writes its job, before anything else."""

# What torch's client sends first: VALIDATE with its magic number, then PING with a number
# that comes back. So from torch 2.3 to 2.13 (TCPStoreBackend.hpp); a test holds it.
_GREETING = b"\x00" + (0x3C85F7CE).to_bytes(4, "little") + b"\x0d"


class NobodyError(Exception):
    """Nothing listens there, or nothing that can be reached."""


class StrangerError(Exception):
    """Something listens there that is not this job's store."""


def visit(
    address: str,
    port: int,
    limit: float,
    timeout: timedelta,
    job: Job | None,
    *,
    patience: float = 0.0,
) -> tuple[TCPStore, Job | None]:
    """Return a client of this job's store, and what rank 0 wrote into it.

    Args:
        address: Numeric.
        port: The port.
        limit: Seconds for each answer that is waited for.
        timeout: The client's own time-out, as torch's client has one.
        job: What the store must be of; None: any store will do, and nothing is read.
        patience: Seconds for rank 0 to write what it is.

    Raises:
        NobodyError: There is no listener.
        StrangerError: It is not this job's store.
    """
    knock(address, port, limit)
    try:
        # Without a world size: torch would sleep up to as many milliseconds as there are ranks.
        store = TCPStore(
            address, port, None, is_master=False, timeout=_time_to_connect(timeout),
            wait_for_workers=False,
        )  # fmt: skip
        store.set_timeout(timeout)
    except DistNetworkError as error:
        raise NobodyError(f"a store of torch that went away ({error})") from error
    if job is None:
        return store, None
    try:
        # Not torch's own wait: where it is in vain it prints a page, and may take seconds for it.
        until = time.monotonic() + patience
        while not (written := store.check([JOB_KEY])) and time.monotonic() < until:
            time.sleep(0.001)
        found = Job.read(store.get(JOB_KEY)) if written else None
    except DistNetworkError as error:
        raise NobodyError(f"a store of torch that went away ({error})") from error
    if found is None:
        raise StrangerError("a store of torch that no ezpz_dist opened")
    difference = found.differs(job)
    if difference:
        raise StrangerError(
            f"the store of another job, by process {found.pid} on {found.host} ({difference})"
        )
    return store, found


def knock(address: str, port: int, limit: float) -> None:
    """Find out whether a store of torch answers.

    Raises:
        NobodyError: There is no listener.
        StrangerError: There is one, but it does not answer as a store of torch does.
    """
    number = os.urandom(4)
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as connection:
        connection.settimeout(limit)
        _connect(connection, address, port)
        answer = b""
        try:
            connection.sendall(_GREETING + number)
            while len(answer) < len(number):
                piece = connection.recv(len(number) - len(answer))
                if not piece:
                    raise StrangerError("a listener that closes the connection")
                answer += piece
        except TimeoutError:
            raise StrangerError(f"a listener that says nothing for {limit:.2g} s") from None
        except OSError as error:
            raise StrangerError(f"a listener that breaks off ({error.strerror})") from error
    if answer != number:
        raise StrangerError(f"a listener that is no store of torch (it answers {answer!r})")


def _connect(connection: socket.socket, address: str, port: int) -> None:
    try:
        connection.connect((address, port))
    except TimeoutError:
        raise NobodyError(f"no answer within {connection.gettimeout():.2g} s") from None
    except ConnectionResetError as error:
        # Between the kernel's yes and our next look.
        raise StrangerError(f"a listener that breaks off ({error.strerror})") from error
    except OSError as error:
        raise NobodyError((error.strerror or str(error)).lower()) from error
    if connection.getsockname() == connection.getpeername():
        # The kernel gave us that very port to connect from.
        raise NobodyError("connection refused")


def _time_to_connect(timeout: timedelta) -> timedelta:
    """Return torch's time for a connection, at most half a minute.

    So long it tries again where nobody listens any more. It may need it: it looks up the name of
    the address, only for its messages, and where no name server answers that takes 5 s and more.
    """
    # Less than a second is 0 to it.
    return max(timedelta(seconds=1), min(timeout, timedelta(seconds=30)))


# The other ranks' part: look for rank 0's store until it is there.

logger = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05
# So that ten thousand ranks ask twenty thousand times a second at most, and not all at once.
_PAUSE_A_RANK, _SPREAD_A_RANK, _MANY_RANKS = 5e-5, 2e-5, 256
_FIRST_LOOK_EVERYWHERE = 0.25
_WRITING = 0.05
"""Seconds from rank 0's opening of the store to its first key."""

_Seen = dict[tuple[str, int], tuple[str, bool]]
"""At each address and port: what is there, in words, and whether the port is taken."""


def find_store(place: Place, info: RankInfo, timeout: timedelta) -> tuple[TCPStore, str, int]:
    """Return a client of rank 0's store, with the address and the port where it was found.

    A port is passed over when something else than this job's store is behind it; what rank 0
    has only not opened yet is waited for.

    Args:
        place: Where to look.
        info: This rank.
        timeout: For all of it, and then the store's own.

    Raises:
        SetupError: The store was not there in time; says what was seen at each port.
    """
    start = time.monotonic()
    end = start + timeout.total_seconds()
    pause, longest = _FIRST_PAUSE, max(_LONGEST_PAUSE, info.world_size * _PAUSE_A_RANK)
    everywhere_at, say_at = _FIRST_LOOK_EVERYWHERE, SAY_AFTER
    seen: _Seen = {}
    if info.world_size >= _MANY_RANKS:
        # Their coming all at once would overrun the listener's queue.
        time.sleep(min(_chance() * info.world_size * _SPREAD_A_RANK, end - start))
    while True:
        elapsed = time.monotonic() - start
        everywhere = elapsed >= everywhere_at
        if everywhere:
            everywhere_at = 2 * elapsed
        limit = _limit(info, elapsed)
        for address, port in _doors(place, seen, everywhere=everywhere):
            left = max(end - time.monotonic(), 0.01)
            try:
                store, _ = visit(
                    address, port, min(limit, left), timeout, place.job, patience=_WRITING
                )
            except (NobodyError, StrangerError) as error:
                # Not the error itself: the connection would live as long.
                seen[address, port] = str(error), isinstance(error, StrangerError)
            else:
                return store, address, port
        if time.monotonic() >= end:
            break
        if elapsed >= say_at:
            say_at = float("inf")
            if speaks(info):
                logger.warning(
                    "%s has waited %.0f s for %s", _who(info), elapsed, _what(place, seen)
                )
        time.sleep(max(min(pause * (0.5 + _chance()), end - time.monotonic()), 0))
        pause = min(1.5 * pause, longest)
    raise SetupError(
        f"{_who(info)} has waited {timeout.total_seconds():g} s for {_what(place, seen)}; expected "
        "rank 0 to call setup_torch and listen there; check that it started, that it did not fail "
        "earlier, and that this host may connect to it"
    )


def _doors(place: Place, seen: _Seen, *, everywhere: bool) -> Iterator[tuple[str, int]]:
    """Yield address and port of where to look now; what is seen there comes into ``seen``.

    Rank 0 goes past a taken port, and so do we. But whoever holds it may be gone again, or not
    be seen from here: so now and then they are all looked at.
    """
    for port in place.ports:
        for address in place.addresses:
            yield address, port
        taken = any(seen[address, port][1] for address in place.addresses)
        if not (taken or everywhere):
            return


def _limit(info: RankInfo, elapsed: float) -> float:
    """Return the seconds for an answer: few, but a busy store must get to answer in the end."""
    return min(max(0.5 + info.world_size * 1e-4, elapsed / 10), 5.0)


def _who(info: RankInfo) -> str:
    return f"rank {info.rank} of {info.world_size} on {get_hostname()}"


def _what(place: Place, seen: _Seen) -> str:
    there = "; ".join(f"{name(*door)}: {what}" for door, (what, _) in seen.items())
    return f"rank 0's store at {place}, and finds at {there}"


def _chance() -> float:
    """Return a number from 0 to 1, without touching the random stream of the script."""
    return int.from_bytes(os.urandom(4), "little") / 2**32


# Rank 0's part: hold a port, and keep the store behind it open.

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


# How the ranks find each other: an address all of them know, and a store behind it.

MPI_LAUNCHERS = frozenset({"openmpi", "mvapich2", "pals", "pmi", "flux", "jsrun"})
"""Launchers whose ranks form one MPI world, so that MPI can carry the address."""

_LOST_AFTER = 5.0
"""Seconds for a store that was there to answer once more."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks meet.

    Attributes:
        store: The store for ``init_process_group``.
        master_addr: Host name or address of rank 0.
        master_port: Its TCP port; 0 in a world of one, which listens nowhere.
        source: How the address came to be known, for people.
        reached: The numeric address by which this rank reaches the store.
        prefix: Under which this job's keys are in the server; empty if they are alone in it.
    """

    store: Store
    master_addr: str
    master_port: int
    source: str
    reached: str = ""
    prefix: str = ""


_met: dict[tuple[str, int, str, int], Rendezvous] = {}
"""By host, port, source and rank, kept until exit: were rank 0 to close its store and
open it again for a second set-up, a faster rank could still meet the first and be cut off."""


def meet(info: RankInfo, timeout: timedelta, env: Mapping[str, str] | None = None) -> Rendezvous:
    """Find the store at which this job's ranks meet. Collective: every rank calls this.

    A complete ``MASTER_ADDR`` and ``MASTER_PORT`` decide. Else rank 0 of an MPI launcher
    binds a free port, keeps it, and broadcasts it over MPI; ranks of a Slurm step derive
    the same address from the step. Where the port is taken, rank 0 takes another one that
    the others look at too; no rank takes another job's store, or what is no store, for its own.

    Raises:
        SetupError: No address can be agreed upon, or nobody is there in time.
        ezpz_topo.TopoError: The machine's file or the step's nodelist is wrong.
    """
    env = os.environ if env is None else env
    if info.world_size == 1:
        return Rendezvous(HashStore(), "127.0.0.1", 0, "a world of one")
    addr, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if addr and port:
        return _at_master(info, timeout, env, literal(addr), _port_number(port))
    if info.launcher in MPI_LAUNCHERS:
        return _over_mpi(info, timeout, env)
    if info.launcher == "slurm":
        return _of_slurm_step(info, timeout, env)
    missing = " and ".join(n for n, v in (("MASTER_ADDR", addr), ("MASTER_PORT", port)) if not v)
    raise SetupError(
        f"rank {info.rank} of {info.world_size} ({info.launcher}) has no {missing}; expected the "
        "address of rank 0; start the ranks with ezpz-launch or torchrun, or export both"
    )


def side_store(meeting: Rendezvous, timeout: timedelta) -> Store:
    """Return a second connection to the ranks' store, for another thread. Not collective.

    Args:
        meeting: What `meet` returned, in a world of several ranks.
        timeout: For each of its requests.

    Raises:
        torch.distributed.DistNetworkError: The store does not answer any more: what any
            request on it raises then.
    """
    limit = min(timeout.total_seconds(), _LOST_AFTER)
    try:
        store, _ = visit(meeting.reached, meeting.master_port, limit, timeout, job=None)
    except (NobodyError, StrangerError) as error:
        raise DistNetworkError(
            f"rank 0's store at {name(meeting.master_addr, meeting.master_port)} "
            f"({meeting.source}) is gone: {error}"
        ) from error
    return PrefixStore(meeting.prefix, store) if meeting.prefix else store


def gloo_interface(
    info: RankInfo, master_addr: str, master_port: int, env: Mapping[str, str] | None = None
) -> str | None:
    """Return the network interface for ``GLOO_SOCKET_IFNAME``; None to leave the choice to gloo.

    gloo tells the other ranks the address that this host's own name stands for. Where that
    is loopback's (Debian: 127.0.1.1) they cannot connect, and it takes the interface's instead.

    Args:
        info: This rank.
        master_addr: Rank 0's host, as `meet` returned it.
        master_port: Its port there; nothing is sent.
        env: The environment to read; default ``os.environ``.

    Raises:
        SetupError: Rank 0's host does not resolve.
    """
    env = os.environ if env is None else env
    if env.get("GLOO_SOCKET_IFNAME") or is_one_node(info) or is_reachable_by_name(get_hostname()):
        return None
    for address in resolve(master_addr, info, "rank 0's address"):
        if not is_loopback(address) and (found := interface_toward(address, master_port)):
            return found
    # Rank 0's host, whose own name is what does not lead to the others.
    return outward_interface()


def _at_master(
    info: RankInfo, timeout: timedelta, env: Mapping[str, str], addr: str, port: int
) -> Rendezvous:
    source = "MASTER_ADDR and MASTER_PORT"
    addresses = resolve(addr, info, "MASTER_ADDR")
    if info.launcher == "torchrun" and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun's agent holds the store, through restarts of the ranks too.
        prefix = f"ezpz-restart-{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        tcp, reached, _ = find_store(Place(addr, addresses, (port,), None, source), info, timeout)
        return Rendezvous(PrefixStore(prefix, tcp), addr, port, source, reached, prefix)
    job = Job.of(info, port, env)
    return _meet_at(Place(addr, addresses, candidates(port), job, source), info, timeout)


def _of_slurm_step(info: RankInfo, timeout: timedelta, env: Mapping[str, str]) -> Rendezvous:
    if is_one_node(info):
        host = "127.0.0.1"
    else:
        # SLURM_NODELIST names the whole job; a step can be smaller.
        host = on_fast_network(first_host(env.get("SLURM_STEP_NODELIST", "")), env)
    addresses = resolve(host, info, "the step's first host")
    step = f"{env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID')}"
    port = derived_port(step)
    source, job = f"derived from Slurm step {step}", Job.of(info, port, env)
    return _meet_at(Place(host, addresses, candidates(port), job, source), info, timeout)


def _meet_at(place: Place, info: RankInfo, timeout: timedelta) -> Rendezvous:
    """Meet at a place that every rank knows; rank 0 opens the store, there or nearby."""
    told = place.host, place.ports[0], place.source, info.rank
    if told not in _met:
        if info.rank == 0:
            warn_of_a_foreign_address(place)
            store, reached, port = open_store(place, info, timeout)
        else:
            store, reached, port = find_store(place, info, timeout)
        _met[told] = Rendezvous(store, place.host, port, place.source, reached)
    return _met[told]


def _over_mpi(info: RankInfo, timeout: timedelta, env: Mapping[str, str]) -> Rendezvous:
    source, job = "bound by rank 0, broadcast over MPI", Job.of(info, 0, env)
    store: Store | None = None
    host, port, reached, trouble = "", 0, "", ""
    addresses: tuple[str, ...] = ()
    if info.rank == 0:
        try:
            host = advertised(info, env)
            if is_one_node(info):
                addresses = (host,)
            place = Place(host, addresses, (0,), job, source)
            store, reached, port = open_store(place, info, timeout)
        except SetupError as error:
            # Told to all of them: they would wait for an address that never comes.
            trouble = str(error)[:600]
    host, port, trouble = _mpi.broadcast_once((host, port, trouble), info, timeout.total_seconds())
    if trouble:
        raise SetupError(trouble)
    if store is None:
        addresses = resolve(host, info, "the address that rank 0 broadcast")
        place = Place(host, addresses, (port,), job, source)
        store, reached, _ = find_store(place, info, timeout)
    return Rendezvous(store, host, port, source, reached)


def _port_number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise SetupError(f"MASTER_PORT={text!r}; expected a port number from 1 to 65535")
    return int(text)
