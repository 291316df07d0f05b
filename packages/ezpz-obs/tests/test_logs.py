import io
import logging
import subprocess
import sys

import pytest

from ezpz_obs import get_log_level, get_logger

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
