"""`check` catches every seeded bug at its line, and finds nothing in right programs."""

import gc
import re
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from inspect import getsourcelines
from math import prod
from pathlib import Path

import pytest
import seeded
import torch
from torch import nn
from torch.nn import functional as F

import ezpz_spmd
import ezpz_tp as tp
from ezpz_spmd import ParallelTypeError, _check, check, declare_type, type_of
from ezpz_spmd._rules import is_foreign
from ezpz_tp.testing import run_ranks

TENSOR, DATA, CONTEXT = {"tensor": 2}, {"tensor": 2, "data": 2}, {"tensor": 2, "context": 2}
SUM = "sum the partial one first, by reduce_from_tensor_parallel_region"

# program, degrees, bug, what the fix says; programs without one are a bug
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
    (seeded.loss, DATA, "in place over data", "reduce a detached copy"),
    (seeded.loss, DATA, "copied over data", "reduce a detached copy for the log"),
    (seeded.loss, CONTEXT, "twice over context", "leave this reduction"),
    (seeded.trained, DATA, "finalized twice", "call finalize_grads once a step"),
    (seeded.dropped, TENSOR, "dropped whole inside", "fork()"),
    (seeded.dropped, TENSOR, "dropped part outside", "fork()"),
    (seeded.dropped, TENSOR, "dropped sum inside", "fork()"),
    (seeded.differentiable_sum, {"data": 2}, "summed gradient over data", ""),
    (seeded.shard_written_through_a_view, TENSOR, None, "gather or reduce it first"),
    (seeded.scaled_loss_of_a_part, TENSOR, None, "reduce what the loss is made of"),
    (seeded.inside_reentrant_checkpoint, TENSOR, None, "copy_to_tensor_parallel_region"),
    (seeded.mistake_in_compiled, TENSOR, None, SUM),
    (seeded.loss_summed_over_a_group_of_ones_own, DATA, None, "reduce a detached copy"),
]


def line_of(program, bug):
    source, first = getsourcelines(seeded if bug else program)
    mark = re.compile(rf"# here:.*{bug}" if bug else "# here$")
    marked = [i for i, line in enumerate(source, first or 1) if mark.search(line)]
    assert len(marked) == 1, bug
    return f"seeded.py:{marked[0]}, in {'' if bug else program.__name__}"


def error_of(program, *given):
    try:
        program(*given)
    except ParallelTypeError as error:
        return str(error)
    return None


def errors_of(program, degrees, bug=None):
    bugs = [bug] if bug else []
    return run_ranks(error_of, prod(degrees.values()), program, *bugs, **degrees)


@pytest.mark.parametrize(
    ("program", "degrees", "bug", "fix"), CAUGHT, ids=[c[2] or c[0].__name__ for c in CAUGHT]
)
def test_a_seeded_bug_is_caught_at_its_line(program, degrees, bug, fix):
    line = line_of(program, bug)
    for error in errors_of(program, degrees, bug):
        assert error is not None, "not caught"
        assert line in error
        assert fix in error.split("Fix:")[1]
        if program is seeded.differentiable_sum:
            assert "on the data axis: tensor () is replicated" in error


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize(
    ("program", "degrees"),
    [
        *((seeded.by_hand, TENSOR), (seeded.sequence, TENSOR), (seeded.tagged, TENSOR)),
        *((seeded.layers, TENSOR), (seeded.loss, DATA), (seeded.trained, DATA)),
        *((seeded.loss, CONTEXT), (seeded.dropped, TENSOR)),
        *((seeded.differentiable_sum, {"data": 2}), (seeded.experts, TENSOR)),
        *((seeded.hooks, TENSOR), (seeded.reentrant_checkpoints, TENSOR), (seeded.nested, TENSOR)),
        *((seeded.tensors_like_others, TENSOR), (seeded.default_devices, TENSOR)),
        *((seeded.groups_of_ones_own, TENSOR), (seeded.fully_sharded, DATA)),
        *((seeded.names_of_other_libraries, TENSOR), (seeded.attention, {"context": 2})),
        (seeded.pipelined, {"tensor": 2, "pipeline": 2}),
    ],
)
def test_code_without_a_bug_is_clean(program, degrees):
    assert set(errors_of(program, degrees)) == {None}


def test_code_is_compiled_again_afterwards():
    def is_compiled():
        return torch.compiler.is_compiling()

    assert errors_of(seeded.compiled, TENSOR) == [None] * 2
    assert torch.compile(is_compiled, backend="eager")()


def test_a_neighbors_folder_is_the_users():
    ours, torchs = Path(tp.__file__).parent, Path(torch.__file__).parent
    assert is_foreign(str(ours / "x.py"))
    assert is_foreign(ezpz_spmd.check.__code__.co_filename)
    assert is_foreign(str(torchs / "x.py"))
    assert not is_foreign(f"{ours}_models/x.py")
    assert not is_foreign(f"{torchs}titan/x.py")


def test_nothing_is_left_behind():
    def leftovers():
        model, hidden = seeded.Mlp(), seeded.data(4, 8)
        with check(model):
            output = model(hidden)
            assert type_of(output) == {"tensor": "invariant"}
            gone = weakref.ref(model(hidden))
            assert gone() is None  # what is known of a tensor does not keep it alive
            loss = output.square().mean()
            loss.backward()
        assert not any(vars(one) for one in (hidden, output, loss))
        gc.collect()
        assert type_of(output) == {}

    exchanged = torch.autograd.Function.__dict__["apply"], torch.distributed.all_reduce
    run_ranks(leftovers, 2, tensor=2)
    assert exchanged == (torch.autograd.Function.__dict__["apply"], torch.distributed.all_reduce)


def test_nothing_is_left_behind_by_two_threads(monkeypatch):
    exchanged = torch.autograd.Function.__dict__["apply"]
    patch_all = _check._patch_all

    def patch_all_slowly():
        calls.append(patch_all)
        time.sleep(0.1)
        return patch_all()

    calls = []
    both_are_inside = threading.Barrier(2, timeout=60)

    def patch():
        with _check.patched():
            both_are_inside.wait()

    monkeypatch.setattr(_check, "_patch_all", patch_all_slowly)
    with ThreadPoolExecutor() as threads:
        for patching in [threads.submit(patch), threads.submit(patch)]:
            patching.result()
    assert len(calls) == 1  # a second one would wrap, and then restore, what the first has wrapped
    assert torch.autograd.Function.__dict__["apply"] is exchanged


def declare_what_cannot_be_known():
    up = tp.ColumnParallelLinear(8, 16, gather_output=False, seed=1)
    hidden = torch.ones(4, 8, requires_grad=True)
    with check(nn.ModuleDict({"layer": up})):
        copied = seeded._Seen.apply(hidden)
        with pytest.raises(ParallelTypeError, match=r"parameter layer\.weight \(8, 8\) is var"):
            nn.functional.linear(copied, up.weight)
        nn.functional.linear(declare_type(copied, tensor="replicated"), up.weight)


def test_what_cannot_be_known_is_declared():
    run_ranks(declare_what_cannot_be_known, 2, tensor=2)


def call_through_a_partial():
    reduce = partial(tp.reduce_from_tensor_parallel_region)
    error = pytest.raises(tp.ParallelError, match="call the function by its name in a module")
    with check(), error:
        reduce(seeded.data(4, 8))


def test_a_region_function_that_was_hidden_from_the_check_is_refused():
    run_ranks(call_through_a_partial, 2, tensor=2)


def test_declarations_are_looked_at_and_outside_nothing_has_a_type():
    told = "expected an axis of tensor, context, data and a type of invariant, replicated, v"
    for wrong in ({"pipeline": "varying"}, {"tensor": "sharded"}):
        with pytest.raises(tp.ParallelError, match=told):
            declare_type(torch.ones(1), **wrong)
    tensor = torch.ones(3)
    assert declare_type(tensor, tensor="varying") is tensor
    assert type_of(tensor) == {}
    with pytest.raises(tp.NotInitializedError), check():
        pass


def keep_and_refuse_types():
    up, down, bias = seeded.weights()
    with check():
        hidden = seeded.data(4, 16)
        split = seeded.inner(hidden, up)
        heads, rows = (
            declare_type(seeded.data(*shape), tensor="varying")
            for shape in ((3, 5, 2, 4), (2, 4, 5))
        )
        out = split @ down.T
        no_gradient = hidden[:, :8] > split  # which may mix what else may not
        varying = split.T, split[1:], split.view(2, 2, 8), split.detach(), split @ split.t()
        varying += (no_gradient,)
        partial = (
            *(out, out * 2 + out, out.sum(), out.to(torch.float64), torch.cat([out, out])),
            *(down @ split.T, torch.einsum("bf,hf->bh", split, down)),
            *(torch.einsum("bf,hf", split, down), F.conv1d(rows, seeded.sharded(8, 4, 1, dim=1))),
            torch.tensordot(heads, seeded.sharded(2, 4, 16, dim=0), dims=2),
        )
        whole = [torch.zeros(3)]
        for kind, found in (("varying", varying), ("partial", partial), ("invariant", whole)):
            assert [type_of(one)["tensor"] for one in found] == [kind] * len(found)
        for fix, wrongs in (
            (SUM, (lambda: out + bias, lambda: partial[-1].add_(bias),
                   lambda: hidden.index_add(0, torch.arange(4), out))),
            ("leave the bias out", [lambda: torch.addmm(bias, split, down.t())]),
            ("sum it first", (lambda: out + 1, lambda: torch.add(out, other=1.0),
                              lambda: out * out, out.exp, out.tanh, lambda: F.relu(out),
                              lambda: out.masked_fill(torch.ones(16) > 0, float("-inf")))),
        ):  # fmt: skip
            for wrong in wrongs:
                with pytest.raises(ParallelTypeError, match=f"Fix: {fix}"):
                    wrong()


def test_views_and_linear_operations_keep_the_type_and_others_are_refused():
    run_ranks(keep_and_refuse_types, 2, tensor=2)


def refuse_what_is_not_linear():
    up, down, _ = seeded.weights()
    with check():
        out = seeded.inner(seeded.data(4, 16), up) @ down.T
        target = torch.rand(4, 16)
        image = out.view(1, 2, 4, 8)
        for wrong in (
            lambda: F.binary_cross_entropy(out * 0, target),
            lambda: F.binary_cross_entropy_with_logits(out, target),
            lambda: F.kl_div(out, target),
            lambda: F.smooth_l1_loss(out, target),
            lambda: F.huber_loss(out, target),
            lambda: F.normalize(out),
            lambda: F.cosine_similarity(out, target),
            lambda: F.instance_norm(image),
            lambda: F.max_pool1d(out, 2),
            lambda: F.max_pool2d(image, 2),
            lambda: F.max_pool2d(image, 2, return_indices=True),
            lambda: F.max_pool3d(image, 2),
            lambda: F.adaptive_max_pool2d(image, 2),
            lambda: F.fractional_max_pool2d(image, 2, 2),
            lambda: torch.logcumsumexp(out, 0),
            lambda: torch.std_mean(out),
            lambda: torch.var_mean(out),
            out.median,
            lambda: torch.cdist(out, out),
            lambda: torch.linalg.vector_norm(out),
            lambda: out // 2,
            lambda: 2 // out,
            lambda: out.detach().floor_divide_(2),
            lambda: out % 2,
            lambda: 2 % out,
        ):
            with pytest.raises(ParallelTypeError, match="is not linear"):
                wrong()


def test_a_loss_or_norm_or_maximum_of_a_partial_sum_is_refused():
    run_ranks(refuse_what_is_not_linear, 2, tensor=2)


def run_recurrent_layers():
    tp.seed_model_parallel(1)
    hidden = seeded.data(3, 2, 8)
    packed = nn.utils.rnn.pack_padded_sequence(hidden, torch.tensor([3, 2]))
    for kind in (nn.LSTM, nn.GRU, nn.RNN, partial(nn.RNN, nonlinearity="relu")):
        plain = kind(8, 8)
        dropping = kind(8, 8, num_layers=2, dropout=0.5)
        with check(), tp.get_rng_tracker().fork():
            for given in (hidden, packed):
                plain(given)
                dropping.train()
                with pytest.raises(ParallelTypeError, match="call it outside"):
                    dropping(given)
                dropping.eval()
                dropping(given)


def test_recurrent_layers_draw_only_where_they_drop():
    run_ranks(run_recurrent_layers, 2, tensor=2)


def leave_a_value_unchecked():
    up, down, bias = seeded.weights()
    with check():
        partial = seeded.inner(seeded.data(4, 16), up) @ down.T
        told = "what linalg_svdvals makes of a partial sum is not checked"
        with pytest.warns(UserWarning, match=told) as caught:
            values = torch.linalg.svdvals(torch.linalg.svdvals(partial).expand(4, 4))
        torch.linalg.svdvals(partial * 2)  # said once: warnings are errors here
        assert len(caught) == 1
        assert type_of(values + bias[:4]) == {"tensor": "unchecked"}
        summed = tp.reduce_from_tensor_parallel_region(values)
        assert type_of(summed + bias[:4]) == {"tensor": "invariant"}


def test_an_operation_without_a_rule_ends_the_check_of_a_value_and_is_said_once():
    run_ranks(leave_a_value_unchecked, 2, tensor=2)


def find_nothing_to_check():
    with check() as checker:
        seeded.by_hand()
    assert checker.operations == 0


def test_at_degree_one_there_is_nothing_to_check():
    run_ranks(find_nothing_to_check, 1)
