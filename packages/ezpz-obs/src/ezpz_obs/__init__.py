"""Rank-aware logs, and metrics that are on disk a moment after they were made.

>>> from ezpz_obs import History
>>> History().update({"loss": 0.25})
'step=0 loss=0.25'
"""

from ._errors import HistoryError, ObsError, ReportError, SinkError
from ._version import __version__

# Imported when first used: a program that logs has no need of what draws.
_HOMES = {
    "_alarms": "Alarms",
    "_gradients": "gradient_norm",
    "_history": "History",
    "_logs": "configure_logs get_logger log_dict_as_bulleted_list LogSetup",
    "_performance": "memory_metrics StepTimer Throughput transformer_flops",
    "_profile": "profile",
    "_progress": "progress",
    "_report": "write_report",
    "_report.terminal": "plot tail",
    "_run": "read_run Run",
    "_sinks": "replay",
    "_sinks.libraries": "Sink",
    "_sinks.wandb": "setup_wandb verify_wandb",
    "_table": "dataset_of export",
    "_terminal": "get_log_level",
}
_LATER = {name: home for home, names in _HOMES.items() for name in names.split()}
TYPE_CHECKING = False
if TYPE_CHECKING:
    from ._alarms import Alarms
    from ._gradients import gradient_norm
    from ._history import History
    from ._logs import LogSetup, configure_logs, get_logger, log_dict_as_bulleted_list
    from ._performance import StepTimer, Throughput, memory_metrics, transformer_flops
    from ._profile import profile
    from ._progress import progress
    from ._report import write_report
    from ._report.terminal import plot, tail
    from ._run import Run, read_run
    from ._sinks import replay
    from ._sinks.libraries import Sink
    from ._sinks.wandb import setup_wandb, verify_wandb
    from ._table import dataset_of, export
    from ._terminal import get_log_level

__all__ = [
    "Alarms",
    "History",
    "HistoryError",
    "LogSetup",
    "ObsError",
    "ReportError",
    "Run",
    "Sink",
    "SinkError",
    "StepTimer",
    "Throughput",
    "__version__",
    "configure_logs",
    "dataset_of",
    "export",
    "get_log_level",
    "get_logger",
    "gradient_norm",
    "log_dict_as_bulleted_list",
    "memory_metrics",
    "plot",
    "profile",
    "progress",
    "read_run",
    "replay",
    "setup_wandb",
    "tail",
    "transformer_flops",
    "verify_wandb",
    "write_report",
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
