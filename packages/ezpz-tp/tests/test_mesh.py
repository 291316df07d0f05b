import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ezpz_tp import ParallelError, ParallelState
from ezpz_tp.testing import run_ranks


def there_and_back():
    rank = dist.get_rank()
    for order in ("tp-cp-ep-dp-pp", "dp-tp-pp"):
        state = ParallelState.create(tensor=2, order=order)
        mesh = state.to_mesh()
        assert mesh.mesh_dim_names == ("dp", "tp")
        assert mesh.device_type == "cpu"
        assert mesh.get_group("tp") is state.group("tensor")
        assert mesh.get_group("dp") is state.group("data")
        assert tuple(mesh.get_coordinate()) == (state.index("data"), state.index("tensor"))
        assert tuple(mesh["tp"].mesh.tolist()) == state.ranks("tensor")
        whole = torch.arange(8.0).reshape(4, 2)
        shards = distribute_tensor(whole, mesh["tp"], [Shard(0)], src_data_rank=None)
        assert torch.equal(shards.to_local(), whole[2 * state.index("tensor") :][:2])
        assert torch.equal(shards.full_tensor(), whole)
        back = ParallelState.from_mesh(mesh)
        for axis in ("tensor", "data", "context", "pipeline"):
            assert back.ranks(axis) == state.ranks(axis)
            assert back.index(axis) == state.index(axis)
        assert back.group("tensor") is state.group("tensor")
        back.destroy()  # nothing of a mesh's is freed
        total = torch.ones(1)
        dist.all_reduce(total, group=state.group("tensor"))
        assert total.item() == 2
        state.destroy()

    state = ParallelState.create(tensor=4)
    assert state.to_mesh().mesh_dim_names == ("tp",)
    state.destroy()

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "tp"))
    state = ParallelState.from_mesh(mesh, data="replica")
    assert state.ranks("data") == (rank % 2, rank % 2 + 2)
    assert ParallelState.from_mesh(mesh["tp"]).size("tensor", "data") == 2
    with pytest.raises(ParallelError, match=r"dim 'replica' of the mesh .* is no axis"):
        ParallelState.from_mesh(mesh)
    with pytest.raises(ParallelError, match="pipeline='stage'; the mesh has the dims replica, tp"):
        ParallelState.from_mesh(mesh, data="replica", pipeline="stage")
    with pytest.raises(ParallelError, match="dim 'tp' is named for both tensor and context"):
        ParallelState.from_mesh(mesh, data="replica", context="tp")
    with pytest.raises(ParallelError, match=r"shape \(4,\) without names"):
        ParallelState.from_mesh(init_device_mesh("cpu", (4,)))


def test_a_mesh_of_a_state_and_a_state_of_a_mesh():
    run_ranks(there_and_back, 4, in_processes=True, initialize=False)


def alone():
    state = ParallelState.create()
    mesh = state.to_mesh()
    assert mesh.mesh_dim_names == ("dp",)
    assert mesh.size() == 1
    state.destroy()


def test_a_world_of_one():
    run_ranks(alone, 1, in_processes=True, initialize=False)
