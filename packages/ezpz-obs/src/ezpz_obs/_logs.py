"""Loggers that know their rank, and one place where a process's logs are configured."""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext, redirect_stderr
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TextIO, cast

import structlog

from ._context import describe_failure, find_place, to_text
from ._terminal import (
    LEVELS,
    NAME,
    Event,
    ExcInfo,
    LogFile,
    Output,
    Terminal,
    file_name,
    for_rank,
    get_log_level,
    make_output,
    process_output,
    show,
    to_exc_info,
    to_level,
    traceback_text,
    wants_json,
)

TAMED = (
    "absl", "aiohttp", "alembic", "asyncio", "azure", "boto3", "botocore", "datasets", "filelock",
    "fontTools", "fsspec", "git", "google", "grpc", "h5py", "httpcore", "httpx",
    "huggingface_hub", "jax", "markdown_it", "matplotlib", "mlflow", "multipart", "numba",
    "openai", "parso", "PIL", "requests", "s3fs", "s3transfer", "sentry_sdk", "sqlalchemy",
    "tensorboard", "tensorflow", "triton", "urllib3", "wandb",
)  # fmt: skip
"""Loggers that speak from WARNING, unless somebody has given them a level."""

OURS = ("ezpz", "ezpz_device", "ezpz_dist", "ezpz_launch", "ezpz_obs", "ezpz_topo", "ezpz_tp")
"""Loggers that speak from our own level, unless somebody has given them one."""


def give_level(undo: ExitStack, logger: logging.Logger, level: int) -> None:
    """Give a logger a level, which is taken back unless somebody has changed it since."""
    before = logger.level
    logger.setLevel(level)

    def take_back() -> None:
        if logger.level == level:
            logger.setLevel(before)

    undo.callback(take_back)


MARK = "ezpz_obs_event"  # the attribute of a record that was made of an event of ours, and holds it


def has_listeners(logger: logging.Logger) -> bool:
    return next(_handlers(logger), None) is not None


def is_shown_by_others(logger: logging.Logger, level: int, stream: TextIO | None) -> bool:
    """Say whether another's handler writes what this logger is told to that very stream."""
    return stream is not None and any(
        level >= handler.level and _writes_to(handler, stream) for handler in _handlers(logger)
    )


def tell(
    logger: logging.Logger, event: Event, exc_info: ExcInfo | None, stream: TextIO | None
) -> None:
    if not logger.isEnabledFor(event.level):
        return
    shown = (
        f"{name}={to_text(value) if isinstance(value, str) else show(value)}"
        for name, value in event.fields.items()
    )
    text = " ".join([event.text, *shown])
    site = _find_caller(logger, "", {})
    record = logger.makeRecord(
        logger.name, event.level, site["pathname"], site["lineno"], text, (), exc_info,
        site["func_name"], sinfo=event.stack,
    )  # fmt: skip
    setattr(record, MARK, event)
    if not logger.filter(record):
        return
    for handler in _handlers(logger):
        if event.level >= handler.level and not _writes_to(handler, stream):
            handler.handle(record)


def _handlers(logger: logging.Logger) -> Iterator[logging.Handler]:
    at: logging.Logger | None = logger
    while at is not None:
        for handler in at.handlers:
            if not isinstance(handler, StandardHandler):
                yield handler
        at = at.parent if at.propagate else None


def _writes_to(handler: logging.Handler, stream: TextIO | None) -> bool:
    return stream is not None and getattr(handler, "stream", None) is stream


_Site = structlog.processors.CallsiteParameter
_find_caller = structlog.processors.CallsiteParameterAdder(
    {_Site.PATHNAME, _Site.LINENO, _Site.FUNC_NAME},
    additional_ignores=["ezpz_obs._logs", "ezpz_obs._progress"],
)


_USUAL = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
"""What every record has; the rest was given as ``extra``."""


def format_message(event: object, args: object) -> str:
    """Return the event with its arguments put in; beside it where they do not fit, or raise."""
    text = to_text(event)
    if not args:
        return text
    try:
        only = args[0] if isinstance(args, tuple) and len(args) == 1 else None
        return text % (only if isinstance(only, Mapping) and only else args)
    # Whatever is wrong with the arguments, they are shown; a log line must not end a training.
    except Exception:  # noqa: BLE001
        return f"{text} {to_text(args, repr)}"


class StandardHandler(logging.Handler):
    # Not to the terminal where another's handler shows the record on the same stream.

    def __init__(self, output: Output) -> None:
        super().__init__()
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        output = self._output
        # Ours is shown already: a user's queue may bring it back. Another process's is news.
        is_ours = hasattr(record, MARK) and record.process == os.getpid()
        if record.levelno < output.level or is_ours:
            return
        try:
            text = record.getMessage()
        # The script's own mistake, or an object's: the line says which, here and in the file.
        except Exception:  # noqa: BLE001
            text = format_message(record.msg, record.args)
        extra = {name: record.__dict__[name] for name in record.__dict__.keys() - _USUAL}
        event = Event(
            record.levelno, record.levelname.lower(), record.name, text.rstrip("\n"), extra,
            exception=traceback_text(to_exc_info(record.exc_info)) or record.exc_text,
            stack=record.stack_info,
        )  # fmt: skip
        logger, stream = logging.getLogger(record.name), output.terminal.stream()
        shown = is_shown_by_others(logger, record.levelno, stream)
        output.send(event, to_terminal=not shown)


def join(output: Output, undo: ExitStack, *, is_level_given: bool) -> None:
    # One handler goes on the root logger, and on loggers that keep their records from it (torch's).
    # The root's level is given where one was asked for, or it is the default and no one else's.
    root, handler = logging.getLogger(), StandardHandler(output)
    loggers = [one for one in root.manager.loggerDict.values() if isinstance(one, logging.Logger)]
    has_others = bool(root.handlers)
    for logger in (root, *(one for one in loggers if not one.propagate and one.handlers)):
        logger.addHandler(handler)
        undo.callback(logger.removeHandler, handler)
    if is_level_given or (root.level == logging.WARNING and not has_others):
        give_level(undo, root, output.level)
    for names, level in ((TAMED, logging.WARNING), (OURS, output.level)):
        for name in names:
            logger = logging.getLogger(name)
            if logger.level == logging.NOTSET:
                give_level(undo, logger, level)


_NUMBERS = {name.lower(): level for name, level in LEVELS.items()}


def get_logger(
    name: str | None = None,
    *,
    env: Mapping[str, str] | None = None,
    file: TextIO | None = None,
) -> structlog.typing.FilteringBoundLogger:
    """Return a structlog logger for this rank; nothing global is configured.

    Rank 0 logs from ``EZPZ_LOG_LEVEL`` (default INFO); the other ranks from WARNING, so
    that real errors are never hidden, or like rank 0 with ``LOG_FROM_ALL_RANKS=1``. Lines name
    rank and host in a world of several ranks, and the step that a `History` recorded last.
    ``EZPZ_LOG_FORMAT=json`` makes them JSON. Colours are used on a terminal only, and never
    with ``NO_COLOR``. What cannot be written, because standard error is closed or its disk
    full, is no error. Nor is a value that cannot be shown: the line names its type, as
    ``<Config: __repr__ raised KeyError: 'lr'>``.

    Handlers that somebody has put on the standard library's logger of this name, or above it,
    hear the events too, as far as its level allows.

    Args:
        name: Shown on every line; by custom ``__name__``.
        env: The environment to read; default ``os.environ``. Such a logger, and one with a
            ``file``, is not changed by `configure_logs`.
        file: Where lines go; default standard error, as it is at each call.

    Raises:
        ValueError: ``EZPZ_LOG_LEVEL`` is no level, or ``EZPZ_LOG_FORMAT`` no format.
        ezpz_topo.TopoError: The rank cannot be known.

    >>> import sys
    >>> logger = get_logger("train", env={"EZPZ_LOG_FORMAT": "json"}, file=sys.stdout)
    >>> logger.info("saved", path="step-12")  # doctest: +ELLIPSIS
    {"time":"...","level":"info","logger":"train","event":"saved","rank":0,...,"path":"step-12"}
    """
    output = None
    if env is not None or file is not None:
        output = make_output(os.environ if env is None else env, file)
    # Structlog's protocol is what it has, by way of a class that is made at import.
    logger: structlog.typing.FilteringBoundLogger = Logger(Channel(output, name), _PROCESSORS, {})
    return logger


_PROCESSORS: tuple[structlog.typing.Processor, ...] = (
    structlog.contextvars.merge_contextvars,
    structlog.processors.StackInfoRenderer(),
)


class Channel:
    """What a logger speaks through: an output, and the standard library's logger of its name."""

    __slots__ = ("name", "output", "standard")

    def __init__(self, output: Output | None, name: str | None) -> None:
        self.output: Output = output or process_output()
        self.name: str | None = name
        self.standard: logging.Logger = logging.getLogger(name)

    def wants(self, level: int) -> bool:
        return self.output.level <= level or (
            self.standard.isEnabledFor(level) and has_listeners(self.standard)
        )

    def send(
        self, event: Event, exc_info: object = None, *, on_terminal: Event | None = None
    ) -> None:
        found = to_exc_info(exc_info)
        if found is not None:
            event.exception = traceback_text(found)
        self.output.send(event, on_terminal=on_terminal)
        if has_listeners(self.standard):
            tell(self.standard, event, found, self.output.terminal.stream())

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Self:
        """Return itself: models with a logger in them are copied."""
        return self

    def __reduce__(self) -> tuple[Callable[..., Channel], tuple[None, str | None]]:
        """Let a spawned process have the logger of the same name, by its own environment."""
        return Channel, (None, self.name)


_Base: Any = structlog.make_filtering_bound_logger(logging.NOTSET)


class Logger(_Base):  # type: ignore[misc]  # structlog makes the class at run time
    """Structlog's logger, whose level may change: `configure_logs` can come after it."""

    _logger: Channel
    _processors: tuple[structlog.typing.Processor, ...]
    _context: dict[str, Any]

    def _proxy_to_logger(self, method_name: str, event: object = None, /, **fields: Any) -> None:
        """Make an event and send it; also what structlog's asynchronous methods call."""
        level = _NUMBERS[method_name]
        channel = self._logger
        if not channel.wants(level):
            return
        known: dict[str, Any] = {**self._context, **fields}
        exc_info = known.pop("exc_info", None)
        for processor in self._processors:
            # Ours are two of structlog's, which return what they are given.
            known = cast("dict[str, Any]", processor(channel, method_name, known))
        stack = known.pop("stack", None) if "stack_info" in fields else None
        text = event if type(event) is str else to_text(event)
        channel.send(Event(level, method_name, channel.name, text, known, stack=stack), exc_info)

    def log(self, level: int, event: str, /, *args: Any, **fields: Any) -> None:
        # Levels between two are the lower one's: structlog knows these five.
        *_, name = ("debug", *(name for name, least in _NUMBERS.items() if least <= level))
        getattr(self, name)(event, *args, **fields)

    def is_enabled_for(self, level: int) -> bool:
        return self._logger.wants(level)

    def get_effective_level(self) -> int:
        return self._logger.output.level


def _method(name: str) -> Callable[..., None]:
    level = _NUMBERS[name]

    def method(self: Logger, event: str, /, *args: Any, **fields: Any) -> None:
        channel = self._logger
        # The first line of `wants`, without a call: most that is suppressed ends here.
        if channel.output.level > level and not channel.wants(level):
            return
        self._proxy_to_logger(name, format_message(event, args) if args else event, **fields)

    method.__name__ = name
    method.__doc__ = f"Log at level {name.upper()}."
    return method


for _name in _NUMBERS:
    setattr(Logger, _name, _method(_name))
for _alias, _name in {"warn": "warning", "fatal": "critical", "msg": "info"}.items():
    setattr(Logger, _alias, getattr(Logger, _name))


def log_dict_as_bulleted_list(
    d: Mapping[Any, Any],
    name: str | None = None,
    *,
    logger: structlog.typing.FilteringBoundLogger | None = None,
) -> None:
    r"""Log a mapping, such as a configuration, as one event with a line for each value.

    Args:
        d: The mapping; mappings in it are indented below their names.
        name: What to call it; default: the name of its class.
        logger: Which logger; default: this rank's.

    >>> import sys
    >>> log_dict_as_bulleted_list(
    ...     {"lr": 0.1, "model": {"layers": 2}},
    ...     "config",
    ...     logger=get_logger(env={"EZPZ_LOG_FORMAT": "json"}, file=sys.stdout),
    ... )  # doctest: +ELLIPSIS
    {...,"event":"[config]:\n- lr=0.1\n- model:\n  - layers=2",...}
    """
    title = name or getattr(d, "__qualname__", type(d).__name__)
    logger = get_logger() if logger is None else logger
    logger.info("\n".join([f"[{title}]:", *_lines(d, "", ())]))


def _lines(mapping: Mapping[Any, Any], indent: str, above: tuple[int, ...]) -> Iterator[str]:
    try:
        items = list(mapping.items())
    # Somebody's mapping, such as a configuration in which a value is missing.
    except Exception as error:  # noqa: BLE001
        yield f"{indent}- {describe_failure(mapping, 'items', error)}"
        return
    for key, value in items:
        name = to_text(key)
        if not issubclass(type(value), Mapping):
            lines = to_text(value).splitlines() or [""]
            yield f"{indent}- {name}={lines[0]}"
            yield from (f"{indent}  {line}" for line in lines[1:])
        elif id(value) in above or value is mapping:
            yield f"{indent}- {name}=..."
        else:
            inner = list(_lines(value, f"{indent}  ", (*above, id(mapping))))
            yield f"{indent}- {name}:" if inner else f"{indent}- {name}={to_text(value)}"
            yield from inner


_NO_ERRORS = (KeyboardInterrupt, SystemExit, GeneratorExit)
_LONGEST = 500


class Uncaught:
    """Our hooks for uncaught exceptions, which call those that were there before."""

    # They log a line with rank and host; the traceback is for the log file and the hook before,
    # which prints it. Only of Python's own a line of JSON holds it, and nothing more is printed.

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
        kind, value, _ = found
        lines = to_text(value).splitlines()
        text = f"uncaught {kind.__name__}" + (f": {lines[0][:_LONGEST]}" if lines else "")
        fields = {} if thread is None else {"thread": thread}
        event = Event(logging.CRITICAL, "critical", NAME, text, fields)
        # A copy, which gets no traceback.
        self._channel.send(event, found, on_terminal=None if whole else replace(event))

    def _main(self, *found: Any) -> None:
        is_pythons = self._before is sys.__excepthook__
        self._pass_on(cast("ExcInfo", found), None, is_pythons, partial(self._before, *found))

    def _thread(self, args: threading.ExceptHookArgs) -> None:
        value = args.exc_value if args.exc_value is not None else args.exc_type()
        self._pass_on(
            (args.exc_type, value, args.exc_traceback),
            "?" if args.thread is None else args.thread.name,
            self._before_in_threads is threading.__excepthook__,
            partial(self._before_in_threads, args),
        )

    def _pass_on(
        self, found: ExcInfo, thread: str | None, is_pythons: bool, go_on: Callable[[], object]
    ) -> None:
        if not self._is_on or issubclass(found[0], _NO_ERRORS):
            go_on()
            return
        whole = is_pythons and self._channel.output.terminal.as_json
        has_said = False
        # torch.distributed's hook collects what ours prints, and puts ``[rank1]:`` before each
        # line, which is no JSON then: so it goes to the real standard error.
        is_collected = type(sys.stderr) is io.StringIO and self._stream not in (None, sys.stderr)
        try:
            with redirect_stderr(self._stream) if is_collected else nullcontext():
                self.log(found, thread, whole=whole)
            has_said = self._channel.output.terminal.trouble is None
        finally:
            if not (whole and has_said):
                go_on()


class LogSetup:
    """What `configure_logs` has set up; a context manager whose end undoes it.

    Attributes:
        path: This rank's log file, or None.
    """

    def __init__(
        self, path: Path | None, log: Callable[[Any], None], undo: Callable[[], None]
    ) -> None:
        self.path: Path | None = path
        self._log = log
        self._undo = undo

    def undo(self) -> None:
        """Put everything back as it was. It may be called twice, and after another set-up."""
        global _active
        if _active is not None and _active[1] is self:
            _active = None
        self._undo()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, value: BaseException | None, trace: object) -> None:
        # Once undone, nobody would log it; where it is printed is for others to say.
        if isinstance(value, Exception):
            self._log((type(value), value, value.__traceback__))
        self.undo()


# What was asked for, where the same asks for nothing new, and what came of it.
_active: tuple[tuple[object, ...], LogSetup] | None = None


def configure_logs(
    *,
    directory: str | os.PathLike[str] | None = None,
    per_rank: bool = False,
    level: str | int | None = None,
    as_json: bool | None = None,
    env: Mapping[str, str] | None = None,
) -> LogSetup:
    """Bring all that this process logs to one output, and optionally into a file.

    The loggers of `get_logger`, also those made before, the standard library's
    (``logging.getLogger``) and Python's warnings go to standard error, and to ``directory``. An
    uncaught exception, of a thread too, is logged with rank and host before the process ends.
    The earlier hook then prints the traceback.

    Handlers and levels that were set before stay as they are. Other handlers get the loggers'
    events too. One of them that writes to standard error shows the standard library's records
    alone. Chatty libraries without a level of their own log from WARNING. Call it after the
    imports. It then finds libraries that keep their records from the root logger, as torch
    does. While it is in force ``logging.basicConfig()`` does nothing.

    The same call again changes nothing. Another one takes its place.

    Args:
        directory: Where rank 0 writes ``rank-00000.jsonl`` from INFO, or from ``level`` where that
            is lower: one JSON object a line, one write each. Where that is not possible (a full
            disk) one warning says so.
        per_rank: Every rank writes a file of its own there.
        level: From which level rank 0 shows events, such as "DEBUG"; default:
            ``EZPZ_LOG_LEVEL``, else INFO. The other ranks from WARNING, unless
            ``LOG_FROM_ALL_RANKS=1``. A given one is the root logger's too.
        as_json: JSON lines on standard error; default: whether ``EZPZ_LOG_FORMAT=json``.
        env: The environment to read; default ``os.environ``.

    Returns:
        A handle that undoes it: ``undo()``, or the end of its ``with``. An exception that
        leaves such a ``with`` is logged as an uncaught one.

    Raises:
        ValueError: A level or format is none.
        ezpz_topo.TopoError: The rank cannot be known.
    """
    global _active
    env = os.environ if env is None else env
    place = find_place(env)
    number = get_log_level(env, rank=0)
    if level is not None:
        number = to_level(level, "level")
    as_json = wants_json(env) if as_json is None else as_json
    path = None
    if directory and (place.rank == 0 or per_rank):
        path = Path(directory).absolute() / file_name(place.rank)
    shown = for_rank(number, env, place.rank)
    asked = place, number, shown, as_json, path, level is not None
    if _active is not None:
        if _active[0] == asked:
            return _active[1]
        _active[1].undo()
    output, undo = process_output(), ExitStack()
    undo.callback(output.become, replace(output))
    terminal = Terminal(None, level=shown, as_json=as_json, env=env)
    file = None
    if path is not None:
        file = LogFile(path, level=min(number, logging.INFO), complain=output.complain)
        undo.callback(file.close)
    output.become(Output(place, terminal, file, is_configured=True))
    if file is not None:
        file.open(time.time())
    join(output, undo, is_level_given=level is not None)
    before = warnings.showwarning
    logging.captureWarnings(capture=True)
    if warnings.showwarning is not before:  # else somebody captures them already
        undo.callback(logging.captureWarnings, capture=False)
    uncaught = Uncaught(Channel(output, NAME))
    undo.callback(uncaught.remove)
    setup = LogSetup(path, uncaught.log, undo.close)
    _active = asked, setup
    return setup
