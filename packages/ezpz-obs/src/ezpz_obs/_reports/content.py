"""All that a report has in it, before it is a page or Markdown."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import facts
from .figures import Drawn, curves, step_histogram
from .names import clean, file_name
from .numbers import moment
from .panels import Panel, arrange
from .survey import STATISTICS, Survey


@dataclass(frozen=True)
class Plot:
    """A picture, its title and what is said below it."""

    title: str
    unit: str
    """Of the vertical axis; "" where it is not known."""
    svg: str
    notes: tuple[str, ...]
    file: str
    """Name of its own file, without the ending."""


@dataclass(frozen=True)
class RunPart:
    """What is said of one run."""

    label: str
    state: str
    """"good", "bad" or "open"."""
    words: str
    course: list[str]
    tiles: list[facts.Tile]
    attempts: facts.Table
    metrics: facts.Table
    ranks: facts.Table | None
    notices: facts.Table
    pauses: list[str]


@dataclass(frozen=True)
class Report:
    """All of a report."""

    title: str
    runs: list[RunPart]
    curves: list[Plot]
    speed: list[Plot]
    memory: list[Plot]
    left_out: int
    comparison: facts.Table
    environment: list[tuple[str, facts.Table]]
    made: str

    @property
    def alone(self) -> bool:
        """Whether it is of one run."""
        return len(self.runs) == 1

    @property
    def any_ranks(self) -> bool:
        """Whether the spread over ranks is known."""
        return any(run.ranks for run in self.runs)

    @property
    def plots(self) -> list[Plot]:
        """All plots."""
        return [*self.curves, *self.speed, *self.memory]

    @property
    def sections(self) -> list[tuple[str, str]]:
        """Anchor and title of the sections that there are."""
        return [
            (anchor, title)
            for anchor, title, there in (
                ("compared", "Side by side", not self.alone),
                ("curves", "Curves", self.curves),
                ("speed", "Speed", self.speed),
                ("memory", "Memory", self.memory),
                ("ranks", "Ranks", self.any_ranks),
                ("warnings", "Warnings", True),
                ("attempts", "Attempts", True),
                ("metrics", "Metrics", self.alone and self.runs[0].metrics.rows),
                ("environment", "Environment", True),
            )
            if there
        ]


def compose(surveys: Sequence[Survey], say: Callable[[str], None] | None = None) -> Report:
    """Draw and say what there is of these runs.

    Raises:
        ReportError: matplotlib is not installed.
    """
    panels, left_out = arrange(surveys)
    plots: dict[str, list[Plot]] = {"curves": [], "speed": [], "memory": []}
    times = [(survey.label, survey.step_times) for survey in surveys if survey.step_times.count]
    if times:
        title = "step times"
        histogram, notes = step_histogram(times, title=title)
        plots["speed"].append(Plot(title, "", histogram, tuple(notes), "step-times"))
    for panel in panels:
        plots[panel.section].append(_plot(surveys, panel))
    if say is not None:
        say(f"{len(panels) + bool(times)} plots drawn")
    return Report(
        title=surveys[0].label if len(surveys) == 1 else f"{len(surveys)} runs compared",
        runs=[_of(survey) for survey in surveys],
        left_out=left_out,
        comparison=facts.comparison(surveys),
        environment=facts.environment(surveys),
        made=moment(time.time()),
        **plots,
    )


def _plot(surveys: Sequence[Survey], panel: Panel) -> Plot:
    drawn = []
    for place, line in enumerate(panel.lines):
        survey = surveys[line.run]
        spread = None
        if survey.groups[line.name]:
            spread = {part: survey.series[f"{line.name}/{part}"] for part in STATISTICS}
        series = survey.series.get(line.name)
        if series is None:
            series = survey.series[f"{line.name}/mean"]
        several_runs = len(surveys) > 1
        drawn.append(Drawn(line.label, series, spread, line.run if several_runs else place))
    title = f"{panel.title} over steps"
    # A metric may be called as several together are.
    kind = "joint" if len({line.name for line in panel.lines}) > 1 else "curve"
    svg, notes = curves(drawn, title=title)
    return Plot(panel.title, panel.unit, svg, tuple(notes), file_name(kind, panel.title))


def _of(survey: Survey) -> RunPart:
    state, words = survey.outcome
    return RunPart(
        label=survey.label,
        state=state,
        words=clean(words),
        course=facts.course(survey),
        tiles=facts.tiles(survey),
        attempts=facts.attempts(survey),
        metrics=facts.metrics(survey),
        ranks=facts.ranks(survey),
        notices=facts.notices(survey.notices),
        pauses=facts.pauses(survey),
    )
