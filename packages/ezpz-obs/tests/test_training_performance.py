"""Where a step's time goes, how much it got done, and in how much memory."""

import math
import mmap
import sys
import time

import pytest

from ezpz_obs import ObsError, StepTimer, Throughput, memory_metrics, transformer_flops
from ezpz_obs._performance import HostClock


def spend(seconds):
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def test_phases_and_the_step():
    timer = StepTimer()
    assert timer.metrics() == {}
    assert timer.seconds is None
    for _ in range(3):
        with timer("forward"):
            spend(0.002)
        with timer("backward"):
            spend(0.004)
        timer.step()
    found = timer.metrics()
    assert list(found) == ["step_s", "forward_s", "backward_s"]
    assert found["forward_s"] >= 0.002
    assert found["backward_s"] >= 0.004
    assert found["step_s"] >= found["forward_s"] + found["backward_s"]
    assert timer.seconds == found["step_s"]


class Late(HostClock):
    """A device's clock, worked by hand: each mark is one second on."""

    def __init__(self):
        self.now = self.passed = 0.0

    def mark(self):
        self.now += 1
        return self.now

    def seconds(self, start, end):
        self.passed = max(self.passed, end)  # waits
        return end - start

    def has_passed(self, mark):
        return mark <= self.passed


@pytest.fixture
def late():
    timer = StepTimer()
    timer._clock = Late()
    return timer


@pytest.fixture
def timer(late):
    late._clock.passed = math.inf
    return late


def test_a_phase_inside_itself_counts_once(timer):
    with timer("forward"), timer("forward"), timer("attention"):
        pass
    timer.step()
    # Each mark is a second on, and the inner forward has none.
    assert timer.metrics() == {"step_s": 5, "forward_s": 3, "attention_s": 1}


def test_all_uses_of_a_phase_in_a_step_count_and_those_that_end_in_an_exception(timer):
    for failing, used in ((0, 2), (2, 0), (0, 1), (0, 0)):
        for _ in range(failing):
            with pytest.raises(KeyError), timer("forward"):
                raise KeyError
        for _ in range(used):
            with timer("forward"):
                pass
        timer.step()
        assert timer.metrics()["forward_s"] == failing + used


def test_waiting_for_data():
    class Loader:
        def __len__(self):
            return 3

        def __iter__(self):
            for one in range(3):
                spend(0.003)
                yield one

    timer = StepTimer()
    batches = timer.data(Loader())
    assert len(batches) == 3
    for _ in range(2):  # epochs
        seen = []
        for batch in batches:
            seen.append(batch)
            with timer("forward"):
                spend(0.001)
            timer.step()
            found = timer.metrics()
            assert 0.003 <= found["data_s"] <= found["step_s"] - found["forward_s"]
        assert seen == [0, 1, 2]


def test_a_loader_that_fails_fails():
    failing = iter(StepTimer().data(1 / (1 - one) for one in range(2)))
    assert next(failing) == 1
    with pytest.raises(ZeroDivisionError):
        next(failing)
    with pytest.raises(TypeError):
        len(StepTimer().data(iter([])))


def test_what_belongs_to_no_step_is_left_out(timer):
    timer.step()  # begins
    timer.step()
    assert timer.metrics() == {"step_s": 1}
    for _ in range(5):
        with timer("evaluation"):
            pass
    timer.start()
    timer.step()
    assert timer.metrics() == {"step_s": 1, "evaluation_s": 0}


def test_many_uses_without_a_step_take_no_memory():
    timer = StepTimer()
    phase = timer("forward")
    for _ in range(10_000):
        with phase:
            pass
    assert len(phase._marks) < 300
    timer.step()
    assert timer.metrics()["forward_s"] > 0
    with pytest.raises(ValueError, match="step_s is the whole"):
        timer("step")


def test_a_device_that_is_behind_is_waited_for_once(late):
    clock = late._clock
    for _ in range(2):
        with late("forward"):
            pass
        late.step()
    # The marks are 1 (start), 2, 3, 4 (step), 5, 6, 7 (step).
    assert clock.passed == 0
    assert late.metrics() == {"step_s": 3.0, "forward_s": 1.0}
    for _ in range(5):
        late.step()
    known = clock.passed
    late.metrics()
    assert clock.passed == known  # nothing was waited for
    clock.passed = clock.now
    assert late.metrics() == {"step_s": 1.0, "forward_s": 0.0}
    for _ in range(1000):  # far behind: waited for rather than hoarded
        late.step()
    assert len(late._unfinished) <= 65


def test_a_device_that_has_failed_does_not_hide_the_error(late):
    def failed():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    phase = late("forward")
    phase.__enter__()
    late._clock.mark = failed
    assert phase.__exit__(ZeroDivisionError, ZeroDivisionError(), None) is None
    assert phase.depth == 0


@pytest.mark.parametrize("synchronize", [False, True])
def test_the_cpu_of_a_process_that_has_torch(synchronize):
    torch = pytest.importorskip("torch")
    timer = StepTimer(synchronize=synchronize, device=torch.device("cpu"))
    with timer("forward"):
        torch.ones(10).sum()
    timer.step()
    assert timer.metrics()["forward_s"] > 0


def test_a_device_without_ezpz_device(monkeypatch):
    """Not by the host's clock, which would time the queue."""
    pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, "ezpz_device", None)
    with pytest.raises(ObsError, match=r"on cuda needs ezpz_device.*pip install"):
        StepTimer(device="cuda")("forward")


@pytest.mark.parametrize("synchronize", [False, True])
def test_a_cuda_device(synchronize):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    one = torch.randn(4096, 4096, device="cuda")
    timer = StepTimer(synchronize=synchronize)
    for _ in range(5):
        with timer("forward"):
            for _ in range(20):
                one = one @ one
                one /= one.norm()
        timer.step()
    torch.cuda.synchronize()
    found = timer.metrics()
    assert 1e-3 < found["forward_s"] <= found["step_s"]


@pytest.mark.usefixtures("rank_1")
def test_rates_of_the_whole_job_whose_ranks_share_the_work():
    assert Throughput(tokens_per_step=1000).metrics(0.5) == {"tokens_per_s": 2000.0}
    assert Throughput(samples_per_step=8).metrics(2.0) == {"samples_per_s": 4.0}
    both = Throughput(tokens_per_step=1000, samples_per_step=8)
    assert both.metrics(0.5, tokens=500) == {"tokens_per_s": 1000.0, "samples_per_s": 16.0}
    assert Throughput().metrics(0.5, samples=3) == {"samples_per_s": 6.0}
    assert both.metrics(None) == {}, "nothing is known before the first step"
    assert Throughput(flops_per_step=8e12, peak_flops=1e12).metrics(1.0)["tflops"] == 4.0


def test_tflops_and_mfu_are_of_one_device():
    rates = Throughput(
        tokens_per_step=1e6, flops_per_token=6e9, peak_flops=312e12, world_size=16
    ).metrics(2.0)
    assert rates["tflops"] == pytest.approx(6e15 / 2 / 16 / 1e12)
    assert rates["mfu"] == pytest.approx(rates["tflops"] / 312)
    other = Throughput(flops_per_step=6e15, peak_flops=312e12, world_size=16).metrics(2.0)
    assert other == {key: rates[key] for key in ("tflops", "mfu")}


def test_a_peak_from_the_environment_or_none_and_that_is_said_once(caplog, monkeypatch):
    pytest.importorskip("torch")
    pytest.importorskip("ezpz_device")
    monkeypatch.setenv("TORCH_DEVICE", "cpu")
    rates = Throughput(flops_per_step=1e12, world_size=1)
    assert [rates.metrics(1.0) for _ in range(3)] == [{"tflops": 1.0}] * 3
    (said,) = caplog.messages
    assert "no mfu: no peak of bf16 is known for" in said
    assert "EZPZ_PEAK_FLOPS" in said
    monkeypatch.setenv("EZPZ_PEAK_FLOPS", "4e12")
    assert Throughput(flops_per_step=1e12, world_size=1).metrics(1.0)["mfu"] == 0.25


def test_torch_is_not_imported_for_a_time_or_a_peak(python):
    done = python(
        "import sys; from ezpz_obs import StepTimer, Throughput; t = StepTimer(); t.step();"
        "t.step(); t.metrics(); print(Throughput(flops_per_step=1e12).metrics(1.0));"
        "sys.exit('torch' in sys.modules)"
    )
    assert done.stdout == "{'tflops': 1.0}\n"
    assert "no mfu: torch is not imported" in done.stderr


@pytest.mark.parametrize(
    ("options", "seconds", "message"),
    [({"tokens_per_step": 0}, 1.0, "tokens_per_step=0"),
     ({"samples_per_step": -1}, 1.0, "samples_per_step=-1"),
     ({"peak_flops": math.nan}, 1.0, "peak_flops=nan"), ({"world_size": 0}, 1.0, "world_size=0"),
     ({"flops_per_token": 1, "flops_per_step": 1}, 1.0, "expected one of them"),
     ({"flops_per_token": 1e9}, 1.0, "give tokens_per_step or tokens")]
    + [({"tokens_per_step": 1}, seconds, "expected the time of a step")
       for seconds in (0, -1.0, math.nan, math.inf)],
)  # fmt: skip
def test_what_is_out_of_range(options, seconds, message):
    with pytest.raises(ValueError, match=message):
        Throughput(**options).metrics(seconds)


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


def test_the_memory_of_the_cpu():
    pytest.importorskip("torch")
    pytest.importorskip("ezpz_device")
    before = memory_metrics("cpu")
    # Pages of its own: an allocator may give again what it has.
    block = mmap.mmap(-1, 1 << 26)
    for page in range(0, len(block), mmap.PAGESIZE):
        block[page] = 1
    after = memory_metrics("cpu")
    block.close()
    assert after["memory_gib"] - before["memory_gib"] == pytest.approx(1 / 16, abs=1 / 100)
    assert after["memory_peak_gib"] >= after["memory_gib"] - 1 / 100
    assert 0 < after["memory_fraction"] < 1


def test_without_torch_and_without_ezpz_device(python):
    ask = "from ezpz_obs import memory_metrics; memory_metrics()"
    done = python(ask, status=1)
    assert "ObsError: memory_metrics() asks torch, which is not imported" in done.stderr
    pytest.importorskip("torch")
    done = python("import sys, torch; sys.modules['ezpz_device'] = None;" + ask, status=1)
    assert "pip install 'ezpz-obs[device]'" in done.stderr
