"""The processes that sinks of libraries have: servers that hang, kills, and the end."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from waiting import until

from ezpz_obs import History

TRAIN = """
import logging, os, sys, time
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
from ezpz_obs import History
history = History("run", sinks=sys.argv[1].split(","), summary=False)
for step in range(int(sys.argv[2])):
    history.record({"loss": step})
print("trained", flush=True)
exec(sys.argv[3])
print("ended", time.time(), flush=True)
"""
SENT = """
while any(feeder._sent < feeder._put for feeder in history._feeders):
    time.sleep(0.02)
print("sent", flush=True)
"""
PROMISED, BUSY = 10.0, 10.0
"""Seconds that sinks take at most at the end of training, and what a busy machine adds."""
CLOSE = "end = time.time(); history.close(); print('close', time.time() - end)"


def needs(*modules):
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {missing}")


@pytest.fixture
def train(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    started = []

    def start(sinks, *, steps=200, then=CLOSE, **env):
        process = subprocess.Popen(
            [sys.executable, "-c", TRAIN, sinks, str(steps), then],
            cwd=tmp_path, env={**os.environ, "HOME": str(home), "EZPZ_SINK_SECONDS": "500", **env},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def children_of(pid):
    listed = subprocess.run(
        ["ps", "-A", "-ww", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    )
    rows = (line.split(None, 2) for line in listed.stdout.splitlines())
    return {int(row[0]): row[2] for row in rows if int(row[1]) == pid}


def helper_of(pid):
    """Wait for the process that a sink has made."""
    return until(
        lambda: next((c for c, words in children_of(pid).items() if "_sinks.helper" in words), None)
    )


@needs("wandb", "mlflow", "trackio")
@pytest.mark.parametrize("then", [CLOSE, "raise SystemExit(3)"], ids=["close", "exit"])
def test_servers_that_never_answer(train, server, tmp_path, then):
    process = train(
        "wandb,mlflow,trackio,csv", then=then, WANDB_BASE_URL=server.url,
        WANDB_API_KEY="a" * 40, MLFLOW_TRACKING_URI=server.url,
        TRACKIO_SERVER_URL=f"{server.url}?write_token=t", EZPZ_SINK_SECONDS="10",
    )  # fmt: skip
    assert process.stdout.readline() == "trained\n"
    trained = time.monotonic()
    _, errors = process.communicate()
    assert time.monotonic() - trained < PROMISED + BUSY
    assert process.returncode == (3 if "3" in then else 0), errors
    assert len(History.read(tmp_path / "run")) == 200
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == 201
    for name in ("mlflow", "trackio"):
        said = [line for line in errors.splitlines() if f"sink {name}" in line]
        assert len(said) == 2, errors
        assert "training goes on without it" in said[0]
        assert "200 records were not sent; all are in the run's file: ezpz-obs replay" in said[1]
    said = [line for line in errors.splitlines() if "sink wandb" in line and "WARN" in line]
    late = [line for line in said if "has not finished in the time there is" in line]
    if late:  # importing W&B takes seconds on a busy machine: its deadline came first
        assert len(late) == 1
        assert "ezpz-obs replay" in said[-1], "what may be missing can be sent"
        said = [line for line in said if line not in (late[0], said[-1])]
    else:
        assert list((tmp_path / "run" / "wandb").glob("offline-run-*"))
        assert len(said) == 1
    assert all("does not answer within 4 s; offline" in line for line in said)


@needs("wandb", "mlflow", "trackio", "tensorboard")
def test_a_home_that_cannot_be_written(train, tmp_path):
    (tmp_path / "file").touch()
    home = str(tmp_path / "file" / "home")
    process = train("wandb,mlflow,trackio,tensorboard", then=SENT + CLOSE, HOME=home)
    _, errors = process.communicate()
    assert "WARNING" not in errors
    run = tmp_path / "run"
    for kept in ("wandb/offline-run-*", "mlruns/*", "trackio/*.db", "tensorboard/events*"):
        assert list(run.glob(kept)), kept


@needs("tensorboard")
def test_a_killed_process_is_warned_about_and_training_goes_on(train, tmp_path):
    then = (
        SENT + "import subprocess; pid = str(os.getpid()); "
        "subprocess.run(['pkill', '-KILL', '-P', pid, '-f', 'ezpz_obs._sinks.helper']); "
        "[(history.record({'loss': 1}), time.sleep(0.01)) for _ in range(100)]; "
    ) + CLOSE
    process = train("tensorboard,csv", then=then)
    _, errors = process.communicate()
    assert process.returncode == 0
    assert "sink tensorboard failed to write: SinkError: its process ended with status -9" in errors
    assert "ezpz-obs replay" in errors
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == 301


@needs("tensorboard")
def test_what_it_was_given_is_sent_where_training_is_killed(train, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    process = train("tensorboard", then=SENT + "time.sleep(60)")
    assert [process.stdout.readline() for _ in range(2)] == ["trained\n", "sent\n"]
    helper = helper_of(process.pid)
    process.kill()
    process.wait()
    until(lambda: not Path("/proc", str(helper)).exists())
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    assert len(events.Scalars("loss")) == 200


@needs("wandb")
def test_signals_to_all_processes_do_not_end_it_and_none_is_left(train):
    process = train("wandb", then=SENT + "time.sleep(5); " + CLOSE)
    assert [process.stdout.readline() for _ in range(2)] == ["trained\n", "sent\n"]
    helper = helper_of(process.pid)
    until(lambda: any("wandb-core" in command for command in children_of(helper).values()))
    services = children_of(helper)
    for which in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        os.kill(helper, which)
    _, errors = process.communicate()
    assert process.returncode == 0
    assert "WARNING" not in errors
    until(lambda: not any(Path("/proc", str(pid)).exists() for pid in (helper, *services)))
