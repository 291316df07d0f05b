"""The command itself, through a real mpiexec and real ranks; what it tells them, and hears."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ezpz_launch._run.processes import is_running
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


def test_this_host_by_an_address(launch, tmp_path):
    (tmp_path / "hosts").write_text("::1 slots=2\n")
    words = ("--launcher", "mpiexec", "--hostfile", str(tmp_path / "hosts"))
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


def test_nothing_outlives_a_launch_that_is_killed(clean_env, mpiexec, process, until, tmp_path):
    script = f"trap '' TERM; echo $$ >{tmp_path}/$RANK; while :; do sleep 0.05; done"
    words = ["--launcher", "mpiexec", "-n", "2", "sh", "-c", script]
    launch = process(sys.executable, "-m", "ezpz_launch", *words, env=clean_env, stdout=-1)
    files = [tmp_path / "0", tmp_path / "1"]
    until(lambda: all(file.exists() and file.read_text().endswith("\n") for file in files))
    launch.kill()
    ranks = [int(file.read_text()) for file in files]
    until(lambda: not any(is_running(pid) for pid in ranks))
    assert launch.stdout.read() == b"", "nothing holds its pipes"


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
