"""Where both need nothing moved, DTensor finds the same placements as the calculator."""

from itertools import product

import pytest
import torch
import torch.distributed as dist

import ezpz_tp as tp


@pytest.fixture(scope="module")
def mesh():
    """Two axes of two ranks, of which this is one; its collectives would do nothing."""
    from torch.distributed.tensor import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    dist.destroy_process_group()


def tensor(size, placements, mesh):
    from torch.distributed.tensor import DTensor, Shard

    shape = [8] * size
    for degree, placement in zip(mesh.shape, placements, strict=True):
        if isinstance(placement, Shard):
            shape[placement.dim] //= degree
    return DTensor.from_local(torch.ones(shape), mesh, placements, run_check=False)


def agrees(equation, mesh, *placements):
    """Whether DTensor did it without a collective; then it must have found the same."""
    from torch.distributed.tensor import Partial, Replicate
    from torch.distributed.tensor.debug import CommDebugMode

    operands, output = equation.split("->")[0].split(","), equation.split("->")[1]
    try:
        answer = tp.einsum_sharding(equation, *placements, mesh_axes=mesh.mesh_dim_names)
    except tp.ParallelError:
        return False
    if answer.forward:
        return False
    inputs = [
        tensor(len(letters), places, mesh).requires_grad_()
        for letters, places in zip(operands, placements, strict=True)
    ]
    incoming = [Replicate() if p == Partial() else p for p in answer.placements()]
    with CommDebugMode() as communication:
        try:
            y = torch.einsum(equation, *inputs)
            gradients = torch.autograd.grad(y, inputs, tensor(len(output), incoming, mesh))
        except RuntimeError as error:
            if "Sharding propagation failed" not in str(error):
                raise
            return False  # its views cannot flatten dims that are sharded as these are
    if communication.get_total_counts():
        return False
    assert y.placements == answer.placements(), (equation, placements)
    for name, gradient in zip(answer.names, gradients, strict=True):
        assert gradient.placements == answer.placements(f"d{name}"), (equation, placements, name)
    return True


def places(dims):
    from torch.distributed.tensor import Partial, Replicate, Shard

    return [Replicate(), Partial(), *map(Shard, range(dims))]


@pytest.mark.parametrize(
    ("equation", "legal"), [("ab,bc->ac", 6), ("bsh,hf->bsf", 7), ("bhqd,bhkd->bhqk", 8)]
)
def test_every_placement_over_one_axis(mesh, equation, legal):
    operands = equation.split("->")[0].split(",")
    found = [
        agrees(equation, mesh["tensor"], *((place,) for place in given))
        for given in product(*(places(len(letters)) for letters in operands))
    ]
    assert sum(found) == legal
