import json
import logging
import subprocess
import sys
import warnings

import pytest

from ezpz_obs import configure_logs, get_logger


def read(logs):
    return [json.loads(line) for line in logs.path.read_text().splitlines()]


@pytest.fixture
def mine():
    """A standard logger with what a test gives it; taken back after it."""
    logger = logging.getLogger("mine")
    yield logger
    for handler in logger.handlers[:]:
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


def test_records_of_the_standard_library(tmp_path, capsys):
    with configure_logs(directory=tmp_path) as logs:
        logging.getLogger("mine").warning("%d of %d", 1, 2, extra={"loss": 0.25})
        try:
            1 / 0  # noqa: B018
        except ZeroDivisionError:
            logging.getLogger("mine").exception("failed", stack_info=True)
    first, second = read(logs)
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
    with configure_logs(directory=tmp_path, level="INFO") as logs:
        logging.getLogger("ezpz_dist").info("ours")
        logging.getLogger("mine").info("a script's")
        logging.getLogger("urllib3.pool").info("chatty")
        logging.getLogger("urllib3.pool").warning("trouble")
    assert [line["event"] for line in read(logs)] == ["ours", "a script's", "trouble"]


def test_a_level_that_somebody_has_set(tmp_path):
    chatty = logging.getLogger("urllib3")
    chatty.setLevel(logging.DEBUG)
    try:
        with configure_logs(directory=tmp_path, level="DEBUG") as logs:
            chatty.debug("wanted")
        assert chatty.level == logging.DEBUG
    finally:
        chatty.setLevel(logging.NOTSET)
    assert [line["event"] for line in read(logs)] == ["wanted"]


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


def test_warnings_that_somebody_captures_stay_captured():
    logging.captureWarnings(capture=True)
    try:
        captured = warnings.showwarning
        with configure_logs():
            pass
        assert warnings.showwarning is captured
    finally:
        logging.captureWarnings(capture=False)


def test_loggers_that_keep_their_records(tmp_path, mine):
    mine.propagate = False
    mine.addHandler(logging.FileHandler(tmp_path / "mine.log"))
    with configure_logs(directory=tmp_path) as logs:
        mine.warning("hello")
    assert len(mine.handlers) == 1
    assert [line["event"] for line in read(logs)] == ["hello"]
    assert (tmp_path / "mine.log").read_text() == "hello\n"


def test_a_handler_on_the_same_stream_shows_them_alone(tmp_path, mine, capsys):
    mine.addHandler(logging.StreamHandler())
    with configure_logs(directory=tmp_path) as logs:
        mine.warning("hello")
        mine.handlers[0].setLevel(logging.ERROR)
        mine.warning("not theirs")
    assert [line["event"] for line in read(logs)] == ["hello", "not theirs"]
    err = capsys.readouterr().err
    assert err.count("hello") == 1
    assert err.count("not theirs") == 1


def test_a_record_that_does_not_fit_its_arguments():
    code = (
        "import logging\n"
        "from ezpz_obs import configure_logs\n"
        "configure_logs()\n"
        "logging.getLogger('mine').warning('%d', 'no number')\n"
        "logging.getLogger('mine').warning('next')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert "Logging error" in done.stderr
    assert "next" in done.stderr


def test_levels_of_their_own(tmp_path):
    logging.addLevelName(25, "NOTICE")
    with configure_logs(directory=tmp_path, level="INFO") as logs:
        logging.getLogger("mine").log(25, "hello")
    assert [line["level"] for line in read(logs)] == ["notice"]


def test_what_torch_logs(tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    code = (
        "import logging, sys, torch\n"
        "from ezpz_obs import configure_logs\n"
        "configure_logs(directory=sys.argv[1])\n"
        "logging.getLogger('torch.distributed').warning('from torch')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert done.stderr.count("from torch") == 1
    (line,) = (tmp_path / "rank-00000.jsonl").read_text().splitlines()
    assert json.loads(line)["logger"] == "torch.distributed"


def test_a_root_level_that_somebody_has_set():
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.ERROR)
    try:
        with configure_logs():
            assert root.level == logging.ERROR
        with configure_logs(level="DEBUG"):
            assert root.level == logging.DEBUG
        assert root.level == logging.ERROR
    finally:
        root.setLevel(before)


def test_a_bare_root_is_lowered():
    code = (
        "import logging\n"
        "from ezpz_obs import configure_logs\n"
        "with configure_logs():\n"
        "    logging.getLogger('mine').info('hello')\n"
        "assert logging.root.level == logging.WARNING\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert "hello" in done.stderr
    assert get_logger("x") is not None
