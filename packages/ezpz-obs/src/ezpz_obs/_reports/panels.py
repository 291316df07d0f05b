"""Which metrics are drawn where: known by the names that they usually have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from .survey import Survey

MOST: Final = 48
"""Plots on a page, at most: a model's every layer is for a table."""

_SPEED: Final = {
    "tokens_per_s": "tokens/s",
    "samples_per_s": "samples/s",
    "tflops": "TFLOP/s",
    "mfu": "",
}
_MEMORY: Final = {
    "memory_gib": "GiB",
    "memory_peak_gib": "GiB",
    "memory_fraction": "",
}
STEP_PARTS: Final = ("data_s", "forward_s", "backward_s", "optimizer_s")
"""What a step is made of; ``step_s`` is all of it."""

_STEP: Final = ("step_s", *STEP_PARTS)


@dataclass(frozen=True)
class Line:
    """One metric of one run in a plot."""

    run: int
    """Index of the run."""
    name: str
    label: str


@dataclass(frozen=True)
class Panel:
    """One plot.

    Attributes:
        section: "curves", "speed" or "memory".
        title: Usually the metric.
        unit: Of the vertical axis; "" where it is not known.
        lines: What is in it.
    """

    section: str
    title: str
    unit: str
    lines: tuple[Line, ...]


def arrange(surveys: Sequence[Survey]) -> tuple[list[Panel], int]:
    """Return the plots of all metrics of these runs, and how many were left out."""
    names = list(dict.fromkeys(name for survey in surveys for name in survey.groups))
    panels = [*_together(surveys, names)]
    drawn = {line.name for panel in panels for line in panel.lines}
    for name in sorted((n for n in names if n not in drawn), key=_order):
        section, unit = _kind(name)
        panels.append(_panel(surveys, section, name, unit))
    panels.sort(key=lambda panel: ("curves", "speed", "memory").index(panel.section))
    return panels[:MOST], max(0, len(panels) - MOST)


def last_part(name: str) -> str:
    """Return what a metric is, without whose it is: "train/loss" is a loss."""
    return name.rpartition("/")[2]


def find(survey: Survey, part: str) -> str | None:
    """Return the first metric of a run with this last part."""
    return next((name for name in survey.groups if last_part(name) == part), None)


def _together(surveys: Sequence[Survey], names: list[str]) -> list[Panel]:
    """Panels of several metrics; with several runs each has its own, for the colours are runs'."""
    if len(surveys) > 1:
        return []
    panels = []
    for section, title, unit, parts in (
        ("speed", "parts of a step", "s", _STEP),
        ("memory", "memory", "GiB", ("memory_gib", "memory_peak_gib")),
    ):
        of = [(part, name) for part in parts for name in names if last_part(name) == part]
        if len(of) > 1:
            panels.append(Panel(section, title, unit, tuple(Line(0, name, name) for _, name in of)))
    return panels


def _panel(surveys: Sequence[Survey], section: str, name: str, unit: str) -> Panel:
    lines = tuple(
        Line(place, name, survey.label if len(surveys) > 1 else name)
        for place, survey in enumerate(surveys)
        if name in survey.groups
    )
    return Panel(section, name, unit, lines)


def _kind(name: str) -> tuple[str, str]:
    part = last_part(name)
    if part in _SPEED:
        return "speed", _SPEED[part]
    if part in _STEP:
        return "speed", "s"
    if part in _MEMORY:
        return "memory", _MEMORY[part]
    return "curves", ""


def _order(name: str) -> tuple[int, int]:
    """Losses first, then how good it is, then how it is trained, then the rest as they came."""
    part = last_part(name)
    known = list(_SPEED) + list(_STEP) + list(_MEMORY)
    if part in known:
        return 0, known.index(part)
    if "loss" in part:
        return 1, int(part != "loss")
    if "acc" in part or part in ("perplexity", "ppl", "score", "f1"):
        return 2, 0
    if part in ("grad_norm", "lr", "learning_rate"):
        return 3, 0
    return 4, 0
