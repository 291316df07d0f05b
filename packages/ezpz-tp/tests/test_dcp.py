"""Shards in and out of torch.distributed.checkpoint, at other degrees and in other programs."""

import copy
from importlib.util import find_spec

import pytest
import torch
import torch.distributed.checkpoint as dcp
from files import assert_same, load_dcp, save_dcp, torch_finds
from on_ranks import on_ranks
from test_state_dict import Model, Stage, adam_of, own_stage
from torch import nn
from torch.distributed.checkpoint import state_dict as torchs
from torch.distributed.tensor import DTensor, Replicate, Shard

import ezpz_tp
from ezpz_tp import (
    ColumnParallelLinear,
    DegreeError,
    ParallelError,
    RowParallelLinear,
    dtensor_state_dict,
    load_dtensor_state_dict,
)
from ezpz_tp._state_dict import gather_state_dict
from ezpz_tp.testing import run_ranks

# By which torch sends objects between ranks.
needs_numpy = pytest.mark.skipif(find_spec("numpy") is None, reason="no numpy")
# What torch says of a program without a process group, which is what is tested then.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

EXTRA = {"step": 2, "rates": [0.1, None]}


def save_part(path, make):
    module = make()
    return save_dcp(path, module, adam_of(module), extra=EXTRA)


def save(path, make=Model, ranks=4, **degrees):
    """Write a checkpoint; return the whole state."""
    return run_ranks(save_part, ranks, str(path), make, **degrees)[0]


def load(path, make=Model):
    """Load it into a model and an optimizer that have other values, and return the whole state."""
    module = make()
    optimizer = adam_of(module, lr=0.25, betas=(0.1, 0.2))
    values = [value for state in optimizer.state.values() for value in state.values()]
    with torch.no_grad():
        for value in [*module.parameters(), *module.buffers(), *values]:
            value.fill_(7)
    extra = {"step": 0}
    found = load_dcp(path, module, optimizer, extra=extra)
    assert extra == {"step": 2}
    return found


def one_stage():
    return Stage(0, 1)


@pytest.mark.slow
@needs_numpy
def test_saved_by_two_and_loaded_by_four_by_two_and_by_one(tmp_path):
    path = tmp_path / "a"
    expected = save(path, tensor=2, data=2)
    full = expected["model"]
    assert full["embedding.weight"].shape == (45, 16)
    held = torch_finds(path)  # as any program does: full tensors by flattened names
    assert torch.equal(held["model"]["embedding.weight"], full["embedding.weight"])
    halves = [held["model"][f"glu.weight.block{number}"] for number in range(2)]
    assert torch.equal(torch.cat(halves), full["glu.weight"])
    state = held["optimizer"]["state"]["head.weight"]
    assert_same(state, expected["optimizer"]["state"]["head.weight"])
    assert held["optimizer"]["param_groups"]["norm.bias"]["lr"] == 0.5
    for degree in (4, 2):
        for found in run_ranks(load, degree, path):
            assert_same(found, expected)
    assert_same(load(path), expected)  # plain torch, without a process group


@needs_numpy
def test_a_pipeline_and_no_pipeline(tmp_path):
    expected = save(tmp_path / "a", own_stage, tensor=2, pipeline=2)
    assert_same(load(tmp_path / "a", one_stage), expected)
    for found in run_ranks(load, 2, tmp_path / "a", own_stage, pipeline=2):
        assert_same(found, expected)


def plain(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6), nn.LayerNorm(6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 * seed)
    model(torch.ones(2, 6)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def load_what_torch_saved(path):
    model = nn.Sequential(
        ColumnParallelLinear(6, 12, gather_output=False),
        nn.GELU(),
        RowParallelLinear(12, 6, input_is_parallel=True),
        nn.LayerNorm(6),
    )
    return load_dcp(path, model, torch.optim.AdamW(model.parameters(), lr=0.5))


@needs_numpy
def test_what_torch_saved_of_its_own_layers_and_what_it_reads(tmp_path):
    flat = torchs.StateDictOptions(flatten_optimizer_state_dict=True)
    path, other = str(tmp_path / "a"), str(tmp_path / "b")
    model, optimizer = plain(1)
    weights, state = torchs.get_state_dict(model, optimizer, options=flat)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
    for found in run_ranks(load_what_torch_saved, 2, path):
        assert_same(found["model"], dict(model.state_dict()))
        assert found["optimizer"]["param_groups"][0]["lr"] == 1e-2
        for name, parameter in model.named_parameters():
            assert_same(found["optimizer"]["state"][name], optimizer.state[parameter])

    save_dcp(other, model, optimizer)
    again, its = plain(2)
    weights, state = torchs.get_state_dict(again, its, options=flat)
    held = {"model": weights, "optimizer": state}
    dcp.load(held, checkpoint_id=other)
    found = {"model_state_dict": weights, "optim_state_dict": held["optimizer"]}
    torchs.set_state_dict(again, its, **found, options=flat)
    assert_same(dict(again.state_dict()), dict(model.state_dict()))
    assert_same(its.state_dict()["state"], optimizer.state_dict()["state"])
    assert its.param_groups[0]["lr"] == 1e-2


def save_a_small_vocabulary(path):
    return save_dcp(path, ezpz_tp.VocabParallelEmbedding(5, 8, seed=1))  # 2, 2, 1 and 0 rows


@needs_numpy
def test_a_rank_without_rows(tmp_path):
    path = str(tmp_path / "a")
    expected = run_ranks(save_a_small_vocabulary, 4, path)[0]
    assert_same(load_dcp(path, ezpz_tp.VocabParallelEmbedding(5, 8, seed=3)), expected)


@on_ranks(4, tensor=2, data=2)
def test_what_is_split_is_a_dtensor_and_the_rest_is_plain():
    model = Model()
    held = dtensor_state_dict(model)
    found = {name: value for name, value in held.items() if isinstance(value, DTensor)}
    for name, value in found.items():
        dim = 1 if name.startswith(("down.weight", "columns.")) else 0
        assert value.placements == (Shard(dim),)
        assert value.device_mesh.size() == 2
        assert value.full_tensor().shape == value.shape
    whole = found["glu.weight.block1"].redistribute(placements=[Replicate()]).to_local()
    full = gather_state_dict(model)
    assert torch.equal(whole, full["glu.weight"][24:])
    held["down.weight.block1"].to_local().fill_(3)  # views
    assert model.down.weight[:, 8:].eq(3).all()
    assert held["glu.bias.block0"].shape == (24,)
    assert held["head.weight"].shape == held["embedding.weight"].shape == (45, 16)
    assert {"scale", "frozen", "norm.weight", "down.bias"} <= held.keys() - found.keys()
    assert "column.weight" in found


def test_loading_makes_an_optimizers_state_and_changes_nothing():
    model = Model()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    assert dtensor_state_dict(model, optimizer=optimizer)["optimizer"]["state"] == {}
    model.head.weight.grad = kept = torch.ones_like(model.head.weight)
    held = dtensor_state_dict(model, optimizer=optimizer, loading=True)
    assert_same(model.state_dict(), before)
    assert model.head.weight.grad is kept
    assert model.embedding.weight.grad is None
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2]
    assert set(held["optimizer"]["state"]["head.weight"]) == {"step", "exp_avg", "exp_avg_sq"}
    other = Model()
    nn.init.constant_(other.qkv.weight, 7.0)
    load_dtensor_state_dict(model, copy.deepcopy(dtensor_state_dict(other)))  # it is copied
    assert_same(model.state_dict(), other.state_dict())


def test_what_does_not_fit_is_an_error():
    model = Model()
    optimizer = adam_of(model)
    held = dtensor_state_dict(model, optimizer=optimizer)
    weights, parts = held["model"], held["optimizer"]
    state, options = parts["state"], parts["param_groups"]
    head = "head.weight"
    no_average = {**state, head: {"step": state[head]["step"]}}
    other_rate = {**options, head: {**options[head], "lr": 3.0}}
    shape = r"head\.weight has shape \(46, 16\) on this rank; expected \(45, 16\)"
    with pytest.raises(DegreeError, match=shape):
        load_dtensor_state_dict(model, {**weights, head: torch.zeros(46, 16)})
    lost = dict(weights)
    del lost["glu.weight.block1"]
    for found, message in [
        (lost, r"block1 is missing; .*\(24, 16\)"),
        ({**weights, "more": torch.zeros(2)}, r"more is none of Model's, and 0 others"),
    ]:
        with pytest.raises(ParallelError, match=message):
            load_dtensor_state_dict(model, found)
    for change, message in [
        ({"state": no_average}, r"head\.weight, 'exp_avg' of the optimizer, is missing"),
        ({"param_groups": other_rate}, r"embedding\.weight and head\.weight are in one group"),
        ({"param_groups": {}}, r"param_groups has nothing of embedding\.weight"),
        (None, r"expected \{'model', 'optimizer'\}"),
    ]:
        found = {"model": weights, "optimizer": {**parts, **change}} if change else weights
        with pytest.raises(ParallelError, match=message):
            load_dtensor_state_dict(model, found, optimizer=optimizer)
