"""The standard library's records, brought to our outputs."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

from .lines import Event, to_exc_info, traceback_text
from .listeners import OurHandler, is_ours, is_shown_by_others
from .output import Output
from .quieted import OURS, TAMED, give_level

_USUAL = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
"""What every record has; the rest was given as ``extra``."""


class StandardHandler(OurHandler):
    """Writes records of the standard library where our own events go.

    Not to the terminal where another's handler shows the record on the same stream.
    """

    def __init__(self, output: Output) -> None:
        super().__init__()
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        output = self._output
        if record.levelno < output.level or is_ours(record):
            return
        try:
            text = record.getMessage().rstrip("\n")
        # The script's own mistake, a message that does not fit its arguments; as `logging` does.
        except Exception:  # noqa: BLE001
            self.handleError(record)
            return
        extra = {name: record.__dict__[name] for name in record.__dict__.keys() - _USUAL}
        event = Event(
            record.levelno, record.levelname.lower(), record.name, text, extra,
            exception=traceback_text(to_exc_info(record.exc_info)) or record.exc_text,
            stack=record.stack_info,
        )  # fmt: skip
        logger, stream = logging.getLogger(record.name), output.terminal.stream()
        shown = is_shown_by_others(logger, record.levelno, stream)
        output.send(event, to_terminal=not shown)


def join(output: Output, *, is_level_given: bool) -> list[Callable[[], None]]:
    """Bring the standard library's records to an output; return what undoes it.

    One handler goes on the root logger, and on loggers that keep their records from it (torch's
    do). Where nobody else has a handler on the root, and its level is the default, it is
    lowered to what the output wants; with ``is_level_given`` also where somebody has.
    """
    root, handler, undo = logging.getLogger(), StandardHandler(output), []
    known = [logger for logger in _loggers() if not logger.propagate and logger.handlers]
    has_others = bool(root.handlers)
    for logger in (root, *known):
        logger.addHandler(handler)
        undo.append(_remover(logger, handler))
    if is_level_given or (root.level == logging.WARNING and not has_others):
        undo.append(give_level(root, output.level))
    for names, level in ((TAMED, logging.WARNING), (OURS, output.level)):
        for name in names:
            logger = logging.getLogger(name)
            if logger.level == logging.NOTSET:
                undo.append(give_level(logger, level))
    return undo


def capture_warnings() -> list[Callable[[], None]]:
    """Let `warnings` go to the log; return what undoes it: nothing where they did before."""
    before = warnings.showwarning
    logging.captureWarnings(capture=True)
    if warnings.showwarning is before:
        return []
    return [lambda: logging.captureWarnings(capture=False)]


def _loggers() -> list[logging.Logger]:
    known = logging.getLogger().manager.loggerDict.values()
    return [logger for logger in list(known) if isinstance(logger, logging.Logger)]


def _remover(logger: logging.Logger, handler: logging.Handler) -> Callable[[], None]:
    return lambda: logger.removeHandler(handler)
