import mmap
import subprocess
import sys

import pytest

from ezpz_obs import memory_metrics


def test_the_cpu():
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


def test_torch_is_not_imported_for_it():
    code = "from ezpz_obs import memory_metrics; memory_metrics()"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert "ObsError: memory_metrics() asks torch, which is not imported" in done.stderr


def test_without_ezpz_device_the_extra_is_named():
    pytest.importorskip("torch")
    code = (
        "import sys, torch; sys.modules['ezpz_device'] = None;"
        "from ezpz_obs import memory_metrics; memory_metrics()"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert "pip install 'ezpz-obs[device]'" in done.stderr
