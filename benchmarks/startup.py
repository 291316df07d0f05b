"""What it costs before the user's first line runs: ``hatch run bench:startup [--json=FILE]``.

Pairs are run in turn (A B A B ...) and medians are compared, so that a machine that
changes its speed changes both.
"""

import json as json_module
import os
import statistics
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import fire


def seconds(words: list[str], env: dict[str, str]) -> float:
    """Time one run of a command, in seconds."""
    began = time.perf_counter()
    subprocess.run(words, env=env, check=True, stdin=subprocess.DEVNULL, capture_output=True)
    return time.perf_counter() - began


def own_import_ms(module: str) -> float:
    """Median over 9 of the time to import a module and what it brings, in ms."""
    words = [sys.executable, "-X", "importtime", "-c", f"import {module}"]
    samples = []
    for _ in range(9):
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        samples.append(int(done.stderr.splitlines()[-1].split("|")[1]) / 1000)
    return statistics.median(samples)


def main(runs: int = 9, json: str = "") -> None:
    """Print the figures, and write them to a file if one is named.

    Args:
        runs: How often each command is run.
        json: A file to write the figures to.
    """
    scripts = sysconfig.get_path("scripts")
    env = {**os.environ, "PATH": os.pathsep.join([scripts, os.environ["PATH"]])}
    ours = [str(Path(scripts) / "ezpz-launch"), "-n", "2", "true"]
    bare = [str(Path(scripts) / "mpiexec"), "-n", "2", "true"]
    pairs = [(seconds(ours, env), seconds(bare, env)) for _ in range(runs + 1)][1:]
    launch, mpiexec = (statistics.median(column) * 1000 for column in zip(*pairs, strict=True))
    figures = {
        "ezpz-launch -n 2 true, ms": round(launch, 1),
        "mpiexec -n 2 true, ms": round(mpiexec, 1),
        "ezpz-launch over mpiexec, ms": round(launch - mpiexec, 1),
        **{
            f"import {module}, ms": round(own_import_ms(module), 2)
            for module in ("ezpz", "ezpz_topo", "ezpz_launch", "fire")
        },
    }
    for name, value in figures.items():
        print(f"{name:<32} {value}")
    if json:
        Path(json).write_text(json_module.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    fire.Fire(main)
