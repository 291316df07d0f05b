"""DeepSpeed on real ranks, where it is installed; the configuration that it gets, everywhere.

DeepSpeed is no requirement of ezpz_dist: `pip install deepspeed` (0.19.8 was tested) adds it.
"""

import importlib.util
import json
import sys

import pytest
import torch

from ezpz_dist import SetupError, WrapError, deepspeed_config
from ezpz_dist._frameworks import check_framework

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)
CPU = torch.device("cpu")

PRELUDE = """
import json, warnings
warnings.simplefilter("ignore")  # DeepSpeed calls what torch 2.13 deprecates
from torch import nn

def build():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 4))

torch.manual_seed(1)
STEPS = [(x, x[:, :4].sin()) for x in torch.randn(30, 8, 8)]

def alone(make, clip=None, schedule=None, build=build):
    model = build()
    optimizer = make(model.parameters())
    scheduler = schedule and schedule(optimizer)
    losses = []
    for x, y in STEPS:
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if scheduler:
            scheduler.step()
        losses.append(loss.item())
    return losses

def follow(engine, losses, *, parts=1, shards=None):
    shards = shards or n
    size, shard, worst = 8 // parts // shards, rank % shards, 0.0
    for (x, y), expected in zip(STEPS, losses):
        mine = []
        for part in range(parts):
            start = (part * shards + shard) * size
            at = slice(start, start + size)
            loss = (engine(x[at]) - y[at]).square().mean()
            engine.backward(loss)
            engine.step()
            mine.append(loss.item())
        found = all_reduce(sum(mine) / parts, "mean")
        worst = max(worst, abs(found - expected) / expected)
    assert worst <= 1e-5, worst

def refused(text, *args, kind=ezpz_dist.WrapError, **options):
    raises(kind, text, wrap_model_for_deepspeed, *args, **options)

def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)
"""


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize("n", [1, 2])
def test_every_stage_follows_one_process(ranks, n, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, "steps_per_print": 1000}))
    script = f"""
path = {str(path)!r}
before = dict(os.environ)
rank = setup_torch(framework="deepspeed", timeout=60)
n = dist.get_world_size()
group, listens = dist.group.WORLD, os.environ.get("MASTER_PORT")

losses = alone(adamw)
assert losses[-1] < losses[0]
for stage in (0, 1, 2, 3):
    model = build()
    if rank:
        with torch.no_grad():
            model[0].weight.zero_()  # all start from rank 0's
    optimizer = adamw(model.parameters())
    made = wrap_model_for_deepspeed(model, optimizer, zero_stage=stage, micro_batch_size=8 // n)
    engine, wrapped, loader, scheduler = made
    assert engine.module is model and engine.zero_optimization_stage() == stage
    assert (wrapped is optimizer) == (stage == 0) and loader is None and scheduler is None
    follow(engine, losses)
# the group is ours, and DeepSpeed looked for no other
assert dist.group.WORLD is group and os.environ.get("MASTER_PORT") == listens
assert "mpi4py" not in sys.modules and os.environ["DS_ACCELERATOR"] == "cpu"
# another optimizer; accumulation, clipping and a scheduler; the buffers too
sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
halve = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
for stage in (0, 2):
    model = build()
    model.register_buffer("rotary", torch.full((2, 3), complex(rank, 1)).t())
    model.register_buffer("count", torch.tensor(rank))
    optimizer = sgd(model.parameters())
    engine, wrapped, _, scheduler = wrap_model_for_deepspeed(
        model, optimizer, zero_stage=stage, gradient_accumulation_steps=2, gradient_clipping=0.5,
        scheduler=halve(optimizer),
    )
    assert engine.train_batch_size() == 2 * n
    follow(engine, alone(sgd, clip=0.5, schedule=halve), parts=2)
    assert abs(scheduler.get_last_lr()[0] - 0.0125) < 1e-9, scheduler.get_last_lr()
    assert model.count == 0 and torch.equal(model.rotary, torch.full((3, 2), 1j))
# an optimizer, a loader and a batch size of DeepSpeed's own; a file
model = build()
model[2].requires_grad_(False)
config = {{"optimizer": {{"type": "AdamW", "params": {{"lr": 1e-2}}}}, "train_batch_size": 4 * n}}
engine, wrapped, loader, _ = wrap_model_for_deepspeed(
    model, zero_stage=0, config=config, training_data=[row for x, _ in STEPS for row in x]
)
assert type(wrapped) is torch.optim.AdamW, "nothing was compiled"
assert sum(p.numel() for g in wrapped.param_groups for p in g["params"]) == 4 * 17 + 16 * 9
assert loader.batch_size == 4 and len(loader) == 240 // (4 * n)  # iterating starts processes
assert "params" in config["optimizer"] and "torch_adam" not in config["optimizer"]["params"]
model = build()
engine = wrap_model_for_deepspeed(model, adamw, config=path)[0]
assert engine.zero_optimization_stage() == 2
# 16 bits
model = build()
engine, *_ = wrap_model_for_deepspeed(model, adamw, zero_stage=3, dtype="bf16")
assert next(model.parameters()).dtype == torch.bfloat16
x = STEPS[0][0].bfloat16()
found = []
for _ in range(10):
    loss = engine(x).float().square().mean()
    engine.backward(loss)
    engine.step()
    found.append(loss.item())
assert found[-1] < 0.9 * found[0], found
# what is refused, on all ranks, before anything is done
bare = build()
refused("is wrapped already: it is DeepSpeed", engine)
refused("is wrapped already: it is inside of DeepSpeed", model, adamw)
refused("its part 'trunk' is inside of DeepSpeed", nn.ModuleDict({{"trunk": engine.module}}))
two = {{"zero_optimization": {{"stage": 2}}}}
refused("stage is 2, the argument says 3; expected one", bare, adamw, config=two, zero_stage=3)
foreign = adamw(list(build().parameters())[:4])
refused("4 of the optimizer's 4 parameters are not the model's", bare, foreign)
refused("build it under deepspeed.zero.Init()", build().to("meta"))
refused("expected float32, bfloat16 or float16", bare, adamw, dtype="fp64", kind=ValueError)
if n == 2:
    refused("(optimizer=<function>, zero_stage=2) at", bare, adamw, zero_stage=1 + rank,
            kind=ezpz_dist.MismatchError)
    differs = {{"zero_optimization": {{"stage": 1 + rank}}}}
    refused("at key config zero_optimization instead of", bare, adamw, config=differs)
os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] = "7"  # as where each rank sees one device
wrap_model_for_deepspeed(bare, adamw, zero_stage=0)
assert os.environ.pop("OMPI_COMM_WORLD_LOCAL_RANK") == "7"
# from the start, in the same process: a model that is split over the ranks
cleanup()
names = {{"DS_ACCELERATOR", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}}
assert {{k: os.environ.get(k) for k in names}} == {{k: before.get(k) for k in names}}
if n == 2:
    setup_torch(framework="deepspeed", tensor_parallel_size=2, timeout=60)
    import ezpz_tp

    class Split(nn.Module):
        def __init__(self, whole):
            super().__init__()
            self.up = ezpz_tp.ColumnParallelLinear(8, 16, gather_output=False)
            self.down = ezpz_tp.RowParallelLinear(16, 4, input_is_parallel=True)
            mine = slice(8 * rank, 8 * rank + 8)
            with torch.no_grad():
                self.up.weight.copy_(whole[0].weight[mine])
                self.up.bias.copy_(whole[0].bias[mine])
                self.down.weight.copy_(whole[2].weight[:, mine])
                self.down.bias.copy_(whole[2].bias)

        def forward(self, x):
            return self.down(torch.tanh(self.up(x)))

    shallow = lambda: nn.Sequential(*build()[:2], build()[3])
    expected = alone(adamw, clip=0.5, build=shallow)
    for stage in (0, 1, 2):
        model = Split(shallow())
        engine, *_ = wrap_model_for_deepspeed(
            model, adamw(model.parameters()), zero_stage=stage, gradient_clipping=0.5
        )
        assert engine.dp_world_size == 1 and engine.mp_world_size == 2
        follow(engine, expected, shards=1)  # both see the same samples
    cleanup()
# and once more, without: DeepSpeed remembers no groups
setup_torch(framework="deepspeed", timeout=60)
model = build()
follow(wrap_model_for_deepspeed(model, adamw(model.parameters()), zero_stage=2)[0], losses)
cleanup()
# it was imported before, and chose another device
from ezpz_dist._frameworks import check_framework
raises(SetupError, "DeepSpeed chose cpu when it was imported, and this rank", check_framework,
       "deepspeed", torch.device("xpu"))
"""
    ranks(n, PRELUDE + script)


MICRO = "train_micro_batch_size_per_gpu"


def test_the_configuration_made_of_arguments():
    assert deepspeed_config() == {"zero_optimization": {"stage": 1}, MICRO: 1}
    made = deepspeed_config(
        zero_stage=3,
        dtype=torch.float16,
        micro_batch_size=4,
        gradient_accumulation_steps=2,
        gradient_clipping=1.0,
    )
    assert made == {
        "zero_optimization": {"stage": 3},
        MICRO: 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": False},
        "fp16": {"enabled": True},
    }
    with pytest.raises(ValueError, match="expected float32, bfloat16 or float16"):
        deepspeed_config(dtype=torch.float64)


def test_what_the_user_wrote_is_kept_and_completed(tmp_path):
    theirs = {
        "zero_optimization": {"stage": "auto", "reduce_bucket_size": 7},
        "gradient_clipping": "auto",
        "bfloat16": {"enabled": "auto"},
        "train_batch_size": 64,
        "wall_clock_breakdown": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    }
    text = json.dumps(theirs)
    completed = {
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 7},
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
        "train_batch_size": 64,
        "wall_clock_breakdown": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
    }
    assert deepspeed_config(theirs, dtype="bf16") == completed
    assert json.dumps(theirs) == text
    path = tmp_path / "ds.json"
    path.write_text(text)
    assert deepspeed_config(path, dtype="bf16") == completed
    on_cuda = deepspeed_config(theirs, device_type="cuda")
    assert on_cuda["optimizer"]["params"] == {"lr": 0.1}


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (
            {"zero_optimization": {"stage": 2}},
            {"zero_stage": 3},
            "config: zero_optimization.stage is 2, the argument says 3",
        ),
        (
            {"fp16": {"enabled": True}},
            {"dtype": "bf16"},
            "config: fp16.enabled is True, the argument says False",
        ),
        (
            {"gradient_accumulation_steps": 4},
            {"gradient_accumulation_steps": 1},
            "config: gradient_accumulation_steps is 4, the argument says 1",
        ),
        ({"zero_optimization": True}, {}, "config: zero_optimization is True; expected a dict"),
    ],
)
def test_contradictions(config, options, message):
    with pytest.raises(WrapError, match=message):
        deepspeed_config(config, **options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("{", "Expecting property name"),
        ("[]", "list; expected a JSON object"),
    ],
)
def test_files_that_hold_no_configuration(tmp_path, text, message):
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(WrapError, match=message) as caught:
        deepspeed_config(path)
    assert str(path) in str(caught.value)


def test_another_framework_or_accelerator(monkeypatch):
    check_framework("DDP", CPU)
    with pytest.raises(SetupError, match=r"'fsdp'; expected one of DDP, deepspeed$"):
        check_framework("fsdp", CPU)
    with pytest.raises(SetupError, match="'horovod'; expected 'DDP', which averages"):
        check_framework("horovod", CPU)
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    with pytest.raises(SetupError, match="DS_ACCELERATOR='cuda' while this rank computes on cpu"):
        check_framework("deepspeed", CPU)


BROKEN = f"DeepSpeed is installed and cannot be imported with torch {torch.__version__} ("


@pytest.mark.parametrize(
    "case",
    [
        ("deepspeed.py", "raise ModuleNotFoundError(name='deepspeed')",
         ["DeepSpeed is not installed", "pip install deepspeed"]),
        ("deepspeed.py", "import no_such_module",
         [BROKEN, "ModuleNotFoundError: No module named 'no_such_module'"]),
        ("deepspeed.py", "import torch; torch.no_such_name",
         [BROKEN, "AttributeError: module 'torch' has no attribute"]),
    ],
)  # fmt: skip
def test_not_installed_or_broken(monkeypatch, tmp_path, capsys, case):
    path, body, words = case
    (tmp_path / path).write_text(body)
    for name in [name for name in sys.modules if name.split(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SetupError) as caught:
        check_framework("deepspeed", CPU)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)
    assert capsys.readouterr().out == ""
