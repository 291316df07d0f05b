"""Which ranks belong together: pure arithmetic over degrees, no process group and no torch.

The order is Megatron-LM's unless asked otherwise: tensor parallel varies fastest, then
context, then data, and pipeline slowest (megatron/core/parallel_state.py,
``order="tp-cp-ep-dp-pp"``). Experts lie on a grid of their own over the same ranks, as
there: expert tensor, expert, expert data, pipeline, in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ._errors import DegreeError

AXES = ("tensor", "context", "data", "pipeline")
"""The axes of the model, in the default order: from the fastest varying to the slowest."""

EXPERT_AXES = ("expert_tensor", "expert", "expert_data")
"""The axes of its experts, which divide the ranks of a pipeline stage once more."""

ORDER = "tp-cp-ep-dp-pp"

_MODEL = {"tp": "tensor", "cp": "context", "dp": "data", "pp": "pipeline"}
_EXPERT = {"tp": "expert_tensor", "ep": "expert", "dp": "expert_data", "pp": "pipeline"}


def ordered(axes: Iterable[str]) -> tuple[str, ...]:
    """Return axes in the default order, so that the same axes are always the same key."""
    return tuple(sorted(axes, key=(*AXES, *EXPERT_AXES).index))


@dataclass(frozen=True, slots=True)
class RankLayout:
    """How ``world_size`` ranks are laid out over the axes. What is asked of one rank is cheap.

    Args:
        world_size: Number of ranks in all.
        tensor: Degree of tensor parallelism.
        context: Degree of context parallelism.
        pipeline: Degree of pipeline parallelism. What is left is the data-parallel degree.
        expert: Degree of expert parallelism.
        expert_tensor: Degree of tensor parallelism inside an expert; as ``tensor`` if None.
        order: ``tp``, ``cp``, ``ep``, ``dp`` and ``pp`` from the fastest varying to the
            slowest, joined by ``-``. An axis of degree 1 may be left out.

    Raises:
        DegreeError: A degree is below 1, their product does not divide the world size, or
            the order puts model and experts into different pipelines. It is a `ValueError`.

    >>> layout = RankLayout(world_size=16, tensor=2)
    >>> layout.groups("tensor")[:3]
    [(0, 1), (2, 3), (4, 5)]
    >>> layout.group_of("data", rank=3)
    (1, 3, 5, 7, 9, 11, 13, 15)
    >>> RankLayout(16, tensor=2, pipeline=2).group_of(("tensor", "pipeline"), rank=5)
    (4, 5, 12, 13)
    """

    world_size: int
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    order: str = ORDER

    def __post_init__(self) -> None:
        degrees = {"tensor": self.tensor, "context": self.context, "pipeline": self.pipeline}
        experts = {"expert_tensor": self._degree("expert_tensor"), "expert": self.expert}
        for name, value in {"world_size": self.world_size, **degrees, **experts}.items():
            if value < 1:
                raise DegreeError(f"{name}={value}; expected at least 1")
        _divides(degrees, self.world_size)
        _divides({**experts, "pipeline": self.pipeline}, self.world_size)
        self._check_order()

    @property
    def data(self) -> int:
        """Degree of data parallelism: what the other axes leave of the world."""
        return self.world_size // (self.tensor * self.context * self.pipeline)

    @property
    def expert_data(self) -> int:
        """Degree of data parallelism of the experts' parameters."""
        return self.world_size // (self._degree("expert_tensor") * self.expert * self.pipeline)

    @property
    def experts_fit(self) -> bool:
        """Whether model and experts have the same pipelines, as they must (Megatron's rule)."""
        if self.pipeline == 1:
            return True
        grids = self._strides(("pipeline",)), self._strides(("pipeline", "expert"))
        return grids[0]["pipeline"] == grids[1]["pipeline"]

    def _degree(self, axis: str) -> int:
        """Return the degree of an axis without checking its name."""
        if axis == "expert_tensor" and self.expert_tensor is None:
            return self.tensor
        value: int = getattr(self, axis)
        return value

    def degree(self, axis: str | Iterable[str]) -> int:
        """Return the degree of an axis, or the product of several."""
        return math.prod(map(self._degree, self._names(axis)))

    def stride(self, axis: str) -> int:
        """Return the distance between neighbors along an axis, in ranks."""
        (name,) = self._names(axis)
        return self._strides((name,))[name]

    def index(self, axis: str | Iterable[str], rank: int) -> int:
        """Return the position of a rank along an axis, or within several, from 0."""
        self._check(rank)
        position = 0
        span = 1
        for name, stride in self._strides(self._names(axis)).items():
            degree = self._degree(name)
            position += rank // stride % degree * span
            span *= degree
        return position

    def group_of(self, axis: str | Iterable[str], rank: int) -> tuple[int, ...]:
        """Return the ranks, in order, that differ from ``rank`` along those axes only."""
        self._check(rank)
        strides = self._strides(self._names(axis))
        first = rank
        for name, stride in strides.items():
            first -= rank // stride % self._degree(name) * stride
        ranks = [first]
        for name, stride in strides.items():
            inner = list(ranks)
            for step in range(stride, stride * self._degree(name), stride):
                ranks += [rank + step for rank in inner]
        return tuple(ranks)

    def groups(self, axis: str | Iterable[str]) -> list[tuple[int, ...]]:
        """Return every group of an axis, or of several, ordered by its first rank."""
        names = self._names(axis)
        return [
            self.group_of(names, rank)
            for rank in range(self.world_size)
            if self.index(names, rank) == 0
        ]

    def _names(self, axis: str | Iterable[str]) -> tuple[str, ...]:
        names = (axis,) if isinstance(axis, str) else tuple(axis)
        for name in names:
            if name not in AXES and name not in EXPERT_AXES:
                raise ValueError(
                    f"axis {name!r}; expected one of {', '.join((*AXES, *EXPERT_AXES))}"
                )
        if len(set(names)) < len(names):
            raise ValueError(f"axes {', '.join(names)}: one is named twice")
        experts = [name for name in names if name in EXPERT_AXES]
        others = [name for name in names if name in AXES and name != "pipeline"]
        if experts and others:
            raise ValueError(
                f"{experts[0]} and {others[0]} lie on different grids of the same ranks; "
                "only pipeline is common to both"
            )
        if experts and not self.experts_fit:
            raise DegreeError(
                f"order {self.order!r} puts the stages of the model's pipelines and of its "
                "experts' at different distances; put pp last, or let expert_data "
                f"{self.expert_data} equal data {self.data}"
            )
        return names

    def _strides(self, names: tuple[str, ...]) -> dict[str, int]:
        words = _MODEL
        if any(name in EXPERT_AXES for name in names):
            words = _EXPERT
        tokens = self.order.lower().split("-")
        tokens += [token for token in words if token not in tokens]
        strides = {}
        stride = 1
        for token in tokens:
            name = words.get(token)
            if name is not None:
                if name in names:
                    strides[name] = stride
                stride *= self._degree(name)
        return strides

    def _check_order(self) -> None:
        tokens = self.order.lower().split("-")
        known = _MODEL | _EXPERT
        if set(tokens) - set(known) or len(set(tokens)) < len(tokens):
            raise DegreeError(f"order {self.order!r}; expected each of {'-'.join(known)} once")
        for words in (_MODEL, _EXPERT):
            for token, name in words.items():
                if token not in tokens and self._degree(name) > 1:
                    raise DegreeError(
                        f"order {self.order!r} does not say where {token} goes, and the degree "
                        f"of {name} is {self._degree(name)}"
                    )
        if self.expert > 1 or self.expert_tensor is not None:
            self._names(("expert",))

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank}; expected 0 to {self.world_size - 1}")


def _divides(degrees: Mapping[str, int], world_size: int) -> None:
    product = math.prod(degrees.values())
    if world_size % product:
        words = " x ".join(f"{name} {value}" for name, value in degrees.items())
        raise DegreeError(f"{words} = {product} does not divide the world size {world_size}")
