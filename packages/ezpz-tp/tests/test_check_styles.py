"""`check` knows bugs, and clean code, in whatever style they are written."""

from inspect import getsourcelines
from pathlib import Path

import pytest
import styles
import torch

import ezpz_tp as tp
from ezpz_tp._check.rules import is_foreign
from ezpz_tp.testing import run_ranks

SUM = "sum the partial one first, by reduce_from_tensor_parallel_region"


def error_of(program):
    try:
        program()
    except tp.ParallelTypeError as error:
        return str(error)
    return None


def assert_caught(errors, program, mend):
    source, first = getsourcelines(program)
    line = first + next(i for i, text in enumerate(source) if text.rstrip().endswith("# here"))
    for error in errors:
        assert error is not None, "not caught"
        assert f"styles.py:{line}, in {program.__name__}" in error
        assert mend in error.split("Mend:")[1]


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
    ],
)
def test_bugs(program, mend):
    assert_caught(run_ranks(error_of, 2, program, tensor=2), program, mend)


@pytest.mark.parametrize(
    "program",
    [
        *(styles.experts, styles.hooks, styles.reentrant_checkpoints, styles.nested),
        *(styles.tensors_like_others, styles.default_devices),
    ],
)
def test_clean_code(program):
    assert run_ranks(error_of, 2, program, tensor=2) == [None] * 2


def test_groups_of_ones_own():
    program = styles.groups_of_ones_own
    assert run_ranks(error_of, 2, program, tensor=2, in_processes=True) == [None] * 2
    program = styles.loss_summed_over_a_group_of_ones_own
    errors = run_ranks(error_of, 4, program, tensor=2, data=2, in_processes=True)
    assert_caught(errors, program, "reduce a detached copy")


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_parameters_that_fsdp2_has_replaced():
    degrees = {"tensor": 2, "data": 2}
    assert run_ranks(error_of, 4, styles.fully_sharded, **degrees, in_processes=True) == [None] * 4


def test_compiled_code_is_checked():
    assert run_ranks(error_of, 2, styles.compiled, tensor=2) == [None] * 2
    program = styles.mistake_in_compiled
    assert_caught(run_ranks(error_of, 2, program, tensor=2), program, SUM)


def test_and_compiles_again_afterwards():
    def is_compiled():
        return torch.compiler.is_compiling()

    assert torch.compile(is_compiled, backend="eager")()


def test_a_neighbors_folder_is_the_users():
    ours, torchs = Path(tp.__file__).parent, Path(torch.__file__).parent
    assert is_foreign(str(ours / "x.py"))
    assert is_foreign(str(torchs / "x.py"))
    assert not is_foreign(f"{ours}_models/x.py")
    assert not is_foreign(f"{torchs}titan/x.py")
