import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import ezpz_tp as tp
from ezpz_tp import parallel_state
from ezpz_tp.model_parallel_config import ModelParallelConfig
from ezpz_tp.tensor_parallel import ColumnParallelLinear
from ezpz_tp.testing import run_ranks


@on_ranks(4, in_processes=True, initialize=False)
def test_a_mesh_of_a_state_and_a_state_of_a_mesh():
    rank = dist.get_rank()
    for order in ("tp-cp-ep-dp-pp", "dp-tp-pp"):
        state = tp.ParallelState.create(tensor=2, order=order)
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
        back = tp.ParallelState.from_mesh(mesh)
        for axis in ("tensor", "data", "context", "pipeline"):
            assert back.ranks(axis) == state.ranks(axis)
            assert back.index(axis) == state.index(axis)
        assert back.group("tensor") is state.group("tensor")
        back.destroy()  # nothing of a mesh's is freed
        total = torch.ones(1)
        dist.all_reduce(total, group=state.group("tensor"))
        assert total.item() == 2
        state.destroy()

    state = tp.ParallelState.create(tensor=4)
    assert state.to_mesh().mesh_dim_names == ("tp",)
    state.destroy()

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "tp"))
    state = tp.ParallelState.from_mesh(mesh, data="replica")
    assert state.ranks("data") == (rank % 2, rank % 2 + 2)
    assert tp.ParallelState.from_mesh(mesh["tp"]).size("tensor", "data") == 2
    with pytest.raises(tp.ParallelError, match=r"dim 'replica' of the mesh .* is no axis"):
        tp.ParallelState.from_mesh(mesh)
    with pytest.raises(
        tp.ParallelError, match="pipeline='stage'; the mesh has the dims replica, tp"
    ):
        tp.ParallelState.from_mesh(mesh, data="replica", pipeline="stage")
    with pytest.raises(tp.ParallelError, match="dim 'tp' is named for both tensor and context"):
        tp.ParallelState.from_mesh(mesh, data="replica", context="tp")
    with pytest.raises(tp.ParallelError, match=r"shape \(4,\) without names"):
        tp.ParallelState.from_mesh(init_device_mesh("cpu", (4,)))


@on_ranks(4, in_processes=True, initialize=False)
def test_a_mesh_over_the_world_has_a_layout_and_comes_back():
    for shape, names in (
        ((2, 1, 2), ("pp", "dp", "tp")),
        ((2, 2), ("cp", "tp")),
        ((2, 2), ("tp", "pp")),
        ((2, 2), ("dp", "cp")),
    ):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        state = tp.ParallelState.from_mesh(mesh)
        assert state.to_mesh() is mesh
        assert state.layout is not None
        assert state.layout.degree("tensor") == state.size("tensor")
        for axis in ("tensor", "context", "data", "pipeline"):
            assert state.ranks(axis) == tuple(dist.get_process_group_ranks(state.group(axis)))
            assert state.index(axis) == state.group(axis).rank()
        axes = [axis for axis in ("tensor", "context", "data", "pipeline") if state.size(axis) > 1]
        assert state.group(*axes) is dist.group.WORLD
    assert str(
        tp.ParallelState.from_mesh(
            init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        ).layout
    ) == str(tp.RankLayout(4, tensor=2))


@on_ranks(4, in_processes=True, initialize=False)
def test_products_of_a_mesh():
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "pp", "tp"))
    part = mesh["pp", "tp"]
    for one in (mesh, part):
        state = tp.ParallelState.from_mesh(one)
        assert (state.layout is None) == (one is part)
        assert state.to_mesh() is one
        assert state.group("tensor", "pipeline") is mesh.get_group("pp")
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    state = tp.ParallelState.from_mesh(mesh["cp", "tp"])
    assert state.group("tensor", "context") is dist.group.WORLD


@on_ranks(8, in_processes=True, initialize=False)
def test_products_of_a_mesh_that_are_flattened():
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    state = tp.ParallelState.from_mesh(mesh)
    words = r"no group spans tensor x context .*from_mesh.*mesh\[\('cp', 'tp'\)\]._flatten"
    with pytest.raises(tp.ParallelError, match=words):
        state.group("tensor", "context")
    flat = mesh["cp", "tp"]._flatten()
    for one in (state, tp.ParallelState.from_mesh(mesh["cp", "tp"])):
        assert one.group("tensor", "context") is flat.get_group()


def of_experts(kind):
    if kind == "create":
        state = tp.ParallelState.create(2, context=2)
    elif kind == "groups":
        own = tp.ParallelState.create(2, context=2)
        state = tp.ParallelState.from_groups(
            tensor=own.group("tensor"), context=own.group("context")
        )
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        state = tp.ParallelState.from_mesh(mesh)
    with tp.use_state(state):
        parameter = torch.nn.Parameter(torch.zeros(4))
        parameter.grad = torch.full((4,), 3.0 + state.index("tensor"))
        tp.set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        parameter.allreduce = False
        tp.seed_model_parallel(1)
        with tp.get_rng_tracker().fork("expert-parallel-rng"):
            drawn = torch.rand(1).item()
        layer = ColumnParallelLinear(
            4,
            8,
            config=ModelParallelConfig(use_cpu_initialization=True),
            init_method=torch.nn.init.zeros_,
            is_expert=True,
        )
        names = [f"get_expert_{name}_parallel" for name in ("tensor", "model", "data")]
        return (
            [getattr(parallel_state, f"{name}_world_size")() for name in names],
            [getattr(parallel_state, f"{name}_rank")() for name in names],
            dist.get_process_group_ranks(parallel_state.get_expert_tensor_parallel_group()),
            tp.get_grad_norm([parameter]).item(),
            drawn,
            tuple(layer.weight.shape),
        )


def test_experts_are_laid_out_as_the_model_however_the_state_was_made():
    made = run_ranks(of_experts, 4, "create", in_processes=True, initialize=False)
    assert made[0][:2] == ([2, 1, 2], [0, 0, 0])
    assert made[3][:2] == ([2, 1, 2], [1, 0, 1])
    assert made[0][3] == 10.0
    for kind in ("mesh", "groups"):
        assert run_ranks(of_experts, 4, kind, in_processes=True, initialize=False) == made


@pytest.mark.parametrize("tensor", [2, 4])
@on_ranks(4, in_processes=True, initialize=False)
def test_a_second_state_does_not_meet_the_meshes_of_the_first(tensor):
    for _ in range(2):
        state = tp.ParallelState.create(tensor)
        mesh = DeviceMesh.from_group(state.group("data"), "cpu", mesh_dim_names=("dp",))
        model = fully_shard(torch.nn.Linear(8, 4), mesh=mesh)
        for parameter in model.parameters():
            like = torch.empty_like(parameter)
            assert like.device_mesh.get_local_rank("dp") == state.index("data")
            assert torch.equal((2 * parameter).full_tensor(), 2 * parameter.full_tensor())
        model(torch.randn(2, 8)).sum().backward()
        state.destroy()


@on_ranks(1, in_processes=True, initialize=False)
def test_a_world_of_one():
    state = tp.ParallelState.create()
    mesh = state.to_mesh()
    assert mesh.mesh_dim_names == ("dp",)
    assert mesh.size() == 1
    state.destroy()
