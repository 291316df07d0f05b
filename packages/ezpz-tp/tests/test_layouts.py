"""The table of meshes: its axes are explained, in one order."""

import re

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks

from ezpz_tp import layouts, make_mesh

ORDER = [name for name in layouts.AXES if name != "tp+sp"]


@pytest.mark.parametrize("name", layouts.MESHES)
def test_axes_are_explained_and_what_communicates_most_is_nearest(name):
    axes, when = layouts.MESHES[name]
    assert list(axes) == sorted(axes, key=ORDER.index)
    assert when
    for axis in axes:
        shards, sends, source = layouts.AXES[axis]
        assert shards
        assert all(re.match("(forward|backward|after backward): ", each) for each in sends)
        assert "arXiv:" in source


@on_ranks(4, initialize=False)
def test_a_mesh_is_made_of_its_axes():
    axes = layouts.MESHES["hsdp"].axes
    mesh = make_mesh("cpu", torch.arange(4).view(2, 2), axes)
    groups = {axis: dist.get_process_group_ranks(mesh.get_group(axis)) for axis in axes}
    rank = dist.get_rank()
    first = rank // 2 * 2
    assert groups == {"replicate": [rank % 2, rank % 2 + 2], "shard": [first, first + 1]}
