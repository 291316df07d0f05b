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

import torch
from torch.distributed.device_mesh import DeviceMesh

from ._current import get_state, initialize_tensor_parallel
from ._describe import Description, describe_grids
from ._errors import DegreeError
from ._groups import initialized_world
from ._pictures import grid_of_mesh
from ._ranks import RankLayout
from ._state import ParallelState, make_mesh

__all__ = ["Layout", "MeshAxis", "named", "names"]


# What each axis of a mesh shards and sends, and which layouts are made of them: facts only.


@dataclass(frozen=True, slots=True)
class MeshAxis:
    """What ranks along one axis of a mesh have in parts, and what they send each other.

    Args:
        name: Its name in a mesh, and of its degree in `named`.
        shards: What each rank has a part of: weights, gradients, optimizer, activations,
            batch, sequence, layers or experts. The rest each rank has whole.
        sends: When, and which collective of what.
        source: Where it was described first.
    """

    name: str
    shards: tuple[str, ...]
    sends: tuple[str, ...]
    source: str


def _axis(name: str, shards: str, source: str, *sends: str) -> MeshAxis:
    return MeshAxis(name, tuple(shards.split(", ")), sends, source)


AXES = {
    axis.name: axis
    for axis in (
        _axis(
            "pp", "layers, weights, gradients, optimizer",
            "GPipe, arXiv:1811.06965; 1F1B (PipeDream-Flush), arXiv:2006.09503",
            "forward: send of each micro-batch's activations to the next stage",
            "backward: send of their gradients to the previous stage",
            "after backward: all-reduce of tied embeddings' gradients, first and last stage",
        ),
        _axis(
            "replicate", "batch",
            "MiCS, arXiv:2205.00119; PyTorch FSDP (hybrid sharding), arXiv:2304.11277",
            "backward: all-reduce of the gradients' shards, after their reduce-scatter",
        ),
        _axis(
            "dp", "batch",
            "PyTorch Distributed, arXiv:2006.15704",
            "backward: all-reduce of the gradients, in buckets as they are ready",
        ),
        _axis(
            "shard", "weights, gradients, optimizer, batch",
            "ZeRO, arXiv:1910.02054; PyTorch FSDP, arXiv:2304.11277",
            "forward: all-gather of each module's weights",
            "backward: all-gather of them again, and reduce-scatter of their gradients",
        ),
        _axis(
            "ep", "experts, batch",
            "GShard, arXiv:2006.16668",
            "forward: all-to-all of tokens to their experts, and of the results back",
            "backward: the same two all-to-alls of gradients",
            "backward: all-reduce of the gradients of all weights but the experts'",
        ),
        _axis(
            "cp", "sequence, activations",
            "Ring attention, arXiv:2310.01889; DeepSpeed-Ulysses, arXiv:2309.14509",
            "forward: send of keys and values around a ring, or all-to-all of heads, in attention",
            "backward: the same, of them and of their gradients",
            "backward: all-reduce of the gradients of the weights",
        ),
        _axis(
            "tp", "weights, gradients, optimizer, activations within blocks",
            "Megatron-LM, arXiv:1909.08053",
            "forward: all-reduce of activations, after attention and after the MLP",
            "backward: all-reduce of the gradients of what goes into the two",
        ),
    )
}  # fmt: skip
"""The axes, from the slowest varying to the fastest: what communicates most is nearest."""

SEQUENCE = _axis(
    "tp", "weights, gradients, optimizer, activations",
    "Reducing Activation Recomputation, arXiv:2205.05198",
    "forward: all-gather before attention and the MLP, reduce-scatter after them",
    "backward: reduce-scatter and all-gather in turn, and all-gather of the input again",
    "after backward: all-reduce of the gradients of norms and of row-parallel biases",
)  # fmt: skip
"""The axis ``tp`` with sequence parallelism."""

PARTS: dict[str, tuple[str, ...]] = {
    "dp": ("dp",), "fsdp": ("shard",), "hsdp": ("replicate", "shard"), "tp": ("tp",), "sp": (),
    "cp": ("cp",), "ep": ("ep",), "pp": ("pp",),
}  # fmt: skip
"""What a name is made of, in the usual order, and the axes of each."""
ALONE = ("dp", "fsdp", "hsdp")
"""Only one of these: they split the same batch."""

ZOO = {
    "dp": "The model with its gradients and optimizer fits one device. Also called DDP.",
    "fsdp": "The model does not fit one device, and the batch is large enough that the weights of "
    "a module arrive while another one computes.",
    "hsdp": "fsdp on more nodes than one all-gather should span: shard within a node or a few, "
    "replicate over the others.",
    "tp": "One layer, or its activations, is too large for one device, or the batch too small to "
    "be split further. Within a node.",
    "tp+sp": "Wherever tp is, if the sequence divides: about as many bytes are sent, and the "
    "activations between blocks are split too.",
    "cp": "Sequences are so long that the activations of one do not fit.",
    "pp": "The layers of one model, over links too slow for anything else. Needs several "
    "micro-batches for each stage.",
    "ep": "A mixture of experts that do not fit together on one device.",
    "dp+ep": "A mixture of experts on more ranks than should exchange tokens.",
    "fsdp+tp": "Hundreds of ranks: tp within a node lets fsdp span fewer ranks, and the global "
    "batch be smaller.",
    "hsdp+tp": "Thousands of ranks, where even with tp fsdp alone would span too many.",
    "dp+tp+pp": "Megatron-LM's three dimensions: tp within a node, dp over the nodes near it, pp "
    "over the slowest links.",
    "fsdp+tp+cp+pp": "The largest models at long context: tp nearest, then cp, fsdp, and pp. "
    "(Llama 3, arXiv:2407.21783, puts pp before fsdp.)",
}
"""The layouts that are described, and when to use them."""


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
        """Picture which rank is where on this mesh. `ezpz_tp.describe_mesh` tells the arguments."""
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
        return make_mesh(device_type, torch.arange(self.world_size).view(self.degrees), names)

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
