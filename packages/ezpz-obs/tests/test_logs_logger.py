import asyncio
import copy
import io
import json
import logging
import pickle
import subprocess
import sys

import pytest
import structlog

from ezpz_obs import get_log_level, get_logger
from ezpz_obs._context import NOW

RANK_1 = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
RANK_0 = {**RANK_1, "RANK": "0", "LOCAL_RANK": "0"}


def lines(env, *calls):
    file = io.StringIO()
    logger = get_logger("train", env=env, file=file)
    for level in calls:
        getattr(logger, level)("hello", step=3)
    return file.getvalue().splitlines()


def test_rank_0_speaks():
    (line,) = lines(RANK_0, "debug", "info")
    assert "hello" in line
    assert "step=3" in line
    assert "rank=0" in line
    assert "[train]" in line


def test_other_ranks_from_warning():
    warning, error = lines(RANK_1, "debug", "info", "warning", "error")
    assert "[warning" in warning
    assert "[error" in error


def test_log_from_all_ranks():
    assert len(lines({**RANK_1, "LOG_FROM_ALL_RANKS": "1"}, "info")) == 1
    assert len(lines({**RANK_1, "LOG_FROM_ALL_RANKS": "0"}, "info")) == 0


def test_one_process_shows_no_rank():
    assert "rank" not in lines({}, "info")[0]


def test_level_by_name():
    assert len(lines({"EZPZ_LOG_LEVEL": "debug"}, "debug")) == 1
    assert lines({"EZPZ_LOG_LEVEL": "ERROR"}, "warning") == []
    assert get_log_level({"EZPZ_LOG_LEVEL": "ERROR"}, rank=1) == logging.ERROR


@pytest.mark.parametrize(
    ("said", "meant"), [("", "INFO"), ("warn", "WARNING"), ("FATAL", "CRITICAL")]
)
def test_what_people_call_levels(said, meant):
    assert get_log_level({"EZPZ_LOG_LEVEL": said}, rank=0) == getattr(logging, meant)


def test_without_a_standard_error():
    code = "import ezpz_obs; ezpz_obs.get_logger('x').warning('hello')"
    words = ["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, code]
    assert subprocess.run(words, check=False, timeout=60).returncode == 0


def test_unknown_level():
    with pytest.raises(ValueError, match="EZPZ_LOG_LEVEL='LOUD'; expected one of DEBUG"):
        get_logger(env={"EZPZ_LOG_LEVEL": "loud"})


def test_no_colour_when_not_a_terminal():
    assert "\x1b" not in lines({}, "info")[0]


def test_a_traceback_shows_no_local_variables():
    file = io.StringIO()
    password = "hunter2"  # noqa: F841  # a local variable that must not be printed
    try:
        1 / 0  # noqa: B018
    except ZeroDivisionError:
        get_logger(env={}, file=file).exception("failed")
    assert "ZeroDivisionError" in file.getvalue()
    assert "hunter2" not in file.getvalue().replace('password = "hunter2"', "")


def test_nothing_global_is_configured():
    code = (
        "import logging, structlog, ezpz_obs\n"
        "before = logging.root.handlers[:], structlog.is_configured()\n"
        "ezpz_obs.get_logger('x').info('hello')\n"
        "assert (logging.root.handlers[:], structlog.is_configured()) == before\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "hello" in done.stderr
    assert done.stdout == ""


def json_lines(env, *calls):
    file = io.StringIO()
    logger = get_logger("train", env={"EZPZ_LOG_FORMAT": "json", **env}, file=file)
    for call in calls:
        call(logger)
    return [json.loads(line) for line in file.getvalue().splitlines()]


def test_json_lines_name_rank_and_host():
    (line,) = json_lines(RANK_0, lambda log: log.info("hello", loss=0.25))
    assert list(line) == ["time", "level", "logger", "event", "rank", "host", "loss"]
    assert (line["level"], line["logger"], line["event"]) == ("info", "train", "hello")
    assert (line["rank"], line["loss"]) == (0, 0.25)


def test_unknown_format():
    with pytest.raises(ValueError, match="EZPZ_LOG_FORMAT='xml'; expected console"):
        get_logger(env={"EZPZ_LOG_FORMAT": "XML"})


def test_the_step_that_history_recorded_last(monkeypatch):
    monkeypatch.setattr(NOW, "step", 7)
    bare, given = json_lines({}, lambda log: log.info("a"), lambda log: log.info("b", step=3))
    assert (bare["step"], given["step"]) == (7, 3)
    file = io.StringIO()
    get_logger(env={}, file=file).info("hello")
    assert "step=7" in file.getvalue()


def test_a_mistake_in_the_arguments_ends_nothing():
    (line,) = json_lines({}, lambda log: log.info("%d of %d", 3))  # noqa: PLE1206
    assert line["event"] == "%d of %d (3,)"


def test_arguments_are_put_in():
    first, second = json_lines(
        {}, lambda log: log.info("%d%%", 3), lambda log: log.info("%(a)s", {"a": 1})
    )
    assert (first["event"], second["event"]) == ("3%", "1")


def test_fields_with_the_names_of_arguments():
    (line,) = json_lines({}, lambda log: log.info("x", event="y", method_name="z", level=3))
    assert (line["event"], line["event_"], line["method_name"]) == ("x", "y", "z")
    assert (line["level"], line["level_"]) == ("info", 3)


def test_bound_and_contextual_fields():
    with structlog.contextvars.bound_contextvars(epoch=2):
        (line,) = json_lines({}, lambda log: log.bind(phase="eval").info("hello"))
    assert (line["phase"], line["epoch"]) == ("eval", 2)


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


def test_it_tells_its_level():
    logger = get_logger(env={**RANK_1}, file=io.StringIO())
    assert logger.get_effective_level() == logging.WARNING
    assert logger.is_enabled_for(logging.WARNING)


def test_a_traceback_in_json():
    def fail(log):
        try:
            1 / 0  # noqa: B018
        except ZeroDivisionError:
            log.exception("failed")

    (line,) = json_lines({}, fail)
    assert line["level"] == "error"
    assert line["exception"].startswith("Traceback (most recent call last):")
    assert line["exception"].endswith("ZeroDivisionError: division by zero")


def test_loggers_are_copied_with_what_holds_them(capsys):
    logger = get_logger("model").bind(part=1)
    copy.deepcopy({"logger": logger})["logger"].info("copied")
    pickle.loads(pickle.dumps(logger)).info("sent")
    err = capsys.readouterr().err
    assert "copied" in err
    assert "sent" in err
    assert err.count("part=1") == 2


def test_standard_error_is_looked_up_at_each_line(capsys):
    logger = get_logger("x")
    logger.info("first")
    assert "first" in capsys.readouterr().err
    sys.stderr, before = io.StringIO(), sys.stderr
    try:
        logger.info("second")
        assert "second" in sys.stderr.getvalue()
    finally:
        sys.stderr = before


def test_the_environment_may_change_after_the_first_logger(monkeypatch, capsys):
    first = get_logger("first")
    monkeypatch.setenv("EZPZ_LOG_LEVEL", "ERROR")
    get_logger("second")
    first.warning("hello")
    assert capsys.readouterr().err == ""
