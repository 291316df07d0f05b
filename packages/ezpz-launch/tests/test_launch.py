"""The command itself, through a real mpiexec and real ranks; what it tells them, and hears."""

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ezpz_launch import UsageError
from ezpz_launch._launch import ENDING, Control, pause, signals
from ezpz_topo import get_hostname

SHOW = "import os, sys, json; print(json.dumps([sys.argv[1:], dict(os.environ)]) + '\\n', end='')"


def shown(done):
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_place_to_meet_of_the_shell_is_set_aside_in_a_line_and_one_asked_for_is_not(launch):
    env = {"MASTER_ADDR": "elsewhere", "MASTER_PORT": "1"}
    asked = [f"--env={name}={value}" for name, value in env.items()]
    done = launch("-n", "2", *asked, sys.executable, "-c", SHOW, env={**env, "MASTER_PORT": "2"})
    seen = {(seen["MASTER_ADDR"], seen["MASTER_PORT"]) for _, seen in shown(done)}
    assert (seen, done.stderr) == ({("elsewhere", "1")}, "")
    done = launch("-n", "2", sys.executable, "-c", SHOW, env=env)
    line = "MASTER_ADDR=elsewhere and MASTER_PORT=1 of the environment are not used: "
    assert done.stderr.count(line) == 1, done.stderr
    assert {seen["MASTER_ADDR"] for _, seen in shown(done)} == {"127.0.0.1"}
    assert {seen["MASTER_PORT"] for _, seen in shown(done)}.isdisjoint({"1"})
    explained = launch("-n", "2", "--dry-run", "true", env=env)
    assert f"note: {line}" in explained.stdout
    assert "--env MASTER_ADDR=elsewhere --env MASTER_PORT=1" in explained.stdout


@pytest.mark.parametrize("launcher", ["hydra", "spawn"])
@pytest.mark.parametrize("host", ["::1", "127.0.1.1", "own address"])
def test_this_host_by_an_address(launch, tmp_path, launcher, host):
    if host == "own address":
        with socket.socket(type=socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(("203.0.113.9", 9))  # sends nothing
            except OSError:
                pytest.skip("no network: this host has loopback addresses only")
            host = probe.getsockname()[0]
    (tmp_path / "hosts").write_text(f"{host} slots=2\n")
    words = ("--launcher", launcher, "--hostfile", str(tmp_path / "hosts"))
    done = launch(*words, sys.executable, "-c", SHOW, timeout=120)
    assert done.returncode == 0, done.stderr
    names = ("RANK", "LOCAL_RANK", "MASTER_ADDR")
    ranks = sorted([seen[name] for name in names] for _, seen in shown(done))
    assert ranks == [["0", "0", "127.0.0.1"], ["1", "1", "127.0.0.1"]]


def test_arguments_that_are_no_text_and_no_temporary_directory(launch, tmp_path):
    words = ("printf", "%s", b"\xff\xfe")
    done = launch("-n", "1", *words, text=False, env={"TMPDIR": str(tmp_path / "absent")})
    assert (done.returncode, done.stdout, done.stderr) == (0, b"\xff\xfe", b"")


@pytest.mark.parametrize("host", [get_hostname(), "x1n7"])
def test_a_shell_on_a_jobs_node_is_told_of_the_job(
    *, launch, process, program, until, tmp_path, host
):
    shutil.copy(shutil.which("sleep"), tmp_path / "pbs_mom")
    daemon = process(str(tmp_path / "pbs_mom"), "600")
    until(lambda: Path(f"/proc/{daemon.pid}/comm").read_text() == "pbs_mom\n")
    program("qselect", "echo 7.pbs")
    program("qstat", f"echo 'Job Id: 7.pbs'; echo '    exec_host = {host}/0*2+x1n8/0*2'")
    env = {"PATH": f"{os.environ['PATH']}:{tmp_path}", "USER": "alice"}
    done = launch("-n", "1", "true", env=env)
    hint = "this host is a node of your job 7.pbs ("
    assert (done.returncode, hint in done.stderr) == (0, host != "x1n7")
    assert ("for the job's: export PBS_JOBID=7.pbs" in done.stderr) is (host != "x1n7")


def test_ranks_do_not_cut_each_others_lines(launch):
    # Unbuffered, print writes what it is given and the line's end one after the other.
    code = "for _ in range(5000): print('one', 'line')"
    done = launch("-n", "3", sys.executable, "-u", "-c", code)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) == {"one line"}
    assert done.stdout.count("\n") == 15_000


def test_nohup_is_respected(background, until, tmp_path):
    words = ["-n", "2", "sh", "-c", f"touch {tmp_path}/$RANK; exec sleep 600"]
    launch = background(*words, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    until(lambda: len(list(tmp_path.iterdir())) == 2)
    launch.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):  # what must not happen has half a second
        launch.wait(0.5)
    launch.terminate()
    assert launch.wait() == 143


def test_dry_run_explains_and_starts_nothing(launch, tmp_path):
    done = launch("--dry-run", "-n", "2", "touch", str(tmp_path / "started"))
    assert done.returncode == 0
    assert not (tmp_path / "started").exists()
    for text in ("would run:", "-n 2 ", "MASTER_ADDR", "(every rank is on this host)"):
        assert text in done.stdout
    # what it prints can be pasted
    pasted = done.stdout.partition("\n")[2].partition("\n\n")[0]
    assert subprocess.run(pasted, shell=True, check=False).returncode == 0
    assert (tmp_path / "started").exists()


def test_the_launcher_imports_nothing_heavy(clean_env, mpiexec):
    code = (
        "import sys, ezpz_launch\n"
        "assert ezpz_launch.main(['-n', '2', 'true']) == 0\n"
        "print({'torch', 'numpy', 'mpi4py', 'fire', 'asyncio'} & set(sys.modules))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], env=clean_env, capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "set()"


# what the ranks' shims are told


@pytest.mark.parametrize(
    ("fields", "is_pumped"),
    [({}, False), ({"files": "/f"}, False), ({"files": "/f", "prefix": True}, False),
     ({"files": "/f", "tee": True}, True), ({"prefix": True}, True)],
)  # fmt: skip
def test_a_program_pumps_only_where_sh_cannot(fields, is_pumped):
    told = Control("ID.0", 21.4, **fields).value().split("\n")
    assert (told[8] != "-") is is_pumped
    assert (told[1], told[6]) == ("21", "15"), "whole seconds, for any sleep"
    with pytest.raises(UsageError, match="holds a line break; expected a path without one"):
        Control("ID.0", 5, files="/a\nb").value()


# signals


def test_what_arrives_is_kept_in_order_and_wakes():
    with signals() as (arrived, wake):
        subprocess.run(["true"], check=True)  # the end of a child wakes
        assert select.select([wake], [], [], 20)[0]
        os.read(wake, 100)
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert select.select([wake], [], [], 20)[0]
        assert arrived == [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT]
        for _ in range(70_000):  # more than the pipe holds
            signal.raise_signal(signal.SIGUSR1)
        assert len(arrived) == 70_003


def test_everything_is_as_before_and_what_was_ignored_stays_ignored():
    numbers = [*ENDING, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD]
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        before = [signal.getsignal(number) for number in numbers]
        open_before = os.listdir("/proc/self/fd")
        with signals() as (arrived, _):
            os.kill(os.getpid(), signal.SIGHUP)
        assert arrived == []
        assert [signal.getsignal(number) for number in numbers] == before
        assert len(os.listdir("/proc/self/fd")) == len(open_before)
        fd = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(fd)
        assert fd == -1
    finally:
        signal.signal(signal.SIGHUP, previous)


@pytest.mark.parametrize("number", ENDING)
def test_a_pause_is_ended_by_a_signal_but_not_by_sigusr1(number):
    if signal.getsignal(number) is signal.SIG_IGN:  # as of a job in a shell's background
        signal.signal(number, signal.SIG_DFL)
    began = time.monotonic()
    with signals() as heard:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert pause(0.1, heard) == pause(0, heard) == 0
        assert time.monotonic() - began >= 0.1
        timer = threading.Timer(0.1, os.kill, (os.getpid(), number))
        timer.start()
        assert pause(60, heard) == number
        timer.join()
        assert pause(60, heard) == number, "one that has come before"
