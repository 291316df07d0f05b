"""Rank-aware logs, and metrics that are on disk a moment after they were made.

>>> from ezpz_obs import History
>>> History().update({"loss": 0.25})
'step=0 loss=0.25'
"""

from ._errors import HistoryError, ObsError, ReportError, SinkError
from ._version import __version__

# Imported when first used: a program that logs has no need of what draws.
_LATER = {
    "Alarms": "_alarms",
    "History": "_history",
    "LogSetup": "_logs",
    "Run": "_run",
    "Sink": "_sinks.libraries",
    "StepTimer": "_performance",
    "Throughput": "_performance",
    "configure_logs": "_logs",
    "dataset_of": "_table",
    "export": "_table",
    "get_log_level": "_terminal",
    "get_logger": "_logs",
    "gradient_norm": "_gradients",
    "log_dict_as_bulleted_list": "_logs",
    "memory_metrics": "_performance",
    "plot": "_report.terminal",
    "profile": "_profile",
    "progress": "_progress",
    "read_run": "_run",
    "replay": "_sinks",
    "setup_wandb": "_sinks.wandb",
    "tail": "_report.terminal",
    "transformer_flops": "_performance",
    "verify_wandb": "_sinks.wandb",
    "write_report": "_report",
}
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
