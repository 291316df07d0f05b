import json
import logging
import subprocess
import sys
import threading
import warnings

import pytest

from ezpz_obs import _logs, configure_logs, get_logger

RANK_1 = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}


@pytest.fixture(autouse=True)
def undone():
    yield
    if _logs._active is not None:
        _logs._active.undo()


def state():
    root = logging.getLogger()
    named = [logging.getLogger(name) for name in ("urllib3", "ezpz_dist", "torch", "mine")]
    return (
        root.handlers[:], root.level, warnings.showwarning, sys.excepthook, threading.excepthook,
        [(logger.level, logger.handlers[:], logger.propagate) for logger in named],
    )  # fmt: skip


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_all_is_undone(tmp_path):
    before = state()
    with configure_logs(directory=tmp_path, level="DEBUG"):
        assert state() != before
    assert state() == before


def test_the_same_call_again_changes_nothing(tmp_path):
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
    assert [line["event"] for line in read(second.path)] == ["hello", "hello", "still"]
    assert first.path.read_text() == ""


def test_the_handlers_of_others_stay(tmp_path):
    root, handler = logging.getLogger(), logging.FileHandler(tmp_path / "mine.log")
    root.addHandler(handler)
    try:
        with configure_logs():
            assert handler in root.handlers
        assert handler in root.handlers
        assert handler.level == logging.NOTSET
    finally:
        root.removeHandler(handler)
        handler.close()


def test_loggers_that_were_made_before(tmp_path, capsys):
    logger = get_logger("early")
    with configure_logs(directory=tmp_path, level="WARNING") as logs:
        logger.info("to the file")
        logger.warning("to both")
    logger.info("to the terminal")
    assert [line["event"] for line in read(logs.path)] == ["to the file", "to both"]
    err = capsys.readouterr().err
    assert "to the file" not in err
    assert "to both" in err
    assert "to the terminal" in err


def test_a_file_on_rank_0_only(tmp_path):
    with configure_logs(directory=tmp_path / "logs", env=RANK_1) as logs:
        assert logs.path is None
    assert not (tmp_path / "logs").exists()


def test_a_file_of_every_rank(tmp_path, capsys):
    with configure_logs(directory=tmp_path / "logs", env=RANK_1, per_rank=True) as logs:
        get_logger("train").info("hello", loss=0.25)
        get_logger("train").debug("too much")
    assert capsys.readouterr().err == ""
    assert logs.path == tmp_path / "logs" / "rank-00001.jsonl"
    (line,) = read(logs.path)
    assert (line["rank"], line["event"], line["loss"]) == (1, "hello", 0.25)


@pytest.mark.parametrize(
    ("given", "in_file"),
    [
        ({}, ["info", "error"]),
        ({"level": "ERROR"}, ["info", "error"]),
        ({"level": logging.DEBUG}, ["debug", "info", "error"]),
        ({"file_level": "ERROR"}, ["error"]),
        ({"level": "ERROR", "file_level": "DEBUG"}, ["debug", "info", "error"]),
    ],
)
def test_levels_of_the_file(tmp_path, given, in_file):
    with configure_logs(directory=tmp_path, **given) as logs:
        for level in ("debug", "info", "error"):
            getattr(get_logger("x"), level)(level)
    assert [line["event"] for line in read(logs.path)] == in_file


def test_json_on_the_terminal(capsys):
    with configure_logs(as_json=True):
        get_logger("x").info("hello")
        logging.getLogger("y").warning("hello %d", 3)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["event"] for line in lines] == ["hello", "hello 3"]


def test_what_is_no_level(tmp_path):
    before = state()
    with pytest.raises(ValueError, match="level='LOUD'; expected one of DEBUG"):
        configure_logs(level="loud")
    with pytest.raises(ValueError, match="file_level='LOUD'"):
        configure_logs(file_level="loud")
    assert state() == before


def test_a_folder_that_cannot_be_made(tmp_path, capsys):
    (tmp_path / "logs").write_text("")
    with configure_logs(directory=tmp_path / "logs"):
        get_logger("x").info("hello")
        get_logger("x").info("again")
    err = capsys.readouterr().err
    assert err.count("cannot be written") == 1
    assert "hello" in err


def test_an_exception_that_leaves_the_block(tmp_path, capsys):
    with pytest.raises(ZeroDivisionError), configure_logs(directory=tmp_path) as logs:
        1 / 0  # noqa: B018
    (line,) = read(logs.path)
    assert line["level"] == "critical"
    assert line["event"] == "uncaught ZeroDivisionError: division by zero"
    assert "Traceback" in line["exception"]
    assert "Traceback" not in capsys.readouterr().err


def test_importing_configures_nothing():
    code = (
        "import sys, logging, threading, warnings, structlog\n"
        "def state(): return (logging.root.handlers[:], logging.root.level, sys.excepthook,\n"
        "    threading.excepthook, warnings.showwarning, structlog.is_configured())\n"
        "before = state()\n"
        "import ezpz_obs._logs\n"
        "assert state() == before\n"
        "assert not {'tqdm', 'torch', 'matplotlib'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
