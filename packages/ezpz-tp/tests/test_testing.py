import os
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

import ezpz_tp as tp
from ezpz_tp.testing import RankError, assert_matches_unsharded, counting, run_ranks
from ezpz_tp.testing._lattice import Part, same_on_all

BOTH = pytest.mark.parametrize("in_processes", [False, True], ids=["threads", "processes"])


tensor_rank = tp.get_tensor_parallel_rank


def sum_of_ranks(scale):
    value = torch.tensor(float(tensor_rank()))
    dist.all_reduce(value, group=tp.get_tensor_parallel_group())
    return value * scale


def positions():
    state, value = tp.get_state(), torch.ones(())
    dist.all_reduce(value, group=state.group("tensor", "pipeline"))
    return state.rank, [state.index(axis) for axis in tp.AXES], state.ranks("data"), int(value)


@BOTH
def test_degrees_are_laid_out_as_everywhere_and_several_axes_can_have_a_group(in_processes):
    how = {"data": 2, "pipeline": 2, "also": [("tensor", "pipeline")]}
    found = run_ranks(positions, 8, **how, in_processes=in_processes)
    layout = tp.RankLayout(8, tensor=2, pipeline=2)
    for rank in range(8):
        indexes = [layout.index(axis, rank) for axis in tp.AXES]
        assert found[rank] == (rank, indexes, layout.group_of("data", rank), 4)


def test_degrees_that_do_not_fit_show_the_numbers():
    with pytest.raises(tp.DegreeError, match=r"tensor 2 x context 1 x data 3 .* world_size=4"):
        run_ranks(tensor_rank, 4, tensor=2, data=3)
    with pytest.raises(ValueError, match="does not divide"):
        run_ranks(tensor_rank, 4, tensor=3)


class OddError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one}{two}")


def fail_on(rank, error, *args):
    if tensor_rank() == rank:
        raise error(*args)  # or end, by os._exit
    sum_of_ranks(1)


@BOTH
def test_the_first_failure_is_raised_at_once_with_its_rank(in_processes):
    before, failing = time.monotonic(), partial(fail_on, 1, LookupError, "of this rank only")
    with pytest.raises(LookupError, match="of this rank only") as info:
        run_ranks(failing, 3, in_processes=in_processes)
    assert time.monotonic() - before < 120
    assert "raised by rank 1 of 3" in "".join(info.value.__notes__)
    assert run_ranks(sum_of_ranks, 3, 1, in_processes=in_processes) == [3, 3, 3]


def test_a_process_that_ends_and_what_does_not_pickle():
    # A process that ends is replaced.
    with pytest.raises(RankError, match="rank 1 ended with status 7"):
        run_ranks(fail_on, 2, 1, os._exit, 7, in_processes=True)
    assert run_ranks(sum_of_ranks, 2, 1, in_processes=True) == [1, 1]
    # An error that does not pickle is told in words.
    with pytest.raises(RankError, match="OddError: ab") as info:
        run_ranks(fail_on, 2, 0, OddError, "a", "b", in_processes=True)
    assert "fail_on" in "".join(info.value.__notes__)

    with pytest.raises(TypeError, match=r"lambda.*top level of a module"):
        run_ranks(lambda: 1, 2, in_processes=True)
    with pytest.raises(TypeError, match="returned lock"):
        run_ranks(threading.Lock, 2, in_processes=True)
    assert run_ranks(partial(sum_of_ranks, scale=3), 2, in_processes=True) == [3, 3]


def one_waits(_):
    if tensor_rank() == 0:
        sum_of_ranks(1)


def rank_0_sleeps(seconds):
    if tensor_rank() == 0:
        time.sleep(seconds)


# Processes have to meet within this, too, on a machine that does ten other things.
@pytest.mark.parametrize(
    ("function", "in_processes", "timeout"),
    [(rank_0_sleeps, False, 0.5), (one_waits, False, 0.5), (one_waits, True, 9)],
)
def test_a_hang_is_a_timeout_that_says_who_and_where(function, in_processes, timeout):
    assert run_ranks(sum_of_ranks, 2, 1, in_processes=in_processes) == [1, 1]
    told = rf"(?s)of 2 ranks, 0 did not finish within {timeout} s.*in {function.__name__}"
    with pytest.raises(TimeoutError, match=told):
        run_ranks(function, 2, timeout + 2, in_processes=in_processes, timeout=timeout)
    assert run_ranks(sum_of_ranks, 2, 1, in_processes=in_processes) == [1, 1]


REFUSED = """
from functools import partial
from ezpz_tp.testing import run_ranks
def job(): pass
for one in (job, partial(job)):
    try:
        run_ranks(one, 2, in_processes=True)
    except TypeError as error:
        print(error)
"""


def test_a_function_that_no_process_can_import_is_refused():
    options = {"capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run([sys.executable, "-c", REFUSED], check=True, **options)
    assert done.stdout.count("put it in a file that can be imported") == 2
    assert "job" in done.stdout


def bare():
    return tp.tensor_parallel_is_initialized(), dist.is_initialized()


@BOTH
def test_initialization_can_be_left_to_the_function(in_processes):
    found = run_ranks(bare, 2, in_processes=in_processes, initialize=False)
    assert found == [(False, in_processes)] * 2


def test_threads_leave_nothing_behind():
    before, threads = torch.get_num_threads(), set(threading.enumerate())
    run_ranks(sum_of_ranks, 2, 1)
    assert not tp.tensor_parallel_is_initialized()
    assert torch.get_num_threads() == before
    # One of an earlier test may have ended meanwhile.
    assert set(threading.enumerate()) <= threads


def test_operations_are_made_before_threads_meet_at_them():
    # Made by two threads at once, one of them is freed while torch's C++ side still uses it.
    run_ranks(sum_of_ranks, 2, 1)
    for operation in (torch.ops.c10d.allreduce_, torch.ops.aten.index_add, torch.ops.aten.mul):
        assert {"default", "out"} & vars(operation).keys()


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, group):
        ctx.group = group
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group, async_op=True).wait()
        return gradient, None


def every_collective():
    group = tp.get_tensor_parallel_group()
    size = group.size()
    one, all_ = torch.ones(2), torch.ones(2 * size)
    with counting() as counter:
        dist.all_reduce(one.clone(), group=group)
        group.allreduce([one.clone()]).wait()
        Summed.apply(torch.ones(2, requires_grad=True), group).sum().backward()
        group._allgather_base(all_.clone(), one).wait()
        dist.all_gather([one.clone() for _ in range(size)], one, group=group)
        group._reduce_scatter_base(one.clone(), all_).wait()
        dist.all_to_all_single(torch.empty(size), torch.ones(size), group=group)
        dist.broadcast(one, group=group, group_src=0)
        dist.barrier(group=group)
        if dist.is_initialized():  # functional collectives know torch's own groups only
            functional.all_reduce(torch.ones(2), "sum", group).sum().item()
            functional.all_gather_tensor(torch.ones(2), 0, group).sum().item()
    dist.all_reduce(one, group=group)
    return counter


@BOTH
def test_every_collective_is_counted_once(in_processes):
    once = dict.fromkeys(("reduce_scatter", "all_to_all", "broadcast", "barrier"), 1)
    more = {"all_reduce": 3 + in_processes, "all_gather": 2 + in_processes}
    assert run_ranks(every_collective, 2, in_processes=in_processes) == [once | more] * 2


WIDTH = 8


class Mlp(torch.nn.Module):
    def __init__(self, mistake=None):
        super().__init__()
        self.mistake = mistake
        size = tp.get_tensor_parallel_world_size()
        self.up = torch.nn.Parameter(torch.zeros(2 * WIDTH // size, WIDTH))
        self.down = torch.nn.Parameter(torch.zeros(WIDTH, 2 * WIDTH // size))
        self.bias = torch.nn.Parameter(torch.zeros(WIDTH))
        tp.set_tensor_model_parallel_attributes(self.up, True, 0, 1)
        dim = 0 if mistake == "dim" else 1
        tp.set_tensor_model_parallel_attributes(self.down, True, dim, 1)
        if mistake == "tag":
            tp.mark_sequence_parallel(self.bias)
        if mistake == "extra":
            self.extra = torch.nn.Parameter(torch.zeros(1))

    def forward(self, value):
        if self.mistake != "copy":
            value = tp.copy_to_tensor_parallel_region(value)
        value = (value @ self.up.t()).relu() @ self.down.t()
        if self.mistake == "bias":
            value = value + self.bias
        if self.mistake != "reduce":
            value = tp.reduce_from_tensor_parallel_region(value)
        return value if self.mistake == "bias" else value + self.bias


def matches(mistake=None, **options):
    return assert_matches_unsharded(
        partial(Mlp, mistake), Mlp, torch.empty(5, WIDTH), density=0.5, **options
    )


@BOTH
def test_a_right_module_matches_and_its_collectives_are_returned(in_processes):
    assert matches(tensor=(1, 4, 2), in_processes=in_processes) == {"all_reduce": 2}
    matches(tolerance=1e-5, in_processes=in_processes)


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        ("copy", r"tensor degree 2, rank 0: gradient of input 0 differs in .* first at \[\d, \d\]"),
        ("reduce", "rank 0: output 0 differs in .* unsharded"),
        ("bias", "rank 0: output 0 differs"),
        ("tag", "gradient of bias differs"),
        ("dim", r"down has shape \(8, 8\), but the part of down \(8, 16\) .* is \(4, 16\) \(dim 0"),
        ("extra", "has a parameter extra, the unsharded one no extra, only up, down, bias; map it"),
    ],
)
def test_a_mistake_is_found_and_told(mistake, told):
    with pytest.raises(AssertionError, match=told):
        matches(mistake)
    if mistake in {"copy", "reduce"}:
        with pytest.raises(AssertionError, match="differs"):
            matches(mistake, tolerance=1e-5)


def test_replicated_tensors_have_the_same_bits():
    values = torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0])
    parts = [Part(value, tp.Shard((2,)), rank) for rank, value in enumerate(values)]
    same_on_all("x", parts[:1] * 2, 2)
    with pytest.raises(AssertionError, match=r"rank 1 has -0.0 where rank 0 has 0.0 \(value 1\)"):
        same_on_all("x", parts, 2)


class Scaled(torch.nn.Module):
    def __init__(self, first, second, more):
        super().__init__()
        self.first, self.second, self.more = first, second, more

    def forward(self, first, second=0):
        return first * self.first + second * self.second + self.more


@pytest.mark.parametrize(
    ("ahead", "more", "told"),
    [(0, 0, "output 0"), (float("nan"), 0, "output 0"), (0, 1, "all gradients")],
)
def test_a_comparison_of_nothing_is_an_error(ahead, more, told):
    module = Scaled(ahead, 0, more)
    with pytest.raises(ValueError, match=f"{told} of the unsharded module: .* raise density="):
        assert_matches_unsharded(lambda: module, lambda: module, *[torch.ones(9)] * 2)


def test_comparisons_that_show_too_little():
    # A gradient of nothing is a warning.
    module = Scaled(1, 0, 0)
    told = "gradient of input 1 of .* no finite value but 0.*density="
    with pytest.warns(UserWarning, match=told):
        assert_matches_unsharded(lambda: module, lambda: module, *[torch.ones(9)] * 2)
    # Numbers too large to be exact.
    loud, example = partial(Scaled, 300, 0, 0), torch.ones(9, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"reaches 300, but .*bfloat16 holds .* up to 256; use"):
        assert_matches_unsharded(loud, loud, example)
    # No degrees.
    with pytest.raises(ValueError, match="names no degree"):
        assert_matches_unsharded(Mlp, Mlp, torch.ones(9), tensor=())


def test_numbers_that_are_not_integers_are_pointed_at():
    one, other = (
        lambda factor=factor: torch.nn.Sequential(torch.nn.GELU(), Scaled(factor, 0, 0))
        for factor in (1 + 1e-6, 1)
    )
    with pytest.raises(AssertionError, match=r"not integer arithmetic: pass tolerance="):
        assert_matches_unsharded(one, other, torch.ones(9))
    with pytest.raises(AssertionError) as info:
        matches("reduce")
    assert "tolerance=" not in str(info.value)


def streams():
    known = tp.get_rng_tracker().is_initialized()
    tp.seed_model_parallel(1)
    return known


def test_processes_that_are_kept_forget_their_random_streams():
    for _ in range(2):
        assert run_ranks(streams, 2, in_processes=True) == [False, False]
