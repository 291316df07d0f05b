"""What it costs before a script begins: ``hatch run bench:startup [--runs=9] [--json=FILE]``.

Imports in fresh processes, in turn: of what a training script needs from us and from accelerate,
Lightning Fabric and DeepSpeed, with ``import torch`` as the yardstick; our own modules' share; and
the `ezpz` command.
"""

import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import fire
from callee import CalleeError, environment, fresh, last_line
from paired import Row, against, alone, interleaved, times
from peers import present
from table import finish

TAKEN = """
import time
began = time.perf_counter()
{imports}
print(time.perf_counter() - began, peak_mb())
"""
# What a script does before its first step: set up, wrap, record.
NEEDED = {
    "ours": "import ezpz; ezpz.setup_torch; ezpz.wrap_model; ezpz.History",
    "torch": "import torch",
    "accelerate": "from accelerate import Accelerator",
    "lightning-fabric": "from lightning_fabric import Fabric",
    "deepspeed": "import deepspeed; deepspeed.initialize",
}
OVER_TORCH = "import torch\n" + TAKEN.format(imports="import ezpz_tp")
OWN = """
import subprocess, sys
module = sys.argv[1]
done = subprocess.run([sys.executable, "-X", "importtime", "-c", f"import {module}"],
                      capture_output=True, text=True, check=True)
rows = [line.split(":")[1].split("|") for line in done.stderr.splitlines() if "|" in line][1:]
print(sum(int(own) for own, _, name in rows if name.strip().split(".")[0] == module) / 1000)
"""


def imports(runs: int) -> list[Row]:
    """Return the rows of what a script needs, in time and in memory."""
    there, missing = present([name for name in NEEDED if name not in {"ours", "torch"}])
    pythons = {name: each.python for name, each in there.items()}
    pythons |= {"ours": sys.executable, "torch": sys.executable}
    peaks: dict[str, list[float]] = {name: [] for name in pythons}

    def once(name: str) -> float:
        took, peak = fresh(pythons[name], TAKEN.format(imports=NEEDED[name]))
        peaks[name].append(peak)
        return took * 1e3

    ways = {name: partial(once, name) for name in pythons}
    samples = interleaved(ways, runs, failed=missing)
    titles = {"torch": "torch alone"} | {name: each.name for name, each in there.items()}
    what = "import what a script needs"
    return [
        *against("startup/import", what, "ms", samples, titles, missing=missing),
        *against("startup/import-memory", f"{what}: memory", "MB", peaks, titles, missing=missing),
    ]


def commands(runs: int) -> list[Row]:
    """Return the rows of the command `ezpz`, as its console script."""
    script = str(Path(sysconfig.get_path("scripts"), "ezpz"))
    rows = []
    asked = (("help", "--help", {0}, 20), ("doctor", "doctor", {0, 1}, 3))  # 1: it found an error
    for name, words, statuses, limit in asked:
        once = partial(seconds_of, [script, words], statuses)
        took = [once() * 1e3 for _ in range(min(runs, limit) + 1)][1:]
        rows.append(alone(f"startup/command/{name}", f"ezpz {words}", "ms", took))
    return rows


def seconds_of(words: list[str], statuses: Collection[int]) -> float:
    """Time one run of a command.

    Raises:
        CalleeError: It ended with another exit status, or by an error of Python's, which is 1, too.
    """
    began = time.perf_counter()
    done = subprocess.run(
        words, env=environment(), check=False, stdin=subprocess.DEVNULL, capture_output=True
    )
    taken = time.perf_counter() - began
    if done.returncode not in statuses or b"Traceback (most recent call last)" in done.stderr:
        said = last_line(done.stderr.decode(errors="replace"))
        raise CalleeError(f"{words} ended with {done.returncode}: {said}")
    return taken


def measure(runs: int) -> list[Row]:
    """Return all rows of this section."""
    rows = []
    for module in ("ezpz", "ezpz_topo", "ezpz_launch"):
        once: Callable[[], float] = partial(
            lambda name: fresh(sys.executable, OWN, name)[0], module
        )
        own = [once() for _ in range(runs + 1)][1:]
        rows.append(alone(f"startup/own/{module}", f"import {module}, own modules", "ms", own))
    over = [fresh(sys.executable, OVER_TORCH)[0] for _ in range(runs + 1)][1:]
    rows.append(
        alone("startup/over-torch/ezpz_tp", "import ezpz_tp after torch", "ms", times(1e3, over))
    )
    return [*rows, *commands(runs), *imports(runs)]


def main(runs: int = 9, json: str = "") -> None:
    """Print the figures, and write them to a file if one is named.

    Args:
        runs: How often each is run.
        json: A file to write the figures to.
    """
    finish(measure(runs), json)


if __name__ == "__main__":
    fire.Fire(main)
