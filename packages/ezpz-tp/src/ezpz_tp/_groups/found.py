"""Finding the group that is meant, among those that one rank has."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch.distributed import ProcessGroup

from ezpz_tp._errors import NotInitializedError, ParallelError

from .alone import Alone
from .given import member_ranks
from .maker import EMBEDDING, Maker
from .mesh import MeshGroups
from .positions import Positions
from .ranks import EXPERT_AXES, RankLayout, ordered
from .world import has_world, world_of

_numbers = itertools.count(1)


class Groups(Positions):
    """The groups of a `ParallelState`, by the axes that they span."""

    def __init__(
        self,
        groups: Mapping[tuple[str, ...], ProcessGroup | None],
        layout: RankLayout | None,
        rank: int,
        maker: Maker | None,
        ranks: Mapping[str, tuple[int, ...]] | None,
        mesh: MeshGroups | None,
    ) -> None:
        super().__init__(groups, layout, rank, _lays_experts_as_model(groups, layout, mesh))
        self._maker = maker
        self._mesh = mesh
        self._world = world_of(groups.values()) if maker is None else maker.world
        self._alone: Alone | None = None
        self._groups = {axes: group for axes, group in groups.items() if group is not None}
        self._ranks = dict(ranks or {})
        # What layers and mappings ask for at every call: None where there is nothing to do.
        self.several: dict[str, ProcessGroup | None] = {
            axis: self._groups.get(self._spanned((axis,))) for axis in self._sizes
        }
        self.key: str = str(next(_numbers))  # no other state of this process has it
        self._closed = False

    def group(self, *axes: str) -> ProcessGroup:
        """Return this rank's group along an axis, or the group that spans several.

        Raises:
            ParallelError: The group that spans these axes was not made.
            NotInitializedError: The state, or the world, was destroyed.
        """
        self.check_world()
        found = self._groups.get(axes)
        return self._find(axes) if found is None else found

    def ranks(self, *axes: str) -> tuple[int, ...]:
        """Return the world's numbers of the ranks in a group, in the group's order."""
        if len(axes) == 1 and axes[0] in self._ranks:
            return self._ranks[axes[0]]
        axes = self._known(axes)
        if self.layout is not None:
            return self.layout.group_of(axes, self.rank)
        several = self._spanned(axes) if axes else ()
        return member_ranks(self.group(*several), " x ".join(axes)) if several else (self.rank,)

    def has_group(self, *axes: str) -> bool:
        """Return whether `group` would find one."""
        try:
            self.group(*axes)
        except ParallelError:
            return False
        return True

    def has(self, name: str) -> bool:
        """Return whether this rank is in a group of some stages only (``embedding``)."""
        return name in self._ranks

    def check_world(self) -> None:
        """Raise if the world that the groups were made in is gone, and they with it.

        Raises:
            NotInitializedError: It is.
        """
        # A constant to torch.compile, which cannot look through a weak reference.
        if not torch.compiler.is_compiling() and not has_world(self._world):
            raise NotInitializedError(
                f"the world of {self!r} was destroyed (torch.distributed.destroy_process_group); "
                "initialize again"
            )

    def _find(self, axes: tuple[str, ...]) -> ProcessGroup:
        if self._closed:
            raise NotInitializedError(
                f"the {' x '.join(axes)} group of a ParallelState that was destroyed"
            )
        if len(axes) == 1 and axes[0] in self._ranks:  # a stage's only rank
            self._groups[axes] = self._make_alone()
            return self._groups[axes]
        if len(axes) == 1 and axes[0] in EMBEDDING:
            raise ParallelError(
                f"rank {self.rank} has no {axes[0]} group: its stage, {self.index('pipeline')} "
                f"of {self.size('pipeline')}, is not in one, or create was called without "
                "embedding=True"
            )
        several = self._spanned(axes)
        found = self._groups.get(several) or self._equal(several) if several else self._make_alone()
        if found is None:
            raise ParallelError(
                f"no group spans {' x '.join(axes)} (degrees "
                f"{' x '.join(str(self._sizes[axis]) for axis in axes)}); " + self._advice(several)
            )
        self._groups[axes] = found
        return found

    def _spanned(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Return what names the group of these axes: those of degree > 1, in order."""
        return ordered(axis for axis in self._known(axes) if self._sizes[axis] > 1)

    def _equal(self, axes: tuple[str, ...]) -> ProcessGroup | None:
        """Return a group of other axes that has the same ranks, if there is one."""
        if self._maker is not None:
            return self._maker.known(axes)
        if self._mesh is not None:
            return self._mesh.known(axes)
        if self.layout is not None:
            ranks = self.layout.group_of(axes, self.rank)
            for others, group in self._groups.items():
                if self.layout.group_of(others, self.rank) == ranks:
                    return group
        return None

    def _advice(self, axes: tuple[str, ...]) -> str:
        if self._mesh is not None:
            return self._mesh.advice(axes)
        if self._maker is None:
            return f"give it: ParallelState.from_groups(also={{{axes!r}: ...}})"
        return f"ask for it when the groups are made: also=[{axes!r}]"

    def alone(self) -> ProcessGroup:
        """Return the group of this rank alone: of an axis whose degree is always 1."""
        self.check_world()
        if self._closed:
            raise NotInitializedError("a group of a ParallelState that was destroyed")
        return self._make_alone()

    def _make_alone(self) -> ProcessGroup:
        if self._alone is None:
            self._alone = Alone(self.rank)
        return self._alone


def _lays_experts_as_model(
    groups: Mapping[tuple[str, ...], ProcessGroup | None],
    layout: RankLayout | None,
    mesh: MeshGroups | None,
) -> bool:
    """Return whether an expert is split and copied as the rest of the model."""
    if layout is not None and mesh is None:
        return not layout.experts_fit
    return all(groups.get((axis,)) is None for axis in EXPERT_AXES)
