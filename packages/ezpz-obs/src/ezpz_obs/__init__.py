"""Rank-aware logs, and metrics that are on disk a moment after they were made.

>>> from ezpz_obs import History
>>> History().update({"loss": 0.25})
'step=0 loss=0.25'
"""

from ._version import __version__ as __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ._errors import HistoryError as HistoryError
    from ._errors import ObsError as ObsError
    from ._errors import ReportError as ReportError
    from ._errors import SinkError as SinkError
    from ._history import History as History
    from ._logs import LogSetup as LogSetup
    from ._logs import configure_logs as configure_logs
    from ._logs import get_logger as get_logger
    from ._logs import log_dict_as_bulleted_list as log_dict_as_bulleted_list
    from ._performance import StepTimer as StepTimer
    from ._performance import Throughput as Throughput
    from ._performance import memory_metrics as memory_metrics
    from ._performance import transformer_flops as transformer_flops
    from ._processors import get_log_level as get_log_level
    from ._profile import profile as profile
    from ._progress import progress as progress
    from ._report import write_report as write_report
    from ._report.terminal import plot as plot
    from ._report.terminal import tail as tail
    from ._run import Run as Run
    from ._run import read_run as read_run
    from ._sinks import Sink as Sink
    from ._sinks import replay as replay
    from ._sinks.mlflow import setup_mlflow as setup_mlflow
    from ._sinks.wandb import setup_wandb as setup_wandb
    from ._sinks.wandb import verify_wandb as verify_wandb
    from ._table import dataset_of as dataset_of
    from ._table import export as export
else:
    from ezpz_topo import attach

    __getattr__, __dir__ = attach(__name__)
