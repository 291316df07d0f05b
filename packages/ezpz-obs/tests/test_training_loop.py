"""Everything in one small training loop, as a user has it."""

import json
import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("ezpz_device")

from ezpz_obs import (  # noqa: E402
    Alarms,
    History,
    StepTimer,
    Throughput,
    gradient_norm,
    memory_metrics,
    profile,
    read_run,
    transformer_flops,
)


def test_all_of_it(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.utils.data.TensorDataset(torch.randn(800, 8), torch.randn(800, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    count = sum(one.numel() for one in model.parameters())
    timer = StepTimer(device="cpu")
    rates = Throughput(
        tokens_per_step=8, flops_per_token=transformer_flops(count, 2, 32, 1), peak_flops=1e12
    )
    history = History(tmp_path, alarms=[Alarms("loss"), Alarms("gradient_norm")], summary=False)
    with history, profile(tmp_path / "profile", steps=(3, 5)) as profiler:
        for step, (x, y) in enumerate(timer.data(loader)):
            broken = math.nan if step == 90 else 0.0
            with timer("forward"):
                loss = (model(x + broken) - y).square().mean()
            with timer("backward"):
                loss.backward()
            norm = gradient_norm(model)
            with timer("optimizer"):
                if norm.isfinite():
                    optimizer.step()
                optimizer.zero_grad()
            timer.step()
            history.record(
                {
                    "loss": loss,
                    "gradient_norm": norm,
                    **timer.metrics(),
                    **rates.metrics(timer.seconds),
                    **memory_metrics("cpu"),
                }
            )
            profiler.step()
    run = read_run(tmp_path)
    records = list(run.records())
    assert len(records) == 100
    expected = {
        "step", "time", "loss", "gradient_norm", "step_s", "data_s", "forward_s", "backward_s",
        "optimizer_s", "tokens_per_s", "tflops", "mfu", "memory_gib", "memory_peak_gib",
        "memory_fraction",
    }  # fmt: skip
    phases = ("data_s", "forward_s", "backward_s", "optimizer_s")
    for record in records:
        assert set(record) == expected
        assert 0 < sum(record[name] for name in phases) <= record["step_s"]
        assert record["tokens_per_s"] == pytest.approx(8 / record["step_s"])
        assert 0 < record["mfu"] == pytest.approx(record["tflops"])
        assert 0 < record["memory_gib"] <= record["memory_peak_gib"] * 1.01
    alarms = [
        (one["step"], one["message"].split()[0]) for one in run.events if one["event"] == "alarm"
    ]
    assert alarms == [(90, "loss"), (90, "gradient_norm")]
    events = json.loads(profiler.trace.read_text())["traceEvents"]
    assert "aten::addmm" in {event.get("name") for event in events}
