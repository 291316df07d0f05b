import pytest
import torch.distributed as dist
from ranks import on_ranks

import ezpz_tp as tp
from ezpz_tp._current import tensor_group

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
    with pytest.raises(tp.NotInitializedError, match="init_process_group first"):
        tp.initialize_tensor_parallel(2)


@on_ranks(4, in_processes=True, initialize=False)
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
    with pytest.raises(
        tp.DegreeError, match=r"tensor was 2, now 4; pipeline was 2, now 1.*destroy"
    ):
        tp.initialize_tensor_parallel(4)
    tp.destroy_tensor_parallel()
    assert tp.current_state() is None
    tp.initialize_model_parallel(4)
    assert tp.get_tensor_parallel_ranks() == [0, 1, 2, 3]
    tp.destroy_model_parallel()


@on_ranks(2, in_processes=True, initialize=False)
def test_a_group_that_the_rank_is_not_in():
    other = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.raises(tp.ParallelError, match=r"the tensor group is .*rank is in"):
            tensor_group(other)


@on_ranks(4, in_processes=True, initialize=False)
def test_other_orders():
    tp.initialize_tensor_parallel(2, order="dp-tp")
    assert tp.get_tensor_parallel_ranks() == [dist.get_rank() % 2, dist.get_rank() % 2 + 2]
    tp.destroy_tensor_parallel()
