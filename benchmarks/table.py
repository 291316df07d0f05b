"""How rows are shown and kept: a table of at most 100 columns, and JSON."""

import json
import os
import platform
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

import goals as goals_module
from goals import Goal, Verdict
from paired import Row

SCHEMA = 1
WIDTH = 100
_LABEL = 38
_LARGER = {"ns": "us", "us": "ms", "ms": "s"}
_RED, _PLAIN = "\033[31m", "\033[0m"


class ResultError(ValueError):
    """A file is not a result of these benchmarks; the message names file and fault."""


def lines(rows: Sequence[Row], goals: Sequence[Goal], colour: bool = False) -> Iterator[str]:
    """Return the table, line by line: a heading a section, and below it a line a figure."""
    for section, of_section in groupby(rows, lambda row: row.key.split("/")[0]):
        heads = f"{'ours':>10}{'theirs':>10}{'ratio':>8}  {'quartiles':<12} goal"
        yield f"{section:<{_LABEL}}{heads}"
        for what, alike in groupby(of_section, lambda row: row.what):
            together = list(alike)
            several = len(together) > 1 or len(_label(together[0])) > _LABEL - 3
            if several:
                yield f"  {what}"[:WIDTH]
            for row in together:
                label = f"    / {row.peer}" if several and row.peer else f"  {_label(row)}"
                label = "" if several and not row.peer else label
                yield from _lines_of(row, label, goals, colour)
        yield ""


def _label(row: Row) -> str:
    return f"{row.what} / {row.peer}" if row.peer else row.what


def _lines_of(row: Row, label: str, goals: Sequence[Goal], colour: bool) -> Iterator[str]:
    verdicts = goals_module.judge(row, goals)
    if row.ours is None:
        # A reason is often a library's: it is to be read to its end.
        text = (
            f"{label}: not measured: {row.missing}" if label else f"    not measured: {row.missing}"
        )
        yield from textwrap.wrap(text, WIDTH, subsequent_indent=" " * 6)
        return
    cells = f"{_figure(row.ours.median, row.unit):>10}"
    if row.theirs is not None and row.ratio is not None:
        ratio = row.ratio
        box = f"{_short(ratio.low)} {_short(ratio.high)}" if ratio.count > 1 else ""
        cells += f"{_figure(row.theirs.median, row.unit):>10}{_short(ratio.median):>8}  {box:<12}"
    else:
        box = f"{_short(row.ours.low)} {_short(row.ours.high)}" if row.ours.count > 1 else ""
        cells += f"{'':>18}  {box:<12}"
    first, *more = [_goal(verdict, row.unit, colour) for verdict in verdicts] or [""]
    yield f"{label:<{_LABEL}}{cells} {first}".rstrip()
    for text in more:
        yield f"{'':<{_LABEL + 43}}{text}"


def _goal(verdict: Verdict, unit: str, colour: bool) -> str:
    goal, value = verdict.goal, verdict.value
    said = {
        "ratio": goal.limit,
        "inverse": f"1/r {goal.limit}",
        "ours": f"{goal.limit} {unit}",
        "over": f"+{_short(value or 0)} {goal.limit}",
    }[goal.figure]
    if goal.beyond:
        said = f"{_short(value or 0)} {goal.limit}"
    if verdict.holds is False:
        return f"{_RED}MISSED {said}{_PLAIN}" if colour else f"MISSED {said}"
    return said


def _figure(value: float, unit: str) -> str:
    while value >= 10_000 and unit in _LARGER:
        value, unit = value / 1000, _LARGER[unit]
    return f"{_short(value)} {unit}"


def _short(value: float) -> str:
    """Three digits that count."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    decimals = 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:.{decimals}f}"


def show(rows: Sequence[Row]) -> None:
    """Print the table, and count what was missed and what was not measured."""
    goals = goals_module.load()
    on_terminal = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    colour = on_terminal or bool(os.environ.get("FORCE_COLOR"))
    for line in lines(rows, goals, colour):
        print(line)
    verdicts = [verdict for row in rows for verdict in goals_module.judge(row, goals)]
    missed = [verdict for verdict in verdicts if verdict.holds is False]
    open_ = sum(verdict.holds is None for verdict in verdicts)
    held = len(verdicts) - len(missed) - open_
    print(f"{held} of {len(verdicts)} goals hold, {len(missed)} MISSED, {open_} not measured")
    for verdict in missed:
        text = f"MISSED  {verdict.goal.what}: {verdict.value:.4g} (goal {verdict.goal.limit})"
        print(f"{_RED}{text}{_PLAIN}" if colour else text)
    for verdict in verdicts:
        if verdict.holds is None:
            print(f"not measured  {verdict.goal.what}")


def document(rows: Sequence[Row], **more: Any) -> dict[str, Any]:
    """Return what is written as JSON: where it was measured, and the rows with their verdicts."""
    goals = goals_module.load()
    kept = [
        row.to_json() | {"goals": [verdict.to_json() for verdict in goals_module.judge(row, goals)]}
        for row in rows
    ]
    for fields in kept:
        held = [verdict["holds"] for verdict in fields["goals"] if verdict["holds"] is not None]
        fields["holds"] = all(held) if held else None
    return {"schema": SCHEMA, "machine": machine(), **more, "rows": kept}


def machine() -> dict[str, Any]:
    """Return the facts of this machine that figures depend on, without its name."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    model = platform.processor()
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.split(":")[1].strip()
                break
    return {
        "processor": model, "cores": cores, "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(), "torch": version("torch"), "commit": commit(),
    }  # fmt: skip


def commit() -> str:
    """Return what was measured: the commit, with ``-dirty`` if files differ; empty if unknown."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"], cwd=Path(__file__).parent,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    except OSError:  # no git: an archive of the files, say
        return ""
    return done.stdout.strip()


def write(path: str, rows: Sequence[Row], **more: Any) -> None:
    """Write rows as JSON, with what else is to be said of them."""
    said = document(rows, **more)
    # A row a line, which people can compare, too.
    each = ",\n".join(json.dumps(row, allow_nan=False) for row in said.pop("rows"))
    head = json.dumps(said, allow_nan=False).removesuffix("}")
    Path(path).write_text(f'{head}, "rows": [\n{each}\n]}}\n', encoding="utf-8")


def read(path: str) -> tuple[dict[str, Any], list[Row]]:
    """Return a result's document and its rows.

    Raises:
        ResultError: It cannot be read, or is not of this schema.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        if found["schema"] == SCHEMA:
            [found["machine"][name] for name in ("processor", "cores")]
            return found, [Row.from_json(fields) for fields in found["rows"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ResultError(f"{path}: not a result of bench:all ({error!r})") from error
    raise ResultError(f"{path}: schema {found['schema']}; expected {SCHEMA}")


def finish(rows: Sequence[Row], json: str) -> None:
    """Show rows, and write them if a file is named: the end of every benchmark."""
    show(rows)
    if json:
        write(json, rows)
