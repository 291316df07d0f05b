"""All that a report has in it, before it is a page or Markdown."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from ezpz_obs._file import file_name
from ezpz_obs._run import say_damaged

from .figures import Drawn, curves, step_histogram
from .survey import GRAVE, STATISTICS, Notices, Series, Survey, say_end
from .words import NOTHING, TIMES, clean, moment, number, seconds, share

MOST: Final = 48  # plots on a page, at most: a model's every layer is for a table

STEP_PARTS: Final = ("data_s", "forward_s", "backward_s", "optimizer_s")
"""What a step is made of; ``step_s`` is all of it."""

_KNOWN: Final = {
    "tokens_per_s": ("speed", "tokens/s"), "samples_per_s": ("speed", "samples/s"),
    "tflops": ("speed", "TFLOP/s"), "mfu": ("speed", ""),
    **dict.fromkeys(("step_s", *STEP_PARTS), ("speed", "s")),
    "memory_gib": ("memory", "GiB"), "memory_peak_gib": ("memory", "GiB"),
    "memory_fraction": ("memory", ""),
}  # fmt: skip
"""Section and unit, in the order in which they are drawn."""


SECTIONS: Final = {
    "curves": "Curves", "speed": "Speed", "memory": "Memory",
}  # fmt: skip
"""Of plots, by their anchors, in the order of the page."""


class Panel(NamedTuple):
    section: str  # of `SECTIONS`
    title: str  # usually the metric
    unit: str  # of the vertical axis; "" where it is not known
    kind: str  # how the name of its file begins
    lines: list[Drawn]


def arrange(surveys: Sequence[Survey]) -> list[Panel]:
    names = list(dict.fromkeys(name for survey in surveys for name in survey.groups))
    panels, drawn, several = [], set[str](), len(surveys) > 1
    together = (
        ("speed", "parts of a step", "s", ("step_s", *STEP_PARTS)),
        ("memory", "memory", "GiB", ("memory_gib", "memory_peak_gib")),
    )
    # With several runs each metric has its own panel, for the colours are runs'.
    for section, title, unit, parts in () if several else together:
        found = [name for part in parts for name in names if last_part(name) == part]
        if len(found) > 1:
            lines = [_line(surveys[0], name, name, place) for place, name in enumerate(found)]
            panels.append(Panel(section, title, unit, "joint", lines))
            drawn.update(found)
    for name in sorted((n for n in names if n not in drawn), key=_order):
        section, unit = _KNOWN.get(last_part(name), ("curves", ""))
        lines = [
            _line(survey, name, survey.label if several else name, place)
            for place, survey in enumerate(surveys)
            if name in survey.groups
        ]
        panels.append(Panel(section, name, unit, "curve", lines))
    panels.sort(key=lambda panel: list(SECTIONS).index(panel.section))
    return panels


def _line(survey: Survey, name: str, label: str, place: int) -> Drawn:
    known = survey.series
    spread = {part: known[f"{name}/{part}"] for part in STATISTICS} if survey.groups[name] else None
    return Drawn(label, known.get(name) or known[f"{name}/mean"], spread, place)


def last_part(name: str) -> str:
    """Return what a metric is, without whose it is: "train/loss" is a loss."""
    return name.rpartition("/")[2]


def find(survey: Survey, part: str) -> str | None:
    return next((name for name in survey.groups if last_part(name) == part), None)


def _order(name: str) -> tuple[int, int]:
    """Losses first, then how good it is, then how it is trained, then the rest as they came."""
    part = last_part(name)
    if part in _KNOWN:
        return 0, list(_KNOWN).index(part)
    if "loss" in part:
        return 1, int(part != "loss")
    if "acc" in part or part in ("perplexity", "ppl", "score", "f1"):
        return 2, 0
    if part in ("grad_norm", "lr", "learning_rate"):
        return 3, 0
    return 4, 0


class Tile(NamedTuple):
    label: str
    value: str
    note: str = ""


Row = tuple[str, ...]


class Table(NamedTuple):
    """Rows of texts; ``marked`` are the rows that a reader should see."""

    columns: Row
    rows: list[Row]
    marked: frozenset[int] = frozenset()
    note: str = ""


def _table(columns: Row, rows: Sequence[tuple[bool, Row]], note: str = "") -> Table:
    """Return a table of rows, before each whether it is marked."""
    marked = frozenset(place for place, (is_marked, _) in enumerate(rows) if is_marked)
    return Table(columns, [row for _, row in rows], marked, note)


def tiles(survey: Survey) -> list[Tile]:
    found = []
    loss = find(survey, "loss") or next((n for n in survey.groups if "loss" in last_part(n)), None)
    if loss is not None:
        of = _main(survey, loss)
        lowest = f"lowest {number(of.min[1])} at step {of.min[0]:,}" if of.min else "no number"
        found.append(Tile(loss, number(of.last and of.last[1]), lowest))
    times = survey.step_times
    if (known := _known(survey, "step_s")) is not None:
        note = f"mean of step_s, up to {seconds(_greatest(known))}"
        found.append(Tile("step time", seconds(known.mean or 0.0), note))
    elif times.count:
        high = times.quantile(0.99)
        found.append(
            Tile("step time", seconds(times.quantile(0.5)), f"99 % within {seconds(high)}")
        )
    for part, label, say in (
        ("tokens_per_s", "tokens/s", number), ("samples_per_s", "samples/s", number),
        ("tflops", "TFLOP/s", number), ("mfu", "MFU", share),
    ):  # fmt: skip
        if (known := _known(survey, part)) is not None:
            found.append(Tile(label, say(known.mean or 0.0), f"up to {say(_greatest(known))}"))
    known = _known(survey, "memory_peak_gib") or _known(survey, "memory_gib")
    if known is not None:
        fraction = _known(survey, "memory_fraction")
        note = "at most" if fraction is None else f"{share(_greatest(fraction))} of the device"
        found.append(Tile("memory", f"{_greatest(known):.3g} GiB", note))
    return found


def _known(survey: Survey, part: str) -> Series | None:
    """Return the first metric with this last part, if it has a finite value."""
    name = find(survey, part)
    of = None if name is None else _main(survey, name)
    return None if of is None or of.max is None else of


def _greatest(of: Series) -> float:
    assert of.max is not None
    return of.max[1]


def course(survey: Survey) -> list[str]:
    last = survey.last_step
    header = survey.header
    ranks, hosts = header.get("world_size"), header.get("hosts")
    said = [
        "no records" if last is None else f"{survey.records:,} records, last step {last:,}",
        seconds(survey.span) if survey.records else "",
        f"{ranks:,} rank{'s' if ranks != 1 else ''}" if isinstance(ranks, int) else "",
        f"on {clean(_hosts(hosts))}" if hosts else "",
        clean(header["machine"]) if header.get("machine") else "",
        say_damaged(survey.damaged) if survey.damaged else "",
    ]
    if len(survey.attempts) > 1:
        said.append(f"{len(survey.attempts) - 1} restart{'s' if len(survey.attempts) > 2 else ''}")
    return [part for part in said if part]


def attempts(survey: Survey) -> Table:
    rows = []
    for attempt in survey.attempts:
        last = attempt is survey.attempts[-1]
        kind, words = say_end(attempt.end, survey.age, last=last)
        if kind == "bad" and attempt.fault:
            words += f"; {attempt.fault}"
        reached = attempt.reached
        steps = NOTHING
        if reached.first_step is not None:
            steps = f"{reached.first_step:,} {NOTHING} {reached.last_step:,}"
        replayed = f"{attempt.replayed:,}" if attempt.replayed else NOTHING
        row = (
            str(attempt.number), moment(attempt.begun), seconds(attempt.span), steps, replayed,
            clean(words),
        )  # fmt: skip
        rows.append((kind == "bad", row))
    return _table(("attempt", "begun", "lasted", "steps that count", "replayed", "end"), rows)


def metrics(survey: Survey) -> Table:
    rows = []
    for name in survey.groups:
        of = _main(survey, name)
        odd = of.nan + of.infinite
        row = (
            name, number(of.last and of.last[1]), number(of.mean), number(of.std),
            _at(of.min), _at(of.max), f"{of.count:,}", f"{odd:,}" if odd else NOTHING,
        )  # fmt: skip
        rows.append((odd > 0, row))
    columns = ("metric", "last", "mean", "std", "least", "greatest", "values", "NaN, ∞")
    return _table(columns, rows)


def comparison(surveys: Sequence[Survey]) -> Table:
    """Return the runs side by side: how they went, and the last value of each metric."""
    rows: list[Row] = [
        ("end", *(survey.outcome[1] for survey in surveys)),
        ("last step", *(number(survey.last_step) for survey in surveys)),
        ("lasted", *(seconds(survey.span) for survey in surveys)),
        ("ranks", *(clean(survey.header.get("world_size", NOTHING)) for survey in surveys)),
        ("step time", *(_step_time(survey) for survey in surveys)),
    ]
    configs = [_flat(survey.header.get("config")) for survey in surveys]
    names = dict.fromkeys(name for config in configs for name in config)
    differ = [(name, *(config.get(name, NOTHING) for config in configs)) for name in names]
    # Why the runs differ comes before how.
    rows[:0] = differ = [row for row in differ if len(set(row[1:])) > 1]
    for name in dict.fromkeys(name for survey in surveys for name in survey.groups):
        of = [_main(survey, name) if name in survey.groups else None for survey in surveys]
        cells = [
            f"{number(one.last and one.last[1])} (mean {number(one.mean)})" if one else NOTHING
            for one in of
        ]
        rows.append((name, *cells))
    return Table(("", *(survey.label for survey in surveys)), rows, frozenset(range(len(differ))))


def _step_time(survey: Survey) -> str:
    """Return the mean of what was measured, else the median from record to record."""
    known = _known(survey, "step_s")
    if known is not None:
        return f"{seconds(known.mean or 0.0)} (mean of step_s)"
    return f"{seconds(survey.step_times.quantile(0.5))} (median)"


def ranks(survey: Survey) -> Table | None:
    """Return which ranks are at the extremes; None where that is not known."""
    rows: list[Row] = []
    for name, spread in survey.groups.items():
        if not spread or f"{name}/max_rank" not in survey.series:
            continue
        std, mean = (survey.series[f"{name}/{part}"].mean for part in ("std", "mean"))
        rows.append(
            (name, _often(survey.series[f"{name}/max_rank"]),
             _often(survey.series.get(f"{name}/min_rank")), number(std, 3),
             share(abs(std / mean)) if std is not None and mean else NOTHING)
        )  # fmt: skip
    if not rows:
        return None
    # Times first: whoever is slow there holds up all others.
    rows.sort(key=lambda row: last_part(row[0]) not in ("step_s", *STEP_PARTS))
    columns = (
        "metric", "most often the greatest", "most often the least", "std, usually", "of mean",
    )  # fmt: skip
    return Table(columns, rows)


def notices(of: Notices) -> Table:
    rows = []
    for notice in of.shown:
        whose = ", ".join(map(str, sorted(notice.ranks)[:8]))
        whose += ", …" if len(notice.ranks) > 8 else ""
        row = (
            moment(notice.time).removesuffix(" UTC"), number(notice.step),
            whose or NOTHING, clean(notice.kind), clean(notice.text),
            f"{notice.times:,} {TIMES}" if notice.times > 1 else "",
        )  # fmt: skip
        rows.append((notice.kind in GRAVE - {"warning"}, row))
    note = f"{of.left_out:,} others in between are left out." if of.left_out else ""
    return _table(("UTC", "step", "rank", "kind", "message", ""), rows, note)


def environment(surveys: Sequence[Survey]) -> list[tuple[str, Table]]:
    """Return what the runs ran with, a column each; marked is what differs between them."""
    found = []
    for title, of in (
        ("Configuration", [_flat(survey.header.get("config")) for survey in surveys]),
        ("Where and with what", [_surroundings(survey) for survey in surveys]),
        ("Versions", [_flat(survey.header.get("versions")) for survey in surveys]),
    ):
        names = list(dict.fromkeys(name for facts in of for name in facts))
        cells = [(name, *(facts.get(name, NOTHING) for facts in of)) for name in names]
        # What differs is what one looks for.
        rows = sorted(((len(set(row[1:])) > 1, row) for row in cells), key=lambda row: not row[0])
        if rows:
            labels = [survey.label for survey in surveys] if len(surveys) > 1 else [""]
            found.append((title, _table(("", *labels), rows)))
    return found


def _surroundings(survey: Survey) -> dict[str, str]:
    header = survey.header
    git = header.get("git")
    commit = None
    if isinstance(git, Mapping):
        commit = f"{git.get('commit')}{' + changes' if git.get('dirty') else ''}"
    argv = header.get("argv")
    facts = {
        "file": survey.run.path.absolute(),
        "command": " ".join(map(str, argv)) if isinstance(argv, list) else argv,
        "commit": commit,
        "machine": header.get("machine"),
        "hosts": _hosts(header.get("hosts")),
        "ranks": header.get("world_size"),
        "begun": moment(survey.attempts[0].begun) if survey.attempts else None,
    }
    facts |= _flat(header.get("job"), "job ")
    return {name: clean(value) for name, value in facts.items() if value not in (None, "", "None")}


def _flat(value: Any, prefix: str = "") -> dict[str, str]:
    if not isinstance(value, Mapping):
        return {}
    found: dict[str, str] = {}
    for key, inner in value.items():
        if isinstance(inner, Mapping) and inner:
            found |= _flat(inner, f"{prefix}{key}.")
        elif inner is not None or not prefix.startswith("job"):
            found[f"{prefix}{key}"] = clean("null" if inner is None else inner)
    return found


def _main(survey: Survey, name: str) -> Series:
    """Return what stands for a metric: its mean over the ranks where that is known."""
    if survey.groups.get(name):
        return survey.series[f"{name}/{STATISTICS[0]}"]
    return survey.series[name if name in survey.series else f"{name}/{STATISTICS[0]}"]


def _at(extreme: tuple[int, float] | None) -> str:
    return NOTHING if extreme is None else f"{number(extreme[1])} @ {extreme[0]:,}"


def _often(series: Series | None) -> str:
    if series is None or not series.ranks:
        return NOTHING
    ((rank, times),) = series.ranks.most_common(1)
    return f"rank {rank} ({share(times / series.count)})"


def _hosts(hosts: Any) -> str:
    return ", ".join(map(str, hosts)) if isinstance(hosts, list) else str(hosts or "")


class Plot(NamedTuple):
    title: str
    unit: str  # of the vertical axis; "" where it is not known
    svg: str
    notes: tuple[str, ...]
    file: str  # name of its own file, without the ending


class RunPart(NamedTuple):
    label: str
    state: str  # "good", "bad" or "open"
    words: str
    course: list[str]
    tiles: list[Tile]
    attempts: Table
    metrics: Table
    ranks: Table | None
    notices: Table


class Report(NamedTuple):
    title: str
    runs: list[RunPart]
    drawn: dict[str, list[Plot]]  # by section
    left_out: int
    comparison: Table
    environment: list[tuple[str, Table]]
    made: str

    @property
    def alone(self) -> bool:
        return len(self.runs) == 1

    @property
    def plots(self) -> list[Plot]:
        return [plot for plots in self.drawn.values() for plot in plots]

    @property
    def sections(self) -> list[tuple[str, str]]:
        return [
            (anchor, title)
            for anchor, title, there in (
                ("compared", "Side by side", not self.alone),
                *((anchor, SECTIONS[anchor], plots) for anchor, plots in self.drawn.items()),
                ("ranks", "Ranks", any(run.ranks for run in self.runs)),
                ("warnings", "Warnings", True),
                ("attempts", "Attempts", True),
                ("metrics", "Metrics", self.alone and self.runs[0].metrics.rows),
                ("environment", "Environment", True),
            )
            if there
        ]


def compose(surveys: Sequence[Survey], say: Callable[[str], None]) -> Report:
    panels = arrange(surveys)
    plots: dict[str, list[Plot]] = {section: [] for section in SECTIONS}
    timed = [one for one in surveys if one.step_times.count and _known(one, "step_s") is None]
    times = [(survey.label, survey.step_times) for survey in timed]
    if times:
        histogram, notes = step_histogram(times)
        plots["speed"].append(Plot("step times", "", histogram, tuple(notes), "step-times"))
    for panel in panels[:MOST]:
        svg, said = curves(panel.lines, title=f"{panel.title} over steps")
        file = file_name(panel.kind, panel.title)  # a metric may be called as several together are
        plots[panel.section].append(Plot(panel.title, panel.unit, svg, tuple(said), file))
    say(f"{min(len(panels), MOST) + bool(times)} plots drawn")
    runs = [
        RunPart(
            label=survey.label, state=survey.outcome[0], words=clean(survey.outcome[1]),
            course=course(survey), tiles=tiles(survey), attempts=attempts(survey),
            metrics=metrics(survey), ranks=ranks(survey), notices=notices(survey.notices),
        )
        for survey in surveys
    ]  # fmt: skip
    return Report(
        title=surveys[0].label if len(surveys) == 1 else f"{len(surveys)} runs compared",
        runs=runs, left_out=max(0, len(panels) - MOST), comparison=comparison(surveys),
        environment=environment(surveys), made=moment(time.time()), drawn=plots,
    )  # fmt: skip
