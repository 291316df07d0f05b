import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from ezpz_tp._errors import NotInitializedError, ParallelError
from ezpz_tp._groups.default import get_state, use_state
from ezpz_tp._groups.state import ParallelState
from ezpz_tp._layers.attributes import keep_attributes, mark_sequence_parallel
from ezpz_tp._layers.linear import ColumnParallelLinear, RowParallelLinear
from ezpz_tp._regions.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from ezpz_tp._training.grads import finalize_grads
from ezpz_tp._training.norm import clip_grad_norm_, get_grad_norm
from ezpz_tp.testing import counting, run_ranks


def parameter(*shape, grad=None, dtype=torch.float64, **attributes):
    found = nn.Parameter(torch.zeros(shape, dtype=dtype))
    if grad is not None:
        found.grad = torch.full(shape, float(grad), dtype=dtype)
    for name, value in attributes.items():
        setattr(found, name, value)
    return found


def sums():
    rank = get_state().index("tensor")
    norm = parameter(3, grad=rank + 1, sequence_parallel=True)
    turned = parameter(2, 3, sequence_parallel=True)
    turned.grad = torch.arange(6.0, dtype=torch.float64).view(3, 2).t() * (rank + 1)
    weight = parameter(2, grad=rank)
    frozen = parameter(2, grad=rank, sequence_parallel=True).requires_grad_(False)
    kept = norm.grad
    with counting() as counter:
        assert finalize_grads([norm, turned, weight, frozen]) is None
    assert counter == {"all_reduce": 1}
    assert norm.grad is kept
    assert norm.grad.tolist() == [6.0] * 3
    assert turned.grad.tolist() == [[0, 12, 24], [6, 18, 30]]
    assert weight.grad.tolist() == frozen.grad.tolist() == [rank] * 2


def test_tagged_parameters_are_summed_in_one_collective():
    run_ranks(sums, 3)


def by_dtype():
    rank = get_state().index("tensor")
    wide = parameter(2, grad=rank, sequence_parallel=True)
    narrow = parameter(3, grad=rank, dtype=torch.bfloat16, sequence_parallel=True)
    # As Megatron's DDP keeps it: backward adds to main_grad, and grad is not used.
    main = parameter(2, dtype=torch.bfloat16, sequence_parallel=True)
    main.main_grad = torch.full((2,), rank + 1 / 1024)
    with counting() as counter:
        finalize_grads([wide, narrow, main])
    assert counter == {"all_reduce": 3}
    assert wide.grad.tolist() == [1, 1]
    assert narrow.grad.dtype == torch.bfloat16
    assert narrow.grad.tolist() == [1, 1, 1]
    assert main.grad is None
    assert main.main_grad.tolist() == [1 + 2 / 1024] * 2


def test_each_dtype_is_a_collective_and_main_grad_goes_first():
    run_ranks(by_dtype, 2)


def missing():
    rank = get_state().index("tensor")
    some = parameter(2, grad=5 if rank == 1 else None, sequence_parallel=True)
    nowhere = parameter(3, sequence_parallel=True)
    everywhere = parameter(1, grad=1, sequence_parallel=True)
    with counting() as counter:
        finalize_grads([some, nowhere, everywhere])
    assert counter == {"all_reduce": 1}
    assert some.grad.tolist() == [5, 5]
    assert nowhere.grad is None
    assert everywhere.grad.tolist() == [2]


def test_a_gradient_that_some_ranks_lack():
    run_ranks(missing, 2)


def alone():
    tagged = parameter(2, grad=1, sequence_parallel=True, shared=True)
    with counting() as counter:
        finalize_grads([tagged])
    assert not counter
    assert tagged.grad.tolist() == [1, 1]


def test_at_degree_one_nothing_is_sent():
    alone()
    run_ranks(alone, 2, tensor=1, data=2)


class Block(nn.Module):
    """Norm and MLP in the middle of sequence-parallel regions, on the shape [s, b, h]."""

    def __init__(self):
        super().__init__()
        settings = {"sequence_parallel": True, "dtype": torch.float64, "seed": 3}
        self.norm = nn.LayerNorm(8, dtype=torch.float64)
        self.up = ColumnParallelLinear(8, 16, gather_output=False, **settings)
        self.down = RowParallelLinear(16, 8, input_is_parallel=True, **settings)
        for one in self.norm.parameters():
            mark_sequence_parallel(one)

    def forward(self, x):
        x = scatter_to_sequence_parallel_region(x)
        x = x + self.down(self.up(self.norm(x)).sin())
        return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False)


def block_grads():
    torch.manual_seed(0)
    block = Block()
    generator = torch.Generator().manual_seed(2)
    for one in (block.norm.weight, block.norm.bias, block.down.bias):
        one.data.normal_(generator=generator)
    x = torch.randn(4, 2, 8, dtype=torch.float64, generator=generator)
    target = torch.randn(4, 2, 8, dtype=torch.float64, generator=generator)
    ((block(x) - target) ** 2).sum().backward()
    finalize_grads(block)
    return [one.grad.clone() for one in (block.norm.weight, block.norm.bias, block.down.bias)]


@pytest.mark.parametrize("degree", [2, 4])
def test_norms_and_row_parallel_biases_under_sequence_parallelism(degree):
    """Trap 6."""
    expected = block_grads()
    for found in run_ranks(block_grads, degree):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def tied():
    """Trap 9: the embedding of the first stage and its copy on the last."""
    stage = get_state().index("pipeline")
    own = ParallelState.create(pipeline=4, embedding=True)
    parameters = [parameter(2, grad=100)]
    at_an_end = stage in {0, 3}
    if at_an_end:
        marks = {"shared_embedding": True} if stage == 0 else {"shared": True}
        parameters.append(parameter(3, 2, grad=stage + 1, **marks))
    with counting() as counter:
        finalize_grads(parameters, state=own)
    assert counter == ({"all_reduce": 1} if at_an_end else {})
    assert parameters[0].grad.tolist() == [100, 100]
    if at_an_end:
        assert parameters[1].grad.unique().tolist() == [5]
        with pytest.raises(ParallelError, match=r"embedding of shape \(3, 2\).*embedding=True"):
            finalize_grads(parameters)
        finalize_grads(parameters, embedding_group=own.group("embedding"))
        assert parameters[1].grad.unique().tolist() == [10]
    own.destroy()


def test_tied_embeddings_are_summed_over_first_and_last_stage():
    run_ranks(tied, 4, pipeline=4, in_processes=True)


def both_kinds():
    """A module given, and a position embedding that is tied and sequence-parallel too."""
    state = get_state()
    module = nn.Linear(2, 2, dtype=torch.float64)
    module.weight.sequence_parallel = module.weight.shared_embedding = True
    module.weight.grad = torch.ones_like(module.weight)
    with use_state(state), counting() as counter:
        finalize_grads([module, module], embedding_group=state.group("pipeline"))
    assert counter == {"all_reduce": 2}
    assert module.weight.grad.unique().tolist() == [4]


def test_both_sums_of_one_parameter_and_modules():
    run_ranks(both_kinds, 4, tensor=2, pipeline=2)


def with_fsdp():
    state = get_state()
    mesh = state.to_mesh("cpu")["dp"]
    module = nn.Linear(3, 3, dtype=torch.float64)
    for one in module.parameters():
        mark_sequence_parallel(one)
    with keep_attributes(module):
        fully_shard(module, mesh=mesh)
    assert module.weight.sequence_parallel
    module(torch.full((1, 3), 1.0 + state.index("tensor"), dtype=torch.float64)).sum().backward()
    if state.index("tensor") == 1:
        module.bias.grad = None
    with counting() as counter:
        finalize_grads(module)
    assert counter == {"all_reduce": 1}
    with pytest.raises(ParallelError, match=r"of 1 parameters none .*keep_attributes"):
        finalize_grads(nn.Parameter(module.weight.detach()))
    # 1 and 2 from the tensor-parallel ranks; the mean over the data ranks is FSDP2's.
    assert module.weight.grad.full_tensor().unique().tolist() == [3]
    assert module.bias.grad.full_tensor().unique().tolist() == [1]


def test_shards_of_fsdp():
    run_ranks(with_fsdp, 4, tensor=2, data=2, in_processes=True)


def test_attributes_survive_to_empty():
    module = nn.Linear(2, 2, device="meta")
    mark_sequence_parallel(module.bias)
    with keep_attributes(module):
        module.to_empty(device="cpu")
    assert module.bias.sequence_parallel
    assert not hasattr(module.weight, "sequence_parallel")


def marked_but_no_groups():
    """Layers may have been given a group that nothing here knows of."""
    for attribute in ("tensor_model_parallel", "sequence_parallel"):
        marked = parameter(3, grad=1, **{attribute: True})
        for function in (finalize_grads, lambda found: clip_grad_norm_(found, 1.0)):
            with pytest.raises(NotInitializedError, match=r"from_groups\(tensor=group\)"):
                function([marked])
    finalize_grads([parameter(3, grad=1)])


def test_sharded_parameters_without_groups_are_refused():
    run_ranks(marked_but_no_groups, 2, in_processes=True, initialize=False)


def test_a_process_alone_needs_no_groups():
    marked = parameter(3, grad=1, sequence_parallel=True)
    finalize_grads([marked])
    assert marked.grad.tolist() == [1.0] * 3


def with_a_group_of_its_own():
    group = get_state().group("data")
    layers = [ColumnParallelLinear(4, 4, seed=1, tp_group=group)]
    layers[0](torch.ones(1, 4)).sum().backward()
    state = ParallelState.from_groups(tensor=group)
    norms = [get_grad_norm(layers[0], state=state).item()]
    whole = nn.Linear(4, 4)
    whole(torch.ones(1, 4)).sum().backward()
    return norms[0], get_grad_norm(whole).item()


def test_groups_of_ones_own():
    for norm, expected in run_ranks(with_a_group_of_its_own, 2, tensor=1):
        assert norm == pytest.approx(expected)
