"""The zoo of parallel layouts: named meshes, what each of their axes does, and when to use them.

    from ezpz_tp import layouts

    layout = layouts.named("hsdp+tp", world_size=64, shard=4, tp=8)
    print(layout)                               # what is sharded, what is sent, when to use it
    print(layout.describe(ranks_per_node=8))    # which rank is where
    mesh = layout.to_mesh("cuda")               # replicate 2 x shard 4 x tp 8

A name is made of parts in any order: one of ``dp``, ``fsdp`` and ``hsdp``, then ``tp`` (and
``sp``), ``cp``, ``ep`` and ``pp``. (The idea of a zoo is Edward Yang's: blog.ezyang.com, "The
Parallelism Mesh Zoo", 2025.)
"""

from __future__ import annotations

import difflib
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ._errors import DegreeError
from ._groups.default import get_state, initialize_tensor_parallel
from ._groups.ranks import RankLayout
from ._groups.state import ParallelState
from ._groups.world import initialized_world
from ._pictures.describe import Description, describe_grids
from ._pictures.grid import grid_of_mesh
from ._pictures.zoo import ALONE, AXES, PARTS, SEQUENCE, ZOO, MeshAxis

__all__ = ["Layout", "MeshAxis", "named", "names"]


@dataclass(frozen=True, slots=True)
class Layout:
    """A mesh with a name. Made by `named`.

    Args:
        name: Its parts, as ``fsdp+tp``.
        world_size: Number of ranks.
        axes: What each axis does, from the slowest varying to the fastest.
        degrees: Their degrees, in the same order. The product is the world size.
        when: When to use it; empty for a combination that `names` does not have.
    """

    name: str
    world_size: int
    axes: tuple[MeshAxis, ...]
    degrees: tuple[int, ...]
    when: str = ""

    def mesh_axes(self) -> tuple[tuple[str, int], ...]:
        """Return the names and degrees of the axes, the slowest varying first."""
        return tuple((axis.name, n) for axis, n in zip(self.axes, self.degrees, strict=True))

    def degree(self, axis: str) -> int:
        """Return the degree of an axis; 1 if the mesh has none of that name."""
        return dict(self.mesh_axes()).get(axis, 1)

    def rank_layout(self) -> RankLayout:
        """Return the same ranks over this package's axes.

        ``replicate``, ``dp``, ``shard`` and ``ep`` together are its axis ``data``: every rank
        along them has a batch of its own.
        """
        return RankLayout(
            self.world_size,
            self.degree("tp"),
            self.degree("cp"),
            self.degree("pp"),
            self.degree("ep"),
        )

    def describe(
        self,
        *,
        ranks_per_node: int | Sequence[int] | None = None,
        hosts: Sequence[str] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Description:
        """Picture which rank is where on this mesh. `ezpz_tp.describe` tells the arguments."""
        grid = grid_of_mesh("", self.mesh_axes())
        return describe_grids((grid,), 0, ranks_per_node, hosts, environ)

    def to_mesh(self, device_type: str) -> DeviceMesh:
        """Return the mesh of torch, with groups of its own.

        Collective: every rank of the world calls this.

        Args:
            device_type: ``cuda``, ``cpu``, ...

        Raises:
            NotInitializedError: torch.distributed has no process group yet.
            DegreeError: The world has another size.
        """
        self._check_world()
        names = tuple(axis.name for axis in self.axes)
        return init_device_mesh(device_type, self.degrees, mesh_dim_names=names)

    def initialize(self, **options: Any) -> ParallelState:
        """Make this package's groups, and return them.

        Collective: every rank of the world calls this.

        Args:
            **options: More for `ezpz_tp.initialize_tensor_parallel`, which tells what is raised.

        Raises:
            NotInitializedError: torch.distributed has no process group yet.
            DegreeError: The world has another size.
        """
        self._check_world()
        initialize_tensor_parallel(
            tensor_parallel_size=self.degree("tp"),
            pipeline_parallel_size=self.degree("pp"),
            context_parallel_size=self.degree("cp"),
            expert_parallel_size=self.degree("ep"),
            **options,
        )
        return get_state()

    def __str__(self) -> str:
        """Tell what each axis shards and sends, and when to use the layout."""
        lines = [f"{self.name}: {self.world_size} ranks, {_product(dict(self.mesh_axes()))}"]
        lines += textwrap.wrap(self.when, 78, initial_indent="  ", subsequent_indent="  ")
        for axis, degree in zip(self.axes, self.degrees, strict=True):
            lines += ["", f"{axis.name} {degree} shards {', '.join(axis.shards)}"]
            lines += [f"  {sent}" for sent in axis.sends]
            lines += [f"  ({axis.source})"]
        return "\n".join(lines)

    def _check_world(self) -> None:
        size = initialized_world(f"the layout {self.name}").size()
        if size != self.world_size:
            raise DegreeError(
                f"the layout {self.name} is for {self.world_size} ranks and the world has {size}; "
                f"make it by named({self.name!r}, world_size={size}, ...)"
            )


def names() -> tuple[str, ...]:
    """Return the names of the layouts that are described. Other combinations work too."""
    return tuple(ZOO)


def named(name: str, world_size: int, **degrees: int) -> Layout:
    """Return a layout by its name.

    Args:
        name: Its parts in any order, joined by ``+`` or ``_``.
        world_size: Number of ranks.
        **degrees: Of its axes ``replicate``, ``shard``, ``dp``, ``tp``, ``cp``, ``ep``, ``pp``,
            all but one at least: that one is what the others leave of the world.

    Raises:
        ValueError: There is no such part, or parts do not go together.
        DegreeError: A degree is missing, below 1, of no axis of this layout, or they do not
            fit the world. It is a `ValueError`.

    >>> named("hsdp", world_size=64, shard=8).mesh_axes()
    (('replicate', 8), ('shard', 8))
    >>> named("tp_sp+fsdp", world_size=16, tp=4).name
    'fsdp+tp+sp'
    """
    parts = _parts(name)
    wanted = {axis for part in parts for axis in PARTS[part]}
    axes = tuple(axis for axis in AXES if axis in wanted)
    found = _degrees("+".join(parts), world_size, axes, degrees)
    return Layout(
        "+".join(parts),
        world_size,
        tuple(SEQUENCE if axis == "tp" and "sp" in parts else AXES[axis] for axis in axes),
        found,
        ZOO.get("+".join(parts), ""),
    )


def _parts(name: str) -> list[str]:
    """Return the parts of a name in the usual order."""
    words = ["dp" if word == "ddp" else word for word in re.split(r"[+_\-\s]+", name.lower())]
    for word in words:
        if word not in PARTS:
            near = difflib.get_close_matches(name, ZOO, 1)
            raise ValueError(
                f"layout {name!r}: {word!r} is none of its parts {', '.join(PARTS)}; known are "
                + ", ".join(ZOO)
                + (f". Did you mean {near[0]!r}?" if near else "")
            )
    wrong = None
    if len(set(words)) < len(words):
        wrong = "a part is named twice"
    elif len(set(words) & set(ALONE)) > 1:
        wrong = f"expected one of {', '.join(ALONE)}; hsdp is fsdp within dp"
    elif "sp" in words and "tp" not in words:
        wrong = "sp splits the sequence over the ranks of tp; write tp+sp (cp is without tp)"
    elif {"cp", "ep"} <= set(words):
        wrong = "experts lie over the ranks of cp too, which no mesh can say; use RankLayout"
    if wrong is not None:
        raise ValueError(f"layout {name!r}: {wrong}")
    return [part for part in PARTS if part in words]


def _degrees(
    name: str, world_size: int, axes: Sequence[str], given: Mapping[str, int]
) -> tuple[int, ...]:
    """Return the degrees of axes, the missing one worked out."""
    for axis, degree in given.items():
        if axis not in axes:
            raise DegreeError(f"{axis}={degree} for {name}; its axes are {', '.join(axes)}")
    for axis, degree in {"world_size": world_size, **given}.items():
        if degree < 1:
            raise DegreeError(f"{axis}={degree} for {name}; expected at least 1")
    missing = [axis for axis in axes if axis not in given]
    if len(missing) > 1:
        raise DegreeError(
            f"{name} on {world_size} ranks: give all but one of {', '.join(missing)}, as in "
            f"named({name!r}, {world_size}, {', '.join(f'{axis}=...' for axis in missing[1:])})"
        )
    product = math.prod(given.values())
    rest, remainder = divmod(world_size, product)
    if remainder or (not missing and rest > 1):
        verb = "does not divide" if remainder else "is not"
        more = ""
        if not remainder and "shard" in axes and "replicate" not in axes:
            more = f"; {name.replace('fsdp', 'hsdp')} repeats it over what is left"
        elif not remainder and not set(name.split("+")) & set(ALONE):
            more = f"; dp+{name} puts what is left into data parallelism"
        words = _product(given) + (f" = {product}" if len(given) > 1 else "")
        raise DegreeError(f"{words} {verb} the world size {world_size}{more}")
    return tuple(given.get(axis, rest) for axis in axes)


def _product(degrees: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {degree}" for axis, degree in degrees.items())
