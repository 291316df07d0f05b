import os
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

import ezpz_tp as tp
from ezpz_tp.testing import RankError, assert_matches_unsharded, counting, run_ranks

tensor_rank = tp.get_tensor_parallel_rank


def sum_of_ranks(scale=1):
    value = torch.tensor(float(tensor_rank()))
    dist.all_reduce(value, group=tp.get_tensor_parallel_group())
    return value * scale


def positions():
    state = tp.get_state()
    value = torch.ones(())
    dist.all_reduce(value, group=state.group("tensor", "pipeline"))
    return state.rank, [state.index(axis) for axis in tp.AXES], state.ranks("data"), int(value)


def test_degrees_are_laid_out_as_everywhere_and_several_axes_can_have_a_group():
    found = run_ranks(positions, 8, data=2, pipeline=2, also=[("tensor", "pipeline")])
    layout = tp.RankLayout(8, tensor=2, pipeline=2)
    for rank in range(8):
        indexes = [layout.index(axis, rank) for axis in tp.AXES]
        assert found[rank] == (rank, indexes, layout.group_of("data", rank), 4)


def test_degrees_that_do_not_fit_show_the_numbers():
    with pytest.raises(tp.DegreeError, match=r"data=3, but world_size=4, tensor=2, .* leave 2;"):
        run_ranks(tensor_rank, 4, tensor=2, data=3)
    with pytest.raises(ValueError, match="does not divide"):
        run_ranks(tensor_rank, 4, tensor=3)


def test_local_functions_lambdas_and_partials_run_on_ranks():
    def count_down(number):
        return number if number == 0 else count_down(number - step)

    step = 2
    assert run_ranks(lambda *, number=6: count_down(number), 2) == [0, 0]
    assert run_ranks(partial(sum_of_ranks, scale=3), 2) == [3, 3]
    with pytest.raises(AttributeError, match="local object"):
        run_ranks(type("Local", (), {"__qualname__": "f.<locals>.Local"}), 2)
    with pytest.raises(TypeError, match="cannot pickle"):
        run_ranks(os.scandir, 2)


def test_a_call_in_a_program_that_a_rank_imports_says_where_it_belongs():
    with pytest.raises(tp.ParallelError, match='below `if __name__ == "__main__":`'):
        run_ranks(partial(run_ranks, sum_of_ranks, 2), 2)


class OddError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one}{two}")


def fail_on(rank, error, *args):
    if tensor_rank() == rank:
        raise error(*args)  # or end, by os._exit
    sum_of_ranks()


def test_the_first_failure_is_raised_at_once_with_its_rank():
    before = time.monotonic()
    with pytest.raises(LookupError, match="of this rank only") as info:
        run_ranks(fail_on, 3, 1, LookupError, "of this rank only")
    assert time.monotonic() - before < 120
    assert "raised by rank 1 of 3" in "".join(info.value.__notes__)
    assert run_ranks(sum_of_ranks, 3) == [3, 3, 3]


def test_a_process_that_ends_and_an_error_that_does_not_pickle():
    with pytest.raises(RankError, match="rank 1 ended with status 7"):
        run_ranks(fail_on, 2, 1, os._exit, 7)
    assert run_ranks(sum_of_ranks, 2) == [1, 1]
    with pytest.raises(RankError, match="OddError: ab") as info:
        run_ranks(fail_on, 2, 0, OddError, "a", "b")
    assert "fail_on" in "".join(info.value.__notes__)


def one_waits():
    if tensor_rank() == 0:
        sum_of_ranks()


@pytest.mark.slow
def test_a_hang_is_a_timeout_that_says_who_and_where():
    assert run_ranks(sum_of_ranks, 2) == [1, 1]
    told = r"(?s)of 2 ranks, 0 did not finish within 9 s.*in one_waits"
    with pytest.raises(TimeoutError, match=told):
        # The ranks have to meet within this, too, on a machine that does ten other things.
        run_ranks(one_waits, 2, timeout=9)
    assert run_ranks(sum_of_ranks, 2) == [1, 1]


def bare():
    return tp.tensor_parallel_is_initialized(), dist.is_initialized()


def test_initialization_can_be_left_to_the_function():
    assert run_ranks(bare, 2, initialize=False) == [(False, True)] * 2


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
        functional.all_reduce(torch.ones(2), "sum", group).sum().item()
        functional.all_gather_tensor(torch.ones(2), 0, group).sum().item()
    dist.all_reduce(one, group=group)
    return counter


def test_every_collective_is_counted_once():
    once = dict.fromkeys(("reduce_scatter", "all_to_all", "broadcast", "barrier"), 1)
    more = {"all_reduce": 4, "all_gather": 3}
    assert run_ranks(every_collective, 2) == [once | more] * 2


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


def test_a_right_module_matches_and_its_collectives_are_returned():
    assert matches(tensor=(1, 4, 2)) == {"all_reduce": 2}
    matches(tolerance=1e-5)


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        ("copy", r"tensor degree 2, rank \d: gradient of input 0 differs.*at index \(\d, \d\)"),
        ("reduce", r"rank \d: output 0 differs.*torch.float32 holds exactly, pass tolerance="),
        ("bias", r"rank \d: output 0 differs"),
        ("tag", "gradient of bias differs"),
        ("dim", r"down has shape \(8, 8\), but the part of \(8, 16\) .* is \(4, 16\) \(dim 0"),
        ("extra", "has a parameter extra, the unsharded one only up, down, bias"),
    ],
)
def test_a_mistake_is_found_and_told(mistake, told):
    with pytest.raises(AssertionError, match=f"(?s){told}"):
        matches(mistake)
    if mistake in {"copy", "reduce"}:
        with pytest.raises(AssertionError, match="differs"):
            matches(mistake, tolerance=1e-5)


class Scaled(torch.nn.Module):
    def __init__(self, first, second, more):
        super().__init__()
        self.first, self.second, self.more = first, second, more

    def forward(self, first, second=0):
        return first * self.first + second * self.second + self.more


@pytest.mark.parametrize(
    ("ahead", "more", "told"),
    [(0, 0, "output 0"), (float("nan"), 0, "output 0"), (0, 1, "gradient of input 0")],
)
def test_a_comparison_of_nothing_is_an_error(ahead, more, told):
    module = Scaled(ahead, 0, more)
    with pytest.raises(ValueError, match=f"{told}.* of the unsharded module: .* raise density="):
        assert_matches_unsharded(lambda: module, lambda: module, *[torch.ones(9)] * 2)


def test_a_comparison_at_no_degree_is_an_error():
    with pytest.raises(ValueError, match="names no degree"):
        assert_matches_unsharded(Mlp, Mlp, torch.ones(9), tensor=())


def streams():
    known = tp.get_rng_tracker().is_initialized()
    tp.seed_model_parallel(1)
    return known


def test_processes_that_are_kept_forget_their_random_streams():
    for _ in range(2):
        assert run_ranks(streams, 2) == [False, False]
