"""The default process group: made once all ranks have met and are found to agree."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # torch exports them

from ezpz_device import get_torch_backend, is_backend_available
from ezpz_topo import RankInfo, get_cpu_count, get_hostname

from ._errors import SetupError
from ._hangs import flight
from ._hangs.processes import pid_namespace
from ._meeting.agreement import Roster, agree, common_facts
from ._meeting.rendezvous import Rendezvous, gloo_interface, meet, side_store

_generation = itertools.count()
"""How many groups this process has made: the same number on every rank."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What `setup_torch` was called with: the same on every rank."""

    framework: str
    backend: str | None
    seed: int | None
    timeout: float
    tensor_parallel_size: int
    pipeline_parallel_size: int
    context_parallel_size: int

    @property
    def degrees(self) -> tuple[int, int, int]:
        return self.tensor_parallel_size, self.pipeline_parallel_size, self.context_parallel_size


@dataclass(frozen=True, slots=True)
class Group:
    """What became of it.

    Attributes:
        meeting: Where the ranks met.
        prefix: Of this set-up's keys in the store.
        roster: Who is there.
        variables: What was exported for torch and gloo, which were not set before.
    """

    meeting: Rendezvous
    prefix: str
    roster: Roster
    variables: tuple[str, ...]

    @property
    def store(self) -> Store:
        """The set-up's part of the store."""
        return PrefixStore(self.prefix, self.meeting.store)

    def connector(self) -> Callable[[float], Store]:
        """Return what makes connections to that part, whose requests wait so many seconds."""
        return lambda seconds: PrefixStore(
            self.prefix, side_store(self.meeting, timedelta(seconds=seconds))
        )


def choose_backend(asked: str | None) -> str:
    """Return the backend's name; by device where none is asked for.

    Raises:
        SetupError: This torch has no such backend.
    """
    if asked is None:
        return get_torch_backend()
    if not is_backend_available(asked):
        raise SetupError(
            f"backend {asked!r} is not in this torch; leave it out to choose by device"
        )
    return asked.lower()


def bind(device: torch.device) -> None:
    """Make the device current before the group exists: NCCL would take device 0 on every rank."""
    if device.type in ("cuda", "xpu"):
        getattr(torch, device.type).set_device(device)


def limit_threads(info: RankInfo) -> None:
    """Share the node's cores among its ranks, unless the user or a CPU binding already did."""
    ranks_here = info.local_world_size or 1
    if "OMP_NUM_THREADS" in os.environ or ranks_here == 1:
        return
    cores = get_cpu_count()
    if cores == os.cpu_count():
        torch.set_num_threads(max(1, cores // ranks_here))


def make_group(info: RankInfo, device: torch.device, backend: str, asked: Asked) -> Group:
    """Meet, agree, connect. Collective: every rank calls this.

    Raises:
        SetupError: The ranks cannot meet or connect, one is missing, or they differ.
    """
    if backend == "ccl":
        # Registers the backend with torch; torch does not know it otherwise.
        __import__("oneccl_bindings_for_pytorch")
    timeout = timedelta(seconds=asked.timeout)
    process = get_hostname(), os.getpid(), pid_namespace()
    where, added = "", flight.variables()
    try:
        meeting = meet(info, timeout)
        where = f" at {meeting.master_addr}:{meeting.master_port} ({meeting.source})"
        # A store that outlives its group (a model may hold it) keeps its old keys.
        prefix = f"ezpz-{next(_generation)}"
        store = PrefixStore(prefix, meeting.store)
        roster = Roster((process[0],), process[1:])
        if info.world_size > 1:
            common = common_facts(
                arguments=asdict(asked),
                device=device.type,
                backend=backend,
            )
            roster = agree(store, info, asked.timeout, common, process)
        if backend == "gloo":
            interface = gloo_interface(info, meeting.master_addr, meeting.master_port)
            if interface is not None:
                added["GLOO_SOCKET_IFNAME"] = interface
        os.environ.update(added)
        dist.init_process_group(
            backend,
            store=PrefixStore("group", store),
            rank=info.rank,
            world_size=info.world_size,
            timeout=timeout,
            # A bound device lets NCCL and XCCL connect now instead of at the first collective.
            device_id=device if backend in ("nccl", "xccl") else None,
        )
        _see_all_in(store, info, timeout)
    except (dist.DistError, RuntimeError) as error:
        # gloo raises a plain RuntimeError where two hosts cannot connect.
        where = where or f" at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise SetupError(
            f"rank {info.rank} of {info.world_size} could not meet the others{where} within "
            f"{asked.timeout:g} s: {error}; expected every rank to call setup_torch and "
            "reach that address; check that no rank failed earlier and that the port is free"
        ) from error
    return Group(meeting, prefix, roster, tuple(added))


def _see_all_in(store: Store, info: RankInfo, timeout: timedelta) -> None:
    """Keep rank 0, whose process may hold the store, until every rank is through.

    init_process_group can return on rank 0 while others still read from its store: were it
    to leave now, they would be cut off.
    """
    if store.add("through", 1) == info.world_size:
        store.set("all", "through")
    if info.rank == 0:
        store.wait(["all"], timeout)
