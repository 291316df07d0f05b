"""Tensor x context x pipeline x data parallelism, and what a training script puts around a model.

The documented path, wrappers, checkpoints and compilation: all must equal one process.
"""

import shutil
import sysconfig
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from llama import (
    Block,
    Config,
    Llama,
    learn_alone,
    optimizer_of,
    parallel_loss_of,
    text_batch,
    unsharded,
)
from on_ranks import on_ranks
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import ezpz_tp as tp
from ezpz_tp.testing import run_ranks

STEPS, BATCH = 4, 8
SHARED = ("data", "context")
MODEL = Config(layers=4, sequence=32, tied=True, context_parallel=True, sequence_parallel=True)


@pytest.fixture(scope="module")
def expected():
    whole = MODEL, STEPS, BATCH, torch.float64
    (losses,) = run_ranks(learn_alone, 1, *whole, initialize=False)
    return losses


def share_of_loss(ranks, logits, labels):
    """This rank's share of a microbatch's mean loss: the ranks' shares add up to it."""
    losses = tp.vocab_parallel_cross_entropy(logits, labels)
    return losses.sum() / (losses.numel() * ranks)


def learn(schedule, virtual, microbatches, steps):
    state = tp.get_state()
    pipeline = tp.Pipeline(
        partial(Llama, MODEL),
        layers=MODEL.layers,
        microbatches=microbatches,
        schedule=schedule,
        virtual=virtual,
        loss=partial(share_of_loss, state.size(*SHARED)),
    )
    pipeline.module.double()
    optimizer = optimizer_of(pipeline.module.parameters())
    losses = []
    for step in range(steps):
        batch = text_batch(step, batch=BATCH, length=MODEL.sequence)
        mine = slice(state.index("data"), None, state.size("data"))
        tokens, labels = (tp.shard_sequence(each[mine], 1) for each in batch)
        shares = pipeline.step(tokens, labels)
        tp.finalize_grads(pipeline.module, sum_over=SHARED)
        tp.clip_grad_norm_(pipeline.module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if shares is not None:
            loss = shares.mean()
            torch.distributed.all_reduce(loss, group=state.group(*SHARED))
            losses.append(loss.item())
    return losses


def with_embedding_groups(degrees, *args):
    tp.initialize_tensor_parallel(**degrees, also=[SHARED], embedding=True)
    return learn(*args)


def degrees(**sizes):
    return {f"{axis}_parallel_size": size for axis, size in ({"pipeline": 2} | sizes).items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "degrees", "schedule", "virtual", "microbatches", "steps"),
    [
        (16, degrees(tensor=2, context=2), "1f1b", 1, 4, 2),  # and data 2
        (4, degrees(tensor=2), "gpipe", 1, 4, STEPS),
        (8, degrees(context=2), "interleaved", 2, 2, STEPS),  # and data 2
        (4, degrees(tensor=2, context=2, pipeline=1), "1f1b", 1, 2, STEPS),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_four_dimensions(expected, ranks, degrees, schedule, virtual, microbatches, steps):
    """The losses are those of one process, and every rank on a last stage knows them."""
    plan = degrees, schedule, virtual, microbatches, steps
    how = {"initialize": False, "timeout": 300}
    results = run_ranks(with_embedding_groups, ranks, *plan, **how)
    last = ranks // degrees["pipeline_parallel_size"]
    assert sum(bool(losses) for losses in results) == last
    for losses in results[-last:]:
        assert losses == pytest.approx(expected[:steps], rel=1e-9)


# Tensor parallelism among everything else.

SEQUENCE = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])
MICRO = 2


@pytest.fixture(scope="module")
def one_process():
    """The unsharded gradients of two batches together, and their norm, in double precision."""
    model = unsharded(Config()).double()
    for step in range(MICRO):
        tokens, labels = text_batch(step)
        (cross_entropy(model(tokens).flatten(0, 1), labels.flatten()) / MICRO).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return gradients, torch.nn.utils.get_total_norm(gradients.values()).item()


def differences(around, config, gradients):
    """The largest difference of a gradient, and the norm, of what `around` trains."""
    model = around(config)
    tp.finalize_grads(model)
    norm = tp.clip_grad_norm_(model.parameters(), 1e9)
    state, worst = tp.get_state(), 0.0
    for name, parameter in getattr(model, "module", model).named_parameters():
        found = parameter.grad
        if hasattr(found, "full_tensor"):
            found = found.full_tensor()
        split = getattr(parameter, "tensor_model_parallel", False)
        shard = tp.Shard(gradients[name].shape, parameter.partition_dim if split else None)
        wanted = shard.cut(gradients[name], state.index("tensor"), state.size("tensor"))
        worst = max(worst, (found - wanted).abs().max().item())
    return worst, norm.item()


def accumulate(model, loss_function, without_sync):
    state = tp.get_state()
    mine = slice(state.index("data"), None, state.size("data"))
    for step in range(MICRO):
        tokens, labels = (tp.shard_sequence(each[mine], 1) for each in text_batch(step))
        with nullcontext() if step == MICRO - 1 else without_sync():
            (loss_function(model(tokens), labels) / MICRO).backward()


def ddp(config):
    group = tp.get_state().group("data", "context")  # DDP averages over both
    model = DistributedDataParallel(Llama(config).double(), process_group=group)
    accumulate(model, parallel_loss_of, model.no_sync)
    return model


def fsdp2(config):
    model = Llama(config).double()
    mesh = tp.get_state().to_mesh("cpu")["dp"]
    with tp.keep_attributes(model):
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    accumulate(model, parallel_loss_of, nullcontext)
    return model


WRAPPED = [
    (ddp, {"tensor": 2, "data": 2}),
    (fsdp2, {"tensor": 2, "data": 2}),
    (ddp, {"context": 2, "data": 2}),
]


@SEQUENCE
@pytest.mark.parametrize(("around", "degrees"), WRAPPED)
def test_gradients_of_two_batches_are_one_processs(one_process, around, degrees, sequence_parallel):
    gradients, wanted = one_process
    config = Config(sequence_parallel=sequence_parallel, context_parallel="context" in degrees)
    how = {**degrees, "also": [("data", "context")]}
    for difference, norm in run_ranks(differences, 4, around, config, gradients, **how):
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


@SEQUENCE
@on_ranks(2)
def test_activation_checkpoints_with_dropout(sequence_parallel):
    config = Config(sequence_parallel=sequence_parallel, dropout=0.5)
    wanted = run_block(config, plain)
    for how in (torch_checkpointed, tp.checkpoint_activations):
        assert all(map(torch.equal, run_block(config, how), wanted)), how


def compiled(config, backend):
    """The largest difference that compiling makes, and how often it was compiled."""
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


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "sequence_parallel"), [(BACKEND, False), ("aot_eager", True)])
def test_compiled_as_one_graph(backend, sequence_parallel):
    config = Config(sequence_parallel=sequence_parallel)
    for worst, graphs in run_ranks(compiled, 2, config, backend, timeout=500):
        assert graphs == 1
        assert worst < 1e-12
