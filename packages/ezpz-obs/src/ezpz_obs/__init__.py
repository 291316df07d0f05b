"""Rank-aware logs, and metrics that are on disk a moment after they were made.

>>> from ezpz_obs import History
>>> History().update({"loss": 0.25})
'step=0 loss=0.25'
"""

from ._errors import HistoryError, ObsError, ReportError, SinkError
from ._version import __version__

# Imported when first used: a program that logs has no need of what draws.
_LATER = {
    "History": "_history",
    "Run": "_records",
    "get_log_level": "_logs",
    "get_logger": "_logs",
    "read_run": "_records",
}
TYPE_CHECKING = False
if TYPE_CHECKING:
    from ._history import History
    from ._logs import get_log_level, get_logger
    from ._records import Run, read_run

__all__ = [
    "History",
    "HistoryError",
    "ObsError",
    "ReportError",
    "Run",
    "SinkError",
    "__version__",
    "get_log_level",
    "get_logger",
    "read_run",
]


def __getattr__(name: str) -> object:
    """Import a public name where it lives."""
    home = _LATER.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
