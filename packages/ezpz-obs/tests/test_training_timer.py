import math
import subprocess
import sys
import time

import pytest

from ezpz_obs import ObsError, StepTimer
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


# A device's clock, worked by hand: each mark is one second on. What events do is CUDA's and XPU's.


class Late(HostClock):
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
    timer._clock, timer._is_found = Late(), True
    return timer


@pytest.fixture
def timer(late):
    late._clock.passed = math.inf
    return late


def test_a_phase_used_twice_is_added_up_and_a_step_without_it_has_none(timer):
    for used in (2, 0):
        for _ in range(used):
            with timer("forward"):
                pass
        timer.step()
        assert timer.metrics()["forward_s"] == used


def test_a_phase_inside_itself_counts_once():
    timer = StepTimer()
    with timer("forward"), timer("forward"), timer("attention"):
        spend(0.003)
    timer.step()
    found = timer.metrics()
    assert 0.003 <= found["attention_s"] <= found["forward_s"] <= found["step_s"]


def test_what_ends_in_an_exception_counts(timer):
    def forward():
        with timer("forward"):
            raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            forward()
    timer.step()
    assert timer.metrics()["forward_s"] == 2
    with timer("forward"):
        pass
    timer.step()
    assert timer.metrics()["forward_s"] == 1


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
    for epoch in range(2):
        seen = []
        for batch in batches:
            seen.append(batch)
            with timer("forward"):
                spend(0.001)
            timer.step()
            found = timer.metrics()
            assert 0.003 <= found["data_s"] <= found["step_s"] - found["forward_s"]
        assert seen == [0, 1, 2], epoch


def test_a_loader_that_fails_fails():
    def loader():
        yield 1
        raise OSError("the file system is away")

    timer = StepTimer()
    batches = iter(timer.data(loader()))
    assert next(batches) == 1
    with pytest.raises(OSError, match="is away"):
        next(batches)
    with pytest.raises(TypeError):
        len(timer.data(loader()))


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


def test_step_is_no_phase():
    with pytest.raises(ValueError, match="step_s is the whole"):
        StepTimer()("step")


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


def test_a_device_that_is_far_behind_is_waited_for_rather_than_hoarded(late):
    for _ in range(1000):
        late.step()
    assert len(late._waiting) <= 65


def test_a_device_that_has_failed_does_not_hide_the_error(late):
    def forward():
        with late("forward"):
            late._clock.mark = failed
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        forward()
    assert late("forward").depth == 0


def failed():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_torch_is_not_imported_for_it():
    code = (
        "import sys; from ezpz_obs import StepTimer; t = StepTimer(); t.step();"
        "t.step(); t.metrics(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


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
