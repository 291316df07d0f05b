"""The errors of ezpz_obs, as one tree."""

import importlib
from typing import Any


class ObsError(Exception):
    """The parent of all errors of this package: the value, the expectation, and the remedy."""


class HistoryError(ObsError):
    """A run's file is missing or damaged, or the ranks of a run disagree about their metrics."""


class SinkError(ObsError):
    """A sink of metrics is unknown, or what it needs is not installed."""


class ReportError(ObsError):
    """A report, plot or export cannot be made of these runs."""


def require(module: str, purpose: str, extra: str = "report") -> Any:
    """Import a module of an extra, wanted for a purpose such as "a report"."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ReportError(
            f"{purpose} needs {module.partition('.')[0]}, which cannot be imported ({error}); "
            f'expected it installed: pip install "ezpz-obs[{extra}]"'
        ) from error
