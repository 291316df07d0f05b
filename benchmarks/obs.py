"""What watching a run costs: ``hatch run bench:obs [--rounds=5] [--json=FILE]``.

`History.update` against TensorBoard's, W&B's, MLflow's and trackio's logging of the same numbers
(their callers' side; in a tight loop, and with a step of a millisecond between, which leaves caches
cold and their threads time), each in a process of its own environment, in turn; statistics over
1, 2 and 4 gloo ranks against one bare all-gather of the same bytes; log lines against structlog's
own, through the same processors; and a million steps: how much memory the writer holds and how long
a report takes.
"""

import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import fire
from callee import Callee, begin, fresh
from paired import Row, absent, against, alone, beside, interleaved, times
from peers import present
from ranks import ranks as world
from table import finish

# Whoever trains has torch already: it is there on all sides, and its memory counts on none.
METRICS = """
import torch
before = peak_mb()
metrics = {f'train/metric{i}': 0.123456789 * (i + 1) for i in range(10)}
"""
HISTORY = """
import ezpz_obs
history = ezpz_obs.History(words[0] + "/" + method)
method = getattr(history, method)
def call(): method(metrics)
close = history.close
"""
HISTORIES = {
    "update": ("update, no summary", "record"),
    "update-summary": ("update with its summary", "update"),
}
# Of these one is compared with the peers.
OURS = {name: f"ours-{name}" for name in HISTORIES} | {"update-summary": "ours"}
PEERS = {
    "TensorBoard": """
from torch.utils.tensorboard import SummaryWriter
writer = SummaryWriter(words[0] + "/tensorboard")
def call():
    for name, value in metrics.items():
        writer.add_scalar(name, value, 0)
close = writer.close
""",
    "W&B": """
import wandb
run = wandb.init(mode="offline", dir=words[0], settings=wandb.Settings(console="off"))
def call(): run.log(metrics)
close = run.finish
""",
    "MLflow": """
import os
os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
import mlflow
mlflow.set_tracking_uri("file://" + words[0] + "/mlruns")
mlflow.start_run()
steps = iter(range(10**9))
def call(): mlflow.log_metrics(metrics, step=next(steps))
close = mlflow.end_run
""",
    "trackio": """
import os
os.environ |= {"TRACKIO_DIR": words[0] + "/trackio", "HF_HOME": words[0] + "/huggingface"}
import trackio
run = trackio.init("bench", embed=False, auto_log_gpu=False, auto_log_cpu=False)
def call(): run.log(metrics)
close = run.finish
""",
}
LINES = {
    "line-console": ("console line", "console", "info"),
    "line-json": ("JSON line", "json", "info"),
    "line-suppressed": ("suppressed call", "console", "debug"),
}
LOG = """
import os, sys, ezpz_obs
os.environ["EZPZ_LOG_FORMAT"] = "FORM"
sys.stderr = open(words[0] + "/ours.log", "w")
log = ezpz_obs.get_logger("bench")
def call(): log.LEVEL("step done", step=3, loss=0.25)
"""
STRUCTLOG = """
import logging, structlog
from ezpz_obs._context import find_rank_info
from ezpz_obs._processors import make_chain, make_formatter
info = find_rank_info()
chain = make_chain(info)
handler = logging.StreamHandler(open(words[0] + "/structlog.log", "w"))
handler.setFormatter(make_formatter(chain, info, as_json="FORM" == "json", colors=False))
standard = logging.getLogger("bench")
standard.propagate = False
standard.addHandler(handler)
standard.setLevel(logging.INFO)
log = structlog.wrap_logger(
    standard,
    processors=[structlog.stdlib.filter_by_level, *chain,
                structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
    wrapper_class=structlog.stdlib.BoundLogger,
)
def call(): log.LEVEL("step done", step=3, loss=0.25)
"""
MILLION = """
import sys, time, ezpz_obs
steps, folder = int(sys.argv[1]), sys.argv[2]
metrics = {f"train/metric{i}": 0.123456789 * (i + 1) for i in range(10)}
with ezpz_obs.History(folder) as history:
    began = time.perf_counter()
    for step in range(steps):
        metrics["train/metric0"] = step * 1e-3
        history.record(metrics)
    print(time.perf_counter() - began)
print(peak_mb())
"""
REPORT = """
import sys, time
began = time.perf_counter()
import ezpz_obs
ezpz_obs.write_report([sys.argv[1]])
print(time.perf_counter() - began, peak_mb())
"""


def recorders(rounds: int, folder: str) -> list[Row]:
    """Return the rows of recording ten numbers: by us in each way, and by the others."""
    there, missing = present(list(PEERS))
    programs = {
        OURS[name]: (sys.executable, f"{METRICS}method = {method!r}\n{HISTORY}")
        for name, (_, method) in HISTORIES.items()
    }
    programs |= {name: (each.python, METRICS + PEERS[name]) for name, each in there.items()}
    with ExitStack() as running:
        # W&B leaves temporary folders behind.
        env = {"TMPDIR": folder}
        callees = begin(programs, folder, running=running, failed=missing, env=env)
        ways = {name: partial(callee.typical, 500) for name, callee in callees.items()}
        samples = interleaved(ways, rounds, failed=missing)
        held = {name: [callees[name].peak()] for name in samples}
        paced = {name: partial(callees[name].paced, 50) for name in samples}
        slow = interleaved(paced, rounds, failed=missing)
    samples = {name: times(1e6, found) for name, found in samples.items()}
    slow = {name: times(1e6, found) for name, found in slow.items()}
    rows = [
        alone(f"obs/{name}", what, "us", samples[OURS[name]])
        for name, (what, _) in HISTORIES.items()
    ]
    titles = {name: each.name for name, each in there.items()}
    what = HISTORIES["update-summary"][0]
    pause = "a step between"
    return [
        *rows,
        alone("obs/paced", f"{HISTORIES['update'][0]}, {pause}", "us", slow["ours-update"]),
        *against("obs/update-summary", what, "us", samples, titles, missing=missing),
        *against("obs/paced-summary", f"{what}, {pause}", "us", slow, titles, missing=missing),
        *against("obs/memory-added", "memory that recording adds", "MB", held, titles,
                 missing=missing),
    ]  # fmt: skip


def log_lines(rounds: int, folder: str) -> list[Row]:
    """Return the rows of a call that logs, beside structlog's over the same processors."""
    rows = []
    for name, (what, form, level) in LINES.items():
        code = LOG.replace("FORM", form).replace("LEVEL", level)
        peer = STRUCTLOG.replace("FORM", form).replace("LEVEL", level)
        with (
            Callee(sys.executable, code, folder) as ours,
            Callee(sys.executable, peer, folder) as theirs,
        ):
            ways = {"ours": partial(ours.mean, 2_000), "theirs": partial(theirs.mean, 2_000)}
            samples = interleaved(ways, rounds)
        in_us = {each: times(1e6, found) for each, found in samples.items()}
        rows.append(
            beside(f"obs/{name}", what, "us", (in_us["ours"], in_us["theirs"]), "structlog")
        )
    return rows


def across_ranks(calls: int) -> list[Row]:
    """Return the rows of an update with statistics over the ranks, on rank 0."""
    rows = []
    for count in (1, 2, 4):
        found = world("obs_ranks.py", {"calls": calls}, count)
        in_us = {name: times(1e6, samples) for name, samples in found.items()}
        for name, what in (
            ("ours", f"update with statistics, {count} ranks"),
            ("deferred", f"the same, deferred, {count} ranks"),
        ):
            key = f"obs/ranks-{count}" + ("" if name == "ours" else "-deferred")
            pair = in_us[name], in_us["all_gather"]
            rows.append(beside(f"{key}/all_gather", what, "us", pair, "all_gather"))
    return rows


def million(steps: int, folder: str) -> list[Row]:
    """Return the rows of a long run and its report, each once, in fresh processes."""
    run = str(Path(folder, "million"))
    wrote, held = fresh(sys.executable, MILLION, str(steps), run)
    reported, held_then = fresh(sys.executable, REPORT, run)
    figures = (
        ("write", "recorded", "s", wrote),
        ("memory", "memory of the writer", "MB", held),
        ("report", "report", "s", reported),
        ("report-memory", "memory of the report", "MB", held_then),
    )
    whole = steps == 1_000_000
    key, name = ("million", "a million steps") if whole else ("some", f"{steps:,} steps")
    rows = [alone(f"obs/{key}-{end}", f"{name}: {what}", unit, [x])
            for end, what, unit, x in figures]  # fmt: skip
    if not whole:  # and nobody is to take them for those
        rows += [
            absent(f"obs/million-{end}", f"a million steps: {what}", "", f"only {steps:,} were run")
            for end, what, _, _ in figures
        ]
    return rows


def main(rounds: int = 9, steps: int = 1_000_000, json: str = "") -> None:
    """Print the figures, and write them to a file if one is named.

    Args:
        rounds: How often each group is measured; the medians are of these.
        steps: Of the long run.
        json: A file to write the figures to.
    """
    with tempfile.TemporaryDirectory() as folder:
        rows = recorders(rounds, folder)
        rows += log_lines(rounds, folder)
        rows += across_ranks(100 * rounds)
        rows += million(steps, folder)
    finish(rows, json)


if __name__ == "__main__":
    fire.Fire(main)
