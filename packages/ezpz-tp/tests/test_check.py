"""`check` catches every seeded bug at its line, `verify_replicated` what differs; both no more."""

import gc
import re
import weakref
from functools import partial
from inspect import getsourcelines
from math import prod
from pathlib import Path

import pytest
import seeded
import torch
from on_ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import parallel
from torch.nn import functional as F

import ezpz_tp as tp
from ezpz_tp._check.rules import is_foreign
from ezpz_tp.testing import counting, run_ranks

TENSOR, DATA, CONTEXT = {"tensor": 2}, {"tensor": 2, "data": 2}, {"tensor": 2, "context": 2}
FORKED = (  # on processes: random streams, torch's groups
    *(seeded.dropped, seeded.differentiable_sum, seeded.groups_of_ones_own),
    *(seeded.loss_summed_over_a_group_of_ones_own, seeded.fully_sharded),
)
SUM = "sum the partial one first, by reduce_from_tensor_parallel_region"

# program, degrees, bug, what the mend says; programs without one are a bug
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
    except (tp.ParallelTypeError, tp.ReplicaError) as error:
        return str(error)
    return None


def errors_of(program, degrees, bug=None):
    how = {"in_processes": program in FORKED, **degrees}
    return run_ranks(error_of, prod(degrees.values()), program, *([bug] if bug else ()), **how)


@pytest.mark.parametrize(
    ("program", "degrees", "bug", "mend"), CAUGHT, ids=[c[2] or c[0].__name__ for c in CAUGHT]
)
def test_a_seeded_bug_is_caught_at_its_line(program, degrees, bug, mend):
    line = line_of(program, bug)
    for error in errors_of(program, degrees, bug):
        assert error is not None, "not caught"
        assert line in error
        assert mend in error.split("Mend:")[1]
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


@on_ranks(2, tensor=2)
def test_what_cannot_be_known_is_declared():
    up = tp.ColumnParallelLinear(8, 16, gather_output=False, seed=1)
    hidden = torch.ones(4, 8, requires_grad=True)
    with tp.check(nn.ModuleDict({"layer": up})):
        copied = seeded._Seen.apply(hidden)
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
    up, down, bias = seeded.weights()
    with tp.check():
        hidden = seeded.data(4, 16)
        split = seeded.inner(hidden, up)
        heads, rows = (
            tp.declare_type(seeded.data(*shape), tensor="varying")
            for shape in ((3, 5, 2, 4), (2, 4, 5))
        )
        out = split @ down.T
        varying = split.T, split[1:], split.view(2, 2, 8), split.detach(), split @ split.t()
        partial = (
            *(out, out * 2 + out, out.sum(), out.to(torch.float64), torch.cat([out, out])),
            *(down @ split.T, torch.einsum("bf,hf->bh", split, down)),
            *(torch.einsum("bf,hf", split, down), F.conv1d(rows, seeded.sharded(8, 4, 1, dim=1))),
            torch.tensordot(heads, seeded.sharded(2, 4, 16, dim=0), dims=2),
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


@pytest.mark.parametrize(
    ("bug", "axis", "parameter", "mend"),
    [
        ("forgotten finalize_grads", "tensor", "norm.weight", "call finalize_grads once a step"),
        ("not averaged over data", "data", "norm.weight", "sum gradients over the data"),
        ("equal seeds", "tensor", "layers.0.feed_forward.up.weight", "the ranks were seeded alike"),
    ],
)
def test_what_differs_is_named_with_axis_and_ranks(bug, axis, parameter, mend):
    for rank, error in enumerate(errors_of(seeded.trained, DATA, bug)):
        ranks = {"tensor": (rank // 2 * 2, rank // 2 * 2 + 1), "data": (rank % 2, rank % 2 + 2)}
        assert f"{axis} axis, ranks {ranks[axis][0]}, {ranks[axis][1]}:" in error
        assert parameter in error
        assert mend in error


@pytest.mark.parametrize(
    ("bug", "message"),
    [
        ("counted twice", "`shared` of tied embedding 0 is False on 2 stages"),
        ("not summed", "tied embedding 0 should be the same on all of them, and differs on 1"),
        (None, None),
    ],
)
@on_ranks(2, initialize=False, in_processes=True)
def test_tied_embeddings(bug, message):
    tp.initialize_tensor_parallel(pipeline_parallel_size=2, embedding=True)
    error = error_of(seeded.tied, bug)
    assert error is None if message is None else message in error


@pytest.mark.parametrize("gradient", [False, True])
@on_ranks(3, data=3)
def test_the_last_bit_of_one_value_on_one_rank_of_three(gradient):
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.fill_(1)
        model.bias.fill_(2)
    model(torch.ones(2, 4)).sum().backward()
    if tp.get_state().rank == 2:
        (model.weight.grad if gradient else model.weight.detach())[3, 3] += 1e-6
    error = error_of(tp.verify_replicated, model)
    with_gradients = error_of(partial(tp.verify_replicated, gradients=True), model)
    name = "gradient of weight" if gradient else "weight"
    assert f"{name} should be the same on all of them, and differs on 2;" in with_gradients
    assert (error is None) == gradient
    assert "bias" not in with_gradients


def test_one_collective_an_axis():
    def collectives():
        model = seeded.Mlp()
        with counting() as counter:
            tp.verify_replicated(model)
        return dict(counter)

    assert run_ranks(collectives, 2, tensor=2) == [{"all_gather": 1}] * 2
    assert run_ranks(collectives, 4, **DATA) == [{"all_gather": 2}] * 4
    assert run_ranks(collectives, 1) == [{}]


@on_ranks(2, data=2)
def test_any_shape_and_dtype():
    model = nn.ParameterList(
        [torch.full((), float(i)) for i in range(1100)]
        + [torch.ones(2, 3, dtype=dtype) for dtype in (torch.bfloat16, torch.complex64)]
        + [torch.zeros(0, 3), torch.ones(3, 4).t()]
    )
    for one in model[-3:]:
        one.requires_grad_(False)
    assert error_of(tp.verify_replicated, model) is None
    model[1050].data += tp.get_state().rank
    assert "1050 should be the same" in error_of(tp.verify_replicated, model)


@pytest.mark.parametrize("ranks", [(0, 1), (1,)])  # the other rank does not wait for it
@on_ranks(2, data=2)
def test_a_parameter_without_values(ranks):
    meta = tp.get_state().rank in ranks
    model = nn.Linear(2, 2, device="meta" if meta else "cpu")
    error = r"weight .* is on the meta device" if meta else r"weight .* differs on 1"
    with pytest.raises(tp.ParallelError, match=error):
        tp.verify_replicated(model)


@pytest.mark.parametrize("few", [2, 1020])
@on_ranks(2, data=2)
def test_more_parameters_on_a_rank_also_than_are_sent_at_once(few):
    model = nn.ParameterList(torch.full((), float(i)) for i in range(few))
    assert error_of(tp.verify_replicated, model) is None
    if tp.get_state().rank == 1:
        model.extend(torch.zeros(8).unbind())
    error = error_of(tp.verify_replicated, model)
    assert f"have other parameters ({few} on rank 0, {few + 8} on rank 1 compared)" in error


@on_ranks(2)
def test_shards_of_one_value_need_not_differ():
    up = tp.ColumnParallelLinear(4, 4, gather_output=False, seed=1)
    nn.init.constant_(up.weight, float("nan"))
    assert error_of(tp.verify_replicated, up) is None
    up.weight.data[0, 0] = 1.0
    told = "weight should be another one on each of them, and is the same on 0, 1"
    assert told in error_of(tp.verify_replicated, up)


@on_ranks(4, **DATA, in_processes=True)
def test_distributed_tensors_differ_where_they_are_sharded():
    state, mesh = tp.get_state(), tp.get_state().to_mesh("cpu")
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4))
    how = {"0": parallel.ColwiseParallel(), "1": parallel.RowwiseParallel()}
    parallel.parallelize_module(model, mesh["tp"], how)
    for one in model:
        fully_shard(one, mesh=mesh["dp"])
    model(torch.ones(2, 4)).sum().backward()
    tp.verify_replicated(model, gradients=True)
    with torch.no_grad():
        model[2].weight.to_local().add_(state.index("tensor"))
    error, (first, second) = error_of(tp.verify_replicated, model), state.ranks("tensor")
    assert f"tensor axis, ranks {first}, {second}:\n    2.weight should be the same" in error


@on_ranks(2, in_processes=True)
def test_streams_that_should_differ():
    model = nn.LayerNorm(2)
    tp.seed_model_parallel(7)
    assert error_of(tp.verify_replicated, model) is None
    tp.seed_model_parallel(7, tensor_rank=0)
    error = error_of(tp.verify_replicated, model)
    assert "the random stream 'model-parallel-rng' should be another one on each" in error
    assert "call seed_model_parallel(seed)" in error


def test_ranks_that_are_threads_share_their_streams():
    tp.seed_model_parallel(7)
    try:
        run_ranks(lambda: tp.verify_replicated(seeded.Mlp()), 2, tensor=2)
    finally:
        tp.get_rng_tracker().reset()
