"""How the ranks find each other: an address all of them know, and a store behind it."""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import (  # type: ignore[attr-defined]  # torch exports them so
    DistNetworkError,
    HashStore,
    Store,
    TCPStore,
    rendezvous,
)

from ezpz_dist._errors import SetupError
from ezpz_topo import RankInfo, first_host, get_hostname

from . import mpi

MPI_LAUNCHERS = frozenset({"openmpi", "mvapich2", "pals", "pmi", "flux", "jsrun"})
"""Launchers whose ranks form one MPI world, so that MPI can carry the address."""

# Below Linux's and macOS's ephemeral ranges, so that no outgoing connection holds it.
_SLURM_PORTS = range(20000, 30000)


_stores: dict[tuple[str, int], Store] = {}
"""Stores at a given address, kept until exit: were rank 0 to close and open its own again
for a second set-up, a faster rank could still meet the first and be cut off."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks meet.

    Attributes:
        store: The store for ``init_process_group``.
        master_addr: Host name or address of rank 0.
        master_port: Its TCP port; 0 in a world of one, which listens nowhere.
        source: How the address came to be known, for people.
    """

    store: Store
    master_addr: str
    master_port: int
    source: str


def meet(info: RankInfo, timeout: timedelta, env: Mapping[str, str] | None = None) -> Rendezvous:
    """Find the address at which this job's ranks meet. Collective: every rank calls this.

    A complete ``MASTER_ADDR`` and ``MASTER_PORT`` decide. Else rank 0 of an MPI launcher
    binds a free port, keeps it, and broadcasts it over MPI; ranks of a Slurm step derive
    the same address from the step.

    Raises:
        SetupError: No address can be agreed upon.
    """
    env = os.environ if env is None else env
    if info.world_size == 1:
        return Rendezvous(HashStore(), "127.0.0.1", 0, "a world of one")
    addr, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if addr and port:
        return _at_master(info, timeout, addr, _port_number(port))
    if info.launcher in MPI_LAUNCHERS:
        return _over_mpi(info, timeout)
    if info.launcher == "slurm":
        return _of_slurm_step(info, timeout, env)
    missing = " and ".join(n for n, v in (("MASTER_ADDR", addr), ("MASTER_PORT", port)) if not v)
    raise SetupError(
        f"rank {info.rank} of {info.world_size} ({info.launcher}) has no {missing}; expected the "
        "address of rank 0; start the ranks with ezpz-launch or torchrun, or export both"
    )


def _at_master(info: RankInfo, timeout: timedelta, addr: str, port: int) -> Rendezvous:
    store = _stores.get((addr, port))
    if store is None:
        # torch's own, because torchrun's agent may hold the store already.
        found = rendezvous("env://", rank=info.rank, world_size=info.world_size, timeout=timeout)
        store, _, _ = next(iter(found))
        _stores[addr, port] = store
    return Rendezvous(store, addr, port, "MASTER_ADDR and MASTER_PORT")


def _over_mpi(info: RankInfo, timeout: timedelta) -> Rendezvous:
    # Loopback works on laptops whose own name resolves to nothing, or to a dead VPN address.
    host, port, trouble = "127.0.0.1" if _is_one_node(info) else get_hostname(), 0, ""
    store: Store | None = None
    if info.rank == 0:
        try:
            store = TCPStore(
                host, 0, info.world_size, is_master=True, timeout=timeout, wait_for_workers=False
            )
            port = store.port
        except DistNetworkError as error:
            # Told to all of them: they would wait for an address that never comes.
            trouble = str(error)
    seconds = timeout.total_seconds()
    host, port, trouble = mpi.broadcast_once((host, port, trouble), info, seconds)
    if trouble:
        raise SetupError(
            f"rank 0 cannot listen on {host}: {trouble}; expected its own name to be an address "
            "of its own; export MASTER_ADDR and MASTER_PORT to choose one"
        )
    if store is None:
        store = TCPStore(host, port, info.world_size, is_master=False, timeout=timeout)
    return Rendezvous(store, host, port, "bound by rank 0, broadcast over MPI")


def _of_slurm_step(info: RankInfo, timeout: timedelta, env: Mapping[str, str]) -> Rendezvous:
    # SLURM_NODELIST names the whole job; a step can be smaller.
    nodelist = env.get("SLURM_STEP_NODELIST", "")
    host = "127.0.0.1" if _is_one_node(info) else first_host(nodelist)
    step = f"{env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID')}"
    _require_address(host)
    port = _SLURM_PORTS[zlib.crc32(step.encode()) % len(_SLURM_PORTS)]
    try:
        store = TCPStore(
            host,
            port,
            info.world_size,
            is_master=info.rank == 0,
            timeout=timeout,
            wait_for_workers=False,
        )
    except DistNetworkError as error:
        raise SetupError(
            f"rank {info.rank} of Slurm step {step} cannot meet the others at {host}:{port} "
            f"({error}); expected a free port, derived from the step; export MASTER_ADDR and "
            "MASTER_PORT before srun to choose another"
        ) from error
    return Rendezvous(store, host, port, f"derived from Slurm step {step}")


def _require_address(host: str) -> None:
    # torch takes twice its time-out for a name that does not resolve, and calls it a time-out.
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror as error:
        raise SetupError(
            f"the step's first host, {host!r}, does not resolve here ({error.strerror}); expected "
            "a name that every node knows; export MASTER_ADDR and MASTER_PORT before srun"
        ) from error


def _is_one_node(info: RankInfo) -> bool:
    return info.local_world_size == info.world_size


def _port_number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise SetupError(f"MASTER_PORT={text!r}; expected a port number from 1 to 65535")
    return int(text)
