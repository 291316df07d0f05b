"""Start one command on every rank, wherever you are, and tell the truth about how it ended.

Used as a command: ``ezpz-launch python train.py``; see ``ezpz-launch --help``.
"""

from ._version import __version__

# Loaded when used: the command itself needs little of it, and starts often.
_LATER = {
    "CommandNotExecutableError": "_errors",
    "CommandNotFoundError": "_errors",
    "LaunchError": "_errors",
    "LaunchPlan": "_plan",
    "Request": "_options",
    "UsageError": "_errors",
    "main": "_cli",
    "plan": "_plan",
    "split": "_options",
}

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ._cli import main
    from ._errors import CommandNotExecutableError, CommandNotFoundError, LaunchError, UsageError
    from ._options import Request, split
    from ._plan import LaunchPlan, plan

__all__ = [
    "CommandNotExecutableError",
    "CommandNotFoundError",
    "LaunchError",
    "LaunchPlan",
    "Request",
    "UsageError",
    "__version__",
    "main",
    "plan",
    "split",
]


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415

    value: object = getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
