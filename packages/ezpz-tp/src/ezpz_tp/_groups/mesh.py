"""Between a state and torch's DeviceMesh: the same groups, by the names of dims."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ezpz_tp._errors import ParallelError

from .ranks import AXES, RankLayout

if TYPE_CHECKING:
    from .state import ParallelState

DIMS = {"tensor": "tp", "context": "cp", "data": "dp", "pipeline": "pp"}
"""What an axis is called in a mesh, as torchtitan and Megatron call it."""


def groups_of_mesh(
    mesh: DeviceMesh, names: Mapping[str, str]
) -> dict[tuple[str, ...], ProcessGroup]:
    """Return a mesh's groups by axis.

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
    return {(axes[dim],): mesh.get_group(dim) for dim in dims}


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
