"""Everything beside everyone: ``hatch run bench:all [--json=FILE] [--plots=FOLDER]``.

Every benchmark of this folder that has peers or goals, each in a process of its own, one after the
other: a table, JSON, and plots. A peer that is not here is said so, and so is a section that fails;
the others go on.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import fire
import goals
from callee import environment, last_line
from paired import Row, absent, alone
from table import ResultError, read, show, write

LIMIT = 600.0
"""Seconds that a section may take; the longest takes a quarter of it on two idle cores."""
GRACE = 30.0
"""Seconds that a section has to tidy up; a private Slurm takes up to 20."""

HERE = Path(__file__).parent
# Each section is the benchmark of its name, with its share of the runs.
SECTIONS: dict[str, Callable[[int], list[str]]] = {
    "startup": lambda runs: [f"--runs={runs}"],
    "nodelists": lambda runs: [f"--runs={4 * runs}"],
    "topology": lambda runs: [f"--runs={4 * runs}"],
    "launch": lambda runs: [f"--runs={runs}"],
    "dist": lambda runs: [f"--rounds={8 * runs}"],
    "obs": lambda runs: [f"--rounds={2 * runs}", f"--steps={1_000_000 if runs > 2 else 10_000}"],
    "checkpoint": lambda runs: [f"--rounds={runs}"],
    "tp": lambda runs: ["--quick", f"--seconds={runs / 10}"],
    "tp_check": lambda runs: [f"--rounds={2 * runs}"],
    "tp_context": lambda runs: [f"--runs={max(3, runs // 2)}"],
    "accelerator": lambda runs: [f"--runs={2 * runs}"],
}


def run_section(name: str, runs: int) -> list[Row]:
    """Run one benchmark and return its rows; of one that failed, a row that says so."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        found, log = str(Path(folder, "found.json")), Path(folder, "log")
        words = [sys.executable, str(HERE / f"{name}.py"), *SECTIONS[name](runs)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                # What a section that is ended leaves among temporary files goes with the folder.
                [*words, f"--json={found}"], env=environment() | {"TMPDIR": folder},
                start_new_session=True, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
            try:
                status = process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                return [failed(name, f"not done after {LIMIT:.0f} s")]
            finally:
                end(process)
        if status:
            said = last_line(log.read_text(encoding="utf-8", errors="replace"))
            return [failed(name, f"exit status {status}: {said}")]
        try:
            return read(found)[1]
        except ResultError as error:
            return [failed(name, str(error))]


def failed(name: str, why: str) -> Row:
    """Return the row of a section that has no figures."""
    return absent(f"{name}/section", "the whole section", "", why)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a section with all that it began: by Ctrl-C, so that it tidies up, then by force."""
    if process.poll() is None:
        # To the benchmark alone: what it runs, it takes down (a Slurm has daemons that do not
        # belong to its process group).
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    with contextlib.suppress(ProcessLookupError):  # nothing is left of it
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def lost_goals(rows: list[Row], sections: list[str]) -> list[Row]:
    """Return a row for every goal of these sections that no row measures: none is hidden."""
    keys = {row.key for row in rows}
    return [
        absent(goal.row, goal.what, "", "no benchmark gave this row")
        for goal in goals.load()
        if goal.row and goal.row not in keys and goal.row.split("/")[0] in sections
    ]


def refused(why: str) -> NoReturn:
    """End by a wrong option."""
    print(why, file=sys.stderr)
    raise SystemExit(2)


def chosen(only: Any) -> list[str]:
    """Return the names of the sections that were asked for, each once."""
    names = list(only) if isinstance(only, list | tuple) else [only]
    if unknown := [name for name in names if name not in SECTIONS]:
        refused(f"--only={unknown[0]}: expected some of {', '.join(SECTIONS)}")
    return list(dict.fromkeys(names))


def check_options(json: Any, plots: Any, runs: Any) -> None:
    """Refuse what would be an error only after minutes of measuring."""
    if type(runs) is not int or runs < 1:
        refused(f"--runs={runs}: expected a whole number above 0")
    for name, path in (("json", json), ("plots", plots)):
        if not isinstance(path, str):
            refused(f"--{name}: expected --{name}=PATH")
    if json and (not Path(json).parent.is_dir() or Path(json).is_dir()):
        refused(f"--json={json}: expected a file in a folder that is there")
    if plots and Path(plots).exists() and not Path(plots).is_dir():
        refused(f"--plots={plots}: is no folder")


def end_in_order() -> None:
    """Let signals end this process by an exception, so that the section that runs is ended, too."""

    def stop(number: int, _frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    # Shells have it ignored in what they start in the background, and sections inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def main(json: str = "", plots: str = "", only: Any = "", runs: int = 5) -> None:
    """Measure, and print a table.

    Exit status 1: a section failed, or a goal has no row. Goals that do not hold are said in red,
    and counted. 2: a wrong option.

    Args:
        json: A file to write the figures to.
        plots: A folder to write the plots to, as SVG.
        only: Sections, with commas between; default: all.
        runs: How often the slowest things are measured; faster ones in proportion.
    """
    check_options(json, plots, runs)
    sections = chosen(only) if only else list(SECTIONS)
    began, load = time.monotonic(), os.getloadavg()[0]
    if load > 1:
        print(f"the machine is not idle (load {load:.1f}): spreads will be wide")
    rows: list[Row] = []
    for name in sections:
        print(f"{name} ...", end=" ", flush=True)
        started = time.monotonic()
        rows += run_section(name, runs)
        print(f"{time.monotonic() - started:.0f} s", flush=True)
    minutes = (time.monotonic() - began) / 60
    if not only:
        rows.append(alone("all/minutes", "everything, side by side", "min", [minutes]))
    lost = lost_goals(rows, [*sections, "all"] if not only else sections)
    rows += lost
    order = [*SECTIONS, "all"]
    rows.sort(key=lambda row: order.index(row.key.split("/")[0]))
    print()
    show(rows)
    if json:
        date = time.strftime("%Y-%m-%d", time.gmtime())
        loads = [round(load, 2), round(os.getloadavg()[0], 2)]
        write(json, rows, date=date, load=loads, runs=runs, minutes=round(minutes, 1))
    if plots:
        from plots import draw  # noqa: PLC0415  # matplotlib takes a second, and no part in figures

        for path in draw(rows, Path(plots)):
            print(path)
    if lost or any(row.key.endswith("/section") for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    end_in_order()
    fire.Fire(main)
