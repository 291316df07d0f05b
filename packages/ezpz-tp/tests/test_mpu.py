"""The dialects of Megatron's and DeepSpeed's `mpu`, and fairscale's."""

import gc
import warnings
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from on_ranks import load_code, on_ranks
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

import ezpz_tp as tp
from ezpz_tp import mpu
from ezpz_tp.model_parallel import initialize as fairscale
from ezpz_tp.testing import run_ranks

the_ranks = dist.get_process_group_ranks


def place(name):
    size = getattr(mpu, f"get_{name}_parallel_world_size")()
    return size, getattr(mpu, f"get_{name}_parallel_rank")()


@on_ranks(4, initialize=False)
def test_every_getter():
    rank = dist.get_rank()
    mpu.initialize_model_parallel(2, 2, expert_model_parallel_size=2, expert_tensor_parallel_size=1)
    assert mpu.is_initialized()
    assert mpu.model_parallel_is_initialized()
    t, p = rank % 2, rank // 2
    own, pair, stages, every = [rank], [2 * p, 2 * p + 1], [t, t + 2], [0, 1, 2, 3]
    groups = {
        "tensor_model": pair,
        "pipeline_model": stages,
        "model": every,
        "data": own,
        "context": own,
        "tensor_and_data": pair,
        "tensor_and_context": pair,
        "expert_model": pair,
        "expert_tensor": own,
        "expert_data": own,
        "expert_tensor_and_model": pair,
        "expert_tensor_model_pipeline": every,
    }
    for name, ranks in groups.items():
        assert the_ranks(getattr(mpu, f"get_{name}_parallel_group")()) == ranks, name
    assert the_ranks(mpu.get_data_parallel_group(with_context_parallel=True)) == own
    assert mpu.get_data_parallel_group_gloo() is mpu.get_data_parallel_group()
    assert the_ranks(mpu.get_expert_data_parallel_group_gloo()) == own
    assert mpu.get_context_parallel_global_ranks() == own
    assert the_ranks(mpu.get_tensor_and_data_parallel_group(True, True)) == pair
    assert the_ranks(mpu.get_amax_reduction_group()) == pair
    assert the_ranks(mpu.get_intra_distributed_optimizer_instance_group()) == every
    assert the_ranks(mpu.get_embedding_group()) == stages
    assert mpu.is_rank_in_embedding_group()
    assert mpu.is_rank_in_position_embedding_group() == (p == 0)
    if p == 0:
        assert the_ranks(mpu.get_position_embedding_group()) == own
    else:
        assert mpu.get_position_embedding_group(check_initialized=False) is None
        with pytest.raises(tp.ParallelError, match="has no position_embedding group"):
            mpu.get_position_embedding_group()
    for name in ("data", "context", "expert_tensor", "expert_data"):
        assert place(name) == (1, 0), name
    for name in ("tensor_model", "expert_model"):
        assert place(name) == (2, t), name
    assert place("pipeline_model") == (2, p)
    sources = {"tensor_model": 2 * p, "model": 0, "data": rank, "expert_model": 2 * p}
    for name, source in sources.items():
        assert getattr(mpu, f"get_{name}_parallel_src_rank")() == source, name
    stage = {"first": t, "last": t + 2, "next": (rank + 2) % 4, "prev": (rank + 2) % 4}
    for name, there in stage.items():
        assert getattr(mpu, f"get_pipeline_model_parallel_{name}_rank")() == there, name
    assert mpu.is_pipeline_first_stage() == (p == 0)
    assert mpu.is_pipeline_last_stage() == (p == 1)
    with pytest.raises(tp.DegreeError, match="tensor was 2, now 4"):
        mpu.initialize_model_parallel(4)
    with pytest.raises(tp.ParallelError, match="without with_context_parallel=True"):
        mpu.get_data_parallel_group(partial_data_parallel=True)
    mpu.destroy_model_parallel()
    assert not mpu.is_initialized()
    gc.collect()
    assert len(dist.distributed_c10d._world.pg_map) == 1


@on_ranks(2, initialize=False)
def test_model_chunks_what_is_set_by_hand_and_other_arguments():
    rank = dist.get_rank()
    mpu.initialize_model_parallel(1, 2, virtual_pipeline_model_parallel_size=3)
    assert place("virtual_pipeline_model") == (3, 0)
    for chunk in range(3):
        first = mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk)
        last = mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk)
        assert first == (rank == 0 and chunk == 0)
        assert last == (rank == 1 and chunk == 2)
        assert mpu.is_rank_in_embedding_group(False, chunk) == (first or last)
    with pytest.raises(tp.ParallelError, match="holds 3 model chunks; pass vp_stage"):
        mpu.is_pipeline_first_stage(ignore_virtual=False)
    with pytest.warns(DeprecationWarning, match="pass vp_stage"):
        mpu.set_virtual_pipeline_model_parallel_rank(2)
    assert mpu.get_virtual_pipeline_model_parallel_rank() == 2

    mpu.set_pipeline_model_parallel_world_size(4)
    with pytest.raises(tp.ParallelError, match=r"no rank has stage 3: .* set to 4 by hand"):
        mpu.get_pipeline_model_parallel_last_rank()
    by_hand = {"tensor_model": (8, 5), "expert_model": (2, 1), "expert_tensor": (2, 1)}
    for name, (size, index) in by_hand.items():
        getattr(mpu, f"set_{name}_parallel_world_size")(size)
        getattr(mpu, f"set_{name}_parallel_rank")(index)
    mpu.set_pipeline_model_parallel_rank(3)
    assert {name: place(name) for name in by_hand} == by_hand
    assert mpu.is_pipeline_last_stage()
    assert mpu.get_tensor_model_parallel_group().size() == 1  # groups are what they are
    mpu.set_tensor_model_parallel_world_size(None)
    assert mpu.get_tensor_model_parallel_world_size() == 1
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(1, 2)
    assert mpu.get_pipeline_model_parallel_rank() == rank
    assert mpu.get_virtual_pipeline_model_parallel_world_size() is None
    mpu.destroy_model_parallel()
    # Once more with other arguments.
    mpu.initialize_model_parallel(1, 2, virtual_pipeline_model_parallel_size=2)
    mpu.initialize_model_parallel(1, 2, virtual_pipeline_model_parallel_size=2)
    with pytest.raises(tp.DegreeError, match=r"virtual_pipeline_\w+ was 2, now 4\. Call destroy"):
        mpu.initialize_model_parallel(1, 2, virtual_pipeline_model_parallel_size=4)
    with pytest.raises(tp.DegreeError, match="create_gloo_process_groups was True, now False"):
        mpu.initialize_model_parallel(1, 2, 2, create_gloo_process_groups=False)
    assert mpu.get_virtual_pipeline_model_parallel_world_size() == 2
    mpu.destroy_model_parallel()

    with tp.use_state(tp.ParallelState.create()):
        mpu.initialize_model_parallel(1, 2, virtual_pipeline_model_parallel_size=2)
        assert mpu.get_virtual_pipeline_model_parallel_world_size() is None
    assert mpu.get_virtual_pipeline_model_parallel_world_size() == 2
    assert mpu.get_virtual_pipeline_model_parallel_rank() == 0
    mpu.destroy_model_parallel()


@on_ranks(2, initialize=False)
def test_whoever_destroys_the_groups_ends_it_all():
    rank = dist.get_rank()
    mpu.set_tensor_model_parallel_rank(7)  # as a converter does, before there are groups
    assert mpu.get_tensor_model_parallel_rank() == 7
    mpu.initialize_model_parallel(2)
    assert mpu.get_tensor_model_parallel_rank() == rank
    for destroy in (tp.destroy_model_parallel, tp.destroy_tensor_parallel):
        mpu.set_tensor_model_parallel_rank(5)
        buffer = mpu.get_global_memory_buffer()
        destroy()
        for getter in (
            mpu.get_tensor_model_parallel_rank,
            mpu.get_global_memory_buffer,
            mpu.get_data_parallel_group_gloo,
        ):
            with pytest.raises(tp.NotInitializedError):
                getter()
        tp.initialize_tensor_parallel(2)
        assert mpu.get_tensor_model_parallel_rank() == rank
        assert mpu.get_global_memory_buffer() is not buffer
        assert mpu.get_data_parallel_group_gloo() is mpu.get_data_parallel_group()
    destroy()


def register_cpu_blind():
    def made(store, rank, size, timeout):
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    if not hasattr(dist.Backend, "BLIND"):
        dist.Backend.register_backend("blind", made, devices=["cuda"])


@on_ranks(2, initialize=False)
def test_gloo_groups_end_with_the_others():
    # A world whose backend does not take tensors on the CPU, as nccl's.
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    dist.barrier()  # the other rank may still be connecting
    dist.destroy_process_group()
    register_cpu_blind()
    dist.init_process_group(
        "blind", store=dist.PrefixStore("blind", store), rank=rank, world_size=2
    )
    mpu.initialize_model_parallel()
    group = mpu.get_data_parallel_group_gloo()
    assert dist.get_backend(group) == "gloo"
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    assert total.item() == 2
    kept = weakref.ref(group)
    del group
    tp.destroy_tensor_parallel()
    gc.collect()
    assert kept() is None
    assert len(dist.distributed_c10d._world.pg_map) == 1


@on_ranks(4, initialize=False)
def test_stages_with_embeddings_of_ones_own():
    rank = dist.get_rank()
    mpu.initialize_model_parallel(
        1,
        4,
        get_embedding_ranks=lambda ranks: [ranks[0], ranks[1], ranks[3]],
        get_position_embedding_ranks=lambda ranks: ranks[:2],
    )
    assert mpu.is_rank_in_embedding_group() == (rank != 2)
    if rank != 2:
        assert the_ranks(mpu.get_embedding_group()) == [0, 1, 3]
    if rank < 2:
        total = torch.ones(1)
        dist.all_reduce(total, group=mpu.get_position_embedding_group())
        assert total.item() == 2
    mpu.destroy_model_parallel()
    with pytest.raises(tp.ParallelError, match=r"embedding ranks are \(9,\); expected some of"):
        mpu.initialize_model_parallel(1, 4, get_embedding_ranks=lambda ranks: [9])
    assert not mpu.is_initialized()


@pytest.fixture
def a_machine():
    dist.init_process_group("fake", rank=0, world_size=64, store=FakeStore())
    yield
    mpu.destroy_model_parallel()
    dist.destroy_process_group()


def test_groups_of_a_large_job_are_few(a_machine):
    mpu.initialize_model_parallel(4, 2, context_parallel_size=2, expert_model_parallel_size=4)
    assert len(dist.distributed_c10d._world.pg_names) - 1 == 13
    assert mpu.get_model_parallel_group().size() == 8
    assert mpu.get_data_parallel_world_size(with_context_parallel=True) == 8
    assert mpu.get_expert_data_parallel_world_size() == 2
    assert mpu.get_expert_tensor_model_pipeline_parallel_group().size() == 32
    assert the_ranks(mpu.get_tensor_and_context_parallel_group()) == list(range(8))


def test_what_is_not_supported_is_refused_and_hints_are_said_to_be_lost(a_machine):
    for name, value in {
        "hierarchical_context_parallel_sizes": [2, 2],
        "hybrid_context_parallel": True,
        "gtp_remat_size": 2,
        "expert_gtp_remat_size": 2,
        "num_distributed_optimizer_instances": 2,
        "rank_offset": 8,
        "local_world_size": 8,
    }.items():
        with pytest.raises(tp.ParallelError, match=f"{name}=.* is not supported"):
            mpu.initialize_model_parallel(2, **{name: value})
    with pytest.raises(tp.ParallelError, match="interleaving wants at least 2 stages"):
        mpu.initialize_model_parallel(virtual_pipeline_model_parallel_size=2)
    assert not mpu.is_initialized()
    with pytest.warns(UserWarning, match="use_sharp, nccl_communicator_config_path: not taken"):
        mpu.initialize_model_parallel(2, use_sharp=True, nccl_communicator_config_path="x.yaml")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mpu.initialize_model_parallel(2, local_world_size=64)
        mpu.initialize_model_parallel(2)


def test_gloo_groups_when_not_wanted_gather_groups_and_the_memory_buffer(a_machine):
    with pytest.raises(tp.NotInitializedError, match="no parallel groups"):
        mpu.get_global_memory_buffer()
    mpu.initialize_model_parallel(create_gloo_process_groups=False)
    with pytest.raises(tp.NotInitializedError, match="create_gloo_process_groups=True"):
        mpu.get_data_parallel_group_gloo()
    assert mpu.get_data_parallel_group(with_context_parallel=True) is dist.group.WORLD
    again, _ = mpu.create_all_gather_groups()
    assert again is not dist.group.WORLD
    assert again.size() == 64
    buffer = mpu.get_global_memory_buffer()
    first = buffer.get_tensor((2, 3), torch.float32, "mpu", device="cpu")
    second = buffer.get_tensor([4], torch.float32, "mpu", device="cpu")
    assert first.shape == (2, 3)
    assert second.data_ptr() == first.data_ptr()
    assert buffer.get_tensor((3, 3), torch.float32, "mpu", device="cpu").numel() == 9
    assert buffer.get_tensor((2,), torch.int64, "mpu", device="cpu").dtype == torch.int64
    assert mpu.get_global_memory_buffer() is mpu.get_global_memory_buffer()


@on_ranks(4, initialize=False)
def test_groups_besides_the_axes():
    rank = dist.get_rank()
    mpu.initialize_model_parallel(2, context_parallel_size=2, create_gloo_process_groups=False)
    whole = mpu.get_data_and_context_parallel_group(with_context_parallel=True)
    assert the_ranks(whole) == [rank % 2, rank % 2 + 2]
    for experts in ("", "expert_"):
        assert the_ranks(getattr(mpu, f"get_{experts}gtp_weight_remat_group")()) == [rank]
        assert getattr(mpu, f"get_{experts}gtp_weight_remat_world_size")() == 1
        assert getattr(mpu, f"get_{experts}gtp_weight_remat_rank")() == 0
    for absent in (
        mpu.get_hierarchical_context_parallel_groups,
        mpu.get_inter_distributed_optimizer_instance_group,
    ):
        assert absent(check_initialized=False) is None
        with pytest.raises(tp.NotInitializedError, match="ezpz_tp makes none"):
            absent()
    again, experts = mpu.create_all_gather_groups(for_expert_parallelism=True)
    assert experts is None
    assert again is not whole
    assert the_ranks(again) == the_ranks(whole)
    total = torch.ones(1)
    dist.all_reduce(total, group=again)
    assert total.item() == 2
    mpu.destroy_model_parallel()
    assert again not in dist.distributed_c10d._world.pg_map


def test_ranks_by_megatrons_names():
    """Those of `RankLayout`, which test_ranks compares with the definition."""
    made = mpu.RankGenerator(
        tp=2, ep=1, dp=1, pp=2, cp=2, order="tp-gtp_remat-cp-ep-dp-pp", rank_offset=5
    )
    assert made.get_ranks("tp") == [[5, 6], [7, 8], [9, 10], [11, 12]]
    assert made.get_ranks("cp") == [[5, 7], [6, 8], [9, 11], [10, 12]]
    assert made.get_ranks("tp-pp") == [[5, 6, 9, 10], [7, 8, 11, 12]]
    assert made.get_ranks("ep") == [[rank] for rank in range(5, 13)]
    experts = mpu.RankGenerator(tp=1, ep=2, dp=2, pp=1, cp=1, order="dp-ep-tp-pp-cp")
    assert experts.get_ranks("ep") == [[0, 2], [1, 3]]
    assert experts.get_ranks("tp-dp") == [[0, 1], [2, 3]]


def test_what_does_not_fit_and_before_initialization():
    with pytest.raises(tp.DegreeError, match="grid of their own"):
        mpu.RankGenerator(tp=1, ep=2, dp=1, pp=1, cp=2, order="tp-cp-ep-dp-pp")
    with pytest.raises(NotImplementedError, match="gtp_remat=2"):
        mpu.RankGenerator(1, 1, 1, 1, 1, "tp", gtp_remat=2)
    with pytest.raises(ValueError, match="axis 'xp'"):
        mpu.RankGenerator(2, 1, 1, 1, 1, "tp").get_ranks("xp")
    # Before initialization.
    assert not mpu.is_initialized()
    assert mpu.get_tensor_model_parallel_world_size() == 1
    assert mpu.get_pipeline_model_parallel_rank() == 0
    assert mpu.get_tensor_model_parallel_group(check_initialized=False) is None
    assert mpu.get_context_parallel_global_ranks(check_initialized=False) is None
    assert not mpu.is_rank_in_embedding_group()
    assert mpu.get_gtp_weight_remat_group(check_initialized=False) is None
    with pytest.raises(tp.NotInitializedError):
        mpu.get_tensor_model_parallel_group()
    with pytest.raises(AssertionError):  # what Megatron's code catches
        mpu.get_gtp_weight_remat_group()
    mpu.destroy_model_parallel()


# Other dialects.


@on_ranks(4, initialize=False)
def test_what_deepspeed_calls():
    rank = dist.get_rank()
    mpu.initialize_model_parallel(2, 2)
    t, p = rank % 2, rank // 2
    # Model parallel is all that splits a model: the world's size over it is the replicas.
    assert mpu.get_model_parallel_group() is dist.group.WORLD
    assert mpu.get_data_parallel_group_ranks() == [rank]
    for name, size, index in (
        ("model_parallel", 4, rank),
        ("data_parallel", 1, 0),
        ("slice_parallel", 2, t),
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

    # deepspeed/utils/groups.py: with this name, its model-parallel size is 1.
    assert not hasattr(mpu, "initialize_sequence_parallel")
    mpu.initialize_model_parallel(context_parallel_size=2)  # is what it calls sequence parallel
    assert mpu.get_sequence_parallel_world_size() == 2
    assert mpu.get_sequence_data_parallel_world_size() == 4
    assert mpu.get_sequence_data_parallel_rank() == rank
    mpu.destroy_model_parallel()


def test_fairscales_model_parallel_is_the_tensor_axis():
    for name in fairscale.__all__:
        if name != "initialize_model_parallel":  # which code for fairscale calls
            ours = name.replace("model_parallel", "tensor_parallel")
            assert getattr(fairscale, name) is getattr(tp, ours), name


@on_ranks(2, initialize=False)
def test_code_for_megatron_mpu_runs_and_is_right():
    """As bigscience's and gpt-neox's models have it."""
    mpu.initialize_model_parallel(2)
    mpu.model_parallel_cuda_manual_seed(5)
    args = SimpleNamespace(params_dtype=torch.float64, sequence_parallel=False, use_mup=False)
    embedding = mpu.VocabParallelEmbedding(8, 4, init_method=torch.nn.init.normal_)
    up = mpu.ColumnParallelLinear(4, 8, gather_output=False, skip_bias_add=True)
    down = mpu.RowParallelLinear(
        neox_args=args,
        input_size=8,
        output_size=4,
        input_is_parallel=True,
        skip_bias_add=True,
        parallel_output=False,
        mup_rescale_parameters=True,
    )
    assert (up.input_size, up.output_size, up.output_size_per_partition) == (4, 8, 4)
    assert down.weight.dtype == torch.float64
    data = {"text": torch.arange(6).view(2, 3)} if dist.get_rank() == 0 else None
    ids = mpu.broadcast_data(["text"], data, torch.int64)["text"]
    hidden = embedding(ids)
    inner, bias = up(hidden)
    with mpu.get_cuda_rng_tracker().fork():
        torch.rand(1)
    output, _ = mpu.checkpoint(down, torch.relu(inner + bias).double())
    plain, nothing = mpu.ColumnParallelLinear(4, mpu.divide(8, 2))(hidden)
    assert plain.shape == (2, 3, 4)
    assert nothing is None
    halves = mpu.split_tensor_along_last_dim(output, 2)
    both = mpu.gather_from_tensor_model_parallel_region(
        mpu.scatter_to_model_parallel_region(output)
    )
    assert torch.equal(both, output)
    assert torch.equal(torch.cat(halves, -1), output)
    logits = mpu.copy_to_tensor_model_parallel_region(output.float())[..., :2]
    mpu.vocab_parallel_cross_entropy(logits.contiguous(), ids % 4).sum().backward()
    full = [layer.get_master_weight() for layer in (embedding, up, down)]
    mpu.destroy_model_parallel()
    expected = torch.relu(full[0][ids] @ full[1].T).double() @ full[2].T
    torch.testing.assert_close(output.detach(), expected)
    with pytest.raises(NotImplementedError, match="parallel_output=True is not supported"):
        mpu.RowParallelLinear(8, 4, parallel_output=True)


WEIGHTS = {
    "tok_embeddings": 1,
    "feed_forward.w1": 0,
    "feed_forward.w2": 1,
    "feed_forward.w3": 0,
    "output": 0,
}


def train_fairscale_code():
    code = load_code("fairscale")
    model, loss = code.train()
    tp.finalize_grads(model)
    parts = {name: model.get_submodule(name).weight for name in WEIGHTS}
    grads = {name: weight.grad for name, weight in parts.items()}
    code.fs_init.destroy_model_parallel()
    return {name: weight.detach() for name, weight in parts.items()}, grads, loss.detach()


def test_code_for_fairscale_runs_and_is_right():
    ranks = run_ranks(train_fairscale_code, 2, initialize=False)

    def joined(which):
        return {
            name: torch.cat([rank[which][name] for rank in ranks], dim)
            for name, dim in WEIGHTS.items()
        }

    weights = {name: weight.requires_grad_() for name, weight in joined(0).items()}
    tokens = torch.arange(34).view(2, 17) * 7 % 32
    hidden = functional.embedding(tokens[:, :-1], weights["tok_embeddings"])
    gate = functional.silu(functional.linear(hidden, weights["feed_forward.w1"]))
    inner = gate * functional.linear(hidden, weights["feed_forward.w3"])
    hidden = hidden + functional.linear(inner, weights["feed_forward.w2"])
    logits = functional.linear(hidden, weights["output"])
    loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    loss.mean().backward()
    for _, _, found in ranks:
        torch.testing.assert_close(found, loss.view(2, 16).detach(), rtol=1e-12, atol=1e-12)
    for name, grad in joined(1).items():
        torch.testing.assert_close(grad, weights[name].grad, rtol=1e-12, atol=1e-12)
