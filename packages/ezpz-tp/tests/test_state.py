import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

import ezpz_tp as tp
from ezpz_tp._current import tensor_group
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
    assert state.several == {
        "tensor": tensor,
        "data": data,
        "expert_tensor": tensor,  # without expert parallelism an expert is split as the rest
        "expert_data": data,
        **dict.fromkeys(("context", "pipeline", "expert")),
    }
    assert state.group("expert_tensor", "expert", "pipeline") is tensor
    assert (state.size("expert_tensor"), state.index("expert_tensor")) == (2, 1)
    assert (state.size("expert_data"), state.index("expert_data")) == (4, 3)
    assert (state.size("tensor", "data"), state.index("data", "tensor")) == (8, 7)
    assert state.ranks("pipeline") == (7,)
    assert state.group("pipeline").size() == 1
    with pytest.raises(
        tp.ParallelError, match=r"no group spans tensor x data \(degrees 2 x 4\).*from_groups"
    ):
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
    assert repr(state) == (
        "<ParallelState rank=7 tensor=1/2, data=3/4, expert_tensor=1/2, expert_data=3/4>"
    )
    state.destroy()
    state.destroy()
    assert not state.is_live
    with pytest.raises(
        tp.NotInitializedError, match=r"tensor group of a ParallelState .* destroyed"
    ):
        state.group("tensor")


def test_foreign_groups_with_a_layout_and_products():
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


def test_foreign_groups_of_experts():
    state = tp.ParallelState.from_groups(
        tensor=Foreign(1, 4), pipeline=Foreign(1, 2), expert=Foreign(0, 2), expert_tensor=None
    )
    assert state.size("expert_tensor") == state.size("expert_data") == 1
    assert state.index("pipeline", "expert") == 2  # the pipeline is the slowest of both grids
    state = tp.ParallelState.from_groups(
        tensor=Foreign(1, 2), context=Foreign(1, 2), data=Foreign(2, 3)
    )
    assert (state.size("expert_data"), state.index("expert_data")) == (6, 5)
    assert state.several["expert_data"] is None
    assert state.ranks("expert") == (state.rank,)
    assert (state.size("expert"), state.index("expert")) == (1, 0)
    assert state.group("expert").size() == 1


def test_experts_of_an_order_that_gives_them_no_grid_of_their_own():
    layout = tp.RankLayout(16, tensor=2, context=2, pipeline=2, order="tp-cp-pp-dp")
    assert not layout.experts_fit
    groups = {axis: Foreign(layout.index(axis, 13), 2) for axis in ("tensor", "context", "data")}
    state = tp.ParallelState.from_groups(
        **groups, pipeline=Foreign(layout.index("pipeline", 13), 2), layout=layout, rank=13
    )
    assert state.group("expert_tensor") is groups["tensor"]
    assert state.ranks("expert_data") == layout.group_of(("context", "data"), 13)
    assert state.size("expert_tensor", "expert", "pipeline") == 4


def test_groups_that_do_not_fit_the_layout():
    with pytest.raises(
        tp.DegreeError, match="the tensor group has 2 ranks; the layout's degree is 4"
    ):
        tp.ParallelState.from_groups(
            tensor=Foreign(0, 2), layout=tp.RankLayout(4, tensor=4), rank=0
        )
    with pytest.raises(
        tp.DegreeError, match="the tensor group has 1 ranks; the layout's degree is 4"
    ):
        tp.ParallelState.from_groups(layout=tp.RankLayout(4, tensor=4), rank=0)


@on_ranks(2, in_processes=True, initialize=False)
def test_a_group_that_the_rank_is_not_in():
    other = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.raises(
            tp.ParallelError, match=r"the tensor group is .*expected a process group"
        ):
            tp.ParallelState.from_groups(tensor=other)
    state = tp.ParallelState.from_groups(data=dist.group.WORLD)
    assert state.ranks("data") == (0, 1)
    assert state.rank == dist.get_rank()
    state.destroy()
    assert dist.is_initialized()  # what was given is not freed


@on_ranks(2, in_processes=True)
def test_the_group_in_use_is_found_under_compilation():
    mine, alone = tp.get_state().group("tensor"), tp.get_state().group("data")

    def scaled(x):
        group = tensor_group()
        return x if group is None else x * group.size()

    def given(x):
        group = tensor_group(mine)
        return x if group is None else x * group.size()

    for function in (scaled, given):
        whole = torch.compile(function, fullgraph=True, backend="eager")
        assert whole(torch.ones(2)).tolist() == [2.0, 2.0]

    def given_one(x):
        return x if tensor_group(alone) is None else -x

    whole = torch.compile(given_one, fullgraph=True, backend="eager")
    assert whole(torch.ones(2)).tolist() == [1.0, 1.0]


def test_compiled_code_follows_the_state_in_use():
    # torch.compile guards the type of a group, not which it is: without a guard of our own the
    # second state would be given the first one's rank and size.
    def placed(x):
        group = tensor_group()
        return x if group is None else x * group.size() + group.rank()

    whole = torch.compile(placed, fullgraph=True, backend="eager")
    one = torch.ones(1)
    for rank, size in ((0, 2), (1, 2), (2, 3), (0, 1), (1, 2)):
        with tp.use_state(tp.ParallelState.from_groups(tensor=Sized(rank, size))):
            assert whole(one).item() == placed(one).item()
    assert whole(one).item() == 1


def test_threads_have_their_own_state():
    def body():
        state = tp.get_state()
        other = tp.ParallelState.from_groups(rank=9)
        with tp.use_state(other):
            assert tp.get_state() is other
        assert tp.get_state() is state
        return state.index("tensor")

    assert run_ranks(body, 3) == [0, 1, 2]
