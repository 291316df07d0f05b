"""What changing degree costs: ``hatch run bench:tp-files [--megabytes=512] [--rounds=3]``.

`ezpz_tp.reshard` of column- and row-parallel weights between degrees, beside copying the same
files (both flush to disk), in alternating rounds; and the peak memory of a process that does it.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import fire
import torch
from torch.distributed import checkpoint

import ezpz_tp

WIDTH = 2048
CHANGES = ((8, 1), (1, 8), (4, 2))
PEAK = """
import sys, ezpz_tp
def peak():  # of this program alone: getrusage remembers the one that started it
    with open("/proc/self/status") as file:
        return int(file.read().split("VmHWM:")[1].split()[0])
ezpz_tp.reshard
before = peak()
ezpz_tp.reshard(sys.argv[1], sys.argv[2], tp=int(sys.argv[3]))
print((peak() - before) // 1024)
"""


def seconds(work: Callable[[], object]) -> float:
    """Return how long a piece of work takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def copy(source: Path, target: Path) -> None:
    """Read a folder's files and write them elsewhere, as programs do, and flush them."""
    target.mkdir()
    for path in source.iterdir():
        with path.open("rb") as read, (target / path.name).open("wb") as written:
            # The kernel's own copy may share the blocks, and write nothing.
            shutil.copyfileobj(read, written, 16 << 20)
            os.fsync(written.fileno())


def main(megabytes: int = 512, rounds: int = 3) -> None:
    """Measure every change of degree.

    Args:
        megabytes: Of the model; half of it is split by rows, half by columns.
        rounds: How often.
    """
    layers = max(1, megabytes * 2**20 // (2 * 4 * WIDTH * 4 * WIDTH))
    model = torch.nn.ModuleList()
    for _ in range(layers):
        model.append(ezpz_tp.ColumnParallelLinear(WIDTH, 4 * WIDTH, bias=False, seed=1))
        model.append(ezpz_tp.RowParallelLinear(4 * WIDTH, WIDTH, bias=False, seed=2))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint.save(ezpz_tp.dtensor_state_dict(model), checkpoint_id=folder / "tp1")
        del model
        for before, after in CHANGES:
            source, target = folder / f"tp{before}", folder / "target"
            if not source.exists():
                ezpz_tp.reshard(folder / "tp1", source, tp=before)
            ratios, speeds = [], []
            for _ in range(rounds):
                plain = seconds(partial(copy, source, target))
                shutil.rmtree(target)
                work = partial(ezpz_tp.reshard, source, target, tp=after)
                ours = seconds(work)
                shutil.rmtree(target)
                ratios.append(ours / plain)
                speeds.append(layers * 8 * 4 * WIDTH * WIDTH / 2**20 / ours)
            peak = "not known here"
            if sys.platform == "linux":
                words = [sys.executable, "-c", PEAK, str(source), str(target), str(after)]
                done = subprocess.run(words, check=True, capture_output=True, text=True)
                shutil.rmtree(target)
                peak = f"{int(done.stdout)} MiB over the imports"
            print(
                f"tp {before} -> {after}: {statistics.median(ratios):.2f} x copying the files, "
                f"{statistics.median(speeds):.0f} MiB/s, peak {peak} "
                f"(largest tensor {4 * 4 * WIDTH * WIDTH >> 20} MiB)"
            )


if __name__ == "__main__":
    fire.Fire(main)
