"""Rank-aware logs, and metrics that are on disk a moment after they were made.

>>> from ezpz_obs import History
>>> History().update({"loss": 0.25})
'step=0 loss=0.25'
"""

from ._errors import HistoryError, ObsError, ReportError, SinkError
from ._logs import get_log_level, get_logger
from ._records import Run, read_run
from ._version import __version__
from ._history import History

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
