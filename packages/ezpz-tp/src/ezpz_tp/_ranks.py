"""Which ranks belong together: pure arithmetic over degrees, no process group and no torch.

The order is Megatron-LM's: tensor parallel varies fastest, then context, then data,
and pipeline slowest (megatron/core/parallel_state.py, ``order="tp-cp-ep-dp-pp"``).
"""

from __future__ import annotations

from dataclasses import dataclass

AXES = ("tensor", "context", "data", "pipeline")
"""From the fastest varying axis to the slowest."""


@dataclass(frozen=True, slots=True)
class RankLayout:
    """How ``world_size`` ranks are laid out over four axes.

    Args:
        world_size: Number of ranks in all.
        tensor: Degree of tensor parallelism.
        context: Degree of context parallelism.
        pipeline: Degree of pipeline parallelism. What is left is the data-parallel degree.

    Raises:
        ValueError: A degree is below 1, or their product does not divide the world size.

    >>> layout = RankLayout(world_size=16, tensor=2)
    >>> layout.groups("tensor")[:3]
    [(0, 1), (2, 3), (4, 5)]
    >>> layout.group_of("data", rank=3)
    (1, 3, 5, 7, 9, 11, 13, 15)
    """

    world_size: int
    tensor: int = 1
    context: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        degrees = {"tensor": self.tensor, "context": self.context, "pipeline": self.pipeline}
        for name, value in {"world_size": self.world_size, **degrees}.items():
            if value < 1:
                raise ValueError(f"{name}={value}; expected at least 1")
        product = self.tensor * self.context * self.pipeline
        if self.world_size % product:
            raise ValueError(
                f"tensor {self.tensor} x context {self.context} x pipeline {self.pipeline} = "
                f"{product} does not divide the world size {self.world_size}"
            )

    @property
    def data(self) -> int:
        """Degree of data parallelism: what the other axes leave of the world."""
        return self.world_size // (self.tensor * self.context * self.pipeline)

    def degree(self, axis: str) -> int:
        """Return the degree of one of `AXES`."""
        if axis not in AXES:
            raise ValueError(f"axis {axis!r}; expected one of {', '.join(AXES)}")
        value: int = getattr(self, axis)
        return value

    def stride(self, axis: str) -> int:
        """Return the distance between neighbours along an axis, in ranks."""
        self.degree(axis)
        stride = 1
        for faster in AXES[: AXES.index(axis)]:
            stride *= self.degree(faster)
        return stride

    def index(self, axis: str, rank: int) -> int:
        """Return the position of a rank along an axis, from 0."""
        self._check(rank)
        return rank // self.stride(axis) % self.degree(axis)

    def group_of(self, axis: str, rank: int) -> tuple[int, ...]:
        """Return the ranks, in order, that differ from ``rank`` along that axis only."""
        stride, degree = self.stride(axis), self.degree(axis)
        first = rank - self.index(axis, rank) * stride
        return tuple(range(first, first + stride * degree, stride))

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """Return every group of an axis, ordered by its first rank."""
        return [
            self.group_of(axis, rank)
            for rank in range(self.world_size)
            if self.index(axis, rank) == 0
        ]

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank}; expected 0 to {self.world_size - 1}")
