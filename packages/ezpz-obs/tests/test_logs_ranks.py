"""Logs of real ranks: what is left of them when one fails or is killed."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap

import pytest

HOST = socket.gethostname().partition(".")[0]


@pytest.fixture
def run(tmp_path):
    """Run a program on so many ranks; return their exit statuses, errors and logs."""
    started = []

    def run(size, code, **env):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        program = tmp_path / "program.py"
        program.write_text(textwrap.dedent(code))
        for rank in range(size):
            place = {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            with open(tmp_path / f"err.{rank}", "w") as err:
                process = subprocess.Popen(
                    [sys.executable, str(program)], cwd=tmp_path, stderr=err,
                    env={**os.environ, **place, **env},
                )  # fmt: skip
            started.append(process)
        statuses = [process.wait(60) for process in started]
        errors = [(tmp_path / f"err.{rank}").read_text() for rank in range(size)]
        logs = []
        for rank in range(size):
            lines = (tmp_path / "logs" / f"rank-{rank:05}.jsonl").read_bytes()
            assert lines == b"" or lines.endswith(b"\n")
            logs.append([json.loads(line) for line in lines.splitlines()])
        return statuses, errors, logs

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()


def first_error(logs):
    failed = [line for log in logs for line in log if line["level"] in ("error", "critical")]
    return min(failed, key=lambda line: line["time"])


def test_one_of_four_is_killed(run):
    statuses, errors, logs = run(
        4,
        """
        import os, signal
        from ezpz_obs import configure_logs, get_logger
        configure_logs(directory="logs", per_rank=True)
        rank, logger = int(os.environ["RANK"]), get_logger("train")
        for step in range(200):
            logger.info("step", number=step)
            if rank == 2 and step == 100:
                os.kill(os.getpid(), signal.SIGKILL)
        if rank == 3:
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


LOGS_FIRST = """
configure_logs(directory="logs", per_rank=True)
rank = ezpz_dist.setup_torch(timeout=30)
"""
GROUP_FIRST = """
rank = ezpz_dist.setup_torch(timeout=30)
configure_logs(directory="logs", per_rank=True)
"""
IMPORTS = """
import os, signal, torch, ezpz_dist
from ezpz_obs import configure_logs, get_logger
"""


@pytest.mark.parametrize("form", ["console", "json"])
@pytest.mark.parametrize("start", [LOGS_FIRST, GROUP_FIRST], ids=["logs first", "group first"])
def test_one_of_two_raises_in_a_group(run, start, form):
    pytest.importorskip("ezpz_dist", reason="ezpz_dist is not installed")
    code = f"""{IMPORTS}{start}
ezpz_dist.barrier()
if rank == 1:
    raise ValueError("boom")
ezpz_dist.barrier()
"""
    statuses, errors, logs = run(2, code, EZPZ_LOG_FORMAT=form)
    assert statuses == [1, 1]
    first = first_error(logs)
    assert (first["rank"], first["host"]) == (1, HOST)
    assert first["event"] == "uncaught ValueError: boom"
    assert sum(line["event"] == first["event"] for line in logs[1]) == 1
    assert "Traceback" in first["exception"]
    assert errors[1].count("uncaught ValueError: boom") == 1
    assert errors[1].count("Traceback") == 1
    if form == "json" and start == LOGS_FIRST:
        (line,) = [json.loads(line) for line in errors[1].splitlines() if "uncaught" in line]
        assert "Traceback" in line["exception"]
    # What ezpz_dist's own hook does is done: the other rank was told.
    assert "rank 1 on" in errors[0]
    assert "ValueError: boom" in errors[0]


def test_one_of_four_is_killed_in_a_group(run):
    pytest.importorskip("ezpz_dist", reason="ezpz_dist is not installed")
    code = f"""{IMPORTS}{LOGS_FIRST}
logger = get_logger("train")
for step in range(100):
    ezpz_dist.barrier()
    logger.info("step", number=step)
    if rank == 2 and step == 10:
        os.kill(os.getpid(), signal.SIGKILL)
"""
    statuses, errors, logs = run(4, code)
    assert statuses == [1, 1, -signal.SIGKILL, 1]
    for log in logs:
        steps = [line["number"] for line in log if line["event"] == "step"]
        assert steps == list(range(11))
    assert "rank 2 on" in first_error(logs)["event"]
    assert any("rank 2 on" in error for error in errors)
