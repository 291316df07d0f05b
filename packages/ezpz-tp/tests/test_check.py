"""`check` catches every seeded bug at its line, and has no complaint about clean programs."""

import gc
import weakref
from inspect import getsourcelines
from math import prod
from pathlib import Path

import pytest
import seeded
import styles
import torch
from llama import Config, Llama, parallel_loss_of, text_batch
from on_ranks import load_code, on_ranks
from torch import nn

import ezpz_tp as tp
from ezpz_tp._check.rules import is_foreign
from ezpz_tp.testing import run_ranks

TENSOR, DATA, CONTEXT = {"tensor": 2}, {"tensor": 2, "data": 2}, {"tensor": 2, "context": 2}
FORKED = seeded.dropped, seeded.differentiable_sum  # on processes: random streams, torch's groups

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
    (seeded.loss, CONTEXT, "twice over context", "leave this reduction"),
    (seeded.trained, DATA, "finalized twice", "call finalize_grads once a step"),
    (seeded.dropped, TENSOR, "dropped whole inside", "fork()"),
    (seeded.dropped, TENSOR, "dropped part outside", "fork()"),
    (seeded.dropped, TENSOR, "dropped sum inside", "fork()"),
    (seeded.differentiable_sum, {"data": 2}, "summed gradient over data", ""),
]


def line_of(bug):
    lines = Path(seeded.__file__).read_text().splitlines()
    marked = [i for i, line in enumerate(lines, 1) if "# here:" in line and bug in line]
    assert len(marked) == 1, bug
    return f"seeded.py:{marked[0]}, in "


def line_in(program):
    """Of styles.py, whose programs have one bug each."""
    source, first = getsourcelines(program)
    line = first + next(i for i, text in enumerate(source) if text.rstrip().endswith("# here"))
    return f"styles.py:{line}, in {program.__name__}"


def error_of(program, *bug):
    try:
        program(*bug)
    except tp.ParallelTypeError as error:
        return str(error)
    return None


def errors_of(program, degrees, *bug, **how):
    how = {"in_processes": program in FORKED, **degrees, **how}
    return run_ranks(error_of, prod(degrees.values()), program, *bug, **how)


def assert_caught(errors, line, mend):
    for error in errors:
        assert error is not None, "not caught"
        assert line in error
        assert mend in error.split("Mend:")[1]


@pytest.mark.parametrize(("program", "degrees", "bug", "mend"), CAUGHT, ids=[c[2] for c in CAUGHT])
def test_a_seeded_bug_is_caught_at_its_line(program, degrees, bug, mend):
    errors = errors_of(program, degrees, bug)
    assert_caught(errors, line_of(bug), mend)
    if program is seeded.differentiable_sum:
        assert "on the data axis: tensor () is replicated" in errors[0]


@pytest.mark.parametrize(
    ("program", "degrees"),
    [
        *((seeded.by_hand, TENSOR), (seeded.sequence, TENSOR), (seeded.tagged, TENSOR)),
        *((seeded.layers, TENSOR), (seeded.loss, DATA), (seeded.trained, DATA)),
        *((seeded.loss, CONTEXT), (seeded.dropped, TENSOR)),
        (seeded.differentiable_sum, {"data": 2}),
    ],
)
def test_the_same_program_without_a_bug_is_clean(program, degrees):
    assert set(errors_of(program, degrees, None)) == {None}


SUM = "sum the partial one first, by reduce_from_tensor_parallel_region"


@pytest.mark.parametrize(
    ("program", "mend"),
    [
        (styles.bias_after_einsum, SUM),
        (styles.bias_after_heads, SUM),
        (styles.bias_in_addmm, "leave the bias out"),
        (styles.gelu_after_einsum, "sum it first"),
        (styles.tanh_after_weight_first, "sum it first"),
        (styles.relu_after_convolution, "sum it first"),
        (styles.number_by_name, "sum it first"),
        (styles.mask_of_partial, "sum it first"),
        (styles.partial_into_whole, SUM),
        (styles.shard_written_through_a_view, "gather or reduce it first"),
        (styles.scaled_loss_of_a_part, "reduce what the loss is made of"),
        (styles.inside_reentrant_checkpoint, "copy_to_tensor_parallel_region"),
        (styles.mistake_in_compiled, SUM),
    ],
)
def test_bugs_in_other_styles(program, mend):
    assert_caught(errors_of(program, TENSOR), line_in(program), mend)


@pytest.mark.parametrize(
    "program",
    [
        *(styles.experts, styles.hooks, styles.reentrant_checkpoints, styles.nested),
        *(styles.tensors_like_others, styles.default_devices, styles.compiled),
    ],
)
def test_clean_code_in_other_styles(program):
    assert errors_of(program, TENSOR) == [None] * 2


def test_groups_of_ones_own():
    assert errors_of(styles.groups_of_ones_own, TENSOR, in_processes=True) == [None] * 2
    program = styles.loss_summed_over_a_group_of_ones_own
    errors = errors_of(program, DATA, in_processes=True)
    assert_caught(errors, line_in(program), "reduce a detached copy")


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_parameters_that_fsdp2_has_replaced():
    assert errors_of(styles.fully_sharded, DATA, in_processes=True) == [None] * 4


def test_code_is_compiled_again_afterwards():
    def is_compiled():
        return torch.compiler.is_compiling()

    assert errors_of(styles.compiled, TENSOR) == [None] * 2
    assert torch.compile(is_compiled, backend="eager")()


def test_a_neighbors_folder_is_the_users():
    ours, torchs = Path(tp.__file__).parent, Path(torch.__file__).parent
    assert is_foreign(str(ours / "x.py"))
    assert is_foreign(str(torchs / "x.py"))
    assert not is_foreign(f"{ours}_models/x.py")
    assert not is_foreign(f"{torchs}titan/x.py")


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
@pytest.mark.parametrize("degrees", [TENSOR, DATA], ids=str)
def test_a_llama_trains_without_a_false_alarm(sequence_parallel, degrees):
    config, ranks = Config(sequence_parallel=sequence_parallel), prod(degrees.values())
    for seen, operations in run_ranks(llama_types, ranks, config, **degrees):
        assert seen == ("varying", "invariant")
        assert operations > 100


def dialect(name, *arguments):
    """Run code that was written for another package within `check`; return the operations."""
    code = load_code(name)
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
    "arguments", [("megatron", False), ("megatron", True), ("fairscale",)], ids=str
)
def test_models_in_other_dialects_are_clean(arguments):
    for operations in run_ranks(dialect, 2, *arguments, in_processes=True, initialize=False):
        assert operations > 10


def test_nothing_is_left_behind():
    def leftovers():
        model, hidden = seeded.Mlp(), seeded.data(4, 8)
        with tp.check(model):
            output = model(hidden)
            assert tp.type_of(output) == {"tensor": "invariant"}
            gone = weakref.ref(model(hidden))
            assert gone() is None  # what is known of a tensor does not keep it alive
            loss = output.square().mean()
            loss.backward()
        assert not any(vars(one) for one in (hidden, output, loss))
        gc.collect()
        assert tp.type_of(output) == {}

    exchanged = torch.autograd.Function.__dict__["apply"], torch.distributed.all_reduce
    run_ranks(leftovers, 2, tensor=2)
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
