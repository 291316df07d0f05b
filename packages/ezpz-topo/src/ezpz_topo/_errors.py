"""The error tree of ezpz_topo: every error gives the value, the expectation and the remedy."""

from __future__ import annotations

from collections.abc import Iterable


class TopoError(Exception):
    """Base of every error that ezpz_topo raises on purpose."""


class InvalidVariableError(TopoError):
    """A variable or file is there, but its value cannot be true."""


class NodelistError(TopoError):
    """A Slurm nodelist does not parse, or names too many hosts."""


class HostfileError(TopoError):
    """A hostfile cannot be read or does not parse."""


class MachineError(TopoError):
    """A machine's TOML file has an unknown key or a wrong value, or no machine has that name."""


class SchedulerError(TopoError):
    """A scheduler's command (qstat, scontrol) is missing, failed, or did not answer in time."""


class NoSchedulerError(SchedulerError):
    """A scheduler's commands are installed on this host, and know no server of it."""


class IncompleteLauncherError(TopoError):
    """A launcher's variables are half set, so this process cannot know its rank."""


class LauncherConflictError(TopoError):
    """Two launchers give this process different ranks."""


class CheckError(TopoError):
    """What a check of ``ezpz doctor`` returned is no result."""


def shorten(text: str, length: int) -> str:
    """Return a text quoted, and cut with dots where it is longer."""
    if len(text) > length:
        text = f"{text[: length - 3]}..."
    return repr(text)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of an error's sentence that names the nearest word; empty if none is near."""
    import difflib  # noqa: PLC0415 - only a wrong word needs it

    for nearest in difflib.get_close_matches(word, list(known), 1):
        return f"did you mean {nearest!r}?"
    return ""
