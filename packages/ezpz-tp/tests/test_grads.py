import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

import ezpz_tp as tp
from ezpz_tp.testing import counting, run_ranks


def parameter(*shape, grad=None, dtype=torch.float64, **attributes):
    found = nn.Parameter(torch.zeros(shape, dtype=dtype))
    if grad is not None:
        found.grad = torch.full(shape, float(grad), dtype=dtype)
    for name, value in attributes.items():
        setattr(found, name, value)
    return found


@on_ranks(3)
def test_tagged_parameters_are_summed_in_one_collective():
    rank = tp.get_state().index("tensor")
    norm = parameter(3, grad=rank + 1, sequence_parallel=True)
    turned = parameter(2, 3, sequence_parallel=True)
    turned.grad = torch.arange(6.0, dtype=torch.float64).view(3, 2).t() * (rank + 1)
    weight = parameter(2, grad=rank)
    frozen = parameter(2, grad=rank, sequence_parallel=True).requires_grad_(False)
    kept = norm.grad
    with counting() as counter:
        assert tp.finalize_grads([norm, turned, weight, frozen]) is None
    assert counter == {"all_reduce": 1}
    assert norm.grad is kept
    assert norm.grad.tolist() == [6.0] * 3
    assert turned.grad.tolist() == [[0, 12, 24], [6, 18, 30]]
    assert weight.grad.tolist() == frozen.grad.tolist() == [rank] * 2


@on_ranks(2)
def test_each_dtype_is_a_collective_and_main_grad_goes_first():
    rank = tp.get_state().index("tensor")
    wide = parameter(2, grad=rank, sequence_parallel=True)
    narrow = parameter(3, grad=rank, dtype=torch.bfloat16, sequence_parallel=True)
    # As Megatron's DDP keeps it: backward adds to main_grad, and grad is not used.
    main = parameter(2, dtype=torch.bfloat16, sequence_parallel=True)
    main.main_grad = torch.full((2,), rank + 1 / 1024)
    with counting() as counter:
        tp.finalize_grads([wide, narrow, main])
    assert counter == {"all_reduce": 3}
    assert wide.grad.tolist() == [1, 1]
    assert narrow.grad.dtype == torch.bfloat16
    assert narrow.grad.tolist() == [1, 1, 1]
    assert main.grad is None
    assert main.main_grad.tolist() == [1 + 2 / 1024] * 2


@on_ranks(2)
def test_a_gradient_that_some_ranks_lack():
    rank = tp.get_state().index("tensor")
    some = parameter(2, grad=5 if rank == 1 else None, sequence_parallel=True)
    nowhere = parameter(3, sequence_parallel=True)
    everywhere = parameter(1, grad=1, sequence_parallel=True)
    with counting() as counter:
        tp.finalize_grads([some, nowhere, everywhere])
    assert counter == {"all_reduce": 1}
    assert some.grad.tolist() == [5, 5]
    assert nowhere.grad is None
    assert everywhere.grad.tolist() == [2]


def alone():
    tagged = parameter(2, grad=1, sequence_parallel=True, shared=True)
    with counting() as counter:
        tp.finalize_grads([tagged])
        tp.finalize_grads(tagged, average_over="context")
    assert not counter
    assert tagged.grad.tolist() == [1, 1]


def test_at_degree_one_nothing_is_sent():
    alone()
    run_ranks(alone, 2, tensor=1, data=2)


@on_ranks(4, pipeline=4, in_processes=True)
def test_tied_embeddings_are_summed_over_first_and_last_stage():
    """Trap 9: the embedding of the first stage and its copy on the last."""
    stage = tp.get_state().index("pipeline")
    own = tp.ParallelState.create(pipeline=4, embedding=True)
    parameters = [parameter(2, grad=100)]
    at_an_end = stage in {0, 3}
    if at_an_end:
        marks = {"shared_embedding": True} if stage == 0 else {"shared": True}
        parameters.append(parameter(3, 2, grad=stage + 1, **marks))
    with counting() as counter:
        tp.finalize_grads(parameters, state=own)
    assert counter == ({"all_reduce": 1} if at_an_end else {})
    assert parameters[0].grad.tolist() == [100, 100]
    if at_an_end:
        assert parameters[1].grad.unique().tolist() == [5]
        with pytest.raises(tp.ParallelError, match=r"embedding of shape \(3, 2\).*embedding=True"):
            tp.finalize_grads(parameters)
        tp.finalize_grads(parameters, embedding_group=own.group("embedding"))
        assert parameters[1].grad.unique().tolist() == [10]
    own.destroy()


@on_ranks(4, tensor=2, pipeline=2)
def test_both_sums_of_one_parameter_and_modules():
    """A module given, and a position embedding that is tied and sequence-parallel too."""
    state = tp.get_state()
    module = nn.Linear(2, 2, dtype=torch.float64)
    module.weight.sequence_parallel = module.weight.shared_embedding = True
    module.weight.grad = torch.ones_like(module.weight)
    with tp.use_state(state), counting() as counter:
        tp.finalize_grads([module, module], embedding_group=state.group("pipeline"))
    assert counter == {"all_reduce": 2}
    assert module.weight.grad.unique().tolist() == [4]


@on_ranks(4, tensor=2, data=2, in_processes=True)
def test_shards_of_fsdp():
    state = tp.get_state()
    mesh = state.to_mesh("cpu")["dp"]
    module = nn.Linear(3, 3, dtype=torch.float64)
    for one in module.parameters():
        tp.mark_sequence_parallel(one)
    with tp.keep_attributes(module):
        fully_shard(module, mesh=mesh)
    assert module.weight.sequence_parallel
    module(torch.full((1, 3), 1.0 + state.index("tensor"), dtype=torch.float64)).sum().backward()
    if state.index("tensor") == 1:
        module.bias.grad = None
    with counting() as counter:
        tp.finalize_grads(module)
    assert counter == {"all_reduce": 1}
    with pytest.raises(tp.ParallelError, match=r"of 1 parameters none .*keep_attributes"):
        tp.finalize_grads(nn.Parameter(module.weight.detach()))
    # 1 and 2 from the tensor-parallel ranks; the mean over the data ranks is FSDP2's.
    assert module.weight.grad.full_tensor().unique().tolist() == [3]
    assert module.bias.grad.full_tensor().unique().tolist() == [1]


def test_attributes_survive_to_empty():
    module = nn.Linear(2, 2, device="meta")
    tp.mark_sequence_parallel(module.bias)
    with tp.keep_attributes(module):
        module.to_empty(device="cpu")
    assert module.bias.sequence_parallel
    assert not hasattr(module.weight, "sequence_parallel")


@on_ranks(2, in_processes=True, initialize=False)
def test_sharded_parameters_without_groups_are_refused():
    """Layers may have been given a group that nothing here knows of."""
    for attribute in ("tensor_model_parallel", "sequence_parallel"):
        marked = parameter(3, grad=1, **{attribute: True})
        for function in (tp.finalize_grads, lambda found: tp.clip_grad_norm_(found, 1.0)):
            with pytest.raises(tp.NotInitializedError, match=r"from_groups\(tensor=group\)"):
                function([marked])
    tp.finalize_grads([parameter(3, grad=1)])


@on_ranks(2, tensor=1)
def test_groups_of_ones_own():
    group = tp.get_state().group("data")
    layer, whole = tp.ColumnParallelLinear(4, 4, seed=1, tp_group=group), nn.Linear(4, 4)
    whole.load_state_dict(tp.ColumnParallelLinear(4, 4, seed=1).state_dict())
    for module in (layer, whole):
        module(torch.ones(1, 4)).sum().backward()
    found = tp.get_grad_norm(layer, state=tp.ParallelState.from_groups(tensor=group))
    assert found.item() == pytest.approx(tp.get_grad_norm(whole).item())


BOTH = ("data", "context")


@pytest.mark.parametrize("joined", [False, True])
def test_reductions_over_data_and_context(joined):
    """Averages and sums over data and context, in one collective where one group has both."""

    def over_axes():
        state = tp.get_state()
        data, context = state.index("data"), state.index("context")
        one = parameter(2, 3, grad=10 * data + context + 1)
        # Ranks that lack a gradient, or all of them: counted as zero, and left as it is.
        two = parameter(2, grad=8 if data == 1 else None)
        three = parameter(2)
        frozen = parameter(2, grad=context).requires_grad_(False)
        with counting() as counter:
            tp.finalize_grads([one, two, three, frozen], sum_over=BOTH)
        assert counter == {"all_reduce": 1 if joined else 2}
        assert one.grad.unique().tolist() == [26]
        assert two.grad.tolist() == [16, 16]
        assert three.grad is None
        assert frozen.grad.tolist() == [context] * 2
        for axes, wanted in [
            ({"average_over": BOTH}, 6.5),
            ({"average_over": "data"}, 6 + context),
            ({"sum_over": ["context"]}, 20 * data + 3),
            ({"average_over": "data", "sum_over": "context"}, 13),
            ({}, 10 * data + context + 1),
        ]:
            one.grad.fill_(10 * data + context + 1)
            tp.finalize_grads(one, **axes)
            assert one.grad.unique().tolist() == [wanted], axes

    # The tensor axis leaves no group that happens to have both.
    run_ranks(over_axes, 8, tensor=2, data=2, context=2, also=[BOTH] if joined else [])


@pytest.mark.parametrize(("size", "sent"), [(48, 3), (10, 5), (10**6, 1)])
def test_what_is_sent_at_once_is_bounded(size, sent, monkeypatch):
    monkeypatch.setattr("ezpz_tp._grads._BUCKET", size)

    def in_buckets():
        rank = tp.get_state().index("data")
        parameters = [parameter(3, grad=rank + index) for index in range(5)]
        with counting() as counter:
            tp.finalize_grads(parameters, average_over="data")
        assert counter == {"all_reduce": sent}
        assert [one.grad.tolist() for one in parameters] == [[n + 0.5] * 3 for n in range(5)]

    run_ranks(in_buckets, 2, data=2)


@on_ranks(4, tensor=2, data=2)
def test_reductions_beside_those_over_the_tensor_axis():
    """Both sums of one parameter: over tensor, and over data."""
    state = tp.get_state()
    both = parameter(2, grad=state.index("tensor") + 10 * state.index("data"))
    both.sequence_parallel = True
    tp.finalize_grads(both, average_over="data")
    assert both.grad.tolist() == [11, 11]


@on_ranks(4, data=4)
def test_averages_do_not_overflow():
    """The mean of numbers whose sum fp16 cannot hold."""
    large = parameter(2, grad=40000, dtype=torch.float16)
    tp.finalize_grads(large, average_over="data")
    assert large.grad.tolist() == [40000, 40000]


def padded_tokens():
    """Ranks with unequally many tokens: sums of what each divides by the number in all."""
    state = tp.get_state()
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    kept = torch.tensor([1, 1, 1, 0, 1, 0, 0, 0], dtype=torch.float64)
    weight = parameter(3)
    place, count = state.index(*BOTH), state.size(*BOTH)
    mine = slice(place * 8 // count, (place + 1) * 8 // count)
    (((tokens[mine] @ weight).exp() * kept[mine]).sum() / kept.sum()).backward()
    tp.finalize_grads(weight, sum_over=BOTH)
    return weight.grad


def test_sums_are_right_where_ranks_have_unequally_many_tokens():
    (wanted,) = run_ranks(padded_tokens, 1)
    for found in run_ranks(padded_tokens, 4, data=2, context=2, also=[BOTH]):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "axes", [{"sum_over": "tensor"}, {"average_over": BOTH, "sum_over": "data"}], ids=str
)
def test_axes_that_are_not_to_be_reduced_over(axes):
    with pytest.raises(ValueError, match="expected data, context or both, each once"):
        tp.finalize_grads(parameter(2, grad=1), **axes)


@on_ranks(2, data=2, in_processes=True)
def test_experts_are_not_reduced_over_the_models_axes():
    own = tp.ParallelState.create(expert=2)
    expert = parameter(2, grad=1, allreduce=False)
    with pytest.raises(tp.ParallelError, match=r"expert's parameter of shape \(2,\).*expert_data"):
        tp.finalize_grads(expert, average_over="data", state=own)
    tp.finalize_grads(parameter(2, grad=1), average_over="data", state=own)
    own.destroy()


@on_ranks(2, in_processes=True, initialize=False)
def test_axes_need_groups():
    with pytest.raises(tp.NotInitializedError, match="data x context"):
        tp.finalize_grads(parameter(2, grad=1), sum_over=BOTH)


def test_sparse_gradients_are_refused():
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    told = r"a parameter of shape \(4, 2\) is torch\.sparse_coo; expected a dense one.*sparse=False"
    with pytest.raises(tp.ParallelError, match=told):
        run_ranks(lambda: tp.finalize_grads(table, average_over="data"), 2, data=2)
