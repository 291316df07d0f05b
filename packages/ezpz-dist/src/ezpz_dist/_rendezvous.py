"""How ranks find each other: rank 0 keeps a store, and the others look for it."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import socket
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

from torch.distributed import DistNetworkError, HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # torch exports them so

from ezpz_topo import RankInfo, first_host, get_hostname

from . import _mpi
from ._addresses import advertised, is_loopback, is_one_node, is_own, on_fast_network, resolve
from ._errors import SetupError
from ._mpi import SAY_AFTER, speaks

logger = logging.getLogger(__name__)


# An address that all ranks know, and the store behind it.

# Launchers whose ranks form one MPI world, so that MPI can carry the address.
MPI_LAUNCHERS = frozenset({"openmpi", "mvapich2", "pals", "pmi", "flux", "jsrun"})
_LOST_AFTER = 5.0  # seconds for a store that was there to answer once more


@dataclass(frozen=True, slots=True)
class Rendezvous:
    store: Store  # for ``init_process_group``
    master_addr: str  # host name or address of rank 0
    master_port: int  # its TCP port; 0 in a world of one, which listens nowhere
    source: str  # how the address came to be known, for people
    reached: str = ""  # the numeric address by which this rank reaches the store
    prefix: str = ""  # under which this job's keys are in the server; empty if they are alone in it

    def connect(self, timeout: timedelta) -> Store:
        """Return a second connection to the store, for another thread. Not collective."""
        limit = min(timeout.total_seconds(), _LOST_AFTER)
        try:
            store, _ = connect(self.reached, self.master_port, limit, timeout, job=None)
        except (RefusedError, NotOurStoreError) as error:
            raise DistNetworkError(
                f"rank 0's store at {_name(self.master_addr, self.master_port)} "
                f"({self.source}) is gone: {error}"
            ) from error
        return PrefixStore(self.prefix, store) if self.prefix else store


_met: dict[tuple[str, int, str, int], Rendezvous] = {}
"""By host, port, source and rank, kept until exit: were rank 0 to close its store and
open it again for a second set-up, a faster rank could still meet the first and be cut off."""


def rendezvous(
    info: RankInfo, timeout: timedelta, env: Mapping[str, str] | None = None
) -> Rendezvous:
    """Find the store at which this job's ranks meet. Collective: every rank calls this."""
    # Where the port is taken, rank 0 takes another one, which the others look at too.
    env = os.environ if env is None else env
    if info.world_size == 1:
        return Rendezvous(HashStore(), "127.0.0.1", 0, "a world of one")
    addr, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if addr and port:
        return _at_master(info, timeout, env, addr, port)
    if info.launcher in MPI_LAUNCHERS:
        return _over_mpi(info, timeout, env)
    if info.launcher == "slurm":
        return _of_slurm_step(info, timeout, env)
    missing = " and ".join(n for n, v in (("MASTER_ADDR", addr), ("MASTER_PORT", port)) if not v)
    raise SetupError(
        f"rank {info.rank} of {info.world_size} ({info.launcher}) has no {missing}; expected the "
        "address of rank 0; start the ranks with ezpz-launch or torchrun, or export both"
    )


def _at_master(
    info: RankInfo, timeout: timedelta, env: Mapping[str, str], addr: str, text: str
) -> Rendezvous:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise SetupError(f"MASTER_PORT={text!r}; expected a port number from 1 to 65535")
    port, source = int(text), "MASTER_ADDR and MASTER_PORT"
    if addr.startswith("[") and addr.endswith("]"):
        addr = addr[1:-1]  # an IPv6 address, as in URLs
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
    key = place.host, place.ports[0], place.source, info.rank
    if key not in _met:
        if info.rank == 0:
            warn_of_a_foreign_address(place)
        look = open_store if info.rank == 0 else find_store
        store, reached, port = look(place, info, timeout)
        _met[key] = Rendezvous(store, place.host, port, place.source, reached)
    return _met[key]


def _over_mpi(info: RankInfo, timeout: timedelta, env: Mapping[str, str]) -> Rendezvous:
    source, job = "bound by rank 0, broadcast over MPI", Job.of(info, 0, env)
    store: Store | None = None
    host, port, reached, trouble = "", 0, "", ""
    addresses: tuple[str, ...] = ()
    if info.rank == 0:
        try:
            host = advertised(info, env)
            addresses = (host,) if is_one_node(info) else addresses
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


# Which job a store belongs to, and where its ranks were told to meet.

JOB_KEY = "ezpz-job"  # where rank 0 writes its job, before anything else
_OF_ANY = {
    # The parts of a heterogeneous Slurm job have numbers of their own, and one in common.
    "Slurm job": ("SLURM_HET_JOB_ID", "SLURM_JOB_ID"), "PBS job": ("PBS_JOBID",),
}  # fmt: skip
_OF_LAUNCHER = {
    "ezpz": {"launch": ("EZPZ_LAUNCH_ID",), "attempt": ("EZPZ_ATTEMPT",)},
    "torchrun": {"run": ("TORCHELASTIC_RUN_ID",), "restart": ("TORCHELASTIC_RESTART_COUNT",)},
    # Ranks that another launcher started may lie in several steps: they are one world still.
    "slurm": {"Slurm step": ("SLURM_STEP_ID",)},
}

# Below Linux's and macOS's ephemeral ranges, so that no outgoing connection holds it.
PORTS = range(20000, 30000)
_CANDIDATES = 8


@dataclass(frozen=True, slots=True)
class Job:
    """What a rank knows of the job that it is part of."""

    facts: Mapping[str, str]  # such as ``{"user": "1000", "PBS job": "7.pbs"}``
    host: str  # where the process runs that wrote this
    pid: int

    @classmethod
    def of(cls, info: RankInfo, port: int, env: Mapping[str, str]) -> Self:
        """Return this rank's job. Not by the address: rank 0's own is often ``localhost`` to it."""
        facts = {"user": str(os.getuid()), "port": str(port)}
        for fact, variables in (_OF_ANY | _OF_LAUNCHER.get(info.launcher, {})).items():
            for name in variables:
                if env.get(name):
                    facts.setdefault(fact, env[name])
        return cls(facts, get_hostname(), os.getpid())

    @classmethod
    def read(cls, written: bytes) -> Self | None:
        try:
            facts, host, pid = json.loads(written)
            return cls({key: str(value) for key, value in facts.items()}, str(host), int(pid))
        except (ValueError, TypeError, AttributeError):
            return None

    def written(self) -> bytes:
        return json.dumps([dict(self.facts), self.host, self.pid]).encode()

    def differs(self, other: Job) -> str:
        """Return by what this is another job than the other; an empty text if it is the same."""
        return ", ".join(
            f"{key} {self.facts[key]}, not {other.facts[key]}"
            for key in sorted(self.facts.keys() & other.facts.keys())
            if self.facts[key] != other.facts[key]
        )


@dataclass(frozen=True, slots=True)
class Place:
    host: str  # rank 0's, by name or address
    addresses: tuple[str, ...]  # what the name stands for here, numeric
    ports: tuple[int, ...]  # where rank 0 may listen, in the order in which it tries them; 0: any
    job: Job | None  # what the store must be of; None: whatever store is there
    source: str  # how all this came to be known, for people

    def __str__(self) -> str:
        return f"{_name(self.host, self.ports[0])} ({self.source})"


def candidates(port: int) -> tuple[int, ...]:
    """Return the ports to try, best first: the same on every rank.

    >>> candidates(29500)[:3]
    (29500, 20193, 26795)
    """
    found, step = {port: None}, 0
    while len(found) < _CANDIDATES:
        step += 1
        found[derived_port(f"{port}.{step}")] = None
    return tuple(found)


def derived_port(text: str) -> int:
    """Return a port below the ephemeral ones for a text, the same everywhere."""
    return PORTS[zlib.crc32(text.encode()) % len(PORTS)]


def _name(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# Rank 0's part: hold a port, and keep the store behind it open.

_BACKLOG = 1 << 16  # connections that wait, as far as the system lets us: all ranks come at once
_OTHER_FILES = 512  # files that rank 0 may have open beside its connections
_PATIENCE = 0.5  # seconds for whoever holds a port to answer, and for a rank 0 to write its job


def open_store(place: Place, info: RankInfo, timeout: timedelta) -> tuple[TCPStore, str, int]:
    """Open the store at the first port that is free; return it, with its address and port here."""
    assert place.job is not None
    here = [each for each in place.addresses if is_loopback(each)]
    loopback = here[0] if here else "127.0.0.1"
    # Where every rank is here, no one else need reach the store. Elsewhere MASTER_ADDR may be
    # localhost on rank 0 alone: some operators of Kubernetes export it so.
    inside = is_one_node(info) and len(here) == len(place.addresses)
    taken: list[str] = []
    raise_file_limit(info.world_size)
    who = f"rank 0 of {info.world_size} on {get_hostname()}"
    for wanted in place.ports:
        try:
            listener = _listen(loopback if inside else "", wanted)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise SetupError(
                    f"{who} cannot listen on port {wanted} ({place.source}): {error.strerror}; "
                    "expected a port of its own; export MASTER_ADDR and MASTER_PORT to choose "
                    "another"
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
            multi_tenant=True, master_listen_fd=listener.detach(),
            # torch's own choice: one that was built without libuv must be told so.
            use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
        )  # fmt: skip
        store.set(JOB_KEY, place.job.written().decode())
        if taken:
            logger.warning(
                "rank 0 listens on port %d, for %s is taken (%s)", port, place, "; ".join(taken)
            )
        return store, address, port
    raise SetupError(
        f"{who} finds no free port for {place}: {'; '.join(taken)}; expected one of these to be "
        "free; export another MASTER_PORT on every rank"
    )


def warn_of_a_foreign_address(place: Place) -> None:
    # Not an error: behind a service of Kubernetes it is so, and works.
    if not any(map(is_own, place.addresses)):
        logger.warning(
            "rank 0 is on %s, and the other ranks look for it at %s, which is no address of this "
            "host (%s); export rank 0's own host as MASTER_ADDR if they do not find it",
            get_hostname(), place, ", ".join(place.addresses),
        )  # fmt: skip


def raise_file_limit(world_size: int) -> None:
    """Let this process hold a connection of every rank, its responder's, and one that probes."""
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
    families = [(socket.AF_INET6, "::"), (socket.AF_INET, "")]
    if address:
        families = [(socket.AF_INET6 if ":" in address else socket.AF_INET, address)]
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
    """Return who holds a port of this host, in words; an error if it is a rank 0 of this job."""
    why = "held by a process that does not listen"
    for address in dict.fromkeys(addresses):
        if not is_own(address):
            continue
        try:
            limit = timedelta(seconds=1)
            _, found = connect(address, port, _PATIENCE, limit, job, patience=_PATIENCE)
        except RefusedError:
            continue
        except NotOurStoreError as error:
            why = f"held by {error}"
            continue
        assert found is not None
        raise SetupError(
            f"rank 0 of {info.world_size} is duplicate: process {found.pid} on {found.host} "
            f"holds port {port}, and this is process {os.getpid()} on {get_hostname()}; expected "
            "one; give each rank its own RANK, end what is left of an earlier run, or give another "
            "job another MASTER_PORT"
        )
    return why


# The other ranks' part: look for rank 0's store until it is there.

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05
# So that ten thousand ranks ask twenty thousand times a second at most, and not all at once.
_PAUSE_A_RANK, _SPREAD_A_RANK, _MANY_RANKS = 5e-5, 2e-5, 256
_FIRST_LOOK_EVERYWHERE = 0.25
_WRITING = 0.05  # seconds from rank 0's opening of the store to its first key
_Seen = dict[tuple[str, int], Exception]  # at an address and port: what is in the store's way


def find_store(place: Place, info: RankInfo, timeout: timedelta) -> tuple[TCPStore, str, int]:
    """Return a client of rank 0's store, with the address and the port where it was found."""
    # A port is passed over when something else than this job's store is behind it. But whoever
    # holds it may be gone again, or not be seen from here: so now and then all are looked at.
    start = time.monotonic()
    end = start + timeout.total_seconds()
    pause, longest = _FIRST_PAUSE, max(_LONGEST_PAUSE, info.world_size * _PAUSE_A_RANK)
    everywhere_at, say_at = _FIRST_LOOK_EVERYWHERE, SAY_AFTER
    seen: _Seen = {}
    who = f"rank {info.rank} of {info.world_size} on {get_hostname()}"
    if info.world_size >= _MANY_RANKS:
        # Their coming all at once would overrun the listener's queue.
        time.sleep(min(_chance() * info.world_size * _SPREAD_A_RANK, end - start))
    while True:
        elapsed = time.monotonic() - start
        everywhere = elapsed >= everywhere_at
        if everywhere:
            everywhere_at = 2 * elapsed
        # Few seconds for an answer, but a busy store must get to answer in the end.
        limit = min(max(0.5 + info.world_size * 1e-4, elapsed / 10), 5.0)
        for address, port in _doors(place, seen, everywhere=everywhere):
            left = min(limit, max(end - time.monotonic(), 0.01))
            try:
                store, _ = connect(address, port, left, timeout, place.job, patience=_WRITING)
            except (RefusedError, NotOurStoreError) as error:
                # Without its frames: the connection would live as long.
                seen[address, port] = error.with_traceback(None)
                error.__cause__ = error.__context__ = None
            else:
                return store, address, port
        if time.monotonic() >= end:
            break
        if elapsed >= say_at:
            say_at = float("inf")
            if speaks(info):
                logger.warning("%s has waited %.0f s for %s", who, elapsed, _what(place, seen))
        time.sleep(max(min(pause * (0.5 + _chance()), end - time.monotonic()), 0))
        pause = min(1.5 * pause, longest)
    raise SetupError(
        f"{who} has waited {timeout.total_seconds():g} s for {_what(place, seen)}; expected "
        "rank 0 to call setup_torch and listen there; check that it started, that it did not fail "
        "earlier, and that this host may connect to it"
    )


def _doors(place: Place, seen: _Seen, *, everywhere: bool) -> Iterator[tuple[str, int]]:
    """Yield address and port of where to look now; what is seen there comes into ``seen``."""
    for port in place.ports:
        for address in place.addresses:
            yield address, port
        taken = (isinstance(seen[each, port], NotOurStoreError) for each in place.addresses)
        if not (everywhere or any(taken)):
            return


def _what(place: Place, seen: _Seen) -> str:
    there = "; ".join(f"{_name(*door)}: {error}" for door, error in seen.items())
    return f"rank 0's store at {place}, and finds at {there}"


def _chance() -> float:
    """Return a number from 0 to 1, without touching the random stream of the script."""
    return int.from_bytes(os.urandom(4), "little") / 2**32


# What is behind a port: this job's store, or something else, however oddly it answers.

# What torch's client sends first: VALIDATE with its magic number, then PING with a number
# that comes back. So from torch 2.3 to 2.13 (TCPStoreBackend.hpp); a test holds it.
_GREETING = b"\x00" + (0x3C85F7CE).to_bytes(4, "little") + b"\x0d"


class RefusedError(Exception):
    """Nothing listens there, or nothing that can be reached."""


class NotOurStoreError(Exception):
    """Something listens there that is not this job's store."""


def connect(
    address: str, port: int, limit: float, timeout: timedelta, job: Job | None,
    *, patience: float = 0.0,
) -> tuple[TCPStore, Job | None]:  # fmt: skip
    """Return a client of this job's store (None: of any), and what rank 0 wrote into it.

    Each answer has ``limit`` seconds, and what rank 0 writes ``patience``.
    """
    probe(address, port, limit)
    try:
        # torch tries again for this time where no one listens any more: at least a second (less is
        # 0 to it), at most half a minute (its look-up of the address's name can take 5 s and more).
        # Without a world size: it would sleep up to as many milliseconds as there are ranks.
        connecting = max(timedelta(seconds=1), min(timeout, timedelta(seconds=30)))
        store = TCPStore(
            address, port, None, is_master=False, timeout=connecting, wait_for_workers=False
        )
        store.set_timeout(timeout)
        if job is None:
            return store, None
        # Not torch's own wait, which prints a page when it fails, and may take seconds for it.
        until = time.monotonic() + patience
        while not (written := store.check([JOB_KEY])) and time.monotonic() < until:
            time.sleep(0.001)
        found = Job.read(store.get(JOB_KEY)) if written else None
    except DistNetworkError as error:
        raise RefusedError(f"a store of torch that went away ({error})") from error
    if found is None:
        raise NotOurStoreError("a store of torch that no ezpz_dist opened")
    if difference := found.differs(job):
        raise NotOurStoreError(
            f"the store of another job, by process {found.pid} on {found.host} ({difference})"
        )
    return store, found


def probe(address: str, port: int, limit: float) -> None:
    """Find out whether a store of torch answers; raises as `connect`."""
    number, answer = os.urandom(4), b""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as connection:
        connection.settimeout(limit)
        try:
            connection.connect((address, port))
        except TimeoutError:
            raise RefusedError(f"no answer within {limit:.2g} s") from None
        except ConnectionResetError as error:
            # Between the kernel's yes and our next look.
            raise NotOurStoreError(f"a listener that breaks off ({error.strerror})") from error
        except OSError as error:
            raise RefusedError((error.strerror or str(error)).lower()) from error
        try:
            # It has no peer any more where the listener has closed it already.
            if connection.getsockname() == connection.getpeername():
                # The kernel gave us that very port to connect from.
                raise RefusedError("connection refused")
            connection.sendall(_GREETING + number)
            while len(answer) < len(number):
                piece = connection.recv(len(number) - len(answer))
                if not piece:
                    raise NotOurStoreError("a listener that closes the connection")
                answer += piece
        except TimeoutError:
            raise NotOurStoreError(f"a listener that says nothing for {limit:.2g} s") from None
        except OSError as error:
            raise NotOurStoreError(f"a listener that breaks off ({error.strerror})") from error
    if answer != number:
        raise NotOurStoreError(f"a listener that is no store of torch (it answers {answer!r})")
