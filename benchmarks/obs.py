"""What watching a run costs: ``hatch run bench:obs [--rounds=5] [--json=FILE]``.

In one run: `History.update` against TensorBoard's and W&B's logging of the same numbers (their
callers' side), statistics over two gloo ranks against one bare all-gather of the same bytes, log
lines, and a million steps: how much memory the writer holds and how long a report takes.
"""

import io
import json as json_module
import logging
import multiprocessing
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fire
import torch
import torch.distributed as dist

import ezpz_obs

METRICS = {f"train/metric{i}": 0.123456789 * (i + 1) for i in range(10)}
Figures = dict[str, float]


def median_us(call: Callable[[], object], calls: int = 3000) -> float:
    """Return the median of single calls, in microseconds."""
    taken = []
    for _ in range(calls):
        began = time.perf_counter_ns()
        call()
        taken.append(time.perf_counter_ns() - began)
    return statistics.median(taken) / 1e3


def mean_us(call: Callable[[], object], calls: int = 20_000) -> float:
    """Return the mean of many calls, for what a clock's own 0.1 µs would hide."""
    began = time.perf_counter_ns()
    for _ in range(calls):
        call()
    return (time.perf_counter_ns() - began) / calls / 1e3


def recorders(folder: Path) -> dict[str, Callable[[], object]]:
    """Return what logs ten numbers, by name."""
    calls: dict[str, Callable[[], object]] = {}
    for name, options in {
        "update, no summary": {"summary": False},
        "update": {},
        "update, checksum": {"checksum": True},
        "update, synced each time": {"sync": True},
    }.items():
        history = ezpz_obs.History(folder / name.replace(", ", "-"), **options)  # type: ignore[arg-type]
        calls[name] = lambda history=history: history.update(METRICS)
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  # where it is installed

        writer = SummaryWriter(str(folder / "tensorboard"))
        calls["TensorBoard"] = lambda: [
            writer.add_scalar(name, value, 0) for name, value in METRICS.items()
        ]
    except ImportError as error:
        print(f"TensorBoard is not measured: {error}")
    try:
        import wandb  # noqa: PLC0415  # where it is installed

        run = wandb.init(mode="offline", dir=str(folder), settings=wandb.Settings(console="off"))
        calls["W&B offline"] = lambda: run.log(METRICS)
    except ImportError as error:
        print(f"W&B is not measured: {error}")
    return calls


def log_lines(folder: Path) -> dict[str, Callable[[], object]]:
    """Return log calls, by name, with where their lines go."""
    file = (folder / "console.log").open("w")
    console = ezpz_obs.get_logger("bench", env={}, file=file)
    json_file = (folder / "lines.jsonl").open("w")
    as_json = ezpz_obs.get_logger("bench", env={"EZPZ_LOG_FORMAT": "json"}, file=json_file)
    stdlib = logging.getLogger("bench.stdlib")
    stdlib.propagate = False
    stdlib.addHandler(logging.StreamHandler(io.StringIO()))
    return {
        "console line": lambda: console.info("step done", step=3, loss=0.25),
        "JSON line": lambda: as_json.info("step done", step=3, loss=0.25),
        "stdlib line": lambda: stdlib.warning("step done step=%d loss=%f", 3, 0.25),
        "suppressed call": lambda: console.debug("step done", step=3, loss=0.25),
    }


def rank(rank: int, port: int, calls: int, said: Any) -> None:
    """Be one of two ranks: an update with statistics against one bare all-gather, in turn."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = tempfile.TemporaryDirectory()
    history = ezpz_obs.History(folder.name, cross_rank=True, summary=False)
    later = ezpz_obs.History(f"{folder.name}/later", cross_rank=True, deferred=True, summary=False)
    mine = torch.ones(32, dtype=torch.float64)
    every = [torch.empty(32, dtype=torch.float64) for _ in range(2)]
    bare = dist.new_group()
    calls_of: dict[str, Callable[[], object]] = {
        "update": lambda: history.update(METRICS),
        "deferred": lambda: later.update(METRICS),
        "all_gather": lambda: dist.all_gather(every, mine, group=bare),
    }
    taken: dict[str, list[float]] = {name: [] for name in calls_of}
    for turn in range(calls):
        for name, call in calls_of.items():
            dist.barrier()
            if name == "deferred":
                time.sleep(0.002)  # a step, in which the exchange goes on
            began = time.perf_counter_ns()
            call()
            if turn >= 20:
                taken[name].append((time.perf_counter_ns() - began) / 1e3)
    history.close()
    later.close()
    said.put((rank, {name: statistics.median(values) for name, values in taken.items()}))
    dist.destroy_process_group()
    folder.cleanup()


def across_ranks(calls: int) -> Figures:
    """Return microseconds of an update with statistics and of one bare all-gather, on rank 0."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    said = context.Queue()
    ranks = [context.Process(target=rank, args=(place, port, calls, said)) for place in range(2)]
    for process in ranks:
        process.start()
    figures: Figures = dict(said.get() for _ in ranks)[0]
    for process in ranks:
        process.join()
    return figures


MILLION = """
import sys, time, ezpz_obs
steps, folder = int(sys.argv[1]), sys.argv[2]
metrics = {f"train/metric{i}": 0.123456789 * (i + 1) for i in range(10)}
with ezpz_obs.History(folder, summary=False) as history:
    began = time.perf_counter()
    for step in range(steps):
        metrics["train/metric0"] = step * 1e-3
        history.update(metrics)
    print(time.perf_counter() - began)
print(int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024)
"""
REPORT = """
import sys, time
began = time.perf_counter()
import ezpz_obs
ezpz_obs.write_report([sys.argv[1]])
print(time.perf_counter() - began)
print(int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024)
"""


def in_a_process(code: str, *words: str) -> list[float]:
    """Run code in a fresh process; return the numbers that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True
    )
    return [float(line) for line in done.stdout.split()]


def main(rounds: int = 5, steps: int = 1_000_000, json: str = "") -> None:
    """Print the figures, and write them to a file if one is named.

    Args:
        rounds: How often each group is measured; the medians are of these.
        steps: Of the long run.
        json: A file to write the figures to.
    """
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        calls = recorders(folder)
        for what, times in interleaved(calls, rounds, lambda call: median_us(call, 1000)).items():
            figures[what] = times
        for what, times in interleaved(log_lines(folder), rounds, mean_us).items():
            figures[what] = times
        both = across_ranks(200 * rounds)
        figures |= {"2 ranks: update": both["update"], "2 ranks: deferred": both["deferred"],
                    "2 ranks: all_gather": both["all_gather"]}  # fmt: skip
        seconds, megabytes = in_a_process(MILLION, str(steps), str(folder / "million"))
        figures[f"{steps:,} steps: s"], figures[f"{steps:,} steps: MB"] = seconds, megabytes
        seconds, megabytes = in_a_process(REPORT, str(folder / "million"))
        figures["report of them: s"], figures["report of them: MB"] = seconds, megabytes
    for what, figure in figures.items():
        print(f"{what:28} {figure:10.2f}{' µs' if not what.endswith((' s', 'MB')) else ''}")
    for what, one, other, wanted in (
        ("update with statistics / all_gather", "2 ranks: update", "2 ranks: all_gather", "<= 1.3"),
        ("TensorBoard / update", "TensorBoard", "update", ">= 10"),
        ("W&B offline / update", "W&B offline", "update", ">= 10"),
        ("W&B offline / update, no summary", "W&B offline", "update, no summary", ">= 10"),
    ):
        if one in figures and other in figures:
            print(f"{what:40} {figures[one] / figures[other]:6.2f} x  (wanted {wanted})")
    print(f"this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MB")
    if json:
        Path(json).write_text(json_module.dumps(figures, indent=2))


def interleaved(
    calls: dict[str, Callable[[], object]],
    rounds: int,
    measure: Callable[[Callable[[], object]], float],
) -> Figures:
    """Measure all in turn, so often, and return the medians."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            taken[name].append(measure(call))
    return {name: statistics.median(values) for name, values in taken.items()}


if __name__ == "__main__":
    fire.Fire(main)
