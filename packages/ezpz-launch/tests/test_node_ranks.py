"""The ranks of a node as real processes: who is signalled, who is lost, who hangs where."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ezpz_launch._plan.shim import PROGRAMS
from ezpz_launch._run import processes, stacks
from ezpz_launch._run.launch import RankSettings
from ezpz_launch._run.node_ranks import NodeRanks
from ezpz_launch._run.processes import (
    arguments_of,
    children_of,
    environments_of_other_processes,
    is_running,
)
from ezpz_launch._run.stacks import dump_stacks, find_py_spy, find_python_processes

ID = f"agent-test.{os.getpid()}"  # a session beside this one must not meet ours
RANK_MAIN = [sys.executable, "-I", "-S", os.path.join(PROGRAMS, "rank_main.py")]
VARIABLES = {
    "RANK": "0", "LOCAL_RANK": "0", "NODE_RANK": "0", "LOCAL_WORLD_SIZE": "2",
    "EZPZ_LAUNCHER": "slurm", "EZPZ_CONTROL": RankSettings(ID, 0).to_text(),
}  # fmt: skip
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")


@pytest.fixture
def ranks():
    return NodeRanks(ID)


# signals


@pytest.mark.parametrize("ends_first", [False, True])
def test_the_whole_group_of_a_rank_is_signalled(process, ranks, until, ends_first):
    shell = process("sh", "-c", "sleep 600 & echo $!; wait", stdout=-1)
    child = int(shell.stdout.readline())
    ranks.start(0, shell.pid)
    if ends_first:  # and leaves something in its group
        kill_and_reap(shell)
    ranks.signal(signal.SIGTERM)
    assert ends_first or shell.wait() == -signal.SIGTERM
    until(lambda: not is_running(child))


def test_a_group_of_several_ranks_is_signalled_once(rank, ranks):
    # srun makes one group for all the ranks of a node
    first = rank()
    second = rank(process_group=first.pid)
    for number, child in enumerate((first, second)):
        ranks.start(number, child.pid)
    ranks.signal(signal.SIGUSR1)
    for child in (first, second):
        assert child.stdout.readline() == b"heard\n"
    ranks.kill_ranks()
    assert [child.communicate()[0] for child in (first, second)] == [b"", b""]


def test_sigusr1_waits_for_who_would_only_die_of_it(process, rank, ranks, until, tmp_path):
    imports = f"until [ -e {tmp_path}/go ]; do sleep 0.05; done"
    listens = "trap 'echo heard' USR1; echo ready; while :; do sleep 0.05; done"
    command = ["sh", "-c", f"{imports}; {listens}"]
    shim = process(*RANK_MAIN, *command, stdout=-1, stderr=-3, env={**os.environ, **VARIABLES})
    other = rank(process_group=shim.pid)  # as with srun
    # Until it runs its own program, a child of a shell has that shell's handlers.
    until(lambda: [arguments_of(pid) for pid in children_of(shim.pid)] == [command])
    for number, child in enumerate((shim, other)):
        ranks.start(number, child.pid)
    ranks.signal(signal.SIGUSR1)
    assert other.stdout.readline() == b"heard\n"
    ranks.signal_again()
    (tmp_path / "go").touch()
    assert shim.stdout.readline() == b"ready\n"
    for _ in range(2):
        ranks.signal_again()
    assert shim.stdout.readline() == b"heard\n"
    ranks.kill_ranks()
    assert [child.communicate()[0] for child in (shim, other)] == [b"", b""]


def test_a_group_that_no_rank_leads_is_not_signalled(process, rank, ranks):
    launcher = process("sleep", "60")
    child = rank(process_group=launcher.pid)
    ranks.start(0, child.pid)
    ranks.signal(signal.SIGTERM)
    assert child.wait() == -signal.SIGTERM
    assert launcher.poll() is None


def test_another_process_of_that_number_is_not_signalled(process, ranks):
    child, gone = process("sleep", "60"), process("true")
    gone.wait()
    ranks.start(0, child.pid)
    ranks.start(1, gone.pid)
    ranks._births[child.pid] = "1"  # as if that rank had been born at another time
    ranks.signal(signal.SIGKILL)
    ranks.release_failed_rank(child.pid)
    ranks.kill_ranks()
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.2)


def test_what_left_its_group_is_killed_by_its_mark(process, ranks):
    def marked(launch_id):
        env = {**os.environ, "EZPZ_LAUNCH_ID": launch_id}
        return process("sleep", "60", env=env, process_group=None, start_new_session=True)

    ours, others = marked(ID), [marked(ID + "1"), marked("x" + ID), marked("")]
    plain = process("sleep", "60", env={**os.environ, "OTHER": f"EZPZ_LAUNCH_ID={ID}"})
    ranks.kill_ranks()
    assert ours.wait() == -signal.SIGKILL
    assert [child.poll() for child in (*others, plain)] == [None] * 4


@ON_LINUX
def test_a_program_that_starts_another_in_its_place_is_found_each_time(process, tmp_path):
    """Meanwhile /proc shows an empty environment."""
    script = tmp_path / "again.sh"
    script.write_text('exec sh "$0"\n')
    again = process("sh", str(script), env={"EZPZ_LAUNCH_ID": ID})
    bare, began = process("sleep", "600", env={}), time.monotonic()
    for _ in range(100):
        found = dict(environments_of_other_processes())
        assert found[again.pid].get(b"EZPZ_LAUNCH_ID") == ID.encode()
        assert not any(found[bare.pid])
    assert time.monotonic() - began < 50, "one that stays empty is not waited for: each look, 1 s"


@pytest.mark.parametrize("name", ["PBS_JOBID", "SLURM_JOB_ID"])
def test_a_job_that_a_rank_submitted_is_not_of_the_launch(process, ranks, monkeypatch, name):
    env = {**os.environ, "EZPZ_LAUNCH_ID": ID}
    theirs = process("sleep", "600", env={**env, name: "8"})
    ranks.kill_ranks()  # of no job
    monkeypatch.setenv(name, "7")
    ours, plain = (process("sleep", "600", env=each) for each in ({**env, name: "7"}, env))
    ranks.kill_ranks()
    assert [child.wait() for child in (ours, plain)] == [-signal.SIGKILL] * 2
    assert theirs.poll() is None


def test_release_signals_the_shim_alone(process, ranks):
    shell = process("sh", "-c", "trap 'exit 7' TERM; sleep 600 & echo $!; wait", stdout=-1)
    child = int(shell.stdout.readline())
    ranks.start(0, shell.pid)
    ranks.end(0)
    ranks.release_failed_rank(shell.pid)
    assert shell.wait() == 7
    assert is_running(child)


def test_is_running(process, until, tmp_path):
    program = tmp_path / "x) Z 1 ("  # a name like the end of a name
    shutil.copy(shutil.which("sleep"), program)
    named, waited_for = process(program, "60"), process("true")
    until(lambda: not is_running(waited_for.pid))
    assert waited_for.poll() == 0
    assert [is_running(pid) for pid in (waited_for.pid, named.pid, os.getpid())] == [0, 1, 1]


# ranks that are gone


def kill_and_reap(child):
    child.kill()
    child.wait()


@ON_LINUX
def test_a_rank_is_lost_with_what_started_it_and_gone_with_its_process(process, ranks):
    script = "sleep 600 >&2 & echo $!; wait"
    launcher = process("sh", "-c", script, stdout=-1)
    orphan = int(launcher.stdout.readline())
    other, ended = process("sleep", "600"), process("sleep", "600")
    for rank, pid in enumerate([orphan, other.pid, ended.pid]):
        ranks.start(rank, pid)
    assert ranks.find_missing() == ([], [])
    ranks.end(2)
    kill_and_reap(ended)
    assert ranks.find_missing() == ([], []), "its end was reported"
    kill_and_reap(launcher)
    assert [ranks.find_missing(), ranks.find_missing()] == [([0], []), ([], [])]
    kill_and_reap(other)
    assert [ranks.find_missing(), ranks.find_missing()] == [([], [1]), ([], [])]


@ON_LINUX
def test_a_rank_whose_command_goes_on_without_it_is_lost(process, ranks, until):
    main = process("sh", "-c", "sleep 600; true")
    until(lambda: children_of(main.pid))
    ranks.start(0, main.pid)
    assert ranks.find_missing() == ([], [])
    assert len(ranks.exit_fds) == 1
    kill_and_reap(main)
    assert [ranks.find_missing(), ranks.find_missing()] == [([0], []), ([], [])]
    assert ranks.exit_fds == []


# where ranks hang

HANG = """
import pathlib, sys, time

def waits_for_ever():
    time.sleep(pathlib.Path(sys.argv[1]).touch() or 600)  # one line, however early it is looked at

waits_for_ever()
"""
LINE = HANG.splitlines().index("def waits_for_ever():") + 2


@pytest.fixture
def hang(tmp_path):
    """A script that hangs, and the file that it makes when it does."""
    script = tmp_path / "train.py"
    script.write_text(HANG)
    return [sys.executable, str(script), str(tmp_path / "on")]


@pytest.fixture
def py_spy(process):
    path = find_py_spy()
    if path is None:
        pytest.skip("no py-spy here: pip install py-spy")
    pid = str(process(sys.executable, "-c", "import time; time.sleep(600)").pid)
    for _ in range(20):  # it has to have started
        done = subprocess.run([path, "dump", "--pid", pid], capture_output=True, check=False)
        if done.returncode == 0:
            return path
        time.sleep(0.1)
    pytest.skip(f"py-spy may not trace here: {done.stderr.strip()[:200]}")


@pytest.fixture
def hanging(process, until, tmp_path):
    """Start a shell that stays, as the rank shim does, until these files are there."""

    def start(script, *words, started=("on",), **options):
        line = f"trap : TERM\n{script}\nstatus=$?; exit $status"
        options.setdefault("stderr", subprocess.DEVNULL)
        pid = process("sh", "-c", line, "sh", *words, start_new_session=True,
                      process_group=None, **options).pid  # fmt: skip
        until(lambda: all((tmp_path / name).exists() for name in started))
        return pid

    return start


def test_the_training_below_a_rank_s_process(hanging, hang):
    pid = hanging('"$@"', *hang, "other.py")
    ((found,), workers) = find_python_processes(pid)
    assert (arguments_of(found), workers) == ([*hang, "other.py"], [])


PARENT = """
import multiprocessing, os, pathlib, sys, time

def work(number):
    if number == 0:
        grandchild = multiprocessing.Process(target=rest, args=(9,))
        grandchild.start()
    rest(number)

def rest(number):
    pathlib.Path(sys.argv[1], str(number)).touch()
    time.sleep(600)

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    workers = [multiprocessing.Process(target=work, args=(n,)) for n in range(6)]
    for worker in workers:
        worker.start()
    rest("main")
"""


def test_a_few_workers_come_after_their_parent(hanging, tmp_path, py_spy):
    script = tmp_path / "train.py"
    script.write_text(PARENT)
    words = [sys.executable, str(script), str(tmp_path)]
    pid = hanging('"$@"', *words, started=("0", "1", "2", "3", "4", "5", "9", "main"))
    (first,), others = find_python_processes(pid)
    assert arguments_of(first) == words
    assert len(others) == 4
    assert all("spawn_main" in " ".join(arguments_of(other)) for other in others)
    text = dump_stacks(pid, py_spy, 60)
    assert (text.count("rank's process"), text.count("    rest (")) == (5, 5)


@ON_LINUX
def test_a_training_process_that_renamed_itself(hanging, tmp_path):
    code = (
        "import pathlib, sys, time\n"
        "pathlib.Path('/proc/self/comm').write_text('pt) main')\n"
        "pathlib.Path(sys.argv[1]).touch(); time.sleep(600)"
    )
    pid = hanging('"$@"', sys.executable, "-c", code, tmp_path / "on")
    (found,), _ = find_python_processes(pid)
    assert Path(f"/proc/{found}/comm").read_text() == "pt) main\n"


@ON_LINUX
@pytest.mark.skipif(shutil.which("ps") is None, reason="no ps here")
def test_ps_tells_the_same_as_proc(hanging, hang, monkeypatch):
    pid = hanging('"$@"', *hang)
    ((found,), _) = by_proc = find_python_processes(pid)
    words = arguments_of(found)
    for name in ("exists", "isdir"):  # as where there is no /proc
        monkeypatch.setattr(processes.os.path, name, lambda _: False)
    monkeypatch.setattr(processes, "_read", lambda *_: b"")
    assert arguments_of(found) == words
    assert find_python_processes(pid) == by_proc


def test_the_dump_names_function_and_line_in_text(hanging, hang, py_spy):
    pid = hanging('"$@"', *hang, "\x1b[31m", "x" * 5000)
    ((found,), _) = find_python_processes(pid)
    text = dump_stacks(pid, py_spy, 60)
    heading, second = text.splitlines()[:2]
    assert heading.startswith(f"rank's process {found}: {hang[0]}")
    assert heading.isprintable()
    assert len(heading) < 260
    assert second.startswith("Python")
    assert f"waits_for_ever (train.py:{LINE})" in text
    assert find_python_processes(pid)[0] == [found], "it goes on afterwards"


REFUSED = {
    "refused": "echo 'Error: Permission Denied' >&2; exit 1",
    "panicked": "echo half; exit 101",
    "silent": "exit 0",
    "hangs": "exec sleep 600",
}


def test_no_dump_without_a_python_process_or_a_py_spy_that_works(
    *, hanging, hang, program, tmp_path, py_spy
):
    pid = hanging('touch "$1"; sleep 600', tmp_path / "other", started=("other",))
    assert find_python_processes(pid) == ([], [])
    assert dump_stacks(pid, py_spy, 1.0) is None
    pid = hanging('"$@"', *hang)
    for path in (*(program(how, line) for how, line in REFUSED.items()), "/absent/py-spy"):
        assert dump_stacks(pid, path, 1.0) is None, path
        assert len(find_python_processes(pid)[0]) == 1


def test_without_py_spy_the_training_tells_by_itself(hanging, hang, tmp_path, monkeypatch):
    monkeypatch.setattr(stacks, "find_py_spy", lambda: None)
    with open(tmp_path / "err", "wb") as err:
        env = {**os.environ, "PYTHONFAULTHANDLER": "1"}
        shim = hanging('"$@"', *hang, stderr=err, env=env)
    assert stacks.read_stacks({3: shim}) == ""
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PID, shim, os.WEXITED | os.WNOWAIT)
    assert f'train.py", line {LINE} in waits_for_ever' in (tmp_path / "err").read_text()


def test_py_spy_is_found_on_path_then_beside_python(program, tmp_path, monkeypatch):
    on_path, beside = program("path/py-spy"), program("beside/py-spy")
    monkeypatch.setattr(sys, "executable", f"{tmp_path}/beside/python")
    monkeypatch.setenv("PATH", f"/absent:{tmp_path}/path")
    assert find_py_spy() == on_path
    monkeypatch.setenv("PATH", "")
    assert find_py_spy() == beside
    monkeypatch.setattr(sys, "executable", "/absent/python")
    assert find_py_spy() is None
