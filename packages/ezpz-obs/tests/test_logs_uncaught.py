import json
import subprocess
import sys
import textwrap

import pytest

RANK_1 = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}


@pytest.fixture
def run(tmp_path):
    def run(code, status=1, **env):
        prelude = f"""
import os, sys
os.environ.update({env!r})
from ezpz_obs import configure_logs, get_logger
"""
        done = subprocess.run(
            [sys.executable, "-c", prelude + textwrap.dedent(code)],
            capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == status, done.stderr
        files = sorted(tmp_path.glob("logs/*.jsonl"))
        lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        return done.stderr, lines

    return run


FAIL = """
configure_logs(directory="logs", per_rank=True)
def deep():
    raise ValueError("boom\\nand more")
deep()
"""


def test_it_is_logged_with_its_rank(run):
    err, (line,) = run(FAIL, **RANK_1)
    assert line["event"] == "uncaught ValueError: boom"
    assert (line["rank"], line["level"]) == (1, "critical")
    assert "in deep" in line["exception"]
    assert line["exception"].endswith("ValueError: boom\nand more")
    (said,) = [shown for shown in err.splitlines() if "uncaught" in shown]
    assert "rank=1" in said
    assert "host=" in said
    assert err.count("Traceback") == 1


def test_as_json_the_line_has_the_traceback(run):
    err, _ = run(FAIL, **RANK_1, EZPZ_LOG_FORMAT="json")
    (line,) = [json.loads(shown) for shown in err.splitlines()]
    assert line["event"] == "uncaught ValueError: boom"
    assert "in deep" in line["exception"]


@pytest.mark.parametrize("form", ["console", "json"])
def test_the_hook_before_is_called(run, form):
    err, (line,) = run(
        """
        def hook(kind, value, trace):
            print("theirs", kind.__name__, file=sys.stderr)
            sys.__excepthook__(kind, value, trace)
        sys.excepthook = hook
        configure_logs(directory="logs")
        1 / 0
        """,
        EZPZ_LOG_FORMAT=form,
    )
    assert err.count("theirs ZeroDivisionError") == 1
    assert err.count("Traceback") == 1
    assert err.count("uncaught ZeroDivisionError") == 1
    assert "Traceback" in line["exception"]


def test_an_exception_in_a_thread(run):
    err, (line,) = run(
        """
        import threading
        configure_logs(directory="logs")
        thread = threading.Thread(target=lambda: 1 / 0, name="feeder")
        thread.start()
        thread.join()
        """,
        status=0,
    )
    assert line["event"] == "uncaught ZeroDivisionError: division by zero"
    assert line["thread"] == "feeder"
    assert err.count("Traceback") == 1
    assert "Exception in thread feeder" in err


def test_an_exception_in_a_thread_as_json(run):
    err, _ = run(
        """
        import threading
        configure_logs()
        thread = threading.Thread(target=lambda: 1 / 0, name="feeder")
        thread.start()
        thread.join()
        """,
        status=0,
        EZPZ_LOG_FORMAT="json",
    )
    (line,) = [json.loads(shown) for shown in err.splitlines()]
    assert line["thread"] == "feeder"
    assert "Traceback" in line["exception"]


def test_an_interrupt_is_no_error(run):
    err, lines = run(
        """
        configure_logs(directory="logs")
        raise KeyboardInterrupt
        """,
        status=-2,
    )
    assert lines == []
    assert err.count("Traceback") == 1


def test_sys_exit_is_no_error(run):
    err, lines = run("configure_logs(directory='logs'); sys.exit(3)", status=3)
    assert (err, lines) == ("", [])


def test_undone_under_another_hook(run):
    err, lines = run(
        """
        logs = configure_logs(directory="logs")
        ours = sys.excepthook
        sys.excepthook = lambda *error: ours(*error)
        logs.undo()
        1 / 0
        """
    )
    assert lines == []
    assert err.count("Traceback") == 1


def test_a_closed_standard_error(run, tmp_path):
    # Python's own status: 120 where it keeps the traceback for which there is no room.
    plain = subprocess.run([sys.executable, "-c", "import os; os.close(2); 1 / 0"], check=False)
    err, (line,) = run("os.close(2)\n" + FAIL, plain.returncode)
    assert err == ""
    assert line["event"] == "uncaught ValueError: boom"


def test_an_exception_that_cannot_say_what_it_is(run):
    err, (line,) = run(
        """
        configure_logs(directory="logs")
        class Odd(Exception):
            def __str__(self):
                raise RuntimeError("no")
        raise Odd
        """
    )
    assert line["event"] == "uncaught Odd"
    assert err.count("Traceback") == 1
