"""Where one rank is: its position and the degree along each axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.distributed import ProcessGroup

from .ranks import AXES, EXPERT_AXES, RankLayout, ordered


class Positions:
    """The sizes and positions of a `ParallelState`, by its layout or, without one, its groups."""

    def __init__(
        self,
        groups: Mapping[tuple[str, ...], ProcessGroup | None],
        layout: RankLayout | None,
        rank: int,
    ) -> None:
        self.layout = layout
        self.rank = rank
        axes = AXES if layout is not None and not layout.experts_fit else (*AXES, *EXPERT_AXES)
        if layout is None:
            ones = {axis: groups.get((axis,)) for axis in axes}
            self._sizes = {a: 1 if group is None else group.size() for a, group in ones.items()}
            self._indexes = {a: 0 if group is None else group.rank() for a, group in ones.items()}
        else:
            self._sizes = {axis: layout.degree(axis) for axis in axes}
            self._indexes = {axis: layout.index(axis, rank) for axis in axes}

    def index(self, *axes: str) -> int:
        """Return this rank's position along an axis, or within several, from 0."""
        if len(axes) == 1 and axes[0] in self._indexes:
            return self._indexes[axes[0]]
        self._known(axes)
        if self.layout is not None:
            return self.layout.index(axes, self.rank)
        position, span = 0, 1
        for axis in ordered(axes):
            position += self._indexes[axis] * span
            span *= self._sizes[axis]
        return position

    def size(self, *axes: str) -> int:
        """Return the number of ranks along an axis, or in the group that spans several."""
        self._known(axes)
        product = 1
        for axis in axes:  # plainly, for torch.compile
            product *= self._sizes[axis]
        return product

    def _known(self, axes: Sequence[str]) -> None:
        if not axes or len(set(axes)) < len(axes):
            raise ValueError(f"axes {axes}; expected one or more, each once")
        for axis in axes:
            if axis not in self._sizes:
                raise ValueError(f"axis {axis!r}; expected one of {', '.join(self._sizes)}")
