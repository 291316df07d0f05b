"""The paths of every package that need a device: one rank on it, and two that share it."""

import json
import sys

import pytest
from tests.conftest import load

import ezpz_device

everywhere = load("launchers.test_one_script_everywhere")
DEVICE = ezpz_device.get_torch_device_type()
pytestmark = pytest.mark.skipif(DEVICE not in {"cuda", "xpu"}, reason="no CUDA or XPU device here")

BEGIN = """
import copy, torch
from torch import nn
import ezpz, ezpz_dist, ezpz_obs, ezpz_tp as tp
rank = ezpz.setup_torch(seed=1)
device = torch.device(ezpz.get_torch_device())
"""


def ranks(tmp_path, size, script, **variables):
    program = tmp_path / "program.py"
    program.write_text(BEGIN + script + "\nezpz.cleanup()\n")
    words = ["ezpz-launch", "-n", str(size), "--launcher", "spawn", sys.executable, str(program)]
    return everywhere.run(words, cwd=tmp_path, **variables)


def test_every_function(tmp_path):
    program = everywhere.ROOT / "tests" / "worlds" / "every_function.py"
    everywhere.run([sys.executable, str(program), str(tmp_path)])
    assert json.loads((tmp_path / "0.json").read_text())["size"] == 1


def test_bf16_under_each_wrapper_and_back_from_a_checkpoint(tmp_path):
    ranks(
        tmp_path,
        1,
        """
bare = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))
x = torch.randn(32, 64, device=device)
for wrap in (ezpz.wrap_model_for_ddp, ezpz.wrap_model_for_fsdp, ezpz.wrap_model_for_fsdp2):
    options = {} if wrap is ezpz.wrap_model_for_ddp else {"dtype": "bf16"}
    model = wrap(copy.deepcopy(bare), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses = []
    def step():
        loss = (model(x).float() - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()
    for _ in range(8):
        losses.append(step())
    folder = f"{wrap.__name__}"
    ezpz.save_checkpoint(folder, model=model, optimizer=optimizer, step=8, asynchronous=True)
    then = [step().item() for _ in range(3)]  # while it is written
    ezpz_dist.finish_saving()
    assert ezpz.load_checkpoint(folder, model=model, optimizer=optimizer).step == 8
    again = [step().item() for _ in range(3)]
    assert again == then, (folder, again, then)
    assert losses[-1] < losses[0], folder
""",
    )


def test_layers_streams_and_recomputation_of_tp(tmp_path):
    ranks(
        tmp_path,
        1,
        """
tp.initialize_tensor_parallel(1)
torch.manual_seed(42)
tp.seed_model_parallel(7)
whole = nn.Linear(64, 128, device=device, dtype=torch.bfloat16)
split = tp.ColumnParallelLinear(64, 128, device=device, dtype=torch.bfloat16)
split.load_state_dict(whole.state_dict())
x = torch.randn(8, 64, device=device, dtype=torch.bfloat16)
assert torch.equal(split(x), whole(x))
def noisy(x):
    with tp.get_rng_tracker().fork():
        return nn.functional.dropout(x, 0.5)
x.requires_grad_()
y = tp.checkpoint_activations(noisy, x)
y.sum().backward()
assert torch.equal(x.grad != 0, y != 0), "the same are dropped again"
""",
    )


def test_two_ranks_share_a_device_over_gloo(tmp_path):
    """Numbers of tensor parallelism as on one rank; NCCL would refuse a device twice."""
    ranks(tmp_path, 2, """
tp.initialize_tensor_parallel(2)
torch.manual_seed(3)
tp.seed_model_parallel(7)
x = torch.randn(4, 32, device=device)
assert ezpz.all_reduce(float(rank)) == 1.0
up = tp.ColumnParallelLinear(32, 64, bias=False, gather_output=False, device=device)
down = tp.RowParallelLinear(64, 32, bias=False, input_is_parallel=True, device=device)
y = down(up(x))
parts = ezpz.all_gather_object((up.weight.detach().cpu(), down.weight.detach().cpu()))
ups, downs = (torch.cat([one[i] for one in parts], i).to(device) for i in (0, 1))
expected = x @ ups.T @ downs.T
assert torch.allclose(y, expected, atol=1e-5), (y - expected).abs().max()
y.sum().backward()
assert up.weight.grad.isfinite().all()
""", CUDA_VISIBLE_DEVICES="0", ZE_AFFINITY_MASK="0", TORCH_BACKEND="gloo")  # fmt: skip


def test_metrics_wait_for_the_device_off_the_training_thread(tmp_path):
    ranks(
        tmp_path,
        1,
        """
with ezpz_obs.History("run", deferred=True) as history:
    timer = ezpz_obs.StepTimer()
    for step in range(20):
        with timer("forward"):
            loss = torch.full((), float(step), device=device)
        timer.step()
        history.update({"loss": loss, **timer.metrics()})
found = [record["loss"] for record in ezpz_obs.History.read("run")]
assert found == [float(step) for step in range(20)], found
""",
    )


@pytest.mark.parametrize(
    "words",
    [
        ["ezpz", "doctor"],
        ["ezpz", "preflight"],
        ["ezpz-launch", "-n", "1", sys.executable, "-m", "ezpz.examples.minimal", "--epochs", "1"],
        ["ezpz-launch", "-n", "1", sys.executable, "-m", "ezpz.examples.fsdp", "--steps", "5"],
    ],
    ids=" ".join,
)
def test_commands(words, tmp_path):
    everywhere.run(words, cwd=tmp_path, EZPZ_STATE_DIR=str(tmp_path / "state"))
