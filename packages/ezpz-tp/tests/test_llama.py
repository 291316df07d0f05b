"""A model learns the same from real text, however it is spread over ranks."""

import pytest
import torch
import torch.distributed as dist
from llama import Config, Llama, loss_of, optimizer_of, parallel_loss_of, text_batch, unsharded
from torch.nn.parallel import DistributedDataParallel

import ezpz_tp as tp
from ezpz_tp.testing import run_ranks

STEPS, BATCH = 50, 4


@pytest.fixture(scope="module")
def expected():
    """The losses of one process with torch's own layers."""
    model = unsharded(Config())
    optimizer = optimizer_of(model.parameters())
    losses = []
    for step in range(STEPS):
        tokens, labels = text_batch(step, batch=BATCH)
        loss = loss_of(model(tokens), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    return losses


def learn_with_ddp(config):
    state = tp.get_state()
    model = Llama(config)
    group = state.group("data")
    wrapped = DistributedDataParallel(model, process_group=group)
    optimizer = optimizer_of(model.parameters())
    losses = []
    for step in range(STEPS):
        tokens, labels = text_batch(step, batch=BATCH)
        mine = slice(state.index("data"), None, state.size("data"))
        loss = parallel_loss_of(wrapped(tokens[mine]), labels[mine])
        loss.backward()
        tp.finalize_grads(model)
        tp.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss, group=group)
        losses.append(loss.item() / state.size("data"))
    return losses


def learn_with_a_pipeline(config, microbatches=2):
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    state = tp.get_state()
    index, count = state.index("pipeline"), state.size("pipeline")
    size = BATCH // microbatches
    first, last = index == 0, index == count - 1
    layers = range(index * config.layers // count, (index + 1) * config.layers // count)
    model = Llama(config, first=first, last=last, layers=layers)

    length = config.sequence
    if config.sequence_parallel:
        length //= state.size("tensor")
    tokens = torch.zeros(size, config.sequence, dtype=torch.int64)
    hidden = torch.zeros(length, size, config.hidden, requires_grad=True)
    logits = torch.zeros(size, config.sequence, config.vocabulary // state.size("tensor"))
    stage = PipelineStage(
        model,
        index,
        count,
        torch.device("cpu"),
        # Their shapes are sent through numpy otherwise.
        input_args=(tokens if first else hidden,),
        output_args=(logits if last else hidden,),
        group=state.group("pipeline"),
    )
    schedule = ScheduleGPipe(stage, microbatches, loss_fn=parallel_loss_of)
    optimizer = optimizer_of(model.parameters())
    means = []
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
        means.append(sum(loss.item() for loss in losses) / microbatches)
    return means


def assert_follows(losses, expected):
    for step, (loss, wanted) in enumerate(zip(losses, expected, strict=True)):
        assert loss == pytest.approx(wanted, rel=1e-5), f"step {step}"


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])
def test_tensor_and_data_parallel(expected, sequence_parallel):
    config = Config(sequence_parallel=sequence_parallel)
    for losses in run_ranks(learn_with_ddp, 4, config, tensor=2, data=2, in_processes=True):
        assert_follows(losses, expected)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])
def test_tensor_and_pipeline_parallel(expected, sequence_parallel):
    config = Config(sequence_parallel=sequence_parallel)
    results = run_ranks(learn_with_a_pipeline, 4, config, tensor=2, pipeline=2, in_processes=True)
    for losses in results[2:]:  # the last stage's ranks
        assert_follows(losses, expected)
