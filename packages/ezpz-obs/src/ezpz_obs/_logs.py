"""Loggers that know their rank, and one place where a process's logs are configured."""

from __future__ import annotations

import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor

from ._context import RankInfo, find_rank_info
from ._handlers import (
    ForeignHandler,
    LogFileHandler,
    TerminalHandler,
    iterate_user_handlers,
    warn_of_file,
    writes_to,
)
from ._processors import (
    get_log_level,
    level_of_rank,
    make_chain,
    make_formatter,
    make_plain,
    parse_level,
    redact_secrets,
    wants_json,
)
from ._text import describe_error, to_plain, to_text

_CHATTY: Final = (
    "absl", "aiohttp", "alembic", "asyncio", "azure", "boto3", "botocore", "datasets", "filelock",
    "fontTools", "fsspec", "git", "google", "grpc", "h5py", "httpcore", "httpx",
    "huggingface_hub", "jax", "markdown_it", "matplotlib", "mlflow", "multipart", "numba",
    "openai", "parso", "PIL", "requests", "s3fs", "s3transfer", "sentry_sdk", "sqlalchemy",
    "tensorboard", "tensorflow", "triton", "urllib3", "wandb",
)  # fmt: skip
"""Loggers that log from WARNING, unless somebody has given them a level."""

_OURS: Final = ("ezpz", "ezpz_device", "ezpz_dist", "ezpz_launch", "ezpz_obs", "ezpz_topo",
                "ezpz_tp")  # fmt: skip
"""Loggers that log from our own level, unless somebody has given them one."""

_NO_ERRORS: Final = (KeyboardInterrupt, SystemExit, GeneratorExit)
_LEVELS: Final = {
    "debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING,
    "error": logging.ERROR, "critical": logging.CRITICAL,
}  # fmt: skip


@dataclass
class Output:
    """Where this process's events go."""

    place: RankInfo
    chain: list[Processor]
    terminal: TerminalHandler
    handlers: list[logging.Handler]  # the terminal, and a file if there is one
    as_json: bool
    is_configured: bool = False

    @property
    def level(self) -> int:
        return min(handler.level for handler in self.handlers)


_output: Output | None = None
_level: int = 0  # of the output: read by each call of a logger


def find_output(*, refresh: bool = False) -> Output:
    """Return this process's output; refreshed from the environment unless it was configured."""
    if _output is None or (refresh and not _output.is_configured):
        place = find_rank_info()
        level = get_log_level(os.environ, rank=place.rank)
        _set_output(make_output(place, level, as_json=wants_json(os.environ)))
    assert _output is not None
    return _output


def _set_output(output: Output) -> None:
    global _output, _level
    _output = output
    _level = output.level


def make_output(
    place: RankInfo, level: int, *, as_json: bool, processors: Sequence[Processor] = ()
) -> Output:
    """Return an output that is a terminal alone."""
    chain = make_chain(place, processors)
    plain = make_formatter(chain, place, as_json=as_json, colors=False)
    colored = plain if as_json else make_formatter(chain, place, as_json=False, colors=True)
    terminal = TerminalHandler(plain, colored, os.environ)
    terminal.setLevel(level)
    return Output(place, chain, terminal, [terminal], as_json)


class LogEmitter:
    """What structlog's logger ends in: makes a record of an event, and hands it to the handlers."""

    def __init__(self, name: str | None) -> None:
        self.name = name
        self._standard = logging.getLogger(name)

    def __reduce__(self) -> tuple[type[LogEmitter], tuple[str | None]]:
        """Let copies of a model with a logger in it, and spawned processes, log as this one."""
        return LogEmitter, (self.name,)

    def is_enabled(self, level: int) -> bool:
        if level >= _level:
            return True
        return self._standard.isEnabledFor(level) and any(iterate_user_handlers(self._standard))

    def emit(self, level: int, event: EventDict) -> None:
        output = find_output()
        record = self.make_record(level, event)
        for handler in output.handlers:
            if level >= handler.level:
                handler.handle(record)
        if self._standard.isEnabledFor(level):
            self._emit_to_user_handlers(level, event, output.terminal)

    def make_record(self, level: int, event: EventDict) -> logging.LogRecord:
        """Return a record that `ProcessorFormatter` knows as one of structlog's."""
        label = logging.getLevelName(level)
        return logging.makeLogRecord(
            {
                "name": self.name or "root", "levelno": level, "levelname": label, "msg": event,
                "_logger": self, "_name": label.lower(),
            }
        )  # fmt: skip

    def _emit_to_user_handlers(
        self, level: int, event: EventDict, terminal: TerminalHandler
    ) -> None:
        """Hand the event to the handlers that somebody has put on the standard logger."""
        handlers = [
            handler
            for handler in iterate_user_handlers(self._standard)
            if level >= handler.level and not writes_to(handler, terminal.stream)
        ]
        if not handlers:
            return
        record = self._make_standard_record(level, event)
        if self._standard.filter(record):
            for handler in handlers:
                handler.handle(record)

    def _make_standard_record(self, level: int, event: EventDict) -> logging.LogRecord:
        fields = redact_secrets(self, "", make_plain(self, "", event))
        text = to_text(fields.pop("event"))
        for hidden in ("time", "level", "logger", "rank", "host", "step"):
            fields.pop(hidden, None)
        exception = fields.pop("exception", None)
        text = " ".join([text, *(f"{name}={to_text(one)}" for name, one in fields.items())])
        if exception:
            text = f"{text}\n{exception}"
        return logging.LogRecord(self._standard.name, level, "", 0, text, None, None)


def _run_chain(logger: LogEmitter, method_name: str, event_dict: EventDict) -> Any:
    """Run the chain as it is now: `configure_logs` may come after the logger was made."""
    for processor in find_output().chain:
        event_dict = processor(logger, method_name, event_dict)  # type: ignore[assignment]
    return (event_dict,), {}


_Base: Any = structlog.make_filtering_bound_logger(logging.NOTSET)


class Logger(_Base):  # type: ignore[misc]  # structlog makes the class at run time
    """Structlog's logger with a changeable level: `configure_logs` may be called later."""

    def _proxy_to_logger(self, method_name: str, event: object = None, /, **fields: Any) -> None:
        level = _LEVELS[method_name]
        if level < _level and not self._logger.is_enabled(level):
            return
        try:
            (processed,), _ = self._process_event(method_name, event, fields)
        except structlog.DropEvent:
            return
        self._logger.emit(level, processed)

    def is_enabled_for(self, level: int) -> bool:
        return bool(self._logger.is_enabled(level))

    def get_effective_level(self) -> int:
        return find_output().level


def get_logger(name: str | None = None, **initial_values: Any) -> FilteringBoundLogger:
    """Return a structlog logger for this rank; nothing global is configured.

    Rank 0 logs from ``EZPZ_LOG_LEVEL`` (default INFO); the other ranks from WARNING, so
    that real errors are never hidden, or like rank 0 with ``LOG_FROM_ALL_RANKS=1``. Lines name
    rank and host in a world of several ranks, and the step that a `History` recorded last.
    ``EZPZ_LOG_FORMAT=json`` makes them JSON. Colours are used on a terminal only, and never
    with ``NO_COLOR``. What cannot be written, because standard error is closed or its disk
    full, is no error. A value that cannot be shown is none either: the line names its type, as
    ``<Config: __repr__ raised KeyError: 'lr'>``.

    Handlers that somebody has put on the standard library's logger of this name, or above it,
    get the events too, as far as its level allows.

    Args:
        name: Shown on every line; by custom ``__name__``.
        initial_values: Fields of every line, as of ``structlog.get_logger``.

    Raises:
        ValueError: ``EZPZ_LOG_LEVEL`` is no level, or ``EZPZ_LOG_FORMAT`` no format.
        ezpz_topo.TopoError: The rank cannot be known.

    >>> get_logger("train").bind(epoch=1).info("saved", path="step-12")
    """
    find_output(refresh=True)  # launchers' variables may come after the first logger
    # Structlog's protocol is what it has, by way of a class that is made at import.
    logger: FilteringBoundLogger = Logger(LogEmitter(name), [_run_chain], initial_values)
    return logger


def log_dict_as_bulleted_list(
    d: Mapping[Any, Any],
    name: str | None = None,
    *,
    logger: FilteringBoundLogger | None = None,
) -> None:
    """Log a mapping, such as a configuration, as one event with a line for each value.

    Args:
        d: The mapping; mappings in it are indented below their names.
        name: What to call it; default: the name of its class.
        logger: Which logger; default: this rank's.

    >>> log_dict_as_bulleted_list({"lr": 0.1, "model": {"layers": 2}}, "config")
    """
    title = name or getattr(d, "__qualname__", type(d).__name__)
    logger = logger or get_logger()
    logger.info("\n".join([f"[{title}]:", *_list_values(to_plain(d), "")]))


def _list_values(plain: object, indent: str) -> Iterator[str]:
    if not isinstance(plain, dict):
        yield f"{indent}- {plain}"
        return
    for name, value in plain.items():
        if isinstance(value, dict) and value:
            yield f"{indent}- {name}:"
            yield from _list_values(value, f"{indent}  ")
        else:
            text = str(value).replace("\n", f"\n{indent}  ")
            yield f"{indent}- {name}={text}"


class LogSetup:
    """The handle of `configure_logs`; a context manager that undoes it at its end.

    Attributes:
        path: This rank's log file, or None.
    """

    def __init__(self, path: Path | None, request: tuple[object, ...], undo: ExitStack) -> None:
        self.path: Path | None = path
        self.request = request
        self._undo = undo

    def undo(self) -> None:
        """Put everything back as it was. It may be called twice, and after another set-up."""
        global _active
        if _active is self:
            _active = None
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, value: BaseException | None, trace: object) -> None:
        # Once undone it would not be logged. Printing it is left to the earlier hook.
        if isinstance(value, Exception):
            log_uncaught(value, with_traceback=False)
        self.undo()


_active: LogSetup | None = None


def configure_logs(
    *,
    directory: str | os.PathLike[str] | None = None,
    per_rank: bool = False,
    level: str | int | None = None,
    as_json: bool | None = None,
    processors: Sequence[Processor] = (),
) -> LogSetup:
    """Bring all that this process logs to one output, and optionally into a file.

    The loggers of `get_logger`, also those made before, the standard library's
    (``logging.getLogger``) and Python's warnings go to standard error, and to ``directory``. An
    uncaught exception, of a thread too, is logged with rank and host before the process ends.
    The earlier hook then prints the traceback.

    Handlers and levels that were set before stay as they are. Other handlers get the loggers'
    events too. One of them that writes to standard error shows the standard library's records
    alone. Chatty libraries without a level log from WARNING. Call it after the
    imports. It then finds libraries that keep their records from the root logger, as torch
    does. While it is in force ``logging.basicConfig()`` does nothing.

    The same call again changes nothing. Another one takes its place.

    Args:
        directory: Where rank 0 writes ``rank-00000.jsonl`` from INFO, or from ``level`` where that
            is lower: one JSON object a line, one write each. Where that is not possible (a full
            disk) one warning names the file.
        per_rank: Every rank writes its file there, ``rank-00001.jsonl``, ...
        level: From which level rank 0 shows events, such as "DEBUG"; default:
            ``EZPZ_LOG_LEVEL``, else INFO. The other ranks from WARNING, unless
            ``LOG_FROM_ALL_RANKS=1``. A given one is the root logger's too.
        as_json: JSON lines on standard error; default: whether ``EZPZ_LOG_FORMAT=json``.
        processors: More structlog processors, ``(logger, method_name, event_dict) -> event_dict``,
            before the event is redacted and rendered.

    Returns:
        A handle that undoes it: ``undo()``, or the end of its ``with``. An exception that
        leaves such a ``with`` is logged as an uncaught one.

    Raises:
        ValueError: A level or format is none.
        ezpz_topo.TopoError: The rank cannot be known.
    """
    global _active
    place = find_rank_info()
    number = get_log_level(os.environ, rank=0)
    if level is not None:
        number = parse_level(level, "level")
    if as_json is None:
        as_json = wants_json(os.environ)
    path = None
    if directory and (place.rank == 0 or per_rank):
        path = Path(directory).absolute() / f"rank-{place.rank:05}.jsonl"
    request = (place, number, as_json, path, level is not None, tuple(processors))
    if _active is not None:
        if _active.request == request:
            return _active
        _active.undo()
    undo = ExitStack()
    undo.callback(_set_output, find_output())
    terminal_level = level_of_rank(number, os.environ, place.rank)
    output = make_output(place, terminal_level, as_json=as_json, processors=processors)
    if path is not None:
        _add_file(output, path, min(number, logging.INFO), undo)
    _set_output(replace(output, is_configured=True))
    _attach_to_stdlib_logging(output, undo, is_level_given=level is not None)
    _capture_warnings(undo)
    _hook_exceptions(undo)
    _active = LogSetup(path, request, undo)
    return _active


def _add_file(output: Output, path: Path, level: int, undo: ExitStack) -> None:
    try:
        handler = LogFileHandler(path, output.terminal)
    except OSError as error:
        warn_of_file(output.terminal, path, error)
        return
    handler.setLevel(level)
    handler.setFormatter(make_formatter(output.chain, output.place, as_json=True, colors=False))
    output.handlers.append(handler)
    undo.callback(handler.close)


def _attach_to_stdlib_logging(output: Output, undo: ExitStack, *, is_level_given: bool) -> None:
    # One handler is added to the root logger, and to loggers that do not propagate (torch's).
    # The root's level is set if one was requested, or if it is the default without handlers.
    root = logging.getLogger()
    has_others = bool(root.handlers)
    handler = ForeignHandler(output.handlers)
    loggers = [root]
    for logger in root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.handlers and not logger.propagate:
            loggers += [logger]
    for logger in loggers:
        logger.addHandler(handler)
        undo.callback(logger.removeHandler, handler)
    if is_level_given or (root.level == logging.WARNING and not has_others):
        _set_level(root, output.level, undo)
    for names, level in ((_CHATTY, logging.WARNING), (_OURS, output.level)):
        for name in names:
            logger = logging.getLogger(name)
            if logger.level == logging.NOTSET:
                _set_level(logger, level, undo)


def _set_level(logger: logging.Logger, level: int, undo: ExitStack) -> None:
    """Give a logger a level, which is taken back unless somebody has changed it since."""
    before = logger.level
    logger.setLevel(level)

    def take_back() -> None:
        if logger.level == level:
            logger.setLevel(before)

    undo.callback(take_back)


def _capture_warnings(undo: ExitStack) -> None:
    before = warnings.showwarning
    logging.captureWarnings(capture=True)
    if warnings.showwarning is not before:  # else somebody captures them already
        undo.callback(logging.captureWarnings, capture=False)


def _hook_exceptions(undo: ExitStack) -> None:
    """Log uncaught exceptions, also of threads, before the hooks that were there."""
    before = sys.excepthook
    before_in_threads = threading.excepthook
    is_undone = False

    def hook(kind: Any, value: BaseException, trace: Any) -> None:
        is_default_hook = before is sys.__excepthook__
        if is_undone or not _log_in_hook(value, is_default_hook=is_default_hook):
            before(kind, value, trace)

    def thread_hook(arguments: threading.ExceptHookArgs) -> None:
        is_default_hook = before_in_threads is threading.__excepthook__
        if is_undone or not _log_in_hook(arguments.exc_value, is_default_hook=is_default_hook):
            before_in_threads(arguments)

    def remove() -> None:
        nonlocal is_undone
        is_undone = True  # another hook may call ours still
        if sys.excepthook is hook:
            sys.excepthook = before
        if threading.excepthook is thread_hook:
            threading.excepthook = before_in_threads

    sys.excepthook = hook
    threading.excepthook = thread_hook
    undo.callback(remove)


def _log_in_hook(value: BaseException | None, *, is_default_hook: bool) -> bool:
    """Log an uncaught exception; return whether the earlier hook need not print it."""
    if value is None or isinstance(value, _NO_ERRORS):
        return False
    output = find_output()
    # Of Python's own hook a line of JSON has the traceback, and nothing more is printed.
    has_traceback = is_default_hook and output.as_json
    log_uncaught(value, with_traceback=has_traceback)
    return has_traceback and not output.terminal.failed


def log_uncaught(value: BaseException, *, with_traceback: bool) -> None:
    """Log an uncaught exception: the file gets its traceback, the terminal if wanted."""
    output = find_output()
    emitter = LogEmitter("ezpz_obs")
    for handler in output.handlers:
        event: EventDict = {"event": f"uncaught {describe_error(value)}"}
        if with_traceback or handler is not output.terminal:
            event["exc_info"] = value
        thread = threading.current_thread()
        if thread is not threading.main_thread():
            event["thread"] = thread.name
        for processor in output.chain:
            event = processor(emitter, "critical", event)  # type: ignore[assignment]
        handler.handle(emitter.make_record(logging.CRITICAL, event))
