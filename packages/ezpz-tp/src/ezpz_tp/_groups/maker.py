"""Making the process groups that one rank belongs to, and freeing them."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from ezpz_tp._errors import ParallelError

from .agreement import agree
from .ranks import RankLayout, ordered
from .world import has_world, initialized_world, live_world

# What follows needs some of its private names, each isolated and said why.
c10d: Any = distributed_c10d

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


class Maker:
    """Makes the groups of one state, each rank set once, and frees them."""

    def __init__(
        self,
        layout: RankLayout,
        rank: int,
        backend: str | Mapping[str, str] | None,
        timeout: timedelta | None,
        wanted: tuple[tuple[str, ...], ...],
        stages: tuple[str, ...] = (),
        *,
        apart: bool = False,
    ) -> None:
        world = initialized_world(str(layout))
        self.world: weakref.ref[ProcessGroup] = weakref.ref(world)
        self._layout = layout
        self._rank = rank
        self._backend = backend
        self._timeout = timeout
        self._apart = apart  # not the world's group, where it has the same ranks
        self._default = dist.get_backend(world)
        self._known: dict[tuple[str | None, tuple[int, ...]], ProcessGroup] = {}
        self.made: list[ProcessGroup] = []
        self._round = _rounds[world] = _rounds.get(world, 0) + 1
        if self._default not in ("fake", "mpi", "undefined") and layout.world_size > 1:
            agree(f"{layout} {wanted=} {stages=} {backend=}", self._round, world, timeout)

    def make(
        self, wanted: Iterable[tuple[str, ...]], stages: Mapping[str, EmbeddingRanks]
    ) -> tuple[dict[tuple[str, ...], ProcessGroup | None], dict[str, tuple[int, ...]]]:
        """Return the groups of axes, and the rank sets of groups of some stages.

        None stands for the group of this rank alone.

        Collective: every rank makes the same calls in the same order. Groups of some stages
        come last, and the ranks that are not in one make the group of those that are not: a
        communicator that is split from the world's wants every rank to take part.
        """
        groups: dict[tuple[str, ...], ProcessGroup | None] = {}
        for axes in wanted:
            several = ordered(axis for axis in axes if self._layout.degree(axis) > 1)
            groups[axes] = groups[several] = self._of(several)
        ranks: dict[str, tuple[int, ...]] = {}
        pipeline = self._layout.group_of("pipeline", self._rank)
        for name, chosen in stages.items():
            inside = tuple(sorted(chosen(list(pipeline))))
            if not set(inside) <= set(pipeline) or len(set(inside)) < len(inside):
                raise ParallelError(
                    f"the {name} ranks are {inside}; expected some of the pipeline's, {pipeline}"
                )
            group = self._part(name, inside, pipeline)
            if self._rank in inside:
                ranks[name] = inside
                groups[(name,)] = group
        return groups, ranks

    def known(self, axes: tuple[str, ...]) -> ProcessGroup | None:
        """Return a group with the rank set of these axes, if there is one."""
        if self._layout.degree(axes) == self._layout.world_size:
            return self.world()
        ranks = self._layout.group_of(axes, self._rank)
        return next((group for (_, r), group in self._known.items() if r == ranks), None)

    def is_live(self) -> bool:
        """Return whether the world that the groups were made in is still there."""
        return has_world(self.world)

    def destroy(self, *, together: bool = True) -> None:
        """Free what was made, and nothing else.

        Args:
            together: First wait, a few seconds at most, until every rank of a group is here.
        """
        self._known.clear()
        tables = c10d._world.pg_map  # noqa: SLF001 - a group not in it was freed by its user
        made, self.made = self.made, []
        if not self.is_live():
            return
        if together:
            self._leave([group for group in made if group in tables])
        while made:
            group = made.pop(0)
            if group in tables:
                dist.destroy_process_group(group)

    def _leave(self, groups: list[ProcessGroup]) -> None:
        """Wait for the other ranks of gloo groups.

        One that closes its end early, just after groups were made, say, is an error to a rank
        that is still connecting.
        """
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
            _log.debug("rank %d leaves its groups alone: %s", self._rank, error)

    def _of(self, axes: tuple[str, ...]) -> ProcessGroup | None:
        """Return the group of axes of degree > 1: made, or one there is with the same ranks."""
        backend = self._backend_of(axes)
        degree = self._layout.degree(axes)
        if degree == 1:
            return None
        if degree == self._layout.world_size and backend is None and not self._apart:
            world = self.world()
            assert world is not None
            return world
        ranks = self._layout.group_of(axes, self._rank)
        if (backend, ranks) not in self._known:
            self._known[backend, ranks] = self._new(
                ".".join(axes), ranks, backend, lambda: self._layout.groups(axes)
            )
        return self._known[backend, ranks]

    def _part(
        self, name: str, inside: tuple[int, ...], pipeline: tuple[int, ...]
    ) -> ProcessGroup | None:
        """Return the group of some stages, or of the others to the ranks of the others."""
        if inside == pipeline:
            return self._of(("pipeline",) if len(pipeline) > 1 else ())
        if len(inside) < 2:
            return None
        others = tuple(rank for rank in pipeline if rank not in inside)
        mine = inside if self._rank in inside else others
        return self._new(
            name if self._rank in inside else f"not-{name}",
            mine,
            self._backend_of(("pipeline",)),
            lambda: _halves(self._layout.groups("pipeline"), pipeline, inside),
        )

    def _backend_of(self, axes: tuple[str, ...]) -> str | None:
        """Return the backend asked for; None is the world's, also when asked for by name."""
        backend = self._backend
        if isinstance(backend, Mapping):
            asked = {backend[axis] for axis in axes if axis in backend}
            backend = asked.pop() if len(axes) == 1 and asked else None
        return None if backend is None or backend.lower() == self._default else backend

    def _new(
        self,
        name: str,
        ranks: tuple[int, ...],
        backend: str | None,
        all_groups: Callable[[], list[tuple[int, ...]]],
    ) -> ProcessGroup:
        """Make one group: only this rank's own, except where the backend cannot."""
        if "mpi" in (backend or self._default):
            mine = None
            for each in all_groups():
                group: ProcessGroup = c10d.new_group(
                    list(each), timeout=self._timeout, backend=backend
                )
                if self._rank in each:
                    mine = group
            assert mine is not None
            self.made.append(mine)
            return mine
        try:
            group = _named_group(
                f"ezpz_tp.{self._round}.{name}.{ranks[0]}", ranks, backend, self._timeout
            )
        except RuntimeError as error:
            raise ParallelError(
                f"rank {self._rank} could not make its {name} group of {len(ranks)} ranks "
                f"{_short(ranks)}: {error}. Every rank must initialize, and destroy, as often as "
                f"the others (this was the {self._round}. time in this world) and with the same "
                "arguments"
            ) from error
        self.made.append(group)
        return group


def _named_group(
    name: str, ranks: tuple[int, ...], backend: str | None, timeout: timedelta | None
) -> ProcessGroup:
    """Make a group that only its members know of, under a name of our own.

    torch.distributed.new_group(use_local_synchronization=True) does the same but for the name,
    which is a hash of the ranks and of the number of groups that this process has. That is
    wrong twice: ranks with a different number of groups of their own never meet, and a group
    made after one was destroyed gets the old name, and with it the addresses that the store
    still holds. So this goes one step below it (torch 2.6 to 2.13 take these arguments).
    """
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


def _halves(
    pipelines: list[tuple[int, ...]], pipeline: tuple[int, ...], inside: tuple[int, ...]
) -> list[tuple[int, ...]]:
    places = [pipeline.index(rank) for rank in inside]
    parts = []
    for ranks in pipelines:
        chosen = tuple(ranks[place] for place in places)
        parts += [chosen, tuple(rank for rank in ranks if rank not in chosen)]
    return parts


def _short(ranks: tuple[int, ...]) -> str:
    return str(list(ranks)) if len(ranks) <= 8 else f"[{ranks[0]}, {ranks[1]}, ..., {ranks[-1]}]"
