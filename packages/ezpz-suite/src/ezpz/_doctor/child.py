"""The process of one check: it runs it, and answers with a line of JSON."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from typing import Any, NoReturn

from ezpz_topo import CheckResult

from .found import GROUP

LAST_WORDS = 0.15
"""Seconds before its deadline at which a check that hangs says where it stands, and ends."""

SPARE = 0.3
"""Seconds before its deadline at which a check is to be done, so that it can say so itself."""


def main(name: str, value: str, deadline: float) -> NoReturn:
    """Be the process of one check, which has until this time of the monotonic clock."""
    answer = os.dup(1)
    # Whatever the check prints, or a process that it starts: only the answer is the answer.
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    faulthandler.enable()
    left = deadline - time.monotonic()
    # Also where nobody is left to end it, or a C library holds the GIL.
    faulthandler.dump_traceback_later(max(left - LAST_WORDS, 0.01), exit=True)
    facts = _answer(name, value, deadline)
    # A path may hold bytes that are no text.
    text = json.dumps(facts, default=str, ensure_ascii=False)
    line = text.encode(errors="replace") + b"\n"
    while line:
        line = line[os.write(answer, line) :]
    # To take torch apart takes as long as many a check.
    os._exit(0)


def _answer(name: str, value: str, deadline: float) -> dict[str, Any]:
    try:
        check = EntryPoint(name, value, GROUP).load()
    except BaseException as error:  # noqa: BLE001  # whatever a package raises at its import
        return _failed(f"{value} cannot be loaded: {_said(error)}")
    try:
        result = check(max(deadline - SPARE - time.monotonic(), 0.1))
    except BaseException as error:  # noqa: BLE001  # a check that exits is a broken one, too
        return _failed(f"{value} raised {_said(error)}")
    if isinstance(result, Mapping):
        try:
            # For a package that does not import ours.
            result = CheckResult(**result)
        except Exception as error:  # noqa: BLE001  # names and values of somebody else
            return _failed(f"{value} returned what is no result: {_said(error)}")
    if not isinstance(result, CheckResult):
        return _failed(f"{value} returned {result!r:.80}; expected an ezpz_topo.CheckResult")
    return {
        "status": result.status,
        "message": result.message,
        "remedy": result.remedy,
        "details": dict(result.details),
    }


def _failed(message: str) -> dict[str, Any]:
    trace = traceback.format_exc() if sys.exc_info()[0] else ""
    return {"broken": message, "details": {"traceback": trace} if trace else {}}


def _said(error: BaseException) -> str:
    words = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
