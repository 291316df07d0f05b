"""A report as one HTML page that needs nothing else."""

from __future__ import annotations

from importlib.resources import files

from ezpz_obs._version import __version__

from .content import Report
from .extras import require
from .names import clean, shorten
from .palette import LIGHT, style


def render(report: Report) -> str:
    """Return the page: no script, no request; every name in it is text.

    Raises:
        ReportError: Jinja2 is not installed.
    """
    jinja2 = require("jinja2", "a report")
    here = files(__package__)
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"clean": clean, "shorten": shorten}
    template = environment.from_string(here.joinpath("page.html.j2").read_text("utf-8"))
    said: str = template.render(
        report=report,
        version=__version__,
        style=f"{here.joinpath('page.css').read_text('utf-8')}{style(':root')}",
        colours=len(LIGHT),
    )
    return said
