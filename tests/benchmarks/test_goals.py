"""No goal without a row, none hidden, none that a figure next to the limit slips past."""

import calendar
import re
from pathlib import Path

import pytest
import side_by_side
from goals import Goal, GoalError, judge, load
from paired import absent, alone, beside

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
ROW = beside("s/w/p", "w", "ms", ([6.0, 6.0], [10.0, 10.0]), "p")


def test_every_goal_is_measured_by_a_whole_run_or_held_by_a_test(document):
    goals, measured = load(), {row["key"] for row in document["rows"]}
    for goal in goals:
        assert goal.tested or goal.row in measured, goal.what
        assert goal.tested or goal.row.split("/")[0] in [*side_by_side.SECTIONS, "all"], goal.what
        assert not goal.tested or (BENCHMARKS.parent / goal.tested).exists(), goal.what
    said = {(v["what"], v["limit"]) for row in document["rows"] for v in row["goals"]}
    assert said == {(goal.what, goal.limit) for goal in goals if goal.row}


def test_the_page_says_what_was_recorded(document):
    page = (BENCHMARKS.parent / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    verdicts = [verdict["holds"] for row in document["rows"] for verdict in row["goals"]]
    assert f"{verdicts.count(True)} of {len(verdicts)} goals held" in page
    year, month, day = document["date"].split("-")
    assert f"Of {int(day)} {calendar.month_name[int(month)]} {year}, on " in page
    assert {f"`{name}`" for name in side_by_side.SECTIONS} <= set(re.findall("`[a-z_]+`", page))
    readme = (BENCHMARKS.parent / "README.md").read_text(encoding="utf-8")
    rows = {row["key"]: row for row in document["rows"]}
    for peer in ("torchrun", "accelerate"):
        ratio = rows[f"launch/first-line/{peer}"]["ratio"]["median"]
        assert f"{1 / ratio:.0f} times sooner than under torchrun or accelerate" in readme


@pytest.mark.parametrize(
    ("figure", "limit", "value", "holds", "more"),
    [
        ("ratio", "<= 0.6", 0.6, True, {}),
        ("ratio", "<= 0.59", 0.6, False, {}),
        ("inverse", ">= 1.6", 10 / 6, True, {}),
        ("inverse", ">= 1.7", 10 / 6, False, {}),
        ("ours", "< 6", 6.0, False, {}),
        ("ours", "<= 6", 6.0, True, {}),
        ("over", "<= 0", -4.0, True, {}),
        ("ratio", "<= 0.1", 0.1, True, {"beyond": 5.0}),
    ],
)
def test_figures_and_limits(figure, limit, value, holds, more):
    (verdict,) = judge(ROW, [Goal("g", "x", "s/w/p", figure, limit, **more)])
    assert (verdict.value, verdict.holds) == (pytest.approx(value), holds)


def test_without_a_figure_nothing_holds_and_nothing_is_missed():
    goals = [Goal("g", "x", "s/w/p", "ratio", "<= 1")]
    assert judge(absent("s/w/p", "w", "p", "why"), goals)[0].holds is None
    assert judge(alone("s/w/p", "w", "ms", [1.0]), goals)[0].holds is None


@pytest.mark.parametrize(
    "text",
    [
        'row = "s/w"\nfigure = "ratio"',  # no limit
        'row = "s/w"\nfigure = "speed"\nlimit = "<= 1"',  # no such figure
        'row = "s/w"\nfigure = "ratio"\nlimit = "about 1"',  # no number
        "",
        'tested = "a"\nrow = "s/w"\nfigure = "ours"\nlimit = "<= 1"',  # both
        'tested = "a"\nweight = 3',  # unknown
    ],
)
def test_a_goal_that_cannot_be_judged_is_refused(tmp_path, text):
    path = tmp_path / "goals.toml"
    path.write_text(f'[[goal]]\nwhat = "g"\nfrom = "x"\n{text}\n')
    with pytest.raises(GoalError, match=r"^g: "):
        load(path)
