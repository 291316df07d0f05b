"""Between a state and torch's DeviceMesh: the same groups, by the names of dims."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, device_mesh
from torch.distributed.device_mesh import DeviceMesh

from ezpz_tp._errors import DegreeError, ParallelError

from .ranks import AXES, ORDER, RankLayout

if TYPE_CHECKING:
    from .state import ParallelState

DIMS = {"tensor": "tp", "context": "cp", "data": "dp", "pipeline": "pp"}
"""What an axis is called in a mesh, as torchtitan and Megatron call it."""


def dims_of_mesh(mesh: DeviceMesh, names: Mapping[str, str]) -> dict[str, str]:
    """Return the name of the dim of each axis that a mesh has, in the order of its dims.

    Args:
        mesh: Its dims have names.
        names: For each axis, the name of its dim.

    Raises:
        ParallelError: A dim has no axis or two, or a name that was asked for is not there.
    """
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


class MeshGroups:
    """The mesh that a state was made from, and the groups that it has or may get later.

    Args:
        mesh: Its dims have names.
        dims: The name of the dim of each axis, from `dims_of_mesh`.
    """

    def __init__(self, mesh: DeviceMesh, dims: Mapping[str, str]) -> None:
        self.mesh = mesh
        self._dims = dims

    def by_axis(self) -> dict[tuple[str, ...], ProcessGroup | None]:
        """Return the groups of the dims, by axis."""
        return {(axis,): self.mesh.get_group(dim) for axis, dim in self._dims.items()}

    def layout(self) -> RankLayout | None:
        """Return the layout that numbers the ranks as the mesh does, or None if none can.

        None is also the answer for a part of a mesh: nothing says where the other ranks are.
        """
        ranks, axes = self.mesh.mesh, list(self._dims)
        if ranks.numel() != dist.get_world_size():
            return None
        degrees = dict(zip(axes, ranks.shape, strict=True))
        several = [axis for axis in axes if degrees[axis] > 1]
        first = ranks.reshape([degrees[axis] for axis in several])
        strides = {axis: int(first.select(i, 1).min()) for i, axis in enumerate(several)}
        words = [DIMS[axis] for axis in sorted(several, key=strides.__getitem__)]
        # An axis of degree 1 may lie anywhere; the experts' data axis takes the context's place.
        words = [word for word in ("tp", "cp") if word not in words] + words
        if "dp" not in words:
            words.insert(words.index("cp") + 1, "dp")
        words.insert(words.index("dp"), "ep")
        for order in (ORDER, "-".join(words)):
            try:
                layout = RankLayout(
                    ranks.numel(),
                    degrees.get("tensor", 1),
                    degrees.get("context", 1),
                    degrees.get("pipeline", 1),
                    order=order,
                )
            except DegreeError:
                continue
            if torch.equal(_ranks(layout, several), first):
                return layout
        return None

    def known(self, axes: tuple[str, ...]) -> ProcessGroup | None:
        """Return the group that spans these axes: the world's, or that of a flattened dim."""
        world = dist.group.WORLD
        dims = tuple(dim for axis, dim in self._dims.items() if axis in axes)
        ranks = sorted(self.mesh[dims].mesh.flatten().tolist())
        if world is not None and len(ranks) == world.size():
            return world
        for name, flat in _flattened(self.mesh).items():
            if sorted(flat.mesh.flatten().tolist()) == ranks:
                return flat.get_group(name)
        return None

    def advice(self, axes: tuple[str, ...]) -> str:
        """Say how to get the group that `known` did not find."""
        dims = tuple(dim for axis, dim in self._dims.items() if axis in axes)
        return (
            f"this state is from_mesh's, which makes none: flatten these dims of the mesh, as in "
            f"mesh[{dims!r}]._flatten(), or use ParallelState.create(also=[{axes!r}])"
        )


def _flattened(mesh: DeviceMesh) -> Mapping[str, DeviceMesh]:
    """Return what was flattened of a mesh. There is no public way to it."""
    if hasattr(mesh, "_get_root_mesh"):  # torch 2.8 and later
        found = getattr(mesh._get_root_mesh(), "_flatten_mapping", None)  # noqa: SLF001
        if found is not None:
            return dict(found)
    resources: Any = getattr(device_mesh, "_mesh_resources", None)
    table = getattr(resources, "root_to_flatten_mapping", None)
    return dict(table.get(resources.get_root_mesh(mesh), {})) if table else {}


def mesh_of_state(state: ParallelState, device_type: str | None) -> DeviceMesh:
    """Return a mesh over a state's groups; `ParallelState.to_mesh` says how."""
    layout = state.layout
    if layout is None:
        raise ParallelError(
            "a ParallelState of foreign groups has no layout to make a mesh of; give "
            "ParallelState.from_groups(layout=...)"
        )
    axes = [axis for axis in reversed(AXES) if layout.degree(axis) > 1] or ["data"]
    groups = [state.group(axis) for axis in axes]
    return DeviceMesh.from_group(
        groups,
        device_type or _device_type(),
        _ranks(layout, axes),
        mesh_dim_names=tuple(DIMS[axis] for axis in axes),
    )


def forget_meshes() -> None:
    """Let DTensor not go on with a mesh whose groups have been destroyed.

    Its caches of shardings (torch 2.13) give back the mesh that an operation was first done
    over for every equal one, and meshes of the same ranks and names are equal, whatever their
    groups: after a second set-up the groups of the first would be looked up, and not be found.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor  # noqa: PLC0415  # only where it is used

    # As torch.distributed.tensor.debug does, which needs numpy; not every torch has the second.
    dispatcher: Any = DTensor._op_dispatcher  # noqa: SLF001
    dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)  # noqa: SLF001
    if clear is not None:
        clear()


def _ranks(layout: RankLayout, axes: list[str]) -> torch.Tensor:
    """Return all ranks, with one dim for each of these axes."""
    slowest_first = sorted(axes, key=layout.stride, reverse=True)
    ranks = torch.arange(layout.world_size).reshape([layout.degree(axis) for axis in slowest_first])
    return ranks.permute([slowest_first.index(axis) for axis in axes]).contiguous()


def _device_type() -> str:
    """Return the device that the world's backend is for: an accelerator before the CPU."""
    config = dist.get_backend_config(dist.group.WORLD)
    table = dict(pair.split(":") for pair in config.split(",") if ":" in pair)
    devices = [
        device
        for device, backend in dist.Backend.default_device_backend_map.items()
        if table.get(device) == backend and device != "cpu"
    ]
    return devices[0] if devices else "cpu"
