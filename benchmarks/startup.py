"""What it costs before a script begins: ``hatch run bench:startup [--runs=9] [--json=FILE]``.

Imports in fresh processes, in turn: of what a training script needs from us and from accelerate,
Lightning Fabric and DeepSpeed, with ``import torch`` as the yardstick; our own modules' share; and
the `ezpz` command.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import fire
from callee import CalleeError, environment, fresh, last_line
from paired import Row, absent, against, alone, interleaved, times
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

    samples = interleaved({name: partial(once, name) for name in pythons}, runs)
    titles = {"torch": "torch alone"} | {name: each.name for name, each in there.items()}
    what = "import what a script needs"
    return [
        *against("startup/import", what, "ms", samples, titles, missing=missing),
        *against("startup/import-memory", f"{what}: memory", "MB", peaks, titles),
    ]


def commands(runs: int) -> list[Row]:
    """Return the rows of the command `ezpz`."""
    rows = []
    for name, words, limit in (("help", ["--help"], 20), ("doctor", ["doctor"], 3)):
        command = [sys.executable, "-m", "ezpz", *words]
        key, what = f"startup/command/{name}", f"ezpz {words[0]}"
        try:
            took = [seconds_of(command) * 1e3 for _ in range(min(runs, limit) + 1)][1:]
        except CalleeError as error:
            rows.append(absent(key, what, "", str(error)))
        else:
            rows.append(alone(key, what, "ms", took))
    return rows


def seconds_of(words: list[str]) -> float:
    """Time one run of a command that reports by its exit status whether all is well (0, 1)."""
    began = time.perf_counter()
    done = subprocess.run(
        words, env=environment(), check=False, stdin=subprocess.DEVNULL, capture_output=True
    )
    taken = time.perf_counter() - began
    if done.returncode not in {0, 1}:
        said = last_line(done.stderr.decode(errors="replace"))
        raise CalleeError(f"exit status {done.returncode}: {said}")
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
