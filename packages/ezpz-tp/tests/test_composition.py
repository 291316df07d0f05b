"""Tensor parallelism among everything else that a training script puts around a model."""

import contextlib
import shutil
import sysconfig
from pathlib import Path

import pytest
import torch
from llama import (
    Block,
    Config,
    Llama,
    learn_alone,
    loss_of,
    optimizer_of,
    parallel_loss_of,
    text_batch,
    unsharded,
)
from on_ranks import on_ranks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import ezpz_tp as tp
from ezpz_tp.testing import counting, run_ranks
from ezpz_tp.testing._lattice import part_of

SEQUENCE = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])
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
        tokens, labels = (tp.shard_sequence(each[mine], 1) for each in text_batch(step))
        with contextlib.nullcontext() if step == MICRO - 1 else without_sync():
            (loss_function(model(tokens), labels) / MICRO).backward()


def ddp(config, gradients):
    inner = Llama(config).double()
    group = tp.get_state().group("data", "context")  # DDP averages over both
    model = DistributedDataParallel(inner, process_group=group)
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
@pytest.mark.parametrize(
    ("around", "other"), [(ddp, "tensor"), (fsdp2, "tensor"), (ddp, "context")]
)
def test_data_parallel_with_accumulated_gradients(expected, around, other, sequence_parallel):
    gradients, wanted = expected
    config = Config(sequence_parallel=sequence_parallel, context_parallel=other == "context")
    how = {"data": 2, other: 2, "also": [("data", "context")], "in_processes": True}
    for difference, norm in run_ranks(around, 4, config, gradients, **how):
        assert difference < 1e-12
        assert norm == pytest.approx(wanted, rel=1e-12)


def run_block(config, how):
    """The output and all gradients of a block with dropout, and what is drawn after it."""
    torch.manual_seed(0)
    tp.seed_model_parallel(1)
    block = Block(config, 1).double()
    size = tp.get_tensor_parallel_world_size() if config.sequence_parallel else 1
    shape = config.sequence // size, 2, config.hidden
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
    output = how(block, hidden)
    output.square().sum().backward()
    found = [output.detach(), hidden.grad, *(p.grad for p in block.parameters()), torch.rand(3)]
    with tp.get_rng_tracker().fork():
        return [*found, torch.rand(3)]


def plain(block, hidden):
    return block(hidden)


def torch_checkpointed(block, hidden):
    return torch_checkpoint(block, hidden, use_reentrant=False, context_fn=tp.rng_contexts)


def distributed(block, hidden):
    return tp.checkpoint_activations(block, hidden, distribute_saved_activations=True)


@SEQUENCE
@on_ranks(2, in_processes=True)
def test_activation_checkpoints_with_dropout(sequence_parallel):
    config = Config(sequence_parallel=sequence_parallel, dropout=0.5)
    with counting() as before:
        wanted = run_block(config, plain)
    hows = [torch_checkpointed, tp.checkpoint_activations]
    if not sequence_parallel:
        hows.append(distributed)  # of an activation that is equal on all ranks
    for how in hows:
        with counting() as counter:
            found = run_block(config, how)
        assert all(map(torch.equal, found, wanted)), how
        if how is distributed:  # its input is gathered
            assert counter["all_gather"] == before["all_gather"] + 1


def compiled(config, backend):
    """The largest difference that compiling makes, and how often it was compiled."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)

    def compile_first(block, hidden):
        # The half with all kinds of layers; the attention between the others is torch's own.
        block.feed_forward.compile(backend=counter, fullgraph=True)
        return block(hidden)

    found, wanted = run_block(config, compile_first), run_block(config, plain)
    torch._dynamo.reset()
    worst = max((f - w).abs().max().item() for f, w in zip(found, wanted, strict=True))
    return worst, counter.frame_count


# The default backend where it can compile, in place of one that only traces.
HEADERS = Path(sysconfig.get_path("include"), "Python.h")
BACKEND = "inductor" if shutil.which("g++") and HEADERS.exists() else "aot_eager"


@pytest.mark.parametrize(("backend", "sequence_parallel"), [(BACKEND, False), ("aot_eager", True)])
def test_compiled_as_one_graph(backend, sequence_parallel):
    config = Config(sequence_parallel=sequence_parallel)
    for worst, graphs in run_ranks(compiled, 2, config, backend, in_processes=True, timeout=500):
        assert graphs == 1
        assert worst < 1e-12


# torch's own schedule of a pipeline.
STEPS, BATCH = 12, 4


def learn_with_a_pipeline(config):
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    state = tp.get_state()
    index, count = state.index("pipeline"), state.size("pipeline")
    size = BATCH // MICRO
    first, last = index == 0, index == count - 1
    layers = range(index * config.layers // count, (index + 1) * config.layers // count)
    model = Llama(config, first=first, last=last, layers=layers)

    length = config.sequence // (state.size("tensor") if config.sequence_parallel else 1)
    tokens = torch.zeros(size, config.sequence, dtype=torch.int64)
    hidden = torch.zeros(length, size, config.hidden, requires_grad=True)
    logits = torch.zeros(size, config.sequence, config.vocabulary // state.size("tensor"))
    shapes = {  # sent through numpy otherwise
        "input_args": (tokens if first else hidden,),
        "output_args": (logits if last else hidden,),
    }
    group = state.group("pipeline")
    stage = PipelineStage(model, index, count, torch.device("cpu"), **shapes, group=group)
    schedule = ScheduleGPipe(stage, MICRO, loss_fn=parallel_loss_of)
    optimizer, means = optimizer_of(model.parameters()), []
    for step in range(STEPS):
        tokens, labels = text_batch(step, batch=BATCH)
        losses = []
        if first:
            schedule.step(tokens)
        else:
            schedule.step(target=labels, losses=losses)
        tp.finalize_grads(model)
        tp.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        means.append(sum(loss.item() for loss in losses) / MICRO)
    return means


@SEQUENCE
def test_torchs_own_pipeline_learns_as_one_process(sequence_parallel):
    config = Config(sequence_parallel=sequence_parallel)
    expected = learn_alone(config, STEPS, BATCH)
    results = run_ranks(learn_with_a_pipeline, 4, config, tensor=2, pipeline=2, in_processes=True)
    for losses in results[2:]:  # the last stage's ranks
        assert losses == pytest.approx(expected, rel=1e-5)
