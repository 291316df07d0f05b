"""Reports of runs: one HTML page that needs nothing else, and Markdown."""

from __future__ import annotations

import logging
import os
import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from ezpz_obs._context import replacing
from ezpz_obs._errors import ReportError, require
from ezpz_obs._run import Run, read_run
from ezpz_obs._version import __version__

from .content import SECTIONS, Report, compose
from .figures import LIGHT, style
from .survey import survey
from .words import clean, distinct, shorten

_SPECIAL = re.compile(r"([\\`*_\[\]|$~#{}()!])")
_ENTITIES = str.maketrans({"<": "&lt;", ">": "&gt;", "&": "&amp;"})


def _environment(*, autoescape: bool) -> Any:
    jinja2 = require("jinja2", "a report")
    return jinja2.Environment(
        autoescape=autoescape, undefined=jinja2.StrictUndefined, trim_blocks=True
    )


def _text_of(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _markdown(report: Report) -> str:
    """Return the report in short; its plots are expected as ``NAME.svg`` beside it."""
    environment = _environment(autoescape=False)
    environment.filters |= {"md": escape, "row": _row}
    template = environment.from_string(_text_of("report.md.j2"))
    # What its parts leave empty takes a line all the same; no text in it has two.
    said = re.sub(r"\n{3,}", "\n\n", template.render(report=report, titles=SECTIONS))
    return said.strip() + "\n"


def escape(text: str, limit: int = 160) -> str:
    return _SPECIAL.sub(r"\\\1", shorten(text, limit).translate(_ENTITIES))


def _row(cells: Iterable[str], limit: int = 300) -> str:
    return f"| {' | '.join(escape(cell, limit) or ' ' for cell in cells)} |"


def _page(report: Report) -> str:
    """Return the page: no request, no script but ours; every name in it is text."""
    environment = _environment(autoescape=True)
    environment.filters |= {"clean": clean, "shorten": shorten}
    script = _text_of("page.js")
    template = environment.from_string(_text_of("page.html.j2"))
    said: str = template.render(
        report=report,
        titles=SECTIONS,
        version=__version__,
        style=f"{_text_of('page.css')}{style(':root')}",
        colours=len(LIGHT),
        script=script,
        allowed=b64encode(sha256(script.encode()).digest()).decode(),
    )
    return said


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
        HistoryError: There is no such run, or no line of it is a History's.
        OSError: The folder cannot be written.
        ReportError: Nothing was given, or what reports need is not installed.
    """
    given = [runs] if isinstance(runs, Run | str | os.PathLike) else list(runs)
    found = _found(given)
    report = _composed(found, say or logger.info)
    if out is None:
        folder = found[0].path.parent / ("report" if len(found) == 1 else "comparison")
    else:
        folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    # The page last: whoever finds the new one finds the new plots.
    plots = [_write(folder / f"{plot.file}.svg", _alone(plot.svg)) for plot in report.plots]
    text = _write(folder / "report.md", _markdown(report))
    html = _write(folder / "index.html", _page(report))
    return (html, text, *plots)


def _found(given: Sequence[Run | str | os.PathLike[str]]) -> list[Run]:
    if not given:
        raise ReportError("no runs; expected one at least: write_report(['outputs/run'])")
    for module in ("matplotlib", "jinja2"):  # before a million records are read for nothing
        require(module, "a report")
    return [run if isinstance(run, Run) else read_run(run) for run in given]


def _composed(found: Sequence[Run], say: Callable[[str], None]) -> Report:
    # Of one folder the files of single ranks may be compared.
    several = len({run.path.parent for run in found}) < len(found)
    labels = distinct(
        [run.name for run in found],
        [str(run.path if several else run.path.parent) for run in found],
    )
    surveys = [survey(run, label, say) for run, label in zip(found, labels, strict=True)]
    return compose(surveys, say)


def _alone(svg: str) -> str:
    rules = (
        f"{style('svg')}\nsvg {{ color: #1d1f24; stroke-linejoin: round }}\n"
        "@media screen and (prefers-color-scheme: dark) { svg { color: #e7e9ee } }"
    )
    head, _, rest = re.sub(' data-curves="[^"]*"', "", svg, count=1).partition(">")
    return f"{head}>\n<style>{rules}</style>{rest}\n"


def _write(path: Path, text: str) -> Path:
    with replacing(path) as aside:
        aside.write_text(text, encoding="utf-8", errors="backslashreplace")
    return path
