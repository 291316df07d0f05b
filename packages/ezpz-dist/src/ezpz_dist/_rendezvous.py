"""How ranks find each other: rank 0 listens, one rank of each node looks for it."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import random
import resource
import socket
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import NamedTuple, Self

from torch.distributed import DistNetworkError, HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # torch exports them so

from ezpz_topo import RankInfo, first_host, get_hostname

from . import _mpi
from ._addresses import (
    Participant,
    Server,
    advertised,
    is_loopback,
    is_one_node,
    is_own,
    listen,
    on_fast_network,
    read_message,
    resolve,
)
from ._diagnosis import LOST, within
from ._errors import SetupError
from ._mpi import SAY_AFTER, speaks

logger = logging.getLogger(__name__)


# An address that all ranks know, and rank 0's server behind it: where it hears who is here.

# Launchers whose ranks form one MPI world, so that MPI can carry the address.
MPI_LAUNCHERS = frozenset({"openmpi", "mvapich2", "pals", "pmi", "flux", "jsrun"})
_LOST_AFTER = 5.0  # seconds for a store that was there to answer once more


@dataclass(frozen=True, slots=True)
class Rendezvous:
    place: Place  # where rank 0 is looked for
    master_addr: str  # host name or address of rank 0
    master_port: int  # its TCP port, from `join` on that of torch's store; 0 in a world of one
    # torch's store; None until `join`, except on rank 0 and where torchrun's agent holds it.
    store: Store | None = None
    server: Server | None = None  # rank 0's own
    reached: str = ""  # the numeric address by which this rank reaches the store
    prefix: str = ""  # under which this job's keys are in the server; empty if they are alone in it

    def participant(self, info: RankInfo, setup: str, seconds: float) -> Participant:
        """Return how this rank takes part in a set-up; to find rank 0 it has so many seconds."""
        place, name = self.place, ""
        if hasattr(socket, "SO_PEERCRED") and info.local_world_size not in (1, info.world_size):
            node = get_hostname(), info.node_rank, place.host, place.ports, setup
            text = repr((node, sorted(place.job.facts.items()))).encode()
            name = f"ezpz-{hashlib.blake2b(text, digest_size=12).hexdigest()}"
        store = None if self.store is None else PrefixStore(setup, self.store)
        find = partial(find_server, place, info, seconds)
        return Participant(setup, find, name, self.server, store)

    def join(self, endpoint: tuple[str, int], info: RankInfo, timeout: timedelta) -> Self:
        """Return this with torch's store, for a set-up whose ranks have all come."""
        reached, port = endpoint
        if self.store is not None:
            return replace(self, master_port=port)
        if info.world_size >= _MANY:
            time.sleep(_chance() * info.world_size * _SPREAD_A_CALL)
        if endpoint not in _clients:
            # Rank 0 has just been there; but others may be before this one, a millisecond each.
            limit = timedelta(seconds=max(30.0, info.world_size * 1e-3))
            _clients[endpoint] = _client(reached, port, min(timeout, limit))
        _clients[endpoint].set_timeout(timeout)
        return replace(self, store=_clients[endpoint], master_port=port, reached=reached)

    def connect(self, timeout: timedelta) -> Store:
        """Return a second connection to the store, for another thread. Not collective."""
        limit = min(timeout.total_seconds(), _LOST_AFTER)
        try:
            # torch would try again and again where no one listens any more.
            socket.create_connection((self.reached, self.master_port), limit).close()
            store = _client(self.reached, self.master_port, timeout)
        except (OSError, DistNetworkError) as error:
            why = (getattr(error, "strerror", None) or str(error)).lower()
            raise DistNetworkError(
                f"rank 0's store at {_name(self.master_addr, self.master_port)} "
                f"({self.place.source}) is gone: {why}"
            ) from error
        return PrefixStore(self.prefix, store) if self.prefix else store


_met: dict[tuple[str, int, str, int], Rendezvous] = {}
"""By host, port, source and rank, kept until exit: rank 0's server and store are for later ones."""
_clients: dict[tuple[str, int], TCPStore] = {}  # of torch's stores, by address and port
_turns: dict[int, int] = {}  # how often each rank of this process has met over torchrun's agent


def rendezvous(
    info: RankInfo, timeout: timedelta, env: Mapping[str, str] | None = None
) -> Rendezvous:
    """Find out where this job's ranks meet. Collective: every rank calls this."""
    # Where the port is taken, rank 0 takes another one, which the others look at too.
    env = os.environ if env is None else env
    if info.world_size == 1:
        nowhere, source = "127.0.0.1", "a world of one"
        place = Place(nowhere, (nowhere,), (0,), Job.of(info, 0, env), source)
        return Rendezvous(place, nowhere, 0, HashStore())
    addr, text = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if addr and text:
        if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
            raise SetupError(f"MASTER_PORT={text!r}; expected a port number from 1 to 65535")
        port, source = int(text), "MASTER_ADDR and MASTER_PORT"
        if addr.startswith("[") and addr.endswith("]"):
            addr = addr[1:-1]  # an IPv6 address, as in URLs
        addresses = resolve(addr, info, "MASTER_ADDR")
        place = Place(addr, addresses, candidates(port), Job.of(info, port, env), source)
        if info.launcher == "torchrun" and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return _over_agent(place, info, timeout, env)
        return _meet_at(place, info, timeout)
    if info.launcher in MPI_LAUNCHERS:
        return _over_mpi(info, timeout, env)
    if info.launcher == "slurm":
        return _of_slurm_step(info, timeout, env)
    missing = " and ".join(n for n, v in (("MASTER_ADDR", addr), ("MASTER_PORT", text)) if not v)
    raise SetupError(
        f"rank {info.rank} of {info.world_size} ({info.launcher}) has no {missing}; expected the "
        "address of rank 0; start the ranks with ezpz-launch or torchrun, or export both"
    )


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
    """Meet at a place that every rank knows; rank 0 listens there or nearby."""
    key = place.host, place.ports[0], place.source, info.rank
    met = _met.get(key) or Rendezvous(place, place.host, place.ports[0])
    if info.rank == 0 and not (met.server and met.server.is_open):
        if not any(map(is_own, place.addresses)):
            # Not an error: behind a service of Kubernetes it is so, and works.
            logger.warning(
                "rank 0 is on %s, and the other ranks look for it at %s, which is no address of "
                "this host (%s); export rank 0's own host as MASTER_ADDR if they do not find it",
                get_hostname(), place, ", ".join(place.addresses),
            )  # fmt: skip
        met = open_server(place, info, timeout, met)
    _met[key] = met
    return met


def leave() -> None:
    """Listen no more where a script's own process group may want to: for after a set-up."""
    for met in _met.values():
        if met.server is not None:
            met.server.close()


def _over_agent(
    place: Place, info: RankInfo, timeout: timedelta, env: Mapping[str, str]
) -> Rendezvous:
    """Meet where rank 0 says by the store of torchrun's agent, which may be on another node."""
    # The agent holds the store through restarts of the ranks too.
    prefix = f"ezpz-restart-{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    key, addr, port = (prefix, place.ports[0], place.source, info.rank), place.host, place.ports[0]
    turn = _turns[info.rank] = _turns.get(info.rank, 0) + 1
    known, reached = _met.get(key), place.addresses[0]
    if known is None:
        client = PrefixStore(prefix, _client(reached, port, timeout))
        known = Rendezvous(place, addr, port, client, None, reached, prefix)
    store = known.store
    assert store is not None
    if info.rank == 0:
        host = addr if any(map(is_own, place.addresses)) else advertised(info, env)
        opened = open_server(replace(place, host=host, ports=(0,)), info, timeout, known)
        known = replace(known, server=opened.server)
        store.set(f"ezpz-server/{turn}", json.dumps([host, opened.master_port]))
    _met[key] = known

    def ask() -> bytes:
        store.wait([f"ezpz-server/{turn}"], timeout)
        return bytes(store.get(f"ezpz-server/{turn}"))

    try:
        host, at = json.loads(within(timeout.total_seconds() + 1.0, ask))
    except LOST as error:
        raise SetupError(
            f"rank {info.rank} of {info.world_size} on {get_hostname()} heard nothing from rank 0 "
            f"by torchrun's store at {place} within {timeout.total_seconds():g} s; expected it to "
            "call setup_torch; look whether it failed earlier"
        ) from error
    addresses = resolve(host, info, "the address that rank 0 told")
    return replace(known, place=replace(place, host=host, addresses=addresses, ports=(at,)))


def _over_mpi(info: RankInfo, timeout: timedelta, env: Mapping[str, str]) -> Rendezvous:
    source, job = "bound by rank 0, broadcast over MPI", Job.of(info, 0, env)
    met, trouble, host, port = _met.get(("", 0, source, info.rank)), "", "", 0
    if info.rank == 0:
        try:
            host = advertised(info, env)
            here = Place(host, (host,) if is_one_node(info) else (), (0,), job, source)
            met = _met["", 0, source, 0] = open_server(here, info, timeout, met)
            port = met.master_port
        except SetupError as error:
            # Told to all of them: they would wait for an address that never comes.
            trouble = str(error)[:600]
    host, port, trouble = _mpi.broadcast_once((host, port, trouble), info, timeout.total_seconds())
    if trouble:
        raise SetupError(trouble)
    if met is None:
        addresses = resolve(host, info, "the address that rank 0 broadcast")
        met = Rendezvous(Place(host, addresses, (port,), job, source), host, port)
    return met


# Which job a server belongs to, and where its ranks were told to meet.

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


class Job(NamedTuple):
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
        with suppress(ValueError, TypeError, AttributeError):
            facts, host, pid = json.loads(written)
            return cls({key: str(value) for key, value in facts.items()}, str(host), int(pid))
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
    job: Job  # what rank 0 must be of
    source: str  # how all this came to be known, for people

    def __str__(self) -> str:
        return f"{_name(self.host, self.ports[0])} ({self.source})"


def candidates(port: int) -> tuple[int, ...]:
    """Return the ports to try, best first: the same on every rank.

    >>> candidates(29500)[:3]
    (29500, 20193, 26795)
    """
    derived = (derived_port(f"{port}.{step}") for step in range(1, 2 * _CANDIDATES))
    return tuple(dict.fromkeys([port, *derived]))[:_CANDIDATES]


def derived_port(text: str) -> int:
    """Return a port below the ephemeral ones for a text, the same everywhere."""
    return PORTS[zlib.crc32(text.encode()) % len(PORTS)]


def _name(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# Rank 0's part: hold a port, and open its server there, and torch's store beside it.

_OTHER_FILES = 512  # files that rank 0 may have open beside its connections
_PATIENCE = 0.5  # seconds for whoever holds a port to answer


def open_server(
    place: Place, info: RankInfo, timeout: timedelta, known: Rendezvous | None = None
) -> Rendezvous:
    """Open rank 0's server at the first free port; and torch's store, where none is known."""
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
            listener = listen(loopback if inside else "", wanted)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise SetupError(
                    f"{who} cannot listen on port {wanted} ({place.source}): "
                    f"{os.strerror(error.errno or 0)}; expected a port of its own; export "
                    "MASTER_ADDR and MASTER_PORT to choose another"
                ) from error
            why = os.strerror(error.errno).lower()
            if error.errno == errno.EADDRINUSE:
                why = _held_by(info, (loopback, *place.addresses), wanted, place.job)
            taken.append(f"{wanted}: {why}")
            continue
        address, port = loopback if inside else "127.0.0.1", listener.getsockname()[1]
        store, server = (known.store, known.server) if known else (None, None)
        # Both listen before the store is made, which takes some milliseconds.
        behind = None if store is not None else listen(loopback if inside else "", 0)
        at = behind.getsockname()[1] if behind else known.master_port if known else 0
        if server is None:
            server = Server(place.job.written(), info.world_size, at)
        server.open(listener)
        if behind is not None:
            store = TCPStore(
                address, at, None,
                is_master=True, timeout=timeout, wait_for_workers=False,
                # A script's own init_process_group then finds this store, not a taken port.
                multi_tenant=True, master_listen_fd=behind.detach(),
                # torch's own choice: one that was built without libuv must be told so.
                use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
            )  # fmt: skip
        if taken:
            logger.warning(
                "rank 0 listens on port %d, for %s is taken (%s)", port, place, "; ".join(taken)
            )
        return Rendezvous(place, place.host, port, store, server, address)
    raise SetupError(
        f"{who} finds no free port for {place}: {'; '.join(taken)}; expected one of these to be "
        "free; export another MASTER_PORT on every rank"
    )


def raise_file_limit(world_size: int) -> None:
    """Let this process hold a connection of every rank to torch's store, and of every node."""
    wanted = 2 * world_size + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        logger.warning(
            "rank 0 may open %d files, and holds up to two connections for each of %d ranks; "
            "expected %d; raise the hard limit (ulimit -Hn) for larger worlds",
            allowed, world_size, wanted,
        )  # fmt: skip


def _client(address: str, port: int, timeout: timedelta) -> TCPStore:
    limit = max(timedelta(seconds=1), timeout)  # less is none to torch
    # Without a world size: it would sleep up to as many milliseconds as there are ranks.
    return TCPStore(address, port, None, is_master=False, timeout=limit, wait_for_workers=False)


def _held_by(info: RankInfo, addresses: Sequence[str], port: int, job: Job) -> str:
    """Return who holds a port of this host, in words; an error if it is a rank 0 of this job."""
    why = "held by a process that does not listen"
    for address in filter(is_own, dict.fromkeys(addresses)):
        try:
            call, found = connect(address, port, _PATIENCE, job)
        except RefusedError:
            continue
        except NotOurStoreError as error:
            why = f"held by {error}"
            continue
        call.close()
        raise SetupError(
            f"rank 0 of {info.world_size} is duplicate: process {found.pid} on {found.host} "
            f"holds port {port}, and this is process {os.getpid()} on {get_hostname()}; expected "
            "one; give each rank its own RANK, end what is left of an earlier run, or give another "
            "job another MASTER_PORT"
        )
    return why


# The other ranks' part: one of each node looks for rank 0's server until it is there.

_chance = random.SystemRandom().random  # which touches no random stream of the script
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05
# So that ten thousand nodes ask twenty thousand times a second at most, and not all at once.
_PAUSE_A_CALL, _SPREAD_A_CALL, _MANY = 5e-5, 2e-5, 256
_FIRST_LOOK_EVERYWHERE = 0.25
_Seen = dict[tuple[str, int], Exception]  # at an address and port: what is in rank 0's way


def find_server(place: Place, info: RankInfo, seconds: float) -> tuple[socket.socket, str]:
    """Return a connection to rank 0's server, and rank 0's host."""
    # A port is passed over when something else than this job's rank 0 is behind it. But whoever
    # holds it may be gone again, or not be seen from here: so now and then all are looked at.
    start = time.monotonic()
    end = start + seconds
    nodes = info.world_size // (info.local_world_size or 1)
    pause, longest = _FIRST_PAUSE, max(_LONGEST_PAUSE, nodes * _PAUSE_A_CALL)
    everywhere_at, say_at = _FIRST_LOOK_EVERYWHERE, SAY_AFTER
    seen: _Seen = {}
    who = f"rank {info.rank} of {info.world_size} on {get_hostname()}"
    if nodes >= _MANY:
        # Their coming all at once would overrun the listener's queue.
        time.sleep(min(_chance() * nodes * _SPREAD_A_CALL, end - start))
    while True:
        elapsed = time.monotonic() - start
        if everywhere := elapsed >= everywhere_at:
            everywhere_at = 2 * elapsed
        # Few seconds for an answer, but a busy server must get to answer in the end.
        limit = min(max(0.5 + nodes * 1e-4, elapsed / 10), 5.0)
        for address, port in _endpoints(place, seen, everywhere=everywhere):
            left = min(limit, max(end - time.monotonic(), 0.01))
            try:
                call, found = connect(address, port, left, place.job)
            except (RefusedError, NotOurStoreError) as error:
                # Without its frames: the connection would live as long.
                seen[address, port] = error.with_traceback(None)
                error.__cause__ = error.__context__ = None
            else:
                return call, found.host
        if time.monotonic() >= end:
            break
        if elapsed >= say_at:
            say_at = float("inf")
            if speaks(info) or not is_one_node(info):  # of several nodes each has one that calls
                logger.warning("%s has waited %.0f s for %s", who, elapsed, _what(place, seen))
        time.sleep(max(min(pause * (0.5 + _chance()), end - time.monotonic()), 0))
        pause = min(1.5 * pause, longest)
    raise SetupError(
        f"{who} has waited {seconds:g} s for {_what(place, seen)}; expected "
        "rank 0 to call setup_torch and listen there; check that it started, that it did not fail "
        "earlier, and that this host may connect to it"
    )


def _endpoints(place: Place, seen: _Seen, *, everywhere: bool) -> Iterator[tuple[str, int]]:
    """Yield address and port of where to look now; what is seen there comes into ``seen``."""
    for port in place.ports:
        for address in place.addresses:
            yield address, port
        taken = (isinstance(seen[each, port], NotOurStoreError) for each in place.addresses)
        if not (everywhere or any(taken)):
            return


def _what(place: Place, seen: _Seen) -> str:
    there = "; ".join(f"{_name(*endpoint)}: {error}" for endpoint, error in seen.items())
    return f"rank 0 at {place}, and finds at {there}"


# What is behind a port: this job's rank 0, or something else, however oddly it answers.

# What torch's client sends first: VALIDATE with its magic number, then PING with a number
# that comes back. So from torch 2.3 to 2.13 (TCPStoreBackend.hpp); a test holds it.
_GREETING = b"\x00" + (0x3C85F7CE).to_bytes(4, "little") + b"\x0d"


class RefusedError(Exception):
    """Nothing listens there, or nothing that can be reached."""


class NotOurStoreError(Exception):
    """Something listens there that is not this job's rank 0."""


def connect(address: str, port: int, limit: float, job: Job) -> tuple[socket.socket, Job]:
    """Return a connection to this job's rank 0, and its job; each answer has ``limit`` seconds."""
    try:
        with ExitStack() as ends:
            call = ends.enter_context(_dial(address, port, limit))
            # It has no peer any more where the listener has closed it already.
            if call.getsockname() == call.getpeername():
                # The kernel gave us that very port to connect from.
                raise RefusedError("connection refused")
            found = Job.read(_greeting(call, limit))
            if found is None:
                raise NotOurStoreError("a rank 0 that names no job")
            if difference := found.differs(job):
                who = f"process {found.pid} on {found.host} ({difference})"
                raise NotOurStoreError(f"rank 0 of another job, {who}")
            ends.pop_all()
            return call, found
    except OSError as error:
        raise NotOurStoreError(f"a listener that breaks off ({error.strerror})") from error


def _dial(address: str, port: int, limit: float) -> socket.socket:
    try:
        return socket.create_connection((address, port), limit)
    except TimeoutError:
        raise RefusedError(f"no answer within {limit:.2g} s") from None
    except ConnectionResetError:  # between the kernel's yes and our next look
        raise
    except OSError as error:
        raise RefusedError((error.strerror or str(error)).lower()) from error


def _greeting(call: socket.socket, limit: float) -> bytes:
    try:
        return read_message(call, time.monotonic() + limit)[0]
    except ValueError as error:
        said = f"a listener that is not rank 0 (it says {error.args[0]!r})"
        raise NotOurStoreError(said) from None
    except EOFError:
        raise NotOurStoreError("a listener that closes the connection") from None
    except TimeoutError:
        pass
    # It waits for us to speak first, as a store of torch does.
    number = os.urandom(4)
    try:
        call.settimeout(limit)
        call.sendall(_GREETING + number)
        answer = call.recv(len(number))
    except TimeoutError:
        raise NotOurStoreError(f"a listener that says nothing for {limit:.2g} s") from None
    if not answer:
        raise NotOurStoreError("a listener that closes the connection")
    if answer == number:
        raise NotOurStoreError("a store of torch that no ezpz_dist opened")
    raise NotOurStoreError(f"a listener that is no store of torch (it answers {answer!r})")
