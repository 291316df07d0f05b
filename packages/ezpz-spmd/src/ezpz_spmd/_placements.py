"""Where a tensor is along each axis of a mesh: as text, or as torch's placements.

A layout maps every axis, in the order of the mesh, to the letter that the tensor is sharded on
along that axis, or to one of the words below.
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

WORDS = {REPLICATED, PARTIAL}

Layout: TypeAlias = dict[str, str]
Given: TypeAlias = "str | Sequence[Placement] | None"
"""How a caller writes a layout: ``"b@data f@tensor"``, or torch's objects."""


def read(given: Given, letters: str, name: str, mesh_axes: Sequence[str] | None) -> Layout:
    """Return what ``given`` says of the axes that it names."""
    told = f"{name} {given!r}"
    pairs: Iterable[tuple[str, str]]
    if given is None or is_replicated(given):
        pairs = ()
    elif isinstance(given, str):
        pairs = [_parse_pair(word, told) for word in given.replace(",", " ").split()]
    else:
        pairs = _from_torch(given, letters, name, mesh_axes)
    layout: Layout = {}
    for axis, where in pairs:
        if axis in layout:
            raise ValueError(
                f"{told} names axis {axis} twice; a tensor is sharded on one dim, or partial, "
                "along an axis"
            )
        if mesh_axes is not None and axis not in mesh_axes:
            raise ValueError(f"{told}: axis {axis!r} is none of mesh_axes {tuple(mesh_axes)}")
        if where not in (REPLICATED, PARTIAL, *letters):
            raise ValueError(
                f"{told}: {where!r} is no dim of {letters!r}; expected for an axis one of its "
                f"letters, {PARTIAL!r} or {REPLICATED!r}, as in '{letters[:1]}@data'"
            )
        layout[axis] = where
    return layout


def is_replicated(given: Given) -> bool:
    """Return whether a text says so of all axes, without naming one."""
    return isinstance(given, str) and given.strip(", ") == REPLICATED


def complete(told: Mapping[str, str], axes: Sequence[str]) -> Layout:
    layout = dict.fromkeys(axes, REPLICATED)
    for axis in layout.keys() & told.keys():
        layout[axis] = told[axis]
    return layout


def text(layout: Layout) -> str:
    words = []
    for axis, where in layout.items():
        if where != REPLICATED:
            word = f"{where}@{axis}"
            words.append(word)
    return " ".join(words) or REPLICATED


def gradient_placement(where: str) -> str:
    """Return where the gradient of a tensor is: a sum's is the same for each of its terms."""
    if where == PARTIAL:
        return REPLICATED
    return where


def conversion(source: str, target: str) -> str | None:
    """Return what brings a tensor from one place along an axis to another; None if nothing."""
    if source == target:
        return None
    if source == PARTIAL:
        if target == REPLICATED:
            return "all-reduce"
        return "reduce-scatter"
    if source == REPLICATED:
        return "slice"
    if target == REPLICATED:
        return "all-gather"
    return "all-to-all"


def _parse_pair(word: str, told: str) -> tuple[str, str]:
    where, at, axis = word.partition("@")
    if not (where and at and axis) or "@" in axis:
        raise ValueError(
            f"{told}: {word!r} is not a placement; expected letter@axis, {PARTIAL}@axis or "
            f"{REPLICATED}@axis, as in 'b@data f@tensor'"
        )
    return axis, where


def _from_torch(
    given: Sequence[Placement], letters: str, name: str, mesh_axes: Sequence[str] | None
) -> Iterable[tuple[str, str]]:
    from torch.distributed.tensor import placement_types as known  # noqa: PLC0415 - heavy

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
        if type(item) is known.Replicate:
            yield axis, REPLICATED
        elif type(item) is known.Partial and item.reduce_op == "sum":
            yield axis, PARTIAL
        elif type(item) is known.Shard and -len(letters) <= item.dim < len(letters):
            yield axis, letters[item.dim]
        else:
            raise ValueError(
                f"{name}: {item!r} on axis {axis}; expected Replicate(), Partial('sum') or "
                f"Shard(dim) with a dim of {letters!r}"
            )
