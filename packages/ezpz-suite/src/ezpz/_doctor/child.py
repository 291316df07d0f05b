"""The process of one check: it says when it begins, runs it, and answers with a line of JSON."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import Any, NoReturn

from ezpz_topo import CheckResult

from .found import GROUP
from .late import ask_again, is_short

BEGAN = b"began "
"""Of the line that comes before the answer: the monotonic clock where its own work begins."""

LAST_WORDS = 0.15
"""Seconds before its deadline at which a check that hangs says where it stands, and ends."""

SPARE = 0.3
"""Seconds before its deadline at which a check is to be done, so that it can say so itself."""


def main(name: str, value: str, deadline: float, timeout: float) -> NoReturn:
    """Be the process of one check.

    Args:
        name: The check's.
        value: Where it is, as ``"package.module:function"``.
        deadline: Until when it has time, of the monotonic clock.
        timeout: Seconds that all checks have.
    """
    answer, lifeline = os.dup(1), os.dup(0)
    # Whatever the check prints, or a process that it starts: only the answer is the answer.
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    faulthandler.enable()
    left = deadline - time.monotonic()
    # Also where nobody is left to end it, or a C library holds the GIL.
    faulthandler.dump_traceback_later(max(left - LAST_WORDS, 0.01), exit=True)
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    facts = _answer(EntryPoint(name, value, GROUP), answer, deadline, timeout)
    # A path may hold bytes that are no text.
    text = json.dumps(facts, default=str, ensure_ascii=False)
    _write(answer, text.encode(errors="replace") + b"\n")
    # To take torch apart takes as long as many a check.
    os._exit(0)


def _end_with(lifeline: int) -> None:
    """End with the doctor, however that ends: its end of this pipe is closed then.

    With the check goes all that it started: the process group is its own. A check that holds the
    GIL ends at its deadline.
    """
    os.read(lifeline, 1)
    os.killpg(0, signal.SIGKILL)


def _write(answer: int, line: bytes) -> None:
    while line:
        line = line[os.write(answer, line) :]


def _answer(entry: EntryPoint, answer: int, deadline: float, timeout: float) -> dict[str, Any]:
    try:
        check = entry.load()
    except BaseException as error:  # noqa: BLE001  # whatever a package raises at its import
        return _failed(f"{entry.value} cannot be loaded: {_said(error)}")
    began = time.monotonic()
    _write(answer, BEGAN + repr(began).encode() + b"\n")
    seconds = max(deadline - SPARE - began, 0.1)
    try:
        result = check(seconds)
    except BaseException as error:  # noqa: BLE001  # a check that exits is a broken one, too
        return _failed(f"{entry.value} raised {_said(error)}")
    if isinstance(result, Mapping):
        try:
            # For a package that does not import ours.
            result = CheckResult(**result)
        except Exception as error:  # noqa: BLE001  # names and values of somebody else
            return _failed(f"{entry.value} returned what is no result: {_said(error)}")
    if not isinstance(result, CheckResult):
        return _failed(f"{entry.value} returned {result!r:.80}; expected an ezpz_topo.CheckResult")
    if is_short(seconds, timeout) and time.monotonic() - began > seconds / 2:
        result = _doubted(result, entry.name, seconds, timeout)
    return {
        "status": result.status,
        "message": result.message,
        "remedy": result.remedy,
        "details": dict(result.details),
    }


def _doubted(result: CheckResult, name: str, seconds: float, timeout: float) -> CheckResult:
    """Return what a check found that had no time: an error is then most often its own time-out."""
    if result.status != "error":
        return result
    return replace(
        result,
        status="warning",
        message=f"{result.message} (its imports left it {seconds:.1f} s of {timeout:g} s)",
        remedy=f"{ask_again(name)}; if it says the same: {result.remedy}",
    )


def _failed(message: str) -> dict[str, Any]:
    trace = traceback.format_exc() if sys.exc_info()[0] else ""
    return {"broken": message, "details": {"traceback": trace} if trace else {}}


def _said(error: BaseException) -> str:
    words = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
