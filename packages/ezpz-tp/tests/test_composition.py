"""Tensor parallelism among everything else that a training script puts around a model."""

import contextlib
import shutil
import sysconfig
from functools import partial
from pathlib import Path

import pytest
import torch
from llama import Block, Config, Llama, loss_of, parallel_loss_of, text_batch, unsharded
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import ezpz_tp as tp
from ezpz_tp.testing import assert_matches_unsharded, run_ranks
from ezpz_tp.testing._lattice import part_of

SEQUENCE = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])
on_four = partial(run_ranks, tensor=2, data=2, in_processes=True)
MICRO = 2


@pytest.fixture(scope="module")
def expected():
    """The unsharded gradients of two batches together, and their norm, in double precision."""
    model = unsharded(Config()).double()
    for step in range(MICRO):
        tokens, labels = text_batch(step)
        (loss_of(model(tokens), labels) / MICRO).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return gradients, torch.nn.utils.get_total_norm(gradients.values()).item()


def largest_difference(model, gradients):
    """Between a rank's gradients and its part of the unsharded ones."""
    state = tp.get_state()
    worst = 0.0
    for name, parameter in model.named_parameters():
        found = parameter.grad
        if hasattr(found, "full_tensor"):
            found = found.full_tensor()
        wanted, _ = part_of(
            gradients[name], partition_of(parameter), 1, state.index("tensor"), state.size("tensor")
        )
        worst = max(worst, (found - wanted).abs().max().item())
    return worst


def partition_of(parameter):
    return parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None


def accumulate(model, loss_function, without_sync):
    state = tp.get_state()
    mine = slice(state.index("data"), None, state.size("data"))
    for step in range(MICRO):
        tokens, labels = text_batch(step)
        with contextlib.nullcontext() if step == MICRO - 1 else without_sync():
            (loss_function(model(tokens[mine]), labels[mine]) / MICRO).backward()


def ddp(config, gradients):
    inner = Llama(config).double()
    model = DistributedDataParallel(inner, process_group=tp.get_data_parallel_group())
    accumulate(model, parallel_loss_of, model.no_sync)
    tp.finalize_grads(model)
    norm = tp.clip_grad_norm_(inner.parameters(), 1e9)
    return largest_difference(inner, gradients), norm.item()


def fsdp2(config, gradients):
    from torch.distributed.fsdp import fully_shard

    model = Llama(config).double()
    mesh = tp.get_state().to_mesh("cpu")["dp"]
    with tp.keep_attributes(model):
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    accumulate(model, parallel_loss_of, contextlib.nullcontext)
    tp.finalize_grads(model)
    norm = tp.clip_grad_norm_(model.parameters(), 1e9)
    return largest_difference(model, gradients), norm.item()


@SEQUENCE
@pytest.mark.parametrize("around", [ddp, fsdp2])
def test_data_parallel_with_accumulated_gradients(expected, around, sequence_parallel):
    gradients, wanted = expected
    config = Config(sequence_parallel=sequence_parallel)
    for difference, norm in on_four(around, 4, config, gradients):
        assert difference < 1e-12
        assert norm == pytest.approx(wanted, rel=1e-12)


class Autocast(nn.Module):
    """Under autocast, with weights of single precision."""

    def __init__(self, up, down):
        super().__init__()
        self.up, self.down = up, down

    def forward(self, value):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.up(value)
            assert hidden.dtype == torch.bfloat16
            return self.down(hidden.relu())


def autocast_parallel(sequence_parallel):
    both = {"sequence_parallel": sequence_parallel}
    return Autocast(
        tp.ColumnParallelLinear(24, 48, gather_output=False, **both),
        tp.RowParallelLinear(48, 24, input_is_parallel=True, **both),
    )


def autocast_unsharded():
    return Autocast(nn.Linear(24, 48), nn.Linear(48, 24))


@SEQUENCE
def test_autocast(sequence_parallel):
    split = 0 if sequence_parallel else None
    assert_matches_unsharded(
        partial(autocast_parallel, sequence_parallel),
        autocast_unsharded,
        torch.empty(8, 2, 24),
        tensor=(2, 4),
        split_inputs=split,
        split_outputs=split,
        in_processes=True,
    )


def run_block(config, how):
    """The output and all gradients of a block with dropout, or how they were come by."""
    torch.manual_seed(0)
    tp.seed_model_parallel(1)
    block = Block(config, 1).double()
    size = tp.get_tensor_parallel_world_size() if config.sequence_parallel else 1
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(
        config.sequence // size, 2, config.hidden, generator=generator, dtype=torch.float64
    ).requires_grad_()
    output = how(block, hidden)
    output.square().sum().backward()
    return [output.detach(), hidden.grad, *(p.grad for p in block.parameters())]


def plain(block, hidden):
    return block(hidden)


def torch_checkpointed(block, hidden):
    return torch_checkpoint(block, hidden, use_reentrant=False, context_fn=tp.rng_contexts)


def checkpointed(block, hidden):
    return tp.checkpoint_activations(block, hidden)


def distributed(block, hidden):
    return tp.checkpoint_activations(block, hidden, distribute_saved_activations=True)


def same_with_checkpoints(config):
    hows = [torch_checkpointed, checkpointed]
    if not config.sequence_parallel:
        hows.append(distributed)  # of an activation that is equal on all ranks
    wanted = run_block(config, plain)
    return {
        how.__name__: all(
            torch.equal(found, value)
            for found, value in zip(run_block(config, how), wanted, strict=True)
        )
        for how in hows
    }


@SEQUENCE
def test_activation_checkpoints_with_dropout(sequence_parallel):
    config = Config(sequence_parallel=sequence_parallel, dropout=0.5)
    for same in run_ranks(same_with_checkpoints, 2, config, in_processes=True):
        assert len(same) == 3 - sequence_parallel
        assert all(same.values()), same


def compiled(config, backend):
    """The largest difference that compiling a block makes, and how often it was compiled."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)

    def compile_first(block, hidden):
        # What takes inductor long is the C++ compiler: half of the block is enough.
        part = block.feed_forward if backend == "inductor" else block
        part.compile(backend=counter, fullgraph=True)
        return block(hidden)

    found, wanted = run_block(config, compile_first), run_block(config, plain)
    torch._dynamo.reset()
    worst = max((f - w).abs().max().item() for f, w in zip(found, wanted, strict=True))
    return worst, counter.frame_count


@SEQUENCE
def test_compiled_as_one_graph(sequence_parallel):
    config = Config(sequence_parallel=sequence_parallel)
    for worst, graphs in run_ranks(compiled, 2, config, "aot_eager", in_processes=True):
        assert graphs == 1
        assert worst < 1e-12


@pytest.mark.skipif(
    not shutil.which("g++") or not Path(sysconfig.get_path("include"), "Python.h").exists(),
    reason="needs a C++ compiler and Python's headers",
)
def test_compiled_by_inductor():
    for worst, graphs in run_ranks(
        compiled, 2, Config(), "inductor", in_processes=True, timeout=500
    ):
        assert graphs == 1
        assert worst < 1e-12
