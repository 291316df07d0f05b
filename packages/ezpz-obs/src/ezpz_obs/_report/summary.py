"""How a run went: its attempts, its warnings, and what its numbers come to."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np

from ezpz_obs._run import Run, describe_damage
from ezpz_obs._text import iterate_leaves

from .series import Series, group_metrics, read_series
from .words import (
    NOTHING,
    TIMES,
    clean,
    format_number,
    format_seconds,
    format_share,
    format_time,
)

STEP_PARTS: Final = ("data_s", "forward_s", "backward_s", "optimizer_s")
"""What a step is made of; ``step_s`` is all of it."""

_MOST_NOTICES: Final = 200
_MOST_DAMAGED: Final = 5  # lines that are named; all are counted
_LONGEST: Final = 300
_LIVE_SECONDS: Final = 60.0  # since the last write, of a run without an end
_HEADER_FACTS: Final = ("machine", "hosts", "world_size", "job", "git", "argv", "last_fault")

Row = tuple[str, ...]


class Table(NamedTuple):
    """Rows of texts; ``marked`` are the rows that a reader should see."""

    title: str
    columns: Row
    rows: list[Row]
    marked: frozenset[int] = frozenset()
    is_text: bool = True  # else numbers, which are aligned right


class Tile(NamedTuple):
    """A figure in large letters."""

    label: str
    value: str
    note: str


@dataclass(frozen=True)
class Attempt:
    """What one start of the run did, up to its end or the next start."""

    began: float | None  # seconds since 1970
    first_step: int | None
    last_step: int | None
    seconds: float | None
    end: str | None  # its cause; None where none was written


@dataclass(frozen=True)
class Summary:
    """A run, read once."""

    run: Run
    label: str
    header: Mapping[str, Any]  # of the last attempt
    series: dict[str, Series]
    groups: dict[str, bool]
    times: Series  # of all records
    attempts: list[Attempt]

    @property
    def outcome(self) -> tuple[str, str]:
        """How it ended: "good", "bad" or "open", and in words."""
        age = time.time() - self.run.path.stat().st_mtime
        return describe_end(self.attempts[-1].end, age)

    def get_series(self, metric: str) -> Series:
        """Return the values of a metric: its mean over the ranks where that is known."""
        if self.groups[metric] or metric not in self.series:
            return self.series[f"{metric}/mean"]
        return self.series[metric]

    def find(self, part: str) -> Series | None:
        """Return the first metric with this basename and a finite value; None without one."""
        for name in self.groups:
            if metric_basename(name) == part and len(self.get_series(name).finite):
                return self.get_series(name)
        return None


def metric_basename(name: str) -> str:
    """Return the last part of a name: "loss" of "train/loss"."""
    return name.rpartition("/")[2]


def summarize_run(run: Run, label: str) -> Summary:
    """Read a run."""
    headers = run.headers or [{}]
    series, times = read_series(run)
    groups = group_metrics(series, headers[-1].get("world_size"))
    attempts = _find_attempts(headers, run.events, times)
    return Summary(run, label, headers[-1], series, groups, times, attempts)


def describe_end(end: str | None, age: float) -> tuple[str, str]:
    """Return "good", "bad" or "open" and the words for a cause of end and seconds since then."""
    if end == "closed":
        return "good", "finished"
    if end == "exit":
        return "good", "finished: the script ended"
    if end is not None:
        return "bad", f"failed: {clean(end)}"
    if age < _LIVE_SECONDS:
        return "open", "running, or killed just now: no end was written yet"
    return "bad", f"killed, or stuck: no end was written, and nothing for {format_seconds(age)}"


def _find_attempts(
    headers: list[dict[str, Any]], events: list[dict[str, Any]], times: Series
) -> list[Attempt]:
    begins = [_read_seconds(header.get("time")) for header in headers]
    ends = [event for event in events if event["event"] == "end"]
    attempts = []
    for number, began in enumerate(begins):
        until = next((later for later in begins[number + 1 :] if later), float("inf"))
        is_own = (times.values >= (began or 0.0)) & (times.values < until)
        steps = times.steps[is_own].tolist()
        last_time = float(times.values[is_own].max(initial=0.0))
        end = None
        while ends and (_read_seconds(ends[0].get("time")) or 0.0) < until:
            event = ends.pop(0)
            end = str(event.get("message", ""))
            last_time = _read_seconds(event.get("time")) or last_time
        attempt = Attempt(began, None, None, None, end)
        if steps:
            attempt = replace(attempt, first_step=steps[0], last_step=steps[-1])
        if began and last_time:
            attempt = replace(attempt, seconds=max(0.0, last_time - began))
        attempts.append(attempt)
    return attempts


def make_facts(summary: Summary) -> list[str]:
    """Return a line's worth about a run: records, ranks, hosts, restarts."""
    header = summary.header
    count = len(summary.times.steps)
    facts = ["no records"]
    if count:
        facts = [f"{count:,} records, last step {int(summary.times.steps[-1]):,}"]
        facts.append(format_seconds(sum(one.seconds or 0.0 for one in summary.attempts)))
    ranks = header.get("world_size")
    if isinstance(ranks, int):
        facts.append(_count(ranks, "rank"))
    if header.get("machine"):
        facts.append(clean(header["machine"]))
    if len(summary.attempts) > 1:
        facts.append(_count(len(summary.attempts) - 1, "restart"))
    if summary.run.damaged:
        facts.append(describe_damage(len(summary.run.damaged)))
    return facts


def _count(number: int, noun: str) -> str:
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}s"


def make_tiles(summary: Summary) -> list[Tile]:
    """Return the figures that are looked at first: loss, step time, rates, memory."""
    tiles = []
    losses = [name for name in summary.groups if metric_basename(name) == "loss"]
    losses += [name for name in summary.groups if "loss" in metric_basename(name)]
    if losses:
        series = summary.get_series(losses[0])
        lowest = series.find_extreme(greatest=False)
        note = "no number"
        if lowest is not None:
            note = f"lowest {format_number(lowest[1])} at step {lowest[0]:,}"
        tiles.append(Tile(losses[0], format_number(series.last), note))
    step_time = _measure_step_time(summary)
    if step_time is not None:
        tiles.append(step_time)
    for part, label, form in (
        ("tokens_per_s", "tokens/s", format_number),
        ("samples_per_s", "samples/s", format_number),
        ("tflops", "TFLOP/s", format_number),
        ("mfu", "MFU", format_share),
    ):
        found = summary.find(part)
        if found is not None:
            tiles.append(Tile(label, form(found.mean or 0.0), f"up to {form(found.finite.max())}"))
    found = summary.find("memory_peak_gib") or summary.find("memory_gib")
    if found is not None:
        fraction = summary.find("memory_fraction")
        note = "at most"
        if fraction is not None:
            note = f"{format_share(fraction.finite.max())} of the device"
        tiles.append(Tile("memory", f"{found.finite.max():.3g} GiB", note))
    return tiles


def _measure_step_time(summary: Summary) -> Tile | None:
    """Return the step time that was recorded, else the median from record to record."""
    found = summary.find("step_s")
    if found is not None:
        note = f"mean of step_s, up to {format_seconds(found.finite.max())}"
        return Tile("step time", format_seconds(found.mean), note)
    steps = np.diff(summary.times.steps)
    seconds = np.diff(summary.times.values)
    is_step = (steps > 0) & (seconds >= 0)
    if not is_step.any():
        return None
    median = float(np.median(seconds[is_step] / steps[is_step]))
    return Tile("step time", format_seconds(median), "median, from record to record")


def make_tables(summary: Summary) -> list[Table]:
    """Return all tables of a run that have something in them."""
    tables = [
        make_rank_table(summary),
        make_notice_table(summary),
        _make_attempt_table(summary),
        make_metric_table(summary),
        _make_fact_table("Configuration", summary.header.get("config")),
        _make_fact_table("Where and with what", _environment_facts(summary)),
        _make_fact_table("Versions", summary.header.get("versions")),
    ]
    return [table for table in tables if table.rows]


def make_rank_table(summary: Summary) -> Table:
    """Return which ranks are at the extremes of the metrics."""
    rows: list[Row] = []
    for name, has_spread in summary.groups.items():
        if not has_spread or f"{name}/max_rank" not in summary.series:
            continue
        greatest = _format_most_common(summary.series[f"{name}/max_rank"])
        least = _format_most_common(summary.series[f"{name}/min_rank"])
        rows.append((name, greatest, least, format_number(summary.series[f"{name}/std"].mean, 3)))
    # Times first: whoever is slow there holds up all others.
    rows.sort(key=lambda row: metric_basename(row[0]) not in ("step_s", *STEP_PARTS))
    columns = ("metric", "greatest on", "least on", "std, mean")
    return Table("Ranks", columns, rows, is_text=False)


def _format_most_common(series: Series) -> str:
    ranks, counts = np.unique(series.values, return_counts=True)
    place = int(counts.argmax())
    return f"rank {int(ranks[place])} ({format_share(counts[place] / counts.sum())})"


def _make_attempt_table(summary: Summary) -> Table:
    rows: list[Row] = []
    marked = set()
    for number, attempt in enumerate(summary.attempts):
        if number == len(summary.attempts) - 1:
            state, words = summary.outcome
        elif attempt.end is None:
            state = "bad"
            words = "killed: no end was written"
        else:
            state, words = describe_end(attempt.end, 0.0)
        if state == "bad":
            marked.add(number)
        steps = NOTHING
        if attempt.first_step is not None:
            steps = f"{attempt.first_step:,} {NOTHING} {attempt.last_step:,}"
        seconds = format_seconds(attempt.seconds)
        rows.append((str(number), format_time(attempt.began), seconds, steps, words))
    columns = ("attempt", "began", "lasted", "steps that count", "end")
    return Table("Attempts", columns, rows, frozenset(marked))


def make_metric_table(summary: Summary) -> Table:
    """Return each metric's last value, mean, std, extremes, and how many are not finite."""
    rows: list[Row] = []
    marked = set()
    for name in summary.groups:
        series = summary.get_series(name)
        finite = series.finite
        odd = len(series.values) - len(finite)
        if odd:
            marked.add(len(rows))
        std = None
        if len(finite):
            std = float(finite.std())
        rows.append(
            (
                name, format_number(series.last), format_number(series.mean), format_number(std),
                _format_extreme(series.find_extreme(greatest=False)),
                _format_extreme(series.find_extreme(greatest=True)),
                f"{len(series.values):,}", f"{odd:,}" if odd else NOTHING,
            )
        )  # fmt: skip
    columns = ("metric", "last", "mean", "std", "least", "greatest", "values", "NaN, ∞")
    return Table("Metrics", columns, rows, frozenset(marked), is_text=False)


def _format_extreme(extreme: tuple[int, float] | None) -> str:
    if extreme is None:
        return NOTHING
    return f"{format_number(extreme[1])} @ {extreme[0]:,}"


def _make_fact_table(title: str, facts: object) -> Table:
    rows: list[Row] = []
    if isinstance(facts, Mapping):
        rows = [(clean(name), clean(value)) for name, value in iterate_leaves(facts)]
    return Table(title, ("", ""), rows)


def _environment_facts(summary: Summary) -> dict[str, Any]:
    facts: dict[str, Any] = {"file": summary.run.path.absolute()}
    for name in _HEADER_FACTS:
        value = summary.header.get(name)
        if isinstance(value, list):
            value = " ".join(map(str, value))
        if value:
            facts[name] = value
    return facts


@dataclass
class Notice:
    """A warning or event, and how often it occurred."""

    time: float | None  # of the first: seconds since 1970
    step: int | None
    kind: str
    text: str
    count: int = 0


def make_notice_table(summary: Summary) -> Table:
    """Return the run's warnings and events; equal ones once."""
    found: dict[tuple[str, str], Notice] = {}
    for notice in chain(_read_events(summary.run), _name_damaged(summary.run)):
        first = found.setdefault((notice.kind, notice.text), notice)
        first.count += 1
    notices = sorted(found.values(), key=lambda one: one.time or float("inf"))
    rows: list[Row] = []
    marked = set()
    for notice in notices[:_MOST_NOTICES]:
        if notice.kind == "warning":
            marked.add(len(rows))
        times = ""
        if notice.count > 1:
            times = f"{notice.count:,} {TIMES}"
        began = format_time(notice.time).removesuffix(" UTC")
        rows.append((began, format_number(notice.step), notice.kind, notice.text, times))
    left_out = len(notices) - len(rows)
    if left_out:
        rows.append(("", "", "", f"{left_out:,} later ones are left out", ""))
    columns = ("UTC", "step", "kind", "message", "")
    return Table("Warnings and events", columns, rows, frozenset(marked))


def _read_events(run: Run) -> Iterator[Notice]:
    for event in run.events:
        if event["event"] == "end":
            continue
        fields = [str(event.get("message") or "")]
        for name, value in event.items():
            if name not in ("event", "time", "step", "message"):
                fields.append(f"{name}={value}")
        text = clean(" ".join(filter(None, fields)))[:_LONGEST]
        step = _read_integer(event.get("step"))
        yield Notice(_read_seconds(event.get("time")), step, clean(event["event"]), text)


def _name_damaged(run: Run) -> Iterator[Notice]:
    for number, reason in sorted(run.damaged.items())[:_MOST_DAMAGED]:
        text = clean(f"line {number} of {run.path.name} is left out: {reason}")
        yield Notice(None, None, "damaged", text[:_LONGEST])


def _read_integer(value: Any) -> int | None:
    if type(value) is int:
        return value
    return None


def _read_seconds(value: Any) -> float | None:
    """Return seconds since 1970; None if the value is no time."""
    if format_time(value) == NOTHING:
        return None
    return float(value)
