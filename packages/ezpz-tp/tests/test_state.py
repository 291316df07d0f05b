"""Groups: of a state, of the default one, of a mesh; how they are made and freed."""

import gc
import tracemalloc
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from test_tensor_parallel import column
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import ezpz_tp as tp
from ezpz_tp import parallel_state
from ezpz_tp._current import tensor_group
from ezpz_tp._groups import SingleRankGroup
from ezpz_tp.testing import run_ranks


class Foreign:
    """Of a group, a state made of foreign groups asks these two only, until it communicates."""

    def __init__(self, rank, size):
        self.rank = lambda: rank
        self.size = lambda: size


class Sized(dist.ProcessGroup):
    """A real process group, which torch.compile knows, that never communicates."""

    group_name = group_desc = "sized"

    def __init__(self, rank, size):
        super().__init__(rank, size)


def test_foreign_groups_without_a_layout():
    tensor, data = Foreign(1, 2), Foreign(3, 4)
    state = tp.ParallelState.from_groups(tensor=tensor, data=data)
    assert state.layout is None
    assert state.rank == 1 + 2 * 3  # Megatron's order
    assert state.group("tensor") is tensor
    assert state.group("data", "context") is data  # context has degree 1
    # Without expert parallelism an expert is split as the rest.
    assert state.group("expert_tensor", "expert", "pipeline") is tensor
    assert state.group("expert_data") is data
    assert (state.size("tensor", "data"), state.index("data", "tensor")) == (8, 7)
    assert state.ranks("pipeline") == (7,)
    assert state.group("pipeline").size() == 1
    told = r"no group spans tensor x data \(degrees 2 x 4\).*from_groups"
    with pytest.raises(tp.ParallelError, match=told):
        state.group("tensor", "data")
    with pytest.raises(ValueError, match="those of experts are the model's here"):
        state.size("tensor", "expert_tensor")
    with pytest.raises(tp.ParallelError, match=r"does not know the tensor group.*layout="):
        state.ranks("tensor")
    with pytest.raises(tp.ParallelError, match="no layout to make a mesh of"):
        state.to_mesh()
    with pytest.raises(ValueError, match="axis 'rows'; expected one of tensor"):
        state.group("rows")
    for axes in ((), ("tensor", "tensor")):
        with pytest.raises(ValueError, match="expected one or more, each once"):
            state.group(*axes)
    state.destroy()
    state.destroy()
    assert not state.is_live
    told = r"tensor group of a ParallelState .* destroyed"
    with pytest.raises(tp.NotInitializedError, match=told):
        state.group("tensor")


def test_foreign_groups_with_a_layout_or_experts():
    # Products of axes.
    layout = tp.RankLayout(8, tensor=2)
    both = Foreign(7, 8)
    state = tp.ParallelState.from_groups(
        tensor=Foreign(1, 2),
        data=Foreign(3, 4),
        also={("tensor", "data"): both},
        layout=layout,
        rank=7,
    )
    assert state.group("data", "tensor") is both
    assert state.ranks("data") == (1, 3, 5, 7)
    assert state.ranks("tensor", "data") == tuple(range(8))
    # Groups of experts.
    state = tp.ParallelState.from_groups(
        tensor=Foreign(1, 4), pipeline=Foreign(1, 2), expert=Foreign(0, 2), expert_tensor=None
    )
    assert state.size("expert_tensor") == state.size("expert_data") == 1
    assert state.index("pipeline", "expert") == 2  # the pipeline is the slowest of both grids
    # An order that gives experts no grid of their own.
    layout = tp.RankLayout(16, tensor=2, context=2, pipeline=2, order="tp-cp-pp-dp")
    assert not layout.experts_fit
    groups = {axis: Foreign(layout.index(axis, 13), 2) for axis in ("tensor", "context", "data")}
    state = tp.ParallelState.from_groups(
        **groups, pipeline=Foreign(layout.index("pipeline", 13), 2), layout=layout, rank=13
    )
    assert state.group("expert_tensor") is groups["tensor"]
    assert state.ranks("expert_data") == layout.group_of(("context", "data"), 13)
    assert state.size("expert_tensor", "expert", "pipeline") == 4
    # Groups that do not fit the layout.
    told = "the tensor group has 2 ranks; the layout's degree is 4"
    with pytest.raises(tp.DegreeError, match=told):
        tp.ParallelState.from_groups(
            tensor=Foreign(0, 2), layout=tp.RankLayout(4, tensor=4), rank=0
        )


@on_ranks(2, initialize=False)
def test_groups_of_others_and_of_another_backend():
    # A group that the rank is not in.
    other = dist.new_group([0])
    if dist.get_rank() == 1:
        for use in (
            lambda: tp.ParallelState.from_groups(tensor=other),
            lambda: tensor_group(other),
        ):
            with pytest.raises(tp.ParallelError, match=r"the tensor group is .*rank is in"):
                use()
    state = tp.ParallelState.from_groups(data=dist.group.WORLD)
    assert state.ranks("data") == (0, 1)
    assert state.rank == dist.get_rank()
    state.destroy()
    assert dist.is_initialized()  # what was given is not freed
    # A backend of its own.
    state = tp.ParallelState.create(tensor=2, backend={"tensor": "gloo"})
    assert state.group("tensor") is dist.group.WORLD  # gloo is the world's: nothing to make
    state.destroy()
    state = tp.ParallelState.create(tensor=2, backend={"tensor": "fake"})
    assert dist.get_backend(state.group("tensor")) == "fake"
    assert state.made == 1
    state.destroy()


def test_code_follows_the_state_in_use_here():
    # torch.compile guards the type of a group, not which it is: without a guard of our own the
    # second state, or group that is given, would have the first one's rank and size.
    def placed(x, given=None):
        group = tensor_group(given)
        return x if group is None else x * group.size() + group.rank()

    whole = torch.compile(placed, fullgraph=True, backend="eager")
    one = torch.ones(1)
    for rank, size in ((0, 2), (1, 2), (2, 3), (0, 1), (1, 2)):
        with tp.use_state(tp.ParallelState.from_groups(tensor=Sized(rank, size))):
            assert whole(one).item() == placed(one).item()
    assert whole(one).item() == 1
    torch._dynamo.reset()
    for rank, size in ((0, 2), (1, 2), (2, 3)):
        given = Sized(rank, size)
        given.group_name = f"{rank} of {size}"
        assert whole(one, given).item() == size + rank
    assert whole(one, SingleRankGroup(0)).item() == 1

    # Threads have their own.
    first, second = (tp.ParallelState.from_groups(rank=rank) for rank in (8, 9))
    with ThreadPoolExecutor(1) as thread, tp.use_state(first):
        assert thread.submit(tp.current_state).result() is None
        with tp.use_state(second):
            assert tp.get_state() is second
        assert tp.get_state() is first


AXES = ("tensor", "data", "pipeline", "context", "expert")


def getter(axis, what):
    return getattr(tp, f"get_{axis}_parallel_{what}")


def test_without_a_world_a_rank_is_alone():
    assert not tp.tensor_parallel_is_initialized()
    assert tensor_group() is None
    for axis in AXES:
        assert getter(axis, "world_size")() == 1
        assert getter(axis, "rank")() == 0
        assert getter(axis, "ranks")() == [0]
        assert getter(axis, "src_rank")() == 0
        with pytest.raises(tp.NotInitializedError, match="call initialize_tensor_parallel"):
            getter(axis, "group")()
    assert tp.is_pipeline_first_stage()
    assert tp.is_pipeline_last_stage()
    assert tp.get_pipeline_parallel_next_rank() == 0
    tp.destroy_tensor_parallel()
    with pytest.raises(
        tp.NotInitializedError, match=r"tensor 2 x context 1 .*init_process_group first"
    ):
        tp.initialize_tensor_parallel(2)


@on_ranks(4, initialize=False)
def test_from_before_initialization_to_after():
    rank = dist.get_rank()
    assert tensor_group() is None  # trap 13: layers are what they are alone
    for axis in AXES:
        for what in ("world_size", "rank", "ranks", "src_rank", "group"):
            with pytest.raises(tp.NotInitializedError):
                getter(axis, what)()
    with pytest.raises(tp.NotInitializedError, match=r"tensor parallel .* in a world of 4 ranks"):
        tp.get_tensor_parallel_rank()
    with pytest.raises(tp.DegreeError, match=r"tensor 3 x context 1 x pipeline 1 = 3 .* size 4"):
        tp.initialize_tensor_parallel(3)
    assert not tp.tensor_parallel_is_initialized()

    tp.initialize_tensor_parallel(2, pipeline_parallel_size=2)
    assert tp.tensor_parallel_is_initialized()
    first, stage = rank // 2 * 2, rank // 2
    assert tp.get_tensor_parallel_ranks() == [first, first + 1]
    assert tp.get_tensor_parallel_src_rank() == first
    assert tp.get_tensor_parallel_rank() == rank % 2
    assert tp.get_tensor_parallel_world_size() == 2
    assert tp.get_pipeline_parallel_ranks() == [rank % 2, rank % 2 + 2]
    assert tp.get_pipeline_parallel_next_rank() == (rank + 2) % 4
    assert tp.get_pipeline_parallel_prev_rank() == (rank + 2) % 4
    assert tp.get_pipeline_parallel_first_rank() == rank % 2
    assert tp.get_pipeline_parallel_last_rank() == rank % 2 + 2
    assert tp.is_pipeline_first_stage() == (stage == 0)
    assert tp.is_pipeline_last_stage() == (stage == 1)
    assert tp.get_data_parallel_ranks() == [rank]
    assert tp.get_data_parallel_group().size() == 1
    assert tensor_group() is tp.get_tensor_parallel_group()
    assert tensor_group(tp.get_data_parallel_group()) is None
    others = dist.new_group([(rank + 1) % 4], use_local_synchronization=True)
    assert tensor_group(others) is tensor_group()  # torch's None for a group of others

    state = tp.get_state()
    tp.initialize_tensor_parallel(2, 2)  # the same again
    assert tp.get_state() is state
    told = r"tensor was 2, now 4; pipeline was 2, now 1.*destroy"
    with pytest.raises(tp.DegreeError, match=told):
        tp.initialize_tensor_parallel(4)
    tp.destroy_tensor_parallel()
    assert tp.current_state() is None
    tp.initialize_model_parallel(4)
    assert tp.get_tensor_parallel_ranks() == [0, 1, 2, 3]
    tp.destroy_model_parallel()
    tp.initialize_tensor_parallel(2, order="dp-tp")
    assert tp.get_tensor_parallel_ranks() == [rank % 2, rank % 2 + 2]
    tp.destroy_tensor_parallel()


def summed(state, *axes):
    """The sum of the ranks in a group, as the group itself computes it."""
    total = torch.tensor([float(state.rank)])
    dist.all_reduce(total, group=state.group(*axes))
    return total.item()


@pytest.mark.slow
@on_ranks(4, initialize=False)
def test_made_and_freed_again_and_again():
    names, world = set(), dist.distributed_c10d._world
    for degrees in [(2, 1, 1), (2, 1, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4), (4, 1, 1), (2, 2, 1)]:
        state = tp.ParallelState.create(*degrees, also=[("tensor", "pipeline")], embedding=True)
        for axes in (*((axis,) for axis in tp.AXES), ("tensor", "pipeline")):
            assert summed(state, *axes) == sum(state.ranks(*axes)), (degrees, axes)
            assert state.group(*axes).rank() == state.index(*axes)
        if state.has("embedding"):
            assert summed(state, "embedding") == sum(state.ranks("embedding"))
        made = state._maker.made
        assert not names & {group.group_name for group in made}
        names |= {group.group_name for group in made}
        kept = [weakref.ref(group) for group in made]
        state.destroy()
        state.destroy()
        del made
        gc.collect()
        assert [group() for group in kept] == [None] * len(kept)
        assert len(world.pg_map) == len(world.pg_group_ranks) == len(world.pg_names) == 1
        with pytest.raises(tp.NotInitializedError, match="destroyed"):
            state.group("tensor")
    assert names
    # Freed before others have connected.
    for degrees in [(2, 1, 1), (2, 1, 2), (1, 2, 2), (1, 4, 1), (2, 1, 1)] * 4:
        tp.ParallelState.create(*degrees, also=[("context", "data")], embedding=True).destroy()
    # Ranks that made other groups before still meet.
    # Trap of the facts page: names made of the number of groups never meet after this.
    rank = dist.get_rank()
    if rank in (0, 3):
        extra = dist.new_group([0, 3], use_local_synchronization=True)
        dist.barrier(group=extra)
    state = tp.ParallelState.create(tensor=2, timeout=timedelta(seconds=20))
    assert summed(state, "tensor") == sum(state.ranks("tensor"))
    assert summed(state, "data") == sum(state.ranks("data"))
    state.destroy()


@on_ranks(4, initialize=False)
def test_equal_rank_sets_share_a_group_and_the_worlds_is_not_made_anew():
    world = dist.group.WORLD
    state = tp.ParallelState.create(tensor=4, also=[("tensor", "data"), ("context", "tensor")])
    assert state.made == 0
    assert state.group("tensor") is state.group("tensor", "data") is world
    assert state.group("data") is state.group("context") is state.group("pipeline", "data")
    state.destroy()
    assert dist.group.WORLD is world

    state = tp.ParallelState.create(tensor=2, also=[("tensor", "pipeline"), ("context", "data")])
    assert state.made == 2
    assert state.group("tensor", "pipeline") is state.group("tensor")
    assert state.group("context", "data") is state.group("data")
    assert state.group("tensor", "data") is world
    state.destroy()

    state = tp.ParallelState.create(pipeline=2, expert=2)
    assert state.made == 2  # the experts' group is the data group: two ranks of a stage
    assert state.group("expert") is state.group("data")
    assert state.size("expert_data") == 1
    state.destroy()

    state = tp.ParallelState.create(pipeline=4, embedding=True, also=[("data",)])
    rank = dist.get_rank()
    assert state.made == 1  # this rank's part: first and last, or the two between
    assert state.has("embedding") == (rank in (0, 3))
    assert state.has("position_embedding") == (rank == 0)
    if rank in (0, 3):
        assert state.ranks("embedding") == (0, 3)
        assert summed(state, "embedding") == 3
    else:
        told = f"rank {rank} has no embedding group: its stage"
        with pytest.raises(tp.ParallelError, match=told):
            state.group("embedding")
    if rank == 0:
        assert state.group("position_embedding").size() == 1
    state.destroy()


def different_degrees():
    degree = 4 if dist.get_rank() == 0 else 2
    try:
        tp.ParallelState.create(tensor=degree).destroy()
    except tp.ParallelError as error:
        return type(error).__name__, str(error)
    return "made", ""


@on_ranks(3, initialize=False)
def test_ranks_in_unequally_many_groups_make_one():
    rank = dist.get_rank()
    kept = dist.new_group([0])  # which the others are not in
    for _ in range(2):  # after one was freed, too
        pair = tp.make_group([1, 0]) if rank < 2 else None
        alone = tp.make_group([rank], "gloo", timedelta(seconds=60))
        assert dist.get_process_group_ranks(alone) == [rank]
        if pair is not None:
            assert dist.get_process_group_ranks(pair) == [0, 1]
            found = torch.tensor(rank + 1)
            dist.all_reduce(found, group=pair)
            assert found == 3
            dist.destroy_process_group(pair)
    other = (rank + 1) % 3
    with pytest.raises(tp.ParallelError, match=rf"rank {rank} makes a group of ranks \[{other}\]"):
        tp.make_group([other])
    with pytest.raises(tp.ParallelError, match="over MPI; expected another backend"):
        tp.make_group([rank], "mpi")
    assert kept is not None


def test_ranks_that_ask_for_different_degrees_are_told():
    results = run_ranks(different_degrees, 4, initialize=False)
    told = [words for kind, words in results if kind == "DegreeError"]
    assert len(told) == 4, results
    for words in told:
        assert words == told[0]
        assert "rank 0 was" in words or "rank 0 for" in words
        assert "asked for RankLayout(world_size=4, tensor=" in words
        assert "tensor=4" in words
        assert "tensor=2" in words
        assert "give every rank the same arguments" in words


@on_ranks(4, initialize=False)
def test_a_rank_that_initializes_more_often_is_told():
    tp.ParallelState.create(tensor=2).destroy()
    if dist.get_rank() == 1:
        with pytest.raises(tp.ParallelError, match=r"rank 1 .* 1 came: .*was the 2\. time"):
            tp.ParallelState.create(tensor=2, timeout=timedelta(seconds=0.3))
    dist.barrier()


@on_ranks(2, initialize=False)
def test_a_new_world_gets_new_groups():
    store, rank, size = dist.distributed_c10d._get_default_store(), dist.get_rank(), 2
    tp.initialize_tensor_parallel(2)
    assert tp.tensor_parallel_is_initialized()
    dist.destroy_process_group()
    assert not tp.tensor_parallel_is_initialized()
    for ask in (tp.get_tensor_parallel_rank, lambda: tp.ColumnParallelLinear(4, 4)):
        with pytest.raises(tp.NotInitializedError, match=r"was destroyed .*initialize again"):
            ask()
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=size
    )
    with pytest.raises(tp.NotInitializedError, match="was destroyed"):
        tp.get_tensor_parallel_rank()
    tp.initialize_tensor_parallel(2)  # the groups of the world that is gone do not count
    assert summed(tp.get_state(), "tensor") == 1
    tp.destroy_tensor_parallel()
    tp.destroy_tensor_parallel()


@pytest.fixture
def the_largest_machine():
    dist.init_process_group("fake", rank=77_777, world_size=120_960, store=FakeStore())
    yield tp.RankLayout(120_960, tensor=12, context=2, pipeline=8)
    dist.destroy_process_group()


def test_the_largest_machine_makes_one_group_an_axis_in_little_memory(the_largest_machine):
    tp.ParallelState.create(12, 2, 8).destroy()
    tracemalloc.start()
    state = tp.ParallelState.create(12, 2, 8)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert state.made == 4
    assert peak < 2**20
    assert state.layout == the_largest_machine
    for axis in tp.AXES:
        assert state.group(axis).size() == state.size(axis) == state.layout.degree(axis)
    # A product that was not made says how to make it.
    told = r"spans pipeline x tensor \(degrees 8 x 12\).*also=\[\('tensor', 'pipeline'\)\]"
    with pytest.raises(tp.ParallelError, match=told):
        state.group("pipeline", "tensor")
    assert not state.has_group("pipeline", "tensor")
    ranks = the_largest_machine.group_of(("tensor", "pipeline"), 77_777)
    assert state.ranks("pipeline", "tensor") == ranks
    assert state.size("pipeline", "tensor") == 96
    assert ranks[state.index("tensor", "pipeline")] == 77_777
    state.destroy()


@on_ranks(4, initialize=False)
def test_meshes():
    # A mesh of a state, and a state of a mesh.
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
        back = tp.ParallelState.from_mesh(mesh)
        for axis in tp.AXES:
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
    told = "pipeline='stage'; the mesh has the dims replica, tp"
    with pytest.raises(tp.ParallelError, match=told):
        tp.ParallelState.from_mesh(mesh, data="replica", pipeline="stage")
    with pytest.raises(tp.ParallelError, match="dim 'tp' is named for both tensor and context"):
        tp.ParallelState.from_mesh(mesh, data="replica", context="tp")
    with pytest.raises(tp.ParallelError, match=r"shape \(4,\) without names"):
        tp.ParallelState.from_mesh(init_device_mesh("cpu", (4,)))
    # A mesh over the world has a layout, and comes back.
    for names in (("pp", "dp", "tp"), ("cp", "tp"), ("tp", "pp"), ("dp", "cp")):
        shape = (2, 1, 2) if len(names) == 3 else (2, 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        state = tp.ParallelState.from_mesh(mesh)
        assert state.to_mesh() is mesh
        assert state.layout is not None
        assert state.layout.degree("tensor") == state.size("tensor")
        for axis in tp.AXES:
            assert state.ranks(axis) == tuple(dist.get_process_group_ranks(state.group(axis)))
            assert state.index(axis) == state.group(axis).rank()
        axes = [axis for axis in tp.AXES if state.size(axis) > 1]
        assert state.group(*axes) is dist.group.WORLD
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert str(tp.ParallelState.from_mesh(mesh).layout) == str(tp.RankLayout(4, tensor=2))
    # A part of a mesh, and products of axes.
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
    state = tp.ParallelState.from_mesh(mesh["cp", "tp"])
    assert state.layout is None
    assert state.group("tensor", "context") is mesh.get_group("tp")


@on_ranks(8, initialize=False)
def test_products_of_a_mesh_are_not_made():
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    state = tp.ParallelState.from_mesh(mesh)
    with pytest.raises(tp.ParallelError, match=r"tensor x context .*from_mesh makes none"):
        state.group("tensor", "context")


def of_experts(state):
    with tp.use_state(state):
        parameter = torch.nn.Parameter(torch.zeros(4))
        parameter.grad = torch.full((4,), 3.0 + state.index("tensor"))
        tp.set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        parameter.allreduce = False
        tp.seed_model_parallel(1)
        with tp.get_rng_tracker().fork("expert-parallel-rng"):
            drawn = torch.rand(1).item()
        layer = column(4, 8, is_expert=True)
        names = [f"get_expert_{name}_parallel" for name in ("tensor", "model", "data")]
        return (
            [getattr(parallel_state, f"{name}_world_size")() for name in names],
            [getattr(parallel_state, f"{name}_rank")() for name in names],
            dist.get_process_group_ranks(parallel_state.get_expert_tensor_parallel_group()),
            tp.get_grad_norm([parameter]).item(),
            drawn,
            tuple(layer.weight.shape),
        )


@on_ranks(4, initialize=False)
def test_experts_are_laid_out_as_the_model_however_the_state_was_made():
    made = tp.ParallelState.create(2, context=2)
    groups = {axis: made.group(axis) for axis in ("tensor", "context")}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    states = made, tp.ParallelState.from_groups(**groups), tp.ParallelState.from_mesh(mesh)
    first, *others = map(of_experts, states)
    assert first[:2] == ([2, 1, 2], [made.rank % 2, 0, made.rank // 2])
    assert first[3] == 10.0
    assert others == [first] * 2


@pytest.mark.parametrize("tensor", [2, 4])
@on_ranks(4, initialize=False)
def test_a_second_state_does_not_meet_the_meshes_of_the_first(tensor):
    x, whole = torch.ones(2, 8), torch.nn.Linear(8, 4)
    whole(x).sum().backward()
    for _ in range(2):
        state = tp.ParallelState.create(tensor)
        mesh = DeviceMesh.from_group(state.group("data"), "cpu", mesh_dim_names=("dp",))
        model = torch.nn.Linear(8, 4)
        model.load_state_dict(whole.state_dict())
        fully_shard(model, mesh=mesh)  # over an axis of degree one, too
        for parameter in model.parameters():
            like = torch.empty_like(parameter)
            assert like.device_mesh.get_local_rank("dp") == state.index("data")
            assert torch.equal((2 * parameter).full_tensor(), 2 * parameter.full_tensor())
        model(x).sum().backward()
        assert torch.equal(model.weight.grad.full_tensor(), whole.weight.grad)
        state.destroy()


@on_ranks(1, initialize=False)
def test_a_world_of_one():
    state = tp.ParallelState.create()
    mesh = state.to_mesh()
    assert mesh.mesh_dim_names == ("dp",)
    assert mesh.size() == 1
    state.destroy()


# The group of a rank alone.

OUT, LIST = object(), object()


@on_ranks(2, initialize=False)
def test_every_collective_of_one_rank_is_a_copy_and_leaves_nothing_behind():
    rank = dist.get_rank()
    state = tp.ParallelState.create(tensor=2)
    group = state.group("data")
    assert state.size("data") == 1
    assert (dist.get_rank(group), dist.get_world_size(group)) == (0, 1)
    assert dist.get_process_group_ranks(group) == [rank]
    assert dist.get_global_rank(group, 0) == rank
    assert dist.get_backend(group) == "alone"
    x = torch.arange(6.0).reshape(3, 2) + rank
    y = x.clone()
    for work in (
        dist.all_reduce(y, group=group, async_op=True),
        dist.broadcast(y, src=rank, group=group, async_op=True),
        dist.reduce(y, dst=rank, group=group, async_op=True),
    ):
        assert work.wait()
    assert torch.equal(x, y)

    def same(call, *args, **options):
        out = torch.full_like(x, -1)
        call(*(out if arg is OUT else [out] if arg is LIST else arg for arg in args), **options)
        assert torch.equal(out, x)

    same(dist.all_gather, LIST, x, group=group)
    same(dist.all_gather_into_tensor, OUT, x, group=group)
    same(dist.reduce_scatter, OUT, [x], group=group)
    same(dist.reduce_scatter_tensor, OUT, x, group=group)
    same(dist.all_to_all, LIST, [x], group=group)
    same(dist.all_to_all_single, OUT, x, group=group)
    same(dist.gather, x, LIST, dst=rank, group=group)
    same(dist.scatter, OUT, [x], src=rank, group=group)
    with dist._coalescing_manager(group=group):
        dist.all_reduce(y, group=group)
    assert torch.equal(x, y)
    dist.barrier(group=group)
    # As all_gather_object sends an object; itself it needs numpy.
    data = torch.frombuffer(bytearray(b"an object"), dtype=torch.uint8)
    received = torch.empty_like(data)
    dist.all_gather([received], data, group=group)
    assert bytes(received.tolist()) == b"an object"
    with pytest.raises(tp.ParallelError, match="there is no peer"):
        group.send([x], 0, 0)
    for call in (
        functional.all_reduce(x, "sum", group),
        functional.all_gather_tensor(x, 0, group),
        functional.reduce_scatter_tensor(x, "sum", 0, group),
        functional.all_to_all_single(x, None, None, group),
        functional.broadcast(x, 0, group),
    ):
        assert torch.equal(functional.wait_tensor(call), x)
    # A world of two, and still nothing was sent: the other rank's values never came.
    gone = weakref.ref(group)
    tables = dist.distributed_c10d._world
    assert group in tables.pg_map
    state.destroy()
    del group
    gc.collect()
    assert gone() is None
    assert len(tables.pg_map) == 1
    assert len(tables.pg_group_ranks) == 1
    # DistributedDataParallel over an axis of degree one.
    state = tp.ParallelState.create(tensor=2)
    torch.manual_seed(rank)
    model = torch.nn.Linear(4, 3)
    wrapped = DistributedDataParallel(model, process_group=state.group("data"))
    x = torch.randn(5, 4)
    wrapped(x).square().sum().backward()
    (expected,) = torch.autograd.grad(model(x).square().sum(), model.weight)
    assert torch.equal(model.weight.grad, expected)
    state.destroy()
