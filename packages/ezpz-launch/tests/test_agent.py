"""The ranks of a node as real processes: who is signalled, who is lost, who hangs where."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

import ezpz_launch._run.agent as module
from ezpz_launch._run.agent import Ranks, is_running

ID = f"agent-test.{os.getpid()}"  # a session beside this one must not meet ours
PUMP = str(Path(module.__file__).with_name("rank_output.py"))
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")


@pytest.fixture
def ranks():
    return Ranks(ID)


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
    ranks.kill()
    assert [child.communicate()[0] for child in (first, second)] == [b"", b""]


def test_sigusr1_waits_for_who_would_only_die_of_it(process, rank, ranks, until, tmp_path):
    imports = f"until [ -e {tmp_path}/go ]; do sleep 0.05; done"
    listens = "trap 'echo heard' USR1; echo ready; while :; do sleep 0.05; done"
    command = ["sh", "-c", f"{imports}; {listens}"]
    shim = process("sh", "-c", 'trap : USR1; sh -c "$1"; :', "", command[2], stdout=-1)
    other = rank(process_group=shim.pid)  # as with srun
    # Until it runs its own program, a child of a shell has that shell's handlers.
    until(lambda: [module._words(pid) for pid in module._children_of(shim.pid)] == [command])
    for number, child in enumerate((shim, other)):
        ranks.start(number, child.pid)
    ranks.signal(signal.SIGUSR1)
    assert other.stdout.readline() == b"heard\n"
    ranks.lost()
    (tmp_path / "go").touch()
    assert shim.stdout.readline() == b"ready\n"
    for _ in range(2):
        ranks.lost()
    assert shim.stdout.readline() == b"heard\n"
    ranks.kill()
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
    ranks._born[child.pid] = "1"  # as if that rank had been born at another time
    ranks.signal(signal.SIGKILL)
    ranks.release(child.pid)
    ranks.kill()
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.2)


def test_what_left_its_group_is_killed_by_its_mark(process, ranks):
    def marked(launch_id):
        env = {**os.environ, "EZPZ_LAUNCH_ID": launch_id}
        return process("sleep", "60", env=env, process_group=None, start_new_session=True)

    ours, others = marked(ID), [marked(ID + "1"), marked("x" + ID), marked("")]
    plain = process("sleep", "60", env={**os.environ, "OTHER": f"EZPZ_LAUNCH_ID={ID}"})
    ranks.kill()
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
        found = dict(module._environments())
        assert found[again.pid].get(b"EZPZ_LAUNCH_ID") == ID.encode()
        assert not any(found[bare.pid])
    assert time.monotonic() - began < 50, "one that stays empty is not waited for: each look, 1 s"


@pytest.mark.parametrize("name", ["PBS_JOBID", "SLURM_JOB_ID"])
def test_a_job_that_a_rank_submitted_is_not_of_the_launch(process, ranks, monkeypatch, name):
    env = {**os.environ, "EZPZ_LAUNCH_ID": ID}
    theirs = process("sleep", "600", env={**env, name: "8"})
    ranks.kill()  # of no job
    monkeypatch.setenv(name, "7")
    ours, plain = (process("sleep", "600", env=each) for each in ({**env, name: "7"}, env))
    ranks.kill()
    assert [child.wait() for child in (ours, plain)] == [-signal.SIGKILL] * 2
    assert theirs.poll() is None


def test_release_signals_the_shim_alone(process, ranks):
    shell = process("sh", "-c", "trap 'exit 7' TERM; sleep 600 & echo $!; wait", stdout=-1)
    child = int(shell.stdout.readline())
    ranks.start(0, shell.pid)
    ranks.end(0)
    ranks.release(shell.pid)
    assert shell.wait() == 7
    assert is_running(child)


def test_is_running(process, until, tmp_path):
    program = tmp_path / "x) Z 1 ("  # a name like the end of a name
    shutil.copy(shutil.which("sleep"), program)
    named, waited_for = process(program, "60"), process("true")
    until(lambda: not is_running(waited_for.pid))
    assert waited_for.poll() == 0
    assert [is_running(pid) for pid in (waited_for.pid, named.pid, os.getpid())] == [0, 1, 1]


# ranks that are lost


@pytest.fixture
def shim(rank):
    """Start a shell that stays, as the rank shim does, and goes on after its command."""
    if sys.platform != "linux":
        pytest.skip("only Linux has /proc")

    def start(script="echo ready; sleep 600", number=0, then="true", **options):
        env = {"EZPZ_LAUNCH_ID": ID, "EZPZ_RANK": str(number)}
        return rank("sh", "-c", f"(exec sh -c '{script}; :'); {then}", env=env, **options)

    return start


def kill_and_reap(child):
    child.kill()
    child.wait()


def test_a_shim_that_was_killed_before_its_command_was_seen(shim, ranks):
    child, other = shim(number=1), shim(number=11)
    ranks.start(1, child.pid)
    ranks.start(11, other.pid)
    kill_and_reap(child)
    # the first time it may just be ending
    assert [ranks.lost() for _ in range(4)] == [[], [1], [], []]


def test_a_rank_whose_shim_waits_to_be_released_is_not_lost(shim, ranks):
    child = shim("echo ready", then="echo ended; sleep 600; true")
    ranks.start(0, child.pid)
    assert child.stdout.readline() == b"ended\n"
    assert ranks.lost() == []
    ranks.end(0)
    kill_and_reap(child)
    assert [ranks.lost(), ranks.lost()] == [[], []]


def test_what_a_shim_runs_before_the_command_is_not_taken_for_it(shim, ranks, until):
    # as `uname -n` is, of --prefix
    child = shim("echo ready; read line", then="echo next; sleep 600; true", stdin=-1)
    ranks.start(0, child.pid)
    assert ranks.lost() == []
    child.stdin.write(b"\n")
    child.stdin.flush()
    assert child.stdout.readline() == b"next\n"
    until(lambda: [module._words(pid)[:1] for pid in module._children_of(child.pid)] == [["sleep"]])
    assert ranks.lost() == []
    kill_and_reap(child)
    until(ranks.lost)


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
    path = module.find_py_spy(os.environ["PATH"], sysconfig.get_path("scripts"))
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


LOADED = "import sys; sys.path.append(sys.argv[1]); import rank_output as r; r.main(sys.argv[2:])"


@pytest.mark.parametrize(("script", "between"), [
    ('"$@"', []),
    ('(exec "$@")', [PUMP, "0", "h", "--prefix", "--"]),
    ('"$@"', ["-c", LOADED, os.path.dirname(PUMP), "0", "h", "--"]),
], ids=["alone", "pump", "loaded pump"])  # fmt: skip
def test_the_training_below_the_shim(hanging, hang, script, between):
    pump = [sys.executable, "-I", "-S", *between] if between else []
    pid = hanging(script, *pump, *hang, "rank_output.py")
    ((found,), deeper) = module.python_processes(pid)
    assert (module._words(found), deeper) == ([*hang, "rank_output.py"], [])


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
    (first,), others = module.python_processes(pid)
    assert module._words(first) == words
    assert len(others) == 4
    assert all("spawn_main" in " ".join(module._words(other)) for other in others)
    text = module.dump(pid, py_spy, bound=60)
    assert (text.count("rank's process"), text.count("    rest (")) == (5, 5)


@ON_LINUX
def test_a_training_process_that_renamed_itself(hanging, tmp_path):
    code = (
        "import pathlib, sys, time\n"
        "pathlib.Path('/proc/self/comm').write_text('pt) main')\n"
        "pathlib.Path(sys.argv[1]).touch(); time.sleep(600)"
    )
    pid = hanging('"$@"', sys.executable, "-c", code, tmp_path / "on")
    (found,), _ = module.python_processes(pid)
    assert Path(f"/proc/{found}/comm").read_text() == "pt) main\n"


@ON_LINUX
@pytest.mark.skipif(shutil.which("ps") is None, reason="no ps here")
def test_ps_tells_the_same_as_proc(hanging, hang, monkeypatch):
    pid = hanging('"$@"', *hang)
    ((found,), _) = by_proc = module.python_processes(pid)
    words = module._words(found)
    for name in ("exists", "isdir"):  # as where there is no /proc
        monkeypatch.setattr(module.os.path, name, lambda _: False)
    monkeypatch.setattr(module, "_read", lambda *_: b"")
    assert module._words(found) == words
    assert module.python_processes(pid) == by_proc


def test_the_dump_names_function_and_line_in_text(hanging, hang, py_spy):
    pid = hanging('"$@"', *hang, "\x1b[31m", "x" * 5000)
    ((found,), _) = module.python_processes(pid)
    text = module.dump(pid, py_spy, bound=60)
    heading, second = text.splitlines()[:2]
    assert heading.startswith(f"rank's process {found}: {hang[0]}")
    assert heading.isprintable()
    assert len(heading) < 260
    assert second.startswith("Python")
    assert f"waits_for_ever (train.py:{LINE})" in text
    assert module.python_processes(pid)[0] == [found], "it goes on afterwards"


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
    assert module.python_processes(pid) == ([], [])
    assert module.dump(pid, py_spy, bound=1.0) is None
    pid = hanging('"$@"', *hang)
    for path in (*(program(how, line) for how, line in REFUSED.items()), "/absent/py-spy", None):
        assert module.dump(pid, path, bound=1.0) is None, path
        assert len(module.python_processes(pid)[0]) == 1


def test_without_py_spy_the_training_tells_by_itself(hanging, hang, tmp_path, monkeypatch, ranks):
    monkeypatch.setattr(module, "find_py_spy", lambda *_: None)
    with open(tmp_path / "err", "wb") as err:
        env = {**os.environ, "PYTHONFAULTHANDLER": "1"}
        ranks.start(3, shim := hanging('"$@"', *hang, stderr=err, env=env))
    assert ranks.stacks([2, 3]) == ""
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PID, shim, os.WEXITED | os.WNOWAIT)
    assert f'train.py", line {LINE} in waits_for_ever' in (tmp_path / "err").read_text()


def test_py_spy_is_found_on_path_then_beside(program, tmp_path):
    on_path, beside = program("path/py-spy"), program("beside/py-spy")
    assert module.find_py_spy(f"/absent:{tmp_path}/path", f"{tmp_path}/beside") == on_path
    assert module.find_py_spy("", f"{tmp_path}/beside") == beside
    assert module.find_py_spy("/absent:", "") is None
