"""Exceptions that nobody catches, and what is left of the logs of real ranks."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap

import pytest

HOST = socket.gethostname().partition(".")[0]
RANK_1 = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
IMPORTS = "import os, signal, sys, threading\nfrom ezpz_obs import configure_logs, get_logger\n"
FAIL = """
configure_logs(directory="logs", per_rank=True)
def deep():
    raise ValueError("boom\\nand more")
deep()
"""
IN_A_THREAD = """
configure_logs(directory="logs")
thread = threading.Thread(target=lambda: 1 / 0, name="feeder")
thread.start()
thread.join()
"""


@pytest.fixture
def run(python, tmp_path):
    """Run a program; return its errors and the lines of its log."""

    def run(code, status=1, **env):
        done = python(IMPORTS + textwrap.dedent(code), status=status, env=env)
        files = sorted(tmp_path.glob("logs/*.jsonl"))
        lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        return done.stderr, lines

    return run


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


@pytest.mark.parametrize("form", ["console", "json"])
def test_an_exception_in_a_thread(run, form):
    err, (line,) = run(IN_A_THREAD, status=0, EZPZ_LOG_FORMAT=form)
    assert line["event"] == "uncaught ZeroDivisionError: division by zero"
    assert line["thread"] == "feeder"
    assert err.count("Traceback") == 1
    if form == "json":
        (line,) = [json.loads(shown) for shown in err.splitlines()]
        assert line["thread"] == "feeder"
        assert "Traceback" in line["exception"]
    else:
        assert "Exception in thread feeder" in err


def test_an_undone_hook_that_another_library_kept_does_not_log(run):
    err, lines = run(
        """
        configure_logs()
        ours = sys.excepthook
        ours_in_threads = threading.excepthook
        sys.excepthook = lambda *arguments: ours(*arguments)
        threading.excepthook = lambda arguments: ours_in_threads(arguments)
        configure_logs(directory="logs")
        thread = threading.Thread(target=lambda: [][1])
        thread.start()
        thread.join()
        1 / 0
        """
    )
    kinds = [line["event"].split()[1] for line in lines]
    assert kinds == ["IndexError:", "ZeroDivisionError:"]
    assert err.count("uncaught IndexError") == 1
    assert err.count("uncaught ZeroDivisionError") == 1
    assert err.count("Traceback") == 2


@pytest.mark.parametrize(
    ("code", "status", "tracebacks"), [("raise KeyboardInterrupt", -2, 1), ("sys.exit(3)", 3, 0)]
)
def test_what_is_no_error(run, code, status, tracebacks):
    err, lines = run(f"configure_logs(directory='logs'); {code}", status=status)
    assert lines == []
    assert err.count("Traceback") == tracebacks
    assert tracebacks or err == ""


def test_a_closed_standard_error(run):
    # Python's own status: 120 where it keeps the traceback for which there is no room.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    words = [sys.executable, "-c", "import os; os.close(2); 1 / 0"]
    plain = subprocess.run(words, env=env, check=False)
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
    assert line["event"] == "uncaught Odd: <Odd: __str__ raised RuntimeError: no>"
    assert err.count("Traceback") == 1


@pytest.fixture
def run_ranks(ranks, tmp_path):
    """Run a program on so many ranks; return their exit statuses, errors and logs."""

    def run(size, code, **env):
        code = IMPORTS + textwrap.dedent(code)
        ended = ranks(code, size, set_up=False, cwd=tmp_path, env=env)
        logs = []
        for rank in range(size):
            lines = (tmp_path / "logs" / f"rank-{rank:05}.jsonl").read_bytes()
            assert lines == b"" or lines.endswith(b"\n")
            logs.append([json.loads(line) for line in lines.splitlines()])
        return [one.status for one in ended], [one.err for one in ended], logs

    return run


def first_error(logs):
    failed = [line for log in logs for line in log if line["level"] in ("error", "critical")]
    return min(failed, key=lambda line: line["time"])


def test_one_of_four_is_killed(run_ranks):
    statuses, errors, logs = run_ranks(
        4,
        """
        configure_logs(directory="logs", per_rank=True)
        logger = get_logger("train")
        for step in range(200):
            logger.info("step", number=step)
            if RANK == 2 and step == 100:
                os.kill(os.getpid(), signal.SIGKILL)
        if RANK == 3:
            raise ValueError("no rank 2")
        """,
    )
    assert statuses == [0, 0, -signal.SIGKILL, 1]
    for rank, log in enumerate(logs):
        steps = [line["number"] for line in log if line["event"] == "step"]
        assert steps == list(range(101 if rank == 2 else 200))
        assert {(line["rank"], line["host"]) for line in log} == {(rank, HOST)}
    first = first_error(logs)
    assert (first["rank"], first["event"]) == (3, "uncaught ValueError: no rank 2")
    assert "Traceback" in first["exception"]
    # The terminal has rank 0's steps, and the error of whoever had one.
    assert errors[0].count("step") == 200
    assert errors[1] == errors[2] == ""
    assert "rank=3" in errors[3]


LOGS = 'configure_logs(directory="logs", per_rank=True)\n'
GROUP = "import ezpz_dist; rank = ezpz_dist.setup_torch(timeout=30)\n"


@pytest.mark.parametrize("form", ["console", "json"])
@pytest.mark.parametrize("start", [LOGS + GROUP, GROUP + LOGS], ids=["logs first", "group first"])
def test_one_of_two_raises_in_a_group(run_ranks, start, form):
    pytest.importorskip("ezpz_dist", reason="ezpz_dist is not installed")
    code = f"""{start}
ezpz_dist.barrier()
if rank == 1:
    raise ValueError("boom")
ezpz_dist.barrier()
"""
    statuses, errors, logs = run_ranks(2, code, EZPZ_LOG_FORMAT=form)
    assert statuses == [1, 1]
    first = first_error(logs)
    assert (first["rank"], first["host"]) == (1, HOST)
    assert first["event"] == "uncaught ValueError: boom"
    assert sum(line["event"] == first["event"] for line in logs[1]) == 1
    assert "Traceback" in first["exception"]
    assert errors[1].count("uncaught ValueError: boom") == 1
    assert errors[1].count("Traceback") == 1
    # What ezpz_dist's own hook does is done: the other rank was told.
    assert "rank 1 on" in errors[0]
    assert "ValueError: boom" in errors[0]
