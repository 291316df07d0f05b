"""The groups that one rank belongs to, as one explicit object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .found import Groups
from .given import check_sizes, member, position
from .maker import EMBEDDING, EmbeddingRanks, Maker
from .mesh import MeshGroups, dims_of_mesh, forget_meshes, mesh_of_state
from .ranks import AXES, EXPERT_AXES, ORDER, RankLayout
from .world import has_world, initialized_world, live_world


class ParallelState(Groups):
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
        groups: Mapping[tuple[str, ...], ProcessGroup | None],
        *,
        rank: int,
        layout: RankLayout | None = None,
        maker: Maker | None = None,
        ranks: Mapping[str, tuple[int, ...]] | None = None,
        mesh: MeshGroups | None = None,
    ) -> None:
        """Take groups as they are; the class methods are the ways to make one."""
        super().__init__(groups, layout, rank, maker, ranks, mesh)
        # What others keep for as long as this state lives, and states that end with it.
        self.notes: dict[str, Any] = {}
        self._attached: list[ParallelState] = []

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
                ``position_embedding`` (first stage); or a mapping from these names to
                functions from a pipeline's ranks to the ranks that take part.
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
        stages = EMBEDDING if embedding is True else (embedding or {})
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
        rank = initialized_world(str(layout)).rank()
        wanted = tuple(wanted)
        maker = Maker(layout, rank, backend, timeout, wanted, tuple(stages), apart=apart)
        try:
            groups, ranks = maker.make(wanted, stages)
        except BaseException:  # also at Ctrl-C: no half-made set of groups stays; raised again
            maker.destroy(together=False)
            raise
        return cls(groups, rank=rank, layout=layout, maker=maker, ranks=ranks)

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
            tensor: The group of this rank's tensor axis, and so on for the other axes.
            context: See ``tensor``.
            data: See ``tensor``.
            pipeline: See ``tensor``.
            expert: See ``tensor``.
            expert_tensor: See ``tensor``.
            expert_data: See ``tensor``.
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
            "tensor": tensor,
            "context": context,
            "data": data,
            "pipeline": pipeline,
            "expert": expert,
            "expert_tensor": expert_tensor,
            "expert_data": expert_data,
        }
        groups: dict[tuple[str, ...], ProcessGroup | None] = {
            (axis,): member(group, axis) for axis, group in ones.items()
        }
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
        taken = MeshGroups(mesh, dims_of_mesh(mesh, names))
        return cls(taken.by_axis(), rank=dist.get_rank(), layout=taken.layout(), mesh=taken)

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
        return mesh_of_state(self, device_type)

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
        return 0 if self._maker is None else len(self._maker.made)

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
        self.several: dict[str, ProcessGroup | None] = dict.fromkeys(self.several)
        if self._alone is not None:
            self._alone.forget()
            self._alone = None
        if self._maker is not None:
            self._maker.destroy()

    def __repr__(self) -> str:
        sizes = ", ".join(f"{a}={self._indexes[a]}/{n}" for a, n in self._sizes.items() if n > 1)
        return f"<ParallelState rank={self.rank} {sizes or 'alone'}>"
