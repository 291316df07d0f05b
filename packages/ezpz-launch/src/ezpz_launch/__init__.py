"""Start one command on every rank, wherever you are, and tell the truth about how it ended.

Used as a command: ``ezpz-launch python train.py``; see ``ezpz-launch --help``.
"""

from ._cli import main
from ._errors import CommandNotExecutableError, CommandNotFoundError, LaunchError, UsageError
from ._options import Request, split
from ._plan import LaunchPlan, plan
from ._record import records_folder
from ._version import __version__

__all__ = [
    "CommandNotExecutableError", "CommandNotFoundError", "LaunchError", "LaunchPlan", "Request",
    "UsageError", "__version__", "main", "plan", "records_folder", "split",
]  # fmt: skip
