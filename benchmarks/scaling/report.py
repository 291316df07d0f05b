"""How what was found is shown: a table for people, JSON, and a plot a section."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from .growth import LAST, TOLERANCE, Absent, Curve, Fact, Found

_RED, _PLAIN = "\033[31m", "\033[0m"
_GOALS = {0.0: "constant", 1.0: "linear"}


def short(value: float) -> str:
    """Return three digits that count."""
    if value == 0 or abs(value) >= 1e6:
        return f"{value:.3g}".replace("e+0", "e").replace("e+", "e")
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.{1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3}f}"


def lines(found: Sequence[Found], colour: bool = False) -> Iterator[str]:
    """Return the table, line by line, of at most 100 columns but for names."""
    for section, rows in groupby(found, lambda each: each.section):
        yield f"{section:<52}{'smallest':>10}{'largest':>10}  exponent (95 %)    goal"
        for row in rows:
            if isinstance(row, Curve):
                yield _curve(row, colour)
            elif isinstance(row, Fact):
                text = f"{short(row.value)} {row.unit}"
                yield f"  {row.what:<50}{text:>20}  {row.kind}; {row.note}".rstrip("; ")
            else:
                yield f"  {row.what}: not measured: {row.why}"
        yield ""


def _curve(curve: Curve, colour: bool) -> str:
    smallest = min(curve.points)
    fitted = curve.fitted(LAST)
    grown = f"{fitted.exponent:5.2f} ({fitted.low:.2f} to {fitted.high:.2f})" if fitted else "-"
    if added := curve.added:
        grown += f", added {added.exponent:.2f}"
    verdict = curve.verdict
    goals = [] if curve.goal is None else [_GOALS.get(curve.goal, short(curve.goal))]
    goals += [] if curve.most is None else [f"at most {short(curve.most)}"]
    goal = f"{', '.join(goals)}: {verdict}" if goals else ""
    if colour and verdict == "MISSED":
        goal = f"{_RED}{goal}{_PLAIN}"
    what = f"{curve.what}, {curve.unit}"
    cells = f"{short(curve.at(smallest)):>10}{short(curve.at(curve.largest)):>10}"
    kind = "" if curve.kind in ("measured", "counted") else f" [{curve.kind}]"
    return f"  {what:<50}{cells}  {grown:<18} {goal}{kind}".rstrip()


def summary(found: Sequence[Found], colour: bool = False) -> Iterator[str]:
    """Return how many goals hold, and each that does not."""
    judged = [each for each in found if isinstance(each, Curve) and each.verdict]
    by_verdict = {word: [c for c in judged if c.verdict == word] for word in ("MISSED", "unclear")}
    held = len(judged) - sum(map(len, by_verdict.values()))
    absent = sum(isinstance(each, Absent) for each in found)
    yield (
        f"{held} of {len(judged)} goals of growth hold, {len(by_verdict['MISSED'])} MISSED, "
        f"{len(by_verdict['unclear'])} unclear; {absent} not measured"
    )
    for word, curves in by_verdict.items():
        for curve in curves:
            fitted = curve.fitted(LAST)
            exponent = "no fit" if fitted is None else f"exponent {fitted.exponent:.2f}"
            goal = "none" if curve.goal is None else f"{curve.goal:g}"
            text = f"{word:<8}{curve.section}: {curve.what}: {exponent}, goal {goal}"
            if curve.most is not None:
                text += f"; {short(curve.at(curve.largest))} of at most {short(curve.most)}"
            yield f"{_RED}{text}{_PLAIN}" if colour and word == "MISSED" else text


def document(found: Sequence[Found], **more: Any) -> dict[str, Any]:
    """Return what is written as JSON."""
    return {
        "schema": 1, **more, "tolerance": TOLERANCE, "fitted_over_the_last": LAST,
        "curves": [each.to_json() for each in found if isinstance(each, Curve)],
        "facts": [asdict(each) for each in found if isinstance(each, Fact)],
        "absent": [asdict(each) for each in found if isinstance(each, Absent)],
    }  # fmt: skip


def plot(found: Sequence[Found], folder: Path) -> list[Path]:
    """Draw a page of curves a section, as SVG; return the files.

    Filled marks are measured or counted, hollow ones computed by a model; a dashed line is
    extrapolated.
    """
    import matplotlib as mpl  # noqa: PLC0415  # only where plots are wanted

    mpl.use("svg")
    # The same figures make the same file.
    mpl.rcParams["svg.hashsalt"] = "ezpz"
    from matplotlib import pyplot as plt  # noqa: PLC0415

    folder.mkdir(parents=True, exist_ok=True)
    made = []
    curves = [each for each in found if isinstance(each, Curve)]
    for section, some in groupby(curves, lambda each: each.section):
        shown = list(some)
        units = list(dict.fromkeys(curve.unit for curve in shown))
        figure, axes = plt.subplots(
            1, len(units), figsize=(5 * len(units), 4), layout="constrained", squeeze=False
        )
        for axis, unit in zip(axes[0], units, strict=True):
            for curve in (each for each in shown if each.unit == unit):
                _draw(axis, curve)
            axis.set(xscale="log", yscale="log", ylabel=unit, title=f"{section}: {unit}")
            axis.set_xlabel(next(each.of for each in shown if each.unit == unit))
            axis.grid(alpha=0.3)
            axis.legend(fontsize=6)
        path = folder / f"scale-{section}.svg"
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
        made.append(path)
    return made


def _draw(axis: Any, curve: Curve) -> None:
    sizes = sorted(curve.points)
    costs = [max(curve.at(size), 1e-9) for size in sizes]
    fitted = curve.fitted(LAST)
    label = curve.what if fitted is None else f"{curve.what}: {fitted.exponent:.2f}"
    is_model = curve.kind in ("model", "extrapolated")
    (line,) = axis.plot(
        sizes, costs, marker="o", markerfacecolor="none" if is_model else None, label=label
    )
    if curve.extrapolated:
        beyond = {sizes[-1]: costs[-1], **curve.extrapolated}
        axis.plot(list(beyond), list(beyond.values()), "--", color=line.get_color())
