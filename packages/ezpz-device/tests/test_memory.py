import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ezpz_device import get_memory, reset_peak_memory
from ezpz_device._host import host_total, host_use, reset_host_peak

MIB = 1 << 20


def test_what_is_taken_is_seen_and_the_peak_outlives_it():
    before = get_memory("cpu")
    block = torch.ones(64 * MIB // 8, dtype=torch.float64)
    during = get_memory("cpu")
    assert during.allocated - before.allocated > 60 * MIB
    assert during.reserved == during.allocated
    del block
    after = get_memory("cpu")
    assert after.allocated < during.allocated - 60 * MIB
    # Linux adds up a thread's pages when there are some.
    assert after.peak > during.allocated - 2 * MIB
    assert after.total == host_total()


@pytest.mark.skipif(sys.platform != "linux", reason="clear_refs is Linux's")
def test_the_peak_begins_anew():
    block = torch.ones(64 * MIB // 8, dtype=torch.float64)
    del block
    high = get_memory("cpu").peak
    assert reset_peak_memory("cpu")
    assert get_memory("cpu").peak < high - 50 * MIB


def test_the_peak_is_this_processs_own():
    # getrusage's is not: a small process started by a large one begins with its peak.
    block = torch.ones(256 * MIB // 8, dtype=torch.float64)
    # Without torch, which is larger itself.
    folder = Path(sys.modules[host_use.__module__].__file__).parent
    text = subprocess.run(
        [sys.executable, "-c", "from _host import host_use; print(*host_use())"],
        env={**os.environ, "PYTHONPATH": str(folder)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    resident, peak = map(int, text.split())
    assert resident <= peak < 256 * MIB
    assert block[0] == 1


def test_where_the_kernel_has_no_proc(tmp_path):
    resident, peak = host_use(tmp_path)
    assert resident is None
    assert peak >= get_memory("cpu").allocated // 2
    assert reset_host_peak(tmp_path) is False


# Control groups of other machines, as their files say; the real one is read above.


def make(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "proc", root / "cgroup"


@pytest.mark.parametrize(
    "files",
    [
        {  # version 2, Slurm: the job's limit binds the step's group
            "proc/self/cgroup": "0::/system.slice/slurmstepd.scope/job_7/step_0\n",
            "cgroup/system.slice/slurmstepd.scope/job_7/step_0/memory.max": "max\n",
            "cgroup/system.slice/slurmstepd.scope/job_7/memory.max": f"{64 * MIB}\n",
        },
        {  # version 2, the smallest of several
            "proc/self/cgroup": "0::/a/b\n",
            "cgroup/a/b/memory.max": f"{64 * MIB}\n",
            "cgroup/a/memory.max": f"{128 * MIB}\n",
        },
        {  # version 1 beside an empty version 2
            "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/job/7\n0::/\n",
            "cgroup/memory/job/7/memory.limit_in_bytes": f"{64 * MIB}\n",
            "cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
        {  # a container that sees its own group as the root, under the host's path
            "proc/self/cgroup": "0::/kubepods/pod1/c2\n",
            "cgroup/memory.max": f"{64 * MIB}\n",
        },
    ],
)
def test_a_control_groups_limit(tmp_path, files):
    assert host_total(*make(tmp_path, files)) == 64 * MIB


@pytest.mark.parametrize(
    "files", [{}, {"proc/self/cgroup": "0::/\n", "cgroup/memory.max": "max\n"}]
)
def test_without_a_limit_the_host_is(tmp_path, files):
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert host_total(*make(tmp_path, files)) == physical


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_cuda_device():
    block = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
    memory = get_memory("cuda")
    assert memory.total >= memory.reserved >= memory.allocated >= block.numel()
    del block
    high = get_memory("cuda").peak
    assert high >= 64 * MIB
    assert reset_peak_memory("cuda")
    assert get_memory("cuda").peak < high
