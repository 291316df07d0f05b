"""`check` catches every seeded bug at its line, and has no complaint about clean programs."""

import gc
import types
import weakref
from pathlib import Path

import pytest
import seeded
import torch
from llama import Config, Llama, parallel_loss_of, text_batch
from ranks import on_ranks
from torch import nn

import ezpz_tp as tp
from ezpz_tp.testing import run_ranks

TENSOR = {"tensor": 2}
DATA = {"tensor": 2, "data": 2}

# program, degrees, bug, what the mend says
CAUGHT = [
    (seeded.by_hand, TENSOR, "missing copy", "copy_to_tensor_model_parallel_region"),
    (seeded.by_hand, TENSOR, "double copy", "summed twice"),
    (seeded.by_hand, TENSOR, "bias before reduction", "then add the bias"),
    (seeded.by_hand, TENSOR, "missing reduction", "reduce_from_tensor_parallel_region"),
    (seeded.by_hand, TENSOR, "nonlinear before reduction", "reduce_from_tensor_parallel_region"),
    (seeded.by_hand, TENSOR, "double reduction", "leave this reduction out"),
    (seeded.by_hand, TENSOR, "mixed residual", "gather or reduce that one"),
    (seeded.by_hand, TENSOR, "copied residual", "use the tensor of before the region"),
    (seeded.sequence, TENSOR, "untagged norm", "mark_sequence_parallel(0.weight)"),
    (seeded.sequence, TENSOR, "untagged bias", "mark_sequence_parallel(2.bias)"),
    (seeded.sequence, TENSOR, "not scattered", "scatter_to_sequence_parallel_region"),
    (seeded.sequence, TENSOR, "summed gather", "the loss of before"),
    (seeded.tagged, TENSOR, "whole norm is tagged", "take the tag off weight"),
    (seeded.layers, TENSOR, "copy before the layer", "reduce_input_gradient"),
    (seeded.layers, TENSOR, "two columns", "gather or reduce it first"),
    (seeded.layers, TENSOR, "gathered before the row", "input_is_parallel=False"),
    (seeded.loss, TENSOR, "own part of the logits", "vocab_parallel_cross_entropy"),
    (seeded.loss, TENSOR, "gathered logits", "torch.nn.functional.cross_entropy"),
    (seeded.loss, TENSOR, "sum over tensor ranks", "leave this reduction out"),
    (seeded.loss, DATA, "in place over data", "reduce a detached copy"),
    (seeded.loss, DATA, "copied over data", "reduce a detached copy for the log"),
    (seeded.loss, {"tensor": 2, "context": 2}, "twice over context", "leave this reduction"),
    (seeded.trained, DATA, "finalized twice", "call finalize_grads once a step"),
]


def line_of(bug):
    lines = Path(seeded.__file__).read_text().splitlines()
    marked = [i for i, line in enumerate(lines, 1) if "# here:" in line and bug in line]
    assert len(marked) == 1, bug
    return f"seeded.py:{marked[0]}, in "


def error_of(program, bug):
    try:
        program(bug)
    except tp.ParallelTypeError as error:
        return str(error)
    return None


def size(degrees):
    product = 1
    for degree in degrees.values():
        product *= degree
    return product


@pytest.mark.parametrize(
    ("program", "degrees", "bug", "mend"), CAUGHT, ids=[bug for _, _, bug, _ in CAUGHT]
)
def test_a_seeded_bug_is_caught_at_its_line(program, degrees, bug, mend):
    for error in run_ranks(error_of, size(degrees), program, bug, **degrees):
        assert error is not None, "not caught"
        assert line_of(bug) in error
        assert mend in error.split("Mend:")[1]


@pytest.mark.parametrize(
    ("program", "degrees"),
    [
        *((seeded.by_hand, TENSOR), (seeded.sequence, TENSOR), (seeded.tagged, TENSOR)),
        *((seeded.layers, TENSOR), (seeded.loss, DATA), (seeded.trained, DATA)),
        (seeded.loss, {"tensor": 2, "context": 2}),
    ],
)
def test_the_same_program_without_a_bug_is_clean(program, degrees):
    assert run_ranks(error_of, size(degrees), program, None, **degrees) == [None] * size(degrees)


# Random streams are a process's, so these ranks are processes.
def test_random_numbers_of_sharded_and_of_whole_tensors():
    for bug in (None, "dropped whole inside", "dropped part outside", "dropped sum inside"):
        for error in run_ranks(error_of, 2, seeded.dropped, bug, tensor=2, in_processes=True):
            assert (error is None) == (bug is None)
            if bug:
                assert line_of(bug) in error
                assert "fork()" in error.split("Mend:")[1]


def test_torchs_differentiable_sum_of_a_loss_is_caught():
    results = run_ranks(error_of, 2, seeded.differentiable_sum, None, data=2, in_processes=True)
    assert results == [None] * 2
    program = seeded.differentiable_sum
    for error in run_ranks(
        error_of, 2, program, "summed gradient over data", data=2, in_processes=True
    ):
        assert line_of("summed gradient over data") in error
        assert "on the data axis: tensor () is replicated" in error


def llama_types(config):
    model = Llama(config)
    optimizer = torch.optim.AdamW(model.parameters())
    with tp.check(model) as checker:
        for step in range(2):
            tokens, labels = text_batch(step)
            logits = model(tokens)
            loss = parallel_loss_of(logits, labels)
            seen = tp.type_of(logits)["tensor"], tp.type_of(loss)["tensor"]
            loss.backward()
            tp.finalize_grads(model)
            tp.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return seen, checker.operations


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("degrees", [TENSOR, {"tensor": 4}, DATA], ids=str)
def test_a_llama_trains_without_a_false_alarm(sequence_parallel, degrees):
    config = Config(sequence_parallel=sequence_parallel)
    for seen, operations in run_ranks(llama_types, size(degrees), config, **degrees):
        assert seen == ("varying", "invariant")
        assert operations > 100


def dialect(name, original, *arguments):
    """Run code that was written for another package within `check`; return the operations."""
    path = Path(__file__).with_name(f"{name}_code.py")
    code = types.ModuleType(name)
    source = path.read_text(encoding="utf-8").replace(original, "ezpz_tp")
    exec(compile(source, path, "exec"), vars(code))
    if name == "megatron":
        code.parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    else:
        code.fs_init.initialize_model_parallel(2)
    with tp.check() as checker:
        model, *_ = code.train(*arguments)
        tp.finalize_grads(model)
    tp.destroy_model_parallel()
    return checker.operations


@pytest.mark.parametrize(
    "arguments",
    [
        ("megatron", "megatron.core", False),
        ("megatron", "megatron.core", True),
        ("fairscale", "fairscale.nn"),
    ],
    ids=str,
)
def test_models_in_other_dialects_are_clean(arguments):
    for operations in run_ranks(dialect, 2, *arguments, in_processes=True, initialize=False):
        assert operations > 10


def leftovers():
    model = seeded.Mlp()
    hidden = seeded.data(4, 8)
    with tp.check(model):
        output = model(hidden)
        assert tp.type_of(output) == {"tensor": "invariant"}
        gone = weakref.ref(model(hidden))
        assert gone() is None  # what is known of a tensor does not keep it alive
        loss = output.square().mean()
        loss.backward()
    attributes = [name for one in (hidden, output, loss) for name in vars(one)]
    gc.collect()
    return attributes, tp.type_of(output)


def test_nothing_is_left_behind():
    exchanged = torch.autograd.Function.__dict__["apply"], torch.distributed.all_reduce
    assert run_ranks(leftovers, 2, tensor=2) == [([], {})] * 2
    assert exchanged == (torch.autograd.Function.__dict__["apply"], torch.distributed.all_reduce)


class _OwnCopy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input_):
        return input_.view_as(input_)

    @staticmethod
    def backward(ctx, grad):
        return grad


class ColumnOwn(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = tp.ColumnParallelLinear(8, 16, gather_output=False, seed=1)

    def forward(self, hidden, *, declare):
        hidden = _OwnCopy.apply(hidden)
        if declare:
            hidden = tp.declare_type(hidden, tensor="replicated")
        return nn.functional.linear(hidden, self.layer.weight)


@on_ranks(2, tensor=2)
def test_what_cannot_be_known_is_declared():
    up = ColumnOwn()
    hidden = torch.ones(4, 8, requires_grad=True)
    errors = []
    with tp.check(up):
        for declare in (False, True):
            try:
                up(hidden, declare=declare)
            except tp.ParallelTypeError as error:
                errors.append(str(error))
    assert len(errors) == 1
    assert "parameter layer.weight (8, 8) is varying" in errors[0]


def test_declarations_are_looked_at():
    with pytest.raises(tp.ParallelError, match="expected an axis of tensor, context, data"):
        tp.declare_type(torch.ones(1), pipeline="varying")
    with pytest.raises(tp.ParallelError, match="invariant, replicated, varying, partial"):
        tp.declare_type(torch.ones(1), tensor="sharded")


def test_outside_it_nothing_has_a_type():
    tensor = torch.ones(3)
    assert tp.declare_type(tensor, tensor="varying") is tensor
    assert tp.type_of(tensor) == {}


@on_ranks(2, tensor=2)
def test_views_and_linear_operations_keep_the_type():
    up = tp.ColumnParallelLinear(8, 16, gather_output=False, bias=False, seed=1)
    down = tp.RowParallelLinear(16, 8, bias=False, input_is_parallel=True, seed=2)
    with tp.check():
        inner = up(torch.ones(4, 8))
        partial = inner @ down.weight.t()
        kinds = [
            tp.type_of(one)["tensor"]
            for one in (
                inner.T,
                inner[1:],
                inner.view(2, 2, 8),
                inner.detach(),
                partial,
                partial * 2 + partial,
                partial.sum(),
                partial.to(torch.float64),
                torch.cat([partial, partial]),
                inner @ inner.t(),
                torch.zeros(3),
            )
        ]
        for wrong in (lambda: partial + 1, lambda: partial * partial, partial.exp):
            with pytest.raises(tp.ParallelTypeError, match="A reduction is missing"):
                wrong()
    assert kinds == ["varying"] * 4 + ["partial"] * 5 + ["varying", "invariant"]


def test_at_degree_one_there_is_nothing_to_check():
    def program():
        with tp.check() as checker:
            seeded.by_hand()
        return checker.operations

    assert run_ranks(program, 1) == [0]


def test_it_needs_groups():
    with pytest.raises(tp.NotInitializedError), tp.check():
        pass
