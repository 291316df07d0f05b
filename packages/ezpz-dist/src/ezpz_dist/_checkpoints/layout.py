"""Where this rank stands in ezpz_tp's groups; alone along every axis where there are none."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

AXES = ("tensor", "context", "pipeline", "data")


@dataclass(frozen=True, slots=True)
class Layout:
    """Degrees, and this rank's place.

    Attributes:
        degrees: By axis.
        index: By axis.
    """

    degrees: dict[str, int] = field(default_factory=lambda: dict.fromkeys(AXES, 1))
    index: dict[str, int] = field(default_factory=lambda: dict.fromkeys(AXES, 0))

    @property
    def is_first_of_stage(self) -> bool:
        """Whether this rank speaks for its pipeline stage."""
        return not any(self.index[axis] for axis in AXES if axis != "pipeline")

    @property
    def is_first_replica(self) -> bool:
        """Whether this rank speaks for those that hold the same parameters."""
        return not self.index["data"] and not self.index["context"]

    @property
    def stream(self) -> tuple[int, ...]:
        """What tells random streams apart: tensor-parallel ranks draw the same numbers."""
        return tuple(self.index[axis] for axis in AXES if axis != "tensor")


def current_layout(rank: int, size: int) -> Layout:
    """Return the layout of a rank of a world; all are data parallel without ezpz_tp's groups."""
    tp = sys.modules.get("ezpz_tp")
    state = tp.current_state() if tp else None
    if state is None or not state.is_live:
        alone = Layout()
        return Layout(alone.degrees | {"data": size}, alone.index | {"data": rank})
    return Layout(
        {axis: state.size(axis) for axis in AXES}, {axis: state.index(axis) for axis in AXES}
    )
