"""The groups that one rank belongs to, as one explicit object: `ParallelState`."""

from __future__ import annotations

import itertools
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ._errors import NotInitializedError, ParallelError
from ._groups import (
    EMBEDDING,
    EmbeddingRanks,
    Maker,
    SingleRankGroup,
    check_sizes,
    find_world,
    has_world,
    initialized_world,
    live_world,
    member,
    member_ranks,
    new_group,
    next_round,
    position,
)
from ._ranks import AXES, EXPERT_AXES, ORDER, RankLayout, ordered

# Between a state and torch's DeviceMesh: the same groups, by the names of dims.

DIMS = {"tensor": "tp", "context": "cp", "data": "dp", "pipeline": "pp"}
"""What an axis is called in a mesh, as torchtitan and Megatron call it."""


def dims_of_mesh(mesh: DeviceMesh, names: Mapping[str, str]) -> dict[str, str]:
    dims = mesh.mesh_dim_names
    if not dims:
        raise ParallelError(
            f"a mesh of shape {tuple(mesh.shape)} without names of dims; give "
            f"init_device_mesh(mesh_dim_names=...), for example {tuple(names.values())}"
        )
    axes: dict[str, str] = {}
    for axis, name in names.items():
        if name in axes:
            raise ParallelError(
                f"dim {name!r} is named for both {axes[name]} and {axis}; expected one dim an axis"
            )
        axes[name] = axis
    for axis, name in names.items():
        if name not in dims and name != DIMS[axis]:
            raise ParallelError(f"{axis}={name!r}; the mesh has the dims {', '.join(dims)}")
    for dim in dims:
        if dim not in axes:
            raise ParallelError(
                f"dim {dim!r} of the mesh ({', '.join(dims)}) is no axis; say which it is, as in "
                f"from_mesh(mesh, data={dim!r}), or take a part of the mesh, as in "
                f"mesh[{tuple(d for d in dims if d in axes)!r}]"
            )
    return {axes[dim]: dim for dim in dims}


@dataclass(frozen=True)
class MeshGroups:
    """The mesh that a state was made from, and what its dims are called, by axis."""

    mesh: DeviceMesh
    dims: Mapping[str, str]

    def layout(self) -> RankLayout | None:
        """Return the layout that numbers the ranks as the mesh does, or None if none can."""
        # None is also the answer for a part of a mesh: nothing says where the other ranks are.
        ranks = self.mesh.mesh
        axes = list(self.dims)
        if ranks.numel() != dist.get_world_size():
            return None
        degrees = dict(zip(axes, ranks.shape, strict=True))
        several = [axis for axis in axes if degrees[axis] > 1]
        wanted = ranks.reshape([degrees[axis] for axis in several])
        t, c, p = (degrees.get(axis, 1) for axis in ("tensor", "context", "pipeline"))
        orders = map("-".join, itertools.permutations(ORDER.split("-")))  # Megatron's comes first
        layouts = [RankLayout(ranks.numel(), t, c, p, order=order) for order in orders]
        for layout in sorted(layouts, key=lambda one: not one.experts_fit):
            if torch.equal(_rank_grid(layout, several), wanted):
                return layout
        return None

    def known(self, axes: tuple[str, ...]) -> ProcessGroup | None:
        """Return the group that spans these axes, where it is the world's."""
        world = dist.group.WORLD
        dims = tuple(dim for axis, dim in self.dims.items() if axis in axes)
        spanned = self.mesh[dims].mesh.numel()
        if world is not None and spanned == world.size():
            return world
        return None


def make_mesh(device_type: str, ranks: torch.Tensor, names: tuple[str, ...]) -> DeviceMesh:
    """Return torch's mesh over ranks of the world, for which each rank makes its own groups only.

    ``init_device_mesh`` lets every rank make the groups of all others, one after the other. Or it
    splits the world's communicator where that is bound to a device, which not every backend can
    (XCCL: pytorch/pytorch#186548).
    Collective: every rank of the world calls this.

    Args:
        device_type: ``cuda``, ``cpu``, ...
        ranks: Of the whole world. Its last dims are those of the mesh; if there are more before
            them, each index of these is a mesh, and this rank gets its own.
        names: Of the mesh's dims.

    Raises:
        NotInitializedError: torch.distributed has no process group yet.
        ParallelError: The ranks differ in what they ask for, or a group could not be made.
    """
    world = initialized_world(f"a mesh of {' x '.join(names)}")
    ranks = ranks.contiguous()
    rank = world.rank()
    which = f"mesh {tuple(ranks.shape)} {names} {zlib.crc32(str(ranks.tolist()).encode())}"
    number = next_round(which, world)
    (mine,) = (one for one in ranks.view(-1, *ranks.shape[-len(names) :]) if rank in one)
    groups = []
    for dim, name in enumerate(names, start=ranks.dim() - len(names)):
        lines = ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]).tolist()
        (line,) = (tuple(each) for each in lines if rank in each)
        whole = line == tuple(range(world.size()))
        groups.append(world if whole else new_group(f"{number}.{name}", line, partial(iter, lines)))
    return DeviceMesh.from_group(groups, device_type, mine, mesh_dim_names=names)


def forget_meshes() -> None:
    """Let DTensor not go on with a mesh whose groups have been destroyed."""
    # Its caches of shardings (torch 2.13) give back the mesh that an operation was first done
    # over for every equal one, and meshes of the same ranks and names are equal, whatever their
    # groups: after a second set-up the groups of the first would be looked up, and not be found.
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor  # noqa: PLC0415  # only where it is used

    # As torch.distributed.tensor.debug does, which needs numpy; not every torch has the second.
    dispatcher: Any = DTensor._op_dispatcher  # noqa: SLF001
    dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)  # noqa: SLF001
    if clear is not None:
        clear()


def _rank_grid(layout: RankLayout, axes: list[str]) -> torch.Tensor:
    slowest_first = sorted(axes, key=layout.stride, reverse=True)
    ranks = torch.arange(layout.world_size).reshape([layout.degree(axis) for axis in slowest_first])
    return ranks.permute([slowest_first.index(axis) for axis in axes]).contiguous()


def _device_type() -> str:
    config = dist.get_backend_config(dist.group.WORLD)
    table = dict(pair.split(":") for pair in config.split(",") if ":" in pair)
    for device, backend in dist.Backend.default_device_backend_map.items():
        if table.get(device) == backend and device != "cpu":
            return device
    return "cpu"


# Without expert parallelism, an expert is split and copied as the rest of the model.
_AS_MODEL: dict[str, tuple[str, ...]] = {
    "expert_tensor": ("tensor",),
    "expert": (),
    "expert_data": ("context", "data"),
}

Groups = dict[tuple[str, ...], ProcessGroup | None]
"""By axes; None is a group of one rank."""

_numbers = itertools.count(1)


class ParallelState:
    """The process groups, positions and sizes of one rank. It does not change once made.

    Make one with `create`, `from_groups` or `from_mesh`. An axis is ``tensor``, ``context``,
    ``data``, ``pipeline``, ``expert``, ``expert_tensor`` or ``expert_data``; several name
    the group that spans them together. An axis of degree 1 has a group of this rank alone,
    whose collectives are copies; for it nothing is made and nothing is sent.

    Attributes:
        layout: The arithmetic behind it; None when made from foreign groups without one.
        rank: This rank's number in the world.
    """

    def __init__(
        self,
        groups: Groups,
        *,
        rank: int,
        layout: RankLayout | None = None,
        maker: Maker | None = None,
        ranks: Mapping[str, tuple[int, ...]] | None = None,
        mesh: MeshGroups | None = None,
    ) -> None:
        """Take groups as they are; the class methods are the ways to make one."""
        self.layout = layout
        self.rank = rank
        self._maker = maker
        self._mesh = mesh
        if maker is None:
            self._world = find_world(groups.values())
        else:
            self._world = maker.world
        self._alone: SingleRankGroup | None = None
        self._groups = {axes: group for axes, group in groups.items() if group is not None}
        self._ranks = dict(ranks or {})
        self._closed = False
        # What others keep for as long as this state lives, and states that end with it.
        self.notes: dict[str, Any] = {}
        self._attached: list[ParallelState] = []
        # Whether an expert is split and copied as the rest of the model.
        if layout is not None and mesh is None:
            self._experts_as_model = not layout.experts_fit
        else:
            self._experts_as_model = all(groups.get((axis,)) is None for axis in EXPERT_AXES)
        self._sizes: dict[str, int] = {}
        self._indexes: dict[str, int] = {}
        for axis in AXES if self._experts_as_model else (*AXES, *EXPERT_AXES):
            group = groups.get((axis,))
            if layout is not None:
                self._sizes[axis] = layout.degree(axis)
                self._indexes[axis] = layout.index(axis, rank)
            else:
                self._sizes[axis] = 1 if group is None else group.size()
                self._indexes[axis] = 0 if group is None else group.rank()
        if self._experts_as_model:
            for axis, others in _AS_MODEL.items():
                self._sizes[axis] = self.size(*others) if others else 1
                self._indexes[axis] = self.index(*others) if others else 0
        # What layers and mappings ask for at every call: None where there is nothing to do.
        self.several: dict[str, ProcessGroup | None] = {
            axis: self._groups.get(self._axes_above_one((axis,))) for axis in self._sizes
        }
        self.key: str = str(next(_numbers))  # no other state of this process has it

    @classmethod
    def create(
        cls,
        tensor: int = 1,
        context: int = 1,
        pipeline: int = 1,
        *,
        expert: int = 1,
        expert_tensor: int | None = None,
        order: str = ORDER,
        also: Iterable[tuple[str, ...]] = (),
        embedding: bool | Mapping[str, EmbeddingRanks] = False,
        backend: str | Mapping[str, str] | None = None,
        timeout: timedelta | None = None,
    ) -> ParallelState:
        """Make the groups that this rank belongs to: one creation for an axis of degree > 1.

        Collective: every rank of the world calls this, with the same arguments.

        Args:
            tensor: Degree of tensor parallelism.
            context: Degree of context parallelism.
            pipeline: Degree of pipeline parallelism; what is left is data parallel.
            expert: Degree of expert parallelism.
            expert_tensor: Degree of tensor parallelism inside an expert; ``tensor`` if None.
            order: The axes from the fastest varying to the slowest (`RankLayout`).
            also: Groups that span several axes, for example ``[("tensor", "pipeline")]``.
            embedding: Make the groups ``embedding`` (first and last stage of a pipeline) and
                ``position_embedding`` (first stage). Or a mapping from these names to
                functions, which return the members among a pipeline's ranks.
            backend: Of every group, or by axis; None is the world's.
            timeout: Of every group; None is the backend's own.

        Raises:
            NotInitializedError: torch.distributed has no process group yet.
            DegreeError: The degrees do not fit the world, or differ from another rank's.
            ParallelError: A group could not be made in time.
        """
        world = initialized_world(f"tensor {tensor} x context {context} x pipeline {pipeline}")
        layout = RankLayout(world.size(), tensor, context, pipeline, expert, expert_tensor, order)
        wanted: list[tuple[str, ...]] = [(axis,) for axis in AXES]
        if expert > 1 or expert_tensor is not None:
            wanted += [(axis,) for axis in EXPERT_AXES]
        wanted += [tuple(axes) for axes in also]
        stages: Mapping[str, EmbeddingRanks] = {}
        if embedding is True:
            stages = EMBEDDING
        elif embedding:
            stages = embedding
        return cls.of_layout(layout, wanted, stages, backend=backend, timeout=timeout)

    @classmethod
    def of_layout(
        cls,
        layout: RankLayout,
        wanted: Iterable[tuple[str, ...]],
        stages: Mapping[str, EmbeddingRanks],
        *,
        backend: str | Mapping[str, str] | None,
        timeout: timedelta | None,
        apart: bool = False,
    ) -> ParallelState:
        """Make the groups of these axes only, `create` says the rest; ``apart``: not the world."""
        maker = Maker(layout, backend, timeout, apart=apart)
        try:
            groups, ranks = maker.make(tuple(wanted), stages)
        except BaseException:  # also at Ctrl-C: no half-made set of groups stays; raised again
            maker.destroy(together=False)
            raise
        return cls(groups, rank=maker.rank, layout=layout, maker=maker, ranks=ranks)

    @classmethod
    def from_groups(
        cls,
        *,
        tensor: ProcessGroup | None = None,
        context: ProcessGroup | None = None,
        data: ProcessGroup | None = None,
        pipeline: ProcessGroup | None = None,
        expert: ProcessGroup | None = None,
        expert_tensor: ProcessGroup | None = None,
        expert_data: ProcessGroup | None = None,
        also: Mapping[tuple[str, ...], ProcessGroup] | None = None,
        layout: RankLayout | None = None,
        rank: int | None = None,
    ) -> ParallelState:
        """Take groups that exist already; None is an axis of degree 1. Nothing is sent.

        Args:
            tensor, context, data, pipeline, expert, expert_tensor, expert_data: The group of this
                rank's axis of that name.
            also: Groups that span several axes.
            layout: The arithmetic behind the groups, if there is one. Without it `ranks`
                works only for groups that torch.distributed knows.
            rank: This rank's number in the world; torch.distributed's if None, and else
                the position in Megatron's order.

        Raises:
            ParallelError: A group is not one that this rank is in.
            DegreeError: A group's size is not the layout's.
        """
        ones = {
            "tensor": tensor, "context": context, "data": data, "pipeline": pipeline,
            "expert": expert, "expert_tensor": expert_tensor, "expert_data": expert_data,
        }  # fmt: skip
        groups: Groups = {(axis,): member(group, axis) for axis, group in ones.items()}
        groups |= {axes: member(group, " x ".join(axes)) for axes, group in (also or {}).items()}
        if rank is None:
            rank = dist.get_rank() if live_world() is not None else position(groups)
        if layout is not None:
            check_sizes(groups, layout)
        return cls(groups, rank=rank, layout=layout)

    @classmethod
    def from_mesh(
        cls,
        mesh: DeviceMesh,
        *,
        tensor: str = "tp",
        context: str = "cp",
        data: str = "dp",
        pipeline: str = "pp",
    ) -> ParallelState:
        """Take the groups of a mesh's dims, by name. A name that the mesh lacks is degree 1.

        Raises:
            ParallelError: A dim of the mesh is not named, a name is used for two axes, or a
                name other than the default is not a dim of the mesh.
        """
        names = {"tensor": tensor, "context": context, "data": data, "pipeline": pipeline}
        dims = dims_of_mesh(mesh, names)
        groups: Groups = {(axis,): mesh.get_group(dim) for axis, dim in dims.items()}
        taken = MeshGroups(mesh, dims)
        return cls(groups, rank=dist.get_rank(), layout=taken.layout(), mesh=taken)

    def to_mesh(self, device_type: str | None = None) -> DeviceMesh:
        """Return a mesh over the same groups: dims pp, dp, cp, tp, those of degree > 1.

        After `from_mesh` it is the mesh that was given, with the names that its dims have.

        Args:
            device_type: ``cuda``, ``cpu``, ...; the device of the groups' backend if None.

        Raises:
            ParallelError: The state has no layout to order the ranks by.
        """
        if self._mesh is not None and device_type in (None, self._mesh.mesh.device_type):
            return self._mesh.mesh
        layout = self.layout
        if layout is None:
            raise ParallelError(
                "a ParallelState of foreign groups has no layout to make a mesh of; give "
                "ParallelState.from_groups(layout=...)"
            )
        axes = [axis for axis in reversed(AXES) if layout.degree(axis) > 1] or ["data"]
        return DeviceMesh.from_group(
            [self.group(axis) for axis in axes],
            device_type or _device_type(),
            _rank_grid(layout, axes),
            mesh_dim_names=tuple(DIMS[axis] for axis in axes),
        )

    def index(self, *axes: str) -> int:
        """Return this rank's position along an axis, or within several, from 0."""
        if len(axes) == 1 and axes[0] in self._indexes:
            return self._indexes[axes[0]]
        axes = self._check_axes(axes)
        if self.layout is not None:
            return self.layout.index(axes, self.rank)
        position = 0
        span = 1
        for axis in sorted(ordered(axes), key="pipeline".__eq__):  # the slowest of both grids
            position += self._indexes[axis] * span
            span *= self._sizes[axis]
        return position

    def size(self, *axes: str) -> int:
        """Return the number of ranks along an axis, or in the group that spans several."""
        if len(axes) == 1 and axes[0] in self._sizes:
            return self._sizes[axes[0]]
        product = 1
        for axis in self._check_axes(axes):  # plainly, for torch.compile
            product *= self._sizes[axis]
        return product

    def group(self, *axes: str) -> ProcessGroup:
        """Return this rank's group along an axis, or the group that spans several.

        Raises:
            ParallelError: The group that spans these axes was not made.
            NotInitializedError: The state, or the world, was destroyed.
        """
        self.check_world()
        found = self._groups.get(axes)
        if found is None:
            return self._find_group(axes)
        return found

    def ranks(self, *axes: str) -> tuple[int, ...]:
        """Return the world's numbers of the ranks in a group, in the group's order."""
        if len(axes) == 1 and axes[0] in self._ranks:
            return self._ranks[axes[0]]
        axes = self._check_axes(axes)
        if self.layout is not None:
            return self.layout.group_of(axes, self.rank)
        if axes:
            several = self._axes_above_one(axes)
            if several:
                return member_ranks(self.group(*several), " x ".join(axes))
        return (self.rank,)

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

    def alone(self) -> ProcessGroup:
        """Return the group of this rank alone: of an axis whose degree is always 1."""
        self.check_world()
        if self._closed:
            raise NotInitializedError("a group of a ParallelState that was destroyed")
        return self._make_alone()

    @property
    def is_live(self) -> bool:
        """Whether its groups can still be used: neither it nor the world was destroyed."""
        return not self._closed and has_world(self._world)

    def attach(self, other: ParallelState) -> None:
        """Let another state be destroyed together with this one."""
        self._attached.append(other)

    @property
    def made(self) -> int:
        """How many process groups were made for this state."""
        if self._maker is None:
            return 0
        return len(self._maker.made)

    def destroy(self) -> None:
        """Free every group that `create` made; groups that were given are left alone.

        Collective: every rank calls this. A second call does nothing.
        """
        self._closed = True
        self.notes.clear()
        while self._attached:
            self._attached.pop().destroy()
        self._groups.clear()
        if self._alone is not None or self._maker is not None:
            forget_meshes()
        self.several = dict.fromkeys(self.several)
        if self._alone is not None:
            self._alone.forget()
            self._alone = None
        if self._maker is not None:
            self._maker.destroy()

    def check_world(self) -> None:
        """Raise NotInitializedError if the world that the groups were made in is gone."""
        # A constant to torch.compile, which cannot look through a weak reference.
        if not torch.compiler.is_compiling() and not has_world(self._world):
            raise NotInitializedError(
                f"the world of {self!r} was destroyed (torch.distributed.destroy_process_group); "
                "initialize again"
            )

    def _find_group(self, axes: tuple[str, ...]) -> ProcessGroup:
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
        several = self._axes_above_one(axes)
        found = self._groups.get(several) or self._equal(several) if several else self._make_alone()
        if found is None:
            raise ParallelError(
                f"no group spans {' x '.join(axes)} (degrees "
                f"{' x '.join(str(self._sizes[axis]) for axis in axes)}); " + self._advice(several)
            )
        self._groups[axes] = found
        return found

    def _axes_above_one(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Return what names the group of these axes: those of degree > 1, in order."""
        return ordered(axis for axis in self._check_axes(axes) if self._sizes[axis] > 1)

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
            return f"from_mesh makes none: use ParallelState.create(also=[{axes!r}])"
        if self._maker is None:
            return f"give it: ParallelState.from_groups(also={{{axes!r}: ...}})"
        return f"ask for it when the groups are made: also=[{axes!r}]"

    def _make_alone(self) -> ProcessGroup:
        if self._alone is None:
            self._alone = SingleRankGroup(self.rank)
        return self._alone

    def _check_axes(self, axes: Sequence[str]) -> tuple[str, ...]:
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

    def __repr__(self) -> str:
        sizes = ", ".join(f"{a}={self._indexes[a]}/{n}" for a, n in self._sizes.items() if n > 1)
        return f"<ParallelState rank={self.rank} {sizes or 'alone'}>"
