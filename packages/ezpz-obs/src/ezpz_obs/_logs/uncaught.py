"""Exceptions that nobody catches: logged with the rank before the process ends."""

from __future__ import annotations

import io
import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import TextIO

from .lines import Event, ExcInfo, traceback_text
from .logger import Channel
from .output import NAME

_NO_ERRORS = (KeyboardInterrupt, SystemExit, GeneratorExit)
_LONGEST = 500


class Uncaught:
    """Our hooks for uncaught exceptions, which call those that were there before.

    They log one line with rank and host; the traceback is for the log file and for the hook
    before, which prints it. Only where that is Python's own and the terminal's lines are JSON,
    the line holds the traceback and nothing more is printed.

    Args:
        channel: Where to log.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._stream: TextIO | None = sys.stderr
        self._before = sys.excepthook
        self._before_in_threads = threading.excepthook
        # As attributes: a bound method is another object each time it is looked up.
        self._hook = self._main
        self._thread_hook = self._thread
        self._is_on = True
        sys.excepthook = self._hook
        threading.excepthook = self._thread_hook

    def remove(self) -> None:
        """Put the hooks back; where somebody has hooked over ours, they only call on."""
        self._is_on = False
        if sys.excepthook is self._hook:
            sys.excepthook = self._before
        if threading.excepthook is self._thread_hook:
            threading.excepthook = self._before_in_threads

    def log(self, found: ExcInfo, thread: str | None = None, *, whole: bool = False) -> None:
        """Log an exception.

        Args:
            found: Its kind, value and traceback.
            thread: The name of the thread that it ends, where that is not the main one.
            whole: Show the traceback on the terminal as well.
        """
        kind, value, _ = found
        try:
            lines = str(value).splitlines()
        # An exception may be unable to say what it is; its kind is known.
        except Exception:  # noqa: BLE001
            lines = []
        text = f"uncaught {kind.__name__}" + (f": {lines[0][:_LONGEST]}" if lines else "")
        event = Event(
            logging.CRITICAL, "critical", NAME, text, {} if thread is None else {"thread": thread},
            exception=traceback_text(found),
        )  # fmt: skip
        shown = event if whole else replace(event, exception=None)
        self._channel.give(event, found, on_terminal=shown)

    def _main(
        self, kind: type[BaseException], value: BaseException, trace: TracebackType | None
    ) -> None:
        self._pass_on(
            (kind, value, trace), None, self._before is sys.__excepthook__,
            lambda: self._before(kind, value, trace),
        )  # fmt: skip

    def _thread(self, args: threading.ExceptHookArgs) -> None:
        found = args.exc_type, args.exc_value, args.exc_traceback
        name = "?" if args.thread is None else args.thread.name
        is_pythons = self._before_in_threads is threading.__excepthook__
        value = args.exc_value if args.exc_value is not None else args.exc_type()
        self._pass_on(
            (found[0], value, found[2]), name, is_pythons, lambda: self._before_in_threads(args)
        )

    def _pass_on(
        self, found: ExcInfo, thread: str | None, is_pythons: bool, go_on: Callable[[], object]
    ) -> None:
        if not self._is_on or issubclass(found[0], _NO_ERRORS):
            go_on()
            return
        whole = is_pythons and self._channel.output.terminal.as_json
        has_said = False
        try:
            with _OnRealStream(self._stream):
                self.log(found, thread, whole=whole)
            has_said = self._channel.output.terminal.lost == 0
        finally:
            if not (whole and has_said):
                go_on()


class _OnRealStream:
    """Standard error as it was, while torch.distributed's hook collects what ours prints.

    It puts ``[rank1]:`` before every line, which is no JSON then.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._collector: TextIO | None = None

    def __enter__(self) -> None:
        if type(sys.stderr) is io.StringIO and self._stream not in (None, sys.stderr):
            self._collector, sys.stderr = sys.stderr, self._stream

    def __exit__(self, *_: object) -> None:
        if self._collector is not None:
            sys.stderr = self._collector
