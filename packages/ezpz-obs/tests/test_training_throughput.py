import logging
import math
import subprocess
import sys

import pytest

from ezpz_obs import Throughput, transformer_flops


def test_tokens_and_samples():
    assert Throughput(tokens_per_step=1000).metrics(0.5) == {"tokens_per_s": 2000.0}
    assert Throughput(samples_per_step=8).metrics(2.0) == {"samples_per_s": 4.0}
    both = Throughput(tokens_per_step=1000, samples_per_step=8)
    assert both.metrics(0.5, tokens=500) == {"tokens_per_s": 1000.0, "samples_per_s": 16.0}
    assert Throughput().metrics(0.5, samples=3) == {"samples_per_s": 6.0}


def test_nothing_is_known_before_the_first_step():
    assert Throughput(tokens_per_step=1).metrics(None) == {}


def test_tflops_and_mfu_are_of_one_device():
    rates = Throughput(
        tokens_per_step=1e6, flops_per_token=6e9, peak_flops=312e12, world_size=16
    ).metrics(2.0)
    assert rates["tflops"] == pytest.approx(6e15 / 2 / 16 / 1e12)
    assert rates["mfu"] == pytest.approx(rates["tflops"] / 312)
    other = Throughput(flops_per_step=6e15, peak_flops=312e12, world_size=16).metrics(2.0)
    assert other == {key: rates[key] for key in ("tflops", "mfu")}


def test_the_jobs_ranks_share_the_work(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1",
                        "LOCAL_WORLD_SIZE": "4"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    assert Throughput(flops_per_step=8e12, peak_flops=1e12).metrics(1.0)["tflops"] == 2.0


def test_a_peak_from_the_environment(monkeypatch):
    pytest.importorskip("torch")
    pytest.importorskip("ezpz_device")
    monkeypatch.setenv("EZPZ_PEAK_FLOPS", "4e12")
    assert Throughput(flops_per_step=1e12, world_size=1).metrics(1.0)["mfu"] == 0.25


def test_without_a_peak_there_is_no_mfu_and_it_is_said_once(caplog, monkeypatch):
    pytest.importorskip("torch")
    pytest.importorskip("ezpz_device")
    monkeypatch.setenv("TORCH_DEVICE", "cpu")
    rates = Throughput(flops_per_step=1e12, world_size=1)
    with caplog.at_level(logging.WARNING, "ezpz_obs"):
        assert [rates.metrics(1.0) for _ in range(3)] == [{"tflops": 1.0}] * 3
    (record,) = caplog.records
    assert "no mfu: no peak of bf16 is known for" in record.getMessage()
    assert "EZPZ_PEAK_FLOPS" in record.getMessage()


def test_torch_is_not_imported_for_a_peak():
    code = (
        "import sys; from ezpz_obs import Throughput;"
        "print(Throughput(flops_per_step=1e12).metrics(1.0)); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout == "{'tflops': 1.0}\n"
    assert "no mfu: torch is not imported" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens_per_step": 0}, "tokens_per_step=0"),
        ({"samples_per_step": -1}, "samples_per_step=-1"),
        ({"peak_flops": math.nan}, "peak_flops=nan"),
        ({"world_size": 0}, "world_size=0"),
        ({"flops_per_token": 1, "flops_per_step": 1}, "expected one of them"),
    ],
)
def test_arguments_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        Throughput(**options)


@pytest.mark.parametrize("seconds", [0, -1.0, math.nan, math.inf])
def test_seconds_that_are_none(seconds):
    with pytest.raises(ValueError, match="expected the time of a step"):
        Throughput(tokens_per_step=1).metrics(seconds)


def test_operations_a_token_need_tokens():
    with pytest.raises(ValueError, match="give tokens_per_step or tokens"):
        Throughput(flops_per_token=1e9).metrics(1.0)


def test_palms_own_figures():
    # Table 3 and appendix B: PaLM 540B has 118 layers of 18432, 48 heads of 256; at 2048 tokens
    # and 238,300 tokens/s on 6144 chips of 275 TFLOP/s it reports 46.2 % (45.7 % without the
    # attention).
    attention = 118 * 48 * 256 * 2048 * 12
    per_token = transformer_flops(540_350_000_000, 118, 48 * 256, 2048)
    assert per_token == 6 * 540_350_000_000 + attention
    rates = Throughput(
        tokens_per_step=238_300, flops_per_token=per_token, peak_flops=275e12, world_size=6144
    )
    assert rates.metrics(1.0)["mfu"] == pytest.approx(0.462, abs=1e-3)
