"""Real processes below a real shell, as a rank's are, and a real py-spy where there is one."""

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

FOLDER = Path(importlib.util.find_spec("ezpz_launch").origin).parent

# Loaded as the node agent loads it: by its path, without the package.
_spec = importlib.util.spec_from_file_location("_agent", FOLDER / "_agent.py")
_stacks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_stacks)

HANG = """
import pathlib, sys, time

def waits_for_ever():
    pathlib.Path(sys.argv[1]).touch()
    time.sleep(600)

waits_for_ever()
"""
LINE = HANG.splitlines().index("    time.sleep(600)") + 1

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")


@pytest.fixture
def hang(tmp_path):
    """A script that hangs, and the file that it makes when it does."""
    script = tmp_path / "train.py"
    script.write_text(HANG)
    return [sys.executable, str(script)]


@pytest.fixture
def py_spy():
    path = _stacks.find_py_spy(os.environ["PATH"], sysconfig.get_path("scripts"))
    if path is None:
        pytest.skip("no py-spy here: pip install py-spy")
    asked = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        words = [path, "dump", "--pid", str(asked.pid)]
        for _ in range(20):  # it has to have started
            done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
            if done.returncode == 0:
                return path
            time.sleep(0.1)
    finally:
        asked.kill()
        asked.communicate()
    pytest.skip(f"py-spy may not trace here: {done.stderr.strip()[:200]}")


@contextlib.contextmanager
def shim(script, *words, started, **kwargs):
    """A shell that stays, as the rank shim does, once these files are there."""
    process = subprocess.Popen(
        ["sh", "-c", f"trap : TERM\n{script}\nstatus=$?; exit $status", "sh", *words],
        start_new_session=True,
        **kwargs,
    )
    try:
        end = time.monotonic() + 120
        while not all(path.exists() for path in started):
            assert time.monotonic() < end, "it did not start"
            time.sleep(0.02)
        yield process.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def words_of(pid):
    return _stacks._words(pid)


# which processes


def test_the_training_below_the_shim(hang, tmp_path):
    with shim('"$@"', *hang, tmp_path / "on", started=[tmp_path / "on"]) as pid:
        (found,) = _stacks.python_processes(pid)
        assert words_of(found) == [*hang, str(tmp_path / "on")]


def test_a_subshell_and_the_pump_stand_between(hang, tmp_path):
    pump = [sys.executable, "-I", "-S", str(FOLDER / "rank_output.py"), "0", "h", "--prefix", "--"]
    words = [*pump, *hang, tmp_path / "on", "rank_output.py"]
    with shim('(exec "$@")', *words, started=[tmp_path / "on"]) as pid:
        (found,) = _stacks.python_processes(pid)
        assert words_of(found) == [*hang, str(tmp_path / "on"), "rank_output.py"]


def test_the_pump_loaded_as_a_module_is_not_the_training_either(hang, tmp_path):
    code = "import sys; sys.path.append(sys.argv[1]); import rank_output as r; r.run(sys.argv[2:])"
    pump = [sys.executable, "-I", "-S", "-c", code, str(FOLDER), "0", "h", "--"]
    with shim('"$@"', *pump, *hang, tmp_path / "on", started=[tmp_path / "on"]) as pid:
        (found,) = _stacks.python_processes(pid)
        assert words_of(found) == [*hang, str(tmp_path / "on")]


def test_every_branch_and_no_other_program(hang, tmp_path):
    started = [tmp_path / "on1", tmp_path / "on2"]
    script = '"$1" "$2" "$3" & (sh -c \'sleep 600; :\') & "$1" "$2" "$4"; wait'
    with shim(script, *hang, *started, started=started) as pid:
        found = _stacks.python_processes(pid)
        assert {words_of(process)[-1] for process in found} == {str(path) for path in started}


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


def test_a_few_workers_come_after_their_parent(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(PARENT)
    started = [tmp_path / name for name in ("0", "1", "2", "3", "4", "5", "9", "main")]
    words = [sys.executable, script, tmp_path]
    with shim('"$@"', *words, started=started) as pid:
        first, *others = _stacks.python_processes(pid)
        assert words_of(first) == [str(word) for word in words]
        assert len(others) == 4
        assert all("spawn_main" in " ".join(words_of(other)) for other in others)


@ON_LINUX
def test_a_training_process_that_renamed_itself(tmp_path):
    code = (
        "import pathlib, sys, time\n"
        "pathlib.Path('/proc/self/comm').write_text('pt) main')\n"
        "pathlib.Path(sys.argv[1]).touch(); time.sleep(600)"
    )
    words = [sys.executable, "-c", code, tmp_path / "on"]
    with shim('"$@"', *words, started=[tmp_path / "on"]) as pid:
        (found,) = _stacks.python_processes(pid)
        assert Path(f"/proc/{found}/comm").read_text() == "pt) main\n"


def test_none_there(tmp_path):
    with shim('touch "$1"; sleep 600', tmp_path / "on", started=[tmp_path / "on"]) as pid:
        assert _stacks.python_processes(pid) == []
    assert _stacks.python_processes(pid) == []  # the shim has gone


@ON_LINUX
@pytest.mark.skipif(shutil.which("ps") is None, reason="no ps here")
def test_ps_tells_the_same_as_proc(hang, tmp_path):
    with shim('"$@"', *hang, tmp_path / "on", started=[tmp_path / "on"]) as pid:
        (found,) = _stacks.python_processes(pid)
        assert _stacks._by_ps()[found] == _stacks._by_proc()[found] == pid
        assert _stacks._ps("-wwo", "command=", "-p", str(found)).split() == words_of(found)
        assert _stacks._ps("-wwo", "comm=", "-p", str(found)).startswith("python")


# their stacks


def test_the_dump_names_function_and_line(hang, tmp_path, py_spy):
    with shim('"$@"', *hang, tmp_path / "on", started=[tmp_path / "on"]) as pid:
        (found,) = _stacks.python_processes(pid)
        text = _stacks.dump(pid, py_spy)
        command = " ".join([*hang, str(tmp_path / "on")])
        shown = command if len(command) <= 200 else f"{command[:197]}..."
        assert text.startswith(f"rank's process {found}: {shown}\nPython")
        assert f"waits_for_ever (train.py:{LINE})" in text
        # it goes on afterwards
        assert _stacks.python_processes(pid) == [found]


def test_the_dump_of_training_and_workers(tmp_path, py_spy):
    script = tmp_path / "train.py"
    script.write_text(PARENT)
    started = [tmp_path / name for name in ("0", "1", "2", "3", "4", "5", "9", "main")]
    with shim('"$@"', sys.executable, script, tmp_path, started=started) as pid:
        text = _stacks.dump(pid, py_spy)
    assert text.count("rank's process") == 5
    assert text.count("    rest (") == 5


def test_the_heading_is_one_line_of_text(tmp_path, py_spy):
    code = "import pathlib, sys, time\npathlib.Path(sys.argv[1]).touch()\ntime.sleep(600)"
    words = [sys.executable, "-c", code, tmp_path / "on", "\x1b[31m", "x" * 5000]
    with shim('"$@"', *words, started=[tmp_path / "on"]) as pid:
        heading = _stacks.dump(pid, py_spy).splitlines()[0]
    assert "time.sleep(600)" in heading
    assert heading.isprintable()
    assert len(heading) < 260


REFUSED = {
    "refused": "echo 'Error: Permission Denied' >&2; exit 1",
    "panicked": "echo half; exit 101",
    "silent": "exit 0",
    "absent": None,
    "hangs": "exec sleep 600",
}


@pytest.mark.parametrize("how", REFUSED)
def test_no_dump_without_a_py_spy_that_works(hang, tmp_path, how):
    path = tmp_path / "py-spy"
    if REFUSED[how] is not None:
        path.write_text(f"#!/bin/sh\n{REFUSED[how]}")
        path.chmod(0o755)
    began = time.monotonic()
    with shim('"$@"', *hang, tmp_path / "on", started=[tmp_path / "on"]) as pid:
        assert _stacks.dump(pid, str(path), bound=1.0) is None
        assert len(_stacks.python_processes(pid)) == 1
    assert time.monotonic() - began < 120


def test_no_dump_without_py_spy(hang, tmp_path):
    with shim('"$@"', *hang, tmp_path / "on", started=[tmp_path / "on"]) as pid:
        assert _stacks.dump(pid, None) is None


def test_no_dump_without_a_python_process(tmp_path, py_spy):
    with shim('touch "$1"; sleep 600', tmp_path / "on", started=[tmp_path / "on"]) as pid:
        assert _stacks.dump(pid, py_spy) is None


def test_without_py_spy_the_training_tells_by_itself(hang, tmp_path):
    with (
        open(tmp_path / "err", "wb") as err,
        shim(
            '"$@"', *hang, tmp_path / "on", started=[tmp_path / "on"],
            stderr=err, env={**os.environ, "PYTHONFAULTHANDLER": "1"},
        ) as pid,
    ):  # fmt: skip
        for process in _stacks.python_processes(pid):
            os.kill(process, signal.SIGABRT)
        end = time.monotonic() + 120
        while _stacks.python_processes(pid):
            assert time.monotonic() < end, "it goes on"
            time.sleep(0.02)
    assert f'train.py", line {LINE} in waits_for_ever' in (tmp_path / "err").read_text()


# py-spy


def test_py_spy_is_found_on_path_then_beside(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "py-spy").write_text("#!/bin/sh\n")
    (tmp_path / "d" / "py-spy").mkdir(parents=True)
    for name in ("b", "c"):
        (tmp_path / name / "py-spy").chmod(0o755)
    path = f"{tmp_path / 'absent'}:{tmp_path / 'd'}:{tmp_path / 'a'}:{tmp_path / 'b'}"
    assert _stacks.find_py_spy(path, str(tmp_path / "c")) == str(tmp_path / "b" / "py-spy")
    assert _stacks.find_py_spy("", str(tmp_path / "c")) == str(tmp_path / "c" / "py-spy")
    assert _stacks.find_py_spy(f"{tmp_path / 'a'}:", "") is None
