"""Start one command on every rank, wherever you are, and tell the truth about how it ended.

Used as a command: ``ezpz-launch python train.py``; see ``ezpz-launch --help``.

Names are imported when they are used: the programs that run on every node import single modules of
this package, and nothing else of it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._cli import main as main
    from ._errors import CommandNotExecutableError as CommandNotExecutableError
    from ._errors import CommandNotFoundError as CommandNotFoundError
    from ._errors import LaunchError as LaunchError
    from ._errors import UsageError as UsageError
    from ._plan.options import Request as Request
    from ._plan.options import split as split
    from ._plan.plan import LaunchPlan as LaunchPlan
    from ._plan.plan import plan as plan
    from ._run.record import records_folder as records_folder
    from ._version import __version__ as __version__

_MODULES = {
    "CommandNotExecutableError": "_errors",
    "CommandNotFoundError": "_errors",
    "LaunchError": "_errors",
    "LaunchPlan": "_plan.plan",
    "Request": "_plan.options",
    "UsageError": "_errors",
    "__version__": "_version",
    "main": "_cli",
    "plan": "_plan.plan",
    "records_folder": "_run.record",
    "split": "_plan.options",
}

__all__ = [
    "CommandNotExecutableError", "CommandNotFoundError", "LaunchError", "LaunchPlan", "Request",
    "UsageError", "__version__", "main", "plan", "records_folder", "split",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'ezpz_launch' has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
