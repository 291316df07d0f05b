"""How the ranks find each other: an address all of them know, and a store behind it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import (  # type: ignore[attr-defined]  # torch exports them so
    DistNetworkError,
    HashStore,
    PrefixStore,
    Store,
)

from ezpz_dist._errors import SetupError
from ezpz_topo import RankInfo, first_host, get_hostname

from . import mpi
from .address import (
    advertised,
    is_loopback,
    is_one_node,
    is_reachable_by_name,
    literal,
    on_fast_network,
    resolve,
)
from .interface import interface_toward, outward_interface
from .job import Job
from .place import Place, name
from .search import find_store
from .server import candidates, derived_port, open_store, warn_of_a_foreign_address
from .visit import NobodyError, StrangerError, visit

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
    host, port, trouble = mpi.broadcast_once((host, port, trouble), info, timeout.total_seconds())
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
