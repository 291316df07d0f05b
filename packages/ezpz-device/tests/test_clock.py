import pytest
import torch

from ezpz_device import find_clock
from ezpz_device._clock import EventClock, HostClock


@pytest.mark.parametrize(
    ("device", "synchronize", "kind"),
    [
        ("cpu", False, HostClock),
        ("cuda:0", True, HostClock),
        ("cuda:1", False, EventClock),
        ("xpu:1", False, EventClock),
        ("mps", False, HostClock),
    ],
)
def test_clocks_by_device(device, synchronize, kind):
    """No device is needed: what would be asked of one is pinned, not run."""
    clock = find_clock(device, synchronize=synchronize)
    assert type(clock) is kind
    assert find_clock(torch.device(device), synchronize=synchronize) is clock


def test_the_host():
    clock = find_clock("cpu")
    start, end = clock.mark(), clock.mark()
    assert clock.seconds(start, end) >= 0
    assert clock.has_passed(end)


def test_none_as_long_as_no_device_is_in_use(monkeypatch):
    for kind in ("cuda", "xpu"):
        monkeypatch.setattr(getattr(torch, kind), "is_initialized", lambda: False)
    assert find_clock() is None
    monkeypatch.setattr(torch.xpu, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.xpu, "current_device", lambda: 2)
    assert find_clock() is find_clock("xpu:2")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or ROCm device here")
@pytest.mark.parametrize("synchronize", [True, False])
def test_work_that_a_device_has_only_queued_is_timed(synchronize):
    square = torch.rand(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    clock, host = find_clock("cuda", synchronize=synchronize), find_clock("cpu")
    begun, start = host.mark(), clock.mark()
    for _ in range(50):
        square = square @ square
    queued, end = host.mark(), clock.mark()
    seconds = clock.seconds(start, end)
    assert seconds > 0
    assert synchronize or seconds > host.seconds(begun, queued)
