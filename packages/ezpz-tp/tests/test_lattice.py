"""The standard of correctness: bitwise what an unsharded model computes, on a lattice of integers.

The sizes are divisible by 24, so that degrees 3 and 8 divide them.
"""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ezpz_tp as tp
from ezpz_tp.testing import assert_matches_unsharded

# What a number is made of makes no other way through the code: the others at one degree.
EVERY, ONE = (1, 2, 3, 8), (3,)
DEGREES = {torch.float64: EVERY, torch.float32: ONE, torch.bfloat16: ONE}
HIDDEN, VOCABULARY, UNEVEN, TOKENS, BATCH = 24, 48, 43, 24, 2
dtypes = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:]
)
sequence = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])
biased = pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
vocabularies = pytest.mark.parametrize("vocabulary", [VOCABULARY, UNEVEN], ids=["even", "uneven"])


def parallel_mlp(dtype, bias, sequence_parallel=False, **options):
    both = {"bias": bias, "sequence_parallel": sequence_parallel, "dtype": dtype, **options}
    return nn.Sequential(
        tp.ColumnParallelLinear(HIDDEN, 4 * HIDDEN, gather_output=False, **both),
        nn.ReLU(),
        tp.RowParallelLinear(4 * HIDDEN, HIDDEN, input_is_parallel=True, **both),
    )


def mlp(dtype, bias):
    return nn.Sequential(
        nn.Linear(HIDDEN, 4 * HIDDEN, bias=bias, dtype=dtype),
        nn.ReLU(),
        nn.Linear(4 * HIDDEN, HIDDEN, bias=bias, dtype=dtype),
    )


@dtypes
@biased
def test_layers_that_gather_and_scatter(dtype, bias):
    options = {"bias": bias, "dtype": dtype}

    def both(column, row):
        up, down = column(HIDDEN, 2 * HIDDEN, **options), row(2 * HIDDEN, HIDDEN, **options)
        return nn.Sequential(up, nn.ReLU(), down)

    counts = assert_matches_unsharded(
        lambda: both(tp.ColumnParallelLinear, tp.RowParallelLinear),
        lambda: both(nn.Linear, nn.Linear),
        torch.empty(TOKENS, HIDDEN, dtype=dtype),
        tensor=DEGREES[dtype],
    )
    # The column layer's output and the row layer's input are whole, and each is shared once.
    assert counts == {"all_gather": 2, "all_reduce": 2}


class Model(nn.Module):
    """Tokens to logits, where its layers are parallel to those of a part of the vocabulary."""

    def __init__(self, embedding, mlp, head, loss):
        super().__init__()
        self.embedding, self.mlp, self.head, self.loss = embedding, mlp, head, loss

    def forward(self, tokens, labels=None):
        hidden = self.embedding(tokens)
        logits = self.head(hidden + self.mlp(hidden))
        return logits if labels is None else self.loss(logits, labels)


def parallel_model(vocabulary, dtype, bias, sequence_parallel):
    both = {"sequence_parallel": sequence_parallel, "dtype": dtype}
    return Model(
        tp.VocabParallelEmbedding(vocabulary, HIDDEN, **both),
        parallel_mlp(dtype, bias, sequence_parallel),
        tp.ColumnParallelLinear(
            HIDDEN, vocabulary, bias, gather_output=False, pad_output=True, **both
        ),
        tp.vocab_parallel_cross_entropy,
    )


def loss_of_each(logits, labels):
    losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return losses.view_as(labels)


def model(vocabulary, dtype, bias):
    embedding = nn.Embedding(vocabulary, HIDDEN, dtype=dtype)
    head = nn.Linear(HIDDEN, vocabulary, bias, dtype=dtype)
    return Model(embedding, mlp(dtype, bias), head, loss_of_each)


def tokens(vocabulary):
    return torch.arange(TOKENS * BATCH).reshape(TOKENS, BATCH) * 7 % vocabulary


@dtypes
@sequence
@biased
@vocabularies
def test_embedding_to_logits(dtype, sequence_parallel, bias, vocabulary):
    assert_matches_unsharded(
        partial(parallel_model, vocabulary, dtype, bias, sequence_parallel),
        partial(model, vocabulary, dtype, bias),
        tokens(vocabulary),
        tensor=DEGREES[dtype],
        split_outputs=-1,
        density=0.08,
    )


@dtypes
@pytest.mark.parametrize("gather_output", [False, True])
def test_parallel_embedding(dtype, gather_output):
    options = {"padding_idx": 3, "dtype": dtype}
    counts = assert_matches_unsharded(
        lambda: tp.ParallelEmbedding(VOCABULARY, HIDDEN, gather_output=gather_output, **options),
        lambda: nn.Embedding(VOCABULARY, HIDDEN, **options),
        tokens(VOCABULARY),
        tensor=DEGREES[dtype],
        split_outputs=None if gather_output else -1,
    )
    assert counts == ({"all_gather": 1} if gather_output else {})


@sequence
@pytest.mark.parametrize("degree", [1, 2])
def test_exactly_these_collectives_are_started(sequence_parallel, degree):
    split = 0 if sequence_parallel else None
    of_mlp = assert_matches_unsharded(
        partial(parallel_mlp, torch.float64, True, sequence_parallel),
        partial(mlp, torch.float64, True),
        torch.empty(TOKENS, HIDDEN, dtype=torch.float64),
        tensor=degree,
        split_inputs=split,
        split_outputs=split,
    )
    of_model = assert_matches_unsharded(
        partial(parallel_model, UNEVEN, torch.float64, True, sequence_parallel),
        partial(model, UNEVEN, torch.float64, True),
        *[tokens(UNEVEN)] * 2,
        tensor=degree,
        tolerance=1e-12,
    )
    if degree == 1:
        assert of_mlp == of_model == {}
    elif sequence_parallel:
        # The last gather is the column layer's input once more, for its weight.
        assert of_mlp == {"all_gather": 3, "reduce_scatter": 2}
        # And the embedding, the head and the loss.
        assert of_model == {"all_gather": 3 + 1 + 2 + 1, "reduce_scatter": 2 + 1 + 1}
    else:
        # The row layer forward, the column layer backward.
        assert of_mlp == {"all_reduce": 2}
        # And the embedding forward, the head backward, the loss forward.
        assert of_model == {"all_reduce": 2 + 2, "all_gather": 1}


class Autocast(nn.Sequential):
    def __init__(self, build, *arguments):
        super().__init__(*build(*arguments))

    def forward(self, value):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = super().forward(value)
        assert output.dtype == torch.bfloat16
        return output


@sequence
def test_autocast_of_weights_in_single_precision(sequence_parallel):
    split = 0 if sequence_parallel else None
    assert_matches_unsharded(
        partial(Autocast, parallel_mlp, torch.float32, True, sequence_parallel),
        partial(Autocast, mlp, torch.float32, True),
        torch.empty(TOKENS, BATCH, HIDDEN),
        tensor=(2, 4),
        split_inputs=split,
        split_outputs=split,
        density=0.12,
    )
