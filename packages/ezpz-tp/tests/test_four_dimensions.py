"""Tensor x context x pipeline x data parallelism: the documented path, and what it must equal."""

from functools import partial

import pytest
import torch
from llama import Config, Llama, learn_alone, optimizer_of, text_batch

import ezpz_tp as tp
from ezpz_tp.testing import run_ranks

STEPS, BATCH = 4, 8
SHARED = ("data", "context")
MODEL = Config(layers=4, sequence=32, tied=True, context_parallel=True, sequence_parallel=True)


@pytest.fixture(scope="module")
def expected():
    whole = MODEL, STEPS, BATCH, torch.float64
    (losses,) = run_ranks(learn_alone, 1, *whole, in_processes=True, initialize=False)
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


def with_embedding_groups(degrees, checked, *args):
    """The losses, and of how many operations `check` found that they fit."""
    tp.initialize_tensor_parallel(**degrees, also=[SHARED], embedding=True)
    if not checked:
        return learn(*args), 0
    with tp.check() as checker:
        losses = learn(*args)
    return losses, checker.operations


def degrees(**sizes):
    return {f"{axis}_parallel_size": size for axis, size in ({"pipeline": 2} | sizes).items()}


@pytest.mark.parametrize(
    ("ranks", "degrees", "checked", "schedule", "virtual", "microbatches", "steps"),
    [
        (16, degrees(tensor=2, context=2), False, "1f1b", 1, 4, 2),  # and data 2
        (4, degrees(tensor=2), False, "gpipe", 1, 4, STEPS),
        (8, degrees(context=2), False, "interleaved", 2, 2, STEPS),  # and data 2
        (4, degrees(tensor=2, context=2, pipeline=1), False, "1f1b", 1, 2, STEPS),
        (8, degrees(tensor=2, context=2), True, "interleaved", 2, 2, 2),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_four_dimensions(expected, ranks, degrees, checked, schedule, virtual, microbatches, steps):
    """The losses are those of one process, and every rank on a last stage knows them."""
    plan = degrees, checked, schedule, virtual, microbatches, steps
    how = {"in_processes": True, "initialize": False, "timeout": 300}
    results = run_ranks(with_embedding_groups, ranks, *plan, **how)
    last = ranks // degrees["pipeline_parallel_size"]
    assert sum(bool(losses) for losses, _ in results) == last
    for losses, _ in results[-last:]:
        assert losses == pytest.approx(expected[:steps], rel=1e-9)
    assert all((operations > 100) == checked for _, operations in results)
