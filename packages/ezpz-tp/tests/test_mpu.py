"""The dialects of Megatron's and DeepSpeed's `mpu`, and fairscale's."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from on_ranks import load_code, on_ranks
from torch.nn import functional

import ezpz_tp as tp
from ezpz_tp import mpu, tensor_parallel
from ezpz_tp.model_parallel import initialize as fairscale
from ezpz_tp.model_parallel_config import ModelParallelConfig
from ezpz_tp.testing import run_ranks


@on_ranks(4, in_processes=True, initialize=False)
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

    # deepspeed/utils/groups.py: with this name, its model-parallel size is 1.
    assert not hasattr(mpu, "initialize_sequence_parallel")
    mpu.initialize_model_parallel(context_parallel_size=2)  # is what it calls sequence parallel
    assert mpu.get_sequence_parallel_world_size() == 2
    assert mpu.get_sequence_data_parallel_world_size() == 4
    assert mpu.get_sequence_data_parallel_rank() == rank
    mpu.destroy_model_parallel()


@on_ranks(4, in_processes=True, initialize=False)
def test_fairscales_names():
    rank = dist.get_rank()
    fairscale.initialize_model_parallel(2)
    for name, wanted in {
        "model_parallel_is_initialized": True,
        "get_model_parallel_world_size": 2,
        "get_model_parallel_rank": rank % 2,
        "get_model_parallel_src_rank": rank // 2 * 2,
        "get_data_parallel_ranks": [rank % 2, rank % 2 + 2],
        "get_context_parallel_ranks": [rank],
        "get_pipeline_parallel_ranks": [rank],
    }.items():
        assert getattr(fairscale, name)() == wanted, name
    assert fairscale.get_model_parallel_group().size() == 2
    fairscale.destroy_model_parallel()
    assert not fairscale.model_parallel_is_initialized()


@on_ranks(2, in_processes=True, initialize=False)
def test_code_for_megatron_mpu_runs_and_is_right():
    """As bigscience's and gpt-neox's models have it."""
    assert mpu.is_unitialized()
    mpu.initialize_model_parallel(2)
    assert not mpu.is_unitialized()
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


def test_layers_of_every_dialect_are_instances():
    config = ModelParallelConfig(use_cpu_initialization=True)
    options = {"config": config, "init_method": torch.nn.init.normal_}
    column, row = mpu.ColumnParallelLinear, mpu.RowParallelLinear
    more = {"bias": True, "input_is_parallel": True, "skip_bias_add": True}
    for layer, kind, other in (
        (column(4, 4), column, row),
        (tp.ColumnParallelLinear(4, 4), column, row),
        (tensor_parallel.ColumnParallelLinear(4, 4, **options), column, row),
        (tensor_parallel.RowParallelLinear(4, 4, **more, **options), row, column),
        (tp.VocabParallelEmbedding(4, 4), mpu.VocabParallelEmbedding, row),
    ):
        assert isinstance(layer, kind)
        assert not isinstance(layer, other)

    class Own(column):
        pass

    assert isinstance(Own(4, 4), column)
    assert not isinstance(column(4, 4), Own)


WEIGHTS = {
    "tok_embeddings": 1,
    "feed_forward.w1": 0,
    "feed_forward.w2": 1,
    "feed_forward.w3": 0,
    "output": 0,
}


def train_fairscale_code(checked):
    code = load_code("fairscale")
    if not checked:
        model, loss = code.train()
    else:
        code.fs_init.initialize_model_parallel(2)
        with tp.check() as checker:
            model, loss = code.train()
            tp.finalize_grads(model)
        assert checker.operations > 10
    parts = {name: model.get_submodule(name).weight for name in WEIGHTS}
    grads = {name: weight.grad for name, weight in parts.items()}
    code.fs_init.destroy_model_parallel()
    return {name: weight.detach() for name, weight in parts.items()}, grads, loss.detach()


@pytest.mark.parametrize("checked", [False, True])
def test_code_for_fairscale_runs_and_is_right(checked):
    ranks = run_ranks(train_fairscale_code, 2, checked, in_processes=True, initialize=False)

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
