"""Process groups of one rank: the world's, those that are made, given or of one rank alone."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d
from torch.distributed import ProcessGroup, distributed_c10d
from torch.futures import Future

from ._errors import DegreeError, NotInitializedError, ParallelError
from ._ranks import AXES, RankLayout, ordered

# The group of all ranks, and whether it is still the one that groups were made in.

c10d: Any = distributed_c10d  # of which some private names are needed
World = weakref.ReferenceType[ProcessGroup]


def live_world() -> ProcessGroup | None:
    """Return the group of all ranks, or None before torch.distributed has one."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    return dist.group.WORLD


def initialized_world(wanted: str) -> ProcessGroup:
    """Return the group of all ranks; without one raise an error that says what was wanted."""
    world = live_world()
    if world is None:
        raise NotInitializedError(
            f"groups for {wanted} were asked for, but torch.distributed has no process group; "
            "call torch.distributed.init_process_group first"
        )
    return world


def find_world(groups: Iterable[ProcessGroup | None]) -> World | None:
    """Return the world that ends these groups with it: None if it knows none of them."""
    world = live_world()
    if world is None or not any(group in c10d._world.pg_map for group in groups):  # noqa: SLF001
        return None
    return weakref.ref(world)


def has_world(world: World | None) -> bool:
    """Return whether a world is still there. Cheap: getters ask it at every call."""
    if world is None:
        return True
    kept = world()
    return kept is not None and kept is c10d._world.default_pg  # noqa: SLF001


# Whether all ranks ask for the same groups: ranks that differ would never meet.


def agree(arguments: str, number: int, world: ProcessGroup, timeout: timedelta | None) -> None:
    """Compare the arguments of all ranks, before any of them makes a group."""
    # Collective over the store: two writes and one wait for each rank. The last rank to come
    # lets all go on; one that differs from the first to come tells all at once.
    store = c10d._get_default_store()  # noqa: SLF001 - there is no public way to it
    rank = world.rank()
    size = world.size()
    key = f"ezpz_tp.{number}"
    first = store.compare_set(key, "", f"{rank} {arguments}").decode()
    one, expected = first.split(" ", 1)
    if expected != arguments:
        store.compare_set(
            f"{key}.go",
            "",
            f"rank {rank} was asked for {arguments}, and rank {one} for {expected}; give every "
            "rank the same arguments",
        )
    if store.add(f"{key}.came", 1) == size:
        store.compare_set(f"{key}.go", "", _GO)
    try:
        if timeout is not None:  # else the store's own, with which it gets what is not there yet
            store.wait([f"{key}.go"], timeout)
        answer = store.get(f"{key}.go").decode()
    except RuntimeError as error:
        came = "an unknown number"
        with contextlib.suppress(RuntimeError):  # the rank that keeps the store may be gone
            came = str(store.add(f"{key}.came", 0))
        raise ParallelError(
            f"rank {rank} waited for all {size} ranks to make {arguments}; "
            f"{came} came: {error}. Every rank must initialize, and destroy, as "
            f"often as the others (this was the {number}. time in this world)"
        ) from error
    if answer != _GO:
        with contextlib.suppress(RuntimeError):
            # A moment for all to read: a rank that ends now may take the store with it.
            if store.add(f"{key}.read", 1) == size:
                store.set(f"{key}.all read", "")
            store.wait([f"{key}.all read"], timedelta(seconds=2))
        raise DegreeError(answer)


_GO = "go"


# The group of one rank: what an axis of degree 1 has, where every collective is a copy.
#
# It exists so that a getter never returns None, which torch.distributed takes for the whole
# world, and so that nothing is made: no store is asked and no communicator opened.


_core: Any = _distributed_c10d  # private and untyped
_numbers = itertools.count()
_Group: Any = dist.ProcessGroup  # whose overloads say more than a group of one needs


class SingleRankGroup(_Group):  # type: ignore[misc]
    """A process group of this rank and no other, on any device."""

    # Its methods are those that torch.distributed's functions, functional collectives and
    # DistributedDataParallel call on a group, so any of these may be given it. They take the
    # options that a group takes, and need none.

    def __init__(self, rank: int) -> None:
        super().__init__(0, 1)
        self._name = f"ezpz_tp.alone.{next(_numbers)}"
        self._listed = _register(self, rank)

    def forget(self) -> None:
        tables = c10d._world  # noqa: SLF001
        if self._listed and tables.pg_group_ranks.pop(self, None) is not None:  # else cleared
            tables.pg_map.pop(self, None)
            tables.pg_backend_config.pop(self, None)
            _core._unregister_process_group(self._name)  # noqa: SLF001
        self._listed = False

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return "one rank alone"

    def getGroupName(self) -> str:  # noqa: N802 - torch's
        return self._name

    def getBackendName(self) -> str:  # noqa: N802 - torch's
        return "alone"

    _get_backend_name = getBackendName

    def shutdown(self) -> None:
        """Do nothing: nothing is open."""

    abort = shutdown

    def allreduce(self, tensors: Any, *_: object, **__: object) -> dist.Work:
        """Leave the tensors as they are: a sum of one."""
        return _finished_work(_flatten(tensors))

    allreduce_coalesced = broadcast = reduce = allreduce

    def barrier(self, *_: object, **__: object) -> dist.Work:
        return _finished_work([])

    monitored_barrier = barrier

    def allgather(self, outputs: Any, inputs: Any, *_: object) -> dist.Work:
        """Copy what is sent to where it is received, in whatever lists both are."""
        done = _flatten(outputs)
        for output, input_ in zip(done, _flatten(inputs), strict=True):
            output.copy_(input_.reshape(output.shape))
        return _finished_work(done)

    gather = allgather_coalesced = reduce_scatter = scatter = alltoall = allgather
    all_to_all_single = alltoall_base = allgather
    # The newer names are those of torch 2.13; 2.6 knows the older ones only.
    _allgather_base = all_gather_single = allgather
    _reduce_scatter_base = reduce_scatter_single = allgather
    allgather_into_tensor_coalesced = all_gather_single_coalesced = allgather
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced = allgather

    def send(self, *_: object) -> dist.Work:
        """Refuse: there is no one to send to."""
        raise ParallelError("send or receive in a group of this rank alone; there is no peer")

    recv = recv_anysource = send


def _flatten(tensors: Any) -> list[Tensor]:
    if isinstance(tensors, Tensor):
        return [tensors]
    flat = []
    for each in tensors:
        flat += _flatten(each)
    return flat


def _finished_work(tensors: list[Tensor]) -> dist.Work:
    """Return work that has ended, with the tensors that DistributedDataParallel asks it for."""
    devices = {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
    future: Future[list[Tensor]] = Future(devices=list(devices))
    future.set_result(tensors)
    work: dist.Work = _core._create_work_from_future(future)  # noqa: SLF001
    return work


def _register(group: SingleRankGroup, rank: int) -> bool:
    """Enter a group into the tables where torch.distributed's functions look groups up."""
    # ``dist.get_rank(group)``, ``dist.get_backend(group)``, ``dist.broadcast(src=...)`` and
    # functional collectives (by name) do. Not into the table of names: the number of its
    # entries is part of the names of groups that others make.
    if not dist.is_available() or not dist.is_initialized():
        return False
    c10d._world.pg_group_ranks[group] = {rank: 0}  # noqa: SLF001
    c10d._world.pg_map[group] = ("alone", None)  # noqa: SLF001
    c10d._world.pg_backend_config[group] = dist.get_backend_config()  # noqa: SLF001
    _core._register_process_group(group.group_name, group)  # noqa: SLF001
    return True


# Process groups that were given: is this rank in them, and do they fit.


def member(group: ProcessGroup | None, what: str) -> ProcessGroup | None:
    # Compilers before torch 2.13's do not know `hasattr` of a group; eager code has asked by then.
    if group is None or torch.compiler.is_compiling():
        return group
    if not hasattr(group, "size"):
        raise ParallelError(
            f"the {what} group is {group!r}; expected a process group that this rank is in. "
            "torch.distributed.new_group returns this to the ranks that are not in the group: "
            "give each rank the group of its own"
        )
    return group


def member_ranks(group: ProcessGroup, what: str) -> tuple[int, ...]:
    try:
        return tuple(dist.get_process_group_ranks(group))
    except KeyError:
        raise ParallelError(
            f"torch.distributed does not know the {what} group, so its ranks are unknown; give "
            "ParallelState.from_groups(layout=...)"
        ) from None


def check_sizes(groups: Mapping[tuple[str, ...], ProcessGroup | None], layout: RankLayout) -> None:
    for axes, group in groups.items():
        if group is None and axes[0] not in AXES:  # not given, rather than of one
            continue
        size = 1
        if group is not None:
            size = group.size()
        degree = layout.degree(axes)
        if size != degree:
            raise DegreeError(
                f"the {' x '.join(axes)} group has {size} ranks; the layout's degree is {degree}"
            )


def position(groups: Mapping[tuple[str, ...], ProcessGroup | None]) -> int:
    """Return the rank that Megatron's order gives the member of these groups."""
    index = 0
    span = 1
    for axis in AXES:
        group = groups[axis,]
        if group is not None:
            index += group.rank() * span
            span *= group.size()
    return index


# Making the groups that one rank belongs to, and freeing them.

EmbeddingRanks = Callable[[list[int]], Sequence[int]]
"""From the ranks of a pipeline, first stage first, to those that take part."""

EMBEDDING: dict[str, EmbeddingRanks] = {
    "embedding": lambda ranks: sorted({ranks[0], ranks[-1]}),
    "position_embedding": lambda ranks: ranks[:1],
}
"""The stages that hold word embeddings (tied ones: first and last) and position embeddings."""

_log = logging.getLogger(__name__)
_PATIENCE = timedelta(seconds=5)

# How many times groups were made in a world: the same on every rank, because making them is
# collective. It makes the names of groups unique.
_rounds: weakref.WeakKeyDictionary[ProcessGroup, int] = weakref.WeakKeyDictionary()


def next_round(arguments: str, world: ProcessGroup, timeout: timedelta | None = None) -> int:
    """Return the number of this making of groups, after all ranks agreed on it."""
    number = _rounds[world] = _rounds.get(world, 0) + 1
    if dist.get_backend(world) not in ("fake", "mpi", "undefined") and world.size() > 1:
        agree(arguments, number, world, timeout)
    return number


class Maker:
    """Makes the groups of one state, each rank set once, and frees them."""

    def __init__(
        self,
        layout: RankLayout,
        backend: str | Mapping[str, str] | None,
        timeout: timedelta | None,
        *,
        apart: bool,
    ) -> None:
        world = initialized_world(str(layout))
        self.world: weakref.ref[ProcessGroup] = weakref.ref(world)
        self._layout = layout
        self.rank: int = world.rank()
        self._backend = backend
        self._timeout = timeout
        self._apart = apart  # not the world's group, where it has the same ranks
        self._default = dist.get_backend(world)
        self._known: dict[tuple[str | None, tuple[int, ...]], ProcessGroup] = {}
        self.made: list[ProcessGroup] = []

    def make(
        self, wanted: tuple[tuple[str, ...], ...], stages: Mapping[str, EmbeddingRanks]
    ) -> tuple[dict[tuple[str, ...], ProcessGroup | None], dict[str, tuple[int, ...]]]:
        """Return the groups of axes, and the rank sets of groups of some stages."""
        # None stands for the group of this rank alone.
        #
        # Collective: every rank makes the same calls in the same order. Groups of some stages
        # come last, and the ranks that are not in one make the group of those that are not: a
        # communicator that is split from the world's wants every rank to take part.
        world = initialized_world(str(self._layout))
        backend = self._backend
        asked = f"{self._layout} {wanted=} stages={tuple(stages)} {backend=}"
        self._round = next_round(asked, world, self._timeout)
        groups: dict[tuple[str, ...], ProcessGroup | None] = {}
        for axes in wanted:
            several = ordered(axis for axis in axes if self._layout.degree(axis) > 1)
            groups[axes] = groups[several] = self._find_or_create(several)
        ranks: dict[str, tuple[int, ...]] = {}
        pipeline = self._layout.group_of("pipeline", self.rank)
        for name, chosen in stages.items():
            inside = tuple(sorted(chosen(list(pipeline))))
            if not set(inside) <= set(pipeline) or len(set(inside)) < len(inside):
                raise ParallelError(
                    f"the {name} ranks are {inside}; expected some of the pipeline's, {pipeline}"
                )
            group = self._stage_group(name, inside, pipeline)
            if self.rank in inside:
                ranks[name] = inside
                groups[(name,)] = group
        return groups, ranks

    def known(self, axes: tuple[str, ...]) -> ProcessGroup | None:
        """Return a group with the rank set of these axes, if there is one."""
        if self._layout.degree(axes) == self._layout.world_size:
            return self.world()
        ranks = self._layout.group_of(axes, self.rank)
        return next((group for (_, r), group in self._known.items() if r == ranks), None)

    def destroy(self, *, together: bool = True) -> None:
        """Free what was made, and nothing else."""
        self._known.clear()
        tables = c10d._world.pg_map  # noqa: SLF001 - a group not in it was freed by its user
        made = self.made
        self.made = []
        if not has_world(self.world):
            return
        if together:
            self._destroy([group for group in made if group in tables])
        while made:
            group = made.pop(0)
            if group in tables:
                dist.destroy_process_group(group)

    def _destroy(self, groups: list[ProcessGroup]) -> None:
        """Wait for the other ranks of gloo groups."""
        # One that closes its end early, just after groups were made, say, is an error to a rank
        # that is still connecting.
        store = c10d._get_default_store()  # noqa: SLF001
        keys = []
        try:
            for group in groups:
                if "gloo" in dist.get_backend_config(group):
                    keys.append(f"{group.group_name}.left")
                    if store.add(f"{keys[-1]}.count", 1) == group.size():
                        store.set(keys[-1], "all")
            if keys:
                store.wait(keys, _PATIENCE)
        except RuntimeError as error:  # some rank is gone: there is nothing to wait for
            _log.debug("rank %d leaves its groups alone: %s", self.rank, error)

    def _find_or_create(self, axes: tuple[str, ...]) -> ProcessGroup | None:
        """Return the group of axes of degree > 1: made, or one there is with the same ranks."""
        backend = self._find_backend(axes)
        degree = self._layout.degree(axes)
        if degree == 1:
            return None
        if degree == self._layout.world_size and backend is None and not self._apart:
            world = self.world()
            assert world is not None
            return world
        ranks = self._layout.group_of(axes, self.rank)
        if (backend, ranks) not in self._known:
            self._known[backend, ranks] = self._create_group(
                ".".join(axes), ranks, backend, lambda: self._layout.groups(axes)
            )
        return self._known[backend, ranks]

    def _stage_group(
        self, name: str, inside: tuple[int, ...], pipeline: tuple[int, ...]
    ) -> ProcessGroup | None:
        """Return the group of some stages, or of the others to the ranks of the others."""
        if inside == pipeline:
            return self._find_or_create(("pipeline",) if len(pipeline) > 1 else ())
        if len(inside) < 2:
            return None
        places = {pipeline.index(rank) for rank in inside}

        def halves(ranks: tuple[int, ...]) -> list[tuple[int, ...]]:
            chosen = tuple(rank for place, rank in enumerate(ranks) if place in places)
            return [chosen, tuple(rank for rank in ranks if rank not in chosen)]

        def all_halves() -> list[tuple[int, ...]]:
            groups = []
            for ranks in self._layout.groups("pipeline"):
                groups += halves(ranks)
            return groups

        mine = inside
        if self.rank not in inside:
            mine = halves(pipeline)[1]
        return self._create_group(
            name if self.rank in inside else f"not-{name}",
            mine,
            self._find_backend(("pipeline",)),
            all_halves,
        )

    def _find_backend(self, axes: tuple[str, ...]) -> str | None:
        """Return the backend asked for; None is the world's, also when asked for by name."""
        backend = self._backend
        if isinstance(backend, Mapping):
            asked = {backend[axis] for axis in axes if axis in backend}
            backend = None
            if len(axes) == 1 and asked:
                backend = asked.pop()
        if backend is None or backend.lower() == self._default:
            return None
        return backend

    def _create_group(
        self,
        name: str,
        ranks: tuple[int, ...],
        backend: str | None,
        all_groups: Callable[[], list[tuple[int, ...]]],
    ) -> ProcessGroup:
        name = f"{self._round}.{name}"
        group = new_group(name, ranks, all_groups, backend, self._timeout)
        self.made.append(group)
        return group


def new_group(
    name: str,
    ranks: tuple[int, ...],
    all_groups: Callable[[], Iterable[Sequence[int]]],
    backend: str | None = None,
    timeout: timedelta | None = None,
) -> ProcessGroup:
    """Make one group: only this rank's own, except where the backend cannot."""
    if "mpi" in (backend or dist.get_backend()):
        mine = None
        for each in all_groups():
            group: ProcessGroup = c10d.new_group(list(each), timeout=timeout, backend=backend)
            if dist.get_rank() in each:
                mine = group
        assert mine is not None
        return mine
    try:
        return _named_group(f"ezpz_tp.{name}.{ranks[0]}", ranks, backend, timeout)
    except RuntimeError as error:
        number, _, name = name.partition(".")
        raise ParallelError(
            f"rank {dist.get_rank()} could not make its {name} group of {len(ranks)} ranks "
            f"{_abbreviate(ranks)}: {error}. Every rank must initialize, and destroy, as often as "
            f"the others (this was the {number}. time in this world) and with the same "
            "arguments"
        ) from error


# How often this process made a group of the same ranks, by a hash of these.
_again: weakref.WeakKeyDictionary[ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()


def make_group(
    ranks: Iterable[int], backend: str | None = None, timeout: timedelta | None = None
) -> ProcessGroup:
    """Return torch's process group of some ranks, made by these ranks alone.

    ``torch.distributed.new_group(use_local_synchronization=True)`` names a group by its ranks and
    the number of groups that a process is in, so that ranks that are in unequally many never meet.
    Here the name depends on the ranks, and on how often they made a group together.

    Collective: every rank of the group calls this, and no other.

    Args:
        ranks: Of the world, in any order; this rank is one of them.
        backend: ``"gloo"``, ...; default: the world's. Not MPI, which needs all ranks.
        timeout: That of the group's collectives; default: the backend's.

    Raises:
        NotInitializedError: torch.distributed has no process group yet.
        ParallelError: This rank is not one of them, or the backend is MPI.
        RuntimeError: Not all of them came (torch's own).
    """
    mine = tuple(sorted(ranks))
    world = initialized_world(f"ranks {_abbreviate(mine)}")
    if world.rank() not in mine:
        raise ParallelError(
            f"rank {world.rank()} makes a group of ranks {_abbreviate(mine)}; expected it to be "
            "one of them: the others of the world do not call this"
        )
    if "mpi" in (backend or dist.get_backend(world)):
        raise ParallelError(
            f"ranks {_abbreviate(mine)} alone make a group over MPI; expected another backend; MPI "
            "needs every rank of the world: torch.distributed.new_group"
        )
    which = hashlib.blake2b(repr(mine).encode(), digest_size=16).hexdigest()
    times = _again.setdefault(world, Counter())
    times[which] += 1
    return _named_group(f"ezpz_tp.{which}.{times[which]}", mine, backend, timeout)


def _named_group(
    name: str, ranks: tuple[int, ...], backend: str | None, timeout: timedelta | None
) -> ProcessGroup:
    """Make a group that only its members know of, under a name of our own."""
    # torch.distributed.new_group(use_local_synchronization=True) does the same but for the name,
    # which is a hash of the ranks and of the number of groups that this process has. That is
    # wrong twice: ranks with a different number of groups of their own never meet, and a group
    # made after one was destroyed gets the old name, and with it the addresses that the store
    # still holds. So this goes one step below it (torch 2.6 to 2.13 take these arguments).
    world = live_world()
    assert world is not None
    if callable(getattr(world, "new_group", None)):  # a backend that makes its own subgroups
        made: ProcessGroup = c10d.new_group(
            list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True
        )
        return made
    world_backend, store = c10d._world.pg_map[world]  # noqa: SLF001
    backend = dist.Backend(backend or world_backend)
    made, _ = c10d._new_process_group_helper(  # noqa: SLF001
        len(ranks),
        ranks.index(world.rank()),
        list(ranks),
        backend,
        store,
        name,
        timeout=timeout or c10d._get_default_timeout(backend),  # noqa: SLF001
        device_id=world.bound_device_id,
        group_desc=name,
    )
    c10d._world.pg_group_ranks[made] = {rank: index for index, rank in enumerate(ranks)}  # noqa: SLF001
    return made


def _abbreviate(ranks: tuple[int, ...]) -> str:
    if len(ranks) <= 8:
        return str(list(ranks))
    return f"[{ranks[0]}, {ranks[1]}, ..., {ranks[-1]}]"
