import gc
import tracemalloc
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch.testing._internal.distributed.fake_pg import FakeStore

import ezpz_tp as tp
from ezpz_tp.testing import run_ranks

AXES = ("tensor", "context", "data", "pipeline")


def summed(state, *axes):
    """The sum of the ranks in a group, as the group itself computes it."""
    total = torch.tensor([float(state.rank)])
    dist.all_reduce(total, group=state.group(*axes))
    return total.item()


@on_ranks(4, in_processes=True, initialize=False)
def test_made_and_freed_again_and_again():
    names, world = set(), dist.distributed_c10d._world
    for degrees in [(2, 1, 1), (2, 1, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4), (4, 1, 1), (2, 2, 1)]:
        state = tp.ParallelState.create(*degrees, also=[("tensor", "pipeline")], embedding=True)
        for axes in (*((axis,) for axis in AXES), ("tensor", "pipeline")):
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


@on_ranks(4, in_processes=True, initialize=False)
def test_freed_before_others_have_connected():
    for degrees in [(2, 1, 1), (2, 1, 2), (1, 2, 2), (1, 4, 1), (2, 1, 1)] * 4:
        tp.ParallelState.create(*degrees, also=[("context", "data")], embedding=True).destroy()


@on_ranks(4, in_processes=True, initialize=False)
def test_ranks_that_made_other_groups_before_still_meet():
    # Trap of the facts page: names made of the number of groups never meet after this.
    rank = dist.get_rank()
    if rank in (0, 3):
        extra = dist.new_group([0, 3], use_local_synchronization=True)
        dist.barrier(group=extra)
    state = tp.ParallelState.create(tensor=2, timeout=timedelta(seconds=20))
    assert summed(state, "tensor") == sum(state.ranks("tensor"))
    assert summed(state, "data") == sum(state.ranks("data"))
    state.destroy()


@on_ranks(4, in_processes=True, initialize=False)
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
        with pytest.raises(
            tp.ParallelError, match=f"rank {rank} has no embedding group: its stage"
        ):
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


def test_ranks_that_ask_for_different_degrees_are_told():
    results = run_ranks(different_degrees, 4, in_processes=True, initialize=False)
    told = [words for kind, words in results if kind == "DegreeError"]
    assert len(told) == 4, results
    for words in told:
        assert words == told[0]
        assert "rank 0 was" in words or "rank 0 for" in words
        assert "asked for RankLayout(world_size=4, tensor=" in words
        assert "tensor=4" in words
        assert "tensor=2" in words
        assert "give every rank the same arguments" in words


@on_ranks(4, in_processes=True, initialize=False)
def test_a_rank_that_initializes_more_often_is_told():
    tp.ParallelState.create(tensor=2).destroy()
    if dist.get_rank() == 1:
        with pytest.raises(tp.ParallelError, match=r"rank 1 .* 1 came: .*was the 2\. time"):
            tp.ParallelState.create(tensor=2, timeout=timedelta(seconds=0.3))
    dist.barrier()


@on_ranks(2, in_processes=True, initialize=False)
def test_a_new_world_gets_new_groups():
    store, rank, size = dist.distributed_c10d._get_default_store(), dist.get_rank(), 2
    tp.initialize_tensor_parallel(2)
    assert tp.tensor_parallel_is_initialized()
    dist.destroy_process_group()
    assert not tp.tensor_parallel_is_initialized()
    ones = torch.ones(2)
    for ask in (
        tp.get_state,
        tp.get_tensor_parallel_group,
        tp.get_tensor_parallel_rank,
        tp.get_tensor_parallel_world_size,
        tp.get_tensor_parallel_ranks,
        lambda: tp.reduce_from_tensor_parallel_region(ones),
        lambda: tp.ColumnParallelLinear(4, 4),
    ):
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


@on_ranks(2, in_processes=True, initialize=False)
def test_a_backend_of_its_own():
    state = tp.ParallelState.create(tensor=2, backend={"tensor": "gloo"})
    assert state.group("tensor") is dist.group.WORLD  # gloo is the world's: nothing to make
    state.destroy()
    state = tp.ParallelState.create(tensor=2, backend={"tensor": "fake"})
    assert dist.get_backend(state.group("tensor")) == "fake"
    assert state.made == 1
    state.destroy()


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
    for axis in AXES:
        assert state.group(axis).size() == state.size(axis) == state.layout.degree(axis)
    state.destroy()


def test_a_product_that_was_not_made_says_how_to_make_it(the_largest_machine):
    state = tp.ParallelState.create(12, 2, 8)
    with pytest.raises(
        tp.ParallelError, match=r"spans pipeline x tensor \(degrees 8 x 12\)"
    ) as error:
        state.group("pipeline", "tensor")
    assert "also=[('tensor', 'pipeline')]" in str(error.value)
    assert not state.has_group("pipeline", "tensor")
    ranks = the_largest_machine.group_of(("tensor", "pipeline"), 77_777)
    assert state.ranks("pipeline", "tensor") == ranks
    assert state.size("pipeline", "tensor") == 96
    assert ranks[state.index("tensor", "pipeline")] == 77_777
    state.destroy()


def test_before_torch_distributed():
    with pytest.raises(tp.NotInitializedError, match=r"tensor 2 x context 1 .*init_process_group"):
        tp.ParallelState.create(tensor=2)
