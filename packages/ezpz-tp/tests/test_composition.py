"""Tensor parallelism among everything else that a training script puts around a model."""

import contextlib
import shutil
import sysconfig
from functools import partial
from pathlib import Path

import pytest
import torch
from llama import Block, Config, Llama, parallel_loss_of, text_batch, unsharded
from on_ranks import on_ranks
from torch.nn.functional import cross_entropy
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
        (cross_entropy(model(tokens).flatten(0, 1), labels.flatten()) / MICRO).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return gradients, torch.nn.utils.get_total_norm(gradients.values()).item()


def largest_difference(model, gradients):
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


def torchs_pipeline(config, gradients):
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    state, rows, width = tp.get_state(), 4, config.sequence
    index, first = state.index("pipeline"), state.index("pipeline") == 0
    model = Llama(config, first=first, last=not first, layers=[index]).double()
    length = width // (state.size("tensor") if config.sequence_parallel else 1)
    double = {"dtype": torch.float64}
    tokens = torch.zeros(rows, width, dtype=torch.int64)
    hidden = torch.zeros(length, rows, config.hidden, requires_grad=True, **double)
    logits = torch.zeros(rows, width, config.vocabulary // state.size("tensor"), **double)
    inputs, outputs = (tokens, hidden) if first else (hidden, logits)
    shapes = {"input_args": (inputs,), "output_args": (outputs,)}  # sent through numpy otherwise
    group = state.group("pipeline")
    stage = PipelineStage(model, index, 2, torch.device("cpu"), **shapes, group=group)
    schedule = ScheduleGPipe(stage, MICRO, loss_fn=parallel_loss_of)
    batches = zip(*map(text_batch, range(MICRO)), strict=True)
    tokens, labels = (torch.cat(each) for each in batches)
    if first:
        schedule.step(tokens)
    else:
        schedule.step(target=labels)
    tp.finalize_grads(model)
    norm = tp.clip_grad_norm_(model.parameters(), 1e9)
    return largest_difference(model, gradients), norm.item()


WRAPPED = [
    (ddp, {"tensor": 2, "data": 2}),
    (fsdp2, {"tensor": 2, "data": 2}),
    (ddp, {"context": 2, "data": 2}),
    (torchs_pipeline, {"tensor": 2, "pipeline": 2}),
]


@SEQUENCE
@pytest.mark.parametrize(("around", "degrees"), WRAPPED)
def test_gradients_of_two_batches_are_one_processs(expected, around, degrees, sequence_parallel):
    gradients, wanted = expected
    config = Config(sequence_parallel=sequence_parallel, context_parallel="context" in degrees)
    how = {**degrees, "also": [("data", "context")], "in_processes": True}
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


plain = Block.__call__
torch_checkpointed = partial(torch_checkpoint, use_reentrant=False, context_fn=tp.rng_contexts)
distributed = partial(tp.checkpoint_activations, distribute_saved_activations=True)


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
    for worst, graphs in run_ranks(compiled, 2, config, backend, in_processes=True):
        assert graphs == 1
        assert worst < 1e-12
