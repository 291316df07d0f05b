"""Where one rank is: its position and the degree along each axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.distributed import ProcessGroup

from .ranks import AXES, EXPERT_AXES, RankLayout, ordered

# Without expert parallelism, an expert is split and copied as the rest of the model.
_AS_MODEL: dict[str, tuple[str, ...]] = {
    "expert_tensor": ("tensor",),
    "expert": (),
    "expert_data": ("context", "data"),
}


class Positions:
    """The sizes and positions of a `ParallelState`, by its layout or, without one, its groups."""

    def __init__(
        self,
        groups: Mapping[tuple[str, ...], ProcessGroup | None],
        layout: RankLayout | None,
        rank: int,
        experts_as_model: bool,
    ) -> None:
        self.layout = layout
        self.rank = rank
        self._sizes: dict[str, int] = {}
        self._indexes: dict[str, int] = {}
        self._experts_as_model = experts_as_model
        for axis in AXES if experts_as_model else (*AXES, *EXPERT_AXES):
            group = groups.get((axis,))
            if layout is not None:
                self._sizes[axis] = layout.degree(axis)
                self._indexes[axis] = layout.index(axis, rank)
            else:
                self._sizes[axis] = 1 if group is None else group.size()
                self._indexes[axis] = 0 if group is None else group.rank()
        if experts_as_model:
            for axis, others in _AS_MODEL.items():
                self._sizes[axis] = self.size(*others) if others else 1
                self._indexes[axis] = self.index(*others) if others else 0

    def index(self, *axes: str) -> int:
        """Return this rank's position along an axis, or within several, from 0."""
        if len(axes) == 1 and axes[0] in self._indexes:
            return self._indexes[axes[0]]
        axes = self._known(axes)
        if self.layout is not None:
            return self.layout.index(axes, self.rank)
        position, span = 0, 1
        for axis in sorted(ordered(axes), key="pipeline".__eq__):  # the slowest of both grids
            position += self._indexes[axis] * span
            span *= self._sizes[axis]
        return position

    def size(self, *axes: str) -> int:
        """Return the number of ranks along an axis, or in the group that spans several."""
        if len(axes) == 1 and axes[0] in self._sizes:
            return self._sizes[axes[0]]
        product = 1
        for axis in self._known(axes):  # plainly, for torch.compile
            product *= self._sizes[axis]
        return product

    def _known(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Return axes, those of experts as the model's where the two are the same."""
        if not axes or len(set(axes)) < len(axes):
            raise ValueError(f"axes {axes}; expected one or more, each once")
        for axis in axes:
            if axis not in self._sizes:
                raise ValueError(f"axis {axis!r}; expected one of {', '.join(self._sizes)}")
        if not self._experts_as_model or not any(axis in _AS_MODEL for axis in axes):
            return tuple(axes)
        plain: list[str] = []
        for axis in axes:
            plain += _AS_MODEL.get(axis, (axis,))
        if len(set(plain)) < len(plain):
            raise ValueError(f"axes {axes}: those of experts are the model's here, named twice")
        return tuple(plain)
