"""Reports of runs, written to a folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from ezpz_obs._errors import ReportError
from ezpz_obs._run import Run, read_run

from . import markdown, page
from .content import compose
from .extras import require
from .names import distinct
from .palette import style
from .survey import survey

logger = logging.getLogger("ezpz_obs")


def write_report(
    runs: Iterable[Run | str | os.PathLike[str]] | Run | str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    say: Callable[[str], None] | None = None,
) -> tuple[Path, ...]:
    """Write a report of runs: ``index.html``, ``report.md`` and the plots of the latter.

    The page needs no network and no other file. Each run is read once, in room that does not
    grow with it. A report that is there is replaced, file by file; other files are left alone.

    Args:
        runs: One or more: what `read_run` returned, or folders and files.
        out: The folder to write to; default ``report`` in the run's, of several runs
            ``comparison`` in the first one's.
        say: Told how far it is, every 2 s of a long reading; default: the log, at INFO.

    Returns:
        The files: the page first, then the Markdown, then the plots.

    Raises:
        HistoryError: There is no such run, or it is damaged.
        OSError: The folder cannot be written.
        ReportError: Nothing was given, or what reports need is not installed.
    """
    given = [runs] if isinstance(runs, Run | str | os.PathLike) else list(runs)
    if not given:
        raise ReportError("no runs; expected one at least: write_report(['outputs/run'])")
    for module in ("matplotlib", "jinja2"):  # before a million records are read for nothing
        require(module, "a report")
    found = [run if isinstance(run, Run) else read_run(run) for run in given]
    # Of one folder the files of single ranks may be compared.
    several = len({run.path.parent for run in found}) < len(found)
    labels = distinct(
        [run.name for run in found],
        [str(run.path if several else run.path.parent) for run in found],
    )
    say = say or logger.info
    surveys = [survey(run, label, say) for run, label in zip(found, labels, strict=True)]
    report = compose(surveys, say)
    if out is None:
        folder = found[0].path.parent / ("report" if len(found) == 1 else "comparison")
    else:
        folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    # The page last: whoever finds the new one finds the new plots.
    plots = [_write(folder / f"{plot.file}.svg", _alone(plot.svg)) for plot in report.plots]
    text = _write(folder / "report.md", markdown.render(report))
    html = _write(folder / "index.html", page.render(report))
    return (html, text, *plots)


def _alone(svg: str) -> str:
    """Give a plot what the page would give it."""
    rules = (
        f"{style('svg')}\nsvg {{ color: #1d1f24; stroke-linejoin: round }}\n"
        "@media screen and (prefers-color-scheme: dark) { svg { color: #e7e9ee } }"
    )
    head, _, rest = svg.partition(">")
    return f"{head}>\n<style>{rules}</style>{rest}\n"


def _write(path: Path, text: str) -> Path:
    """Write a file aside and rename it, so that nobody reads half of it."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        aside.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    return path
