"""The default process group: made once all ranks have met and are found to agree."""

from __future__ import annotations

import itertools
import logging
import os
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # torch exports them

from ezpz_device import get_torch_backend, is_backend_available
from ezpz_topo import RankInfo, get_cpu_count, get_hostname

from ._errors import SetupError
from ._hangs import ending, flight, watcher
from ._hangs.board import Board
from ._hangs.processes import pid_namespace
from ._hangs.waiting import first_line
from ._meeting.agreement import Roster, agree, refuse
from ._meeting.facts import common_facts
from ._meeting.rendezvous import Rendezvous, gloo_interface, meet, side_store
from ._seed import seed_for_rank
from ._store import within

logger = logging.getLogger(__name__)

_generation = itertools.count()
"""How many groups this process has tried to make: the same number on every rank."""

LONGEST = 1e8
"""Seconds: the longest time-out, about three years."""

_INTERFACE = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}
"""What names the network interface that a backend takes."""

_WITHDRAWAL = 5.0
"""Seconds for a rank that cannot take part to reach the others."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What `setup_torch` was called with: the same on every rank."""

    framework: str
    backend: str | None
    seed: int | None
    timeout: float
    tensor_parallel_size: int | None
    pipeline_parallel_size: int | None
    context_parallel_size: int | None

    def __post_init__(self) -> None:
        """Refuse what would fail only later, with the ranks half set up."""
        if not 0 < self.timeout <= LONGEST:
            raise ValueError(
                f"timeout {self.timeout:g}; expected seconds, above 0 and at most {LONGEST:g}"
            )
        if self.seed is not None:
            seed_for_rank(self.seed, 0)

    @property
    def degrees(self) -> tuple[int, int, int] | None:
        """Of the groups to be made: tensor, pipeline, context; None: no groups."""
        asked = (
            self.tensor_parallel_size, self.pipeline_parallel_size, self.context_parallel_size
        )  # fmt: skip
        if asked == (None, None, None):
            return None
        tensor, pipeline, context = (1 if degree is None else degree for degree in asked)
        return tensor, pipeline, context


@dataclass(frozen=True, slots=True)
class Group:
    """What became of it.

    Attributes:
        meeting: Where the ranks met.
        store: This set-up's part of the store.
        roster: Who is there.
        variables: What was exported for torch and gloo, which were not set before.
    """

    meeting: Rendezvous
    store: Store
    roster: Roster
    variables: tuple[str, ...]


def choose_backend(asked: str | None) -> str:
    """Return the backend's name; by device where none is asked for.

    Raises:
        SetupError: This torch has no such backend.
    """
    if asked is not None and not is_backend_available(asked):
        raise SetupError(
            f"backend {asked!r} is not in this torch; leave it out to choose by device"
        )
    chosen = get_torch_backend() if asked is None else asked.lower()
    if chosen == "ccl":
        # Registers the backend with torch; torch does not know it otherwise.
        __import__("oneccl_bindings_for_pytorch")
    return chosen


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


def withdraw(info: RankInfo, timeout: float, error: Exception) -> None:
    """Tell the others that this rank cannot take part: they would wait for it. Not collective."""
    if info.world_size == 1:
        return
    why = f"{type(error).__name__}: {first_line(error)}"
    # Now, for the others may be long in coming.
    logger.error("rank %d of %d cannot take part: %s", info.rank, info.world_size, why)
    try:
        meeting = meet(info, timedelta(seconds=min(timeout, _WITHDRAWAL)))
        store = _part_of(meeting, next(_generation))
        within(_WITHDRAWAL, lambda: refuse(store, info, _this_process(), why))
    # The caller raises the error that matters.
    except Exception as trouble:  # noqa: BLE001
        logger.debug("rank %d could not tell the others: %s", info.rank, trouble)


def make_group(info: RankInfo, device: torch.device, backend: str, asked: Asked) -> Group:
    """Meet, agree, connect. Collective: every rank calls this.

    Raises:
        SetupError: The ranks cannot meet or connect, one is missing, or they differ.
    """
    timeout, generation, added = timedelta(seconds=asked.timeout), next(_generation), {}
    where = f" at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        meeting = meet(info, timeout)
        where = f" at {meeting.master_addr}:{meeting.master_port} ({meeting.source})"
        # A store that outlives its group (a model may hold it) keeps its old keys.
        store = _part_of(meeting, generation)
        process = _this_process()
        roster = Roster((process[0],), process[1:])
        if info.world_size > 1:
            common = common_facts(arguments=asdict(asked), device=device.type, backend=backend)
            roster = agree(store, info, asked.timeout, common, process)
            # From here on a rank that fails can tell those who wait for it in torch.
            watcher.start(
                Board(
                    info.rank, roster.hosts, store,
                    lambda seconds: _part_of(meeting, generation, seconds), roster.holder,
                )
            )  # fmt: skip
        added = flight.variables()
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
    except BaseException as error:
        for name in added:
            os.environ.pop(name, None)
        have_met = _take_back(info, error)
        # gloo raises a plain RuntimeError where two hosts cannot connect.
        if not isinstance(error, (dist.DistError, RuntimeError)):
            raise
        remedy = (
            f"expected {backend} to connect the ranks, which have all come there; look for the "
            "first error of another rank, and for the interface by which the hosts reach each "
            f"other: {_INTERFACE.get(backend, 'CCL_KVS_IFACE')} names it"
            if have_met
            else "expected every rank to call setup_torch and reach that address; check that no "
            "rank failed earlier and that the port is free"
        )
        raise SetupError(
            f"rank {info.rank} of {info.world_size} could not meet the others{where} within "
            f"{asked.timeout:g} s: {first_line(error)}; {remedy}"
        ) from error
    return Group(meeting, store, roster, tuple(added))


def _take_back(info: RankInfo, error: BaseException) -> bool:
    """Undo a set-up that failed; return whether the ranks had met. Those who wait are ended."""
    own = watcher.find_watcher()
    if own is not None:
        host = own.board.hosts[info.rank]
        what = f"{type(error).__name__}: {first_line(error)}"
        ending.end_job(f"rank {info.rank} on {host} failed in setup_torch: {what}", 1)
        own.stop(own.board.store)
        watcher.forget()
    if dist.is_initialized():
        dist.destroy_process_group()
    return own is not None


def _part_of(meeting: Rendezvous, generation: int, seconds: float | None = None) -> Store:
    """Return a set-up's part of the store; with seconds for each request: a new connection's."""
    whole = meeting.store if seconds is None else side_store(meeting, timedelta(seconds=seconds))
    return PrefixStore(f"ezpz-{generation}", whole)


def _this_process() -> tuple[str, int, int]:
    return get_hostname(), os.getpid(), pid_namespace()


def _see_all_in(store: Store, info: RankInfo, timeout: timedelta) -> None:
    """Keep rank 0, whose process may hold the store, until every rank is through.

    init_process_group can return on rank 0 while others still read from its store: were it
    to leave now, they would be cut off.
    """
    if store.add("through", 1) == info.world_size:
        store.set("all", "through")
    if info.rank == 0:
        store.wait(["all"], timeout)
