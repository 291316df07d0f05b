"""The table and the JSON of ``ezpz-launch history``, from records on a real disk."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ezpz_launch import LaunchError, UsageError
from ezpz_launch._history import USAGE, command, history
from ezpz_launch._record import Record, Recorder, iso_time, new_id, process_start
from ezpz_topo import get_hostname

START = 1795227043.25


def record(number=0, **changes):
    start = START + 60 * number
    plain = Record(
        id=new_id(start),
        command=("python", "train.py", "--lr", "1e-4", "a b"),
        cwd="/home/alice/run",
        machine="perlmutter",
        scheduler="slurm",
        job_id="12",
        hosts="nid[001-004]",
        nproc=16,
        ppn=4,
        launcher="srun",
        argv=("srun",),
        environment={},
        host=get_hostname(),
        pid=os.getpid(),
        pid_start=process_start(os.getpid()),
        start=iso_time(start),
    )
    return plain._replace(**changes)


@pytest.fixture
def env(tmp_path, monkeypatch):
    with monkeypatch.context() as changed:
        changed.setenv("TZ", "UTC0")
        time.tzset()
        yield {"EZPZ_STATE_DIR": str(tmp_path)}
    time.tzset()


def write(env, *records):
    for one in records:
        recorder = Recorder.start(one, env)
        assert recorder.warning == ""
        if one.exit_status is not None:
            seconds = int(one.cwd.partition("took ")[2] or 0)
            start = START + 60 * records.index(one)
            recorder.finish(one.exit_status, one.first_failure, start + seconds)


def test_the_table(env):
    short = {"machine": "m", "hosts": "nid[001-004]"}
    write(
        env,
        record(0, exit_status=0, cwd="took 7", **short),
        record(1, exit_status=137, cwd="took 754", job_id=None, machine="laptop", hosts="h" * 40),
        record(2, exit_status=3, cwd="took 93784", attempt=2, command=("a" * 100,), **short),
        record(3, **short),
    )
    command = "python train.py --lr 1e-4 'a b'"
    hosts, long = "nid[001-004]            ", f"{'h' * 21}..."
    assert history(env).splitlines() == [
        f"when                 took      exit          ranks  {'hosts':24}  job     command",
        f"2026-11-21 02:10:43  0:07      0             16     {hosts}  m 12    {command}",
        f"2026-11-21 02:11:43  12:34     137           16     {long}  laptop  {command}",
        f"2026-11-21 02:12:43  26:03:04  3, attempt 3  16     {hosts}  m 12    {'a' * 57}...",
        f"2026-11-21 02:13:43            running       16     {hosts}  m 12    {command}",
    ]


def test_the_newest_are_last_and_no_more_than_asked(env):
    write(env, *(record(number, nproc=number + 1) for number in range(25)))
    assert len(history(env).splitlines()) == 21
    told = json.loads(history(env, limit=3, as_json=True))
    assert [one["nproc"] for one in told] == [23, 24, 25]
    assert len(json.loads(history(env, limit=100, as_json=True))) == 25
    with pytest.raises(UsageError, match="limit 0"):
        history(env, limit=0)


@pytest.mark.parametrize("words", [["-n", "2"], ["-n2"], ["-n=2"], ["--limit", "2"], ["--limit=2"]])
def test_the_command(env, words):
    write(env, *(record(number) for number in range(3)))
    assert command(words, env) == history(env, limit=2)
    assert command([*words, "--json"], env) == history(env, limit=2, as_json=True)
    assert command([], env) == history(env)
    page = command(["--help"], env)
    assert page == command(["-h"], env)
    assert page.startswith(f"usage: {USAGE}\n\nexamples:\n  ezpz-launch history ")


@pytest.mark.parametrize(
    "words",
    [["-n"], ["-n", "two"], ["-n", "0"], ["-n=-1"], ["--limit="], ["--jsn"], ["x"], ["-n²"]],
)
def test_the_command_refuses_what_it_does_not_know(env, words):
    with pytest.raises(UsageError, match=r"history: .*expected"):
        command(words, env)


def test_json_has_the_whole_record(env):
    failure = {"rank": 1, "host": "nid001", "status": 7, "how": "exited with status 7"}
    write(env, record(exit_status=7, first_failure=failure, command=("x", "\udcff", "\x1b[2J")))
    (told,) = json.loads(history(env, as_json=True))
    assert (told["state"], told["exit_status"], told["first_failure"]) == ("ended", 7, failure)
    assert told["command"] == ["x", "\\xff", "\x1b[2J"]


def test_no_launches(env, tmp_path):
    told = f"no launches so far; they are recorded in {tmp_path}/launches"
    assert history(env) == told
    assert json.loads(history(env, as_json=True)) == []
    (tmp_path / "launches").mkdir()
    assert history(env) == told


def test_a_command_does_not_move_the_cursor(env):
    write(env, record(exit_status=0, command=("\x1b[2J", "a\nb", "\u202eevil", "é")))
    table = history(env)
    assert len(table.splitlines()) == 2
    assert all(letter.isprintable() for line in table.splitlines() for letter in line)
    assert "é" in table


# Whether it runs.


def state_of(env, one):
    write(env, one)
    (told,) = json.loads(history(env, as_json=True))
    return told["state"]


@pytest.fixture
def process():
    running = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield running
    running.kill()
    running.wait()
    running.stdin.close()


def test_one_that_runs(env, process):
    one = record(pid=process.pid, pid_start=process_start(process.pid))
    assert state_of(env, one) == "running"


def test_one_that_was_killed(env, process):
    one = record(pid=process.pid, pid_start=process_start(process.pid))
    process.kill()
    # not yet waited for, it is in the table of processes still
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert state_of(env, one) == ("never ended" if one.pid_start else "running")
    process.wait()
    (told,) = json.loads(history(env, as_json=True))
    assert told["state"] == "never ended"
    assert "never ended" in history(env)


def test_another_process_with_its_number(env, process):
    assert state_of(env, record(pid=process.pid, pid_start=1)) == "never ended"


@pytest.mark.parametrize(("pid", "state"), [(0, "never ended"), (2**70, "never ended")])
def test_numbers_that_are_no_process(env, pid, state):
    assert state_of(env, record(pid=pid, pid_start=None)) == state


def test_without_the_start_of_the_process(env, process):
    assert state_of(env, record(pid=process.pid, pid_start=None)) == "running"


def test_another_host(env):
    assert state_of(env, record(host="some-other-host")) == "unknown"


# What OpenPBS 23.06 and Slurm 22.05.8 answered about a job that is over, and about one that runs.
OVER = {
    "pbs": ("qstat", "echo qstat: 12 Job has finished, use -x or -H >&2; exit 35"),
    "slurm": ("scontrol", "echo slurm_load_jobs error: Invalid job id specified >&2; exit 1"),
}
RUNS = """echo '{"Jobs":{"12":{"job_state":"R","exec_host":"x1n0/0*2"}}}'"""


@pytest.mark.parametrize(
    ("scheduler", "answer", "state"),
    [
        ("pbs", OVER["pbs"][1], "ended by the scheduler"),
        ("slurm", OVER["slurm"][1], "ended by the scheduler"),
        ("pbs", RUNS, "unknown"),
        ("pbs", "echo cannot connect to server pbs-0001 >&2; exit 111", "unknown"),
    ],
)
def test_another_host_whose_job_is_over(env, tmp_path, scheduler, answer, state):
    command = tmp_path / "bin" / OVER[scheduler][0]
    command.parent.mkdir()
    command.write_text(f"#!/bin/sh\n{answer}\n")
    command.chmod(0o755)
    # asked in a shell of another job
    env |= {"PATH": f"{command.parent}:/usr/bin:/bin", "PBS_JOBID": "3", "PBS_NODEFILE": "/none"}
    assert state_of(env, record(host="some-other-host", scheduler=scheduler)) == state
    assert state in history(env)


# Damage.

DAMAGE = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"{}",
    b"\xff\xfe",
    b"[" * 100_000,
    {"command": "python"},
    {"command": [1]},
    {"start": "soon"},
    {"start": None},
    {"end": "soon"},
    {"nproc": "16"},
    {"pid": None},
    {"hosts": None},
]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: repr(damage)[:30])
def test_a_damaged_file_is_left_out_and_counted(env, tmp_path, damage):
    good = record(exit_status=0)
    write(env, good)
    (path,) = (tmp_path / "launches").iterdir()
    if isinstance(damage, dict):
        damage = json.dumps({**json.loads(path.read_bytes()), **damage}).encode()
    (tmp_path / "launches" / f"{new_id(START + 1)}.json").write_bytes(damage)
    lines = history(env).splitlines()
    assert len(lines) == 3
    assert lines[-1] == f"left out, no record that can be read: 1 file in {tmp_path}/launches"
    assert [one["id"] for one in json.loads(history(env, as_json=True))] == [good.id]


def test_a_fifo_among_the_records_is_left_out(env, tmp_path):
    write(env, record(exit_status=0))
    os.mkfifo(tmp_path / "launches" / f"{new_id(START + 1)}.json")
    code = "from ezpz_launch import main; main(['history'])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True,
        env={**os.environ, **env},
    )  # fmt: skip
    assert "left out, no record that can be read: 1 file" in done.stdout


def test_only_damaged_files(env, tmp_path):
    folder = tmp_path / "launches"
    folder.mkdir()
    for number in range(3):
        (folder / f"{new_id(START + number)}.json").write_text("?")
    (folder / f"{new_id(START)}.json").unlink(missing_ok=True)
    (folder / f"{new_id(START + 9)}.json").mkdir()
    (folder / "notes.json").write_text("not ours")
    (folder / f"{new_id(START)}.progress").write_text("7")
    first, last = history(env).splitlines()
    assert first.startswith("no launches so far")
    assert last.startswith("left out, no record that can be read: 4 files in ")


def test_fields_of_a_later_version_are_passed_on(env, tmp_path):
    write(env, record(exit_status=0))
    (path,) = (tmp_path / "launches").iterdir()
    path.write_text(json.dumps({**json.loads(path.read_text()), "colour": "blue"}))
    assert json.loads(history(env, as_json=True))[0]["colour"] == "blue"


def test_a_folder_that_cannot_be_read(env, tmp_path):
    (tmp_path / "launches").write_text("a file")
    with pytest.raises(LaunchError, match=r"cannot be read .* set EZPZ_STATE_DIR"):
        history(env)
    with pytest.raises(LaunchError, match="HOME='alice'"):
        history({"HOME": "alice"})


def test_nothing_is_made_by_reading(tmp_path):
    history({"EZPZ_STATE_DIR": str(tmp_path / "none")})
    assert list(Path(tmp_path).iterdir()) == []
