"""What comes back is what was saved: an optimizer's state, dtypes, each rank's own buffers."""

import pytest
import torch
from torch import nn

from ezpz_dist import CheckpointError, load_checkpoint, save_checkpoint

MODELS = """
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, parallelize_module,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

rank = setup_torch(timeout=60)
where = os.environ["FOLDER"]
size = int(os.environ.get("WORLD_SIZE", 1))
X = torch.sin(torch.arange(96.0)).view(3, 32)

def make(kind, seed):
    torch.manual_seed(seed)
    # The second layer has a weight of one element, and every layer but the first such a bias.
    model = nn.Sequential(nn.Linear(32, 4), nn.Tanh(), nn.Linear(4, 1), nn.Linear(1, 1))
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp1":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    if kind == "fsdp2":
        return fully_shard(model)
    if kind == "torch-tp":
        mesh = init_device_mesh("cpu", (size,))
        return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model

def step(model, optimizer):
    model(X).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

def values(model, optimizer):
    found = {name: whole(one).detach().clone() for name, one in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            if isinstance(value, torch.Tensor):
                found[f"{name}: {key}"] = whole(value).clone()
    return {name.removeprefix("module."): value for name, value in found.items()}
"""

OPTIMIZERS = """
optimizers = {
    "adamw": lambda each: torch.optim.AdamW(each, lr=0.01),
    "adamw-foreach": lambda each: torch.optim.AdamW(each, lr=0.01, foreach=True),
    "adamw-fused": lambda each: torch.optim.AdamW(each, lr=0.01, fused=True),
    "amsgrad": lambda each: torch.optim.Adam(each, lr=0.01, amsgrad=True),
    "sgd": lambda each: torch.optim.SGD(each, lr=0.01, momentum=0.9),
    "rmsprop": lambda each: torch.optim.RMSprop(each, lr=0.01, momentum=0.9, centered=True),
    "nadam": lambda each: torch.optim.NAdam(each, lr=0.01),
    "adadelta": lambda each: torch.optim.Adadelta(each, lr=0.01),
    "adamax": lambda each: torch.optim.Adamax(each, lr=0.01),
    "asgd": lambda each: torch.optim.ASGD(each, lr=0.01),
}
kinds = ("ddp", "fsdp2", "torch-tp")
for name, optimizer_of in optimizers.items():
    expected = {}
    for kind in kinds:
        model = make(kind, 1)
        optimizer = optimizer_of(model.parameters())
        step(model, optimizer)
        step(model, optimizer)
        save_checkpoint(f"{where}/{name}-{kind}", model=model, optimizer=optimizer, step=2)
        before = values(model, optimizer)
        step(model, optimizer)
        expected[kind] = before, values(model, optimizer)
    for saved in kinds:
        for kind in kinds:
            model = make(kind, 2)
            optimizer = optimizer_of(model.parameters())
            load_checkpoint(f"{where}/{name}-{saved}", model=model, optimizer=optimizer)
            before, after = expected[saved]
            found = values(model, optimizer)
            assert found.keys() == before.keys(), (name, saved, kind, found.keys(), before.keys())
            for key, value in before.items():
                assert torch.equal(found[key], value), (name, saved, kind, key)
            step(model, optimizer)
            found = values(model, optimizer)
            for key, value in after.items():
                torch.testing.assert_close(found[key], value, msg=f"{name}, {saved}, {kind}, {key}")
"""


@pytest.mark.slow
def test_training_goes_on_after_a_resume_with_every_optimizer(ranks, tmp_path):
    """Parameters of one element have state of the shape of a counter."""
    ranks(2, MODELS + OPTIMIZERS, env={"FOLDER": str(tmp_path)}, timeout=300)


DTYPES = """
class Masters(torch.optim.Optimizer):
    "Has weights in fp32, moments in int8 and bf16, a count of its own, and lists of tensors."
    def __init__(self, parameters):
        super().__init__(parameters, {})
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["master"] = parameter.detach().float()
                    state["sign"] = torch.zeros_like(parameter, dtype=torch.int8)
                    state["moment"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                    state["scale"] = torch.tensor(1 / 3, dtype=torch.float64)
                    state["seen"] = [torch.tensor([1 / 3], dtype=torch.float64)]
                state["master"] -= 0.01 * parameter.grad.float()
                state["sign"] += parameter.grad.sign().to(torch.int8)
                state["moment"] += parameter.grad.to(torch.bfloat16)
                parameter.data.copy_(state["master"])

def made(kind, dtype, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp2":
        model = fully_shard(model)
    return model, Masters(model.parameters())

def advance(model, optimizer, dtype):
    model(X.to(dtype)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

def states(optimizer):
    found = {}
    for number, parameter in enumerate(optimizer.param_groups[0]["params"]):
        for key, value in optimizer.state[parameter].items():
            found[key, number] = value[0] if isinstance(value, list) else value
    return found

for dtype in (torch.bfloat16, torch.float32):
    for kind in os.environ["KINDS"].split():
        folder = f"{where}/{kind}-{dtype}"
        model, optimizer = made(kind, dtype, 1)
        advance(model, optimizer, dtype)
        save_checkpoint(folder, model=model, optimizer=optimizer, step=1)
        for steps in (0, 1):  # state that is made, and state that is there
            other, theirs = made(kind, dtype, 2)
            for _ in range(steps):
                advance(other, theirs, dtype)
            loaded = load_checkpoint(folder, model=other, optimizer=theirs)
            assert not [note for note in loaded.notes if "cast" in note], loaded.notes
            found = states(theirs)
            assert len(found) >= 5 and found.keys() == states(optimizer).keys()
            for key, value in states(optimizer).items():
                back = found[key]
                assert back.dtype == value.dtype, (kind, dtype, key, back.dtype, value.dtype)
                assert torch.equal(whole(back), whole(value)), (kind, dtype, key)
            advance(other, theirs, dtype)
"""


@pytest.mark.parametrize(("n", "kinds"), [(1, "bare"), (2, "ddp fsdp2")])
def test_state_keeps_the_dtype_that_it_was_saved_with(ranks, tmp_path, n, kinds):
    ranks(n, MODELS + DTYPES, env={"FOLDER": str(tmp_path), "KINDS": kinds}, timeout=120)


def test_state_of_its_parameter_s_dtype_follows_its_parameter(tmp_path):
    """Only where the user asks for another dtype, by strict=False."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path, model=model, optimizer=optimizer, step=1)

    other = nn.Linear(3, 1).bfloat16()
    theirs = torch.optim.AdamW(other.parameters())
    given = {"model": other, "optimizer": theirs}
    with pytest.raises(CheckpointError, match="would be cast"):
        load_checkpoint(tmp_path, **given)
    loaded = load_checkpoint(tmp_path, strict=False, **given)
    assert "model.weight from torch.float32 to torch.bfloat16" in loaded.notes[0]
    for state in theirs.state.values():
        assert (state["exp_avg"].dtype, state["step"].dtype) == (torch.bfloat16, torch.float32)
    other(torch.ones(3, dtype=torch.bfloat16)).sum().backward()
    theirs.step()


class Extra(nn.Linear):
    """Has an extra state that is a tensor, of another length each time."""

    def __init__(self, length):
        super().__init__(2, 2)
        self.history = torch.arange(float(length))

    def get_extra_state(self):
        return self.history

    def set_extra_state(self, state):
        self.history = state


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("length", [0, 3, 9])
def test_an_extra_state_may_have_another_length(tmp_path, length, strict):
    model = nn.Sequential(Extra(length), Extra(4))
    save_checkpoint(tmp_path / "c", model=model, step=1)
    filled = nn.Sequential(Extra(5), Extra(6))
    assert load_checkpoint(tmp_path / "c", model=filled, strict=strict).notes == ()
    assert torch.equal(filled[0].history, torch.arange(float(length)))
    assert torch.equal(filled[1].history, torch.arange(4.0))
    assert torch.equal(filled[0].weight, model[0].weight)


def test_a_tensor_of_another_length_that_is_no_extra_state_is_refused(tmp_path):
    model = nn.Linear(2, 2)
    model.register_buffer("history", torch.arange(3))
    save_checkpoint(tmp_path, model=model, step=1)
    other = nn.Linear(2, 2)
    other.register_buffer("history", torch.arange(5))
    with pytest.raises(CheckpointError, match=r"model\.history has shape"):
        load_checkpoint(tmp_path, model=other, strict=False)


NAMED = """
import ezpz_tp

def made(layers, seed):
    torch.manual_seed(seed)
    model = nn.ModuleDict({f"layer{number}": nn.Linear(3, 3) for number in layers})
    return model, torch.optim.AdamW(model.named_parameters(), lr=0.1)

stages = int(os.environ["STAGES"])
if stages > 1:
    ezpz_tp.initialize_tensor_parallel(1, stages)
stage = ezpz_tp.get_state().index("pipeline") if stages > 1 else 0
layers = range(4)[stage * 4 // stages:(stage + 1) * 4 // stages]
for saved in (1, 2):
    model, optimizer = made(layers, saved)
    folder = f"{where}/{saved}"
    if os.path.exists(folder):
        loaded = load_checkpoint(folder, model=model, optimizer=optimizer)
        (group,) = optimizer.param_groups
        assert group["param_names"] == [name for name, _ in model.named_parameters()]
        assert group["lr"] == 0.5
        for parameter, name in zip(group["params"], group["param_names"], strict=True):
            number = int(name.removeprefix("layer").split(".")[0])
            assert (optimizer.state[parameter]["exp_avg"] == number).all(), name
    elif saved == stages:
        sum(layer.weight.sum() + layer.bias.sum() for layer in model.values()).backward()
        optimizer.step()
        for parameter, name in zip(model.parameters(), optimizer.param_groups[0]["param_names"]):
            number = int(name.removeprefix("layer").split(".")[0])
            optimizer.state[parameter]["exp_avg"].fill_(number)
        optimizer.param_groups[0]["lr"] = 0.5
        save_checkpoint(folder, model=model, optimizer=optimizer, step=1)
"""


def test_names_of_parameters_are_no_option_of_a_group(ranks, tmp_path):
    """From one pipeline stage to two, and back."""
    for stages in (1, 2, 1):
        env = {"FOLDER": str(tmp_path), "STAGES": str(stages)}
        ranks(stages, MODELS + NAMED, env=env)


class Tied(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


def test_a_checkpoint_may_name_a_tied_tensor_once(tmp_path):
    """As of a model whose hook leaves the second name out."""

    def leave_out(_, state, *__):
        del state["head.weight"]

    model = Tied(1)
    model.register_state_dict_post_hook(leave_out)
    save_checkpoint(tmp_path, model=model, step=1)
    other = Tied(2)
    assert load_checkpoint(tmp_path, model=other).notes == ()
    assert torch.equal(other.embed.weight, model.embed.weight)


OWN = """
class Counting(nn.Module):
    "Has an extra state of each rank's own."
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.seen = None
    def forward(self, x):
        self.seen = {"rank": rank, "sum": x.sum()}
        return x * self.scale
    def get_extra_state(self):
        return self.seen
    def set_extra_state(self, state):
        self.seen = state

def made(kind, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Counting())
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp2":
        return fully_shard(model)
    if kind == "hsdp":
        names = ("replicate", "shard")
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=names)
        return fully_shard(model, mesh=mesh)
    return model

kind = os.environ["KIND"]
saved, folder = os.environ["SAVED"], f"{where}/{os.environ['SAVED']}"
model = made(kind, 1)
batch_norm, counting = list((model.module if kind == "ddp" else model).children())[1:]
if os.path.exists(folder):
    loaded = load_checkpoint(folder, model=model)
    mine = torch.load(f"{where}/{saved}.{rank if loaded.world_size == size else 0}")
    assert torch.equal(batch_norm.running_mean, mine["mean"])
    assert torch.equal(batch_norm.num_batches_tracked, mine["batches"])
    assert counting.seen["rank"] == mine["seen"]["rank"]
    assert torch.equal(counting.seen["sum"], mine["seen"]["sum"])
    note = "different buffers, extra state or values of the optimizer (of 1.running_mean, 1.run"
    found = [one for one in loaded.notes if note in one]
    assert len(found) == (loaded.world_size != size), loaded.notes
else:
    for _ in range(2):
        model(torch.sin(torch.arange(12.0) * (rank + 1)).view(3, 4)).sum().backward()
    save_checkpoint(folder, model=model, step=1)
    torch.save({"mean": batch_norm.running_mean, "batches": batch_norm.num_batches_tracked,
        "seen": counting.seen}, f"{where}/{saved}.{rank}")
"""


@pytest.mark.parametrize(
    ("kind", "n", "others"),
    [("fsdp2", 2, ["fsdp2 2", "bare 1", "ddp 4"]), ("ddp", 2, ["ddp 2", "fsdp2 2", "fsdp2 1"]),
     ("hsdp", 4, ["hsdp 4", "fsdp2 4", "fsdp2 2"])],
)  # fmt: skip
def test_what_a_rank_has_of_its_own_comes_back_to_it(ranks, tmp_path, kind, n, others):
    env = {"FOLDER": str(tmp_path), "SAVED": kind}
    ranks(n, MODELS + OWN, env={**env, "KIND": kind})
    for other in others:
        loader, count = other.split()
        ranks(int(count), MODELS + OWN, env={**env, "KIND": loader})


OWN_STATE = """
class Quantized(torch.optim.Optimizer):
    "Has moments of this rank's elements in blocks of 8 bits, a list, and numbers of its own."
    def __init__(self, parameters):
        super().__init__(parameters, {})
    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            gradient = getattr(parameter.grad, "_local_tensor", parameter.grad)
            blocks = nn.functional.pad(gradient.flatten(), (0, -gradient.numel() % 5)).view(-1, 5)
            scales = blocks.abs().amax(1) + 1e-9
            codes = (blocks / scales[:, None] * 127 + 128).to(torch.uint8)
            if gradient.numel():
                seen = {"rank": rank, "sum": float(gradient.sum())}
                self.state[parameter].update(codes=codes, scales=scales, all=[scales], seen=seen)

def made(kind, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 1))
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp2":
        model = fully_shard(model)
    return model, Quantized(model.parameters())

kind, path = os.environ["KIND"], f"{where}/{os.environ['SAVED']}"
model, optimizer = made(kind, 1)
if not os.path.exists(path):
    model(torch.sin(torch.arange(12.0) * (rank + 1)).view(3, 4)).sum().backward()
    optimizer.step()
    save_checkpoint(path, model=model, optimizer=optimizer, step=1)
    torch.save(optimizer.state_dict(), f"{path}.{rank}")
    model, optimizer = made(kind, 2)
elif "fsdp2-2" in path:
    model, optimizer = made(kind, 2)
    given = {"model": model, "optimizer": optimizer}
    said = "tensors have optimizer state of one rank's part"
    before = [whole(each).clone() for each in model.parameters()]
    raises(CheckpointError, said, load_checkpoint, path, **given)
    assert all(map(torch.equal, map(whole, model.parameters()), before)), "it is not filled"
    assert said in str(load_checkpoint(path, strict=False, **given).notes)
    assert not any(optimizer.state[each] for each in list(model.parameters())[:2])
    sys.exit()
loaded = load_checkpoint(path, model=model, optimizer=optimizer)
if loaded.world_size > size:
    assert "optimizer.0.weight" in str(loaded.notes), loaded.notes
saved = torch.load(f"{path}.{rank if loaded.world_size == size else 0}")["state"]
found = optimizer.state_dict()["state"]
assert found.keys() == saved.keys()
for number, entries in saved.items():
    assert str(sorted(found[number].items())) == str(sorted(entries.items())), (found, saved)
assert found[0]["codes"].dtype == torch.uint8
"""


@pytest.mark.parametrize(
    ("kind", "n", "others"),
    [("fsdp2", 1, ["bare 1", "ddp 2"]), ("fsdp2", 2, ["fsdp2 4", "ddp 2"]), ("ddp", 2, ["ddp 1"])],
)  # fmt: skip
def test_what_an_optimizer_has_of_a_rank_s_part_comes_back_to_it(ranks, tmp_path, kind, n, others):
    """State of 8 bits, of other shapes than its parameter's; sums of local gradients."""
    env = {"FOLDER": str(tmp_path), "SAVED": f"{kind}-{n}"}
    ranks(n, MODELS + OWN_STATE, env={**env, "KIND": kind})
    for other in others:
        loader, count = other.split()
        ranks(int(count), MODELS + OWN_STATE, env={**env, "KIND": loader})


COUNTED = """
class Counted(torch.optim.Optimizer):
    "Counts in tensors of one element, the steps or what is this rank's own."
    def __init__(self, parameters):
        super().__init__(parameters, {})
    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            count = torch.full((1,), 7.0 + rank * own)
            if parameter.dim() > 1:
                self.state[parameter]["step"] = count
            else:
                self.state[parameter]["all"] = [count]

saving = not os.path.exists(where + "/equal")
for name, own in (("equal", 0), ("own", 1)):
    model = fully_shard(nn.Linear(4, 6))
    optimizer = Counted(model.parameters())
    path = f"{where}/{name}"
    if saving:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        save_checkpoint(path, model=model, optimizer=optimizer, step=1)
        optimizer = Counted(model.parameters())
    given = {"model": model, "optimizer": optimizer}
    if own and not saving:
        said = "2 tensors have optimizer state of one rank's part"
        raises(CheckpointError, said, load_checkpoint, path, **given)
        continue
    load_checkpoint(path, **given)
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        (count,) = state.get("all", [state.get("step")])
        assert torch.equal(count, torch.full((1,), 7.0 + rank * own)), (name, state)
"""


def test_counts_of_one_element_are_values_if_ranks_have_the_same(ranks, tmp_path):
    ranks(2, MODELS + COUNTED, env={"FOLDER": str(tmp_path)})
    ranks(1, MODELS + COUNTED, env={"FOLDER": str(tmp_path)})


EQUAL = """
model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
save_checkpoint(where, model=model, step=1)
model[1].running_mean.fill_(rank)
save_checkpoint(where, model=model, step=2)
if rank == 0:
    from ezpz_dist._checkpoints.disk_format import decode_index
    for step, count in ((1, 0), (2, size)):
        with open(f"{where}/step-{step:08d}/index.json", "rb") as file:
            keys = [key for key in decode_index(file.read()) if key[0] == "replica"]
        assert len(keys) == count, keys
"""


def test_what_is_equal_on_all_ranks_is_saved_once(ranks, tmp_path):
    ranks(2, MODELS + EQUAL, env={"FOLDER": str(tmp_path)})


FROZEN = """
def made(wrap, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 2))
    model[0].requires_grad_(False)
    model = wrap(model)
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, torch.optim.AdamW(learned, lr=0.1)

for kind, wrap in (("ddp", wrap_model_for_ddp), ("fsdp2", wrap_model_for_fsdp2)):
    model, optimizer = made(wrap, 1)
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    for name, frozen in (("whole", True), ("part", False)):
        path = f"{where}/{kind}-{name}"
        save_checkpoint(path, model=model, optimizer=optimizer, step=1, frozen=frozen)
    full, part = (latest_checkpoint(f"{where}/{kind}-{name}") for name in ("whole", "part"))
    assert part.contents == ("trainable", "optimizer", "rng")
    assert full.size - part.size > 64 * 64 * 4 - 2000
    other, theirs = made(wrap, 2)
    untouched = values(other, theirs)
    load_checkpoint(part.folder.rpartition("/")[0], model=other, optimizer=theirs)
    found, expected = values(other, theirs), values(model, optimizer)
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert torch.equal(value, untouched[key] if key.startswith("0.") else expected[key]), key
    learns = wrap(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 2)))
    path = f"{where}/{kind}-part"
    raises(CheckpointError, "2 tensors are not in it", load_checkpoint, path, model=learns)
"""


def test_frozen_parameters_are_left_out_and_stay_as_they_are(ranks, tmp_path):
    ranks(2, MODELS + FROZEN, env={"FOLDER": str(tmp_path)})
