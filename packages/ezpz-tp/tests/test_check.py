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
from on_ranks import on_ranks
from torch import nn
from torch.nn import functional as F

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


@on_ranks(2, tensor=2)
def test_what_cannot_be_known_is_declared():
    up = tp.ColumnParallelLinear(8, 16, gather_output=False, seed=1)
    hidden = torch.ones(4, 8, requires_grad=True)
    with tp.check(nn.ModuleDict({"layer": up})):
        copied = _OwnCopy.apply(hidden)
        with pytest.raises(tp.ParallelTypeError, match=r"parameter layer\.weight \(8, 8\) is var"):
            nn.functional.linear(copied, up.weight)
        nn.functional.linear(tp.declare_type(copied, tensor="replicated"), up.weight)


def test_declarations_are_looked_at_and_outside_nothing_has_a_type():
    told = "expected an axis of tensor, context, data and a type of invariant, replicated, v"
    for wrong in ({"pipeline": "varying"}, {"tensor": "sharded"}):
        with pytest.raises(tp.ParallelError, match=told):
            tp.declare_type(torch.ones(1), **wrong)
    tensor = torch.ones(3)
    assert tp.declare_type(tensor, tensor="varying") is tensor
    assert tp.type_of(tensor) == {}
    with pytest.raises(tp.NotInitializedError), tp.check():
        pass


@on_ranks(2, tensor=2)
def test_views_and_linear_operations_keep_the_type_and_others_are_refused():
    up, down, bias = styles.weights()
    with tp.check():
        hidden = styles.data(4, 16)
        split = styles.inner(hidden, up)
        heads, rows = (
            tp.declare_type(styles.data(*shape), tensor="varying")
            for shape in ((3, 5, 2, 4), (2, 4, 5))
        )
        out = split @ down.T
        varying = split.T, split[1:], split.view(2, 2, 8), split.detach(), split @ split.t()
        partial = (
            *(out, out * 2 + out, out.sum(), out.to(torch.float64), torch.cat([out, out])),
            *(down @ split.T, torch.einsum("bf,hf->bh", split, down)),
            *(torch.einsum("bf,hf", split, down), F.conv1d(rows, styles.sharded(8, 4, 1, dim=1))),
            torch.tensordot(heads, styles.sharded(2, 4, 16, dim=0), dims=2),
        )
        whole = [torch.zeros(3)]
        for kind, found in (("varying", varying), ("partial", partial), ("invariant", whole)):
            assert [tp.type_of(one)["tensor"] for one in found] == [kind] * len(found)
        for mend, wrongs in (
            (SUM, (lambda: out + bias, lambda: partial[-1].add_(bias),
                   lambda: hidden.index_add(0, torch.arange(4), out))),
            ("leave the bias out", [lambda: torch.addmm(bias, split, down.t())]),
            ("sum it first", (lambda: out + 1, lambda: torch.add(out, other=1.0),
                              lambda: out * out, out.exp, out.tanh, lambda: F.relu(out),
                              lambda: out.masked_fill(torch.ones(16) > 0, float("-inf")))),
        ):  # fmt: skip
            for wrong in wrongs:
                with pytest.raises(tp.ParallelTypeError, match=f"Mend: {mend}"):
                    wrong()


@on_ranks(1)
def test_at_degree_one_there_is_nothing_to_check():
    with tp.check() as checker:
        seeded.by_hand()
    assert checker.operations == 0
