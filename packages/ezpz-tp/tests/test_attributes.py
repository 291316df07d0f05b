import copy
import pickle

import pytest
import torch
from ranks import on_ranks
from torch import nn

import ezpz_tp as tp


def said(tensor):
    return tensor.tensor_model_parallel, tensor.partition_dim, tensor.partition_stride


def test_what_is_set_is_set_once():
    param = nn.Parameter(torch.zeros(3, 2))
    tp.set_tensor_model_parallel_attributes(param, True, 1, 2)
    tp.set_tensor_model_parallel_attributes(param, True, 1, 2)
    assert said(param) == (True, 1, 2)
    with pytest.raises(tp.ParallelError, match=r"partition_dim .*\(3, 2\) is already 1, and 0 is"):
        tp.set_tensor_model_parallel_attributes(param, True, 0, 2)
    assert said(param) == (True, 1, 2)


def test_defaults_fill_what_is_not_set():
    param = nn.Parameter(torch.zeros(1))
    param.partition_dim = 0
    tp.set_defaults_if_not_set_tensor_model_parallel_attributes(param)
    assert said(param) == (False, 0, 1)


def test_a_copy_says_what_its_source_says_and_keeps_the_rest():
    source, copied = torch.zeros(1), torch.zeros(1)
    tp.set_tensor_model_parallel_attributes(source, True, 0, 1)
    source.allreduce = False
    tp.mark_sequence_parallel(source)
    copied.shared = True
    tp.copy_tensor_model_parallel_attributes(copied, source)
    assert said(copied) == (True, 0, 1)
    assert (copied.allreduce, copied.sequence_parallel, copied.shared) == (False, True, True)


@on_ranks(4, tensor=2, data=2)
def test_replicated_parameters_count_on_the_first_rank():
    state, count = tp.get_state(), tp.param_is_not_tensor_parallel_duplicate
    tensor, data = state.group("tensor"), state.group("data")
    whole, part, expert = torch.zeros(1), torch.zeros(1), torch.zeros(1)
    part.tensor_model_parallel = True
    expert.allreduce = False
    assert count(whole) == count(whole, tensor, data) == (tensor.rank() == 0)
    assert count(part)
    assert count(whole, data) == count(expert, tensor, data) == (data.rank() == 0)


def test_alone_every_parameter_counts():
    assert tp.param_is_not_tensor_parallel_duplicate(torch.zeros(1))


def layers(device=None):
    return nn.ModuleDict(
        {
            "column": tp.ColumnParallelLinear(4, 8, stride=2, seed=1, device=device),
            "row": tp.RowParallelLinear(8, 4, sequence_parallel=True, seed=2, device=device),
            "rows": tp.VocabParallelEmbedding(9, 4, seed=3, device=device),
            "columns": tp.ParallelEmbedding(9, 4, seed=4, device=device),
        }
    )


def attributes_of(module):
    return {name: dict(vars(param)) for name, param in module.named_parameters()}


@on_ranks(2)
def test_attributes_of_layers_survive_copies_and_moves():
    module = layers()
    assert said(module["column"].weight) == said(module["column"].bias) == (True, 0, 2)
    assert said(module["row"].weight) == (True, 1, 1)
    assert module["row"].bias.sequence_parallel
    assert said(module["rows"].weight) == (True, 0, 1)
    assert said(module["columns"].weight) == (True, 1, 1)
    before = attributes_of(module)
    assert attributes_of(copy.deepcopy(module)) == before
    assert attributes_of(module.double().to(torch.bfloat16)) == before
    on_meta = layers("meta")
    assert attributes_of(on_meta) == before
    assert attributes_of(on_meta.to_empty(device="cpu")) == before


def test_attributes_of_a_whole_layer_and_pickling():
    layer = tp.VocabParallelEmbedding(9, 4, seed=3)
    assert said(layer.weight) == (False, 0, 1)
    assert said(pickle.loads(pickle.dumps(layer)).weight) == (False, 0, 1)


@on_ranks(2)
def test_assigned_parameters_are_said_what_those_before_were():
    """Meta construction, then the checkpoint's own tensors as parameters."""
    whole = nn.Sequential(tp.ColumnParallelLinear(4, 8, seed=1), nn.LayerNorm(8))
    tp.mark_sequence_parallel(whole[1].weight)
    states = {name: value.clone() for name, value in whole.state_dict().items()}
    model = nn.Sequential(
        tp.ColumnParallelLinear(4, 8, device="meta"), nn.LayerNorm(8, device="meta")
    )
    tp.mark_sequence_parallel(model[1].weight)
    with tp.keep_attributes(model):
        model.load_state_dict(states, assign=True)
    layer = tp.ColumnParallelLinear(4, 8, device="meta")
    layer.load_state_dict({"weight": states["0.weight"], "bias": states["0.bias"]}, assign=True)
    assert said(model[0].weight) == (True, 0, 1)
    assert model[1].weight.sequence_parallel
    assert said(layer.bias) == (True, 0, 1)


def test_of_a_copied_module_it_can_be_said_again():
    norm = nn.LayerNorm(4)
    tp.mark_sequence_parallel(norm.weight)
    twin = copy.deepcopy(norm)
    assert not hasattr(twin.weight, "sequence_parallel")
    tp.copy_attributes(norm, twin)
    assert twin.weight.sequence_parallel
    assert not hasattr(twin.bias, "sequence_parallel")


@on_ranks(2)
def test_a_parametrized_layer_works_and_is_copied_with_its_attributes():
    layer = tp.ColumnParallelLinear(4, 8, seed=1)
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Identity())
    before = layer(torch.ones(1, 4))
    original = copy.deepcopy(layer).parametrizations.weight.original
    assert said(original) == (True, 0, 1)
    assert torch.equal(before, tp.ColumnParallelLinear(4, 8, seed=1)(torch.ones(1, 4)))


def test_what_megatrons_optimizers_ask_is_copied():
    source, copy = torch.ones(2), torch.ones(2)
    source.is_qkv, source.qkv_split_shapes, source.expert_tp = True, (2, 1, 1), True
    tp.copy_tensor_model_parallel_attributes(copy, source)
    assert (copy.is_qkv, copy.qkv_split_shapes, copy.expert_tp) == (True, (2, 1, 1), True)
