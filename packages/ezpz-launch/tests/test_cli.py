"""The command as people use it: plans, launches, exit statuses, streams, launches in launches."""

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec

import pytest

from ezpz_launch import __version__, main
from ezpz_launch._run.processes import is_running

OURS = [sys.executable, "-m", "ezpz_launch"]
SPAWN = [*OURS, "--launcher", "spawn"]


# What is planned.


def test_the_explanation_for_programs(launch, tmp_path):
    def explained(*words):
        return json.loads(launch("--dry-run", "--json", *words).stdout)

    said = explained("-n", "3", "--env", "A=b c", "--grace", "1m", "echo", "x")
    assert (said["nproc"], said["ranks_per_host"], said["hostfile"]) == (3, [3], None)
    assert (said["environment"]["A"], said["sources"]["A"]) == ("b c", "--env")
    assert said["settings"] == {"SIGTERM to SIGKILL": "60 s"}
    assert said["argv"][-2:] == ["echo", "x"]
    # words for the launcher itself
    argv = explained("--launcher-args", "-l --pmi-port 'a b'", "true")["argv"]
    assert argv[argv.index("-l") :][:3] == ["-l", "--pmi-port", "a b"]
    # slots of a hostfile
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    said = explained("--hostfile", str(tmp_path / "hosts"), "true")
    assert said["ranks_per_host"] == [2, 2]
    # another machine from here
    said = explained("--machine", "frontier", "-N", "3", "-n", "17", "--ppn", "8", "true")
    assert (said["machine"], said["launcher"]["kind"]) == ("frontier", "srun")
    assert said["ranks_per_host"] == [8, 8, 1]
    assert said["hostfile"]["lines"].count("node0002") == 8


def test_a_module_and_code(launch):
    assert launch("-n", "1", "-c", "print('x')", "-n", "5").stdout == "x\n"
    done = launch("-n", "1", "-m", "this_module_is_not_there")
    assert done.returncode == 1
    assert "No module named this_module_is_not_there" in done.stderr
    assert sys.executable in launch("--dry-run", "-n", "1", "-m", "train").stdout


@pytest.mark.parametrize(("words", "what"), [
    # of each room one: what it refuses is tested there
    (["--tee", "true"], "--tee: expected --log-dir DIR beside it"),
    ([], "no command"),
    (["--ppn", "1", "-n", "3", "true"], "-n 3 with --ppn 1 on 1 hosts"),
    (["--hostfile", "/nonexistent", "true"], "/nonexistent"),
    (["--machine=aurra", "true"], "did you mean 'aurora'?"),
    (["--dry-run", "--machine", "aurra", "true"], "--machine aurra: no such machine"),
    (["true", "--machine", "aurora"], "EZPZ_MACHINE=atlantis: no such machine"),
    (["--dry-run", "--machine", "aurora", "--hostfile", "f", "true"], "expected no --hostfile"),
    (["true"], "half-set pmi environment: PMI_RANK=1 without PMI_SIZE"),
    (["--dry-run", "bash", "-s"], "'bash -s': bash without a program; "),
])  # fmt: skip
def test_what_makes_no_sense_is_one_line(clean_env, monkeypatch, capsys, words, what):
    env = dict(clean_env)
    if "half" in what:
        env["PMI_RANK"] = "1"
    if "EZPZ_MACHINE" in what:
        env["EZPZ_MACHINE"] = "atlantis"
    monkeypatch.setattr(os, "environ", env)
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("ezpz-launch: ")
    assert what in line


@pytest.mark.parametrize(("words", "status", "what"), [
    (["no-such-program"], 127, "'no-such-program': not found on PATH"),
    (["./train.py"], 126, "try: ezpz-launch python ./train.py"),
    (["--launcher", "srun", sys.executable, "-V"], 127, "no srun on PATH"),
])  # fmt: skip
def test_what_cannot_be_started_is_one_line(launch, tmp_path, words, status, what):
    (tmp_path / "train.py").touch()
    done = launch(*words, env={"PATH": str(tmp_path)}, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (status, "")
    (line,) = done.stderr.splitlines()
    assert what in line


# The process: its exit status, and streams that are closed, full or unread.


@pytest.fixture
def shell(clean_env):
    """Run a line of sh, in which "$@" is ezpz-launch with these words."""

    def run(script, *words):
        return subprocess.run(
            ["sh", "-c", script, "sh", *words], env=clean_env, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    return run


def test_the_script_and_the_module_are_the_same(shell):
    for ours in (["ezpz-launch"], OURS):
        done = shell('"$@"', *ours, "--version")
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{__version__}\n", "")
    done = shell('"$@" | head -n 1', *OURS, "--help")  # of whose page one line is read
    assert done.stdout.startswith("usage: ezpz-launch ")
    assert (done.stdout.count("\n"), done.stderr) == (1, "")


@pytest.mark.parametrize("words", [["--dry-run", "-n", "2", "true"], ["launches"]])
def test_a_page_that_cannot_be_written(shell, words):
    words = [*(OURS if words == ["launches"] else SPAWN), *words]
    # the reader is gone before a word is written
    done = shell('{ sleep 0.3; "$@"; echo $? >&2; } | true', *words)
    assert (done.stdout, done.stderr) == ("", "0\n")
    done = shell('"$@" >&-', *words)
    assert (done.returncode, done.stderr) == (0, "")
    done = shell('"$@" >/dev/full', *words)
    assert done.returncode != 0
    assert done.stderr.startswith("ezpz-launch: ")
    assert "No space left on device" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_folder_that_is_gone_is_told_in_one_line(shell, tmp_path):
    (gone := tmp_path / "gone").mkdir()
    done = shell('cd "$1" && rmdir "$1" && shift && "$@"', gone, *OURS, "-n", "2", "true")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "the current directory cannot be read" in done.stderr


def test_an_error_that_cannot_be_written_is_no_output_either(shell):
    # of a closed standard error Python's own print makes standard output
    done = shell('"$@" 2>&-', *SPAWN, "--frobnicate")
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize("streams", [">&-", "<&- >&-"])
def test_a_launch_with_closed_streams(shell, streams):
    launch = [*SPAWN, "-n", "1", "sh", "-c", "echo hello; echo bad >&2; exit 7"]
    done = shell(f'"$@" {streams}', *launch)
    assert (done.returncode, done.stdout) == (7, "")
    assert done.stderr.count("bad\n") == 1
    lost = "ezpz-launch: standard output is closed: what the ranks write there is lost; "
    assert done.stderr.count(lost) == 1
    done = shell(f'"$@" {streams} 2>&-', *launch)
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")


# Every rank is a launch.

SHOW = "import os, json; print(json.dumps(dict(os.environ)) + '\\n', end='', flush=True)"


def worlds(done):
    """Return what each inner rank says, by the launch that it belongs to."""
    assert done.returncode == 0, done.stderr
    found = {}
    for line in done.stdout.splitlines():
        env = json.loads(line)
        found.setdefault(env["EZPZ_LAUNCH_ID"], []).append(env)
    return list(found.values())


@pytest.mark.parametrize("outer", ["spawn", "mpiexec"])
def test_every_rank_has_a_world_of_its_own(launch, outer):
    inner = [*SPAWN, "--nested", "-n", "2", sys.executable, "-c", SHOW]
    done = launch("--launcher", outer, "-n", "2", *inner, env={"OMPI_MCA_btl": "tcp"})
    found = worlds(done)
    assert len(found) == 2
    for world in found:
        places = sorted((env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"]) for env in world)
        assert places == [("0", "2", "0"), ("1", "2", "1")]
        assert {env["LOCAL_WORLD_SIZE"] for env in world} == {"2"}
        assert len({env["MASTER_PORT"] for env in world}) == 1
        assert {env["OMPI_MCA_btl"] for env in world} == {"tcp"}
        # its ranks are those of no MPI
        assert [name for env in world for name in env if name.startswith("PMI_")] == []


def test_its_mpi_joins_the_inner_world(launch):
    if find_spec("mpi4py") is None:
        pytest.skip("no mpi4py here: pip install mpi4py")
    code = (
        "from mpi4py import MPI; world = MPI.COMM_WORLD; total = world.allreduce(world.rank)\n"
        "print(f'{total} {world.size}\\n', end='')"
    )
    words = (*OURS, "--launcher", "mpiexec", "--nested", "-n", "3", sys.executable, "-c", code)
    done = launch("--launcher", "mpiexec", "-n", "2", *words)
    assert (done.returncode, sorted(done.stdout.split())) == (0, ["3"] * 12), done.stderr


def test_a_world_of_one_needs_no_leave_and_one_of_two_is_refused(spawned):
    # a failure inside is the outer one's
    assert spawned("-n", "2", *SPAWN, "--nested", "-n", "2", "sh", "-c", "exit 9").returncode == 9
    words = [*SPAWN, "-n", "2", sys.executable, "-c", SHOW]
    ((first, second),) = worlds(spawned("-n", "1", *words))
    assert {first["RANK"], second["RANK"]} == {"0", "1"}
    done = spawned("-n", "2", *words)
    assert done.returncode == 2
    assert "this process is rank 0 of 2 already (EZPZ_RANK)" in done.stderr


@pytest.fixture
def four(background, tmp_path, until):
    """Start two launches of two ranks each in another; return it and the four ranks' pids."""
    folder = tmp_path / "pids"
    folder.mkdir()
    script = f"echo $$ >{folder}/$$.new && mv {folder}/$$.new {folder}/$$ && exec sleep 600"

    def start():
        inner = [*SPAWN, "--nested", "-n", "2", "sh", "-c", script]
        outer = background("-n", "2", *inner, stderr=-1)
        until(lambda: len(list(folder.glob("*[0-9]"))) == 4)
        return outer, [int(path.name) for path in folder.iterdir()]

    yield start
    for path in folder.glob("*[0-9]"):
        if is_running(int(path.name)):
            os.kill(int(path.name), signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_outer_one_ends_all_of_it(four, until, number):
    if number == signal.SIGKILL and not os.path.isdir("/proc/self"):
        pytest.skip("the guardian finds them by /proc")
    outer, pids = four()
    outer.send_signal(number)
    assert outer.wait() == (143 if number == signal.SIGTERM else -number)
    until(lambda: not any(map(is_running, pids)))
