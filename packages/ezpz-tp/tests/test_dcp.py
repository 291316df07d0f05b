"""Shards in and out of torch.distributed.checkpoint, at other degrees and in other programs."""

import copy
from importlib.util import find_spec

import pytest
import torch
import torch.distributed.checkpoint as dcp
from files import assert_same, load_dcp, save_dcp, torch_finds
from on_ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint import state_dict as torchs
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F

import ezpz_tp
from ezpz_tp import ColumnParallelLinear, DegreeError, ParallelError, RowParallelLinear
from ezpz_tp._formats.dcp import dtensor_state_dict, load_dtensor_state_dict
from ezpz_tp._state_dict import gather_state_dict
from ezpz_tp.testing import run_ranks

# By which torch sends objects between ranks.
needs_numpy = pytest.mark.skipif(find_spec("numpy") is None, reason="no numpy")
# What torch says of a program without a process group, which is what is tested then.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

VOCABULARY, WIDTH, INNER = 13, 8, 12  # 13 rows at degree 4: 4, 4, 4 and 1


class Model(nn.Module):
    """Everything that is split in a way of its own, under the names of the whole model."""

    def __init__(self, *, vocabulary=VOCABULARY, seed=0):
        super().__init__()
        self.embedding = ezpz_tp.VocabParallelEmbedding(vocabulary, WIDTH, seed=seed + 1)
        self.layers = nn.ModuleDict()
        for n in range(2):
            options = {"gather_output": False, "stride": 2}
            up = ColumnParallelLinear(WIDTH, 2 * INNER, **options, seed=seed + n)
            down = RowParallelLinear(INNER, WIDTH, input_is_parallel=True, seed=seed + 10 + n)
            layer = {"norm": nn.LayerNorm(WIDTH), "up": up, "down": down}
            self.layers[str(n)] = nn.ModuleDict(layer)
        options = {"bias": False, "gather_output": False, "pad_output": True}
        self.head = ColumnParallelLinear(WIDTH, vocabulary, **options, seed=seed + 2)
        self.register_buffer("steps", torch.tensor(seed, dtype=torch.int64))

    def forward(self, ids):
        hidden = self.embedding(ids)
        for layer in self.layers.values():
            gate, up = layer["up"](layer["norm"](hidden)).chunk(2, -1)
            hidden = hidden + layer["down"](F.silu(gate) * up)
        return self.head(hidden)


def optimizer_of(model, **options):
    norms = [value for name, value in model.named_parameters() if "norm" in name]
    rest = [value for name, value in model.named_parameters() if "norm" not in name]
    groups = [{"params": rest}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, **{"lr": 1e-2, "betas": (0.8, 0.9), **options})


def train(model, optimizer, steps=2):
    ids = torch.arange(VOCABULARY).repeat(2, 1)
    losses = []
    for _ in range(steps):
        logits, labels = model(ids), ids.roll(1, 1)
        loss = ezpz_tp.vocab_parallel_cross_entropy(logits, labels, vocab_size=VOCABULARY).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained():
    model = Model()
    optimizer = optimizer_of(model)
    train(model, optimizer)
    return model, optimizer


def save(path):
    model, optimizer = trained()
    return save_dcp(path, model, optimizer), train(model, optimizer, 1)


def load(path):
    model = Model(seed=5)
    optimizer = optimizer_of(model, lr=0.5, betas=(0.1, 0.2))
    return load_dcp(path, model, optimizer), train(model, optimizer, 1)


@needs_numpy
def test_saved_by_two_and_loaded_by_four_by_two_and_by_one(tmp_path):
    path = str(tmp_path / "a")
    saved = run_ranks(save, 4, path, tensor=2, data=2, in_processes=True)
    expected, losses = saved[0]
    full = expected["model"]
    assert full["embedding.weight"].shape == (VOCABULARY, WIDTH)
    held = torch_finds(tmp_path / "a")  # as any program does: full tensors by flattened names
    assert torch.equal(held["model"]["embedding.weight"], full["embedding.weight"])
    halves = [held["model"][f"layers.0.up.weight.block{number}"] for number in range(2)]
    assert torch.equal(torch.cat(halves), full["layers.0.up.weight"])
    state = held["optimizer"]["state"]["head.weight"]
    assert_same(state, expected["optimizer"]["state"]["head.weight"])
    assert held["optimizer"]["param_groups"]["layers.0.norm.bias"]["weight_decay"] == 0.0
    for degree in (4, 2):
        for found, loss in run_ranks(load, degree, path, in_processes=True):
            assert_same(found, expected)
            assert loss == pytest.approx(losses, rel=1e-5)
    assert_same(load(path)[0], expected)  # plain torch, without a process group


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
    for found in run_ranks(load_what_torch_saved, 2, path, in_processes=True):
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
    return save_dcp(path, Model(vocabulary=5))  # 2, 2, 1 and 0 rows


@needs_numpy
def test_a_rank_without_rows(tmp_path):
    path = str(tmp_path / "a")
    expected = run_ranks(save_a_small_vocabulary, 4, path, in_processes=True)[0]
    assert_same(load_dcp(path, Model(vocabulary=5, seed=3)), expected)


@on_ranks(4, tensor=2, data=2, in_processes=True)
def test_what_is_split_is_a_dtensor_and_the_rest_is_plain():
    model = Model()
    held = dtensor_state_dict(model)
    found = {name: value for name, value in held.items() if isinstance(value, DTensor)}
    for name, value in found.items():
        dim = 1 if name.endswith("down.weight") else 0
        assert value.placements == (Shard(dim),)
        assert value.device_mesh.size() == 2
        assert value.full_tensor().shape == value.shape
    whole = found["layers.0.up.weight.block1"].redistribute(placements=[Replicate()]).to_local()
    full = gather_state_dict(model)
    assert torch.equal(whole, full["layers.0.up.weight"][INNER:])
    held["layers.1.down.weight"].to_local().fill_(3)  # views
    assert model.layers["1"]["down"].weight.eq(3).all()
    assert held["layers.1.up.bias.block0"].shape == (INNER,)
    assert held["head.weight"].shape == held["embedding.weight"].shape == (VOCABULARY, WIDTH)
    whole = {"steps", "layers.0.norm.weight", "layers.0.down.bias"}
    assert whole <= held.keys() - found.keys()
    assert "layers.0.down.weight" in found


def test_loading_makes_an_optimizers_state_and_changes_nothing():
    model = Model()
    before = copy.deepcopy(model.state_dict())
    optimizer = optimizer_of(model)
    assert dtensor_state_dict(model, optimizer=optimizer)["optimizer"]["state"] == {}
    model.head.weight.grad = kept = torch.ones_like(model.head.weight)
    held = dtensor_state_dict(model, optimizer=optimizer, loading=True)
    assert_same(model.state_dict(), before)
    assert model.head.weight.grad is kept
    assert model.embedding.weight.grad is None
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 1e-2]
    assert set(held["optimizer"]["state"]["head.weight"]) == {"step", "exp_avg", "exp_avg_sq"}
    other = Model(seed=7)  # a dict of one's own is copied
    load_dtensor_state_dict(model, copy.deepcopy(dtensor_state_dict(other)))
    assert_same(model.state_dict(), other.state_dict())


def test_what_does_not_fit_is_an_error():
    model, optimizer = trained()
    held = dtensor_state_dict(model, optimizer=optimizer)
    weights, parts = held["model"], held["optimizer"]
    state, options = parts["state"], parts["param_groups"]
    head = "head.weight"
    no_average = {**state, head: {"step": state[head]["step"]}}
    other_rate = {**options, head: {**options[head], "lr": 3.0}}
    shape = r"head\.weight has shape \(14, 8\) on this rank; expected \(13, 8\)"
    with pytest.raises(DegreeError, match=shape):
        load_dtensor_state_dict(model, {**weights, head: torch.zeros(14, 8)})
    lost = dict(weights)
    del lost["layers.0.up.weight.block1"]
    for found, message in [
        (lost, r"block1 is missing; .*\(12, 8\)"),
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
