"""What was promised (``goals.toml``), and whether a row of figures holds it."""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paired import Row

FIGURES = ("ratio", "inverse", "ours", "over")
_LIMIT = re.compile(r"(<=|>=|<) (\d+(?:\.\d+)?)")
_FIELDS = {"what", "from", "row", "figure", "beyond", "limit", "tested"}


class GoalError(ValueError):
    """A goal that cannot be read; the message has its name."""


@dataclass(frozen=True)
class Goal:
    """One promise of ``goals.toml``, whose head explains the fields."""

    what: str
    source: str
    row: str = ""
    figure: str = ""
    limit: str = ""
    beyond: float = 0.0
    tested: str = ""

    def value(self, row: Row) -> float | None:
        """Return the figure that is promised, of a row; None where it was not measured."""
        if row.ours is None or (self.figure != "ours" and row.theirs is None):
            return None
        if self.figure == "ours":
            return row.ours.median
        assert row.theirs is not None
        assert row.ratio is not None
        if self.figure == "over":
            return row.ours.median - row.theirs.median
        if self.beyond:
            return max(0.0, row.ours.median - self.beyond) / row.theirs.median
        return row.ratio.median if self.figure == "ratio" else 1 / row.ratio.median

    def holds(self, value: float) -> bool:
        """Whether a figure is within the limit."""
        sign, number = _LIMIT.fullmatch(self.limit).groups()  # type: ignore[union-attr]
        limit = float(number)
        return value >= limit if sign == ">=" else value < limit if sign == "<" else value <= limit


@dataclass(frozen=True)
class Verdict:
    """A goal, the figure, and whether it holds; None: it was not measured."""

    goal: Goal
    value: float | None
    holds: bool | None

    def to_json(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        goal = self.goal
        return {
            "what": goal.what, "from": goal.source, "figure": goal.figure, "beyond": goal.beyond,
            "limit": goal.limit, "value": self.value, "holds": self.holds,
        }  # fmt: skip


GOALS = Path(__file__).with_name("goals.toml")


def load(path: Path = GOALS) -> list[Goal]:
    """Return the goals of a file.

    Raises:
        GoalError: A goal has an unknown field, or one too few or too many.
    """
    goals = []
    for fields in tomllib.loads(path.read_text(encoding="utf-8"))["goal"]:
        name = fields.get("what", "a goal without a name")
        if unknown := set(fields) - _FIELDS:
            raise GoalError(f"{name}: unknown {', '.join(sorted(unknown))}; expected {_FIELDS}")
        goal = Goal(
            fields["what"], fields["from"], fields.get("row", ""), fields.get("figure", ""),
            fields.get("limit", ""), float(fields.get("beyond", 0)), fields.get("tested", ""),
        )  # fmt: skip
        measured = goal.figure in FIGURES and _LIMIT.fullmatch(goal.limit)
        if bool(goal.tested) == bool(goal.row) or (goal.row and not measured):
            raise GoalError(
                f"{name}: expected tested, or row with one of {', '.join(FIGURES)} as figure and "
                "a limit such as '<= 1.05'"
            )
        goals.append(goal)
    return goals


def judge(row: Row, goals: Sequence[Goal]) -> list[Verdict]:
    """Return what becomes of the goals that name this row."""
    verdicts = []
    for goal in goals:
        if goal.row == row.key:
            value = goal.value(row)
            verdicts.append(Verdict(goal, value, None if value is None else goal.holds(value)))
    return verdicts
