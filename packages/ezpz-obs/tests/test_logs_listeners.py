import io
import json
import logging
import logging.handlers
import queue

import pytest

from ezpz_obs import configure_logs, get_logger
from ezpz_obs._logs import MARK


class Rude:
    def __repr__(self):
        raise RuntimeError("no")


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


def logger(name="train", **env):
    return get_logger(name, env=env, file=io.StringIO())


def test_caplog_hears_us(caplog):
    caplog.set_level(logging.INFO)
    logger().info("hello", loss=0.25, name="a b")
    (record,) = caplog.records
    assert record.getMessage() == "hello loss=0.25 name=a b"
    assert (record.name, record.levelname) == ("train", "INFO")
    assert (record.filename, record.funcName) == ("test_logs_listeners.py", "test_caplog_hears_us")
    assert getattr(record, MARK).fields == {"loss": 0.25, "name": "a b"}


def test_its_level_is_the_standard_loggers(caplog):
    logger().info("the root's is WARNING")
    assert caplog.records == []
    with caplog.at_level(logging.DEBUG, logger="train"):
        logger(EZPZ_LOG_LEVEL="ERROR").debug("wanted by caplog alone")
    assert caplog.messages == ["wanted by caplog alone"]


def test_a_file_handler_hears_us_once(tmp_path, listen):
    listen(logging.FileHandler(tmp_path / "a.log"))
    listen(logging.FileHandler(tmp_path / "b.log"), "train")
    with configure_logs(directory=tmp_path / "logs") as logs:
        get_logger("train.part").info("hello")
        assert len(logs.path.read_text().splitlines()) == 1
    logger().info("and now")
    for name in ("a.log", "b.log"):
        assert (tmp_path / name).read_text() == "hello\nand now\n"


def test_a_handler_of_a_higher_level(listen):
    stream = io.StringIO()
    handler = listen(logging.StreamHandler(stream))
    handler.setLevel(logging.ERROR)
    logger().info("hello")
    logger().error("failed")
    assert stream.getvalue() == "failed\n"


def test_a_handler_on_our_own_stream_hears_nothing(listen, capsys):
    listen(logging.StreamHandler())
    get_logger("train").info("hello")
    assert capsys.readouterr().err.count("hello") == 1


def test_filters_and_loggers_that_do_not_propagate(listen):
    stream = io.StringIO()
    listen(logging.StreamHandler(stream))
    own = logging.getLogger("train.quiet")
    own.propagate = False
    try:
        logger("train.quiet").info("kept")
    finally:
        own.propagate = True
    own.addFilter(lambda record: "secret" not in record.getMessage())
    try:
        logger("train.quiet").info("a secret")
        logger("train.quiet").info("heard")
    finally:
        own.filters.clear()
    assert stream.getvalue() == "heard\n"


def test_exceptions_reach_them(listen):
    stream = io.StringIO()
    listen(logging.StreamHandler(stream))
    try:
        1 / 0  # noqa: B018
    except ZeroDivisionError:
        logger().exception("failed", value=Rude())
    assert stream.getvalue().startswith("failed value=<Rude>\nTraceback")
    assert stream.getvalue().count("Traceback") == 1


def test_a_queue_that_brings_records_back(tmp_path, listen):
    waiting = queue.Queue()
    listen(logging.handlers.QueueHandler(waiting), "train")
    with configure_logs(directory=tmp_path) as logs:
        get_logger("train").info("hello")
        logging.getLogger("elsewhere").handle(waiting.get_nowait())
    (line,) = logs.path.read_text().splitlines()
    assert json.loads(line)["event"] == "hello"
