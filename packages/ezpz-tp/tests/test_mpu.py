import torch.distributed as dist

from ezpz_tp import mpu, parallel_state
from ezpz_tp.model_parallel import initialize as fairscale
from ezpz_tp.testing import run_ranks


def test_it_is_all_of_parallel_state_and_more():
    assert set(parallel_state.__all__) < set(mpu.__all__)
    for name in mpu.__all__:
        assert getattr(mpu, name).__doc__, name


def what_deepspeed_calls():
    rank = dist.get_rank()
    mpu.initialize_model_parallel(2, 2)
    t, p = rank % 2, rank // 2
    # Model parallel is all that splits a model: the world's size over it is the replicas.
    assert mpu.get_model_parallel_world_size() == 4
    assert mpu.get_model_parallel_rank() == rank
    assert mpu.get_model_parallel_group() is dist.group.WORLD
    assert dist.get_world_size() // mpu.get_model_parallel_world_size() == 1
    assert mpu.get_data_parallel_world_size() == 1
    assert mpu.get_data_parallel_rank() == 0
    assert mpu.get_data_parallel_group_ranks() == [rank]
    for name, size, index in (
        ("slice_parallel", 2, t),
        ("tensor_model_parallel", 2, t),
        ("pipe_parallel", 2, p),
        ("sequence_parallel", 1, 0),
        ("sequence_data_parallel", 1, 0),
    ):
        assert getattr(mpu, f"get_{name}_world_size")() == size
        assert getattr(mpu, f"get_{name}_rank")() == index
        group = getattr(mpu, f"get_{name}_group")()
        assert (group.size(), group.rank()) == (size, index)
    assert mpu.get_sequence_parallel_src_rank() == rank
    mpu.destroy_model_parallel()


def test_what_deepspeed_calls():
    run_ranks(what_deepspeed_calls, 4, in_processes=True, initialize=False)


def test_it_is_not_what_deepspeed_takes_for_sequence_parallelism_alone():
    # deepspeed/utils/groups.py: with this name, its model-parallel size is 1.
    assert not hasattr(mpu, "initialize_sequence_parallel")


def ulysses():
    mpu.initialize_model_parallel(context_parallel_size=2)
    assert mpu.get_sequence_parallel_world_size() == 2
    assert mpu.get_sequence_data_parallel_world_size() == 4
    assert mpu.get_sequence_data_parallel_rank() == dist.get_rank()
    mpu.destroy_model_parallel()


def test_sequence_parallel_is_the_context_axis():
    run_ranks(ulysses, 4, in_processes=True, initialize=False)


def fairscales():
    rank = dist.get_rank()
    fairscale.initialize_model_parallel(2)
    assert fairscale.model_parallel_is_initialized()
    assert fairscale.get_model_parallel_world_size() == 2
    assert fairscale.get_model_parallel_rank() == rank % 2
    assert fairscale.get_model_parallel_src_rank() == rank // 2 * 2
    assert fairscale.get_model_parallel_group().size() == 2
    assert fairscale.get_data_parallel_ranks() == [rank % 2, rank % 2 + 2]
    assert fairscale.get_context_parallel_ranks() == [rank]
    assert fairscale.get_pipeline_parallel_ranks() == [rank]
    fairscale.destroy_model_parallel()
    assert not fairscale.model_parallel_is_initialized()


def test_fairscales_names():
    run_ranks(fairscales, 4, in_processes=True, initialize=False)
