import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

import ezpz_tp as tp
from ezpz_tp._groups import Alone

OUT, LIST = object(), object()


@on_ranks(2, in_processes=True, initialize=False)
def test_every_collective_of_one_rank_is_a_copy_and_leaves_nothing_behind():
    rank = dist.get_rank()
    state = tp.ParallelState.create(tensor=2)
    group = state.group("data")
    assert state.size("data") == 1
    assert (dist.get_rank(group), dist.get_world_size(group)) == (0, 1)
    assert dist.get_process_group_ranks(group) == [rank]
    assert dist.get_global_rank(group, 0) == rank
    assert dist.get_backend(group) == "alone"
    x = torch.arange(6.0).reshape(3, 2) + rank
    y = x.clone()
    for work in (
        dist.all_reduce(y, group=group, async_op=True),
        dist.broadcast(y, src=rank, group=group, async_op=True),
        dist.reduce(y, dst=rank, group=group, async_op=True),
    ):
        assert work.wait()
    assert torch.equal(x, y)

    def same(call, *args, **options):
        out = torch.full_like(x, -1)
        call(*(out if arg is OUT else [out] if arg is LIST else arg for arg in args), **options)
        assert torch.equal(out, x)

    same(dist.all_gather, LIST, x, group=group)
    same(dist.all_gather_into_tensor, OUT, x, group=group)
    same(dist.reduce_scatter, OUT, [x], group=group)
    same(dist.reduce_scatter_tensor, OUT, x, group=group)
    same(dist.all_to_all, LIST, [x], group=group)
    same(dist.all_to_all_single, OUT, x, group=group)
    same(dist.gather, x, LIST, dst=rank, group=group)
    same(dist.scatter, OUT, [x], src=rank, group=group)
    with dist._coalescing_manager(group=group):
        dist.all_reduce(y, group=group)
    assert torch.equal(x, y)
    dist.barrier(group=group)
    # As all_gather_object sends an object; itself it needs numpy.
    data = torch.frombuffer(bytearray(b"an object"), dtype=torch.uint8)
    received = torch.empty_like(data)
    dist.all_gather([received], data, group=group)
    assert bytes(received.tolist()) == b"an object"
    with pytest.raises(tp.ParallelError, match="there is no peer"):
        group.send([x], 0, 0)
    for call in (
        functional.all_reduce(x, "sum", group),
        functional.all_gather_tensor(x, 0, group),
        functional.reduce_scatter_tensor(x, "sum", 0, group),
        functional.all_to_all_single(x, None, None, group),
        functional.broadcast(x, 0, group),
    ):
        assert torch.equal(functional.wait_tensor(call), x)
    # A world of two, and still nothing was sent: the other rank's values never came.
    gone = weakref.ref(group)
    tables = dist.distributed_c10d._world
    assert group in tables.pg_map
    state.destroy()
    del group
    gc.collect()
    assert gone() is None
    assert len(tables.pg_map) == 1
    assert len(tables.pg_group_ranks) == 1
    # DistributedDataParallel over an axis of degree one.
    rank = dist.get_rank()
    state = tp.ParallelState.create(tensor=2)
    torch.manual_seed(rank)
    model = nn.Linear(4, 3)
    wrapped = DistributedDataParallel(model, process_group=state.group("data"))
    x = torch.randn(5, 4)
    wrapped(x).square().sum().backward()
    (expected,) = torch.autograd.grad(model(x).square().sum(), model.weight)
    assert torch.equal(model.weight.grad, expected)
    state.destroy()


def test_without_torch_distributed():
    group = Alone(0)
    assert (group.rank(), group.size()) == (0, 1)
    x = torch.ones(2)
    group.allreduce([x]).wait()
    assert torch.equal(x, torch.ones(2))
    group.forget()
