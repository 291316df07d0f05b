"""Where a tensor is along each axis: as text, as a mapping, or as torch's placements.

In this folder a layout maps every axis, in the order of the mesh, to the letter that the
tensor is sharded on along that axis, or to one of the words below.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

REPLICATED = "replicated"
"""Every rank along the axis holds the same."""

PARTIAL = "partial"
"""The ranks along the axis hold terms of a sum."""

Layout: TypeAlias = dict[str, str]
Given: TypeAlias = "str | Mapping[str, str | None] | Sequence[Placement] | None"
"""How a caller writes a layout: ``"b@data f@tensor"``, ``{"data": "b"}`` or torch's objects."""


def read(
    given: Given, letters: str, name: str, mesh_axes: Sequence[str] | None
) -> tuple[Layout, bool]:
    """Return what ``given`` says of the axes that it names, and whether of all others too.

    Args:
        given: A layout of a tensor.
        letters: One for each dim of the tensor.
        name: Of the tensor, for errors.
        mesh_axes: The axes, if known; torch's placements are in their order.

    Raises:
        ValueError: It is not a layout of that tensor.
    """
    pairs: Iterable[tuple[str, str | None]]
    whole = given is None
    if given is None:
        pairs = ()
    elif isinstance(given, str):
        words = given.replace(",", " ").split()
        whole = words == [REPLICATED]
        pairs = () if whole else [_pair(word, given, name) for word in words]
    elif isinstance(given, Mapping):
        pairs = given.items()
    else:
        pairs = _from_torch(given, letters, name, mesh_axes)
    layout: Layout = {}
    for axis, where in pairs:
        if axis in layout:
            raise ValueError(
                f"{name} {given!r} names axis {axis} twice; a tensor is sharded on one dim, or "
                "partial, along an axis"
            )
        if mesh_axes is not None and axis not in mesh_axes:
            raise ValueError(
                f"{name} {given!r}: axis {axis!r} is none of mesh_axes {tuple(mesh_axes)}"
            )
        layout[axis] = _where(where, letters, f"{name} {given!r}")
    return layout, whole


def complete(told: Mapping[str, str], axes: Sequence[str]) -> Layout:
    """Return a layout over all axes: replicated where nothing is told."""
    return {axis: told.get(axis, REPLICATED) for axis in axes}


def text(layout: Layout) -> str:
    """Return a layout as text, which `read` understands."""
    words = [f"{where}@{axis}" for axis, where in layout.items() if where != REPLICATED]
    return " ".join(words) or REPLICATED


def to_torch(layout: Layout, letters: str) -> tuple[Placement, ...]:
    """Return torch's placements, in the order of the axes."""
    from torch.distributed.tensor.placement_types import Partial, Replicate, Shard  # noqa: PLC0415

    words: dict[str, Placement] = {REPLICATED: Replicate(), PARTIAL: Partial()}
    return tuple(words.get(where) or Shard(letters.index(where)) for where in layout.values())


def dual(where: str) -> str:
    """Return where the gradient of a tensor is: a sum's is the same for each of its terms."""
    return REPLICATED if where == PARTIAL else where


def conversion(source: str, target: str) -> str | None:
    """Return what brings a tensor from one place along an axis to another; None if nothing."""
    if source == target:
        return None
    if source == PARTIAL:
        return "all-reduce" if target == REPLICATED else "reduce-scatter"
    if source == REPLICATED:
        return "slice"
    return "all-gather" if target == REPLICATED else "all-to-all"


def _pair(word: str, given: str, name: str) -> tuple[str, str]:
    where, at, axis = word.partition("@")
    if not (where and at and axis) or "@" in axis:
        raise ValueError(
            f"{name} {given!r}: {word!r} is not a placement; expected letter@axis, "
            f"{PARTIAL}@axis or {REPLICATED}@axis, as in 'b@data f@tensor'"
        )
    return axis, where


def _where(where: str | None, letters: str, told: str) -> str:
    if where is None:
        return REPLICATED
    if where not in (REPLICATED, PARTIAL, *letters):
        raise ValueError(
            f"{told}: {where!r} is no dim of {letters!r}; expected for an axis one of its letters, "
            f"{PARTIAL!r} or {REPLICATED!r}, as in {{'data': {letters[:1]!r}}}"
        )
    return where


def _from_torch(
    given: Sequence[Placement], letters: str, name: str, mesh_axes: Sequence[str] | None
) -> Iterable[tuple[str, str]]:
    from torch.distributed.tensor.placement_types import Partial, Replicate, Shard  # noqa: PLC0415

    if mesh_axes is None:
        raise ValueError(
            f"{name} {given!r} does not name its axes; write 'b@data f@tensor', or give torch's "
            "placements, with mesh_axes=('data', 'tensor')"
        )
    if not hasattr(given, "__len__") or len(given) != len(mesh_axes):
        raise ValueError(
            f"{name} {given!r}: expected a tuple of one placement for each of mesh_axes "
            f"{tuple(mesh_axes)}"
        )
    for axis, item in zip(mesh_axes, given, strict=True):
        # Their subclasses mean something else: interleaved shards, masked sums.
        if type(item) is Replicate:
            yield axis, REPLICATED
        elif type(item) is Partial and item.reduce_op == "sum":
            yield axis, PARTIAL
        elif type(item) is Shard and -len(letters) <= item.dim < len(letters):
            yield axis, letters[item.dim]
        else:
            raise ValueError(
                f"{name}: {item!r} on axis {axis}; expected Replicate(), Partial('sum') or "
                f"Shard(dim) with a dim of {letters!r}"
            )
