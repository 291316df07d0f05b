"""What is said of a check that was not done in time: it hangs, or had hardly begun.

That a process is still importing says nothing about the machine, but that its files are far away:
the first import of torch on a shared file system takes longer than all checks together.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from typing import Final

from ezpz_topo import CheckResult

from .found import Check

ENOUGH: Final = 2.0
"""Seconds of its own work that a check is to have had before it hangs; of less time, half."""

PATIENCE: Final = 60.0
"""Seconds after which imports that are not done are an error, too."""

_FRAME = re.compile(r'^  File "(.*)", line ([0-9]+) in (.*)$', re.MULTILINE)
"""What `faulthandler` writes for each place."""

_IMPORT_SYSTEM = "<frozen importlib."
_INSTALLED = ("site-packages", "dist-packages")


def is_short(seconds: float, timeout: float) -> bool:
    """Whether a check that had so much of this time is to have more before it is judged."""
    return seconds < min(ENOUGH, timeout / 2)


def ask_again(name: str) -> str:
    """Return the remedy of what had too little time."""
    return f"ask again with more time: ezpz doctor --timeout={PATIENCE:g} --only={name}"


def judge(
    check: Check, timeout: float, worked: float | None, words: str, details: Mapping[str, object]
) -> CheckResult:
    """Return the result of a check that did not answer in time.

    Args:
        check: Which one.
        timeout: Seconds that all checks had.
        worked: Seconds since it began its own work; None if it had not.
        words: What it printed, with what `faulthandler` wrote when the time was over.
        details: For programs.
    """
    if worked is None or _is_importing(words):
        return _importing(check, timeout, words, details)
    if is_short(worked, timeout):
        return CheckResult.warning(
            f"not done in {timeout:g} s: its imports took {timeout - worked:.1f} s of them",
            ask_again(check.name),
            **details,
        )
    remedy = (
        f"give it more time: ezpz doctor --timeout={PATIENCE:g} --only={check.name}; if that does "
        "not help, what it waits for hangs"
    )
    return CheckResult.error(
        f"hangs: did not end in {timeout:g} s{standing(words)}", remedy, **details
    )


def _importing(
    check: Check, timeout: float, words: str, details: Mapping[str, object]
) -> CheckResult:
    what, place = imported(words, check.value.partition(":")[0]), place_of(words)
    message = f"not done in {timeout:g} s: still importing {what or 'its modules'}"
    message += f" ({place})" if place else ""
    facts = {**details, "importing": what}
    if timeout < PATIENCE:
        return CheckResult.warning(message, ask_again(check.name), **facts)
    return CheckResult.error(
        message,
        f"see what takes so long: {sys.executable} -X importtime -c 'import {what or 'torch'}'; "
        "on a slow file system, put the environment on each node's own disk (sbcast, or tar)",
        **facts,
    )


def standing(words: str) -> str:
    """Return the end of a sentence that says where a process stood; empty if nobody knows."""
    where = place_of(words)
    return f"; it stands in {where}" if where else ""


def place_of(words: str) -> str:
    """Return where a process stood, of what `faulthandler` wrote of it; empty if it did not.

    That is its main thread, which comes last, and there the innermost place that is not the
    standard library's own.
    """
    frames = _frames(words)
    for path, line, function in (_installed(frames) or frames)[:1]:
        return f"{function} ({path}:{line})"
    return ""


def imported(words: str, module: str) -> str:
    """Return the package that a process was importing, of what `faulthandler` wrote of it.

    That is the outermost one that is neither the check's own nor one of ours, where there is such
    a one; empty if nobody knows. No file is looked at: files may be what takes so long.

    Args:
        words: What it wrote.
        module: Where the check is.
    """
    folders = [f"{folder}{os.sep}" for folder in sys.path if folder]
    own, last = module.partition(".")[0], ""
    for path, _, function in reversed(_installed(_frames(words))):
        inside = [folder for folder in folders if path.startswith(folder)]
        if function == "<module>" and inside:
            last = path.removeprefix(max(inside, key=len)).split(os.sep)[0].partition(".")[0]
            if last != own and not last.startswith("ezpz"):
                return last
    return last


def _is_importing(words: str) -> bool:
    return any(path.startswith(_IMPORT_SYSTEM) for path, _, _ in _frames(words))


def _frames(words: str) -> list[tuple[str, str, str]]:
    """Return path, line and function of the main thread's places, the innermost first."""
    thread = re.split(r"(?m)^.*\(most recent call first\):$", words)[-1]
    return _FRAME.findall(thread)


def _installed(frames: Sequence[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """Return those that are not the standard library's own."""
    own = (sysconfig.get_path("stdlib"), "<frozen ")
    return [
        frame
        for frame in frames
        if not frame[0].startswith(own) or any(part in frame[0] for part in _INSTALLED)
    ]
