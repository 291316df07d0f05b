"""Loggers, the standard library's, and one place where a process's logs are configured."""

import asyncio
import copy
import io
import json
import logging
import pickle
import re
import sys
import threading
import warnings
from functools import partial

import pytest
import structlog

from ezpz_obs import _logs, configure_logs, get_log_level, get_logger, log_dict_as_bulleted_list
from ezpz_obs._context import NOW

RANK_1 = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
RANK_0 = {**RANK_1, "RANK": "0", "LOCAL_RANK": "0"}


@pytest.fixture(autouse=True)
def undone():
    yield
    if _logs._active is not None:
        _logs._active.undo()


def read(logs):
    return [json.loads(line) for line in logs.path.read_text().splitlines()]


def events(logs):
    return [line["event"] for line in read(logs)]


def fail(logger, **fields):
    try:
        1 / 0  # noqa: B018
    except ZeroDivisionError:
        logger.exception("failed", **fields)


def lines(env, *calls):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        patch.setattr(sys, "stderr", io.StringIO())
        logger = get_logger("train")
        for call in calls:
            getattr(logger, call)("hello", step=3) if isinstance(call, str) else call(logger)
        return sys.stderr.getvalue().splitlines()


def json_lines(env, *calls):
    return [json.loads(line) for line in lines({"EZPZ_LOG_FORMAT": "json", **env}, *calls)]


def test_rank_0_speaks_and_the_others_from_warning():
    (line,) = lines(RANK_0, "debug", "info")
    assert all(part in line for part in ("hello", "step=3", "rank=0", "[train]"))
    warning, error = lines(RANK_1, "debug", "info", "warning", "error")
    assert "[warning" in warning
    assert "[error" in error
    assert len(lines({**RANK_1, "LOG_FROM_ALL_RANKS": "1"}, "info")) == 1
    assert len(lines({**RANK_1, "LOG_FROM_ALL_RANKS": "0"}, "info")) == 0
    (alone,) = lines({}, "info")
    assert "rank" not in alone
    assert "\x1b" not in alone, "a file is no terminal"


def test_levels_of_the_environment(monkeypatch, capsys):
    found = []
    names = {"": "INFO", "warn": "WARNING", "FATAL": "CRITICAL", "debug": "DEBUG"}
    for said, meant in names.items():
        assert get_log_level({"EZPZ_LOG_LEVEL": said}, rank=0) == getattr(logging, meant)
    assert len(lines({"EZPZ_LOG_LEVEL": "debug"}, "debug")) == 1
    assert lines({"EZPZ_LOG_LEVEL": "ERROR"}, "warning") == []
    assert get_log_level({"EZPZ_LOG_LEVEL": "ERROR"}, rank=1) == logging.ERROR
    lines(RANK_1, lambda log: found.append(log.get_effective_level()))
    assert found == [logging.WARNING]
    for name, value, expected in (
        ("EZPZ_LOG_LEVEL", "loud", "EZPZ_LOG_LEVEL='LOUD'; expected one of DEBUG"),
        ("EZPZ_LOG_FORMAT", "XML", "EZPZ_LOG_FORMAT='xml'; expected console"),
    ):
        with pytest.raises(ValueError, match=expected):
            lines({name: value})
    # It may change after the first logger.
    first = get_logger("first")
    monkeypatch.setenv("EZPZ_LOG_LEVEL", "ERROR")
    get_logger("second")
    first.warning("hello")
    assert capsys.readouterr().err == ""


def test_a_traceback_shows_no_local_variables():
    password = "hunter2"  # noqa: F841  # a local variable that must not be printed
    shown = "\n".join(lines({}, fail))
    assert "ZeroDivisionError" in shown
    assert "hunter2" not in shown
    (line,) = json_lines({}, fail)
    assert line["level"] == "error"
    assert line["exception"].startswith("Traceback (most recent call last):")
    assert line["exception"].endswith("ZeroDivisionError: division by zero")


def test_nothing_global_is_configured(python):
    done = python(
        """
        import logging, sys, threading, warnings, structlog
        def state():
            return (logging.root.handlers[:], logging.root.level, sys.excepthook,
                    threading.excepthook, warnings.showwarning, structlog.is_configured())
        before = state()
        import ezpz_obs
        ezpz_obs.configure_logs
        ezpz_obs.get_logger("x").info("hello")
        assert state() == before
        assert not {"tqdm", "torch", "matplotlib"} & set(sys.modules)
        """
    )
    assert "hello" in done.stderr
    assert done.stdout == ""


def test_a_line_names_rank_host_and_the_step_that_history_recorded_last(monkeypatch):
    line, other = json_lines(
        RANK_0, lambda log: log.info("hello", loss=0.25), lambda log: log.info("lost", rank=3)
    )
    assert (other["rank"], other["rank_"]) == (0, 3), "who logs, and of whom"
    assert list(line) == ["time", "level", "logger", "event", "rank", "host", "loss"]
    assert (line["level"], line["logger"], line["event"]) == ("info", "train", "hello")
    assert (line["rank"], line["loss"]) == (0, 0.25)
    monkeypatch.setattr(NOW, "step", 7)
    bare, given = json_lines({}, lambda log: log.info("a"), "info")
    assert (bare["step"], given["step"]) == (7, 3)
    assert "step=7" in lines({}, lambda log: log.info("hello"))[0]


def test_arguments_and_fields():
    with structlog.contextvars.bound_contextvars(epoch=2):
        put_in, mapping, bound, initial = json_lines(
            {},
            lambda log: log.info("%d%%", 3),
            lambda log: log.info("%(a)s", {"a": 1}),
            lambda log: log.bind(phase="eval").info("hello"),
            lambda _: get_logger("x", phase="test").info("hello"),
        )
    assert (put_in["event"], mapping["event"]) == ("3%", "1")
    assert initial["phase"] == "test"
    assert (bound["phase"], bound["epoch"]) == ("eval", 2)


def test_all_its_methods():
    calls = [
        lambda log: log.warn("1"),
        lambda log: log.fatal("2"),
        lambda log: log.msg("3"),
        lambda log: log.log(logging.ERROR, "4"),
        lambda log: log.log(logging.DEBUG, "5"),
        lambda log: log.info("6", stack_info=True),
        lambda log: asyncio.run(log.ainfo("7")),
        lambda log: asyncio.run(log.adebug("8")),
    ]
    found = json_lines({}, *calls)
    assert [line["event"] for line in found] == ["1", "2", "3", "4", "6", "7"]
    assert [line["level"] for line in found[:4]] == ["warning", "critical", "info", "error"]
    assert "lambda log" in found[4]["stack"]


def test_loggers_are_copied_with_what_holds_them(capsys, monkeypatch):
    logger = get_logger("model").bind(part=1)
    copy.deepcopy({"logger": logger})["logger"].info("copied")
    pickle.loads(pickle.dumps(logger)).info("sent")
    err = capsys.readouterr().err
    assert "copied" in err
    assert "sent" in err
    assert err.count("part=1") == 2
    monkeypatch.setattr("sys.stderr", io.StringIO())  # looked up at each line
    logger.info("elsewhere")
    assert "elsewhere" in sys.stderr.getvalue()


def bulleted(*words):
    (line,) = json_lines({}, lambda log: log_dict_as_bulleted_list(*words, logger=log))
    return line["event"]


def test_a_mapping_as_a_bulleted_list(capsys):
    config = {"lr": 0.1, "model": {"layers": 2, "width": {"inner": 8}}, "empty": {}, 3: "a\nb"}
    assert bulleted(config, "config").splitlines() == [
        "[config]:", "- lr=0.1", "- model:", "  - layers=2", "  - width:", "    - inner=8",
        "- empty={}", "- 3=a", "  b",
    ]  # fmt: skip
    assert bulleted({"a": ""}) == "[dict]:\n- a="
    ring = {"a": {}}
    ring["a"]["b"] = ring["c"] = ring
    assert bulleted(ring, "ring").endswith("...")
    log_dict_as_bulleted_list({"a": 1})
    assert "- a=1" in capsys.readouterr().err


class Rude:
    def __repr__(self):
        raise RuntimeError("no")


class OddError(Exception):
    def __str__(self):
        raise ValueError

    __repr__ = __str__


class Number:
    def __repr__(self):
        return 3


class Config(dict):
    """A configuration in which a value is missing."""

    def items(self):
        raise KeyError("lr")

    __repr__ = __iter__ = values = items


class Proxy:
    """Stands for another object, which is not there yet."""

    @property
    def __class__(self):
        raise RuntimeError("unbound")

    def __getattr__(self, name):
        raise RuntimeError("unbound")

    def __repr__(self):
        raise RuntimeError("unbound")


RUDE = "<Rude: __(str|repr)__ raised RuntimeError: no>"
UNSHOWABLE = {
    "object": (Rude(), RUDE),
    "in a list": ([1, Rude()], RUDE),
    "in a dict of tuples": ({"a": (Rude(),)}, RUDE),
    "a key": ({Rude(): 1}, RUDE),
    "no text": (Number(), "<Number: __(str|repr)__ raised TypeError: .* returned non-string"),
    "mapping": (Config(a=1), "<Config: (__repr__|items) raised KeyError: 'lr'>"),
    "proxy": (Proxy(), "<Proxy: __(str|repr)__ raised RuntimeError: unbound>"),
    "exception": (OddError(), "<OddError: __(str|repr)__ raised ValueError: >"),
    "integer": (10**5000, "<int: __(str|repr)__ raised ValueError: Exceeds the limit"),
}
OURS = {
    "event": lambda log, value: log.info(value),
    "field": lambda log, value: log.info("x", value=value),
    "field in a list": lambda log, value: log.info("x", value=[1, value]),
    "bound value": lambda log, value: log.bind(value=value).info("x"),
    "bulleted list": lambda log, value: log_dict_as_bulleted_list({"a": value}, logger=log),
    "bulleted list below": lambda log, v: log_dict_as_bulleted_list({"a": {"b": v}}, logger=log),
}
FORMS = pytest.mark.parametrize("form", ["console", "json"])


@pytest.mark.parametrize(("value", "said"), UNSHOWABLE.values(), ids=UNSHOWABLE)
@pytest.mark.parametrize("call", OURS.values(), ids=OURS)
def test_an_object_that_cannot_be_shown_ends_no_training(value, said, call, listen):
    theirs = listen(logging.StreamHandler(io.StringIO()), "train")
    for form in ("console", "json"):
        text = "\n".join(lines({"EZPZ_LOG_FORMAT": form}, lambda log: call(log, value)))
        assert re.search(said, text)
    assert re.search(said, theirs.stream.getvalue())


@FORMS
def test_an_exception_that_cannot_be_shown(form):
    def fail_oddly(logger):
        try:
            raise OddError
        except OddError:
            logger.exception("failed")

    for call in (fail_oddly, lambda log: log.error("failed", exc_info=OddError())):
        text = "\n".join(lines({"EZPZ_LOG_FORMAT": form}, call))
        assert "failed" in text
        assert "OddError: <exception str() failed>" in text


@pytest.fixture
def listen():
    """Put a handler on a standard logger; taken off after the test."""
    given = []

    def listen(handler, name=None, level=logging.INFO):
        logger = logging.getLogger(name)
        given.append((logger, handler, logger.level))
        logger.addHandler(handler)
        logger.setLevel(level)
        return handler

    yield listen
    for logger, handler, level in reversed(given):
        logger.removeHandler(handler)
        logger.setLevel(level)
        handler.close()


@pytest.fixture
def heard(listen):
    """What a handler on the root logger hears."""
    stream = io.StringIO()
    stream.handler = listen(logging.StreamHandler(stream))
    return stream


logger = partial(get_logger, "train")


def test_caplog_hears_us(caplog, monkeypatch):
    logger().info("the root's is WARNING")
    assert caplog.records == []
    with caplog.at_level(logging.DEBUG, logger="train"):
        monkeypatch.setenv("EZPZ_LOG_LEVEL", "ERROR")
        logger().debug("wanted by caplog alone")
    monkeypatch.delenv("EZPZ_LOG_LEVEL")
    assert caplog.messages == ["wanted by caplog alone"]
    caplog.clear()
    caplog.set_level(logging.INFO)
    logger().info("hello", loss=0.25, name="a b")
    (record,) = caplog.records
    assert record.getMessage() == "hello loss=0.25 name=a b"
    assert (record.name, record.levelname) == ("train", "INFO")


def test_a_file_handler_hears_us_once(tmp_path, listen):
    listen(logging.FileHandler(tmp_path / "a.log"))
    listen(logging.FileHandler(tmp_path / "b.log"), "train")
    with configure_logs(directory=tmp_path / "logs") as logs:
        get_logger("train.part").info("hello")
        assert events(logs) == ["hello"]
    logger().info("and now")
    for name in ("a.log", "b.log"):
        assert (tmp_path / name).read_text() == "hello\nand now\n"


def test_a_handler_of_a_higher_level_and_one_on_our_own_stream(heard, listen, capsys):
    heard.handler.setLevel(logging.ERROR)
    listen(logging.StreamHandler())
    logger().info("hello")
    logger().error("failed")
    assert heard.getvalue() == "failed\n"
    capsys.readouterr()
    get_logger("train").info("hello")
    assert capsys.readouterr().err.count("hello") == 1


def test_filters_and_loggers_that_do_not_propagate(heard):
    own = logging.getLogger("train.quiet")
    own.propagate = False
    try:
        get_logger("train.quiet").info("kept")
    finally:
        own.propagate = True
    own.addFilter(lambda record: "secret" not in record.getMessage())
    try:
        get_logger("train.quiet").info("a secret")
        get_logger("train.quiet").info("heard")
    finally:
        own.filters.clear()
    assert heard.getvalue() == "heard\n"


def test_exceptions_reach_them(heard):
    fail(logger(), value=Rude())
    assert re.match(f"failed value={RUDE}\nTraceback", heard.getvalue())
    assert heard.getvalue().count("Traceback") == 1


def test_records_of_the_standard_library(tmp_path, capsys):
    mine = logging.getLogger("mine")
    logging.addLevelName(25, "NOTICE")
    with configure_logs(directory=tmp_path, level="INFO") as logs:
        mine.warning("%d of %d", 1, 2, extra={"loss": 0.25})
        fail(mine, stack_info=True)
        mine.log(25, "hello")
    first, second, third = read(logs)
    assert third["level"] == "notice"
    assert (first["event"], first["level"], first["logger"]) == ("1 of 2", "warning", "mine")
    assert first["loss"] == 0.25
    assert "pathname" not in first
    assert second["exception"].endswith("ZeroDivisionError: division by zero")
    assert "test_records_of_the_standard_library" in second["stack"]
    err = capsys.readouterr().err
    assert "1 of 2" in err
    assert "[mine]" in err
    assert err.count("Traceback") == 1


def test_ours_speak_from_info_and_the_chatty_from_warning(tmp_path):
    chatty = logging.getLogger("urllib3")
    with configure_logs(directory=tmp_path, level="INFO") as logs:
        logging.getLogger("ezpz_dist").info("ours")
        logging.getLogger("mine").info("a script's")
        logging.getLogger("urllib3.pool").info("chatty")
        logging.getLogger("urllib3.pool").warning("trouble")
    assert events(logs) == ["ours", "a script's", "trouble"]
    chatty.setLevel(logging.DEBUG)  # which somebody has set
    try:
        with configure_logs(directory=tmp_path / "b", level="DEBUG") as logs:
            chatty.debug("wanted")
        assert chatty.level == logging.DEBUG
    finally:
        chatty.setLevel(logging.NOTSET)
    assert events(logs) == ["wanted"]


def test_warnings(tmp_path, capsys):
    with pytest.warns(UserWarning, match="before"):
        warnings.warn("before", UserWarning, stacklevel=1)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with configure_logs(directory=tmp_path) as logs:
            warnings.warn("careful", UserWarning, stacklevel=1)
    (line,) = read(logs)
    assert (line["logger"], line["level"]) == ("py.warnings", "warning")
    assert "UserWarning: careful" in line["event"]
    assert not line["event"].endswith("\n")
    assert capsys.readouterr().err.count("careful") == 2  # the text, and the line of code
    logging.captureWarnings(capture=True)  # of somebody else's they stay captured
    try:
        captured = warnings.showwarning
        with configure_logs():
            pass
        assert warnings.showwarning is captured
    finally:
        logging.captureWarnings(capture=False)


def test_handlers_of_loggers_that_keep_their_records_or_share_the_stream(
    tmp_path, capsys, monkeypatch, listen
):
    mine = logging.getLogger("mine")
    monkeypatch.setattr(mine, "propagate", False)
    handler = listen(logging.FileHandler(tmp_path / "mine.log"), "mine")
    with configure_logs(directory=tmp_path):
        mine.warning("kept")
    assert (tmp_path / "mine.log").read_text() == "kept\n"
    mine.removeHandler(handler)
    handler = listen(logging.StreamHandler(), "mine")
    with configure_logs(directory=tmp_path) as logs:
        mine.warning("hello")
        handler.setLevel(logging.ERROR)
        mine.warning("not theirs")
    assert events(logs) == ["kept", "hello", "not theirs"]
    assert [line.split()[-2:] for line in capsys.readouterr().err.splitlines()][1:] == [
        ["hello"], ["theirs", "[mine]"],
    ]  # fmt: skip


def test_a_bare_root_is_lowered_and_a_record_that_does_not_fit_its_arguments_is_no_end(python):
    done = python(
        """
        import logging
        from ezpz_obs import configure_logs
        with configure_logs():
            logging.getLogger("mine").warning("%d", "no number")
            logging.getLogger("mine").info("next")
        assert logging.root.level == logging.WARNING
        """
    )
    assert "Arguments: ('no number',)" in done.stderr
    assert "next" in done.stderr


def test_levels_and_handlers_of_others_stay(tmp_path, listen):
    handler = listen(logging.FileHandler(tmp_path / "mine.log"), level=logging.ERROR)
    with configure_logs():
        assert logging.root.level == logging.ERROR
        assert handler in logging.root.handlers
    with configure_logs(level="DEBUG"):
        assert logging.root.level == logging.DEBUG
    assert logging.root.level == logging.ERROR
    assert handler in logging.root.handlers
    assert handler.level == logging.NOTSET


def state():
    root = logging.getLogger()
    named = [logging.getLogger(name) for name in ("urllib3", "ezpz_dist", "torch", "mine")]
    return (
        root.handlers[:], root.level, warnings.showwarning, sys.excepthook, threading.excepthook,
        [(logger.level, logger.handlers[:], logger.propagate) for logger in named],
    )  # fmt: skip


def test_all_is_undone_and_the_same_call_again_changes_nothing(tmp_path):
    before = state()
    with configure_logs(directory=tmp_path, level="DEBUG"):
        assert state() != before
    assert state() == before
    first = configure_logs(directory=tmp_path)
    then = state()
    assert configure_logs(directory=tmp_path) is first
    assert state() == then


def test_another_call_takes_its_place(tmp_path):
    before = state()
    first = configure_logs(directory=tmp_path / "a")
    with configure_logs(directory=tmp_path / "b", level="ERROR") as second:
        get_logger("x").info("hello")
        logging.getLogger("y").warning("hello")
        first.undo()
        get_logger("x").info("still")
    assert state() == before
    assert events(second) == ["hello", "hello", "still"]
    assert first.path.read_text() == ""


@pytest.mark.usefixtures("rank_1")
def test_files_of_rank_0_and_of_every_rank(tmp_path, capsys):
    with configure_logs(directory=tmp_path / "logs") as logs:
        assert logs.path is None
    assert not (tmp_path / "logs").exists()
    with configure_logs(directory=tmp_path / "logs", per_rank=True) as logs:
        get_logger("train").info("hello", loss=0.25)
        get_logger("train").debug("too much")
    assert capsys.readouterr().err == ""
    assert logs.path == tmp_path / "logs" / "rank-00001.jsonl"
    (line,) = read(logs)
    assert (line["rank"], line["event"], line["loss"]) == (1, "hello", 0.25)


@pytest.mark.parametrize(
    ("given", "in_file", "shown"),
    [
        ({}, ["info", "error"], ["info", "error"]),
        ({"level": "ERROR"}, ["info", "error"], ["error"]),
        ({"level": logging.DEBUG}, ["debug", "info", "error"], ["debug", "info", "error"]),
    ],
)
def test_levels_of_file_and_terminal_of_a_logger_made_before(
    tmp_path, capsys, given, in_file, shown
):
    logger = get_logger("early")
    with configure_logs(directory=tmp_path, **given) as logs:
        for level in ("debug", "info", "error"):
            getattr(logger, level)(f"of {level}")
    logger.info("of later")
    assert events(logs) == [f"of {level}" for level in in_file]
    said = re.findall(r"of (\w+)", capsys.readouterr().err)
    assert said == [*shown, "later"]


def test_json_on_the_terminal(capsys):
    with configure_logs(as_json=True):
        get_logger("x").info("hello")
        logging.getLogger("y").warning("hello %d", 3)
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["event"], second["event"]) == ("hello", "hello 3")


def test_what_is_no_level():
    before = state()
    with pytest.raises(ValueError, match="level='LOUD'; expected one of DEBUG"):
        configure_logs(level="loud")
    assert state() == before


def test_an_exception_that_leaves_the_block(tmp_path, capsys):
    with pytest.raises(ZeroDivisionError), configure_logs(directory=tmp_path) as logs:
        1 / 0  # noqa: B018
    (line,) = read(logs)
    assert line["level"] == "critical"
    assert line["event"] == "uncaught ZeroDivisionError: division by zero"
    assert "Traceback" in line["exception"]
    assert "Traceback" not in capsys.readouterr().err


def test_a_processor_of_ones_own(tmp_path, capsys):
    def add_job(_logger, _method_name, event_dict):
        if event_dict["event"] == "dropped":
            raise structlog.DropEvent
        return {**event_dict, "job": 7, "api_key": "hunter2"}

    with configure_logs(directory=tmp_path, processors=[add_job]) as logs:
        get_logger("x").info("hello")
        get_logger("x").info("dropped")
        logging.getLogger("y").warning("theirs")
    assert [line["job"] for line in read(logs)] == [7, 7]
    err = capsys.readouterr().err
    assert err.count("job=7") == 2
    assert "hunter2" not in err
    assert "dropped" not in err
