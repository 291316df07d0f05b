"""A launch from its log folder to its last attempt, with real ranks of this host."""

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from ezpz_launch import LaunchError, Request
from ezpz_launch._cli import _planned
from ezpz_launch._launch import Outcome
from ezpz_launch._retry import _Attempts, _hostfile, _make_log_dir
from ezpz_topo import detect


@pytest.fixture
def spawned(launch):
    """Run ezpz-launch with the spawner."""

    def run(*words, **options):
        return launch("--launcher", "spawn", *words, **options)

    return run


def test_retries_until_it_succeeds(spawned):
    script = (
        "echo $RANK $EZPZ_ATTEMPT $TORCHELASTIC_RESTART_COUNT $MASTER_PORT; "
        "[ $RANK = 0 ] || [ $EZPZ_ATTEMPT -ge 1 ] || exit 9"
    )
    done = spawned("-n", "2", "--retries", "3", "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    seen = sorted(line.split() for line in done.stdout.splitlines())
    assert [words[:3] for words in seen] == [
        ["0", "0", "0"], ["0", "1", "1"], ["1", "0", "0"], ["1", "1", "1"],
    ]  # fmt: skip
    # ranks of an attempt agree; the next one has another port
    ports = [{words[3] for words in seen if words[1] == attempt} for attempt in "01"]
    assert [len(both) for both in ports] == [1, 1]
    assert ports[0] != ports[1]
    assert "exit status 9: retry 1 of 3 in 1 s" in done.stderr


@pytest.mark.parametrize("value", ["0", "2", "15s", "1.5", "-5", "86401", "\u00b2", "9" * 5000])
def test_a_node_timeout_that_is_none(spawned, value):
    done = spawned("-n", "1", "true", env={"EZPZ_NODE_TIMEOUT": value})
    assert done.returncode == 2
    assert "expected whole seconds, from 3 to 86400" in done.stderr


def test_without_retries_there_is_one_attempt(spawned):
    done = spawned("-n", "1", "sh", "-c", "echo attempt $EZPZ_ATTEMPT; exit 9")
    assert (done.returncode, done.stdout) == (9, "attempt 0\n")


@pytest.mark.parametrize(
    ("script", "ending"),
    [
        ("exit 2", (2, "exit status 2 is a usage error")),
        ("exit 75", (75, "exit status 75 means check-pointed")),
        (f"{sys.executable} -c 'import no_such_module'", (1, "a failed import")),
    ],
)
@pytest.mark.parametrize("options", [(), ("--prefix",), ("--log-dir", "logs")], ids=str)
def test_what_is_not_tried_again(spawned, tmp_path, options, script, ending):
    done = spawned("-n", "1", "--retries", "5", *options, "sh", "-c", script, cwd=tmp_path)
    status, why = ending
    assert done.returncode == status
    assert f"no retry: {why}" in done.stderr


def test_progress_is_what_keeps_it_going(spawned):
    # a step forward, then none: after two more attempts it is given up
    script = 'echo 7 >"$EZPZ_PROGRESS_FILE"; echo attempt $EZPZ_ATTEMPT; exit 9'
    done = spawned("-n", "1", "--retries", "9", "sh", "-c", script, timeout=60)
    assert done.returncode == 9
    assert done.stdout.splitlines() == [f"attempt {number}" for number in range(3)]
    assert "2 attempts in a row without progress (step 7 is the highest)" in done.stderr


@pytest.mark.parametrize(
    "after",
    [
        0.3,
        0,
    ],
)
def test_a_signal_during_the_pause_ends_it(background, clean_env, after):
    script = 'echo $EZPZ_ATTEMPT >"$EZPZ_PROGRESS_FILE"; exit 9'
    launch = background("-n", "1", "--retries", "9", "sh", "-c", script, stderr=-1)
    for line in launch.stderr:
        if b"retry 2 of 9" in line:  # a pause of 2 s
            break
    time.sleep(after)
    launch.terminate()
    assert launch.wait(120) == 143
    assert b"retry 3" not in launch.stderr.read()
    words = [sys.executable, "-m", "ezpz_launch", "history", "--json"]
    told = subprocess.run(words, env=clean_env, capture_output=True, check=True)
    (record,) = __import__("json").loads(told.stdout)
    assert (record["state"], record["exit_status"], record["attempt"]) == ("ended", 143, 1)
    assert record["first_failure"]["status"] == 9


def test_a_signal_while_the_last_bytes_are_read_ends_it(clean_env):
    """A launcher that leaves something behind which goes on writing to our pipe."""
    program = """
import os, sys, threading
from ezpz_launch._launch import Control
from ezpz_launch._launch import Launch
from ezpz_launch import _run as module
from ezpz_launch._run import run
module._DRAINED = 5.0  # a busy machine may be silent for 0.3 s
script = "while echo x; do sleep 0.1; done & exit 9"
launch = Launch(
    argv=("sh", "-c", script), nproc=1, hosts=("localhost",), ppn=1, on_this_host=True,
    environment=dict(os.environ), control=Control("ID.0", 5),
)
threading.Timer(2, os.kill, (os.getpid(), 15)).start()
outcome = run(launch)
sys.stderr.write(repr(outcome.told))
sys.exit(outcome.exit_status)
"""
    done = subprocess.run([sys.executable, "-c", program], env=clean_env, capture_output=True,
                          check=False, timeout=60)  # fmt: skip
    assert b"SIGTERM" in done.stderr
    assert done.returncode == 143


RUN = """
import gc, os, sys, threading
from ezpz_launch._launch import Control
from ezpz_launch._launch import Launch
from ezpz_launch._run import run
from ezpz_launch._plan import SHIM
from ezpz_launch.launchers.spawn import SPAWN
NAMES = ("EZPZ_SPAWN_RANK", "EZPZ_SPAWN_SIZE", "EZPZ_SPAWN_RANK")

def launch(*command, before=(), **more):
    spawn = (sys.executable, "-I", "-S", SPAWN, "-n", "1")
    return Launch(
        argv=(*before, *spawn, "sh", SHIM, "spawn", "1", "1", *NAMES, "--", *command),
        nproc=1, hosts=("localhost",), ppn=1, on_this_host=True,
        environment=dict(os.environ), control=Control("ID.0", 5), **more,
    )
"""


def test_the_next_attempt_keeps_its_files(clean_env):
    program = RUN + (
        "gc.disable()\n"
        "run(launch('true'))\n"
        "files = [os.open('/dev/null', os.O_RDONLY) for _ in range(12)]\n"
        "gc.collect()\n"
        "print([os.path.exists(f'/proc/self/fd/{fd}') for fd in files].count(False))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env=clean_env, capture_output=True,
                          check=False, timeout=60)  # fmt: skip
    assert done.stdout == b"0\n"


def test_attempts_leave_no_file_open(clean_env):
    program = RUN + (
        "counts = []\n"
        "for _ in range(3):\n"
        "    run(launch('true'))\n"
        "    counts.append(len(os.listdir('/proc/self/fd')))\n"
        "print(len(set(counts)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env=clean_env, capture_output=True,
                          check=False, timeout=60)  # fmt: skip
    assert done.stdout == b"1\n", done.stderr


def test_a_signal_before_the_ranks_have_started_reaches_them(clean_env):
    program = f"""{RUN}
threading.Timer(0.3, os.kill, (os.getpid(), 15)).start()
before = ("sh", "-c", 'sleep 0.8; exec "$@"', "_")
script = "trap 'echo heard; exit 9' TERM; echo started; sleep 30 & wait"
sys.exit(run(launch("sh", "-c", script, before=before, grace=4.0)).exit_status)
"""
    done = subprocess.run([sys.executable, "-c", program], env=clean_env, capture_output=True,
                          check=False, timeout=60)  # fmt: skip
    assert done.returncode == 143
    # either it does not start, or it is told
    assert done.stdout in (b"", b"started\nheard\n")


def test_a_log_folder_is_made_and_the_last_words_are_shown(spawned, tmp_path):
    script = "echo out; seq 30 >&2; [ $RANK = 0 ] || exit 7"
    done = spawned("-n", "2", "--log-dir", "a/b", "sh", "-c", script, cwd=tmp_path)
    assert done.returncode == 7
    assert done.stdout == ""
    path = tmp_path / "a" / "b" / "rank-1.err"
    assert (tmp_path / "a" / "b" / "rank-0.out").read_text() == "out\n"
    assert path.read_text().splitlines() == [str(number) for number in range(1, 31)]
    said = done.stderr.splitlines()
    start = said.index(f"ezpz-launch: the end of {path.relative_to(tmp_path)}:")
    assert said[start + 1 : start + 21] == [f"  {number}" for number in range(11, 31)]


def test_last_words_that_are_no_text(spawned, tmp_path):
    script = r"printf '\377\376 last words' >&2; exit 7"
    done = spawned("-n", "1", "--log-dir", str(tmp_path / "logs"), "sh", "-c", script)
    assert "last words" in done.stderr
    assert "\ufffd" in done.stderr


def test_a_log_folder_that_cannot_be_made(spawned, tmp_path):
    (tmp_path / "file").touch()
    done = spawned("-n", "1", "--log-dir", str(tmp_path / "file"), "touch", str(tmp_path / "ran"))
    assert done.returncode == 2
    said = f"--log-dir {tmp_path}/file: File exists; expected a folder that can be written"
    assert done.stderr == f"ezpz-launch: {said}\n"
    assert not (tmp_path / "ran").exists()


QSTAT = """#!/bin/sh
[ -e "{folder}/up" ] || {down}
printf '{{"Jobs": {{"1.pbs": {{"stime": "{stime}", "Resource_List": {{"walltime": "60"}}}}}}}}'
"""


@pytest.mark.parametrize("down", ["exit 1", "exec sleep 60"])
def test_a_scheduler_that_does_not_answer_is_asked_again_while_ranks_run(spawned, tmp_path, down):
    stime = time.strftime("%a %b %d %H:%M:%S %Y", time.gmtime())
    (tmp_path / "qstat").write_text(QSTAT.format(folder=tmp_path, down=down, stime=stime))
    (tmp_path / "qstat").chmod(0o755)
    (tmp_path / "nodes").write_text(os.uname().nodename)
    env = {
        "PBS_JOBID": "1.pbs", "PBS_NODEFILE": str(tmp_path / "nodes"),
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "EZPZ_SCHEDULER_TIMEOUT": "1",
    }  # fmt: skip
    # Its rank runs, and qstat answers only then.
    script = f"trap 'echo heard; exit 0' USR1; touch {tmp_path}/up; while :; do sleep 0.1; done"
    done = spawned("-n", "1", "--signal-before", "50m", "sh", "-c", script, env=env, timeout=120)
    assert (done.returncode, done.stdout) == (0, "heard\n"), done.stderr
    first, *rest = done.stderr.splitlines()
    assert first.startswith("ezpz-launch: --signal-before: "), done.stderr
    assert first.endswith("; the ranks start, and it is asked again until it tells")
    assert "s of the job are left" in rest[0]


FULL = """
mount -t tmpfs -o size=64k none "$1" && mkdir "$1/logs" && cd "$1" && shift
exec "$@"
"""
FILL = "head -c 1000000 /dev/zero >x 2>/dev/null; echo why; exit 3"


@pytest.mark.parametrize("begins", ["full", "with room", "without a file"])
def test_a_log_folder_on_a_full_disk_is_told(clean_env, tmp_path, begins):
    words = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    if subprocess.run([*words, 'mount -t tmpfs none "$0"', tmp_path], check=False).returncode:
        pytest.skip("this user may mount nothing")
    (tmp_path / "disk").mkdir()
    full = {"full": FULL.replace("exec", "head -c 1000000 /dev/zero >x 2>/dev/null; exec")}
    full["without a file"] = FULL.replace("exec", "ln -s /absent/x logs/rank-0.out; exec")
    words += [full.get(begins, FULL), "sh", str(tmp_path / "disk"), sys.executable, "-m"]
    words += ["ezpz_launch", "--launcher", "spawn", "-n", "1", "--log-dir", "logs"]
    done = subprocess.run(
        [*words, "sh", "-c", FILL], env=clean_env, capture_output=True, text=True, check=False
    )
    status, why = {
        "full": (2, "--log-dir logs: No space left on device; expected a folder"),
        "with room": (3, "--log-dir logs: No space left on device; the ranks' last words may"),
        "without a file": (2, "rank-0.out"),
    }[begins]
    assert (done.returncode, done.stderr.count(why)) == (status, 1), done.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_log_folder_that_cannot_be_written(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(LaunchError, match="Permission denied"):
        _make_log_dir(str(tmp_path))


@pytest.fixture
def attempts(clean_env):
    """The attempts of a launch of this host, not begun."""
    request = Request(("true",), 1, launcher="spawn")
    topology = detect(clean_env)
    return _Attempts(_planned(topology, request, clean_env), topology, clean_env)


def test_a_taken_port_is_replaced(attempts):
    ports = []

    def run():
        ports.append(attempts._planned.environment["MASTER_PORT"])
        return Outcome(int(len(ports) < 3), port_taken=len(ports) < 3)

    attempts._run = run
    assert attempts._attempt().exit_status == 0
    assert len(set(ports)) == 3


@pytest.mark.parametrize(
    ("more", "times"),
    [({}, 5), ({"told": signal.SIGTERM}, 1), ({"sources": {"MASTER_PORT": "--env"}}, 1)],
)
def test_ports_are_not_tried_for_ever(attempts, more, times):
    tried = []
    if "sources" in more:
        attempts._planned = replace(attempts._planned, sources=more["sources"])
    told = more.get("told")
    attempts._run = lambda: tried.append(1) or Outcome(1, told=told, port_taken=True)
    assert attempts._attempt().port_taken
    assert len(tried) == times


def test_a_hostfile_that_somebody_removes(attempts, tmp_path, monkeypatch):
    monkeypatch.setattr("ezpz_launch._retry.needs_hostfile", lambda _: True)
    monkeypatch.setattr("ezpz_launch._retry.hostfile_of", lambda _: ["alpha", "beta"])
    with _hostfile(attempts._planned, str(tmp_path)) as ready:
        path = tmp_path / os.path.basename(ready.hostfile)
        assert path.read_text() == "alpha\nbeta\n"
        path.unlink()  # what cleans /tmp finds it old


def test_nowhere_to_write_the_hostfile(attempts, tmp_path, monkeypatch):
    monkeypatch.setattr("ezpz_launch._retry.needs_hostfile", lambda _: True)
    absent = str(tmp_path / "absent")
    with (
        pytest.raises(LaunchError, match="set TMPDIR to one"),
        _hostfile(attempts._planned, absent),
    ):
        pytest.fail("not reached")


def test_a_port_that_a_rank_finds_taken_ends_the_run(clean_env):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = RUN + (
            f"taken = launch('sleep', '60')\n"
            f"taken = taken._replace(control=taken.control._replace(port={port}))\n"
            "outcome = run(taken)\n"
            "print(outcome.port_taken)\n"
        )
        done = subprocess.run([sys.executable, "-c", program], env=clean_env, capture_output=True,
                              check=False, timeout=60)  # fmt: skip
    assert done.stdout == b"True\n", done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_launch_that_was_told_to_end_is_not_tried_again(background, tmp_path, until, number):
    script = f"touch {tmp_path}/$EZPZ_ATTEMPT; exec sleep 600"
    launch = background("-n", "1", "--retries", "3", "sh", "-c", script, stderr=-1)
    until((tmp_path / "0").exists)
    launch.send_signal(number)
    assert launch.wait(120) == 128 + number
    assert not (tmp_path / "1").exists()


def test_old_logs_decide_nothing(spawned, tmp_path):
    (tmp_path / "rank-0.err").write_text("Traceback (most recent call last):\nImportError: old\n")
    options = ("-n", "1", "--retries", "1", "--log-dir", str(tmp_path))
    done = spawned(*options, "sh", "-c", "exit 9")
    assert "old" not in done.stderr
    assert "retry 1 of 1" in done.stderr
